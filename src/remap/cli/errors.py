"""How a command ends that cannot do what it was asked: one red line that says why, no traceback, and an exit code.

0  it did what was asked
1  it ran, and something failed or was found (a run broke off, a fit is too far off, `doctor` found a fault)
2  nothing was done: the command line is wrong, an input cannot be read, or what the command needs is missing
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from remap.errors import Error, InvalidArgument, InvalidState

__all__ = ["EXIT_CODES", "FAILED", "REFUSED", "Missing", "exit_on_error", "needed", "writable"]

FAILED, REFUSED = 1, 2
EXIT_CODES = (
    "Exit codes, of all commands: 0 done; 1 it ran, and something failed or was found; 2 nothing was done: wrong "
    "usage, an input that cannot be read, or something that is not installed."
)


class Missing(InvalidState):
    """What the command needs is not here (a package, a device, a model), so nothing was begun. The message names it."""


def needed(package: str, extra: str, what: str) -> Any:
    """The module `package`. Raises Missing (fields package, extra) where it is not installed. what: that needs it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise Missing(
            f"{what} needs {package}, of the extra `{extra}`: pip install 'remap[{extra}]'; nothing was begun",
            package=package,
            extra=extra,
        ) from error


@contextmanager
def exit_on_error(*others: type[Exception]) -> Iterator[None]:
    """An Error of remap's that leaves the block, an OSError, or one of `others`, becomes a line on stderr and an exit
    code: REFUSED of an InvalidArgument or Missing, FAILED of all others. Other exceptions pass.
    """
    caught: tuple[type[Exception], ...] = (Error, OSError, *others)
    try:
        yield
    except caught as error:
        text = f"{type(error).__name__}: {error}"
        Console(stderr=True, soft_wrap=True, emoji=False).print(text, style="red", markup=False, highlight=False)
        raise typer.Exit(REFUSED if isinstance(error, (InvalidArgument, Missing)) else FAILED) from error


def writable(path: Path) -> None:
    """Say now, not after the run, if the file cannot be written. Raises InvalidArgument (field)."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidArgument(
            f"{path} cannot be written; nothing was run; give another path", field="path", value=str(path)
        )
