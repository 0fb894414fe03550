"""The site of `make docs` and docs/tune.md: complete, and its links are those of the pages. MkDocs itself is not needed here."""

from __future__ import annotations

import configparser
import dataclasses
import pkgutil
import re
import shlex
from pathlib import Path
from typing import Any

import documented
import pytest
import yaml
from subprocesses import ROOT, load_tool

import remap
from remap.memory.device import Platform

site = load_tool("docs_site")
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for one in (entry.values() if isinstance(entry, dict) else entry) for page in pages(one)]


def test_every_page_is_in_the_navigation_once() -> None:
    there = [*site.ELSEWHERE, *site.PAGES]
    assert sorted(pages(SETTINGS["nav"])) == sorted(there)
    assert SETTINGS["strict"] is True and set(SETTINGS["validation"]["links"].values()) == {"warn"}
    assert all((ROOT / hook).is_file() for hook in SETTINGS["hooks"])
    (built,) = re.findall(r"^\t.*mkdocs build(.*)$", documented.MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert built.split() == ["--strict"]  # with --quiet MkDocs counts no warning, and strict means nothing


def test_links_lead_to_pages_of_the_site_or_to_the_repository(tmp_path: Path) -> None:
    text = "[a](docs/adopt.md#before-you-ship) [`b`](cpp/core/arena.cpp) [c](https://x) ![d](docs/pictures/map.svg)\n"
    text += "```python\nx[i](docs/adopt.md)\n```\n[e](#install)"
    home = site.rewritten(text, "README.md", "https://host/remap/")
    assert "[a](adopt.md#before-you-ship) [`b`](https://host/remap/blob/main/cpp/core/arena.cpp) [c](https://x)" in home
    assert "![d](pictures/map.svg)" in home
    assert site.rewritten("![d](pictures/map.svg)", "docs/results.md") == "![d](pictures/map.svg)"
    assert "x[i](docs/adopt.md)" in home and "[e](#install)" in home
    assert "[a](adopt.md#before-you-ship) `b` [c](https://x)" in site.rewritten(text, "README.md")
    assert (
        site.rewritten("[a](../README.md#install), [b](tenants.md)", "docs/vllm.md")
        == "[a](index.md#install), [b](tenants.md)"
    )
    with pytest.raises(ValueError, match="nowhere"):
        site.rewritten("[a](nowhere.md)", "docs/vllm.md")
    assert site.rewritten("[a](../vllm.md), ![d](../pictures/map.svg)", "docs/notes/vllm.md", "x") == (
        "[a](../vllm.md), ![d](../pictures/map.svg)"
    )
    pages = {**site.ELSEWHERE, **{name: f"docs/{name}" for name in site.PAGES}}
    for name, file in pages.items():
        text = re.sub(r"```.*?```", "", site.rewritten((ROOT / file).read_text(encoding="utf-8"), file), flags=re.S)
        for target in re.findall(r"\]\(((?:\.\./)[^)#]+)", text):  # out of a folder of the site, never out of the site
            there = target.removeprefix("../")
            picture = there.startswith("pictures/") and (ROOT / "docs" / there).is_file()
            assert name.startswith("notes/") and (there in pages or picture), (name, target)


def test_the_reference_names_what_is_there() -> None:
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    for name in named:
        pkgutil.resolve_name(name)  # ImportError or AttributeError names what is not there
    public = {
        f"remap.{name}"
        for name in ("Session", "Tenant", "KVSpec", "Config", "Demand", "StepReport", "Snapshot", "attach")
    }
    assert public | {"remap.errors", "remap.advanced", "remap.schedule", "remap.conformance"} <= set(named)


def test_the_page_of_settings_is_what_the_sources_say() -> None:
    tune = load_tool("tune_page")
    text = (ROOT / "docs/tune.md").read_text(encoding="utf-8")
    assert tune.page() == text, "python tools/tune_page.py"
    settings = {field.name for kind in (remap.advanced.Knobs, Platform) for field in dataclasses.fields(kind)}
    assert settings <= set(re.findall(r"^\| `(\w+)` \| `[^`]+` \| \w", text, re.MULTILINE))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r'"(REMAP_[A-Z0-9_]+)"', sources)) - tune.INTERNAL
    assert read == set(re.findall(r"^\| `(REMAP_\w+)` \| \w", text, re.MULTILINE))


def test_a_setting_that_nobody_describes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = load_tool("tune_page")

    @dataclasses.dataclass
    class Settings:
        """a: this one."""

        a: int = 1
        b: int = 2

    with pytest.raises(SystemExit, match="does not describe b"):
        tune.fields(Settings)
    monkeypatch.delitem(tune.ELSEWHERE, "REMAP_MODE")
    with pytest.raises(SystemExit, match=r"read and not described: \['REMAP_MODE'\]"):
        tune.variables()


def test_units_of_the_deployment_page_start_what_there_is() -> None:
    typer = pytest.importorskip("typer", reason="the command line needs typer")
    from remap.cli.main import app

    started = 0
    for block in documented.blocks(ROOT / "docs/deploy.md"):
        for unit in re.split(r"(?=^# an engine's)", block.text, flags=re.MULTILINE):
            if block.kind == "yaml":
                (words,) = (shlex.split(each.replace(",", " ")) for each in re.findall(r"command: \[(remap.*)\]", unit))
            else:
                read = configparser.ConfigParser(interpolation=None)
                read.optionxform = str  # type: ignore[assignment,method-assign]
                read.read_string(unit)
                words = shlex.split(read["Service"]["ExecStart"])
            if words[0] in ("/opt/remap/bin/remap", "remap"):
                started += 1
                command, rest = typer.main.get_command(app), words[1:]
                while rest[0] in getattr(command, "commands", {}):
                    command = command.commands[rest.pop(0)]
                command.make_context("remap", rest)  # UsageError for an option that it does not have
    assert started == 3
