# SPDX-License-Identifier: Apache-2.0
"""`remap simulate`: serves the same requests under several policies in virtual time, and compares them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import remap
from remap.cli.errors import exit_on_error, writable
from remap.cli.options import Html, Json, MachineName, Tables, print_json, print_whole
from remap.errors import InvalidArgument

from .simulate_report import tables as report_tables

if TYPE_CHECKING:
    from remap_serve.sim.results import PolicyResult, Targets
    from remap_serve.sim.serving import Setup
    from remap_serve.sim.workload import Item


__all__ = ["Options", "SimulateInputs", "prepare", "run", "simulate"]

MOST_REQUESTS = 10_000_000
"""Drawing more requests would take hours, and they would not fit in memory."""


@dataclass(frozen=True)
class Options:
    """The options of the command line, by name. rate: "4" (of all tenants together) or "3,1" (of each tenant)."""

    machine: str
    tenants: str
    arrivals: str = "azure-code"
    lengths: str = "sharegpt"
    rate: str = "4"
    requests: int = 1000
    policies: str = "recompute,kv-pool+swap,remap"
    sharing: str = "epochs"
    scheduler: str = "prefill-first"
    seed: int = 0
    quantum: float = 1.0
    ttft_target: float = 2.0
    tpot_target: float = 0.2
    tables: Path | None = None


@dataclass(frozen=True)
class SimulateInputs:
    """All inputs, checked before anything runs."""

    setup: Setup
    items: tuple[Item, ...]
    policies: tuple[str, ...]
    targets: Targets
    configuration: dict[str, Any]
    title: str


def _names(text: str, field: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise InvalidArgument(f"{field} is empty; nothing was run; give at least one name", field=field, value=text)
    return names


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in _names(text, "rate")]
    except ValueError:
        raise InvalidArgument(
            f"rate must be a number, or one for each tenant as 3,1, got {text!r}; nothing was run",
            field="rate",
            value=text,
        ) from None


def prepare(options: Options) -> SimulateInputs:
    """Look up all names and draw the requests.

    Raises InvalidArgument for the first wrong option; for an unknown name it lists the known ones.
    """
    from remap.policy import hardware
    from remap_serve.sim import loads, planning_checks, policies, serving
    from remap_serve.sim.results import Targets

    targets = Targets(options.ttft_target, options.tpot_target)
    machine = hardware.machine(options.machine, options.tables)
    planning_checks.check_fit(machine)
    try:
        tenants = serving.tenants(options.tenants, machine, options.tables)
    except InvalidArgument as error:
        # A word alone may have been meant as a combination.
        if any(mark in options.tenants for mark in ":,"):
            raise
        raise InvalidArgument(
            f"{error}; combinations: {', '.join(serving.COMBINATIONS)}", **{"tenants": options.tenants, **error.fields}
        ) from error
    if not options.quantum > 0:
        raise InvalidArgument(
            f"quantum must be above 0, got {options.quantum}; nothing was run",
            field="quantum",
            value=options.quantum,
        )
    setup = serving.Setup(
        machine, tenants, sharing=options.sharing, scheduler=options.scheduler, quantum_s=options.quantum
    )
    chosen = tuple(policies.find(name).name for name in _names(options.policies, "policies"))
    for name in chosen:
        serving.fitting(setup, policies.find(name))
    twice = [name for name in dict.fromkeys(chosen) if chosen.count(name) > 1]
    if twice:
        raise InvalidArgument(
            f"policies has {twice[0]!r} twice; nothing was run; name each once",
            field="policies",
            value=options.policies,
        )
    rates = _rates(options.rate)
    items = loads.load(
        [tenant.name for tenant in tenants],
        requests=options.requests,
        rate=rates,
        arrivals=_names(options.arrivals, "arrivals"),
        lengths=_names(options.lengths, "lengths"),
        seed=options.seed,
        context={tenant.name: tenant.model.context for tenant in tenants},
    )
    return SimulateInputs(
        setup, items, chosen, targets, _configuration(options, setup, items), _title(options, setup, rates)
    )


def _notes(options: Options, prepared: SimulateInputs) -> list[str]:
    """The assumptions about the machine and the models, in sentences."""
    from remap.policy.hardware import namesakes
    from remap_serve.sim.planning_checks import experts_note, fit_note

    machine, found = prepared.setup.machine, []
    if others := namesakes(options.machine, options.tables):
        found.append(
            f"{options.machine} is {machine.name}; {' or '.join(others)} is another machine: give the full name"
        )
    found += fit_note(machine)
    found += [text for tenant in prepared.setup.tenants for text in tenant.assumed]
    models = dict.fromkeys(tenant.model for tenant in prepared.setup.tenants)
    return found + [text for model in models for text in experts_note(model)]


def _title(options: Options, setup: Setup, rates: Sequence[float]) -> str:
    return (
        f"{options.tenants} on {setup.machine.name}: {options.requests:,} requests, "
        f"{', '.join(f'{rate:g}' for rate in rates)}/s, {options.arrivals} arrivals, {options.lengths} lengths"
    )


def _configuration(options: Options, setup: Setup, items: Sequence[Item]) -> dict[str, Any]:
    """All settings that decide the result, so that the file is complete."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    machine = asdict(setup.machine)
    machine.pop("sources", None)
    return {
        **given,
        "machine": setup.machine.name,
        "machine_figures": machine,
        "tenants_memory": [
            {
                "tenant": tenant.name,
                "model": tenant.model.name,
                "memory_bytes": tenant.memory_bytes,
                "kv_blocks": setup.kv_blocks(tenant),
                "requests": sum(item.tenant == tenant.name for item in items),
            }
            for tenant in setup.tenants
        ],
        "block_tokens": setup.block_tokens,
        "mean_prompt_tokens": math.fsum(item.prompt_tokens for item in items) / len(items),
        "mean_output_tokens": math.fsum(item.output_tokens for item in items) / len(items),
        "remap_version": remap.__version__,
    }


