"""Who runs in the next simulated pass: vLLM's two policies, over a pool of KV blocks that is handed in. Pure.

prefill-first   vLLM V0 (0.7.3, the version that Oneiros was built into): whole prompts before any decoding, as many as the token
                budget and the watermark let in; otherwise every running sequence decodes one token. A sequence that needs a
                block and finds none preempts the latest one, which is recomputed (or swapped out whole, if `swap`).
chunked         vLLM V1: decoding first, and chunks of prompts fill what the token budget leaves. This is the production
                scheduler of the reference engine (remap.engine.scheduler), not a copy of it.

One thing is not V0's: it preempts when fewer blocks are free than sequences run, whether these need one or not; here a block is
asked for when one is needed, which treats the baseline better than it was.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from remap.engine.request import State
from remap.engine.scheduler import BlockPool
from remap.engine.scheduler import Scheduler as ChunkedScheduler
from remap.errors import InvalidArgument
from remap.sim.sequences import Batch, Sequence

__all__ = ["SCHEDULERS", "Chunked", "PrefillFirst", "Scheduling", "make_scheduling"]

SCHEDULERS = ("prefill-first", "chunked")
MAX_NUM_SEQS = 256  # vLLM's default
BATCH_TOKENS = 2048  # vLLM's default for chunks; for whole prompts the longest context, if that is longer


class Scheduling(Protocol):
    """What the simulated engine needs of a scheduler."""

    @property
    def waiting(self) -> deque[Sequence]: ...
    @property
    def running(self) -> list[Sequence]: ...
    @property
    def used_blocks(self) -> int: ...
    def add(self, sequence: Sequence) -> None: ...
    def schedule(self, pool: BlockPool) -> Batch: ...
    def demand(self, most: int) -> int: ...
    def relocate(self, moved: Mapping[int, int]) -> None: ...
    def preempt(self, sequence: Sequence, pool: BlockPool) -> None: ...
    def finish(self, sequence: Sequence, pool: BlockPool) -> None: ...


class PrefillFirst:
    """vLLM V0. watermark: share of the usable blocks that an admission leaves free. swap: preempted sequences keep their KV in
    host memory instead of losing it, and come back before anything new is admitted."""

    def __init__(
        self,
        *,
        block_tokens: int,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_batch_tokens: int = BATCH_TOKENS,
        watermark: float = 0.01,
        lookahead_blocks: int = 1,
        swap: bool = False,
    ) -> None:
        self.block_tokens = block_tokens
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.watermark = watermark
        self.lookahead_blocks = lookahead_blocks
        self.swap = swap
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.swapped: deque[Sequence] = deque()

    @property
    def used_blocks(self) -> int:
        return sum(len(sequence.blocks) for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, pool: BlockPool) -> Batch:
        """The next pass; its blocks are allocated. Empty if nothing can run."""
        batch = Batch()
        if self.waiting and not self.swapped:
            self._admit(pool, batch)
            if batch.prefills:
                return batch
        self._decode(pool, batch)
        if self.swapped and not batch.preempted:
            self._swap_in(pool, batch)
        return batch

    def demand(self, most: int) -> int:
        """Free blocks wanted now, as the production scheduler asks: for the known tokens of what runs, whole prompts of what
        could run besides, and the lookahead. Counting stops at `most`, beyond which no pool can grow."""
        tokens, wanted = self.block_tokens, 0
        for sequence in self.running:
            if sequence.length > len(sequence.blocks) * tokens:
                wanted += -(-sequence.length // tokens) - len(sequence.blocks)
        wanted += self.lookahead_blocks * len(self.running)
        room = self.max_num_seqs - len(self.running)
        for queue in (self.swapped, self.waiting):
            for sequence in queue:
                if room == 0 or wanted >= most:
                    return min(wanted, most)
                wanted += -(-sequence.length // tokens) + self.lookahead_blocks
                room -= 1
        return min(wanted, most)

    def relocate(self, moved: Mapping[int, int]) -> None:
        if moved:
            for sequence in self.running:
                sequence.blocks = [moved.get(block, block) for block in sequence.blocks]

    def preempt(self, sequence: Sequence, pool: BlockPool) -> None:
        """Take the KV of a running sequence away, whichever it is; it waits in the place of its age and is recomputed."""
        self.running.remove(sequence)
        self._drop(sequence, pool)

    def finish(self, sequence: Sequence, pool: BlockPool) -> None:
        self.running.remove(sequence)
        pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.state = State.FINISHED

    # -- inside ----------------------------------------------------------------------------------------------------

    def _admit(self, pool: BlockPool, batch: Batch) -> None:
        budget, tokens = self.max_batch_tokens, self.block_tokens
        spare = int(self.watermark * pool.usable_blocks)
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            blocks = -(-sequence.length // tokens)
            # Alone, a sequence may have everything: else a long one would wait for ever. (V0 gives such a request up.)
            if sequence.length > budget or pool.free_blocks - blocks < (spare if self.running else 0):
                return
            sequence.blocks = pool.allocate(blocks)
            sequence.state = State.RUNNING
            self.waiting.popleft()
            # At the end, unless `preempt` took out a sequence that is older than some that go on running.
            insort(self.running, sequence, key=_order)
            batch.prefills.append((sequence, 0, sequence.length))
            budget -= sequence.length

    def _decode(self, pool: BlockPool, batch: Batch) -> None:
        running, tokens, context, index = self.running, self.block_tokens, 0, 0
        while index < len(running):
            sequence = running[index]
            if sequence.length > len(sequence.blocks) * tokens and not self._one_block(sequence, pool, batch):
                break
            context += sequence.length
            index += 1
        batch.rows = running[:]
        batch.decode_context = context

    def _one_block(self, sequence: Sequence, pool: BlockPool, batch: Batch) -> bool:
        """Whether the sequence got one more block; the latest ones, in the end itself, are preempted for it."""
        while pool.free_blocks < 1:
            victim = self.running.pop()
            batch.preempted += 1
            if self.swap:
                batch.swapped_out += len(victim.blocks)
                self._swap_out(victim, pool)
            else:
                self._drop(victim, pool)
            if victim is sequence:
                return False
        sequence.blocks += pool.allocate(1)
        return True

    def _drop(self, sequence: Sequence, pool: BlockPool) -> None:
        pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.preemptions += 1
        sequence.state = State.WAITING
        _insert(self.waiting, sequence)

    def _swap_out(self, sequence: Sequence, pool: BlockPool) -> None:
        sequence.swapped = len(sequence.blocks)
        pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.preemptions += 1
        _insert(self.swapped, sequence)

    def _swap_in(self, pool: BlockPool, batch: Batch) -> None:
        spare = int(self.watermark * pool.usable_blocks)
        while self.swapped and len(self.running) < self.max_num_seqs:
            sequence = self.swapped[0]
            blocks = max(sequence.swapped, -(-sequence.length // self.block_tokens))
            if pool.free_blocks - blocks < spare and (self.running or pool.free_blocks < blocks):
                return
            self.swapped.popleft()
            sequence.blocks = pool.allocate(blocks)
            batch.swapped_in += sequence.swapped
            sequence.swapped = 0
            insort(self.running, sequence, key=_order)
            batch.rows.append(sequence)
            batch.decode_context += sequence.length


def _order(sequence: Sequence) -> int:
    return sequence.order


def _insert(queue: deque[Sequence], sequence: Sequence) -> None:
    """In the order of arrival. Preempted ones are older than nearly all that wait: from the left."""
    place = 0
    while place < len(queue) and queue[place].order < sequence.order:
        place += 1
    queue.insert(place, sequence)


class Chunked:
    """The production scheduler, with vLLM V1's defaults."""

    def __init__(self, *, block_tokens: int, max_num_seqs: int = MAX_NUM_SEQS, **settings: object) -> None:
        merged: dict[str, object] = {"max_batch_tokens": BATCH_TOKENS, "chunk_align": 1, **settings}
        self._inner = ChunkedScheduler(block_tokens=block_tokens, max_num_seqs=max_num_seqs, **merged)  # type: ignore[arg-type]
        self.block_tokens = block_tokens

    @property
    def waiting(self) -> deque[Sequence]:
        return self._inner.waiting  # type: ignore[return-value]

    @property
    def running(self) -> list[Sequence]:
        return self._inner.running  # type: ignore[return-value]

    @property
    def used_blocks(self) -> int:
        return self._inner.used_blocks

    def add(self, sequence: Sequence) -> None:
        self._inner.add(sequence)  # type: ignore[arg-type]

    def schedule(self, pool: BlockPool) -> Batch:
        chosen = self._inner.schedule(pool)
        batch = Batch(preempted=len(chosen.preempted))
        for chunk in chosen.chunks:
            sequence: Sequence = chunk.sequence  # type: ignore[assignment]
            # The last token of a prompt is prefill even if it is alone, as the reference engine's runner has it.
            if chunk.count == 1 and sequence.length - chunk.start == 1 and chunk.start >= sequence.prompt:
                batch.rows.append(sequence)
                batch.decode_context += sequence.length
            else:
                batch.prefills.append((sequence, chunk.start, chunk.count))
        return batch

    def demand(self, most: int) -> int:
        return min(self._inner.demand(), most)

    def relocate(self, moved: Mapping[int, int]) -> None:
        self._inner.relocate(moved)

    def preempt(self, sequence: Sequence, pool: BlockPool) -> None:
        self._inner.preempt(sequence, pool)  # type: ignore[arg-type]

    def finish(self, sequence: Sequence, pool: BlockPool) -> None:
        self._inner.finish(sequence, pool)  # type: ignore[arg-type]


def make_scheduling(kind: str, *, block_tokens: int, context: int, swap: bool = False, **settings: int) -> Scheduling:
    """By name. context: the longest sequence, in tokens. settings: of the scheduler, instead of vLLM's defaults (`PrefillFirst`;
    `remap.engine.scheduler.Scheduler` for chunks). Raises InvalidArgument for an unknown name or setting, and for `swap` with
    chunks (vLLM V1 has none)."""
    if kind not in SCHEDULERS or (swap and kind != "prefill-first"):
        raise InvalidArgument(
            f"scheduler must be one of {', '.join(SCHEDULERS)}, and swapping whole requests is of prefill-first alone; got "
            f"{kind!r}; nothing was made",
            scheduler=kind,
        )
    try:
        if kind == "chunked":
            return Chunked(block_tokens=block_tokens, **settings)
        whole = {"max_batch_tokens": max(BATCH_TOKENS, context), **settings}
        return PrefillFirst(block_tokens=block_tokens, swap=swap, **whole)
    except TypeError as error:
        raise InvalidArgument(
            f"{kind} has no such settings, got {dict(settings)}; nothing was made; see its class",
            scheduling=dict(settings),
        ) from error
