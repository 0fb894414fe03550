# SPDX-License-Identifier: Apache-2.0
"""Gaps between two tokens of an answer that a reader notices. Pure."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LONG_GAP_S", "long_gaps"]

LONG_GAP_S = 0.2
"""A reader notices a gap that is longer."""


def long_gaps(gaps: Mapping[float, int]) -> float:
    """The share of gaps above `LONG_GAP_S`; gaps: seconds -> how many. 0 of none."""
    total = sum(gaps.values())
    return sum(count for seconds, count in gaps.items() if seconds > LONG_GAP_S) / total if total else 0.0
