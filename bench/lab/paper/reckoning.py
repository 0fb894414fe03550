"""From the points of a benchmark to what stands beside a paper's figure. Pure.

A point is one run: its figures by name (`POINT`). A cell is a panel at one rate: its key is "x0.7" for a share of the saturation
rate and "10/s" for a rate in requests per second; it holds the points of all policies there, one a seed.

Each seed is compared with the same seed of the other policy; what is told is the median of the seeds, and their range (`Spread`).
Whatever is decided about a rate, such as which one is quoted, is decided by medians too: by the best of several seeds, chance
would choose.

Which rates an average is taken over: those at which the baseline preempts, and still serves all requests within twice the time in
which they came (`counts`). Below, memory is not scarce; far above, every policy only works off a queue.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from remap_serve.sim.results import PolicyResult, weighted_percentile

from .experiments import BASELINE, Headline, Panel, Reckoning

__all__ = [
    "METRICS",
    "POINT",
    "Finding",
    "Points",
    "Spread",
    "compare",
    "counts",
    "curve",
    "figures",
    "later_gaps",
    "quantiles",
]

Point = Mapping[str, float]

POINT = (
    "rate",
    "requests",
    "requests_finished",
    "arrive_s",
    "virtual_s",
    "tokens_per_s",
    "tpot_p99_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tbt_p50_s",
    "tbt_p99_s",
    "tbt_mean_s",
    "preemptions",
    "recomputed_tokens",
    "kv_blocks_start",
    "kv_blocks_peak",
    "layers_remapped_peak",
    "stall_fraction",
    "decisions",
    "goodput_per_s",
)
"""The figures of one run. rate: requests a second asked for; arrive_s: from the first arrival to the last."""

STILL_FINISHES = 2.0


def figures(result: PolicyResult, rate: float, arrive_s: float) -> dict[str, float]:
    """One run as a point, to five digits: more would only fill files."""
    values = {
        **{name: getattr(result, name) for name in POINT if hasattr(result, name)},
        "rate": rate,
        "arrive_s": arrive_s,
        "recomputed_tokens": sum(tenant.recomputed_tokens for tenant in result.tenants),
        "kv_blocks_start": sum(tenant.kv_blocks_start for tenant in result.tenants),
    }
    return {name: _short(values[name]) for name in POINT}


def _short(value: float) -> float:
    if isinstance(value, int):
        return value
    if math.isnan(value):
        return 0.0
    return float(f"{value:.5g}")


def later_gaps(whole: PolicyResult, first: PolicyResult) -> tuple[tuple[float, int], ...]:
    """The gaps between tokens of `whole` that are not in `first`: pairs (seconds, how many), ascending.

    `first` served the beginning of what `whole` served and was done when the rest came: until then both did the same. Ends of
    the same gap can differ in the last bit; to a nanosecond they are the same.
    """
    counts: dict[float, int] = {}
    for sign, result in ((1, whole), (-1, first)):
        for seconds, number in result.tbt:
            key = round(seconds, 9)
            counts[key] = counts.get(key, 0) + sign * number
    return tuple(sorted((seconds, number) for seconds, number in counts.items() if number > 0))


@dataclass
class Points:
    """All points: panel -> rate key -> policy -> one point a seed. c: panel -> saturation rate, requests a second."""

    cells: dict[str, dict[str, dict[str, list[dict[str, float]]]]] = field(default_factory=dict)
    c: dict[str, float] = field(default_factory=dict)

    def add(self, panel: str, key: str, policy: str, points: Sequence[Mapping[str, float]]) -> None:
        self.cells.setdefault(panel, {}).setdefault(key, {})[policy] = [dict(point) for point in points]

    def at(self, panel: str, key: str, policy: str) -> list[dict[str, float]]:
        """Its points, one a seed; none if it was not run there."""
        return self.cells.get(panel, {}).get(key, {}).get(policy, [])

    def keys(self, panel: str, *policies: str) -> list[str]:
        """Rates at which all these policies were run, ascending."""
        found = [key for key, cell in self.cells.get(panel, {}).items() if all(cell.get(name) for name in policies)]
        return sorted(found, key=lambda key: next(iter(self.cells[panel][key].values()))[0]["rate"])


@dataclass(frozen=True)
class Spread:
    """The median of the seeds, and the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def _preempts(base: Sequence[Point]) -> bool:
    return bool(base) and statistics.median(point["preemptions"] for point in base) > 0


