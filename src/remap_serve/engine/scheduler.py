# SPDX-License-Identifier: Apache-2.0
"""Chooses the requests of the next pass. Pure: no torch, no clock; blocks come from a pool that is handed in.

The policy is vLLM V1's, so that the engine without a session is a fair baseline. Running sequences come first, in the
order of their arrival. Chunks of a prompt fill the rest of the token budget. A running sequence that cannot get a block
preempts the youngest one, which loses its KV and goes to the front of the queue. The scheduler admits new sequences only in
a step without preemption, and only when their whole prompt would fit (vLLM's `scheduler_reserve_full_isl`, on by default
there as here).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

from remap.errors import Error, InvalidArgument, OutOfBlocks
from remap_serve.engine import streaming
from remap_serve.engine.chunk import Chunk
from remap_serve.engine.due import Due
from remap_serve.engine.request import RequestState, Sequence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from remap_serve.engine.block_pool import SchedulerBlocks

__all__ = ["TILE", "Schedule", "Scheduler"]

# Rows of one prefill call. 32 is also the number that torch's fused CPU attention takes at a time, so nothing is lost.
TILE = 32

_MOVES = count(1)  # numbers of moves of blocks: a sequence may go to another scheduler


class Schedule(NamedTuple):
    """The chunks of one pass (tokens: of all chunks), and the requests that lost their blocks for it."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...]
    tokens: int


