# SPDX-License-Identifier: Apache-2.0
"""The settings, as frozen values. Pure."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Literal

from remap.errors import InvalidArgument
from remap.moved import renamed
from remap.sizes import MOST_BYTES, shown

__all__ = ["POLICIES", "SELECTIONS", "Config", "Knobs", "invalid", "is_amount", "is_count"]

POLICIES = ("priority", "mru", "lru", "expected_next_use")
SELECTIONS = ("nested", "uniform", "slices", "auto")


def invalid(name: str, value: object, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} must be {expected}, got {shown(value)}; nothing changed; correct {name}", field=name, value=value
    )


def is_count(value: object, least: int = 0) -> bool:
    """Whether it is an int from `least` on, and one that the core can count: so it can be made a float as well."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_BYTES


def is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


@renamed(headroom_blocks="reserve_blocks", cap="max_layers")
@dataclass(frozen=True)
class Config:
    """The operator's settings. Raises InvalidArgument (field) for values out of range.

    slowdown: the stall allowed per pass, as a share of its computation.
    reserve_blocks: blocks kept free beyond the demand; None: derived from the demand.
    max_layers: the most layers ever remapped; None: as many as hide.
    tbt_s: target for the time between two tokens, in seconds; None: no target. No growth lifts the predicted time of a
    decode pass that reads all blocks above it; requests wait instead.
    ttft_s: target for the time from a request's arrival to its first token, in seconds; None: no target. Requests wait for
    blocks that tbt_s refuses only while they can still meet it. An idle model gives only layers that can be back in time.
    lends: whether other tenants may get this tenant's unused KV and its layers.
    """

    slowdown: float = 0.02
    reserve_blocks: int | None = None
    max_layers: int | None = None
    ttft_s: float | None = None
    tbt_s: float | None = None
    lends: bool = True

    def __post_init__(self) -> None:
        _refuse_others(self, "lends", bool, "True or False")
        if not is_amount(self.slowdown):
            raise invalid("slowdown", self.slowdown, "a finite number of at least 0")
        for name in ("ttft_s", "tbt_s"):
            value = getattr(self, name)
            if value is not None and not (is_amount(value) and value > 0):
                raise invalid(name, value, "a finite number of seconds above 0, or None")
        _require_counts(self, "reserve_blocks", "max_layers")


@renamed(headroom_blocks="reserve_blocks", cap="max_layers", ttft_budget_s="reload_s")
@dataclass(frozen=True)
class Knobs(Config):
    """All settings, for ablations and experts (`remap.advanced`).

    hysteresis_blocks: unused blocks beyond the reserve at which layers begin to come home; None: the larger of the
    demand's variation and half a layer.
    contention: the cost of a hidden copy to the computation, as a share of the copy's time. With 0, layers whose
    streaming is hidden never move back.
    map_s: seconds to map a layer back.
    dwell: the fewest steps from any change to a shrink.
    smoothing: weight of the newest step in the moving average.
    policy: which inactive tenant gives first: "priority" (the one of lowest priority, then the one needed last), "mru",
    "lru" or "expected_next_use" (see remap.policy.donors.ranking).
    min_idle: how many times what its reload is worth an inactive tenant must have been idle before it gives.
    selection: which layers an active tenant streams: "nested" (growing and shrinking reload the least), "uniform"
    (Oneiros section 5.2), "slices" (the same share of every layer) or "auto" (by computed period).
    buffers: ring buffers of an active tenant: 1, 2 or "auto" (the number that lets it give more).
    reload_s: seconds by which reloading may delay the first prefill of an idle model that gave layers, if it has no
    target `ttft_s`. With 0 the model gives only as much as that prefill hides, which is next to nothing for a short one.
    reversion: whether layers ever come home by themselves (Oneiros section 7.6.1).
    """

    hysteresis_blocks: int | None = None
    contention: float = 0.1
    map_s: float = 1e-3
    dwell: int = 4
    smoothing: float = 0.125
    policy: str = "priority"
    selection: str = "nested"
    buffers: int | Literal["auto"] = "auto"
    reversion: bool = True
    min_idle: float = 1.0
    reload_s: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("policy", POLICIES), ("selection", SELECTIONS), ("buffers", ("auto", 1, 2))):
            if getattr(self, name) not in allowed or isinstance(getattr(self, name), bool):
                raise invalid(name, getattr(self, name), f"one of {allowed}")
        _refuse_others(self, "reversion", bool, "True or False")
        for name in ("contention", "map_s", "min_idle", "reload_s"):
            if not is_amount(getattr(self, name)):
                raise invalid(name, getattr(self, name), "a finite number of at least 0")
        _require_counts(self, "hysteresis_blocks")
        if not is_count(self.dwell, 1):
            raise invalid("dwell", self.dwell, "an int of at least 1")
        if not (is_amount(self.smoothing) and 0 < self.smoothing <= 1):
            raise invalid("smoothing", self.smoothing, "a number above 0 and at most 1")

    def late_s(self, prefill_s: float) -> float:
        """Seconds by which the first prefill of an idle model, which takes `prefill_s` of computation, may be late."""
        return self.reload_s if self.ttft_s is None else max(0.0, self.ttft_s - prefill_s)

    @classmethod
    def of(cls, config: Config) -> Knobs:
        """The operator's settings, with the defaults of all others."""
        return config if isinstance(config, Knobs) else cls(**asdict(config))


def _refuse_others(config: Config, name: str, kind: type, expected: str) -> None:
    if not isinstance(getattr(config, name), kind):
        raise invalid(name, getattr(config, name), expected)


def _require_counts(config: Config, *names: str) -> None:
    for name in names:
        if getattr(config, name) is not None and not is_count(getattr(config, name)):
            raise invalid(name, getattr(config, name), "an int of at least 0, or None")
