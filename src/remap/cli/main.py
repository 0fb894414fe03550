# SPDX-License-Identifier: Apache-2.0
"""The typer application: `remap demo`, `offline`, `cluster`, `serve`, `top`, `advise`, `plan`, `simulate`, `fit` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import remap

from .errors import EXIT_CODES
from .options import Json, accept_old_options, print_json

__all__ = ["COMMANDS", "app"]

COMMANDS: Mapping[str, str] = {
    "demo": "remap.cli.demo_command:demo",
    "offline": "remap.cli.offline:offline",
    "advise": "remap.cli.advise:advise",
    "plan": "remap.cli.plan:plan",
    "simulate": "remap.cli.simulate:simulate",
    "fit": "remap.cli.fit:fit_command",
    "top": "remap.cli.top:top",
    "trace": "remap.cli.trace:trace",
    "serve": "remap.cli.serve:serve",
    "serve-many": "remap.cli.serve_many:serve_many",
    "cluster": "remap.cli.cluster:app",
}
"""Where the commands are that stand on the reference engine, the simulator, the broker or the cluster. A call loads its own
alone: here nothing imports these (tools/import_rules.py)."""


class _Loaded(MutableMapping[str, Any]):
    """The commands of this file, and those of `COMMANDS`, each imported when it is first asked for."""

    def __init__(self, here: Mapping[str, Any]) -> None:
        self._loaded: dict[str, Any] = dict(here)

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            module, _, attribute = COMMANDS[name].partition(":")
            found = getattr(import_module(module), attribute)
            if not isinstance(found, typer.Typer):
                alone = typer.Typer(add_completion=False)
                alone.command(name)(found)
                self._loaded[name] = typer.main.get_command(alone)
            else:
                self._loaded[name] = typer.main.get_group(found)
                self._loaded[name].name = name
            accept_old_options(self._loaded[name], name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*COMMANDS, *self._loaded)))

    def __len__(self) -> int:
        return len({*COMMANDS, *self._loaded})


class _Group(TyperGroup):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = _Loaded(self.commands)


app = typer.Typer(
    cls=_Group,
    help="Turn model weights into KV cache while an engine serves, and back.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"remap {remap.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Turn model weights into KV cache while an engine serves, and back."""


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
