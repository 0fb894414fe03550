"""Which layers a tenant holds and computes, where several instances compute one model together.

    leave   layers -> elsewhere, their pages: params -> kv          no copy, and no driver call in aliased mode
    return  live blocks move out, the pages: kv -> params           loaded from the master copies, in layer order

A layer that is elsewhere is in no ring, and nothing of it is copied. Returning layers may load while passes compute
others. Source: KunServe, section 4.1 (dropping) and 4.4 (restoring).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from remap.errors import ArenaBroken, Error, InvalidArgument, InvalidState
from remap.memory.apply import Changes
from remap.memory.lend import Lending
from remap.memory.plan import Plan, Streaming, TenantPages, plan_held, ring_of
from remap.memory.restream import require_places
from remap.memory.state import TenantState
from remap.memory.step import Entries, ended_early, merge
from remap.memory.undoing import AllOrNothing

__all__ = ["check_place", "place"]


def check_place(tenant: TenantState, first: int, end: int, hold: Collection[int]) -> None:
    """Raises InvalidArgument and InvalidState as `advanced.place` says. Changes nothing, but pins layers that were written."""
    count = tenant.layers
    if not 0 <= first <= end <= count or not all(0 <= layer < count for layer in hold):
        raise InvalidArgument(
            f"the layers to compute must be a run of 0..{count}, and those to hold lie in 0..{count - 1}; got {first} to {end}, "
            f"and {sorted(hold)}; nothing changed",
            first=first,
            end=end,
            hold=tuple(hold),
            layers=count,
        )
    if tenant.pages.for_good:
        raise InvalidState(
            f"layers of {tenant.name!r} stream for good, so none can be computed elsewhere; nothing changed; attach without "
            "resident_layers",
            tenant=tenant.name,
        )
    leaving = _leaving(tenant, {*range(first, end), *hold})
    written = tenant.source.watch(leaving)
    tenant.written.update(written)
    tenant.pinned.update(written)
    pinned = sorted(layer for layer in leaving if layer in tenant.pinned and tenant.layer_bytes[layer])
    if pinned:
        raise InvalidState(
            f"tenant {tenant.name!r}: something wrote into the layers {pinned} after attach, or registered their memory, so they "
            "must stay; nothing changed; compute them here",
            tenant=tenant.name,
            layers=tuple(pinned),
            written=written,
        )
    tenant.require_seen()


def place(
    changes: Changes, lending: Lending, tenant: TenantState, first: int, end: int, hold: Collection[int]
) -> Entries:
    """`advanced.place`, checked already. Returns the entries of its report."""
    held = {*range(first, end), *hold}
    computed = None if end - first == tenant.layers else range(first, end)
    before, usable, applied = tenant.pages.computed, tenant.kv.usable_blocks, changes.applied
    report: Entries = {}
    merge(report, tenant, {})
    reason = f"layers from {first} to before {end} are computed here, {len(held)} of {tenant.layers} are held"
    changes.cancel_draining(tenant)
    try:
        if any(map(tenant.lends, _leaving(tenant, held))):
            result = lending.bring_home(tenant, 0, tenant.buffers, "inward")
            merge(report, tenant, result.moved)
            if result.problem:
                raise InvalidState(result.problem, tenant=tenant.name)
        plans = _plans(tenant, held)
        _require_room(changes, tenant, plans)
        if tenant.handle is not None:
            tenant.handle.compute_parts()
        with AllOrNothing(changes, (tenant,)) as undo:
            for plan in plans:
                pages = tenant.pages
                moves = changes.exchange(tenant, plan, list(tenant.slots_of(plan.lost))) or {}
                undo.append(partial(_go_back, changes, tenant, pages, moves))
                merge(report, tenant, {tenant.name: moves})
            tenant.pages = replace(tenant.pages, computed=computed)
    except ArenaBroken:
        raise
    except Error as error:
        if changes.applied == applied:
            raise
        reason = ended_early(reason, str(error))
    finally:
        if tenant.pages.computed != before:
            tenant.timing.compute_only(range(first, end))
        if tenant.pages.computed is None and not tenant.pages.gone and tenant.handle is not None:
            tenant.handle.compute_all()
    added = max(0, tenant.kv.usable_blocks - usable)
    report[tenant.name] |= {"added": added, "stall": tenant.predicted_stall_s, "reason": reason}
    return report


def _leaving(tenant: TenantState, held: Collection[int]) -> list[int]:
    return [layer for layer in range(tenant.layers) if layer not in held and layer not in tenant.pages.gone]


def _plans(tenant: TenantState, held: Collection[int]) -> list[Plan]:
    """Who leaves and does not stream goes first, and who comes back comes last: so there is room for blocks on the way.

    Raises InvalidArgument (fields pages, max_blocks) if pages have no place in the KV region.
    """
    now, streamed = tenant.pages, set(tenant.streamed)
    at_home = set(range(tenant.layers)) - now.gone
    found = []
    for layers in (at_home.intersection({*held, *streamed}), at_home.intersection(held), held):
        plan = plan_held(now, layers, _rest(now, layers))
        if plan.elsewhere != now.elsewhere:
            require_places(tenant, plan.gained)
            found.append(plan)
            now = now.after(plan)
    return found


def _rest(now: TenantPages, layers: Collection[int]) -> Streaming:
    """What goes on streaming of these layers: all that streams now, or nothing if the ring finds no pages in it."""
    tails = tuple(tail if layer in layers else 0 for layer, tail in enumerate(now.tails))
    rest = Streaming(tails, len(now.ring), now.depth)
    if len(rest.layers) > rest.buffers and ring_of(now, rest) is not None:
        return rest
    return Streaming((0,) * len(tails), len(now.ring), 0)


def _require_room(changes: Changes, tenant: TenantState, plans: Sequence[Plan]) -> None:
    """Raises OutOfBlocks (field preempt) if live blocks do not fit into the pages that are KV after one of the plans."""
    pages = tenant.pages
    for plan in plans:
        pages = pages.after(plan)
        lost = tenant.pages.kv_from_homes - pages.kv_from_homes
        slots = list(tenant.slots_of(sorted(lost)))
        gained = tenant.slots_of(sorted(pages.kv_from_homes - tenant.pages.kv_from_homes))
        room = changes.room(tenant, slots, list(gained))
        if room < len(tenant.kv.pool.pending(slots)):
            raise changes.no_room(tenant, slots, room)


def _go_back(changes: Changes, tenant: TenantState, before: TenantPages, moves: dict[int, int]) -> None:
    """Hold and stream again what it held and streamed before, through exactly the same ring, with each block in its place."""
    layers = set(range(tenant.layers)) - before.gone
    now = tenant.pages
    coming = plan_held(now, layers, before.streaming, ring=before.ring)
    changes.exchange(tenant, coming, list(tenant.slots_of(coming.lost)))
    if moves:
        changes.move_blocks(tenant, [(new, old) for old, new in moves.items()])
