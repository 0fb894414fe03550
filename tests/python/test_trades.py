"""`bench.lab trades`: which targets and turns are run, that a stopped run goes on, and what the page says of what is stored."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bench.lab import seeds, trades
from bench.lab.gap import empty
from bench.lab.paper.experiments import setup_of
from bench.lab.paper.runs import Settings

from remap.sim.hardware import machine
from remap.sim.policies import find
from remap.sim.serving import fitting

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


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With turns that drain, too."""
    settings, path = Settings(requests=20, seeds=2), tmp_path / "trades.json"
    groups = (
        trades.Group(trades.TARGETS.cells[:1], ("remap", "remap:tbt_s=0.012")),
        trades.Group(trades.TURNS.cells[5:6], ("remap",)),
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
