# SPDX-License-Identifier: Apache-2.0
"""An instance between two changes: one stage of a group, if only of a group of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from remap_serve.cluster.head import Head
from remap_serve.cluster.messages import InstanceReport, Part
from remap_serve.cluster.pool import GroupPool
from remap_serve.cluster.slots import Places, Slots, Whole
from remap_serve.cluster.stage import Stage
from remap_serve.cluster.stage_kv import StageKV

if TYPE_CHECKING:
    import torch

    from remap_serve.cluster.exchange import Exchange
    from remap_serve.cluster.layer_copies import LayerCopies
    from remap_serve.cluster.messages import GroupPlan
    from remap_serve.cluster.prepared import PreparedGroup
    from remap_serve.cluster.resources import Resources
    from remap_serve.cluster.transport import GroupLink, PeerLost

__all__ = ["Member", "alone", "stage_of"]


@dataclass(eq=False)
class Member:
    """The loop owns it, and makes a new one at each change; other threads only look.

    What stays: its group's stages, its own place among them, its computation (`stage`) with its KV (`kv`, `places`), the
    group's scheduler if it is the first (`head`), and the link of the stages (`ring`; None alone). slots: the places, of a
    stage of several that has layers; else None.
    """

    has: Resources
    epoch: int
    stages: tuple[Part, ...]
    place: int
    kv: StageKV
    places: Places
    slots: Slots | None
    stage: Stage
    head: Head | None
    ring: GroupLink | None
    # How it became this: KV that moves since the last change, and the link of the instances of that change; which a group of
    # several keeps, for layers that come home from each other (`copies`).
    exchange: Exchange | None = None
    mesh: GroupLink | None = None
    copies: LayerCopies | None = None
    # Its layers: whether the pages of all are here; those that it does not compute and that have come (or are on their way from
    # the host: a pass that needs one waits for it); those that are to come from other instances (from which, by ranks in the
    # mesh); the epoch for which they came home, or 0; the last one for which that was undone.
    home: bool = True
    arrived: frozenset[int] = frozenset()
    sources: dict[int, int] = field(default_factory=dict)
    fetching: int = 0
    unfetched: int = 0
    # As a head, by stage: logical blocks that each has places for, and will have when layers come home (for which epoch);
    # then whether all have said so. launched: by lane, the chunks in flight.
    rooms: dict[int, int] = field(default_factory=dict)
    leaving: dict[int, int] = field(default_factory=dict)
    leaving_for: int = 0
    shrinking: bool = False
    launched: dict[int, list[Any]] = field(default_factory=dict)
    # The causes of its end: the change that was decided, the epoch for which the ring has ended, a peer that is gone.
    next: PreparedGroup | None = None
    ended: int = 0
    lost: PeerLost | None = None

    @property
    def part(self) -> Part:
        """The layers that it computes."""
        return self.stages[self.place]

    @property
    def alone(self) -> bool:
        """Whether its group is a group of one."""
        return len(self.stages) == 1

    @property
    def working(self) -> list[int]:
        """The stages with layers, by their places."""
        return [place for place, part in enumerate(self.stages) if part.first < part.end]

    def forward(self, header: bytes, payload: torch.Tensor | None = None) -> None:
        """Send to the next stage; the last one sends to the head."""
        ring = self.ring
        assert ring is not None  # only a group of several has something to pass on
        if payload is not None:
            self.has.counts.activation_bytes += payload.numel()
        ring.post((ring.rank + 1) % len(ring.names), header, payload)

    def go_on(self) -> None:
        """As a head: it need not drain to shrink any more."""
        assert self.head is not None
        self.leaving, self.shrinking = {}, False
        self.head.draining = self.next is not None

    def end_exchange(self) -> None:
        """All KV has moved."""
        self.exchange = None
        if self.mesh is not None and self.alone:
            self.mesh.close()
            self.mesh = None
        if self.head is not None:
            self.head.exchanging = False

    def leave(self) -> None:
        """Close its links, those of a change to come as well."""
        for each in (self.ring, self.mesh, self.next):
            if each is not None:
                each.close()

    def report(self) -> InstanceReport:
        """How things are."""
        name, head, exchange = self.has.name, self.head, self.exchange
        phase: Literal["serving", "exchanging"] = "serving" if exchange is None else "exchanging"
        rate = self.has.throughput.bytes_per_s
        if head is None:
            return InstanceReport(name, self.epoch, phase, arrived=self.arrived, bytes_per_s=rate)
        stalled = [] if exchange is None else exchange.stalled
        load = head.load(each.length for each in stalled)
        requests = head.requests + tuple((each.id, each.attempt) for each in stalled)
        capacity = head.kv.usable_blocks * self.has.tenant.kv.spec.block_tokens
        return InstanceReport(name, self.epoch, phase, load, requests, capacity, self.arrived, head.stuck, (), rate)


def alone(has: Resources, epoch: int) -> Member:
    """A group of one, of all layers, with the tenant's own blocks."""
    kv, places = StageKV(has.tenant.kv, 0, has.layers), Whole(has.layers)
    stage = Stage(has.decoder, has.tenant, kv, places, samples=True)
    head = Head(has.tenant, has, 1, has.limits, has.cost, counts=has.counts)
    return Member(has, epoch, (Part(has.name, 0, has.layers),), 0, kv, places, None, stage, head, None)


def stage_of(has: Resources, plan: GroupPlan, ring: GroupLink) -> Member:
    """A stage of a group of several; without blocks yet."""
    part = plan.part(has.name)
    place = plan.stages.index(part)
    kv = StageKV(has.tenant.kv, part.first, part.end)
    slots = Slots(has.layers, part.end - part.first) if part.first < part.end else None
    places: Places = Whole(has.layers) if slots is None else slots
    working = [number for number, each in enumerate(plan.stages) if each.first < each.end]
    stage = Stage(has.decoder, has.tenant, kv, places, samples=place == working[-1])
    head = None
    if place == 0:
        pool = GroupPool(has.tenant.kv.spec.block_tokens)
        head = Head(has.tenant, has, len(working), has.limits, has.cost, kv=pool, counts=has.counts)
    return Member(has, plan.epoch, plan.stages, place, kv, places, slots, stage, head, ring)
