"""A link that sends pieces by priority and is never interrupted: the longest wait, derived (the busy period of a line with fixed
priorities), and piece by piece. For what `remap_serve.policy.cluster.exchange` says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remap_serve.policy.cluster.exchange import Priority


@dataclass(frozen=True)
class Flow:
    """Pieces of one kind on a link. seconds: of the longest piece. period_s: between two of them at least; > 0."""

    priority: Priority
    seconds: float
    period_s: float


class Piece(NamedTuple):
    """In the order in which pieces of equal standing go."""

    priority: int
    asked: float
    flow: int
    seconds: float


def waits(pieces: Sequence[Piece]) -> list[tuple[int, float]]:
    """(flow, seconds from asking until it is sent) of each piece."""
    left, now, found = list(pieces), 0.0, []
    while left:
        there = [piece for piece in left if piece.asked <= now]
        if not there:
            now = min(piece.asked for piece in left)
            continue
        piece = min(there)
        left.remove(piece)
        found.append((piece.flow, now - piece.asked))
        now += piece.seconds
    return found


def longest_wait(flows: Sequence[Flow], number: int) -> float:
    """Seconds that a piece of the flow with this number waits at most until it is sent; inf if the flows up to its priority
    ask for all of the link's time.

    A piece waits for one that is being sent, of any flow below it, and for those that go first. Pieces of equal priority
    go in the order of asking. For the highest priority alone the bound is attained.
    """
    own = flows[number]
    first = [flow for flow in flows if flow.priority <= own.priority]
    if math.fsum(flow.seconds / flow.period_s for flow in first) >= 1.0:
        return math.inf
    blocked = max((flow.seconds for flow in flows if flow.priority > own.priority), default=0.0)
    others = [flow for place, flow in enumerate(flows) if place != number and flow.priority <= own.priority]

    def settled(begin: float, asked: Sequence[Flow]) -> float:
        """When the link is free, if it begins with so much work and these flows ask as often as they may."""
        now, later = -1.0, begin
        while later > now:
            now = later
            later = begin + math.fsum((math.floor(now / flow.period_s) + 1) * flow.seconds for flow in asked)
        return now

    # While a piece is sent, others come that go first: its own line is not empty before all of them are gone.
    busy = settled(blocked, first)
    pieces = range(math.floor(busy / own.period_s) + 1)
    return max(settled(blocked + sent * own.seconds, others) - sent * own.period_s for sent in pieces)
