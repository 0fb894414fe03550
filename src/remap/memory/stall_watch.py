"""For how long the passes of all active tenants together really wait for layers, beside what was certified and what was allowed.

Each tenant's certificate bounds its own passes as if the link were its own. Several that stream at once share the link, so that
all of them may wait for longer than any of them was promised: then a warning is logged, once a session.
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
"""Passes, of all tenants together, that the shares are of."""
LEAST_PASSES = 64
"""Before so many have been timed no warning is given: the first ones after a change load what was not there."""
MARGIN = 0.05
"""By how much the share that is seen may exceed the one that is allowed: five hundredths of the computation."""

_LOOK_EVERY = 16  # passes between two looks
_logger = logging.getLogger("remap.stall")


class _Timed(NamedTuple):
    """Seconds of one pass, and which tenant's it was."""

    tenant: int
    compute_s: float
    stall_s: float
    predicted_s: float
    allowed_s: float


class StallWatch:
    """A session's. `add` is called by each engine's own thread, at the end of its passes. It takes a lock only where it is about
    to warn, so that of two threads one does; passes until the next look are counted without, and one more is no loss."""

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
        """A pass was timed. predicted_s: of its tenant's certificate, slowdown: its config's; active(): numbers of the
        tenants that are. Where an activation was allowed to stall for longer, the certificate says by how much."""
        allowed_s = max(slowdown * compute_s, predicted_s)
        self._passes.append(_Timed(tenant, compute_s, stall_s, predicted_s, allowed_s))
        self._until_look -= 1
        if self._until_look <= 0 and not self._warned:
            self._until_look = _LOOK_EVERY
            self._look(active())

    def share(self, active: Collection[int]) -> StallShare:
        """Of the passes in the window that are these tenants'."""
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
            "passes wait for layers for %.1f %% of their computation, %.1f %% were allowed and %.1f %% predicted (the last %d "
            "passes of %d active tenants): each tenant is bounded as if the link were its own, and what they copy together, "
            "or the link itself, is slower; lower Config.slowdown or max_layers, or keep fewer tenants active at once. "
            "session.snapshot().stall has these numbers; this is said once",
            100 * share.seen,
            100 * share.allowed,
            100 * share.predicted,
            share.passes,
            share.tenants,
            extra={"stall": share},
        )
