# SPDX-License-Identifier: Apache-2.0
"""How much of the host link's time the turns of tenants take. Pure: callers pass times in, in seconds.

When tenants take turns, layers come home and KV comes back at each switch, over the link over which the passes of the one that
has the turn copy their streamed layers: a pass then waits for its copies behind them. So a tenant that streams beside switches
has only the rest of the link, and its certificate counts with that (`SharedLink.times`): each copy takes 1 / (1 - share) as
long. That is a mean over turns. A pass that lies in a switch may wait for longer, others for less.

While switches take more than `MOST` of the link's time no more inactive layers are given (`crowded`): they all would come home
in their tenant's next turn, which then waits for the link rather than compute. KV may still be given, since to refuse it would
preempt requests, whose KV goes over the same link.

Source: derived. Simulated without it, a machine of 24 GB at 25.5 GB/s spent half of its turns waiting for two layers that
streamed behind 7 GB of a switch (docs/notes/tenants.md, "What a block costs").
"""

from __future__ import annotations

import math

__all__ = ["MOST", "Switching"]

STEPS = 64
"""The share is rounded up to a multiple of 1 / STEPS, so that certificates are not made anew for every turn."""
MOST = 0.5
"""Of the link's time. Chosen, not derived: docs/notes/tenants.md ("What a block costs") has what a quarter does, and no limit."""


class Switching:
    """share: of the link's time, in [0, 1): of late, in the mean. 0 until two turns have passed.

    smoothing: weight of the newest turn. stale: this many mean turns after the last one, tenants do not switch any more.
    """

    def __init__(self, smoothing: float = 0.25, stale: float = 4.0) -> None:
        self.smoothing, self.stale = smoothing, stale
        self.share = 0.0
        self._last = ""
        self._turn_at_s: float | None = None
        self._copied_s = 0.0  # in the present turn
        self._mean_copied_s = self._mean_turn_s = 0.0

    def activated(self, name: str, now_s: float, copied_s: float) -> None:
        """`name` is asked for. copied_s: seconds of the link for what has come back since the last call, with what now comes
        home. Several calls for one tenant in a row are one turn. A clock that jumps back teaches nothing."""
        self._copied_s += max(0.0, copied_s)
        if name == self._last:
            return
        before, self._last, self._turn_at_s = self._turn_at_s, name, now_s
        copied_s, self._copied_s = self._copied_s, 0.0
        turn_s = now_s - before if before is not None else 0.0
        if turn_s <= 0.0:
            return
        gain = self.smoothing if self._mean_turn_s else 1.0
        self._mean_copied_s += gain * (copied_s - self._mean_copied_s)
        self._mean_turn_s += gain * (turn_s - self._mean_turn_s)
        self._renew()

    @property
    def crowded(self) -> bool:
        """Whether switches take so much of the link that no more inactive layers are given."""
        return self.share > MOST

    def look(self, now_s: float) -> None:
        """No tenant has switched for long: the link is free again."""
        if self.share and self._turn_at_s is not None and now_s - self._turn_at_s > self.stale * self._mean_turn_s:
            self.share = self._mean_copied_s = self._mean_turn_s = 0.0
            self._turn_at_s = None

    def _renew(self) -> None:
        part = self._mean_copied_s / self._mean_turn_s
        self.share = min(STEPS - 1, math.ceil(STEPS * part - 1e-9)) / STEPS
