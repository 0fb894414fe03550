"""Which layers stream: growing and shrinking what one tenant gives to KV, in whole layers or in a slice of every layer.

    choose the set (what turns out to be written is pinned) -> plan it (plan.py, slice_plan.py) -> carry it out (apply.py)

A set that neither contains what streams now nor is contained in it gains pages and loses some. Where the blocks in those that are
lost have no room, the change is made in two plans: gain first, then exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from remap.errors import InvalidArgument
from remap.memory.apply import Changes
from remap.memory.plan import Plan, TenantPages, plan_free_pages
from remap.memory.slice_plan import plan_layers, plan_slices
from remap.memory.state import TenantState
from remap.memory.undoing import AllOrNothing

__all__ = [
    "can_reslice",
    "can_restream",
    "continue_draining",
    "grow",
    "refuse_homeless",
    "reslice",
    "restream",
    "streamable",
    "take_free_pages",
]


def take_free_pages(changes: Changes, tenant: TenantState, free: Sequence[int], blocks: int) -> None:
    """Enough of the `free` pages (in giving order) for `blocks` more usable blocks, or all of them."""
    count = min(len(free), -(-blocks * tenant.kv.spec.block_bytes // changes.arena.page_bytes) + 1)
    if count:
        plan = plan_free_pages(tenant.pages, changes.arena.epoch, free[:count], give=True)
        changes.apply_and_settle(tenant, plan)


# -- whole layers -------------------------------------------------------------------------------------------------------


def grow(
    changes: Changes,
    tenant: TenantState,
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
            target = streamable(tenant, fewer, buffers, selection)
            plan = _plan(changes, tenant, target, buffers, predicted_stall_s, reason, to=to)
        except InvalidArgument:
            continue
        if plan.lost:  # the set that was asked for does not contain what is streamed: no growth
            return
        changes.apply_and_settle(tenant, plan)
        return


def restream(
    changes: Changes,
    tenant: TenantState,
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
    target = streamable(tenant, layers, buffers, selection)

    def planned(streamed: Sequence[int], ring: int) -> Plan:
        return _plan(changes, tenant, streamed, ring, predicted_stall_s, reason)

    return _change(
        changes,
        tenant,
        planned(target, buffers),
        again=lambda: planned(target, buffers),
        # The ring stays, or loses a buffer, so nothing is lost on the way.
        way=lambda: planned(sorted({*tenant.streamed, *target}), min(buffers, tenant.buffers)),
        from_there=lambda there, epoch: plan_layers(there, epoch, target, buffers),
        back=lambda before, epoch: plan_layers(
            tenant.pages, epoch, before.streamed, len(before.ring), ring=before.ring
        ),
        drain_to=(layers, buffers) if drain else None,
    )


def continue_draining(changes: Changes, tenant: TenantState, selection: str = "nested") -> dict[int, int]:
    """Finish a shrink whose blocks were still live when it was decided, if they are gone now: chosen by `selection`."""
    target = tenant.draining_target
    if target is None:  # of a change that did not come to its end
        changes.cancel_draining(tenant)
        return {}
    if tenant.kv.pool.pending(tenant.draining):
        return {}
    return restream(changes, tenant, target[0], target[1], selection, drain=True)


def can_restream(tenant: TenantState, layers: int, buffers: int, selection: str) -> bool:
    """Whether `restream` has a set to stream, once the layers that something wrote into are known."""
    while layers + buffers <= len(tenant.order):
        target = tenant.select(layers, buffers, selection)
        if not _pin_written(tenant, target):
            return tenant.possible(target, buffers)
    return False


def streamable(tenant: TenantState, layers: int, buffers: int, selection: str) -> tuple[int, ...]:
    """The set to stream, once every layer in it was looked at for writes since attach. Finds pin their layer. Raises
    InvalidArgument (fields layers, streamable, pinned) if too few are left."""
    while True:
        if layers and layers + buffers > len(tenant.order):
            raise InvalidArgument(
                f"{layers} layers with {buffers} buffers need {layers + buffers} streamable layers, "
                f"{len(tenant.order)} are left; pinned: {sorted(tenant.pinned)}, of these because something wrote "
                f"into them, or into their weights file, after attach: {tenant.written}; nothing changed",
                layers=layers,
                streamable=len(tenant.order),
                pinned=sorted(tenant.pinned),
            )
        target = tenant.select(layers, buffers, selection)
        if not _pin_written(tenant, target):
            return target


def _pin_written(tenant: TenantState, target: Sequence[int]) -> bool:
    """Look at what is to stream and does not yet for writes since attach. Finds pin their layer."""
    written = tenant.source.watch(sorted(set(target) - set(tenant.streamed)))
    tenant.written.update(written)
    tenant.pinned.update(written)
    if written:
        tenant.order = tuple(layer for layer in tenant.order if layer not in written)
    return bool(written)


def _plan(
    changes: Changes,
    tenant: TenantState,
    target: Sequence[int],
    buffers: int,
    stall: float,
    reason: str,
    to: str = "kv",
) -> Plan:
    plan = plan_layers(
        tenant.pages, changes.arena.epoch, target, buffers, to=to, predicted_stall_s=stall, reason=reason
    )
    refuse_homeless(tenant, plan.gained)
    return plan


# -- slices of every layer ----------------------------------------------------------------------------------------------


def reslice(
    changes: Changes,
    tenant: TenantState,
    tail_pages: int,
    buffers: int,
    *,
    predicted_stall_s: float = 0.0,
    reason: str = "",
) -> dict[int, int]:
    """Make every streamable layer stream its last `tail_pages` pages through `buffers` ring buffers; 0: all resident.

    Returns the blocks that moved, {old: new}. Layers that something wrote into since attach are found, and pinned, before
    anything changes. Raises InvalidArgument as `plan_slices` does, or if pages have no place in the KV region (pages,
    max_blocks); OutOfBlocks if live blocks do not fit into what remains, also where an engine with its own allocator holds them;
    the backend's error if the change could not be applied. Nothing changes then, unless `changes.applied` has grown: a step was
    made on the way (the old tails, fewer buffers), and could not be taken back.
    """
    pages = tenant.pages
    if tail_pages and pages.streamed and not pages.tail_pages:
        raise InvalidArgument(
            f"{len(tenant.streamed)} whole layers of {tenant.name!r} stream; nothing changed; remap 0 layers first",
            streamed=len(tenant.streamed),
        )
    target = _sliceable(tenant, tail_pages)

    def planned(streamed: Sequence[int], tail: int, ring: int) -> Plan:
        plan = plan_slices(
            tenant.pages,
            changes.arena.epoch,
            streamed,
            tail,
            ring,
            predicted_stall_s=predicted_stall_s,
            reason=reason,
        )
        refuse_homeless(tenant, plan.gained)
        return plan

    plan = planned(target, tail_pages, buffers)
    return _change(
        changes,
        tenant,
        plan,
        again=lambda: planned(plan.streamed, tail_pages, buffers),
        # What a ring of fewer buffers leaves becomes KV.
        way=lambda: planned(pages.streamed, pages.tail_pages, min(buffers, tenant.buffers)),
        from_there=lambda there, epoch: plan_slices(there, epoch, plan.streamed, tail_pages, buffers),
        back=lambda before, epoch: plan_slices(
            tenant.pages, epoch, before.streamed, before.tail_pages, len(before.ring), ring=before.ring
        ),
    )


def can_reslice(tenant: TenantState, tail_pages: int, buffers: int) -> bool:
    """Whether `reslice` has layers enough for the ring, once those that something wrote into are known."""
    sizes = [len(tenant.pages.homes[layer]) for layer in _sliceable(tenant, tail_pages)]
    if not sizes:
        return tail_pages == 0
    tails = sum(min(tail_pages, size) for size in sizes)
    return buffers < len(sizes) and tail_pages <= max(sizes) and tails >= buffers * tail_pages


def _sliceable(tenant: TenantState, tail_pages: int) -> tuple[int, ...]:
    """Every streamable layer, once it was looked at for writes since attach. Finds pin their layer."""
    target: tuple[int, ...] = ()
    while tail_pages:
        target = tuple(sorted(tenant.order))
        if not _pin_written(tenant, target):
            break
    return target


# -- both ---------------------------------------------------------------------------------------------------------------


def _change(
    changes: Changes,
    tenant: TenantState,
    plan: Plan,
    *,
    again: Callable[[], Plan],
    way: Callable[[], Plan],
    from_there: Callable[[TenantPages, int], Plan],
    back: Callable[[TenantPages, int], Plan],
    drain_to: tuple[int, int] | None = None,
) -> dict[int, int]:
    """Carry out `plan`; in two plans where the blocks in what it loses fit only into what it gains.

    way(): a plan that gains and loses nothing. from_there(pages, epoch): what is left to do behind it, as far as it can be
    known beforehand; again(): the same, once it is done. back(pages, epoch): what takes `way` back. Raises OutOfBlocks (field
    preempt) if live blocks have no room even so, or (without drain_to) an engine with its own allocator holds them; nothing has
    changed then.
    """
    if not plan.steps:
        return {}
    lost = _pooled_slots(tenant, plan)
    if not lost:
        changes.apply_and_settle(tenant, plan)
        return {}
    pool = tenant.kv.pool
    if not plan.gained or pool.external or changes.room(tenant, lost) >= len(pool.pending(lost)):
        return changes.exchange(tenant, plan, lost, drain_to=drain_to) or {}
    first, before = way(), tenant.pages
    there = replace(before, streamed=first.streamed, ring=first.ring, lent=first.lent)
    lost = _pooled_slots(tenant, from_there(there, first.epoch))
    room = changes.room(tenant, lost, tenant.slots_of(first.gained))
    if first.lost or room < len(pool.pending(lost)):
        raise changes.no_room(tenant, lost, room)
    with AllOrNothing(changes, (tenant,)) as undo:
        if first.steps:
            changes.apply_and_settle(tenant, first)
            undo.append(partial(_go_back, changes, tenant, before, back))
        second = again()
        return changes.exchange(tenant, second, _pooled_slots(tenant, second), drain_to=drain_to) or {}


def _go_back(
    changes: Changes, tenant: TenantState, before: TenantPages, back: Callable[[TenantPages, int], Plan]
) -> None:
    """Stream again what `before` says, through the very same ring. No live block is in the way: none has moved yet."""
    plan = back(before, changes.arena.epoch)
    changes.exchange(tenant, plan, _pooled_slots(tenant, plan))


def _pooled_slots(tenant: TenantState, plan: Plan) -> list[int]:
    """Where the lost pages stand that blocks may lie in: what was reclaimed for this has never been in the pool."""
    reclaimed = tenant.reclaimed
    lost = [page for page in plan.lost if page not in reclaimed] if reclaimed else plan.lost
    return list(tenant.slots_of(lost))


def refuse_homeless(tenant: TenantState, gained: Sequence[int]) -> None:
    """Raises InvalidArgument (fields pages, max_blocks) if one of these pages has no place in the tenant's KV region."""
    homeless = 0
    if not tenant.stand_together(gained):
        homeless = sum(page not in tenant.index_of for page in gained)
    if homeless:
        raise InvalidArgument(
            f"{homeless} pages would have no place in the KV region of {tenant.kv.max_blocks} blocks; nothing "
            "changed; attach with a larger max_blocks or remap fewer layers",
            pages=homeless,
            max_blocks=tenant.kv.max_blocks,
        )
