"""From "out of blocks" to usable blocks, the re-pointing behind it, and a step with nothing to do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from bench.gpu.context import MIB, Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, count, figure, seconds
from bench.gpu.tenants import DeviceTenant, device_tenant
from bench.gpu.timing import Marks, timed
from bench.gpu.work import calibrated, work

import remap
from remap import _core
from remap.internals import internals

# No reserve, so that the demand alone says how many layers move; any stall is allowed, so that the link does not.
CONFIG = remap.advanced.Knobs(reserve_blocks=0, slowdown=1e6)
# Calls that change what addresses show. Copies, events and streams are what a change may enqueue; these it may not make.
MAPPING_CALLS = (
    "reserve",
    "release",
    "create_page",
    "destroy_page",
    "map",
    "unmap",
    "set_access",
    "exchange",
    "populate",
)


class Growth:
    """Grows one tenant through `session.step`, and undoes it. One for each tenant: it stays subscribed."""

    def __init__(self, raw: DeviceTenant, marks: Marks) -> None:
        self.raw, self.marks = raw, marks
        self.session, self.tenant = raw.session, raw.tenant
        self.told: list[float] = []
        self.calls: list[int] = []
        self.held: list[int] = []
        for _ in range(3):  # the controller wants measured times
            self._pass()
        self.tenant.kv.subscribe(self._callback)

    def _callback(self, added: object, withdrawn: object) -> None:
        self.told.append(time.perf_counter())
        self.calls.append(self.raw.backend.count())

    def _pass(self) -> None:
        self.raw.run()
        self.marks.wait(self.marks.mark(self.raw.handle))
        self.marks.reset()

    def reset(self, start: int) -> None:
        """Everything back: `start` layers remapped, every layer in place, all blocks allocated."""
        kv = self.tenant.kv
        if self.held:
            kv.free(self.held)
        remap.advanced.remap(self.session, "raw", 0)
        if start:
            remap.advanced.remap(self.session, "raw", start, 2, "nested")
        remap.advanced.settle(self.session)
        self._pass()
        self._pass()  # the first one waited for reloads on the device; the second one notices that they have arrived
        self.held = kv.allocate(kv.free_blocks)
        self.session.step({"raw": remap.Demand(blocks=0)})
        self.told.clear()
        self.calls.clear()

    def grow(self, layers: int) -> dict[str, float]:
        """Seconds from the failed allocate() to the callback, to the return of step(), until every region shows its target;
        and the calls to the backend made before the callback."""
        kv, backend, before = self.tenant.kv, self.raw.backend, self.tenant.remapped
        blocks = int(layers * internals(self.tenant)._state.blocks_per_layer)
        wanted = blocks - 1  # a block that straddles the end of the last layer's pages is not usable
        try:
            kv.allocate(wanted)
        except remap.OutOfBlocks:
            calls, begun = backend.count(), time.perf_counter()
            self.session.step({"raw": remap.Demand(blocks=blocks)})
            stepped = time.perf_counter()
            self.held += kv.allocate(wanted)
        else:
            raise Wrong("there were blocks left")
        remap.advanced.settle(self.session)
        settled = time.perf_counter()
        if self.tenant.remapped != before + layers or len(self.told) != 1:
            raise Wrong(f"{self.tenant.remapped} layers are remapped, {before + layers} should be")
        return {
            "usable": self.told[0] - begun,
            "step": stepped - begun,
            "settled": settled - begun,
            "calls": self.calls[0] - calls,
        }

    def shrink(self, layers: int) -> dict[str, float]:
        """Seconds of the call that takes `layers` layers' pages back, and until those layers hold their bytes again."""
        self.tenant.kv.free(self.held)
        self.held = []
        target = self.tenant.remapped - layers
        begun = time.perf_counter()
        remap.advanced.remap(self.session, "raw", target, 2, "nested")
        called = time.perf_counter()
        self._pass()  # waits for every layer
        there = time.perf_counter()
        if self.tenant.remapped != target:
            raise Wrong(f"{self.tenant.remapped} layers are remapped, {target} should be")
        return {"called": called - begun, "there": there - begun}


@measure("growth", full_s=18, quick_s=4)
def growth(ctx: Context) -> Iterator[Figure]:
    """allocate() fails, step() gives layers away, allocate() succeeds. "first" makes the ring, "next" finds one."""
    layers = 8
    sizes = ctx.pick((64 * MIB, 512 * MIB), (64 * MIB,), (4 * MIB,))
    every = (("first", 1), ("first", 4), ("next", 1), ("next", 4))
    cases = ctx.pick(every, every[::3], every[::3])
    made: list[float] = []
    for size in sizes:
        layer_bytes = ctx.fit(layers * size, unit=layers * 2 * MIB, host=True) // layers
        with device_tenant(ctx, layers, layer_bytes, traced=True, config=CONFIG) as (raw, marks):
            grown = Growth(raw, marks)
            for kind, taken in cases:
                start = int(kind == "next")
                samples = []
                for index in ctx.rounds(ctx.pick(40, 12, 3) + 1, share=0.7 / (len(sizes) * len(cases))):
                    grown.reset(start)
                    each = grown.grow(taken)
                    if index:  # the first one warms what growth asks of the schedule
                        samples.append(each)
                case = f"{kind} {taken} x {layer_bytes // MIB} MiB"
                yield _usable(case, taken, samples, shown=size == sizes[-1] and (kind, taken) in every[::3])
                made += [each["calls"] for each in samples]
            grown.reset(0)
            raw.verify(marks)
    yield count("backend calls before blocks are usable, most of any case", max(made), "calls", n=len(made), target=0)


