"""Arrivals and lengths by name: the statistics of what they are named after, exact counts and rates, files, refusals.

The figures of the traces and data sets are facts about them (see `remap_serve.sim.loads` and `workload`).
"""

from __future__ import annotations

import gzip
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap_serve.sim.lengths import Quantiles, Uniform
from remap_serve.sim.loads import ALPACA_PAPER, ARRIVALS, BURSTGPT, LENGTHS, LONG, SHAREGPT_PAPER, SHORT, load
from remap_serve.sim.results import percentile
from remap_serve.sim.workload import ALPACA, AZURE_CODE, Arrivals, Lengths, Lognormal, generate


def windows(times: list[float], width: float) -> list[int]:
    counts = [0] * int(times[-1] / width)
    for time in times:
        if int(time / width) < len(counts):
            counts[int(time / width)] += 1
    return counts


def gap_variation(times: list[float]) -> float:
    gaps = [b - a for a, b in zip(times, times[1:])]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


# Of a window of so many seconds: dispersion and its tolerance, share of empty windows and its tolerance.
CODE = {1: (13.18, 0.1, 0.734, 0.02), 10: (71.3, 0.15, 0.561, 0.05), 60: (160.5, 0.2, 0.207, 0.04)}
WEEK = {1: (9.8, 0.15, 0.22, 0.04), 10: (65.5, 0.2, 0.05, 0.03)}


# Azure LLM inference trace 2023, code: 8819 arrivals in 3436 s. BurstGPT, first week, 300 times as fast: 18,883 in 2016 s.
@pytest.mark.parametrize(
    ("pattern", "rate", "cv", "by_width"), [(AZURE_CODE, 2.567, 13.15, CODE), (BURSTGPT, 9.368, 5.83, WEEK)]
)
def test_patterns_have_the_statistics_of_the_traces(pattern, rate, cv, by_width) -> None:
    """Drawn for many times the length of the trace: what remains is the generator's, not the draw's."""
    span = 500_000 / rate
    times = list(pattern.times(span, random.Random(11)))
    assert len(times) / span == pytest.approx(rate, rel=0.07)
    assert gap_variation(times) == pytest.approx(cv, rel=0.1)
    for width, (dispersion, off, empty, by) in by_width.items():
        counts = windows(times, float(width))
        assert statistics.pvariance(counts) / statistics.fmean(counts) == pytest.approx(dispersion, rel=off)
        assert counts.count(0) / len(counts) == pytest.approx(empty, abs=by)


def drawn(lengths: Lengths, count: int = 40_000) -> tuple[list[int], list[int]]:
    rng = random.Random(5)
    pairs = [lengths.draw(rng) for _ in range(count)]
    return [prompt for prompt, _ in pairs], [output for _, output in pairs]


@pytest.mark.parametrize(
    ("lengths", "prompt", "output", "most"),
    [
        # mean, P50, P90, P99 of the data sets with the papers' means.
        (SHAREGPT_PAPER, (161.31, 29, 523, 1572), (337.99, 286, 702, 1248), 2047),
        (ALPACA_PAPER, (19.31, 15, 33, 91), (58.46, 43, 127, 275), 864),
    ],
)
def test_lengths_are_those_of_the_papers_data_sets(lengths, prompt, output, most) -> None:
    prompts, outputs = drawn(lengths)
    for seen, (mean, *quantiles) in ((prompts, prompt), (outputs, output)):
        assert statistics.fmean(seen) == pytest.approx(mean, rel=0.02)
        for q, expected in zip((0.5, 0.9, 0.99), quantiles):
            assert percentile(seen, q) == pytest.approx(expected, rel=0.06)
    assert max(map(sum, zip(prompts, outputs))) <= most
    # The closed form, without what the cut of the sum takes (1.4 % of ShareGPT's prompts' mean).
    assert lengths.prompt.cut_mean == pytest.approx(prompt[0], rel=0.015)
    assert lengths.output.cut_mean == pytest.approx(output[0], rel=0.005)


def test_long_and_short_requests_are_oneiros() -> None:
    for lengths, mean in ((LONG, 1734), (SHORT, 634)):
        assert lengths.prompt.mean + lengths.output.mean == mean
        prompts, outputs = drawn(lengths, 4000)
        assert statistics.fmean(map(sum, zip(prompts, outputs))) == pytest.approx(mean, rel=0.01)
        assert max(map(sum, zip(prompts, outputs))) <= 2048
        assert len(set(prompts)) > 50 < len(set(outputs))


def test_the_mean_of_knots_that_hardly_differ() -> None:
    """Hypothesis found 5.022: the logarithm of 1 + 2e-14 has three digits."""
    table = Quantiles((0.0, 1.0), (5.0, 5.0 + 1e-13), 1, 10)
    assert table.mean == pytest.approx(5.0, rel=1e-9) == table.cut_mean


