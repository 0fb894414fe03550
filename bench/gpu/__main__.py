"""`python -m bench.gpu`: measures, one table, one JSON file; with `--checkout` it builds and tests first (run.sh does that).

    --quick          2 minutes instead of 8        --emulated   on the emulated driver (REMAP_EMULATED_DRIVER or the build)
    --seconds N      another limit                 --only GLOB  measures whose names match, may be repeated
    --name NAME      of the result                 --out DIR    where the JSON goes

`python -m bench.gpu.worker --list` names the measures.
Exit status: 0 if every step and every measure ran, 1 if one failed, 2 if nothing could be measured at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import suite

DESCRIPTION = "Build, test and measure on a GPU, or on the emulated driver."


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=DESCRIPTION)
    parser.add_argument("--quick", action="store_true", help="two minutes: fewer sizes, fewer samples")
    parser.add_argument("--emulated", action="store_true", help="on the emulated driver; no figure of a GPU comes out")
    parser.add_argument("--checkout", action="store_true", help="build this checkout and run its tests first")
    parser.add_argument("--seconds", type=float, default=None, help="limit of the whole run (480; 120 with --quick)")
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="measures to run")
    parser.add_argument("--name", default=None, help="the result's name (default: the GPU's)")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")
    given = parser.parse_args(arguments)
    seconds = given.seconds if given.seconds is not None else 120.0 if given.quick else 480.0
    # A run of a few seconds takes the small sizes.
    options = suite.Options(
        quick=given.quick or seconds < 240,
        emulated=given.emulated,
        checkout=given.checkout,
        seconds=seconds,
        only=tuple(given.only),
        name=given.name,
        out=given.out,
    )
    return suite.run(options, dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
