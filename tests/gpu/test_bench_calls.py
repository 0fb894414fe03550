"""The GPU suite's calls: what is in which, that each ends far below ten minutes, and what the probe changes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from bench.gpu import calls, machine, registry, steps, suite
from bench.gpu.record import Record
from bench.gpu.table import Step
from conftest import ROOT, bench, emulated_environment, results_in

LONGEST_S = 570  # of ten minutes
LAST_S = 10  # of the measure that runs when the time is over
SPARE_S = 100  # for the build, and for measures that take longer than they say
BUILT_S = 60  # the same for one long measure in a checkout that is built


PROBE = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
int main(int argc, char** argv) {
  const char* does = std::getenv("PROBE_DOES");
  if (argc != 3 || std::strcmp(argv[1], "--out") != 0) return 9;
  std::FILE* out = std::fopen(argv[2], "w");
  std::fputs("{\\"case\\": \\"one\\", \\"us\\": 1.5}\\n", out);
  const bool cannot = !std::strcmp(does, "cannot");
  if (!std::strcmp(does, "tells") || cannot) std::fputs("{\\"fault\\": \\"edits\\", \\"why\\": \\"error 700\\"}\\n{\\"ca", out);
  std::fclose(out);
  if (!std::strcmp(does, "dies")) std::abort();
  if (!std::strcmp(does, "faults")) return 3;
  return cannot ? 2 : 0;
}
"""


@pytest.fixture
def paths(tmp_path: Path) -> steps.Paths:
    return steps.Paths(tmp_path / "build", tmp_path / "logs")


@pytest.fixture
def probe_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A probe that does what PROBE_DOES says, in place of the suite's."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    source = tmp_path / "probe.cpp"
    source.write_text(PROBE)
    monkeypatch.setattr(steps, "PROBE", source)
    return source


# -- what is in which call ---------------------------------------------------------------------------------------------


def test_every_file_of_measures_is_in_one_call() -> None:
    named = [module for modules in registry.ORDER.values() for module in modules]
    there = {path.stem for path in (ROOT / "bench/gpu/measures").glob("*.py")} - {"__init__"}
    assert len(named) == len(set(named))
    assert set(named) == there
    assert set(registry.ORDER) == {call.name for call in calls.CALLS.values() if call.measures}
    with pytest.raises(ValueError, match="ORDER"):
        registry.place("no_such_file")


def test_the_figures_that_convince_most_come_first() -> None:
    names = [each.name for each in registry.all_measures() if each.call == "measure"]
    headline = ["driver calls", "link", "link under load", "growth", "re-pointing", "session.step", "prefetch"]
    places = [names.index(name) for name in headline]
    assert places == sorted(places)
    assert names.index("overhead with nothing remapped") < names.index("pass against schedule.period")
    assert next(each.name for each in registry.all_measures() if each.call == "serve") == "sharing C1"


def test_every_call_ends_before_ten_minutes_are_over() -> None:
    for call in calls.CALLS.values():
        for quick in (False, True):
            limit = call.limit(quick=quick, emulated=False)
            assert limit + LAST_S <= LONGEST_S
            assert limit <= 480 or call.name == "serve"


def _seconds(call: str, *, quick: bool, emulated: bool) -> list[float]:
    """What the measures of a call say that they take."""
    mine = [each for each in registry.all_measures() if each.call == call]
    there = [each for each in mine if emulated or not quick or each.quick_s is not None]
    return [each.seconds(quick=quick, emulated=emulated) for each in there]


@pytest.mark.parametrize("quick", [False, True])
def test_what_measures_reaches_its_end(quick: bool) -> None:
    limit = calls.CALLS["measure"].limit(quick=quick, emulated=False)
    assert sum(_seconds("measure", quick=quick, emulated=False)) + min(SPARE_S, 0.4 * limit) <= limit


def test_what_serves_fits_one_by_one_and_the_first_of_them_always() -> None:
    """The same call again takes what was left out."""
    for quick in (False, True):
        limit = calls.CALLS["serve"].limit(quick=quick, emulated=False)
        taken = _seconds("serve", quick=quick, emulated=False)
        assert max(taken) + BUILT_S <= limit
        assert taken[0] + SPARE_S <= limit


