"""The obvious KV block pool: dictionaries and sets, every question answered by looking at every block.

Pages of a block are found from the layout's definition (which bytes hold its keys and values), not from the formulas
of `remap.kv.spec`.
"""

from __future__ import annotations

from collections.abc import Iterable

from remap.kv.spec import KVSpec


def chunk_offsets(spec: KVSpec, page_bytes: int, block: int) -> list[int]:
    """Byte offset of the keys, then the values, of `block` in layer 0, then in layer 1, and so on."""
    chunk = spec.block_tokens * spec.kv_heads * spec.head_dim * spec.itemsize
    if spec.layout == "block_major":
        return [block * chunk * 2 * spec.layers + i * chunk for i in range(2 * spec.layers)]
    pages = 0
    while pages * page_bytes < spec.max_blocks * chunk:
        pages += 1
    return [i * pages * page_bytes + block * chunk for i in range(2 * spec.layers)]


def pages_of_block(spec: KVSpec, page_bytes: int, block: int) -> set[int]:
    """The region pages that any byte of the block lies on."""
    chunk = spec.block_tokens * spec.kv_heads * spec.head_dim * spec.itemsize
    found = set()
    for offset in chunk_offsets(spec, page_bytes, block):
        page = offset // page_bytes
        while page * page_bytes < offset + chunk:
            found.add(page)
            page += 1
    return found


class KVModel:
    """What `remap.kv.pool.BlockPool` should do."""

    def __init__(self, spec: KVSpec, page_bytes: int) -> None:
        self.pages = {b: pages_of_block(spec, page_bytes, b) for b in range(spec.max_blocks)}
        self.owned: set[int] = set()
        self.withdrawn: set[int] = set()
        self.live: set[int] = set()

    def usable(self) -> list[int]:
        return [b for b, pages in self.pages.items() if pages <= self.owned]

    def open(self) -> list[int]:
        return [b for b in self.usable() if not self.pages[b] & self.withdrawn]

    def free(self) -> list[int]:
        return [b for b in self.open() if b not in self.live]

    def closed(self) -> list[int]:
        return [b for b in self.usable() if self.pages[b] & self.withdrawn]

    def add_pages(self, slots: Iterable[int]) -> list[int]:
        before = set(self.open())
        self.owned |= set(slots)
        return [b for b in self.open() if b not in before]

    def drain(self, slots: Iterable[int]) -> list[int]:
        before = self.open()
        self.withdrawn |= set(slots)
        return [b for b in before if self.pages[b] & self.withdrawn]

    def cancel_drain(self, slots: Iterable[int]) -> list[int]:
        before = set(self.open())
        self.withdrawn -= set(slots)
        return [b for b in self.open() if b not in before]

    def pending(self, slots: Iterable[int]) -> list[int]:
        return [b for b in sorted(self.live) if self.pages[b] & set(slots)]

    def remove_pages(self, slots: Iterable[int]) -> None:
        self.owned -= set(slots)
        self.withdrawn -= set(slots)

    def allocate(self, count: int) -> list[int]:
        ids = self.free()[:count]
        self.live |= set(ids)
        return ids

    def moves(self, slots: Iterable[int]) -> list[tuple[int, int]]:
        return list(zip(self.pending(slots), self.free(), strict=False))
