"""requirements.lock: it has what pyproject.toml asks for, for every Python, with hashes and without naming a host."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import extras  # noqa: E402
import lock  # noqa: E402

requirements = pytest.importorskip("packaging.requirements")


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_the_lock_has_what_the_extras_ask_for(python: str) -> None:
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    pins = lock.locked(environment=here)
    for text in extras.requirements(ROOT / "pyproject.toml", lock.EXTRAS):
        one = requirements.Requirement(text)
        if one.name not in lock.BESIDE:
            assert one.specifier.contains(pins[one.name]), text


def test_every_package_of_the_lock_has_a_hash_and_no_index_is_named() -> None:
    entries = re.split(r"^(?=[A-Za-z0-9])", lock.LOCK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert entries and [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    for path in (lock.LOCK, lock.ENGINES):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"://|^--(extra-)?index|^--find-links", text, re.MULTILINE), path


def test_the_makefile_installs_the_extras_that_the_lock_is_made_of() -> None:
    (line,) = re.findall(r"^LOCKED_EXTRAS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert line.split() == lock.EXTRAS


def test_no_pin_of_triton_holds_torch_back_in_the_newest_environment() -> None:
    """A torch for CUDA asks for one triton exactly: beside a pin of another, pip takes an older torch."""
    (rule,) = re.findall(
        r"^\$\(NEWEST\)/stamps/venv:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert "$(LOCKED_EXTRAS)" in rule and "$(TRITON)" not in rule
    assert any(one.startswith("triton") for one in extras.requirements(ROOT / "pyproject.toml", lock.EXTRAS))


def test_what_differs_is_told_from_what_is_as_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = lock.locked()
    monkeypatch.setattr(lock, "installed", lambda: {**pins, "numpy": "1.0"} | {"more": "1"})
    assert lock.differences() == {"numpy": (pins["numpy"], "1.0")}
    monkeypatch.setattr(lock, "installed", lambda: {name: pin for name, pin in pins.items() if name != "pytest"})
    assert lock.differences() == {"pytest": (pins["pytest"], None)}
