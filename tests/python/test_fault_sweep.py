"""Every backend call of a set of changes fails, once or for ever (promise 1: a failed call changes nothing, or ArenaBroken).

One case is a session brought into some state and one change of it. A first run counts the backend calls of that change;
then the change runs once more for every call number, with that call failing. Afterwards the session is as it was before
and the change succeeds when it is tried again, or it has succeeded, or the arena is broken and says so.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from arena_worlds import (
    PAGE,
    External,
    forward,
    make_backend,
    make_layers,
    make_spec,
    read_block,
    session_on,
    write_block,
)
from effort import some
from sharing_worlds import Faulty, Hosting, attempt, fill_layer, seen

import remap
from remap import _core
from remap.errors import ArenaBroken, DriverError, InvalidState
from remap.internals import internals

CAPACITY = 44 * PAGE
SIZES = [3, 2, 3, 3, 2, 3]
ON_DEVICE = bool(os.environ.get("REMAP_DEVICE"))  # the suite's second run
KINDS = {
    "driver": (_core.ErrorKind.driver, DriverError),
    "out_of_memory": (_core.ErrorKind.out_of_memory, remap.OutOfMemory),
}
MODES = pytest.mark.parametrize("mode", ["aliased", "strict"])
OFTEN = pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])


class World:
    """A session with tenant "m" behind a fault decorator (test_cuda_faults.py has it on the emulated driver)."""

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
            internals(tenant)._state.prefetcher.drain()

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

    def attach(self) -> None:
        layers = make_layers([2, 2, 2], 2)
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
    prepare: Callable[[Any], Any]
    change: Callable[[Any], Any]
    world: Callable[[str], Any] = World
    plans: bool = False  # several, one after the other
    whole: bool = True  # an interrupt leaves the state before all of them, or after; else after any of them


def nothing(world: Any) -> None:
    pass


def used_by_another(world: World) -> None:
    """All pages have been a third tenant's KV: the next tenant's are zeroed."""
    layers = make_layers([1, 1], 3)
    tenant = world.session.attach_bytes(layers, name="old", kv=make_spec(2, min_blocks=60, max_blocks=60))
    for block in tenant.kv.allocate(60):
        write_block(tenant, block, 0xAA)
    world.session.detach("old")


CASES = [
    Case("grow from nothing", nothing, lambda w: w.remap(2)),
    Case("grow further", lambda w: w.remap(1, 1, "nested"), lambda w: w.remap(3, 1, "nested")),
    Case("shrink", lambda w: w.remap(4, 1, "nested"), lambda w: w.remap(2, 1, "nested")),
    Case("shrink to nothing", lambda w: w.remap(3, 2), lambda w: w.remap(0)),
    Case("shrink with moves", lambda w: (w.remap(4), w.hold(2)), lambda w: w.remap(1)),
    # Museum: a half-done allocation leaks when the pool runs out (kvcached#364).
    Case("one buffer to two", lambda w: w.remap(2, 1), lambda w: w.remap(3, 2)),
    Case("two buffers to one", lambda w: w.remap(3, 2), lambda w: w.remap(3, 1)),
    Case("uniform to another uniform", lambda w: w.remap(1, 1), lambda w: w.remap(2, 1)),
    Case("attach", nothing, lambda w: w.attach()),
    Case("attach with zeroing", used_by_another, lambda w: w.attach()),
    Case("detach", lambda w: (w.attach(), w.remap(2)), lambda w: w.detach("b")),
]

# -- between tenants -----------------------------------------------------------------------------------------------------


def crowded(world: Faulty) -> None:
    """b sleeps; a and c have its layers, and live blocks in them that have room elsewhere."""
    world.session.deactivate("b")
    world.lend("b", 3, to="a")
    world.lend("b", 5, to="c")
    world.engines["a"].fill(14)
    world.engines["c"].fill(14)


def short_of_room(world: Faulty) -> None:
    """As `crowded`, where a's blocks can move only into pages that are free now."""
    crowded(world)
    world.engines["a"].fill()
    world.detach("c")


def full(layers: float, buffers: int, selection: str, name: str = "a", leave: int = 0) -> Callable[[Faulty], None]:
    """Layers are away and their KV is full: before these can come home, pages have to be gained for the blocks in them."""

    def prepare(world: Faulty) -> None:
        world.remap(name, layers, buffers, selection)
        world.engines[name].fill(leave)

    return prepare


