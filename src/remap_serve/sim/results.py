# SPDX-License-Identifier: Apache-2.0
"""The results of a simulated run: one `PolicyResult` a policy, its headline figures, and its form as JSON. Pure.

    found = [simulate(setup, items, policy) for policy in ("recompute", "remap")]
    found[0].ttft_p99_s, found[0].headline()
    replace(found[0], targets=Targets(ttft_s=1.0)).goodput_per_s
    json.dumps(report({"machine": "GH200-96GB"}, found))

Percentiles are by nearest rank: of N observations in ascending order, the q-quantile is number ceil(q N), and number 1 for
q = 0; always a value that was observed (numpy's method "inverted_cdf"). Gaps between tokens are kept as pairs (seconds, how
many gaps were that long), since all rows of one iteration have the same one; the percentiles of pairs are exact.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any

from remap.errors import InvalidArgument
from remap_serve.policy.gaps import LONG_GAP_S, long_gaps
from remap_serve.sim.ideal import against_ideal

__all__ = [
    "HEADLINE",
    "POINTS",
    "PolicyResult",
    "Sample",
    "Targets",
    "TenantResult",
    "ascending",
    "merged",
    "percentile",
    "report",
    "thinned",
    "weighted_percentile",
]

POINTS = 2000
"""Most points of a timeline, and about the most pairs of a distribution, that a file holds."""

HEADLINE = (
    "tokens_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tbt_p50_s",
    "tbt_p99_s",
    "longest_gap_p50_s",
    "longest_gap_p99_s",
    "long_gaps",
    "preemptions",
    "pauses",
    "kv_blocks_peak",
    "kv_used_peak",
    "layers_remapped_peak",
    "stall_fraction",
    "requests_finished",
    "goodput_per_s",
)
"""The keys of `PolicyResult.headline()`, in their order."""

# These quantiles, and the longest gap, survive the thinning of a distribution exactly.
_KEPT_QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)

Pairs = tuple[tuple[float, int], ...]


def _rank(q: float, count: int) -> int:
    """Number ceil(q N) of N, from 1 on. A product that misses a whole number by rounding only is that number."""
    if not 0.0 <= q <= 1.0:
        raise InvalidArgument(f"q must be from 0 to 1, got {q!r}; correct q", field="q", value=q)
    product = q * count
    nearest = round(product)
    rank = nearest if abs(product - nearest) <= 1e-9 * max(1.0, product) else math.ceil(product)
    return min(max(rank, 1), count)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 to 1) by nearest rank; `values` in any order. nan of nothing. Raises InvalidArgument (q)."""
    return weighted_percentile(((value, 1) for value in values), q)


def weighted_percentile(pairs: Iterable[tuple[float, int]], q: float) -> float:
    """The q-quantile (0 to 1) of pairs (value, count) by nearest rank, as if each value stood there `count` times.

    Pairs in any order; nan of nothing. Raises InvalidArgument (q).
    """
    ordered = sorted(pairs)
    seen = list(accumulate(count for _, count in ordered))
    rank = _rank(q, seen[-1] if seen else 0)
    return ordered[bisect_left(seen, rank)][0] if rank else math.nan


def ascending(counts: Mapping[float, int]) -> Pairs:
    """Value -> count as pairs, ascending; what `TenantResult.tbt` is made of. Counts of 0 are left out."""
    return tuple(sorted((value, count) for value, count in counts.items() if count > 0))


def merged(distributions: Iterable[Iterable[tuple[float, int]]]) -> Pairs:
    """Several distributions as one: equal values added up, ascending."""
    counts: defaultdict[float, int] = defaultdict(int)
    for pairs in distributions:
        for value, count in pairs:
            counts[value] += count
    return ascending(counts)


def _mean(pairs: Pairs) -> float:
    count = sum(number for _, number in pairs)
    return math.fsum(value * number for value, number in pairs) / count if count else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


