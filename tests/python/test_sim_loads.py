"""Arrivals and lengths by name: the statistics of what they are named after, exact counts and rates, files, refusals.

The figures of the traces and data sets are facts about them (see `remap.sim.loads` and `workload`). What compares with the files
themselves is skipped where they are not: REMAP_TRACES names their folder.
"""

from __future__ import annotations

import gzip
import math
import os
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap.sim.lengths import Quantiles, Uniform
from remap.sim.loads import ALPACA_PAPER, ARRIVALS, BURSTGPT, LENGTHS, LONG, SHAREGPT_PAPER, SHORT, load
from remap.sim.results import percentile
from remap.sim.workload import AZURE_CODE, Arrivals, Lengths, Lognormal, summary

DATA = os.environ.get("REMAP_TRACES", "")


def data(name: str) -> str:
    """The path of a trace file; skips the test where it is not."""
    path = Path(DATA) / f"{name}.csv.gz"
    if not DATA or not path.exists():
        pytest.skip(f"the data file {path.name} is not here; REMAP_TRACES names the folder with the trace files")
    return str(path)


# -- arrivals -----------------------------------------------------------------------------------------------------------


def windows(times: list[float], width: float) -> list[int]:
    counts = [0] * int(times[-1] / width)
    for time in times:
        if int(time / width) < len(counts):
            counts[int(time / width)] += 1
    return counts


def dispersion(counts: list[int]) -> float:
    return statistics.pvariance(counts) / statistics.fmean(counts)


def empty(counts: list[int]) -> float:
    return counts.count(0) / len(counts)


def gap_variation(times: list[float]) -> float:
    gaps = [b - a for a, b in zip(times, times[1:])]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


@pytest.fixture(scope="module")
def code() -> list[float]:
    """58 times the length of the trace: what remains is the generator's, not the draw's."""
    return list(AZURE_CODE.times(58 * 3436.0, random.Random(11)))


def test_azure_code_has_the_statistics_of_the_trace(code) -> None:
    """Azure LLM inference trace 2023, code: 8819 arrivals in 3436 s."""
    assert len(code) / (58 * 3436.0) == pytest.approx(2.567, rel=0.07)
    assert gap_variation(code) == pytest.approx(13.15, rel=0.05)
    seconds, tens, minutes = (windows(code, width) for width in (1.0, 10.0, 60.0))
    assert dispersion(seconds) == pytest.approx(13.18, rel=0.1)
    assert statistics.pstdev(seconds) / statistics.fmean(seconds) == pytest.approx(2.266, rel=0.1)
    assert empty(seconds) == pytest.approx(0.734, abs=0.02)
    assert dispersion(tens) == pytest.approx(71.3, rel=0.15)
    assert statistics.pstdev(tens) / statistics.fmean(tens) == pytest.approx(1.668, rel=0.1)
    assert empty(tens) == pytest.approx(0.561, abs=0.05)
    assert dispersion(minutes) == pytest.approx(160.5, rel=0.2)
    assert empty(minutes) == pytest.approx(0.207, abs=0.04)


def test_parts_of_azure_code_as_long_as_the_trace_have_its_peaks_and_silences(code) -> None:
    peaks, heights, silences = [], [], []
    for part in range(58):
        times = [time - part * 3436.0 for time in code if part * 3436.0 <= time < (part + 1) * 3436.0]
        seconds, tens = windows(times, 1.0), windows(times, 10.0)
        peaks.append(max(seconds) / statistics.fmean(seconds))
        heights.append(max(tens) / statistics.fmean(tens))
        silences.append(max(b - a for a, b in zip(times, times[1:])))
    for seen, of_trace in ((peaks, 26.1), (heights, 12.76), (silences, 217.2)):
        assert statistics.median(seen) == pytest.approx(of_trace, rel=0.25)
        assert min(seen) < of_trace < max(seen)


def test_burstgpt_like_has_the_statistics_of_its_first_week() -> None:
    """Compressed 300 times: 18,883 arrivals in 2016 s."""
    times = list(BURSTGPT.times(60_000.0, random.Random(1)))
    seconds, tens = windows(times, 1.0), windows(times, 10.0)
    assert len(times) / 60_000.0 == pytest.approx(9.368, rel=0.05)
    assert gap_variation(times) == pytest.approx(5.83, rel=0.1)
    assert dispersion(seconds) == pytest.approx(9.8, rel=0.15)
    assert empty(seconds) == pytest.approx(0.22, abs=0.04)
    assert dispersion(tens) == pytest.approx(65.5, rel=0.2)
    assert empty(tens) == pytest.approx(0.05, abs=0.03)


