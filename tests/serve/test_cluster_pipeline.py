"""Seconds of a pipeline: the recurrence and the formulas against a simulation event by event."""

from __future__ import annotations

import math

import pytest
from cluster_worlds import LINES, NETWORK, models
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import pipeline_des
from reference.flow_shop import bubble_share, makespan
from remap.errors import InvalidArgument
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.pipeline import Network, equal_stages_s, group_round_s, round_s
from remap_serve.policy.cluster.placement import Instance, Layer, PlannedStage, ServedLayers

# Sixteenths: sums are exact.
SECONDS = st.integers(0, 64).map(lambda n: n / 16)


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[list[float]], list[float]]:
    stages = draw(st.integers(1, 5))
    rows = draw(st.lists(st.lists(SECONDS, min_size=stages, max_size=stages), min_size=1, max_size=7))
    return rows, draw(st.lists(SECONDS, min_size=len(rows), max_size=len(rows)))


@settings(max_examples=examples(300), deadline=None)
@given(queues())
def test_a_queue_takes_as_long_as_its_simulation(queue: tuple[list[list[float]], list[float]]) -> None:
    rows, hops = queue
    machines = pipeline_des.with_links(rows, hops)
    ends = pipeline_des.run(len(rows), len(machines[0]), lambda job, machine: machines[job][machine])
    assert makespan(rows, hops) == max(end for each in ends for end in each)
    whole = makespan(rows, hops)
    idle = 1.0 - sum(map(sum, rows)) / (whole * len(rows[0])) if whole else 0.0
    assert bubble_share(rows, hops) == pytest.approx(idle)
    assert 0.0 <= bubble_share(rows, hops) <= 1.0


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(SECONDS, max_size=8), st.integers(1, 6))
def test_equal_stages_have_a_closed_form(costs: list[float], stages: int) -> None:
    assert equal_stages_s(costs, stages) == makespan([[cost] * stages for cost in costs])


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(SECONDS, min_size=1, max_size=5), SECONDS, st.integers(1, 7))
def test_a_round_is_the_steady_state_of_its_simulation(stage_s: list[float], hop: float, microbatches: int) -> None:
    """Links between stages and from the last back to the first: a job that has passed the last link begins again."""
    machines = [stage_s[0]] if len(stage_s) == 1 else [takes for stage in stage_s for takes in (stage, hop)]
    turns = 40
    ends = pipeline_des.run(microbatches, len(machines), lambda job, machine: machines[machine], turns)
    period = (ends[0][turns - 1] - ends[0][turns // 2 - 1]) / (turns // 2)
    assert round_s(stage_s, hop, microbatches) == pytest.approx(period)


def test_an_empty_queue_takes_nothing() -> None:
    assert makespan([]) == bubble_share([]) == equal_stages_s([], 3) == 0.0
    assert bubble_share([[0.0, 0.0]]) == 0.0


@settings(max_examples=examples(200), deadline=None)
@given(models(), st.integers(0, 12), st.integers(1, 5), st.data())
def test_a_group_takes_the_best_number_of_microbatches(
    model: ServedLayers, requests: int, size: int, data: st.DataObject
) -> None:
    count = len(model.layers)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, count), min_size=size - 1, max_size=size - 1))), count]
    stages = [PlannedStage(Instance(f"i{n}", 0), first, end) for n, (first, end) in enumerate(zip(cuts, cuts[1:]))]
    found = group_round_s(model, stages, requests, NETWORK)
    if not requests:
        assert found == 0.0
        return
    runs = [model.layers[first:end] for first, end in zip(cuts, cuts[1:]) if first < end]
    rounds = []
    for microbatches in range(1, 1 + min(requests, 2 * len(runs) if len(runs) > 1 else 1)):
        tokens = math.ceil(requests / microbatches)
        stage_s = [sum(layer.seconds(tokens) for layer in run) for run in runs]
        rounds.append(round_s(stage_s, NETWORK.hop_s(tokens), microbatches))
    assert found == min(rounds)
    # Alone, all requests are one microbatch.
    assert group_round_s(model, [PlannedStage(Instance("x", 0), 0, count)], requests, NETWORK) == sum(
        layer.seconds(requests) for layer in model.layers
    )


def test_what_a_pipeline_costs() -> None:
    """Two stages instead of one, each with half of the layers: the weights are read as often, and each token hops twice."""
    model = ServedLayers((Layer(1, 1, Line(1.0, 1 / 8)),) * 8)
    network = Network(Line(0.25, 0.0), 1.0)
    instance = Instance("x", 0)
    alone = group_round_s(model, [PlannedStage(instance, 0, 8)], 8, network)
    pair = group_round_s(model, [PlannedStage(instance, 0, 4), PlannedStage(instance, 4, 8)], 16, network)
    assert (alone, pair) == (16.0, 16.5)
    # Unequal stages: the busier one has both microbatches.
    assert group_round_s(model, [PlannedStage(instance, 0, 3), PlannedStage(instance, 3, 8)], 16, network) == 20.0


@settings(max_examples=examples(50), deadline=None)
@given(LINES, st.sampled_from([0.0, -1.0, math.nan, math.inf]), st.sampled_from([-1.0, math.nan, math.inf]))
def test_rates_must_make_sense(hop: Line, rate: float, host: float) -> None:
    for rates in ((rate, 1.0), (1.0, host)):
        with pytest.raises(InvalidArgument) as caught:
            Network(hop, *rates)
        assert (caught.value.bytes_per_s, caught.value.host_bytes_per_s) == pytest.approx(rates, nan_ok=True)
