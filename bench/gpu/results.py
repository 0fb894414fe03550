"""One figure and how it is written down. Times are seconds in the code, microseconds where people read them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["Figure", "count", "figure", "ratio", "seconds"]

# What a figure of the emulated driver does not have.
SPEEDS = ("value", "median_us", "p99_us", "detail")


@dataclass(frozen=True)
class Figure:
    """One line of the table and of the JSON.

    target None: reported only. at_least: larger is better. n, median_us, p99_us: of the measured side's samples. shown: in
    the table as well as in the JSON. exact: a count or a comparison of bytes, which is as true on the emulated driver as
    on a GPU; every other value is a speed, and the emulated driver has none.
    """

    name: str
    value: float
    unit: str
    n: int
    median_us: float | None
    p99_us: float | None
    target: float | None = None
    at_least: bool = False
    shown: bool = True
    exact: bool = False
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def to_json(self, *, emulated: bool = False) -> dict[str, Any]:
        """As the JSON has it. A speed of the emulated driver is no value: it stands apart, under a name that says so."""
        entry = {**asdict(self), "met": self.met}
        if emulated and not self.exact:
            speeds = {key: entry[key] for key in SPEEDS}
            entry.update(value=None, median_us=None, p99_us=None, met=None, detail={}, of_the_emulated_driver=speeds)
        return entry

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Figure:
        """The reverse of `to_json`. Keys that are no fields are left out."""
        given = {**entry, **entry.get("of_the_emulated_driver", {})}
        return cls(**{each.name: given[each.name] for each in fields(cls) if each.name in given})


def figure(
    name: str,
    value: float,
    unit: str,
    samples_s: Sequence[float],
    *,
    target: float | None = None,
    at_least: bool = False,
    shown: bool = True,
    **detail: Any,
) -> Figure:
    """A figure with its samples, in seconds (at least one)."""
    from remap_serve.sim.results import (
        percentile,  # here, since the suite tells of figures before it has built the package
    )

    return Figure(
        name,
        value,
        unit,
        len(samples_s),
        statistics.median(samples_s) * 1e6,
        percentile(samples_s, 0.99) * 1e6,
        target,
        at_least,
        shown,
        False,
        detail,
    )


def seconds(name: str, samples_s: Sequence[float], *, target_us: float | None = None, **more: Any) -> Figure:
    """The median of the samples, in microseconds."""
    return figure(name, statistics.median(samples_s) * 1e6, "us", samples_s, target=target_us, **more)


def ratio(
    name: str, ours_s: Sequence[float], theirs_s: Sequence[float], *, inverse: bool = False, **more: Any
) -> Figure:
    """Median over median: ours / theirs, or theirs / ours (a share of their speed) if `inverse`."""
    ours, theirs = statistics.median(ours_s), statistics.median(theirs_s)
    value = theirs / ours if inverse else ours / theirs
    return figure(name, value, "x", ours_s, theirs_us=theirs * 1e6, theirs_n=len(theirs_s), **more)


def count(
    name: str, value: float, unit: str, *, n: int, target: float | None = None, at_least: bool = False, **detail: Any
) -> Figure:
    """A count, or a comparison of bytes: exact on any driver."""
    return Figure(name, value, unit, n, None, None, target, at_least, True, True, detail)
