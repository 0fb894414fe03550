"""One offline batch on one machine, in virtual time. Decisions are the library's (`remap_serve.policy.hybrid`) or the paper's
(`division`, `packing`), seconds of passes `layerwise`'s; what an operator takes is the roofline's. Pure.

The device holds embeddings and head, two layers' buffers of weights, buffers of blocks, and WORKING bytes for the tensors
of a pass. What is left holds activations, then weights, then KV. A pass of the prompts writes all
blocks; then each pass gives each request one token. Passes are reckoned every 16 tokens, in the middle of these.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from bench.lab.hybridserve import division, flexgen, orders
from bench.lab.hybridserve.division import LayerwiseCosts, LayerwiseRoom, Setup
from bench.lab.hybridserve.layerwise import Part, pass_seconds
from bench.lab.seeds import Point

from remap.policy.hardware import machine, model
from remap.policy.maxplus import copied_uses
from remap_serve.policy import hybrid
from remap_serve.policy.activations import Line, Ratio, block_bytes
from remap_serve.policy.hybrid import Costs, HybridPlan, HybridRoom
from remap_serve.policy.minibatches import BufferLimits, Mix, first_fit, total
from remap_serve.sim.loads import SHAREGPT_PAPER
from remap_serve.sim.roofline import Roofline, prefill_pairs

__all__ = ["SHAREGPT", "SYSTEMS", "Batch", "costs_and_room", "fits_of", "run", "setup"]

BLOCK_TOKENS = 16
RING = 2
OUTPUT = 128
"""Tokens of each answer, as in the paper."""
HOST_BYTES = 882_000_000_000
"""The paper's host memory, on every machine here: weights, then blocks."""
WORKING = 3 << 29
BUFFER_SHARE = 0.1
"""Of what the device has left beside weights' buffers and WORKING: for blocks' buffers."""
PREFILL_TOKENS = 8192
"""Prompts that are computed together have at most so many tokens, or are one."""
SAMPLED = (16, 64, 256, 1024, 4096)
"""Blocks at which T_kv_gen and T_load_kv are taken for the fits of Figure 11."""
SHAREGPT = 0
"""Instead of a number of prompt tokens: as ShareGPT's, drawn with the seed."""

System = Callable[[Sequence[int], Costs, HybridRoom], HybridPlan]
Passes = Sequence[tuple[int, Sequence[int]]]
"""How many there are in which the requests have these blocks."""


@dataclass(frozen=True)
class Batch:
    """What is served, and where. prompt: tokens of each, or SHAREGPT."""

    machine: str
    model: str
    prompt: int
    size: int = 128

    def prompts(self, seed: int) -> list[int]:
        """Tokens of each prompt; the seed counts for ShareGPT's only. The longest leaves room for its answer."""
        if self.prompt != SHAREGPT:
            return [self.prompt] * self.size
        rng = random.Random(f"hybridserve {seed}")
        longest = model(self.model).context - OUTPUT
        return [min(SHAREGPT_PAPER.draw(rng)[0], longest) for _ in range(self.size)]


def fits_of(roofline: Roofline, kv_block: int) -> tuple[Line, Line, tuple[float, float]]:
    """T_kv_gen and T_load_kv in blocks, fitted as in Figure 11, and R^2 of both.

    Making K and V again is the product with their weights, and all that a layer does beside its products (norms, cache
    writes): the roofline has one figure for these, so recomputation is charged too much rather than too little.
    """
    one, c = roofline.model, roofline.machine.roofline
    width = 2 * one.kv_heads * one.head_dim
    make, load = [], []
    for blocks in SAMPLED:
        tokens = blocks * BLOCK_TOKENS
        others = c.other_ops_s + c.other_ops_s_per_token_per_khidden * tokens * one.hidden / 1000.0
        make.append((blocks, roofline.op_s(one.hidden, width, tokens, element=one.matrix_bytes) + others))
        load.append((blocks, roofline.machine.copy_s(blocks * kv_block)))
    lines = Line.fit(make), Line.fit(load)
    return *lines, (lines[0].r_squared(make), lines[1].r_squared(load))


@cache
def setup(machine_name: str, model_name: str) -> Setup:
    """Raises InvalidArgument for a model whose activations are not smaller than K and V."""
    where, one = machine(machine_name), model(model_name)
    roofline = Roofline(where, one)
    block = block_bytes(BLOCK_TOKENS, one.kv_heads, one.head_dim, one.hidden, one.dtype_bytes)
    make, load, r_squared = fits_of(roofline, block.kv)
    out = where.d2h_bytes_per_s * where.duplex
    costs = LayerwiseCosts(
        layers=one.layers,
        weights_s=where.copy_s(one.layer_bytes),
        load_kv=load,
        load_activations=Line(load.base_s, load.each_s * block.activations / block.kv),
        recompute=make,
        forward_s=lambda requests, blocks: roofline.layer_s(0, 0, requests, blocks * BLOCK_TOKENS),
        ends_s=lambda requests: roofline.ends_s(requests, requests),
        store_kv_s=block.kv / BLOCK_TOKENS / out,
        store_activations_s=block.activations / BLOCK_TOKENS / out,
        slowed=1.0 - where.duplex,
        ring=RING,
    )
    left = where.hbm_bytes - one.resident_bytes - RING * one.layer_bytes - WORKING
    buffers = int(BUFFER_SHARE * left)
    room = LayerwiseRoom(
        layers=one.layers,
        block=block,
        host_bytes=HOST_BYTES - one.weight_bytes,
        device_bytes=left - buffers,
        weight_bytes=one.layer_bytes,
        buffer_bytes=buffers,
    )
    return Setup(roofline, costs, room, r_squared)


