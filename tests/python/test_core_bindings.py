"""The bindings of the core as the session uses them: page numbers as ranges, passes on streams, what plans come behind."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from remap import _core
from remap.errors import InvalidArgument, InvalidState, OutOfMemory

PAGE = 64 << 10
TENANT = 1
BYTES = 1 << 20
TIMEOUT_S = 60.0


class World:
    """One tenant with two layers of two pages, and four free pages with places in its KV region."""

    def __init__(self) -> None:
        self.backend = _core.make_host_backend(8 * PAGE, PAGE)
        self.arena = _core.Arena(self.backend, 8 * PAGE, PAGE, _core.Mode.aliased)
        self.executor = _core.Executor(self.arena)
        self.layers = [
            self.arena.add_layer_region(TENANT, name, self.arena.take(2, _core.Owner.params, TENANT)) for name in "ab"
        ]
        self.kv = self.arena.add_kv_region(TENANT, 4)
        self.arena.designate(self.kv, 0, range(4, 8))

    def apply(self, pages: Any, from_owner: Any, to_owner: Any, **ordering: int) -> Any:
        plan = _core.Plan(self.arena.epoch)
        plan.set_owner(pages, from_owner, to_owner, TENANT)
        applied = self.executor.apply(plan, **ordering)
        self.executor.commit(None)
        return applied


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.executor.stop()
    made.arena.check()
    made.arena.close()
    assert set(made.backend.usage().values()) == {0}


@pytest.mark.parametrize(
    "pages",
    [range(4, 8), range(7, 3, -1), range(4, 8, 2), range(5, 6, 2**70), [4, 6], (7,), [], range(0)],
    ids=str,
)
def test_a_plan_takes_ranges_and_sequences_alike(world: World, pages: Any) -> None:
    applied = world.apply(pages, _core.Owner.free, _core.Owner.kv)
    assert applied.pages_moved == len(pages)
    owners = world.arena.owners()
    assert {page for page in range(8) if owners[page] == _core.Owner.kv} == set(pages)


@pytest.mark.parametrize(
    "pages",
    [range(-1, 3), range(3, -2, -1), range(2**32 - 1, 2**32 + 1), range(0, 2**40, 2**39), range(10**30), [-1], [2**32]],
    ids=str,
)
def test_what_is_no_list_of_page_numbers_is_refused(world: World, pages: Any) -> None:
    plan = _core.Plan(world.arena.epoch)
    with pytest.raises(TypeError):
        plan.set_owner(pages, _core.Owner.free, _core.Owner.kv, TENANT)
    with pytest.raises(TypeError):
        plan.point(world.layers[0], 0, pages, True, 0)
    with pytest.raises(TypeError):
        world.arena.prepare_view(world.layers[0], pages)


def test_a_region_is_pointed_at_a_range(world: World) -> None:
    plan = _core.Plan(world.arena.epoch)
    plan.set_owner(range(2), _core.Owner.params, _core.Owner.ring, TENANT)
    plan.point(world.layers[1], 0, range(2), True, 1)
    world.executor.apply(plan)
    world.executor.commit(None)
    world.executor.drain()
    assert world.arena.shown(world.layers[1]) == [0, 1]


def test_zeroing_is_enqueued_behind_what_the_stream_has_to_do(world: World) -> None:
    stream, event = world.backend.create_stream(), world.backend.create_event()
    first = world.arena.take(4, _core.Owner.params, 2)
    region = world.arena.add_layer_region(2, "first", first)
    ctypes.memset(world.arena.address(region), 0xA5, 4 * PAGE)
    world.arena.remove_tenant(2)
    world.backend.record(event, stream)
    applied = world.apply(range(4, 8), _core.Owner.free, _core.Owner.kv, after=event, zero_on=stream)
    assert applied.zeroed_bytes == 4 * PAGE
    world.backend.record(event, stream)
    assert world.backend.synchronize(event, TIMEOUT_S)
    assert ctypes.string_at(world.arena.address(world.kv), 4 * PAGE) == bytes(4 * PAGE)
    world.backend.destroy_stream(stream)
    world.backend.destroy_event(event)


def test_a_declared_range_is_left_as_it_is(world: World) -> None:
    address = world.arena.address(world.layers[1])
    world.arena.declare_registered(address + PAGE, nbytes=1)
    plan = _core.Plan(world.arena.epoch)
    plan.set_owner(range(2), _core.Owner.params, _core.Owner.ring, TENANT)
    plan.point(world.layers[1], 0, range(2), True, 1)
    with pytest.raises(InvalidState) as refused:
        world.executor.apply(plan)
    assert (refused.value.region, refused.value.address) == (world.layers[1], address + PAGE)
    with pytest.raises(InvalidState):
        world.arena.remove_tenant(TENANT)
    with pytest.raises(InvalidArgument):
        world.arena.withdraw_registered(address, nbytes=1)
    world.arena.withdraw_registered(address + PAGE, nbytes=1)
    world.executor.apply(plan)
    world.executor.commit(None)
    world.executor.drain()


def test_pages_are_taken_around_what_is_excluded(world: World) -> None:
    assert world.arena.tenants() == [TENANT] * 4 + [-1] * 4
    assert world.arena.take(1, _core.Owner.kv, 2, excluded=range(4, 6)) == [6]
    assert world.arena.take(1, _core.Owner.kv, 3, [7, 0, 4]) == [5]
    with pytest.raises(OutOfMemory) as short:
        world.arena.take(2, _core.Owner.kv, 3, [7])
    assert (short.value.requested, short.value.free) == (2, 1)
    with pytest.raises(InvalidArgument) as unknown:
        world.arena.take(1, _core.Owner.kv, 3, [8])
    assert unknown.value.page == 8
    assert world.arena.tenants() == [TENANT] * 4 + [-1, 3, 2, -1]


def test_a_slice_is_copied_to_its_place_and_a_part_comes_home() -> None:
    half, backend = BYTES // 2, _core.make_host_backend(PAGE, PAGE)
    masters = [
        ctypes.create_string_buffer(bytes([2 * i + 1]) * half + bytes([2 * i + 2]) * half, BYTES) for i in (0, 1)
    ]
    home = ctypes.create_string_buffer(2 * BYTES)
    ring = ctypes.create_string_buffer(BYTES)
    at = [ctypes.addressof(home), ctypes.addressof(home) + BYTES]
    prefetcher = _core.Prefetcher(backend, [(to, ctypes.addressof(m), BYTES) for to, m in zip(at, masters)])
    quarter = half // 2
    prefetcher.configure(
        (0, 1), [ctypes.addressof(ring)], BYTES, offsets=(half, half + quarter), places=(half, half + quarter),
        home=[(1, half, quarter)],
    )  # fmt: skip
    assert prefetcher.loading()
    prefetcher.begin_pass()
    prefetcher.wait(0)
    assert ring.raw == bytes(half) + b"\2" * half
    prefetcher.done(0)
    prefetcher.wait(1)
    assert ring.raw[half:] == b"\2" * quarter + b"\4" * quarter
    assert home.raw == bytes(BYTES + half) + b"\4" * quarter + bytes(quarter)
    prefetcher.done(1)
    prefetcher.end_pass()
    assert not prefetcher.loading()
    with pytest.raises(InvalidArgument):
        prefetcher.configure((0, 1), [ctypes.addressof(ring)], BYTES, offsets=(half,))
    del prefetcher
    assert set(backend.usage().values()) == {0}


class Streaming:
    """A prefetcher over three layers, all streamed through one buffer."""

    def __init__(self) -> None:
        self.backend = _core.make_host_backend(PAGE, PAGE)
        self.memory = [ctypes.create_string_buffer(bytes([layer + 1]) * BYTES, BYTES) for layer in range(3)]
        self.ring = ctypes.create_string_buffer(BYTES)
        self.prefetcher = _core.Prefetcher(self.backend, [(0, ctypes.addressof(m), BYTES) for m in self.memory])
        self.prefetcher.configure((0, 1, 2), [ctypes.addressof(self.ring)], BYTES)


@pytest.fixture
def streaming() -> Iterator[Streaming]:
    made = Streaming()
    yield made
    backend = made.backend
    del made.prefetcher
    assert set(backend.usage().values()) == {0}


def test_a_pass_of_the_calling_thread_is_timed_at_once(streaming: Streaming) -> None:
    prefetcher = streaming.prefetcher
    for number in (1, 2):
        prefetcher.begin_pass()
        for layer in range(3):
            prefetcher.wait(layer)
            assert streaming.ring.raw[0] == layer + 1
            prefetcher.done(layer)
        assert prefetcher.end_pass() == number
    stats = prefetcher.stats()
    timings = prefetcher.take_timings()
    assert [number for number, _, _ in timings] == [1, 2]
    assert timings[1][1:] == (stats.last_pass_s, stats.last_pass_stall_s)
    assert prefetcher.take_timings() == []


def test_a_pass_on_a_stream(streaming: Streaming) -> None:
    prefetcher, backend = streaming.prefetcher, streaming.backend
    stream, event = backend.create_stream(), backend.create_event()
    seen = [ctypes.create_string_buffer(BYTES) for _ in range(9)]
    for number in range(3):
        prefetcher.begin_pass(stream)
        for layer in range(3):
            prefetcher.wait(layer)
            backend.copy(stream, ctypes.addressof(seen[3 * number + layer]), ctypes.addressof(streaming.ring), BYTES)
            prefetcher.done(layer)
        assert prefetcher.end_pass() == number + 1
    backend.record(event, stream)
    assert backend.synchronize(event, TIMEOUT_S)
    assert [buffer.raw for buffer in seen] == [bytes([layer + 1]) * BYTES for layer in range(3)] * 3
    timings = prefetcher.take_timings()
    assert [number for number, _, _ in timings] == [1, 2, 3]
    assert all(0 <= stall <= seconds and seconds > 0 for _, seconds, stall in timings)
    backend.destroy_event(event)
    backend.destroy_stream(stream)


def test_the_copy_stream_may_be_come_behind(streaming: Streaming) -> None:
    backend, event = streaming.backend, streaming.backend.create_event()
    backend.record(event, streaming.prefetcher.copy_stream)
    assert backend.synchronize(event, TIMEOUT_S)
    assert streaming.ring.raw == bytes([1]) * BYTES
    backend.destroy_event(event)


def test_an_unknown_stream_is_refused(streaming: Streaming) -> None:
    with pytest.raises(InvalidArgument):
        streaming.prefetcher.begin_pass(4711)
    assert not streaming.prefetcher.in_pass
