"""`import remap` is cheap: at most 150 ms of processor time over a bare interpreter (least of five processes each)."""

from __future__ import annotations

import resource
import subprocess
import sys

BUDGET_S = 0.150
RUNS = 5


def _least_start_s(code: str) -> float:
    """Processor time, and the least of it: neither knows what else the machine does."""
    times = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_import_remap_stays_within_its_budget() -> None:
    # The one timed assertion of the suite: the budget is a promise to users, and loading torch by mistake costs ten times it.
    _least_start_s("import remap")  # writes the byte code, which an installed package has
    assert _least_start_s("import remap") - _least_start_s("pass") <= BUDGET_S
