# SPDX-License-Identifier: Apache-2.0
"""Triton kernels over paged KV: write tokens into their slots, and attention of one new token per sequence.

The KV of a layer is (2, blocks, block_tokens, kv_heads, head_dim) with any strides: in a block-major region the next
block lies a whole block of all layers away, and a region has more than 2^31 elements, so block offsets are 64 bit.

The former contents of a block are never seen. Pages come with whatever was in them, perhaps weights, and 0 * NaN is NaN, so
masking scores is not enough: slots beyond a sequence's length are not loaded at all (the tile holds 0 there), and their
scores are -inf. Slots need no zeroing, and block ids beyond a sequence's length are not read.

Decode is bound by reading K and V once. All query heads of one KV head are the rows of one matrix product, so a KV head
is read once however many heads share it; long sequences are cut into splits that run side by side, whose partial results
(output, log-sum-exp) a second kernel joins. How many splits there are depends on the batch size and the block table's
width, where they lie on the length found in device memory: the grid never changes, so a CUDA graph can hold the launches.

Importing this module imports triton. The tests run it in Triton's interpreter and compile it; decode attention ran on an H200
(bench/gpu/measures/attention.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from remap.errors import InvalidArgument

__all__ = ["decode_config", "decode_splits", "fetch", "paged_decode", "write_kv"]

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
LOG2E = 1.4426950408889634
# A context longer than this is split even if the batch alone would fill the machine: one long sequence in a large batch
# would otherwise keep all others waiting.
LONG_SPLIT = 4096
MOST_SPLITS = 32


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b with fp32 sums. WIDEN: in fp32 throughout; the interpreter multiplies the bit patterns of bf16."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    k_from, v_from, k_to, v_to, slots,
    from_token_k, from_head_k, from_token_v, from_head_v, to_block, to_token, to_head,
    BLOCK_TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """One program a token: all its heads, K and V."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot >= 0:
        head = tl.arange(0, HEADS_PAD)[:, None]
        dim = tl.arange(0, DIM_PAD)[None, :]
        real = (head < HEADS) & (dim < DIM)
        to = (slot // BLOCK_TOKENS).to(tl.int64) * to_block + (slot % BLOCK_TOKENS) * to_token + head * to_head + dim
        wide = token.to(tl.int64)
        k = tl.load(k_from + wide * from_token_k + head * from_head_k + dim, mask=real)
        tl.store(k_to + to, k, mask=real)
        v = tl.load(v_from + wide * from_token_v + head * from_head_v + dim, mask=real)
        tl.store(v_to + to, v, mask=real)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    q, keys, values, table, rows, lengths, out, partial, sums, scale,
    q_token, q_head, k_block, k_token, k_head, v_block, v_token, v_head, table_row, table_column, out_token, out_head,
    BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, INDIRECT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, KV head, split). `scale` includes log2(e): exponentials are powers of two."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + sequence)
    row = tl.load(rows + sequence) if INDIRECT else sequence
    table += row.to(tl.int64) * table_row
    # At least two tiles a split: a short sequence keeps few programs busy, the others leave at once.
    step = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), TILE), 2) * TILE
    begin = split * step
    end = tl.minimum(begin + step, length)

    head = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    real = (head < GROUP)[:, None] & (dim < DIM)[None, :]
    heads = kv_head * GROUP + head
    query = tl.load(q + sequence.to(tl.int64) * q_token + heads[:, None] * q_head + dim[None, :], mask=real, other=0.0)
    keys += kv_head * k_head
    values += kv_head * v_head
    most = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        live = token < end
        block = tl.load(table + (token // BLOCK_TOKENS) * table_column, mask=live, other=0).to(tl.int64)
        offset = token % BLOCK_TOKENS
        mask = live[:, None] & (dim < DIM)[None, :]
        key = tl.load(keys + (block * k_block + offset * k_token)[:, None] + dim[None, :], mask=mask, other=0.0)
        score = tl.where(live[None, :], dot(query, tl.trans(key), WIDEN) * scale, float("-inf"))
        # The first token of a tile is live, so the maximum is finite from the first tile on.
        more = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp2(score - more[:, None])
        shrink = tl.exp2(most - more)
        value = tl.load(values + (block * v_block + offset * v_token)[:, None] + dim[None, :], mask=mask, other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        result = result * shrink[:, None] + dot(weight.to(value.dtype), value, WIDEN)
        most = more
    empty = end <= begin
    total = tl.where(empty, 1.0, total)
    result = result / total[:, None]
    if SPLITS == 1:
        to = sequence.to(tl.int64) * out_token + heads[:, None] * out_head + dim[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=real)
    else:
        # partial (sequences, heads, SPLITS, DIM_PAD) and sums (sequences, heads, SPLITS) are contiguous.
        at = (sequence.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * SPLITS + split
        tl.store(sums + at, tl.where(empty, float("-inf"), most + tl.log2(total)), mask=head < GROUP)
        if end > begin:
            tl.store(partial + at[:, None] * DIM_PAD + dim[None, :], result, mask=(head < GROUP)[:, None])


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    partial, sums, out, out_token, out_head,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, head): the mean of the splits' outputs, weighted by 2^log-sum-exp."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, DIM_PAD)
    at = (sequence.to(tl.int64) * tl.num_programs(1) + head) * SPLITS + split
    size = tl.load(sums + at, mask=split < SPLITS, other=float("-inf"))
    there = size > float("-inf")
    # Without any split (a padded row) the largest is -inf; 0 in its place keeps -inf - -inf out of the exponent.
    largest = tl.maximum(tl.max(size, 0), -3.0e38)
    weight = tl.exp2(size - largest)
    # A split that had nothing to do left its partial output unwritten.
    part = tl.load(partial + at[:, None] * DIM_PAD + dim[None, :], mask=there[:, None], other=0.0)
    result = tl.sum(part * weight[:, None], 0) / tl.maximum(tl.sum(weight, 0), 1.0e-30)
    to = sequence.to(tl.int64) * out_token + head * out_head + dim
    tl.store(out + to, result.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def _fetch(source, target, words, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    # The host writes there between launches: no cache may answer.
    value = tl.load(source + at, mask=at < words, other=0, cache_modifier=".cv")
    tl.store(target + at, value, mask=at < words)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """The width of a head in a tile: a power of two, and what a matrix product takes at least."""
    return max(16, power_of_two(head_dim))


def widen(dtype: torch.dtype) -> bool:
    """Whether kernels must multiply in fp32: see `dot`."""
    return INTERPRETED and dtype is torch.bfloat16


def decode_config(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile, warps and pipeline stages for a head size: a static table, since nothing may be tuned inside a capture.

    Block ids are loaded two stages ahead of the keys that they lead to, so five stages are what keeps one tile of K and V
    in flight while another is multiplied. Both together take 4 * tile * padded head * itemsize bytes of shared memory
    (64 KiB): three programs a multiprocessor.
    """
    tile = 8192 // max(64, padded_dim(head_dim))
    if dtype is torch.float32:
        return {"TILE": max(16, tile // 4), "num_warps": 4, "num_stages": 5}
    return {"TILE": tile, "num_warps": 4, "num_stages": 5}


def decode_splits(batch: int, kv_heads: int, max_tokens: int, sms: int) -> int:
    """How many splits: enough programs for two on each multiprocessor, and no split of a full context above LONG_SPLIT.

    Depends on static sizes only. A power of two, at most MOST_SPLITS.
    """
    filling = -(-2 * sms // max(1, batch * kv_heads))
    return min(MOST_SPLITS, power_of_two(max(filling, -(-max_tokens // LONG_SPLIT))))


def keys_and_values(kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The (keys, values) of one layer, each (blocks, block_tokens, kv_heads, head_dim), from a tensor or a pair."""
    keys, values = (kv[0], kv[1])
    if keys.shape != values.shape or keys.dim() != 4 or keys.stride(3) != 1 or values.stride(3) != 1:
        raise InvalidArgument(
            "expected keys and values of one shape (blocks, block_tokens, kv_heads, head_dim) with contiguous heads, got "
            f"{tuple(keys.shape)} with strides {keys.stride()} and {tuple(values.shape)} with strides {values.stride()}; "
            "nothing was computed",
            shape=tuple(keys.shape),
            strides=keys.stride(),
        )
    return keys, values


def processors(device: torch.device) -> int:
    """Multiprocessors of the device; a small number where there is none (the interpreter)."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def fetch(source: torch.Tensor, target: torch.Tensor, words: int) -> None:
    """Copy the first `words` of int32 `source`, page-locked on the host, to `target` by a kernel, not by a copy engine.

    A layer that is streamed keeps the host-to-device copy engine busy for milliseconds, and a small copy enqueued meanwhile
    may have to wait behind it; loads of a kernel do not.
    """
    kernel: Any = _fetch
    kernel[(triton.cdiv(words, 1024),)](source, target, words, TILE=1024, num_warps=4)


def write_kv(
    kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor], k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store k and v (tokens, kv_heads, head_dim) at slots (tokens,) int32: block * block_tokens + offset; -1 skips one.

    kv: see `keys_and_values`, written in place; every slot but those named keeps its bytes.
    """
    keys, values = keys_and_values(kv)
    _, block_tokens, heads, dim = keys.shape
    if k.shape != (slots.shape[0], heads, dim) or v.shape != k.shape or keys.stride() != values.stride():
        raise InvalidArgument(
            f"expected k and v of shape {(slots.shape[0], heads, dim)} and keys and values with equal strides, got "
            f"{tuple(k.shape)}, {tuple(v.shape)}, strides {keys.stride()} and {values.stride()}; nothing was written",
            expected=(slots.shape[0], heads, dim),
            got=tuple(k.shape),
        )
    if slots.shape[0] == 0:
        return
    k, v = (one if one.stride(2) == 1 else one.contiguous() for one in (k, v))
    kernel: Any = _write
    kernel[(slots.shape[0],)](
        k, v, keys, values, slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        BLOCK_TOKENS=block_tokens, HEADS=heads, DIM=dim, HEADS_PAD=power_of_two(heads), DIM_PAD=padded_dim(dim),
        num_warps=4,
    )  # fmt: skip


def paged_decode(
    q: torch.Tensor,
    kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor | None = None,
    scale: float | None = None,
    *,
    rows: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention of the newest token of each sequence over all its tokens, that one included (its KV is written).

    q: (batch, heads, head_dim), heads a multiple of kv_heads. kv: see `keys_and_values`. block_table: (sequences, width)
    int32, any strides. seq_lens: (batch,) int32, tokens with the new one; 0 marks a padded row, whose result is 0.
    rows: (batch,) int32, the row of block_table of each (default: in order). out: (batch, heads, head_dim), also the
    result. scale: default head_dim ** -0.5. splits: default `decode_splits`. Nothing is read back to the host.
    Raises InvalidArgument for shapes that do not fit; nothing is launched then.
    """
    keys, values = keys_and_values(kv)
    _, block_tokens, kv_heads, dim = keys.shape
    batch, heads, q_dim = q.shape
    if heads % kv_heads or q_dim != dim or seq_lens.shape != (batch,) or block_table.dim() != 2:
        raise InvalidArgument(
            f"expected q (batch, multiple of {kv_heads} heads, {dim}), seq_lens (batch,) and a block table of two "
            f"dimensions, got {tuple(q.shape)}, {tuple(seq_lens.shape)}, {tuple(block_table.shape)}; nothing was computed",
            q=tuple(q.shape),
            seq_lens=tuple(seq_lens.shape),
            block_table=tuple(block_table.shape),
        )
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty_like(q) if out is None else out
    if batch == 0:
        return out
    if splits is None:
        splits = decode_splits(batch, kv_heads, block_table.shape[1] * block_tokens, processors(q.device))
    dim_pad = padded_dim(dim)
    # Graph-safe scratch: inside a capture it comes from the graph's own pool.
    partial = torch.empty(batch, heads, splits, dim_pad, dtype=torch.float32, device=q.device) if splits > 1 else out
    sums = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device) if splits > 1 else out
    group = heads // kv_heads
    decode: Any = _decode
    decode[(batch, kv_heads, splits)](
        q, keys, values, block_table, seq_lens if rows is None else rows, seq_lens, out, partial, sums,
        (dim**-0.5 if scale is None else scale) * LOG2E,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2), block_table.stride(0), block_table.stride(1),
        out.stride(0), out.stride(1),
        BLOCK_TOKENS=block_tokens, GROUP=group, GROUP_PAD=max(16, power_of_two(group)), DIM=dim, DIM_PAD=dim_pad,
        SPLITS=splits, INDIRECT=rows is not None, WIDEN=widen(q.dtype), **decode_config(dim, q.dtype),
    )  # fmt: skip
    if splits > 1:
        join: Any = _join
        join[(batch, heads)](
            partial, sums, out, out.stride(0), out.stride(1),
            DIM=dim, DIM_PAD=dim_pad, SPLITS=splits, SPLITS_PAD=power_of_two(splits), num_warps=4,
        )  # fmt: skip
    return out
