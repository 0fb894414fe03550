# SPDX-License-Identifier: Apache-2.0
"""Dropping before KV runs out, and enough at once: a forecast of the demand, and when it counts. Pure.

A merger that frees what is lacking at this moment is full again seconds later where demand rises; and until the next one it is
the only group with room, so that all new prompts are computed there. With a forecast, groups merge when demand would be above
what there is in `lead_s`, about what a change takes; and as many merge as demand will need in `horizon_s`. The forecast is a
straight line through the demand now and `WINDOW_S` ago, where that rises.

After a dissolution the forecast counts for nothing until demand has been below `REARM` of C, the KV that all instances have
alone. So the price of forecasts that were wrong is bounded. Let R be what demand rises in `lead_s`, at most, by the forecast;
V all rises of the demand added up; N the instances; and R < (1 - REARM) C.

Claim 1, few rounds. Call a round the time from one dissolution to the next. Rounds in which groups merge by the forecast are at
most 1 + V / ((1 - REARM) C - R), and the mergers in each at most N - 1.
    Each but the first has a moment at which demand is below REARM C, and a later one at which it is above C - R. Mergers
    without a dissolution between them leave one group at last.

Claim 2, the price of each. From the merger to the dissolution "remap" pays, in waiting for tokens and copies, at most
max(2, 1 + (D - 1) G) times what the best of those pays that merged at the same moment and know the future (`policy.rental`,
claim 2), and that is at most the copies. The exchange of KV that the merger takes comes on top.
    So what forecasts cost is at most claim 1 times (exchange + 2 copies) of all instances, as far as that claim goes:
    rows in which demand is within the margin of a dissolution are not in it. Lines that do not form have no such bound.

Source: derived. KunServe drops when memory "has suffered or is about to suffer" from overload (section 1), and says no more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from remap.errors import InvalidArgument

__all__ = ["REARM", "WINDOW_S", "Foresight", "Outlook"]

REARM = 0.75
"""Share of the KV that all instances have alone, below which demand must have been since the last dissolution."""
WINDOW_S = 5.0


@dataclass(frozen=True)
class Outlook:
    """How far to look ahead, in seconds: lead_s for whether groups merge, horizon_s for how many.

    Raises InvalidArgument (fields lead_s, horizon_s) unless 0 <= lead_s <= horizon_s < inf.
    """

    lead_s: float = 2.0
    horizon_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.lead_s <= self.horizon_s < inf:
            raise InvalidArgument(
                f"seconds to look ahead must be 0 <= lead_s <= horizon_s, got {self.lead_s!r} and {self.horizon_s!r}; nothing "
                "was created",
                lead_s=self.lead_s,
                horizon_s=self.horizon_s,
            )


class Foresight:
    """The forecast of one cluster. Call `see` at every tick, and `dissolved` when a group begins to dissolve."""

    def __init__(self, outlook: Outlook) -> None:
        self.outlook = outlook
        self.armed = True
        """Whether the forecast counts."""
        self._seen = deque[tuple[float, int]]()

    def see(self, now_s: float, demand: int, alone: int) -> None:
        """demand: tokens of KV, of the whole cluster; alone: the KV that all instances have alone."""
        self._seen.append((now_s, demand))
        while self._seen[0][0] < now_s - WINDOW_S:
            self._seen.popleft()
        if demand < REARM * alone:
            self.armed = True

    def dissolved(self) -> None:
        """The forecast counts for nothing until demand has been low."""
        self.armed = False

    def ahead(self) -> tuple[int, int]:
        """Tokens by which demand will have risen in `lead_s` and in `horizon_s`; (0, 0) while the forecast does not count, or
        less than half of `WINDOW_S` was seen."""
        if not self.armed or not self._seen:
            return 0, 0
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if last_s - first_s < WINDOW_S / 2 or last <= first:
            return 0, 0
        rate = (last - first) / (last_s - first_s)
        return round(rate * self.outlook.lead_s), round(rate * self.outlook.horizon_s)
