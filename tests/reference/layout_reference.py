"""Slow, obvious model of packing: single elements and single bytes, no spans, no groups.

A tensor is the list of its elements' byte addresses. Packing is right if every element of every tensor, written to its
place, can still be read there after all others were written, unless it shares that byte in the original storage too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fnmatch import fnmatchcase

from remap.model.pack import LayerLayout, TensorSpec


def element_addresses(spec: TensorSpec, start: int) -> list[int]:
    """Byte address of each element of the tensor, row-major, if its first element is at `start`."""
    return [
        start + spec.itemsize * sum(i * step for i, step in zip(index, spec.stride, strict=True))
        for index in itertools.product(*(range(size) for size in spec.shape))
    ]


def original_byte(storage: int, address: int) -> tuple[int, int]:
    """What is in a byte of the original memory: its own name."""
    return (storage, address)


def must_stay_resident(spec: TensorSpec, specs: Sequence[TensorSpec], mutable: Sequence[str]) -> bool:
    """Whether the tensor belongs into the rest."""
    if spec.layer is None:
        return True
    for other in specs:
        if other.storage == spec.storage:
            if other.layer != spec.layer:
                return True
            if any(fnmatchcase(other.path, pattern) for pattern in mutable):
                return True
    return False


def check_part(part: LayerLayout) -> None:
    """Write all bytes of all tensors, then read them back; every byte inside, aligned, and what it was."""
    memory: dict[int, tuple[int, int]] = {}
    for placed in part.tensors:
        spec = placed.spec
        assert placed.offset % spec.itemsize == 0, placed
        old = element_addresses(spec, spec.storage_offset_bytes)
        new = element_addresses(spec, placed.offset)
        for source, target in zip(old, new, strict=True):
            for byte in range(spec.itemsize):
                assert 0 <= target + byte < part.nbytes, placed
                memory[target + byte] = original_byte(spec.storage, source + byte)
    for placed in part.tensors:
        spec = placed.spec
        old = element_addresses(spec, spec.storage_offset_bytes)
        new = element_addresses(spec, placed.offset)
        for source, target in zip(old, new, strict=True):
            for byte in range(spec.itemsize):
                assert memory[target + byte] == original_byte(spec.storage, source + byte), placed
