"""The ablations: what they compare is well-formed, the sentences follow from the numbers, and one runs from end to end."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest
from effort import LONG
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("typer")

from bench.lab.ablations.questions import ABLATIONS, Ablation, Claim, Side, select
from bench.lab.ablations.report import METRICS, chart, compare, markdown, to_json, verdict, write
from bench.lab.ablations.serving import AblationRun, Settings, busy_rate, run_ablation

import remap
from remap.errors import InvalidArgument, InvalidState
from remap_serve.cli.shared_world import SMALL, SharedWorld, Wiring
from remap_serve.sim.workload import ALPACA, Arrivals, Load, generate

SETTINGS = Settings(seconds=1.0, runs=3, quick=True)


@pytest.fixture(scope="module")
def world() -> SharedWorld:
    return SharedWorld(SMALL, kv_share=0.06)


def made(before, after, claim, **more) -> AblationRun:
    """A finished comparison of two sides with these values of the claimed metric, one a run."""
    ablation = Ablation("x", "Is x better?", (Side("a", Wiring()), Side("b", Wiring({}))), (claim,), lambda *_: [])
    samples = {"a": [{claim.metric: value} for value in before], "b": [{claim.metric: value} for value in after]}
    run = AblationRun(ablation, 2.0, 10, {"cv": 4.0}, samples)
    run.gaps = {"a": [0.1, 0.2], "b": [0.1]}
    run.timelines = {"a": [(0.0, 4), (1.0, 4)], "b": [(0.0, 4), (0.5, 9)]}
    return replace(run, **more)


def claim(change, metric="tbt_p99_s", sign=0) -> Claim:
    return Claim(metric, "a", "b", "Fig. 99", change, sign)


def test_every_ablation_is_well_formed(world):
    assert len({one.name for one in ABLATIONS}) == len(ABLATIONS)
    for one in ABLATIONS:
        sides = [side.name for side in one.sides]
        assert len(set(sides)) == len(sides) >= 2 and one.claims
        for said in one.claims:
            assert {said.base, said.test} <= set(sides) and said.metric in METRICS and said.direction in (-1, 1)
            assert (one.quiet_from is not None) or not said.metric.startswith("quiet_")
        for side in one.sides:
            if side.wiring.controller is not None:
                remap.advanced.Knobs(**side.wiring.controller)  # its knobs exist
                assert not side.wiring.by_hand
    assert [one.name for one in select(["cap", "policy"])] == ["policy", "cap"] and select([]) == ABLATIONS
    with pytest.raises(InvalidArgument) as caught:
        select(["cap", "caps"])
    assert caught.value.ablation == "caps"


@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda one: one.name)
def test_loads_bring_the_tokens_that_the_rate_means(ablation, world):
    """Whatever the mix, tenants together ask for about as many tokens a second as `rate` requests of ALPACA's lengths, in all
    of the time in which anybody asks at all.
    """
    loads = ablation.loads(world, 8.0, 4000.0)
    assert {load.tenant for load in loads} == set(world.names)
    items = generate(loads, 4000.0, 0)

    alone = generate([Load("x", Arrivals(8.0), world.lengths(ALPACA, 1.0))], 4000.0, 0)
    wanted, got = (sum(item.output_tokens for item in each) for each in (alone, items))
    asking = sum(any(load.begin_s <= second < load.end_s for load in loads) for second in range(4000)) / 4000
    assert asking > 0.5
    assert got == pytest.approx(wanted * asking, rel=0.2)
    assert all(max(item.prompt_tokens, item.output_tokens) <= world.longest() for item in items)


@pytest.mark.parametrize(
    ("before", "after", "said", "sentence"),
    [
        (
            [2.0, 2.1, 2.2],
            [1.0, 1.1, 0.9],
            -0.5,
            "-50% in Fig. 99; here -52% (2.1 s to 1 s): the same direction.",
        ),
        ([2.0, 2.1, 2.2], [1.8, 1.9, 1.8], -0.5, "(2.1 s to 1.8 s): the same direction."),
        ([2.0, 2.1, 2.2], [0.1, 0.1, 0.1], -0.2, "to 100 ms): the same direction."),
        ([2.0, 2.1, 2.2], [3.0, 3.1, 2.9], -0.5, "here +43% (2.1 s to 3 s): the other way round."),
        ([2.0, 2.001], [2.002, 2.003], -0.5, "here +0% (2 s to 2 s): unchanged within 1%."),
        ([2.0, 2.1, 2.2], [2.2, 1.0, 1.0], -0.5, "the runs overlap, 3 of each side show no difference."),
        ([0.0], [3.0], -0.5, "-50% in Fig. 99; here 0 ms to 3 s: the other way round."),
    ],
)
def test_a_verdict_says_what_was_measured(before, after, said, sentence):
    text = verdict(made(before, after, claim(said)), claim(said))
    assert text.startswith("TBT P99, b against a: ")
    assert text.endswith(sentence)


@given(
    before=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    after=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
)
def test_sides_differ_only_if_every_run_of_one_lies_beyond_every_run_of_the_other(before, after):
    run = made(before, after, claim(-0.5))
    seen = compare(run, "tbt_p99_s", "a", "b")
    pairs = [x < y for x in before for y in after]
    ties = any(x == y for x in before for y in after)
    assert seen.shown == (not ties and (all(pairs) or not any(pairs)))
    assert math.isclose(seen.change, seen.test / seen.base - 1)
    back = compare(run, "tbt_p99_s", "b", "a")
    assert (back.base, back.test, back.shown) == (seen.test, seen.base, seen.shown)


def test_reports_name_what_differs_and_what_was_not_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = made([2.0, 2.1], [1.0, 1.1], claim(-0.5), different=3, copy_to_compute={"m": 0.21})
    with pytest.raises(InvalidState, match="need matplotlib"):
        chart(run, tmp_path / "x.png")
    files = write([run], {"cpu": "abacus"}, SETTINGS, tmp_path / "new")
    assert [file.name for file in files] == ["ablations.md", "ablations.json"]
    text = files[0].read_text()
    assert "THE TOKENS OF 3 REQUESTS DIFFER" in text
    assert "abacus" in text
    assert "m 0.21" in text
    assert "| TBT P99 | 2.05 s (2 s to 2.1 s) | 1.05 s (1 s to 1.1 s) | 0.51 |" in text
    assert ".png" not in text
    assert "in 10% of all cases" in text  # n = 3
    data = json.loads(files[1].read_text())
    assert data["machine"] == {"cpu": "abacus"}
    (entry,) = data["ablations"]
    assert entry["tokens_identical"] is False
    assert entry["sides"]["b"]["runs"] == [{"tbt_p99_s": 1.0}, {"tbt_p99_s": 1.1}]
    assert entry["claims"][0]["ours"]["shown"] is True
    assert "the tokens of all 40 requests" in markdown([replace(run, different=0)], {}, SETTINGS, True)


def test_a_world_is_the_same_twice_and_its_budget_adds_up(world):
    again = SharedWorld(SMALL, kv_share=0.06)
    for name in world.names:
        for one, other in zip(world._models[name].parameters(), again._models[name].parameters(), strict=True):
            assert one.equal(other)
    assert world.start_blocks == again.start_blocks
    page = SMALL.page_bytes
    weights = sum(map(world.weight_bytes, world.names))
    kv = [world.start_blocks[name] * world.block_bytes(name) for name in world.names]
    assert weights + sum(kv) <= world.budget_bytes < weights + sum(kv) + len(kv) * page
    for name, size in zip(world.names, kv, strict=True):
        assert size <= max(0.06 * world.weight_bytes(name), 8 * world.block_bytes(name))
        # Two of the longest requests fit into a baseline's cache.
        assert 4 * world.longest() <= world.start_blocks[name] * SMALL.block_tokens
    assert len({world.layers(name) for name in world.names}) == 3
    few = SharedWorld(SMALL, tenants=1)
    assert few.names == world.names[:1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["reversion", "static", *(["recompute"] if LONG else [])]
)  # the third: documented commands
def test_an_ablation_runs_from_end_to_end(name, world):
    (ablation,) = select([name])
    mine = world if ablation.tenants is None else SharedWorld(SMALL, kv_share=0.06, tenants=ablation.tenants)
    settings = Settings(seconds=1.5, runs=1, quick=True, quantum_s=0.1)
    told = []
    # At least this many a second: what a busy machine can serve may be so little that nothing arrives in so short a run.
    rate = max(busy_rate(mine), 20.0)
    run = run_ablation(ablation, mine, settings, rate, lambda side, number: told.append((side, number)))
    assert told == [("unconstrained", 0), *((side.name, 1) for side in ablation.sides)]
    assert run.different == 0
    assert run.requests >= 4
    assert run.rate == ablation.load * rate
    for side in ablation.sides:
        (sample,) = run.samples[side.name]
        assert sample["requests"] == run.requests
        assert sample["tokens_per_s"] > 0
        assert len(run.gaps[side.name]) == sample["generated_tokens"] - run.requests
        assert ("quiet_tbt_p50_s" in sample) == (name == "reversion")
    if name == "static":
        small, large = (run.samples[side][0]["layers_remapped_peak"] for side in ("static 10 %", "static 33 %"))
        assert (small, large) == (1, 3)
    for said in ablation.claims:
        assert METRICS[said.metric] in verdict(run, said)
    json.dumps(to_json([run], {}, settings))
