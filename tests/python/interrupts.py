"""KeyboardInterrupt at every point of every public call, one a run in a fresh world; afterwards everything must work.

    points = "lines"     before every line of the package that the call comes to
             "signals"   wherever CPython would really raise it: at a function's start, after a call, at a backward jump

A `finally` or the end of a `with` begins outside of what it closes: no signal can arrive there (nothing is looked at in
between), and no code could defend itself. So points that another handler covers than the instruction before are left
out.

After the interrupt, in another thread and within a time limit (a lock that stays locked shows as a deadlock): what is
seen is what was before the call or what is after it; the next report tells what moved; every live block has its tag, every
layer its bytes in passes of every tenant, every free block can be used; the same call has its full effect; all other
calls work; close gives everything back.

    python interrupts.py CALL MODE POINTS BUDGET

runs one call's situations, so many points of each at most (0: all), and prints one JSON line for each finding. `sweep` runs
that as a process of its own, since a finding may be a crash.
"""

from __future__ import annotations

import contextlib
import dis
import faulthandler
import functools
import gc
import json
import os
import random
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import subprocesses
from arena_worlds import External, make_layers, times_of, write_block
from sharing_worlds import EAGER, Engine, Shared, set_times, spec

import remap
from remap import _core
from remap.errors import Error, InvalidArgument, OutOfBlocks

PAGE = 4096
PACKAGE = str(Path(remap.__file__).resolve().parent) + os.sep
MODES = ("aliased", "strict")
PATIENCE_S = 10.0
TAG = 0xCC
# Files whose functions change nothing but what they return.
PURE = re.compile(
    r"((policy/\w+|policy/donors/\w+|kv/spec|memory/(bounds|moves|plan|view)|config|report|sizes)"
    r"\.py:\d+( < )?)*"
)

# -- the interrupt -----------------------------------------------------------------------------------------------------

_CHECKS = {"CALL", "CALL_FUNCTION_EX", "RESUME"}  # CPython looks for signals there, and at backward jumps


@functools.cache
def points_of(code: CodeType, points: str) -> frozenset[int]:
    """Offsets of the instructions before which an interrupt may come."""
    return frozenset(_points_of(code, points))


def _points_of(code: CodeType, points: str) -> Iterator[int]:
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def covered(offset: int) -> tuple[int, int]:
        """(what handles an exception there, how deep): (-1, -1) if nothing does."""
        return next(((each.target, each.depth) for each in entries if each.start <= offset < each.end), (-1, -1))

    def leaves(origin: int, target: int) -> bool:
        return covered(origin) != covered(target) and covered(target)[1] <= covered(origin)[1]

    # Where a `with` or a `try` is left, by falling out of it or by a jump: what closes it is called first, and no signal arrives
    # before that call has been made.
    instructions = list(dis.get_instructions(code))
    left = {each.argval for each in instructions if each.opcode in dis.hasjrel and leaves(each.offset, each.argval)}
    before, closing = None, False
    for each in instructions:
        if each.offset in left or (before is not None and leaves(before.offset, each.offset)):
            closing = True
        elif before is not None and before.opname in _CHECKS:
            closing = False
        same = before is None or covered(before.offset) == covered(each.offset)
        after_check = before is not None and (before.opname in _CHECKS)
        if same and not closing and (points != "signals" or after_check):
            yield each.offset
        if points == "signals" and "BACKWARD" in each.opname and covered(each.argval) == covered(each.offset):
            yield each.argval
        before = each


