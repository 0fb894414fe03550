# SPDX-License-Identifier: Apache-2.0
"""One request as the simulated engine keeps it, and the work of one pass. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from remap_serve.engine.chunk import Chunk
from remap_serve.engine.request import Output, RequestState
from remap_serve.engine.request import Sequence as EngineSequence

__all__ = ["SimSequence", "Work"]


class SimSequence(EngineSequence):
    """A sequence of the engine of which only the lengths are known: `prompt_tokens` at first, `length` now, `end` at the end.

    There are no values, so it has neither `request` nor `tokens`: code that needs them cannot be simulated.
    """

    __slots__ = ("end", "id", "length", "prompt_tokens")

    id: str
    length: int
    prompt_tokens: int

    def __init__(self, order: int, prompt: int, output: int, arrived_s: float = 0.0) -> None:
        self.id = str(order)
        self.order = order
        self.arrived_s = arrived_s
        self.prompt_tokens = self.length = prompt
        self.end = prompt + output
        self.state = RequestState.WAITING
        self.computed = self.high_water = self.preemptions = 0
        self.blocks: list[int] = []
        self.host: list[int] = []
        self.first_s = self.last_s = None
        self.longest_s = 0.0

    def append(self, token: int) -> str | None:
        """One token more, whatever it is."""
        self.length += 1
        return "length" if self.length >= self.end else None

    @property
    def ended(self) -> str | None:
        return "length" if self.length >= self.end else None

    def output(self, reason: str) -> Output:
        return Output(self.id, (), reason, self.preemptions)


class Work(NamedTuple):
    """The work of one pass. prefill_pairs: of query and key, causal. decode_context: tokens whose KV the decoding rows read.
    parts: parts of prompts, and rows."""

    prefill_tokens: int
    prefill_pairs: int
    decode_rows: int
    decode_context: int
    parts: int

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Work:
        tokens = pairs = rows = context = prompts = 0
        for chunk in chunks:  # not by its properties: this runs once for every token of an answer
            start, count = chunk.start, chunk.count
            if count == 1 and start >= chunk.sequence.prompt_tokens:
                rows += 1
                context += start + 1
            else:
                prompts += 1
                tokens += count
                pairs += count * start + count * (count + 1) // 2
        return cls(tokens, pairs, rows, context, prompts + rows)

    @property
    def phase(self) -> str:
        """As the reference engine's runner names a pass."""
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decode_rows else "prefill"

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_rows
