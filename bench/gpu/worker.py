"""The process that measures: runs the named measures in order and writes one JSON line for everything that happens.

A measure that fails ends the process (exit status FAILED) after it was written down: what it left on the device, or in a
context that a bad kernel has poisoned, must not reach the next one. The parent starts another process for the rest.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from typing import IO, Any

from .context import Context, Skip
from .registry import Measure, Wrong, all_measures, missing

__all__ = ["FAILED", "main"]

FAILED = 3


def main(arguments: list[str]) -> int:
    """--list, or --report FILE --until SECONDS (time.monotonic) [--quick] [--emulated] NAME..."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--report", default=os.devnull)
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    if given.list:
        keys = ("name", "call", "packages", "full_s", "quick_s", "emulated_s")
        print(json.dumps([{key: getattr(each, key) for key in keys} for each in all_measures()]))
        return 0
    known = {each.name: each for each in all_measures()}
    # Appended to and flushed line by line: whatever was written before a crash counts.
    with open(given.report, "a", encoding="utf-8", buffering=1) as report:
        context = Context(quick=given.quick, emulated=given.emulated)
        for name in given.names:
            if not _run(known[name], context, given.until, report, last=name == given.names[-1]):
                return FAILED
    return 0


def _run(measure: Measure, context: Context, until: float, report: IO[str], *, last: bool = False) -> bool:
    """Whether the process may go on with the next measure. last: nothing comes behind this one, which has all that is left."""

    def say(kind: str, **more: Any) -> None:
        report.write(json.dumps({"kind": kind, "measure": measure.name, **more}) + "\n")

    reasons = [missing(need, emulated=context.emulated) for need in measure.needs]
    reason = next((each for each in reasons if each is not None), None)
    least = measure.least(quick=context.quick, emulated=context.emulated)
    now = time.monotonic()
    if reason is None and now + least > until:
        reason = f"time: it takes {least:.0f} s at least, {max(0.0, until - now):.0f} s were left"
    if reason is not None:
        say("skip", reason=reason)
        return True
    left = max(least, until - now)
    takes = (
        left
        if last and until < float("inf")
        else min(measure.seconds(quick=context.quick, emulated=context.emulated), left)
    )
    context.until = now + takes
    say("begin", at=now, seconds=takes)
    figures, rest = 0, ""
    try:
        broken = context.driver.violations()
        for figure in measure.body(context):
            say("figure", figure=asdict(figure))
            figures += 1
        broken = context.driver.violations()[len(broken) :]
        if broken:
            raise Wrong(f"rules of the driver API were broken: {broken}")
    except Skip as skip:
        rest = str(skip)
        if not figures:
            say("skip", reason=rest)
            gc.collect()
            return True
    except Exception as error:  # noqa: BLE001 - a boundary: whatever a measure raises is its entry in the report
        say("error", error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        return False
    say("end", seconds=time.monotonic() - now, rest=rest)
    gc.collect()  # what a measure has left in cycles may hold device memory
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
