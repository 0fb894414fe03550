"""What `bench.lab kunserve` runs, and how the paper's numbers are computed from it. Pure description."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.lab.kunserve.twin.dispatchers import DispatcherName
from bench.lab.kunserve.twin.loads import BURST_S, BURSTS, bursts, swells
from bench.lab.kunserve.twin.results import Result
from bench.lab.kunserve.twin.setup import CLUSTER_A, CLUSTER_B, Hardware
from bench.lab.kunserve.twin.systems import SYSTEMS
from bench.lab.kunserve.twin.world import World
from bench.lab.seeds import Point

from remap_serve.sim.roofline import prefill_pairs
from remap_serve.sim.sequences import Work
from remap_serve.sim.workload import Item

__all__ = [
    "BASELINES",
    "CLAIMS",
    "FIGURES",
    "LATE_S",
    "SETUPS",
    "Claim",
    "Figure",
    "Settings",
    "Setup",
    "cost_errors",
    "late",
    "name_of",
    "rounded",
    "run",
    "runs",
]


@dataclass(frozen=True)
class Settings:
    """seeds: of each setup. quick: few requests, to see that it runs."""

    seeds: int = 5
    quick: bool = False

    def to_json(self) -> dict[str, int | bool]:
        """As it stands in the file of results."""
        return {"seeds": self.seeds, "quick": self.quick}


@dataclass(frozen=True)
class Setup:
    """A cluster and its load: requests of these lengths at `rate` a second for so many seconds, `times` as many from each of `at`
    on for burst_s; without `at` they come in swells. scale: of the P50 that a first token may take at most (the paper: 5 for
    chats, 10 for summaries). longer: times as long answers. dispatcher, cold_s: `World`'s."""

    name: str
    hardware: Hardware
    lengths: str
    rate: float
    seconds: float
    at: tuple[float, ...] = BURSTS[:1]
    burst_s: float = BURST_S
    scale: float = 5.0
    longer: float = 1.0
    times: float = 2.0
    dispatcher: DispatcherName = "lines"
    cold_s: float | None = None

    def when(self, quick: bool = False) -> tuple[float, tuple[float, ...], float]:
        """(seconds, at, burst_s); quick: a short burst in a short run."""
        return (20.0, (5.0,), 10.0) if quick else (self.seconds, self.at, self.burst_s)

    def requests(self, seed: int, quick: bool = False) -> tuple[Item, ...]:
        """In order of time."""
        seconds, at, burst_s = self.when(quick)
        if not self.at:
            return swells(self.lengths, self.rate, seconds, seed)
        return bursts(self.lengths, self.rate, seconds, seed, at, burst_s, self.longer, self.times)


SETUPS = {
    one.name: one
    for one in (
        Setup("BurstGPT, 14B", CLUSTER_A, "burstgpt", 36.0, 130.0),
        Setup("ShareGPT, 14B", CLUSTER_A, "sharegpt-4k", 14.0, 160.0),
        Setup("LongBench, 14B", CLUSTER_A, "longbench", 3.2, 240.0, scale=10.0),
        Setup("LongBench, 72B", CLUSTER_B, "longbench", 3.4, 240.0, scale=10.0),
        Setup("LongBench, 14B, two bursts", CLUSTER_A, "longbench", 3.2, 640.0, BURSTS, scale=10.0),
        Setup("LongBench, 72B, no end", CLUSTER_B, "longbench", 3.2, 240.0, burst_s=195.0),
        Setup("LongBench, 14B, swells", CLUSTER_A, "longbench", 3.8, 300.0, (), scale=10.0),
    )
}
"""Rates are such that demand for KV is about half of what `vllm` has in the mean, and more than that in a burst."""
_BURSTGPT, _SHAREGPT, _LONGBENCH, _LARGE, _TWO, _ENDLESS, _SWELLS = SETUPS
BASELINES = ("vllm", "vllm-pp", "infercept", "llumnix")
_BOTH = ("kunserve", "remap")
_SLOW = ("drop", "drop+exchange", "drop+exchange+lookahead")


@dataclass(frozen=True)
class Figure:
    """A table: setups, and the systems in each. show: keys of points."""

    title: str
    setups: tuple[str, ...]
    systems: tuple[str, ...]
    show: tuple[str, ...]


