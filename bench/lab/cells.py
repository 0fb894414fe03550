"""Loads at fixed rates, each on its own machine, and the policies that serve them: what to run, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import seeds
from .paper.experiments import Panel
from .paper.runs import Run, Settings, point

__all__ = ["Cell", "Group", "empty", "run_missing"]


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
    """Loads, and the policies that serve each of them."""

    cells: tuple[Cell, ...]
    policies: tuple[str, ...]

    def runs(self, settings: Settings) -> dict[str, tuple[Run, Settings]]:
        """By name, seed by seed; the machine is each cell's own."""
        return {
            cell.name(policy, seed): (
                Run(cell.panel, policy, f"{cell.rate:g}/s", cell.rate, seed),
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
    seeds.run_missing(data, runs, path, jobs, point)
