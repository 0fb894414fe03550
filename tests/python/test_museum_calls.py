"""The bug museum of calls: calls that failed and had changed something, or that could not succeed, one named test a fault.

(Those that backend calls which fail had a part in are cases of test_fault_sweep.py; what a walk finds is in test_fuzz.py.)
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from arena_worlds import External, make_spec, times_of
from sharing_worlds import EAGER, Faulty, Shared, attempt, set_times

import remap
from remap.errors import DriverError
from remap.internals import internals
from remap.memory.apply import compose_moves
from remap.memory.pages import plan_free_pages
from remap.memory.view import count_free, free_pages_of


def eager(**config: Any) -> remap.advanced.Knobs:
    return remap.advanced.Knobs(**{**EAGER, "slowdown": 9.0, **config})


def test_slices_of_which_most_layers_turn_out_written_are_not_tried() -> None:
    """`step` raised "2 sliced layers need between 1 and 1 ring buffers" when the layers it had chosen were found written."""
    for written, timed in itertools.product([{0}, {0, 1}, {0, 1, 2}], [False, True]):
        with Shared({"a": (2, 2, 2), "b": (1, 1)}, spare=8, config=eager(selection="slices")) as world:
            a, b = world.engines.values()
            if timed:
                set_times(a, times_of(3, 1.0, 0.3))
            state = internals(a.tenant)._state
            watch = lambda asked, found=written: {layer: ["x"] for layer in asked if layer in found}  # noqa: E731
            state.source = dataclasses.replace(state.source, watch=watch)
            b.allocate(2)
            world.session.deactivate("b")  # beside an active tenant nothing streams before it was measured
            for blocks in (5, 40, 60, 100, 0, 0):
                world.step(a=blocks)
            assert internals(a.tenant).pinned == tuple(sorted(written))


def test_a_model_whose_layers_have_no_bytes_serves() -> None:
    """Every step after the first pass raised "no bandwidth was observed": there was nothing to measure it with."""
    with Shared({"a": (0, 0, 0), "b": (2, 2)}, spare=8, config=eager()) as world:
        for blocks in (0, 5, 100):
            world.engines["a"].serve()
            world.step(a=blocks, b=0)
        assert internals(world.engines["a"].tenant).times().transfer_s == (0.0, 0.0, 0.0)
        assert world.session.snapshot().tenants["a"].copy_times_s == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("own_allocator", [False, True])
def test_activation_says_which_of_the_tenants_own_blocks_are_in_the_way(own_allocator: bool) -> None:
    """`activate` raised OutOfBlocks without `preempt` where the tenant had taken back some of the pages that it had lent, and its
    engine's own allocator held blocks there: nobody could know which ones to free."""
    options = {"a": {"kv": make_spec(6, max_blocks=400)}}
    with Shared({"a": [2] * 6}, config=eager(reversion=False), options=options) as world:
        tenant = world.engines["a"].tenant
        engine = External(tenant) if own_allocator else None
        world.lend("a", 3)
        lent = internals(tenant).lent_pages
        world.session.step({"a": remap.Demand(10, free=len(engine.free) if engine else None)})
        assert 0 < internals(tenant).lent_pages < lent
        if engine:
            engine.use(sorted(engine.free))
        else:
            world.engines["a"].fill()
        report = world.session.activate("a")
        assert not report.activated and report.preempt["a"] and internals(tenant).lent_pages > 0
        (engine.finish if engine else world.engines["a"].free)(report.preempt["a"])
        assert world.tell(world.session.activate("a")).activated and not internals(tenant).lent_pages
        world.check()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_a_tenant_whose_copies_failed_while_it_was_inactive_can_be_activated(mode: str) -> None:
    """Copies into an inactive lender's ring failed: what changed its layers waited for that copy stream, and raised for ever,
    since only a pass replaced it."""
    for nth in range(1, 7):
        with Faulty(mode) as world:
            tenant = world.engines["b"].tenant
            world.session.deactivate("b")
            world.fault.fail_async_copy(nth)
            world.lend("b", 3, to="a")
            for buffers in (2, 1):  # what moves the ring waits for copies in flight
                attempt(lambda: world.remap("b", 3, buffers, "nested"))  # noqa: B023
            attempt(lambda: remap.advanced.settle(world.session))
            world.fault.disarm()
            attempt(internals(tenant)._state.prefetcher.drain)
            world.remap("b", 4, 2, "nested")
            assert world.tell(world.session.activate("b")).activated and not internals(tenant).lent_pages
            attempt(world.works)
            world.works()


def failing_commits(world: Faulty, monkeypatch: pytest.MonkeyPatch, fails: Any) -> None:
    """The next plans are applied, and settling those for which `fails` has True fails at first."""
    commit = world.session._changes._commit

    def failing(*arguments: Any) -> None:
        if next(fails, False):
            raise DriverError("injected: an event could not be created")
        commit(*arguments)

    monkeypatch.setattr(world.session._changes, "_commit", failing)


def test_what_was_applied_and_not_settled_is_seen_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settling failed once. Who has which page was looked up once per epoch, and the epoch moves when a plan is settled: the next
    step gave the same pages away again and raised "Page 24 belongs to kv", and `activate` "slot 12 is not owned"."""
    with Faulty() as world:
        a, c = world.engines["a"], world.engines["c"]
        world.step(a=0, b=0, c=0)
        failing_commits(world, monkeypatch, iter([True]))
        world.step(a=a.kv.free_blocks + 3)
        world.step(c=c.kv.free_blocks + 3)
        world.works()
        world.session.deactivate("b")
        world.lend("b", 3)
        assert not world.session.snapshot().tenants["b"].lent_to
        failing_commits(world, monkeypatch, iter([True]))
        world.step(a=a.kv.free_blocks + 9)
        assert world.session.snapshot().tenants["b"].lent_to["a"] > 0
        assert world.session.activate("b").activated
        world.works()


def test_free_pages_are_counted_anew_within_a_change_and_until_it_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena's epoch is the same until then: an answer kept for it gave the same pages away twice."""
    with Faulty() as world:
        world.step(a=world.engines["a"].kv.free_blocks + 3)
        failing_commits(world, monkeypatch, iter([True]))

        def change(core: Any) -> tuple[int, ...]:
            changes, tenant, other = core.changes, core.tenant("a"), core.tenant("b")
            free, others, epoch = count_free(changes, tenant), count_free(changes, other), core.arena.epoch
            with changes.part():
                pages = free_pages_of(changes, tenant)[:2]
                changes.apply(tenant, plan_free_pages(tenant.pages, pages, give=True))
                within = count_free(changes, tenant)
            return free - within, others - count_free(changes, other), core.arena.epoch - epoch

        assert world.session.exclusively(change) == (2, 2, 0)
        world.works()


def test_moves_of_steps_that_raised_are_told_together_and_in_order() -> None:
    """A step that raises has moved blocks; the next one moves them on, and raises as well; then the engine hears of both."""
    assert compose_moves({1: 2, 5: 6}, {2: 3, 7: 8}) == {1: 3, 5: 6, 7: 8}
