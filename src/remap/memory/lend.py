# SPDX-License-Identifier: Apache-2.0
"""Pages between tenants: one model's layers become another model's KV cache, and come home again.

    lend     donor: layers -> streamed, their pages -> free          receiver: free -> kv (zeroed: they change tenant)
    return   holder: blocks move out, kv -> free        donor: free -> params (zeroed), loaded from the master copy

Each arrow is a plan; those of a call are one change (apply.py), which happens whole or not at all. A page that goes from one
tenant to another keeps the bytes of the first until that is decided.

Before anything changes, the call checks that all blocks have room to move. If not, OutOfBlocks names in its field
`preempt` the blocks to free first.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol, cast

from remap.errors import OutOfBlocks
from remap.memory.apply import Changes
from remap.memory.pages import Streaming, plan_free_pages
from remap.memory.restream import grow, plan_with_room, restream, ring_last
from remap.memory.state import TenantState
from remap.memory.view import free_pages_of
from remap.policy.views import Selection

__all__ = ["Lending", "Moves", "Receiver"]

Moves = dict[str, dict[int, int]]
"""tenant -> {old block: new block}"""


class Receiver(Protocol):
    """A user of pages: a tenant, or the other processes. index_of: the pages that have a place there. number: one receiver's
    alone, whose places stay as they are within an epoch; None: of one that is made for a question."""

    @property
    def number(self) -> int | None: ...
    @property
    def index_of(self) -> Container[int]: ...


class Lending:
    """One session's. Called with the session's lock held, outside of the passes of the tenants concerned."""

    def __init__(self, tenants: Mapping[str, TenantState], changes: Changes) -> None:
        self.tenants = tenants  # the session's own, as it is now
        self._changes = changes

    # -- looking ---------------------------------------------------------------------------------------------------

    def holders(self, donor: TenantState, pages: frozenset[int] | None = None) -> dict[str, list[int]]:
        """Which tenants have which of the donor's lent pages as KV now, of these alone if some are named. Free pages are in no
        list."""
        lent = donor.pages.lent
        if not lent:
            return {}
        names = {tenant.number: name for name, tenant in self.tenants.items()}
        asked = sorted(lent if pages is None else lent & pages)
        return {names[number]: held for number, held in self._changes.draft.holders(asked) if number in names}

    def gone(self, donor: TenantState) -> frozenset[int]:
        """The donor's lent pages that other processes have."""
        lent = donor.pages.lent
        return frozenset(dict(self._changes.draft.holders(sorted(lent))).get(-1, ())) if lent else lent

    def held(self, holder: TenantState, pages: Iterable[int]) -> list[int]:
        """Which of these pages the holder has as KV."""
        asked = [page for page in pages if page in holder.index_of]
        its = dict(self._changes.draft.holders(asked)).get(holder.number, [])
        owned = set(holder.kv.pool.owned_slots()) if its else set[int]()
        return [page for page in its if owned.issuperset(holder.slots_of([page]))]

    def losses(self, donor: TenantState, target: Streaming) -> dict[str, int]:
        """Tenant (the donor too) -> usable blocks, exactly, that it would lose if the donor streamed this."""
        names = {tenant.number: name for name, tenant in self.tenants.items()}
        return {names[number]: lost for number, lost in self._changes.draft.losses(donor.pages, target)}

    # -- giving ----------------------------------------------------------------------------------------------------

    def lend(
        self,
        donor: TenantState,
        layers: int,
        buffers: int,
        selection: Selection,
        *,
        predicted_stall_s: float = 0.0,
    ) -> int:
        """Make the donor stream `layers` layers' worth; the pages become free. Returns their number.

        Fewer, or none, if something turns out to have written into layers.
        """
        changes, pages = self._changes, donor.pages
        buffers = donor.buffers or buffers  # another number of buffers would take pages from live blocks
        with changes.part():
            changes.note(donor, donor.books._replace(pages=ring_last(donor, buffers, selection)))
            changes.cancel_draining(donor)  # else other layers than intended would come home
            grow(changes, donor, layers, buffers, selection=selection, to="free", predicted_stall_s=predicted_stall_s)
            # If the donor grows for itself later, its ring should be where the ring's region shows it already.
            there = donor.pages.preferring(list(pages.ring_preference))
            changes.note(donor, donor.books._replace(pages=there))
        return len(donor.pages.lent) - len(pages.lent)

    def give_idle(self, donor: TenantState, blocks: int, receiver: TenantState, surplus: int) -> int:
        """Free pages of the donor's unused KV, until there are enough for `blocks` more blocks of the receiver.

        The donor loses at most `surplus` of its own blocks. It keeps pages that have no place in the receiver's KV
        region. Returns the number of pages freed.
        """
        wanted = -(-blocks * receiver.kv.spec.block_bytes // self._changes.arena.page_bytes) + 1
        return len(self.free_idle(donor, receiver, wanted, surplus))

    def free_idle(self, donor: TenantState, receiver: Receiver, wanted: int, surplus: int) -> list[int]:
        """`give_idle`, of at most `wanted` pages. Returns these."""
        slots = self.idle_slots(donor, receiver, wanted, surplus)
        if not slots:
            return []
        pages = sorted(map(donor.donation_order.__getitem__, donor.kv.geometry.donation_indices(slots)))
        plan = plan_free_pages(donor.pages, pages, give=False)
        try:
            self._changes.apply(donor, plan)
        except OutOfBlocks:  # an engine with its own allocator still holds some of them
            return []
        return pages

    def idle_slots(self, donor: TenantState, receiver: Receiver, wanted: int, surplus: int) -> list[int]:
        """Region slots of the donor's KV pages that no live block needs and that the receiver can use: at most
        `wanted`.

        The pages given last go first. The donor loses at most `surplus` blocks. It keeps the pages of its own layers,
        which come home with them, and the pages that it got for its min_blocks when it was attached: those are no
        tenant's layer, whereas the pages that it has borrowed may be asked back at any time.
        """
        pool = donor.kv.pool
        if surplus <= 0 or donor.draining:
            return []
        if receiver.number is None:
            return sorted(self._find_idle(donor, receiver, wanted, surplus)[0])
        # Kept, since every step asks while demand is unmet, and the donors often do nothing meanwhile.
        key = self._changes.key, pool.changes, surplus
        known = donor.answers.of(
            "idle pages", key, dict[int, tuple[list[int], bool]]
        )  # no entry outlives its receiver for long
        found, complete = known.get(receiver.number, ([], False))
        if len(found) < wanted and not complete:
            found, _ = known[receiver.number] = self._find_idle(donor, receiver, wanted, surplus)
        return sorted(found[:wanted])

    @staticmethod
    def _find_idle(donor: TenantState, receiver: Receiver, wanted: int, surplus: int) -> tuple[list[int], bool]:
        """(the first `wanted` slots that `idle_slots` may give, in the order in which they go; whether there are no
        more)."""
        pool, geometry = donor.kv.pool, donor.kv.geometry
        own = donor.pages.kv_from_homes | donor.books.kept
        donation_order, reserved = donor.donation_order, donor.reserved
        places = receiver.index_of
        index, columns = geometry.donation_index, geometry.range_pages
        found: list[int] = []
        lost: set[int] = set()
        owned: Sequence[int] = pool.owned_slots()[::-1]
        # Asked last, since it costs most: whether live blocks touch a page.
        if geometry.ranges == 1:  # a page stands where it was given: below `reserved` there is nothing to look at
            above = itertools.takewhile(reserved.__le__, owned)
            owned = [slot for slot in above if (page := donation_order[slot]) in places and page not in own]
        else:
            owned = [
                slot
                for slot in owned
                if (place := index(slot)) >= reserved and (page := donation_order[place]) in places and page not in own
            ]
        page, unit, most = geometry.page_bytes, geometry.unit_bytes, geometry.spec.max_blocks
        for slot in owned if pool.external else pool.vacant(owned):
            column = slot % columns
            # Whole blocks that touch the column; in place, without a call for each of thousands of slots.
            blocks = range(column * page // unit, min(-(-(column + 1) * page // unit), most))
            if len(lost) + len(blocks) > surplus and len(lost.union(blocks)) > surplus:
                return found, True
            lost.update(blocks)
            found.append(slot)
            if len(found) >= wanted:
                return found, False
        return found, True

    def borrowed(self, holder: TenantState) -> dict[TenantState, list[int]]:
        """Whose lent pages the holder has as KV, and which."""
        held = {each: self.holders(each).get(holder.name, []) for each in self.tenants.values() if each.pages.lent}
        return {each: pages for each, pages in held.items() if pages}

    def give_back(self, holder: TenantState) -> dict[int, int]:
        """Free all pages that the holder has borrowed. Returns its moves. Raises OutOfBlocks (field preempt), with nothing
        changed, if live blocks have no room elsewhere."""
        pages = sorted(page for held in self.borrowed(holder).values() for page in held)
        if not pages:
            return {}
        self._changes.cancel_draining(holder)
        plan = plan_free_pages(holder.pages, pages, give=False)
        return self._changes.apply(holder, plan) or {}

    def vacate(self, holder: TenantState, pages: Sequence[int], *, moving: bool) -> dict[int, int]:
        """Free as many of these pages of the holder's KV cache as it can do without. Returns its moves. moving: whether live
        blocks may move to make room; else the pages in which some lie stay."""
        pool, geometry = holder.kv.pool, holder.kv.geometry
        slot_of = {page: slot for page in pages for slot in holder.slots_of([page])}
        left = sorted(slot_of, key=holder.index_of.__getitem__)
        if holder.draining:  # it is emptying pages for itself
            return {}
        if not moving and not pool.external:
            vacant = set(pool.vacant(list(slot_of.values())))
            left = [page for page in left if slot_of[page] in vacant]
        while left:
            plan = plan_free_pages(holder.pages, left, give=False)
            try:
                return self._changes.apply(holder, plan) or {}
            except OutOfBlocks as error:  # without the pages of blocks that have no room
                blocks = cast("dict[str, tuple[int, ...]]", error.fields["preempt"]).get(holder.name, ())
                stay = {slot for block in blocks for slot in geometry.slots_of_block(block)}
                fewer = [page for page in left if slot_of[page] not in stay]
                left = fewer if len(fewer) < len(left) else []
        return {}

    # -- coming home -----------------------------------------------------------------------------------------------

    def bring_home(
        self,
        donor: TenantState,
        target: Streaming,
        *,
        predicted_stall_s: float = 0.0,
        drain: bool = False,
    ) -> Moves:
        """`restream`, after fetching from their holders the lent pages that come home. Returns all moves.

        Raises OutOfBlocks (field preempt: tenant -> block ids) if live blocks have no room to move, or the backend's
        error; nothing has changed then.
        """
        changes = self._changes
        pages = donor.pages
        lent = pages.to_fetch(target)
        held = {self.tenants[name]: its for name, its in self.holders(donor, lent).items()} if lent else {}
        for holder in held:
            holder.require_idle()
        gone = donor.gone and lent.intersection(self.gone(donor))
        if gone:
            raise OutOfBlocks(
                f"other processes have {len(gone)} pages of the layers that are to come home; nothing changed; these layers "
                "stream until they are given back, for which activating the tenant asks, or its next step",
                requested=len(gone),
                free=0,
                usable=0,
                preempt={},
            )
        moved: Moves = {}
        with changes.part():
            if pages.lent:
                for tenant, free in self._require_room(donor, target, lent, held):
                    changes.apply(tenant, plan_free_pages(tenant.pages, free, give=True))
            for tenant, its in held.items():
                moves = changes.apply(tenant, plan_free_pages(tenant.pages, its, give=False))
                if moves:
                    moved[tenant.name] = moves
            moves = restream(changes, donor, target, predicted_stall_s=predicted_stall_s, drain=drain)
        return moved | {donor.name: moves} if moves else moved

    def _require_room(
        self,
        donor: TenantState,
        target: Streaming,
        lent: frozenset[int],
        held: Mapping[TenantState, Sequence[int]],
    ) -> list[tuple[TenantState, Sequence[int]]]:
        """Free pages that tenants must take first, so that all their live blocks have room: no page twice, and none
        that is to come home. Raises OutOfBlocks (field preempt) if there are not enough. Engines with their own
        allocators are asked later: their blocks are withdrawn."""
        preempt: dict[str, tuple[int, ...]] = {}
        room_in_all = 0
        extra: list[tuple[TenantState, Sequence[int]]] = []
        taken = set(lent)
        for tenant in (*held, donor):

            def short(more: Sequence[int]) -> tuple[int, Sequence[int]]:
                return self._shortage(tenant, donor, held, target, more)  # noqa: B023  called at once

            if tenant.kv.pool.external or short(())[0] <= 0:
                continue
            free = [page for page in free_pages_of(self._changes, tenant) if page not in taken]
            lacking, pending = short(free)
            if lacking > 0:
                preempt[tenant.name] = tuple(pending[-lacking:])
                room_in_all += len(pending) - lacking
                continue
            least = bisect_left(
                range(len(free)),
                True,
                key=lambda n: short(free[:n])[0] <= 0,
            )
            extra.append((tenant, free[:least]))
            taken.update(free[:least])
        if preempt:
            raise _out_of_room(preempt, room_in_all)
        return extra

    def _shortage(
        self,
        tenant: TenantState,
        donor: TenantState,
        held: Mapping[TenantState, Sequence[int]],
        target: Streaming,
        extra: Sequence[int],
    ) -> tuple[int, Sequence[int]]:
        """(live blocks without a place once the tenant has the `extra` pages, all blocks that are in the way)."""
        more = tenant.slots_of(extra)
        if tenant is donor:
            _, pending, short = plan_with_room(self._changes, donor, target, more)
            return short, pending
        slots = tenant.slots_of(held[tenant])
        pending = tenant.kv.pool.pending(slots)
        return len(pending) - self._changes.room(tenant, slots, more), pending


def _out_of_room(preempt: Mapping[str, tuple[int, ...]], room: int) -> OutOfBlocks:
    blocks = sum(map(len, preempt.values()))
    return OutOfBlocks(
        f"{blocks} live blocks of {sorted(preempt)} lie in pages that are to come home, and have no room elsewhere; "
        "nothing changed; free these blocks (field preempt), or preempt their requests, and call again",
        requested=blocks,
        free=room,
        usable=room,
        preempt=dict(preempt),
    )
