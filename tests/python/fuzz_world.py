"""A fuzzer of whole sessions: random tenants do whatever they may, and a slow, obvious model looks at everything.

    python fuzz_world.py [--seconds S] [--seed N] [--kinds plain,faults,interrupts,modes] [--walks N]
    python fuzz_world.py --replay 'JSON'

A walk is a setting and a list of operations, both made from a seed before anything runs, so that a failure can be
replayed and made smaller by leaving operations out. Each walk runs in a forked child: a crash or a hang is a finding
like any other.

What is looked at after every operation: the books; every live block's tag; that no block is lost or moves untold; that
a block which is new to a tenant shows nobody else's bytes (tenants have byte values of their own); min_blocks; who has
lent what to whom; addresses; that KV comes back from host memory as it went there; that a call which raised
changed nothing; that it raised only what it may (calls that nobody may make: odd_arguments.py); of the kind "modes", that an
aliased and a strict session do the same. In passes: every byte of every layer, while all free blocks
hold something else. In the end everybody comes home, leaves, and the backend has everything back.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

import interrupts
import sharing_worlds
from arena_worlds import External, make_backend, session_on, set_times, times_of

import remap
from remap import InvalidArgument, InvalidState, OutOfBlocks, OutOfMemory, _core
from remap import session as session_module
from remap.errors import ArenaBroken, DriverError, Error
from remap.internals import internals

MODES = ("aliased", "strict")
KINDS = ("plain", "faults", "interrupts", "modes")
NAMES = ("t0", "t1", "t2", "t3")
RANGES, SHARE = 8, 31  # byte values: 8 ranges of 31, a tenant has one of them
TURNS = 120
HANG_S = 120  # of the processor's time, or without any

Op = list[Any]

# Each public verb -> the operation that calls it (test_fuzz.py compares with what there is, and with what is drawn).
VERBS = {
    "Session.attach_bytes": "attach", "Session.detach": "detach", "Session.step": "step", "Session.activate": "activate",
    "Session.deactivate": "deactivate", "Session.expect": "expect", "Session.snapshot": "look", "Session.close": "end",
    "Tenant.forward": "forward", "KVCache.allocate": "allocate", "KVCache.free": "free", "KVCache.subscribe": "attach",
    "KVCache.returned": "free", "HostKV.open": "open", "HostKV.offer": "offer", "HostKV.copy_out": "copy_out",
    "HostKV.copy_in": "copy_in", "HostKV.kept": "copy_in", "HostKV.arrived": "arrived", "HostKV.join": "join",
    "HostKV.free": "forget", "advanced.remap": "remap", "advanced.lend": "lend", "advanced.give_back": "give_back",
    "advanced.offers": "look", "advanced.differing": "look", "advanced.unsettled": "look", "advanced.read_layer": "read",
    "advanced.settle": "settle", "advanced.check": "look", "advanced.layer_address": "attach", "advanced.internals": "attach",
    "advanced.declare_registered": "declare", "advanced.withdraw_registered": "withdraw",
}  # fmt: skip
NOT_DRAWN = {
    "Session.attach": "needs torch; what it adds to attach_bytes is not memory's: test_transformers_families.py",
    "Session.change": "is how the verbs of advanced call",
    "Session.exclusively": "is how the verbs of advanced call",
    "HostKV.stream": "a pass has to name the blocks: test_streamed_kv.py walks",
    "advanced.place": "another instance computes the rest of each pass: test_place.py walks",
    "advanced.fill_layer": "as place",
    "advanced.filled": "as place",
    "advanced.rewrite": "needs a model of torch: test_rewrite.py walks",
    "advanced.show": "listens in a thread of its own, and calls snapshot: test_top.py",
}

# -- making walks ------------------------------------------------------------------------------------------------------


CONFIG: dict[str, list[Any]] = {
    "policy": ["priority", "mru", "lru", "expected_next_use"], "selection": ["nested", "nested", "uniform", "slices", "auto"],
    "buffers": [1, 2, "auto"], "dwell": [1, 1, 4], "min_idle": [0.0, 1.0], "reload_s": [0.0, 1e9],
    "reserve_blocks": [None, 0, 2], "hysteresis_blocks": [None, 0], "contention": [0.0, 0.1, 9.0], "slowdown": [0.02, 5.0],
}  # fmt: skip


def make_walk(seed: str, kind: str, turns: int = TURNS) -> dict[str, Any]:
    """The setting and the operations of one walk."""
    rng = random.Random(f"{seed}{kind}")
    page = 4096 * rng.choice([1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 4, 4, 3, 5])
    start = [["attach", name, make_tenant(rng, page)] for name in NAMES[: rng.choice([1, 2, 2, 3, 3, 4])]]
    pages = sum(pages_of(op[2], page) for op in start)
    config = {name: rng.choice(values) for name, values in CONFIG.items()}
    if rng.random() < 0.2:
        config["reversion"] = False
    return {
        "kind": kind,
        "mode": rng.choice(["aliased", "strict"]),
        "page": page,
        "pages": max(2, pages + rng.choice([0, 0, 2, 7, 20])),
        "config": config,
        "ops": start + [op for _ in range(turns) for op in make_ops(rng, kind, page)],
    }


def make_tenant(rng: random.Random, page: int) -> dict[str, Any]:
    count = rng.choice([1, 2, 3, 4, 5, 6, 8])
    equal = rng.random() < 0.4
    size = rng.randint(1, 4) * page - rng.choice([0, 1, 100, page // 2])
    layers = []
    for _ in range(count):
        pages = rng.choice([0, 1, 1, 2, 2, 3, 4])
        layers.append(size if equal else max(0, pages * page - rng.choice([0, 1, 7, 100, page // 2, page - 1])))
    headed = rng.random() < 0.2
    if headed:
        layers.append(rng.randint(3, 7) * page - 33)
    dtype = rng.choice(["float32", "bfloat16", "int8"])
    least = rng.choice([0, 1, 2, 5])
    tenant: dict[str, Any] = {
        "layers": layers,
        "headed": headed,
        "kv": {
            "layers": count, "kv_heads": rng.choice([1, 2]), "head_dim": rng.choice([8, 16, 24, 100]),
            "block_tokens": rng.choice([1, 4, 16]), "dtype": dtype, "min_blocks": least,
            "max_blocks": least + rng.choice([1, 5, 40, 200, 200, 800]),
            "layout": rng.choice(["block_major", "block_major", "layer_major"]),
            "host_blocks": rng.choice([None, 0, 3, 30, 30]),
        },
        "priority": rng.choice([0, 0, 1, 5]),
        "active": rng.random() < 0.8,
        "pages": rng.choice(["auto", "auto", "own", "none"]),  # "none" only where it is inactive
        "times": [rng.choice([0.1, 1.0]), rng.choice([0.0, 0.1, 0.9, 5.0])],
    }  # fmt: skip
    if rng.random() < 0.5:
        tenant["config"] = {
            "selection": rng.choice(["nested", "uniform", "slices", "auto"]), "max_layers": rng.choice([None, 0, 1, 2, 5]),
            "buffers": rng.choice([1, 2, "auto"]), "lends": rng.random() < 0.9, "dwell": 1,
            "reserve_blocks": rng.choice([None, 0, 3]), "hysteresis_blocks": 0, "slowdown": rng.choice([0.0, 0.02, 5.0]),
        }  # fmt: skip
    if rng.random() < 0.15:
        tenant["external"] = rng.choice(["prompt", "late"])
    return tenant


def pages_of(tenant: dict[str, Any], page: int) -> int:
    spec = remap.KVSpec(**tenant["kv"])
    geometry = remap.kv.spec.KVGeometry(spec, page)
    return sum(max(1, -(-n // page)) for n in tenant["layers"]) + int(geometry.pages_for_blocks(spec.min_blocks))


def make_ops(rng: random.Random, kind: str, page: int) -> list[Op]:
    """One operation. Or a few: all blocks of a tenant live when other layers are to stream, so that its blocks move into pages
    which these give in the same change, and that ends somewhere. Or its KV goes out and comes in while something else is done."""
    if rng.random() < 0.92:
        return [make_op(rng, kind, page)]
    name, kinds = rng.choice(NAMES), ["uniform", "nested", "slices"]
    if rng.random() < 0.5:
        beside = [make_op(rng, kind, page) for _ in range(rng.randint(1, 4))]
        out: list[Op] = [["allocate", name, 0.5], ["copy_out", name, 0.3, rng.randint(0, 2)]]
        into: Op = ["copy_in", name, rng.randint(1, 9), rng.randint(0, 5)]
        return [*out, into, *beside, ["join", name, rng.random() < 0.5]]
    ops: list[Op] = [["activate", name, False, False], ["forward", name], ["forward", name]]
    ops += [["remap", name, rng.random(), rng.choice([1, 2]), rng.choice(kinds), False], ["allocate", name, 1.0]]
    if kind == "faults":
        ops.append(["fault", rng.randint(1, 9), rng.random() < 0.2, rng.random() < 0.5])
    if kind == "interrupts":
        ops.append(["interrupt", int(rng.random() * 700)])
    return [*ops, ["remap", name, rng.random(), rng.choice([1, 1, 2]), rng.choice(kinds), False], ["forward", name]]


def make_op(rng: random.Random, kind: str, page: int) -> Op:
    name, other = rng.sample(NAMES, 2)
    share = rng.choice([0.0, 0.3, 0.7, 1.0, rng.random()])
    kinds = ["uniform", "nested", "slices"]
    ops: list[tuple[float, Callable[[], Op]]] = [
        (5, lambda: ["step", {each: rng.choice([0, 0, 2, 7, 20, 60]) for each in NAMES if rng.random() < 0.6}]),
        (1, lambda: ["quiet", rng.randint(1, 10)]),
        (4, lambda: ["remap", name, share, rng.choice([1, 2]), rng.choice(kinds), rng.random() < 0.1]),
        (3, lambda: ["lend", name, share, rng.choice([1, 2]), rng.choice([None, other, other])]),
        (4, lambda: ["activate", name, rng.random() < 0.2, rng.choice([False, False, True, 0.5])]),
        (2, lambda: ["deactivate", name, rng.random() < 0.3]),
        (1, lambda: ["expect", name]),
        (2, lambda: ["offer", name, rng.random(), rng.choice([0.0, 0.5, 1.0, 1.0, 3.0])]),
        (0.5, lambda: ["open", name]),
        (3, lambda: ["copy_out", name, share, rng.randint(0, 2)]),
        (3, lambda: ["copy_in", name, rng.choice([1, 1, 2, 7]), rng.randint(0, 5)]),
        (1, lambda: ["join", name, rng.random() < 0.5]),
        (1, lambda: ["arrived", name]),
        (1, lambda: ["forget", name, rng.choice([1, 2, 3]), rng.randint(0, 2)]),
        (0.5, lambda: ["give_back", name]),
        (0.5, lambda: ["read", name, rng.random()]),
        (0.5, lambda: ["look", name]),
        (3, lambda: ["crowd", name, share, rng.randint(1, 4), rng.random() < 0.7]),
        (5, lambda: ["allocate", name, share]),
        (4, lambda: ["free", name, rng.choice([1, 1, 2, 3]), rng.randint(0, 2)]),
        (4, lambda: ["forward", name]),
        (0.5, lambda: ["settle"]),
        (0.7, lambda: ["detach", name]),
        (1.2, lambda: ["attach", name, make_tenant(rng, page)]),
        (0.3, lambda: ["declare", name, rng.random()]),
        (0.4, lambda: ["withdraw"]),
        (0.5, lambda: ["wait", rng.choice([0.1, 10.0, 1e4])]),
    ]
    if kind == "faults":
        ops.append((6, lambda: ["fault", rng.choice([1, 1, 2, 3, 5, 9]), rng.random() < 0.2, rng.random() < 0.5]))
        ops.append((1, lambda: ["copy_fault", rng.randint(1, 4)]))
    if kind == "interrupts":
        ops.append((8, lambda: ["interrupt", int(rng.random() ** 2 * 700)]))
    return rng.choices([make for _, make in ops], [weight for weight, _ in ops])[0]()


# -- the engines -------------------------------------------------------------------------------------------------------


class Engine(sharing_worlds.Engine):
    """One tenant, and what its engine knows: its live blocks and the byte that each is full of."""

    def __init__(self, world: World, name: str, made: dict[str, Any], number: int) -> None:
        self.session, self.name = world.session, name
        self.base = 1 + number % RANGES * SHARE
        self.data = [self._bytes(index, nbytes) for index, nbytes in enumerate(made["layers"])]
        config = remap.advanced.Knobs(**made["config"]) if "config" in made else None
        pages = "own" if made["active"] else made.get("pages", "own")
        more = {"priority": made["priority"], "active": made["active"], "config": config, "pages": pages}
        with with_head(made["headed"]):
            self.tenant = self.session.attach_bytes(self.data, name=name, kv=remap.KVSpec(**made["kv"]), **more)
        compute, copy = made["times"]
        set_times(self.tenant, times_of(len(self.data), compute, copy), copy_s=copy)
        self.addresses = self.addresses_now()
        self.held: dict[int, int] = {}
        self.stored: dict[int, int] = {}  # host block -> the byte that it is full of
        self.flying: dict[int, dict[int, int]] = {}  # ticket -> block -> the byte that is on its way into it
        self._next = 0
        self.answer = 0.0  # to a report that wants blocks: the share of these that it frees
        self.external: External | None = None
        if made.get("external"):
            self.external = External(self.tenant, made["external"] == "prompt")
            self.external.used = self.held

    def _bytes(self, layer: int, nbytes: int) -> bytes:
        chunk = bytes(self.base + (layer * 5 + at // 64) % SHARE for at in range(64 * SHARE))
        return (chunk * (nbytes // len(chunk) + 1))[:nbytes]

    @property
    def homes(self) -> set[int]:
        return {page for home in internals(self.tenant)._state.pages.homes for page in home}

    @property
    def cold(self) -> bool:
        return bool(internals(self.tenant)._state.pages.cold)

    @property
    def host(self) -> Any:
        return self.tenant.kv.host

    @property
    def quiet(self) -> list[int]:
        """Its blocks into which nothing is on its way."""
        return [block for block in sorted(self.held) if not any(block in each for each in self.flying.values())]

    def land(self, ticket: int) -> None:
        self.held |= self.flying.pop(ticket)

    def addresses_now(self) -> list[int]:
        layers = [remap.advanced.layer_address(self.session, self.name, index) for index in range(len(self.data))]
        return [*layers, self.kv.address]

    def room(self) -> int:
        return len(self.external.free) if self.external else self.kv.free_blocks

    def places(self) -> int:
        """Bytes of blocks that it could hold more."""
        return 0 if self.external else (self.kv.max_blocks - self.kv.usable_blocks) * self.kv.spec.block_bytes

    def allocate(self, count: int) -> None:
        if self.external:
            ids = sorted(self.external.free)[:count]
            self.external.free -= set(ids)
        else:
            ids = self.kv.allocate(count)
            expect(len(ids) == count, f"{count} blocks were asked for, {ids} came")
        for block in ids:
            self._next = (self._next + 1) % SHARE
            self.foreign(block)
            self.write(block, self.base + self._next)
            self.held[block] = self.base + self._next

    def free(self, blocks: Any = None) -> None:
        if self.external:
            self.external.finish(list(self.held if blocks is None else blocks))
            if self.external.leaving - set(self.held):
                self.external.give_back()
        else:
            leaving = list(self.held if blocks is None else blocks)
            super().free(leaving)
            for each in self.flying.values():
                for block in leaving:
                    each.pop(block, None)

    def patch(self, moved: Any) -> None:
        super().patch(moved)
        for ticket, each in self.flying.items():
            self.flying[ticket] = {moved.get(block, block): value for block, value in each.items()}

    def ranges(self, block: int) -> list[tuple[int, int]]:
        return [(self.kv.address + at, nbytes) for at, nbytes in self.kv.geometry.byte_ranges_of_block(block)]

    def foreign(self, block: int) -> None:
        own = bytes([0, *range(self.base, self.base + SHARE)])
        for at, nbytes in self.ranges(block):
            others = ctypes.string_at(at, nbytes).translate(None, own)
            expect(not others, f"a block new to {self.name} shows bytes of others: {sorted(set(others))}")

    def write(self, block: int, value: int) -> None:
        for at, nbytes in self.ranges(block):
            ctypes.memset(at, value, nbytes)

    def check(self) -> None:
        held, live = dict(self.held), set(self.kv.pool.live_ids())
        expect(bool(self.external) or set(held) == live, f"{self.name} was not told of a move")
        for block in () if self.external else self.quiet:
            values = {byte for at, nbytes in self.ranges(block) for byte in ctypes.string_at(at, nbytes)}
            expect(values == {held[block]}, f"{self.name}: block {block} has changed")
        if self.external:
            self.external.check()
        books = set(self.kv.host.live_ids())
        expect(books == set(self.stored), f"host blocks of {self.name} are {books}, and it has {self.stored}")
        expect(self.addresses_now() == self.addresses, f"an address of {self.name} has changed")
        usable = self.kv.usable_blocks
        expect(self.cold or usable >= self.kv.spec.min_blocks, f"{self.name} has lost blocks that were promised")
        expect(not (self.cold and self.tenant.active), f"{self.name} is to serve without some of its layers")

    def poison(self) -> None:
        """Free blocks get bytes: a layer that still shows them reads wrong."""
        for block in set(self.kv.pool.open_ids()) - set(self.held):
            self.foreign(block)
            self.write(block, self.base)


@contextlib.contextmanager
def with_head(headed: bool) -> Any:
    """The last layer has no KV, as an lm_head that streams. Models only can say so: the source of bytes is changed."""
    raw = session_module.raw_source
    if headed:
        made = lambda layers, host: dataclasses.replace(raw(layers, host), kv_layers=len(layers) - 1)  # noqa: E731
        session_module.raw_source = made  # type: ignore[assignment]
    try:
        yield
    finally:
        session_module.raw_source = raw


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


# -- the world ---------------------------------------------------------------------------------------------------------


def of_engine(act: Callable[..., None], hosts: bool = False) -> Callable[..., None]:
    """An operation of an engine by its name: nothing if there is none."""

    @functools.wraps(act)
    def operation(self: World, name: str, *more: Any) -> None:
        engine = self.engines.get(name)
        if engine is not None and not (hosts and engine.external):
            act(self, engine, *more)

    return operation


of_engine_that_hosts = functools.partial(of_engine, hosts=True)


class World:
    """One session, its engines, and how each operation is done and looked at."""

    def __init__(self, walk: dict[str, Any]) -> None:
        self.kind = walk["kind"]
        self.now = 1.0
        capacity = walk["pages"] * walk["page"]
        self.backend = _core.make_fault_backend(make_backend(capacity, walk["page"]))
        config = remap.advanced.Knobs(**walk["config"])
        self.session = session_on(self.backend, capacity, walk["page"], walk["mode"], config)
        self.session.clock = self.session._offers._clock = self.session._passes._clock = lambda: self.now
        self.engines: dict[str, Engine] = {}
        self.declared: list[tuple[int, int]] = []
        self.attached = 0
        self.fault: Callable[[], None] | None = None  # arms it before the next call
        self.at = -1  # the point of the next call at which it is interrupted
        self.aftermath = 0  # calls that may still report a failure injected before
        self.ended = False

    def check(self) -> None:
        remap.advanced.check(self.session)
        pages = self.session.snapshot().pages
        expect(pages.free + pages.params + pages.kv + pages.ring == pages.total, f"pages are lost: {pages}")
        expect(set(self.session._tenants) == set(self.engines), "a tenant is attached that nobody knows, or is gone")
        owners, of = [owner.name for owner in self.session._arena.owners()], self.session._arena.tenants()
        seen = self.session.snapshot().tenants
        for name, engine in self.engines.items():
            engine.check()
            for other, its in self.engines.items():
                lent = sum(owners[page] == "kv" and of[page] == internals(its.tenant).number for page in engine.homes)
                told = 0 if other == name else seen[name].lent_to.get(other, 0)
                expect(other == name or lent == told, f"{name} has lent {lent} pages to {other}, and says {told}")

    def tell(self, report: Any) -> Any:
        for name, moved in (getattr(report, "moved", None) or {}).items():
            engine = self.engines[name]
            olds = set(moved) - set(engine.held)
            expect(not olds, f"{name} is told that blocks moved which it does not hold")
            engine.patch(moved)
        return report

    # -- one call ---------------------------------------------------------------------------------------------------

    def call(self, act: Callable[[], Any], *may_raise: type[Error], partly: bool = False) -> Any:
        """What it returns, told to the engines; the error if it may raise that, and has changed nothing (partly: may
        have, and the next report tells what moved); KeyboardInterrupt if it was interrupted."""
        before = sharing_worlds.seen(self.session)
        due = any(internals(each.tenant)._state.rest is not None for each in self.engines.values())
        arm, self.fault = self.fault, None
        at, self.at = self.at, -1
        if arm is not None:
            arm()
        try:
            if at >= 0:
                _, result, error = interrupts.interrupted(act, at, "signals")
            else:
                result, error = act(), None
        except Error as raised:
            result, error = None, raised
        finally:
            if arm is not None:
                self.session._executor.drain()
                self.backend.disarm()
        if arm is not None:
            self.aftermath = 3
            if self.session._arena.broken:
                return self.broken(error)
        if isinstance(error, KeyboardInterrupt):
            self.after_interrupt()
            return error
        if error is None:
            return self.tell(result)
        injected = isinstance(error, (DriverError, OutOfMemory)) and "injected" in str(error)
        if injected and arm is None:  # what failed in the background is told later, and heals
            self.aftermath -= 1
            injected = self.aftermath >= 0
        if not injected and not isinstance(error, may_raise):
            raise error
        if partly:
            if injected:
                self.tell_moves()
        else:
            changed = self.changed(before)
            # What an earlier change has left is done by the next call, whatever becomes of that.
            expect(due or not changed, f"a call raised {type(error).__name__} and changed {changed}")
        _forget(error)
        return error

    def changed(self, before: dict[str, Any]) -> list[str]:
        after = sharing_worlds.seen(self.session)
        return [key for key in {**before, **after} if before.get(key) != after.get(key)]

    def broken(self, error: BaseException | None) -> Any:
        """Only looking and closing are allowed now."""
        expect(error is None or isinstance(error, Error), f"{error!r}")
        self.ended = True
        with contextlib.suppress(ArenaBroken):
            self.session.step()
            raise AssertionError("a broken arena takes a step")
        remap.advanced.check(self.session)
        self.session.snapshot()
        self.close()
        return ArenaBroken("broken")

    def tell_moves(self) -> None:
        """The next report tells what moved in a call that raised."""
        for last in (False, False, False, True):
            try:
                self.tell(self.session.step())
                return
            except (DriverError, OutOfMemory) as error:
                if last or "injected" not in str(error):
                    raise
                _forget(error)

    def after_interrupt(self) -> None:
        """The next report tells what moved. Who was attached without being told, or is half gone, is detached."""
        for name in set(self.session._tenants) - set(self.engines):
            self.session.detach(name)
        for name, engine in list(self.engines.items()):
            if name in self.session._tenants and internals(engine.tenant)._state.leaving:
                self.session.detach(name)
            if name not in self.session._tenants:
                del self.engines[name]
        for engine in self.engines.values():
            if not engine.external:
                pool = engine.kv.pool
                lost = set(pool.live_ids()) - set(engine.held)
                gone = set(engine.held) - set(pool.live_ids())
                if len(lost) != len(gone):  # of an allocation or a freeing that was interrupted
                    expect(not (lost and gone), f"blocks of {engine.name} are lost in an interrupt")
        self.tell_moves()

    # -- operations --------------------------------------------------------------------------------------------------

    def do(self, op: Op) -> None:
        """One operation, and a look at everything. An operation that makes no sense now does nothing."""
        self.now += 1.0
        getattr(self, f"op_{op[0]}")(*op[1:])
        if not self.ended:
            self.check()

    def failed(self, result: Any) -> bool:
        """Of what `call` has returned; nothing more is known of a session that has ended."""
        return self.ended or isinstance(result, BaseException)

    def op_attach(self, name: str, made: dict[str, Any]) -> None:
        if name in self.engines:
            return
        self.attached += 1
        engines: list[Engine] = []

        def attach() -> None:
            engines.append(Engine(self, name, made, self.attached))

        result = self.call(attach, OutOfMemory)
        if result is None and engines:
            self.engines[name] = engines[0]
            engines[0].poison()
        elif isinstance(result, OutOfMemory) and "minimum_bytes" in result.fields:
            free = self.session.snapshot().pages.free
            page = self.session._arena.page_bytes
            lent = sum(internals(engine.tenant).lent_pages for engine in self.engines.values())
            expect(free - lent < pages_of(made, page), "attach says that it does not fit, and it does")

    @of_engine
    def op_detach(self, engine: Engine) -> None:
        inside = [each for each in self.declared if self.owner_of(each) == engine.name]

        def detach() -> None:
            self.session.detach(engine.name)
            del self.engines[engine.name]

        if not inside:
            result = self.call(detach, partly=True)
            if isinstance(result, Error) and not self.ended:
                self.session.detach(engine.name)
                del self.engines[engine.name]
            return
        result = self.call(detach, InvalidState)
        expect(isinstance(result, BaseException), "a tenant with declared memory was detached")
        expect(engine.name in self.engines or self.ended, "gone")

    def op_step(self, demand: dict[str, int]) -> None:
        wanted = {}
        for name, blocks in demand.items():
            engine = self.engines.get(name)
            if engine is not None and engine.tenant.active:
                wanted[name] = remap.Demand(blocks, free=len(engine.external.free) if engine.external else None)
        report = first = self.call(lambda: self.session.step(wanted), partly=True)
        if isinstance(first, remap.StepReport) and not self.ended and self.answer(first):
            # Does what that one left, and tells of no more.
            report = self.call(lambda: self.session.step(wanted), partly=True)
        if isinstance(report, remap.StepReport) and not self.ended:
            for name, demanded in wanted.items():
                engine = self.engines[name]
                if not engine.external and engine.kv.free_blocks < demanded.blocks:
                    unmet = report.unmet_blocks.get(name, first.unmet_blocks.get(name, 0))
                    expect(unmet > 0, f"{name} has too few blocks, and the report does not say so")

    def answer(self, report: Any) -> bool:
        """The engines free as many of the blocks that it wants as they do. Whether a block was freed."""
        freed = False
        for name, blocks in report.wanted.items():
            engine = self.engines[name]
            expect(not engine.tenant.active, f"blocks of {name} are wanted in its turn")
            expect(0 < blocks <= len(engine.held), f"{blocks} blocks of {name} are wanted, it has {len(engine.held)}")
            leaving = sorted(engine.held)[: int(engine.answer * blocks)]
            engine.free(leaving)
            freed = freed or bool(leaving)
        return freed

    @of_engine_that_hosts
    def op_offer(self, engine: Engine, share: float, answer: float) -> None:
        engine.answer = answer
        self.call(lambda: engine.kv.offer(int(share * len(engine.held))), OutOfMemory)

    # KV in host memory. Where calls fail or are interrupted, each operation waits for its copies; elsewhere they are in flight
    # across others.

    def come_down(self, engine: Engine, undefined: Any = ()) -> None:
        """Copies that may have failed: their blocks, and `undefined` ones, are given up, and host blocks that were not filled."""
        if self.ended or self.kind not in ("faults", "interrupts"):
            return
        lost = set(undefined)
        for _ in range(3):
            try:
                engine.host.join()
                break
            except (DriverError, InvalidState) as error:
                expect("injected" in str(error) or "interrupted" in str(error), f"{error!r}")
                for ticket in list(engine.flying):
                    try:
                        engine.host.join(ticket)
                        engine.land(ticket)
                    except (DriverError, InvalidState):
                        lost |= engine.flying.pop(ticket).keys()
                engine.free(lost)
                lost = set()
        else:
            raise AssertionError("a join of copies that nobody waits for any more raises")
        for ticket in list(engine.flying):
            engine.land(ticket)
        engine.free(lost)
        for host in [host for host in engine.stored if not engine.host.kept([host])]:
            engine.host.free([host])
            del engine.stored[host]

    @of_engine_that_hosts
    def op_open(self, engine: Engine) -> None:
        total = self.call(engine.host.open, OutOfMemory)
        expect(self.failed(total) or total == engine.host.total, "the store is not that large")

    @of_engine_that_hosts
    def op_copy_out(self, engine: Engine, share: float, offset: int) -> None:
        ids = engine.quiet[offset:][: round(share * len(engine.held))]
        hosts: list[int] = []
        result = self.call(lambda: hosts.extend(engine.host.copy_out(ids)), OutOfBlocks, OutOfMemory)
        if isinstance(result, OutOfBlocks):
            expect(len(ids) > engine.host.free_blocks, "there was room in host memory")
        if not isinstance(result, BaseException):
            engine.stored |= zip(hosts, [engine.held[block] for block in ids], strict=True)
        self.come_down(engine)

    @of_engine_that_hosts
    def op_copy_in(self, engine: Engine, count: int, offset: int) -> None:
        hosts, into = sorted(engine.stored)[offset % max(1, len(engine.stored)) :][:count], engine.quiet[-count:]
        hosts, into = hosts[: len(into)], into[: len(hosts)]
        if not hosts:
            return
        expect(engine.host.kept(hosts), f"host blocks {hosts} of {engine.name} were not filled")
        parts = [(hosts[at::2], into[at::2]) for at in range(min(2, len(hosts)))]
        for part in parts:
            tickets: list[int] = []
            result = self.call(lambda part=part, tickets=tickets: tickets.append(engine.host.copy_in(*part)))
            for ticket in tickets:
                engine.flying[ticket] = dict(zip(part[1], [engine.stored[host] for host in part[0]]))
            self.come_down(engine, part[1] if isinstance(result, BaseException) and not tickets else ())

    @of_engine_that_hosts
    def op_join(self, engine: Engine, all_of_them: bool) -> None:
        if not (engine.flying or all_of_them):
            return
        last = None if all_of_them else sorted(engine.flying)[len(engine.flying) // 2]
        self.call(lambda: engine.host.join(last))
        if not self.ended and self.kind not in ("faults", "interrupts"):
            for ticket in [each for each in engine.flying if last is None or each <= last]:
                expect(engine.host.arrived(ticket), "what was joined has not arrived")
                engine.land(ticket)
        self.come_down(engine)

    @of_engine_that_hosts
    def op_arrived(self, engine: Engine) -> None:
        for ticket in list(engine.flying):
            if engine.host.arrived(ticket):
                engine.land(ticket)

    @of_engine_that_hosts
    def op_forget(self, engine: Engine, every: int, offset: int) -> None:
        self.op_join(engine.name, True)  # what reads them has to be waited for
        hosts = sorted(engine.stored)[offset % every :: every]
        result = self.call(lambda: engine.host.free(hosts))
        if not self.ended and not isinstance(result, Error):
            live = set(engine.kv.host.live_ids())
            expect(self.failed(result) or not live.intersection(hosts), "freed host blocks are in use")
            engine.stored = {host: value for host, value in engine.stored.items() if host in live}

    @of_engine
    def op_give_back(self, engine: Engine) -> None:
        self.call(lambda: remap.advanced.give_back(self.session, engine.name), OutOfBlocks)

    @of_engine
    def op_read(self, engine: Engine, share: float) -> None:
        layer = int(share * len(engine.data))
        found = ctypes.create_string_buffer(len(engine.data[layer]) + 1)
        place = layer, 0, ctypes.addressof(found), len(engine.data[layer])
        result = self.call(lambda: remap.advanced.read_layer(self.session, engine.name, *place), InvalidState)
        if not self.failed(result):
            expect(found.raw[:-1] == engine.data[layer], f"layer {layer} of {engine.name} reads wrong")

    @of_engine
    def op_look(self, engine: Engine) -> None:
        """Calls that change nothing, but for what is due, which `differing` finishes first."""
        if self.failed(self.call(lambda: remap.advanced.settle(self.session))):
            return
        for look in (remap.advanced.offers, remap.advanced.differing):
            before = sharing_worlds.seen(self.session)
            result = self.call(lambda look=look: look(self.session, engine.name))
            if self.failed(result):
                return
            remap.advanced.unsettled(self.session)
            changed = self.changed(before)
            expect(not changed, f"looking has changed {changed}")

    def op_quiet(self, times: int) -> None:
        for _ in range(times):
            if not self.ended:
                self.op_step({})

    @of_engine
    def op_remap(self, engine: Engine, share: float, buffers: int, kind: str, drain: bool) -> None:
        most = len(internals(engine.tenant)._state.order) - buffers
        layers = share * max(0, most) if kind == "slices" else round(share * max(0, most))
        change = functools.partial(remap.advanced.remap, self.session, engine.name, layers, buffers, kind, drain=drain)
        report = self.call(change, OutOfBlocks, InvalidArgument)
        if isinstance(report, remap.StepReport) and kind != "slices" and not drain and not self.ended:
            early = "ended early" in report.reason.get(engine.name, "")
            expect(engine.tenant.remapped == layers or early, f"{engine.tenant.remapped} remapped, not {layers}")

    @of_engine
    def op_lend(self, engine: Engine, share: float, buffers: int, to: str | None) -> None:
        if to is not None and to not in self.engines:
            return
        buffers = internals(engine.tenant).buffers or buffers
        layers = round(share * max(0, len(internals(engine.tenant)._state.order) - buffers))
        lend = functools.partial(remap.advanced.lend, self.session, engine.name, layers, buffers, to=to)
        self.call(lend, OutOfBlocks, InvalidArgument)

    @of_engine
    def op_activate(self, engine: Engine, alone: bool, partial: bool | float) -> None:
        tenant = engine.tenant
        report = self.call(lambda: self.session.activate(engine.name, alone=alone, partial=partial), OutOfMemory)
        if self.failed(report):
            return
        for _ in range(4):
            if report.activated:
                break
            self.answer(report)
            for other, blocks in report.preempt.items():
                holder = self.engines[other]
                expect(bool(set(blocks) & set(holder.held)) or bool(holder.external), "preempt names no live block")
                holder.free([block for block in blocks if block in holder.held])
            report = self.call(lambda: self.session.activate(engine.name, partial=partial), OutOfMemory)
            if self.failed(report):
                return
        else:
            others = any(each.external for each in self.engines.values())
            expect(others, f"all that {engine.name} named was freed, and it still cannot be activated: {report.reason}")
        expect(tenant.active or not report.activated, f"{engine.name} was activated, and is not active")
        if report.activated and not partial:
            expect(internals(tenant).lent_pages == 0, f"{engine.name} is active, and its layers are lent")

    @of_engine
    def op_deactivate(self, engine: Engine, whole: bool = False) -> None:
        self.call(lambda: self.session.deactivate(engine.name, pages="none" if whole else "own"))

    @of_engine
    def op_expect(self, engine: Engine) -> None:
        """Of a tenant without pages first layers come, and it stays as it is."""
        tenant = engine.tenant
        before, active = set(internals(tenant).cold), tenant.active
        came = self.call(lambda: self.session.expect(engine.name))
        if not self.failed(came):
            expect(set(internals(tenant).cold) == before - set(came), f"{came} came of {engine.name}'s cold layers")
            expect(set(came) <= before and tenant.active == active, f"{engine.name} was expected")

    @of_engine
    def op_allocate(self, engine: Engine, share: float) -> None:
        engine.allocate(round(share * engine.room()))

    @of_engine
    def op_free(self, engine: Engine, every: int, offset: int) -> None:
        engine.free(sorted(engine.held)[offset % every :: every])

    def op_crowd(self, name: str, share: float, keep: int, back: bool) -> None:
        """Where coming home is hardest: an idle tenant has lent, and the holder's live blocks are the highest that it has."""
        names = sorted(self.engines, key=lambda each: self.engines[each].places())
        if len(names) < 2:
            return
        other, name = names[-1], names[NAMES.index(name) % (len(names) - 1)]
        self.engines[name].free()
        self.engines[other].free()
        self.op_deactivate(name)
        self.op_lend(name, share, 1, other)
        if not self.ended:
            self.op_allocate(other, 1.0)
            self.engines[other].free(sorted(self.engines[other].held)[:-keep])
            if back:
                self.op_activate(name, False, False)

    @of_engine
    def op_forward(self, engine: Engine) -> None:
        if not engine.tenant.active:
            with contextlib.suppress(InvalidState):
                engine.serve()
                raise AssertionError("an inactive tenant served a pass")
            return
        for each in self.engines.values():
            each.poison()
        while not self.ended and isinstance(self.call(engine.serve, partly=True), Error):
            pass  # tried again: it heals (`call`)

    def op_settle(self) -> None:
        self.call(lambda: remap.advanced.settle(self.session), partly=True)

    @of_engine
    def op_declare(self, engine: Engine, share: float) -> None:
        layer = int(share * len(engine.data))
        each = (engine.addresses[layer], max(1, len(engine.data[layer])))
        result = self.call(lambda: remap.advanced.declare_registered(self.session, *each), InvalidState)
        if result is None or (isinstance(result, KeyboardInterrupt) and each in self.session._arena.registered()):
            self.declared.append(each)

    def op_withdraw(self) -> None:
        if self.declared:
            each = self.declared[0]
            result = self.call(lambda: remap.advanced.withdraw_registered(self.session, *each))
            if result is None or each not in self.session._arena.registered():
                self.declared.remove(each)

    def op_wait(self, seconds: float) -> None:
        self.now += seconds

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def op_fault(self, nth: int, forever: bool, memory: bool) -> None:
        kind = _core.ErrorKind.out_of_memory if memory else _core.ErrorKind.driver
        self.fault = lambda: self.backend.arm_any(nth, forever, kind)

    def op_copy_fault(self, nth: int) -> None:
        self.fault = lambda: self.backend.fail_async_copy(nth)

    def op_interrupt(self, at: int) -> None:
        self.at = at

    def owner_of(self, each: tuple[int, int]) -> str:
        return next((name for name, engine in self.engines.items() if each[0] in engine.addresses), "")

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Nobody wants anything any more: all come home, leave, and the backend has everything back."""
        self.fault, self.at = None, -1
        while self.declared:
            self.op_withdraw()
        self.op_settle()
        for engine in self.engines.values():
            if engine.external:
                engine.external.prompt = True
            engine.free()
        while not self.ended and any(engine.cold for engine in self.engines.values()):
            self.end_of_one()
        for name in self.engines:
            self.op_activate(name, False, False)
            expect(self.engines[name].tenant.active, f"{name} cannot be activated in the end")
        for name, engine in self.engines.items():
            home = functools.partial(remap.advanced.remap, self.session, name, 0)
            while not self.ended and isinstance(self.call(home), Error):
                pass
            expect(self.ended or not engine.tenant.streamed, f"{name} streams in the end")
        self.check()
        for name in list(self.engines):
            self.op_forward(name)
            self.op_forward(name)
        for name in list(self.engines):
            self.session.detach(name)
            del self.engines[name]
            self.check()
        pages = self.session.snapshot().pages
        expect(pages.free == pages.total, f"pages are kept by nobody: {pages}")
        self.close()

    def end_of_one(self) -> None:
        """While not all are at home: whoever can be serves, and leaves. If nobody can, somebody leaves, for whom there may never
        have been room, or who gives nothing."""
        names = list(self.engines)
        for name in names:
            self.op_activate(name, True, False)
            if self.ended or self.engines[name].tenant.active:
                break
        else:
            keeps = [name for name in names if not self.engines[name].cold]
            name = (keeps or names)[0]
            engine = self.engines[name]
            size = sum(max(1, -(-len(each) // self.session._arena.page_bytes)) for each in engine.data)
            size += engine.kv.geometry.pages_for_blocks(engine.kv.spec.min_blocks)
            # An engine with its own allocator has all open blocks, whether it uses them or not: nobody asks for them here.
            fits = size <= self.session._arena.total_pages and not engine.external
            expect(len(names) > 1 or not fits, f"there is room for {name}, and it stays cold")
        if not self.ended:
            self.check()
            self.op_forward(name)
            self.session.detach(name)
            del self.engines[name]

    def close(self) -> None:
        self.session.close()
        kept = {name for name, held in self.backend.usage().items() if held}
        # A call may have failed inside a destructor, which has nobody to tell and keeps what it had.
        expect(kept <= ({"streams", "events"} if self.kind == "faults" else set()), f"kept in the end: {sorted(kept)}")
        self.ended = True


def _forget(error: BaseException | None) -> None:
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


# -- running, and making smaller ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Failure:
    """at: the operation (or the end). signature: what is the same in a smaller walk that fails likewise."""

    at: int
    signature: str
    what: str


def run(walk: dict[str, Any], progress: Callable[[int], None] = lambda at: None) -> Failure | None:
    """In this process. None if all is right."""
    at = -1
    try:
        try:
            modes = MODES if walk["kind"] == "modes" else [walk["mode"]]
            worlds = [World({**walk, "mode": mode}) for mode in modes]
        except InvalidArgument:
            if walk["page"] & (walk["page"] - 1):  # a session may refuse such pages, or works with them
                return None
            raise
        for at, op in enumerate([*walk["ops"], None]):
            progress(at)
            for world in worlds:
                world.end() if op is None else world.do(op)
            if worlds[0].ended:
                return None
            first, last = (sharing_worlds.seen(world.session) for world in (worlds[0], worlds[-1]))
            expect(first == last, f"the modes differ in {[key for key in first if first[key] != last.get(key)]}")
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the finding
        places = traceback.extract_tb(error.__traceback__)
        last = next((each for each in reversed(places) if each.filename.startswith(interrupts.PACKAGE)), places[-1])
        where = f"{last.filename.rpartition('/')[2]}:{last.name}"
        text = re.sub(r"t\d\b|0x[0-9a-f]+|\d+", "#", str(error))[:80]
        what = "".join(traceback.format_exception(type(error), error, error.__traceback__)[-14:])
        op = walk["ops"][at][0] if 0 <= at < len(walk["ops"]) else "start" if at < 0 else "end"
        return Failure(at, f"{op}: {type(error).__name__} in {where}: {text}", what[-3500:])
    return None


def _watch(stacks: IO[bytes]) -> None:
    """Ends this process with its stacks if it has computed for HANG_S, or has not computed at all for that long: one that waits
    for a busy machine does neither."""
    used = began = time.process_time()
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=stacks)
    while True:
        time.sleep(HANG_S / 16)
        before, used = used, time.process_time()
        if before + 0.002 < used < began + HANG_S:  # more than this thread takes
            faulthandler.dump_traceback_later(HANG_S, exit=True, file=stacks)


def isolated(walk: dict[str, Any]) -> Failure | None:
    """In a forked child, so that a crash or a hang is a failure as well."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stacks, tempfile.TemporaryFile() as position:
        child = os.fork()
        if child == 0:
            os.close(reading)
            faulthandler.enable(stacks)
            threading.Thread(target=_watch, args=(stacks,), daemon=True).start()
            failure = run(walk, lambda at: os.pwrite(position.fileno(), b"%6d" % at, 0) and None)
            with os.fdopen(writing, "w") as out:
                out.write(json.dumps(dataclasses.astuple(failure) if failure else None))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as inward:
            text = inward.read()
        _, status = os.waitpid(child, 0)
        if text:
            found = json.loads(text)
            return Failure(*found) if found else None
        stacks.seek(0)
        stack = stacks.read().decode(errors="replace")
        at = int(os.pread(position.fileno(), 6, 0) or b"0")
    code = os.waitstatus_to_exitcode(status)
    places = re.findall(r'File ".*?/(\w+\.py)", line \d+ in (\w+)', stack)
    name = signal.Signals(-code).name if code < 0 else "hang"
    return Failure(at, f"{name} in {'.'.join(places[0]) if places else '?'}", stack[-3000:])


