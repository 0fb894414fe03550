"""The GPU suite's own machinery, without any driver: whatever a measure does, the others run and the table comes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.gpu import results, suite, table
from bench.gpu.__main__ import main
from bench.gpu.context import Skip
from bench.gpu.record import Record
from bench.gpu.registry import Measure
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
        report.write("half a li")
        report.flush()
        os.abort()
    if name == "hangs":
        time.sleep(600)
    say("end", seconds=0.0, rest="the large one does not fit" if name == "half" else "")
"""


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """An empty one."""
    return Record(tmp_path, tmp_path / "logs", emulated=False)


def _workers(record: Record, script: str = WORKER) -> Workers:
    """Workers that obey the script."""
    return Workers(record, "measure", {}, {}, [], command=[sys.executable, "-c", script])


def _by_state(record: Record) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in record.parts.values():
        found.setdefault(part.state, []).append(part.name)
    return found


def test_the_others_run_after_a_measure_that_raises_dies_or_hangs(record: Record) -> None:
    names = ["good", "raises", "dies", "unable", "half", "hangs", "last"]
    _workers(record).run(names, time.monotonic() + 60)
    assert _by_state(record) == {
        "ok": ["good", "half", "last"],
        "failed": ["raises", "dies", "hangs"],
        "skipped": ["unable"],
    }
    assert [part.name for part in record.parts.values() if part.figures] == [n for n in names if n != "unable"]
    assert record.document()["skipped"] == [
        {"what": "unable", "why": "nothing to do it with"},
        {"what": "half", "why": "in part: the large one does not fit"},
    ]
    assert record.parts["raises"].traceback == "..."
    assert "status -6" in record.parts["dies"].summary


def test_workers_go_on_behind_the_report_of_a_run_that_was_killed(record: Record) -> None:
    """Half a line at the end of it is nobody's."""
    record.logs.mkdir()
    (record.logs / "measure.jsonl").write_text('{"kind": "end", "measure": "earlier", "seconds": 1.0}\n{"kind": "be')
    _workers(record).run(["good"], time.monotonic() + 60)
    assert _by_state(record) == {"ok": ["good"]}


def test_a_worker_that_cannot_start_is_tried_once(record: Record) -> None:
    _workers(record, "import sys; sys.exit('no such module')").run(["a", "b"], time.monotonic() + 60)
    assert list(record.parts) == ["worker"]
    assert "no such module" in record.parts["worker"].summary


def test_when_time_is_over_the_rest_is_named(record: Record) -> None:
    _workers(record).run(["good", "last"], time.monotonic() - 1)
    assert _by_state(record) == {"skipped": ["good", "last"]}


def _render(**more: Any) -> str:
    none: dict[str, Any] = {name: [] for name in ("steps", "figures", "errors", "skipped")}
    return table.render(
        table.Report(**{"title": "a GPU", "emulated": False, "seconds": 1.0, "written": "wrote x", **none, **more})
    )


def _figures(number: int, **more: Any) -> list[results.Figure]:
    return [results.figure(f"figure {index}", 1234.5, "us", [0.001234], **more) for index in range(number)]


def test_the_table_never_takes_more_than_sixty_lines() -> None:
    steps = [table.Step(f"step {index}", True, 1.0, "fine " * 100, {}) for index in range(15)]
    errors = [(f"measure {index}", "what went wrong\n" * 30) for index in range(20)]
    skipped = [(f"other {index}", f"reason {index}") for index in range(30)]
    figures = [*_figures(100), *_figures(7, target=1.0)]
    notes = ["something to note " * 20] * 4
    lines = _render(steps=steps, errors=errors, skipped=skipped, figures=figures, notes=notes).splitlines()
    assert len(lines) <= table.MOST_LINES
    assert max(map(len, lines)) <= 150
    assert sum("<= 1 us" in line and " NO " in line for line in lines) == 7
    assert "0 of 7 targets met, 20 failures, 30 skipped" in lines[-1]
    text = _render(figures=_figures(5))
    assert text.count("1234 us") + text.count("1235 us") == 5
    assert "more figures" not in text


