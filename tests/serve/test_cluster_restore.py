"""Restoring: every layer from a way that has it, never later than the host alone; and the invariant at every moment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from cluster_worlds import NETWORK, fused, serving, streaming
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidState, OutOfMemory
from remap.policy.rental import Rental
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.drop import plan
from remap_serve.policy.cluster.pipeline import Network, group_round_s
from remap_serve.policy.cluster.placement import (
    Group,
    Instance,
    InstanceLoad,
    Layer,
    Offer,
    Placement,
    PlannedStage,
    ServedLayers,
    alone,
    check,
)
from remap_serve.policy.cluster.restore import (
    Copy,
    all_alone,
    copies,
    dissolved,
    fits,
    half_used,
    income_of,
    seconds,
)

EVEN = ServedLayers((Layer(10, 1, Line(1 / 16, 1 / 64)),) * 12)
IDLE = InstanceLoad()
NETWORKS = st.builds(
    lambda rate, host: Network(Line(1 / 16, 0), rate / 4, host / 4), st.integers(1, 16), st.integers(0, 16)
)


def arrived(placement: Placement, come: Collection[Copy]) -> Placement:
    """The placement in which these copies have come and nobody computes them yet; with the next epoch. They take room that
    was KV's: `check` tells whether it suffices."""
    layers: dict[str, set[int]] = {}
    for copy in come:
        layers.setdefault(copy.instance, set()).add(copy.layer)
    groups = tuple(
        Group(tuple(replace(s, arrived=s.arrived | layers.get(s.instance.name, set())) for s in group.stages))
        for group in placement.groups
    )
    return Placement(placement.model, groups, placement.epoch + 1)


def pair(load: InstanceLoad = IDLE) -> Placement:
    memory = 180
    return Placement(
        EVEN,
        (Group((PlannedStage(Instance("a", memory, load), 0, 6), PlannedStage(Instance("b", memory, load), 6, 12))),),
        3,
    )


@settings(max_examples=examples(300), deadline=None)
@given(fused(), NETWORKS)
def test_each_missing_layer_comes_once_and_each_way_carries_one_at_a_time(before: Placement, network: Network) -> None:
    after = all_alone(before)
    found = copies(before, after, network)
    then, count = before.stages, len(before.model.layers)
    groups = {stage.instance.name: group for group in before.groups for stage in group.stages}
    wanted = {(name, layer) for name in then for layer in range(count) if not then[name].holds(layer)}
    assert sorted((copy.instance, copy.layer) for copy in found) == sorted(wanted)
    assert seconds(before, after, network) == max((copy.end_s for copy in found), default=0.0)
    ways: dict[tuple[str, str], float] = {}
    alone_s = dict.fromkeys(then, 0.0)
    for copy in found:
        rate = network.bytes_per_s if copy.source else network.host_bytes_per_s
        size = before.model.layers[copy.layer].weight_bytes
        assert copy.end_s == copy.begin_s + size / rate
        if copy.source:
            assert copy.source != copy.instance
            assert then[copy.source].holds(copy.layer)
            assert copy.source in {stage.instance.name for stage in groups[copy.instance].stages}
            used = [("to", copy.instance), ("from", copy.source)]
        else:
            used = [("host", copy.instance)]
        for way in used:
            assert copy.begin_s >= ways.get(way, 0.0)
            ways[way] = copy.end_s
        if network.host_bytes_per_s:
            alone_s[copy.instance] += size / network.host_bytes_per_s
            assert copy.end_s <= alone_s[copy.instance] * (1 + 1e-12)


