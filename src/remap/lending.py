"""Pages between tenants: one model's layers become another model's KV cache, and come home again.

    lend     donor: layers -> streamed, their pages -> free          receiver: free -> kv (zeroed: they change tenant)
    return   holder: blocks move out, kv -> free        donor: free -> kv (zeroed) -> params, loaded from the master copy

Each arrow is a plan of its own, since a page goes from one tenant to another by way of `free` only: a plan that failed could
not give one tenant back what the zeroing for the other one has destroyed. Between two plans the books agree and every page
has one owner; if a later one fails, the pages stay free and lent, and the next attempt finds them there.

What may move is found out before anything changes: OutOfBlocks names, in its field `preempt`, the blocks to be freed first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .changes import Changes
from .errors import ArenaBroken, Error, OutOfBlocks
from .planner import Plan, SetOwner, plan_free_pages, plan_streamed
from .policy import free_pages_of
from .tenant import Tenant

__all__ = ["Lending", "Returned"]

Moves = dict[str, dict[int, int]]


@dataclass
class Returned:
    """What bringing pages home did. moved: tenant -> {old block: new block}. problem: why it ended early, if it did."""

    moved: Moves = field(default_factory=dict)
    problem: str = ""


class Lending:
    """One session's. Called with the session's lock held, outside of the passes of the tenants concerned."""

    def __init__(self, tenants: Mapping[str, Tenant], changes: Changes, arena: Any) -> None:
        self._tenants = tenants  # the session's own, as it is now
        self._changes = changes
        self._arena = arena
        self._held: tuple[int, dict[int, dict[str, list[int]]]] = (-1, {})  # epoch; donor -> holder -> pages

    # -- looking ---------------------------------------------------------------------------------------------------

    def holders(self, donor: Tenant, pages: frozenset[int] | None = None) -> dict[str, list[int]]:
        """Which tenants have which of the donor's lent pages as KV now. What is free is in nobody's list."""
        epoch = self._arena.epoch
        if self._held[0] != epoch:
            self._held = (epoch, {})
        known = self._held[1].get(donor.number)
        if known is None:
            known = self._held[1][donor.number] = {}
            lent = donor._attachment.pages.lent
            if lent:
                names = {tenant.number: name for name, tenant in self._tenants.items()}
                tenant_of = self._arena.tenants()
                for page in sorted(lent):
                    name = names.get(tenant_of[page])
                    if name is not None:
                        known.setdefault(name, []).append(page)
        if pages is None:
            return known
        some = {name: [page for page in held if page in pages] for name, held in known.items()}
        return {name: held for name, held in some.items() if held}

    def needed(self, donor: Tenant, layers: int, buffers: int, selection: str) -> frozenset[int]:
        """The lent pages that must come home before the donor can stream this set."""
        pages = donor._attachment.pages
        return pages.to_reclaim(donor.select(layers, buffers, selection), buffers) if pages.lent else frozenset()

    # -- giving ----------------------------------------------------------------------------------------------------

    def lend(
        self,
        donor: Tenant,
        layers: int,
        buffers: int,
        selection: str,
        *,
        predicted_stall_s: float = 0.0,
        reason: str = "",
    ) -> int:
        """The donor streams `layers` layers' worth, and what that frees becomes free pages. Returns how many.

        Fewer, or none, where layers turn out to be written.
        """
        before = len(donor._attachment.pages.lent)
        pages = donor._attachment.pages
        buffers = donor.buffers or buffers  # another number would take pages out of live blocks
        if selection == "suffix" and not pages.ring:
            # The ring is made of the very last layers: they are the last to come home.
            last = tuple(sorted(donor._attachment.order)[::-1][:buffers])
            donor._attachment.pages = replace(pages, ring_preference=last)
        self._changes.grow(
            donor, layers, buffers, selection=selection, to="free", predicted_stall_s=predicted_stall_s, reason=reason
        )
        return len(donor._attachment.pages.lent) - before

    def give_idle(self, donor: Tenant, blocks: int, receiver: Tenant, surplus: int) -> int:
        """Free pages out of the donor's unused KV, until there are enough for `blocks` more blocks of the receiver.

        At most `surplus` of the donor's own blocks are lost. It keeps pages that have no place in the receiver's KV region.
        Returns the pages freed.
        """
        wanted = -(-blocks * receiver.kv.spec.block_bytes // self._arena.page_bytes) + 1
        slots = idle_slots(donor, receiver, wanted, surplus)
        if not slots:
            return 0
        pool = donor.kv.pool
        pool.withdraw(slots)
        if pool.pending(slots):  # an engine with its own allocator holds some of them still
            pool.unwithdraw(slots)
            return 0
        pool.take(slots)
        giving, index = donor._attachment.giving, donor.kv.geometry.giving_index
        pages = sorted(giving[index(slot)] for slot in slots)
        try:
            self._free(donor, pages)
        except Error:
            pool.give(slots)
            raise
        return len(pages)

    # -- coming home -----------------------------------------------------------------------------------------------

    def restream(
        self,
        donor: Tenant,
        layers: int,
        buffers: int,
        selection: str,
        *,
        predicted_stall_s: float = 0.0,
        reason: str = "",
        drain: bool = False,
    ) -> Returned:
        """`Changes.restream`, after the lent pages among those that come home have been fetched from their holders.

        Raises OutOfBlocks (field preempt: tenant -> block ids), with nothing changed, where live blocks have no room to move.
        A backend's error is raised if nothing had changed by then; otherwise it ends the change early, named in `problem`.
        """
        target = self._changes._streamable(donor, layers, buffers, selection)
        pages = donor._attachment.pages
        lent = pages.to_reclaim(target, buffers)
        for name in self.holders(donor, lent) if lent else ():
            self._tenants[name].refuse_pass()
        result = Returned()
        if lent:
            there = replace(pages, lent=pages.lent - lent)
            lost = plan_streamed(there, self._arena.epoch, target, buffers).lost
            own = [page for page in lost if page not in lent and page not in donor._attachment.reclaimed]
            self._require_room({donor.name: own, **self.holders(donor, lent)})
            self._bring_home(donor, lent, result)
            if result.problem:
                return result
        try:
            moves = self._changes.restream(
                donor, layers, buffers, selection, predicted_stall_s=predicted_stall_s, reason=reason, drain=drain
            )
        except ArenaBroken:
            raise
        except Error as error:
            if not result.moved:
                raise
            result.problem = str(error)
            return result
        if moves:
            result.moved[donor.name] = moves
        return result

    def _require_room(self, held: Mapping[str, Sequence[int]]) -> None:
        preempt: dict[str, tuple[int, ...]] = {}
        room_of = {}
        for name, pages in held.items():
            if not pages:
                continue
            tenant = self._tenants[name]
            slots = tenant.slots_of(sorted(pages, key=tenant._attachment.index_of.__getitem__))
            pending = tenant.kv.pool.pending(slots)
            room = 0 if tenant.kv.pool.external else self._changes._room(tenant, slots, self._spare(tenant, pages))
            if tenant.kv.pool.external:
                continue  # its engine is asked by withdrawing them
            if len(pending) > room:
                preempt[name] = pending[room:]
                room_of[name] = room
        if preempt:
            raise _out_of_room(preempt, sum(room_of.values()))

    def _spare(self, tenant: Tenant, taken: Sequence[int]) -> Sequence[int]:
        """Slots of the free pages that the tenant can have, to move its blocks to."""
        gone = set(taken)
        free = [page for page in free_pages_of(self._arena, tenant) if page not in gone]
        return tenant.slots_of(free) if free else ()

    def _bring_home(self, donor: Tenant, lent: frozenset[int], result: Returned) -> None:
        changes = self._changes
        vacated: list[tuple[Tenant, list[int], list[int], list[tuple[int, int]]]] = []
        held = self.holders(donor, lent)
        for name, pages in held.items():
            tenant = self._tenants[name]
            slots = list(tenant.slots_of(sorted(pages, key=tenant._attachment.index_of.__getitem__)))
            try:
                short = len(tenant.kv.pool.pending(slots)) - changes._room(tenant, slots)
                if short > 0 and not tenant.kv.pool.external:
                    free = [page for page in free_pages_of(self._arena, tenant) if page not in lent]
                    changes.take_free_pages(tenant, free, short)
                moves = changes._vacate(tenant, slots, False) or []
            except Error as error:
                for each in reversed(vacated):
                    _undo_vacate(*each)
                if isinstance(error, OutOfBlocks):
                    raise _out_of_room({name: tenant.kv.pool.pending(slots)}, 0) from error
                raise
            vacated.append((tenant, pages, slots, moves))
        while vacated:
            tenant, pages, slots, moves = vacated[0]
            try:
                self._free(tenant, pages)
            except ArenaBroken:
                raise
            except Error as error:
                for each in reversed(vacated):
                    _undo_vacate(*each)
                if not result.moved:
                    raise
                result.problem = str(error)
                return
            vacated.pop(0)
            if moves:
                result.moved[tenant.name] = dict(moves)
        try:
            self._reclaim(donor, lent)
        except ArenaBroken:
            raise
        except Error as error:
            if not result.moved:
                raise
            result.problem = str(error)

    def _free(self, tenant: Tenant, pages: Sequence[int]) -> None:
        """KV pages that are in no block's way any more become free. The pool has let go of them."""
        plan = plan_free_pages(tenant._attachment.pages, self._arena.epoch, pages, give=False)
        self._changes.apply_and_settle(tenant, plan)

    def _reclaim(self, donor: Tenant, lent: frozenset[int]) -> None:
        """Free pages of the donor's own become its KV for the arena, which zeroes them; the pool never hears of them."""
        attachment = donor._attachment
        plan = Plan(
            epoch=self._arena.epoch,
            steps=(SetOwner(tuple(sorted(lent)), "free", "kv", donor.number),),
            streamed=attachment.pages.streamed,
            ring=attachment.pages.ring,
            reload=(),
            held=(),
            gained=(),
            lost=(),
            ring_moves=False,
            lent=attachment.pages.lent - lent,
            tail_pages=attachment.pages.tail_pages,
        )
        self._changes.apply_and_settle(donor, plan)
        attachment.reclaimed = attachment.reclaimed | lent


