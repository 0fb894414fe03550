"""`python -m bench.lab COMMAND ...`, in the root of the repository."""

from __future__ import annotations

import sys

from remap.extras import install


def main() -> None:
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"The command line needs the package {error.name}: {install('cli')}\n")
        sys.exit(2)
    app(prog_name="python -m bench.lab")


if __name__ == "__main__":
    main()
