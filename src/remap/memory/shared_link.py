# SPDX-License-Identifier: Apache-2.0
"""The device and its host link as each of a session's active tenants has them: beside the others. The mathematics is
`remap.policy.link`'s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from remap.kv.spec import BUFFERS
from remap.memory.pages import streaming_now
from remap.memory.state import TenantState
from remap.policy.cost import LayerTimes
from remap.policy.link import Neighbour
from remap.policy.switching import Switching

__all__ = ["SharedLink"]


class SharedLink:
    """A session's. Inactive tenants run no passes, so they copy nothing; a tenant that is active alone waits for no other,
    and its times are those that were measured.

    switching: the turns' share of the link, if all tenants can make room by a copy; `Offers` tells it.

    It reads tenants whose passes may be open: their pages and times are replaced, never changed.
    """

    def __init__(self, tenants: Mapping[str, TenantState]) -> None:
        self._tenants = tenants
        self.switching = Switching()

    def times(self, tenant: TenantState) -> LayerTimes | None:
        """Seconds per layer of a decode pass beside the passes and copies of the other active tenants now: the same object
        while all of that is the same. None before the first pass; beside others, before the first decode pass."""
        if len(self._tenants) < 2:  # every step asks
            return tenant.timing.decode()
        sharers = self._active()
        if not tenant.active or len(sharers) < 2:
            measured = tenant.timing.decode()
            return measured and self.beside_switches(tenant, measured)
        times, wait_s = tenant.timing.shared(len(sharers)), self._waits(tenant)
        if times is None or wait_s == 0.0:
            return times
        beside = partial(replace, times, wait_s=wait_s)
        return tenant.answers.of("beside others", (times, wait_s), beside)

    def beside_switches(self, tenant: TenantState, times: LayerTimes) -> LayerTimes:
        share = self.switching.share
        if not share:
            return times

        def slower() -> LayerTimes:
            return replace(times, transfer_s=tuple(each / (1.0 - share) for each in times.transfer_s))

        return tenant.answers.of("beside switches", (times, share), slower)

    def neighbours(self, tenant: TenantState) -> list[Neighbour] | None:
        """`TenantView.neighbours` of this tenant."""
        if len(self._tenants) < 2 or not tenant.active or len(self._active()) < 2:
            return None
        return self._neighbours(tenant)

    def certify(self) -> None:
        """Renew the certificate of each active tenant that streams, if others copy more or less since it was made."""
        active = self._active()
        for tenant in active:
            wait_s = self._waits(tenant) if len(active) > 1 else 0.0
            if wait_s == tenant.certified_wait_s:
                continue
            tenant.certified_wait_s = wait_s
            times = self.times(tenant) if tenant.streamed and not tenant.by_hand else None
            if times is not None:
                stall = tenant.stall(times, streaming_now(tenant.pages), tenant.kv.streamed.stop)
                tenant.books = tenant.books._replace(predicted_stall_s=stall)

    def _active(self) -> list[TenantState]:
        return [tenant for tenant in tuple(self._tenants.values()) if tenant.active]

    def _waits(self, *but: TenantState) -> float:
        """The longest pieces of all active tenants but these, in all."""
        return math.fsum(each.present_piece() for each in self._active() if each not in but)

    def _neighbours(self, tenant: TenantState) -> list[Neighbour]:
        found = []
        active = self._active()
        for other in active:
            known, streaming, blocks = other.timing.known_shared, streaming_now(other.pages), other.kv.streamed.stop
            # Its pass's thread may be learning: then the last answer stands.
            times = other.timing.shared(len(active)) if other.turn.claimed else known and known[2]
            if other is tenant or times is None or not (streaming.layers or blocks):
                continue
            found.append(
                Neighbour(
                    name=other.name,
                    compute_s=times.compute_s,
                    copy_s=tuple(other.copy_seconds(times, streaming)),
                    pieces=other.pieces(streaming),
                    streamed=streaming.layers,
                    buffers=streaming.buffers,
                    others_s=self._waits(tenant, other),
                    allowed_s=other.config.slowdown * math.fsum(times.compute_s),
                    part_s=other.part_seconds(blocks),
                    kv_layers=other.kv.spec.layers,
                    kv_buffers=BUFFERS,
                )
            )
        return found
