"""`bench.lab ablations`: the same arrivals served in different ways, side by side, several times.

The sides of an ablation alternate (A B A B ...), so that what the machine does meanwhile falls on all of them. Before that one
run with memory for everything gives the tokens that all of them must generate. The rate of arrivals follows the machine: what
it generates when it is busy is measured first, since an overload by a third says the same on every machine, and ten requests a
second do not.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from remap_serve.cli.shared_world import LARGE, SMALL, SharedWorld, Wiring
from remap_serve.engine.metrics import percentile
from remap_serve.sim.workload import ALPACA, Arrivals, Load, generate, summary

from .questions import Ablation

if TYPE_CHECKING:
    from remap_serve.engine import SharedEngines, SharedResult
    from remap_serve.sim.workload import Item

__all__ = ["AblationRun", "Settings", "busy_rate", "run_ablation", "worlds"]

_PLAIN = Wiring()


@dataclass(frozen=True)
class Settings:
    """seconds: in which requests arrive, in each run. runs: of each side. quick: the small models."""

    seconds: float = 40.0
    runs: int = 3
    quick: bool = False
    kv_share: float = 0.04
    quantum_s: float = 1.0
    seed: int = 0


@dataclass
class AblationRun:
    """What one ablation measured. samples: side -> one dict of metrics a run, in order. timelines: side -> (seconds, KV blocks
    usable by all tenants together) of its last run. gaps: side -> all gaps between tokens, of all runs. different: requests
    whose tokens were not the reference's, over all runs.
    """

    ablation: Ablation
    rate: float
    requests: int
    arrivals: Mapping[str, Any]
    samples: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    timelines: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    gaps: dict[str, list[float]] = field(default_factory=dict)
    different: int = 0
    copy_to_compute: Mapping[str, float] = field(
        default_factory=dict
    )  # tenant -> seconds to copy a layer / to compute it


def worlds(settings: Settings) -> Callable[[int | None], SharedWorld]:
    """number of tenants -> their world, built once."""
    built: dict[int | None, SharedWorld] = {}

    def world(tenants: int | None) -> SharedWorld:
        if tenants not in built:
            preset = SMALL if settings.quick else LARGE
            built[tenants] = SharedWorld(preset, kv_share=settings.kv_share, tenants=tenants, seed=settings.seed)
        return built[tenants]

    return world


def busy_rate(world: SharedWorld, max_num_seqs: int | None = None) -> float:
    """Requests a second of ALPACA's lengths that keep the machine busy, all tenants together, with memory for all of them."""
    per_tenant = max_num_seqs or world.preset.max_num_seqs
    lengths = world.lengths(ALPACA, 0.4)
    items: list[Item] = []
    for name in world.names:
        load = Load(name, Arrivals(1000.0), lengths)
        items += generate([load], 1.0, seed=1)[:per_tenant]
    requests = world.requests(items, at_once=True)
    # The faster of two: whatever else the machine did in the meantime only makes it slower.
    tokens_per_s = max(
        world.serve(requests, _PLAIN, "spatial", ample=True, max_num_seqs=per_tenant).summary()["tokens_per_s"]
        for _ in range(2)
    )
    return tokens_per_s / world.lengths(ALPACA, 1.0).output.cut_mean


