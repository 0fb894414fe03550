# SPDX-License-Identifier: Apache-2.0
"""The time of a decode pass, by its live KV blocks: a line through the measured times. Pure.

A pass reads the weights once and every live block once, and computes for every request: of requests of like length its time is
a line in the live blocks (Oneiros section 4 has the same two terms). Only the slope is asked for: the time of one more block.
Old measurements fade, since lengths change.
"""

from __future__ import annotations

__all__ = ["BatchTime"]

_FADES = 0.98  # the weight of a measurement after another one
_SPREAD = 0.02  # of the mean: so far must live blocks have been apart, or the line may have any slope


class BatchTime:
    """Least squares of seconds over blocks, the newest measurement counting most."""

    def __init__(self) -> None:
        self._count = self._blocks = self._seconds = 0.0
        self._squares = self._products = 0.0  # of the differences from the means
        self._last = (0, 0.0)
        self.slope = 0.0
        """Seconds of one block more, at least 0; 0 while nothing is known."""

    def observe(self, blocks: int, seconds: float) -> None:
        """A pass with `blocks` live blocks computed for `seconds`."""
        self._last = blocks, seconds
        old, self._count = self._count * _FADES, self._count * _FADES + 1.0
        ahead, later = blocks - self._blocks, seconds - self._seconds
        self._blocks += ahead / self._count
        self._seconds += later / self._count
        weight = old / self._count
        self._squares = self._squares * _FADES + weight * ahead * ahead
        self._products = self._products * _FADES + weight * ahead * later
        if self._squares > self._count * (1.0 + _SPREAD * self._blocks) ** 2:
            self.slope = max(0.0, self._products / self._squares)

    def blocks_within(self, seconds: float) -> float:
        """The most live blocks whose pass takes `seconds`, by the slope from the last measurement on; infinite while nothing is
        known."""
        if self.slope <= 0.0:
            return float("inf")
        blocks, last_s = self._last
        return blocks + (seconds - last_s) / self.slope
