"""Divisions of a queue into microbatches, by trying every place. Tests `remap_serve.policy.cluster.lookahead`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

Token = tuple[int, int]
"""A request's number, and the number of a token among those that it has to compute."""


def places(requests: Sequence[Any], grain: int) -> list[list[Token]]:
    """The pieces between neighbouring places where the queue may be divided."""
    return [
        [(number, token) for token in range(first, min(first + grain, request.tokens))]
        for number, request in enumerate(requests)
        for first in range(0, request.tokens, grain)
    ]


def seconds(tokens: Sequence[Token], requests: Sequence[Any], cost: Any) -> float:
    """Of these tokens together, token by token: each attends to its prefix, and the mean one to half of its chunk."""
    if not tokens:
        return 0.0
    total = cost.batch_s
    for number in sorted({number for number, _ in tokens}):
        own = [token for other, token in tokens if other == number]
        prefix = requests[number].prefix + own[0]
        for _ in own:
            total += cost.pair_s * (prefix + len(own) / 2) + cost.masked_s * len(own) + cost.token_s
        total += cost.chunk_s
    return total


def least_largest(pieces: int, count: int, of: Callable[[int, int], float]) -> float:
    """The least largest cost of at most `count` runs of pieces."""

    @cache
    def least(first: int, left: int) -> float:
        if first == pieces:
            return 0.0
        if not left:
            return math.inf
        return min(max(of(first, end), least(end, left - 1)) for end in range(first + 1, pieces + 1))

    return least(0, count)
