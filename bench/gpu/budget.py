"""The time that a call may take. What no longer fits is left out and named, never cut silently."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Budget"]


class Budget:
    """`seconds` from now on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.seconds = seconds
        self.begun = clock()

    @property
    def deadline(self) -> float:
        """On `time.monotonic`, which all processes of a machine share on Linux."""
        return self.begun + self.seconds

    @property
    def spent(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self.begun

    @property
    def left(self) -> float:
        """Seconds until the run should end; negative when it is late."""
        return self.seconds - self.spent
