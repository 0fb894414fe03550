"""Every entry point of the CUDA driver fails while a session opens, changes, runs passes and closes (promise 1 on a device).

The cases are those of the fault sweep over backend calls (test_fault_sweep.py); here it is the emulated driver that says no,
below the cuda backend: once and for ever, and while a copy runs. After each failure the session is as it was and the change
succeeds when it is tried again, or it has succeeded, or the arena is broken and says so; what is undone breaks no rule of
the driver, and after close nothing is left in it.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_layers, make_spec, visible
from cuda_streams import Driver
from effort import LONG
from emulated import LAUNCH_FAILED, NOT_PERMITTED, OUT_OF_MEMORY, Emulated
from test_fault_sweep import CAPACITY, CASES, SIZES, Case, World, attempt, broken_as_promised, serve_again

import remap
from remap import _core
from remap.errors import ArenaBroken, DriverError, Error

# What a driver says, and what the caller gets. The last: an argument, say an attribute, that this driver does not know.
CODES = {OUT_OF_MEMORY: remap.OutOfMemory, LAUNCH_FAILED: DriverError, NOT_PERMITTED: DriverError, 1: DriverError}


Fault = tuple[str, int, int, bool]  # entry point, which call, code, for ever
both_modes = pytest.mark.parametrize("mode", ["aliased", "strict"])


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


def prepared(driver: Emulated, prepare: Callable[[World], object], mode: str) -> DriverWorld:
    world = DriverWorld(driver, mode)
    prepare(world)
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


def faults(made: dict[str, int], turn: int | None = None) -> Iterator[Fault]:
    """The first, a middle and the last call of each entry point, and all of them. turn: in the short form half of these for each
    entry point, the other half at the other turn (0, 1)."""
    codes = itertools.cycle(CODES)
    for place, (name, count) in enumerate(made.items()):
        if name == "cuDevicePrimaryCtxRelease":
            continue  # the backend's destructor: it can tell nobody, and asking again might take what is another's
        calls = [(nth, False) for nth in sorted({1, (count + 1) // 2, count})]
        for at, (nth, forever) in enumerate([*calls, (1, True)]):
            code = next(codes)
            if LONG or turn is None or (place + at + turn) % 2 == 0:
                yield name, nth, code, forever


def failing(driver: Emulated, fault: Fault, body: Callable[[], object]) -> Error | None:
    """What `body` raises: an error of the fault's kind, or that the arena is broken."""
    name, nth, code, forever = fault
    driver.arm(name, nth, code, forever=forever)
    raised = attempt(body)
    driver.disarm()
    assert raised is None or type(raised) in (CODES[code], ArenaBroken), f"{fault}: {raised!r}"
    return raised


def left_alone(driver: Emulated, what: object, besides: dict[str, int] | None = None) -> None:
    """The driver has nothing left of it, and no rule was broken."""
    if driver.live() != (besides or {}):
        gc.collect()  # a session that a failed call left in a cycle
    assert driver.violations() == [], what
    assert driver.live() == (besides or {}), what


@both_modes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_entry_point_fails_in_a_change(emulated: Emulated, case: Case, mode: str) -> None:
    def change(world: World) -> None:
        case.change(world)
        world.session._executor.drain()  # what the worker does is a part of the change: it meets the fault, too

    world = prepared(emulated, case.prepare, mode)
    made = counted(emulated, partial(change, world))
    world.works()
    world.close()
    del world
    for fault in faults(made, turn=int(mode == "strict")):
        fails_and_recovers(emulated, case, mode, fault)
        left_alone(emulated, fault)


def fails_and_recovers(driver: Emulated, case: Case, mode: str, fault: Fault) -> None:
    world = prepared(driver, case.prepare, mode)
    before = visible(world.session)

    def change() -> None:
        try:
            case.change(world)
        finally:
            world.session._executor.drain()

    raised = failing(driver, fault, change)
    if world.session._arena.broken:
        # Re-pointing unmaps before it maps. If mapping fails for ever, so does undoing that: maybe later, in the worker.
        assert raised is not None or fault[3], fault
        broken_as_promised(world)
    elif raised is None:  # only what may fail later failed: it shows in a pass, and a later pass tries it again
        remap.advanced.check(world.session)
        serve_again(world)
    else:
        assert (raised.call, raised.code) == (fault[0], fault[2]), fault
        after = visible(world.session)
        if case.name == "detach":  # a tenant that is leaving serves no more; leaving can be tried again
            assert after["owners"] == before["owners"], fault
        else:
            if case.name.startswith("attach"):  # pages were taken and given back: only the epoch tells
                after["epoch"] = before["epoch"]
            assert after == before, fault
            remap.advanced.check(world.session)
            world.works()
        case.change(world)
        world.works()
    world.close(silent_failure=raised is None or fault[3])


@both_modes
def test_every_entry_point_fails_while_a_session_opens(emulated: Emulated, mode: str) -> None:
    opened: list[remap.Session] = []

    def open_one() -> None:
        backend = _core.make_cuda_backend(library=emulated.path)
        platform = remap.advanced.Platform(backend=backend)
        opened.append(remap.Session(CAPACITY, page_bytes=PAGE, mode=mode, platform=platform))

    made = counted(emulated, open_one)
    opened.pop().close()
    assert made["cuMemCreate"] == CAPACITY // PAGE
    refused = set()
    for fault in faults(made):
        if failing(emulated, fault, open_one) is None:
            opened.pop().close()
        else:
            refused.add(fault[0])
        left_alone(emulated, fault)
        open_one()
        opened.pop().close()
        left_alone(emulated, fault)
    assert {"cuInit", "cuDevicePrimaryCtxRetain", "cuDeviceGetAttribute", "cuMemCreate", "cuCtxPushCurrent"} <= refused


