"""Runs of several seeds, stored one by one, and tables of their medians: what `headline` and `gap` have in common."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from remap.errors import InvalidArgument
from remap_serve.cli.simulate_report import part
from remap_serve.sim.ideal import AGAINST_IDEAL, against_ideal

__all__ = ["AGAINST", "GOODPUT", "Column", "Line", "cell", "read", "run_missing", "table", "write"]

Point = Mapping[str, float]
Points = Mapping[str, Point]


def read(path: Path, empty: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The parts of `empty`, as stored if it was with its "settings", empty otherwise.

    Raises InvalidArgument (field path) for a file that `bench.lab COMMAND` did not write.
    """
    if path.exists():
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["settings"] == empty["settings"]:
                return {part: dict(data[part]) for part in empty}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidArgument(
                f"{path} is not a result of `bench.lab {command}` ({error!r}); nothing was run; name another file",
                field="path",
                value=str(path),
            ) from error
    return {part: dict(value) for part, value in empty.items()}


def write(path: Path, data: Mapping[str, Any]) -> None:
    """The whole file, at once: a run that is stopped leaves the last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(path)


def run_missing(
    data: dict[str, Any],
    runs: Mapping[str, tuple[Any, ...]],
    path: Path,
    jobs: int,
    run: Callable[..., Point],
) -> None:
    """Run what data["points"] lacks, in order, and write `path` after each run: a run that is stopped loses one point.

    jobs: processes; 1: this one alone. runs: by name, what `run` is called with: a function of a module, which another process
    can find.
    """
    points = data["points"]
    missing = {name: one for name, one in runs.items() if name not in points}
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else None
    with pool or nullcontext():
        results = {name: pool.submit(run, *one).result if pool else partial(run, *one) for name, one in missing.items()}
        for name, result in results.items():
            points[name] = result()
            write(path, data)
            print(name, file=sys.stderr, flush=True)


def _numbers(values: Sequence[float]) -> list[str]:
    """Three digits; with commas and no decimals if one of them has four or more."""
    return [f"{value:,.0f}" if max(values) >= 1000 else f"{value:.3g}" for value in values]


def _parts(values: Sequence[float]) -> list[str]:
    return [part(value) for value in values]


@dataclass(frozen=True)
class Column:
    """key: of a point, or of `AGAINST_IDEAL`. times: what it is multiplied by. more_is_better: of the value."""

    key: str
    title: str
    times: float = 1.0
    more_is_better: bool = False
    show: Callable[[Sequence[float]], list[str]] = _numbers


GOODPUT = Column("goodput_per_s", "goodput, requests/s", more_is_better=True)
AGAINST = tuple(
    Column(one.key, one.title, more_is_better=not one.ratio, show=_numbers if one.ratio else _parts)
    for one in AGAINST_IDEAL
)


def cell(values: Sequence[float], column: Column, worst_first: bool = False, of: str = "seeds") -> str:
    """ "17.7 (1.9 to 22.0)": the median of the seeds and their range, from the lowest or the worst on.

    nan is left out: a range of 3 of 5 seeds says so, and "–" is none of them. of: what the values are of.
    """
    known = [column.times * value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    ends = (max(known), min(known)) if worst_first and not column.more_is_better else (min(known), max(known))
    middle, first, last = column.show((statistics.median(known), *ends))
    said = [f"{first} to {last}"] if first != last else []
    if len(known) < len(values):
        said.append(f"{len(known)} of {len(values)} {of}")
    return f"{middle} ({'; '.join(said)})" if said else middle


@dataclass(frozen=True)
class Line:
    """One load of a table: its first cells, and the names of its runs, policy by policy and seed by seed."""

    labels: tuple[str, ...]
    names: Mapping[str, Sequence[str]]


def table(
    points: Points,
    labels: Sequence[str],
    lines: Sequence[Line],
    columns: Sequence[Column],
    worst_first: bool = False,
    of: str = "seeds",
) -> str:
    """Markdown: a line for each load and policy. What was not run yet is left out; n says how many seeds a line has.

    A seed is compared with the same seed of recompute and ideal. of: see `cell`.
    """
    out = ["| " + " | ".join([*labels, "policy", "n", *(column.title for column in columns)]) + " |"]
    out.append("|" + "---|" * (len(labels) + 2 + len(columns)))
    for line in lines:
        seen: dict[str, list[Mapping[str, float]]] = {policy: [] for policy in line.names}
        for names in zip(*line.names.values()):
            runs = {policy: points[name] for policy, name in zip(line.names, names) if name in points}
            worth = against_ideal(runs)
            for policy, run in runs.items():
                seen[policy].append({**run, **worth.get(policy, {})})
        for policy, found in seen.items():
            if found:
                cells = [cell([one.get(c.key, math.nan) for one in found], c, worst_first, of) for c in columns]
                out.append("| " + " | ".join([*line.labels, policy, str(len(found)), *cells]) + " |")
    return "\n".join(out)
