"""The closing table: at most 60 lines, whatever happened. Everything else is in the JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .results import Figure

__all__ = ["MOST_LINES", "Report", "Step", "render"]

MOST_LINES = 60
MOST_ERRORS = 8
MOST_SKIPPED = 8
NAME_WIDTH = 56
LINE_WIDTH = 130


@dataclass(frozen=True)
class Step:
    """Building or testing: done before anything is measured."""

    name: str
    ok: bool
    seconds: float
    summary: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """All that a run has to say. errors and skipped: (what, why). notes: lines below the title."""

    title: str
    emulated: bool
    steps: Sequence[Step]
    figures: Sequence[Figure]
    errors: Sequence[tuple[str, str]]
    skipped: Sequence[tuple[str, str]]
    seconds: float
    written: str
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether every step and every measure did what it should. A target that was missed is no failure."""
        return not self.errors and all(step.ok for step in self.steps)


def render(report: Report) -> str:
    """The table's text. On the emulated driver speeds are left out: they are nobody's."""
    head = [report.title]
    if report.emulated:
        head.append("Emulated driver: this shows that the suite runs. Speeds are left out, no GPU was involved.")
    head += map(_clip, report.notes)
    head += [
        _clip(f"{step.name:44} {'ok' if step.ok else 'FAILED':6} {step.seconds:6.1f} s  {step.summary}")
        for step in report.steps
    ]
    tail = [line for what, why in report.errors[:MOST_ERRORS] for line in _error(what, why, len(report.errors))]
    if len(report.errors) > MOST_ERRORS:
        tail.append(f"ERROR    and {len(report.errors) - MOST_ERRORS} more, see the JSON")
    tail += _skipped(report.skipped)
    tail.append(_closing(report))
    shown = [each for each in report.figures if each.shown]
    room = MOST_LINES - len(head) - len(tail) - 1
    if len(shown) > room:
        # What has a target stays; of the rest the first ones, in order.
        spare = room - 1 - sum(each.target is not None for each in shown)
        kept: list[Figure] = []
        for each in shown:
            if each.target is None:
                spare -= 1
            if each.target is not None or spare >= 0:
                kept.append(each)
        tail.insert(0, f"         {len(shown) - len(kept[: room - 1])} more figures are in the JSON")
        shown = kept[: room - 1]
    header = f"{'':{NAME_WIDTH}} {'value':>16} {'target':>12} {'met':>4} {'n':>5} {'median us':>12} {'p99 us':>12}"
    rows = [header, *(_row(each, report.emulated) for each in shown)] if shown else []
    return "\n".join([*head, *rows, *tail])


def _row(each: Figure, emulated: bool) -> str:
    target = "" if each.target is None else f"{'>=' if each.at_least else '<='} {each.target:g} {each.unit}"
    hidden = emulated and not each.exact
    value = "ran" if hidden else f"{each.value:.4g} {each.unit}"
    met = "" if hidden or each.met is None else "yes" if each.met else "NO"
    median = "" if hidden or each.median_us is None else f"{each.median_us:.2f}"
    p99 = "" if hidden or each.p99_us is None else f"{each.p99_us:.2f}"
    return f"{each.name[:NAME_WIDTH]:{NAME_WIDTH}} {value:>16} {target:>12} {met:>4} {each.n:>5} {median:>12} {p99:>12}"


def _error(what: str, why: str, errors: int) -> list[str]:
    """A few errors may say more than many."""
    most = 4 if errors <= 2 else 1
    text = f"ERROR    {what}: {_one_line(why)}"
    return textwrap.wrap(text, LINE_WIDTH, subsequent_indent=" " * 9, max_lines=most, placeholder=" ...")


def _skipped(skipped: Sequence[tuple[str, str]]) -> list[str]:
    """What was left out, by reason."""
    reasons: dict[str, list[str]] = {}
    for what, why in skipped:
        reasons.setdefault(_one_line(why), []).append(what)
    most = 3 if len(reasons) <= 4 else 1
    lines: list[str] = []
    for why, names in reasons.items():
        text = f"skipped  ({why}) {', '.join(names)}"
        lines += textwrap.wrap(text, LINE_WIDTH, subsequent_indent=" " * 9, max_lines=most, placeholder=" ...")
    if len(lines) > MOST_SKIPPED:
        lines[MOST_SKIPPED - 1 :] = [f"skipped  and more, see the JSON: {len(skipped)} things in all"]
    return lines


def _closing(report: Report) -> str:
    failed = len(report.errors) + sum(not step.ok for step in report.steps)
    judged = [each for each in report.figures if each.met is not None and (each.exact or not report.emulated)]
    met = sum(each.met is True for each in judged)
    targets = "" if report.emulated and not judged else f"{met} of {len(judged)} targets met, "
    return f"{targets}{failed} failures, {len(report.skipped)} skipped, {report.seconds:.0f} s; {report.written}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _clip(line: str) -> str:
    return line if len(line) <= LINE_WIDTH else line[: LINE_WIDTH - 3] + "..."
