"""Active and inactive tenants: whose turn it is, and what has to come home before it.

An inactive tenant serves no pass, so its layers may be lent far beyond what streaming could hide. It keeps the ring's pages.
Activating brings back what it has lent: live blocks of other tenants move out of those pages (or the caller is told which ones
to preempt), the layers come home and load in layer order, while the first layers may compute already: `Prefetcher.wait` is
all that the pass waits for. So the first pass ends later by

    max over missing layers j of (j T_T - computation before layer j), at least 0            (schedule.one_shot_delay)

and by what moving and zeroing take before that. With `partial`, what cannot come home stays lent and is streamed through the
ring: activation then depends on nobody else and always succeeds at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remap.errors import OutOfBlocks
from remap.memory.apply import Changes
from remap.memory.lend import Lending
from remap.memory.offers import Offers
from remap.memory.state import TenantState
from remap.policy import schedule

__all__ = ["ActivationReport", "activate", "deactivate"]


@dataclass(frozen=True)
class ActivationReport:
    """What `Session.activate` did. Nothing but the set of inactive tenants has changed if `activated` is False.

    moved: tenant -> {old block id: new block id}, to be patched before the tenant's next pass. preempt: tenant -> live blocks
    that have to be freed (or as many others of that tenant) before a second call can succeed. restored: the layers that came
    home and are loading. streamed: the layers that still are not home. predicted_stall_s: how much later the first pass is to
    end, of a short prompt, because of loading.
    """

    activated: bool
    epoch: int
    moved: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    preempt: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    restored: tuple[int, ...] = ()
    streamed: tuple[int, ...] = ()
    predicted_stall_s: float = 0.0
    reason: str = ""


def deactivate(changes: Changes, tenant: TenantState) -> None:
    """The tenant serves no pass until it is activated. Its live blocks stay; its unused KV and its layers may be lent."""
    changes.cancel_draining(tenant, deactivate=True)  # no step of its own would finish it


def activate(
    changes: Changes, lending: Lending, offers: Offers, tenant: TenantState, partial: bool | float, now: float
) -> ActivationReport:
    """The lent layers come home. Called with the session's lock held; refusals have been made.

    partial: whether what cannot come home is streamed meanwhile; a number: as far as a pass waits for no more than this share of
    its computation.
    """
    report = _activate(changes.arena, lending, tenant, partial)
    # Asked for, whether it has succeeded or not; a call that has raised has changed nothing.
    offers.activated(tenant, now)
    return report


def _activate(arena: Any, lending: Lending, tenant: TenantState, partial: bool | float) -> ActivationReport:
    away = tenant.streamed
    if not any(map(tenant.lends, away)):
        tenant.active = True
        return ActivationReport(True, arena.epoch, streamed=away, reason=f"{tenant.name} has lent nothing")
    lent = sum(map(tenant.lends, away))
    keep = _own(tenant)
    preempt: Mapping[str, tuple[int, ...]] = {}
    most = _most_streamed(tenant, keep, partial)
    # As many layers as there is room for, the first ones first. What is away now need not be tried.
    for remapped in _candidates(tenant, keep, min(most, tenant.remapped - 1)):
        try:
            result = lending.bring_home(
                tenant, remapped, tenant.buffers, "inward", reason=f"{tenant.name} was activated"
            )
        except OutOfBlocks as error:
            preempt = error.fields["preempt"]  # type: ignore[assignment]
            continue
        restored = tuple(layer for layer in away if layer not in tenant.streamed)
        times = tenant.timing.prefill()
        stall = schedule.one_shot_delay(times.compute_s, times.transfer_s, restored) if times and restored else 0.0
        if result.problem and partial is not True and tenant.remapped > most:
            reason = f"bringing layers home ended early: {result.problem}"
            return ActivationReport(False, arena.epoch, result.moved, reason=reason, streamed=tenant.streamed)
        tenant.active = True
        _certify(tenant)
        reason = (
            f"{len(restored)} of {lent} lent layers come home and load in layer order, which delays the first prefill by "
            f"{stall * 1e3:.3g} ms; {len(tenant.streamed)} stay streamed"
        )
        return ActivationReport(True, arena.epoch, result.moved, {}, restored, tenant.streamed, stall, reason)
    blocks = sum(map(len, preempt.values()))
    reason = f"{blocks} live blocks of {', '.join(sorted(preempt))} lie in the pages of {tenant.name}'s layers"
    if most >= tenant.remapped:
        tenant.active = True
        _certify(tenant)
        reason += f": {len(away)} layers are streamed through {tenant.buffers} buffers meanwhile"
        return ActivationReport(True, arena.epoch, {}, preempt, (), away, 0.0, reason)
    return ActivationReport(False, arena.epoch, {}, preempt, (), away, 0.0, f"{reason}; free them and activate again")


def _own(tenant: TenantState) -> int:
    """alpha that the tenant gave its own KV: the most layers that can stay away without a lent page among theirs. Of unequal
    layers the ring may be made of several, and not need all of their pages: those are lent as well."""
    for remapped in range(tenant.remapped, 0, -1):
        if not any(map(tenant.lends, tenant.select(remapped, tenant.buffers, "inward"))):
            return remapped
    return 0


def _most_streamed(tenant: TenantState, keep: int, partial: bool | float) -> int:
    """alpha that may stay: `keep` (what the tenant gave its own KV), or more with `partial`."""
    if isinstance(partial, bool):
        return tenant.remapped if partial else keep
    times, buffers = tenant.timing.decode(), tenant.buffers
    if times is None:  # nothing was measured: a pass may cost anything
        return keep
    allowed = partial * math.fsum(times.compute_s) * (1.0 + schedule.RELATIVE_EPSILON)
    for remapped in range(tenant.remapped, keep, -1):
        stays = tenant.pages.streaming
        if remapped < tenant.remapped:
            stays = tenant.streaming_at(remapped, buffers, "inward")
        if tenant.stall(times, stays) <= allowed:
            return remapped
    return keep


def _candidates(tenant: TenantState, keep: int, most: int) -> list[int]:
    """alpha from `keep` to `most`, where what stays away can hold the ring; where `keep` layers cannot, all of them come home."""
    buffers = tenant.buffers
    fit = [n for n in range(keep, most + 1) if tenant.possible(tenant.streaming_at(n, buffers, "inward"))]
    return fit if keep in fit else [0, *fit]


def _certify(tenant: TenantState) -> None:
    """What streaming the layers that are not home will cost each pass: chosen for a reload, they may stall more than allowed."""
    times = tenant.timing.decode()
    if tenant.streamed and times is not None:
        tenant.predicted_stall_s = tenant.stall(times, tenant.pages.streaming)
