"""Dropping before KV runs out: when a forecast counts, and what it makes of a drop; and what no drop frees."""

from __future__ import annotations

import pytest
from cluster_worlds import NETWORK as SLOW
from cluster_worlds import clusters, fused
from control_worlds import MODEL, NETWORK, TIMEOUT_S, joined
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap_serve.cluster.control import Control, GroupPolicy
from remap_serve.cluster.messages import InstanceReport, Prepare, Prepared, Reported, Tick
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.dispatch import needed, overloaded
from remap_serve.policy.cluster.drop import decided, plan
from remap_serve.policy.cluster.foresight import REARM, WINDOW_S, Foresight, Outlook
from remap_serve.policy.cluster.placement import (
    UNLIMITED,
    Instance,
    InstanceLoad,
    Layer,
    Placement,
    ServedLayers,
    alone,
)
from remap_serve.policy.cluster.shortage import Shortage, shortage


@pytest.mark.parametrize(("lead_s", "horizon_s"), [(-1.0, 2.0), (3.0, 2.0), (0.0, float("inf")), (float("nan"), 2.0)])
def test_seconds_to_look_ahead_are_in_order(lead_s: float, horizon_s: float) -> None:
    with pytest.raises(InvalidArgument):
        Outlook(lead_s, horizon_s)


def test_a_forecast_is_a_straight_line_through_what_was_seen() -> None:
    found = Foresight(Outlook(2.0, 10.0))
    assert found.ahead() == (0, 0)
    for second in range(20):
        found.see(float(second), 50 + 3 * second, 1000)
        assert found.ahead() == ((6, 30) if second >= WINDOW_S / 2 else (0, 0))
    for second in range(20, 30):  # what falls is no forecast
        found.see(float(second), 200 - 3 * second, 1000)
    assert found.ahead() == (0, 0)


def test_after_a_dissolution_it_counts_when_demand_has_been_low() -> None:
    found = Foresight(Outlook())
    for tick, demand in enumerate((800, 840, 880, 920)):
        found.see(float(tick), demand, 1000)
    assert found.ahead()[0] > 0
    found.dissolved()
    assert found.ahead() == (0, 0)
    found.see(4.0, 960, 1000)
    assert found.ahead() == (0, 0)
    found.see(5.0, 740, 1000)
    found.see(10.0, 900, 1000)
    assert found.armed and found.ahead()[0] > 0


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(-150, 150), min_size=10, max_size=200), st.data())
def test_few_rounds_have_a_merger_by_the_forecast(steps: list[int], data: st.DataObject) -> None:
    """Claim 1, whenever groups dissolve: by the rises of the demand and the most that it was to rise in the lead."""
    room, demand, rises, most = 1000, 500, 0, 0
    found, merged, rounds = Foresight(Outlook(1.0, 4.0)), False, 0
    for second, step in enumerate(steps):
        after = max(0, demand + step)
        rises, demand = rises + max(0, after - demand), after
        found.see(float(second), demand, room)
        soon, _ = found.ahead()
        most = max(most, soon)
        if soon and not merged and demand <= room < demand + soon:
            merged, rounds = True, rounds + 1
        elif merged and data.draw(st.booleans()):
            merged = False
            found.dissolved()
    if most < (1 - REARM) * room:
        assert rounds <= 1 + rises / ((1 - REARM) * room - most)


PAIRS = ServedLayers((Layer(10, 1, Line(1 / 16, 1 / 64)),) * 12)


def full(count: int, tokens: int) -> Placement:
    """Instances with room for 20 tokens each, which have this many."""
    load = InstanceLoad(4, tokens)
    return alone(PAIRS, tuple(Instance(f"i{number}", 120 + 12 * 20, load) for number in range(count)))


def sizes(found: Placement) -> list[int]:
    return sorted(len(group.stages) for group in found.groups)


