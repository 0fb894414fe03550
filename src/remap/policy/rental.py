# SPDX-License-Identifier: Apache-2.0
"""When lent layers move back: ski rental for each lender, a guard for each holder, and why they cannot thrash.

Streaming a lent layer costs something in every pass (the rent); reloading it costs once (the price). It is not known how
long the surplus of blocks will last. The rule: reload when the rent since the surplus began would reach the price.
Oneiros (section 5.2, algorithm 1) reverts as soon as KV tensors are empty, by calling the function that grows; it has
neither hysteresis nor a bound on how often layers move. Everything below is derived.

The surplus condition: every holder of the lender's pages keeps, after giving one layer's blocks back,
free >= demand + L + sigma (L: its headroom, sigma: its hysteresis, in blocks). `holds` says that the step meets it.

Claim 1, few reloads. Let G be the largest income of one step, D the dwell and s = max(D, ceil(1 / G)). In T steps,
one `Rental` says True at most T / s times.
    A True consumes a credit of at least 1, earned in a row of steps since the last reset, at least D of them and, at G
    each, at least 1 / G. Every True resets, so the rows of different ones are disjoint.
    (Read 1 as 1 - TOLERANCE, which forgives rounding, here and below.) Since nothing is lent again that was not given
    back, layers lent <= layers that may be lent + layers reloaded: growths are bounded as well.

Claim 2, the price of not knowing. For one layer, the rent and the reloads that `Rental` pays are at most
max(2, 1 + (D - 1) G) times the cost of the best plan that knows the future and keeps to the same condition (the layer is
lent while it fails): at most twice, for D <= 1 + 1 / G.
    Steps where the condition fails cost both the same, nothing, and leave the layer lent and the credit 0. So each
    maximal row of steps in which it holds is a problem of its own. Let R be the row's whole rent. The best plan pays
    min(R, 1): to reload later than at once only adds rent. If no True comes, R < 1 or the row is shorter than D: rent
    R, which is the optimum if R < 1 and else at most (D - 1) G. If it comes in step k, before that step's rent is due:
    either the credit was below 1 before k, then less than 1 + 1 is paid; or only the dwell delayed it, then k = D and
    at most (D - 1) G + 1 is paid. In both cases R >= 1, so the optimum is 1.
    The condition contains sigma: rows broken by demand that stays within sigma forfeit their credit, and a plan that
    is free to ignore it could pay less by any factor. That is what certainty against thrashing costs. And the claim is
    about one layer: a lender that accrues for its m layers one after another, at equal rents, waits for the first while
    all m pay, and so on: up to (m + 3) / 2 times the optimum. One `Rental` for each layer, its condition reading
    "after giving back this and those before it", keeps every one of them within the claim.

Claim 3, no growth follows a shrink at constant demand. A holder `arm`s its guard when it gave blocks back, with the
level live + demand + sigma and its headroom L of that step. Until live + demand exceeds the level, `clip` holds L at or
below that. Growing takes demand' + L' > free'. While its usable blocks change by its own growing and shrinking only,
free + live is constant in between, so by the surplus condition
    live' + demand' + L' > live' + free' = live + free >= live + demand + L + sigma, and L' <= L:
    live' + demand' > live + demand + sigma.
Hence a growth takes *demand* that rose by more than sigma since the last shrink, whatever the watermark did meanwhile.
"""

from __future__ import annotations

__all__ = ["TOLERANCE", "HeadroomGuard", "Rental", "income"]

TOLERANCE = 1e-9
"""Share of a reload forgiven, so that ten tenths do not need an eleventh."""


def income(saved_s: float, contention: float, copy_s: float, map_s: float) -> float:
    """The share of one reload that a step of streaming costs: (saved_s + contention copy_s) / (copy_s + map_s).

    saved_s: stall per pass that the reload ends, S(alpha) - S(alpha - 1); negative counts as 0. contention: kappa, the
    cost of a hidden copy to the computation, as a share of the copy's time. copy_s, map_s: seconds to copy and to map
    the reloaded layer. The result is 1 if a reload takes no time. Derived: the credit of the corrected algorithm 1.
    """
    reload_s = copy_s + map_s
    return (max(0.0, saved_s) + contention * copy_s) / reload_s if reload_s > 0 else 1.0


class Rental:
    """The credit of one lender towards its next reload (claims 1 and 2). Call `accrue` once per step while it lends.

    dwell: the fewest steps of surplus before a reload.
    """

    __slots__ = ("_credit", "_steps", "dwell")

    def __init__(self, dwell: int = 4) -> None:
        self.dwell = dwell
        self._credit = 0.0
        self._steps = 0

    @property
    def credit(self) -> float:
        """Rent since the surplus began, as a share of one reload; above 1 only while the dwell lasts."""
        return self._credit

    @property
    def steps(self) -> int:
        """Steps in a row that earned this credit."""
        return self._steps

    def accrue(self, income_share: float, holds: bool) -> bool:
        """Whether to reload now, before this step's rent is due; True consumes the credit.

        income_share: the cost of this step without a reload (`income`). holds: the surplus condition is met in this
        step; False forfeits all credit.
        """
        if not holds:
            self.forfeit()
            return False
        self._credit += income_share
        self._steps += 1
        if self._credit < 1.0 - TOLERANCE or self._steps < self.dwell:
            return False
        self.forfeit()
        return True

    def forfeit(self) -> None:
        """Begin again: after any growth, and after any step that does not check the condition."""
        self._credit = 0.0
        self._steps = 0


class HeadroomGuard:
    """Keep one holder's headroom from asking back the blocks that it just gave (claim 3). All numbers are blocks."""

    __slots__ = ("_headroom", "_level")

    def __init__(self) -> None:
        self._level: float | None = None
        self._headroom = 0

    def arm(self, level: float, headroom: int) -> None:
        """After a shrink: level is live + demand + sigma, headroom the L of that step, as clipped. Replaces an older
        one."""
        self._level, self._headroom = level, headroom

    def clip(self, wanted: int, headroom: int) -> int:
        """The headroom to use in this step, where live + demand is `wanted`. Above the level, the guard ends for
        good."""
        if self._level is None:
            return headroom
        if wanted > self._level:
            self._level = None
            return headroom
        return min(headroom, self._headroom)

    def clear(self) -> None:
        """End the guard after a growth: the given blocks have been asked for again."""
        self._level = None
