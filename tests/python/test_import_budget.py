"""`import remap` is cheap: at most 150 ms over a bare interpreter (median of five, each in a process of its own)."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

BUDGET_S = 0.150
RUNS = 5


def _median_start_s(code: str) -> float:
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def test_import_remap_stays_within_its_budget() -> None:
    # The one timed assertion of the suite: the budget is a promise to users, and it is an order of magnitude above
    # what the import costs, while loading torch by mistake costs ten times the budget.
    _median_start_s("import remap")  # writes the byte code, which an installed package has
    assert _median_start_s("import remap") - _median_start_s("pass") <= BUDGET_S
