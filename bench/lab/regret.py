"""Regret: how far a policy is behind the best of all policies on a load, over many loads. And what weights add, as a map.

    python -m bench.lab regret --loads 12     runs what is missing of 12 loads (half an hour on two cores) and writes the page
    python -m bench.lab regret --quick        few requests, four loads, one seed: minutes

A load is a machine, models that share a part of its memory evenly, a length of requests and a rate, as a share of c, what
`recompute` serves a second when all requests are there at once. All combinations are in one order at random, which never changes.
Counted are those in which requests wait for memory, by two policies that are nobody's choice: the P99 first token of `recompute`
is late, and at least twice as late as that of `ideal`. The first N of them are a sample, and N may grow.

Regret of a figure: by how much of the best policy's a policy's is worse, seed by seed; the median over the seeds is the load's.
Differences below `UNNOTICED` count as none: 40 ms until the first token instead of 30 are no regret of a third.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remap.errors import InvalidArgument
from remap.policy.hardware import machine
from remap_serve.sim.policies import OURS, SLEEP_AND_SWAP, UNUSED_KV, UNUSED_KV_AND_SWAP, WEIGHTS_ONLY
from remap_serve.sim.setup import evenly

from . import ROOT, cells, seeds
from .cells import ONE_AT_A_TIME, WHOLE, in_epochs
from .paper.experiments import BASELINE, IDEAL, Panel
from .paper.runs import Run, Settings, saturation

__all__ = ["LOADS", "POLICIES", "QUICK", "RESULTS", "SETTINGS", "Load", "counted", "regrets", "run_regret"]

MACHINES = ("GH200-96GB", "H100-SXM", "H100-PCIe", "RTX-4090", "A100")
MODELS: Mapping[str, tuple[str, ...]] = {
    "one 13B": ("Llama-2-13b",),
    "one 4B": ("Qwen3-4B",),
    "13B and 8B": ("OPT-13b", "Llama-3-8b"),
    "two 13B and 8B": ("OPT-13b", "Llama-2-13b", "Llama-3-8b"),
    "five 4B": ("Qwen3-4B",) * 5,
}
MEMORY = (0.3, 0.5, 0.7, 0.95)
RATES = (0.3, 0.6, 0.9, 1.2)
LENGTHS = ("sharegpt", "long", "alpaca")
BOUND = WHOLE
"""Never the best."""
POLICIES = (
    *(BASELINE, "swap", "pie", UNUSED_KV, UNUSED_KV_AND_SWAP),
    *(WEIGHTS_ONLY, f"{WEIGHTS_ONLY}+swap", f"{WEIGHTS_ONLY}+pool", OURS),
    *(SLEEP_AND_SWAP, BOUND),
)
LATE_S = 2.0
LOOKS = 12
"""At most so many loads are looked at for each one that is counted."""
OF = (OURS, WEIGHTS_ONLY)
"""Whose regret is told: the default's, which has all donors, and that of weights alone."""
SETTINGS = Settings(requests=400, seeds=5)
QUICK = Settings(requests=60, seeds=1, quick=True)
RESULTS = ROOT / "bench" / "results" / "regret.json"

FIGURES: Mapping[str, bool] = {
    "ttft_p99_s": False,
    "longest_gap_p99_s": False,
    "tpot_p99_s": False,
    "tbt_p99_s": False,
    "tbt_mean_s": False,
    "tokens_per_s": True,
    "goodput_per_s": True,
}
"""Whether more is better."""
TITLES = (
    "TTFT P99",
    "longest gap of a request P99",
    "TPOT P99",
    "gap between tokens P99",
    "gap, mean",
    "tokens/s",
    "goodput",
)
UNNOTICED: Mapping[str, float] = {
    "ttft_p99_s": 0.05,
    "longest_gap_p99_s": 0.05,
    "tpot_p99_s": 0.005,
    "tbt_p99_s": 0.005,
    "tbt_mean_s": 0.005,
}
"""Seconds."""