_LATENCY = ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_p99.9_s", "tpot_p50_s", "tpot_p99_s")
FIGURES = (
    Figure(
        "Figures 12 and 13: latency and throughput",
        (_BURSTGPT, _SHAREGPT, _LONGBENCH, _LARGE),
        (*BASELINES, *_BOTH),
        (*_LATENCY, "tokens_per_s", "preemptions"),
    ),
    Figure(
        "What the groups did",
        (_BURSTGPT, _SHAREGPT, _LONGBENCH, _LARGE),
        ("vllm", "vllm-pp", *_BOTH, "remap-tokens", "remap-sticky"),
        (
            *("demand_share", "over_share", "grouped_share", "largest", "merges", "dissolutions", "bubble_share"),
            *("exchanged_gb", "restored_gb"),
        ),
    ),
    Figure(
        "Figure 14: step by step",
        (_LONGBENCH,),
        ("vllm", *_SLOW, *_BOTH, "remap-tokens", "remap-sticky"),
        (*_LATENCY, "tokens_per_s", "bubble_share"),
    ),
    Figure(
        "Figure 16: with and without restoring",
        (_TWO,),
        ("vllm", "drop+exchange+lookahead", *_BOTH),
        (*_LATENCY, "grouped_share", "tokens_per_s"),
    ),
    Figure(
        "Figure 17: a burst without end",
        (_ENDLESS,),
        ("vllm", *_BOTH),
        ("full_s", "freed_share", "ttft_p50_s", "ttft_p99_s", "preemptions"),
    ),
    Figure(
        "BurstGPT's own arrivals: swells",
        (_SWELLS,),
        (*BASELINES, *_BOTH),
        (*_LATENCY, "tokens_per_s", "demand_share", "grouped_share"),
    ),
)

Run = tuple[str, str, int, bool]


def name_of(setup: str, system: str, seed: int) -> str:
    """Of a run, in the file of results."""
    return f"{setup}: {system} #{seed}"


def runs(settings: Settings) -> dict[str, Run]:
    """All runs by name, seed by seed."""
    return {
        name_of(setup, system, seed): (setup, system, seed, settings.quick)
        for seed in range(settings.seeds)
        for figure in FIGURES
        for setup in figure.setups
        for system in figure.systems
        if not (system == "remap-sticky" and setup in (_BURSTGPT, _SHAREGPT))
    }


LATE_S = tuple(float(f"{0.1 * 1.2**step:.4g}") for step in range(40))
"""Seconds until the first token for which the share of requests that took longer is kept."""


def run(setup: str, system: str, seed: int, quick: bool) -> Point:
    """One run: figures by name."""
    one = SETUPS[setup]
    result = World(
        one.hardware, SYSTEMS[system], one.requests(seed, quick), dispatcher=one.dispatcher, cold_s=one.cold_s
    ).run()
    found = {**result.figures(), **_fullness(result)}
    ttft = [answer.ttft_s for answer in result.answers]
    found |= {f"late_{limit:g}": sum(each > limit for each in ttft) / len(ttft) for limit in LATE_S}
    return rounded(found)


def rounded(found: Mapping[str, float]) -> Point:
    """To five digits: more would only fill files."""
    return {key: value if math.isnan(value) else float(f"{value:.5g}") for key, value in found.items()}


def _fullness(result: Result) -> dict[str, float]:
    """full_s: seconds from the burst (the first one, at BURSTS[0]) until demand is above capacity for 5 s in a row; nan if it
    never is. freed_share: by how much capacity was larger at most than at first."""
    samples, over = result.samples, 0
    full_s = math.nan
    for one in samples:
        over = over + 1 if one.demand > one.capacity else 0
        if over == 5:
            full_s = one.time_s - 4 - BURSTS[0]
            break
    return {"full_s": full_s, "freed_share": max(one.capacity for one in samples) / samples[0].capacity - 1.0}


# ---------------------------------------------------------------------------------------------- the paper's numbers

At = Callable[[str, str], Point]
"""The point of (setup, system), of one seed. Raises KeyError where it was not run."""
Computed = Callable[[At, str], tuple[float, ...]]
_P50, _P99 = ("tpot_p50_s",), ("tpot_p99_s",)


