"""Carrying a change out: the order of withdraw, move, apply, publish and settle, and what is undone when one fails.

    growing     Executor.apply -> pool.give (blocks are usable)          -> settle
    shrinking   pool.withdraw -> move live blocks -> pool.take -> Executor.apply -> settle
    settle      Prefetcher.configure -> Executor.commit

Executor.apply is the only step that changes mappings or owners. Until settle() has succeeded no other plan is applied.

A tenant that computes on a stream (ordering.py) may have work on it that reads what a plan takes away. The host does not wait
for that: moves and zeroes are enqueued behind it on the same stream, and settle() hands an event behind it to the copies and to
the re-pointing worker. Three changes do wait: one that takes back what an earlier one gave, until the worker is
through with that; one that moves the ring, which unmaps something inside apply(), for copies in flight; and all of them in
strict mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import _core
from .errors import Error, InvalidArgument, OutOfBlocks
from .nvtx import annotated
from .ordering import ComputeStream, Streams
from .planner import Plan, Point, SetOwner, plan_free_pages, plan_streamed
from .slice_plan import copies_of
from .tenant import Tenant

__all__ = ["Changes"]


class Changes:
    """One session's. Called with the session's lock held."""

    def __init__(self, streams: Streams, arena: Any, executor: Any) -> None:
        self._streams = streams
        self._arena = arena
        self._executor = executor
        self._owners = {name: getattr(_core.Owner, name) for name in ("free", "params", "kv", "ring")}
        self._deferring = arena.mode == _core.Mode.aliased
        self._unsettled: Tenant | None = None
        self._simulator: Any = streams.simulator

    # -- one plan --------------------------------------------------------------------------------------------------

    @annotated("remap.apply")
    def apply(self, tenant: Tenant, plan: Plan) -> None:
        """Apply and publish. On an error nothing has changed (or the arena is broken, ArenaBroken)."""
        if tenant._attachment.verify is not None:
            tenant._attachment.verify({*plan.streamed, *plan.reload})
        # Finishing what an earlier plan deferred is an epoch of its own, and nothing that this plan was made from.
        current = plan.epoch == self._arena.epoch
        if self._unsettled is not None:
            self.settle(self._unsettled)
        if self._executor.failed_points:
            self._executor.retry_failed()
        pages, prefetcher = tenant._attachment.pages, tenant._prefetcher
        stream = tenant._compute.current()
        entering = set(plan.streamed) - set(pages.streamed)
        ring_moves = stream and plan.ring != pages.ring and self._ring_is_pointed(plan)
        if (
            # In slices the ring grows in front of what is there, and a layer that streams may still load what came home.
            (plan.ring_moves or prefetcher.loading() if pages.tail_pages else pages.ring and plan.ring != pages.ring)
            or ring_moves
            or not all(prefetcher.ready(layer) for layer in entering)
        ):
            # Copies in flight write into pages that are about to belong to somebody else. Never the case while growing. The
            # worker first: when it is done with a region it starts the copy that waits for that.
            self.await_worker()
            if self._executor.failed_points:
                self._executor.retry_failed()
            if stream and not ring_moves:
                # Who uses these pages next is on the compute stream or behind it (zeroes, KV, the event of settle()), or on
                # the copy stream itself.
                self._streams.order(stream, prefetcher.copy_stream)
            else:
                prefetcher.drain()
        core = _core.Plan(self._arena.epoch if current else plan.epoch)
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
        after = tenant._compute.mark() if stream and (freed or not self._deferring) else 0
        self._executor.apply(core, after, stream)
        tenant._all_ready = False
        tenant._attachment.pages = replace(
            pages, streamed=plan.streamed, ring=plan.ring, lent=plan.lent, tail_pages=plan.tail_pages
        )
        if tenant._attachment.reclaimed:
            tenant._attachment.reclaimed = tenant._attachment.reclaimed.difference(plan.lost)
        tenant._unsettled = (plan, plan.ring != pages.ring, self._arena.epoch)
        tenant._predicted_stall_s = plan.predicted_stall_s
        self._unsettled = tenant
        if plan.gained:
            tenant.kv.pool.give(tenant.slots_of(plan.gained))

    def await_worker(self) -> None:
        """Block until the re-pointing worker has done all that was committed."""
        self._executor.drain()
        if self._simulator is not None:
            self._simulator.join()  # it is done in real time already; the virtual time that it took is the host's wait

    def _ring_is_pointed(self, plan: Plan) -> bool:
        """Whether apply() unmaps what stands behind the ring's addresses, at which copies may still be writing."""
        for step in plan.steps:
            if isinstance(step, Point) and step.layer is None:
                shown = tuple(self._arena.shown(step.region)[step.first_slot : step.first_slot + len(step.pages)])
                if shown != step.pages and min(shown) < self._arena.total_pages:  # an empty slot shows no page's number
                    return True
        return False

    @annotated("remap.settle")
    def settle(self, tenant: Tenant) -> None:
        """Tell the prefetcher what is streamed and start the re-pointing worker. Retryable: raises and stays unsettled."""
        if tenant._unsettled is None:
            return
        plan, fresh, epoch = tenant._unsettled
        if self._arena.epoch == epoch:  # else it is committed already, and an interrupt came before that was noted
            self._commit(tenant, plan, fresh)
        if self._simulator is not None:
            # In virtual time the worker is on its own clock, so letting it finish here takes none of the host's. And as no two
            # threads ever run at once, the same calls come in the same order in every run, and all times are the same bits.
            self._executor.drain()
        if plan.held or plan.reload:
            stats = tenant._prefetcher.stats()
            tenant._since = (stats.passes - tenant._abandoned, stats.stall_s)
        tenant._unsettled = None
        self._unsettled = None

    def _commit(self, tenant: Tenant, plan: Plan, fresh: bool) -> None:
        attachment = tenant._attachment
        size = attachment.pages.buffer_pages * self._arena.page_bytes
        prefetcher = tenant._prefetcher
        # Layers that are resident and still loading since an earlier change go on loading.
        away = set(plan.streamed)
        reload = {layer for layer in plan.reload if attachment.layer_bytes[layer]}
        slices = copies_of(attachment.pages, plan, attachment.layer_bytes, self._arena.page_bytes)
        # Behind the last reader and the last writer of what has changed hands, moves and zeroes included.
        after = tenant._compute.mark()
        prefetcher.configure(
            plan.streamed,
            [attachment.ring_address + index * size for index in range(len(plan.ring))],
            size,
            sorted(reload - away),
            plan.held if self._deferring else (),
            after,
            fresh,
            slices.offsets,
            slices.places,
            slices.parts,
        )
        self._executor.commit(prefetcher, after)

    def apply_and_settle(self, tenant: Tenant, plan: Plan) -> None:
        """The blocks are usable in between. An error of settling is kept for `tenant.forward()`, which tries it again."""
        self.apply(tenant, plan)
        try:
            self.settle(tenant)
        except Error:
            return

    # -- growing ---------------------------------------------------------------------------------------------------

    def take_free_pages(self, tenant: Tenant, free: Sequence[int], blocks: int) -> None:
        """Enough of the `free` pages (in giving order) for `blocks` more usable blocks, or all of them."""
        count = min(len(free), -(-blocks * tenant.kv.spec.block_bytes // self._arena.page_bytes) + 1)
        if count:
            plan = plan_free_pages(tenant._attachment.pages, self._arena.epoch, free[:count], give=True)
            self.apply_and_settle(tenant, plan)

    def grow(
        self,
        tenant: Tenant,
        layers: int,
        buffers: int,
        *,
        selection: str = "onward",
        to: str = "kv",
        predicted_stall_s: float = 0.0,
        reason: str = "",
    ) -> None:
        """Up to `layers` layers' worth: fewer, or none, where layers turn out to be written or pages have no place.

        Adds to what is streamed, even if that is no prefix of the nested order (set by hand): growing never takes a KV page.
        to: whether the pages become the tenant's "kv", or "free", for others to take.
        """
        for fewer in range(layers, tenant.remapped, -1):
            try:
                target = self._streamable(tenant, fewer, buffers, selection)
                plan = self._plan(tenant, target, buffers, predicted_stall_s, reason, to=to)
            except InvalidArgument:
                continue
            if plan.lost:  # the set that was asked for does not contain what is streamed: no growth
                return
            self.apply_and_settle(tenant, plan)
            return

    def restream(
        self,
        tenant: Tenant,
        layers: int,
        buffers: int,
        selection: str,
        *,
        predicted_stall_s: float = 0.0,
        reason: str = "",
        drain: bool = False,
    ) -> dict[int, int]:
        """Make `layers` layers' worth of pages KV. Returns the blocks that moved, {old: new}.

        drain: if live blocks cannot move (an engine with its own allocator holds them), withdraw them and finish later,
        when they have been returned; otherwise OutOfBlocks.
        """
        target = self._streamable(tenant, layers, buffers, selection)
        plan = self._plan(tenant, target, buffers, predicted_stall_s, reason)
        if not plan.steps:
            return {}
        lost = self._pooled(tenant, plan)
        if not lost:
            self.apply_and_settle(tenant, plan)
            return {}
        slots = list(tenant.slots_of(lost))
        pool = tenant.kv.pool
        if plan.gained and not pool.external and self._room(tenant, slots) < len(pool.pending(slots)):
            # Not nested: pages are gained as well as lost. Gain first, so that the live blocks have somewhere to go. The ring
            # stays, or loses a buffer, so nothing is lost on the way; and what the second plan does is known beforehand.
            way = self._plan(
                tenant, sorted({*tenant.streamed, *target}), min(buffers, tenant.buffers), predicted_stall_s, reason
            )
            there = replace(tenant._attachment.pages, streamed=way.streamed, ring=way.ring)
            lost = self._pooled(tenant, plan_streamed(there, way.epoch, target, buffers))
            room = self._room(tenant, tenant.slots_of(lost), tenant.slots_of(way.gained))
            if way.lost or room < len(pool.pending(tenant.slots_of(lost))):
                raise self._no_room(tenant, tenant.slots_of(lost), room)
            if way.steps:
                self.apply_and_settle(tenant, way)
            plan = self._plan(tenant, target, buffers, predicted_stall_s, reason)
            slots = list(tenant.slots_of(self._pooled(tenant, plan)))
        moves = self.exchange(tenant, plan, slots, drain=drain)
        if moves is None:
            tenant._attachment.draining = tuple(slots)
            tenant._attachment.draining_target = (layers, buffers)
            return {}
        return moves

    def exchange(
        self, tenant: Tenant, plan: Plan, slots: Sequence[int], *, drain: bool = False
    ) -> dict[int, int] | None:
        """Empty these slots of the KV region, apply and settle. The moves made; None, and nothing changed but that the blocks
        are withdrawn, if live ones stay and `drain` is set (otherwise OutOfBlocks)."""
        moves = self.vacate(tenant, slots, drain)
        if moves is None:
            return None
        try:
            self.apply(tenant, plan)
        except Error:
            self.undo_vacate(tenant, slots, moves)
            raise
        try:
            self.settle(tenant)
        except Error:
            return dict(moves)  # tenant.forward() tries it again
        return dict(moves)

    @staticmethod
    def _pooled(tenant: Tenant, plan: Plan) -> Sequence[int]:
        """The lost pages that blocks may lie in: what was reclaimed for this has never been in the pool."""
        reclaimed = tenant._attachment.reclaimed
        return [page for page in plan.lost if page not in reclaimed] if reclaimed else plan.lost

    def _plan(
        self, tenant: Tenant, target: Sequence[int], buffers: int, stall: float, reason: str, to: str = "kv"
    ) -> Plan:
        attachment = tenant._attachment
        plan = plan_streamed(
            attachment.pages, self._arena.epoch, target, buffers, to=to, predicted_stall_s=stall, reason=reason
        )
        self.refuse_homeless(tenant, plan.gained)
        return plan

    @staticmethod
    def refuse_homeless(tenant: Tenant, gained: Sequence[int]) -> None:
        """Raises InvalidArgument (fields pages, max_blocks) if one of these pages has no place in the tenant's KV region."""
        homeless = 0
        if not tenant._attachment.stand_together(gained):
            homeless = sum(page not in tenant._attachment.index_of for page in gained)
        if homeless:
            raise InvalidArgument(
                f"{homeless} pages would have no place in the KV region of {tenant.kv.max_blocks} blocks; nothing "
                "changed; attach with a larger max_blocks or remap fewer layers",
                pages=homeless,
                max_blocks=tenant.kv.max_blocks,
            )

    def _streamable(self, tenant: Tenant, layers: int, buffers: int, selection: str) -> tuple[int, ...]:
        """The set to stream, once every layer in it was looked at for writes since attach. Finds pin their layer."""
        attachment = tenant._attachment
        while True:
            if layers and layers + buffers > len(attachment.order):
                raise InvalidArgument(
                    f"{layers} layers with {buffers} buffers need {layers + buffers} streamable layers, "
                    f"{len(attachment.order)} are left; pinned: {sorted(attachment.pinned)}, of these because something wrote "
                    f"into them, or into their weights file, after attach: {attachment.written}; nothing changed",
                    layers=layers,
                    streamable=len(attachment.order),
                    pinned=sorted(attachment.pinned),
                )
            target = tenant.select(layers, buffers, selection)
            written = attachment.watch(sorted(set(target) - set(tenant.streamed)))
            if not written:
                return target
            attachment.written.update(written)
            attachment.pinned.update(written)
            attachment.order = tuple(layer for layer in attachment.order if layer not in written)

    # -- shrinking -------------------------------------------------------------------------------------------------

    @staticmethod
    def undo_vacate(tenant: Tenant, slots: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """As it was before `vacate`, while the pages are still the tenant's KV for the arena."""
        # The old blocks' bytes are untouched: taking the ids back is enough.
        tenant.kv.pool.give(slots)
        if moves:
            tenant.kv.pool.commit_moves([(new, old) for old, new in moves])

    def vacate(self, tenant: Tenant, slots: Sequence[int], drain: bool) -> list[tuple[int, int]] | None:
        """Empty and take these slots of the KV region. The moves made, or None if live blocks stay and `drain` is set."""
        pool = tenant.kv.pool
        if tuple(slots) != tenant._attachment.draining:
            self.cancel_draining(tenant)
            pool.withdraw(slots)
        tenant._attachment.draining = ()
        pending = pool.pending(slots)
        moves = pool.plan_moves(slots)
        if len(moves) < len(pending):
            if drain:
                return None
            room = len(moves)
            pool.unwithdraw(slots)
            raise self._no_room(tenant, slots, room)
        try:
            tenant.kv.move(moves)
        except Error:
            pool.unwithdraw(slots)
            raise
        if moves:  # an engine with its own allocator moves its blocks itself
            pool.commit_moves(moves)
        pool.take(slots)
        return moves

    def _room(self, tenant: Tenant, lost: Sequence[int], gained: Sequence[int] = ()) -> int:
        """How many live blocks can move out of these lost slots of the KV region, once those are gained."""
        pool = tenant.kv.pool
        return pool.usable_with(lost, gained) - (pool.live_blocks - len(pool.pending(lost)))

    def _no_room(self, tenant: Tenant, slots: Sequence[int], room: int) -> OutOfBlocks:
        pool = tenant.kv.pool
        pending = len(pool.pending(slots))
        return OutOfBlocks(
            f"{pending} live blocks lie in the pages to be given back and {room} blocks are free elsewhere; nothing changed; "
            "free blocks or preempt requests first",
            requested=pending,
            free=room,
            usable=pool.usable_blocks,
        )

    def continue_draining(self, tenant: Tenant, selection: str = "nested") -> dict[int, int]:
        """Finish a shrink whose blocks were still live when it was decided, if they are gone now: chosen by `selection`."""
        target = tenant._attachment.draining_target
        if target is None or tenant.kv.pool.pending(tenant._attachment.draining):
            return {}
        return self.restream(tenant, target[0], target[1], selection, drain=True)

    def cancel_draining(self, tenant: Tenant) -> None:
        """The blocks are needed after all."""
        slots, tenant._attachment.draining = tenant._attachment.draining, ()
        tenant._attachment.draining_target = None
        if slots:
            tenant.kv.pool.unwithdraw(slots)

    def move_bytes(self, compute: ComputeStream, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy (to, from, bytes) each: behind all that the tenant has enqueued, or, if the host computes, at once."""
        stream = compute.current()
        if not stream:
            self._streams.copy(ranges)
            return
        # If one of them fails the targets are free blocks again, and the engine's next write there is behind the others.
        for target, source, nbytes in ranges:
            self._streams.backend.copy(stream, target, source, nbytes)

    # -- the end ---------------------------------------------------------------------------------------------------

    def abandon(self, tenant: Tenant) -> None:
        """Stop all that is in flight for a tenant that goes away. Its pages may be released afterwards.

        Waits for its compute stream: nothing is unmapped that a kernel may use.
        """
        if tenant._detached:
            return
        prefetcher, pages = tenant._prefetcher, tenant._attachment.pages
        tenant._compute.wait()
        tenant._leaving = True
        # Noted while it is still known: these layers' bytes are not, or not all, at their addresses.
        tenant._absent.update(layer for layer in range(tenant.layers) if not prefetcher.ready(layer))
        tenant._absent.update(pages.streamed)
        if self._unsettled is tenant:
            if tenant._unsettled is not None:
                tenant._absent.update(tenant._unsettled[0].reload, tenant._unsettled[0].held)
                if self._arena.epoch == tenant._unsettled[2]:  # see settle()
                    self._executor.commit(None)
            self._unsettled = tenant._unsettled = None
        self.await_worker()
        self._executor.forget(tenant.number)
        if prefetcher.in_pass:
            prefetcher.end_pass()
        try:
            prefetcher.drain()
        except Error:
            # The copy stream has failed, which its engine was told or did not want to know. What was issued may still run:
            # configuring replaces the stream, and destroying the old one waits for its work.
            prefetcher.configure((), (), 0, (), ())
            prefetcher.drain()
