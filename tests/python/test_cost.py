"""`remap.policy.cost`: estimates that converge, survive bad clocks, and answer from the nearest batch size."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remap.errors import InvalidArgument, InvalidState
from remap.policy.cost import CostModel, Ewma, LayerTimes, bucket_of
from remap.policy.schedule import max_remapped


def test_ewma_weights() -> None:
    mean = Ewma(4.0)
    assert mean.value is None
    assert mean.update(2.0) and mean.value == 2.0
    mean.update(3.0)
    assert mean.value == pytest.approx(3.0 - math.exp(-1 / 4))
    for _ in range(3):
        mean.update(3.0)
    assert mean.value == pytest.approx(3.0 - math.exp(-1.0))  # one time constant: the old value's weight is 1/e
    assert mean.samples == 5


@pytest.mark.parametrize("bad", [-1.0, -1e-12, math.nan, math.inf, -math.inf, None, "1", True])
def test_ewma_refuses_what_is_no_duration(bad: object) -> None:
    mean = Ewma()
    assert not mean.update(bad)  # type: ignore[arg-type]
    assert mean.value is None and mean.rejected == 1
    mean.update(1.0)
    assert not mean.update(bad)  # type: ignore[arg-type]
    assert mean.value == 1.0 and mean.samples == 1 and mean.rejected == 2


def test_ewma_clips_a_clock_jump_but_follows_a_change() -> None:
    gain = 1 - math.exp(-1 / 16)
    mean = Ewma(16.0, value=1.0)
    mean.update(3600.0)
    assert mean.value == pytest.approx(1 + gain * 7)
    mean.update(1.0)  # back to normal: the streak is over
    for _ in range(2):
        mean.update(3600.0)
        assert mean.value < 3.0
    mean.update(3600.0)  # the third in a row is believed
    assert mean.value > 100.0


def test_ewma_leaves_zero() -> None:
    mean = Ewma(value=0.0)
    for _ in range(2):
        mean.update(1.0)
        assert mean.value == 0.0
    mean.update(1.0)
    assert mean.value > 0.0


def test_ewma_seed_and_arguments() -> None:
    mean = Ewma(value=5.0)
    assert mean.value == 5.0 and mean.samples == 0
    for bad in (-1.0, math.nan):
        with pytest.raises(InvalidArgument):
            mean.seed(bad)
    assert mean.value == 5.0
    for bad in (0.0, -2.0, math.inf):
        with pytest.raises(InvalidArgument) as caught:
            Ewma(bad)
        assert caught.value.time_constant == bad


@given(st.lists(st.floats(0.5, 3.0), min_size=1, max_size=50), st.floats(0.5, 100.0))
def test_ewma_stays_within_its_samples(samples: list[float], constant: float) -> None:
    mean = Ewma(constant)
    for sample in samples:
        mean.update(sample)
    assert mean.value is not None
    assert min(samples) * (1 - 1e-12) <= mean.value <= max(samples) * (1 + 1e-12)


def test_bucket_of() -> None:
    assert [bucket_of(tokens) for tokens in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
    for bad in (0, -1, 1.5, True):
        with pytest.raises(InvalidArgument):
            bucket_of(bad)  # type: ignore[arg-type]


def test_layer_times_is_checked_and_frozen() -> None:
    times = LayerTimes((1, 2.0), (3.0, 4.0))
    assert times.layers == 2 and times.compute_s == (1.0, 2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        times.compute_s = (1.0,)  # type: ignore[misc]
    for compute, transfer in (((1.0,), (1.0, 2.0)), ((), ()), ((-1.0,), (1.0,)), ((1.0,), (math.nan,))):
        with pytest.raises(InvalidArgument):
            LayerTimes(compute, transfer)


def test_estimate_from_passes() -> None:
    model = CostModel([100, 200, 100])
    assert model.observe_pass("decode", 16, [1.0, 2.0, 3.0], copies=2, copy_s=0.5, bytes_copied=1000)
    assert model.estimate("decode", 16) == LayerTimes((1.0, 2.0, 3.0), (0.05, 0.1, 0.05))
    assert model.estimate("decode", 9).compute_s == (1.0, 2.0, 3.0)  # the same bucket
    model.observe_pass("decode", 16, 12.0)  # a total is shared out as before: 2, 4, 6
    gain = 1 - math.exp(-1 / 16)
    assert model.estimate("decode", 16).compute_s == pytest.approx((1 + gain, 2 + 2 * gain, 3 + 3 * gain))


def test_a_first_total_is_shared_equally() -> None:
    model = CostModel([1] * 4)
    model.calibrate(bytes_per_s=2.0)
    model.observe_pass("prefill", 512, 2.0)
    assert model.estimate("prefill", 512) == LayerTimes((0.5,) * 4, (0.5,) * 4)


def test_nearest_bucket() -> None:
    model = CostModel([1])
    model.calibrate("decode", 4, 4.0, bytes_per_s=1.0)
    model.calibrate("decode", 64, 64.0)
    model.calibrate("prefill", 256, 256.0)
    assert model.estimate("decode", 1).compute_s == (4.0,)
    assert model.estimate("decode", 8).compute_s == (4.0,)
    assert model.estimate("decode", 16).compute_s == (4.0,)  # a tie: the smaller bucket hides less
    assert model.estimate("decode", 32).compute_s == (64.0,)
    assert model.estimate("decode", 256).compute_s == (64.0,)  # its own phase first
    assert model.estimate("prefill", 4).compute_s == (256.0,)
    only_decode = CostModel([1])
    only_decode.calibrate("decode", 4, 4.0, bytes_per_s=1.0)
    assert only_decode.estimate("prefill", 4096).compute_s == (4.0,)


def test_no_data_is_an_error_not_a_guess() -> None:
    model = CostModel([1])
    with pytest.raises(InvalidState, match="computation") as caught:
        model.estimate("decode", 3)
    assert caught.value.tokens == 3
    model.observe_pass("decode", 3, 1.0)
    with pytest.raises(InvalidState, match="bandwidth"):
        model.estimate("decode", 3)
    model.observe_pass("decode", 3, 1.0, copies=0, copy_s=9.0, bytes_copied=0)  # no copies say nothing about the link
    with pytest.raises(InvalidState, match="bandwidth"):
        model.estimate("decode", 3)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_clocks_change_nothing(bad: float) -> None:
    model = CostModel([10, 10])
    model.observe_pass("decode", 1, [1.0, 1.0], 1, 1.0, 10)
    before = model.estimate("decode", 1)
    assert not model.observe_pass("decode", 1, bad)
    assert not model.observe_pass("decode", 1, [5.0, bad])
    assert model.estimate("decode", 1) == before
    assert not model.observe_pass("decode", 1, [1.0, 1.0], 1, bad, 10)
    assert not model.observe_pass("decode", 1, [1.0, 1.0], 1, 0.0, 10)
    assert model.estimate("decode", 1) == before
    assert model.snapshot().rejected == 4
    assert not model.observe_pass("decode", 128, bad)  # no half-made bucket either
    assert ("decode", 128) not in model.snapshot().buckets


def test_snapshot_is_frozen() -> None:
    model = CostModel([10, 20])
    assert model.snapshot().bytes_per_s is None
    model.observe_pass("decode", 1, [1.0, 2.0], 3, 2.0, 40)
    seen = model.snapshot()
    assert seen.bytes_per_s == pytest.approx(20.0)
    assert (seen.copies, seen.bytes_copied, seen.layer_bytes) == (3, 40, (10, 20))
    assert seen.buckets["decode", 1].compute_s == (1.0, 2.0) and seen.buckets["decode", 1].passes == 1
    model.observe_pass("decode", 1, [9.0, 9.0])
    model.observe_pass("prefill", 64, 9.0)
    assert seen.buckets["decode", 1].compute_s == (1.0, 2.0) and len(seen.buckets) == 1
    with pytest.raises(TypeError):
        seen.buckets["decode", 1] = seen.buckets["decode", 1]  # type: ignore[index]


def test_calibration_replaces_estimates() -> None:
    model = CostModel([10, 10])
    model.observe_pass("decode", 1, 100.0, 1, 1.0, 1)
    model.calibrate("decode", 1, [1.0, 3.0], bytes_per_s=5.0)
    assert model.estimate("decode", 1) == LayerTimes((1.0, 3.0), (2.0, 2.0))
    assert model.snapshot().buckets["decode", 1].passes == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"phase": "decode"},
        {"phase": "decode", "tokens": 4, "bytes_per_s": 1.0},
        {"phase": "train", "tokens": 4, "compute_s": 1.0},
        {"phase": "decode", "tokens": 0, "compute_s": 1.0},
        {"phase": "decode", "tokens": 4, "compute_s": -1.0},
        {"phase": "decode", "tokens": 4, "compute_s": [1.0, 2.0]},
        {"phase": "decode", "tokens": 4, "compute_s": 1.0, "bytes_per_s": 0.0},
        {"bytes_per_s": math.nan},
    ],
)
def test_calibrate_refuses_and_changes_nothing(arguments: dict[str, object]) -> None:
    model = CostModel([1])
    model.calibrate("decode", 4, 7.0, bytes_per_s=3.0)
    before = model.snapshot()
    with pytest.raises(InvalidArgument):
        model.calibrate(**arguments)  # type: ignore[arg-type]
    assert model.snapshot() == before


def test_observe_and_construction_refuse_bad_shapes() -> None:
    model = CostModel([1, 1])
    for call in (
        lambda: model.observe_pass("decode", 1, [1.0]),
        lambda: model.observe_pass("warm", 1, 1.0),  # type: ignore[arg-type]
        lambda: model.observe_pass("decode", 1, 1.0, copies=-1),
        lambda: model.observe_pass("decode", 1, 1.0, bytes_copied=-1),
        lambda: CostModel([]),
        lambda: CostModel([-1]),
        lambda: CostModel([1.5]),  # type: ignore[list-item]
        lambda: CostModel([1], time_constant=0.0),
    ):
        with pytest.raises(InvalidArgument):
            call()
    assert not model.snapshot().buckets


def test_an_estimate_feeds_the_schedule() -> None:
    model = CostModel([1_000_000] * 40)
    model.calibrate("decode", 8, 0.040, bytes_per_s=1_000_000 / 0.004)  # r = 4
    times = model.estimate("decode", 8)
    assert max_remapped(times.compute_s, times.transfer_s) == (8, 2)


# -- whole passes and single layers ------------------------------------------------------------------------------------

# No seconds between 0 and a picosecond: nothing takes them, and shares of subnormal numbers are rounded to anything.
seconds_of = st.just(0.0) | st.floats(1e-12, 10.0)
observations = st.lists(
    st.one_of(
        seconds_of,
        st.lists(seconds_of, min_size=3, max_size=3),
    ),
    min_size=1,
    max_size=30,
)


@given(observations)
def test_whole_passes_and_layers_teach_what_one_average_a_layer_would_learn(passes: list[float | list[float]]) -> None:
    """The slow way: an average for each layer, always; a whole pass is shared out as the layers have shared passes so far."""
    model = CostModel([1, 1, 1], time_constant=4.0)
    slow = [Ewma(4.0) for _ in range(3)]
    for seconds in passes:
        model.observe_pass("decode", 1, seconds)
        if isinstance(seconds, float):
            values = [layer.value or 0.0 for layer in slow]
            whole = math.fsum(values)
            seconds = [seconds * value / whole if whole > 0.0 else seconds / 3 for value in values]
        for layer, value in zip(slow, seconds, strict=True):
            layer.update(value)
    learnt = model.snapshot().buckets["decode", 1]
    assert learnt.passes == len(passes)
    assert learnt.compute_s == pytest.approx([layer.value for layer in slow], rel=1e-9, abs=1e-12)
