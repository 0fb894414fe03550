"""`bench.lab paper` from the command line: progress, the table, and what is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from remap_serve.cli.simulate_plots import need_matplotlib

from .experiment_list import EXPERIMENTS
from .experiments import select
from .report import table, write
from .runs import Settings, Store, run_all

__all__ = ["run_paper"]


def run_paper(
    only: Sequence[str],
    results: Path,
    page: Path,
    console: Console,
    *,
    settings: Settings,
    jobs: int = 1,
    again: bool = False,
    report_only: bool = False,
) -> Store:
    """Run what is missing of the experiments that match `only` (all without), and write `results` and `page`.

    What was run with other settings does not count: the file is begun anew. report_only: nothing is run. Raises InvalidArgument
    for a pattern that matches nothing and a file that is no result, and InvalidState without matplotlib, before anything runs.
    """
    chosen = select(EXPERIMENTS, only)
    need_matplotlib()
    store = Store.read(results, None if report_only else settings)
    if not report_only:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total} runs"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as bars:
            tasks = {one.id: bars.add_task(one.id, total=0, visible=False) for one in chosen}

            def show(name: str, done: int, total: int) -> None:
                bars.update(tasks[name], completed=done, total=total, visible=True)

            run_all(chosen, store, jobs=jobs, again=again, on_progress=show)
    written = write(store, page)
    shown = Table(show_lines=True)
    for title in ("figure", "what", "paper", "ours", ""):
        shown.add_column(title, overflow="fold")
    for line in table(store):
        if line[4] != "not run":
            shown.add_row(*line)
    console.print(shown, markup=False, highlight=False)
    paths = [str(results)] * (not report_only) + [
        str(page),
        f"{len(written) - 1} pictures in {page.parent / 'pictures'}",
    ]
    console.print(f"Written: {', '.join(paths)}", style="dim", markup=False, highlight=False)
    return store
