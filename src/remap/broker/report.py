# SPDX-License-Identifier: Apache-2.0
"""A session's snapshot as a message: the numbers that a person looks at, within the limits of a message."""

from __future__ import annotations

import math
from collections.abc import Sequence

from remap.broker.messages import (
    MOST_DECISIONS,
    MOST_EVENTS,
    MOST_NAME,
    MOST_PARTS,
    MOST_REASON,
    MOST_TENANTS,
    MOST_TEXT,
    DecisionReport,
    Events,
    OwnedPages,
    Report,
    ShownEvent,
    TenantReport,
)
from remap.memory import trace
from remap.report import DecisionRecord, Snapshot, TenantSnapshot

__all__ = ["events_in", "report_of"]


def report_of(snapshot: Snapshot) -> Report:
    """Of the tenants the first `MOST_TENANTS`, of the decisions the last `MOST_DECISIONS`; longer texts are cut."""
    pages = snapshot.pages
    return Report(
        epoch=snapshot.epoch,
        free=pages.free,
        params=pages.params,
        kv=pages.kv,
        ring=pages.ring,
        quarantine=pages.quarantine,
        waited=_amount(snapshot.stall.seen),
        predicted=_amount(snapshot.stall.predicted),
        allowed=_amount(snapshot.stall.allowed),
        attached=len(snapshot.tenants),
        tenants=tuple(map(_tenant, list(snapshot.tenants.values())[:MOST_TENANTS])),
        decisions=tuple(map(_decision, snapshot.decisions[-MOST_DECISIONS:])),
    )


def events_in(found: Sequence[trace.Event]) -> list[Events]:
    """The last ones, in as many messages as they take, `MOST_PARTS` at most."""
    made = [
        ShownEvent(
            each.number,
            _cut(each.kind, MOST_NAME),
            _cut(each.tenant, MOST_NAME),
            _amount(each.begin_s),
            _amount(each.seconds),
            _cut(each.text, MOST_TEXT),
            {name: float(value) for name, value in each.values.items() if math.isfinite(value)},
        )
        for each in found[-MOST_EVENTS * MOST_PARTS :]
    ]
    return [Events(tuple(made[at : at + MOST_EVENTS])) for at in range(0, len(made), MOST_EVENTS)]


def _tenant(tenant: TenantSnapshot) -> TenantReport:
    return TenantReport(
        name=_cut(tenant.name, MOST_NAME),
        active=tenant.active,
        layers=tenant.layers,
        remapped=_amount(tenant.remapped),
        streamed=len(tenant.streamed),
        cold=len(tenant.cold),
        pages=OwnedPages(tenant.pages.params, tenant.pages.kv, tenant.pages.ring),
        lent_pages=tenant.lent_pages,
        borrowed_pages=tenant.borrowed_pages,
        usable_blocks=tenant.usable_blocks,
        free_blocks=tenant.free_blocks,
        live_blocks=tenant.live_blocks,
        withdrawn_blocks=tenant.withdrawn_blocks,
        reserve_blocks=tenant.reserve_blocks,
        host_blocks=tenant.host_blocks,
        streamed_blocks=tenant.streamed_blocks,
        shortages_met=tenant.shortages_met,
        shortages_unmet=tenant.shortages_unmet,
        passes=tenant.passes,
        copies=tenant.copies,
        copied_bytes=tenant.copied_bytes,
        copy_s=_amount(tenant.copy_s),
        kv_out_bytes=tenant.kv_out_bytes,
        kv_in_bytes=tenant.kv_in_bytes,
        kv_streamed_bytes=tenant.kv_streamed_bytes,
        misses=tenant.misses,
        stall_s=_amount(tenant.stall_s),
        predicted_stall_s=_amount(tenant.predicted_stall_s),
        seen_stall_s=_amount(tenant.seen_stall_s),
    )


def _decision(record: DecisionRecord) -> DecisionReport:
    reason = _cut(record.reason, MOST_REASON)
    return DecisionReport(record.epoch, _cut(record.tenant, MOST_NAME), reason, record.unmet_blocks)


def _cut(text: str, most: int) -> str:
    text = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is no message
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _amount(number: float) -> float:
    """A clock that went back, or a certificate without an end, is no number of a message."""
    return 0.0 if math.isnan(number) else min(max(float(number), 0.0), 1e18)
