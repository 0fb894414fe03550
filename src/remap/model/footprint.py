# SPDX-License-Identifier: Apache-2.0
"""The memory that a model would take in an arena, to size a session before it exists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DEVICE_PAGE_SIZES", "DEVICE_WASTE", "PAGE_SIZES", "Footprint", "footprint"]

PAGE_SIZES = (2**21, 2**20, 2**19, 2**18, 2**17, 2**16)
"""On the CPU, where pages may be any size: from the usual one down."""
DEVICE_PAGE_SIZES = (2**25, 2**24, 2**23, 2**22, 2**21)
"""On a device, from large down to its granularity: its driver is called for every page that a layer's region is pointed
at. PyTorch takes device memory in segments of 20 MiB for large tensors."""
DEVICE_WASTE = 0.03
"""Share of the weights, and of a KV cache beside them, that large pages may cost on a device, in rounding up to whole pages."""


@dataclass(frozen=True)
class Footprint:
    """layer_bytes: bytes of each layer, as packed for streaming, in order. rest_bytes: bytes of everything else."""

    layer_bytes: tuple[int, ...]
    rest_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole model."""
        return sum(self.layer_bytes) + self.rest_bytes

    def layer_pages(self, page_bytes: int) -> tuple[int, ...]:
        """Pages of each layer: at least one, whole ones."""
        return tuple(max(1, -(-nbytes // page_bytes)) for nbytes in self.layer_bytes)

    def donation_sizes(self, page_bytes: int) -> tuple[int, ...]:
        """Pages of each layer that may leave: one without bytes of its own never does."""
        return tuple(n for n, nbytes in zip(self.layer_pages(page_bytes), self.layer_bytes) if nbytes)

    def pages(self, page_bytes: int) -> int:
        """Pages of the whole model."""
        return sum(self.layer_pages(page_bytes)) + -(-self.rest_bytes // page_bytes)

    def reach(self, page_bytes: int, first: int, pages: int) -> int:
        """Pages that a KV region needs places for, to get from `first` to at least `pages` pages by whole layers, whichever
        leave: one that has no place there cannot. No more than all but one layer can leave.
        """
        sizes = sorted(self.donation_sizes(page_bytes))
        leave = next((n for n in range(len(sizes)) if first + sum(sizes[:n]) >= pages), len(sizes) - 1)
        # And one more: with two ring buffers the second layer of the order is ring, while its pages have a place.
        return first + (sum(sizes[-leave - 1 :]) if leave > 0 else 0)

    def waste(self, page_bytes: int) -> float:
        """Share of the model's bytes that rounding up to whole pages costs."""
        taken = self.pages(page_bytes) * page_bytes
        return taken / self.nbytes - 1 if self.nbytes else math.inf if taken else 0.0

    def page_size(self, device: str = "cpu", *, ranges: int = 1, kv_bytes: float = math.inf) -> int:
        """Page size in bytes that suits the model: the largest at which rounding costs little, or the smallest of all.

        device: "cpu": PAGE_SIZES, 1 % of the model; any other: DEVICE_PAGE_SIZES, DEVICE_WASTE. ranges: the ranges of
        addresses in which a KV cache grows at once, a page in each (2 x layers in the layer_major layout): together no
        more than a layer. kv_bytes: of the KV cache that pays for the rounding: on a device it pays no larger share, either.
        """
        sizes, most = (PAGE_SIZES, 0.01) if device.partition(":")[0] == "cpu" else (DEVICE_PAGE_SIZES, DEVICE_WASTE)
        if sizes is DEVICE_PAGE_SIZES and kv_bytes < self.nbytes:
            most *= kv_bytes / self.nbytes
        layer = max(self.layer_bytes, default=0)
        for size in sizes:
            if self.waste(size) <= most and (ranges == 1 or ranges * size <= layer):
                return size
        return sizes[-1]


def footprint(model: nn.Module, layers: Any, mutable: Sequence[str] = (), *, embedding_part: bool = False) -> Footprint:
    """The footprint of `model` as `Session.attach` with the same arguments would lay it out. Reads shapes only.

    embedding_part: of a model that is attached inactive: what of it stands outside of the layers and goes with them counts
    as one layer more.

    Raises InvalidArgument as `Session.attach` does for layers or tensors that it cannot attach.
    """
    import torch

    from remap.model import bind as modules
    from remap.model import pack as layout

    found = modules.resolve_layers(model, modules.find_layers(model) if layers is None else layers)
    devices = [each.device for each in (*model.parameters(), *model.buffers())]
    specs = modules.collect(model, found, device=devices[0] if devices else torch.device("cpu"))
    packed = layout.build(
        specs, layers=len(found), mutable=(*layout.DEFAULT_MUTABLE, *mutable), embedding_part=embedding_part
    )
    return Footprint(tuple(part.nbytes for part in packed.layers), packed.rest.nbytes)
