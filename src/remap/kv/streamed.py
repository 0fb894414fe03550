"""KV blocks that show host blocks in passes: which of them are in use. Pure.

Streamed block first + h shows host block h, for every h below `streamed_blocks`; first lies behind the pool's blocks. Its
memory is shared by the layers, one after another: a pass that names it finds layer i's part of the host block there from
`wait(i)` to `done(i)`, and at no other time. So whoever reads it may not write it, and a block that is not complete cannot
be one. Many streamed blocks cost the memory of few: 2 / layers of it.

A pass copies one run of each range, from the lowest block that it names to the highest, whatever lies between: a copy has
a price of its own, and one of a single block in one layer is far too small for a link (Pie: 16 MB for 95 % of it). Host
blocks are handed out lowest first, so little lies between. (theory.md: KV is append-only, so what is streamed in is never
copied out again; Pie copies both ways.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remap.errors import InvalidArgument
from remap.kv.spec import KVGeometry

__all__ = ["StreamedBlocks"]


class StreamedBlocks:
    """The books of one tenant's streamed blocks. All methods are whole or change nothing."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.first = geometry.first_streamed
        self.total = geometry.spec.streamed_blocks
        self.stop = 0  # host blocks up to here are shown; other threads read it
        self._used: set[int] = set()

    @property
    def used_blocks(self) -> int:
        """Blocks that show a host block."""
        return len(self._used)

    def show(self, host_blocks: Sequence[int]) -> list[int]:
        """The block of each of these host blocks. Raises InvalidArgument (field: block) for one that no block can show, or one
        does, or that is named twice."""
        blocks = [self.first + host for host in host_blocks]
        wrong = next((host for host in host_blocks if host >= self.total or self.first + host in self._used), None)
        if wrong is not None or len(set(blocks)) < len(blocks):
            raise InvalidArgument(
                f"host block {wrong} streams already, or is none of the first {self.total}, which can, or one is named twice; "
                "nothing changed; copy out with below= the number of streamed blocks",
                field="block",
                block=wrong,
                streamed_blocks=self.total,
            )
        self._used.update(blocks)
        self.stop = max(self.stop, max(host_blocks, default=-1) + 1)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises InvalidArgument (field: block) for one that shows nothing, or is named twice."""
        self._used.difference_update(self.checked(blocks))
        self.stop = max(self._used, default=self.first - 1) + 1 - self.first

    def split(self, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        """(those of the pool, those that stream)."""
        pool, streamed = list[int](), list[int]()
        for block in blocks:
            (streamed if self.total and block.__class__ is int and block >= self.first else pool).append(block)
        return pool, streamed

    def shows(self, host_blocks: Iterable[int]) -> tuple[int, ...]:
        """Those of these host blocks that a block shows."""
        return tuple(host for host in host_blocks if self.first + host in self._used) if self._used else ()

    def hosts(self, blocks: Iterable[int]) -> list[int]:
        """The host block that each of these shows. Raises InvalidArgument as `release` does."""
        return [block - self.first for block in self.checked(blocks)]

    def run(self, hosts: Sequence[int]) -> tuple[int, int, int]:
        """(first block, first host block, how many) of the run that shows these host blocks, one at least."""
        low, high = min(hosts), max(hosts)
        return self.first + low, low, high - low + 1

    def checked(self, blocks: Iterable[int]) -> list[int]:
        """These blocks, each in use and named once. Raises InvalidArgument (field: block) otherwise."""
        known = list(blocks)
        wrong = next((block for block in known if block not in self._used), None)
        if wrong is not None or len(set(known)) < len(known):
            raise InvalidArgument(
                f"block {wrong} is not a streamed block in use, or one is named twice; nothing changed; pass each id that "
                "`kv.stream` returned, once",
                field="block",
                block=wrong,
            )
        return known
