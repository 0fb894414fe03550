"""The commands of `python -m bench.lab` and their options. They end as those of `remap` do: see `remap.cli.errors`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from remap.cli.errors import EXIT_CODES, exit_on_error, writable
from remap.sizes import parse_size
from remap_serve.cli.demo_config import default_config

__all__ = ["app"]

app = typer.Typer(
    help="Measure on this machine, and put the papers' figures beside it.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def machine(
    out: Annotated[Path, typer.Option(help="JSON file for the measurements; `remap fit` reads it.")],
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.", show_default="by device")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes: less than half a minute.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute on the CPU.")] = None,
) -> None:
    """Measure operators, copies and driver calls of this machine, for `remap fit`, `remap plan` and `remap simulate`."""
    from .machine.measure import measure, need_torch, write

    console = Console(soft_wrap=True)
    with exit_on_error():
        writable(out)
        if threads is not None:
            need_torch(False).set_num_threads(threads)
        found = measure(
            device, quick=quick, dtype=dtype, say=lambda text: console.print(text, markup=False, highlight=False)
        )
        write(out, found)
    console.print(f"written to {out}; next: remap fit {out} --name my-machine --out my-machine.json", markup=False)


@app.command()
def paper(
    only: Annotated[
        list[str] | None, typer.Option(help='Only these experiments, such as "fig8*"; may be given several times.')
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few requests and rates.")] = False,
    requests: Annotated[
        int | None, typer.Option(min=20, help="Requests of a run; three times as many of Alpaca's.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each point, each with requests of its own; 5, or 2 if quick.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = (
        os.cpu_count() or 1
    ),
    again: Annotated[bool, typer.Option("--again", help="Run experiments that the file has results of, too.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/paper.json")] = None,
    page: Annotated[Path | None, typer.Option(help="The page.", show_default="bench/results/paper.md")] = None,
) -> None:
    """Figures of Oneiros beside those of a simulation, five seeds. What is in the file already is not run again."""
    from .paper.command import run_paper
    from .paper.runs import Settings

    with exit_on_error():
        # Other settings begin the file anew, so quick runs have one of their own.
        run_paper(
            only or [],
            results or Path("out/paper.json" if quick else "bench/results/paper.json"),
            page or Path("out/paper.md" if quick else "bench/results/paper.md"),
            Console(),
            settings=Settings(
                requests=requests or (100 if quick else 500), seeds=seeds or (2 if quick else 5), quick=quick
            ),
            jobs=jobs,
            again=again,
            report_only=report_only,
        )


@app.command("four-papers")
def four_papers(
    page: Annotated[Path | None, typer.Option(help="The page.", show_default="docs/notes/paper-vs-ours.md")] = None,
) -> None:
    """Oneiros, KunServe, HybridServe and Pie beside ours on one page, from bench/results. Nothing is run."""
    from .four_papers.page import PAGE, write

    path = page or PAGE
    with exit_on_error():
        writable(path)
        typer.echo(write(path))


@app.command()
def beyond(
    report_only: Annotated[bool, typer.Option("--report-only", help="Write page and pictures from the files.")] = False,
    page: Annotated[Path | None, typer.Option(help="The page.", show_default="bench/results/beyond.md")] = None,
) -> None:
    """What four papers lack: regret, donors over time, lending between processes, exactness. What is stored is not run again."""
    from .beyond.page import PAGE, run_beyond

    path = page or PAGE
    with exit_on_error():
        writable(path)
        typer.echo(run_beyond(path, report_only=report_only))


@app.command()
def headline(
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = 1,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/headline.json")] = None,
) -> None:
    """The simulated headline of the README: five seeds of 2,000 requests each. What is in the file already is not run again."""
    from .headline import RESULTS, run_headline

    path = results or RESULTS
    with exit_on_error():
        writable(path)
        typer.echo(run_headline(path, jobs=jobs, report_only=report_only))


@app.command()
def gap(
    quick: Annotated[bool, typer.Option("--quick", help="Few requests, two seeds.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = 1,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/gap.json")] = None,
) -> None:
    """How much of what memory is worth each policy gets, five seeds. What is in the file already is not run again."""
    from .gap import QUICK, RESULTS, SETTINGS, run_gap

    # Other settings begin the file anew, so quick runs have one of their own.
    path = results or (Path("out/gap.json") if quick else RESULTS)
    with exit_on_error():
        writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(run_gap(path, QUICK if quick else SETTINGS, jobs=jobs, report_only=report_only))


@app.command()
def trades(
    quick: Annotated[bool, typer.Option("--quick", help="Few requests, two seeds.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = 1,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/trades.json")] = None,
) -> None:
    """What targets for latency and the length of a turn trade, five seeds. What is in the file already is not run again."""
    from .trades import QUICK, RESULTS, SETTINGS, run_trades

    # Other settings begin the file anew, so quick runs have one of their own.
    path = results or (Path("out/trades.json") if quick else RESULTS)
    with exit_on_error():
        writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(run_trades(path, QUICK if quick else SETTINGS, jobs=jobs, report_only=report_only))


@app.command()
def market(
    quick: Annotated[bool, typer.Option("--quick", help="One cell, one seed, half a minute.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = 1,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/market.json")] = None,
) -> None:
    """How many models one GPU serves within their targets, five seeds. What is in the file already is not run again."""
    from .market.page import RESULTS, run_market

    path = results or (Path("out/market.json") if quick else RESULTS)
    with exit_on_error():
        writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(
            run_market(
                path, quick=quick, jobs=jobs, report_only=report_only, say=lambda text: typer.echo(text, err=True)
            )
        )


@app.command()
def regret(
    loads: Annotated[int, typer.Option(min=1, help="The first so many that wait for memory; more later go on.")] = 12,
    quick: Annotated[bool, typer.Option("--quick", help="Few requests, one seed, four loads at most.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = 1,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/regret.json")] = None,
) -> None:
    """How far the default is behind the best policy of each load, over many loads. What is in the file is not run again."""
    from .regret import QUICK, RESULTS, SETTINGS, run_regret

    # Other settings begin the file anew, so quick runs have one of their own.
    path = results or (Path("out/regret.json") if quick else RESULTS)
    with exit_on_error():
        writable(path)
        number = min(loads, 4) if quick else loads
        settings = QUICK if quick else SETTINGS
        typer.echo(run_regret(path, settings, number=number, jobs=jobs, report_only=report_only))


@app.command("map")
def pressure_map(
    quick: Annotated[bool, typer.Option("--quick", help="Few requests, two links, one seed.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write page and picture from the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = 1,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/map.json")] = None,
) -> None:
    """What weights add, by pressure, link and number of models: a table and a picture. What is in the file is not run again."""
    from .pressure_map import FULL, PICTURE, QUICK, RESULTS, run_map

    # Other settings begin the file anew, so quick runs have one of their own.
    path = results or (Path("out/map.json") if quick else RESULTS)
    drawing = PICTURE if path == RESULTS else path.with_suffix(".svg")
    with exit_on_error():
        writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(run_map(path, drawing, QUICK if quick else FULL, jobs=jobs, report_only=report_only))


@app.command()
def pie(
    quick: Annotated[bool, typer.Option("--quick", help="Few requests, two seeds.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = 1,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/pie.json")] = None,
) -> None:
    """Pie's Figures 6 to 10, event by event, beside KV that streams, five seeds. What is in the file already is not run again."""
    from .pie.command import QUICK, RESULTS, SETTINGS, run_pie

    # Other settings begin the file anew, so quick runs have one of their own.
    path = results or (Path("out/pie.json") if quick else RESULTS)
    with exit_on_error():
        writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(run_pie(path, QUICK if quick else SETTINGS, jobs=jobs, report_only=report_only))


