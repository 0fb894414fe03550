# SPDX-License-Identifier: Apache-2.0
"""`remap demo`: serves the same requests with the same engine in three runs, and compares them.

unconstrained  memory for all requests at once: its tokens are the reference
baseline       the budget, and an engine that never calls `session.step`: it preempts and recomputes; of more models than
               memory (demo_cold), whole models leave and come back
remap          the budget, and the session's controller
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from remap.cli import smollm2
from remap.cli.options import print_whole
from remap.errors import InvalidArgument, InvalidState
from remap.sizes import show_size

from . import demo_cold
from .demo_config import FITTING_MODELS, DemoConfig
from .demo_config import Progress as RunProgress
from .demo_html import page
from .demo_report import KINDS, DemoResult, RunResult, closing_sentence, table, to_json
from .demo_rounds import rounds_table, rounds_to_json
from .demo_tenants import KV_SHARE, QUANTUM_S, model_name
from .machine import machine_info
from .pages import need_jinja

__all__ = ["environment", "machine_info", "run_demo", "run_in_process", "write_reports"]

EVERY_S = 10.0


def environment(config: DemoConfig) -> dict[str, str]:
    """The environment of a run's process, set before it loads torch and the same for all runs.

    Threads wait passively: OpenMP's spinning barriers would take the copy thread's core for whole time slices, and
    would do so in the remap run only.
    """
    threads = str(config.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }


def run_in_process(kind: str, config: DemoConfig, on_progress: Callable[[RunProgress], None]) -> RunResult | None:
    """Make one run in a new process; returns None for the kind "prepare".

    Raises InvalidArgument if the run refuses its settings, and InvalidState, with the end of its standard error, if it
    fails. The process has ended in any case.
    """
    with tempfile.TemporaryDirectory(prefix="remap-demo-") as folder:
        result = Path(folder) / "result.json"
        said = Path(folder) / "stderr"
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "remap_serve.cli.demo_run", kind, json.dumps(asdict(config)), str(result)]
        with os.fdopen(read_fd, encoding="utf-8") as progress, said.open("wb") as errors:
            try:
                process = subprocess.Popen(
                    [*command, str(write_fd)],
                    env={**os.environ, **environment(config)},
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    pass_fds=(write_fd,),
                )
            finally:
                os.close(write_fd)  # else the pipe never ends
            try:
                for line in progress:
                    on_progress(RunProgress(**json.loads(line)))
                code = process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if code != 0:
            tail = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-25:]
            raise InvalidState(
                f"the {kind} run ended with exit status {code}; nothing was written. It said:\n" + "\n".join(tail),
                kind=kind,
                status=code,
            )
        if kind == "prepare":
            return None
        found = json.loads(result.read_text(encoding="utf-8"))
        if "message" in found:
            if found["refused"]:
                raise InvalidArgument(found["message"], kind=kind)
            raise InvalidState(f"the {kind} run failed: {found['message']}", kind=kind)
        return RunResult.from_dict(found)


def _settings(config: DemoConfig) -> Mapping[str, Any]:
    shown = {
        **asdict(config),
        "budget_bytes": show_size(config.budget_bytes),
        "page_bytes": show_size(config.page_bytes),
        "sampling": "greedy",
        "arrival": "all at once",
    }
    if config.tenants > 1:
        shown["sharing"] = f"in turns of {QUANTUM_S:g} s"
        del shown["weights_from_file"]
        if not config.budget_bytes:
            shown["budget_bytes"] = f"weights and {KV_SHARE:.0%} of them, or the longest request"
    if config.tenants > FITTING_MODELS:
        shown["sharing"] = f"in turns by what is due, of {demo_cold.QUANTUM_S:g} s where nothing is"
        shown["arrival"] = f"Poisson, {demo_cold.RATE:g} a second"
        if not config.budget_bytes:
            shown["budget_bytes"] = f"weights of the largest {FITTING_MODELS} models and {KV_SHARE:.0%} of them"
    return {name.removesuffix("_bytes").replace("_", " "): value for name, value in shown.items()}


def _say(console: Console, line: str) -> None:
    """In a log, which shows no bars."""
    if not console.is_terminal:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def run_demo(config: DemoConfig, console: Console) -> DemoResult:
    """The three runs, one after the other, with a progress bar on `console`; in a log a line every `EVERY_S` seconds."""
    runs: dict[str, RunResult] = {}
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<13}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    if not smollm2.cached_folder(smollm2.find_gguf(), config.dtype).is_dir():
        with console.status("dequantising the model's weights into the cache (once, about half a minute)"):
            run_in_process("prepare", config, lambda progress: None)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        for kind in KINDS:
            task = bars.add_task(kind, total=1, state="loading the model")
            said = time.monotonic()
            _say(console, f"{kind}: loading the model")

            def show(progress: RunProgress, task: Any = task, kind: str = kind) -> None:
                nonlocal said
                state = (
                    f"{progress.running} run, {progress.waiting} wait, {progress.kv_blocks} blocks, "
                    f"{progress.layers_remapped:g} layers, {progress.preemptions} preempted"
                )
                bars.update(task, completed=progress.generated, total=progress.total, state=state)
                if time.monotonic() - said >= EVERY_S:
                    said = time.monotonic()
                    _say(console, f"{kind}: {progress.generated} of {progress.total} tokens, {state}")

            run = run_in_process(kind, config, show)
            assert run is not None  # only "prepare" has no result
            runs[kind] = run
            count = run.generated_tokens
            state = f"{run.tokens_per_s:.1f} tokens/s, {run.preemptions} preempted"
            bars.update(task, completed=count, total=count, state=state)
            _say(console, f"{kind}: {count} tokens, {state}")
    settings = dict(_settings(config))
    if runs["remap"].cold:
        weights = runs["remap"].tenants
        settings["models"] = ", ".join(f"{name} {show_size(int(one['weight_bytes']))}" for name, one in weights.items())
    return DemoResult(
        model=smollm2.MODEL_NAME if config.tenants == 1 else model_name(config.tenants),
        budget_bytes=config.budget_bytes or runs["baseline"].capacity_bytes,
        machine={**machine_info(), "threads": config.threads},
        settings=settings,
        **runs,
    )


def write_reports(rounds: Sequence[DemoResult], folder: Path) -> tuple[Path, Path]:
    """(demo.json, demo.html) in `folder`, which is made if it is missing. The page shows the last round."""
    folder.mkdir(parents=True, exist_ok=True)
    data, html = folder / "demo.json", folder / "demo.html"
    report = to_json(rounds[0]) if len(rounds) == 1 else rounds_to_json(rounds)
    data.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    html.write_text(page(rounds[-1]), encoding="utf-8")
    return data, html


def demo(config: DemoConfig, folder: Path, console: Console, rounds: int = 1) -> tuple[DemoResult, ...]:
    """Make the runs, write the files, and print the table and one closing sentence; for several rounds their medians
    and ranges.

    Writes the results so far after each round.
    """
    need_jinja()  # said before the minutes of the runs, not after
    done: list[DemoResult] = []
    for _ in range(rounds):
        done.append(run_demo(config, console))
        data, html = write_reports(done, folder)
    console.print()
    print_whole(console, table(done[0]) if rounds == 1 else rounds_table(done))
    console.print(f"Written: {data}, {html}\n", style="dim", highlight=False)
    if rounds == 1:
        console.print(closing_sentence(done[0]), highlight=False)
    return tuple(done)
