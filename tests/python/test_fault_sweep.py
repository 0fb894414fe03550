"""Every backend call of a set of plans fails, once or for ever (promise 1: a failed call changes nothing, or ArenaBroken).

One case is a session brought into some state and one change of it. A first run counts the backend calls of that change;
then the change runs once more for every call number, with that call failing. Afterwards the session is as it was before
and the change succeeds when it is tried again, or it has succeeded, or the arena is broken and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from arena_worlds import (
    PAGE,
    forward,
    make_backend,
    make_layers,
    make_spec,
    read_block,
    session_on,
    visible,
    write_block,
)

import remap
from remap import _core
from remap.errors import ArenaBroken, DriverError, Error, InvalidState
from remap.memory.plan import plan_free_pages
from remap.memory.view import free_pages_of

CAPACITY = 44 * PAGE
SIZES = [3, 2, 3, 3, 2, 3]
SECOND = [2, 2, 2]
KINDS = {
    "driver": (_core.ErrorKind.driver, DriverError),
    "out_of_memory": (_core.ErrorKind.out_of_memory, remap.OutOfMemory),
}


class World:
    """A session with tenant "m" behind a fault decorator."""

    def __init__(self, mode: str) -> None:
        self.fault = _core.make_fault_backend(make_backend(CAPACITY))
        self.session = session_on(self.fault, CAPACITY, page_bytes=PAGE, mode=mode)
        self.layers = {"m": make_layers(SIZES, 1)}
        self.tenants = {"m": self.session.attach_bytes(self.layers["m"], name="m", kv=make_spec(6, max_blocks=120))}
        self.live: dict[int, int] = {}

    @property
    def m(self) -> Any:
        return self.tenants["m"]

    def settle(self) -> None:
        remap.advanced.settle(self.session)
        for tenant in self.tenants.values():
            tenant._state.prefetcher.drain()

    def hold(self, count: int) -> None:
        """Live blocks from the top of the usable ones, so that a shrink has to move them."""
        ids = self.m.kv.allocate(self.m.kv.free_blocks)
        self.m.kv.free(ids[:-count])
        for block in ids[-count:]:
            write_block(self.m, block, 1 + block % 200)
            self.live[block] = 1 + block % 200

    def remap(self, layers: int, buffers: int = 1, selection: str = "uniform") -> None:
        moved = remap.advanced.remap(self.session, "m", layers, buffers, selection).moved.get("m", {})
        self.live = {moved.get(block, block): value for block, value in self.live.items()}

    def free_pages(self, give: bool) -> None:
        session, tenant, state = self.session, self.m, self.m._state
        if give:
            chosen = free_pages_of(session._changes, state)[:5]
        else:
            chosen = tuple(p for p in state.giving if session._arena.owners()[p] == _core.Owner.kv)[-3:]
            tenant.kv.pool.withdraw(state.slots_of(chosen))
            tenant.kv.pool.remove_pages(state.slots_of(chosen))
        try:
            session._changes.apply_and_settle(state, plan_free_pages(state.pages, chosen, give=give))
        except Error:
            if not give:
                tenant.kv.pool.add_pages(state.slots_of(chosen))
            raise

    def attach(self) -> None:
        layers = make_layers(SECOND, 2)
        self.tenants["b"] = self.session.attach_bytes(layers, name="b", kv=make_spec(3, max_blocks=220))
        self.layers["b"] = layers

    def detach(self, name: str) -> None:
        self.session.detach(name)
        self.tenants.pop(name)
        self.layers.pop(name)

    def works(self) -> None:
        """Every layer reads right in a pass, live blocks have their bytes, the books are right."""
        for name, tenant in self.tenants.items():
            for _ in range(2):
                forward(self.session, tenant, self.layers[name])
        for block, value in self.live.items():
            assert read_block(self.m, block) == {value}
        remap.advanced.check(self.session)

    def close(self, *, silent_failure: bool = False) -> None:
        """silent_failure: a call may have failed inside a destructor, which has nobody to tell and keeps what it had."""
        self.fault.disarm()
        self.session.close()
        # The caller still has the tenants: they hold nothing of the backend any more.
        usage = self.fault.usage()
        kept = {name for name, held in usage.items() if held}
        assert kept <= ({"streams", "events"} if silent_failure else set()), usage


@dataclass(frozen=True)
class Case:
    name: str
    prepare: Callable[[World], None]
    change: Callable[[World], None]
    new_views: bool = False  # whether regions come to show pages that attach has prepared no view of


def used_by_another(world: World) -> None:
    """All pages have been a third tenant's KV: the next tenant's are zeroed."""
    layers = make_layers([1, 1], 3)
    tenant = world.session.attach_bytes(layers, name="old", kv=make_spec(2, min_blocks=60, max_blocks=60))
    for block in tenant.kv.allocate(60):
        write_block(tenant, block, 0xAA)
    world.session.detach("old")


CASES = [
    Case("grow from nothing", lambda w: None, lambda w: w.remap(2)),
    Case("grow further", lambda w: w.remap(1, 1, "nested"), lambda w: w.remap(3, 1, "nested")),
    Case("shrink", lambda w: w.remap(4, 1, "nested"), lambda w: w.remap(2, 1, "nested")),
    Case("shrink to nothing", lambda w: w.remap(3, 2), lambda w: w.remap(0)),
    Case("shrink with moves", lambda w: (w.remap(4), w.hold(2)), lambda w: w.remap(1)),
    Case("one buffer to two", lambda w: w.remap(2, 1), lambda w: w.remap(2, 2), new_views=True),
    Case("two buffers to one", lambda w: w.remap(3, 2), lambda w: w.remap(3, 1)),
    Case("uniform to another uniform", lambda w: w.remap(1, 1), lambda w: w.remap(2, 1)),
    Case("free pages in", lambda w: None, lambda w: w.free_pages(True)),
    Case("free pages out", lambda w: w.free_pages(True), lambda w: w.free_pages(False)),
    Case("attach", lambda w: None, lambda w: w.attach()),
    Case("attach with zeroing", used_by_another, lambda w: w.attach()),
    Case("detach", lambda w: (w.attach(), w.remap(2)), lambda w: w.detach("b")),
]


def prepared(case: Case, mode: str) -> World:
    world = World(mode)
    case.prepare(world)
    world.settle()
    for name, tenant in world.tenants.items():
        forward(world.session, tenant, world.layers[name])
    world.settle()
    return world


def calls_of(case: Case, mode: str) -> int:
    world = prepared(case, mode)
    before = world.fault.calls()
    case.change(world)
    calls = world.fault.calls() - before
    world.works()
    world.close()
    return int(calls)


def may_break_later(world: World, forever: bool, new_views: bool = False) -> bool:
    """Without exchange re-pointing unmaps before it maps, and a new view takes more than one call. If calls fail for ever, so
    does undoing that: in the worker."""
    return forever and (new_views or not world.fault.can_exchange)


def broken_as_promised(world: World) -> None:
    snapshot = world.session.snapshot()
    assert snapshot.pages.quarantine > 0
    assert snapshot.pages.total == CAPACITY // PAGE
    with pytest.raises(ArenaBroken) as caught:
        remap.advanced.remap(world.session, "m", 1)
    assert caught.value.quarantined_pages == snapshot.pages.quarantine
    remap.advanced.check(world.session)


@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_call_fails(case: Case, mode: str, forever: bool) -> None:
    total = calls_of(case, mode)
    # Long runs of like calls (one page after the other) need not fail one by one.
    step = max(1, total // 40)
    for nth in range(1, total + 1, step):
        kind, error = KINDS["out_of_memory" if nth % 2 else "driver"]
        world = prepared(case, mode)
        before = visible(world.session)
        world.fault.arm_any(nth, forever, kind)
        raised = attempt(lambda: case.change(world))  # noqa: B023  called at once
        world.session._executor.drain()  # what the worker does is a part of the change: it meets the fault, too
        world.fault.disarm()
        if world.session._arena.broken:
            assert isinstance(raised, (ArenaBroken, error)) or may_break_later(world, forever, case.new_views), (
                f"call {nth}: {raised!r}"
            )
            broken_as_promised(world)
        elif raised is None:  # only what may fail later failed: it shows in a pass, and a later pass tries it again
            remap.advanced.check(world.session)
            serve_again(world)
        else:
            assert type(raised) is error, f"call {nth}: {raised!r}"
            after = visible(world.session)
            if case.name == "detach":  # a tenant that is leaving serves no more; leaving can be tried again
                assert after["owners"] == before["owners"]
            else:
                if case.name.startswith("attach"):  # pages were taken and given back: only the epoch tells
                    after["epoch"] = before["epoch"]
                assert after == before, f"call {nth}: {raised}"
                remap.advanced.check(world.session)
                world.works()
            case.change(world)
            world.works()
        world.close(silent_failure=forever)


def attempt(change: Callable[[], None]) -> Error | None:
    """The library's error, if there is one; without its frames, which would keep alive what is released."""
    try:
        change()
    except Error as error:
        seen: BaseException | None = error
        while seen is not None:
            seen.__traceback__ = None
            seen = seen.__context__
        return error
    return None


