"""`bench.lab gap` and the tables of several seeds: medians, ranges from worst to best, and what is not defined."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from bench.lab import gap, seeds
from bench.lab.cells import Group, empty
from bench.lab.commands import app
from bench.lab.paper.experiments import setup_of
from bench.lab.paper.runs import Settings
from effort import BRIEF, some
from typer.testing import CliRunner

from remap.policy.hardware import machine
from remap_serve.sim.policies import find
from remap_serve.sim.serving import fitting, tenants

LESS = seeds.Column("ttft_p99_s", "TTFT P99, s")
MORE = seeds.Column("tokens_per_s", "tokens/s", more_is_better=True)
TTFT, TOKENS, TBT = seeds.AGAINST


@pytest.mark.parametrize(
    ("values", "column", "worst_first", "text"),
    [
        ((3.0, 1.0, 2.0), LESS, False, "2 (1 to 3)"),
        ((3.0, 1.0, 2.0), LESS, True, "2 (3 to 1)"),
        ((3.0, 1.0, 2.0), MORE, True, "2 (1 to 3)"),
        ((2000.0, 1.5), MORE, False, "1,001 (2 to 2,000)"),
        ((0.25, 0.25), LESS, False, "0.25"),
        ((0.5, -0.2, 1.1), TTFT, True, "50 % (-20 % to 110 %)"),
        ((0.5, math.nan, 0.7), TTFT, True, "60 % (50 % to 70 %; 2 of 3 seeds)"),
        ((0.5, math.nan), TTFT, True, "50 % (1 of 2 seeds)"),
        ((math.nan, math.nan), TOKENS, True, "–"),
        ((2.0, 9.5, 1.0), TBT, True, "2 (9.5 to 1)"),
    ],
)
def test_cells(values: tuple[float, ...], column: seeds.Column, worst_first: bool, text: str) -> None:
    assert seeds.cell(values, column, worst_first) == text


def point(ttft: float, tokens: float, tbt: float = 0.1, **more: float) -> dict[str, float]:
    return {"ttft_p99_s": ttft, "tokens_per_s": tokens, "tbt_p99_s": tbt, **more}


def test_a_seed_is_compared_with_the_same_seed() -> None:
    """Medians of quotients, not a quotient of medians; a seed without ideal has none, a policy not run no line."""
    points = {
        "r0": point(90.0, 100.0),
        "r1": point(10.0, 200.0),
        "r2": point(50.0, 100.0),
        "x0": point(46.0, 150.0, 0.3),
        "x1": point(8.0, 202.0, 0.1, goodput_per_s=1.5),
        "x2": point(9.0, 100.0),
        "i0": point(2.0, 200.0),
        "i1": point(2.0, 204.0),
    }
    policies = {"recompute": "r", "x": "x", "none": "n", "ideal": "i"}
    line = seeds.Line(("a",), {policy: [f"{letter}{seed}" for seed in range(3)] for policy, letter in policies.items()})
    rows = seeds.table(points, ("load",), [line], (*seeds.AGAINST, seeds.GOODPUT)).splitlines()
    assert rows[0] == (
        "| load | policy | n | gap closed, TTFT P99 | gap closed, tokens/s | TBT P99 / ideal's | goodput, requests/s |"
    )
    assert rows[2:] == [
        "| a | recompute | 3 | 0 % (2 of 3 seeds) | 0 % (1 of 3 seeds) | 1 (2 of 3 seeds) | – |",
        "| a | x | 3 | 38 % (25 % to 50 %; 2 of 3 seeds) | 50 % (1 of 3 seeds) | 2 (1 to 3; 2 of 3 seeds) | "
        "1.5 (1 of 3 seeds) |",
        "| a | ideal | 2 | 100 % | 100 % (1 of 2 seeds) | 1 | – |",
    ]


def test_what_is_run() -> None:
    """Every cell is a setup that all policies run on, and five seeds of 400 requests; who is awake alone runs in turns."""
    assert (gap.SETTINGS.requests, gap.SETTINGS.seeds) == (400, 5)
    alternatives, ours = (
        ("recompute", "pie", "sleep+swap", "kv-pool+swap"),
        ("remap:weights", "remap:weights+swap", "remap"),
    )
    assert (*alternatives, *ours, "whole", "ideal") == gap.POLICIES
    assert [(cell.machine, cell.rate) for cell in gap.CELLS] == [
        *(("GH200-96GB", rate) for rate in (4.0, 6.0, 1.5)),
        *(("H100-PCIe", rate) for rate in (2.0, 4.0)),
        *(("RTX-4090", rate) for rate in (4.0, 8.0)),
    ]
    names = {cell.name(policy, 0) for cell in gap.CELLS for policy in gap.POLICIES}
    assert len(names) == len(gap.CELLS) * len(gap.POLICIES)
    for cell in gap.CELLS:
        assert (cell.panel.lengths, cell.panel.arrivals, cell.panel.quantum_s) == (("sharegpt",), "azure-code", 1.0)
        on = machine(cell.machine)
        setup = setup_of(cell.panel, on)
        assert setup.tenants == tenants(cell.panel.tenants, on)
        for policy in gap.POLICIES:
            fitting(setup, find(policy))
    (cell,) = gap.CELLS[:1]
    runs = Group((cell,), gap.POLICIES, epochs=True).runs(gap.QUICK)
    turns = [one.policy for one, _ in runs.values() if one.panel.sharing != "epochs" and one.seed == 0]
    assert turns == ["sleep+swap", "whole"]


def test_the_page_is_the_one_of_what_is_stored() -> None:
    data = json.loads(gap.RESULTS.read_text(encoding="utf-8"))
    page = gap.RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    assert gap.table(data) in page
    first = gap.quotients(data, "ttft_p99_s", "remap", "ideal")
    middles = [sorted(seeds)[2] for seeds in first]
    row = next(line for line in page.splitlines() if line.startswith("| TTFT P99 |"))
    said = f"{min(middles):.3g} to {max(middles):.3g} ({min(map(min, first)):.3g} to {max(map(max, first)):.3g})"
    assert row.split(" | ")[-1] == f"{said} |"
    weights = gap.quotients(data, "ttft_p99_s", "remap:weights", "kv-pool+swap")
    assert f"\n{sum(sorted(seeds)[2] > 1 for seeds in weights)} of the 7 loads" in page


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, path = Settings(requests=8, seeds=2), tmp_path / "gap.json"
    cells = [some(replace(cell, panel=replace(cell.panel, lengths=BRIEF)), cell) for cell in gap.CELLS[2:3]]
    page = gap.run_gap(path, settings, jobs=2, cells=cells)
    assert path.with_suffix(".md").read_text(encoding="utf-8") == page and "2 seeds of 8 requests" in page
    assert len([line for line in page.splitlines() if line.startswith("| GH200")]) == len(gap.POLICIES)
    kept = path.read_bytes()
    data = seeds.read(path, empty(settings), "gap")
    lost = cells[0].name("ideal", 1)
    del data["points"][lost]
    seeds.write(path, data)
    capsys.readouterr()
    assert gap.run_gap(path, settings, cells=cells) == page
    assert capsys.readouterr().err.split("\n")[:-1] == [lost] and path.read_bytes() == kept
    assert gap.run_gap(path, settings, report_only=True, cells=cells) == page
    other = gap.run_gap(path, Settings(requests=9, seeds=2), report_only=True, cells=cells)
    assert "| GH200" not in other and path.read_bytes() == kept  # other settings: nothing of it counts


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "not JSON"], ids=["deep", "empty", "text"])
def test_a_file_that_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    found = CliRunner().invoke(app, ["gap", "--report-only", "--results", str(path)])
    assert found.exit_code == 2 and "bench.lab gap" in " ".join(found.output.split())
    assert path.read_text() == text and not path.with_suffix(".md").exists()
