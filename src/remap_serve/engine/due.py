# SPDX-License-Identifier: Apache-2.0
"""Blocks that no sequence has any more and that the pool has not back yet: pure bookkeeping.

A sequence's tables and the pool's books cannot change at one moment, and an interrupt (Ctrl-C) may come between the two. So
blocks leave the tables for this list, in one statement, and go from here to the pool. What an interrupt, or a copy that has
failed, left here goes with the next call of the scheduler, before that allocates anything: so whether the pool has taken blocks
back by then can be asked of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remap.errors import Error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from remap_serve.engine.block_pool import SchedulerBlocks

__all__ = ["Due"]


class Due:
    """ids: (blocks of the pool and of `pool.stream`, host blocks). A value: a change makes another one, and one store, together
    with the tables that the blocks leave, puts it in the old one's place."""

    def __init__(self) -> None:
        self.ids: tuple[list[int], list[int]] = [], []
        self.relocated = 0  # the last move of blocks that they follow

    def more(self, blocks: list[int], hosts: list[int]) -> tuple[list[int], list[int]]:
        """`ids` with these besides. Changes nothing."""
        return [*self.ids[0], *blocks], [*self.ids[1], *hosts]

    def relocate(self, number: int, moved: Mapping[int, int]) -> None:
        """The session moved live blocks (old id -> new id). Can be called again: a move of this number happens once."""
        if self.relocated != number:
            ids = [moved.get(block, block) for block in self.ids[0]], self.ids[1]
            self.ids, self.relocated = ids, number

    def give(self, pool: SchedulerBlocks) -> None:
        """Give all of it back: host blocks behind the blocks that show them. Raises the pool's error if a copy from or to the
        blocks has failed; they go with the next call then."""
        blocks, hosts = self.ids
        if blocks:
            if pool.holds(blocks):
                pool.free(blocks)
            self.ids = [], hosts
        if hosts:
            if pool.holds_host(hosts):
                pool.free_host(hosts)
            self.ids = [], []

    def give_surely(self, pool: SchedulerBlocks) -> None:
        """As `give`, where a copy that has failed is no error of this call: those whose KV it was learn of it when they ask
        (`kept`, `arrived`). None is in flight any more then, so the second try does it."""
        try:
            self.give(pool)
        except Error:
            self.give(pool)
