# SPDX-License-Identifier: Apache-2.0
"""The typer application `remap`: the library's commands, and those that other distributions, remap-serve first, name in their
pyproject.toml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import remap

from .errors import EXIT_CODES, REFUSED
from .options import Json, accept_old_options, print_json

__all__ = ["GROUP", "OF_SERVE", "app", "installed"]

GROUP = "remap.commands"
OWN = {name: EntryPoint(name, f"remap.cli.{name}:{name}", GROUP) for name in ("top", "trace", "serve")}
OF_SERVE = ("demo", "offline", "advise", "plan", "simulate", "fit", "serve-many", "cluster")
"""What the package remap-serve brings, in the order of `remap --help`."""


def installed() -> dict[str, EntryPoint]:
    """The commands that are here, each with where it is: distributions add theirs by entry points. A call loads its own alone."""
    found = {each.name: each for each in entry_points(group=GROUP)}
    known = {name: found.pop(name) for name in OF_SERVE if name in found}
    return known | OWN | found


class _Loaded(MutableMapping[str, Any]):
    """The commands of this file, and those that are installed, each imported when it is first asked for."""

    def __init__(self, here: Mapping[str, Any]) -> None:
        self._loaded: dict[str, Any] = dict(here)
        self._installed = installed()

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            found = self._installed[name].load()
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
        return iter(dict.fromkeys((*self._installed, *self._loaded)))

    def __len__(self) -> int:
        return len({*self._installed, *self._loaded})


class _Group(TyperGroup):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = _Loaded(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in OF_SERVE and args[0] not in self.commands:
            typer.echo(
                f"`remap {args[0]}` is of the package remap-serve: pip install remap-serve; nothing was done", err=True
            )
            raise typer.Exit(REFUSED)
        return super().resolve_command(ctx, args)


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
