# SPDX-License-Identifier: Apache-2.0
"""Active and inactive tenants: activating one brings its lent layers home first.

An inactive tenant serves no pass, so it may lend far more layers than streaming could hide. It keeps the ring's pages.
Activating it brings the lent layers back: live blocks of other tenants move out of their pages (or the report tells the
caller which ones to preempt), then the layers come home and load in layer order. The first layers may compute
meanwhile, since the pass waits only in `Prefetcher.wait`. So the first pass ends later by

    max over missing layers j of (j T_T - computation before layer j), at least 0            (schedule.one_shot_delay)

and by the time for moving and zeroing before that. With `partial`, layers that cannot come home stay lent and stream
through the ring: activation then depends on no other tenant and always succeeds at once.

Layers that the tenant had given up, or never had pages for, come home first, to whatever pages can be had (cold.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from remap.errors import Error, OutOfBlocks
from remap.memory.apply import Changes
from remap.memory.cold import Cold
from remap.memory.lend import Lending
from remap.memory.offers import Offers
from remap.memory.pages import streaming_now
from remap.memory.restream import choose
from remap.memory.state import TenantState
from remap.policy import schedule

__all__ = ["ActivationReport", "activate", "certify", "deactivate"]


WELL_ABOVE = 0.25
"""By which share of its computation a pass may wait beside switches, above what it waits without them, before layers that their
tenant gave its own KV come home with its turn. Well above any slowdown: layers do not go to and fro as times vary."""


@dataclass(frozen=True)
class ActivationReport:
    """The result of `Session.activate`. If `activated` is False, only the set of inactive tenants has changed.

    moved: tenant -> {old block id: new block id}; patch them before the tenant's next pass.
    preempt: tenant -> live blocks to free (or as many others of that tenant) before a second call can succeed.
    restored: the layers that came home and are loading. streamed: the layers that still are not home.
    predicted_stall_s: by how much loading will delay the end of the first pass, for a short prompt.
    wanted: as in `StepReport`, for a tenant without pages. Nothing was tried: a second call counts as the same activation.
    """

    activated: bool
    epoch: int
    moved: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    preempt: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    restored: tuple[int, ...] = ()
    streamed: tuple[int, ...] = ()
    predicted_stall_s: float = 0.0
    reason: str = ""
    wanted: Mapping[str, int] = field(default_factory=dict)


def deactivate(changes: Changes, tenant: TenantState) -> None:
    """Let the tenant serve no pass until it is activated. Its live blocks stay; unused KV and layers may be lent."""
    changes.cancel_draining(tenant, deactivate=True)  # no step of its own would finish it
    tenant.expected = False


def activate(
    changes: Changes,
    lending: Lending,
    offers: Offers,
    cold: Cold,
    tenant: TenantState,
    partial: bool | float,
    now: float,
    others: Sequence[TenantState] = (),
) -> ActivationReport:
    """Bring the lent layers home, and those without pages. Called with the session's lock held, after all checks.

    partial: whether layers that cannot come home stream meanwhile; a number: only if a pass then waits for at most this
    share of its computation. others: they become inactive.
    """
    came: tuple[int, ...] = ()
    tenant.expected = False
    if tenant.pages.cold:
        broker = cold.ask_others(tenant)
        try:
            with changes.part():
                _take_turns(changes, others)  # now, so that they can give pages
                wanted = cold.want(tenant)
                coming = None if wanted else cold.bring(tenant, broker)
        except OutOfBlocks as error:
            preempt: Mapping[str, tuple[int, ...]] = error.fields["preempt"]  # type: ignore[assignment]
            _take_turns(changes, others)
            offers.activated(tenant, now)
            return ActivationReport(
                False, changes.arena.epoch, preempt=preempt, streamed=tenant.streamed, reason=str(error)
            )
        if coming is None:
            reason = f"engines are to free live blocks first, {wanted}, for layers of {tenant.name}"
            return ActivationReport(False, changes.arena.epoch, streamed=tenant.streamed, reason=reason, wanted=wanted)
        came, problem = cold.bring_rest(tenant, coming)
        if problem:
            return _ended_early(changes, offers, tenant, came, now, problem)
    try:
        with changes.part():
            report = _activate(changes, lending, tenant, partial)
            _take_turns(changes, others)
    except Error as error:
        if not came:
            raise
        return _ended_early(changes, offers, tenant, came, now, str(error))
    if report.activated:
        with suppress(Error):  # its next pass tries again
            changes.wake(tenant)
    if came:
        report = _with_cold(tenant, report, came)
    # An activation without success counts as a use as well; a call that raises changes nothing.
    offers.activated(tenant, now, {*came, *report.restored})
    return report


def _take_turns(changes: Changes, others: Sequence[TenantState]) -> None:
    with changes.part():
        for other in others:
            deactivate(changes, other)


def _ended_early(
    changes: Changes, offers: Offers, tenant: TenantState, came: tuple[int, ...], now: float, problem: str
) -> ActivationReport:
    """Some of its layers have come, and the tenant is inactive."""
    offers.activated(tenant, now, came)
    reason = f"bringing layers home ended early: {problem}"
    restored = _layers(tenant, came)
    return ActivationReport(False, changes.arena.epoch, restored=restored, streamed=tenant.streamed, reason=reason)


def _layers(tenant: TenantState, parts: Iterable[int]) -> tuple[int, ...]:
    """The layers among these parts, ascending."""
    return tuple(sorted(part for part in parts if part < tenant.layers))


def _activate(changes: Changes, lending: Lending, tenant: TenantState, partial: bool | float) -> ActivationReport:
    arena, away = changes.arena, tenant.streamed
    own = _own(tenant)
    keep = _certified(tenant, own)
    lent = sum(map(tenant.lends, away))
    if not lent and keep == own:
        _awake(changes, tenant)
        return ActivationReport(True, arena.epoch, streamed=away, reason=f"{tenant.name} has lent nothing")
    preempt: Mapping[str, tuple[int, ...]] = {}
    most = max(_most_streamed(tenant, own, partial), _stuck(tenant, own))
    # Bring home as many layers as there is room for, the first ones first. The present number of layers need not be
    # tried.
    for remapped in _candidates(tenant, keep, min(most, _alpha(tenant) - 1)):
        try:
            moved = lending.bring_home(tenant, choose(tenant, remapped, tenant.buffers, "inward"))
        except OutOfBlocks as error:
            preempt = error.fields["preempt"]  # type: ignore[assignment]
            continue
        restored = tuple(layer for layer in away if layer not in tenant.streamed)
        times = tenant.timing.prefill()
        stall = tenant.late_s(times, restored) if times and restored else 0.0
        _awake(changes, tenant)
        certify(tenant)
        reason = (
            f"{len(restored)} layers, of {lent} lent ones, come home and load in layer order, which delays the first "
            f"prefill by {stall * 1e3:.3g} ms; {len(tenant.streamed)} stay streamed"
        )
        return ActivationReport(True, arena.epoch, moved, {}, restored, tenant.streamed, stall, reason)
    blocks = sum(map(len, preempt.values()))
    reason = f"{blocks} live blocks of {', '.join(sorted(preempt))} lie in the pages of {tenant.name}'s layers"
    if not preempt:
        reason = f"other processes have {len(tenant.gone)} pages of {tenant.name}'s layers"
    if most >= _alpha(tenant):
        _awake(changes, tenant)
        certify(tenant)
        reason += f": {len(away)} layers are streamed through {tenant.buffers} buffers meanwhile"
        return ActivationReport(True, arena.epoch, {}, preempt, (), away, 0.0, reason)
    return ActivationReport(False, arena.epoch, {}, preempt, (), away, 0.0, f"{reason}; free them and activate again")


def _awake(changes: Changes, tenant: TenantState) -> None:
    changes.note(tenant, tenant.books._replace(active=True))


def _with_cold(tenant: TenantState, report: ActivationReport, came: tuple[int, ...]) -> ActivationReport:
    """The report, with layers that have got pages."""
    parts = {*came, *report.restored}
    restored = _layers(tenant, parts)
    times = tenant.timing.prefill()
    if times is None:  # it may compute in no time
        stall = tenant.timing.seconds_per_byte() * sum(tenant.layer_bytes[part] for part in parts)
    else:
        stall = tenant.late_s(times, parts)
    reason = (
        f"{len(_layers(tenant, came))} layers have got pages and load in layer order: {stall * 1e3:.3g} ms until a first prefill "
        f"has all of {len(restored)} that load; {report.reason}"
    )
    return replace(report, restored=restored, predicted_stall_s=stall, reason=reason)


def _alpha(tenant: TenantState) -> int:
    """alpha now. Slices of all layers together may be less than one layer: they are more than none."""
    return tenant.remapped or int(bool(tenant.streamed))


def _own(tenant: TenantState) -> int:
    """alpha that the tenant gave its own KV: the most layers that can stay away without a lent page among theirs. If
    layers are unequal, the ring may be made of several and not need all of their pages: those are lent as well."""
    if tenant.slicing:
        return 0 if any(map(tenant.lends, tenant.streamed)) else _alpha(tenant)
    for remapped in range(_alpha(tenant), 0, -1):
        if not any(map(tenant.lends, tenant.select(remapped, tenant.buffers, "inward"))):
            return remapped
    return 0


def _stuck(tenant: TenantState, own: int) -> int:
    """alpha while what other processes have is away, as well as what it gave its own KV: no tenant here can free blocks of
    theirs, so these layers stream until they come, whatever `partial` is."""
    gone, pages = tenant.gone, tenant.pages
    if not gone:
        return 0
    if tenant.slicing:
        return _alpha(tenant)
    return min(_alpha(tenant), own + sum(not gone.isdisjoint(pages.away(layer)) for layer in pages.streamed))


def _certified(tenant: TenantState, own: int) -> int:
    """alpha of its own that it keeps, of `own`: fewer if switches now take so much of the link that its passes would wait
    for more than `WELL_ABOVE` beside them. The others come home now, while its blocks are few."""
    times = tenant.timing.decode()
    if not own or times is None or tenant.by_hand or tenant.slicing:
        return own
    slower = tenant.link.beside_switches(tenant, times)
    if slower is times:
        return own
    streaming = tenant.streaming_at(own, tenant.buffers, "inward")
    if tenant.stall(slower, streaming) - tenant.stall(times, streaming) <= WELL_ABOVE * math.fsum(times.compute_s):
        return own
    most = tenant.bounds.bound(slower)[0]
    return min(own, most)


def _most_streamed(tenant: TenantState, keep: int, partial: bool | float) -> int:
    """The largest alpha that may stay: `keep` (given to the tenant's own KV), or more with `partial`."""
    if isinstance(partial, bool):
        return _alpha(tenant) if partial else keep
    times, buffers = tenant.decode_times(), tenant.buffers
    if times is None:  # nothing was measured: a pass may take any time
        return keep
    allowed = partial * math.fsum(times.compute_s) * (1.0 + schedule.RELATIVE_EPSILON)
    for remapped in range(_alpha(tenant), keep, -1):
        stays = streaming_now(tenant.pages)
        if remapped < _alpha(tenant):
            if tenant.slicing:  # they come home together
                break
            stays = tenant.streaming_at(remapped, buffers, "inward")
        if tenant.stall(times, stays) <= allowed:
            return remapped
    return keep


def _candidates(tenant: TenantState, keep: int, most: int) -> list[int]:
    """Each alpha from `keep` to `most` whose layers can hold the ring; if `keep` layers cannot, 0 as well. Slices of all layers
    come home together, as no layer can stay away by itself: 0."""
    if tenant.slicing:
        return [0]
    buffers = tenant.buffers
    fit = [n for n in range(keep, most + 1) if tenant.possible(tenant.streaming_at(n, buffers, "inward"))]
    return fit if keep in fit else [0, *fit]


def certify(tenant: TenantState) -> None:
    """Note the stall per pass of the layers that still stream: chosen for a quick reload, they may stall more than
    allowed."""
    times = tenant.decode_times()
    if tenant.streamed and times is not None:
        stall = tenant.stall(times, streaming_now(tenant.pages), tenant.kv.streamed.stop)
        tenant.books = tenant.books._replace(predicted_stall_s=stall)
