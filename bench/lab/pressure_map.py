"""What weights add beyond KV that is shared and swapped, over pressure, link and the number of models: a table and a picture.

    python -m bench.lab map                  runs what is missing (an hour on two cores) and writes page and picture
    python -m bench.lab map --quick          few requests, two links, one seed: that it runs
    python -m bench.lab map --report-only    writes both from what is stored

`bench.lab regret` samples loads at random; here one thing changes at a time. The models are equal, each has as much memory as
the others, and only the link's rate differs between machines, so a line of the map is what a better link alone would bring.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from remap.policy.hardware import machine
from remap_serve.cli.simulate_plots import STYLE, need_matplotlib
from remap_serve.sim.policies import OURS, UNUSED_KV_AND_SWAP

from . import ROOT, seeds
from .paper.experiments import BASELINE, Panel
from .paper.pictures import save
from .paper.runs import Run, Settings, point, saturation
from .regret import UNNOTICED

__all__ = ["FULL", "PICTURE", "QUICK", "RESULTS", "Grid", "gains", "picture", "run_map"]

RESULTS = ROOT / "bench" / "results" / "map.json"
PICTURE = ROOT / "docs" / "pictures" / "map.svg"
MACHINE = "H100-SXM"
MODEL, EACH = "OPT-6.7b", 0.2
"""Of the device's memory: 17 GB, of which weights take 13.3, activations 0.5 and KV the rest, for 6,000 tokens."""
OTHER = UNUSED_KV_AND_SWAP


@dataclass(frozen=True)
class Grid:
    """models: how many. links: bytes/s in each direction. rates: in c, what `recompute` serves a second when all requests are
    there at once."""

    settings: Settings
    models: tuple[int, ...] = (1, 2, 4)
    links: tuple[float, ...] = (12.5e9, 25e9, 55e9, 450e9)
    rates: tuple[float, ...] = (0.3, 0.6, 1.0, 1.5)

    def panel(self, models: int, link: float) -> Panel:
        tenants = ",".join([f"{MODEL}:{EACH:.1%}"] * models)
        return Panel(f"{models} x {MODEL}, {link / 1e9:g} GB/s", tenants, ("sharegpt",), link_bytes_per_s=link)

    def name(self, models: int, link: float, rate: float, policy: str, seed: int) -> str:
        return f"{self.panel(models, link).name} | {rate:g} c | {policy} | {seed}"


FULL = Grid(Settings(machine=MACHINE, requests=400, seeds=5))
QUICK = Grid(Settings(machine=MACHINE, requests=40, seeds=1, quick=True), (1, 2), (25e9, 450e9), (0.6, 1.0))


def empty(grid: Grid) -> dict[str, Any]:
    return {"settings": grid.settings.to_json(), "c": {}, "points": {}}


def run_missing(data: dict[str, Any], grid: Grid, path: Path, jobs: int) -> None:
    """Run what `data` lacks, and write `path` after each run. `recompute` copies nothing, so it is run with one link."""
    runs = {}
    for models in grid.models:
        if str(models) not in data["c"]:
            data["c"][str(models)] = saturation(grid.panel(models, grid.links[0]), grid.settings)[0]
        for seed in range(grid.settings.seeds):
            for rate in grid.rates:
                for link in grid.links:
                    for policy in (OTHER, OURS, *((BASELINE,) if link == grid.links[0] else ())):
                        run = Run(grid.panel(models, link), policy, f"x{rate:g}", rate * data["c"][str(models)], seed)
                        runs[grid.name(models, link, rate, policy, seed)] = (run, grid.settings)
    seeds.run_missing(data, runs, path, jobs, point)


def gains(data: Mapping[str, Any], grid: Grid, models: int, link: float, rate: float, figure: str) -> list[float]:
    """The alternative's figure over that of the default, seed by seed; of the seeds that were run. 1 where nobody notices the
    difference (`regret.UNNOTICED`)."""
    found = []
    for seed in range(grid.settings.seeds):
        pair = [data["points"].get(grid.name(models, link, rate, policy, seed)) for policy in (OTHER, OURS)]
        if all(pair) and pair[1][figure] > 0.0:
            other, ours = (run[figure] for run in pair)
            found.append(1.0 if abs(other - ours) <= UNNOTICED.get(figure, 0.0) else other / ours)
    return found


