"""The certificate of a pass layer by layer over mini-batches: against an event simulation, the exact period of weights alone,
and what no schedule can beat."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench.lab.hybridserve.layerwise import Part, busiest, pass_ends, pass_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap.policy import schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
import layerwise_des as des

RELAXED = settings(deadline=None)
TIMES = st.one_of(st.just(0), st.integers(1, 9))
Case = tuple[list[int], list[list[des.Step]], int, int]


@st.composite
def cases(draw: st.DrawFn, uniform: bool = False) -> Case:
    layers, batches = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    step = st.builds(des.Step, TIMES, TIMES, TIMES, st.integers(1, 9), TIMES)
    if uniform:
        row = draw(st.lists(step, min_size=batches, max_size=batches))
        steps, weights = [row] * layers, [batches * draw(TIMES)] * layers
    else:
        row = st.lists(step, min_size=batches, max_size=batches)
        steps = draw(st.lists(row, min_size=layers, max_size=layers))
        weights = [batches * each for each in draw(st.lists(TIMES, min_size=layers, max_size=layers))]
    return weights, steps, draw(st.integers(1, 4)), draw(st.integers(1, 3))


def parts_of(steps: list[list[des.Step]]) -> list[list[Part]]:
    return [[Part(*step) for step in row] for row in steps]


@RELAXED
@given(cases())
def test_every_pass_ends_when_it_does_event_by_event(case: Case) -> None:
    weights, steps, ring, buffers = case
    ours = itertools.islice(pass_ends(weights, parts_of(steps), ring, buffers), 9)
    assert list(ours) == pytest.approx(des.ends(weights, steps, ring, buffers, 9), abs=1e-9)


@RELAXED
@given(cases())
def test_it_is_what_a_pass_takes_in_the_long_run(case: Case) -> None:
    weights, steps, ring, buffers = case
    found = pass_seconds(weights, parts_of(steps), ring, buffers)
    ends = list(itertools.islice(pass_ends(weights, parts_of(steps), ring, buffers), 180))
    # Times repeat after some passes, few enough that 60 is a multiple of their number.
    assert found == pytest.approx((ends[-1] - ends[-61]) / 60)


@RELAXED
@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(
            *[st.lists(st.floats(0.1, 8.0), min_size=n, max_size=n)] * 2, st.sets(st.integers(0, n - 1))
        )
    ),
    st.integers(1, 4),
)
def test_one_mini_batch_and_weights_alone_have_the_exact_period(
    case: tuple[list[float], list[float], set[int]], ring: int
) -> None:
    compute, copies, streamed = case
    weights = [seconds if layer in streamed else 0.0 for layer, seconds in enumerate(copies)]
    found = pass_seconds(weights, [[Part(0.0, 0.0, 0.0, seconds)] for seconds in compute], ring)
    assert found == pytest.approx(schedule.period(compute, copies, streamed, ring))


def test_a_step_that_stores_nothing_frees_no_buffer() -> None:
    """Every second step stores, for four seconds, through one buffer: the one after the next computes when that is over."""
    steps = [[des.Step(0, 0, 0, 1, 0), des.Step(0, 0, 0, 1, 4)]]
    assert pass_seconds([0], parts_of(steps), 1, 1) == 5 > busiest([0], parts_of(steps), 1)
    assert (
        des.ends([0], steps, 1, 1, 4)
        == list(itertools.islice(pass_ends([0], parts_of(steps), 1, 1), 4))
        == [2, 7, 12, 17]
    )


@RELAXED
@given(cases(), st.data())
def test_no_schedule_is_quicker_and_whatever_takes_longer_makes_no_pass_shorter(
    case: Case, data: st.DataObject
) -> None:
    weights, steps, ring, buffers = case
    parts = parts_of(steps)
    found = pass_seconds(weights, parts, ring, buffers)
    assert found >= busiest(weights, parts, ring) - 1e-9
    everything = sum(weights) + sum(sum(step) for row in steps for step in row)
    assert found <= everything + 1e-9
    layer = data.draw(st.integers(0, len(parts) - 1))
    at = data.draw(st.integers(0, len(parts[0]) - 1))
    name = data.draw(st.sampled_from(["activations_s", "kv_s", "recompute_s", "forward_s", "store_s"]))
    before = getattr(parts[layer][at], name)
    if before:  # a copy of nothing is none, and takes no place in the order
        slower = [list(row) for row in parts]
        slower[layer][at] = replace(parts[layer][at], **{name: before + data.draw(st.integers(1, 9))})
        assert pass_seconds(weights, slower, ring, buffers) >= found - 1e-9


@RELAXED
@given(cases(uniform=True))
def test_more_buffers_of_blocks_make_no_pass_of_equal_mini_batches_longer(case: Case) -> None:
    weights, steps, ring, _ = case
    parts = [[parts_of(steps)[0][0]] * len(steps[0])] * len(steps)
    once = pass_seconds(weights, parts, ring, 2)
    assert pass_seconds(weights, parts, ring, 1) >= once - 1e-9


def test_where_one_of_link_and_processor_is_always_busy_a_pass_takes_no_longer_than_that() -> None:
    link = [[Part(1.0, 3.0, 0.5, 0.5, 0.2)] * 8] * 40
    assert pass_seconds([8.0] * 40, link) == pytest.approx(busiest([8.0] * 40, link)) == 40 * (8 + 8 * 4)
    computing = [[Part(0.5, 0.5, 4.0, 2.0, 0.2)] * 8] * 40
    assert pass_seconds([8.0] * 40, computing) == pytest.approx(busiest([8.0] * 40, computing)) == 40 * 8 * 6


def test_a_whole_layers_weights_do_not_hold_a_mini_batchs_blocks_up() -> None:
    """Weights of 8 in one piece would leave the processor waiting in each layer: it has but two mini-batches' blocks."""
    parts = [[Part(0.0, 0.5, 0.0, 2.0)] * 8] * 12
    assert pass_seconds([8.0] * 12, parts) == pytest.approx(12 * 8 * 2.0)


def test_weights_that_stay_are_not_copied() -> None:
    parts = [[Part(0.0, 0.0, 0.0, 1.0)]] * 4
    assert pass_seconds([0.0] * 4, parts) == 4.0
    assert pass_seconds([9.0] * 4, parts, ring=4) == 4.0  # each has a buffer for itself
    assert pass_seconds([9.0] * 4, parts, ring=1) == 40.0


@pytest.mark.parametrize(
    ("weights", "parts", "ring", "buffers"),
    [
        ([], [], 2, 2),
        ([1.0], [[]], 2, 2),
        ([1.0, 1.0], [[Part(0, 0, 0, 1)], [Part(0, 0, 0, 1)] * 2], 2, 2),
        ([1.0], [[Part(0, 0, 0, 1)]] * 2, 2, 2),
        ([1.0], [[Part(0, 0, 0, 1)]], 0, 2),
        ([1.0], [[Part(0, 0, 0, 1)]], 2, 0),
        ([-1.0], [[Part(0, 0, 0, 1)]], 2, 2),
        ([1.0], [[Part(0, math.nan, 0, 1)]], 2, 2),
        ([1.0], [[Part(0, 0, math.inf, 1)]], 2, 2),
    ],
)
def test_what_is_no_pass_is_refused(weights: list[float], parts: list[list[Part]], ring: int, buffers: int) -> None:
    for function in (pass_seconds, lambda *given: next(pass_ends(*given))):
        with pytest.raises(InvalidArgument) as raised:
            function(weights, parts, ring, buffers)
        assert raised.value.weights_s == weights
