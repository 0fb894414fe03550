"""docs/notes/paper-vs-ours.md: a table and a paragraph for each of four papers, from stored results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench.lab import ROOT
from bench.lab.hybridserve import figures as hybridserve
from bench.lab.kunserve import burst_map, burst_page
from bench.lab.kunserve import figures as kunserve
from bench.lab.paper.experiment_list import C1, C2, UNEQUAL
from bench.lab.paper.experiments import ALGORITHM_1, BASELINE, FACTORS, IDEAL, Headline, headlines
from bench.lab.pie import figures as pie

from remap_serve.sim.policies import UNUSED_KV_AND_SWAP

from . import words
from .numbers import (
    Oneiros,
    Stored,
    above_bound,
    bursts_of,
    closed_form_less,
    engine_gains,
    flexgen_of,
    gap_closed,
    headline_gaps,
    hybridserve_of,
    kunserve_of,
    mixtures,
    number,
    offline_best,
    over_kv,
    parts_worth,
    pie_at_3c,
    pie_of,
    preemptions_fewer,
    times,
)

__all__ = ["PAGE", "page", "write"]

PAGE = ROOT / "docs" / "notes" / "paper-vs-ours.md"
RESULTS = "../../bench/results"
"""As docs/notes links to it."""
NONE = "–"
_FIGURES_8_TO_13 = ("oneiros-04", "oneiros-07", "oneiros-10", "oneiros-13", "oneiros-16", "oneiros-19")
"""The first of three headlines each: P99 TBT, P99 TTFT, tokens/s."""


def _table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [titles, *lines]
    out = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([out[0], "|" + "---|" * len(titles), *out[1:]])


def _cell(values: Iterable[float | None]) -> str:
    """ "−132; 49; 1.1": what is missing is left out."""
    return "; ".join(number(value) for value in values if value is not None) or NONE


def _ends(values: Sequence[float]) -> str:
    """ "40 to 46"."""
    return f"{number(min(values))} to {number(max(values))}"


# ---------------------------------------------------------------------------------------------- Oneiros


def _three(id: str) -> tuple[str, ...]:
    """The headlines of P99 TBT, P99 TTFT and tokens/s, by the first."""
    first = int(id.rpartition("-")[2])
    return tuple(f"oneiros-{first + step:02d}" for step in range(3))


def oneiros(stored: Stored) -> str:
    found = Oneiros(stored)
    layers = [
        found.median("OPT-13b Alpaca", 1.0, f"remap:weights+uniform+{buffers}", "layers_remapped_peak")
        for buffers in ("single", "double")
    ]
    waits = [
        100 * found.median("OPT-13b Alpaca", 1.0, f"remap:weights+uniform+{buffers}", "stall_fraction")
        for buffers in ("single", "double")
    ]
    tbt = "tbt_p99_reduction"
    shorter = [found.cut(UNEQUAL[1], factor, tbt) for factor in (1.5, 2.0)]
    longer = [-found.cut(UNEQUAL[0], factor, tbt) for factor in (1.5, 2.0)]
    at_peak = found.ours("oneiros-28").value
    assert at_peak is not None
    lines: list[tuple[str, tuple[str, ...], str]] = [
        (
            "8, C1",
            _three("oneiros-04"),
            "More requests run: see below",
        ),
        ("8, C2", _three("oneiros-07"), "The same; tokens/s come out at 2 c"),
        (
            "9, unequal",
            _three("oneiros-10"),
            f"The same. P99 TBT from 1.5 c on: {_ends(shorter)} % lower at 1:4, {_ends(longer)} % higher at 4:1",
        ),
        ("10, long and short", _three("oneiros-13"), "The same"),
        ("12, MPS", _three("oneiros-16"), "More requests run at once, side by side, so passes are longer"),
        ("13, MIG", _three("oneiros-19"), "The same"),
        (
            "11, which donor; tail lower, up to",
            ("oneiros-22",),
            "Not explained: both orders wait and preempt alike at most rates",
        ),
        (
            "14, against Pie",
            _three("oneiros-23"),
            "At most 256 requests run, so even `ideal` wins little",
        ),
        (
            "15, one buffer for two; tokens/s less, up to",
            ("oneiros-26",),
            f"With one we stream fewer layers ({layers[0]:.0f} for {layers[1]:.0f} at c), so passes wait less "
            f"({number(waits[0])} for {number(waits[1])} %)",
        ),
        ("16, layers come home; P50 TBT lower", ("oneiros-27",), "Near"),
        (
            "16, at the peak, about",
            ("oneiros-28",),
            f"Not explained; seeds from {number(at_peak.low)} to {number(at_peak.high)}",
        ),
        ("16, late; P50 TBT higher, up to", ("oneiros-37",), "Reached"),
        (
            "17, capped share; P99 and P50 TBT lower",
            ("oneiros-29", "oneiros-30"),
            f"The paper has one rate, ours are {_word(found.ours('oneiros-29').rates)}",
        ),
    ]
    rows = []
    for title, ids, why in lines:
        ours = [found.ours(id) for id in ids]
        ideals = [found.ideal(id) for id in ids] if len(ids) == 3 else []
        paper = [f"{headlines()[id].most:g}" for id in ids]
        if len(ids) == 3:  # the requests' mean gaps beside the gaps
            paper.insert(1, NONE)
            ours.insert(1, found.tpot(ids[0]))
            ideals.insert(1, found.tpot(ids[0], IDEAL).mean)
        means = [one.mean.median if one.mean else None for one in ours]
        best = [one.value.median if one.value else None for one in ours]
        if means == [None]:  # Figure 16 at the peak has a mean alone
            means, best = best, means
        ideal = _cell(one.median if one else None for one in ideals)
        rows.append((title, "; ".join(paper), _cell(means), _cell(best), ideal, why))
    titles = ("Fig.", "Oneiros", "ours, mean", "ours, best", "`ideal`", "why they differ")
    gaps = headline_gaps(stored)
    worse = [100 * (one[IDEAL] / one[BASELINE] - 1) for one in gaps.values()]
    ttft = [found.ours(_three(id)[1]) for id in _FIGURES_8_TO_13]
    ttft_means = [one.mean.median for one in ttft if one.mean]
    ttft_best = [one.value.median for one in ttft if one.value]
    c2, mixed = found.ours("oneiros-09").value, found.ours("oneiros-15").value
    c2_gaps = [
        100 * (1 - one[UNUSED_KV_AND_SWAP] / one[BASELINE]) for (load, _), one in gaps.items() if load == C2[1].name
    ]
    assert c2 is not None and mixed is not None
    run_ideal = [
        [found.cut(panel, factor, metric, IDEAL) for panel, factor in found.loads_of(IDEAL)]
        for metric in (tbt, "tpot_p99_reduction")
    ]
    printed = found.loads_of(ALGORITHM_1)
    return words.ONEIROS.format(
        results=RESULTS,
        oneiros_requests=f"{stored.oneiros.settings.requests:,}",
        table=_table(titles, rows),
        ttft_least=number(min(ttft_means)),
        ttft_most=number(max(ttft_means)),
        ttft_best=number(max(ttft_best)),
        c2_tokens=number(c2.median),
        mixed_tokens=number(mixed.median),
        worse=_word(sum(one > 0 for one in worse)),
        loads=_word(len(worse)),
        worse_least=number(min(worse)),
        worse_most=number(max(worse)),
        ideal_better=_word(sum(one >= 1 for one in run_ideal[0])),
        ideal_tpot=_word(sum(one >= 1 for one in run_ideal[1])),
        ideal_loads=_word(len(run_ideal[0])),
        printed_ttft=_ends([found.cut(*each, "ttft_p99_reduction", ALGORITHM_1) for each in printed]),
        printed_tpot=_ends([found.cut(*each, "tpot_p99_reduction", ALGORITHM_1) for each in printed]),
        printed_waits=_ends(
            [100 * found.median(panel.name, factor, ALGORITHM_1, "stall_fraction") for panel, factor in printed]
        ),
        ours_ttft=_ends([found.cut(*each, "ttft_p99_reduction") for each in printed]),
        pool_c2=_ends(c2_gaps),
        c1_tpot=" and ".join(number(found.cut(C1[1], factor)) for factor in (0.7, 1.0)),
        c1_others=_ends([found.cut(C1[1], factor) for factor in FACTORS if factor not in (0.7, 1.0)]),
        c2_tpot=_ends([found.cut(C2[1], factor) for factor in FACTORS if factor >= 0.2]),
        fig9_tpot=_ends([found.cut(UNEQUAL[1], factor) for factor in FACTORS if factor >= 0.3]),
    )


def _word(count: int) -> str:
    return ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")[count] if count < 9 else str(count)


# ---------------------------------------------------------------------------------------------- KunServe

_KUNSERVE: tuple[tuple[str, str, str, str], ...] = (
    ("12, 13: P99 TTFT, times lower, 14B", "01", "", "Bursts saturate computing here: see below"),
    ("12, 13: the same, 72B", "05", "", "The same"),
    ("13: P50 TPOT, % more, LongBench 14B", "04", "", "Near"),
    ("14: bubbles with lookahead, %", "23", "bubbles with lookahead", "Hardly fewer than without it"),
    ("14, lookahead: tokens/s, % more", "24", "", "All systems keep up with arrivals"),
    ("16, restoring: P50 TTFT, % less", "26", "", "It lowers P50 TPOT instead"),
    ("17: time until memory is full, vLLM = 1", "30", "", "`kunserve` never fills it, `remap` in three seeds"),
    ("17: KV that dropping frees, %", "31", "", "Near"),
)


def _range(values: Sequence[float], show: Callable[[float], str] = number) -> str:
    """ "1.37 to 5.53"."""
    said = [NONE if math.isnan(value) else show(value) for value in values]
    return " to ".join(dict.fromkeys(said))


def kunserve_(stored: Stored) -> str:
    rows = []
    for title, id, about, why in _KUNSERVE:
        (claim,) = (one for one in kunserve.CLAIMS if one.id == id and one.about.startswith(about))
        show = times if "times" in claim.about or "P99 TTFT" in title or "vLLM = 1" in title else number
        theirs, *ours = (_range(kunserve_of(stored, id, system, about), show) for system in claim.systems)
        rows.append((title, claim.paper, theirs, ours[0] if ours else NONE, why))
    bursts = bursts_of(stored)
    titles = ("answers of BurstGPT, 14B", "seeds", "demand / KV", "busy, %", "`kunserve`", "`remap`", "`ideal`")
    places = [
        (
            *(
                one.load.name.removeprefix("BurstGPT, 14B, answers "),
                str(len(one.base_s)),
                f"{one.peak:.2f}",
                number(100 * one.work),
            ),
            *(times(statistics.median(values)) for values in one.times.values()),
        )
        for one in bursts
        if one.load.longer != 1.0
    ]
    return words.KUNSERVE.format(
        results=RESULTS,
        table=_table(("Fig.: what", "KunServe", "`kunserve`, simulated", "`remap`", "why they differ"), rows),
        map=_table(titles, places),
        map_text=burst_page.said(bursts),
        edge_text=burst_page.edge(burst_map.places_of(stored.burst_map, loads=burst_map.FULL.shapes)),
        preemptions=number(preemptions_fewer(stored)),
    )


# ---------------------------------------------------------------------------------------------- HybridServe

_HYBRIDSERVE: tuple[tuple[str, str, str], ...] = (
    ("12: tokens/s, FlexGen = 1", "hybridserve-01", "Beyond the bound, with one link for both"),
    ("12: the same, OPT-66B", "hybridserve-05", "Making K and V again grows faster with the model than loading"),
    (
        "12: activations alone, FlexGen = 1",
        "hybridserve-02",
        "By the roofline, large models make K and V more slowly than they load them",
    ),
    ("12: hybrid, activations alone = 1", "hybridserve-03", "Near"),
    ("3.1; 5.4: computing, FlexGen, % of the time", "hybridserve-10", "5.4 says 12.6. Attention moves KV three times"),
    ("13: bytes, times fewer, 32 and 64 requests", "hybridserve-14", "Near"),
    ("14: computing, %, 32 and 128 requests", "hybridserve-18", "Near with 32; not explained with 128"),
    ("15: 1:1, activations alone = 1", "hybridserve-19", "Near"),
    (
        "5.5: best KV by activations, 30B and 66B",
        "hybridserve-22",
        "By the roofline activations cost less than the paper has it",
    ),
)


def hybridserve_(stored: Stored) -> str:
    rows = []
    for title, id, why in _HYBRIDSERVE:
        (claim,) = (one for one in hybridserve.CLAIMS if one.headline == id)
        said = headlines()[id].value
        paper = "; ".join(f"{one:g}" for one in (said if isinstance(said, tuple) else (said,)))
        show = times if headlines()[id].unit.startswith(("x", ":")) else number
        theirs, *ours = ("; ".join(show(one) for one in hybridserve_of(stored, id, name)) for name in claim.systems)
        name = claim.systems[0]
        rows.append((title, paper, theirs if name == "paper" else f"`{name}` {theirs}", ours[0] if ours else NONE, why))
    ahead, batches, most = mixtures(stored)
    gains = engine_gains(stored)
    return words.HYBRIDSERVE.format(
        results=RESULTS,
        table=_table(("Fig. or section: what", "HybridServe", "`paper`, simulated", "ours", "why they differ"), rows),
        ahead=ahead,
        batches=batches,
        most=times(most),
        above=number(100 * (above_bound(stored) - 1.0)),
        engine=" and ".join(times(one) for one in gains),
        cases=_word(len(offline_best(stored))),
        flexgen=number(hybridserve_of(stored, "hybridserve-10", "FlexGen")[0]),
        gh200=number(100 * (over_kv(stored, "others", "GH200-96GB") - 1)),
        parts=number(100 * (parts_worth(stored) - 1.0)),
    )


# ---------------------------------------------------------------------------------------------- Pie

_PIE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("6: tokens/s, ShareGPT, OPT-30B; OPT-13B", ("pie-01", "pie-03"), "At any time: near"),
    ("6: Alpaca, OPT-30B; Llama-13B", ("pie-02", "pie-04"), "The same"),
    ("7: 3 to 12 GB, Alpaca; ShareGPT", ("pie-08", "pie-09"), "The adaptive rule is slow"),
    ("7: 12 GB", ("pie-10",), "Near"),
    ("8: OPT-30B, Alpaca; ShareGPT", ("pie-11", "pie-12"), "Near"),
    ("9a: tokens/s, % less than the best fixed", ("pie-15",), "Near"),
    ("9c: latency at 2.2, at 2.0 = 1", ("pie-17",), "At layer starts: reached"),
    ("Abstract: latency of a token, times lower", ("pie-18",), "Near"),
    ("10: against FlexGen, Alpaca; ShareGPT", ("pie-19", "pie-20"), "{whole} if padding counts"),
)
_PIES_OWN = ("pie-15", "pie-17")
"""Of these neither `+swap` nor `ideal` has the like."""


def _said(headline: Headline) -> str:
    """ "up to 1.5", "1.2 to 1.6", "below 15"."""
    words = headline.unit.partition("(")[2].rstrip(")")
    before = {"less than": "below "}.get(words, f"{words} " if words else "")
    return before + " to ".join(dict.fromkeys(f"{one:g}" for one in (headline.least, headline.most)))


def _pie_cell(stored: Stored, ids: Sequence[str], policies: Sequence[str] = (), of: Callable[[str], str] = str) -> str:
    cells = []
    for id in ids:
        try:
            cells.append(times(pie_of(stored, id, policies, of)))
        except KeyError:
            cells.append(NONE)  # not run
    return "; ".join(cells) if {*cells} != {NONE} else NONE


def pie_(stored: Stored) -> str:
    rows: list[tuple[str, ...]] = []
    for title, ids, why in _PIE:
        # 9c: the paper says that this expansion blocks, and no number.
        paper = "above 1" if ids == ("pie-17",) else "; ".join(_said(headlines()[id]) for id in ids)
        if ids[0] in pie.FLEXGEN:
            whole = "; ".join(times(flexgen_of(stored, id, padding=True)) for id in ids)
            ours = "; ".join(times(flexgen_of(stored, id)) for id in ids)
            rows.append((title, paper, ours, NONE, NONE, NONE, why.format(whole=whole)))
            continue
        readings = (_pie_cell(stored, ids, of=of) for of in (str, pie.anytime_of))
        others = (NONE if ids[0] in _PIES_OWN else _pie_cell(stored, ids, (one,)) for one in (pie.SWAP, IDEAL))
        rows.append((title, paper, *readings, *others, why))
    least, most = pie_at_3c(stored, (3, 5, 7, 9))
    return words.PIE.format(
        results=RESULTS,
        pie_least=times(least),
        pie_most=times(most),
        starts=_range(closed_form_less(stored, str, -1)),
        anytime=_range(closed_form_less(stored, pie.anytime_of, -1)),
        table=_table(
            (
                *("Fig. or section: what, vLLM = 1", "Pie", "at layer starts", "at any time", "`+swap`", "`ideal`"),
                "why they differ",
            ),
            rows,
        ),
        pie_requests=f"{stored.pie['settings']['requests']:,}",
        pcie=_range(gap_closed(stored, "RTX-4090", pie.CLOSED_FORM)),
        nvlink=_range(gap_closed(stored, "GH200-96GB", pie.CLOSED_FORM)),
    )


def page(stored: Stored) -> str:
    """The whole page."""
    parts = (
        words.BEFORE.format(seeds=_word(stored.oneiros.settings.seeds)),
        oneiros(stored),
        kunserve_(stored),
        hybridserve_(stored),
        pie_(stored),
    )
    return "\n".join(parts)


def write(path: Path = PAGE) -> str:
    """Write the page of what is stored, and return it. Raises InvalidArgument (field path) for a stored file that is missing or
    of something else, before anything is written."""
    text = page(Stored.read())
    path.write_text(text, encoding="utf-8")
    return text
