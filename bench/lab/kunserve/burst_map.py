"""What dropping layers is worth in a burst, over how much KV the burst asks for and how busy it keeps the devices.

python -m bench.lab kunserve-map                  runs what is missing (90 minutes on one core), writes page and picture
python -m bench.lab kunserve-map --quick          short runs, two loads, one seed: that it runs
python -m bench.lab kunserve-map --report-only    writes both from what is stored

The loads of Figures 12 and 13, whose runs `bench.lab kunserve` stores, and BurstGPT's prompts with longer answers at lower
rates: they ask for as much KV with less to compute. `ideal` is vLLM with six times the KV: its line waits for computation alone.
Then bursts of other lengths, other dispatchers, groups that merge by a forecast (`remap_serve.policy.cluster.foresight`), and an
autoscaler, which is told what dropping cannot free. `burst_page` says what comes of it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.lab import ROOT, seeds
from bench.lab.seeds import Column, Point

from remap_serve.cli.simulate_plots import STYLE, need_matplotlib
from remap_serve.policy.cluster.drop import plan
from remap_serve.policy.cluster.placement import UNLIMITED, Instance, alone
from remap_serve.sim.sequences import Work
from remap_serve.sim.workload import Item

from .figures import FIGURES, SETUPS, Settings, Setup, name_of, rounded
from .twin.loads import BURSTS
from .twin.results import Sample
from .twin.setup import CLUSTER_A, Hardware
from .twin.systems import SYSTEMS
from .twin.world import World

__all__ = [
    "BASE",
    "BOUND",
    "CLAIMED",
    "FULL",
    "PAPERS",
    "PICTURE",
    "QUICK",
    "RESULTS",
    "TESTS",
    "BurstMap",
    "Place",
    "claimed_at",
    "compared_table",
    "done",
    "little",
    "most_share",
    "picture",
    "place",
    "places_of",
    "read",
    "run",
    "table",
]

RESULTS = ROOT / "bench" / "results" / "kunserve-map.json"
PICTURE = ROOT / "bench" / "results" / "pictures" / "kunserve-map.svg"
BASE, BOUND = "vllm", "ideal"
TESTS = ("kunserve", "remap", BOUND)
COLUMNS = (
    Column("ttft_p50_s", "TTFT P50, s"),
    Column("ttft_p99_s", "P99"),
    Column("tpot_p50_s", "TPOT P50, ms", 1e3),
    Column("tpot_p99_s", "P99", 1e3),
    Column("preemptions", "preemptions"),
)
COMPARED = (BASE, "kunserve", "kunserve-ahead", "remap", "remap-ahead", BOUND)
CLAIMED = (12.7, 72.2)
"""Times lower P99 TTFT: the least and the most that the paper says, with 14B."""
PAPER = (1.0, 1.57)
"""Peak demand, in KV: "a typical burst" accumulates 243 K tokens on a device, which is all that our instances have; and 57 % more
KV was enough for the paper's bursts (sections 2.2 and 5.6)."""


def _longer(longer: float, rate: float) -> Setup:
    return Setup(f"BurstGPT, 14B, answers x{longer:g}, {rate:g}/s", CLUSTER_A, "burstgpt", rate, 130.0, longer=longer)


@dataclass(frozen=True)
class BurstMap:
    """loads: of a burst each. stored: of them, those that `bench.lab kunserve` runs under all systems but the bound. shapes: with
    bursts of other lengths; dispatched: with other dispatchers. compared: loads, and the systems that are run there besides."""

    settings: Settings
    loads: tuple[Setup, ...]
    stored: tuple[str, ...] = ()
    shapes: tuple[Setup, ...] = ()
    dispatched: tuple[Setup, ...] = ()
    compared: tuple[tuple[Setup, tuple[str, ...]], ...] = ()

    def runs(self) -> dict[str, tuple[Setup, str, int, bool]]:
        """What is run here by name, seed by seed."""
        all_of = [(load, (BOUND,) if load.name in self.stored else (BASE, *TESTS)) for load in self.loads]
        all_of += [(load, (BASE, *TESTS)) for load in (*self.dispatched, *self.shapes)]
        return {
            name_of(load.name, system, seed): (load, system, seed, self.settings.quick)
            for seed in range(self.settings.seeds)
            for load, systems in (*all_of, *self.compared)
            for system in systems
        }


