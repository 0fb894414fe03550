"""What all active tenants wait for together: predicted, seen and allowed, and the warning where they part. In virtual time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from byte_world import World as ByteWorld
from subprocesses import expect_ok

import remap
from remap import _core
from remap.internals import internals
from remap.memory.stall_watch import LEAST_PASSES, MARGIN, WINDOW, StallWatch
from remap_serve.sim.worlds import masters

MIB = 1 << 20
LAYERS, LAYER = 8, 16 * MIB
LINK = 400e9
COPY_S = LAYER / LINK
SLOWDOWN = 0.02
STILL = remap.advanced.Knobs(slowdown=SLOWDOWN, reserve_blocks=0, hysteresis_blocks=0, dwell=10**9, lends=False)


class World:
    """Tenants that stream over one link. A copy takes `COPY_S`, a layer's computation 1.5 of it (`layer_s`)."""

    def __init__(self, tenants: int) -> None:
        self.backend = _core.make_sim_backend(
            capacity_bytes=96 << 30, h2d_bytes_per_s=LINK, d2h_bytes_per_s=LINK, hbm_bytes_per_s=4e12, contention=False
        )
        pages = LAYERS * LAYER // (2 * MIB) + 8
        platform = remap.advanced.Platform(backend=self.backend)
        self.session = remap.Session(tenants * pages * 2 * MIB, platform=platform, config=STILL)
        shape = {"layers": LAYERS, "kv_heads": 1, "head_dim": 64, "block_tokens": 2 * MIB // (LAYERS * 2 * 64 * 2)}
        kv = remap.KVSpec(**shape, min_blocks=8, max_blocks=tenants * pages)
        self.layer_s = 1.5 * COPY_S
        weights = masters([LAYER] * LAYERS)
        self.tenants = {name: self.session.attach_bytes(weights, name=name, kv=kv) for name in "abc"[:tenants]}
        self.streams = {name: self.backend.create_stream() for name in self.tenants}
        self.serve(4)

    def serve(self, rounds: int) -> None:
        """In each round a pass of every tenant, all at once on streams of their own: layer by layer in turns, as the
        simulated link serves copies in the order in which they are enqueued."""
        for _ in range(rounds):
            with ExitStack() as passes:
                for name, tenant in self.tenants.items():
                    passes.enter_context(tenant.forward(stream=self.streams[name]))
                for layer in range(LAYERS):
                    for name, tenant in self.tenants.items():
                        tenant.wait(layer)
                        self.backend.compute(self.streams[name], self.layer_s)
                        tenant.done(layer)
            for stream in self.streams.values():
                self.backend.finish(stream)

    def grow(self) -> None:
        """Every tenant asks for all that its own certificate allows."""
        for name, tenant in self.tenants.items():
            tenant.kv.allocate(tenant.kv.free_blocks)
            self.session.step({name: remap.Demand(blocks=200)})
            assert tenant.remapped >= (4 if len(self.tenants) == 1 else 1), name


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[Any]]]:
    with caplog.at_level(logging.WARNING, logger="remap"):
        yield lambda: [record for record in caplog.records if record.name == "remap.stall"]


@pytest.mark.parametrize("tenants", [1, 3])
def test_tenants_keep_what_was_promised(warnings, tenants):
    """Each one's certificate counts what the others copy on the same link."""
    world = World(tenants)
    with world.session as session:
        world.grow()
        world.serve(WINDOW)
        share = session.snapshot().stall
        assert (share.passes, share.tenants) == (WINDOW, tenants)
        assert share.predicted <= share.allowed == pytest.approx(SLOWDOWN, rel=0.01)
        assert share.seen <= share.allowed + (MARGIN if tenants == 1 else 0.0)
        assert not warnings()
        for name in "ab"[: tenants - 1]:  # who sleeps is not counted
            session.deactivate(name)
        assert session.snapshot().stall.tenants == 1


