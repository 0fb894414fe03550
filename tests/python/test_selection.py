"""`remap.policy.selection` on known numbers: worked tables, examples where even spacing loses, edge cases, refused arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest

from remap.errors import InvalidArgument
from remap.policy import selection
from remap.policy.cost import LayerTimes
from remap.policy.schedule import max_remapped, nested, one_shot_delay, period, stall, uniform, uniform_fixed
from remap.policy.selection import (
    Option,
    changed_layers,
    churn,
    inactive_cap,
    marginal_stall,
    most_remapped,
    options,
    select,
    slices_max_alpha,
    slices_period,
    slices_share,
    slices_tail,
    suffix_delay,
)

N = 40
ORDER = nested(N)


def equal(ratio: float, n: int = N) -> LayerTimes:
    return LayerTimes((1.0,) * n, (float(ratio),) * n)


# A model whose first layers compute for longer: twenty layers of 3 s, twenty of 1 s; every copy takes 9 s.
FRONT_HEAVY = LayerTimes((3.0,) * 20 + (1.0,) * 20, (9.0,) * N)


# ---------------------------------------------------------------------------------------------- whole layers


def test_kinds() -> None:
    assert select("uniform", ORDER, 4, 1) == (0, 8, 16, 24, 32)
    assert select("uniform_fixed", ORDER, 9, 2) == uniform_fixed(N, 9, 2)
    assert select("nested", ORDER, 1, 1) == (0, 23)
    assert select("suffix", ORDER, 3, 1) == (36, 37, 38, 39)
    assert select("onward", ORDER, 3, 1, present=(7, 9)) == (0, 7, 9, 23)
    assert select("onward", ORDER, 1, 1, present=(0, 7, 23)) == (0, 23)
    assert all(select(kind, ORDER, 0, 2, times=equal(4)) == () for kind in selection.KINDS)
    assert all(select(kind, ORDER, 38, 2, times=equal(4)) == tuple(range(N)) for kind in selection.KINDS)


def test_pinned_layers_are_left_out() -> None:
    order = tuple(layer for layer in ORDER if layer not in (0, 16, 39))
    ascending = sorted(order)
    assert select("uniform", order, 4, 1) == tuple(ascending[index] for index in uniform(37, 4, 1))
    assert select("suffix", order, 1, 1) == (37, 38)
    assert select("onward", order, 1, 1, present=(0, 5)) == (5, 23)  # layer 0 was pinned since
    for kind in selection.KINDS:
        assert not {0, 16, 39} & set(select(kind, order, 6, 2, times=FRONT_HEAVY, present=(0, 5)))


def test_a_front_heavy_model_stalls_for_nothing_where_even_spacing_does() -> None:
    """Six layers, one buffer: whatever the phase, evenly spaced layers wait; the dynamic programme finds six that do not."""
    compute, transfer = FRONT_HEAVY.compute_s, FRONT_HEAVY.transfer_s
    phases = [stall(compute, transfer, uniform(N, 5, 1, phase), 1) for phase in range(N)]
    assert min(phases) == 6.0
    best = select("best", ORDER, 5, 1, times=FRONT_HEAVY)
    assert stall(compute, transfer, best, 1) == 0.0
    assert select("auto", ORDER, 5, 1, times=FRONT_HEAVY) == best
    # So one buffer hides twice as many layers.
    even = max_remapped(compute, transfer, 1)
    chosen = most_remapped("best", ORDER, FRONT_HEAVY, buffers=1)
    assert even == (3, 1) and chosen == (6, 1)
    assert stall(compute, transfer, select("best", ORDER, 7, 1, times=FRONT_HEAVY), 1) > 0.0


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_even_spacing_is_optimal_for_equal_layers(ratio: int, buffers: int) -> None:
    times = equal(ratio)
    for alpha in range(1, 21):
        best = select("best", ORDER, alpha, buffers, times=times)
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
        for kind in ("best", "auto"):
            assert select(kind, ORDER, 6 - buffers, buffers, times=equal(2), present=present) == present  # type: ignore[arg-type]
            grown = select(kind, ORDER, 7 - buffers, buffers, times=equal(2), present=present)  # type: ignore[arg-type]
            assert changed_layers(present, grown) == (0, 1)


def test_auto_takes_the_nested_set_unless_another_is_shorter() -> None:
    assert select("auto", ORDER, 5, 2, times=equal(2)) == select("nested", ORDER, 5, 2)
    # One buffer, ratio 4, seven layers remapped: eight even gaps just suffice, the nested ones are too uneven.
    assert stall(1.0, 4.0, select("nested", ORDER, 7, 1), 1, layers=N) > 0.0
    assert select("auto", ORDER, 7, 1, times=equal(4)) == uniform(N, 7, 1)
    # Nine layers in two fixed slots at ratio 3.4: only the widened wrap-around hides everything.
    auto = select("auto", ORDER, 9, 2, times=equal(3.4))
    assert stall(1.0, 3.4, auto, 2, layers=N) == 0.0
    assert stall(1.0, 3.4, uniform(N, 9, 2), 2, layers=N) > 0.0


def test_changes_between_neighbouring_sizes() -> None:
    """Even sets of neighbouring sizes share few layers: that is what a nested order is for."""
    reloads = [changed_layers(uniform(N, a, 1), uniform(N, a + 1, 1))[0] for a in range(1, 20)]
    assert max(reloads) >= 10
    for a in range(1, 20):
        assert changed_layers(select("nested", ORDER, a, 1), select("nested", ORDER, a + 1, 1)) == (0, 1)
        assert changed_layers(select("nested", ORDER, a + 1, 1), select("nested", ORDER, a, 1)) == (1, 0)
    assert changed_layers((1, 2, 3), (3, 4)) == (2, 1) and churn((1, 2, 3), (3, 4)) == 3
    assert changed_layers((), ()) == (0, 0)


def test_most_remapped_table() -> None:
    """The even sets' table for n = 40, fixed slots; searching gains the odd numbers that fill a pass exactly."""
    for ratio, single, double in ((2, 12, 18), (4, 7, 8), (8, 3, 2), (16, 1, 0)):
        assert most_remapped("uniform", ORDER, equal(ratio), buffers=1)[0] == single
        assert most_remapped("uniform", ORDER, equal(ratio), buffers=2)[0] == double
        assert most_remapped("best", ORDER, equal(ratio), buffers=1)[0] == single
        assert most_remapped("best", ORDER, equal(ratio), buffers=2)[0] >= double
        assert most_remapped("auto", ORDER, equal(ratio))[0] >= max(single, double)
        assert most_remapped("uniform", ORDER, equal(ratio)) == max_remapped(1.0, float(ratio), layers=N)
    assert most_remapped("auto", ORDER, equal(100)) == (0, 1)
    assert most_remapped("nested", (), equal(1)) == (0, 1)


