"""Pie's swapping protocol (Pie, section 3.3), event by event: slow, obvious, and with none of the closed form's assumptions.

The KV of n layers; the device has room for n - m of them. One copy engine each way.

* A layer computes when its KV is on the device.
* When the engine to the device is idle and a place is free, the layer that has been away longest (first in, first out) comes in.
  Its place is taken from the beginning of its copy.
* When the engine to the host is idle, the coldest layer on the device goes out: the one whose next use is farthest. Not if all
  layers that are away are colder still, and not while m + 2 layers are away or on their way. Its place is free from the end of
  its copy.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

__all__ = ["ends"]

HERE, LEAVING, AWAY, COMING = range(4)


def ends(
    layers: int, swapped: int, compute: int, copy_in: int, copy_out: int, tail: int = 0
) -> Iterator[tuple[int, int]]:
    """Of each pass, for ever: (when it ended, layers that have gone out so far). Times are integers. tail: computation behind the
    last layer. Begins with the last `swapped` layers away."""
    state = [HERE] * (layers - swapped) + [AWAY] * swapped
    queue = list(range(layers - swapped, layers))
    events: list[tuple[int, int, str, int]] = []
    serial = count()
    now = free = current = gone = 0
    computing = False
    started = False  # the first layer has been computed: before that none is "last finished"
    engine_in = engine_out = True

    def distance(layer: int) -> int:
        return (layer - current) % layers

    def after(seconds: int, kind: str, layer: int) -> None:
        heapq.heappush(events, (now + seconds, next(serial), kind, layer))

    while True:
        if not computing and state[current] == HERE:
            computing = True
            after(compute + (tail if current == layers - 1 else 0), "computed", current)
        if engine_in and free and queue:
            layer = min(queue, key=distance)
            queue.remove(layer)
            state[layer], free, engine_in = COMING, free - 1, False
            after(copy_in, "in", layer)
        here = [layer for layer in range(layers) if state[layer] == HERE and not (computing and layer == current)]
        away = [layer for layer in range(layers) if state[layer] in (LEAVING, AWAY)]
        if engine_out and started and swapped and here and state.count(HERE) > layers - swapped - 2:
            coldest = max(here, key=distance)
            if not away or any(distance(layer) < distance(coldest) for layer in away):
                state[coldest], engine_out, gone = LEAVING, False, gone + 1
                after(copy_out, "out", coldest)
        now = events[0][0]
        finished = []
        while events and events[0][0] == now:
            _, _, kind, layer = heapq.heappop(events)
            if kind == "computed":
                computing, started, current = False, True, (current + 1) % layers
                if layer == layers - 1:
                    finished.append((now, gone))
            elif kind == "in":
                state[layer], engine_in = HERE, True
            else:
                state[layer], free, engine_out = AWAY, free + 1, True
                queue.append(layer)
        yield from finished