@dataclass(frozen=True)
class Load:
    """models: a name of `MODELS`. memory: share of the device's. rate: in c."""

    machine: str
    models: str
    memory: float
    lengths: str
    rate: float

    @property
    def place(self) -> str:
        """All of it but the rate: what c belongs to."""
        return f"{self.machine} | {self.models} | {self.memory:.0%} | {self.lengths}"

    def name(self, policy: str, seed: int) -> str:
        return f"{self.place} | {self.rate:g} c | {policy} | {seed}"

    @property
    def policies(self) -> tuple[str, ...]:
        """Those that it is run with."""
        several = len(MODELS[self.models]) > 1
        return POLICIES if several else tuple(one for one in POLICIES if one not in ONE_AT_A_TIME)

    def panel(self, policy: str = BASELINE) -> Panel:
        """Raises InvalidArgument (fields requested, available) for weights that leave no KV."""
        on = machine(self.machine)
        tenants = evenly(MODELS[self.models], on, int(self.memory * on.hbm_bytes))
        text = ",".join(f"{one.name}={one.model.name}:{one.memory_bytes}B" for one in tenants)
        requests = 3.0 if self.lengths == "alpaca" else 1.0
        return in_epochs(Panel(self.place, text, (self.lengths,), factors=(), requests=requests), policy)


def _fits(load: Load) -> bool:
    """Whether the weights leave KV for the longest request of each model: else it is a load that no policy serves."""
    on = machine(load.machine)
    try:
        tenants = evenly(MODELS[load.models], on, int(load.memory * on.hbm_bytes))
    except InvalidArgument:
        return False
    tokens = [
        (one.memory_bytes - one.model.weight_bytes - 500_000_000) // one.model.kv_bytes_per_token for one in tenants
    ]
    return min(tokens) >= min(2048, *(one.model.context for one in tenants))


def _in_order() -> tuple[Load, ...]:
    loads = [Load(*one) for one in itertools.product(MACHINES, MODELS, MEMORY, LENGTHS, RATES)]
    random.Random(0).shuffle(loads)
    return tuple(load for load in loads if _fits(load))


LOADS = _in_order()


def empty(settings: Settings) -> dict[str, Any]:
    made_with = {name: value for name, value in settings.to_json().items() if name != "machine"}
    return {"settings": made_with, "c": {}, "points": {}}


def figures_of(run: Run, settings: Settings) -> dict[str, float]:
    """Those of `FIGURES`, and preemptions."""
    found = cells.figures_of(run, settings)
    return {name: found[name] for name in (*FIGURES, "preemptions")}


def _run(
    data: dict[str, Any],
    settings: Settings,
    path: Path,
    jobs: int,
    wanted: Sequence[tuple[Load, Sequence[str], Sequence[int]]],
) -> None:
    """Run what `data` lacks of these (load, policies, seeds), and write `path` after each run."""
    runs = {}
    for load, policies, numbers in wanted:
        there = replace(settings, machine=load.machine)
        if load.place not in data["c"]:
            data["c"][load.place] = saturation(load.panel(), there)[0]
        rate = load.rate * data["c"][load.place]
        for seed in numbers:
            for policy in policies:
                run = Run(load.panel(policy), policy, f"x{load.rate:g}", rate, seed)
                runs[load.name(policy, seed)] = (run, there)
    seeds.run_missing(data, runs, path, jobs, figures_of)


def waits(points: seeds.Points, load: Load) -> bool | None:
    """Whether requests wait for memory, by the first seed; None: not known yet."""
    late, ideal = (points.get(load.name(policy, 0)) for policy in (BASELINE, IDEAL))
    if late is None or ideal is None:
        return None
    return late["ttft_p99_s"] > max(LATE_S, 2 * ideal["ttft_p99_s"])


def counted(points: seeds.Points, loads: Sequence[Load], number: int) -> tuple[list[Load], int]:
    """(at most the first `number` loads in which requests wait for memory, of the first so many that were looked at)."""
    found: list[Load] = []
    for looked, load in enumerate(loads):
        there = waits(points, load)
        if there is None or len(found) == number:
            return found, looked
        found += [load] * there
    return found, len(loads)


def run_missing(
    data: dict[str, Any], settings: Settings, path: Path, jobs: int, number: int, loads: Sequence[Load]
) -> None:
    """Look for so many loads, and run what `data` lacks of them."""
    loads = loads[: LOOKS * number]
    found, looked = counted(data["points"], loads, number)
    while len(found) < number and looked < len(loads):
        some = loads[looked : looked + 4 * jobs]
        _run(data, settings, path, jobs, [(load, (BASELINE, IDEAL), (0,)) for load in some])
        found, looked = counted(data["points"], loads, number)
    _run(data, settings, path, jobs, [(load, load.policies, range(settings.seeds)) for load in found])


