# SPDX-License-Identifier: Apache-2.0
"""The cost of passes on this instance, measured on a few of them before it serves.

The factors of a pass (`policy.cluster.lookahead`) are fitted to passes of different shapes: few, for no request is served
meanwhile, and so different that each factor has an effect of its own. KunServe fits them in the same way (section 4.3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remap_serve.cluster.stage import Row
from remap_serve.policy.cluster.lookahead import ChunkCost, QueuedChunk, fit

if TYPE_CHECKING:
    from remap_serve.cluster.stage import Stage

__all__ = ["Probe", "cost_of", "probes", "rows_of", "timed"]

TOKENS = 64
"""Of a short prompt's chunk."""

PREFIX = 512
"""Tokens before a chunk that has some, if there is room for them."""

ROWS = 8
"""Requests of a pass over several."""

REPEATS = 3
"""Of these the quickest counts: the machine's other work only makes a pass longer."""

ENOUGH_S = 1.0
"""A pass is not repeated when it has taken so long in all: disturbances are short beside it."""


class Probe(NamedTuple):
    """A pass over `rows` equal chunks."""

    rows: int
    prefix: int
    tokens: int


def probes(most_tokens: int, batch_tokens: int) -> list[Probe]:
    """For requests of at most most_tokens, and passes of at most batch_tokens; both at least 1."""
    tokens = max(1, min(TOKENS, most_tokens // 2))
    prefix, longest = min(PREFIX, most_tokens - tokens), min(most_tokens, batch_tokens)
    # The longest as well: a quadratic cost is not to be guessed from short ones.
    single = [(0, 1), (0, -(-tokens // 2)), (0, tokens), (0, longest), (prefix, 1), (prefix, tokens)]
    decoding = [Probe(ROWS, min(1, prefix), 1), Probe(ROWS, prefix, 1)]
    return [*(Probe(1, *shape) for shape in single), *decoding]


def cost_of(seconds: Callable[[Probe], float], most_tokens: int, batch_tokens: int) -> ChunkCost:
    """Fitted to what `seconds` says of each probe. Raises what `lookahead.fit` raises."""
    return fit(
        ([QueuedChunk(number, each.prefix, each.tokens) for number in range(each.rows)], seconds(each))
        for each in probes(most_tokens, batch_tokens)
    )


def rows_of(probe: Probe, blocks: Sequence[int]) -> list[Row]:
    """The rows that the pass computes. One token behind others is decoded, as it would be."""
    length = probe.prefix + probe.tokens
    prompt = probe.prefix if probe.prefix and probe.tokens == 1 else length
    return [Row(probe.prefix, probe.tokens, prompt, length, list(blocks))] * probe.rows


def timed(stage: Stage, blocks: Sequence[int], probe: Probe) -> float:
    """Seconds of this pass. stage: of all layers. blocks: for one request; all of the pass use them, for no request reads what it
    computes."""
    rows = rows_of(probe, blocks)
    taken = list[float]()
    while len(taken) < REPEATS and sum(taken) < ENOUGH_S:
        begin = time.perf_counter()
        stage.compute(rows, None, [[0] * row.length for row in rows])
        taken.append(time.perf_counter() - begin)
    return min(taken)
