"""Small least-squares problems, by scipy, which is loaded when one is solved; InvalidState (extra, package) without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from remap.errors import InvalidState

__all__ = ["line", "minimise"]

Residuals = Callable[[Sequence[float]], list[float]]


def _optimise() -> Any:
    """The module scipy.optimize."""
    try:
        return import_module("scipy.optimize")
    except ImportError as error:
        raise InvalidState(
            "fitting needs scipy, of the extra `sim`: pip install 'remap[sim]'; nothing was fitted",
            extra="sim",
            package="scipy",
        ) from error


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b), neither below 0, for which a + b x meets the points (x, y) best by the sum of squared *relative* errors.

    With one point, or all at the same x, a is 0. Every y must be above 0, and some x.
    """
    # In units of the largest x and y: squares of seconds and of bytes would leave the range of a float.
    wide, high = max(x for x, _ in points), max(y for _, y in points)
    columns = 2 if min(x for x, _ in points) < wide else 1
    rows = [((x / wide) / (y / high), high / y)[:columns] for x, y in points]
    b, a = (*_optimise().nnls(rows, [1.0] * len(rows))[0], 0.0)[:2]
    return float(a) * high, float(b) * high / wide


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
