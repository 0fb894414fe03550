# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a KV region lie: pure arithmetic on bytes, pages and block ids.

A KV region consists of `ranges` equal ranges of `range_pages` pages. Block b occupies the bytes
[b * unit_bytes, (b + 1) * unit_bytes) of *every* range:

    block_major   1 range,            unit = the block's keys and values of all layers  [layers][2][tokens][heads][dim]
    layer_major   2 * layers ranges,  unit = the block's keys (or values) of one layer  [tokens][heads][dim]

so both layouts share every formula below. Behind the places of its blocks a layer_major range has those of
`streamed_blocks` more, whose home is host memory: blocks [first_streamed, first_streamed + streamed_blocks), at a page's
beginning. The pages there belong to no pool: layers share them, one after another.

A KV region's pool has the blocks below max_blocks. A *column* is the set of pages at the same place of each range (one page for
block_major, 2 * layers pages for layer_major); a block is usable when all pages of its columns are owned. Units may
straddle pages. This module owns nothing: `remap.kv.pool.BlockPool` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from remap.errors import InvalidArgument
from remap.sizes import MOST_BYTES, shown

__all__ = ["BUFFERS", "DTYPE_BYTES", "LAYOUTS", "MOST_BLOCKS", "KVGeometry", "KVSpec", "with_streamed"]

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
LAYOUTS = ("block_major", "layer_major")
MOST_BLOCKS = 1 << 26
"""Of one KV cache: the pool's books take one byte per block, whatever memory the blocks have."""
BUFFERS = 2
"""Layers whose parts of streamed blocks are in memory at a time: one computes, the next one's arrive."""