@app.command()
def hybridserve(
    quick: Annotated[bool, typer.Option("--quick", help="One batch of each table, two seeds.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = 1,
    results: Annotated[
        Path | None, typer.Option(help="The file.", show_default="bench/results/hybridserve.json")
    ] = None,
) -> None:
    """HybridServe's Figures 12 to 15 beside the library's way to divide KV and activations. What is in the file stays."""
    from .hybridserve.command import QUICK, RESULTS, SETTINGS, run_hybridserve

    # Other settings begin the file anew, so quick runs have one of their own.
    path = results or (Path("out/hybridserve.json") if quick else RESULTS)
    with exit_on_error():
        writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(run_hybridserve(path, QUICK if quick else SETTINGS, jobs=jobs, report_only=report_only))


@app.command()
def kunserve(
    quick: Annotated[bool, typer.Option("--quick", help="Short runs, two seeds.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = 1,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/kunserve.json")] = None,
) -> None:
    """KunServe's Figures 12 to 17 beside its baselines and the library's plans. What is in the file already is not run again."""
    from .kunserve.command import QUICK, RESULTS, SETTINGS, run_kunserve

    # Other settings begin the file anew, so quick runs have one of their own.
    path = results or (Path("out/kunserve.json") if quick else RESULTS)
    with exit_on_error():
        writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(run_kunserve(path, QUICK if quick else SETTINGS, jobs=jobs, report_only=report_only))


@app.command("kunserve-map")
def kunserve_map(
    quick: Annotated[bool, typer.Option("--quick", help="Short runs, two loads, one seed.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write page and picture from the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = 1,
    results: Annotated[
        Path | None, typer.Option(help="The file.", show_default="bench/results/kunserve-map.json")
    ] = None,
) -> None:
    """What dropping layers is worth, by demand for KV and by work: a table and a picture. What is in the file stays."""
    from .kunserve.burst_map import FULL, PICTURE, QUICK, RESULTS
    from .kunserve.burst_page import run_burst_map

    # Other settings begin the file anew, so quick runs have one of their own.
    path = results or (Path("out/kunserve-map.json") if quick else RESULTS)
    drawing = PICTURE if path == RESULTS else path.with_suffix(".svg")
    with exit_on_error():
        writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(run_burst_map(path, drawing, QUICK if quick else FULL, jobs=jobs, report_only=report_only))


@app.command()
def knee(
    quick: Annotated[bool, typer.Option("--quick", help="Few requests, one load, one seed.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the results do not depend on it.")] = 1,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/knee.json")] = None,
) -> None:
    """How many gaps between tokens are waits for turns, with less KV and longer pauses too. What is in the file stays."""
    from .paper.knee import FULL, QUICK, RESULTS, run_knee

    # Other settings begin the file anew, so quick runs have one of their own.
    path = results or (Path("out/knee.json") if quick else RESULTS)
    with exit_on_error():
        writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(run_knee(path, QUICK if quick else FULL, jobs=jobs, report_only=report_only))


@app.command()
def real(
    quick: Annotated[bool, typer.Option("--quick", help="Small random models, one round: that it runs.")] = False,
    turns: Annotated[
        bool, typer.Option("--turns", help="Three models in turns, and in epochs; four policies.")
    ] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/real.json")] = None,
) -> None:
    """The engine under each policy on this machine, in the same memory. What is in the file already is not run again."""
    from .real.command import RESULTS, RESULTS_OF_TURNS, run_real

    # Other settings begin the file anew, so each suite has one of its own.
    suite = "quick" if quick else "turns" if turns else "full"
    path = results or {"quick": Path("out/real.json"), "turns": RESULTS_OF_TURNS, "full": RESULTS}[suite]
    with exit_on_error():
        writable(path)
        typer.echo(run_real(path, suite, report_only=report_only))


@app.command()
def offline(
    quick: Annotated[bool, typer.Option("--quick", help="Small random models, one round: that it runs.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/offline.json")] = None,
) -> None:
    """Offline batches of models larger than their memory: KV, activations or both. What is in the file is not run again."""
    from .offline.command import RESULTS, run_offline

    # Other settings begin the file anew, so quick runs have one of their own.
    path = results or (Path("out/offline.json") if quick else RESULTS)
    with exit_on_error():
        writable(path)
        typer.echo(run_offline(path, "quick" if quick else "full", report_only=report_only))


@app.command()
def cluster(
    quick: Annotated[bool, typer.Option("--quick", help="Two tiny instances, one round: that it runs.")] = False,
    duel: Annotated[bool, typer.Option("--duel", help="With and without merging alone, five rounds.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the page from the file.")] = False,
    results: Annotated[Path | None, typer.Option(help="The file.", show_default="bench/results/cluster.json")] = None,
) -> None:
    """Four instances on this machine under a burst, by policy. What is in the file is not run again."""
    from .cluster.command import DUEL_RESULTS, RESULTS, run_cluster

    # Other settings begin the file anew, so quick runs have one of their own.
    path = results or (Path("out/cluster.json") if quick else DUEL_RESULTS if duel else RESULTS)
    with exit_on_error():
        writable(path)
        suite = "quick" if quick else "duel" if duel else "full"
        typer.echo(run_cluster(path, suite, report_only=report_only))


@app.command()
def broker(
    quick: Annotated[bool, typer.Option("--quick", help="Few grants: that it runs.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Print the table of the file.")] = False,
    results: Annotated[
        Path | None, typer.Option(help="The file.", show_default="bench/results/broker-prototypes.json")
    ] = None,
) -> None:
    """What a grant of pages to another process takes: by messages to a broker, and by a ledger in shared memory."""
    from .broker.command import QUICK, RESULTS, SETTINGS, run_broker

    path = results or (Path("out/broker-prototypes.json") if quick else RESULTS)
    with exit_on_error():
        writable(path)
        typer.echo(run_broker(path, QUICK if quick else SETTINGS, report_only=report_only))


@app.command()
def twin(out: Annotated[Path, typer.Option(help="Folder for twin.json.")] = Path("bench/results")) -> None:
    """The demo's runs on this machine against their simulation, calibrated from the runs' own measurements."""
    from .twin.compare import twin as run

    with exit_on_error():
        writable(out / "twin.json")
        run(default_config(), out, Console(soft_wrap=True))


@app.command()
def vllm(
    model: Annotated[
        str | None, typer.Option(help="Folder of the model; by default the demo's, from its cache.")
    ] = None,
    kv: Annotated[
        str, typer.Option(help="KV cache of stock vLLM; remap gets the same memory, weights included.")
    ] = "40MiB",
    seconds: Annotated[float, typer.Option(min=1.0, help="Requests arrive for so long, under each load.")] = 45.0,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each side.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute, on all sides.")] = 1,
    load: Annotated[list[str] | None, typer.Option(help="Only this load; may be given several times.")] = None,
    host_kv: Annotated[
        str | None, typer.Option(help="Also run both sides with so much host memory for KV (OffloadingConnector).")
    ] = None,
    cpu_linear: Annotated[
        str, typer.Option(help="remap's kernels of linear layers on a CPU (REMAP_CPU_LINEAR): exact or packed.")
    ] = "exact",
    out: Annotated[Path, typer.Option(help="Folder for vllm.md and vllm.json (with --host-kv: vllm-host-kv).")] = Path(
        "bench/results"
    ),
) -> None:
    """Stock vLLM against vLLM on remap at the same memory, under three loads. Run it where vLLM is installed."""
    from .vllm.compare import LOADS, VllmBench, measure, model_folder, need_vllm
    from .vllm.report import stem, write

    console = Console(soft_wrap=True)
    with exit_on_error():
        need_vllm()
        host = 0 if host_kv is None else parse_size(host_kv, "host_kv")
        writable(out / f"{stem(host)}.json")
        settings = VllmBench(
            model=model_folder(model),
            kv_bytes=parse_size(kv, "kv"),
            seconds=seconds,
            runs=runs,
            threads=threads,
            loads=tuple(load or LOADS),
            host_kv_bytes=host,
            cpu_linear=cpu_linear,
        )
        console.print(write(measure(settings, console.print), out), markup=False, highlight=False)


@app.command()
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
    from .ablations.command import run_all

    with exit_on_error():
        writable(out / "ablations.json")
        run_all(only or [], out, Console(), quick=quick, seconds=seconds, runs=runs)