# ---------------------------------------------------------------------------------------------- slices

# alpha -> stall of slices through two slots in layer computations, n = 40, for copies of 2, 4 and 8 layer computations.
SLICES = {
    **dict.fromkeys((1, 2, 3, 4), (0, 0, 0)),
    5: (0, 0, 2.1),
    6: (0, 0, 10.5),
    7: (0, 0, 18.9),
    8: (0, 0, 27.4),
    9: (0, 0, 35.8),
    10: (0, 2.1, 44.2),
    11: (0, 6.3, 52.6),
    12: (0, 10.5, 61.1),
    16: (0, 27.4, 94.7),
    19: (0, 40.0, 120),
    20: (2.1, 44.2, 128),
}


@pytest.mark.parametrize("alpha", sorted(SLICES))
def test_slices_table(alpha: int) -> None:
    share = slices_share(alpha, N, 2)
    for ratio, late in zip((2, 4, 8), SLICES[alpha], strict=True):
        waits = slices_period(1.0, float(ratio), share, 2, layers=N) - N
        assert waits == pytest.approx(late, abs=0.06 if late < 100 else 0.6)
        assert waits == pytest.approx(max(0.0, alpha * N / (N - 2) * ratio - N), abs=1e-9)


@pytest.mark.parametrize(("ratio", "most"), [(2, 19.0), (4, 9.5), (8, 4.75), (16, 2.375), (25, 1.52)])
def test_slices_hide_fractions_of_layers(ratio: int, most: float) -> None:
    assert slices_max_alpha(1.0, float(ratio), 2, layers=N) == pytest.approx(most, rel=1e-8)
    pages = [100] * N
    in_pages = slices_max_alpha(1.0, float(ratio), 2, layer_pages=pages, layers=N)
    assert most - 0.38 < in_pages <= most + 1e-9  # one page of each layer less the slots' is 0.38 layers
    tail = slices_tail(in_pages, pages, 2)
    assert selection.slices_freed(tail, pages, 2) == pytest.approx(in_pages * 100)
    with pytest.raises(InvalidArgument):
        slices_tail(38.01, pages, 2)


