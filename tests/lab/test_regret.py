"""`bench.lab regret`: what counts as regret, over which loads, and a small run that goes on where it stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from bench.lab import regret
from bench.lab.paper.runs import Run, Settings, serve

from remap_serve.sim.policies import find


@pytest.mark.parametrize(
    ("figure", "mine", "best", "expected"),
    [
        ("ttft_p99_s", 3.0, 2.0, 0.5),
        ("ttft_p99_s", 2.0, 2.0, 0.0),
        ("ttft_p99_s", 0.04, 0.01, 0.0),  # nobody notices 30 ms
        ("tbt_p99_s", 0.04, 0.02, 1.0),
        ("tokens_per_s", 90.0, 100.0, 0.1),
        ("goodput_per_s", 0.0, 2.0, 1.0),
        ("goodput_per_s", 0.0, 0.0, 0.0),
    ],
)
def test_regret_is_the_share_by_which_it_is_worse(figure: str, mine: float, best: float, expected: float) -> None:
    assert regret.regret(mine, best, figure) == pytest.approx(expected)


def test_what_is_unknown_is_no_regret_of_nought() -> None:
    assert math.isnan(regret.regret(math.nan, 1.0, "ttft_p99_s"))


LOAD = regret.LOADS[0]


def points(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Runs of all policies, of as many seeds as each has numbers; all but the first figure are alike."""
    same = dict.fromkeys(regret.FIGURES, 1.0)
    return {
        LOAD.name(policy, seed): {**same, "ttft_p99_s": value}
        for policy, values in seconds.items()
        for seed, value in enumerate(values)
    }


def test_a_loads_regret_is_the_median_over_its_seeds_each_against_its_own_best() -> None:
    seconds = {policy: [9.0, 9.0, 9.0] for policy in regret.POLICIES}
    seconds |= {"whole": [0.1, 0.1, 0.1], "remap": [2.0, 6.0, 3.0], "kv-pool": [1.0, 2.0, 4.0], "swap": [8.0, 1.0, 8.0]}
    found = regret.regrets(points(seconds), LOAD, "remap", 3)
    assert found is not None
    assert found["ttft_p99_s"] == (1.0, "kv-pool")  # of 1, 5 and 0; kv-pool, swap and remap were best
    assert found["tokens_per_s"][0] == 0.0


def test_a_load_that_was_not_run_whole_is_left_out() -> None:
    seconds = {policy: [1.0] for policy in regret.POLICIES if policy != "pie"}
    assert regret.regrets(points(seconds), LOAD, "remap", 1) is None


def test_the_worst_loads_come_first_and_say_who_was_best() -> None:
    data = {"settings": {"seeds": 1}, "points": points({one: [4.0] for one in regret.POLICIES} | {"swap": [1.0]})}
    rows = regret.worst(data, [LOAD], "remap").splitlines()
    where = LOAD.place.replace(" | ", ", ")  # one cell of the table
    assert rows[2:] == [f"| {where}, {LOAD.rate:g} c | 300 % | swap |"]
    assert "| remap | 1 | TTFT P99 | 300 % | 300 % | 300 % | 1 |" in regret.table(data, [LOAD])


def test_the_worst_figures_come_first_with_both_sides() -> None:
    found = points({one: [4.0, 4.0] for one in regret.POLICIES} | {"swap": [1.0, 2.0]})
    found[LOAD.name("remap", 0)]["tokens_per_s"] = found[LOAD.name("remap", 1)]["tokens_per_s"] = 0.5
    data = {"settings": {"seeds": 2}, "points": found}
    where = f"{LOAD.place.replace(' | ', ', ')}, {LOAD.rate:g} c"
    best = regret.POLICIES[0]  # of those that are alike
    assert regret.furthest(data, [LOAD], "remap").splitlines()[2:] == [
        f"| {where} | TTFT P99 | 200 % | 4 | 1.5, `swap` |",
        f"| {where} | tokens/s | 50 % | 0.5 | 1, `{best}` |",
    ]


def test_a_load_is_whole_when_all_runs_of_all_seeds_are_there() -> None:
    alike = points({one: [4.0, 4.0] for one in regret.POLICIES})
    assert regret.whole(alike, LOAD, 2) and not regret.whole(alike, LOAD, 3)


def test_counted_are_the_first_loads_in_which_requests_wait_for_memory() -> None:
    loads = regret.LOADS[:5]
    times = [(9.0, 4.0), (1.9, 0.1), (9.0, 8.0), (9.0, 0.1)]  # late; in time; busy computing; late
    found = {
        load.name(policy, 0): {"ttft_p99_s": value}
        for load, pair in zip(loads, times)
        for policy, value in zip(("recompute", "ideal"), pair)
    }
    assert regret.counted(found, loads, 2) == ([loads[0], loads[3]], 4)
    assert regret.counted(found, loads, 1) == ([loads[0]], 1)
    assert regret.counted(found, loads, 3) == ([loads[0], loads[3]], 4)  # the fifth was not looked at


def test_sleep_and_turns_without_a_price_are_for_several_models() -> None:
    alone, several = (next(one for one in regret.LOADS if one.models == name) for name in ("one 13B", "13B and 8B"))
    assert set(several.policies) - set(alone.policies) == {"sleep+swap", "whole"} == set(regret.ONE_AT_A_TIME)
    assert [several.panel(one).sharing for one in ("remap", "whole")] == ["epochs", "temporal"]
    assert regret.regrets({}, alone, "whole", 1) is None


