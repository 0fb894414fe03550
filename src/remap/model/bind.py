# SPDX-License-Identifier: Apache-2.0
"""Torch glue: find a model's tensors, copy their bytes into packed memory, and point the model at that memory.

Call `find.collect`, `pack.build`, `master.make_master` (optional), `fill` for the resident layers, and `install`, in
this order; call `restore` before the memory goes away. A tensor keeps its identity throughout: these functions exchange
only the memory behind it (`tensor.data = view`), for buffers as well as for parameters, so tied names, optimisers,
hooks and other references to the same object stay right.

find.py finds and describes the tensors; this module re-exports its functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from remap.errors import InvalidArgument, InvalidState
from remap.model.find import BASE_ALIGNMENT, collect, dtype_name, find_layers, resolve_layers, span_of
from remap.model.pack import LayerLayout, Layout, Placed, TensorSpec

__all__ = [
    "WriteWatch",
    "changed",
    "collect",
    "fill",
    "find_layers",
    "install",
    "own_copy",
    "resolve_layers",
    "restore",
]


def fill(part: LayerLayout, model: nn.Module, destination: torch.Tensor) -> None:
    """Copy the present bytes of the part's tensors into `destination` (1-D uint8, any device).

    Does not write the bytes between tensors, and does not change the model. Raises InvalidArgument if `destination` is
    unsuitable or a tensor no longer matches its spec.
    """
    _check_storage(part, destination)
    targets = _targets(model, part)
    with torch.inference_mode(False), torch.no_grad():
        memory = _as_bytes(destination)
        for target in targets:
            start = target.placed.offset
            source = _as_bytes(target.tensor)
            memory[start : start + source.numel()].copy_(source)


def install(model: nn.Module, layout: Layout, storages: Sequence[torch.Tensor], rest: torch.Tensor) -> None:
    """Point every parameter and buffer of `model` at `storages` (one per layer) and `rest`: 1-D uint8, one device.

    Copies nothing: fill the storages before the next forward pass. Tensor objects, `requires_grad`, strides, ties and
    version counters do not change. Raises InvalidArgument, and leaves the model as it was, if a storage is too short,
    misaligned, of another type or device, or overlaps another, or if a tensor does not match its spec.
    """
    everything = _storages(layout, storages, rest)
    targets = [
        (target, storage)
        for part, storage in zip(layout.parts, everything, strict=True)
        for target in _targets(model, part)
    ]
    _exchange([(target.tensor, storage, target.placed.offset) for target, storage in targets])


def restore(
    model: nn.Module,
    layout: Layout,
    storages: Sequence[torch.Tensor],
    rest: torch.Tensor,
    *,
    sources: Mapping[int, torch.Tensor] | None = None,
    device: str | torch.device | None = None,
) -> list[str]:
    """Move an installed model back onto ordinary torch memory, so that the storages can be freed.

    storages, rest: as passed to `install`. sources: layer -> 1-D uint8 tensor that the layer's bytes are copied from
    instead (its master copy; needed for streamed layers, whose regions may show another layer). device: of the new
    memory; by default the device of the storages. Each original storage becomes one new storage, so ties and
    overlapping views stay.

    Returns the paths that were skipped because the model has replaced their tensors since (`module.x = other`,
    `.to()`). Raises InvalidArgument for unsuitable storages or sources, and InvalidState if a tensor points into a
    storage at another place than `install` gave it; in both cases the model has not changed.
    """
    everything = _storages(layout, storages, rest)
    skipped: list[str] = []
    exchange: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for part, storage in zip(layout.parts, everything, strict=True):
        source = storage
        if part.index is not None and sources is not None and part.index in sources:
            source = sources[part.index]
            _check_storage(part, source)
        groups: dict[int, list[_Target]] = {}
        for placed in part.tensors:
            tensor = _lookup(model, placed.spec.path)
            if tensor is not None and _is_at(tensor, placed, storage):
                groups.setdefault(placed.spec.storage, []).append(_Target(placed, tensor))
            elif tensor is not None and _points_into(tensor, storage):
                raise InvalidState(
                    f"{placed.spec.path} points into the memory of its layer, at another place than it was installed "
                    "at. The model has not changed; give the tensor memory of its own (clone it), then restore again",
                    path=placed.spec.path,
                )
            else:
                skipped.append(placed.spec.path)
        for members in groups.values():
            spans = [(t.placed.offset, t.placed.spec.span_bytes) for t in members if t.placed.spec.span_bytes]
            start = min((first for first, _ in spans), default=0)
            start -= start % BASE_ALIGNMENT  # keeps every view aligned in the new memory
            end = max((first + size for first, size in spans), default=0)
            with torch.inference_mode(False), torch.no_grad():
                home = torch.empty(end - start, dtype=torch.uint8, device=device or storage.device)
                home.copy_(source[start:end])
            exchange.extend((t.tensor, home, max(t.placed.offset - start, 0)) for t in members)
    _exchange(exchange)
    return skipped


def changed(part: LayerLayout, model: nn.Module, master: torch.Tensor) -> list[str]:
    """Paths of the part whose bytes in `model` now differ from those in `master` (1-D uint8, packed as the part).

    This answer is exact, where `WriteWatch` compares version counters. Call it before a layer is streamed for the first
    time if the model may write its weights in ways that autograd does not see. Changes nothing.
    """
    _check_storage(part, master)
    found = []
    for target in _targets(model, part):
        mine = _as_bytes(target.tensor)
        start = target.placed.offset
        if not torch.equal(mine.cpu(), master[start : start + mine.numel()].cpu()):
            found.append(target.placed.spec.path)
    return found


def own_copy(source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`like`'s dtype, shape and stride over a new copy of `source` (1-D uint8, `like`'s span), on the device of
    `source`.
    """
    with torch.inference_mode(False), torch.no_grad():
        home = torch.empty(source.numel(), dtype=torch.uint8, device=source.device)
        home.copy_(source)
        return _show(home, like.dtype, 0, like.shape, like.stride())


