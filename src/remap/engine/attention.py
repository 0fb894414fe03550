"""Attention over paged KV on the CPU: blocks may lie anywhere in the KV region, in any order.

Everything that depends on the batch alone (where to write, which blocks to read, masks) is made once a pass, in `AttentionBatch`; a
layer then does a fixed, short list of torch calls. Two kinds of work:

* decode (one new token): sequences of similar length form a group. Their blocks are gathered into scratch (`index_select` on rows of one block,
  three times faster here than indexing with a table), and one fused attention call serves the group. The query heads that share a KV head stand
  as *rows of the query* of that head (grouped-query attention without repeating K and V).
* prefill chunks: one call a sequence, over its own prefix and itself.

What was in a block before is never seen. Blocks come with whatever their pages held, perhaps weights, and 0 * NaN is NaN, so
masking is not enough: the slots of a block that are not written yet are zeroed when its first token is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from remap.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remap.engine.scheduler import Chunk

__all__ = ["AttentionBatch", "PagedAttention", "decode_first"]

# A group costs about as much as reading this many blocks of padding (two gathers and one attention call, measured).
GROUP_COST_BLOCKS = 16


def decode_first(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The order of a pass: single tokens, longest context first (so that groups are slices), then prefill chunks as they came."""
    single = sorted((chunk for chunk in chunks if chunk.count == 1), key=lambda chunk: -chunk.end)
    return single + [chunk for chunk in chunks if chunk.count > 1]


@dataclass(frozen=True)
class _Group:
    """Rows [first, last) of the batch are one token each of sequences of at most `blocks` blocks."""

    first: int
    last: int
    blocks: int
    table: torch.Tensor  # (rows * blocks,) int64, padded with a block of the same sequence
    bias: torch.Tensor  # (rows, 1, 1, blocks * block_tokens): 0 or -inf


@dataclass(frozen=True)
class _Prefill:
    """Rows [first, last) of the batch are tokens [start, length) of one sequence."""

    first: int
    last: int
    length: int
    table: torch.Tensor
    mask: torch.Tensor | None  # (last - first, length); None: start = 0, plainly causal


