"""How much of what memory is worth each policy gets, over several seeds: where it is between recompute and ideal.

python -m bench.lab gap                  runs what is missing (a quarter of an hour on two cores) and writes the page
python -m bench.lab gap --quick          few requests and two seeds: that it runs
python -m bench.lab gap --report-only    writes the page of what is stored
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remap_serve.sim.policies import OURS, SLEEP_AND_SWAP, UNUSED_KV_AND_SWAP, WEIGHTS_ONLY

from . import ROOT, seeds
from .cells import WHOLE, Cell, Group, empty, run_missing
from .paper.experiment_list import C1, C2
from .paper.experiments import BASELINE, IDEAL, Panel
from .paper.runs import Settings
from .seeds import AGAINST, GOODPUT, Column

__all__ = ["CELLS", "POLICIES", "QUICK", "RESULTS", "SETTINGS", "quotients", "run_gap", "table"]

RESULTS = ROOT / "bench" / "results" / "gap.json"


THREE = Panel("8B, 13B and 14B ShareGPT", "Llama-3-8b:25%,Llama-2-13b:37%,Qwen2.5-14B:37%", ("sharegpt",))
TWO = Panel("Qwen3-4B twice ShareGPT", "Qwen3-4B:45%,Qwen3-4B:45%", ("sharegpt",))
CELLS = (
    *(Cell("GH200-96GB", C1[1], rate) for rate in (4.0, 6.0)),
    Cell("GH200-96GB", C2[1], 1.5),
    *(Cell("H100-PCIe", THREE, rate) for rate in (2.0, 4.0)),
    *(Cell("RTX-4090", TWO, rate) for rate in (4.0, 8.0)),
)
WEIGHTS_AND_SWAP = f"{WEIGHTS_ONLY}+swap"
POLICIES = (
    *(BASELINE, "pie", SLEEP_AND_SWAP, UNUSED_KV_AND_SWAP),
    *(WEIGHTS_ONLY, WEIGHTS_AND_SWAP, OURS, WHOLE, IDEAL),
)
SETTINGS = Settings(requests=400, seeds=5)
QUICK = Settings(requests=100, seeds=2, quick=True)
COLUMNS = (
    Column("ttft_p99_s", "TTFT P99, s"),
    Column("longest_gap_p99_s", "longest gap of a request P99, s"),
    Column("tbt_p99_s", "gap P99, s"),
    Column("tpot_p99_s", "TPOT P99, s"),
    Column("tokens_per_s", "tokens/s", more_is_better=True),
)
PAGE = """# Between recompute and ideal: {seeds} seeds of {requests:,} requests

Virtual time, bursts of the Azure code trace, ShareGPT lengths, models in epochs of 1 s; `sleep+swap` and `whole`, where one model
is awake at a time, in turns of 1 s. C1 is OPT-13b, Llama-2-13b and Llama-3-8b, C2 is OPT-30b and OPT-6.7b, the third load is
Llama-3-8b, Llama-2-13b and Qwen2.5-14B, and the last Qwen3-4B twice, on a machine of 24 GB whose link has 25.5 GB/s. Each figure
is the median of n seeds, (worst to best). Made by `python -m bench.lab gap`; equal settings give equal figures.

`ideal` is recompute with six times the memory. `whole` is recompute where whoever has the turn has all memory and
switching costs nothing: no lending in turns alone could reach more. Gap closed: how far a policy comes from recompute (0 %) to
ideal (100 %), each seed by itself; – where both are within 5 %. Goodput: requests with the first token within 2 s and TPOT
of at most 0.2 s. TPOT is a request's mean time of a token after the first, a gap is the time between two of its tokens.

{table}

`kv-pool+swap` is the strongest alternative that moves no weights: KV that the models share, as kvcached does, and KV in host
memory. `sleep+swap` is the strongest that does: one model is awake at a time, whole, with all memory that the others do not need,
as sleep mode has it; and KV of paused requests stays in host memory, where sleep mode loses it. The default, `remap`, has all of
these donors. Quotients seed by seed: from the least to the most of the loads' medians, and in parentheses
of all seeds:

| `remap`'s | by `kv-pool+swap`'s | by `sleep+swap`'s | by `remap:weights+swap`'s | by `ideal`'s |
|---|---|---|---|---|
{beside}

Weights alone, `remap:weights`, where every reservation is its tenant's own and nothing is swapped, are behind `kv-pool+swap` in
{behind} of the {loads} loads.
"""
BESIDE = (UNUSED_KV_AND_SWAP, SLEEP_AND_SWAP, WEIGHTS_AND_SWAP, IDEAL)


def table(data: Mapping[str, Any], cells: Sequence[Cell] = CELLS) -> str:
    """Markdown: a line for each cell and policy."""
    return Group(tuple(cells), POLICIES, epochs=True).table(data, (*COLUMNS, *AGAINST, GOODPUT))


def quotients(
    data: Mapping[str, Any], key: str, above: str, below: str, cells: Sequence[Cell] = CELLS
) -> list[list[float]]:
    """By cell and seed, one policy's figure by another's."""
    return [
        [
            data["points"][cell.name(above, seed)][key] / data["points"][cell.name(below, seed)][key]
            for seed in range(data["settings"]["seeds"])
        ]
        for cell in cells
    ]


def _words(data: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """What the page says below its table."""
    if any(cell.name(policy, 0) not in data["points"] for cell in cells for policy in POLICIES):
        return {"beside": "| – | – | – | – | – |", "behind": "–", "loads": len(cells)}
    rows = []
    for column in COLUMNS:
        found = [f"{column.title.removesuffix(', s')}"]
        for other in BESIDE:
            each = quotients(data, column.key, OURS, other, cells)
            middles, every = [statistics.median(one) for one in each], [one for seeds in each for one in seeds]
            found.append(f"{min(middles):.3g} to {max(middles):.3g} ({min(every):.3g} to {max(every):.3g})")
        rows.append(f"| {' | '.join(found)} |")
    first = quotients(data, "ttft_p99_s", WEIGHTS_ONLY, UNUSED_KV_AND_SWAP, cells)
    behind = sum(statistics.median(one) > 1 for one in first)
    return {"beside": "\n".join(rows), "behind": behind, "loads": len(cells)}


def run_gap(
    results: Path,
    settings: Settings = SETTINGS,
    *,
    jobs: int = 1,
    report_only: bool = False,
    cells: Sequence[Cell] = CELLS,
) -> str:
    """Run what `results` lacks, and write the page beside it. Returns the page.

    What was run with other settings does not count: the file is begun anew. Raises InvalidArgument (field path) for a file
    of something else, before anything runs.
    """
    data = seeds.read(results, empty(settings), "gap")
    if not report_only:
        run_missing(data, settings, results, jobs, [Group(tuple(cells), POLICIES, epochs=True)])
    text = PAGE.format(
        seeds=settings.seeds, requests=settings.requests, table=table(data, cells), **_words(data, cells)
    )
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
