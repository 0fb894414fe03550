# SPDX-License-Identifier: Apache-2.0
"""One step of a session: every tenant's demand, in order of priority, then the layers that may come home.

    demand -> view -> Controller.decide -> carry out: grow, take from others, shrink      for each tenant that has one
              NeedQuotes -> OtherProcesses.bring, Offers.to -> Controller.decide_with     where free pages do not suffice
    lender -> Controller.may_return -> Lending.bring_home                                 for each tenant whose layers others have
    engines free the live blocks that the report wants -> the rest of the takes           in the next step with the same demand
                                                       -> OtherProcesses.meet             what other processes have asked for

The step makes the entries of its report (entries.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from remap.errors import ArenaBroken, Error, InvalidArgument, OutOfBlocks
from remap.memory.apply import Changes
from remap.memory.donors import paused
from remap.memory.entries import Entries, Entry, ended_early, merge
from remap.memory.lend import Lending
from remap.memory.offers import Offers
from remap.memory.other_processes import OtherProcesses
from remap.memory.pages import Streaming
from remap.memory.restream import choose, continue_draining, grow, restream, take_free_pages
from remap.memory.state import TenantState
from remap.memory.view import view_of
from remap.policy.controller import Decision
from remap.policy.views import NONE, Demand, NeedQuotes, Selection, TenantView

__all__ = ["Steps"]


class _Waits(NamedTuple):
    """What a step has left to the next: rest, by tenant, once engines have freed blocks. demand: of that step. live: number of
    each such engine's tenant -> its live blocks then."""

    demand: Mapping[str, tuple[int, int | None]]
    live: Mapping[int, int]
    rest: Mapping[str, Decision]


