"""Claim 1 of policy/rental.py, which claim 2 follows from, for arbitrary sequences. Claim 3: test_controller.py."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.policy.rental import HeadroomGuard, Rental, income

# Income in sixteenths of a reload, whether the surplus condition holds.
STEPS = st.lists(st.tuples(st.integers(0, 24), st.sampled_from([True, True, True, False])), max_size=60)


@settings(max_examples=examples(300), deadline=None)
@given(STEPS, st.integers(1, 6))
def test_reloads_are_few(steps: list[tuple[int, bool]], dwell: int) -> None:
    rental, reloads, since = Rental(dwell), [], -1
    most = max((rent for rent, _ in steps), default=0)
    spacing = max(dwell, math.ceil(Fraction(16, most))) if most else math.inf
    for i, (rent, holds) in enumerate(steps):
        if rental.accrue(rent / 16, holds):
            assert i - since >= spacing  # since the last reload, or the last step without surplus
            assert sum(r for r, _ in steps[since + 1 : i + 1]) >= 16
            assert rental.credit == rental.steps == 0
            reloads.append(i)
            since = i
        elif not holds:
            assert rental.credit == rental.steps == 0
            since = i
        else:
            assert rental.steps == i - since
            assert rental.credit == sum(r for r, _ in steps[since + 1 : i + 1]) / 16
            assert rental.credit < 1 or rental.steps < dwell  # no reload is put off for another reason
    assert len(reloads) <= len(steps) / spacing


def test_dwell_and_forfeit() -> None:
    for tenths in (1, 3, 7, 10):
        rental = Rental(dwell=1)
        assert next(i for i in range(1, 20) if rental.accrue(tenths / 10, True)) == math.ceil(Fraction(10, tenths))
    rental = Rental()
    assert [rental.accrue(2.0, True) for _ in range(5)] == [False, False, False, True, False]
    rental.forfeit()
    assert (rental.credit, rental.steps) == (0.0, 0)


def test_the_guard_step_by_step() -> None:
    guard = HeadroomGuard()
    assert guard.clip(10**9, 7) == 7
    guard.arm(level=20, headroom=5)
    assert [guard.clip(20, 9), guard.clip(0, 3)] == [5, 3]
    assert guard.clip(21, 9) == guard.clip(1, 9) == 9  # it does not come back when demand falls again
    guard.arm(20, 5)
    guard.clear()
    assert guard.clip(0, 9) == 9


def test_income_is_the_share_of_a_reload() -> None:
    assert income(8e-3, 0.1, 8e-3, 1e-3) == pytest.approx(8.8 / 9)
    assert income(-5.0, 0.5, 1.0, 1.0) == 0.25
    assert income(0.0, 0.0, 0.0, 0.0) == 1.0  # moving back is free