@pytest.mark.parametrize(
    ("name", "pattern", "shorten"), [("azure_code", AZURE_CODE, 1), ("burstgpt_week1_recon", BURSTGPT, 300)]
)
def test_the_figures_above_are_those_of_the_files(name, pattern, shorten) -> None:
    with gzip.open(data(name), "rt") as stream:
        next(stream)
        times = sorted(float(line.split(",")[0]) / shorten for line in stream)
    times = [time - times[0] for time in times]
    assert (len(times) - 1) / times[-1] == pytest.approx(pattern.rate, rel=0.001)
    assert gap_variation(times) == pytest.approx(pattern.cv, rel=0.001)
    of_file = [dispersion(windows(times, width)) for width in (1.0, 10.0)]
    assert of_file == pytest.approx({"azure_code": [13.18, 71.3]}.get(name, [9.8, 65.5]), rel=0.01)


@settings(max_examples=60, deadline=None)
@given(
    cv=st.floats(1.01, 20.0),
    duty=st.floats(0.05, 0.9),
    spread=st.floats(0.01, 3.0),
    spells=st.floats(1.0, 20.0),
)
def test_spells_keep_the_variation_of_the_gaps(cv, duty, spread, spells) -> None:
    """The wait for the next arrival from any moment, from the process's own equations: with the rates of two states put into
    them numerically, cv^2 = 2 rate R - 1."""
    arrivals = Arrivals(1.0, cv, duty, spread, spells)
    off, on = 1 / arrivals.silence_s, 1 / arrivals.burst_s
    sigma = math.sqrt(math.log1p(spread * spread))
    normal = statistics.NormalDist()
    # Quadrature by the midpoints of 4001 equal shares.
    rates = [math.exp(sigma * normal.inv_cdf((k + 0.5) / 4001) - sigma * sigma / 2) / duty for k in range(4001)]
    # From a fresh spell: an arrival, a new spell, or the end of the burst and then a fresh spell, whichever is first. Iterated
    # to its fixed point as a linear equation wait = known + factor * wait.
    known = statistics.fmean((1 + on / off) / (rate + spells * on) for rate in rates)
    factor = statistics.fmean(spells * on / (rate + spells * on) for rate in rates)
    wait_on = known / (1 - factor)
    wait = wait_on + (1 - duty) / off
    assert math.sqrt(2 * wait - 1) == pytest.approx(cv, rel=0.02 + 0.03 * (spread > 1.5))


def test_spells_of_one_rate_are_the_plain_process() -> None:
    plain, same = Arrivals(2.0, 5.0, 0.3), Arrivals(2.0, 5.0, 0.3, spread=1e-6, spells=4.0)
    assert same.burst_s == pytest.approx(plain.burst_s, rel=1e-4)
    assert same.silence_s == pytest.approx(plain.silence_s, rel=1e-4)


@pytest.mark.parametrize(("cv", "spread", "spells"), [(4.0, 0.85, 8.0), (3.0, 1.5, 1.0)])
def test_drawn_spells_have_the_mean_and_the_variation(cv, spread, spells) -> None:
    times = list(Arrivals(20.0, cv, 0.3, spread, spells).times(20_000.0, random.Random(4)))
    assert len(times) / 20_000.0 == pytest.approx(20.0, rel=0.05)
    assert gap_variation(times) == pytest.approx(cv, rel=0.06)
    assert times == sorted(times)


# -- lengths ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "lengths"), [("sharegpt_paper_means", SHAREGPT_PAPER), ("alpaca_paper_means", ALPACA_PAPER)]
)
def test_quantiles_of_lengths_are_those_of_the_files(name, lengths) -> None:
    with gzip.open(data(name), "rt") as stream:
        next(stream)
        rows = [tuple(map(int, line.split(","))) for line in stream]
    for ours, column in ((lengths.prompt, 0), (lengths.output, 1)):
        theirs = [row[column] for row in rows]
        assert ours.cut_mean == pytest.approx(statistics.fmean(theirs), rel=0.015)
        for share in (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99):
            assert ours.at(share) == pytest.approx(percentile(theirs, share), rel=0.08, abs=0.6)


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


