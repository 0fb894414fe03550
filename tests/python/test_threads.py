"""Engines on threads of their own with one session, and a manager who changes everything: no byte is ever wrong.

Two ways of using the library:

    "tables"   Engines hold blocks between passes. Whoever makes a call that may move blocks does so under one lock of
               the application's and patches all engines' tables before he lets go of it; an engine in its pass, where
               nothing of it can move, takes that lock to read its table. Passes are begun and ended, blocks allocated,
               and freed inside of a pass, without it.
    "bare"     Nobody locks anything: an engine's blocks live inside of one pass.

A call may be refused with InvalidState (field tenant: inside a pass, inactive), and, by hand, for want of blocks or
pages. Each run is a process of its own, which a crash ends and a time limit a hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from arena_worlds import forward, make_backend, read_block, session_on, set_times, times_of, write_block
from sharing_worlds import EAGER, Engine
from subprocesses import expect_ok

import remap
from remap.errors import InvalidArgument, InvalidState, OutOfBlocks, OutOfMemory

PAGE = 4096
SIZES: dict[str, list[int]] = {"a": [2] * 6, "b": [2] * 5, "c": [1] * 4}
SHARE = 60  # byte values of each tenant's blocks: it has no others
TURNS = 200
LIMIT_S = 120.0
FUZZ = bool(os.environ.get("REMAP_FUZZ"))


def own_bytes(tag: int) -> range:
    return range(1 + tag * SHARE, 1 + (tag + 1) * SHARE)


def attach(session: remap.Session, name: str, sizes: list[int], tag: int) -> Engine:
    """A tenant whose layers consist of bytes of its own."""
    own = own_bytes(tag)
    data = [
        bytes(own[(7 * layer + at // 64) % SHARE] for at in range(pages * PAGE - 100))
        for layer, pages in enumerate(sizes)
    ]
    engine = Engine(session, name, sizes, tag, page_bytes=PAGE, data=data)
    set_times(engine.tenant, times_of(len(sizes), 1.0, 0.1), copy_s=0.1)
    return engine


class Refused(Exception):
    """A call was refused, as it may be."""


def may_be_refused(call: Callable[[], Any], *for_want_of: type[remap.Error]) -> Any:
    """What it returns. Raises Refused where others use what it needs."""
    try:
        return call()
    except (InvalidState, *for_want_of) as error:
        if isinstance(error, InvalidState) and "tenant" not in error.fields:
            raise
        raise Refused from error


class Actor:
    """An engine on its thread. Its blocks (`held`) that it has not written yet have the value 0."""

    def __init__(self, world: World, engine: Engine, tag: int) -> None:
        self.world, self.engine, self.tag, self.name = world, engine, tag, engine.name
        self.tenant, self.kv = engine.tenant, engine.kv
        self.rng = random.Random(f"{world.seed}{engine.name}")
        self._next = 0

    def turn(self) -> None:
        acts = [self.step, self.step, self.serve, self.serve, self.serve]
        acts += [self.allocate, self.allocate, self.free] if self.world.tables else [self.touch]
        for act in self.rng.sample(acts, len(acts)):
            with contextlib.suppress(Refused):
                act()

    def step(self) -> None:
        blocks = self.rng.choice([0, 0, 2, 5, 12])
        self.world.moving(lambda: self.world.session.step({self.name: remap.Demand(blocks)}))

    def allocate(self) -> None:
        count = self.rng.randint(1, 4)
        may_be_refused(lambda: self.kv.allocate(count), OutOfBlocks)
        self.reconcile(new=count)

    def free(self) -> None:
        # Under the lock: a block that moves between a look at its number and its freeing would be another's by then.
        with self.world.lock:
            blocks = self.rng.sample(sorted(self.engine.held), min(len(self.engine.held), self.rng.randint(1, 4)))
            self.engine.free(blocks)
            self.reconcile()

    def reconcile(self, new: int = 0) -> None:
        """The table is that of the pool. Nobody else allocates or frees these blocks; under the lock nothing moves."""
        with self.world.lock:
            live, known = set(self.kv.pool.live_ids()), set(self.engine.held)
            assert known <= live and len(live - known) == new, f"{self.name}: {live} are live, not {known} and {new}"
            self.engine.held.update(dict.fromkeys(live - known, 0))

    def touch(self) -> None:
        """Allocates outside of a pass; others may move these blocks until they are free again."""
        may_be_refused(lambda: self.kv.allocate(self.rng.randint(1, 4)), OutOfBlocks)
        while live := self.kv.pool.live_ids():
            try:
                self.kv.free(live)
            except InvalidArgument as error:
                if "block" not in error.fields:
                    raise

    def serve(self) -> None:
        tenant, held = self.tenant, self.engine.held
        with contextlib.ExitStack() as stack:
            may_be_refused(lambda: stack.enter_context(tenant.forward()))
            if self.world.tables:
                with self.world.lock:  # who has moved something lets go when the tables are patched
                    table = dict(held)
            else:
                table = dict.fromkeys(self.kv.allocate(min(self.kv.free_blocks, self.rng.randint(0, 5))), 0)
            for block, value in table.items():
                table[block] = value or self.write(block)
            for layer, expected in enumerate(self.engine.data):
                tenant.wait(layer)
                address = remap.advanced.layer_address(self.world.session, self.name, layer)
                got = ctypes.string_at(address, len(expected))
                tenant.done(layer)
                assert got == expected, f"layer {layer} of {self.name} is wrong: {set(got)}"
            for block, value in table.items():
                assert read_block(tenant, block) == {value}, f"block {block} of {self.name} does not hold {value}"
            if not self.world.tables:
                self.kv.free(list(table))
                return
            with self.world.lock:
                assert all(block in held for block in table), f"blocks of {self.name} moved inside of its pass"
                held.update(table)
            gone = self.rng.sample(sorted(table), min(len(table), self.rng.randint(0, 2)))
            self.kv.free(gone)
            with self.world.lock:
                for block in gone:
                    del held[block]

    def write(self, block: int) -> int:
        self._next += 1
        value = own_bytes(self.tag)[self._next % SHARE]
        others = read_block(self.tenant, block) - {0, *own_bytes(self.tag)}
        assert not others, f"block {block}, new to {self.name}, shows bytes {others}"
        write_block(self.tenant, block, value)
        return value


class Manager:
    name = "manager"

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, random.Random(f"{world.seed}manager")

    def turn(self) -> None:
        world, rng, session = self.world, self.rng, self.world.session
        name, other = rng.sample(sorted(SIZES), 2)
        layers = rng.randint(0, len(SIZES[name]) - 2)
        calls: list[Callable[[], Any]] = [
            lambda: session.activate(name, alone=rng.random() < 0.2, partial=rng.random() < 0.5),
            lambda: session.activate(name, partial=True),
            lambda: session.deactivate(name),
            lambda: remap.advanced.lend(session, name, layers, to=rng.choice([None, other])),
            lambda: remap.advanced.remap(session, name, layers, rng.choice([1, 2]), rng.choice(["uniform", "nested"])),
            partial(remap.advanced.settle, session),
            session.snapshot,
            self.guest,
        ]
        with contextlib.suppress(Refused):
            world.moving(rng.choice(calls), OutOfBlocks, OutOfMemory)

    def guest(self) -> None:
        """A fourth tenant comes, serves, and goes."""
        guest = attach(self.world.session, "guest", [1, 1], 3)
        try:
            for block in guest.kv.allocate(2):
                assert read_block(guest.tenant, block) == {0}, f"block {block} of a new tenant is not empty"
            forward(self.world.session, guest.tenant, guest.data)
        finally:
            self.world.session.detach("guest")


class World:
    def __init__(self, mode: str, seed: int, tables: bool) -> None:
        self.seed, self.tables = seed, tables
        self.lock = threading.RLock()  # the application's
        capacity = (sum(map(sum, SIZES.values())) + 6 + 5) * PAGE
        self.backend = make_backend(capacity, PAGE)
        self.session = session_on(self.backend, capacity, PAGE, mode, remap.advanced.Knobs(**EAGER))
        self.engines = {name: attach(self.session, name, sizes, tag) for tag, (name, sizes) in enumerate(SIZES.items())}
        self.problems: list[str] = []

    def moving(self, call: Callable[[], Any], *for_want_of: type[remap.Error]) -> None:
        """A call that may move anybody's blocks."""
        with self.lock if self.tables else contextlib.nullcontext():
            report = may_be_refused(call, *for_want_of)
            for name, moved in (getattr(report, "moved", None) or {}).items() if self.tables else ():
                self.engines[name].patch(moved)

    def live(self, actor: Any, start: threading.Barrier, turns: int) -> None:
        start.wait()
        try:
            for _ in range(turns):
                actor.turn()
                if self.problems:
                    return
        except BaseException:  # noqa: BLE001  whatever it is, it is the finding
            self.problems.append(f"{actor.name}: {traceback.format_exc()}")

    def run(self, turns: int) -> None:
        """Raises AssertionError with all that went wrong on any thread."""
        actors = [*(Actor(self, engine, tag) for tag, engine in enumerate(self.engines.values())), Manager(self)]
        start = threading.Barrier(len(actors))
        threads = [threading.Thread(target=self.live, args=(actor, start, turns)) for actor in actors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self.problems, "\n".join(self.problems)
        remap.advanced.check(self.session)
        pages = self.session.snapshot().pages
        assert pages.free + pages.params + pages.kv + pages.ring == pages.total
        for engine in self.engines.values():
            if self.tables:
                assert set(engine.held) == set(engine.kv.pool.live_ids())
            engine.kv.free(engine.kv.pool.live_ids())
        for name, engine in self.engines.items():
            assert self.session.activate(name).activated
            engine.serve()
        remap.advanced.check(self.session)
        self.session.close()
        assert set(self.backend.usage().values()) == {0}, self.backend.usage()


def play(mode: str, seed: int, tables: bool, turns: int = TURNS) -> None:
    """One run, in this process: ends it if it hangs."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    sys.setswitchinterval(1e-6)
    World(mode, seed, tables).run(turns)
    sys.setswitchinterval(5e-3)
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("seed", range(20 if FUZZ else 2))
@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("use", ["tables", "bare"])
def test_engines_on_threads_of_their_own(use: str, mode: str, seed: int) -> None:
    turns = TURNS * 10 if FUZZ else TURNS
    program = f"import test_threads; test_threads.play({mode!r}, {seed}, {use == 'tables'}, {turns})"
    expect_ok(program, timeout_s=LIMIT_S + 60)


def test_a_close_beside_another_threads_pass_is_refused() -> None:
    """It was accepted at once, and an engine that computed at the layers' addresses died of SIGSEGV. Not so beside a pass whose
    thread has ended: nobody reads there any more, and nobody could end it."""
    session = remap.Session(64 * PAGE, page_bytes=PAGE)
    engine = attach(session, "a", [2, 2], 0)
    entered, leave, passes = threading.Event(), threading.Event(), []

    def serve() -> None:
        with engine.tenant.forward():
            entered.set()
            leave.wait(LIMIT_S)
            for layer in range(engine.tenant.layers):
                engine.tenant.wait(layer)
                engine.tenant.done(layer)

    def vanish() -> None:
        passes.append(engine.tenant.forward())
        passes[-1].__enter__()

    thread = threading.Thread(target=serve)
    thread.start()
    assert entered.wait(LIMIT_S)
    with pytest.raises(InvalidState, match="inside a pass") as caught:
        session.close()
    assert caught.value.fields["tenant"] == "a" and not session.closed and engine.tenant.kv.allocate(1)
    leave.set()
    thread.join()
    thread = threading.Thread(target=vanish)
    thread.start()
    thread.join()
    with pytest.raises(InvalidState, match="a pass is open"):
        engine.tenant.forward().__enter__()
    session.close()
    assert session.closed
