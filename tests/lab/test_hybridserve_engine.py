"""HybridServe's bound, FlexGen's schedule, the orders of copies, and the library's engine in virtual time."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest
from bench.lab.hybridserve import batches, command, engine, figures
from bench.lab.hybridserve.batches import Batch, costs_and_room
from bench.lab.hybridserve.figures import GRIDS, LOADS, engine_name, name_of
from bench.lab.hybridserve.flexgen import SYSTEMS_MOVES, flexgen_costs
from bench.lab.hybridserve.orders import VARIANTS
from bench.lab.hybridserve.window import Window, window
from hypothesis import assume, given
from hypothesis import strategies as st

from remap_serve.policy.minibatches import Mix, total

SMALL = Batch("RTX-4090", "OPT-13b", 256, 16)
STORED = json.loads(command.RESULTS.read_text(encoding="utf-8"))["points"]
seconds = st.floats(0.01, 100.0)


@given(seconds, seconds, st.floats(0.0, 300.0), seconds, seconds, st.floats(0.0, 1.0))
def test_a_mixture_wins_only_where_the_pipelines_cross(w: float, k: float, d: float, f: float, g: float, share: float):
    """And by no more than the bounds say; no other share is better."""
    one = Window(w, k, d, f, g)
    assert one.seconds(one.share) <= one.seconds(share) * (1 + 1e-9)
    crosses = one.kv_alone_s > f and f + g > one.kv_alone_s - k / 2
    assert (one.gain > 1 + 1e-9) <= crosses
    assert one.gain <= one.most * (1 + 1e-9)
    if d <= w:
        assert one.most <= 1.5 * (1 + 1e-9)
    elif w + k / 2 >= d:
        assert one.most <= 2.0 * (1 + 1e-9)
    low, high = one.rates
    faster = replace(one, weights_s=w / 2, kv_s=k / 2, kept_s=d / 2)  # twice the link
    assert faster.rates == pytest.approx((low / 2, high / 2))


@given(seconds, seconds, st.floats(0.0, 300.0))
def test_a_processor_that_takes_as_long_as_the_link_reaches_the_bound(w: float, k: float, d: float) -> None:
    one = Window(w, k, d, 0.0, max(0.0, w + k - d))
    assume(one.recompute_s > 1e-9)
    assert one.gain == pytest.approx(one.most)


@pytest.mark.parametrize(
    ("one", "gain"),
    [
        (
            Window(0.5, 2.0, 2.0, 0.0625, 0.5),
            2.4,
        ),  # the device holds a quarter of K and V as activations: 0.21 s, not 0.5
        (Window(1.0, 1.0, 1.0, 0.0, 1.0), 1.5),
        (Window(1.0, 2.0, 2.0, 0.0, 1.0), 2.0),
        (Window(1.0, 2.0, 5.0, 0.5, 1.0), 1.0),  # KV alone copies nothing
    ],
)
def test_gains_by_hand(one: Window, gain: float) -> None:
    assert one.gain == pytest.approx(gain)


def test_no_stored_pass_is_below_the_bound() -> None:
    for batch in (*GRIDS["12"].batches, *GRIDS["others"].batches):
        bound = window(batch)
        systems = GRIDS["12"].systems
        if batch in GRIDS["orders"].batches:
            systems = (*systems, *VARIANTS, *SYSTEMS_MOVES)
        for system in systems:
            point = STORED[name_of(batch, system, 0)]
            assert point["pass_s"] >= bound.seconds(point["activation_share"]) * (1 - 1e-9), (batch, system)


def test_flexgen_waits_for_each_step_and_moves_kv_three_times() -> None:
    found = batches.setup("RTX-4090", "OPT-30b")
    costs, once = flexgen_costs(found), flexgen_costs(found, 1.0)
    assert costs.attention == pytest.approx(1 / 3)
    mixes = [Mix(640, 0, requests=10)] * 3
    attention_s = once.forward_s(10, 640) - once.forward_s(10, 0)
    more_s = costs.forward_s(10, 640) - once.forward_s(10, 640)
    assert more_s == pytest.approx(2 * (attention_s), rel=0.01)
    # Without copies a pass computes all of it; without computing it copies all of it; with both it is no shorter than either.
    idle = replace(costs, forward_s=lambda requests, blocks: 0.0, ends_s=lambda requests: 0.0)
    free = replace(costs, weights_s=0.0, load_kv=type(costs.load_kv)(0.0, 0.0), store_kv_s=0.0, store_activations_s=0.0)
    copied = costs.layers * (costs.weights_s + sum(costs.part(mix).kv_s for mix in mixes))
    computed = costs.layers * 3 * costs.forward_s(10, 640) + 3 * costs.ends_s(10)
    assert idle.seconds(mixes) == pytest.approx(copied) and free.seconds(mixes) == pytest.approx(computed)
    assert max(copied, computed) <= costs.seconds(mixes) <= copied + computed
    for system, theirs in (("FlexGen, 7.4 %", 0.074), ("FlexGen, 12.6 %", 0.126)):
        busy = [STORED[name_of(batch, system, 0)]["busy"] for batch in figures._of_size(128)]
        assert statistics.fmean(busy) == pytest.approx(theirs, rel=2e-3)


def test_whole_copies_take_their_buffers_from_the_weights() -> None:
    found = batches.setup("RTX-4090", "OPT-66b")
    blocks = [120] * 128
    for name in VARIANTS:
        costs, room = costs_and_room(name, found)
        mix = total(room.divided(blocks, (1, 1)))
        assert (mix.held > 0) is (name == "whole, held") and mix.blocks == sum(blocks)
    costs, room = costs_and_room("whole", found)
    kv = total(room.divided(blocks, (0, 1)))
    half = total(room.divided(blocks, (1, 1)))
    assert room.streamed(half) < room.streamed(kv)
    many = [1 << 12] * 128
    assert room.streamed(total(room.divided(many, (0, 1)))) == float("inf") == costs.seconds([kv], float("inf"))
    point = batches.run(Batch("RTX-4090", "OPT-66b", 1920, 300), "whole", 0)
    assert point["batches"] > 1  # of which the buffers hold one
    assert batches.run(SMALL, "whole", 0)["batches"] == 1


def test_the_engine_in_virtual_time() -> None:
    """The tokens do not depend on the policy, the seconds not on the computer; its certificate is what a pass takes."""
    load = engine.VirtualLoad("H100-PCIe", "OPT-30b", 3, (64, 200), 4, 6)
    found = {policy: engine.serve_virtually(load, policy, 1) for policy in engine.ENGINE_POLICIES}
    assert len({point["tokens"] for point in found.values()}) == 1
    assert found["best"] == engine.serve_virtually(load, "best", 1)
    for point in found.values():
        assert point["expected_pass_s"] == pytest.approx(point["pass_s"], rel=0.02)
    assert found["KV"]["activation_share"] == 0 and found["activations"]["activation_share"] == 1
    best = found["best"]["tokens_per_s"]
    assert best >= 0.99 * max(point["tokens_per_s"] for point in found.values())


def test_of_the_stored_runs_of_the_engine_a_mixture_wins_between() -> None:
    for load in LOADS:
        for seed in range(command.SETTINGS.seeds):
            kv, activations, _, best = (STORED[engine_name(load, policy, seed)] for policy in engine.ENGINE_POLICIES)
            assert kv["tokens"] == activations["tokens"] == best["tokens"]
            gain = best["tokens_per_s"] / max(kv["tokens_per_s"], activations["tokens_per_s"])
            if load in LOADS[1:3]:
                assert 0 < best["activation_share"] < 1 and gain > 1.1, (load, seed)
            else:
                assert best["activation_share"] == (1 if load is LOADS[0] else 0) and gain == 1
