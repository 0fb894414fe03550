"""Live blocks of paused tenants: a report names them, their engines free them, and the same call once more finds their pages.
Nothing of the session calls an engine, so nothing waits for one that does not answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from arena_worlds import make_layers
from sharing_worlds import Shared, spec, times_of
from test_sharing_controller import N, config_of, world_of

import remap
from remap.internals import internals
from remap_serve.engine.reports import Reports

LIVE = 8


class Swapping:
    """What `Reports` asks of an engine, over one of a world. answers: how many of the blocks that are wanted it frees."""

    def __init__(self, engine: Any, answers: Callable[[int], int] = lambda blocks: blocks) -> None:
        self.engine, self.answers, self.asked = engine, answers, []
        self.offer()

    def follow(self, moved: Any) -> None:
        self.engine.patch({old: new for old, new in moved.items() if old in self.engine.held})

    def release(self, blocks: int) -> int:
        self.asked.append(blocks)
        leaving = sorted(self.engine.held)[-min(len(self.engine.held), self.answers(blocks)) :]
        if not self.answers(blocks):
            return 0
        self.engine.kv.copy_out(leaving)
        self.engine.free(leaving)
        self.offer()
        return len(leaving)

    def offer(self) -> None:
        self.engine.kv.offer(len(self.engine.held))


def paused_world(*, offers: bool = True, receivers: str = "r", givers: str = "i", live: int = LIVE) -> Shared:
    """Receivers hold all of their blocks; each giver has live blocks and no other, and waits for its turn. No layer may go."""
    world = world_of(
        dict.fromkeys(receivers + givers, 2), times_of(N, 1.0, 1.0), spare=live * len(givers), max_layers=0
    )
    for name in givers:
        engine = world.engines[name]
        world.step(**{name: live + 2 - engine.kv.free_blocks})
        engine.allocate(live)
    for name in receivers + givers:
        kv = world.engines[name].kv
        if offers:
            kv.offer(0)
        if name in receivers:
            world.engines[name].allocate(kv.free_blocks)
    for name in givers:
        world.session.deactivate(name)
        if offers:
            world.engines[name].kv.offer(live)
    return world


def reports_of(world: Shared, **answers: Callable[[int], int]) -> tuple[Reports, dict[str, Swapping]]:
    engines = {name: Swapping(world.engines[name], answer) for name, answer in answers.items()}
    return Reports(engines), engines


def demand(**blocks: int) -> dict[str, remap.Demand]:
    return {name: remap.Demand(count) for name, count in blocks.items()}


def test_a_report_names_the_blocks_and_the_same_step_once_more_finds_their_pages() -> None:
    with paused_world() as world:
        r, i = world.engines["r"], world.engines["i"]
        watermark = world.session._tenants["r"].controller._watermark
        found = world.session._tenants["r"]
        free, live = r.kv.free_blocks, i.kv.live_blocks
        report = world.step(r=4)
        seen = len(watermark._values)
        wanted = report.wanted["i"]
        assert 0 < wanted < live and report.unmet_blocks["r"] == 4 - r.kv.free_blocks > 0
        assert f"the engine of i is to free {wanted} blocks" in report.reason["r"] and i.kv.live_blocks == live
        assert (found.shortages_met, found.shortages_unmet) == (0, 0), "it is not known yet"
        assert Swapping(i).release(wanted) == wanted
        report = world.step(r=4)
        assert r.kv.free_blocks >= free + 4 and not report.unmet_blocks and not report.wanted and report.changed
        assert len(watermark._values) == seen, "one iteration is one observation"
        assert (found.shortages_met, found.shortages_unmet) == (1, 0)
        world.check()


@pytest.mark.parametrize("gone", [False, True])
def test_a_request_that_no_engine_answers_is_made_once_and_costs_one_step(gone: bool) -> None:
    """From the next step on all is as with an engine that never offered anything. gone: the engine's owner has dropped it."""
    with paused_world() as world, paused_world(offers=False) as plain:
        reports, engines = reports_of(world, i=lambda blocks: 0)
        if gone:
            engines.clear()
        assert reports.ask(lambda: world.session.step(demand(r=4))).wanted.keys() == {"i"}
        for wanted in (4, 4, 7, 2):
            report = reports.ask(lambda wanted=wanted: world.session.step(demand(r=wanted)))
            known = plain.step(r=wanted)
            assert report.unmet_blocks == known.unmet_blocks and not report.wanted
            assert world.engines["r"].kv.usable_blocks == plain.engines["r"].kv.usable_blocks
            assert world.session._tenants["r"].shortages_unmet == plain.session._tenants["r"].shortages_unmet
        world.engines["i"].kv.offer(LIVE)  # it says so again
        assert world.step(r=9).wanted.keys() == {"i"}
        world.check()


