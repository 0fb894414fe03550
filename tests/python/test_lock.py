"""requirements.lock has what the Makefile installs, within the bounds of pyproject.toml."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
pytest.importorskip("packaging", reason="packaging comes with pytest")

import extras
import lock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MAKEFILE = (lock.ROOT / "Makefile").read_text(encoding="utf-8")
TEXT = lock.LOCK.read_text(encoding="utf-8")


def variable(name: str) -> list[str]:
    found = re.search(rf"^{name} \??:?= (.+)$", MAKEFILE, re.MULTILINE)
    assert found, name
    return found[1].split()


def test_every_requirement_is_locked_within_its_bounds() -> None:
    wanted = extras.requirements(lock.ROOT / "pyproject.toml", variable("LOCKED_EXTRAS"))
    have = {canonicalize_name(name): version for name, version in lock.locked(TEXT)}
    torch, *pinned = [Requirement(one) for name in ("TORCH", "TRITON", "MODEL_PACKAGE") for one in variable(name)]
    for each in [*map(Requirement, wanted), *pinned]:
        if each.name != torch.name:
            assert each.specifier.contains(have[canonicalize_name(each.name)]), each
    assert torch.name not in have, "its builds for the CPU and for CUDA are other files under one version"


def test_each_line_has_hashes_and_stands_for_any_python() -> None:
    parts = re.split(r"^(?=\S)", TEXT, flags=re.MULTILINE)
    lines = [part for part in parts if part and not part.startswith("#")]
    assert len(lines) > 80
    assert all(lock.LINE.match(part.splitlines()[0]) and "--hash=sha256:" in part for part in lines)
    assert "://" not in TEXT, "no index is named"
    assert len({part.splitlines()[0] for part in lines}) == len(lines)


def test_markers_choose_the_line_for_this_interpreter() -> None:
    minor = sys.version_info[1]
    text = (
        f"a==1 ; python_full_version < '3.{minor}' \\\n    --hash=sha256:00\n"
        f"a==2 ; python_full_version >= '3.{minor}' \\\n    --hash=sha256:00\n"
        "b-c==3.0.post1 \\\n    --hash=sha256:00\n"
        "d==4 ; sys_platform == 'win32' \\\n    --hash=sha256:00\n"
    )
    assert list(lock.locked(text)) == [("a", "2"), ("b-c", "3.0.post1")]


def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "some.lock"
    path.write_text(f"pytest=={pytest.__version__} \\\n\npackaging==0.1 \\\n\nno-such-package==1 \\\n")
    monkeypatch.setattr(lock, "LOCK", path)
    found = lock.compare()
    assert [(name, version) for name, version, _ in found] == [("packaging", "0.1"), ("no-such-package", "1")]
    assert found[1][2] == "not installed"