def _require_int(name: str, value: object, least: int) -> None:
    # bool is an int in Python; True layers is a mistake, not one layer.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_BYTES:
        raise InvalidArgument(
            f"{name} must be an int of at least {least} and at most {MOST_BYTES}, got {shown(value)}; nothing was created; "
            f"pass a valid {name}",
            field=name,
            value=value,
            least=least,
        )


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """The KV cache that one tenant wants. Sizes are in blocks; a block is `block_tokens` tokens in all `layers`.

    The tenant starts with `min_blocks` blocks and never loses them. `max_blocks` fixes the size of the region (of
    addresses, not of memory). Raises InvalidArgument (fields: field, value, and the bound that was broken).

    host_blocks: blocks of host memory (page-locked for a device) that `kv.host.copy_out` copies to, and `copy_in` from: what
    a paused request holds can lie there while others use its pages. None: as many as `Session(host_kv=)` gives, taken when the
    engine first asks for them (`kv.host.open`). A number: taken at attach, beside `host_kv`.
    streamed_blocks: blocks of the tensors that hold, in passes that name them, what lies in host blocks (`kv.host.stream`): each
    layer's part of them is copied in just before that layer reads it. They take the memory of
    streamed_blocks * 2 / layers blocks. layer_major only, and at most host_blocks.
    scratch_blocks: blocks of the tensors that all layers share, one after another, as streamed blocks are, and into which nothing
    is copied: an engine that computes a layer's keys and values anew in each pass writes them there. With streamed blocks only.
    dtype: of the stored keys and values; by default "bfloat16", which a model of another dtype then refuses at attach
    (kv_fit.py). "uint8" says that the engine lays bytes out itself: then heads are not compared with a model's either, nor,
    without streamed blocks, layers: a block is just its `block_bytes`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = 16
    dtype: str = ""
    min_blocks: int
    max_blocks: int
    layout: str = "block_major"
    host_blocks: int | None = None
    streamed_blocks: int = 0
    scratch_blocks: int = 0
    dtype_named: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype_named", self.dtype != "")
        if self.dtype == "":
            object.__setattr__(self, "dtype", "bfloat16")
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "max_blocks"):
            _require_int(name, getattr(self, name), 1)
        _require_int("min_blocks", self.min_blocks, 0)
        if self.host_blocks is not None:
            _require_int("host_blocks", self.host_blocks, 0)
        _require_int("streamed_blocks", self.streamed_blocks, 0)
        _require_int("scratch_blocks", self.scratch_blocks, 0)
        if self.max_blocks < self.min_blocks:
            raise InvalidArgument(
                f"max_blocks must be at least min_blocks, got {self.max_blocks} < {self.min_blocks}; nothing was "
                "created; raise max_blocks or lower min_blocks",
                field="max_blocks",
                value=self.max_blocks,
                least=self.min_blocks,
                min_blocks=self.min_blocks,
                max_blocks=self.max_blocks,
            )
        if self.dtype not in (*DTYPE_BYTES,):  # not in the dict itself: the value may have no hash
            raise InvalidArgument(
                f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {shown(self.dtype)}; nothing was created; "
                "pass the name of the dtype, without 'torch.'",
                field="dtype",
                value=self.dtype,
            )
        if self.layout not in LAYOUTS:
            raise InvalidArgument(
                f"layout must be one of {', '.join(LAYOUTS)}, got {shown(self.layout)}; nothing was created; "
                "use block_major unless the engine needs one contiguous tensor per layer",
                field="layout",
                value=self.layout,
            )

        if self.streamed_blocks and (self.layout != "layer_major" or self.streamed_blocks > (self.host_blocks or 0)):
            raise InvalidArgument(
                f"streamed_blocks={self.streamed_blocks} needs layout='layer_major', where a layer's part of a block lies by "
                f"itself, and a host block for each; got {shown(self.layout)} and host_blocks={self.host_blocks}; nothing was "
                "created; raise host_blocks or lower streamed_blocks",
                field="streamed_blocks",
                value=self.streamed_blocks,
                layout=self.layout,
                host_blocks=self.host_blocks,
            )
        if self.scratch_blocks and not self.streamed_blocks:
            raise InvalidArgument(
                f"scratch_blocks={self.scratch_blocks} needs streamed_blocks, beside which they lie; nothing was created",
                field="scratch_blocks",
                value=self.scratch_blocks,
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one block's keys (or values) in one layer."""
        return self.block_tokens * self.kv_heads * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all layers, in any layout."""
        return 2 * self.layers * self.chunk_bytes


def with_streamed(spec: KVSpec, streamed_blocks: int, page_bytes: int) -> KVSpec:
    """`spec` in layer_major layout with `streamed_blocks` streamed blocks, or as many as it has host blocks. Their buffers come
    out of the memory of its min_blocks, which falls by what they take, in whole blocks. spec: block_major."""
    wide = replace(spec, layout="layer_major", streamed_blocks=min(streamed_blocks, spec.host_blocks or 0))
    geometry = KVGeometry(wide, page_bytes)
    pages = KVGeometry(spec, page_bytes).pages_for_blocks(spec.min_blocks) - geometry.buffer_pages
    return replace(
        wide, min_blocks=min(spec.min_blocks, geometry.blocks_for_pages(max(0, min(pages, geometry.donation_pages))))
    )


@dataclass(frozen=True)
class KVGeometry:
    """`spec` laid out over pages of `page_bytes`. All methods are O(1) or O(length of the result), and pure.

    page_bytes must be a positive multiple of the itemsize (InvalidArgument otherwise), so that a layer's tensor
    strides are whole elements. Block ids, slots and page counts outside the region raise InvalidArgument.
    """

    spec: KVSpec
    page_bytes: int
    ranges: int = field(init=False)  # 1, or 2 * layers (key range of layer 0, value range of layer 0, key range ...)
    unit_bytes: int = field(init=False)  # bytes of one block within one range
    columns: int = field(init=False)  # of the pool's blocks
    first_streamed: int = field(init=False)  # the first block id behind them that begins with a page
    streamed_columns: int = field(init=False)
    buffer_pages: int = field(init=False)  # pages behind the streamed blocks: a layer's keys and values, BUFFERS times
    range_pages: int = field(init=False)  # places of pages of one range
    range_bytes: int = field(init=False)
    donation_pages: int = field(init=False)  # pages that the pool's max_blocks can take
    region_pages: int = field(init=False)  # places of pages of the whole region
    region_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        _require_int("page_bytes", self.page_bytes, 1)
        if self.page_bytes % spec.itemsize:
            raise InvalidArgument(
                f"page_bytes must be a multiple of the itemsize of {spec.dtype} ({spec.itemsize} bytes), got "
                f"{self.page_bytes}; nothing was created; use the page size of the arena",
                field="page_bytes",
                value=self.page_bytes,
                itemsize=spec.itemsize,
            )
        block_major = spec.layout == "block_major"
        ranges = 1 if block_major else 2 * spec.layers
        unit = spec.block_bytes if block_major else spec.chunk_bytes
        columns = pages = -(-spec.max_blocks * unit // self.page_bytes)
        step = self.page_bytes // math.gcd(self.page_bytes, unit)  # one of `step` blocks begins with a page
        first = -(-columns * self.page_bytes // (unit * step)) * step
        streamed = -(-(spec.streamed_blocks + spec.scratch_blocks) * unit // self.page_bytes)
        if streamed:
            pages = first * unit // self.page_bytes + streamed
        for name, value in (
            ("ranges", ranges),
            ("unit_bytes", unit),
            ("columns", columns),
            ("first_streamed", first),
            ("streamed_columns", streamed),
            ("buffer_pages", BUFFERS * 2 * streamed),
            ("range_pages", pages),
            ("range_bytes", pages * self.page_bytes),
            ("donation_pages", ranges * columns),
            ("region_pages", ranges * pages),
            ("region_bytes", ranges * pages * self.page_bytes),
        ):
            object.__setattr__(self, name, value)

    @property
    def tensor_blocks(self) -> int:
        """Blocks of a layer's tensor."""
        spec = self.spec
        return (
            self.first_streamed + spec.streamed_blocks + spec.scratch_blocks
            if self.streamed_columns
            else spec.max_blocks
        )

    def tensor_layout(self, layer: int) -> tuple[int, tuple[int, int, int, int, int], tuple[int, int, int, int, int]]:
        """Where `layer`'s tensor lies in the region: (offset in bytes, shape, stride in elements).

        The shape is (2, tensor_blocks, block_tokens, kv_heads, head_dim), keys at index 0 and values at index 1.
        """
        spec = self.spec
        self._internals("layer", layer, spec.layers)
        token = spec.kv_heads * spec.head_dim
        chunk = spec.block_tokens * token
        shape = (2, self.tensor_blocks, spec.block_tokens, spec.kv_heads, spec.head_dim)
        if self.ranges == 1:
            return 2 * layer * spec.chunk_bytes, shape, (chunk, 2 * spec.layers * chunk, token, spec.head_dim, 1)
        half = self.range_bytes // spec.itemsize
        return 2 * layer * self.range_bytes, shape, (half, chunk, token, spec.head_dim, 1)

    # -- blocks and pages ------------------------------------------------------------------------------------------

    def columns_of_block(self, block: int) -> range:
        """The columns (page places within each range) that block `block` touches."""
        self._internals("block", block, self.spec.max_blocks)
        start = block * self.unit_bytes
        return range(start // self.page_bytes, (start + self.unit_bytes - 1) // self.page_bytes + 1)

    def slots_of_block(self, block: int) -> tuple[int, ...]:
        """The region slots (page places in the region) that block `block` touches, ascending."""
        columns = self.columns_of_block(block)
        return tuple(r * self.range_pages + c for r in range(self.ranges) for c in columns)

    def byte_ranges_of_block(self, block: int) -> tuple[tuple[int, int], ...]:
        """(offset in the region, bytes) of each piece to copy when a block moves: 1, or 2 * layers for layer_major."""
        self._internals("block", block, self.spec.max_blocks)
        start = block * self.unit_bytes
        return tuple((r * self.range_bytes + start, self.unit_bytes) for r in range(self.ranges))

    # -- donation order ----------------------------------------------------------------------------------------------

    def donation_slot(self, index: int) -> int:
        """The region slot at which the index-th page given to the tenant stands (column after column)."""
        self._internals("index", index, self.donation_pages)
        return index % self.ranges * self.range_pages + index // self.ranges

    def donation_index(self, slot: int) -> int:
        """The inverse of `donation_slot`."""
        self._internals("slot", slot, self.region_pages)
        return slot % self.range_pages * self.ranges + slot // self.range_pages

    def donation_indices(self, slots: Iterable[int]) -> Iterable[int]:
        """`donation_index` of each of these slots, which are trusted: the slots themselves for block_major."""
        if self.ranges == 1:
            return slots
        return (slot % self.range_pages * self.ranges + slot // self.range_pages for slot in slots)

    def donation_slots(self, first: int, count: int) -> Sequence[int]:
        """The slots of the pages [first, first + count) in donation order: a range for block_major, else a list."""
        _require_int("count", count, 0)
        if count == 0:
            return range(0)
        self._internals("index", first, self.donation_pages)
        self._internals("index", first + count - 1, self.donation_pages)
        if self.ranges == 1:
            return range(first, first + count)
        return [i % self.ranges * self.range_pages + i // self.ranges for i in range(first, first + count)]

    def pages_for_blocks(self, blocks: int) -> int:
        """The smallest number of pages that, given in donation order, makes at least `blocks` blocks usable."""
        self._internals("blocks", blocks, self.spec.max_blocks + 1)
        return -(-blocks * self.unit_bytes // self.page_bytes) * self.ranges

    def blocks_for_pages(self, pages: int) -> int:
        """How many blocks are usable when exactly the first `pages` pages in donation order are owned."""
        self._internals("pages", pages, self.donation_pages + 1)
        return min(pages // self.ranges * self.page_bytes // self.unit_bytes, self.spec.max_blocks)

    def _internals(self, name: str, value: int, stop: int) -> None:
        if not isinstance(value, int) or not 0 <= value < stop:
            raise InvalidArgument(
                f"{name} must be an int from 0 to {stop - 1}, got {shown(value)}; nothing was changed; check it against the "
                "KVSpec that the region was made for",
                field=name,
                value=value,
                stop=stop,
            )
