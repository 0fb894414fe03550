"""`remap.policy.selection` against exhaustive search, the event simulation and the definitions, for any layer times."""

from __future__ import annotations

import itertools
import math
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from remap.policy import schedule, selection
from remap.policy.cost import LayerTimes
from remap.policy.search import EVALUATIONS, Problem, _starts, best_double, hidden

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
from schedule_des import seconds_per_pass
from selection_brute import least_delay, least_period, least_single_waits, window_test

RELAXED = settings(deadline=None, max_examples=200)
SLOW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

# What was found about "best" with two buffers and more: it missed the optimum in none of 12,000 random systems of 4 to 9
# layers and in none of 800 of 12 to 14 (equal, skewed and two-valued times; two and three buffers). For 40 layers it was
# 0.5 % of a pass above a lower bound on average, 7.5 % at most. No theorem says so, so one tenth of a pass is asserted.
BOUND = 1.1


@st.composite
def models(draw: st.DrawFn, most_layers: int = 9) -> tuple[list[int], list[int], tuple[int, ...]]:
    """(compute, transfer, order): integer times, and the nested order with up to two layers pinned."""
    n = draw(st.integers(3, most_layers))
    top = draw(st.sampled_from([1, 3, 20, 1000]))
    dearer = draw(st.sampled_from([1, 2, 4, 10]))
    compute = draw(st.lists(st.integers(0, top), min_size=n, max_size=n))
    transfer = draw(st.lists(st.integers(0, top * dearer), min_size=n, max_size=n))
    pinned = draw(st.sets(st.integers(0, n - 1), max_size=min(2, n - 2)))
    return compute, transfer, tuple(layer for layer in schedule.nested(n) if layer not in pinned)


def times_of(compute: list[int], transfer: list[int]) -> LayerTimes:
    return LayerTimes(tuple(map(float, compute)), tuple(map(float, transfer)))


@RELAXED
@given(models(), st.data())
@example(([1] * 4, [9] * 4, (0, 2, 1, 3)), None)  # nothing can be hidden
def test_best_with_one_buffer_is_the_optimum(
    model: tuple[list[int], list[int], tuple[int, ...]], data: st.DataObject | None
) -> None:
    compute, transfer, order = model
    m = data.draw(st.integers(2, len(order))) if data else 2
    present = data.draw(st.sets(st.sampled_from(order))) if data else set()
    chosen = selection.select("best", order, m - 1, 1, times=times_of(compute, transfer), present=present)
    least = least_single_waits(compute, transfer, order, m)
    assert schedule.stall(compute, transfer, chosen, 1) == pytest.approx(least, rel=1e-9, abs=1e-8 * sum(compute))


@SLOW
@given(models(most_layers=8), st.integers(2, 3), st.data())
def test_best_with_more_buffers_is_within_the_bound(
    model: tuple[list[int], list[int], tuple[int, ...]], buffers: int, data: st.DataObject
) -> None:
    compute, transfer, order = model
    if len(order) <= buffers:
        return
    m = data.draw(st.integers(buffers + 1, len(order)))
    chosen = selection.select("best", order, m - buffers, buffers, times=times_of(compute, transfer))
    found = float(seconds_per_pass(compute, transfer, list(chosen), buffers, "fixed"))
    least = float(least_period(compute, transfer, order, m, buffers))
    assert least * (1 - 1e-9) <= found <= least * BOUND
    if m == buffers + 1 or m == len(order):
        assert found == pytest.approx(least, rel=1e-8)
    for kind in ("nested", "uniform", "uniform_fixed"):
        other = selection.select(kind, order, m - buffers, buffers)
        assert found <= schedule.period(compute, transfer, other, buffers) * (1 + 1e-8)


@RELAXED
@given(models(most_layers=12), st.integers(1, 3), st.data())
def test_no_set_beats_the_lower_bound_and_hidden_is_exact(
    model: tuple[list[int], list[int], tuple[int, ...]], buffers: int, data: st.DataObject
) -> None:
    compute, transfer, order = model
    if len(order) <= buffers:
        return
    m = data.draw(st.integers(buffers + 1, len(order)))
    streamed = sorted(data.draw(st.permutations(order))[:m])
    exact = seconds_per_pass(compute, transfer, streamed, buffers, "fixed")
    assert hidden(compute, transfer, streamed, buffers, sum(compute)) == (exact == sum(compute))
    problem = Problem(compute, transfer, sorted(order), m, buffers, [0.0] * len(compute))
    assert problem.least() <= exact * (1 + 1e-12)
    if m % buffers == 0 and buffers >= 2:
        # In turns, the buffers of one pass are those of the next: the published window test holds as it stands.
        assert window_test(compute, transfer, streamed, buffers) == (exact == sum(compute))