def computing(first: int, end: int, leave: int) -> Callable[[Faulty], None]:
    """a computes a part of its layers, and has live blocks in the pages of the others."""

    def prepare(world: Faulty) -> None:
        world.place("a", first, end)
        world.engines["a"].fill(leave)

    return prepare


def waiting(world: Faulty) -> None:
    """As `computing`, and two more layers wait for their bytes, of which one has them."""
    computing(0, 3, leave=5)(world)
    world.place("a", 0, 3, hold=(4, 6), fill=(4, 6))
    fill_layer(world, "a", 4)


def almost_filled(world: Faulty) -> None:
    """Layer 4 waits for its last bytes; what lies in the pages of 5 and 6 can only go to those of 4. (Museum: the bytes that had
    come did not count any more when a call failed as it was to leave.)"""
    world.place("a", 0, 3)
    world.place("a", 0, 3, hold=(4,), fill=(4,))
    fill_layer(world, "a", 4, 0, len(world.engines["a"].data[4]) - 100)
    world.engines["a"].fill()


def all_come(world: Faulty) -> None:
    """Layer 4 has its bytes; a caller whose first call was interrupted looks whether it has happened."""
    if 4 in internals(world.engines["a"].tenant).elsewhere:
        remap.advanced.filled(world.session, "a", 4)


def wanting(world: Faulty) -> None:
    """b and c sleep, c with unused blocks, and a has none left."""
    world.step(c=20)
    for name in ("b", "c"):
        world.session.deactivate(name)
    world.engines["a"].fill()


def returning(world: Faulty) -> None:
    """All can spare what they have of b: the next step brings a layer home."""
    world.session.deactivate("b")
    world.lend("b", 4, to="a")
    world.engines["a"].fill(14)


def spared(world: Faulty) -> None:
    """a has live blocks in pages of b, and room for them elsewhere."""
    world.session.deactivate("b")
    world.lend("b", 4, to="a")
    world.engines["a"].hold(2)


def asleep(world: Faulty) -> None:
    world.session.deactivate("b")


def cold(world: Faulty) -> None:
    """b has no page, and a has taken some of those that b had."""
    world.session.deactivate("b", pages="none")
    world.step(a=15)
    world.engines["a"].allocate(4)
    world.session.deactivate("c")


# Museum: `activate`, `lend(..., 0)` and `remap(..., 0)` raised "Nothing changed" when a later plan failed, and the holder had
# lost 16 of 21 blocks; `lend(a, n, to=b)` raised and a had lent.
# Changes of several plans, each one change even if it is interrupted; but a tenant that is detached, and steps: they report what
# was done by then.
CASES_OF_PLANS = [
    Case(name, prepare, change, Faulty, plans=True, whole=not name.startswith(("detach", "a step", "activate what")))
    for name, prepare, change in (
        ("activate", crowded, lambda w: w.tell(w.session.activate("b"))),
        ("activate alone", crowded, lambda w: w.tell(w.session.activate("b", alone=True))),
        ("activate, into free pages", short_of_room, lambda w: w.tell(w.session.activate("b"))),
        ("bring home", crowded, lambda w: w.lend("b", 0)),
        ("bring some home", crowded, lambda w: w.lend("b", 3)),
        ("remap a lender to nothing", crowded, lambda w: w.remap("b", 0)),
        ("remap a lender", crowded, lambda w: w.remap("b", 2, 2, "nested")),
        ("lend to", asleep, lambda w: w.lend("b", 4, to="a")),
        ("lend more to", crowded, lambda w: w.lend("b", 6, to="a")),
        ("lend as well as stream", full(2, 2, "nested", leave=9), lambda w: w.lend("a", 3, to="c")),
        ("other layers", full(2, 1, "uniform"), lambda w: w.remap("a", 3, 1, "uniform")),
        ("layers whose pages blocks move to", full(3, 1, "nested"), lambda w: w.remap("a", 4, 1, "uniform")),
        ("blocks move into the ring", full(4, 2, "uniform"), lambda w: w.remap("a", 4, 1, "nested")),
        ("more buffers", full(1, 1, "nested"), lambda w: w.remap("a", 3, 2, "nested")),
        ("fewer buffers", full(3, 2, "nested", leave=2), lambda w: w.remap("a", 2, 1, "nested")),
        ("fewer slices", full(2.5, 2, "slices", "b", 6), lambda w: w.remap("b", 1, 1, "slices")),
        ("activate what has no pages", cold, lambda w: w.tell(w.session.activate("b"))),
        ("give all pages up", asleep, lambda w: w.session.deactivate("b", pages="none")),
        ("give up what is lent as well", crowded, lambda w: w.session.deactivate("b", pages="none")),
        ("detach the lender", crowded, lambda w: w.detach("b")),
        ("detach a holder", crowded, lambda w: w.detach("a")),
        ("layers go elsewhere", nothing, lambda w: w.place("a", 0, 3)),
        ("streamed layers go elsewhere", full(2, 1, "nested", leave=9), lambda w: w.place("a", 2, 5)),
        ("layers come back", computing(0, 3, leave=6), lambda w: w.place("a", 0, 7)),
        ("layers come back to be held", computing(0, 3, leave=5), lambda w: w.place("a", 0, 3, hold=(4, 6))),
        ("pages come back before bytes", computing(0, 3, leave=5), lambda w: w.place("a", 0, 3, hold=(4, 5), fill=(4,))),
        ("what has almost come leaves", almost_filled, lambda w: w.place("a", 0, 3, hold=(5,))),
        ("a layer has its bytes", waiting, all_come),
        ("what waits for bytes is loaded", waiting, lambda w: w.place("a", 0, 3, hold=(4, 6))),
        ("some of what waits goes again", waiting, lambda w: w.place("a", 0, 3, hold=(5, 6), fill=(6,))),
        ("what waits is computed", waiting, lambda w: w.place("a", 3, 7)),
        ("borrowed pages go back", spared, lambda w: w.tell(remap.advanced.give_back(w.session, "a"))),
        ("others are computed", computing(0, 3, leave=9), lambda w: w.place("a", 4, 7)),
        ("a step takes free pages", nothing, lambda w: w.step(a=8)),
        ("a step for one", wanting, lambda w: w.step(a=60)),
        ("a step for three", nothing, lambda w: w.step(a=40, b=40, c=40)),
        ("a step brings a layer home", returning, lambda w: w.step(a=0)),
    )
]  # fmt: skip


