"""What a simulated run gives: percentiles of pairs against their expansion, sums over tenants, files and thinning."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.simulated_results import from_json, from_report
from remap.errors import InvalidArgument
from remap_serve.sim.results import (
    HEADLINE,
    POINTS,
    PolicyResult,
    Sample,
    Targets,
    TenantResult,
    ascending,
    merged,
    percentile,
    report,
    thinned,
    weighted_percentile,
)
from remap_serve.sim.timeline import Timeline

VALUES = st.floats(0.0, 100.0).map(lambda value: round(value, 2))
PAIRS = st.dictionaries(VALUES, st.integers(1, 40), max_size=30).map(ascending)


COUNTS = {"requests": 4, "finished": 3, "output_tokens": 30, "preemptions": 2, "recomputed_tokens": 11, "passes": 27}
KV = {"swapped_bytes": 5, "kv_blocks_start": 10, "kv_blocks_peak": 15, "layers_remapped_peak": 2.5}
TIMES = {
    "ttft_s": (0.3, 0.1, 0.2),
    "tbt": ((0.01, 20), (0.5, 7)),
    "tpot_s": (0.05, None, 0.02),
    "longest_gap_s": (0.5, None, 0.01),
    "compute_s": 3.0,
    "stall_s": 1.0,
}


def tenant(name: str = "a", **changes: object) -> TenantResult:
    return TenantResult(**{"tenant": name, **COUNTS, **KV, **TIMES, **changes})  # type: ignore[arg-type]


def sample(time_s: float, name: str = "a") -> Sample:
    return Sample(time_s, name, 10, 7, 1.5, 3, 2, 1, 0.25)


def run(*tenants: TenantResult, timeline: tuple[Sample, ...] = (), policy: str = "remap") -> PolicyResult:
    return PolicyResult(policy, tenants, timeline, virtual_s=6.0, wall_s=0.5, iterations=27, decisions=4)


def by_definition(values: list[float], thousandths: int) -> float:
    """The smallest value such that at least so many thousandths of all values are at most it, in whole numbers."""
    ordered = sorted(values)
    for number, value in enumerate(ordered, 1):
        if 1000 * number >= thousandths * len(ordered):
            return value
    raise AssertionError("no values")


@settings(max_examples=examples(200), deadline=None)
@given(pairs=PAIRS.filter(bool), thousandths=st.integers(0, 1000))
def test_percentiles_of_pairs_are_those_of_their_expansion(pairs, thousandths) -> None:
    expanded = [value for value, count in pairs for _ in range(count)]
    expected = by_definition(expanded, thousandths)
    assert weighted_percentile(pairs, thousandths / 1000) == expected
    assert weighted_percentile(reversed(pairs), thousandths / 1000) == expected
    assert percentile(expanded[::-1], thousandths / 1000) == expected


def test_a_rank_is_not_missed_by_rounding() -> None:
    """0.07 * 100 is 7.000000000000001 in floating point; the 0.07-quantile of 100 values is still the seventh."""
    values = [float(number) for number in range(1, 101)]
    for hundredths in range(1, 101):
        assert percentile(values, hundredths / 100) == hundredths
    assert weighted_percentile([(1.0, 10**9), (2.0, 10**9)], 0.5) == 1.0
    assert weighted_percentile([(1.0, 10**9), (2.0, 10**9 + 2)], 0.5) == 2.0


def test_percentiles_of_nothing_and_out_of_range() -> None:
    assert math.isnan(percentile([], 0.5))
    assert math.isnan(weighted_percentile([], 0.5))
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(InvalidArgument) as caught:
            percentile([1.0], q)
        assert caught.value.field == "q"


@settings(deadline=None)
@given(st.lists(PAIRS, max_size=4))
def test_merging_keeps_every_gap(distributions) -> None:
    joined = merged(distributions)
    assert list(joined) == sorted(joined)
    assert len({value for value, _ in joined}) == len(joined)
    assert sorted(v for pairs in distributions for v, n in pairs for _ in range(n)) == [
        v for v, n in joined for _ in range(n)
    ]


def test_the_figures_of_a_run_are_over_all_tenants() -> None:
    times = {"ttft_s": (9.0,), "tpot_s": (0.01,), "tbt": ((0.5, 3), (2.0, 1)), "stall_s": 0.0, "compute_s": 4.0}
    times["longest_gap_s"] = (2.0,)
    both = run(tenant(), tenant("b", finished=1, preemptions=0, **times))
    assert both.requests == 8 and both.requests_finished == 4
    assert both.tokens_per_s == 60 / 6.0
    assert (both.ttft_p50_s, both.ttft_p99_s, both.ttft_mean_s) == (0.2, 9.0, pytest.approx(2.4))
    # 20 gaps of 10 ms, 10 of 500 ms, 1 of 2 s.
    assert (both.tbt_p50_s, both.tbt_p99_s) == (0.01, 2.0)
    assert both.tbt_mean_s == pytest.approx((20 * 0.01 + 10 * 0.5 + 2.0) / 31)
    assert both.tpot_p99_s == 0.05
    assert (both.longest_gap_p50_s, both.longest_gap_p99_s, both.long_gaps) == (0.5, 2.0, 11 / 31)
    assert both.preemptions == 2
    assert (both.kv_blocks_peak, both.layers_remapped_peak) == (30, 5.0)
    assert both.stall_fraction == pytest.approx(1.0 / 8.0)
    assert tenant().stall_fraction == 0.25
    head = both.headline()
    assert tuple(head) == HEADLINE
    assert head["requests_finished"] == 4 and head["tbt_p99_s"] == 2.0


@settings(max_examples=examples(200), deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(1, 9)), max_size=12),
    ttft=st.integers(1, 9),
    tpot=st.integers(1, 9),
)
def test_goodput_counts_requests_that_meet_both_targets(requests, ttft, tpot) -> None:
    """Request by request, both targets included; one of a single token has no time between tokens."""
    result = run(tenant(ttft_s=tuple(a for a, _ in requests), tpot_s=tuple(b for _, b in requests)), tenant("b"))
    good = sum(waited <= ttft and (each is None or each <= tpot) for waited, each in requests)
    counted = replace(result, targets=Targets(float(ttft), float(tpot)))
    assert counted.goodput_per_s == pytest.approx((good + 3) / 6.0)  # b's three meet targets of a second or more
    assert replace(counted, targets=result.targets) == result  # they change nothing else


def test_targets_are_times_and_a_run_of_no_time_has_no_goodput() -> None:
    assert run().targets == Targets(2.0, 0.2) and replace(run(tenant()), virtual_s=0.0).goodput_per_s == 0.0
    for field in ("ttft_s", "tpot_s"):
        for value in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(InvalidArgument) as caught:
                Targets(**{field: value})
            assert caught.value.field == field


def test_a_run_in_which_nothing_finished_has_a_headline() -> None:
    nothing = run(
        tenant(ttft_s=(), tpot_s=(), tbt=(), longest_gap_s=(), finished=0, output_tokens=0, compute_s=0.0, stall_s=0.0)
    )
    head = nothing.headline()
    assert head["ttft_p50_s"] is None and head["tbt_p99_s"] is None
    assert head["tokens_per_s"] == 0.0 and head["stall_fraction"] == 0.0
    assert from_json(json.loads(json.dumps(nothing.to_json(), allow_nan=False))) == nothing


def test_the_report_has_the_names_that_were_promised() -> None:
    results = [run(tenant(), policy="recompute"), run(tenant(), timeline=(sample(0.5),))]
    data = json.loads(json.dumps(report({"machine": "X"}, results)))
    assert set(data) == {"configuration", "policies"}
    assert list(data["policies"]) == ["recompute", "remap"]
    for entry, result in zip(data["policies"].values(), results):
        assert {name: entry[name] for name in HEADLINE} == result.headline()
    assert from_report(data) == ({"machine": "X"}, tuple(results))
    assert not any("against_ideal" in entry for entry in data["policies"].values())
    fast = run(tenant(ttft_s=(0.0, 0.1, 0.1)), policy="ideal")  # with ideal it says how far everybody comes
    data = json.loads(json.dumps(report({}, [*results, fast]), allow_nan=False))
    for name, share in (("recompute", 0.0), ("remap", 0.0), ("ideal", 1.0)):  # equal tokens/s: there is no gap
        expected = {"gap_closed_ttft_p99": share, "gap_closed_tokens_per_s": None, "tbt_p99_of_ideal": 1.0}
        assert data["policies"][name]["against_ideal"] == expected
    with pytest.raises(InvalidArgument) as caught:
        report({}, [results[0], results[0]])
    assert (caught.value.field, caught.value.value) == ("policy", "recompute")


# A bulk of gaps near 20 ms, and a tail over three orders of magnitude, as preemptions make it.
def long_tail(seed: int) -> tuple[tuple[float, int], ...]:
    tail = {}
    for number in range(1100):
        near = 0.02 + 0.03 * ((seed * 7919 + number * 104729) % 10007) / 10007
        tail[round(near + 0.001 * 1.01**number, 7)] = 1 + (number * seed) % 17
    return ascending(tail | {0.015 + number * 1e-6: 3 for number in range(3000)})


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6).map(long_tail))
def test_a_thinned_distribution_says_the_same(pairs) -> None:
    result = run(tenant(tbt=pairs))
    read = from_json(result.to_json())
    kept = read.tenants[0].tbt
    assert len(pairs) > POINTS >= len(kept) > POINTS / 4
    assert list(kept) == sorted(kept)
    assert sum(count for _, count in kept) == sum(count for _, count in pairs)
    assert read.tbt_mean_s == pytest.approx(result.tbt_mean_s, rel=1e-12)
    for q in (0.5, 0.9, 0.99, 0.999, 1.0):
        assert weighted_percentile(kept, q) == weighted_percentile(pairs, q)
    for thousandths in range(0, 1000, 7):
        low, high = (min(max(thousandths / 1000 + shift, 0.0), 1.0) for shift in (-0.0025, 0.0025))
        value = weighted_percentile(kept, thousandths / 1000)
        assert weighted_percentile(pairs, low) <= value * (1 + 1e-12)
        assert value * (1 - 1e-12) <= weighted_percentile(pairs, high)
    assert read.headline() == result.headline()


def test_a_thinned_timeline_keeps_every_tenant_from_start_to_end() -> None:
    long = tuple(sample(float(t), name) for t in range(9000) for name in ("a", "b"))
    few = tuple(sample(float(t), "c") for t in (5, 8000))
    timeline = tuple(sorted((*long, *few), key=lambda point: point.time_s))
    kept = thinned(timeline)
    assert 0.9 * POINTS <= len(kept) <= POINTS + 2
    assert list(kept) == sorted(kept, key=lambda point: point.time_s)
    for name, ends in (("a", (0.0, 8999.0)), ("b", (0.0, 8999.0)), ("c", (5.0, 8000.0))):
        times = [point.time_s for point in kept if point.tenant == name]
        assert (times[0], times[-1]) == ends
        assert max(b - a for a, b in zip(times, times[1:])) <= 8000
    steps = [b.time_s - a.time_s for a, b in zip(kept, kept[1:])]
    assert max(steps) <= 20
    assert thinned(timeline[:100]) == timeline[:100]


def test_a_timeline_of_a_long_run_is_thinned_as_it_grows() -> None:
    kv = SimpleNamespace(usable_blocks=5, live_blocks=3)
    shown = {
        "metrics": SimpleNamespace(preemptions=0),
        "runner": SimpleNamespace(stall_s=0.0),
        "kv_peak": 0,
        "used_peak": 0,
        "alpha_peak": 0,
    }
    scheduler = SimpleNamespace(used_blocks=0, running=(), waiting=())
    engine = SimpleNamespace(tenant=SimpleNamespace(kv=kv, remapped=1), scheduler=scheduler, **shown)
    line = Timeline(limit=10, interval_s=1.0)
    for now in range(1000):
        line.look(float(now), {"a": engine})  # type: ignore[dict-item]
    line.end(999.5, {"a": engine})  # type: ignore[dict-item]
    times = [sample.time_s for sample in line.samples()]
    assert times == sorted(times) and (times[0], times[-1]) == (0.0, 999.5) and 10 <= len(times) <= 21
    assert (engine.kv_peak, engine.used_peak, engine.alpha_peak) == (5, 3, 1)