def late(point: Point, seconds: float) -> float:
    """The share of requests whose first token took longer, between the two limits that are kept next to it."""
    for low, high in zip(LATE_S, LATE_S[1:]):
        if low <= seconds <= high:
            share = (seconds - low) / (high - low)
            return (1.0 - share) * point[f"late_{low:g}"] + share * point[f"late_{high:g}"]
    return 1.0 if seconds < LATE_S[0] else 0.0


def _times(key: str, setups: Sequence[str], bases: Sequence[str] = BASELINES) -> Computed:
    """How many times lower than with the best and with the worst of these, over all setups."""

    def of(at: At, system: str) -> tuple[float, ...]:
        found = [at(setup, base)[key] / at(setup, system)[key] for setup in setups for base in bases]
        return (min(found), max(found)) if len(found) > 1 else (found[0],)

    return of


def _more(keys: Sequence[str], setup: str, bases: Sequence[str], sign: float = 1.0) -> Computed:
    """% more (sign -1: less) than with these, the least and the most."""

    def of(at: At, system: str) -> tuple[float, ...]:
        found = [sign * 100.0 * (at(setup, system)[key] / at(setup, base)[key] - 1.0) for key in keys for base in bases]
        return (min(found), max(found)) if len(found) > 1 else (found[0],)

    return of


def _less(keys: Sequence[str], setup: str, base: str) -> Computed:
    return _more(keys, setup, [base], -1.0)


def _step(key: str, base: str) -> Computed:
    return _times(key, [_LONGBENCH], [base])


def _stands(at: At, system: str) -> tuple[float, ...]:
    return (at(_ENDLESS, system)["full_s"] / at(_ENDLESS, "vllm")["full_s"],)


def _violations(at: At, system: str) -> tuple[float, ...]:
    """Points of the share of requests beyond the limit that are fewer than in the baselines' mean: the least and the most of
    the setups."""
    found = []
    for setup in (_BURSTGPT, _SHAREGPT, _LONGBENCH, _LARGE):
        limit = SETUPS[setup].scale * min(at(setup, base)["ttft_p50_s"] for base in BASELINES)
        shares = [late(at(setup, base), limit) for base in BASELINES]
        found.append(100.0 * (sum(shares) / len(shares) - late(at(setup, system), limit)))
    return min(found), max(found)


def _lost(at: At, system: str) -> tuple[float, ...]:
    """% of tokens/s that fixed pairs lose, against each of the other systems of the paper."""
    found = [
        100.0 * (1.0 - at(setup, system)["tokens_per_s"] / at(setup, other)["tokens_per_s"])
        for setup in (_BURSTGPT, _SHAREGPT, _LONGBENCH, _LARGE)
        for other in ("vllm", "infercept", "llumnix", "kunserve")
    ]
    return min(found), max(found)


def _one(key: str, setup: str, times: float = 1.0) -> Computed:
    return lambda at, system: (times * at(setup, system)[key],)


@dataclass(frozen=True)
class Claim:
    """A number of the paper, by its id: what it says, and how it is computed. systems: whose it is, the paper's way first."""

    id: str
    figure: str
    about: str
    paper: str
    of: Computed
    systems: tuple[str, ...] = _BOTH


