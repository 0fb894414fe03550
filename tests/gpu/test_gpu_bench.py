"""The calls that measure run from end to end on the emulated driver. On a GPU bench/gpu/run.sh runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

SECONDS = 90
# Measures that need neither torch on a GPU nor a package that may be missing.
EVERYWHERE = {
    "driver calls",
    "link",
    "growth",
    "re-pointing",
    "session.step",
    "iteration gap",
    "prefetch",
    "overhead with nothing remapped",
    "pass against schedule.period",
    "reload of an idle model",
    "zeroing",
    "1 GiB more and less",
    "re-pointing beside kernels",
    "re-pointing between passes",
    "calls beside re-pointing",
}


@pytest.mark.slow
def test_the_measures_run_on_the_emulated_driver(gpu: Any, tmp_path: Path) -> None:
    if not gpu.emulated:
        pytest.skip("there is a GPU: bench/gpu/run.sh measures it")
    for call in ("measure", "serve"):
        command = [sys.executable, "-m", "bench.gpu", call, "--emulated", "--quick", "--seconds", str(SECONDS)]
        done = subprocess.run(
            [*command, "--out", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "REMAP_EMULATED_DRIVER": os.environ["REMAP_LIBCUDA"]},
            capture_output=True,
            text=True,
            timeout=3 * SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "results.json").read_text())
    assert [(name, call["state"]) for name, call in document["calls"].items()] == [
        ("measure", "ended"),
        ("serve", "ended"),
    ]
    assert document["errors"] == []
    # What was left out was so for a reason that is named: no GPU, a package that is missing, or a very slow machine.
    assert all(entry["why"] for entry in document["skipped"])
    late = {entry["what"] for entry in document["skipped"] if entry["why"].startswith("time:")}
    assert set(document["measure_seconds"]) | late >= EVERYWHERE
    assert len(late) < len(EVERYWHERE) / 2, f"not enough time on this machine for {late}"
    exact = {entry["name"]: entry["value"] for entry in document["results"] if entry["exact"]}
    assert exact["backend calls of such steps"] == 0
    assert exact["backend calls before blocks are usable, most of any case"] == 0
    speeds = [entry for entry in document["results"] if not entry["exact"]]
    assert speeds
    assert {entry["value"] for entry in speeds} == {None}
