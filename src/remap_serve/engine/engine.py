# SPDX-License-Identifier: Apache-2.0
"""The loop: ask for blocks, schedule, run one pass, sample, account. Adopting remap is the first lines of
`Engine.step`. Engines that share an arena are stepped together: see sharing.py, which asks for all of them and calls `advance`.

`Engine` is the loop without a model: its runner may compute, or only say how long that takes (remap_serve.sim). `LLMEngine` is
the one with a model, on the CPU or on a GPU.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from remap.errors import InvalidArgument, OutOfBlocks
from remap.internals import internals
from remap.policy.views import Demand
from remap_serve.engine.chunk import Chunk
from remap_serve.engine.metrics import Metrics, StepSample
from remap_serve.engine.reports import Reports
from remap_serve.engine.request import Output, Request, Sequence
from remap_serve.engine.scheduler import TILE, Schedule, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Sequence as Listed

    from torch import nn

    from remap_serve.engine.gpu_runner import GpuRunner
    from remap_serve.engine.runner import ModelRunner

__all__ = ["Engine", "LLMEngine", "Result", "Runner", "StepOutput"]

# With a session the pool may still grow (a controller may take its time); after this many steps without any progress it
# will not.
STUCK_STEPS = 256


class StepOutput(NamedTuple):
    """The result of one step: which request got which token, finished requests, and how many tokens were computed."""

    sampled: Listed[Sequence]
    chosen: Listed[int]
    finished: tuple[Output, ...]
    computed: int

    @property
    def tokens(self) -> tuple[tuple[str, int], ...]:
        """(request id, token) pairs."""
        return tuple((sequence.id, token) for sequence, token in zip(self.sampled, self.chosen, strict=True))


@dataclass(frozen=True)
class Result:
    """Outputs by request id, and the metrics of the run."""

    outputs: dict[str, Output]
    metrics: Metrics


class Runner(Protocol):
    """Computes passes."""

    def run(self, chunks: Listed[Chunk]) -> tuple[list[Chunk], list[int]]:
        """One pass and the choice of tokens: the chunks that yield one (`Chunk.samples`), and their tokens."""


class Engine(ABC):
    """Continuous batching on one tenant, whatever computes.

    tenant: `name`, `kv` (see `scheduler.BlockPool`) and `remapped`. session: None for an engine whose pool never changes (the
    baseline); else `session.step` is called once a step and may grow, shrink or move the pool. `probe` returns the number of
    layers remapped, for the timeline (default: `tenant.remapped`).
    """

    def __init__(
        self,
        tenant: Any,
        scheduler: Scheduler,
        runner: Runner,
        *,
        session: Any = None,
        clock: Callable[[], float] = time.perf_counter,
        probe: Callable[[], float] | None = None,
    ) -> None:
        self.tenant = tenant
        self._kv = internals(tenant).kv
        self.session = session
        self.scheduler = scheduler
        self.runner = runner
        self._clock = clock
        self._probe = probe
        self._live: dict[str, Sequence] = {}
        self._orders = count()
        self._stuck = 0
        self.reports = Reports({tenant.name: self})
        self._landing = False  # or a pass's tokens are being noted, or an interrupt came then: see `_catch_up`
        self._ended: dict[str, Output] = {}  # of whom no step's output has told yet
        self.reset_metrics()
        self.offer()

    @abstractmethod
    def add_request(self, request: Any, *, arrived_s: float | None = None) -> None:
        """Queue a request, of the kind that this engine serves. `arrived_s`, on the engine's clock, defaults to now."""

    def reset_metrics(self, now: float | None = None) -> None:
        """Start measuring anew, at `now` on the engine's clock (default: the present)."""
        now = self._clock() if now is None else now
        self.metrics = Metrics(started_s=now, ended_s=now, kv_blocks_start=self._kv.usable_blocks)

    @property
    def unfinished(self) -> int:
        """Requests of which no step's output has told that they have ended."""
        return len(self._live.keys() | self._ended.keys()) if self._ended else len(self._live)

    def abort(self, id: str) -> Output:
        """Take an unfinished request out between steps and free its blocks. Raises InvalidArgument for an unknown
        id.
        """
        self._settle()
        ended = self._ended.pop(id, None)  # an interrupt came before a step's output told of it
        if id in self._live:
            return self._finish(self._live[id], "abort")
        if ended is None:
            raise InvalidArgument(f"no unfinished request {id!r}; there are {self.unfinished}", id=id)
        return ended

    def abort_all(self) -> tuple[str, ...]:
        """`abort` of all unfinished requests. Returns their ids."""
        self._settle()
        ids = (*self._live, *self._ended.keys() - self._live.keys())
        for id in ids:
            self.abort(id)
        return ids

    def step(self) -> StepOutput:
        """One scheduler iteration, at most one pass. With nothing to do it only lets the session act.

        Raises OutOfBlocks if the oldest request cannot proceed although nothing else holds blocks (`abort` it, or grow
        the pool); what the model or the session raises passes through. In all cases every request stays as it was and
        `step` may be called again.
        """
        begin = self._clock()
        if self.session is not None:
            self.reports.ask(lambda: self.session.step({self.tenant.name: self.demand()}))
        return self.advance(begin)

    def demand(self) -> Demand:
        """The demand to tell the session before the next pass: the KV blocks wanted beyond those that are held."""
        can_wait = self.scheduler.goes_on(self._kv.free_blocks)
        return Demand(self.scheduler.demand(), waited_s=self.waited_s, can_wait=can_wait)

    @property
    def waited_s(self) -> float:
        """Seconds that the first of the queue has waited for its first token; 0 if it has that, or none waits."""
        head = self.scheduler.waiting[0] if self.scheduler.waiting else None
        return max(0.0, self._clock() - head.arrived_s) if head is not None and head.first_s is None else 0.0

    @property
    def longest_wait_s(self) -> float:
        """Seconds since any request that does not run got its last token, or came; 0 if none waits."""
        now, queued = self._clock(), self.scheduler.queued()
        return max((now - (one.arrived_s if one.last_s is None else one.last_s) for one in queued), default=0.0)

    @property
    def computes(self) -> bool:
        """Whether some request has blocks."""
        return bool(self.scheduler.running or self.scheduler.arriving)

    def due_s(self, ttft_s: float | None, tbt_s: float | None) -> float:
        """When the next token of any request is due, on the engine's clock: the first ttft_s after its arrival, each later one
        tbt_s after the one before was; without ttft_s, after the first token came. Infinite: none is."""
        found = math.inf
        for one in list(self._live.values()):
            first_s = one.first_s if ttft_s is None else one.arrived_s + ttft_s
            if first_s is not None and (tbt_s is not None or one.first_s is None):
                found = min(found, first_s + one.generated * (tbt_s or 0.0))
        return found

    def follow(self, moved: Mapping[int, int]) -> None:
        """The session moved blocks (old id -> new id): patch the block tables. Before anything else touches the KV. The same
        mapping is applied once."""
        self.scheduler.relocate(moved)

    def preempt(self, blocks: int) -> tuple[str, ...]:
        """Free `blocks` blocks, or all, between steps: the youngest requests lose theirs. They are recomputed, unless host
        memory has room for their KV.

        Returns the ids of those requests, youngest first.
        """
        self._settle()
        victims = []
        for sequence in self._youngest():
            if blocks <= 0:
                break
            blocks -= sequence.held_blocks
            self.scheduler.preempt(sequence, self._kv)
            self.metrics.took_blocks((sequence,))
            victims.append(sequence.id)
        self.offer()
        return tuple(victims)

    def release(self, blocks: int) -> int:
        """Free `blocks` blocks for others, between turns, or all that can go: the youngest requests first. Their KV goes to
        host memory. Returns how many blocks have gone."""
        before = self._kv.live_blocks
        for sequence, fits in self._leaving():
            if blocks <= 0 or not fits:
                break
            blocks -= sequence.held_blocks
            self.scheduler.preempt(sequence, self._kv)
            self.metrics.took_blocks((sequence,))
        self.offer()
        return before - self._kv.live_blocks

    def rotate(self, longest_s: float) -> None:
        """Requests that wait, and got their last token longer than longest_s ago, run next, first who waits longest; the youngest
        others give them room. Only if the engine swaps: else all would be computed again."""
        scheduler = self.scheduler
        if not scheduler.swap:
            return
        self._settle()
        now = self._clock()
        late = [one for one in scheduler.queued() if one.last_s is not None and now - one.last_s > longest_s]
        if late:
            late.sort(key=lambda one: (one.last_s or 0.0, one.order))
            scheduler.put_first(late)
            self.release(sum(scheduler.blocks_for(one.length + 1) for one in late) - self._kv.free_blocks)

    def give_way(self) -> None:
        """While its turn is over and nobody steps the session: free what other processes want (`Session(device="unix:...")`).
        Call it every few milliseconds; it waits for nothing."""
        self.reports.ask(lambda: self.session.step())

    def offer(self) -> None:
        """Offer what `release` could free to other tenants, if the engine swaps: whenever that has changed while its turn is
        over."""
        if self.scheduler.swap:
            self._kv.offer(self.releasable())

    def releasable(self) -> int:
        """Blocks that `release` could free now: host memory has room for the part of them that it does not hold yet."""
        return sum(sequence.held_blocks for sequence, fits in self._leaving() if fits)

    def _leaving(self) -> list[tuple[Sequence, bool]]:
        """The requests that give blocks up, in this order, and whether host memory has room for it after those before it."""
        scheduler, room, found = self.scheduler, self._kv.host.free_blocks, []
        for sequence in self._youngest():
            room -= scheduler.blocks_for(sequence.computed) - len(sequence.host)
            found.append((sequence, room >= 0))
        return found

    def _youngest(self) -> tuple[Sequence, ...]:
        """The requests that have blocks, in the order in which they give them up: first those whose KV is only being copied
        in."""
        return (*reversed(self.scheduler.arriving), *reversed(self.scheduler.running))

    def pause(self, soon: bool = False) -> None:
        """The engine's turn is over: new KV of its requests goes to host memory, if it swaps, so that their blocks
        can go at once when others need them. soon: its turn will be over soon; complete blocks go already."""
        if self.scheduler.swap:
            self._settle()
            self.scheduler.save(self._kv, complete=soon)
            self.offer()

    def bring_back(self) -> None:
        """The engine's turn will begin soon: KV of its requests comes back from host memory, if it swaps."""
        if self.scheduler.swap:
            self._settle()
            self.scheduler.bring_back(self._kv)
            self.offer()

    def advance(self, begin: float | None = None) -> StepOutput:
        """`step` without asking the session: the caller has done that. begin: when the step began (default: now)."""
        begin = self._clock() if begin is None else begin
        schedule = self.launch()
        samplers, chosen = self.runner.run(schedule.chunks) if schedule.chunks else ([], [])
        return self.land(schedule, samplers, chosen, begin)

    def launch(self) -> Schedule:
        """The first half of `advance`: the requests of the next pass, with blocks allocated."""
        self._settle()
        if self._landing:
            self._catch_up()
        schedule = self.scheduler.schedule(self._kv)
        self.metrics.took_blocks(schedule.preempted)
        return schedule

    def land(self, schedule: Schedule, samplers: Listed[Chunk], chosen: Listed[int], begin: float) -> StepOutput:
        """The second half: the pass is over, and chose these tokens."""
        now = self._clock()
        self._landing = True
        self.metrics.recomputed_tokens += sum(map(self.scheduler.commit, schedule.chunks))
        sampled = [chunk.sequence for chunk in samplers]
        self.metrics.tokens(sampled, now)
        for sequence, token in zip(sampled, chosen, strict=True):
            reason = sequence.append(token)
            if reason is not None:
                self._end(sequence, reason)
        self._record(begin, schedule)
        finished, self._ended, self._landing = tuple(self._ended.values()), {}, False
        self._check_progress(bool(sampled))
        return StepOutput(sampled, chosen, finished, schedule.tokens)

    def _end(self, sequence: Sequence, reason: str) -> None:
        self._ended[sequence.id] = sequence.output(reason)
        self._finish(sequence, reason)

    def _settle(self) -> None:
        """Block tables are as the session's reports say, even behind an interrupt."""
        if self.session is not None:
            self.reports.settle(lambda: self.session.step())

    def _catch_up(self) -> None:
        """An interrupt ended `land`: a request that has all its tokens is finished, in the next step's output, and a token that
        was not noted is computed again."""
        for sequence in list(self._live.values()):
            if sequence.ended is not None:
                self._end(sequence, sequence.ended)
            elif sequence.computed == sequence.length:
                sequence.computed -= 1

    def _require_servable(self, request: Request, vocabulary: int, positions: int) -> None:
        """Raises InvalidArgument if the id is in use, the request does not fit the model, or it needs a grammar."""
        if request.id in self._live or request.id in self._ended:
            raise InvalidArgument(
                f"request id {request.id!r} is in use; ids must be unique among unfinished requests", id=request.id
            )
        request.require_fitting(vocabulary, positions)
        if request.sampling.json_schema is not None:
            raise InvalidArgument(
                f"request {request.id!r}: json_schema takes an engine with grammars, and the reference engine has none; nothing "
                "was queued; leave it out, or serve with vLLM (remap cluster serve --engine vllm)",
                param="json_schema",
                id=request.id,
            )

    def _queue(self, sequence: Sequence) -> None:
        try:
            self._live[sequence.id] = sequence
            self.scheduler.add(sequence)
            self.metrics.prompt_tokens += sequence.prompt_tokens
        except BaseException:  # an interrupt: it was not queued
            self._drop(sequence)
            raise

    def _drop(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence, self._kv)
        self._live.pop(sequence.id, None)

    def _finish(self, sequence: Sequence, reason: str) -> Output:
        self._drop(sequence)
        self.metrics.finish(sequence)
        return sequence.output(reason)

    def _record(self, begin: float, schedule: Schedule) -> None:
        now = self._clock()
        remapped = self.tenant.remapped if self._probe is None else self._probe()
        self.metrics.steps += 1
        self.metrics.timeline.append(
            StepSample(
                time_s=now - self.metrics.started_s,
                kv_used_blocks=self.scheduler.used_blocks,
                kv_usable_blocks=self._kv.usable_blocks,
                layers_remapped=remapped,
                running=len(self.scheduler.running),
                waiting=len(self.scheduler.waiting),
                preemptions=self.metrics.preemptions,
                tokens=schedule.tokens,
                step_s=now - begin,
            )
        )

    def _check_progress(self, progressed: bool) -> None:
        """A sequence that is alone and still cannot proceed would be preempted and recomputed for ever."""
        if progressed or not self._live:
            self._stuck = 0
        elif not self.scheduler.running:
            self._stuck += 1
        if self._stuck > (STUCK_STEPS if self.session is not None else 1):
            head = self.scheduler.waiting[0]
            needed = self.scheduler.blocks_for(head.length)
            kv = self._kv
            raise OutOfBlocks(
                f"request {head.id!r} needs {needed} KV blocks and has the engine to itself, but "
                f"{kv.free_blocks} of {kv.usable_blocks} usable blocks are free; nothing changed: "
                "abort it, or let the pool grow",
                request=head.id,
                requested=needed,
                free=kv.free_blocks,
                usable=kv.usable_blocks,
            )


