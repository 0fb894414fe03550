"""transformers' own continuous batching (`model.generate_batch`) over the blocks of an attached model's KV pool.

    with remap.attach(model, capacity="600MiB") as attached:
        model.generate_batch(prompts, continuous_batching_config=attached.continuous_batching())

What is used of transformers: `SCHEDULER_MAPPING`, its table of schedulers by name. A scheduler is made after the paged
cache and before anything reads it, and is asked for a batch between two passes. Ours is the FIFO one, and

    when it is made       gives the cache our memory and our pool: `PagedAttentionCache.cache_tensor` is one flat tensor of
                          sectors, and a sector of a model with full attention is laid out as a block of a `block_major` KV
                          region: [layer][keys, values][token][head][dim]. Sector i is block i; 0 and 1 are the padding's
    before each batch     tells `session.step` how many blocks the requests take that could run now

Nothing larger than one block is allocated by transformers itself, but for its attention mask and index tensors: without
flash attention the mask has max_batch_tokens x (all tokens of the region) elements. That is memory beside the arena.

Not possible so, and refused: sliding windows (then a sector holds blocks of several sizes, and belongs to one group of
layers at a time: `lcm` of block sizes in `PagedAttentionCache.__init__`), prefix sharing (the ledger maps contents to
block ids, which a step may change), asynchronous batching (its next batch is indexed while a pass runs) and CUDA graphs
(they would hold the brackets of a pass). Upstream, a `cache_tensor=` and a `pool=` of PagedAttentionCache would replace
what is exchanged here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.cache_allocators.cache_pool import RegularTrees
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from remap.errors import InvalidArgument, InvalidState

from .touched import Touched

__all__ = ["BlockScheduler", "BlockSectors", "configuration", "withdraw"]

_HERE = "transformers.generation.continuous_batching"
TOUCHED = (
    Touched(f"{_HERE}.scheduler", "FIFOScheduler.__init__", "self cache= safety_margin= max_requests_per_batch="),
    Touched(f"{_HERE}.scheduler", "FIFOScheduler.schedule_batch", "self token_budget cache_budget"),
    Touched(f"{_HERE}.cache_allocators.cache_pool", "CachePool.reset", "self"),
    Touched(f"{_HERE}.cache_allocators.cache_pool", "CachePool.set_blocks_per_sector", "self index blocks_per_sector"),
    Touched(f"{_HERE}.cache_allocators.cache_pool", "CachePool.allocate_sector", "self index"),
    Touched(f"{_HERE}.cache_allocators.cache_pool", "CachePool.num_free_sectors"),
    Touched(f"{_HERE}.cache_allocators.cache_pool", "CachePool.try_to_free_sectors", "self"),
    Touched(f"{_HERE}.cache_allocators.cache_pool", "CachePool.free_blocks", "self index block_ids"),
    Touched(f"{_HERE}.cache_allocators.cache_pool", "RegularTrees.delete_full_trees", "self"),
    Touched(f"{_HERE}.cache_allocators.cache_pool", "RegularTrees.add_tree"),
    Touched(
        f"{_HERE}.cache_allocators.full_attention",
        "FullAttentionCacheAllocator.register_cache_tensor",
        "self bytes_per_sector non_trash_bytes cache_tensor pool",
    ),
    Touched(
        f"{_HERE}.cache_allocators.full_attention",
        "FullAttentionCacheAllocator.needs_new_blocks",
        "self request_id past_length query_length",
    ),
)
"""What this module uses of transformers' insides: looked at where its version is newer than the tested ones."""

# Its values are only ever called, with cache=, safety_margin= and max_requests_per_batch=.
_SCHEDULERS: dict[str, Any] = SCHEDULER_MAPPING
_PADDING = 2  # sectors at the start of the tensor that padding tokens read and write
_ALIGNMENT = 128  # transformers rounds sectors up to it


