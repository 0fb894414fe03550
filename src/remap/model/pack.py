# SPDX-License-Identifier: Apache-2.0
"""Pack a model's tensors into layers. This module computes with bytes and paths only: no torch, no memory.

`build` packs each layer into one region in host-copy order, so that one copy loads it. All tensors that are not, or
must not be, streamed with a layer go into one more part, `Layout.rest`, which is always resident: embeddings, final
norm, lm_head, tied tensors and tensors that the model writes. With `ends`, those that no pass writes make a part of their own,
the last of `Layout.layers`: it never streams, and goes when all layers go.

Tensors that share a storage inside one part are packed once, as the byte span that covers them, and keep their
distances from each other. So every view over that storage (overlapping, interleaved, transposed, expanded) can be made
again with its old shape and stride.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise

from remap.errors import InvalidArgument

__all__ = [
    "DEFAULT_MUTABLE",
    "LayerLayout",
    "Layout",
    "Placed",
    "TensorSpec",
    "build",
    "span_bytes",
]

DEFAULT_MUTABLE = ("*.running_mean", "*.running_var", "*.num_batches_tracked")
"""Buffers that torch's own modules write. Autograd does not count the writes of the first two as in-place writes, so
`bind.WriteWatch` does not see them."""


def span_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes from a strided tensor's first element to the end of its last one; 0 if it has no elements.

    `stride` counts elements. A stride-0 (expanded) dimension adds nothing.
    """
    if any(size == 0 for size in shape):
        return 0
    return (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * itemsize


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One registered name of one tensor. A tensor with two names has two specs with equal storage and offset.

    path: dotted name in the model, unique. layer: index of its layer, None outside of the layers.
    kind: "parameter" or "buffer". dtype: name without a prefix ("bfloat16"). itemsize: bytes, a power of two.
    shape, stride: as in torch; stride counts elements. storage: a number for the memory behind the tensor; two tensors
    have the same number exactly if they share memory. storage_offset_bytes: from the start of that memory to the first
    element. span_bytes: `span_bytes(shape, stride, itemsize)`.
    """

    path: str
    layer: int | None
    kind: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: int
    storage_offset_bytes: int
    span_bytes: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor at `offset` bytes from the start of its part. A tensor without elements has offset 0."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One contiguous range of bytes. index: the layer, None for the rest. nbytes: exact, not rounded up (may be 0).

    tensors: in host-copy order.
    """

    index: int | None
    nbytes: int
    tensors: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of every tensor of a model. Equal input gives an equal (and hashable) layout."""

    layers: tuple[LayerLayout, ...]
    rest: LayerLayout

    @property
    def parts(self) -> tuple[LayerLayout, ...]:
        """All layers, then the rest."""
        return (*self.layers, self.rest)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, without rounding to pages."""
        return sum(part.nbytes for part in self.parts)

    def with_file_order(self, file_order: Mapping[int, Mapping[str, int]], file_alignment: int = 64) -> Layout:
        """The same layout with the tensors of some layers at given offsets; the other parts do not change.

        file_order: layer -> {path: bytes from the layer's start}, exactly the layer's paths.
        Raises InvalidArgument if a path is missing or unknown, if a tensor with elements is not aligned to
        `file_alignment` (views into a tensor of the same storage need only their own itemsize), if tensors of different
        storages overlap, or if views over one storage would change their distance.
        """
        _check_alignment(file_alignment)
        layers = list(self.layers)
        for index, offsets in file_order.items():
            if not 0 <= index < len(layers):
                raise InvalidArgument(
                    f"file_order names layer {index}, but there are layers 0 to {len(layers) - 1}. Nothing was "
                    "packed; name only layers of this model",
                    layer=index,
                    layers=len(layers),
                )
            layers[index] = _place_as_prescribed(layers[index], offsets, file_alignment)
        return replace(self, layers=tuple(layers))


def build(
    specs: Iterable[TensorSpec],
    *,
    layers: int | None = None,
    alignment: int = 256,
    mutable: Sequence[str] = (),
    embedding_part: bool = False,
) -> Layout:
    """Pack `specs` into one part per layer and the rest.

    layers: number of layers; by default one more than the largest index in `specs`. alignment: bytes, a power of two,
    at least the largest itemsize. mutable: glob patterns (`*` crosses dots) of paths that the model writes; their
    storages stay resident, and so do storages that two layers, or a layer and a tensor outside of the layers, share.
    embedding_part: parameters outside of the layers make one part more, behind the layers, if they are not mutable nor
    share a layer's storage: the embedding, the final norm and the head.

    Raises InvalidArgument for inconsistent specs (duplicate paths, a wrong span, a misaligned offset, ...).
    """
    _check_alignment(alignment)
    if isinstance(mutable, str):
        raise InvalidArgument(
            f"mutable= takes a sequence of patterns, not the one string {mutable!r}. Nothing was packed; put it into "
            "a tuple",
            mutable=mutable,
        )
    specs = tuple(specs)
    count = _check_specs(specs, layers, alignment)

    groups: dict[int, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.storage, []).append(spec)
    stays = {storage for storage, members in groups.items() if _stays(members, mutable)}
    goes = {storage for storage, members in groups.items() if embedding_part and _goes_with_layers(members, mutable)}
    parts: list[list[TensorSpec]] = [[] for _ in range(count)]
    last: list[TensorSpec] = []
    rest: list[TensorSpec] = []
    for spec in specs:
        if spec.layer is None:
            (last if spec.storage in goes else rest).append(spec)
        elif spec.storage in stays:
            rest.append(spec)
        else:
            parts[spec.layer].append(spec)

    return Layout(
        layers=tuple(
            _pack(index, members, alignment) for index, members in enumerate([*parts, last] if last else parts)
        ),
        rest=_pack(None, rest, alignment),
    )


def _stays(members: Sequence[TensorSpec], mutable: Sequence[str]) -> bool:
    """Whether the storage with these members must not be streamed with a layer: it is of several, or of one and the rest, or
    the model writes it."""
    return len({spec.layer for spec in members}) > 1 or any(
        fnmatchcase(spec.path, pattern) for spec in members for pattern in mutable
    )


def _goes_with_layers(members: Sequence[TensorSpec], mutable: Sequence[str]) -> bool:
    """Whether the storage with these members, outside of the layers, holds parameters alone, which the model does not write."""
    return all(
        spec.layer is None and spec.kind == "parameter" and not any(fnmatchcase(spec.path, each) for each in mutable)
        for spec in members
    )


def _pack(index: int | None, specs: Sequence[TensorSpec], alignment: int) -> LayerLayout:
    """Place storages one after another in order of first appearance, each at a multiple of `alignment`."""
    groups: dict[int, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.storage, []).append(spec)
    placed: list[Placed] = []
    end = 0
    for members in groups.values():
        filled = [spec for spec in members if spec.span_bytes]
        if not filled:
            placed.extend(Placed(spec, 0) for spec in members)
            continue
        start = min(spec.storage_offset_bytes for spec in filled)
        if any((spec.storage_offset_bytes - start) % spec.itemsize for spec in filled):
            # Views of different itemsizes: begin at a multiple of the widest element, so that all views stay aligned.
            # (Every offset is a multiple of its own itemsize, and itemsizes are powers of two.)
            start -= start % max(spec.itemsize for spec in filled)
        base = -(-end // alignment) * alignment
        for spec in members:
            placed.append(Placed(spec, base + spec.storage_offset_bytes - start if spec.span_bytes else 0))
        end = base + max(spec.storage_offset_bytes + spec.span_bytes for spec in filled) - start
    return LayerLayout(index=index, nbytes=end, tensors=tuple(placed))


def _place_as_prescribed(layer: LayerLayout, offsets: Mapping[str, int], alignment: int) -> LayerLayout:
    """`layer` with each tensor at its given offset. Raises InvalidArgument as `with_file_order` does."""
    paths = {placed.spec.path for placed in layer.tensors}
    if paths != set(offsets):
        missing, unknown = sorted(paths - set(offsets)), sorted(set(offsets) - paths)
        raise InvalidArgument(
            f"file order of layer {layer.index}: expected exactly the layer's tensors, but {missing[:3]} are missing "
            f"and {unknown[:3]} are unknown. Nothing was packed; keep tensors that are not in the file resident "
            "(mutable=)",
            layer=layer.index,
            missing=tuple(missing),
            unknown=tuple(unknown),
        )

    def refuse(path: str, why: str) -> InvalidArgument:
        return InvalidArgument(
            f"file order of layer {layer.index}: {path} at {offsets[path]} {why}. Nothing was packed; leave this layer "
            "out of file_order",
            layer=layer.index,
            path=path,
            offset=offsets[path],
            alignment=alignment,
        )

    tensors = [
        Placed(placed.spec, offsets[placed.spec.path] if placed.spec.span_bytes else 0) for placed in layer.tensors
    ]
    groups: dict[int, list[Placed]] = {}
    for placed in tensors:
        spec = placed.spec
        if offsets[spec.path] < 0 or placed.offset % spec.itemsize:
            raise refuse(spec.path, f"is negative, or not a multiple of its itemsize {spec.itemsize}")
        if spec.span_bytes:
            groups.setdefault(spec.storage, []).append(placed)

    spans: list[tuple[int, int, str]] = []
    for members in groups.values():
        first = min(members, key=lambda placed: placed.offset)
        if first.offset % alignment:
            raise refuse(first.spec.path, f"is not aligned to {alignment} bytes")
        for placed in members:
            if placed.offset - first.offset != placed.spec.storage_offset_bytes - first.spec.storage_offset_bytes:
                raise refuse(placed.spec.path, f"is at another distance from {first.spec.path} than in memory")
        spans.append((first.offset, max(p.offset + p.spec.span_bytes for p in members), first.spec.path))
    spans.sort()
    for (_, end, path), (start, _, other) in pairwise(spans):
        if start < end:
            raise refuse(other, f"overlaps {path}")
    tensors.sort(key=lambda placed: placed.offset)  # the sort is stable: equal offsets keep their order
    return LayerLayout(layer.index, max((end for _, end, _ in spans), default=0), tuple(tensors))


def _check_alignment(alignment: int) -> None:
    if alignment < 1 or alignment & (alignment - 1):
        raise InvalidArgument(
            f"alignment is {alignment}; expected a power of two, in bytes. Nothing was packed; use 256",
            alignment=alignment,
        )


def _check_specs(specs: Sequence[TensorSpec], layers: int | None, alignment: int) -> int:
    """Raise InvalidArgument for inconsistent specs; return the number of layers."""
    count = max((spec.layer + 1 for spec in specs if spec.layer is not None), default=0) if layers is None else layers
    paths: set[str] = set()
    for spec in specs:
        wrong = ""
        if spec.path in paths:
            wrong = "the path occurs twice"
        elif spec.kind not in ("parameter", "buffer"):
            wrong = f"kind is {spec.kind!r}, expected 'parameter' or 'buffer'"
        elif spec.layer is not None and not 0 <= spec.layer < count:
            wrong = f"layer is {spec.layer}, expected None or 0 to {count - 1}"
        elif spec.itemsize < 1 or spec.itemsize & (spec.itemsize - 1) or spec.itemsize > alignment:
            wrong = f"itemsize is {spec.itemsize}, expected a power of two not above the alignment {alignment}"
        elif len(spec.shape) != len(spec.stride) or min((*spec.shape, *spec.stride), default=0) < 0:
            wrong = f"shape {spec.shape} and stride {spec.stride} do not describe a strided tensor"
        elif spec.span_bytes != span_bytes(spec.shape, spec.stride, spec.itemsize):
            wrong = f"span_bytes is {spec.span_bytes}, expected {span_bytes(spec.shape, spec.stride, spec.itemsize)}"
        elif spec.storage_offset_bytes < 0 or spec.storage_offset_bytes % spec.itemsize:
            wrong = f"storage_offset_bytes is {spec.storage_offset_bytes}, expected a multiple of {spec.itemsize}"
        if wrong:
            raise InvalidArgument(
                f"tensor {spec.path!r}: {wrong}. Nothing was packed; correct the spec (find.collect makes "
                "consistent ones)",
                path=spec.path,
            )
        paths.add(spec.path)
    return count