def _usable(case: str, taken: int, samples: list[dict[str, float]], *, shown: bool) -> Figure:
    usable = [each["usable"] / taken for each in samples]
    return seconds(
        f"out of blocks to usable blocks, {case}, a layer",
        usable,
        target_us=20.0,
        shown=shown,
        least_us=min(usable) * 1e6,
        step_us=statistics.median(each["step"] for each in samples) / taken * 1e6,
        settled_us=statistics.median(each["settled"] for each in samples) / taken * 1e6,
        backend_calls=max(each["calls"] for each in samples),
    )


@measure("re-pointing", full_s=12, quick_s=2.5)
def repointing(ctx: Context) -> Iterator[Figure]:
    """How long the worker takes until the regions of all streamed layers show the ring, and back, by page size."""
    layers, buffers = 8, 2
    for page in ctx.pick((2 * MIB, 64 * MIB), (2 * MIB, 64 * MIB), (2 * MIB,)):
        layer_bytes = ctx.pick(512 * MIB, 128 * MIB, 4 * MIB)
        layer_bytes = ctx.fit(layers * layer_bytes, unit=layers * page, host=True) // layers
        with device_tenant(ctx, layers, layer_bytes, traced=True, page_bytes=page) as (raw, marks):
            session, backend = raw.session, raw.backend
            calls = [getattr(_core.Call, name) for name in ("map", "unmap", "set_access")]
            away: list[float] = []
            back: list[float] = []
            made = 0

            def to_ring(session: remap.Session = session) -> None:
                remap.advanced.remap(session, "raw", layers - buffers, buffers)
                remap.advanced.settle(session)

            def to_home(session: remap.Session = session) -> None:
                remap.advanced.remap(session, "raw", 0)
                remap.advanced.settle(session)

            for index in ctx.rounds(ctx.pick(30, 8, 3) + 1, share=0.45):
                raw.run()
                marks.wait(marks.mark(raw.handle))
                marks.reset()
                before = sum(backend.count(call) for call in calls)
                first = timed(to_ring)
                made = sum(backend.count(call) for call in calls) - before
                raw.run()
                marks.wait(marks.mark(raw.handle))
                marks.reset()
                second = timed(to_home)
                if index:
                    away.append(first / layers)
                    back.append(second / layers)
            raw.verify(marks)
        size = f"{layer_bytes // MIB} MiB layer, pages of {page // MIB} MiB"
        pages = layer_bytes // page
        yield seconds(f"re-pointing to the ring, {size}", away, pages=pages, mapping_calls=made)
        yield seconds(f"re-pointing home, {size}", back, shown=False, pages=pages)


@measure("session.step", full_s=3, quick_s=1)
def step_cost(ctx: Context) -> Iterator[Figure]:
    """session.step with nothing to do, with nothing remapped and with something."""
    never_back = remap.advanced.Knobs(dwell=10**9)
    with device_tenant(ctx, 8, ctx.pick(64 * MIB, 16 * MIB, 4 * MIB), traced=True, config=never_back) as (
        raw,
        marks,
    ):
        demand = {"raw": remap.Demand(blocks=0)}
        calls = steps = 0
        for remapped in (0, 4):
            raw.remap(remapped)
            for _ in range(3):
                raw.run()
            marks.wait(marks.mark(raw.handle))
            marks.reset()
            raw.session.step(demand)
            before = raw.backend.count()
            rounds = ctx.rounds(ctx.pick(5000, 2000, 50), share=0.4)
            samples = [timed(lambda: raw.session.step(demand)) for _ in rounds]
            calls += raw.backend.count() - before
            steps += len(samples)
            title = f"session.step, nothing to do, {remapped} layers remapped"
            yield seconds(title, samples, target_us=10.0, shown=not remapped)
        yield count("backend calls of such steps", calls, "calls", n=steps, target=0)
        raw.verify(marks)


@measure("iteration gap", full_s=5, quick_s=1)
def iteration_gap(ctx: Context) -> Iterator[Figure]:
    """How long the device idles between two passes while the host waits for tokens, calls step() and begins the next pass."""
    with (
        device_tenant(ctx, 8, ctx.pick(64 * MIB, 16 * MIB, 4 * MIB)) as (raw, marks),
        work(ctx, raw.backend, raw.stream) as load,
    ):
        calibrated(load, marks, raw.handle)
        demand = {"raw": remap.Demand(blocks=0)}
        session, tenant, stream = raw.session, raw.tenant, raw.stream
        taken: dict[str, list[float]] = {"bare": [], "ours": []}
        for index in ctx.rounds(ctx.pick(1000, 300, 10), least=6, share=0.9):
            for kind, samples in taken.items():
                load.launch(2)
                ended = marks.mark(raw.handle)
                marks.wait(ended)  # an engine waits for its tokens here
                if kind == "ours":
                    session.step(demand)
                    bracket = tenant.forward(stream=stream)
                    bracket.__enter__()
                    tenant.wait(0)
                begun = marks.mark(raw.handle)
                load.launch(2)
                if kind == "ours":
                    tenant.done(0)
                    bracket.__exit__(None, None, None)
                last = marks.mark(raw.handle)
                marks.wait(last)
                if index > 2:
                    samples.append(marks.between(ended, begun))
                marks.reset()
        bare = statistics.median(taken["bare"])
        yield figure(
            "iteration gap added by step + forward + wait",
            (statistics.median(taken["ours"]) - bare) * 1e6,
            "us",
            taken["ours"],
            bare_us=bare * 1e6,
        )
