"""`session.step`: grows on demand within the bound, takes free pages first, goes back with hysteresis; and what it tells."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
from arena_worlds import PAGE as PAGES
from arena_worlds import forward, make_layers, make_spec
from byte_world import HIDDEN, LAYER, PAGE, PLAIN, N, World, times_of

import remap
from remap import _core
from remap.internals import internals
from remap.memory import restream
from remap.policy import schedule

# --- how much -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 6])
@pytest.mark.parametrize("layers", range(1, 7))
def test_one_step_grows_by_exactly_the_layers_that_are_needed(layers, spare):
    """Free pages come first."""
    for blocks in (LAYER * layers - 2, LAYER * layers):
        with World(times=HIDDEN, spare=spare) as world:
            if spare:
                report = world.step(4 + spare)
                assert (report.remapped, report.added_blocks) == ({"m": 0}, {"m": spare})
                assert world.session.snapshot().pages.free == 0
                before, calls = world.session.snapshot(), world.backend.count()
                for wanted in (0, 1, 4, 0, 3):  # nothing to do changes nothing and calls nothing
                    assert not world.session.step({"m": remap.Demand(blocks=wanted)}).changed
                assert (world.session.snapshot(), world.backend.count()) == (before, calls)
            report = world.step(4 + spare + blocks)
            assert report.changed
            assert report.remapped == {"m": layers}
            assert report.added_blocks == {"m": LAYER * layers}
            assert report.unmet_blocks == {}
            assert world.kv.usable_blocks == world.kv.free_blocks == 4 + spare + LAYER * layers
            assert len(world.kv.allocate(4 + spare + blocks)) == 4 + spare + blocks
            world.forward()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("by_hand", range(1, N - 2))
def test_growth_adds_to_a_set_chosen_by_hand_and_takes_no_kv_page(by_hand, buffers, mode):
    """An evenly spaced set is no prefix of the order in which the controller gives: growing must not swap its layers out."""
    with World(times=HIDDEN, mode=mode) as world:
        remap.advanced.remap(world.session, "m", by_hand, buffers, "uniform")
        streamed, blocks = set(world.tenant.streamed), set(world.kv.allocate(world.kv.free_blocks))
        world.step(blocks=1)
        assert world.tenant.remapped == by_hand + 1
        assert streamed < set(world.tenant.streamed)
        assert blocks.isdisjoint(world.kv.allocate(world.kv.free_blocks))
        world.forward()


def test_who_asks_hears_at_once_that_layers_are_away():
    """An engine that was told that nothing streams replays one graph of the whole pass, without waiting for any layer."""
    with World(times=HIDDEN) as world:
        world.forward()
        assert not world.tenant.streaming
        world.step(8)
        assert world.tenant.remapped > 0
        assert world.tenant.streaming
        world.forward()
        remap.advanced.remap(world.session, "m", 0)
        remap.advanced.settle(world.session)
        world.forward()  # which waits for all that comes home
        assert not world.tenant.streaming


@pytest.mark.parametrize("slowdown", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("transfer", [0.4, 1.1, 2.5, 5.0])
def test_growth_stops_at_the_exact_bound(slowdown, transfer):
    """Against the definition: the most layers, over both numbers of buffers, whose period is within the slowdown."""
    times = times_of(1.0, transfer)
    limit = N * (1 + slowdown) * (1 + 1e-6)
    order = schedule.nested(N)

    def allowed(alpha, beta):
        return schedule.period(times.compute_s, times.transfer_s, sorted(order[: alpha + beta]), beta) <= limit

    most = max([0, *(a for b in (1, 2) for a in range(1, N - b + 1) if allowed(a, b))])
    config = remap.advanced.Knobs(**PLAIN, slowdown=slowdown)
    with World(config, times=times) as world:
        report = world.step(1000)
        assert world.tenant.remapped == most
        assert report.unmet_blocks == {"m": 1000 - 4 - LAYER * most}
        assert world.kv.usable_blocks == 4 + LAYER * most
        assert report.predicted_stall_s["m"] <= N * slowdown * (1 + 1e-6) + 1e-6
        assert world.session.snapshot().tenants["m"].predicted_stall_s == report.predicted_stall_s["m"]
        assert world.step(1000).added_blocks == {"m": 0}
        world.forward()


@pytest.mark.parametrize("back", [False, True])
def test_the_ring_is_the_home_of_the_largest_layer_alone(back):
    """Pages of other layers were ring as well, so that blocks were missing in the middle of the KV region. back: the layers were
    elsewhere before, and have come back."""
    layers = make_layers([2, 1, 3, 1, 3, 2])
    with remap.Session(14 * PAGES, page_bytes=PAGES) as session:
        tenant = session.attach_bytes(layers, name="m", kv=make_spec(6))
        forward(session, tenant, layers)
        if back:
            remap.advanced.place(session, "m", 0, 2)
            remap.advanced.place(session, "m", 0, 6)
            forward(session, tenant, layers)
        for alpha in range(1, 6):
            remap.advanced.remap(session, "m", alpha, 1, "nested")
            assert internals(tenant)._state.pages.ring_layers == (2,)
            forward(session, tenant, layers)


# --- and back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("alpha", [1, 3, 6])
def test_another_set_of_the_same_size_needs_no_free_block(alpha, mode):
    """Every block is live. Gaining pages before giving pages back makes room, whatever set and number of buffers."""
    ways = [(1, "uniform"), (2, "nested"), (1, "nested"), (2, "uniform"), (1, "uniform"), (2, "uniform"), (1, "nested")]
    with World(mode=mode) as world:
        marks = {}
        for buffers, selection in ways:
            report = remap.advanced.remap(world.session, "m", alpha, buffers, selection)
            remap.advanced.check(world.session)
            moved = report.moved.get("m", {})
            marks = {moved.get(block, block): mark for block, mark in marks.items()}
            for block in world.kv.allocate(world.kv.free_blocks):
                marks[block] = len(marks) % 251
                _core.fill_bytes(world.kv.address + block * PAGE, PAGE, marks[block])
            assert len(marks) == world.kv.usable_blocks == 4 + LAYER * alpha
            world.forward()
            for block, mark in marks.items():
                assert ctypes.string_at(world.kv.address + block * PAGE, PAGE) == bytes([mark]) * PAGE


@pytest.mark.parametrize("external", [False, True])
def test_no_backend_call_between_demand_and_usable_blocks(external):
    """Aliased mode: when the subscriber hears of the new blocks, not one call of any kind was made since the demand.

    But for zeroing free pages, where the system does not promise that new ones are zero.
    """
    with World(times=HIDDEN, spare=2) as world:
        zeroing = () if world.backend.new_pages_are_zero else ("fill", "record", "synchronize")

        def calls_made():
            return world.backend.count() - sum(world.backend.count(getattr(_core.Call, name)) for name in zeroing)

        heard = []
        world.forward()
        world.kv.subscribe(lambda added, withdrawn: heard.append((len(added), calls_made())), external=external)
        heard.clear()
        # Free pages and layers together (from resident to streaming), then more layers beside a ring, twice.
        for blocks, layers in ((6, 0), (11, 2), (14, 3), (22, 6)):
            remap.advanced.settle(world.session)
            heard.clear()
            before, calls = world.kv.usable_blocks, calls_made()
            world.step(blocks, free=before)
            assert world.tenant.remapped == layers
            assert sum(count for count, _ in heard) == world.kv.usable_blocks - before > 0
            assert {seen - calls for _, seen in heard} == {0}
            world.forward()


def test_a_bound_is_forgotten_when_other_layers_may_stream():
    """Layers were pinned after the controller had asked what hides: it went on with the old answer, and told a stall of 0 where a
    pass waited for 1.5 s and 0.4 s were allowed."""
    times = times_of(1.0, 1.5)
    with World(remap.advanced.Knobs(**{**PLAIN, "slowdown": 0.05}), times=times) as world:
        world.step(10**3)
        assert world.tenant.remapped
        remap.advanced.remap(world.session, "m", 0)
        remap.advanced.settle(world.session)
        for layer in (2, 3):
            remap.advanced.declare_registered(world.session, remap.advanced.layer_address(world.session, "m", layer), 1)
        told = world.step(10**3).predicted_stall_s["m"]
        streamed, buffers = world.tenant.streamed, internals(world.tenant).buffers
        stall = schedule.stall(times.compute_s, times.transfer_s, streamed, buffers) if streamed else 0.0
        assert told == pytest.approx(stall) and stall <= 0.05 * N + 1e-9


def test_a_layer_that_was_written_since_the_next_growth_was_planned_is_pinned_and_does_not_stream():
    """It is planned at the end of a pass, and carried out only while what it was planned for still is so."""
    with World(times=HIDDEN) as world:
        state = internals(world.tenant)._state
        remap.advanced.remap(world.session, "m", 1, 1, "nested")
        world.forward()
        planned = restream.next_growth(state, 1)
        assert planned is not None
        (written,) = set(planned.streamed) - set(world.tenant.streamed)
        state.source = replace(state.source, watch=lambda layers: {written: ["w"]} if written in layers else {})
        world.kv.allocate(world.kv.free_blocks)
        world.step(blocks=1)
        assert world.tenant.remapped == 2 and written in internals(world.tenant).pinned
        assert written not in world.tenant.streamed
        world.forward()
