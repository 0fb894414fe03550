"""How loaded each group is, where requests go, and how many tokens the cluster lacks. Pure.

KunServe dispatches as Llumnix does (section 3): a group's load is the KV of its running requests and of the head of its
line, as a share of its capacity. Decided here: within one call, requests that were just sent count in full. If only the head
of the line counted, a burst would go to one group.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .placement import Group, Model, Placement

__all__ = ["dispatch", "load_share", "needed", "overloaded"]


def load_share(model: Model, group: Group, sent: int = 0) -> float:
    """The group's demand, and `sent` tokens more, as a share of its capacity; inf without capacity."""
    capacity = group.capacity(model)
    return (group.load.demand + sent) / capacity if capacity > 0 else float("inf")


def dispatch(placement: Placement, asked: Sequence[int]) -> list[int]:
    """For each request, in order, the number of the group that it goes to: the least loaded, of equal ones the first.

    asked: tokens of KV that each asks for. The placement does not change.
    """
    groups = placement.groups
    sent = [0] * len(groups)
    least = [(load_share(placement.model, group), number) for number, group in enumerate(groups)]
    heapq.heapify(least)
    chosen = []
    for tokens in asked:
        number = least[0][1]
        sent[number] += tokens
        heapq.heapreplace(least, (load_share(placement.model, groups[number], sent[number]), number))
        chosen.append(number)
    return chosen


def overloaded(placement: Placement) -> list[int]:
    """The numbers of the groups whose demand is above their capacity."""
    return [number for number, group in enumerate(placement.groups) if load_share(placement.model, group) > 1.0]


def needed(placement: Placement) -> int:
    """Tokens of KV that the cluster lacks to run everything that waits: the `need` of a drop. At least 0."""
    wanted = sum(group.load.wanted for group in placement.groups)
    return max(0, wanted - sum(max(0, group.capacity(placement.model)) for group in placement.groups))
