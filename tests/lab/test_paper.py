"""The paper benchmark: its description is consistent, its reckoning is that of hand-made points, and it runs and resumes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from bench.lab import ROOT
from bench.lab.paper.arithmetic import arithmetic
from bench.lab.paper.experiment_list import EXPERIMENTS
from bench.lab.paper.experiments import (
    BASELINE,
    FACTORS,
    Experiment,
    Headline,
    Panel,
    Reckoning,
    check,
    headlines,
    select,
    setup_of,
)
from bench.lab.paper.pictures import picture, save
from bench.lab.paper.reckoning import METRICS, POINT, Points, Spread, compare, counts, curve, later_gaps, quantiles
from bench.lab.paper.report import markdown, rows, table, verdict
from bench.lab.paper.runs import Run, Settings, Store, keys_of, run_all, run_one

from remap.errors import InvalidArgument
from remap.policy.hardware import machine
from remap_serve.sim.results import PolicyResult, TenantResult

GH200, approx = machine("GH200-96GB"), pytest.approx


def test_every_headline_is_used_once_and_every_name_exists() -> None:
    assert check(EXPERIMENTS.values(), METRICS) == []
    assert [one.id for one in select(EXPERIMENTS, ["fig8*"])] == ["fig8-c1", "fig8-c2"]
    with pytest.raises(InvalidArgument, match="fig8-c1") as caught:
        select(EXPERIMENTS, ["fig99"])
    assert caught.value.value == "fig99"
    for experiment in EXPERIMENTS.values():  # nothing was run
        for one in experiment.reckonings:
            found = compare(Points(), headlines()[one.headline], one, experiment.panels_of(one), one.tests[0])
            assert found.value is None and not found.reached


def test_the_check_finds_what_is_wrong() -> None:
    first = EXPERIMENTS["fig8-c1"]
    wrong = dataclasses.replace(
        first,
        policies=(BASELINE,),
        reckonings=(*first.reckonings, Reckoning("oneiros-99", "nothing", panels=("nowhere",))),
    )
    said = "\n".join(check([wrong], METRICS))
    assert "no headline 'oneiros-99'" in said
    assert "metric='nothing'" in said
    assert "oneiros-04 compares policies that are not run" in said
    assert "oneiros-07 is not in use" in said and "pie-01" not in said  # Pie has a command of its own


@pytest.mark.parametrize(
    "panel", {p.name: p for e in EXPERIMENTS.values() for p in e.panels}.values(), ids=lambda p: p.name
)
def test_every_panel_has_a_setup(panel: Panel) -> None:
    setup = setup_of(panel, GH200)
    assert len(panel.shares) in (0, len(setup.tenants))
    assert len(panel.lengths) in (1, len(setup.tenants))


RUN = {"requests": 10, "requests_finished": 10, "arrive_s": 80.0, "virtual_s": 100.0, "tokens_per_s": 100.0}
TIMES = {"ttft_p99_s": 1.0, "tbt_p99_s": 1.0, "tbt_p50_s": 0.5}
KV = {"preemptions": 5, "kv_blocks_start": 100, "kv_blocks_peak": 100}


def point(rate: float, **figures: float) -> dict[str, float]:
    """A point of a run of 100 s in which requests came for 80 s."""
    return dict.fromkeys(POINT, 0.0) | RUN | TIMES | KV | {"rate": rate} | figures


A, B = Panel("A", "OPT-13b:35%", ("alpaca",)), Panel("B", "OPT-13b:35%", ("sharegpt",))


def made(*cells: tuple[Panel, str, str, dict[str, float]]) -> Points:
    points = Points()
    for panel, key, policy, one in cells:
        points.add(panel.name, key, policy, [*points.at(panel.name, key, policy), one])
    return points


def one_seed(value: float) -> Spread:
    return Spread(approx(value), approx(value), approx(value))


def headline(value: float | tuple[float, float], unit: str = "%") -> Headline:
    return Headline("h", "P", "Fig 0", "c", "m", value, unit, "quant")


def two_panels() -> Points:
    """Cuts of P99 TBT: 10 and 30 % at x0.5 (mean 20), 50 and 70 % at x1 (mean 60); at x0.1 nobody preempts."""
    cells = []
    for panel, low, high in ((A, 0.9, 0.5), (B, 0.7, 0.3)):
        for key, rate, value, preemptions in (("x0.1", 1.0, 0.2, 0), ("x0.5", 5.0, low, 5), ("x1", 10.0, high, 5)):
            cells.append((panel, key, BASELINE, point(rate, preemptions=preemptions)))
            cells.append((panel, key, "remap:weights", point(rate, tbt_p99_s=value, preemptions=0)))
    return made(*cells)


@pytest.mark.parametrize(
    ("paper", "value", "key", "reached"),
    [(15.0, 20.0, "x0.5", True), (40.0, 60.0, "x1", True), (75.0, 60.0, "x1", False)],
)
def test_the_lowest_rate_that_reaches_is_quoted_or_the_nearest(paper, value, key, reached) -> None:
    """The rate at which the baseline does not preempt is left out, although it would come out best."""
    points = two_panels()
    seen = curve(points, [A, B], "remap:weights", BASELINE, "tbt_p99_reduction")
    assert [(key, values[0]) for key, values in seen] == [("x0.1", 80.0), ("x0.5", approx(20.0)), ("x1", approx(60.0))]
    found = compare(points, headline(paper), Reckoning("h", "tbt_p99_reduction"), [A, B], "remap:weights")
    assert found.value is not None and found.mean is not None
    assert (found.value.median, found.key, found.reached) == (approx(value), key, reached)
    assert found.mean.median == approx(40.0) and found.rates == 2 and found.direction == "yes"
    assert found.at == (("A", 5.0 if key == "x0.5" else 10.0), ("B", 5.0 if key == "x0.5" else 10.0))


def test_a_panel_counts_only_where_the_baseline_preempts_and_up_to_takes_the_best() -> None:
    points = two_panels()
    found = compare(points, headline(65.0), Reckoning("h", "tbt_p99_reduction", how="most"), [A, B], "remap:weights")
    assert found.value == one_seed(70.0) and found.at == (("B", 10.0),) and found.reached
    for one in points.at("A", "x1", BASELINE):
        one["preemptions"] = 0
    found = compare(points, headline(99.0), Reckoning("h", "tbt_p99_reduction"), [A, B], "remap:weights")
    assert found.value == one_seed(70.0) and found.at == (("B", 10.0),)
    assert found.mean == one_seed((20.0 + 70.0) / 2) and (found.better, found.rates) == (2, 2)


def test_a_loss_at_most_rates_is_no_direction() -> None:
    rates = {"x1": (1.0, 90.0), "x2": (2.0, 40.0), "x3": (3.0, 106.0)}
    points = made(
        *((A, key, BASELINE, point(rate)) for key, (rate, _) in rates.items()),
        *((A, key, "pie", point(rate, tokens_per_s=served)) for key, (rate, served) in rates.items()),
    )
    found = compare(points, headline(20.0), Reckoning("h", "throughput_gain"), [A], "pie")
    assert (found.value, found.mean) == (one_seed(6.0), one_seed((-10.0 - 60.0 + 6.0) / 3))
    assert found.direction == "at some rates" and not found.reached


def seeds_of(cuts: dict[str, tuple[float, ...]], preemptions: tuple[float, ...] = (5, 5, 5, 5, 5)) -> Points:
    """By how many percent P99 TBT is lower: rate key -> one a seed."""
    cells = []
    for key, values in cuts.items():
        for value, number in zip(values, preemptions):
            cells.append((A, key, BASELINE, point(float(key[1:]), preemptions=number)))
            cells.append((A, key, "remap:weights", point(float(key[1:]), tbt_p99_s=1 - value / 100)))
    return made(*cells)


def test_the_median_of_the_seeds_chooses_the_rate_and_never_the_best_seed() -> None:
    """At x1 one seed reaches the paper's 50 %; at x2 the median does, and it is quoted with its range."""
    cuts = {
        "x1": (90.0, 10.0, 20.0, -30.0, 0.0),
        "x2": (10.0, 55.0, 60.0, 52.0, 70.0),
        "x3": (99.0, 0.0, 0.0, 0.0, 99.0),
    }
    found = compare(seeds_of(cuts), headline(50.0), Reckoning("h", "tbt_p99_reduction"), [A], "remap:weights")
    assert found.key == "x2" and found.reached
    assert found.value == Spread(approx(55.0), approx(10.0), approx(70.0))
    means = [sum(values) / 3 for values in zip(*cuts.values())]  # seed by seed
    assert found.mean == Spread(approx(sorted(means)[2]), approx(min(means)), approx(max(means)))
    assert (found.better, found.rates) == (2, 3)
    # Reached nowhere: the rate whose median comes nearest, although a seed elsewhere is nearer.
    found = compare(seeds_of(cuts), headline(95.0), Reckoning("h", "tbt_p99_reduction"), [A], "remap:weights")
    assert found.key == "x2" and not found.reached
    found = compare(
        seeds_of(cuts), headline(95.0), Reckoning("h", "tbt_p99_reduction", how="most"), [A], "remap:weights"
    )
    assert found.key == "x2" and not found.reached