def test_slices_edge_cases() -> None:
    assert slices_max_alpha(1.0, 0.0, 2, layers=N) == 38.0
    assert slices_max_alpha(1.0, 1.0, 2, layers=2) == 0.0
    assert slices_max_alpha(1.0, 1.0, 1, layers=1) == 0.0
    assert slices_period(1.0, 9.0, 0.0, 2, layers=5) == 5.0
    assert slices_period(1.0, 9.0, 0.5, 2, streamed=(), layers=5) == 5.0
    assert slices_period(1.0, 9.0, 1.0, 2, layers=N) == period(1.0, 9.0, range(N), 2, layers=N)
    assert (
        slices_period(1.0, 4.0, [0.5, 0.25, 0.5, 0.25], 1, layers=4) == 4.0 + 2.0 + 1.0 + 2.0 + 1.0
    )  # nothing overlaps
    assert slices_share(0, 5, 1) == 0.0 and slices_share(4, 5, 1) == 1.0
    assert slices_tail(0.0, [4, 4], 1) == 0
    assert slices_tail(1.0, [4, 4], 1) == 4
    assert selection.slices_freed(9, [4, 4, 2], 1) == 6


# ---------------------------------------------------------------------------------------------- options, donors


def test_options_rank_stall_then_traffic_then_churn() -> None:
    sizes = [1 << 20] * N
    found = options(equal(8), sizes, ORDER, 4)
    assert (found[0].kind, found[0].buffers, found[0].stall_s) == ("slices", 2, 0.0)
    by = {(option.kind, option.buffers): option for option in found}
    assert by["uniform", 1].stall_s == pytest.approx(5.0) and by["uniform", 2].stall_s == pytest.approx(8.0)
    assert [option.stall_s for option in found] == sorted(option.stall_s for option in found)
    # Where everything hides, the least traffic wins: slices copy alpha n / (n - sigma), whole layers alpha + sigma. Slices
    # through one slot never overlap, since no layer lies between two of them.
    easy = options(equal(1), sizes, ORDER, 4, kinds=("nested", "uniform", "slices"))
    assert [(option.kind, option.buffers) for option in easy] == [
        *(("slices", 2), ("nested", 1), ("uniform", 1), ("nested", 2), ("uniform", 2)),
        ("slices", 1),
    ]
    assert easy[0].traffic_bytes == pytest.approx(4 * N / 38 * (1 << 20), rel=1e-4)
    assert easy[-1].stall_s == pytest.approx(4 * N / 39, rel=1e-4)
    # With the even layers present, they are the ones that need not change.
    again = options(equal(1), sizes, ORDER, 4, kinds=("nested", "uniform"), buffers=1, present=uniform(N, 4, 1))
    assert [(option.kind, option.churn) for option in again] == [
        ("uniform", 0.0),
        ("nested", 6.0),
    ]  # three layers each way


