"""The sim backend without bytes behind its pages: its books, its refusals, and what decorates it (see sim_world.py).

What the backend contract demands, test_backend_contract*.py test on it with bytes.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from sim_world import PAGE, ROOM, UNIT, World

from remap import _core
from remap.errors import InvalidArgument, InvalidState, OutOfMemory


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
