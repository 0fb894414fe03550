# SPDX-License-Identifier: Apache-2.0
"""transformers' own continuous batching (`model.generate_batch`) over the blocks of an attached model's KV pool.

    with remap.attach(model, capacity="600MiB") as attached:
        model.generate_batch(prompts, continuous_batching_config=attached.continuous_batching())

The adapter uses `SCHEDULER_MAPPING`, transformers' table of schedulers by name. transformers makes a scheduler after
the paged cache and before anything reads the cache, and asks it for a batch between two passes. Our scheduler is the
FIFO one with two additions:

    when it is made       it gives the cache our memory and our pool. `PagedAttentionCache.cache_tensor` is one flat
                          tensor of sectors, and a sector of a model with full attention has the layout of a block of
                          a `block_major` KV region: [layer][keys, values][token][head][dim]. Sector i is block i;
                          sectors 0 and 1 belong to the padding
    before each batch     it reports to `session.step` how many blocks the requests take that could run now

transformers itself then allocates nothing larger than one block, except for its attention mask and index tensors, which
are memory beside the arena: without flash attention the mask has max_batch_tokens x (all tokens of the region)
elements.

The adapter refuses four features:
    sliding windows          a sector then holds blocks of several sizes and belongs to one group of layers at a time
                             (`lcm` of block sizes in `PagedAttentionCache.__init__`)
    prefix sharing           the ledger maps contents to block ids, which a step may change
    asynchronous batching    the next batch is indexed while a pass runs
    CUDA graphs              they would capture the brackets of a pass
Upstream, arguments `cache_tensor=` and `pool=` of PagedAttentionCache would make these replacements unnecessary.
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

__all__ = ["BlockScheduler", "BlockSectors", "PagedAttentionCache", "configuration", "withdraw"]

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
"""The names that this module uses in transformers; they are checked if its version is newer than the tested ones."""

# transformers only calls its values, with cache=, safety_margin= and max_requests_per_batch=.
_SCHEDULERS: dict[str, Any] = SCHEDULER_MAPPING
_PADDING = 2  # sectors at the start of the tensor that padding tokens read and write
_ALIGNMENT = 128  # transformers rounds the bytes of sectors up to a multiple


class AttachedBatching(Protocol):
    """The part of `transformers.Attached` that this module uses."""

    blocks: Any
    shape: Any

    @property
    def tenant(self) -> Any: ...
    def ask(self, blocks: int, /) -> Any: ...


def configuration(attached: AttachedBatching, **options: Any) -> ContinuousBatchingConfig:
    """See `AttachedBatching.continuous_batching`."""
    spec = attached.tenant.kv.spec
    fixed: dict[str, Any] = {
        "scheduler_type": f"remap-{id(attached):x}",
        "page_size": spec.block_tokens,
        "num_blocks": 1,  # of transformers' own tensor, which we replace before its first use
        "allow_block_sharing": False,
        "use_async_batching": False,
        "use_cuda_graph": False,
        "max_blocks_per_request": 0,
        "auto_switch_to_flash": False,
    }
    taken = sorted({*fixed} & {*options})
    if taken:
        raise InvalidArgument(f"the adapter sets {taken} itself; nothing changed; leave them out", options=taken)
    if not attached.shape.alike or {*attached.shape.windows} != {None}:
        raise InvalidArgument(
            "sectors of layers with a sliding window, with a state or with other heads than the rest differ from blocks; "
            "nothing changed; use generate()",
            windows=attached.shape.windows,
        )
    if spec.block_bytes % _ALIGNMENT or spec.layout != "block_major":
        raise InvalidArgument(
            f"a block has {spec.block_bytes} bytes, but a sector has a multiple of {_ALIGNMENT} bytes; nothing "
            "changed; attach with other block_tokens",
            block_bytes=spec.block_bytes,
            alignment=_ALIGNMENT,
        )
    _SCHEDULERS[fixed["scheduler_type"]] = functools.partial(BlockScheduler, attached)
    return ContinuousBatchingConfig(**{"safety_margin": 0.0, "max_batch_tokens": 256, **options, **fixed})


def withdraw(attached: AttachedBatching) -> None:
    """Remove the scheduler of a model that is being detached."""
    _SCHEDULERS.pop(f"remap-{id(attached):x}", None)


class BlockSectors(CachePool):
    """The pool of a paged cache: its sectors are the blocks of a tenant's KV pool, which grows and shrinks."""

    def __init__(self, attached: AttachedBatching, cache: PagedAttentionCache) -> None:
        # The base's __init__ would make a list of all sectors.
        self.num_sectors = attached.tenant.kv.max_blocks - _PADDING
        self.num_allocators, self.num_reserved_sectors = 1, _PADDING
        self.blocks_per_sector = [1]
        self._free_blocks = [RegularTrees(1)]
        (self._allocator,) = cache.cache_allocators.values()
        self._kv, self._blocks = attached.tenant.kv, attached.blocks
        # When this pool ends, its table ends, and its blocks become free.
        self._table = self._blocks.table()
        padding = self._blocks.take(_PADDING)
        self._table.rows.append(padding)
        if padding != list(range(_PADDING)):
            raise InvalidState(
                f"the first {_PADDING} blocks are in use, and generate_batch needs them for its padding; nothing "
                "changed; drop other caches first",
                blocks=padding,
            )
        for tensor in self._kv.tensors:
            tensor[:, :_PADDING] = 0
        self._blocks.follow(self)

    @property
    def free_sectors(self) -> range:  # type: ignore[override]
        """A range as long as the number of free blocks; its elements have no meaning."""
        return range(self._kv.free_blocks)

    @property
    def num_free_sectors(self) -> int:
        return self._kv.free_blocks

    def reset(self) -> None:
        """Free all blocks except the padding's."""
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
        """Replace ids of blocks that a step has moved (old id -> new id) in the requests' tables."""
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
    """transformers' FIFO scheduler, over the blocks of a tenant."""

    def __init__(self, attached: AttachedBatching, cache: PagedAttentionCache, **options: Any) -> None:
        self._attached = attached
        _adopt(attached, cache)
        super().__init__(cache=cache, **options)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """Make a step of the session for the requests that could be in the batch, then schedule as usual."""
        self._attached.ask(self._wanted(token_budget))
        return super().schedule_batch(token_budget, cache_budget)

    def _wanted(self, budget: int) -> int:
        """Blocks for the requests that the next batch has room for."""
        (allocator,) = self.cache.cache_allocators.values()
        wanted = 0
        # Decoding requests first, in the order of scheduling.
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


def _adopt(attached: AttachedBatching, cache: PagedAttentionCache) -> None:
    """Make the KV region the cache's tensor, and the tenant's blocks its sectors."""
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
