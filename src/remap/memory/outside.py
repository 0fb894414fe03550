"""Pages that other processes have: brought in when they are wanted here, handed out when others want them and they can be spared.

    a step, or attach, lacks pages    -> bring, supply: ask the broker, which answers with what is free; the rest may come later
    others lack pages                 -> give_up: free pages, then unused KV of the tenants, as `UnusedKV` counts it
    they came later than the call     -> take_in

Called with the session's lock held. What comes in is free, of unknown bytes: the core zeroes it for the tenant that gets it. What
goes out was free before, so nothing here reads it: the host computes no pass of the tenants whose change has freed it, and the
re-pointing worker is done with the regions that showed it.

Pages that a tenant's layers have lent stay in this process: their tenant asks for them by number when they come home.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

from remap.memory.apply import Changes
from remap.memory.lend import Lending
from remap.memory.offers import Offers
from remap.memory.state import TenantState

__all__ = ["Membership", "Outside"]

IDLE_S = 1.0
"""Without a pass for so long a tenant counts as inactive."""
AGAIN_S, AGAIN_TIMES = 0.02, 20
"""After a want that was not met whole the broker is not asked again for so long, nor for so many times as long as its answer
took: what others give comes by itself, and a broker that hangs takes a twentieth of the steps' time at most."""


class Membership(Protocol):
    """`remap.broker.member.Membership`, as this uses it."""

    pages: int

    def want(self, pages: int, *, patient: bool = False) -> list[int]: ...
    def cancel(self) -> list[int]: ...
    def give(self, pages: Sequence[int]) -> None: ...


class Outside:
    """One session's. number, index_of: as a receiver of unused KV (`Lending.free_idle`): any page will do."""

    number = -1

    def __init__(
        self,
        tenants: Mapping[str, TenantState],
        changes: Changes,
        lending: Lending,
        offers: Offers,
        membership: Membership,
        clock: Callable[[], float],
    ) -> None:
        self._tenants = tenants
        self._changes = changes
        self._lending = lending
        self._offers = offers
        self._membership = membership
        self._clock = clock
        self._again_s = 0.0
        self.index_of: Container[int] = range(membership.pages)

    def bring(self, receiver: TenantState, blocks: int) -> bool:
        """Ask for pages for so many blocks of the receiver. Returns whether any that it can use have come."""
        now = time.monotonic()
        if now < self._again_s:
            return False
        wanted = -(-blocks * receiver.kv.spec.block_bytes // self._changes.arena.page_bytes) + 1
        got = self._membership.want(wanted)
        if len(got) < wanted:
            answered = time.monotonic()
            self._again_s = answered + max(AGAIN_S, AGAIN_TIMES * (answered - now))
        places = receiver.index_of
        useful = [page for page in got if page in places]
        if len(useful) < len(got):
            self._membership.give([page for page in got if page not in places])
        self.take_in(useful)
        return bool(useful)

    def supply(self, pages: int) -> None:
        """Ask for so many pages, and wait for what others can spare: for attach."""
        self.take_in(self._membership.want(pages, patient=True))

    def take_in(self, pages: Sequence[int]) -> None:
        """These have been granted. On an error, or an interrupt, those that did not come in are given back."""
        if not pages:
            return
        try:
            self._changes.pass_on(pages, out=False)
        except BaseException:
            here = set(self._changes.arena.free_pages())
            self._membership.give([page for page in pages if page not in here])
            raise

    def hand_back(self, pages: Sequence[int]) -> None:
        """The arena is closed, and had these."""
        self._membership.give([*pages, *self._membership.cancel()])

    def give_up(self, pages: int) -> None:
        """Others want so many."""
        spare = self._spare()
        for giver in self._tenants.values():
            short = pages - len(spare)
            if short <= 0:
                break
            if giver.config.lends and not giver.busy:
                self._lending.free_idle(giver, self, short, self._surplus(giver))
                spare = self._spare()
        going = spare[:pages]
        if going:
            self._changes.pass_on(going, out=True)
            self._membership.give(going)

    def _surplus(self, giver: TenantState) -> int:
        """Unused blocks that it will not miss. A server without requests runs no step that would say so: after `IDLE_S` without
        a pass it is as one that is inactive."""
        unused = self._offers.unused_kv
        idle = self._clock() - giver.last_pass_s > IDLE_S
        return unused.unused(giver) if idle else unused.surplus(giver)

    def _spare(self) -> list[int]:
        """Free pages that nobody here has lent, the last ones first: the first ones are where KV grows next."""
        lent = frozenset[int]().union(*(tenant.pages.lent for tenant in self._tenants.values()))
        return [page for page in reversed(self._changes.arena.free_pages()) if page not in lent]
