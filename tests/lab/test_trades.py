"""`bench.lab trades`: which targets and turns are run, that a stopped run goes on, and what the page says of what is stored."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median

import pytest
from bench.lab import seeds, trades
from bench.lab.cells import Cell, Group, empty
from bench.lab.paper.experiments import setup_of
from bench.lab.paper.runs import Settings

from remap.policy.hardware import machine
from remap_serve.sim.policies import find
from remap_serve.sim.serving import fitting

GROUPS = (trades.TARGETS, trades.TURNS)


def test_what_is_run() -> None:
    assert [find(policy).config.tbt_s for policy in trades.TARGETS.policies] == [
        *(None, None, 0.016, 0.014, 0.012, 0.012, 0.012, None)
    ]
    turns = [setup_of(cell.panel, machine(cell.machine)).quantum_s for cell in trades.TURNS.cells]
    assert turns == 2 * [0.25, 0.5, 1.0, 2.0, 4.0, math.inf]
    names = [cell.name(policy, 0) for group in GROUPS for cell in group.cells for policy in group.policies]
    assert len(set(names)) == len(names)
    for group in GROUPS:
        for cell in group.cells:
            for policy in group.policies:
                fitting(setup_of(cell.panel, machine(cell.machine)), find(policy))


def test_what_the_page_says_is_what_is_stored() -> None:
    data = json.loads(trades.RESULTS.read_text(encoding="utf-8"))
    page = trades.RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    numbers = range(trades.SETTINGS.seeds)
    assert len(data["points"]) == len(numbers) * sum(len(group.cells) * len(group.policies) for group in GROUPS)

    def middle(cell: Cell, policy: str, figure: str) -> float:
        return median(data["points"][cell.name(policy, seed)][figure] for seed in numbers)

    longer, late, slow, lower, over = [], [], [], [], []
    for cell in trades.TARGETS.cells:
        assert round(1e3 * middle(cell, "remap", "tbt_p50_s"), 1) == 16.4
        assert round(1e3 * middle(cell, "remap:tbt_s=0.016", "tbt_p50_s"), 1) == 16.4
        for target in (0.014, 0.012):
            policy = f"remap:tbt_s={target:g}"
            longer.append(round(1e3 * middle(cell, policy, "tbt_p50_s"), 1))
            over.append((middle(cell, policy, "tbt_p50_s") - machine(cell.machine).iteration_gap_s) / target - 1)
            for figure, found in (("ttft_p99_s", late), ("tokens_per_s", slow), ("tbt_p99_s", lower)):
                found.append(round(100 * (middle(cell, policy, figure) / middle(cell, "remap", figure) - 1)))
    assert longer == [15.5, 14.7, 15.6, 14.8] and [round(100 * end(over)) for end in (min, max)] == [3, 15]
    assert (min(late), max(late), min(slow), max(slow), min(lower), max(lower)) == (12, 25, -10, -2, -24, -6)
    c1, small = trades.TURNS.cells[:6], trades.TURNS.cells[6:]
    for cell, first, gap in ((c1[0], "0.555", "550"), (c1[-1], "28.8", "25.3")):
        assert f"{middle(cell, 'remap', 'ttft_p99_s'):.3g}" == first
        assert f"{1e3 * middle(cell, 'remap', 'tbt_p99_s'):.3g}" == gap and first in page and gap in page
    good = [middle(cell, "remap", "goodput_per_s") for cell in c1]
    assert sorted(good, reverse=True) == good or max(good) in good[:2]
    worth = [middle(cell, "remap", "ttft_p99_s") / middle(cell, "ideal", "ttft_p99_s") for cell in (*c1, *small)]
    assert max(worth[:6]) < 1.03 and [round(100 * one - 100) for one in worth[6:10]] == [33, 52, 18, 11]
    tpot = [middle(cell, "remap", "tpot_p99_s") / middle(cell, "ideal", "tpot_p99_s") for cell in small[:3]]
    assert 1.7 < min(tpot) < 1.75 and 3.45 < max(tpot) < 3.5


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With turns that drain, too."""
    settings, path = Settings(requests=20, seeds=2), tmp_path / "trades.json"
    groups = (
        Group(trades.TARGETS.cells[:1], ("remap", "remap:tbt_s=0.012")),
        Group(trades.TURNS.cells[5:6], ("remap",)),
    )
    page = trades.run_trades(path, settings, groups=groups)
    lines = [line for line in page.splitlines() if line.startswith("| GH200")]
    assert len(lines) == 3 and "turns of inf s" in lines[-1]
    data = seeds.read(path, empty(settings), "trades")
    kept, lost = path.read_bytes(), trades.TURNS.cells[5].name("remap", 1)
    del data["points"][lost]
    seeds.write(path, data)
    capsys.readouterr()
    assert trades.run_trades(path, settings, groups=groups) == page
    assert capsys.readouterr().err.split("\n")[:-1] == [lost] and path.read_bytes() == kept
