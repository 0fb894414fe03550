"""Runs a program of its own: for what may hang, crash or change the whole process. It fails by timeout, never hangs the suite.

And loads the repository's own programs, which are in no package.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def load_tool(name: str) -> ModuleType:
    """tools/NAME.py as a module. It may import its neighbours."""
    if str(ROOT / "tools") not in sys.path:
        sys.path.append(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while the class is made
    spec.loader.exec_module(module)
    return module


def run(program: str, *, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """`program` as text under this interpreter, with the tests' helpers importable. Raises TimeoutExpired."""
    paths = [str(HERE), str(HERE.parent), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    # From Python 3.12 on a fork beside threads prints a warning: programs that do so here mean to.
    quiet = ["-W", "ignore:This process:DeprecationWarning"]
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", *quiet, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )


def expect_ok(program: str, *, timeout_s: float = 60.0) -> None:
    """It ends with exit code 0 and prints nothing at all."""
    done = run(program, timeout_s=timeout_s)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), (done.returncode, done.stdout, done.stderr)
