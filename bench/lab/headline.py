"""The simulated headline of the README: five seeds of at least 2,000 requests each at neighbouring rates, medians with ranges.

    python -m bench.lab headline                  runs what is missing (minutes on one core) and writes the page
    python -m bench.lab headline --report-only    writes the page of what is stored

One seed at one rate says little: P99 of a few hundred requests in bursts is the luck of the largest burst.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from remap.errors import InvalidArgument

from . import ROOT
from .paper.experiment_list import C1, C2
from .paper.experiments import BASELINE, OURS, Panel
from .paper.runs import Run, Settings, run_one, saturation

PANELS: tuple[Panel, ...] = (C1[1], C2[1])
FACTORS = (0.5, 0.7, 0.85, 1.0)
SETTINGS = Settings(requests=2000, seeds=5)
RESULTS = ROOT / "bench" / "results" / "headline.json"
PAGE = """# Recompute and remap, simulated: five seeds of 2,000 requests

Virtual time on a GH200 (`GH200-96GB`), bursts of the Azure code trace, ShareGPT lengths, models in turns of 1 s: C1 is OPT-13b,
Llama-2-13b and Llama-3-8b, C2 is OPT-30b and OPT-6.7b. c is the rate that `recompute` is saturated at. Each figure is the
median of n seeds, (lowest to highest). Made by `python -m bench.lab headline`; equal settings give equal figures.

{table}

Good: preemptions and times to first token, at every rate. Bad: the P99 time between tokens is longer under remap in all eight
loads, from 8 % (C1 at 0.85 c, C2 at c) to nine times (C1 at 0.5 c), because more requests run at once and all wait while another
model has its turn; the median time between tokens is up to a third longer. Tokens/s differ by a few percent: until the rate is
far above c, what limits them is how fast requests come.
"""

# Column of the table: (figure of a run, its title, what it is multiplied by).
COLUMNS = (
    ("preemptions", "preemptions", 1.0),
    ("ttft_p50_s", "TTFT P50, s", 1.0),
    ("ttft_p99_s", "TTFT P99, s", 1.0),
    ("tbt_p50_s", "TBT P50, ms", 1e3),
    ("tbt_p99_s", "TBT P99, ms", 1e3),
    ("tokens_per_s", "tokens/s", 1.0),
)

Points = dict[str, dict[str, float]]


def name_of(panel: Panel, factor: float, policy: str, seed: int) -> str:
    return f"{panel.name} | x{factor:g} | {policy} | {seed}"


def read(path: Path, settings: Settings) -> dict[str, Any]:
    """What is stored for these settings; nothing for others. Raises InvalidArgument (field path) for a file of something else."""
    if path.exists():
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["settings"] == settings.to_json():
                return {part: dict(data[part]) for part in ("settings", "c", "points")}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidArgument(
                f"{path} is not a result of `bench.lab headline` ({error!r}); nothing was run; name another file",
                field="path",
                value=str(path),
            ) from error
    return {"settings": settings.to_json(), "c": {}, "points": {}}


def write(path: Path, data: Mapping[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(path)


def run_missing(
    data: dict[str, Any],
    settings: Settings,
    path: Path,
    jobs: int,
    panels: Sequence[Panel] = PANELS,
    factors: Sequence[float] = FACTORS,
) -> None:
    """Run what `data` lacks, seed by seed, and write `path` after each run: a run that is stopped loses one point."""
    c, points = data["c"], data["points"]
    for panel in panels:
        if panel.name not in c:
            c[panel.name] = saturation(panel, settings)[0]
    runs = [
        (name_of(panel, factor, policy, seed), Run(panel, policy, f"x{factor:g}", c[panel.name] * factor, seed))
        for seed in range(settings.seeds)
        for panel in panels
        for factor in factors
        for policy in (BASELINE, OURS)
    ]
    missing = [(name, run) for name, run in runs if name not in points]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [(name, pool.submit(run_one, run, settings)) for name, run in missing]
        for name, future in futures:
            points[name], _ = future.result()
            write(path, data)
            print(name, file=sys.stderr, flush=True)


def _cell(values: Sequence[float], times: float) -> str:
    """ "17.7 (1.9 to 22.0)": the median of the seeds and their range."""
    middle, low, high = (f"{value * times:.3g}" for value in (statistics.median(values), min(values), max(values)))
    if max(values) * times >= 1000:
        middle, low, high = (f"{value * times:,.0f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def table(data: Mapping[str, Any], panels: Sequence[Panel] = PANELS, factors: Sequence[float] = FACTORS) -> str:
    """Markdown: a line for each load, rate and policy. What was not run yet is left out; n says how many seeds a line has."""
    out = ["| load | rate | policy | n | " + " | ".join(title for _, title, _ in COLUMNS) + " |"]
    out.append("|---|---|---|---|" + "---|" * len(COLUMNS))
    points: Points = data["points"]
    for panel in panels:
        for factor in factors:
            for policy in (BASELINE, OURS):
                names = [name_of(panel, factor, policy, seed) for seed in range(data["settings"]["seeds"])]
                seen = [points[name] for name in names if name in points]
                if seen:
                    cells = [_cell([one[figure] for one in seen], times) for figure, _, times in COLUMNS]
                    rate = f"{factor:g} c = {seen[0]['rate']:.3g}/s"
                    out.append(f"| {panel.name} | {rate} | {policy} | {len(seen)} | " + " | ".join(cells) + " |")
    return "\n".join(out)


def run_headline(results: Path, *, jobs: int = 1, report_only: bool = False) -> str:
    """Run what `results` lacks, and write the page beside it. Returns the page."""
    data = read(results, SETTINGS)
    if not report_only:
        run_missing(data, SETTINGS, results, jobs)
    text = PAGE.format(table=table(data))
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
