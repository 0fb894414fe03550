"""One picture an experiment of `bench.lab paper`, as SVG. Needs matplotlib (the extra `sim` or `bench`)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from remap.cli.simulate_plots import STYLE, colours, need_matplotlib

from .experiments import BASELINE, Experiment, Panel
from .runs import Store

__all__ = ["picture", "save"]

_ROWS = (
    ("P99 TBT, s", "tbt_p99_s", "log"),
    ("P99 TTFT, s", "ttft_p99_s", "log"),
    ("tokens/s", "tokens_per_s", "linear"),
)
_STYLE = {**STYLE, "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 8.5}


def picture(experiment: Experiment, store: Store) -> Any | None:
    """A matplotlib figure, or None if there is nothing to draw. Raises InvalidState without matplotlib."""
    with need_matplotlib().rc_context(_STYLE):
        if experiment.id == "fig4":
            return _arithmetic(store)
        if experiment.id in ("pie-fig6", "pie-fig9"):
            return _expansions(experiment, store)
        if experiment.id == "pie-fig7":
            return _sizes(experiment, store)
        if any(panel.quiet for panel in experiment.panels):
            return _gaps(experiment, store)
        return _rates(experiment, store)


def save(figure: Any, path: Path) -> None:
    """As SVG: the same picture is the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with need_matplotlib().rc_context(_STYLE):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    figure = import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _series(store: Store, panel: Panel, policy: str, figure: str) -> tuple[list[float], list[float]]:
    xs, ys = [], []
    for key in store.points.keys(panel.name, policy):
        points = store.points.at(panel.name, key, policy)
        xs.append(points[0]["rate"])
        ys.append(sum(point[figure] for point in points) / len(points))
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
                axis.plot(
                    *_series(store, panel, policy, name), "o-", ms=2.5, lw=1.2, color=painted[policy], label=policy
                )
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
            values = store.gaps[panel.name][key].get(policy, [])
            if values:
                steps = len(values) - 1
                axis.plot(
                    [1e3 * value for value in values],
                    [index / steps for index in range(steps + 1)],
                    lw=1.3,
                    color=painted[policy],
                    label=policy,
                )
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


def _expansions(experiment: Experiment, store: Store) -> Any | None:
    fixed = [policy for policy in experiment.policies if policy == BASELINE or policy.startswith("pie:")]
    figure, axes = _figure(1, 1, 5.6, 3.2)
    axis, drawn = axes[0][0], False
    for panel, colour in zip(experiment.panels, colours(panel.name for panel in experiment.panels).values()):
        keys = store.points.keys(panel.name, *experiment.policies)
        if not keys:
            continue
        seen = {
            policy: store.points.at(panel.name, keys[-1], policy)[0]["tokens_per_s"] for policy in experiment.policies
        }
        xs = [1.0 if policy == BASELINE else float(policy[4:]) for policy in fixed]
        axis.plot(
            xs, [seen[policy] / seen[BASELINE] for policy in fixed], "o-", ms=3, lw=1.2, color=colour, label=panel.name
        )
        if "pie" in seen:
            axis.axhline(seen["pie"] / seen[BASELINE], color=colour, lw=0.9, ls=":", label="pie, adaptive")
        drawn = True
    if not drawn:
        return None
    axis.set_xlabel("expansion of the KV cache")
    axis.set_ylabel("tokens/s, without expansion = 1")
    axis.legend(frameon=False)
    return figure


def _sizes(experiment: Experiment, store: Store) -> Any | None:
    if not any(store.points.keys(panel.name, *experiment.policies) for panel in experiment.panels):
        return None
    kinds = ("Alpaca", "ShareGPT")
    figure, axes = _figure(1, 2, 7.4, 2.9)
    painted = colours(experiment.policies)
    for axis, kind in zip(axes[0], kinds):
        panels = [panel for panel in experiment.panels if kind in panel.name]
        for policy in experiment.policies:
            xs, ys = [], []
            for panel in panels:
                keys = store.points.keys(panel.name, *experiment.policies)
                if keys:
                    xs.append(panel.kv_bytes / 1e9)
                    ys.append(store.points.at(panel.name, keys[-1], policy)[0]["tokens_per_s"])
            axis.plot(xs, ys, "o-", ms=3, lw=1.2, color=painted[policy], label=policy)
        axis.set_title(f"{kind}, highest rate", loc="left")
        axis.set_xlabel("KV on the device, GB")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("tokens/s")
    _legend(figure, axes[0][0])
    return figure
