# SPDX-License-Identifier: Apache-2.0
"""The controller's verbs by hand: `advanced.remap`, `lend` and `give_back`, for tests, ablations, people and
`remap_serve.cluster`.

Called with the session's lock held, outside of passes.
"""

from __future__ import annotations

import math

from remap.errors import InvalidArgument
from remap.memory.apply import Changes
from remap.memory.entries import Entries, Entry, merge
from remap.memory.lend import Lending
from remap.memory.pages import MAX_BUFFERS, plan_free_pages
from remap.memory.restream import choose, continue_draining, refuse_in_use
from remap.memory.state import TenantState
from remap.memory.view import free_pages_of
from remap.policy.slices import tail_for
from remap.policy.views import Selection
from remap.sizes import shown

__all__ = ["check_by_hand", "give_back_by_hand", "lend_by_hand", "remap_by_hand"]


def check_by_hand(tenant: TenantState, layers: object, buffers: object, selection: object) -> None:
    """Raises InvalidArgument and InvalidState as `advanced.remap` says."""
    if selection not in ("uniform", "nested", "slices"):
        raise InvalidArgument(
            f"selection must be 'uniform', 'nested' or 'slices', got {shown(selection)}; nothing changed",
            selection=selection,
        )
    streamable = len(tenant.order)
    if selection == "slices" and isinstance(layers, float) and 0 <= layers < math.inf:
        layers = math.ceil(layers)  # a fraction of a layer is a matter of pages
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise _out_of_range(tenant, layers, buffers, 1)
    if not isinstance(buffers, int) or isinstance(buffers, bool):
        raise _out_of_range(tenant, layers, buffers, 1)
    if layers < 0 or not 1 <= buffers <= MAX_BUFFERS or (layers and layers + buffers > streamable):
        raise _out_of_range(tenant, layers, buffers, min(max(buffers, 1), MAX_BUFFERS))
    if layers > tenant.alpha:
        tenant.require_seen()


def _out_of_range(tenant: TenantState, layers: object, buffers: object, least: int) -> InvalidArgument:
    """least: ring buffers that streaming takes, at least."""
    streamable = len(tenant.order)
    return InvalidArgument(
        f"layers must lie in 0..{max(0, streamable - 1)}, buffers in 1..{MAX_BUFFERS}, and their sum must not "
        f"exceed the {streamable} streamable layers of {tenant.name!r}; got {shown(layers)} and {shown(buffers)}; nothing "
        "changed",
        layers=layers,
        buffers=buffers,
        streamable=streamable,
        maximum=max(0, streamable - least),
    )


def remap_by_hand(
    changes: Changes,
    lending: Lending,
    tenant: TenantState,
    layers: float,
    buffers: int,
    selection: Selection,
    drain: bool = False,
) -> Entries:
    """`advanced.remap`, checked already. Returns the entries of its report."""
    before = tenant.kv.usable_blocks
    amount = int(layers)
    if selection == "slices":
        amount = tail_for([tenant.pages.sizes[layer] for layer in tenant.order], layers, buffers)
    with changes.part():
        target = choose(tenant, amount, buffers, selection)
        # The same call again: the engine may have returned the withdrawn blocks by now.
        if drain and tenant.draining_target == target:
            moves = continue_draining(changes, tenant)
            moved = {tenant.name: moves} if moves else {}
        else:
            if not drain:
                refuse_in_use(changes, tenant, target)
            changes.cancel_draining(tenant)
            moved = lending.bring_home(tenant, target, drain=drain)
        # Slices of layers that stream whole, or the other way round, take the same pages.
        chosen = target.selection if tenant.pages.tails == target.tails else tenant.selection
        changes.note(tenant, tenant.books._replace(by_hand=bool(tenant.streamed), selection=chosen))
    added = max(0, tenant.kv.usable_blocks - before)
    report = {tenant.name: Entry(added, 0, tenant.predicted_stall_s, f"{layers} layers by hand")}
    merge(report, tenant.name, moved)
    return report


def give_back_by_hand(changes: Changes, lending: Lending, tenant: TenantState) -> Entries:
    """`advanced.give_back`, checked already. Returns the entries of its report."""
    moved = lending.give_back(tenant)
    reason = f"borrowed pages given back by hand; {len(moved)} blocks moved"
    return {tenant.name: Entry(stall=tenant.predicted_stall_s, reason=reason)}


def lend_by_hand(
    changes: Changes, lending: Lending, tenant: TenantState, layers: int, buffers: int, receiver: TenantState | None
) -> Entries:
    """`advanced.lend`, checked already. Returns the entries of its report."""
    report: Entries = {}
    buffers = tenant.buffers or buffers
    if layers < tenant.remapped:
        moved = lending.bring_home(tenant, choose(tenant, layers, buffers, "inward"))
        merge(report, tenant.name, moved).reason = f"{layers} layers stay lent, by hand"
        return report
    before = 0 if receiver is None else receiver.kv.usable_blocks
    taken: list[int] = []
    with changes.part():
        pages = lending.lend(tenant, layers, buffers, tenant.growing_by)
        changes.note(tenant, tenant.books._replace(by_hand=bool(tenant.streamed)))
        lent = tenant.pages.lent
        if receiver is not None and lent:
            taken = [page for page in free_pages_of(changes, receiver) if page in lent]
            if taken:
                changes.apply(receiver, plan_free_pages(receiver.pages, taken, give=True))
    merge(report, tenant.name, {}).reason = f"{pages} pages of {layers} layers lent by hand"
    if receiver is not None and lent:
        reason = f"{len(taken)} pages of {tenant.name} by hand"
        report[receiver.name] = Entry(added=receiver.kv.usable_blocks - before, reason=reason)
    return report
