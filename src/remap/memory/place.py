# SPDX-License-Identifier: Apache-2.0
"""Which layers a tenant holds and computes, where several instances compute one model together.

    leave   layers -> elsewhere, their pages: params -> kv          no copy, and no driver call in aliased mode
    return  live blocks move out, the pages: kv -> params           loaded from the master copies, in layer order; or
    fill    the same, and their bytes come from the caller, who has them from another instance (`fill_layer`, `filled`)

A layer that is elsewhere is in no ring, and nothing of it is copied. Returning layers may load while passes compute
others. Source: KunServe, section 4.1 (dropping) and 4.4 (restoring).
"""

from __future__ import annotations

from collections.abc import Collection

from remap.errors import InvalidArgument, InvalidState
from remap.memory.apply import Changes
from remap.memory.entries import Entries, merge
from remap.memory.lend import Lending
from remap.memory.pages import Streaming, TenantPages, Transition, plan_between
from remap.memory.restream import choose, require_places
from remap.memory.state import TenantState
from remap.sizes import shown

__all__ = ["check_place", "fill_layer", "filled", "place", "read_layer"]


def check_place(tenant: TenantState, first: int, end: int, hold: Collection[int], fill: Collection[int] = ()) -> None:
    """Raises InvalidArgument and InvalidState as `advanced.place` says. Changes nothing, but pins layers that were written."""
    count = tenant.layers
    if not 0 <= first <= end <= count or not all(0 <= layer < count for layer in hold):
        raise InvalidArgument(
            f"the layers to compute must be a run of 0..{count}, and those to hold lie in 0..{count - 1}; got {shown(first)} to "
            f"{shown(end)}, and {sorted(hold)}; nothing changed",
            first=first,
            end=end,
            hold=tuple(hold),
            layers=count,
        )
    here = sorted(
        layer for layer in fill if first <= layer < end or layer not in hold or layer not in tenant.pages.gone
    )
    if here:
        raise InvalidArgument(
            f"layers to fill must be elsewhere now, be held and not be computed; {here} are not; nothing changed; leave them out",
            fill=tuple(fill),
            layers=tuple(here),
        )
    if tenant.pages.cold:
        raise InvalidState(
            f"layers {list(tenant.cold_layers)} of {tenant.name!r} have no pages, so none can be placed; nothing changed; "
            "activate the tenant first",
            tenant=tenant.name,
            layers=tenant.cold_layers,
        )
    if tenant.pages.for_good:
        raise InvalidState(
            f"layers of {tenant.name!r} stream for good, so none can be computed elsewhere; nothing changed; attach without "
            "resident_layers",
            tenant=tenant.name,
        )
    leaving = _leaving(tenant, {*range(first, end), *hold})
    written = tenant.source.watch(leaving)
    tenant.pin(written)
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
    changes: Changes,
    lending: Lending,
    tenant: TenantState,
    first: int,
    end: int,
    hold: Collection[int],
    fill: Collection[int] = (),
) -> Entries:
    """`advanced.place`, checked already. Returns the entries of its report."""
    held = {*range(first, end), *hold}
    computed = None if end - first == tenant.layers else (first, end)
    usable = tenant.kv.usable_blocks
    report: Entries = {}
    reason = f"layers from {first} to before {end} are computed here, {len(held)} of {tenant.layers} are held"
    lent = any(map(tenant.lends, _leaving(tenant, held)))
    before = tenant.pages.computed
    tenant.come = {layer: come for layer, come in tenant.come.items() if layer in tenant.pages.unfilled}
    try:
        with changes.part():
            changes.cancel_draining(tenant)
            moved = lending.bring_home(tenant, choose(tenant, 0, tenant.buffers, "inward")) if lent else {}
            if tenant.handle is not None:
                tenant.handle.compute_parts()
            for plan in _plans(tenant, tenant.pages, held, frozenset(fill)):
                changes.apply(tenant, plan)
            changes.note(tenant, tenant.books._replace(pages=tenant.pages.computing(computed)))
    finally:
        if tenant.pages.computed != before:
            tenant.timing.compute_only(range(first, end))
        if tenant.pages.computed is None and not tenant.pages.gone and tenant.handle is not None:
            tenant.handle.compute_all()
    entry = merge(report, tenant.name, moved)
    entry.added, entry.stall, entry.reason = (
        max(0, tenant.kv.usable_blocks - usable),
        tenant.predicted_stall_s,
        reason,
    )
    return report


