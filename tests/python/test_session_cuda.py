"""A session on a CUDA device, here the emulated driver: passes on the engine's own streams, and changes while it is busy.

A shut gate in a stream stands for kernels that run for a long time. What must not wait for the device is done while a gate is
shut; what must wait for it is shown by what it has waited for.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import mmap
import random
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from arena_worlds import PAGE, make_layers, make_spec, visible
from cuda_streams import Driver

import remap
from remap import _core
from remap.errors import DriverError, InvalidArgument, InvalidState
from remap.internals import internals
from remap.memory.pages import plan_free_pages

SIZES = [3, 2, 3, 3, 2, 3]
N = len(SIZES)
SECRET, POISON = 0xA5, 0xDF


class World:
    """Tenant "m" over plain bytes. What an engine's kernels do is done by copies and fills on its two streams."""

    def __init__(self, library: str, mode: str = "aliased", pages: int = 60) -> None:
        self.engine = Driver(library)
        self.streams = self.engine.stream(), self.engine.stream()
        self.stream, self.other = (each.__enter__() for each in self.streams)
        self.trace = _core.make_trace_backend(_core.make_cuda_backend(library=library))
        self.backend = _core.make_fault_backend(self.trace)
        self.session = remap.Session(
            pages * PAGE, page_bytes=PAGE, mode=mode, platform=remap.advanced.Platform(backend=self.backend)
        )
        self.layers: dict[str, list[Any]] = {}
        self.tenant = self.attach("m", make_layers(SIZES, 1), max_blocks=240)
        self.kv = internals(self.tenant).kv
        self.reads: list[tuple[int, bytes, str]] = []

    def attach(self, name: str, layers: list[Any], **kv: Any) -> remap.Tenant:
        self.layers[name] = [bytes(layer) for layer in layers]
        config = remap.advanced.Knobs(reserve_blocks=0)
        return self.session.attach_bytes(layers, name=name, kv=make_spec(len(layers), **kv), config=config)

    def read(self, stream: int, address: int, expected: bytes, what: str) -> None:
        """What stands there when the stream gets here; compared by `check`."""
        to = self.backend.allocate_host(len(expected))
        self.backend.copy(stream, to, address, len(expected))
        self.reads.append((to, expected, what))

    def read_layer(self, stream: int, layer: int, name: str = "m") -> None:
        address = remap.advanced.layer_address(self.session, name, layer)
        self.read(stream, address, self.layers[name][layer], f"layer {layer} of {name}")

    def a_pass(self, stream: int, given: Any = None, tenant: Any = None) -> None:
        """Reads all layers on `stream`; nobody waits for it."""
        tenant = tenant or self.tenant
        with tenant.forward(stream=stream if given is None else given):
            for layer in range(tenant.layers):
                tenant.wait(layer)
                self.read_layer(stream, layer, tenant.name)
                tenant.done(layer)

    def passes(self, *streams: int) -> None:
        """Two on each, and the device has done all of it."""
        for stream in streams or (self.stream,):
            self.a_pass(stream)
            self.a_pass(stream)
            self.engine.synchronize(stream)  # `through` waits for the world's own streams only
        self.through()

    def wait_for_all(self) -> None:
        """In a pass that uses no layer."""
        for layer in range(N):
            self.tenant.wait(layer)
            self.tenant.done(layer)

    def host_pass(self) -> None:
        """Computed by this thread."""
        with self.tenant.forward():
            for layer, expected in enumerate(self.layers["m"]):
                self.tenant.wait(layer)
                got = ctypes.string_at(remap.advanced.layer_address(self.session, "m", layer), len(expected))
                self.tenant.done(layer)
                assert got == expected, f"layer {layer}"

    def write_blocks(self, stream: int, blocks: dict[int, int], kv: Any = None) -> None:
        for block, value in blocks.items():
            for offset, nbytes in (kv or self.kv).geometry.byte_ranges_of_block(block):
                self.backend.fill(stream, (kv or self.kv).address + offset, value, nbytes)

    def read_blocks(self, stream: int, blocks: dict[int, int]) -> None:
        for block, value in blocks.items():
            for offset, nbytes in self.kv.geometry.byte_ranges_of_block(block):
                self.read(stream, self.kv.address + offset, bytes([value]) * nbytes, f"block {block}")

    def poison_the_free(self) -> None:
        self.write_blocks(self.stream, dict.fromkeys(self.kv.allocate(self.kv.free_blocks), POISON))

    def high_blocks(self, count: int) -> dict[int, int]:
        """Live blocks with contents in the last places that there are: those that a shrink has to move."""
        ids = self.kv.allocate(self.kv.free_blocks)
        self.kv.free(ids[:-count])
        live = {block: 11 + index for index, block in enumerate(ids[-count:])}
        self.write_blocks(self.stream, live)
        return live

    def calls(self) -> int:
        """Of the backend, without those in which the re-pointing worker waits for the device."""
        return int(self.trace.count() - self.trace.count(_core.Call.synchronize))

    def host_bytes(self) -> int:
        return int(self.backend.usage()["host_bytes"])

    def through(self, books: bool = True) -> None:
        """The device has done all of it; every byte that was read is right, and so are the session's books."""
        for stream in (self.stream, self.other):
            self.engine.synchronize(stream)
        for at, expected, what in self.reads:
            got = ctypes.string_at(at, len(expected))
            assert got == expected, f"{what} read {got[:4]!r}, not {expected[:4]!r}"
            self.backend.free_host(at, len(expected))
        self.reads.clear()
        if books:
            remap.advanced.check(self.session)

    def remap(self, layers: int, buffers: int = 1, selection: str = "nested") -> dict[int, int]:
        """Returns where live blocks have gone. "slices": of every layer, so many of the last pages."""
        worth: float = layers
        if selection == "slices" and layers:
            freed = sum(min(layers, size) for size in SIZES) - buffers * layers
            worth = (freed - 0.5) / max(SIZES)  # rounded up to pages
        return dict(remap.advanced.remap(self.session, "m", worth, buffers, selection).moved.get("m", {}))

    def steady(self, layers: int = 0, buffers: int = 1, selection: str = "nested") -> None:
        """So many layers are remapped, every change is finished, every layer was loaded."""
        if layers:
            self.remap(layers, buffers, selection)
        for _ in range(2):
            self.a_pass(self.stream)
            self.through()
        remap.advanced.settle(self.session)

    @contextmanager
    def busy(self, stream: int | None = None) -> Iterator[None]:
        """The device does not get on meanwhile, and nobody may wait for it."""
        gate = self.engine.hold(stream or self.stream)
        yield
        assert gate.shut and not gate.forced, "the host waited for the device"
        gate.open()

    @contextmanager
    def waits(self, stream: int | None = None) -> Iterator[None]:
        """The body waits for a pass that the device has not begun when it is called."""
        gate = self.engine.hold(stream or self.stream)
        self.a_pass(self.stream)
        gate.open_once(threading.Event())
        yield
        assert not gate.shut

    def close(self) -> None:
        """Everything is given back although tenants still exist."""
        self.engine.open_gates()
        self.backend.disarm()
        self.through()
        self.session.close()
        assert set(self.backend.usage().values()) == {0}, self.backend.usage()
        for each in self.streams:
            each.__exit__(None, None, None)
        self.engine.close()


