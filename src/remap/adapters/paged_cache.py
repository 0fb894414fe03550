# SPDX-License-Identifier: Apache-2.0
"""A `transformers` cache whose keys and values live in the blocks of a tenant's KV pool.

The cache's owner calls `prepare(rows, tokens)` before a pass, outside of it: `prepare` reports the demand to the
session and allocates blocks, so that each layer's `update` only writes and reads. Attention in transformers takes dense
keys and values of shape (batch, kv_heads, tokens, head_dim), so `update` gathers a layer's blocks into a workspace that
all layers share. A `DynamicCache` copies as many bytes, because it concatenates, and keeps the copies in memory of its
own.

A layer with a sliding window holds all tokens here (a block has room for every layer) and shows those of the window, as
`DynamicSlidingWindowLayer` does. Such a cache can therefore always be cropped.

A layer that keeps a state instead (a convolution's last inputs, a recurrence) has transformers' own layer, in memory of its
own: the state's size does not grow with the tokens. A pass writes over it, so one that fails spoils it. So has the state of a
layer that keeps both (`StateBlockLayer`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from remap.errors import InvalidArgument, InvalidState

if TYPE_CHECKING:
    from remap.kv.public import KVCache

    from .block_tables import BatchTable, Growth
    from .kv_of_config import KVShape

__all__ = ["BlockLayer", "BlockStore", "PagedCache"]


class BlockStore:
    """The KV region of one tenant (block_major), and the workspace that all of its caches gather layers into.

    A block holds, layer after layer, [keys, values][token][head][dim]. The store treats the region as rows of `width`
    elements: a head's key or value of one token in one layer, or a part of it where heads differ in size. One call with
    row numbers then reads or writes a layer, in the order in which attention takes keys and values.
    """

    def __init__(self, kv: KVCache, shape: KVShape) -> None:
        first = kv.tensors[0]
        self.shape, self.block_tokens = shape, kv.spec.block_tokens
        self.device, self.dtype = first.device, getattr(torch, shape.dtype)
        self._width = math.gcd(*(dim for _, dim in shape.heads))
        sizes = (2 * self.block_tokens * heads * dim // self._width for heads, dim in shape.heads)
        *self._starts, self._block_rows = accumulate(sizes, initial=0)  # rows of a block, before each layer and in all
        with torch.inference_mode(False):  # inference tensors could not be written outside of that mode
            self._rows: torch.Tensor | None = torch.empty(0, dtype=self.dtype, device=first.device)
            rows = (kv.max_blocks * self._block_rows, self._width), (self._width, 1)
            offset = first.storage_offset() * first.element_size() // self._rows.element_size()
            self._rows.set_(first.untyped_storage(), offset, *rows)
            self._workspace = torch.empty(0, dtype=self.dtype, device=first.device)
            self._inner = {heads: self._within(*heads) for heads in {*shape.heads}}

    def _within(self, heads: int, dim: int) -> torch.Tensor:
        """Distance from a token's first row to that of (keys or values, head, part), shape (2, 1, heads, 1, parts)."""
        parts = dim // self._width
        inner = torch.arange(heads * parts, device=self.device).view(1, 1, heads, 1, parts)
        return inner + torch.arange(2, device=self.device).view(2, 1, 1, 1, 1) * (self.block_tokens * heads * parts)

    @property
    def region(self) -> torch.Tensor:
        """All rows. Raises InvalidState once the memory has gone."""
        if self._rows is None:
            raise InvalidState(
                "the cache was made for a model that has been detached, and its tokens went with it; nothing was computed; "
                "begin again with a new cache"
            )
        return self._rows

    def close(self) -> None:
        """The memory goes away."""
        self._rows = None

    def rows(self, layer: int, blocks: torch.Tensor, first: int, tokens: int) -> torch.Tensor:
        """Rows of tokens [first, first + tokens) in a layer that is the first one and has this layer's heads, shape (2,
        sequences, kv_heads, tokens, rows of a head).

        blocks: block ids, shape (sequences, blocks).
        """
        heads, dim = self.shape.heads[layer]
        size, parts = self.block_tokens, dim // self._width
        position = torch.arange(first, first + tokens, device=self.device)
        block = blocks[:, position // size] * self._block_rows
        token = block + position % size * (heads * parts)
        return token.view(1, len(blocks), 1, tokens, 1) + self._inner[heads, dim]

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values, each of shape (sequences, kv_heads, tokens, head_dim), to `rows` (see `rows()`)."""
        for where, what in zip(rows + self._starts[layer], (keys, values)):
            self.region.index_copy_(0, where.reshape(-1), what.reshape(-1, self._width).to(self.dtype))

    def read(self, layer: int, rows: torch.Tensor, own: bool = False) -> torch.Tensor:
        """The keys and values in `rows`, dense, of shape (2, sequences, kv_heads, tokens, head_dim).

        own: in memory of their own; else in the workspace, which the next call overwrites.
        """
        needed = rows.numel() * self._width
        if own:
            out = torch.empty(needed, dtype=self.dtype, device=self.device)
        else:
            if needed > self._workspace.numel():
                with torch.inference_mode(False):  # with room for more tokens: every pass adds one
                    self._workspace = self._workspace.new_empty(needed + needed // 4)
            out = self._workspace[:needed]
        where = (rows + self._starts[layer]).view(-1)
        torch.index_select(self.region, 0, where, out=out.view(-1, self._width))
        return out.view(*rows.shape[:-1], self.shape.heads[layer][1])


class Batch:
    """The state that the layers of one cache share.

    Layers refer to this object and not to the cache: a reference cycle would keep its blocks until a garbage
    collection.
    """

    def __init__(self, store: BlockStore, table: BatchTable) -> None:
        self.store = store
        self.table = table
        self.slots: tuple[int, int] | None = None  # (first, count): tokens of the prepared pass
        self.spoiled = False  # whether layers' states may be of other tokens than the blocks
        self._version = -1
        self._blocks: torch.Tensor | None = None
        self._rows: dict[tuple[object, int, int], torch.Tensor] = {}

    def rows(self, layer: int, first: int, tokens: int) -> torch.Tensor:
        """`BlockStore.rows` of the present table, computed once a pass for all layers with the same heads and tokens."""
        if self._blocks is None or self._version != self.table.version:
            self._blocks = torch.tensor(self.table.rows, dtype=torch.long, device=self.store.device)
            self._version = self.table.version
            self._rows.clear()
        what = (self.store.shape.heads[layer], first, tokens)
        found = self._rows.get(what)
        if found is None:
            found = self._rows[what] = self.store.rows(layer, self._blocks, first, tokens)
        return found

    def forget_rows(self) -> None:
        """Drop the rows of the last pass."""
        self._rows.clear()


class BlockLayer(CacheLayerMixin):
    """One decoder layer's keys and values. The bytes are in the table's blocks; `keys` and `values` gather copies."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: Batch, layer: int, window: int | None, index: int) -> None:
        # The base's __init__ would set keys and values, which are properties here.
        self._batch = batch
        self._layer = layer  # of those in the blocks
        self._index = index  # of the model's layers
        self.tokens = 0
        self.dtypes: tuple[torch.dtype, ...] = ()  # of keys and values, as a cache that appends them would have them
        self.dims = (0, 0)  # of a head's key and value; where they differ (latent attention) rows have half of both
        self.is_sliding = window is not None
        self.sliding_window = window

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.tokens > 0

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """A copy of all keys, shape (batch, kv_heads, tokens, head_dim); None without tokens."""
        return self._copy(0)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """A copy of all values, shape (batch, kv_heads, tokens, head_dim); None without tokens."""
        return self._copy(1)

    @property
    def batch_size(self) -> int:
        return len(self._batch.table.rows) or -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the memory exists already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens of this pass; return the keys and values for attention, (batch, kv_heads, tokens, head_dim)
        each, in the dtype and of the head_dim in which they came: a pool keeps those of a narrower dtype exactly.

        The returned tensors lie in the workspace and are valid until another layer's update; where layers read another's
        keys and values, in memory of their own. Raises InvalidState outside of a prepared pass, or if gradients would be
        lost; InvalidArgument (fields expected, keys, values) for shapes or a dtype that differ from the KV pool's. Nothing
        was written then.
        """
        batch, count = self._batch, self._checked(key_states, value_states)
        if not self.tokens:
            self.dtypes = (key_states.dtype, value_states.dtype)
            self.dims = (key_states.shape[-1], value_states.shape[-1])
        came = (key_states, value_states)
        halves = came if self.dims[0] == self.dims[1] else torch.cat(came, -1).chunk(2, -1)
        given = zip(self.dtypes, (key_states, value_states))
        self.dtypes = tuple(torch.promote_types(before, now.dtype) for before, now in given)
        batch.store.write(self._layer, batch.rows(self._layer, self.tokens, count), *halves)
        shown = self.tokens if self.sliding_window is None else min(self.tokens, self.sliding_window - 1)
        rows = batch.rows(self._layer, self.tokens - shown, shown + count)
        both = batch.store.read(self._layer, rows, own=batch.store.shape.shared)
        self.tokens += count
        keys, values = (one.to(dtype) for one, dtype in zip(self._apart(both), self.dtypes))
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of tokens that `update` will return, position of the first of them)."""
        if self.sliding_window is None:
            return self.tokens + query_length, 0
        shown = min(self.tokens, self.sliding_window - 1)
        return shown + query_length, self.tokens - shown

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def offload(self) -> None:
        """Does nothing: the session decides where blocks are."""

    def prefetch(self) -> None:
        """Does nothing: the session decides where blocks are."""

    def reset(self) -> None:
        """Forget the tokens. `PagedCache.reset` frees the blocks."""
        self.tokens = 0

    # These change the table, which all layers share: `PagedCache` has them.
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise _of_the_cache("reorder_cache")

    def crop(self, tokens_to_remove: int) -> None:
        raise _of_the_cache("crop")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _of_the_cache("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise _of_the_cache("batch_select_indices")

    def _copy(self, which: int) -> torch.Tensor | None:
        if not self.tokens:
            return None
        batch = self._batch
        both = batch.store.read(self._layer, batch.rows(self._layer, 0, self.tokens), own=True)
        return self._apart(both)[which]

    def _apart(self, both: torch.Tensor) -> Sequence[torch.Tensor]:
        return both.unbind() if self.dims[0] == self.dims[1] else torch.cat(both.unbind(), -1).split(self.dims, -1)

    def _checked(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """The number of tokens. Raises InvalidState or InvalidArgument as `update` does."""
        slots, (heads, dim) = self._batch.slots, self._batch.store.shape.heads[self._layer]
        _ = self._batch.store.region
        if slots is None or slots != (self.tokens, keys.shape[-2]):
            self._batch.spoiled = True  # layers with states before this one have gone on
            raise InvalidState(
                f"layer {self._index} got {keys.shape[-2]} tokens after {self.tokens}, and no pass was prepared for "
                "them; nothing was written; call the attached model itself (not a part of it), which calls each layer "
                "once",
                layer=self._index,
                tokens=int(keys.shape[-2]),
                held=self.tokens,
            )
        expected = (len(self._batch.table.rows), heads, slots[1], dim)
        dtype = self._batch.store.dtype
        dims = (keys.shape[-1], values.shape[-1])
        shaped = all(tuple(each.shape[:3]) == expected[:3] for each in (keys, values)) and sum(dims) == 2 * dim
        shaped = shaped and (not self.tokens or dims == self.dims)
        wider = torch.promote_types(torch.promote_types(keys.dtype, values.dtype), dtype)
        if not shaped or wider != dtype:
            why = (
                f"it would round them (torch.autocast gives other dtypes than the model's); pass attach(dtype={str(wider)[6:]!r})"
                if shaped
                else "the configuration of the model names other heads for this layer"
            )
            raise InvalidArgument(
                f"layer {self._index} gave keys {tuple(keys.shape)} of {keys.dtype} and values {tuple(values.shape)} of "
                f"{values.dtype}, but the KV pool takes {expected} of {dtype}; nothing was written; {why}",
                layer=self._index,
                expected=expected,
                keys=tuple(keys.shape),
                values=tuple(values.shape),
                dtype=str(keys.dtype),
            )
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise InvalidState(
                "keys and values require gradients, which a KV pool cannot keep; nothing was written; call the model "
                "under torch.no_grad(), or with use_cache=False to train",
                layer=self._index,
            )
        return slots[1]


class StateBlockLayer(BlockLayer, LinearAttentionLayer):
    """A layer that keeps a state beside keys and values (Falcon-H1): the state is as transformers has it."""

    lazy_initialization = LinearAttentionLayer.lazy_initialization  # type: ignore[assignment]
    crop = LinearAttentionLayer.crop
    is_croppable = LinearAttentionLayer.is_croppable

    def __init__(self, kept: Any, *of_blocks: Any) -> None:
        BlockLayer.__init__(self, *of_blocks)
        vars(self).update(copy.deepcopy(vars(kept)))


class PagedCache(Cache):
    """The cache of one batch. `Attached.cache()` makes it; `reset()` frees its blocks, and so does its end of life.

    ready(table, rows, tokens): reports the demand to the session, between passes, and returns the table's plan.
    copy([(from, to)]): copies the bytes of blocks.
    """

    def __init__(
        self,
        store: BlockStore,
        table: BatchTable,
        ready: Callable[[BatchTable, int, int], Growth],
        copy: Callable[[Sequence[tuple[int, int]]], None],
    ) -> None:
        self.table = table
        self._batch = Batch(store, table)
        self._ready, self._copy = ready, copy
        self._layers: list[BlockLayer] = []
        self._states: dict[int, LinearAttentionCacheLayerMixin] = {}  # by the model's layer
        super().__init__(layers=[self._made(index, kept) for index, kept in enumerate(store.shape.kept)])

    def _made(self, index: int, kept: Any) -> Any:
        stateful = isinstance(kept, LinearAttentionCacheLayerMixin)
        if isinstance(kept, CacheLayerMixin):
            of_blocks = self._batch, len(self._layers), getattr(kept, "sliding_window", None), index
            self._layers.append(StateBlockLayer(kept, *of_blocks) if stateful else BlockLayer(*of_blocks))
            made: Any = self._layers[-1]
        else:
            made = copy.deepcopy(kept)
        if stateful:
            self._states[index] = made
        return made

    def prepare(self, rows: int, tokens: int) -> None:
        """Make room for `tokens` more tokens of each of `rows` sequences. Call it outside of a pass.

        Raises OutOfBlocks (fields requested, free, usable) if blocks are missing and no more layers may be remapped;
        InvalidState if the cache holds another number of sequences, or is spoiled. The cache has not changed then.
        """
        self._check("nothing was computed")
        growth = self._ready(self.table, rows, tokens)
        copies = self.table.extend(growth)
        if copies:
            self._copy(copies)
        self._batch.forget_rows()
        self._batch.slots = (self.table.tokens, tokens)
        # Until the pass is over: kernels write over states without a word to the cache, and an interrupt may end all.
        self._batch.spoiled = True

    def finish(self, completed: bool) -> None:
        """End the prepared pass. A pass that was not completed adds no tokens, and spoils a cache with states and tokens.

        Raises InvalidState (fields layers, tokens) if a completed pass did not write its tokens into every layer; it
        adds none then.
        """
        slots, self._batch.slots = self._batch.slots, None
        if slots is None:
            return
        first, count = slots
        if completed and all(layer.tokens == first + count for layer in self._layers):
            self.table.tokens = first + count
            self._batch.spoiled = False
            return
        for layer in self._layers:
            layer.tokens = first
        if not first:
            self._forget_states()
        if completed:
            raise InvalidState(
                f"a pass did not write {count} tokens into all {len(self._layers)} layers with keys and values; the cache has "
                "dropped its tokens; a pass has to call every layer once",
                layers=len(self._layers),
                tokens=count,
            )

    def reset(self) -> None:
        """Forget all tokens and states, and free the blocks."""
        self.table.clear()
        self._set(0)
        self._forget_states()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -n tokens (n < 0) of each sequence, or keep n tokens (n > 0).

        Frees whole blocks behind them. Raises InvalidState, and changes nothing, if a layer's state cannot go back: a
        recurrent one, or one whose past was not recorded (`activate_past_recording`).
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers before 5.19 gives a tensor
        held = self.table.tokens
        keep = tokens_to_remove if tokens_to_remove > 0 else held + tokens_to_remove
        if keep <= 0 < held:
            self.reset()
            return
        gone = max(0, held - keep)
        fixed = [at for at, state in self._states.items() if not (state.record_past and state.is_croppable)]
        if gone and fixed:
            raise InvalidState(
                f"layers {fixed} keep a state of all {held} tokens, which cannot go back by {gone}; nothing changed; decode "
                "without an assistant, or go on from a copy.deepcopy of the cache that was made before these tokens",
                layers=fixed,
                tokens=gone,
            )
        self._check("nothing changed")
        for state in self._states.values():
            if state.record_past and state.is_croppable:
                state.crop(-gone)  # also by 0: it drops what it has recorded
        if gone:
            self.table.crop(keep)
            self._set(self.table.tokens)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i continues sequence beam_idx[i]. Copies no bytes of blocks until the sequences differ."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these sequences (indices, or one boolean for each sequence)."""
        if not self.table.rows:
            return
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select([int(index) for index in chosen.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times, side by side."""
        self._select([row for row in range(len(self.table.rows)) for _ in range(repeats)])

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """Another cache of the same tokens, which continues by itself. Copies no bytes until one of them writes, but states."""
        memo[id(self)] = made = PagedCache(self._batch.store, self.table.copy(), self._ready, self._copy)
        made._batch.spoiled = self._batch.spoiled
        for layer, mine in zip(made._layers, self._layers):
            layer.tokens, layer.dtypes, layer.dims = self.table.tokens, mine.dtypes, mine.dims
        for index, state in self._states.items():
            here = {name: vars(state)[name] for name in vars(self._batch.store.shape.kept[index])}
            vars(made._states[index]).update(copy.deepcopy(here))
        return made

    def _select(self, rows: list[int]) -> None:
        self.table.select(rows)
        for state in self._states.values():
            for kind in (state.conv_states, state.recurrent_states):
                for which, each in kind.items():
                    if each is not None:
                        kind[which] = each[rows]

    def _set(self, tokens: int) -> None:
        self._batch.slots = None
        for layer in self._layers:
            layer.tokens = tokens

    def _forget_states(self) -> None:
        """transformers' own reset would keep the tensors, and the next batch may have another size."""
        self._batch.spoiled = False
        for index, state in self._states.items():
            past = state.record_past
            vars(state).update(copy.deepcopy(vars(self._batch.store.shape.kept[index])))
            state.record_past = past

    def _check(self, unchanged: str) -> None:
        if self._batch.spoiled and self._states:
            raise InvalidState(
                f"a pass failed after it may have changed the states of layers {list(self._states)}, from which no token can "
                f"be taken; {unchanged}; reset the cache, and give it all tokens again",
                layers=list(self._states),
                tokens=self.table.tokens,
            )


def _of_the_cache(call: str) -> InvalidState:
    return InvalidState(
        f"{call} was called on one layer, but all layers share blocks; nothing changed; use the cache's"
    )
