"""Carrying a change out: the order of withdraw, move, apply, publish and settle, and what is undone when one fails.

    growing     Executor.apply -> pool.give (blocks are usable)          -> settle
    shrinking   pool.withdraw -> move live blocks -> pool.take -> Executor.apply -> settle
    settle      Prefetcher.configure -> Executor.commit

Executor.apply is the only step that changes mappings or owners. Until settle() has succeeded no other plan is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from . import _core
from .errors import Error, InvalidArgument, OutOfBlocks
from .kv import BlockPool
from .planner import Plan, SetOwner, plan_free_pages, plan_streamed
from .tenant import Tenant

__all__ = ["Changes"]

_FOREVER_S = 3600.0


class Changes:
    """One session's. Called with the session's lock held."""

    def __init__(self, backend: Any, arena: Any, executor: Any) -> None:
        self._backend = backend
        self._arena = arena
        self._executor = executor
        self._owners = {name: getattr(_core.Owner, name) for name in ("free", "params", "kv", "ring")}
        self._deferring = arena.mode == _core.Mode.aliased
        self._unsettled: Tenant | None = None
        self._streams: set[int] = set()  # ours: destroying one waits for what it still does, so none may be forgotten
        self._mover: tuple[int, int] | None = None  # stream and event for moving blocks, made on first use

    # -- one plan --------------------------------------------------------------------------------------------------

    def apply(self, tenant: Tenant, plan: Plan) -> None:
        """Apply and publish. On an error nothing has changed (or the arena is broken, ArenaBroken)."""
        if self._unsettled is not None:
            self.settle(self._unsettled)
        if self._executor.failed_points:
            self._executor.retry_failed()
        pages, prefetcher = tenant._attachment.pages, tenant._prefetcher
        entering = set(plan.streamed) - set(pages.streamed)
        if (pages.ring and plan.ring != pages.ring) or not all(prefetcher.ready(layer) for layer in entering):
            # Copies in flight write into pages that are about to belong to somebody else. Never the case while growing. The
            # worker first: when it is done with a region it starts the copy that waits for that.
            self._executor.drain()
            if self._executor.failed_points:
                self._executor.retry_failed()
            prefetcher.drain()
        core = _core.Plan(plan.epoch)
        for step in plan.steps:
            if isinstance(step, SetOwner):
                core.set_owner(step.pages, self._owners[step.from_owner], self._owners[step.to_owner], step.tenant)
            else:
                core.point(step.region, step.first_slot, step.pages, step.deferred, step.layer or 0)
        self._executor.apply(core)
        tenant._attachment.pages = replace(pages, streamed=plan.streamed, ring=plan.ring)
        tenant._unsettled = (plan, plan.ring != pages.ring)
        tenant._predicted_stall_s = plan.predicted_stall_s
        self._unsettled = tenant
        if plan.gained:
            tenant.kv.pool.give(tenant.slots_of(plan.gained))

    def settle(self, tenant: Tenant) -> None:
        """Tell the prefetcher what is streamed and start the re-pointing worker. Retryable: raises and stays unsettled."""
        if tenant._unsettled is None:
            return
        plan, fresh = tenant._unsettled
        attachment = tenant._attachment
        size = attachment.pages.buffer_pages * self._arena.page_bytes
        prefetcher = tenant._prefetcher
        # Layers that are resident and still loading since an earlier change go on loading.
        away = set(plan.streamed)
        reload = {layer for layer in plan.reload if attachment.layer_bytes[layer]}
        prefetcher.configure(
            plan.streamed,
            [attachment.ring_address + index * size for index in range(len(plan.ring))],
            size,
            sorted(reload - away),
            plan.held if self._deferring else (),
            0,
            fresh,
        )
        self._executor.commit(prefetcher)
        tenant._unsettled = None
        tenant._unwatched = 0
        self._unsettled = None

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
        self, tenant: Tenant, layers: int, buffers: int, *, predicted_stall_s: float = 0.0, reason: str = ""
    ) -> None:
        """Up to `layers` layers' worth: fewer, or none, where layers turn out to be written or pages have no place.

        Adds to what is streamed, even if that is no prefix of the nested order (set by hand): growing never takes a KV page.
        """
        for fewer in range(layers, tenant.remapped, -1):
            try:
                target = self._streamable(tenant, fewer, buffers, "onward")
                plan = self._plan(tenant, target, buffers, predicted_stall_s, reason)
            except InvalidArgument:
                continue
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
        if not plan.lost:
            self.apply_and_settle(tenant, plan)
            return {}
        slots = list(tenant.slots_of(plan.lost))
        pool = tenant.kv.pool
        if plan.gained and not pool.external and self._room(tenant, slots) < len(pool.pending(slots)):
            # Not nested: pages are gained as well as lost. Gain first, so that the live blocks have somewhere to go. The ring
            # stays, or loses a buffer, so nothing is lost on the way; and what the second plan does is known beforehand.
            way = self._plan(
                tenant, sorted({*tenant.streamed, *target}), min(buffers, tenant.buffers), predicted_stall_s, reason
            )
            there = replace(tenant._attachment.pages, streamed=way.streamed, ring=way.ring)
            lost = plan_streamed(there, way.epoch, target, buffers).lost
            room = self._room(tenant, tenant.slots_of(lost), tenant.slots_of(way.gained))
            if way.lost or room < len(pool.pending(tenant.slots_of(lost))):
                raise self._no_room(tenant, tenant.slots_of(lost), room)
            if way.steps:
                self.apply_and_settle(tenant, way)
            plan = self._plan(tenant, target, buffers, predicted_stall_s, reason)
            slots = list(tenant.slots_of(plan.lost))
        moves = self._vacate(tenant, slots, drain)
        if moves is None:
            tenant._attachment.draining = tuple(slots)
            tenant._attachment.draining_target = (layers, buffers)
            return {}
        try:
            self.apply(tenant, plan)
        except Error:
            # The old blocks' bytes are untouched: taking the ids back is enough.
            pool.give(slots)
            if moves:
                pool.commit_moves([(new, old) for old, new in moves])
            raise
        try:
            self.settle(tenant)
        except Error:
            return dict(moves)
        return dict(moves)

    def _plan(self, tenant: Tenant, target: Sequence[int], buffers: int, stall: float, reason: str) -> Plan:
        attachment = tenant._attachment
        plan = plan_streamed(
            attachment.pages, self._arena.epoch, target, buffers, predicted_stall_s=stall, reason=reason
        )
        homeless = 0
        if not tenant.stand_together(plan.gained):
            homeless = sum(page not in attachment.index_of for page in plan.gained)
        if homeless:
            raise InvalidArgument(
                f"{homeless} pages would have no place in the KV region of {tenant.kv.max_blocks} blocks; nothing "
                "changed; attach with a larger max_blocks or remap fewer layers",
                pages=homeless,
                max_blocks=tenant.kv.max_blocks,
            )
        return plan

    def _streamable(self, tenant: Tenant, layers: int, buffers: int, selection: str) -> tuple[int, ...]:
        """The set to stream, once every layer in it was looked at for writes since attach. Finds pin their layer."""
        attachment = tenant._attachment
        while True:
            if layers and layers + buffers > len(attachment.order):
                raise InvalidArgument(
                    f"{layers} layers with {buffers} buffers need {layers + buffers} streamable layers, "
                    f"{len(attachment.order)} are left; pinned, because something wrote into them after attach: "
                    f"{attachment.written}; nothing changed",
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

    def _vacate(self, tenant: Tenant, slots: Sequence[int], drain: bool) -> list[tuple[int, int]] | None:
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
        """How many live blocks can move out of these lost slots of the KV region, once those are gained. O(region pages)."""
        pool = tenant.kv.pool
        after = BlockPool(tenant.kv.geometry)
        after.give({*pool.owned_slots(), *gained}.difference(lost))
        return after.usable_blocks - (pool.live_blocks - len(pool.pending(lost)))

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

    def continue_draining(self, tenant: Tenant) -> dict[int, int]:
        """Finish a shrink whose blocks were still live when it was decided, if they are gone now."""
        target = tenant._attachment.draining_target
        if target is None or tenant.kv.pool.pending(tenant._attachment.draining):
            return {}
        return self.restream(tenant, target[0], target[1], "nested", drain=True)

    def cancel_draining(self, tenant: Tenant) -> None:
        """The blocks are needed after all."""
        slots, tenant._attachment.draining = tenant._attachment.draining, ()
        tenant._attachment.draining_target = None
        if slots:
            tenant.kv.pool.unwithdraw(slots)

    def copy_seconds(self, target: int, source: int, nbytes: int) -> float:
        """Seconds that one copy takes on a stream of our own, the quicker of two. The first estimate of the link."""
        backend = self._backend
        with ExitStack() as made:  # events first: the stream, which waits for the copies, is destroyed before them
            begun = backend.create_event()
            made.callback(backend.destroy_event, begun)
            ended = backend.create_event()
            made.callback(backend.destroy_event, ended)
            stream = self._make_stream()
            made.callback(self._destroy_stream, stream)
            times = []
            for _ in range(2):
                backend.record(begun, stream)
                backend.copy(stream, target, source, nbytes)
                backend.record(ended, stream)
                backend.synchronize(ended, _FOREVER_S)
                times.append(backend.elapsed(begun, ended))
            return float(min(times))

    def move_bytes(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy (to, from, bytes) each on a stream of our own, and wait for it."""
        backend = self._backend
        if self._mover is None:
            with ExitStack() as made:
                event = backend.create_event()
                made.callback(backend.destroy_event, event)
                self._mover = (self._make_stream(), event)
                made.pop_all()
        stream, event = self._mover
        try:
            for target, source, nbytes in ranges:
                backend.copy(stream, target, source, nbytes)
            backend.record(event, stream)
            backend.synchronize(event, _FOREVER_S)
        except Error:
            # The targets go back to the pool, so nothing may still be writing there; and a stream that has failed stays so.
            self._drop_mover()
            raise

    # -- the end ---------------------------------------------------------------------------------------------------

    def abandon(self, tenant: Tenant) -> None:
        """Stop all that is in flight for a tenant that goes away. Its pages may be released afterwards."""
        prefetcher, pages = tenant._prefetcher, tenant._attachment.pages
        # Noted while it is still known: these layers' bytes are not, or not all, at their addresses.
        tenant._absent.update(layer for layer in range(tenant.layers) if not prefetcher.ready(layer))
        tenant._absent.update(pages.streamed)
        if self._unsettled is tenant:
            if tenant._unsettled is not None:
                tenant._absent.update(tenant._unsettled[0].reload, tenant._unsettled[0].held)
            self._executor.commit(None)
            self._unsettled = tenant._unsettled = None
        self._executor.forget(tenant.number)
        if prefetcher.in_pass:
            prefetcher.end_pass()
        try:
            prefetcher.drain()
        except Error:
            # The copy stream has failed, which its engine was told or did not want to know. What was issued may still run:
            # configuring replaces the stream, and destroying the old one waits for its work.
            size = pages.buffer_pages * self._arena.page_bytes
            ring = [tenant._attachment.ring_address + index * size for index in range(len(pages.ring))]
            prefetcher.configure(pages.streamed, ring, size, (), ())
            prefetcher.drain()

    def close(self) -> None:
        """Release what this object made. After an error it can be called again."""
        self._drop_mover()
        for stream in tuple(self._streams):
            self._destroy_stream(stream)

    def _drop_mover(self) -> None:
        if self._mover is not None:
            stream, event = self._mover
            self._destroy_stream(stream)
            self._mover = None
            self._backend.destroy_event(event)

    def _make_stream(self) -> int:
        stream: int = self._backend.create_stream()
        self._streams.add(stream)
        return stream

    def _destroy_stream(self, stream: int) -> None:
        self._backend.destroy_stream(stream)
        self._streams.discard(stream)
