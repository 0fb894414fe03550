"""The controller's knobs, as one frozen value. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from remap.errors import InvalidArgument

__all__ = ["POLICIES", "SELECTIONS", "ControllerConfig", "is_amount", "is_count", "refuse"]

POLICIES = ("priority", "mru", "lru", "expected_next_use")
SELECTIONS = ("nested", "uniform", "slices", "auto")


def refuse(name: str, value: object, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} must be {expected}, got {value!r}; nothing changed; correct {name}", field=name, value=value
    )


def is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


@dataclass(frozen=True)
class ControllerConfig:
    """The knobs. Raises InvalidArgument (field) for values out of range.

    slowdown: the stall allowed per pass, as a share of its computation. headroom_blocks: L; None derives it from the
    demand, as twice the moving average of its absolute change per step. hysteresis_blocks: sigma; None takes the larger
    of that average and half a layer. contention: kappa, what a hidden copy costs the computation, as a share of the
    copy's time; with 0, layers whose streaming is hidden never move back. map_s: T_map, seconds to map a layer back.
    dwell: steps at least from any change to a shrink. cap: most layers ever remapped. smoothing: weight of the newest
    step in the moving average.

    Between tenants: lends: whether others may get this tenant's unused KV and its layers. policy: which inactive tenant gives
    first ("priority": the lowest one, then who is needed last; "mru", "lru", "expected_next_use": see
    remap.policy.donors.ranking). min_idle: how many times what its reload is worth an inactive tenant must have been idle
    before it gives. ttft_budget_s: by how much its first prefill may be delayed by loading what it gave; with 0 it gives only
    what that prefill hides, which is next to nothing of a short one. selection: which layers an active tenant streams:
    "nested" (growing and shrinking reload the least), "uniform" (Oneiros section 5.2), "slices" (the same share of every
    layer), "auto" (by computed period). buffers: ring buffers of an active tenant: 1, 2 or "auto", whichever lets more be
    given. reversion: whether layers ever come home by themselves (Oneiros section 7.6.1).
    """

    slowdown: float = 0.02
    headroom_blocks: int | None = None
    hysteresis_blocks: int | None = None
    contention: float = 0.1
    map_s: float = 1e-3
    dwell: int = 4
    cap: int | None = None
    smoothing: float = 0.125
    policy: str = "priority"
    selection: str = "nested"
    buffers: int | Literal["auto"] = "auto"
    reversion: bool = True
    min_idle: float = 1.0
    ttft_budget_s: float = 0.1
    lends: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (("policy", POLICIES), ("selection", SELECTIONS), ("buffers", ("auto", 1, 2))):
            if getattr(self, name) not in allowed or isinstance(getattr(self, name), bool):
                raise refuse(name, getattr(self, name), f"one of {allowed}")
        for name in ("reversion", "lends"):
            if not isinstance(getattr(self, name), bool):
                raise refuse(name, getattr(self, name), "True or False")
        for name in ("slowdown", "contention", "map_s", "min_idle", "ttft_budget_s"):
            if not is_amount(getattr(self, name)):
                raise refuse(name, getattr(self, name), "a finite number of at least 0")
        for name in ("headroom_blocks", "hysteresis_blocks", "cap"):
            if getattr(self, name) is not None and not is_count(getattr(self, name)):
                raise refuse(name, getattr(self, name), "an int of at least 0, or None")
        if not is_count(self.dwell, 1):
            raise refuse("dwell", self.dwell, "an int of at least 1")
        if not (is_amount(self.smoothing) and 0 < self.smoothing <= 1):
            raise refuse("smoothing", self.smoothing, "a number above 0 and at most 1")
