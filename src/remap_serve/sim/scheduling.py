# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's two policies says who runs in the next simulated pass. Pure.

prefill-first   vLLM V0 (0.7.3, the version that Oneiros was built into): whole prompts before any decoding, as many as the token
                budget and the watermark let in; otherwise every running sequence decodes one token. A sequence that needs a
                block and finds none preempts the latest one, which is recomputed (or goes to host memory, with `swap`).
chunked         vLLM V1: decoding first, and chunks of prompts fill what the token budget leaves. This is the scheduler of the
                reference engine (remap_serve.engine.scheduler), with vLLM's defaults.

One thing is not V0's: it preempts when fewer blocks are free than sequences run, whether these need one or not; here a block is
asked for when one is needed, which treats the baseline better than it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Any

from remap.errors import InvalidArgument
from remap_serve.engine.block_pool import SchedulerBlocks
from remap_serve.engine.chunk import Chunk
from remap_serve.engine.request import RequestState, Sequence
from remap_serve.engine.scheduler import Schedule, Scheduler

__all__ = ["SCHEDULERS", "PrefillFirst", "make_scheduling"]

SCHEDULERS = ("prefill-first", "chunked")
MAX_NUM_SEQS = 256  # vLLM's default
BATCH_TOKENS = 2048  # vLLM's default for chunks; for whole prompts the longest context, if that is longer


class PrefillFirst(Scheduler):
    """vLLM V0. watermark: share of the usable blocks that an admission leaves free. swap: preempted sequences keep their KV in
    host memory instead of losing it, and come back before anything new is admitted. overlap, stream: see `Scheduler`; V0
    does neither."""

    def __init__(
        self,
        *,
        block_tokens: int,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_batch_tokens: int = BATCH_TOKENS,
        watermark: float = 0.01,
        lookahead_blocks: int = 1,
        swap: bool = False,
        overlap: bool = False,
        stream: bool = False,
    ) -> None:
        super().__init__(
            block_tokens=block_tokens,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            watermark=watermark,
            lookahead_blocks=lookahead_blocks,
            swap=swap,
            overlap=overlap,
            stream=stream,
        )
        self.swapped: deque[Sequence] = deque()  # in the order of arrival

    def _schedule(self, pool: SchedulerBlocks) -> Schedule:
        """The next pass; its blocks are allocated. Without chunks if nothing can run."""
        opened = not self.closed
        if self.overlap and opened:
            self._swap_in(pool)
        if self.waiting and not self.swapped and opened:
            prompts = self._admit(pool)
            if prompts:
                return Schedule(tuple(prompts), (), sum(prompt.count for prompt in prompts))
        rows, preempted = self._decode(pool)
        if self.swapped and opened and not preempted and not self.overlap:
            self._swap_in(pool)
            last = max(self.arriving.values(), default=None)
            rows += [Chunk(one, one.computed, one.length - one.computed) for one in self._arrive(pool, last)]
        return Schedule(tuple(rows), tuple(preempted), sum(row.count for row in rows))

    def bring_back(self, pool: SchedulerBlocks) -> None:
        self._swap_in(pool)

    def queued(self) -> Iterable[Sequence]:
        return chain(self.swapped, self.waiting)

    def _admit(self, pool: SchedulerBlocks) -> list[Chunk]:
        """Whole prompts."""
        chunks: list[Chunk] = []
        budget = self.max_batch_tokens
        spare = int(self.watermark * pool.usable_blocks)
        while self.waiting and self._held < self.max_num_seqs:
            sequence = self.waiting[0]
            blocks = self.blocks_for(sequence.length)
            # Alone, a sequence may have everything: else a long one would wait for ever. (V0 gives such a request up.)
            if sequence.length > budget or not self._room(blocks + (spare if self.running else 0), pool):
                break
            sequence.blocks = pool.allocate(blocks)
            self._move(sequence, RequestState.RUNNING)
            chunks.append(Chunk(sequence, 0, sequence.length))
            budget -= sequence.length
        return chunks

    def _decode(self, pool: SchedulerBlocks) -> tuple[list[Chunk], list[Sequence]]:
        """A token of every request that runs, and a block for each that needs one more; the latest ones, in the end itself, are
        preempted for it: (chunks, those)."""
        running, size = self.running, self.block_tokens
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        while len(chunks) < len(running):
            sequence = running[len(chunks)]
            # Only the first token of a block needs one.
            if sequence.computed % size == 0 and not self._reserve(sequence, sequence.length, pool):
                victim = running[-1]
                preempted.append(victim)
                self._put_back(victim, pool)
            else:
                chunks.append(Chunk(sequence, sequence.computed, 1))
        return chunks, preempted

    def _line_of(self, sequence: Sequence) -> deque[Sequence]:
        return self.swapped if sequence.host else super()._line_of(sequence)

    def _queues(self) -> tuple[list[Sequence] | deque[Sequence], ...]:
        return *super()._queues(), self.swapped

    def _swap_in(self, pool: SchedulerBlocks) -> None:
        """A request that has room comes back. With `overlap` room is a block for each that has some, too: a request that takes
        the last one is preempted again before it has paid for its copy."""
        spare = int(self.watermark * pool.usable_blocks)
        while self.swapped and self._held < self.max_num_seqs:
            sequence, held = self.swapped[0], self._held
            blocks = self.blocks_for(sequence.length)
            left = max(spare, held if self.overlap else 0) if held else 0
            if not self._seat(sequence, sequence.length, blocks + left, pool):
                break
            if not self._fetch(sequence, pool):
                self._move(sequence, RequestState.WAITING)  # computed anew


def make_scheduling(
    kind: str,
    *,
    block_tokens: int,
    context: int,
    swap: bool = False,
    overlap: bool = True,
    stream: bool = False,
    **settings: int,
) -> Scheduler:
    """By name. context: the longest sequence, in tokens. settings: of the scheduler, instead of vLLM's defaults (`PrefillFirst`;
    `remap_serve.engine.scheduler.Scheduler` for chunks). Raises InvalidArgument for an unknown name or setting."""
    if kind not in SCHEDULERS:
        raise InvalidArgument(
            f"scheduler must be one of {', '.join(SCHEDULERS)}; got {kind!r}; nothing was made", scheduler=kind
        )
    given: dict[str, Any] = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_batch_tokens": BATCH_TOKENS,
        "swap": swap,
        "overlap": overlap,
        "stream": stream,
        **settings,
    }
    try:
        if kind == "chunked":
            return Scheduler(block_tokens=block_tokens, **{"chunk_align": 1, **given})
        if "max_batch_tokens" not in settings:
            given["max_batch_tokens"] = max(BATCH_TOKENS, context)
        return PrefillFirst(block_tokens=block_tokens, **given)
    except TypeError as error:
        raise InvalidArgument(
            f"{kind} has no such settings, got {dict(settings)}; nothing was made; see its class",
            scheduling=dict(settings),
        ) from error
