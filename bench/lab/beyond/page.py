"""bench/results/beyond.md and its pictures, and the command that writes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

from bench.lab import ROOT, regret, seeds
from bench.lab.paper.experiments import BASELINE
from bench.lab.paper.pictures import save

from remap_serve.sim.policies import OURS

from . import donors, pictures, processes
from .donors import SOURCES
from .exact import Compared, compared

__all__ = ["FIGURES", "PAGE", "page", "regrets_of", "run_beyond"]

PAGE = ROOT / "bench" / "results" / "beyond.md"
FIGURES: Mapping[str, str] = {
    "ttft_p99_s": "P99 TTFT",
    "tpot_p99_s": "P99 TPOT",
    "tbt_p99_s": "P99 gap between tokens",
    "tokens_per_s": "tokens/s",
}
TEXT = """# What four papers lack and we have, in four figures

`python -m bench.lab beyond` draws them from what other commands have stored, and one load that it simulates itself. None of
the four papers says how far its policy is behind the best one of a load, has more than one or two sources of KV, lends memory
between processes, or counts answers that stay the same. What they have: [paper-vs-ours](../../docs/notes/paper-vs-ours.md).

## Regret: how far each policy is behind the best one of a load

{loads} loads in which requests wait for memory, drawn at random, {seeds} seeds, virtual time ([regret.md](regret.md),
which says what they are and what goes unnoticed). A dot is a load: by how much of the best policy's figure this policy's
is worse, the median of the seeds.

![Regret of each policy](pictures/beyond-regret.svg)

| policy | {titles} |
|---|{rule}
{regret}

In a cell: the loads in which it is more than 10 % behind; its regret in the worst one.

{regret_text}

## All donors together, over time

{load}, {rate} requests/s (c, which `recompute` is saturated at), seed {seed}, a GH200, virtual time: where the KV is from under
`{ours}`, the default, each byte once; and the requests that wait under it and under `{baseline}` in the same memory.

![KV by where it is from, over time](pictures/beyond-donors.svg)

{donors_text}

## Lending between processes

Three servers in three processes, measured on two cores ([results.md](../../docs/notes/results.md) has machine and load): a bar is
the median of {rounds} alternating rounds, a dot a round.

![Three processes with and without a broker](pictures/beyond-processes.svg)

{lending_text}

## Exactness

Requests (passes, in the one of graphs) whose tokens are those of a reference with memory that does not move. Where a baseline
in the same memory was counted too, it stands beside: what recomputes, or has other batches, rounds otherwise
([promises](../../docs/promises.md), 4).