class AttentionBatch:
    """The index tensors of one pass over `chunks` (in `decode_first` order), shared by all layers."""

    def __init__(self, chunks: Sequence[Chunk], block_tokens: int, dtype: torch.dtype) -> None:
        block_ids: list[int] = []
        positions: list[int] = []
        fresh: list[int] = []
        for chunk in chunks:
            blocks = chunk.sequence.blocks
            positions += range(chunk.start, chunk.end)
            block_ids += [blocks[position // block_tokens] for position in range(chunk.start, chunk.end)]
            last = (chunk.end - 1) // block_tokens
            if chunk.end % block_tokens and last * block_tokens >= chunk.start:
                fresh.append(blocks[last])
        self.tokens = len(positions)
        self.positions = torch.tensor(positions)
        self.block_ids = torch.tensor(block_ids)
        self.offsets = self.positions % block_tokens
        self.fresh = torch.tensor(fresh) if fresh else None
        singles = sum(1 for chunk in chunks if chunk.count == 1)
        self.groups = _groups(chunks[:singles], block_tokens, dtype)
        self.prefills: list[_Prefill] = []
        row = singles
        for chunk in chunks[singles:]:
            self.prefills.append(_prefill(chunk, row, block_tokens, dtype))
            row += chunk.count
        tables = [group.table for group in self.groups] + [prefill.table for prefill in self.prefills]
        self.scratch_blocks = max((len(table) for table in tables), default=0)


def _groups(chunks: Sequence[Chunk], block_tokens: int, dtype: torch.dtype) -> list[_Group]:
    """Cut the sequences, longest first, where padding them to the group's longest would cost more than another group."""
    groups: list[_Group] = []
    first = 0
    while first < len(chunks):
        width = -(-chunks[first].end // block_tokens)
        last, padding = first, 0
        while last < len(chunks):
            padding += width - -(-chunks[last].end // block_tokens)
            if padding > GROUP_COST_BLOCKS:
                break
            last += 1
        table: list[int] = []
        for chunk in chunks[first:last]:
            used = -(-chunk.end // block_tokens)
            blocks = chunk.sequence.blocks
            table += blocks[:used] + [blocks[0]] * (width - used)
        lengths = torch.tensor([chunk.end for chunk in chunks[first:last]])
        hidden = torch.arange(width * block_tokens) >= lengths[:, None]
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        groups.append(_Group(first, last, width, torch.tensor(table), bias[:, None, None, :]))
        first = last
    return groups


def _prefill(chunk: Chunk, row: int, block_tokens: int, dtype: torch.dtype) -> _Prefill:
    table = torch.tensor(chunk.sequence.blocks[: -(-chunk.end // block_tokens)])
    mask = None
    if chunk.start > 0:
        later = torch.arange(chunk.end) > torch.arange(chunk.start, chunk.end)[:, None]
        mask = torch.zeros(later.shape, dtype=dtype).masked_fill_(later, float("-inf"))
    return _Prefill(row, row + chunk.count, chunk.end, table, mask)


class PagedAttention:
    """Writes and reads the KV tensors of one tenant.

    tensors: one a layer, (2, max_blocks, block_tokens, kv_heads, head_dim); any strides between blocks and between K and V, a block's own K
    (or V) contiguous. They are kept, never copied whole. Raises InvalidArgument for another layout.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        _, max_blocks, self.block_tokens, self.kv_heads, self.head_dim = tensors[0].shape
        row = self.block_tokens * self.kv_heads * self.head_dim
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer, tensor in enumerate(tensors):
            inner = (self.kv_heads * self.head_dim, self.head_dim, 1)
            if tensor.shape != tensors[0].shape or tensor.stride()[2:] != inner:
                raise InvalidArgument(
                    f"layer {layer}: expected KV of shape {tuple(tensors[0].shape)} with inner strides {inner}, "
                    f"got {tuple(tensor.shape)} with strides {tensor.stride()}",
                    layer=layer,
                )
            rows = tensor.as_strided((2, max_blocks, row), (tensor.stride(0), tensor.stride(1), 1))
            self.keys.append(tensor[0])
            self.values.append(tensor[1])
            self._rows.append((rows[0], rows[1]))
        self._scratch = torch.empty(2, 0, row, dtype=tensors[0].dtype)

    def __call__(self, layer: int, batch: AttentionBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Write k, v (rows, kv_heads, head_dim) and attend with q (rows, heads, head_dim) -> (rows, heads * head_dim).

        Rows beyond `batch.tokens` are padding: not written, and zero in the result.
        """
        key_rows, value_rows = self._rows[layer]
        if batch.fresh is not None:
            key_rows.index_fill_(0, batch.fresh, 0)
            value_rows.index_fill_(0, batch.fresh, 0)
        where = (batch.block_ids, batch.offsets)
        self.keys[layer].index_put_(where, k[: batch.tokens])
        self.values[layer].index_put_(where, v[: batch.tokens])
        total, heads, head_dim = q.shape
        out = q.new_empty(total, heads * head_dim)
        out[batch.tokens :] = 0
        shared = heads // self.kv_heads
        for group in batch.groups:
            rows = group.last - group.first
            keys, values = self._gather(layer, group.table, rows, batch.scratch_blocks)
            query = q[group.first : group.last].view(rows, self.kv_heads, shared, head_dim)
            bias = group.bias.expand(-1, 1, shared, -1)
            result = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)
            out[group.first : group.last] = result.reshape(rows, heads * head_dim)
        for part in batch.prefills:
            keys, values = self._gather(layer, part.table, 1, batch.scratch_blocks)
            query = q[part.first : part.last].transpose(0, 1)[None]
            result = F.scaled_dot_product_attention(
                query,
                keys[:, :, : part.length],
                values[:, :, : part.length],
                attn_mask=part.mask,
                is_causal=part.mask is None,
                scale=scale,
                enable_gqa=shared > 1,
            )
            out[part.first : part.last] = result[0].transpose(0, 1).reshape(-1, heads * head_dim)
        return out

    def _gather(self, layer: int, table: torch.Tensor, rows: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `rows` sequences as (rows, kv_heads, tokens, head_dim) views of scratch, valid until the next call."""
        if self._scratch.shape[1] < most:
            self._scratch = torch.empty(2, most, self._scratch.shape[2], dtype=self._scratch.dtype)
        views = []
        for source, scratch in zip(self._rows[layer], self._scratch, strict=True):
            target = scratch[: len(table)]
            torch.index_select(source, 0, table, out=target)
            views.append(target.view(rows, -1, self.kv_heads, self.head_dim).transpose(1, 2))
        return views[0], views[1]
