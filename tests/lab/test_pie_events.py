"""Pie event by event: its protocol against the same tick by tick, its choice of the expansion rule by rule, runs of it, and what
FlexGen takes."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from bench.lab import ROOT
from bench.lab import pie_events as events
from bench.lab.paper.experiments import BASELINE
from bench.lab.paper.runs import Run, Settings, run_one, serve
from bench.lab.pie.figures import FIGURES
from bench.lab.pie.flexgen import HOST_BYTES, Block, _seconds, best_block
from bench.lab.pie_events import LOOK_S, POLICY, Adaptive, EventEngine, LayerSwaps, Window, policy_of
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_models import tiny

from remap.errors import InvalidArgument
from remap.policy.hardware import Machine, machine, model
from remap_serve.sim.pools import PiePool
from remap_serve.sim.roofline import Roofline, prefill_pairs
from remap_serve.sim.sequences import Work
from remap_serve.sim.workload import Item

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
from pie_ticks import passes

DECODES = Work(0, 0, 1, 1, 1)
FULL = FIGURES[3].places[0][0]


def link(copy_in: float, copy_out: float, **changes: Any) -> Machine:
    """A token's KV of a layer takes so many seconds each way, and copies take nothing of the device's memory."""
    token = tiny(4).kv_bytes_per_token_layer
    free: dict[str, Any] = {"hbm_bytes_per_s": 1e30, "duplex": 1.0, "copy_setup_s": 0.0}
    return machine("GH200-96GB").with_(
        h2d_bytes_per_s=token / copy_in, d2h_bytes_per_s=token / copy_out, **(free | changes)
    )


class Logged(LayerSwaps):
    """With the copies that have begun since `begun` was emptied, and its pool, in which one token's KV is in use."""

    def __init__(self, layers: int, swapped: int, on: Machine, look_s: float = 0.0, **more: Any) -> None:
        self.pool = PiePool(10 * layers, 1, layers)
        assert self.pool.set(swapped)
        self.pool.live_blocks = 1
        self.begun: list[str] = []
        clock: Any = SimpleNamespace(now=0.0)
        super().__init__(clock, on, tiny(layers), SimpleNamespace(), self.pool, look_s, **more)  # type: ignore[arg-type]

    def _copy(self, way: int, layer: int) -> None:
        self.begun.append(f"{('in', 'out')[way]} {layer}")
        super()._copy(way, layer)

    def one_pass(self, compute: float, gap: float = 0.0) -> float:
        end = self._enqueue(DECODES, compute, 0.0)
        self.clock.now = end + gap
        return end


def test_the_example_of_the_paper() -> None:
    """Figure 4: nine layers (from 1 on in the paper), a swap takes two computations, two layers away."""
    runner = Logged(9, 2, link(2.0, 2.0))
    assert runner.one_pass(1.0) == 9.0
    # Layer 1 goes while layer 2 computes; 8 comes once layer 1 has gone, when 3 goes; then 9 and 5; then layer 1 and 7.
    assert runner.begun == ["out 0", "in 7", "out 2", "in 8", "out 4", "in 0", "out 6"]
    ends = [runner.one_pass(1.0) for _ in range(20)]
    assert ends == [9.0 * number for number in range(2, 22)] and runner.stall_s == 0.0
    runner.begun.clear()
    for _ in range(2):
        runner.one_pass(1.0)
    assert sum(one.startswith("out") for one in runner.begun) == 9  # every second layer, so each in two passes
    assert Logged(9, 3, link(2.0, 2.0)).one_pass(1.0) > 9.0  # a third layer is too many


@st.composite
def protocols(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[int, int], bool]:
    layers = draw(st.integers(3, 14))
    away, seconds = st.integers(0, layers - 2), st.integers(1, 9)
    shape = (layers, draw(away), draw(st.integers(1, 5)), draw(seconds), draw(seconds), draw(st.integers(0, 3)))
    return (
        (*shape, draw(st.sampled_from([0, 1, 4]))),
        draw(st.dictionaries(st.integers(0, 20), away, max_size=3)),
        draw(st.booleans()),
    )


@given(protocols())
@settings(max_examples=examples(400), deadline=None)
def test_every_copy_and_every_end_is_that_of_the_table_tick_by_tick(
    drawn: tuple[tuple[int, ...], dict[int, int]],
) -> None:
    """Whatever layers, copies, gaps between passes and changes of the expansion there are."""
    (layers, swapped, compute, copy_in, copy_out, gap, few), resizes, anytime = drawn
    slow = passes(layers, swapped, compute, copy_in, copy_out, gap, few, resizes, anytime)
    runner = Logged(layers, swapped, link(copy_in, copy_out), few=few, anytime=anytime)
    for number, (end, expansion, begun) in enumerate(islice(slow, 25)):
        runner.catch_up()
        wanted = resizes.get(number, runner.pool.swapped)
        if not runner.resizing and wanted != runner.pool.swapped:
            runner.resize(wanted)
        runner.begun.clear()
        assert (runner.one_pass(compute, gap), runner.pool.swapped) == (end, expansion)
        assert tuple(runner.begun) == begun