def read_layer(changes: Changes, tenant: TenantState, layer: int, offset: int, address: int, nbytes: int) -> None:
    """`advanced.read_layer`."""
    _check_bytes(tenant, layer, offset, nbytes)
    if layer in tenant.away():
        raise InvalidState(
            f"layer {layer} of {tenant.name!r} streams, is loading or is elsewhere, so its bytes cannot be read; nothing "
            "changed; take them from a master copy",
            tenant=tenant.name,
            layer=layer,
        )
    changes.streams.copy([(address, tenant.addresses[layer] + offset, nbytes)])


def fill_layer(changes: Changes, tenant: TenantState, layer: int, offset: int, address: int, nbytes: int) -> bool:
    """`advanced.fill_layer`."""
    _check_bytes(tenant, layer, offset, nbytes)
    _require_unfilled(tenant, layer)
    if tenant.rest is not None or not tenant.prefetcher.ready(layer):
        return False  # its region does not show its pages yet
    changes.streams.copy([(tenant.addresses[layer] + offset, address, nbytes)])
    tenant.come[layer] = _joined([*tenant.come.get(layer, ()), (offset, offset + nbytes)])
    return True


def filled(changes: Changes, tenant: TenantState, layer: int) -> None:
    """`advanced.filled`."""
    _require_unfilled(tenant, layer)
    come, nbytes = tenant.come.get(layer, []), tenant.layer_bytes[layer]
    if come != [(0, nbytes)] and nbytes:
        raise InvalidState(
            f"of the {nbytes} bytes of layer {layer} of {tenant.name!r} only {come} (offset, end) have come since it waits; "
            "nothing changed; fill in the others, or call `advanced.place` without it in fill=",
            tenant=tenant.name,
            layer=layer,
            come=tuple(come),
            nbytes=nbytes,
        )
    changes.apply(tenant, Transition(tenant.pages.filled(layer)))  # nothing is loaded
    tenant.come.pop(layer, None)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes, as few ranges (offset, end), ascending."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(each for each in ranges if each[0] < each[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


def _check_bytes(tenant: TenantState, layer: int, offset: int, nbytes: int) -> None:
    whole = tenant.layer_bytes[layer] if 0 <= layer < tenant.layers else -1
    if not 0 <= offset <= offset + nbytes <= whole:
        raise InvalidArgument(
            f"bytes {offset} to before {offset + nbytes} of layer {layer} are none: {tenant.name!r} has {tenant.layers} "
            f"layers, and this one {max(0, whole)} bytes; nothing changed",
            layer=layer,
            offset=offset,
            nbytes=nbytes,
        )


def _require_unfilled(tenant: TenantState, layer: int) -> None:
    if layer not in tenant.pages.unfilled:
        raise InvalidState(
            f"layer {layer} of {tenant.name!r} does not wait for bytes: only {sorted(tenant.pages.unfilled)} do; nothing "
            "changed; see `advanced.place`",
            tenant=tenant.name,
            layer=layer,
        )


def _leaving(tenant: TenantState, held: Collection[int]) -> list[int]:
    return [layer for layer in range(tenant.layers) if layer not in held and layer not in tenant.pages.gone]


def _plans(tenant: TenantState, now: TenantPages, held: Collection[int], fill: frozenset[int]) -> list[Transition]:
    """From the tenant's pages as they are `now`, or will be by then. A layer that leaves and does not stream goes first, and one
    that comes back comes last: so there is room for blocks on the way. Pages that wait for their bytes, and go on being held,
    stay where they are.

    Raises InvalidArgument (fields pages, max_blocks) if pages have no place in the KV region.
    """
    streamed = set(now.streamed)
    at_home = set(range(tenant.parts)) - now.gone
    held = {*held, *range(tenant.layers, tenant.parts)}
    found = []
    waiting = now.unfilled.intersection(held)
    for layers, unfilled in (
        (at_home.intersection({*held, *streamed}), waiting),
        (at_home.intersection(held), waiting),
        (held, fill),
    ):
        there = now.holding(layers, _rest(now, layers), unfilled=unfilled)
        if (there.elsewhere, there.unfilled) != (now.elsewhere, now.unfilled):
            plan = plan_between(now, there)
            require_places(tenant, plan.gained)
            found.append(plan)
            now = plan.there
    return found


def _rest(now: TenantPages, layers: Collection[int]) -> Streaming:
    """The streaming that goes on in these layers: all that streams now, or nothing if the ring finds no pages in it."""
    tails = tuple(tail if layer in layers else 0 for layer, tail in enumerate(now.tails))
    rest = Streaming(tails, len(now.ring), now.depth)
    if len(rest.layers) > rest.buffers and now.ring_of(rest) is not None:
        return rest
    return Streaming((0,) * len(tails), len(now.ring), 0)
