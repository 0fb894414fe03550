"""What dropping layers is worth in a burst, over how much KV the burst asks for and how busy it keeps the devices.

python -m bench.lab kunserve-map                  runs what is missing (an hour on one core) and writes page and picture
python -m bench.lab kunserve-map --quick          short runs, two loads, one seed: that it runs
python -m bench.lab kunserve-map --report-only    writes both from what is stored

The loads of Figures 12 and 13, whose runs `bench.lab kunserve` stores, and BurstGPT's prompts with longer answers at lower
rates: they ask for as much KV with less to compute. `ideal` is vLLM with six times the KV: its line waits for computation alone.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.lab import ROOT, seeds
from bench.lab.paper.pictures import save
from bench.lab.seeds import Column, Point

from remap.cli.simulate_plots import STYLE, need_matplotlib
from remap.sim.sequences import Work
from remap.sim.workload import Item

from .figures import FIGURES, SETUPS, Settings, Setup, name_of, rounded
from .twin.results import Sample
from .twin.setup import CLUSTER_A, Hardware
from .twin.systems import SYSTEMS
from .twin.world import World

__all__ = [
    "FULL",
    "PICTURE",
    "QUICK",
    "RESULTS",
    "BurstMap",
    "Place",
    "done",
    "place",
    "places_of",
    "run_burst_map",
    "said",
]

RESULTS = ROOT / "bench" / "results" / "kunserve-map.json"
PICTURE = ROOT / "bench" / "results" / "pictures" / "kunserve-map.svg"
BASE, BOUND = "vllm", "ideal"
TESTS = ("kunserve", "remap", BOUND)
LEAST = 12.7
"""Times lower P99 TTFT: the least that the paper says, with 14B."""
PAPER = (1.0, 1.57)
"""Peak demand, in KV: "a typical burst" accumulates 243 K tokens on a device, which is all that our instances have; and 57 % more
KV was enough for the paper's bursts (sections 2.2 and 5.6)."""


def _longer(longer: float, rate: float) -> Setup:
    return Setup(f"BurstGPT, 14B, answers x{longer:g}, {rate:g}/s", CLUSTER_A, "burstgpt", rate, 130.0, longer=longer)


@dataclass(frozen=True)
class BurstMap:
    """loads: of a burst each. stored: of them, those that `bench.lab kunserve` runs under all systems but the bound."""

    settings: Settings
    loads: tuple[Setup, ...]
    stored: tuple[str, ...] = ()

    def runs(self) -> dict[str, tuple[Setup, str, int, bool]]:
        """What is run here by name, seed by seed."""
        return {
            name_of(load.name, system, seed): (load, system, seed, self.settings.quick)
            for seed in range(self.settings.seeds)
            for load in self.loads
            for system in ((BOUND,) if load.name in self.stored else (BASE, *TESTS))
        }


_PAPERS = FIGURES[0].setups
_LONGER = tuple(_longer(*each) for each in ((4.0, 15.5), (4.0, 16.2), (3.0, 19.5), (2.0, 26.0), (4.0, 18.0)))
FULL = BurstMap(Settings(), (*(SETUPS[name] for name in _PAPERS), *_LONGER), _PAPERS)
QUICK = BurstMap(Settings(seeds=1, quick=True), (_LONGER[0], _LONGER[3]))


def run(load: Setup, system: str, seed: int, quick: bool) -> Point:
    """One run. peak_share: the most KV that was asked for at once, as a share of what vLLM has; work_share: see `done`."""
    items = load.requests(seed, quick)
    result = World(load.hardware, SYSTEMS[system], items).run()
    found = result.figures()
    kv = len(load.hardware.names) * load.hardware.capacity
    kept = (
        "requests",
        "answered",
        "ttft_p50_s",
        "ttft_p99_s",
        "tpot_p50_s",
        "tpot_p99_s",
        "tokens_per_s",
        "preemptions",
    )
    _, (begin, *_), lasts = load.when(quick)
    return rounded(
        {
            **{key: found[key] for key in kept},
            "peak_share": max(one.demand for one in result.samples) / kv,
            "work_share": done(load.hardware, items, result.samples, begin, begin + lasts),
        }
    )


def done(hardware: Hardware, items: Sequence[Item], samples: Sequence[Sample], begin_s: float, end_s: float) -> float:
    """How busy a burst keeps the devices: the work that was done in it, as a share of the instances' time. Each prompt counts as
    if it were alone, each token as a row more of a large batch: what a pass costs anyway, loading weights, is left out."""
    first, last = (min(samples, key=lambda one: abs(one.time_s - time_s)) for time_s in (begin_s, end_s))
    prompts = sum(one.prompt_tokens for one in items)
    prompt_s = math.fsum(hardware.prompt_s(one.prompt_tokens) for one in items) / prompts
    row_s = math.fsum(_row_s(hardware, one) * one.output_tokens for one in items) / sum(
        one.output_tokens for one in items
    )
    seconds = (last.prompts - first.prompts) * prompt_s + (last.generated - first.generated) * row_s
    return seconds / ((last.time_s - first.time_s) * len(hardware.names))