def test_copies_share_the_link_and_take_of_the_memory() -> None:
    """Four layers go out and two come in, beside the second and the third of these: copies of 10 s alone, 12.5 s together. One
    copy takes 1/6.4 of the memory's bandwidth, both together a quarter."""
    token = tiny(4).kv_bytes_per_token_layer
    runner = Logged(9, 2, link(10.0, 10.0, duplex=0.8, hbm_bytes_per_s=0.64 * token), few=0)
    alone, both = 30 + 10 / 6.4, 30 + 12.5 / 4
    assert runner.one_pass(30.0) == pytest.approx(5 * 30 + 2 * alone + 2 * both)
    assert runner.begun == ["out 0", "in 7", "out 1", "in 8", "out 2", "out 3"]
    assert runner.compute_s == pytest.approx(runner.clock.now) and runner.stall_s == 0.0
    assert runner.copied_bytes == 6 * token and runner.copied_out_bytes == 4 * token
    looking = Logged(9, 2, link(10.0, 10.0), look_s=0.5)
    assert looking.one_pass(30.0) == pytest.approx(9 * 30.5) and looking.stall_s == pytest.approx(4.5)
    assert Logged(9, 0, link(10.0, 10.0), look_s=0.5).one_pass(30.0) == 270.0  # with nothing away nobody looks


def test_new_blocks_can_be_used_once_every_layer_has_come_in() -> None:
    runner = Logged(8, 0, link(1.0, 1.0))
    runner.one_pass(1.0)
    assert not runner.begun and runner.pool.usable_blocks == 80
    runner.resize(1)
    while runner.resizing:
        assert runner.pool.usable_blocks == 80
        runner.one_pass(1.0)
    assert {one for one in runner.begun if one.startswith("in")} == {f"in {layer}" for layer in range(8)}
    assert (runner.resizes, runner.pool.usable_blocks) == (1, 91)
    runner.pool.live_blocks = 90
    runner.resize(0)
    assert runner.pool.free_blocks == 0 and runner.pool.usable_blocks == 80  # no more are given
    for _ in range(9):
        runner.one_pass(1.0)
    assert runner.resizing  # blocks beyond the new size are in use
    runner.pool.live_blocks = 1
    for _ in range(9):
        runner.one_pass(1.0)
    assert not runner.resizing and set(runner.state) == {events.HERE}
    runner.begun.clear()
    assert runner.one_pass(1.0) and not runner.begun


def window(**changes: Any) -> Window:
    """Of a workload that uses all blocks, with a link that is full and hides all copies."""
    plain = Window(rows=1000, seconds=1.0, passes=16, computed_s=1.0, looks=100, early=5, live=10_000, short=True)
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("known", "seen", "wanted"),
    [
        ({}, {}, 4),
        ({}, {"early": 11}, 5),  # the link has room
        ({5: 1200.0}, {"early": 11}, 4),  # it would be no use
        ({5: 1400.0}, {"early": 11}, 5),
        ({}, {"waited_s": 0.11, "early": 11}, 3),
        ({}, {"waited_s": 0.1}, 4),  # forgiven
        ({3: 1400.0}, {"early": 11}, 3),  # it has stopped scaling
        ({3: 1200.0}, {"early": 11}, 5),
        ({}, {"live": 1600}, 4),
        ({}, {"live": 1600, "short": False}, 4),  # one block of the last layer's
        ({}, {"live": 1595, "short": False, "early": 11}, 3),
    ],
)
def test_how_many_layers_should_be_away(known: dict[int, float], seen: dict[str, Any], wanted: int) -> None:
    adaptive = Adaptive(records={m: (tokens, 0) for m, tokens in known.items()})
    assert adaptive.next(4, 14, window(**seen), lambda m: 1595 + 100 * (m - 3)) == wanted
    most = Adaptive(records={m: (tokens, 0) for m, tokens in known.items()})
    assert most.next(4, 4, window(**seen), lambda m: 1595 + 100 * (m - 3)) == min(wanted, 4)


def test_what_brought_waits_is_tried_again_after_some_windows() -> None:
    adaptive = Adaptive(probe=4)
    assert adaptive.next(0, 14, window(looks=0, early=0), lambda m: 100) == 1
    room = window(early=50)
    assert adaptive.next(1, 14, replace(room, waited_s=0.5), lambda m: 100) == 0
    assert [adaptive.next(0, 14, room, lambda m: 100) for _ in range(4)] == [0, 0, 0, 1]


