# SPDX-License-Identifier: Apache-2.0
"""KV that moves when groups change, in chunks that let activations pass; or is computed again. Pure.

Each stage keeps the KV of its own layers. So a request that runs on while its group changes has KV on instances that
no longer compute those layers: of a request of one instance that joins g - 1 others in equal stages, the share (g - 1) / g
(KunServe, section 4.2). A restoration moves as much back.

A link sends the data with the highest priority, piece by piece: activations, then weights that a stage is about to need, then the
exchange, then what restores. A piece that is being sent is not interrupted. KunServe's chunks take about as long to send as
a stage takes to compute: so the link is asked again about once for each microbatch. An activation waits for at most the
longest chunk below it, if the link has time for all activations. tests/reference/priority_link_des.py derives that, and simulates
such a link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from .lookahead import ChunkCost
from .pipeline import Network
from .placement import Group, ServedLayers

__all__ = ["Priority", "Resumption", "Running", "chunk_bytes", "moves", "resumptions", "takers"]


class Priority(IntEnum):
    """The requests' order on a link: the lowest number."""

    ACTIVATION = 0
    WEIGHTS = 1
    EXCHANGE = 2
    RESTORE = 3


@dataclass(frozen=True)
class Running:
    """A request that runs on: KV tokens that it has, and the bytes that have to move, from one instance."""

    source: str
    tokens: int
    moved_bytes: int


@dataclass(frozen=True)
class Resumption:
    """How a request goes on. request: its place in the argument. again: its KV is computed again instead of moved."""

    request: int
    again: bool


def moves(model: ServedLayers, before: Group, after: Group, tokens: int) -> dict[tuple[str, str], int]:
    """Bytes that go from instance to instance, (source, target), so that a request with `tokens` tokens of KV in the stages of
    `before` runs on in those of `after`."""
    found: dict[tuple[str, str], int] = {}
    for source in before.stages:
        for target in after.stages:
            first, end = max(source.first, target.first), min(source.end, target.end)
            size = tokens * model.kv_bytes(first, end) if first < end else 0
            if size and source.instance.name != target.instance.name:
                found[source.instance.name, target.instance.name] = size
    return found


def takers(sizes: Iterable[int], rooms: Sequence[int]) -> list[int]:
    """Which of the new groups goes on with each request, in the order given: the one with the most room left, the first of
    these. sizes: of the requests; rooms: of the groups, in the same unit. A group may get more than it has room for."""
    left, found = list(rooms), list[int]()
    for size in sizes:
        found.append(max(range(len(left)), key=left.__getitem__))
        left[found[-1]] -= size
    return found


def chunk_bytes(network: Network, stage_s: float) -> int:
    """Bytes that the network sends while a stage computes a microbatch; at least 1."""
    return max(1, math.floor(network.bytes_per_s * stage_s))


def resumptions(requests: Sequence[Running], network: Network, cost: ChunkCost) -> list[Resumption]:
    """How each request goes on, in the order in which they do: from each instance those with the fewest bytes first, so that
    they wait the least in the mean; then those whose KV is computed again.

    That is cheaper where the device is quicker with the request's tokens than the network with its bytes.
    """
    again = [cost.chunk(0, each.tokens) + cost.batch_s < each.moved_bytes / network.bytes_per_s for each in requests]
    order = sorted(range(len(requests)), key=lambda place: (again[place], requests[place].moved_bytes, place))
    return [Resumption(place, again[place]) for place in order]
