"""HybridServe's Figures 12 to 15, simulated: what is missing is run, and the page is written.

python -m bench.lab hybridserve                  runs what is missing (minutes) and writes the page
python -m bench.lab hybridserve --quick          one batch of each table and two seeds: that it runs
python -m bench.lab hybridserve --report-only    writes the page of what is stored
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.lab import ROOT, rounds, seeds
from bench.lab.paper.experiments import headlines
from bench.lab.seeds import Column, Point

from .batches import BLOCK_TOKENS, OUTPUT, PREFILL_TOKENS, SHAREGPT, Batch, run
from .engine import ENGINE_POLICIES, serve_virtually
from .figures import CLAIMS, GRIDS, LOADS, NOT_SIMULATED, Claim, Grid, Settings, engine_name, engine_runs, name_of, runs
from .window import window

__all__ = ["QUICK", "RESULTS", "SETTINGS", "empty", "page", "run_hybridserve"]

RESULTS = ROOT / "bench" / "results" / "hybridserve.json"
MEASURED_RESULTS = ROOT / "bench" / "results" / "offline.json"
SETTINGS = Settings()
QUICK = Settings(seeds=2, quick=True)
COLUMNS = {
    "tokens_per_s": Column("tokens_per_s", "tokens/s"),
    "activation_share": Column("activation_share", "activations, % of blocks", 100.0),
    "mini_batches": Column("mini_batches", "mini-batches"),
    "weights_gb": Column("weights_gb", "weights, GB"),
    "kv_gb": Column("kv_gb", "KV, GB"),
    "activations_gb": Column("activations_gb", "activations, GB"),
    "busy": Column("busy", "computing, %", 100.0),
    "batches": Column("batches", "batches"),
}
ENGINE_COLUMNS = (
    Column("tokens_per_s", "tokens/s"),
    Column("activation_share", "activations, % of blocks", 100.0),
    Column("pass_s", "a pass, ms", 1e3),
    Column("expected_pass_s", "certified, ms", 1e3),
)
PAGE = """# HybridServe and the library's division of KV and activations, simulated

Figures 12 to 15 of "Efficient LLM Inference with Activation Checkpointing and Hybrid Caching" (Lee et al.) in virtual
time: an RTX 4090 (`RTX-4090`, 25.5 GB/s to the device), 128 requests at a time, {output} tokens of answer each, prompts
of 128 to 1,920 tokens, weights streamed but for what the device has room for. ShareGPT's prompts are of {seeds} seeds:
median, (lowest to highest). The other lengths are fixed, and have none. Made by `python -m bench.lab hybridserve`; equal
settings give equal figures.

`KV` keeps K and V alone, `activations` activations alone. `FlexGen` is `KV` in FlexGen's schedule and with its attention
([flexgen.py](../lab/hybridserve/flexgen.py)), the baseline of the paper. `paper` is HybridServe's Algorithm 1 and its
greedy packing, with what the paper leaves open decided in
[hybrid.py](../../src/remap_serve/policy/hybrid.py) and [minibatches.py](../../src/remap_serve/policy/minibatches.py). `ours` is
the division with the least certified seconds of all passes. All run on one model of
time: a pass layer by layer over mini-batches ([layerwise.py](../lab/hybridserve/layerwise.py)), event by event, with
weights, KV, activations and stores on the link. Blocks have {block} tokens, prompts are computed {prefill:,} tokens at a time. No
system loses time between passes, waits for its host's memory, or shares device memory's bandwidth with copies.

{text}## The paper's numbers beside ours

The ids are those of [headlines.json](../lab/paper/headlines.json).

{claims}

Not simulated: {left}.

## Where a mixture can win, and by how much at most

{bound}

{windows}

## The library's engine itself, in virtual time

{engine_text}

{engine}

{grids}"""
BOUND = """At a share s of activations no schedule of a pass takes less than T(s) = max(W + K (1 - s / 2) - D, F + G s):
the link's seconds for weights and for all K and V, less what the device keeps of either, and the processor's for all
but recomputation and to make all K and V again ([window.py](../lab/hybridserve/window.py)). So a mixture is faster than
KV alone and activations alone if and only if the link is the longer one with KV alone and the processor with
activations alone. It gains at most 1 + K / 2 (W + K - D) times then: 1.5 if the device keeps no more than weights, 2 if
activations alone still copy something, and more only where the device holds the rest of K and V before.
(Gain, ideal: of schedules that hide all they can. Real ones may gain more, as what they do not hide differs.)
**Activations that stay on the device are worth no more than weights that stay**: either byte saves a byte on the link.
Link: by how much slower or faster it may be for a mixture to win. Passes of `ours` take {least} to {most} times the
bound ({count} batches, the middle pass).{measured}"""
MEASURED = """

