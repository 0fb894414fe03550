# SPDX-License-Identifier: Apache-2.0
"""The donors for a tenant that needs blocks: of each kind, in the order in which they are to be asked.

Asked only when free pages do not suffice. Sources: Oneiros section 5.1 (inactive models first, by priority, then the
active ones); the minimum-idle rule is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import cast

from remap.config import Knobs
from remap.memory.apply import Changes
from remap.memory.donors import ActiveLayers, Donor, InactiveLayers, PausedKV, Taker, UnusedKV, paused
from remap.memory.lend import Lending
from remap.memory.state import TenantState
from remap.memory.view import count_free, view_of
from remap.policy.donors.ranking import Candidate, NextUse, may_donate, rank
from remap.policy.donors.supply import Quote, share_of_pass
from remap.policy.switching import Switching
from remap.policy.views import Take

__all__ = ["Offers"]


def _immovable(tenants: Mapping[str, TenantState]) -> bool:
    """Whether some tenant's live blocks stay where they are, whichever tenant needs their pages."""
    return not all(tenant.kv.reclaims for tenant in tenants.values())


def _ahead(tenants: Mapping[str, TenantState], activity: NextUse) -> float:
    """Seconds of a turn of late, if all tenants can make room by a copy. The next tenant waits for the end of the present turn,
    and nothing keeps its layers from coming home meanwhile: the caller that runs the turns activates it that long before
    (`Inside.reload_s`)."""
    return 0.0 if _immovable(tenants) else activity.turn_s or 0.0


def _decode_pass_s(tenant: TenantState) -> float:
    times = tenant.decode_times()
    return math.fsum(times.compute_s) if times is not None else 0.0