@pytest.mark.parametrize(("preemptions", "counted"), [((5, 5, 5, 0, 0), True), ((5, 5, 0, 0, 0), False)])
def test_whether_a_rate_counts_is_up_to_the_median_seed(preemptions, counted) -> None:
    points = seeds_of({"x1": (50.0,) * 5}, preemptions)
    found = compare(points, headline(50.0), Reckoning("h", "tbt_p99_reduction"), [A], "remap:weights")
    assert (found.rates, counts(points.at("A", "x1", BASELINE))) == (int(counted), counted)


def test_about_zero_is_the_mean_from_saturation_on() -> None:
    points = seeds_of({"x0.5": (80.0,) * 5, "x1": (2.0, 3.0, 4.0, 5.0, 9.0), "x2": (0.0, 1.0, 2.0, 3.0, 13.0)})
    nothing = Reckoning("h", "tbt_p99_reduction", how="about_zero")
    found = compare(points, headline(0.0), nothing, [A], "remap:weights")
    assert found.value == Spread(approx(3.0), approx(1.0), approx(11.0)) and found.reached
    points = seeds_of({"x1": (2.0, 3.0, 6.0, 7.0, 9.0)})
    assert not compare(points, headline(0.0), nothing, [A], "remap:weights").reached


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"preemptions": 0}, False), ({"virtual_s": 161.0}, False), ({"virtual_s": 160.0}, True)],
)
def test_which_rates_an_average_is_over(changes: dict[str, float], expected: bool) -> None:
    assert counts([point(1.0, **changes)]) is expected