def _row_s(hardware: Hardware, item: Item) -> float:
    """Of one token of its answer."""
    context = item.prompt_tokens + item.output_tokens // 2
    few, many = (hardware.layers_s(hardware.whole.layers, Work(0, 0, rows, rows * context, rows)) for rows in (1, 256))
    return (many - few) / 255


# ---------------------------------------------------------------------------------------------- what is told


@dataclass(frozen=True)
class Place:
    """A load on the map. peak, work: medians of the seeds. base_s: P99 TTFT under vLLM; times: system -> how many times lower it
    is, seed by seed."""

    load: Setup
    peak: float
    work: float
    base_s: list[float]
    times: Mapping[str, list[float]]


def place(points: Mapping[str, Point], load: Setup, settings: Settings) -> Place | None:
    """Of the seeds of which all is there; None if there are none."""
    found = []
    for seed in range(settings.seeds):
        names = {system: name_of(load.name, system, seed) for system in (BASE, *TESTS)}
        if all(name in points for name in names.values()):
            found.append({system: points[name] for system, name in names.items()})
    if not found:
        return None
    return Place(
        load,
        statistics.median(one[BOUND]["peak_share"] for one in found),
        statistics.median(one[BOUND]["work_share"] for one in found),
        [one[BASE]["ttft_p99_s"] for one in found],
        {system: [one[BASE]["ttft_p99_s"] / one[system]["ttft_p99_s"] for one in found] for system in TESTS},
    )


def places_of(points: Mapping[str, Point], chosen: BurstMap = FULL) -> list[Place]:
    """Of all loads of which a seed is whole."""
    return [one for load in chosen.loads if (one := place(points, load, chosen.settings)) is not None]


def table(places: Sequence[Place]) -> str:
    """Markdown: a line for each load."""
    titles = ("load", "n", "peak demand / KV", "busy, %", f"`{BASE}`: P99 TTFT, s")
    out = ["| " + " | ".join([*titles, *(f"/ `{system}`" for system in TESTS)]) + " |"]
    out.append("|" + "---|" * (len(titles) + len(TESTS)))
    for one in places:
        cells = [one.load.name, str(len(one.base_s)), f"{one.peak:.2f}", f"{100 * one.work:.0f}"]
        cells += [seeds.cell(values, Column("", "")) for values in (one.base_s, *one.times.values())]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def picture(places: Sequence[Place]) -> Any:
    """A matplotlib figure: a field for each system, a dot for each load. Raises Missing without matplotlib."""
    plots = need_matplotlib()
    with plots.rc_context({**STYLE, "svg.fonttype": "none", "font.size": 8}):
        figure = import_module("matplotlib.figure").Figure(figsize=(9.2, 3.1), layout="constrained")
        norm = import_module("matplotlib.colors").LogNorm(1, 100)
        axes = figure.subplots(1, len(TESTS), squeeze=False, sharey=True)[0]
        for axis, system in zip(axes, TESTS):
            axis.axvspan(*PAPER, color="#9ca3af", alpha=0.25, lw=0, label="the paper's bursts: any height")
            xs, ys = [one.peak for one in places], [100 * one.work for one in places]
            values = [statistics.median(one.times[system]) for one in places]
            dots = axis.scatter(xs, ys, c=values, cmap="viridis_r", norm=norm, s=46, zorder=3)
            for x, y, value in zip(xs, ys, values):
                axis.annotate(f"{value:.2g}", (x, y), xytext=(6, -3), textcoords="offset points")
            axis.set_title(system, loc="left")
            axis.set_xlabel("peak demand / KV")
            axis.margins(0.18)
        axes[0].set_ylabel("busy in the burst, % of the devices' time")
        axes[0].legend(loc="lower left", frameon=False, fontsize=7)
        bar = figure.colorbar(dots, ax=list(axes), ticks=[1, 3, 10, 30, 100], extend="both")
        bar.ax.set_yticklabels(["1", "3", "10", "30", "100"])
        bar.set_label(f"P99 TTFT, {BASE} / system")
        return figure


