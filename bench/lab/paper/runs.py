"""`bench.lab paper`: the experiments of experiment_list.py run, stored and resumed.

Every run is one policy on one panel at one rate with one seed. It depends on nothing else, so the number of processes changes no
result, and what is stored is not run again. Equal settings give an equal file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.lab.pie_events import policy_of

from remap.errors import InvalidArgument
from remap.policy.hardware import machine
from remap_serve.sim.loads import load
from remap_serve.sim.policies import Policy
from remap_serve.sim.results import PolicyResult, weighted_percentile
from remap_serve.sim.serving import Setup, simulate
from remap_serve.sim.workload import Item

from .algorithm_1 import POLICY
from .arithmetic import arithmetic
from .experiment_list import EXPERIMENTS
from .experiments import BASELINE, FACTORS, LOWEST, Experiment, Panel, setup_of
from .reckoning import POINT, Points, figures, later_gaps, quantiles

__all__ = ["Run", "Settings", "Store", "items_of", "keys_of", "point", "run_all", "run_one", "saturation", "serve"]

ALL_AT_ONCE = 1e9
_QUICK = (0.3, 1.0, 2.0)
_LATER = ("goodput_per_s",)
"""Figures that points of an older file lack."""


@dataclass(frozen=True)
class Settings:
    """requests: of one run (times the panel's factor). seeds: every rate is run with each. quick: few requests and rates."""

    machine: str = "GH200-96GB"
    requests: int = 500
    seeds: int = 1
    quick: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"machine": self.machine, "requests": self.requests, "seeds": self.seeds, "quick": self.quick}


@dataclass(frozen=True)
class Run:
    """One policy on one panel at one rate. key: see `reckoning`."""

    panel: Panel
    policy: str
    key: str
    rate: float
    seed: int


def _items(panel: Panel, setup: Setup, rate: float, requests: int, seed: int) -> tuple[Item, ...]:
    names = [tenant.name for tenant in setup.tenants]
    context = {tenant.name: tenant.model.context for tenant in setup.tenants}
    shares = panel.shares or (1.0,) * len(names)
    rates = [rate * share / sum(shares) for share in shares]
    return load(
        names, requests=requests, rate=rates, arrivals=panel.arrivals, lengths=panel.lengths, seed=seed, context=context
    )


def _requests(panel: Panel, settings: Settings) -> int:
    return max(20, round(settings.requests * panel.requests))


def items_of(panel: Panel, setup: Setup, rate: float, settings: Settings, seed: int) -> tuple[Item, ...]:
    """The requests of a run of these settings."""
    return _items(panel, setup, rate, _requests(panel, settings), seed)


def serve(run: Run, settings: Settings) -> tuple[Setup, tuple[Item, ...], PolicyResult]:
    """What was simulated (a quiet part is not in it), and the result. Raises as `simulate` does."""
    setup = setup_of(run.panel, machine(settings.machine))
    items = items_of(run.panel, setup, run.rate, settings, run.seed)
    return setup, items, simulate(setup, items, _policy(run.policy))


def _policy(name: str) -> str | Policy:
    return POLICY if name == POLICY.name else policy_of(name) or name


