# SPDX-License-Identifier: Apache-2.0
"""KV blocks in host memory: which host blocks are in use, and which bytes a copy to or from them moves. Pure.

The store is laid out as the KV region is, with `total` blocks a range instead of pages:

    block_major   host block h: bytes [h * unit, (h + 1) * unit)
    layer_major   the same in each of 2 * layers ranges of total * unit bytes

so blocks that are consecutive on both sides are one copy a range. KV is append-only: a complete block never changes, so
its host copy stays valid for as long as the request lives (Pie copies out again whatever it copies in; theory: an
append-only cache writes out new blocks, and nothing else).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remap.errors import InvalidArgument, OutOfBlocks
from remap.kv.spec import KVGeometry
from remap.sizes import shown

__all__ = ["HostBlocks", "first_wrong", "marked", "runs_of"]

_FREE, _USED = 0, 1


def marked(books: bytes, blocks: Iterable[int], mark: int) -> bytes:
    """The same books, but for these blocks."""
    made = bytearray(books)
    for block in blocks:
        made[block] = mark
    return bytes(made)


def runs_of(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The same pairs, those that are consecutive on both sides as one: (first, first of the other side, how many)."""
    runs: list[tuple[int, int, int]] = []
    for one, other in sorted(pairs):
        if runs and runs[-1][0] + runs[-1][2] == one and runs[-1][1] + runs[-1][2] == other:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((one, other, 1))
    return runs


def first_wrong(books: bytes, blocks: Sequence[object]) -> list[object]:
    """The first of these blocks that is not in use, or is named before; none: all are right."""
    seen, total = set[int](), len(books)
    for block in blocks:
        if not isinstance(block, int) or not 0 <= block < total or not books[block] or block in seen:
            return [block]
        seen.add(block)
    return []


class HostBlocks:
    """The books of one tenant's host store. All methods are whole or change nothing, an interrupted one too.

    `total` blocks begin at `address`. books: a byte for each host block, 1 for one in use. They and their place are one value: a
    change makes another one, and one store puts it in the old one's place. A caller that changes several books together keeps
    the old books, and stores them again if the rest fails. untouched: no block was ever in use.
    """

    def __init__(self, geometry: KVGeometry, total: int, address: int = 0) -> None:
        self.geometry = geometry
        self.untouched = True
        self._placed = address, bytes(total)

    @property
    def books(self) -> bytes:
        return self._placed[1]

    @books.setter
    def books(self, books: bytes) -> None:
        self._placed = self.address, books

    @property
    def address(self) -> int:
        """Of the first block."""
        return self._placed[0]

    @property
    def total(self) -> int:
        """Blocks, in use and free."""
        return len(self._placed[1])

    def place(self, address: int, total: int) -> None:
        """`total` blocks from `address` on, in place of those before. Pre: `untouched`."""
        self._placed = address, bytes(total)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store."""
        return self.total * self.geometry.spec.block_bytes

    @property
    def free_blocks(self) -> int:
        """Host blocks that `allocate` could return now."""
        return self.free_below(self.total)

    def live_ids(self) -> list[int]:
        """Host blocks in use, ascending."""
        return [block for block, used in enumerate(self.books) if used]

    def holds(self, ids: Iterable[int]) -> bool:
        """Whether all of these are in use."""
        return not first_wrong(self.books, list(ids))

    def free_below(self, stop: int) -> int:
        """Of the free host blocks those below `stop`, which is at most `KVSpec.streamed_blocks`."""
        # Those in use are counted, since they are few: `count` jumps from one to the next.
        stop = min(stop, self.total)
        return stop - self.books.count(_USED, 0, stop) if stop > 0 else 0

    def allocate(self, count: int, below: int | None = None) -> list[int]:
        """`count` host blocks, the lowest, ascending, so that runs are long; `below`: all below that. Raises OutOfBlocks (fields:
        requested, free, usable) if fewer are free, InvalidArgument (fields field, value) for a bound that is no int."""
        if below is not None and not isinstance(below, int):
            raise InvalidArgument(
                f"below must be a number of host blocks, got {shown(below)}; nothing was copied",
                field="below",
                value=below,
            )
        stop = self.total if below is None else min(below, self.geometry.spec.streamed_blocks)
        free = self.free_below(stop)
        if count > free:
            raise OutOfBlocks(
                f"{count} host blocks requested{'' if below is None else f' below {shown(below)}'}, {free} free of {self.total}; "
                "nothing was copied; free host blocks, or give the tenant more with KVSpec(host_blocks=) or Session(host_kv=)",
                requested=count,
                free=free,
                usable=self.total,
            )
        self.untouched = self.untouched and not count
        find, ids, block = self.books.find, list[int](), -1
        for _ in range(count):
            block = find(_FREE, block + 1)
            ids.append(block)
        self.books = marked(self.books, ids, _USED)
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Give host blocks back. Raises InvalidArgument (field: block) for one that is not in use, or named twice."""
        self.books = marked(self.books, self.checked(ids), _FREE)

    def checked(self, ids: Iterable[int]) -> list[int]:
        """These ids, all in use and each named once. Raises InvalidArgument (field: block) otherwise."""
        known = list(ids)
        wrong = first_wrong(self.books, known)
        if wrong:
            raise InvalidArgument(
                f"host block {shown(wrong[0])} is not in use, or is named twice; nothing changed; pass each id that copy_out "
                "returned, once",
                field="block",
                block=wrong[0],
            )
        return known

    def ranges(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """(offset in the KV region, offset in the store, bytes) of the copies between blocks and host blocks, (block,
        host block) each: one a range for each run that is consecutive on both sides."""
        unit, geometry, runs = self.geometry.unit_bytes, self.geometry, runs_of(pairs)
        return [
            (r * geometry.range_bytes + block * unit, (r * self.total + host) * unit, count * unit)
            for r in range(geometry.ranges)
            for block, host, count in runs
        ]
