"""`remap.policy.selection` and `remap.policy.slices` on known numbers: worked tables, and examples where even spacing loses."""

from __future__ import annotations

from remap.policy.cost import LayerTimes
from remap.policy.schedule import max_remapped, nested, period, stall, uniform
from remap.policy.selection import best_set
from remap.policy.slices import slices_freed, slices_period, tail_shares

N = 40
ORDER = nested(N)


def equal(ratio: float, n: int = N) -> LayerTimes:
    return LayerTimes((1.0,) * n, (float(ratio),) * n)


# A model whose first layers compute for longer: twenty layers of 3 s, twenty of 1 s; every copy takes 9 s.
FRONT_HEAVY = LayerTimes((3.0,) * 20 + (1.0,) * 20, (9.0,) * N)


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


def test_slices_edge_cases() -> None:
    one = [1.0] * 4
    assert slices_period(one, [9.0] * 4, [0.0] * 4, 2, range(4)) == 4.0
    assert slices_period(one, [9.0] * 4, [0.5] * 4, 2, ()) == 4.0
    assert slices_period(one, [9.0] * 4, one, 2, range(4)) == period(1.0, 9.0, range(4), 2, layers=4)
    assert slices_period(one, [4.0] * 4, [0.5, 0.25, 0.5, 0.25], 1, range(4)) == 4.0 + 2.0 + 1.0 + 2.0 + 1.0
    assert slices_freed(9, [4, 4, 2], 1) == 6 and slices_freed(3, [4, 4, 2], 1) == 5
    assert tail_shares(3, [6, 2, 0]) == [0.5, 1.0, 0.0]
