"""Where the bytes of a block lie, from the layout's definition (which bytes hold its keys and values) and not from the formulas
of `remap.kv.spec`."""

from __future__ import annotations

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
