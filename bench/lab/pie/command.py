"""Pie's Figures 6 to 9, simulated: what is missing is run, and the page is written.

python -m bench.lab pie                  runs what is missing (a quarter of an hour on two cores) and writes the page
python -m bench.lab pie --quick          few requests and two seeds: that it runs
python -m bench.lab pie --report-only    writes the page of what is stored
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.lab import ROOT, seeds
from bench.lab.headline import name_of
from bench.lab.paper.experiments import Headline, Panel, headlines
from bench.lab.paper.reckoning import figures
from bench.lab.paper.runs import Run, Settings, saturation, serve
from bench.lab.seeds import Column, Point

from .figures import CLAIMS, FIGURES, KV_ONLY, NOT_SIMULATED, PIE, Figure, Place, latency_s

__all__ = ["QUICK", "RESULTS", "SETTINGS", "empty", "page", "run_missing", "run_pie", "run_point"]

RESULTS = ROOT / "bench" / "results" / "pie.json"
SETTINGS = Settings(requests=400, seeds=5)
QUICK = Settings(requests=20, seeds=2, quick=True)
KEPT = (
    *("rate", "requests", "requests_finished", "tokens_per_s", "ttft_p99_s", "tbt_p99_s", "preemptions"),
    *("kv_blocks_start", "kv_blocks_peak", "stall_fraction"),
)
"""Of the figures that `bench.lab paper` stores."""
TOKENS = Column("tokens_per_s", "tokens/s")
LATENCY = (
    Column("tokens_per_s", "tokens/s"),
    Column("latency_s", "latency of a token, ms", 1e3),
    Column("before_first_s", "of it before the first, ms", 1e3),
    Column("after_first_s", "after it, ms", 1e3),
    Column("ttft_p99_s", "TTFT P99, s"),
    Column("tbt_p99_s", "TBT P99, ms", 1e3),
    Column("preemptions", "preemptions"),
)
PAGE = """# Pie and KV that streams, simulated: {seeds} seeds of {requests:,} requests

