# SPDX-License-Identifier: Apache-2.0
"""Carry out a change: drain, move, apply, publish and settle, in this order, and undo it if a step fails.

    growing     save -> Executor.apply -> pool.add_pages (blocks are usable) -> decided -> tell -> settle
    shrinking   save -> pool.drain -> move live blocks -> pool.remove_pages -> Executor.apply -> decided -> tell -> settle
    settle      Prefetcher.configure -> Executor.commit

Executor.apply is the only step that changes mappings or owners. Until settle() has succeeded no other plan is applied.

An error or an interrupt (KeyboardInterrupt) can come between any two of these steps, so this module infers nothing from
how far a call came. `save` records a tenant's state before any of it changes. One store (`_Saved.decided`) says that
the change has happened. Until then `undo` puts everything back: first the core's plan, if the core says that it is
undecided, then the bookkeeping. `undo` can be interrupted and called again; it runs when a call ends with an exception,
and before the next call begins (locking.exclusive). Executor.undecided also says whether a decided plan is not settled;
the epoch does not, since other calls advance it. Listeners hear of a change when none is open any more, since they may
call the session.

A tenant that computes on a stream (streams.py) may have work there that reads what a plan takes away. The host does not
wait for that work: moves and zeroes are enqueued behind it on the same stream, and settle() hands an event behind it to
the copies and to the re-pointing worker. Three kinds of change do wait: one that takes back what an earlier one gave
waits until the worker has finished with that; one that moves the ring unmaps something inside apply(), and waits for
copies in flight; and in strict mode every change waits.

Layers that leave while their tenant is inactive are re-pointed when it serves passes again (`wake`), and not at all if
they come home before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from remap import _core
from remap.errors import Error, OutOfBlocks
from remap.kv.pool import BlockPool, SavedPool
from remap.memory.books import Books
from remap.memory.moves import compose_moves
from remap.memory.plan import NOBODY, Plan, Point, plan_back, plan_free_pages, run_of
from remap.memory.prepared import PreparedPlan
from remap.memory.state import TenantState
from remap.memory.streams import Streams
from remap.nvtx import annotated

__all__ = ["Changes"]

_logger = logging.getLogger("remap.memory")


@dataclass
class _Saved:
    """A tenant as it was before the change in progress."""

    tenant: TenantState
    books: Books
    pool: SavedPool
    moved: dict[int, int] | None
    moves: Sequence[tuple[int, int]] = ()  # live blocks that this change moved, (old, new)
    applying: bool = False  # the plan was handed to the core: if the core has an undecided plan, it is this one
    decided: bool = False
    plan: Plan | None = None  # the plan that this change applies
    planned: Books | None = None  # the books that it was made for: `books`, less the slots that drained until then


class JournalTaker(Protocol):
    """The owner of the open journal (undoing.py). take_back: called again if it was interrupted."""

    def take_back(self) -> None: ...


class Changes:
    """One session's. Called with the session's lock held."""

    def __init__(self, streams: Streams, arena: _core.Arena, executor: _core.Executor) -> None:
        self.streams = streams
        self.arena = arena
        self._executor = executor
        self._deferring = arena.mode == _core.Mode.aliased
        self._unsettled: TenantState | None = None
        self._open: dict[int, _Saved] = {}  # tenant number -> what undo() goes back to; in the order of saving
        # Tenants whose engines have their own allocators, and were asked for blocks by the change in progress.
        self._withdrawn: list[TenantState] = []
        self._unreported: list[BlockPool] = []  # pools with decided changes that their listeners have not heard of
        # tenant -> {old: new}: live blocks that have moved and are in no report yet. Written where a change is decided,
        # so that a call that raises afterwards cannot lose them.
        self.moved: dict[str, dict[int, int]] = {}
        self._simulator = streams.simulator
        self.applied = 0  # plans whose effects stand: undoing.py subtracts those that it takes back
        # The changes that can be taken back, in the order of happening: changes with a plan, of which those that are decided
        # stand.
        self._journal: list[_Saved] = []
        self._raised: Exception | None = None  # by a listener while the journal was open: the first one
        self._takers: list[JournalTaker] = []  # who will take back since when, unless it ends well; the outermost first

    @property
    def epoch(self) -> int:
        """The key for kept answers about pages and owners: they hold while it stays the same. -1: keep nothing.

        A plan that is applied and not settled has changed owners, but the arena's epoch changes only when it is
        settled.
        """
        epoch: int = self.arena.epoch
        return epoch if self._unsettled is None else -1

    # -- begun, undone, decided -------------------------------------------------------------------------------------

    def save(self, tenant: TenantState) -> _Saved:
        """Record, before the first step of a change, the state to which `undo` goes back. Changes no earlier record."""
        saved = self._open.get(tenant.number)
        if saved is None:
            saved = _Saved(tenant, tenant.books, tenant.kv.pool.save(), self.moved.get(tenant.name))
            self._open[tenant.number] = saved
            tenant.kv.pool.silence()
        return saved

    def undo(self) -> None:
        """Restore every tenant that is saved and not decided, if there is one. Raises ArenaBroken."""
        if not (self._open or self._withdrawn or self._unreported):  # in every call: cheap
            return
        while self._open:
            number = next(reversed(self._open))
            saved = self._open[number]
            if not saved.decided:
                self._restore(saved)
            else:
                self._unreported.append(saved.tenant.kv.pool)
            del self._open[number]
        while self._withdrawn:
            tenant = self._withdrawn[-1]
            if tenant.draining_target is None:
                self.cancel_draining(tenant)
            self._withdrawn.pop()
        self.tell()

    def _restore(self, saved: _Saved) -> None:
        tenant = saved.tenant
        if saved.applying:
            if self._executor.undecided():
                self._executor.rollback()
            tenant.unsettled = self._unsettled = None
        # Layers that were found written meanwhile stay pinned; an earlier change that was settled meanwhile is settled.
        order = tenant.order_of(saved.books.pages)
        tenant.books = replace(saved.books, order=order, since=tenant.since)
        if saved.moved is None:
            self.moved.pop(tenant.name, None)
        else:
            self.moved[tenant.name] = saved.moved
        tenant.kv.pool.restore(saved.pool)

    def _decide(self, saved: _Saved) -> None:
        """The change of this tenant has happened."""
        if saved.moves:
            before = {} if saved.moved is None else saved.moved
            moved = compose_moves(before, dict(saved.moves))
            if moved:
                self.moved[saved.tenant.name] = moved
            else:  # all are back where they were
                self.moved.pop(saved.tenant.name, None)
        saved.decided = True
        self._unreported.append(saved.tenant.kv.pool)
        del self._open[saved.tenant.number]

    def tell(self) -> None:
        """Tell all pools' listeners of the changes, unless a change is under way. Raises a listener's first error."""
        if self._open:
            return
        for pool in tuple(self._unreported):
            try:
                pool.tell()
            except Exception as error:
                if not self._takers:
                    raise
                self._raised = self._raised or error  # no reason to take back what it was told of: `close_journal`
            finally:
                # Else it is being told already, further up: this is a listener's call.
                if not pool.has_news and pool in self._unreported:
                    self._unreported.remove(pool)

    # -- one plan --------------------------------------------------------------------------------------------------

    @annotated("remap.apply")
    def apply(
        self,
        tenant: TenantState,
        plan: Plan | PreparedPlan,
        *,
        predicted_stall_s: float | None = None,
        reclaimed: frozenset[int] = frozenset(),
    ) -> None:
        """Apply, publish and tell. On an error nothing has changed (or the arena is broken, ArenaBroken), and
        everything that was saved for this change before is undone.

        plan: a prepared one was prepared for the tenant's present pages. predicted_stall_s: the certificate of what
        streams after it; None: it stays the same. reclaimed: pages that the plan gives back to the tenant, where they
        wait for their layers.
        """
        try:
            self._apply(tenant, plan, predicted_stall_s, reclaimed)
        except BaseException:
            self.undo()
            raise
        self.tell()

    def _apply(
        self,
        tenant: TenantState,
        given: Plan | PreparedPlan,
        predicted_stall_s: float | None,
        reclaimed: frozenset[int],
    ) -> None:
        plan = given if isinstance(given, Plan) else given.plan
        if tenant.source.verify is not None:
            tenant.source.verify({*plan.streamed, *plan.reload})
        if plan.home:  # else the load would hide that a write is lost
            tenant.refuse_lost_writes(replaced=False)  # a tensor that the model has no more harms nothing
        if self._unsettled is not None:
            self.settle(self._unsettled)
        self.retry_failed(tenant)
        self._await_copies(tenant, plan)
        ready = tenant.prepare(plan) if isinstance(given, Plan) else given
        stream = tenant.compute.current()
        # An event is needed where strict mode unmaps pages that kernels may use, and where pages are freed: another
        # tenant's zeroes have to come behind their last use. Growing in aliased mode makes no backend call before the
        # blocks are usable, unless pages have to be zeroed.
        after = tenant.compute.mark() if stream and (ready.frees or not self._deferring) else 0
        ready.core.epoch = self.arena.epoch  # an earlier plan is settled by now, and all of this is one locked call
        books = self._after(tenant, ready, predicted_stall_s, reclaimed)
        saved = self.save(tenant)
        saved.plan, saved.planned = plan, tenant.books
        if self._takers:
            self._journal.append(saved)  # before it is decided: an interrupt behind that would lose it
        saved.applying = True
        self._executor.apply(ready.core, after, stream)
        tenant.books = books
        if plan.gained:
            tenant.kv.pool.add_pages(ready.gained)
        tenant.all_ready = False
        tenant.unsettled = ready
        self._unsettled = tenant
        self._decide(saved)
        self.applied += 1

    @staticmethod
    def _after(
        tenant: TenantState, ready: PreparedPlan, predicted_stall_s: float | None, reclaimed: frozenset[int]
    ) -> Books:
        """The tenant's books after this plan (see `apply`)."""
        plan, books = ready.plan, tenant.books
        streams = plan.tails != ready.before.tails  # a plan that only takes or gives free pages leaves this as it was
        return replace(
            books,
            pages=ready.after,
            order=tenant.order_of(ready.after) if plan.elsewhere is not None else books.order,
            reclaimed=books.reclaimed.difference(plan.lost) | reclaimed,
            predicted_stall_s=books.predicted_stall_s if predicted_stall_s is None else predicted_stall_s,
            selection=(streams and plan.selection) or books.selection,
            by_hand=books.by_hand and not streams,
        )

    def _await_copies(self, tenant: TenantState, plan: Plan) -> None:
        """Wait for copies in flight if they write into pages that are about to change owner. Growth does so
        only for layers that came home just now and are still loading."""
        pages, prefetcher = tenant.pages, tenant.prefetcher
        stream = tenant.compute.current()
        longer = [layer for layer in plan.streamed if plan.tails[layer] > pages.tails[layer]]
        leaving = [layer for layer, _ in plan.elsewhere or () if layer not in pages.gone]
        ring_moves = stream and plan.ring != pages.ring and self._ring_is_pointed(plan)
        if not (
            # A ring that only grows in front keeps its copies; another number of buffers gives layers other buffers.
            plan.ring_moves
            or (pages.ring and len(plan.ring) != len(pages.ring))
            or ring_moves
            # A layer that streams is never ready: pages of it that came home may still be loading.
            or (any(pages.tails[layer] for layer in longer) and prefetcher.loading())
            or not all(prefetcher.ready(layer) for layer in longer if not pages.tails[layer])
            or not all(map(prefetcher.ready, leaving))
        ):
            return
        # Wait for the worker first: when it is done with a region, it starts the copy that waits for the region.
        self.await_worker()
        self.retry_failed(tenant)
        try:
            self._order_behind_copies(prefetcher, 0 if ring_moves else stream)
        except Error:
            self._replace_copy_stream(tenant)
            self._order_behind_copies(prefetcher, 0 if ring_moves else stream)

    def _order_behind_copies(self, prefetcher: _core.Prefetcher, stream: int) -> None:
        """Make `stream` wait for the copies in flight, or the host if it is 0."""
        if stream:
            # The next use of these pages is on the compute stream or behind it (zeroes, KV, the event of settle()), or
            # on the copy stream itself.
            self.streams.order(stream, prefetcher.copy_stream)
        else:
            prefetcher.drain()

    def _replace_copy_stream(self, tenant: TenantState) -> None:
        """Replace a copy stream that has failed, since it fails for ever. The next pass would do so too, but an
        inactive tenant may have none. Configuring the prefetcher as it is configured now replaces the stream and
        repeats its copies."""
        self.configure(tenant)

    def configure(self, tenant: TenantState) -> None:
        """Tell the prefetcher what streams now."""
        self._configure(tenant, tenant.prepare(plan_free_pages(tenant.pages, (), give=True)), (), 0)

    def _configure(self, tenant: TenantState, ready: PreparedPlan, held: Sequence[int], after: int) -> None:
        """Tell the prefetcher which layers stream, and which come home."""
        plan, copies = ready.plan, ready.copies
        size = tenant.pages.buffer_pages * self.arena.page_bytes
        ring = [tenant.ring_address + index * size for index in range(len(plan.ring))]
        tenant.prefetcher.configure(
            plan.streamed,
            ring,
            size,
            held,
            after,
            ready.ring_changes,
            copies.offsets,
            copies.places,
            copies.home,
            sorted(ready.after.gone),
        )

    def failed_points(self, tenant: TenantState | None = None) -> bool:
        """Whether a deferred re-pointing of this tenant, or of any, has failed and waits for another try."""
        return bool(self._executor.failed_points() if tenant is None else self._executor.failed_points(tenant.number))

    def retry_failed(self, tenant: TenantState) -> None:
        """Try the tenant's failed re-pointings again, if there are any. Raises the backend's error."""
        if self._executor.failed_points(tenant.number):
            self._executor.retry_failed(tenant.number)

    def await_worker(self) -> None:
        """Block until the re-pointing worker has done all committed work."""
        self._executor.drain()
        if self._simulator is not None:
            self._simulator.join()  # the worker is done in real time; the host still waits for its virtual time

    def _ring_is_pointed(self, plan: Plan) -> bool:
        """Whether apply() unmaps pages behind the ring's addresses, to which copies may still be writing."""
        for step in plan.steps:
            if isinstance(step, Point) and step.layer is None:
                shown = tuple(self.arena.shown(step.region)[step.first_slot : step.first_slot + len(step.pages)])
                if (
                    shown != tuple(step.pages) and min(shown) < self.arena.total_pages
                ):  # an empty slot shows no page's number
                    return True
        return False

    @annotated("remap.settle")
    def settle(self, tenant: TenantState) -> None:
        """Tell the prefetcher which layers stream and start the re-pointing worker. If it raises, the plan stays
        unsettled: retry."""
        if tenant.unsettled is None:
            return
        ready = tenant.unsettled
        if self._unsettled is tenant and self._executor.undecided():
            self._commit(tenant, ready)
        if self._simulator is not None:
            # In virtual time the worker has its own clock, so letting it finish here costs the host no time. And since
            # no two threads ever run at once, every run makes the same calls in the same order, and all times are the
            # same bits.
            self._executor.drain()
        if ready.plan.held or ready.plan.reload:
            stats = tenant.prefetcher.stats()
            tenant.books = replace(tenant.books, since=(stats.passes - tenant.timing.abandoned, stats.stall_s))
        tenant.unsettled = None
        if self._unsettled is tenant:
            self._unsettled = None

    def _commit(self, tenant: TenantState, ready: PreparedPlan) -> None:
        # Behind the last reader and the last writer of the pages that changed hands, moves and zeroes included.
        after = tenant.compute.mark()
        self._configure(tenant, ready, ready.plan.held if self._deferring else (), after)
        asleep = self._deferring and not tenant.active
        # Before the commit: waking a tenant that is awake is no error, leaving one asleep would be one.
        tenant.asleep = tenant.asleep or asleep
        self._executor.commit(tenant.prefetcher, after, asleep)

    def wake(self, tenant: TenantState) -> None:
        """The tenant serves passes again: the worker begins to re-point the layers that it left while the tenant was inactive.
        Raises the backend's error; then it can be called again."""
        if tenant.asleep:
            self._executor.wake(tenant.number, tenant.compute.mark())
            tenant.asleep = False  # only now
            if self._simulator is not None:
                self._executor.drain()  # as in `settle`

    def pass_on(self, pages: Sequence[int], *, out: bool) -> None:
        """Free pages go to other processes (`out`), or theirs come in as free ones. Raises as `settle` does, and then nothing has
        changed, as behind an interrupt."""
        if self._unsettled is not None:
            self.settle(self._unsettled)
        if out:
            self.await_worker()  # a region may still show them
        plan = _core.Plan(self.arena.epoch)
        owners = (_core.Owner.free, _core.Owner.outside) if out else (_core.Owner.outside, _core.Owner.free)
        plan.set_owner(list(pages), *owners, NOBODY)
        try:
            self._executor.apply(plan)
            self._executor.commit(None)
        except BaseException:
            if self._executor.undecided():
                self._executor.rollback()
            raise

    def apply_and_settle(
        self,
        tenant: TenantState,
        plan: Plan | PreparedPlan,
        *,
        predicted_stall_s: float | None = None,
        reclaimed: frozenset[int] = frozenset(),
    ) -> None:
        """Apply, then settle; the blocks are usable in between. If settling fails, `tenant.forward()` tries again."""
        self.apply(tenant, plan, predicted_stall_s=predicted_stall_s, reclaimed=reclaimed)
        try:
            self.settle(tenant)
        except Error:
            return

    # -- plans that are taken back ----------------------------------------------------------------------------------

    def journal_end(self) -> int:
        """The place in the journal of the next change."""
        if not self._takers:
            self._journal.clear()
        return len(self._journal)

    def open_journal(self, taker: JournalTaker) -> None:
        """From now on plans can be taken back, until `close_journal`."""
        self._takers.append(taker)

    def close_journal(self, taker: JournalTaker) -> Exception | None:
        """The changes since `open_journal` stay, or have been taken back. Returns, to the last one, the first error of a
        listener: it comes behind the change, which it does not end."""
        del self._takers[self._takers.index(taker) :]
        if self._takers:
            return None
        self._journal.clear()
        raised, self._raised = self._raised, None
        return raised

    def take_back(self) -> None:
        """Let all take back that have opened the journal and were interrupted before they could. Raises ArenaBroken."""
        while self._takers:
            try:
                self._takers[-1].take_back()
            except Exception:  # a broken arena, or an unforeseen error: changes made by now stay, and calls go on
                self._takers.clear()
                self._journal.clear()
                self._raised = None
                raise
            error = self.close_journal(self._takers[-1])
            if error is not None:  # the call raises already what it was taken back for
                _logger.error("a listener raised while a change was taken back", exc_info=error)

    def stands_since(self, start: int) -> bool:
        """Whether a plan stands that was decided since this place in the journal."""
        return any(saved.decided for saved in self._journal[start:])

    def take_back_last(self) -> None:
        """Take back the newest plan that stands: its tenant's pages are as before it, and its blocks where they were, with their
        bytes. If this raises, or is interrupted, the journal has what stands by then."""
        at = max(at for at, saved in enumerate(self._journal) if saved.decided)
        saved = self._journal[at]
        tenant, plan, books = saved.tenant, saved.plan, saved.planned
        assert plan is not None and books is not None
        before = books.pages
        lent = tenant.pages.lent - before.lent
        if tenant.pages.cold - before.cold:  # what these layers held is free now
            self.reclaim(tenant, frozenset(before.held.keys() - tenant.pages.held.keys()))
        elif lent and (plan.tails, plan.ring) != (before.tails, before.ring):
            self.reclaim(tenant, lent)
        back = plan_back(tenant.pages, before, plan)
        # The pool knows nothing of pages that were reclaimed before the plan, or by it.
        outside = books.reclaimed.intersection(plan.lost)
        pooled = set(plan.gained)
        slots = list(tenant.slots_of([page for page in back.lost if page in pooled]))
        if outside:
            back = replace(back, gained=run_of(page for page in back.gained if page not in outside))
        if slots:
            self.exchange(tenant, back, slots, reclaimed=outside)
        else:
            self.apply_and_settle(tenant, back, reclaimed=outside)
        if saved.moves:
            self.move_blocks(tenant, [(new, old) for old, new in saved.moves])
        del self._journal[at:]

    def reclaim(self, donor: TenantState, lent: frozenset[int]) -> None:
        """Make free pages of the donor's own layers, or that are to become so, its KV in the arena, which zeroes them. The pool
        is not told."""
        plan = plan_free_pages(donor.pages, sorted(lent), give=True)
        self.apply_and_settle(donor, replace(plan, gained=()), reclaimed=lent)

    # -- emptying pages, then one plan ---------------------------------------------------------------------------

    def exchange(
        self,
        tenant: TenantState,
        plan: Plan,
        slots: Sequence[int],
        *,
        predicted_stall_s: float | None = None,
        drain_to: tuple[int, int, str] | None = None,
        reclaimed: frozenset[int] = frozenset(),
    ) -> dict[int, int] | None:
        """Empty these slots of the KV region, apply and settle. Returns the moves made, {old: new}. If live blocks stay
        and `drain_to` is given (see `evacuate`), only withdraws the blocks and returns None."""
        moves = self.evacuate(tenant, slots, drain_to)
        if moves is None:
            return None
        self.apply(tenant, plan, predicted_stall_s=predicted_stall_s, reclaimed=reclaimed)
        try:
            self.settle(tenant)
        except Error:
            return dict(moves)  # tenant.forward() tries it again
        return dict(moves)

    def drain_from_engine(self, tenant: TenantState, slots: Sequence[int]) -> None:
        """Ask an engine with its own allocator for its blocks in these slots of the KV region. By the time this
        returns, the engine has returned those that it does not use. Do not call this while another tenant's change is
        open: the engine hears of it at once."""
        if tuple(slots) == tenant.draining:
            return
        self.cancel_draining(tenant)
        self._withdrawn.append(tenant)
        saved = self.save(tenant)
        tenant.kv.pool.drain(slots)
        tenant.books = replace(tenant.books, draining=tuple(slots), draining_target=None)
        self._decide(saved)
        self.tell()

    def evacuate(
        self, tenant: TenantState, slots: Sequence[int], drain_to: tuple[int, int, str] | None = None
    ) -> list[tuple[int, int]] | None:
        """Empty and take these slots of the KV region: the first part of a change, which `apply` completes and `undo`
        takes back.

        Returns the moves made. If live blocks stay: with drain_to, the `draining_target` of a change that may wait, the
        slots stay withdrawn for `continue_draining`, and the result is None; without it, raises OutOfBlocks, and
        nothing has changed.
        """
        try:
            return self._evacuate(tenant, slots, drain_to)
        except BaseException:
            self.undo()
            raise

    def _evacuate(
        self, tenant: TenantState, slots: Sequence[int], drain_to: tuple[int, int, str] | None
    ) -> list[tuple[int, int]] | None:
        pool = tenant.kv.pool
        if pool.external:
            self.drain_from_engine(tenant, slots)
        saved = self.save(tenant)
        if tuple(slots) != tenant.draining:
            if tenant.draining:
                pool.cancel_drain(tenant.draining)
            pool.drain(slots)
        tenant.books = replace(tenant.books, draining=(), draining_target=None)
        pending = pool.pending(slots)
        moves = pool.plan_moves(slots)
        if len(moves) < len(pending):
            if drain_to is None:
                raise self.no_room(tenant, slots, len(moves))
            tenant.books = replace(tenant.books, draining=tuple(slots), draining_target=drain_to)
            self._decide(saved)
            self.tell()
            return None
        tenant.kv.move(moves)
        if moves:  # an engine with its own allocator moves its blocks itself
            pool.commit_moves(moves)
        pool.remove_pages(slots)
        # The old blocks' bytes stay untouched until the plan is settled: to undo this, it is enough to take the old ids
        # back.
        saved.moves = moves
        return moves

    def move_blocks(self, tenant: TenantState, moves: Sequence[tuple[int, int]]) -> None:
        """Move live blocks within the KV region, (old, new) each: all of them or none."""
        try:
            saved = self.save(tenant)
            tenant.kv.move(moves)
            tenant.kv.pool.commit_moves(moves)
            saved.moves = moves
            self._decide(saved)
        except BaseException:
            self.undo()
            raise

    def room(self, tenant: TenantState, lost: Sequence[int], gained: Sequence[int] = ()) -> int:
        """How many live blocks can move out of the `lost` slots of the KV region, once the `gained` ones are there."""
        pool = tenant.kv.pool
        return pool.usable_with(lost, gained) - (pool.live_blocks - len(pool.pending(lost)))

    def no_room(self, tenant: TenantState, slots: Sequence[int], room: int) -> OutOfBlocks:
        pool = tenant.kv.pool
        pending = pool.pending(slots)
        return OutOfBlocks(
            f"{len(pending)} live blocks lie in the pages to give back, and {room} blocks are free elsewhere; nothing "
            "changed; free blocks (field preempt) or preempt requests first",
            requested=len(pending),
            free=room,
            usable=pool.usable_blocks,
            preempt={tenant.name: pending[min(0, room - len(pending)) :]},
        )

    def cancel_draining(self, tenant: TenantState, *, deactivate: bool = False) -> None:
        """Stop draining: the blocks are needed after all. deactivate: make the tenant inactive in the same change."""
        if not tenant.draining:
            tenant.books = replace(tenant.books, draining_target=None, active=tenant.active and not deactivate)
            return
        saved = self.save(tenant)
        tenant.kv.pool.cancel_drain(tenant.draining)
        tenant.books = replace(tenant.books, draining=(), draining_target=None, active=tenant.active and not deactivate)
        self._decide(saved)
        self.tell()

    def drain_again(self, tenant: TenantState, slots: tuple[int, ...], target: tuple[int, int, str] | None) -> None:
        """Drain the slots again that were draining before a change that was taken back, and no others. In between the
        engine got back the blocks that it had returned, so it is asked for them once more."""
        saved = self.save(tenant)
        pool = tenant.kv.pool
        if tenant.draining != slots:
            pool.cancel_drain(tenant.draining)
            pool.drain(slots)
        tenant.books = replace(tenant.books, draining=slots, draining_target=target)
        self._decide(saved)
        self.tell()

    # -- the end ---------------------------------------------------------------------------------------------------

    def forget(self, tenant: TenantState) -> None:
        """For a tenant that goes away: its decided plan becomes final, and is neither settled nor tried again."""
        if tenant.unsettled is not None:
            if self._unsettled is tenant and self._executor.undecided():
                self._executor.commit(None)
            tenant.unsettled = None
            if self._unsettled is tenant:
                self._unsettled = None
        self.await_worker()
        self._executor.forget(tenant.number)

    def release(self, tenant: TenantState) -> None:
        """The tenant has gone: release its copy stream, its events and the objects that kept master copies alive. Can be called
        again."""
        if tenant.live_prefetcher is not None:
            self.streams.retire(tenant.live_prefetcher)
            tenant.live_prefetcher = None
        tenant.source = tenant.source.released()

    def abandon(self, tenant: TenantState) -> None:
        """Stop everything in flight for a tenant that goes away. Its pages may be released afterwards.

        Waits for its compute stream, so that nothing is unmapped that a kernel may use.
        """
        if tenant.detached:
            return
        prefetcher, pages = tenant.prefetcher, tenant.pages
        tenant.kv.abandon()
        tenant.compute.wait()
        tenant.leaving = True
        # Noted while it is still known: some bytes of these layers are not at their addresses.
        tenant.absent.update(part for part in range(tenant.parts) if not prefetcher.ready(part))
        tenant.absent.update(pages.streamed)
        tenant.absent.update(pages.gone)
        if tenant.unsettled is not None:
            tenant.absent.update(tenant.unsettled.plan.reload, tenant.unsettled.plan.held)
        self.forget(tenant)
        if prefetcher.in_pass:
            prefetcher.end_pass()
        try:
            prefetcher.drain()
        except Error:
            # The copy stream has failed; its engine was told or did not want to know. Issued copies may still run:
            # configuring replaces the stream, and destroying the old stream waits for them.
            prefetcher.configure((), (), 0)
            prefetcher.drain()