def counts(base: Sequence[Point]) -> bool:
    """Whether averages are taken over this rate, by the points of `BASELINE`, one a seed: by their medians."""
    late = [point["virtual_s"] - STILL_FINISHES * point["arrive_s"] for point in base]
    return _preempts(base) and statistics.median(late) <= 0 and all(point["requests_finished"] for point in base)


# -- metrics -----------------------------------------------------------------------------------------------------------


def _cut(name: str) -> Callable[[Point, Point], float]:
    def metric(test: Point, base: Point) -> float:
        return 100.0 * (1.0 - test[name] / base[name]) if base[name] else 0.0

    return metric


def _gain(test: Point, base: Point, name: str) -> float:
    """nan where there was nothing to gain on, or where the file is of before the figure was stored."""
    return 100.0 * (test[name] / base[name] - 1.0) if name in test and base.get(name) else math.nan


def _tail(test: Point, base: Point) -> float:
    return max(_cut("tbt_p99_s")(test, base), _cut("ttft_p99_s")(test, base))


@dataclass(frozen=True)
class Metric:
    """about: what the number says. of(test, base): more is better, except where a paper counts a loss."""

    about: str
    unit: str
    of: Callable[[Point, Point], float]


METRICS: Mapping[str, Metric] = {
    "tbt_p99_reduction": Metric("P99 TBT lower", "%", _cut("tbt_p99_s")),
    "tpot_p99_reduction": Metric("P99 of requests' mean TBT lower", "%", _cut("tpot_p99_s")),
    "tbt_p50_reduction": Metric("P50 TBT lower", "%", _cut("tbt_p50_s")),
    "tbt_mean_reduction": Metric("mean TBT lower", "%", _cut("tbt_mean_s")),
    "ttft_p99_reduction": Metric("P99 TTFT lower", "%", _cut("ttft_p99_s")),
    "tail_reduction": Metric("P99 TBT or TTFT lower", "%", _tail),
    "throughput_gain": Metric("tokens/s more", "%", lambda t, b: 100.0 * (t["tokens_per_s"] / b["tokens_per_s"] - 1.0)),
    "goodput_gain": Metric("requests in time more", "%", lambda t, b: _gain(t, b, "goodput_per_s")),
    "throughput_loss": Metric("tokens/s less", "%", _cut("tokens_per_s")),
    "tbt_p50_increase": Metric("P50 TBT higher", "%", lambda t, b: -_cut("tbt_p50_s")(t, b)),
    "preemptions_cut": Metric("preemptions fewer", "%", _cut("preemptions")),
    "stall_cut": Metric(
        "share of passes spent waiting, less",
        "points",
        lambda t, b: 100.0 * (b["stall_fraction"] - t["stall_fraction"]),
    ),
    "decisions_cut": Metric("changes of memory fewer", "%", _cut("decisions")),
}


@dataclass(frozen=True)
class Finding:
    """What stands beside one figure, for one policy. value: ours; None if nothing was run. lowest: of a range, the lower end.

    at: (panel, requests a second) of all panels that it is of. reached: whether the paper's number is reached or passed.
    mean: over the rates that count, `rates` of them, at `better` of which the test is better. direction: "yes", "at some rates",
    "no"; "" if it cannot be told.
    """

    headline: str
    test: str
    base: str
    value: Spread | None = None
    lowest: Spread | None = None
    key: str = ""
    at: tuple[tuple[str, float], ...] = ()
    reached: bool = False
    mean: Spread | None = None
    rates: int = 0
    better: int = 0
    direction: str = ""


