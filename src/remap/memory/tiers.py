# SPDX-License-Identifier: Apache-2.0
"""Which tenants' master copies are page-locked, where the budget has no room for all: those that load most.

At first whoever was attached first has the budget (host_memory.py). A load of the others' layers is staged, at the speed of
ordinary memory. So the bytes that each tenant loads are counted, and once a staged one has loaded so much more than the idle ones
in its way that page-locking it would have paid, it is page-locked and they are staged, in place: no address changes. That is
renting until the rent paid reaches the price, as in ski rental, with the loads since the last change for the rent. Of many models
in turn no bound is proven.

    Tiers.consider, at the end of an activation or deactivation, the session's lock held, no copy from the idle ones under way:
        idle ones  locked -> staged     at once: their next copies are staged; the page locks go when the budget is wanted
        a thread   staged -> locked     of the other, range by range; its copies go on, staged, meanwhile

Page-locking 7.3 GB took 0.5 s on two H200s, beside a load (one run each; bench/gpu/measures/cold_models.py): no step and no pass
waits for all of it. Another thread's launch was late by 4.9 ms at most meanwhile, a piece of 64 MiB at a time; in one piece of
3 GiB it would have been 159 (n = 6; bench/gpu/measures/page_locking.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from remap.errors import Error
from remap.memory.host_memory import HostMemories, locked_bytes
from remap.memory.state import TenantState
from remap.sizes import show_size

__all__ = ["Tiers"]

_logger = logging.getLogger("remap.masters")

PRICE = 3.0
"""Page-locking a byte is taken to cost as much as so many bytes lose by being staged. On an H200 it took 0.07 ns, for 0.027 ns
that a byte staged by four threads loses: the seconds alone would say 2.5. The rest is margin, for what it costs other threads."""


class _Held(NamedTuple):
    """A tenant's master copies, (address, bytes) of each range, and bytes that the tenant has loaded since the last change. Some
    are staged and others not where the backend has refused one midway."""

    tenant: TenantState
    staged: Sequence[tuple[int, int]]
    locked: Sequence[tuple[int, int]]
    loaded: int

    @property
    def staged_bytes(self) -> int:
        return sum(locked_bytes(*each) for each in self.staged)

    @property
    def locked_bytes(self) -> int:
        return sum(locked_bytes(*each) for each in self.locked)


class _Locking(threading.Thread):
    """Page-locks one tenant's master copies. error: what ended it early; some of them are staged still then, and right."""

    def __init__(self, tenant: TenantState, ranges: Sequence[tuple[int, int]]) -> None:
        super().__init__(name="remap-tiers", daemon=True)
        self.host, self.ranges, self.winner = tenant.host, ranges, tenant.name
        self._keep = tenant.source.keep_alive  # the memory itself, of a session that is dropped
        self.error: Error | None = None
        self.stopped = False

    def run(self) -> None:
        for each in self.ranges:
            if self.stopped:
                return
            try:
                self.host.lock([each])
            except Error as error:
                self.error = error
                return

    def end(self) -> None:
        """It touches nothing any more. Waits for the range that it has begun. Can be called again."""
        self.stopped = True
        if self.ident is not None:  # otherwise it has never run, and finds `stopped` if it does yet
            self.join()
        self.host.claim(())


