"""bench/gpu/probe.cpp on the emulated driver: with copies, with its kernels done by the processor, and what it says of faults.

No figure is looked at: what is tested is that every part runs, that its lines are whole, and that nothing wrong goes unsaid.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

PARTS = ["device", "calls", "aliases", "edits", "end"]
EACH = {"reserve", "create", "map", "set_access", "unmap", "release", "free of addresses"}
CALLS = EACH | {f"{call} of a run" for call in ("map", "set_access", "unmap")}


def _compile(source: str, target: Path, *flags: str) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no c++")
    command = [
        compiler,
        "-O2",
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        *flags,
        str(ROOT / source),
        "-o",
        str(target),
    ]
    done = subprocess.run([*command, "-ldl", "-lpthread"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The probe, built as a machine without a toolkit builds it."""
    return _compile("bench/gpu/probe.cpp", tmp_path_factory.mktemp("probe") / "probe")


@pytest.fixture(scope="module")
def kernel_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulated driver with the probe's kernels."""
    folder = tmp_path_factory.mktemp("driver")
    return _compile("tests/gpu/kernel_driver.cpp", folder / "libkernels.so", "-shared", "-fPIC")


@pytest.fixture
def run(probe: Path, tmp_path: Path) -> Any:
    """Runs it to its end: the exit status, and its lines."""

    def lines_of(**environment: str) -> tuple[int, list[dict[str, Any]]]:
        out = tmp_path / "lines"
        out.unlink(missing_ok=True)  # it appends
        known = {"REMAP_EMULATED_DRIVER": os.environ.get("REMAP_LIBCUDA", ""), **os.environ, **environment}
        done = subprocess.run([probe, "--out", out, "--quick"], env=known, timeout=120, check=False)
        return done.returncode, [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]

    return lines_of


@pytest.fixture
def with_kernels(emulated_gpu: Any, kernel_driver: Path) -> dict[str, str]:
    """Without this the emulated driver runs no kernels: copies stand in."""
    return {"REMAP_LIBCUDA": str(kernel_driver), "REMAP_EMULATED_DRIVER": os.environ["REMAP_LIBCUDA"]}


def _check(lines: list[dict[str, Any]], *, kernels: bool) -> None:
    """Everything ran, and was right."""
    assert [line for line in lines if {"fault", "failed", "late"} & set(line)] == []
    assert list(dict.fromkeys(line["probe"] for line in lines)) == PARTS
    by_part = {part: [line for line in lines if line["probe"] == part] for part in PARTS}
    assert by_part["device"][0]["kernels"] is kernels
    for mib in (2, 16, 32, 64):
        at_size = {line["call"]: line for line in by_part["calls"] if line["page_bytes"] == mib << 20}
        assert set(at_size) == CALLS
        for line in at_size.values():
            assert line["n"] >= 3 and 0 < line["median_us"] <= line["p99_us"] <= line["max_us"]
    assert {line["case"] for line in by_part["aliases"]} == {"the same stream", "another stream, behind an event"}
    assert {(line["kernels"], line["wrong"]) for line in by_part["aliases"]} == {(kernels, 0)}
    assert [line["copies"] > 0 for line in by_part["edits"]] == [False, False, False, True]
    for line in by_part["edits"]:
        assert 0 < line["edits"] <= line["asked"] and line["launches"] >= 4 and line["sweeps"] > 0
        assert (line["kernels"], line["wrong_beside"], line["wrong_behind"]) == (kernels, 0, 0)
    assert by_part["end"][0]["ok"] is True


def test_copies_stand_in_where_no_kernel_can_run(emulated_gpu: Any, run: Any) -> None:
    status, lines = run()
    assert status == 0, lines
    _check(lines, kernels=False)
    assert lines[0]["instead"] == "copies, checked on the host"
    assert "runs no device code" in lines[0]["why"]


def test_every_part_runs_with_kernels_and_with_copies_where_they_are_refused(with_kernels: Any, run: Any) -> None:
    for fault, kernels in (("", True), ("refuse-ptx", False)):
        status, lines = run(**with_kernels, REMAP_KERNEL_FAULT=fault)
        assert status == 0, lines
        _check(lines, kernels=kernels)
    assert lines[0]["why"] == "cuModuleLoadData returned 218"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("wrong-word", "wrong words were read beside the edits"),
        ("error", "cuLaunchKernel returned 700"),
        ("crash", "ended by signal 6"),
    ],
)
def test_a_fault_beside_a_reader_is_told_and_the_other_parts_run(
    with_kernels: Any, run: Any, how: str, why: str
) -> None:
    status, lines = run(**with_kernels, REMAP_KERNEL_FAULT=how)
    assert status == 3, lines
    faults = {line["fault"]: line["why"] for line in lines if "fault" in line}
    assert set(faults) <= {"edits", "edits-long-kernels", "edits-large-pages", "edits-beside-copies"}
    assert why in faults["edits"]
    assert len([line for line in lines if line.get("probe") == "aliases"]) == 2
    assert lines[-1]["ok"] is False


def test_what_fails_in_another_part_is_no_fault(with_kernels: Any, run: Any) -> None:
    """It is no reason for strict mode: nothing was wrong beside a kernel."""
    status, lines = run(**with_kernels, REMAP_KERNEL_FAULT="release")
    assert (status, [line for line in lines if "fault" in line]) == (4, []), lines
    assert ["cuMemRelease returned 999" in line["why"] for line in lines if line.get("failed") == "calls"] == [True]
    assert (lines[-1]["ok"], lines[-1]["faults"], lines[-1]["failed_or_late"]) == (False, 0, 1)


def test_without_a_driver_it_says_that_it_could_not_run(run: Any, tmp_path: Path) -> None:
    status, lines = run(REMAP_LIBCUDA=str(tmp_path / "none.so"))
    assert (status, lines[-1]["probe"], lines[-1]["ok"], lines[-1]["ran"]) == (2, "end", False, 0)
    assert "no driver" in lines[0]["why"]


def test_a_device_with_too_little_memory_is_no_fault(emulated_gpu: Any, run: Any) -> None:
    status, lines = run(REMAP_EMULATED_MEMORY=str(100 << 20))
    assert status == 0, lines
    skipped = [line for line in lines if "skipped" in line]
    assert {line["page_bytes"] for line in skipped if line["probe"] == "calls"} == {32 << 20, 64 << 20}
    assert "edits-large-pages" in {line["probe"] for line in skipped}
    assert (lines[-1]["parts"], lines[-1]["ran"], lines[-1]["faults"]) == (7, 6, 0)


@pytest.mark.parametrize("target", ["sm_75", "sm_90", "sm_100"])
def test_an_assembler_takes_the_kernels(probe: Path, tmp_path: Path, target: str) -> None:
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    if ptxas is None:
        pytest.skip("there is no ptxas")
    text = subprocess.run([probe, "--ptx"], capture_output=True, check=True).stdout
    (tmp_path / "kernels.ptx").write_bytes(text)
    command = [ptxas, "-arch", target, str(tmp_path / "kernels.ptx"), "-o", str(tmp_path / "kernels.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "is not defined for option" in done.stderr:
        pytest.skip(f"this ptxas knows no {target}")
    assert done.returncode == 0, done.stderr