def serve_again(world: World) -> None:
    """A pass may report what had been deferred; after that everything works."""
    for name, tenant in world.tenants.items():
        for _ in range(4):
            error = attempt(lambda: forward(world.session, tenant, world.layers[name]))  # noqa: B023  called at once
            assert not isinstance(error, InvalidState), error
            if error is None:
                break
        else:
            pytest.fail("the failure does not heal")
    world.works()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_opening_a_session_fails_on_page_k_and_leaks_nothing(mode: str) -> None:
    """Museum: create fails on plane p > 0, earlier planes leak (surogate#117)."""
    for nth in range(1, CAPACITY // PAGE + 1, 3):
        fault = _core.make_fault_backend(make_backend(CAPACITY))
        fault.arm(_core.Call.create_page, nth, True, _core.ErrorKind.out_of_memory)
        with pytest.raises(remap.OutOfMemory):
            session_on(fault, CAPACITY, page_bytes=PAGE, mode=mode)
        assert set(fault.usage().values()) == {0}
        fault.disarm()
        session_on(fault, CAPACITY, page_bytes=PAGE, mode=mode).close()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_map_fails_at_slot_k_then_destroy(mode: str) -> None:
    """Museum: a destructor unmaps a tail that was never mapped and terminates (pytorch#188008)."""
    probe = World(mode)
    total = probe.fault.calls(_core.Call.map)
    probe.close()
    for nth in range(1, total + 1):
        fault = _core.make_fault_backend(make_backend(CAPACITY))
        session = session_on(fault, CAPACITY, page_bytes=PAGE, mode=mode)
        fault.arm(_core.Call.map, nth)
        with pytest.raises(DriverError):
            session.attach_bytes(make_layers(SIZES, 1), name="m", kv=make_spec(6, max_blocks=120))
        assert session.snapshot().pages.free == CAPACITY // PAGE
        remap.advanced.check(session)
        del session  # destroyed without close()
        usage = fault.usage()
        assert usage["page_bytes"] == usage["mapped_bytes"] == usage["reserved_bytes"] == 0


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_half_done_growth_with_persistent_out_of_memory_gives_everything_back(mode: str) -> None:
    """Museum: a half-done allocation leaks when the pool runs out (kvcached#364)."""
    world = prepared(Case("", lambda w: w.remap(1), lambda w: None), mode)
    before = visible(world.session)
    for kind in (_core.Call.map, _core.Call.reserve, _core.Call.create_page):
        world.fault.arm(kind, 1, True, _core.ErrorKind.out_of_memory)
        for _ in range(3):
            try:
                world.remap(3, 2)
            except (remap.OutOfMemory, ArenaBroken):
                continue
            world.fault.disarm()
            world.remap(1)
            world.settle()
        world.fault.disarm()
        if world.session._arena.broken:
            broken_as_promised(world)
            break
        world.remap(1)
        world.settle()
        after = visible(world.session)
        assert (after["owners"], after["tenants"]) == (before["owners"], before["tenants"])
        world.works()
    world.close()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_an_asynchronous_copy_failure_surfaces_in_wait_and_heals(mode: str) -> None:
    surfaced = 0
    for nth in range(1, 9):
        world = prepared(Case("", lambda w: w.remap(2, 2), lambda w: None), mode)
        world.fault.fail_async_copy(nth)
        failures = 0
        for _ in range(6):
            try:
                forward(world.session, world.m, world.layers["m"])
            except DriverError:
                failures += 1
        # Found between two passes it is repaired without anybody being told: all bytes were read right (forward).
        assert failures <= 1, f"copy {nth}"
        surfaced += failures
        world.fault.disarm()
        world.works()
        world.close()
    assert surfaced > 0


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_a_move_of_live_blocks_that_fails_while_it_runs_changes_nothing(mode: str) -> None:
    world = prepared(Case("", lambda w: (w.remap(4), w.hold(12)), lambda w: None), mode)
    before = visible(world.session)
    for nth in range(1, 4):
        world.fault.fail_async_copy(nth)
        with pytest.raises(DriverError):
            world.remap(1)
        world.fault.disarm()
        assert visible(world.session) == before
        world.works()
    world.remap(1)
    world.works()
    world.close()


@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize("call", ["exchange", "map", "set_access", "reserve"])
def test_failed_deferred_repointing_surfaces_and_is_tried_again(call: str, forever: bool) -> None:
    world = prepared(Case("", lambda w: None, lambda w: None), "aliased")
    world.fault.arm(getattr(_core.Call, call), 1, forever)
    world.remap(3, 1)  # bookkeeping only: cannot fail by these
    assert world.m.remapped == 3
    world.session._executor.drain()
    if world.session._arena.broken:
        assert may_break_later(world, forever)
        broken_as_promised(world)
        world.close()
        return
    if forever and remap.advanced.unsettled(world.session):
        for _ in range(3):
            with pytest.raises(DriverError):
                forward(world.session, world.m, world.layers["m"])
    world.fault.disarm()
    serve_again(world)
    assert not remap.advanced.unsettled(world.session)
    world.remap(0)
    world.works()
    world.close()


@pytest.mark.parametrize("call", ["exchange", "unmap", "copy", "record", "create_event", "create_stream"])
def test_close_after_a_failed_close_finishes(call: str) -> None:
    world = prepared(Case("", lambda w: w.remap(3, 2), lambda w: None), "aliased")
    world.fault.arm(getattr(_core.Call, call), 2, True)
    error = attempt(world.session.close)
    assert error is None or type(error) is DriverError
    assert world.session.closed == (error is None)
    world.close()
