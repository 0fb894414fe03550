# SPDX-License-Identifier: Apache-2.0
"""Find a torch model's layers and describe all its tensors as `pack.TensorSpec`s. Nothing here changes the model.

The functions see parameters and buffers. A tensor that is a plain attribute of a module stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from remap.errors import InvalidArgument
from remap.model.pack import TensorSpec, span_bytes
from remap.sizes import shown

__all__ = [
    "BASE_ALIGNMENT",
    "KNOWN_LAYER_PATHS",
    "Registration",
    "collect",
    "dtype_name",
    "find_layers",
    "registrations",
    "resolve_layers",
    "span_of",
    "tensors_of",
]

KNOWN_LAYER_PATHS = (
    "model.layers",  # Llama, Mistral, Qwen, Gemma, Phi, and most others
    "model.decoder.layers",  # OPT
    "model.language_model.layers",  # multimodal models
    "language_model.model.layers",
    "transformer.h",  # GPT-2, GPT-J, Falcon, Bloom
    "transformer.blocks",  # MPT
    "gpt_neox.layers",  # GPT-NeoX, Pythia
    "layers",  # the same families without a head
    "decoder.layers",
    "h",
)
BASE_ALIGNMENT = 16  # bytes: the largest itemsize (complex128); every allocator gives at least this


def find_layers(model: nn.Module) -> str:
    """Dotted path of the transformer's layer list: the first of `KNOWN_LAYER_PATHS` that is a list of modules in
    `model`.

    Raises InvalidArgument (field candidates: {path: length} of the model's lists) if there is none.
    """
    lists = _module_lists(model)
    for path in KNOWN_LAYER_PATHS:
        if path in lists:
            return path
    raise InvalidArgument(
        f"found no layer list in {type(model).__name__}: tried {', '.join(KNOWN_LAYER_PATHS)}. Nothing was changed; "
        f"pass layers= as one of its module lists {_describe(lists)}",
        candidates=lists,
    )


def resolve_layers(model: nn.Module, layers: str | Sequence[nn.Module] | nn.ModuleList) -> tuple[nn.Module, ...]:
    """The layer modules in order. layers: a dotted path in `model`, a ModuleList, a Sequential, or a list of modules.

    Raises InvalidArgument if the path is unknown, or if the list is empty, holds an object that is not a module, or
    holds one module twice. Does not check that the modules belong to `model`; `collect` does.
    """
    if isinstance(layers, str):
        found: object = model
        for name in layers.split("."):
            found = getattr(found, name, None)
        if not isinstance(found, nn.ModuleList | nn.Sequential | list | tuple):
            lists = _module_lists(model)
            raise InvalidArgument(
                f"{type(model).__name__} has no list of layers at {shown(layers)}. Nothing was changed; its module lists "
                f"are {_describe(lists)}",
                path=layers,
                candidates=lists,
            )
        modules = tuple(found)
    else:
        modules = tuple(layers)
    if not modules:
        raise InvalidArgument("the list of layers is empty. Nothing was changed; pass at least one layer", layers=0)
    first: dict[int, int] = {}
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise InvalidArgument(
                f"layers[{index}] is a {type(module).__name__}, expected a torch module. Nothing was changed",
                index=index,
            )
        if id(module) in first:
            raise InvalidArgument(
                f"layers[{index}] is the same module as layers[{first[id(module)]}]. Nothing was changed; a layer that "
                "is used twice cannot be streamed: leave it out of layers= so that it stays resident",
                index=index,
                first=first[id(module)],
            )
        first[id(module)] = index
    return modules


class Registration(NamedTuple):
    """One name in a module's registry (its dict of parameters, buffers or modules), and the object that has it now. layer: the
    index of the layer that the module is in, None outside of the layers."""

    path: str
    layer: int | None
    kind: str
    registry: Mapping[str, Any]
    name: str
    value: Any


def registrations(model: nn.Module, layers: Sequence[nn.Module] = ()) -> Iterator[Registration]:
    """Everything that is registered below `model`, under each of its paths, in the order of registration."""
    index_of = {id(module): index for index, module in enumerate(layers)}

    def below(module: nn.Module, prefix: str, layer: int | None) -> Iterator[Registration]:
        kinds = (("parameter", module._parameters), ("buffer", module._buffers), ("module", module._modules))
        for kind, registry in kinds:
            for name, value in registry.items():
                if value is not None:
                    yield Registration(prefix + name, layer, kind, registry, name, value)
                if isinstance(value, nn.Module):
                    yield from below(value, f"{prefix}{name}.", index_of.get(id(value), layer))

    return below(model, "", index_of.get(id(model)))


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Path -> parameter or buffer, under each of its paths."""
    return {each.path: each.value for each in registrations(model) if each.kind != "module"}


def collect(
    model: nn.Module, layers: str | Sequence[nn.Module] | nn.ModuleList, *, device: str | torch.device | None = None
) -> list[TensorSpec]:
    """Specs of every registered name of every parameter and buffer of `model`, in the order of registration.

    device: all tensors must be on it; by default the first tensor's device. `TensorSpec.storage` counts from 0 in order
    of first appearance, so equal models give equal specs. Two torch storages that show the same bytes count as one.
    Changes nothing.

    Raises InvalidArgument for an unknown path or a bad list (`resolve_layers`); for a layer outside of `model` or
    inside another layer; and for a tensor (field path) that is on another device (fields device, expected), on meta,
    sparse, quantised, lazy, wrapped by a tensor subclass, conjugated, or whose storage was freed.
    """
    modules = resolve_layers(model, layers)
    index_of = {id(module): index for index, module in enumerate(modules)}
    entries: list[tuple[str, int | None, str, torch.Tensor]] = []
    seen = {index_of[id(model)]} if id(model) in index_of else set()
    for each in registrations(model, modules):
        index = index_of.get(id(each.value))
        if each.kind != "module":
            entries.append((each.path, each.layer, each.kind, each.value))
        elif index is not None:
            if each.layer is not None and each.layer != index:
                raise InvalidArgument(
                    f"layers[{index}] is inside layers[{each.layer}]. Nothing was changed; pass only the outer ones",
                    index=index,
                    outer=each.layer,
                )
            seen.add(index)
    lost = sorted(set(range(len(modules))) - seen)
    if lost:
        raise InvalidArgument(
            f"layers[{lost[0]}] is not part of the model. Nothing was changed; pass the model that owns the layers",
            index=lost[0],
        )
    expected = torch.device(device) if device is not None else None
    for path, _, _, tensor in entries:
        _check_tensor(path, tensor, expected)
        expected = expected or tensor.device
    places = _locate_memory([tensor for _, _, _, tensor in entries])
    return [
        TensorSpec(
            path=path,
            layer=layer,
            kind=kind,
            dtype=dtype_name(tensor),
            itemsize=tensor.element_size(),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            storage=storage,
            storage_offset_bytes=offset,
            span_bytes=span_of(tensor),
        )
        for (path, layer, kind, tensor), (storage, offset) in zip(entries, places, strict=True)
    ]


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype without "torch."."""
    return str(tensor.dtype).removeprefix("torch.")


def span_of(tensor: torch.Tensor) -> int:
    """Bytes from the tensor's first element to the end of its last one."""
    return span_bytes(tensor.shape, tensor.stride(), tensor.element_size())


def _locate_memory(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """(number of the memory, bytes from its start) of each tensor. Two numbers are equal exactly if memory is shared.

    Comparing torch's storages is not enough: two of them may show the same bytes (from_numpy or from_blob used twice).
    """
    keys: list[tuple[str, int]] = []
    spans: list[tuple[int, int, tuple[str, int]]] = []
    for tensor in tensors:
        if not span_of(tensor):
            keys.append(("empty", id(tensor)))
            continue
        keys.append(("storage", tensor.untyped_storage()._cdata))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + span_of(tensor), keys[-1]))
    parent = {key: key for key in keys}

    def root(key: tuple[str, int]) -> tuple[str, int]:
        while parent[key] != key:
            key = parent[key]
        return key

    reach, last = 0, keys[0] if keys else ("empty", 0)
    for start, end, key in sorted(spans):
        if start < reach:
            parent[root(key)] = root(last)
        if end > reach:
            reach, last = end, key
    base: dict[tuple[str, int], int] = {}
    merged = {root(key) for key in parent if root(key) != key}
    for tensor, key in zip(tensors, keys, strict=True):
        if key[0] == "storage":
            start = tensor.untyped_storage().data_ptr()
            # Several storages have no common start: take an aligned one, so that no view becomes misaligned.
            start -= start % BASE_ALIGNMENT if root(key) in merged else 0
            base[root(key)] = min(start, base.get(root(key), start))
    number: dict[tuple[str, int], int] = {}
    return [
        (number.setdefault(root(key), len(number)), tensor.data_ptr() - base[root(key)] if key[0] == "storage" else 0)
        for tensor, key in zip(tensors, keys, strict=True)
    ]


