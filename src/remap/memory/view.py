"""What the controller is shown of a tenant."""

from __future__ import annotations

from remap.memory.apply import Changes
from remap.memory.slice_plan import alpha_of, tail_for
from remap.memory.state import TenantState
from remap.policy.views import Demand, Others, TenantView

__all__ = ["free_pages_of", "view_of"]

_NO_DEMAND = Demand(0)


def free_pages_of(changes: Changes, tenant: TenantState) -> tuple[int, ...]:
    """The arena's free pages that have a place in the tenant's KV region, in giving order. Looked up once per epoch."""
    epoch = changes.epoch
    known = tenant.known_free
    if known is None or known[0] != epoch or epoch < 0:
        # From the free pages to their places: a tenant has places for ten thousands of pages, and few of them are free.
        giving, place_of = tenant.giving, tenant.index_of.get
        places = [place for place in map(place_of, changes.arena.free_pages()) if place is not None]
        places.sort()
        known = tenant.known_free = (epoch, tuple([giving[place] for place in places]))
    return known[1]


def view_of(
    changes: Changes, tenant: TenantState, demand: Demand | None = None, others: Others | None = None
) -> TenantView:
    """The tenant as the controller sees it now. On the engine's path in every step: cheap reads only.

    An engine with its own allocator holds every block as far as the pool knows; which of them are free it says itself (`demand`).
    others: what other tenants could give, where there are any.
    """
    pool, demand = tenant.kv.pool, demand or _NO_DEMAND
    if tenant.slicing:
        return _sliced_view(changes, tenant, demand, others)
    buffers = len(tenant.pages.ring)
    streamable = len(tenant.order)
    block_pages = tenant.blocks_per_page
    free, live = pool.free_blocks, pool.live_blocks
    if pool.external:
        free = min(demand.free or 0, live)
        live -= free
    return TenantView(
        layers=tenant.layers,
        remapped=max(0, len(tenant.pages.streamed) - buffers),
        buffers=buffers,
        streamable=streamable,
        usable_blocks=pool.usable_blocks,
        free_blocks=free,
        live_blocks=live,
        free_pool_blocks=int(len(free_pages_of(changes, tenant)) * block_pages),
        blocks_per_layer=tenant.blocks_per_layer,
        max_remapped=min(tenant.hosted, max(0, streamable - max(1, buffers))),
        times=tenant.timing.decode(),
        max_blocks=tenant.kv.max_blocks,
        shrink_blocks=tenant.shrink_blocks,
        active=tenant.active,
        seen=tenant.unseen is None,
        lends=bool(tenant.pages.lent),
        others=others,
        order=tenant.order,
    )


def _sliced_view(changes: Changes, tenant: TenantState, demand: Demand, others: Others | None) -> TenantView:
    """In slices the unit is one tail page of every layer, where it is a layer otherwise: as many "layers" as pages a layer."""
    pool = tenant.kv.pool
    pages = tenant.pages
    buffers = len(pages.ring)
    known = tenant.known_depths
    if known is None or known[0] is not tenant.order:  # a view is made in every step, layers are pinned hardly ever
        known = tenant.known_depths = (tenant.order, *_depths(tenant, tenant.config.max_layers))
    layers, deepest, most = len(tenant.order), known[1], known[2]
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
        free_pool_blocks=int(len(free_pages_of(changes, tenant)) * tenant.blocks_per_page),
        blocks_per_layer=max(1, layers - max(2, buffers)) * tenant.blocks_per_page,
        max_remapped=most,
        times=tenant.timing.decode(),
        max_blocks=tenant.kv.max_blocks,
        active=tenant.active,
        seen=tenant.unseen is None,
        lends=bool(pages.lent),
        others=others,
        order=tenant.order,
        unit="pages of every layer",
    )


def _depths(tenant: TenantState, cap: int | None) -> tuple[int, int]:
    """(pages of the largest streamable layer, most tail pages that may stream: `cap` is in layers)."""
    homes = [tenant.pages.homes[layer] for layer in tenant.order]
    sizes = sorted(map(len, homes), reverse=True)
    deepest = sizes[0] if sizes else 0
    if len(homes) <= 2 or tenant.hosted < len(homes):
        return deepest, 0
    # A page a layer more gives one of each layer that has it, less the ring's two: nothing beyond the third largest layer.
    most = sizes[2]
    if cap is not None:
        most = min(most, tail_for(homes, min(cap, alpha_of(homes, most, 2)), 2))
    return deepest, most
