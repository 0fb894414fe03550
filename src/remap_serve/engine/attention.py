# SPDX-License-Identifier: Apache-2.0
"""Attention over paged KV on the CPU: blocks may lie anywhere in the KV region, in any order.

Everything that depends on the batch alone (where to write, which blocks to read, masks) is made once a pass, in
`AttentionBatch`; a layer then does a fixed, short list of torch calls. Two kinds of work:

* decode (the newest token of a sequence): sequences of similar length form a group. Their blocks are gathered into
  scratch (`index_select` on rows of one block, three times faster here than indexing with a table), and one fused
  attention call serves the group. The query heads that share a KV head stand as *rows of the query* of that head
  (grouped-query attention without repeating K and V).
* prefill: tiles of TILE tokens of one sequence, each over all tokens up to its end. Generated tokens that are recomputed
  after a preemption are prefill like a prompt.

Rounding in a matrix kernel depends on the shape it is called with, and a recomputed token is computed in another shape than
when it was decoded: its keys and values are right, and may differ in their last bits.

The former contents of a block are never seen. Blocks come with whatever their pages held, perhaps weights, and 0 * NaN is
NaN, so masking is not enough: slots of a block that are not written yet are zeroed when its first token is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from remap.errors import InvalidArgument
from remap_serve.engine.scheduler import TILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remap_serve.engine.chunk import Chunk

__all__ = ["AttentionBatch", "PagedAttention", "decode_first", "padded"]


def decode_first(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The order of a pass: decodes, longest context first (so that groups are slices), then prefill chunks as they
    came.
    """
    decodes = sorted((chunk for chunk in chunks if chunk.decodes), key=lambda chunk: -chunk.end)
    return decodes + [chunk for chunk in chunks if not chunk.decodes]


def padded(tokens: int) -> int:
    """The width at which a sequence of `tokens` tokens is attended: the next multiple of 64, or of an eighth if that is
    more.
    """
    step = max(64, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


@dataclass(frozen=True)
class _Group:
    """Rows [first, last) of the batch are the newest tokens of sequences of the same padded length."""

    first: int
    last: int
    table: torch.Tensor  # (rows * blocks,) int64, filled up with a block of the same sequence
    bias: torch.Tensor  # (rows, 1, 1, padded length): 0 or -inf


@dataclass(frozen=True)
class _Tile:
    """Rows [first, last) of the batch are consecutive tokens of one sequence, which then has `length` tokens."""

    first: int
    last: int
    length: int
    bias: torch.Tensor  # (last - first, length): 0 or -inf


@dataclass(frozen=True)
class _Prefill:
    """Tokens of one sequence, in tiles, over the blocks in `table`."""

    table: torch.Tensor
    tiles: tuple[_Tile, ...]


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
        self.groups: list[_Group] = []
        self.prefills: list[_Prefill] = []
        decodes = [chunk for chunk in chunks if chunk.decodes]
        row = 0
        for width, members in groupby(decodes, key=lambda chunk: padded(chunk.end)):
            self.groups.append(_group(list(members), row, width, block_tokens, dtype))
            row = self.groups[-1].last
        for chunk in chunks[len(decodes) :]:
            self.prefills.append(_prefill(chunk, row, block_tokens, dtype))
            row += chunk.count
        tables = [group.table for group in self.groups] + [prefill.table for prefill in self.prefills]
        self.scratch_blocks = max(len(table) for table in tables)


def _group(chunks: Sequence[Chunk], row: int, width: int, block_tokens: int, dtype: torch.dtype) -> _Group:
    table: list[int] = []
    for chunk in chunks:
        blocks = chunk.sequence.blocks[: -(-chunk.end // block_tokens)]
        table += blocks + [blocks[0]] * (-(-width // block_tokens) - len(blocks))
    lengths = torch.tensor([chunk.end for chunk in chunks])
    hidden = torch.arange(-(-width // block_tokens) * block_tokens) >= lengths[:, None]
    return _Group(row, row + len(chunks), torch.tensor(table), _bias(hidden, dtype)[:, None, None, :])


def _prefill(chunk: Chunk, row: int, block_tokens: int, dtype: torch.dtype) -> _Prefill:
    tiles = []
    start = chunk.start
    while start < chunk.end:
        end = min(start + TILE - start % TILE, chunk.end)
        later = torch.arange(end) > torch.arange(start, end)[:, None]
        tiles.append(_Tile(row + start - chunk.start, row + end - chunk.start, end, _bias(later, dtype)))
        start = end
    return _Prefill(torch.tensor(chunk.sequence.blocks[: -(-chunk.end // block_tokens)]), tuple(tiles))


def _bias(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


class PagedAttention:
    """Writes and reads the KV tensors of one tenant.

    tensors: one a layer, (2, max_blocks, block_tokens, kv_heads, head_dim); any strides between blocks and between K
    and V, a block's own K (or V) contiguous. They are kept, never copied whole. Raises InvalidArgument for another
    layout.
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

    def __call__(
        self, layer: int, batch: AttentionBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
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
            for tile in part.tiles:
                result = F.scaled_dot_product_attention(
                    q[tile.first : tile.last].transpose(0, 1)[None],
                    keys[:, :, : tile.length],
                    values[:, :, : tile.length],
                    attn_mask=tile.bias,
                    scale=scale,
                    enable_gqa=shared > 1,
                )
                out[tile.first : tile.last] = result[0].transpose(0, 1).reshape(-1, heads * head_dim)
        return out

    def _gather(self, layer: int, table: torch.Tensor, rows: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `rows` sequences: (rows, kv_heads, tokens, head_dim) views of scratch, valid until the next
        call.
        """
        if self._scratch.shape[1] < most:
            self._scratch = torch.empty(2, most, self._scratch.shape[2], dtype=self._scratch.dtype)
        views = []
        for source, scratch in zip(self._rows[layer], self._scratch, strict=True):
            target = scratch[: len(table)]
            torch.index_select(source, 0, table, out=target)
            views.append(target.view(rows, -1, self.kv_heads, self.head_dim).transpose(1, 2))
        return views[0], views[1]
