"""`remap.schedule` on known numbers: published closed forms, worked tables, edge cases and refused arguments."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest

from remap.errors import InvalidArgument
from remap.policy.maxplus import copied_uses
from remap.policy.schedule import max_remapped, nested, one_shot_delay, period, stall, uniform, uniform_fixed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
from stall_closed_form import stall_uniform

N = 40
RATIOS = (2, 4, 8)
# alpha -> stall in layer computations, n = 40, as (one buffer, two rotating buffers) for each of RATIOS; the closed forms below
# have the others. Where a pass is all copies two buffers lose (4 at 8): one more layer is copied.
STALLS = {
    3: ((0, 0), (0, 0), (0, 0)),
    4: ((0, 0), (0, 0), (5, 8)),
    8: ((0, 0), (5, 0), (41, 40)),
    12: ((0, 0), (25, 16), (77, 72)),
    13: ((2, 0), (30, 20), (86, 80)),
    19: ((20, 2), (60, 44), (140, 128)),
    20: ((23, 4), (65, 48), (149, 136)),
}


def equal(alpha: int, buffers: int, ratio: float, slots: str = "rotating", n: int = N) -> float:
    return stall(1.0, float(ratio), uniform(n, alpha, buffers), buffers, slots, layers=n)  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", sorted(STALLS))
def test_stall_table(alpha: int) -> None:
    for ratio, (single, double) in zip(RATIOS, STALLS[alpha], strict=True):
        for slots in ("rotating", "fixed"):
            assert equal(alpha, 1, ratio, slots) == pytest.approx(single, abs=1e-9)
            if slots == "rotating" or alpha % 2 == 0:  # two fixed slots cost nothing more when they divide m
                assert equal(alpha, 2, ratio, slots) == pytest.approx(double, abs=1e-9)
        assert equal(alpha, 3, ratio) >= equal(alpha, 2, ratio)  # a third buffer only adds traffic


# ratio -> largest alpha without stall, n = 40: one buffer, two rotating, two fixed.
# Two fixed slots lose one layer at ratio 8: alpha = 3 would need five copies, an odd number, to fill the pass exactly.
@pytest.mark.parametrize(
    ("ratio", "single", "rotating", "fixed"),
    [(2, 12, 18, 18), (4, 7, 8, 8), (8, 3, 3, 2), (16, 1, 0, 0), (25, 0, 0, 0)],
)
def test_max_remapped_table(ratio: int, single: int, rotating: int, fixed: int) -> None:
    def largest(buffers: int | str, slots: str) -> tuple[int, int]:
        return max_remapped(1.0, float(ratio), buffers, slots=slots, layers=N)  # type: ignore[arg-type]

    assert largest(1, "rotating")[0] == largest(1, "fixed")[0] == single
    assert largest(2, "rotating")[0] == rotating
    assert largest(2, "fixed")[0] == fixed
    assert largest("auto", "fixed") == ((fixed, 2) if fixed > single else (single, 1))
    assert largest("auto", "rotating") == ((rotating, 2) if rotating > single else (single, 1))


def test_fixed_slots_with_an_odd_number_of_streamed_layers() -> None:
    assert equal(9, 2, 3.4, "rotating") == 0.0
    assert equal(9, 2, 3.4, "fixed") == pytest.approx(0.8)
    assert stall(1.0, 3.4, uniform_fixed(N, 9, 2), 2, layers=N) == 0.0
    assert max_remapped(1.0, 3.4, layers=N) == (8, 2)
    assert max_remapped(1.0, 3.4, layers=N, select=uniform_fixed) == (9, 2)


def test_uniform_fixed_is_uniform_where_no_wrap_needs_room() -> None:
    assert uniform_fixed(40, 8, 2) == uniform(40, 8, 2)
    assert uniform_fixed(40, 4, 1) == uniform(40, 4, 1)
    assert uniform_fixed(5, 3, 2) == (0, 1, 2, 3, 4)
    assert uniform_fixed(40, 0, 2) == ()
    chosen = uniform_fixed(40, 9, 2)
    assert len(set(chosen)) == 11 and chosen[-1] == 35


@pytest.mark.parametrize(
    ("ratio", "alpha", "single", "double"),
    [(2, 20, 23, 4), (4, 10, 15, 8), (8, 5, 14, 16), (16, 2, 11, 24), (25, 1, 12, 35)],
)
def test_counting_alpha_instead_of_m_copies_overruns(ratio: int, alpha: int, single: int, double: int) -> None:
    """alpha * T_T <= n * T_c admits these alpha (Oneiros' cap), and all of them stall: m copies happen, not alpha."""
    assert alpha * ratio <= N
    assert equal(alpha, 1, ratio) == pytest.approx(single)
    assert equal(alpha, 2, ratio) == pytest.approx(double)


GRID = [
    (n, alpha, ratio)
    for n in (8, 12, 24, 40, 80)
    for alpha in range(1, n // 2 + 1, 1 if n <= 40 else 3)
    for ratio in (0.5, 1, 1.5, 2, 3, 3.4, 4, 5, 6.5, 8, 9.5, 12, 16, 25)
]


def test_double_buffering_wins_iff() -> None:
    """alpha + 1 > max(r, n / (1 + r)): exact for Eq. 4 and 5, and so for the system where m divides n for both."""
    differs = 0
    for n, alpha, ratio in GRID:
        rule = alpha + 1 > max(ratio, n / (1 + ratio))
        eq4 = max(0.0, (alpha + 1) * (ratio + 1) - n)
        eq5 = max(0.0, (alpha + 2) * ratio - n)
        assert (eq5 < eq4 - 1e-12) == rule, (n, alpha, ratio)
        wins = equal(alpha, 2, ratio, n=n) < equal(alpha, 1, ratio, n=n) - 1e-9
        if rule or n % (alpha + 1) == 0:
            assert wins == rule, (n, alpha, ratio)
        differs += wins != rule
    assert differs > 0  # rounded gaps make one buffer stall earlier than Eq. 4 says: the rule is then only sufficient


def test_closed_forms_are_the_exact_period() -> None:
    for n, alpha, ratio in GRID:
        for buffers in (1, 2, 3):
            if alpha + buffers <= n:
                expected = stall_uniform(n, 1.0, ratio, alpha, buffers)
                assert equal(alpha, buffers, ratio, n=n) == pytest.approx(expected, abs=1e-9)
    assert stall_uniform(N, 1.0, 99.0, 0, 2) == 0.0
    for alpha in (1, 3, 4, 7, 9, 19):  # m divides n: Eq. 4 itself
        assert stall_uniform(N, 1.0, 5.0, alpha, 1) == max(0, (alpha + 1) * 6 - N)


def test_uniform_and_slots() -> None:
    assert uniform(40, 4, 1) == (0, 8, 16, 24, 32)
    assert uniform(40, 4, 1, phase=7) == (7, 15, 23, 31, 39)
    assert uniform(40, 4, 1, phase=-1) == (7, 15, 23, 31, 39)
    assert uniform(40, 0, 3) == ()
    assert uniform(1, 0, 1) == ()
    assert uniform(3, 2, 1) == (0, 1, 2)
    assert copied_uses(3, 2, "fixed") == [0, 2]  # the second layer has a buffer to itself
    assert copied_uses(2, 4, "fixed") == []
    assert copied_uses(4, 2, "fixed") == [0, 1, 2, 3]


def test_nested_order_is_for_changes_between_neighbouring_sizes() -> None:
    """Even sets of neighbouring sizes share few layers."""
    assert (nested(1), nested(2)) == ((0,), (0, 1))
    assert nested(40)[:2] == (0, 23)  # log2(3) - 1 = 0.585 of the circle
    reloads = [len(set(uniform(N, a, 1)) - set(uniform(N, a + 1, 1))) for a in range(1, 20)]
    assert max(reloads) >= 10


def test_edge_cases() -> None:
    assert period([2.0], [9.0], (), 1) == 2.0
    assert period([2.0], [9.0], (0,), 1) == 2.0  # alone in its buffer: it stays
    assert period([2.0, 3.0], [9.0, 9.0], (0, 1), 5) == 5.0  # more buffers than layers
    assert period([0.0, 0.0], [0.0, 0.0], (0, 1), 1) == 0.0
    assert period([0.0, 0.0], [1.0, 2.0], (0, 1), 1) == 3.0
    assert period([1.0, 1.0], [1.0, 2.0], (0, 1), 1) == 5.0  # nothing overlaps
    assert stall([0.1] * 30, 0.0, range(30), 1) == 0.0
    assert stall([0.1] * 30, 0.0, range(30), 2) == 0.0
    assert max_remapped([1.0], [0.0]) == (0, 1)
    assert max_remapped([1.0, 1.0], 0.0) == (1, 1)
    assert max_remapped([1.0, 1.0], 0.0, buffers=2) == (0, 1)
    assert max_remapped([1.0, 1.0], 9.0, buffers=7) == (0, 1)
    assert max_remapped([0.0, 0.0], 0.0) == (1, 1)
    assert max_remapped([1.0, 1.0], 9.0, slowdown=8.0) == (0, 1)  # two copies of 9 each, neither hidden: 20 s, not 18
    assert max_remapped([1.0, 1.0], 9.0, slowdown=9.0) == (1, 1)


def test_max_remapped_is_not_monotone_in_alpha() -> None:
    """With fixed slots a larger alpha may fit where a smaller one does not; the scan must not stop early."""
    stalls = {alpha: equal(alpha, 2, 10 / 3, "fixed") for alpha in range(1, 12)}
    fits = [alpha for alpha, late in stalls.items() if late < 1e-9]
    assert stalls[9] > 0.0
    assert max_remapped(1.0, 10 / 3, 2, layers=N) == (max(fits), 2) == (10, 2)


def test_max_remapped_forgives_rounding_only() -> None:
    for unit in (0.1, 1e-3, 1 / 3, 7e-5):
        assert max_remapped([unit] * N, unit * 4, "auto") == (8, 2)
        assert max_remapped([unit] * N, unit * 4 * (1 + 1e-7), "auto") == (6, 2)


def test_one_shot_delay() -> None:
    compute = [1.0] * 10
    assert one_shot_delay(compute, 3.0, ()) == 0.0
    assert one_shot_delay(compute, 3.0, (0,)) == 3.0
    assert one_shot_delay(compute, 3.0, (9,)) == 0.0
    assert one_shot_delay(compute, 3.0, (9, 8, 7)) == max(0.0, 3 * 3.0 - 9)
    assert one_shot_delay(compute, 3.0, (6, 7, 8, 9)) == 3.0  # a T_T - (n-1) T_c: the suffix is optimal
    assert one_shot_delay(compute, 3.0, uniform(10, 3, 1)) >= 3.0
    assert one_shot_delay([0.1] * 3, [9.0, 9.0, 0.2], (2,)) == 0.0


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: uniform(40, 40, 1), "remapped"),
        (lambda: uniform(0, 0, 1), "layers"),
        (lambda: uniform(4, -1, 1), "remapped"),
        (lambda: uniform(4, 1, 0), "buffers"),
        (lambda: uniform(4, 1.0, 1), "remapped"),
        (lambda: uniform(4, True, 1), "remapped"),
        (lambda: uniform(4, 1, 1, phase=0.5), "phase"),
        (lambda: nested(0), "layers"),
        (lambda: period([1.0, 1.0], 1.0, (2,), 1), "layer"),
        (lambda: period([1.0, 1.0], 1.0, (-1,), 1), "streamed"),
        (lambda: period([1.0, 1.0], 1.0, (0, 0), 1), "layer"),
        (lambda: period([1.0, 1.0], 1.0, (0,), 0), "buffers"),
        (lambda: period([1.0, 1.0], 1.0, (0,), 1, "round"), "slots"),
        (lambda: period([1.0, NAN], 1.0, (0,), 1), "compute_s"),
        (lambda: period([1.0, 1.0], [1.0, -1.0], (0,), 1), "transfer_s"),
        (lambda: period([1.0, 1.0], INF, (0,), 1), "transfer_s"),
        (lambda: period([1.0, "1"], 1.0, (0,), 1), "compute_s"),
        (lambda: period([1.0, 1.0], [1.0], (0,), 1), "transfer_s"),
        (lambda: period([], [], (), 1), "compute_s"),
        (lambda: period([1.0], 1.0, (), 1, layers=2), "layers"),
        (lambda: max_remapped([1.0], 1.0, slowdown=-0.1), "slowdown"),
        (lambda: max_remapped([1.0], 1.0, slowdown=NAN), "slowdown"),
        (lambda: max_remapped([1.0] * 4, 0.0, buffers="many"), "buffers"),
        (lambda: max_remapped([1.0] * 4, 0.0, select=lambda n, a, b: (0,)), "expected"),
        (lambda: one_shot_delay([1.0], 1.0, (1,)), "layer"),
    ],
)
def test_refusals_name_the_field(call: object, field: str) -> None:
    with pytest.raises(InvalidArgument, match="nothing changed") as caught:
        call()  # type: ignore[operator]
    assert field in caught.value.fields


def test_scalars_and_numpy_arguments() -> None:
    with pytest.raises(InvalidArgument, match="layers="):
        period(1.0, 1.0, (0,), 1)
    assert period(1.0, 1.0, (0,), 1, layers=3) == 3.0
    numpy = pytest.importorskip("numpy")
    compute = numpy.ones(N)
    assert period(compute, numpy.float32(4.0), numpy.array(uniform(N, 9, 1)), 1) == 50.0
    assert max_remapped(compute, numpy.full(N, 4.0)) == (8, 2)


def test_it_is_imported_under_its_public_name() -> None:
    """`import remap.schedule` failed when the module had moved: only the attribute was left."""
    public, inside = (importlib.import_module(name) for name in ("remap.schedule", "remap.policy.schedule"))
    assert public.__all__ and all(getattr(public, name) is getattr(inside, name) for name in public.__all__)
