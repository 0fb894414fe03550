"""How a command ends that cannot do what it was asked: one red line that says why, no traceback, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from remap.errors import Error, InvalidArgument

__all__ = ["errors_told"]


@contextmanager
def errors_told(*others: type[Exception], invalid_argument: int = 1) -> Iterator[None]:
    """An Error of remap's that leaves the block, or one of `others`, becomes a line on stderr and exit code 1, or
    `invalid_argument` if it is an InvalidArgument. All other exceptions pass.
    """
    caught: tuple[type[Exception], ...] = (Error, *others)
    try:
        yield
    except caught as error:
        text = f"{type(error).__name__}: {error}"
        Console(stderr=True, soft_wrap=True, emoji=False).print(text, style="red", markup=False, highlight=False)
        raise typer.Exit(invalid_argument if isinstance(error, InvalidArgument) else 1) from error
