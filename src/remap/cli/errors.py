# SPDX-License-Identifier: Apache-2.0
"""Errors of the commands: a command that fails prints one red line with the reason, no traceback, and sets an exit
code.

0  the command is done
1  it ran and failed, or found a fault (a run broke off, a fit is too far off, a check of `doctor` is bad)
2  it did nothing: the command line is wrong, an input cannot be read, or a package or device is missing
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer
from rich.console import Console

from remap.errors import Error, InvalidArgument, InvalidState
from remap.extras import install

__all__ = ["EXIT_CODES", "FAILED", "REFUSED", "Missing", "exit_on_error", "needed", "writable"]

FAILED, REFUSED = 1, 2
EXIT_CODES = (
    "Exit codes, of all commands: 0 done; 1 it ran, and something failed or was found; 2 nothing was done: wrong "
    "usage, an input that cannot be read, or something that is not installed."
)


class Missing(InvalidState):
    """The command needs a package, device or model that is missing. The message names it. Nothing was begun."""


def needed(package: str, extra: str, what: str) -> Any:
    """Import `package`. what: the part of the command that needs it. extra: the extra that installs it.

    Raises Missing (fields package, extra) if it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise Missing(
            f"{what} needs {package}, of the extra `{extra}`: {install(extra)}; nothing was begun",
            package=package,
            extra=extra,
        ) from error


@contextmanager
def exit_on_error(*others: type[Exception]) -> Iterator[None]:
    """Turn an exception that leaves the block into a line on stderr and an exit code.

    It does so for remap's Errors, OSErrors and `others`; other exceptions pass. The code is REFUSED for InvalidArgument
    and Missing, FAILED for all others.
    """
    caught: tuple[type[Exception], ...] = (Error, OSError, *others)
    try:
        yield
    except caught as error:
        text = f"{type(error).__name__}: {error}"
        Console(stderr=True, soft_wrap=True, emoji=False).print(text, style="red", markup=False, highlight=False)
        raise typer.Exit(REFUSED if isinstance(error, (InvalidArgument, Missing)) else FAILED) from error


def writable(path: Path) -> None:
    """Check before the run that the file can be written. Raises InvalidArgument (fields field, value) if not."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise PermissionError(path)
        if not path.exists():
            TemporaryFile(dir=folder).close()  # some file systems refuse root, to whom `access` grants everything
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be written; nothing was run; give another path", field="path", value=str(path)
        ) from error
