"""When to turn layers into KV blocks and when to turn them back: the policy for one tenant, without a clock or memory.

Once per scheduler iteration `Controller.decide(view, demand)` compares what the engine wants with what is free:

    deficit = demand + L - free                      L = headroom in blocks (low watermark)
    deficit > 0   grow: free pages first, then as many layers at once as the rest needs, at most what can be hidden
    otherwise     shrink by one layer, if free >= demand + L + b1 + sigma  *and* the accrued credit pays for a reload

b1 is what one layer gives, sigma the hysteresis. Each step in which the first condition holds earns what streaming the
layer costs per pass, S(alpha) - S(alpha - 1) + kappa T_T, as a share of one reload, T_T + T_map; at 1 the layer moves
back in (ski rental: at most twice the cost of knowing the future). A step in which it fails forfeits the credit.
Source: Oneiros, algorithm 1, whose version only grows and has neither hysteresis nor a bound on the stall.

No thrashing (tests/python/test_controller.py checks each claim against arbitrary demand):

1. Let G be the largest credit of one step and s = max(dwell, ceil(1 / G)). A shrink consumes s steps of credit, which
   were consecutive and came after the last change, because every shrink, growth and failed condition resets it. The
   steps that different shrinks consume are disjoint, so T steps hold at most T / s shrinks. Layers grown <= layers
   that may be remapped + layers shrunk, since alpha never exceeds its cap; so growths are bounded as well.
2. After a shrink free >= demand + L + sigma. Growing needs demand' + L' > free'. While usable blocks change only by
   our decisions, free + live is constant, so (live' + demand' + L') - (live + demand + L) > sigma. L' is held at or
   below L until live + demand has risen by more than sigma (the "guard"): growing again takes a *demand* that rose by
   more than sigma, whatever its variation did to L.
3. At constant demand L never rises: growth happens while the deficit is positive and alpha below its cap, which is
   finitely often; after the last one only shrinks follow, at most alpha of them, and by 2 no growth follows a shrink.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from remap.errors import InvalidArgument

__all__ = ["NONE", "Controller", "ControllerConfig", "Decision", "Demand", "LayerSeconds", "TenantView"]


class LayerSeconds(Protocol):
    """Seconds per layer: `remap.cost.LayerTimes`, or anything hashable and immutable like it."""

    @property
    def compute_s(self) -> tuple[float, ...]: ...
    @property
    def transfer_s(self) -> tuple[float, ...]: ...


def _refuse(name: str, value: object, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} must be {expected}, got {value!r}; nothing changed; correct {name}", field=name, value=value
    )


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


@dataclass(frozen=True)
class Demand:
    """KV blocks that the engine wants to be able to allocate now, beyond those it holds. An int >= 0.

    free: how many its own allocator has free; needed from engines that have one (`kv.subscribe(..., external=True)`), since
    the pool sees all their blocks as held. Others leave it out.
    """

    blocks: int
    free: int | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.blocks):
            raise _refuse("blocks", self.blocks, "an int of at least 0")
        if self.free is not None and not _is_count(self.free):
            raise _refuse("free", self.free, "an int of at least 0, or None")


@dataclass(frozen=True)
class TenantView:
    """What the controller sees of a tenant at one epoch. Counts of layers and of KV blocks; seconds in `times`.

    For an engine with its own allocator, free_blocks and live_blocks are that allocator's, not the pool's (which counts
    every block that the engine holds as live). blocks_per_layer is b1; shrink_blocks is how many blocks the next
    shrink by one layer takes away at most, when it is known exactly (otherwise ceil(b1)).
    """

    layers: int
    remapped: int  # alpha
    buffers: int  # beta; of no meaning while alpha is 0
    streamable: int  # layers that may be streamed: alpha + beta of them at most
    usable_blocks: int
    free_blocks: int
    live_blocks: int
    free_pool_blocks: int  # blocks obtainable from the arena's free pages, without remapping
    blocks_per_layer: float
    max_remapped: int  # the cap by structure, layers - buffers
    times: LayerSeconds | None  # None: not measured yet
    epoch: int
    max_blocks: int | None = None  # size of the KV region; None: no limit
    shrink_blocks: int | None = None
    buffers_may_change: bool = False  # whether KV pages allow another number of ring buffers while alpha > 0

    def __post_init__(self) -> None:
        if not self.blocks_per_layer > 0:
            raise _refuse("blocks_per_layer", self.blocks_per_layer, "positive")
        names = ("layers", "remapped", "buffers", "streamable", "usable_blocks", "free_blocks", "live_blocks")
        # Two comparisons for the usual case: a view is made in every step.
        least = min(self.remapped, self.buffers, self.streamable, self.usable_blocks, self.free_blocks)
        if min(least, self.live_blocks, self.free_pool_blocks, self.max_remapped, self.layers - 1) < 0:
            for name in (*names, "free_pool_blocks", "max_remapped"):
                if getattr(self, name) < (name == "layers"):
                    raise _refuse(name, getattr(self, name), "at least 1" if name == "layers" else "at least 0")
        if self.remapped and (not self.buffers or self.remapped + self.buffers > self.layers):
            raise _refuse("buffers", self.buffers, f"from 1 to {self.layers - self.remapped} (layers - remapped)")


@dataclass(frozen=True)
class ControllerConfig:
    """The knobs. Raises InvalidArgument (field) for values out of range.

    slowdown: the stall allowed per pass, as a share of its computation. headroom_blocks: L; None derives it from the
    demand, as twice the moving average of its absolute change per step. hysteresis_blocks: sigma; None takes the larger
    of that average and half a layer. contention: kappa, what a hidden copy costs the computation, as a share of the
    copy's time; with 0, layers whose streaming is hidden never move back. map_s: T_map, seconds to map a layer back.
    dwell: steps at least from any change to a shrink. cap: most layers ever remapped. smoothing: weight of the newest
    step in the moving average.
    """

    slowdown: float = 0.02
    headroom_blocks: int | None = None
    hysteresis_blocks: int | None = None
    contention: float = 0.1
    map_s: float = 1e-3
    dwell: int = 4
    cap: int | None = None
    smoothing: float = 0.125

    def __post_init__(self) -> None:
        for name in ("slowdown", "contention", "map_s"):
            if not _is_amount(getattr(self, name)):
                raise _refuse(name, getattr(self, name), "a finite number of at least 0")
        for name in ("headroom_blocks", "hysteresis_blocks", "cap"):
            if getattr(self, name) is not None and not _is_count(getattr(self, name)):
                raise _refuse(name, getattr(self, name), "an int of at least 0, or None")
        if not _is_count(self.dwell, 1):
            raise _refuse("dwell", self.dwell, "an int of at least 1")
        if not (_is_amount(self.smoothing) and 0 < self.smoothing <= 1):
            raise _refuse("smoothing", self.smoothing, "a number above 0 and at most 1")


@dataclass(frozen=True)
class Decision:
    """What to do now. `remapped` and `buffers` are the targets; `unmet_blocks` the demand that stays unmet after it.

    action "grow" may leave `remapped` as it is, when free pages suffice. predicted_stall_s is per pass, at the target;
    0 while nothing has been measured.
    """

    action: Literal["none", "grow", "shrink"]
    free_pool_blocks_to_take: int
    remapped: int
    buffers: int
    reason: str
    predicted_stall_s: float
    unmet_blocks: int


NONE = Decision("none", 0, 0, 0, "demand is met and nothing is remapped", 0.0, 0)
"""The decision of almost every step: one shared object, so that a step with nothing to do allocates nothing."""


class Controller:
    """The policy of one tenant. `decide` is called once per pass; its state is the credit and the demand's average.

    bound: times -> (most layers that can be remapped within the slowdown, buffers), `schedule.max_remapped`.
    stall: (times, remapped, buffers) -> seconds per pass. Both are called once per distinct question while `times`
    stays equal. estimate: view -> (remapped, buffers) allowed before anything is measured; without it, one layer.
    """

    def __init__(
        self,
        config: ControllerConfig | None = None,
        *,
        bound: Callable[[LayerSeconds], tuple[int, int]],
        stall: Callable[[LayerSeconds, int, int], float],
        estimate: Callable[[TenantView], tuple[int, int]] | None = None,
    ) -> None:
        self.config = config or ControllerConfig()
        self._bound, self._stall, self._estimate = bound, stall, estimate
        self._wanted: int | None = None  # live + demand of the last step: what the tenant needs in all
        self._variation = 0.0
        self._guard: tuple[float, int] | None = None  # (live + demand up to which, L that) is not exceeded
        self._credit = 0.0  # share of one reload
        self._steps = 0  # for which credit has been accruing
        self._times: LayerSeconds | None = None
        self._limit: tuple[int, int] | None = None
        self._stalls: dict[tuple[int, int], float] = {}
        self._kept: dict[tuple[int, int, bool], Decision] = {}
        self._back: dict[tuple[int, int], tuple[int, float, float]] = {}

    @property
    def credit(self) -> float:
        """The share of one layer's reload that streaming it has cost since the last change; it shrinks at 1."""
        return self._credit

    @property
    def variation(self) -> float:
        """Moving average of |change of live + demand| per step, in blocks."""
        return self._variation

    def decide(self, view: TenantView, demand: Demand) -> Decision:
        """The decision for this step. Calls nothing but the injected functions; changes nothing outside itself."""
        config = self.config
        blocks = demand.blocks
        wanted = view.live_blocks + blocks
        if self._wanted is not None:
            self._variation += config.smoothing * (abs(wanted - self._wanted) - self._variation)
        self._wanted = wanted
        headroom = config.headroom_blocks
        if headroom is None:
            headroom = int(2.0 * self._variation + 0.5)
        if self._guard is not None:
            if wanted > self._guard[0]:
                self._guard = None
            else:
                headroom = min(headroom, self._guard[1])
        deficit = blocks + headroom - view.free_blocks
        if deficit > 0:
            return self._grow(view, blocks, headroom, deficit)
        if view.remapped == 0:
            self._forfeit()
            return NONE
        return self._shrink_or_keep(view, blocks, headroom)

    # -- growing ---------------------------------------------------------------------------------------------------

    def _grow(self, view: TenantView, demand: int, headroom: int, deficit: int) -> Decision:
        self._forfeit()
        self._learn(view.times)
        room = deficit if view.max_blocks is None else max(0, min(deficit, view.max_blocks - view.usable_blocks))
        taken = min(room, view.free_pool_blocks)
        alpha, buffers, why = view.remapped, view.buffers, ""
        if room > taken:
            alpha, buffers, why = self._target(view, view.remapped + math.ceil((room - taken) / view.blocks_per_layer))
        gained = taken + int((alpha - view.remapped) * view.blocks_per_layer)
        if view.max_blocks is not None:
            gained = min(gained, max(0, view.max_blocks - view.usable_blocks))
        unmet = max(0, demand - view.free_blocks - gained)
        grows = taken > 0 or alpha > view.remapped
        stall = self._stall_of(view.times, alpha, buffers)
        need = f"{demand} blocks wanted and {headroom} kept in reserve, {view.free_blocks} free"
        if grows:
            self._guard = None
            reason = (
                f"{need}: take {taken} from free pages and remap {alpha - view.remapped} more layers, {alpha} in all, "
                f"stalling {stall * 1e3:.3g} ms a pass"
            )
        elif room < deficit and room == 0:
            reason = f"{need}: the KV region is full at {view.usable_blocks} blocks"
        else:
            reason = f"{need}: no free pages and no more layers than the present {alpha} can be remapped"
        if unmet:
            reason += f"; {unmet} blocks stay unmet"
        return Decision("grow" if grows else "none", taken, alpha, buffers, reason + why, stall, unmet)

    def _target(self, view: TenantView, want: int) -> tuple[int, int, str]:
        """(alpha, beta, remark): the alpha >= want nearest to it that is allowed, else the largest allowed below it.

        alpha's stall is not monotone (an odd number of streamed layers in two fixed buffers waits longer), so the
        bound on the largest alpha does not vouch for those below it: each is looked at.
        """
        present, times = view.remapped, view.times
        if times is None:
            most, best = self._estimate(view) if self._estimate is not None else (1, max(view.buffers, 1))
            why = f" (no measurement yet: at most {most} layers)"
        else:
            if self._limit is None:
                self._limit = self._bound(times)
            (most, best), why = self._limit, ""
        choices = [view.buffers] if present else [best]
        if present and view.buffers_may_change and best != view.buffers:
            choices.append(best)
        found = (present, view.buffers)
        for buffers in choices:
            top = min(most, view.max_remapped, view.streamable - buffers, view.layers - buffers)
            if self.config.cap is not None:
                top = min(top, self.config.cap)
            for alpha in (*range(want, top + 1), *range(min(want - 1, top), found[0], -1)):
                if times is None or self._stall_of(times, alpha, buffers) <= self._allowed(times):
                    found = max(found, (alpha, buffers), key=lambda pair: pair[0])
                    break
            if found[0] >= want:
                break
        return (*found, why)

    # -- shrinking -------------------------------------------------------------------------------------------------

    def _shrink_or_keep(self, view: TenantView, demand: int, headroom: int) -> Decision:
        self._learn(view.times)
        alpha, buffers, times = view.remapped, view.buffers, view.times
        step = self._back.get((alpha, buffers))
        if step is None:
            step = self._back[alpha, buffers] = self._step_back(times, alpha, buffers)
        fewer, saved, income = step
        lost = math.ceil((alpha - fewer) * view.blocks_per_layer)
        if fewer == alpha - 1 and view.shrink_blocks is not None:
            lost = view.shrink_blocks
        sigma = self.config.hysteresis_blocks
        if sigma is None:
            sigma = math.ceil(max(self._variation, 0.5 * view.blocks_per_layer))
        if view.free_blocks < demand + headroom + lost + sigma:
            self._forfeit()
            return self._keep(view, False)
        self._credit += income
        self._steps += 1
        # The tolerance keeps ten tenths from needing an eleventh.
        if self._credit < 1.0 - 1e-9 or self._steps < self.config.dwell:
            return self._keep(view, True)
        steps = self._steps
        self._forfeit()
        self._guard = (view.live_blocks + demand + sigma, headroom)
        stall = self._stall_of(times, fewer, buffers)
        reason = (
            f"{view.free_blocks} blocks free, {demand} wanted and {headroom} kept in reserve for {steps} steps: "
            f"reload {alpha - fewer} layers, {fewer} stay remapped, saving {saved * 1e3:.3g} ms a pass"
        )
        return Decision("shrink", 0, fewer, buffers, reason, stall, 0)

    def _step_back(self, times: LayerSeconds | None, alpha: int, buffers: int) -> tuple[int, float, float]:
        """(alpha after the next shrink, stall seconds a pass that it saves, credit that a step earns towards it).

        It is one layer less; or, where that would stall more than now *and* than allowed, the next that does not.
        """
        fewer = alpha - 1
        if times is None:
            return fewer, 0.0, self.config.contention  # as if T_map were 0 and all copies hidden
        stall = self._stall_of(times, alpha, buffers)
        most = max(stall, self._allowed(times))
        while fewer > 0 and self._stall_of(times, fewer, buffers) > most:
            fewer -= 1
        saved = max(0.0, stall - self._stall_of(times, fewer, buffers))
        copy = (alpha - fewer) * math.fsum(times.transfer_s) / len(times.transfer_s)
        reload = copy + self.config.map_s
        return fewer, saved, (saved + self.config.contention * copy) / reload if reload > 0 else 1.0

    def _keep(self, view: TenantView, earning: bool) -> Decision:
        key = (view.remapped, view.buffers, earning)
        kept = self._kept.get(key)
        if kept is None:
            why = "reloading one is not paid for yet" if earning else "reloading one would leave too few free blocks"
            stall = self._stall_of(view.times, view.remapped, view.buffers)
            reason = f"demand is met, and {view.remapped} layers stay remapped through {view.buffers} buffers: {why}"
            kept = self._kept[key] = Decision("none", 0, view.remapped, view.buffers, reason, stall, 0)
        return kept

    # -- inside ----------------------------------------------------------------------------------------------------

    def _forfeit(self) -> None:
        self._credit = 0.0
        self._steps = 0

    def _learn(self, times: LayerSeconds | None) -> None:
        """Forget what was computed for other times. Equal times in a new object are the same times."""
        if times is not self._times and times != self._times:
            self._limit = None
            self._stalls.clear()
            self._kept.clear()
            self._back.clear()
        self._times = times

    def _allowed(self, times: LayerSeconds) -> float:
        # The share of a pass that schedule.max_remapped forgives for rounding is forgiven here too (twice).
        return (self.config.slowdown + 2e-9) * math.fsum(times.compute_s)

    def _stall_of(self, times: LayerSeconds | None, alpha: int, buffers: int) -> float:
        if times is None or alpha == 0:
            return 0.0
        stall = self._stalls.get((alpha, buffers))
        if stall is None:
            stall = self._stalls[alpha, buffers] = self._stall(times, alpha, buffers)
        return stall
