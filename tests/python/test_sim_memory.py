"""The sim backend without bytes behind its pages: its books, its refusals, and what decorates it (see sim_world.py).

What the backend contract demands, test_backend_contract*.py test on it with bytes.
"""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import Any

import pytest
from sim_world import PAGE, ROOM, UNIT, World

from remap import _core
from remap.errors import DriverError, ForkedProcess, InvalidArgument, InvalidState, OutOfMemory

# -- streams of the caller's, decorators ---------------------------------------------------------------------------------


def test_its_own_streams_can_be_given_as_the_callers() -> None:
    world = World()
    backend, stream = world.backend, world.stream()
    assert stream > 2  # not what a driver's default streams are called
    assert backend.adopt_stream(stream) == stream == backend.adopt_stream(stream)
    with pytest.raises(InvalidState):
        backend.destroy_stream(stream)
    backend.forget_stream(stream)
    with pytest.raises(InvalidArgument):
        backend.forget_stream(stream)
    with pytest.raises(InvalidArgument):
        backend.adopt_stream(stream + 1)
    backend.destroy_stream(stream)


def test_a_decorated_backend_has_the_same_clock() -> None:
    world = World()
    fault = _core.make_fault_backend(_core.make_trace_backend(world.backend))
    assert fault.simulator is world.backend and world.backend.simulator is world.backend
    assert (fault.device_kind, fault.host_addressable) == ("sim", False)
    assert _core.make_host_backend(PAGE, PAGE, 1).simulator is None
    stream, event = fault.create_stream(), fault.create_event()
    fault.fail_async_copy(1)
    fault.copy(stream, world.at, world.host, PAGE)
    fault.record(event, stream)
    with pytest.raises(DriverError):
        fault.synchronize(event, 60.0)


# -- memory ------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(InvalidState):
        backend.unmap(at, PAGE)
    with pytest.raises(InvalidState):
        backend.destroy_page(large)
    backend.unmap(at, 8 * PAGE)
    backend.destroy_page(large)
    assert backend.create_page(2 * PAGE) != large
    assert not backend.can_exchange and not backend.new_pages_are_zero and backend.granularity == PAGE


def test_copies_are_refused_where_nothing_is_accessible() -> None:
    world = World()
    backend, stream = world.backend, world.stream()
    world.down(stream, 2)
    backend.unmap(world.at, PAGE)
    for call in (
        lambda: world.down(stream, 1),
        lambda: world.up(stream, 1),
        lambda: backend.fill(stream, world.at, 0, 8),
    ):
        with pytest.raises(InvalidState):
            call()
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


@pytest.mark.parametrize("backed", [False, True])
def test_a_forked_child_is_refused_and_takes_nothing_with_it(backed: bool) -> None:
    world = World(backed=backed)
    stream = world.stream()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (world.backend.usage, lambda: world.down(stream, 1), lambda: world.backend.compute(stream, 1.0)):
            try:
                call()
            except ForkedProcess:
                refused += 1
        del world, call  # the child's copy of the object is destroyed
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert world.down(stream, 1) == 1.0
    if backed:
        ctypes.memset(world.at, 7, PAGE)
        assert world.up(stream, 1) == 3.0 and ctypes.string_at(world.host, 2) == b"\7\7"


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity_bytes": PAGE - 1},
        {"granularity": 3 * PAGE},
        {"granularity": 512},
        {"h2d_bytes_per_s": 0.0},
        {"d2h_bytes_per_s": math.inf},
        {"hbm_bytes_per_s": math.nan},
        {"duplex": 0.0},
        {"duplex": 1.5},
        {"copy_setup_s": -1.0},
        {"map_s": math.nan},
        {"hbm_bytes_per_s": 1.5 * PAGE},  # no more than the link moves: kernels would stand still
    ],
)
def test_what_is_no_device_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        _core.make_sim_backend(**{"capacity_bytes": ROOM * PAGE, "granularity": PAGE, **UNIT, **wrong})
    assert refused.value.field == next(iter(wrong))