_version_of = attrgetter("_version")


class WriteWatch:
    """Reports the layer tensors that the model wrote in place, or replaced, since this object was made.

    Make it after `install`. A layer that was written must stay resident: a streamed layer's bytes come from its master
    copy, which no later write changes. The watch compares autograd's version counters, so it sees every in-place operation of
    torch, also under no_grad and inference_mode. It does not see writes through `tensor.data`, numpy or DLPack, or by
    kernels that do not announce them, such as those of batch norm's running statistics; therefore, when one buffer of a
    module has changed, all buffers of that module are reported. `changed` compares bytes and is exact.

    untracked: layer -> paths of inference tensors (made under inference_mode), for which torch keeps no version.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model = model
        self._watched: list[tuple[int, TensorSpec, torch.Tensor, int]] = []
        self.untracked: dict[int, list[str]] = {}
        # written_in() compares, for each layer: the tensors and their versions; and, for the tensors and the modules on
        # the way to them, the dicts that they are registered in, their names there, and the objects. While nothing has
        # changed it therefore looks up no dotted name.
        self._look: list[tuple[list[torch.Tensor], list[int], list[Any], list[str], list[Any]]] = []
        for index, layer in enumerate(layout.layers):
            tensors: list[torch.Tensor] = []
            registered: dict[str, tuple[Any, str, Any]] = {}
            for target in _targets(model, layer):
                spec, tensor = target.placed.spec, target.tensor
                if tensor.is_inference():
                    self.untracked.setdefault(index, []).append(spec.path)
                    continue
                self._watched.append((index, spec, tensor, tensor._version))
                tensors.append(tensor)
                *prefix, name = spec.path.split(".")
                owner, path = model, ""
                for child in prefix:
                    path = f"{path}.{child}"
                    inner = owner.get_submodule(child)
                    registered[path] = (owner._modules, child, inner)
                    owner = inner
                registry = owner._parameters if owner._parameters.get(name) is tensor else owner._buffers
                registered[f"{path}.{name}"] = (registry, name, tensor)
            dicts, names, objects = ([each[i] for each in registered.values()] for i in range(3))
            self._look.append((tensors, [tensor._version for tensor in tensors], dicts, names, objects))

    def written(self) -> dict[int, list[str]]:
        """layer -> paths, in layout order, for the layers that were written. Reads no tensor's bytes."""
        return self._written(self._watched)

    def written_in(self, layers: Collection[int], *, replaced: bool = True) -> dict[int, list[str]]:
        """As `written`, for these layers only (an unknown layer has no tensors). replaced: also tensors in whose place the model
        has others now, of which no byte has changed.

        It takes a few microseconds per layer while nothing was written: the session calls it just before layers are
        streamed, on the way from demand to usable KV blocks, and after each pass that streamed some.
        """
        touched = {layer for layer in layers if self._touched(layer)}
        if not touched:
            return {}
        return self._written([watched for watched in self._watched if watched[0] in touched], replaced)

    def _touched(self, layer: int) -> bool:
        """Whether a tensor of the layer was written or replaced."""
        if not 0 <= layer < len(self._look):
            return False
        tensors, versions, dicts, names, objects = self._look[layer]
        return list(map(_version_of, tensors)) != versions or not all(map(is_, map(dict.get, dicts, names), objects))

    def _written(
        self, watched: Sequence[tuple[int, TensorSpec, torch.Tensor, int]], replaced: bool = True
    ) -> dict[int, list[str]]:
        paths: set[str] = set()
        modules: set[str] = set()
        for _, spec, tensor, version in watched:
            if tensor._version != version or (replaced and _lookup(self._model, spec.path) is not tensor):
                paths.add(spec.path)
                if spec.kind == "buffer":
                    modules.add(spec.path.rpartition(".")[0])
        found: dict[int, list[str]] = {}
        for index, spec, _, _ in watched:
            if spec.path in paths or (spec.kind == "buffer" and spec.path.rpartition(".")[0] in modules):
                found.setdefault(index, []).append(spec.path)
        return found


