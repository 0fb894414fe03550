"""What a call does beside measuring: the probe, the build, tests, compute-sanitizer, `remap doctor`.

Each step is a process with a time limit and a log. A step that fails is a line in the table; what does not need it goes on.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .processes import ROOT, run_limited
from .table import Step

__all__ = ["Paths", "build", "cpp_tests", "doctor", "probe", "sanitizer", "small_case", "tests"]

TAIL = 2000  # characters of a failed step's output that go into the JSON
PROBE = ROOT / "bench" / "gpu" / "probe.cpp"
UNABLE, FAULTED = 2, 3  # the probe's exit status if it could not run; if edits beside kernels, or aliases, faulted
DECIDING = ("aliases", "edits")  # parts of the probe, by the beginning of their names
PROBE_LINES = 2000
SMALL_CASE = ("-m", "bench.gpu.small_case")


@dataclass(frozen=True)
class Paths:
    """Where a run builds, and where it keeps its logs: nothing else is written but its results."""

    build: Path
    logs: Path

    @property
    def site(self) -> Path:
        """A folder for PYTHONPATH, with the package and the module that was just built."""
        return self.build / "site"

    @property
    def cmake(self) -> Path:
        """CMake's build folder."""
        return self.build / "cmake"

    @property
    def emulated_driver(self) -> Path:
        """The emulated driver, if it was built here."""
        return self.cmake / "libremap_emulated_cuda.so"


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-TAIL:] if log.exists() else ""


def _step(name: str, status: int | None, taken: float, limit: float, summary: str, log: Path, **detail: Any) -> Step:
    if status is None:
        summary = f"stopped after {limit:.0f} s; {summary}"
    elif status != 0:
        summary = f"exit status {status}; {summary}"
    if status != 0:
        detail["output"] = _tail(log)
    return Step(name, status == 0, taken, summary.rstrip("; "), detail)


def probe(paths: Paths, *, seconds: float, environment: Mapping[str, str]) -> Step | str:
    """Compile probe.cpp and run it; `detail` has its lines, and `fault` if it found one. The reason if that cannot be."""
    if not PROBE.exists():
        return f"{PROBE.relative_to(ROOT)} is not in this checkout"
    compiler = shlex.split(environment.get("CXX") or "c++")
    if shutil.which(compiler[0], path=environment.get("PATH")) is None:
        return f"there is no C++ compiler ({compiler[0]})"
    program, log, lines = paths.build / "probe", paths.logs / "probe.log", paths.logs / "probe.jsonl"
    paths.build.mkdir(parents=True, exist_ok=True)
    command = [*compiler, "-O2", "-std=c++17", str(PROBE), "-o", str(program), "-ldl", "-lpthread"]
    status, compiled = run_limited(
        command, seconds=seconds, environment=environment, log=paths.logs / "probe-build.log"
    )
    if status != 0:
        return _step("probe", status, compiled, seconds, "it could not be compiled", paths.logs / "probe-build.log")
    lines.unlink(missing_ok=True)
    command = [str(program), "--out", str(lines)]
    status, taken = run_limited(command, seconds=seconds - compiled, environment=environment, log=log)
    found = _read_lines(lines)
    fault = _fault(status, found)
    detail: dict[str, Any] = {"lines": found[:PROBE_LINES], "fault": fault}
    others = [
        f"{line[key]} {key}: {line.get('why', '')}" for line in found for key in ("failed", "late") if key in line
    ]
    summary = "; ".join([f"{len(found)} lines", *([f"FAULT: {fault}"] if fault else []), *others[:3]])
    return _step("probe", status if fault is None else status or FAULTED, taken, seconds, summary, log, **detail)


