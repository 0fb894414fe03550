# SPDX-License-Identifier: Apache-2.0
"""How many KV blocks an engine starts with, and how many it reaches: vLLM accepts requests by the second number, so there must
never be fewer. Pure."""

from __future__ import annotations

from typing import NamedTuple

from remap.model.footprint import Footprint

__all__ = ["Reach"]


class Reach(NamedTuple):
    """size: of the model. page, block: bytes; block: of all layers. nbytes: what the KV cache of the start may take."""

    size: Footprint
    page: int
    block: int
    nbytes: int

    @property
    def first(self) -> int:
        """Blocks of the start. They take whole pages, and leave none free: ranks could use a free page differently."""
        return self.nbytes // self.page * self.page // self.block

    def pages(self, blocks: int) -> int:
        """Pages that so many blocks take."""
        return -(-blocks * self.block // self.page)

    def reached(self, max_layers: int | None = None) -> int:
        """Blocks of a session of its own when all layers have left but those of the ring, or max_layers, the largest."""
        sizes = sorted(self.size.donation_sizes(self.page))[:-1]
        left = sizes if max_layers is None else sizes[::-1][:max_layers]
        return (self.pages(self.first) + sum(left)) * self.page // self.block

    def reached_of(self, capacity: int) -> int:
        """Blocks in an arena of `capacity` bytes that others use as well, when these have no page of it."""
        sizes = self.size.donation_sizes(self.page)
        kept = self.size.pages(self.page) - sum(sizes) + max(sizes, default=0)
        return (capacity // self.page - kept) * self.page // self.block

    def places(self, first: int, most: int) -> int:
        """Blocks that the KV region needs places for, to get from `first` to `most`: a ceiling (REMAP_MAX_TOKENS,
        --num-gpu-blocks-override) may lie inside of a layer, which needs a place as a whole. vLLM gets the blocks below it."""
        return max(most, -(-self.size.reach(self.page, self.pages(first), self.pages(most)) * self.page // self.block))
