"""What `import remap` takes over a bare interpreter, in processor time."""

from __future__ import annotations

import resource
import subprocess
import sys

from measure import median, record

PROMISED_MS = 150.0
RUNS = 7


def _start_s(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_remap(benchmark) -> None:
    _start_s("import remap")  # writes the byte code, which an installed package has
    times = []

    def once() -> None:
        times.append([_start_s(code) for code in ("pass", "import remap")])

    benchmark.pedantic(once, rounds=RUNS, warmup_rounds=0)
    each = [ours - bare for bare, ours in times]
    record(benchmark, "import remap", 1e3 * median(each), "ms", each, target=PROMISED_MS)
