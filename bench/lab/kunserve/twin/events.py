"""Virtual time for many actors: what happens next, and when. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["Events"]


class Events:
    """Calls in order of time; of equal times in the order in which they were asked for. now: seconds from 0 on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Have it called at that time, or now if that is over."""
        self._asked += 1
        heapq.heappush(self._due, (max(self.now, time_s), self._asked, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have it called so many seconds from now on."""
        self.at(self.now + seconds, call)

    def step(self) -> bool:
        """Go on to what is next; False if there is nothing."""
        if not self._due:
            return False
        self.now, _, call = heapq.heappop(self._due)
        call()
        return True
