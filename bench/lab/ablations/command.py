"""The ablations from the command line: threads, progress, and what is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from remap_serve.cli.demo import environment
from remap_serve.cli.demo_config import DemoConfig
from remap_serve.cli.machine import machine_now

from .questions import select
from .report import verdict, write
from .serving import AblationRun, Settings, busy_rate, run_ablation, worlds

__all__ = ["run_all"]

# A run has to bring more tokens than the KV caches hold, a few times over, or nothing is scarce: the large models generate
# about a hundred a second.
QUICK_SECONDS, QUICK_RUNS = 4.0, 3
SECONDS, RUNS = 40.0, 4


def run_all(
    only: Sequence[str],
    folder: Path,
    console: Console,
    *,
    quick: bool = False,
    seconds: float | None = None,
    runs: int | None = None,
) -> list[AblationRun]:
    """Run the ablations of these names (none: all), write the report after each, and tell what they say.

    Raises InvalidArgument for an unknown name before anything runs, and what serving raises.
    """
    chosen = select(list(only))
    settings = Settings(
        seconds=seconds or (QUICK_SECONDS if quick else SECONDS),
        runs=runs or (QUICK_RUNS if quick else RUNS),
        quick=quick,
    )
    # Before torch is loaded, and as in the demo: one thread computes, and waiting threads leave the core to the copies.
    os.environ.update(environment(DemoConfig(threads=1)))
    import torch

    torch.set_num_threads(1)
    machine = {**machine_now(), "threads": 1}
    world_of = worlds(settings)
    rates: dict[tuple[int | None, int | None], float] = {}
    found: list[AblationRun] = []
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        for ablation in chosen:
            total = 1 + settings.runs * len(ablation.sides)
            task = bars.add_task(ablation.name, total=total, state="loading the models")
            world = world_of(ablation.tenants)
            kind = ablation.tenants, ablation.max_num_seqs
            if kind not in rates:
                bars.update(task, state="measuring how fast this machine is")
                rates[kind] = busy_rate(world, ablation.max_num_seqs)
            before = -1

            def show(side: str, number: int) -> None:
                nonlocal before
                before += 1
                state = f"{side}, run {number}" if number else side
                bars.update(task, completed=before, state=state)  # noqa: B023 - called within this round only

            found.append(run_ablation(ablation, world, settings, rates[kind], show))
            bars.update(task, completed=total, state="done")
            written = write(found, machine, settings, folder)
    for run in found:
        console.print(f"\n[bold]{run.ablation.name}[/bold]: {run.ablation.question}", highlight=False)
        for claim in run.ablation.claims:
            console.print(f"  {verdict(run, claim)}", markup=False, highlight=False)
        if run.different:
            console.print(f"  the tokens of {run.different} requests differ from the reference", style="red")
    console.print(f"\nWritten: {', '.join(map(str, written))}", style="dim", highlight=False)
    return found
