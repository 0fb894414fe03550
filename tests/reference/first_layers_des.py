"""The slow way to the certificate of first layers: play the pass, one layer after another, for every number that may be kept."""

from __future__ import annotations

from collections.abc import Sequence


def ends_at(compute: Sequence[int], transfer: Sequence[int], kept: int, setup: int) -> int:
    """When the pass ends that begins at 0 with the first `kept` layers at home. One link, first come, first served."""
    arrived = dict.fromkeys(range(kept), 0)
    link = setup
    for layer in range(kept, len(compute)):
        link += transfer[layer]
        arrived[layer] = link
    now = 0
    for layer, seconds in enumerate(compute):
        now = max(now, arrived[layer]) + seconds
    return now


def first_kept(compute: Sequence[int], transfer: Sequence[int], late: int, setup: int) -> int:
    """The smallest number kept with which the pass ends at most `late` later than with all layers at home."""
    for kept in range(len(compute) + 1):
        if ends_at(compute, transfer, kept, setup) - sum(compute) <= late:
            return kept
    return len(compute)
