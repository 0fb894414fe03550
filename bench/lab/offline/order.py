"""What copies in parts would be worth: the twin's passes in `layerwise`'s order, and in the order of the library's prefetcher.

The prefetcher copies a layer's blocks whole, for all mini-batches together, so two buffers must hold the whole batch's part of
a layer. Where they do not, the batch is served in several smaller ones, each of which loads all weights. All seconds are the
twin's (`bench.lab.hybridserve`): the middle pass of the answers, at the ratio that is best in `layerwise`'s order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.lab.hybridserve import division
from bench.lab.hybridserve.batches import BLOCK_TOKENS, OUTPUT, Batch, setup
from bench.lab.hybridserve.division import LayerwiseCosts, LayerwiseRoom

from remap.policy import kv_stream
from remap_serve.policy.hybrid import HybridPlan
from remap_serve.policy.minibatches import total

__all__ = ["Order", "order"]

_BUFFERS = 2


@dataclass(frozen=True)
class Order:
    """parts_s: a pass in `layerwise`'s order. whole_s: the same pass with copies of whole layers, if the buffers were large
    enough: of wanted_bytes, where there are buffer_bytes. batches: so many smaller ones fit, and take split_s together."""

    batch: Batch
    parts_s: float
    whole_s: float
    wanted_bytes: int
    buffer_bytes: int
    batches: int
    split_s: float


def order(batch: Batch) -> Order:
    """Of a batch whose prompts are of one length."""
    found = setup(batch.machine, batch.model)
    blocks = -(-(batch.prompt + OUTPUT // 2) // BLOCK_TOKENS)
    plan = division.best([blocks] * batch.size, found.costs, found.room)
    batches = 1
    while (rest := _plan(blocks, batch.size, batches, found.costs, found.room)) and not _fits(rest, found.room):
        batches += 1
    return Order(
        batch,
        plan.seconds,
        _whole_s(plan, found.costs, found.room),
        _wanted(plan, found.room),
        found.room.buffer_bytes,
        batches,
        batches * _whole_s(rest, found.costs, found.room),
    )


def _plan(blocks: int, size: int, batches: int, costs: LayerwiseCosts, room: LayerwiseRoom) -> HybridPlan:
    return division.best([blocks] * math.ceil(size / batches), costs, room)


def _fits(plan: HybridPlan, room: LayerwiseRoom) -> bool:
    return _wanted(plan, room) <= room.buffer_bytes


def _wanted(plan: HybridPlan, room: LayerwiseRoom) -> int:
    """Bytes of the two buffers for a layer's blocks, and of what one mini-batch makes again."""
    mix = total(plan.mixes)
    made = max(total(plan.mixes[at] for at in each).recomputed for each in plan.packing)
    return _BUFFERS * (mix.kv * room.block.kv + mix.activations * room.block.activations) + made * room.block.kv


def _whole_s(plan: HybridPlan, costs: LayerwiseCosts, room: LayerwiseRoom) -> float:
    mix = total(plan.mixes)
    parts = [costs.part(total(plan.mixes[at] for at in each)) for each in plan.packing]
    computed = math.fsum(part.recompute_s + part.forward_s for part in parts)
    weights = [room.streamed(mix) * costs.weights_s] * costs.layers
    layers = list(range(costs.layers)) if weights[0] else []
    load_s = costs.load_kv(mix.kv) + costs.load_activations(mix.activations)
    load_s += costs.slowed * math.fsum(part.store_s for part in parts)
    return kv_stream.pass_seconds(
        [computed] * costs.layers + [costs.ends_s(mix.requests)],
        [*weights, 0.0],
        layers,
        costs.ring,
        load_s,
        costs.layers,
        _BUFFERS,
    )