class Watched(EventEngine):
    """Looks before each pass at what must always hold."""

    made: ClassVar[list[Watched]] = []

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.seen: list[int] = []
        Watched.made = [self]

    def launch(self) -> Any:
        runner, pool = self.runner, self.tenant.kv
        deepest = max(runner._swapped, runner._target)
        counts = [runner.state.count(kind) for kind in range(4)]
        # A place is taken from the beginning of a copy to its end; when the expansion grows or shrinks it is at most one more.
        assert sum(counts) == len(runner.state) and max(counts[events.LEAVING], counts[events.COMING]) <= 1
        assert counts[events.LEAVING] + counts[events.AWAY] + counts[events.COMING] <= deepest + 3
        assert pool.live_blocks <= pool.blocks_at(deepest)
        if runner.resizes and (not self.seen or self.seen[-1] != pool.swapped):
            self.seen.append(pool.swapped)
        return super().launch()


def test_a_run_grows_shrinks_and_answers_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLICY", replace(POLICY, pie=(LayerSwaps, Watched)))
    _, items, result = serve(Run(FULL, "pie-events", "x3", 7.9, 0), Settings(requests=120))
    (engine,) = Watched.made
    assert result.requests_finished == len(items) == 120
    steps = [later - earlier for earlier, later in zip([0, *engine.seen], engine.seen, strict=False)]
    assert set(steps) == {1, -1} and max(engine.seen) >= 8
    assert result.kv_blocks_peak > 1.2 * engine.metrics.kv_blocks_start
    assert 0 < result.stall_fraction < 0.2


def test_expansions() -> None:
    run, few = Run(FULL, BASELINE, "x3", 7.9, 0), Settings(requests=40)
    plain = run_one(run, few)
    assert run_one(replace(run, policy="pie-events:1"), few) == plain  # nothing away costs nothing
    fixed = run_one(replace(run, policy="pie-events:2.2"), few)
    assert fixed == run_one(replace(run, policy="pie-events:2.2"), few) != plain
    anytime = run_one(replace(run, policy="pie-anytime:2.2"), few)
    assert anytime[0]["stall_fraction"] < fixed[0]["stall_fraction"]
    assert policy_of("pie") is None and policy_of("pie-eventsful") is None
    with pytest.raises(InvalidArgument, match="from 1 to 10"):
        policy_of("pie-events:11")


def test_a_request_that_needs_the_expansion_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 GB hold 3,648 tokens of OPT-13b; with 1 GB a request of 2,000 needs more than there is."""
    panel = replace(FULL, name="OPT-13b, KV 1 GB", kv_bytes=10**9, lengths=("fixed:1900:60",))
    _, items, result = serve(Run(panel, "pie-events", "", 0.5, 0), Settings(requests=20))
    assert result.requests_finished == len(items)


def test_a_look_takes_what_was_measured() -> None:
    stored = json.loads((ROOT / "bench/results/gpu-h100.json").read_text(encoding="utf-8"))
    (found,) = (one for one in stored["results"] if one["name"].endswith("64 KiB: looking again and again"))
    assert round(found["median_us"], 1) == LOOK_S * 1e6


def test_what_flexgen_takes() -> None:
    """Two batches of four requests of 100 + 9 tokens, by hand: all weights and KV in host memory, one after the other."""
    on, one = machine("GH200-96GB"), model("OPT-30b")
    roofline, token = Roofline(on, one), one.kv_bytes_per_token_layer
    found = _seconds(Block(4, 2, 0.0), 100, 9, roofline, 60 * 10**9, True)
    weights_s = one.layer_bytes / on.h2d_bytes_per_s
    prefill_s = weights_s + 2 * (roofline.layer_s(400, 4 * prefill_pairs(100), 0, 0) + 400 * token / on.d2h_bytes_per_s)
    by_hand = one.layers * prefill_s + 2 * roofline.ends_s(400, 4)
    for context in (101, 102, 103, 104, 105, 106, 107, 108):
        pass_s = weights_s + 2 * (4 * context * token / on.h2d_bytes_per_s + 4 * token / on.d2h_bytes_per_s)
        by_hand += one.layers * (pass_s + 2 * roofline.layer_s(0, 0, 4, 4 * context)) + 2 * roofline.ends_s(4, 4)
    assert found == pytest.approx(by_hand, rel=2e-3)  # lengths are rounded
    assert _seconds(Block(4, 2, 0.0), 100, 9, roofline, 60 * 10**9, False) < found
    assert math.isinf(_seconds(Block(4, 2, 1.0), 100, 9, roofline, 50 * 10**9, False))  # weights do not fit
    assert math.isinf(_seconds(Block(256, 24, 0.0), 1000, 1000, roofline, 60 * 10**9, True))
    assert 256 * 24 * 2000 * token * one.layers > HOST_BYTES
    items = [Item("", 0.0, 10 + number, 5 + number) for number in range(100)]
    described, best = (best_block(items, one, on, 63 * 10**9, as_described=each) for each in (True, False))
    assert described.weights == 0.0 and described.answers_per_s < best.answers_per_s
    assert best.all_per_s == pytest.approx(best.answers_per_s * 104 / 54.5)
