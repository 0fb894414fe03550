"""What `bench.lab paper` found, as a table and as bench/results/paper.md. Nothing is run here, and nothing is said that the
stored points do not hold: reasons are sentences about figures of the two runs that are compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lab.seeds import AGAINST, GOODPUT, Column, Line, cell
from bench.lab.seeds import table as table_of_seeds

from remap.policy.hardware import machine
from remap_serve.sim.policies import WEIGHTS_ONLY

from .experiment_list import EXPERIMENTS
from .experiments import (
    ALGORITHM_1,
    BASELINE,
    FACTORS,
    IDEAL,
    Comparison,
    Experiment,
    Headline,
    Panel,
    Reckoning,
    headlines,
    setup_of,
)
from .reckoning import METRICS, STILL_FINISHES, Finding, Spread, compare, curve
from .report_text import GAPS, INTRO, constants, facts
from .runs import Store

__all__ = ["Row", "markdown", "rows", "table", "write"]

_RANGES = ("fig8-c1", "fig8-c2", "fig9", "fig10", "fig12", "fig13")
_OTHERS = ("fig11", "fig14", "fig15", "fig16", "fig17")


@dataclass(frozen=True)
class Row:
    """One headline, with what was found for each policy. why: facts of the runs, at the rate that is quoted."""

    experiment: Experiment
    reckoning: Reckoning
    headline: Headline
    findings: tuple[Finding, ...]
    why: tuple[str, ...]

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
            else:
                panels = experiment.panels_of(reckoning)
                findings = tuple(compare(store.points, headline, reckoning, panels, test) for test in reckoning.tests)
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
        least, most = (end(seen, key=lambda one: one.median) for end in (min, max))
        findings.append(
            Finding(
                headline.id,
                test,
                BASELINE,
                most,
                least,
                reached=least.median >= headline.least and most.median >= headline.most,
                direction="yes" if least.median > 0 else "at some rates" if most.median > 0 else "no",
            )
        )
    return tuple(findings)


# -- text --------------------------------------------------------------------------------------------------------------


def _tenths(value: float) -> float:
    """To be written with one decimal: no "-0.0"."""
    return round(value, 1) + 0.0


def _number(value: float, unit: str) -> str:
    return f"{value:.2f}x" if unit == "x" else f"{_tenths(value):.1f} {unit}".strip()


def _unit(headline: Headline) -> str:
    return headline.unit.partition(" (")[0]


def _spread(found: Spread, unit: str) -> str:
    """ "54.4 % (50.1 to 60.0)": the median of the seeds, and their range if there is one."""
    column = Column(
        "", "", show=lambda values: [_number(values[0], unit), *(f"{_tenths(value):.1f}" for value in values[1:])]
    )
    return cell((found.low, found.median, found.high), column)


def paper_says(headline: Headline) -> str:
    unit = _unit(headline)
    words = headline.unit.partition("(")[2].rstrip(")")
    prefix = {"up to": "up to ", "about": "about ", "less than": "below ", "more than": "above "}.get(words, "")
    if isinstance(headline.value, tuple):
        return f"{_number(headline.value[0], unit)} - {_number(headline.value[1], unit)}"
    return prefix + _number(headline.value, unit)


def ours(row: Row, one: Finding) -> str:
    """ "54.4 % (50.1 to 60.0) at 2.1 and 14/s (0.5 c); mean 31.0 % (28.0 to 33.1), better at 4 of 5"."""
    unit = _unit(row.headline)
    if one.value is None:
        return "not run"
    text = _spread(one.value, unit)
    if one.lowest is not None:
        return f"from {_spread(one.lowest, unit)} up to {text}"
    if one.at:
        rates = dict.fromkeys(f"{rate:.3g}" for _, rate in one.at)
        share = f" ({one.key[1:]} c)" if one.key.startswith("x") else ""
        text += f" at {' and '.join(rates)}/s{share}"
    if one.mean is not None:
        text += f"; mean {_spread(one.mean, unit)}, better at {one.better} of {one.rates}"
    return text


VERDICTS = ("reached", "at its best rate", "direction", "at some rates", "not reproduced")


def _short(found: Sequence[Row]) -> list[str]:
    """A line for each verdict, with the figures that have it."""
    lines = []
    for word in (*VERDICTS, "not run"):
        names = [_name(row, found) for row in found if verdict(row) == word]
        if names:
            lines.append(f"- {word} ({len(names)}): {', '.join(names)}")
    return lines


def _name(row: Row, found: Sequence[Row]) -> str:
    return f"{row.headline.figure} {METRICS[row.reckoning.metric].about}{_own(row, found)}"


def _own(row: Row, found: Sequence[Row]) -> str:
    """ " (C1 temporal sharing)": of its configuration what the others of its figure and metric lack; "" without others."""
    key = (row.headline.figure, row.reckoning.metric)
    others = [
        one.headline.config.split(", ")
        for one in found
        if (one.headline.figure, one.reckoning.metric) == key and one is not row
    ]
    own = [part for part in row.headline.config.split(", ") if not any(part in other for other in others)]
    return f" ({own[0]})" if others else ""


def verdict(row: Row) -> str:
    """One of `VERDICTS`, or "not run"; of the best of the policies."""
    if not row.done:
        return "not run"
    if any(one.reached and _throughout(row, one) for one in row.findings):
        return "reached"
    if any(one.reached for one in row.findings):
        return "at its best rate"
    words = [one.direction for one in row.findings]
    return "direction" if "yes" in words else "at some rates" if "at some rates" in words else "not reproduced"


def _throughout(row: Row, one: Finding) -> bool:
    """Whether the paper's number is reached as the paper means it: an average in the mean of the rates that count, anything
    else by what was found."""
    return row.reckoning.how != "mean" or (one.mean is not None and one.mean.median >= row.headline.least)


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
    out = [
        INTRO.format(
            machine=settings.machine,
            figures=len(found),
            short="\n".join(_short(found)),
            finishes=STILL_FINISHES,
            requests=settings.requests,
            seeds=settings.seeds,
            constants="\n".join(constants(settings.machine)),
            quantum=setup_of(EXPERIMENTS["fig8-c1"].panels[0], machine(settings.machine)).quantum_s,
        ),
        "## All figures\n",
        *_lines(found),
    ]
    out += ["", *_gaps(store)]
    for group, title in (("paper", "## Figure by figure"), ("beyond", "## What the paper does not have")):
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


def _gaps(store: Store) -> list[str]:
    """A table: load, policy and base by rate, P99 TBT beside P99 TPOT; medians of the seeds. Empty without runs."""
    lines = []
    for panel, policy, base in _pairs():
        both = [
            dict(curve(store.points, [panel], policy, base, metric))
            for metric in ("tbt_p99_reduction", "tpot_p99_reduction")
        ]
        cells = [
            " / ".join(f"{round(statistics.median(one[f'x{factor:g}'])):+d}" for one in both)
            if f"x{factor:g}" in both[0]
            else "–"
            for factor in FACTORS
        ]
        if both[0]:
            lines.append(f"| {panel.name} | `{policy}` | `{base}` | " + " | ".join(cells) + " |")
    if not lines:
        return []
    head = "| load | policy | against | " + " | ".join(f"{factor:g} c" for factor in FACTORS) + " |"
    return [GAPS, head, "|---|---|---|" + "---|" * len(FACTORS), *lines]


def _pairs() -> Iterator[tuple[Panel, str, str]]:
    """(load, policy, what it is compared with): against recompute in Figures 8 to 10, 12 and 13, as the figure has it in the
    others. Not after a peak, where only the gaps between tokens are of that part."""
    for panel in dict.fromkeys(panel for name in _RANGES for panel in EXPERIMENTS[name].panels):
        for policy in (WEIGHTS_ONLY, ALGORITHM_1, IDEAL):
            yield panel, policy, BASELINE
    seen = set()
    for name in _OTHERS:
        for one in EXPERIMENTS[name].reckonings:
            for panel in EXPERIMENTS[name].panels_of(one):
                for test in one.tests:
                    if not panel.quiet and (panel, test, one.base) not in seen:
                        seen.add((panel, test, one.base))
                        yield panel, test, one.base
    for policy in (WEIGHTS_ONLY, ALGORITHM_1, IDEAL):
        yield EXPERIMENTS["fig14"].panels[0], policy, BASELINE


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
        own = _own(row, found)
        out.append(f"- {_against(row.reckoning)}{own}: paper {paper_says(row.headline)}; {verdict(row)}")
        out += [f"  - `{one.test}`: {ours(row, one)}" for one in row.findings]
        out += [f"  - {said}" for said in row.why]
    for pair in experiment.comparisons:
        out += _comparison(experiment, pair, store)
    if {BASELINE, IDEAL} <= set(experiment.policies):
        out += _between(experiment, store)
    if experiment.id == "fig4" and store.arithmetic:
        out += _arithmetic(store)
    out.append("")
    return out


def _against(reckoning: Reckoning) -> str:
    """ "P99 TBT lower than `recompute`"."""
    return f"{METRICS[reckoning.metric].about} than `{reckoning.base}`"


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
            values = [cell(curves[metric][key], _signed(METRICS[metric].unit)) for metric in metrics]
            share = key[1:] if key.startswith("x") else ""
            out.append(f"| {panel.name} | {share} | {rate:.3g} | " + " | ".join(values) + " |")
    return [*out, ""]


def _nowhere(experiment: Experiment, pair: Comparison, metric: str, store: Store) -> bool:
    """Whether the metric is nan in all that was run."""
    curves = [curve(store.points, [panel], pair.test, pair.base, metric) for panel in experiment.panels]
    values = [value for one in curves for _, seen in one for value in seen]
    return bool(values) and all(map(math.isnan, values))


def _signed(unit: str) -> Column:
    """A cut below -100 % reads better as how many times as much it is."""

    def show(values: Sequence[float]) -> list[str]:
        return [
            f"x{1 - value / 100:.3g}" if unit == "%" and value < -100 else f"{_tenths(value):+.1f}" for value in values
        ]

    return Column("", "", show=show)


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
            if experiment.id == "oneiros-all":  # its loads are in the pictures of their figures
                continue
            figure = picture(experiment, store)
            if figure is not None:
                path = page.parent / "pictures" / f"paper-{experiment.id}.svg"
                save(figure, path)
                made[experiment.id] = f"pictures/{path.name}"
                written.append(path)
    page.write_text(markdown(store, made), encoding="utf-8")
    return written