def result(tbt: tuple[tuple[float, int], ...]) -> PolicyResult:
    tenant = TenantResult("a", 1, 1, 1, (0.1,), tbt, 0, 0, 0, 1, 1, 0.0, 0.0, 0.0, 1, (None,))
    return PolicyResult("p", (tenant,), (), 1.0, 0.0, 1, 0)


def test_the_gaps_of_the_second_part_are_what_the_first_does_not_have() -> None:
    whole = result(((0.01, 7), (0.02 + 1e-12, 3), (0.5, 1)))
    assert later_gaps(whole, result(((0.01, 4), (0.02, 3)))) == ((0.01, 3), (0.5, 1))
    assert quantiles(((1.0, 1), (3.0, 1)), 2) == [1.0, 1.0, 3.0]


def test_the_arithmetic_of_a_pass_is_equation_5() -> None:
    rows_ = arithmetic(GH200)
    assert rows_[0]["batch"] == 1
    for row in rows_:
        hidden = row["hidden"]
        assert (hidden + 2) * row["load_s"] <= row["pass_s"] * (1 + 1e-4)
        assert hidden == 38 or (hidden + 3) * row["load_s"] > row["pass_s"] * (1 - 1e-4)


TINY = Experiment(
    "fig8-c1",
    "Oneiros, Fig 8",
    "tiny",
    (dataclasses.replace(EXPERIMENTS["fig8-c1"].panels[0], requests=1.0, factors=(0.5, 1.5)),),
    policies=(BASELINE, "remap:weights"),
)
SETTINGS = Settings(requests=60)


