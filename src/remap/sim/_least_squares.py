"""Small least-squares problems: a straight line in closed form; curves by scipy, which is loaded when one is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from remap.errors import InvalidState

__all__ = ["line", "minimise"]

Residuals = Callable[[Sequence[float]], list[float]]


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b), neither below 0, for which a + b x meets the points (x, y) best by the sum of squared *relative* errors.

    With one point, or all at the same x, a is 0. Every y must be above 0, and some x.
    """
    # In units of the largest x and y: squares of seconds and of bytes would leave the range of a float.
    wide, high = max(x for x, _ in points), max(y for _, y in points)
    shares = [(x / wide, y / high) for x, y in points]
    weights = [1.0 / (y * y) for _, y in shares]
    s0 = math.fsum(weights)
    s1 = math.fsum(w * x for w, (x, _) in zip(weights, shares, strict=True))
    s2 = math.fsum(w * x * x for w, (x, _) in zip(weights, shares, strict=True))
    t0 = math.fsum(w * y for w, (_, y) in zip(weights, shares, strict=True))
    t1 = math.fsum(w * x * y for w, (x, y) in zip(weights, shares, strict=True))
    determinant = s0 * s2 - s1 * s1
    if determinant > 1e-12 * s0 * s2:
        a, b = (t0 * s2 - t1 * s1) / determinant, (s0 * t1 - s1 * t0) / determinant
        if a >= 0 and b >= 0:
            return a * high, b * high / wide
        if b < 0:
            return t0 / s0 * high, 0.0
    return 0.0, t1 / s2 * high / wide


def minimise(
    residuals: Residuals, starts: Sequence[Sequence[float]], bounds: Sequence[tuple[float, float]]
) -> list[float]:
    """The parameters within `bounds` of the least sum of squares that scipy finds from any of the starts, which are moved
    into the bounds. Raises InvalidState without scipy."""
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise InvalidState(
            "fitting needs scipy, of the extra `sim`: pip install 'remap[sim]'; nothing was fitted",
            extra="sim",
            package="scipy",
        ) from error
    low, high = [bound[0] for bound in bounds], [bound[1] for bound in bounds]
    found = [
        least_squares(
            residuals,
            [min(max(value, least), most) for value, (least, most) in zip(start, bounds, strict=True)],
            bounds=(low, high),
            xtol=1e-12,
            ftol=1e-12,
        )
        for start in starts
    ]
    return [float(value) for value in min(found, key=lambda each: float(each.cost)).x]