def _check_tensor(path: str, tensor: torch.Tensor, expected: torch.device | None) -> None:
    wrong = ""
    wrapped: bool = is_traceable_wrapper_subclass(tensor)
    if nn.parameter.is_lazy(tensor):
        wrong = "is a lazy parameter without a shape yet: run one forward pass first"
    elif tensor.is_meta:
        wrong = "is on the meta device and has no bytes: load the weights first"
    elif wrapped:
        wrong = f"is wrapped by the tensor subclass {type(tensor).__name__}, whose bytes are elsewhere: unwrap it"
    elif tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        wrong = f"is not a plain strided tensor (layout {tensor.layout}): make it dense"
    elif tensor.is_conj() or tensor.is_neg():
        wrong = "is a lazily conjugated or negated view: resolve it with resolve_conj() or resolve_neg()"
    elif expected is not None and (
        tensor.device.type != expected.type or (expected.index is not None and tensor.device.index != expected.index)
    ):
        wrong = f"is on {tensor.device}, expected {expected}: move the model to one device"
    elif tensor.untyped_storage().nbytes() < tensor.storage_offset() * tensor.element_size() + span_of(tensor):
        wrong = "has a storage smaller than itself (freed or sharded): gather it first"
    if wrong:
        raise InvalidArgument(
            f"{path} {wrong}. Nothing was changed",
            path=path,
            device=str(tensor.device),
            expected=str(expected) if expected is not None else None,
        )


def _module_lists(model: nn.Module) -> dict[str, int]:
    return {
        path: len(module)
        for path, module in model.named_modules(remove_duplicate=False)
        if path and isinstance(module, nn.ModuleList) and len(module) > 0
    }


def _describe(lists: Mapping[str, int]) -> str:
    return ", ".join(f"{path} ({count} modules)" for path, count in lists.items()) or "(none)"
