"""What a simulated run gives: percentiles of pairs against their expansion, sums over tenants, files and thinning."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.simulated_results import from_json, from_report
from remap.errors import InvalidArgument
from remap.sim.results import (
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

VALUES = st.floats(0.0, 100.0).map(lambda value: round(value, 2))
PAIRS = st.dictionaries(VALUES, st.integers(1, 40), max_size=30).map(ascending)


def tenant(name: str = "a", **changes: object) -> TenantResult:
    result = TenantResult(
        tenant=name,
        requests=4,
        finished=3,
        output_tokens=30,
        ttft_s=(0.3, 0.1, 0.2),
        tbt=((0.01, 20), (0.5, 7)),
        preemptions=2,
        recomputed_tokens=11,
        swapped_bytes=5,
        kv_blocks_start=10,
        kv_blocks_peak=15,
        layers_remapped_peak=2.5,
        compute_s=3.0,
        stall_s=1.0,
        passes=27,
        tpot_s=(0.05, None, 0.02),
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def sample(time_s: float, name: str = "a") -> Sample:
    return Sample(time_s, name, 10, 7, 1.5, 3, 2, 1, 0.25)


def run(*tenants: TenantResult, timeline: tuple[Sample, ...] = (), policy: str = "remap") -> PolicyResult:
    return PolicyResult(policy, tenants, timeline, virtual_s=6.0, wall_s=0.5, iterations=27, decisions=4)


# -- percentiles --------------------------------------------------------------------------------------------------------


def by_definition(values: list[float], thousandths: int) -> float:
    """The smallest value such that at least so many thousandths of all values are at most it, in whole numbers."""
    ordered = sorted(values)
    for number, value in enumerate(ordered, 1):
        if 1000 * number >= thousandths * len(ordered):
            return value
    raise AssertionError("no values")


@settings(max_examples=200, deadline=None)
@given(pairs=PAIRS.filter(bool), thousandths=st.integers(0, 1000))
def test_percentiles_of_pairs_are_those_of_their_expansion(pairs, thousandths) -> None:
    expanded = [value for value, count in pairs for _ in range(count)]
    expected = by_definition(expanded, thousandths)
    assert weighted_percentile(pairs, thousandths / 1000) == expected
    assert weighted_percentile(reversed(pairs), thousandths / 1000) == expected
    assert percentile(expanded[::-1], thousandths / 1000) == expected


def test_percentiles_agree_with_numpy() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    values = [0.5, 3.0, 1.0, 1.0, 7.5, 2.0, 9.0]
    for q in (0.0, 0.01, 0.25, 0.5, 0.7, 0.99, 1.0):
        assert percentile(values, q) == numpy.quantile(values, q, method="inverted_cdf")


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


# -- a run --------------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_run_are_over_all_tenants() -> None:
    other = tenant(
        "b",
        ttft_s=(9.0,),
        tpot_s=(0.01,),
        finished=1,
        tbt=((0.5, 3), (2.0, 1)),
        stall_s=0.0,
        compute_s=4.0,
        preemptions=0,
    )
    both = run(tenant(), other)
    assert both.requests == 8 and both.requests_finished == 4
    assert both.tokens_per_s == 60 / 6.0
    assert (both.ttft_p50_s, both.ttft_p99_s, both.ttft_mean_s) == (0.2, 9.0, pytest.approx(2.4))
    # 20 gaps of 10 ms, 10 of 500 ms, 1 of 2 s.
    assert (both.tbt_p50_s, both.tbt_p99_s) == (0.01, 2.0)
    assert both.tbt_mean_s == pytest.approx((20 * 0.01 + 10 * 0.5 + 2.0) / 31)
    assert both.tpot_p99_s == 0.05
    assert both.preemptions == 2
    assert (both.kv_blocks_peak, both.layers_remapped_peak) == (30, 5.0)
    assert both.stall_fraction == pytest.approx(1.0 / 8.0)
    assert tenant().stall_fraction == 0.25
    head = both.headline()
    assert tuple(head) == HEADLINE
    assert head["requests_finished"] == 4 and head["tbt_p99_s"] == 2.0


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(1, 9)), max_size=12),
    ttft=st.integers(1, 9),
    tpot=st.integers(1, 9),
)
def test_goodput_counts_requests_that_meet_both_targets(requests, ttft, tpot) -> None:
    """Request by request, both targets included; one of a single token has no time between tokens."""
    result = run(tenant(ttft_s=tuple(a for a, _ in requests), tpot_s=tuple(b for _, b in requests)), tenant("b"))
    good = 0
    for waited, each in requests:
        if waited <= ttft and (each is None or each <= tpot):
            good += 1
    counted = replace(result, targets=Targets(float(ttft), float(tpot)))
    assert counted.goodput_per_s == pytest.approx((good + 3) / 6.0)  # b's three meet targets of a second or more
    assert replace(counted, targets=result.targets) == result  # they change nothing else


def test_goodput_by_hand() -> None:
    """First tokens after 0.3, 0.1 and 0.2 s; tokens every 50 ms, one only, and every 20 ms."""
    result = run(tenant())
    assert result.targets == Targets(2.0, 0.2) and result.goodput_per_s == 3 / 6.0
    assert replace(result, targets=Targets(0.2, 0.2)).goodput_per_s == 2 / 6.0
    assert replace(result, targets=Targets(2.0, 0.02)).goodput_per_s == 2 / 6.0
    assert replace(result, targets=Targets(0.15, 0.01)).goodput_per_s == 1 / 6.0
    assert replace(result, virtual_s=0.0).goodput_per_s == 0.0


@pytest.mark.parametrize("field", ["ttft_s", "tpot_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_targets_are_times(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Targets(**{field: value})
    assert caught.value.field == field


def test_a_run_in_which_nothing_finished_has_a_headline() -> None:
    nothing = run(tenant(ttft_s=(), tpot_s=(), tbt=(), finished=0, output_tokens=0, compute_s=0.0, stall_s=0.0))
    head = nothing.headline()
    assert head["ttft_p50_s"] is None and head["tbt_p99_s"] is None
    assert head["tokens_per_s"] == 0.0 and head["stall_fraction"] == 0.0
    assert from_json(json.loads(json.dumps(nothing.to_json(), allow_nan=False))) == nothing


# -- files --------------------------------------------------------------------------------------------------------------

TENANTS = st.builds(
    tenant,
    name=st.text(max_size=5),
    tbt=PAIRS,
    compute_s=st.floats(0, 1e6),
)
REQUESTS = st.lists(st.tuples(st.floats(0, 1e6), st.none() | st.floats(0, 1e6)), max_size=5)
TENANTS = st.builds(
    lambda one, requests: replace(one, ttft_s=tuple(t for t, _ in requests), tpot_s=tuple(t for _, t in requests)),
    TENANTS,
    REQUESTS,
)
SAMPLES = st.builds(sample, time_s=st.floats(0, 1e6), name=st.sampled_from("ab"))


@settings(max_examples=50, deadline=None)
@given(tenants=st.lists(TENANTS, min_size=1, max_size=3).map(tuple), timeline=st.lists(SAMPLES, max_size=8).map(tuple))
def test_a_file_gives_back_the_result(tenants, timeline) -> None:
    result = run(*tenants, timeline=timeline)
    assert from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result


def test_the_report_has_the_names_that_were_promised() -> None:
    results = [run(tenant(), policy="recompute"), run(tenant(), timeline=(sample(0.5),))]
    data = json.loads(json.dumps(report({"machine": "X"}, results)))
    assert set(data) == {"configuration", "policies"}
    assert list(data["policies"]) == ["recompute", "remap"]
    for entry, result in zip(data["policies"].values(), results):
        assert {name: entry[name] for name in HEADLINE} == result.headline()
    assert from_report(data) == ({"machine": "X"}, tuple(results))
    assert not any("against_ideal" in entry for entry in data["policies"].values())
    with pytest.raises(InvalidArgument) as caught:
        report({}, [results[0], results[0]])
    assert (caught.value.field, caught.value.value) == ("policy", "recompute")


def test_a_report_with_ideal_says_how_far_everybody_comes() -> None:
    fast = run(tenant(ttft_s=(0.0, 0.1, 0.1)), policy="ideal")
    data = json.loads(json.dumps(report({}, [run(tenant(), policy="recompute"), run(tenant()), fast]), allow_nan=False))
    told = {name: entry["against_ideal"] for name, entry in data["policies"].items()}
    none = {"gap_closed_tokens_per_s": None, "tbt_p99_of_ideal": 1.0}  # equal tokens/s: there is no gap
    assert told == {
        "recompute": {"gap_closed_ttft_p99": 0.0, **none},
        "remap": {"gap_closed_ttft_p99": 0.0, **none},
        "ideal": {"gap_closed_ttft_p99": 1.0, **none},
    }


# A bulk of gaps near 20 ms, and a tail over three orders of magnitude, as preemptions make it.
LONG_TAIL = st.integers(0, 10**6).map(
    lambda seed: ascending(
        {
            round(0.02 + 0.03 * ((seed * 7919 + number * 104729) % 10007) / 10007 + (0.001 * 1.01**number), 7): 1
            + (number * seed) % 17
            for number in range(1100)
        }
        | {0.015 + number * 1e-6: 3 for number in range(3000)}
    )
)


@settings(max_examples=20, deadline=None)
@given(LONG_TAIL)
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
