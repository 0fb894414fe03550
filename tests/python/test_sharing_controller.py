"""Who gives what to whom, and when it goes back: injected times, so that every decision is known beforehand.

Every tenant has eight layers, so that a block is exactly a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sharing_worlds import Engine, Shared, set_times, times_of

import remap
from remap.internals import internals
from remap.policy import schedule
from remap.policy.views import Decision

N = 8
PLAIN: dict[str, Any] = {"reserve_blocks": 0, "hysteresis_blocks": 0, "min_idle": 0.0}
HIDDEN = times_of(N, 1.0, 0.0)
SLOW = times_of(N, 1.0, 100.0)  # nothing of it can be hidden


def world_of(pages: dict[str, int], times: Any = HIDDEN, *, spare: int = 0, **config: Any) -> Shared:
    world = Shared({name: [count] * N for name, count in pages.items()}, spare=spare, config=config_of(**config))
    for engine in world.engines.values():
        set_times(engine, times, copy_s=0.0)
    return world


def config_of(**config: Any) -> remap.advanced.Knobs:
    return remap.advanced.Knobs(**{**PLAIN, **config})


def watch(world: Shared, name: str) -> list[Any]:
    """All decisions for this tenant from now on."""
    seen: list[Any] = []
    controller = world.session._tenants[name].controller

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*asked: Any) -> Any:
            decision = method(*asked)
            if isinstance(decision, Decision):  # else it asks for quotes first
                seen.append(decision)
            return decision

        return call

    controller.decide, controller.decide_with = watched(controller.decide), watched(controller.decide_with)  # type: ignore[method-assign]
    return seen


def sources(decision: Any) -> list[tuple[str, str]]:
    """In the order in which they are asked: ("free", ""), ("idle_kv", donor), ("inactive" or "active", donor), ("own", "")."""
    found = [("free", "")] if decision.free_pool_blocks_to_take else []
    return found + [(take.kind, take.donor) for take in decision.takes]


def hold(engine: Engine, blocks: int) -> None:
    engine.allocate(min(blocks, engine.kv.free_blocks))


def take_all(world: Shared, **demand: int) -> None:
    """r, which gives no layer of its own, asks until nobody gives it any more."""
    world.session._tenants["r"].controller.config = config_of(max_layers=0)
    for _ in range(40):
        hold(world.engines["r"], 99)
        if world.step(r=1, **demand).unmet_blocks:
            break


def idle_until(engine: Engine, seconds: float) -> None:
    """As if its last pass had been so long ago; from now on the session's clock stands still."""
    now = engine.session.clock()
    engine.session.clock = engine.session._offers._clock = engine.session._passes._clock = lambda: now
    internals(engine.tenant)._state.last_pass_s = now - seconds


# -- from whom -----------------------------------------------------------------------------------------------------------


def test_free_pages_then_unused_kv_then_inactive_by_policy_then_active() -> None:
    """i and j have no rhythm: nobody expects them."""
    with world_of({"r": 1, "i": 2, "j": 2, "d": 2}, spare=9, policy="lru") as world:
        r, d = world.engines["r"], world.engines["d"]
        world.step(d=8)  # what it has above its two blocks will be unused
        for name in ("j", "i"):
            world.activate(name)
        for name in ("i", "j"):
            world.session.deactivate(name)
        seen = watch(world, "r")
        log: list[tuple[str, str]] = []
        for _ in range(60):
            hold(r, 99)
            report = world.step(r=1, d=0)
            for source in sources(seen[-1]) + ([("own", "")] if seen[-1].remapped and not seen[-1].takes else []):
                if source not in log:
                    log.append(source)
            if report.unmet_blocks:
                break
        else:
            pytest.fail("nothing was ever unmet")
        # j was used before i: least recently used goes first.
        assert log[:4] == [("free", ""), ("idle_kv", "d"), ("inactive", "j"), ("inactive", "i")]
        assert set(log[4:]) == {("active", "d"), ("own", "")}
        assert all(world.engines[name].tenant.remapped == 6 for name in "ij"), "all but the ring"
        assert d.kv.usable_blocks >= 2
        # All are at their caps: the same is asked for in vain, and nothing changes any more.
        owners, epoch = world.owners(), world.session.snapshot().epoch
        for _ in range(5):
            assert world.step(r=1, d=0).unmet_blocks == {"r": 1}
        assert (world.owners(), world.session.snapshot().epoch) == (owners, epoch)
        assert "1 blocks stay unmet" in world.session.snapshot().decisions[-1].reason
        world.check()


