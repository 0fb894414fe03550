"""The paper benchmark: its description is consistent, its reckoning is that of hand-made points, and it runs and resumes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
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
from bench.lab.paper.reckoning import METRICS, POINT, Points, compare, counts, curve, later_gaps, quantiles
from bench.lab.paper.reckoning_special import SPECIAL, arithmetic, find
from bench.lab.paper.report import markdown, rows, table, verdict
from bench.lab.paper.runs import Run, Settings, Store, keys_of, run_all, run_one

from remap.errors import InvalidArgument
from remap.sim.hardware import machine
from remap.sim.results import PolicyResult, TenantResult

GH200, approx = machine("GH200-96GB"), pytest.approx


def test_every_headline_is_used_once_or_left_out_and_every_name_exists() -> None:
    assert check(EXPERIMENTS.values(), METRICS, SPECIAL) == []
    assert [one.id for one in select(EXPERIMENTS, ["fig8*"])] == ["fig8-c1", "fig8-c2"]
    with pytest.raises(InvalidArgument, match="fig8-c1") as caught:
        select(EXPERIMENTS, ["fig99"])
    assert caught.value.value == "fig99"
    for experiment in EXPERIMENTS.values():  # nothing was run
        for one in experiment.reckonings:
            found = find(Points(), headlines()[one.headline], one, experiment.panels_of(one), one.tests[0])
            assert found.value is None and not found.reached


def test_the_check_finds_what_is_wrong() -> None:
    first = EXPERIMENTS["fig8-c1"]
    wrong = dataclasses.replace(
        first,
        policies=(BASELINE,),
        reckonings=(*first.reckonings, Reckoning("oneiros-99", "nothing", panels=("nowhere",))),
    )
    said = "\n".join(check([wrong], METRICS, SPECIAL))
    assert "no headline 'oneiros-99'" in said
    assert "metric='nothing'" in said
    assert "oneiros-04 compares policies that are not run" in said
    assert "oneiros-07 is neither in use nor left out" in said


@pytest.mark.parametrize(
    "panel", {p.name: p for e in EXPERIMENTS.values() for p in e.panels}.values(), ids=lambda p: p.name
)
def test_every_panel_has_a_setup_and_the_kv_that_it_names(panel: Panel) -> None:
    setup = setup_of(panel, GH200)
    if panel.kv_bytes:
        (tenant,) = setup.tenants
        block = setup.block_tokens * tenant.model.kv_bytes_per_token
        assert setup.kv_blocks(tenant) == panel.kv_bytes // block
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


def headline(value: float | tuple[float, float], unit: str = "%") -> Headline:
    return Headline("h", "P", "Fig 0", "c", "m", value, unit, "quant")


def two_panels() -> Points:
    """Cuts of P99 TBT: 10 and 30 % at x0.5 (mean 20), 50 and 70 % at x1 (mean 60); at x0.1 nobody preempts."""
    cells = []
    for panel, low, high in ((A, 0.9, 0.5), (B, 0.7, 0.3)):
        for key, rate, value, preemptions in (("x0.1", 1.0, 0.2, 0), ("x0.5", 5.0, low, 5), ("x1", 10.0, high, 5)):
            cells.append((panel, key, BASELINE, point(rate, preemptions=preemptions)))
            cells.append((panel, key, "remap", point(rate, tbt_p99_s=value, preemptions=0)))
    return made(*cells)


@pytest.mark.parametrize(
    ("paper", "value", "key", "reached"),
    [(15.0, 20.0, "x0.5", True), (40.0, 60.0, "x1", True), (75.0, 60.0, "x1", False)],
)
def test_the_lowest_rate_that_reaches_is_quoted_or_the_nearest(paper, value, key, reached) -> None:
    """The rate at which the baseline does not preempt is left out, although it would come out best."""
    points = two_panels()
    seen = curve(points, [A, B], "remap", BASELINE, "tbt_p99_reduction")
    assert [(key, values[0]) for key, values in seen] == [("x0.1", 80.0), ("x0.5", approx(20.0)), ("x1", approx(60.0))]
    found = compare(points, headline(paper), Reckoning("h", "tbt_p99_reduction"), [A, B], "remap")
    assert (found.value, found.key, found.reached) == (approx(value), key, reached)
    assert found.mean == approx(40.0) and found.rates == 2 and found.direction == "yes"
    assert found.at == (("A", 5.0 if key == "x0.5" else 10.0), ("B", 5.0 if key == "x0.5" else 10.0))


def test_a_panel_counts_only_where_the_baseline_preempts_and_up_to_takes_the_best() -> None:
    points = two_panels()
    found = compare(points, headline(65.0), Reckoning("h", "tbt_p99_reduction", how="most"), [A, B], "remap")
    assert found.value == approx(70.0) and found.at == (("B", 10.0),) and found.reached
    for one in points.at("A", "x1", BASELINE):
        one["preemptions"] = 0
    found = compare(points, headline(99.0), Reckoning("h", "tbt_p99_reduction"), [A, B], "remap")
    assert found.value == approx(70.0) and found.at == (("B", 10.0),)
    assert found.mean == approx((20.0 + 70.0) / 2) and (found.better, found.rates) == (2, 2)


def test_a_loss_at_most_rates_is_no_direction_and_where_gains_begin() -> None:
    rates = {"x1": (1.0, 90.0), "x2": (2.0, 104.0), "x3": (3.0, 106.0)}
    points = made(
        *((A, key, BASELINE, point(rate)) for key, (rate, _) in rates.items()),
        *((A, key, "pie", point(rate, tokens_per_s=served)) for key, (rate, served) in rates.items()),
    )
    begins = Reckoning("h", "rate", tests=("pie",), how="gain_begins")
    found = find(points, headline(15.0), begins, [A], "pie")
    assert found.value == 3.0 and found.direction == "yes"
    points.add("A", "x2", "pie", [point(2.0, tokens_per_s=40.0)])
    found = compare(points, headline(20.0), Reckoning("h", "throughput_gain"), [A], "pie")
    assert (found.value, found.mean) == (approx(6.0), approx((-10.0 - 60.0 + 6.0) / 3))
    assert found.direction == "at some rates" and not found.reached


def test_seeds_are_averaged_and_their_spread_is_told() -> None:
    points = made(
        (A, "x1", BASELINE, point(10.0)),
        (A, "x1", BASELINE, point(10.0)),
        (A, "x1", "remap", point(10.0, tbt_p99_s=0.8)),
        (A, "x1", "remap", point(10.0, tbt_p99_s=0.6)),
    )
    found = compare(points, headline(10.0), Reckoning("h", "tbt_p99_reduction"), [A], "remap")
    assert (found.low, found.value, found.high) == (approx(20.0), approx(30.0), approx(40.0))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"preemptions": 0}, False), ({"virtual_s": 161.0}, False), ({"virtual_s": 160.0}, True)],
)
def test_which_rates_an_average_is_over(changes: dict[str, float], expected: bool) -> None:
    assert counts([point(1.0, **changes)]) is expected


def expansions(**rates: float) -> Points:
    names = {"one": BASELINE, "a": "pie:1.2", "b": "pie:1.4", "pie": "pie"}
    return made(
        *((A, "x2", names[name], point(20.0, tokens_per_s=rate, kv_blocks_peak=125)) for name, rate in rates.items())
    )


def test_figures_of_expansions() -> None:
    points = expansions(one=100.0, a=150.0, b=120.0, pie=147.0)
    fixed = ("pie:1.2", "pie:1.4")

    def value(how: str, paper: float, tests: tuple[str, ...] = fixed) -> tuple[float | None, bool]:
        found = find(
            points, headline(paper, "x"), Reckoning("h", "throughput_ratio", tests=tests, how=how), [A], tests[0]
        )
        return found.value, found.reached

    assert value("best_static", 1.4) == (approx(1.5), True)
    assert value("best_expansion", 1.2) == (1.2, True)
    assert value("expansion_that_blocks", 1.4) == (1.4, True)
    assert value("adaptive_expansion", 2.0, ("pie",)) == (1.25, False)
    assert value("adaptive_overhead", 2.1, ("pie",)) == (approx(2.0), True)
    assert value("adaptive_overhead", 1.9, ("pie",)) == (approx(2.0), False)


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
    policies=(BASELINE, "remap"),
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
    assert alone.points.keys(panel.name, BASELINE, "remap") == ["x0.5", "x1.5"]
    (one,) = alone.points.at(panel.name, "x1.5", "remap")
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


def test_the_off_peak_part_follows_the_peak() -> None:
    panel = dataclasses.replace(EXPERIMENTS["fig16"].panels[1], requests=1.0)
    found, gaps = run_one(Run(panel, "remap", "x1", 40.0, 0), SETTINGS)
    assert found["requests_finished"] == 60 + 30
    assert gaps == sorted(gaps) and found["tbt_p50_s"] == approx(gaps[20], rel=0.5)


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
    kept = {"preemptions": 0, "kv_blocks_peak": 150, "layers_remapped_peak": 4, "stall_fraction": 0.03}
    for panel in EXPERIMENTS["fig8-c1"].panels:
        store.points.c[panel.name] = 10.0
        store.points.add(panel.name, "x0.5", BASELINE, [point(5.0, tbt_p99_s=0.2)])
        store.points.add(panel.name, "x0.5", "remap", [point(5.0, tbt_p99_s=0.08, **kept)])
    row = next(one for one in rows(store) if one.headline.id == "oneiros-04")
    assert verdict(row) == "reached" and row.done
    page = markdown(store, {"fig8-c1": "pictures/x.svg"})
    line = next(line for line in page.splitlines() if line.startswith("| Oneiros Fig 8 | P99 TBT lower; C1"))
    said = ("| 54.4 % |", "`remap` 60.0 % at 5/s (0.5 c); mean 60.0 %, better at 1 of 1", "`remap:oneiros` not run")
    assert all(part in line for part in said) and line.endswith("| reached |")
    assert "preemptions 5 (recompute), 0 (remap); KV up to x1.50, 4 layers remapped at most" in page
    assert "passes wait 3 % of their time (remap), 0 % (recompute)" in page
    assert "P99 gap 200 ms (recompute), 80 ms (remap)" in page
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
                store.points.add(panel.name, key, "remap", [point(rate, tbt_p99_s=1 - cut / 100)])
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
        for policy, rate in ((BASELINE, 2.0), ("remap", 2.0), ("remap:pool", 3.0)):
            store.points.add(panel.name, "x0.7", policy, [point(7.0, goodput_per_s=rate)])
    seen = section(store, "beyond-pool")
    assert "requests in time more, %" in seen and "| +50.0 |" in seen
    store.write()
    data = json.loads(store.path.read_text(encoding="utf-8"))
    for columns in (columns for panel in data["panels"].values() for columns in panel["policies"].values()):
        del columns["goodput_per_s"]
    store.path.write_text(json.dumps(data), encoding="utf-8")
    older = Store.read(store.path)
    assert set(older.points.at("C1 ShareGPT", "x0.7", "remap")[0]) == set(POINT) - {"goodput_per_s"}
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
    for policy, ttft, tokens in ((BASELINE, 90.0, 100.0), ("remap", 24.0, 190.0), ("ideal", 2.0, 200.0)):
        one = point(7.0, ttft_p99_s=ttft, tokens_per_s=tokens, goodput_per_s=tokens / 100)
        store.points.add(panel.name, "x0.7", policy, [one])
    store.points.add(panel.name, "x1", BASELINE, [point(10.0)])  # without ideal there is nothing to say
    assert [line for line in section(store, "beyond-ideal").splitlines() if line.startswith("| C1")] == [
        f"| {panel.name} | 0.7 | 7 | recompute | 1 | 5 | 0 % | 0 % | 1 | 1 |",
        f"| {panel.name} | 0.7 | 7 | remap | 1 | 5 | 75 % | 90 % | 1 | 1.9 |",
        f"| {panel.name} | 0.7 | 7 | ideal | 1 | 5 | 100 % | 100 % | 1 | 2 |",
    ]
