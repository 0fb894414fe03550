# SPDX-License-Identifier: Apache-2.0
"""Offline batches of a model that need not fit into memory, and whose KV lies in host memory: the requests of the next pass.

Every pass reads all layers once, for all running sequences. Complete blocks go out to host memory and stream in again, layer by
layer, in each pass. They go out in pairs of blocks, as keys and values (two host blocks), or as *activations*: the layer's
input of these tokens, from which the pass makes keys and values again. A pair's activations are one host block: its key half
has the first block's, its value half the second's. That halves the bytes copied, for one more matrix product: HybridServe,
sections 3.3 and 4.2. Which pairs are activations is decided when their first token is computed, by `ratio`, so that each request
has the same mixture.

No request is preempted: one is admitted when host memory has room for all of its life, and the pool for its last pair.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from remap.errors import InvalidArgument
from remap.internals import internals
from remap_serve.engine.chunk import Chunk
from remap_serve.engine.engine import Engine
from remap_serve.engine.pairs import END, PAIR, Kept, Pair
from remap_serve.engine.request import Request, RequestState, Sequence
from remap_serve.engine.scheduler import TILE, Schedule, Scheduler
from remap_serve.policy.activations import activations_of, next_is_activations
from remap_serve.policy.offline import at_once, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from remap_serve.engine.block_pool import SchedulerBlocks
    from remap_serve.engine.throughput_runner import ThroughputRunner
    from remap_serve.engine.throughput_times import Times
    from remap_serve.policy.activations import Ratio
    from remap_serve.policy.offline import Option

__all__ = ["ChosenRatio", "ThroughputEngine", "ThroughputScheduler"]


class ThroughputScheduler(Scheduler):
    """First come, first served; each pass decodes a token of all who can, and prompts fill the budget.

    ratio: (activations, KV), of the pairs of each request. host_blocks: those that can stream. held: by sequence, its blocks.
    """

    def __init__(self, *, ratio: Ratio, host_blocks: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.ratio = ratio
        self.host_blocks = host_blocks
        self.held: dict[Sequence, Kept] = {}

    def keeps_activations(self, pair: int) -> bool:
        """Whether a request's pair of this number is activations."""
        before = activations_of(pair, self.ratio)
        return next_is_activations(before, pair - before, self.ratio)

    def host_need(self, tokens: int) -> int:
        """Host blocks of a request that becomes so long."""
        pairs = self.blocks_for(tokens) // PAIR
        return PAIR * pairs - activations_of(pairs, self.ratio)

    def activation_blocks(self, tokens: int) -> int:
        """Scratch blocks that a sequence of `tokens` tokens needs in a pass."""
        return PAIR * activations_of(self.blocks_for(tokens) // PAIR, self.ratio)

    @property
    def least_blocks(self) -> int:
        """The pool's blocks without which nothing runs: for the end of one sequence's last pair, and the least chunk of its
        prompt. With END more for each other sequence all that run can always go on."""
        blocks = self.blocks_for(self.chunk_align)
        return END + blocks + blocks // PAIR + 2

    def most_at_once(self, pool: SchedulerBlocks) -> int:
        """Requests that run at once at most, whatever host memory has."""
        return min(self.max_num_seqs, (pool.usable_blocks - self.least_blocks) // END + 1)

    @property
    def used_blocks(self) -> int:
        return sum(map(self._in_pool, self.held)) + len(self.due.ids[0])

    def schedule(self, pool: SchedulerBlocks) -> Schedule:
        """As `Scheduler.schedule`. Raises the pool's error if a copy out has failed: its sequences wait again, from their
        first token."""
        self.due.give(pool)
        for sequence in [one for one in self.running if not pool.kept(self._host_blocks(one))]:
            self._move(sequence, RequestState.WAITING)
            self._take_back(sequence)
        for sequence in self.running:
            self._put_out(sequence, pool)
        self.due.give(pool)
        self._admit(pool)
        # Of the pool's blocks `taken` are in use, or kept for the end of a sequence's last pair.
        taken = sum(max(END, self._in_pool(sequence)) for sequence in self.running)
        budget, chunks = self.max_batch_tokens, list[Chunk]()
        for sequence in self.running:
            count, before = self.chunk_tokens(sequence, budget), max(END, self._in_pool(sequence))
            while count:
                after = max(END, self._in_pool(sequence) + self._missing(sequence, sequence.computed + count))
                if taken - before + after <= pool.usable_blocks:
                    break
                end = (sequence.computed + count - 1) // self.chunk_align * self.chunk_align
                count = max(0, end - sequence.computed)
            if count:
                self._grow(sequence, sequence.computed + count, pool)
                chunks.append(Chunk(sequence, sequence.computed, count))
                taken, budget = taken - before + after, budget - count
        return Schedule(tuple(chunks), (), self.max_batch_tokens - budget)

    def finish(self, sequence: Sequence, pool: SchedulerBlocks) -> None:
        self._move(sequence, RequestState.FINISHED)
        self._take_back(sequence)
        self.due.give_surely(pool)

    def _admit(self, pool: SchedulerBlocks) -> None:
        promised = sum(kept.promised for kept in self.held.values())
        while self.waiting and len(self.running) < self.most_at_once(pool):
            sequence = self.waiting[0]
            need = self.host_need(sequence.request.max_kv_tokens)
            if need + promised > self.host_blocks:
                return
            promised += need
            self._take_back(sequence)  # what it has still where an interrupt came when it was put back
            sequence.computed = 0
            self.held[sequence] = Kept(promised=need)
            self._move(sequence, RequestState.RUNNING)

    def _in_pool(self, sequence: Sequence) -> int:
        """Blocks of the pool that it holds."""
        kept = self.held[sequence]
        return len(sequence.blocks) - PAIR * kept.out + sum(pair.staging is not None for pair in kept.pairs[kept.out :])

    def _new_pairs(self, sequence: Sequence, tokens: int) -> list[Pair]:
        """The pairs that it needs beyond those that it has, for `tokens` tokens."""
        have, need = len(self.held[sequence].pairs), -(-self.blocks_for(tokens) // PAIR)
        return [Pair(self.keeps_activations(number)) for number in range(have, need)]

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        """Blocks of the pool that it needs beyond those that it holds, for `tokens` tokens."""
        staging = sum(pair.activations for pair in self._new_pairs(sequence, tokens))
        return max(0, self.blocks_for(tokens) - len(sequence.blocks)) + staging

    def _grow(self, sequence: Sequence, tokens: int, pool: SchedulerBlocks) -> None:
        kept, new, before = self.held[sequence], self._new_pairs(sequence, tokens), self.due.ids
        missing = self._missing(sequence, tokens)
        self.due.ids = [*before[0], *pool.allocate(missing)], before[1]  # until they are in the tables
        ids = self.due.ids[0][len(before[0]) :]
        for pair in new:
            if pair.activations:
                pair.staging = ids.pop()
        sequence.blocks, kept.pairs, self.due.ids = [*sequence.blocks, *ids], [*kept.pairs, *new], before

    def _host_blocks(self, sequence: Sequence) -> list[int]:
        return [block for pair in self.held[sequence].pairs for block in pair.host]

    def _put_out(self, sequence: Sequence, pool: SchedulerBlocks) -> None:
        """Let its complete pairs stream: they leave the pool."""
        kept = self.held[sequence]
        complete = sequence.computed // (PAIR * self.block_tokens)
        while kept.out < complete:
            at = PAIR * kept.out
            pair, own = kept.pairs[kept.out], sequence.blocks[at : at + PAIR]
            leaving = own if pair.staging is None else [pair.staging]
            # Each of these is done once: a call that an interrupt ended has written down how far it came.
            if not pair.host:
                pair.host = pool.copy_out(leaving, self.host_blocks)
            if not pair.shown:
                pair.shown = pool.stream(pair.host)
            ids = self.due.more(own if pair.staging is None else [*own, pair.staging], [])
            # Activations show in no block of the sequence: the runner makes its keys and values in scratch blocks.
            blocks = pair.shown if pair.staging is None else [-1, -1]
            blocks = [*sequence.blocks[:at], *blocks, *sequence.blocks[at + PAIR :]]
            sequence.blocks, pair.staging, kept.out, self.due.ids = blocks, None, kept.out + 1, ids

    def _take_back(self, sequence: Sequence) -> None:
        """Take all that it has. It is free when `due` is given back."""
        kept = self.held.get(sequence)
        if kept is not None:
            staged = [pair.staging for pair in kept.pairs if pair.staging is not None]
            shown = [block for pair in kept.pairs for block in pair.shown]
            ids = self.due.more([*sequence.blocks[PAIR * kept.out :], *staged, *shown], self._host_blocks(sequence))
            sequence.blocks, kept.pairs, kept.out, self.due.ids = [], [], 0, ids
            del self.held[sequence]


@dataclass(frozen=True)
class ChosenRatio:
    """Which ratio of (activations, KV) an engine keeps, and why. times, options: the measurements and the options that follow
    from them (`remap_serve.policy.offline.choose`), if the engine chose among ratios."""

    ratio: Ratio
    why: str
    times: Times | None = None
    options: Mapping[str, Option] = field(default_factory=dict)


class ThroughputEngine(Engine):
    """Offline batches: see the module.

    model: a transformers causal LM whose layers the tenant owns. tenant: with `KVSpec.streamed_blocks`, at most as many of which
    hold KV at a time, and, for activations, `KVSpec.scratch_blocks`: at least as many as the longest request has.
    ratio: (activations, KV), what of each request is kept how; (0, 1): KV alone. None: the first step chooses, before any
    request begins: it measures what a pass costs here (`throughput_times`, about as long as one pass) and takes the ratio with
    the most tokens a second for the requests that wait then (`remap_serve.policy.offline.choose`). Where that cannot be measured,
    and where activations are not smaller than KV, it is KV alone.
    max_num_seqs, max_batch_tokens, chunk_align: see `Scheduler`.

    chosen: the ratio and why it is this one; None until the first step has chosen.

    Raises InvalidArgument if activations are asked for and are not smaller than KV (the numbers), for an impossible ratio, if
    the spec has no streamed blocks or a pool too small for one request, and for a tenant on a GPU, where this has not run yet.
    """

    runner: ThroughputRunner
    scheduler: ThroughputScheduler

    def __init__(
        self,
        model: nn.Module,
        tenant: Any,
        *,
        ratio: Ratio | None = None,
        max_num_seqs: int = 256,
        max_batch_tokens: int = 2048,
        chunk_align: int = TILE,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        from remap_serve.engine.models import require_block_activations
        from remap_serve.engine.throughput_runner import ThroughputRunner

        spec = tenant.kv.spec
        if ratio is not None:
            activations_of(0, ratio)  # refuses an impossible one
        activations = ratio is not None and ratio[0] > 0
        if not spec.streamed_blocks or (activations and not spec.scratch_blocks):
            raise InvalidArgument(
                f"offline batches keep KV in host memory, and make it anew from activations in scratch blocks: expected a KVSpec "
                f"with streamed_blocks{' and scratch_blocks' if activations else ''}, got {spec.streamed_blocks} and "
                f"{spec.scratch_blocks}; nothing was made",
                streamed_blocks=spec.streamed_blocks,
                scratch_blocks=spec.scratch_blocks,
            )
        scheduler = ThroughputScheduler(
            ratio=(0, 1) if ratio is None else ratio,
            host_blocks=spec.streamed_blocks,
            block_tokens=spec.block_tokens,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            chunk_align=chunk_align,
        )
        if tenant.kv.usable_blocks < scheduler.least_blocks:
            raise InvalidArgument(
                f"the pool has {tenant.kv.usable_blocks} blocks, at least {scheduler.least_blocks} are needed for a chunk of "
                f"{chunk_align} tokens and the blocks behind it; nothing was made; raise min_blocks",
                usable=tenant.kv.usable_blocks,
                least=scheduler.least_blocks,
            )
        runner = ThroughputRunner(model, tenant, scheduler.held)
        self.chosen: ChosenRatio | None = None if ratio is None else ChosenRatio(ratio, "as asked for")
        if activations:
            require_block_activations(runner.decoder)
        elif ratio is None and (why := _kv_alone(runner)) is not None:
            self.chosen = ChosenRatio((0, 1), why)
        super().__init__(tenant, scheduler, runner, clock=clock)
        self._numbers = count()

    def launch(self) -> Schedule:
        """As `Engine.launch`. The first one with requests chooses the ratio."""
        if self.chosen is None and self.scheduler.waiting:
            self.chosen = self._choose()
            self.scheduler.ratio = self.chosen.ratio
        return super().launch()

    def _choose(self) -> ChosenRatio:
        from remap_serve.engine.throughput_times import costs_of, measure, room_of

        scheduler, spec, within = self.scheduler, self.tenant.kv.spec, internals(self.tenant)
        layers, pair_tokens = self.runner.layers, PAIR * spec.block_tokens
        room = room_of(layers, within.kv.geometry.unit_bytes, spec.streamed_blocks, spec.scratch_blocks)
        requests = [sequence.request for sequence in scheduler.waiting]
        lengths = [(len(each.prompt), each.sampling.max_tokens - 1) for each in requests]
        most = scheduler.most_at_once(within.kv)
        together = lengths[: max(1, at_once(lengths[:most], pair_tokens, (1, 0), room))]
        mean = sum(prompt + answer for prompt, answer in together) // len(together)
        times = measure(self.runner, len(together), min(mean, self.runner.decoder.max_tokens - 1), self._clock)
        costs = costs_of(times, layers, spec.block_tokens, max(1, within.buffers))
        options = choose(lengths, pair_tokens, costs, room, most)
        said = [f"{name} {option}" for name, option in options.items() if name != "best"]
        return ChosenRatio(
            options["best"].ratio, f"by measured times: {options['best']}; {', '.join(said)}", times, options
        )

    def add_request(self, request: Request, *, arrived_s: float | None = None) -> None:
        """Queue a request. Raises InvalidArgument (nothing was queued) if its id is in use, or it could never run: longer than
        the model, or with more KV than the host blocks or, of activations, the scratch blocks hold; or if it asks for logprobs of
        its prompt, which this engine does not have."""
        if request.sampling.prompt_logprobs:
            raise InvalidArgument(
                f"request {request.id!r}: prompt_logprobs is not supported by offline batches; nothing was queued; use LLMEngine",
                param="prompt_logprobs",
            )
        self._require_servable(request, self.runner.decoder.vocabulary, self.runner.decoder.max_tokens)
        plan, spec, tokens = self.scheduler, self.tenant.kv.spec, request.max_kv_tokens
        for what, needed, limit in (
            ("host blocks", plan.host_need(tokens), spec.streamed_blocks),
            ("scratch blocks", plan.activation_blocks(tokens), spec.scratch_blocks),
        ):
            if needed > limit:
                raise InvalidArgument(
                    f"request {request.id!r} needs {needed} {what}, there are {limit}; nothing was queued; shorten the prompt or "
                    "lower max_tokens",
                    needed=needed,
                    limit=limit,
                )
        self._queue(Sequence.of(request, next(self._numbers), self._clock() if arrived_s is None else arrived_s))


def _kv_alone(runner: ThroughputRunner) -> str | None:
    """Why nothing but KV can be kept, or the best ratio cannot be known; None if there is a choice."""
    from remap_serve.engine.models import require_block_activations

    tenant = runner.tenant
    try:
        require_block_activations(runner.decoder)
    except InvalidArgument as error:
        return str(error)
    within = internals(tenant)
    if len(within.kv.scratch) < PAIR:
        return "the KVSpec has no scratch_blocks, in which keys and values could be made again"
    return None if within.copy_seconds() and within.streamed_seconds(1) else "the link was not measured"
