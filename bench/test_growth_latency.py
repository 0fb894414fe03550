"""From "out of blocks" to blocks usable: allocate() fails, session.step() gives layers away, allocate() succeeds.

Target: 50 us a layer, and no backend call (so no system call) before the subscriber is told. The exact bound on what can
be streamed is warm, as in steady serving; what it costs when the times were estimated anew is reported beside it.
"""

from __future__ import annotations

import statistics
import time

import pytest
from measure import Abandoned, RawTenant, record

import remap

ROUNDS = 60
PAGE = 64 << 10
SIZES = {"7 pages": (12, 7 * PAGE), "208 pages": (8, 208 * PAGE)}
# No reserve, so that the demand alone says how many layers move.
CONFIG = remap.ControllerConfig(headroom_blocks=0)


class Growth:
    """Runs one growth by `count` layers at a time, and undoes it."""

    def __init__(self, raw: RawTenant, count: int, compute_s: float) -> None:
        self.raw, self.session, self.tenant = raw, raw.session, raw.tenant
        self.demand = {"raw": remap.Demand(blocks=int(count * self.tenant._blocks_per_layer))}
        self.count = count
        self.told: list[float] = []
        self.calls_at_callback: list[int] = []
        self.held: list[int] = []
        for _ in range(3):  # the times of passes whose computation hides the copies
            with self.tenant.forward():
                for layer in range(raw.layers):
                    self.tenant.wait(layer)
                    time.sleep(compute_s)
                    self.tenant.done(layer)
        self.tenant.kv.subscribe(self._callback)

    def _callback(self, added: object, withdrawn: object) -> None:
        self.told.append(time.perf_counter())
        self.calls_at_callback.append(self.raw.trace.count())

    def reset(self) -> None:
        """Everything back: no block held, nothing remapped, every layer in place."""
        kv = self.tenant.kv
        if self.held:
            kv.free(self.held)
        self.session.remap("raw", 0)
        self.session.settle()
        with Abandoned(), self.tenant.forward():
            for layer in range(self.raw.layers):
                self.tenant.wait(layer)
                self.tenant.done(layer)
            raise Abandoned.Pass
        self.held = kv.allocate(kv.free_blocks)
        self.session.step({"raw": remap.Demand(blocks=0)})
        self.told.clear()
        self.calls_at_callback.clear()

    def grow(self) -> dict[str, float]:
        """Seconds from the failed allocate() to the callback, to the return of step(), to blocks in hand."""
        kv = self.tenant.kv
        wanted = self.demand["raw"].blocks - 1  # a block that straddles the end of the last layer's pages is not usable
        try:
            kv.allocate(wanted)
        except remap.OutOfBlocks:
            calls, begun = self.raw.trace.count(), time.perf_counter()
            self.session.step(self.demand)
            stepped = time.perf_counter()
            self.held += kv.allocate(wanted)
            ended = time.perf_counter()
        else:
            raise AssertionError("there were blocks left")
        assert self.tenant.remapped == self.count
        assert len(self.told) == 1
        return {
            "callback": self.told[0] - begun,
            "step": stepped - begun,
            "usable": ended - begun,
            "calls": self.calls_at_callback[0] - calls,
        }


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("size", SIZES)
def test_growth(benchmark, size, count, cold):
    layers, layer_bytes = SIZES[size]
    with RawTenant(layers, layer_bytes, page_bytes=PAGE, traced=True, controller=CONFIG) as raw:
        growth = Growth(raw, count, compute_s=0.001 if layer_bytes < 1 << 20 else 0.010)
        growth.reset()
        growth.grow()  # warms the bound
        samples: list[dict[str, float]] = []

        def setup() -> None:
            growth.reset()
            if cold:
                raw.tenant.calibrate_link(5e9 * (1 + len(samples) * 1e-6))

        benchmark.pedantic(lambda: samples.append(growth.grow()), setup=setup, rounds=ROUNDS // 3 if cold else ROUNDS)
        raw.verify()
        state = "warm" if not cold else "times just estimated anew"
        for point in ("callback", "usable"):
            each = [sample[point] / count for sample in samples]
            record(
                benchmark,
                f"growth to {point}, {size} a layer, {count} at once, {state}",
                statistics.median(each) * 1e6,
                "us",
                each,
                target=None if cold else 50.0,
                layers_at_once=count,
                step_us=statistics.median(sample["step"] for sample in samples) * 1e6,
            )
        if not cold:
            calls = max(sample["calls"] for sample in samples)
            each = [sample["callback"] for sample in samples]
            record(benchmark, f"backend calls to callback, {size}, {count} at once", calls, "calls", each, target=0.0)