def test_a_run_is_the_same_in_any_number_of_processes_and_is_not_run_again(tmp_path: Path) -> None:
    alone, both = (Store.read(tmp_path / f"{jobs}.json", SETTINGS) for jobs in (1, 2))
    seen: list[tuple[str, int, int]] = []
    run_all([TINY], alone, on_progress=lambda *what: seen.append(what))
    run_all([TINY], both, jobs=2)
    assert seen[-1] == ("fig8-c1", 4, 4)
    assert alone.path.read_bytes() == both.path.read_bytes()

    (panel,) = TINY.panels
    assert alone.points.keys(panel.name, BASELINE, "remap:weights") == ["x0.5", "x1.5"]
    (one,) = alone.points.at(panel.name, "x1.5", "remap:weights")
    assert one["requests_finished"] == one["requests"] == 60
    assert one["rate"] == approx(1.5 * alone.points.c[panel.name], rel=1e-4)
    assert not any(math.isnan(value) for value in one.values())

    again = Store.read(alone.path, SETTINGS)
    assert again.to_json() == alone.to_json()
    before = len(seen)
    run_all([TINY], again, on_progress=lambda *what: seen.append(what))
    assert len(seen) == before  # all of it was there
    run_all([TINY], again, again=True, on_progress=lambda *what: seen.append(what))
    assert len(seen) == before + 4 and again.path.read_bytes() == both.path.read_bytes()

    other = Store.read(alone.path, Settings(requests=61))
    assert not other.points.cells  # other settings: nothing of it counts


def test_the_off_peak_part_follows_the_peak(tmp_path: Path) -> None:
    panel = dataclasses.replace(EXPERIMENTS["fig16"].panels[1], requests=1.0)
    found, gaps = run_one(Run(panel, "remap:weights", "x1", 40.0, 0), SETTINGS)
    assert found["requests_finished"] == 60 + 30
    assert gaps == sorted(gaps) and found["tbt_p50_s"] == approx(gaps[20], rel=0.5)
    experiment = dataclasses.replace(TINY, panels=(dataclasses.replace(panel, factors=(1.0,)),), policies=(BASELINE,))
    store = Store(tmp_path / "paper.json", Settings(requests=20, seeds=2))
    for again in (False, True):
        run_all([experiment], store, again=again)
        (seeds,) = (policies[BASELINE] for policies in store.gaps[panel.name].values())
        assert len(seeds) == 2 and seeds[0] != seeds[1]  # quantiles of each seed


def test_grids(tmp_path: Path) -> None:
    experiment, some = EXPERIMENTS["fig14"], EXPERIMENTS["beyond-certificate"]
    panel = experiment.panels[0]
    keys = keys_of(experiment, panel, 10.0, (0.05,), SETTINGS)
    assert keys == {"x0.05": 0.5, **{f"x{f:g}": f * 10.0 for f in FACTORS}, "1/s": 1.0, "10/s": 10.0}
    assert list(keys_of(some, panel, 10.0, (0.05,), SETTINGS)) == ["x0.3", "x0.7", "x1", "x1.5"]
    assert list(keys_of(experiment, panel, 10.0, (), Settings(quick=True)))[:3] == ["x0.3", "x1", "x2"]


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"a": 1}), encoding="utf-8")
    for where, settings in ((path, None), (path, SETTINGS), (tmp_path / "none.json", None)):
        with pytest.raises(InvalidArgument, match="not a result"):
            Store.read(where, settings)