def test_passes_that_become_quicker_wait_for_longer_than_was_promised(warnings):
    world = World(1)
    with world.session as session:
        world.grow()
        world.layer_s /= 3
        world.serve(WINDOW + 64)
        share = session.snapshot().stall
        assert (share.passes, share.tenants) == (WINDOW, 1)
        assert share.seen > share.allowed + MARGIN
        waited = sum(tenant.stall_s for tenant in session.snapshot().tenants.values())
        computed = sum(tenant.compute_s for tenant in session.snapshot().tenants.values())
        assert share.seen == pytest.approx(waited / computed, rel=0.1)  # those count from attach on
        (record,) = warnings()  # once, however long it goes on
        assert record.stall.seen > record.stall.allowed + MARGIN
        assert record.stall.passes >= LEAST_PASSES


def test_what_was_remapped_by_hand_is_not_judged(warnings):
    world = World(2)
    with world.session as session:
        before = session.snapshot().stall
        for name in world.tenants:
            remap.advanced.remap(session, name, LAYERS - 1, 1)
        world.serve(WINDOW)
        assert session.snapshot().tenants["a"].stall_s > 0
        assert session.snapshot().stall == before
        assert not warnings()
        for name in world.tenants:
            remap.advanced.remap(session, name, 0)
        world.serve(4)
        assert session.snapshot().stall.passes > before.passes


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def _add(watch: StallWatch, tenant: int, stall_s: float, *, predicted_s: float = 0.0, compute_s: float = 1.0) -> None:
    watch.add(tenant, compute_s, stall_s, predicted_s=predicted_s, slowdown=SLOWDOWN, active=lambda: {1, 2})


def test_shares_are_sums_over_sums():
    watch = StallWatch()
    assert watch.share({1, 2}) == remap.StallShare()
    _add(watch, 1, 0.3, predicted_s=0.01)
    _add(watch, 2, 0.0, compute_s=3.0)
    _add(watch, 3, 9.0)
    share = watch.share({1, 2})
    assert (share.seen, share.predicted) == (pytest.approx(0.3 / 4), pytest.approx(0.01 / 4))
    assert (share.allowed, share.passes, share.tenants) == (pytest.approx(SLOWDOWN), 2, 2)


@pytest.mark.parametrize(("excess", "warned"), [(-0.001, 0), (0.001, 1)])
def test_the_margin(warnings, excess, warned):
    watch = StallWatch()
    for number in range(WINDOW):
        assert number >= LEAST_PASSES or not warnings()
        _add(watch, 1 + number % 2, SLOWDOWN + MARGIN + excess)
    assert len(warnings()) == warned


def test_nothing_is_printed_where_no_logging_is_set_up():
    expect_ok("""
import remap
from remap.memory.stall_watch import WINDOW, StallWatch

watch = StallWatch()
for _ in range(WINDOW):
    watch.add(1, 1.0, 1.0, predicted_s=0.0, slowdown=0.02, active=lambda: {1})
assert watch.share({1}).seen == 1.0
""")


def test_an_activation_that_was_to_serve_at_once_may_stall_for_as_long_as_it_said(warnings):
    watch = StallWatch()
    for _ in range(WINDOW):
        _add(watch, 1, 0.5, predicted_s=0.5)
    assert watch.share({1}).allowed == pytest.approx(0.5)
    assert not warnings()


def test_what_was_set_by_hand_stays_so_when_free_pages_come():
    with ByteWorld(spare=6) as world:
        remap.advanced.remap(world.session, "m", 2)
        assert internals(world.tenant)._state.by_hand
        blocks = world.kv.usable_blocks
        held = world.kv.allocate(world.kv.free_blocks)
        world.step(2)
        assert world.kv.usable_blocks > blocks and world.tenant.remapped == 2 and internals(world.tenant)._state.by_hand
        world.kv.free(held)
        remap.advanced.remap(world.session, "m", 0)
        assert not internals(world.tenant)._state.by_hand