def test_several_paused_tenants_answer_one_report() -> None:
    with paused_world(givers="ij", live=6) as world:
        reports, engines = reports_of(world, i=lambda blocks: blocks, j=lambda blocks: blocks)
        calls = []

        def step() -> Any:
            calls.append(world.session.step(demand(r=12)))
            return calls[-1]

        reports.ask(step)
        assert len(calls) == 2 and {name: [blocks] for name, blocks in calls[0].wanted.items()} == {
            name: engine.asked for name, engine in engines.items()
        }
        assert calls[1].added_blocks["r"] >= 7, "each giver keeps its min_blocks"
        world.check()


@pytest.mark.parametrize("what", ["active", "other demand", "nothing freed", "another by that name", "no demand"])
def test_an_answer_that_has_become_stale_changes_nothing_wrongly(what: str) -> None:
    with paused_world() as world:
        wanted = world.step(r=4).wanted["i"]
        if what != "nothing freed":
            Swapping(world.engines["i"]).release(wanted)
        if what == "active":
            assert world.activate("i").activated
        if what == "another by that name":
            world.detach("i")
            world.session.attach_bytes(make_layers([2] * N, 9), name="i", kv=spec(N), active=False)
            world.session.detach("i")
        asked = {"other demand": 3, "no demand": 0}.get(what, 4)
        report = world.step(**({"r": asked} if asked else {}))
        lacking = asked - world.engines["r"].kv.free_blocks
        assert report.unmet_blocks == ({"r": lacking} if lacking > 0 else {})
        world.check()
        for _ in range(3):
            world.step(r=4)
        world.check()


@pytest.mark.parametrize("answers", [True, False])
def test_an_activation_names_the_blocks_and_the_second_call_finds_their_pages(answers: bool) -> None:
    """c has no pages, and all are i's, which waits for its turn: its live blocks have to go first. If nobody frees them, the
    second call says so as if nothing had been offered."""
    options = {"c": {"active": False, "pages": "none", "kv": dataclasses.replace(spec(N), min_blocks=2)}}
    with Shared({"c": [2] * N, "i": [1] * N}, config=config_of(max_layers=0), options=options) as world:
        c, i = world.engines["c"], world.engines["i"]
        i.kv.offer(0)
        c.kv.offer(0)
        world.step(i=400)
        i.allocate(i.kv.free_blocks)
        world.session.deactivate("i")
        i.kv.offer(i.kv.live_blocks)
        owners, uses = world.owners(), world.session.snapshot().tenants["c"].last_use
        report = world.session.activate("c", alone=True)
        assert not report.activated and report.wanted.keys() == {"i"} and not report.preempt
        assert 0 < report.wanted["i"] <= i.kv.live_blocks and world.owners() == owners
        assert world.session.snapshot().tenants["c"].last_use == uses, "both calls are one use"
        if answers:
            reports, engines = reports_of(world, i=lambda blocks: blocks)
            assert reports.ask(lambda: world.session.activate("c", alone=True)).activated
            assert len(engines["i"].asked) == 1
        else:
            report = world.session.activate("c", alone=True)
            assert not report.activated and report.preempt.keys() == {"i"} and not report.wanted
            assert world.activate("c").activated
        assert not internals(c.tenant).cold
        world.check()
