"""Engines on threads of their own with one session, and a manager who changes everything: no byte is ever wrong.

    engine    step with some demand, allocate and free, passes that look at every byte of every layer and live block
    manager   activate, deactivate, lend, remap, settle, snapshot, attach and detach

Two ways of using the library:

    "tables"   Engines hold blocks between passes. Whoever makes a call that may move blocks does so under one lock of
               the application's and patches all engines' tables before he lets go of it; an engine in its pass, where
               nothing of it can move, takes that lock to read its table. Passes are begun and ended, blocks allocated,
               and freed inside of a pass, without it.
    "bare"     Nobody locks anything: an engine's blocks live inside of one pass.

A call may be refused with InvalidState (field tenant: inside a pass, inactive), and, by hand, for want of blocks or
pages.
Each run is a process of its own, which a crash ends and a time limit a hang.
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
from arena_worlds import make_backend, make_spec, session_on, set_times, times_of
from subprocesses import expect_ok

import remap
from remap.errors import InvalidArgument, InvalidState, OutOfBlocks, OutOfMemory

PAGE = 4096
SHAPES = {"a": (6, 2), "b": (5, 2), "c": (4, 1)}  # layers, pages of each
SHARE = 60  # byte values of each tenant: its layers and its blocks have no others
TURNS = 200
LIMIT_S = 120.0
FUZZ = bool(os.environ.get("REMAP_FUZZ"))


def attach(session: remap.Session, name: str, tag: int, layers: int, pages: int) -> tuple[Any, list[bytes]]:
    """A tenant whose layers consist of bytes of its own."""
    data = [
        bytes(1 + tag * SHARE + (7 * layer + at // 64) % SHARE for at in range(pages * PAGE - 100))
        for layer in range(layers)
    ]
    tenant = session.attach_bytes(data, name=name, kv=make_spec(layers, dim=16, tokens=4, min_blocks=2, max_blocks=120))
    set_times(tenant, times_of(layers, 1.0, 0.1), copy_s=0.1)
    return tenant, data


class Refused(Exception):
    """A call was refused, as it may be."""


def may_be_refused(call: Callable[[], Any], *for_want_of: type[remap.Error]) -> Any:
    """What it returns. Raises Refused where others use what it needs."""
    try:
        return call()
    except InvalidState as error:
        if "tenant" not in error.fields:
            raise
        raise Refused from error
    except for_want_of as error:
        raise Refused from error


class Block:
    """One live block in an engine's table. value: the byte that it is full of; 0 before it was written."""

    def __init__(self, number: int) -> None:
        self.number, self.value = number, 0


class Engine:
    def __init__(self, world: World, name: str, tag: int) -> None:
        self.world, self.name, self.tag = world, name, tag
        self.rng = random.Random(f"{world.seed}{name}")
        self.tenant, self.data = attach(world.session, name, tag, *SHAPES[name])
        self.table: list[Block] = []
        self._next = 0

    # -- a turn ----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        world, rng = self.world, self.rng
        acts = [self.step, self.step, self.serve, self.serve, self.serve]
        acts += [self.allocate, self.allocate, self.free] if world.tables else [self.touch]
        for act in rng.sample(acts, len(acts)):
            with contextlib.suppress(Refused):
                act()

    def step(self) -> None:
        blocks = self.rng.choice([0, 0, 2, 5, 12])
        self.world.moving(lambda: self.world.session.step({self.name: remap.Demand(blocks)}))

    def allocate(self) -> None:
        count = self.rng.randint(1, 4)
        may_be_refused(lambda: self.tenant.kv.allocate(count), OutOfBlocks)
        self.reconcile(new=count)

    def free(self) -> None:
        # Under the lock: a block that moves between a look at its number and its freeing would be another's by then.
        with self.world.lock:
            blocks = self.rng.sample(self.table, min(len(self.table), self.rng.randint(1, 4)))
            self.tenant.kv.free([block.number for block in blocks])
            self.reconcile(gone=len(blocks))

    def reconcile(self, new: int = 0, gone: int = 0) -> None:
        """The table is that of the pool. Nobody else allocates or frees these blocks; under the lock nothing moves."""
        with self.world.lock:
            live = set(self.tenant.kv.pool.live_ids())
            known = {block.number for block in self.table}
            assert (len(live - known), len(known - live)) == (new, gone), (
                f"{self.name}: {sorted(live)} are live, the table has {sorted(known)}; allocated {new}, freed {gone}"
            )
            self.table = [block for block in self.table if block.number in live]
            self.table += [Block(number) for number in sorted(live - known)]

    def touch(self) -> None:
        """Allocates outside of a pass; others may move these blocks until they are free again."""
        may_be_refused(lambda: self.tenant.kv.allocate(self.rng.randint(1, 4)), OutOfBlocks)
        self.free_all()

    def free_all(self) -> None:
        while live := self.tenant.kv.pool.live_ids():
            try:
                self.tenant.kv.free(live)
            except InvalidArgument as error:
                if "block" not in error.fields:
                    raise

    # -- passes ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        session, rng = self.world.session, self.rng
        bracket = self.tenant.forward()
        may_be_refused(bracket.__enter__)
        error: BaseException | None = None
        try:
            if self.world.tables:
                with self.world.lock:  # who has moved something lets go when the tables are patched
                    table = [(block, block.number) for block in self.table]
            else:
                number = min(self.tenant.kv.free_blocks, rng.randint(0, 5))
                try:
                    table = [(Block(number), number) for number in self.tenant.kv.allocate(number)]
                except OutOfBlocks as refused:
                    raise AssertionError(f"{self.name}: its free blocks went away inside of its pass") from refused
            for block, number in table:
                if block.value:
                    self.verify(block, number)
                else:
                    self.write(block, number)
            for layer, expected in enumerate(self.data):
                self.tenant.wait(layer)
                got = ctypes.string_at(remap.advanced.layer_address(session, self.name, layer), len(expected))
                self.tenant.done(layer)
                if got != expected:
                    wrong = sum(map(int.__ne__, got, expected))
                    raise AssertionError(f"{wrong} bytes of layer {layer} of {self.name} are wrong: {set(got)}")
            for block, number in table:
                assert block.number == number, f"block {number} of {self.name} moved inside of its pass"
                self.verify(block, number)
            if self.world.tables:
                table = rng.sample(table, min(len(table), rng.randint(0, 2)))
            self.tenant.kv.free([number for _, number in table])
            with self.world.lock:
                gone = {id(block) for block, _ in table}
                self.table = [block for block in self.table if id(block) not in gone]
        except BaseException as raised:
            error = raised
            raise
        finally:
            bracket.__exit__(type(error) if error else None, error, None)

    def ranges(self, number: int) -> list[tuple[int, int]]:
        kv = self.tenant.kv
        return [(kv.address + at, nbytes) for at, nbytes in kv.geometry.byte_ranges_of_block(number)]

    def write(self, block: Block, number: int) -> None:
        own = {0, *range(1 + self.tag * SHARE, 1 + (self.tag + 1) * SHARE)}
        self._next += 1
        value = 1 + self.tag * SHARE + self._next % SHARE
        for at, nbytes in self.ranges(number):
            others = set(ctypes.string_at(at, nbytes)) - own
            assert not others, f"block {number}, new to {self.name}, shows another tenant's bytes {others}"
            ctypes.memset(at, value, nbytes)
        block.value = value

    def verify(self, block: Block, number: int) -> None:
        for at, nbytes in self.ranges(number):
            got = set(ctypes.string_at(at, nbytes))
            assert got == {block.value}, f"block {number} of {self.name} holds {got}, not {block.value}"