def run_one(run: Run, settings: Settings) -> tuple[dict[str, float], list[float]]:
    """(the point, quantiles of the gaps between tokens if the panel has a quiet part, else none). Raises as `simulate` does."""
    panel = run.panel
    setup, items, result = serve(run, settings)
    first, last = items[0].time_s, items[-1].time_s
    if not panel.quiet:
        return figures(result, run.rate, last - first), []
    # The peak alone was needed to know when it ends; both parts together begin as it did, to the last bit.
    begin = first + result.virtual_s
    later = _items(panel, setup, run.rate * panel.quiet, max(20, len(items) // 2), run.seed + 1)
    whole = simulate(
        setup,
        [*items, *(Item(i.tenant, begin + i.time_s, i.prompt_tokens, i.output_tokens) for i in later)],
        _policy(run.policy),
    )
    gaps = later_gaps(whole, result)
    point = figures(whole, run.rate, last - first)
    point["virtual_s"] = float(f"{result.virtual_s:.5g}")  # of the peak, as arrive_s is
    number = sum(count for _, count in gaps)
    point["tbt_p50_s"] = float(f"{weighted_percentile(gaps, 0.5):.5g}")
    point["tbt_p99_s"] = float(f"{weighted_percentile(gaps, 0.99):.5g}")
    point["tbt_mean_s"] = float(f"{sum(seconds * count for seconds, count in gaps) / number:.5g}")
    return point, quantiles(gaps)


def point(run: Run, settings: Settings) -> dict[str, float]:
    """The figures of `run_one`, which tables are made of."""
    return run_one(run, settings)[0]


def saturation(panel: Panel, settings: Settings) -> tuple[float, tuple[float, ...]]:
    """(c in requests a second, factors below the grid that are run because the baseline preempts at all above them)."""
    setup = setup_of(panel, machine(settings.machine))
    items = _items(panel, setup, ALL_AT_ONCE, _requests(panel, settings), 0)
    full = simulate(setup, items, BASELINE)
    c = float(f"{full.requests_finished / full.virtual_s:.4g}")
    lows: list[float] = []
    if panel.factors == FACTORS and not settings.quick:
        factor = panel.factors[0]
        while (
            len(lows) < LOWEST
            and simulate(setup, _items(panel, setup, c * factor, _requests(panel, settings), 0), BASELINE).preemptions
        ):
            factor /= 2.0
            lows.append(factor)
    return c, tuple(lows)


def keys_of(
    experiment: Experiment, panel: Panel, c: float, lows: Sequence[float], settings: Settings
) -> dict[str, float]:
    """Rate key -> requests per second, at which the experiment runs the panel."""
    factors = [factor for factor in panel.factors if not experiment.factors or factor in experiment.factors]
    if not experiment.factors:
        factors = [*sorted(lows), *factors]
    if settings.quick and len(factors) > len(_QUICK):
        factors = [factor for factor in factors if factor in _QUICK] or factors[:2]
    rates = {f"x{factor:g}": factor * c for factor in factors}
    if not experiment.factors:
        rates |= {f"{rate:g}/s": rate for rate in panel.fixed}
    return rates


class Store:
    """All points and what they were made with, in one file. It is written after every experiment."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self.settings = settings
        self.points = Points()
        self.lows: dict[str, tuple[float, ...]] = {}
        self.gaps: dict[str, dict[str, dict[str, list[list[float]]]]] = {}
        self.arithmetic: list[dict[str, float]] = []

    @classmethod
    def read(cls, path: Path, settings: Settings | None = None) -> Store:
        """What the file holds of what `EXPERIMENTS` run. With `settings`, an empty store if there is no file, or one of
        other settings. Raises InvalidArgument (field path) for a file that is none of this benchmark, or is missing
        while there are no settings."""
        if settings is not None and not path.exists():
            return cls(path, settings)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found = cls(path, Settings(**data["settings"]))
            found.arithmetic = data["arithmetic"]
            for name, panel in data["panels"].items():
                found.points.c[name] = panel["c"]
                found.lows[name] = tuple(panel["lows"])
                wanted = found._wanted(name)
                for policy, stored in panel["policies"].items():
                    columns = {**{figure: [None] * len(stored["key"]) for figure in _LATER}, **stored}
                    for place, key in enumerate(columns["key"]):
                        if (key, policy) not in wanted:
                            continue
                        point = {figure: columns[figure][place] for figure in POINT}
                        point = {figure: value for figure, value in point.items() if value is not None}
                        found.points.cells.setdefault(name, {}).setdefault(key, {}).setdefault(policy, []).append(point)
            found.gaps = data["gaps"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidArgument(
                f"{path} is not a result of `bench.lab paper` ({error!r}); nothing was run; name another file, or run "
                "without --report-only",
                field="path",
                value=str(path),
            ) from error
        return found if settings is None or found.settings == settings else cls(path, settings)

    def _wanted(self, name: str) -> set[tuple[str, str]]:
        """(rate key, policy) of all that is run of a panel."""
        return {
            (key, policy)
            for experiment in EXPERIMENTS.values()
            for panel in experiment.panels
            if panel.name == name
            for key in keys_of(experiment, panel, self.points.c[name], self.lows[name], self.settings)
            for policy in experiment.policies
        }

    def to_json(self) -> dict[str, Any]:
        panels: dict[str, Any] = {}
        for name, cells in self.points.cells.items():
            policies: dict[str, dict[str, list[Any]]] = {}
            for key in self.points.keys(name):
                for policy, points in cells[key].items():
                    columns = policies.setdefault(policy, {"key": [], **{figure: [] for figure in POINT}})
                    for point in points:
                        columns["key"].append(key)
                        for figure in POINT:
                            columns[figure].append(point.get(figure))
            for columns in policies.values():
                for figure in _LATER:
                    if not any(value is not None for value in columns[figure]):
                        del columns[figure]
            panels[name] = {
                "c": self.points.c[name],
                "lows": list(self.lows.get(name, ())),
                "policies": dict(sorted(policies.items())),
            }
        return {
            "settings": self.settings.to_json(),
            "arithmetic": self.arithmetic,
            "panels": dict(sorted(panels.items())),
            "gaps": self.gaps,
        }

    def write(self) -> None:
        """The whole file, at once: a run that is stopped leaves the last one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(_lines(self.to_json()), encoding="utf-8")
        os.replace(new, self.path)

    def has(self, run: Run) -> bool:
        return len(self.points.at(run.panel.name, run.key, run.policy)) > run.seed

    def forget(self, experiment: Experiment) -> None:
        """What this experiment runs, so that it is run again."""
        for panel in experiment.panels:
            for cell in self.points.cells.get(panel.name, {}).values():
                for policy in experiment.policies:
                    cell.pop(policy, None)
            for gaps in self.gaps.get(panel.name, {}).values():
                for policy in experiment.policies:
                    gaps.pop(policy, None)


def _lines(data: Mapping[str, Any]) -> str:
    """JSON with one list of figures a line: small, and readable in a difference of two files."""
    text = json.dumps(data, indent=1)
    out: list[str] = []
    depth = 0
    for line in text.splitlines():
        stripped = line.strip()
        if depth:
            out[-1] += ("" if stripped.startswith(("]",)) else " " if out[-1].endswith(",") else "") + stripped
        else:
            out.append(line)
        depth += stripped.endswith("[")
        depth -= stripped.startswith("]")
    return "\n".join(out) + "\n"


def run_all(
    experiments: Sequence[Experiment],
    store: Store,
    *,
    jobs: int = 1,
    again: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Run what is missing of these experiments, and write the store after each.

    jobs: processes. on_progress(experiment, runs done, of how many). Raises what simulating raises; what was done is stored.
    """
    settings = store.settings
    if again:
        for experiment in experiments:
            store.forget(experiment)
    if not store.arithmetic:
        store.arithmetic = arithmetic(machine(settings.machine))
    panels = {panel.name: panel for experiment in EXPERIMENTS.values() for panel in experiment.panels}
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else None
    try:
        for experiment in experiments:
            _saturations(experiment, store, panels, pool)
            runs = [
                run
                for panel in experiment.panels
                for key, rate in keys_of(
                    experiment, panel, store.points.c[panel.name], store.lows[panel.name], settings
                ).items()
                for policy in experiment.policies
                for seed in range(settings.seeds)
                if not store.has(run := Run(panel, policy, key, rate, seed))
            ]
            report = None if on_progress is None else partial(_tell, on_progress, experiment.id, len(runs))
            _run(runs, store, pool, report)
            store.write()
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _tell(on_progress: Callable[[str, int, int], None], name: str, total: int, done: int) -> None:
    on_progress(name, done, total)


def _saturations(
    experiment: Experiment, store: Store, panels: Mapping[str, Panel], pool: ProcessPoolExecutor | None
) -> None:
    wanted = {panel.like or panel.name for panel in experiment.panels} - set(store.points.c)
    names = sorted(wanted)
    found: Iterable[tuple[float, tuple[float, ...]]]
    if pool is None:
        found = [saturation(panels[name], store.settings) for name in names]
    else:
        found = [f.result() for f in [pool.submit(saturation, panels[name], store.settings) for name in names]]
    for name, (c, lows) in zip(names, found):
        store.points.c[name], store.lows[name] = c, lows
    for panel in experiment.panels:
        if panel.like:
            store.points.c[panel.name], store.lows[panel.name] = store.points.c[panel.like], ()


def _run(
    runs: Sequence[Run], store: Store, pool: ProcessPoolExecutor | None, progress: Callable[[int], None] | None
) -> None:
    # Stored in the order of the list, whichever is done first.
    found: dict[Run, tuple[dict[str, float], list[float]]] = {}
    if pool is None:
        for run in runs:
            found[run] = run_one(run, store.settings)
            if progress is not None:
                progress(len(found))
    else:
        futures: dict[Future[tuple[dict[str, float], list[float]]], Run] = {
            pool.submit(run_one, run, store.settings): run for run in runs
        }
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            if progress is not None:
                progress(len(found))
    for run in runs:
        point, gaps = found[run]
        seen = store.points.at(run.panel.name, run.key, run.policy)
        store.points.add(run.panel.name, run.key, run.policy, [*seen, point])
        if gaps:
            store.gaps.setdefault(run.panel.name, {}).setdefault(run.key, {}).setdefault(run.policy, []).append(gaps)