class Attached(Protocol):
    """What is asked of `transformers.Attached`."""

    blocks: Any
    windows: tuple[int | None, ...]

    @property
    def tenant(self) -> Any: ...
    def ask(self, blocks: int, /) -> Any: ...


def configuration(attached: Attached, **options: Any) -> ContinuousBatchingConfig:
    """See `Attached.continuous_batching`."""
    spec = attached.tenant.kv.spec
    fixed: dict[str, Any] = {
        "scheduler_type": f"remap-{id(attached):x}",
        "page_size": spec.block_tokens,
        "num_blocks": 1,  # of transformers' own tensor, which is replaced before it is used
        "allow_block_sharing": False,
        "use_async_batching": False,
        "use_cuda_graph": False,
        "max_blocks_per_request": 0,
        "auto_switch_to_flash": False,
    }
    taken = sorted({*fixed} & {*options})
    if taken:
        raise InvalidArgument(f"{taken} are the adapter's to choose; nothing changed; leave them out", options=taken)
    if attached.windows != (None,) * spec.layers:
        raise InvalidArgument(
            "layers with a sliding window have sectors of another shape than blocks; nothing changed; use generate()",
            windows=attached.windows,
        )
    if spec.block_bytes % _ALIGNMENT or spec.layout != "block_major":
        raise InvalidArgument(
            f"a block of {spec.block_bytes} bytes is no multiple of {_ALIGNMENT}, which sectors are; nothing changed; "
            "attach with other block_tokens",
            block_bytes=spec.block_bytes,
            alignment=_ALIGNMENT,
        )
    _SCHEDULERS[fixed["scheduler_type"]] = functools.partial(BlockScheduler, attached)
    return ContinuousBatchingConfig(**{"safety_margin": 0.0, "max_batch_tokens": 256, **options, **fixed})


def withdraw(attached: Attached) -> None:
    """The attached model goes: so does its scheduler."""
    _SCHEDULERS.pop(f"remap-{id(attached):x}", None)


class BlockSectors(CachePool):
    """The pool of a paged cache: its sectors are the blocks of a tenant's KV pool, which grows and shrinks."""

    def __init__(self, attached: Attached, cache: PagedAttentionCache) -> None:
        # Not the base's __init__: it makes a list of all sectors.
        self.num_sectors = attached.tenant.kv.max_blocks - _PADDING
        self.num_allocators, self.num_reserved_sectors = 1, _PADDING
        self.blocks_per_sector = [1]
        self._free_blocks = [RegularTrees(1)]
        (self._allocator,) = cache.cache_allocators.values()
        self._kv, self._blocks = attached.tenant.kv, attached.blocks
        # Collected with this pool; then the blocks are free.
        self._table = self._blocks.table()
        padding = self._blocks.take(_PADDING)
        self._table.rows.append(padding)
        if padding != list(range(_PADDING)):
            raise InvalidState(
                f"the first {_PADDING} blocks are in use; nothing changed; generate_batch needs them for its padding: "
                "let other caches go first",
                blocks=padding,
            )
        for tensor in self._kv.tensors:
            tensor[:, :_PADDING] = 0
        self._blocks.follow(self)

    @property
    def free_sectors(self) -> range:  # type: ignore[override]
        """As many as there are free blocks. Only its length means anything."""
        return range(self._kv.free_blocks)

    @property
    def num_free_sectors(self) -> int:
        return self._kv.free_blocks

    def reset(self) -> None:
        """Only the padding's blocks are held."""
        self._free_blocks = [RegularTrees(1)]
        held = self._table.rows[0]
        gone = held[_PADDING:]
        del held[_PADDING:]
        self._blocks.drop(gone)

    def set_blocks_per_sector(self, index: int, blocks_per_sector: int) -> None:
        if blocks_per_sector != 1:
            raise InvalidArgument(
                f"a sector holds {blocks_per_sector} blocks, expected 1; nothing changed",
                blocks_per_sector=blocks_per_sector,
            )

    def allocate_sector(self, index: int) -> None:
        (block,) = self._blocks.take(1)
        self._table.rows[0].append(block)
        self._free_blocks[index].add_tree(block)

    def try_to_free_sectors(self) -> None:
        self._release(self._free_blocks[0].delete_full_trees())

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        self._release(block_ids)

    def relocate(self, moved: Mapping[int, int]) -> None:
        """A step moved blocks: requests' tables name the new ones."""
        for row in self._allocator.block_table.values():
            row[:] = [moved.get(block, block) for block in row]
        if len(self._free_blocks[0]):
            blocks = self._free_blocks[0].delete_full_trees()
            for block in blocks:
                self._free_blocks[0].add_tree(moved.get(block, block))

    def _release(self, blocks: list[int]) -> None:
        gone = set(blocks)
        held = self._table.rows[0]
        held[:] = [block for block in held if block not in gone]
        self._blocks.drop(blocks)


