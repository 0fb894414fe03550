"""`remap.schedule` against slow, obvious models: an event simulation, exhaustive search."""

from __future__ import annotations

import itertools

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.schedule_des import seconds_per_pass
from remap.policy import schedule

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
        def seconds(alpha: int) -> float:
            return seconds_per_pass(compute, transfer, list(select(n, alpha, beta)), beta, slots)

        return max((alpha for alpha in range(1, n - beta + 1) if seconds(alpha) <= limit), default=0)

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


@given(st.integers(1, 200), st.data())
def test_nested_prefixes_are_even(layers: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, layers - 1))
    order = schedule.nested(layers, begin)
    assert sorted(order) == list(range(layers)) and order[0] == begin
    k = data.draw(st.integers(1, layers))
    prefix = sorted(order[:k])
    gaps = [b - a for a, b in itertools.pairwise([*prefix, prefix[0] + layers])]
    # de Bruijn and Erdos, and rounding
    assert 0.7213 * layers / k - 1 <= min(gaps) <= max(gaps) <= min(2 * -(-layers // k), 1.4427 * layers / k + 1)


@given(st.integers(1, 100), st.integers(0, 100), st.integers(1, 8), st.integers(-200, 200))
def test_uniform_is_even(layers: int, remapped: int, buffers: int, phase: int) -> None:
    if remapped and remapped + buffers > layers:
        with pytest.raises(schedule.InvalidArgument) as caught:
            schedule.uniform(layers, remapped, buffers, phase)
        assert (caught.value.layers, caught.value.remapped, caught.value.buffers) == (layers, remapped, buffers)
        return
    chosen = schedule.uniform(layers, remapped, buffers, phase)
    assert len(set(chosen)) == (remapped + buffers if remapped else 0) and list(chosen) == sorted(chosen)
    if not remapped:
        return
    gaps = [b - a for a, b in itertools.pairwise([*chosen, chosen[0] + layers])]
    assert max(gaps) - min(gaps) <= 1 and chosen[0] >= 0 and chosen[-1] < layers
    plain = schedule.uniform(layers, remapped, buffers)
    assert set(chosen) == {(layer + phase) % layers for layer in plain}
