# SPDX-License-Identifier: Apache-2.0
"""How a budget of memory is divided for an offline batch: layers that stay, KV's pool, the buffers of what streams. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remap.errors import InvalidArgument
from remap.kv.spec import KVGeometry, KVSpec
from remap.sizes import show_size
from remap_serve.engine.pairs import END, PAIR
from remap_serve.engine.throughput import ThroughputScheduler

if TYPE_CHECKING:
    from remap.model.footprint import Footprint
    from remap_serve.policy.activations import Ratio

__all__ = ["ThroughputLayout", "lay_out"]

_RING = 2


@dataclass(frozen=True)
class ThroughputLayout:
    """resident_layers: as in `Session.attach`. spec: the KV cache. num_seqs: requests that have room at once."""

    resident_layers: int | None
    spec: KVSpec
    num_seqs: int


def lay_out(
    budget_bytes: int,
    page_bytes: int,
    model: Footprint,
    spec: Callable[..., KVSpec],
    *,
    host_bytes: int,
    longest_tokens: int,
    num_seqs: int,
    batch_tokens: int,
    chunk_align: int,
    ratio: Ratio | None,
) -> ThroughputLayout:
    """The layout with the most requests at once (`num_seqs` at most), of those the one with the most host blocks (`host_bytes` at
    most), and then as many layers as fit. longest_tokens: of one request. batch_tokens, chunk_align: see `Scheduler`.
    ratio: None: room for whichever the engine chooses, so host blocks for KV alone and scratch blocks for activations alone.

    Raises InvalidArgument (fields field, value, needed) if host memory, or the budget, has no room for one request.
    """
    layers, budget = model.layer_pages(page_bytes), budget_bytes // page_bytes
    rest = -(-model.rest_bytes // page_bytes)
    bare = spec(min_blocks=0, max_blocks=1, layout="layer_major")
    plan = ThroughputScheduler(
        ratio=(0, 1) if ratio is None else ratio,
        host_blocks=0,
        block_tokens=bare.block_tokens,
        max_num_seqs=num_seqs,
        max_batch_tokens=batch_tokens,
        chunk_align=chunk_align,
    )
    least, scratch = max(1, plan.host_need(longest_tokens)), plan.activation_blocks(longest_tokens)
    if ratio is None:
        scratch = plan.blocks_for(longest_tokens) // PAIR * PAIR
    host = host_bytes // bare.block_bytes
    if host < least:
        raise InvalidArgument(
            f"host memory must hold the KV of one request of {longest_tokens} tokens, {show_size(least * bare.block_bytes)}, got "
            f"{show_size(host_bytes)}; nothing was made; give more",
            field="host_kv",
            value=host_bytes,
            needed=least * bare.block_bytes,
        )
    needed = 0
    for seqs in _halved(num_seqs, 1):
        for blocks in _halved(host, least):
            # The ends of all requests, and a batch of prompts with its staging.
            pool = plan.least_blocks + END * (seqs - 1) + 3 * plan.blocks_for(batch_tokens) // 2
            made = spec(
                min_blocks=pool,
                max_blocks=pool,
                layout="layer_major",
                host_blocks=blocks,
                streamed_blocks=blocks,
                scratch_blocks=scratch,
            )
            geometry = KVGeometry(made, page_bytes)
            other = rest + geometry.pages_for_blocks(pool) + geometry.buffer_pages
            left = budget - other
            if left >= sum(layers):
                return ThroughputLayout(None, made, seqs)
            left -= _RING * max(layers)
            if left >= 0 and len(layers) > _RING:
                return ThroughputLayout(min(left // max(layers), len(layers) - _RING - 1), made, seqs)
            needed = other + min(sum(layers), _RING * max(layers) if len(layers) > _RING else sum(layers))
    raise InvalidArgument(
        f"memory must be {show_size(needed * page_bytes)} at least: for two layers' buffers, what no layer holds, and the KV of "
        f"one request; got {show_size(budget_bytes)}; nothing was made",
        field="memory",
        value=budget_bytes,
        needed=needed * page_bytes,
    )


def _halved(most: int, least: int) -> list[int]:
    """From `most` down to `least`, by halves."""
    found = [most]
    while found[-1] > least:
        found.append(max(least, found[-1] // 2))
    return found