@pytest.mark.parametrize(
    ("next_use_s", "source"), [(90.0, "inactive"), (70.0, "own"), (0.0, "own"), (None, "inactive")]
)
def test_what_a_paused_model_needs_soon_is_left_to_it(next_use_s: float | None, source: str) -> None:
    """Passes of 8 s; copies of 0.5 s are hidden and cost a tenth of that: an idle layer is worth 10 passes' wait."""
    with world_of({"r": 2, "i": 2}, times_of(N, 1.0, 0.5)) as world:
        r, i = world.engines["r"], world.engines["i"]
        for engine in (r, i):
            set_times(engine, times_of(N, 1.0, 0.5), copy_s=0.5)
        world.session.deactivate("i")
        idle_until(i, 1.0)
        world.session._offers._activity.expected_s = lambda name, now: next_use_s  # type: ignore[method-assign]
        hold(r, 99)
        seen = watch(world, "r")
        assert not world.step(r=2).unmet_blocks
        assert (sources(seen[-1]), seen[-1].remapped) == (([("inactive", "i")], 0) if source == "inactive" else ([], 1))
        world.check()


def test_free_pages_are_taken_where_blocks_stand_together() -> None:
    """By their places in the KV region, not by their numbers: blocks that straddle pages need neighbours."""
    with world_of({"r": 1, "i": 2}) as world:
        i = world.engines["i"].tenant
        world.session._tenants["i"].controller.config = config_of(max_layers=0)
        world.lend("i", 4)  # layers spread over the model, free now
        world.step(i=4)
        assert i.kv.usable_blocks >= 4
        assert i.kv.allocate(i.kv.free_blocks) == list(range(i.kv.usable_blocks))


@pytest.mark.parametrize(("next_use_s", "swaps"), [(90.0, False), (90.0, True), (10.0, False), (None, True)])
def test_unused_kv_that_a_paused_tenant_will_miss_is_taken_when_it_is_cheapest(
    next_use_s: float | None, swaps: bool
) -> None:
    """It wanted five blocks in its last step and has them. Each will be copied in again, once before its next turn; the
    receiver's own layers cost rent in each of its passes of 8 s. Nobody swaps, or all do."""
    with world_of({"r": 2, "i": 2}, times_of(N, 1.0, 0.5), spare=5) as world:
        r, i = world.engines["r"], world.engines["i"]
        for engine in (r, i):
            set_times(engine, times_of(N, 1.0, 0.5), copy_s=0.5)
        world.session._tenants["i"].controller.config = config_of(max_layers=0)
        world.step(i=7)
        i.allocate(2)
        for engine in (r, i) if swaps else ():
            engine.kv.offer(2)
        world.step(i=5)
        world.session.deactivate("i")
        world.session._offers._activity.expected_s = lambda name, now: next_use_s  # type: ignore[method-assign]
        hold(r, 99)
        seen = watch(world, "r")
        report = world.step(r=2)
        assert not report.unmet_blocks and not report.wanted, "the unused ones were enough"
        expected: Any = ([("paused_kv", "i")], 4, 0)  # at no cost, if nobody knows when
        if next_use_s == 10.0:
            expected = ([], 7, 1)
        elif swaps and next_use_s:  # an idle layer of two pages is copied in sooner than three blocks of a page each
            expected = ([("inactive", "i")], 7, 0)
        assert (sources(seen[-1]), i.kv.usable_blocks, r.tenant.remapped) == expected
        assert i.kv.live_blocks == 2, "no live block went"
        world.check()


