"""What is done to a checkout before anything is measured: build, conformance suite, tests/gpu, compute-sanitizer.

Each step is a process with a time limit. A step that fails is a line in the table; what does not need it goes on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .table import Step

__all__ = ["ROOT", "Paths", "build", "run_limited", "sanitizer", "tests"]

ROOT = Path(__file__).resolve().parents[2]
TAIL = 2000  # characters of a failed step's output that go into the JSON


@dataclass(frozen=True)
class Paths:
    """Where this run builds: nothing is written anywhere else, the user's environment included."""

    build: Path

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


def run_limited(
    command: Sequence[str], *, seconds: float, environment: Mapping[str, str], log: Path
) -> tuple[int | None, float]:
    """(exit status, seconds taken); None if it had to be stopped after `seconds`. Output goes to `log`.

    The command leads a process group of its own, so that what it starts ends with it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return status, time.monotonic() - begun


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


def build(paths: Paths, *, seconds: float, environment: Mapping[str, str], emulator: bool, cpp_tests: bool) -> Step:
    """The module into `paths.site`; with it the emulated driver and the C++ tests if they are wanted."""
    environment = dict(environment)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    cmake = shutil.which("cmake", path=environment["PATH"])
    if cmake is None:
        return Step("build", False, 0.0, "there is no cmake", {})
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=environment["PATH"]) else []
    log, begun = paths.build / "build.log", time.monotonic()
    configure = [
        cmake, "-S", str(ROOT), "-B", str(paths.cmake), *generator, "-DCMAKE_BUILD_TYPE=Release", "-DREMAP_BUILD_PYTHON=ON",
        "-DREMAP_BUILD_TESTS=ON", f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    status, taken = run_limited(configure, seconds=seconds, environment=environment, log=log)
    if status != 0:
        return _step("build", status, taken, seconds, "cmake could not configure", log)
    targets = ["all"] if cpp_tests else ["_core", *(["remap_emulated_cuda"] if emulator else [])]
    jobs = str(len(os.sched_getaffinity(0)))
    command = [cmake, "--build", str(paths.cmake), "--parallel", jobs, "--target", *targets]
    status, _ = run_limited(command, seconds=seconds - (time.monotonic() - begun), environment=environment, log=log)
    if status != 0:
        return _step("build", status, time.monotonic() - begun, seconds, "a target could not be built", log)
    _assemble(paths)
    return Step("build", True, time.monotonic() - begun, f"{', '.join(targets)} with {jobs} jobs", {})


def _assemble(paths: Paths) -> None:
    """The package's Python files and the new module side by side."""
    target = paths.site / "remap"
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(ROOT / "src" / "remap", target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module in paths.cmake.glob("_core*.so"):
        shutil.copy2(module, target)


def cpp_tests(paths: Paths, *, seconds: float, environment: Mapping[str, str]) -> Step:
    """The C++ tests, as ctest runs them."""
    ctest = shutil.which("ctest", path=f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}")
    if ctest is None:
        return Step("C++ tests", False, 0.0, "there is no ctest", {})
    log = paths.build / "ctest.log"
    jobs = str(max(1, len(os.sched_getaffinity(0)) // 4))  # some of them count threads and time
    command = [ctest, "--test-dir", str(paths.cmake), "--output-on-failure", "--no-tests=error", "--parallel", jobs]
    status, taken = run_limited(command, seconds=seconds, environment=environment, log=log)
    summary = next((line for line in _tail(log).splitlines() if "tests passed" in line), "")
    return _step("C++ tests", status, taken, seconds, summary, log)


def tests(name: str, paths: Paths, arguments: Sequence[str], *, seconds: float, environment: Mapping[str, str]) -> Step:
    """A pytest run, summed up from its own report. A run in which nothing passed has failed."""
    stem = name.replace("/", "-").replace(" ", "-")
    log, report = paths.build / f"{stem}.log", paths.build / f"{stem}.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1",
        *arguments,
    ]  # fmt: skip
    status, taken = run_limited(command, seconds=seconds, environment=environment, log=log)
    if not report.exists():
        return _step(name, status, taken, seconds, "pytest wrote no report", log)
    counts, failed, skipped = _read_junit(report)
    summary = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    if failed:
        summary += f": {', '.join(failed[:3])}{' ...' if len(failed) > 3 else ''}"
    if status == 0 and not counts["passed"]:
        status, summary = 1, f"nothing passed; {summary}"
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


def sanitizer(paths: Paths, *, seconds: float, environment: Mapping[str, str]) -> Step | str:
    """compute-sanitizer's memcheck over bench.gpu.small_case; the reason if the tool is not there."""
    tool = shutil.which("compute-sanitizer", path=environment.get("PATH"))
    if tool is None:
        tool = shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        return "there is no compute-sanitizer"
    log = paths.build / "sanitizer.log"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    command += [sys.executable, "-m", "bench.gpu.small_case"]
    status, taken = run_limited(command, seconds=seconds, environment=environment, log=log)
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if status not in (0, None) and "Device not supported" in text:
        return "compute-sanitizer says that the device is not supported here"
    summary = next((line.strip("= ") for line in text.splitlines() if "ERROR SUMMARY" in line), "")
    return _step("compute-sanitizer memcheck", status, taken, seconds, summary, log)
