"""Runs in processes of their own, so that memory, threads and caches of one cannot affect the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from remap.errors import InvalidState
from remap_serve.cli.demo import environment
from remap_serve.cli.demo_config import DemoConfig

from . import ROOT

__all__ = ["run_apart"]


def run_apart(kind: str, module: str, *arguments: str, threads: int) -> Any:
    """`python -m MODULE ARGUMENTS RESULT`, in the demo's environment: the JSON that it wrote to the path RESULT.

    kind: what the run is called. Raises InvalidState (fields kind, status) with the end of what it said if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="remap-lab-") as folder:
        result = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments, str(result)],
            cwd=ROOT,
            env={**os.environ, **environment(DemoConfig(threads=threads))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            tail = "\n".join(done.stderr.strip().splitlines()[-25:])
            raise InvalidState(
                f"the real {kind} run ended with exit status {done.returncode}; nothing was written. It said:\n{tail}",
                kind=kind,
                status=done.returncode,
            )
        return json.loads(result.read_text(encoding="utf-8"))