def test_the_emulated_driver_has_no_speeds() -> None:
    """Neither in the table nor, as values, in the JSON; counts stay. Read back, both are what they were."""
    speed = results.figure("a speed", 777.5, "GB/s", [0.000777], target=1.0, at_least=True, shown=False, GBps=777.5)
    calls = results.count("calls", 3, "calls", n=5, target=0)
    text = _render(emulated=True, figures=[results.figure("a speed", 777.5, "GB/s", [0.000777]), calls])
    assert "777" not in text
    assert "no GPU was involved" in text
    assert "0 of 1 targets met" in text
    entry = speed.to_json(emulated=True)
    assert (entry["value"], entry["median_us"], entry["met"], entry["detail"]) == (None, None, None, {})
    assert entry["of_the_emulated_driver"]["value"] == 777.5
    assert calls.to_json(emulated=True)["value"] == 3
    assert speed.to_json()["value"] == 777.5
    for each in (speed, calls):
        for emulated in (True, False):
            written = json.loads(json.dumps({"measure": "m", **each.to_json(emulated=emulated)}))
            assert results.Figure.from_json(written) == each


def _options(calls: tuple[str, ...], **more: Any) -> suite.Options:
    return suite.Options(calls=calls, quick=True, checkout=False, **{"emulated": True, "seconds": 30, **more})


def test_a_run_that_measured_nothing_leaves_no_file_among_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    environment = {**os.environ, "REMAP_LIBCUDA": str(tmp_path / "none.so"), "PYTHONPATH": os.pathsep.join(sys.path)}
    assert suite.run(_options(("measure",), emulated=False), environment) == 2
    assert [path.parent.relative_to(tmp_path) for path in tmp_path.rglob("results.json")] == [
        Path("build/gpu/results-quick")
    ]
    assert not (tmp_path / "bench").exists()


def test_calls_share_the_time_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {}

    def ran(call: Any) -> bool:
        limits[call.name] = call.budget.seconds
        return True

    monkeypatch.setattr(suite._Call, "run", ran)
    assert (
        suite.run(_options(("probe", "measure", "serve"), out=tmp_path, seconds=None, total=70.0), dict(os.environ))
        == 0
    )
    # As much as each wants of what is left; nothing took any time here.
    assert limits["probe"] == calls_of("probe") and 60.0 < limits["measure"] <= 70.0 and 60.0 < limits["serve"] <= 70.0
    assert suite.run(_options(("measure", "serve"), out=tmp_path, total=10.0), dict(os.environ)) == 0
    assert "not begun, since less than 20 s were left: measure, serve" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["calls"]["serve"]["state"] == suite.LEFT_OUT


def calls_of(name: str) -> float:
    return suite.CALLS[name].limit(quick=True, emulated=True)


def test_without_arguments_it_says_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([], ["--checkout"]):
        assert main(given) == 2
        said = capsys.readouterr().out
        assert "usage: bench/gpu/run.sh" in said and "--total" in said


def test_without_a_driver_there_is_a_table_and_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {**os.environ, "REMAP_EMULATED_DRIVER": str(tmp_path / "none.so")}
    assert suite.run(_options(("measure", "serve"), out=tmp_path), environment) == 2
    assert "ERROR    driver: no CUDA driver could be used" in capsys.readouterr().out
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["emulated"] is True
    assert document["results"] == []
    assert [entry["what"] for entry in document["errors"]] == ["driver"]
    assert "none.so" in document["errors"][0]["error"]
    assert list(document["calls"]) == ["measure"]  # the next one would find no more


@pytest.mark.parametrize("figures", [0, 1])
def test_a_measure_that_cannot_do_all_of_it_keeps_what_it_has(figures: int) -> None:
    """Without one figure it is skipped, with one it is done in part."""
    from bench.gpu import worker

    def body(context: Any) -> Iterator[results.Figure]:
        yield from [results.count("calls", 1, "calls", n=1)] * figures
        raise Skip("too large")

    one = Measure("one", body, (), 1.0, 1.0, 1.0, "measure", 0)
    context: Any = SimpleNamespace(emulated=True, quick=True, until=0.0, driver=SimpleNamespace(violations=list))
    report = StringIO()
    assert worker._run(one, context, float("inf"), report)
    entries = [json.loads(line) for line in report.getvalue().splitlines()]
    assert [entry["kind"] for entry in entries] == (["begin", "figure", "end"] if figures else ["begin", "skip"])
    assert entries[-1]["rest" if figures else "reason"] == "too large"