def test_the_page_holds_the_papers_number_ours_the_rate_and_facts(tmp_path: Path) -> None:
    store = Store(tmp_path / "paper.json", SETTINGS)
    assert {line[4] for line in table(store)} == {"not run"}
    for panel in EXPERIMENTS["fig8-c1"].panels:
        store.points.c[panel.name] = 10.0
        base = [point(5.0, tbt_p99_s=0.2, preemptions=number) for number in (5, 2, 9)]
        store.points.add(panel.name, "x0.5", BASELINE, base)
        mine = [
            point(5.0, tbt_p99_s=gap, preemptions=0, kv_blocks_peak=peak, layers_remapped_peak=4, stall_fraction=waits)
            for gap, peak, waits in ((0.08, 150, 0.03), (0.06, 120, 0.01), (0.1, 210, 0.05))
        ]
        store.points.add(panel.name, "x0.5", "remap:weights", mine)
    row = next(one for one in rows(store) if one.headline.id == "oneiros-04")
    assert verdict(row) == "reached" and row.done
    page = markdown(store, {"fig8-c1": "pictures/x.svg"})
    line = next(line for line in page.splitlines() if line.startswith("| Oneiros Fig 8 | P99 TBT lower; C1"))
    mine = "`remap:weights` 60.0 % (50.0 to 70.0) at 5/s (0.5 c); mean 60.0 % (50.0 to 70.0), better at 1 of 1"
    said = ("| 54.4 % |", mine, "`remap:weights+oneiros` not run")
    assert all(part in line for part in said) and line.endswith("| reached |")
    assert "preemptions 5 (2 to 9) under recompute, 0 under remap:weights" in page
    assert "KV up to 1.5 (1.2 to 2.1) times as large, 4 layers remapped at most" in page
    assert "share of passes spent waiting 0 % under recompute, 3 (1 to 5) % under remap:weights" in page
    assert "P99 TBT 200 ms under recompute, 80 (60 to 100) ms under remap:weights" in page
    assert "- reached (1): Fig 8 P99 TBT lower (C1 temporal sharing)" in page
    assert "![Three models take turns (C1)](pictures/x.svg)" in page
    assert sum(what[4] != "not run" for what in table(store)) == sum(one.done for one in rows(store))


@pytest.mark.parametrize(
    ("headline_id", "cuts", "expected"),
    [
        # The paper's 54.4 % is an average: 60 % at one rate and 10 % at the other do not reach it.
        ("oneiros-04", {"fig8-c1": (60.0, 10.0)}, "at its best rate"),
        # The paper's 44.8 to 82.5 %: all averages above its lower end are not enough.
        ("oneiros-01", {"fig8-c1": (50.0, 50.0), "fig8-c2": (99.0, 99.0)}, "reached"),
        ("oneiros-01", {"fig8-c1": (50.0, 50.0), "fig8-c2": (60.0, 60.0)}, "direction"),
    ],
)
def test_averages_and_both_ends_of_ranges_are_reached(tmp_path, headline_id, cuts, expected) -> None:
    """cuts: by how many percent remap's P99 TBT is lower, at x0.5 and at x1, in each panel of an experiment."""
    store = Store(tmp_path / "paper.json", SETTINGS)
    for experiment, both in cuts.items():
        for panel in EXPERIMENTS[experiment].panels:
            for key, rate, cut in zip(("x0.5", "x1"), (5.0, 10.0), both):
                store.points.add(panel.name, key, BASELINE, [point(rate)])
                store.points.add(panel.name, key, "remap:weights", [point(rate, tbt_p99_s=1 - cut / 100)])
    row = next(one for one in rows(store) if one.headline.id == headline_id)
    assert any(one.reached for one in row.findings) or expected == "direction"
    assert verdict(row) == expected


def section(store: Store, experiment: str) -> str:
    return markdown(store, {}).partition(EXPERIMENTS[experiment].title)[2].partition("###")[0]


