"""Small least-squares problems in plain Python: a few parameters, some hundred points. Pure; no numpy, no scipy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = ["line", "minimise"]

Residuals = Callable[[Sequence[float]], list[float]]

_STEPS = 300
_DIFFERENCE = 1e-6


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b), neither below 0, for which a + b x meets the points (x, y) best by the sum of squared *relative* errors.

    With one point, or all at the same x, a is 0. Every y must be above 0, and some x.
    """
    weights = [1.0 / (y * y) for _, y in points]
    s0 = math.fsum(weights)
    s1 = math.fsum(w * x for w, (x, _) in zip(weights, points, strict=True))
    s2 = math.fsum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    t0 = math.fsum(w * y for w, (_, y) in zip(weights, points, strict=True))
    t1 = math.fsum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
    determinant = s0 * s2 - s1 * s1
    if determinant > 1e-12 * s0 * s2:
        a, b = (t0 * s2 - t1 * s1) / determinant, (s0 * t1 - s1 * t0) / determinant
        if a >= 0 and b >= 0:
            return a, b
        if b < 0:
            return t0 / s0, 0.0
    return 0.0, t1 / s2


def minimise(residuals: Residuals, starts: Sequence[Sequence[float]]) -> list[float]:
    """The parameters of the least sum of squares that Levenberg and Marquardt's method finds from any of the starts."""
    best: tuple[float, list[float]] = (math.inf, list(starts[0]))
    for start in starts:
        found = _descend(residuals, list(start))
        best = min(best, found, key=lambda each: each[0])
    return best[1]


def _descend(residuals: Residuals, at: list[float]) -> tuple[float, list[float]]:
    damping = 1e-2
    now = residuals(at)
    cost = math.fsum(r * r for r in now)
    for _ in range(_STEPS):
        columns = [_derivative(residuals, at, i) for i in range(len(at))]
        matrix = [[math.fsum(map(_product, a, b)) for b in columns] for a in columns]
        slope = [math.fsum(map(_product, a, now)) for a in columns]
        for i in range(len(at)):
            matrix[i][i] += damping * (matrix[i][i] or 1e-12)
        step = _solve(matrix, slope)
        tried = [value - change for value, change in zip(at, step, strict=True)]
        there = residuals(tried)
        new_cost = math.fsum(r * r for r in there)
        if new_cost < cost:
            settled = cost - new_cost <= 1e-13 * cost or new_cost < 1e-22
            at, now, cost = tried, there, new_cost
            damping = max(damping / 5, 1e-12)
            if settled:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return cost, at


def _product(a: float, b: float) -> float:
    return a * b


def _derivative(residuals: Residuals, at: list[float], i: int) -> list[float]:
    up, down = list(at), list(at)
    up[i] += _DIFFERENCE
    down[i] -= _DIFFERENCE
    return [(a - b) / (2 * _DIFFERENCE) for a, b in zip(residuals(up), residuals(down), strict=True)]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss with pivots; a parameter that nothing depends on stays where it is."""
    n = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if rows[i][i] == 0.0:
            rows[i][i] = 1.0
        for r in range(i + 1, n):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    found = [0.0] * n
    for i in reversed(range(n)):
        found[i] = (rows[i][n] - math.fsum(rows[i][j] * found[j] for j in range(i + 1, n))) / rows[i][i]
    return found
