# SPDX-License-Identifier: Apache-2.0
"""Who computes beside the tenant whose turn it is: two clocks instead of one.

A turn says whose demand for memory comes first: it lasts for an epoch, since what changes hands has to pass the link. Who
computes may change after each pass, and costs nothing where the layers are at home and the blocks are there. So a tenant with
work, all of whose layers are its own and have loaded, is a guest of another's turn: it runs a pass in each round, and asks for
blocks of those who do not compute, until it has to give some.

    look    who has work and its layers joins; who has none any more leaves, so that its layers may be lent
    give    the tenant whose turn it is lacks blocks, and a request of its has waited for `WAITS_S`: the guest whose turn is
            furthest gives the blocks of its youngest requests, whose KV goes to host memory, and lets none in until the turn
            ends; one that has none running any more, or cannot copy, leaves, and gives what any paused tenant gives. Behind
            `LATE_S` a guest leaves at once: one large batch gets more done than several small ones. Who has requests whose KV
            is only being copied in gives nothing yet: they would go to and fro, and never get a token

A request that runs on in other tenants' turns never waits for its own. Where memory is short, guests give until as few of them
run as in turns without guests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remap.internals import internals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from remap_serve.engine.engine import Engine
    from remap_serve.engine.reports import Reports

__all__ = ["LATE_S", "WAITS_S", "Guests"]

WAITS_S, LATE_S = 0.5, 1.0
"""For how long a request of the tenant whose turn it is waits for blocks that come free by themselves, before guests give theirs:
a quarter of the usual target for a first token, since a turn may have to come first. And half of that target."""


class Guests:
    """Those of `engines` (SharedEngines'). session: theirs, or None: then each has memory of its own, and nobody gives any.

    names: who computes as a guest now, in the order in which they have joined.
    """

    def __init__(self, session: Any, engines: Mapping[str, Engine], reports: Reports) -> None:
        self._session = session
        self._engines = engines
        self._reports = reports
        self.names: tuple[str, ...] = ()
        self._left: frozenset[str] = frozenset()  # for the rest of the turn

    def needs(self, name: str) -> bool:
        """Whether the tenant needs a turn: it does not compute now, or requests of its wait for blocks."""
        return name not in self.names or any(True for _ in self._engines[name].scheduler.queued())

    def may_stay(self, name: str) -> bool:
        """Whether the tenant can go on computing when its turn ends."""
        return self._engines[name].unfinished > 0 and self._at_home(name)

    def begin(self, owner: str | None, former: str | None = None) -> None:
        """A turn begins, or goes on for an epoch more: all may join again, and let requests in. former: who joins at once."""
        self._left = frozenset()
        for engine in self._engines.values():
            engine.scheduler.closed = False
        staying = (*self.names, *(() if former is None or former in self.names else (former,)))
        self.names = tuple(name for name in staying if name != owner)

    def dismiss(self) -> None:
        """None computes any more: the next turn needs what they have. Their KV goes to host memory, if they swap."""
        names, self.names = self.names, ()
        for name in names:
            self._engines[name].pause()

    def look(self, owner: str, expected: str | None, loads: str | None = None) -> None:
        """Between two rounds. expected: a tenant that is active for its next turn. loads: one whose layers are coming home: its
        pass would wait for them, and the whole round with it."""
        for name, engine in self._engines.items():
            if name == owner:
                continue
            if name in self.names:
                if not engine.unfinished:
                    self._leave(name)
            elif engine.unfinished and name not in self._left and name != loads and self._at_home(name):
                self._join(name)
            elif self._session is not None and engine.tenant.active and name not in (expected, loads):
                self._session.deactivate(name)  # behind an interrupt, or prepared for a turn that it does not need

    def give(self, owner: str, blocks: int) -> None:
        """`blocks` blocks of the owner's demand are not met."""
        engine = self._engines[owner]
        if not blocks or not self.names or engine.longest_wait_s < WAITS_S:
            return
        able = [name for name in self.names if not self._engines[name].scheduler.arriving]
        if not able:
            return
        names = list(self._engines)
        place = names.index(owner)
        name = max(able, key=lambda one: (names.index(one) - place) % len(names))
        guest = self._engines[name]
        guest.scheduler.closed = True
        page_share = engine.tenant.kv.spec.block_bytes / guest.tenant.kv.spec.block_bytes
        # One more: what the last one gives may lie in pages that others of its blocks need.
        late = engine.longest_wait_s > LATE_S
        if late or not guest.release(int(blocks * page_share) + 2) or not guest.computes:
            self._left |= {name}
            self._leave(name)

    def _at_home(self, name: str) -> bool:
        return self._session is None or not internals(self._engines[name].tenant).away_pages

    def _join(self, name: str) -> None:
        if self._session is not None:
            report = self._reports.ask(lambda: self._session.activate(name))
            if not report.activated:
                return
        self.names = (*self.names, name)

    def _leave(self, name: str) -> None:
        self.names = tuple(one for one in self.names if one != name)
        self._engines[name].pause()
        if self._session is not None:
            self._session.deactivate(name)
