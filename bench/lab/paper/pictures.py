"""One picture an experiment of `bench.lab paper`, as SVG: lines are medians of the seeds, bands their ranges.

Needs matplotlib (the extra `sim` or `bench`).
"""

from __future__ import annotations

import re
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from remap_serve.cli.simulate_plots import STYLE, colours, need_matplotlib

from .experiments import BASELINE, Experiment, Panel
from .reckoning import Spread
from .runs import Store

__all__ = ["picture", "save"]

_ROWS = (
    ("P99 TBT, s", "tbt_p99_s", "log"),
    ("P99 TTFT, s", "ttft_p99_s", "log"),
    ("tokens/s", "tokens_per_s", "linear"),
)
_BAND = {"alpha": 0.15, "lw": 0}
_HASHED = "[a-z][0-9a-f]{10}"
"""A name of a part that others refer to, as matplotlib gives it."""
_STYLE = {**STYLE, "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 8.5}


def picture(experiment: Experiment, store: Store) -> Any | None:
    """A matplotlib figure, or None if there is nothing to draw. Raises InvalidState without matplotlib."""
    with need_matplotlib().rc_context(_STYLE):
        if experiment.id == "fig4":
            return _arithmetic(store)
        if any(panel.quiet for panel in experiment.panels):
            return _gaps(experiment, store)
        return _rates(experiment, store)


def save(figure: Any, path: Path) -> None:
    """As SVG. The same picture is the same file, on any machine, and a file that is equal stays as it is."""
    drawn = StringIO()
    with need_matplotlib().rc_context(_STYLE):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    text = _numbered(drawn.getvalue())
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _numbered(svg: str) -> str:
    """With names of parts by their order. matplotlib's are hashes of unrounded places, whose last bits processors differ in."""
    names = {found: f"n{place}" for place, found in enumerate(dict.fromkeys(re.findall(rf'\bid="({_HASHED})"', svg)))}
    return re.sub(rf"\b{_HASHED}\b", lambda found: names.get(found[0], found[0]), svg)


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    figure = import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _series(store: Store, panel: Panel, policy: str, figure: str) -> tuple[list[float], list[Spread]]:
    xs, ys = [], []
    for key in store.points.keys(panel.name, policy):
        points = store.points.at(panel.name, key, policy)
        xs.append(points[0]["rate"])
        ys.append(Spread.of([point[figure] for point in points]))
    return xs, ys


def _rates(experiment: Experiment, store: Store) -> Any | None:
    panels = [panel for panel in experiment.panels if store.points.keys(panel.name, *experiment.policies)]
    if not panels:
        return None
    # One load: its three figures side by side. Several: a column each.
    alone = len(panels) == 1
    size = (1, len(_ROWS), 9.2, 2.7) if alone else (len(_ROWS), len(panels), 3.1 * len(panels) + 0.4, 5.4)
    figure, axes = _figure(*size)
    painted = colours(experiment.policies)
    for column, panel in enumerate(panels):
        for row, (label, name, scale) in enumerate(_ROWS):
            axis = axes[0][row] if alone else axes[row][column]
            for policy in experiment.policies:
                xs, ys = _series(store, panel, policy, name)
                axis.plot(xs, [y.median for y in ys], "o-", ms=2.5, lw=1.2, color=painted[policy], label=policy)
                axis.fill_between(xs, [y.low for y in ys], [y.high for y in ys], color=painted[policy], **_BAND)
            axis.set_xscale("log")
            axis.set_yscale(scale)
            if scale == "linear":
                axis.set_ylim(bottom=0)
            if alone or column == 0:
                axis.set_ylabel(label)
            if alone or row == len(_ROWS) - 1:
                axis.set_xlabel("requests a second")
            if row == 0:
                axis.set_title(panel.name, loc="left")
    _legend(figure, axes[0][0])
    return figure


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 4), frameon=False)


def _gaps(experiment: Experiment, store: Store) -> Any | None:
    """Gaps between tokens after the peak: the share of them up to a length, at the lowest and the highest rate that was run."""
    shown = []
    for panel in experiment.panels:
        cells = store.gaps.get(panel.name, {})
        keys = [key for key in store.points.keys(panel.name, *experiment.policies) if key in cells]
        shown += [(panel, key) for key in dict.fromkeys((keys[0], keys[len(keys) // 2], keys[-1]))] if keys else []
    if not shown:
        return None
    figure, axes = _figure(1, len(shown), 3.1 * len(shown) + 0.4, 2.9)
    painted = colours(experiment.policies)
    for axis, (panel, key) in zip(axes[0], shown):
        peak = store.points.at(panel.name, key, BASELINE)[0]["rate"]
        axis.set_title(f"peak {peak:.3g}/s, then {peak * panel.quiet:.3g}/s", loc="left")
        for policy in experiment.policies:
            seeds = store.gaps[panel.name][key].get(policy, [])
            if seeds:
                xs = [Spread.of([1e3 * value for value in values]) for values in zip(*seeds)]
                ys = [index / (len(xs) - 1) for index in range(len(xs))]
                axis.plot([x.median for x in xs], ys, lw=1.3, color=painted[policy], label=policy)
                axis.fill_betweenx(ys, [x.low for x in xs], [x.high for x in xs], color=painted[policy], **_BAND)
        axis.set_xscale("log")
        axis.set_xlabel("gap between tokens after the peak, ms")
    axes[0][0].set_ylabel("share of gaps")
    _legend(figure, axes[0][0])
    return figure


def _arithmetic(store: Store) -> Any | None:
    rows = store.arithmetic
    if not rows:
        return None
    figure, axes = _figure(1, 2, 7.4, 2.8)
    batch = [row["batch"] for row in rows]
    left, right = axes[0]
    for name, label in (
        ("layer_s", "computation of a layer"),
        ("load_s", "loading a layer"),
        ("kv_layer_s", "swapping in a layer's KV"),
    ):
        left.plot(batch, [1e3 * row[name] for row in rows], "o-", ms=3, lw=1.2, label=label)
    left.set_ylabel("ms")
    left.set_yscale("log")
    right.plot(batch, [row["hidden"] for row in rows], "o-", ms=3, lw=1.2)
    right.set_ylabel("layers of 40 that a pass hides")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("sequences that decode, of 512 tokens")
    left.legend(frameon=False)
    return figure
