"""Looking at a session from outside its changes: snapshots, step reports, and whether all books agree. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .snapshot import PageTotals, Snapshot, StepReport, TenantSnapshot
from .tenant import Tenant

__all__ = ["check_books", "make_report", "take_snapshot"]


def take_snapshot(arena: Any, capacity_bytes: int, tenants: Mapping[str, Tenant]) -> Snapshot:
    """All of it, as frozen values of this moment."""
    return Snapshot(
        epoch=arena.epoch,
        page_bytes=arena.page_bytes,
        capacity_bytes=capacity_bytes,
        pages=PageTotals(**arena.counts()),
        tenants={name: _tenant(arena, tenant) for name, tenant in tenants.items()},
    )


def _tenant(arena: Any, tenant: Tenant) -> TenantSnapshot:
    pages = PageTotals(**arena.counts(tenant.number))
    stats = tenant._prefetcher.stats()
    pool = tenant.kv.pool
    return TenantSnapshot(
        name=tenant.name,
        priority=tenant.priority,
        layers=tenant.layers,
        remapped=tenant.remapped,
        buffers=tenant.buffers,
        streamed=tenant.streamed,
        pinned=tenant.pinned,
        pages=pages,
        resident_bytes=pages.params * arena.page_bytes,
        kv_bytes=pages.kv * arena.page_bytes,
        usable_blocks=pool.usable_blocks,
        free_blocks=pool.free_blocks,
        live_blocks=pool.live_blocks,
        withdrawn_blocks=pool.withdrawn_blocks,
        passes=stats.passes - tenant._abandoned,
        copies=stats.copies,
        copied_bytes=stats.copied_bytes,
        copy_s=stats.copy_s,
        misses=stats.misses,
        stall_s=stats.stall_s,
        compute_s=tenant._compute_s,
        predicted_stall_s=tenant._predicted_stall_s,
    )


def make_report(epoch: int, tenants: Mapping[str, Tenant], entries: Mapping[str, Mapping[str, Any]]) -> StepReport:
    """What a step did to each tenant that it touched: added, moved, unmet, stall, reason."""
    return StepReport(
        changed=any(entry["added"] or entry["moved"] for entry in entries.values()),
        epoch=epoch,
        remapped={name: tenants[name].remapped for name in entries},
        added_blocks={name: entry["added"] for name, entry in entries.items()},
        moved={name: entry["moved"] for name, entry in entries.items() if entry["moved"]},
        unmet_blocks={name: entry["unmet"] for name, entry in entries.items() if entry["unmet"]},
        predicted_stall_s={name: entry["stall"] for name, entry in entries.items()},
        reason={name: entry["reason"] for name, entry in entries.items()},
    )


def check_books(arena: Any, tenants: Mapping[str, Tenant]) -> None:
    """The arena's invariants, each pool's, and that both agree on which pages are a tenant's KV. Raises AssertionError."""
    arena.check()
    kv_pages = {page for page, owner in enumerate(arena.owners()) if owner.name == "kv"}
    for tenant in tenants.values():
        tenant.kv.pool.check()
        if arena.broken:
            continue  # quarantined pages are in no pool's books
        owned = tenant.kv.pool.owned_slots()
        pages = [tenant._attachment.giving[tenant.kv.geometry.giving_index(slot)] for slot in owned]
        kv = arena.counts(tenant.number)["kv"]
        if len(pages) != kv or not kv_pages.issuperset(pages):
            raise AssertionError(
                f"{tenant.name!r}: the pool owns {len(pages)} pages, {kv} pages are its KV in the arena"
            )
