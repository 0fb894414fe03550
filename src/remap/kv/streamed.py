# SPDX-License-Identifier: Apache-2.0
"""KV blocks that show host blocks in passes: which of them are in use. Pure.

Streamed block first + h shows host block h, for every h below `streamed_blocks`; first lies behind the pool's blocks. Its
memory is shared by the layers, one after another: a pass that names it finds layer i's part of the host block there from
`wait(i)` to `done(i)`, and at no other time. So an engine may read it and not write it, and a block that is not complete cannot
be one. Many streamed blocks cost the memory of few: 2 / layers of it.

A pass copies one run of each range, from the lowest block that it names to the highest, whatever lies between: a copy has
a price of its own, and one of a single block in one layer is far too small for a link (Pie: 16 MB for 95 % of it). Host
blocks are handed out lowest first, so little lies between. (theory.md: KV is append-only, so a block streamed in is never
copied out again; Pie copies both ways.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remap.errors import InvalidArgument
from remap.kv.host import first_wrong, marked
from remap.kv.spec import KVGeometry
from remap.sizes import shown

__all__ = ["StreamedBlocks"]

_HIDDEN, _SHOWN = 0, 1


class StreamedBlocks:
    """The books of one tenant's streamed blocks. All methods are whole or change nothing, an interrupted one too.

    books: a byte for each host block that a block could show, 1 for one that is shown. A value, as `HostBlocks.books` is; other
    threads read it.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        self.first = geometry.first_streamed
        self.total = geometry.spec.streamed_blocks
        self.books = bytes(self.total)

    @property
    def stop(self) -> int:
        """Host blocks up to here are shown."""
        return self.books.rfind(_SHOWN) + 1

    @property
    def used_blocks(self) -> int:
        """Blocks that show a host block."""
        return self.books.count(_SHOWN)

    @property
    def used(self) -> bool:
        """Whether any does. Every pass asks."""
        return _SHOWN in self.books

    def show(self, host_blocks: Sequence[int]) -> list[int]:
        """The block of each of these host blocks. Raises InvalidArgument (field: block) for one that no block can show, or one
        does, or that is named twice."""
        books, seen = self.books, set[int]()
        for host in host_blocks:
            if not 0 <= host < self.total or books[host] or host in seen:
                raise InvalidArgument(
                    f"host block {host} streams already, or is none of the first {self.total}, which can, or is named twice; "
                    "nothing changed; copy out with below= the number of streamed blocks",
                    field="block",
                    block=host,
                    streamed_blocks=self.total,
                )
            seen.add(host)
        self.books = marked(books, host_blocks, _SHOWN)
        return [self.first + host for host in host_blocks]

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises InvalidArgument (field: block) for one that shows nothing, or is named twice."""
        self.books = marked(self.books, self.hosts(blocks), _HIDDEN)

    def split(self, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        """(those of the pool, those that stream)."""
        pool, streamed = list[int](), list[int]()
        for block in blocks:
            (streamed if self.total and block.__class__ is int and block >= self.first else pool).append(block)
        return pool, streamed

    def holds(self, blocks: Iterable[int]) -> bool:
        """Whether all of these show a host block."""
        return not first_wrong(self.books, [block - self.first for block in blocks])

    def shows(self, host_blocks: Iterable[int]) -> tuple[int, ...]:
        """Those of these host blocks that a block shows."""
        books = self.books
        return tuple(host for host in host_blocks if isinstance(host, int) and 0 <= host < self.total and books[host])

    def hosts(self, blocks: Iterable[int]) -> list[int]:
        """The host block that each of these shows. Raises InvalidArgument (field: block) for one that shows nothing, or is named
        twice."""
        known = list(blocks)
        hosts = [block - self.first if isinstance(block, int) else block for block in known]
        wrong = first_wrong(self.books, hosts)
        if wrong:
            block = next(each for each, host in zip(known, hosts) if host is wrong[0])
            raise InvalidArgument(
                f"block {shown(block)} is not a streamed block in use, or is named twice; nothing changed; pass each id that "
                "`kv.host.stream` returned, once",
                field="block",
                block=block,
            )
        return hosts

    def run(self, hosts: Sequence[int]) -> tuple[int, int, int]:
        """(first block, first host block, how many) of the run that shows these host blocks, one at least."""
        low, high = min(hosts), max(hosts)
        return self.first + low, low, high - low + 1
