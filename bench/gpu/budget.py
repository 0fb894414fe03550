"""The time that the whole run may take. What no longer fits is left out and named, never cut silently."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Budget"]


class Budget:
    """`seconds` from now on. `skipped` holds (what, why) of everything that was left out."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.seconds = seconds
        self.begun = clock()
        self.skipped: list[tuple[str, str]] = []

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

    def skip(self, what: str, why: str) -> None:
        """Leave `what` out, and say so at the end."""
        self.skipped.append((what, why))

    def allows(self, what: str, seconds: float, *, keep: float = 0.0) -> bool:
        """Whether `what` fits if it takes `seconds` and `keep` must remain for the rest; otherwise it is skipped."""
        if self.left - keep >= seconds:
            return True
        self.skip(what, f"time: it takes about {seconds:.0f} s, {max(0.0, self.left - keep):.0f} s were left for it")
        return False
