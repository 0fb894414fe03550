"""Pie's protocol as its paper words it (sections 3.2, 3.3 and 4.1), tick by tick: slow, obvious, with a mapping table.

Each tick: copies that are over are written into the table; a computation that is over ends its layer; if none runs, Pie looks
at the table for the layer that is next, and computes it if its pointer to the device is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["passes"]


@dataclass
class Entry:
    """Of one layer. device, host: it has a place there. whole: of a copy that is over, so that it can be read there."""

    device: bool
    host: bool
    device_whole: bool
    host_whole: bool
    grown: bool = False  # has the size of the expansion that is being made


def passes(
    layers: int,
    swapped: int,
    compute: int,
    copy_in: int,
    copy_out: int,
    gap: int,
    few: int,
    resizes: Mapping[int, int],
    anytime: bool = False,
) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Of each pass, for ever: (when it ended, layers in host memory by the expansion, the copies that began in it: "in 3").
    Begins with the last `swapped` layers away. resizes: pass -> layers that shall be away from its start on. anytime: Pie also
    decides while a layer is computed."""
    table = [
        Entry(one < layers - swapped, one >= layers - swapped, True, one >= layers - swapped) for one in range(layers)
    ]
    for entry in table:
        entry.device_whole = entry.device
    wanted = swapped
    now = number = 0
    last_finished = None
    to_device: tuple[int, int, bool] | None = None  # (layer, when it is over, whether it gets its new size)
    to_host: tuple[int, int] | None = None
    begun: list[str] = []
    current, until, idle = 0, None, 0  # until: when the computation of `current` is over; idle: ticks between passes

    def distance(layer: int) -> int:
        return (layer - current) % layers

    while True:
        if to_device and to_device[1] <= now:
            entry = table[to_device[0]]
            entry.device_whole, entry.host, entry.host_whole = True, False, False
            if to_device[2] and wanted != swapped:
                entry.grown = True
                if all(one.grown for one in table):
                    swapped = wanted
            to_device = None
        if to_host and to_host[1] <= now:
            entry = table[to_host[0]]
            entry.host_whole, entry.device, entry.device_whole = True, False, False
            to_host = None
        if until is not None and until <= now:
            last_finished, until = current, None
            current = (current + 1) % layers
            if current == 0:
                yield now, swapped, tuple(begun)
                begun, idle, number = [], gap, number + 1
        starts = until is None and not idle
        if starts or (anytime and until is not None):
            if starts and current == 0 and number in resizes and (last_finished is None or last_finished == layers - 1):
                if resizes[number] != swapped and wanted == swapped:
                    wanted = resizes[number]
                    to_device = (*to_device[:2], False) if to_device else None
                    for entry in table:
                        entry.grown = False
                resizes = {at: m for at, m in resizes.items() if at != number}
            away_most = max(swapped, wanted)
            in_host = [one for one in range(layers) if table[one].host_whole and not table[one].device]
            places_taken = sum(entry.device for entry in table)
            if to_device is None and in_host and places_taken < layers - away_most:
                hottest = min(in_host, key=distance)
                this_token = hottest >= current
                if this_token or hottest < few or wanted != swapped:
                    table[hottest].device = True
                    to_device = hottest, now + copy_in, wanted != swapped
                    begun.append(f"in {hottest}")
                    in_host.remove(hottest)
            on_device = [
                one for one in range(layers) if table[one].device_whole and not table[one].host and one != current
            ]
            in_host_places = sum(entry.host for entry in table)
            if (
                to_host is None
                and last_finished is not None
                and on_device
                and away_most
                and in_host_places < away_most + 2
            ):
                coldest = max(on_device, key=distance)
                if not in_host or any(distance(one) < distance(coldest) for one in in_host):
                    table[coldest].host = True
                    to_host = coldest, now + copy_out
                    begun.append(f"out {coldest}")
            if starts and table[current].device_whole and not table[current].host:
                until = now + compute
        idle = max(0, idle - 1)
        now += 1