@dataclass(frozen=True)
class Targets:
    """The longest that a request may take, in seconds: to its first token, and for each token after it in its mean.

    The mean of a request (TPOT) is what vLLM's benchmark of serving counts goodput by: an answer that paused once and
    then caught up is as good as one that was steady. Raises InvalidArgument (field) for a value that is not above 0 and
    finite.
    """

    ttft_s: float = 2.0
    tpot_s: float = 0.2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise InvalidArgument(
                    f"the target {field.name} must be above 0 and finite, got {value!r}; correct it",
                    field=field.name,
                    value=value,
                )


@dataclass(frozen=True)
class Sample:
    """One point of the timeline of one tenant: it holds until the tenant's next one.

    time_s: virtual seconds from the start. kv_usable_blocks, kv_used_blocks: blocks that it may use, and that hold tokens.
    alpha: its layers' worth that is remapped. preemptions, stall_s: since the start.
    """

    time_s: float
    tenant: str
    kv_usable_blocks: int
    kv_used_blocks: int
    alpha: float
    running: int
    waiting: int
    preemptions: int
    stall_s: float


@dataclass(frozen=True)
class TenantResult:
    """One tenant under one policy.

    ttft_s: seconds from arrival to first token, queueing included, of finished requests in order of arrival. tbt: pairs
    (seconds between two tokens of a request, how many gaps were that long), ascending. compute_s: its passes without stalls.
    tpot_s: of the same requests as ttft_s, mean seconds of a token after the first; None of a request of one token.
    longest_gap_s: of the same requests, the longest of its gaps.
    swapped_bytes: of KV, to host memory and back; swapped_out_bytes: to it. kv_blocks_start: before the first request; where
    unused KV is shared, only the tenant's own. kv_blocks_peak: that it could use; where unused KV is shared, those that it asked
    for. kv_used_peak: that requests held. preemptions, pauses: see `Metrics`.
    """

    tenant: str
    requests: int
    finished: int
    output_tokens: int
    ttft_s: tuple[float, ...]
    tbt: Pairs
    preemptions: int
    recomputed_tokens: int
    swapped_bytes: int
    kv_blocks_start: int
    kv_blocks_peak: int
    layers_remapped_peak: float
    compute_s: float
    stall_s: float
    passes: int
    tpot_s: tuple[float | None, ...]
    swapped_out_bytes: int = 0
    pauses: int = 0
    kv_used_peak: int = 0
    longest_gap_s: tuple[float | None, ...] = ()

    def good(self, targets: Targets) -> int:
        """Finished requests that met both targets; a request of one token has the first one only."""
        return sum(
            ttft <= targets.ttft_s and (tpot is None or tpot <= targets.tpot_s)
            for ttft, tpot in zip(self.ttft_s, self.tpot_s, strict=True)
        )

    @property
    def stall_fraction(self) -> float:
        """Share of its passes that it waited for layers; 0 without passes."""
        return _ratio(self.stall_s, self.stall_s + self.compute_s)


