# SPDX-License-Identifier: Apache-2.0
"""What stands for a session under policies that the library does not have: pools of KV blocks that only count, and a clock.
Pure."""

from __future__ import annotations

from remap.errors import OutOfBlocks

__all__ = ["CountedPool", "PiePool", "VirtualClock"]


class CountedPool:
    """`usable` blocks; ids mean nothing. The part of `tenant.kv` that schedulers use."""

    def __init__(self, usable: int, block_tokens: int) -> None:
        self.usable_blocks = usable
        self.block_tokens = block_tokens
        self.live_blocks = 0

    @property
    def free_blocks(self) -> int:
        """Never below 0, also while a smaller pool waits for blocks to be freed."""
        return max(0, self.usable_blocks - self.live_blocks)

    def allocate(self, n: int) -> list[int]:
        """Raises OutOfBlocks (requested, free, usable); nothing was allocated then."""
        if n > self.free_blocks:
            raise OutOfBlocks(
                f"{n} blocks requested, {self.free_blocks} free of {self.usable_blocks}; nothing was allocated",
                requested=n,
                free=self.free_blocks,
                usable=self.usable_blocks,
            )
        self.live_blocks += n
        return [0] * n

    def free(self, ids: list[int]) -> None:
        self.live_blocks -= len(ids)

    def holds(self, ids: list[int]) -> bool:
        """Nothing interrupts virtual time: blocks to be freed were not freed before."""
        return True

    holds_host = holds


class PiePool(CountedPool):
    """The device's KV memory, `base` blocks of all n layers, holds n / (n - m) times as many while m layers' KV is elsewhere:
    the memory of n layers is shared by n - m (Pie's expansion)."""

    def __init__(self, base: int, block_tokens: int, layers: int) -> None:
        super().__init__(base, block_tokens)
        self.base = base
        self.layers = layers
        self.swapped = 0  # m
        self.fixed = False

    @property
    def most_swapped(self) -> int:
        """The largest m: beside the layer that computes, the one that comes in next needs room, too."""
        return max(0, self.layers - 2)

    def blocks_at(self, swapped: int) -> int:
        """Usable blocks with m = swapped."""
        return self.base * self.layers // (self.layers - swapped)

    def set(self, swapped: int) -> bool:
        """Change m. False, and no change, if the blocks in use would not fit."""
        if self.blocks_at(swapped) < self.live_blocks:
            return False
        self.swapped = swapped
        self.usable_blocks = self.blocks_at(swapped)
        return True

    def fix(self, expansion: float) -> None:
        """m for good: the one whose n / (n - m) is nearest to `expansion`."""
        self.swapped = min(range(self.most_swapped + 1), key=lambda m: abs(self.layers / (self.layers - m) - expansion))
        self.usable_blocks = self.blocks_at(self.swapped)
        self.fixed = True


class VirtualClock:
    """Seconds from 0 on; never backwards. The sim backend has the same three members."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += max(0.0, seconds)

    def advance_to(self, time_s: float) -> None:
        self.now = max(self.now, time_s)
