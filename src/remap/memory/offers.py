"""What the other tenants could give to one that needs blocks: one list of increments a donor, dearest kinds last.

    unused KV of others    blocks above min_blocks that nobody uses (an active donor keeps its headroom and hysteresis)
    idle tenants           their last layers, in the policy's order, each up to what the first prefill hides and ttft_budget_s
    active, paused ones    their layers, within their own slowdown; the receiver's own are beside them (Controller.offers)

Asked for only when free pages do not do. Sources: Oneiros section 5.1 (inactive models first, by priority, then the active
ones); that unused KV comes before both, the exact cap and the minimum-idle rule are ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from remap.config import ControllerConfig
from remap.memory.apply import Changes
from remap.memory.lend import Lending
from remap.memory.state import TenantState
from remap.memory.view import view_of
from remap.policy.donors.ranking import Candidate, NextUse, may_donate, rank
from remap.policy.donors.supply import Quote
from remap.policy.schedule import RELATIVE_EPSILON, one_shot_delay
from remap.policy.views import Take

__all__ = ["Offers", "paused"]

# Asked in every step while demand is unmet, of times that change only when the donor runs.
_late = functools.lru_cache(maxsize=256)(one_shot_delay)


def paused(tenant: TenantState) -> bool:
    """Whether an inactive tenant has requests that have begun: it waits for its turn, and is not idle.

    What it lends holds live blocks of others by then, who wait for their turns in turn, so it would not come home but be
    streamed in every pass. So a paused tenant gives what an active one does, within `slowdown`, and no more. Of an engine with
    its own allocator nobody knows which blocks are live: it counts as idle while it is inactive.
    """
    return not tenant.active and not tenant.kv.pool.external and tenant.kv.live_blocks > 0


class Offers:
    """A session's, with what the ranking of donors goes by: when each was used. config: the session's own."""

    def __init__(
        self,
        tenants: Mapping[str, TenantState],
        changes: Changes,
        lending: Lending,
        config: ControllerConfig,
        clock: Callable[[], float],
    ) -> None:
        self._tenants = tenants
        self._changes = changes
        self._lending = lending
        self._config = config
        self._clock = clock
        self._activity = NextUse()
        self._activations = 0

    # -- what was noted --------------------------------------------------------------------------------------------

    def activated(self, tenant: TenantState, now: float) -> None:
        """It was asked for now."""
        self._activity.activated(tenant.name, now)
        self._activations += 1
        tenant.last_use = self._activations

    def forget(self, name: str) -> None:
        """The tenant has gone."""
        self._activity.forget(name)

    # -- what is offered -------------------------------------------------------------------------------------------

    def to(self, receiver: TenantState, need: int) -> list[list[Quote]]:
        """Increments of all other tenants, in blocks of the receiver. Tenants inside a pass or being detached give nothing."""
        others = [
            tenant
            for tenant in self._tenants.values()
            if tenant is not receiver and tenant.config.lends and not tenant.busy
        ]
        now = self._clock()
        idle = self._ranked([tenant for tenant in others if not tenant.active and not paused(tenant)], now)
        busy = [tenant for tenant in others if tenant.active or paused(tenant)]
        lists = [self._idle(donor, receiver, need) for donor in (*idle, *busy)]
        config = self._config
        for donor in idle:
            if may_donate(self._candidate(donor, now), min_idle=config.min_idle):
                lists.append(self._of_inactive(donor, receiver, need))
        lists.extend(self._of_active(donor, receiver) for donor in busy)
        return [quotes for quotes in lists if quotes]

    def surplus(self, donor: TenantState) -> int:
        """Blocks of its own that a tenant could lose now: all unused ones above min_blocks of an inactive tenant; an active one
        keeps its last demand, headroom and hysteresis as well."""
        free = donor.kv.usable_blocks - donor.kv.spec.min_blocks
        if not donor.kv.pool.external:
            free = min(free, donor.kv.free_blocks)
        if donor.active and free > 0:
            wanted = donor.demand
            view = view_of(self._changes, donor, wanted)
            free = min(free, donor.controller.spare(view, wanted.blocks if wanted else 0))
        return max(0, free)

    def away_cap(self, donor: TenantState) -> int:
        """The most layers of an inactive tenant that may be away: as many as a short prefill of its own hides while all that is
        streamed then, the ring's layers too, is loaded, and `ttft_budget_s` more.

        One layer, and what the budget pays for, while no pass of it was measured. Never all of them: the ring's stay, and one
        more.
        """
        config = donor.config
        order = donor.order
        buffers = max(1, donor.buffers)
        most = min(len(order), donor.layers - 1) - buffers
        if config.cap is not None:
            most = min(most, config.cap)
        times = donor.timing.prefill()
        if times is None:
            copy = donor.timing.copy_seconds()
            return max(0, min(most, 1 + (int(config.ttft_budget_s / copy) if copy > 0 else 0)))
        bound = config.ttft_budget_s + RELATIVE_EPSILON * math.fsum(times.compute_s)
        kind = donor.growing_by
        cap = donor.remapped  # more is away only together with what is away now
        while cap < most and _late(times.compute_s, times.transfer_s, donor.select(cap + 1, buffers, kind)) <= bound:
            cap += 1
        return max(0, min(cap, most))

    def _candidate(self, tenant: TenantState, now: float) -> Candidate:
        return Candidate(
            name=tenant.name,
            active=tenant.active,
            priority=tenant.priority,
            order=tenant.number,
            last_use=tenant.last_use,
            idle_s=max(0.0, now - tenant.last_pass_s),
            next_use_s=self._activity.expected_s(tenant.name, now),
            reload_s=tenant.timing.copy_seconds(),
        )

    def _ranked(self, tenants: Sequence[TenantState], now: float) -> list[TenantState]:
        if len(tenants) < 2:
            return list(tenants)
        by_name = {tenant.name: tenant for tenant in tenants}
        ranked = rank([self._candidate(tenant, now) for tenant in tenants], self._config.policy)
        return [by_name[candidate.name] for candidate in ranked]

    def _idle(self, donor: TenantState, receiver: TenantState, need: int) -> list[Quote]:
        surplus = self.surplus(donor)
        if surplus <= 0:
            return []
        wanted = math.ceil(need / receiver.blocks_per_page) + 1
        pages = len(self._lending.idle_slots(donor, receiver, wanted, surplus))
        blocks = int(pages * receiver.blocks_per_page)
        return [Quote(donor.name, "idle_kv", blocks, 0.0, 0.0, Take(donor.name, "idle_kv", blocks))] if blocks else []

    def _of_inactive(self, donor: TenantState, receiver: TenantState, need: int) -> list[Quote]:
        """Its layers one by one, until they cover the need or its cap is reached."""
        if donor.pages.tail_pages:
            return []  # slices of all layers stream: none can go whole
        buffers = max(1, donor.buffers)
        kind = donor.growing_by
        last = sorted(donor.order, reverse=True)[:buffers]
        places = receiver.index_of
        quotes = []
        copy = donor.timing.copy_seconds()
        before = donor.select(donor.remapped, buffers, kind) or tuple(last)
        for alpha in range(donor.remapped + 1, self.away_cap(donor) + 1):
            if need <= 0:
                break
            if not donor.possible(donor.select(alpha, buffers, kind), buffers):
                continue
            layers = set(donor.select(alpha, buffers, kind)).difference(before)
            before = donor.select(alpha, buffers, kind)
            pages = sum(page in places for layer in layers for page in donor.pages.homes[layer])
            blocks = int(pages * receiver.blocks_per_page)
            take = Take(donor.name, "layers", blocks, alpha, buffers, kind)
            quotes.append(Quote(donor.name, "inactive", blocks, 0.0, copy, take))
            need -= blocks
        return quotes

    def _of_active(self, donor: TenantState, receiver: TenantState) -> list[Quote]:
        if donor.slicing:
            return []  # it counts in pages of every layer, which nobody else can use
        controller = donor.controller
        view = view_of(self._changes, donor, donor.demand)
        scale = donor.pages.buffer_pages * receiver.blocks_per_page / view.blocks_per_layer
        quotes = []
        total = 0.0
        for quote in controller.offers(view, donor.name):
            alpha, buffers = cast("tuple[int, int]", quote.step)
            blocks = int(quote.blocks * scale)
            total += quote.stall_s
            take = Take(donor.name, "layers", blocks, alpha, buffers, "onward", total)
            quotes.append(Quote(donor.name, "active", blocks, quote.stall_s, quote.reload_s, take))
        return quotes
