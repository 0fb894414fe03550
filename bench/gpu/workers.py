"""Workers: processes that measure, one after the other, until every measure has run, failed or been left out.

What a worker has reported counts, however it ends. A measure in which it died, or which takes far too long, is an error; the
next worker goes on behind it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .processes import run_limited, start, stop
from .record import Record
from .results import Figure

__all__ = ["WORKER", "Workers", "listing"]

WORKER = (sys.executable, "-m", "bench.gpu.worker")
GRACE = 3.0  # times its estimate, and then some: after that a measure hangs
GRACE_S = 15.0
LAST_S = 10.0  # after the end of the time for measures, for the one that runs then
LOG_TAIL = 400


def listing(environment: Mapping[str, str], log: Path) -> list[dict[str, Any]]:
    """Every measure with what it needs and about how long it takes, from a process of its own: this one imports no `remap`,
    which may not have been built when it begins. Raises RuntimeError with that process's last line."""
    status, _ = run_limited([*WORKER, "--list"], seconds=60, environment=environment, log=log)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
    if status != 0:
        raise RuntimeError(f"the measures could not be listed: {lines[-1]}")
    found: list[dict[str, Any]] = json.loads(lines[-1])
    return found


class Workers:
    """Runs measures of one call into `record`; report and log go to its logs. flags: the worker's own, --quick and --emulated.

    ended: called with a measure's name whenever one has ended in whatever way.
    """

    def __init__(
        self,
        record: Record,
        call: str,
        origin: Mapping[str, Any],
        environment: Mapping[str, str],
        flags: Sequence[str],
        command: Sequence[str] = WORKER,
        ended: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._record, self._call, self._origin, self._ended = record, call, origin, ended
        self._log = record.logs / f"{call}-worker.log"
        self._report = record.logs / f"{call}.jsonl"
        record.logs.mkdir(parents=True, exist_ok=True)
        self._position = 0  # how far the report was read: what an earlier run has left is over
        self._log_begins = 0
        self._environment = dict(environment)
        self._command = [*command, *flags]
        self._until = float("inf")
        self._over: set[str] = set()
        self._running: tuple[str, float, float] | None = None  # (measure, since when, when it must be over)

    def run(self, names: Sequence[str], until: float) -> None:
        """Each of these measures, or why not. until: on time.monotonic."""
        left, self._until = list(names), until
        while left:
            if time.monotonic() >= until:
                for name in left:
                    self._skip(name, "time: none was left")
                return
            self._over.clear()
            status = self._one(left)
            if not self._over:  # not even the first line came: another one would do no better
                self._record.problem(
                    "worker", self._call, f"status {status} before it measured anything: {self._tail()}"
                )
                return
            left = [name for name in left if name not in self._over]

    def _one(self, names: Sequence[str]) -> int | None:
        """One worker, from its first measure to its end. Returns its exit status; None if it was stopped."""
        command = [*self._command, "--report", str(self._report), "--until", str(self._until), *names]
        self._log_begins = self._log.stat().st_size if self._log.exists() else 0
        self._new_line()
        process = start(command, self._environment, self._log)
        try:
            while True:
                status = process.poll()  # before reading: what it wrote last is read below
                self._read()
                if status is not None:
                    self._died(status)
                    return status
                if self._running is not None and time.monotonic() > self._running[2]:
                    self._fail("it took far longer than it should and was stopped", None)
                    return None
                time.sleep(0.05)
        finally:
            stop(process)

    def _died(self, status: int) -> None:
        if self._running is not None:
            self._fail(f"the process ended with status {status}: {self._tail()}", None)

    def _fail(self, why: str, traceback: str | None) -> None:
        assert self._running is not None
        name, since, _ = self._running
        self._record.end(name, "failed", time.monotonic() - since, why, traceback=traceback)
        self._running = None
        self._done(name)

    def _skip(self, name: str, why: str) -> None:
        self._record.skip(name, self._call, "measure", why)
        self._running = None
        self._done(name)

    def _done(self, name: str) -> None:
        self._over.add(name)
        self._ended(name)

    def _tail(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._log_begins)
            return file.read().decode("utf-8", errors="replace")[-LOG_TAIL:]

    def _new_line(self) -> None:
        """A process that was killed may have left half a line: the next one begins behind it."""
        with self._report.open("ab") as file:
            if file.tell() > 0:
                file.write(b"\n")
            self._position = file.tell()

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
            self._running = (name, time.monotonic(), min(late, self._until + LAST_S))
            self._record.begin(name, self._call, "measure", self._origin)
        elif kind == "figure":
            self._record.add(name, Figure(**entry["figure"]))
        elif kind == "skip":
            self._skip(name, entry["reason"])
        elif kind == "error":
            self._fail(entry["error"], entry["traceback"])
        else:
            rest = f"in part: {entry['rest']}" if entry["rest"] else ""
            self._record.end(name, "ok", entry["seconds"], rest)
            self._running = None
            self._done(name)
