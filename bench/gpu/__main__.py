"""`python -m bench.gpu CALL`: one call of the GPU suite, or all of them; `--help` says how. run.sh finds a Python and builds."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from . import suite
from .calls import CALLS, names

DESCRIPTION = "Test and measure this checkout on a GPU, or on the emulated driver."
EPILOG = """
calls, each below ten minutes and independent of the others:
  probe            do page tables edited beside running kernels fault? If so, the later calls run in strict mode and say so
  build-and-check  conformance suite and tests/gpu, a process a file; compute-sanitizer on the small ones
  measure          the figures, those that convince most first
  serve            whole engines under load; more than fits into one call: the same call again takes what was left out
  all              these four, in this order: 1,610 s in all, unless --total says less

DIR/results.json and DIR/results.tar.gz (all logs) are written at least every 10 seconds and renamed into place, so a run that
is killed keeps what it had. The same command again goes on where it ended: what has finished for these sources, this device
and this --quick is kept, unless --again is given. What was skipped is tried again; what was running when the run was killed
comes last. On another machine, or in an empty DIR, give the earlier file: --resume FILE.json.

Exit status: 0 if everything ran (a missed target is a line in the table), 1 if a step or a measure failed, 2 if nothing could
be run at all. `python -m bench.gpu.worker --list` names the measures.
"""


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu/run.sh",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("call", choices=[*CALLS, "all"], metavar="CALL", help="see below")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, fewer samples, shorter limits")
    parser.add_argument("--emulated", action="store_true", help="on the emulated driver; no figure of a GPU comes out")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where results go (build/gpu/results, or results-quick)"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="results.json of an earlier run, if DIR has none; a file that is not there is none",
    )
    parser.add_argument(
        "--host-budget", metavar="SIZE", help="page-locked host memory for every session: 96GiB, or bytes"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="limit of each call (480; probe 90, serve 560; less with --quick)"
    )
    parser.add_argument(
        "--total", type=float, metavar="N", help="limit of all calls of this command together, in seconds"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="parts whose names match; may be repeated"
    )
    again = "run what has finished, too; --again=failed: only what failed"
    parser.add_argument("--again", nargs="?", const="all", choices=["all", "failed"], help=again)
    parser.add_argument(
        "--name", help="keep the result as bench/results/gpu-NAME.json; without --out it is, by the GPU's name"
    )
    parser.add_argument("--checkout", action="store_true", help="build this checkout first (run.sh does)")
    arguments = sys.argv[1:] if arguments is None else arguments
    if not [each for each in arguments if each != "--checkout"]:
        parser.print_help()
        return 2
    given = parser.parse_args(arguments)
    options = suite.Options(
        calls=tuple(names(given.call)),
        quick=given.quick,
        emulated=given.emulated,
        checkout=given.checkout,
        seconds=given.seconds,
        total=given.total,
        only=tuple(given.only),
        again=given.again,
        name=given.name,
        out=given.out,
        resume=given.resume,
        host_budget=given.host_budget,
    )
    # What is being done is given up, and what was found is written: a machine that is taken back may say so first.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return suite.run(options, dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
