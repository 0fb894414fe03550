"""Arrivals and lengths: the moments that were asked for, independence of the seed's streams, merging, traces from files."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap_serve.sim.workload import (
    ALPACA,
    AZURE_CONVERSATION,
    SHAREGPT,
    Arrivals,
    Item,
    Lengths,
    Load,
    Lognormal,
    generate,
    merge,
    summary,
)

FIXED = Lengths(Lognormal(10, 0.0), Lognormal(5, 0.0))


@pytest.mark.parametrize("shape", [(0.3, 0.5), (1.0, 0.5), (1.5, 0.2), (13.15, 0.25), (4.0, 0.3, 0.85, 8.0)])
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(shape: tuple[float, ...]) -> None:
    """cv, duty, and for spells of unequal rate their spread and how many there are in a burst."""
    times = list(Arrivals(20.0, *shape).times(40_000.0, random.Random(0)))
    gaps = [b - a for a, b in zip(times, times[1:])]
    assert times == sorted(times)
    assert statistics.fmean(gaps) == pytest.approx(1 / 20.0, rel=0.08)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(shape[0], rel=0.12)


def test_the_process_is_in_its_steady_state_from_the_start() -> None:
    """The share of runs with an arrival in the first moments is the long-run rate, for even arrivals as for bursts."""
    for arrivals in (Arrivals(1.0, 0.2), Arrivals(1.0, 1.0), Arrivals(1.0, 6.0)):
        counts = [sum(1 for _ in arrivals.times(0.5, random.Random(seed))) for seed in range(4000)]
        assert sum(counts) / len(counts) == pytest.approx(0.5, rel=0.15)


def test_presets_look_like_what_they_are_named_after() -> None:
    calm = summary(generate([Load("a", AZURE_CONVERSATION, ALPACA)], 5_000, 1))
    assert calm.cv == pytest.approx(1.094, rel=0.03)
    assert calm.empty_share < 0.02  # trace: 0.01
    assert (calm.mean_prompt, calm.mean_output) == pytest.approx((19.31, 58.45), rel=0.03)
    prompts = sorted(item.prompt_tokens for item in generate([Load("a", Arrivals(10.0), SHAREGPT)], 4000, 2))
    assert prompts[len(prompts) // 2] == pytest.approx(50, abs=5)
    assert 4 <= prompts[0] < prompts[-1] == 1024


def test_same_seed_same_work_whoever_else_there_is() -> None:
    a, b = Load("a", Arrivals(3.0, 4.0), ALPACA), Load("b", Arrivals(0.7), SHAREGPT)
    both, alone = generate([a, b], 50, 7), list(generate([a], 50, 7))
    assert [item for item in both if item.tenant == "a"] == alone
    assert [item for item in both if item.tenant == "b"] == list(generate([b], 50, 7))
    assert list(generate([a], 50, 8)) != alone

    def times(load: Load) -> list[float]:
        return [item.time_s for item in generate([load], 50, 7)]

    assert times(Load("c", a.arrivals, a.lengths)) != times(a)
    assert times(Load("a", a.arrivals, SHAREGPT)) == times(a)  # other lengths leave the arrivals as they are


def test_phases_begin_and_end_where_they_should() -> None:
    phases = (("a", 50.0, 0.0, 10.0), ("a", 10.0, 10.0, math.inf), ("b", 5.0, 30.0, math.inf))
    items = generate(
        [Load(name, Arrivals(rate), FIXED, begin_s=at, end_s=to) for name, rate, at, to in phases], 20.0, 3
    )
    early, late = ([i for i in items if low <= i.time_s < low + 10] for low in (0, 10))
    assert len(early) + len(late) == len(items)
    assert (len(early), len(late)) == (pytest.approx(500, rel=0.2), pytest.approx(100, rel=0.3))
    assert {item.tenant for item in items} == {"a"}
    assert all((item.prompt_tokens, item.output_tokens) == (10, 5) for item in items)


@settings(max_examples=examples(50))
@given(st.lists(st.lists(st.floats(0, 100).map(lambda t: round(t, 1)), max_size=8), max_size=4))
def test_merge_is_a_stable_sort(streams: list[list[float]]) -> None:
    made = [[Item(f"t{n}", time, 1, 1) for time in sorted(times)] for n, times in enumerate(streams)]
    flat = [item for stream in made for item in stream]
    assert list(merge(*made)) == sorted(flat, key=lambda item: item.time_s)


@settings(max_examples=30)
@given(
    mean=st.floats(5, 200),
    sigma=st.floats(0.0, 1.5),
    least=st.integers(1, 20),
    span=st.integers(0, 300),
    seed=st.integers(0, 99),
)
def test_the_mean_after_the_cut_is_that_of_what_is_drawn(mean, sigma, least, span, seed) -> None:
    lengths = Lognormal(mean, sigma, least, least + span)
    rng = random.Random(seed)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    error = 2 * span / math.sqrt(len(drawn))  # four standard errors at most
    assert lengths.cut_mean == pytest.approx(sum(drawn) / len(drawn), abs=error + 0.5)  # 0.5: whole tokens


def test_summary_counts_windows_and_gaps() -> None:
    items = [Item("a", time, 2, 4) for time in (0.0, 0.1, 0.2, 3.2)]
    seen = summary(items)
    assert (seen.requests, seen.peak_rate, seen.empty_share) == (4, 3.0, 0.5)
    assert (seen.mean_prompt, seen.mean_output) == (2.0, 4.0)
    assert seen.rate == pytest.approx(3 / 3.2)
    assert seen.cv == pytest.approx(math.sqrt(((0.1 - 3.2 / 3) ** 2 * 2 + (3 - 3.2 / 3) ** 2) / 3) / (3.2 / 3))
    assert summary(items[:1]).rate == 0.0
