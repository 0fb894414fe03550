"""The public calls with each argument in turn of a wrong kind: which raise anything but a typed error that names it (`bare`)?

A call may also accept the value, since not all are wrong everywhere. What nobody can validate is left out: addresses of memory
that would be read or written.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from arena_worlds import make_layers
from sharing_worlds import SMALL, Shared, spec

import remap
from remap import advanced, schedule
from remap.internals import internals
from remap.kv.cache import TenantKV
from remap.kv.public import HostKV, KVCache


class Unhashable(list):  # type: ignore[type-arg]
    """A list with a name, as a wrong str would have."""


ODD: list[Any] = [
    None, True, -1, 1 << 31, 1 << 40, (1 << 64) - 1, 1 << 70, 10**5000, -(10**5000), 1.5, -0.5, float("nan"), float("inf"), 1e308,
    1j, "", "1", "\ud800", "a\0b", "x" * 5000, b"", b"1", [], ["1"], [[1]], [-1], [1 << 70], [None], [float("nan")], ["\ud800"],
    (), (1, "a"), {}, {"a": 1}, {1: 2}, {"\ud800": 1}, {"a": "1"}, {"a": -1}, {"a": 10**5000}, {"a": None}, {"a": [1]}, set(),
    {"1"}, range(3), range(1 << 40), object(), object, len, Unhashable([1]), iter([1]), iter(["a"]), memoryview(b"ab"),
]  # fmt: skip

ADDRESSES = [None, "1", b"1", [], 1.5, -1, 1 << 64, 1 << 70, 10**5000, {}]
"""Of a host address: none that could be one."""


class World(NamedTuple):
    shared: Shared
    a: Any  # an engine with live blocks, host blocks and streamed ones
    hosts: list[int]

    @property
    def session(self) -> remap.Session:
        return self.shared.session


def make_world() -> World:
    kv = remap.KVSpec(
        layers=4, kv_heads=1, head_dim=64, dtype="int8", block_tokens=2, min_blocks=4, max_blocks=60, layout="layer_major",
        host_blocks=8, streamed_blocks=4,
    )  # fmt: skip
    shared = Shared({"a": [2] * 4, "m": [2] * 4}, spare=40, page_bytes=SMALL, options={"a": {"kv": kv}})
    engine = shared.engines["a"]
    engine.allocate(3)
    hosts = engine.kv.copy_out(list(engine.held)[:2], 4)
    engine.kv.join()
    for each in shared.engines.values():
        each.serve()
    return World(shared, engine, hosts)


def ids(world: World) -> list[int]:
    return list(world.a.held)


def ticket(world: World) -> int:
    return world.a.tenant.kv.host.copy_in(world.hosts, ids(world)[:2])


def layer_address(world: World) -> int:
    return advanced.layer_address(world.session, "m", 0)


def entering(world: World) -> Callable[..., None]:
    def call(**given: Any) -> None:
        with world.a.tenant.forward(**given):
            for layer in range(4):
                world.a.tenant.wait(layer)
                world.a.tenant.done(layer)

    return call


def session(world: World) -> remap.Session:
    return world.session


Given = dict[str, Any]


def of_tenant(verb: Callable[..., Any], **given: Any) -> dict[str, tuple[Callable[[World], Any], Given]]:
    """A verb of `advanced` that names one, m by default."""
    return {f"advanced.{verb.__name__}": (lambda w: verb, {"session": session, "name": "m", **given})}


TIMES: Given = {"compute_s": [1.0] * 4, "transfer_s": 1.0}
# name -> (world -> the call, and arguments that are right). A callable argument is made of the world.
CALLS: dict[str, tuple[Callable[[World], Any], Given]] = {
    "Session": (lambda w: closing(remap.Session), {
        "capacity": 1 << 16, "device": "cpu", "mode": "strict", "page_bytes": 4096, "host_budget": None, "host_kv": "auto",
        "config": None, "platform": None,
    }),
    "Config": (lambda w: remap.Config, {
        "slowdown": 0.1, "reserve_blocks": 1, "max_layers": 1, "ttft_s": 1.0, "tbt_s": 1.0, "lends": True,
    }),
    "Knobs": (lambda w: advanced.Knobs, {
        "hysteresis_blocks": 1, "contention": 0.1, "map_s": 0.1, "dwell": 1, "smoothing": 0.1, "policy": "lru",
        "selection": "nested", "buffers": 1, "reversion": True, "min_idle": 1.0, "reload_s": 0.1,
    }),
    "Platform": (lambda w: advanced.Platform, {
        "copy_chunk_bytes": 0, "copy_threads": 1, "shareable": "none", "gpu_direct_rdma": False, "backend": None,
    }),
    "Demand": (lambda w: remap.Demand, {"blocks": 1, "free": 1, "waited_s": 0.0, "can_wait": True}),
    "KVSpec": (lambda w: remap.KVSpec, {
        "layers": 4, "kv_heads": 1, "head_dim": 64, "block_tokens": 2, "dtype": "int8", "min_blocks": 4, "max_blocks": 60,
        "layout": "layer_major", "host_blocks": 8, "streamed_blocks": 4, "scratch_blocks": 0,
    }),
    "schedule.uniform": (lambda w: schedule.uniform, {"layers": 8, "remapped": 2, "buffers": 1, "phase": 0}),
    "schedule.nested": (lambda w: schedule.nested, {"layers": 8}),
    "schedule.period": (lambda w: schedule.period, {**TIMES, "streamed": (0, 2), "buffers": 1, "slots": "fixed"}),
    "schedule.stall": (lambda w: schedule.stall, {**TIMES, "streamed": (0, 2), "buffers": 1, "slots": "fixed"}),
    "schedule.max_remapped": (lambda w: schedule.max_remapped, {**TIMES, "buffers": "auto", "slowdown": 0.0, "slots": "fixed"}),
    "schedule.one_shot_delay": (lambda w: schedule.one_shot_delay, {**TIMES, "missing": (0, 2)}),
    "Session.attach_bytes": (lambda w: w.session.attach_bytes, {
        "layers": make_layers([1] * 4, 3, SMALL), "name": "new", "priority": 0, "kv": spec(4, SMALL), "config": None,
        "active": True, "resident_layers": None,
    }),
    "Session.detach": (lambda w: w.session.detach, {"name": "m", "device": None}),
    "Session.step": (lambda w: w.session.step, {"demand": {"a": 1}}),
    "Session.activate": (lambda w: w.session.activate, {"name": "m", "alone": False, "partial": False}),
    "Session.deactivate": (lambda w: w.session.deactivate, {"name": "m"}),
    "Session.expect": (lambda w: w.session.expect, {"name": "m"}),
    "Session.close": (lambda w: w.session.close, {"device": None}),
    **of_tenant(advanced.remap, layers=1, buffers=1, selection="nested", drain=False),
    **of_tenant(advanced.lend, layers=1, buffers=1, to="a"),
    **of_tenant(advanced.give_back, name="a"),
    **of_tenant(advanced.offers, name="a"),
    **of_tenant(advanced.place, first=0, end=3, hold=[3], fill=()),
    **of_tenant(advanced.read_layer, layer=0, offset=0, address=0, nbytes=0),
    **of_tenant(advanced.fill_layer, layer=0, offset=0, address=0, nbytes=0),
    **of_tenant(advanced.filled, layer=0),
    **of_tenant(advanced.rewrite, write=lambda w: int),
    **of_tenant(advanced.differing),
    **of_tenant(advanced.settle),
    **of_tenant(advanced.layer_address, layer=0),
    "advanced.unsettled": (lambda w: advanced.unsettled, {"session": session}),
    "advanced.check": (lambda w: advanced.check, {"session": session}),
    "advanced.show": (lambda w: showing, {
        "session": session, "path": lambda w: f"{tempfile.gettempdir()}/remap-shown-{os.getpid()}",
    }),
    "advanced.declare_registered": (lambda w: advanced.declare_registered, {
        "session": session, "address": layer_address, "nbytes": 4096,
    }),
    "advanced.withdraw_registered": (lambda w: advanced.withdraw_registered, {
        "session": session, "address": layer_address, "nbytes": 4096,
    }),
    "Tenant.forward": (entering, {"phase": "decode", "tokens": 1, "stream": None, "streamed": ()}),
    "Tenant.wait": (lambda w: w.a.tenant.wait, {"layer": 0, "stream": 0}),
    "Tenant.done": (lambda w: w.a.tenant.done, {"layer": 0, "stream": 0}),
    "Internals.ready": (lambda w: internals(w.a.tenant).ready, {"layer": 0}),
    "Internals.lends": (lambda w: internals(w.a.tenant).lends, {"layer": 0}),
    "Internals.at_home": (lambda w: internals(w.a.tenant).at_home, {"layer": 0}),
    "Internals.streamed_seconds": (lambda w: internals(w.a.tenant).streamed_seconds, {"blocks": 1}),
    "Internals.calibrate_link": (lambda w: internals(w.a.tenant).calibrate_link, {"bytes_per_s": 1e9}),
    "KVCache.allocate": (lambda w: w.a.tenant.kv.allocate, {"count": 1}),
    "KVCache.free": (lambda w: w.a.tenant.kv.free, {"ids": ids}),
    "KVCache.returned": (lambda w: w.a.tenant.kv.returned, {"ids": ids}),
    "TenantKV.holds": (lambda w: internals(w.a.tenant).kv.holds, {"ids": ids}),
    "TenantKV.holds_host": (lambda w: internals(w.a.tenant).kv.holds_host, {"host_ids": lambda w: w.hosts}),
    "HostKV.copy_out": (lambda w: w.a.tenant.kv.host.copy_out, {"ids": ids, "below": 4}),
    "HostKV.copy_in": (lambda w: w.a.tenant.kv.host.copy_in, {"host_ids": lambda w: w.hosts, "ids": lambda w: ids(w)[:2]}),
    "HostKV.kept": (lambda w: w.a.tenant.kv.host.kept, {"host_ids": lambda w: w.hosts}),
    "HostKV.arrived": (lambda w: w.a.tenant.kv.host.arrived, {"ticket": ticket}),
    "HostKV.join": (lambda w: w.a.tenant.kv.host.join, {"ticket": ticket}),
    "HostKV.free": (lambda w: w.a.tenant.kv.host.free, {"host_ids": lambda w: w.hosts}),
    "HostKV.stream": (lambda w: w.a.tenant.kv.host.stream, {"host_ids": lambda w: w.hosts}),
    "TenantKV.on_stream": (lambda w: internals(w.a.tenant).kv.on_stream, {"streamable": lambda w: int}),
    "HostKV.offer": (lambda w: w.a.tenant.kv.host.offer, {"blocks": 1}),
    "advanced.internals": (lambda w: advanced.internals, {"tenant": lambda w: w.a.tenant}),
    "KVCache.subscribe": (lambda w: w.a.tenant.kv.subscribe, {"listener": lambda w: lambda *_: None, "external": False}),
}  # fmt: skip

WITHOUT_ARGUMENTS: dict[str, Callable[[World], Callable[[], Any]]] = {
    "Session.snapshot": lambda w: w.session.snapshot,
    "HostKV.open": lambda w: w.a.tenant.kv.host.open,
    "Internals.stats": lambda w: internals(w.a.tenant).stats,
}
INSIDE = {
    "Session": ("attach", "change", "exclusively"),  # attach: test_argument_kinds.py, with a torch model
    "Tenant": (),
    "Internals": (
        "away", "bracket", "forward",
        "compute_all", "compute_parts", "copy_seconds", "expect_whole_pass", "prefill_times", "refuse_lost_writes",
        "retire", "times", "whole_pass_seen",
    ),
    "KVCache": (),
    "HostKV": (),
    "TenantKV": (
        "abandon", "allocate", "arrived", "copy_in", "copy_out", "finish_moves", "free", "free_host", "join", "kept", "kept_of",
        "move", "offer", "open_host", "reading", "retire", "returned", "stream", "subscribe", "use_offer",
    ),
    "advanced": (),
    "schedule": (),
}  # fmt: skip
"""What this library itself calls, what takes nothing, and what another name here calls."""


def closing(made: Callable[..., remap.Session]) -> Callable[..., None]:
    def call(**given: Any) -> None:
        made(**given).close()

    return call


def showing(session: remap.Session, path: str) -> None:
    with advanced.show(session, path):
        return


def public() -> Iterator[tuple[str, str]]:
    """(owner, name) of every public call."""
    for owner, members in (
        ("Session", vars(remap.Session)), ("Tenant", vars(remap.Tenant)), ("Internals", vars(advanced.Internals)),
        ("KVCache", vars(KVCache)), ("HostKV", vars(HostKV)), ("TenantKV", vars(TenantKV)),
        ("advanced", {name: getattr(advanced, name) for name in advanced.__all__}),
        ("schedule", {name: getattr(schedule, name) for name in schedule.__all__}),
    ):  # fmt: skip
        for name, member in members.items():
            if inspect.isfunction(member) and not name.startswith("_"):
                yield owner, name


def missing() -> list[str]:
    """Public calls that nobody tries here."""
    tried = {*CALLS, *WITHOUT_ARGUMENTS}
    return [
        f"{owner}.{name}" for owner, name in public() if name not in INSIDE[owner] and f"{owner}.{name}" not in tried
    ]


# -- behind the end ----------------------------------------------------------------------------------------------------

LOOKS = {
    "advanced.settle": "there is nothing to settle",
    "advanced.unsettled": "nothing is unsettled",
    "advanced.check": "the books of nobody agree",
    "advanced.internals": "the same handle",
}
OTHERS = "is of the session, which others use"
# Where the calls come too late -> those that are taken nevertheless, and why.
TAKEN = {
    "close": {**LOOKS, "Session.close": "can be called again", "advanced.layer_address": "says that there is no such tenant"},
    "detach": {
        "advanced.internals": LOOKS["advanced.internals"],
        **dict.fromkeys((
            "Session.attach", "Session.attach_bytes", "Session.change", "Session.exclusively", "Session.snapshot",
            "Session.close", "advanced.unsettled", "advanced.check", "advanced.show",
        ), OTHERS),
    },
    "fork": {"advanced.internals": LOOKS["advanced.internals"]},
}  # fmt: skip


def bound(name: str, world: World) -> Callable[[], Any]:
    """The call with arguments that are right."""
    if name in WITHOUT_ARGUMENTS:
        return WITHOUT_ARGUMENTS[name](world)
    more: dict[str, tuple[Callable[[World], Any], Given]] = {
        "Tenant.wait": (lambda w: lambda: w.a.tenant.wait(0), {}),  # the core's own method until the tenant leaves
        "Tenant.done": (lambda w: lambda: w.a.tenant.done(0), {}),
        "Session.attach": (lambda w: w.session.attach, {"model": 0, "kv": world.a.kv.spec}),
        "Session.change": (lambda w: w.session.change, {"verb": lambda w: lambda core: {}}),
        "Session.exclusively": (lambda w: w.session.exclusively, {"call": lambda w: lambda core: None}),
    }
    made, right = {**CALLS, **more}[name]
    return partial(made(world), **{each: what(world) if callable(what) else what for each, what in right.items()})


def accepted(behind: str) -> list[str]:
    """The calls of a user that raise no typed error behind `close`, `detach`, or a fork (in the child)."""
    world, found = make_world(), []
    names = [
        f"{owner}.{name}" for owner, name in public() if owner in ("Session", "Tenant", "KVCache", "HostKV", "advanced")
    ]
    calls = {name: bound(name, world) for name in [*names, "Tenant.wait", "Tenant.done"] if name not in TAKEN[behind]}
    if behind == "close":
        world.session.close()
    elif behind == "detach":
        for name in tuple(world.session.tenants):
            world.session.detach(name)
    elif os.fork():
        return [str(os.waitstatus_to_exitcode(os.wait()[1]))]
    for name, call in calls.items():
        expected = {"close": remap.InvalidState, "fork": remap.errors.ForkedProcess}.get(behind, remap.InvalidState)
        if behind == "detach" and name.startswith(("Session", "advanced")):
            expected = remap.InvalidArgument
        try:
            found.append(f"{name} returned {call()!r:.60}")
        except expected:
            continue
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            found.append(f"{name} raised {error!r:.200}")
    if behind == "fork":
        sys.stdout.write("\n".join(found))
        sys.stdout.flush()
        os._exit(bool(found))
    return found


# -- odd arguments -----------------------------------------------------------------------------------------------------


def draws(name: str) -> Iterator[tuple[str, Any]]:
    """(argument, a wrong value)."""
    for argument in CALLS[name][1]:
        for value in ADDRESSES if argument == "address" and "registered" not in name else ODD:
            if argument != "listener" or not callable(value):  # what a listener raises is its own
                yield argument, value


# What errors call an argument, where it is not its own name that they tell.
ALSO = {
    "name": {"tenant"}, "to": {"name", "tenant"}, "demand": {"name", "tenant"}, "ids": {"block", "blocks"},
    "host_ids": {"ids", "block", "blocks"}, "streamed": {"ids", "block"}, "nbytes": {"bytes"}, "stream": {"native"},
    "host_budget": {"device"},
}  # fmt: skip


def named(error: remap.Error, argument: str, value: Any) -> bool:
    """Whether it tells which argument is wrong, and the value."""
    fields = error.fields
    told = {*fields, *(str(fields[each]) for each in ("field", "name") if each in fields)}
    whole = fields.keys() == {"field", "value"} and fields["field"] == argument  # else the value is one inside of it
    same = not whole or fields["value"] is value or fields["value"] == value
    return same and bool(told & {argument, *ALSO.get(argument, ())})


def bare(name: str) -> Iterator[str]:
    """What the call raised that is no typed error or does not name the argument, with each odd one in turn. What was refused
    left the session as it was."""
    world = make_world()
    try:
        for argument, value in draws(name):
            if world.session.closed:
                world = make_world()
            made, right = CALLS[name]
            given = {each: what(world) if callable(what) else what for each, what in right.items()}
            before = world.session.snapshot()
            given[argument] = value
            call, tried = made(world), f"{name}({argument}={_short(value)})"
            try:
                call(**given)
            except remap.Error as error:
                str(error), repr(error)
                strict = isinstance(error, remap.InvalidArgument) and not name.startswith("schedule.")
                if strict and not named(error, argument, value):
                    yield f"{tried} is refused without its name or value: {_short(error.fields)}"
                if not world.session.closed and world.session.snapshot() == before:
                    continue  # the world is as it was: another value can be tried in it
                yield f"{tried} changed the session and raised {type(error).__name__}: {str(error)[:100]}"
            except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
                yield f"{tried}: {type(error).__name__}: {str(error)[:100]!r}"
            world.session.close()
    finally:
        world.session.close()


def _short(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:
        return "a number of 5000 digits"
