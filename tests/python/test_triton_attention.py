"""The Triton kernels without a GPU: in the interpreter (triton_cases.py) and compiled for one (triton_builds.py).

Each in a process of its own, because importing the kernels decides which of the two they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent


def run_file(name, folder, **environment):
    paths = [str(HERE), str(HERE.parent), *(path for path in sys.path if path)]
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    inherited |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", str(HERE / name)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=HERE, env=inherited | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_kernels_in_the_interpreter(tmp_path):
    output = run_file("triton_cases.py", tmp_path, TRITON_INTERPRET="1")
    assert "skipped" not in output


@pytest.mark.slow
def test_kernels_compiled(tmp_path):
    output = run_file("triton_builds.py", tmp_path)
    assert "skipped" not in output