def test_points_of_an_older_file_are_read_without_their_goodput(tmp_path: Path) -> None:
    """And their tables have no such column."""
    store = Store(tmp_path / "paper.json", SETTINGS)
    for panel in EXPERIMENTS["beyond-pool"].panels:
        store.points.c[panel.name] = 10.0
        for policy, rate in ((BASELINE, 2.0), ("remap:weights", 2.0), ("remap:weights+pool", 3.0)):
            store.points.add(panel.name, "x0.7", policy, [point(7.0, goodput_per_s=rate)])
    seen = section(store, "beyond-pool")
    assert "requests in time more, %" in seen and "| +50.0 |" in seen
    store.write()
    data = json.loads(store.path.read_text(encoding="utf-8"))
    for columns in (columns for panel in data["panels"].values() for columns in panel["policies"].values()):
        del columns["goodput_per_s"]
    store.path.write_text(json.dumps(data), encoding="utf-8")
    older = Store.read(store.path)
    assert set(older.points.at("C1 ShareGPT", "x0.7", "remap:weights")[0]) == set(POINT) - {"goodput_per_s"}
    seen = section(older, "beyond-pool")
    assert "requests in time more" not in seen and "tokens/s more" in seen
    older.write()
    assert Store.read(store.path).points == older.points
    del data["panels"]["C1 ShareGPT"]["policies"][BASELINE]["tbt_p99_s"]
    store.path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InvalidArgument, match="not a result"):
        Store.read(store.path)


def test_where_ideal_was_run_the_page_says_how_far_the_others_come(tmp_path: Path) -> None:
    store = Store(tmp_path / "paper.json", SETTINGS)
    (panel, _) = EXPERIMENTS["beyond-ideal"].panels
    store.points.c[panel.name] = 10.0
    for policy, ttft, tokens in ((BASELINE, 90.0, 100.0), ("remap:weights", 24.0, 190.0), ("ideal", 2.0, 200.0)):
        one = point(7.0, ttft_p99_s=ttft, tokens_per_s=tokens, goodput_per_s=tokens / 100)
        store.points.add(panel.name, "x0.7", policy, [one])
    store.points.add(panel.name, "x1", BASELINE, [point(10.0)])  # without ideal there is nothing to say
    assert [line for line in section(store, "beyond-ideal").splitlines() if line.startswith("| C1")] == [
        f"| {panel.name} | 0.7 | 7 | recompute | 1 | 5 | 0 % | 0 % | 1 | 1 |",
        f"| {panel.name} | 0.7 | 7 | remap:weights | 1 | 5 | 75 % | 90 % | 1 | 1.9 |",
        f"| {panel.name} | 0.7 | 7 | ideal | 1 | 5 | 100 % | 100 % | 1 | 2 |",
    ]


def test_a_table_has_the_median_of_the_seeds_and_their_range(tmp_path: Path) -> None:
    store = Store(tmp_path / "paper.json", SETTINGS)
    (panel, _) = EXPERIMENTS["beyond-pool"].panels
    store.points.c[panel.name] = 10.0
    store.points.add(panel.name, "x0.7", BASELINE, [point(7.0)] * 3)
    store.points.add(panel.name, "x0.7", "remap:weights", [point(7.0, ttft_p99_s=1.0, goodput_per_s=0.0)] * 3)
    pools = [point(7.0, ttft_p99_s=late, tbt_p99_s=0.9, goodput_per_s=1.0) for late in (0.5, 3.0, 0.8)]
    pools[0]["tokens_per_s"] = pools[1]["tokens_per_s"] = 99.99  # less, but nothing to speak of
    store.points.add(panel.name, "x0.7", "remap:weights+pool", pools)
    (line,) = (line for line in section(store, "beyond-pool").splitlines() if line.startswith("| C1"))
    assert line.startswith(f"| {panel.name} | 0.7 | 7 | +10.0 | +20.0 (x3 to +50.0) | +0.0 |")


