"""`bench.lab kunserve`: what is run, what stands beside the paper's numbers, and the file of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from bench.lab import seeds
from bench.lab.commands import app
from bench.lab.kunserve import command, figures, scaling
from bench.lab.kunserve.figures import CLAIMS, FIGURES, LATE_S, SETUPS, cost_errors, late, name_of, runs
from bench.lab.kunserve.twin.systems import SYSTEMS
from typer.testing import CliRunner

from remap.errors import InvalidArgument

SMALL = figures.Figure("Small", ("LongBench, 72B",), ("vllm", "remap"), ("ttft_p50_s", "tokens_per_s"))


def test_what_is_run() -> None:
    """The paper's clusters, data sets and baselines, and every step of its Figure 14; five seeds."""
    assert command.SETTINGS.seeds == 5
    assert {one.lengths for one in SETUPS.values()} == {"burstgpt", "sharegpt-4k", "longbench"}
    of_map = {"ideal", "kunserve-ahead", "remap-ahead"}
    assert {system for figure in FIGURES for system in figure.systems} == set(SYSTEMS) - of_map
    assert all(key in command.COLUMNS for figure in FIGURES for key in figure.show)
    assert sum(name.endswith("#4") for name in runs(command.SETTINGS)) * 5 == len(runs(command.SETTINGS))
    order = [seed for _, _, seed, _ in runs(command.SETTINGS).values()]
    assert order == sorted(order)


def test_every_number_is_reckoned_from_what_is_run() -> None:
    run = {(setup, system) for setup, system, seed, _ in runs(command.SETTINGS).values() if seed == 0}

    def at(setup: str, system: str) -> seeds.Point:
        assert (setup, system) in run
        values = dict.fromkeys((key for figure in FIGURES for key in figure.show), 2.0 if system == "vllm" else 1.0)
        values |= {"tpot_p90_s": 1.0, "tpot_p99.9_s": 1.0}
        return values | {f"late_{limit:g}": 0.25 if system in figures.BASELINES else 0.05 for limit in LATE_S}

    found = {(one.id, one.about): one.of(at, one.systems[0]) for one in CLAIMS}
    assert all(math.isfinite(each) for one in found.values() for each in one)
    by_id = {one.id: one.of(at, one.systems[0]) for one in CLAIMS}
    assert by_id["01"] == (1.0, 2.0)  # times lower than with the best baseline, and with vLLM
    assert by_id["02"] == pytest.approx((20.0, 20.0))
    assert by_id["10"] == (2.0,) and by_id["30"] == (0.5,)
    assert by_id["13"] == (-50.0, -50.0) and by_id["28"] == (1.0,)


def test_the_share_of_late_requests_between_two_limits() -> None:
    point = {f"late_{limit:g}": 1.0 / (1 + place) for place, limit in enumerate(LATE_S)}
    assert late(point, LATE_S[3]) == pytest.approx(0.25)
    assert late(point, (LATE_S[0] + LATE_S[1]) / 2) == pytest.approx(0.75)
    assert late(point, 0.01) == 1.0 and late(point, 1e6) == 0.0


def test_the_page_is_what_is_stored() -> None:
    stored = json.loads(command.RESULTS.read_text(encoding="utf-8"))
    assert set(runs(command.SETTINGS)) == set(stored["points"])
    assert command.page(stored) == command.RESULTS.with_suffix(".md").read_text(encoding="utf-8")


def test_the_form_of_the_cost_fits_the_roofline() -> None:
    """KunServe, Figure 15."""
    for ours, linear in cost_errors().values():
        assert ours < 0.05 < 0.3 < linear


def test_a_change_of_all_instances_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "SIZES", (8,))
    (found,) = scaling.measure()["sizes"]
    assert found["alone_again"] and found["groups"] < 8
    kinds = found["kinds"]
    assert kinds["Prepare"] == kinds["Prepared"] == kinds["Commit"] > 0 and kinds["BringHome"] > 0


def test_the_file_and_the_page_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "FIGURES", (SMALL,))
    monkeypatch.setattr(command, "FIGURES", (SMALL,))
    monkeypatch.setattr(scaling, "SIZES", (8,))
    path = tmp_path / "kunserve.json"
    text = command.run_kunserve(path, command.QUICK)
    stored = json.loads(path.read_text())
    assert len(stored["points"]) == 4 and stored["scaling"]["sizes"]
    assert stored["points"][name_of("LongBench, 72B", "vllm", 0)]["answered"] > 10
    assert text == path.with_suffix(".md").read_text() and "| LongBench, 72B | `remap` | 2 |" in text
    # Nothing is run twice, and equal settings give equal figures.
    assert command.run_kunserve(path, command.QUICK) == text
    assert figures.run("LongBench, 72B", "vllm", 1, True)["ttft_p50_s"] == pytest.approx(
        stored["points"][name_of("LongBench, 72B", "vllm", 1)]["ttft_p50_s"]
    )
    # Another command's file is refused.
    path.write_text("[]")
    with pytest.raises(InvalidArgument):
        command.run_kunserve(path, command.QUICK)
    found = CliRunner().invoke(app, ["kunserve", "--report-only", "--results", str(path)])
    assert found.exit_code == 2 and "bench.lab kunserve" in " ".join(found.output.split())
