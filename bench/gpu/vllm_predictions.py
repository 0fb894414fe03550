"""What the simulator expects of vLLM's measures on an H200, of the measures' own case: written down before any was measured.

    python -m bench.gpu.vllm_predictions     writes bench/results/gpu-vllm-predicted.json, prints the table of the notes

c   `measures.vllm_burst`: a model alone, one burst after another
d   three such models in the memory of their weights and three KV caches, a burst of one model after another
e   the same in the memory of two models' weights: one is always away
"""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from bench.gpu.context import Context
from bench.gpu.measures.vllm_burst import SIDES, on_the_gpu
from bench.gpu.measures.vllm_sharing import Sharing
from bench.gpu.processes import ROOT

import remap
from remap.adapters.vllm.reach import Reach
from remap.internals import internals
from remap.memory.device import LARGEST_PAGE as PAGE  # of a broker of this size
from remap.model.footprint import Footprint
from remap.policy.hardware import machine, model
from remap_serve.sim.policies import find
from remap_serve.sim.results import PolicyResult, percentile, weighted_percentile
from remap_serve.sim.serving import Setup, TenantSetup, simulate
from remap_serve.sim.workload import Item
from remap_serve.sim.worlds import masters

RESULTS = ROOT / "bench" / "results" / "gpu-vllm-predicted.json"
MACHINE, SEEDS = "H200", 5
TRIAL, TRIAL_S = 8, 1.0
"""Tokens of the passes that vLLM's adapter runs before it serves: the first thing that a model learns its times from."""
TITLES = (
    *("preemptions", "P99 first token, ms", "P50 between tokens, ms", "P99 gap, ms"),
    *("longest gap, ms", "tokens/s"),
)


@dataclass(frozen=True)
class Bursts(Sharing):
    """The measure's own load. late_s: the most that a request comes behind its burst's begin, as over HTTP."""

    late_s: float = 0.01

    def items(self, seed: int) -> list[Item]:
        """Seed 0: as the measure has them. Others: the requests of each burst in another order, up to late_s late."""
        rng, size, made = random.Random(seed), self.case.requests, list[Item]()
        drawn = replace(self.case, requests=self.rounds * size).items()
        for burst in range(self.rounds * self.models):
            first = burst // self.models * size if self.models > 1 else 0  # a model alone gets the same ones again
            mine = drawn[first : first + size]
            for place in rng.sample(range(size), size) if seed else range(size):
                at = burst * self.every_s + (rng.uniform(0.0, self.late_s) if seed else 0.0)
                made.append(Item(f"m{burst % self.models}", at, int(mine[place][1]), int(mine[place][2])))
        return sorted(made, key=lambda item: item.time_s)


CASE = on_the_gpu(cast("Context", SimpleNamespace(free_bytes=1 << 60, host_budget=1 << 60)))
LOADS = {"c": Bursts(CASE, 1, 1, late_s=0.0), "d": Bursts(CASE, 3), "e": Bursts(CASE, 2)}


