"""`python -m remap`: the command line, where the console script is not on the path."""

from __future__ import annotations

from remap.cli import main

if __name__ == "__main__":
    main()
