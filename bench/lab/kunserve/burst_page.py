"""The page of the map of bursts, from what is stored, and the command that writes it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill

from bench.lab import seeds
from bench.lab.paper.pictures import save
from bench.lab.seeds import Column, Point

from .burst_map import (
    BASE,
    BOUND,
    CLAIMED,
    PAPERS,
    TESTS,
    BurstMap,
    Place,
    claimed_at,
    compared_table,
    little,
    most_share,
    picture,
    places_of,
    read,
    run,
    table,
)
from .figures import name_of

__all__ = ["page", "run_burst_map", "said", "steady"]

PAGE = """# How much sooner first tokens come when layers are dropped: a question of load

P99 time to the first token under vLLM's recomputation (`{base}`), over that of `kunserve` (the paper's policy), `remap` (ours)
and `{bound}` (`{base}` with six times the KV): how many times lower it is. Virtual time, the clusters and requests of
[kunserve.md](kunserve.md): the median of the seeds, (lowest to highest). **n says how many seeds a load has until now, of
{seeds}**: the command goes on where it was stopped, and equal settings give equal figures. Arrivals for 130 s and more, twice as
many for 60 s from 45 s on; a dispatcher that counts whole lines. "answers x4": BurstGPT's answers, four times as long. Made
by `python -m bench.lab kunserve-map`.

Peak demand: the KV that running requests and the heads of lines hold under `{bound}`, at most, over what `{base}` has. Busy: the
work that `{bound}` does in the burst (each prompt as if alone, each token as a row more of a large batch), over the devices'
time in it.

![The map]({picture})

A dot is a load of the first table, a diamond one of the second. The axes do not decide alone: LongBench's prompts are ten times
as long as BurstGPT's, and wait for computation at places where others do not.

{table}

{text}

## Where the paper's point lies

{where}

## How long a burst lasts

"7 times for 10 s", "3 times for 30 s": as many requests more as 60 s of twice as many bring. Without that, twice as many.

{shapes}

{shapes_text}

## Which dispatcher

One counts whole lines; one the KV of what runs and of the head of the line alone, as Llumnix and the paper have it ("by demand");
one goes round, as often as there is room ("in turn").

{dispatched}

{dispatched_text}

## Merging by a forecast, and more instances

A drop for what is lacking at the moment leaves one pair with room, to which all new prompts go: they wait for its computation
until the next pair merges. That is why `remap` and `kunserve` fall short of `{bound}` with some seeds of "x2, 26/s" and
"x4, 18/s". `kunserve-ahead` and `remap-ahead` merge by a forecast, when demand would be above the KV in 2 s, and as many as
30 s will need, but no groups longer than pairs for that alone. What wrong forecasts cost is bounded
([foresight.py](../../src/remap_serve/policy/cluster/foresight.py)). The 2 s and 30 s were chosen on seed 0 of three of these
loads.

"more instances after 30 s": an autoscaler starts as many as `Control.lacking` says, four at most, and each joins 30 s later.

{compared}

{compared_text}

## A rule that was tried and not kept

Deep pipelines do harm where they do not free enough, so control might not merge while no merger would free enough. `remap-ahead`
with such rules, P99 TTFT in s, by seed from 0 on (27 November 2026; single runs, not stored; –: not run):

| rule | "130 s" | BurstGPT, 14B | LongBench, 14B |
|---|---|---|---|
| none | 165, 169, 166 | 4.11, 4.50, 4.21, 4.25, 3.25 | 5.55, 4.09, 5.13, 5.15, 4.76 |
| no merger while `Control.lacking` is above 0 | 166, –, – | 4.76, 5.57, 5.39, 5.06, 4.07 | – |
| pairs at most, once 30 s ahead lacks | 161, 156, 151 | 8.44, 13.6, 10.9, 8.38, 8.08 | 5.55, 4.09, 10.2, 5.35, 4.76 |
| pairs at most, while 10 s ahead lacks | –, 168, – | –, 4.64, 4.21 | – |
| pairs at most, while 5 s ahead lacks | –, 169, – | –, 4.50, 4.21 | – |

"30 s ahead lacks": by the forecast, demand will be above what all instances have at most, whichever merge; that is when
`Control.lacking` of a policy with a forecast is above 0. "once": until demand is below 75 % of what they have alone.