def test_options_with_layers_of_different_sizes() -> None:
    """A ring buffer is as large as the largest layer: small ones free less, so that more of them are streamed."""
    times, sizes = LayerTimes((10.0,) * 6, (1.0, 1.0, 1.0, 1.0, 4.0, 4.0)), [100, 100, 100, 100, 400, 400]
    found = options(times, sizes, (0, 1, 2, 3, 4, 5), 1, kinds=("nested", "suffix", "slices"), buffers=1)
    by = {option.kind: option for option in found}
    assert by["suffix"].streamed == (4, 5) and by["suffix"].freed_bytes == 400
    assert by["nested"].streamed == (0, 1, 2, 3, 4) and by["nested"].remapped == 1.0
    assert by["slices"].tail_pages == 80 and by["slices"].freed_bytes == 400
    assert options(times, sizes, (0, 1, 2, 3), 1, buffers=1) == ()
    pages = options(times, sizes, (0, 1, 2, 3, 4, 5), 1, kinds=("suffix",), buffers=1, page_bytes=64)
    assert pages[0].freed_bytes == 7 * 64 and pages[0].traffic_bytes == 800
    nothing = options(times, sizes, (0, 1, 2, 3, 4, 5), 0, present=(1, 2))
    assert nothing == (Option("nested", (), None, 1, 0.0, 0, 60.0, 0.0, 0, 2.0),)


def test_churn_between_slices_and_whole_layers() -> None:
    sizes = [100] * 10
    (slices,) = options(equal(1, 10), sizes, nested(10), 3, kinds=("slices",), buffers=1, present=(0, 5))
    assert slices.tail_pages == 34  # 9 * 33 pages would be too few
    assert slices.churn == pytest.approx(2 * 0.66 + 8 * 0.34)
    (more,) = options(
        equal(1, 10), sizes, nested(10), 4, kinds=("slices",), buffers=1, present=range(10), present_share=0.34
    )
    assert more.churn == pytest.approx(10 * (0.45 - 0.34))


def test_marginal_stall_ranks_donors() -> None:
    sizes = [50] * N
    even = [uniform(N, alpha, 1) for alpha in range(12)]
    cheap = marginal_stall(equal(2), sizes, even[3], even[4], buffers=1)
    dear = marginal_stall(equal(8), sizes, even[3], even[4], buffers=1)
    assert cheap == 0.0 and dear == pytest.approx(5.0 / 50)
    assert marginal_stall(equal(8), sizes, even[4], even[5], buffers=1) == pytest.approx(9.0 / 50)
    switched = marginal_stall(equal(4), sizes, even[7], uniform(N, 8, 2), buffers=2, buffers_now=1)
    assert switched == 0.0
    assert marginal_stall(equal(4), sizes, (), even[1], buffers=1) == 0.0


# ---------------------------------------------------------------------------------------------- tenants that do not run


def test_suffix_delay() -> None:
    assert suffix_delay([1.0] * N, 4.0, 9) == 0.0  # 36 seconds of copies, 39 of computation before the last layer
    assert suffix_delay([1.0] * N, 4.0, 10) == 1.0
    assert suffix_delay([1.0] * N, 4.0, 11, in_place=(29,)) == 1.0
    assert suffix_delay([1.0] * N, 4.0, 0) == 0.0
    assert suffix_delay([1.0] * N, 4.0, N) == 4.0 * N - 39.0
    assert suffix_delay([1.0] * 4, 2.0, 2, order=(0, 1)) == one_shot_delay([1.0] * 4, 2.0, (0, 1))
    # An even set of as many layers always waits for its first layer at least.
    assert one_shot_delay([1.0] * N, 4.0, uniform(N, 8, 1)) == 4.0