def test_the_loads_are_all_that_fit_in_an_order_that_does_not_change() -> None:
    assert len(set(regret.LOADS)) == len(regret.LOADS) > 500
    first = regret.LOADS[:40]
    assert {load.machine for load in first} == set(regret.MACHINES) and {load.rate for load in first} == set(
        regret.RATES
    )
    assert {load.models for load in first} == set(regret.MODELS) and {load.memory for load in first} == set(
        regret.MEMORY
    )
    assert first[0] == regret.Load("A100", "13B and 8B", 0.7, "alpaca", 0.6)


def test_every_policy_is_known_and_those_that_are_told_are_among_them() -> None:
    assert [find(policy).name for policy in regret.POLICIES] == list(regret.POLICIES)
    assert set(regret.OF) <= set(regret.POLICIES)


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loads = [
        regret.Load("RTX-4090", "one 4B", 0.95, "sharegpt", 1.2),
        regret.Load("H100-SXM", "one 13B", 0.5, "long", 0.6),
    ]
    settings, path = Settings(requests=20, seeds=1), tmp_path / "regret.json"
    page = regret.run_regret(path, settings, loads=loads, number=1)
    assert "\n1 loads of 20 requests" in page and "Of the first 2, these 1 are" in page
    assert path.with_suffix(".md").read_text(encoding="utf-8") == page
    looked = [load.name(policy, 0) for load in loads for policy in ("recompute", "ideal")]
    told = capsys.readouterr().err.splitlines()
    assert told == [*looked, *(loads[1].name(policy, 0) for policy in loads[1].policies if policy != "recompute")]
    assert regret.run_regret(path, settings, loads=loads, number=1) == page and not capsys.readouterr().err


def test_a_first_burst_of_long_prompts_makes_no_pass_wait() -> None:
    """Their passes hid copies of three layers, which no decode pass hides: 2.3 times as long passes, for as long as they ran."""
    load, settings = regret.Load("H100-SXM", "one 13B", 0.5, "long", 0.6), Settings("H100-SXM", 60, 1)
    ours, pool = (serve(Run(load.panel(), one, "x", 1.0, 0), settings)[2] for one in ("remap", "kv-pool+swap"))
    (tenant,) = ours.tenants
    assert tenant.stall_s < 0.02 * tenant.compute_s and ours.tokens_per_s > 0.98 * pool.tokens_per_s


def test_where_the_results_say_that_nobody_needs_it_more_memory_changes_nothing() -> None:
    text = (regret.ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert "one Qwen3-4B with 95 % of an RTX 4090 at 1.2 times" in text and "70 % of an A100 and short answers" in text
    points = json.loads(regret.RESULTS.read_text(encoding="utf-8"))["points"]
    for load in (
        regret.Load("RTX-4090", "one 4B", 0.95, "sharegpt", 1.2),
        regret.Load("A100", "13B and 8B", 0.7, "alpaca", 0.6),
    ):
        assert load in regret.LOADS[:28] and not regret.waits(points, load)
        runs = [points[load.name(policy, 0)] for policy in ("recompute", "ideal")]
        assert runs[0] == runs[1] and runs[0]["preemptions"] == 0


def test_what_the_pages_say_is_what_was_stored() -> None:
    stored = json.loads(regret.RESULTS.read_text(encoding="utf-8"))
    points, number = stored["points"], stored["settings"]["seeds"]
    ran, looked = regret.counted(points, regret.LOADS, 12)
    assert (len(ran), looked, number) == (12, 28, 5) and all(regret.whole(points, load, number) for load in ran)
    results = (regret.ROOT / "docs/notes/results.md").read_text(encoding="utf-8")
    assert "Of the first 28 loads **in 16 requests do not wait" in results and "The other 12" in results
    short = (regret.ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert "in 16 of [28 loads drawn at random]" in short and "In the other 12" in short

    def worst(policy: str, figure: str) -> int:
        found = [regret.regrets(points, load, policy, number) for load in ran]
        return round(100 * max(one[figure][0] for one in found if one is not None))

    assert (worst("remap", "ttft_p99_s"), worst("remap", "tokens_per_s"), worst("remap", "goodput_per_s")) == (15, 1, 0)
    assert "15 % at worst" in results and "at most 15 % after" in short
    for policy in ("remap:weights+swap", "sleep+swap", "kv-pool+swap", "remap:weights"):
        assert f"up to {worst(policy, 'ttft_p99_s'):,} %" in results
    for figure in ("tpot_p99_s", "tbt_p99_s", "longest_gap_p99_s"):
        assert f"up to {worst('remap', figure)} %" in results
    alone = [load for load in ran if len(load.policies) < len(regret.POLICIES)]
    assert len(alone) == 5 and "In the five loads of one model" in results
    behind = [regret.regrets(points, load, "remap", number) for load in alone]
    assert max(one["ttft_p99_s"][0] for one in behind if one is not None) < 0.025
    assert regret.table(stored, ran) in regret.RESULTS.with_suffix(".md").read_text(encoding="utf-8")
