# SPDX-License-Identifier: Apache-2.0
"""out/demo.html: the demo's runs as one self-contained page (templates/demo.html.j2: inline SVG, CSS and a little
script).

Baseline and remap stand side by side on the same axes. This module computes all lines, so that the page is complete
without its script; the script only adds a cross-hair that reads both runs at one moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remap_serve.engine.metrics import StepSample

from .demo_report import (
    COLD,
    DemoResult,
    RunResult,
    closing_sentence,
    differing_answers,
    format_seconds,
    is_better,
    numbers,
    table_rows,
    worse_figures,
    worse_sentence,
)
from .pages import render

__all__ = ["page"]

# Of each chart, in pixels: its size, and where its axes begin and end.
FRAME = {"width": 520, "height": 168, "left": 46, "right": 510, "top": 10, "bottom": 144}
# A step plot needs no more points than it has pixels; more only makes the page slow.
MAX_POINTS = 900


@dataclass(frozen=True)
class Series:
    """One line of a chart: its value at a point, and its drawing."""

    name: str
    value: Callable[[StepSample], float]
    style: str  # CSS class: "line", "area", "limit" or "soft"


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    series: tuple[Series, ...]


CHARTS = (
    Chart(
        "KV cache, blocks",
        "filled: in use; line: may be used",
        (
            Series("in use", lambda p: p.kv_used_blocks, "area"),
            Series("capacity", lambda p: p.kv_usable_blocks, "limit"),
        ),
    ),
    Chart(
        "Layers remapped", "layers whose memory is KV cache", (Series("layers", lambda p: p.layers_remapped, "area"),)
    ),
    Chart(
        "Requests",
        "line: running; filled: waiting",
        (
            Series("waiting", lambda p: p.waiting, "soft"),
            Series("running", lambda p: p.running, "line"),
        ),
    ),
    Chart(
        "Preemptions so far",
        "each step up throws a request's KV away",
        (Series("so far", lambda p: p.preemptions, "line"),),
    ),
)


def ticks(top: float, count: int = 4, integer: bool = True) -> list[float]:
    """Round values from 0 that cover `top`, about `count` steps of 1, 2 or 5 times a power of ten."""
    raw = max(top, 1e-6) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= raw * (1 - 1e-9))
    if integer:
        step = max(1.0, step)
    return [step * i for i in range(max(math.ceil(top / step - 1e-9), 1) + 1)]


def thin(points: Sequence[StepSample], limit: int = MAX_POINTS) -> list[StepSample]:
    """At most about `limit` points, the first and the last among them."""
    if len(points) <= limit:
        return list(points)
    stride = math.ceil(len(points) / limit)
    kept = list(points[::stride])
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


@dataclass(frozen=True)
class Axes:
    """Seconds and values to pixels; the same for both runs of a chart."""

    end_s: float
    marks: list[float]  # of the values, from 0 up
    seconds: list[float]  # marks of the time

    def x(self, t_s: float) -> float:
        return round(FRAME["left"] + (FRAME["right"] - FRAME["left"]) * t_s / self.end_s, 1)

    def y(self, value: float) -> float:
        return round(FRAME["bottom"] - (FRAME["bottom"] - FRAME["top"]) * value / self.marks[-1], 1)

    def path(self, timeline: Sequence[StepSample], series: Series) -> str:
        """A step plot, as SVG's path commands: each value holds until the next point. An area is closed at 0."""
        points = thin(timeline)
        closed = series.style in ("area", "soft")
        previous = series.value(points[0])
        commands = [f"M{self.x(points[0].time_s)} {self.y(0 if closed else previous)}V{self.y(previous)}"]
        for point in points[1:]:
            value = series.value(point)
            if value != previous:
                commands.append(f"H{self.x(point.time_s)}V{self.y(value)}")
                previous = value
        commands.append(f"H{self.x(points[-1].time_s)}")
        if closed:
            commands.append(f"V{self.y(0)}Z")
        return "".join(commands)


def _axes(runs: Sequence[RunResult], chart: Chart) -> Axes:
    end_s = max((run.timeline[-1].time_s for run in runs if run.timeline), default=0.0) or 1.0
    top = max((s.value(p) for run in runs for p in run.timeline for s in chart.series), default=0.0)
    return Axes(end_s, ticks(top), [mark for mark in ticks(end_s, 5, integer=False) if mark <= end_s])


def _tiles(result: DemoResult) -> list[tuple[str, str, str, bool]]:
    """(name, value of the baseline, value of remap, whether it got worse): what people ask for, and whatever got worse most."""
    shown = {
        "preemptions": "preemptions",
        "tokens_per_s": "tokens/s",
        "ttft_p99_s": "P99 time to first token",
        "tbt_p99_s": "P99 time between tokens",
    }
    if result.remap.cold:
        shown = {"cold_first_pass_s": "cold model: turn to first pass", **shown}
        del shown["preemptions"]
    worse = worse_figures(result)
    shown |= {figure.key: figure.name for figure in worse[:1]}
    before, after = numbers(result.baseline), numbers(result.remap)

    def show(key: str, value: float) -> str:
        return (
            f"{value:,}" if key == "preemptions" else f"{value:.1f}" if key == "tokens_per_s" else format_seconds(value)
        )

    return [
        (name, show(key, before[key]), show(key, after[key]), key in {figure.key for figure in worse})
        for key, name in shown.items()
    ]


def _charts(result: DemoResult) -> tuple[Chart, ...]:
    """Of more models than memory, layers that have no pages stand where layers whose pages are KV do."""
    if not result.remap.cold:
        return CHARTS
    away = replace(CHARTS[1], title="Layers without memory", note="of all models: others have it")
    return (CHARTS[0], away, *CHARTS[2:])


def _data(run: RunResult) -> dict[str, list[Any]]:
    """The data of the cross-hair: times, and for each chart its series (name, values)."""
    points = thin(run.timeline)
    return {
        "t": [round(p.time_s, 4) for p in points],
        "charts": [[[s.name, [round(s.value(p), 3) for p in points]] for s in chart.series] for chart in CHARTS],
    }


def page(result: DemoResult) -> str:
    """The whole HTML document. Raises Missing without jinja2."""
    runs = (result.baseline, result.remap)
    return render(
        "demo",
        title=f"remap demo: {result.model}",
        result=result,
        runs=runs,
        verdict="good" if is_better(result) else "mixed",
        cold=result.remap.cold,
        note=COLD if result.remap.cold else "",
        closing=closing_sentence(result),
        worse=worse_sentence(result),
        differing=differing_answers(result),
        tiles=_tiles(result),
        frame=FRAME,
        charts=[(chart, _axes(runs, chart)) for chart in _charts(result)],
        rows=table_rows(result),
        data={run.kind: _data(run) for run in runs},
    )
