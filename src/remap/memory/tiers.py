# SPDX-License-Identifier: Apache-2.0
"""Which tenants' master copies are page-locked, where the budget has no room for all: those that load most.

At first whoever was attached first has the budget (host_memory.py). A load of the others' layers is staged, at the speed of
ordinary memory. So the bytes that each tenant loads are counted, and once a staged one has loaded so much more than the idle ones
in its way that page-locking it would have paid, it is page-locked and they are staged, in place: no address changes. That is
renting until the rent paid reaches the price (ski rental): at most twice what knowing the loads beforehand would have cost.

    Tiers.consider, at the end of an activation or deactivation, the session's lock held, no copy from the idle ones under way:
        idle ones  locked -> staged     at once: their next copies are staged; the page locks go when the budget is wanted
        a thread   staged -> locked     of the other, range by range; its copies go on, staged, meanwhile

Page-locking takes a quarter of a second for each GiB, and beside it a launch on another thread takes up to 15 ms (the driver's
own lock, a piece of 64 MiB; bench/gpu/measures/page_locking.py): no step and no pass waits for all of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remap.errors import Error
from remap.memory.host_memory import HostMemories, HostMemory
from remap.memory.state import TenantState
from remap.sizes import show_size

__all__ = ["Tiers"]

_logger = logging.getLogger("remap.masters")

PRICE = 2.0
"""Page-locking a byte costs as much as so many bytes lose by being staged: 0.23 ns a byte, by 0.11 ns."""


@dataclass(frozen=True)
class _Held:
    """A tenant's master copies: (address, bytes) of each range, and bytes that the tenant has loaded since the last change."""

    tenant: TenantState
    ranges: Sequence[tuple[int, int]]
    loaded: int

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.ranges)


class _Locking(threading.Thread):
    """Page-locks one tenant's master copies. error: what ended it early; some of them are staged still then, and right."""

    def __init__(self, host: HostMemory, ranges: Sequence[tuple[int, int]]) -> None:
        super().__init__(name="remap-tiers", daemon=True)
        self.host, self.ranges = host, ranges
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


class Tiers:
    """One session's. Called with its lock held."""

    def __init__(self, tenants: Mapping[str, TenantState], hosts: HostMemories, applies: bool) -> None:
        """tenants: the session's own, as it is now. applies: whether the device copies from page-locked memory."""
        self._tenants = tenants
        self._hosts = hosts
        self._applies = applies
        self._before: dict[int, int] = {}  # by tenant's number: bytes that it had loaded at the last change
        self._locking: _Locking | None = None
        self._winner = ""

    @property
    def busy(self) -> bool:
        """Whether master copies are being page-locked."""
        return self._locking is not None and self._locking.is_alive()

    def consider(self) -> None:
        """Page-lock what has paid for it, if anything. Raises nothing: what the backend refuses is a line of log, and tried again
        when as much has been loaded once more."""
        tenants = [each for each in self._tenants.values() if each.live_prefetcher is not None]
        if not self._applies or not any(each.host.staged for each in tenants):
            return
        if self.busy:
            return
        if self._locking is not None:
            self._end(self._locking)
        held = [self._held(each) for each in tenants]
        winner = max((each for each in held if each.tenant.host.staged), key=lambda each: each.loaded, default=None)
        if winner is None:
            return
        losers: list[_Held] = []
        lacking = winner.nbytes - self._hosts.spare()[0]
        for each in sorted(
            (each for each in held if _idle(each.tenant)), key=lambda each: each.loaded / max(1, each.nbytes)
        ):
            if lacking <= 0:
                break
            losers.append(each)
            lacking -= each.nbytes
        moved = winner.nbytes + sum(each.nbytes for each in losers)
        if lacking > 0 or winner.loaded - sum(each.loaded for each in losers) < PRICE * moved:
            return
        # A new count of loads begins, whatever comes of it.
        self._before = {each.tenant.number: each.loaded + self._before.get(each.tenant.number, 0) for each in held}
        self._start(winner, losers)

    def leave(self, tenant: TenantState) -> None:
        """The tenant's host memory is about to be given back. Waits for the page-locking of a range of it, if there is one."""
        self._before.pop(tenant.number, None)
        if self._locking is not None and self._locking.host is tenant.host:
            self._locking.stopped = True
            self._locking.join()
            self._locking = None

    def _held(self, tenant: TenantState) -> _Held:
        loaded = tenant.prefetcher.stats().copied_bytes - self._before.get(tenant.number, 0)
        return _Held(tenant, tenant.host.holding(tenant.source.master_addresses), loaded)

    def _start(self, winner: _Held, losers: Sequence[_Held]) -> None:
        try:
            for each in losers:
                each.tenant.host.unlock(each.ranges)
        except Error as error:
            _logger.warning("master copies of %r cannot be staged: %s", each.tenant.name, str(error))
            return
        names = ", ".join(repr(each.tenant.name) for each in losers)
        _logger.info(
            "master copies of %r, %s, are being page-locked, since it has loaded %s lately; staged from now on: %s",
            winner.tenant.name,
            show_size(winner.nbytes),
            show_size(winner.loaded),
            names or "no other",
        )
        self._winner = winner.tenant.name
        for each in losers:
            self._learn(each.tenant)
        self._locking = _Locking(winner.tenant.host, winner.ranges)
        self._locking.start()

    def _end(self, locking: _Locking) -> None:
        locking.join()
        self._locking = None
        if locking.error is not None:
            _logger.warning("master copies of %r stay staged: %s", self._winner, str(locking.error))
        elif self._winner in self._tenants:
            self._learn(self._tenants[self._winner])

    def _learn(self, tenant: TenantState) -> None:
        """Its link is as quick as that of others whose master copies lie in such memory, until its own copies tell."""
        alike = [
            each for each in self._tenants.values() if each is not tenant and each.host.staged == tenant.host.staged
        ]
        rates = [rate for each in alike if (rate := each.timing.seconds_per_byte())]
        if rates:
            tenant.timing.calibrate_link(1.0 / max(rates))


def _idle(tenant: TenantState) -> bool:
    """Whether its page-locked master copies may be staged now: no pass is being served, and no copy is under way."""
    return not (tenant.host.staged or tenant.active or tenant.busy or tenant.prefetcher.loading())
