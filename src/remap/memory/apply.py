# SPDX-License-Identifier: Apache-2.0
"""Carry out changes. A change is one or more plans, of one tenant or several, which happen whole or not at all:

    with changes.part():                          a part of a change; within another one it belongs to that
        drain, plan_moves, apply, ...             a draft: books and pools are as they will be, and nothing else has changed
    Executor.change                               at the end of the outermost part: the only step that changes mappings or owners
    move, tell, settle                            what is due is done; listeners hear of it

    growing     apply -> pool.add_pages
    shrinking   pool.drain -> commit_moves -> pool.remove_pages -> apply
    settle      Executor.zero_free -> moved blocks' bytes -> zero_due -> Prefetcher.configure -> Executor.commit, for all tenants

A part that fails is dropped: books and pools that it has touched are again as they were (`Savepoint`), the draft forgets its
plans, and the exception goes on. What the change was before stays. All that Executor.change may refuse was checked when the plans
were added; an error of the device there changes nothing, and the whole change is dropped. Behind it nothing goes back: what is
due is retried until it is done, before the next change and before its tenants' next passes.

An error or an interrupt (KeyboardInterrupt) can come between any two steps, so this module infers nothing from how far a call
came: `undo` drops a change that is not made, and carries on with one that is, which Executor.undecided says: no other change can
be applied before it is committed. It can be interrupted and called again; it runs when a call ends with an exception, and before
the next call begins (locking.exclusive). Listeners hear of a change when none is in progress any more: they may call the session.

Live blocks move when the change is made: the pool names their new places from the draft on, and the old ones hold the bytes until
then. Strict mode shows the old places until the change is committed. A page that another tenant had when the change began, or
within it, is zeroed behind these moves. The pool of its new tenant gets such pages only then, so no block moves there.

A tenant that computes on a stream (streams.py) may have work there that reads what a change takes away. The host does not
wait for that work: moves and zeroes are enqueued behind it on the same stream, and settle() hands an event behind it to
the copies and to the re-pointing worker. Three kinds of change do wait: one that takes back what an earlier one gave
waits until the worker has finished with that; one that moves the ring unmaps something inside Executor.change, and waits for
copies in flight; and in strict mode every change waits.

Layers that leave while their tenant is inactive are re-pointed when it serves passes again (`wake`), and not at all if
they come home before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from remap import _core
from remap.errors import Error, OutOfBlocks
from remap.kv.pool import BlockPool
from remap.memory.draft import Change, DueWork, Moves, Savepoint, compose_moves, restored
from remap.memory.pages import NOBODY, Streaming, TenantPages, Transition
from remap.memory.state import Books, TenantState
from remap.memory.streams import Streams
from remap.nvtx import annotated

__all__ = ["Changes"]

_logger = logging.getLogger("remap.memory")


class _Part:
    """See `Changes.part`."""

    __slots__ = ("_depth", "_enter", "_leave")

    def __init__(self, enter: Callable[[], int], leave: Callable[[int, bool], None]) -> None:
        self._enter = enter
        self._leave = leave

    def __enter__(self) -> None:
        self._depth = self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(self._depth, error is not None)


class Changes:
    """One session's. Called with the session's lock held."""

    def __init__(self, streams: Streams, arena: _core.Arena, executor: _core.Executor) -> None:
        self.streams = streams
        self.arena = arena
        self._executor = executor
        self._deferring = arena.mode == _core.Mode.aliased
        self.draft = _core.Draft(arena)  # the plans of the change in progress, and the pages as they will be behind it
        self._change: Change | None = None
        self._unsettled: dict[TenantState, DueWork] = {}  # of the last decided change
        self._settling = False  # nothing but an interrupt keeps it from that
        self._unreported: list[BlockPool] = []  # pools with decided changes that their listeners have not heard of
        # tenant -> {old: new}: live blocks that have moved and are in no report yet. Written where a change is decided,
        # so that a call that raises afterwards cannot lose them.
        self.moved: dict[str, dict[int, int]] = {}
        self._simulator = streams.simulator
        self.decisions = 0  # changes with plans or moves that were decided

    @property
    def epoch(self) -> int:
        """The key for kept answers about pages and owners: they hold while it stays the same. -1: keep nothing.

        Owners are others within a change, and behind it, but the arena's epoch changes only when that is settled.
        """
        if self._unsettled or self.draft.plans:
            return -1
        epoch: int = self.arena.epoch
        return epoch

    def untold(self, moved: dict[str, dict[int, int]]) -> None:
        """These moves were taken for a report, and nobody has got it."""
        names = {**moved, **self.moved}
        self.moved = {name: compose_moves(moved.get(name, {}), self.moved.get(name, {})) for name in names}

    # -- begun, dropped, made ---------------------------------------------------------------------------------------

    def part(self) -> _Part:
        """A context manager: what is changed within it is one change, or a part of the one around it. On any exception nothing of
        it has changed, and the exception goes on; else, at the end of the outermost, the change is made and settled. Raises the
        backend's error if it cannot be made, and nothing has changed then; a listener's first error, behind the change. If
        settling fails, `Tenant.forward` tries again."""
        return _Part(self._enter, self._leave)

    def _enter(self) -> int:
        change = self._change
        if change is None:
            change = self._change = Change()
            try:
                self._settle()
            except Error as error:
                change.problem = error
        change.savepoints.append(Savepoint(self.draft.plans, change.due))
        return len(change.savepoints) - 1

    def _leave(self, depth: int, failed: bool) -> None:
        change = self._change
        if change is None or depth >= len(change.savepoints):
            return
        if failed:
            self._go_back(change, depth)
        elif depth:
            change.join()
        else:
            self._finish(change)

    def _finish(self, change: Change) -> None:
        try:
            self._make(change)
        except BaseException:
            if not self._executor.undecided():
                self._go_back(change, 0)
            raise
        self._carry_on(change)
        with suppress(Error):  # as below
            self._fill(change.due)
        try:
            self.tell()
        finally:
            with suppress(Error):  # `Tenant.forward` tries again
                self._settle()
        self.tell()

    @annotated("remap.apply")
    def _make(self, change: Change) -> None:
        """The core makes the change, whole or not at all."""
        change.decisions = self.decisions + bool(change.due)
        change.moved = dict(self.moved)
        orderings: list[tuple[int, int, int]] = []
        for tenant, each in change.due.items():
            for moves in each.moves:
                change.moved[tenant.name] = compose_moves(change.moved.get(tenant.name, {}), dict(moves))
            self.retry_failed(tenant)
            self._await_copies(tenant, change.savepoints[0].before[tenant][0].pages, each.plan)
            stream = tenant.compute.current()
            # An event is needed where pages that kernels may use are unmapped, and where pages are freed: another tenant's
            # zeroes have to come behind their last use. Growing in aliased mode makes no backend call before the blocks are
            # usable, unless pages have to be zeroed.
            after = tenant.compute.mark() if stream and (each.plan.frees or not self._deferring) else 0
            orderings.append((tenant.number, after, stream))
        if change.due:
            change.applying = True
            self._executor.change(self.draft, orderings)

    def _carry_on(self, change: Change) -> None:
        """The change is made. Can be called again, if it was interrupted."""
        self.moved, self.decisions = {name: moves for name, moves in change.moved.items() if moves}, change.decisions
        if change.due:
            self._unsettled, self._settling = change.due, True
            for tenant, due in change.due.items():
                tenant.unsettled, tenant.pending_slots = due.plan, due.slots
                tenant.kv.due_moves, tenant.kv.unfinished = due.moves, True
        for tenant in change.savepoints[0].before:
            if tenant.kv.pool not in self._unreported:
                self._unreported.append(tenant.kv.pool)
        self._change = None

    def undo(self) -> None:
        """Drop the change in progress, if there is one that is not made. Raises ArenaBroken."""
        change = self._change
        if change is not None:
            if change.applying and self._executor.undecided():
                self._carry_on(change)
            elif change.savepoints:
                self._go_back(change, 0)
            self._change = None
        if self._settling:
            with suppress(Error):
                self._settle()
        if self._unreported:  # in every call: cheap
            self.tell()

    def _go_back(self, change: Change, depth: int) -> None:
        """To the beginning of the part at this depth. Can be called again, if it was interrupted."""
        place, concerned = change.savepoints[depth], set[TenantState]()
        for each in reversed(change.savepoints[depth:]):
            for tenant, (books, pool) in each.before.items():
                tenant.books = restored(tenant, books)
                tenant.kv.pool.restore(pool)
                concerned.add(tenant)
        self.draft.cut(place.plans)
        change.due = place.due
        self._unreported += [each.kv.pool for each in concerned]  # once the change is over: they are silent until then
        del change.savepoints[depth:]  # only now: until then all of this can be done again
        if change.savepoints:
            return
        self._change = None
        try:
            self.tell()
        except Exception as error:  # the call raises already what it went back for
            _logger.error("a listener raised while a change was dropped", exc_info=error)

    def tell(self) -> None:
        """Tell all pools' listeners of the changes, unless a change is under way. Raises a listener's first error."""
        if self._change is not None:
            return
        for pool in tuple(self._unreported):
            try:
                pool.tell()
            finally:
                # Else it is being told already, further up: this is a listener's call.
                if not pool.has_news and pool in self._unreported:
                    self._unreported.remove(pool)

    def _save(self, tenant: TenantState) -> Change:
        """Before the first step of a part. Returns the change in progress."""
        change = self._change
        assert change is not None, "within `part`"
        change.save(tenant)
        return change

    # -- one plan --------------------------------------------------------------------------------------------------

    def apply(
        self,
        tenant: TenantState,
        plan: Transition,
        *,
        predicted_stall_s: float | None = None,
    ) -> None:
        """Apply the plan, as a part of a change. On an error nothing has changed (or the arena is broken, ArenaBroken).

        predicted_stall_s: the certificate of what streams after it; None: it stays the same.
        """
        with self.part():
            self._apply(tenant, plan, predicted_stall_s)

    def _apply(
        self, tenant: TenantState, plan: Transition, predicted_stall_s: float | None, moves: tuple[Moves, ...] = ()
    ) -> None:
        if tenant.source.verify is not None:
            tenant.source.verify({*plan.streamed, *plan.reload})
        if plan.home:  # else the load would hide that a write is lost
            tenant.refuse_lost_writes(replaced=False)  # a tensor that the model has no more harms nothing
        change = self._save(tenant)
        if change.problem is not None:
            raise change.problem
        core = plan.core
        core.epoch = self.arena.epoch  # an earlier change is settled by now, and all of this is one locked call
        late = frozenset(self.draft.add(core))
        tenant.books = self._after(tenant, plan, predicted_stall_s)
        if gained := plan.gained:
            now = [each for each in gained if each not in late] if late else gained
            tenant.kv.pool.add_pages(tenant.slots_of(now))
        tenant.all_ready = False
        change.add_due(tenant, DueWork(plan, tuple(tenant.slots_of(sorted(late))) if late else (), moves))

    @staticmethod
    def _after(tenant: TenantState, plan: Transition, predicted_stall_s: float | None) -> Books:
        """The tenant's books after this plan (see `apply`)."""
        there, books = plan.there, tenant.books
        now = books.pages
        # A plan that only takes or gives free pages leaves what streams, and how it was chosen, as they were.
        streams = there.tails != now.tails
        return replace(
            books,
            pages=there,
            order=tenant.order_of(there) if there.elsewhere != now.elsewhere else books.order,
            predicted_stall_s=books.predicted_stall_s if predicted_stall_s is None else predicted_stall_s,
            selection=(streams and plan.selection) or books.selection,
            by_hand=books.by_hand and not streams,
        )

    def _await_copies(self, tenant: TenantState, pages: TenantPages, plan: Transition) -> None:
        """Wait for copies in flight if they write into pages that are about to change owner. Growth does so
        only for layers that came home just now and are still loading. pages: before the change."""
        prefetcher = tenant.prefetcher
        stream = tenant.compute.current()
        there = plan.there
        longer = [layer for layer in there.streamed if there.tails[layer] > pages.tails[layer]]
        leaving = there.gone - pages.gone if there.elsewhere else ()
        # Whether the change unmaps pages behind the ring's addresses, to which copies may still be writing.
        ring_moves = stream and there.ring != pages.ring and self.draft.unmaps(pages.ring_region)
        if not (
            # A ring that only grows in front keeps its copies; another number of buffers gives layers other buffers.
            plan.ring_moves
            or (pages.ring and len(there.ring) != len(pages.ring))
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
            # The copy stream fails for ever. The next pass would replace it, but an inactive tenant may have none.
            # Configuring the prefetcher as it is configured now replaces the stream and repeats its copies.
            self._configure(tenant, Transition(pages), (), 0)
            self._order_behind_copies(prefetcher, 0 if ring_moves else stream)

    def _order_behind_copies(self, prefetcher: _core.Prefetcher, stream: int) -> None:
        """Make `stream` wait for the copies in flight, or the host if it is 0."""
        if stream:
            # The next use of these pages is on the compute stream or behind it (zeroes, KV, the event of settle()), or
            # on the copy stream itself.
            self.streams.order(stream, prefetcher.copy_stream)
        else:
            prefetcher.drain()

    def configure(self, tenant: TenantState) -> None:
        """Tell the prefetcher what streams now."""
        self._configure(tenant, Transition(tenant.pages), (), 0)

    def _configure(self, tenant: TenantState, plan: Transition, held: Sequence[int], after: int) -> None:
        """Tell the prefetcher which layers stream, and which come home."""
        if tenant.prefetcher.in_pass:  # one that nobody can end any more (locking.Turn): no change is made in others
            tenant.timing.abandoned += 1
            tenant.prefetcher.end_pass()
        there = plan.there
        offsets, places, home = plan.copies(tenant.layer_bytes, self.arena.page_bytes)
        size = tenant.pages.buffer_pages * self.arena.page_bytes
        ring = [tenant.ring_address + index * size for index in range(len(there.ring))]
        tenant.prefetcher.configure(
            there.streamed,
            ring,
            size,
            held,
            after,
            plan.ring_changes,
            offsets,
            places,
            home,
            sorted(there.gone),
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

    def settle(self, tenant: TenantState) -> None:
        """Do what is due of the last change, if this tenant is concerned: zero pages that changed tenant, tell the
        prefetchers which layers stream, and start the re-pointing worker. If it raises, the change stays unsettled:
        retry."""
        if tenant.unsettled is not None:
            self._settle()
            self.tell()

    def _settle(self) -> None:
        if self._unsettled:
            self._settle_all(self._unsettled)

    @annotated("remap.settle")
    def _settle_all(self, due: dict[TenantState, DueWork]) -> None:
        if self._executor.undecided():
            try:
                self._commit(due)
            except Error:
                self._settling = False  # whoever needs it tries again
                raise
        if self._simulator is not None:
            # In virtual time the worker has its own clock, so letting it finish here costs the host no time. And since
            # no two threads ever run at once, every run makes the same calls in the same order, and all times are the
            # same bits.
            self._executor.drain()
        for tenant, each in due.items():
            if tenant.leaving:
                continue
            pool = tenant.kv.pool
            if tenant.pending_slots:
                owned = set(pool.owned_slots())  # some, if this was interrupted
                pool.silence()
                pool.add_pages([slot for slot in each.slots if slot not in owned])
                self._unreported.append(pool)
                tenant.pending_slots = ()
            if each.plan.held or each.plan.reload:
                stats = tenant.prefetcher.stats()
                tenant.books = replace(tenant.books, since=(stats.passes - tenant.timing.abandoned, stats.stall_s))
            tenant.unsettled = None
        self._unsettled, self._settling = {}, False

    def _fill(self, due: dict[TenantState, DueWork]) -> None:
        """Zero pages that were free, and copy the bytes of the live blocks that have moved. Raises the backend's error; the rest
        is still due."""
        waiting = [tenant for tenant in due if tenant.kv.unfinished]
        if waiting:
            self._executor.zero_free()
        for tenant in waiting:
            if not tenant.leaving:
                tenant.kv.finish_moves()
            tenant.kv.unfinished = False

    def _commit(self, due: dict[TenantState, DueWork]) -> None:
        self._fill(due)
        moved = (tenant.compute.mark() for tenant, each in due.items() if each.moves and not tenant.leaving)
        self._executor.zero_due([event for event in moved if event])
        shares: list[tuple[int, _core.Prefetcher | None, int, bool]] = []
        for tenant, each in due.items():
            if tenant.leaving:  # nothing of it is used any more
                shares.append((tenant.number, None, 0, False))
                continue
            # Behind the last reader and the last writer of the pages that changed hands, moves and zeroes included.
            after = tenant.compute.mark()
            self._configure(tenant, each.plan, each.plan.held if self._deferring else (), after)
            asleep = self._deferring and not tenant.active
            # Before the commit: waking a tenant that is awake is no error, leaving one asleep would be one.
            tenant.asleep = tenant.asleep or asleep
            shares.append((tenant.number, tenant.prefetcher, after, asleep))
        self._executor.commit_each(shares)

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
        changed; behind an interrupt all or nothing has."""
        self._settle()
        if out:
            self.await_worker()  # a region may still show them
        plan = _core.Plan(self.arena.epoch)
        owners = (_core.Owner.free, _core.Owner.outside) if out else (_core.Owner.outside, _core.Owner.free)
        plan.set_owner(list(pages), *owners, NOBODY)
        self._executor.pass_on(self.draft, plan)

    # -- what some changes begin with -------------------------------------------------------------------------------

    def exchange(
        self,
        tenant: TenantState,
        plan: Transition,
        slots: Sequence[int],
        *,
        predicted_stall_s: float | None = None,
        drain_to: Streaming | None = None,
    ) -> dict[int, int] | None:
        """Empty these slots of the KV region and apply, as a part of a change. Returns the moves made, {old: new}. Raises
        OutOfBlocks if live blocks stay. With `drain_to`, the `draining_target` of a change that may wait, the slots are withdrawn
        then, for `continue_draining`, nothing else is done, and the result is None."""
        with self.part():
            moves = self._empty(tenant, slots, drain_to)
            if moves is None:
                return None
            self._apply(tenant, plan, predicted_stall_s, (moves,) if moves else ())
            return dict(moves)

    def drain_from_engine(self, tenant: TenantState, slots: Sequence[int]) -> None:
        """Ask an engine with its own allocator for its blocks in these slots of the KV region. It hears of it at once, and by
        the time this returns has returned those that it does not use. If the change is undone, it hears that the blocks are its
        again."""
        if tuple(slots) == tenant.draining:
            return
        with self.part():
            self._save(tenant)
            pool = tenant.kv.pool
            if tenant.draining:
                pool.cancel_drain(tenant.draining)
            pool.drain(slots)
            tenant.books = replace(tenant.books, draining=tuple(slots), draining_target=None)
            if pool.telling:  # further up: this is a listener's call, and what is new is told behind it
                return
            pool.tell_withdrawn()

    def _empty(
        self, tenant: TenantState, slots: Sequence[int], drain_to: Streaming | None
    ) -> list[tuple[int, int]] | None:
        """`exchange`, without the plan."""
        pool = tenant.kv.pool
        if pool.external:
            self.drain_from_engine(tenant, slots)
        self._save(tenant)
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
            return None
        if moves:  # an engine with its own allocator moves its blocks itself
            pool.commit_moves(moves)
        pool.remove_pages(slots)
        return moves

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
        active = tenant.active and not deactivate
        if not tenant.draining and tenant.draining_target is None and active == tenant.active:
            return  # as in every growth
        with self.part():
            self._save(tenant)
            if tenant.draining:
                tenant.kv.pool.cancel_drain(tenant.draining)
            tenant.books = replace(tenant.books, draining=(), draining_target=None, active=active)

    def note(self, tenant: TenantState, books: Books) -> None:
        """These are the tenant's books from now on, as a part of a change: nothing of its pages or blocks is different."""
        with self.part():
            self._save(tenant)
            tenant.books = books

    # -- the end ---------------------------------------------------------------------------------------------------

    def forget(self, tenant: TenantState) -> None:
        """For a tenant that goes away: what is due for it is not done any more. Raises the backend's error if it could not
        be done for others that the same change concerns; call it again."""
        tenant.leaving = True
        self._executor.forget(tenant.number)
        if tenant.unsettled is not None and not self.arena.broken:
            self._settle()  # others may be concerned as well
        tenant.unsettled = None
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
            tenant.absent.update(tenant.unsettled.reload, tenant.unsettled.held)
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
