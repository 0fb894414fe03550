"""`import remap` is cheap: at most 150 ms of processor time over a bare interpreter, on a machine that imports some modules of
Python's own in 85 ms. Beside busy neighbours both take longer, so both are timed, in turns."""

from __future__ import annotations

import resource
import subprocess
import sys

BUDGET_S, OWN_S = 0.150, 0.085
RUNS = 7
OWN = "import asyncio, email.message, http.client, unittest.mock, xml.dom.minidom, multiprocessing.pool, tarfile, pydoc"


def _start_s(code: str) -> float:
    """Processor time: it does not know what else the machine does, but for caches that are shared."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_remap_stays_within_its_budget() -> None:
    # The one timed assertion of the suite: the budget is a promise to users, and loading torch by mistake costs ten times it.
    _start_s("import remap")  # writes the byte code, which an installed package has
    times = [[_start_s(code) for code in ("pass", OWN, "import remap")] for _ in range(RUNS)]
    bare, own, ours = (min(column) for column in zip(*times))
    assert ours - bare <= BUDGET_S * max(1.0, (own - bare) / OWN_S)
