"""`remap.policy.selection` and `remap.policy.slices` on known numbers: worked tables, and examples where even spacing loses."""

from __future__ import annotations

import pytest

from remap.policy.cost import LayerTimes
from remap.policy.schedule import max_remapped, nested, period, stall, uniform, uniform_fixed
from remap.policy.selection import best_set
from remap.policy.slices import slices_freed, slices_period, tail_shares

N = 40
ORDER = nested(N)


def equal(ratio: float, n: int = N) -> LayerTimes:
    return LayerTimes((1.0,) * n, (float(ratio),) * n)


# A model whose first layers compute for longer: twenty layers of 3 s, twenty of 1 s; every copy takes 9 s.
FRONT_HEAVY = LayerTimes((3.0,) * 20 + (1.0,) * 20, (9.0,) * N)


# ---------------------------------------------------------------------------------------------- whole layers


def test_a_front_heavy_model_stalls_for_nothing_where_even_spacing_does() -> None:
    """Six layers, one buffer: whatever the phase, evenly spaced layers wait; the dynamic programme finds six that do not."""
    compute, transfer = FRONT_HEAVY.compute_s, FRONT_HEAVY.transfer_s
    phases = [stall(compute, transfer, uniform(N, 5, 1, phase), 1) for phase in range(N)]
    assert min(phases) == 6.0
    best = best_set(ORDER, 5, 1, FRONT_HEAVY)
    assert stall(compute, transfer, best, 1) == 0.0
    # So one buffer hides twice as many layers.
    assert max_remapped(compute, transfer, 1) == (3, 1)
    assert stall(compute, transfer, best_set(ORDER, 6, 1, FRONT_HEAVY), 1) == 0.0
    assert stall(compute, transfer, best_set(ORDER, 7, 1, FRONT_HEAVY), 1) > 0.0


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_even_spacing_is_optimal_for_equal_layers(ratio: int, buffers: int) -> None:
    times = equal(ratio)
    for alpha in range(1, 21):
        best = best_set(ORDER, alpha, buffers, times)
        even = min(
            stall(1.0, float(ratio), chosen, buffers, layers=N)
            for chosen in (uniform(N, alpha, buffers), uniform_fixed(N, alpha, buffers))
        )
        found = stall(1.0, float(ratio), best, buffers, layers=N)
        if buffers == 1:
            assert found == pytest.approx(even, abs=1e-7)  # by convexity
        else:
            assert found <= even + 1e-7  # an odd number of layers in two fixed slots may be spaced better still


def test_best_prefers_what_is_present() -> None:
    """At ratio 2 almost any six layers hide their copies: those that are streamed already reload nothing."""
    present = (3, 9, 15, 22, 30, 36)
    for buffers in (1, 2):
        assert best_set(ORDER, 6 - buffers, buffers, equal(2), present) == present
        grown = best_set(ORDER, 7 - buffers, buffers, equal(2), present)
        assert len(grown) == 7 and set(present) < set(grown)


def test_more_than_the_plain_sets_where_buffers_do_not_divide() -> None:
    """Nine layers in two fixed slots at ratio 3.4: only the widened wrap-around hides everything."""
    assert stall(1.0, 3.4, best_set(ORDER, 9, 2, equal(3.4)), 2, layers=N) == 0.0
    assert stall(1.0, 3.4, uniform(N, 9, 2), 2, layers=N) > 0.0


# ---------------------------------------------------------------------------------------------- slices


def test_slices_wait_for_what_copies_take_beyond_a_pass() -> None:
    """Through two slots: at ratio 4, 10 of 40 layers wait for 2.1 layer computations, 20 for 44.2."""
    for alpha in range(1, 21):
        shares = [alpha / (N - 2)] * N
        for ratio in (2.0, 4.0, 8.0):
            waits = slices_period([1.0] * N, [ratio] * N, shares, 2, range(N)) - N
            assert waits == pytest.approx(max(0.0, alpha * N / (N - 2) * ratio - N), abs=1e-9)
    assert slices_period([1.0] * N, [4.0] * N, [10 / 38] * N, 2, range(N)) - N == pytest.approx(2.1, abs=0.06)


def test_slices_edge_cases() -> None:
    one = [1.0] * 4
    assert slices_period(one, [9.0] * 4, [0.0] * 4, 2, range(4)) == 4.0
    assert slices_period(one, [9.0] * 4, [0.5] * 4, 2, ()) == 4.0
    assert slices_period(one, [9.0] * 4, one, 2, range(4)) == period(1.0, 9.0, range(4), 2, layers=4)
    assert slices_period(one, [4.0] * 4, [0.5, 0.25, 0.5, 0.25], 1, range(4)) == 4.0 + 2.0 + 1.0 + 2.0 + 1.0
    assert slices_freed(9, [4, 4, 2], 1) == 6 and slices_freed(3, [4, 4, 2], 1) == 5
    assert tail_shares(3, [6, 2, 0]) == [0.5, 1.0, 0.0]