class Offers:
    """A session's offers, and when each tenant was used, by which donors are ranked. config: the session's own."""

    def __init__(
        self,
        tenants: Mapping[str, TenantState],
        changes: Changes,
        lending: Lending,
        config: Knobs,
        clock: Callable[[], float],
        switching: Switching,
    ) -> None:
        self._tenants = tenants
        self._changes = changes
        self._lending = lending
        self._config = config
        self._clock = clock
        self._activity = NextUse()
        self._switching = switching
        self._came_in = 0  # bytes of all tenants' KV that had been copied in when `switching` was told last
        self._activations = 0
        self.unused_kv = UnusedKV(changes, lending)
        # No method of this object: it would keep it alive.
        self.inactive = InactiveLayers(changes, lending, partial(_ahead, tenants, self._activity))
        self.active = ActiveLayers(changes, lending)
        self.paused_kv = PausedKV(self.unused_kv, lending, partial(_immovable, tenants))
        donors: tuple[Donor, ...] = (self.unused_kv, self.inactive, self.paused_kv, self.active)
        self._donors = {one.kind: one for one in donors}

    # -- uses ------------------------------------------------------------------------------------------------------

    def activated(self, tenant: TenantState, now: float, home: Collection[int] = ()) -> None:
        """Note that the tenant was asked for at `now`, and that these layers of it come home."""
        self._activity.activated(tenant.name, now)
        if not _immovable(self._tenants):
            came_in = sum(each.kv.copied_in_bytes for each in self._tenants.values())
            nbytes = max(0, came_in - self._came_in) + sum(tenant.layer_bytes[layer] for layer in home)
            self._came_in = came_in
            self._switching.activated(tenant.name, now, nbytes * tenant.timing.seconds_per_byte())
        self._activations += 1
        tenant.last_use = self._activations

    def forget(self, name: str) -> None:
        """Forget a tenant that has gone."""
        self._activity.forget(name)

    @property
    def crowded(self) -> bool:
        """Whether switches take so much of the link that layers had better stay where they are needed soon."""
        self._switching.look(self._clock())
        return self._switching.crowded

    # -- what is offered -------------------------------------------------------------------------------------------

    def to(self, receiver: TenantState, need: int) -> list[list[Quote]]:
        """Increments of all other tenants, in blocks of the receiver. Tenants inside a pass or being detached give
        nothing."""
        others = [
            tenant
            for tenant in self._tenants.values()
            if tenant is not receiver and tenant.config.lends and not tenant.busy
        ]
        now = self._clock()
        self._switching.look(now)
        immovable = _immovable(self._tenants)
        idle = self.ranked([one for one in others if not one.active and not (immovable and paused(one))], now)
        busy = [one for one in others if one.active or (immovable and paused(one))]
        asked: list[tuple[Donor, TenantState]] = [(self.unused_kv, giver) for giver in (*idle, *busy)]
        lenders = [] if self._switching.crowded else idle
        asked += [
            (self.inactive, giver)
            for giver in lenders
            if may_donate(self._candidate(giver, now), min_idle=giver.config.min_idle)
        ]
        asked += [(self.paused_kv, giver) for giver in (*idle, *busy)]
        asked += [(self.active, giver) for giver in busy]
        pass_s = _decode_pass_s(receiver)
        share = {one.name: self._share(pass_s, one, now) for one in others}
        lists = [donor.quotes(giver, receiver, need, share[giver.name]) for donor, giver in asked]
        return [quotes for quotes in lists if quotes]

    def layers(self, taker: Taker, need: int, sleeps: Callable[[TenantState], bool]) -> list[tuple[TenantState, Take]]:
        """Layers for `need` of the taker's blocks, of tenants that serve no pass, by the rules of `to`: whose, and how many."""
        now = self._clock()
        self._switching.look(now)
        if self._switching.crowded:
            return []
        immovable = _immovable(self._tenants)
        found = []
        asleep = [
            one
            for one in self._tenants.values()
            if one.config.lends and not one.busy and sleeps(one) and not (immovable and paused(one))
        ]
        for giver in self.ranked(asleep, now):
            as_inactive = self._candidate(giver, now)._replace(active=False)
            if need <= 0 or not may_donate(as_inactive, min_idle=giver.config.min_idle):
                continue
            quotes = self.inactive.quotes(giver, taker, need, 0.0)
            if quotes:
                need -= sum(quote.blocks for quote in quotes)
                found.append((giver, cast(Take, quotes[-1].step)))
        return found

    def idle(self) -> list[TenantState]:
        """Those whose layers other processes may have for good, in the order in which they give: inactive, and without a pass for
        `min_idle` times as long as all of their layers take to load."""
        now = self._clock()
        found = [
            one
            for one in self._tenants.values()
            if not (one.active or one.busy or paused(one))
            and one.config.lends
            and now - one.last_pass_s > one.config.min_idle * one.timing.copy_seconds() * one.layers
        ]
        return self.ranked(found, now)

    def give_layers(self, taker: Taker, giver: TenantState, take: Take) -> None:
        """Make these of the giver's layers free pages."""
        self.inactive.give(giver, taker, take)

    def whole(self, receiver: TenantState) -> list[Quote]:
        """See `advanced.offers`."""
        own, kv, pages = receiver.pages.kv_from_homes, receiver.kv, len(receiver.kv.pool.owned_slots())
        borrowed = self._lending.borrowed(receiver)
        free = count_free(self._changes, receiver)
        for_good = max(0, pages - receiver.reserved - len(own) - sum(map(len, borrowed.values())))
        quotes = [
            Quote("", "idle_kv", int((for_good + free) * receiver.blocks_per_page), 0.0, 0.0),
            receiver.controller.whole_offer(view_of(self._changes, receiver, beside=True), receiver.name),
        ]
        pass_s, now = _decode_pass_s(receiver), self._clock()
        for giver, held in borrowed.items():
            seconds = giver.timing.copy_seconds() * len(held) / giver.pages.buffer_pages
            blocks = int(len(held) * receiver.blocks_per_page)
            if giver.active:
                rent = giver.config.contention
                quotes.append(Quote(giver.name, "active", blocks, giver.predicted_stall_s, seconds, rent))
            else:
                quotes.append(Quote(giver.name, "inactive", blocks, 0.0, seconds, self._share(pass_s, giver, now)))
        more = [each for each in self.to(receiver, kv.max_blocks) if not self._tenants[each[0].donor].active]
        for first, *others in more:
            blocks = first.blocks + sum(each.blocks for each in others)
            seconds = math.fsum(each.reload_s for each in (first, *others))
            quotes.append(Quote(first.donor, first.kind, blocks, 0.0, seconds, first.share))
        return [quote for quote in quotes if quote.blocks > 0]

    def _share(self, pass_s: float, giver: TenantState, now: float) -> float:
        """Of what the giver has to copy back in its next turn, what falls on each pass of the receiver until then, as if all were
        decode passes of pass_s."""
        return share_of_pass(pass_s, self._activity.expected_s(giver.name, now))

    def give(self, receiver: TenantState, take: Take) -> int:
        """Make the taken part of an offer free pages. Returns how many of the receiver's blocks are lacking: live ones of the
        giver stay until its engine frees them (`want`)."""
        pages = self._donors[take.kind].give(self._tenants[take.donor], receiver, take)
        return max(0, take.blocks - int(pages * receiver.blocks_per_page)) if take.kind == "paused_kv" else 0

    def want(self, receiver: TenantState, donor: str, blocks: int) -> int:
        """See `PausedKV.want`."""
        return self.paused_kv.want(self._tenants[donor], blocks * receiver.kv.spec.block_bytes)

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

    def ranked(self, tenants: Sequence[TenantState], now: float | None = None) -> list[TenantState]:
        """In the order in which inactive tenants give."""
        now = self._clock() if now is None else now
        if len(tenants) < 2:
            return list(tenants)
        by_name = {tenant.name: tenant for tenant in tenants}
        ranked = rank([self._candidate(tenant, now) for tenant in tenants], self._config.policy)
        return [by_name[candidate.name] for candidate in ranked]
