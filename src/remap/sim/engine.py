"""One simulated engine: what `LLMEngine` is for a real model. `SharedEngines` takes turns with either.

One step: demand -> session.step (by whoever runs the engine) -> schedule -> `launch` -> virtual time passes -> `land`. What a
token is worth measuring for is its time: there are no values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from remap.engine.request import State
from remap.errors import InvalidState
from remap.policy.views import Demand
from remap.sim.passes import Pass
from remap.sim.results import TenantResult, ascending
from remap.sim.scheduling import Scheduling
from remap.sim.sequences import Batch, Sequence

__all__ = ["EMPTY_S", "SimEngine", "Step"]


@dataclass(frozen=True)
class Step:
    """As `remap.engine.engine.StepOutput`: tokens computed, and how many requests finished."""

    computed: int
    finished: tuple[Any, ...] = ()


_NOTHING = Step(0)
EMPTY_S = 0.001
"""What an iteration takes that found nothing to run, at least: were the gap 0, time would stand still, and with it what is
waited for."""


class SimEngine:
    """Continuous batching of one tenant in virtual time.

    tenant: name, kv (a pool), remapped, lent_pages: a session's tenant, or a stand-in. session: None if its memory never
    changes through one. clock: the backend, or a `VirtualClock`: now, advance_to(t), advance(s). gap_s: between two passes, the
    host's time for scheduling and sampling. most_blocks: what the pool could ever hold.
    """

    def __init__(
        self,
        tenant: Any,
        scheduler: Scheduling,
        passes: Pass,
        clock: Any,
        *,
        session: Any = None,
        gap_s: float,
        most_blocks: int,
        context: int,
    ) -> None:
        self.tenant = tenant
        self.session = session
        self.scheduler = scheduler
        self.passes = passes
        self.unfinished = 0
        self.slow = 1.0  # how many times as long computation takes now, because others compute beside it
        self._clock = clock
        self._gap_s = gap_s
        self._most_blocks = most_blocks
        self._context = context
        self._orders = 0
        self._previous_s = -1.0  # when the last pass ended: those who got a token then share one gap
        self._ttft: dict[int, float] = {}
        self._tpot: dict[int, float] = {}
        self._gaps: defaultdict[float, int] = defaultdict(int)
        self.requests = self.finished = self.refused = 0
        self.tokens = self.preemptions = self.recomputed = self.steps = 0
        self.last_finish_s = 0.0
        self.kv_start = self.kv_peak = tenant.kv.usable_blocks
        self.alpha_peak = 0.0

    # -- what SharedEngines asks -----------------------------------------------------------------------------------

    def add_request(self, request: Sequence, *, arrived_s: float) -> None:
        """Queue it. A request that could never fit is counted as refused, as vLLM ignores it; it is cut to the context."""
        self.requests += 1
        prompt = min(request.prompt, self._context - 1)
        sequence = Sequence(self._orders, request.tenant, arrived_s, prompt, 1)
        sequence.end = min(request.end - request.prompt + prompt, self._context)
        self._orders += 1
        # The last token is never fed back, so it needs no place.
        if -(-(sequence.end - 1) // self.tenant.kv.block_tokens) > self._most_blocks:
            self.refused += 1
            return
        self.unfinished += 1
        self.scheduler.add(sequence)

    def give_up(self) -> bool:
        """Refuse the request whose turn it is, if it has the engine to itself and still is too long for the memory. Whether it
        was: what may be remapped is bounded by more than layers, so nobody knew when it came."""
        waiting, kv = self.scheduler.waiting, self.tenant.kv
        if self.scheduler.running or not waiting or -(-waiting[0].length // kv.block_tokens) <= kv.usable_blocks:
            return False
        waiting.popleft()
        self.unfinished -= 1
        self.refused += 1
        return True

    def demand(self) -> Demand:
        """KV blocks wanted beyond those that are held."""
        return Demand(self.scheduler.demand(self._most_blocks))

    def follow(self, moved: Mapping[int, int]) -> None:
        """The session moved blocks."""
        self.scheduler.relocate(moved)

    def preempt(self, blocks: Collection[int]) -> tuple[int, ...]:
        """Free these blocks: whoever holds any of them is preempted. Returns their numbers, youngest first."""
        wanted = frozenset(blocks)
        victims = [one for one in reversed(self.scheduler.running) if not wanted.isdisjoint(one.blocks)]
        for victim in victims:
            self.scheduler.preempt(victim, self.tenant.kv)
        self.preemptions += len(victims)
        return tuple(victim.order for victim in victims)

    def reset_metrics(self, now: float) -> None:
        """Called once, before the run."""

    def advance(self, begin: float | None = None) -> Step:
        """One pass, from its start to its end in virtual time, and the gap behind it."""
        batch, end = self.launch()
        if batch is None:
            self._clock.advance(max(self._gap_s, EMPTY_S))
            return _NOTHING
        self._clock.advance_to(end)
        step = self.land(batch, end)
        self._clock.advance(self._gap_s)
        return step

    # -- a pass ----------------------------------------------------------------------------------------------------

    def launch(self) -> tuple[Batch | None, float]:
        """Schedule, and start the pass. (batch, when it ends); (None, now) if nothing can run."""
        kv = self.tenant.kv
        batch = self.scheduler.schedule(kv)
        self.preemptions += batch.preempted
        self.kv_peak = max(self.kv_peak, kv.usable_blocks)
        self.alpha_peak = max(self.alpha_peak, self.tenant.remapped)
        if not batch:
            return None, self._clock.now
        self.steps += 1
        return batch, self.passes.start(batch, self.slow)

    def land(self, batch: Batch, now: float) -> Step:
        """The pass has ended: its tokens are there."""
        computed = len(batch.rows)
        finished: list[Sequence] = []
        for sequence, start, count in batch.prefills:
            computed += count
            end = start + count
            self.recomputed += max(0, min(end, sequence.high_water) - start)
            sequence.computed = end
            sequence.high_water = max(sequence.high_water, end)
            if end == sequence.length:
                self._token(sequence, now, finished)
        previous, same = self._previous_s, 0
        for sequence in batch.rows:
            length = sequence.length
            sequence.computed = length
            if sequence.high_water < length:
                sequence.high_water = length
            if sequence.last_s == previous:  # the usual case, in few steps: this loop runs once a token
                same += 1
                sequence.last_s = now
                sequence.length = length + 1
                if length + 1 >= sequence.end:
                    finished.append(sequence)
            else:
                self._token(sequence, now, finished)
        if same:
            self._gaps[now - previous] += same
            self.tokens += same
        self._previous_s = now
        for sequence in finished:
            self._finish(sequence, now)
        return Step(computed)

    def _token(self, sequence: Sequence, now: float, finished: list[Sequence]) -> None:
        if sequence.last_s is None:
            sequence.first_s = now
        else:
            self._gaps[now - sequence.last_s] += 1
        sequence.last_s = now
        sequence.length += 1
        self.tokens += 1
        if sequence.length >= sequence.end:
            finished.append(sequence)

    def _finish(self, sequence: Sequence, now: float) -> None:
        self.scheduler.finish(sequence, self.tenant.kv)
        if sequence.state is not State.FINISHED or sequence.first_s is None:
            raise InvalidState(
                f"request {sequence.order} ended without a token; nothing was recorded", order=sequence.order
            )
        self._ttft[sequence.order] = sequence.first_s - sequence.arrival_s
        if sequence.length - sequence.prompt > 1:
            self._tpot[sequence.order] = (now - sequence.first_s) / (sequence.length - sequence.prompt - 1)
        self.unfinished -= 1
        self.finished += 1
        self.last_finish_s = now

    # -- results ---------------------------------------------------------------------------------------------------

    def result(self) -> TenantResult:
        """All of the run."""
        return TenantResult(
            tenant=self.tenant.name,
            requests=self.requests,
            finished=self.finished,
            output_tokens=self.tokens,
            ttft_s=tuple(self._ttft[order] for order in sorted(self._ttft)),
            tbt=ascending(self._gaps),
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed,
            swapped_bytes=self.passes.copied_bytes,
            kv_blocks_start=self.kv_start,
            kv_blocks_peak=self.kv_peak,
            layers_remapped_peak=self.alpha_peak,
            compute_s=self.passes.compute_s,
            stall_s=self.passes.stall_s,
            passes=self.steps,
            tpot_s=tuple(self._tpot[order] for order in sorted(self._tpot)),
        )
