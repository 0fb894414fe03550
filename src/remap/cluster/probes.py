"""What passes cost on this instance, measured on a few of them before it serves.

The factors of a pass (`policy.cluster.lookahead`) are fitted to passes of different shapes: few, for nobody is served meanwhile,
and so different that each factor has an effect of its own. KunServe fits them in the same way (section 4.3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remap.cluster.stage import Row
from remap.policy.cluster.lookahead import Chunk, ChunkCost, fit

if TYPE_CHECKING:
    from remap.cluster.stage import Stage

__all__ = ["Probe", "cost_of", "probes", "timed"]

TOKENS = 64
"""Of the longest chunk."""

PREFIX = 512
"""Tokens before a chunk that has some, if there is room for them."""

ROWS = 8
"""Requests of a pass over several."""

REPEATS = 3
"""Of these the quickest counts: what else the machine does only makes a pass longer."""


class Probe(NamedTuple):
    """A pass over `rows` equal chunks."""

    rows: int
    prefix: int
    tokens: int


def probes(most_tokens: int) -> list[Probe]:
    """For requests of at most so many tokens, at least 1."""
    tokens = max(1, min(TOKENS, most_tokens // 2))
    prefix = min(PREFIX, most_tokens - tokens)
    single = [(0, 1), (0, -(-tokens // 2)), (0, tokens), (prefix, 1), (prefix, tokens)]
    return [*(Probe(1, *shape) for shape in single), Probe(ROWS, 0, 1), Probe(ROWS, prefix, 1)]


def cost_of(seconds: Callable[[Probe], float], most_tokens: int) -> ChunkCost:
    """Fitted to what `seconds` says of each probe. Raises what `lookahead.fit` raises."""
    return fit(
        ([Chunk(number, each.prefix, each.tokens) for number in range(each.rows)], seconds(each))
        for each in probes(most_tokens)
    )


def timed(stage: Stage, blocks: Sequence[int], probe: Probe) -> float:
    """Seconds of this pass. stage: of all layers. blocks: for one request; all of the pass use them, for nobody reads what it
    computes."""
    length = probe.prefix + probe.tokens
    rows, least = [Row(probe.prefix, probe.tokens, length, length, list(blocks))] * probe.rows, float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        stage.compute(rows, None, [[0] * length] * probe.rows)
        least = min(least, time.perf_counter() - begin)
    return least