def test_a_forecast_merges_before_anybody_is_full_and_broadly_but_not_deep() -> None:
    before = full(8, 19)  # 8 tokens are free, a pair frees 10
    assert decided(before, SLOW, ahead=(8, 50)) is None  # not beyond what there is, so soon
    found = decided(before, SLOW, ahead=(9, 9))
    assert found is not None and sizes(found.placement) == [1] * 6 + [2]
    found = decided(before, SLOW, ahead=(9, 30))
    assert found is not None and sizes(found.placement) == [1, 1, 2, 2, 2]
    # All of it would take longer groups than pairs: as many pairs as a half of it, or a quarter, takes.
    found = decided(before, SLOW, ahead=(9, 60))
    assert found is not None and found.longest == 2 and found.freed >= 30


@settings(max_examples=examples(60), deadline=None)
@given(st.one_of(clusters(), fused()), st.integers(0, 20), st.integers(0, 60))
def test_a_forecast_only_adds_to_a_drop(before: Placement, soon: int, more: int) -> None:
    """What is lacking now is freed as without it, and no group is longer than that takes, or two."""
    found, plain = decided(before, SLOW, ahead=(soon, soon + more)), plan(before, needed(before), SLOW)
    if found is None:
        demand = sum(group.load.demand for group in before.groups) + soon
        room = sum(max(0, group.capacity(before.model)) for group in before.groups)
        assert not overloaded(before) and (soon == 0 or demand <= room)
        return
    assert max(0, needed(before) - found.freed) <= plain.missing
    assert found.longest <= max(2, plain.longest, *(len(group.stages) for group in before.groups))


def test_control_merges_by_the_forecast_and_says_what_no_drop_frees() -> None:
    """Four instances with room for 40 tokens each, whose demand rises by one token a second each."""
    control = Control(MODEL, NETWORK, GroupPolicy(outlook=Outlook(2.0, 30.0)), 100.0)
    plain = Control(MODEL, NETWORK, GroupPolicy(), 100.0)
    begun: dict[Control, int] = {}
    for each in (control, plain):
        joined(each, *"abcd")
        for second in range(30, 44):
            for name in "abcd":
                each.on(Reported(InstanceReport(name, each.epoch_of(name), load=InstanceLoad(4, second))), second)
            if any(isinstance(command, Prepare) for command in each.on(Tick(), second)):
                begun[each] = second
                break
    assert begun == {control: 39, plain: 41}
    assert len([view for view in control.groups if view.changing is not None]) == 4
    assert len({view.changing for view in control.groups}) == 2  # both pairs at once


def test_an_autoscaler_is_told_when_dropping_cannot_free_enough() -> None:
    control = Control(MODEL, NETWORK, GroupPolicy(), TIMEOUT_S)
    assert control.lacking == Shortage()
    joined(control, "a", "b")

    def asks(tokens: int) -> Shortage:
        load = InstanceLoad(2, 40, (tokens - 40,))
        for name in "ab":
            control.on(Reported(InstanceReport(name, control.epoch_of(name), load=load)), 0.0)
        return control.lacking

    assert asks(40) == Shortage()
    assert asks(45) == Shortage()  # two together have room for 90
    assert asks(46) == Shortage(2, 1)
    assert asks(90) == Shortage(90, 3)
    # The same when they have merged; and whoever may not merge lacks more.
    for command in control.on(Tick(), 0.0):
        if isinstance(command, Prepare):
            control.on(Prepared(command.instance, command.plan.epoch), 0.0)
    assert control.lacking == Shortage(90, 3)
    assert shortage(control.placement, drops=False).tokens >= 90


@settings(max_examples=examples(60), deadline=None)
@given(clusters(), st.integers(0, 100))
def test_what_is_lacking_is_what_the_best_plan_leaves(before: Placement, ahead: int) -> None:
    found, best = shortage(before, ahead), plan(before, UNLIMITED, SLOW)
    assert found.tokens == max(0, needed(before, ahead) - max(0, best.freed))
    assert bool(found.instances) == bool(found.tokens)
    assert shortage(before, ahead, drops=False).tokens == needed(before, ahead) >= found.tokens
