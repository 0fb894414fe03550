"""What `import remap` takes over a bare interpreter, in processor time."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from measure import median, record

PROMISED_MS = 150.0
RUNS = 7


def _start_s(code: str, cache: Path) -> float:
    """With byte code, as an installed package has it, also where the environment forbids to write it."""
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache), "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_remap(benchmark, tmp_path) -> None:
    _start_s("import remap", tmp_path)  # writes it
    times = []

    def once() -> None:
        times.append([_start_s(code, tmp_path) for code in ("pass", "import remap")])

    benchmark.pedantic(once, rounds=RUNS, warmup_rounds=0)
    each = [ours - bare for bare, ours in times]
    record(benchmark, "import remap", 1e3 * median(each), "ms", each, target=PROMISED_MS)