class Interrupt:
    """A trace function that raises once, at the `at`-th point; with at = -1 it counts only."""

    def __init__(self, at: int, points: str) -> None:
        self.at, self.points, self.count, self.where = at, points, 0, ""
        self.seen: list[str] = []  # where each point is, if at = -1
        self._event = "line" if points == "lines" else "opcode"

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        # What __del__ raises goes to nobody, whoever wrote it.
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = self.points != "lines"
        return self._local

    def _local(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == self._event and frame.f_lasti in points_of(frame.f_code, self.points):
            if self.count == self.at:
                self.count += 1
                self.where = where_of(frame)
                raise KeyboardInterrupt
            if self.at < 0:
                self.seen.append(where_of(frame))
            self.count += 1
        return self._local


def where_of(frame: FrameType) -> str:
    """The line, and the lines that called it, innermost first, as far as they are the package's."""
    places = []
    each: FrameType | None = frame
    while each is not None and each.f_code.co_filename.startswith(PACKAGE):
        places.append(f"{each.f_code.co_filename[len(PACKAGE) :]}:{each.f_lineno}")
        each = each.f_back
    return " < ".join(places)


def interrupted(act: Callable[[], Any], at: int, points: str) -> tuple[Interrupt, Any, BaseException | None]:
    """(the interrupt, what the call returned, what it raised)."""
    interrupt, result, error = Interrupt(at, points), None, None
    sys.settrace(interrupt)
    try:
        result = act()
    except (KeyboardInterrupt, Error) as raised:
        error = raised
    finally:
        sys.settrace(None)
    if error is not None:
        _forget_frames(error)
    return interrupt, result, error


def _forget_frames(error: BaseException | None) -> None:
    while error is not None:  # frames keep alive what the call had begun
        error.__traceback__ = None
        error = error.__context__


# -- the world ---------------------------------------------------------------------------------------------------------


class Allocator(External):
    """Not subscribed by itself: that is a call under test, too."""

    def __init__(self, engine: Engine) -> None:
        self.tenant, self.prompt = engine.tenant, True
        self.calls, self.free, self.used, self.leaving = [], set(), {}, set()
        engine.external = self

    def give_back(self) -> None:
        if self.leaving - set(self.used):
            super().give_back()


class World(Shared):
    """Tenants "a" and "b", six layers of two pages and five of two, and some free pages."""

    def __init__(self, mode: str, spare: int = 4, **config: Any) -> None:
        self.mode = mode
        knobs = remap.advanced.Knobs(**{**EAGER, "reversion": False, **config})
        sizes = {"a": [2] * 6, "b": [2] * 5}
        super().__init__(sizes, spare=spare, mode=mode, config=knobs, around=_core.make_fault_backend, page_bytes=PAGE)
        for engine in self.engines.values():
            set_times(engine, times_of(engine.tenant.layers, 1.0, 0.1), copy_s=0.1)
            engine.serve()

    @property
    def a(self) -> Engine:
        return self.engines["a"]

    @property
    def b(self) -> Engine:
        return self.engines["b"]

    def attach(self, name: str, layers: int = 3, pages: int = 1, tag: int = 3, **options: Any) -> None:
        options = {"kv": spec(layers, PAGE), **options}
        engine = self.engines[name] = Engine(self.session, name, [pages] * layers, tag, page_bytes=PAGE, **options)
        set_times(engine, times_of(layers, 1.0, 0.1), copy_s=0.1)

    def step(self, **demand: int) -> Any:
        free = {name: len(e.external.free) for name, e in self.engines.items() if e.external is not None}
        return self.tell(self.session.step({name: remap.Demand(n, free=free.get(name)) for name, n in demand.items()}))

    def activate(self, name: str, **options: Any) -> Any:
        return self.tell(self.session.activate(name, **options))

    def seen(self) -> dict[str, Any]:
        """What a caller sees, and what a call may change only as a whole. No epoch: nobody computes with it."""
        snapshot = self.session.snapshot()
        return {
            name: {
                "streamed": each.streamed,
                "buffers": each.buffers,
                "pages": str(each.pages),
                "lent": (each.lent_pages, dict(each.lent_to), each.borrowed_pages),
                "blocks": (each.usable_blocks, each.free_blocks, each.live_blocks, each.withdrawn_blocks),
                "active": each.active,
                "pinned": each.pinned,
            }
            for name, each in snapshot.tenants.items()
        } | {"free": snapshot.pages.free, "unsettled": remap.advanced.unsettled(self.session)}

    def use(self) -> None:
        """All free blocks are written and read, so that a layer which still shows them reads wrong; then passes."""
        for engine in self.engines.values():
            engine.poison()
        for engine in self.engines.values():
            # Taking it out may have been tried: it serves no more then (Session.detach).
            if engine.tenant.active and not engine.tenant._state.leaving:
                engine.serve()
        self.check(serve=False)

    def everything_else(self) -> None:
        """All other calls, once each: they work, whatever came before."""
        session = self.session
        remap.advanced.settle(session)
        for engine in self.engines.values():
            if engine.external is not None:
                engine.external.used.clear()
                engine.external.free |= set(engine.kv.pool.open_ids())
                engine.external.give_back()
            else:
                engine.free()
        for name in self.engines:
            report = self.activate(name)
            if not report.activated and any(e.external for e in self.engines.values()):
                remap.advanced.remap(self.session, name, 0)
                report = self.activate(name)
            assert report.activated, report
            self.use()
        for name in self.engines:
            self.remap(name, 0)
            seen = session.snapshot().tenants[name]
            assert not seen.streamed and not seen.lent_pages, seen
        self.use()
        if "a" in self.engines and "b" in self.engines:
            own = self.a.external is None
            self.remap("a", 2, 1, "uniform")
            self.lend("b", 2, to="a")
            assert (self.a.tenant.remapped, self.b.tenant.remapped) == (2, 2)
            if own:
                self.a.hold(3)
            self.use()
            self.lend("b", 0)
            assert self.b.tenant.lent_pages == 0
            self.use()
            if own:
                self.step(a=self.a.kv.free_blocks + 1)
                self.use()
                self.a.free()
            self.step()
            self.remap("a", 0)
        self.detach(sorted(self.engines)[-1])
        self.attach("later", 2, 1, 5)
        self.use()

    def close(self) -> None:
        self.session.close()
        usage = self.backend.usage()
        assert set(usage.values()) == {0}, f"kept: { ({name: held for name, held in usage.items() if held}) }"


# -- the calls ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """call: one public call; what it returns tells what moved. plans: it makes several plans one after the other, and
    an interrupt may leave the state after any of them. again(world): the same call once more (by default `call`).
    effect(world): that it has had its effect then (by default what is seen is what an uninterrupted call leaves)."""

    name: str
    prepare: Callable[[World], Any]
    call: Callable[[World], Any]
    plans: bool = False
    again: Callable[[World], Any] | None = None
    effect: Callable[[World], bool] | None = None
    world: dict[str, Any] = field(default_factory=dict)


@dataclass
class Quiet:
    """Prepares by `prepare`, then as many quiet steps as leave the next one to do it. Looked for once a mode."""

    ready: Callable[[World], Any]
    happened: Callable[[World], bool]
    options: dict[str, Any] = field(default_factory=dict)
    demand: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def __call__(self, world: World) -> None:
        if world.mode not in self.steps:
            twin = World(world.mode, **self.options)
            self.ready(twin)
            for count in range(60):
                twin.step(**self.demand)
                if self.happened(twin):
                    self.steps[world.mode] = count
                    break
            else:
                raise AssertionError("quiet steps do not lead there")
            twin.close()
        self.ready(world)
        for _ in range(self.steps[world.mode]):
            world.step(**self.demand)


def lent_to_a(world: World, layers: int = 2, hold: int = 0) -> None:
    world.session.deactivate("b")
    world.lend("b", layers, to="a")
    if hold:
        world.a.hold(hold)


def unsettled(world: World) -> None:
    """A change whose settling has failed once."""
    remap.advanced.settle(world.session)
    world.backend.arm(_core.Call.create_event if world.mode == "strict" else _core.Call.exchange, 1)
    with contextlib.suppress(Error):
        world.remap("a", 2)
    world.session._executor.drain()
    world.backend.disarm()


def dirty(world: World) -> None:
    """All free pages have been another tenant's KV."""
    world.attach("old", 2, 1, 7, kv=spec(2, PAGE, min_blocks=1, max_blocks=40))
    world.step(old=8)
    world.engines["old"].fill()
    world.detach("old")


def external(world: World, name: str = "a") -> Allocator:
    made = Allocator(world.engines[name])
    made.tenant.kv.subscribe(made, external=True)
    return made


def detach(name: str) -> Callable[[World], Any]:
    def act(world: World) -> None:
        world.session.detach(name)
        world.engines.pop(name, None)

    return act


def detach_again(name: str) -> Callable[[World], Any]:
    def act(world: World) -> None:
        if name in world.session._tenants:
            world.session.detach(name)
        else:
            with contextlib.suppress(InvalidArgument):
                world.session.detach(name)
                raise AssertionError("a tenant that is gone was detached")
        world.engines.pop(name, None)

    return act


def attach_again(name: str, **options: Any) -> Callable[[World], Any]:
    """After an interrupt the caller has no tenant: either the name is free, or detaching makes it so."""

    def act(world: World) -> None:
        if name in world.session._tenants:
            world.session.detach(name)
        world.attach(name, **options)

    return act


def too_large(world: World) -> None:
    try:
        world.session.attach_bytes(make_layers([9] * 9, 9, PAGE), name="c", kv=spec(9, PAGE))
    except remap.OutOfMemory:
        return
    raise AssertionError("it fits?")


def allocate(world: World) -> None:
    world.a.held.update(dict.fromkeys(world.a.kv.allocate(3), TAG))


def allocated(world: World) -> None:
    """Writes what was allocated. If the caller never saw the ids, it finds them in the pool."""
    for block in set(world.a.kv.pool.live_ids()).difference(world.a.held):
        world.a.held[block] = TAG
    for block, value in world.a.held.items():
        if value == TAG:
            write_block(world.a.tenant, block, TAG)


def free(world: World) -> None:
    world.a.kv.free(sorted(world.a.held)[:3])


def freed(world: World) -> None:
    live = set(world.a.kv.pool.live_ids())
    world.a.held = {block: value for block, value in world.a.held.items() if block in live}


def begin_return(world: World) -> None:
    """An external engine with blocks in what is to go, all of them done with by now."""
    world.remap("a", 3)
    made = external(world)
    made.use(sorted(made.free)[-3:])
    world.remap("a", 0, drain=True)
    made.used.clear()


def give_back(world: World) -> None:
    made = world.a.external
    assert made is not None
    back = sorted(made.leaving)
    world.a.kv.returned(back)
    made.leaving -= set(back)


def returned_again(world: World) -> None:
    made = world.a.external
    assert made is not None
    pool = world.a.kv.pool
    made.leaving = set(pool.live_ids()) - set(pool.open_ids())
    if made.leaving:
        give_back(world)


def subscribe(world: World) -> None:
    made = world.a.external or Allocator(world.a)
    world.a.kv.subscribe(made, external=True)


def subscribe_again(world: World) -> None:
    if not world.a.kv.pool.external:
        subscribe(world)


def one_pass(name: str) -> Callable[[World], Any]:
    return lambda world: world.engines[name].serve()


def address_of(world: World) -> tuple[int, int]:
    return remap.advanced.layer_address(world.session, "a", 1), 100


def nothing(world: World) -> None:
    pass


def enough(name: str, blocks: int) -> Callable[[World], bool]:
    return lambda world: world.engines[name].kv.free_blocks >= blocks


def top(world: World, layers: int, hold: int, kind: str = "nested", buffers: int = 1) -> None:
    world.remap("a", layers, buffers, kind)
    world.a.hold(hold)


NO_SPARE: dict[str, Any] = {"spare": 0}
HOMEWARDS: dict[str, Any] = {"spare": 0, "reversion": True}

CASES: dict[str, list[Case]] = {
    "step": [
        Case("nothing", nothing, lambda w: w.step(a=1), effect=enough("a", 1)),
        Case("free pages", nothing, lambda w: w.step(a=4), effect=enough("a", 4)),
        Case("own layers", nothing, lambda w: w.step(a=5), True, effect=enough("a", 5), world=NO_SPARE),
        Case(
            "own layers come home",
            Quiet(lambda w: w.remap("a", 3), lambda w: w.a.tenant.remapped < 3, HOMEWARDS, {"a": 0}),
            lambda w: w.step(a=0), effect=lambda w: w.a.tenant.remapped < 3, world=HOMEWARDS,
        ),
        Case(
            "own layers come home with moves",
            Quiet(lambda w: top(w, 3, 2), lambda w: w.a.tenant.remapped < 3, HOMEWARDS, {"a": 0}),
            lambda w: w.step(a=0), effect=lambda w: w.a.tenant.remapped < 3, world=HOMEWARDS,
        ),
        Case("an idle tenant lends", lambda w: w.session.deactivate("b"), lambda w: w.step(a=6), True,
             effect=enough("a", 6), world=NO_SPARE),
        Case("two demands", nothing, lambda w: w.step(a=4, b=4), True, effect=enough("b", 4), world=NO_SPARE),
        Case("unused KV of another", lambda w: (w.step(b=8), w.step(b=0), w.session.deactivate("b")),
             lambda w: w.step(a=4), True, effect=enough("a", 4)),
        Case(
            "lent layers come home",
            Quiet(lambda w: lent_to_a(w, 2), lambda w: w.b.tenant.remapped < 2, HOMEWARDS, {"a": 0}),
            lambda w: w.step(a=0), True, effect=lambda w: w.b.tenant.remapped < 2, world=HOMEWARDS,
        ),
        Case(
            "lent layers come home with moves",
            Quiet(lambda w: lent_to_a(w, 2, 1), lambda w: w.b.tenant.remapped < 2, HOMEWARDS, {"a": 0}),
            lambda w: w.step(a=0), True, effect=lambda w: w.b.tenant.remapped < 2, world=HOMEWARDS,
        ),
        Case("uniform", lambda w: top(w, 1, 2, "uniform"), lambda w: w.step(a=6), True, effect=enough("a", 6),
             world={"spare": 0, "selection": "uniform"}),
        Case("slices", nothing, lambda w: w.step(a=4), True, effect=enough("a", 4),
             world={"spare": 0, "selection": "slices"}),
    ],
    "remap": [
        Case("up", nothing, lambda w: w.remap("a", 2)),
        Case("further up", lambda w: w.remap("a", 1), lambda w: w.remap("a", 3)),
        Case("down", lambda w: w.remap("a", 3), lambda w: w.remap("a", 1)),
        Case("to nothing", lambda w: w.remap("a", 3, 2), lambda w: w.remap("a", 0)),
        Case("down with moves", lambda w: top(w, 4, 3), lambda w: w.remap("a", 1)),
        Case("uniform to uniform", lambda w: w.remap("a", 1, 1, "uniform"), lambda w: w.remap("a", 2, 1, "uniform")),
        Case("uniform to uniform with moves", lambda w: (w.remap("a", 1, 1, "uniform"), w.a.fill()),
             lambda w: w.remap("a", 2, 1, "uniform"), True, world=NO_SPARE),
        Case("one buffer to two", lambda w: w.remap("a", 2, 1), lambda w: w.remap("a", 2, 2)),
        Case("two buffers to one", lambda w: w.remap("a", 2, 2), lambda w: w.remap("a", 2, 1)),
        Case("slices up", nothing, lambda w: w.remap("a", 2, 1, "slices")),
        Case("slices down with moves", lambda w: top(w, 2, 2, "slices"), lambda w: w.remap("a", 0, 1, "slices")),
        Case("refused", lambda w: (w.remap("a", 3), w.a.fill()), lambda w: refused(w)),
        Case("while another is unsettled", unsettled, lambda w: w.remap("b", 2)),
    ],
    "lend": [
        Case("free", nothing, lambda w: w.lend("b", 2)),
        Case("to another", nothing, lambda w: w.lend("b", 2, to="a"), True),
        Case("more to another", lambda w: w.lend("b", 1, to="a"), lambda w: w.lend("b", 3, to="a"), True),
        Case("an inactive one's", lambda w: w.session.deactivate("b"), lambda w: w.lend("b", 2, to="a"), True),
        Case("home", lambda w: w.lend("b", 2, to="a"), lambda w: w.lend("b", 0), True),
        Case("home from free", lambda w: w.lend("b", 2), lambda w: w.lend("b", 0), True),
        Case("home with moves", lambda w: lent_to_a(w, 2, 2), lambda w: w.lend("b", 0), True),
        Case("partly home", lambda w: lent_to_a(w, 3, 1), lambda w: w.lend("b", 1), True),
    ],
    "activate": [
        Case("nothing was lent", lambda w: w.session.deactivate("b"), lambda w: w.activate("b")),
        Case("alone", lambda w: w.session.deactivate("b"), lambda w: w.activate("b", alone=True), True),
        Case("lent to nobody", lambda w: (w.session.deactivate("b"), w.lend("b", 2)), lambda w: w.activate("b"), True),
        Case("lent", lent_to_a, lambda w: w.activate("b"), True),
        Case("lent, with moves", lambda w: lent_to_a(w, 2, 2), lambda w: w.activate("b"), True),
        Case("lent, alone", lent_to_a, lambda w: w.activate("b", alone=True), True),
        Case("refused", lambda w: (lent_to_a(w, 3), w.a.fill()), lambda w: w.activate("b"),
             world=NO_SPARE),
        Case("partial", lambda w: (lent_to_a(w, 3), w.a.allocate(w.a.kv.free_blocks - 3)),
             lambda w: w.activate("b", partial=True), True, world=NO_SPARE),
        Case("partial, nothing comes home", lambda w: (lent_to_a(w, 3), w.a.fill()),
             lambda w: w.activate("b", partial=True), True, world=NO_SPARE),
    ],
    "deactivate": [
        Case("plain", nothing, lambda w: w.session.deactivate("a")),
        Case("streaming", lambda w: w.remap("a", 2), lambda w: w.session.deactivate("a")),
        Case("draining", lambda w: draining(w), lambda w: w.session.deactivate("a")),
    ],
    "settle": [
        Case("nothing", nothing, lambda w: remap.advanced.settle(w.session)),
        Case("a fresh change", lambda w: w.remap("a", 2), lambda w: remap.advanced.settle(w.session)),
        Case(
            "a failed one",
            unsettled,
            lambda w: remap.advanced.settle(w.session),
            effect=lambda w: not remap.advanced.unsettled(w.session),
        ),
    ],
    "forward": [
        Case("resident", nothing, one_pass("a")),
        Case("streaming", lambda w: w.remap("a", 2), one_pass("a")),
        Case("streaming, later", lambda w: (w.remap("a", 2), w.a.serve(), w.a.serve()), one_pass("a")),
        Case("loading", lambda w: (w.remap("a", 3), w.a.serve(), w.remap("a", 0)), one_pass("a")),
        Case("unsettled", unsettled, one_pass("a"), plans=True),
    ],
    "attach": [
        Case("fits", nothing, lambda w: w.attach("c", 2, 1), again=attach_again("c", layers=2, pages=1)),
        Case("with zeroing", dirty, lambda w: w.attach("c", 2, 1), again=attach_again("c", layers=2, pages=1)),
        Case("beside lent pages", lambda w: (w.session.deactivate("b"), w.lend("b", 1)), lambda w: w.attach("c", 2, 1),
             again=attach_again("c", layers=2, pages=1)),
        Case("inactive, in slices", nothing,
             lambda w: w.attach("c", 2, 1, active=False, config=remap.advanced.Knobs(selection="slices")),
             again=attach_again("c", layers=2, pages=1, active=False,
                                config=remap.advanced.Knobs(selection="slices"))),
        Case("refused", nothing, too_large),
    ],
    "detach": [
        Case("resident", nothing, detach("b"), again=detach_again("b")),
        Case("streaming", lambda w: (w.remap("b", 2), w.b.serve()), detach("b"), again=detach_again("b")),
        Case("holding what is lent", lent_to_a, detach("a"), again=detach_again("a")),
        Case("having lent", lent_to_a, detach("b"), again=detach_again("b")),
        Case("unsettled", unsettled, detach("a"), again=detach_again("a")),
    ],
    "look": [
        Case("snapshot", lent_to_a, lambda w: w.session.snapshot() and None),
        Case("check", lent_to_a, lambda w: remap.advanced.check(w.session)),
        Case("layer_address", nothing, lambda w: remap.advanced.layer_address(w.session, "a", 1) and None),
    ],
    "registered": [
        Case("declare", nothing, lambda w: remap.advanced.declare_registered(w.session, *address_of(w)),
             again=lambda w: declare_again(w)),
        Case("withdraw", lambda w: remap.advanced.declare_registered(w.session, *address_of(w)),
             lambda w: remap.advanced.withdraw_registered(w.session, *address_of(w)), again=lambda w: withdraw_again(w)),
    ],
    "close": [
        Case("resident", nothing, lambda w: w.session.close()),
        Case("streaming and lent", lambda w: (lent_to_a(w), w.remap("a", 2), w.a.serve()), lambda w: w.session.close()),
        Case("unsettled", unsettled, lambda w: w.session.close()),
    ],
    "kv": [
        Case("allocate", lambda w: (w.step(a=5), w.a.allocate(1)), allocate, again=nothing),
        Case("free", lambda w: (w.step(a=8), w.a.allocate(6)), free, again=nothing),
        Case("subscribe", lambda w: w.step(a=4), subscribe, again=subscribe_again),
        Case("returned", begin_return, give_back, again=returned_again),
    ],
    "external": [
        Case("takes free pages", external, lambda w: w.step(a=8), effect=lambda w: len(w.a.external.free) >= 6, plans=True),
        Case("takes layers", external, lambda w: w.step(a=8), True, effect=lambda w: len(w.a.external.free) >= 4,
             world=NO_SPARE),
        Case("an idle one's layers", lambda w: (external(w), w.session.deactivate("b")), lambda w: w.step(a=12), True,
             effect=lambda w: len(w.a.external.free) >= 6, world=NO_SPARE),
        Case("gives layers back", lambda w: (w.remap("a", 3), external(w)), lambda w: w.remap("a", 1)),
        Case("has to drain", lambda w: (w.remap("a", 3), use_top(external(w), 2)),
             lambda w: w.remap("a", 0, drain=True)),
        Case("refuses", lambda w: (w.remap("a", 3), use_top(external(w), 2)), lambda w: refused(w)),
        Case("what was lent to it comes home", lambda w: (lent_to_a(w), external(w)), lambda w: w.activate("b"), True),
        Case("what was lent to it stays", lambda w: (lent_to_a(w), use_top(external(w), 2)), lambda w: w.activate("b")),
        Case("its unused KV", lambda w: (w.step(b=8), w.step(b=0), external(w, "b"), w.session.deactivate("b")),
             lambda w: w.step(a=4), True, effect=enough("a", 3)),
        Case("drained", lambda w: drained(w), lambda w: w.step(a=0), effect=lambda w: w.a.tenant.remapped == 0,
             world={"reversion": True}),
    ],
}  # fmt: skip


def refused(world: World) -> None:
    try:
        world.remap("a", 0)
    except OutOfBlocks:
        return
    raise AssertionError("there is room?")


def use_top(made: Allocator, count: int) -> None:
    made.use(sorted(made.free)[-count:])


def draining(world: World) -> None:
    world.remap("a", 3)
    use_top(external(world), 2)
    world.remap("a", 0, drain=True)


def drained(world: World) -> None:
    draining(world)
    made = world.a.external
    assert made is not None
    made.used.clear()
    made.give_back()


def declare_again(world: World) -> None:
    if not world.session._arena.registered():
        remap.advanced.declare_registered(world.session, *address_of(world))


def withdraw_again(world: World) -> None:
    if world.session._arena.registered():
        remap.advanced.withdraw_registered(world.session, *address_of(world))


# -- one run -----------------------------------------------------------------------------------------------------------


def within(seconds: float, act: Callable[[], None]) -> str:
    """Runs it in a thread of its own. What went wrong, or ""."""
    problem = [""]

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001  whatever it is, it is the finding
            place = traceback.extract_tb(error.__traceback__)
            ours = [f"{Path(each.filename).name}:{each.lineno}" for each in place][-4:]
            problem[0] = f"{type(error).__name__}: {str(error)[:300]} [{' > '.join(ours)}]"
            _forget_frames(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        stack = traceback.extract_stack(frame)[-4:] if frame else []
        return f"deadlock in {' > '.join(f'{Path(each.filename).name}:{each.lineno}' for each in stack)}"
    return problem[0]


@dataclass
class Reference:
    """What an uninterrupted run shows."""

    before: dict[str, Any]
    after: dict[str, Any] | None  # None: the session is closed
    points: list[str]  # where each point is

    def distinct(self) -> list[int]:
        """The first and the last point of each place: loops over layers and pages come to one very often. What happens
        inside of pure mathematics is one place with the line that asked for it."""
        places = [where[len(PURE.match(where)[0]) :] for where in self.points]  # type: ignore[index]
        first = {place: at for at, place in reversed(list(enumerate(places)))}
        last = {place: at for at, place in enumerate(places)}
        return sorted({*first.values(), *last.values()})


def reference(case: Case, mode: str, points: str) -> Reference:
    world = World(mode, **case.world)
    case.prepare(world)
    before = world.seen()
    interrupt, _, error = interrupted(lambda: case.call(world), -1, points)
    if error is not None:
        raise AssertionError(f"{case.name}: the call itself raises {error!r}")
    after = None if world.session.closed else world.seen()
    problem = within(PATIENCE_S, lambda: afterwards(case, world, after, after))
    if problem:
        raise AssertionError(f"{case.name}, not interrupted at all: {problem}")
    return Reference(before, after, interrupt.seen)


def afterwards(case: Case, world: World, after: dict[str, Any] | None, seen: dict[str, Any] | None) -> None:
    """Carry on: whatever there is to do with the session, with every byte looked at."""
    session = world.session
    if after is None:
        session.close()
        world.close()
        return
    remap.advanced.check(session)
    if case.name in ("allocate", "free"):
        (allocated if case.name == "allocate" else freed)(world)
    for name in set(world.engines).difference(session._tenants):
        del world.engines[name]
    if case.again is returned_again:
        made = world.a.external
        assert made is not None
        made.leaving = set(world.a.kv.pool.live_ids()) - set(world.a.kv.pool.open_ids())
    strangers = set(session._tenants).difference(world.engines)
    if not strangers:
        world.tell(session.step())
        world.check(serve=False)
        world.use()
    (case.again or case.call)(world)
    now = world.seen()
    if case.effect is not None:
        assert case.effect(world), f"made again, the call has not its effect: {now}"
    elif case.again is None and case.name != "refused":
        assert _settled(now) == _settled(after), f"made again, the call leaves {_difference(after, now)}"
    world.use()
    world.everything_else()
    world.close()


def _settled(seen: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in seen.items() if name != "unsettled"}


def _difference(expected: dict[str, Any], got: dict[str, Any]) -> str:
    found = []
    for name in sorted({*expected, *got}):
        one, other = expected.get(name), got.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found += [f"{name}.{key}: {one[key]} -> {other[key]}" for key in one if one[key] != other[key]]
        elif one != other:
            found.append(f"{name}: {one} -> {other}")
    return "; ".join(found)


class Finding(NamedTuple):
    """What broke. kind: "wrong" (a failure), "swallowed", or "between" (neither before nor after, of several plans). place: the
    situation and the line that was interrupted."""

    kind: str
    place: str
    what: str


def try_at(case: Case, mode: str, points: str, at: int, known: Reference) -> list[Finding]:
    """What broke."""
    world = World(mode, **case.world)
    case.prepare(world)
    interrupt, _, error = interrupted(lambda: case.call(world), at, points)
    if not interrupt.where:  # the core's threads were faster this time, and the call had fewer points
        world.close()
        return []
    say(f"# {case.name}, {mode}, {points} {at}: {interrupt.where}")
    found: list[Finding] = []

    def note(kind: str, what: str) -> None:
        what = f"{case.name}, {mode}, {points} {at}: interrupted at {interrupt.where}: {what}"
        found.append(Finding(kind, f"{case.name}: {interrupt.where.split(' < ')[0]}", what))

    if error is None:
        note("swallowed", "the interrupt was swallowed")
    seen: list[dict[str, Any] | None] = [None]

    def look() -> None:
        try:
            seen[0] = None if world.session.closed else world.seen()
        except Error:
            if known.after is not None:
                raise  # closing may have begun: then it is refused, or it is seen

    problem = within(PATIENCE_S, look)
    if problem:
        note("wrong", f"looking: {problem}")
        if problem.startswith("deadlock"):
            return found
    elif known.after is not None and _settled(seen[0] or {}) not in (_settled(known.before), _settled(known.after)):
        to_before, to_after = _difference(known.before, seen[0] or {}), _difference(known.after, seen[0] or {})
        note("between" if case.plans else "wrong", f"neither before ({to_before}) nor after ({to_after})")
    problem = within(PATIENCE_S, lambda: afterwards(case, world, known.after, seen[0]))
    if problem:
        note("wrong", f"afterwards: {problem}")
        with contextlib.suppress(BaseException):
            if not problem.startswith("deadlock"):
                world.session.close()
    return found


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(call: str, mode: str, points: str, budget: int) -> None:
    faulthandler.enable()
    gc.disable()
    for case in CASES[call]:
        known = reference(case, mode, points)
        chosen = known.distinct()
        if budget and len(chosen) > budget:
            chosen = sorted(random.Random(f"{case.name}{mode}").sample(chosen, budget))
        for number, at in enumerate(chosen):
            for each in try_at(case, mode, points, at, known):
                say(f"! {json.dumps(each)}")
            if number % 50 == 49:
                gc.collect()
    sys.stdout.flush()
    os._exit(0)  # threads that hang are among the findings


def sweep(call: str, mode: str, points: str, budget: int) -> tuple[list[Finding], int]:
    """(what broke, how many interrupts were tried) of all one call's situations, in a process of their own."""
    program = f"import interrupts; interrupts.main({call!r}, {mode!r}, {points!r}, {budget})"
    done = subprocesses.run(program, timeout_s=3600.0)
    lines = done.stdout.splitlines()
    findings = [Finding(*json.loads(line[2:])) for line in lines if line.startswith("! ")]
    tried = [line for line in lines if line.startswith("# ")]
    if done.returncode != 0:
        findings.append(Finding("wrong", "", f"exit code {done.returncode} behind {tried[-1:]}: {done.stderr[-2000:]}"))
    return findings, len(tried)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