PAGE = """# How much sooner first tokens come when layers are dropped: a question of load

P99 time to the first token under vLLM's recomputation (`{base}`), over that of `kunserve` (the paper's policy), `remap` (ours)
and `{bound}` (`{base}` with six times the KV): how many times lower it is. Virtual time, the clusters and requests of
[kunserve.md](kunserve.md): the median of the seeds, (lowest to highest). **n says how many seeds a load has until now, of
{seeds}**: the command goes on where it was stopped, and equal settings give equal figures. Arrivals for 130 s and more, twice as
many for 60 s from 45 s on; one dispatcher, which counts whole lines. "answers x4": BurstGPT's answers, four times as long. Made
by `python -m bench.lab kunserve-map`.

Peak demand: the KV that running requests and the heads of lines hold under `{bound}`, at most, over what `{base}` has. Busy: the
work that `{bound}` does in the burst (each prompt as if alone, each token as a row more of a large batch), over the devices'
time in it.

![The map]({picture})

{table}

{text}

"1 to 1.57 times": a typical burst of the paper "introduces an accumulation of 243 K tokens per GPU", which is all the KV that our
instances have, and dropping 57 % more was enough (sections 2.2 and 5.6).

Not run: other lengths of a burst, longer runs, other dispatchers. A800 and H800 are taken as their tables have them
(`remap plan --machine A800-80GB` prints the sources).
"""
NEAR = """At the loads of Figs 12 and 13 bursts keep the devices {busy} % busy; six times the KV brings {bound} times, so
no memory system could bring 12.7. With longer answers at lower rates, in {reached} of {longer} loads ({peak} times the KV
asked for, {near} % busy), unchanged code brings {kunserve} times (`kunserve`) and {remap} (`remap`), about as much as
`ideal` ({ideal})."""
FAR = """ In the other ({far} % busy) it is {far_kunserve} and {far_remap} where `ideal` has {far_ideal}, and seeds
differ: `kunserve` {seeds}."""
WHERE = """ The paper's bursts ask for 1 to 1.57 times the KV; how busy they keep devices it does not say: by this map, at most
about {most} %."""


def said(places: Sequence[Place]) -> str:
    """What follows, as a paragraph: of loads at which every seed reaches the paper's least, and of the others."""
    of_paper = [one for one in places if one.load.name in _PAPERS]
    longer = [one for one in places if one.load.name not in _PAPERS]
    near = [one for one in longer if min(one.times["kunserve"]) >= LEAST]
    far = [one for one in longer if one not in near]
    if not (of_paper and near):
        return ""
    text = NEAR.format(
        busy=_ends((100 * one.work for one in of_paper), ".0f"),
        bound=_ends(_median_of(of_paper, BOUND)),
        reached=len(near),
        longer=len(longer),
        peak=_ends((one.peak for one in near), ".3g"),
        near=_ends((100 * one.work for one in near), ".0f"),
        **{system: _ends(_median_of(near, system)) for system in TESTS},
    )
    if far:
        text += FAR.format(
            far=_ends((100 * one.work for one in far), ".0f"),
            seeds=_ends(value for one in far for value in one.times["kunserve"]),
            **{f"far_{system}": _ends(_median_of(far, system)) for system in TESTS},
        )
    text += WHERE.format(most=f"{max(100 * one.work for one in near):.0f}")
    return fill(" ".join(text.split()), 120)


def _median_of(places: Sequence[Place], system: str) -> list[float]:
    return [statistics.median(one.times[system]) for one in places]


def _ends(values: Iterable[float], digits: str = ".2g") -> str:
    """ "2 to 4.6"."""
    found = list(values)
    return " to ".join(
        dict.fromkeys(f"{value:{digits if value < 99.5 else '.0f'}}" for value in (min(found), max(found)))
    )


def read(results: Path, chosen: BurstMap) -> tuple[dict[str, Any], dict[str, Point]]:
    """(the file, all points: also those that `bench.lab kunserve` has stored). Raises InvalidArgument (field path) for a file of
    something else."""
    data = seeds.read(results, {"settings": chosen.settings.to_json(), "points": {}}, "kunserve-map")
    points = dict(data["points"])
    if chosen.stored:
        kept = json.loads((ROOT / "bench" / "results" / "kunserve.json").read_text(encoding="utf-8"))
        points = {**kept["points"], **points}
    return data, points


def page(points: Mapping[str, Point], chosen: BurstMap, drawing: str) -> tuple[str, list[Place]]:
    """The whole page of what is stored, and what it is of."""
    places = places_of(points, chosen)
    text = PAGE.format(
        base=BASE, bound=BOUND, seeds=chosen.settings.seeds, picture=drawing, table=table(places), text=said(places)
    )
    return text, places


def run_burst_map(results: Path, drawing: Path, chosen: BurstMap, *, jobs: int = 1, report_only: bool = False) -> str:
    """Run what `results` lacks, and write the page beside it, and the picture. Returns the page. Raises InvalidArgument (field
    path) for a file of something else, before anything runs."""
    data, points = read(results, chosen)
    if not report_only:
        seeds.run_missing(data, chosen.runs(), results, jobs, run)
        points |= data["points"]
    shown = drawing.name if drawing.parent == results.parent else f"{drawing.parent.name}/{drawing.name}"
    text, places = page(points, chosen, shown)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    save(picture(places), drawing)
    return text
