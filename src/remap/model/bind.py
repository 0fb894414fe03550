# SPDX-License-Identifier: Apache-2.0
"""Torch glue: find a model's tensors, copy their bytes into packed memory, and point the model at that memory.

Call `find.collect` and `find.tensors_of`, `pack.build`, `master.make_master` (optional), `fill` for the resident layers,
and `install`, in this order; call `restore` before the memory goes away. A tensor keeps its identity throughout: these
functions exchange only the memory behind it (`tensor.data = view`), for buffers as well as for parameters, so tied names,
optimisers, hooks and other references to the same object stay right.

find.py finds and describes the tensors; this module re-exports its functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from remap.errors import InvalidArgument, InvalidState
from remap.model.find import (
    BASE_ALIGNMENT,
    Registration,
    collect,
    dtype_name,
    find_layers,
    registrations,
    resolve_layers,
    span_of,
    tensors_of,
)
from remap.model.pack import LayerLayout, Layout, Placed, TensorSpec

__all__ = [
    "Tensors",
    "WriteWatch",
    "changed",
    "collect",
    "differs",
    "fill",
    "find_layers",
    "install",
    "own_copy",
    "point",
    "put_back",
    "resolve_layers",
    "restore",
    "tensors_of",
]

Tensors = Mapping[str, torch.Tensor]
"""Path at attach -> the tensor object. What follows goes by the objects: a model may register them elsewhere."""
Moved = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Tensors that were given other memory: (the tensor, a view of the old memory, a view of the new)."""


def fill(part: LayerLayout, tensors: Tensors, destination: torch.Tensor) -> None:
    """Copy the present bytes of the part's tensors into `destination` (1-D uint8, any device).

    Does not write the bytes between tensors, and does not change the model. Raises InvalidArgument if `destination` is
    unsuitable or a tensor no longer matches its spec.
    """
    _check_storage(part, destination)
    with torch.inference_mode(False), torch.no_grad():
        memory = _as_bytes(destination)
        for placed, tensor in _targets(tensors, part):
            source = _as_bytes(tensor)
            memory[placed.offset : placed.offset + source.numel()].copy_(source)


def install(layout: Layout, tensors: Tensors, storages: Sequence[torch.Tensor], rest: torch.Tensor) -> None:
    """Point all tensors at `storages` (one per layer) and `rest`: 1-D uint8, one device.

    Copies nothing: fill the storages before the next forward pass. Tensor objects, `requires_grad`, strides, ties and
    version counters do not change. Raises InvalidArgument, and leaves the model as it was, if a storage is too short,
    misaligned, of another type or device, or overlaps another, or if a tensor does not match its spec.
    """
    point(zip(layout.parts, _storages(layout, storages, rest), strict=True), tensors, [])


def point(places: Iterable[tuple[LayerLayout, torch.Tensor]], tensors: Tensors, moved: Moved) -> None:
    """Point the tensors of each part at its storage, which is known to suit it, and note that for `put_back`. All or none."""
    changes = [(tensor, memory, placed.offset) for part, memory in places for placed, tensor in _targets(tensors, part)]
    _exchange(changes, moved)


def put_back(moved: Moved) -> list[torch.Tensor]:
    """Undo `point`: the tensors show what they did before. Of one that was given other memory since (`tensor.data = other`), the
    bytes are copied to where it was pointed; one of another shape or dtype is in the result, and its bytes are left out."""
    strays, lost = [], []
    for tensor, old, new in moved:
        there = tensor.data_ptr() in (old.data_ptr(), new.data_ptr()) and tensor.stride() == new.stride()
        if (tensor.shape, tensor.dtype) != (new.shape, new.dtype) or (not there and span_of(new) < new.nbytes):
            lost.append(tensor)
        elif not there:
            strays.append((new, tensor))
            with torch.inference_mode(tensor.is_inference()):  # all of them first: they may show each other's memory
                tensor.data = tensor.data.clone()
    for new, tensor in strays:
        with torch.inference_mode(new.is_inference()), torch.no_grad():
            new.copy_(tensor.data)
    for tensor, old, _ in reversed(moved):
        with torch.inference_mode(tensor.is_inference()):
            tensor.data = old
    return lost


