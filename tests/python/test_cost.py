"""`remap.policy.cost`: estimates that converge, survive bad clocks, and answer from the nearest batch size."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from remap.errors import InvalidArgument, InvalidState
from remap.memory.timing import PassTimes
from remap.policy.cost import BatchTime, CostModel, Ewma, LayerTimes, Phase, Range


@pytest.mark.parametrize("bad", [-1e-12, math.nan, math.inf, None, "1", True])
def test_ewma_refuses_what_is_no_duration(bad: object) -> None:
    mean = Ewma()
    assert not mean.update(bad)  # type: ignore[arg-type]
    assert mean.value is None
    mean.update(1.0)
    assert not mean.update(bad)  # type: ignore[arg-type]
    assert mean.value == 1.0 and mean.samples == 1


def test_ewma_clips_a_clock_jump_but_follows_a_change() -> None:
    gain = 1 - math.exp(-1 / 16)
    mean = Ewma(16.0)
    mean.seed(1.0)
    assert (mean.value, mean.samples) == (1.0, 0)
    mean.update(3600.0)
    assert mean.value == pytest.approx(1 + gain * 7)
    mean.update(1.0)  # back to normal: the streak is over
    for _ in range(2):
        mean.update(3600.0)
        assert mean.value < 3.0
    mean.update(3600.0)  # the third in a row is believed
    assert mean.value > 100.0
    zero = Ewma()
    zero.seed(0.0)
    assert [(zero.update(1.0), zero.value)[1] > 0 for _ in range(3)] == [False, False, True]
    weights = Ewma(4.0)
    for sample in (2.0, 3.0, 3.0, 3.0, 3.0):
        weights.update(sample)
    assert weights.value == pytest.approx(3.0 - math.exp(-1.0))  # one time constant: the old value's weight is 1/e


def test_layer_times_is_checked_and_frozen() -> None:
    times = LayerTimes((1, 2.0), (3.0, 4.0))
    assert times.compute_s == (1.0, 2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        times.compute_s = (1.0,)  # type: ignore[misc]
    for compute, transfer in (((1.0,), (1.0, 2.0)), ((), ()), ((-1.0,), (1.0,)), ((1.0,), (math.nan,))):
        with pytest.raises(InvalidArgument):
            LayerTimes(compute, transfer)


def test_estimate_from_passes() -> None:
    model = CostModel([100, 200, 100])
    model.observe_pass("decode", 16, 6.0, copy_s=0.5, bytes_copied=1000)
    assert model.estimate("decode", 16) == LayerTimes((2.0,) * 3, (0.05, 0.1, 0.05))  # shared out equally
    assert model.estimate("decode", 9).compute_s == (2.0,) * 3  # the same bucket
    model.observe_pass("decode", 16, 12.0)
    gain = 1 - math.exp(-1 / 16)
    assert model.estimate("decode", 16).compute_s == pytest.approx((2 + 2 * gain,) * 3)
    assert model.passes == {("decode", 16): 2}


def test_nearest_bucket() -> None:
    model = CostModel([1])
    model.calibrate(1.0)
    model.observe_pass("decode", 4, 4.0)
    assert model.estimate("prefill", 4096).compute_s == (4.0,)  # there is no other
    model.observe_pass("decode", 64, 64.0)
    model.observe_pass("prefill", 256, 256.0)
    found = [model.estimate("decode", tokens).compute_s for tokens in (1, 16, 32, 256)]
    assert found == [(4.0,), (4.0,), (64.0,), (64.0,)]  # 16 is a tie: the smaller bucket hides less
    assert model.estimate("prefill", 4).compute_s == (256.0,)  # its own phase first


def test_no_data_is_an_error_not_a_guess() -> None:
    model = CostModel([1])
    with pytest.raises(InvalidState, match="computation") as caught:
        model.estimate("decode", 3)
    assert caught.value.tokens == 3
    model.observe_pass("decode", 3, 1.0, copy_s=9.0, bytes_copied=0)  # no copies say nothing about the link
    with pytest.raises(InvalidState, match="bandwidth"):
        model.estimate("decode", 3)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_clocks_change_nothing(bad: float) -> None:
    model = CostModel([10, 10])
    model.observe_pass("decode", 1, 2.0, 1.0, 10)
    before = model.estimate("decode", 1)
    model.observe_pass("decode", 1, bad)
    model.observe_pass("decode", 1, 2.0, bad, 10)
    model.observe_pass("decode", 1, 2.0, 0.0, 10)
    assert model.estimate("decode", 1) == before
    model.observe_pass("decode", 128, bad)  # no half-made bucket either
    assert model.passes == {("decode", 1): 3}


def test_calibration_replaces_the_estimate_of_the_link() -> None:
    model = CostModel([10, 10])
    assert model.undisturbed_seconds_per_byte is None
    model.observe_pass("decode", 1, 4.0, 1.0, 1)
    model.calibrate(5.0)
    assert model.estimate("decode", 1) == LayerTimes((2.0, 2.0), (2.0, 2.0))
    for bad in (0.0, -1.0, math.nan, math.inf, True, None):
        with pytest.raises(InvalidArgument) as caught:
            model.calibrate(bad)  # type: ignore[arg-type]
        assert caught.value.fields == {"bytes_per_s": bad} or bad != bad
    assert model.seconds_per_byte == 0.2
    for _ in range(50):
        model.observe_pass("decode", 1, 1.0, copy_s=6.0, bytes_copied=10)
    assert model.seconds_per_byte == pytest.approx(0.6, rel=0.1) and model.undisturbed_seconds_per_byte == 0.2


def test_a_pass_alone_is_bounded_by_the_slowest_and_the_quickest_seen() -> None:
    model = CostModel([10])
    model.calibrate(1.0)
    for seconds in (6.0, 6.0, 6.0):
        model.observe_pass("decode", 8, seconds)
    assert model.alone("decode", 8, 3) == pytest.approx(1 / 3)  # they may all have been beside two others
    assert model.alone("decode", 8, 1) == 1.0
    for _ in range(400):
        model.observe_pass("decode", 8, 2.5)
    assert model.estimate("decode", 8).compute_s[0] == pytest.approx(2.5)
    assert model.alone("decode", 8, 3) == pytest.approx(2.0 / 2.5)  # the slowest, a third of it
    assert model.alone("decode", 8, 2) == pytest.approx(1.0)  # the quickest: no pass alone took longer


def test_one_hiccup_is_no_extreme() -> None:
    found = Range()
    for sample in (5.0, 1.0, 5.0, 9.0, 5.0, 5.0, 1.0):
        found.update(sample)
    assert (found.least, found.most) == (5.0, 5.0)


def test_until_a_decode_pass_comes_the_shortest_prefill_stands_in() -> None:
    """A long one hides copies that no decode pass hides: a layer that leaves then makes every decode pass wait."""
    times = PassTimes([1000, 1000])
    times.calibrate_link(1e6)
    stats = SimpleNamespace(timed_bytes=0, copies=0, copy_s=0.0)

    def passes(phase: Phase, tokens: int, seconds: float) -> float:
        number[0] += 1
        times.completed(number[0], phase, tokens)
        times.take(stats, number[0], seconds, 0.0)  # type: ignore[arg-type]
        found = times.decode()
        assert found is not None
        return sum(found.compute_s)

    number = [0]
    assert passes("prefill", 4096, 1.0) == pytest.approx(1.0)
    assert passes("prefill", 8, 0.01) == pytest.approx(0.01)
    assert passes("prefill", 4096, 1.0) == pytest.approx(0.01) and times.early
    assert passes("decode", 64, 0.02) == pytest.approx(0.02) and not times.early
    assert passes("prefill", 4, 0.005) == pytest.approx(0.02) and not times.early
    times.compute_only(range(1))
    assert [passes("prefill", 8, 0.01) and times.early for _ in range(64)] == [True] * 63 + [False]  # it never decodes


# -- what one block more adds to a decode pass: running sums against least squares of all that was measured ------------

FADES, SPREAD = 0.98, 0.02
MEASURED = st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 1)), min_size=1, max_size=60)


def slopes(measured: list[tuple[int, float]]) -> list[float]:
    """The slope after each measurement: what the last spread wide enough said."""
    found, slope = [], 0.0
    for count in range(1, len(measured) + 1):
        weights = [FADES ** (count - 1 - i) for i in range(count)]
        total = math.fsum(weights)
        blocks = math.fsum(w * b for w, (b, _) in zip(weights, measured)) / total
        seconds = math.fsum(w * s for w, (_, s) in zip(weights, measured)) / total
        squares = math.fsum(w * (b - blocks) ** 2 for w, (b, _) in zip(weights, measured))
        products = math.fsum(w * (b - blocks) * (s - seconds) for w, (b, s) in zip(weights, measured))
        least = total * (1.0 + SPREAD * blocks) ** 2
        assume(abs(squares - least) > 1e-6 * least)  # else rounding decides
        if squares > least:
            slope = max(0.0, products / squares)
        found.append(slope)
    return found


@given(MEASURED)
def test_the_slope_is_that_of_least_squares(measured: list[tuple[int, float]]) -> None:
    expected = slopes(measured)
    line, found = BatchTime(), []
    for blocks, seconds in measured:
        line.observe(blocks, seconds)
        found.append(line.slope)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_how_many_blocks_fit_within_a_time() -> None:
    line = BatchTime()
    assert line.blocks_within(1.0) == math.inf
    for blocks in range(100, 200, 5):
        line.observe(blocks, 0.01 + 1e-4 * blocks)
    assert line.blocks_within(0.03) == pytest.approx(200)
    assert line.blocks_within(0.02) == pytest.approx(100)
