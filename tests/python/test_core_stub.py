"""The type checker knows the C++ core as it is: `_core.pyi` is what pybind11 says of every name."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import lock  # noqa: E402

MADE_BY = ("pybind11", "pybind11-stubgen", "ruff")
PINS = lock.locked()


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


pytestmark = pytest.mark.skipif(
    {name: installed(name) for name in MADE_BY} != {name: PINS[name] for name in MADE_BY},
    reason=f"the text depends on the versions of {', '.join(MADE_BY)}, which are not the locked ones here",
)


def test_the_stub_is_the_cores() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "stubs.py", "check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_name_of_it_is_anything() -> None:
    """`def __getattr__(name) -> Any`, as a stub by hand has, would hide every mistake."""
    text = (ROOT / "src" / "remap" / "_core.pyi").read_text(encoding="utf-8")
    assert "__getattr__" not in text and "class Executor" in text