@RELAXED
@given(models(most_layers=12), st.integers(1, 3), st.data())
def test_every_kind_gives_distinct_streamable_layers(
    model: tuple[list[int], list[int], tuple[int, ...]], buffers: int, data: st.DataObject
) -> None:
    compute, transfer, order = model
    remapped = data.draw(st.integers(0, len(order)))
    present = frozenset(data.draw(st.sets(st.integers(0, len(compute) - 1))))
    times = times_of(compute, transfer)
    for kind in selection.KINDS:
        if remapped and remapped + buffers > len(order):
            with pytest.raises(selection.InvalidArgument) as caught:
                selection.select(kind, order, remapped, buffers, times=times, present=present)
            assert (caught.value.remapped, caught.value.buffers, caught.value.streamable) == (
                remapped,
                buffers,
                len(order),
            )
            continue
        chosen = selection.select(kind, order, remapped, buffers, times=times, present=present)
        assert list(chosen) == sorted(set(chosen)) and set(chosen) <= set(order)
        assert len(chosen) == (remapped + buffers if remapped else 0)
        assert chosen == selection.select(kind, order, remapped, buffers, times=times, present=present)
        if kind == "onward" and remapped:
            here = present & set(order)
            assert set(chosen) <= here or set(chosen) >= here
        if kind == "suffix" and remapped:
            assert all(layer < chosen[0] for layer in set(order) - set(chosen))
        if kind == "nested" and 0 < remapped + buffers < len(order):
            assert set(chosen) < set(selection.select(kind, order, remapped + 1, buffers))


@RELAXED
@given(models(most_layers=12), st.integers(1, 2), st.data())
def test_auto_is_the_shortest_and_changes_the_fewest_of_the_equal(
    model: tuple[list[int], list[int], tuple[int, ...]], buffers: int, data: st.DataObject
) -> None:
    compute, transfer, order = model
    if len(order) <= buffers:
        return
    remapped = data.draw(st.integers(1, len(order) - buffers))
    present = data.draw(st.sets(st.sampled_from(order)))
    times = times_of(compute, transfer)

    def period(chosen: tuple[int, ...]) -> float:
        return schedule.period(compute, transfer, chosen, buffers)

    auto = selection.select("auto", order, remapped, buffers, times=times, present=present)
    for kind in ("nested", "uniform", "uniform_fixed", "best"):
        other = selection.select(kind, order, remapped, buffers, times=times, present=present)
        assert period(auto) <= period(other) * (1 + 1e-8)
        if kind != "best" and period(other) == period(auto):
            assert selection.churn(present, auto) <= selection.churn(present, other)
    nested = selection.select("nested", order, remapped, buffers)
    if not present and period(nested) <= period(auto):
        assert auto == nested


@SLOW
@given(models(most_layers=9), st.sampled_from([0.0, 0.05, 0.5]), st.sampled_from(["auto", 1, 2]), st.data())
def test_most_remapped_is_the_largest_that_fits(
    model: tuple[list[int], list[int], tuple[int, ...]], slowdown: float, buffers: int | str, data: st.DataObject
) -> None:
    compute, transfer, order = model
    kind = data.draw(st.sampled_from(["nested", "uniform", "best", "auto"]))
    times = times_of(compute, transfer)
    limit = (1 + slowdown) * sum(compute) * (1 + 1e-9)
    best = (0, 1)
    for beta in (1, 2) if buffers == "auto" else (buffers,):
        for alpha in range(1, len(order) - beta + 1):
            chosen = selection.select(kind, order, alpha, beta, times=times)
            if schedule.period(compute, transfer, chosen, beta) <= limit and alpha > best[0]:
                best = (alpha, beta)
    assert selection.most_remapped(kind, order, times, buffers=buffers, slowdown=slowdown) == best  # type: ignore[arg-type]


