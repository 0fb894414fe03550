"""`python -m bench.lab COMMAND ...`, in the root of the repository."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"The command line needs the package {error.name}: pip install 'remap[cli]'")
    app(prog_name="python -m bench.lab")


if __name__ == "__main__":
    main()
