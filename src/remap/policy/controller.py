# SPDX-License-Identifier: Apache-2.0
"""When to turn layers into KV blocks and when to turn them back: each tenant's policy, without a clock or memory.

Once per scheduler iteration `Controller.decide(view, demand)` compares the engine's demand with the free blocks:

    deficit = demand + L - free                  L: the low watermark (watermark.py), held by the guard (rental.py)
    deficit > 0   grow: free pages first; then the cheapest of other tenants' unused KV, their paused KV, inactive
                  tenants' layers and active tenants' layers, the own ones included (donors/supply.py). As many at once
                  as the deficit needs, and no more than the certificate allows: stall per pass <= slowdown
    otherwise     one layer comes home, if free >= demand + L + b1 + sigma *and* its rent has paid for the reload

b1 is the blocks of one layer, sigma the hysteresis. A layer that is lent to others comes home by the same rule
(`may_return`); there the condition is that all tenants that have its pages can spare them (`spare`).
remap.policy.rental proves that this does not thrash: T steps hold at most T / max(dwell, ceil(1 / G)) reloads, where G
is the largest rent of one step; at constant demand no growth follows a shrink; growing again takes a demand that rose
by more than sigma (tests/python/test_controller.py and test_sharing_controller.py, against arbitrary demand). Layers
grown <= layers that may be remapped + layers that came home.

Source: Oneiros, section 5 and algorithm 1. The paper's version only grows, one layer a step, and has neither hysteresis
nor a bound on the stall.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

from remap.config import Knobs
from remap.policy.cost import BatchTime
from remap.policy.donors.supply import Quote, choose
from remap.policy.link import spared
from remap.policy.rental import HeadroomGuard, Rental, income
from remap.policy.views import NONE, Decision, Demand, LayerSeconds, NeedQuotes, Take, TenantView
from remap.policy.watermark import Watermark, horizon

__all__ = ["NONE", "Controller", "Decision", "Demand", "LayerSeconds", "NeedQuotes", "TenantView"]


_UNSEEN = " (no pass has waited for every layer yet, or none decoded and the demand can wait: no layer of its own is streamed)"

_UNMEASURED = (
    " (no decode pass was measured yet: until then none is streamed beside other active tenants, or with tbt_s)"
)


class Controller:
    """The policy of one tenant. The session calls `decide` once per pass, and again with the quotes that it asks for.
    Its state is the credit and the demand's average.

    bound: times -> (most layers that can be remapped within the slowdown, buffers), `schedule.max_remapped`.
    stall: (times, remapped, buffers) -> seconds per pass. Both are called once per distinct question while `times`
    stays equal. Before the first measurement one layer is allowed, or the fewest that are possible.
    possible: (remapped, buffers) -> whether the tenant can go from its present layers to such a set: unequal layers may
    be too small for the ring. The controller decides only possible sets.
    longest: (remapped, buffers) -> seconds of the longest piece that it would copy. The controller decides only what
    leaves the other active tenants' certificates as they are allowed to be (link.py).
    """

    def __init__(
        self,
        config: Knobs | None = None,
        *,
        bound: Callable[[LayerSeconds], tuple[int, int]],
        stall: Callable[[LayerSeconds, int, int], float],
        possible: Callable[[int, int], bool] | None = None,
        longest: Callable[[int, int], float] | None = None,
    ) -> None:
        self.config = config or Knobs()
        self._bound, self._stall, self._longest = bound, stall, longest
        self._possible = possible
        self._watermark = Watermark(smoothing=self.config.smoothing)
        self._guard = HeadroomGuard()
        self._batch = BatchTime()
        self._rental = Rental(self.config.dwell)
        self._headroom = 0  # L of the last step
        self._steps_ahead = 1  # the horizon of L, for `_times`
        self._times: LayerSeconds | None = None
        self._unit = "layers"
        self._order: tuple[int, ...] = ()
        self._limit: tuple[int, int] | None = None
        self._stalls: dict[tuple[int, int], float] = {}
        self._kept: dict[tuple[int, int, str], Decision] = {}
        self._back: dict[tuple[int, int, bool], tuple[int, float, float]] = {}

    @property
    def credit(self) -> float:
        """The cost of streaming one layer since the last change, as a share of its reload; at 1 it comes home."""
        return self._rental.credit

    @property
    def variation(self) -> float:
        """Moving average of |change of live + demand| per step, in blocks."""
        return self._watermark.variation

    @property
    def headroom(self) -> int:
        """L in blocks, as of the last step."""
        return self._headroom

    def decide(self, view: TenantView, demand: Demand) -> Decision | NeedQuotes:
        """The decision for this step, or the question to be asked before: `decide_with` takes the answer. Calls nothing but the
        injected functions; changes nothing outside itself."""
        blocks = demand.blocks
        wanted = view.live_blocks + blocks
        self._watermark.observe(wanted)
        headroom = self.config.reserve_blocks
        if view.times is not self._times or view.order is not self._order:
            if self.config.tbt_s is not None and view.times is not None:
                self._batch.observe(view.live_blocks, math.fsum(view.times.compute_s))
            self._learn(view)
        if headroom is None:
            headroom = self._watermark.blocks(self._steps_ahead)
        self._headroom = headroom = self._guard.clip(wanted, headroom)
        deficit = blocks + headroom - view.free_blocks
        if deficit > 0:
            beyond = self._room(view, demand, deficit)[0] - view.free_pool_blocks
            return NeedQuotes(beyond) if view.shares and beyond > 0 else self._grow(view, demand, deficit, ())
        if view.remapped == 0:
            self._rental.forfeit()
            return NONE
        if view.lends or not self.config.reversion:
            return self._keep(view, "its pages are lent" if view.lends else "reversion is off")
        return self._shrink_or_keep(view, blocks, headroom)

    def decide_with(self, view: TenantView, demand: Demand, quotes: Sequence[Sequence[Quote]]) -> Decision:
        """The decision after `NeedQuotes`, for the same demand. view: as before, but with the neighbours. quotes: the offers of
        other tenants, one list of increments per donor."""
        return self._grow(view, demand, demand.blocks + self._headroom - view.free_blocks, quotes)

    # -- growing ---------------------------------------------------------------------------------------------------

    def _room(self, view: TenantView, wanted: Demand, deficit: int) -> tuple[int, bool, bool]:
        """(blocks that growth may add, whether `tbt_s` bounds that, whether it may)."""
        patient = self._patient(view.times, wanted.waited_s)
        room = deficit if view.max_blocks is None else max(0, min(deficit, view.max_blocks - view.usable_blocks))
        useful = self._useful(view, patient)
        if useful - view.usable_blocks < room:
            return max(0, int(useful) - view.usable_blocks), True, patient
        return room, False, patient

    def _grow(self, view: TenantView, wanted: Demand, deficit: int, quotes: Sequence[Sequence[Quote]]) -> Decision:
        self._rental.forfeit()
        self._learn(view)
        demand, headroom = wanted.blocks, self._headroom
        room, waits, patient = self._room(view, wanted, deficit)
        taken = min(room, view.free_pool_blocks)
        alpha, buffers, why = view.remapped, view.buffers, ""
        takes: tuple[Take, ...] = ()
        gap = 0.0
        if room > taken:
            if any(quotes):
                alpha, buffers, takes, gap = self._share(view, room - taken, quotes, patient)
                why = "" if view.seen else _UNSEEN
            else:
                layers = (
                    room - taken
                ) / view.blocks_per_layer  # whole ones: beyond the target there is no use for the rest
                want = view.remapped + (math.floor(layers) if waits else math.ceil(layers))
                alpha, buffers, why = self._target(view, want, patient)
        gained = taken + sum(take.blocks for take in takes) + int((alpha - view.remapped) * view.blocks_per_layer)
        if view.max_blocks is not None:
            gained = min(gained, max(0, view.max_blocks - view.usable_blocks))
        unmet = max(0, demand - view.free_blocks - gained)
        grows = taken > 0 or alpha > view.remapped or bool(takes)
        stall = self._stall_of(view.times, alpha, buffers)
        need = f"{demand} blocks wanted and {headroom} kept in reserve, {view.free_blocks} free"
        if grows:
            self._guard.clear()
            sources = "".join(f", {_of_other(take)}" for take in takes)
            reason = (
                f"{need}: take {taken} from free pages{sources} and remap {alpha - view.remapped} more {view.unit}, "
                f"{alpha} in all, stalling {stall * 1e3:.3g} ms a pass"
            )
            if gap:
                reason += f", at most {gap * 1e3:.3g} ms a pass dearer than the cheapest plan"
        elif waits:
            reason = f"{need}: passes would take longer than the target with more blocks in use"
        elif room < deficit and room == 0:
            reason = f"{need}: the KV region is full at {view.usable_blocks} blocks"
        else:
            reason = f"{need}: no free pages and no more {view.unit} than the present {alpha} can be remapped"
        if unmet:
            reason += f"; {unmet} blocks stay unmet"
            limit = "" if why or room < deficit else self._limit_beyond(view, alpha, buffers, patient)
            limit = f"tbt_s={self.config.tbt_s}" if waits else limit
            reason += f", limited by {limit}" if limit else ""
        if view.times is not None and stall > (allowed := self._allowed(view.times, patient)):
            reason += (
                f"; passes wait for {stall * 1e3:.3g} ms and {allowed * 1e3:.3g} ms are allowed: since its layers began to "
                "stream they have become quicker, or others copy more"
            )
        return Decision("grow" if grows else "none", taken, alpha, buffers, reason + why, stall, unmet, takes)

    def _share(
        self, view: TenantView, need: int, others: Sequence[Sequence[Quote]], patient: bool
    ) -> tuple[int, int, tuple[Take, ...], float]:
        """(own alpha, own beta, takes from others, `Supply.gap_s`): all donors' increments compete, the tenant's own
        included."""
        own = self.offers(view, patient=patient)
        alpha, buffers = view.remapped, view.buffers
        takes = []
        # Beside active neighbours, each quote was certified against what all of them copy now.
        supply = choose(need, [*others, own], one_active=view.neighbours is not None)
        by_donor = {(quotes[0].donor, quotes[0].kind): quotes for quotes in others if quotes}
        for taken in supply.taken:
            if taken.donor == "":
                alpha, buffers = cast("tuple[int, int]", own[taken.count - 1].step)
                continue
            last = cast(Take, by_donor[taken.donor, taken.kind][taken.count - 1].step)
            takes.append(last._replace(blocks=taken.blocks))
        return alpha, buffers, tuple(takes), supply.gap_s

    def offers(self, view: TenantView, donor: str = "", *, patient: bool = True) -> list[Quote]:
        """The tenant's offers of its own layers: increments within the slowdown and, if `patient`, `tbt_s`, each
        (alpha, beta) and its addition.

        Blocks are its own. An alpha that stalls too long is no increment by itself, even if a larger alpha does not.
        """
        self._learn(view)
        most, best, _ = self._most(view)
        buffers = view.buffers if view.remapped else best
        at, times = view.remapped, view.times
        quotes = []
        copy = math.fsum(times.transfer_s) / len(times.transfer_s) if times is not None else 0.0
        for alpha in range(at + 1, self._top(view, most, buffers) + 1):
            stall = self._stall_of(times, alpha, buffers)
            if (times is not None and stall > self._allowed(times, patient)) or not self._can(alpha, buffers):
                continue
            if not self._spares(view, alpha, buffers):
                continue
            blocks = int((alpha - view.remapped) * view.blocks_per_layer) - int(
                (at - view.remapped) * view.blocks_per_layer
            )
            added = stall - self._stall_of(times, at, buffers)
            reload, share = (alpha - at) * copy, self.config.contention
            quotes.append(Quote(donor, "active", blocks, added, reload, share, (alpha, buffers)))
            at = alpha
        return quotes

    def whole_offer(self, view: TenantView, donor: str = "") -> Quote:
        """The layers that stream now and all of `offers`, as one increment from nothing."""
        more = self.offers(view, donor)
        alpha, buffers = cast("tuple[int, int]", more[-1].step) if more else (view.remapped, view.buffers)
        times = view.times
        copy = math.fsum(times.transfer_s) / len(times.transfer_s) if times is not None else 0.0
        blocks, stall = int(alpha * view.blocks_per_layer), self._stall_of(times, alpha, buffers)
        return Quote(donor, "active", blocks, stall, alpha * copy, self.config.contention, (alpha, buffers))

    def _most(self, view: TenantView) -> tuple[int, int, str]:
        """(most layers within the slowdown, buffers for that, remark)."""
        fixed = self.config.buffers
        if not view.seen:
            return view.remapped, max(view.buffers, 1), _UNSEEN
        if view.times is None and (view.neighbours is not None or self.config.tbt_s is not None):
            return view.remapped, max(view.buffers, 1), _UNMEASURED
        if view.times is None:
            most, best = 1, max(view.buffers, 1)
            while most < view.max_remapped and not self._can(most, best):
                most += 1
            return most, best if fixed == "auto" else fixed, f" (no measurement yet: at most {most} layers)"
        if self._limit is None:
            self._limit = self._bound(view.times)
        return (*self._limit, "")

    def _top(self, view: TenantView, most: int, buffers: int) -> int:
        top = min(most, view.max_remapped, view.streamable - buffers, view.layers - buffers)
        return top if self.config.max_layers is None else min(top, self.config.max_layers)

    def _target(self, view: TenantView, want: int, patient: bool) -> tuple[int, int, str]:
        """(alpha, beta, remark): the smallest allowed alpha >= want, else the largest allowed one below it.

        The stall is not monotone in alpha (an odd number of streamed layers in two fixed buffers waits longer), so the
        bound on the largest alpha says nothing about smaller ones: each is checked.
        """
        present, times = view.remapped, view.times
        most, best, why = self._most(view)
        buffers = view.buffers if present else best
        top = self._top(view, most, buffers)
        for alpha in (*range(want, top + 1), *range(min(want - 1, top), present, -1)):
            allowed = times is None or self._stall_of(times, alpha, buffers) <= self._allowed(times, patient)
            if allowed and self._can(alpha, buffers) and self._spares(view, alpha, buffers):
                return alpha, buffers, why
        return present, view.buffers, why

    def _useful(self, view: TenantView, patient: bool) -> float:
        """The most usable blocks with which a decode pass that reads all of them, and stalls as long as `slowdown` allows, takes
        no longer than tbt_s. Infinite without that target, before the passes have said what a block costs, and if nothing is
        live although there are that many: a request that needs more has none beside it, and must be served."""
        target = self.config.tbt_s
        if target is None or not patient:
            return math.inf
        useful = self._batch.blocks_within(target / (1.0 + self.config.slowdown))
        return math.inf if view.live_blocks == 0 and useful < view.usable_blocks + 1 else useful

    def _patient(self, times: LayerSeconds | None, waited_s: float) -> bool:
        """Whether demand waits rather than break tbt_s: while the first of the queue, one pass later, can still meet
        ttft_s; without that target always."""
        pass_s = math.fsum(times.compute_s) if times is not None else 0.0
        return self.config.ttft_s is None or waited_s + pass_s <= self.config.ttft_s

    def _limit_beyond(self, view: TenantView, alpha: int, buffers: int, patient: bool) -> str:
        """The bound that keeps one layer more from streaming; "" if none does by itself."""
        most, best, _ = self._most(view)
        buffers, times, more = buffers or best, view.times, alpha + 1
        if self.config.max_layers is not None and more > self.config.max_layers:
            return f"max_layers={self.config.max_layers}"
        if more > min(view.max_remapped, view.streamable - buffers, view.layers - buffers):
            return f"memory (no more {view.unit} can stream)"
        if times is None:
            return ""
        allowed, stall = self._allowed(times, patient), self._stall_of(times, more, buffers)
        if stall > allowed and allowed < self._allowed(times, False):
            return f"tbt_s={self.config.tbt_s}"
        if stall > allowed or more > most:
            return f"slowdown={self.config.slowdown}"
        if not self._can(more, buffers):
            return "memory (the layers are too small for the ring)"
        return "" if self._spares(view, more, buffers) else "the slowdown of other active tenants"

    # -- coming home -----------------------------------------------------------------------------------------------

    def sigma(self, view: TenantView) -> int:
        """Hysteresis: the blocks that must be free beyond demand and headroom after a layer has come home: half a layer's, or
        half of those left then, but none for a faded average. So an idle tenant's layers come home however small its pool is."""
        fixed, layer = self.config.hysteresis_blocks, view.blocks_per_layer
        half = 0.5 * min(layer, view.usable_blocks - _lost(view, 1))
        return math.ceil(max(self.variation, half) - 1e-3) if fixed is None else fixed

    def spare(self, view: TenantView, demand: int) -> int:
        """Blocks that the tenant can lose now and still have demand, headroom and hysteresis; at most all free ones."""
        return view.free_blocks - demand - self._headroom - self.sigma(view)

    def has_lost(self, view: TenantView, demand: int) -> None:
        """Blocks went back to another tenant's layers: growing again takes a demand that rose by more than sigma."""
        self._guard.arm(view.live_blocks + demand + self.sigma(view), self._headroom)

    def fewer(self, view: TenantView) -> int:
        """alpha after the next return: one layer less, or several if one alone would stall longer."""
        self._learn(view)
        return self._back_of(view)[0]

    def may_return(self, view: TenantView, holds: bool) -> Decision | None:
        """Whether a lent layer comes home now, by the same ski rental as for the tenant's own KV.

        holds: whether all tenants that have its pages can spare them (`spare`). An inactive tenant does not stream, so
        its layer costs only kappa T_T while it is away: for the reload that its activation will have to make in a
        hurry.
        """
        if not self.config.reversion:
            return None
        self._learn(view)
        fewer, saved, earned = self._back_of(view)
        if not self._rental.accrue(earned, holds):
            return None
        stall = self._stall_of(view.times, fewer, view.buffers) if view.active else 0.0
        reason = (
            f"the holders of its pages can spare them: {view.remapped - fewer} layers come home, {fewer} stay "
            f"away, saving {saved * 1e3:.3g} ms a pass"
        )
        return Decision("shrink", 0, fewer, view.buffers, reason, stall, 0)

    def _shrink_or_keep(self, view: TenantView, demand: int, headroom: int) -> Decision:
        self._learn(view)
        alpha, buffers = view.remapped, view.buffers
        sigma = self.sigma(view)
        fewer, saved, earned = self._repaired(view, view.free_blocks - demand - headroom - sigma)
        holds = view.free_blocks >= demand + headroom + _lost(view, alpha - fewer) + sigma
        steps = self._rental.steps + 1
        if not self._rental.accrue(earned, holds):
            why = "reloading one is not paid for yet" if holds else "reloading one would leave too few free blocks"
            return self._keep(view, why)
        self._guard.arm(view.live_blocks + demand + sigma, headroom)
        stall = self._stall_of(view.times, fewer, buffers)
        reason = (
            f"{view.free_blocks} blocks free, {demand} wanted and {headroom} kept in reserve for {steps} steps: "
            f"reload {alpha - fewer} {view.unit}, {fewer} stay remapped, saving {saved * 1e3:.3g} ms a pass"
        )
        return Decision("shrink", 0, fewer, buffers, reason, stall, 0)

    def _back_of(self, view: TenantView) -> tuple[int, float, float]:
        key = (view.remapped, view.buffers, view.active)
        step = self._back.get(key)
        if step is None or (self._possible is not None and not self._possible(step[0], view.buffers)):
            if view.active:
                step = self._step_back(view.times, view.remapped, view.buffers)
            else:
                fewer = self._next_below(view.remapped, view.buffers)
                step = (fewer, 0.0, self._rent(view.times, 0.0, view.remapped - fewer))
            self._back[key] = step
        return step

    def _repaired(self, view: TenantView, spare: int) -> tuple[int, float, float]:
        """As `_back_of`; but if passes stall for longer than allowed (batches have become smaller, or the link is
        shared), as many layers come home together as end that, and as `spare` blocks allow. One by one, each after its
        dwell, would take long."""
        step = self._back_of(view)
        times, alpha, buffers = view.times, view.remapped, view.buffers
        if times is None:
            return step
        allowed, now = self._allowed(times), self._stall_of(times, alpha, buffers)
        best, least = step[0], self._stall_of(times, step[0], buffers)
        if now <= allowed or least <= allowed:
            return step
        for fewer in range(best - 1, -1, -1):
            if not self._can(fewer, buffers):
                continue
            if math.ceil((alpha - fewer) * view.blocks_per_layer) > spare or least <= allowed:
                break
            stall = self._stall_of(times, fewer, buffers)
            if stall < least:
                best, least = fewer, stall
        saved = max(0.0, now - least)
        return best, saved, self._rent(times, saved, alpha - best)

    def _spares(self, view: TenantView, alpha: int, buffers: int) -> bool:
        """Whether the certificates of the other active tenants still hold beside what this one would copy then."""
        if view.neighbours is None or self._longest is None:
            return True
        present = self._longest(view.remapped, view.buffers) if view.remapped else 0.0
        longest = self._longest(alpha, buffers)
        return longest <= present or spared(view.neighbours, present, longest)

    def _can(self, alpha: int, buffers: int) -> bool:
        return self._possible is None or self._possible(alpha, buffers)

    def _next_below(self, alpha: int, buffers: int) -> int:
        fewer = alpha - 1
        while fewer > 0 and not self._can(fewer, buffers):
            fewer -= 1
        return fewer

    def _rent(self, times: LayerSeconds | None, saved: float, layers: int) -> float:
        if times is None:
            return self.config.contention  # as if T_map were 0 and all copies hidden
        copy = layers * math.fsum(times.transfer_s) / len(times.transfer_s)
        return income(saved, self.config.contention, copy, self.config.map_s)

    def _step_back(self, times: LayerSeconds | None, alpha: int, buffers: int) -> tuple[int, float, float]:
        """(alpha after the next shrink, stall seconds that it saves per pass, credit that a step earns towards it).

        The alpha is one layer less; if that would stall more than now *and* than allowed, the next one that does not.
        """
        fewer = self._next_below(alpha, buffers)
        if times is None:
            return fewer, 0.0, self._rent(None, 0.0, alpha - fewer)
        stall = self._stall_of(times, alpha, buffers)
        most = max(stall, self._allowed(times))
        while fewer > 0 and self._stall_of(times, fewer, buffers) > most:
            fewer = self._next_below(fewer, buffers)
        saved = max(0.0, stall - self._stall_of(times, fewer, buffers))
        return fewer, saved, self._rent(times, saved, alpha - fewer)

    def _keep(self, view: TenantView, why: str) -> Decision:
        key = (view.remapped, view.buffers, why)
        kept = self._kept.get(key)
        if kept is None:
            stall = self._stall_of(view.times, view.remapped, view.buffers)
            reason = (
                f"demand is met, and {view.remapped} {view.unit} stay remapped through {view.buffers} buffers: {why}"
            )
            kept = self._kept[key] = Decision("none", 0, view.remapped, view.buffers, reason, stall, 0)
        return kept

    # -- inside ----------------------------------------------------------------------------------------------------

    def _learn(self, view: TenantView) -> None:
        """Forget answers for other times, layers or units. Equal times in a new object count as the same."""
        times, unit, order = view.times, view.unit, view.order
        same = times is self._times or times == self._times
        if not same or unit != self._unit or order != self._order:
            self._limit = None
            self._stalls.clear()
            self._kept.clear()
            self._back.clear()
            if times is not None:
                step_s = math.fsum(times.compute_s)
                self._steps_ahead = horizon(step_s, self.config.map_s, step_s)
        self._times, self._unit, self._order = times, unit, order

    def _allowed(self, times: LayerSeconds, patient: bool = True) -> float:
        """Seconds of stall per pass: within slowdown and, if `patient`, what tbt_s leaves beside the computation."""
        # As schedule.max_remapped does, forgive a share of a pass for rounding (twice as much).
        compute_s = math.fsum(times.compute_s)
        allowed, target = (self.config.slowdown + 2e-9) * compute_s, self.config.tbt_s
        if target is None or not patient:
            return allowed
        return min(allowed, max(0.0, target - compute_s) + 2e-9 * compute_s)

    def _stall_of(self, times: LayerSeconds | None, alpha: int, buffers: int) -> float:
        if times is None or alpha == 0:
            return 0.0
        stall = self._stalls.get((alpha, buffers))
        if stall is None:
            stall = self._stalls[alpha, buffers] = self._stall(times, alpha, buffers)
        return stall


def _of_other(take: Take) -> str:
    if take.kind == "idle_kv":
        return f"{take.blocks} from unused KV of {take.donor}"
    if take.kind == "paused_kv":
        return f"{take.blocks} from KV of {take.donor} that goes to host memory"
    stall = f", stalling it {take.predicted_stall_s * 1e3:.3g} ms a pass" if take.kind == "active" else ""
    return f"{take.blocks} from layers of {take.donor} ({take.remapped} of them away then{stall})"


def _lost(view: TenantView, layers: int) -> int:
    """The most blocks that go when so many layers come home together; never more than there are."""
    exact = view.shrink_blocks if layers == 1 else None
    return min(view.usable_blocks, math.ceil(layers * view.blocks_per_layer) if exact is None else exact)
