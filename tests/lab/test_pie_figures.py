"""`bench.lab pie`: what is run, what stands beside the paper's figures, and the file of a run."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from bench.lab import ROOT, headline, seeds
from bench.lab.commands import app
from bench.lab.paper.experiments import BASELINE, IDEAL, headlines, setup_of
from bench.lab.paper.runs import Run, Settings
from bench.lab.pie import command
from bench.lab.pie.figures import (
    ADAPTIVE,
    ALL,
    AT_ANY_TIME,
    CLAIMS,
    CLOSED,
    CLOSED_FORM,
    EXPANSIONS,
    FIGURES,
    FIXED,
    FLEXGEN,
    KV_ONLY,
    NOT_SIMULATED,
    PIE,
    Figure,
    Place,
    anytime_of,
    closed_form_of,
)
from bench.lab.pie_events import policy_of
from typer.testing import CliRunner

from remap.policy.hardware import machine
from remap_serve.sim.policies import find
from remap_serve.sim.serving import fitting

PLACES: dict[str, Place] = {f"{place[0].name} x{place[1]:g}": place for one in FIGURES for place in one.places}
TINY = Settings(requests=20, seeds=2)


def test_what_is_run() -> None:
    """The figures 6 to 9 of the paper, five seeds of at least 300 requests, on the machine that Pie measured."""
    assert command.SETTINGS.seeds == 5 and command.SETTINGS.requests >= 300
    on = machine(command.SETTINGS.machine)
    assert (on.h2d_bytes_per_s, on.d2h_bytes_per_s) == (419e9, 371e9)
    assert [one.number for one in FIGURES] == [6, 7, 8, 9, 6] and [one.shown for one in FIGURES] == [True] * 4 + [False]
    assert tuple(f"pie-events:{e}" for e in (1.2, 1.4, 1.6, 1.8, 2.0, 2.2)) == EXPANSIONS
    assert {*EXPANSIONS, *CLOSED, *AT_ANY_TIME, *ADAPTIVE} == set(ALL)
    assert (CLOSED[-1], AT_ANY_TIME[-1]) == ("pie:2.2", "pie-anytime:2.2")
    assert {BASELINE, PIE, "pie-anytime", CLOSED_FORM, KV_ONLY, "remap:weights+swap", IDEAL} == set(ADAPTIVE)
    for panel, _ in PLACES.values():
        setup = setup_of(panel, on)
        assert (panel.arrivals, setup.scheduler, len(setup.tenants)) == ("poisson", "prefill-first", 1)
        assert abs(panel.kv_bytes - setup.kv_blocks(setup.tenants[0]) * _block_bytes(setup)) < _block_bytes(setup)
        for policy in ALL:
            fitting(setup, policy_of(policy) or find(policy))


def _block_bytes(setup: object) -> int:
    return setup.block_tokens * setup.tenants[0].model.kv_bytes_per_token  # type: ignore[attr-defined, no-any-return]


def test_every_figure_of_the_paper_is_reckoned_from_what_is_run_or_left_out() -> None:
    run = {(*place, policy) for one in FIGURES for place in one.places for policy in one.policies}
    told = [one.headline for one in CLAIMS]
    assert sorted([*told, *NOT_SIMULATED, *FLEXGEN]) == sorted(
        name for name, one in headlines().items() if one.paper == "Pie"
    )
    for one in CLAIMS:
        seen: list[tuple[object, float, str]] = []

        def at(panel: object, factor: float, policy: str, seen: list[tuple[object, float, str]] = seen) -> seeds.Point:
            seen.append((panel, factor, policy))
            return dict.fromkeys((*command.KEPT, "before_first_s", "after_first_s"), 1.0)

        one.of(at, one.pie)
        one.of(at, tuple(map(closed_form_of, one.pie)))
        if one.ours:
            one.of(at, (KV_ONLY,))
        assert seen and set(seen) <= run, one.headline


@pytest.mark.parametrize(
    ("id", "pie", "ours"),
    [
        ("pie-01", 1.5, 1.2),
        ("pie-05", 1.8, None),
        ("pie-14", 4.0, 6.0),  # requests a second
        ("pie-15", 100 * (1 - 1.3 / 1.5), 100 * (1 - 1.2 / 1.5)),
        ("pie-16", 1.75, None),
        ("pie-17", 1.25, None),
        ("pie-18", 2.0, 1.6),
        ("pie-22", 75 * 16 * 2 * 48 * 7168 * 2 / 1e9, None),  # 75 blocks of OPT-30b, whose KV is the largest
    ],
)
def test_how_the_papers_figures_are_reckoned(id: str, pie: float, ours: float | None) -> None:
    fixed = {"1.2": 110.0, "1.4": 120.0, "1.6": 140.0, "1.8": 150.0, "2.0": 145.0, "2.2": 130.0}
    tokens = {BASELINE: 100.0, PIE: 130.0, KV_ONLY: 120.0, **{f"{PIE}:{e}": value for e, value in fixed.items()}}
    latency = {BASELINE: 0.08, PIE: 0.04, KV_ONLY: 0.05, f"{PIE}:2.0": 0.04, f"{PIE}:2.2": 0.05}

    def at(panel: object, factor: float, policy: str) -> seeds.Point:
        gains = {PIE: 2.0, KV_ONLY: 3.0}  # a gain from this factor on
        found = 100.0 if id == "pie-14" and factor < gains.get(policy, 0.0) else tokens[policy]
        late = latency.get(policy, 0.0)
        return {
            "tokens_per_s": found,
            "rate": 2.0 * factor,
            "kv_blocks_start": 100,
            "kv_blocks_peak": 175,
            "before_first_s": 0.75 * late,
            "after_first_s": 0.25 * late,
        }

    (one,) = (one for one in CLAIMS if one.headline == id)
    assert one.of(at, one.pie) == pytest.approx(pie)
    assert one.ours == (ours is not None)
    if ours is not None:
        assert one.of(at, (KV_ONLY,)) == pytest.approx(ours)


def test_an_expansion_of_1_is_recompute_and_bytes_are_of_both_ways() -> None:
    panel, factor = FIGURES[3].places[0]
    found = {
        policy: command.run_point(Run(panel, policy, "", 8.0 * factor, 0), Settings(requests=60))
        for policy in (BASELINE, "pie:1", "pie:1.6", "pie-events:1.6", KV_ONLY)
    }
    assert found["pie:1"] == found[BASELINE] and found[BASELINE]["out_gb"] == found[BASELINE]["in_gb"] == 0
    assert found["pie:1.6"]["out_gb"] == found["pie:1.6"]["in_gb"] > 0
    out, into = found["pie-events:1.6"]["out_gb"], found["pie-events:1.6"]["in_gb"]
    assert out == pytest.approx(into, rel=0.01) and out > found["pie:1.6"]["out_gb"]
    assert 0 < found[KV_ONLY]["out_gb"] < found[KV_ONLY]["in_gb"]  # each block once, and in again in each pass
    assert all(one["requests_finished"] == one["requests"] == 60 for one in found.values())


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    panel, factor = FIGURES[3].places[0]
    wanted = (Figure(8, "two rates", ((panel, 1.0), (panel, factor)), (BASELINE, PIE, KV_ONLY)), FIGURES[3])
    path = tmp_path / "pie.json"
    page = command.run_pie(path, TINY, wanted=wanted)
    assert path.with_suffix(".md").read_text(encoding="utf-8") == page and "2 seeds of 20 requests" in page
    data = json.loads(path.read_text(encoding="utf-8"))
    assert set(data) == {"settings", "c", "points"} and data["settings"] == TINY.to_json()
    assert set(data["c"]) == {panel.name} and data["c"][panel.name] > 0
    names = {
        headline.name_of(panel, x, policy, seed)
        for x, policies in ((1.0, wanted[0].policies), (factor, FIXED))
        for policy in policies
        for seed in range(2)
    }
    assert set(data["points"]) == names
    figures = {*command.KEPT, "before_first_s", "after_first_s", "out_gb", "in_gb"}
    for point in data["points"].values():
        assert set(point) == figures and all(math.isfinite(value) and value >= 0 for value in point.values())
    rows = [line for line in page.splitlines() if line.startswith(f"| {panel.name}")]
    shown = len(FIXED) - len(CLOSED)
    assert len(rows) == 2 + shown + 6 + 1  # Figure 8, Figure 9, the readings, what is copied
    kept = path.read_bytes()
    lost = headline.name_of(panel, factor, IDEAL, 1)
    del data["points"][lost]
    seeds.write(path, data)
    capsys.readouterr()
    assert command.run_pie(path, TINY, wanted=wanted) == page
    assert capsys.readouterr().err.split("\n")[:-1] == [lost] and path.read_bytes() == kept
    other = command.run_pie(path, replace(TINY, requests=21), report_only=True, wanted=wanted)
    assert "requests" in other and path.read_bytes() == kept  # other settings: nothing of it counts


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "not JSON"], ids=["deep", "empty", "text"])
def test_a_file_that_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    found = CliRunner().invoke(app, ["pie", "--report-only", "--results", str(path)])
    assert found.exit_code == 2 and "bench.lab pie" in " ".join(found.output.split())
    assert path.read_text() == text and not path.with_suffix(".md").exists()


def test_what_is_stored_is_whole_and_is_what_the_page_says() -> None:
    stored = json.loads(command.RESULTS.read_text(encoding="utf-8"))
    assert stored["settings"] == command.SETTINGS.to_json()
    names = {
        headline.name_of(*place, policy, seed)
        for one in FIGURES
        for place in one.places
        for policy in one.policies
        for seed in range(command.SETTINGS.seeds)
    }
    assert set(stored["points"]) == names
    assert all(point["requests_finished"] == point["requests"] for point in stored["points"].values())
    assert command.page(stored) == command.RESULTS.with_suffix(".md").read_text(encoding="utf-8")


def test_what_the_words_say_is_what_is_stored() -> None:
    """Of the page, what is no number: those are made of the stored runs. And the table of docs/notes/results.md."""
    data = json.loads(command.RESULTS.read_text(encoding="utf-8"))
    stored, said = data["points"], command.words(data)
    assert said and said in command.page(data)

    def over(policy: str, base: str, place: Place, figure: str = "tokens_per_s") -> float:
        """The median of the seeds."""
        return statistics.median(
            stored[headline.name_of(*place, policy, seed)][figure]
            / stored[headline.name_of(*place, base, seed)][figure]
            for seed in range(command.SETTINGS.seeds)
        )

    for one in FIGURES:
        for place in one.places:
            for policy in set(one.policies) & {*EXPANSIONS, PIE}:  # "gains less than in closed form"
                assert over(policy, closed_form_of(policy), place) < 1, (place[0].name, policy)
    for place in FIGURES[-1].places:  # "most of that is when copies may begin": at the expansions where they bind
        for policy in EXPANSIONS[-2:]:
            lost = 1 - over(policy, closed_form_of(policy), place)
            assert 1 - over(anytime_of(policy), closed_form_of(policy), place) < 0.65 * lost, (place[0].name, policy)
    late = [over(PIE, CLOSED_FORM, place, "ttft_p99_s") for place in PLACES.values() if place[1] == 1.0]
    assert min(late) > 10
    behind = [over(PIE, BASELINE, place) for place in PLACES.values() if "KV 12 GB" in place[0].name]
    assert len(behind) == 2 and max(behind) < 1
    text = (ROOT / "docs/notes/results.md").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("| OPT-30b, ShareGPT | "))
    for policy, cell in zip(
        (BASELINE, PIE, KV_ONLY, "remap:weights+swap"), line.strip("|").split("|")[1:], strict=True
    ):
        values = [
            stored[headline.name_of(*PLACES["OPT-30b ShareGPT, KV 3 GB x3"], policy, seed)]["tokens_per_s"]
            for seed in range(command.SETTINGS.seeds)
        ]
        assert cell.strip() == seeds.cell(values, command.TOKENS)