class LLMEngine(Engine):
    """Continuous batching of a model.

    model: a transformers causal LM whose layers the tenant owns. tenant: see `ModelRunner` and `Engine`, as are session and
    probe. runner: "cpu" (`ModelRunner`), "gpu" (`GpuRunner`) or "auto", by the device of the KV tensors;
    attention, graphs, staging, max_model_len: the GPU runner's. The other arguments are the scheduler's. With a session the
    engine takes the host memory that this gives it (`Session(host_kv=)`, `KVSpec.host_blocks`) and swaps: a preempted request
    keeps its KV in host memory, and nothing is recomputed while that has room. Without one it swaps only if `host_blocks` is a
    number. Streamed blocks (`KVSpec.streamed_blocks`): complete blocks stream from there before it preempts.
    """

    runner: ModelRunner | GpuRunner

    def __init__(
        self,
        model: nn.Module,
        tenant: Any,
        *,
        session: Any = None,
        max_num_seqs: int = 32,
        max_batch_tokens: int = 512,
        watermark: float = 0.0,
        reserve_full_prompt: bool = True,
        lookahead_blocks: int = 1,
        chunk_align: int = TILE,
        decode_cost: int = 0,
        runner: str = "auto",
        attention: str = "auto",
        graphs: str = "auto",
        staging: str = "auto",
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        probe: Callable[[], float] | None = None,
    ) -> None:
        made: ModelRunner | GpuRunner
        if _on_cpu(runner, tenant.kv.tensors[0].device.type):
            from remap_serve.engine.runner import ModelRunner

            made = ModelRunner(model, tenant)
        else:
            from remap_serve.engine.gpu_runner import GpuRunner

            made = GpuRunner(
                model,
                tenant,
                session=session,
                max_num_seqs=max_num_seqs,
                max_batch_tokens=max_batch_tokens,
                max_model_len=max_model_len,
                attention=attention,
                graphs=graphs,
                staging=staging,
            )
        kv = internals(tenant).kv
        real = hasattr(kv, "open_host")  # a test double has no host memory
        scheduler = Scheduler(
            swap=real and (kv.host.total if session is None else kv.open_host()) > 0,
            stream=real and kv.spec.streamed_blocks > 0,
            block_tokens=kv.block_tokens,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            watermark=watermark,
            reserve_full_prompt=reserve_full_prompt,
            lookahead_blocks=lookahead_blocks,
            chunk_align=chunk_align,
            decode_cost=decode_cost,
        )
        super().__init__(tenant, scheduler, made, session=session, clock=clock, probe=probe)
        self._sleep = sleep

    def warm_up(self, batch_sizes: Iterable[int] | None = None) -> None:
        """Record the decode passes of these batch sizes now (default: all), not when each is first needed. Between steps.

        Does nothing with the CPU runner, which records nothing.
        """
        self.runner.prepare(None if batch_sizes is None else list(batch_sizes))

    def add_request(self, request: Request, *, arrived_s: float | None = None) -> None:
        """Queue a request. `arrived_s`, on the engine's clock, defaults to now.

        Raises InvalidArgument (nothing changed) if the id is in use, a token of the prompt is none of the model's, or the
        request is longer than the model's positions, or could never fit into the pool even alone: `usable_blocks` without a
        session, `max_blocks` with one.
        """
        tokens = request.max_kv_tokens
        blocks = self.scheduler.blocks_for(tokens)
        kv = self._kv
        most = kv.usable_blocks if self.session is None else kv.tensors[0].shape[1]
        self._require_servable(request, self.runner.decoder.vocabulary, self.runner.max_tokens)
        if blocks > most:
            raise InvalidArgument(
                f"request {request.id!r} needs {blocks} KV blocks at its longest, the pool can have {most}; "
                f"nothing was queued, shorten the prompt, lower max_tokens or raise max_blocks",
                needed=blocks,
                limit=most,
            )
        self._queue(Sequence.of(request, next(self._orders), self._clock() if arrived_s is None else arrived_s))

    def run(
        self, requests: Iterable[Request], on_step: Callable[[LLMEngine, StepOutput], None] | None = None
    ) -> Result:
        """Serve `requests`, each from its `arrival_s` on, until all are finished. Metrics start anew."""
        pending = sorted(requests, key=lambda request: request.arrival_s)
        pending.reverse()
        self.reset_metrics()
        outputs: dict[str, Output] = {}
        while pending or self._live:
            now = self._clock() - self.metrics.started_s
            while pending and pending[-1].arrival_s <= now:
                request = pending.pop()
                self.add_request(request, arrived_s=self.metrics.started_s + request.arrival_s)
            step = self.step()
            outputs.update((output.id, output) for output in step.finished)
            if on_step is not None:
                on_step(self, step)
            if not self._live and pending:
                # Short naps: an idle engine still lets the session give pages back.
                self._sleep(min(0.01, max(0.0, pending[-1].arrival_s - (self._clock() - self.metrics.started_s))))
        return Result(outputs, self.metrics)


def _on_cpu(runner: str, device: str) -> bool:
    if runner not in ("auto", "cpu", "gpu") or (runner == "cpu" and device != "cpu"):
        raise InvalidArgument(
            f"runner must be 'auto', 'cpu' or 'gpu', and 'cpu' needs KV tensors on the CPU, got {runner!r} with KV on "
            f"{device}; nothing was created",
            runner=runner,
            device=device,
        )
    return runner == "cpu" or (runner == "auto" and device == "cpu")
