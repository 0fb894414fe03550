"""The workflows of .github and the hooks of pre-commit: what they run is there, as it is locked, and may do little.

They run on GitHub alone. Here their files are read: a target, a script or a version that has gone is seen before that.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from subprocesses import ROOT, load_tool

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
HOOKS = ROOT / ".pre-commit-config.yaml"
PYPROJECT = load_tool("extras").tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict), path
    return found


def steps(workflow: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def missing(script: str) -> list[str]:
    """Of a `run:`, the targets of make and the files of this repository that are not there. What is in build/ is made first."""
    found = []
    for line in script.splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Za-z_]\w*=", words[0]):
            words = words[1:]
        if words[:1] == ["make"]:
            wanted = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            found += [word for word in wanted if word not in TARGETS] if wanted else [line]
        for word in words:
            if re.fullmatch(r"(\./)?(\.ci|tools|bench|tests|src)/[\w./-]+", word) and not (ROOT / word).exists():
                found.append(word)
    return found


def pythons() -> set[str]:
    """The classifiers' versions: {"3.10", ...}."""
    listed = (
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one) for one in PYPROJECT["project"]["classifiers"]
    )
    return {found[1] for found in listed if found}


def test_what_is_missing_is_seen() -> None:
    assert missing("make lint JOBS=2\n.ci/run\npython tools/lock.py pins > build/constraints.txt") == []
    assert missing("make lnit") == ["lnit"]
    assert missing("make") == ["make"]  # its default target is help
    assert missing("A=1 python tools/none.py build/x.whl") == ["tools/none.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_a_workflow_runs_is_there(path: Path) -> None:
    scripts = [step["run"] for step in steps(read(path)) if "run" in step]
    assert scripts and [missing(script) for script in scripts if missing(script)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_workflow_may_read_the_sources_and_no_more(path: Path) -> None:
    """Who publishes proves who he is, on a tag and in an environment of its own; nothing is written to the repository."""
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    asked = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    assert asked == ({"publish": {"contents": "read", "id-token": "write"}} if path.name == "wheels.yml" else {})
    if publish := workflow["jobs"].get("publish"):
        assert "startsWith(github.ref, 'refs/tags/v')" in publish["if"] and publish["environment"] == "pypi"
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}
    assert "secrets." not in path.read_text(encoding="utf-8")
    assert not {"pull_request_target", "workflow_run"} & set(workflow[True])  # YAML reads `on` as true


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_workflow_ends_by_itself_and_its_actions_are_of_one_major_version(path: Path) -> None:
    workflow = read(path)
    assert set(workflow["concurrency"]) == {"group", "cancel-in-progress"}
    assert all(0 < job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())
    used = {step["uses"] for step in steps(workflow) if "uses" in step}
    assert used and [one for one in used if not re.fullmatch(r"[\w./-]+@(release/)?v\d+", one)] == []


def test_a_merge_passes_what_passes_here() -> None:
    workflow = read(ROOT / ".github/workflows/ci.yml")
    assert "pull_request" in workflow[True] and "push" in workflow[True]
    assert [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step] == [".ci/run"]
    (kept,) = (step for step in workflow["jobs"]["test"]["steps"] if step.get("if") == "failure()")
    assert kept["with"]["path"] in (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert not set(workflow["jobs"]["lint"]["steps"][-1]) - {"run"} and "make lint" in str(workflow["jobs"]["lint"])


def not_run() -> set[str]:
    """Versions of Python that docs/notes/versions.md says were not run: wheels are built, and nothing is claimed."""
    text = (ROOT / "docs/notes/versions.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| \| (3\.\d+) \| \*\*not run\*\*", text, re.MULTILINE))


def test_what_the_classifiers_claim_was_run() -> None:
    text = (ROOT / "docs/notes/versions.md").read_text(encoding="utf-8")
    ran = set(re.findall(r"\b(3\.\d+)\.\d+\b", text[text.index("| Python |") : text.index("| torch |")]))
    assert pythons() <= ran and not pythons() & not_run()


def test_wheels_are_built_for_the_pythons_of_the_classifiers() -> None:
    settings = PYPROJECT["tool"]["cibuildwheel"]
    tags = [re.fullmatch(r"cp3(\d+)-manylinux_\*", one) for one in settings["build"]]  # so none for musl
    assert all(tags) and {f"3.{tag[1]}" for tag in tags if tag} == pythons() | not_run()
    assert {settings["manylinux-x86_64-image"], settings["manylinux-aarch64-image"]} == {"manylinux_2_28"}
    assert missing(settings["test-command"].replace("{project}/", "")) == []
    found = read(ROOT / ".github/workflows/wheels.yml")["jobs"]["wheels"]
    assert {each["arch"] for each in found["strategy"]["matrix"]["include"]} == {"x86_64", "aarch64"}
    one = re.search(r"\*-cp3(\d+)-\*\.whl", str(found["steps"]))
    (used,) = (step["with"]["python-version"] for step in found["steps"] if "python-version" in step.get("with", {}))
    assert one is not None and used == f"3.{one[1]}"  # the checked wheel fits the interpreter that checks it


def test_the_classifiers_are_the_pythons_that_the_lock_is_resolved_for() -> None:
    lock = load_tool("lock")
    tested = set(re.findall(r'"(3\.\d+)"', (ROOT / "tests/python/test_lock.py").read_text(encoding="utf-8")))
    assert pythons() | not_run() == tested
    assert (
        PYPROJECT["project"]["requires-python"]
        == f">={min(pythons(), key=lambda one: int(one[2:]))}"
        == f">={lock.OLDEST_PYTHON}"
    )
    for path in FILES:
        used = {
            step["with"]["python-version"] for step in steps(read(path)) if "python-version" in step.get("with", {})
        }
        assert used <= pythons(), path


def test_the_hooks_are_what_make_lint_runs_in_the_locked_version() -> None:
    hooks = {hook["id"]: (repo, hook) for repo in read(HOOKS)["repos"] for hook in repo["hooks"]}
    assert set(hooks) == {"ruff-check", "ruff-format", "check-added-large-files", "import-rules"}
    (pin,) = re.findall(r"^ruff==(\S+)", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    assert hooks["ruff-check"][0]["rev"] == hooks["ruff-format"][0]["rev"] == f"v{pin}"
    assert missing(hooks["import-rules"][1]["entry"]) == []
    recipe = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert [line.partition(" ")[2] for line in recipe.splitlines()] == [
        "check .",
        "format --check .",
        hooks["import-rules"][1]["entry"].partition(" ")[2],
    ]


def test_no_file_is_larger_than_the_hook_lets_in() -> None:
    (limit,) = re.findall(r"--maxkb=(\d+)", HOOKS.read_text(encoding="utf-8"))
    folders = ("bench", "cpp", "docs", "examples", "include", "python", "src", "tests", "tools")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix not in (".so", ".pyc"))
    assert [str(path) for path in files if path.is_file() and path.stat().st_size > int(limit) * 1024] == []
