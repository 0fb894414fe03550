"""What the other tenants could give to one that needs blocks: one list of increments a donor, dearest kinds last.

    unused KV of others    blocks above min_blocks that nobody uses (an active donor keeps its headroom and hysteresis)
    idle tenants           their last layers, in the policy's order, each up to what the first prefill hides and ttft_budget_s
    active, paused ones    their layers, within their own slowdown; the receiver's own are beside them (Controller.offers)

Asked for only when free pages do not do. Sources: Oneiros section 5.1 (inactive models first, by priority, then the active
ones); that unused KV comes before both, the exact cap and the minimum-idle rule are ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from remap.policy.donors.ranking import Candidate, may_donate, rank
from remap.policy.donors.supply import Quote
from remap.policy.schedule import RELATIVE_EPSILON, one_shot_delay
from remap.policy.views import Take

if TYPE_CHECKING:
    from remap.session import Session
    from remap.tenant import Tenant

__all__ = ["away_cap", "candidates_of", "offers_to", "paused", "surplus_of"]

# Asked in every step while demand is unmet, of times that change only when the donor runs.
_late = functools.lru_cache(maxsize=256)(one_shot_delay)


def offers_to(session: Session, receiver: Tenant, need: int) -> list[list[Quote]]:
    """Increments of all other tenants, in blocks of the receiver. Tenants inside a pass or being detached give nothing."""
    others = [
        tenant
        for name, tenant in session._tenants.items()
        if tenant is not receiver and session._configs[name].lends and not tenant._busy
    ]
    now = session.clock()
    idle = _ranked(session, [tenant for tenant in others if not tenant.active and not paused(tenant)], now)
    busy = [tenant for tenant in others if tenant.active or paused(tenant)]
    lists = [_idle(session, donor, receiver, need) for donor in (*idle, *busy)]
    config = session._config
    for donor in idle:
        if may_donate(_candidate(session, donor, now), min_idle=config.min_idle):
            lists.append(_of_inactive(session, donor, receiver, need))
    lists.extend(_of_active(session, donor, receiver) for donor in busy)
    return [quotes for quotes in lists if quotes]


def paused(tenant: Tenant) -> bool:
    """Whether an inactive tenant has requests that have begun: it waits for its turn, and is not idle.

    What it lends holds live blocks of others by then, who wait for their turns in turn, so it would not come home but be
    streamed in every pass. So a paused tenant gives what an active one does, within `slowdown`, and no more. Of an engine with
    its own allocator nobody knows which blocks are live: it counts as idle while it is inactive.
    """
    return not tenant.active and not tenant.kv.pool.external and tenant.kv.live_blocks > 0


def surplus_of(session: Session, donor: Tenant) -> int:
    """Blocks of its own that a tenant could lose now: all unused ones above min_blocks of an inactive tenant; an active one
    keeps its last demand, headroom and hysteresis as well."""
    free = donor.kv.usable_blocks - donor.kv.spec.min_blocks
    if not donor.kv.pool.external:
        free = min(free, donor.kv.free_blocks)
    if donor.active and free > 0:
        wanted = session._demands.get(donor.name)
        view = session._view_of(donor, wanted)
        free = min(free, session._controllers[donor.name].spare(view, wanted.blocks if wanted else 0))
    return max(0, free)


def away_cap(session: Session, donor: Tenant) -> int:
    """The most layers of an inactive tenant that may be away: as many as a short prefill of its own hides while all that is
    streamed then, the ring's layers too, is loaded, and `ttft_budget_s` more.

    One layer, and what the budget pays for, while no pass of it was measured. Never all of them: the ring's stay, and one
    more.
    """
    config = session._configs[donor.name]
    order = donor._attachment.order
    buffers = max(1, donor.buffers)
    most = min(len(order), donor.layers - 1) - buffers
    if config.cap is not None:
        most = min(most, config.cap)
    times = donor.prefill_times()
    if times is None:
        copy = donor.copy_seconds()
        return max(0, min(most, 1 + (int(config.ttft_budget_s / copy) if copy > 0 else 0)))
    bound = config.ttft_budget_s + RELATIVE_EPSILON * math.fsum(times.compute_s)
    kind = donor.growing_by
    cap = donor.remapped  # more is away only together with what is away now
    while cap < most and _late(times.compute_s, times.transfer_s, donor.select(cap + 1, buffers, kind)) <= bound:
        cap += 1
    return max(0, min(cap, most))


def candidates_of(session: Session, tenants: Sequence[Tenant], now: float) -> list[Candidate]:
    """The tenants as the policy sees them."""
    return [_candidate(session, tenant, now) for tenant in tenants]


def _candidate(session: Session, tenant: Tenant, now: float) -> Candidate:
    return Candidate(
        name=tenant.name,
        active=tenant.active,
        priority=tenant.priority,
        order=tenant.number,
        last_use=tenant._last_use,
        idle_s=max(0.0, now - tenant._last_pass_s),
        next_use_s=session._activity.expected_s(tenant.name, now),
        reload_s=tenant.copy_seconds(),
    )


def _ranked(session: Session, tenants: Sequence[Tenant], now: float) -> list[Tenant]:
    if len(tenants) < 2:
        return list(tenants)
    by_name = {tenant.name: tenant for tenant in tenants}
    config = session._config
    ranked = rank(candidates_of(session, tenants, now), config.policy, session._cursor)  # type: ignore[arg-type]
    return [by_name[candidate.name] for candidate in ranked]


def _idle(session: Session, donor: Tenant, receiver: Tenant, need: int) -> list[Quote]:
    surplus = surplus_of(session, donor)
    if surplus <= 0:
        return []
    wanted = math.ceil(need / receiver._blocks_per_page) + 1
    pages = len(session._lending.idle_slots(donor, receiver, wanted, surplus))
    blocks = int(pages * receiver._blocks_per_page)
    return [Quote(donor.name, "idle_kv", blocks, 0.0, 0.0, Take(donor.name, "idle_kv", blocks))] if blocks else []


def _of_inactive(session: Session, donor: Tenant, receiver: Tenant, need: int) -> list[Quote]:
    """Its layers one by one, until they cover the need or its cap is reached."""
    attachment = donor._attachment
    if attachment.pages.tail_pages:
        return []  # slices of all layers stream: none can go whole
    buffers = max(1, donor.buffers)
    kind = donor.growing_by
    last = sorted(attachment.order, reverse=True)[:buffers]
    places = receiver._attachment.index_of
    quotes = []
    copy = donor.copy_seconds()
    before = donor.select(donor.remapped, buffers, kind) or tuple(last)
    for alpha in range(donor.remapped + 1, away_cap(session, donor) + 1):
        if need <= 0:
            break
        if not attachment.possible(donor.select(alpha, buffers, kind), buffers):
            continue
        layers = set(donor.select(alpha, buffers, kind)).difference(before)
        before = donor.select(alpha, buffers, kind)
        pages = sum(page in places for layer in layers for page in attachment.pages.homes[layer])
        blocks = int(pages * receiver._blocks_per_page)
        take = Take(donor.name, "layers", blocks, alpha, buffers, kind)
        quotes.append(Quote(donor.name, "inactive", blocks, 0.0, copy, take))
        need -= blocks
    return quotes


def _of_active(session: Session, donor: Tenant, receiver: Tenant) -> list[Quote]:
    if donor.slicing:
        return []  # it counts in pages of every layer, which nobody else can use
    controller = session._controllers[donor.name]
    view = session._view_of(donor, session._demands.get(donor.name))
    scale = donor._attachment.pages.buffer_pages * receiver._blocks_per_page / view.blocks_per_layer
    quotes = []
    total = 0.0
    for quote in controller.offers(view, donor.name):
        alpha, buffers = cast("tuple[int, int]", quote.step)
        blocks = int(quote.blocks * scale)
        total += quote.stall_s
        take = Take(donor.name, "layers", blocks, alpha, buffers, "onward", total)
        quotes.append(Quote(donor.name, "active", blocks, quote.stall_s, quote.reload_s, take))
    return quotes
