# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run of several engines on one arena: each tenant's metrics, all of them together, and the turns. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remap_serve.engine.metrics import Metrics, percentile
from remap_serve.policy.gaps import long_gaps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from remap_serve.engine.request import Output

__all__ = ["Activation", "SharedResult", "SharedSample", "TenantSample"]


@dataclass(frozen=True)
class TenantSample:
    """One tenant after one step. Blocks are its own: those of another tenant may have another size. lent_pages: of its layers,
    for other tenants."""

    kv_used_blocks: int
    kv_usable_blocks: int
    layers_remapped: float
    running: int
    waiting: int
    preemptions: int
    lent_pages: int = 0


@dataclass(frozen=True)
class SharedSample:
    """All tenants after one step. `time_s` counts from the start of the run; `active`: the tenant that ran."""

    time_s: float
    active: tuple[str, ...]
    tenants: Mapping[str, TenantSample]


@dataclass(frozen=True)
class Activation:
    """One turn's beginning. seconds: the activation itself. first_pass_s: from the decision to switch to the end of the first
    pass, which is what the requests feel; None if the turn ended without a pass. preempted_requests had to give way, of any
    tenant. restored_layers came home.
    """

    time_s: float
    tenant: str
    seconds: float
    first_pass_s: float | None
    preempted_requests: int = 0
    restored_layers: int = 0
    predicted_stall_s: float = 0.0


@dataclass(frozen=True)
class SharedResult:
    """Outputs by tenant and request id, and the metrics of the run. stall_s: seconds in which passes waited for layers."""

    outputs: Mapping[str, Mapping[str, Output]]
    metrics: Mapping[str, Metrics]
    timeline: tuple[SharedSample, ...]
    activations: tuple[Activation, ...]
    stall_s: Mapping[str, float]

    @property
    def duration_s(self) -> float:
        """From the start of the run to the last token."""
        return max((one.duration_s for one in self.metrics.values()), default=0.0)

    def tokens(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """The generated tokens, to compare runs by: equal for the same requests, whatever memory there was."""
        return {name: {id: one.tokens for id, one in outputs.items()} for name, outputs in self.outputs.items()}

    def different(self, reference: Mapping[str, Mapping[str, tuple[int, ...]]]) -> list[tuple[str, str]]:
        """(tenant, request id) of every request whose tokens are not the reference's, or that only one of the two has."""
        mine = self.tokens()
        return sorted(
            (name, id)
            for name in {*mine, *reference}
            for id in {*mine.get(name, {}), *reference.get(name, {})}
            if mine.get(name, {}).get(id) != reference.get(name, {}).get(id)
        )

    def summary(self) -> dict[str, Any]:
        """Numbers of all tenants together, and under "tenants" each one's own (`Metrics.summary` and its stall).

        Latencies are over all requests (first token, queueing included; TPOT) and over all gaps between tokens. An activation's
        delay is `first_pass_s`.
        """
        each = list(self.metrics.values())
        ttft = [value for one in each for value in one.ttft_s]
        tbt = [value for one in each for value in one.tbt_s]
        tpot = [value for one in each for value in one.tpot_s]
        longest = [value for one in each for value in one.longest_gap_s]
        generated, duration = sum(one.generated_tokens for one in each), self.duration_s
        delays = [one.first_pass_s for one in self.activations if one.first_pass_s is not None]
        tenants = {}
        for name, one in self.metrics.items():
            mine = [sample.tenants[name] for sample in self.timeline]
            tenants[name] = {
                **one.summary(),
                # The engine's own timeline has its own steps only; its memory changes in those of others too.
                "kv_blocks_peak": max((s.kv_usable_blocks for s in mine), default=one.kv_blocks_start),
                "kv_blocks_least": min((s.kv_usable_blocks for s in mine), default=one.kv_blocks_start),
                "layers_remapped_peak": max((s.layers_remapped for s in mine), default=0),
                "stall_s": self.stall_s.get(name, 0.0),
            }
        return {
            "requests": sum(one.finished for one in each),
            "duration_s": duration,
            "generated_tokens": generated,
            "tokens_per_s": generated / duration if duration > 0 else 0.0,
            "preemptions": sum(one.preemptions for one in each),
            "pauses": sum(one.pauses for one in each),
            "recomputed_tokens": sum(one.recomputed_tokens for one in each),
            "ttft_mean_s": math.fsum(ttft) / len(ttft) if ttft else 0.0,
            "ttft_p50_s": percentile(ttft, 0.50),
            "ttft_p99_s": percentile(ttft, 0.99),
            "tbt_mean_s": math.fsum(tbt) / len(tbt) if tbt else 0.0,
            "tbt_p50_s": percentile(tbt, 0.50),
            "tbt_p99_s": percentile(tbt, 0.99),
            "tpot_p50_s": percentile(tpot, 0.50),
            "tpot_p99_s": percentile(tpot, 0.99),
            "longest_gap_p50_s": percentile(longest, 0.50),
            "longest_gap_p99_s": percentile(longest, 0.99),
            "long_gaps": long_gaps(sum((one.gaps for one in each), Counter())),
            "stall_s": math.fsum(self.stall_s.values()),
            "activations": len(self.activations),
            "activation_p50_s": percentile(delays, 0.50),
            "activation_p99_s": percentile(delays, 0.99),
            "tenants": tenants,
        }
