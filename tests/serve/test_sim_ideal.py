"""How far a policy comes from recompute to ideal: shares of a gap, and where there is none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remap_serve.sim.ideal import AGAINST_IDEAL, NEARLY, against_ideal, gap_closed, of_ideal

FIGURES = st.just(0.0) | st.floats(1e-6, 1e6)  # a quotient by less may overflow, and nothing here is as small


@given(recompute=FIGURES, ours=FIGURES, ideal=FIGURES)
def test_a_share_of_the_gap(recompute: float, ours: float, ideal: float) -> None:
    """Ours is recompute's figure less that share of the gap; where ideal is not clearly better there is no gap."""
    for more_is_better in (False, True):
        share = gap_closed(recompute, ours, ideal, more_is_better=more_is_better)
        better = ideal > recompute if more_is_better else ideal < recompute
        if better and abs(recompute - ideal) > NEARLY * max(recompute, ideal):
            assert recompute - share * (recompute - ideal) == pytest.approx(ours, rel=1e-6, abs=1e-6 * recompute)
        else:
            assert math.isnan(share)


@given(recompute=FIGURES, ours=FIGURES, ideal=FIGURES, scale=st.floats(1e-3, 1e3))
def test_units_do_not_matter(recompute: float, ours: float, ideal: float, scale: float) -> None:
    plain, scaled = gap_closed(recompute, ours, ideal), gap_closed(scale * recompute, scale * ours, scale * ideal)
    if not math.isnan(plain) and not math.isnan(scaled):  # at the edge of "nearly" rounding decides
        assert scaled == pytest.approx(plain, rel=1e-6, abs=1e-6)


@given(recompute=FIGURES, ours=st.floats(0.0, 1.0), ideal=FIGURES)
def test_between_the_two_it_is_between_0_and_1_and_never_huge(recompute: float, ours: float, ideal: float) -> None:
    """Of a figure that is no worse than recompute's and not negative, the share is at most 1 / NEARLY."""
    inside = gap_closed(recompute, recompute + ours * (ideal - recompute), ideal)
    assert math.isnan(inside) or -1e-9 <= inside <= 1 + 1e-9
    below = gap_closed(recompute, ours * recompute, ideal)
    assert math.isnan(below) or 0 <= below <= 1 / NEARLY


@pytest.mark.parametrize(
    ("recompute", "ours", "ideal", "more", "expected"),
    [
        (90.0, 90.0, 2.0, False, 0.0),
        (90.0, 2.0, 2.0, False, 1.0),
        (90.0, 24.0, 2.0, False, 0.75),
        (90.0, 134.0, 2.0, False, -0.5),  # worse than recompute
        (2.0, 1.0, 1.2, False, 1.25),  # better than ideal
        (100.0, 150.0, 200.0, True, 0.5),
        (100.0, 90.0, 200.0, True, -0.1),
    ],
)
def test_by_hand(recompute: float, ours: float, ideal: float, more: bool, expected: float) -> None:
    assert gap_closed(recompute, ours, ideal, more_is_better=more) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("recompute", "ours", "ideal", "more"),
    [
        (0.0, 0.0, 0.0, False),
        (2.0, 50.0, 2.0, False),
        (2.0, 50.0, 1.91, False),  # 4.5 %
        (2.0, 1.0, 3.0, False),  # ideal is the worse one
        (100.0, 50.0, 104.0, True),
        (100.0, 50.0, 60.0, True),
        *((*values, False) for values in ((math.nan, 1.0, 2.0), (2.0, math.nan, 1.0), (2.0, 1.0, math.nan))),
    ],
)
def test_where_there_is_no_gap(recompute: float, ours: float, ideal: float, more: bool) -> None:
    assert math.isnan(gap_closed(recompute, ours, ideal, more_is_better=more))


def test_ratios() -> None:
    assert of_ideal(3.0, 1.5) == 2.0
    for ours, ideal in ((1.0, 0.0), (math.nan, 1.0), (1.0, math.nan)):
        assert math.isnan(of_ideal(ours, ideal))


def figures(ttft: float | None, tbt: float | None, tokens: float) -> dict[str, float | None]:
    return {"ttft_p99_s": ttft, "tbt_p99_s": tbt, "tokens_per_s": tokens, "preemptions": 3.0}


def test_every_policy_against_both() -> None:
    runs = {
        "recompute": figures(90.0, 0.1, 1000.0),
        "remap": figures(24.0, 1.0, 1090.0),
        "ideal": figures(2.0, 0.2, 1100.0),
    }
    found = against_ideal(runs)
    assert list(found) == list(runs)
    assert [list(values) for values in found.values()] == [[one.key for one in AGAINST_IDEAL]] * 3
    assert list(found["recompute"].values()) == pytest.approx([0.0, 0.0, 0.5])
    assert list(found["remap"].values()) == pytest.approx([0.75, 0.9, 5.0])
    assert list(found["ideal"].values()) == [1.0, 1.0, 1.0]
    for missing in ("recompute", "ideal"):
        assert against_ideal({name: run for name, run in runs.items() if name != missing}) == {}
    nothing = against_ideal({**runs, "remap": figures(None, None, 1000.0)})["remap"]
    assert math.isnan(nothing["gap_closed_ttft_p99"]) and math.isnan(nothing["tbt_p99_of_ideal"])
    assert nothing["gap_closed_tokens_per_s"] == 0.0
