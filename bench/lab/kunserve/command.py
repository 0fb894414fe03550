"""KunServe's Figures 12 to 17, simulated: what is missing is run, and the page is written.

python -m bench.lab kunserve                  runs what is missing (a quarter of an hour on two cores) and writes the page
python -m bench.lab kunserve --quick          short runs and two seeds: that it runs
python -m bench.lab kunserve --report-only    writes the page of what is stored
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.lab import ROOT, seeds
from bench.lab.seeds import Column, Point

from . import scaling
from .figures import CLAIMS, FIGURES, SETUPS, Claim, Figure, Settings, cost_errors, name_of, run, runs

__all__ = ["QUICK", "RESULTS", "SETTINGS", "empty", "page", "run_kunserve"]

RESULTS = ROOT / "bench" / "results" / "kunserve.json"
SETTINGS = Settings()
QUICK = Settings(seeds=2, quick=True)
COLUMNS = {
    one.key: one
    for one in (
        Column("ttft_p50_s", "TTFT P50, s"),
        Column("ttft_p90_s", "P90"),
        Column("ttft_p99_s", "P99"),
        Column("ttft_p99.9_s", "P99.9"),
        Column("tpot_p50_s", "TPOT P50, ms", 1e3),
        Column("tpot_p99_s", "P99", 1e3),
        Column("tokens_per_s", "tokens/s"),
        Column("preemptions", "preemptions"),
        Column("demand_share", "demand for KV, mean, %", 100.0),
        Column("over_share", "above what there is, % of the time", 100.0),
        Column("grouped_share", "groups, % of the time", 100.0),
        Column("largest", "largest"),
        Column("merges", "mergers"),
        Column("dissolutions", "dissolutions"),
        Column("bubble_share", "bubbles, %", 100.0),
        Column("exchanged_gb", "KV moved, GB"),
        Column("restored_gb", "layers brought home, GB"),
        Column("full_s", "memory is full after, s"),
        Column("freed_share", "KV freed, %", 100.0),
    )
}
PAGE = """# KunServe's clusters, simulated: {seeds} seeds

Figures 12 to 17 of "KunServe: Parameter-centric Memory Management for Efficient Memory Overloading Handling in LLM
Serving" (Cheng et al.) in virtual time: eight A800 with Qwen2.5-14B, 25 GB/s between them, and four times four H800 with
Qwen2.5-72B. The production control, dispatcher, planners and scheduler run in the twin
([bench/lab/kunserve/twin](../lab/kunserve/twin/__init__.py)); computing is a roofline, the network has ports and priorities.
Each figure is the median of the seeds, (lowest to highest). Made by `python -m bench.lab kunserve`; equal settings give
equal figures.

The paper's text gives mean lengths, that requests come twice as fast from 45 s on, and that demand for KV is 47 to 60 %
of what there is in the mean. Decided here: Poisson arrivals, bursts of 60 s, the spread of LongBench's lengths (no data at
hand), and the rates, in requests a second: {rates}.

`vllm`: each instance alone, chunked prefill of 2,048 tokens, preemption by recompute. `vllm-pp`: fixed pairs; each request
stays in one of two lanes. `infercept`: preempted KV goes to host memory and comes back; `llumnix`: running requests move to
the emptiest instance; both only in their essentials. All share our dispatcher, which counts whole lines (by demand alone, as
Llumnix has it, P99 TTFT was about three times as high in single runs). `kunserve`: greedy plan, halving lookahead,
the 50 % rule. `remap`: exact plan, balanced lookahead, ski rental. `drop` and what follows it: KunServe's steps, none of
which restores. In `remap-sticky` a prompt stays in one lane; otherwise its next part may go with the next microbatch,
whatever lane that is. In `remap-tokens` prompts are cut by tokens, 2,048 in a microbatch.

{text}## The paper's numbers beside ours

"12.7 to 72.2": over systems and data sets, the least and the most. Ours: the medians of the seeds.

{claims}

{figures}
## Figure 15: what a microbatch costs

The largest error against the roofline, of chunks whose attention is counted and of chunks that are counted by tokens. The
paper: below 5 %; up to 48 and 74 %. This says that the form fits the roofline, not that the roofline fits a machine.

{costs}

## Planning and messages for many instances

Measured on one machine ({machine}), which others used as well: median, (least to most) of {repeats}. Every instance is full
and six requests wait at each. `plan` is exact up to eight instances. Messages: of one change of all instances and the way
back, but for reports. A tick with nothing to change, the dearest tick (it plans and sends), and routing of one request.

