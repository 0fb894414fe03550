# SPDX-License-Identifier: Apache-2.0
"""Which donor to take from first, and which not yet.

Oneiros (section 5.1, algorithm 1) takes from inactive models of the lowest priority first, without priorities from the
most recently used (MRU), and from active models last. A donor costs its reload at its next use, so the best donor is
the one whose next use is farthest (Belady). MRU is that rule for tenants used in a cycle, and only for those (derived);
LRU is the baseline for comparison. `NextUse` estimates the next use from past activations, and `may_donate` keeps a
tenant whole until it has been idle for long enough to pay for its reload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Candidate", "NextUse", "may_donate", "rank"]


class Candidate(NamedTuple):
    """A tenant that could give layers, as seen at one moment.

    priority: larger is more important. order: its place in the order of attaching. last_use: sequence number of its
    last activation or pass, larger is later. idle_s: seconds since then. next_use_s: seconds until its next use, as far
    as expected; None: nothing is known (`NextUse`). reload_s: seconds to load back the layers that it would give.
    """

    name: str
    active: bool
    priority: int
    order: int
    last_use: int
    idle_s: float
    next_use_s: float | None
    reload_s: float


def rank(candidates: Iterable[Candidate], policy: str) -> list[Candidate]:
    """The candidates, best to take from first: inactive ones before active ones, and within each by `config.POLICIES`.

    "priority": lowest priority first; within one, as "expected_next_use".
    "expected_next_use": the farthest first. An unknown next use counts as farthest of all: that a tenant has come back
        is the only evidence that it will. Equally far ones, the unknown among them, as "mru".
    "mru": most recently used first. "lru": least recently used first.
    Candidates that are still equal go by the order of attaching. The input is not changed.
    """
    keys: dict[str, Callable[[Candidate], tuple[float, ...]]] = {
        "priority": lambda c: (c.priority, -_distance(c), -c.last_use),
        "expected_next_use": lambda c: (-_distance(c), -c.last_use),
        "mru": lambda c: (-c.last_use,),
        "lru": lambda c: (c.last_use,),
    }
    key = keys[policy]
    return sorted(candidates, key=lambda c: (c.active, key(c), c.order, c.name))


def _distance(candidate: Candidate) -> float:
    return math.inf if candidate.next_use_s is None else candidate.next_use_s


def may_donate(candidate: Candidate, *, min_idle: float = 1.0) -> bool:
    """Whether layers of this tenant may be taken now: an inactive one must have been idle for more than min_idle
    reloads.

    So a tenant that pauses is left alone, and one that left for good has cost at most min_idle reloads' time of waiting
    (ski rental again: with min_idle = 1 the reload never takes longer than the idleness it made use of). 0: as soon as
    the tenant is inactive. Active tenants may always donate: they are asked last and keep serving while they stream,
    and `donors.supply` weighs the stall that they cost.
    """
    return candidate.active or candidate.idle_s > min_idle * candidate.reload_s


@dataclass
class _History:
    """One tenant's past activations."""

    last_s: float
    interval_s: float | None = None  # moving average; None: activated once


class NextUse:
    """When each tenant will be activated next, judged by its past. Reads no clock: callers pass times in, in seconds.

    A tenant that comes back has a rhythm: the moving average of the time between its activations, less the time since
    the last one, at least 0. After more than `stale` such intervals away it has left its rhythm, and its next use is
    unknown (None): otherwise a tenant used twice in a row and never again would look needed at once, for ever.

    If tenants follow each other in a cycle, their place in it says more than irregular times. If the last activations
    repeat a cycle of different tenants (twice in full; activations of one tenant in a row count as one turn), the
    tenant j turns ahead is expected after the rest of this turn and j - 1 more, max(0, turn - elapsed) + (j - 1) turn,
    where `turn` is the moving average of the time between turns. The tenant whose turn it is comes last. So expected
    next uses have the order of the cycle, however irregular the times, and the farthest inactive tenant is the most
    recently used. A turn that has lasted for `stale` whole cycles ends this: then each tenant's own rhythm counts, as
    it does for tenants outside the cycle.

    Clocks may jump back: an interval below 0 is not learned from, and elapsed time is at least 0.
    smoothing: weight of the newest interval. stale: math.inf turns that rule off.
    """

    def __init__(self, smoothing: float = 0.25, stale: float = 4.0) -> None:
        self.smoothing, self.stale = smoothing, stale
        self._seen: dict[str, _History] = {}
        self._turns: list[str] = []  # as many as two cycles of all tenants
        self._turn_at_s: float | None = None
        self._turn_s: float | None = None
        self._ahead: dict[str, int] = {}  # turns until each tenant of the present cycle is next; empty: no cycle

    def activated(self, name: str, now_s: float) -> None:
        """Record that `name` becomes active at `now_s`."""
        history = self._seen.get(name)
        if history is None:
            self._seen[name] = _History(now_s)
        else:
            history.interval_s = self._average(history.interval_s, now_s - history.last_s)
            history.last_s = now_s
        if self._turns and self._turns[-1] == name:
            return
        if self._turn_at_s is not None:
            self._turn_s = self._average(self._turn_s, now_s - self._turn_at_s)
        self._turn_at_s = now_s
        self._turns.append(name)
        del self._turns[: -2 * len(self._seen)]
        self._ahead = self._find_cycle()

    @property
    def turn_s(self) -> float | None:
        """Moving average of the seconds between two tenants' turns; None before the second."""
        return self._turn_s

    def expected_s(self, name: str, now_s: float) -> float | None:
        """Seconds from `now_s` to the next activation of `name`, at least 0; None: not known. Changes nothing."""
        turns = self._ahead.get(name)
        if turns is not None and self._turn_s is not None and self._turn_at_s is not None:
            elapsed = max(0.0, now_s - self._turn_at_s)
            if elapsed <= self.stale * len(self._ahead) * self._turn_s:
                return max(0.0, self._turn_s - elapsed) + (turns - 1) * self._turn_s
        history = self._seen.get(name)
        if history is None or history.interval_s is None:
            return None
        elapsed = max(0.0, now_s - history.last_s)
        if elapsed > self.stale * history.interval_s:
            return None
        return max(0.0, history.interval_s - elapsed)

    def forget(self, name: str) -> None:
        """The tenant is gone, and with it any cycle that it was in. Unknown names are no error."""
        self._seen.pop(name, None)
        if name in self._turns:
            # Its neighbours never followed each other directly: the later turns are a new sequence.
            self._turns = self._turns[len(self._turns) - self._turns[::-1].index(name) :]
            self._ahead = self._find_cycle()

    def _find_cycle(self) -> dict[str, int]:
        """Tenant -> turns until it is next, if the last turns are two rounds of different tenants."""
        turns = self._turns
        length = next((k for k in range(2, len(turns)) if turns[-1 - k] == turns[-1]), 0)
        cycle = turns[-length:]
        if not length or cycle != turns[-2 * length : -length] or len(set(cycle)) < length:
            return {}
        return {name: i + 1 for i, name in enumerate(cycle)}

    def _average(self, average: float | None, interval_s: float) -> float | None:
        if interval_s < 0:
            return average
        return interval_s if average is None else average + self.smoothing * (interval_s - average)
