# SPDX-License-Identifier: Apache-2.0
"""Lengths of prompts and answers that are not lognormal: by a table of quantiles, or even within a range. Pure.

Both draw from a `random.Random` and have the members of `workload.Lognormal`: `mean`, `least`, `most`, `cut_mean`, `draw`,
`scaled`.
"""

from __future__ import annotations

import bisect
import math
import random
from dataclasses import dataclass, replace

from remap.config import invalid

__all__ = ["Quantiles", "Uniform"]


def _log_ratio(large: float, small: float) -> float:
    """log(large / small), exact also where they hardly differ: the quotient would be rounded to the nearest of few numbers."""
    return math.log1p((large - small) / small)


@dataclass(frozen=True)
class Quantiles:
    """Lengths in tokens by their quantiles: share `shares[i]` of all lengths is at most `tokens[i]`.

    Between two knots the logarithm of the length is linear in the share, so that each segment is spread evenly over the orders
    of magnitude that it covers. shares: from 0 to 1, ascending; tokens: ascending, the first at least 1. least, most: an
    additional cut, none by default. Raises InvalidArgument (field).
    """

    shares: tuple[float, ...]
    tokens: tuple[float, ...]
    least: int = 1
    most: int = 1 << 20

    def __post_init__(self) -> None:
        shares, tokens = self.shares, self.tokens
        if len(shares) < 2 or shares[0] != 0.0 or shares[-1] != 1.0 or any(b <= a for a, b in zip(shares, shares[1:])):
            raise invalid("shares", shares, "at least two shares that ascend from 0 to 1")
        if len(tokens) != len(shares) or not tokens[0] > 0 or any(b < a for a, b in zip(tokens, tokens[1:])):
            raise invalid("tokens", tokens, f"{len(shares)} numbers above 0 that do not descend")
        if not math.isfinite(tokens[-1]):
            raise invalid("tokens", tokens, "finite")
        if not 1 <= self.least <= self.most:
            raise invalid("least", self.least, f"from 1 to most ({self.most})")

    def at(self, share: float) -> float:
        """The length at a share (0 to 1) of all, before the cut and before rounding."""
        after = min(max(bisect.bisect_right(self.shares, share), 1), len(self.shares) - 1)
        low, high = self.shares[after - 1], self.shares[after]
        small, large = self.tokens[after - 1], self.tokens[after]
        return float(small * (large / small) ** ((share - low) / (high - low)))

    def _mean(self, least: float, most: float) -> float:
        """Closed form, segment by segment: the mean of exp over an interval, with what lies outside moved to the cut."""
        total = 0.0
        for low, high, small, large in zip(self.shares, self.shares[1:], self.tokens, self.tokens[1:]):
            width = high - low
            if large <= least or small >= most or small == large:
                total += width * min(max(small if small >= most else large, least), most)
                continue
            steep = _log_ratio(large, small)
            start, end = max(small, least), min(large, most)
            total += (
                width
                * (
                    (end - start)
                    + least * _log_ratio(start, small)
                    + (most * _log_ratio(large, end) if large > most else 0.0)
                )
                / steep
            )
        return total

    @property
    def mean(self) -> float:
        """The mean without the cut (but for rounding to whole tokens)."""
        return self._mean(0.0, math.inf)

    @property
    def cut_mean(self) -> float:
        """The mean after the cut (but for rounding to whole tokens)."""
        return self._mean(float(self.least), float(self.most))

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return max(self.least, min(round(self.at(rng.random())), self.most))

    def scaled(self, factor: float, most: int) -> Quantiles:
        """`factor` times as long, the longest `most` tokens."""
        tokens = tuple(value * factor for value in self.tokens)
        return replace(self, tokens=tokens, least=min(self.least, most), most=most)


@dataclass(frozen=True)
class Uniform:
    """Whole numbers of tokens from `least` to `most`, each as likely. Raises InvalidArgument (field)."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise invalid("least", self.least, f"from 1 to most ({self.most})")

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2.0

    @property
    def cut_mean(self) -> float:
        return self.mean

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.randint(self.least, self.most)

    def scaled(self, factor: float, most: int) -> Uniform:
        """`factor` times as long, the longest `most` tokens."""
        top = max(1, min(round(self.most * factor), most))
        return Uniform(max(1, min(round(self.least * factor), top)), top)
