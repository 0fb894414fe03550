"""The GPU suite's calls: what is in which, that each ends far below ten minutes, and what the probe changes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from bench.gpu import calls, machine, registry, steps, suite
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
  if (!std::strcmp(does, "is late")) return 4;
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


def test_every_file_of_measures_is_in_one_call_and_what_convinces_most_comes_first() -> None:
    named = [module for modules in registry.ORDER.values() for module in modules]
    there = {path.stem for path in (ROOT / "bench/gpu/measures").glob("*.py")} - {"__init__"}
    assert len(named) == len(set(named))
    assert set(named) == there
    assert set(registry.ORDER) == {call.name for call in calls.CALLS.values() if call.measures}
    with pytest.raises(ValueError, match="ORDER"):
        registry.place("no_such_file")
    names = [each.name for each in registry.all_measures()]
    headline = ["driver calls", "link", "link under load", "growth", "re-pointing", "session.step", "prefetch"]
    assert [name for name in names if name in headline] == headline
    assert names.index("overhead with nothing remapped") < names.index("pass against schedule.period")
    assert (
        next(each.name for each in registry.all_measures() if each.call == "serve") == "sharing 8B, 13B and 14B at 8/s"
    )


@pytest.mark.parametrize("quick", [False, True])
def test_every_call_ends_before_ten_minutes_are_over_and_reaches_its_end(quick: bool) -> None:
    def limit(call: str, emulated: bool = False) -> float:
        return calls.CALLS[call].limit(quick=quick, emulated=emulated)

    def taken(call: str, emulated: bool = False) -> list[float]:
        """What the measures of a call say that they take."""
        mine = [each for each in registry.all_measures() if each.call == call]
        there = [each for each in mine if emulated or not quick or each.quick_s is not None]
        return [each.seconds(quick=quick, emulated=emulated) for each in there]

    for call in calls.CALLS:
        assert limit(call) + LAST_S <= LONGEST_S
        assert limit(call) <= 480 or call in ("serve", "vllm")
    assert sum(taken("measure")) + min(SPARE_S, 0.4 * limit("measure")) <= limit("measure")
    # What serves fits one by one, and the first always: the same call again takes what was left out.
    assert max(taken("serve")) + BUILT_S <= limit("serve")
    assert taken("serve")[0] + SPARE_S <= limit("serve")
    if quick:  # a rehearsal runs everything
        assert all(sum(taken(call, emulated=True)) <= limit(call, emulated=True) for call in ("measure", "serve"))


def test_every_file_of_tests_runs_in_a_process_of_its_own(paths: steps.Paths) -> None:
    for emulated in (False, True):
        named = [task.name for task in calls.tasks("build-and-check", paths, quick=False, emulated=emulated)]
        assert len(named) == len(set(named))
        assert {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_gpu_*.py")} <= set(named)
        assert ("tests/gpu/test_bench_calls.py" in named) is emulated
        assert {f"tests/python/{name}" for name in calls.CONFORMANCE} <= set(named)
        assert any("sanitizer" in name for name in named) is not emulated
    assert calls.device_files(emulated=False)[: len(calls.FIRST)] == list(calls.FIRST)
    assert calls.names("all") == ["probe", "build-and-check", "measure", "serve", "vllm"]


# -- the probe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("does", "ok", "fault"),
    [
        ("well", True, None),
        ("faults", False, "the probe says so"),
        ("tells", False, "edits: error 700"),
        ("dies", False, None),
        ("is late", False, None),
        ("cannot", False, None),
    ],
)
def test_what_the_probe_finds(probe_source: Path, paths: steps.Paths, does: str, ok: bool, fault: str | None) -> None:
    step = steps.probe(paths, seconds=120, environment=emulated_environment(PROBE_DOES=does))
    assert isinstance(step, Step)
    assert (step.ok, step.detail["fault"], step.detail["lines"][0]) == (ok, fault, {"case": "one", "us": 1.5})
    assert fault is None or fault in step.summary


def test_a_probe_that_is_not_there_or_cannot_be_built(
    paths: steps.Paths, probe_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(**environment: str) -> steps.Step | str:
        return steps.probe(paths, seconds=120, environment=emulated_environment(**environment))

    probe_source.write_text("int main( {")
    step = said()
    assert isinstance(step, Step) and not step.ok and "compiled" in step.summary
    assert said(CXX="no-such-compiler") == "there is no C++ compiler (no-such-compiler)"
    monkeypatch.setattr(steps, "PROBE", ROOT / "bench/gpu/none.cpp")
    assert said() == "bench/gpu/none.cpp is not in this checkout"


def test_after_a_fault_sessions_are_strict_and_the_run_says_so(
    emulated_gpu: Any, probe_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = emulated_environment()
    out = tmp_path / "out"
    growth = {"calls": ("measure",), "only": ("growth",)}

    def run(does: str, **more: Any) -> int:
        options = suite.Options(**{"quick": True, "emulated": True, "checkout": False, "out": out, **more})
        return suite.run(options, {**environment, "PROBE_DOES": does})

    def found() -> tuple[Any, ...]:
        document = results_in(out)
        values = {entry["name"]: entry["value"] for entry in document["results"]}
        calls_first = values["backend calls before blocks are usable, most of any case"]
        return document["mode"], document["strict_because"], calls_first > 0  # so it is when nothing is aliased

    said = "mode: strict, because of the probe: the probe says so"
    assert run("faults", calls=("probe",)) == 1
    assert said in capsys.readouterr().out
    assert run("faults", **growth) == 0
    assert said in capsys.readouterr().out
    assert found() == ("strict", "probe: the probe says so", True)
    # A probe that finds nothing any more: what was measured in the other mode is measured again.
    assert run("well", calls=("probe",), again="failed") == 0
    assert run("well", **growth) == 0
    assert found() == ("aliased", None, False)


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
    later = (*given, "--out", tmp_path / "three", "--resume", tmp_path / "none.json")  # still to come
    assert "session.step: ok" in bench(*later)
    (tmp_path / "none.json").write_text("no JSON")
    broken = (*given, "--out", tmp_path / "five", "--resume", tmp_path / "none.json")
    assert "cannot be read" in bench(*broken, expected=2)
    nothing = ("measure", "--emulated", "--only", "nothing*", "--out", tmp_path / "four")
    assert "nothing matches" in bench(*nothing, expected=2)


def test_the_host_budget_reaches_the_children(paths: steps.Paths) -> None:
    options = suite.Options(calls=("measure",), quick=True, emulated=True, checkout=False, host_budget="3GiB")
    assert suite._environment(options, {}, paths)["REMAP_HOST_BUDGET"] == "3GiB"


def test_an_adapter_that_cannot_be_tried_says_why(monkeypatch: pytest.MonkeyPatch, paths: steps.Paths) -> None:
    monkeypatch.setattr(machine, "versions", lambda: {"sglang": "0.5.23"})
    assert machine.engines()["sglang"] == "0.5.23"
    tasks = {task.name: task for task in calls.tasks("serve", paths, quick=False, emulated=False)}
    assert tasks["vllm adapter"].run(10, {}) == "vllm is not installed"
    assert "sglang 0.5.23 is installed; its test is" in tasks["sglang adapter"].run(10, {})


def test_the_sources_digest_changes_with_the_library_alone(tmp_path: Path) -> None:
    seen = []
    for name, text in (("src", "1"), ("bench", "2"), ("src", "3")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "a.py").write_text(text)
        seen.append(suite.sources_digest(tmp_path))
    assert seen[0] == seen[1] != seen[2]
