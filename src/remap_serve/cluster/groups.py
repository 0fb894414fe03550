# SPDX-License-Identifier: Apache-2.0
"""A cluster's groups as control knows them: who serves together, with which load, and how that is about to change. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from remap.policy.rental import Rental
from remap_serve.policy.cluster.placement import Group, Instance, InstanceLoad, Offer, PlannedStage, ServedLayers

from .messages import NOTHING, GroupPlan, Part

__all__ = ["GroupChange", "GroupView", "Phase", "ServingGroup", "bare", "parts_of", "spread", "together"]

Phase = Literal["recovering", "serving", "fetching", "preparing", "switching", "exchanging"]


@dataclass(frozen=True)
class GroupView:
    """A group, for display. epoch: of its last change; changing: the epoch of the one under way, if any. capacity:
    tokens of KV."""

    epoch: int
    changing: int | None
    phase: Phase
    stages: tuple[Part, ...]
    load: InstanceLoad
    capacity: int


@dataclass(eq=False)
class GroupChange:
    """From `before` to `after`. why: it was begun. waiting_for: instances that have not answered in this phase. slowest_s: what
    one of its copies takes at most, by plan. Its members are those of `before`, and of `after` as well."""

    epoch: int
    before: list[ServingGroup]
    after: list[Group]
    phase: Phase
    plans: list[GroupPlan] = field(default_factory=list)
    waiting_for: set[str] = field(default_factory=set)
    deadline_s: float = 0.0
    slowest_s: float = 0.0
    why: str = ""

    @property
    def members(self) -> list[str]:
        """The names of its instances."""
        return [name for each in self.before for name in each.names]


@dataclass(eq=False)
class ServingGroup:
    """A group as it serves now. reported: the load that its head reported last; offers: likewise, of one alone. sent: tokens
    of requests that were routed to it and that no report has shown yet. stuck: a request that its head cannot begin
    (`InstanceReport.stuck`). quiet_s: before this time no change begins with it, for one was just aborted."""

    group: Group
    epoch: int
    reported: InstanceLoad = NOTHING
    offers: tuple[Offer, ...] = ()
    sent: dict[str, int] = field(default_factory=dict)
    stuck: tuple[str, int] | None = None
    change: GroupChange | None = None
    recovering: bool = False
    deadline_s: float = 0.0
    rental: Rental = field(default_factory=Rental)
    rent_s: float | None = None
    quiet_s: float = float("-inf")

    @property
    def names(self) -> list[str]:
        """Of its instances, its head first."""
        return [stage.instance.name for stage in self.group.stages]

    @property
    def parts(self) -> tuple[Part, ...]:
        """As of `parts_of`."""
        return parts_of(self.group)

    @property
    def phase(self) -> Phase:
        """Of its change, if one is under way."""
        if self.recovering:
            return "recovering"
        return "serving" if self.change is None else self.change.phase

    @property
    def routable(self) -> bool:
        """Whether its head is known to the instances themselves: not while they recover or switch."""
        return self.phase not in ("recovering", "switching")

    @property
    def load(self) -> InstanceLoad:
        """As reported, and what was sent since."""
        longest = max((self.reported.longest, *self.sent.values()))
        return replace(self.reported, waiting=(*self.reported.waiting, *self.sent.values()), longest=longest)

    def capacity(self, model: ServedLayers) -> int:
        """Tokens of KV, with the offers. Asked for at every request."""
        return (self._offering() if self.offers else self.group).capacity(model)

    def seen(self) -> Group:
        """The group with its load, spread over its instances, and with the offers."""
        stages = self._offering().stages
        shares = zip(stages, spread(self.load, len(stages)))
        return Group(tuple(replace(stage, instance=replace(stage.instance, load=load)) for stage, load in shares))

    def _offering(self) -> Group:
        return Group(tuple(replace(stage, offers=self.offers) for stage in self.group.stages))


def parts_of(group: Group) -> tuple[Part, ...]:
    """Who computes what, as plans and displays have it."""
    return tuple(Part(stage.instance.name, stage.first, stage.end) for stage in group.stages)


def bare(stage: PlannedStage) -> PlannedStage:
    """Without load and offers, which `ServingGroup` keeps, and without layers that it does not compute."""
    instance = replace(stage.instance, load=NOTHING)
    return replace(stage, instance=instance, arrived=frozenset(), offers=())


def together(loads: Iterable[InstanceLoad]) -> InstanceLoad:
    """Of groups that merge, with the heads of their lines first."""
    return Group(tuple(PlannedStage(Instance("", 0, load), 0, 0) for load in loads)).load


def spread(load: InstanceLoad, parts: int) -> list[InstanceLoad]:
    """Into parts that are as equal as whole requests and tokens allow; together they are `load`."""
    return [
        InstanceLoad(
            load.running * (part + 1) // parts - load.running * part // parts,
            load.tokens * (part + 1) // parts - load.tokens * part // parts,
            load.waiting[part::parts],
            load.longest,
        )
        for part in range(parts)
    ]