def _fault(status: int | None, lines: Sequence[Mapping[str, Any]]) -> str | None:
    """What the probe found wrong with edits of page tables beside kernels, or with aliases; None if nothing. A part that was
    stopped, or any other that failed, is in the lines, and so is a probe that was stopped itself: no reason for strict mode."""
    if status == UNABLE:
        return None
    found = [line for line in lines if str(line.get("fault", "")).startswith(DECIDING)]
    told = [f"{line['fault']}: {line.get('why', '')}".rstrip(": ") for line in found]
    return "; ".join(told[:3]) or ("the probe says so" if status == FAULTED else None)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that may end within a line."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def build(paths: Paths, *, seconds: float, environment: Mapping[str, str], emulator: bool) -> Step:
    """The module into `paths.site`, and the emulated driver if it is wanted (then nobody looks at speed: not optimised)."""
    environment = dict(environment)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    cmake = shutil.which("cmake", path=environment["PATH"])
    if cmake is None:
        return Step("build", False, 0.0, "there is no cmake", {})
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=environment["PATH"]) else []
    log, begun = paths.logs / "build.log", time.monotonic()
    kind = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"] if emulator else ["-DCMAKE_BUILD_TYPE=Release"]
    configure = [
        cmake, "-S", str(ROOT), "-B", str(paths.cmake), *generator, *kind, "-DREMAP_BUILD_PYTHON=ON",
        "-DREMAP_BUILD_TESTS=ON", f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    status, taken = run_limited(configure, seconds=seconds, environment=environment, log=log)
    if status != 0:
        return _step("build", status, taken, seconds, "cmake could not configure", log)
    targets = ["_core", *(["remap_emulated_cuda"] if emulator else [])]
    status, jobs = _compile(cmake, paths, targets, seconds - (time.monotonic() - begun), environment, log)
    if status != 0:
        return _step("build", status, time.monotonic() - begun, seconds, "a target could not be built", log)
    _assemble(paths)
    return Step("build", True, time.monotonic() - begun, f"{', '.join(targets)} with {jobs} jobs", {})


def _compile(
    cmake: str, paths: Paths, targets: Sequence[str], seconds: float, environment: Mapping[str, str], log: Path
) -> tuple[int | None, int]:
    """(exit status, jobs)."""
    jobs = len(os.sched_getaffinity(0))
    command = [cmake, "--build", str(paths.cmake), "--parallel", str(jobs), "--target", *targets]
    status, _ = run_limited(command, seconds=seconds, environment=environment, log=log)
    return status, jobs


def _assemble(paths: Paths) -> None:
    """The package's Python files and the new module side by side."""
    target = paths.site / "remap"
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(ROOT / "src" / "remap", target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module in paths.cmake.glob("_core*.so"):
        shutil.copy2(module, target)


def cpp_tests(paths: Paths, *, seconds: float, environment: Mapping[str, str]) -> Step:
    """The C++ tests, built and run by ctest: that the declarations of the driver agree with this machine's cuda.h, above all."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    cmake, ctest = shutil.which("cmake", path=search), shutil.which("ctest", path=search)
    if cmake is None or ctest is None:
        return Step("C++ tests", False, 0.0, "there is no cmake, or no ctest", {})
    log, begun = paths.logs / "ctest-build.log", time.monotonic()
    status, jobs = _compile(cmake, paths, ["all"], seconds, {**environment, "PATH": search}, log)
    if status != 0:
        return _step("C++ tests", status, time.monotonic() - begun, seconds, "they could not be built", log)
    log = paths.logs / "ctest.log"
    few = str(max(1, jobs // 4))  # some of them count threads and time
    command = [ctest, "--test-dir", str(paths.cmake), "--output-on-failure", "--no-tests=error", "--parallel", few]
    left = seconds - (time.monotonic() - begun)
    status, _ = run_limited(command, seconds=left, environment=environment, log=log)
    summary = next((line for line in _tail(log).splitlines() if "tests passed" in line), "")
    return _step("C++ tests", status, time.monotonic() - begun, seconds, summary, log)


def tests(
    name: str, paths: Paths, arguments: Sequence[str], *, seconds: float, environment: Mapping[str, str]
) -> Step | str:
    """A pytest run, summed up from its own report; the commonest reason if every test was skipped."""
    stem = _stem(name)
    log, report = paths.logs / f"{stem}.log", paths.logs / f"{stem}.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "bench.gpu.told", f"--junitxml={report}", "-o",
        "junit_family=xunit1", *arguments,
    ]  # fmt: skip
    status, taken = run_limited(command, seconds=seconds, environment=environment, log=log)
    if not report.exists():
        return _step(name, status, taken, seconds, "pytest wrote no report", log)
    counts, failed, skipped = _read_junit(report)
    summary = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    if failed:
        summary += f": {', '.join(failed[:3])}{' ...' if len(failed) > 3 else ''}"
    if status == 0 and skipped and not counts["passed"]:
        return f"all {counts['skipped']} tests: {max(skipped, key=skipped.__getitem__)}"
    if status == 0 and not counts["passed"]:
        status, summary = 1, "there was no test"
    return _step(name, status, taken, seconds, summary, log, counts=counts, failed=failed, skipped=skipped)


def _read_junit(report: Path) -> tuple[dict[str, int], list[str], dict[str, int]]:
    """(numbers by outcome, names of what failed, skip reasons and how often)."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed: list[str] = []
    reasons: dict[str, int] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(str(case.get("name")))
        elif skip is not None:
            counts["skipped"] += 1
            reason = str(skip.get("message"))
            reasons[reason] = reasons.get(reason, 0) + 1
        else:
            counts["passed"] += 1
    return counts, failed, reasons


def small_case(paths: Paths, *, seconds: float, environment: Mapping[str, str]) -> Step:
    """bench.gpu.small_case by itself: what the sanitizer runs, without it."""
    log = paths.logs / "small-case.log"
    status, taken = run_limited([sys.executable, *SMALL_CASE], seconds=seconds, environment=environment, log=log)
    return _step("small case", status, taken, seconds, "all bytes were right" if status == 0 else "", log)


def sanitizer(
    name: str, paths: Paths, arguments: Sequence[str], *, seconds: float, environment: Mapping[str, str]
) -> Step | str:
    """compute-sanitizer's memcheck over a run of Python; the reason if the tool is not there or refuses the device."""
    tool = shutil.which("compute-sanitizer", path=environment.get("PATH"))
    if tool is None:
        tool = shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        return "there is no compute-sanitizer"
    log = paths.logs / f"{_stem(name)}.log"
    # What the driver refuses is for the library to handle, and tests provoke it: accesses to memory are looked at here.
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    command += ["--target-processes", "all"]
    status, taken = run_limited(
        [*command, sys.executable, *arguments], seconds=seconds, environment=environment, log=log
    )
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if status not in (0, None) and "Device not supported" in text:
        return "compute-sanitizer says that the device is not supported here"
    summary = next((line.strip("= ") for line in text.splitlines() if "ERROR SUMMARY" in line), "")
    return _step(name, status, taken, seconds, summary, log)


def doctor(name: str, paths: Paths, flags: Sequence[str], *, seconds: float, environment: Mapping[str, str]) -> Step:
    """`remap doctor`: what it says of this machine is the summary's first lines, all of it is in the log."""
    log = paths.logs / f"{_stem(name)}.log"
    command = [sys.executable, "-c", "from remap.cli import main; main()", "doctor", *flags]
    status, taken = run_limited(command, seconds=seconds, environment=environment, log=log)
    return _step(name, status, taken, seconds, "", log, said=_tail(log))


def _stem(name: str) -> str:
    """A name as part of a file's."""
    return "-".join("".join(each if each.isalnum() or each in "._" else " " for each in name).split())
