"""A session on a CUDA device, here the emulated driver: passes on the engine's own streams, and changes while it is busy.

A shut gate in a stream stands for kernels that run for a long time. What must not wait for the device is done while a gate is
shut; what must wait for it is shown by what it has waited for.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from arena_worlds import PAGE, make_layers, make_spec, visible
from cuda_streams import Driver

import remap
from remap import _core
from remap.errors import ArenaBroken, DriverError, InvalidArgument, InvalidState
from remap.memory.plan import plan_free_pages

N = 6
SIZES = [3, 2, 3, 3, 2, 3]
SECRET = 0xA5


class World:
    """Tenant "m" over plain bytes. What an engine's kernels do is done by copies and fills on its streams."""

    def __init__(
        self,
        engine: Driver,
        library: str,
        mode: str = "aliased",
        *,
        pages: int = 60,
        sizes: Any = SIZES,
        **session: Any,
    ) -> None:
        self.engine = engine
        self.trace = _core.make_trace_backend(_core.make_cuda_backend(library=library))
        self.backend = _core.make_fault_backend(self.trace)
        self.session = remap.Session(
            pages * PAGE, page_bytes=PAGE, mode=mode, platform=remap.advanced.Platform(backend=self.backend), **session
        )
        self.layers = make_layers(sizes, 1)
        self.tenant = self.session.attach_bytes(
            self.layers,
            name="m",
            kv=make_spec(len(sizes), max_blocks=240),
            config=remap.advanced.Knobs(reserve_blocks=0),
        )
        self.kv = self.tenant.kv
        self.reads: list[tuple[int, bytes, str]] = []
        self.taken: list[tuple[int, int]] = []

    def read(self, stream: int, address: int, expected: bytes, what: str) -> None:
        """What stands there when the stream gets here; compared by `check`."""
        nbytes = len(expected)
        to = self.backend.allocate_host(nbytes)
        self.taken.append((to, nbytes))
        self.backend.copy(stream, to, address, nbytes)
        self.reads.append((to, expected, what))

    def read_layer(self, stream: int, layer: int) -> None:
        self.read(stream, remap.advanced.layer_address(self.session, "m", layer), self.layers[layer], f"layer {layer}")

    def a_pass(self, stream: int, given: Any = None) -> None:
        """Reads all layers on `stream`; nobody waits for it."""
        with self.tenant.forward(stream=stream if given is None else given):
            for layer in range(len(self.layers)):
                self.tenant.wait(layer)
                self.read_layer(stream, layer)
                self.tenant.done(layer)

    def wait_for_all(self) -> None:
        """In a pass that uses no layer."""
        for layer in range(len(self.layers)):
            self.tenant.wait(layer)
            self.tenant.done(layer)

    def host_pass(self) -> None:
        """Computed by this thread."""
        with self.tenant.forward():
            for layer, expected in enumerate(self.layers):
                self.tenant.wait(layer)
                got = ctypes.string_at(remap.advanced.layer_address(self.session, "m", layer), len(expected))
                self.tenant.done(layer)
                assert got == expected, f"layer {layer}"

    def write_block(self, stream: int, block: int, value: int) -> None:
        for offset, nbytes in self.kv.geometry.byte_ranges_of_block(block):
            self.backend.fill(stream, self.kv.address + offset, value, nbytes)

    def write_blocks(self, stream: int, blocks: dict[int, int]) -> None:
        for block, value in blocks.items():
            self.write_block(stream, block, value)

    def read_blocks(self, stream: int, blocks: dict[int, int]) -> None:
        for block, value in blocks.items():
            self.read_block(stream, block, value)

    def high_blocks(self, stream: int, count: int) -> dict[int, int]:
        """Live blocks with contents in the last places that there are: those that a shrink has to move."""
        ids = self.kv.allocate(self.kv.free_blocks)
        self.kv.free(ids[:-count])
        live = {block: 11 + index for index, block in enumerate(ids[-count:])}
        self.write_blocks(stream, live)
        return live

    def read_block(self, stream: int, block: int, value: int) -> None:
        for offset, nbytes in self.kv.geometry.byte_ranges_of_block(block):
            self.read(stream, self.kv.address + offset, bytes([value]) * nbytes, f"block {block}")

    def calls(self) -> int:
        """Of the backend, without those in which the re-pointing worker waits for the device."""
        return int(self.trace.count() - self.trace.count(_core.Call.synchronize))

    def check(self, books: bool = True) -> None:
        """All that was read, and the session's books. The streams must be through."""
        for at, expected, what in self.reads:
            got = ctypes.string_at(at, len(expected))
            assert got == expected, f"{what} read {got[:4]!r}, not {expected[:4]!r}"
        self.reads.clear()
        for each in self.taken:
            self.backend.free_host(*each)
        self.taken.clear()
        if books:
            remap.advanced.check(self.session)

    def through(self, *streams: int) -> None:
        """The device has done all of it; every byte that was read is right."""
        for stream in streams:
            self.engine.synchronize(stream)
        self.check()

    def remap(self, layers: int, buffers: int = 1, selection: str = "nested") -> dict[int, int]:
        """Returns where live blocks have gone. "slices": of every layer, so many of the last pages."""
        worth: float = layers
        if selection == "slices" and layers:
            freed = sum(min(layers, size) for size in SIZES) - buffers * layers
            worth = (freed - 0.5) / max(SIZES)  # rounded up to pages
        return dict(remap.advanced.remap(self.session, "m", worth, buffers, selection).moved.get("m", {}))

    def steady(self, stream: int) -> None:
        """Every change is finished, every layer was loaded."""
        for _ in range(2):
            self.a_pass(stream)
            self.engine.synchronize(stream)
        remap.advanced.settle(self.session)
        self.check()


@pytest.fixture
def library(emulated: Any) -> Iterator[str]:
    """The emulated driver, whose copies begin a little late. The test must copy from no pageable memory."""
    emulated.configure(granularity=PAGE, memory=256 << 20, jitter_us=20)
    yield emulated.path
    assert emulated.pageable() == 0


@pytest.fixture
def driver(library: str) -> Iterator[Driver]:
    made = Driver(library)
    yield made
    made.close()


@pytest.fixture
def stream(driver: Driver) -> Iterator[int]:
    with driver.stream() as made:
        yield made


@pytest.fixture
def other(driver: Driver) -> Iterator[int]:
    with driver.stream() as made:
        yield made


@pytest.fixture(params=["aliased", "strict"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(library: str, driver: Driver, stream: int, other: int) -> Iterator[Any]:
    """Worlds that are closed at the end, before the streams go, and must have given everything back although their tenants
    still exist.
    """
    made: list[World] = []

    def build(*arguments: Any, **options: Any) -> World:
        made.append(World(driver, library, *arguments, **options))
        return made[-1]

    yield build
    driver.open_gates()
    while made:  # the last reference goes with it: the driver is looked through when the backend is gone
        world = made.pop()
        for each in (stream, other):
            driver.synchronize(each)
        world.backend.disarm()
        world.check()
        world.session.close()
        assert set(world.backend.usage().values()) == {0}, world.backend.usage()
        del world


@contextmanager
def busy(driver: Driver, stream: int) -> Iterator[None]:
    """The device does not get on meanwhile, and nobody may wait for it."""
    gate = driver.hold(stream)
    yield
    assert gate.shut and not gate.forced, "the host waited for the device"
    gate.open()


# --- passes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", [1, 2])
def test_every_alpha_on_a_stream(make: Any, driver: Driver, stream: int, mode: str, buffers: int) -> None:
    world = make(mode)
    for selection in ("nested", "uniform"):
        for alpha in (*range(1, N - buffers + 1), 2, 0):
            world.remap(alpha, buffers, selection)
            for _ in range(2):
                world.a_pass(stream)
            world.through(stream)
    assert world.session.snapshot().tenants["m"].copies > 0


def test_a_pass_never_waits_for_the_device_once_changes_are_settled(make: Any, driver: Driver, stream: int) -> None:
    world = make()
    world.remap(3, 2)
    world.steady(stream)
    with busy(driver, stream):
        for _ in range(5):
            world.a_pass(stream)
    world.through(stream)


def test_a_pass_on_another_stream_comes_after_what_was_enqueued_on_the_last(
    make: Any, driver: Driver, stream: int, other: int
) -> None:
    world = make()
    (block,) = world.kv.allocate(1)
    world.a_pass(stream)
    with busy(driver, stream):
        world.write_block(stream, block, 1)  # after the pass, before the next: it counts as well
        with world.tenant.forward(stream=other):
            world.read_block(other, block, 1)
            world.write_block(other, block, 2)
    with world.tenant.forward(stream=stream):
        world.read_block(stream, block, 2)
    world.through(stream)


def test_what_a_change_enqueued_comes_before_a_pass_on_another_stream(
    make: Any, driver: Driver, stream: int, other: int
) -> None:
    """Compaction copies on the stream of the last pass; the next pass reads the blocks on another one."""
    world = make()
    world.remap(4)
    world.steady(stream)
    live = world.high_blocks(stream, 4)
    with busy(driver, stream):
        moved = world.remap(0)
        assert moved
        with pytest.raises(KeyError), world.tenant.forward(stream=other):
            world.read_blocks(other, {moved.get(block, block): value for block, value in live.items()})
            raise KeyError  # abandoned: no layer was used, and to wait for one is to wait for the stream that is busy
    world.through(other)


def test_the_host_computes_a_pass_only_when_the_stream_is_through(make: Any, driver: Driver, stream: int) -> None:
    world = make()
    (block,) = world.kv.allocate(1)
    world.a_pass(stream)
    gate, begun = driver.hold(stream), threading.Event()
    world.write_block(stream, block, 7)
    gate.open_once(begun)
    with world.tenant.forward():
        assert not gate.shut
        begun.set()
        for offset, nbytes in world.kv.geometry.byte_ranges_of_block(block):
            assert set(ctypes.string_at(world.kv.address + offset, nbytes)) == {7}
    world.host_pass()
    world.a_pass(stream)
    world.through(stream)


def test_streams_are_given_in_any_form_and_kept_alive(make: Any, driver: Driver, stream: int, other: int) -> None:
    class Stream:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.handle

    world = make()
    given = Stream(stream)
    alive = weakref.ref(given)
    world.a_pass(stream, given)
    del given
    gc.collect()
    assert alive() is not None  # a change would record an event there
    world.a_pass(other, other)
    gc.collect()
    assert alive() is None
    for default in (1, 2):  # the driver's own two
        world.a_pass(default, default)
        driver.synchronize(default)
    world.check()


def test_what_is_no_stream_of_this_device_is_refused(make: Any, driver: Driver, stream: int) -> None:
    world = make()
    world.remap(2)
    world.a_pass(stream)
    before = visible(world.session)
    for wrong in ("stream", 1.5, -1, 0x1230):  # a number that never was a stream; nobody can ask about one that was
        with pytest.raises(InvalidArgument):
            world.tenant.forward(stream=wrong).__enter__()
        assert visible(world.session) == before
        world.a_pass(stream)
    driver.synchronize(stream)
    with remap.Session(40 * PAGE, "cpu", page_bytes=PAGE) as session:
        tenant = session.attach_bytes(make_layers(SIZES), name="m", kv=make_spec(N))
        with pytest.raises(InvalidArgument):
            tenant.forward(stream=stream).__enter__()
        with tenant.forward():
            pass


def test_a_stream_that_is_being_captured_is_refused(make: Any, driver: Driver, stream: int) -> None:
    """A graph holds neither waits nor copies: it would repeat them after they mean nothing any more."""
    world = make()
    world.remap(2)
    world.steady(stream)
    with driver.capturing(stream), pytest.raises(InvalidState) as caught:
        world.a_pass(stream)
    assert "captur" in str(caught.value)
    world.reads.clear()
    world.a_pass(stream)
    world.through(stream)


def test_an_abandoned_pass_does_no_harm(make: Any, driver: Driver, stream: int, mode: str) -> None:
    world = make(mode)
    world.remap(3, 2)
    for stop in range(N):
        with pytest.raises(KeyError), world.tenant.forward(stream=stream):
            for layer in range(stop + 1):
                world.tenant.wait(layer)
                world.read_layer(stream, layer)
                if layer == stop:
                    raise KeyError
                world.tenant.done(layer)
        if stop == 2:
            world.remap(1)
        world.a_pass(stream)
    world.through(stream)


def test_times_are_learnt_when_the_stream_has_got_there(make: Any, driver: Driver, stream: int) -> None:
    world = make()
    world.remap(2)
    world.steady(stream)

    def abandoned() -> None:
        """Takes what is known, and teaches nothing itself."""
        driver.synchronize(stream)
        with pytest.raises(KeyError), world.tenant.forward(stream=stream):
            raise KeyError

    def learnt() -> dict[Any, int]:
        return dict(world.tenant._state.timing._cost.passes)

    abandoned()
    before = learnt()
    assert set(before) == {("decode", 1)}
    with busy(driver, stream):
        for tokens in (1, 1, 300):
            with world.tenant.forward("prefill" if tokens > 1 else "decode", tokens, stream=stream):
                world.wait_for_all()
        assert learnt() == before
    abandoned()
    after = {("decode", 1): before["decode", 1] + 2, ("prefill", 512): 1}
    assert learnt() == after
    abandoned()
    world.host_pass()
    assert learnt() == {**after, ("decode", 1): after["decode", 1] + 1}
    assert world.session.snapshot().tenants["m"].compute_s > 0


def test_streaming_says_whether_layers_have_to_be_waited_for(make: Any, driver: Driver, stream: int, mode: str) -> None:
    world = make(mode)
    assert not world.tenant.streaming
    world.remap(2)
    assert world.tenant.streaming
    world.steady(stream)
    assert world.tenant.streaming
    world.remap(0)
    assert world.tenant.streaming  # still to be loaded
    world.steady(stream)
    assert not world.tenant.streaming
    with world.tenant.forward(stream=stream):  # as a graph of all layers would: neither wait nor done
        for layer in range(N):
            world.read_layer(stream, layer)
    driver.synchronize(stream)
    world.session.detach("m")
    assert not world.tenant.streaming


# --- changes while the device is busy -----------------------------------------------------------------------------


def test_growth_waits_for_nobody_and_disturbs_nothing_that_still_runs(make: Any, driver: Driver, stream: int) -> None:
    world = make()
    world.steady(stream)
    with busy(driver, stream):
        world.a_pass(stream)  # reads, later, the layers whose pages are given away now
        heard: list[int] = []
        world.kv.subscribe(lambda added, withdrawn: heard.append(world.calls()))
        for alpha in (1, 3, 4):
            heard.clear()
            calls = world.calls()
            world.remap(alpha)
            assert heard == [calls]  # usable before any call of the backend
        report = world.session.step({"m": remap.Demand(blocks=world.kv.free_blocks + 4)})
        assert report.changed
        blocks = {block: 1 + index % 250 for index, block in enumerate(world.kv.allocate(world.kv.free_blocks))}
        world.write_blocks(stream, blocks)
    world.a_pass(stream)
    world.read_blocks(stream, blocks)
    world.through(stream)
    assert world.tenant.remapped >= 4


def test_growth_by_slices_waits_for_nobody(make: Any, driver: Driver, stream: int) -> None:
    world = make()
    world.steady(stream)
    heard: list[int] = []
    world.kv.subscribe(lambda added, withdrawn: heard.append(world.calls()))
    for k in (1, 2, 3):
        with busy(driver, stream):
            world.a_pass(stream)
            heard.clear()
            calls = world.calls()
            world.remap(k, 1, "slices")
            assert heard == [calls] if k == 1 else len(heard) == 1
            world.write_blocks(stream, dict.fromkeys(world.kv.allocate(world.kv.free_blocks), 0xDF))
        world.steady(stream)


@pytest.mark.parametrize(
    ("before", "after", "selection"),
    [
        *(
            ((4, 2), (1, 1), "nested"),
            ((4, 1), (2, 1), "nested"),
            ((3, 2), (0, 1), "nested"),
            ((2, 1), (2, 2), "nested"),
        ),
        *(
            ((3, 1), (1, 1), "slices"),
            ((2, 1), (1, 1), "slices"),
            ((3, 2), (0, 1), "slices"),
            ((2, 2), (1, 1), "slices"),
        ),
    ],
)
def test_a_shrink_waits_for_nobody_and_live_blocks_move(
    make: Any, driver: Driver, stream: int, before: Any, after: Any, selection: str
) -> None:
    world = make()
    world.remap(*before, selection)
    world.steady(stream)
    live = world.high_blocks(stream, 5)
    with busy(driver, stream):
        world.a_pass(stream)
        moved = world.remap(*after, selection)
        assert moved or after[0] >= before[0]
        live = {moved.get(block, block): value for block, value in live.items()}
        world.read_blocks(stream, live)
        # What was free is written: it may be where a block stood that has not been moved yet, or where one goes.
        world.write_blocks(stream, dict.fromkeys(world.kv.allocate(world.kv.free_blocks), 0xDF))
    for _ in range(2):
        world.a_pass(stream)
    world.read_blocks(stream, live)
    world.through(stream)


def attach_soil(world: World) -> remap.Tenant:
    kv = make_spec(2, min_blocks=300, max_blocks=400)
    return world.session.attach_bytes(make_layers([1, 1], 2), name="soil", kv=kv)


def soiled(world: World, soil: remap.Tenant, stream: int) -> None:
    for block in soil.kv.allocate(soil.kv.free_blocks):
        for offset, nbytes in soil.kv.geometry.byte_ranges_of_block(block):
            world.backend.fill(stream, soil.kv.address + offset, SECRET, nbytes)


def taken_over(world: World, before: set[int]) -> dict[int, int]:
    """60 blocks more, of pages that were another's: they have to read zero."""
    world.session.step({"m": remap.Demand(blocks=world.kv.free_blocks + 60)})
    fresh = sorted(set(world.kv.pool.open_ids()) - before)
    assert len(fresh) >= 60
    return dict.fromkeys(fresh, 0)


def test_pages_of_another_tenant_are_zeroed_on_the_stream(make: Any, driver: Driver, stream: int, other: int) -> None:
    world = make(pages=64)
    soil = attach_soil(world)
    with soil.forward(stream=other):
        soiled(world, soil, other)
    world.session.detach("soil")
    world.steady(stream)
    before = set(world.kv.pool.open_ids())
    with busy(driver, stream):
        world.read_blocks(stream, taken_over(world, before))
    assert world.tenant.remapped == 0
    world.through(stream)


def test_pages_freed_while_they_are_still_written_read_zero_for_the_next(
    make: Any, driver: Driver, stream: int, other: int
) -> None:
    """The giver's kernels are still to run when the pages are taken: the zeroes come after them, and nobody waits."""
    world = make(pages=64)
    soil = attach_soil(world)
    for tenant, compute in ((soil, other), (world.tenant, stream)):
        with tenant.forward(stream=compute):
            pass
    before = set(world.kv.pool.open_ids())
    with busy(driver, other):
        pool, arena = soil.kv.pool, world.session._arena
        soiled(world, soil, other)
        soil.kv.free(pool.live_ids())
        pages = tuple(page for page in soil._state.giving if arena.owners()[page] == _core.Owner.kv)
        slots = [slot for slot in soil._state.slots_of(pages) if slot in pool.owned_slots()]
        pages = tuple(soil._state.giving[soil.kv.geometry.giving_index(slot)] for slot in slots)
        pool.withdraw(slots)
        pool.remove_pages(slots)
        plan = plan_free_pages(soil._state.pages, pages, give=False)
        world.session._changes.apply_and_settle(soil._state, plan)
        fresh = taken_over(world, before)
        world.read_blocks(stream, fresh)
    driver.synchronize(other)
    world.read_blocks(stream, fresh)  # and nothing of the giver's comes later
    world.through(stream)


def test_a_ring_that_moves_waits_for_the_copies_into_it(
    make: Any, driver: Driver, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its addresses are exchanged inside of the change, which is rare: the layer that lends its pages is streamed no more."""
    world = make()
    world.remap(2)
    world.steady(stream)
    copies = world.tenant._state.prefetcher.copy_stream
    gate, ready = driver.hold(copies), threading.Event()
    world.a_pass(stream)
    gate.open_once(ready)
    monkeypatch.setattr(world.tenant._state, "select", lambda *_: (2, 3, 5))
    assert 0 in world.tenant._state.pages.ring_layers
    world.remap(2)
    assert not gate.shut
    assert world.tenant.streamed == (2, 3, 5)
    for _ in range(2):
        world.a_pass(stream)
    world.through(stream)


def test_strict_mode_waits_before_it_unmaps(make: Any, driver: Driver, stream: int) -> None:
    world = make("strict")
    world.steady(stream)
    gate, ready = driver.hold(stream), threading.Event()
    world.a_pass(stream)
    gate.open_once(ready)
    world.remap(3)
    assert not gate.shut
    world.through(stream)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slices", [False, True], ids=["layers", "slices"])
def test_random_changes_and_passes_that_nobody_waits_for(
    make: Any, driver: Driver, stream: int, other: int, mode: str, slices: bool, seed: int
) -> None:
    rng = random.Random(seed)
    world = make(mode)
    live: dict[int, int] = {}
    changed, refusals = 0, (remap.OutOfBlocks, *([InvalidArgument] if slices else []))

    def change() -> dict[int, int]:
        buffers = rng.choice([1, 2])
        if slices:
            return world.remap(rng.randint(0, max(SIZES)), buffers, "slices")
        return world.remap(rng.randint(0, N - buffers), buffers, rng.choice(["uniform", "nested"]))

    for number in range(50):
        compute = rng.choice([stream, stream, other, None])
        if compute is None:
            world.host_pass()
        else:
            gate = driver.hold(compute) if rng.random() < 0.3 else None
            if gate is not None:
                gate.open_once(threading.Event(), 0.01)
            world.a_pass(compute)
            with world.tenant.forward(stream=compute):
                for block in list(live):
                    if rng.random() < 0.3:
                        live[block] = 1 + rng.randrange(250)
                        world.write_block(compute, block, live[block])
                    world.read_block(compute, block, live[block])
                world.wait_for_all()
        for _ in range(rng.choice([1, 1, 2]) if slices else 1):
            try:
                moved = change()
                changed += 1
            except refusals:
                moved = {}
            live = {moved.get(block, block): value for block, value in live.items()}
        if compute is not None:
            with world.tenant.forward(stream=compute):
                for block in world.kv.allocate(rng.randint(0, world.kv.free_blocks)):
                    live[block] = 1 + rng.randrange(250)
                    world.write_block(compute, block, live[block])
                world.wait_for_all()
        gone = rng.sample(sorted(live), rng.randint(0, len(live)))
        world.kv.free(gone)
        for block in gone:
            del live[block]
        if number % 10 == 9:
            world.through(stream, other)
    driver.synchronize(other)
    assert changed > 20


# --- what fails ---------------------------------------------------------------------------------------------------


def test_an_event_that_cannot_be_recorded_is_recorded_later(make: Any, driver: Driver, stream: int) -> None:
    """Settling fails behind the blocks' back: they are usable, and the next pass finishes the change first."""
    world = make()
    world.steady(stream)
    world.backend.arm(_core.Call.record, 1)
    before = world.kv.usable_blocks
    world.remap(3)
    assert world.kv.usable_blocks > before
    assert world.tenant._state.unsettled is not None
    world.backend.arm(_core.Call.record, 1)
    with pytest.raises(DriverError):
        world.tenant.forward(stream=stream).__enter__()
    world.a_pass(stream)
    assert world.tenant._state.unsettled is None
    world.through(stream)


@pytest.mark.parametrize("call", ["record", "stream_wait", "copy", "query"])
def test_a_shrink_that_cannot_be_ordered_changes_nothing(
    make: Any, driver: Driver, stream: int, mode: str, call: str
) -> None:
    world = make(mode)
    world.remap(4, 2)
    world.steady(stream)
    live = world.high_blocks(stream, 5)
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
        world.a_pass(stream)
        world.read_blocks(stream, live)
    assert failed > 0 or call == "query"
    world.remap(1)
    for _ in range(2):
        world.a_pass(stream)
    world.through(stream)


# --- coming and going ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0, 3])
@pytest.mark.parametrize("leave", ["detach", "close"])
def test_leaving_waits_for_what_the_tenant_has_enqueued(
    make: Any, driver: Driver, stream: int, leave: str, alpha: int
) -> None:
    world = make()
    world.remap(alpha, 2)
    world.steady(stream)
    gate, ready = driver.hold(stream), threading.Event()
    world.a_pass(stream)
    gate.open_once(ready)
    if leave == "detach":
        world.session.detach("m")
    else:
        world.session.close()
    assert not gate.shut
    world.check(books=leave == "detach")
    with pytest.raises(InvalidState):
        world.tenant.forward(stream=stream).__enter__()


def host_bytes(world: World) -> int:
    return int(world.backend.usage()["host_bytes"])


def test_master_copies_are_page_locked_and_go_back(make: Any, driver: Driver, stream: int) -> None:
    world = make()
    held = host_bytes(world)
    assert held >= sum(map(len, world.layers))
    assert world.trace.count(_core.Call.allocate_host) == N
    second = world.session.attach_bytes(make_layers([1, 1], 2), name="second", kv=make_spec(2))
    assert host_bytes(world) > held
    with second.forward(stream=stream):
        pass
    world.session.detach("second")
    assert host_bytes(world) == held


def test_writable_buffers_at_os_pages_are_locked_in_place(make: Any, driver: Driver, stream: int) -> None:
    world = make()
    before, held = world.trace.count(_core.Call.allocate_host), host_bytes(world)
    buffers: list[Any] = []
    for layer in make_layers([2, 2, 2], 5):
        buffer = mmap.mmap(-1, len(layer))
        buffer[:] = layer
        buffers.append(buffer)
    inner = memoryview(buffers[0])[64:]  # overlaps the first, and starts inside of an OS page
    read_only = memoryview(buffers.pop()).toreadonly()
    layers = [*buffers, buffers[0], read_only, inner]
    expected = [bytes(layer) for layer in layers]
    tenant = world.session.attach_bytes(layers, name="locked", kv=make_spec(5, max_blocks=200))
    assert world.trace.count(_core.Call.register_host) == 2  # the third is the first again
    assert world.trace.count(_core.Call.allocate_host) == before + 2
    remap.advanced.remap(world.session, "locked", 3)
    for _ in range(2):
        with tenant.forward(stream=stream):
            for layer, content in enumerate(expected):
                tenant.wait(layer)
                world.read(
                    stream, remap.advanced.layer_address(world.session, "locked", layer), content, f"layer {layer}"
                )
                tenant.done(layer)
    world.through(stream)
    del inner, read_only, layers
    world.session.detach("locked")
    assert host_bytes(world) == held
    assert world.trace.count(_core.Call.unregister_host) == 2
    tenant = None  # nothing holds on to the buffers: a mapping with exported pointers could not be closed
    gc.collect()
    for buffer in buffers:
        buffer.close()


def test_attaching_that_fails_gives_the_host_memory_back(make: Any) -> None:
    world = make(pages=24)
    held, calls = host_bytes(world), world.trace.count()
    for layers, kv in (([9, 9, 9], make_spec(3)), ([1, 1], make_spec(3))):
        with pytest.raises((remap.OutOfMemory, InvalidArgument)):
            world.session.attach_bytes(make_layers(layers, 2), name="late", kv=kv)
        assert host_bytes(world) == held
    assert world.trace.count() > calls
    for nth in range(1, 30):
        world.backend.arm_any(nth, True)
        with pytest.raises((DriverError, ArenaBroken)):
            world.session.attach_bytes(make_layers([1, 1], 2), name="late", kv=make_spec(2))
        world.backend.disarm()
        if world.session._arena.broken:
            break
    # What could not be given back while every call failed is given back by close(), which the fixture looks at.


def test_an_engine_far_ahead_of_the_device_holds_up_no_other(
    make: Any, driver: Driver, stream: int, other: int, emulated: Any
) -> None:
    """One tenant's stream is full: its engine waits in a call that enqueues. The other's passes begin, run and end."""
    world = make()
    layers = make_layers([2, 1], 9)
    tenant = world.session.attach_bytes(layers, name="other", kv=make_spec(2))
    world.remap(2)
    world.steady(stream)
    emulated.change(channel_ops=16)
    gate = driver.hold(stream)
    ahead = threading.Event()
    failures: list[BaseException] = []

    def run_ahead() -> None:
        try:
            for _ in range(8):
                with world.tenant.forward(stream=stream):
                    world.wait_for_all()
            ahead.set()
        except BaseException as error:  # noqa: BLE001  looked at below
            failures.append(error)

    engine = threading.Thread(target=run_ahead)
    engine.start()
    while not emulated.blocked() and engine.is_alive():
        threading.Event().wait(0.001)
    for _ in range(3):
        with tenant.forward(stream=other):
            for layer in range(2):
                tenant.wait(layer)
                world.read(
                    other, remap.advanced.layer_address(world.session, "other", layer), layers[layer], f"layer {layer}"
                )
                tenant.done(layer)
    driver.synchronize(other)
    assert gate.shut and not gate.forced and not ahead.is_set()
    gate.open()
    engine.join()
    assert ahead.is_set() and not failures
    driver.synchronize(stream)
    world.session.detach("other")
    world.check()


def open_on(library: str, monkeypatch: pytest.MonkeyPatch, **session: Any) -> remap.Session:
    monkeypatch.setenv("REMAP_LIBCUDA", library)
    return remap.Session(40 * PAGE, **{"device": "cuda:0", "page_bytes": PAGE, **session})


@pytest.mark.parametrize("by", ["host_budget", "REMAP_HOST_BUDGET"])
def test_a_host_budget_is_a_hard_limit(library: str, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """As an argument, or from the environment, where the argument wins."""
    layers, half = make_layers([2] * 4, 1), 4 * PAGE
    given: dict[str, Any] = {"host_budget": half} if by == "host_budget" else {}
    if not given:
        monkeypatch.setenv(by, str(half))
    with open_on(library, monkeypatch, **given) as session:
        with pytest.raises(remap.Error) as caught:
            session.attach_bytes(layers, name="m", kv=make_spec(4))
        assert type(caught.value) is remap.LimitExceeded
        assert (caught.value.limited_by, caught.value.limit) == (by, half)
        assert by in str(caught.value)
        assert session._backend.usage()["host_bytes"] == 0
        assert session.snapshot().pages.free == 40
    with open_on(library, monkeypatch, host_budget="1GiB") as session:
        session.attach_bytes(layers, name="m", kv=make_spec(4))


def test_what_the_environment_says_of_the_host_budget(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAP_HOST_BUDGET", "1GiB")
    with open_on(library, monkeypatch) as session:
        session.attach_bytes(make_layers([2] * 4, 1), name="m", kv=make_spec(4))
    probe = _core.probe_cuda()
    assert (probe["host_budget_bytes"], probe["host_limited_by"]) == (1 << 30, "REMAP_HOST_BUDGET")
    for wrong in ("lots", "0", "1.5", "-1GiB"):
        monkeypatch.setenv("REMAP_HOST_BUDGET", wrong)
        with pytest.raises(InvalidArgument) as refused:
            open_on(library, monkeypatch)
        assert refused.value.fields == {"name": "REMAP_HOST_BUDGET", "value": wrong}
    open_on(library, monkeypatch, device="cpu").close()  # a host device has no such budget
    monkeypatch.setenv("REMAP_HOST_BUDGET", "")
    assert _core.probe_cuda()["host_limited_by"] in ("cgroup", "machine")


def test_shared_memory_that_is_there_takes_nothing_more(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters in shared memory, anonymous or of a memfd, are locked in place as private ones are."""
    memories = [mmap.mmap(-1, 2 * PAGE), mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)]
    layers = [np.frombuffer(memory, np.uint8) for memory in memories]
    for layer in layers:
        layer[:] = 7
    with open_on(library, monkeypatch, host_budget=4 * PAGE) as session:
        session.attach_bytes(layers, name="m", kv=make_spec(2))
        assert session._backend.usage()["host_bytes"] == 4 * PAGE


def test_the_device_is_named_by_argument_or_environment(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAP_LIBCUDA", library)
    for device in ("cuda", "cuda:0"):
        with remap.Session(4 * PAGE, device, page_bytes=PAGE) as session:
            assert session.device == "cuda:0"
    monkeypatch.setenv("REMAP_DEVICE", "cuda")
    with remap.Session(4 * PAGE, page_bytes=PAGE, platform=remap.advanced.Platform(shareable="posix_fd")) as session:
        assert session.device == "cuda:0"
    with pytest.raises(InvalidArgument):
        remap.Session(4 * PAGE, "cuda:77", page_bytes=PAGE)
    monkeypatch.setenv("REMAP_LIBCUDA", "/nowhere/libcuda.so.1")
    with pytest.raises(DriverError) as caught:
        remap.Session(4 * PAGE, page_bytes=PAGE)
    assert "/nowhere/libcuda.so.1" in str(caught.value)


def test_an_interrupt_behind_attach_leaves_the_tenant_its_host_memory(
    library: str, monkeypatch: pytest.MonkeyPatch
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
    with open_on(library, monkeypatch) as session:
        with pytest.raises(KeyboardInterrupt):
            session.attach_bytes(layers, name="m", kv=make_spec(3, max_blocks=64))
        assert set(session.snapshot().tenants) == {"m"}
        assert session._backend.usage()["host_bytes"] >= sum(map(len, layers))
        host = session._tenants["m"].host
        session.detach("m")
        assert session._backend.usage()["host_bytes"] == 0
        session._host.give_back(host)
