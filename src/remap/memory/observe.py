# SPDX-License-Identifier: Apache-2.0
"""Look at a session from outside its changes: snapshots, reports, a check of all books. Changes nothing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from remap.memory.entries import Entry
from remap.memory.lend import Lending
from remap.memory.state import TenantState
from remap.memory.trace import Trace
from remap.report import DecisionRecord, PageTotals, Snapshot, StallShare, StepReport, TenantSnapshot

if TYPE_CHECKING:
    from remap import _core

__all__ = ["AGAIN_S", "Log", "check_books", "make_report", "take_snapshot"]


AGAIN_S = 10.0
_logger = logging.getLogger("remap.decisions")


class Log:
    """The last decisions, newest last, for a person who asks why, and how many found blocks lacking.

    The logger `remap.decisions` says each decision at level DEBUG; at INFO when layers leave or come home; at WARNING that a
    tenant's demand is not met, at most every `AGAIN_S` seconds of the session's clock a tenant. Each record of it has the
    `DecisionRecord` as its attribute `decision`.
    """

    def __init__(self, clock: Callable[[], float], trace: Trace) -> None:
        self._clock = clock
        self._trace = trace
        self._records: deque[DecisionRecord] = deque(maxlen=256)

    def add(self, epoch: int, tenants: Mapping[str, TenantState], entries: Mapping[str, Entry]) -> None:
        """Add one record per tenant of a report."""
        for name, entry in entries.items():
            record = DecisionRecord(epoch, name, entry.reason, entry.stall, entry.unmet)
            self._records.append(record)
            self._trace.moment(
                "decision", name, record.reason, epoch=epoch, unmet_blocks=entry.unmet, certified_ms=1e3 * entry.stall
            )
            tenant = tenants[name]
            if entry.short and not entry.wanted:  # what is wanted may be found yet
                tenant.shortages_met += not entry.unmet
                tenant.shortages_unmet += entry.unmet > 0
            if entry.unmet or _logger.isEnabledFor(logging.INFO):
                self._say(tenant, entry, record)

    def _say(self, tenant: TenantState, entry: Entry, record: DecisionRecord) -> None:
        said = {"decision": record}
        now, before, away = self._clock(), tenant.logged_alpha, tenant.alpha
        _logger.debug(
            "%s: epoch %d: %d blocks were lacking, %d more are usable, %d lack now, certified stall %.3g s a pass: %s",
            *(tenant.name, record.epoch, entry.short, entry.added, entry.unmet, entry.stall, entry.reason),
            extra=said,
        )
        if away != before:
            tenant.logged_alpha = away
            _logger.info(
                "%s: %g of %d layers are away, %g before; %d blocks usable, %d more: %s",
                *(tenant.name, away, tenant.layers, before, tenant.kv.usable_blocks, entry.added, entry.reason),
                extra=said,
            )
        if entry.unmet and not entry.wanted and now >= tenant.logged_short_s + AGAIN_S:
            tenant.logged_short_s = now
            _logger.warning("%s: %d blocks short: %s", tenant.name, entry.unmet, entry.reason, extra=said)

    def records(self) -> tuple[DecisionRecord, ...]:
        """The records, as a frozen copy."""
        return tuple(self._records)


def take_snapshot(
    capacity_bytes: int,
    arena: _core.Arena,
    lending: Lending,
    tenants: Mapping[str, TenantState],
    decisions: tuple[DecisionRecord, ...],
    stall: StallShare,
) -> Snapshot:
    """The whole session, as frozen values of this moment."""
    return Snapshot(
        epoch=arena.epoch,
        page_bytes=arena.page_bytes,
        capacity_bytes=capacity_bytes,
        pages=PageTotals(**arena.counts()),
        tenants={name: _tenant(arena, lending, tenants, tenant) for name, tenant in tenants.items()},
        decisions=decisions,
        stall=stall,
    )


def _tenant(
    arena: _core.Arena, lending: Lending, tenants: Mapping[str, TenantState], tenant: TenantState
) -> TenantSnapshot:
    pages = PageTotals(**arena.counts(tenant.number))
    stats = tenant.prefetcher.stats()
    pool = tenant.kv.pool
    live = pool.live_blocks if pool.in_use is None else min(pool.in_use, pool.live_blocks)
    lent_to = {name: len(held) for name, held in lending.holders(tenant).items()}
    borrowed = sum(
        len(lending.holders(other).get(tenant.name, ())) for other in tenants.values() if other is not tenant
    )
    since = tenant.since
    passes = stats.passes - tenant.timing.abandoned
    times, computed = tenant.timing.known, tenant.pages.computed
    return TenantSnapshot(
        name=tenant.name,
        active=tenant.active,
        priority=tenant.priority,
        last_use=tenant.last_use,
        layers=tenant.layers,
        remapped=tenant.reported,
        buffers=tenant.buffers,
        selection=tenant.selection if tenant.streamed else "",
        streamed=tenant.streamed,
        computed=(0, tenant.layers) if computed is None else (computed.start, computed.stop),
        elsewhere=tuple(sorted(tenant.pages.gone - tenant.pages.cold)),
        cold=tenant.cold_layers,
        pinned=tuple(sorted(tenant.pinned)),
        pages=pages,
        lent_pages=len(tenant.pages.lent),
        lent_to=lent_to,
        borrowed_pages=borrowed,
        resident_bytes=pages.params * arena.page_bytes,
        kv_bytes=pages.kv * arena.page_bytes,
        usable_blocks=pool.usable_blocks,
        free_blocks=pool.free_blocks + pool.live_blocks - live,
        live_blocks=live,
        withdrawn_blocks=pool.withdrawn_blocks,
        host_blocks=tenant.kv.host.total - tenant.kv.host.free_blocks,
        kv_out_bytes=tenant.kv.copied_out_bytes,
        kv_in_bytes=tenant.kv.copied_in_bytes,
        streamed_blocks=tenant.kv.streamed.used_blocks,
        kv_streamed_bytes=stats.block_bytes,
        reserve_blocks=tenant.controller.headroom,
        shortages_met=tenant.shortages_met,
        shortages_unmet=tenant.shortages_unmet,
        loading=tuple(layer for layer in range(tenant.layers) if not tenant.prefetcher.ready(layer)),
        passes=passes,
        copies=stats.copies,
        copied_bytes=stats.copied_bytes,
        copy_s=stats.copy_s,
        misses=stats.misses,
        stall_s=stats.stall_s,
        compute_s=tenant.timing.compute_s,
        predicted_stall_s=tenant.predicted_stall_s,
        seen_stall_s=(stats.stall_s - since[1]) / (passes - since[0]) if passes > since[0] else 0.0,
        compute_times_s=times.compute_s if times is not None else (),
        copy_times_s=times.transfer_s if times is not None else (),
    )


def make_report(
    epoch: int,
    tenants: Mapping[str, TenantState],
    entries: Mapping[str, Entry],
    moved: Mapping[str, Mapping[int, int]],
    resized: bool = False,
) -> StepReport:
    """The effects of a step on each tenant that it touched: added, unmet, stall, reason.

    moved: all moves that are in no report yet, also those of an earlier step that raised. resized: whether a tenant has
    more or fewer layers remapped than before.
    """
    return StepReport(
        changed=bool(moved) or resized or any(entry.added for entry in entries.values()),
        epoch=epoch,
        remapped={name: tenants[name].reported for name in entries},
        added_blocks={name: entry.added for name, entry in entries.items()},
        moved={name: moves for name, moves in moved.items() if moves},
        wanted={name: blocks for entry in entries.values() for name, blocks in entry.wanted.items()},
        unmet_blocks={name: entry.unmet for name, entry in entries.items() if entry.unmet},
        predicted_stall_s={name: entry.stall for name, entry in entries.items()},
        reason={name: entry.reason for name, entry in entries.items()},
    )


def check_books(arena: _core.Arena, tenants: Mapping[str, TenantState]) -> None:
    """Check the invariants of the arena and of each pool, and that both agree on each tenant's KV pages. Raises
    AssertionError."""
    arena.check()
    kv_pages = {page for page, owner in enumerate(arena.owners()) if owner.name == "kv"}
    owners, tenant_of = arena.owners(), arena.tenants()
    for tenant in tenants.values():
        for page in () if arena.broken else tenant.pages.lent:
            if owners[page].name not in ("free", "kv", "outside") or tenant_of[page] == tenant.number:
                raise AssertionError(f"{tenant.name!r}: page {page} is lent and belongs to {owners[page].name}")
        tenant.kv.pool.check()
        if arena.broken or tenant.leaving:
            continue  # quarantined pages are in no pool's books; nor is what was to come to a tenant that goes
        owned = tenant.kv.pool.owned_slots()
        pages = [tenant.donation_order[tenant.kv.geometry.donation_index(slot)] for slot in owned]
        kv = arena.counts(tenant.number)["kv"]
        late = 0 if tenant.rest is None else len(tenant.rest.late)
        if len(pages) + late != kv or not kv_pages.issuperset(pages):
            raise AssertionError(
                f"{tenant.name!r}: the pool owns {len(pages)} pages and is to get {late}, {kv} pages are "
                "its KV in the arena"
            )