PAPERS = FIGURES[0].setups
"""Loads of Figures 12 and 13."""
_LONGER = tuple(_longer(*each) for each in ((4.0, 15.5), (4.0, 16.2), (3.0, 19.5), (2.0, 26.0), (4.0, 18.0)))
_MIDDLE = _LONGER[1]


def _paper_long(load: Setup) -> Setup:
    return replace(load, name=f"{load.name}, 640 s, two bursts", seconds=640.0, at=BURSTS)


_SHAPES = (
    replace(_MIDDLE, name=f"{_MIDDLE.name}, 10 s", burst_s=10.0),
    replace(_MIDDLE, name=f"{_MIDDLE.name}, 7 times for 10 s", burst_s=10.0, times=7.0),
    replace(_MIDDLE, name=f"{_MIDDLE.name}, 3 times for 30 s", burst_s=30.0, times=3.0),
    replace(_MIDDLE, name=f"{_MIDDLE.name}, 130 s", burst_s=130.0, seconds=200.0),
    *map(_paper_long, (_MIDDLE, _longer(4.0, 13.5), _longer(4.0, 14.0))),
)
"""Bursts of other lengths; two of them bring as many requests as 60 s of twice as many. And the paper's time, with its two, also
at rates at which the KV is not short but in bursts: at 16.2/s it is from 200 s on."""
_DISPATCHED = (
    replace(_MIDDLE, name=f"{_MIDDLE.name}, by demand", dispatcher="demand"),
    replace(_MIDDLE, name=f"{_MIDDLE.name}, in turn", dispatcher="turns"),
)
_LONG = _SHAPES[3]
_SCALED = replace(_LONG, name=f"{_LONG.name}, more instances after 30 s", cold_s=30.0)
_AHEAD = ("kunserve-ahead", "remap-ahead")
_COMPARED = (
    (_LONGER[3], _AHEAD),
    (_LONGER[4], _AHEAD),
    (SETUPS[PAPERS[0]], _AHEAD[1:]),
    (SETUPS[PAPERS[2]], _AHEAD[1:]),
    (_LONG, _AHEAD[1:]),
    (_SCALED, (BASE, _AHEAD[1])),
)
FULL = BurstMap(Settings(), (*(SETUPS[name] for name in PAPERS), *_LONGER), PAPERS, _SHAPES, _DISPATCHED, _COMPARED)
QUICK = BurstMap(Settings(seeds=1, quick=True), (_LONGER[0], _LONGER[3]))


def run(load: Setup, system: str, seed: int, quick: bool) -> Point:
    """One run. peak_share: the most KV that was asked for at once, as a share of what vLLM has; work_share: see `done`."""
    items = load.requests(seed, quick)
    result = World(load.hardware, SYSTEMS[system], items, dispatcher=load.dispatcher, cold_s=load.cold_s).run()
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


def places_of(
    points: Mapping[str, Point], chosen: BurstMap = FULL, loads: Sequence[Setup] | None = None
) -> list[Place]:
    """Of those of these loads of which a seed is whole; of the map's own, if none are named."""
    named = chosen.loads if loads is None else loads
    return [one for load in named if (one := place(points, load, chosen.settings)) is not None]


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


def compared_table(points: Mapping[str, Point], chosen: BurstMap) -> str:
    """Markdown: what a forecast changes, with the gap between tokens beside the first one. A line for each load and system."""
    titles = ("load", "system", "n", *(one.title for one in COLUMNS))
    out = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for load, _ in chosen.compared:
        for system in COMPARED:
            names = [name_of(load.name, system, seed) for seed in range(chosen.settings.seeds)]
            found = [points[name] for name in names if name in points]
            if found:
                cells = [seeds.cell([point[one.key] for point in found], one) for one in COLUMNS]
                out.append("| " + " | ".join([load.name, f"`{system}`", str(len(found)), *cells]) + " |")
    return "\n".join(out)


