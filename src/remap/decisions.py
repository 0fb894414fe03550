"""From a decision, the controller's or somebody's by hand, to changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .attach import MAX_BUFFERS
from .controller import Decision, Demand
from .errors import InvalidArgument
from .policy import free_pages_of
from .tenant import Tenant

if TYPE_CHECKING:
    from .session import Session

__all__ = ["carry_out", "check_by_hand"]


def carry_out(session: Session, tenant: Tenant, wanted: Demand, decision: Decision) -> dict[str, Any]:
    """What the controller decided, now. Returns the tenant's entry of the step's report (`observe.make_report`)."""
    changes, pool = session._changes, tenant.kv.pool
    moved: dict[int, int] = {}
    before = tenant.kv.usable_blocks
    if decision.action == "grow":
        changes.cancel_draining(tenant)
        if decision.free_pool_blocks_to_take:
            changes.take_free_pages(tenant, free_pages_of(session, tenant), decision.free_pool_blocks_to_take)
        if decision.remapped > tenant.remapped:
            changes.grow(
                tenant,
                decision.remapped,
                decision.buffers,
                predicted_stall_s=decision.predicted_stall_s,
                reason=decision.reason,
            )
    elif decision.action == "shrink":
        moved = changes.restream(
            tenant,
            decision.remapped,
            decision.buffers,
            "nested",
            predicted_stall_s=decision.predicted_stall_s,
            reason=decision.reason,
            drain=True,
        )
    elif tenant._attachment.draining:
        moved = changes.continue_draining(tenant)
    added = max(0, tenant.kv.usable_blocks - before)
    # What there is, not what was planned: written layers may have made it less.
    free = (wanted.free or 0) + added if pool.external else pool.free_blocks
    return {
        "added": added,
        "moved": moved,
        "unmet": max(0, wanted.blocks - free) if decision.action != "shrink" else 0,
        "stall": decision.predicted_stall_s,
        "reason": decision.reason,
    }


def check_by_hand(tenant: Tenant, layers: Any, buffers: Any, selection: Any) -> None:
    """Raises InvalidArgument as `Session.remap` says."""
    if selection not in ("uniform", "nested"):
        raise InvalidArgument(
            f"selection must be 'uniform' or 'nested', got {selection!r}; nothing changed", selection=selection
        )
    streamable = len(tenant._attachment.order)
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (layers, buffers))
    if not whole or layers < 0 or not 1 <= buffers <= MAX_BUFFERS or (layers and layers + buffers > streamable):
        raise InvalidArgument(
            f"layers must lie in 0..{max(0, streamable - 1)}, buffers in 1..{MAX_BUFFERS}, and their sum must not "
            f"exceed the {streamable} streamable layers of {tenant.name!r}; got {layers!r} and {buffers!r}; nothing changed",
            layers=layers,
            buffers=buffers,
            streamable=streamable,
            maximum=max(0, streamable - (min(max(buffers, 1), MAX_BUFFERS) if whole else 1)),
        )
