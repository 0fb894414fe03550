"""Simulated passes take exactly what the theory of streaming says: closed forms, and `schedule.period` for anything.

A page goes over the link in one second and every time is a whole number of seconds, so nothing is lost to rounding; without
contention and set-up times the backend has no other cost. A period is the distance between the ends of passes in the steady
state, over as many passes as a schedule may take to repeat.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import remap
from remap import _core
from remap.engine.scheduler import Chunk
from remap.errors import InvalidArgument
from remap.policy import schedule
from remap.policy.slices import slices_period
from remap.sim.engine import SimEngine
from remap.sim.hardware import machine, model
from remap.sim.masters import masters
from remap.sim.passes import SessionPass
from remap.sim.scheduling import PrefillFirst
from remap.sim.sequences import Sequence as Request
from remap.sim.workload import Item

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
from stall_closed_form import stall_uniform

PAGE = 2 << 20
REPEAT = 12  # passes: a (max, +) matrix of up to 3 rows repeats itself after 1, 2 or 3 of them
SETTLED = 24
TIE = 2000  # passes that suffice when two cycles of the schedule take nearly the same time


def kv_spec(layers: int, heads: int, size: int, tokens: int, least: int, most: int) -> remap.KVSpec:
    return remap.KVSpec(
        layers=layers,
        kv_heads=heads,
        head_dim=size,
        block_tokens=tokens,
        dtype="bfloat16",
        min_blocks=least,
        max_blocks=most,
    )


class World:
    """A tenant with layers of these pages on a link of a page a second, whose layer k takes compute_s[k]."""

    def __init__(self, pages: Sequence[int], compute_s: Sequence[float], gap_s: float = 0.0) -> None:
        self.pages, self.compute_s, self.gap_s = list(pages), list(compute_s), gap_s
        spare = 4 + sum(pages)
        self.backend = _core.make_sim_backend(
            capacity_bytes=(sum(pages) + spare) * PAGE,
            h2d_bytes_per_s=PAGE,
            d2h_bytes_per_s=PAGE,
            hbm_bytes_per_s=1024 * PAGE,
            contention=False,
        )
        self.session = remap.Session(
            (sum(pages) + spare) * PAGE, platform=remap.advanced.Platform(backend=self.backend)
        )
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
            stalled += self.tenant._state.prefetcher.stats().last_pass_stall_s
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


# -- closed forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "alpha"), [(8, 1), (8, 3), (9, 2), (12, 3), (12, 5), (13, 4), (40, 9)])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("buffers", [1, 2])
def test_equal_layers_take_the_closed_form(n: int, alpha: int, ratio: float, buffers: int) -> None:
    """ratio: copying a layer to computing it. One buffer: any n and m. Two: m even; with fixed slots an odd m waits for longer at
    the end of the pass, see the next test."""
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
        if n % m == 0 and (buffers == 1 or m % 2 == 0):  # uniform spacing: the table's max of three terms
            thirds = max(n * compute, m * transfer, m / buffers * (compute + transfer))
            assert exact == pytest.approx(thirds, rel=1e-9)


@pytest.mark.parametrize(
    ("ratio", "alpha", "stalls"), [(2.0, 12, (0, 0)), (4.0, 9, (10, 4)), (8.0, 6, (23, 24)), (4.0, 20, (65, 48))]
)
def test_the_table_of_stalls(ratio: float, alpha: int, stalls: tuple[int, int]) -> None:
    """Stall in computations of a layer, n = 40, with one buffer and with two. Rotating slots: for an odd m the fixed ones of the
    library wait for 0 to 4 more, and `schedule.period` says how long."""
    for buffers, stall in zip((1, 2), stalls):
        with World([8] * 40, [8 / ratio] * 40) as world:
            remap.advanced.remap(world.session, "model", layers=alpha, buffers=buffers)
            exact = expected_period(world, buffers)
            world.expect(exact)
            beyond = exact / (8 / ratio) - 40 - stall
            assert beyond == pytest.approx(0.0, abs=1e-9) or (buffers == 2 and alpha % 2 and 0 < beyond <= 4)


def test_a_pass_of_the_simulator_is_the_same_pass() -> None:
    """`SessionPass`, which skips wait and done where nothing is streamed, and times from a roofline's two methods."""

    class Constant:
        def layer_s(self, *batch: int) -> float:
            return 2.0

        def ends_s(self, tokens: int, rows: int) -> float:
            return 5.0

    class Shape:
        layers = 12

    with World([8] * 12, [2.0] * 12) as world:
        remap.advanced.remap(world.session, "model", layers=2, buffers=2)
        passes = SessionPass(world.backend, world.tenant, Constant(), Shape())  # type: ignore[arg-type]
        row = [Chunk(Request(0, 7, 2), 7, 1)]
        ends, stalls = [], []
        for _ in range(SETTLED + REPEAT):
            ends.append(passes.start(row))
            world.backend.advance_to(ends[-1])
            stalls.append(passes.stall_s)
        exact = schedule.period(
            [2.0] * 11 + [7.0], [8.0] * 12, world.tenant.streamed, 2
        )  # the head behind the last layer
        assert (ends[-1] - ends[-1 - REPEAT]) / REPEAT == pytest.approx(exact, rel=1e-9)
        assert exact > 12 * 2.0 + 5.0
        assert passes.compute_s == pytest.approx((SETTLED + REPEAT) * 29.0, rel=1e-12)
        assert (stalls[-1] - stalls[-1 - REPEAT]) / REPEAT == pytest.approx(exact - 29.0, rel=1e-9)


# -- anything ----------------------------------------------------------------------------------------------------------

