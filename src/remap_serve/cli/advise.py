# SPDX-License-Identifier: Apache-2.0
"""`remap advise`: five lines on whether remap pays for these models on this machine, and the settings that follow.

`remap_serve.sim.advice` decides; the simulator serves the load.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from remap.cli.errors import exit_on_error, writable
from remap.cli.options import MEMORY, Html, Json, MachineName, Tables, print_json

if TYPE_CHECKING:
    from remap_serve.sim.advice import Advised
    from remap_serve.sim.serving import Setup

__all__ = ["advise", "settings"]


def advise(
    machine: MachineName,
    models: Annotated[
        str, typer.Option(help="Models that share the device, as Llama-3-8b,Qwen3-14B; paths of a config.json, too.")
    ],
    rate: Annotated[float, typer.Option(help="Requests per second of all models together.")],
    memory: Annotated[str, typer.Option(help=f"{MEMORY} Of all models, with activations.")] = "90%",
    lengths: Annotated[str, typer.Option(help="sharegpt, alpaca, long, short, fixed:IN:OUT, or a CSV file.")] = (
        "sharegpt"
    ),
    arrivals: Annotated[str, typer.Option(help="As of `remap simulate`.")] = "azure-code",
    sharing: Annotated[str, typer.Option(help="epochs, temporal or spatial, as of `remap simulate`.")] = "epochs",
    requests: Annotated[int, typer.Option(min=20, max=100_000, help="Of one seed.")] = 500,
    seeds: Annotated[int, typer.Option(min=1, max=99, help="Loads that are drawn; the answer has their medians.")] = 3,
    tables: Tables = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Say whether remap pays for these models on a machine under a load, at which price, and with which settings."""
    with exit_on_error():
        from remap.policy import hardware
        from remap_serve.sim import advice, loads, planning_checks, policies, serving
        from remap_serve.sim.setup import evenly

        if html is not None:
            from .simulate_html import need_packages

            need_packages()
            writable(html)
        on = hardware.machine(machine, tables)
        planning_checks.check_fit(on)
        setup = serving.Setup(
            on, evenly(models.split(","), on, planning_checks.memory_of(memory, on), tables), sharing=sharing
        )
        for policy in advice.POLICIES:
            serving.fitting(setup, policies.find(policy))
        names = [tenant.name for tenant in setup.tenants]
        context = {tenant.name: tenant.model.context for tenant in setup.tenants}
        drawn = [
            loads.load(
                names,
                requests=requests,
                rate=[rate],
                arrivals=[arrivals],
                lengths=[lengths],
                seed=seed,
                context=context,
            )
            for seed in range(seeds)
        ]
        aside = Console(stderr=True, emoji=False, soft_wrap=True)
        notes = [text for one in setup.tenants for text in (*one.assumed, *planning_checks.experts_note(one.model))]
        for text in [*planning_checks.fit_note(on), *notes]:
            aside.print(f"Assumed: {text}.", style="yellow", markup=False, highlight=False)
        with aside.status("simulating") as status:
            told = iter(range(1, len(advice.POLICIES) * seeds + 1))
            found = advice.advise(
                setup,
                drawn,
                serving.simulate,
                on_run=lambda policy: status.update(f"run {next(told)} of {len(advice.POLICIES) * seeds}: {policy}"),
            )
        block = settings(setup, found.verdict)
        if html is not None:
            from .simulate_html import page

            title = f"{models} on {on.name}, {rate:g}/s, {lengths}: {found.verdict}"
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(page({"machine": on.name, "models": names, "rate": rate}, found.results, title), "utf-8")
    if as_json:
        print_json(_report(setup, found, block))
    else:
        _show(found, block, Console(soft_wrap=True, emoji=False))


def settings(setup: Setup, verdict: str) -> dict[str, str]:
    """One block for all of the models' engines: they share an arena in one process. Empty where nothing should be set.

    Its capacity is the memory that all have together without activations, so that it fits the device.
    """
    if verdict in ("not needed", "does not help"):
        return {}
    nbytes = sum(tenant.memory_bytes - setup.activation_bytes for tenant in setup.tenants)
    return {
        "REMAP_ENABLE": "1",
        **({"REMAP_ARENA": "shared"} if len(setup.tenants) > 1 else {}),
        "REMAP_CAPACITY": str(nbytes),
        "REMAP_LINK": str(int(setup.machine.h2d_bytes_per_s)),
        **({"REMAP_MAX_LAYERS": "0"} if verdict == "sharing KV suffices" else {}),
    }


def _report(setup: Setup, found: Advised, block: dict[str, str]) -> dict[str, Any]:
    def finite(value: float) -> float | None:
        return value if abs(value) < float("inf") else None  # nan compares False

    return {
        "verdict": found.verdict,
        "lines": found.lines,
        "settings": block,
        "models": [
            {"name": one.name, "memory_bytes": one.memory_bytes, "kv_blocks": setup.kv_blocks(one)}
            for one in setup.tenants
        ],
        "figures": {
            policy: {key: finite(value) for key, value in asdict(each).items()}
            for policy, each in found.figures.items()
        },
    }


def _show(found: Advised, block: dict[str, str], console: Console) -> None:
    for number, line in enumerate(found.lines):
        console.print(line, style="bold" if number == 0 else None, markup=False, highlight=False)
    if block:
        console.print("\nWhat to set, the same for each model's engine:", style="bold")
        for name, value in block.items():
            console.print(f"  {name}={value}", markup=False, highlight=False)
        text = (
            "  KV goes to host memory by itself in engines that copy it (remap_serve.engine.LLMEngine, Session(host_kv=)); "
            "vLLM and SGLang do not on remap, and get what the line on weights says without it at most."
        )
        console.print(text, markup=False, highlight=False)
