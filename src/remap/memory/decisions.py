"""From a decision of the controller to changes.

Entries of a step's report are made here: tenant -> {added, moved, unmet, stall, reason}. An entry is in the report as soon as its
blocks have moved, so that a step that raises afterwards cannot lose it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remap.errors import OutOfBlocks
from remap.memory.observe import then
from remap.memory.offers import surplus_of
from remap.memory.reslice import can_reslice, reslice
from remap.memory.undoing import AllOrNothing
from remap.memory.view import free_pages_of
from remap.policy.controller import Decision, Demand
from remap.tenant import Tenant

if TYPE_CHECKING:
    from remap.session import Session

__all__ = ["Entries", "carry_out", "consider_return", "ended_early", "merge", "moved_entry"]

Entries = dict[str, dict[str, Any]]


def carry_out(session: Session, tenant: Tenant, wanted: Demand, decision: Decision, report: Entries) -> None:
    """What the controller decided, now. Adds the tenant's entry to the report, and those of tenants whose blocks moved.

    If it raises, `changes.applied` tells whether anything has changed by then; the entry says what.
    """
    changes, pool = session._changes, tenant.kv.pool
    before = tenant.kv.usable_blocks
    entry = report[tenant.name] = moved_entry({}, tenant.name)
    entry.update(stall=decision.predicted_stall_s, reason=decision.reason)
    try:
        with AllOrNothing(changes, (tenant,)):  # of several plans, those before one that fails stay: they are reported
            if decision.action == "grow":
                changes.cancel_draining(tenant)
                _take(session, tenant, decision)
                if decision.remapped > (tenant._attachment.pages.tail_pages if tenant.slicing else tenant.remapped):
                    _remap_more(session, tenant, decision, entry)
            elif decision.action == "shrink" and tenant.slicing:
                entry["moved"] = _reslice(session, tenant, decision)
            elif decision.action == "shrink" and (lacking := _lacking(session, tenant, wanted, decision)):
                entry["reason"] = (
                    f"{decision.reason}; not done, since {lacking} blocks of the demand would be lacking then"
                )
            elif decision.action == "shrink":
                result = session._lending.restream(
                    tenant,
                    decision.remapped,
                    decision.buffers,
                    _homewards(session, tenant, decision.remapped, decision.buffers),
                    predicted_stall_s=decision.predicted_stall_s,
                    reason=decision.reason,
                    drain=True,
                )
                merge(report, tenant, result.moved)
                entry["reason"] = ended_early(decision.reason, result.problem)
            elif tenant._attachment.draining:
                target = tenant._attachment.draining_target or (0, 1)
                entry["moved"] = changes.continue_draining(tenant, _homewards(session, tenant, *target))
    finally:
        added = max(0, tenant.kv.usable_blocks - before)
        # What there is, not what was planned: written layers may have made it less.
        free = (wanted.free or 0) + added if pool.external else pool.free_blocks
        entry.update(added=added, unmet=max(0, wanted.blocks - free))


def _lacking(session: Session, tenant: Tenant, wanted: Demand, decision: Decision) -> int:
    """Blocks of the demand that there would not be after a shrink. The controller reckons with the mean layer; of unequal ones,
    or where blocks become usable in groups, one may take more with it."""
    kind = _homewards(session, tenant, decision.remapped, decision.buffers)
    lost = _claim(session, tenant, decision.remapped, decision.buffers, kind).get(tenant.name, 0)
    free = (wanted.free or 0) if tenant.kv.pool.external else tenant.kv.free_blocks
    return max(0, wanted.blocks - (free - lost))


def _take(session: Session, tenant: Tenant, decision: Decision) -> None:
    """Free pages, and before that what other tenants give: it becomes free pages first."""
    lending = session._lending
    blocks = decision.free_pool_blocks_to_take
    for take in decision.takes:
        donor = session._tenants[take.donor]
        if take.kind == "idle_kv":
            lending.give_idle(donor, take.blocks, tenant, surplus_of(session, donor))
        else:
            lending.lend(
                donor,
                take.remapped,
                take.buffers,
                take.selection,
                predicted_stall_s=take.predicted_stall_s,
                reason=f"for {tenant.name}: {decision.reason}",
            )
            session._cursor = donor.number + 1
        blocks += take.blocks
    if blocks:
        session._changes.take_free_pages(tenant, free_pages_of(session._arena, tenant), blocks)


def _remap_more(session: Session, tenant: Tenant, decision: Decision, entry: dict[str, Any]) -> None:
    """The tenant's own layers."""
    stall, reason = decision.predicted_stall_s, decision.reason
    if tenant.slicing:
        entry["moved"] = _reslice(session, tenant, decision)
        return
    kind = tenant._hidden.kind(tenant.times(), decision.remapped, decision.buffers)
    if (
        kind != "nested"
        and not tenant.lent_pages
        and session._changes.can_restream(tenant, decision.remapped, decision.buffers, kind)
    ):
        # Evenly spread at every alpha, as in the paper: layers come home as others leave, and their blocks move.
        try:
            entry["moved"] = session._changes.restream(
                tenant, decision.remapped, decision.buffers, kind, predicted_stall_s=stall, reason=reason
            )
        except OutOfBlocks:  # no room to move what lies in layers that come home: grow beside them
            pass
        else:
            tenant._selection = kind
            return
    tenant._selection = "nested"
    session._changes.grow(tenant, decision.remapped, decision.buffers, predicted_stall_s=stall, reason=reason)


