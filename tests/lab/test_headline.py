"""The simulated headline: docs/notes/results.md and bench/results/headline.md say what was stored; a seed can be run again."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from bench.lab import ROOT, headline, seeds
from effort import BRIEF, some

STORED = json.loads(headline.RESULTS.read_text(encoding="utf-8"))


def test_the_pages_say_what_is_stored() -> None:
    table = headline.table(STORED)
    assert table in headline.RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    results = (ROOT / "docs/notes/results.md").read_text(encoding="utf-8")
    for load, factor, rows in (("C1", 0.5, 4), ("C1", 0.85, 4), ("C2", 0.85, 4)):
        lines = [line for line in table.splitlines() if line.startswith(f"| {load} ShareGPT | {factor:g} c")]
        lines = [line for line in lines if "| ideal |" not in line]
        assert len(lines) == rows
        for line in lines:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            for said in (cells[4], cells[9], cells[10]):  # preemptions, TPOT and tokens/s are written alike
                assert f"| {said} |" in results, (line, said)


def test_the_results_have_the_medians_and_ranges_of_three_models_at_half_the_rate() -> None:
    lines = (ROOT / "docs/notes/results.md").read_text(encoding="utf-8").splitlines()
    (row,) = (line for line in lines if line.startswith("| three models in turns | simulated"))
    told = []
    for figure, unit in (("ttft_p99_s", "s"), ("tbt_p99_s", "ms")):
        (column,) = (one for one in headline.COLUMNS if one.key == figure)
        for policy in ("recompute", "remap"):
            names = [headline.name_of(headline.PANELS[0], 0.5, policy, seed) for seed in range(headline.SETTINGS.seeds)]
            middle, _, ends = seeds.cell([STORED["points"][name][figure] for name in names], column).partition(" ")
            told.append(f"{middle} {unit} {ends}")
    assert [row.count(f"{first} to {second}") for first, second in zip(told[::2], told[1::2])] == [1, 1]


def test_what_the_words_say_is_what_is_stored() -> None:
    """Medians of the default over those of others; docs/notes/results.md: first tokens "31, 48 and 5.4 times as soon", "9.2,
    19 and 3.6 times"."""

    def ratios(figure: str, other: str = "recompute") -> dict[tuple[str, float], float]:
        found = {}
        for panel in headline.PANELS:
            for factor in headline.FACTORS:
                base, ours = (
                    statistics.median(
                        STORED["points"][headline.name_of(panel, factor, policy, seed)][figure]
                        for seed in range(headline.SETTINGS.seeds)
                    )
                    for policy in (other, "remap")
                )
                found[panel.name, factor] = ours / base
        return found

    sooner = {load: 1 / ratio for load, ratio in ratios("ttft_p99_s").items()}
    assert len(sooner) == 8
    c1, c2 = ([sooner[load] for load in sooner if name in load[0]] for name in ("C1", "C2"))
    assert [round(end(c1)) for end in (min, max)] == [31, 56]
    assert [round(end(c2), 1) for end in (min, max)] == [5.4, 5.8]
    far = ratios("ttft_p99_s", "ideal")
    assert max(far[load] for load in far if "C1" in load[0]) < 1.03
    assert [round(end(far[load] for load in far if "C2" in load[0])) for end in (min, max)] == [47, 63]
    told = (("C1 ShareGPT", 0.5), ("C1 ShareGPT", 0.85), ("C2 ShareGPT", 0.85))
    assert [round(sooner[load], 1 if sooner[load] < 10 else None) for load in told] == [31, 48, 5.4]
    tpot = [1 - ratio for ratio in ratios("tpot_p99_s").values()]
    assert [round(100 * end(tpot)) for end in (min, max)] == [5, 44]
    oftener = ratios("preemptions")
    assert sum(ratio > 1 for ratio in oftener.values()) == 4 and 1.75 < max(oftener.values()) < 1.85
    longer = ratios("tbt_p99_s")
    assert sum(ratio > 1 for ratio in longer.values()) == 6 and 0.925 < longer["C2 ShareGPT", 0.5] < 0.935
    assert 3.0 < max(longer.values()) == longer["C1 ShareGPT", 0.7] < 3.1
    assert 1.125 < max(ratios("tbt_p50_s").values()) < 1.135
    assert 1.155 < max(ratios("tokens_per_s").values()) < 1.165
    names = [headline.name_of(headline.PANELS[0], 1.0, "remap", seed) for seed in range(headline.SETTINGS.seeds)]
    assert 28.5 < max(STORED["points"][name]["ttft_p99_s"] for name in names) < 29.5
    # What weights add: the default against what leaves them where they are.
    added = {load: 1 / ratio for load, ratio in ratios("ttft_p99_s", "kv-pool+swap").items()}
    assert [round(added[load], 1 if added[load] < 10 else None) for load in told] == [9.2, 19, 3.6]
    for name, ends in (("C1", [9, 21]), ("C2", [3.6, 4.0])):
        found = [added[load] for load in added if name in load[0]]
        assert [round(end(found), 0 if name == "C1" else 1) for end in (min, max)] == ends
    slower = ratios("tpot_p99_s", "kv-pool+swap")
    near = sorted(load for load, ratio in slower.items() if ratio > 0.97)
    assert near == [("C1 ShareGPT", 0.5), ("C1 ShareGPT", 0.85)] and max(slower.values()) < 1.035
    shorter = [1 - ratio for load, ratio in slower.items() if load not in near]
    assert [round(100 * end(shorter)) for end in (min, max)] == [5, 31]
    more = ratios("preemptions", "kv-pool+swap").values()
    assert [round(end(more), 1) for end in (min, max)] == [2.2, 8.4]
    gaps = ratios("tbt_p99_s", "kv-pool+swap")
    assert 4.25 < max(gaps.values()) == gaps["C2 ShareGPT", 1.0] < 4.35


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is stored is not run again, and a line is the median of its seeds with their range."""
    settings, path = replace(headline.SETTINGS, requests=8, seeds=3), tmp_path / "found.json"
    panels = [some(replace(panel, lengths=BRIEF), panel) for panel in headline.PANELS[:1]]
    first = headline.read(path, settings)
    headline.run_missing(first, settings, path, 1, panels, (1.0,))
    names = [headline.name_of(panels[0], 1.0, "remap", seed) for seed in range(3)]
    again = headline.read(path, settings)
    del again["points"][names[1]]
    capsys.readouterr()
    headline.run_missing(again, settings, path, 1, panels, (1.0,))
    assert capsys.readouterr().err.split("\n")[:-1] == [names[1]]
    assert headline.read(path, settings)["points"] == first["points"]
    assert headline.read(path, replace(settings, requests=9))["points"] == {}
    middle = statistics.median(first["points"][name]["tokens_per_s"] for name in names)
    cells = headline.table(again, panels, (1.0,)).splitlines()[-2].split("|")  # the last one is ideal's
    assert cells[4].strip() == "3" and f"{middle:.3g}" in "|".join(cells).replace(",", "")
