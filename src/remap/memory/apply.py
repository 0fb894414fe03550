# SPDX-License-Identifier: Apache-2.0
"""Carry out changes. A change is one or more plans, of one tenant or several, which happen whole or not at all:

    with changes.part():                  a part of a change; within another one it belongs to that
        apply(tenant, plan)               into the core's draft: books and pools are as they will be, and nothing else has changed
    Executor.change                       at the end of the outermost part: the only step that changes mappings or owners
    move, tell, settle                    what is due is done; listeners hear of it

    settle      Executor.zero_free -> moved blocks' bytes -> zero_due -> Executor.settle: prefetchers, pools, the worker

A part that fails is cut off the draft, with what it did to books and pools, and the exception goes on. What the change was
before stays. All that Executor.change may refuse was checked when the plans were added; an error of the device there changes
nothing, and the whole change is dropped. Behind it nothing goes back: what is due is retried until it is done, before the next
change and before its tenants' next passes.

An error or an interrupt (KeyboardInterrupt) can come between any two steps, so this module infers nothing from how far a call
came: a change is made once the draft is empty. `undo` drops one that is not made, and carries on with one that is. It can be
interrupted and called again; it runs when a call ends with an exception, and before the next call begins (locking.exclusive).
Listeners hear of a change when none is in progress any more: they may call the session.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType

from remap import _core
from remap.errors import Error, InvalidState, OutOfBlocks
from remap.memory.pages import Streaming, TenantPages, Transition
from remap.memory.state import Books, TenantState
from remap.memory.streams import Streams
from remap.nvtx import annotated

__all__ = ["Changes", "compose_moves", "no_room"]

_logger = logging.getLogger("remap.memory")


class _Part:
    """See `Changes.part`."""

    __slots__ = ("_changes", "_depth")

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def __enter__(self) -> None:
        self._depth = self._changes.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._changes.end(self._depth, error is not None)


class Changes:
    """One session's. Called with the session's lock held."""

    def __init__(
        self,
        streams: Streams,
        arena: _core.Arena,
        executor: _core.Executor,
        tenants: Mapping[str, TenantState],
    ) -> None:
        """tenants: the session's own, as it is now."""
        self.streams = streams
        self.arena = arena
        self._executor = executor
        self._tenants = tenants
        self._deferring = arena.mode == _core.Mode.aliased
        self.draft = _core.Draft(arena)  # the plans of the change in progress, and the pages as they will be behind it
        self._problem: Error | None = None  # why the last change could not be settled, so that no plan can be added
        # Of the change that the core makes now: what will be due, and `moved`.
        self._making: tuple[list[tuple[TenantState, _core.Rest]], dict[str, dict[int, int]]] | None = None
        self._due: tuple[TenantState, ...] = ()  # of the last change that was made, until it is settled
        self._settling = False  # nothing but an interrupt keeps it from that
        self.writing = False  # a caller of `advanced.rewrite` writes
        self._untold = False  # listeners may have to hear of something
        # tenant -> {old: new}: live blocks that have moved and are in no report yet. Written where a change is made,
        # so that a call that raises afterwards cannot lose them.
        self.moved: dict[str, dict[int, int]] = {}
        self._simulator = streams.simulator
        self.decisions = 0  # changes with plans that were made

    @property
    def key(self) -> object:
        """The key for kept answers about pages and owners: they hold while it stays the same.

        Owners are others within a change, and behind it, but the arena's epoch changes only when that is settled: until then no
        answer is kept.
        """
        return object() if self._due or self.draft.plans else self.arena.epoch

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
        return _Part(self)

    def begin(self) -> int:
        """A part begins. Returns how many there are around it."""
        if not self.draft.depth:
            self._problem, self._untold = None, True
            try:
                self._settle()
            except Error as error:
                self._problem = error
        return self.draft.begin()

    def end(self, depth: int, failed: bool) -> None:
        """It is over."""
        if failed:
            self._drop(depth)
        elif depth:
            self.draft.join(depth)
        elif self.draft.depth:
            self._finish()

    def _finish(self) -> None:
        try:
            self._make()
        except BaseException:
            self._drop(0)
            raise
        self._carry_on()
        with suppress(Error):  # as below
            self._fill(self._due)
        try:
            self.tell()
        finally:
            with suppress(Error):  # `Tenant.forward` tries again
                self._settle()
        self.tell()

    @annotated("remap.apply")
    def _make(self) -> None:
        """The core makes the change, whole or not at all."""
        moved, rests, orderings = dict(self.moved), [], []
        for tenant, before, rest in self.draft.rests():
            for moves in rest.moves:
                moved[tenant.name] = compose_moves(moved.get(tenant.name, {}), dict(moves))
            self.retry_failed(tenant)
            stream = tenant.compute.current()
            moves_ring = stream and self.draft.moves_ring(rest, before.pages)
            if moves_ring or rest.awaits_copies(before.pages, tenant.prefetcher):
                self._await_copies(tenant, before.pages, 0 if moves_ring else stream)
            # An event is needed where pages that kernels may use are unmapped, and where pages are freed: another tenant's
            # zeroes have to come behind their last use. Growing in aliased mode makes no backend call before the blocks are
            # usable, unless pages have to be zeroed.
            after = tenant.compute.mark() if stream and (rest.frees or not self._deferring) else 0
            orderings.append((tenant.number, after, stream))
            rests.append((tenant, rest))
        if not rests:
            self.draft.end()
            return
        self._making = rests, {name: moves for name, moves in moved.items() if moves}
        self._executor.change(self.draft, orderings)

    def _carry_on(self) -> None:
        """The change is made, if one was. Can be called again, if it was interrupted."""
        if self._making is None:
            return
        rests, moved = self._making
        for tenant, rest in rests:
            tenant.rest, tenant.kv.due_moves, tenant.kv.unfinished = rest, tuple(rest.moves), True
        self._due, self._settling = tuple(tenant for tenant, _ in rests), True
        self.moved, self.decisions, self._making = moved, self.decisions + 1, None

    def undo(self) -> None:
        """Drop the change in progress, if there is one that is not made. Raises ArenaBroken."""
        self.writing = False
        if self.draft.depth or self._making is not None:  # in every call: cheap
            self._drop(0)
            self._carry_on()
        if self._settling:
            with suppress(Error):
                self._settle()
        if self._untold:
            self.tell()

    def _drop(self, depth: int) -> None:
        """To the beginning of the part at this depth, unless the change is made. Can be called again, if it was interrupted."""
        if self.draft.depth <= depth:
            return
        self._making = None
        self.draft.cut(depth)
        if depth:
            return
        try:
            self.tell()
        except Exception as error:  # the call raises already what it went back for
            _logger.error("a listener raised while a change was dropped", exc_info=error)

    def tell(self) -> None:
        """Tell all pools' listeners of the changes, unless a change is under way. Raises a listener's first error."""
        if not self._untold or self.draft.depth:
            return
        pools = [tenant.kv.pool for tenant in self._tenants.values()]
        for pool in pools:
            if pool.has_news:
                pool.tell()
        self._untold = any(pool.has_news for pool in pools)  # this is a listener's call, and more is told further up

    # -- one plan --------------------------------------------------------------------------------------------------

    def apply(
        self,
        tenant: TenantState,
        plan: Transition,
        *,
        predicted_stall_s: float | None = None,
        drain_to: Streaming | None = None,
    ) -> dict[int, int] | None:
        """Apply the plan, as a part of a change: live blocks move out of the pages that it takes from KV. Returns these moves,
        {old: new}. On an error nothing has changed (or the arena is broken, ArenaBroken). Raises OutOfBlocks (field preempt) if
        live blocks have no room elsewhere. With `drain_to`, the `draining_target` of a change that may wait, the pages are
        withdrawn then, for `continue_draining`, nothing else is done, and the result is None.

        predicted_stall_s: the certificate of what streams after it; None: it stays the same.
        """
        with self.part():
            if tenant.source.verify is not None:
                tenant.source.verify({*plan.streamed, *plan.reload})
            if plan.home:  # else the load would hide that a write is lost
                tenant.refuse_lost_writes(replaced=False)  # a tensor that the model has no more harms nothing
            if self._problem is not None:
                raise self._problem
            pool, lost = tenant.kv.pool, plan.lost
            slots = sorted(tenant.slots_of(lost)) if lost and (pool.external or pool.withdrawn or drain_to) else []
            if slots and pool.external:
                self.drain_from_engine(tenant, slots)
            elif slots and pool.withdrawn and pool.closed_slots() != tuple(slots):
                self.draft.reopen(tenant.number)
            moves, pending, room = self.draft.take_in(tenant, plan)
            if moves is not None:
                tenant.books = _books_after(tenant.books, plan, predicted_stall_s)
                tenant.all_ready = False
            elif drain_to is None:
                raise no_room(tenant, pending, room)
            else:
                if not pool.withdrawn:
                    self.draft.withdraw(tenant.number, slots)
                tenant.books = tenant.books._replace(draining_target=drain_to)
            return moves

    def drain_from_engine(self, tenant: TenantState, slots: Sequence[int]) -> None:
        """Ask an engine with its own allocator for its blocks in these slots of the KV region, ascending. It hears of it at once,
        and by the time this returns has returned those that it does not use. If the change is dropped, it hears that the blocks
        are its again."""
        pool = tenant.kv.pool
        if pool.closed_slots() == tuple(slots):
            return
        with self.part():
            self.draft.keep(tenant)
            self.draft.reopen(tenant.number)
            self.draft.withdraw(tenant.number, slots)
            tenant.books = tenant.books._replace(draining_target=None)
            if not pool.telling:  # else this is a listener's call, and what is new is told behind it
                pool.tell_withdrawn()

    def room(self, tenant: TenantState, lost: Sequence[int], gained: Sequence[int] = ()) -> int:
        """How many live blocks can move out of the `lost` slots of the KV region, once the `gained` ones are there."""
        pool = tenant.kv.pool
        return pool.usable_with(lost, gained) - (pool.live_blocks - len(pool.pending(lost)))

    def cancel_draining(self, tenant: TenantState, *, deactivate: bool = False) -> None:
        """Stop draining: the blocks are needed after all. deactivate: make the tenant inactive in the same change."""
        books, active = tenant.books, tenant.active and not deactivate
        if not tenant.draining and books.draining_target is None and active == books.active:
            return  # as in every growth
        with self.part():
            self.draft.keep(tenant)
            self.draft.reopen(tenant.number)
            tenant.books = books._replace(draining_target=None, active=active)

    def note(self, tenant: TenantState, books: Books) -> None:
        """These are the tenant's books from now on, as a part of a change: nothing of its pages or blocks is different."""
        with self.part():
            self.draft.keep(tenant)
            tenant.books = books

    def _await_copies(self, tenant: TenantState, pages: TenantPages, stream: int) -> None:
        """Wait for copies in flight that write into pages that are about to change owner. Growth has some only of layers that
        came home just now and are still loading. pages: before the change. stream: waits for them, or the host if it is 0."""
        # Wait for the worker first: when it is done with a region, it starts the copy that waits for the region.
        self.await_worker()
        self.retry_failed(tenant)
        try:
            self._order_behind_copies(tenant.prefetcher, stream)
        except Error:
            # The copy stream fails for ever. The next pass would replace it, but an inactive tenant may have none.
            # Configuring the prefetcher as it is configured now replaces the stream and repeats its copies.
            self.configure(tenant, Transition(pages))
            self._order_behind_copies(tenant.prefetcher, stream)

    def _order_behind_copies(self, prefetcher: _core.Prefetcher, stream: int) -> None:
        """Make `stream` wait for the copies in flight, or the host if it is 0."""
        if stream:
            # The next use of these pages is on the compute stream or behind it (zeroes, KV, the event of settle()), or
            # on the copy stream itself.
            self.streams.order(stream, prefetcher.copy_stream)
        else:
            prefetcher.drain()

    def configure(self, tenant: TenantState, plan: Transition) -> None:
        """Tell the prefetcher what streams now, and what it loads again."""
        _end_abandoned(tenant)
        plan.configure(tenant.prefetcher, tenant.layer_bytes, self.arena.page_bytes, tenant.ring_address)

    # -- what is due -----------------------------------------------------------------------------------------------

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
        if tenant.rest is not None or tenant.owed is not None:
            self._settle()
            self.tell()

    def owe(self, tenant: TenantState, finish: Callable[[], None]) -> None:
        """The caller writes now, and finish() is due when `writing` ends: it is called until it raises nothing. Waits first for
        the tenant's computation, which may still read its layers."""
        tenant.compute.wait()
        self._due, self._settling = (*self._due, tenant), True  # first: whatever is owed is due
        tenant.owed, self.writing = finish, True

    def _settle(self) -> None:
        if self.writing:
            raise InvalidState(
                "write(), of advanced.rewrite, has called the session; nothing changed; call it afterwards"
            )
        if self._due:
            self._settle_all(self._due)

    @annotated("remap.settle")
    def _settle_all(self, due: Sequence[TenantState]) -> None:
        self._untold = True  # of pages that pools get late
        try:
            for tenant in due:
                if tenant.owed is not None:
                    tenant.owed()
                tenant.owed = None
            self._commit(due)
        except Exception:
            self._settling = False  # whoever needs it tries again
            raise
        if self._simulator is not None:
            # In virtual time the worker has its own clock, so letting it finish here costs the host no time. And since
            # no two threads ever run at once, every run makes the same calls in the same order, and all times are the
            # same bits.
            self._executor.drain()
        for tenant in due:
            rest = tenant.rest
            if rest is not None and not tenant.leaving and (rest.held or rest.reload):
                stats = tenant.prefetcher.stats()
                tenant.since = stats.passes - tenant.timing.abandoned, stats.stall_s
            tenant.rest = None
        self._due, self._settling = (), False

    def _fill(self, due: Sequence[TenantState]) -> None:
        """Zero pages that were free, and copy the bytes of the live blocks that have moved. Raises the backend's error; the rest
        is still due."""
        waiting = [tenant for tenant in due if tenant.kv.unfinished]
        if waiting:
            self._executor.zero_free()
        for tenant in waiting:
            if not tenant.leaving:
                tenant.kv.finish_moves()
            tenant.kv.unfinished = False

    def _commit(self, due: Sequence[TenantState]) -> None:
        self._fill(due)
        rests = [(tenant, tenant.rest) for tenant in due if tenant.rest is not None]
        moved = (tenant.compute.mark() for tenant, rest in rests if rest.moves and not tenant.leaving)
        self._executor.zero_due([event for event in moved if event])
        shares: list[tuple[_core.Rest, _core.Prefetcher | None, Sequence[int], int, int, bool]] = []
        for tenant, rest in rests:
            if tenant.leaving:  # nothing of it is used any more
                shares.append((rest, None, (), 0, 0, False))
                continue
            _end_abandoned(tenant)
            asleep = self._deferring and not tenant.active
            # Before the commit: waking a tenant that is awake is no error, leaving one asleep would be one.
            tenant.asleep = tenant.asleep or asleep
            # Behind the last reader and the last writer of the pages that changed hands, moves and zeroes included.
            after = tenant.compute.mark()
            shares.append((rest, tenant.prefetcher, tenant.layer_bytes, tenant.ring_address, after, asleep))
        self._executor.settle(self.draft, shares)

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
        self._executor.pass_on(self.draft, pages, out)

    # -- the end ---------------------------------------------------------------------------------------------------

    def forget(self, tenant: TenantState) -> None:
        """For a tenant that goes away: what is due for it is not done any more. Raises the backend's error if it could not
        be done for others that the same change concerns; call it again."""
        tenant.leaving = True
        self._executor.forget(tenant.number)
        if tenant.rest is not None and not self.arena.broken:
            self._settle()  # others may be concerned as well
        tenant.rest = tenant.owed = None
        self.await_worker()
        self._executor.forget(tenant.number)

    def release(self, tenant: TenantState) -> None:
        """The tenant has gone: release its copy stream, its events and the objects that kept master copies alive. Can be called
        again."""
        self.draft.dismiss(tenant.number)
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
        if tenant.rest is not None:
            tenant.absent.update(tenant.rest.reload, tenant.rest.held)
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


