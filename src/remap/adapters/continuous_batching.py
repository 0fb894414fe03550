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
                          sectors 0 and 1 belong to the padding. Where some layers have a sliding window, a sector
                          belongs to them or to the others at a time: a page then has as many tokens as make a sector
                          that either can divide (`_page_tokens`) as large as a block
    before each batch     it reports to `session.step` how many blocks the requests take that could run now

transformers itself then allocates nothing larger than one block, except for its attention mask and index tensors, which
are memory beside the arena: without flash attention the mask has max_batch_tokens x (all tokens of the region)
elements.

The adapter refuses five features:
    chunked attention        and layers with a state, or with other heads than the rest: a paged cache has none
    block_tokens             for which no page makes a sector as large as a block (the error says which do)
    prefix sharing           the ledger maps contents to block ids, which a step may change
    asynchronous batching    the next batch is indexed while a pass runs
    CUDA graphs              they would capture the brackets of a pass
Upstream, arguments `cache_tensor=` and `pool=` of PagedAttentionCache would make these replacements unnecessary.
"""

from __future__ import annotations

import functools
import math
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
    Touched(f"{_HERE}.cache_allocators.cache_pool", "RegularTrees.add_leaves", "self leaves"),
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
    model: Any
    shape: Any

    @property
    def tenant(self) -> Any: ...
    def ask(self, blocks: int, /) -> Any: ...


def configuration(attached: AttachedBatching, **options: Any) -> ContinuousBatchingConfig:
    """See `AttachedBatching.continuous_batching`."""
    spec = attached.tenant.kv.spec
    page, sector_layers = _page_tokens(attached)
    fixed: dict[str, Any] = {
        "scheduler_type": f"remap-{id(attached):x}",
        "page_size": page,
        # Of transformers' own tensor, which we replace before its first use: one sector.
        "num_blocks": -(-sector_layers // spec.layers),
        "allow_block_sharing": False,
        "use_async_batching": False,
        "use_cuda_graph": False,
        "max_blocks_per_request": 0,
        "auto_switch_to_flash": False,
    }
    taken = sorted({*fixed} & {*options})
    if taken:
        raise InvalidArgument(f"the adapter sets {taken} itself; nothing changed; leave them out", options=taken)
    if spec.block_bytes % _ALIGNMENT or spec.layout != "block_major":
        raise InvalidArgument(
            f"a block has {spec.block_bytes} bytes, but a sector has a multiple of {_ALIGNMENT} bytes; nothing "
            "changed; attach with other block_tokens",
            block_bytes=spec.block_bytes,
            alignment=_ALIGNMENT,
        )
    _SCHEDULERS[fixed["scheduler_type"]] = functools.partial(BlockScheduler, attached)
    return ContinuousBatchingConfig(**{"safety_margin": 0.0, "max_batch_tokens": 256, **options, **fixed})


def _page_tokens(attached: AttachedBatching) -> tuple[int, int]:
    """(tokens of a page, pages of a sector), such that a sector is as large as a block."""
    spec, windows = attached.tenant.kv.spec, attached.shape.windows
    kinds = {*(getattr(attached.model.config.get_text_config(decoder=True), "layer_types", None) or ())}
    if not attached.shape.alike or not kinds <= {"full_attention", "sliding_attention"}:
        raise InvalidArgument(
            "a paged cache has no chunked attention, and no layers with a state or with other heads than the rest; nothing "
            "changed; use generate()",
            windows=windows,
        )
    full = windows.count(None)
    sector = math.lcm(*(layers for layers in (full, len(windows) - full) if layers))
    if spec.layers * spec.block_tokens % sector:
        least = sector // math.gcd(sector, spec.layers)
        raise InvalidArgument(
            f"a sector holds pages of {full} layers, or of {len(windows) - full} with a sliding window, and none is as large as "
            f"a block of {spec.block_tokens} tokens; nothing changed; attach with block_tokens={least} or a multiple, or use "
            "generate()",
            windows=windows,
            block_tokens=least,
        )
    return spec.layers * spec.block_tokens // sector, sector


def withdraw(attached: AttachedBatching) -> None:
    """Remove the scheduler of a model that is being detached."""
    _SCHEDULERS.pop(f"remap-{id(attached):x}", None)


class BlockSectors(CachePool):
    """The pool of a paged cache: its sectors are the blocks of a tenant's KV pool, which grows and shrinks."""

    def __init__(self, attached: AttachedBatching, cache: PagedAttentionCache) -> None:
        # The base's __init__ would make a list of all sectors.
        self.num_sectors = attached.tenant.kv.max_blocks - _PADDING
        self.num_allocators, self.num_reserved_sectors = len(cache.cache_allocators), _PADDING
        self.blocks_per_sector = [1] * self.num_allocators
        self._free_blocks = [RegularTrees(1) for _ in self.blocks_per_sector]
        self._allocators = tuple(cache.cache_allocators.values())
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
        self._free_blocks = [RegularTrees(blocks) for blocks in self.blocks_per_sector]
        held = self._table.rows[0]
        gone = held[_PADDING:]
        del held[_PADDING:]
        self._blocks.drop(gone)

    def allocate_sector(self, index: int) -> None:
        (block,) = self._blocks.take(1)
        self._table.rows[0].append(block)
        self._free_blocks[index].add_tree(block)

    def try_to_free_sectors(self) -> None:
        for trees in self._free_blocks:
            self._release(trees.delete_full_trees())

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        super().free_blocks(index, block_ids)
        self._release(self._free_blocks[index].delete_full_trees())

    def relocate(self, moved: Mapping[int, int]) -> None:
        """Replace ids of sectors that a step has moved (old id -> new id) in the requests' tables."""
        for allocator, trees in zip(self._allocators, self._free_blocks):
            size = trees.elems_per_tree  # blocks of a sector

            def now(block: int, size: int = size) -> int:
                return moved.get(block // size, block // size) * size + block % size

            for row in allocator.block_table.values():
                row[:] = map(now, row)
            trees.trees = {moved.get(root, root): [*map(now, leaves)] for root, leaves in trees.trees.items()}

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
        """Sectors for the requests that the next batch has room for."""
        wanted = dict.fromkeys(self.cache.cache_allocators.values(), 0)  # blocks
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
            for allocator in wanted:
                wanted[allocator] += allocator.needs_new_blocks(state.request_id, state.current_len(), tokens)
        missing = ((each, blocks - self.cache.pool.count_free_blocks(each.index)) for each, blocks in wanted.items())
        return sum(-(-max(0, blocks) // each.blocks_per_sector) for each, blocks in missing)


def _tokens_of(state: RequestState) -> int:
    pending = state.tokens_to_process if state.status == RequestStatus.DECODING else state.remaining_prefill_tokens
    return len(pending)


def _adopt(attached: AttachedBatching, cache: PagedAttentionCache) -> None:
    """Make the KV region the cache's tensor, and the tenant's blocks its sectors."""
    kv = attached.tenant.kv
    spec = kv.spec
    dtype = getattr(torch, spec.dtype)
    found = (cache.bytes_per_sector, cache.dtype)
    if found != (spec.block_bytes, dtype):
        raise InvalidArgument(
            f"the paged cache has sectors of {found[0]} bytes and {found[1]}; expected {spec.block_bytes} and {dtype}; nothing "
            "changed; use generate()",
            bytes_per_sector=found[0],
            expected=spec.block_bytes,
        )
    attached.ask(_PADDING)
    pool = BlockSectors(attached, cache)
    first, total = kv.tensors[0], kv.max_blocks * spec.block_bytes
    with torch.inference_mode(False):
        region = torch.empty(0, dtype=torch.uint8, device=first.device)
        region.set_(first.untyped_storage(), first.storage_offset() * spec.itemsize, (total,), (1,))
    usable = total - _PADDING * spec.block_bytes
    allocators = [*cache.cache_allocators.values()]
    for each in allocators:
        each.register_cache_tensor(spec.block_bytes, usable, region, pool)
    cache.cache_tensor, cache.pool = region, pool
    cache.num_sectors = kv.max_blocks - _PADDING
    cache.num_blocks = cache.num_sectors * spec.block_tokens // allocators[0].tokens_per_page
    cache.max_tokens_read = max(each.tokens_per_page * each.num_blocks for each in allocators)