def external(world: Faulty, *, use: int = 0) -> External:
    """a's engine has its own allocator, which uses the highest blocks."""
    made = world.engines["a"].external = External(world.engines["a"].tenant)
    made.use(sorted(made.free)[len(made.free) - use :])
    return made


def draining(world: Faulty) -> None:
    world.remap("a", 3, 1, "nested")
    external(world, use=2)
    world.remap("a", 0, drain=True)


def unsettled(world: Faulty) -> None:
    """A change whose settling has failed once."""
    remap.advanced.settle(world.session)
    world.fault.arm(_core.Call.create_event if world.mode == "strict" else _core.Call.exchange, 1)
    attempt(lambda: world.remap("a", 2, 1, "nested"))
    world.session._executor.drain()
    world.fault.disarm()


def address(world: Faulty) -> tuple[int, int]:
    return remap.advanced.layer_address(world.session, "a", 1), 100


# What cannot fail for want of the backend, or not usefully: interrupted only (test_interrupts.py).
INTERRUPTED = [
    Case(name, prepare, change, Faulty, plans, whole=not plans)
    for name, prepare, change, plans in (
        ("up", nothing, lambda w: w.remap("a", 2, 1, "nested"), False),
        ("down", lambda w: w.remap("a", 3, 1, "nested"), lambda w: w.remap("a", 1, 1, "nested"), False),
        ("slices up", nothing, lambda w: w.remap("a", 2, 1, "slices"), False),
        ("attach", nothing, lambda w: w.attach("d", [1, 1], 7), False),
        ("settle what has failed", unsettled, lambda w: remap.advanced.settle(w.session), True),
        ("a pass behind what has failed", unsettled, lambda w: w.engines["a"].serve(), True),
        ("remap behind what has failed", unsettled, lambda w: w.remap("c", 1), True),
        ("deactivate", lambda w: w.remap("a", 2), lambda w: w.session.deactivate("a"), False),
        ("deactivate while it drains", draining, lambda w: w.session.deactivate("a"), False),
        ("activate in part", crowded, lambda w: w.tell(w.session.activate("b", partial=True)), True),
        ("settle", lambda w: w.remap("a", 2), lambda w: remap.advanced.settle(w.session), False),
        ("a pass that streams", lambda w: w.remap("a", 2), lambda w: w.engines["a"].serve(), False),
        ("a pass that loads", lambda w: (w.remap("a", 3), w.remap("a", 0)), lambda w: w.engines["a"].serve(), False),
        ("snapshot", asleep, lambda w: w.session.snapshot() and None, False),
        ("check", asleep, lambda w: remap.advanced.check(w.session), False),
        ("allocate", lambda w: w.step(a=6), lambda w: w.engines["a"].allocate(3), False),
        ("free", lambda w: (w.step(a=8), w.engines["a"].allocate(6)), lambda w: w.engines["a"].free(), False),
        ("close", lambda w: (crowded(w), w.remap("a", 2)), lambda w: w.session.close(), False),
        ("an allocator takes pages", external, lambda w: w.step(a=20), True),
        ("an allocator gives layers back", lambda w: (w.remap("a", 3, 1, "nested"), external(w)),
         lambda w: w.remap("a", 1, 1, "nested"), False),
        ("an allocator has to drain", lambda w: (w.remap("a", 3, 1, "nested"), external(w, use=2)),
         lambda w: w.remap("a", 0, drain=True), False),
        ("what was lent to an allocator comes home", lambda w: (asleep(w), w.lend("b", 3, to="a"), external(w)),
         lambda w: w.tell(w.session.activate("b")), True),
        ("declare and withdraw", nothing, lambda w: (
            remap.advanced.declare_registered(w.session, *address(w)),
            remap.advanced.withdraw_registered(w.session, *address(w))), True),
    )
]  # fmt: skip

