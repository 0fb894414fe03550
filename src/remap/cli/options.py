# SPDX-License-Identifier: Apache-2.0
"""The common parts of several commands: options of one name mean the same in all of them, and a table is printed whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remap.moved import OPTIONS, goes
from remap.sizes import parse_memory

__all__ = [
    "MEMORY",
    "Html",
    "Json",
    "MachineName",
    "MaxBatchTokens",
    "MaxNumSeqs",
    "Tables",
    "accept_old_options",
    "memory_bytes",
    "print_json",
    "print_whole",
    "whole",
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Html = Annotated[Path | None, typer.Option(help="Write a page with plots there; needs matplotlib.")]
MachineName = Annotated[
    str, typer.Option(help="Such as GH200, H100-SXM, H100-PCIe, B200, A100, 4090, or one of --tables.")
]
Tables = Annotated[
    Path | None, typer.Option(help="JSON with machines and models of your own, as `remap fit` writes it.")
]
MEMORY = "For weights and KV cache: a size such as 24GiB, or a share of the device's memory such as 90%."
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Requests that run at once, at most.")]
MaxBatchTokens = Annotated[int, typer.Option(min=1, help="Tokens in one pass, at most.")]


def memory_bytes(text: str, device: str = "cpu") -> int:
    """Bytes of --memory on a device of this machine. Raises InvalidArgument, and DriverError without a GPU's driver."""
    from remap.memory.device import parse  # with the core, which most commands do without
    from remap.memory.machine_memory import memory_bound

    from .doctor_cuda import device_bytes

    name = parse(device)
    return parse_memory(text, lambda: device_bytes(name.index) if name.kind == "cuda" else memory_bound().nbytes)


def print_json(document: Any) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def print_whole(console: Console, table: Table) -> None:
    """Print every cell in full: a number of which the end is missing would be another number."""
    before, shown = console.width, whole(console, table)
    if shown is table:  # lines of a file may be longer
        console.width = max(before, _width(console, table))
    try:
        console.print(shown, markup=False, highlight=False)
    finally:
        console.width = before


def whole(console: Console, table: Table) -> Table | Text:
    """The table, or on a terminal that is narrower its rows as records, a cell a line."""
    if not console.is_terminal or _width(console, table) <= console.width:
        return table
    rows = zip(
        *([cell.plain if isinstance(cell, Text) else str(cell) for cell in each.cells] for each in table.columns)
    )
    heads = [str(each.header) for each in table.columns]
    lines = [str(text) for text in (table.title, table.caption) if text]
    for first, *cells in rows:
        lines += ["", f"{heads[0]} {first}".strip()]
        lines += [f"  {head}: {cell}" if head else f"  {cell}" for head, cell in zip(heads[1:], cells) if cell]
    return Text("\n".join(lines))


def _width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def accept_old_options(command: Any, name: str) -> None:
    """Let the command, or the group's commands, take the options that have other names now (`remap.moved.OPTIONS`), and say
    so on stderr. name: the command's."""
    for path, names in OPTIONS.items():
        if path[0] == name:
            _accept(command if len(path) == 1 else command.commands[path[1]], names)


def _accept(command: Any, names: Mapping[str, str]) -> None:
    parse = command.parse_args

    def parse_args(context: Any, given: list[str]) -> Any:
        end = given.index("--") if "--" in given else len(given)
        now = []
        for each in given[:end]:
            option, equals, value = each.partition("=")
            if option in names:
                typer.echo(f"remap: {goes(option, names[option])}", err=True)
                option = names[option]
            now.append(option + equals + value)
        return parse(context, [*now, *given[end:]])

    command.parse_args = parse_args
