"""The typer application: `remap demo`, `offline`, `cluster`, `serve`, `top`, `advise`, `plan`, `simulate`, `fit` and `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from remap.sizes import parse_size

from . import cluster
from .advise import advise
from .demo_config import DemoConfig, default_config
from .demo_tenants import MOST_TENANTS
from .errors import EXIT_CODES, exit_on_error, writable
from .fit import fit_command
from .offline import offline
from .options import Json, MaxBatchTokens, MaxNumSeqs, print_json
from .plan import plan
from .serve import serve
from .simulate import simulate
from .top import top

__all__ = ["app"]

app = typer.Typer(
    help="Turn model weights into KV cache while an engine serves, and back.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("offline")(offline)
app.command("advise")(advise)
app.command("plan")(plan)
app.command("simulate")(simulate)
app.command("fit")(fit_command)
app.add_typer(cluster.app, name="cluster")
app.command("top")(top)
app.command("serve")(serve)
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
    memory: Annotated[
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
    max_num_seqs: MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_batch_tokens: MaxBatchTokens = DEFAULTS.max_batch_tokens,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one KV block.")] = DEFAULTS.block_tokens,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute, in all three runs.")] = DEFAULTS.threads,
    tenants: Annotated[
        int, typer.Option(min=1, max=MOST_TENANTS, help="Models on the arena: SmolLM2, and others with random weights.")
    ] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of the three runs; for several, shows medians and ranges.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.html.")] = Path("out"),
    as_json: Json = False,
) -> None:
    """Serve real prompts on a real model in a fixed memory budget, without and with remap, and compare."""
    from .demo import demo as run

    with exit_on_error():
        config = DemoConfig(
            budget_bytes=_budget(memory, tenants),
            dtype=dtype,
            requests=requests,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            block_tokens=block_tokens,
            threads=threads,
            tenants=tenants,
        )
        writable(out / "demo.json")
        run(config, out, Console(stderr=as_json), rounds)
        if as_json:
            typer.echo((out / "demo.json").read_text(encoding="utf-8"), nl=False)


def _budget(text: str | None, tenants: int) -> int:
    if text is not None:
        return parse_size(text, "memory")
    return DEFAULTS.budget_bytes if tenants == 1 else 0


@app.command()
def doctor(
    as_json: Json = False,
    vllm: Annotated[bool, typer.Option("--vllm", help="Check the installed vLLM, too.")] = False,
) -> None:
    """Check this machine: host memory, GPUs and their driver, and the packages and model of the demo."""
    from . import doctor as inspection
    from .doctor_cuda import look

    seen = look()
    found = list(inspection.checks(seen))
    if vllm:
        from . import doctor_vllm

        found += doctor_vllm.checks()
    if as_json:
        print_json(inspection.report(seen, found))
    else:
        console = Console(soft_wrap=True)
        for check in found:
            mark = {"ok": "[green]ok  [/green]", "note": "[yellow]note[/yellow]", "bad": "[red]bad [/red]"}[check.level]
            console.print(mark, end=" ")
            console.print(f"{check.what}: {check.found}", markup=False, highlight=False)
            if check.fix:
                console.print(f"       {check.fix}", style="dim", markup=False, highlight=False)
    raise typer.Exit(1 if any(check.level == "bad" for check in found) else 0)
