"""Claims 1 and 2 of policy/rental.py: arbitrary sequences, an offline optimum by brute force. Claim 3: test_controller.py."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.policy.rental import HeadroomGuard, Rental, income

Step = tuple[int, bool]  # income in sixteenths of a reload, whether the surplus condition holds

STEPS = st.lists(st.tuples(st.integers(0, 24), st.sampled_from([True, True, True, False])), max_size=60)
SHORT = st.lists(st.tuples(st.integers(0, 24), st.sampled_from([True, True, True, False])), max_size=9)


def offline_optimum(steps: list[Step]) -> Fraction:
    """The least cost of one layer, over every choice of steps to be resident in. Nothing clever: 2 ** len(steps) plans."""
    best = None
    for resident in itertools.product([False, True], repeat=len(steps)):
        if any(here and not holds for here, (_, holds) in zip(resident, steps)):
            continue
        cost, before = Fraction(0), False
        for here, (rent, holds) in zip(resident, steps):
            if here and not before:
                cost += 1
            if not here and holds:
                cost += Fraction(rent, 16)
            before = here
        best = cost if best is None else min(best, cost)
    assert best is not None
    return best


def online_cost(steps: list[Step], dwell: int) -> Fraction:
    """What one layer pays under Rental: after a reload it is resident until the condition fails."""
    rental, cost, resident = Rental(dwell), Fraction(0), False
    for rent, holds in steps:
        resident = resident and holds
        if resident:
            continue
        if rental.accrue(rent / 16, holds):
            cost, resident = cost + 1, True
        elif holds:
            cost += Fraction(rent, 16)
    return cost


@settings(max_examples=examples(300), deadline=None)
@given(STEPS, st.integers(1, 6))
def test_reloads_are_few(steps: list[Step], dwell: int) -> None:
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
    assert [rental.accrue(2.0, True) for _ in range(9)] == [False, False, False, True] * 2 + [False]
    assert (rental.credit, rental.steps) == (2.0, 1)
    rental.forfeit()
    assert (rental.credit, rental.steps) == (0.0, 0)
    assert [rental.accrue(0.25, i != 3) for i in range(9)] == [False] * 7 + [True, False]


@settings(max_examples=examples(300), deadline=None)
@given(SHORT, st.integers(1, 5))
def test_cost_is_within_the_claimed_factor_of_the_optimum(steps: list[Step], dwell: int) -> None:
    most = Fraction(max((rent for rent, holds in steps if holds), default=0), 16)
    factor = max(Fraction(2), 1 + (dwell - 1) * most)
    paid, best = online_cost(steps, dwell), offline_optimum(steps)
    assert best <= paid <= factor * best


def test_the_factors_are_reached() -> None:
    rented: list[Step] = [(2, True)] * 8
    assert (online_cost(rented, 1), offline_optimum(rented)) == (Fraction(15, 8), 1)  # the classical 2 - 1 / B
    dear: list[Step] = [(16, True)] * 4
    assert (online_cost(dear, 4), offline_optimum(dear)) == (4, 1)  # 1 + (D - 1) G: what a dwell costs


def test_the_guard_step_by_step() -> None:
    guard = HeadroomGuard()
    assert guard.clip(10**9, 7) == 7
    guard.arm(level=20, headroom=5)
    assert [guard.clip(20, 9), guard.clip(0, 3), guard.clip(20, 5)] == [5, 3, 5]
    assert guard.clip(21, 9) == 9
    assert guard.clip(1, 9) == 9  # it does not come back when demand falls again
    guard.arm(20, 5)
    guard.arm(8.5, 2)
    assert (guard.clip(8, 9), guard.clip(9, 9)) == (2, 9)
    guard.arm(20, 5)
    guard.clear()
    assert guard.clip(0, 9) == 9


def test_income_is_the_share_of_a_reload() -> None:
    assert income(0.0, 0.1, 4e-3, 0.0) == pytest.approx(0.1)
    assert income(8e-3, 0.1, 8e-3, 1e-3) == pytest.approx(8.8 / 9)
    assert income(-5.0, 0.5, 1.0, 1.0) == 0.25
    assert income(0.0, 0.0, 1.0, 0.0) == 0.0
    assert income(0.0, 0.0, 0.0, 0.0) == 1.0  # moving back is free