def run_ablation(
    ablation: Ablation,
    world: SharedWorld,
    settings: Settings,
    rate: float,
    on_progress: Callable[[str, int], None] | None = None,
) -> AblationRun:
    """All runs of one ablation. rate: of `busy_rate`. on_progress(side, run) is called before each; run 0 is the reference.

    Raises what serving raises.
    """
    loads = ablation.loads(world, ablation.load * rate, settings.seconds)
    items, seqs = _typical(loads, settings), ablation.max_num_seqs
    seen = summary(items)
    found = AblationRun(ablation, ablation.load * rate, len(items), {**vars(seen)})
    if on_progress is not None:
        on_progress("unconstrained", 0)
    reference = world.serve(
        world.requests(items, at_once=True), _PLAIN, "spatial", ample=True, max_num_seqs=seqs
    ).tokens()
    requests = world.requests(items)
    for number in range(1, settings.runs + 1):
        for side in ablation.sides:
            if on_progress is not None:
                on_progress(side.name, number)
            gc.collect()  # the last run's session, whatever still refers to it
            quiet = None if ablation.quiet_from is None else _Quiet(ablation.quiet_from * settings.seconds)
            result = world.serve(
                requests,
                side.wiring,
                ablation.mode,
                quantum_s=settings.quantum_s,
                max_num_seqs=seqs,
                on_step=quiet,
            )
            found.copy_to_compute = {**found.copy_to_compute, **world.copy_to_compute}
            found.different += len(result.different(reference))
            found.samples.setdefault(side.name, []).append(_metrics(result, quiet))
            found.timelines[side.name] = [
                (sample.time_s, sum(one.kv_usable_blocks for one in sample.tenants.values()))
                for sample in result.timeline
            ]
            found.gaps.setdefault(side.name, []).extend(gap for one in result.metrics.values() for gap in one.tbt_s)
    return found


def _typical(loads: Sequence[Load], settings: Settings) -> tuple[Item, ...]:
    """The arrivals, of a seed that is neither the calmest nor the wildest: a short run may miss a burst, or catch three.

    Of 100 seeds, those that bring about as many requests as the rates mean; of these the one with the median peak.
    """
    meant = sum(load.arrivals.rate * (min(settings.seconds, load.end_s) - load.begin_s) for load in loads)
    tries = sorted(
        (generate(loads, settings.seconds, settings.seed + number) for number in range(100)),
        key=lambda items: abs(len(items) - meant),
    )[:25]
    tries.sort(key=lambda items: summary(items).peak_rate)
    return tries[len(tries) // 2]


class _Quiet:
    """The engine's on_step: marks the first moment from `from_s` on at which nobody waits; what comes later is off-peak."""

    def __init__(self, from_s: float) -> None:
        self.from_s = from_s
        self.marks: dict[str, Counter[float]] | None = None

    def __call__(self, shared: SharedEngines, done: Mapping[str, Any]) -> None:
        if self.marks is not None or shared.seconds < self.from_s:
            return
        engines = shared.engines
        if not any(engine.scheduler.waiting for engine in engines.values()):
            self.marks = {name: engine.metrics.gaps.copy() for name, engine in engines.items()}

    def gaps(self, result: SharedResult) -> list[float]:
        """Gaps between tokens since then; none if the queue never emptied."""
        marks = self.marks
        if marks is None:
            return []
        return [gap for name, one in result.metrics.items() for gap in (one.gaps - marks[name]).elements()]


def _metrics(result: SharedResult, quiet: _Quiet | None) -> dict[str, float]:
    numbers = result.summary()
    tenants = numbers.pop("tenants")
    duration = numbers["duration_s"]
    numbers["stall_share"] = numbers.pop("stall_s") / duration if duration > 0 else 0.0
    numbers["kv_blocks_peak"] = max(
        (sum(one.kv_usable_blocks for one in sample.tenants.values()) for sample in result.timeline), default=0
    )
    samples = [sample.tenants.values() for sample in result.timeline]
    numbers["layers_remapped_peak"] = max((sum(one.layers_remapped for one in each) for each in samples), default=0)
    numbers["lent_pages_peak"] = max((sum(one.lent_pages for one in each) for each in samples), default=0)
    numbers["kv_growth_peak"] = max(
        (tenants[name]["kv_blocks_peak"] / max(1, one.kv_blocks_start) for name, one in result.metrics.items()),
        default=1.0,
    )
    if quiet is not None:
        gaps = quiet.gaps(result)
        numbers["quiet_tbt_p50_s"] = percentile(gaps, 0.50)
        numbers["quiet_tbt_p99_s"] = percentile(gaps, 0.99)
    return numbers