# Books alone: these too are interrupted only, and what they return nobody may have seen.
HOSTED = [
    Case(name, prepare, change, Hosting)
    for name, prepare, change in (
        ("copy out", lambda w: (w.copy_out(3), w.engines["a"].allocate(4)),
         lambda w: w.kv.copy_out(sorted(w.engines["a"].held)[:5], 8) and None),
        ("copy in", lambda w: w.copy_out(5), lambda w: w.kv.copy_in(w.hosts, sorted(w.engines["a"].held)) and None),
        ("free host blocks", lambda w: w.copy_out(12), lambda w: w.kv.free_host(w.hosts[::2])),
        ("stream", lambda w: w.copy_out(7), lambda w: w.kv.stream(w.hosts[1:]) and None),
        ("free what streams", lambda w: (w.copy_out(7), w.stream(5)), lambda w: w.kv.free(w.shown[:3])),
        ("free both", lambda w: (w.copy_out(7), w.stream(5)),
         lambda w: w.kv.free([*w.shown[:3], *sorted(w.engines["a"].held)[:4]])),
    )
]  # fmt: skip


def prepared(case: Case, mode: str) -> Any:
    world = case.world(mode)
    case.prepare(world)
    world.settle()
    world.works()
    world.settle()
    return world


def broken_as_promised(world: Any) -> None:
    snapshot = world.session.snapshot()
    assert snapshot.pages.quarantine > 0
    assert sum(vars(snapshot.pages).values()) == 2 * snapshot.pages.total
    for refused in (lambda: remap.advanced.remap(world.session, next(iter(snapshot.tenants)), 1), world.session.step):
        with pytest.raises(ArenaBroken) as caught:
            refused()
        assert caught.value.quarantined_pages == snapshot.pages.quarantine
    remap.advanced.check(world.session)