def test_the_local_search_finds_every_optimum_of_a_sample() -> None:
    """No theorem, so a fixed sample. The starts alone, without the moves, miss some of these."""
    draw = random.Random(8)
    missed_by_starts = 0
    for _ in range(150):
        compute = [float(draw.randint(0, 20)) for _ in range(8)]
        transfer = [float(draw.randint(0, 60)) for _ in range(8)]
        m = draw.randint(4, 6)
        least = min(schedule.period(compute, transfer, s, 2) for s in itertools.combinations(range(8), m))
        problem = Problem(compute, transfer, list(range(8)), m, 2, [0.0] * 8)
        assert schedule.period(compute, transfer, best_double(problem, []), 2) == pytest.approx(least, rel=1e-8)
        starts = min(schedule.period(compute, transfer, start, 2) for start in _starts(problem, []))
        missed_by_starts += starts > least * (1 + 1e-8)
    assert missed_by_starts > 0


def test_the_search_has_one_answer_and_a_limit() -> None:
    draw = random.Random(3)
    for m in (5, 12, 21, 34):
        compute = [1.0 + 3.0 * draw.random() for _ in range(40)]
        transfer = [4.0 + 4.0 * draw.random() for _ in range(40)]
        answers = []
        for _ in range(2):
            problem = Problem(compute, transfer, list(range(40)), m, 2, [0.0] * 40)
            answers.append(best_double(problem, []))
            assert problem.evaluated <= EVALUATIONS
        assert answers[0] == answers[1]


# ---------------------------------------------------------------------------------------------- slices


@RELAXED
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 400)), min_size=2, max_size=12),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1, 1.0]),
)
def test_slices_max_alpha_is_the_largest(layers: list[tuple[int, int]], buffers: int, slowdown: float) -> None:
    compute, transfer = zip(*layers, strict=True)
    n = len(layers)
    most = selection.slices_max_alpha(compute, transfer, buffers, slowdown)
    limit = (1 + slowdown) * sum(compute) * (1 + 1e-9)
    if n <= buffers:
        assert most == 0.0
        return
    share = selection.slices_share(most, n, buffers)
    assert selection.slices_period(compute, transfer, share, buffers) <= limit * (1 + 1e-12)
    if most < n - buffers:
        more = min(1.0, share * (1 + 1e-6) + 1e-9)
        assert selection.slices_period(compute, transfer, more, buffers) > limit


@RELAXED
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 400), st.integers(0, 9)), min_size=2, max_size=8),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.floats(0.0, 6.0),
)
def test_tail_pages_against_every_tail(
    layers: list[tuple[int, int, int]], buffers: int, slowdown: float, wanted: float
) -> None:
    compute, transfer, pages = zip(*layers, strict=True)
    unit = max(pages)
    limit = (1 + slowdown) * sum(compute) * (1 + 1e-9)

    def freed(tail: int) -> int:
        homes = [min(tail, each) for each in pages]
        return sum(homes) - buffers * max(homes)

    def fits(tail: int) -> bool:
        scaled = [s * min(tail, each) / each if each else 0.0 for s, each in zip(transfer, pages, strict=True)]
        return schedule.period(compute, scaled, range(len(pages)), buffers) <= limit

    assert all(freed(tail) == selection.slices_freed(tail, pages, buffers) for tail in range(12))
    if unit == 0:
        assert selection.slices_max_alpha(compute, transfer, buffers, slowdown, layer_pages=pages) == 0.0
        return
    best = max(freed(tail) for tail in range(unit + 1) if fits(tail)) / unit
    assert selection.slices_max_alpha(compute, transfer, buffers, slowdown, layer_pages=pages) == pytest.approx(
        max(0.0, best)
    )
    enough = [tail for tail in range(unit + 1) if freed(tail) >= wanted * unit * (1 - 1e-9)]
    if enough:
        assert selection.slices_tail(wanted, pages, buffers) == enough[0]
    else:
        with pytest.raises(selection.InvalidArgument) as caught:
            selection.slices_tail(wanted, pages, buffers)
        assert caught.value.most == pytest.approx(max(freed(tail) for tail in range(unit + 1)) / unit)


# ---------------------------------------------------------------------------------------------- options