class Scheduler:
    """First come, first served, with preemption by recompute, or by swap while host memory has room.

    max_num_seqs: most sequences running at once. max_batch_tokens: most tokens a pass. watermark: share of the usable
    blocks that an admission must leave free while others run (vLLM's default is 0). lookahead_blocks: blocks a running
    sequence that `demand` asks for ahead of need. chunk_align: a prompt is cut at multiples of this many tokens, so that
    its attention has the same shapes wherever it was cut. decode_cost: how many prompt tokens one decoding
    sequence costs in a pass (about 3 to 4 on a CPU); the prompt chunk shrinks by as much, so that passes take equally long
    and those who decode do not wait longer the more of them there are. 0 (default): only tokens count, as in vLLM.
    swap: a preempted sequence keeps its KV in host memory (`pool.copy_out`), if that has room, and goes on from there. KV is
    append-only, so host copies of complete blocks are kept while their sequence runs, and only new blocks are copied out
    again. A sequence that comes back is `arriving` while its KV is copied in, beside the passes of the others. overlap: False
    for vLLM V0's way: everything is copied out each time, and the next pass waits for the copies in.
    stream: beside that, complete blocks of running sequences stream from host memory in each pass rather than that another is
    preempted, or not admitted, as many as `pool.streamable_blocks` says (streaming.py).
    Invariant: `running` is sorted by arrival, and so is `waiting` (arrival = `add`, or `put_first`; a preempted sequence is
    older than the rest). A sequence is in one of `waiting`, `running` and `arriving`.
    Interrupts: a call that an interrupt ends leaves every sequence in one queue, with tables that are true; the same call goes
    on where it ended. A sequence that waits may have blocks then, and uses them when its turn comes. `due`: blocks that no
    sequence has any more and the pool has not back yet.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        max_num_seqs: int = 32,
        max_batch_tokens: int = 512,
        watermark: float = 0.0,
        reserve_full_prompt: bool = True,
        lookahead_blocks: int = 1,
        chunk_align: int = TILE,
        decode_cost: int = 0,
        swap: bool = False,
        overlap: bool = True,
        stream: bool = False,
    ) -> None:
        if decode_cost < 0:
            raise InvalidArgument(f"expected decode_cost >= 0, got {decode_cost}", decode_cost=decode_cost)
        if chunk_align < 1:
            raise InvalidArgument(f"expected chunk_align >= 1, got {chunk_align}", chunk_align=chunk_align)
        if (
            block_tokens < 1
            or max_num_seqs < 1
            or max_batch_tokens < 1
            or lookahead_blocks < 0
            or not 0 <= watermark < 1
        ):
            raise InvalidArgument(
                "expected block_tokens, max_num_seqs, max_batch_tokens >= 1, lookahead_blocks >= 0 "
                "and 0 <= watermark < 1",
                block_tokens=block_tokens,
                max_num_seqs=max_num_seqs,
                max_batch_tokens=max_batch_tokens,
                lookahead_blocks=lookahead_blocks,
                watermark=watermark,
            )
        self.block_tokens = block_tokens
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.watermark = watermark
        self.reserve_full_prompt = reserve_full_prompt
        self.lookahead_blocks = lookahead_blocks
        self.chunk_align = chunk_align
        self.decode_cost = decode_cost
        self.swap = swap
        self.overlap = overlap
        self.stream = stream
        self.closed = False  # whether none that waits is let in
        self._first = 0  # the least place that `put_first` gave
        self.due = Due()
        # Blocks that moved, under a number of their own, while tables follow; and the last that all follow, or will.
        self._relocating: tuple[int, Mapping[int, int]] | None = None
        self._relocated: Mapping[int, int] | None = None
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._arriving: dict[Sequence, int] = {}
        # The sequence that goes to another queue, to which (its state then), and the ticket if its KV is being copied in: see
        # `_move`.
        self._moving: tuple[Sequence, RequestState, int | None] | None = None

    @property
    def running(self) -> list[Sequence]:
        """The sequences that passes compute."""
        if self._moving is not None:
            self._place()
        return self._running

    @property
    def waiting(self) -> deque[Sequence]:
        """The sequences without KV, or with KV in host memory."""
        if self._moving is not None:
            self._place()
        return self._waiting

    @property
    def arriving(self) -> dict[Sequence, int]:
        """Whose KV is being copied in -> the ticket; their state is WAITING."""
        if self._moving is not None:
            self._place()
        return self._arriving

    def share_line(self, line: deque[Sequence]) -> None:
        """Let waiting sequences stand in this line, perhaps with those of other schedulers. Before the first request."""
        self._waiting = line

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """A sequence runs on whose blocks hold the KV of its `computed` tokens: it came from another scheduler."""
        self._move(sequence, RequestState.RUNNING)

    @property
    def used_blocks(self) -> int:
        return sum(one.held_blocks for one in (*self.running, *self.arriving)) + len(self.due.ids[0])

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def demand(self) -> int:
        """Free blocks wanted now: to finish what runs' known tokens, to admit whole prompts up to max_num_seqs, and the
        lookahead.

        Without the lookahead the pool would be exactly full after each growth, and the next block boundary would ask
        again.
        """
        wanted, size = 0, self.block_tokens
        held = [*self.running, *self.arriving]
        sequences = [*held, *islice(self.queued(), max(0, self.max_num_seqs - len(held)))]
        for sequence in sequences:
            wanted += -(-sequence.length // size) - len(sequence.blocks)
        return wanted + self.lookahead_blocks * len(sequences)

    def goes_on(self, free: int) -> bool:
        """Whether some request runs, and all that do have the blocks for their known tokens beside `free` blocks."""
        held, size = [*self.running, *self.arriving], self.block_tokens
        return bool(held) and sum(-(-one.length // size) - len(one.blocks) for one in held) <= free

    def relocate(self, moved: Mapping[int, int]) -> None:
        """Patch the block tables after the session moved blocks (old id -> new id). Call before anything else in a
        step. Can be called again with the same mapping, which is applied once.
        """
        if moved and moved is not self._relocated:
            self._relocate()
            self._relocating, self._relocated = (next(_MOVES), moved), moved
            self._relocate()

    def _relocate(self) -> None:
        """Do what `_relocating` says. Can be done again: each table follows once."""
        if self._relocating is None:
            return
        number, moved = self._relocating
        self.due.relocate(number, moved)
        for sequence in (*self.running, *self.arriving, *self.queued()):
            if sequence.relocated != number:
                blocks, homing = [moved.get(block, block) for block in sequence.blocks], sequence.homing
                if homing is not None:
                    homing = homing[0], [moved.get(block, block) for block in homing[1]]
                sequence.blocks, sequence.homing, sequence.relocated = blocks, homing, number
        self._relocating = None

    def _mend(self, pool: SchedulerBlocks) -> None:
        """Do what an interrupt has left undone."""
        self._relocate()
        self.due.give_surely(pool)

    def queued(self) -> Iterable[Sequence]:
        """The sequences that do not run yet, in the order in which they will."""
        return self.waiting

    def schedule(self, pool: SchedulerBlocks) -> Schedule:
        """Choose the chunks of the next pass and allocate their blocks. Counts as nothing until `commit`: repeating is
        harmless. Raises the pool's error if copies in have failed: their sequences wait again, with their KV in host memory.
        """
        self._relocate()
        self.due.give(pool)
        if not self.swap:
            return self._schedule(pool)
        for sequence in self.running:  # a block that will be written to is not in host memory any more
            self._forget_host(sequence, sequence.computed // self.block_tokens, pool)
        self._arrive(pool)
        self._settle(pool)
        found = self._schedule(pool)
        if self.stream and not self.arriving and not any(self.queued()):
            spare = pool.free_blocks - self.lookahead_blocks * len(self.running)
            streaming.bring_home(self.running, spare, pool, self.due)
        if found.chunks or not self.arriving:
            return found
        # There is nothing to compute before the first one is there.
        self._arrive(pool, next(iter(self.arriving.values())))
        self._settle(pool)
        again = self._schedule(pool)
        return again._replace(preempted=(*found.preempted, *again.preempted))

    def _schedule(self, pool: SchedulerBlocks) -> Schedule:
        """`schedule`, of those who run and wait."""
        budget = self.max_batch_tokens
        decoding = sum(1 for sequence in self.running if sequence.length - sequence.computed == 1)
        # Prompt tokens of this pass: the rest that the decoding sequences leave, at their real cost; at least one tile.
        prompt = max(self.chunk_align, budget - self.decode_cost * decoding)
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            decodes = sequence.length - sequence.computed == 1
            count = 1 if decodes else self.chunk_tokens(sequence, min(budget, prompt))
            if count == 0:
                index += 1
                continue
            while not self._reserve(sequence, sequence.computed + count, pool):
                # The youngest is last, never one that this step has already scheduled: those stand before `sequence`.
                victim = self.running[-1]
                self._put_back(victim, pool)
                preempted.append(victim)
                if victim is sequence:
                    break
            else:
                chunks.append(Chunk(sequence, sequence.computed, count))
                budget -= count
                prompt -= 0 if decodes else count
                index += 1
        # A step that had to preempt has no room for newcomers, and would only preempt them in the next one.
        while not (preempted or self.closed) and self.waiting and budget > 0 and self._held < self.max_num_seqs:
            sequence = self.waiting[0]
            count = self.chunk_tokens(sequence, min(budget, prompt))
            if count == 0:
                break
            end = sequence.computed + count
            whole = sequence.length if self.reserve_full_prompt else end
            spare = int(self.watermark * pool.usable_blocks) if self.running else 0
            if not self._seat(sequence, end, self.blocks_for(whole) + spare, pool):
                break
            if sequence.host:
                self._fetch(sequence, pool)
                continue  # it arrives, or is computed anew, from its first chunk
            chunks.append(Chunk(sequence, 0, count))
            self._move(sequence, RequestState.RUNNING)
            budget -= count
            prompt -= count
        return Schedule(tuple(chunks), tuple(preempted), self.max_batch_tokens - budget)

    def commit(self, chunk: Chunk) -> int:
        """The pass that computed `chunk` succeeded: its KV exists now. Returns how many of its tokens had had theirs before."""
        sequence = chunk.sequence
        sequence.computed = end = chunk.start + chunk.count
        if chunk.start >= sequence.high_water:
            sequence.high_water = end
            return 0
        recomputed = chunk.recomputed
        sequence.high_water = max(sequence.high_water, end)
        return recomputed

    def preempt(self, sequence: Sequence, pool: SchedulerBlocks) -> None:
        """Take the blocks of a sequence away that runs or arrives; it waits in the place of its age. Its KV goes to host
        memory, or is recomputed. Raises the pool's error if it cannot begin to copy; the sequence stays where it is then."""
        self._mend(pool)
        self._put_back(sequence, pool)

    def save(self, pool: SchedulerBlocks, complete: bool = False) -> None:
        """Copy out what host memory does not have yet of those who run, while there is room, the youngest first: so their
        blocks can go at once when others need them. Between turns, when no pass writes; during a turn only `complete`
        blocks."""
        self._mend(pool)
        for sequence in reversed(self.running):
            if sequence.computed and not self._save(sequence, pool, (), complete):
                return

    def put_first(self, sequences: Iterable[Sequence]) -> None:
        """Those, which wait, go before all others of this scheduler, in this order: as if they had come first."""
        self._relocate()
        for sequence in reversed(tuple(sequences)):
            # An interrupt in between: it stands behind its place, until it has moved.
            sequence.order = self._first = self._first - 1
            self._move(sequence, RequestState.WAITING)

    def bring_back(self, pool: SchedulerBlocks) -> None:
        """Start copying the KV of those back who are next and have it in host memory, while there is room: before their turn."""
        self._mend(pool)
        while self.waiting and self.waiting[0].host and self._held < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self._seat(sequence, sequence.length, self.blocks_for(sequence.length), pool):
                return
            self._fetch(sequence, pool)

    def leave_host(self, pool: SchedulerBlocks, spare: int) -> None:
        """Have nothing in host memory any more, but for what streams: what there is room for, with `spare` blocks to spare, comes
        back, the oldest first, and runs; the rest is computed again. Waits for the copies. Raises the pool's error if they have
        failed: then those who waited for them wait again, with their KV in host memory."""
        self._mend(pool)
        for sequence in [one for one in self.waiting if one.host]:
            if self._seat(sequence, sequence.computed, self.blocks_for(sequence.computed) + spare, pool):
                self._fetch(sequence, pool)
            else:
                self._drop(sequence, pool)
        if self.arriving:
            self._arrive(pool, max(self.arriving.values()))
        self._settle(pool)
        for sequence in self.running:
            self._forget_host(sequence, 0, pool)

    def finish(self, sequence: Sequence, pool: SchedulerBlocks) -> None:
        """Take a sequence out, wherever it is, and free its blocks. Can be called again."""
        self._relocate()
        self._drop(sequence, pool)  # first: blocks that are in no queue are not told that they moved
        self._move(sequence, RequestState.FINISHED)

    def chunk_tokens(self, sequence: Sequence, budget: int) -> int:
        """How many tokens of `sequence` `schedule` computes next: all that is known, else up to a multiple of `chunk_align`. A
        subclass may take fewer.

        0: the budget left does not reach one; it will in a pass that is less full. An empty pass takes what it can.
        """
        if budget <= 0:
            return 0
        count = min(sequence.length - sequence.computed, budget)
        end = sequence.computed + count
        if end == sequence.length:
            return count
        aligned = end - end % self.chunk_align - sequence.computed
        if aligned > 0:
            return aligned
        return 0 if budget < self.max_batch_tokens else count

    def _room(self, blocks: int, pool: SchedulerBlocks) -> bool:
        """Whether `blocks` blocks are free, or could be made free by letting others stream."""
        short = blocks - pool.free_blocks
        if short <= 0 or not self.stream:
            return short <= 0
        return streaming.make_room(self.running, short, pool, self.block_tokens, self.due)

    def _seat(self, sequence: Sequence, tokens: int, blocks: int, pool: SchedulerBlocks) -> bool:
        """Give a waiting sequence its blocks for `tokens` tokens, if `blocks` are free or can be made free. Where they are not,
        its own blocks in host memory stream first: that costs no copy now."""
        if self.stream and not sequence.blocks:
            streaming.show(sequence, blocks - pool.free_blocks, pool, self.block_tokens)
        seated = False
        try:
            seated = self._room(blocks - sequence.streamed, pool) and self._reserve(sequence, tokens, pool)
        finally:
            if not seated:
                self._drop(sequence, pool, kept=True)
        return seated

    def _reserve(self, sequence: Sequence, tokens: int, pool: SchedulerBlocks) -> bool:
        missing = self.blocks_for(tokens) - len(sequence.blocks)
        if missing > 0:
            self._room(missing, pool)
            try:
                sequence.blocks += pool.allocate(missing)
            except OutOfBlocks:
                return False
        return True

    def _put_back(self, sequence: Sequence, pool: SchedulerBlocks) -> None:
        kept = self._save(sequence, pool, [other for other in self.running if other is not sequence])
        sequence.preemptions += 1
        self._retire(sequence, pool, kept)

    def _retire(self, sequence: Sequence, pool: SchedulerBlocks, kept: bool) -> None:
        """It waits, without blocks; with its KV in host memory if that is `kept`."""
        # A sequence with KV leaves its queue first, so that it never computes with blocks that it lost; one without, at the end.
        if kept:
            self._move(sequence, RequestState.WAITING)
        self._drop(sequence, pool, kept)
        if not kept:
            self._move(sequence, RequestState.WAITING)

    def _settle(self, pool: SchedulerBlocks) -> None:
        """See that blocks that stream are there to be read; else their sequence waits."""
        if self.stream:
            for sequence in streaming.settle(self.running, pool, self.due):
                self._retire(sequence, pool, kept=False)  # its KV is lost

    # -- who is where ------------------------------------------------------------------------------------------------

    def _move(self, sequence: Sequence, state: RequestState, ticket: int | None = None) -> None:
        """A sequence goes to the queue of this state, in the place of its age; with a ticket it arrives. It has happened as soon
        as that is written down: the next look at the queues does the rest after an interrupt."""
        if self._moving is not None:
            self._place()
        self._moving = sequence, state, ticket
        self._place()

    def _place(self) -> None:
        """Do what `_moving` says. Can be done again."""
        assert self._moving is not None
        sequence, state, ticket = self._moving
        self._arriving.pop(sequence, None)
        for queue in self._queues():
            if sequence in queue:
                queue.remove(sequence)
        sequence.state = state
        if ticket is not None:
            self._arriving[sequence] = ticket
        elif state is RequestState.RUNNING:
            # At the end, unless `preempt` took out a sequence that is older than some that go on running.
            insort(self._running, sequence, key=_order)
        elif state is RequestState.WAITING:
            insort(self._line_of(sequence), sequence, key=_order)
        self._moving = None

    def _queues(self) -> tuple[list[Sequence] | deque[Sequence], ...]:
        """Where a sequence can be."""
        return self._running, self._waiting

    def _line_of(self, sequence: Sequence) -> deque[Sequence]:
        """Where it waits."""
        return self._waiting

    # -- in host memory --------------------------------------------------------------------------------------------

    @property
    def _held(self) -> int:
        """Sequences that have blocks."""
        return len(self.running) + len(self.arriving)

    def _save(
        self, sequence: Sequence, pool: SchedulerBlocks, others: Iterable[Sequence], complete: bool = False
    ) -> bool:
        """Copy what host memory does not have yet of its KV out, or of its complete blocks. False if it has no room, or nothing
        is computed. others: whose copies may go for it."""
        if not self.swap or not sequence.computed:
            return False
        end = sequence.computed // self.block_tokens if complete else self.blocks_for(sequence.computed)
        for spare in (others, None):
            new = sequence.blocks[len(sequence.host) : end]
            if not new:
                return True
            try:
                sequence.host = sequence.host + pool.copy_out(new)
            except OutOfBlocks:
                # Host copies of running sequences only save a copy later.
                for other in spare or ():
                    self._forget_host(other, 0, pool)
            else:
                return True
        return False

    def _fetch(self, sequence: Sequence, pool: SchedulerBlocks) -> bool:
        """Start copying its KV back into its new blocks: it arrives. False if a copy out has failed: then it has no KV any more.
        Without a copy in flight it has no blocks either, so that no other waits for those."""
        host, streamed = sequence.host, sequence.streamed
        kept = pool.kept(host)
        try:
            if kept:
                self._move(
                    sequence, RequestState.WAITING, pool.copy_in(host[streamed:], sequence.blocks[streamed : len(host)])
                )
        finally:
            if sequence not in self.arriving:
                self._drop(sequence, pool, kept)
        return kept

    def _forget_host(self, sequence: Sequence, keep: int, pool: SchedulerBlocks) -> None:
        streaming.forget_host(sequence, keep, pool, self.due)

    def _arrive(self, pool: SchedulerBlocks, behind: int | None = None) -> list[Sequence]:
        """Let those run whose KV has arrived. The host keeps complete blocks, which no pass writes any more. behind: the pass
        comes behind this ticket and those before it."""
        try:
            if behind is not None:
                pool.join(behind)
            there = [sequence for sequence, ticket in self.arriving.items() if pool.arrived(ticket)]
        except Error:
            for sequence in tuple(self.arriving):
                self.preempt(sequence, pool)  # its host blocks are as they were
            raise
        for sequence in there:
            self._move(sequence, RequestState.RUNNING)
            self._forget_host(sequence, sequence.computed // self.block_tokens if self.overlap else 0, pool)
        return there

    def _drop(self, sequence: Sequence, pool: SchedulerBlocks, kept: bool = False) -> None:
        """Take its blocks away, and its KV in host memory unless that is `kept`. In one statement: it never has KV that is not
        its own."""
        blocks = sequence.blocks if sequence.homing is None else [*sequence.blocks, *sequence.homing[1]]
        host, done = (sequence.host, sequence.computed) if kept else (list[int](), 0)
        one, due = sequence, self.due
        ids = due.more(blocks, [] if kept else sequence.host)
        one.blocks, one.streamed, one.homing, one.host, one.computed, due.ids = [], 0, None, host, done, ids
        due.give_surely(pool)


def _order(sequence: Sequence) -> int:
    return sequence.order