class Reader:
    """An engine that reads each layer on a stream of its own; what it read is compared when the stream is through."""

    def __init__(self, world: World, engine: Driver, stream: int) -> None:
        self.world, self.engine, self.stream = world, engine, stream
        self.reads: list[tuple[int, int, bytes]] = []  # where, bytes there, what has to be there

    def passes(self) -> None:
        world = self.world
        for _ in range(2):
            with world.m.forward(stream=self.stream):
                for layer, expected in enumerate(world.layers["m"]):
                    world.m.wait(layer)
                    at, nbytes = remap.advanced.layer_address(world.session, "m", layer), len(expected)
                    to = world.fault.allocate_host(nbytes)
                    self.reads.append((to, nbytes, b""))
                    world.fault.copy(self.stream, to, at, nbytes)
                    self.reads[-1] = (to, nbytes, expected)
                    world.m.done(layer)

    def check(self) -> None:
        """Every read behind a wait that came back, also in a pass that failed later."""
        self.engine.synchronize(self.stream)
        for to, nbytes, expected in self.reads:
            assert ctypes.string_at(to, len(expected)) == expected
            self.world.fault.free_host(to, nbytes)
        self.reads.clear()


class HostReader(Reader):
    """Reads on its own thread."""

    def passes(self) -> None:
        for _ in range(2):
            forward(self.world.session, self.world.m, self.world.layers["m"])
        self.world.settle()


@both_modes
@pytest.mark.parametrize(
    ("reads", "engines", "needed"),
    [
        (HostReader, set(), {"cuMemcpyHtoDAsync", "cuEventRecord"}),
        # Without the engine's own part of a pass.
        (
            Reader,
            {"cuMemHostRegister", "cuMemcpyDtoHAsync"},
            {"cuStreamWaitEvent", "cuEventRecord", "cuStreamIsCapturing"},
        ),
    ],
    ids=["host", "stream"],
)
def test_every_entry_point_fails_in_passes(
    emulated: Emulated, mode: str, reads: type[Reader], engines: set[str], needed: set[str]
) -> None:
    """A pass that fails says so, a later one reads every byte right."""
    if reads is Reader:
        emulated.configure(granularity=PAGE, memory=1 << 30, jitter_us=100)  # the device is behind
    engine = Driver(emulated.path)
    with engine.stream() as stream:
        idle = emulated.live()

        def begun() -> Reader:
            return reads(prepared(emulated, lambda world: world.remap(3, 2), mode), engine, stream)

        reader = begun()
        made = counted(emulated, reader.passes)
        reader.check()
        reader.world.close()
        reader = None
        surfaced = set()
        for fault in faults({name: made[name] for name in set(made) - engines}):
            reader = begun()
            before = visible(reader.world.session)
            if failing(emulated, fault, reader.passes) is not None:
                surfaced.add(fault[0])
            # What was put off may still have to say so.
            assert any(attempt(reader.passes) is None for _ in range(3)), fault
            reader.check()
            assert visible(reader.world.session) == before, fault
            serve_again(reader.world)
            reader.world.close(silent_failure=True)
            reader = None
            left_alone(emulated, fault, besides=idle)
        assert needed <= surfaced
    engine.close()


@both_modes
def test_every_entry_point_fails_while_a_session_closes(emulated: Emulated, mode: str) -> None:
    """close says what failed and can be called again, or has succeeded."""

    def begun() -> DriverWorld:
        return prepared(emulated, lambda world: (world.remap(3, 2), world.attach()), mode)

    made = counted(emulated, begun().session.close)
    assert {"cuMemUnmap", "cuMemAddressFree", "cuMemRelease", "cuMemHostUnregister", "cuStreamDestroy"} <= set(made)
    for fault in faults(made):
        world = begun()
        raised = failing(emulated, fault, world.session.close)
        assert world.session.closed == (raised is None), fault
        world.close(silent_failure=True)
        del world, raised
        left_alone(emulated, fault)


@both_modes
def test_a_session_that_is_dropped_gives_everything_back(emulated: Emulated, mode: str) -> None:
    """Without close, in the middle of things."""
    for prepare in (case.prepare for case in CASES):
        world = prepared(emulated, prepare, mode)
        world.remap(3)
        del world
        left_alone(emulated, "dropped")


@both_modes
@pytest.mark.parametrize("nth", range(1, 9))
def test_a_copy_that_fails_while_it_runs_surfaces_and_no_wrong_byte_is_read(
    emulated: Emulated, mode: str, nth: int
) -> None:
    world = prepared(emulated, lambda w: w.remap(2, 2), mode)
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


@both_modes
def test_a_lost_context_is_told_by_every_call_and_hangs_none(emulated: Emulated, mode: str) -> None:
    """What a failing copy does on a device. Nothing can heal it in this process: calls say so, and the process can end."""
    world = prepared(emulated, lambda w: (w.remap(2, 2), w.hold(3)), mode)
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
