"""Who runs when, in virtual time.

Turns        temporal sharing: one tenant at a time, in turns. `SharedEngines` of the reference engine, as it is; only what it
             records is bounded, and long silences are skipped once nothing changes any more.
Concurrent   spatial sharing: every tenant runs passes of its own as soon as it has work. Passes that overlap share the device
             (processor sharing, as MPS: a pass that begins while k - 1 others compute takes k times as long).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remap.engine.sharing import SharedEngines
from remap.errors import InvalidState
from remap.sim.engine import EMPTY_S, SimEngine
from remap.sim.sequences import Batch
from remap.sim.sequences import Sequence as Request
from remap.sim.timeline import Timeline

__all__ = ["Concurrent", "Turns"]

_NAP_S = 0.01  # how often an idle engine lets the session give pages back
_NAPS = 512  # without any change, after which the rest of a silence is skipped
_STUCK = 4096  # iterations of all tenants in which nothing was computed although requests wait

Progress = Callable[[int], None]
"""(requests finished): called now and then."""


class _Silence:
    """How far to sleep until `until`: naps at first, all the rest once nothing has changed for long."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self.naps = 0

    def sleep(self, until_s: float) -> None:
        self.naps += 1
        self._clock.advance_to(until_s if self.naps > _NAPS else min(until_s, self._clock.now + _NAP_S))


class Turns(SharedEngines):
    """Temporal sharing. clock: `now`, `advance`, `advance_to`."""

    def __init__(
        self,
        session: Any,
        engines: Mapping[str, SimEngine],
        clock: Any,
        *,
        quantum_s: float,
        partial: bool | float = True,
    ) -> None:
        self.timeline = Timeline()
        self.decisions = self.iterations = 0
        self._ticks = clock
        self._silence = _Silence(clock)
        self._stuck = 0
        super().__init__(
            session,
            engines,  # type: ignore[arg-type]
            "temporal",
            quantum_s=quantum_s,
            partial=partial,
            clock=lambda: clock.now,
            sleep=clock.advance,
        )

    def serve(self, requests: Sequence[Request], progress: Progress | None = None) -> None:
        """All requests, each from its arrival on. Raises what the session raises, and InvalidState if nothing gets on."""
        begun = self._started_s = self._ticks.now
        pending = _latest_first(requests)
        finished = 0
        while pending or self.unfinished:
            while pending and begun + pending[-1].arrival_s <= self._ticks.now:
                request = pending.pop()
                self.engines[request.tenant].add_request(request, arrived_s=begun + request.arrival_s)  # type: ignore[arg-type]
            done = self.step()
            self.iterations += bool(done)
            computed = any(step.computed for step in done.values())
            self._stuck = 0 if computed or not self.unfinished else self._stuck + 1
            if self._stuck > _STUCK:
                _give_up(self.engines)
                self._stuck = 0
            if done:
                self._silence.naps = 0
            elif pending:
                self._silence.sleep(begun + pending[-1].arrival_s)
            if progress is not None and (total := sum(one.finished for one in self.engines.values())) > finished:  # type: ignore[attr-defined]
                finished = total
                progress(finished)
        self.timeline.end(self._ticks.now - begun, self.engines)  # type: ignore[arg-type]

    def _rebalance(self) -> None:
        if self.session is None or not self.active:
            return
        report = self.session.step({name: self.engines[name].demand() for name in self.active})
        if report.changed:
            self.decisions += 1
            self._silence.naps = 0
        self._follow(report.moved)

    def _record(self, now: float, ran: Sequence[str]) -> None:
        self.timeline.look(now - self._started_s, self.engines)  # type: ignore[arg-type]

    def _stalls(self) -> dict[str, float]:
        return dict.fromkeys(self.engines, 0.0)


