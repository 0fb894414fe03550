# SPDX-License-Identifier: Apache-2.0
"""The KV of one stage: views of its tenant's KV region, one for each layer that it computes (see slots.py).

Nothing is copied or allocated here. The tenant's region never moves, so neither do the views. Only the thread that runs the
stage's passes reads or writes through them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from remap.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StageKV"]


class StageKV:
    """The slots of a tenant's KV region, for the layers first <= i < end of its model.

    tensors: one for each of these layers, (2, slots, block_tokens, kv_heads, head_dim); index s of layer q of the stage is
    slot s + q, so a place's first slot names it for all layers. rows: all slots of the region, (slots, elements), to copy
    them. Raises InvalidArgument (field layout) for a layer_major region, whose layers do not lie side by side.
    """

    def __init__(self, kv: Any, first: int, end: int) -> None:
        if kv.spec.layout != "block_major":
            raise InvalidArgument(
                f"a stage needs KV with layout='block_major', where a block's layers lie side by side; got "
                f"{kv.spec.layout!r}; nothing was created; attach with that layout",
                layout=kv.spec.layout,
            )
        self.first = first
        self.end = end
        self.layers = kv.spec.layers
        base = kv.tensors[0]
        _, blocks, tokens, heads, dim = base.shape
        half = tokens * heads * dim
        slots = blocks * self.layers
        begin = base.storage_offset()
        shape = (2, slots - max(0, end - first - 1), tokens, heads, dim)
        stride = (half, 2 * half, heads * dim, dim, 1)
        self.tensors = [base.as_strided(shape, stride, begin + 2 * half * layer) for layer in range(end - first)]
        self.rows = base.as_strided((slots, 2 * half), (2 * half, 1), begin)
        self.slot_bytes = 2 * half * base.element_size()

    def read(self, firsts: Sequence[int], layer: int, end: int) -> torch.Tensor:
        """A copy of the layers layer <= i < end of the model, of the places with these first slots: (places x layers,
        elements), place by place."""
        return self.rows[self._slots(firsts, layer, end)]

    def write(self, firsts: Sequence[int], layer: int, end: int, data: torch.Tensor) -> None:
        """The inverse of `read`."""
        self.rows[self._slots(firsts, layer, end)] = data

    def _slots(self, firsts: Sequence[int], layer: int, end: int) -> torch.Tensor:
        columns = torch.arange(layer - self.first, end - self.first)
        return (torch.tensor(firsts, dtype=torch.int64)[:, None] + columns).flatten()
