"""The experiments of `bench.lab paper`. Pure description; what the fields mean is in experiments.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bench.lab.pie_events import PREFIX as PIE_EVENTS

from remap_serve.sim.policies import OURS, UNUSED_KV, UNUSED_KV_AND_SWAP, WEIGHTS_ONLY

from .experiments import ALGORITHM_1, BASELINE, IDEAL, PAPERS_OWN, Comparison, Experiment, Panel, Reckoning

__all__ = ["EXPERIMENTS"]

MANY = 3.0
"""Alpaca's answers are six times as short as ShareGPT's: a run needs more of them, or it is all beginning and end."""

KV_STREAM = f"{WEIGHTS_ONLY}+stream+max_layers=0+lends=false"
"""Complete blocks of KV stream from host memory, and weights stay."""

_TBT, _TTFT, _RATE = "tbt_p99_reduction", "ttft_p99_reduction", "throughput_gain"
_TPOT, _GOOD = "tpot_p99_reduction", "goodput_gain"
_AZURE = "Arrivals of the Azure code trace, rescaled; request rates are not stated."
_TURNS = "Turns of 1 s (the paper: round robin, no length of a turn), equal rates."
_OWN_LRU = f"{PAPERS_OWN}+lru"
_OWN_STAYS = f"{PAPERS_OWN}+no-reversion"
_OWN_UNCAPPED = f"{PAPERS_OWN}+uncapped"


def _pair(name: str, tenants: str, sharing: str = "temporal") -> tuple[Panel, Panel]:
    where = "" if sharing == "temporal" else f", {sharing}"
    return (
        Panel(f"{name} Alpaca{where}", tenants, ("alpaca",), sharing=sharing, requests=MANY),
        Panel(f"{name} ShareGPT{where}", tenants, ("sharegpt",), sharing=sharing),
    )


def _three(tbt: str, ttft: str, rate: str, base: str = BASELINE) -> tuple[Reckoning, ...]:
    return Reckoning(tbt, _TBT, base), Reckoning(ttft, _TTFT, base), Reckoning(rate, _RATE, base)


C1, C2 = _pair("C1", "C1"), _pair("C2", "C2")
C1_MPS, C1_MIG = _pair("C1", "C1", "spatial"), _pair("C1", "C1", "mig")
UNEQUAL = tuple(
    Panel(f"C2 ShareGPT, rates {a:g}:{b:g}", "C2", ("sharegpt",), shares=(a, b)) for a, b in ((4.0, 1.0), (1.0, 4.0))
)
LONG_SHORT = tuple(
    Panel(f"C2 {a} + {b}", "C2", (a, b), requests=0.5) for a, b in (("long", "short"), ("short", "long"))
)
TURNS = tuple(
    Panel(f"C1 ShareGPT, turns of {turn:g} s", "C1", ("sharegpt",), quantum_s=turn, like=C1[1].name)
    for turn in (0.1, 0.02)
)
ALONE = Panel("OPT-13b Alpaca", "OPT-13b:35%", ("alpaca",), fixed=(1.0, 10.0), requests=MANY)
ALONE_CHAT = Panel("OPT-13b ShareGPT", "OPT-13b:35%", ("sharegpt",))
PEAK_QUIET = Panel(
    "OPT-13b Alpaca, peak, then a fifth of it",
    "OPT-13b:35%",
    ("alpaca",),
    factors=(0.3, 0.5, 0.7, 1.0, 1.5, 2.0),
    quiet=0.2,
    requests=MANY,
)
TEN_ONE = Panel(
    "OPT-13b Alpaca, 10 requests a second, then 1",
    "OPT-13b:35%",
    ("alpaca",),
    factors=(),
    fixed=(10.0,),
    quiet=0.1,
    requests=MANY,
)

_SOME = (0.3, 0.7, 1.0, 1.5)
_NEAR = (0.7, 1.0)
_LIST = (
    Experiment(
        id="fig4",
        figure="Oneiros, Fig 4",
        title="Computation of a pass against the loading of layers",
        panels=(),
        policies=(BASELINE,),
        stated="OPT-13b, ShareGPT requests, batches on the horizontal axis.",
        assumed="4b only: computation on the CPU (4a) is not simulated. Contexts of 512 tokens. Arithmetic, nothing is served.",
    ),
    Experiment(
        id="fig8-c1",
        figure="Oneiros, Fig 8",
        title="Three models take turns (C1)",
        panels=C1,
        reckonings=_three("oneiros-04", "oneiros-05", "oneiros-06"),
        stated="OPT-13b 35 %, Llama-2-13b 35 %, Llama-3-8b 20 % of a GH200; Alpaca and ShareGPT. " + _AZURE,
        assumed=_TURNS,
    ),
    Experiment(
        id="fig8-c2",
        figure="Oneiros, Fig 8",
        title="Two models take turns (C2)",
        panels=C2,
        reckonings=_three("oneiros-07", "oneiros-08", "oneiros-09"),
        stated="OPT-30b 65 %, OPT-6.7b 15 % of a GH200; Alpaca and ShareGPT. " + _AZURE,
        assumed=_TURNS,
    ),
    Experiment(
        id="fig9",
        figure="Oneiros, Fig 9",
        title="Different rates for the two models",
        panels=UNEQUAL,
        reckonings=_three("oneiros-10", "oneiros-11", "oneiros-12"),
        stated="C2. " + _AZURE,
        assumed="Rates 4:1 and 1:4, ShareGPT lengths: the paper states neither. Turns of 1 s.",
    ),
    Experiment(
        id="fig10",
        figure="Oneiros, Fig 10",
        title="Long requests for one model, short ones for the other",
        panels=LONG_SHORT,
        reckonings=_three("oneiros-13", "oneiros-14", "oneiros-15"),
        stated="C2; requests of 1734 and of 634 tokens on average. " + _AZURE,
        assumed="Answers of 338 tokens on average in both, the rest is the prompt's. Turns of 1 s, equal rates.",
    ),
    Experiment(
        id="fig11",
        figure="Oneiros, Fig 11",
        title="Which inactive model gives: the most or the least recently used",
        panels=C1,
        policies=(BASELINE, PAPERS_OWN, _OWN_LRU),
        reckonings=(Reckoning("oneiros-22", "tail_reduction", _OWN_LRU, (PAPERS_OWN,), how="most"),),
        stated="C1, round robin; up to 22 % less tail latency.",
        assumed="Tail latency: the larger cut of P99 TBT and P99 TTFT. " + _TURNS,
        factors=(0.2, 0.5, 0.7, 1.0, 1.5),
    ),
    Experiment(
        id="fig12",
        figure="Oneiros, Fig 12",
        title="Models that compute side by side (MPS)",
        panels=C1_MPS,
        reckonings=_three("oneiros-16", "oneiros-17", "oneiros-18"),
        stated="C1, all models active. " + _AZURE,
        assumed="Passes that overlap share the device evenly (processor sharing).",
    ),
    Experiment(
        id="fig13",
        figure="Oneiros, Fig 13",
        title="Partitions of their own (MIG)",
        panels=C1_MIG,
        reckonings=_three("oneiros-19", "oneiros-20", "oneiros-21"),
        stated="C1, strict isolation. " + _AZURE,
        assumed="A partition has the same part of computation, memory bandwidth and link as of the reserved memory.",
    ),
    Experiment(
        id="fig14",
        figure="Oneiros, Fig 14",
        title="Against swapping the KV cache (Pie)",
        panels=(ALONE,),
        policies=(BASELINE, PIE_EVENTS, PAPERS_OWN, WEIGHTS_ONLY),
        reckonings=_three("oneiros-23", "oneiros-24", "oneiros-25", PIE_EVENTS),
        stated="OPT-13b with 35 % of a GH200, Alpaca. " + _AZURE,
        assumed="One model alone, so nobody lends: only its own layers can be streamed. Pie runs event by event "
        "(pie_events.py): layers wait for copies both ways, and each look of the host's costs time. The numbers of its adaptive "
        "expansion, which its paper does not give, were chosen on other loads (pie.md).",
    ),
    Experiment(
        id="fig15",
        figure="Oneiros, Fig 15",
        title="One ring buffer or two",
        panels=(ALONE,),
        policies=(BASELINE, "remap:weights+uniform+single", "remap:weights+uniform+double", "remap:weights+uniform"),
        reckonings=(
            Reckoning(
                "oneiros-26",
                "throughput_loss",
                "remap:weights+uniform+double",
                ("remap:weights+uniform+single",),
                how="most",
            ),
        ),
        stated="OPT-13b, Alpaca; m = alpha + 1 loses up to 12.7 % of throughput against m = alpha + 2.",
        assumed="Azure code arrivals.",
    ),
    Experiment(
        id="fig16",
        figure="Oneiros, Fig 16",
        title="Layers come home when the peak is over",
        panels=(ALONE, PEAK_QUIET, TEN_ONE),
        policies=(BASELINE, PAPERS_OWN, _OWN_STAYS, WEIGHTS_ONLY, "remap:weights+no-reversion"),
        reckonings=(
            Reckoning("oneiros-27", "tbt_p50_reduction", _OWN_STAYS, (PAPERS_OWN,), panels=(PEAK_QUIET.name,)),
            Reckoning("oneiros-28", "tbt_p50_reduction", _OWN_STAYS, (PAPERS_OWN,), "about_zero", (ALONE.name,)),
            Reckoning(
                "oneiros-37", "tbt_p50_increase", PAPERS_OWN, (_OWN_STAYS,), "most", (PEAK_QUIET.name, TEN_ONE.name)
            ),
        ),
        stated="OPT-13b, Alpaca; 10 requests a second at the peak, 1 off it.",
        assumed="Azure code arrivals. Off the peak: from when all its requests are served; gaps since then.",
    ),
    Experiment(
        id="fig17",
        figure="Oneiros, Fig 17",
        title="The remapped share capped or not",
        panels=(ALONE,),
        policies=(BASELINE, PAPERS_OWN, _OWN_UNCAPPED, WEIGHTS_ONLY, "remap:weights+uncapped"),
        reckonings=(
            Reckoning("oneiros-29", _TBT, _OWN_UNCAPPED, (PAPERS_OWN,)),
            Reckoning("oneiros-30", "tbt_p50_reduction", _OWN_UNCAPPED, (PAPERS_OWN,)),
        ),
        stated="OPT-13b, Alpaca, 10 requests a second: P99 58 % and P50 44 % lower with the cap.",
        assumed="Latency: TBT. Azure code arrivals.",
    ),
    Experiment(
        id="algorithm-1",
        figure="Oneiros, Algorithm 1",
        title="As it is printed: one layer a step, at most as many as a pass hides, one buffer or two",
        panels=(C1[1], C2[1]),
        policies=(BASELINE, PAPERS_OWN, WEIGHTS_ONLY, ALGORITHM_1),
        comparisons=tuple(
            Comparison(ALGORITHM_1, base, (_TBT, _TPOT, _TTFT, _RATE)) for base in (BASELINE, PAPERS_OWN)
        ),
        stated="The pseudo-code of section 5.5; the cap T_T N <= T_Compute of 5.3; m = alpha + 1 or alpha + 2 of 5.4.",
        assumed="What the pseudo-code contradicts the text in, or is silent about: see "
        "[algorithm_1.py](../lab/paper/algorithm_1.py).",
        factors=_NEAR,
    ),
    Experiment(
        id="oneiros-all",
        figure="Oneiros, abstract",
        title="The ranges over all experiments",
        panels=(*C1, *C2, *UNEQUAL, *LONG_SHORT, *C1_MPS, *C1_MIG),
        policies=(BASELINE, PAPERS_OWN, WEIGHTS_ONLY, IDEAL),
        factors=(1.0,),
        reckonings=(
            Reckoning("oneiros-01", _TBT, how="range"),
            Reckoning("oneiros-02", _TTFT, how="range"),
            Reckoning("oneiros-03", _RATE, how="range"),
        ),
        stated="Lowest and highest of the averages of Figs 8-10, 12 and 13.",
    ),
)

_BEYOND = (
    Experiment(
        id="beyond-lending",
        figure="remap",
        title="Models that lend each other layers and KV, against every model for itself",
        panels=(*C1, *C2),
        policies=(BASELINE, WEIGHTS_ONLY, "remap:weights+self"),
        comparisons=(Comparison(WEIGHTS_ONLY, "remap:weights+self", (_TBT, _TTFT, _RATE, _GOOD, "preemptions_cut")),),
        factors=_SOME,
        group="beyond",
    ),
    Experiment(
        id="beyond-ideal",
        figure="remap",
        title="What memory is worth: recompute with six times as much, and how far the others come",
        panels=(C1[1], C2[1]),
        policies=(BASELINE, "swap", UNUSED_KV, UNUSED_KV_AND_SWAP, PAPERS_OWN, WEIGHTS_ONLY, OURS, IDEAL),
        comparisons=tuple(
            Comparison(OURS, base, (_TBT, _TPOT, _TTFT, _RATE, _GOOD)) for base in (UNUSED_KV_AND_SWAP, BASELINE)
        ),
        factors=_SOME,
        group="beyond",
    ),
    Experiment(
        id="beyond-alone",
        figure="remap",
        title="One model alone: streaming weights, against other ways to have more KV",
        panels=(ALONE, ALONE_CHAT),
        policies=(BASELINE, "swap", "pie", "static", KV_STREAM, WEIGHTS_ONLY, OURS, IDEAL),
        comparisons=tuple(
            Comparison(OURS, base, (_TBT, _TPOT, _TTFT, _RATE, _GOOD)) for base in ("swap", "pie", "static", KV_STREAM)
        ),
        factors=_SOME,
        group="beyond",
    ),
    Experiment(
        id="beyond-turns",
        figure="remap",
        title="Turns of 1 s, 0.1 s and 0.02 s: how much of the time between tokens is waiting for one's turn",
        panels=(C1[1], *TURNS),
        policies=(BASELINE, WEIGHTS_ONLY),
        comparisons=(Comparison(WEIGHTS_ONLY, BASELINE, (_TBT, _TPOT, _TTFT, _RATE, _GOOD, "preemptions_cut")),),
        factors=_SOME,
        group="beyond",
    ),
    Experiment(
        id="beyond-budget",
        figure="remap",
        title="Idle models whose next first token may be 0.1 s late, against none that may be late",
        panels=(*C1, *C2),
        policies=(BASELINE, WEIGHTS_ONLY, "remap:weights+reload_s=0"),
        comparisons=(
            Comparison(WEIGHTS_ONLY, "remap:weights+reload_s=0", (_TBT, _TPOT, _TTFT, _RATE, _GOOD, "preemptions_cut")),
        ),
        factors=_SOME,
        group="beyond",
    ),
    Experiment(
        id="beyond-slices",
        figure="remap",
        title="A slice of every layer, and nested sets of layers, against evenly spaced layers",
        panels=(ALONE, ALONE_CHAT),
        policies=(
            BASELINE,
            "remap:weights+uniform",
            "remap:weights+nested",
            "remap:weights+slices",
            "remap:weights+auto",
        ),
        comparisons=tuple(
            Comparison(test, "remap:weights+uniform", (_TBT, _TTFT, _RATE, _GOOD, "stall_cut"))
            for test in ("remap:weights+slices", "remap:weights+nested", "remap:weights+auto")
        ),
        factors=_SOME,
        group="beyond",
    ),
    Experiment(
        id="beyond-certificate",
        figure="remap",
        title="Growth bounded by the stall that it would cause, against growth as asked",
        panels=(ALONE, ALONE_CHAT),
        policies=(BASELINE, WEIGHTS_ONLY, "remap:weights+uncapped"),
        comparisons=(
            Comparison(
                WEIGHTS_ONLY, "remap:weights+uncapped", (_TBT, "tbt_p50_reduction", _TTFT, _RATE, _GOOD, "stall_cut")
            ),
        ),
        factors=_SOME,
        group="beyond",
    ),
    Experiment(
        id="beyond-reversion",
        figure="remap",
        title="Layers come home when their rent is paid, against at once and against never",
        panels=(PEAK_QUIET,),
        policies=(BASELINE, WEIGHTS_ONLY, "remap:weights+eager-reversion", "remap:weights+no-reversion"),
        comparisons=tuple(
            Comparison(WEIGHTS_ONLY, base, ("tbt_p50_reduction", "tbt_mean_reduction", _TBT, "decisions_cut"))
            for base in ("remap:weights+eager-reversion", "remap:weights+no-reversion")
        ),
        group="beyond",
    ),
    Experiment(
        id="beyond-pool",
        figure="remap",
        title="Three quarters of the KV reservations as a pool, against reservations of one's own",
        panels=(C1[1], C2[1]),
        policies=(BASELINE, WEIGHTS_ONLY, "remap:weights+pool"),
        comparisons=(Comparison("remap:weights+pool", WEIGHTS_ONLY, (_TBT, _TTFT, _RATE, _GOOD, "preemptions_cut")),),
        factors=_SOME,
        group="beyond",
    ),
    Experiment(
        id="beyond-around",
        figure="remap",
        title="A waking model streams around what lies in its pages, against preempting it",
        panels=C1,
        policies=(BASELINE, WEIGHTS_ONLY, "remap:weights+preempt"),
        comparisons=(
            Comparison(
                WEIGHTS_ONLY, "remap:weights+preempt", (_TBT, _TTFT, _RATE, _GOOD, "preemptions_cut", "stall_cut")
            ),
        ),
        factors=_SOME,
        group="beyond",
    ),
)
EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType({one.id: one for one in (*_LIST, *_BEYOND)})
