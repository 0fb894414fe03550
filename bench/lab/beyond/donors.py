"""Where KV comes from over time, when all donors are there: one load of `bench.lab paper`, simulated, and looked at every two
seconds.

What all KV of a moment consists of, in bytes, each byte once:

    own       pages of the tenant's reservation that are not weights
    unused    pages of other tenants' reservations, which they do not use
    layers    pages of the tenant's own layers, which stream
    lent      pages of other tenants' layers
    host      KV of paused and preempted requests, in host memory
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.lab import ROOT
from bench.lab.paper.experiment_list import C2
from bench.lab.paper.experiments import BASELINE, setup_of
from bench.lab.paper.runs import Store, items_of
from bench.lab.seeds import write

from remap.errors import InvalidArgument
from remap.policy.hardware import machine
from remap_serve.sim import policies
from remap_serve.sim.engine import SimEngine
from remap_serve.sim.policies import OURS
from remap_serve.sim.setup import Setup
from remap_serve.sim.timeline import Timeline
from remap_serve.sim.worlds import make_world

__all__ = ["FACTOR", "PANEL", "RESULTS", "RUN", "SEED", "SOURCES", "models", "read", "run", "simulated", "stored_point"]

RESULTS = ROOT / "bench" / "results" / "beyond.json"
PAPER = ROOT / "bench" / "results" / "paper.json"
PANEL, FACTOR, SEED = C2[1], 1.0, 0
RUN = (BASELINE, OURS)
EVERY_S = 2.0
SOURCES: Mapping[str, str] = {
    "own": "own reservation",
    "unused": "unused KV of the other model",
    "layers": "own layers",
    "lent": "layers of the other model",
    "host": "host memory",
}


class _Watch(Timeline):
    """Looks at the session's pages, too. columns: name -> a number for each look; MB, requests, and seconds since the begin."""

    def __init__(self, session: Any, setup: Setup) -> None:
        super().__init__()
        self._session, self._setup, self._due_s = session, setup, 0.0
        self.columns: dict[str, list[float]] = {name: [] for name in ("time_s", *SOURCES, "running", "waiting")}

    def look(self, now_s: float, engines: Mapping[str, SimEngine]) -> None:
        super().look(now_s, engines)
        if now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S
        lines = [engine.scheduler for engine in engines.values()]
        row = {
            "time_s": now_s,
            **{name: size / 1e6 for name, size in _sources(self._session, self._setup).items()},
            "running": len([one for line in lines for one in line.running]),
            "waiting": len([one for line in lines for one in line.waiting]),
        }
        for name, value in row.items():
            self.columns[name].append(round(value, 1))


def _sources(session: Any, setup: Setup) -> dict[str, int]:
    """Bytes of KV by where they are from, over all tenants."""
    found, page, seen = dict.fromkeys(SOURCES, 0), setup.page_bytes, session.snapshot().tenants
    for tenant in setup.tenants:
        one, model = seen[tenant.name], tenant.model
        block_bytes = setup.block_tokens * model.kv_bytes_per_token
        home = model.layers * -(-model.layer_bytes // page)
        reserved = -(-setup.kv_blocks(tenant) * block_bytes // page)
        layers = home - one.pages.params - one.pages.ring - one.lent_pages
        rest = one.pages.kv - layers - one.borrowed_pages
        found["own"] += page * min(rest, reserved)
        found["unused"] += page * max(0, rest - reserved)
        found["layers"] += page * layers
        found["lent"] += page * one.borrowed_pages
        found["host"] += one.host_blocks * block_bytes
    return found


def simulated(store: Store, policy: str) -> dict[str, list[float]]:
    """The columns of a run (see `_Watch`), with the settings and the c of this store."""
    setup = setup_of(PANEL, machine(store.settings.machine))
    items = items_of(PANEL, setup, FACTOR * store.points.c[PANEL.name], store.settings, SEED)
    world = make_world(setup, policies.find(policy))
    try:
        watch = world.runner.timeline = _Watch(world.session, setup)
        world.runner.serve(items)
        return watch.columns
    finally:
        world.close()


def read(path: Path = RESULTS) -> dict[str, dict[str, list[float]]]:
    """Policy -> columns (see `_Watch`), as far as they were run; nothing without the file. Raises InvalidArgument (field path)
    for a file of something else."""
    if not path.exists():
        return {}
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["donors"]
        return {policy: {name: runs[policy][name] for name in ("time_s", *SOURCES, "waiting")} for policy in runs}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidArgument(
            f"{path} is not a result of `bench.lab beyond` ({error!r}); nothing was run; name another file",
            field="path",
            value=str(path),
        ) from error


def run(path: Path = RESULTS) -> dict[str, dict[str, list[float]]]:
    """As `read`, after what is missing was run: half a minute. Raises as `read` does, before anything runs."""
    found = read(path)
    for policy in RUN:
        if policy not in found:
            found[policy] = simulated(Store.read(PAPER), policy)
            write(path, {"donors": found})
    return found


def models() -> tuple[str, ...]:
    """Their names."""
    return tuple(tenant.model.name for tenant in setup_of(PANEL, machine("GH200-96GB")).tenants)


def stored_point(policy: str) -> Mapping[str, float]:
    """Of the same run, what `bench.lab paper` has stored."""
    return Store.read(PAPER).points.at(PANEL.name, f"x{FACTOR:g}", policy)[SEED]
