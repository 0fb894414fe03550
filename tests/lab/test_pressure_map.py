"""`bench.lab map`: what is run, what a gain is, and that page and picture are those of what is stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from bench.lab import pressure_map, seeds
from bench.lab.paper.experiments import Panel, setup_of
from bench.lab.paper.runs import Settings
from bench.lab.pressure_map import FULL, Grid, gains
from effort import BRIEF, some

from remap.policy.hardware import machine
from remap_serve.sim.policies import find
from remap_serve.sim.serving import fitting


class Small(Grid):
    def panel(self, models: int, link: float) -> Panel:
        panel = super().panel(models, link)
        return some(replace(panel, lengths=BRIEF), panel)


SMALL = Small(Settings(requests=8, seeds=2), models=(1, 2), links=(25e9, 450e9), rates=(0.6,))


def test_what_is_run() -> None:
    """Equal models on one machine, five seeds; only the link differs."""
    assert (FULL.settings.requests, FULL.settings.seeds, FULL.models) == (400, 5, (1, 2, 4))
    for models in FULL.models:
        for link in FULL.links:
            setup = setup_of(FULL.panel(models, link), machine(FULL.settings.machine))
            assert len(setup.tenants) == models and {one.memory_bytes for one in setup.tenants} == {
                setup.tenants[0].memory_bytes
            }
            assert setup.machine.h2d_bytes_per_s == setup.machine.d2h_bytes_per_s == link
            assert setup.machine.hbm_bytes_per_s == machine(FULL.settings.machine).hbm_bytes_per_s
            for policy in ("recompute", "kv-pool+swap", "remap"):
                fitting(setup, find(policy))


def test_a_gain_is_the_alternatives_figure_over_ours_and_none_where_nobody_notices() -> None:
    points = {}
    for seed, (other, ours) in enumerate([(3.0, 1.5), (0.04, 0.01)]):
        for policy, value in (("kv-pool+swap", other), ("remap", ours)):
            points[SMALL.name(2, 25e9, 0.6, policy, seed)] = {"ttft_p99_s": value, "virtual_s": value}
    data = {"points": points}
    assert gains(data, SMALL, 2, 25e9, 0.6, "ttft_p99_s") == [2.0, 1.0]
    assert gains(data, SMALL, 2, 25e9, 0.6, "virtual_s") == [2.0, pytest.approx(4.0)]
    assert gains(data, SMALL, 1, 25e9, 0.6, "ttft_p99_s") == []


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, drawing = tmp_path / "map.json", tmp_path / "map.svg"
    page = pressure_map.run_map(path, drawing, SMALL)
    assert path.with_suffix(".md").read_text(encoding="utf-8") == page and "8 requests, 2" in page
    assert len([line for line in page.splitlines() if line.startswith(("| 1 |", "| 2 |"))]) == 3 * 2 * (1 + 2)
    kept, drawn, lost = path.read_bytes(), drawing.read_bytes(), SMALL.name(2, 25e9, 0.6, "remap", 1)
    data = seeds.read(path, pressure_map.empty(SMALL), "map")
    del data["points"][lost]
    seeds.write(path, data)
    capsys.readouterr()
    assert pressure_map.run_map(path, drawing, SMALL) == page
    assert capsys.readouterr().err.split("\n")[:-1] == [lost]
    assert path.read_bytes() == kept and drawing.read_bytes() == drawn


def test_the_page_is_the_one_of_what_is_stored() -> None:
    data = json.loads(pressure_map.RESULTS.read_text(encoding="utf-8"))
    page = pressure_map.RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    for figure in ("ttft_p99_s", "tpot_p99_s", "virtual_s"):
        assert pressure_map.table(data, FULL, figure) in page
    assert len(data["points"]) == 5 * len(FULL.models) * len(FULL.rates) * (2 * len(FULL.links) + 1)


def test_what_the_page_says_is_what_is_stored() -> None:
    data = json.loads(pressure_map.RESULTS.read_text(encoding="utf-8"))

    def middle(
        models: int, link: float, figure: str = "ttft_p99_s", rates: tuple[float, ...] = FULL.rates
    ) -> list[float]:
        return [median(gains(data, FULL, models, link, rate, figure)) for rate in rates]

    for link in FULL.links[:3]:
        assert middle(1, link) == pytest.approx([1.0] * 4)
    assert [round(end(middle(1, 450e9)), 1) for end in (min, max)] == [1.9, 2.8]
    two = [value for link in FULL.links[1:] for value in middle(2, link)]
    assert [round(end(two), 1 if end is min else 0) for end in (min, max)] == [3.9, 15]
    four = [value for link in FULL.links for value in middle(4, link)]
    assert four == pytest.approx([1.0] * 16, abs=0.025)
    assert round(1 / min(middle(2, 12.5e9, "tpot_p99_s")), 1) == 7.7
    assert round(100 - 100 * min(middle(2, 12.5e9, "virtual_s"))) == 6
    longer = [1 / value for value in middle(2, 25e9, "tpot_p99_s", (0.6, 1.0, 1.5))]
    assert [round(end(longer), 1) for end in (min, max)] == [2.2, 5.0]