def test_pictures_show_medians_and_ranges(tmp_path: Path) -> None:
    store = Store(tmp_path / "paper.json", SETTINGS)
    experiment = EXPERIMENTS["fig8-c1"]
    assert picture(experiment, store) is None
    for key, rate in (("x0.5", 5.0), ("x1", 10.0)):
        for policy in experiment.policies:
            gaps = [point(rate, tbt_p99_s=rate * gap) for gap in (0.1, 0.4, 0.2)]
            store.points.add(experiment.panels[0].name, key, policy, gaps)
    axis = picture(experiment, store).axes[0]
    assert list(axis.lines[0].get_xdata()) == [5.0, 10.0] and list(axis.lines[0].get_ydata()) == [1.0, 2.0]
    assert band(axis.collections[0]) == {(5.0, 0.5), (5.0, 2.0), (10.0, 1.0), (10.0, 4.0)}

    (panel,) = EXPERIMENTS["beyond-reversion"].panels
    for policy in EXPERIMENTS["beyond-reversion"].policies:
        store.points.add(panel.name, "x1", policy, [point(10.0)] * 3)
    store.gaps[panel.name] = {"x1": {"remap:weights": [[0.01, 0.03, 0.05], [0.02, 0.02, 0.09], [0.01, 0.05, 0.06]]}}
    axis = picture(EXPERIMENTS["beyond-reversion"], store).axes[0]
    assert list(axis.lines[0].get_xdata()) == approx([10, 30, 60]) and list(axis.lines[0].get_ydata()) == [0, 0.5, 1]
    assert band(axis.collections[0]) == {(10, 0), (20, 0), (20, 0.5), (50, 0.5), (50, 1), (90, 1)}


def test_a_picture_that_is_equal_is_the_same_file_and_stays_as_it_is(tmp_path: Path) -> None:
    """Also from a machine whose places differ in the last bits, of which matplotlib makes the names of parts."""

    def drawn(by: float) -> Any:
        figure = import_module("matplotlib.figure").Figure()
        axis = figure.subplots()
        axis.set_position((0.1, 0.1, 0.8 * by, 0.8))
        axis.plot([1.0, 2.0, 3.0], [3.0, 1.0, 2.0], "o-")
        axis.fill_between([1.0, 3.0], [1.0, 1.0], [2.0, 2.5])
        return figure

    path = tmp_path / "x.svg"
    save(drawn(1.0), path)
    before, made = path.read_text(encoding="utf-8"), path.stat().st_mtime_ns
    save(drawn(1.0 + 1e-13), path)
    assert path.stat().st_mtime_ns == made
    assert set(re.findall(r"(?:#|url\(#)(n\d+)", before)) <= set(re.findall(r'id="(n\d+)"', before)) != set()
    save(drawn(0.9), path)
    assert path.read_text(encoding="utf-8") != before


def band(collection: Any) -> set[tuple[float, float]]:
    return {(round(float(x), 6), round(float(y), 6)) for path in collection.get_paths() for x, y in path.vertices}


def test_what_no_experiment_runs_any_more_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "paper.json", SETTINGS)
    for name, key, policy in (
        ("C1 Alpaca", "x0.5", "remap:weights"),
        ("C1 Alpaca", "x0.85", "remap:weights"),  # a rate that was dropped
        ("C1 Alpaca", "x0.5", "pie:1.2"),
        ("OPT-13b Alpaca, KV 3 GB", "x1", "pie"),
        ("OPT-13b Alpaca", "x1", "pie"),
        ("C2 ShareGPT", "x0.05", "remap:weights"),
    ):
        store.points.c[name] = 10.0
        store.points.add(name, key, policy, [point(5.0)])
    store.lows["C2 ShareGPT"] = (0.05,)
    store.write()
    Store.read(store.path).write()
    panels = json.loads(store.path.read_text(encoding="utf-8"))["panels"]
    kept = {
        (name, key, policy) for name, p in panels.items() for policy, c in p["policies"].items() for key in c["key"]
    }
    assert kept == {
        ("C1 Alpaca", "x0.5", "remap:weights"),
        ("OPT-13b Alpaca", "x1", "pie"),
        ("C2 ShareGPT", "x0.05", "remap:weights"),
    }