@settings(max_examples=examples(60), deadline=None)
@given(
    steps=st.lists(st.floats(0.0, 300.0), min_size=1, max_size=5),
    first=st.floats(1.0, 30.0),
    least=st.integers(1, 200),
    span=st.integers(0, 400),
)
def test_the_mean_of_a_table_of_quantiles(steps, first, least, span) -> None:
    """The closed form against the mean over shares, cut or not."""
    tokens = [first]
    for step in steps:
        tokens.append(tokens[-1] + step)
    shares = (*(number / len(steps) for number in range(len(steps))), 1.0)
    table = Quantiles(shares, tuple(tokens), least, least + span)
    places = [(number + 0.5) / 3000 for number in range(3000)]
    assert table.mean == pytest.approx(statistics.fmean(map(table.at, places)), rel=2e-3)
    cut = [max(least, min(table.at(place), least + span)) for place in places]
    assert table.cut_mean == pytest.approx(statistics.fmean(cut), rel=2e-3)
    assert table.at(0.0) == first and table.at(1.0) == pytest.approx(tokens[-1])
    rng = random.Random(1)
    assert all(least <= table.draw(rng) <= least + span for _ in range(50))
    half = table.scaled(0.5, 77)
    assert half.mean == pytest.approx(table.mean / 2)
    assert half.most == 77


def test_a_request_that_is_too_long_loses_of_its_prompt() -> None:
    rng = random.Random(0)
    assert Lengths(Uniform(900, 900), Uniform(300, 300), total=1000).draw(rng) == (700, 300)
    assert Lengths(Uniform(900, 900), Uniform(3000, 3000), total=1000).draw(rng) == (1, 999)
    assert Lengths(Uniform(600, 600), Uniform(400, 400), total=1000).draw(rng) == (600, 400)
    half = Lengths(Uniform(4, 8), Lognormal(10, 0.5, 1, 64), total=100).scaled(0.5)
    assert (half.prompt, half.output.most, half.total) == (Uniform(2, 4), 32, 50)


@settings(max_examples=examples(40), deadline=None)
@given(
    rates=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4),
    requests=st.integers(4, 300),
    arrivals=st.sampled_from(sorted(ARRIVALS)),
    lengths=st.sampled_from(sorted(LENGTHS)),
    seed=st.integers(0, 5),
)
def test_there_are_exactly_as_many_requests_in_exactly_that_time(rates, requests, arrivals, lengths, seed) -> None:
    names = [f"t{number}" for number in range(len(rates))]
    given_rate = rates if len(rates) > 1 else rates[0]
    items = load(names, requests=requests, rate=given_rate, arrivals=arrivals, lengths=lengths, seed=seed)
    assert len(items) == requests
    seconds = requests / math.fsum(rates)
    assert all(0 <= a.time_s <= b.time_s < seconds for a, b in zip(items, items[1:]))
    for name, rate in zip(names, rates):
        share = sum(item.tenant == name for item in items)
        assert abs(share - requests * rate / math.fsum(rates)) < 1
    assert items == load(names, requests=requests, rate=given_rate, arrivals=arrivals, lengths=lengths, seed=seed)


def test_the_seed_and_the_rate() -> None:
    def drawn_with(rate: float = 2.0, **changed: Any) -> tuple[list[float], list[int]]:
        items = load(["a", "b"], requests=500, rate=rate, **{"seed": 1, **changed})
        return [item.time_s for item in items], [item.prompt_tokens for item in items]

    times, prompts = drawn_with()
    other_times, other_prompts = drawn_with(seed=2)
    assert times != other_times and prompts != other_prompts
    fast_times, fast_prompts = drawn_with(rate=8.0)
    assert [time * 4 for time in fast_times] == pytest.approx(times) and fast_prompts == prompts
    assert drawn_with(lengths="alpaca")[0] == times  # the same pattern with other lengths


def write(path: Path, text: str) -> str:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


TRACE = (
    "arrival_s,input_tokens,output_tokens\n5,10,1\n4,20,2\n8,30,0\n6,40,4\n"  # in order: 20, 10, 40, 30 at 4, 5, 6, 8
)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_file_is_replayed_and_goes_round(tmp_path, name) -> None:
    path = write(tmp_path / name, TRACE)
    items = load(["a"], requests=6, rate=3.0, arrivals=path, lengths=path)
    assert [item.prompt_tokens for item in items] == [20, 10, 40, 30, 20, 10]
    assert [item.output_tokens for item in items] == [2, 1, 4, 1, 2, 1]
    # Gaps 1, 1, 2, then the mean gap 4/3, 1, and 1 to the one that is not there any more: 22/3 in all, in 2 seconds.
    expected = [time * 2.0 / (22 / 3) for time in (0, 1, 2, 4, 4 + 4 / 3, 4 + 4 / 3 + 1)]
    assert [item.time_s for item in items] == pytest.approx(expected)
    # Tenants of one file begin at different rows.
    items = load(
        ["a", "b", "c"], requests=12, rate=3.0, arrivals=(path, "poisson", path), lengths=(path, "alpaca", path)
    )
    prompts = {name: [item.prompt_tokens for item in items if item.tenant == name] for name in "ac"}
    assert prompts == {"a": [20, 10, 40, 30], "c": [40, 30, 20, 10]}