def _reslice(session: Session, tenant: Tenant, decision: Decision) -> dict[int, int]:
    """`decision.remapped` tail pages of every layer; as it is, if live blocks have nowhere to go, or too few layers are left
    once those are pinned that turned out to be written."""
    if not can_reslice(tenant, decision.remapped, decision.buffers):
        return {}
    tenant._selection = "slices"
    try:
        return reslice(
            session._changes,
            tenant,
            decision.remapped,
            decision.buffers,
            predicted_stall_s=decision.predicted_stall_s,
            reason=decision.reason,
        )
    except OutOfBlocks:
        return {}


def _homewards(session: Session, tenant: Tenant, remapped: int, buffers: int) -> str:
    """How a tenant's layers are chosen when some come home: as they were for leaving, if these can stream."""
    attachment, selection = tenant._attachment, session._configs[tenant.name].selection
    if attachment.pages.lent or attachment.reclaimed or selection == "auto":
        return "inward"
    kind = "uniform" if selection == "uniform" else "nested"
    return kind if attachment.possible(tenant.select(remapped, buffers, kind), buffers) else "inward"


def consider_return(session: Session, lender: Tenant, report: Entries) -> None:
    """One of the layers that others have comes home, if everybody who has its pages can spare them and it is paid for."""
    if lender._busy or lender.remapped == 0:
        return
    lending, controllers = session._lending, session._controllers
    view = session._view_of(lender, session._demands.get(lender.name))
    fewer = controllers[lender.name].fewer(view)
    lost = {session._tenants[name]: blocks for name, blocks in _claim(session, lender, fewer).items()}
    if any(holder._busy for holder in lost):
        return
    holds = all(blocks <= surplus_of(session, holder) for holder, blocks in lost.items())
    decision = controllers[lender.name].may_return(view, holds)
    if decision is None:
        return
    try:
        result = lending.restream(
            lender,
            decision.remapped,
            decision.buffers,
            "inward",
            predicted_stall_s=decision.predicted_stall_s,
            reason=decision.reason,
            drain=True,
        )
    except OutOfBlocks:  # an engine with its own allocator holds other blocks than one could know: nothing has changed
        return
    merge(report, lender, result.moved)
    report[lender.name].update(
        stall=decision.predicted_stall_s,
        reason=ended_early(decision.reason, result.problem),
    )
    for holder in lost:
        wanted = session._demands.get(holder.name)
        controllers[holder.name].has_lost(session._view_of(holder, wanted), wanted.blocks if wanted else 0)


def _claim(
    session: Session, lender: Tenant, fewer: int, buffers: int | None = None, kind: str = "inward"
) -> dict[str, int]:
    """Tenant -> blocks that it would lose if the lender kept `fewer` layers away. Asked in every step while anything is lent:
    looked up once per epoch, as long as no layer is pinned."""
    epoch, buffers = session._changes.epoch, buffers or max(1, lender.buffers)
    key = (epoch, lender._attachment.order, fewer, buffers, kind)
    known = session._claims.get(lender.number)
    if known is None or known[0] != key or epoch < 0:
        known = session._claims[lender.number] = (key, session._lending.losses(lender, fewer, buffers, kind))
    return known[1]


def moved_entry(moved: dict[int, int], cause: str) -> dict[str, Any]:
    """The entry of a tenant that nothing was decided for, but whose blocks moved."""
    return {
        "added": 0,
        "moved": moved,
        "unmet": 0,
        "stall": 0.0,
        "reason": f"{len(moved)} blocks moved: layers of {cause} came home",
    }


def ended_early(reason: str, problem: str) -> str:
    """The reason, and what has ended the change early, if anything has: what was done by then stays."""
    return f"{reason}; it ended early, and what was done before that stays: {problem}" if problem else reason


def merge(report: Entries, cause: Tenant, moved: dict[str, dict[int, int]]) -> None:
    report.setdefault(cause.name, moved_entry({}, cause.name))
    for name, moves in moved.items():
        entry = report.get(name)
        if entry is None:
            report[name] = moved_entry(moves, cause.name)
            continue
        entry["moved"] = then(entry["moved"], moves)
