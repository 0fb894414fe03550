"""HybridServe's Figures 12 to 15, simulated: what is missing is run, and the page is written.

python -m bench.lab hybridserve                  runs what is missing (minutes) and writes the page
python -m bench.lab hybridserve --quick          one batch of each table and two seeds: that it runs
python -m bench.lab hybridserve --report-only    writes the page of what is stored
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.lab import ROOT, seeds
from bench.lab.paper.experiments import headlines
from bench.lab.seeds import Column, Point

from .batches import BLOCK_TOKENS, OUTPUT, PREFILL_TOKENS, SHAREGPT, Batch, run
from .figures import CLAIMS, GRIDS, NOT_SIMULATED, Claim, Grid, Settings, name_of, runs

__all__ = ["QUICK", "RESULTS", "SETTINGS", "empty", "page", "run_hybridserve"]

RESULTS = ROOT / "bench" / "results" / "hybridserve.json"
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
}
PAGE = """# HybridServe and the library's division of KV and activations, simulated

Figures 12 to 15 of "Efficient LLM Inference with Activation Checkpointing and Hybrid Caching" (Lee et al.) in virtual
time: an RTX 4090 (`RTX-4090`, 25.5 GB/s to the device), 128 requests at a time, {output} tokens of answer each, prompts
of 128 to 1,920 tokens, weights streamed but for what the device has room for. ShareGPT's prompts are of {seeds} seeds:
median, (lowest to highest). The other lengths are fixed, and have none. Made by `python -m bench.lab hybridserve`; equal
settings give equal figures.

`KV` keeps K and V alone, as FlexGen does, `activations` activations alone. `paper` is HybridServe's Algorithm 1 and its
greedy packing, with what the paper leaves open decided in
[hybrid.py](../../src/remap/policy/hybrid.py) and [minibatches.py](../../src/remap/policy/minibatches.py). `ours` is the
division with the least certified seconds of all passes. All run on one model of
time: a pass layer by layer over mini-batches ([layerwise.py](../lab/hybridserve/layerwise.py)), event by event, with
weights, KV, activations and stores on the link. Blocks have {block} tokens, prompts are computed {prefill:,} tokens at a time. No
system loses time between passes, waits for its host's memory, or shares device memory's bandwidth with copies.

{text}## The paper's numbers beside ours

The ids are those of [headlines.json](../lab/paper/headlines.json).

{claims}

Not simulated: {left}.

{grids}"""
TEXT = """## What it says

Good: in the mean a hybrid is ahead of KV alone and of activations alone, as in the paper (`paper` is not with every
batch). `ours` serves 3 to 41 % more tokens a second than `paper` in Figure 12 (12 % in the geometric mean) and 12 to
81 % more with ShareGPT's prompts (medians of 15 to 49 %), and none of the systems serves more anywhere. What is
certified of `ours` is within 1.2 % of what the link, or the processor, does in such a pass, 0.1 % in the median. The
bytes of KV (section 3.1), the fits of Figure 11, the 78 % of Figure 6 (81 %), the traffic of Figure 13 (1.37 times
fewer bytes; 1.27 and 1.38), and in Figure 15 1:1 against activations alone (1.41; 1.33) come out near the paper's.
This is simulated: by measurement, in the engine on a CPU with small models, no mixture has won yet
([offline.md](offline.md)).

Why `paper` is behind: Algorithm 1 does not count that activations are loaded too (Eq. 9), nor the forward pass. With
l and g seconds to load a block's K and V and to make them again, it makes l / (l + g) of a large memory's blocks
activations, where l / (l / 2 + g) balances both pipelines: 44 and 57 % for OPT-30b. And it balances a host memory
that is full, whatever is served: its share hardly depends on the prompts (38 to 42 % for OPT-66b), where the best
falls from 100 to 53 %, as with short prompts weights are most of what is copied. Telling it how many blocks are
served is no remedy: its passes of Figure 12 then take 15 instead of 12 % longer than those of `ours` (single runs,
not stored), since step 1 sets the time of the weights against all activations that the device could hold. With
ShareGPT's prompts and OPT-6.7b its packing costs more than that: requests of few blocks have different ratios, F_b
keeps them apart, and each of 6 to 11 mini-batches (`ours`: 1) reads the weights from device memory again.

Bad, and not reproduced: **2.19 times KV alone**. The most that any system gains here is 1.56 times (OPT-6.7b, 1,536
tokens). KV alone keeps the link busy here and waits for nothing else; activations have half the bytes, and the
weights no fewer. What else FlexGen loses time with is not simulated. **Activations alone are not ahead of KV alone**
(0.97 times; 1.61 in the paper): by the roofline, making K and V again takes 1.27 and 1.58 times as long as loading
them for OPT-30b and 66b, so that with long prompts activations alone are behind. Nor does the gain grow with the
model: making K and V takes work that grows with the square of the hidden size, loading them bytes that grow with it.
From OPT-13b to OPT-66b it falls. The best ratio of KV to activations is 0.69 and 0.89 for OPT-30b and 66b, in the
paper 2 and 1.78; if making K and V took twice as long as by the roofline, it would be 1.91 and 2.38, and the gain
over KV alone 1.18 and 1.14 times (single passes with 1,920 tokens, not stored). Over 1:1, `ours` gains 5 and 1 %
there with 1,920 tokens and 16 % with OPT-6.7b; in the paper the large models gain the more.

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


def page(data: Mapping[str, Any]) -> str:
    """The whole page, of what is stored."""
    settings = Settings(**data["settings"])
    left = "; ".join(
        f"{headlines()[name].figure}, {headlines()[name].config} ({why})" for name, why in NOT_SIMULATED.items()
    )
    grids = (f"## {grid.title}\n\n{table(data['points'], grid, settings)}\n" for grid in GRIDS.values())
    return PAGE.format(
        output=OUTPUT,
        seeds=settings.seeds,
        block=BLOCK_TOKENS,
        prefill=PREFILL_TOKENS,
        text=TEXT,
        claims=claims(data["points"]),
        left=left,
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
    text = page(data)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