@settings(max_examples=60, deadline=None)
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


# -- requests of named loads ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
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
    one, other = (load(["a", "b"], requests=500, rate=2.0, seed=seed) for seed in (1, 2))
    assert [item.time_s for item in one] != [item.time_s for item in other]
    assert [item.prompt_tokens for item in one] != [item.prompt_tokens for item in other]
    fast = load(["a", "b"], requests=500, rate=8.0, seed=1)
    assert [item.time_s * 4 for item in fast] == pytest.approx([item.time_s for item in one])
    assert [(i.tenant, i.prompt_tokens, i.output_tokens) for i in fast] == [
        (i.tenant, i.prompt_tokens, i.output_tokens) for i in one
    ]
    # The same pattern with other lengths.
    assert [i.time_s for i in load(["a", "b"], requests=500, rate=2.0, seed=1, lengths="alpaca")] == [
        i.time_s for i in one
    ]
    assert abs(summary(one).rate - 2.0) < 0.1


def test_each_tenant_has_its_own_load() -> None:
    items = load(
        ["a", "b"], requests=600, rate=(4.0, 2.0), arrivals=("poisson", "bursty:6:0.2"), lengths=("fixed:7:3", "long")
    )
    a, b = ([item for item in items if item.tenant == name] for name in "ab")
    assert (len(a), len(b)) == (400, 200)
    assert {(item.prompt_tokens, item.output_tokens) for item in a} == {(7, 3)}
    assert min(item.prompt_tokens for item in b) >= 1256
    assert summary(a).cv == pytest.approx(1.0, abs=0.15)
    assert summary(b).cv > 3


def test_the_context_of_a_model_bounds_its_requests() -> None:
    items = load(["a", "b"], requests=2000, rate=1.0, context={"a": 512})
    longest = {name: max(i.prompt_tokens + i.output_tokens for i in items if i.tenant == name) for name in "ab"}
    assert longest["a"] == 512 and 1024 < longest["b"] <= 2047
    assert all(item.prompt_tokens >= 1 and item.output_tokens >= 1 for item in items)


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


def test_tenants_of_one_file_begin_at_different_rows(tmp_path) -> None:
    path = write(tmp_path / "t.csv", TRACE)
    items = load(
        ["a", "b", "c"], requests=12, rate=3.0, arrivals=(path, "poisson", path), lengths=(path, "alpaca", path)
    )
    prompts = {name: [item.prompt_tokens for item in items if item.tenant == name] for name in "ac"}
    assert prompts == {"a": [20, 10, 40, 30], "c": [40, 30, 20, 10]}


def test_lengths_of_another_file_are_shuffled_and_all_used(tmp_path) -> None:
    rows = "".join(f"{number},{number + 100}\n" for number in range(1, 41))
    path = write(tmp_path / "l.csv", "input_tokens,output_tokens\n" + rows)
    pairs = [
        [(i.prompt_tokens, i.output_tokens) for i in load(["a"], requests=80, rate=1.0, lengths=path, seed=seed)]
        for seed in (1, 2)
    ]
    assert sorted(pairs[0][:40]) == sorted(pairs[0][40:]) == [(n, n + 100) for n in range(1, 41)]
    assert pairs[0][:40] != pairs[0][40:] and pairs[0] != pairs[1]
    cut = load(["a"], requests=40, rate=1.0, lengths=path, context={"a": 120})
    assert max(i.prompt_tokens + i.output_tokens for i in cut) == 120


