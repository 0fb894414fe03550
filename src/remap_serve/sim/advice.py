# SPDX-License-Identifier: Apache-2.0
"""Whether remap pays for these models on this machine, under this load: simulated, against the strongest alternatives. Pure.

    found = advise(setup, [items of each seed], serving.simulate)
    found.verdict, found.lines

Five policies serve the same requests: `recompute` (what engines do), KV that the models share while weights stay (`kv-pool`, what
kvcached gives), the same with KV swapped to host memory, `remap` with all its donors, and six times the memory (`ideal`), which
no machine here has. So the answer is not "better than recompute" where sharing the KV alone, or nothing at all, would do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from remap.errors import InvalidArgument
from remap_serve.sim.policies import OURS, UNUSED_KV, UNUSED_KV_AND_SWAP
from remap_serve.sim.results import PolicyResult, Targets
from remap_serve.sim.setup import Setup
from remap_serve.sim.workload import Item

__all__ = ["POLICIES", "VERDICTS", "Advised", "Figures", "advise", "decide"]

POLICIES = ("recompute", UNUSED_KV, UNUSED_KV_AND_SWAP, OURS, "ideal")
VERDICTS = ("not needed", "sharing KV suffices", "weights pay", "does not help")
SAME = 0.10
"""P99 times to the first token that differ by less are the same: seeds differ by more."""
SAME_GOODPUT = 0.02

Simulate = Callable[[Setup, Sequence[Item], str], PolicyResult]


@dataclass(frozen=True)
class Figures:
    """Medians over the seeds. Times in seconds, tokens and requests a second; layers_remapped: of all models, at the peak."""

    ttft_p50_s: float
    ttft_p99_s: float
    tbt_p50_s: float
    tbt_p99_s: float
    tpot_p99_s: float
    tokens_per_s: float
    goodput_per_s: float
    preemptions: float
    pauses: float
    kv_used_peak: float
    layers_remapped: float

    @classmethod
    def of(cls, results: Sequence[PolicyResult]) -> Figures:
        def median(value: Callable[[PolicyResult], float]) -> float:
            return float(statistics.median(map(value, results)))

        return cls(
            ttft_p50_s=median(lambda one: one.ttft_p50_s),
            ttft_p99_s=median(lambda one: one.ttft_p99_s),
            tbt_p50_s=median(lambda one: one.tbt_p50_s),
            tbt_p99_s=median(lambda one: one.tbt_p99_s),
            tpot_p99_s=median(lambda one: one.tpot_p99_s),
            tokens_per_s=median(lambda one: one.tokens_per_s),
            goodput_per_s=median(lambda one: one.goodput_per_s),
            preemptions=median(lambda one: one.preemptions),
            pauses=median(lambda one: one.pauses),
            kv_used_peak=median(lambda one: one.kv_used_peak),
            layers_remapped=median(lambda one: one.layers_remapped_peak),
        )


@dataclass(frozen=True)
class Advised:
    """verdict: one of `VERDICTS`. lines: what you gain, what weights add to it, what you lose, why it is not more, and what the
    figures are of, a sentence or two each. figures: by policy. results: of the first load, in the order of `POLICIES`."""

    verdict: str
    lines: tuple[str, ...]
    figures: Mapping[str, Figures]
    results: tuple[PolicyResult, ...]


def decide(figures: Mapping[str, Figures]) -> str:
    """One of `VERDICTS`, by the P99 time to the first token and the goodput."""

    def as_good(one: str, other: str) -> bool:
        mine, theirs = figures[one], figures[other]
        return mine.ttft_p99_s <= theirs.ttft_p99_s * (1 + SAME) and mine.goodput_per_s >= theirs.goodput_per_s * (
            1 - SAME_GOODPUT
        )

    if as_good("recompute", "ideal"):
        return "not needed"
    best = min((UNUSED_KV, UNUSED_KV_AND_SWAP), key=lambda name: figures[name].ttft_p99_s)
    if as_good(best, OURS):
        return "sharing KV suffices" if not as_good("recompute", best) else "does not help"
    return "weights pay" if not as_good("recompute", OURS) else "does not help"


def advise(
    setup: Setup,
    loads: Sequence[Sequence[Item]],
    simulate: Simulate,
    targets: Targets = Targets(),  # noqa: B008 - frozen
    on_run: Callable[[str], None] | None = None,
) -> Advised:
    """Serve each load (one a seed) under every policy, and say what follows. simulate: `serving.simulate`, or a double of it.
    on_run: told the policy before each run.

    Raises what `simulate` raises, and InvalidArgument (field loads) for none.
    """
    if not loads:
        raise InvalidArgument("no load was given; nothing was run; give one for each seed", field="loads", value=0)
    found: dict[str, Figures] = {}
    first: list[PolicyResult] = []
    for policy in POLICIES:
        results = []
        for items in loads:
            if on_run is not None:
                on_run(policy)
            results.append(replace(simulate(setup, items, policy), targets=targets))
        found[policy] = Figures.of(results)
        first.append(results[0])
    verdict = decide(found)
    return Advised(verdict, _lines(setup, found, verdict, len(loads), len(loads[0]), targets), found, tuple(first))


# -- words -----------------------------------------------------------------------------------------------------------


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "none"
    return f"{value:.3g} s" if value >= 0.9995 else f"{1e3 * value:.3g} ms"


def _sooner(before: float, after: float) -> str:
    if not (before > 0 and after > 0):
        return "no measure"
    ratio = before / after
    return f"{ratio:.2g} times sooner" if ratio >= 1 + SAME else "no sooner" if ratio >= 1 / (1 + SAME) else "later"


def _lines(
    setup: Setup, found: Mapping[str, Figures], verdict: str, seeds: int, requests: int, targets: Targets
) -> tuple[str, ...]:
    base, ours, ideal = found["recompute"], found[OURS], found["ideal"]
    first = {name: _seconds(each.ttft_p99_s) for name, each in found.items()}
    pool_s = min(found[UNUSED_KV].ttft_p99_s, found[UNUSED_KV_AND_SWAP].ttft_p99_s)
    alone = len(setup.tenants) == 1
    gained = {
        "not needed": (
            "You do not need remap: recomputing the requests that do not fit gives a P99 time to the first token of "
            f"{first['recompute']}, six times the memory {first['ideal']}."
        ),
        "sharing KV suffices": (
            f"You do not need to move weights: KV {'in host memory' if alone else 'that the models share'} is enough. P99 time "
            f"to the first token {first['recompute']} to {_seconds(pool_s)}; six times the memory gives {first['ideal']}."
        ),
        "weights pay": (
            f"remap pays: P99 time to the first token {first['recompute']} to {first[OURS]} "
            f"({_sooner(base.ttft_p99_s, ours.ttft_p99_s)}; six times the memory gives {first['ideal']}), goodput "
            f"{base.goodput_per_s:.3g} to {ours.goodput_per_s:.3g} requests/s."
        ),
        "does not help": (
            f"remap does not help here: P99 time to the first token {first['recompute']} without it, {first[OURS]} with it; "
            f"six times the memory gives {first['ideal']}."
        ),
    }[verdict]
    stays = "one model, which has no other to share KV with" if alone else "KV shared between the models"
    added = (
        f"What weights add: {stays}: {first[UNUSED_KV]}; and KV in host memory: {first[UNUSED_KV_AND_SWAP]}; and weights: "
        f"{first[OURS]}, {_sooner(pool_s, ours.ttft_p99_s)} than the better of these."
    )
    lost = [
        f"{name} {_seconds(before)} to {_seconds(after)}"
        for name, before, after in (
            ("P50 between tokens", base.tbt_p50_s, ours.tbt_p50_s),
            ("P99 between tokens", base.tbt_p99_s, ours.tbt_p99_s),
            ("P99 of a request's mean (TPOT)", base.tpot_p99_s, ours.tpot_p99_s),
        )
        if after > before * (1 + SAME)
    ]
    if ours.tokens_per_s < base.tokens_per_s * (1 - SAME_GOODPUT):
        lost.append(f"tokens/s {base.tokens_per_s:,.0f} to {ours.tokens_per_s:,.0f}")
    layers = sum(tenant.model.layers for tenant in setup.tenants)
    left = ours.ttft_p99_s > ideal.ttft_p99_s * (1 + SAME)
    bound = (
        "more layers would make passes wait for longer than is allowed" if left else "more memory would be no better"
    )
    why = (
        f"Why not more: at the peak {ours.layers_remapped:.3g} of {layers} layers were away and requests held "
        f"{ours.kv_used_peak:,.0f} KV blocks ({base.kv_used_peak:,.0f} without); {ours.preemptions:,.0f} preemptions are left "
        f"and {ours.pauses:,.0f} pauses in which KV stays in host memory; {bound}."
    )
    drawn = (
        f"Simulated: medians of {seeds} seed{'s' if seeds > 1 else ''}, {requests:,} requests each; goodput: first token within "
        f"{targets.ttft_s:g} s, TPOT at most {1e3 * targets.tpot_s:g} ms."
    )
    return gained, added, "What you lose: " + ("; ".join(lost) or "nothing that is more than a tenth") + ".", why, drawn