def _times(values: list[float]) -> str:
    if not values:
        return "–"
    middle, low, high = (f"{value:.2g}" for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _preempted(data: Mapping[str, Any], grid: Grid, models: int, rate: float) -> float:
    """Preemptions of `recompute`, per request: the median of the seeds."""
    names = [grid.name(models, grid.links[0], rate, BASELINE, seed) for seed in range(grid.settings.seeds)]
    found = [data["points"][name]["preemptions"] for name in names if name in data["points"]]
    return statistics.median(found) / grid.settings.requests if found else math.nan


def table(data: Mapping[str, Any], grid: Grid, figure: str) -> str:
    """Markdown: a line for each number of models and link, a column for each rate."""
    columns = [f"{rate:g} c" for rate in grid.rates]
    out = ["| models | link, GB/s | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for models in grid.models:
        pressure = [f"{_preempted(data, grid, models, rate):.2g}" for rate in grid.rates]
        out.append(f"| {models} | preempted by `{BASELINE}`, per request | " + " | ".join(pressure) + " |")
        for link in grid.links:
            cells = [_times(gains(data, grid, models, link, rate, figure)) for rate in grid.rates]
            out.append(f"| {models} | {link / 1e9:g} | " + " | ".join(cells) + " |")
    return "\n".join(out)


def picture(data: Mapping[str, Any], grid: Grid) -> Any:
    """A matplotlib figure: one field for each number of models; as many times sooner as P99 first tokens come. Raises Missing
    without matplotlib."""
    plots = need_matplotlib()
    with plots.rc_context({**STYLE, "svg.fonttype": "none", "font.size": 8, "axes.grid": False}):
        figure = import_module("matplotlib.figure").Figure(
            figsize=(2.7 * len(grid.models) + 0.9, 2.9), layout="constrained"
        )
        norm = import_module("matplotlib.colors").LogNorm(0.1, 10)
        axes = figure.subplots(1, len(grid.models), squeeze=False, sharey=True)[0]
        for axis, models in zip(axes, grid.models):
            values = [
                [
                    statistics.median(gains(data, grid, models, link, rate, "ttft_p99_s") or [math.nan])
                    for rate in grid.rates
                ]
                for link in grid.links
            ]
            image = axis.imshow(values, cmap="RdBu", norm=norm, origin="lower", aspect="auto")
            for row, line in enumerate(values):
                for column, value in enumerate(line):
                    shown = "–" if math.isnan(value) else f"{value:.2g}"
                    strong = not math.isnan(value) and not 0.25 < value < 4
                    axis.text(column, row, shown, ha="center", va="center", color="white" if strong else "#111827")
            axis.set_xticks(range(len(grid.rates)), [f"{rate:g}" for rate in grid.rates])
            axis.set_xlabel("rate, in c")
            axis.set_title(f"{models} model{'s' if models > 1 else ''}", loc="left")
            axis.spines[:].set_visible(False)
            axis.tick_params(length=0)
        bandwidth = machine(MACHINE).hbm_bytes_per_s
        axes[0].set_yticks(
            range(len(grid.links)), [f"{link / 1e9:g}  (1:{bandwidth / link:.0f})" for link in grid.links]
        )
        axes[0].set_ylabel("link, GB/s (to memory bandwidth)")
        bar = figure.colorbar(image, ax=list(axes), ticks=[0.1, 0.3, 1, 3, 10], extend="both")
        bar.ax.set_yticklabels(["0.1", "0.3", "1", "3", "10"])
        bar.set_label(f"P99 TTFT, {OTHER} / {OURS}")
        return figure


PAGE = """# What weights add, and where nothing

How many times sooner the P99 first token comes with `{ours}` than with `{other}`, the strongest alternative that leaves
weights where they are (KV shared between models, and in host memory): 1 is no gain. Virtual time, {requests} requests, {seeds}
seeds: the median, (lowest to highest). An {machine} whose link alone was changed; one, two or four times {model}, each with
17 GB, in turns of 1 s; bursts of the Azure code trace, ShareGPT lengths. c is the rate that `recompute` is saturated at. Made by
`python -m bench.lab map`.

![The map](../../docs/pictures/map.svg)

One model alone: nothing over links of up to 55 GB/s, where a layer takes too long to stream beside passes of a few requests, and
1.9 to 2.8 times at 450 GB/s. Two models: 3.9 to 15 times from 25 GB/s on. Four models: nothing in the median; the KV that three
of them do not use is enough. Bad: **with two models and 12.5 GB/s P99 TPOT is up to 7.7 times as long and tokens/s are up to
6 % fewer**, since what each turn copies back takes half of it; at 25 GB/s and 0.6 c or more it is 2.2 to 5 times as long.

The model was chosen: with Llama-3-8b, whose KV takes a quarter as much a token, two and four models had too little pressure for
any policy to differ, and that map was not kept.

## P99 time to the first token, {other} / {ours}

{ttft}

## P99 TPOT (a request's mean time of a token after the first), {other} / {ours}

Above 1 `{ours}` is quicker here as well; below 1 more requests run at once, and each is slower.

{tpot}

## Tokens per second, {ours} / {other}

{tokens}
"""


def run_map(results: Path, drawing: Path, grid: Grid, *, jobs: int = 1, report_only: bool = False) -> str:
    """Run what `results` lacks, and write the page beside it, and the picture. Returns the page. Raises InvalidArgument (field
    path) for a file of something else, before anything runs."""
    data = seeds.read(results, empty(grid), "map")
    if not report_only:
        run_missing(data, grid, results, jobs)
    text = PAGE.format(
        ours=OURS,
        other=OTHER,
        machine=MACHINE,
        model=MODEL,
        requests=grid.settings.requests,
        seeds=grid.settings.seeds,
        ttft=table(data, grid, "ttft_p99_s"),
        tpot=table(data, grid, "tpot_p99_s"),
        tokens=table(data, grid, "virtual_s"),
    )
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    save(picture(data, grid), drawing)
    return text