class Manager:
    def __init__(self, world: World) -> None:
        self.world, self.rng = world, random.Random(f"{world.seed}manager")
        self.guests = 0

    def turn(self) -> None:
        world, rng, session = self.world, self.rng, self.world.session
        name, other = rng.sample(sorted(SHAPES), 2)
        layers = rng.randint(0, SHAPES[name][0] - 2)
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
        session = self.world.session
        self.guests += 1
        tenant, data = attach(session, "guest", 3, 2, 1)
        try:
            ids = tenant.kv.allocate(2)
            for number in ids:
                for at, nbytes in tenant.kv.geometry.byte_ranges_of_block(number):
                    seen = set(ctypes.string_at(tenant.kv.address + at, nbytes))
                    assert seen == {0}, f"block {number} of a new tenant shows {seen}"
            with tenant.forward():
                for layer, expected in enumerate(data):
                    tenant.wait(layer)
                    assert (
                        ctypes.string_at(remap.advanced.layer_address(session, "guest", layer), len(expected))
                        == expected
                    )
                    tenant.done(layer)
        finally:
            session.detach("guest")


class World:
    def __init__(self, mode: str, seed: int, tables: bool) -> None:
        self.seed, self.tables = seed, tables
        self.lock = threading.RLock()  # the application's
        total = sum(layers * pages for layers, pages in SHAPES.values()) + 6 + 5
        self.backend = make_backend(total * PAGE, PAGE)
        config = remap.advanced.Knobs(
            reserve_blocks=0, hysteresis_blocks=0, min_idle=0.0, map_s=0.0, contention=9.0, dwell=1, ttft_s=1e9
        )
        self.session = session_on(self.backend, total * PAGE, page_bytes=PAGE, mode=mode, config=config)
        self.engines = {name: Engine(self, name, tag) for tag, name in enumerate(SHAPES)}
        self.problems: list[str] = []

    def moving(self, call: Callable[[], Any], *for_want_of: type[remap.Error]) -> None:
        """A call that may move anybody's blocks."""
        with self.lock if self.tables else contextlib.nullcontext():
            report = may_be_refused(call, *for_want_of)
            for name, moved in (getattr(report, "moved", None) or {}).items() if self.tables else ():
                for block in self.engines[name].table:
                    block.number = moved.get(block.number, block.number)

    def run(self, turns: int) -> None:
        """Raises AssertionError with all that went wrong on any thread."""
        actors = [*self.engines.values(), Manager(self)]
        start = threading.Barrier(len(actors))

        def live(actor: Any) -> None:
            start.wait()
            try:
                for _ in range(turns):
                    actor.turn()
                    if self.problems:
                        return
            except BaseException:  # noqa: BLE001  whatever it is, it is the finding
                self.problems.append(f"{getattr(actor, 'name', 'manager')}: {traceback.format_exc()}")

        threads = [threading.Thread(target=live, args=(actor,)) for actor in actors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.problems:
            raise AssertionError("\n".join(self.problems))
        remap.advanced.check(self.session)
        pages = self.session.snapshot().pages
        assert pages.free + pages.params + pages.kv + pages.ring == pages.total
        for engine in self.engines.values():
            if self.tables:
                engine.reconcile()
            engine.tenant.kv.free(engine.tenant.kv.pool.live_ids())
            engine.table.clear()
        for name, engine in self.engines.items():
            report = self.session.activate(name)
            assert report.activated, report
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


def test_blocks_that_move_without_their_bytes_are_found() -> None:
    program = """
import remap.kv.cache, test_threads
remap.kv.cache.KVCache.move = lambda self, pairs: None
for seed in range(20):
    try:
        test_threads.play("aliased", seed, True)
    except AssertionError as error:
        assert "holds" in str(error), error
        break
else:
    raise SystemExit("not found")
"""
    expect_ok(program, timeout_s=LIMIT_S + 60)
