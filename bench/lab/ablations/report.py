"""What the ablations' numbers say: medians and ranges, the paper's figure beside ours, markdown, JSON and charts.

Nothing here decides what looks good. Two sides differ if the ranges of their runs do not overlap; otherwise the report says
that no difference was shown, whatever the medians are.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from remap.errors import InvalidState
from remap_serve.cli.demo_report import NOISE, format_seconds

from .questions import Ablation, Claim
from .serving import AblationRun, Settings

__all__ = ["Comparison", "chart", "compare", "markdown", "to_json", "verdict", "write"]

METRICS = {
    "tokens_per_s": "tokens/s",
    "ttft_p50_s": "TTFT P50",
    "ttft_p99_s": "TTFT P99",
    "tbt_p50_s": "TBT P50",
    "tbt_mean_s": "TBT mean",
    "tbt_p99_s": "TBT P99",
    "quiet_tbt_p50_s": "off-peak TBT P50",
    "quiet_tbt_p99_s": "off-peak TBT P99",
    "preemptions": "preemptions",
    "recomputed_tokens": "tokens recomputed",
    "stall_share": "stall share",
    "layers_remapped_peak": "layers away, all models (peak)",
    "lent_pages_peak": "pages lent to another model (peak)",
    "kv_blocks_peak": "KV blocks, all models (peak)",
    "kv_growth_peak": "KV blocks of one model, peak / start",
    "activation_p50_s": "activation to first pass P50",
    "activation_p99_s": "activation to first pass P99",
}
"""Metric -> its name in tables, in their order. TTFT: arrival to first token, queueing included; TBT: between two tokens."""


@dataclass(frozen=True)
class Comparison:
    """One metric of two sides. change: of medians, relative; None where the base's median is 0. shown: the ranges of the runs do
    not overlap.
    """

    metric: str
    base: float
    test: float
    change: float | None
    shown: bool


def values(run: AblationRun, side: str, metric: str) -> list[float]:
    """One value a run; none if the metric was not measured."""
    return [sample[metric] for sample in run.samples[side] if metric in sample]


def compare(run: AblationRun, metric: str, base: str, test: str) -> Comparison:
    """The metric of side `test` against side `base`."""
    one, other = values(run, base, metric), values(run, test, metric)
    before, after = statistics.median(one), statistics.median(other)
    apart = max(one) < min(other) or max(other) < min(one)
    return Comparison(metric, before, after, after / before - 1 if before else None, apart)


def show(metric: str, value: float) -> str:
    """A value with three significant digits, and its unit."""
    if metric.endswith("_s") and metric != "tokens_per_s":
        return format_seconds(value)
    if metric == "stall_share":
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def verdict(run: AblationRun, claim: Claim) -> str:
    """One sentence: what the paper says, what we measured, and where that differs."""
    seen = compare(run, claim.metric, claim.base, claim.test)
    name, runs = METRICS[claim.metric], len(run.samples[claim.test])
    said = f"{claim.change:+.0%}" if claim.change is not None else ("more" if claim.sign > 0 else "less")
    ours = f"{show(claim.metric, seen.base)} to {show(claim.metric, seen.test)}"
    if seen.change is not None:
        ours = f"{seen.change:+.0%} ({ours})"
    text = f"{name}, {claim.test} against {claim.base}: {said} in {claim.where}; here {ours}"
    if not seen.shown:
        return f"{text}: the runs overlap, {runs} of each side show no difference."
    if seen.change is not None and abs(seen.change) < NOISE:
        return f"{text}: unchanged within {NOISE:.0%}."
    moved = seen.test - seen.base
    if moved * claim.direction < 0:
        return f"{text}: the other way round."
    return f"{text}: the same direction."


def _sides(ablation: Ablation) -> list[str]:
    return [side.name for side in ablation.sides]


def table(run: AblationRun) -> str:
    """Markdown: a row a metric, median and range of each side, and the change from the first side."""
    sides = _sides(run.ablation)
    rows = [
        "| | " + " | ".join(sides) + " | " + " | ".join(f"{side} / {sides[0]}" for side in sides[1:]) + " |",
        "|---|" + "---:|" * (2 * len(sides) - 1),
    ]
    for metric, name in METRICS.items():
        if not values(run, sides[0], metric) or not any(max(values(run, side, metric)) for side in sides):
            continue
        cells = []
        for side in sides:
            seen = values(run, side, metric)
            median, low, high = (show(metric, f(seen)) for f in (statistics.median, min, max))
            cells.append(median if low == high else f"{median} ({low} to {high})")
        for side in sides[1:]:
            found = compare(run, metric, sides[0], side)
            ratio = "" if found.change is None else f"{found.change + 1:.2f}"
            cells.append(ratio if found.shown or not ratio else f"{ratio} (overlap)")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def section(run: AblationRun, has_chart: bool) -> str:
    """One ablation's part of the report."""
    ablation, count = run.ablation, len(next(iter(run.samples.values())))
    same = (
        f"the tokens of all {run.requests * count * len(run.samples)} requests are those of the unconstrained run"
        if not run.different
        else f"THE TOKENS OF {run.different} REQUESTS DIFFER from the unconstrained run's"
    )
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in run.copy_to_compute.items())
    copies = f" Seconds to copy a layer over seconds to compute it: {ratios}." if ratios else ""
    lines = [
        f"## {ablation.name}",
        "",
        ablation.question,
        "",
        f"{run.requests} requests at {run.rate:.2f}/s ({run.arrivals['cv']:.1f} coefficient of variation of the gaps), "
        f"{ablation.mode}, n = {count} runs of each side, alternating; medians (range); {same}.{copies}",
        "",
        table(run),
        "",
        *(f"- {verdict(run, claim)}" for claim in ablation.claims),
    ]
    if has_chart:
        lines += ["", f"![{ablation.name}]({ablation.name}.png)"]
    return "\n".join(lines)