{scaling}
"""
TEXT = """## What it says

Good: where memory is what a burst lacks, dropping layers shortens the line in front of it. P99 TTFT is 28 to 52 % of `vllm`'s
with `remap` and 49 to 67 % with `kunserve` (medians of the four loads of Figures 12 and 13), and preemptions nearly end. The
price is of the paper's size: P50 TPOT rises by 6 to 20 % with `remap`, 5 to 42 % with `kunserve`. Bubbles are 15 to 23 % of
the time of fixed pairs. Cutting prompts by what they cost instead of by tokens (`remap-tokens`) brings them from 16.1 to 10.5 %
(BurstGPT), from 23.8 to 13.8 (ShareGPT), from 9.9 to 7.1 and from 7.4 to 6.6 (LongBench, 14B and 72B), all else equal, and P99
TTFT of LongBench with 14B from 7.9 to 6.9 s; tokens/s hardly differ. Dropping frees as much KV as in the paper, and a burst
without end fills the memory later (2.4 times, or, with two of five seeds, not for 5 s in a row within the run; with `kunserve`
it never does).

Not reproduced: **the 12.7 to 72.2 times** of P99 TTFT. Here a burst that fills the memory keeps the devices nearly busy with
prompts: at twice the rate, prompts alone take 71 to 83 % of what they can compute (14B, by the roofline), and those wait for
computation whatever memory there is. The paper says neither its rates nor how busy its devices are. Dropping gives a pair
of 14B instances 28 % more KV, and eight of them 48 %. That is no bound for other loads: with longer answers the same code
comes to the paper's order, and `ideal`, recompute with six times the KV, does not at these loads
([kunserve-map.md](kunserve-map.md)). **Lookahead does not raise
tokens/s by 20 %**: requests come at a given rate, and the systems keep up in the end; it saves 1.6 to 3.3 % of TPOT beyond
P90.
**Restoring does not lower P50 TTFT**: it lowers P50 TPOT, and P99 TTFT by a fifth to a quarter (the paper: 6.4 times).
**Halving hardly lowers bubbles**: from 12.2 to 11.7 % with KunServe's drop and without restoring (the paper: from 21.9 to 8.3 %).

Bad: `remap` is not always ahead of `kunserve`. With LongBench and 14B its P90 TTFT is higher (3.67 and 3.12 s), and so is
P99 with two bursts (8.2 and 7.0 s). With one burst, first tokens come soonest without restoring (`drop+exchange`).
With ShareGPT one seed has more bubbles (22 %) than fixed pairs. Ranges over seeds are wide: P99 TTFT of one seed of LongBench
is 8 % lower than `vllm`'s, and that of two of BurstGPT is twice as high as that of the others.

What the twin found out about the library:

- A prompt that stays in its lane (`remap-sticky`) leaves 17 and 27 % bubbles with LongBench (72B and 14B), since one lane has a
  prompt and the other has none, and P99 TTFT is up to 76 s. Where the next part may go with the next microbatch, bubbles
  are 7 %, and P99 TTFT at most 8.4 s. It is right, as all microbatches pass each stage in one order.
- Decoding has to be counted as what a microbatch costs once when the number of parts is chosen, as loading weights is. Without
  that, parts were so small that P99 TTFT with BurstGPT's lengths was 10 and 16 s instead of 5 and 5 (two seeds, not stored).
- A load in tokens does not see that blocks are not full: with ShareGPT's lengths no group was ever overloaded, while 240
  requests waited (one run, not stored). Heads have to report whole blocks.
- Three choices of `remap`, each left out by itself, with the same five seeds (not stored; ratios to what is stored, by seed).
  Not every partition, but the better of greedy and equal sizes, as with more than eight instances: P99 TTFT is 1.00 to 1.21
  times as high with LongBench (14B), 0.88 to 1.01 times with BurstGPT, so neither plan is the better one. No ski rental, a
  group dissolves as soon as its demand and the margin fit: P99 TTFT and tokens/s of LongBench (one burst, and swells) are 0.99 to
  1.02 times as high (BurstGPT, three seeds: 1.00 to 1.02), and groups are there for 22 and 9 % of the time instead of 39 and
  27 %, so waiting gains nothing there. No measured passes (`remap-tokens`): more bubbles, and a higher P99 TTFT with LongBench,
  as said above, so the measurement stays.

