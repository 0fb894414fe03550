"""The GPU suite's own machinery, without any driver: whatever a measure does, the others run and the table comes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bench.gpu import results, suite, table
from bench.gpu.budget import Budget
from bench.gpu.workers import Workers

WORKER = """
import json, os, sys, time
arguments = sys.argv[1:]
report = open(arguments[arguments.index("--report") + 1], "a", buffering=1)
figure = dict(name="f", value=1.0, unit="x", n=1, median_us=None, p99_us=None)
for name in arguments[arguments.index("--until") + 2:]:
    def say(kind, **more):
        report.write(json.dumps({"kind": kind, "measure": name, **more}) + "\\n")
    if name == "unable":
        say("skip", reason="nothing to do it with")
        continue
    say("begin", at=time.monotonic(), seconds=-1000.0 if name == "hangs" else 10.0)
    say("figure", figure=figure)
    if name == "raises":
        say("error", error="ValueError: no", traceback="...")
        sys.exit(3)
    if name == "dies":
        os.abort()
    if name == "hangs":
        time.sleep(600)
    say("end", seconds=0.0)
"""


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    """Workers that obey the script above."""
    return Workers(tmp_path, {}, [], command=[sys.executable, "-c", WORKER])


def test_the_others_run_after_a_measure_that_raises_dies_or_hangs(workers: Workers) -> None:
    names = ["good", "raises", "dies", "unable", "hangs", "last"]
    workers.run(names, time.monotonic() + 60)
    measured = workers.measured
    assert list(measured.seconds) == ["good", "last"]
    assert [name for name, _ in measured.figures] == ["good", "raises", "dies", "hangs", "last"]
    assert [name for name, _ in measured.errors] == ["raises", "dies", "hangs"]
    assert measured.skipped == [("unable", "nothing to do it with")]
    assert measured.tracebacks == {"raises": "..."}


def test_a_worker_that_cannot_start_is_tried_once(tmp_path: Path) -> None:
    workers = Workers(tmp_path, {}, [], command=[sys.executable, "-c", "import sys; sys.exit('no such module')"])
    workers.run(["a", "b"], time.monotonic() + 60)
    assert [what for what, _ in workers.measured.errors] == ["worker"]
    assert "no such module" in workers.measured.errors[0][1]


def test_when_time_is_over_the_rest_is_named(workers: Workers) -> None:
    workers.run(["good", "last"], time.monotonic() - 1)
    assert [name for name, _ in workers.measured.skipped] == ["good", "last"]


def test_a_budget_leaves_out_what_no_longer_fits_and_says_so() -> None:
    now = 0.0
    budget = Budget(100, clock=lambda: now)
    assert budget.allows("first", 60)
    now = 50.0
    assert not budget.allows("second", 60)
    assert budget.allows("third", 20, keep=30)
    assert not budget.allows("fourth", 21, keep=30)
    assert [what for what, _ in budget.skipped] == ["second", "fourth"]
    assert "60 s" in budget.skipped[0][1]
    assert "50 s" in budget.skipped[0][1]


def _report(**more: Any) -> table.Report:
    given: dict[str, Any] = {
        "title": "a GPU",
        "emulated": False,
        "steps": [],
        "figures": [],
        "errors": [],
        "skipped": [],
        "seconds": 1.0,
        "written": "wrote x",
    }
    return table.Report(**{**given, **more})


def _figures(number: int, **more: Any) -> list[results.Figure]:
    return [results.figure(f"figure {index}", 1234.5, "us", [0.001234], **more) for index in range(number)]


def test_the_table_never_takes_more_than_sixty_lines() -> None:
    steps = [table.Step(f"step {index}", True, 1.0, "fine " * 100, {}) for index in range(5)]
    errors = [(f"measure {index}", "what went wrong\n" * 30) for index in range(20)]
    skipped = [(f"other {index}", f"reason {index}") for index in range(30)]
    figures = [*_figures(100), *_figures(7, target=1.0)]
    text = table.render(_report(steps=steps, errors=errors, skipped=skipped, figures=figures))
    lines = text.splitlines()
    assert len(lines) <= table.MOST_LINES
    assert max(map(len, lines)) <= 150
    assert sum("<= 1 us" in line and " NO " in line for line in lines) == 7
    assert "0 of 7 targets met, 20 failures, 30 skipped" in lines[-1]


def test_a_short_run_shows_every_figure() -> None:
    text = table.render(_report(figures=_figures(5)))
    assert text.count("1234 us") + text.count("1235 us") == 5
    assert "more figures" not in text


def test_the_emulated_driver_has_no_speeds() -> None:
    """Neither in the table nor, as values, in the JSON; counts stay."""
    speed = results.figure("a speed", 777.5, "GB/s", [0.000777], target=1.0, at_least=True, GBps=777.5)
    calls = results.count("calls", 3, "calls", n=5, target=0)
    text = table.render(_report(emulated=True, figures=[speed, calls]))
    assert "777" not in text
    assert "no GPU was involved" in text
    assert "0 of 1 targets met" in text
    entry = suite._entry(True, "measure", speed)
    assert (entry["value"], entry["median_us"], entry["met"], entry["detail"]) == (None, None, None, {})
    assert entry["of_the_emulated_driver"]["value"] == 777.5
    assert suite._entry(True, "measure", calls)["value"] == 3
    assert suite._entry(False, "measure", speed)["value"] == 777.5


def test_a_run_that_measured_nothing_leaves_no_file_among_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite.steps, "ROOT", tmp_path)
    options = suite.Options(quick=True, emulated=False, checkout=False, seconds=30)
    environment = {**os.environ, "REMAP_LIBCUDA": str(tmp_path / "none.so"), "PYTHONPATH": os.pathsep.join(sys.path)}
    assert suite.run(options, environment) == 2
    assert [path.parent.name for path in tmp_path.rglob("gpu-*.json")] == ["gpu"]
    assert not (tmp_path / "bench").exists()


def test_without_a_driver_there_is_a_table_and_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = suite.Options(quick=True, emulated=True, checkout=False, seconds=30, out=tmp_path)
    environment = {**os.environ, "REMAP_EMULATED_DRIVER": str(tmp_path / "none.so")}
    assert suite.run(options, environment) == 2
    assert "ERROR    driver: no CUDA driver could be used" in capsys.readouterr().out
    document = json.loads((tmp_path / "emulated.json").read_text())
    assert document["emulated"] is True
    assert document["results"] == []
    assert [entry["what"] for entry in document["errors"]] == ["driver"]
    assert "none.so" in document["errors"][0]["error"]
