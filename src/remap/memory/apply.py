"""Carrying a change out: the order of withdraw, move, apply, publish and settle, and what is undone when one fails.

    growing     save -> Executor.apply -> pool.give (blocks are usable)                            -> decided -> tell -> settle
    shrinking   save -> pool.withdraw -> move live blocks -> pool.take -> Executor.apply           -> decided -> tell -> settle
    settle      Prefetcher.configure -> Executor.commit

Executor.apply is the only step that changes mappings or owners. Until settle() has succeeded no other plan is applied.

An error or an interrupt (KeyboardInterrupt) can come between any two of these steps, so nothing is inferred from how far a call
came. `save` writes down what a tenant is like before any of it changes; one store (`_Saved.decided`) says that the change has
happened; until then `undo` puts everything back: the core's plan, which the core says is undecided, then the bookkeeping. `undo`
can be interrupted and called again; it runs when a call ends with an exception, and before the next one begins
(locking.exclusive). What was decided and not settled is the core's to say as well (Executor.undecided), never the epoch's, which
other calls advance. Listeners are told when nothing is open any more: they may call the session.

A tenant that computes on a stream (streams.py) may have work on it that reads what a plan takes away. The host does not wait
for that: moves and zeroes are enqueued behind it on the same stream, and settle() hands an event behind it to the copies and to
the re-pointing worker. Three changes do wait: one that takes back what an earlier one gave, until the worker is
through with that; one that moves the ring, which unmaps something inside apply(), for copies in flight; and all of them in
strict mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from remap import _core
from remap.errors import Error, OutOfBlocks
from remap.kv.pool import BlockPool, SavedPool
from remap.memory.moves import compose_moves
from remap.memory.plan import Plan, Point, SetOwner, TenantPages, copies_of, plan_free_pages
from remap.memory.state import TenantState
from remap.memory.streams import ComputeStream, Streams
from remap.nvtx import annotated

__all__ = ["Changes"]


@dataclass
class _Saved:
    """A tenant as it was before the change in progress."""

    tenant: TenantState
    pages: TenantPages
    reclaimed: frozenset[int]
    draining: tuple[int, ...]
    draining_target: tuple[int, int, str] | None
    active: bool
    selection: str
    pool: SavedPool
    moved: dict[int, int] | None
    moves: Sequence[tuple[int, int]] = ()  # of live blocks, (old, new), made by this change
    applying: bool = False  # the plan was handed to the core: if the core has an undecided plan, it is this one
    decided: bool = False


class Changes:
    """One session's. Called with the session's lock held."""

    def __init__(self, streams: Streams, arena: Any, executor: Any) -> None:
        self.streams = streams
        self.arena = arena
        self._executor = executor
        self._owners = {name: getattr(_core.Owner, name) for name in ("free", "params", "kv", "ring")}
        self._deferring = arena.mode == _core.Mode.aliased
        self._unsettled: TenantState | None = None
        self._open: dict[int, _Saved] = {}  # tenant number -> what undo() goes back to; in the order of saving
        # Tenants whose engines, with allocators of their own, the change in progress has asked for blocks.
        self._withdrawn: list[TenantState] = []
        self._unreported: list[
            BlockPool
        ] = []  # what changed in them is decided, and their listeners have not heard of it
        # tenant -> {old: new}: live blocks that have moved, of which no report has told yet. Part of deciding a change, so that
        # a call that raises afterwards cannot lose them.
        self.moved: dict[str, dict[int, int]] = {}
        self._simulator: Any = streams.simulator
        self.applied = 0  # plans whose effects stand: what is taken back is subtracted again (undoing.py)

    @property
    def epoch(self) -> int:
        """What may be kept of pages and owners as long as this stays the same; -1: nothing.

        A plan that is applied and not settled has changed owners, and the arena's epoch changes only when it is settled.
        """
        epoch: int = self.arena.epoch
        return epoch if self._unsettled is None else -1

    # -- begun, undone, decided -------------------------------------------------------------------------------------

    def save(self, tenant: TenantState) -> _Saved:
        """Before the first step of a change: what `undo` goes back to. Nothing more if that is known already."""
        saved = self._open.get(tenant.number)
        if saved is None:
            saved = _Saved(
                tenant,
                tenant.pages,
                tenant.reclaimed,
                tenant.draining,
                tenant.draining_target,
                tenant.active,
                tenant.selection,
                tenant.kv.pool.save(),
                self.moved.get(tenant.name),
            )
            self._open[tenant.number] = saved
            tenant.kv.pool.silence()
        return saved

    def undo(self) -> None:
        """Every tenant that is saved and not decided is as it was. Nothing if there is none. Raises ArenaBroken."""
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
        tenant.pages, tenant.reclaimed = saved.pages, saved.reclaimed
        tenant.draining, tenant.draining_target = saved.draining, saved.draining_target
        tenant.active, tenant.selection = saved.active, saved.selection
        if saved.moved is None:
            self.moved.pop(tenant.name, None)
        else:
            self.moved[tenant.name] = saved.moved
        tenant.kv.pool.restore(saved.pool)

    def _decide(self, saved: _Saved) -> None:
        """The change of this tenant has happened."""
        if saved.moves:
            before = {} if saved.moved is None else saved.moved
            self.moved[saved.tenant.name] = compose_moves(before, dict(saved.moves))
        saved.decided = True
        self._unreported.append(saved.tenant.kv.pool)
        del self._open[saved.tenant.number]

    def tell(self) -> None:
        """Tell the listeners of all pools what has changed, unless a change is under way. Raises a listener's first error."""
        if self._open:
            return
        for pool in tuple(self._unreported):
            try:
                pool.tell()
            finally:
                # Else it is being told already, further up: this is a listener's call.
                if not pool.has_news and pool in self._unreported:
                    self._unreported.remove(pool)

    # -- one plan --------------------------------------------------------------------------------------------------

    @annotated("remap.apply")
    def apply(self, tenant: TenantState, plan: Plan, reclaimed: frozenset[int] = frozenset()) -> None:
        """Apply, publish and tell. On an error nothing has changed (or the arena is broken, ArenaBroken), and whatever was saved
        before for this change is undone.

        reclaimed: pages that the plan gives back to the tenant, to wait for their layers.
        """
        try:
            self._apply(tenant, plan, reclaimed)
        except BaseException:
            self.undo()
            raise
        self.tell()

    def _apply(self, tenant: TenantState, plan: Plan, reclaimed: frozenset[int]) -> None:
        if tenant.source.verify is not None:
            tenant.source.verify({*plan.streamed, *plan.reload})
        # Settling an earlier plan advances the epoch; this plan is still valid.
        current = plan.epoch == self.arena.epoch
        if self._unsettled is not None:
            self.settle(self._unsettled)
        self.retry_failed(tenant)
        self._await_copies(tenant, plan)
        pages = tenant.pages
        stream = tenant.compute.current()
        core = _core.Plan(self.arena.epoch if current else plan.epoch)
        freed = False
        for step in plan.steps:
            if isinstance(step, SetOwner):
                freed = freed or step.to_owner == "free"
                core.set_owner(step.pages, self._owners[step.from_owner], self._owners[step.to_owner], step.tenant)
            else:
                core.point(step.region, step.first_slot, step.pages, step.deferred, step.layer or 0)
        # An event is needed where strict mode unmaps what kernels may use, and where pages are freed, behind whose last use
        # somebody else's zeroes have to come. Growing in aliased mode makes no call of the backend before the blocks are
        # usable, unless pages have to be zeroed.
        after = tenant.compute.mark() if stream and (freed or not self._deferring) else 0
        saved = self.save(tenant)
        saved.applying = True
        self._executor.apply(core, after, stream)
        tenant.pages = replace(pages, tails=plan.tails, ring=plan.ring, lent=plan.lent)
        if tenant.reclaimed or reclaimed:
            tenant.reclaimed = tenant.reclaimed.difference(plan.lost) | reclaimed
        if plan.gained:
            tenant.kv.pool.give(tenant.slots_of(plan.gained))
        tenant.all_ready = False
        tenant.predicted_stall_s = plan.predicted_stall_s
        if plan.tails != pages.tails:
            tenant.selection = plan.selection or tenant.selection
            tenant.by_hand = False  # free pages that come or go leave what streams as somebody has set it
        tenant.unsettled = (plan, plan.ring != pages.ring)
        self._unsettled = tenant
        self._decide(saved)
        self.applied += 1

    def _await_copies(self, tenant: TenantState, plan: Plan) -> None:
        """Copies in flight write into pages that are about to belong to somebody else. Never the case while growing."""
        pages, prefetcher = tenant.pages, tenant.prefetcher
        stream = tenant.compute.current()
        longer = [layer for layer in plan.streamed if plan.tails[layer] > pages.tails[layer]]
        ring_moves = stream and plan.ring != pages.ring and self._ring_is_pointed(plan)
        if not (
            # A ring that only grows in front keeps its copies; with another number of buffers, layers change theirs.
            plan.ring_moves
            or (pages.ring and len(plan.ring) != len(pages.ring))
            or ring_moves
            # A layer that streams is never ready: what came home of it may still be loading.
            or (any(pages.tails[layer] for layer in longer) and prefetcher.loading())
            or not all(prefetcher.ready(layer) for layer in longer if not pages.tails[layer])
        ):
            return
        # The worker first: when it is done with a region it starts the copy that waits for that.
        self.await_worker()
        self.retry_failed(tenant)
        try:
            self._order_behind_copies(prefetcher, 0 if ring_moves else stream)
        except Error:
            self._replace_copy_stream(tenant)
            self._order_behind_copies(prefetcher, 0 if ring_moves else stream)

    def _order_behind_copies(self, prefetcher: Any, stream: int) -> None:
        """The host waits for the copies in flight, or `stream` does."""
        if stream:
            # Who uses these pages next is on the compute stream or behind it (zeroes, KV, the event of settle()), or on the
            # copy stream itself.
            self.streams.order(stream, prefetcher.copy_stream)
        else:
            prefetcher.drain()

    def _replace_copy_stream(self, tenant: TenantState) -> None:
        """A copy stream that has failed fails for ever, and the next pass, which would replace it, may never come: the tenant may
        be inactive. Configuring as it is configured now replaces it as well, and what was to be copied is copied again."""
        self._configure(tenant, plan_free_pages(tenant.pages, self.arena.epoch, (), give=True), (), 0, False)

    def _configure(self, tenant: TenantState, plan: Plan, held: Sequence[int], after: int, fresh: bool) -> None:
        """Tell the prefetcher what streams, and what comes home."""
        size = tenant.pages.buffer_pages * self.arena.page_bytes
        ring = [tenant.ring_address + index * size for index in range(len(plan.ring))]
        copies = copies_of(tenant.pages, plan, tenant.layer_bytes, self.arena.page_bytes)
        tenant.prefetcher.configure(
            plan.streamed, ring, size, held, after, fresh, copies.offsets, copies.places, copies.home
        )

    def failed_points(self, tenant: TenantState | None = None) -> bool:
        """Whether a deferred re-pointing has failed and waits to be tried again, of this tenant or of any."""
        return bool(self._executor.failed_points() if tenant is None else self._executor.failed_points(tenant.number))

    def retry_failed(self, tenant: TenantState) -> None:
        """Try the tenant's failed re-pointings again, if there are any. Raises the backend's error."""
        if self._executor.failed_points(tenant.number):
            self._executor.retry_failed(tenant.number)

    def await_worker(self) -> None:
        """Block until the re-pointing worker has done all that was committed."""
        self._executor.drain()
        if self._simulator is not None:
            self._simulator.join()  # it is done in real time already; the virtual time that it took is the host's wait

    def _ring_is_pointed(self, plan: Plan) -> bool:
        """Whether apply() unmaps what stands behind the ring's addresses, at which copies may still be writing."""
        for step in plan.steps:
            if isinstance(step, Point) and step.layer is None:
                shown = tuple(self.arena.shown(step.region)[step.first_slot : step.first_slot + len(step.pages)])
                if shown != step.pages and min(shown) < self.arena.total_pages:  # an empty slot shows no page's number
                    return True
        return False

    @annotated("remap.settle")
    def settle(self, tenant: TenantState) -> None:
        """Tell the prefetcher what is streamed and start the re-pointing worker. Retryable: raises and stays unsettled."""
        if tenant.unsettled is None:
            return
        plan, fresh = tenant.unsettled
        if self._unsettled is tenant and self._executor.undecided():
            self._commit(tenant, plan, fresh)
        if self._simulator is not None:
            # In virtual time the worker is on its own clock, so letting it finish here takes none of the host's. And as no two
            # threads ever run at once, the same calls come in the same order in every run, and all times are the same bits.
            self._executor.drain()
        if plan.held or plan.reload:
            stats = tenant.prefetcher.stats()
            tenant.since = (stats.passes - tenant.timing.abandoned, stats.stall_s)
        tenant.unsettled = None
        if self._unsettled is tenant:
            self._unsettled = None

    def _commit(self, tenant: TenantState, plan: Plan, fresh: bool) -> None:
        # Behind the last reader and the last writer of what has changed hands, moves and zeroes included.
        after = tenant.compute.mark()
        self._configure(tenant, plan, plan.held if self._deferring else (), after, fresh)
        self._executor.commit(tenant.prefetcher, after)

    def apply_and_settle(self, tenant: TenantState, plan: Plan, reclaimed: frozenset[int] = frozenset()) -> None:
        """The blocks are usable in between. An error of settling is kept for `tenant.forward()`, which tries it again."""
        self.apply(tenant, plan, reclaimed)
        try:
            self.settle(tenant)
        except Error:
            return

    # -- emptying pages, then one plan ---------------------------------------------------------------------------

    def exchange(
        self, tenant: TenantState, plan: Plan, slots: Sequence[int], *, drain_to: tuple[int, int, str] | None = None
    ) -> dict[int, int] | None:
        """Empty these slots of the KV region, apply and settle. Returns the moves made, {old: new}; None, and nothing changed but
        that the blocks are withdrawn, if live ones stay and `drain_to` is given (see `evacuate`)."""
        moves = self.evacuate(tenant, slots, drain_to)
        if moves is None:
            return None
        self.apply(tenant, plan)
        try:
            self.settle(tenant)
        except Error:
            return dict(moves)  # tenant.forward() tries it again
        return dict(moves)

    def withdraw_from_engine(self, tenant: TenantState, slots: Sequence[int]) -> None:
        """Ask an engine with its own allocator for its blocks in these slots of the KV region: by the time this returns it has
        returned those that it does not use. Not while another tenant's change is open, since the engine is told at once."""
        if tuple(slots) == tenant.draining:
            return
        self.cancel_draining(tenant)
        self._withdrawn.append(tenant)
        saved = self.save(tenant)
        tenant.kv.pool.withdraw(slots)
        tenant.draining, tenant.draining_target = tuple(slots), None
        self._decide(saved)
        self.tell()

    def evacuate(
        self, tenant: TenantState, slots: Sequence[int], drain_to: tuple[int, int, str] | None = None
    ) -> list[tuple[int, int]] | None:
        """Empty and take these slots of the KV region: the first part of a change, which `apply` completes and `undo` takes back.

        Returns the moves made. drain_to: the `draining_target` of a change that may wait: then, where live blocks stay, the
        slots stay withdrawn for `continue_draining`, and None is returned. Otherwise OutOfBlocks; nothing has changed then.
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
            self.withdraw_from_engine(tenant, slots)
        saved = self.save(tenant)
        if tuple(slots) != tenant.draining:
            if tenant.draining:
                pool.unwithdraw(tenant.draining)
            pool.withdraw(slots)
        tenant.draining, tenant.draining_target = (), None
        pending = pool.pending(slots)
        moves = pool.plan_moves(slots)
        if len(moves) < len(pending):
            if drain_to is None:
                raise self.no_room(tenant, slots, len(moves))
            tenant.draining, tenant.draining_target = tuple(slots), drain_to
            self._decide(saved)
            self.tell()
            return None
        tenant.kv.move(moves)
        if moves:  # an engine with its own allocator moves its blocks itself
            pool.commit_moves(moves)
        pool.take(slots)
        # The old blocks' bytes are untouched until the plan is settled: to undo this, taking the old ids back is enough.
        saved.moves = moves
        return moves

    def move_blocks(self, tenant: TenantState, moves: Sequence[tuple[int, int]]) -> None:
        """Live blocks move within the KV region, (old, new) each; whole or not at all."""
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
        """How many live blocks can move out of these lost slots of the KV region, once those are gained."""
        pool = tenant.kv.pool
        return pool.usable_with(lost, gained) - (pool.live_blocks - len(pool.pending(lost)))

    def no_room(self, tenant: TenantState, slots: Sequence[int], room: int) -> OutOfBlocks:
        pool = tenant.kv.pool
        pending = pool.pending(slots)
        return OutOfBlocks(
            f"{len(pending)} live blocks lie in the pages to be given back and {room} blocks are free elsewhere; nothing "
            "changed; free blocks (field preempt) or preempt requests first",
            requested=len(pending),
            free=room,
            usable=pool.usable_blocks,
            preempt={tenant.name: pending[min(0, room - len(pending)) :]},
        )

    def cancel_draining(self, tenant: TenantState, *, deactivate: bool = False) -> None:
        """The blocks are needed after all. deactivate: and the tenant becomes inactive, in one change."""
        if not tenant.draining:
            tenant.draining_target = None
            tenant.active = tenant.active and not deactivate
            return
        saved = self.save(tenant)
        tenant.kv.pool.unwithdraw(tenant.draining)
        tenant.draining, tenant.draining_target = (), None
        tenant.active = tenant.active and not deactivate
        self._decide(saved)
        self.tell()

    def drain_again(self, tenant: TenantState, slots: tuple[int, ...], target: tuple[int, int, str] | None) -> None:
        """What was being drained before a change that was taken back is again, and nothing else. What the engine had returned of
        it, it has been given in between: it is asked for it once more."""
        saved = self.save(tenant)
        pool = tenant.kv.pool
        if tenant.draining != slots:
            pool.unwithdraw(tenant.draining)
            pool.withdraw(slots)
        tenant.draining, tenant.draining_target = slots, target
        self._decide(saved)
        self.tell()

    def move_bytes(self, compute: ComputeStream, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy (to, from, bytes) each: behind all that the tenant has enqueued, or, if the host computes, at once."""
        stream = compute.current()
        if not stream:
            self.streams.copy(ranges)
            return
        # If one of them fails the targets are free blocks again, and the engine's next write there is behind the others.
        for target, source, nbytes in ranges:
            self.streams.backend.copy(stream, target, source, nbytes)

    # -- the end ---------------------------------------------------------------------------------------------------

    def forget(self, tenant: TenantState) -> None:
        """Of a tenant that goes away: a plan that was decided becomes final, and nothing of it is settled or tried again."""
        if tenant.unsettled is not None:
            if self._unsettled is tenant and self._executor.undecided():
                self._executor.commit(None)
            tenant.unsettled = None
            if self._unsettled is tenant:
                self._unsettled = None
        self.await_worker()
        self._executor.forget(tenant.number)

    def release(self, tenant: TenantState) -> None:
        """It has gone: the copy stream and its events go too, and whatever kept master copies alive."""
        prefetcher, tenant.prefetcher = tenant.prefetcher, None
        if prefetcher is not None:
            self.streams.retire(prefetcher)
        tenant.source = tenant.source.released()

    def abandon(self, tenant: TenantState) -> None:
        """Stop all that is in flight for a tenant that goes away. Its pages may be released afterwards.

        Waits for its compute stream: nothing is unmapped that a kernel may use.
        """
        if tenant.detached:
            return
        prefetcher, pages = tenant.prefetcher, tenant.pages
        tenant.compute.wait()
        tenant.leaving = True
        # Noted while it is still known: these layers' bytes are not, or not all, at their addresses.
        tenant.absent.update(layer for layer in range(tenant.layers) if not prefetcher.ready(layer))
        tenant.absent.update(pages.streamed)
        if tenant.unsettled is not None:
            tenant.absent.update(tenant.unsettled[0].reload, tenant.unsettled[0].held)
        self.forget(tenant)
        if prefetcher.in_pass:
            prefetcher.end_pass()
        try:
            prefetcher.drain()
        except Error:
            # The copy stream has failed, which its engine was told or did not want to know. What was issued may still run:
            # configuring replaces the stream, and destroying the old one waits for its work.
            prefetcher.configure((), (), 0)
            prefetcher.drain()
