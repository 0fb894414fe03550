"""What the controller is shown of a tenant, and the two questions that it may ask the schedule mathematics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from . import schedule
from .attach import MAX_BUFFERS
from .config import ControllerConfig
from .views import Demand, LayerSeconds, TenantView

if TYPE_CHECKING:
    from .session import Session
    from .tenant import Tenant

__all__ = ["HiddenCopies", "free_pages_of", "view_of"]

_LAYERS_AHEAD = 4  # growth usually takes no more layers at once


class HiddenCopies:
    """The two questions, answered exactly, for the sets of layers that the tenant would stream.

    An answer takes up to milliseconds (many layers, times near the limit), which growth must not wait for. So `prepare`
    asks what growth will ask, where new times come from: at the end of a pass.
    """

    def __init__(self, tenant: Tenant, config: ControllerConfig) -> None:
        self._tenant = tenant
        self._slowdown = config.slowdown
        self._kind = "uniform" if config.selection == "uniform" else "nested"
        self._buffers = range(1, MAX_BUFFERS + 1) if config.buffers == "auto" else (config.buffers,)
        self._asked: tuple[LayerSeconds, tuple[int, ...]] | None = None  # the times and layers that the answers are for
        self._bound: tuple[int, int] | None = None
        self._stalls: dict[tuple[int, int], float] = {}

    def bound(self, times: LayerSeconds) -> tuple[int, int]:
        """(most layers that can be remapped within the slowdown, buffers)."""
        self._renew(times)
        if self._bound is None:
            self._bound = self._exact_bound(times)
        return self._bound

    def stall(self, times: LayerSeconds, remapped: int, buffers: int) -> float:
        """Seconds per pass for which the computation would wait."""
        self._renew(times)
        stall = self._stalls.get((remapped, buffers))
        if stall is None:
            streamed = self._tenant.select(remapped, buffers, self._kind)
            stall = schedule.stall(times.compute_s, times.transfer_s, streamed, buffers)
            self._stalls[remapped, buffers] = stall
        return stall

    def prepare(self, times: LayerSeconds) -> None:
        """Answer ahead: the bound, and the stall now and with a few layers more."""
        most, buffers = self.bound(times)
        remapped = self._tenant.remapped
        if remapped:
            buffers = self._tenant.buffers
        most = min(most, len(self._tenant._attachment.order) - buffers)
        for alpha in range(max(1, remapped), min(remapped + _LAYERS_AHEAD, most) + 1):
            self.stall(times, alpha, buffers)

    def _renew(self, times: LayerSeconds) -> None:
        order = self._tenant._attachment.order
        if self._asked is None or self._asked[0] is not times or self._asked[1] is not order:
            self._asked = (times, order)
            self._bound = None
            self._stalls.clear()

    def _exact_bound(self, times: LayerSeconds) -> tuple[int, int]:
        compute, transfer = times.compute_s, times.transfer_s
        limit = (1.0 + self._slowdown) * math.fsum(compute) * (1.0 + schedule.RELATIVE_EPSILON)
        streamable = len(self._tenant._attachment.order)
        best = (0, self._buffers[0])
        for buffers in self._buffers:
            # Not monotone in alpha (see schedule.max_remapped), so from the largest down. A copy engine that is busy for
            # longer than the pass may last settles most of them without the exact period.
            for alpha in range(streamable - buffers, best[0], -1):
                streamed = self._tenant.select(alpha, buffers, self._kind)
                copied = schedule.SlotAssignment.of(streamed, buffers).copied
                if math.fsum(transfer[layer] for layer in copied) > limit:
                    continue
                if schedule.period(compute, transfer, streamed, buffers) <= limit:
                    best = (alpha, buffers)
                    break
        return best


def free_pages_of(arena: Any, tenant: Tenant) -> tuple[int, ...]:
    """The arena's free pages that have a place in the tenant's KV region, in giving order. Looked up once per epoch."""
    epoch = arena.epoch
    known = tenant._free_pages
    if known is None or known[0] != epoch:
        free = set(arena.free_pages())
        known = tenant._free_pages = (epoch, tuple(page for page in tenant._attachment.giving if page in free))
    return known[1]


def view_of(session: Session, tenant: Tenant, demand: Demand) -> TenantView:
    """The tenant as the controller sees it now. On the engine's path in every step: cheap reads only.

    An engine with its own allocator holds every block as far as the pool knows; which of them are free it says itself.
    """
    attachment, pool = tenant._attachment, tenant.kv.pool
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
        lends=bool(attachment.pages.lent),
        others=tenant._others if len(session._tenants) > 1 else None,
    )