![Requests with the reference's tokens](pictures/beyond-exact.svg)

| measured | reference | same tokens, memory moves | same tokens, baselines |
|---|---|---|---|
{exact}

{exact_text}
"""
REGRET = """The default is at most {ours_ttft} % behind in P99 TTFT and {ours_tokens} % in tokens/s, where `{next}`, the next
in the first tokens, is up to {next_ttft} and {next_tokens} % behind, and weights alone (what Oneiros has) up to
{weights_ttft} and {weights_tokens} %. Its P99 TPOT is up to {ours_tpot} % behind and its gap {ours_tbt} %, since more
requests run at once, and pauses are gaps. `whole` is a bound, and never the best."""
DONORS = """Two models, {models}, take turns. Their own reservations have {own} GB of KV; at the peak (after {at} s) there are
{most} GB, {times} times as much: {parts}. Over the run, at most: {peaks}. In {three} % of the looks three sources or more
have some, in {none} % nothing has moved. KV in host memory is of requests that are paused or preempted; no pass reads it
there. At most {waits_ours} requests wait, under `{baseline}` {waits_base}; P99 TTFT is {ttft_ours} s for {ttft_base} s,
and the last answer ends after {end_ours} s for {end_base} s (n = 1; five seeds: {more})."""
LENDING = """With a broker P99 TTFT is {broker} s where own layers alone bring {own} s and recomputation {static} s: sharing
takes {least} to {most} % more off, by round. One process had at most {peak} KV blocks, for {start}. Worse: the P99 gap
between tokens, {gap} times that of recomputation, since more requests run at once."""
EXACT = """With memory that moves, {same} of {requests} have the reference's tokens. Stock vLLM, {vllm} of {vllm_of} under the
same loads: with other batches its kernels round otherwise."""
MORE = "[paper.md](paper.md#what-memory-is-worth-recompute-with-six-times-as-much-and-how-far-the-others-come)"


def _wrapped(text: str, **values: object) -> str:
    return fill(" ".join(text.format(**values).split()), 120)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def regrets_of() -> tuple[dict[str, dict[str, list[float]]], int]:
    """(figure -> policy -> regret of each load, as a share; seeds)."""
    data = seeds.read(regret.RESULTS, regret.empty(regret.SETTINGS), "regret")
    points, number = data["points"], data["settings"]["seeds"]
    ran = [load for load in regret.LOADS if regret.whole(points, load, number)]
    found: dict[str, dict[str, list[float]]] = {figure: {} for figure in FIGURES}
    for policy in regret.POLICIES:
        each = [one for load in ran if (one := regret.regrets(points, load, policy, number)) is not None]
        for figure in FIGURES:
            found[figure][policy] = [one[figure][0] for one in each if not math.isnan(one[figure][0])]
    return found, number


def _regret_table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    lines = []
    for policy in regret.POLICIES:
        cells = []
        for figure in FIGURES:
            values = found[figure][policy]
            cells.append(f"{sum(value > 0.1 for value in values)}; {100 * max(values):,.0f} %")
        lines.append("| " + " | ".join([f"`{policy}`", *cells]) + " |")
    return "\n".join(lines)


def _regret_text(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    worst = {
        figure: {policy: f"{100 * max(values):,.0f}" for policy, values in policies.items()}
        for figure, policies in found.items()
    }
    (second, *_) = sorted(
        (one for one in regret.POLICIES if one not in (OURS, regret.BOUND)),
        key=lambda one: max(found["ttft_p99_s"][one]),
    )
    said = {"ours": OURS, "next": second, "weights": regret.OF[1]}
    return _wrapped(
        REGRET,
        next=second,
        ours_tpot=worst["tpot_p99_s"][OURS],
        ours_tbt=worst["tbt_p99_s"][OURS],
        **{f"{name}_ttft": worst["ttft_p99_s"][policy] for name, policy in said.items()},
        **{f"{name}_tokens": worst["tokens_per_s"][policy] for name, policy in said.items()},
    )


def _donors_text(runs: Mapping[str, Mapping[str, Sequence[float]]], points: Mapping[str, Mapping[str, float]]) -> str:
    ours, base = runs[OURS], runs[BASELINE]
    looks = [dict(zip(SOURCES, each)) for each in zip(*(ours[name] for name in SOURCES))]
    totals = [sum(look.values()) for look in looks]
    peak = totals.index(max(totals))
    own = max(base["own"])  # what the reservations have, which stay as they are there
    gb = {name: _number(value / 1e3) for name, value in looks[peak].items()}
    return _wrapped(
        DONORS,
        models=" and ".join(donors.models()),
        own=_number(own / 1e3),
        at=_number(ours["time_s"][peak]),
        most=_number(totals[peak] / 1e3),
        times=f"{totals[peak] / own:.1f}",
        parts=", ".join(f"{title} {gb[name]}" for name, title in SOURCES.items()),
        peaks=", ".join(
            f"{title} {_number(max(ours[name]) / 1e3)}" for name, title in SOURCES.items() if name != "own"
        ),
        three=f"{100 * sum(sum(size > 0 for size in look.values()) >= 3 for look in looks) / len(looks):.0f}",
        none=f"{100 * sum(not any(look[name] for name in SOURCES if name != 'own') for look in looks) / len(looks):.0f}",
        waits_ours=f"{max(ours['waiting']):.0f}",
        waits_base=f"{max(base['waiting']):.0f}",
        baseline=BASELINE,
        ttft_ours=_number(points[OURS]["ttft_p99_s"]),
        ttft_base=_number(points[BASELINE]["ttft_p99_s"]),
        end_ours=_number(ours["time_s"][-1]),
        end_base=_number(base["time_s"][-1]),
        more=MORE,
    )


def _lending_text(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    def median(side: str, key: str) -> float:
        return statistics.median(one[side][key] for one in rounds)

    static, own, broker = processes.SIDES
    more = [100 * (1 - one[broker]["ttft_p99_s"] / one[own]["ttft_p99_s"]) for one in rounds]
    return _wrapped(
        LENDING,
        broker=_number(median(broker, "ttft_p99_s")),
        own=_number(median(own, "ttft_p99_s")),
        static=_number(median(static, "ttft_p99_s")),
        least=_number(min(more)),
        most=_number(max(more)),
        peak=_number(median(broker, "blocks_peak")),
        start=_number(median(static, "blocks_peak")),
        gap=f"{median(broker, 'tbt_p99_s') / median(static, 'tbt_p99_s'):.1f}",
    )


def _exact_table(found: Sequence[Compared]) -> str:
    lines = []
    for one in found:
        others = "–" if one.others is None else "{:,} of {:,}".format(*one.others)
        lines.append(f"| [{one.what}]({one.page}) | {one.reference} | {one.same:,} of {one.requests:,} | {others} |")
    return "\n".join(lines)


def _exact_text(found: Sequence[Compared]) -> str:
    (vllm,) = (one.others for one in found if one.what.startswith("vLLM"))
    assert vllm is not None  # its stock side has been counted
    return _wrapped(
        EXACT,
        same=f"{sum(one.same for one in found):,}",
        requests=f"{sum(one.requests for one in found):,}",
        vllm=vllm[0],
        vllm_of=vllm[1],
    )


def page(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """The whole page. runs: of `donors`."""
    regrets, number = regrets_of()
    loads = len(regrets["tokens_per_s"][OURS])
    rounds, exact = processes.rounds(), compared()
    points = {policy: donors.stored_point(policy) for policy in donors.RUN}
    return TEXT.format(
        loads=loads,
        seeds=number,
        titles=" | ".join(FIGURES.values()),
        rule="---|" * len(FIGURES),
        regret=_regret_table(regrets),
        regret_text=_regret_text(regrets),
        load=donors.PANEL.name,
        rate=_number(points[OURS]["rate"]),
        seed=donors.SEED,
        ours=OURS,
        baseline=BASELINE,
        donors_text=_donors_text(runs, points),
        rounds=len(rounds),
        lending_text=_lending_text(rounds),
        exact=_exact_table(exact),
        exact_text=_exact_text(exact),
    )


def run_beyond(path: Path, *, report_only: bool = False) -> str:
    """Run what the file of the donors lacks, and write the page and the pictures. Returns the page. Raises InvalidArgument
    (field path) for a file of something else, before anything runs."""
    runs = donors.read() if report_only else donors.run()
    text = page(runs)
    folder = path.parent / "pictures"
    found, _ = regrets_of()
    for name, figure in {
        "regret": pictures.regret({title: found[key] for key, title in FIGURES.items()}),
        "donors": pictures.donors(runs),
        "processes": pictures.lending(processes.rounds()),
        "exact": pictures.exactness(compared()),
    }.items():
        save(figure, folder / f"beyond-{name}.svg")
    path.write_text(text, encoding="utf-8")
    return text
