"""What a target for latency costs, and what the length of a turn trades, over several seeds.

python -m bench.lab trades                  runs what is missing and writes the page
python -m bench.lab trades --quick          few requests and two seeds: that it runs
python -m bench.lab trades --report-only    writes the page of what is stored
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from remap.policy.hardware import machine
from remap_serve.sim.policies import OURS

from . import ROOT, seeds
from .cells import Cell, Group, empty, run_missing
from .gap import TWO
from .paper.experiment_list import ALONE_CHAT, C1
from .paper.experiments import BASELINE, IDEAL
from .paper.runs import Settings
from .seeds import GOODPUT, Column

__all__ = ["QUICK", "RESULTS", "SETTINGS", "TARGETS", "TURNS", "run_trades"]

RESULTS = ROOT / "bench" / "results" / "trades.json"


TARGETS = Group(
    tuple(Cell("GH200-96GB", ALONE_CHAT, rate) for rate in (6.0, 10.0)),
    (
        *(BASELINE, OURS, *(f"{OURS}:tbt_s={target:g}" for target in (0.016, 0.014, 0.012))),
        *(f"{OURS}:tbt_s=0.012+ttft_s={target:g}" for target in (5, 1)),
        IDEAL,
    ),
)
QUANTA = (0.25, 0.5, 1.0, 2.0, 4.0, math.inf)
TURNS = Group(
    tuple(
        Cell(on, replace(panel, name=f"{panel.name}, turns of {quantum:g} s", quantum_s=quantum), 4.0)
        for on, panel in (("GH200-96GB", C1[1]), ("RTX-4090", TWO))
        for quantum in QUANTA
    ),
    (OURS, IDEAL),
)
SETTINGS = Settings(requests=600, seeds=5)
QUICK = Settings(requests=60, seeds=2, quick=True)
COLUMNS = (
    Column("ttft_p50_s", "TTFT P50, s"),
    Column("ttft_p99_s", "TTFT P99, s"),
    Column("tpot_p99_s", "TPOT P99, ms", 1e3),
    Column("tbt_p50_s", "gap P50, ms", 1e3),
    Column("tbt_p99_s", "gap P99, ms", 1e3),
    Column("tokens_per_s", "tokens/s", more_is_better=True),
    GOODPUT,
    Column("preemptions", "preemptions"),
)
PAGE = """# What a target costs, and what the length of a turn trades: {seeds} seeds of {requests:,} requests

Virtual time, bursts of the Azure code trace, ShareGPT lengths. Each figure is the median of n seeds, (worst to best). TPOT is
a request's mean time of a token after the first, a gap is the time between two of its tokens. Made by
`python -m bench.lab trades`; equal settings give equal figures.

## `Config(tbt_s=)` and `Config(ttft_s=)`: one model, nobody else

`tbt_s` bounds the time of a decode pass, stall included, that growth may lead to with all blocks in use: requests wait
instead. With `ttft_s` beside it they wait only while the first of them can still meet that. A gap has besides what the engine
does between two passes ({gap:.0f} ms on this machine), and prefills, which are most of the P99.

{targets}

Without a target the median gap is 16.4 ms, so 16 ms refuse next to nothing. With 14 and 12 ms it is 15.5 to 15.6 and 14.7 to
14.8 ms: less what the engine does between passes, 3 to 15 % over the target, since blocks that came before the passes had
told what one costs stay, and no target takes blocks away. They cost 2 to 10 % of the tokens/s and make the P99 time to the
first token 12 to 25 % longer, for a P99 gap that is 6 to 24 % shorter. Where first tokens are late anyway, `ttft_s` beside
`tbt_s` gives nearly all of that up again.

## Turns

Each model computes for so long, then the next one that has work; `inf`: until it is out of work, so that turns drain. (What a
turn gains for whoever computes it costs those who wait for theirs.)

{turns}

Longer turns make first tokens late and gaps short: on C1 the P99 time to the first token goes from 0.555 s to 28.8 s when turns
drain, and the P99 gap from 550 to 25.3 ms; goodput is best with turns of half a second or less. There `remap` is within 3 %
of `ideal`'s P99 time to the first token whatever the turn. Bad: over the 25.5 GB/s of the RTX 4090 short turns cost more, 33 and
52 % over `ideal` with 0.25 and 0.5 s, 18 % with 1 s and 11 % with 2 s, and P99 TPOT is 1.7 to 3.5 times `ideal`'s up to 1 s.
"""


def run_trades(
    results: Path,
    settings: Settings = SETTINGS,
    *,
    jobs: int = 1,
    report_only: bool = False,
    groups: Sequence[Group] = (TARGETS, TURNS),
) -> str:
    """Run what `results` lacks of two groups, targets and turns, and write the page beside it. Returns the page.

    What was run with other settings does not count: the file is begun anew. Raises InvalidArgument (field path) for a file
    of something else, before anything runs.
    """
    data = seeds.read(results, empty(settings), "trades")
    if not report_only:
        run_missing(data, settings, results, jobs, groups)
    targets, turns = (group.table(data, COLUMNS) for group in groups)
    gap = 1e3 * machine(TARGETS.cells[0].machine).iteration_gap_s
    text = PAGE.format(seeds=settings.seeds, requests=settings.requests, gap=gap, targets=targets, turns=turns)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