class Started:
    """A session as vLLM's adapter has it before the first request: the link is known, from a pass that streamed. Tenants on a
    broker have `total` bytes, one that never serves has the rest. The first ones are cold if not all fit."""

    def __init__(self, session: Any, follow: Any, *, load: Bursts) -> None:
        self._session, self._load, self._begun = session, load, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def activate(self, name: str, *, alone: bool, partial: bool | float) -> Any:
        """As `Session.activate`."""
        if not self._begun:
            self._begun = True
            for each in self._session.tenants.values():
                internals(each).calibrate_link(machine(MACHINE).h2d_bytes_per_s)
            if self._load.models == 1:
                return self._session.activate(name, alone=alone, partial=partial)
            for each in list(self._session.tenants)[: self._load.models - self._load.room]:
                self._session.deactivate(each, pages="none")
            # KV of which a block is a page, beside a layer of one page.
            blocks = (self._session.capacity_bytes - self._load.total) // PAGE - 1
            sizes = {"block_tokens": 1, "min_blocks": blocks, "max_blocks": blocks, "host_blocks": 0}
            kv, config = remap.KVSpec(layers=1, kv_heads=1, head_dim=PAGE // 4, **sizes), remap.Config(lends=False)
            self._session.attach_bytes(masters([PAGE]), name="rest", priority=1, kv=kv, config=config)
        return self._session.activate(name, alone=alone, partial=partial)


def figures(result: PolicyResult, before: PolicyResult, before_s: float) -> list[float]:
    """In the order of TITLES. before: what came in the first before_s, which does not count."""
    gaps = Counter(dict(result.tbt)) - Counter(dict(before.tbt))
    late = [weighted_percentile(gaps.items(), q) for q in (0.5, 0.99, 1.0)]
    times = [1e3 * each for each in (percentile(result.ttft_s[len(before.ttft_s) :], 0.99), *late)]
    tokens = result.output_tokens - before.output_tokens
    return [result.preemptions - before.preemptions, *times, tokens / (result.virtual_s - before_s)]


def predict(seeds: int = SEEDS) -> dict[str, Any]:
    """Equal arguments give an equal result. sides: of each load, figures seed by seed. No side has KV in host memory, as in the
    measures."""
    on, shape, known = machine(MACHINE), CASE.shape, model(CASE.shape.name)
    known = replace(known, layers=shape.layers, context=CASE.max_model_len)
    if known.weight_bytes != 2 * shape.params() or CASE.dtype != "bfloat16":
        raise ValueError(f"the simulator knows {known.name} as other than {CASE}")
    size = Footprint((known.layer_bytes,) * known.layers, known.resident_bytes)
    page, block = size.page_size("cuda", kv_bytes=CASE.kv_bytes), shape.block_bytes(CASE.block_tokens, 2)
    whole = replace(known, layer_bytes=known.weight_bytes // known.layers, resident_bytes=0)
    stock = CASE.kv_bytes // block - 1  # one is vLLM's null block
    # An engine on a session of its own has the same bytes for weights and KV, and weights in whole pages.
    ours = Reach(size, page, block, size.nbytes + CASE.kv_bytes - size.pages(page) * page).first - 1

    def run(load: Bursts, policy: Any, blocks: int, page: int, seed: int) -> PolicyResult:
        each = whole if load.models > 1 else known
        given = [TenantSetup(f"m{n}", each, 2 * each.weight_bytes, kv_blocks=blocks) for n in range(load.models)]
        setup = Setup(on, tuple(given), "temporal", "chunked", load.turn_s, CASE.block_tokens, page_bytes=page,
                      scheduling={"max_num_seqs": 64, "max_batch_tokens": 4096})  # fmt: skip
        trials = [Item(f"m{n}", at, TRIAL, 1) for n in range(load.models) for at in (0.0, TRIAL_S / 2)]
        return simulate(
            setup, [*trials, *(replace(each, time_s=each.time_s + TRIAL_S) for each in load.items(seed))], policy
        )

    found: dict[str, dict[str, list[list[float]]]] = {"c, first burst": {}, "c, later bursts": {}, "d": {}, "e": {}}
    for side, settings in SIDES.items():
        more = "".join(f"+{key}={value}" for key, value in settings.items())
        load = LOADS["c"]
        way = replace(find(f"remap:weights{more}"), manager=partial(Started, load=load))
        policy, blocks = ("recompute", stock) if side == "stock" else (way, ours)
        for seed in range(seeds):
            tried, first, both = (run(replace(load, rounds=n), policy, blocks, page, seed) for n in (0, 1, load.rounds))
            found["c, first burst"].setdefault(side, []).append(figures(first, tried, TRIAL_S))
            found["c, later bursts"].setdefault(side, []).append(figures(both, first, TRIAL_S + load.every_s))
    for name in ("d", "e"):
        load = LOADS[name]
        ways = {
            "static parts": ("recompute", PAGE),
            "sleep mode": ("sleep", page),
            "remap": (replace(find("remap:weights+pool"), manager=partial(Started, load=load)), PAGE),
        }
        for side, (way, of) in ways.items():
            if side != "static parts" or load.room == load.models:
                found[name][side] = [
                    figures(
                        run(load, way, stock, of, seed), run(replace(load, rounds=0), way, stock, of, seed), TRIAL_S
                    )
                    for seed in range(seeds)
                ]
    told = {
        "machine": on.name,
        "link_bytes_per_s": on.h2d_bytes_per_s,
        "gap_s": on.iteration_gap_s,
        "kv_blocks": [stock, ours],
    }
    return {"simulated": True, **told, "loads": {name: as_json(load) for name, load in LOADS.items()}, "sides": found}


def as_json(load: Bursts) -> Any:
    """The load, as the file has it."""
    names = ("room", "models", "rounds", "every_s", "turn_s", "late_s", "total")
    return json.loads(json.dumps({"case": asdict(load.case), **{name: getattr(load, name) for name in names}}))


def table(data: Mapping[str, Any]) -> str:
    """Markdown: medians, lowest to highest where seeds differ."""

    def cell(values: Sequence[float]) -> str:
        digits = int(max(values) < 20 and any(each % 1 for each in values))
        middle, *ends = (f"{each:,.{digits}f}" for each in (statistics.median(values), min(values), max(values)))
        return middle if len(set(ends)) == 1 else f"{middle} ({' to '.join(ends)})"

    rows = [
        (name, side, *map(cell, zip(*runs)), "not run on a GPU")
        for name, sides in data["sides"].items()
        for side, runs in sides.items()
    ]
    heads = ("case", "side", *TITLES, "measured")
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ("---",) * len(heads), *rows))


if __name__ == "__main__":
    made = predict()
    RESULTS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(table(made))
