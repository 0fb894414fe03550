"""Pictures of simulated runs: each function takes results and returns a matplotlib figure; `svg` and `png` write it.

The module needs matplotlib (the extra `sim`); without it every function raises Missing. Nothing here touches pyplot's
global state.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from remap.sim.results import PolicyResult, Sample

from .errors import needed

__all__ = [
    "alpha_over_time",
    "colours",
    "kv_over_time",
    "need_matplotlib",
    "png",
    "stall_over_time",
    "svg",
    "tbt_cdf",
    "ttft_cdf",
]

WIDTH = 9.2
# Policies that are often compared keep their colour from picture to picture.
KNOWN = {
    "recompute": "#a5581b",
    "remap": "#1466b8",
    "remap:weights": "#4f97d7",
    "pie": "#12714a",
    "swap": "#8d5fb0",
    "static": "#6b7280",
    "ideal": "#111827",
}
OTHERS = ("#c2185b", "#0097a7", "#e0a100", "#5d4037", "#7cb342", "#3f51b5", "#f4511e", "#00695c")
# More points than a line has pixels only make files large.
POINTS = 500
STYLE = {
    "font.size": 9,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e2",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "remap",  # the same ids for the same picture
}


def need_matplotlib() -> Any:
    """Import the module. Raises Missing (an InvalidState), naming the extra, if it is not installed."""
    return needed("matplotlib", "sim", "a picture")


def colours(names: Iterable[str]) -> dict[str, str]:
    """Policy -> colour. A name keeps its colour, unless another policy of the run has taken that."""
    names = list(names)
    free = iter(
        [colour for colour in (*OTHERS, *KNOWN.values()) if colour not in {KNOWN.get(name) for name in names}] * 9
    )
    return {name: KNOWN.get(name) or next(free) for name in names}


def _figure(rows: int, columns: int, height: float, *, width: float = WIDTH, **options: Any) -> tuple[Any, Any]:
    """(figure, axes as a list of rows)."""
    matplotlib = need_matplotlib()
    with matplotlib.rc_context(STYLE):
        figure = import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes


def _cumulative(pairs: Sequence[tuple[float, int]]) -> tuple[list[float], list[float], list[float]]:
    """(value, share of pairs at most that value, share above it), ascending, for values that move a share visibly."""
    total = sum(count for _, count in pairs)
    xs: list[float] = []
    below: list[float] = []
    above: list[float] = []
    seen = 0
    for place, (value, count) in enumerate(pairs):
        seen += count
        share, rest = seen / total, (total - seen) / total
        last = place == len(pairs) - 1
        moved = not xs or share - below[-1] > 1 / POINTS or rest < 0.96 * above[-1] or value > 1.3 * xs[-1]
        if moved or last:
            xs.append(value)
            below.append(share)
            above.append(rest)
    return xs, below, above


def _distribution(
    results: Sequence[PolicyResult], pairs: Callable[[PolicyResult], Sequence[tuple[float, int]]], what: str, of: str
) -> Any:
    """Two axes: the share of all values up to a value and, for the tail, the share above it."""
    figure, axes = _figure(1, 2, 3.3)
    left, right = axes[0]
    smallest = math.inf
    for result, colour in zip(results, colours(result.policy for result in results).values()):
        found = [(value, count) for value, count in pairs(result) if value > 0]
        if not found:
            continue
        total = sum(count for _, count in found)
        smallest = min(smallest, 1.0 / total)
        xs, below, above = _cumulative(found)
        left.step(xs, below, where="post", color=colour, label=result.policy, linewidth=1.6)
        right.step([xs[0], *xs], [1.0, *above], where="post", color=colour, linewidth=1.6)
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xlabel(f"{what}, seconds")
    left.set_ylim(0, 1.02)
    left.set_title(f"share of {of} up to so many seconds", loc="left")
    right.set_yscale("log")
    right.set_ylim(max(smallest * 0.8, 1e-6) if math.isfinite(smallest) else 1e-3, 1.3)
    right.axhline(0.01, color="#888", linewidth=0.9, linestyle=":")
    right.annotate(
        "P99", (1.0, 0.01), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="#666", fontsize=8
    )
    right.set_title(f"the tail: share of {of} above", loc="left")
    _legend(figure, left, len(results))
    return figure


def _legend(figure: Any, axis: Any, count: int) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=min(count, 5), frameon=False)


def ttft_cdf(results: Sequence[PolicyResult]) -> Any:
    """Time to the first token of all finished requests, one line for each policy."""
    return _distribution(
        results, lambda result: [(value, 1) for value in sorted(result.ttft_s)], "time to first token", "requests"
    )


def tbt_cdf(results: Sequence[PolicyResult]) -> Any:
    """Time between two tokens of a request, over all gaps, one line for each policy."""
    return _distribution(results, lambda result: result.tbt, "time between tokens", "gaps")


def _steps(samples: Sequence[Sample], read: Callable[[Sample], float]) -> tuple[list[float], list[float]]:
    """(times, values): each value holds until the next time.

    If there are too many points, each stretch keeps its highest value.
    """
    stretch = max(1, math.ceil(len(samples) / POINTS))
    xs: list[float] = []
    ys: list[float] = []
    for first in range(0, len(samples), stretch):
        value = max(read(sample) for sample in samples[first : first + stretch])
        if not ys or value != ys[-1]:
            xs.append(samples[first].time_s)
            ys.append(value)
    if samples:
        xs.append(samples[-1].time_s)
        ys.append(read(samples[-1]))
    return xs, ys


def _of(result: PolicyResult, tenant: str) -> list[Sample]:
    return sorted((point for point in result.timeline if point.tenant == tenant), key=lambda point: point.time_s)


def _tenants(results: Sequence[PolicyResult]) -> list[str]:
    return list(dict.fromkeys(tenant.tenant for result in results for tenant in result.tenants))


def kv_over_time(results: Sequence[PolicyResult]) -> Any:
    """KV blocks, a row for each tenant and a column for each policy: usable blocks as a line, used ones as an area."""
    names = _tenants(results)
    width = max(WIDTH, 0.6 + 2.2 * len(results))
    figure, axes = _figure(len(names), len(results), 0.6 + 1.6 * len(names), width=width, sharex=True, sharey="row")
    painted = colours(result.policy for result in results)
    for row, (name, line) in enumerate(zip(names, axes)):
        for result, axis in zip(results, line):
            points, colour = _of(result, name), painted[result.policy]
            if points:
                axis.fill_between(
                    *_steps(points, lambda p: p.kv_used_blocks), step="post", color=colour, alpha=0.3, linewidth=0
                )
                axis.step(*_steps(points, lambda p: p.kv_usable_blocks), where="post", color=colour, linewidth=1.5)
            if row == 0:
                axis.set_title(result.policy, loc="left", color=colour)
            axis.margins(x=0.01)
        line[0].set_ylim(bottom=0)  # after all have been drawn: they share the range
        line[0].set_ylabel(name)
    figure.supxlabel("virtual time, seconds", fontsize=9)
    figure.suptitle("line: blocks that may be used; area: in use", fontsize=9, x=0.01, ha="left", color="#555")
    return figure


def alpha_over_time(results: Sequence[PolicyResult]) -> Any:
    """Remapped layers: one axis for each tenant, and one line for each policy."""
    names = _tenants(results)
    figure, axes = _figure(len(names), 1, 0.7 + 1.45 * len(names), sharex=True)
    painted = colours(result.policy for result in results)
    for name, (axis,) in zip(names, axes):
        for result in results:
            points = _of(result, name)
            if points:
                axis.step(
                    *_steps(points, lambda p: p.alpha),
                    where="post",
                    color=painted[result.policy],
                    linewidth=1.3,
                    label=result.policy,
                )
        axis.set_title(name, loc="left")
        axis.set_ylabel("layers")
        axis.set_ylim(bottom=0)
        axis.margins(x=0.01)
    axes[-1][0].set_xlabel("virtual time, seconds")
    _legend(figure, axes[0][0], len(results))
    return figure


def stall_over_time(results: Sequence[PolicyResult]) -> Any:
    """Seconds that passes have waited for layers or KV since the start, all tenants together, and the waiting requests.

    Each has one line for each policy.
    """
    figure, axes = _figure(1, 2, 3.1)
    left, right = axes[0]
    for result, colour in zip(results, colours(result.policy for result in results).values()):
        for axis, field in ((left, "stall_s"), (right, "waiting")):
            times, values = _sum_over_tenants(result, field)
            axis.step(times, values, where="post", color=colour, linewidth=1.3, label=result.policy)
    left.set_title("stalled so far, all tenants", loc="left")
    left.set_ylabel("seconds")
    right.set_title("requests waiting, all tenants", loc="left")
    for axis in (left, right):
        axis.set_xlabel("virtual time, seconds")
        axis.set_ylim(bottom=0)
        axis.margins(x=0.01)
    _legend(figure, left, len(results))
    return figure


def _sum_over_tenants(result: PolicyResult, field: str) -> tuple[list[float], list[float]]:
    """(times, sums of a field of the timeline over the tenants, each with its last value); thinned as `_steps` does."""
    latest: dict[str, float] = {}
    sums: dict[float, float] = {}
    for point in sorted(result.timeline, key=lambda point: point.time_s):
        latest[point.tenant] = float(getattr(point, field))
        sums[point.time_s] = math.fsum(latest.values())
    points = [Sample(time, "", 0, 0, value, 0, 0, 0, 0.0) for time, value in sums.items()]
    return _steps(points, lambda point: point.alpha)


def svg(figure: Any) -> str:
    """The figure as an `<svg>` element for a page: it scales with its container, and refers to no other file."""
    stream = io.StringIO()
    with need_matplotlib().rc_context(STYLE):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    # Width and height in points would fix the size.
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )


def png(figure: Any, path: Path) -> None:
    """Write the figure into a file. Raises OSError if it cannot."""
    with need_matplotlib().rc_context(STYLE):
        figure.savefig(path, format="png", dpi=140, facecolor="white")