def test_lengths_of_another_file_are_shuffled_and_all_used(tmp_path) -> None:
    rows = "".join(f"{number},{number + 100}\n" for number in range(1, 41))
    path = write(tmp_path / "l.csv", "input_tokens,output_tokens\n" + rows)

    def pairs(requests: int, **named: Any) -> list[tuple[int, int]]:
        items = load(["a"], requests=requests, rate=1.0, lengths=path, **named)
        return [(item.prompt_tokens, item.output_tokens) for item in items]

    one, other = pairs(80, seed=1), pairs(80, seed=2)
    assert sorted(one[:40]) == sorted(one[40:]) == [(n, n + 100) for n in range(1, 41)]
    assert one[:40] != one[40:] and one != other
    assert max(map(sum, pairs(40, context={"a": 120}))) == 120


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        *(("arrivals", value, "bursty:CV:DUTY") for value in ("bursty:x", "bursty:4:0.5:1")),
        *(("arrivals", "azure", "azure-code"), ("arrivals", ("poisson",) * 3, "3 values for 2 tenants")),
        *(("lengths", value, "fixed:IN:OUT") for value in ("fixed:3", "fixed:0:3", "fixed:1.5:3")),
        *(("lengths", "shareGPT", "sharegpt"), ("lengths", "/nowhere/l.csv.gz", "/nowhere/l.csv.gz")),
        *(("rate", 0.0, "above 0"), ("rate", (1.0, 2.0, 3.0), "3 values"), ("rate", (1.0, math.inf), "above 0")),
        *(("rate", 1e-300, "larger rate"), ("requests", 1, "at least one a tenant"), ("tenants", (), "at least one")),
        *(("tenants", ("a", "a"), "each once"), ("arrivals", "/nowhere/t.csv", "/nowhere/t.csv")),
    ],
)
def test_refusals_name_what_is_known(field: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load(**{"tenants": ("a", "b"), "requests": 10, "rate": 1.0, field: value})
    assert caught.value.field == field and says in str(caught.value)


HEAD = "arrival_s,input_tokens,output_tokens\n"


@pytest.mark.parametrize("text", ["", "arrival\n1\n", HEAD, f"{HEAD}x,y,z\n", f"{HEAD}nan,nan,nan\n", f"{HEAD}1\n"])
def test_files_without_what_is_needed(tmp_path, text) -> None:
    path = write(tmp_path / "bad.csv", text)
    # A row with an arrival alone has what arrivals need.
    for field in ("lengths",) if text.endswith("s\n1\n") else ("arrivals", "lengths"):
        with pytest.raises(InvalidArgument) as caught:
            load(["a"], requests=2, rate=1.0, **{field: path})
        assert caught.value.field == field
    (tmp_path / "bad.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(InvalidArgument):
        load(["a"], requests=2, rate=1.0, arrivals=str(tmp_path / "bad.csv.gz"))


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("shares", lambda: Quantiles((0.0,), (1,))),
        ("shares", lambda: Quantiles((0.0, 0.5), (1, 2))),
        ("shares", lambda: Quantiles((0.0, 0.5, 0.5, 1.0), (1, 2, 3, 4))),
        *(("tokens", lambda t=t: Quantiles((0.0, 1.0), t)) for t in ((2, 1), (0, 1), (1, math.inf), (1, 2, 3))),
        ("least", lambda: Quantiles((0.0, 1.0), (1, 2), least=3, most=2)),
        ("least", lambda: Uniform(0, 4)),
        ("least", lambda: Uniform(5, 4)),
        ("total", lambda: Lengths(Uniform(1, 4), Uniform(1, 4), total=1)),
        *(("rate", lambda r=r: Arrivals(r)) for r in (0.0, math.inf)),
        *(("cv", lambda cv=cv: Arrivals(1.0, cv=cv)) for cv in (-1.0, math.nan)),
        ("duty", lambda: Arrivals(1.0, duty=1.0)),
        ("spread", lambda: Arrivals(1.0, 2.0, spread=-1.0)),
        ("spells", lambda: Arrivals(1.0, 2.0, spells=0.5)),
        ("mean", lambda: Lognormal(0.0, 1.0)),
        ("sigma", lambda: Lognormal(5.0, -1.0)),
        *(("least", lambda k=k, m=m: Lognormal(5.0, 1.0, least=k, most=m)) for k, m in ((9, 8), (0, 8))),
        ("factor", lambda: ALPACA.scaled(0.0)),
        ("seconds", lambda: generate([], 0.0)),
    ],
)
def test_distributions_refuse_what_makes_no_sense(field: str, make: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field
