# SPDX-License-Identifier: Apache-2.0
"""The share of the waiting prompts for each microbatch of a group, in seconds of a pass through all layers. Pure.

All that waits is divided by `lookahead`, and microbatches take its parts in turn; when those are used up, all that waits then is
divided anew. Each microbatch decodes besides, however prompts are cut. So when the number of parts is chosen, decoding counts as
loading the weights does: the more parts, the more often it is done before all prompts are computed. Without that, parts are far
too small where many requests decode (bench/results/kunserve.md). And a lane takes as much less as its decoding takes longer than
that of the lanes in the mean, since the largest microbatch sets the pace of all stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from .lookahead import ChunkCost, Microbatch, Waiting, lookahead

__all__ = ["Allowances"]

_LOOKED_AT = 16  # requests: dividing more takes longer, and parts are bounded anyway
_AHEAD = 2  # parts for each lane that are taken before everything is divided anew


class Allowances:
    """cost: of a pass through all layers. lanes: of the group, as many as it has stages. most_tokens: no microbatch's prompts
    are to cost more than one prompt of that length. grain: prompts are cut at multiples of this many tokens."""

    def __init__(self, cost: ChunkCost, lanes: int, most_tokens: int, grain: int) -> None:
        self.cost, self.lanes, self.most_tokens, self.grain = cost, lanes, most_tokens, grain
        self._most_s = cost.chunk(0, most_tokens)
        self._parts: list[float] = []  # seconds, the first part's last

    def take(self, lane: int, decode_s: Sequence[float], waiting: Callable[[int], Sequence[Waiting]]) -> float | None:
        """The seconds that the next microbatch of this lane may take; 0 or less: as little as possible. None: as much as it can.

        decode_s: seconds of decoding in each lane. waiting(most): at most `most` of those whose prompts are not computed, in
        order.
        """
        mean_s = math.fsum(decode_s) / len(decode_s)
        if not self._parts:
            parts = self.divided(waiting(_LOOKED_AT), mean_s)[: _AHEAD * self.lanes]
            self._parts = [self.cost.microbatch(part) - self.cost.batch_s for part in reversed(parts)]
        seconds = self._parts.pop() if self._parts else self._most_s
        return min(self._most_s, seconds + self.balance(mean_s, decode_s[lane]))

    def divided(self, waiting: Sequence[Waiting], decode_s: float) -> list[Microbatch]:
        """All that waits, in parts. decode_s: seconds of decoding in a microbatch."""
        cost = replace(self.cost, batch_s=self.cost.batch_s + decode_s)
        return lookahead(waiting, cost, self.lanes, self.grain) if waiting else []

    def balance(self, mean_s: float, decode_s: float) -> float:
        """More seconds of prompts for a lane whose decoding takes decode_s; the mean of all lanes is mean_s."""
        return mean_s - decode_s
