# SPDX-License-Identifier: Apache-2.0
"""The policies that a simulation can compare, by name. Pure.

    recompute     KV of the size that the reservation leaves; requests that do not fit are preempted and recomputed (vLLM)
    swap          the same, but preempted requests keep their KV in host memory (vLLM V0's swapping, whole requests)
    pie           KV of some layers lies in host memory and is swapped layer by layer, both ways; adaptive expansion (Pie);
                  "pie:1.6": a fixed expansion
    static:X      a fixed X of the layers (default 10 %) is streamed from the start, as vLLM's prefetch offloader; "static:6" or
                  "static:10%"
    kv-pool       unused KV of any tenant is shared, weights stay (kvcached); "kv-pool+swap": and preempted requests keep
                  their KV in host memory. The strongest alternatives: what weights add is beyond these
    remap         the production controller with all donors: unused KV of any tenant is shared, KV of paused and preempted
                  requests goes to host memory, and weights are lent and streamed
    remap:weights weights alone: every reservation is its tenant's own, nothing is swapped (what Oneiros has)
    remap:A       any of its ablations (below), or settings of Knobs: "remap:selection=slices+buffers=2"
    sleep         recompute; one model is awake at a time, whole, with all memory that the others do not need while they sleep;
                  weights come and go over the link when turns change (vLLM's sleep mode, level 1). For turns only. "sleep+swap":
                  and KV of paused and preempted requests goes to host memory
    ideal         recompute with six times the memory: what memory is worth. It cannot be chosen; the others are
                  compared with it (`remap_serve.sim.ideal`)

A name may carry several settings, joined by "+", which are set from left to right: "remap:uniform+lru",
"remap:weights+pool" (KV is pooled again, but not swapped).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from remap.config import Knobs
from remap.errors import InvalidArgument
from remap.policy.near_names import meant, nearest

__all__ = [
    "ABLATIONS",
    "IDEAL_MEMORY",
    "OURS",
    "POLICIES",
    "SLEEP",
    "SLEEP_AND_SWAP",
    "UNBOUNDED",
    "UNUSED_KV",
    "UNUSED_KV_AND_SWAP",
    "WEIGHTS_ONLY",
    "Policy",
    "find",
    "known",
]

UNUSED_KV, UNUSED_KV_AND_SWAP = "kv-pool", "kv-pool+swap"
"""Names: KV shared between models, weights where they are; and the same with KV in host memory."""

SLEEP, SLEEP_AND_SWAP = "sleep", "sleep+swap"
"""Names: whole models put to sleep and woken; and KV of paused and preempted requests in host memory, which sleep mode loses."""

OURS, WEIGHTS_ONLY = "remap", "remap:weights"
"""Names: the default, all donors; and weights alone, every reservation its tenant's own."""

UNBOUNDED = 1e6
"""As slowdown: demand decides alone."""

IDEAL_MEMORY = 6
"""How many times the memory "ideal" has. No load of this project preempts with it; a result's `preemptions` say so."""


@dataclass(frozen=True)
class Policy:
    """How memory is managed. kind: "recompute", "swap", "pie", "static", "sleep" or "remap".

    controller: settings of Knobs that are not its defaults. static: layers, or a share of them below 1; of Pie the
    expansion, 0 if it is adaptive. pooled: the
    share of each tenant's KV reservation that is its own; the rest is free for the tenant that needs it first. partial: see
    `Session.activate`. Both may be given as settings: "remap:pooled=0.25+partial=0.5". memory: how many times the
    setup's memory it has (`Setup.times`). whole: `Setup.whole`: the most that lending between tenants in turns could reach, if
    the link were infinitely fast. stream: complete blocks of running requests stream from host memory, layer by layer.
    manager: of (session, told of blocks that have moved), what engines ask instead of the session: somebody else's controller.
    pie: of Pie, what makes passes, of (clock, machine, model, cost, pool), and the engine's class; None: the closed form.
    """

    name: str
    about: str
    kind: str
    controller: Mapping[str, Any] = field(default_factory=dict)
    static: float = 0.0
    pooled: float = 1.0
    partial: bool | float | None = None
    swap: bool = False
    stream: bool = False
    memory: int = 1
    whole: bool = False
    manager: Callable[[Any, Callable[[Mapping[str, Mapping[int, int]]], None]], Any] | None = None
    pie: tuple[Callable[..., Any], Any] | None = None

    @property
    def swaps(self) -> bool:
        """Whether preempted requests keep their KV in host memory."""
        return self.swap or self.kind == "swap"

    @property
    def config(self) -> Knobs:
        return Knobs(**self.controller)


def _policy(name: str, about: str, kind: str, **settings: Any) -> Policy:
    return Policy(name, about, kind, **settings)


_POOLED = 0.25
"""The share of each reservation that stays its tenant's own where unused KV is shared."""
_KV_POOL: Mapping[str, Any] = MappingProxyType({"controller": {"max_layers": 0}, "pooled": _POOLED})

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        one.name: one
        for one in (
            _policy("recompute", "preempt and recompute (vLLM)", "recompute"),
            _policy("swap", "preempt, whole requests go to host memory and come back (vLLM V0)", "swap"),
            _policy("pie", "KV of some layers in host memory, swapped both ways, adaptive (Pie)", "pie"),
            _policy(
                "static", "a fixed share of the layers streamed from the start (default 10 %)", "static", static=0.1
            ),
            _policy(UNUSED_KV, "KV shared between models, weights stay (kvcached)", "remap", **_KV_POOL),
            _policy(
                UNUSED_KV_AND_SWAP, "the same, and preempted requests go to host memory", "remap", **_KV_POOL, swap=True
            ),
            _policy(
                OURS, "the production controller: KV and weights of all tenants", "remap", pooled=_POOLED, swap=True
            ),
            _policy(SLEEP, "whole models sleep and wake, one at a time; recompute", "sleep", pooled=_POOLED),
            _policy(
                SLEEP_AND_SWAP,
                "the same, and KV of paused and preempted requests goes to host memory",
                "sleep",
                pooled=_POOLED,
                swap=True,
            ),
            _policy("ideal", "recompute with six times the memory", "recompute", memory=IDEAL_MEMORY),
            _policy(
                "whole",
                "recompute; the model that has the turn has all memory, and switching costs nothing",
                "recompute",
                whole=True,
            ),
        )
    }
)

ABLATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        # The paper's choices: evenly spaced layers, the most recently used donor first. All of it: "remap:weights+oneiros".
        "oneiros": (
            "evenly spaced layers, MRU, two buffers",
            {"selection": "uniform", "policy": "mru", "buffers": 2, "partial": True},
        ),
        "uniform": ("evenly spaced layers", {"selection": "uniform"}),
        "nested": ("nested sets of layers (the default)", {"selection": "nested"}),
        "slices": ("a slice of every layer", {"selection": "slices"}),
        "auto": ("the selection of least stall", {"selection": "auto"}),
        "single": ("one ring buffer, m = alpha + 1", {"buffers": 1}),
        "double": ("two ring buffers, m = alpha + 2", {"buffers": 2}),
        "no-reversion": ("layers never come home", {"reversion": False}),
        "eager-reversion": ("a layer comes home as soon as there is room", {"contention": 1e6, "dwell": 1}),
        "uncapped": ("no bound on the stall", {"slowdown": UNBOUNDED}),
        "mru": ("the most recently used inactive tenant gives first", {"policy": "mru"}),
        "lru": ("the least recently used one", {"policy": "lru"}),
        "self": ("no tenant gives layers to another", {"lends": False}),
        # The donors one by one: without words all of them.
        "weights": (
            "every KV reservation is its tenant's own and nothing is swapped",
            {"pooled": 1.0, "swap": False, "stream": False},
        ),
        "pool": ("three quarters of every KV reservation are shared", {"pooled": _POOLED}),
        "swap": ("preempted requests keep their KV in host memory", {"swap": True}),
        "stream": (
            "they do, and complete blocks of running ones stream from there, layer by layer",
            {"swap": True, "stream": True},
        ),
        "preempt": ("what lies in a waking tenant's pages is preempted, not streamed around", {"partial": False}),
    }
)
_SHARES = ("partial", "pooled")
_OWN = (*_SHARES, "swap", "stream")
"""Settings that are the simulation's, not the controller's."""
_TYPES = {one.name: one.type for one in fields(Knobs)}


def known() -> tuple[str, ...]:
    """All names, ablations included."""
    return (*POLICIES, *(f"remap:{name}" for name in ABLATIONS))


def find(name: str) -> Policy:
    """The policy of this name. Raises InvalidArgument that lists the known ones, or names the setting that is wrong."""
    base, _, rest = name.partition(":")
    policy = POLICIES.get(base)
    if policy is None or (rest and base not in ("static", "remap", "pie")):
        raise InvalidArgument(
            f"no policy {name!r}{meant(nearest(name, known()))}; there are {', '.join(known())}, static:6, static:10%, "
            "pie:1.6, and remap:SETTING=VALUE; "
            "nothing was run",
            policy=name,
        )
    if not rest:
        return policy
    if base == "static":
        return replace(policy, name=name, static=_layers(name, rest))
    if base == "pie":
        return replace(policy, name=name, static=_expansion(name, rest))
    controller: dict[str, Any] = {}
    own: dict[str, Any] = {}
    abouts = []
    for part in rest.split("+"):
        setting, equals, text = part.partition("=")
        if setting in _SHARES and equals:
            own[setting] = _share(name, setting, text)
            abouts.append(part)
        elif equals:
            controller[setting] = _value(name, setting, text)
            abouts.append(part)
        elif part in ABLATIONS:
            about, settings = ABLATIONS[part]
            for setting, value in settings.items():
                (own if setting in _OWN else controller)[setting] = value
            abouts.append(about)
        else:
            raise InvalidArgument(
                f"remap has no ablation {part!r}; there are {', '.join(ABLATIONS)}, and SETTING=VALUE of "
                f"{', '.join(sorted(_TYPES))}; nothing was run",
                policy=name,
                ablation=part,
            )
    Knobs(**controller)  # refuses values out of range
    return replace(policy, name=name, about="; ".join(abouts), controller=controller, **own)


def _share(name: str, setting: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9 or (setting == "pooled" and not 0 < value <= 1):
        raise InvalidArgument(
            f"{setting} takes a share, as {setting}=0.25, got {text!r} in {name!r}; nothing was run", policy=name
        )
    return value


def _layers(name: str, text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0 < value < (1 if text.endswith("%") else 1000) or (not text.endswith("%") and value != int(value)):
        raise InvalidArgument(
            f"static takes a number of layers or a percentage below 100, as static:6 or static:10%, got {name!r}; nothing "
            "was run",
            policy=name,
        )
    return value


def _expansion(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 10:
        raise InvalidArgument(
            f"pie takes an expansion from 1 to 10, as pie:1.6, got {name!r}; nothing was run", policy=name
        )
    return value


def _value(name: str, setting: str, text: str) -> Any:
    if setting not in _TYPES:
        raise InvalidArgument(
            f"the controller has no setting {setting!r}; there are {', '.join(sorted(_TYPES))}; nothing was run",
            policy=name,
            setting=setting,
        )
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
