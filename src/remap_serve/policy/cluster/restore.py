# SPDX-License-Identifier: Apache-2.0
"""Back to instances that serve alone: the copies and their sources, whether there is room, and whether it pays. Pure.

Layers come from the instances of the group that still hold them, over the network, or from the master copy in the instance's
own host memory: each layer from whichever brings it sooner, behind the layers assigned to that way before. An instance
receives one layer at a time, sends one at a time, and reads its host memory beside both. So each layer comes no later than
with the host alone.

When: the caller keeps one `rental.Rental` for each group and, in each step, accrues `income_of` with the condition `fits`. By
its claims the group then costs at most about twice what it would with knowledge of the future, and demand must rise by more
than the margin before it is merged again. `half_used` is the paper's rule: usage below half of what the instances have
without a drop. It neither weighs the copies nor looks at single instances.

The requests' KV has to come back as well (`exchange`), to the instance that has them in its load.
Source: KunServe, section 4.4 (pull from instances whenever possible; master copies for failures); the choice of source and
the rent are derived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from remap.errors import InvalidState
from remap.policy.rental import income

from .pipeline import Network, group_round_s
from .placement import Group, Placement, PlannedStage

__all__ = ["Copy", "all_alone", "copies", "dissolved", "fits", "half_used", "income_of", "seconds"]


@dataclass(frozen=True)
class Copy:
    """One layer for one instance. source: the name of the one that sends it; None: the host's master copy. begin_s, end_s:
    from the start of the restoration."""

    layer: int
    instance: str
    source: str | None
    begin_s: float
    end_s: float


def dissolved(placement: Placement, number: int) -> Placement:
    """The placement in which the instances of this group serve alone; with the next epoch. It does not change."""
    count = len(placement.model.layers)
    singles = tuple(Group((PlannedStage(stage.instance, 0, count),)) for stage in placement.groups[number].stages)
    groups = (*placement.groups[:number], *singles, *placement.groups[number + 1 :])
    return Placement(placement.model, groups, placement.epoch + 1)


def all_alone(placement: Placement) -> Placement:
    """The placement in which every instance serves alone; with the next epoch."""
    count = len(placement.model.layers)
    singles = tuple(
        Group((PlannedStage(stage.instance, 0, count),)) for group in placement.groups for stage in group.stages
    )
    return Placement(placement.model, singles, placement.epoch + 1)


def copies(before: Placement, after: Placement, network: Network) -> list[Copy]:
    """The layers that the stages of `after` need and do not hold, in the order in which they are assigned: the first of each
    instance, then the second of each, and so on. Each begins with the layer behind those that it computes, so that
    equal instances of a group receive from each other in turn, and no instance waits for a sender.

    Raises InvalidState (fields layer, instance) if a layer is nowhere: no instance of the group, and no master copy.
    """
    model, then = before.model, before.stages
    mates = {stage.instance.name: group.stages for group in before.groups for stage in group.stages}
    wanted = []
    for name, stage in after.stages.items():
        behind = then[name].end
        order = [*range(max(stage.first, behind), stage.end), *range(stage.first, min(stage.end, behind))]
        lacking = [layer for layer in order if not then[name].holds(layer)]
        wanted += [(rank, name, layer) for rank, layer in enumerate(lacking)]
    arrives = dict.fromkeys(then, 0.0)
    sends, reads = dict(arrives), dict(arrives)
    found = []
    for _, name, layer in sorted(wanted, key=lambda each: each[0]):
        size = model.layers[layer].weight_bytes
        ways: list[tuple[float, float, str | None]] = []
        for mate in mates[name]:
            source = mate.instance.name
            if source != name and mate.holds(layer):
                begin = max(arrives[name], sends[source])
                ways.append((begin + size / network.bytes_per_s, begin, source))
        if network.host_bytes_per_s:
            ways.append((reads[name] + size / network.host_bytes_per_s, reads[name], None))
        if not ways:
            raise InvalidState(
                f"no copy of layer {layer} is left for {name}: no instance of its group holds it and the host has no master "
                "copy; nothing changed; load the model from its files",
                layer=layer,
                instance=name,
            )
        end, begin, chosen = min(ways, key=lambda way: way[0])
        if chosen is None:
            reads[name] = end
        else:
            arrives[name] = sends[chosen] = end
        found.append(Copy(layer, name, chosen, begin, end))
    return found


def seconds(before: Placement, after: Placement, network: Network) -> float:
    """Until the last of `copies` has come; 0 if there are none."""
    return max((copy.end_s for copy in copies(before, after, network)), default=0.0)


def fits(placement: Placement, number: int, margin: int) -> bool:
    """Whether each instance of the group has, alone, room for its own demand, and for the group's longest request, and `margin`
    tokens more: the surplus condition of `rental`, with the margin as its sigma."""
    model, count, group = placement.model, len(placement.model.layers), placement.groups[number]
    return all(
        PlannedStage(stage.instance, 0, count).capacity(model)
        >= max(stage.instance.load.demand, group.load.longest) + margin
        for stage in group.stages
    )


def half_used(placement: Placement, number: int) -> bool:
    """The paper's rule for restoring: the group's KV takes less than half of what its instances have for KV alone."""
    model, count = placement.model, len(placement.model.layers)
    group = placement.groups[number]
    return 2 * group.load.tokens < sum(max(0, PlannedStage(s.instance, 0, count).capacity(model)) for s in group.stages)


def income_of(placement: Placement, number: int, network: Network) -> float:
    """The share of a restoration that one more round in this group costs, as `rental.income`. Saved is what a mean request waits
    less for a token if its instance serves alone, with the requests of its own load."""
    group, model, count = placement.groups[number], placement.model, len(placement.model.layers)
    whole = group_round_s(model, group.stages, group.load.requests, network)
    saved = math.fsum(
        load.requests * (whole - group_round_s(model, [PlannedStage(stage.instance, 0, count)], load.requests, network))
        for stage in group.stages
        for load in [stage.instance.load]
    )
    copied = seconds(placement, dissolved(placement, number), network)
    return income(saved / max(1, group.load.requests), 0.0, copied, 0.0)
