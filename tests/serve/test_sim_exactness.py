"""Simulated passes take exactly what the theory of streaming says: closed forms, and `schedule.period` for anything.

A page goes over the link in one second and every time is a whole number of seconds, so nothing is lost to rounding; without
contention and set-up times the backend has no other cost. A period is the distance between the ends of passes in the steady
state, over as many passes as a schedule may take to repeat.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from effort import examples
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from sim_models import kv_spec

import remap
from remap import _core
from remap.advanced import Platform
from remap.errors import InvalidArgument
from remap.internals import internals
from remap.policy import schedule
from remap_serve.engine.chunk import Chunk
from remap_serve.sim.engine import SimEngine
from remap_serve.sim.passes import SessionPass
from remap_serve.sim.scheduling import PrefillFirst
from remap_serve.sim.sequences import SimSequence as Request
from remap_serve.sim.workload import Item
from remap_serve.sim.worlds import masters

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
from sliced_passes import slices_period
from stall_closed_form import stall_uniform

PAGE = 2 << 20
LINK = {"h2d_bytes_per_s": PAGE, "d2h_bytes_per_s": PAGE, "hbm_bytes_per_s": 1024 * PAGE}
REPEAT = 12  # passes: a (max, +) matrix of up to 3 rows repeats itself after 1, 2 or 3 of them
SETTLED = 24
TIE = 2000  # passes that suffice when two cycles of the schedule take nearly the same time


class World:
    """A tenant with layers of these pages on a link of a page a second, whose layer k takes compute_s[k]."""

    def __init__(self, pages: Sequence[int], compute_s: Sequence[float], gap_s: float = 0.0) -> None:
        self.pages, self.compute_s, self.gap_s = list(pages), list(compute_s), gap_s
        spare = 4 + sum(pages)
        self.backend = _core.make_sim_backend(capacity_bytes=(sum(pages) + spare) * PAGE, contention=False, **LINK)
        self.session = remap.Session((sum(pages) + spare) * PAGE, platform=Platform(backend=self.backend))
        tokens = PAGE // (len(pages) * 2 * 64 * 2) or 1
        spec = kv_spec(len(pages), 1, 64, tokens, 2, 2 * sum(pages) + 8)
        self.tenant = self.session.attach_bytes(masters([each * PAGE for each in pages]), kv=spec)
        self.stream = self.backend.create_stream()
        self.now = 0.0

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        remap.advanced.check(self.session)
        self.session.close()

    def one_pass(self) -> float:
        """When it ended. The host waits for that, and for the gap."""
        with self.tenant.forward(stream=self.stream):
            for layer, seconds in enumerate(self.compute_s):
                self.tenant.wait(layer)
                self.backend.compute(self.stream, seconds)
                self.tenant.done(layer)
        end = float(self.backend.stream_end(self.stream))
        self.backend.advance_to(end)
        self.backend.advance(self.gap_s)
        return end

    def period(self, settle: int = SETTLED) -> tuple[float, float]:
        """Of the steady state: seconds a pass, and of those what the prefetcher counts as stall."""
        for _ in range(settle):
            begun = self.one_pass()
        stalled = 0.0
        for _ in range(REPEAT):
            ended = self.one_pass()
            stalled += internals(self.tenant)._state.prefetcher.stats().last_pass_stall_s
        return (ended - begun) / REPEAT, stalled / REPEAT

    def expect(self, expected: float, computing: float | None = None) -> None:
        """expected: the period; computing: what of it is no stall."""
        found, stall = self.period()
        if found != pytest.approx(expected, rel=1e-9):
            found, stall = self.period(TIE)
        assert found == pytest.approx(expected, rel=1e-9)
        computing = sum(self.compute_s) + self.gap_s if computing is None else computing
        assert stall == pytest.approx(expected - computing, rel=1e-9, abs=1e-9)


def expected_period(world: World, buffers: int) -> float:
    """`schedule.period` of what the tenant streams. The gap is computation in front of the first layer: copies go on in it."""
    return schedule.period(
        [world.gap_s, *world.compute_s],
        [0.0, *map(float, world.pages)],
        [layer + 1 for layer in world.tenant.streamed],
        buffers,
    )


@pytest.mark.parametrize(("n", "alpha"), [(8, 1), (8, 3), (9, 2), (12, 3), (12, 5), (13, 4), (40, 9)])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("buffers", [1, 2])
def test_equal_layers_take_the_closed_form(n: int, alpha: int, ratio: float, buffers: int) -> None:
    """ratio: copying a layer to computing it. One buffer: any n and m. Two: m even; with fixed slots an odd m waits for longer at
    the end of the pass, which `schedule.period` knows."""
    transfer = 4
    compute = transfer / ratio
    with World([transfer] * n, [compute] * n) as world:
        remap.advanced.remap(world.session, "model", layers=alpha, buffers=buffers)
        m = alpha + buffers
        assert world.tenant.streamed == schedule.uniform(n, alpha, buffers) and len(world.tenant.streamed) == m
        exact = schedule.period([compute] * n, [float(transfer)] * n, world.tenant.streamed, buffers)
        world.expect(exact)
        if buffers == 1 or m % 2 == 0:
            assert exact == pytest.approx(n * compute + stall_uniform(n, compute, transfer, alpha, buffers), rel=1e-9)


def test_a_pass_of_the_simulator_is_the_same_pass() -> None:
    """`SessionPass`, which skips wait and done where nothing is streamed, and times from a roofline's two methods; and
    `SimEngine`, with the gap: a steady decode of one row that never ends, so the context grows and costs nothing."""
    cost = SimpleNamespace(layer_s=lambda *batch: 2.0, ends_s=lambda tokens, rows: 5.0)
    with World([8] * 12, [2.0] * 12) as world:
        remap.advanced.remap(world.session, "model", layers=2, buffers=2)
        passes = SessionPass(world.backend, world.tenant, cost, SimpleNamespace(layers=12))  # type: ignore[arg-type]
        row = [Chunk(Request(0, 7, 2), 7, 1)]
        ends, stalls = [], []
        for _ in range(SETTLED + REPEAT):
            ends.append(passes.start(row))
            world.backend.advance_to(ends[-1])
            stalls.append(passes.stall_s)
        # The head is behind the last layer.
        exact = schedule.period([2.0] * 11 + [7.0], [8.0] * 12, world.tenant.streamed, 2)
        assert (ends[-1] - ends[-1 - REPEAT]) / REPEAT == pytest.approx(exact, rel=1e-9)
        assert exact > 12 * 2.0 + 5.0
        assert passes.compute_s == pytest.approx((SETTLED + REPEAT) * 29.0, rel=1e-12)
        assert (stalls[-1] - stalls[-1 - REPEAT]) / REPEAT == pytest.approx(exact - 29.0, rel=1e-9)
        scheduler = PrefillFirst(block_tokens=internals(world.tenant).kv.block_tokens)
        gap = {"session": None, "gap_s": 5.0, "most_blocks": 8, "context": 1000}
        engine = SimEngine(world.tenant, scheduler, passes, world.backend, **gap)  # type: ignore[arg-type]
        engine.add_request(Item("model", 0.0, 4, 100), arrived_s=0.0)
        times = []
        for _ in range(40):
            engine.advance()
            times.append(world.backend.now)
        computing, copying = [5.0, *[2.0] * 11, 7.0], [0.0, *[8.0] * 12]
        exact = schedule.period(computing, copying, [layer + 1 for layer in world.tenant.streamed], 2)
        assert times[-1] - times[-1 - REPEAT] == pytest.approx(REPEAT * exact, rel=1e-9)


layers_of = st.integers(3, 10).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(3, 12), min_size=n, max_size=n),
        st.lists(st.integers(0, 12), min_size=n, max_size=n),
        st.integers(1, n - 1),
        st.sampled_from([1, 2]),
    )
)


@given(layers_of, st.sampled_from(["uniform", "nested"]), st.sampled_from([0, 0, 1, 5, 30]))
@settings(max_examples=examples(120), deadline=None)
def test_any_layers_take_the_period_of_the_schedule(drawn, selection, gap) -> None:
    pages, compute, alpha, buffers = drawn
    n = len(pages)
    buffers = min(buffers, n - alpha)
    with World(pages, [float(each) for each in compute], float(gap)) as world:
        try:
            remap.advanced.remap(world.session, "model", layers=alpha, buffers=buffers, selection=selection)
        except InvalidArgument:
            reject()  # layers so unequal that the streamed ones are smaller than the ring for the largest
        assert len(world.tenant.streamed) == alpha + buffers
        world.expect(expected_period(world, buffers))


@given(layers_of, st.sampled_from([0, 3]))
@settings(max_examples=examples(60), deadline=None)
def test_slices_of_any_layers_take_their_period(drawn: tuple[list[int], list[int], int, int], gap: int) -> None:
    pages, compute, alpha, buffers = drawn
    n = len(pages)
    with World(pages, [float(each) for each in compute], float(gap)) as world:
        try:
            remap.advanced.remap(world.session, "model", layers=alpha, buffers=buffers, selection="slices")
        except InvalidArgument:
            reject()  # layers so unequal that no tail frees as much
        tail = internals(world.tenant)._state.pages.depth
        shares = [min(tail, each) / each for each in pages]
        assert tail and world.tenant.streamed == tuple(range(n))
        exact = slices_period(
            [world.gap_s, *world.compute_s], [0.0, *map(float, pages)], [0.0, *shares], buffers, range(1, n + 1)
        )
        world.expect(exact)


def test_slices_of_equal_layers() -> None:
    """Traffic alpha n / (n - 2): the stall is what of it the computation does not hide. Asked for in parts of a layer too."""
    n, pages, compute = 12, 20, 3.0
    for asked in (2.5, 4):
        with World([pages] * n, [compute] * n) as world:
            remap.advanced.remap(world.session, "model", layers=asked, buffers=2, selection="slices")
            world.expect(max(n * compute, world.tenant.remapped * n / (n - 2) * pages))
