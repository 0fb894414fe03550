"""The low watermark against its definition, written out slowly; the horizon by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remap.policy.watermark import LONGEST_HORIZON, Watermark, horizon


def slow_blocks(values: list[int], window: int, quantile: float, steps: int, variation: float) -> int:
    """The definition: no deque, nothing kept; the rank in exact arithmetic of the decimal that was written."""
    starts = range(max(0, len(values) - steps - window), len(values) - steps)
    rises = sorted(max(0, max(values[t + 1 : t + 1 + steps]) - values[t]) for t in starts)
    if len(rises) < 8:
        return int(2 * variation + 0.5)
    return rises[math.ceil(Fraction(str(quantile)) * len(rises)) - 1]


VALUES = st.lists(st.one_of(st.integers(0, 6), st.integers(0, 300)), max_size=120)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(VALUES, st.integers(1, LONGEST_HORIZON)), min_size=1, max_size=4),
    st.integers(8, 40),
    st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
    st.sampled_from([0.125, 0.5]),
)
@example([([0, 10, 0, 10, 0, 10, 0, 10, 0], 1)], 8, 0.99, 0.5)  # what is known is enough at the ninth value
@example([([k * k for k in range(101)], 1)], 100, 0.07, 0.5)  # 0.07 * 100 is 7.000000000000001 in binary fractions
def test_blocks_are_the_quantile_of_the_rises(stages, window, quantile, smoothing) -> None:
    made, values, variation = Watermark(window, quantile, smoothing), [], 0.0
    assert (made.blocks(1), made.variation) == (0, 0.0)
    for more, steps in stages:  # a horizon in each stage, asked for at its first step and then at every step
        for value in more:
            if values:
                variation += smoothing * (abs(value - values[-1]) - variation)
            values.append(value)
            made.observe(value)
            assert made.blocks(steps) == slow_blocks(values, window, quantile, steps, variation)
    assert made.variation == variation


@pytest.mark.parametrize(
    ("control_s", "map_s", "step_s", "steps"),
    [
        (0.0, 0.0, 0.0, 1),
        (0.0, 1e-9, 0.0, 32),
        (30.0, 0.0, 1.0, 31),
        (1e300, 1e300, 1e-300, 32),
        (1e-9, 0.0, 1e6, 2),
        (28.0, 2.0, 2.0, 16),
        (31.5, 0.0, 1.0, 32),
        (1.0, 0.5, 1e-3, 32),
    ],
)
def test_horizon(control_s: float, map_s: float, step_s: float, steps: int) -> None:
    assert horizon(control_s, map_s, step_s) == steps


@pytest.mark.parametrize("steps", [1, 5, LONGEST_HORIZON])
def test_a_full_default_window(steps: int) -> None:
    values = [(i * i * 7919) % 211 for i in range(400)]
    made = Watermark()
    for i, value in enumerate(values):
        made.observe(value)
        if i >= 300:
            assert made.blocks(steps) == slow_blocks(values[: i + 1], 128, 0.99, steps, 0.0)
    rises = sorted(max(values[t + 1 : t + 1 + steps]) - values[t] for t in range(272 - steps, 400 - steps))
    assert made.blocks(steps) == max(0, rises[126])  # 0.99 * 128 = 126.7: the second largest of 128