@pytest.mark.parametrize("budget", [0.0, 1.5, 4.0, 1e6])
@pytest.mark.parametrize("transfer", [0.5, 1.3, 3.0])
@pytest.mark.parametrize("streamed", [0, 3], ids=["resident", "streaming already"])
@pytest.mark.parametrize("ahead", [0.0, 1.0])
def test_an_inactive_tenant_gives_exactly_as_much_as_its_next_prefill_may_be_late(
    budget: float, transfer: float, streamed: int, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what can come home ahead of it."""
    times = times_of(N, 1.0, transfer)
    with world_of({"r": 1, "i": 3}, times, reload_s=budget, max_layers=None) as world:
        monkeypatch.setattr(world.session._offers.inactive, "_ahead", lambda: ahead)
        budget += ahead
        i = internals(world.engines["i"].tenant)
        world.remap("i", streamed, 1, "nested")
        world.session.deactivate("i")
        take_all(world)

        def late(alpha: int) -> float:
            missing = i._state.select(alpha, i.buffers or 1, i._state.growing_by)
            return schedule.one_shot_delay(times.compute_s, times.transfer_s, missing)

        given = i.remapped
        assert given <= 6 and (given <= streamed or late(given) <= budget + 1e-9)
        assert given == 6 or late(given + 1) > budget
        lent = i.lent_pages
        world.engines["r"].free()
        report = world.activate("i")
        assert report.activated
        if not streamed and lent:
            assert len(report.restored) == given + 1
            assert report.predicted_stall_s <= budget + 1e-9, "what was promised when it gave"


@pytest.mark.parametrize("own", [1.0, 5.0])
def test_an_inactive_tenant_gives_only_once_it_has_been_idle_for_as_long_as_it_says(own: float) -> None:
    with world_of({"r": 1, "i": 3}, min_idle=5.0, max_layers=None) as world:
        i, r = world.engines["i"], world.engines["r"]
        set_times(i, HIDDEN, copy_s=100.0)
        world.session._tenants["r"].controller.config = config_of(max_layers=0)
        world.session._tenants["i"].config = config_of(min_idle=own, max_layers=None)
        world.session.deactivate("i")
        idle_until(i, 100.0 * own - 1.0)
        hold(r, 99)
        assert world.step(r=1).unmet_blocks == {"r": 1} and i.tenant.remapped == 0
        idle_until(i, 100.0 * own + 1.0)
        assert not world.step(r=1).unmet_blocks and i.tenant.remapped == 1


def test_whoever_does_not_lend_is_left_alone() -> None:
    options = {"i": {"config": config_of(lends=False)}}
    config = config_of(max_layers=0)
    with Shared({"r": [1] * N, "i": [2] * N}, spare=4, config=config, options=options) as world:
        world.step(i=6)
        world.session.deactivate("i")
        set_times(world.engines["i"], HIDDEN)
        before = world.engines["i"].kv.usable_blocks
        hold(world.engines["r"], 99)
        assert world.step(r=3).unmet_blocks
        assert world.engines["i"].kv.usable_blocks == before and not world.engines["i"].tenant.streamed


def test_an_active_donor_keeps_its_demand_headroom_hysteresis_and_its_own_blocks() -> None:
    with world_of({"r": 1, "d": 1}, spare=30, max_layers=0) as world:
        d = world.engines["d"]
        world.session._tenants["d"].controller.config = config_of(max_layers=0, reserve_blocks=4, hysteresis_blocks=2)
        world.step(d=20)
        hold(d, 5)
        world.step(d=3)
        take_all(world, d=3)
        assert d.kv.free_blocks == 3 + 4 + 2
        world.step(d=0, r=1)  # nothing is wanted any more: three blocks fewer are kept
        assert d.kv.free_blocks == 4 + 2 or world.engines["r"].kv.free_blocks
        world.session.deactivate("d")
        d.free()
        take_all(world)
        assert d.kv.usable_blocks == 2, "min_blocks"
        world.check()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 2.0, 100.0])
def test_a_waking_tenant_streams_as_much_as_its_caller_allows(share: float) -> None:
    times = times_of(N, 1.0, 3.0)
    with world_of({"r": 1, "i": 3}, times, reload_s=1e6) as world:
        i, r = world.engines["i"], world.engines["r"]
        world.session.deactivate("i")
        take_all(world)
        lent = i.tenant.remapped
        assert lent == N - 2

        def stalls() -> bool:
            """Longer than is allowed."""
            streamed, buffers = i.tenant.streamed, internals(i.tenant).buffers
            return bool(streamed) and (
                schedule.stall(times.compute_s, times.transfer_s, streamed, buffers) > share * N + 1e-6
            )

        report = world.session.activate("i", partial=share)
        assert report.activated != stalls(), "all of r's blocks live, so nothing can come home"
        if not report.activated:
            assert i.tenant.remapped == lent and not i.tenant.active
            asked = report.preempt["r"]
            assert set(asked) <= set(r.held)
            r.free(list(asked))
            report = world.session.activate("i", partial=share)
            assert report.activated and not report.preempt
        assert not stalls()
        world.check()
