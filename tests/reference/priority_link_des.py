"""A link that sends pieces by priority and is never interrupted, piece by piece. Tests `remap_serve.policy.cluster.exchange`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
