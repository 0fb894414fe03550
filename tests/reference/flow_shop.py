"""Microbatches in a pipeline as a flow shop in which nobody overtakes: its recurrence, and what stands idle."""

from __future__ import annotations

import math
from collections.abc import Sequence


def makespan(seconds: Sequence[Sequence[float]], hop_s: Sequence[float] = ()) -> float:
    """Seconds until all microbatches have passed all stages, one after another.

    seconds: of each microbatch in each stage, as many stages for each. hop_s: of each microbatch on each link, which sends
    one at a time beside both stages; without entries links take no time.
    """
    stages = len(seconds[0]) if seconds else 0
    free, sent = [0.0] * stages, [0.0] * stages
    for number, row in enumerate(seconds):
        arrived = 0.0
        for stage, takes in enumerate(row):
            free[stage] = max(free[stage], arrived) + takes
            arrived = sent[stage] = max(sent[stage], free[stage]) + (hop_s[number] if hop_s else 0.0)
    return free[-1] if stages else 0.0


def bubble_share(seconds: Sequence[Sequence[float]], hop_s: Sequence[float] = ()) -> float:
    """The share of all stages' time in `makespan` for which they have nothing to compute; 0 if there is nothing at all."""
    whole = makespan(seconds, hop_s)
    return 1.0 - math.fsum(map(math.fsum, seconds)) / (whole * len(seconds[0])) if whole else 0.0