**Why no mixture won by measurement** in [offline.md](offline.md): for these models a mixture can win on a link of {low}
to {high} GB/s (by its own figures with KV alone and activations alone). It was tried at {tried} GB/s, where activations
alone are best, and at the speed of the processor's memory, where KV alone is."""
ENGINE_TEXT = """`ThroughputEngine` with its own calibration, choice, schedule and order of copies, on random narrow
models with layers of the lengths and the seconds of the large one's: computing takes what the roofline says, copies
what the link takes ([engine.py](../lab/hybridserve/engine.py)). Answers of 24 tokens; median of {seeds} seeds, which
draw the prompts, (lowest to highest). `best` is the engine's choice. Tokens/s: of passes without prompts, of so many
layers. All policies gave equal tokens in {equal} of {runs} runs. {said}"""
TEXT = """## What it says

Good: in the mean a hybrid is ahead of KV alone and of activations alone, as in the paper (`paper` is not with every
batch). `ours` serves 3 to 41 % more tokens a second than `paper` in Figure 12 (12 % in the geometric mean) and 12 to
81 % more with ShareGPT's prompts (medians of 15 to 49 %), and none of these systems serves more anywhere. What is
certified of `ours` is within 1.2 % of what the link, or the processor, does in such a pass, 0.1 % in the median. The
bytes of KV (section 3.1), the fits of Figure 11, the 78 % of Figure 6 (81 %), the traffic of Figure 13 (1.37 times
fewer bytes; 1.27 and 1.38), and in Figure 15 1:1 against activations alone (1.41; 1.33) come out near the paper's.

**What our engine lacks is worth little.** Copies of whole layers for all requests together, as its prefetcher makes them, and
no activations that stay (`whole`) cost 1 to 5 % of the tokens/s of `ours` with OPT-13b to 66b, 6 to 11 % with OPT-6.7b:
buffers for the whole batch take their room from weights that stay. Activations that stay are worth -1 to 2 % (`whole, held`
against `whole`, `ours` against `parts`). An earlier estimate of 31 to 119 % left buffers at a tenth of the device.

Why `paper` is behind: Algorithm 1 does not count that activations are loaded too (Eq. 9), nor the forward pass. With
l and g seconds to load a block's K and V and to make them again, it makes l / (l + g) of a large memory's blocks
activations, where l / (l / 2 + g) balances both pipelines: 44 and 57 % for OPT-30b. And it balances a host memory
that is full, whatever is served: its share hardly depends on the prompts (38 to 42 % for OPT-66b), where the best
falls from 100 to 53 %, as with short prompts weights are most of what is copied. Telling it how many blocks are
served is no remedy: its passes of Figure 12 then take 15 instead of 12 % longer than those of `ours` (single runs,
not stored), since step 1 sets the time of the weights against all activations that the device could hold. With
ShareGPT's prompts and OPT-6.7b its packing costs more than that: requests of few blocks have different ratios, F_b
keeps them apart, and each of 6 to 11 mini-batches (`ours`: 1) reads the weights from device memory again.

**FlexGen's utilisation is explained** by one constant. Its attention rearranges K and V before each product, so that it moves
each byte three times in device memory, not once. With 3 instead of 1 the processor computes for 9.3 % of the time with 128
requests (7.4 in section 3.1, 12.6 in 5.4: by the same model they are 2.1 and 4.5 times), for 6.8 % with 32 (8.2), where
`KV` has 5.1 and 4. Nothing else was moved. Its schedule, which waits for all copies after each step, costs 0 to 2 % with
OPT-13b to 66b, 2 to 17 % with OPT-6.7b: the link is busy all the same.

Bad, and not reproduced: **2.19 times FlexGen**. `ours` has 1.41 times in the geometric mean, `paper` 1.26, and the
bound below of ideal schedules allows a mixture 1.3 to 1.58 times the better of both alone where one wins. A link that
carries two thirds as many bytes a second for FlexGen would explain 2.19; neither paper speaks of one.
**Activations alone are not ahead of KV alone** (0.99 times FlexGen; 1.61 in the paper): by the roofline, making K and V
again takes 1.27 and 1.58 times as long as loading them for OPT-30b and 66b, so that with long prompts activations alone
are behind. Nor does the gain grow with the model: making K and V takes work that grows with the square of the hidden
size, loading them bytes that grow with it. From OPT-13b to OPT-66b it falls. The best ratio of KV to activations is
0.69 and 0.89 for OPT-30b and 66b, in the paper 2 and 1.78; if making K and V took twice as long as by the roofline, it
would be 1.91 and 2.38, and the gain over KV alone 1.18 and 1.14 times (single passes with 1,920 tokens, not stored).
Over 1:1, `ours` gains 5 and 1 % there with 1,920 tokens and 16 % with OPT-6.7b; in the paper the large models gain the
more.

Where computing is scarcer: on a GH200 making K and V again takes 6.6 times as long as loading them. There `ours`
keeps 0 to 10 % of the blocks as activations and is 0 to 4 % ahead of KV alone; activations alone serve 8 to 16 % of
what it does. On an H100 with PCIe both take about as long, and `ours` is 33 to 43 % ahead of KV alone.

"""


