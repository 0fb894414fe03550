"""`bench.lab cluster`: a cluster on this machine under a burst, several rounds of the same requests.

python -m bench.lab cluster                  runs what is missing (about an hour on two cores) and writes the page
python -m bench.lab cluster --duel           with and without merging, and without once more, five rounds
python -m bench.lab cluster --quick          two instances of a tiny model: that it runs
python -m bench.lab cluster --report-only    writes the page of what is stored
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.lab import ROOT, rounds, seeds
from bench.lab.rounds import Suite
from bench.lab.seeds import AGAINST, Column

from .cases import COMPARED, POLICIES, SUITES, Case

__all__ = ["DUEL_RESULTS", "RESULTS", "run_cluster"]

RESULTS = ROOT / "bench" / "results" / "cluster.json"
DUEL_RESULTS = RESULTS.with_name("cluster-duel.json")
MODULE = "bench.lab.cluster.one"
BUBBLES = Column("bubble_share", "bubbles, %", 100.0)
"""Of what is stored (`_bubbles`)."""
COLUMNS = (
    Column("ttft_p50_s", "TTFT P50, s"),
    Column("ttft_p99_s", "TTFT P99, s"),
    Column("tpot_p50_s", "TPOT P50, ms", 1e3),
    Column("tpot_p99_s", "TPOT P99, ms", 1e3),
    Column("tbt_p99_s", "TBT P99, ms", 1e3),
    Column("tokens_per_s", "tokens/s", more_is_better=True),
    *AGAINST,
    Column("violated", "violated, %", 100.0),
    Column("stages", "stages, most"),
    Column("drops", "drops"),
    Column("restores", "restores"),
    Column("drop_prepare_s", "drop: prepare, ms", 1e3),
    Column("drop_switch_s", "drop: switch, ms", 1e3),
    Column("exchange_s", "exchange, ms", 1e3),
    Column("fetch_s", "restore: fetch, ms", 1e3),
    Column("restore_s", "restore in all, ms", 1e3),
    Column("pipeline_s", "as stages, s"),
    Column("pipeline_computing_s", "of these computing, s"),
    BUBBLES,
    Column("activation_bytes", "activations, MB", 1e-6),
    Column("kv_sent_bytes", "KV sent, MB", 1e-6),
    Column("layers_sent_bytes", "layers sent, MB", 1e-6),
    Column("layer_bytes", "layers loaded, MB", 1e-6),
    Column("swapped_bytes", "KV to the host and back, MB", 1e-6),
)
GAP = """Gap closed: how far a policy comes
from recompute (0 %) to ideal (100 %), each round by itself; – where both are within 5 %."""
PAGE = """# A cluster under a burst, {rounds} rounds

Measured on {machine}. The 1-minute load before the runs was {load}. Instances are processes (Ray actors)
of {threads} thread each, which share these cores; activations and KV go through gloo over loopback. Greedy, prompts of random
tokens; the requests of a case are asked for at fixed times and are the same in every run. Each figure is the median of n
rounds, (worst to best); the policies alternate within a round. Made by `{command}`. {gap}

{tokens}

{policies}

{cases}

Drop: from the plan until all instances have switched; exchange: until all KV of running requests has moved; restore: from the
first layer that comes home until every instance serves alone and the KV has moved back. Each is the median over the changes of
a run. As stages, computing: sums over the instances; computing is the time of passes, in which an instance may wait for a
core. Bubbles: the share of the former in which they computed nothing. Layers that come home at restores are sent by another
instance of the group, or loaded from the host's master copies, whichever is sooner; with `all`, layers loaded counts those
that stream as well.

{table}
{text}"""
TEXT = """
Good: instances that merge take the burst better than those that stay alone. P99 TTFT is 12.5 s (SmolLM2) and 9.7 s (Llama) with
`remap`, where `recompute` takes 25.4 and 29.3 s, `swap` 23.1 and 31.2 s, and `ideal` 10.0 and 5.8 s; tokens/s are 92 and 98 % of
ideal's, those of recompute 75 and 58 %.