def _fixed(ratio: Ratio) -> System:
    return lambda blocks, costs, room: hybrid.fixed(blocks, ratio, costs, room)


def _best(passes: Passes, costs: Costs, room: HybridRoom) -> System:
    """The ratio is decided once, for all passes; mini-batches are formed for each."""
    return _fixed(division.best_ratio(passes, costs, room))


SYSTEMS: dict[str, Callable[[Passes, Costs, HybridRoom], System]] = {
    "KV": lambda passes, costs, room: _fixed((0, 1)),
    "activations": lambda passes, costs, room: _fixed((1, 0)),
    "1:1": lambda passes, costs, room: _fixed((1, 1)),
    "paper": lambda passes, costs, room: division.as_in_the_paper,
    "ours": _best,
    **dict.fromkeys(orders.VARIANTS, _best),
    **dict.fromkeys(flexgen.SYSTEMS_MOVES, lambda passes, costs, room: _fixed((0, 1))),
}
"""By name: how a pass is planned, given all passes."""


def _blocks(prompts: Sequence[int], made: int) -> list[int]:
    return [-(-(prompt + made) // BLOCK_TOKENS) for prompt in prompts]


def _prefill_s(prompts: Sequence[int], plan: HybridPlan, found: Setup) -> float:
    """Seconds of the pass over all prompts, which writes all blocks. plan: of the first pass after it."""
    costs, room, roofline = found.costs, found.room, found.roofline
    where = roofline.machine
    groups = first_fit(
        [Mix(tokens, 0) for tokens in prompts],
        BufferLimits(max(PREFILL_TOKENS, *prompts), 1, 1, 1),
        range(len(prompts)),
    )
    row = []
    for group in groups:
        tokens = sum(prompts[at] for at in group)
        pairs = sum(prefill_pairs(prompts[at]) for at in group)
        stored = room.host_bytes_of(total(plan.mixes[at] for at in group)) / room.layers
        out = stored / (where.d2h_bytes_per_s * where.duplex)
        row.append(Part(0.0, 0.0, 0.0, roofline.layer_s(tokens, pairs, 0, 0), out))
    ends = roofline.ends_s(sum(prompts), len(prompts))
    last = [*row[:-1], Part(0.0, 0.0, 0.0, row[-1].forward_s + ends, row[-1].store_s)]
    weights = costs.weights_s * room.streamed(total(plan.mixes))
    return pass_seconds([weights] * room.layers, [*([row] * (room.layers - 1)), last], RING)


def costs_and_room(system: str, found: Setup) -> tuple[LayerwiseCosts, LayerwiseRoom]:
    """Of a system: `found`'s, unless it has others."""
    if system in orders.VARIANTS:
        return orders.variant(system, found)
    if system in flexgen.SYSTEMS_MOVES:
        return flexgen.flexgen_costs(found, flexgen.SYSTEMS_MOVES[system]), found.room
    return found.costs, found.room


def run(batch: Batch, system: str, seed: int) -> Point:
    """One batch under one system; in as few smaller ones as its buffers ask for, each of which loads all weights.

    tokens_per_s: of all answers, the prompts' pass included. weights_gb, kv_gb, activations_gb: copied to the device while
    answers are made; busy: the share of that time in which the processor computes; activation_share: of all blocks;
    pass_s, mini_batches: of the middle pass. least_s: the time that no schedule of the middle pass goes below. batches: of these,
    one of which all but tokens_per_s and this is of.
    """
    prompts = batch.prompts(seed)
    for count in range(1, len(prompts) + 1):
        found = _run_of(prompts[: math.ceil(len(prompts) / count)], batch, system)
        if found is not None:
            return {**found, "batches": float(count)}
    raise AssertionError("one request fits")


def _run_of(prompts: Sequence[int], batch: Batch, system: str) -> Point | None:
    """None if the device has no room for the buffers."""
    found = setup(batch.machine, batch.model)
    costs, room = costs_and_room(system, found)
    counts = [(first, min(BLOCK_TOKENS, OUTPUT - first)) for first in range(1, OUTPUT, BLOCK_TOKENS)]
    passes = [(count, _blocks(prompts, first + count // 2)) for first, count in counts]
    plan_of = SYSTEMS[system](passes, costs, room)
    first = plan_of(_blocks(prompts, 1), costs, room)
    seconds = busy = weights = kv = activations = 0.0
    for count, blocks in passes:
        plan = plan_of(blocks, costs, room)
        if math.isinf(plan.seconds):
            return None
        groups = [total(plan.mixes[at] for at in each) for each in plan.packing]
        all_of = total(plan.mixes)
        copied = len(copied_uses(room.layers, RING, "fixed")) * room.streamed(all_of) * room.weight_bytes
        seconds += count * plan.seconds
        busy += count * math.fsum(part.recompute_s + part.forward_s for row in costs.parts(groups) for part in row)
        weights += count * copied
        kv += count * room.layers * all_of.kv * room.block.kv
        activations += count * room.layers * all_of.activations * room.block.activations
    prefill_s = _prefill_s(prompts, first, found)
    there = plan_of(passes[len(passes) // 2][1], costs, room)
    all_of = total(there.mixes)
    return {
        "tokens_per_s": len(prompts) * OUTPUT / (prefill_s + seconds),
        "prefill_s": prefill_s,
        "answers_s": seconds,
        "busy": busy / seconds,
        "weights_gb": weights / 1e9,
        "kv_gb": kv / 1e9,
        "activations_gb": activations / 1e9,
        "activation_share": all_of.recomputed / all_of.blocks,
        "mini_batches": float(len(there.packing)),
        "pass_s": there.seconds,
        "least_s": costs.least_seconds(all_of, room.streamed(all_of)),
    }
