"""What `bench.lab paper` compares: figures of Oneiros, and how a simulation is held against them. Pure description.

    headlines()["oneiros-04"].value       # 54.4, in the unit of the entry
    EXPERIMENTS["fig8-c1"].panels         # what is served, by which policies, and which headlines it answers

A panel is one load on one setup, at a grid of request rates. The papers do not state their rates; the grid is the same for all
panels of a group and is not chosen after results: shares of the rate c at which the panel's setup is saturated under
`recompute` (see `Panel`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import MappingProxyType

from remap.errors import InvalidArgument
from remap.policy.hardware import Machine, model
from remap_serve.sim.policies import WEIGHTS_ONLY
from remap_serve.sim.serving import Setup, TenantSetup, tenants

__all__ = [
    "ALGORITHM_1",
    "BASELINE",
    "ELSEWHERE",
    "FACTORS",
    "HOW",
    "IDEAL",
    "LOWEST",
    "PAPERS_OWN",
    "Comparison",
    "Experiment",
    "Headline",
    "Panel",
    "Reckoning",
    "check",
    "headlines",
    "select",
    "setup_of",
]

BASELINE = "recompute"
PAPERS_OWN = f"{WEIGHTS_ONLY}+oneiros"
"""Weights alone, evenly spaced layers, the most recently used donor first, two buffers: what Oneiros describes."""
ALGORITHM_1 = "algorithm-1"
"""Oneiros' Algorithm 1 as it is printed, over the library's mechanism: see algorithm_1.py."""
IDEAL = "ideal"
"""`BASELINE` with six times the memory."""

FACTORS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
"""Request rates, as shares of the saturation rate. Bursts fill the memory far below it."""
LOWEST = 3
"""If the baseline still preempts at the lowest rate of the grid, it is halved, at most so many times."""
ELSEWHERE = ("Pie", "HybridServe")
"""Papers whose figures have a command and a page of their own: `bench.lab pie` and `bench.lab hybridserve`."""
HOW = ("mean", "most", "about_zero", "range")


@dataclass(frozen=True)
class Headline:
    """One figure of a paper. value: a number, or (lowest, highest). kind: "quant" (a number to compare) or "shape" (a direction
    or a turning point)."""

    id: str
    paper: str
    figure: str
    config: str
    metric: str
    value: float | tuple[float, float]
    unit: str
    kind: str
    note: str = ""

    @property
    def least(self) -> float:
        """The number, or the lower end of the range."""
        return self.value[0] if isinstance(self.value, tuple) else self.value

    @property
    def most(self) -> float:
        """The number, or the upper end of the range."""
        return self.value[1] if isinstance(self.value, tuple) else self.value


@cache
def headlines() -> Mapping[str, Headline]:
    """All of headlines.json, by id."""
    text = Path(__file__).with_name("headlines.json").read_text(encoding="utf-8")
    found = {}
    for entry in json.loads(text)["headlines"]:
        value = entry["value"]
        entry["value"] = (float(value[0]), float(value[1])) if isinstance(value, list) else float(value)
        found[entry["id"]] = Headline(**entry)
    return MappingProxyType(found)


@dataclass(frozen=True)
class Panel:
    """One load on one setup. tenants: as `serving.tenants` takes them. kv_bytes: of one tenant, instead of a share of the
    machine; 0 without. lengths: for all tenants, or one each. shares: of the rate, tenant by tenant; equal if there are none.

    Rates are `factors` times c: what `recompute` serves a second when all requests are there at once (its tokens a second,
    divided by the tokens of a mean answer). like: the panel whose c is taken, so that several setups get equal requests.
    fixed: rates in requests per second that are run besides. quiet: if not 0, every rate r is followed by a second part at
    quiet x r, which begins when all requests of the first have been served; only its gaps between tokens count.
    requests: a factor on the number of requests of a run. quantum_s: a turn, in temporal sharing. link_bytes_per_s: of the
    machine's link in each direction; its own if 0.
    """

    name: str
    tenants: str
    lengths: tuple[str, ...]
    arrivals: str = "azure-code"
    sharing: str = "temporal"
    shares: tuple[float, ...] = ()
    kv_bytes: int = 0
    like: str = ""
    factors: tuple[float, ...] = FACTORS
    fixed: tuple[float, ...] = ()
    quiet: float = 0.0
    requests: float = 1.0
    quantum_s: float = 1.0
    link_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Reckoning:
    """How a headline is reckoned. metric: of `reckoning.METRICS`. tests: each against `base`, on its own.

    how: "mean" (over the panels, at each rate), "most" (the largest over panels and rates: the paper says "up to"),
    "about_zero" (over all rates from saturation on), or "range", which the report reckons.
    panels: all of the experiment's, if none are named.
    """

    headline: str
    metric: str
    base: str = BASELINE
    tests: tuple[str, ...] = (PAPERS_OWN, WEIGHTS_ONLY)
    how: str = "mean"
    panels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two policies at the same rates and memory, in the metrics that the difference is for."""

    test: str
    base: str
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Experiment:
    """One figure. stated: what the paper says of the setup. assumed: what it does not, and what was taken.

    factors: those of its panels' rates at which it is run; all if there are none. group: "paper", or "beyond" for what the
    papers do not have.
    """

    id: str
    figure: str
    title: str
    panels: tuple[Panel, ...]
    policies: tuple[str, ...] = (BASELINE, PAPERS_OWN, WEIGHTS_ONLY)
    reckonings: tuple[Reckoning, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    stated: str = ""
    assumed: str = ""
    factors: tuple[float, ...] = ()
    group: str = "paper"

    def panels_of(self, reckoning: Reckoning) -> tuple[Panel, ...]:
        wanted = reckoning.panels or tuple(panel.name for panel in self.panels)
        return tuple(panel for panel in self.panels if panel.name in wanted)


def setup_of(panel: Panel, machine: Machine) -> Setup:
    """The panel's setup on this machine. Raises InvalidArgument for unknown models or too little memory."""
    if panel.link_bytes_per_s:
        machine = machine.with_(h2d_bytes_per_s=panel.link_bytes_per_s, d2h_bytes_per_s=panel.link_bytes_per_s)
    made = tenants(panel.tenants, machine)
    if panel.kv_bytes:
        found = model(panel.tenants)
        bare = Setup(machine, (TenantSetup(found.name, found, machine.hbm_bytes),), sharing=panel.sharing)
        pages = -(-found.layer_bytes // bare.page_bytes) * found.layers
        memory = pages * bare.page_bytes + found.resident_bytes + bare.activation_bytes + panel.kv_bytes
        made = (TenantSetup(found.name, found, memory),)
    return Setup(machine, made, sharing=panel.sharing, quantum_s=panel.quantum_s)


def select(experiments: Mapping[str, Experiment], only: Sequence[str] = ()) -> tuple[Experiment, ...]:
    """Those whose id matches one of the patterns ("fig8*"), in their order; all without patterns.

    Raises InvalidArgument for a pattern that matches none, with the ids.
    """
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in experiments):
            raise InvalidArgument(
                f"no experiment matches {pattern!r}; there are {', '.join(experiments)}; nothing was run",
                field="only",
                value=pattern,
                known=tuple(experiments),
            )
    return tuple(
        experiment
        for name, experiment in experiments.items()
        if not only or any(fnmatchcase(name, pattern) for pattern in only)
    )


def check(experiments: Iterable[Experiment], metrics: Iterable[str]) -> list[str]:
    """What is wrong with a description: headlines that are unknown, in use twice, or not in use; unknown metrics, panels
    and ways to reckon; policies that are compared but not run. Empty if nothing is."""
    known, metrics = headlines(), set(metrics)
    used: list[str] = []
    wrong: list[str] = []
    panels: dict[str, Panel] = {}
    for experiment in experiments:
        for panel in experiment.panels:
            if panels.setdefault(panel.name, panel) != panel:
                wrong.append(f"two panels are called {panel.name!r}")
        names = {panel.name for panel in experiment.panels}
        for one in experiment.reckonings:
            used.append(one.headline)
            if one.headline not in known:
                wrong.append(f"{experiment.id}: no headline {one.headline!r}")
            if one.metric not in metrics or one.how not in HOW or not set(one.panels) <= names:
                wrong.append(f"{experiment.id}: {one}")
            if not {one.base, *one.tests} <= set(experiment.policies):
                wrong.append(f"{experiment.id}: {one.headline} compares policies that are not run")
        for pair in experiment.comparisons:
            if not set(pair.metrics) <= metrics or not {pair.test, pair.base} <= set(experiment.policies):
                wrong.append(f"{experiment.id}: {pair}")
    wrong += [f"{name} is not in use" for name, one in known.items() if one.paper not in ELSEWHERE and name not in used]
    wrong += [f"{name} is reckoned twice" for name in {name for name in used if used.count(name) > 1}]
    wrong += [f"no panel {one.like!r}" for one in panels.values() if one.like and one.like not in panels]
    return wrong