def regret(mine: float, best: float, figure: str) -> float:
    """By how much of the best `mine` is worse; 0 if it is as good, nan if one of the two is unknown."""
    if math.isnan(mine) or math.isnan(best):
        return math.nan
    worse = best - mine if FIGURES[figure] else mine - best
    if worse <= UNNOTICED.get(figure, 0.0) or best <= 0:
        return 0.0 if worse <= UNNOTICED.get(figure, 0.0) else math.inf
    return worse / best


def regrets(points: seeds.Points, load: Load, policy: str, number: int) -> dict[str, tuple[float, str]] | None:
    """Figure -> (median over the seeds, the policy that was best most often); None until all runs of a seed are there."""
    each: dict[str, list[tuple[float, str]]] = {figure: [] for figure in FIGURES}
    for seed in range(number):
        runs = {one: points.get(load.name(one, seed)) for one in load.policies}
        if policy not in runs or any(run is None for run in runs.values()):
            continue
        for figure, more in FIGURES.items():
            values = {one: run[figure] for one, run in runs.items() if run is not None}
            known = {one: value for one, value in values.items() if one != BOUND and not math.isnan(value)}
            if known:
                best = (max if more else min)(known, key=known.__getitem__)
                each[figure].append((regret(values[policy], known[best], figure), best))
    if not all(each.values()):
        return None
    return {
        figure: (statistics.median(value for value, _ in found), statistics.mode(best for _, best in found))
        for figure, found in each.items()
    }


def _share(value: float) -> str:
    return "–" if math.isnan(value) else "no end" if math.isinf(value) else f"{100 * value:.0f} %"


