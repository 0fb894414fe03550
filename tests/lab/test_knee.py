"""`bench.lab knee`: what is run, what counts as a wait for a turn, and the page of what is stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.lab.paper import knee
from bench.lab.paper.experiments import setup_of
from bench.lab.paper.knee import FULL, QUICK, RESULTS, VARIANTS, changed, page, run_knee

from remap.errors import InvalidArgument
from remap.policy.hardware import machine


def test_variants_change_the_kv_and_the_time_between_passes() -> None:
    setup = setup_of(FULL.panels[0], machine("GH200-96GB"))
    whole, half, quarter, five, eight = (changed(setup, variant) for variant in VARIANTS)
    assert whole == setup and (five.gap, eight.gap) == (5e-3, 8e-3) and 0.0 < setup.gap < 5e-3
    for one in setup.tenants:
        blocks = [
            each.kv_blocks(next(t for t in each.tenants if t.name == one.name)) for each in (whole, half, quarter)
        ]
        assert blocks == [setup.kv_blocks(one), round(0.5 * blocks[0]), round(0.25 * blocks[0])]


def test_a_wait_is_a_gap_of_half_a_turn_or_more() -> None:
    """Three models in turns, and few requests: P99 is a wait where there are more of them than one in a hundred."""
    panel, variant = QUICK.panels[0], QUICK.variants[0]
    points = [knee.run(panel, variant, policy, 0, QUICK.settings) for policy in knee.POLICIES]
    for one in points:
        assert 0.0 <= one["waits"] < 0.2
        assert one["tbt_p50_s"] <= one["tbt_p98_s"] <= one["tbt_p99_s"] <= one["tbt_p99.5_s"]
        for key, share in (("tbt_p98_s", 0.02), ("tbt_p99_s", 0.01), ("tbt_p99.5_s", 0.005)):
            assert (one[key] >= 0.5) == (one["waits"] >= share) or abs(one["waits"] - share) < 1e-3
    assert knee.run(panel, variant, knee.POLICIES[0], 0, QUICK.settings) == points[0]


def test_the_files_of_a_run(tmp_path: Path) -> None:
    results = tmp_path / "knee.json"
    text = run_knee(results, QUICK)
    assert set(json.loads(results.read_text())["points"]) == set(QUICK.runs())
    assert text == results.with_suffix(".md").read_text() and run_knee(results, QUICK, report_only=True) == text
    assert text.count("| C1 ShareGPT |") == len(QUICK.variants) * (len(knee.POLICIES) + 1)
    results.write_text("[]")
    with pytest.raises(InvalidArgument):
        run_knee(results, QUICK)


def test_the_page_is_what_is_stored() -> None:
    points = json.loads(RESULTS.read_text(encoding="utf-8"))["points"]
    assert set(points) <= set(FULL.runs())
    text = page(points)
    assert text == RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    assert all(f"| {panel.name} | {variant.name} |" in text for panel in FULL.panels for variant in VARIANTS)
