# SPDX-License-Identifier: Apache-2.0
"""Layers without pages: tenants that serve no pass give them up, and activation brings them home, to other pages.

    give up   giver:  params, ring -> free; they are no tenant's home any more     no copy, and no driver call in aliased mode
    bring     tenant: free -> params (zeroed: they change tenant), a home again; loaded from the master copies

Lending (lend.py) keeps a giver's claim on its pages, which come home from the tenants that have them. Here the claim goes as
well, so any number of models can be attached, and a model that is needed takes what is there: free pages, then unused KV, then
layers of the models that are needed last, KV of paused ones (which their engines copy to host memory first), and these models'
layers, down to nothing. Of idle models first the layers behind those whose computation hides the loading of the rest, or leaves
it time within `ttft_s` (`policy.hidden.first_kept`), while the link has time for that; the first ones of all only then.

Layers come in the order of use, first one, then more at a time: while one is being copied the next ones' pages are zeroed,
and the first pass, which waits for each layer by itself, begins when the first has come. So bringing them is several
changes, of which the first, with all that others give, is the one that may be refused; the others take free pages alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from remap.errors import Error, OutOfBlocks, OutOfMemory
from remap.memory.apply import Changes
from remap.memory.donors import paused
from remap.memory.lend import Lending
from remap.memory.offers import Offers
from remap.memory.pages import Pages, plan_between, plan_free_pages, run_of
from remap.memory.state import TenantState
from remap.policy.hidden import first_kept
from remap.sizes import show_size

__all__ = ["Cold", "Coming"]


class _Taker(NamedTuple):
    """A tenant that takes pages for its layers: other ones suit it than suit it for KV, and they depend on who serves."""

    index_of: Container[int]
    number: None = None


class _Choice(NamedTuple):
    """kept: pages for the blocks that a tenant always has; of these kv are to be taken. homes: by layer. short: how many pages
    are lacking, at least."""

    kept: frozenset[int]
    kv: Sequence[int]
    homes: Mapping[int, Pages]
    short: int


class Coming(NamedTuple):
    """Cold layers of which the first is loading. rest: the homes of the others, a change each."""

    layers: Sequence[int]
    rest: Sequence[Mapping[int, Pages]]


class Cold:
    """One session's. Called with the session's lock held, outside of the passes of the tenants concerned."""

    def __init__(self, tenants: Mapping[str, TenantState], changes: Changes, lending: Lending, offers: Offers) -> None:
        self._tenants = tenants  # the session's own, as it is now
        self._changes = changes
        self._lending = lending
        self._offers = offers
        self.borrowed: Container[int] = ()  # pages that other processes may call home, so they become no layer's
        # As that of `Attaching`. None: there are no other processes.
        self.supply: Callable[[int], str] | None = None

    # -- coming ----------------------------------------------------------------------------------------------------

    def ask_others(self, tenant: TenantState) -> str:
        """Ask other processes for the pages that `bring` lacks: what is free there, and idle, nobody here misses. Returns why no
        broker answers; "": one does, or there is none."""
        layers, broker, free = _cold(tenant), "", -1
        while self.supply is not None and not broker and (short := self._choose(tenant, layers).short) > 0:
            before, free = free, self._changes.arena.counts()["free"]
            if free <= before:  # what came did not suit the blocks' places
                break
            broker = self.supply(short)
        return broker

    def bring(self, tenant: TenantState, broker: str = "") -> Coming:
        """Give the tenant's cold layers pages, and load the first of them: `bring_rest`, once this is decided. broker: of
        `ask_others`.

        Raises OutOfBlocks (field preempt) if pages can be had only from live blocks, of inactive tenants or its own, OutOfMemory
        (fields requested, free, short, offered, outside) if not even so, and the backend's error; nothing has changed then.
        """
        layers = _cold(tenant)
        self._require_enough(tenant, layers, broker)
        if tenant.source.verify is not None:  # of all of them, while the call may be refused
            tenant.source.verify(set(layers))
        with self._changes.part():
            self._changes.cancel_draining(tenant)
            return self._begin(tenant, layers, self._collect(tenant, layers))

    def bring_rest(self, tenant: TenantState, coming: Coming) -> tuple[tuple[int, ...], str]:
        """Load the others, of which each few are a change. Returns all that have come, in the order of use, and the error that
        ended it early, if there was one: that layer and those behind it are cold still."""
        problem = ""
        try:
            for homes in coming.rest:
                self._come(tenant, homes)
        except Error as error:
            problem = str(error)
        return tuple(layer for layer in coming.layers if layer not in tenant.pages.cold), problem

    def want(self, tenant: TenantState) -> dict[str, int]:
        """Paused tenant -> live blocks that its engine is to free before `bring`, for pages that neither unused KV nor idle
        models give. Uses these offers up."""
        short = self._choose(tenant, sorted(tenant.pages.cold)).short
        waiting = {one.name: one for one in self._givers(tenant) if not one.active and paused(one)}
        wanted: dict[str, int] = {}
        if short <= 0 or not any(one.kv.reclaimable_blocks for one in waiting.values()):
            return wanted
        offered, _ = self._offered(tenant)
        if short > sum(offered.values()):  # `bring` says so
            return wanted
        short -= sum(pages for name, pages in offered.items() if name not in waiting)
        taker = _Taker(tenant.placed)
        for name, one in waiting.items():
            page, block = one.kv.geometry.page_bytes, one.kv.spec.block_bytes
            short -= len(self._lending.idle_slots(one, taker, max(0, short), self._offers.unused_kv.unused(one)))
            blocks = min(-(-short * page // block) + 1, one.kv.reclaimable_blocks) if short > 0 else 0
            if blocks:
                wanted[name] = blocks
                one.kv.use_offer()
                short -= blocks * block // page
        return wanted

    def expect(self, tenant: TenantState) -> tuple[tuple[int, ...], str]:
        """As `bring` and `bring_rest`, for as many of the first cold layers as find pages that cost no tenant anything: free
        ones, unused KV, and layers that idle tenants need not keep (`_gifts`). Raises the backend's error alone."""
        layers, coming = _cold(tenant), None
        with self._changes.part():
            self._changes.cancel_draining(tenant)
            short = self._choose(tenant, layers).short
            for give in self._gifts(tenant, spare=True):
                if short <= 0:
                    break
                give(short)
                short = self._choose(tenant, layers).short
            # Of more layers, no fewer pages are lacking.
            fit = bisect_right(range(len(layers)), 0, key=lambda n: self._choose(tenant, layers[: n + 1]).short)
            if fit:
                coming = self._begin(tenant, layers[:fit], self._choose(tenant, layers[:fit]))
        if coming is None:
            return (), ""
        tenant.expected = True
        return self.bring_rest(tenant, coming)

    def _begin(self, tenant: TenantState, layers: Sequence[int], choice: _Choice) -> Coming:
        """Blocks and the first layer come, as a part of a change; then four layers, then sixteen, and so on."""
        changes, homes = self._changes, list(choice.homes.items())
        if choice.kv:
            changes.apply(tenant, plan_free_pages(tenant.pages, choice.kv, give=True))
        changes.note(tenant, tenant.books._replace(kept=choice.kept))
        self._come(tenant, dict(homes[:1]))
        rest, first, count = [], 1, 4
        while first < len(homes):
            rest.append(dict(homes[first : first + count]))
            first, count = first + count, 4 * count
        return Coming(layers, rest)

    def _come(self, tenant: TenantState, homes: Mapping[int, Pages]) -> None:
        self._changes.apply(tenant, plan_between(tenant.pages, tenant.pages.with_homes(dict(homes))))

    def _collect(self, tenant: TenantState, layers: Sequence[int]) -> _Choice:
        """Let others give pages until there are enough."""
        choice, free = self._choose(tenant, layers), -1
        while choice.short > 0:  # more than once only if what came did not suit the blocks' places
            if len(self._changes.draft.free_pages()) <= free:
                raise self._too_few(tenant, layers, choice.short)
            free = len(self._changes.draft.free_pages())
            for give in self._gifts(tenant):
                give(choice.short)
                choice = self._choose(tenant, layers)
                if choice.short <= 0:
                    break
        return choice

    def _choose(self, tenant: TenantState, layers: Sequence[int]) -> _Choice:
        """Of the free pages that are no tenant's home: for blocks those that stand first in the KV region, for layers those that
        stand last, or nowhere."""
        claimed = self._claimed(self._tenants.values())
        free = [
            page
            for page in self._changes.draft.free_pages()
            if page in tenant.placed and page not in claimed and page not in self.borrowed
        ]
        spec, places = tenant.kv.spec, tenant.index_of
        for_kv = sorted((page for page in free if page in places), key=places.__getitem__)
        plain = self._plain(tenant)
        candidates = [*plain, *for_kv]
        count = -(-spec.min_blocks * spec.block_bytes // tenant.kv.geometry.page_bytes)
        while count <= len(candidates) and self._usable(tenant, candidates[:count]) < spec.min_blocks:
            count += 1
        enough = count <= len(candidates)
        kept = frozenset(candidates[:count])
        kv = for_kv[: max(0, count - len(plain))]
        taken = set(kv)
        left = [page for page in free if page not in taken]
        left.sort(key=lambda page: places.get(page, len(places)))
        needed = sum(map(tenant.pages_of, layers))
        chosen = sorted(left[max(0, len(left) - needed) :])
        short = needed + max(0, count - len(plain)) - len(free)
        if not enough:
            short = max(short, 1)
        homes = {}
        if short <= 0:
            at = 0
            for layer in layers:
                homes[layer] = run_of(chosen[at : at + tenant.pages_of(layer)])
                at += tenant.pages_of(layer)
        return _Choice(kept, kv, homes, short)

    def _plain(self, tenant: TenantState) -> list[int]:
        """Its KV pages that are no tenant's home, in the order of their places."""
        claimed = self._claimed(self._tenants.values()) | tenant.pages.kv_from_homes
        slots = tenant.kv.pool.owned_slots()
        places = sorted(tenant.kv.geometry.donation_indices(slots))
        return [page for page in map(tenant.donation_order.__getitem__, places) if page not in claimed]

    @staticmethod
    def _usable(tenant: TenantState, pages: Sequence[int]) -> int:
        """How many blocks these pages alone make."""
        owned, chosen = set(tenant.kv.pool.owned_slots()), set(tenant.slots_of(pages))
        return tenant.kv.pool.usable_with(sorted(owned - chosen), sorted(chosen - owned))

    @staticmethod
    def _claimed(tenants: Iterable[TenantState]) -> frozenset[int]:
        """Pages that have been lent, and come home one day."""
        return frozenset[int]().union(*(tenant.pages.lent for tenant in tenants))

    # -- who gives -------------------------------------------------------------------------------------------------

    def _givers(self, tenant: TenantState) -> list[TenantState]:
        """All that may give, inactive ones first, of these the one that is needed last first."""
        others = [one for one in self._tenants.values() if one is not tenant and one.config.lends and not one.busy]
        return [*self._offers.ranked([one for one in others if not one.active]), *(one for one in others if one.active)]

    def first_kept(self, giver: TenantState) -> int:
        """The certificate: with that many first layers its next short prefill ends late by `Knobs.late_s` at most. 0 before one
        of its passes was measured, and the link."""
        times = giver.timing.prefill()
        if times is None:
            return 0
        return first_kept(*giver.in_use(times), giver.config.late_s(math.fsum(times.compute_s)))

    def _gifts(self, tenant: TenantState, spare: bool = False) -> list[Callable[[int], None]]:
        """The gifts that others can make, each for a number of pages at most, in the order in which they are to be made. spare:
        only those that make no tenant's next pass later than it may be."""
        givers = self._givers(tenant)
        sleeping = [one for one in givers if not one.active]
        idle, waiting = [one for one in sleeping if not paused(one)], [one for one in sleeping if paused(one)]
        busy = self._claimed(one for one in self._tenants.values() if one.active or one is tenant)
        taker = _Taker(tenant.placed - busy)
        unused = self._offers.unused_kv
        gifts: list[Callable[[int], None]] = [partial(self._give_own, tenant)]
        for one in givers:
            gifts.append(partial(self._give_unused, one, taker, unused.surplus))
        if not self._offers.crowded:  # each model that was idle loads what it gave
            spared = [
                one for one in idle if not (spare and one.expected)
            ]  # of two that are expected none takes the other's
            gifts += [partial(self.give_layers, one, keep=self.first_kept(one)) for one in spared]
        if spare:
            return gifts
        gifts += [partial(self.give_layers, one) for one in idle]
        gifts += [partial(self._give_blocks, one) for one in idle]
        gifts += [partial(self._give_unused, one, taker, unused.unused) for one in waiting]
        gifts += [partial(self.give_layers, one) for one in waiting]
        gifts += [partial(self._give_blocks, one) for one in waiting]
        return gifts

    def _give_unused(
        self, giver: TenantState, taker: _Taker, surplus: Callable[[TenantState], int], pages: int
    ) -> None:
        self._lending.free_idle(giver, taker, pages, surplus(giver))

    def _own_unused(self, tenant: TenantState) -> list[int]:
        """Pages of its own KV that no live block needs, nor its min_blocks: its layers may have them. The last ones first."""
        if tenant.kv.pool.external or tenant.draining:
            return []
        kept = self._choose(tenant, ()).kept
        pages = [page for page in reversed(self._plain(tenant)) if page not in kept]
        slot_of = {slot: page for page in pages for slot in tenant.slots_of([page])}
        return [slot_of[slot] for slot in tenant.kv.pool.vacant(list(slot_of))]

    def _own_live(self, tenant: TenantState) -> int:
        """How many pages of its own KV its layers could have if no block of it were live."""
        if tenant.kv.pool.external or tenant.draining:
            return 0
        kept = self._choose(tenant, ()).kept
        return sum(page not in kept for page in self._plain(tenant)) - len(self._own_unused(tenant))

    def _give_own(self, tenant: TenantState, pages: int) -> None:
        freed = sorted(self._own_unused(tenant)[:pages])
        if freed:
            plan = plan_free_pages(tenant.pages, freed, give=False)
            self._changes.apply(tenant, plan)

    def lacking(self, tenant: TenantState) -> int:
        """Pages that its cold layers lack, beside free ones."""
        return max(0, self._choose(tenant, _cold(tenant)).short) if tenant.pages.cold else 0

    def gifts(self, givers: Sequence[TenantState], spare: bool = False) -> list[Callable[[int], None]]:
        """What these tenants, all idle, can give other processes: as `_gifts`."""
        if spare:
            return [partial(self.give_layers, one, keep=self.first_kept(one)) for one in givers if not one.expected]
        return [
            *(partial(self.give_layers, one, keep=self.first_kept(one)) for one in givers),
            *(partial(self.give_layers, one) for one in givers),
            *(partial(self._give_blocks, one) for one in givers),
        ]

    def give_layers(self, giver: TenantState, pages: int, keep: int = 0) -> None:
        """`pages` pages of layers of a tenant that serves no pass become free, for good: all that stream, then the last ones, and
        none of the first `keep`."""
        layers = self._layers_to_give(giver)
        chosen, given = set(giver.streamed), len(giver.pages.ring) * giver.pages.depth + len(giver.pages.lent)
        if not layers or not chosen.isdisjoint(giver.in_order[:keep]):
            return
        for layer in reversed(giver.in_order[keep:]):
            if layer not in layers or layer in chosen:
                continue
            if given >= pages:
                break
            chosen.add(layer)
            given += len(giver.pages.homes[layer])
        if not chosen:
            return
        with self._changes.part():
            self._changes.cancel_draining(giver)
            self._changes.apply(giver, plan_between(giver.pages, giver.pages.given_up(chosen)))

    def _layers_to_give(self, giver: TenantState) -> list[int]:
        """Not layers that something wrote into: their bytes are nowhere else. All that stream, or none."""
        pages = giver.pages
        if pages.for_good or pages.unfilled or pages.gone != pages.cold or giver.leaving:
            return []
        written = giver.source.watch(
            [layer for layer, home in enumerate(pages.homes) if home and not pages.tails[layer]]
        )
        if written:
            giver.pin(written)
        layers = [layer for layer, home in enumerate(pages.homes) if home and layer not in giver.pinned]
        return layers if set(pages.streamed) <= set(layers) else []

    def _give_blocks(self, giver: TenantState, pages: int) -> None:
        """Free `pages` of the KV pages of a tenant whose layers are cold, in which no live block lies: also those that it has for
        min_blocks, which come back with its layers. An engine with its own allocator has no request, but keeps its first block,
        which stands for none in block tables."""
        if not giver.pages.cold or giver.draining:
            return
        pool, geometry = giver.kv.pool, giver.kv.geometry
        owned = pool.owned_slots()[::-1]
        if pool.external:
            first = set(geometry.slots_of_block(0))
            empty = [slot for slot in owned if slot not in first]
        else:
            empty = pool.vacant(owned)
        slots = sorted(empty[:pages])
        if slots:
            freed = sorted(map(giver.donation_order.__getitem__, geometry.donation_indices(slots)))
            with suppress(OutOfBlocks):  # that engine still holds some of them
                self._changes.apply(giver, plan_free_pages(giver.pages, freed, give=False))

    def give_all(self, giver: TenantState, keep: int = 0) -> None:
        """All layers but the first `keep`, and all blocks, that the tenant can do without become free. It serves no pass. Raises
        the backend's error; nothing has changed then."""
        total = self._changes.arena.total_pages
        with self._changes.part():
            self.give_layers(giver, total, keep)
            self._give_blocks(giver, total)

    def open_first(self, tenant: TenantState) -> None:
        """Give a tenant that has just been attached without pages those of its first KV block, for an engine that keeps it."""
        first = tenant.donation_order[: tenant.kv.geometry.pages_for_blocks(1)]
        with self._changes.part():
            self._changes.apply(tenant, plan_free_pages(tenant.pages, first, give=True))
            self._changes.note(tenant, tenant.books._replace(kept=frozenset(first)))

    # -- is it possible ----------------------------------------------------------------------------------------------

    def _require_enough(self, tenant: TenantState, layers: Sequence[int], broker: str) -> None:
        """Raises as `bring` does if it is known that there will be too few pages. Changes nothing. broker: why none answers."""
        short = self._choose(tenant, layers).short
        if short <= 0:
            return
        offered, blocked = self._offered(tenant)
        if short <= sum(offered.values()):
            return
        outside = 0 if self.supply is None else self._changes.arena.counts()["outside"]
        later = 0
        if short > sum(offered.values()) + max(sum(blocked.values()), outside) and (own := self._own_live(tenant)):
            # Its KV lies where its layers were, and the pages that it had besides are another's by now. Only if those that other
            # processes keep do not suffice: it waits for these.
            blocked[tenant.name], later = own, outside
        if short <= sum(offered.values()) + sum(blocked.values()) + later:
            preempt = {name: self._tenants[name].kv.pool.live_ids() for name in blocked}
            raise OutOfBlocks(
                f"activating {tenant.name!r} takes {short} pages more than are free, others can give {sum(offered.values())}, "
                f"and {sum(blocked.values())} hold live blocks of {sorted(blocked)}; nothing changed; free these blocks (field "
                "preempt), or give their tenants host memory for KV",
                requested=short,
                free=sum(offered.values()),
                usable=0,
                preempt=preempt,
            )
        raise self._too_few(tenant, layers, short, broker)

    def _offered(self, tenant: TenantState) -> tuple[dict[str, int], dict[str, int]]:
        """(giver -> pages that it can give, giver -> pages that live blocks keep it from giving)."""
        offered, blocked = {}, {}
        own = len(self._own_unused(tenant))
        if own:
            offered[tenant.name] = own
        busy = self._claimed(one for one in self._tenants.values() if one.active or one is tenant)
        fits = tenant.placed - busy
        unused = self._offers.unused_kv
        for giver in self._givers(tenant):
            pool, pages = giver.kv.pool, giver.pages
            if giver.active or pool.external:
                taker = _Taker(fits)
                found = self._lending.idle_slots(giver, taker, len(fits), unused.surplus(giver))
                its = len(found)
            else:
                slots = pool.owned_slots()
                empty = set(pool.vacant(slots))
                live = len(slots) - len(empty)
                its = len(empty)
                if giver.kv.reclaimable_blocks >= pool.live_blocks:
                    its, live = its + live, 0
                if live:
                    blocked[giver.name] = live
            if not giver.active and self._layers_to_give(giver):
                its += sum(page in fits for page in pages.held) + sum(page in fits for page in self._lent_free(giver))
            if its:
                offered[giver.name] = its
        return offered, blocked

    def _lent_free(self, giver: TenantState) -> Collection[int]:
        lent = giver.pages.lent
        return [page for page in self._changes.draft.free_pages() if page in lent] if lent else ()

    def _too_few(self, tenant: TenantState, layers: Sequence[int], short: int, broker: str = "") -> OutOfMemory:
        page_bytes = tenant.kv.geometry.page_bytes
        needed = sum(map(tenant.pages_of, layers))
        offered, _ = self._offered(tenant)
        counts = self._changes.arena.counts()
        free = counts["free"]
        givers = ", ".join(f"{name} {count}" for name, count in offered.items()) or "no tenant"
        elsewhere = "" if self.supply is None else "wait until other processes serve less, "
        return OutOfMemory(
            f"activating {tenant.name!r} takes {needed} pages of {page_bytes} bytes for its layers, and those of "
            f"{tenant.kv.spec.min_blocks} KV blocks; {free} are free, {short} are lacking, and others can give fewer ({givers}); "
            f"it stays as it was; deactivate or detach a tenant, {elsewhere}or give the session "
            f"{show_size(short * page_bytes)} more" + (f"; {broker}" if broker else ""),
            requested=needed,
            free=free,
            short=short,
            offered=offered,
            broker=broker,
            outside=counts["outside"],
            page_bytes=page_bytes,
        )


def _cold(tenant: TenantState) -> tuple[int, ...]:
    """What has no pages, in the order of use."""
    return tuple(part for part in tenant.in_order if part in tenant.pages.cold)
