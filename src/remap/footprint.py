"""How much of an arena a model takes, before there is one: for those who size a session around a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PAGE_SIZES", "Footprint", "footprint"]

PAGE_SIZES = (2**21, 2**20, 2**19, 2**18, 2**17, 2**16)
"""Where pages may be any size: from the usual one down."""


@dataclass(frozen=True)
class Footprint:
    """layer_bytes: of each layer as it is packed for streaming, in order. rest_bytes: of everything else."""

    layer_bytes: tuple[int, ...]
    rest_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole model."""
        return sum(self.layer_bytes) + self.rest_bytes

    def layer_pages(self, page_bytes: int) -> tuple[int, ...]:
        """Pages of each layer: at least one, whole ones."""
        return tuple(max(1, -(-nbytes // page_bytes)) for nbytes in self.layer_bytes)

    def pages(self, page_bytes: int) -> int:
        """Pages of the whole model."""
        return sum(self.layer_pages(page_bytes)) + -(-self.rest_bytes // page_bytes)

    def page_size(self, waste: float = 0.01) -> int:
        """The largest of PAGE_SIZES at which rounding up to whole pages costs at most `waste` of the model, or the smallest."""
        for size in PAGE_SIZES:
            if self.pages(size) * size <= (1 + waste) * self.nbytes:
                return size
        return PAGE_SIZES[-1]


def footprint(model: nn.Module, layers: Any, mutable: Sequence[str] = ()) -> Footprint:
    """The footprint of `model` as `Session.attach` with the same arguments would lay it out. Reads shapes only.

    Raises InvalidArgument as `Session.attach` does for layers or tensors that it cannot attach.
    """
    import torch

    from . import layout, modules

    found = modules.resolve_layers(model, modules.find_layers(model) if layers is None else layers)
    devices = [each.device for each in (*model.parameters(), *model.buffers())]
    specs = modules.collect(model, found, device=devices[0] if devices else torch.device("cpu"))
    packed = layout.build(specs, layers=len(found), mutable=(*layout.DEFAULT_MUTABLE, *mutable))
    return Footprint(tuple(part.nbytes for part in packed.layers), packed.rest.nbytes)
