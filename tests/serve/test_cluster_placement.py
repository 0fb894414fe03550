"""Words of a cluster: the invariant is checked, capacity is what fits, requests go to the least loaded group."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_worlds import clusters, fused, models, streaming
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import cluster_brute
from remap.errors import InvalidArgument, OutOfMemory
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.dispatch import dispatch, load_share, needed, overloaded
from remap_serve.policy.cluster.placement import (
    UNLIMITED,
    Group,
    IncompleteCopy,
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

NO_TIME = Line(0.0, 0.0)
FOUR = ServedLayers((Layer(8, 2, NO_TIME),) * 4)
A, B, C = (Instance(name, 64, InstanceLoad(1, 4)) for name in "abc")


@settings(max_examples=examples(200), deadline=None)
@given(st.one_of(fused(), streaming(fused())))
def test_capacity_is_what_fits_beside_the_weights_that_do_not_stream(placement: Placement) -> None:
    model, most = placement.model, 10_000
    for group in placement.groups:
        fits = []
        for stage in group.stages:
            held = [layer for layer in range(len(model.layers)) if stage.holds(layer)]
            memory = stage.instance.memory_bytes
            if len(held) == stage.end - stage.first == len(model.layers):
                # What is offered is room for KV, and not for weights.
                memory += sum(each.nbytes for each in stage.offers) * (
                    memory >= model.weight_bytes(0, len(model.layers))
                )
            found = cluster_brute.tokens_of(model, memory, held, (stage.first, stage.end), most)
            assert stage.capacity(model) == (UNLIMITED if found == most else found)
            fits.append(stage.capacity(model))
        assert group.capacity(model) == min(fits)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 9), st.integers(1, 9), st.integers(0, 500))
def test_equal_instances_and_layers_have_the_closed_form(g: int, each: int, weight: int, kv: int, spare: int) -> None:
    model = ServedLayers((Layer(weight, kv, NO_TIME),) * (g * each))
    memory = g * each * weight + spare
    stages = tuple(PlannedStage(Instance(f"i{n}", memory), n * each, (n + 1) * each) for n in range(g))
    assert Group(stages).capacity(model) == (g * memory - g * each * weight) // (g * each * kv)


@settings(max_examples=examples(200), deadline=None)
@given(models(), st.integers(0, 40), st.floats(0, 4))
def test_sums_over_runs_of_layers(model: ServedLayers, tokens: int, part: float) -> None:
    count = len(model.layers)
    for first in range(count + 1):
        for end in range(first, count + 1):
            run = model.layers[first:end]
            assert model.weight_bytes(first, end) == sum(layer.weight_bytes for layer in run)
            assert model.kv_bytes(first, end) == sum(layer.kv_bytes for layer in run)
            assert model.seconds(first, end, tokens) == sum(layer.seconds(tokens) for layer in run)
            assert model.seconds(first, end, part) == pytest.approx(sum(layer.seconds(part) for layer in run))


@settings(max_examples=examples(100), deadline=None)
@given(clusters())
def test_a_cluster_starts_with_all_layers_everywhere(placement: Placement) -> None:
    check(placement)
    assert placement.epoch == 0
    assert list(placement.stages) == [f"i{n}" for n in range(len(placement.groups))]
    for stage in placement.stages.values():
        assert all(map(stage.holds, range(len(placement.model.layers))))


def test_a_group_without_a_complete_copy_is_refused() -> None:
    check(Placement(FOUR, (Group((PlannedStage(A, 0, 2), PlannedStage(B, 2, 4))),)))
    broken = {
        "missing": ((PlannedStage(A, 0, 1), PlannedStage(B, 2, 4)), (1,), ()),
        "at the end": ((PlannedStage(A, 0, 3),), (3,), ()),
        "repeated": ((PlannedStage(A, 0, 3), PlannedStage(B, 2, 4)), (), (2,)),
        "out of order": ((PlannedStage(A, 2, 4), PlannedStage(B, 0, 2)), (), ()),
        "backwards": ((PlannedStage(A, 0, 3), PlannedStage(B, 3, 1), PlannedStage(C, 3, 4)), (), ()),
        "held but not computed": ((PlannedStage(A, 0, 3, frozenset({3})),), (3,), ()),
        "nobody": ((), (0, 1, 2, 3), ()),
    }
    for stages, missing, repeated in broken.values():
        with pytest.raises(IncompleteCopy) as caught:
            check(Placement(FOUR, (Group((PlannedStage(Instance("other", 99), 0, 4),)), Group(stages)), epoch=7))
        error = caught.value
        assert (error.group, error.epoch, error.layers, error.instance) == (1, 7, 4, None)
        assert (error.missing, error.repeated) == (missing, repeated)
        assert error.runs == tuple((stage.first, stage.end) for stage in stages)


def test_an_instance_is_in_one_group_only() -> None:
    with pytest.raises(IncompleteCopy) as caught:
        check(Placement(FOUR, (Group((PlannedStage(A, 0, 4),)), Group((PlannedStage(B, 0, 2), PlannedStage(A, 2, 4))))))
    assert (caught.value.group, caught.value.instance) == (1, "a")


def test_running_requests_must_fit_beside_the_weights() -> None:
    full = Instance("full", 40, InstanceLoad(1, 1))
    check(Placement(FOUR, (Group((PlannedStage(full, 0, 4),)),)))
    for instance, first, capacity in (
        (Instance("x", 40, InstanceLoad(1, 2)), 4, 1),
        (Instance("x", 31, InstanceLoad(0, 0)), 4, -1),
    ):
        with pytest.raises(OutOfMemory) as caught:
            check(Placement(FOUR, (Group((PlannedStage(instance, 0, first),)),)))
        assert (caught.value.group, caught.value.requested, caught.value.free) == (0, instance.load.tokens, capacity)
    # A layer that came back takes its room already.
    with pytest.raises(OutOfMemory):
        check(
            Placement(FOUR, (Group((PlannedStage(full, 0, 3, frozenset({3})), PlannedStage(Instance("y", 9), 3, 4))),))
        )


def test_what_streams_counts_for_an_instance_alone() -> None:
    """Room for 4 tokens beside 32 bytes of weights, and for 2 more where 16 of them stream; or 8 stream and 8 are lent."""
    offer = Offer(16, 0.5)
    assert PlannedStage(A, 0, 4, offers=(Offer(8), Offer(8, 0.5))).capacity(FOUR) == 4 + 2
    assert PlannedStage(A, 0, 4, offers=(offer,)).capacity(FOUR) == 4 + 2
    running = replace(A, load=InstanceLoad(1, 6))
    check(Placement(FOUR, (Group((PlannedStage(running, 0, 4, offers=(offer,)),)),)))
    with pytest.raises(OutOfMemory):
        check(Placement(FOUR, (Group((PlannedStage(running, 0, 4),)),)))
    # A stage of several lets nothing stream, and weights that do not fit do not begin to.
    assert PlannedStage(A, 0, 3, offers=(offer,)).capacity(FOUR) == PlannedStage(A, 0, 3).capacity(FOUR)
    assert PlannedStage(Instance("small", 31), 0, 4, offers=(offer,)).capacity(FOUR) == -1
    for wrong in ((-1, 0.0), (0, -0.5), (0, float("nan"))):
        with pytest.raises(InvalidArgument):
            Offer(*wrong)


def test_a_model_needs_layers_that_make_sense() -> None:
    for layers in ((), (Layer(-1, 0, NO_TIME),), (Layer(0, -2, NO_TIME),), (Layer(0, 0, Line(-0.5, 0.0)),)):
        with pytest.raises(InvalidArgument):
            ServedLayers(layers)


def test_a_groups_line_has_the_heads_first() -> None:
    loads = (InstanceLoad(1, 5, (1, 2, 3), 5), InstanceLoad(2, 7, (), 6), InstanceLoad(0, 0, (4, 5), 5))
    stages = tuple(PlannedStage(Instance(f"i{n}", 99, load), n, n + 1) for n, load in enumerate(loads))
    load = Group(stages).load
    assert load == InstanceLoad(3, 12, (1, 4, 2, 5, 3), 6)
    assert (load.requests, load.demand, load.wanted) == (8, 13, 27)


# ------------------------------------------------------------------------------------------------------- dispatch


@settings(max_examples=examples(200), deadline=None)
@given(clusters(), st.lists(st.integers(0, 20), max_size=20))
def test_requests_go_where_least_is_wanted(placement: Placement, asked: list[int]) -> None:
    sent, expected = [0] * len(placement.groups), []
    rooms = [group.capacity(placement.model) for group in placement.groups]
    loads = [group.load.wanted for group in placement.groups]
    for tokens in asked:
        wanted = [load + more for load, more in zip(loads, sent)]
        shares = [each / room if room > 0 else float("inf") for each, room in zip(wanted, rooms)]
        fitting = [number for number, room in enumerate(rooms) if room >= min(tokens, max(rooms))]
        expected.append(min(fitting, key=shares.__getitem__))
        sent[expected[-1]] += tokens
    assert dispatch(loads, rooms, asked) == expected


def test_load_counts_running_requests_and_the_head_of_the_line() -> None:
    busy = Instance("busy", 64, InstanceLoad(3, 2, (1, 100)))  # room for 4 tokens
    idle = Instance("idle", 48, InstanceLoad())  # for 2
    placement = alone(FOUR, (busy, idle))
    assert [load_share(FOUR, group) for group in placement.groups] == [0.75, 0.0]
    # Whoever waits behind the head counts for those who come.
    assert dispatch([102, 0], [4, 2], [1, 1, 1]) == [1, 1, 1]
    # Equal shares go to the first; what was sent counts in full.
    assert dispatch([3, 0], [4, 2], [1, 1, 1]) == [1, 1, 0]
    assert overloaded(placement) == []
    assert overloaded(alone(FOUR, (Instance("x", 64, InstanceLoad(3, 2, (3,))), idle))) == [0]
    # Without room at all a group is the last choice.
    assert dispatch([0, 103], [-1, 4], [1, 1]) == [1, 1]


def test_needed_is_what_runs_and_waits_less_what_there_is() -> None:
    idle = Instance("idle", 48)
    assert needed(alone(FOUR, (Instance("x", 64, InstanceLoad(3, 2, (3, 9))), idle))) == 2 + 12 - 4 - 2
    assert needed(alone(FOUR, (Instance("x", 64, InstanceLoad(3, 2, (3,))), idle))) == 0
    assert needed(alone(FOUR, (Instance("too small", 0, InstanceLoad(0, 0, (5,))),))) == 5
