"""The commands of `python -m bench.lab` end as those of `remap` do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.lab import ROOT, headline
from bench.lab.commands import app
from bench.lab.vllm import compare
from typer.testing import CliRunner

from remap.errors import InvalidState
from remap.extras import install

LONGER = "1" * 6000  # Python refuses to read or print an int of so many digits


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


def test_the_commands_that_there_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.lab", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "python -m bench.lab [OPTIONS] COMMAND" in said and "2 nothing was done" in said
    for command in (
        "machine",
        "paper",
        "four-papers",
        "headline",
        "gap",
        "pie",
        "hybridserve",
        "real",
        "offline",
        "broker",
        "twin",
        "vllm",
        "ablations",
    ):
        assert run(command, "--help").exit_code == 0, command


@pytest.mark.parametrize(
    "arguments",
    [
        *(("ablations", "--only", "nobody"), ("paper", "--only", "nobody"), ("nonsense",), ("twin", "--nonsense")),
        *(("machine", "--device", "tpu", "--out", "x.json"), ("machine", "--out", "/dev/null/x.json")),
        ("vllm", "--kv", f"{LONGER}GiB", "--model", "x"),
        ("headline", "--report-only", "--results", "/dev/null/x.json"),
    ],
)
def test_what_cannot_be_is_refused_with_2_and_without_a_traceback(arguments: tuple[str, ...]) -> None:
    found = run(*arguments)
    assert found.exit_code == 2 and len(found.output) < 2000, found.output
    assert isinstance(found.exception, SystemExit) and "Traceback" not in found.output


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "not JSON"], ids=["deep", "empty", "text"])
@pytest.mark.parametrize("command", ["paper", "headline"])
def test_a_file_that_is_no_result_is_refused(command: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    found = run(command, "--report-only", "--results", str(path))
    assert found.exit_code == 2 and isinstance(found.exception, SystemExit), found.output
    assert "is not a result of" in found.output.replace("\n", " ")
    assert [one.name for one in tmp_path.iterdir()] == ["other.json"]


def test_the_prototypes_of_a_broker_run_and_a_killed_holder_leaves_the_old_ledger(tmp_path: Path) -> None:
    path = tmp_path / "broker.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.lab", "broker", "--quick", "--results", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "| a donor's pages | a busy process | shared ledger |" in done.stdout
    found = json.loads(path.read_text())["kills"]
    assert found["holder_killed_old_ledger"] == found["broker_killed_told"] == found["n"]
    assert found["holder_stopped_keeps_all_out"] and found["broker_stopped_keeps_waiting"]
    assert found["process_ends_behind_its_socket"] == found["n"]


def test_a_load_under_which_no_request_comes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "need_vllm", lambda: None)
    monkeypatch.setattr(compare, "_calibrate", lambda bench: 0.01)
    with pytest.raises(InvalidState, match="none comes within 5 s") as refused:
        compare.measure(compare.VllmBench(model="x", seconds=5.0, loads=("edge",)), print)
    assert refused.value.load == "edge"


def test_without_vllm_its_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    found = run("vllm", "--model", "x")
    assert found.exit_code == 2 and install("vllm") in found.output.replace("\n", " ")


def test_the_page_of_the_headline_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "headline.json"
    path.write_bytes(headline.RESULTS.read_bytes())
    found = run("headline", "--report-only", "--results", str(path))
    assert found.exit_code == 0, found.output
    page = headline.RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    assert path.with_suffix(".md").read_text(encoding="utf-8") == page
    assert found.output == f"{page}\n"
