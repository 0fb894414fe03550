"""How the systems that are compared schedule a group, where that is not what the library does (`remap_serve.cluster.lanes`).
Pure.

How prompts are cut:

    tokens     a microbatch has at most so many tokens (Sarathi-Serve, vLLM)
    halved     all that waits is divided by KunServe's lookahead, and the parts are taken in turn
    balanced   the library's (`policy.cluster.allowances`)

An instance that serves alone cuts by tokens, whatever its system.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from remap_serve.cluster.lanes import Lane, Lanes
from remap_serve.engine.request import Sequence as EngineSequence
from remap_serve.policy.cluster.allowances import Allowances
from remap_serve.policy.cluster.lookahead import ChunkCost, Microbatch, Waiting, halved

__all__ = ["BATCH_TOKENS", "Cut", "OwnLines", "allowances", "vllm_lane"]

Cut = Literal["tokens", "halved", "balanced"]
BATCH_TOKENS = 2048
"""Of a microbatch that is cut by tokens; of one that is cut by its cost, the dearest costs as much as a prompt of these."""
_GRAIN = 128


def vllm_lane(block_tokens: int, cost: ChunkCost, swap: bool = False) -> Lane:
    """vLLM's chunked prefill with its defaults, but for the number of sequences: memory is to be the bound."""
    return Lane(
        cost,
        _GRAIN,
        block_tokens=block_tokens,
        max_num_seqs=4096,
        max_batch_tokens=BATCH_TOKENS,
        chunk_align=1,
        swap=swap,
    )


def allowances(cost: ChunkCost, cut: Cut, lanes: int) -> Allowances:
    """Of a group of so many lanes."""
    kind = {"tokens": _Uncut, "halved": _Halved, "balanced": Allowances}[cut]
    return kind(cost, lanes, BATCH_TOKENS, _GRAIN)


class _Uncut(Allowances):
    def take(self, lane: int, decode_s: Sequence[float], waiting: Callable[[int], Sequence[Waiting]]) -> None:
        return None


class _Halved(Allowances):
    """Decoding does not count."""

    def divided(self, waiting: Sequence[Waiting], decode_s: float) -> list[Microbatch]:
        tokens = sum(each.tokens for each in waiting)
        if not tokens:
            return []
        return halved(waiting, self.cost, 1 << max(0, math.ceil(math.log2(tokens / self.most_tokens))), self.grain)

    def balance(self, mean_s: float, decode_s: float) -> float:
        return 0.0


class OwnLines(Lanes):
    """Each request stays in the lane that it came to, in whose line it waits."""

    def __init__(self, lanes: Sequence[Lane], *others: object) -> None:
        super().__init__(lanes, *others)  # type: ignore[arg-type]
        for each in lanes:
            each.share_line(deque())

    @property
    def lines(self) -> list[deque[EngineSequence]]:
        return [each.waiting for each in self.lanes]

    def gather(self, number: int) -> None:
        pass

    def settle(self, number: int, sequence: EngineSequence) -> None:
        pass