@dataclass(frozen=True)
class PolicyResult:
    """One run: all tenants under one policy. The properties are over all tenants.

    virtual_s: from the first arrival to the last finish. wall_s: of the simulation itself. decisions: plans applied.
    targets: what `goodput_per_s` counts by; they change nothing else. Two runs of a seed are equal but for wall_s.
    """

    policy: str
    tenants: tuple[TenantResult, ...]
    timeline: tuple[Sample, ...]
    virtual_s: float
    wall_s: float
    iterations: int
    decisions: int
    targets: Targets = Targets()

    @property
    def ttft_s(self) -> tuple[float, ...]:
        """Of all finished requests, tenant by tenant."""
        return tuple(value for tenant in self.tenants for value in tenant.ttft_s)

    @property
    def tbt(self) -> Pairs:
        """Pairs (seconds, how many gaps), ascending."""
        return merged(tenant.tbt for tenant in self.tenants)

    @property
    def output_tokens(self) -> int:
        return sum(tenant.output_tokens for tenant in self.tenants)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per virtual second; 0 if no time passed."""
        return _ratio(self.output_tokens, self.virtual_s)

    @property
    def ttft_p50_s(self) -> float:
        return percentile(self.ttft_s, 0.5)

    @property
    def ttft_p99_s(self) -> float:
        return percentile(self.ttft_s, 0.99)

    @property
    def ttft_mean_s(self) -> float:
        values = self.ttft_s
        return math.fsum(values) / len(values) if values else math.nan

    @property
    def tbt_p50_s(self) -> float:
        return weighted_percentile(self.tbt, 0.5)

    @property
    def tbt_p99_s(self) -> float:
        return weighted_percentile(self.tbt, 0.99)

    @property
    def tbt_mean_s(self) -> float:
        return _mean(self.tbt)

    @property
    def longest_gap_p50_s(self) -> float:
        return percentile(self._longest, 0.5)

    @property
    def longest_gap_p99_s(self) -> float:
        """Of the requests' longest gaps, for which a reader waits once. `tbt_p99_s` counts each as one of all tokens."""
        return percentile(self._longest, 0.99)

    @property
    def long_gaps(self) -> float:
        """The share of gaps above `LONG_GAP_S`; nan of none."""
        return long_gaps(dict(self.tbt)) if self.tbt else math.nan

    @property
    def _longest(self) -> list[float]:
        return [value for tenant in self.tenants for value in tenant.longest_gap_s if value is not None]

    @property
    def preemptions(self) -> int:
        return sum(tenant.preemptions for tenant in self.tenants)

    @property
    def pauses(self) -> int:
        return sum(tenant.pauses for tenant in self.tenants)

    @property
    def kv_used_peak(self) -> int:
        """Sum of the tenants' peaks of blocks that requests held, as below."""
        return sum(tenant.kv_used_peak for tenant in self.tenants)

    @property
    def kv_blocks_peak(self) -> int:
        """Sum of the tenants' peaks of usable blocks; they need not have been reached at one time."""
        return sum(tenant.kv_blocks_peak for tenant in self.tenants)

    @property
    def layers_remapped_peak(self) -> float:
        """Sum of the tenants' peaks, as above."""
        return math.fsum(tenant.layers_remapped_peak for tenant in self.tenants)

    @property
    def tpot_p99_s(self) -> float:
        """Of the requests' own means: a request that was preempted for long counts as one of all requests, where
        `tbt_p99_s` counts its pause as one of all tokens."""
        return percentile([value for tenant in self.tenants for value in tenant.tpot_s if value is not None], 0.99)

    @property
    def goodput_per_s(self) -> float:
        """Requests that met both targets per virtual second; 0 if no time passed. Refused requests met none."""
        return _ratio(sum(tenant.good(self.targets) for tenant in self.tenants), self.virtual_s)

    @property
    def stall_s(self) -> float:
        return math.fsum(tenant.stall_s for tenant in self.tenants)

    @property
    def compute_s(self) -> float:
        return math.fsum(tenant.compute_s for tenant in self.tenants)

    @property
    def stall_fraction(self) -> float:
        """stall_s / (stall_s + compute_s); 0 without passes."""
        return _ratio(self.stall_s, self.stall_s + self.compute_s)

    @property
    def requests(self) -> int:
        return sum(tenant.requests for tenant in self.tenants)

    @property
    def requests_finished(self) -> int:
        return sum(tenant.finished for tenant in self.tenants)

    def headline(self) -> dict[str, float | int | None]:
        """The figures of `HEADLINE`; None where there is nothing to take a percentile of (JSON has no nan)."""
        values: dict[str, float | int | None] = {}
        for name in HEADLINE:
            value: float | int = getattr(self, name)
            values[name] = None if math.isnan(value) else value
        return values

    def to_json(self) -> dict[str, Any]:
        """The headline and everything else, of JSON's types only.

        A timeline above `POINTS` points and a distribution of gaps above `POINTS` pairs are thinned. Of a thinned distribution
        the number of gaps, their sum, the longest, those above `LONG_GAP_S`, and P50, P90, P99 and P99.9 are the run's own;
        every other quantile lies between those of the run at shares a quarter of a percent below and above.
        """
        samples = thinned(self.timeline)
        return {
            **self.headline(),
            "policy": self.policy,
            "targets": asdict(self.targets),
            "ttft_mean_s": _or_none(self.ttft_mean_s),
            "tbt_mean_s": _or_none(self.tbt_mean_s),
            "tpot_p99_s": _or_none(self.tpot_p99_s),
            "virtual_s": self.virtual_s,
            "wall_s": self.wall_s,
            "iterations": self.iterations,
            "decisions": self.decisions,
            "tenants": [
                {
                    **asdict(tenant),
                    "ttft_s": list(tenant.ttft_s),
                    "tpot_s": list(tenant.tpot_s),
                    "longest_gap_s": list(tenant.longest_gap_s),
                    "tbt": [list(pair) for pair in _fewer(tenant.tbt)],
                }
                for tenant in self.tenants
            ],
            # By column: a tenth of the size of a list of objects.
            "timeline": {field.name: [getattr(s, field.name) for s in samples] for field in fields(Sample)},
        }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def thinned(samples: Sequence[Sample], limit: int = POINTS) -> tuple[Sample, ...]:
    """At most `limit` samples (at least two a tenant): of each tenant its share, evenly, the first and the last among them."""
    if len(samples) <= limit:
        return tuple(samples)
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, sample in enumerate(samples):
        places[sample.tenant].append(place)
    kept: set[int] = set()
    for own in places.values():
        share = max(2, min(len(own), limit * len(own) // len(samples)))
        kept.update(own[round(index * (len(own) - 1) / (share - 1))] for index in range(share))
    return tuple(samples[place] for place in sorted(kept))


def _fewer(pairs: Pairs, limit: int = POINTS) -> Pairs:
    """At most `limit` pairs: neighbours become one pair with their mean.

    A group holds little of the gaps and little of their seconds (the sum of both shares is bounded), so that neither the bulk
    nor the few long gaps are blurred. The quantiles that reports quote stay pairs of their own.
    """
    if len(pairs) <= limit:
        return pairs
    alone = {weighted_percentile(pairs, q) for q in _KEPT_QUANTILES}
    number = sum(count for _, count in pairs)
    seconds = math.fsum(value * count for value, count in pairs) or 1.0
    # Two neighbouring groups hold more than `most` together, of 2 in all; a pair that stays alone may end a group early.
    most = 4.0 / (limit - 2 * len(alone) - 1)
    done: list[tuple[float, int]] = []
    group: list[tuple[float, int]] = []
    held = 0.0

    def close() -> None:
        if len(group) == 1:  # the value itself, not what rounding makes of it
            done.append(group[0])
        elif group:
            count = sum(n for _, n in group)
            done.append((math.fsum(value * n for value, n in group) / count, count))
        group.clear()

    for value, count in pairs:
        weight = count / number + value * count / seconds
        if value in alone or held + weight > most or (group and group[-1][0] <= LONG_GAP_S < value):
            close()
            held = 0.0
        group.append((value, count))
        held += weight
        if value in alone:
            held = math.inf
    close()
    return tuple(done)


def report(configuration: Mapping[str, Any], results: Iterable[PolicyResult]) -> dict[str, Any]:
    """The output of `remap simulate --json`: {"configuration": ..., "policies": {name: headline and details}}.

    Where both "recompute" and "ideal" are among them, each has "against_ideal" (`remap_serve.sim.ideal`), with None for what
    is not defined. Raises InvalidArgument if two results have the name of one policy.
    """
    policies: dict[str, dict[str, Any]] = {}
    for result in results:
        if result.policy in policies:
            raise InvalidArgument(
                f"there are two results of the policy {result.policy!r}; no report was made; give each its own name",
                field="policy",
                value=result.policy,
            )
        policies[result.policy] = result.to_json()
    for name, values in against_ideal(policies).items():
        policies[name]["against_ideal"] = {key: _or_none(value) for key, value in values.items()}
    return {"configuration": dict(configuration), "policies": policies}