def test_real_traces_at_a_rate() -> None:
    items = load(
        ["a", "b"],
        requests=8819 * 2,
        rate=10.0,
        arrivals=data("azure_code"),
        lengths=data("sharegpt_paper_means"),
        seed=3,
    )
    for name in "ab":
        mine = [item for item in items if item.tenant == name]
        assert len(mine) == 8819
        seen = summary(mine)
        assert seen.rate == pytest.approx(5.0, rel=0.05)
        assert seen.cv == pytest.approx(13.15, rel=0.03)
        assert seen.mean_prompt == pytest.approx(161.31, rel=0.03)
        assert seen.mean_output == pytest.approx(337.99, rel=0.03)
    # They do not burst together.
    a, b = (windows([i.time_s for i in items if i.tenant == name], 1.0) for name in "ab")
    assert abs(statistics.correlation(a[:1500], b[:1500])) < 0.2


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"arrivals": "azure"}, "arrivals", "azure-code"),
        ({"arrivals": "bursty:x"}, "arrivals", "bursty:CV:DUTY"),
        ({"arrivals": "bursty:4:0.5:1"}, "arrivals", "bursty:CV:DUTY"),
        ({"arrivals": "bursty:-4"}, "cv", "above 0"),
        ({"arrivals": ("poisson",) * 3}, "arrivals", "3 values for 2 tenants"),
        ({"arrivals": "/nowhere/t.csv"}, "arrivals", "/nowhere/t.csv"),
        ({"lengths": "shareGPT"}, "lengths", "sharegpt"),
        ({"lengths": "fixed:3"}, "lengths", "fixed:IN:OUT"),
        ({"lengths": "fixed:0:3"}, "lengths", "fixed:IN:OUT"),
        ({"lengths": "fixed:1.5:3"}, "lengths", "fixed:IN:OUT"),
        ({"lengths": "/nowhere/l.csv.gz"}, "lengths", "/nowhere/l.csv.gz"),
        ({"rate": 0.0}, "rate", "above 0"),
        ({"rate": (1.0, 2.0, 3.0)}, "rate", "3 values for 2 tenants"),
        ({"rate": (1.0, math.inf)}, "rate", "above 0"),
        ({"requests": 1}, "requests", "at least one a tenant"),
        ({"tenants": ()}, "tenants", "at least one"),
        ({"tenants": ("a", "a")}, "tenants", "each once"),
    ],
)
def test_refusals_name_what_is_known(change, field, says) -> None:
    arguments = {"tenants": ("a", "b"), "requests": 10, "rate": 1.0, **change}
    with pytest.raises(InvalidArgument) as caught:
        load(**arguments)
    assert caught.value.field == field
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "arrival\n1\n", "arrival_s,input_tokens,output_tokens\n", "arrival_s,input_tokens,output_tokens\nx,y,z\n",
     "arrival_s,input_tokens,output_tokens\nnan,nan,nan\n", "arrival_s,input_tokens,output_tokens\n1\n"],
)  # fmt: skip
def test_files_without_what_is_needed(tmp_path, text) -> None:
    path = write(tmp_path / "bad.csv", text)
    for field in ("arrivals", "lengths"):
        if field == "arrivals" and text.endswith("s\n1\n"):
            continue  # a row with an arrival alone has what arrivals need
        with pytest.raises(InvalidArgument) as caught:
            load(["a"], requests=2, rate=1.0, **{field: path})
        assert caught.value.field == field
    (tmp_path / "bad.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(InvalidArgument):
        load(["a"], requests=2, rate=1.0, arrivals=str(tmp_path / "bad.csv.gz"))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Quantiles((0.0,), (1,)), "shares"),
        (lambda: Quantiles((0.0, 0.5), (1, 2)), "shares"),
        (lambda: Quantiles((0.0, 0.5, 0.5, 1.0), (1, 2, 3, 4)), "shares"),
        (lambda: Quantiles((0.0, 1.0), (2, 1)), "tokens"),
        (lambda: Quantiles((0.0, 1.0), (0, 1)), "tokens"),
        (lambda: Quantiles((0.0, 1.0), (1, math.inf)), "tokens"),
        (lambda: Quantiles((0.0, 1.0), (1, 2, 3)), "tokens"),
        (lambda: Quantiles((0.0, 1.0), (1, 2), least=3, most=2), "least"),
        (lambda: Uniform(0, 4), "least"),
        (lambda: Uniform(5, 4), "least"),
        (lambda: Lengths(Uniform(1, 4), Uniform(1, 4), total=1), "total"),
        (lambda: Arrivals(1.0, 2.0, spread=-1.0), "spread"),
        (lambda: Arrivals(1.0, 2.0, spells=0.5), "spells"),
    ],
)
def test_distributions_refuse_what_makes_no_sense(make, field) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field
