"""Workers: processes that measure, one after the other, until every measure has run, failed or been left out.

What a worker has reported counts, however it ends. A measure in which it died, or which takes far too long, is an error; the
next worker goes on behind it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import steps
from .results import Figure

__all__ = ["WORKER", "Measured", "Workers", "listing"]

WORKER = (sys.executable, "-m", "bench.gpu.worker")
GRACE = 3.0  # times its estimate, and then some: after that a measure hangs
GRACE_S = 15.0
LAST_S = 10.0  # after the end of the time for measures, for the one that runs then
LOG_TAIL = 400


@dataclass
class Measured:
    """What the workers reported. Pairs are (measure, what)."""

    figures: list[tuple[str, Figure]] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    tracebacks: dict[str, str] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def listing(environment: Mapping[str, str], log: Path) -> list[dict[str, Any]]:
    """Every measure with what it needs and about how long it takes, from a process of its own: this one imports no `remap`,
    which may not have been built when it begins. Raises RuntimeError with that process's last line."""
    status, _ = steps.run_limited([*WORKER, "--list"], seconds=60, environment=environment, log=log)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
    if status != 0:
        raise RuntimeError(f"the measures could not be listed: {lines[-1]}")
    found: list[dict[str, Any]] = json.loads(lines[-1])
    return found


class Workers:
    """Runs measures in `folder` (report and log). flags: the worker's own, --quick and --emulated."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], flags: Sequence[str], command: Sequence[str] = WORKER
    ) -> None:
        self.measured = Measured()
        self._log = folder / "worker.log"
        self._report = folder / "measured.jsonl"
        self._report.unlink(missing_ok=True)
        self._report.touch()
        self._position = 0  # how far the report was read
        self._environment = dict(environment)
        self._command = [*command, *flags]
        self._until = float("inf")
        self._over: set[str] = set()
        self._running: tuple[str, float] | None = None  # (measure, when it must be over)

    def run(self, names: Sequence[str], until: float) -> None:
        """Each of these measures, or why not. until: on time.monotonic."""
        left, self._until = list(names), until
        while left:
            if time.monotonic() >= until:
                self.measured.skipped += [(name, "time: none was left") for name in left]
                return
            self._over.clear()
            status = self._one(left)
            if not self._over:  # not even the first line came: another one would do no better
                self.measured.errors.append(("worker", f"status {status} before it measured anything: {self._tail()}"))
                return
            left = [name for name in left if name not in self._over]

    def _one(self, names: Sequence[str]) -> int | None:
        """One worker, from its first measure to its end. Returns its exit status; None if it was stopped."""
        command = [*self._command, "--report", str(self._report), "--until", str(self._until), *names]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=steps.ROOT,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while True:
                    status = process.poll()  # before reading: what it wrote last is read below
                    self._read()
                    if status is not None:
                        self._died(status)
                        return status
                    if self._running is not None and time.monotonic() > self._running[1]:
                        self._fail("it took far longer than it should and was stopped")
                        return None
                    time.sleep(0.05)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _died(self, status: int) -> None:
        if self._running is not None:
            self._fail(f"the process ended with status {status}: {self._tail()}")

    def _fail(self, why: str) -> None:
        assert self._running is not None
        self.measured.errors.append((self._running[0], why))
        self._over.add(self._running[0])
        self._running = None

    def _tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]

    def _read(self) -> None:
        """Take the complete lines that were added to the report."""
        with self._report.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        name, kind = entry["measure"], entry["kind"]
        if kind == "begin":
            late = entry["at"] + GRACE * entry["seconds"] + GRACE_S
            self._running = (name, min(late, self._until + LAST_S))
        elif kind == "figure":
            self.measured.figures.append((name, Figure(**entry["figure"])))
        elif kind == "skip":
            self.measured.skipped.append((name, entry["reason"]))
            self._over.add(name)
        elif kind == "error":
            self._fail(entry["error"])
            self.measured.tracebacks[name] = entry["traceback"]
        else:
            self.measured.seconds[name] = entry["seconds"]
            self._over.add(name)
            self._running = None