class Concurrent:
    """Spatial sharing, by events: the end of a pass, and arrivals. share_compute False: tenants have partitions of their own."""

    def __init__(
        self, session: Any, engines: Mapping[str, SimEngine], clock: Any, *, gap_s: float, share_compute: bool = True
    ) -> None:
        self.session = session
        self.engines = dict(engines)
        self.timeline = Timeline()
        self.decisions = self.iterations = 0
        self._clock = clock
        self._gap_s = gap_s
        self._share = share_compute
        self._silence = _Silence(clock)

    def serve(self, requests: Sequence[Request], progress: Progress | None = None) -> None:
        """As `Turns.serve`."""
        begun = self._clock.now
        pending = _latest_first(requests)
        # When each engine's host is ready for its next step; those without work are not in it. Equal times: in the order made.
        due: list[tuple[float, int, str]] = []
        flying: dict[str, Batch] = {}
        idle = dict.fromkeys(self.engines, True)
        serial = stuck = finished = 0
        while pending or due:
            arrival = begun + pending[-1].arrival_s if pending else float("inf")
            if not due and arrival > self._clock.now:
                if self._step():
                    self._silence.naps = 0
                self._silence.sleep(arrival)
                self.timeline.look(self._clock.now - begun, self.engines)
                if self._clock.now < arrival:
                    continue
            self._clock.advance_to(min(arrival, due[0][0]) if due else arrival)
            while pending and begun + pending[-1].arrival_s <= self._clock.now:
                request = pending.pop()
                engine = self.engines[request.tenant]
                engine.add_request(request, arrived_s=begun + request.arrival_s)
                if idle[request.tenant] and engine.unfinished:
                    idle[request.tenant] = False
                    serial += 1
                    heapq.heappush(due, (self._clock.now, serial, request.tenant))
            if not due or due[0][0] > self._clock.now:
                continue
            _, _, name = heapq.heappop(due)
            engine = self.engines[name]
            if name in flying:  # its pass has ended; the host needs the gap before it can begin the next one
                engine.land(flying.pop(name), self._clock.now)
                stuck = 0
                serial += 1
                heapq.heappush(due, (self._clock.now + self._gap_s, serial, name))
                if progress is not None and (total := sum(e.finished for e in self.engines.values())) > finished:
                    finished = total
                    progress(finished)
                continue
            self._silence.naps = 0
            if not engine.unfinished:
                idle[name] = True
                continue
            self._step()
            engine.slow = float(len(flying) + 1) if self._share else 1.0
            batch, end = engine.launch()
            self.iterations += 1
            if batch is None:
                stuck += not flying  # while others compute, it may be their memory that it waits for
                if stuck > _STUCK:
                    _give_up(self.engines)
                    stuck = 0
                end = self._clock.now + max(self._gap_s, EMPTY_S)
                if flying and due:  # nothing much can change before one of them lands
                    end = max(end, min(due[0][0], self._clock.now + _NAP_S))
            else:
                flying[name] = batch
            serial += 1
            heapq.heappush(due, (end, serial, name))
            self.timeline.look(self._clock.now - begun, self.engines)
        self.timeline.end(self._clock.now - begun, self.engines)

    def _step(self) -> bool:
        if self.session is None:
            return False
        report = self.session.step({name: engine.demand() for name, engine in self.engines.items()})
        for name, moved in report.moved.items():
            self.engines[name].follow(moved)
        self.decisions += bool(report.changed)
        return bool(report.changed)


def _latest_first(requests: Sequence[Request]) -> list[Request]:
    """Taken from the end: by arrival, and of those that arrive together in the order of the items."""
    return sorted(requests, key=lambda one: (one.arrival_s, one.order), reverse=True)


def _give_up(engines: Mapping[str, Any]) -> None:
    """Refuse what is too long for the memory that there will be. Raises InvalidState if that is not the reason."""
    refused = [engine.give_up() for engine in engines.values()]  # of every tenant that can
    if any(refused):
        return
    waiting = {name: len(engine.scheduler.waiting) for name, engine in engines.items()}
    raise InvalidState(
        f"no request got on for {_STUCK} iterations, {sum(waiting.values())} wait ({waiting}); the run was given up: give the "
        "tenants more memory, or shorter requests",
        waiting=sum(waiting.values()),
    )
