# SPDX-License-Identifier: Apache-2.0
"""A warning about what happens at every step is said now and then: steps come by the hundred a second."""

from __future__ import annotations

import logging
import math
import time

__all__ = ["AGAIN_S", "RateLimitedWarning"]

AGAIN_S = 10.0


class RateLimitedWarning:
    """Says a warning, and again only `AGAIN_S` seconds later. One writer."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._next_s, self._left_out = logger, -math.inf, 0

    def warn(self, text: str, *values: object) -> None:
        """logger.warning(text, *values), or nothing."""
        now = time.monotonic()
        if now < self._next_s:
            self._left_out += 1
            return
        more = f" (and {self._left_out} times since this was said last)" if self._left_out else ""
        self._next_s, self._left_out = now + AGAIN_S, 0
        self._logger.warning(text + "%s", *values, more)
