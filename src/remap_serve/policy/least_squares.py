# SPDX-License-Identifier: Apache-2.0
"""Small least-squares problems, by scipy, which is loaded when one is solved; InvalidState (extra, package) without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

from remap.errors import InvalidState
from remap.extras import install

__all__ = ["line", "minimise", "shares"]

Residuals = Callable[[Sequence[float]], list[float]]


def _optimise() -> ModuleType:
    """The module scipy.optimize."""
    try:
        return import_module("scipy.optimize")
    except ImportError as error:
        raise InvalidState(
            f"fitting needs scipy, of the extras `sim` and `cluster`: {install('sim')}; nothing was fitted",
            extra="sim",
            package="scipy",
        ) from error


def shares(rows: Sequence[Sequence[float]], totals: Sequence[float]) -> list[float]:
    """The factors, none below 0, with which each row's products add up to its total best, by the sum of squared *relative*
    errors. Every total must be above 0; a column of zeros has the factor 0."""
    # In units of each column's largest entry and of the largest total: squares of small and large would leave a float's range.
    wide = [max(map(abs, column)) or 1.0 for column in zip(*rows)]
    high = max(totals)
    scaled = [[(x / most) / (y / high) for x, most in zip(row, wide)] for row, y in zip(rows, totals)]
    found = _optimise().nnls(scaled, [1.0] * len(rows))[0]
    return [float(factor) * high / most for factor, most in zip(found, wide)]


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b), neither below 0, for which a + b x meets the points (x, y) best by the sum of squared *relative* errors.

    With one point, or all at the same x, a is 0. Every y must be above 0, and some x.
    """
    columns = 2 if len({x for x, _ in points}) > 1 else 1
    b, a = (*shares([(x, 1.0)[:columns] for x, _ in points], [y for _, y in points]), 0.0)[:2]
    return a, b


def minimise(
    residuals: Residuals, starts: Sequence[Sequence[float]], bounds: Sequence[tuple[float, float]]
) -> list[float]:
    """The parameters within `bounds` of the least sum of squares that scipy finds from any of the starts, which are moved
    into the bounds."""
    low, high = [bound[0] for bound in bounds], [bound[1] for bound in bounds]
    found = [
        _optimise().least_squares(
            residuals,
            [min(max(value, least), most) for value, (least, most) in zip(start, bounds, strict=True)],
            bounds=(low, high),
            xtol=1e-12,
            ftol=1e-12,
        )
        for start in starts
    ]
    return [float(value) for value in min(found, key=lambda each: float(each.cost)).x]
