"""Slow, obvious answers to "which layers": every set is tried. To test `remap.policy.selection` against.

Costs come from the event simulation or from the definition; nothing here knows a dynamic programme or a local search.
Integer times, so that equal means equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import combinations

from reference.schedule_des import seconds_per_pass


def single_buffer_waits(compute: Sequence[int], transfer: Sequence[int], streamed: Sequence[int]) -> int:
    """What one ring buffer makes a pass wait: walk the circle, layer by layer, from each streamed layer to the next."""
    n = len(compute)
    if len(streamed) < 2:
        return 0  # it stays in the buffer
    waits = 0
    for layer in streamed:
        between, at = 0, (layer - 1) % n
        while at not in streamed:
            between, at = between + compute[at], (at - 1) % n
        waits += max(0, transfer[layer] - between)
    return waits


def least_period(
    compute: Sequence[int], transfer: Sequence[int], layers: Iterable[int], m: int, buffers: int
) -> Fraction:
    """The shortest pass that any m of the layers allow, by simulation, with fixed slots."""
    return min(
        seconds_per_pass(list(compute), list(transfer), list(chosen), buffers, "fixed")
        for chosen in combinations(sorted(layers), m)
    )


def least_single_waits(compute: Sequence[int], transfer: Sequence[int], layers: Iterable[int], m: int) -> int:
    return min(single_buffer_waits(compute, transfer, chosen) for chosen in combinations(sorted(layers), m))


def window_test(compute: Sequence[int], transfer: Sequence[int], streamed: Sequence[int], buffers: int) -> bool:
    """Nothing waits iff the copies fit into a pass, and for every L >= beta consecutive streamed layers their
    L - beta + 1 copies fit into their L gaps and L - 1 computations. For buffers that divide the streamed layers."""
    n, m = len(compute), len(streamed)
    assert m % buffers == 0 and m > buffers
    if sum(transfer[layer] for layer in streamed) > sum(compute):
        return False
    for first in range(m):
        for length in range(buffers, m + 1):
            window = [streamed[(first + j) % m] for j in range(length)]
            copies = sum(transfer[layer] for layer in window[buffers - 1 :])
            # the L gaps and L - 1 computations: everything from the end of the layer before the window to the start of its
            # last layer
            time, at = 0, (streamed[(first - 1) % m] + 1) % n
            for layer in window:
                while at != layer:
                    time, at = time + compute[at], (at + 1) % n
                if layer != window[-1]:
                    time, at = time + compute[at], (at + 1) % n
            if copies > time:
                return False
    return True
