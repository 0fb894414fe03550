# SPDX-License-Identifier: Apache-2.0
"""How loaded each group is, where requests go, and how many tokens the cluster lacks. Pure.

Memory is overloaded as Llumnix and KunServe count it (section 2.2): a group's demand is the KV of its running requests and of
the head of its line. Requests go where least is wanted, the whole line counted. KunServe dispatches by demand (section 3), which
does not see lines that wait for computation, and makes them longer. That is decided here; so is that a request goes where it
fits, if it fits anywhere. Another rule is another `Dispatcher`, which `Control` takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from .placement import Group, InstanceLoad, Placement, ServedLayers

__all__ = ["Dispatcher", "dispatch", "load_share", "needed", "overloaded", "whole_lines"]

Dispatcher = Callable[[Sequence[InstanceLoad], Sequence[int], Iterable[int]], list[int]]
"""From the loads and the capacities of all groups, and the tokens of each request: the number of the group that it goes to."""


def load_share(model: ServedLayers, group: Group) -> float:
    """The group's demand as a share of its capacity; inf without capacity."""
    return _share(group.load.demand, group.capacity(model))


def whole_lines(loads: Sequence[InstanceLoad], capacities: Sequence[int], asked: Iterable[int]) -> list[int]:
    """The `Dispatcher` that is the default: `dispatch` by all that is wanted."""
    return dispatch([load.wanted for load in loads], capacities, asked)


def dispatch(wanted: Sequence[int], capacities: Sequence[int], asked: Iterable[int]) -> list[int]:
    """For each request, in order, the number of the group that it goes to: of those with room for it, the one where the least
    share of capacity is wanted; where none has room, the largest; of equal ones the first.

    wanted: tokens of KV that each group's requests ask for, `Load.wanted`. asked: those of each request. Nothing given changes.
    """
    wants = list(wanted)
    least = [(_share(*each), number) for number, each in enumerate(zip(wants, capacities))]
    heapq.heapify(least)
    largest = max(capacities)
    chosen = []
    for tokens in asked:
        small = []
        while capacities[least[0][1]] < min(tokens, largest):
            small.append(heapq.heappop(least))
        number = least[0][1]
        wants[number] += tokens
        heapq.heapreplace(least, (_share(wants[number], capacities[number]), number))
        for each in small:
            heapq.heappush(least, each)
        chosen.append(number)
    return chosen


def overloaded(placement: Placement) -> list[int]:
    """The numbers of the groups whose demand is above their capacity."""
    return [number for number, group in enumerate(placement.groups) if load_share(placement.model, group) > 1.0]


def needed(placement: Placement, ahead: int = 0) -> int:
    """Tokens of KV that the cluster lacks to run everything that waits, or what will ask for KV when demand has risen by
    `ahead`, if that is more: the `need` of a drop. At least 0."""
    loads = [group.load for group in placement.groups]
    wanted = max(sum(load.wanted for load in loads), sum(load.demand for load in loads) + ahead)
    return max(0, wanted - sum(max(0, group.capacity(placement.model)) for group in placement.groups))


def _share(tokens: int, capacity: int) -> float:
    return tokens / capacity if capacity > 0 else float("inf")
