"""`bench.lab real`: the engine under each policy on this machine, several rounds of the same requests.

    python -m bench.lab real                  runs what is missing (about half an hour on two cores) and writes the page
    python -m bench.lab real --quick          small random models: that it runs
    python -m bench.lab real --report-only    writes the page of what is stored

Policies alternate within each round, so that what the machine does meanwhile falls on all of them; each run is a
process of its own. Every token is compared with those of the first ideal run, and requests with others are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.lab import ROOT, rounds, seeds
from bench.lab.seeds import AGAINST, GOODPUT, Column

from .cases import IDEAL, IN_TURNS, POLICIES, SUITES, Case

__all__ = ["RESULTS", "RESULTS_OF_TURNS", "run_real"]

RESULTS = ROOT / "bench" / "results" / "real.json"
RESULTS_OF_TURNS = RESULTS.with_name("real-turns.json")
COLUMNS = (
    Column("tokens_per_s", "tokens/s", more_is_better=True),
    Column("ttft_p99_s", "TTFT P99, s"),
    Column("tbt_p50_s", "TBT P50, ms", 1e3),
    Column("tbt_p99_s", "TBT P99, ms", 1e3),
    Column("tpot_p99_s", "TPOT P99, ms", 1e3),
    GOODPUT,
    *AGAINST,
    Column("preemptions", "preemptions"),
    Column("recomputed_tokens", "tokens recomputed"),
    Column("weights_in_bytes", "weights in, MB", 1e-6),
    Column("kv_in_bytes", "KV in, MB", 1e-6),
    Column("kv_out_bytes", "KV out, MB", 1e-6),
    Column("cpu_s", "processor time, s"),
)
LONGEST = Column("longest_gap_p99_s", "longest gap of a request, P99, s")
"""Of runs since it was noted."""
PAGE = """# The engine under each policy, {rounds} rounds

Measured on {machine}. The 1-minute load before the runs was {load}. {threads} thread computes,
greedy. All models but SmolLM2 have random weights, and prompts are random tokens. The requests of a case arrive at fixed
times and are the same in every run. Each figure is the median of n rounds, (worst to best); the policies alternate within a
round. Made by `python -m bench.lab real{option}`.

{tokens}

{policies}

{cases}

Gap closed: how far a policy comes from recompute (0 %) to ideal (100 %), each round by itself; – where both are
within 5 %. In and out: between host memory and the arena; on the host backend the cores that compute make these copies.
Processor time: of all threads from the first step on, copies included.

{table}
"""


def _page(data: Mapping[str, Any], suite: rounds.Suite[Case]) -> str:
    columns = (*COLUMNS[:4], LONGEST, *COLUMNS[4:]) if suite is SUITES["turns"] else COLUMNS
    return PAGE.format(
        rounds=suite.rounds,
        machine=rounds.machine_of(data),
        load=rounds.loads_of(data),
        threads=suite.threads,
        option=" --turns" if suite is SUITES["turns"] else "",
        policies="\n".join(f"- `{name}`: {POLICIES[name].about}" for name in _policies(suite)),
        cases="\n".join(f"- {case.name}: {case}" for case in suite.cases),
        tokens=rounds.said_of_tokens(data, IDEAL),
        table=rounds.table(data, suite, _policies(suite), columns),
    )


def _policies(suite: rounds.Suite[Case]) -> list[str]:
    return list(IN_TURNS if suite is SUITES["turns"] else POLICIES)


def run_real(results: Path, suite_name: str = "full", *, report_only: bool = False) -> str:
    """Run what `results` lacks, and write the page beside it. Returns the page.

    What was run with other settings does not count: the file is begun anew. Raises InvalidArgument (field path) for a
    file of something else or of another machine before anything runs, and what a run raises.
    """
    suite = SUITES[suite_name]
    data = seeds.read(results, rounds.empty(suite.settings()), "real")
    if not report_only:
        cases = [case.name for case in suite.cases]
        rounds.run_missing(
            data, results, "bench.lab.real.one", suite_name, cases, _policies(suite), suite.rounds, suite.threads
        )
    text = _page(data, suite)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
