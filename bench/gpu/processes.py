"""Processes of the suite: each leads a group of its own, and none outlives the suite, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ROOT", "run_limited", "start", "stop"]

ROOT = Path(__file__).resolve().parents[2]
KEEPER = Path(__file__).resolve().parent / "keeper.py"


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """The command in the root of the checkout; output is added to `log`. End it with `stop`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-S", "-E", str(KEEPER), *command],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,  # ours to hold: see keeper.py
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill it and what it started, if it is still there, and let go of it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def run_limited(
    command: Sequence[str], *, seconds: float, environment: Mapping[str, str], log: Path
) -> tuple[int | None, float]:
    """(exit status, seconds taken); None if it had to be stopped after `seconds`. `log` holds this command's output alone."""
    log.unlink(missing_ok=True)
    begun = time.monotonic()
    process = start(command, environment, log)
    try:
        status: int | None = process.wait(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        status = None
    finally:
        stop(process)
    return status, time.monotonic() - begun