Bad: a plan is prepared in 0.9 s (SmolLM2) and 0.4 s (Llama), for each instance ends its pass first. Requests wait while their KV
moves, 1.7 and 0.5 s, so that SmolLM2's P99 TBT is 1.6 times that of `recompute`; and all is as before 2.2 and 1.1 s after a
group has begun to dissolve. The exact plan is no better than the paper's here: both make two pairs, and with `kunserve` P99 TTFT
is 10.0 and 9.3 s, in ranges that overlap. Streaming as well (`all`) gains nothing beyond these ranges (10.0 and 11.9 s), and
loads 6 to 20 times the bytes; nothing of it was swapped, for instances merge before they preempt. No layer came from another
instance: over loopback the host's memory is sooner. One pipeline of all four from the start is quicker than `remap`: these
instances share two cores, so a stage that waits leaves its core to others, and bubbles cost nothing. On devices of their own
they do (`python -m bench.lab kunserve`).
"""


def run_cluster(results: Path, suite_name: str = "full", *, report_only: bool = False) -> str:
    """Run what `results` lacks, and write the page beside it. Returns the page.

    What was run with other settings does not count: the file is begun anew. Raises InvalidArgument (field path) for a
    file of something else or of another machine before anything runs, and what a run raises.
    """
    suite, compared, duel = SUITES[suite_name], COMPARED[suite_name], suite_name == "duel"
    data = seeds.read(results, rounds.empty(suite.settings()), "cluster")
    if not report_only:
        cases = [case.name for case in suite.cases]
        rounds.run_missing(data, results, MODULE, suite_name, cases, compared, suite.rounds, suite.threads)
    shown = data | {"points": {name: point | {BUBBLES.key: _bubbles(point)} for name, point in data["points"].items()}}
    text = PAGE.format(
        rounds=suite.rounds,
        machine=rounds.machine_of(data),
        load=rounds.loads_of(data),
        threads=suite.threads,
        command="python -m bench.lab cluster" + " --duel" * duel,
        gap="" if duel else GAP,
        tokens=rounds.said_of_tokens(data, compared[0]),
        policies="\n".join(f"- `{name}`: {POLICIES[name].about}" for name in compared),
        cases="\n".join(f"- {case.name}: {case}" for case in suite.cases),
        table=rounds.table(shown, suite, compared, [each for each in COLUMNS if not (duel and each in AGAINST)]),
        text=_ratios(data, suite) if duel else TEXT if suite_name == "full" else "",
    )
    results.parent.mkdir(parents=True, exist_ok=True)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text


def _ratios(data: Mapping[str, Any], suite: Suite[Case]) -> str:
    """With merging over without, round by round; and what two equal runs differ by."""
    first, *others = COMPARED["duel"]
    lines = []
    for case in suite.cases:
        for column in COLUMNS:
            if column.key not in ("ttft_p99_s", "tokens_per_s", "tbt_p99_s"):
                continue
            said = []
            for policy in others:
                both = [
                    [data["points"].get(rounds.run_name(case.name, each, number)) for each in (first, policy)]
                    for number in range(suite.rounds)
                ]
                found = [one[column.key] / base[column.key] for base, one in both if base and one]
                if found:
                    middle, least, most = statistics.median(found), min(found), max(found)
                    said.append(f"`{policy}` {middle:.2f} ({least:.2f} to {most:.2f}), n = {len(found)}")
            if said:
                lines.append(f"- {case.name}, {column.title.partition(',')[0]}: {'; '.join(said)}")
    return "\n".join(["", f"Over `{first}`, each round by itself, median and range:", "", *lines, ""])


def _bubbles(point: Mapping[str, float]) -> float:
    """The share of the time as a stage of several for which an instance computed nothing; nan if it never was one."""
    return 1.0 - point["pipeline_computing_s"] / point["pipeline_s"] if point["pipeline_s"] else math.nan
