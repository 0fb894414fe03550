"""The Triton kernels without a GPU: in the interpreter (triton_cases.py) and compiled for one (triton_builds.py).

Each in a process of its own, because importing the kernels decides which of the two they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("torch", "transformers", "triton"):
    pytest.importorskip(package)

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [("triton_cases.py", {"TRITON_INTERPRET": "1"}), ("triton_builds.py", {})])
def test_kernels(name, more, tmp_path):
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *(path for path in sys.path if path)])
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", str(HERE / name)],
        env={**inherited, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path), **more},
        cwd=HERE, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
