# SPDX-License-Identifier: Apache-2.0
"""Change what streams: grow and shrink what one tenant gives to KV, in whole layers or in a slice of every layer.

    choose the layers to stream (layers found written are pinned) -> plan it (pages.py) -> carry it out (apply.py)

A target that neither contains what streams now nor is contained in it gains some pages and loses others. If the blocks
in the lost pages have no room, the change takes two plans: gain first, then exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from remap.errors import InvalidArgument
from remap.memory.apply import Changes
from remap.memory.pages import Streaming, TenantPages, Transition, plan_free_pages, plan_streaming, streaming_now
from remap.memory.state import TenantState
from remap.memory.view import free_pages_of
from remap.policy.views import Selection

__all__ = [
    "ChangePath",
    "choose",
    "continue_draining",
    "find_path",
    "grow",
    "prepare_growth",
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
        plan = _prepared(tenant, buffers) if ahead else None
        try:
            if plan is None:
                plan = plan_streaming(tenant.pages, choose(tenant, fewer, buffers, selection), to=to)
                require_places(tenant, plan.gained)
        except InvalidArgument:
            continue
        if not plan.lost:  # else the selected set does not contain the streamed layers: no growth
            changes.apply(tenant, plan, predicted_stall_s=predicted_stall_s)
        return


def prepare_growth(tenant: TenantState, buffers: int) -> None:
    """Plan one layer more, the most likely next growth: growth is on the engine's critical path, the end of a pass is
    not. The plan holds as long as pages and streamable layers stay the same; while they do, this returns at once."""
    known = tenant.known_growth
    if known is not None and known[0] is tenant.pages and known[1] is tenant.order and known[2] == buffers:
        return
    plan = None
    more = tenant.remapped + 1
    if not tenant.slicing and more + buffers <= len(tenant.order):
        try:
            plan = plan_streaming(tenant.pages, tenant.streaming_at(more, buffers, "onward"))
            require_places(tenant, plan.gained)
        except InvalidArgument:
            plan = None  # no layer more can stream
    tenant.known_growth = (tenant.pages, tenant.order, buffers, plan)


def _prepared(tenant: TenantState, buffers: int) -> Transition | None:
    """The plan of `prepare_growth`, if it still holds and none of its layers turns out to be written."""
    known = tenant.known_growth
    if known is None or known[0] is not tenant.pages or known[1] is not tenant.order or known[2] != buffers:
        return None
    plan = known[3]
    return None if plan is None or _pin_written(tenant, plan.streamed) else plan


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
    pool, path = tenant.kv.pool, find_path(changes, tenant, target)
    plan = path.plan
    require_places(tenant, plan.gained)
    if not plan:
        return {}
    exchange = partial(
        changes.exchange,
        tenant,
        predicted_stall_s=predicted_stall_s,
        drain_to=target if drain else None,
    )
    if not path.lost:
        changes.apply(tenant, plan, predicted_stall_s=predicted_stall_s)
        return {}
    if pool.external or (path.short <= 0 and path.first is None) or not plan.gained:
        return exchange(plan, path.lost) or {}
    if path.short > 0:
        raise changes.no_room(tenant, path.lost, len(path.pending) - path.short)
    with changes.part():
        if path.first is not None and path.first:
            require_places(tenant, path.first.gained)
            changes.apply(tenant, path.first, predicted_stall_s=predicted_stall_s)
        plan = plan_streaming(tenant.pages, target)
        require_places(tenant, plan.gained)
        return exchange(plan, list(tenant.slots_of(plan.lost))) or {}


def refuse_in_use(changes: Changes, tenant: TenantState, target: Streaming) -> None:
    """Raises OutOfBlocks as `restream` without `drain` will, if that is known already: an engine with its own allocator was asked
    for blocks that are in the way, and still uses some. To end that first would give it back those that it has returned."""
    if not (tenant.draining and tenant.kv.pool.external):
        return
    path = find_path(changes, tenant, target)
    in_use = sorted(set(tenant.draining).intersection(path.lost))
    if tenant.kv.pool.pending(in_use):
        raise changes.no_room(tenant, in_use, 0)


def continue_draining(changes: Changes, tenant: TenantState) -> dict[int, int]:
    """Finish a shrink as it was decided, if the blocks that were still live then are gone now. It is called off if something has
    written into layers that were to stream by then."""
    target = tenant.draining_target
    if target is None or _pin_written(tenant, target.layers):  # None: left by a change that was not finished
        changes.cancel_draining(tenant)
        return {}
    if tenant.kv.pool.pending(tenant.draining):
        return {}
    return restream(changes, tenant, target, drain=True)


# -- how a change can be made -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChangePath:
    """One plan to the target, or two. first: if blocks need it to have room, a plan before it that only gains; `plan`
    is planned anew behind it. lost: slots of the KV region that may hold blocks and go away in the end. pending: the
    live blocks in them; short: how many of these have no room."""

    plan: Transition
    first: Transition | None
    lost: list[int]
    pending: tuple[int, ...]
    short: int


def find_path(changes: Changes, tenant: TenantState, target: Streaming, *, more: Sequence[int] = ()) -> ChangePath:
    """How the tenant gets to the target. more: slots that it will have got by then. Changes nothing; raises InvalidArgument as
    `plan_streaming` does."""
    pages, pool = tenant.pages, tenant.kv.pool

    def from_there(plan: Transition, first: Transition | None, gained: Sequence[int]) -> ChangePath:
        lost = list(tenant.slots_of(plan.lost))
        pending = pool.pending(lost) if lost else ()
        return ChangePath(plan, first, lost, pending, len(pending) - changes.room(tenant, lost, gained) if lost else 0)

    direct = from_there(plan_streaming(pages, target), None, more)
    if direct.short <= 0 or not direct.plan.gained or pool.external:
        return direct
    # The ring stays, or loses a buffer, so nothing is lost on the way.
    first = plan_streaming(pages, streaming_now(pages).beside(target))
    there = first.there
    # From there the best ring may be another one, made of pages that are not at home.
    if first.lost or not there.to_fetch(target) <= pages.to_fetch(target):
        return direct
    after = from_there(plan_streaming(there, target), first, (*more, *tenant.slots_of(first.gained)))
    return replace(after, plan=direct.plan)


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
    tenant.written.update(written)
    tenant.pinned.update(written)
    if written:
        tenant.books = replace(tenant.books, order=tuple(layer for layer in tenant.order if layer not in written))
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
