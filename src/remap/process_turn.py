# SPDX-License-Identifier: Apache-2.0
"""When an engine pauses its requests because another process waits for its pages, and when it goes on.

    over  -> the engine pauses its requests, makes its tenants inactive -> give
    may_begin -> Session.activate: has them    -> begun
                                   too few are free -> refused; it asks again

Each process ends its own turns: no one decides for all. What waits is known from what the broker asks (`OtherProcesses.unmet`),
and how long a turn lasts from `policy.turns`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from remap.errors import ArenaBroken, Error
from remap.policy.turns import TURN_S, PresentTurn, Queue, Turns
from remap.rate_limited import RateLimitedWarning

if TYPE_CHECKING:
    from remap.memory.core import Core
    from remap.memory.other_processes import OtherProcesses
    from remap.session import Session

__all__ = ["ASKS_S", "ProcessTurn"]

logger = logging.getLogger("remap.turns")

ASKS_S = 1.0
"""Who waits for its layers asks again within this time: vLLM's scheduler 50 ms behind each answer, which takes some passes of
those that serve. Were it longer, an engine that gave its turn would stand still for as long behind the other's last ask."""
MOST_LONGER = 64
"""At most so many times `turn_s`: a turn of it costs whoever gave one in vain 2 % of its time then."""


@dataclass(frozen=True)
class _Gave:
    """until_s: the tenants ask for no pages before (`time.monotonic`), while others wait. in_use: whether they have asked since,
    in vain."""

    until_s: float
    in_use: bool = False


class ProcessTurn:
    """The turn of some tenants of a session, which one engine serves, or several by turns. For calls from one thread at a time.

    present: since when they have been served, and what the load took, in seconds of `time.monotonic`. turn_s: how long that
    lasts, at least, while another process waits. longer: times turn_s, for turns that were given in vain. Without a broker, and
    for tenants with `Config(lends=False)`, no turn is ever over.
    """

    def __init__(self, session: Session, tenants: Collection[str], turn_s: float = TURN_S) -> None:
        self.turn_s, self.longer = turn_s, 1
        self.present = PresentTurn("this", time.monotonic())
        self._session, self._tenants = session, tuple(tenants)
        self._other_processes: OtherProcesses | None = session.exclusively(
            partial(_other_processes, self._tenants), claims=False
        )
        self._gave: _Gave | None = None  # the turn, and none has begun since
        self._failed = RateLimitedWarning(logger)

    def over(self) -> bool:
        """Whether another process has waited for pages for its layers for long enough, which these tenants have: the engine is to
        pause its requests, make its tenants inactive, and `give`.

        A turn lasts for turn_s and the time of its load again, at least, and no longer if others wait (`policy.turns`). If the
        pages were of no use to others (they need those of a third one, which gives none) the next turn lasts twice as long. Takes
        no lock.
        """
        unmet = None if self._other_processes is None else self._other_processes.unmet
        if unmet is None:
            return False
        queues = {"this": Queue(self.present.begun_s), "others": Queue(unmet.since_s)}
        turn_s = self.turn_s if self.longer == 1 else max(self.turn_s, 1.0) * self.longer
        # No patience: how long the other has waited ends no turn early, or turns in vain would come every half minute for ever.
        return Turns(turn_s, math.inf).decide(time.monotonic(), self.present, queues).name == "others"

    def give(self) -> int:
        """The tenants are inactive: others get what they wait for at once, however lately these have served. Returns how many
        pages went. Logs an error of the change, which others ask for again. Raises ArenaBroken only."""
        pages = 0
        try:
            pages = self._session.exclusively(partial(_give, self._tenants))
        except ArenaBroken:
            raise
        except Error as error:
            self._failed.warn("%s: no pages are given: %s", ", ".join(self._tenants), error)
        now = time.monotonic()
        self._gave = _Gave(now + max(self.turn_s, ASKS_S))
        text = "%s has served for %.1f s, and gives its turn, and %d pages, to another process; its requests wait"
        logger.info(text, ", ".join(self._tenants), now - self.present.begun_s, pages)
        return pages

    def may_begin(self) -> bool:
        """Whether the tenants may ask for pages: not until others have what they wait for, or for as long as a turn. Who waits
        may need the pages of a second engine as well."""
        return self._gave is None or time.monotonic() >= self._gave.until_s or not self.others_wait()

    def refused(self) -> None:
        """The tenants have asked, and others keep the pages."""
        self._gave = None if self._gave is None else replace(self._gave, in_use=True)

    def begun(self, began_s: float, load_s: float) -> None:
        """A tenant has the pages of its layers, for which it asked at began_s (`time.monotonic`), and which take load_s seconds
        to load."""
        if self._gave is not None:
            vain = not self._gave.in_use and self.others_wait()
            self.longer, self._gave = min(MOST_LONGER, 2 * self.longer) if vain else 1, None
        self.present = PresentTurn("this", began_s, load_s)

    def others_wait(self) -> bool:
        """Whether another process asks for pages for its layers just now."""
        unmet = None if self._other_processes is None else self._other_processes.unmet
        return unmet is not None and time.monotonic() - unmet.asked_s < ASKS_S


def _other_processes(names: Collection[str], core: Core) -> OtherProcesses | None:
    """The other processes, if one of the tenants gives them anything."""
    return core.other_processes if any(core.tenant(name).config.lends for name in names) else None


def _give(names: Collection[str], core: Core) -> int:
    found = [core.tenant(name) for name in names]
    givers = [tenant for tenant in found if tenant.config.lends and not tenant.active]
    return 0 if core.other_processes is None else core.other_processes.give_turn(givers, core.cold)