"""


def empty(settings: Settings) -> dict[str, Any]:
    """What a file of these settings begins with."""
    return {"settings": settings.to_json(), "points": {}, "scaling": {}}


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _header(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _at(points: Mapping[str, Point], seed: int, setup: str, system: str) -> Point:
    return points[name_of(setup, system, seed)]


def _computed(data: Mapping[str, Any], claim: Claim, system: str) -> str:
    """Of the seeds that have all of its runs: medians of the ends, and the range where there is one number."""
    found: list[Sequence[float]] = []
    for seed in range(data["settings"]["seeds"]):
        try:
            found.append(claim.of(partial(_at, data["points"], seed), system))
        except (KeyError, ZeroDivisionError):
            continue
    plain = Column("", "")
    ends = list(zip(*found))
    if len(ends) == 1:
        return seeds.cell(ends[0], plain)
    return " to ".join(seeds.cell(each, plain).partition(" (")[0] for each in ends) or "–"


def claims(data: Mapping[str, Any]) -> str:
    """Markdown: a line for each number of the paper."""
    lines = _header("figure", "id", "of", "paper", "simulated", "remap")
    for one in CLAIMS:
        said = [f"`{system}` {_computed(data, one, system)}" for system in one.systems]
        lines.append(_row(one.figure, f"kunserve-{one.id}", one.about, one.paper, said[0], *(said[1:] or ["–"])))
    return "\n".join(lines)


def table(data: Mapping[str, Any], figure: Figure) -> str:
    """Markdown: a line for each setup and system that was run."""
    lines = _header("load", "system", "n", *(COLUMNS[key].title for key in figure.show))
    points = data["points"]
    for setup in figure.setups:
        for system in figure.systems:
            names = [name_of(setup, system, seed) for seed in range(data["settings"]["seeds"])]
            found = [points[name] for name in names if name in points]
            if found:
                cells = [seeds.cell([point.get(key, math.nan) for point in found], COLUMNS[key]) for key in figure.show]
                lines.append(_row(setup, f"`{system}`", str(len(found)), *cells))
    return "\n".join(lines)


def _costs() -> str:
    lines = _header("", "attention counted, %", "by tokens, %")
    for name, (ours, linear) in cost_errors().items():
        lines.append(_row(name, f"{100 * ours:.1f}", f"{100 * linear:.0f}"))
    return "\n".join(lines)


def _ms(three: Sequence[float]) -> str:
    middle, least, most = three
    return f"{middle:.3g} ({least:.3g} to {most:.3g})"


def _scaling(found: Mapping[str, Any]) -> str:
    lines = _header(
        *("instances", "greedy, ms", "plan, ms", "groups", "copies, ms", "messages", "for each instance"),
        *("quiet tick, ms", "dearest tick, ms", "route, ms"),
    )
    for one in found.get("sizes", ()):
        each = one["messages"] / one["instances"]
        lines.append(
            _row(
                f"{one['instances']:,}",
                *(_ms(one["greedy_ms"]), _ms(one["plan_ms"]), str(one["groups"]), _ms(one["copies_ms"])),
                *(f"{one['messages']:,}", f"{each:.3g}", _ms(one["quiet_tick_ms"])),
                *(f"{one['dearest_tick_ms']:.3g}", f"{one['route_ms']:.3g}"),
            )
        )
    return "\n".join(lines)


def page(data: Mapping[str, Any]) -> str:
    """The whole page, of what is stored."""
    found = data["scaling"]
    return PAGE.format(
        seeds=data["settings"]["seeds"],
        rates=", ".join(f"{one.rate:g} ({one.name})" for one in SETUPS.values()),
        text=TEXT,
        claims=claims(data),
        figures="\n".join(f"## {figure.title}\n\n{table(data, figure)}\n" for figure in FIGURES),
        costs=_costs(),
        machine=found.get("machine", "not measured"),
        repeats=found.get("repeats", 0),
        scaling=_scaling(found),
    )


def run_kunserve(results: Path, settings: Settings = SETTINGS, *, jobs: int = 1, report_only: bool = False) -> str:
    """Run what `results` lacks, and write the page beside it. Returns the page.

    What was run with other settings does not count: the file is begun anew. Raises InvalidArgument (field path) for a
    file of something else, before anything runs.
    """
    data = seeds.read(results, empty(settings), "kunserve")
    if not report_only:
        seeds.run_missing(data, runs(settings), results, jobs, run)
        if not data["scaling"]:
            data["scaling"] = scaling.measure(settings.quick)
            seeds.write(results, data)
    text = page(data)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