def test_inactive_cap() -> None:
    assert inactive_cap([1.0] * N, 4.0) == 9  # a T_T <= (n - 1) T_c
    assert inactive_cap([1.0] * N, 4.0, slack_s=1.0) == 10
    assert inactive_cap([1.0] * N, 4.0, slack_s=0.999) == 9
    assert inactive_cap([1.0] * N, 4.0, slack_s=4.0, limit=3) == 3
    assert inactive_cap([1.0] * N, 0.0) == 38  # never whole: the ring's layer and one more stay
    assert inactive_cap([1.0] * N, 0.0, buffers=2) == 37
    assert inactive_cap([1.0] * N, 4.0, slack_s=math.inf) == 38
    assert inactive_cap([1.0] * N, 0.0, order=range(1, N)) == 38  # the layer left out stays anyway
    assert inactive_cap([1.0] * N, 50.0) == 0
    assert inactive_cap([1.0], 0.0) == inactive_cap([1.0, 1.0], 0.0) == 0
    assert inactive_cap([1.0] * 3, 0.0) == 1
    assert inactive_cap([0.1] * 31, 0.3) == 10  # 10 * 0.3 is 30 * 0.1, whatever the rounding


# ---------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        (lambda: select("spiral", ORDER, 1, 1), "kind", "spiral"),  # type: ignore[arg-type]
        (lambda: select("nested", ORDER, -1, 1), "remapped", -1),
        (lambda: select("nested", ORDER, 1, 0), "buffers", 0),
        (lambda: select("nested", ORDER, 1.5, 1), "remapped", 1.5),  # type: ignore[arg-type]
        (lambda: select("nested", (0, 1, 1), 1, 1), "layer", 1),
        (lambda: select("nested", (0, 1), 2, 1), "streamable", 2),
        (lambda: select("best", ORDER, 2, 1), "times", None),
        (lambda: select("auto", ORDER, 2, 1, times=equal(1, 39)), "layers", 39),
        (lambda: most_remapped("nested", ORDER, equal(1), slowdown=-0.1), "slowdown", -0.1),
        (lambda: slices_share(5.5, 6, 1), "most", 5),
        (lambda: slices_share(math.nan, 6, 1), "layers", 6),
        (lambda: slices_share(1, 2, 2), "most", 0),
        (lambda: slices_period(1.0, 1.0, 1.5, 1, layers=3), "share", 1.5),
        (lambda: slices_period(1.0, 1.0, [0.5], 1, layers=3), "share", [0.5]),
        (lambda: slices_max_alpha(1.0, 1.0, 1, math.inf, layers=3), "slowdown", math.inf),
        (lambda: slices_max_alpha(1.0, 1.0, 1, layer_pages=[1], layers=3), "layer_pages", [1]),
        (lambda: slices_tail(3.1, [4, 4, 4, 4], 1), "most", 3.0),
        (lambda: selection.slices_freed(-1, [4], 1), "tail_pages", -1),
        (lambda: options(equal(1), [1] * N, ORDER, -1), "remapped", -1),
        (lambda: options(equal(1), [1] * 3, ORDER, 1), "layer_bytes", [1] * 3),
        (lambda: options(equal(1), [1] * N, ORDER, 1, kinds=("spiral",)), "kind", "spiral"),
        (lambda: options(equal(1), [1] * N, ORDER, 1, present_share=2.0), "present_share", 2.0),
        (lambda: options(equal(1), [1] * N, ORDER, 1, page_bytes=0), "page_bytes", 0),
        (lambda: marginal_stall(equal(1), [1] * N, (0, 1, 2), (0, 1), buffers=1), "freed_after", 1),
        (lambda: selection.freed_bytes([], (), 1), "layer_bytes", []),
        (lambda: suffix_delay([1.0] * 3, 1.0, 4), "streamable", 3),
        (lambda: inactive_cap([1.0] * 3, 1.0, slack_s=-1.0), "slack_s", -1.0),
        (lambda: inactive_cap([1.0] * 3, 1.0, limit=-1), "limit", -1),
        (lambda: inactive_cap([1.0] * 3, -1.0), "transfer_s", -1.0),
    ],
)
def test_refused(call: Any, field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert caught.value.fields[field] == value
    assert "nothing changed" in str(caught.value)