RESULTS, PAGE = ROOT / "bench/results/paper.json", ROOT / "bench/results/paper.md"


def test_what_is_stored_is_whole_and_is_what_the_page_says() -> None:
    store = Store.read(RESULTS)
    assert store.settings == Settings(requests=500, seeds=5)
    assert store.arithmetic == arithmetic(GH200)
    for experiment in EXPERIMENTS.values():
        for panel in experiment.panels:
            keys = keys_of(experiment, panel, store.points.c[panel.name], store.lows[panel.name], store.settings)
            for key in keys:
                for policy in experiment.policies:
                    found = store.points.at(panel.name, key, policy)
                    assert len(found) == store.settings.seeds, (panel.name, key, policy)
                    assert all(one["requests"] == one["requests_finished"] for one in found)
                    if panel.quiet:
                        assert len(store.gaps[panel.name][key][policy]) == store.settings.seeds
    drawn = {one.id: f"pictures/paper-{one.id}.svg" for one in EXPERIMENTS.values() if one.id != "oneiros-all"}
    assert all((PAGE.parent / path).exists() for path in drawn.values())
    assert sorted((PAGE.parent / "pictures").glob("paper-*")) == sorted(PAGE.parent / path for path in drawn.values())
    assert markdown(store, drawn) == PAGE.read_text(encoding="utf-8")
    assert "not run" not in PAGE.read_text(encoding="utf-8")


def test_what_docs_results_says_is_what_is_stored() -> None:
    """P99 TBT "not reproduced": in no average of Figures 8 to 13; and the two means of Figure 14."""
    found = {row.headline.id: row for row in rows(Store.read(RESULTS))}
    assert verdict(found["oneiros-01"]) == "not reproduced"
    text = " ".join((ROOT / "docs/notes/results.md").read_text(encoding="utf-8").split())
    for id, said in (("oneiros-25", "tokens/s are {} more"), ("oneiros-24", "P99 time to first token is {} shorter")):
        (mean,) = (one.mean for one in found[id].findings if one.test == "remap:weights")
        assert mean is not None
        assert said.format(f"{mean.median:.1f} % ({mean.low:.1f} to {mean.high:.1f})") in text


def test_what_docs_results_says_of_one_model_alone_is_what_is_stored() -> None:
    store = Store.read(RESULTS)
    panels = {panel.lengths[0]: panel.name for panel in EXPERIMENTS["beyond-alone"].panels}

    def changes(lengths: str, other: str, figure: str) -> tuple[int, int]:
        """Of the default against the other one, in percent: lowest and highest of the medians at each rate."""
        found = []
        for key in ("x0.3", "x0.7", "x1", "x1.5"):
            ours, theirs = (store.points.at(panels[lengths], key, policy) for policy in ("remap", other))
            found.append(median(mine[figure] / its[figure] for mine, its in zip(ours, theirs)))
        return round(100 * min(found) - 100), round(100 * max(found) - 100)

    text = " ".join((ROOT / "docs/notes/results.md").read_text(encoding="utf-8").split())
    sooner = [changes("sharegpt", other, "ttft_p99_s") for other in ("swap", "pie", "static")]
    assert sooner == [(-35, -28), (-19, -16), (-28, -22)]
    assert "28 to 35 % sooner than with `swap`, 16 to 19 % sooner than with `pie`, and 22 to 28 % sooner" in text
    more = [changes("sharegpt", other, "tokens_per_s") for other in ("swap", "pie", "static")]
    assert more == [(0, 18), (0, 12), (1, 14)] and "0 to 18, 0 to 12 and 1 to 14 % more tokens/s" in text
    assert changes("sharegpt", "swap", "tbt_p99_s") == (33, 39) and "33 to 39 % longer than with `swap`" in text
    assert changes("alpaca", "swap", "tokens_per_s") == (-8, 0) and "0 to 8 % fewer tokens/s than `swap`" in text
    assert changes("alpaca", "pie", "ttft_p99_s") == (27, 46) and "27 to 46 % later than with `pie`" in text
