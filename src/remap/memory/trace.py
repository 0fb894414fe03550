# SPDX-License-Identifier: Apache-2.0
"""The events of a session, moment by moment, while a user traces it (`remap trace`): passes with their waits and copies, steps,
decisions, and what comes from and goes to other processes. Nothing is kept unless a user has asked within `KEEP_S`.

A pass's times are the host's, from its beginning to its end. Its waits, computation and copies are measured as ever by the
prefetcher's events, so for a pass on a stream they come some passes later: a trace synchronises nothing. Single copies are not
timed, only those of a pass together.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["KEEP_S", "MOST_KEPT", "Event", "Trace"]

KEEP_S = 5.0
"""How long events are kept on behind the last time that a user has asked for them."""
MOST_KEPT = 240
"""Events: the last ones."""


class Event(NamedTuple):
    """number: from 1 on, of the session's. tenant: "" of all. begin_s: of `time.monotonic`, which all processes of a machine
    share. seconds: 0.0 of a moment."""

    number: int
    kind: str  # "pass", "step", "decision", "ask", "granted", "gave"
    tenant: str
    begin_s: float
    seconds: float
    text: str
    values: Mapping[str, float]


class Trace:
    """A session's. Threads of several engines add to it: an append and a number are one step each."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MOST_KEPT)
        self._numbers = itertools.count(1)
        self._until = 0.0

    def now(self) -> float:
        """The moment for `add`; 0.0: no user traces, and there is nothing to add."""
        if not self._until:
            return 0.0
        now = time.monotonic()
        if now < self._until:
            return now
        self._until = 0.0
        return 0.0

    def add(self, kind: str, tenant: str, begin_s: float, text: str = "", **values: float) -> None:
        """An event that began then, and ends now. begin_s: of `now`; 0.0: it is not kept."""
        if begin_s:
            seconds = max(0.0, time.monotonic() - begin_s)
            self._events.append(Event(next(self._numbers), kind, tenant, begin_s, seconds, text, values))

    def moment(self, kind: str, tenant: str, text: str = "", **values: float) -> None:
        """An event that takes no time."""
        if now := self.now():
            self._events.append(Event(next(self._numbers), kind, tenant, now, 0.0, text, values))

    def ask(self) -> tuple[Event, ...]:
        """The last ones, oldest first; from now on more are kept."""
        self._until = time.monotonic() + KEEP_S
        return tuple(self._events)