def picture(places: Sequence[Place], shapes: Sequence[Place] = ()) -> Any:
    """A matplotlib figure: a field for each system, a dot for each load, a diamond for each other shape of a burst. A box where
    the paper's point lies: its demand, and as busy as loads are where the paper's policy has its ratio here. Raises Missing
    without matplotlib."""
    plots = need_matplotlib()
    with plots.rc_context({**STYLE, "svg.fonttype": "none", "font.size": 8}):
        figure = import_module("matplotlib.figure").Figure(figsize=(9.2, 3.4), layout="constrained")
        norm = import_module("matplotlib.colors").LogNorm(1, 100)
        axes = figure.subplots(1, len(TESTS), squeeze=False, sharey=True)[0]
        busy = [100 * height for height in claimed_at((*places, *shapes))]
        for axis, system in zip(axes, TESTS):
            if busy:
                low, high = min(busy) - 1.0, max(busy) + 1.0
                axis.fill_between(
                    PAPER, low, high, color="#9ca3af", alpha=0.3, lw=0, label="the paper: its demand, its ratio"
                )
            for found, marker in ((places, "o"), (shapes, "D")):
                if not found:
                    continue
                xs, ys = [one.peak for one in found], [100 * one.work for one in found]
                values = [statistics.median(one.times[system]) for one in found]
                dots = axis.scatter(xs, ys, c=values, cmap="viridis_r", norm=norm, s=42, marker=marker, zorder=3)
                for x, y, value in zip(xs, ys, values):
                    axis.annotate(
                        f"{value:.2g}" if value < 99.5 else f"{value:.0f}",
                        (x, y),
                        xytext=(6, -3),
                        textcoords="offset points",
                    )
            axis.set_title(system, loc="left")
            axis.set_xlabel("peak demand / KV")
            axis.margins(0.18)
        axes[0].set_ylabel("busy in the burst, % of the devices' time")
        if busy:
            axes[0].legend(loc="lower right", frameon=False, fontsize=7)
        bar = figure.colorbar(dots, ax=list(axes), ticks=[1, 3, 10, 30, 100], extend="both")
        bar.ax.set_yticklabels(["1", "3", "10", "30", "100"])
        bar.set_label(f"P99 TTFT, {BASE} / system")
        return figure


def claimed_at(places: Sequence[Place]) -> list[float]:
    """How busy the loads are, as a share, at which the paper's policy has a ratio within the paper's range, and that ask for as
    much KV as its bursts."""
    return [
        one.work
        for one in places
        if CLAIMED[0] <= statistics.median(one.times["kunserve"]) <= CLAIMED[1] and PAPER[0] <= one.peak <= PAPER[1]
    ]


def most_share(hardware: Hardware) -> float:
    """The KV that all instances have at most, whichever merge, as a share of what they have alone."""
    whole = alone(hardware.model, tuple(Instance(name, hardware.memory_bytes) for name in hardware.names))
    freed = plan(whole, UNLIMITED, hardware.network).freed
    return 1.0 + freed / (len(hardware.names) * hardware.capacity)


def little(setup: Setup = SETUPS[PAPERS[0]], stay_s: float = 11.0, spare: float = 2.1) -> tuple[float, float]:
    """What the paper's own numbers would ask of its devices, by Little's law: (requests a second, how busy they would be, as a
    share). Section 2.2: a request stays for 11 s, and there is 2.1 times as much KV as is asked for in the mean. A request
    holds its prompt and half of its answer, in the mean, or more."""
    hardware, items = setup.hardware, setup.requests(0)
    count = len(items)
    held = math.fsum(one.prompt_tokens + one.output_tokens / 2 for one in items) / count
    rate = len(hardware.names) * hardware.capacity / spare / (stay_s * held)
    work_s = math.fsum(
        hardware.prompt_s(one.prompt_tokens) + _row_s(hardware, one) * one.output_tokens for one in items
    )
    return rate, rate * work_s / count / len(hardware.names)


def read(results: Path, chosen: BurstMap) -> tuple[dict[str, Any], dict[str, Point]]:
    """(the file, all points: also those that `bench.lab kunserve` has stored). Raises InvalidArgument (field path) for a file of
    something else."""
    data = seeds.read(results, {"settings": chosen.settings.to_json(), "points": {}}, "kunserve-map")
    points = dict(data["points"])
    if chosen.stored:
        kept = json.loads((ROOT / "bench" / "results" / "kunserve.json").read_text(encoding="utf-8"))
        points = {**kept["points"], **points}
    return data, points
