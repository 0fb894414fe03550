"""What `bench.lab paper` found, as a table and as docs/paper-vs-ours.md. Nothing is run here, and nothing is said that the
stored points do not hold: reasons are sentences about figures of the two runs that are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lab.seeds import AGAINST, GOODPUT, Column, Line
from bench.lab.seeds import table as table_of_seeds

from remap.sim.hardware import machine

from .experiment_list import EXPERIMENTS
from .experiments import BASELINE, IDEAL, Comparison, Experiment, Headline, Reckoning, headlines, setup_of
from .reckoning import ALONE, METRICS, STILL_FINISHES, Finding, curve
from .reckoning_special import SPECIAL, find
from .report_text import INTRO, constants, facts
from .runs import Store

__all__ = ["Row", "markdown", "rows", "table", "write"]

_CAUTION = """ So few are
  good for directions, not for sizes: the P99 of one run is the luck of its largest burst, and another seed or the next rate may
  differ by several times. Five seeds of 2,000 requests, with their ranges, for the two loads of Fig. 8 with ShareGPT's lengths:
  [headline.md](../bench/results/headline.md)."""
_RANGES = ("fig8-c1", "fig8-c2", "fig9", "fig10", "fig12", "fig13")


@dataclass(frozen=True)
class Row:
    """One headline, with what was found for each policy. why: facts of the runs, at the rate that is quoted."""

    experiment: Experiment
    reckoning: Reckoning
    headline: Headline
    findings: tuple[Finding, ...]
    why: str

    @property
    def done(self) -> bool:
        return any(one.value is not None for one in self.findings)


def rows(store: Store) -> list[Row]:
    """Of all headlines that are compared, in the order of the experiments."""
    found: list[Row] = []
    for experiment in EXPERIMENTS.values():
        for reckoning in experiment.reckonings:
            headline = headlines()[reckoning.headline]
            if reckoning.how == "range":
                findings = _ranges(found, reckoning, headline)
            elif reckoning.how == "hidden_by_batch":
                findings = _hidden(store, headline)
            else:
                tests = (
                    reckoning.tests[:1]
                    if reckoning.how in ("best_static", "best_expansion", "expansion_that_blocks")
                    else reckoning.tests
                )
                findings = tuple(
                    find(store.points, headline, reckoning, experiment.panels_of(reckoning), test) for test in tests
                )
            why = facts(store, experiment, reckoning, findings)
            found.append(Row(experiment, reckoning, headline, findings, why))
    return found


def _ranges(done: Sequence[Row], reckoning: Reckoning, headline: Headline) -> tuple[Finding, ...]:
    """The lowest and the highest of the averages of the experiments."""
    findings = []
    for test in reckoning.tests:
        seen = [
            one.mean
            for row in done
            if row.experiment.id in _RANGES and row.reckoning.metric == reckoning.metric
            for one in row.findings
            if one.test == test and one.mean is not None
        ]
        if not seen:
            findings.append(Finding(headline.id, test, BASELINE))
            continue
        findings.append(
            Finding(
                headline.id,
                test,
                BASELINE,
                max(seen),
                min(seen),
                max(seen),
                reached=min(seen) >= headline.least and max(seen) >= headline.most,
                direction="yes" if min(seen) > 0 else "at some rates" if max(seen) > 0 else "no",
            )
        )
    return tuple(findings)


def _hidden(store: Store, headline: Headline) -> tuple[Finding, ...]:
    if not store.arithmetic:
        return (Finding(headline.id, "arithmetic", BASELINE),)
    hidden = [row["hidden"] for row in store.arithmetic]
    ratio = hidden[-1] / max(1.0, hidden[0])
    return (
        Finding(
            headline.id,
            "arithmetic",
            BASELINE,
            ratio,
            ratio,
            ratio,
            reached=ratio > 1,
            direction="yes" if ratio > 1 else "no",
        ),
    )


# -- text --------------------------------------------------------------------------------------------------------------


def _number(value: float, unit: str) -> str:
    if unit == "x" or unit == "expansion":
        return f"{value:.2f}x"
    return f"{value:.1f} {unit}".strip()


def _unit(headline: Headline) -> str:
    unit = headline.unit.partition(" (")[0]
    return "x" if unit == "expansion" else unit


def paper_says(headline: Headline) -> str:
    unit = _unit(headline)
    words = headline.unit.partition("(")[2].rstrip(")")
    prefix = {"up to": "up to ", "about": "about ", "less than": "below ", "more than": "above "}.get(words, "")
    if isinstance(headline.value, tuple):
        return f"{_number(headline.value[0], unit)} - {_number(headline.value[1], unit)}"
    return prefix + _number(headline.value, unit)


def ours(row: Row, one: Finding) -> str:
    """ "54.4 % at 2.1 and 14/s (x0.5); mean 31.0 % over 5 rates"."""
    unit = _unit(row.headline)
    if one.value is None:
        return (
            "no such rate"
            if row.reckoning.how in ("gain_begins", "expansion_that_blocks") and one.direction
            else "not run"
        )
    if row.reckoning.how == "range":
        return f"{_number(one.low, unit)} - {_number(one.high, unit)}"
    text = _number(one.value, unit)
    if one.high > one.low and row.reckoning.how in (
        "mean",
        "most",
        "best_static",
        "about_zero",
        "about_one",
        "adaptive_overhead",
    ):
        text += f" ({one.low:.3g} to {one.high:.3g})"
    if one.at and row.reckoning.how not in ("gain_begins", "about_zero", "about_one", "adaptive_overhead"):
        rates = dict.fromkeys(f"{rate:.3g}" for _, rate in one.at)
        share = f" ({one.key[1:]} c)" if one.key.startswith("x") else ""
        text += f" at {' and '.join(rates)}/s{share}"
    if one.mean is not None:
        text += f"; mean {_number(one.mean, unit)}, better at {one.better} of {one.rates}"
    return text


def verdict(row: Row) -> str:
    """One of the words under "How to read it", or "not run"; of the best of the policies."""
    if not row.done and not any(one.direction for one in row.findings):
        return "not run"
    if any(one.reached and _throughout(row, one) for one in row.findings):
        return "reached"
    if any(one.reached for one in row.findings):
        return "at its best rate"
    words = [one.direction for one in row.findings]
    return "direction" if "yes" in words else "at some rates" if "at some rates" in words else "not reproduced"


def _throughout(row: Row, one: Finding) -> bool:
    """Whether the paper's number is reached as the paper means it: an "up to" at one rate; an average, and a range, in the mean
    of the rates that count, and a range up to its upper end."""
    one_rate_does = row.reckoning.how in SPECIAL and row.reckoning.how != "best_static"
    if one_rate_does or (row.reckoning.how != "mean" and not isinstance(row.headline.value, tuple)):
        return True
    return one.mean is not None and one.mean >= row.headline.least and (one.value or 0.0) >= row.headline.most


def table(store: Store) -> list[tuple[str, str, str, str, str]]:
    """(figure, what, paper, ours, verdict) of each headline; one line of `ours` a policy."""
    found = []
    for row in rows(store):
        what = f"{METRICS[row.reckoning.metric].about}, {row.headline.config}"
        mine = "\n".join(f"{one.test}: {ours(row, one)}" for one in row.findings)
        found.append(
            (f"{row.headline.paper} {row.headline.figure}", what, paper_says(row.headline), mine, verdict(row))
        )
    return found


def markdown(store: Store, pictures: Mapping[str, str]) -> str:
    """The whole page. pictures: experiment -> path relative to the page."""
    found = rows(store)
    settings = store.settings
    seeds = "one seed" if settings.seeds == 1 else f"{settings.seeds} seeds; (a to b) is the spread between them"
    out = [
        INTRO.format(
            machine=settings.machine,
            finishes=STILL_FINISHES,
            requests=settings.requests,
            seeds=seeds,
            caution=_CAUTION if settings.seeds < 5 else "",
            constants="\n".join(constants(settings.machine)),
            quantum=setup_of(EXPERIMENTS["fig8-c1"].panels[0], machine(settings.machine)).quantum_s,
        ),
        "## All figures\n",
        *_lines(found),
        "",
        *_left_out(),
    ]
    for group, title in (("paper", "## Figure by figure"), ("beyond", "## What the papers do not have")):
        out.append(f"\n{title}\n")
        for experiment in EXPERIMENTS.values():
            if experiment.group == group and experiment.id != "oneiros-all":
                out += _section(experiment, store, [row for row in found if row.experiment is experiment], pictures)
    return "\n".join(out).rstrip() + "\n"


def _lines(found: Sequence[Row]) -> list[str]:
    lines = ["| figure | what | paper | ours | |", "|---|---|---|---|---|"]
    for row in found:
        mine = "<br>".join(f"`{one.test}` {ours(row, one)}" for one in row.findings)
        what = f"{METRICS[row.reckoning.metric].about}; {row.headline.config}"
        lines.append(
            f"| {row.headline.paper} {row.headline.figure} | {what} | {paper_says(row.headline)} | {mine} | {verdict(row)} |"
        )
    return lines


def _left_out() -> list[str]:
    left = [one for one in headlines().values() if one.left_out]
    return [
        "Left out: "
        + "; ".join(
            f"{one.paper} {one.figure}, {one.metric.replace('_', ' ')} {paper_says(one)} ({one.left_out})"
            for one in left
        )
        + "."
    ]


def _section(experiment: Experiment, store: Store, found: Sequence[Row], pictures: Mapping[str, str]) -> list[str]:
    out = [
        f"### {experiment.figure}: {experiment.title}\n" if experiment.group == "paper" else f"### {experiment.title}\n"
    ]
    if experiment.stated:
        out.append(f"Stated: {experiment.stated}  ")
    if experiment.assumed:
        out.append(f"Assumed: {experiment.assumed}  ")
    grids = [
        f"{panel.name} c = {store.points.c[panel.name]:.3g}/s"
        for panel in experiment.panels
        if panel.name in store.points.c
    ]
    if grids:
        out.append(f"Saturated: {'; '.join(grids)}.\n")
    if experiment.id in pictures:
        out.append(f"\n![{experiment.title}]({pictures[experiment.id]})\n")
    for row in found:
        out.append(
            f"- {_against(row.reckoning)}: paper {paper_says(row.headline)}; ours "
            + ", ".join(f"`{one.test}` {ours(row, one)}" for one in row.findings)
            + f" ({verdict(row)})."
            + (f" {row.why}." if row.why else "")
        )
    for pair in experiment.comparisons:
        out += _comparison(experiment, pair, store)
    if {BASELINE, IDEAL} <= set(experiment.policies):
        out += _between(experiment, store)
    if experiment.id == "fig4" and store.arithmetic:
        out += _arithmetic(store)
    out.append("")
    return out


def _against(reckoning: Reckoning) -> str:
    """ "P99 TBT lower than `recompute`"; a metric of one policy stands alone."""
    about = METRICS[reckoning.metric].about
    if reckoning.metric in ALONE:
        return about
    return (
        f"{about}, `{reckoning.base}` = 1"
        if METRICS[reckoning.metric].unit == "x"
        else f"{about} than `{reckoning.base}`"
    )


def _between(experiment: Experiment, store: Store) -> list[str]:
    """A table: panel, rate and policy by how far it is from recompute to ideal, where both were run."""
    points: dict[str, Mapping[str, float]] = {}
    lines: list[Line] = []
    for panel in experiment.panels:
        for key in store.points.keys(panel.name, BASELINE, IDEAL):
            names: dict[str, list[str]] = {}
            for policy in experiment.policies:
                found = store.points.at(panel.name, key, policy)
                if found:
                    names[policy] = [f"{panel.name} | {key} | {policy} | {seed}" for seed in range(len(found))]
                    points.update(zip(names[policy], found))
            share = key[1:] if key.startswith("x") else ""
            rate = store.points.at(panel.name, key, BASELINE)[0]["rate"]
            lines.append(Line((panel.name, share, f"{rate:.3g}"), names))
    columns = (Column("preemptions", "preemptions"), *AGAINST, GOODPUT)
    return ["", table_of_seeds(points, ("load", "c x", "requests/s"), lines, columns), ""] if lines else []


def _comparison(experiment: Experiment, pair: Comparison, store: Store) -> list[str]:
    """A table: panel and rate by metric. A metric that is defined nowhere is left out."""
    metrics = [metric for metric in pair.metrics if not _nowhere(experiment, pair, metric, store)]
    titles = [f"{METRICS[metric].about}, {METRICS[metric].unit}" for metric in metrics]
    out = ["", f"`{pair.test}` against `{pair.base}`:", "", "| load | c x | requests/s | " + " | ".join(titles) + " |"]
    out.append("|---|---|---|" + "---|" * len(titles))
    for panel in experiment.panels:
        curves = {metric: dict(curve(store.points, [panel], pair.test, pair.base, metric)) for metric in metrics}
        for key in curves[metrics[0]]:
            if experiment.factors and (key[0] != "x" or float(key[1:]) not in experiment.factors):
                continue
            rate = store.points.at(panel.name, key, pair.test)[0]["rate"]
            values = []
            for metric in metrics:
                seen = curves[metric][key]
                text = _signed(sum(seen) / len(seen), METRICS[metric].unit)
                values.append(text if len(seen) == 1 else f"{text} ({min(seen):.1f} to {max(seen):.1f})")
            share = key[1:] if key.startswith("x") else ""
            out.append(f"| {panel.name} | {share} | {rate:.3g} | " + " | ".join(values) + " |")
    return [*out, ""]


def _nowhere(experiment: Experiment, pair: Comparison, metric: str, store: Store) -> bool:
    """Whether the metric is nan in all that was run."""
    curves = [curve(store.points, [panel], pair.test, pair.base, metric) for panel in experiment.panels]
    values = [value for one in curves for _, seen in one for value in seen]
    return bool(values) and all(map(math.isnan, values))


def _signed(value: float, unit: str) -> str:
    """A dash for nan. A cut below -100 % reads better as how many times as much it is."""
    if math.isnan(value):
        return "–"
    return f"x{1 - value / 100:.3g}" if unit == "%" and value < -100 else f"{value:+.1f}"


def _arithmetic(store: Store) -> list[str]:
    out = [
        "",
        "| batch | layer, ms | pass, ms | loading a layer, ms | its KV, ms | layers hidden |",
        "|---|---|---|---|---|---|",
    ]
    for row in store.arithmetic:
        out.append(
            f"| {row['batch']:.0f} | {1e3 * row['layer_s']:.3f} | {1e3 * row['pass_s']:.1f} | {1e3 * row['load_s']:.2f} | "
            f"{1e3 * row['kv_layer_s']:.2f} | {row['hidden']:.0f} |"
        )
    return out


def write(store: Store, page: Path, *, pictures: bool = True) -> list[Path]:
    """The page, and its pictures in the folder `pictures` beside it. Returns what was written. Without matplotlib: raises
    InvalidState before anything is written; `pictures=False` needs none, and leaves links to pictures out."""
    made: dict[str, str] = {}
    written = [page]
    page.parent.mkdir(parents=True, exist_ok=True)
    if pictures:
        from .pictures import picture, save

        for experiment in EXPERIMENTS.values():
            figure = picture(experiment, store)
            if figure is not None:
                path = page.parent / "pictures" / f"paper-{experiment.id}.svg"
                save(figure, path)
                made[experiment.id] = f"pictures/{path.name}"
                written.append(path)
    page.write_text(markdown(store, made), encoding="utf-8")
    return written
