# SPDX-License-Identifier: Apache-2.0
"""How much of what memory is worth a policy gets: its figures between those of "recompute" and those of "ideal". Pure.

    gap_closed(recompute=90.0, ours=20.0, ideal=2.0)        # 0.795: of 88 s of P99 TTFT, 70 s are gone
    against_ideal({"recompute": {...}, "remap": {...}, "ideal": {...}})["remap"]["gap_closed_ttft_p99"]

"recompute" and "ideal" differ in memory alone, so their difference is what more memory would change. A policy that
makes room cannot be expected to change more. A share may still be above 1 (better than ideal, by luck of the order) or
below 0 (worse than recompute).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["AGAINST_IDEAL", "NEARLY", "Against", "against_ideal", "gap_closed", "of_ideal"]

NEARLY = 0.05
"""A gap of at most this share of the larger figure counts as none: a quotient by it would say nothing."""


def gap_closed(recompute: float, ours: float, ideal: float, *, more_is_better: bool = False) -> float:
    """(recompute - ours) / (recompute - ideal): 0 is as recompute, 1 is as ideal.

    more_is_better: of the figure; otherwise less is. nan where there is no gap to close: one of the three is nan,
    recompute and ideal are nearly equal (`NEARLY`), or ideal is the worse of the two.
    """
    gap = ideal - recompute if more_is_better else recompute - ideal
    if math.isnan(ours) or not gap > NEARLY * max(abs(recompute), abs(ideal)):
        return math.nan
    return (recompute - ours) / (recompute - ideal) + 0.0  # -0.0 is 0


def of_ideal(ours: float, ideal: float) -> float:
    """ours / ideal; nan where ideal is not above 0, or one of them is nan."""
    return ours / ideal if ideal > 0 else math.nan


@dataclass(frozen=True)
class Against:
    """One comparison with ideal. key: as in files. figure: of `PolicyResult`. ratio: to ideal's, not the gap closed."""

    key: str
    title: str
    figure: str
    more_is_better: bool = False
    ratio: bool = False

    def of(self, recompute: float, ours: float, ideal: float) -> float:
        if self.ratio:
            return of_ideal(ours, ideal)
        return gap_closed(recompute, ours, ideal, more_is_better=self.more_is_better)


AGAINST_IDEAL = (
    Against("gap_closed_ttft_p99", "gap closed, TTFT P99", "ttft_p99_s"),
    Against("gap_closed_tokens_per_s", "gap closed, tokens/s", "tokens_per_s", more_is_better=True),
    # Not a gap: with more memory more requests run at once, and ideal's time between tokens is often the longer one.
    Against("tbt_p99_of_ideal", "TBT P99 / ideal's", "tbt_p99_s", ratio=True),
)
"""The rows of every table of results."""


def against_ideal(figures: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float]]:
    """Policy -> key of `AGAINST_IDEAL` -> value, of each policy's figures by name; nan where it is not defined.

    Empty unless both "recompute" and "ideal" are there. A figure that is None is nan.
    """
    if not {"recompute", "ideal"} <= set(figures):
        return {}

    def value(policy: str, name: str) -> float:
        found = figures[policy][name]
        return math.nan if found is None else found

    return {
        policy: {
            one.key: one.of(*(value(name, one.figure) for name in ("recompute", policy, "ideal")))
            for one in AGAINST_IDEAL
        }
        for policy in figures
    }
