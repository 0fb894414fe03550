"""Loads at fixed rates, each on its own machine, and the policies that serve them: what to run, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remap_serve.sim.policies import SLEEP_AND_SWAP

from . import seeds
from .paper.experiments import Panel
from .paper.reckoning import figures
from .paper.runs import Run, Settings, serve

__all__ = ["ONE_AT_A_TIME", "WHOLE", "Cell", "Group", "empty", "figures_of", "in_epochs", "run_missing"]

WHOLE = "whole"
"""`recompute` where whoever has the turn has all memory, and switching costs nothing: what lending in turns could reach."""
ONE_AT_A_TIME = (SLEEP_AND_SWAP, WHOLE)
"""Of several models, in turns alone; the others in epochs."""


def in_epochs(panel: Panel, policy: str) -> Panel:
    """The panel as that policy shares it by default."""
    return replace(panel, sharing="temporal" if policy in ONE_AT_A_TIME else "epochs")


def figures_of(run: Run, settings: Settings) -> dict[str, float]:
    """The figures of one run, and the longest gap of a request (P99 over the requests)."""
    _, items, result = serve(run, settings)
    found = figures(result, run.rate, items[-1].time_s - items[0].time_s)
    return {**found, "longest_gap_p99_s": float(f"{result.longest_gap_p99_s:.5g}")}


@dataclass(frozen=True)
class Cell:
    """One load on one machine at one rate, in requests per second of all models together."""

    machine: str
    panel: Panel
    rate: float

    def name(self, policy: str, seed: int) -> str:
        return f"{self.machine} | {self.panel.name} | {self.rate:g}/s | {policy} | {seed}"


@dataclass(frozen=True)
class Group:
    """Loads, and the policies that serve each of them. epochs: shared as by default, not as the panels say."""

    cells: tuple[Cell, ...]
    policies: tuple[str, ...]
    epochs: bool = False

    def runs(self, settings: Settings) -> dict[str, tuple[Run, Settings]]:
        """By name, seed by seed; the machine is each cell's own."""
        return {
            cell.name(policy, seed): (
                Run(
                    in_epochs(cell.panel, policy) if self.epochs else cell.panel,
                    policy,
                    f"{cell.rate:g}/s",
                    cell.rate,
                    seed,
                ),
                replace(settings, machine=cell.machine),
            )
            for seed in range(settings.seeds)
            for cell in self.cells
            for policy in self.policies
        }

    def table(self, data: Mapping[str, Any], columns: Sequence[seeds.Column]) -> str:
        """Markdown: a line for each cell and policy."""
        number = data["settings"]["seeds"]
        lines = [
            seeds.Line(
                (cell.machine, cell.panel.name, f"{cell.rate:g}/s"),
                {policy: [cell.name(policy, seed) for seed in range(number)] for policy in self.policies},
            )
            for cell in self.cells
        ]
        return seeds.table(data["points"], ("machine", "load", "rate"), lines, columns, worst_first=True)


def empty(settings: Settings) -> dict[str, Any]:
    """What a file of these settings begins with."""
    made_with = {name: value for name, value in settings.to_json().items() if name != "machine"}
    return {"settings": made_with, "points": {}}


def run_missing(data: dict[str, Any], settings: Settings, path: Path, jobs: int, groups: Sequence[Group]) -> None:
    """Run what `data` lacks, group by group, and write `path` after each run."""
    runs = {name: run for group in groups for name, run in group.runs(settings).items()}
    seeds.run_missing(data, runs, path, jobs, figures_of)