class Steps:
    """A session's. Called with its lock held, outside of the passes of the tenants concerned."""

    def __init__(
        self,
        tenants: Mapping[str, TenantState],
        changes: Changes,
        lending: Lending,
        offers: Offers,
        other_processes: OtherProcesses | None = None,
    ) -> None:
        """other_processes: them, where the arena is shared with some."""
        self._tenants = tenants
        self._changes = changes
        self._lending = lending
        self._offers = offers
        self._other_processes = other_processes
        self._waits: _Waits | None = None  # of the last step

    def step(self, demand: Mapping[str, Demand]) -> Entries:
        """The entries of the step's report; {} if nothing was decided. Pre: known tenants, active and outside of
        passes.

        Tenants of higher priority are served first, equal ones in the order of attaching. An error ends the step: it is
        raised if nothing has changed by then, and is in the report otherwise. If the step raises, the next report has
        the blocks that had moved by then (`Changes.moved`): the engines have to hear of them.
        """
        for name, tenant in self._tenants.items():
            if not paused(tenant):  # what a paused tenant wanted last, it will want in its next turn
                tenant.demand = demand.get(name)
        entries: Entries = {}
        decisions = self._changes.decisions
        waits, self._waits = self._waits, None
        rest = waits.rest if waits is not None and self._answered(waits, demand) else None
        asked: Sequence[TenantState] = ()  # whose engines are, for other processes
        try:
            if self._other_processes is not None and rest is None:
                self._other_processes.step(demand, entries)
            for name in self._in_order(demand):
                tenant, wanted = self._tenants[name], demand[name]
                decision = self._decide(tenant, wanted) if rest is None else rest.get(name, NONE)
                if decision.action == "none" and not decision.unmet_blocks and not tenant.draining:
                    continue
                self._carry_out(tenant, wanted, decision, entries, asks=rest is None)
            for tenant in self._tenants.values():
                if tenant.pages.lent and rest is None:
                    self._consider_return(tenant, entries)
            if self._other_processes is not None and self._other_processes.lacks is not None:
                asked = self._other_processes.meet(entries if rest is None else None)
        except ArenaBroken:
            raise
        except Error as error:
            if self._changes.decisions == decisions:
                raise
            # Something has changed, so do not raise: the report tells the changes made, and the next step tries the rest
            # again.
            entry = merge(entries, tenant.name, {})  # whose turn it was
            entry.reason = ended_early(entry.reason, str(error))
            for name, wanted in demand.items():
                short = _short(self._tenants[name], wanted)
                if name not in entries and short:
                    entries[name] = Entry(short=short, unmet=short, reason=f"the step ended before its turn: {error}")
        if entries:
            self._leave(demand, entries, asked)
        return entries

    def _leave(self, demand: Mapping[str, Demand], entries: Entries, asked: Sequence[TenantState]) -> None:
        """Note what waits for engines to free blocks."""
        left = {name: entry.rest for name, entry in entries.items() if entry.rest is not None}
        if left or asked:
            givers = [*asked, *(self._tenants[take.donor] for decision in left.values() for take in decision.takes)]
            self._waits = _Waits(_blocks(demand), {each.number: each.kv.live_blocks for each in givers}, left)

    def _answered(self, waits: _Waits, demand: Mapping[str, Demand]) -> bool:
        """Whether this step goes on with what the last one left: engines have freed blocks for it since, and all else is as it
        was."""
        givers = [each for each in self._tenants.values() if each.number in waits.live]
        return (
            _blocks(demand) == waits.demand
            and len(givers) == len(waits.live)
            and not any(each.active or each.busy for each in givers)
            and any(each.kv.live_blocks < waits.live[each.number] for each in givers)
        )

    def _decide(self, tenant: TenantState, wanted: Demand) -> Decision:
        view = self._view(tenant)
        if tenant.kv.pool.external:
            tenant.kv.pool.in_use = view.live_blocks
        decision = tenant.controller.decide(view, wanted)
        if isinstance(decision, NeedQuotes):
            if self._other_processes is not None and self._other_processes.bring(tenant, decision.blocks):
                view = self._view(tenant)
            quotes = self._offers.to(tenant, decision.blocks)
            beside = replace(view, neighbours=tenant.link.neighbours(tenant))
            return tenant.controller.decide_with(beside, wanted, quotes)
        return decision

    def _carry_out(self, tenant: TenantState, wanted: Demand, decision: Decision, report: Entries, asks: bool) -> None:
        """Carry out the decision. Adds the tenant's entry to the report, and those of tenants whose blocks moved. asks: whether
        engines may be asked for live blocks.

        One change: if it raises, nothing of it has happened.
        """
        changes, pool = self._changes, tenant.kv.pool
        before = tenant.kv.usable_blocks
        short = _short(tenant, wanted)
        entry = report[tenant.name] = Entry(short=short, stall=decision.predicted_stall_s, reason=decision.reason)
        try:
            with changes.part():
                if decision.action == "grow":
                    changes.cancel_draining(tenant)
                    self._take(tenant, decision, entry, asks)
                    if decision.remapped > tenant.amount:
                        self._remap_more(tenant, decision)
                elif decision.action == "shrink":
                    self._shrink(tenant, wanted, decision, report)
                elif tenant.draining:
                    continue_draining(changes, tenant)
        finally:
            entry.added = added = max(0, tenant.kv.usable_blocks - before)
            # Count the blocks that are there, not those planned: written layers may have made them fewer.
            free = (wanted.free or 0) + added if pool.external else pool.free_blocks
            entry.unmet = max(0, wanted.blocks - free)
            if entry.unmet and self._other_processes is not None and self._other_processes.problem:
                entry.reason += f"; {self._other_processes.problem}"

    def _shrink(self, tenant: TenantState, wanted: Demand, decision: Decision, report: Entries) -> None:
        """Bring layers home, unless the demand or another process needs their pages: the tenant's entry says so then."""
        entry = report[tenant.name]
        amount, buffers = decision.remapped, decision.buffers
        target = choose(tenant, amount, buffers, self._homewards(tenant, amount, buffers))
        claim = self._claim(tenant, target)
        if claim is None:
            entry.reason += "; not done, since other processes have these layers' pages"
        elif lacking := self._lacking(tenant, wanted, claim.get(tenant.name, 0)):
            entry.reason += f"; not done, since {lacking} blocks of the demand would be lacking then"
        else:
            stall = decision.predicted_stall_s
            merge(
                report,
                tenant.name,
                self._lending.bring_home(tenant, target, predicted_stall_s=stall, drain=True),
            )

    @staticmethod
    def _lacking(tenant: TenantState, wanted: Demand, lost: int) -> int:
        """Blocks of the demand that would be lacking after a shrink that loses `lost`. The controller counts with the mean
        layer; a larger layer, or blocks that become usable in groups, may cost more."""
        free = (wanted.free or 0) if tenant.kv.pool.external else tenant.kv.free_blocks
        return max(0, wanted.blocks - (free - lost))

    def _take(self, tenant: TenantState, decision: Decision, entry: Entry, asks: bool) -> None:
        """Take free pages, after turning what other tenants give into free pages. Live blocks come later, if at all."""
        blocks = decision.free_pool_blocks_to_take
        later = []
        for take in decision.takes:
            lacking = self._offers.give(tenant, take)
            wanted = self._offers.want(tenant, take.donor, lacking) if lacking and asks else 0
            if wanted:
                entry.wanted[take.donor] = wanted
                later.append(take._replace(blocks=lacking))
                entry.reason += f"; the engine of {take.donor} is to free {wanted} blocks for {lacking} of these"
            blocks += take.blocks - (lacking if wanted else 0)
        if later:
            entry.rest = decision._replace(free_pool_blocks_to_take=0, remapped=0, takes=tuple(later))
        if blocks:
            take_free_pages(self._changes, tenant, blocks)

    def _remap_more(self, tenant: TenantState, decision: Decision) -> None:
        """Remap more of the tenant's own layers."""
        stall, amount, buffers = decision.predicted_stall_s, decision.remapped, decision.buffers
        kind = tenant.bounds.kind(tenant.decode_times(), amount, buffers)
        if kind != "nested" and not tenant.pages.lent:
            # Evenly spread at every alpha, as in the paper: layers come home while others leave, and blocks move.
            with suppress(
                InvalidArgument, OutOfBlocks
            ):  # too few are left, or blocks have no room: only add layers instead
                target = choose(tenant, amount, buffers, kind)
                if tenant.possible(target):
                    restream(self._changes, tenant, target, predicted_stall_s=stall)
                    return
        if kind != "slices":
            grow(self._changes, tenant, amount, buffers, predicted_stall_s=stall)

    def _homewards(self, tenant: TenantState, remapped: int, buffers: int) -> Selection:
        """The selection when layers come home: the same as for leaving, if the remaining layers can stream."""
        if tenant.slicing:
            return "slices"
        selection = tenant.config.selection
        if tenant.pages.lent or selection == "auto":
            return "inward"
        kind: Selection = "uniform" if selection == "uniform" else "nested"
        return kind if tenant.possible(tenant.streaming_at(remapped, buffers, kind)) else "inward"

    def _consider_return(self, lender: TenantState, report: Entries) -> None:
        """Bring one lent layer home, if all who have its pages can spare them and the controller finds that it pays."""
        if lender.busy or lender.amount == 0:
            return
        lending = self._lending
        view = self._view(lender)
        fewer = lender.controller.fewer(view)
        target, claim = self._next_home(lender, fewer, view.buffers)
        decision: Decision | None
        if claim is None:
            decision = lender.controller.may_return(view, holds=True)
            if decision is not None and self._other_processes is not None:
                self._other_processes.fetch_if_paid(lender)
            return
        lost = {self._tenants[name]: blocks for name, blocks in claim.items()}
        if any(holder.busy for holder in lost):
            return
        holds = all(blocks <= self._offers.unused_kv.surplus(holder) for holder, blocks in lost.items())
        decision = lender.controller.may_return(view, holds)
        if decision is None or lender.lost_writes():  # its next pass says so, or its activation; others go on
            return
        try:
            moved = lending.bring_home(lender, target, predicted_stall_s=decision.predicted_stall_s, drain=True)
        except OutOfBlocks:  # an engine with its own allocator holds unforeseen blocks: nothing changed
            return
        entry = merge(report, lender.name, moved)
        entry.stall = decision.predicted_stall_s
        entry.reason = decision.reason
        for holder in lost:
            holder.controller.has_lost(self._view(holder), holder.demand.blocks if holder.demand else 0)

    def _claim(self, lender: TenantState, target: Streaming) -> dict[str, int] | None:
        """Tenant -> blocks that it would lose if the lender streamed this; None if other processes have pages that would come
        home."""
        gone = lender.gone
        if gone and gone.intersection(lender.pages.to_fetch(target)):
            return None
        return self._lending.losses(lender, target)

    def _next_home(self, lender: TenantState, fewer: int, buffers: int) -> tuple[Streaming, dict[str, int] | None]:
        """What streams if the lender keeps `fewer` of its layers away, and `_claim` of it. Computed once per epoch and set of
        pinned layers, since every step asks while anything is lent."""

        def find() -> tuple[Streaming, dict[str, int] | None]:
            target = lender.streaming_at(fewer, buffers, self._homewards(lender, fewer, buffers))
            return target, self._claim(lender, target)

        return lender.answers.of("home", (self._changes.key, lender.order, fewer, buffers), find)

    def _view(self, tenant: TenantState) -> TenantView:
        """The controller's view of the tenant, with the demand of this step."""
        shares = len(self._tenants) > 1 or self._other_processes is not None
        return view_of(self._changes, tenant, tenant.demand, shares=shares)

    def _in_order(self, demand: Mapping[str, Demand]) -> Iterable[str]:
        return demand if len(demand) < 2 else sorted(demand, key=self._precedence)

    def _precedence(self, name: str) -> tuple[int, int]:
        tenant = self._tenants[name]
        return (-tenant.priority, tenant.number)


def _blocks(demand: Mapping[str, Demand]) -> dict[str, tuple[int, int | None]]:
    """Without the times, which pass."""
    return {name: (wanted.blocks, wanted.free) for name, wanted in demand.items()}


def _short(tenant: TenantState, wanted: Demand) -> int:
    """Blocks of the demand that are lacking."""
    pool = tenant.kv.pool
    return max(0, wanted.blocks - ((wanted.free or 0) if pool.external else pool.free_blocks))