@SLOW
@given(models(most_layers=9), st.floats(0.1, 5.0), st.integers(1, 7), st.data())
def test_options_free_enough_at_their_price_and_are_sorted(
    model: tuple[list[int], list[int], tuple[int, ...]], remapped: float, page: int, data: st.DataObject
) -> None:
    compute, transfer, order = model
    n = len(compute)
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    present = data.draw(st.sets(st.sampled_from(order)))
    found = selection.options(times_of(compute, transfer), sizes, order, remapped, present=present, page_bytes=page)
    pages = [-(-size // page) for size in sizes]
    unit = max(pages)
    for option in found:
        used = pages if option.tail_pages is None else [min(option.tail_pages, each) for each in pages]
        slot = unit if option.tail_pages is None else option.tail_pages
        assert option.freed_bytes == page * (sum(used[layer] for layer in option.streamed) - option.buffers * slot)
        assert option.remapped == pytest.approx(option.freed_bytes / page / unit)
        assert option.remapped >= remapped * (1 - 1e-9)
        scaled = [s * part / whole for s, part, whole in zip(transfer, used, pages, strict=True)]
        assert option.period_s == pytest.approx(schedule.period(compute, scaled, option.streamed, option.buffers))
        assert option.stall_s == pytest.approx(option.period_s - sum(compute), abs=1e-9)
        if option.tail_pages is None:
            copied = schedule.SlotAssignment.of(option.streamed, option.buffers).copied
            assert option.traffic_bytes == sum(sizes[layer] for layer in copied)
            assert option.churn == selection.churn(present, option.streamed)
    for better, worse in itertools.pairwise(found):
        assert better.stall_s <= worse.stall_s + 1e-8 * (1 + sum(compute))
        if better.stall_s == worse.stall_s:
            assert (better.traffic_bytes, better.churn) <= (worse.traffic_bytes, worse.churn)
    best_whole = len(order) - 1
    if sum(pages[layer] for layer in order) - unit >= remapped * unit and best_whole >= math.ceil(remapped):
        assert any(option.tail_pages is None for option in found)  # streaming every layer frees as much


# ---------------------------------------------------------------------------------------------- tenants that do not run


@RELAXED
@given(st.integers(2, 9), st.integers(0, 6), st.integers(0, 40), st.data())
def test_a_suffix_is_optimal_for_equal_layers(layers: int, compute: int, transfer: int, data: st.DataObject) -> None:
    missing = data.draw(st.integers(1, layers))
    delay = selection.suffix_delay([compute] * layers, transfer, missing)
    assert delay == least_delay([compute] * layers, [transfer] * layers, missing)
    assert delay == max(0, missing * transfer - (layers - 1) * compute, transfer - (layers - missing) * compute)


@RELAXED
@given(models(most_layers=12), st.integers(1, 2), st.floats(0.0, 1e3), st.floats(0.0, 1e3))
def test_inactive_cap_is_the_largest_that_is_in_time(
    model: tuple[list[int], list[int], tuple[int, ...]], buffers: int, slack: float, more: float
) -> None:
    compute, transfer, order = model
    ascending = sorted(order)
    fits = [0]
    for lent in range(1, min(len(order), len(compute) - 1) - buffers + 1):
        missing = ascending[len(ascending) - lent :]
        if schedule.one_shot_delay(compute, transfer, missing) <= slack + 1e-9 * sum(compute):
            fits.append(lent)
    cap = selection.inactive_cap(compute, transfer, slack_s=slack, buffers=buffers, order=order)
    assert cap == max(fits)
    assert cap <= selection.inactive_cap(compute, transfer, slack_s=slack + more, buffers=buffers, order=order)
    assert cap == 0 or cap + buffers < len(compute)
    assert selection.inactive_cap(compute, transfer, slack_s=slack, buffers=buffers, limit=2, order=order) == min(
        cap, 2
    )


@RELAXED
@given(models(most_layers=12), st.integers(1, 2), st.data())
def test_marginal_stall_is_the_difference_per_byte(
    model: tuple[list[int], list[int], tuple[int, ...]], buffers: int, data: st.DataObject
) -> None:
    compute, transfer, order = model
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(compute), max_size=len(compute)))
    now = data.draw(st.sampled_from(range(len(order) + 1)))
    after = data.draw(st.sampled_from(range(len(order) + 1)))
    before, new = order[:now], order[:after]

    def freed(streamed: tuple[int, ...]) -> int:
        return max(0, sum(sizes[layer] for layer in streamed) - buffers * max(sizes))

    times = times_of(compute, transfer)
    if freed(new) <= freed(before):
        with pytest.raises(selection.InvalidArgument) as caught:
            selection.marginal_stall(times, sizes, before, new, buffers=buffers)
        assert (caught.value.freed_before, caught.value.freed_after) == (freed(before), freed(new))
        return
    waits = [float(seconds_per_pass(compute, transfer, sorted(each), buffers, "fixed")) for each in (before, new)]
    expected = (waits[1] - waits[0]) / (freed(new) - freed(before))
    assert selection.marginal_stall(times, sizes, before, new, buffers=buffers) == pytest.approx(expected, abs=1e-9)
