# SPDX-License-Identifier: Apache-2.0
"""The measured wait for layers of all active tenants' passes together, beside the certified and the allowed wait.

A certificate is made for the times of its moment. If passes have become quicker since, or the link slower (others use it
as well), passes wait for longer than any certificate says. Then this module logs a warning, once per session.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from remap.report import StallShare

__all__ = ["LEAST_PASSES", "MARGIN", "WINDOW", "StallWatch"]

WINDOW = 256
"""The number of passes in the shares, of all tenants together."""
LEAST_PASSES = 64
"""No warning before this many passes were timed: the first ones after a change load layers that were away."""
MARGIN = 0.05
"""By how much the seen share may exceed the allowed one: five hundredths of the computation."""

_LOOK_EVERY = 16  # passes between two looks
_logger = logging.getLogger("remap.stall")


class _Timed(NamedTuple):
    """Seconds of one pass, and its tenant's number."""

    tenant: int
    compute_s: float
    stall_s: float
    predicted_s: float
    allowed_s: float


class StallWatch:
    """A session's watch. Each engine's own thread calls `add` at the end of its passes. `add` takes a lock only when it
    is about to warn, so that only one of two threads warns. It counts the passes until the next look without a lock:
    one more does no harm."""

    def __init__(self) -> None:
        self._passes: deque[_Timed] = deque(maxlen=WINDOW)
        self._until_look = LEAST_PASSES
        self._looking = threading.Lock()
        self._warned = False  # written under the lock

    def add(
        self,
        tenant: int,
        compute_s: float,
        stall_s: float,
        *,
        predicted_s: float,
        slowdown: float,
        active: Callable[[], Collection[int]],
    ) -> None:
        """Add a timed pass. predicted_s: from its tenant's certificate. slowdown: from its config. active(): numbers of
        the active tenants. If an activation was allowed to stall for longer, the certificate says for how long."""
        allowed_s = max(slowdown * compute_s, predicted_s)
        self._passes.append(_Timed(tenant, compute_s, stall_s, predicted_s, allowed_s))
        self._until_look -= 1
        if self._until_look <= 0 and not self._warned:
            self._until_look = _LOOK_EVERY
            self._look(active())

    def share(self, active: Collection[int]) -> StallShare:
        """The shares of these tenants' passes in the window."""
        passes = [each for each in tuple(self._passes) if each.tenant in active]
        compute = math.fsum(each.compute_s for each in passes)
        if compute <= 0:
            return StallShare(passes=len(passes))
        return StallShare(
            predicted=math.fsum(each.predicted_s for each in passes) / compute,
            seen=math.fsum(each.stall_s for each in passes) / compute,
            allowed=math.fsum(each.allowed_s for each in passes) / compute,
            passes=len(passes),
            tenants=len({each.tenant for each in passes}),
        )

    def _look(self, active: Collection[int]) -> None:
        share = self.share(active)
        if share.passes < LEAST_PASSES or share.seen <= share.allowed + MARGIN:
            return
        with self._looking:
            if self._warned:
                return
            self._warned = True
        _logger.warning(
            "passes wait for layers for %.1f %% of their computation, %.1f %% were allowed and %.1f %% predicted (the "
            "last %d passes of %d active tenants): since their layers began to stream, passes have become quicker, or "
            "the link slower; lower Config.slowdown or max_layers, or keep fewer "
            "tenants active at once. session.snapshot().stall has these numbers; this warning comes once",
            100 * share.seen,
            100 * share.allowed,
            100 * share.predicted,
            share.passes,
            share.tenants,
            extra={"stall": share},
        )
