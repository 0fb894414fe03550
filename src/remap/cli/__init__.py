# SPDX-License-Identifier: Apache-2.0
"""The command `remap`. It needs the extra `cli` (typer, rich, jinja2); the library itself does not."""

from __future__ import annotations

import os
import sys

from remap.extras import install

__all__ = ["main"]


def main() -> None:
    """The entry point of the console script."""
    try:
        from .main import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"The command line needs the package {error.name}: {install('cli')}\n")
        sys.exit(2)
    try:
        try:
            app(prog_name="remap")
        finally:
            sys.stdout.flush()
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # who reads stdout has read enough: `remap plan ... | head`
            sys.exit(0)
        raise
    except OSError as error:  # of a command that does not expect one, or of stdout: the disk is full
        sys.stderr.write(f"{type(error).__name__}: {error}; what was printed may not be whole\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere, without a traceback
        sys.exit(1)
