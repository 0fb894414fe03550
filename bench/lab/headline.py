"""The simulated headline of the README: five seeds of at least 2,000 requests each at neighbouring rates, medians with ranges.

    python -m bench.lab headline                  runs what is missing (three quarters of an hour on one core) and writes the page
    python -m bench.lab headline --report-only    writes the page of what is stored

One seed at one rate says little: P99 of a few hundred requests in bursts is the luck of the largest burst.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remap_serve.sim.policies import OURS, UNUSED_KV_AND_SWAP, WEIGHTS_ONLY

from . import ROOT, seeds
from .paper.experiment_list import C1, C2
from .paper.experiments import BASELINE, IDEAL, Panel
from .paper.runs import Run, Settings, point, saturation
from .seeds import AGAINST, GOODPUT, Column

PANELS: tuple[Panel, ...] = (C1[1], C2[1])
FACTORS = (0.5, 0.7, 0.85, 1.0)
POLICIES = (BASELINE, UNUSED_KV_AND_SWAP, WEIGHTS_ONLY, OURS, IDEAL)
SETTINGS = Settings(requests=2000, seeds=5)
RESULTS = ROOT / "bench" / "results" / "headline.json"
PAGE = """# Recompute and remap, simulated: five seeds of 2,000 requests

Virtual time on a GH200 (`GH200-96GB`), bursts of the Azure code trace, ShareGPT lengths, models in turns of 1 s: C1 is OPT-13b,
Llama-2-13b and Llama-3-8b, C2 is OPT-30b and OPT-6.7b. c is the rate that `recompute` is saturated at. Each figure is the
median of n seeds, (lowest to highest). Made by `python -m bench.lab headline`; equal settings give equal figures.

`ideal` is recompute with six times the memory. Gap closed: how far a policy comes from recompute (0 %) to ideal (100 %),
each seed by itself; – where both are within 5 %. Goodput: requests with the first token within 2 s and TPOT of at most 0.2 s.

{table}

`remap` is the default, with all donors; `remap:weights` has weights alone: every reservation is its tenant's own, and nothing
is swapped; `kv-pool+swap` is the strongest alternative that leaves weights where they are.

Good: times to first token, at every rate. Under `remap` their P99 is 31 to 56 times shorter than under `recompute` on C1, at
most 3 % longer than `ideal`'s, and 5.4 to 5.8 times shorter on C2; nothing is recomputed. P99 TPOT is 5 to 44 %
shorter. What weights add: P99 first tokens come 9 to 21 times sooner on C1 and 3.6 to 4 times on C2 than with `kv-pool+swap`, and
P99 TPOT is within 3 % (C1 at 0.5 and 0.85 c) or 5 to 31 % shorter. Bad: **`remap` preempts more often than
`recompute` in four of eight loads, up to 1.8 times** (each time to host memory), and 2.2 to 8.4 times as often as
`kv-pool+swap`. **The P99 time between tokens is longer than under `recompute` in six of eight loads, up to three times (C1 at
0.7 c)**, because more requests run at once and all wait while another model has its turn (C2 at 0.5 c: 7 % shorter), and up
to 4.3 times that under `kv-pool+swap` (C2); the median time between tokens is up to 13 % longer than under `recompute`. On C2
first tokens come 47 to 63 times later than with `ideal`, and on C1 at c one seed's P99 is 29 s. Tokens/s differ by up to 16 %:
until the rate is far above c, what limits them is how fast requests come.
"""

COLUMNS = (
    Column("preemptions", "preemptions"),
    Column("ttft_p50_s", "TTFT P50, s"),
    Column("ttft_p99_s", "TTFT P99, s"),
    Column("tbt_p50_s", "TBT P50, ms", 1e3),
    Column("tbt_p99_s", "TBT P99, ms", 1e3),
    Column("tpot_p99_s", "TPOT P99, ms", 1e3),
    Column("tokens_per_s", "tokens/s"),
    GOODPUT,
    *AGAINST,
)


def name_of(panel: Panel, factor: float, policy: str, seed: int) -> str:
    return f"{panel.name} | x{factor:g} | {policy} | {seed}"


def read(path: Path, settings: Settings) -> dict[str, Any]:
    """What is stored for these settings; nothing for others. Raises InvalidArgument (field path) for a file of something else."""
    return seeds.read(path, {"settings": settings.to_json(), "c": {}, "points": {}}, "headline")


def run_missing(
    data: dict[str, Any],
    settings: Settings,
    path: Path,
    jobs: int,
    panels: Sequence[Panel] = PANELS,
    factors: Sequence[float] = FACTORS,
) -> None:
    """Run what `data` lacks, seed by seed, and write `path` after each run."""
    c = data["c"]
    for panel in panels:
        if panel.name not in c:
            c[panel.name] = saturation(panel, settings)[0]
    runs = {
        name_of(panel, factor, policy, seed): (
            Run(panel, policy, f"x{factor:g}", c[panel.name] * factor, seed),
            settings,
        )
        for seed in range(settings.seeds)
        for panel in panels
        for factor in factors
        for policy in POLICIES
    }
    seeds.run_missing(data, runs, path, jobs, point)


def table(data: Mapping[str, Any], panels: Sequence[Panel] = PANELS, factors: Sequence[float] = FACTORS) -> str:
    """Markdown: a line for each load, rate and policy. What was not run yet is left out; n says how many seeds a line has."""
    lines = []
    for panel in panels:
        for factor in factors:
            rate = f"{factor:g} c = {factor * data['c'].get(panel.name, math.nan):.3g}/s"
            names = {
                policy: [name_of(panel, factor, policy, seed) for seed in range(data["settings"]["seeds"])]
                for policy in POLICIES
            }
            lines.append(seeds.Line((panel.name, rate), names))
    return seeds.table(data["points"], ("load", "rate"), lines, COLUMNS)


def run_headline(results: Path, *, jobs: int = 1, report_only: bool = False) -> str:
    """Run what `results` lacks, and write the page beside it. Returns the page."""
    data = read(results, SETTINGS)
    if not report_only:
        run_missing(data, SETTINGS, results, jobs)
    text = PAGE.format(table=table(data))
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