class BlockScheduler(FIFOScheduler):
    """First in, first out, over blocks that the session makes from layers."""

    def __init__(self, attached: Attached, cache: PagedAttentionCache, **options: Any) -> None:
        self._attached = attached
        _adopt(attached, cache)
        super().__init__(cache=cache, **options)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """The batch as always, after a step of the session for what could be in it."""
        self._attached.ask(self._wanted(token_budget))
        return super().schedule_batch(token_budget, cache_budget)

    def _wanted(self, budget: int) -> int:
        """Blocks that the requests take which the next batch has room for."""
        (allocator,) = self.cache.cache_allocators.values()
        wanted = 0
        # Decoding first, as they are scheduled.
        active = sorted(self.active_requests.values(), key=lambda state: state.status != RequestStatus.DECODING)
        waiting = (
            [] if self.block_new_requests else [self.waiting_requests[name] for name in self.waiting_requests_order]
        )
        for state in [*active, *waiting][: self.max_requests_per_batch]:
            tokens = min(_tokens_of(state), budget)
            if tokens == 0:
                break
            budget -= tokens
            wanted += allocator.needs_new_blocks(state.request_id, state.current_len(), tokens)
        return wanted


def _tokens_of(state: RequestState) -> int:
    pending = state.tokens_to_process if state.status == RequestStatus.DECODING else state.remaining_prefill_tokens
    return len(pending)


def _adopt(attached: Attached, cache: PagedAttentionCache) -> None:
    """The cache's tensor is the KV region from now on, and its sectors the tenant's blocks."""
    kv = attached.tenant.kv
    spec = kv.spec
    dtype = getattr(torch, spec.dtype)
    found = (len(cache.cache_allocators), cache.bytes_per_sector, cache.dtype)
    if found != (1, spec.block_bytes, dtype):
        raise InvalidArgument(
            f"the paged cache has {found[0]} groups of layers, sectors of {found[1]} bytes and {found[2]}; expected 1, "
            f"{spec.block_bytes} and {dtype}; nothing changed; use generate()",
            groups=found[0],
            bytes_per_sector=found[1],
            expected=spec.block_bytes,
        )
    attached.ask(_PADDING)
    pool = BlockSectors(attached, cache)
    first, total = kv.tensors[0], kv.max_blocks * spec.block_bytes
    with torch.inference_mode(False):
        region = torch.empty(0, dtype=torch.uint8, device=first.device)
        region.set_(first.untyped_storage(), first.storage_offset() * spec.itemsize, (total,), (1,))
    usable = total - _PADDING * spec.block_bytes
    (allocator,) = cache.cache_allocators.values()
    allocator.register_cache_tensor(spec.block_bytes, usable, region, pool)
    cache.cache_tensor, cache.pool = region, pool
    cache.num_sectors = cache.num_blocks = kv.max_blocks - _PADDING
    cache.max_tokens_read = allocator.tokens_per_page * allocator.num_blocks
