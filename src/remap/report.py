# SPDX-License-Identifier: Apache-2.0
"""Reports and snapshots: frozen values, safe to keep, compare and log. The only feedback to the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from remap.notebook import grid
from remap.sizes import show_size

__all__ = ["DecisionRecord", "PageTotals", "Snapshot", "StallShare", "StepReport", "TenantSnapshot"]


@dataclass(frozen=True)
class PageTotals:
    """Pages by owner. free + params + kv + ring + outside + quarantine = total, always. outside: other processes have them."""

    free: int
    params: int
    kv: int
    ring: int
    outside: int
    quarantine: int
    total: int


@dataclass(frozen=True)
class TenantSnapshot:
    """One attached model.

    remapped (the papers' alpha) is an int, or a fraction if slices stream. streamed holds remapped + buffers layers,
    all sliced ones, or none. resident_bytes: of the parameters on the device now. kv_bytes: of the pages that are KV
    now. free_blocks, live_blocks: of an engine with its own allocator as it said last (`Demand.free`). Stall and copy figures
    count from attach on.
    """

    name: str
    active: bool
    priority: int
    last_use: int  # the number of its last activation among the session's; 0: none
    layers: int
    remapped: float
    buffers: int
    selection: str  # how the streamed layers were chosen last; "" while none stream
    streamed: tuple[int, ...]
    computed: tuple[int, int]  # passes compute the layers from the first to before the second (`advanced.place`)
    elsewhere: tuple[int, ...]  # layers that other instances compute: their pages are KV here
    cold: tuple[int, ...]  # layers without pages: activation brings them
    pinned: tuple[int, ...]  # layers that may not stream (`Inside.pinned`)
    pages: PageTotals
    lent_pages: int  # pages of its layers that are free for other tenants, or are theirs
    lent_to: Mapping[str, int]  # tenant -> how many of these are its KV
    borrowed_pages: int  # pages of other tenants' layers that are its KV
    resident_bytes: int
    kv_bytes: int
    usable_blocks: int
    free_blocks: int
    live_blocks: int
    withdrawn_blocks: int
    host_blocks: int  # KVSpec.host_blocks that hold KV now
    kv_out_bytes: int  # KV copied to host memory
    kv_in_bytes: int  # and back
    streamed_blocks: int  # KVSpec.streamed_blocks that show host blocks now
    kv_streamed_bytes: int  # KV copied in for passes that read such blocks
    reserve_blocks: int  # the low watermark L, as of the last step
    shortages_met: int  # steps that met a demand beyond the free blocks: each spared the engine a preemption, or a wait
    shortages_unmet: int  # and those that did not meet it whole
    loading: tuple[int, ...]  # layers that a pass would have to look for: streamed, loading, or being re-pointed
    passes: int
    copies: int
    copied_bytes: int
    copy_s: float
    misses: int
    stall_s: float
    compute_s: float
    predicted_stall_s: float  # per pass, by the schedule's certificate at the last change; 0 by hand
    seen_stall_s: float  # per pass since then, measured; compare it with the certificate
    compute_times_s: tuple[float, ...]  # per layer, for the last shape of batch that was asked for; empty before that
    copy_times_s: tuple[float, ...]  # per layer


@dataclass(frozen=True)
class StallShare:
    """Waiting for layers as a share of computing (0.02: two hundredths), of all active tenants together.

    Each share is a sum of seconds over the seconds of computation of the same passes: the last 256 timed passes,
    without those of tenants that are inactive now or were remapped by hand (no certificate bounds those). All are 0 before
    the first pass.

    predicted: the wait that each pass's certificate, of its tenant's last change, foresaw. A certificate counts the
    copies that the other active tenants made on the same link at that time (remap.policy.link).
    seen: the measured wait.
    allowed: Config.slowdown times the pass's computation, or its certificate if that is more (an activation that was to
    serve at once). If seen exceeds allowed by more than 0.05 over at least 64 passes, the logger "remap.stall" warns
    once per session (the record's attribute `stall` is this object).
    """

    predicted: float = 0.0
    seen: float = 0.0
    allowed: float = 0.0
    passes: int = 0  # number of passes in the shares
    tenants: int = 0  # number of tenants that ran them


@dataclass(frozen=True)
class DecisionRecord:
    """One decision: the epoch after it, its tenant, its reason in one sentence, the stall per pass that it certifies,
    and the blocks of demand that it left unmet."""

    epoch: int
    tenant: str
    reason: str
    predicted_stall_s: float
    unmet_blocks: int


@dataclass(frozen=True)
class Snapshot:
    """The whole arena at one epoch. decisions: the last 256, oldest first. stall: of all active tenants together."""

    epoch: int
    page_bytes: int
    capacity_bytes: int
    pages: PageTotals
    tenants: Mapping[str, TenantSnapshot]
    decisions: tuple[DecisionRecord, ...] = ()
    stall: StallShare = StallShare()

    def _repr_html_(self) -> str:
        """The HTML for a notebook: the pages' owners, and a row a tenant."""
        owners = ("free", "params", "kv", "ring", "outside", "quarantine")
        pages = ", ".join(f"{count} {owner}" for owner in owners if (count := getattr(self.pages, owner)))
        title = f"{show_size(self.capacity_bytes)} at epoch {self.epoch}: {pages} of {self.pages.total} pages"
        columns = ("tenant", "active", "layers", "remapped", "lent pages", "usable blocks", "free blocks", "passes")
        numbers = ("layers", "remapped", "lent_pages", "usable_blocks", "free_blocks", "passes")
        rows = (
            (each.name, "yes" if each.active else "no", *(f"{getattr(each, name):,.10g}" for name in numbers))
            for each in self.tenants.values()
        )
        return grid(f"{title} of {show_size(self.page_bytes)}", columns, rows)


@dataclass(frozen=True)
class StepReport:
    """The result of one `session.step`. In the usual case `changed` is False and all else is empty. It is False as well
    if the step decided something that has to wait, for example for blocks that must leave first; the reason says so.

    moved: tenant -> {old block id: new block id}. The engine patches its block tables before it uses any of them.
    wanted: paused tenant -> how many of its live blocks its engine is to copy to host memory and free, or fewer; it has offered
    them (`kv.host.offer`). If it frees some, the same step once more finds their pages, for the tenants whose reasons say so, or
    for other processes (device "unix:PATH").
    remapped: tenant -> layers' worth after the step. unmet_blocks: demand that no donor could meet. reason: one
    sentence each.
    """

    changed: bool = False
    epoch: int = 0
    remapped: Mapping[str, float] = field(default_factory=dict)
    added_blocks: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    unmet_blocks: Mapping[str, int] = field(default_factory=dict)
    predicted_stall_s: Mapping[str, float] = field(default_factory=dict)
    reason: Mapping[str, str] = field(default_factory=dict)
    wanted: Mapping[str, int] = field(default_factory=dict)