def restore(
    layout: Layout,
    tensors: Tensors,
    storages: Sequence[torch.Tensor],
    rest: torch.Tensor,
    *,
    others: Iterable[tuple[str, torch.Tensor]] = (),
    sources: Mapping[int, torch.Tensor] | None = None,
    device: str | torch.device | None = None,
) -> None:
    """Move installed tensors back onto ordinary torch memory, so that the storages can be freed.

    tensors, storages, rest: as passed to `install`. It goes by the objects and the memory that they show, whatever the
    model calls them by now. others: further tensors with names, such as the model's present ones; those that show the
    storages move too.
    sources: layer -> 1-D uint8 tensor that the layer's bytes are copied from instead (its master copy; needed for
    streamed layers, whose regions may show another layer). device: of the new memory; by default the device of the
    storages. Each original storage becomes one new storage, so ties and overlapping views stay. A tensor that has memory
    of its own by now (`tensor.data = other`) stays there.

    Raises InvalidArgument for unsuitable storages or sources, and InvalidState (field path) if a tensor shows more of the
    storages than one original storage; in both cases the model has not changed.
    """
    everything = _storages(layout, storages, rest)
    # (first address, end, its bytes, where they begin there) of each original storage, by address
    spans: list[tuple[int, int, torch.Tensor, int]] = []
    for part, storage in zip(layout.parts, everything, strict=True):
        source = storage
        if part.index is not None and sources is not None and part.index in sources:
            source = sources[part.index]
            _check_storage(part, source)
        groups: dict[int, tuple[int, int]] = {}
        for placed in part.tensors:
            if placed.spec.span_bytes:
                start, end = groups.get(placed.spec.storage, (part.nbytes, 0))
                # A multiple of the alignment keeps every view aligned in the new memory.
                start = min(start, placed.offset - placed.offset % BASE_ALIGNMENT)
                groups[placed.spec.storage] = start, max(end, placed.offset + placed.spec.span_bytes)
        base = storage.data_ptr()
        spans.extend((base + start, base + end, source, start) for start, end in groups.values())
    spans.sort(key=itemgetter(0))
    ours = {id(tensor) for tensor in tensors.values()}
    found = {id(one): (path, one) for path, tensor in (*others, *tensors.items()) for one in _plain(tensor)}
    homes: dict[int, torch.Tensor] = {}
    exchange: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for path, tensor in found.values():
        first, size = tensor.data_ptr(), span_of(tensor)
        place = bisect_right(spans, first, key=itemgetter(0)) - 1
        if not size:
            if id(tensor) in ours:
                exchange.append((tensor, torch.empty(0, dtype=torch.uint8, device=device or rest.device), 0))
        elif tensor.device == rest.device and place >= 0 and first + size <= spans[place][1]:
            start, end, source, offset = spans[place]
            if place not in homes:
                with torch.inference_mode(False), torch.no_grad():
                    homes[place] = source[offset : offset + end - start].to(device or rest.device, copy=True)
            exchange.append((tensor, homes[place], first - start))
        elif any(_overlaps(tensor, storage) for storage in everything):
            raise InvalidState(
                f"{path} shows memory of the session that no single tensor had when it was attached. The model has not "
                "changed; give the tensor memory of its own (clone it), then restore again",
                path=path,
            )
    _exchange(exchange, [])


def changed(part: LayerLayout, tensors: Tensors, master: torch.Tensor) -> list[str]:
    """Paths of the part whose bytes now differ from those in `master` (1-D uint8, packed as the part).

    This answer is exact, where `WriteWatch` compares version counters: it sees writes that autograd does not see.
    Changes nothing.
    """
    _check_storage(part, master)
    return [each.spec.path for each in part.tensors if differs(each, tensors[each.spec.path], master)]


