"""What one block more adds to a decode pass: the running sums against least squares of everything that was measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from remap.policy.cost import BatchTime

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