Figures 6 to 9 of "Pie: Pooling CPU Memory for LLM Inference" (Xu et al.) in virtual time: a GH200 (`GH200-96GB`: 419
GB/s to the device, 371 GB/s to the host, as in Pie's Figure 1), one model, prompts first and whole (vLLM V0), Poisson
arrivals, lengths of ShareGPT and of Alpaca ({alpaca:,} requests of these a run). The paper's text gives neither its
rates nor, but for OPT-13B, the KV of Figure 6 (3 GB here). Rates are multiples of c: what `recompute` serves a second
when all requests are there at once. Each figure is the median of the seeds, (lowest to highest). Made by
`python -m bench.lab pie`; equal settings give equal figures.

`recompute` is vLLM's preemption, and Pie at an expansion of 1. `pie:E` is Pie at a fixed expansion, `pie` its
adaptive one. "KV only" is `{kv_only}`: complete blocks of KV stream from host
memory, and weights stay. `remap:weights+swap` streams weights too, and keeps preempted requests in host memory; the
default, `remap`, also shares KV between models, of which there is one here, and was not run. `ideal` is `recompute` with
six times the memory.
Pie is its pipeline in closed form ([passes.py](../../src/remap/sim/passes.py)), which errs on Pie's side: no layer
waits for a copy unless all copies take longer than the pass, one copy moves a layer's KV however many blocks that is,
and expanding is free.

{text}## The paper's figures beside ours

The paper's numbers are from its text; the ids are those of [headlines.json](../lab/paper/headlines.json).

{claims}

Not simulated: {left}.

{figures}
## What is copied, and what it costs

At the highest rate of each load. "By Pie's": `KV only` by `pie`, seed by seed. Bytes are of KV in the whole run. Pie
copies out whatever it copies in.

{against}
"""
TEXT = """## What it says

Good: Pie's figures come out as its text has them, at 3 c within 13 % of every "up to" of Figures 6 and 7. The best
fixed
expansion of OPT-13b with 7 GB is 1.6, and with 3 GB the adaptive one is within 0.2 % of the best fixed one. Higher
than in the paper are the gains of OPT-30b in Figure 8, where Pie expands up to 4.4 times. Not reproduced: at 3 GB an
expansion of 2.2 does not block. `remap:weights+swap` serves 1 to 20 % more tokens a second than `pie` at 3 c,
but for OPT-13b Alpaca with 9 and 12 GB (3 and 11 % fewer).

Bad: **KV only is behind Pie wherever memory is full.** At 3 c it serves 59 to 82 % of Pie's tokens a second with
OPT-30b, 84 to 99 % with the others, and a token takes 1 to 8 times as long, since more requests wait. At c both
serve what comes, but first tokens come later: P99 TTFT is 35 times Pie's for OPT-30b ShareGPT. KV
only is better in bytes, which are 34 to 53 % of Pie's at 3 c (of those that go out 0.3 to 1.6 %), and in the P99 time
between tokens with ShareGPT at 3 and 5 GB, 69 to 88 % of Pie's, where fewer requests run at once.

Why, by profiles of single runs (seed 0 at 3 c; not stored, and nothing in the tables is of them):

- Fewer requests run at once: with OPT-30b ShareGPT 6.4 against Pie's 13.6 on average. There KV only has as many
  streamed blocks as the reservation has blocks (twice as many would leave no room for the longest request), so it can
  at most double, while Pie goes to 3.7 times; and of the 136 blocks that the certificate lets stream, 82 do: prompts
  are computed whole, and one that needs most of the pool waits until that is free.
- Copies out of a layer_major cache are 2 x layers small ones, and whoever needs the pages waits for them. The model
  of Pie has no such copies: expanding is free in it.
- The two buffers of streamed blocks come out of the same memory: 128 blocks are left of 136 with OPT-30b.

"""


def run_point(run: Run, settings: Settings) -> Point:
    """One run: the figures of `bench.lab paper`, bytes of KV each way, and the latency of a token in two parts.

    before_first_s: what requests waited for their first token, after_first_s: their time from there to the last; both
    by the tokens of all answers, so their sum is the per-token latency of Pie, section 5.1. Raises as `simulate` does.
    """
    _, items, result = serve(run, settings)
    copied = sum(tenant.swapped_bytes for tenant in result.tenants)
    out = sum(tenant.swapped_out_bytes for tenant in result.tenants)
    more = {
        "before_first_s": math.fsum(result.ttft_s) / result.output_tokens,
        "after_first_s": math.fsum(seconds * count for seconds, count in result.tbt) / result.output_tokens,
        "out_gb": out / 1e9,
        "in_gb": (copied - out) / 1e9,
    }
    point = figures(result, run.rate, items[-1].time_s - items[0].time_s)
    return {**{name: point[name] for name in KEPT}, **{name: float(f"{value:.5g}") for name, value in more.items()}}


def empty(settings: Settings) -> dict[str, Any]:
    """What a file of these settings begins with."""
    return {"settings": settings.to_json(), "c": {}, "points": {}}


def run_missing(
    data: dict[str, Any], settings: Settings, path: Path, jobs: int, wanted: Sequence[Figure] = FIGURES
) -> None:
    """Run what `data` lacks, seed by seed, and write `path` after each run."""
    c = data["c"]
    panels = {panel.name: panel for figure in wanted for panel, _ in figure.places}
    for panel in panels.values():
        like = panel.like or panel.name
        if panel.name not in c:
            c[panel.name] = c[like] if like in c else saturation(panels[like], settings)[0]
    runs = {
        name_of(panel, factor, policy, seed): (
            Run(panel, policy, f"x{factor:g}", c[panel.name] * factor, seed),
            settings,
        )
        for seed in range(settings.seeds)
        for figure in wanted
        for panel, factor in figure.places
        for policy in figure.policies
    }
    seeds.run_missing(data, runs, path, jobs, run_point)


def _at(points: Mapping[str, Point], seed: int, panel: Panel, factor: float, policy: str) -> Point:
    return points[name_of(panel, factor, policy, seed)]


def _each(data: Mapping[str, Any], value: Callable[[Any], float]) -> list[float]:
    """value(at) of each seed that has all its runs."""
    found = []
    for seed in range(data["settings"]["seeds"]):
        try:
            found.append(value(partial(_at, data["points"], seed)))
        except KeyError:
            continue
    return found


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _header(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _said(headline: Headline) -> str:
    least, most = headline.least, headline.most
    return f"{least:g} {headline.unit}" if least == most else f"{least:g} to {most:g} {headline.unit}"


def claims(data: Mapping[str, Any]) -> str:
    """Markdown: a line for each figure of the paper."""
    lines = _header("figure", "id", "of", "", "paper", "Pie, simulated", "KV only")
    plain = Column("", "")
    for one in CLAIMS:
        headline = headlines()[one.headline]
        pie = seeds.cell(_each(data, partial(one.of, policies=one.pie)), plain)
        ours = seeds.cell(_each(data, partial(one.of, policies=(KV_ONLY,))), plain) if one.ours else "–"
        of = "`pie:E`" if len(one.pie) > 1 else f"`{one.pie[0]}`"
        lines.append(
            _row(
                headline.figure,
                headline.id,
                headline.config or headline.note,
                one.about,
                _said(headline),
                f"{of} {pie}",
                ours,
            )
        )
    return "\n".join(lines)


def _labels(data: Mapping[str, Any], place: Place) -> tuple[str, str]:
    panel, factor = place
    return panel.name, f"{factor:g} c = {factor * data['c'].get(panel.name, math.nan):.3g}/s"


def _title(policy: str) -> str:
    return "KV only" if policy == KV_ONLY else f"`{policy}`"


def grid(data: Mapping[str, Any], figure: Figure) -> str:
    """Markdown: tokens/s, a line for each place and a column for each policy."""
    lines = _header("load", "rate", *(_title(policy) for policy in figure.policies))
    for place in figure.places:
        cells = [
            seeds.cell(_each(data, partial(_figure, place, policy, TOKENS.key)), TOKENS) for policy in figure.policies
        ]
        lines.append(_row(*_labels(data, place), *cells))
    return "\n".join(lines)


def latencies(data: Mapping[str, Any], figure: Figure) -> str:
    """Markdown: a line for each place and policy, with the latency of a token and what it consists of."""
    lines = _header("load", "rate", "policy", *(column.title for column in LATENCY))
    for place in figure.places:
        for policy in figure.policies:
            cells = [seeds.cell(_each(data, partial(_figure, place, policy, column.key)), column) for column in LATENCY]
            lines.append(_row(*_labels(data, place), _title(policy), *cells))
    return "\n".join(lines)


def _figure(place: Place, policy: str, key: str, at: Any) -> float:
    point = at(*place, policy)
    return latency_s(point) if key == "latency_s" else float(point[key])


def _by(ours: float, pies: float) -> float:
    return ours / pies if pies else math.nan


def against(data: Mapping[str, Any], wanted: Sequence[Figure]) -> str:
    """Markdown: `KV only` against `pie`, at the highest rate of each load."""
    places: dict[str, Place] = {}
    for figure in wanted:
        for place in figure.places:
            if place[0].name not in places or places[place[0].name][1] < place[1]:
                places[place[0].name] = place
    lines = _header(
        *(
            "load",
            "rate",
            "tokens/s by Pie's",
            "latency of a token by Pie's",
            "Pie: GB out, as many in",
            "KV only: GB out",
        ),
        *("GB in", "all its bytes by Pie's", "preemptions, Pie", "KV only", "waits, % of passes, Pie", "KV only"),
    )
    plain, percent = Column("", ""), Column("", "", 100.0)
    for place in places.values():

        def ratio(value: Callable[[Point], float], place: Place = place) -> str:
            return seeds.cell(_each(data, lambda at: _by(value(at(*place, KV_ONLY)), value(at(*place, PIE)))), plain)

        def of(policy: str, key: str, column: Column = plain, place: Place = place) -> str:
            return seeds.cell(_each(data, partial(_figure, place, policy, key)), column)

        lines.append(
            _row(
                *_labels(data, place),
                ratio(lambda point: point["tokens_per_s"]),
                ratio(latency_s),
                of(PIE, "out_gb"),
                of(KV_ONLY, "out_gb"),
                of(KV_ONLY, "in_gb"),
                ratio(lambda point: point["out_gb"] + point["in_gb"]),
                of(PIE, "preemptions"),
                of(KV_ONLY, "preemptions"),
                of(PIE, "stall_fraction", percent),
                of(KV_ONLY, "stall_fraction", percent),
            )
        )
    return "\n".join(lines)


def page(data: Mapping[str, Any], wanted: Sequence[Figure] = FIGURES) -> str:
    """The whole page, of what is stored."""
    settings = data["settings"]
    parts = []
    for figure in wanted:
        table = latencies(data, figure) if len(figure.places) == 1 else grid(data, figure)
        what = "" if len(figure.places) == 1 else " (tokens/s)"
        parts.append(f"## Figure {figure.number}: {figure.title}{what}\n\n{table}\n")
    return PAGE.format(
        seeds=settings["seeds"],
        requests=settings["requests"],
        alpaca=round(settings["requests"] * FIGURES[0].places[0][0].requests),
        kv_only=KV_ONLY,
        text=TEXT,
        claims=claims(data),
        left="; ".join(f"{name}, {headlines()[name].figure} ({why})" for name, why in NOT_SIMULATED.items()),
        figures="\n".join(parts),
        against=against(data, wanted),
    )


def run_pie(
    results: Path,
    settings: Settings = SETTINGS,
    *,
    jobs: int = 1,
    report_only: bool = False,
    wanted: Sequence[Figure] = FIGURES,
) -> str:
    """Run what `results` lacks, and write the page beside it. Returns the page.

    What was run with other settings does not count: the file is begun anew. Raises InvalidArgument (field path) for a
    file of something else, before anything runs.
    """
    data = seeds.read(results, empty(settings), "pie")
    if not report_only:
        run_missing(data, settings, results, jobs, wanted)
    text = page(data, wanted)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
