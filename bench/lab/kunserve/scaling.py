"""How long planning takes on this machine, and how many messages a change is, for 8 to 1,024 instances."""

from __future__ import annotations

import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from bench.lab.kunserve.twin.setup import CLUSTER_A

from remap_serve.cluster.control import Control, GroupPolicy
from remap_serve.cluster.messages import (
    BringHome,
    Commit,
    Description,
    Fingerprint,
    InstanceReport,
    Joined,
    PlacementAsked,
    Prepare,
    Prepared,
    Recover,
    Reported,
    Tick,
)
from remap_serve.policy.cluster import drop, restore
from remap_serve.policy.cluster.placement import Instance, InstanceLoad, alone

__all__ = ["SIZES", "measure"]

SIZES = (8, 16, 64, 256, 1024)
REPEATS = 5
_PERIOD_S = 0.2


def _median(call: Callable[[], object]) -> list[float]:
    """Median, least and most of REPEATS calls, in ms."""
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(found), min(found), max(found)]


def _load(number: int, waiting: int) -> InstanceLoad:
    """Full, and so many requests wait; not two instances are quite the same."""
    tokens = CLUSTER_A.capacity - 64 * (number % 7)
    return InstanceLoad(tokens // 6000, tokens, (6000,) * waiting)


def _one(instances: int) -> dict[str, Any]:
    hardware = CLUSTER_A
    names = [f"i{number}" for number in range(instances)]
    here = alone(
        hardware.model,
        tuple(Instance(name, hardware.memory_bytes, _load(number, 6)) for number, name in enumerate(names)),
    )
    need = sum(group.load.wanted for group in here.groups) - instances * hardware.capacity
    found: dict[str, Any] = {
        "instances": instances,
        "greedy_ms": _median(lambda: drop.greedy(here, need, hardware.network)),
        "plan_ms": _median(lambda: drop.plan(here, need, hardware.network)),
    }
    after = drop.plan(here, need, hardware.network).placement
    found["groups"] = len(after.groups)
    back = restore.all_alone(after)
    found["copies_ms"] = _median(lambda: restore.copies(after, back, hardware.network))
    found |= _messages(names)
    return found


def _messages(names: list[str]) -> dict[str, Any]:
    """A whole change there and back under control: messages of each kind but reports, and how long a tick takes."""
    hardware, now = CLUSTER_A, 0.0
    control = Control(hardware.model, hardware.network, GroupPolicy("remap"), timeout_s=60.0)
    fingerprint = Fingerprint(hardware.model_name, "bfloat16", "", len(hardware.model.layers), "", 64)
    epochs: dict[str, int] = {}
    arrived: dict[str, frozenset[int]] = {}
    full = True
    messages: Counter[str] = Counter()
    ticks: list[float] = []

    def tell(event: Any) -> None:
        commands = list(control.on(event, now))
        if not isinstance(event, (Reported, Tick, Joined)):
            messages[type(event).__name__] += 1
        for command in commands:
            messages[type(command).__name__] += 1
        for command in commands:
            match command:
                case Recover(instance, epoch) | Commit(instance, epoch):
                    epochs[instance] = epoch
                    arrived.pop(instance, None)
                case Prepare(instance, plan):
                    tell(Prepared(instance, plan.epoch))
                case BringHome(instance, _, copies):
                    arrived[instance] = frozenset(each.layer for each in copies if each.instance == instance)

    for name in names:
        tell(Joined(Description(name, fingerprint, hardware.model, hardware.memory_bytes)))
    for period in range(40):
        now = period * _PERIOD_S
        full = period < 10
        for number, name in enumerate(names):
            load = _load(number, 6) if full and control.members(name)[:1] == (name,) else InstanceLoad()
            tell(Reported(InstanceReport(name, epochs[name], "serving", load, (), 0, arrived.get(name, frozenset()))))
        begin = time.perf_counter()
        tell(Tick())
        ticks.append(1e3 * (time.perf_counter() - begin))
    begin = time.perf_counter()
    tell(PlacementAsked("x", 6000))
    return {
        "messages": sum(messages.values()) - 2 - messages["Recover"],
        "kinds": dict(messages),
        "quiet_tick_ms": [statistics.median(ticks[-5:]), min(ticks[-5:]), max(ticks[-5:])],
        "dearest_tick_ms": max(ticks),
        "route_ms": 1e3 * (time.perf_counter() - begin),
        "alone_again": len(control.groups) == len(names),
    }


def measure(quick: bool = False) -> dict[str, Any]:
    """Of each size, with the machine that it was measured on."""
    return {
        "machine": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}",
        "repeats": REPEATS,
        "sizes": [_one(size) for size in (SIZES[:2] if quick else SIZES)],
    }
