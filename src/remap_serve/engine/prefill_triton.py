# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel for prefill over paged KV: chunks of prompts, each over all tokens of its sequence up to itself.

The batch is flat: chunks of many sequences, of any lengths, stand one after another. The host cuts it into tiles (some
tokens of one chunk); one program serves a (tile, KV head) with the query heads of that KV head and the tile's tokens as
the rows of one matrix product. Keys before the tile's first token are seen by all its rows and need no mask; the few after
it are masked, before use as in `paged_triton`: the slots beyond the last token are never loaded.

Importing this module imports triton. Not yet run on a GPU; the tests run it in Triton's interpreter and compile it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from remap.errors import InvalidArgument
from remap_serve.engine.paged_triton import LOG2E, dot, keys_and_values, padded_dim, widen

__all__ = ["paged_prefill", "prefill_config", "prefill_tiles"]


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query, most, total, result, keys, values, table, start, end, positions, scale,
    k_block, k_token, v_block, v_token, table_column,
    BLOCK_TOKENS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of keys. CAUSAL: keys may lie beyond a row's position or beyond `end`; else all are seen by all rows."""
    dim = tl.arange(0, DIM_PAD)
    token = start + tl.arange(0, TILE)
    live = token < end
    block = tl.load(table + (token // BLOCK_TOKENS) * table_column, mask=live, other=0).to(tl.int64)
    offset = token % BLOCK_TOKENS
    mask = live[:, None] & (dim < DIM)[None, :]
    key = tl.load(keys + (block * k_block + offset * k_token)[:, None] + dim[None, :], mask=mask, other=0.0)
    score = dot(query, tl.trans(key), WIDEN) * scale
    if CAUSAL:
        score = tl.where(token[None, :] <= positions[:, None], score, float("-inf"))
    # Every row sees the first token of its sequence, so the maximum is finite from the first tile on.
    more = tl.maximum(most, tl.max(score, 1))
    weight = tl.exp2(score - more[:, None])
    shrink = tl.exp2(most - more)
    value = tl.load(values + (block * v_block + offset * v_token)[:, None] + dim[None, :], mask=mask, other=0.0)
    total = total * shrink + tl.sum(weight, 1)
    result = result * shrink[:, None] + dot(weight.to(value.dtype), value, WIDEN)
    return more, total, result


@triton.jit
def _prefill(  # type: ignore[no-untyped-def]
    q, keys, values, table, tiles, out, scale,
    q_token, q_head, k_block, k_token, k_head, v_block, v_token, v_head, table_row, table_column, out_token, out_head,
    BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program a (tile, KV head). tiles: (n, 4) int32, contiguous, see `prefill_tiles`."""
    tiles += tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    row = tl.load(tiles)
    first = tl.load(tiles + 1)
    count = tl.load(tiles + 2)
    position = tl.load(tiles + 3)
    table += row.to(tl.int64) * table_row
    # Row r holds head r % GROUP of token r // GROUP. Rows that are left over repeat no token and are not stored.
    token = tl.arange(0, ROWS) // GROUP
    head = kv_head * GROUP + tl.arange(0, ROWS) % GROUP
    dim = tl.arange(0, DIM_PAD)
    real = (token < count)[:, None] & (dim < DIM)[None, :]
    index = (first + token).to(tl.int64)
    query = tl.load(q + (index * q_token + head * q_head)[:, None] + dim[None, :], mask=real, other=0.0)
    keys += kv_head * k_head
    values += kv_head * v_head
    positions = position + token
    end = position + count
    # Keys [0, shared) are seen by every row, in whole tiles.
    shared = (position + 1) // TILE * TILE
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for start in range(0, shared, TILE):
        most, total, result = _attend(
            query, most, total, result, keys, values, table, start, end, positions, scale,
            k_block, k_token, v_block, v_token, table_column, BLOCK_TOKENS, DIM, DIM_PAD, TILE, False, WIDEN,
        )  # fmt: skip
    for start in range(shared, end, TILE):
        most, total, result = _attend(
            query, most, total, result, keys, values, table, start, end, positions, scale,
            k_block, k_token, v_block, v_token, table_column, BLOCK_TOKENS, DIM, DIM_PAD, TILE, True, WIDEN,
        )  # fmt: skip
    to = (index * out_token + head * out_head)[:, None] + dim[None, :]
    tl.store(out + to, (result / total[:, None]).to(out.dtype.element_ty), mask=real)


def prefill_config(head_dim: int, dtype: torch.dtype, roomy: bool = True) -> dict[str, int]:
    """Rows and keys of a tile, warps and stages for a head size: a static table, without register spills on sm_90.

    Five stages keep one tile in flight while another is multiplied (see `decode_config`) and take up to 132 KiB of shared
    memory. roomy: whether a multiprocessor has as much (data-centre GPUs do); else two stages, 98 KiB at most.
    """
    pad = padded_dim(head_dim)
    if dtype is torch.float32:
        return {"ROWS": 32 if pad <= 128 else 16, "TILE": 16, "num_warps": 8, "num_stages": 2}
    stages = 5 if roomy else 2
    if pad <= 128:
        return {"ROWS": 128, "TILE": 64, "num_warps": 4 if pad <= 64 else 8, "num_stages": stages}
    return {"ROWS": 64, "TILE": 32, "num_warps": 4, "num_stages": stages}


def _roomy(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= 160 * 1024


def prefill_tiles(
    chunks: Sequence[tuple[int, int, int, int]], group: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Cut chunks into tiles: int32 (tiles, 4) on the CPU, longest context first (the programs that take longest).

    chunks: (row of the block table, index of its first token in the flat batch, tokens, position of its first token).
    group: query heads a KV head. A tile is described in the same four words.
    """
    tokens = prefill_config(head_dim, dtype)["ROWS"] // group
    if tokens < 1:
        raise InvalidArgument(f"more query heads share a KV head than a tile has rows: {group}", group=group)
    tiles = [
        (row, first + done, min(tokens, count - done), position + done)
        for row, first, count, position in chunks
        for done in range(0, count, tokens)
    ]
    tiles.sort(key=lambda tile: -(tile[3] + tile[2]))
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 4)


def paged_prefill(
    q: torch.Tensor,
    kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention of chunks of prompts; their own KV has been written before.

    q: (tokens, heads, head_dim), the flat batch. kv, block_table: as in `paged_decode`. tiles: `prefill_tiles`, on q's
    device. out: as q, also the result; tokens that no tile names keep what they held. scale: default head_dim ** -0.5.
    Raises InvalidArgument for shapes that do not fit; nothing is launched then.
    """
    keys, values = keys_and_values(kv)
    _, block_tokens, kv_heads, dim = keys.shape
    _, heads, q_dim = q.shape
    if heads % kv_heads or q_dim != dim or tiles.dim() != 2 or tiles.shape[1] != 4 or not tiles.is_contiguous():
        raise InvalidArgument(
            f"expected q (tokens, multiple of {kv_heads} heads, {dim}) and contiguous tiles (n, 4), got {tuple(q.shape)} "
            f"and {tuple(tiles.shape)}; nothing was computed",
            q=tuple(q.shape),
            tiles=tuple(tiles.shape),
        )
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty_like(q) if out is None else out
    if tiles.shape[0]:
        kernel: Any = _prefill
        kernel[(tiles.shape[0], kv_heads)](
            q, keys, values, block_table, tiles, out, (dim**-0.5 if scale is None else scale) * LOG2E,
            q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
            values.stride(0), values.stride(1), values.stride(2), block_table.stride(0), block_table.stride(1),
            out.stride(0), out.stride(1),
            BLOCK_TOKENS=block_tokens, GROUP=heads // kv_heads, DIM=dim, DIM_PAD=padded_dim(dim), WIDEN=widen(q.dtype),
            **prefill_config(dim, q.dtype, _roomy(q.device)),
        )  # fmt: skip
    return out
