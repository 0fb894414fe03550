# SPDX-License-Identifier: Apache-2.0
"""Virtual time without a backend, for policies that need none. Pure. The sim backend has the same three members."""

from __future__ import annotations

__all__ = ["VirtualClock"]


class VirtualClock:
    """Seconds from 0 on; never backwards."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += max(0.0, seconds)

    def advance_to(self, time_s: float) -> None:
        self.now = max(self.now, time_s)
