# SPDX-License-Identifier: Apache-2.0
"""The order of the engines' runs, in virtual time.

Turns        epochs, or temporal sharing: memory in turns. `SharedEngines` of the reference engine, as it is; only what it
             records is bounded, and long silences are skipped once nothing changes any more.
Concurrent   spatial sharing: every tenant runs passes of its own as soon as it has work. Passes that overlap share the device
             (processor sharing, as MPS: a pass that begins while k - 1 others compute takes k times as long). The reference
             engine's rounds are one pass after the other, so the order of events is written here; all else is `SharedEngines`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from remap.errors import InvalidState
from remap_serve.engine.engine import StepOutput
from remap_serve.engine.scheduler import Schedule
from remap_serve.engine.sharing import SharedEngines, latest_first
from remap_serve.sim.engine import EMPTY_S, SimEngine
from remap_serve.sim.passes import sampled
from remap_serve.sim.timeline import Timeline
from remap_serve.sim.workload import Item

__all__ = ["Concurrent", "Serving", "TurnServing"]

_NAP_S = 0.01  # how often an idle engine lets the session give pages back
_NAPS = 512  # without any change, after which the rest of a silence is skipped
_STUCK = 4096  # iterations of all tenants in which nothing was computed although requests wait

Progress = Callable[[int], None]
"""(requests finished): called now and then."""


class Serving(SharedEngines):
    """Serves requests until all have finished. clock: `now`, `advance`, `advance_to`."""

    def __init__(self, session: Any, engines: Mapping[str, SimEngine], clock: Any, mode: str, **settings: Any) -> None:
        self.timeline = Timeline()
        self.decisions = self.iterations = 0
        self._virtual = clock
        self._simulated = dict(engines)
        self._naps = 0  # since something changed last
        self._stuck = 0
        super().__init__(session, engines, mode, clock=lambda: clock.now, **settings)

    def serve(self, items: Sequence[Item], progress: Progress | None = None) -> None:
        """All requests, each from its arrival on. Raises what the session raises, and InvalidState if nothing gets on."""
        self._begin_measuring()
        told = 0
        for _ in self._serve([(item.time_s, item.tenant, item) for item in items]):
            finished = sum(engine.metrics.finished for engine in self._simulated.values())
            if progress is not None and finished > told:
                told = finished
                progress(finished)
        self.timeline.end(self.seconds, self._simulated)

    def _rebalance(self) -> Any:
        report = super()._rebalance()
        if report is not None and report.changed:
            self.decisions += 1
            self._naps = 0
        return report

    def _nap(self, until_s: float) -> None:
        """Short naps at first, all the rest of the silence once nothing has changed for long."""
        self._naps += 1
        self._virtual.advance_to(until_s if self._naps > _NAPS else min(until_s, self._virtual.now + _NAP_S))

    def _record(self, now: float, ran: Sequence[str]) -> None:
        self.timeline.look(now - self._started_s, self._simulated)

    def _watch(self, stuck: bool) -> None:
        """Refuse requests that are too long for the memory that there will be. Raises InvalidState if that is not the reason."""
        self._stuck = self._stuck + 1 if stuck else 0
        if self._stuck <= _STUCK:
            return
        self._stuck = 0
        refused = [engine.give_up() for engine in self._simulated.values()]  # of every tenant that can
        if any(refused):
            return
        waiting = {name: sum(1 for _ in engine.scheduler.queued()) for name, engine in self.engines.items()}
        raise InvalidState(
            f"no request got on for {_STUCK} iterations, {sum(waiting.values())} wait ({waiting}); the run was given up: give "
            "the tenants more memory, or shorter requests",
            waiting=sum(waiting.values()),
        )


class TurnServing(Serving):
    """Memory in turns. mode: "epochs" or "temporal" (SharedEngines')."""

    def __init__(
        self,
        session: Any,
        engines: Mapping[str, SimEngine],
        clock: Any,
        mode: str,
        *,
        quantum_s: float,
        partial: bool | float | None = None,
    ) -> None:
        super().__init__(session, engines, clock, mode, quantum_s=quantum_s, partial=partial)

    def step(self) -> dict[str, StepOutput]:
        done = super().step()
        if done:
            self.iterations += 1
            self._naps = 0
        self._watch(self._idle_step)
        return done


class Concurrent(Serving):
    """Spatial sharing, by events: the end of a pass, and arrivals."""

    def __init__(self, session: Any, engines: Mapping[str, SimEngine], clock: Any, *, gap_s: float) -> None:
        super().__init__(session, engines, clock, "spatial")
        self._gap_s = gap_s

    def _serve(self, requests: Iterable[tuple[float, str, Item]]) -> Iterator[dict[str, StepOutput]]:
        pending = latest_first(requests)
        # When each engine's host is ready for its next step; those without work are not in it. Equal times: in the order made.
        due: list[tuple[float, int, str]] = []
        flying: dict[str, Schedule] = {}
        idle = dict.fromkeys(self.engines, True)
        serial = 0
        clock = self._virtual

        def wake(time_s: float, name: str) -> None:
            nonlocal serial
            serial += 1
            heapq.heappush(due, (time_s, serial, name))

        while pending or due:
            arrival = self._started_s + pending[-1][0] if pending else float("inf")
            if not due and arrival > clock.now:
                self._rebalance()
                self._nap(arrival)
                self._record(clock.now, ())
                if clock.now < arrival:
                    continue
            clock.advance_to(min(arrival, due[0][0]) if due else arrival)
            for name in self._let_in(pending):
                if idle[name] and self.engines[name].unfinished:
                    idle[name] = False
                    wake(clock.now, name)
            if not due or due[0][0] > clock.now:
                continue
            _, _, name = heapq.heappop(due)
            engine = self._simulated[name]
            if name in flying:  # its pass has ended; the host needs the gap before it can begin the next one
                schedule = flying.pop(name)
                step = engine.land(schedule, *sampled(schedule.chunks), clock.now)
                self._watch(False)
                wake(clock.now + self._gap_s, name)
                yield {name: step}
                continue
            self._naps = 0
            if not engine.unfinished:
                idle[name] = True
                continue
            self._rebalance()
            schedule = engine.launch()
            self.iterations += 1
            if schedule.chunks:
                engine.runner.slow = float(len(flying) + 1)
                flying[name] = schedule
                end = engine.runner.start(schedule.chunks)
            else:
                if not flying:  # while others compute, it may be their memory that it waits for
                    self._watch(True)
                end = clock.now + max(self._gap_s, EMPTY_S)
                if flying and due:  # nothing much can change before one of them lands
                    end = max(end, min(due[0][0], clock.now + _NAP_S))
            wake(end, name)
            self._record(clock.now, (name,))
