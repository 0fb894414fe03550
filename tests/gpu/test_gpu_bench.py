"""The calls that measure run from end to end on the emulated driver. On a GPU bench/gpu/run.sh runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import bench, results_in

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
def test_the_measures_run_on_the_emulated_driver(emulated_gpu: Any, tmp_path: Path) -> None:
    for call in ("measure", "serve"):
        bench(call, "--emulated", "--quick", "--seconds", SECONDS, "--out", tmp_path)
    document = results_in(tmp_path)
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