def test_a_rehearsal_runs_everything() -> None:
    for call in ("measure", "serve"):
        limit = calls.CALLS[call].limit(quick=True, emulated=True)
        assert sum(_seconds(call, quick=True, emulated=True)) <= limit


def test_every_file_of_tests_runs_in_a_process_of_its_own(paths: steps.Paths) -> None:
    for emulated in (False, True):
        named = [task.name for task in calls.tasks("build-and-check", paths, quick=False, emulated=emulated)]
        assert len(named) == len(set(named))
        files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_gpu_*.py")}
        assert files - set(named) == {"tests/gpu/test_gpu_bench.py"}
        assert ("tests/gpu/test_bench_calls.py" in named) is emulated
        assert {f"tests/python/{name}" for name in calls.CONFORMANCE} <= set(named)
        assert any("sanitizer" in name for name in named) is not emulated
    assert calls.device_files(emulated=False)[: len(calls.FIRST)] == list(calls.FIRST)
    assert calls.names("all") == ["probe", "build-and-check", "measure", "serve"]


# -- the probe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("does", "ok", "fault"),
    [
        ("well", True, None),
        ("faults", False, "the probe says so"),
        ("tells", False, "edits: error 700"),
        ("dies", False, "the probe was ended by signal 6"),
        ("cannot", False, None),
    ],
)
def test_what_the_probe_finds(probe_source: Path, paths: steps.Paths, does: str, ok: bool, fault: str | None) -> None:
    step = steps.probe(paths, seconds=120, environment=emulated_environment(PROBE_DOES=does))
    assert isinstance(step, Step)
    assert (step.ok, step.detail["fault"], step.detail["lines"][0]) == (ok, fault, {"case": "one", "us": 1.5})
    assert fault is None or fault in step.summary


