# SPDX-License-Identifier: Apache-2.0
"""One simulated engine: the reference engine's loop (remap_serve.engine.engine), whose passes take time and compute nothing.

Its own: requests have lengths (`workload.Item`), are cut to the context and refused where a real engine would raise; a
gap follows each pass; and the records are bounded, since runs are long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from remap.policy.views import Demand
from remap_serve.engine.engine import Engine, StepOutput
from remap_serve.engine.request import Output
from remap_serve.engine.request import Sequence as EngineSequence
from remap_serve.engine.scheduler import Schedule, Scheduler
from remap_serve.sim.passes import Pass
from remap_serve.sim.results import TenantResult, ascending
from remap_serve.sim.sequences import SimSequence
from remap_serve.sim.workload import Item

__all__ = ["EMPTY_S", "SimEngine"]

EMPTY_S = 0.001
"""The least time of an iteration that found nothing to run: were the gap 0, time would stand still, and with it what is
waited for."""


class SimEngine(Engine):
    """Continuous batching of one tenant in virtual time.

    tenant: name, kv (a pool), remapped, lent_pages: a session's tenant, or a stand-in. session: None if its memory never
    changes through one. clock: the backend, or a `VirtualClock`: now, advance_to(t), advance(s). gap_s: between two passes, the
    host's time for scheduling and sampling. most_blocks: the most that the pool could ever hold.
    """

    runner: Pass

    def __init__(
        self,
        tenant: Any,
        scheduler: Scheduler,
        runner: Pass,
        clock: Any,
        *,
        session: Any = None,
        gap_s: float,
        most_blocks: int,
        context: int,
    ) -> None:
        super().__init__(tenant, scheduler, runner, session=session, clock=lambda: clock.now)
        self._virtual = clock
        self._gap_s = gap_s
        self._most_blocks = most_blocks
        self._context = context

    def reset_metrics(self, now: float | None = None) -> None:
        super().reset_metrics(now)
        self.requests = self.refused = 0
        self.kv_peak = self.metrics.kv_blocks_start
        self.used_peak = 0
        self.alpha_peak = 0.0
        self._done: list[EngineSequence] = []

    def add_request(self, request: Item, *, arrived_s: float | None = None) -> None:
        """Queue it. A request that could never fit is counted as refused, as vLLM ignores it; it is cut to the context."""
        self.requests += 1
        prompt = min(request.prompt_tokens, self._context - 1)
        output = min(request.output_tokens, self._context - prompt)
        # The last token is never fed back, so it needs no place.
        if self.scheduler.blocks_for(prompt + output - 1) > self._most_blocks:
            self.refused += 1
        else:
            arrived_s = self._virtual.now if arrived_s is None else arrived_s
            self._queue(SimSequence(next(self._orders), prompt, output, arrived_s))

    def give_up(self) -> bool:
        """Refuse the request whose turn it is, if it has the engine to itself and still is too long for the memory. Whether it
        was: more than layers bounds remapping, so the engine did not know when it came."""
        scheduler, kv = self.scheduler, self.tenant.kv
        first = next(iter(scheduler.queued()), None)
        if scheduler.running or first is None or scheduler.blocks_for(first.length) <= kv.usable_blocks:
            return False
        self._drop(first)
        self.refused += 1
        return True

    def demand(self) -> Demand:
        wanted = super().demand()
        return replace(wanted, blocks=min(wanted.blocks, self._most_blocks))

    def advance(self, begin: float | None = None) -> StepOutput:
        """One pass, from its start to its end in virtual time, and the gap behind it."""
        step = super().advance(begin)
        self._virtual.advance(self._gap_s if step.computed else max(self._gap_s, EMPTY_S))
        return step

    @property
    def last_finish_s(self) -> float:
        """When the last of those that have finished did; 0 if none has."""
        return max((one.last_s or 0.0 for one in self._done), default=0.0)

    def result(self) -> TenantResult:
        """All since the metrics began; of the passes, all there were."""
        metrics, runner = self.metrics, self.runner
        done = sorted(self._done, key=lambda one: int(one.id))  # in the order in which they came
        timed = [(one, one.arrived_s, one.first_s or 0.0, one.last_s or 0.0) for one in done]
        return TenantResult(
            tenant=self.tenant.name,
            requests=self.requests,
            finished=metrics.finished,
            output_tokens=metrics.generated_tokens,
            ttft_s=tuple(first - arrived for _, arrived, first, _ in timed),
            tbt=ascending(metrics.gaps),
            preemptions=metrics.preemptions,
            recomputed_tokens=metrics.recomputed_tokens,
            swapped_bytes=runner.copied_bytes,
            swapped_out_bytes=runner.copied_out_bytes,
            pauses=metrics.pauses,
            kv_blocks_start=metrics.kv_blocks_start,
            kv_blocks_peak=self.kv_peak,
            kv_used_peak=self.used_peak,
            layers_remapped_peak=self.alpha_peak,
            compute_s=runner.compute_s,
            stall_s=runner.stall_s,
            passes=runner.passes,
            tpot_s=tuple(
                (last - first) / (one.generated - 1) if one.generated > 1 else None for one, _, first, last in timed
            ),
            longest_gap_s=tuple(one.longest_s if one.generated > 1 else None for one in done),
        )

    def _finish(self, sequence: EngineSequence, reason: str) -> Output:
        self._done.append(sequence)
        return super()._finish(sequence, reason)

    def _record(self, begin: float, schedule: Schedule) -> None:
        """`timeline.Timeline` looks at all tenants at once, after each step of any."""

    def _check_progress(self, progressed: bool) -> None:
        """The caller that runs the engines watches for that, and has requests refused (`give_up`)."""
