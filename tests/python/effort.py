"""How many like cases a test tries: some in `make test` and `make test-all`, all of them with REMAP_TEST_LONG=1
(`make test-long`, and `make mutants`).

What a test looks at is the same in both. Hypothesis draws the same examples in each short run, so that none turns red of itself,
and others in each long one. Of sweeps over places the short form keeps each place once: an interrupt comes to every line, at its
first visit or its last by turns (test_engine_interrupts.py). Of sweeps over calls it spreads the cases evenly, and other calls
fail once and for ever, on the host and on a device (test_fault_sweep.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

LONG = os.environ.get("REMAP_TEST_LONG", "") not in ("", "0")

T = TypeVar("T")

BRIEF = ("fixed:60:12",)
"""Lengths of a simulated load in the short form, for tests that look at what runs leave behind, not at what they simulate."""


def some(few: T, many: T) -> T:
    return many if LONG else few


def examples(many: int) -> int:
    """Of hypothesis."""
    return some(min(many, max(20, many // 4)), many)


def spread(cases: Sequence[T], few: int) -> list[T]:
    """So many of them, evenly, with the first and the last."""
    if LONG or len(cases) <= few:
        return list(cases)
    return [cases[round(place * (len(cases) - 1) / (few - 1))] for place in range(few)]
