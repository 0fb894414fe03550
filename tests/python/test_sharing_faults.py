"""Every backend call of a change between tenants fails, once or for ever.

Afterwards the books agree, every layer and every block reads right, moved blocks are told of (in the report, or in the next one),
and the same call succeeds; or the arena is broken and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_backend, session_on, visible
from sharing_worlds import Engine, set_times, spec, times_of
from test_fault_sweep import KINDS, attempt

import remap
from remap import _core
from remap.errors import ArenaBroken, Error
from remap.memory.moves import compose_moves as compose

SHAPES = {"a": (8, 1), "b": (8, 2), "c": (5, 1)}
CAPACITY = 44 * PAGE


class World:
    """Three engines behind a fault decorator, without random times: what is done is the same each time."""

    def __init__(self, mode: str) -> None:
        self.fault = _core.make_fault_backend(make_backend(CAPACITY))
        config = remap.advanced.Knobs(
            reserve_blocks=0, hysteresis_blocks=0, min_idle=0.0, map_s=0.0, contention=9.0, dwell=1, policy="lru"
        )
        self.session = session_on(self.fault, CAPACITY, page_bytes=PAGE, mode=mode, config=config)
        self.engines: dict[str, Engine] = {}
        for tag, (name, (layers, pages)) in enumerate(SHAPES.items(), 1):
            self.attach(name, layers, pages, tag)

    def attach(self, name: str, layers: int, pages: int, tag: int) -> None:
        engine = self.engines[name] = Engine(self.session, name, layers, pages, tag, kv=spec(layers))
        set_times(engine, times_of(layers, 1.0, 0.1), copy_s=0.1)

    def tell(self, report: Any) -> Any:
        for name, moved in report.moved.items():
            if name in self.engines:
                self.engines[name].patch(moved)
        return report

    def lend(self, name: str, layers: int, to: str | None = None) -> None:
        self.tell(remap.advanced.lend(self.session, name, layers, to=to))

    def remap(self, name: str, layers: int, buffers: int) -> None:
        self.tell(remap.advanced.remap(self.session, name, layers, buffers, "nested"))

    def step(self, **demand: int) -> None:
        self.tell(self.session.step({name: remap.Demand(blocks) for name, blocks in demand.items()}))

    def activate(self, name: str) -> None:
        report = self.tell(self.session.activate(name))
        assert report.activated or report.reason.startswith("bringing layers home ended early"), report

    def detach(self, name: str) -> None:
        self.session.detach(name)
        del self.engines[name]

    def fill(self, name: str, leave: int = 0) -> None:
        """Live blocks up to the highest ids; the lowest ones become free again, so that blocks have to move."""
        engine = self.engines[name]
        engine.allocate(engine.tenant.kv.free_blocks)
        engine.free(sorted(engine.held)[:leave])

    def settle(self) -> None:
        remap.advanced.settle(self.session)
        for engine in self.engines.values():
            engine.tenant._state.prefetcher.drain()

    def blocks_are_right(self) -> None:
        for engine in self.engines.values():
            assert set(engine.held) == set(engine.tenant.kv.pool.live_ids()), f"{engine.name} was not told of a move"
            engine.check()
        pages = self.session.snapshot().pages
        assert pages.free + pages.params + pages.kv + pages.ring + pages.quarantine == pages.total

    def works(self) -> None:
        remap.advanced.check(self.session)
        self.blocks_are_right()
        for engine in self.engines.values():
            if engine.tenant.active:
                for _ in range(2):
                    forward(self.session, engine.tenant, engine.data)

    def heals(self) -> None:
        """A pass may tell of what had been deferred; after that everything works."""
        for engine in self.engines.values():
            for _ in range(4):
                if not engine.tenant.active or attempt(engine.serve) is None:
                    break
            else:
                pytest.fail("the failure does not heal")
        self.works()

    def close(self, *, silent: bool) -> None:
        self.fault.disarm()
        self.session.close()
        kept = {name for name, held in self.fault.usage().items() if held}
        assert kept <= ({"streams", "events"} if silent else set()), self.fault.usage()


@dataclass(frozen=True)
class Case:
    name: str
    prepare: Callable[[World], None]
    change: Callable[[World], None]
    done: Callable[[World], bool]  # what the change is for


def crowded(world: World) -> None:
    """b sleeps; a and c have its layers, and live blocks in them that have room elsewhere."""
    world.session.deactivate("b")
    world.lend("b", 4, to="a")
    world.lend("b", 6, to="c")
    world.fill("a", 6)
    world.fill("c", 4)


def wanting(world: World) -> None:
    """a has no block left; b sleeps, and so does c, which has unused ones."""
    world.step(c=8)
    for name in ("b", "c"):
        world.session.deactivate(name)
    world.fill("a")


def returning(world: World) -> None:
    """All can spare what they have of b: the next step brings a layer home."""
    world.session.deactivate("b")
    world.lend("b", 3, to="a")
    world.fill("a", 6)


CASES = [
    Case("lend by hand", lambda w: w.session.deactivate("b"), lambda w: w.lend("b", 4, to="a"), lambda w: lent(w) == 8),
    Case("lend more", crowded, lambda w: w.lend("b", 7, to="a"), lambda w: lent(w) == 14),
    Case("a step that takes", wanting, lambda w: w.step(a=14), lambda w: w.engines["a"].tenant.kv.free_blocks >= 14),
    Case("activate", crowded, lambda w: w.activate("b"), lambda w: not w.engines["b"].tenant.streamed),
    Case("a layer returns", returning, lambda w: w.step(a=0), lambda w: away(w) == (2, 1)),
    Case("bring home by hand", crowded, lambda w: w.lend("b", 3), lambda w: away(w) == (3, 1)),
    Case("remap a lender", crowded, lambda w: w.remap("b", 2, 2), lambda w: away(w) == (2, 2)),
    Case("detach the lender", crowded, lambda w: w.detach("b"), lambda w: "b" not in w.session.snapshot().tenants),
    Case("detach a holder", crowded, lambda w: w.detach("a"), lambda w: "a" not in w.session.snapshot().tenants),
]


def lent(world: World) -> int:
    return world.session.snapshot().tenants["b"].lent_pages


def away(world: World) -> tuple[int, int]:
    tenant = world.engines["b"].tenant
    return tenant.remapped, tenant.buffers


def prepared(case: Case, mode: str) -> World:
    world = World(mode)
    case.prepare(world)
    world.settle()
    world.works()
    world.settle()
    return world


def calls_of(case: Case, mode: str) -> int:
    world = prepared(case, mode)
    before = world.fault.calls()
    case.change(world)
    calls = int(world.fault.calls() - before)
    assert case.done(world)
    world.works()
    world.close(silent=False)
    return calls


@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_call_fails(case: Case, mode: str, forever: bool) -> None:
    total = calls_of(case, mode)
    for nth in range(1, total + 1, max(1, total // 8)):
        kind, error = KINDS["out_of_memory" if nth % 2 else "driver"]
        world = prepared(case, mode)
        world.fault.arm_any(nth, forever, kind)
        raised = attempt(lambda: case.change(world))  # noqa: B023  called at once
        world.session._executor.drain()
        world.fault.disarm()
        if world.session._arena.broken:
            assert isinstance(raised, (ArenaBroken, error)) or forever, f"call {nth}: {raised!r}"
            assert world.session.snapshot().pages.quarantine > 0
            remap.advanced.check(world.session)
            for refused in (lambda: world.step(a=1), lambda: world.lend("b", 1)):  # noqa: B023
                assert isinstance(attempt(refused), ArenaBroken)
            world.close(silent=True)
            continue
        assert raised is None or type(raised) is error, f"call {nth}: {raised!r}"
        leaving = [engine for engine in world.engines.values() if engine.tenant._state.leaving]
        if not leaving:
            remap.advanced.check(world.session)
            if world.session._changes.moved:  # the next report has it
                world.tell(world.session.step({}))
                assert not world.session._changes.moved
            world.blocks_are_right()
            world.heals()
        if not case.done(world) or leaving:
            case.change(world)
        assert case.done(world), f"call {nth}: it does not succeed afterwards"
        world.heals()
        assert not any(engine.tenant._state.reclaimed for engine in world.engines.values())
        world.close(silent=False)


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_a_failed_lend_or_activation_that_moved_nothing_changed_nothing(mode: str) -> None:
    case = next(case for case in CASES if case.name == "lend by hand")
    for nth in range(1, calls_of(case, mode) + 1, 3):
        world = prepared(case, mode)
        before = visible(world.session)
        world.fault.arm_any(nth, True)
        raised = attempt(lambda: remap.advanced.lend(world.session, "b", 4))  # noqa: B023  called at once
        world.session._executor.drain()
        world.fault.disarm()
        if raised is not None and not world.session._arena.broken:
            assert visible(world.session) == before
        world.close(silent=True)


def test_moves_of_steps_that_raised_are_told_together_and_in_order() -> None:
    """A step that raises has moved blocks; the next one moves them on, and raises as well; then the engine hears of both."""
    world = World("aliased")
    session, steps = world.session, world.session._steps
    script: list[dict[int, int]] = [{1: 2, 5: 6}, {2: 3, 7: 8}]

    def moving(tenant: Any, wanted: Any, decision: Any, entries: Any) -> None:
        entries[tenant.name] = {"added": 0, "moved": {}, "unmet": 0, "stall": 0.0, "reason": ""}
        told = session._changes.moved
        told[tenant.name] = compose(told.get(tenant.name, {}), script.pop(0))  # as a change that was decided does
        raise remap.OutOfMemory("the backend has failed")

    steps._carry_out = moving
    world.fill("a")
    for _ in range(2):
        assert isinstance(attempt(lambda: session.step({"a": remap.Demand(3)})), Error)
    del steps._carry_out
    assert session.activate("b").moved == {"a": {1: 3, 5: 6, 7: 8}}
    assert not session._changes.moved and not session.step({}).moved
    world.close(silent=False)
