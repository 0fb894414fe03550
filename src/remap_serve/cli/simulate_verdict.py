# SPDX-License-Identifier: Apache-2.0
"""The first questions of a reader of `remap simulate`: is it better, what is worse, and what limits it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from remap_serve.sim.results import PolicyResult, Sample

from .simulate_report import change, seconds

__all__ = ["LIMITS", "limited_by", "verdict", "worse"]

# A change below this share counts as none.
NOISE = 0.01
# A share of the time below this is no limit.
SHORT = 0.05
# Requests wait for KV if they wait while so much of it holds tokens.
FULL = 0.9

FIGURES: tuple[tuple[str, str, Callable[[float], str], bool], ...] = (
    ("ttft_p99_s", "P99 time to first token", seconds, False),
    ("tokens_per_s", "tokens/s", lambda value: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}", True),
    ("preemptions", "preemptions", lambda value: f"{value:,.0f}", False),
    ("ttft_p50_s", "P50 time to first token", seconds, False),
    ("tbt_p50_s", "P50 time between tokens", seconds, False),
    ("tbt_p99_s", "P99 time between tokens", seconds, False),
)
"""(property of PolicyResult, its name, how to show it, whether more is better)."""

LIMITS = (
    "KV, if requests were preempted or paused, or waited while nine tenths of a tenant's blocks were in use; the link, if passes "
    "waited for layers or KV for at least a twentieth of their time; otherwise the computation, if requests ran for nine tenths "
    "of the time; otherwise the load: nothing was short."
)


def _compared(results: Sequence[PolicyResult]) -> PolicyResult | None:
    """The result that is compared with the first: remap's, or the last one that a machine can have."""
    others = [result for result in results[1:] if result.policy != "ideal"]
    ours = [result for result in others if result.policy.partition(":")[0] == "remap"]
    found = ours or others[-1:]
    return found[0] if found else None


def _moved(results: Sequence[PolicyResult], better: bool) -> list[str]:
    ours, found = _compared(results), []
    if ours is None:
        return []
    for key, name, show, more in FIGURES:
        before, after = (float(getattr(result, key)) for result in (results[0], ours))
        if math.isnan(before) or math.isnan(after) or abs(after - before) <= NOISE * abs(before):
            continue
        if ((after > before) == more) == better:
            by = change(before, after)
            found.append(f"{name} {show(before)} to {show(after)}" + (f" ({by})" if by else ""))
    return found


def verdict(results: Sequence[PolicyResult]) -> str:
    """One sentence: the figures in which the compared policy is better than the first."""
    ours, first = _compared(results), results[0]
    if ours is None:
        return f"{first.policy} alone: name others to compare it with."
    if found := _moved(results, better=True):
        return f"{ours.policy} instead of {first.policy}: {', '.join(found[:4])}."
    if _moved(results, better=False):
        return f"{ours.policy} is no better than {first.policy} here."
    return f"{ours.policy} makes no difference from {first.policy} here."


def worse(results: Sequence[PolicyResult]) -> str:
    """One sentence: the figures in which the compared policy is worse; empty if there are none."""
    found = _moved(results, better=False)
    return f"Worse: {', '.join(found)}." if found else ""


def limited_by(result: PolicyResult) -> str:
    """The resource that was short, with its share of the time; see `LIMITS`."""
    busy, waited, total = 0.0, 0.0, 0.0
    latest: dict[str, Sample] = {}
    ordered = sorted(result.timeline, key=lambda point: point.time_s)
    for point, following in zip(ordered, ordered[1:]):
        latest[point.tenant] = point
        passed = following.time_s - point.time_s
        if passed <= 0:
            continue
        total += passed
        busy += passed * any(one.running for one in latest.values())
        waited += passed * any(
            one.waiting and one.kv_used_blocks >= FULL * one.kv_usable_blocks for one in latest.values()
        )
    found = []
    if total and (result.preemptions or result.pauses or waited >= SHORT * total):
        found.append(
            f"KV (waited for in {waited / total:.0%} of the time, {result.preemptions:,} preemptions, {result.pauses:,} pauses)"
        )
    if result.stall_fraction >= SHORT:
        found.append(f"the link (waited for in {result.stall_fraction:.0%} of the passes' time)")
    if not found and total and busy >= 0.9 * total:
        found.append(f"the computation (busy in {busy / total:.0%} of the time)")
    if found:
        return "; ".join(found)
    return f"the load (idle in {1 - busy / total:.0%} of the time)" if total else "the load"