def markdown(found: Sequence[AblationRun], machine: dict[str, Any], settings: Settings, charts: bool) -> str:
    """The whole report."""
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    how = f"{settings.runs} runs of each side, arrivals during {settings.seconds:g} s, KV {settings.kv_share:.0%} of weights"
    by_chance = 2 / math.comb(2 * settings.runs, settings.runs)
    small = " Small models: directions mean something, sizes do not." if settings.quick else ""
    head = [
        "# Ablations",
        "",
        f"`python -m bench.lab ablations`: {how}. Machine: {about}.{small}",
        "",
        "Percentages of the paper are Oneiros' (GH200, OPT-13b and others); ours are a processor's, of other models and loads: "
        "directions can be compared, sizes cannot. Where the ranges of runs "
        f"overlap, no difference is claimed; those of two equal sides miss each other in {by_chance:.0%} of all cases.",
    ]
    return "\n\n".join(["\n".join(head), *(section(run, charts) for run in found)]) + "\n"


def to_json(found: Sequence[AblationRun], machine: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Everything that was measured, but the single gaps and timelines."""
    entries = []
    for run in found:
        comparisons = [
            {
                **asdict(claim),
                "ours": asdict(compare(run, claim.metric, claim.base, claim.test)),
                "sentence": verdict(run, claim),
            }
            for claim in run.ablation.claims
        ]
        entries.append(
            {
                "name": run.ablation.name,
                "question": run.ablation.question,
                "mode": run.ablation.mode,
                "rate": run.rate,
                "requests": run.requests,
                "arrivals": dict(run.arrivals),
                "tokens_identical": run.different == 0,
                "copy_to_compute": dict(run.copy_to_compute),
                "sides": {
                    side.name: {
                        "controller": None if side.wiring.controller is None else dict(side.wiring.controller),
                        "by_hand": side.wiring.by_hand,
                        "runs": run.samples[side.name],
                    }
                    for side in run.ablation.sides
                },
                "claims": comparisons,
            }
        )
    return {"machine": machine, "settings": asdict(settings), "ablations": entries}


def chart(run: AblationRun, path: Path) -> None:
    """A PNG: the claimed metrics as bars of medians with a dot a run, the gaps between tokens as a distribution, and the KV
    blocks over time. Raises InvalidState without matplotlib.
    """
    try:
        figure_class = import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise InvalidState("charts need matplotlib; nothing was drawn; pip install matplotlib") from error
    sides = _sides(run.ablation)
    colours = dict(zip(sides, ("#a5581b", "#1466b8", "#12714a"), strict=False))
    metrics = list(dict.fromkeys(claim.metric for claim in run.ablation.claims))
    figure = figure_class(figsize=(3.0 * (len(metrics) + 2), 3.2), layout="constrained")
    axes = figure.subplots(1, len(metrics) + 2)
    for axis, metric in zip(axes, metrics, strict=False):
        for place, side in enumerate(sides):
            seen = values(run, side, metric)
            axis.bar(place, statistics.median(seen), color=colours[side], alpha=0.55, width=0.6)
            axis.plot([place] * len(seen), seen, "o", color=colours[side], markersize=4)
        axis.set_xticks(range(len(sides)), sides)
        axis.set_title(
            METRICS[metric] + (" (s)" if metric.endswith("_s") and metric != "tokens_per_s" else ""), fontsize=9
        )
        axis.set_ylim(bottom=0)
    for side in sides:
        gaps = sorted(run.gaps[side])
        shares = [(index + 1) / len(gaps) for index in range(len(gaps))]
        axes[-2].plot(gaps, shares, color=colours[side], label=side)
        axes[-1].step(*zip(*run.timelines[side], strict=True), where="post", color=colours[side], label=side)
    axes[-2].set_xscale("log")
    axes[-2].set_title("gaps between tokens (s), share below", fontsize=9)
    axes[-1].set_title("KV blocks over time (s), last run", fontsize=9)
    axes[-1].legend(fontsize=7)
    for axis in axes:
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(run.ablation.question, fontsize=9)
    figure.savefig(path, dpi=140)


def write(found: Sequence[AblationRun], machine: dict[str, Any], settings: Settings, folder: Path) -> list[Path]:
    """ablations.md, ablations.json and, with matplotlib, a PNG for each, in `folder`, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    charts = True
    for run in found:
        try:
            chart(run, folder / f"{run.ablation.name}.png")
        except InvalidState:
            charts = False
            break
        written.append(folder / f"{run.ablation.name}.png")
    report, data = folder / "ablations.md", folder / "ablations.json"
    report.write_text(markdown(found, machine, settings, charts), encoding="utf-8")
    data.write_text(json.dumps(to_json(found, machine, settings), indent=2) + "\n", encoding="utf-8")
    return [report, data, *written]