def run(prepared: SimulateInputs, progress: Console) -> list[PolicyResult]:
    """One result for each policy, in their order, each with a bar on `progress`."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from remap_serve.sim import serving

    results = []
    wide = max(map(len, prepared.policies))
    columns = (
        *(TextColumn(f"{{task.description:<{wide}}}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests")),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=progress) as bars:
        tasks = [bars.add_task(policy, total=len(prepared.items), start=False) for policy in prepared.policies]
        for policy, task in zip(prepared.policies, tasks):
            bars.start_task(task)

            def advance(finished: int, total: int, task: Any = task) -> None:
                bars.update(task, completed=finished, total=total)

            result = serving.simulate(prepared.setup, prepared.items, policy, on_progress=advance)
            bars.update(task, completed=result.requests_finished)
            bars.stop_task(task)
            results.append(replace(result, targets=prepared.targets))
    return results


def simulate(
    machine: MachineName,
    tenants: Annotated[
        str,
        typer.Option(
            "--models",
            help="C1, C2, one model, or models with shares as 'OPT-13b:35%,Llama-3-8b:20%'; paths of a config.json, too.",
        ),
    ],
    arrivals: Annotated[
        str,
        typer.Option(
            help="azure-code, azure-conv, poisson, bursty, bursty:CV:DUTY, burstgpt-like, or a CSV file with "
            "arrival_s; one for all tenants, or one each: a,b."
        ),
    ] = Options.arrivals,
    lengths: Annotated[
        str,
        typer.Option(
            help="sharegpt, alpaca, long, short, fixed:IN:OUT, or a CSV file with input_tokens and output_tokens; one "
            "for all tenants, or one each: a,b."
        ),
    ] = Options.lengths,
    rate: Annotated[
        str, typer.Option(help="Requests per second: of all tenants together, or of each: 3,1.")
    ] = Options.rate,
    requests: Annotated[
        int, typer.Option(min=1, max=MOST_REQUESTS, help="Requests of all tenants together.")
    ] = Options.requests,
    policies: Annotated[
        str,
        typer.Option(
            help="Such as recompute,swap,pie,kv-pool,remap,remap:weights,ideal; others are compared with the first."
        ),
    ] = Options.policies,
    sharing: Annotated[str, typer.Option(help="epochs, temporal, spatial or mig.")] = Options.sharing,
    scheduler: Annotated[str, typer.Option(help="prefill-first or chunked.")] = Options.scheduler,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and lengths.")] = Options.seed,
    quantum: Annotated[
        float,
        typer.Option(
            help="Seconds of a tenant's turn, under epochs and temporal; inf: it lasts until the tenant has nothing to do."
        ),
    ] = Options.quantum,
    ttft_target: Annotated[
        float, typer.Option(help="Seconds to the first token, at most, of a request that counts as goodput.")
    ] = Options.ttft_target,
    tpot_target: Annotated[
        float, typer.Option(help="Seconds a token after the first, in the mean of such a request (TPOT), at most.")
    ] = Options.tpot_target,
    tables: Tables = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Serve the same requests under several policies on a simulated machine, and compare them."""
    options = Options(
        machine=machine,
        tenants=tenants,
        arrivals=arrivals,
        lengths=lengths,
        rate=rate,
        requests=requests,
        policies=policies,
        sharing=sharing,
        scheduler=scheduler,
        seed=seed,
        quantum=quantum,
        ttft_target=ttft_target,
        tpot_target=tpot_target,
        tables=tables,
    )
    with exit_on_error():
        from remap_serve.sim.results import report

        if html is not None:
            from .simulate_html import need_packages

            need_packages()  # said before the minutes of a simulation, not after
            writable(html)
        prepared = prepare(options)
        aside = Console(stderr=True, emoji=False, soft_wrap=True)
        for text in _notes(options, prepared):
            aside.print(f"Assumed: {text}.", style="yellow", markup=False, highlight=False)
        results = run(prepared, aside)
        if html is not None:
            from .simulate_html import page

            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(page(prepared.configuration, results, prepared.title), encoding="utf-8")
            aside.print(f"page: {html}", markup=False, highlight=False)
    if as_json:
        print_json(report(prepared.configuration, results))
    else:
        console = Console(emoji=False)  # "fixed:100:0" is no picture of a hundred
        for part in report_tables(results, prepared.title, console):
            print_whole(console, part)