# --- one tensor --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Target:
    """A placed tensor and the object that is registered under its path now."""

    placed: Placed
    tensor: torch.Tensor


def _show(
    like: torch.Tensor, dtype: torch.dtype, first_byte: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor over `like`'s torch storage, from `first_byte` of it.

    A slice of `like` would be an inference tensor if `like` is one. A new tensor follows the mode that is on now.
    """
    made = torch.empty(0, dtype=dtype, device=like.device)
    return made.set_(like.untyped_storage(), first_byte // dtype.itemsize, tuple(shape), tuple(stride))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's span as a 1-D uint8 tensor on the same memory."""
    return _show(tensor, torch.uint8, int(tensor.storage_offset()) * tensor.element_size(), (span_of(tensor),), (1,))


def _view(storage: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """`like`'s dtype, shape and stride over `storage` (1-D uint8) at `offset` bytes."""
    return _show(storage, like.dtype, int(storage.storage_offset()) + offset, like.shape, like.stride())


def _lookup(model: nn.Module, path: str) -> torch.Tensor | None:
    prefix, _, name = path.rpartition(".")
    try:
        module = model.get_submodule(prefix)
    except AttributeError:
        return None
    found = module._parameters.get(name)
    return found if found is not None else module._buffers.get(name)


def _matches(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    return (
        tuple(tensor.shape) == spec.shape and tuple(tensor.stride()) == spec.stride and dtype_name(tensor) == spec.dtype
    )


def _targets(model: nn.Module, part: LayerLayout) -> list[_Target]:
    """The tensors that are registered under the part's paths now.

    Raises InvalidArgument if one does not match its spec.
    """
    targets = []
    for placed in part.tensors:
        tensor = _lookup(model, placed.spec.path)
        if tensor is None or not _matches(tensor, placed.spec):
            raise InvalidArgument(
                f"{placed.spec.path} is not the tensor that the layout was made for: expected {placed.spec.dtype} "
                f"{placed.spec.shape} with stride {placed.spec.stride}. Nothing was changed; make a new layout "
                "(collect, build)",
                path=placed.spec.path,
            )
        targets.append(_Target(placed, tensor))
    return targets


def _is_at(tensor: torch.Tensor, placed: Placed, storage: torch.Tensor) -> bool:
    """Whether the tensor is where `install` put it. True for a tensor without elements."""
    if not _matches(tensor, placed.spec):
        return False
    return not placed.spec.span_bytes or (
        tensor.device == storage.device and tensor.data_ptr() == storage.data_ptr() + placed.offset
    )


def _points_into(tensor: torch.Tensor, storage: torch.Tensor) -> bool:
    if tensor.device != storage.device or not span_of(tensor):
        return False
    start = tensor.data_ptr() - storage.data_ptr()
    return start < storage.numel() and start + span_of(tensor) > 0


def _exchange(changes: Sequence[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
    """Give each tensor new memory: (tensor, 1-D uint8 storage, offset in bytes). On any exception, undo, then re-raise.

    An inference tensor must get an inference view and any other tensor a normal one: `.data =` takes over the view's
    kind but not its version counter, and torch then refuses every use of the tensor. So each view is made under the
    inference mode that suits its tensor, not under the caller's.
    """
    undo: list[tuple[torch.Tensor, torch.Tensor]] = []
    done = False
    try:
        for tensor, storage, offset in changes:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                view = _view(storage, offset, tensor)
                undo.append((tensor, tensor.data))
                tensor.data = view
        done = True
    finally:
        if not done:
            for tensor, old in reversed(undo):
                with torch.inference_mode(tensor.is_inference()):
                    tensor.data = old


# --- checks ------------------------------------------------------------------------------------------------------


def _check_storage(part: LayerLayout, storage: torch.Tensor) -> None:
    name = "rest" if part.index is None else f"layer {part.index}"
    if storage.dtype != torch.uint8 or storage.dim() != 1 or not storage.is_contiguous():
        raise InvalidArgument(
            f"memory of {name}: expected a contiguous 1-D uint8 tensor, got {storage.dtype} {tuple(storage.shape)}. "
            "Nothing was changed",
            layer=part.index,
        )
    if storage.numel() < part.nbytes:
        raise InvalidArgument(
            f"memory of {name} has {storage.numel()} bytes, needs {part.nbytes}. Nothing was changed",
            layer=part.index,
            nbytes=storage.numel(),
            needed=part.nbytes,
        )


def _storages(layout: Layout, storages: Sequence[torch.Tensor], rest: torch.Tensor) -> list[torch.Tensor]:
    """All storages in the order of `layout.parts`, checked one by one and against each other."""
    if len(storages) != len(layout.layers):
        raise InvalidArgument(
            f"got {len(storages)} storages for {len(layout.layers)} layers. Nothing was changed; pass one for each "
            "layer",
            storages=len(storages),
            layers=len(layout.layers),
        )
    everything = [*storages, rest]
    ranges = []
    for part, storage in zip(layout.parts, everything, strict=True):
        _check_storage(part, storage)
        if storage.device != rest.device:
            raise InvalidArgument(
                f"the memory of part {part.index} is on {storage.device}, and that of the rest is on {rest.device}. "
                "Nothing was changed; use one device",
                layer=part.index,
                device=str(storage.device),
            )
        if part.nbytes and (storage.data_ptr() % BASE_ALIGNMENT or storage.storage_offset() % BASE_ALIGNMENT):
            raise InvalidArgument(
                f"the memory of part {part.index} is not aligned to {BASE_ALIGNMENT} bytes. Nothing was changed",
                layer=part.index,
                alignment=BASE_ALIGNMENT,
            )
        if part.nbytes:
            ranges.append((storage.data_ptr(), storage.data_ptr() + part.nbytes, part.index))
    ranges.sort(key=lambda item: item[0])
    for (_, end, one), (start, _, other) in pairwise(ranges):
        if start < end:
            raise InvalidArgument(
                f"the memory of parts {one} and {other} overlaps. Nothing was changed; give each its own region",
                first=one,
                second=other,
            )
    return everything