def table(data: Mapping[str, Any], loads: Sequence[Load]) -> str:
    """Markdown: of each policy and figure, the regret's median, ninth decile and worst, over the loads that were run."""
    out = [
        "| policy | loads | figure | median | ninth decile | worst | loads above 10 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy in OF:
        found = [one for load in loads if (one := regrets(data["points"], load, policy, data["settings"]["seeds"]))]
        for figure, title in zip(FIGURES, TITLES):
            values = sorted(one[figure][0] for one in found if not math.isnan(one[figure][0]))
            if values:
                tenth = values[min(len(values) - 1, math.ceil(0.9 * len(values)) - 1)]
                above = sum(value > 0.10 for value in values)
                middle = _share(statistics.median(values))
                out.append(
                    f"| {policy} | {len(values)} | {title} | {middle} | {_share(tenth)} | {_share(values[-1])} | {above} |"
                )
    return "\n".join(out)


def worst(data: Mapping[str, Any], loads: Sequence[Load], policy: str, most: int = 10) -> str:
    """Markdown: the loads where the policy's P99 time to the first token is furthest behind, and who was best there."""
    found = []
    for load in loads:
        one = regrets(data["points"], load, policy, data["settings"]["seeds"])
        if one is not None and one["ttft_p99_s"][0] > 0:
            found.append((one["ttft_p99_s"], load))
    out = ["| load | regret, TTFT P99 | best there |", "|---|---|---|"]
    for (value, best), load in sorted(found, key=lambda each: -each[0][0])[:most]:
        where = load.place.replace(" | ", ", ")
        out.append(f"| {where}, {load.rate:g} c | {_share(value)} | {best} |")
    return "\n".join(out)


def furthest(data: Mapping[str, Any], loads: Sequence[Load], policy: str, most: int = 10) -> str:
    """Markdown: the loads and figures in which the policy is furthest behind, who was best there, and both figures: medians over
    the seeds."""
    points, number = data["points"], data["settings"]["seeds"]
    found = []
    for load in loads:
        one = regrets(points, load, policy, number) or {}
        for (figure, (value, best)), title in zip(one.items(), TITLES):
            if value > 0:
                sides = (
                    statistics.median(points[load.name(side, seed)][figure] for seed in range(number))
                    for side in (policy, best)
                )
                found.append((value, load, title, best, *sides))
    out = ["| load | figure | regret | its own | best there |", "|---|---|---|---|---|"]
    for value, load, title, best, mine, theirs in sorted(found, key=lambda each: -each[0])[:most]:
        where = load.place.replace(" | ", ", ")
        out.append(f"| {where}, {load.rate:g} c | {title} | {_share(value)} | {mine:.3g} | {theirs:.3g}, `{best}` |")
    return "\n".join(out)


def whole(points: seeds.Points, load: Load, number: int) -> bool:
    """Whether all runs of all seeds are there."""
    return all(points.get(load.name(one, seed)) is not None for one in load.policies for seed in range(number))


def added(data: Mapping[str, Any], loads: Sequence[Load]) -> str:
    """Markdown: what weights add: the alternatives' best P99 time to the first token over that of the default, by machine and
    number of models; medians over the loads and seeds, and the range."""
    gains: dict[tuple[str, int], list[float]] = {}
    for load in loads:
        for seed in range(data["settings"]["seeds"]):
            runs = [data["points"].get(load.name(one, seed)) for one in (UNUSED_KV, UNUSED_KV_AND_SWAP, OURS)]
            if all(runs):
                *others, ours = (run["ttft_p99_s"] for run in runs)
                if ours > 0 and not math.isnan(ours):
                    gains.setdefault((load.machine, len(MODELS[load.models])), []).append(min(others) / ours)
    out = [
        "| machine | models | runs | weights make first tokens so many times sooner (lowest to highest) |",
        "|---|---|---|---|",
    ]
    for (where, number), values in sorted(gains.items()):
        middle = statistics.median(values)
        out.append(f"| {where} | {number} | {len(values)} | {middle:.2g} ({min(values):.2g} to {max(values):.2g}) |")
    return "\n".join(out)


PAGE = """# Regret: the default, and weights alone, against the best policy of each load

{loads} loads of {requests} requests (three times as many of Alpaca's), {seeds} seeds, in virtual time; made by
`python -m bench.lab regret`. Bursts of the Azure code trace, models in epochs of 1 s. A load is a machine, models that
share 30 to 95 % of its memory evenly, a length of requests, and a rate between 0.3 and 1.2 times what `recompute` is
saturated at: {all} loads, in one order at random.

Of the first {looked}, these {loads} are those in which requests wait for memory: the P99 first token of `recompute` comes after
more than {late:g} s, and at least twice as late as that of `ideal` (first seed). In the others no policy has much to gain.

Policies: {policies}. The last two have turns of 1 s, in loads of several models. `whole` is no policy of a machine, and
never the best: the model whose turn it is has all memory, and to switch costs nothing.

Regret: by how much of the best policy's figure a policy's is worse, the median of the seeds of a load. Less than 50 ms
to the first token or in a longest gap, and 5 ms between tokens, count as none.

{table}

## Where the default is furthest behind, in any figure

Seconds, tokens/s and requests/s; medians of the seeds, so that their quotient need not be the regret, which is a median as well.

{ours}

## Where weights alone are furthest behind

{weights}

## What weights add beyond KV that is shared, or in host memory

{added}
"""


def run_regret(
    results: Path,
    settings: Settings,
    *,
    number: int = 12,
    loads: Sequence[Load] = LOADS,
    jobs: int = 1,
    report_only: bool = False,
) -> str:
    """Run what `results` lacks of the first `number` of these loads in which requests wait for memory, and write the page beside
    it. Returns the page. Raises InvalidArgument (field path) for a file of something else, before anything runs."""
    data = seeds.read(results, empty(settings), "regret")
    if not report_only:
        run_missing(data, settings, results, jobs, number, loads)
    found, looked = counted(data["points"], loads, number)
    ran = [load for load in found if whole(data["points"], load, settings.seeds)]
    text = PAGE.format(
        loads=len(ran),
        looked=looked,
        late=LATE_S,
        requests=settings.requests,
        seeds=settings.seeds,
        all=len(LOADS),
        policies=", ".join(f"`{one}`" for one in POLICIES),
        table=table(data, ran),
        ours=furthest(data, ran, OURS),
        weights=worst(data, ran, WEIGHTS_ONLY),
        added=added(data, ran),
    )
    results.parent.mkdir(parents=True, exist_ok=True)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
