"""What turns take of the link, and what those who stream beside them do about it."""

from __future__ import annotations

import random

import pytest
from sharing_worlds import set_times, times_of
from test_sharing_controller import N, world_of

import remap
from remap.internals import internals
from remap.memory.activate import WELL_ABOVE
from remap.policy.hardware import machine
from remap.policy.switching import MOST, STEPS, Switching
from remap_serve.sim.loads import load
from remap_serve.sim.results import PolicyResult
from remap_serve.sim.serving import Setup, simulate, tenants

# -- the share -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_share_is_the_mean_of_turns_and_at_least_that(seed: int) -> None:
    rng = random.Random(seed)
    switching, now, copied, turn = Switching(), rng.uniform(0.0, 9.0), 0.0, 0.0
    switching.activated("t0", now, rng.random())
    assert switching.share == 0.0, "how long a turn takes is not known yet"
    for number in range(1, 40):
        seconds, moved, parts = rng.uniform(0.5, 2.0), rng.uniform(0.0, 1.5), rng.randint(1, 3)
        for _ in range(1, parts):  # of the turn that ends
            switching.activated(f"t{number - 1}", now + seconds / 2, moved / parts)
        now += seconds
        switching.activated(f"t{number}", now, moved / parts)
        gain = 1.0 if number == 1 else 0.25
        copied, turn = copied + gain * (moved - copied), turn + gain * (seconds - turn)
        least = min(copied / turn, 1.0 - 1.0 / STEPS)
        assert least - 1e-9 <= switching.share <= least + 1.0 / STEPS and switching.share < 1.0
        assert (STEPS * switching.share).is_integer()


def test_clocks_that_jump_back_and_nothing_copied_teach_nothing() -> None:
    switching = Switching()
    for now in (5.0, 4.0, 4.0):
        switching.activated(f"at {now} {switching._last}", now, 1.0)
        assert switching.share == 0.0
    for turn in range(30):
        switching.activated("ab"[turn % 2], 5.0 + turn, -1.0)
    assert switching.share == 0.0


def test_after_some_turns_of_silence_the_link_is_free() -> None:
    switching = Switching()
    for turn in range(8):
        switching.activated("ab"[turn % 2], float(turn), 0.5)
    assert switching.share == 0.5
    switching.look(7.0 + 3.9)
    assert switching.share == 0.5
    switching.look(7.0 + 4.1)
    assert switching.share == 0.0
    for turn in range(20, 22):
        switching.activated("ab"[turn % 2], float(turn), 0.25)
    assert switching.share == 0.25, "of the new turns alone"


# -- who streams beside them -----------------------------------------------------------------------------------------------


def test_a_tenant_has_the_rest_of_the_link() -> None:
    times = times_of(N, 1.0, 0.5)
    with world_of({"r": 1, "i": 2}, times) as world:
        state = internals(world.engines["r"].tenant)._state
        world.session.deactivate("i")
        before = state.decode_times()
        assert before is not None and before.transfer_s == times.transfer_s
        world.session._link.switching.share = 0.75
        slower = state.decode_times()
        assert slower is not None and slower.transfer_s == pytest.approx([4 * each for each in times.transfer_s])
        assert slower.compute_s == times.compute_s and state.decode_times() is slower
        alone = state.bounds.bound(before)[0]
        assert state.bounds.bound(slower)[0] < alone
        world.session._link.switching.share = 0.0
        assert state.decode_times() is before


@pytest.mark.parametrize(("share", "room"), [(0.05, True), (0.75, True), (0.75, False)])
def test_what_it_streamed_before_comes_home_with_its_turn(share: float, room: bool) -> None:
    """Of its own, that is: by much more than allowed it waits only where switches take much of the link. Without room for
    its live blocks it streams on, and its turn begins nevertheless."""
    times = times_of(N, 1.0, 0.5)
    with world_of({"r": 1, "i": 2}, times, slowdown=0.05, lends=False) as world:
        r = world.engines["r"]
        r.fill()
        world.step(r=2 * r.kv.usable_blocks)
        own = r.tenant.remapped
        assert own >= 2
        (r.free if room else r.fill)()
        world.session.deactivate("r")
        world.session._link.switching.share = share
        assert world.activate("r").activated
        comes = room and share > 0.5
        assert r.tenant.remapped < own if comes else r.tenant.remapped == own
        if comes:
            state = internals(r.tenant)._state
            assert r.tenant.remapped <= state.bounds.bound(state.decode_times())[0]
        world.check()


@pytest.mark.parametrize("share", [MOST, MOST + 1.0 / STEPS])
def test_beside_switches_that_crowd_the_link_no_inactive_layers_are_given(share: float) -> None:
    """Unused KV still is."""
    with world_of({"r": 1, "i": 2}, times_of(N, 1.0, 0.5), spare=8) as world:
        r = world.engines["r"]
        world.step(i=8)
        r.fill()
        world.session.deactivate("i")
        world.step(r=0)
        world.session._link.switching.share = share
        kinds = {quote.kind for quote in remap.advanced.offers(world.session, "r") if quote.donor == "i"}
        assert kinds == {"idle_kv", "inactive"} if share <= MOST else {"idle_kv"}


def test_layers_set_by_hand_stay() -> None:
    with world_of({"r": 2, "i": 2}, times_of(N, 1.0, 0.5)) as world:
        r = world.engines["r"]
        world.remap("r", 3)
        world.session.deactivate("r")
        world.session._link.switching.share = 0.75
        assert world.activate("r").activated and r.tenant.remapped == 3


def test_the_margin_is_that_of_switching_alone() -> None:
    """Passes that have become quicker since it grew are no reason to bring layers home: nothing switches."""
    with world_of({"r": 1, "i": 2}, times_of(N, 1.0, 0.5), slowdown=0.05, lends=False) as world:
        r = world.engines["r"]
        r.fill()
        world.step(r=2 * r.kv.usable_blocks)
        own = r.tenant.remapped
        r.free()
        set_times(r, times_of(N, 0.1, 0.5), copy_s=0.0)
        world.session._link.switching.share = WELL_ABOVE / 100
        world.session.deactivate("r")
        assert world.activate("r").activated and r.tenant.remapped == own


# -- in virtual time -------------------------------------------------------------------------------------------------------


def two_models_over_a_slow_link(policy: str) -> PolicyResult:
    """700 requests for two models on 24 GB behind 25.5 GB/s, at saturation."""
    made = machine("RTX-4090")
    setup = Setup(made, tenants("Qwen3-4B:45%,Qwen3-4B:45%", made), quantum_s=1.0)
    context = {tenant.name: tenant.model.context for tenant in setup.tenants}
    items = load([tenant.name for tenant in setup.tenants], requests=700, rate=8.0, seed=4, context=context)
    return simulate(setup, items, policy)


@pytest.mark.parametrize(("policy", "waits"), [("remap:weights", 0.25)])
def test_passes_do_not_spend_turns_waiting_over_a_slow_link(policy: str, waits: float) -> None:
    """With all KV and weights on the link at each switch, two streamed layers cost half of each turn; layers lent while their
    model was idle cost four fifths of it, as long as blocks lived."""
    result, base = two_models_over_a_slow_link(policy), two_models_over_a_slow_link("recompute")
    stall = sum(tenant.stall_s for tenant in result.tenants)
    compute = sum(tenant.compute_s for tenant in result.tenants)
    assert stall < waits * compute
    assert result.headline()["tokens_per_s"] > 0.98 * base.headline()["tokens_per_s"]
