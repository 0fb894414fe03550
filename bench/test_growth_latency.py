"""From "out of blocks" to blocks usable: allocate() fails, session.step() gives layers away, allocate() succeeds.

Target: 30 us a layer, whatever the number of its pages, and no backend call (so no system call) before the subscriber is
told; that is when blocks are usable. Afterwards step() also starts the copies and the re-pointing, which an engine that
allocates after step() waits for as well.

"first" growth makes the ring: layers of the ring change as well as those that are given. "next" growth finds a ring. The exact
bound on what can be streamed is warm, as in steady serving (a pass prepares it whenever times are estimated anew); "cold" is
what growth costs when it is not.
"""

from __future__ import annotations

import time

import pytest
from measure import Abandoned, RawTenant, median, record

import remap
from remap.internals import internals
from remap.policy.cost import LayerTimes

ROUNDS = 60
# Layers, pages of a layer, bytes of a page. The last two move as many bytes, in a few pages or in many: the cost of growth
# does not depend on the number of pages, but caches are as cold as the bytes that were copied before have left them.
SIZES = {
    "7 pages": (12, 7, 64 << 10),
    "208 pages": (8, 208, 64 << 10),
    "7 large pages": (12, 7, 1 << 20),
    "2000 small pages": (12, 2000, 4 << 10),
}
# No reserve, so that the demand alone says how many layers move.
CONFIG = remap.advanced.Knobs(reserve_blocks=0)


class Growth:
    """Runs one growth by `count` layers at a time, and undoes it."""

    def __init__(self, raw: RawTenant, start: int, count: int, compute_s: float) -> None:
        self.raw, self.session, self.tenant = raw, raw.session, raw.tenant
        self.demand = {"raw": remap.Demand(blocks=int(count * internals(self.tenant)._state.blocks_per_layer))}
        self.start, self.count = start, count
        self.told: list[float] = []
        self.calls_at_callback: list[int] = []
        self.held: list[int] = []
        self.compute_s = compute_s
        self.set_times(0)
        self.tenant.kv.subscribe(self._callback)

    def set_times(self, number: int) -> None:
        """Passes whose computation hides the copies, as measured for the `number`-th time: the bound is not warm then. Not as
        measured here: where copies are slower, an odd number of layers in two buffers stalls, and one more is taken."""
        timing, layers = internals(self.tenant)._state.timing, self.raw.layers
        times = LayerTimes((self.compute_s * (1 + number * 1e-6),) * layers, (self.compute_s / 20,) * layers)
        timing.decode = lambda: times

    def _callback(self, added: object, withdrawn: object) -> None:
        self.told.append(time.perf_counter())
        self.calls_at_callback.append(self.raw.trace.count())

    def reset(self) -> None:
        """Everything back: `start` layers remapped, every layer in place, all blocks allocated."""
        kv = self.tenant.kv
        if self.held:
            kv.free(self.held)
        remap.advanced.remap(self.session, "raw", 0)
        if self.start:
            remap.advanced.remap(self.session, "raw", self.start, 2, "nested")
        remap.advanced.settle(self.session)
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
        assert self.tenant.remapped == self.start + self.count
        assert len(self.told) == 1
        return {
            "callback": self.told[0] - begun,
            "step": stepped - begun,
            "usable": ended - begun,
            "calls": self.calls_at_callback[0] - calls,
        }


@pytest.mark.parametrize(("kind", "count"), [("first", 1), ("first", 4), ("next", 1), ("next", 4), ("cold", 1)])
@pytest.mark.parametrize("size", SIZES)
def test_growth(benchmark, size, kind, count):
    layers, pages, page_bytes = SIZES[size]
    layer_bytes = pages * page_bytes
    with RawTenant(layers, layer_bytes, page_bytes=page_bytes, traced=True, config=CONFIG) as raw:
        growth = Growth(raw, int(kind == "next"), count, compute_s=0.001 if layer_bytes < 1 << 20 else 0.010)
        growth.reset()
        growth.grow()  # warms the bound
        samples: list[dict[str, float]] = []

        def setup() -> None:
            growth.reset()
            if kind == "cold":
                growth.set_times(1 + len(samples))

        benchmark.pedantic(lambda: samples.append(growth.grow()), setup=setup, rounds=ROUNDS)
        raw.verify()
        # The minimum is what it costs by itself: wherever a copying thread shares the core, it runs in between.
        for point in ("callback", "step"):
            each = [sample[point] / count for sample in samples]
            record(
                benchmark,
                f"{kind} growth to {'usable blocks' if point == 'callback' else 'return of step'}, {count} x {size}, a layer",
                median(each) * 1e6,
                "us",
                each,
                target=30.0 if point == "callback" and kind != "cold" else None,
                layers_at_once=count,
                least_us=min(each) * 1e6,
                in_hand_us=median(sample["usable"] for sample in samples) / count * 1e6,
            )
        calls = max(sample["calls"] for sample in samples)
        each = [sample["callback"] for sample in samples]
        name = f"backend calls before usable blocks, {kind}, {count} x {size}"
        record(benchmark, name, calls, "calls", each, target=0.0)
