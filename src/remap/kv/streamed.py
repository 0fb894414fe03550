"""KV blocks that show host blocks: which of them are in use, and which host block each shows. Pure.

A streamed block's id lies behind the pool's. Its memory is shared by the layers, one after another: a pass that names it
finds layer i's part of the host block there from `wait(i)` to `done(i)`, and at no other time. So whoever reads it may not
write it, and a block that is not complete cannot be one. Many streamed blocks cost the memory of few: 2 / layers of it.
(theory.md: KV is append-only, so what is streamed in is never copied out again; Pie copies both ways.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from remap.errors import InvalidArgument, OutOfBlocks
from remap.kv.spec import KVGeometry

__all__ = ["StreamedBlocks"]


class StreamedBlocks:
    """The books of one tenant's streamed blocks. All methods are whole or change nothing."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.first = geometry.first_streamed
        self.total = geometry.spec.streamed_blocks
        self._free = list(range(self.first, self.first + self.total))  # a heap: the lowest go first
        self._shown: dict[int, int] = {}  # block -> host block
        self._hosts: dict[int, int] = {}  # host block -> how many blocks show it

    @property
    def free_blocks(self) -> int:
        """Blocks that `show` could return now."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that show a host block."""
        return len(self._shown)

    def show(self, host_blocks: Sequence[int]) -> list[int]:
        """A block for each of these host blocks. Raises OutOfBlocks (fields: requested, free, usable) if fewer are free."""
        if len(host_blocks) > len(self._free):
            raise OutOfBlocks(
                f"{len(host_blocks)} streamed blocks requested, {len(self._free)} free of {self.total}; nothing changed; free "
                "some, or give the tenant more with KVSpec(streamed_blocks=)",
                requested=len(host_blocks),
                free=len(self._free),
                usable=self.total,
            )
        blocks = [heapq.heappop(self._free) for _ in host_blocks]
        for block, host in zip(blocks, host_blocks):
            self._shown[block] = host
            self._hosts[host] = self._hosts.get(host, 0) + 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises InvalidArgument (field: block) for one that shows nothing, or is named twice."""
        for block in self.checked(blocks):
            host = self._shown.pop(block)
            heapq.heappush(self._free, block)
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]

    def split(self, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        """(those of the pool, those that stream)."""
        pool, streamed = list[int](), list[int]()
        for block in blocks:
            (streamed if self.total and block.__class__ is int and block >= self.first else pool).append(block)
        return pool, streamed

    def shows(self, host_blocks: Iterable[int]) -> tuple[int, ...]:
        """Those of these host blocks that a block shows."""
        return tuple(host for host in host_blocks if host in self._hosts) if self._hosts else ()

    def hosts(self, blocks: Iterable[int]) -> list[int]:
        """The host block that each of these shows. Raises InvalidArgument as `release` does."""
        return [self._shown[block] for block in self.checked(blocks)]

    def runs(self, blocks: Iterable[int]) -> list[tuple[int, int, int]]:
        """(first block, first host block, how many) of each run of these blocks that is consecutive on both sides. Raises
        InvalidArgument as `release` does."""
        runs: list[tuple[int, int, int]] = []
        for block in sorted(self.checked(blocks)):
            host = self._shown[block]
            if runs and runs[-1][0] + runs[-1][2] == block and runs[-1][1] + runs[-1][2] == host:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((block, host, 1))
        return runs

    def checked(self, blocks: Iterable[int]) -> list[int]:
        """These blocks, each in use and named once. Raises InvalidArgument (field: block) otherwise."""
        known = list(blocks)
        wrong = next((block for block in known if block not in self._shown), None)
        if wrong is not None or len(set(known)) < len(known):
            raise InvalidArgument(
                f"block {wrong} is not a streamed block in use, or one is named twice; nothing changed; pass each id that "
                "`kv.stream` returned, once",
                field="block",
                block=wrong,
            )
        return known