def _books_after(books: Books, plan: Transition, predicted_stall_s: float | None) -> Books:
    """The tenant's books after this plan (see `Changes.apply`)."""
    there, target = plan.there, books.draining_target
    if there.tails == books.pages.tails:  # it only takes or gives pages: how what streams was chosen is as it was
        selection, by_hand = books.selection, books.by_hand
    else:
        selection, by_hand = plan.selection or books.selection, False
    return Books(
        pages=there,
        active=books.active,
        draining_target=None if plan.lost else target,
        predicted_stall_s=books.predicted_stall_s if predicted_stall_s is None else predicted_stall_s,
        selection=selection,
        by_hand=by_hand,
        kept=books.kept,
    )


def _end_abandoned(tenant: TenantState) -> None:
    """End a pass that nobody can end any more (locking.Turn): no change is made in others."""
    if tenant.prefetcher.in_pass:
        tenant.timing.abandoned += 1
        tenant.prefetcher.end_pass()


def no_room(tenant: TenantState, pending: Sequence[int], room: int) -> OutOfBlocks:
    """For so many of these live blocks of the tenant there is room elsewhere."""
    return OutOfBlocks(
        f"{len(pending)} live blocks lie in the pages to give back, and {room} blocks are free elsewhere; nothing "
        "changed; free blocks (field preempt) or preempt requests first",
        requested=len(pending),
        free=room,
        usable=tenant.kv.pool.usable_blocks,
        preempt={tenant.name: tuple(pending[min(0, room - len(pending)) :])},
    )


def compose_moves(moves: Mapping[int, int], later: Mapping[int, int]) -> dict[int, int]:
    """The moves of one tenant's blocks, {old: new}, and then the later ones, as one: a block may move twice."""
    known = set(moves.values())
    first = {old: later.get(new, new) for old, new in moves.items()}
    both = first | {old: new for old, new in later.items() if old not in known}
    return {old: new for old, new in both.items() if old != new}  # some may be back where they were