The plain rule, the second line, is worse in each seed: mergers wait until the straight line is flatter, and come all the same.
Without the forecast it would never act: control merges while demand rises, and in 19 runs (all five seeds of both and of "x2,
26/s", three of "130 s", one of "x4, 18/s") it decided no merger when tokens were lacking at that moment. Pairs at most would be
right in "130 s": P99 TTFT is about that of `vllm` (147, 159, 164 s), and tokens/s are 5 to 10 % more than without the rule. But
at the last merger the forecast says as much where the burst ends a few seconds later: 318 to 498 thousand tokens would be
lacking in 30 s in "BurstGPT, 14B", up to 625 in "LongBench, 14B", 551 to 601 in "130 s"; and without that merger P99 TTFT
doubles or triples. What tells them apart is how long the burst will last, which nobody knows then. A rule that goes back to
smaller groups once the lack has come would have to preempt what runs in the room that it gives up. That was not built: what
helps there is instances.

## An exact search, and when to go back

`remap` looks at every partition of up to eight instances, and dissolves a group by ski rental. With each replaced, the loads of
the first table and two of [kunserve.md](kunserve.md), P99 TTFT over that of `remap`, five seeds each, median (lowest to highest)
(28 November 2026; not stored; with `EXACT` of [drop.py](../../src/remap_serve/policy/cluster/drop.py) 0, stages still
tried in as many orders as for eight, and with `Control._pays` of "kunserve"):

| load | the better of greedy and equal sizes | below half of the KV (the paper's) |
|---|---|---|
| BurstGPT, 14B | 0.91 (0.88 to 1.01) | 1.00 |
| ShareGPT, 14B | 1.18 (0.94 to 1.25) | 1.00 |
| LongBench, 14B | 1.00 (1.00 to 1.21) | 1.00 (0.99 to 1.07) |
| LongBench, 72B | 1.00 (1.00 to 2.02) | 1.00 |
| the five with longer answers | 1.00 (1.00 to 1.22) | 1.00 |
| LongBench, 14B, two bursts | – | 1.00 (0.92 to 1.13) |
| LongBench, 72B, no end | – | 1.00 |

Neither is worth much here: without the search medians are better once and worse once, without ski rental they are equal. The
search stays for its worst seeds (without it P99 TTFT was twice as high in one of LongBench, 72B, and at best 12 % lower), and ski
rental for what it bounds: where demand stays between half of the KV and all of it the paper's rule never goes back. No load here
is of that kind. With two bursts the paper's rule has a P50 TTFT of 0.93 (0.87 to 1.07) times, a P50 TPOT of 0.97 (0.96 to 1.02).

## What was not measured

{missing}A800 and H800 are taken as their tables have them (`remap plan --machine A800-80GB` prints the sources).
"""
NEAR = """At the loads of Figs 12 and 13 bursts keep the devices {busy} % busy; six times the KV brings {bound} times, so
no memory system could bring 12.7. With longer answers at lower rates, in {reached} of {longer} loads ({peak} times the KV
asked for, {near} % busy), unchanged code brings {kunserve} times (`kunserve`) and {remap} (`remap`), about as much as
`ideal` ({ideal}). These are medians: single seeds go from {single} with `remap`, and `kunserve` is ahead of `ideal` in {ahead} of
{seeds} seeds with longer answers."""
FAR = """ In the other ({far} % busy) seeds differ: `kunserve` {kunserve}, `remap` {remap}."""
WHERE = """ The paper's bursts ask for 1 to 1.57 times the KV; how busy devices are it does not say: by this map, at
most {most} %."""
POINT = """A typical burst of the paper "introduces an accumulation of 243 K tokens per GPU", which is all the KV that our
instances have, and dropping 57 % more was enough (sections 2.2 and 5.6): so 1 to 1.57 times the KV. Its 12.7 to 72.2
times are in the grey box: {count} of the loads that ask for so much have such a ratio under `kunserve`, and are {busy} %
busy. The paper does not say how busy its devices are. If its requests stay for 11 s, as section 2.2 has it, and there is
2.1 times the KV that is asked for in the mean, then by Little's law {rate} requests of BurstGPT's mean lengths come in a
second, and by our roofline eight A800 would be {mean} % busy in the mean, twice that in a burst. Those cannot be of one
run: the 11 s may be the trace's. So either answers were longer, or KV was scarcer, than the mean lengths say."""
SHAPES = """As many requests in a shorter burst ask for as much KV, and prompts wait for computation: with {steep}, `ideal` has
{bound} s at P99. Twice as many for 10 s fill {share} % of the KV, and nothing is to be won. **Beyond what dropping frees it does
harm**: in 130 s demand is {peak} times the KV, eight instances as one group have {most} times, and P99 TTFT is {kunserve} s with
`kunserve` and {remap} s with `remap`, where `vllm` has {base}: pipelines are slower, and requests are preempted all the same."""
STEADY = """**A burst at 45 s meets few that run.** Answers x4 stay for about {stay} s with `ideal`, so at {high} requests/s
demand goes on rising behind the burst: with seeds 0 and 1 it is 0.3 times the KV when the burst begins, and 1.3 and 1.5 times at
439 s, long after it (not stored). In the paper's 640 s, with its second burst at 440 s, it is {peak} times the KV at most, beyond
what dropping frees, and P99 TTFT under `vllm` is {times} times that of `kunserve` and `remap`. At rates at which KV is short in
bursts alone it is a matter of how short: {rates}. **So in long runs the paper's times are near the edge of what dropping
frees**: a little beyond it they are gone, and seeds differ in which side they are on."""
STEADY_RATE = (
    "at {rate:g}/s, {peak:.2f} times the KV, {kunserve} with `kunserve`, {remap} with `remap` and {ideal} with `ideal`"
)
EDGE = """In the paper's 640 s (answers x4) it is {times} times at {rates}/s (`kunserve`): the edge of what dropping frees."""
DISPATCHED = """By demand alone, `vllm` has {demand} s at P99 where whole lines have {lines}, and in turn {turns}. `kunserve` and
`remap` depend on it more: {ours_lines} s with whole lines, {ours_demand} by demand, which does not see who waits behind the head,
{ours_turns} in turn, which does not see who has room. The paper's dispatcher is Llumnix's."""
COMPARED_TEXT = """P99 TTFT of `remap` is lower with the forecast in {lower} of {runs} runs, equal in {equal} and higher
in {higher}. In the loads where `remap` was more than a tenth above `ideal` in the worst seed ({short}), the worst seed has
{before} s without it and {after} s with it (`ideal`: {bound}). The price: P50 TPOT {p50} % and P99 TPOT {p99} %, by load. For a
demand that no drop can free it changes nothing (130 s). There instances help: four more after 30 s bring P99 TTFT of
`remap-ahead` from {few} to {more} s, and that of `vllm` from {base_few} to {base_more} (n = {scaled})."""


def said(places: Sequence[Place]) -> str:
    """What follows, as a paragraph: of loads at which every seed reaches the paper's least, and of the others."""
    of_paper = [one for one in places if one.load.name in PAPERS]
    longer = [one for one in places if one.load.name not in PAPERS]
    near = [one for one in longer if min(one.times["kunserve"]) >= CLAIMED[0]]
    far = [one for one in longer if one not in near]
    if not (of_paper and near):
        return ""
    pairs = [pair for one in longer for pair in zip(one.times["kunserve"], one.times[BOUND], strict=True)]
    text = NEAR.format(
        busy=_ends((100 * one.work for one in of_paper), ".0f"),
        bound=_ends(_median_of(of_paper, BOUND)),
        reached=len(near),
        longer=len(longer),
        peak=_ends((one.peak for one in near), ".3g"),
        near=_ends((100 * one.work for one in near), ".0f"),
        single=_ends(value for one in near for value in one.times["remap"]),
        ahead=sum(mine > bound for mine, bound in pairs),
        seeds=len(pairs),
        **{system: _ends(_median_of(near, system)) for system in TESTS},
    )
    if far:
        text += FAR.format(
            far=_ends((100 * one.work for one in far), ".0f"),
            **{system: _ends(value for one in far for value in one.times[system]) for system in TESTS},
        )
    text += WHERE.format(most=f"{max(100 * one.work for one in near):.0f}")
    return fill(" ".join(text.split()), 120)


def _median_of(places: Sequence[Place], system: str) -> list[float]:
    return [statistics.median(one.times[system]) for one in places]


def _ends(values: Iterable[float], digits: str = ".2g") -> str:
    """ "2 to 4.6"."""
    found = list(values)
    return " to ".join(
        dict.fromkeys(f"{value:{digits if value < 99.5 else '.0f'}}" for value in (min(found), max(found)))
    )


def _p99(points: Mapping[str, Point], load: str, system: str, chosen: BurstMap) -> dict[int, Point]:
    """By seed, as far as it was run."""
    names = {seed: name_of(load, system, seed) for seed in range(chosen.settings.seeds)}
    return {seed: points[name] for seed, name in names.items() if name in points}


def _median(points: Mapping[str, Point], load: str, system: str, chosen: BurstMap, key: str = "ttft_p99_s") -> float:
    return statistics.median(one[key] for one in _p99(points, load, system, chosen).values())


def _where(places: Sequence[Place]) -> str:
    busy = claimed_at(places)
    if not busy:
        return ""
    rate, share = little()
    text = POINT.format(
        count=len(busy), busy=_ends((100 * one for one in busy), ".0f"), rate=f"{rate:.0f}", mean=f"{100 * share:.0f}"
    )
    return fill(" ".join(text.split()), 120)


def _shapes(places: Sequence[Place]) -> str:
    """Of bursts of other lengths, by what they are: the steepest, the shortest, the one beyond what dropping frees."""
    steep = next((one for one in places if one.load.times == 7.0), None)
    short = next((one for one in places if one.load.burst_s == 10.0 and one.load.times == 2.0), None)
    far = next((one for one in places if one.load.burst_s == 130.0), None)
    if steep is None or short is None or far is None:
        return ""

    def p99(one: Place, system: str) -> str:
        found = [base / times for base, times in zip(one.base_s, one.times[system])]
        return f"{statistics.median(found):.3g}"

    text = SHAPES.format(
        steep="7 times the requests for 10 s",
        bound=p99(steep, BOUND),
        share=f"{100 * short.peak:.0f}",
        peak=f"{far.peak:.2f}",
        most=f"{most_share(far.load.hardware):.2f}",
        kunserve=p99(far, "kunserve"),
        remap=p99(far, "remap"),
        base=f"{statistics.median(far.base_s):.3g}",
    )
    return fill(" ".join(text.split()), 120)


def steady(places: Sequence[Place], points: Mapping[str, Point], chosen: BurstMap) -> str:
    """Of runs that are long enough for as many requests to run as will: the highest rate, and the others."""
    long = _long(places)
    if len(long) < 2:
        return ""
    high, *others = long
    tokens = statistics.fmean(item.output_tokens for item in high.load.requests(0, chosen.settings.quick))
    text = STEADY.format(
        stay=f"{_median(points, high.load.name, BOUND, chosen, 'tpot_p50_s') * tokens:.0f}",
        high=f"{high.load.rate:g}",
        peak=f"{high.peak:.2f}",
        times=" and ".join(_cell(high.times[system]) for system in ("kunserve", "remap")),
        rates="; ".join(
            STEADY_RATE.format(
                rate=one.load.rate, peak=one.peak, **{system: _cell(one.times[system]) for system in TESTS}
            )
            for one in reversed(others)
        ),
    )
    return fill(" ".join(text.split()), 120)


def edge(places: Sequence[Place]) -> str:
    """The same in a sentence, of one system."""
    long = _long(places)[::-1]
    text = EDGE.format(
        times=_listed(f"{statistics.median(one.times['kunserve']):.2g}" for one in long),
        rates=_listed(f"{one.load.rate:g}" for one in long),
    )
    return fill(text, 120)


def _long(places: Sequence[Place]) -> list[Place]:
    """Of the paper's 640 s, with two bursts; the highest rate first."""
    return sorted((one for one in places if len(one.load.at) > 1), key=lambda one: -one.load.rate)


def _listed(items: Iterable[str]) -> str:
    *before, last = items
    return f"{', '.join(before)} and {last}"


def _cell(values: Sequence[float]) -> str:
    return seeds.cell(values, Column("", ""))


def _dispatched(places: Sequence[Place]) -> str:
    of = {one.load.dispatcher: one for one in places}
    if not {"lines", "demand", "turns"} <= of.keys():
        return ""

    def ours(one: Place) -> str:
        medians = [
            statistics.median(base / times for base, times in zip(one.base_s, one.times[system]))
            for system in ("kunserve", "remap")
        ]
        return _ends(medians)

    text = DISPATCHED.format(
        **{name: f"{statistics.median(one.base_s):.3g}" for name, one in of.items()},
        **{f"ours_{name}": ours(one) for name, one in of.items()},
    )
    return fill(" ".join(text.split()), 120)


def _compared(points: Mapping[str, Point], chosen: BurstMap) -> str:
    """What merging by a forecast changes, seed by seed, and what more instances do."""
    loads = [load for load, _ in chosen.compared]
    if not loads or not all(_p99(points, load.name, "remap-ahead", chosen) for load in loads):
        return ""
    *plain, long, scaled = [load.name for load in loads]
    runs: list[tuple[float, float]] = []
    before, after, bound, short = [], [], [], []
    for load in plain:
        by = {
            system: {seed: one["ttft_p99_s"] for seed, one in _p99(points, load, system, chosen).items()}
            for system in ("remap", "remap-ahead", BOUND)
        }
        runs += [(by["remap"][seed], value) for seed, value in by["remap-ahead"].items() if seed in by["remap"]]
        worst = {system: max(found.values()) for system, found in by.items()}
        if worst["remap"] > 1.1 * worst[BOUND]:
            short.append(load)
            before.append(worst["remap"])
            after.append(worst["remap-ahead"])
            bound.append(worst[BOUND])
    more = {
        key: [
            100 * (_median(points, load, "remap-ahead", chosen, key) / _median(points, load, "remap", chosen, key) - 1)
            for load in plain
        ]
        for key in ("tpot_p50_s", "tpot_p99_s")
    }
    # Of the seeds that have all four.
    of = {
        (load, system): _p99(points, load, system, chosen)
        for load in (long, scaled)
        for system in (BASE, "remap-ahead")
    }
    same = set.intersection(*(set(found) for found in of.values()))
    late = {key: f"{statistics.median(found[seed]['ttft_p99_s'] for seed in same):.3g}" for key, found in of.items()}
    text = COMPARED_TEXT.format(
        lower=sum(new < old for old, new in runs),
        equal=sum(new == old for old, new in runs),
        higher=sum(new > old for old, new in runs),
        runs=len(runs),
        short="; ".join(load.removeprefix("BurstGPT, 14B, answers ") for load in short),
        before=", ".join(f"{one:.3g}" for one in before),
        after=", ".join(f"{one:.3g}" for one in after),
        bound=", ".join(f"{one:.3g}" for one in bound),
        p50=_signed(more["tpot_p50_s"]),
        p99=_signed(more["tpot_p99_s"]),
        few=late[long, "remap-ahead"],
        more=late[scaled, "remap-ahead"],
        base_few=late[long, BASE],
        base_more=late[scaled, BASE],
        scaled=len(same),
    )
    return fill(" ".join(text.split()), 120)


def _signed(values: Sequence[float]) -> str:
    """ "-3.1 to +4.2"."""
    return f"{min(values):+.2g} to {max(values):+.2g}".replace("-", "\N{MINUS SIGN}")


def _missing(points: Mapping[str, Point], chosen: BurstMap) -> str:
    """The loads of which no seed is whole, and how many runs are not there."""
    loads = (*chosen.loads, *chosen.dispatched, *chosen.shapes)
    there = [one.load for one in places_of(points, chosen, loads)]
    none = "; ".join(f'"{load.name}"' for load in loads if load not in there)
    left = sum(name not in points for name in chosen.runs())
    found = f"No seed of {none}. " if none else ""
    return fill(f"{found}{left} of {len(chosen.runs())} runs are not there yet.", 120) + "\n" if left else ""


def page(points: Mapping[str, Point], chosen: BurstMap, drawing: str) -> tuple[str, list[Place], list[Place]]:
    """The whole page of what is stored, and what its picture is of: the map's loads, and bursts of other lengths."""
    places, shapes = places_of(points, chosen), places_of(points, chosen, chosen.shapes)
    middle = [load for load in chosen.loads if any(other.rate == load.rate for other in chosen.dispatched)]
    dispatched = places_of(points, chosen, [*middle, *chosen.dispatched])
    text = PAGE.format(
        base=BASE,
        bound=BOUND,
        seeds=chosen.settings.seeds,
        picture=drawing,
        table=table(places),
        text=said(places),
        where=_where((*places, *shapes)),
        shapes=table(shapes),
        shapes_text="\n\n".join(filter(None, (_shapes(shapes), steady(shapes, points, chosen)))),
        dispatched=table(dispatched),
        dispatched_text=_dispatched(dispatched),
        compared=compared_table(points, chosen),
        compared_text=_compared(points, chosen),
        missing=_missing(points, chosen),
    )
    return text, places, shapes


def run_burst_map(results: Path, drawing: Path, chosen: BurstMap, *, jobs: int = 1, report_only: bool = False) -> str:
    """Run what `results` lacks, and write the page beside it, and the picture. Returns the page. Raises InvalidArgument (field
    path) for a file of something else, before anything runs."""
    data, points = read(results, chosen)
    if not report_only:
        seeds.run_missing(data, chosen.runs(), results, jobs, run)
        points |= data["points"]
    shown = drawing.name if drawing.parent == results.parent else f"{drawing.parent.name}/{drawing.name}"
    text, places, shapes = page(points, chosen, shown)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    save(picture(places, shapes), drawing)
    return text