@OFTEN
@MODES
@pytest.mark.parametrize("case", [*CASES, *CASES_OF_PLANS], ids=lambda case: case.name)
def test_every_call_fails(case: Case, mode: str, forever: bool) -> None:
    world = prepared(case, mode)
    before, calls = seen(world.session), world.fault.calls()
    case.change(world)
    calls = world.fault.calls() - calls
    assert seen(world.session) != before, "the change is to do something"
    world.works()
    world.close()
    # Long runs of like calls (one page after the other) need not fail one by one. Once and for ever, on the host and on a device
    # others of them fail: a quarter of a step further each.
    step = max(1, calls // (some(8, 40) if case.world is World else some(4, 12)))
    for nth in range(1 + step * (2 * ON_DEVICE + forever) // 4, calls + 1, step):
        kind, error = KINDS["out_of_memory" if nth % 2 else "driver"]
        world = prepared(case, mode)
        before = seen(world.session)
        world.fault.arm_any(nth, forever, kind)
        reports: list[Any] = []
        raised = attempt(lambda: reports.append(case.change(world)))  # noqa: B023  called at once
        world.session._executor.drain()  # what the worker does is a part of the change: it meets the fault, too
        world.fault.disarm()
        if world.session._arena.broken:
            # Without exchange re-pointing unmaps before it maps; if calls fail for ever, so does undoing that: in the worker.
            assert isinstance(raised, (ArenaBroken, error)) or forever, f"call {nth}: {raised!r}"
            broken_as_promised(world)
        elif raised is None:  # only what may fail later failed: it shows in a pass, and a later pass tries it again
            # What one failure stops has not happened, but for what a step has done for others, and first layers that have come.
            early = "no pages" not in case.name and "ended early" in str(getattr(reports[0], "reason", ""))
            assert forever or "step" in case.name or not early, f"call {nth}: {reports[0]}"
            serve_again(world)
        else:
            assert type(raised) is error, f"call {nth}: {raised!r}"
            if "detach" in case.name:  # a tenant that is leaving serves no more; leaving can be tried again
                assert seen(world.session)["owners"] == before["owners"]
            else:
                assert seen(world.session) == before, f"call {nth}: {raised}"
                serve_again(world)
            case.change(world)
            world.works()
        world.close(silent_failure=forever)


def serve_again(world: Any) -> None:
    """A pass may report what had been deferred; after that everything works."""
    for last in (False, False, False, True):
        error = attempt(world.works)
        assert error is None or not (last or isinstance(error, InvalidState)), error
        if error is None:
            return


@MODES
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


@MODES
def test_map_fails_at_slot_k_then_destroy(mode: str) -> None:
    """Museum: a destructor unmaps a tail that was never mapped and terminates (pytorch#188008)."""
    for nth in itertools.count(1):
        fault = _core.make_fault_backend(make_backend(CAPACITY))
        session = session_on(fault, CAPACITY, page_bytes=PAGE, mode=mode)
        fault.arm(_core.Call.map, nth)
        if attempt(partial(session.attach_bytes, make_layers(SIZES, 1), name="m", kv=make_spec(6))) is None:
            session.close()
            break
        assert session.snapshot().pages.free == CAPACITY // PAGE
        remap.advanced.check(session)
        del session  # destroyed without close()
        usage = fault.usage()
        assert usage["page_bytes"] == usage["mapped_bytes"] == usage["reserved_bytes"] == 0
    assert nth > 2


@MODES
def test_an_asynchronous_copy_failure_surfaces_in_wait_and_heals(mode: str) -> None:
    surfaced = 0
    for nth in range(1, 9):
        world = prepared(Case("", lambda w: w.remap(2, 2), nothing), mode)
        world.fault.fail_async_copy(nth)
        errors = [attempt(lambda world=world: forward(world.session, world.m, world.layers["m"])) for _ in range(6)]
        failures = [error for error in errors if error is not None]
        # Found between two passes it is repaired without anybody being told: all bytes were read right (forward).
        assert len(failures) <= 1 and all(type(error) is DriverError for error in failures), f"copy {nth}"
        surfaced += len(failures)
        world.fault.disarm()
        world.works()
        world.close()
    assert surfaced > 0


@MODES
def test_a_move_of_live_blocks_that_fails_while_it_runs_is_made_again(mode: str) -> None:
    for nth in range(1, 4):
        world = prepared(Case("", lambda w: (w.remap(4), w.hold(24)), nothing), mode)
        holes = sorted(world.live)[::2]  # blocks that lie beside each other are one copy
        world.m.kv.free(holes)
        world.live = {block: value for block, value in world.live.items() if block not in holes}
        world.fault.fail_async_copy(nth)
        world.remap(1)
        assert not internals(world.m)._state.kv.due_moves
        world.works()
        world.close()


@OFTEN
@pytest.mark.parametrize("call", ["exchange", "map", "set_access"])
def test_failed_deferred_repointing_surfaces_and_is_tried_again(call: str, forever: bool) -> None:
    """(That it is tried again: the sweep.)"""
    world = prepared(Case("", nothing, nothing), "aliased")
    world.fault.arm(getattr(_core.Call, call), 1, forever)
    world.remap(3, 1)  # bookkeeping only: cannot fail by these
    world.session._executor.drain()
    if world.session._arena.broken:
        assert forever and not world.fault.can_exchange
        broken_as_promised(world)
    elif forever and remap.advanced.unsettled(world.session):
        for _ in range(3):
            with pytest.raises(DriverError):
                forward(world.session, world.m, world.layers["m"])
    world.close()


@pytest.mark.parametrize("call", ["exchange", "unmap", "copy", "record", "create_event", "create_stream"])
def test_close_after_a_failed_close_finishes(call: str) -> None:
    world = prepared(Case("", lambda w: w.remap(3, 2), nothing), "aliased")
    world.fault.arm(getattr(_core.Call, call), 2, True)
    error = attempt(world.session.close)
    assert error is None or type(error) is DriverError
    assert world.session.closed == (error is None)
    world.close()