def empty(settings: Settings) -> dict[str, Any]:
    """What a file of these settings begins with."""
    return {"settings": settings.to_json(), "points": {}}


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _header(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _said(value: float | tuple[float, float], unit: str) -> str:
    text = " and ".join(f"{each:g}" for each in value) if isinstance(value, tuple) else f"{value:g}"
    return f"{text} {unit}".strip()


def _at(points: Mapping[str, Point], batch: Batch, system: str) -> Point:
    return points[name_of(batch, system, 0)]


def _reckoned(points: Mapping[str, Point], claim: Claim, system: str) -> str:
    try:
        found = claim.of(partial(_at, points), system)
    except KeyError:  # not run
        return "–"
    return " and ".join("no activations" if math.isinf(each) else f"{each:.3g}" for each in found)


def claims(points: Mapping[str, Point]) -> str:
    """Markdown: a line for each number of the paper."""
    lines = _header("figure", "id", "of", "", "paper", "simulated", "ours")
    for one in CLAIMS:
        headline = headlines()[one.headline]
        said = [_reckoned(points, one, system) for system in one.systems]
        lines.append(
            _row(
                headline.figure,
                headline.id,
                headline.config,
                one.about,
                _said(headline.value, headline.unit),
                f"`{one.systems[0]}` {said[0]}",
                said[1] if len(said) > 1 else "–",
            )
        )
    return "\n".join(lines)


def table(points: Mapping[str, Point], grid: Grid, settings: Settings) -> str:
    """Markdown: a line for each batch that was run and each system."""
    lines = _header("machine, model", "requests", "prompts", "system", *(COLUMNS[key].title for key in grid.show))
    for batch in grid.batches:
        for system in grid.systems:
            names = [name_of(batch, system, seed) for seed in range(grid.seeds(settings))]
            found = [points[name] for name in names if name in points]
            if found:
                cells = [seeds.cell([point[key] for point in found], COLUMNS[key]) for key in grid.show]
                prompt = "ShareGPT" if batch.prompt == SHAREGPT else f"{batch.prompt:,}"
                lines.append(_row(f"{batch.machine}, {batch.model}", str(batch.size), prompt, f"`{system}`", *cells))
    return "\n".join(lines)


def windows(points: Mapping[str, Point]) -> tuple[str, list[float]]:
    """Markdown: a line for each batch of one length, with the bound; and by how much passes of `ours` are above it."""
    lines = _header(
        "machine, model", "prompts", "best share, %", "gain, ideal", "`ours`, by the better alone", "link, times"
    )
    above = []
    for batch in (*GRIDS["12"].batches, *GRIDS["others"].batches):
        names = [name_of(batch, system, 0) for system in ("KV", "activations", "ours")]
        if not all(name in points for name in names):
            continue
        kv, activations, ours = (points[name] for name in names)
        bound = window(batch)
        above.append(ours["pass_s"] / bound.seconds(ours["activation_share"]))
        gain = ours["tokens_per_s"] / max(kv["tokens_per_s"], activations["tokens_per_s"])
        rates = " to ".join(f"{each:.2g}" for each in bound.rates) if bound.gain > 1.0 else "–"
        cells = (f"{batch.prompt:,}", f"{100 * bound.share:.0f}", f"{bound.gain:.2f}", f"{gain:.2f}", rates)
        lines.append(_row(f"{batch.machine}, {batch.model}", *cells))
    return "\n".join(lines), above


def _measured(results: Path) -> str:
    """What the bound says of the cases of `bench.lab offline`, if they are stored there."""
    if not results.exists():
        return ""
    data = json.loads(results.read_text(encoding="utf-8"))
    low, high = [], []
    for case in (one for one in data["settings"]["cases"] if one["link"]):
        own = case["name"].rpartition(",")[0]

        def pass_s(name: str, policy: str) -> float:
            begin = rounds.run_name(name, policy, 0)[:-1]
            return statistics.median(one["full_pass_s"] for run, one in data["points"].items() if run.startswith(begin))

        low.append(case["link"] * pass_s(case["name"], "activations") / pass_s(own, "activations"))
        high.append(case["link"] * pass_s(case["name"], "KV") / pass_s(own, "KV"))
        tried = case["link"]
    return MEASURED.format(low=f"{max(low) / 1e9:.2g}", high=f"{min(high) / 1e9:.2g}", tried=f"{tried / 1e9:g}")


def engine(points: Mapping[str, Point], settings: Settings) -> tuple[str, str]:
    """Markdown: a line for each load of the engine and policy; and the words before it."""
    lines = _header("machine, model", "n", "policy", *(column.title for column in ENGINE_COLUMNS))
    gains, equal, count = [], 0, 0
    for load in LOADS:
        runs = {
            policy: [
                points[name] for seed in range(settings.seeds) if (name := engine_name(load, policy, seed)) in points
            ]
            for policy in ENGINE_POLICIES
        }
        if not all(runs.values()):
            continue
        for policy, found in runs.items():
            cells = [seeds.cell([point[column.key] for point in found], column) for column in ENGINE_COLUMNS]
            lines.append(_row(str(load), str(len(found)), f"`{policy}`", *cells))
            equal += sum(one["tokens"] == first["tokens"] for one, first in zip(found, runs["KV"]))
            count += len(found)
        each = [
            best["tokens_per_s"] / max(kv["tokens_per_s"], activations["tokens_per_s"])
            for best, kv, activations in zip(runs["best"], runs["KV"], runs["activations"])
        ]
        mixed = any(0.0 < one["activation_share"] < 1.0 for one in runs["best"])
        if mixed:
            gains.append(f"{seeds.cell(each, Column('', ''))} times on {load.machine} with {load.model}")
    said = f"**A mixture wins by measurement**: over the better of KV alone and activations alone, {'; '.join(gains)}."
    text = ENGINE_TEXT.format(seeds=settings.seeds, equal=equal, runs=count, said=said if gains else "")
    return "\n".join(lines), text


def page(data: Mapping[str, Any]) -> str:
    """The whole page, of what is stored."""
    settings = Settings(**data["settings"])
    left = "; ".join(
        f"{headlines()[name].figure}, {headlines()[name].config} ({why})" for name, why in NOT_SIMULATED.items()
    )
    bounds, above = windows(data["points"])
    ran, engine_text = engine(data["points"], settings)
    grids = (f"## {grid.title}\n\n{table(data['points'], grid, settings)}\n" for grid in GRIDS.values())
    return PAGE.format(
        output=OUTPUT,
        seeds=settings.seeds,
        block=BLOCK_TOKENS,
        prefill=PREFILL_TOKENS,
        text=TEXT,
        claims=claims(data["points"]),
        left=left,
        bound=BOUND.format(
            least=f"{min(above):.2f}", most=f"{max(above):.2f}", count=len(above), measured=_measured(MEASURED_RESULTS)
        ),
        windows=bounds,
        engine=ran,
        engine_text=engine_text,
        grids="\n".join(grids),
    )


def run_hybridserve(results: Path, settings: Settings = SETTINGS, *, jobs: int = 1, report_only: bool = False) -> str:
    """Run what `results` lacks, and write the page beside it. Returns the page.

    What was run with other settings does not count: the file is begun anew. Raises InvalidArgument (field path) for a
    file of something else, before anything runs.
    """
    data = seeds.read(results, empty(settings), "hybridserve")
    if not report_only:
        seeds.run_missing(data, runs(settings), results, jobs, run)
        seeds.run_missing(data, engine_runs(settings), results, jobs, serve_virtually)
    text = page(data)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