def differs(placed: Placed, tensor: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether the tensor is not, in shape or in bytes, what lies at its place in `master`."""
    if not _matches(tensor, placed.spec):
        return True
    mine = _as_bytes(tensor)
    return not torch.equal(mine.cpu(), master[placed.offset : placed.offset + mine.numel()].cpu())


def own_copy(source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`like`'s dtype, shape and stride over a new copy of `source` (1-D uint8, `like`'s span), on its device."""
    with torch.inference_mode(False), torch.no_grad():
        return _show(source.clone(), like.dtype, 0, like.shape, like.stride())


_version_of = attrgetter("_version")
_address_of = methodcaller("data_ptr")


class _Names:
    """What is registered, and where: `same` looks no dotted name up."""

    def __init__(self, found: Sequence[Registration]) -> None:
        self._registries: list[Any] = [each.registry for each in found]
        self._names = [each.name for each in found]
        self.objects = [each.value for each in found]

    def same(self) -> bool:
        return all(map(is_, map(dict.get, self._registries, self._names), self.objects))


class WriteWatch:
    """Reports the layer tensors that the model wrote in place, or replaced, since this object was made.

    Make it after `install`. A layer that was written must stay resident: a streamed layer's bytes come from its master
    copy, which no later write changes. The watch compares autograd's version counters, so it sees every in-place operation of
    torch, also under no_grad and inference_mode. It does not see writes through `tensor.data`, numpy or DLPack, or by
    kernels that do not announce them, such as those of batch norm's running statistics; therefore, when one buffer of a
    module has changed, all buffers of that module are reported. `changed` compares bytes and is exact.

    A tensor is replaced if it has other memory than it was installed in; if it is registered outside of its layer, which alone
    waits for its bytes; or if it is registered nowhere, and its layer has got tensors or modules that were not there before
    (they may have been made from its bytes), or is no part of the model any more. A tensor that has another name, or that
    is only removed (a meta tensor has no bytes), is not. Of inference tensors (of inference_mode) torch keeps no version.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], layout: Layout, tensors: Tensors) -> None:
        """modules: the layers. A part of the layout behind them holds tensors of no layer."""
        self._model, self._modules = model, modules
        self._specs: list[list[TensorSpec]] = []
        # Of each layer, as written_in() compares them: its tensors, their versions and their addresses.
        self._look: list[tuple[list[torch.Tensor], list[int], list[int]]] = []
        for layer in layout.layers:
            watched = [placed.spec for placed in layer.tensors if not tensors[placed.spec.path].is_inference()]
            ours = [tensors[spec.path] for spec in watched]
            self._specs.append(watched)
            self._look.append((ours, list(map(_version_of, ours)), list(map(_address_of, ours))))
        self._replaced: dict[int, set[str]] = {}
        # Of each layer when nothing was replaced: its objects by id, and the tensors that had only been removed.
        self._known: dict[int | None, dict[int, Any]] = {}
        self._removed: dict[int, set[str]] = {}
        self._read_names()

    def _read_names(self) -> None:
        found: dict[int | None, list[Registration]] = {index: [] for index in (None, *range(len(self._modules)))}
        seen: dict[int, set[int | None]] = {}  # id of a tensor -> where it is registered
        for each in registrations(self._model, self._modules):
            found[each.layer].append(each)
            if each.kind != "module":
                seen.setdefault(id(each.value), set()).add(each.layer)
        self._names = {layer: _Names(each) for layer, each in found.items()}
        self._replaced.clear()
        for index, (specs, (tensors, _, _)) in enumerate(zip(self._specs, self._look)):
            layer = self._layer(index)
            objects = {id(each): each for each in self._names[layer].objects if not getattr(each, "is_meta", False)}
            arrived = not objects or not objects.keys() <= self._known.setdefault(layer, objects).keys()
            where = {spec.path: seen.get(id(tensor), set()) for spec, tensor in zip(specs, tensors)}
            gone = {path for path, places in where.items() if not places}
            lost = {path for path, places in where.items() if places - {layer}}
            if arrived:
                lost |= gone - self._removed.get(index, set())
            if lost:
                self._replaced[index] = lost
            else:
                self._known[layer], self._removed[index] = objects, gone

    def forget(self) -> None:  # what was written until now, but not what was replaced
        self._look = [(tensors, list(map(_version_of, tensors)), at) for tensors, _, at in self._look]

    def _layer(self, part: int) -> int | None:
        return part if part < len(self._modules) else None

    def written_in(self, layers: Collection[int], *, replaced: bool = True) -> dict[int, list[str]]:
        """layer -> paths, in layout order, for those of these layers that were written (an unknown layer has no tensors). Reads
        no tensor's bytes. replaced: also replaced tensors.

        It takes a few microseconds per layer while nothing was written: the session calls it just before layers are
        streamed, on the way from demand to usable KV blocks, and after each pass that streamed some.
        """
        wanted = sorted({layer for layer in layers if 0 <= layer < len(self._look)})
        if replaced and not all(self._names[layer].same() for layer in (None, *map(self._layer, wanted))):
            self._read_names()
        found: dict[int, list[str]] = {}
        for index in wanted:
            specs, (tensors, versions, addresses) = self._specs[index], self._look[index]
            now, at = list(map(_version_of, tensors)), list(map(_address_of, tensors)) if replaced else addresses
            if now == versions and at == addresses and not (replaced and index in self._replaced):
                continue
            paths = set(self._replaced.get(index, ())) if replaced else set()
            states = zip(specs, zip(now, at), zip(versions, addresses))
            paths.update(spec.path for spec, present, first in states if present != first)
            owners = {spec.path.rpartition(".")[0] for spec in specs if spec.kind == "buffer" and spec.path in paths}
            written = [
                s.path for s in specs if s.path in paths or (s.kind == "buffer" and s.path.rpartition(".")[0] in owners)
            ]
            if written:
                found[index] = written
        return found


# --- one tensor --------------------------------------------------------------------------------------------------


def _plain(tensor: Any) -> list[torch.Tensor]:
    """The tensors that have addresses: the tensor itself, or those inside of a subclass that wraps them."""
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [one for each in inner if isinstance(each, torch.Tensor) for one in _plain(each)]
    strided = tensor.layout == torch.strided and not tensor.is_meta and not nn.parameter.is_lazy(tensor)
    return [tensor] if strided else []


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


def _matches(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    return (
        tuple(tensor.shape) == spec.shape and tuple(tensor.stride()) == spec.stride and dtype_name(tensor) == spec.dtype
    )


def _targets(tensors: Tensors, part: LayerLayout) -> list[tuple[Placed, torch.Tensor]]:
    """The part's tensors with their places. Raises InvalidArgument if one does not match its spec."""
    targets = []
    for placed in part.tensors:
        tensor = tensors.get(placed.spec.path)
        if tensor is None or not _matches(tensor, placed.spec):
            raise InvalidArgument(
                f"{placed.spec.path} is not the tensor that the layout was made for: expected {placed.spec.dtype} "
                f"{placed.spec.shape} with stride {placed.spec.stride}. Nothing was changed; make a new layout "
                "(collect, build)",
                path=placed.spec.path,
            )
        targets.append((placed, tensor))
    return targets


def _overlaps(tensor: torch.Tensor, storage: torch.Tensor) -> bool:
    start = tensor.data_ptr() - storage.data_ptr()
    return tensor.device == storage.device and start < storage.numel() and start + span_of(tensor) > 0


def _exchange(changes: Sequence[tuple[torch.Tensor, torch.Tensor, int]], moved: Moved) -> None:
    """Give each tensor new memory: (tensor, 1-D uint8 storage, offset in bytes). On any exception, undo, then re-raise.

    An inference tensor must get an inference view and any other tensor a normal one: `.data =` takes over the view's
    kind but not its version counter, and torch then refuses every use of the tensor. So each view is made under the
    inference mode that suits its tensor, not under the caller's.
    """
    try:
        for tensor, storage, offset in changes:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                view = _view(storage, offset, tensor)
                moved.append((tensor, tensor.data, view))
                tensor.data = view
    except BaseException:
        put_back(moved)
        raise


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
