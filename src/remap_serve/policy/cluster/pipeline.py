# SPDX-License-Identifier: Apache-2.0
"""How long a pass through the stages of a group takes: rounds of decoding, and queues of microbatches. Pure.

A link between two stages sends one microbatch's activations at a time, while both stages compute: it is a machine like a
stage. So a queue of microbatches is a flow shop without overtaking (tests/reference/flow_shop.py has its recurrence).

A round of decoding gives each request of the group one token. Its m equal microbatches go round: a microbatch comes back to
the first stage when its token is known. Such a round takes as long as the busiest machine needs for all microbatches, or as
one microbatch needs for all machines, whichever is longer. This is exact: a circle of dependences that runs A times round the
stages and B times through the microbatches takes at most A times the one and B times the other, over A + B rounds.

Sources: the network and its links KunServe, sections 3 and 4.3; formulas derived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remap.errors import InvalidArgument
from remap_serve.policy.activations import Line

from .placement import PlannedStage, ServedLayers

__all__ = ["Network", "equal_stages_s", "group_round_s", "round_s"]


@dataclass(frozen=True)
class Network:
    """The times of copies and activations. hop_s: to send the activations of one microbatch to the next stage, by its tokens.
    bytes_per_s: of an instance to and from others, each way. host_bytes_per_s: from its own host memory; 0: that has no
    master copy.

    Raises InvalidArgument (fields bytes_per_s, host_bytes_per_s) unless both are finite, the first above 0, the other not
    below.
    """

    hop_s: Line
    bytes_per_s: float
    host_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0.0 < self.bytes_per_s < math.inf and 0.0 <= self.host_bytes_per_s < math.inf):
            raise InvalidArgument(
                f"rates must be finite, the network's above 0 and the host's not below, got {self.bytes_per_s!r} and "
                f"{self.host_bytes_per_s!r} bytes/s; nothing changed; correct the measurement",
                bytes_per_s=self.bytes_per_s,
                host_bytes_per_s=self.host_bytes_per_s,
            )


def round_s(stage_s: Sequence[float], hop_s: float, microbatches: int) -> float:
    """Seconds of a round of `microbatches` equal microbatches, which take stage_s in the stages and hop_s on each link.

    One stage has no links; of more the last sends to the first. Exact (see the module).
    """
    hops = [hop_s] * len(stage_s) if len(stage_s) > 1 else []
    machines = [*stage_s, *hops]
    return max(microbatches * max(machines, default=0.0), math.fsum(machines))


def group_round_s(model: ServedLayers, stages: Sequence[PlannedStage], requests: int, network: Network) -> float:
    """Seconds of a round of `requests` requests with the best number of microbatches, at most two for each stage; 0 without
    requests. Stages without layers are passed by; all that is offered is used."""
    runs = [
        (stage.first, stage.end, math.fsum(offer.added_s for offer in stage.offered(model)))
        for stage in stages
        if stage.first < stage.end
    ]
    least = math.inf if requests else 0.0
    for microbatches in range(1, min(requests, 2 * len(runs) if len(runs) > 1 else 1) + 1):
        tokens = -(-requests // microbatches)
        stage_s = [model.seconds(first, end, tokens) + added_s for first, end, added_s in runs]
        least = min(least, round_s(stage_s, network.hop_s(tokens), microbatches))
    return least


def equal_stages_s(costs: Sequence[float], stages: int) -> float:
    """Seconds until microbatches that take as long in every stage have passed all stages, one after another, without hops: all
    costs, and the largest once more for each further stage. So of queues with equal work the one with the least largest
    microbatch is the shortest."""
    return math.fsum(costs) + (stages - 1) * max(costs, default=0.0)