def smaller(walk: dict[str, Any], failure: Failure, seconds: float = 60.0) -> tuple[dict[str, Any], Failure]:
    """Leaves operations out while it fails likewise: first all after the failure, then pieces, large ones first."""
    until = time.monotonic() + seconds
    best = {**walk, "ops": walk["ops"][: failure.at + 1]}
    found = isolated(best)
    if found is None or found.signature != failure.signature:  # not always the same: threads of the core
        return walk, failure
    piece = max(1, len(best["ops"]) // 2)
    while piece:
        first, shrunk = 0, False
        while first < len(best["ops"]) and time.monotonic() < until:
            ops = best["ops"][:first] + best["ops"][first + piece :]
            again = isolated({**best, "ops": ops})
            if again is not None and again.signature == failure.signature:
                best, found, shrunk = {**best, "ops": ops[: again.at + 1]}, again, True
            else:
                first += piece
        piece = piece if shrunk and piece == 1 else piece // 2
    return best, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", default="")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--walks", type=int, default=1 << 60)
    parser.add_argument("--replay")
    options = parser.parse_args()
    if options.replay:
        failure = isolated(json.loads(options.replay))
        sys.stdout.write(f"{failure.signature}\n{failure.what}\n" if failure else "all is right\n")
        sys.exit(failure is not None)
    until = time.monotonic() + options.seconds
    walks = operations = 0
    kinds = options.kinds.split(",")
    while time.monotonic() < until and walks < options.walks:
        seed = f"{options.seed}{walks}"
        walk = make_walk(seed, kinds[walks % len(kinds)])
        walks, operations = walks + 1, operations + len(walk["ops"])
        failure = isolated(walk)
        if failure is not None:
            walk, failure = smaller(walk, failure)
            replay = f"python tests/python/fuzz_world.py --replay '{json.dumps(walk)}'"
            sys.stdout.write(f"seed {seed}, {walk['kind']}: {failure.signature}\n{failure.what.strip()}\n{replay}\n")
            sys.exit(1)
    sys.stdout.write(f"{walks} walks of {operations} operations, no failure\n")


if __name__ == "__main__":
    main()
