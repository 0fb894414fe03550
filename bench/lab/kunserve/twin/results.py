"""What a simulated cluster did: answers, and how it was meanwhile. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from remap_serve.sim.workload import Item

__all__ = ["Answer", "Result", "Sample", "percentile"]


@dataclass(frozen=True)
class Answer:
    """One request and when its first and its last token came; None of one that was refused, since no instance could hold it."""

    item: Item
    first_s: float | None
    last_s: float | None
    preemptions: int

    @property
    def ttft_s(self) -> float:
        """Seconds until the first token, waiting included; nan if it was refused."""
        return math.nan if self.first_s is None else self.first_s - self.item.time_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds between its tokens; nan if there are fewer than two."""
        if self.first_s is None or self.last_s is None or self.item.output_tokens < 2:
            return math.nan
        return (self.last_s - self.first_s) / (self.item.output_tokens - 1)


@dataclass(frozen=True)
class Sample:
    """The cluster at one moment. Tokens of KV: capacity, demand (of what runs and of the heads of the lines), used. generated,
    prompts: tokens since the start. largest: instances of the largest group; groups: how many."""

    time_s: float
    capacity: int
    demand: int
    used: int
    running: int
    waiting: int
    generated: int
    prompts: int
    groups: int
    largest: int


@dataclass(frozen=True)
class Result:
    """answers: in the order of arrival. end_s: when the last token came. messages: to and from control, by kind. sent_bytes:
    on the network, by priority. bubble_share: of the time that the stages of groups of several had while anything was on its
    way there, the share in which they computed nothing; nan if there were none. recomputed_tokens: computed a second time."""

    answers: tuple[Answer, ...]
    samples: tuple[Sample, ...]
    end_s: float
    messages: Mapping[str, int]
    sent_bytes: Mapping[str, int]
    bubble_share: float
    preemptions: int
    recomputed_tokens: int
    swapped_blocks: int = 0
    migrations: int = 0

    def figures(self) -> dict[str, float]:
        """By name, of all requests that were answered; seconds and tokens/s."""
        ttft = [one.ttft_s for one in self.answers if one.first_s is not None]
        tpot = [one.tpot_s for one in self.answers if not math.isnan(one.tpot_s)]
        tokens = sum(one.item.output_tokens for one in self.answers if one.first_s is not None)
        found = {
            "requests": float(len(self.answers)),
            "answered": float(len(ttft)),
            "tokens_per_s": tokens / self.end_s if self.end_s else 0.0,
            "preemptions": float(self.preemptions),
            "recomputed_tokens": float(self.recomputed_tokens),
            "bubble_share": self.bubble_share,
            "demand_share": _mean(one.demand / one.capacity for one in self.samples),
            "over_share": _mean(one.demand > one.capacity for one in self.samples),
            "grouped_share": _mean(one.largest > 1 for one in self.samples),
            "largest": float(max((one.largest for one in self.samples), default=0)),
            "exchanged_gb": self.sent_bytes.get("EXCHANGE", 0) / 1e9,
            "restored_gb": self.sent_bytes.get("RESTORE", 0) / 1e9,
            "merges": float(self.messages.get("merges", 0)),
            "dissolutions": float(self.messages.get("dissolutions", 0)),
        }
        for name, values in (("ttft", ttft), ("tpot", tpot)):
            found[f"{name}_mean_s"] = _mean(values)
            for share in (50, 90, 99, 99.9):
                found[f"{name}_p{share:g}_s"] = percentile(values, share)
        return found


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that at least so many per cent are not above; nan of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * share / 100.0) - 1)]


def _mean(values: Iterable[float] | Sequence[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known) if known else math.nan