class Tiers:
    """One session's. Called with its lock held."""

    def __init__(self, tenants: Mapping[str, TenantState], hosts: HostMemories, applies: bool) -> None:
        """tenants: the session's own, as it is now. applies: whether the device copies from page-locked memory."""
        self._tenants = tenants
        self._hosts = hosts
        self._applies = applies
        self._before: dict[int, int] = {}  # by tenant's number: bytes that it had loaded at the last change
        self._locking: _Locking | None = None

    @property
    def busy(self) -> bool:
        """Whether master copies are being page-locked."""
        return self._locking is not None and self._locking.is_alive()

    def consider(self) -> None:
        """Page-lock what has paid for it, if anything. Raises nothing: what the backend refuses is a line of log, and tried again
        when as much has been loaded once more."""
        try:
            self._consider()
        except Error as error:
            _logger.warning("which master copies are page-locked stays as it is: %s", str(error))

    def _consider(self) -> None:
        if self.busy:
            return
        if self._locking is not None:
            self._end(self._locking)
        tenants = [each for each in self._tenants.values() if each.live_prefetcher is not None]
        if not self._applies or not any(each.host.staged for each in tenants):
            return
        held = [self._held(each) for each in tenants]
        for winner in sorted((each for each in held if each.staged), key=lambda each: each.loaded, reverse=True):
            losers = self._in_the_way(winner, held)
            moved = winner.staged_bytes + sum(each.locked_bytes for each in losers or ())
            if losers is None or winner.loaded - sum(each.loaded for each in losers) < PRICE * moved:
                continue
            # A new count of loads begins, whatever comes of it.
            self._before = {each.tenant.number: each.loaded + self._before.get(each.tenant.number, 0) for each in held}
            self._start(winner, losers)
            return

    def _in_the_way(self, winner: _Held, held: Sequence[_Held]) -> list[_Held] | None:
        """Idle ones that make room, those that load least first; None if all of them together do not."""
        losers: list[_Held] = []
        lacking = winner.staged_bytes - self._hosts.spare()[0]
        others = [each for each in held if each is not winner and each.locked and _idle(each.tenant)]
        for each in sorted(others, key=lambda each: each.loaded / each.locked_bytes):
            if lacking <= 0:
                break
            losers.append(each)
            lacking -= each.locked_bytes
        return losers if lacking <= 0 else None

    def leave(self, tenant: TenantState) -> None:
        """The tenant's host memory is about to be given back. Waits for the page-locking of a range of it, if there is one."""
        self._before.pop(tenant.number, None)
        if self._locking is not None and self._locking.host is tenant.host:
            self._locking.end()
            self._locking = None

    def _held(self, tenant: TenantState) -> _Held:
        loaded = tenant.prefetcher.stats().copied_bytes - self._before.get(tenant.number, 0)
        staged, locked = tenant.host.holding(tenant.source.master_addresses)
        return _Held(tenant, staged, locked, loaded)

    def _start(self, winner: _Held, losers: Sequence[_Held]) -> None:
        try:
            for each in losers:
                each.tenant.prefetcher.drain()  # of the ring, which a pass fills again behind itself
                each.tenant.host.unlock(each.locked)
        except Error as error:
            _logger.warning("master copies of %r cannot be staged: %s", each.tenant.name, str(error))
            return
        names = ", ".join(repr(each.tenant.name) for each in losers)
        _logger.info(
            "master copies of %r, %s, are being page-locked, since it has loaded %s lately; staged from now on: %s",
            winner.tenant.name,
            show_size(winner.staged_bytes),
            show_size(winner.loaded),
            names or "no other",
        )
        for each in losers:
            self._learn(each.tenant)
        winner.tenant.host.claim(winner.staged)
        self._locking = _Locking(winner.tenant, winner.staged)
        try:
            self._locking.start()
        except RuntimeError as error:  # no more threads for this process
            _logger.warning("master copies of %r stay staged: %s", winner.tenant.name, str(error))
            self._locking.end()
            self._locking = None

    def _end(self, locking: _Locking) -> None:
        locking.end()
        self._locking = None
        if locking.error is not None:
            _logger.warning("master copies of %r stay staged: %s", locking.winner, str(locking.error))
        elif locking.winner in self._tenants:
            self._learn(self._tenants[locking.winner])

    def _learn(self, tenant: TenantState) -> None:
        """Its link is as quick as that of others whose master copies lie in such memory, until its own copies tell."""
        alike = [
            each for each in self._tenants.values() if each is not tenant and each.host.staged == tenant.host.staged
        ]
        rates = [rate for each in alike if (rate := each.timing.seconds_per_byte())]
        if rates:
            tenant.timing.calibrate_link(1.0 / max(rates))


def _idle(tenant: TenantState) -> bool:
    """Whether its page-locked master copies may be staged now: no pass is being served, and no layer is coming home."""
    return not (tenant.active or tenant.busy or tenant.prefetcher.loading())
