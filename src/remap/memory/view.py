# SPDX-License-Identifier: Apache-2.0
"""The controller's view of a tenant."""

from __future__ import annotations

from remap.memory.apply import Changes
from remap.memory.state import TenantState
from remap.policy.slices import slices_alpha, tail_for
from remap.policy.views import Demand, TenantView
from remap.sizes import MOST_BYTES

__all__ = ["count_free", "free_pages_of", "view_of"]

_NO_DEMAND = Demand(0)


def free_pages_of(changes: Changes, tenant: TenantState, most: int = MOST_BYTES) -> list[int]:
    """The first `most` of the arena's free pages that have a place in the tenant's KV region, in donation order."""
    return changes.draft.first_free(tenant.donation_lookup, most)


def count_free(changes: Changes, tenant: TenantState) -> int:
    """How many of the arena's free pages have a place in the tenant's KV region. Looked up once per epoch."""
    return tenant.answers.of("free", changes.key, lambda: changes.draft.count_free(tenant.donation_lookup))


def view_of(
    changes: Changes,
    tenant: TenantState,
    demand: Demand | None = None,
    *,
    shares: bool = False,
    beside: bool = False,
) -> TenantView:
    """The tenant as the controller sees it now. On the engine's path in every step: cheap reads only.

    To the pool, an engine with its own allocator holds every block; the engine says in `demand` how many are free.
    shares: see `TenantView`. beside: with the neighbours, for who may copy more.
    """
    pool, pages, demand = tenant.kv.pool, tenant.pages, demand or _NO_DEMAND
    free, live = pool.free_blocks, pool.live_blocks
    if pool.external:
        free = min(demand.free or 0, live)
        live -= free
    buffers = len(pages.ring)
    layers, streamable = tenant.layers, len(tenant.order)
    most = min(tenant.max_remappable, max(0, streamable - max(1, buffers)))
    blocks_per_unit, unit = tenant.blocks_per_layer, "layers"
    shrink_blocks: int | None = tenant.shrink_blocks
    slicing = tenant.slicing
    if slicing:
        # The unit is one tail page of every layer instead of a layer: there are as many "layers" as pages per layer.
        # Every step makes a view, but layers are rarely pinned.
        deepest, most = tenant.answers.of("depths", tenant.order, lambda: _depths(tenant, tenant.config.max_layers))
        blocks_per_unit = max(1, streamable - max(2, buffers)) * tenant.blocks_per_page
        layers = streamable = deepest + 2
        shrink_blocks, unit = None, "pages of every layer"
    return TenantView(
        layers=layers,
        remapped=pages.depth if slicing else tenant.remapped,
        buffers=buffers,
        streamable=streamable,
        usable_blocks=pool.usable_blocks,
        free_blocks=free,
        live_blocks=live,
        free_pool_blocks=int(count_free(changes, tenant) * tenant.blocks_per_page),
        blocks_per_layer=blocks_per_unit,
        max_remapped=most,
        times=tenant.decode_times(),
        max_blocks=tenant.kv.max_blocks,
        shrink_blocks=shrink_blocks,
        active=tenant.active,
        seen=tenant.unseen is None and not (demand.can_wait and tenant.timing.early),
        lends=bool(pages.lent),
        shares=shares,
        neighbours=tenant.link.neighbours(tenant) if beside else None,
        order=tenant.order,
        unit=unit,
    )


def _depths(tenant: TenantState, cap: int | None) -> tuple[int, int]:
    """(pages of the largest streamable layer, most tail pages that may stream: `cap` is in layers)."""
    sizes = sorted((tenant.pages.sizes[layer] for layer in tenant.order), reverse=True)
    deepest = sizes[0] if sizes else 0
    if len(sizes) <= 2 or tenant.max_remappable < len(sizes):
        return deepest, 0
    # One more tail page frees a page of each layer that has it, less the ring's two: none beyond the third largest
    # layer.
    most = sizes[2]
    if cap is not None:
        most = min(most, tail_for(sizes, min(cap, slices_alpha(most, sizes, 2)), 2))
    return deepest, most
