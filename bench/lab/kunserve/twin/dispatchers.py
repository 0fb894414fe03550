"""Where requests go, other ways than the library's own, which counts whole lines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from remap_serve.policy.cluster.dispatch import Dispatcher, dispatch, whole_lines
from remap_serve.policy.cluster.placement import InstanceLoad

__all__ = ["DISPATCHERS", "DispatcherName", "InTurn", "by_demand"]

DispatcherName = Literal["lines", "demand", "turns"]


def by_demand(loads: Sequence[InstanceLoad], capacities: Sequence[int], asked: Iterable[int]) -> list[int]:
    """Where running requests and the head of the line hold the least share, as Llumnix and KunServe have it: whoever waits
    behind the head does not count."""
    return dispatch([load.demand for load in loads], capacities, asked)


class InTurn:
    """Round robin, whatever the load: one request for each group, in proportion to their capacities where these differ. It
    begins anew when these change."""

    def __init__(self) -> None:
        self._capacities: tuple[int, ...] = ()
        self._sent: list[int] = []

    def __call__(self, loads: Sequence[InstanceLoad], capacities: Sequence[int], asked: Iterable[int]) -> list[int]:
        if tuple(capacities) != self._capacities:
            self._capacities, self._sent = tuple(capacities), [0] * len(capacities)
        chosen = []
        for tokens in asked:
            least = min(tokens, max(capacities))
            fitting = [number for number, room in enumerate(capacities) if room >= least]
            number = min(fitting, key=lambda one: (self._sent[one] + 1) / max(1, capacities[one]))
            self._sent[number] += 1
            chosen.append(number)
        return chosen


DISPATCHERS: Mapping[DispatcherName, Callable[[], Dispatcher]] = {
    "lines": lambda: whole_lines,
    "demand": lambda: by_demand,
    "turns": InTurn,
}
"""A new one for each run."""
