# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run: time to first token, time between tokens, throughput, preemptions, recomputed tokens, and a
timeline. Pure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from remap.config import invalid
from remap_serve.policy.gaps import long_gaps

if TYPE_CHECKING:
    from collections.abc import Sequence as Listed

    from remap_serve.engine.request import Sequence

__all__ = ["Metrics", "StepSample", "percentile"]


def percentile(values: Listed[float], q: float) -> float:
    """The q-quantile, q being 0.01, 0.02, ..., 0.99, with linear interpolation between order statistics, as numpy's default;
    0.0 of nothing. Raises InvalidArgument (field) for any other q.
    """
    hundredth = round(100 * q) if 0 < q < 1 else 0
    if not 1 <= hundredth <= 99 or abs(100 * q - hundredth) > 1e-9:
        raise invalid("q", q, "a whole number of hundredths from 0.01 to 0.99")
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[hundredth - 1]


@dataclass(frozen=True)
class StepSample:
    """The state after one engine step. `time_s` counts from the start of the run, `preemptions` are cumulative,
    `layers_remapped` may be fractional (slices)."""

    time_s: float
    kv_used_blocks: int
    kv_usable_blocks: int
    layers_remapped: float
    running: int
    waiting: int
    preemptions: int
    tokens: int
    step_s: float


@dataclass
class Metrics:
    """Filled by the engine while it runs; all times are seconds on the engine's clock.

    gaps: seconds between two tokens of a request -> how often. All that decode in one pass have the same gap, so there are
    about as many as passes. tpot_s: of each finished request of more than one token, the mean of its gaps (time per output
    token); longest_gap_s: of the same requests, the longest. preemptions: how often a request lost its KV, which is computed
    again; pauses: how often it lost its blocks while its KV stayed in host memory.
    """

    started_s: float = 0.0
    ended_s: float = 0.0
    kv_blocks_start: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    pauses: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps: Counter[float] = field(default_factory=Counter)
    tpot_s: list[float] = field(default_factory=list)
    longest_gap_s: list[float] = field(default_factory=list)
    timeline: list[StepSample] = field(default_factory=list)

    def tokens(self, sequences: Listed[Sequence], now_s: float) -> None:
        """Each of them has a token more, at one time. A preempted request's gap is counted in full: the user waits for it."""
        previous, steady, since = self.ended_s, 0, now_s - self.ended_s
        for sequence in sequences:
            last_s = sequence.last_s
            if last_s == previous:  # nearly all who decode
                steady += 1
                if since > sequence.longest_s:
                    sequence.longest_s = since
            elif last_s is None:
                sequence.first_s = now_s
                self.ttft_s.append(now_s - sequence.arrived_s)
            else:
                gap = now_s - last_s
                self.gaps[gap] += 1
                sequence.longest_s = max(sequence.longest_s, gap)
            sequence.last_s = now_s
        if steady:
            self.gaps[since] += steady
        if sequences:
            self.generated_tokens += len(sequences)
            self.ended_s = now_s

    def took_blocks(self, sequences: Listed[Sequence]) -> None:
        """These have just lost their blocks to others."""
        kept = sum(bool(one.host) for one in sequences)
        self.pauses += kept
        self.preemptions += len(sequences) - kept

    def finish(self, sequence: Sequence) -> None:
        """It has ended, with all its tokens or without."""
        self.finished += 1
        if sequence.generated > 1 and sequence.first_s is not None and sequence.last_s is not None:
            self.tpot_s.append((sequence.last_s - sequence.first_s) / (sequence.generated - 1))
            self.longest_gap_s.append(sequence.longest_s)

    @property
    def tbt_s(self) -> list[float]:
        """Every gap between two tokens of a request; equal ones together."""
        return list(self.gaps.elements())

    @property
    def duration_s(self) -> float:
        return max(self.ended_s - self.started_s, 0.0)

    def summary(self) -> dict[str, float]:
        """One number for each thing a report shows; blocks are the usable ones (capacity), `kv_used_peak` those in
        use.
        """
        usable = [sample.kv_usable_blocks for sample in self.timeline]
        tbt = self.tbt_s
        return {
            "requests": self.finished,
            "steps": self.steps,
            "duration_s": self.duration_s,
            "generated_tokens": self.generated_tokens,
            "tokens_per_s": self.generated_tokens / self.duration_s if self.duration_s > 0 else 0.0,
            "preemptions": self.preemptions,
            "pauses": self.pauses,
            "recomputed_tokens": self.recomputed_tokens,
            "ttft_p50_s": percentile(self.ttft_s, 0.50),
            "ttft_p99_s": percentile(self.ttft_s, 0.99),
            "tbt_p50_s": percentile(tbt, 0.50),
            "tbt_p99_s": percentile(tbt, 0.99),
            "tpot_p50_s": percentile(self.tpot_s, 0.50),
            "tpot_p99_s": percentile(self.tpot_s, 0.99),
            "longest_gap_p50_s": percentile(self.longest_gap_s, 0.50),
            "longest_gap_p99_s": percentile(self.longest_gap_s, 0.99),
            "long_gaps": long_gaps(self.gaps),
            "kv_blocks_start": self.kv_blocks_start,
            "kv_blocks_peak": max(usable, default=self.kv_blocks_start),
            "kv_used_peak": max((sample.kv_used_blocks for sample in self.timeline), default=0),
            "layers_remapped_peak": max((sample.layers_remapped for sample in self.timeline), default=0),
            "running_peak": max((sample.running for sample in self.timeline), default=0),
        }