@pytest.fixture
def library(emulated: Any) -> Iterator[str]:
    """The emulated driver, whose copies begin a little late. The test must copy from no pageable memory."""
    emulated.configure(granularity=PAGE, memory=256 << 20, jitter_us=20)
    yield emulated.path
    assert emulated.pageable() == 0


@pytest.fixture(params=["aliased", "strict"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(library: str) -> Iterator[Any]:
    """Makes the world, which is closed at the end."""
    made: list[World] = []

    def build(*arguments: Any, **options: Any) -> World:
        made.append(World(library, *arguments, **options))
        return made[-1]

    yield build
    while made:  # the last reference goes with it: the driver is looked through when the backend is gone
        made.pop().close()


@pytest.fixture
def world(make: Any) -> Any:
    return weakref.proxy(make())


# --- passes -------------------------------------------------------------------------------------------------------


def test_a_pass_never_waits_for_the_device_once_changes_are_settled(world: World) -> None:
    world.steady(3, 2)
    with world.busy():
        for _ in range(5):
            world.a_pass(world.stream)
    world.remap(0)
    assert world.tenant.streaming  # still to be loaded
    world.steady()
    assert not world.tenant.streaming
    with world.tenant.forward(stream=world.stream):  # as a graph of all layers would: neither wait nor done
        for layer in range(N):
            world.read_layer(world.stream, layer)


def test_a_pass_on_another_stream_comes_after_what_was_enqueued_on_the_last(world: World) -> None:
    (block,) = world.kv.allocate(1)
    world.a_pass(world.stream)
    with world.busy():
        world.write_blocks(world.stream, {block: 1})  # after the pass, before the next: it counts as well
        with world.tenant.forward(stream=world.other):
            world.read_blocks(world.other, {block: 1})
            world.write_blocks(world.other, {block: 2})
    with world.tenant.forward(stream=world.stream):
        world.read_blocks(world.stream, {block: 2})


def test_what_a_change_enqueued_comes_before_a_pass_on_another_stream(world: World) -> None:
    """Compaction copies on the stream of the last pass; the next pass reads the blocks on another one."""
    world.steady(4)
    live = world.high_blocks(4)
    with world.busy():
        moved = world.remap(0)
        assert moved
        with pytest.raises(KeyError), world.tenant.forward(stream=world.other):
            world.read_blocks(world.other, {moved.get(block, block): value for block, value in live.items()})
            raise KeyError  # abandoned: no layer was used, and to wait for one is to wait for the stream that is busy


def test_the_host_computes_a_pass_only_when_the_stream_is_through(world: World) -> None:
    (block,) = world.kv.allocate(1)
    with world.waits():
        world.write_blocks(world.stream, {block: 7})
        with world.tenant.forward():
            for offset, nbytes in world.kv.geometry.byte_ranges_of_block(block):
                assert set(ctypes.string_at(world.kv.address + offset, nbytes)) == {7}
    world.host_pass()
    world.a_pass(world.stream)


def test_a_stream_is_kept_alive_until_the_next_and_defaults_are_streams_too(world: World) -> None:
    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, world.stream

    given = Stream()
    alive = weakref.ref(given)
    world.a_pass(world.stream, given)
    del given
    gc.collect()
    assert alive() is not None  # a change would record an event there
    world.a_pass(world.other)
    gc.collect()
    assert alive() is None
    for default in (1, 2):  # the driver's own two
        world.a_pass(default)
        world.engine.synchronize(default)


def test_a_stream_that_two_sessions_use_outlives_the_first_of_them(world: World) -> None:
    """Both sessions are given the same backend; each uses the caller's stream and the device's default."""
    platform = remap.advanced.Platform(backend=world.backend)
    with remap.Session(20 * PAGE, page_bytes=PAGE, platform=platform) as other:
        tenant = other.attach_bytes(make_layers(SIZES[:2], 2), name="other", kv=make_spec(2))
        for stream in (world.stream, 1, world.stream):
            for each in (tenant, world.tenant):
                with each.forward(stream=stream):
                    for layer in range(each.layers):
                        each.wait(layer)
                        each.done(layer)
    world.passes(world.stream, 1)


def test_a_stream_of_no_device_or_that_is_being_captured_is_refused(world: World) -> None:
    """A graph holds neither waits nor copies: it would repeat them after they mean nothing any more."""
    world.steady(2)
    before = visible(world.session)
    for wrong in ("stream", 1.5, -1, 0x1230):  # a number that never was a stream; nobody can ask about one that was
        with pytest.raises(InvalidArgument):
            world.tenant.forward(stream=wrong).__enter__()
        assert visible(world.session) == before
    with (
        world.engine.capturing(world.stream),
        pytest.raises(InvalidState, match="captur"),
        world.tenant.forward(stream=world.stream),
    ):
        world.wait_for_all()
    world.passes()
    with remap.Session(40 * PAGE, "cpu", page_bytes=PAGE) as session:
        tenant = session.attach_bytes(make_layers(SIZES), name="m", kv=make_spec(N))
        with pytest.raises(InvalidArgument):
            tenant.forward(stream=world.stream).__enter__()
        with tenant.forward():
            pass


def test_an_abandoned_pass_does_no_harm(make: Any, mode: str) -> None:
    world = make(mode)
    world.remap(3, 2)
    for stop in range(N):
        with pytest.raises(KeyError), world.tenant.forward(stream=world.stream):
            for layer in range(stop + 1):
                world.tenant.wait(layer)
                world.read_layer(world.stream, layer)
                if layer == stop:
                    raise KeyError
                world.tenant.done(layer)
        if stop == 2:
            world.remap(1)
        world.a_pass(world.stream)


def test_times_are_learnt_when_the_stream_has_got_there(world: World) -> None:
    world.steady(2)

    def learnt() -> dict[Any, int]:
        return dict(internals(world.tenant)._state.timing._cost.passes)

    def abandoned() -> dict[Any, int]:
        """Takes what is known, and teaches nothing itself."""
        world.engine.synchronize(world.stream)
        with pytest.raises(KeyError), world.tenant.forward(stream=world.stream):
            raise KeyError
        return learnt()

    before = abandoned()
    assert set(before) == {("decode", 1)}
    with world.busy():
        for tokens in (1, 1, 300):
            with world.tenant.forward("prefill" if tokens > 1 else "decode", tokens, stream=world.stream):
                world.wait_for_all()
        assert learnt() == before
    after = {("decode", 1): before["decode", 1] + 2, ("prefill", 512): 1}
    assert [abandoned(), abandoned()] == [after, after]
    world.host_pass()
    assert learnt() == {**after, ("decode", 1): after["decode", 1] + 1}
    assert world.session.snapshot().tenants["m"].compute_s > 0


# --- changes while the device is busy -----------------------------------------------------------------------------


@pytest.mark.parametrize("selection", ["nested", "slices"])
def test_growth_waits_for_nobody_and_disturbs_nothing_that_still_runs(world: World, selection: str) -> None:
    world.steady()
    heard: list[int] = []
    world.kv.subscribe(lambda added, withdrawn: heard.append(world.calls()))
    for size in (1, 2, 3):
        with world.busy():
            world.a_pass(world.stream)  # reads, later, the layers whose pages are given away now
            heard.clear()
            calls = world.calls()
            world.remap(size, 1, selection)
            # Usable before any call of the backend; pieces of layers that are streamed already are ordered first.
            assert heard == [calls] if selection == "nested" or size == 1 else len(heard) == 1
            if selection == "nested" and size == 3:
                assert world.session.step({"m": remap.Demand(blocks=world.kv.free_blocks + 4)}).changed
            world.poison_the_free()
        if selection == "slices":  # whole layers: nothing was settled when the next go
            world.steady()
    world.a_pass(world.stream)


@pytest.mark.parametrize(
    ("before", "after", "selection"),
    [
        ((4, 2), (1, 1), "nested"),
        ((4, 1), (2, 1), "nested"),
        ((3, 2), (0, 1), "nested"),
        ((2, 1), (2, 2), "nested"),
        ((3, 1), (1, 1), "slices"),
        ((3, 2), (0, 1), "slices"),
        ((2, 2), (1, 1), "slices"),
    ],
)
def test_a_shrink_waits_for_nobody_and_live_blocks_move(world: World, before: Any, after: Any, selection: str) -> None:
    world.steady(*before, selection)
    live = world.high_blocks(5)
    with world.busy():
        world.a_pass(world.stream)
        moved = world.remap(*after, selection)
        assert moved or after[0] >= before[0]
        live = {moved.get(block, block): value for block, value in live.items()}
        world.read_blocks(world.stream, live)
        world.poison_the_free()  # it may be where a block stood that has not been moved yet, or where one goes
    world.passes()
    world.read_blocks(world.stream, live)


@pytest.mark.parametrize("left", [True, False], ids=["behind a detach", "still written"])
def test_pages_of_another_tenant_read_zero_and_nobody_waits(make: Any, left: bool) -> None:
    """The giver's kernels are still to run when its pages are taken: the zeroes come after them."""
    world = make(pages=64)
    soil = world.attach("soil", make_layers([1, 1], 2), min_blocks=300, max_blocks=400)

    def soiled() -> None:
        world.write_blocks(
            world.other, dict.fromkeys(soil.kv.allocate(soil.kv.free_blocks), SECRET), internals(soil).kv
        )

    with soil.forward(stream=world.other):
        if left:
            soiled()
    if left:
        world.session.detach("soil")
    world.steady()
    before = set(world.kv.pool.open_ids())
    with world.busy(world.stream if left else world.other):
        if not left:
            soiled()
            give_back_unused(world.session, soil)
        world.session.step({"m": remap.Demand(blocks=world.kv.free_blocks + 60)})
        fresh = sorted(set(world.kv.pool.open_ids()) - before)
        assert len(fresh) >= 60 and world.tenant.remapped == 0
        world.read_blocks(world.stream, dict.fromkeys(fresh, 0))
    world.engine.synchronize(world.other)
    world.read_blocks(world.stream, dict.fromkeys(fresh, 0))  # and nothing of the giver's comes later


def give_back_unused(session: remap.Session, tenant: remap.Tenant) -> None:
    """All blocks are free, and the pages behind them nobody's."""
    pool, state, owners = internals(tenant).kv.pool, internals(tenant)._state, session._arena.owners()
    tenant.kv.free(pool.live_ids())
    owned = state.slots_of([page for page in state.donation_order if owners[page] == _core.Owner.kv])
    slots = [slot for slot in owned if slot in pool.owned_slots()]
    pages = tuple(state.donation_order[internals(tenant).kv.geometry.donation_index(slot)] for slot in slots)
    session._changes.apply(state, plan_free_pages(state.pages, pages, give=False))


def test_a_ring_that_moves_waits_for_the_copies_into_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its addresses are exchanged inside of the change, which is rare: the layer that lends its pages is streamed no more."""
    world.steady(2)
    monkeypatch.setattr(internals(world.tenant)._state, "select", lambda *_: (2, 3, 5))
    assert 0 in internals(world.tenant)._state.pages.ring_layers
    with world.waits(internals(world.tenant)._state.prefetcher.copy_stream):
        world.remap(2)
    assert world.tenant.streamed == (2, 3, 5)
    world.passes()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slices", [False, True], ids=["layers", "slices"])
def test_random_changes_and_passes_that_nobody_waits_for(make: Any, mode: str, slices: bool, seed: int) -> None:
    rng = random.Random(seed)
    world = make(mode)
    live: dict[int, int] = {}
    changed, refusals = 0, (remap.OutOfBlocks, *([InvalidArgument] if slices else []))

    def change() -> dict[int, int]:
        buffers = rng.choice([1, 2])
        if slices:
            return world.remap(rng.randint(0, max(SIZES)), buffers, "slices")
        return world.remap(rng.randint(0, N - buffers), buffers, rng.choice(["uniform", "nested"]))

    def written(stream: int, blocks: list[int]) -> None:
        live.update((block, 1 + rng.randrange(250)) for block in blocks)
        world.write_blocks(stream, {block: live[block] for block in blocks})

    for number in range(50):
        compute = rng.choice([world.stream, world.stream, world.other, None])
        if compute is None:
            world.host_pass()
        else:
            if rng.random() < 0.3:
                world.engine.hold(compute).open_once(threading.Event(), 0.01)
            world.a_pass(compute)
            with world.tenant.forward(stream=compute):
                written(compute, [block for block in live if rng.random() < 0.3])
                world.read_blocks(compute, live)
                world.wait_for_all()
        for _ in range(rng.choice([1, 1, 2]) if slices else 1):
            with suppress(*refusals):
                moved = change()
                changed += 1
                live = {moved.get(block, block): value for block, value in live.items()}
        if compute is not None:
            with world.tenant.forward(stream=compute):
                written(compute, list(world.kv.allocate(rng.randint(0, world.kv.free_blocks))))
                world.wait_for_all()
        gone = rng.sample(sorted(live), rng.randint(0, len(live)))
        world.kv.free(gone)
        for block in gone:
            del live[block]
        if number % 10 == 9:
            world.through()
    assert changed > 20
    assert world.session.snapshot().tenants["m"].copies > 0


# --- what fails ---------------------------------------------------------------------------------------------------


def test_an_event_that_cannot_be_recorded_is_recorded_later(world: World) -> None:
    """Settling fails behind the blocks' back: they are usable, and the next pass finishes the change first."""
    world.steady()
    before = world.kv.usable_blocks
    world.backend.arm(_core.Call.record, 1)
    world.remap(3)
    assert world.kv.usable_blocks > before
    world.backend.arm(_core.Call.record, 1)
    with pytest.raises(DriverError):
        world.tenant.forward(stream=world.stream).__enter__()
    world.passes()


@pytest.mark.parametrize("call", ["record", "stream_wait", "copy_batch", "query"])
def test_a_shrink_that_cannot_be_ordered_changes_nothing_or_is_finished(make: Any, mode: str, call: str) -> None:
    world = make(mode)
    world.steady(4, 2)
    live = world.high_blocks(5)
    before = visible(world.session)
    failed = 0
    for nth in (1, 2, 3):
        world.backend.arm(getattr(_core.Call, call), nth, True)  # once would not do: the copy stream is replaced then
        try:
            moved = world.remap(1)
        except DriverError:
            failed += 1
            assert visible(world.session) == before
        else:
            live = {moved.get(block, block): value for block, value in live.items()}
            break
        finally:
            world.backend.disarm()
        world.a_pass(world.stream)
        world.read_blocks(world.stream, live)
    assert failed > 0 or call != "record"
    world.a_pass(world.stream)  # what was refused behind the change is made now
    world.read_blocks(world.stream, live)
    world.remap(1)
    world.passes()


# --- coming and going ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0, 3])
@pytest.mark.parametrize("leave", ["detach", "close", "unmap"])
def test_leaving_and_unmapping_wait_for_what_the_tenant_has_enqueued(make: Any, leave: str, alpha: int) -> None:
    world = make("strict" if leave == "unmap" else "aliased")
    world.steady(alpha, 2)
    leaves = {"detach": lambda: world.session.detach("m"), "close": world.session.close}
    with world.waits():
        leaves.get(leave, lambda: world.remap(2))()
    world.through(books=leave != "close")
    if leave in leaves:
        with pytest.raises(InvalidState):
            world.tenant.forward(stream=world.stream).__enter__()


def test_master_copies_are_page_locked_and_go_back(world: World) -> None:
    """In host memory of the backend's; writable buffers at pages of the system where they are."""
    held, copies = world.host_bytes(), world.trace.count(_core.Call.allocate_host)
    assert held >= sum(map(len, world.layers["m"])) and copies == N
    for layers in (make_layers([30, 30]), make_layers([1])):  # too large; too few for what the KV cache says
        with pytest.raises((remap.OutOfMemory, InvalidArgument)):
            world.session.attach_bytes(layers, name="late", kv=make_spec(2))
        assert world.host_bytes() == held
    copies = world.trace.count(_core.Call.allocate_host)
    buffers: list[Any] = []
    for layer in make_layers([2, 2, 2], 5):
        buffers.append(mmap.mmap(-1, len(layer)))
        buffers[-1][:] = layer
    inner = [memoryview(buffers[0])[at:] for at in (64, mmap.PAGESIZE)]  # in an OS page, and only overlapping
    read_only = memoryview(buffers.pop()).toreadonly()
    tenant = world.attach("locked", [*buffers, buffers[0], read_only, *inner], max_blocks=200)
    assert world.trace.count(_core.Call.register_host) == 2  # the third is the first again
    assert world.trace.count(_core.Call.allocate_host) == copies + 3
    remap.advanced.remap(world.session, "locked", 3)
    for _ in range(2):
        world.a_pass(world.stream, tenant=tenant)
    world.through()
    del inner, read_only
    world.session.detach("locked")
    assert world.host_bytes() == held
    assert world.trace.count(_core.Call.unregister_host) == 2
    tenant = None  # nothing holds on to the buffers: a mapping with exported pointers could not be closed
    gc.collect()
    for buffer in buffers:
        buffer.close()


def test_an_engine_far_ahead_of_the_device_holds_up_no_other(world: World, emulated: Any) -> None:
    """One tenant's stream is full: its engine waits in a call that enqueues. The other's passes begin, run and end."""
    tenant = world.attach("other", make_layers([2, 1], 9))
    world.steady(2)
    emulated.change(channel_ops=16)
    ahead = threading.Event()

    def run_ahead() -> None:
        for _ in range(8):
            with world.tenant.forward(stream=world.stream):
                world.wait_for_all()
        ahead.set()

    engine = threading.Thread(target=run_ahead)
    with world.busy():
        engine.start()
        while not emulated.blocked() and engine.is_alive():
            threading.Event().wait(0.001)
        for _ in range(3):
            world.a_pass(world.other, tenant=tenant)
        world.engine.synchronize(world.other)
        assert not ahead.is_set()
    engine.join()
    assert ahead.is_set()
    world.through()
    world.session.detach("other")


# --- what a session is opened with --------------------------------------------------------------------------------


@pytest.fixture
def opened(library: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens a session on the emulated driver, in an environment."""

    def build(environment: dict[str, str] | None = None, **session: Any) -> remap.Session:
        for name, value in {"REMAP_LIBCUDA": library, **(environment or {})}.items():
            monkeypatch.setenv(name, value)
        return remap.Session(40 * PAGE, **{"device": "cuda:0", "page_bytes": PAGE, **session})

    return build


def test_a_host_budget_is_a_hard_limit(opened: Any) -> None:
    """As an argument, or from the environment, where the argument wins. Master copies beyond it: test_staged_masters.py."""
    layers, half, by = make_layers([2] * 4, 1), 4 * PAGE, "REMAP_HOST_BUDGET"
    kv = dataclasses.replace(make_spec(4), host_blocks=half // make_spec(4).block_bytes + 1)
    for name, session in (("host_budget", opened(host_budget=half)), (by, opened({by: str(half)}))):
        with session:
            with pytest.raises(remap.LimitExceeded, match=name) as caught:
                session.attach_bytes(layers, name="m", kv=kv)
            assert (caught.value.limited_by, caught.value.limit) == (name, half)
            # The slots through which the session's own stream has copied the master copies (staging.h); they count in no budget.
            assert session._backend.usage()["host_bytes"] == 16 << 20
            assert session.snapshot().pages.free == 40
    for session in (opened(host_budget="1GiB"), opened({by: "1GiB"})):
        with session:
            session.attach_bytes(layers, name="m", kv=make_spec(4))
    probe = _core.probe_cuda()
    assert (probe["host_budget_bytes"], probe["host_limited_by"]) == (1 << 30, by)
    for wrong in ("lots", "0", "1.5", "-1GiB"):
        with pytest.raises(InvalidArgument) as refused:
            opened({by: wrong})
        assert refused.value.fields == {"name": by, "value": wrong}
    opened(device="cpu").close()  # a host device has no such budget
    opened({by: ""}).close()
    assert _core.probe_cuda()["host_limited_by"] in ("cgroup", "machine")


def test_host_memory_for_kv_is_what_the_budget_leaves(opened: Any) -> None:
    """By itself half of it, page-locked when an engine asks; a number beyond it is refused then, and can be asked again."""
    layers, by = make_layers([2] * 4, 1), "REMAP_HOST_BUDGET"  # about 8 pages of master copies
    for given in ({"host_budget": 16 * PAGE}, {"environment": {by: str(16 * PAGE)}}):
        with opened(**given) as session:
            kv = internals(session.attach_bytes(layers, name="m", kv=make_spec(4, max_blocks=1000))).kv
            before = session._backend.usage()["host_bytes"]
            assert 7 * PAGE < before <= 8 * PAGE and kv.host.total == 0
            assert kv.open_host() == (16 * PAGE - before) // 2 // kv.spec.block_bytes
            assert session._backend.usage()["host_bytes"] == before + kv.open_host() * kv.spec.block_bytes
            session.detach("m")
            assert session._backend.usage()["host_bytes"] == 0
    with opened(host_budget=16 * PAGE, host_kv=12 * PAGE) as session:
        kv = internals(session.attach_bytes(layers, name="m", kv=make_spec(4, max_blocks=1000))).kv
        for _ in range(2):
            with pytest.raises(remap.LimitExceeded) as caught:
                kv.open_host()
            assert caught.value.limited_by == "host_budget" and kv.host.total == 0


def test_master_copies_come_before_host_memory_for_kv_that_nobody_has_used(opened: Any) -> None:
    """Models are attached and engines made in turn: the first engine's KV must not take what the last model's copies need."""
    layers = make_layers([2] * 4, 1)  # about 8 pages of master copies

    def parts(session: Any, names: str) -> list[int]:
        return [session._tenants[name].kv.host.nbytes // PAGE for name in names]

    with opened(host_budget=32 * PAGE) as session:
        for name, expected in (("a", [12]), ("b", [6, 6]), ("c", [1, 1, 1])):  # of 24, of 16 and of 8 pages
            session.attach_bytes(layers, name=name, kv=make_spec(4, max_blocks=1000)).kv.host.open()
            assert parts(session, "abc"[: len(expected)]) == expected
            assert session._backend.usage()["host_bytes"] <= 32 * PAGE
    with opened(host_budget=32 * PAGE) as session:
        kvs = [session.attach_bytes(layers, name=name, kv=make_spec(4, max_blocks=1000)).kv for name in "ab"]
        kvs[0].host.open()
        before = parts(session, "a")
        kvs[0].host.copy_out(kvs[0].allocate(1))
        session.attach_bytes(make_layers([2] * 8, 1), name="c", kv=make_spec(8))
        assert session._tenants["c"].host.nbytes == 0  # what lies there stays: these copies are not page-locked
        assert parts(session, "a") == before and session._tenants["a"].kv.host.free_blocks > 0


def test_shared_memory_that_is_there_takes_nothing_more(opened: Any) -> None:
    """Masters in shared memory, anonymous or of a memfd, are locked in place as private ones are."""
    memories = [mmap.mmap(-1, 2 * PAGE), mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)]
    layers = [np.frombuffer(memory, np.uint8) for memory in memories]
    for layer in layers:
        layer[:] = 7
    with opened(host_budget=4 * PAGE) as session:
        session.attach_bytes(layers, name="m", kv=make_spec(2))
        assert session._backend.usage()["host_bytes"] == 4 * PAGE


def test_the_device_is_named_by_argument_or_environment(opened: Any) -> None:
    sharing = remap.advanced.Platform(shareable="posix_fd")
    for options in ({"device": "cuda"}, {"environment": {"REMAP_DEVICE": "cuda"}, "device": None, "platform": sharing}):
        with opened(**options) as session:
            assert session.device == "cuda:0"
    with pytest.raises(InvalidArgument):
        opened(device="cuda:77")
    with pytest.raises(DriverError, match=r"/nowhere/libcuda\.so\.1"):
        opened({"REMAP_LIBCUDA": "/nowhere/libcuda.so.1"}, device=None)


def test_an_interrupt_behind_attach_leaves_the_tenant_its_host_memory(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attached is attached, though nobody was told: its copies read this memory, and it can be detached.

    And host memory can be given back again: an interrupt can come when it has gone and that is not noted.
    """
    real = remap.Session._admit

    def interrupted(*arguments: Any) -> Any:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(remap.Session, "_admit", interrupted)
    layers = make_layers([2, 2, 2], 1)
    with opened() as session:
        with pytest.raises(KeyboardInterrupt):
            session.attach_bytes(layers, name="m", kv=make_spec(3, max_blocks=64))
        assert set(session.snapshot().tenants) == {"m"}
        assert session._backend.usage()["host_bytes"] >= sum(map(len, layers))
        host = session._tenants["m"].host
        session.detach("m")
        assert session._backend.usage()["host_bytes"] == 0
        session._host.give_back(host)