_14B = (_BURSTGPT, _SHAREGPT, _LONGBENCH)
_ALONE = ("vllm", "infercept", "llumnix")
_1, _2, _3 = _SLOW
CLAIMS = (
    Claim("01", "12, 13", "P99 TTFT, times lower than the baselines', 14B", "12.7 to 72.2", _times("ttft_p99_s", _14B)),
    Claim("02", "13", "requests beyond the limit, points fewer", "7.2 to 12.8", _violations),
    Claim("03", "12", "tokens/s that fixed pairs lose, %", "3.3 to 21.8", _lost, ("vllm-pp",)),
    Claim("04", "13", "P50 TPOT, % more, LongBench 14B", "15.8 to 22.7", _more(_P50, _LONGBENCH, _ALONE)),
    Claim("05", "12, 13", "P99 TTFT, times lower, 72B", "8.4 to 11.9", _times("ttft_p99_s", [_LARGE])),
    Claim("06", "13", "P50 and P99 TPOT, % more, 72B", "18.3 to 22.7", _more((*_P50, *_P99), _LARGE, _ALONE)),
    Claim("10", "14", "drop: P90 TTFT, times lower than vLLM's", "8.8", _step("ttft_p90_s", "vllm"), (_1,)),
    Claim("11", "14", "drop: P99 TTFT", "11.7", _step("ttft_p99_s", "vllm"), (_1,)),
    Claim("12", "14", "drop: P99.9 TTFT", "10.3", _step("ttft_p99.9_s", "vllm"), (_1,)),
    Claim("13", "14", "drop: TPOT, % more", "21 to 31.9", _more((*_P50, *_P99), _LONGBENCH, ["vllm"]), (_1,)),
    Claim("14", "14", "coordinated exchange: P99 TTFT, times lower", "1.5", _step("ttft_p99_s", _1), (_2,)),
    Claim("15", "14", "coordinated exchange: P99.9 TTFT", "1.4", _step("ttft_p99.9_s", _1), (_2,)),
    Claim("16", "14", "P90 and P99.9 TPOT, % less", "5", _less(["tpot_p90_s", "tpot_p99.9_s"], _LONGBENCH, _1), (_2,)),
    Claim("20", "14", "lookahead: P90 TPOT, % less", "4.5", _less(["tpot_p90_s"], _LONGBENCH, _2), (_3,)),
    Claim("21", "14", "lookahead: P99 TPOT", "10.6", _less(_P99, _LONGBENCH, _2), (_3,)),
    Claim("22", "14", "lookahead: P99.9 TPOT", "9.7", _less(["tpot_p99.9_s"], _LONGBENCH, _2), (_3,)),
    Claim("23", "14", "bubbles without lookahead, %", "21.9", _one("bubble_share", _LONGBENCH, 100.0), (_2,)),
    Claim("23", "14", "bubbles with lookahead, %", "8.3", _one("bubble_share", _LONGBENCH, 100.0), (_3, "remap")),
    Claim("24", "14", "lookahead: tokens/s, % more", "20", _more(["tokens_per_s"], _LONGBENCH, [_2]), (_3,)),
    Claim("26", "16", "restoring: P50 TTFT, % less", "28", _less(["ttft_p50_s"], _TWO, _3)),
    Claim("27", "16", "restoring: P50 TPOT, % less", "23", _less(_P50, _TWO, _3)),
    Claim("28", "16", "restoring: P99 TTFT, times lower", "6.4", _times("ttft_p99_s", [_TWO], [_3])),
    Claim("29", "16", "restoring: P99 TPOT, times lower", "1.2", _times("tpot_p99_s", [_TWO], [_3])),
    Claim("30", "17", "time until memory is full, vLLM = 1", "1.5", _stands),
    Claim("31", "17", "KV that dropping frees, % of what there is", "57", _one("freed_share", _ENDLESS, 100.0)),
)


def cost_errors(hardware: Hardware = CLUSTER_A) -> dict[str, tuple[float, float]]:
    """Figure 15: the largest relative error of a chunk's cost against the roofline, with attention counted and without it, for
    prompts of 512 to 16,384 tokens and for chunks of 512 to 2,048 behind 2,048 to 14,336."""
    cost = hardware.chunk_cost
    whole = [(0, tokens) for tokens in (512, 1024, 2048, 4096, 8192, 16384)]
    behind = [(prefix, tokens) for prefix in (2048, 6144, 14336) for tokens in (512, 1024, 2048)]
    found = {}
    for name, chunks in (("prompts", whole), ("chunks behind a prefix", behind)):
        errors = []
        for prefix, tokens in chunks:
            work = Work(tokens, prefill_pairs(tokens, prefix), 0, 0, 1)
            real = hardware.layers_s(hardware.whole.layers, work) + hardware.ends_s(work)
            ours = cost.batch_s + cost.chunk(prefix, tokens)
            linear = cost.batch_s + cost.token_s * tokens
            errors.append((abs(ours / real - 1.0), abs(linear / real - 1.0)))
        found[name] = max(each for each, _ in errors), max(each for _, each in errors)
    return found