layers_of = st.integers(3, 10).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(3, 12), min_size=n, max_size=n),
        st.lists(st.integers(0, 12), min_size=n, max_size=n),
        st.integers(1, n - 1),
        st.sampled_from([1, 2]),
    )
)


@given(layers_of, st.sampled_from(["uniform", "nested"]), st.sampled_from([0, 0, 1, 5, 30]))
@settings(max_examples=120, deadline=None)
def test_any_layers_take_the_period_of_the_schedule(
    drawn: tuple[list[int], list[int], int, int], selection: str, gap: int
) -> None:
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
@settings(max_examples=60, deadline=None)
def test_slices_of_any_layers_take_their_period(drawn: tuple[list[int], list[int], int, int], gap: int) -> None:
    pages, compute, alpha, buffers = drawn
    n = len(pages)
    with World(pages, [float(each) for each in compute], float(gap)) as world:
        try:
            remap.advanced.remap(world.session, "model", layers=alpha, buffers=buffers, selection="slices")
        except InvalidArgument:
            reject()  # layers so unequal that no tail frees as much
        tail = world.tenant._state.pages.depth
        shares = [min(tail, each) / each for each in pages]
        assert tail and world.tenant.streamed == tuple(range(n))
        exact = slices_period(
            [world.gap_s, *world.compute_s], [0.0, *map(float, pages)], [0.0, *shares], buffers, range(1, n + 1)
        )
        world.expect(exact)


@pytest.mark.parametrize("tail_layers", [1, 2.5, 4])
def test_slices_of_equal_layers(tail_layers: float) -> None:
    """Traffic alpha n / (n - 2): the stall is what of it the computation does not hide."""
    n, pages, compute = 12, 20, 3.0
    with World([pages] * n, [compute] * n) as world:
        remap.advanced.remap(world.session, "model", layers=tail_layers, buffers=2, selection="slices")
        alpha = world.tenant.remapped
        world.expect(max(n * compute, alpha * n / (n - 2) * pages))


# -- the gap between passes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0.0, 1.0, 7.0, 30.0, 100.0])
def test_copies_go_on_in_the_gap_between_passes(gap: float) -> None:
    """n = 8, one buffer, layers 0 and 4: a copy of 20 s each behind W = 3 computations of 2 s. The gap is in the window of layer
    0 alone, and shortens its wait: of 2 x (20 - 6) s of stall the first half goes with the gap."""
    with World([20] * 8, [2.0] * 8, gap) as world:
        remap.advanced.remap(world.session, "model", layers=1, buffers=1)
        assert world.tenant.streamed == (0, 4)
        stall = max(0.0, 14.0 - gap) + 14.0
        assert expected_period(world, 1) == pytest.approx(16.0 + gap + stall, rel=1e-12)
        world.expect(16.0 + gap + stall)


def test_the_gap_of_a_simulated_engine() -> None:
    """As `SimEngine.advance` makes it: a steady decode of one row that never ends, so the context grows and costs nothing."""

    class Flat:
        def layer_s(self, *batch: int) -> float:
            return 2.0

        def ends_s(self, tokens: int, rows: int) -> float:
            return 0.0

    class Shape:
        layers = 8

    with World([20] * 8, [2.0] * 8) as world:
        remap.advanced.remap(world.session, "model", layers=1, buffers=1)
        passes = SessionPass(world.backend, world.tenant, Flat(), Shape())  # type: ignore[arg-type]
        scheduler = PrefillFirst(block_tokens=world.tenant.kv.block_tokens)
        engine = SimEngine(
            world.tenant, scheduler, passes, world.backend, session=None, gap_s=5.0, most_blocks=8, context=1000
        )
        engine.add_request(Item("model", 0.0, 4, 100), arrived_s=0.0)
        times = []
        for _ in range(40):
            engine.advance()
            times.append(world.backend.now)
        assert times[-1] - times[-13] == pytest.approx(12 * (16.0 + 5.0 + 9.0 + 14.0), rel=1e-9)


def test_a_named_model_on_a_named_machine_without_what_the_theory_leaves_out() -> None:
    """OPT-13b on a GH200, as in the papers: Eq. 5 with two buffers, m even."""
    gh200, opt = machine("GH200-96GB"), model("OPT-13b")
    made = _core.make_sim_backend(
        capacity_bytes=48 << 30,
        h2d_bytes_per_s=gh200.h2d_bytes_per_s,
        d2h_bytes_per_s=gh200.d2h_bytes_per_s,
        hbm_bytes_per_s=gh200.hbm_bytes_per_s,
        contention=False,
    )
    with remap.Session(48 << 30, platform=remap.advanced.Platform(backend=made)) as session:
        spec = kv_spec(40, opt.kv_heads, opt.head_dim, 16, 500, 6000)
        tenant = session.attach_bytes(masters([opt.layer_bytes] * opt.layers), kv=spec)
        remap.advanced.remap(session, "model", layers=14, buffers=2)
        stream, transfer = made.create_stream(), opt.layer_bytes / gh200.h2d_bytes_per_s
        ends: list[Any] = []
        for _ in range(SETTLED + REPEAT):
            with tenant.forward(stream=stream):
                for layer in range(40):
                    tenant.wait(layer)
                    made.compute(stream, transfer / 4.0)
                    tenant.done(layer)
            ends.append(made.stream_end(stream))
            made.advance_to(ends[-1])
        period = (ends[-1] - ends[-1 - REPEAT]) / REPEAT
        assert period == pytest.approx(
            40 * transfer / 4.0 + 24 * transfer / 4.0, rel=1e-9
        )  # 24: the table, alpha 14, r 4
