"""Carrying out a change of slices: find what was written, plan, vacate, apply and settle, with the undo rules of changes.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from remap.errors import InvalidArgument
from remap.memory.slice_plan import alpha_of, giving_order, plan_slices, tail_for
from remap.memory.undoing import AllOrNothing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remap.memory.apply import Changes
    from remap.memory.plan import Plan, TenantPages
    from remap.tenant import Tenant

__all__ = ["alpha_of", "can_reslice", "giving_order", "reslice", "tail_for"]


def reslice(
    changes: Changes,
    tenant: Tenant,
    tail_pages: int,
    buffers: int,
    *,
    to: str = "kv",
    predicted_stall_s: float = 0.0,
    reason: str = "",
) -> dict[int, int]:
    """Make every streamable layer stream its last `tail_pages` pages through `buffers` ring buffers; 0: all resident.

    Returns the blocks that moved, {old: new}. to: whether the pages given away become the tenant's "kv", or "free". Layers
    that something wrote into since attach are found, and pinned, before anything changes. Raises InvalidArgument as `plan_slices`
    does, or if pages have no place in the KV region (pages, max_blocks); OutOfBlocks if live blocks do not fit into what
    remains, also where an engine with its own allocator holds them; the backend's error if the change could not be applied.
    Nothing changes then, unless `changes.applied` has grown: a step was made on the way (the old tails, fewer buffers), and
    could not be taken back.
    """
    pages = tenant._attachment.pages
    if tail_pages and pages.streamed and not pages.tail_pages:
        _refuse_whole(tenant)
    plan = _plan(changes, tenant, _sliceable(tenant, tail_pages), tail_pages, buffers, to, predicted_stall_s, reason)
    if not plan.steps:
        return {}
    slots = _lost_slots(tenant, plan)
    if not slots:
        changes.apply_and_settle(tenant, plan)
        return {}
    pool = tenant.kv.pool
    if plan.gained and not pool.external and changes._room(tenant, slots) < len(pool.pending(slots)):
        # Gain first, so that the live blocks have somewhere to go: what a ring of fewer buffers leaves becomes KV.
        way = _plan(
            changes,
            tenant,
            pages.streamed,
            pages.tail_pages,
            min(buffers, tenant.buffers),
            to,
            predicted_stall_s,
            reason,
        )
        there = replace(pages, ring=way.ring, lent=way.lent)
        after = plan_slices(there, way.epoch, plan.streamed, tail_pages, buffers, to=to)
        gone = _lost_slots(tenant, after)
        room = changes._room(tenant, gone, tenant.slots_of(way.gained))
        if way.lost or room < len(pool.pending(gone)):
            raise changes._no_room(tenant, gone, room)
        with AllOrNothing(changes, (tenant,)) as undo:
            if way.steps:
                changes.apply_and_settle(tenant, way)
                undo.append(partial(_go_back, changes, tenant, pages))
            plan = _plan(changes, tenant, plan.streamed, tail_pages, buffers, to, predicted_stall_s, reason)
            return changes.exchange(tenant, plan, _lost_slots(tenant, plan)) or {}
    return changes.exchange(tenant, plan, slots) or {}


def _go_back(changes: Changes, tenant: Tenant, before: TenantPages) -> None:
    """The ring that there was. No live block is in the way: none has moved yet."""
    now = tenant._attachment.pages
    plan = plan_slices(
        now, changes._arena.epoch, before.streamed, before.tail_pages, len(before.ring), ring=before.ring
    )
    changes.exchange(tenant, plan, _lost_slots(tenant, plan))


def can_reslice(tenant: Tenant, tail_pages: int, buffers: int) -> bool:
    """Whether `reslice` has layers enough for the ring, once those that something wrote into are known."""
    sizes = [len(tenant._attachment.pages.homes[layer]) for layer in _sliceable(tenant, tail_pages)]
    if not sizes:
        return tail_pages == 0
    tails = sum(min(tail_pages, size) for size in sizes)
    return buffers < len(sizes) and tail_pages <= max(sizes) and tails >= buffers * tail_pages


def _lost_slots(tenant: Tenant, plan: Plan) -> list[int]:
    """Where the pages stand that live blocks must leave. Pages that were reclaimed from others are in no block."""
    reclaimed = tenant._attachment.reclaimed
    return list(tenant.slots_of([page for page in plan.lost if page not in reclaimed]))


def _sliceable(tenant: Tenant, tail_pages: int) -> tuple[int, ...]:
    """Every streamable layer, once it was looked at for writes since attach. Finds pin their layer."""
    attachment = tenant._attachment
    if not tail_pages:
        return ()
    while True:
        target = tuple(sorted(attachment.order))
        written = attachment.watch(sorted(set(target) - set(tenant.streamed)))
        if not written:
            return target
        attachment.written.update(written)
        attachment.pinned.update(written)
        attachment.order = tuple(layer for layer in attachment.order if layer not in written)


def _plan(
    changes: Changes,
    tenant: Tenant,
    target: Sequence[int],
    tail_pages: int,
    buffers: int,
    to: str,
    stall: float,
    reason: str,
) -> Plan:
    attachment = tenant._attachment
    plan = plan_slices(
        attachment.pages,
        changes._arena.epoch,
        target,
        tail_pages,
        buffers,
        to=to,
        predicted_stall_s=stall,
        reason=reason,
    )
    homeless = sum(page not in attachment.index_of for page in plan.gained)
    if homeless:
        raise InvalidArgument(
            f"{homeless} pages would have no place in the KV region of {tenant.kv.max_blocks} blocks; nothing changed; attach "
            "with a larger max_blocks or slice fewer pages",
            pages=homeless,
            max_blocks=tenant.kv.max_blocks,
        )
    return plan


def _refuse_whole(tenant: Tenant) -> None:
    raise InvalidArgument(
        f"{len(tenant.streamed)} whole layers of {tenant.name!r} stream; nothing changed; remap 0 layers first",
        streamed=len(tenant.streamed),
    )
