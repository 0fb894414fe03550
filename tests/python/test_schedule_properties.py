"""`remap.schedule` against slow, obvious models: an event simulation, exhaustive cycles, exhaustive search."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remap.policy import schedule
from remap.policy.maxplus import copied_uses, largest_cycle_mean, lower_bound

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
from schedule_des import seconds_per_pass
from selection_brute import least_delay, single_buffer_waits

MODES = st.sampled_from(["fixed", "rotating"])
RELAXED = settings(deadline=None, max_examples=examples(400))
System = tuple[list[int], list[int], list[int], int, str]


@st.composite
def systems(draw: st.DrawFn, most_layers: int = 14, most_buffers: int = 4) -> System:
    """(compute, transfer, streamed, buffers, slots) with integer times; copies from much cheaper to much dearer."""
    n = draw(st.integers(1, most_layers))
    top = draw(st.sampled_from([1, 3, 20, 1000]))
    dearer = draw(st.sampled_from([1, 2, 4, 10]))
    compute = draw(st.lists(st.integers(0, top), min_size=n, max_size=n))
    transfer = draw(st.lists(st.integers(0, top * dearer), min_size=n, max_size=n))
    streamed = draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n))
    return compute, transfer, streamed, draw(st.integers(1, most_buffers)), draw(MODES)


@RELAXED
@given(systems(), st.floats(1e-7, 1e3))
@example(([1, 1, 1], [4, 4, 4], [0, 1, 2], 2, "fixed"), 1.0)  # m mod beta != 0, m == n, one buffer keeps its layer
@example(([1, 1, 1], [4, 4, 4], [0, 1, 2], 2, "rotating"), 1.0)
@example(([1] * 5, [4] * 5, [0, 1, 2, 3, 4], 2, "fixed"), 1.0)
@example(([0, 0], [0, 0], [0, 1], 1, "fixed"), 1.0)  # a pass of no length
@example(([2, 3], [5, 7], [0, 1], 3, "rotating"), 1.0)  # more buffers than streamed layers
@example(([1], [9], [0], 1, "fixed"), 1.0)
def test_period_is_the_simulated_one(system: System, unit: float) -> None:
    compute, transfer, streamed, buffers, slots = system
    simulated = float(seconds_per_pass(compute, transfer, streamed, buffers, slots)) * unit
    exact = schedule.period([c * unit for c in compute], [t * unit for t in transfer], streamed, buffers, slots)
    assert exact == pytest.approx(simulated, rel=1e-9, abs=0.0)


@RELAXED
@given(systems())
def test_bounds_and_order_independence(system: System) -> None:
    compute, transfer, streamed, buffers, slots = system
    exact = schedule.period(compute, transfer, streamed, buffers, slots)
    copied = [sorted(streamed)[j] for j in copied_uses(len(streamed), buffers, slots)]
    assert exact >= sum(compute)
    assert exact >= sum(transfer[layer] for layer in copied) * (1 - 1e-12)
    assert exact <= (sum(compute) + sum(transfer[layer] for layer in copied)) * (1 + 1e-12)  # nothing overlaps
    assert lower_bound(compute, transfer, sorted(streamed), buffers, slots) <= exact * (1 + 1e-12)
    assert exact == schedule.period(compute, transfer, list(reversed(streamed)), buffers, slots)
    assert schedule.stall(compute, transfer, streamed, buffers, slots) == pytest.approx(exact - sum(compute))
    # One buffer: every copy waits for the layer before it, so the stall is the sum of (tau_k - W_k)+.
    waits = single_buffer_waits(compute, transfer, streamed)
    assert schedule.stall(compute, transfer, streamed, 1, slots) == pytest.approx(waits, rel=1e-9, abs=1e-9)


def cycle_means(matrix: list[list[float]]) -> list[float]:
    size = len(matrix)
    means = []
    for length in range(1, size + 1):
        for cycle in itertools.permutations(range(size), length):
            hops = zip(cycle, (*cycle[1:], cycle[0]), strict=True)
            means.append(sum(matrix[to][come] for come, to in hops) / length)
    return means


@RELAXED
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(st.lists(st.integers(-9, 9), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
@example([[0, 5], [2, 1]])  # the best cycle has two edges: 7 / 2
@example([[-math.inf, 5], [2, -math.inf]])  # edges that are not there
def test_karp_against_every_cycle(matrix: list[list[float]]) -> None:
    numbers = [[float(x) for x in row] for row in matrix]
    assert largest_cycle_mean(numbers) == pytest.approx(max(cycle_means(numbers)))


@settings(deadline=None, max_examples=examples(150))
@given(systems(most_layers=10), st.sampled_from([0.0, 0.05, 0.3, 2.0]), st.booleans())
def test_max_remapped_is_the_best_of_all(system: System, slowdown: float, use_nested: bool) -> None:
    compute, transfer, _, fixed_buffers, slots = system
    n = len(compute)
    order = schedule.nested(n)

    def prefix(layers: int, alpha: int, beta: int) -> tuple[int, ...]:
        return order[: alpha + beta]

    select = prefix if use_nested else schedule.uniform
    limit = (1 + slowdown) * sum(compute) * (1 + 1e-9)

    def best(beta: int) -> int:
        fits = [0]
        for alpha in range(1, n - beta + 1):
            if seconds_per_pass(compute, transfer, list(select(n, alpha, beta)), beta, slots) <= limit:
                fits.append(alpha)
        return max(fits)

    def ask(buffers: int | str) -> tuple[int, int]:
        chosen = prefix if use_nested else None
        return schedule.max_remapped(compute, transfer, buffers, slowdown, slots, select=chosen)

    single, double = best(1), best(2)
    assert ask("auto") == ((double, 2) if double > single else (single, 1))
    alone = best(fixed_buffers)
    assert ask(fixed_buffers) == ((alone, fixed_buffers) if alone else (0, 1))


@RELAXED
@given(systems(most_layers=20))
def test_one_shot_delay_is_the_simulated_one(system: System) -> None:
    compute, transfer, missing, _, _ = system
    clock = link = 0
    for layer, seconds in enumerate(compute):
        if layer in missing:
            link += transfer[layer]
            clock = max(clock, link)
        clock += seconds
    assert schedule.one_shot_delay(compute, transfer, missing) == pytest.approx(clock - sum(compute))


@RELAXED
@given(st.integers(2, 9), st.integers(0, 6), st.integers(0, 40), st.data())
def test_a_suffix_is_optimal_for_equal_layers(layers: int, compute: int, transfer: int, data: st.DataObject) -> None:
    missing = data.draw(st.integers(1, layers))
    delay = schedule.one_shot_delay([compute] * layers, transfer, range(layers - missing, layers))
    assert delay == least_delay([compute] * layers, [transfer] * layers, missing)
    assert delay == max(0, missing * transfer - (layers - 1) * compute, transfer - (layers - missing) * compute)


@given(st.integers(1, 200), st.data())
def test_nested_prefixes_are_even(layers: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, layers - 1))
    order = schedule.nested(layers, begin)
    assert sorted(order) == list(range(layers)) and order[0] == begin
    k = data.draw(st.integers(1, layers))
    prefix = sorted(order[:k])
    gaps = [b - a for a, b in itertools.pairwise([*prefix, prefix[0] + layers])]
    uniform_gap = -(-layers // k)
    assert max(gaps) <= 2 * uniform_gap
    assert max(gaps) <= 1.4427 * layers / k + 1  # de Bruijn and Erdos, and rounding
    assert min(gaps) >= 0.7213 * layers / k - 1


@given(st.integers(1, 100), st.integers(0, 100), st.integers(1, 8), st.integers(-200, 200))
def test_uniform_is_even(layers: int, remapped: int, buffers: int, phase: int) -> None:
    if remapped and remapped + buffers > layers:
        with pytest.raises(schedule.InvalidArgument) as caught:
            schedule.uniform(layers, remapped, buffers, phase)
        assert (caught.value.layers, caught.value.remapped, caught.value.buffers) == (layers, remapped, buffers)
        return
    chosen = schedule.uniform(layers, remapped, buffers, phase)
    if remapped == 0:
        assert chosen == ()
        return
    assert len(set(chosen)) == remapped + buffers and list(chosen) == sorted(chosen)
    gaps = [b - a for a, b in itertools.pairwise([*chosen, chosen[0] + layers])]
    assert max(gaps) - min(gaps) <= 1 and chosen[0] >= 0 and chosen[-1] < layers
    plain = schedule.uniform(layers, remapped, buffers)
    assert set(chosen) == {(layer + phase) % layers for layer in plain}
