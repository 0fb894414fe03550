"""Why the 99th percentile of gaps between tokens says so little where models take turns, and what moves it.

python -m bench.lab knee                  runs what is missing (a quarter of an hour on one core) and writes the page
python -m bench.lab knee --quick          few requests, one load, one seed: that it runs
python -m bench.lab knee --report-only    writes the page of what is stored

A request that runs when its model's turn ends waits for the turns of the others: one gap of a turn or more. If such gaps are
more than 1 % of all, P99 is one of them, otherwise it is a pass: a knee, which small changes of a load cross. Run with the KV
that there is and with less, and with the time between two passes that vLLM's older engine (V0) is said to have had.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.lab import ROOT, seeds
from bench.lab.seeds import Column, Point

from remap.policy.hardware import machine
from remap_serve.sim.policies import WEIGHTS_ONLY
from remap_serve.sim.results import weighted_percentile
from remap_serve.sim.serving import Setup, simulate

from .experiment_list import C1, C2
from .experiments import BASELINE, IDEAL, Panel, setup_of
from .runs import Settings, Store, items_of

__all__ = ["FULL", "QUICK", "RESULTS", "Knee", "Variant", "changed", "page", "run", "run_knee"]

RESULTS = ROOT / "bench" / "results" / "knee.json"
SHARE = 0.7
"""Of the rate at which the load is saturated under `BASELINE`: preemptions, and no endless line."""
LONG = 0.5
"""Share of a turn from which on a gap counts as a wait for the turns of others: no pass takes as long."""
POLICIES = (BASELINE, WEIGHTS_ONLY, IDEAL)


@dataclass(frozen=True)
class Variant:
    """kv: share of the KV that each model has; gap_s: between two passes, the machine's if None."""

    name: str
    kv: float = 1.0
    gap_s: float | None = None


VARIANTS = (
    Variant("as it is"),
    Variant("KV x0.5", 0.5),
    Variant("KV x0.25", 0.25),
    Variant("5 ms between passes", gap_s=5e-3),
    Variant("8 ms between passes", gap_s=8e-3),
)


@dataclass(frozen=True)
class Knee:
    """What is run: panels, each with all variants and policies."""

    settings: Settings
    panels: tuple[Panel, ...]
    variants: tuple[Variant, ...] = VARIANTS

    def runs(self) -> dict[str, tuple[Panel, Variant, str, int, Settings]]:
        """By name, seed by seed."""
        return {
            _name(panel, variant, policy, seed): (panel, variant, policy, seed, self.settings)
            for seed in range(self.settings.seeds)
            for variant in self.variants
            for panel in self.panels
            for policy in POLICIES
        }


FULL = Knee(Settings(seeds=5), (C1[1], C2[1]))
QUICK = Knee(Settings(requests=20, seeds=1, quick=True), (C1[1],), VARIANTS[:2])


def _name(panel: Panel, variant: Variant, policy: str, seed: int) -> str:
    return f"{panel.name}, {variant.name}: {policy} #{seed}"


def changed(setup: Setup, variant: Variant) -> Setup:
    """The setup with the variant's KV and gap."""
    tenants = setup.tenants
    if variant.kv != 1.0:
        tenants = tuple(replace(one, kv_blocks=max(1, round(variant.kv * setup.kv_blocks(one)))) for one in tenants)
    return replace(setup, tenants=tenants, gap_s=variant.gap_s)


def run(panel: Panel, variant: Variant, policy: str, seed: int, settings: Settings) -> Point:
    """One run. waits: the share of gaps that are waits for the turns of others."""
    c = Store.read(ROOT / "bench" / "results" / "paper.json").points.c[panel.name]
    setup = changed(setup_of(panel, machine(settings.machine)), variant)
    found = simulate(setup, items_of(panel, setup, SHARE * c, settings, seed), policy)
    gaps = found.tbt
    number = sum(count for _, count in gaps)
    point = {
        "waits": sum(count for seconds, count in gaps if seconds >= LONG * setup.quantum_s) / max(1, number),
        "preemptions": float(found.preemptions),
        "ttft_p99_s": found.ttft_p99_s,
        "tpot_p99_s": found.tpot_p99_s,
        "tbt_mean_s": found.tbt_mean_s,
        **{f"tbt_p{100 * share:g}_s": weighted_percentile(gaps, share) for share in (0.5, 0.98, 0.99, 0.995)},
    }
    return {key: float(f"{value:.5g}") for key, value in point.items()}


