# SPDX-License-Identifier: Apache-2.0
"""Change what streams: grow and shrink what one tenant gives to KV, in whole layers or in a slice of every layer.

    choose the layers to stream (layers found written are pinned) -> plan it (pages.py) -> carry it out (apply.py)

A target that neither contains what streams now nor is contained in it gains some pages and loses others: live blocks move from
these to those.
"""

from __future__ import annotations

from collections.abc import Sequence

from remap.errors import InvalidArgument
from remap.memory.apply import Changes, no_room
from remap.memory.pages import (
    Streaming,
    TenantPages,
    Transition,
    plan_between,
    plan_free_pages,
    plan_streaming,
    streaming_now,
)
from remap.memory.state import TenantState
from remap.memory.view import free_pages_of
from remap.policy.views import Selection

__all__ = [
    "choose",
    "continue_draining",
    "grow",
    "next_growth",
    "plan_with_room",
    "require_places",
    "restream",
    "take_free_pages",
]


def take_free_pages(changes: Changes, tenant: TenantState, blocks: int) -> None:
    """Take enough free pages, in donation order, for `blocks` more usable blocks, or all that there are."""
    free = free_pages_of(changes, tenant, -(-blocks * tenant.kv.spec.block_bytes // changes.arena.page_bytes) + 1)
    if free:
        changes.apply(tenant, plan_free_pages(tenant.pages, free, give=True))


# -- changing what streams ----------------------------------------------------------------------------------------------


def grow(
    changes: Changes,
    tenant: TenantState,
    layers: int,
    buffers: int,
    *,
    selection: Selection = "onward",
    to: str = "kv",
    predicted_stall_s: float = 0.0,
) -> None:
    """Remap up to `layers` layers' worth: fewer, or none, if layers turn out to be written or pages have no place.

    Adds to the streamed layers, even if they are no prefix of the nested order (set by hand): growing never takes a KV
    page.
    to: whether the pages become the tenant's "kv", or "free", for others to take.
    """
    for fewer in range(layers, tenant.remapped, -1):
        ahead = fewer == tenant.remapped + 1 and (selection, to) == ("onward", "kv")
        plan = next_growth(tenant, buffers) if ahead else None
        if plan is not None and _pin_written(tenant, plan.streamed):
            plan = None
        try:
            if plan is None:
                plan = plan_streaming(tenant.pages, choose(tenant, fewer, buffers, selection), to=to)
                require_places(tenant, plan.gained)
        except InvalidArgument:
            continue
        if not plan.lost:  # else the selected set does not contain the streamed layers: no growth
            changes.apply(tenant, plan, predicted_stall_s=predicted_stall_s)
        return


def next_growth(tenant: TenantState, buffers: int) -> Transition | None:
    """The plan for one layer more, the most likely next growth; None: no layer more can stream. Asked at the end of a pass too,
    since growth is on the engine's critical path. It holds as long as pages and streamable layers stay the same."""

    def find() -> Transition | None:
        more = tenant.remapped + 1
        if tenant.slicing or more + buffers > len(tenant.order):
            return None
        try:
            plan = plan_streaming(tenant.pages, tenant.streaming_at(more, buffers, "onward"))
            require_places(tenant, plan.gained)
        except InvalidArgument:
            return None
        return plan

    return tenant.answers.of("growth", (tenant.pages, tenant.order, buffers), find)


def ring_last(tenant: TenantState, buffers: int, selection: Selection) -> TenantPages:
    """Its pages, of which the very last layers make the ring if a suffix begins to stream: these are the last to come home."""
    if selection != "suffix" or tenant.pages.ring:
        return tenant.pages
    return tenant.pages.preferring(sorted(tenant.order)[::-1][:buffers])


def restream(
    changes: Changes,
    tenant: TenantState,
    target: Streaming,
    *,
    predicted_stall_s: float = 0.0,
    drain: bool = False,
) -> dict[int, int]:
    """Make exactly the target, of `choose`, stream. Returns the blocks that moved, {old: new}.

    drain: if live blocks cannot move (an engine with its own allocator holds them), drain them and finish when the
    engine has returned them; otherwise OutOfBlocks.

    Raises InvalidArgument as `plan_streaming` does, or if pages have no place in the KV region (pages, max_blocks);
    OutOfBlocks (field preempt) if live blocks have no room in the remaining pages; the backend's error if the change
    could not be applied. Nothing changes then.
    """
    plan, _, _ = plan_with_room(changes, tenant, target)
    require_places(tenant, plan.gained)
    if not plan:
        return {}
    drain_to = target if drain else None
    return changes.apply(tenant, plan, predicted_stall_s=predicted_stall_s, drain_to=drain_to) or {}


def plan_with_room(
    changes: Changes, tenant: TenantState, target: Streaming, more: Sequence[int] = ()
) -> tuple[Transition, Sequence[int], int]:
    """The plan to the target, the live blocks in the pages that it takes from KV, and for how many of these there is no room.
    more: slots that it will have got by then. Changes nothing; raises InvalidArgument as `plan_streaming` does."""
    pages = tenant.pages
    direct = _room_of(changes, tenant, plan_streaming(pages, target), more)
    if direct[2] <= 0 or not direct[0].gained or tenant.kv.pool.external:
        return direct
    # A ring that is chosen while all of both would stream is made of other pages, and the blocks may have room then.
    both = pages.with_streaming(streaming_now(pages).beside(target))
    if not both.to_fetch(target) <= pages.to_fetch(target):
        return direct
    plan = plan_between(pages, both.with_streaming(target))
    plan.selection = target.selection
    return min(direct, _room_of(changes, tenant, plan, more), key=lambda each: each[2])


def _room_of(
    changes: Changes, tenant: TenantState, plan: Transition, more: Sequence[int]
) -> tuple[Transition, Sequence[int], int]:
    lost = tenant.slots_of(plan.lost)
    pending = tenant.kv.pool.pending(lost) if lost else ()
    short = len(pending) - changes.room(tenant, lost, (*tenant.slots_of(plan.gained), *more)) if pending else 0
    return plan, pending, short


def refuse_in_use(changes: Changes, tenant: TenantState, target: Streaming) -> None:
    """Raises OutOfBlocks as `restream` without `drain` will, if that is known already: an engine with its own allocator was asked
    for blocks that are in the way, and still uses some. To end that first would give it back those that it has returned."""
    pool = tenant.kv.pool
    if not (tenant.draining and pool.external):
        return
    lost = tenant.slots_of(plan_streaming(tenant.pages, target).lost)
    in_use = pool.pending(sorted(set(pool.closed_slots()).intersection(lost)))
    if in_use:
        raise no_room(tenant, in_use, 0)


def continue_draining(changes: Changes, tenant: TenantState) -> dict[int, int]:
    """Finish a shrink as it was decided, if the blocks that were still live then are gone now. It is called off if something has
    written into layers that were to stream by then."""
    target = tenant.draining_target
    if target is None or _pin_written(tenant, target.layers):  # None: left by a change that was not finished
        changes.cancel_draining(tenant)
        return {}
    if tenant.kv.pool.pending(tenant.kv.pool.closed_slots()):
        return {}
    return restream(changes, tenant, target, drain=True)


# -- what may stream ----------------------------------------------------------------------------------------------------


def choose(tenant: TenantState, amount: int, buffers: int, selection: Selection) -> Streaming:
    """What is to stream: `TenantState.streaming_at` for this amount. Checks each of its layers for writes since attach, and
    pins the written ones.

    Raises InvalidArgument (fields layers, streamable, pinned) if too few layers are left, or (field selection) if
    slices stream: then neither can whole layers be added, nor can layers come home one by one.
    """
    if amount and tenant.slicing and tenant.pages.streamed and selection in ("onward", "inward", "suffix"):
        raise InvalidArgument(
            f"slices of {tenant.pages.depth} pages of {len(tenant.streamed)} layers of {tenant.name!r} stream: no "
            "whole layers can be given beside them; nothing changed; remap 0 layers first",
            selection=selection,
        )
    while True:
        if selection != "slices" and amount and amount + buffers > len(tenant.order):
            raise InvalidArgument(
                f"{amount} layers with {buffers} buffers need {amount + buffers} streamable layers, "
                f"{len(tenant.order)} are left; pinned: {sorted(tenant.pinned)}, of these because something wrote "
                f"into them, or into their weights file, after attach: {tenant.written}; nothing changed",
                layers=amount,
                streamable=len(tenant.order),
                pinned=sorted(tenant.pinned),
            )
        target = tenant.streaming_at(amount, buffers, selection)
        if not _pin_written(tenant, target.layers):
            return target


def _pin_written(tenant: TenantState, target: Sequence[int]) -> bool:
    """Check the layers of `target` that do not stream yet for writes since attach. Pins the written ones."""
    written = tenant.source.watch(sorted(set(target) - set(tenant.pages.streamed)))
    if written:
        tenant.pin(written)
    return bool(written)


def require_places(tenant: TenantState, gained: Sequence[int]) -> None:
    """Raises InvalidArgument (fields pages, max_blocks) if one of these pages has no place in the tenant's KV
    region."""
    unplaced_pages = 0
    if not tenant.stand_together(gained):
        unplaced_pages = sum(page not in tenant.index_of for page in gained)
    if unplaced_pages:
        raise InvalidArgument(
            f"{unplaced_pages} pages would have no place in the KV region of {tenant.kv.max_blocks} blocks; nothing "
            "changed; attach with a larger max_blocks or remap fewer layers",
            pages=unplaced_pages,
            max_blocks=tenant.kv.max_blocks,
        )
