"""step(), forward() and growth of one tenant while the worker re-points 10,000 pages of another, against an idle worker.

Runs on the emulated driver with the costs that kvcached measured on an A100 (1.5, 36 and 25.6 us a page for map, set access and
unmap: 0.6 s of driver calls for 10,000 pages). The emulator's calls sleep, so that the worker takes no core from anybody. What is
shown is the waiting for locks, which is the library's; what a real driver makes launches wait for, docs/notes/cuda.md says.
Both sides alternate in one process. Needs REMAP_EMULATED_DRIVER, as `make test` sets it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from measure import Abandoned, median, record, rounds

import remap
from remap_serve.sim.results import percentile

PAGE = 4096
LARGE_LAYERS, LARGE_PAGES, AWAY = 6, 2500, 4  # 10,000 pages are re-pointed at once
SMALL_LAYERS, SMALL_PAGES = 12, 8
ROUNDS = 20
CALLS, PERIOD_S = 1500, 200e-6
COSTS = {"REMAP_EMULATED_MAP_US": "1.5", "REMAP_EMULATED_SET_ACCESS_US": "36", "REMAP_EMULATED_UNMAP_US": "25.6"}


def _masters(layers: int, pages: int) -> list[np.ndarray]:
    rng = np.random.default_rng(layers)
    return [rng.integers(0, 256, pages * PAGE, dtype=np.uint8) for _ in range(layers)]


class World:
    """Two tenants on one device: the large one keeps the worker busy, the small one is measured."""

    def __init__(self) -> None:
        capacity = (LARGE_LAYERS * LARGE_PAGES + SMALL_LAYERS * SMALL_PAGES + 64) * PAGE
        config = remap.advanced.Knobs(reserve_blocks=0, hysteresis_blocks=0, slowdown=100.0)
        self.session = remap.Session(capacity, "cuda:0", page_bytes=PAGE, config=config)
        self.large = self._attach("large", LARGE_LAYERS, LARGE_PAGES)
        self.small = self._attach("small", SMALL_LAYERS, SMALL_PAGES)
        self.passes(self.large, LARGE_LAYERS, 2)
        self.passes(self.small, SMALL_LAYERS, 4)

    def _attach(self, name: str, layers: int, pages: int) -> remap.Tenant:
        spec = remap.KVSpec(
            layers=layers,
            kv_heads=1,
            head_dim=64,
            block_tokens=1,
            dtype="uint8",
            min_blocks=4,
            max_blocks=self.session.capacity_bytes // (2 * layers * 64) + 1,
        )
        return self.session.attach_bytes(_masters(layers, pages), name=name, kv=spec)

    def passes(self, tenant: remap.Tenant, layers: int, count: int) -> None:
        """Whole passes; the layers' times are long enough to hide any copy."""
        for _ in range(count):
            with tenant.forward():
                for layer in range(layers):
                    tenant.wait(layer)
                    time.sleep(0.0005)
                    tenant.done(layer)

    def settled(self) -> None:
        """Nothing is away, nothing is under way."""
        for tenant, layers in ((self.small, SMALL_LAYERS), (self.large, LARGE_LAYERS)):
            remap.advanced.remap(self.session, tenant.name, 0)
            remap.advanced.settle(self.session)
            with Abandoned(), tenant.forward():
                for layer in range(layers):
                    tenant.wait(layer)
                    tenant.done(layer)
                raise Abandoned.Pass
        remap.advanced.check(self.session)

    def measure(self, samples: dict[str, list[float]], busy: bool) -> None:
        """One round of one side."""
        self.settled()
        step, executor = self.session.step, self.session._executor
        if busy:
            remap.advanced.remap(self.session, "large", AWAY, 1, "nested")

        def timed(name: str, call: Callable[[], Any], due: float = 0.0) -> None:
            begun = due or time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - begun)

        def empty_pass() -> None:
            with self.small.forward():
                pass

        nothing = {"small": remap.Demand(blocks=0)}
        # Due at fixed times, whether or not the call before has returned: who is kept waiting keeps those behind waiting, too.
        due = time.perf_counter()
        for _ in range(CALLS):
            due += PERIOD_S
            while time.perf_counter() < due:
                pass
            timed("step", lambda: step(nothing), due)
            timed("forward", empty_pass)
        for more in range(1, 6):
            timed("growth", lambda more=more: remap.advanced.remap(self.session, "small", more, 2, "nested"))
        if busy:
            begun = time.perf_counter()
            executor.drain()
            samples["still at work"].append(time.perf_counter() - begun)


def child(turns: int) -> None:
    """Prints both sides' samples as JSON: of so many rounds, behind one that warms up."""
    world = World()
    names = ("step", "forward", "growth", "still at work")
    sides: dict[str, dict[str, list[float]]] = {side: {name: [] for name in names} for side in ("idle", "busy")}
    for turn in range(turns + 1):
        for side in ("idle", "busy") if turn % 2 else ("busy", "idle"):
            spare: dict[str, list[float]] = {name: [] for name in names}
            world.measure(spare if turn == 0 else sides[side], side == "busy")
    world.session.close()
    sys.stdout.write(json.dumps(sides))


def test_calls_beside_the_worker(benchmark):
    driver = os.environ.get("REMAP_EMULATED_DRIVER", "")
    if not Path(driver).is_file():
        pytest.skip("needs the emulated driver: REMAP_EMULATED_DRIVER names no file")
    environment = os.environ | COSTS | {
        "REMAP_LIBCUDA": driver,
        "REMAP_EMULATED_GRANULARITY": str(PAGE),
        "REMAP_EMULATED_MEMORY": str(1 << 30),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip

    command = [sys.executable, __file__, str(rounds(benchmark, ROUNDS))]

    def run() -> str:
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=600).stdout

    sides = json.loads(benchmark.pedantic(run, rounds=1))
    # Else the worker was done before the measurement was, and nothing was shown.
    assert not benchmark.enabled or min(sides["busy"]["still at work"]) > 0.01
    for name in ("step", "forward", "growth"):
        idle, busy = sides["idle"][name], sides["busy"][name]
        for share in (0.5, 0.99):
            record(
                benchmark,
                f"{name} beside the worker / beside none, P{share * 100:.0f}",
                percentile(busy, share) / percentile(idle, share),
                "x",
                busy,
                target=1.1,
                idle_us=percentile(idle, share) * 1e6,
                busy_us=percentile(busy, share) * 1e6,
                worst_us=max(busy) * 1e6,
                median_idle_us=median(idle) * 1e6,
            )


if __name__ == "__main__":
    child(int(sys.argv[1]))
