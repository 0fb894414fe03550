"""Who runs in the next microbatch of a group, and how much of the prompts. Pure.

A group has as many lanes as stages, so that each stage has one microbatch to compute; a request stays in its lane, since its
next token needs the last one. Each lane is the reference engine's scheduler over one pool of blocks.

How prompts are cut:

    tokens     a microbatch has at most so many tokens (Sarathi-Serve, vLLM)
    halved     all that waits is divided by KunServe's lookahead, and the parts are taken in turn
    balanced   as many parts as pass soonest, the largest as small as can be (`lookahead`); a lane takes as much less as its
               decoding takes longer than that of the others
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Literal

from remap.engine.request import Sequence as EngineSequence
from remap.engine.scheduler import Scheduler
from remap.policy.cluster.lookahead import ChunkCost, Waiting, halved, lookahead

from .setup import Hardware

__all__ = ["BATCH_TOKENS", "Cut", "Lane", "Lookahead"]

Cut = Literal["tokens", "halved", "balanced"]
BATCH_TOKENS = 2048
"""Of a microbatch that is cut by tokens; of one that is cut by its cost, the dearest costs as much as a prompt of these."""
_GRAIN = 128
_LOOKED_AT = 16  # requests: dividing more takes longer, and parts are bounded anyway
_AHEAD = 2  # parts for each lane that are taken before everything is divided anew


class Lane(Scheduler):
    """The reference engine's scheduler; with `allowance_s` prompts are cut where the next microbatch's have cost so much.

    Without it, it is vLLM's chunked prefill with its defaults, but for the number of sequences: memory is to be the bound.
    """

    def __init__(self, block_tokens: int, cost: ChunkCost, swap: bool = False) -> None:
        super().__init__(
            block_tokens=block_tokens,
            max_num_seqs=4096,
            max_batch_tokens=BATCH_TOKENS,
            chunk_align=1,
            swap=swap,
        )
        self._cost = cost
        self.allowance_s: float | None = None
        self._left_s = 0.0

    def allow(self, seconds: float | None) -> None:
        """For the next microbatch."""
        self.allowance_s = seconds
        self._left_s = seconds or 0.0

    def _chunk(self, sequence: EngineSequence, budget: int) -> int:
        count = super()._chunk(sequence, budget)
        if self.allowance_s is None or count < 2:
            return count
        most = self._within(sequence.computed, self._left_s)
        if most < count:
            count = most - most % _GRAIN
            if not count and self._left_s == self.allowance_s:
                count = min(_GRAIN, sequence.length - sequence.computed, budget)
        self._left_s -= self._cost.chunk(sequence.computed, count)
        return count

    def _within(self, prefix: int, seconds: float) -> int:
        """The longest chunk behind this prefix that costs at most so much: pair (prefix n + n^2 / 2) + token n = seconds."""
        if seconds <= 0.0:
            return 0
        half, b = self._cost.pair_s / 2, self._cost.pair_s * prefix + self._cost.token_s
        return math.floor(2.0 * seconds / (b + math.sqrt(b * b + 4.0 * half * seconds)))

    @property
    def sequences(self) -> int:
        """Those that have a turn here."""
        return len(self.running) + len(self.waiting) + len(self.arriving)

    def prompts(self) -> list[EngineSequence]:
        """Whose prompt is not computed yet."""
        return [one for one in chain(self.running, self.waiting) if one.length - one.computed > 1]

    def work_s(self) -> float:
        """What its prompts cost, for who comes next."""
        return math.fsum(self._cost.chunk(one.computed, one.length - one.computed) for one in self.prompts())


class Lookahead:
    """What each microbatch of a group may take of the prompts that wait, in seconds of all layers."""

    def __init__(self, hardware: Hardware, cut: Cut, lanes: Sequence[Lane]) -> None:
        self._cost, self._cut, self._lanes = hardware.chunk_cost, cut, lanes
        self._most_s = self._cost.chunk(0, BATCH_TOKENS)
        self._plan: list[float] = []

    def allow(self, lane: Lane, decode_s: Sequence[float]) -> None:
        """Say what this lane may take now. decode_s: of what decodes in each lane."""
        if self._cut == "tokens" or len(self._lanes) == 1:
            lane.allow(None)
            return
        if not self._plan:
            self._plan = self._divided(math.fsum(decode_s) / len(decode_s))
        seconds = self._plan.pop() if self._plan else self._most_s
        if self._cut == "balanced":
            seconds += math.fsum(decode_s) / len(decode_s) - decode_s[self._lanes.index(lane)]
        lane.allow(min(self._most_s, seconds))

    def _divided(self, decode_s: float) -> list[float]:
        """Seconds of the parts, the first of them last. decode_s: what decoding takes in each microbatch: the more there are,
        the more often it is done before all prompts are computed, just as weights are loaded."""
        waiting = {one.order: one for lane in self._lanes for one in lane.prompts()}  # lanes may share a line
        queue = [
            Waiting(one.computed, one.length - one.computed) for _, one in islice(sorted(waiting.items()), _LOOKED_AT)
        ]
        if not queue:
            return []
        if self._cut == "balanced":
            cost = replace(self._cost, batch_s=self._cost.batch_s + decode_s)
            parts = lookahead(queue, cost, len(self._lanes), _GRAIN)
        else:
            tokens = sum(each.tokens for each in queue)
            parts = halved(queue, self._cost, 1 << max(0, math.ceil(math.log2(tokens / BATCH_TOKENS))), _GRAIN)
        ahead = parts[: _AHEAD * len(self._lanes)]
        return [self._cost.microbatch(part) - self._cost.batch_s for part in reversed(ahead)]
