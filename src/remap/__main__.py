# SPDX-License-Identifier: Apache-2.0
"""`python -m remap`: the command line, where the console script is not on the path."""

from __future__ import annotations


def _main() -> None:
    from remap.cli import main

    main()


if __name__ == "__main__":
    _main()