# ---------------------------------------------------------------------------------------------- what is told

COLUMNS = (
    Column("waits", "waits for turns, % of gaps", 100.0),
    Column("tbt_p50_s", "gap P50, ms", 1e3),
    Column("tbt_p98_s", "P98", 1e3),
    Column("tbt_p99_s", "P99", 1e3),
    Column("tbt_p99.5_s", "P99.5", 1e3),
    Column("tpot_p99_s", "P99 TPOT, ms", 1e3),
    Column("ttft_p99_s", "P99 TTFT, s"),
    Column("preemptions", "preemptions"),
)
PAGE = """# The knee: one gap between tokens, where models take turns

C1 and C2 of Oneiros' Fig. 8 with ShareGPT's lengths at {share} of the rate c at which `{base}` is saturated, turns of 1 s,
{requests} requests a run; medians of the seeds, (lowest to highest), **n of {seeds} until now**. `{ideal}`: `{base}` with six
times the memory. The rate stays that of the first variant. Made by `python -m bench.lab knee`; equal settings give equal figures.

A request that runs when its model's turn ends waits for the turns of the others: a gap of half a turn or more counts as that. If
such gaps are more than 1 % of all, the 99th percentile is one of them; otherwise it is a pass. A request has a token a pass, so
in a turn of 1 s with passes of 10 ms one gap in a hundred is a wait, at most: passes of 10 to 20 ms are at the knee. So one gap
(P99 TBT) jumps by ten times where the share of waits crosses 1 %, though little has changed: look at P98 and P99.5 beside it, and
at the request's mean gap (P99 TPOT).

{table}

## Lower than `{base}`, of the same seed, %

A minus is higher. `{ours}` and `{ideal}`: one gap at P99, a request's mean gap at P99, the first token at P99.

{lower}

{text}

Not run: turns that last until the queue is empty, other rates and lengths. "5 ms", "8 ms": about what vLLM's older engine (V0)
takes between two passes, where the newer one takes 1 ms: assumed, not measured.
"""
TEXT = """As it is, {base_waits} % of the gaps are waits for turns under `{base}`, {ours_waits} % under `{ours}` and
{ideal_waits} % under `{ideal}`: all near the knee. P99 is beyond it in {beyond} of {runs} runs of all variants and policies.
By load, medians: with half of the KV P99 TBT of `{ours}` is {half} % lower, with a quarter {quarter}, with 5 or 8 ms
between passes {slow}. P99 TBT and P99 TPOT of `{ours}` have different signs in {differ} of {cells} loads and variants."""


def _found(points: Mapping[str, Point], chosen: Knee, panel: Panel, variant: Variant, policy: str) -> dict[int, Point]:
    names = {seed: _name(panel, variant, policy, seed) for seed in range(chosen.settings.seeds)}
    return {seed: points[name] for seed, name in names.items() if name in points}


def _table(points: Mapping[str, Point], chosen: Knee) -> str:
    out = _header("load", "variant", "policy", "n", *(one.title for one in COLUMNS))
    for panel in chosen.panels:
        for variant in chosen.variants:
            for policy in POLICIES:
                found = list(_found(points, chosen, panel, variant, policy).values())
                if found:
                    cells = [seeds.cell([point[one.key] for point in found], one) for one in COLUMNS]
                    out.append(_row(panel.name, variant.name, f"`{policy}`", str(len(found)), *cells))
    return "\n".join(out)


