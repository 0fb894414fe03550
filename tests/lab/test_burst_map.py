"""`bench.lab kunserve-map`: what is run, where a load lies on the map, and the files of a run."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from bench.lab.kunserve import burst_map
from bench.lab.kunserve.burst_map import (
    CLAIMED,
    COMPARED,
    FULL,
    PAPERS,
    PICTURE,
    QUICK,
    RESULTS,
    BurstMap,
    Place,
    claimed_at,
    compared_table,
    done,
    little,
    most_share,
    picture,
    place,
    places_of,
    table,
)
from bench.lab.kunserve.burst_page import edge, page, run_burst_map, said, steady
from bench.lab.kunserve.figures import SETUPS, Settings, Setup, name_of
from bench.lab.kunserve.twin.loads import LENGTHS, bursts
from bench.lab.kunserve.twin.results import Sample
from bench.lab.kunserve.twin.setup import CLUSTER_A
from bench.lab.kunserve.twin.systems import SYSTEMS

from remap.errors import InvalidArgument
from remap_serve.sim.workload import Item

LOAD = QUICK.loads[0]


def test_what_is_run() -> None:
    """Every load under all systems, or under the bound alone where `bench.lab kunserve` has stored the others."""
    names = list(FULL.runs())
    others = len(FULL.loads) - len(FULL.stored) + len(FULL.shapes) + len(FULL.dispatched)
    compared = sum(len(systems) for _, systems in FULL.compared)
    assert len(names) == FULL.settings.seeds * (len(FULL.stored) + 4 * others + compared)
    assert all(("ahead" in name) or (": ideal #" in name) or name.split(": ")[0] not in FULL.stored for name in names)
    assert {system for _, systems in FULL.compared for system in systems} <= set(COMPARED) <= set(SYSTEMS)
    assert set(FULL.stored) <= set(SETUPS) and FULL.settings.seeds == 5
    assert [name[-1] for name in names] == sorted(name[-1] for name in names)  # seed by seed


def test_answers_are_longer_and_prompts_are_not() -> None:
    same, long = (bursts("burstgpt", 50.0, 200.0, 0, longer=longer) for longer in (1.0, 4.0))
    assert [one.prompt_tokens for one in same] == [one.prompt_tokens for one in long]
    means = [sum(one.output_tokens for one in items) / len(items) for items in (same, long)]
    assert means[1] / means[0] == pytest.approx(4.0, rel=0.01)
    assert same == bursts("burstgpt", 50.0, 200.0, 0) and LENGTHS["burstgpt"].output.draw


def test_bursts_of_other_lengths_bring_as_many_requests() -> None:
    plain, ten, seven, three, long, two, *_ = (len(one.requests(0)) for one in (FULL.loads[5], *FULL.shapes))
    assert abs(seven / plain - 1) < 0.05 and abs(three / plain - 1) < 0.05 and ten < 0.8 * plain < long < two
    by_demand, in_turn = FULL.dispatched
    assert by_demand.requests(0) == in_turn.requests(0) == FULL.loads[5].requests(0)


def test_what_the_papers_own_numbers_would_ask_of_its_devices() -> None:
    """As a formula: what is held in 11 s at that rate is the KV over 2.1, and work is what that many prompts and tokens take."""
    load = SETUPS[PAPERS[0]]
    rate, busy = little()
    held = sum(one.prompt_tokens + one.output_tokens / 2 for one in load.requests(0)) / len(load.requests(0))
    assert rate * 11.0 * held * 2.1 == pytest.approx(8 * CLUSTER_A.capacity)
    assert little(stay_s=22.0) == pytest.approx((rate / 2, busy / 2)) and busy > 1.0
    assert 1.4 < most_share(CLUSTER_A) < 1.5


def sample(time_s: float, prompts: int, generated: int) -> Sample:
    return Sample(time_s, 1, 0, 0, 0, 0, generated, prompts, 8, 1)


def test_work_is_what_was_done_within_the_burst() -> None:
    """Of prompts and of tokens that came in it, on eight instances; whatever came before and after."""
    items = [Item("all", 5.0 + n, 2_000, 100) for n in range(10)]
    samples = [sample(0.0, 0, 0), sample(5.0, 9_000, 70), sample(15.0, 29_000, 70), sample(20.0, 50_000, 900)]
    prompts = 10 * CLUSTER_A.prompt_s(2_000) / (10.0 * 8)
    assert done(CLUSTER_A, items, samples, 5.0, 15.0) == pytest.approx(prompts)
    samples[2] = sample(15.0, 9_000, 10_070)
    row_s = done(CLUSTER_A, items, samples, 5.0, 15.0) * 80.0 / 10_000
    flop_s = 2 * 14e9 / CLUSTER_A.machine.flops  # of its multiplications with the weights alone
    assert flop_s < row_s < 6 * flop_s


def made(seeds: int = 2) -> dict[str, dict[str, float]]:
    p99 = {"vllm": 60.0, "kunserve": 6.0, "remap": 3.0, "ideal": 2.0}
    return {
        name_of(LOAD.name, system, seed): {"ttft_p99_s": value * (1 + seed), "peak_share": 1.2, "work_share": 0.5}
        for seed in range(seeds)
        for system, value in p99.items()
    }


def test_a_place_is_of_the_seeds_that_are_whole() -> None:
    points = made()
    found = place(points, LOAD, Settings(seeds=3))
    assert found is not None and (found.peak, found.work) == (1.2, 0.5)
    assert found.base_s == [60.0, 120.0] and found.times == {
        "kunserve": [10.0] * 2,
        "remap": [20.0] * 2,
        "ideal": [30.0] * 2,
    }
    assert f"| {LOAD.name} | 2 | 1.20 | 50 | 90 (60 to 120) | 10 | 20 | 30 |" in table([found])
    del points[name_of(LOAD.name, "ideal", 0)]
    found = place(points, LOAD, Settings(seeds=3))
    assert found is not None and found.base_s == [120.0]
    assert place({}, LOAD, Settings()) is None


def test_the_picture_has_a_dot_for_each_load() -> None:
    found = place(made(), LOAD, Settings(seeds=2))
    assert found is not None
    other = replace(found, peak=1.9, work=0.7)
    axes = picture([found]).axes[:3]
    assert [len(axis.collections) for axis in picture([found], [other]).axes[:3]] == [2] * 3  # and no box of the paper
    assert claimed_at([replace(found, times={**found.times, "kunserve": [20.0]}), found]) == [0.5]
    assert [axis.get_title(loc="left") for axis in axes] == ["kunserve", "remap", "ideal"]
    (dots,) = (one for one in axes[1].collections if len(one.get_offsets()))
    assert dots.get_offsets().tolist() == [[1.2, 50.0]] and list(dots.get_array()) == [20.0]


def test_the_files_of_a_run(tmp_path: Path) -> None:
    small = BurstMap(Settings(seeds=1, quick=True), QUICK.loads[:1])
    results, drawing = tmp_path / "kunserve-map.json", tmp_path / "kunserve-map.svg"
    text = run_burst_map(results, drawing, small)
    stored = json.loads(results.read_text())
    assert set(stored["points"]) == set(small.runs())
    assert all(one["answered"] == one["requests"] for one in stored["points"].values())
    assert f"| {LOAD.name} | 1 |" in text and "](kunserve-map.svg)" in text and drawing.exists()
    assert run_burst_map(results, drawing, small) == text  # nothing is run twice
    results.write_text("[]")
    with pytest.raises(InvalidArgument):
        run_burst_map(results, drawing, small)


def test_what_follows_is_told_of_loads_that_reach_the_paper_and_of_those_that_do_not() -> None:
    def at(load: Setup, times: float, work: float) -> Place:
        return Place(load, 1.2, work, [10.0], {"kunserve": [times], "remap": [2 * times], "ideal": [3 * times]})

    of_paper, *longer = FULL.loads[0], *FULL.loads[-2:]
    text = " ".join(said([at(of_paper, 1.5, 0.9), at(longer[0], 20.0, 0.8), at(longer[1], 4.0, 0.97)]).split())
    assert "90 % busy; six times the KV brings 4.5 times" in text and "in 1 of 2 loads" in text
    assert "20 times" in text and "In the other (97 % busy) seeds differ: `kunserve` 4, `remap` 8." in text
    assert "In the other" not in said([at(of_paper, 1.5, 0.9), at(longer[0], 20.0, 0.8)])
    assert said([at(longer[0], 20.0, 0.8)]) == ""


def test_long_runs_are_told_by_whether_dropping_frees_what_they_ask_for() -> None:
    _, points = burst_map.read(RESULTS, FULL)
    shapes = places_of(points, FULL, FULL.shapes)
    high, *others = sorted((one for one in shapes if len(one.load.at) > 1), key=lambda one: -one.load.rate)
    most = most_share(CLUSTER_A)
    assert high.peak > most > max(one.peak for one in others) and min(one.peak for one in others) > 1.0
    text = " ".join(steady(shapes, points, FULL).split())
    assert all(f"at {one.load.rate:g}/s, {one.peak:.2f} times the KV" in text for one in others)
    # What the last sentence says: beyond the edge they are gone, and below it with a seed.
    below, above = sorted(others, key=lambda one: one.peak)
    for system in ("kunserve", "remap"):
        assert statistics.median(below.times[system]) > CLAIMED[0] > statistics.median(above.times[system])
        assert min(below.times[system]) < 1.0
    assert steady([high], points, FULL) == ""
    assert all("x4" in one.load.name for one in (high, below, above))
    medians = [statistics.median(one.times["kunserve"]) for one in (below, above, high)]
    said_times = "{:.2g}, {:.2g} and {:.2g} times".format(*medians)
    assert said_times in " ".join(edge(shapes).split())


def test_the_page_is_what_is_stored() -> None:
    """So many seeds of each load as have been run: one at least of the map's own; the page names the others."""
    data, points = burst_map.read(RESULTS, FULL)
    assert set(data["points"]) <= set(FULL.runs()) and PICTURE.exists()
    text, places, shapes = page(points, FULL, "pictures/kunserve-map.svg")
    assert [one.load for one in places] == list(FULL.loads)
    assert all(f'"{load.name}"' in text or load in [one.load for one in shapes] for load in FULL.shapes)
    for load, _ in FULL.compared[
        :-2
    ]:  # of a demand that can be freed: with the forecast no seed is worse than the bound's worst
        worst = [
            max(points[name_of(load.name, system, seed)]["ttft_p99_s"] for seed in range(5))
            for system in ("remap-ahead", "ideal", "remap")
        ]
        assert worst == sorted(worst)
    lines = compared_table(points, FULL).splitlines()
    assert len(lines) > 2 and all(line.count("|") == 9 for line in lines)
    assert text == RESULTS.with_suffix(".md").read_text(encoding="utf-8")
