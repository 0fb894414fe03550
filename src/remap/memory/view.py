"""What the controller is shown of a tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remap.memory.reslice import alpha_of, tail_for
from remap.policy.views import Demand, TenantView

if TYPE_CHECKING:
    from remap.session import Session
    from remap.tenant import Tenant

__all__ = ["free_pages_of", "view_of"]


def free_pages_of(arena: Any, tenant: Tenant) -> tuple[int, ...]:
    """The arena's free pages that have a place in the tenant's KV region, in giving order. Looked up once per epoch."""
    epoch = tenant._session._changes.epoch
    known = tenant._free_pages
    if known is None or known[0] != epoch or epoch < 0:
        # From the free pages to their places: a tenant has places for ten thousands of pages, and few of them are free.
        giving, place_of = tenant._attachment.giving, tenant._attachment.index_of.get
        places = [place for place in map(place_of, arena.free_pages()) if place is not None]
        places.sort()
        known = tenant._free_pages = (epoch, tuple([giving[place] for place in places]))
    return known[1]


def view_of(session: Session, tenant: Tenant, demand: Demand) -> TenantView:
    """The tenant as the controller sees it now. On the engine's path in every step: cheap reads only.

    An engine with its own allocator holds every block as far as the pool knows; which of them are free it says itself.
    """
    attachment, pool = tenant._attachment, tenant.kv.pool
    if tenant.slicing:
        return _sliced_view(session, tenant, demand)
    buffers = len(attachment.pages.ring)
    streamable = len(attachment.order)
    block_pages = tenant._blocks_per_page
    free, live = pool.free_blocks, pool.live_blocks
    if pool.external:
        free = min(demand.free or 0, live)
        live -= free
    return TenantView(
        layers=tenant.layers,
        remapped=max(0, len(attachment.pages.streamed) - buffers),
        buffers=buffers,
        streamable=streamable,
        usable_blocks=pool.usable_blocks,
        free_blocks=free,
        live_blocks=live,
        free_pool_blocks=int(len(free_pages_of(session._arena, tenant)) * block_pages),
        blocks_per_layer=tenant._blocks_per_layer,
        max_remapped=min(attachment.hosted, max(0, streamable - max(1, buffers))),
        times=tenant.times(),
        epoch=0,
        max_blocks=tenant.kv.max_blocks,
        shrink_blocks=tenant._shrink_blocks,
        active=tenant.active,
        seen=tenant.seen,
        lends=bool(attachment.pages.lent),
        others=tenant._others if len(session._tenants) > 1 else None,
    )


def _sliced_view(session: Session, tenant: Tenant, demand: Demand) -> TenantView:
    """In slices the unit is one tail page of every layer, where it is a layer otherwise: as many "layers" as pages a layer."""
    attachment, pool = tenant._attachment, tenant.kv.pool
    pages = attachment.pages
    buffers = len(pages.ring)
    known = tenant._depths
    if known is None or known[0] is not attachment.order:  # a view is made in every step, layers are pinned hardly ever
        known = tenant._depths = (attachment.order, *_depths(tenant, session._configs[tenant.name].cap))
    layers, deepest, most = len(attachment.order), known[1], known[2]
    free, live = pool.free_blocks, pool.live_blocks
    if pool.external:
        free = min(demand.free or 0, live)
        live -= free
    return TenantView(
        layers=deepest + 2,
        remapped=pages.tail_pages,
        buffers=buffers,
        streamable=deepest + 2,
        usable_blocks=pool.usable_blocks,
        free_blocks=free,
        live_blocks=live,
        free_pool_blocks=int(len(free_pages_of(session._arena, tenant)) * tenant._blocks_per_page),
        blocks_per_layer=max(1, layers - max(2, buffers)) * tenant._blocks_per_page,
        max_remapped=most,
        times=tenant.times(),
        epoch=0,
        max_blocks=tenant.kv.max_blocks,
        active=tenant.active,
        seen=tenant.seen,
        lends=bool(pages.lent),
        others=tenant._others if len(session._tenants) > 1 else None,
        unit="pages of every layer",
    )


def _depths(tenant: Tenant, cap: int | None) -> tuple[int, int]:
    """(pages of the largest streamable layer, most tail pages that may stream: `cap` is in layers)."""
    attachment = tenant._attachment
    homes = [attachment.pages.homes[layer] for layer in attachment.order]
    sizes = sorted(map(len, homes), reverse=True)
    deepest = sizes[0] if sizes else 0
    if len(homes) <= 2 or attachment.hosted < len(homes):
        return deepest, 0
    # A page a layer more gives one of each layer that has it, less the ring's two: nothing beyond the third largest layer.
    most = sizes[2]
    if cap is not None:
        most = min(most, tail_for(homes, min(cap, alpha_of(homes, most, 2)), 2))
    return deepest, most