def curve(
    points: Points, panels: Sequence[Panel], test: str, base: str, metric: str
) -> list[tuple[str, tuple[float, ...]]]:
    """(rate key, the metric of each seed, averaged over the panels), at the rates that all panels have."""
    if not panels:
        return []
    keys = [set(points.keys(panel.name, test, base)) for panel in panels]
    found = []
    for key in points.keys(panels[0].name, test, base):
        if all(key in one for one in keys):
            rows = [
                [METRICS[metric].of(t, b) for t, b in zip(points.at(p.name, key, test), points.at(p.name, key, base))]
                for p in panels
            ]
            found.append((key, _over(rows)))
    return found


def _over(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The mean of the rows, seed by seed."""
    return tuple(statistics.fmean(values) for values in zip(*rows))


def compare(points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str) -> Finding:
    """The finding for one policy. Of the rates at which the paper's number is reached it takes the lowest; if there is none, the
    rate that comes nearest. A panel counts only where the baseline preempts: elsewhere all policies do the same (if it preempts
    nowhere, all of them count)."""
    metric, base = reckoning.metric, reckoning.base
    if reckoning.how == "about_zero":
        return _about_zero(points, headline, reckoning, panels, test)
    groups = [[panel] for panel in panels] if reckoning.how == "most" else [list(panels)]
    best: Finding | None = None
    averaged: list[tuple[float, ...]] = []
    for group in groups:
        seen: list[tuple[str, list[Panel], Spread]] = []
        for key, everybody in curve(points, group, test, base, metric):
            scarce = [panel for panel in group if _preempts(points.at(panel.name, key, BASELINE))]
            if scarce:
                seen.append((key, scarce, Spread.of(dict(curve(points, scarce, test, base, metric))[key])))
                finishing = [panel for panel in scarce if counts(points.at(panel.name, key, BASELINE))]
                if finishing:
                    averaged.append(dict(curve(points, finishing, test, base, metric))[key])
            elif not any(_preempts_anywhere(points, panel) for panel in group):
                seen.append((key, group, Spread.of(everybody)))
        if not seen:
            continue
        reached = [one for one in seen if one[2].median >= headline.least]
        first = bool(reached) and reckoning.how == "mean"
        key, of, value = reached[0] if first else max(seen, key=lambda one: one[2].median)
        if best is None or best.value is None or value.median > best.value.median:
            at = tuple((panel.name, points.at(panel.name, key, test)[0]["rate"]) for panel in of)
            best = Finding(headline.id, test, base, value, key=key, at=at, reached=bool(reached))
    if best is None or best.value is None:
        return Finding(headline.id, test, base)
    better = sum(statistics.median(values) > 0 for values in averaged)
    mean = Spread.of(_over(averaged)) if averaged else None
    direction = "no"
    if best.value.median > 0:
        direction = "yes" if 2 * better > len(averaged) else "at some rates"
    return replace(best, mean=mean, rates=len(averaged), better=better, direction=direction)


def _preempts_anywhere(points: Points, panel: Panel) -> bool:
    return any(_preempts(points.at(panel.name, key, BASELINE)) for key in points.keys(panel.name, BASELINE))


NEAR_ZERO = 5.0
"""Percent that count as "about 0 %"."""


def _about_zero(
    points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str
) -> Finding:
    """The mean over all rates from saturation on; reached if it is near enough."""
    seen = curve(points, panels, test, reckoning.base, reckoning.metric)
    seen = [pair for pair in seen if pair[0].startswith("x") and float(pair[0][1:]) >= 1.0] or seen
    if not seen:
        return Finding(headline.id, test, reckoning.base)
    value = Spread.of(_over([values for _, values in seen]))
    near = abs(value.median) <= NEAR_ZERO
    return Finding(headline.id, test, reckoning.base, value, reached=near, direction="yes" if near else "no")


def quantiles(pairs: Sequence[tuple[float, int]], steps: int = 40) -> list[float]:
    """A distribution as its quantiles 0, 1/steps, ..., 1."""
    return [_short(weighted_percentile(pairs, index / steps)) for index in range(steps + 1)] if pairs else []
