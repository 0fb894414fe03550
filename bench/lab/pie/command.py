"""Pie's Figures 6 to 10, simulated: what is missing is run, and the page is written.

python -m bench.lab pie                  runs what is missing (an hour on one core) and writes the page
python -m bench.lab pie --quick          few requests and two seeds: that it runs
python -m bench.lab pie --report-only    writes the page of what is stored
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.lab import ROOT, seeds
from bench.lab.headline import name_of
from bench.lab.paper.experiments import BASELINE, Headline, Panel, headlines, setup_of
from bench.lab.paper.reckoning import figures
from bench.lab.paper.runs import Run, Settings, items_of, saturation, serve
from bench.lab.pie_events import ANYTIME
from bench.lab.seeds import Column, Point

from remap.policy.hardware import machine

from .figures import (
    AT_ANY_TIME,
    CLAIMS,
    CLOSED,
    CLOSED_FORM,
    EXPANSIONS,
    FIGURES,
    FLEXGEN,
    FULL,
    KV_ONLY,
    NOT_SIMULATED,
    PIE,
    SWAP,
    Figure,
    Place,
    anytime_of,
    closed_form_of,
    gain,
    latency_s,
)
from .flexgen import Block, best_block

__all__ = ["QUICK", "RESULTS", "SETTINGS", "empty", "flexgen_beside", "page", "run_missing", "run_pie", "run_point"]

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

Figures 6 to 10 of "Pie: Pooling CPU Memory for LLM Inference" (Xu et al.) in virtual time: a GH200 (`GH200-96GB`: 419
GB/s to the device, 371 GB/s to the host, as in Pie's Figure 1), one model, prompts first and whole (vLLM V0), Poisson
arrivals, lengths of ShareGPT and of Alpaca ({alpaca:,} requests of these a run). The paper's text gives neither its
rates nor, but for OPT-13B, the KV of Figure 6 (3 GB here). Rates are multiples of c: what `recompute` serves a second
when all requests are there at once. Each figure is the median of the seeds, (lowest to highest). Made by
`python -m bench.lab pie`; equal settings give equal figures.

`recompute` is vLLM's preemption, and Pie at an expansion of 1. `pie-events:E` is Pie at a fixed expansion, event by event
([pie_events.py](../lab/pie_events.py)), `pie-events` its adaptive one; `pie` is the adaptive one in closed form. "KV only" is
`{kv_only}`: complete blocks of KV stream from host memory, and weights stay.
`remap:weights+swap` streams weights too, and keeps preempted requests in host memory; the default, `remap`, also shares KV
between models, of which there is one here, and was not run. `ideal` is `recompute` with six times the memory.

Event by event a layer is looked for when it starts, copies begin then and at no other time, places are held from the start
of a copy to its end, a look takes 8.3 us, and an expansion can be used once every layer has been reallocated. The
closed form ([passes.py](../../src/remap_serve/sim/passes.py)) errs on Pie's side: no layer waits for a copy unless all copies
take longer than the pass, and expanding is free. Both copy only blocks in use, one copy a layer however many blocks that is.

{text}## The paper's figures beside ours

The paper's numbers are from its text; the ids are those of [headlines.json](../lab/paper/headlines.json).

{claims}

Not simulated: {left}.

{figures}
## Three readings of Pie

At 3 c. "At layer starts" is `pie-events`, "at any time" `pie-anytime`: Pie also decides when a copy ends while a layer is
computed. "Held up": by copies that are waited for, and by looks at the table.

{readings}

## Figure 10: FlexGen

Reckoned, not served ([flexgen.py](../lab/pie/flexgen.py)): OPT-30b's layers and 3 GB on the device, 480 GB of host
memory, requests padded to the longest prompt and the longest answer of the run. "As described": weights and KV in host
memory, copies and computation in turns. "At its best": any share of both on the device, and copies behind computation. Pie
is `pie-events` at 3 c. The paper does not say whether tokens of padding count.

{flexgen}

## What is copied, and what it costs

At the highest rate of each load. "By Pie's": `KV only` by `pie-events`, seed by seed. Bytes are of KV in the whole run. Pie
copies out whatever it copies in.

{against}
"""
TEXT = """## What it says

**Event by event Pie gains less than in closed form.** At 3 c with 3 GB the best fixed expansion serves {best_events} times
the tokens/s of `recompute`, the paper's up to 1.27 to 1.86, the closed form's {best_closed}. A fixed expansion serves
{fixed_events} % fewer tokens/s than in closed form, the adaptive one {adaptive_events} % fewer. What the closed form could
not show comes out: with OPT-13b, ShareGPT and 3 GB most tokens/s come at {most_3} (the paper: from 2 on), and 2.2 holds
passes up for {held} % of their time; with 7 GB they come at {most_7} (the paper: 1.4 to 1.6).

**Most of that is when copies may begin.** At layer starts alone, as the paper words it, a copy that takes a little longer than
a layer is computed has the link for two. If Pie decides at the ends of copies too (`pie-anytime`), OPT-13b with ShareGPT and
Llama-2-13b, with 3 GB, serve {best_anytime} times the tokens/s of `recompute` (at layer starts {best_13b_events}, the
paper up to 1.27 and 1.54, closed form {best_13b_closed}); a fixed expansion serves {fixed_anytime} % fewer than in
closed form, the adaptive one {adaptive_anytime} %; and most come at {most_3_anytime} and, with 7 GB, {most_7_anytime}.

Bad for Pie, too: the adaptive expansion grows by a layer in 16 passes or more, so with OPT-30b at c, where few requests
wait long, P99 first tokens come {late_events} times as late as in closed form, which has no such delay. With 12 GB and 3 c,
where little is to be had, it serves {twelve_events} times (`pie-anytime`: {twelve_anytime}) the tokens/s of `recompute`.

In Pie's favour still: only blocks in use are copied; a layer's larger place is found at once, and no driver is called for it;
the numbers of the adaptive rule, which the paper lacks, are the best for Pie of some twenty that were tried with
`pie-events` on three of these loads. Among them: "stops scaling" is 30 % fewer tokens/s, since records of 16 passes are
noisy; with 2 % OPT-30b Alpaca came to 941 tokens/s for 1,316 (seed 0 at 3 c, not stored).

`remap:weights+swap` serves {swap} times the tokens/s of `pie-events` at 3 c, and {swap_anytime} times those of
`pie-anytime`. KV only serves {kv} and {kv_anytime} times as many, of `pie-events` the least with {kv_least},
where Pie has more layers away than the certificate lets stream. KV only copies {kv_bytes} times the bytes of `pie-events`, and
{kv_out} times those that go out.

What holds KV only back, by profiles of single runs (seed 0 at 3 c; not stored):

- Fewer requests run at once: with OPT-30b ShareGPT 6.4 against 13.6 of Pie in closed form on average. There KV only has as
  many streamed blocks as the reservation has blocks (twice as many would leave no room for the longest request), so it can
  at most double, while Pie goes to 3.7 times; and of the 136 blocks that the certificate lets stream, 82 do: prompts
  are computed whole, and one that needs most of the pool waits until that is free.
- Copies out of a layer_major cache are 2 x layers small ones, and whoever needs the pages waits for them. The models of Pie
  have no such copies.
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
    lines = _header("figure", "id", "of", "", "paper", "Pie, event by event", "at any time", "closed form", "KV only")
    plain = Column("", "")
    for one in CLAIMS:
        headline = headlines()[one.headline]
        pie = seeds.cell(_each(data, partial(one.of, policies=one.pie)), plain)
        others = [
            seeds.cell(_each(data, partial(one.of, policies=tuple(map(of, one.pie)))), plain)
            for of in (anytime_of, closed_form_of)
        ]
        ours = seeds.cell(_each(data, partial(one.of, policies=(KV_ONLY,))), plain) if one.ours else "–"
        of = f"`{PIE}:E`" if len(one.pie) > 1 else f"`{one.pie[0]}`"
        lines.append(
            _row(
                headline.figure,
                headline.id,
                headline.config or headline.note,
                one.about,
                _said(headline),
                f"{of} {pie}",
                *others,
                ours,
            )
        )
    return "\n".join(lines)


def _labels(data: Mapping[str, Any], place: Place) -> tuple[str, str]:
    panel, factor = place
    return panel.name, f"{factor:g} c = {factor * data['c'].get(panel.name, math.nan):.3g}/s"


def _title(policy: str) -> str:
    return "KV only" if policy == KV_ONLY else f"`{policy}`"


def _shown(figure: Figure) -> list[str]:
    """The policies of its table."""
    return [policy for policy in figure.policies if policy not in (*CLOSED, *AT_ANY_TIME)]


def grid(data: Mapping[str, Any], figure: Figure) -> str:
    """Markdown: tokens/s, a line for each place and a column for each policy."""
    lines = _header("load", "rate", *(_title(policy) for policy in _shown(figure)))
    for place in figure.places:
        cells = [
            seeds.cell(_each(data, partial(_figure, place, policy, TOKENS.key)), TOKENS) for policy in _shown(figure)
        ]
        lines.append(_row(*_labels(data, place), *cells))
    return "\n".join(lines)


def latencies(data: Mapping[str, Any], figure: Figure) -> str:
    """Markdown: a line for each place and policy, with the latency of a token and what it consists of."""
    lines = _header("load", "rate", "policy", *(column.title for column in LATENCY))
    for place in figure.places:
        for policy in _shown(figure):
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


def readings(data: Mapping[str, Any], wanted: Sequence[Figure]) -> str:
    """Markdown: of each load with fixed expansions, and of each expansion, tokens/s of all readings of Pie, what passes waited,
    and what was copied."""
    policies = (*EXPANSIONS, PIE)
    lines = _header("load", "", *(policy.partition(":")[2] or "adaptive" for policy in policies))
    places = {place: None for figure in wanted if EXPANSIONS[0] in figure.policies for place in figure.places}
    plain, percent = Column("", ""), Column("", "", 100.0)
    kinds = (("at layer starts", lambda policy: policy), ("at any time", anytime_of), ("closed form", closed_form_of))

    def copied(at: Any, place: Place, policy: str) -> float:
        return _by(_bytes(at(*place, policy)), _bytes(at(*place, closed_form_of(policy))))

    for place in places:
        for kind, of in kinds:
            cells = [
                seeds.cell(_each(data, partial(gain, places=(place,), policies=(of(one),))), plain) for one in policies
            ]
            lines.append(_row(place[0].name, f"tokens/s, `recompute` = 1: {kind}", *cells))
        for kind, of in kinds[:2]:
            cells = [
                seeds.cell(_each(data, partial(_figure, place, of(one), "stall_fraction")), percent) for one in policies
            ]
            lines.append(_row(place[0].name, f"held up, % of passes: {kind}", *cells))
        cells = [seeds.cell(_each(data, partial(copied, place=place, policy=one)), plain) for one in policies]
        lines.append(_row(place[0].name, "bytes copied, closed form = 1: at layer starts", *cells))
    return "\n".join(lines)


def flexgen_beside(data: Mapping[str, Any], id: str, *, as_described: bool) -> list[tuple[float, Block]]:
    """Of Figure 10, and each seed that was run: (Pie's tokens a second, what FlexGen takes)."""
    panel, factor = FLEXGEN[id]
    settings = Settings(**data["settings"])
    setup = setup_of(panel, machine(settings.machine))
    model = setup.tenants[0].model
    device = model.layers * model.layer_bytes + panel.kv_bytes
    found = []
    for seed in range(settings.seeds):
        point = data["points"].get(name_of(panel, factor, PIE, seed))
        if point is not None:
            items = items_of(panel, setup, data["c"][panel.name] * factor, settings, seed)
            block = best_block(items, model, setup.machine, device, as_described=as_described)
            found.append((point["tokens_per_s"], block))
    return found


def flexgen(data: Mapping[str, Any]) -> str:
    """Markdown: Pie's tokens/s by FlexGen's, as Figure 10 has them, and what FlexGen takes for them."""
    lines = _header(
        *("load", "id", "paper", "FlexGen", "block: size x number, weights on the device"),
        *("tokens/s", "Pie's by these", "tokens/s with padding", "Pie's by these"),
    )
    plain = Column("", "")
    for id, (panel, _) in FLEXGEN.items():
        for as_described in (True, False):
            runs = flexgen_beside(data, id, as_described=as_described)
            values = (
                [block.answers_per_s for _, block in runs],
                [pie / block.answers_per_s for pie, block in runs],
                [block.all_per_s for _, block in runs],
                [pie / block.all_per_s for pie, block in runs],
            )
            blocks = sorted({f"{block.size} x {block.batches}, {block.weights:.0%}" for _, block in runs})
            lines.append(
                _row(
                    *(panel.name, id, _said(headlines()[id]), "as described" if as_described else "at its best"),
                    *("; ".join(blocks), *(seeds.cell(each, plain) for each in values)),
                )
            )
    return "\n".join(lines)


def words(data: Mapping[str, Any]) -> str:
    """What the stored runs say, with their numbers; nothing if some are missing."""
    try:
        return TEXT.format(**_numbers(data))
    except (KeyError, statistics.StatisticsError):
        return ""


def _numbers(data: Mapping[str, Any]) -> dict[str, str]:
    ats = [partial(_at, data["points"], seed) for seed in range(data["settings"]["seeds"])]
    places = list({place: None for figure in FIGURES for place in figure.places})
    full = [place for place in places if place[1] == FULL]
    fixed = [place for place in FIGURES[0].places if place[1] == FULL]
    small = [place for place in fixed if "KV 3 GB" in place[0].name]

    def over(policy: str, base: str, place: Place, value: Callable[[Point], float] = _tokens) -> float:
        return statistics.median(value(at(*place, policy)) / value(at(*place, base)) for at in ats)

    def ends(values: Iterable[float], digits: str = ".2f") -> str:
        found = sorted(values)
        return " to ".join(dict.fromkeys(format(value, digits) for value in (found[0], found[-1])))

    def best(of: Callable[[str], str], place: Place) -> float:
        return statistics.median(gain(at, (place,), tuple(map(of, EXPANSIONS))) for at in ats)

    def most(of: Callable[[str], str], size: int) -> str:
        one = f"OPT-13b ShareGPT, KV {size} GB"
        (claim,) = (claim for claim in CLAIMS if claim.how == "best" and claim.places[0][0].name == one)
        return ends((claim.of(at, tuple(map(of, EXPANSIONS))) for at in ats), "g")

    def less(of: Callable[[str], str], policies: Sequence[str], where: Sequence[Place]) -> str:
        found = (over(of(policy), closed_form_of(policy), place) for policy in policies for place in where)
        return ends((100 * (1 - one) for one in found), ".2g")

    kinds: Mapping[str, Callable[[str], str]] = {"events": str, "anytime": anytime_of, "closed": closed_form_of}
    at_c = [place for place in places if place[1] == 1.0]
    twelve = [place for place in full if "KV 12 GB" in place[0].name]
    kv = {place: over(KV_ONLY, PIE, place) for place in full}
    binds = [place for place in FIGURES[-1].places if place in small]
    found = {f"best_{kind}": ends(best(kinds[kind], place) for place in small) for kind in ("events", "closed")}
    found |= {f"best_13b_{kind}": ends(best(kinds[kind], place) for place in binds) for kind in ("events", "closed")}
    for kind, where in (("events", fixed), ("anytime", FIGURES[-1].places)):
        of = kinds[kind]
        found |= {
            f"fixed_{kind}": less(of, EXPANSIONS, where),
            f"adaptive_{kind}": less(of, (PIE,), full),
            f"twelve_{kind}": ends(over(of(PIE), BASELINE, place) for place in twelve),
        }
    (held,) = (place for place in fixed if place[0].name == "OPT-13b ShareGPT, KV 3 GB")
    return found | {
        "best_anytime": ends(best(anytime_of, place) for place in binds),
        "late_events": ends((over(PIE, CLOSED_FORM, place, _first) for place in at_c), ".2g"),
        "most_3": most(str, 3),
        "most_7": most(str, 7),
        "most_3_anytime": most(anytime_of, 3),
        "most_7_anytime": most(anytime_of, 7),
        "held": f"{100 * statistics.median(at(*held, EXPANSIONS[-1])['stall_fraction'] for at in ats):.2g}",
        "swap": ends(over(SWAP, PIE, place) for place in full),
        "swap_anytime": ends(over(SWAP, ANYTIME, place) for place in full),
        "kv": ends(kv.values()),
        "kv_anytime": ends(over(KV_ONLY, ANYTIME, place) for place in full),
        "kv_least": min(kv, key=lambda place: kv[place])[0].name.partition(",")[0],
        "kv_bytes": ends(over(KV_ONLY, PIE, place, _bytes) for place in full),
        "kv_out": ends((over(KV_ONLY, PIE, place, lambda point: point["out_gb"]) for place in full), ".3f"),
    }


def _tokens(point: Point) -> float:
    return point["tokens_per_s"]


def _first(point: Point) -> float:
    return point["ttft_p99_s"]


def _bytes(point: Point) -> float:
    return point["in_gb"] + point["out_gb"]


def page(data: Mapping[str, Any], wanted: Sequence[Figure] = FIGURES) -> str:
    """The whole page, of what is stored."""
    settings = data["settings"]
    parts = []
    for figure in (one for one in wanted if one.shown):
        table = latencies(data, figure) if len(figure.places) == 1 else grid(data, figure)
        what = "" if len(figure.places) == 1 else " (tokens/s)"
        parts.append(f"## Figure {figure.number}: {figure.title}{what}\n\n{table}\n")
    return PAGE.format(
        seeds=settings["seeds"],
        requests=settings["requests"],
        alpaca=round(settings["requests"] * FIGURES[0].places[0][0].requests),
        kv_only=KV_ONLY,
        text=words(data),
        claims=claims(data),
        left="; ".join(f"{name}, {headlines()[name].figure} ({why})" for name, why in NOT_SIMULATED.items()),
        figures="\n".join(parts),
        against=against(data, wanted),
        readings=readings(data, wanted),
        flexgen=flexgen(data),
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
