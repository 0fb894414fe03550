"""The sim backend without bytes behind its pages: its times by hand, its threads, its books and refusals (sim_world.py).

What the backend contract demands, test_backend_contract*.py test on it with bytes.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
from sim_world import PAGE, ROOM, UNIT, World, on_a_thread

from remap import _core
from remap.errors import InvalidArgument, InvalidState, OutOfMemory


def test_one_copy_at_a_time_and_direction_in_the_order_of_enqueuing() -> None:
    world = World(copy_setup_s=0.25)
    first, second = world.stream(), world.stream()
    assert [world.down(first, 1), world.down(second, 2), world.down(first, 1)] == [1.25, 3.5, 4.75]
    assert world.up(world.stream(), 1) == 2.25
    assert world.backend.now == 0.0  # nobody waited
    none = {"copies": 0, "bytes": 0, "busy_s": 0.0}
    down, up = ({"copies": n, "bytes": size * PAGE, "busy_s": s} for n, size, s in ((3, 4, 4.75), (1, 1, 2.25)))
    assert world.backend.traffic() == {"h2d": down, "d2h": up, "d2d": none}
    # Inside the device the link is not used; host to host goes by the engine to the device.
    world = World(copy_setup_s=9.0)
    stream, backend = world.stream(), world.backend
    backend.copy(stream, world.at, world.at + 8 * PAGE, 4 * PAGE)
    assert backend.stream_end(stream) == 1.0
    backend.fill(stream, world.at, 0, 4 * PAGE)
    assert backend.stream_end(stream) == 1.5
    backend.copy(world.stream(), world.host, world.host + PAGE, PAGE)
    assert world.down(world.stream(), 1) == 20.0
    assert [backend.traffic()[way]["copies"] for way in ("d2d", "h2d")] == [1, 2]
    # No earlier than the host enqueues it; and destroying a stream waits for it.
    world = World()
    world.backend.advance(3.0)
    stream = world.stream()
    assert world.down(stream, 1) == 4.0
    world.backend.destroy_stream(stream)
    assert world.backend.now == 4.0
    with pytest.raises(InvalidArgument):
        world.backend.finish(stream)
    # Kernels give way to copies only where that is asked for.
    for contention, end in ((False, 4.0), (True, 2.0 + (4.0 - 2.0 * 7 / 8))):
        world = World(contention=contention)
        world.down(world.stream(), 2)
        assert world.backend.compute(world.stream(), 4.0) == end


def test_driver_calls_take_the_callers_time() -> None:
    backend = World(create_page_s=2.0, map_s=0.25, set_access_s=0.5, unmap_s=0.125).backend
    assert backend.now == 64 * 2.0 + 64 * 0.25 + 0.5
    page = backend.reserve(2 * PAGE, PAGE)
    with pytest.raises(OutOfMemory):
        backend.create_page(PAGE)
    assert backend.now == 144.5  # refused, or free
    backend.release(page, 2 * PAGE)
    world = World(unmap_s=0.125)
    world.backend.unmap(world.at, 10 * PAGE)
    assert world.backend.now == 1.25


def test_waiting_moves_the_host_and_only_as_far_as_the_timeout() -> None:
    world = World()
    backend, stream = world.backend, world.stream()
    world.down(stream, 8)
    event = world.event(stream)
    assert not backend.query(event)
    for timeout, done, now in ((0.0, False, 0.0), (2.5, False, 2.5), (-1.0, False, 2.5), (5.5, True, 8.0)):
        assert (backend.synchronize(event, timeout), backend.now) == (done, now)
    assert backend.synchronize(backend.create_event(), math.inf) is True and backend.now == 8.0


def test_events_stand_for_a_moment() -> None:
    world = World()
    backend, stream = world.backend, world.stream()
    backend.advance(1.0)
    begin = world.event(stream)  # of an idle stream: now
    assert backend.query(begin)
    world.down(stream, 2)
    end = world.event(stream)
    with pytest.raises(InvalidState) as early:
        backend.elapsed(begin, end)
    assert early.value.event == end
    backend.finish(stream)
    assert backend.now == 3.0 and backend.elapsed(begin, end) == 2.0 and backend.elapsed(end, begin) == -2.0
    waiting = world.stream()
    backend.stream_wait(waiting, end)
    backend.record(end, stream)  # anew: the wait is for the recording before
    assert backend.stream_end(waiting) == 3.0


def test_time_goes_forward_only() -> None:
    world = World()
    backend, stream = world.backend, world.stream()
    backend.advance_to(2.0)
    backend.advance_to(1.0)
    calls = (backend.advance, backend.advance_to, partial(backend.compute, stream), partial(backend.hold, stream))
    for wrong in (-1.0, math.nan, math.inf):
        for call in calls:
            with pytest.raises(InvalidArgument):
                call(wrong)
    assert backend.now == 2.0
    on_a_thread(lambda: backend.advance(2.0))  # whoever makes time pass is the host
    assert backend.now == 4.0


def test_another_thread_is_on_a_clock_of_its_own() -> None:
    world = World(unmap_s=0.5)
    backend, stream = world.backend, world.stream()
    backend.advance(1.0)
    world.down(stream, 4)
    event = world.event(stream)

    def beside() -> tuple[float, ...]:
        first = backend.now
        assert backend.synchronize(event, 60.0) and backend.query(event)
        waited = backend.now
        backend.unmap(world.at, 2 * PAGE)
        return first, waited, backend.now

    assert on_a_thread(beside) == (1.0, 5.0, 6.0)
    assert backend.now == 1.0 and not backend.query(event)  # the host has not waited
    backend.join()
    assert backend.now == 6.0 and backend.query(event)


def test_pages_are_bounded_by_the_capacity_and_may_differ_in_size() -> None:
    backend = _core.make_sim_backend(capacity_bytes=10 * PAGE, granularity=PAGE, **UNIT)
    small, large = backend.create_page(PAGE), backend.create_page(8 * PAGE)
    with pytest.raises(OutOfMemory) as full:
        backend.create_page(2 * PAGE)
    assert (full.value.requested, full.value.free, full.value.capacity) == (2 * PAGE, PAGE, 10 * PAGE)
    at = backend.reserve(9 * PAGE, PAGE)
    with pytest.raises(InvalidArgument):
        backend.map(at, [small, large], PAGE)
    backend.map(at, [large], 8 * PAGE)
    for call in (lambda: backend.unmap(at, PAGE), lambda: backend.destroy_page(large)):
        with pytest.raises(InvalidState):
            call()
    backend.unmap(at, 8 * PAGE)
    backend.destroy_page(large)
    assert backend.create_page(2 * PAGE) != large
    assert not backend.can_exchange and not backend.new_pages_are_zero and backend.granularity == PAGE


def test_copies_are_refused_where_nothing_is_accessible() -> None:
    world = World()
    backend, stream = world.backend, world.stream()
    world.down(stream, 2)
    backend.unmap(world.at, PAGE)
    for call in (world.down, world.up, lambda stream, _: backend.fill(stream, world.at, 0, 8)):
        with pytest.raises(InvalidState):
            call(stream, 1)
    backend.set_access(world.at + PAGE, PAGE, _core.Access.read)
    with pytest.raises(InvalidState):
        backend.copy(stream, world.at + PAGE, world.host, PAGE)
    backend.copy(stream, world.host, world.at + PAGE, PAGE)
    assert backend.stream_end(stream) == 4.0  # what was refused took no time


def test_nobody_can_touch_what_has_no_bytes() -> None:
    world = World()
    wanted = {world.at: ROOM * PAGE, world.host: ROOM * PAGE}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        first, last = (int(part, 16) for part in span.split("-"))
        for at in list(wanted):
            if first <= at < last:
                assert access.startswith("---"), line
                del wanted[at]
    assert not wanted


WRONG = {
    "capacity_bytes": (PAGE - 1,),
    "granularity": (3 * PAGE, 512),
    "h2d_bytes_per_s": (0.0,),
    "d2h_bytes_per_s": (math.inf,),
    "hbm_bytes_per_s": (math.nan, 1.5 * PAGE),  # no more than the link moves: kernels would stand still
    "duplex": (0.0, 1.5),
    "copy_setup_s": (-1.0,),
    "map_s": (math.nan,),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_what_is_no_device_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as refused:
        _core.make_sim_backend(**{"capacity_bytes": ROOM * PAGE, "granularity": PAGE, **UNIT, field: value})
    assert refused.value.field == field