def idle_slots(donor: Tenant, receiver: Tenant, wanted: int, surplus: int) -> list[int]:
    """Region slots of the donor's KV pages that no live block needs and that the receiver can use: at most `wanted`.

    Those given last go first. At most `surplus` blocks are lost; none that belongs to one of the donor's own layers, which
    comes home with them.
    """
    pool, geometry = donor.kv.pool, donor.kv.geometry
    if surplus <= 0 or donor._attachment.draining:
        return []
    own = donor._attachment.pages.kv_from_homes
    borrowed_ok = receiver._attachment.index_of
    found: list[int] = []
    lost: set[int] = set()
    for slot in reversed(pool.owned_slots()):
        page = donor._attachment.giving[geometry.giving_index(slot)]
        if page in own or page not in borrowed_ok:
            continue
        if not pool.external and pool.pending((slot,)):
            continue
        blocks = set(geometry.blocks_of_columns(slot % geometry.range_pages, slot % geometry.range_pages + 1))
        if len(lost | blocks) > surplus:
            break
        lost |= blocks
        found.append(slot)
        if len(found) >= wanted:
            break
    return sorted(found)


def _undo_vacate(tenant: Tenant, pages: Sequence[int], slots: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
    # The old blocks' bytes are untouched: taking the ids back is enough.
    tenant.kv.pool.give(slots)
    if moves:
        tenant.kv.pool.commit_moves([(new, old) for old, new in moves])


def _out_of_room(preempt: Mapping[str, tuple[int, ...]], room: int) -> OutOfBlocks:
    blocks = sum(map(len, preempt.values()))
    return OutOfBlocks(
        f"{blocks} live blocks of {sorted(preempt)} lie in pages that are to come home and have no room elsewhere; nothing "
        "changed; free these blocks (field preempt), or preempt their requests, and call again",
        requested=blocks,
        free=room,
        usable=room,
        preempt=dict(preempt),
    )