def _header(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _lower(points: Mapping[str, Point], chosen: Knee, panel: Panel, variant: Variant, policy: str) -> list[list[float]]:
    """Of P99 TBT, P99 TPOT and P99 TTFT, seed by seed, in %."""
    base = _found(points, chosen, panel, variant, BASELINE)
    ours = _found(points, chosen, panel, variant, policy)
    return [
        [100.0 * (1.0 - ours[seed][key] / base[seed][key]) for seed in ours if seed in base]
        for key in ("tbt_p99_s", "tpot_p99_s", "ttft_p99_s")
    ]


def _lower_table(points: Mapping[str, Point], chosen: Knee) -> str:
    titles = [f"`{policy}`: {what}" for policy in POLICIES[1:] for what in ("P99 TBT", "P99 TPOT", "P99 TTFT")]
    out = _header("load", "variant", *titles)
    for panel in chosen.panels:
        for variant in chosen.variants:
            cells = [
                seeds.cell(values, Column("", "", show=_whole)) if values else "–"
                for policy in POLICIES[1:]
                for values in _lower(points, chosen, panel, variant, policy)
            ]
            if set(cells) != {"–"}:
                out.append(_row(panel.name, variant.name, *cells))
    return "\n".join(out)


def _whole(values: Sequence[float]) -> list[str]:
    return [f"{value:,.0f}".replace("-", "\N{MINUS SIGN}") for value in values]


def _text(points: Mapping[str, Point], chosen: Knee) -> str:
    def waits(policy: str) -> str:
        medians = [
            statistics.median(point["waits"] for point in found.values())
            for panel in chosen.panels
            if (found := _found(points, chosen, panel, chosen.variants[0], policy))
        ]
        return _ends(100 * value for value in medians)

    def gaps_of(variants: Sequence[Variant]) -> str:
        medians = [
            statistics.median(values)
            for panel in chosen.panels
            for variant in variants
            if (values := _lower(points, chosen, panel, variant, WEIGHTS_ONLY)[0])
        ]
        return " to ".join(_whole(sorted({min(medians), max(medians)}))) if medians else "–"

    known = [points[name] for name in chosen.runs() if name in points]
    signs = [
        [statistics.median(values) for values in found[:2]]
        for panel in chosen.panels
        for variant in chosen.variants
        if all(found := _lower(points, chosen, panel, variant, WEIGHTS_ONLY))
    ]
    text = TEXT.format(
        base=BASELINE,
        ours=WEIGHTS_ONLY,
        ideal=IDEAL,
        base_waits=waits(BASELINE),
        ours_waits=waits(WEIGHTS_ONLY),
        ideal_waits=waits(IDEAL),
        beyond=sum(point["waits"] > 0.01 for point in known),
        runs=len(known),
        half=gaps_of([variant for variant in chosen.variants if variant.kv == 0.5]),
        quarter=gaps_of([variant for variant in chosen.variants if variant.kv == 0.25]),
        slow=gaps_of([variant for variant in chosen.variants if variant.gap_s is not None]),
        differ=sum(gap * mean < 0 for gap, mean in signs),
        cells=len(signs),
    )
    return fill(" ".join(text.split()), 120)


def _ends(values: Iterable[float]) -> str:
    found = list(values)
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(found), max(found))))


def page(points: Mapping[str, Point], chosen: Knee = FULL) -> str:
    """The whole page of what is stored: a seed at least of the first variant."""
    return PAGE.format(
        share=SHARE,
        base=BASELINE,
        ours=WEIGHTS_ONLY,
        ideal=IDEAL,
        requests=chosen.settings.requests,
        seeds=chosen.settings.seeds,
        table=_table(points, chosen),
        lower=_lower_table(points, chosen),
        text=_text(points, chosen),
    )


def run_knee(results: Path, chosen: Knee = FULL, *, jobs: int = 1, report_only: bool = False) -> str:
    """Run what `results` lacks, and write the page beside it. Returns the page. Raises InvalidArgument (field path) for a file of
    something else, before anything runs."""
    data: dict[str, Any] = seeds.read(results, {"settings": chosen.settings.to_json(), "points": {}}, "knee")
    if not report_only:
        seeds.run_missing(data, chosen.runs(), results, jobs, run)
    text = page(data["points"], chosen)
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
