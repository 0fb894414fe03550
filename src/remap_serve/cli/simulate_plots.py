# SPDX-License-Identifier: Apache-2.0
"""Pictures of simulated runs: each function takes results and returns matplotlib figures; `svg` writes them.

A function returns no figure where there is nothing to see.

The module needs matplotlib (the extra `sim`); without it every function raises Missing. Nothing here touches pyplot's
global state.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from remap.cli.errors import needed
from remap_serve.sim.results import PolicyResult, Sample

__all__ = [
    "DARK",
    "alpha_over_time",
    "colours",
    "kv_over_time",
    "need_matplotlib",
    "stall_over_time",
    "svg",
    "tbt_cdf",
    "themed",
    "ttft_cdf",
]

WIDTH = 4.6
SOFT = "#666666"
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
# Each colour on a dark screen; those that are not here can be read on both.
DARK = {
    "#a5581b": "#e39a5b",
    "#1466b8": "#68b0f5",
    "#4f97d7": "#a9d1f7",
    "#12714a": "#5fcb98",
    "#8d5fb0": "#c39ade",
    "#6b7280": "#a3a9b4",
    "#111827": "#f2f2ef",
    "#c2185b": "#f06a9b",
    "#5d4037": "#bf9a8d",
    "#3f51b5": "#93a0ee",
    "#00695c": "#4fb8a8",
}
GRID = "#e6e6e2"
# More points than a line has pixels only make files large.
POINTS = 500
STYLE = {
    "font.size": 9,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
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


def _axes(height: float) -> tuple[Any, Any]:
    """(figure, its one set of axes). Each is a picture of its own, so that a page can put them beside or below each other."""
    matplotlib = need_matplotlib()
    with matplotlib.rc_context(STYLE):
        figure = import_module("matplotlib.figure").Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
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
) -> list[Any]:
    """The share of all values up to a value and, for the tail, the share above it. Empty without a value."""
    (body, left), (tail, right) = _axes(2.7), _axes(2.7)
    smallest = math.inf
    for result, colour in zip(results, colours(result.policy for result in results).values()):
        found = [(value, count) for value, count in pairs(result) if value > 0]
        if not found:
            continue
        total = sum(count for _, count in found)
        smallest = min(smallest, 1.0 / total)
        xs, below, above = _cumulative(found)
        left.step(xs, below, where="post", color=colour, label=result.policy, linewidth=1.6)
        right.step([xs[0], *xs], [1.0, *above], where="post", color=colour, label=result.policy, linewidth=1.6)
    if not math.isfinite(smallest):
        return []
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xlabel(f"{what}, seconds")
    left.set_ylim(0, 1.02)
    left.set_title(f"share of {of} within x seconds", loc="left")
    right.set_yscale("log")
    right.set_ylim(max(smallest * 0.8, 1e-6), 1.3)
    right.axhline(0.01, color=SOFT, linewidth=0.9, linestyle=":")
    right.annotate(
        "P99", (1.0, 0.01), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=SOFT, fontsize=8
    )
    right.set_title(f"the tail: share of {of} above", loc="left")
    return [body, tail]


def ttft_cdf(results: Sequence[PolicyResult]) -> list[Any]:
    """Time to the first token of all finished requests, one line for each policy: two figures, or none."""
    return _distribution(
        results, lambda result: [(value, 1) for value in sorted(result.ttft_s)], "time to first token", "requests"
    )


def tbt_cdf(results: Sequence[PolicyResult]) -> list[Any]:
    """Time between two tokens of a request, over all gaps, one line for each policy: two figures, or none."""
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


def kv_over_time(results: Sequence[PolicyResult]) -> list[Any]:
    """KV blocks, a figure for each tenant and policy: usable blocks as a line, used ones as an area.

    The figures of a tenant share their scale. `ideal`, which has several times the memory, has its own: on that of the others it
    would squeeze them.
    """
    painted, made = colours(result.policy for result in results), []
    for name in _tenants(results):
        drawn: list[tuple[PolicyResult, list[Sample]]] = [(result, _of(result, name)) for result in results]
        top = max(
            (point.kv_usable_blocks for result, points in drawn for point in points if result.policy != "ideal"),
            default=0,
        )
        for result, points in drawn:
            if not points:
                continue
            figure, axis = _axes(1.9)
            colour = painted[result.policy]
            axis.fill_between(
                *_steps(points, lambda p: p.kv_used_blocks), step="post", color=colour, alpha=0.3, linewidth=0
            )
            axis.step(*_steps(points, lambda p: p.kv_usable_blocks), where="post", color=colour, linewidth=1.5)
            own = max(point.kv_usable_blocks for point in points)
            apart = " (its own scale)" if own > top > 0 else ""
            axis.set_title(f"{name}: {result.policy}{apart}", loc="left")
            axis.set_ylim(0, 1.05 * max(1, own if result.policy == "ideal" else top))
            axis.set_ylabel("blocks")
            _over_time(axis)
            made.append(figure)
    return made


def alpha_over_time(results: Sequence[PolicyResult]) -> list[Any]:
    """Remapped layers: a figure for each tenant of which some were, and in it one line for each policy."""
    painted, made = colours(result.policy for result in results), []
    for name in _tenants(results):
        drawn = [(result.policy, _of(result, name)) for result in results]
        if not any(point.alpha for _, points in drawn for point in points):
            continue
        figure, axis = _axes(2.1)
        for policy, points in drawn:
            if points:
                line = _steps(points, lambda p: p.alpha)
                axis.step(*line, where="post", color=painted[policy], linewidth=1.3, label=policy)
        axis.set_title(name, loc="left")
        axis.set_ylabel("layers")
        axis.set_ylim(bottom=0)
        _over_time(axis)
        made.append(figure)
    return made


def stall_over_time(results: Sequence[PolicyResult]) -> list[Any]:
    """Seconds that passes have waited for layers or KV since the start, all tenants together, and the waiting requests.

    Each a figure with one line for each policy, unless it would be zero throughout.
    """
    painted, made = colours(result.policy for result in results), []
    for field, title, unit in (
        ("stall_s", "stalled so far, all tenants", "seconds"),
        ("waiting", "requests waiting, all tenants", "requests"),
    ):
        lines = [(result.policy, *_sum_over_tenants(result, field)) for result in results]
        if not any(value for _, _, values in lines for value in values):
            continue
        figure, axis = _axes(2.7)
        for policy, times, values in lines:
            axis.step(times, values, where="post", color=painted[policy], linewidth=1.3, label=policy)
        axis.set_title(title, loc="left")
        axis.set_ylabel(unit)
        axis.set_ylim(bottom=0)
        _over_time(axis)
        made.append(figure)
    return made


def _over_time(axis: Any) -> None:
    axis.set_xlabel("virtual time, seconds")
    axis.margins(x=0.01)


def _sum_over_tenants(result: PolicyResult, field: str) -> tuple[list[float], list[float]]:
    """(times, sums of a field of the timeline over the tenants, each with its last value); thinned as `_steps` does."""
    latest: dict[str, float] = {}
    sums: dict[float, float] = {}
    for point in sorted(result.timeline, key=lambda point: point.time_s):
        latest[point.tenant] = float(getattr(point, field))
        sums[point.time_s] = math.fsum(latest.values())
    points = [Sample(time, "", 0, 0, value, 0, 0, 0, 0.0) for time, value in sums.items()]
    return _steps(points, lambda point: point.alpha)


def themed(colour: str) -> str:
    """A colour as CSS that a page may change for dark screens (templates/simulate.html.j2); itself where it does not."""
    return {SOFT: "var(--soft)", GRID: "var(--rule)", "#000000": "var(--ink)"}.get(
        colour, f"var(--line-{colour[1:]},{colour})"
    )


def svg(figure: Any) -> str:
    """The figure as an `<svg>` element for a page: it scales with its container, refers to no other file, and its colours are
    `themed`."""
    stream = io.StringIO()
    with need_matplotlib().rc_context(STYLE):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"((?:fill|stroke): )(#[0-9a-f]{6})", lambda found: found[1] + themed(found[2]), text)
    # Width and height in points would fix the size.
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )
