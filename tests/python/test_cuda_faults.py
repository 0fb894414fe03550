"""Every entry point of the CUDA driver fails while a session opens, changes, runs passes and closes (promise 1 on a device).

The cases are those of the fault sweep over backend calls (test_fault_sweep.py); here it is the emulated driver that says no,
below the cuda backend: once and for ever, and while a copy runs. After each failure the session is as it was and the change
succeeds when it is tried again, or it has succeeded, or the arena is broken and says so; what is undone breaks no rule of
the driver, and after close nothing is left in it.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_layers, make_spec, visible
from cuda_streams import Driver
from emulated import LAUNCH_FAILED, NOT_PERMITTED, OUT_OF_MEMORY, Emulated
from test_fault_sweep import CAPACITY, CASES, SIZES, Case, World, attempt, broken_as_promised, serve_again

import remap
from remap import _core
from remap.errors import ArenaBroken, DriverError, Error

# What a driver says, and what the caller gets. The last: an argument, say an attribute, that this driver does not know.
CODES = {OUT_OF_MEMORY: remap.OutOfMemory, LAUNCH_FAILED: DriverError, NOT_PERMITTED: DriverError, 1: DriverError}


class DriverWorld(World):
    """A session with tenant "m" on the emulated driver."""

    def __init__(self, driver: Emulated, mode: str) -> None:
        self.fault = _core.make_fault_backend(_core.make_cuda_backend(library=driver.path))
        self.session = remap.Session(
            CAPACITY, page_bytes=PAGE, mode=mode, platform=remap.advanced.Platform(backend=self.fault)
        )
        self.layers = {"m": make_layers(SIZES, 1)}
        self.tenants = {"m": self.session.attach_bytes(self.layers["m"], name="m", kv=make_spec(6, max_blocks=120))}
        self.live = {}


def prepared(driver: Emulated, case: Case, mode: str) -> DriverWorld:
    world = DriverWorld(driver, mode)
    case.prepare(world)
    world.settle()
    for name, tenant in world.tenants.items():
        forward(world.session, tenant, world.layers[name])
    world.settle()
    return world


def counted(driver: Emulated, body: Callable[[], object]) -> dict[str, int]:
    """The calls that `body` makes, by entry point."""
    before = {name: driver.calls(name) for name in driver.entry_points()}
    body()
    made = {name: driver.calls(name) - count for name, count in before.items()}
    return {name: count for name, count in made.items() if count}


def calls_of(driver: Emulated, case: Case, mode: str) -> dict[str, int]:
    """The calls that the case's change makes, and its worker behind it."""
    world = prepared(driver, case, mode)

    def whole() -> None:
        case.change(world)
        world.session._executor.drain()

    made = counted(driver, whole)
    world.works()
    world.close()
    return made


def faults(made: dict[str, int]) -> Iterator[tuple[str, int, int, bool]]:
    """(entry point, which call, code, for ever): the first, a middle and the last call, and all of them."""
    codes = list(CODES)
    turn = 0
    for name, count in made.items():
        if name == "cuDevicePrimaryCtxRelease":
            continue  # the backend's destructor: it can tell nobody, and asking again might take what is another's
        for nth in sorted({1, (count + 1) // 2, count}):
            turn += 1
            yield name, nth, codes[turn % len(codes)], False
        turn += 1
        yield name, 1, codes[turn % len(codes)], True


@pytest.fixture(scope="module", autouse=True)
def young_heap() -> Iterator[None]:
    """What other test modules have left in memory is not looked through in each of some hundred collections."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def left_alone(driver: Emulated, what: str) -> None:
    """The driver has nothing left of it, and no rule was broken."""
    if driver.live():
        gc.collect()  # a session that a failed call left in a cycle
    assert driver.violations() == [], what
    assert driver.live() == {}, what


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_entry_point_fails_in_a_change(emulated: Emulated, case: Case, mode: str) -> None:
    for name, nth, code, forever in faults(calls_of(emulated, case, mode)):
        what = f"{name}, call {nth}{' and all later ones' if forever else ''}, code {code}"
        fails_and_recovers(emulated, case, mode, (name, nth, code, forever), what)
        left_alone(emulated, what)


def fails_and_recovers(driver: Emulated, case: Case, mode: str, fault: tuple[str, int, int, bool], what: str) -> None:
    name, nth, code, forever = fault
    world = prepared(driver, case, mode)
    before = visible(world.session)
    driver.arm(name, nth, code, forever=forever)
    raised = attempt(lambda: case.change(world))
    world.session._executor.drain()  # what the worker does is a part of the change: it meets the fault, too
    driver.disarm()
    if world.session._arena.broken:
        # Re-pointing unmaps before it maps. If mapping fails for ever, so does undoing that: maybe later, in the worker.
        assert isinstance(raised, (ArenaBroken, CODES[code])) or (raised is None and forever), what
        broken_as_promised(world)
    elif raised is None:  # only what may fail later failed: it shows in a pass, and a later pass tries it again
        remap.advanced.check(world.session)
        serve_again(world)
    else:
        assert type(raised) is CODES[code], f"{what}: {raised!r}"
        assert (raised.call, raised.code) == (name, code), what
        after = visible(world.session)
        if case.name == "detach":  # a tenant that is leaving serves no more; leaving can be tried again
            assert after["owners"] == before["owners"], what
        else:
            if case.name.startswith("attach"):  # pages were taken and given back: only the epoch tells
                after["epoch"] = before["epoch"]
            assert after == before, what
            remap.advanced.check(world.session)
            world.works()
        case.change(world)
        world.works()
    world.close(silent_failure=raised is None or forever)


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_every_entry_point_fails_while_a_session_opens(emulated: Emulated, mode: str) -> None:
    opened: list[remap.Session] = []

    def open_one() -> None:
        backend = _core.make_cuda_backend(library=emulated.path)
        opened.append(
            remap.Session(CAPACITY, page_bytes=PAGE, mode=mode, platform=remap.advanced.Platform(backend=backend))
        )

    made = counted(emulated, open_one)
    opened.pop().close()
    assert made["cuMemCreate"] == CAPACITY // PAGE
    refused = set()
    for name, nth, code, forever in faults(made):
        what = f"{name}, call {nth}, code {code}"
        emulated.arm(name, nth, code, forever=forever)
        raised = attempt(open_one)
        emulated.disarm()
        if raised is None:
            opened.pop().close()
        else:
            assert type(raised) is CODES[code], f"{what}: {raised!r}"
            assert raised.code == code, what
            refused.add(name)
        raised = None
        left_alone(emulated, what)
        open_one()
        opened.pop().close()
        left_alone(emulated, what)
    assert {"cuInit", "cuDevicePrimaryCtxRetain", "cuDeviceGetAttribute", "cuMemCreate", "cuCtxPushCurrent"} <= refused


STREAMING = Case("", lambda world: world.remap(3, 2), lambda world: passes(world))


def passes(world: World) -> None:
    for _ in range(2):
        forward(world.session, world.m, world.layers["m"])
    world.settle()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_every_entry_point_fails_in_passes(emulated: Emulated, mode: str) -> None:
    """A pass that fails says so, the next one reads every byte right."""
    made = calls_of(emulated, STREAMING, mode)
    assert {"cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery"} <= set(made)
    surfaced = set()
    for name, nth, code, forever in faults(made):
        what = f"{name}, call {nth}, code {code}"
        world = prepared(emulated, STREAMING, mode)
        before = visible(world.session)
        emulated.arm(name, nth, code, forever=forever)
        raised = attempt(lambda: passes(world))  # noqa: B023  called at once
        emulated.disarm()
        if raised is not None:
            assert type(raised) is CODES[code], f"{what}: {raised!r}"
            surfaced.add(name)
        assert visible(world.session) == before, what
        serve_again(world)
        world.close(silent_failure=True)
        world = raised = None
        left_alone(emulated, what)
    assert {"cuMemcpyHtoDAsync", "cuEventRecord"} <= surfaced


class Reader:
    """An engine that reads each layer on a stream of its own; what it read is compared when the stream is through."""

    def __init__(self, world: World, engine: Driver, stream: int) -> None:
        self.world, self.engine, self.stream = world, engine, stream
        self.buffers: list[tuple[int, int]] = []
        self.reads: list[tuple[int, bytes]] = []

    def passes(self) -> None:
        world = self.world
        for _ in range(2):
            with world.m.forward(stream=self.stream):
                for layer, expected in enumerate(world.layers["m"]):
                    world.m.wait(layer)
                    to = world.fault.allocate_host(len(expected))
                    self.buffers.append((to, len(expected)))
                    world.fault.copy(
                        self.stream, to, remap.advanced.layer_address(world.session, "m", layer), len(expected)
                    )
                    self.reads.append((to, expected))
                    world.m.done(layer)

    def check(self) -> None:
        """Every read behind a wait that came back, also in a pass that failed later."""
        self.engine.synchronize(self.stream)
        for to, expected in self.reads:
            assert ctypes.string_at(to, len(expected)) == expected
        for buffer in self.buffers:
            self.world.fault.free_host(*buffer)
        self.reads.clear()
        self.buffers.clear()


# The engine's own part of a pass above.
ENGINES = {"cuMemHostRegister", "cuMemcpyDtoHAsync"}


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_every_entry_point_fails_in_passes_on_a_stream(emulated: Emulated, mode: str) -> None:
    emulated.configure(granularity=PAGE, memory=1 << 30, jitter_us=100)  # the device is behind
    engine = Driver(emulated.path)
    with engine.stream() as stream:
        world = prepared(emulated, STREAMING, mode)
        reader = Reader(world, engine, stream)
        made = counted(emulated, reader.passes)
        reader.check()
        world.close()
        world = reader = None
        assert {"cuStreamWaitEvent", "cuEventRecord", "cuStreamIsCapturing"} <= set(made)
        surfaced = set()
        for name, nth, code, forever in faults({name: made[name] for name in set(made) - ENGINES}):
            what = f"{name}, call {nth}, code {code}"
            world = prepared(emulated, STREAMING, mode)
            before = visible(world.session)
            reader = Reader(world, engine, stream)
            emulated.arm(name, nth, code, forever=forever)
            raised = attempt(reader.passes)
            emulated.disarm()
            if raised is not None:
                assert type(raised) is CODES[code], f"{what}: {raised!r}"
                surfaced.add(name)
            for _ in range(3):  # what was put off may still have to say so
                raised = attempt(reader.passes)
                if raised is None:
                    break
            assert raised is None, f"{what}: {raised!r}"
            reader.check()
            assert visible(world.session) == before, what
            serve_again(world)
            world.close(silent_failure=True)
            world = reader = raised = None
            assert emulated.violations() == [], what
        assert {"cuStreamWaitEvent", "cuEventRecord", "cuStreamIsCapturing"} <= surfaced
    engine.close()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_every_entry_point_fails_while_a_session_closes(emulated: Emulated, mode: str) -> None:
    """close says what failed and can be called again, or has succeeded."""
    case = Case("", lambda world: (world.remap(3, 2), world.attach()), lambda world: None)
    world = prepared(emulated, case, mode)
    made = counted(emulated, world.session.close)
    del world
    assert {"cuMemUnmap", "cuMemAddressFree", "cuMemRelease", "cuMemHostUnregister", "cuStreamDestroy"} <= set(made)
    for name, nth, code, forever in faults(made):
        what = f"{name}, call {nth}, code {code}"
        world = prepared(emulated, case, mode)
        emulated.arm(name, nth, code, forever=forever)
        raised = attempt(world.session.close)
        emulated.disarm()
        assert raised is None or isinstance(raised, (CODES[code], ArenaBroken)), f"{what}: {raised!r}"
        assert world.session.closed == (raised is None), what
        world.close(silent_failure=True)
        del world, raised
        left_alone(emulated, what)


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_a_session_that_is_dropped_gives_everything_back(emulated: Emulated, mode: str) -> None:
    """Without close, in the middle of things."""
    for prepare in (case.prepare for case in CASES):
        world = prepared(emulated, Case("", prepare, lambda world: None), mode)
        world.remap(3)
        del world
        left_alone(emulated, "dropped")


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("nth", range(1, 9))
def test_a_copy_that_fails_while_it_runs_surfaces_and_no_wrong_byte_is_read(
    emulated: Emulated, mode: str, nth: int
) -> None:
    world = prepared(emulated, Case("", lambda w: w.remap(2, 2), lambda w: None), mode)
    emulated.arm("run:cuMemcpyHtoDAsync", nth, LAUNCH_FAILED)
    failures = 0
    for _ in range(6):
        raised = attempt(lambda: forward(world.session, world.m, world.layers["m"]))  # looks at every byte
        assert raised is None or type(raised) is DriverError, repr(raised)
        failures += raised is not None
    # Found between two passes it is repaired without anybody being told.
    assert failures <= 1
    emulated.disarm()
    world.works()
    world.close()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_a_lost_context_is_told_by_every_call_and_hangs_none(emulated: Emulated, mode: str) -> None:
    """What a failing copy does on a device. Nothing can heal it in this process: calls say so, and the process can end."""
    world = prepared(emulated, Case("", lambda w: (w.remap(2, 2), w.hold(3)), lambda w: None), mode)
    emulated.change(lose_context=1)
    emulated.arm("run:cuMemcpyHtoDAsync", 1, LAUNCH_FAILED)
    calls: list[Callable[[], Any]] = [
        *[lambda: forward(world.session, world.m, world.layers["m"])] * 3,
        lambda: world.remap(4, 2),
        partial(remap.advanced.settle, world.session),
        lambda: world.remap(0),
        lambda: world.attach(),
        lambda: forward(world.session, world.m, world.layers["m"]),
    ]
    raised: list[Error | None] = [attempt(call) for call in calls]
    told = [error for error in raised if error is not None]
    assert told
    assert all(isinstance(error, (DriverError, ArenaBroken)) for error in told), raised
    assert isinstance(raised[-1], (DriverError, ArenaBroken))
    assert isinstance(attempt(world.session.close), (DriverError, ArenaBroken))
    assert emulated.violations() == []
    # The emulated machine can be given a context again, which shows that what is left can all be found and given back.
    emulated.reset()
    world.close(silent_failure=True)