def test_each_layer_takes_the_way_that_is_sooner() -> None:
    # 6 layers of 10 bytes to each. From the mate: 1 s each; from the host: 2 s each.
    fast = Network(Line(0, 0), 10.0, 5.0)
    found = [copy for copy in copies(pair(), all_alone(pair()), fast) if copy.instance == "a"]
    assert [(copy.layer, copy.source, copy.end_s) for copy in found] == [
        (6, "b", 1.0),
        (7, "b", 2.0),
        (8, None, 2.0),
        (9, "b", 3.0),
        (10, "b", 4.0),
        (11, None, 4.0),
    ]
    assert seconds(pair(), all_alone(pair()), Network(Line(0, 0), 10.0)) == 6.0  # halves, both ways at once
    assert seconds(pair(), pair(), fast) == 0.0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_equal_instances_receive_from_each_other_in_turn(size: int) -> None:
    """Each lacks (g - 1) / g of 120 bytes, and nobody waits for a sender."""
    stages = tuple(PlannedStage(Instance(f"i{n}", 200), n * 12 // size, (n + 1) * 12 // size) for n in range(size))
    before = Placement(EVEN, (Group(stages),))
    assert seconds(before, all_alone(before), Network(Line(0, 0), 10.0)) == 12.0 * (size - 1) / size


def test_what_nobody_else_holds_comes_from_the_host_or_not_at_all() -> None:
    left = Group(pair().groups[0].stages[:1])  # the other instance has failed
    before = Placement(EVEN, (left,), 3)
    after = Placement(EVEN, (Group((PlannedStage(left.stages[0].instance, 0, 12),)),), 4)
    found = copies(before, after, Network(Line(0, 0), 10.0, 5.0))
    assert {copy.source for copy in found} == {None}
    assert found[-1].end_s == 12.0
    with pytest.raises(InvalidState) as caught:
        copies(before, after, Network(Line(0, 0), 10.0))
    assert (caught.value.layer, caught.value.instance) == (6, "a")


@settings(max_examples=examples(150), deadline=None)
@given(
    st.one_of(serving(5), streaming(serving(5))),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.integers(0, 20)), max_size=6),
)
def test_a_complete_copy_exists_at_every_moment(before: Placement, steps: list[tuple[int, int, int]]) -> None:
    """Drops, restorations in pieces, and drops in the middle of them. What has no room is not done."""
    now = before
    for need, number, pieces in steps:
        now = plan(now, need, NETWORK).placement
        check(now)
        goal = dissolved(now, number % len(now.groups))
        left = copies(now, goal, NETWORK)
        for at in range(0, len(left), max(1, pieces)):
            come = arrived(now, left[at : at + max(1, pieces)])
            try:
                check(come)
            except OutOfMemory:
                break
            assert come.epoch == now.epoch + 1
            now = come
        if fits(now, number % len(now.groups), 0) and not copies(
            now, dissolved(now, number % len(now.groups)), NETWORK
        ):
            now = dissolved(now, number % len(now.groups))
            check(now)


@settings(max_examples=examples(150), deadline=None)
@given(serving(5), st.integers(0, 20))
def test_fits_is_room_alone_for_the_demand_and_the_margin(before: Placement, margin: int) -> None:
    for number, group in enumerate(before.groups):
        after = dissolved(before, number)
        assert after.epoch == before.epoch + 1
        assert len(after.groups) == len(before.groups) + len(group.stages) - 1
        singles = after.groups[number : number + len(group.stages)]
        rooms = [single.capacity(before.model) - single.load.demand - margin for single in singles]
        assert fits(before, number, margin) == all(room >= 0 for room in rooms)
        tokens = sum(max(0, single.capacity(before.model)) for single in singles)
        assert half_used(before, number) == (group.load.tokens < tokens / 2)


def test_who_serves_alone_again_fits_beside_all_of_its_layers() -> None:
    """Whatever could stream then: layers come home, and KV to them, before anything streams."""
    load = InstanceLoad(4, 6)  # 5 tokens fit alone, and 9 where 48 bytes stream
    apart = alone(EVEN, tuple(Instance(name, 180, load) for name in "ab"))
    offered = replace(
        apart,
        groups=tuple(Group((replace(group.stages[0], offers=(Offer(48),)),)) for group in apart.groups),
    )
    check(offered)
    for placement in (all_alone(offered), dissolved(offered, 0)):
        assert placement.groups[0].stages[0].offers == ()
        with pytest.raises(OutOfMemory):
            check(placement)
    assert not fits(pair(load), 0, 0)
    assert fits(pair(InstanceLoad(4, 5)), 0, 0)


def test_the_rent_of_a_pipeline_brings_its_layers_back() -> None:
    network = Network(Line(1 / 8, 0), 10.0)  # halves come back in 6 s
    group = pair(InstanceLoad(4, 1))
    alone_s = group_round_s(EVEN, [PlannedStage(Instance("x", 0), 0, 12)], 4, network)
    together_s = group_round_s(EVEN, group.groups[0].stages, 8, network)
    assert income_of(group, 0, network) == pytest.approx((together_s - alone_s) / 6.0)
    # Ski rental: after as many rounds as cost one restoration, and not while a burst lasts.
    rental, rounds = Rental(dwell=1), 0
    while not rental.accrue(income_of(group, 0, network), fits(group, 0, 2)):
        rounds += 1
        assert rounds < 1000
    assert rounds + 1 == pytest.approx(6.0 / (together_s - alone_s), abs=1.0)
    busy = pair(InstanceLoad(4, 4))  # 5 tokens fit alone
    assert fits(busy, 0, 1)
    assert not fits(busy, 0, 2)
    assert not rental.accrue(1.0, fits(busy, 0, 2))
    # The paper's rule: below half of 10 tokens.
    assert half_used(pair(InstanceLoad(1, 2)), 0)
    assert not half_used(pair(InstanceLoad(1, 3)), 0)


def test_nobody_waits_less_alone_with_badly_spread_requests() -> None:
    """One instance has all requests: alone it would be slower than the pair. There is no rent to pay."""
    network = Network(Line(0, 0), 10.0)
    a, b = Instance("a", 180, InstanceLoad(32)), Instance("b", 180)
    group = Placement(EVEN, (Group((PlannedStage(a, 0, 6), PlannedStage(b, 6, 12))),))
    assert income_of(group, 0, network) == 0.0
    assert income_of(alone(EVEN, (a,)), 0, network) == 1.0  # nothing to copy
