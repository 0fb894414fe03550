"""KV blocks in host memory: which host blocks are in use, and which bytes a copy to or from them moves. Pure.

The store is laid out as the KV region is, with `host_blocks` blocks a range instead of pages:

    block_major   host block h: bytes [h * unit, (h + 1) * unit)
    layer_major   the same in each of 2 * layers ranges of host_blocks * unit bytes

so blocks that are consecutive on both sides are one copy a range. KV is append-only: a complete block never changes, so
its host copy stays valid for as long as the request lives (Pie copies out again whatever it copies in; theory: an
append-only cache writes out what is new, and nothing else).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from remap.errors import InvalidArgument, OutOfBlocks
from remap.kv.spec import KVGeometry

__all__ = ["HostBlocks"]


class HostBlocks:
    """The books of one tenant's host store. All methods are whole or change nothing."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry = geometry
        self.total = geometry.spec.host_blocks
        self._free = list(range(self.total))  # a heap: the lowest go first, so that runs are long
        self._used: set[int] = set()
        self._low: list[int] = []  # those of them that can stream, ascending

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store."""
        return self.total * self.geometry.spec.block_bytes

    @property
    def free_blocks(self) -> int:
        """Host blocks that `allocate` could return now."""
        return len(self._free)

    def live_ids(self) -> list[int]:
        """Host blocks in use, ascending."""
        return sorted(self._used)

    def free_below(self, stop: int) -> int:
        """Of the free host blocks those below `stop`, which is at most `KVSpec.streamed_blocks`."""
        return stop - bisect_left(self._low, stop)

    def allocate(self, count: int, below: int | None = None) -> list[int]:
        """`count` host blocks, the lowest, ascending; `below`: all below that. Raises OutOfBlocks (fields: requested, free,
        usable) if fewer are free."""
        free = len(self._free) if below is None else self.free_below(min(below, self.geometry.spec.streamed_blocks))
        if count > free:
            raise OutOfBlocks(
                f"{count} host blocks requested{'' if below is None else f' below {below}'}, {free} free of {self.total}; "
                "nothing was copied; free host blocks, or give the tenant more with KVSpec(host_blocks=)",
                requested=count,
                free=free,
                usable=self.total,
            )
        ids = [heappop(self._free) for _ in range(count)]
        self._used.update(ids)
        streamed = self.geometry.spec.streamed_blocks
        for block in ids if streamed else ():
            if block < streamed:
                insort(self._low, block)
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Give host blocks back. Raises InvalidArgument (field: block) for one that is not in use, or named twice."""
        known = self.checked(ids)
        self._used.difference_update(known)
        for block in known:
            heappush(self._free, block)
            if block < self.geometry.spec.streamed_blocks:
                del self._low[bisect_left(self._low, block)]

    def checked(self, ids: Iterable[int]) -> list[int]:
        """These ids, all in use and each named once. Raises InvalidArgument (field: block) otherwise."""
        known = list(ids)
        wrong = next((block for block in known if block not in self._used), None)
        if wrong is not None or len(set(known)) < len(known):
            raise InvalidArgument(
                f"host block {wrong} is not in use, or a block is named twice; nothing changed; pass each id that "
                "copy_out returned, once",
                field="block",
                block=wrong,
            )
        return known

    def ranges(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """(offset in the KV region, offset in the store, bytes) of the copies between blocks and host blocks, (block,
        host block) each: one a range for each run that is consecutive on both sides."""
        unit, geometry = self.geometry.unit_bytes, self.geometry
        runs: list[tuple[int, int, int]] = []
        for block, host in sorted(pairs):
            if runs and runs[-1][0] + runs[-1][2] == block and runs[-1][1] + runs[-1][2] == host:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((block, host, 1))
        return [
            (r * geometry.range_bytes + block * unit, (r * self.total + host) * unit, count * unit)
            for r in range(geometry.ranges)
            for block, host, count in runs
        ]
