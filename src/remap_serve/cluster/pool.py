# SPDX-License-Identifier: Apache-2.0
"""The logical blocks of a group: numbers below a capacity, which every stage of the group has a place for. Pure.

The head allocates from here as an engine does from `tenant.kv`. Each stage maps the same numbers to its own memory (slots.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from remap.errors import InvalidArgument, OutOfBlocks

__all__ = ["GroupPool"]


class GroupPool:
    """Blocks 0 <= b < usable_blocks, lowest first: what an `engine.block_pool.BlockPool` needs without host memory."""

    def __init__(self, block_tokens: int, capacity: int = 0) -> None:
        self.block_tokens = block_tokens
        self.usable_blocks = 0
        self._free: list[int] = []
        self._live: set[int] = set()
        self.grow(capacity)

    @property
    def free_blocks(self) -> int:
        """Blocks that `allocate` could return now."""
        return len(self._free)

    @property
    def live_blocks(self) -> int:
        """Blocks that are allocated."""
        return len(self._live)

    def allocate(self, n: int) -> list[int]:
        """Ascending. Raises OutOfBlocks (fields requested, free, usable); nothing was allocated then."""
        if n > len(self._free):
            raise OutOfBlocks(
                f"{n} blocks requested, {len(self._free)} free of {self.usable_blocks} that every stage has room for; nothing "
                "was allocated; free blocks, or let the group grow",
                requested=n,
                free=len(self._free),
                usable=self.usable_blocks,
            )
        ids = [heapq.heappop(self._free) for _ in range(n)]
        self._live.update(ids)
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Give allocated blocks back. Raises InvalidArgument (field blocks) for one that is not allocated, or named twice;
        nothing changed then."""
        given = list(ids)
        if len(set(given)) != len(given) or not self._live.issuperset(given):
            strange = tuple(sorted({id for id in given if id not in self._live or given.count(id) > 1}))
            raise InvalidArgument(
                f"blocks {strange[:4]} are not allocated, or named twice; nothing changed; free each block once",
                blocks=strange,
            )
        self._live.difference_update(given)
        for id in given:
            heapq.heappush(self._free, id)

    def holds(self, ids: Iterable[int]) -> bool:
        """Whether all of these are allocated."""
        return self._live.issuperset(ids)

    def grow(self, capacity: int) -> None:
        """Every stage has places for `capacity` blocks now; fewer than before change nothing (`shrink`)."""
        for id in range(self.usable_blocks, capacity):
            heapq.heappush(self._free, id)
        self.usable_blocks = max(self.usable_blocks, capacity)

    def shrink(self, capacity: int) -> dict[int, int]:
        """Only blocks below `capacity` from now on. Returns old -> new of the live ones that change their number.

        Raises OutOfBlocks (fields requested, free, usable) if more are live; nothing changed then.
        """
        if len(self._live) > capacity:
            raise OutOfBlocks(
                f"{len(self._live)} blocks are live, and the group is to have {capacity}; nothing changed; preempt requests",
                requested=len(self._live),
                free=capacity,
                usable=capacity,
            )
        moving = sorted(id for id in self._live if id >= capacity)
        room = sorted(id for id in self._free if id < capacity)
        moves = dict(zip(moving, room))
        self._live = {moves.get(id, id) for id in self._live}
        self._free = room[len(moving) :]
        self.usable_blocks = min(self.usable_blocks, capacity)
        return moves