def test_a_probe_that_is_not_there_or_cannot_be_built(
    tmp_path: Path, paths: steps.Paths, probe_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_source.write_text("int main( {")
    step = steps.probe(paths, seconds=120, environment=emulated_environment())
    assert isinstance(step, Step)
    assert not step.ok
    assert "compiled" in step.summary
    assert steps.probe(paths, seconds=9, environment=emulated_environment(CXX="no-such-compiler")) == (
        "there is no C++ compiler (no-such-compiler)"
    )
    monkeypatch.setattr(steps, "PROBE", ROOT / "bench/gpu/none.cpp")
    assert (
        steps.probe(paths, seconds=9, environment=emulated_environment())
        == "bench/gpu/none.cpp is not in this checkout"
    )


def test_after_a_fault_sessions_are_strict_and_the_run_says_so(
    emulated_gpu: Any, probe_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = emulated_environment(PROBE_DOES="faults")
    common: dict[str, Any] = {"quick": True, "emulated": True, "checkout": False, "out": tmp_path / "out"}
    said = "mode: strict, because of the probe: the probe says so"
    assert suite.run(suite.Options(calls=("probe",), **common), environment) == 1
    assert said in capsys.readouterr().out
    growth = suite.Options(calls=("measure",), only=("growth",), **common)
    assert suite.run(growth, environment) == 0
    assert said in capsys.readouterr().out
    document = results_in(tmp_path / "out")
    assert document["mode"] == "strict"
    found = {entry["name"]: entry["value"] for entry in document["results"]}
    assert found["backend calls before blocks are usable, most of any case"] > 0  # so it is when nothing is aliased
    # A probe that finds nothing any more: what was measured in the other mode is measured again.
    environment["PROBE_DOES"] = "well"
    assert suite.run(suite.Options(calls=("probe",), again="failed", **common), environment) == 0
    assert suite.run(growth, environment) == 0
    document = results_in(tmp_path / "out")
    assert (document["mode"], document["strict_because"]) == ("aliased", None)
    found = {entry["name"]: entry["value"] for entry in document["results"]}
    assert found["backend calls before blocks are usable, most of any case"] == 0


# -- compute-sanitizer -------------------------------------------------------------------------------------------------

# Takes the options that the suite gives, runs the program, and says what TOOL_SAYS says.
TOOL = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift 2; done
"$@" || exit
echo "========= $TOOL_SAYS"
exit $TOOL_STATUS
"""


@pytest.mark.parametrize(
    ("says", "status", "expected"),
    [
        ("ERROR SUMMARY: 0 errors", 0, (True, "ERROR SUMMARY: 0 errors")),
        ("ERROR SUMMARY: 2 errors", 9, (False, "exit status 9; ERROR SUMMARY: 2 errors")),
        ("Error: Device not supported", 1, "compute-sanitizer says that the device is not supported here"),
    ],
)
def test_what_the_sanitizer_finds(tmp_path: Path, paths: steps.Paths, says: str, status: int, expected: object) -> None:
    """On a stand-in for the tool: its options are taken as the real one documents them, and that is all that is shown."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    search = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = emulated_environment(PATH=search, TOOL_SAYS=says, TOOL_STATUS=str(status))
    step = steps.sanitizer("the name", paths, ("-c", "pass"), seconds=60, environment=environment)
    assert expected == ((step.ok, step.summary) if isinstance(step, Step) else step)


def test_the_small_case_is_right_on_the_emulated_driver(emulated_gpu: Any, paths: steps.Paths) -> None:
    step = steps.small_case(paths, seconds=200, environment=emulated_environment())
    assert step.ok, step.detail


# -- the command line --------------------------------------------------------------------------------------------------


def test_results_come_along_to_an_empty_folder_and_of_another_driver_are_refused(
    emulated_gpu: Any, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    given = ("measure", "--emulated", "--quick", "--host-budget", "1GiB", "--only", "session.step")
    bench(*given, "--out", one)
    said = bench(*given, "--only", "link", "--out", two, "--resume", one / "results.json")
    assert "session.step: kept" in said and "link: ok" in said
    document = results_in(two)
    assert {part["name"] for part in document["parts"]} == {"link", "session.step"}
    assert document["parts"][0]["origin"]["host_budget"] == "1GiB"
    assert "session.step: ok" in bench(*given, "--again", "--out", two)
    bench("measure", "--out", two, expected=2)
    missing = (*given, "--out", tmp_path / "three", "--resume", tmp_path / "none.json")
    assert "cannot be read" in bench(*missing, expected=2)
    nothing = ("measure", "--emulated", "--only", "nothing*", "--out", tmp_path / "four")
    assert "nothing matches" in bench(*nothing, expected=2)


def test_the_host_budget_reaches_the_children(tmp_path: Path) -> None:
    options = suite.Options(calls=("measure",), quick=True, emulated=True, checkout=False, host_budget="3GiB")
    paths = steps.Paths(tmp_path, tmp_path)
    assert suite._environment(options, {}, paths)["REMAP_HOST_BUDGET"] == "3GiB"


def test_which_engines_were_found_and_ran_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions = {"torch": "2.11.0", "vllm": "0.32.0", "flashinfer-python": "0.7.0"}
    monkeypatch.setattr(machine, "versions", lambda: versions)
    found = machine.engines()
    assert (found["torch"], found["flashinfer"], found["sglang"]) == ("2.11.0", "0.7.0", None)
    record = Record(tmp_path, tmp_path, emulated=False)
    record.facts = {
        "mode": "aliased",
        "strict_because": None,
        "packages": {name: {"ran": [], "version": at} for name, at in found.items()},
    }
    record.facts["packages"]["torch"]["ran"] = ["graphs", "decode attention"]
    lines = "\n".join(suite._notes(record))
    assert "found, and parts that ran with it: torch 2.11.0 (2)" in lines
    assert "found, not used: flashinfer 0.7.0, vllm 0.32.0" in lines
    assert "not found: triton, transformers, sglang" in lines


def test_an_adapter_that_cannot_be_tried_says_why(monkeypatch: pytest.MonkeyPatch, paths: steps.Paths) -> None:
    monkeypatch.setattr(machine, "versions", lambda: {"sglang": "0.5.23"})
    tasks = {task.name: task for task in calls.tasks("serve", paths, quick=False, emulated=False)}
    assert tasks["vllm adapter"].run(10, {}) == "vllm is not installed"
    assert tasks["sglang adapter"].run(10, {}) == "sglang 0.5.23 is installed; this suite has nothing that enters it"


def test_the_sources_digest_changes_with_the_library_alone(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "bench").mkdir()
    file = tmp_path / "src" / "a.py"
    file.write_text("1")
    first = suite.sources_digest(tmp_path)
    (tmp_path / "bench" / "b.py").write_text("2")
    assert suite.sources_digest(tmp_path) == first
    file.write_text("3")
    assert suite.sources_digest(tmp_path) != first
