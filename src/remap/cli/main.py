"""The typer application: `remap demo`, `plan`, `simulate`, `fit`, `bench` and `doctor`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from remap.sizes import parse_size

from .bench_machine import bench_machine, fit_command
from .demo_run import DemoConfig, default_config
from .demo_tenants import MOST_TENANTS
from .plan import plan
from .simulate import simulate
from .told import EXIT_CODES, errors_told, writable

__all__ = ["app"]

app = typer.Typer(
    help="Turn model weights into KV cache while an engine serves, and back.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure on this machine, and put the paper's figures beside it.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.command("plan")(plan)
app.command("simulate")(simulate)
app.command("fit")(fit_command)
bench.command("machine")(bench_machine)
DEFAULTS = default_config()


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"remap {version('remap')}")
        except PackageNotFoundError as error:  # a source tree that nobody installed
            Console(stderr=True).print("remap is not installed here, so it has no version", style="red")
            raise typer.Exit(2) from error
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Turn model weights into KV cache while an engine serves, and back."""


@app.command()
def demo(
    budget: Annotated[
        str | None,
        typer.Option(
            help="Memory for weights, KV cache and ring, such as 640MiB.",
            show_default=f"{DEFAULTS.budget_bytes >> 20}MiB; of several tenants their weights and a tenth of them",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = DEFAULTS.dtype,
    requests: Annotated[int, typer.Option(min=1, max=DEFAULTS.requests, help="Serve the first so many prompts.")] = (
        DEFAULTS.requests
    ),
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once, at most.")] = (
        DEFAULTS.max_num_seqs
    ),
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one pass, at most.")] = (
        DEFAULTS.max_batch_tokens
    ),
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one KV block.")] = DEFAULTS.block_tokens,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute, in all three runs.")] = DEFAULTS.threads,
    tenants: Annotated[
        int, typer.Option(min=1, max=MOST_TENANTS, help="Models on the arena: SmolLM2, and others with random weights.")
    ] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Times that the three runs are made, in turns; then medians and ranges are told.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.html.")] = Path("out"),
) -> None:
    """Serve real prompts on a real model in a fixed memory budget, without and with remap, and compare."""
    from .demo import demo as run

    console = Console()
    with errors_told():
        config = DemoConfig(
            budget_bytes=_budget(budget, tenants),
            dtype=dtype,
            requests=requests,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            block_tokens=block_tokens,
            threads=threads,
            tenants=tenants,
        )
        writable(out / "demo.json")
        run(config, out, console, rounds)


def _budget(text: str | None, tenants: int) -> int:
    if text is not None:
        return parse_size(text, "budget")
    return DEFAULTS.budget_bytes if tenants == 1 else 0


@bench.command()
def ablations(
    only: Annotated[list[str] | None, typer.Option(help="Only this one; may be given several times.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small random models, short runs: minutes.")] = False,
    seconds: Annotated[float | None, typer.Option(min=1.0, help="Requests arrive for so long, in each run.")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Runs of each side.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report, the data and the charts.")] = Path(
        "bench/results/ablations"
    ),
) -> None:
    """Serve the same bursts in different ways: with and without remapping, and each choice of the design against others."""
    from .ablations_run import run_all

    with errors_told():
        writable(out / "ablations.json")
        run_all(only or [], out, Console(), quick=quick, seconds=seconds, runs=runs)


@bench.command("paper")
def bench_paper(
    only: Annotated[
        list[str] | None, typer.Option(help='Only these experiments, such as "fig8*"; may be given several times.')
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few requests and rates.")] = False,
    requests: Annotated[
        int | None, typer.Option(min=20, help="Requests of a run; three times as many of Alpaca's.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each point, each with requests of its own.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = (
        os.cpu_count() or 1
    ),
    again: Annotated[bool, typer.Option("--again", help="Run experiments that the file has results of, too.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/paper.json")] = None,
    page: Annotated[Path | None, typer.Option(help="The page.", show_default="docs/paper-vs-ours.md")] = None,
) -> None:
    """Figures of Oneiros and Pie beside those of a simulation. What is in the file already is not run again."""
    from .bench_paper import Settings
    from .bench_paper_run import run_paper

    with errors_told():
        # Other settings begin the file anew, so quick runs have one of their own.
        run_paper(
            only or [],
            results or Path("out/paper.json" if quick else "bench/results/paper.json"),
            page or Path("out/paper.md" if quick else "docs/paper-vs-ours.md"),
            Console(),
            settings=Settings(requests=requests or (100 if quick else 500), seeds=seeds, quick=quick),
            jobs=jobs,
            again=again,
            report_only=report_only,
        )


@bench.command("twin")
def bench_twin(out: Annotated[Path, typer.Option(help="Folder for twin.json.")] = Path("bench/results")) -> None:
    """The demo's runs on this machine against their simulation, calibrated from the runs' own measurements."""
    from .bench_twin import twin

    with errors_told():
        writable(out / "twin.json")
        twin(DEFAULTS, out, Console(soft_wrap=True))


@bench.command("vllm")
def bench_vllm(
    model: Annotated[
        str | None, typer.Option(help="Folder of the model; by default the demo's, from its cache.")
    ] = None,
    kv: Annotated[
        str, typer.Option(help="KV cache of stock vLLM; remap gets the same memory, weights included.")
    ] = "40MiB",
    seconds: Annotated[float, typer.Option(min=1.0, help="Requests arrive for so long, under each load.")] = 45.0,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each side.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute, on both sides.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for vllm.md and vllm.json.")] = Path("bench/results"),
) -> None:
    """Stock vLLM against vLLM on remap at the same memory, under three loads. Run it where vLLM is installed."""
    from .bench_vllm import VllmBench, measure, model_folder, need_vllm
    from .bench_vllm_report import write

    console = Console(soft_wrap=True)
    with errors_told():
        need_vllm()
        writable(out / "vllm.json")
        settings = VllmBench(
            model=model_folder(model), kv_bytes=parse_size(kv, "kv"), seconds=seconds, runs=runs, threads=threads
        )
        console.print(write(measure(settings, console.print), out), markup=False, highlight=False)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Also: whether the vLLM that is installed here can be entered.")
    ] = False,
) -> None:
    """Check what this machine offers: host memory, GPUs and their driver, and what the demo lacks."""
    import json

    from . import doctor as inspection
    from .doctor_cuda import look

    seen = look()
    found = list(inspection.findings(seen))
    if vllm:
        from . import doctor_vllm

        found += doctor_vllm.findings()
    if as_json:
        typer.echo(json.dumps(inspection.report(seen, found), indent=2))
    else:
        console = Console(soft_wrap=True)
        for finding in found:
            mark = {"ok": "[green]ok  [/green]", "note": "[yellow]note[/yellow]", "bad": "[red]bad [/red]"}[
                finding.level
            ]
            console.print(mark, end=" ")
            console.print(f"{finding.what}: {finding.found}", markup=False, highlight=False)
            if finding.fix:
                console.print(f"       {finding.fix}", style="dim", markup=False, highlight=False)
    raise typer.Exit(1 if any(finding.level == "bad" for finding in found) else 0)
