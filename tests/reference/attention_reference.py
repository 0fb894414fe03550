"""Attention over paged KV, the slow and obvious way: one token, one head, one block slot at a time, in float64."""

from __future__ import annotations

import math

import torch


def token_slots(table_row: list[int], length: int, block_tokens: int) -> list[tuple[int, int]]:
    """(block, offset) of the first `length` tokens of a sequence."""
    return [(table_row[token // block_tokens], token % block_tokens) for token in range(length)]


def attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: list[tuple[int, int]], scale: float):
    """q (heads, head_dim) of one token over the given slots -> (heads, head_dim) float64."""
    heads, kv_heads = q.shape[0], keys.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = [float(q[head].double() @ keys[block, offset, shared].double()) * scale for block, offset in slots]
        largest = max(scores)
        weights = [math.exp(score - largest) for score in scores]
        for weight, (block, offset) in zip(weights, slots, strict=True):
            out[head] += weight / sum(weights) * values[block, offset, shared].double()
    return out


def decode_reference(
    q: torch.Tensor, kv: torch.Tensor, table: list[list[int]], lengths: list[int], scale: float
) -> torch.Tensor:
    """q (batch, heads, head_dim); table[b] the blocks of sequence b; length 0 gives zeros."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row, length in enumerate(lengths):
        if length:
            out[row] = attend_one(q[row], kv[0], kv[1], token_slots(table[row], length, kv.shape[2]), scale)
    return out


def prefill_reference(
    q: torch.Tensor, kv: torch.Tensor, table: list[list[int]], chunks: list[tuple[int, int, int, int]], scale: float
) -> torch.Tensor:
    """chunks: (row of table, first row of q, tokens, position of the first); each token sees those up to itself."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row, first, count, position in chunks:
        for token in range(count):
            slots = token_slots(table[row], position + token + 1, kv.shape[2])
            out[first + token] = attend_one(q[first + token], kv[0], kv[1], slots, scale)
    return out
