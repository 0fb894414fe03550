# SPDX-License-Identifier: Apache-2.0
"""How many blocks to keep free: the low watermark, from the demand that was seen.

Oneiros (section 5.1, algorithm 1) acts when the KV cache is *out* of blocks. Then the request that needs one waits for
a control period and for pages to change hands. So L blocks are kept free: in 99 of 100 cases the demand rises by no
more while a decision is awaited and carried out. Derived: with w_t = live + demanded blocks at step t, and the horizon
h, that control period and mapping time in steps,

    rise_t = max(0, max(w_{t+1}, ..., w_{t+h}) - w_t)          L = the quantile of rise_t over the steps remembered

Only steps whose whole horizon has been seen count: a rise cut short by the present would bias L towards 0, more so the
longer the horizon. A burst therefore shows in L at most h steps after it began; the demand itself is met at once.

While the demand does not rise, L never rises (from h steps after the last rise, at one horizon, once a quantile
exists): each further rise_t is 0, and neither replacing a value by the smallest possible one nor adding one raises a
nearest-rank quantile. Beyond that, the no-thrash proof needs only the guard of `remap.policy.rental`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

__all__ = ["LEAST_RISES", "LONGEST_HORIZON", "Watermark", "horizon"]

LONGEST_HORIZON = 32
LEAST_RISES = 8
"""The fewest rises for a quantile; with fewer, the moving average of the change stands in."""


def horizon(control_s: float, map_s: float, step_s: float) -> int:
    """Steps until a need that arises now can have been met: 1 + ceil((control_s + map_s) / step_s), within [1, 32].

    control_s: seconds from one decision to the next. map_s: seconds to carry one out. step_s: seconds per step; 0 (not
    measurable) gives the longest horizon, or the shortest when nothing takes time. Derived: the h of the corrected
    algorithm 1.
    """
    wait = control_s + map_s
    if wait >= step_s * (LONGEST_HORIZON - 1):  # also keeps a tiny step_s from overflowing the quotient
        return LONGEST_HORIZON if wait > 0 else 1
    return 1 + math.ceil(wait / step_s)


class Watermark:
    """One tenant's past demand, and the headroom that follows from it. Reads no clock: a step is one `observe`.

    window: rises remembered, at least 8 (besides the values of the longest horizon). quantile: share of rises that the
    headroom covers, nearest rank. smoothing: weight of the newest step in `variation`. `observe` and `blocks` together
    cost about a microsecond while the horizon stays the same; a new horizon costs a pass over the window.
    """

    __slots__ = (
        *("window", "quantile", "smoothing", "_values", "_variation"),
        *("_horizon", "_tops", "_rises", "_sorted", "_seen"),
    )

    def __init__(self, window: int = 128, quantile: float = 0.99, smoothing: float = 0.125) -> None:
        self.window, self.quantile, self.smoothing = window, quantile, smoothing
        self._values: deque[int] = deque(maxlen=window + LONGEST_HORIZON)
        self._variation = 0.0
        self._restart(1)

    @property
    def variation(self) -> float:
        """Moving average of |change of live + demanded blocks| per step, in blocks."""
        return self._variation

    def observe(self, wanted: int) -> None:
        """Record one step's live + demanded blocks."""
        values = self._values
        if values:
            self._variation += self.smoothing * (abs(wanted - values[-1]) - self._variation)
        values.append(wanted)
        steps = self._horizon
        self._push(wanted, values[-1 - steps] if len(values) > steps else None)

    def blocks(self, horizon_steps: int) -> int:
        """L in blocks, at least 0: the quantile of the largest rise within `horizon_steps` following steps.

        While fewer than LEAST_RISES rises are known: twice `variation`, rounded. The answer depends only on the
        observed values and on this horizon, not on earlier horizons.
        """
        if horizon_steps != self._horizon:
            self._restart(horizon_steps)
            values = list(self._values)[-(self.window + horizon_steps) :]
            for i, value in enumerate(values):
                self._push(value, values[i - horizon_steps] if i >= horizon_steps else None)
        ranked = self._sorted
        known = len(ranked)
        if known < LEAST_RISES:
            return int(2.0 * self._variation + 0.5)
        # The tolerance keeps the rounding of 0.99 * 100 from asking for the hundredth of a hundred.
        return ranked[max(0, math.ceil(self.quantile * known - 1e-9) - 1)]

    def _restart(self, horizon_steps: int) -> None:
        """Forget everything that depends on the horizon."""
        self._horizon = horizon_steps
        self._seen = 0  # values pushed
        # (position, value), values falling: the first is the largest of the last horizon + 1 values.
        self._tops: deque[tuple[int, int]] = deque()
        self._rises: deque[int] = deque()  # oldest first
        self._sorted: list[int] = []

    def _push(self, value: int, before: int | None) -> None:
        """Add the newest value. It completes the rise of the step one horizon ago, whose value was `before`."""
        seen, tops = self._seen, self._tops
        self._seen = seen + 1
        while tops and tops[-1][1] <= value:
            tops.pop()
        tops.append((seen, value))
        if tops[0][0] < seen - self._horizon:
            tops.popleft()
        if before is None:
            return
        ranked, rises = self._sorted, self._rises
        if len(rises) == self.window:
            del ranked[bisect_left(ranked, rises.popleft())]
        rise = tops[0][1] - before  # at least 0: that step is still among them
        rises.append(rise)
        insort(ranked, rise)
