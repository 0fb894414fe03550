"""One run of `bench.lab real`: one policy serves one case.

    python -m bench.lab.real.one SUITE CASE POLICY RESULT(path)

A process of its own in the demo's environment, so that memory, threads and caches of one run cannot affect the next.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remap_serve.cli.machine import machine_now
from remap_serve.cli.shared_world import SharedWorld
from remap_serve.sim.results import Targets
from remap_serve.sim.workload import SHAREGPT, Load, generate

from .cases import POLICIES, Case, find

if TYPE_CHECKING:
    from remap_serve.engine import SharedEngines
    from remap_serve.engine.request import Sequence

__all__ = ["serve"]


class _Watch:
    """The engines' on_step. good: requests that met the targets. cpu_s: of all threads, since the first step."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self.good = 0
        self.cpu_s = 0.0
        self._begun_s: float | None = None

    def __call__(self, shared: SharedEngines, done: Mapping[str, Any]) -> None:
        if self._begun_s is None:
            self._begun_s = time.process_time()
        self.cpu_s = time.process_time() - self._begun_s
        for step in done.values():
            finished = {output.id for output in step.finished}
            self.good += sum(self._meets(sequence) for sequence in step.sampled if sequence.id in finished)

    def _meets(self, sequence: Sequence) -> bool:
        assert sequence.first_s is not None and sequence.last_s is not None  # it has finished
        late = sequence.first_s - sequence.arrived_s > self.targets.ttft_s
        after = sequence.generated - 1
        return not late and sequence.last_s - sequence.first_s <= self.targets.tpot_s * after


def requests(case: Case, world: SharedWorld) -> Any:
    """The case's requests by tenant: prompts of random tokens, greedy answers of a fixed length."""
    lengths = world.lengths(SHAREGPT, case.lengths)
    return world.requests(
        generate([Load(name, case.arrivals, lengths) for name in world.names], case.seconds, case.seed)
    )


def serve(suite_name: str, case_name: str, policy_name: str) -> dict[str, Any]:
    """Serve the case's requests once: {"figures": numbers, "tokens": "tenant id" -> ids in one string}, ready for JSON.

    Raises InvalidArgument for an unknown case, and the errors of loading, attaching and serving.
    """
    import torch

    suite, case = find(suite_name, case_name)
    policy = POLICIES[policy_name]
    torch.set_num_threads(suite.threads)
    world = SharedWorld(case.preset, kv_share=case.kv_share, seed=case.seed)
    watch = _Watch(case.targets)
    load = machine_now()["load_1min"]
    made: list[Any] = []
    make = policy.prepare
    result = world.serve(
        requests(case, world),
        policy.wiring,
        case.mode,
        quantum_s=case.quantum_s,
        ample=policy.ample,
        on_step=watch,
        prepare=None if make is None else lambda engine: made.append(make(engine)),
    )
    figures = result.summary()
    tenants = figures.pop("tenants")
    figures |= {
        f"{kind}_bytes": sum(one[kind] for one in world.copied.values()) for kind in ("weights_in", "kv_in", "kv_out")
    }
    figures["kv_out_bytes"] += sum(one.kv_out_bytes for one in made)
    figures |= {
        "goodput_per_s": watch.good / figures["duration_s"],
        "cpu_s": watch.cpu_s,
        "capacity_bytes": world.last_capacity_bytes,
        "layers_remapped_peak": sum(one["layers_remapped_peak"] for one in tenants.values()),
        "kv_growth_peak": max(one["kv_blocks_peak"] / one["kv_blocks_start"] for one in tenants.values()),
        "running_peak": max(sum(one.running for one in sample.tenants.values()) for sample in result.timeline),
        "load_1min_before": load,
    }
    tokens = {
        f"{name} {id}": " ".join(map(str, ids)) for name, mine in result.tokens().items() for id, ids in mine.items()
    }
    return {"figures": figures, "tokens": tokens}


def main(arguments: list[str]) -> None:
    """SUITE CASE POLICY RESULT(path)."""
    *names, result = arguments
    Path(result).write_text(json.dumps(serve(*names)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
