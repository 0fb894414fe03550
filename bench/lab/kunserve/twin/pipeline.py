"""One group of the cluster in virtual time: its stages, its lanes, and the microbatches on their way. Pure.

An instance that serves alone is a group of one stage and one lane. A microbatch goes from stage to stage; a stage computes one at
a time, in the order of their coming; activations go over the network; from the last stage the tokens go back to the first, and
their lane may send the next one. What may be sent is chosen when the first stage has nothing to do, not before.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from remap_serve.cluster.lanes import Lane, Lanes
from remap_serve.cluster.messages import Part
from remap_serve.engine.request import RequestState
from remap_serve.engine.request import Sequence as EngineSequence
from remap_serve.engine.scheduler import Schedule
from remap_serve.policy.cluster.exchange import Priority
from remap_serve.policy.cluster.placement import InstanceLoad
from remap_serve.sim.pools import CountedPool
from remap_serve.sim.sequences import SimSequence, Work

from .events import Events
from .lanes import Cut, OwnLines, allowances, vllm_lane
from .network import Links
from .setup import Hardware

__all__ = ["Pipeline", "Request"]

_TOKEN_BYTES = 8  # of one row's token on its way to the first stage

_order = attrgetter("order")


class Request(SimSequence):
    """A request as its group keeps it. lane: its place among the group's lanes."""

    lane = 0


class _Microbatch:
    __slots__ = ("lane", "schedule", "seconds", "tokens")

    def __init__(self, lane: int, schedule: Schedule, seconds: list[float], tokens: int) -> None:
        self.lane, self.schedule, self.seconds, self.tokens = lane, schedule, seconds, tokens


class Pipeline:
    """stages: none without layers. pool: the group's KV. cut, swap, shares: see `systems.System`. on_token: called with each
    request that got a token, and whether it was its last.

    stage_s: seconds of computing, all stages together; active_s: seconds in which anything was on its way. stalled: requests
    whose KV has not come yet; they hold their blocks, and have no turn.
    """

    def __init__(
        self,
        events: Events,
        links: Links,
        hardware: Hardware,
        stages: Sequence[Part],
        pool: CountedPool,
        *,
        cut: Cut,
        swap: bool,
        shares: bool,
        on_token: Callable[[Request, bool], None],
    ) -> None:
        self.stages = stages
        self.names = [stage.instance for stage in stages]
        self._layers = [stage.end - stage.first for stage in stages]
        self._events, self._links, self._hardware = events, links, hardware
        self.pool = pool
        self._on_token = on_token
        self.lanes = [vllm_lane(pool.block_tokens, hardware.chunk_cost, swap) for _ in stages]
        self._by_cost = cut == "balanced"
        self._shares = shares
        taken = allowances(hardware.chunk_cost, cut, len(stages))
        self._schedulers = (Lanes if shares else OwnLines)(self.lanes, taken, self._decoding_s)
        self._ready_s = [0.0] * len(stages)
        self._busy = [False] * len(stages)
        self._line: list[deque[_Microbatch]] = [deque() for _ in stages]
        self._next = 0
        self._closed: Callable[[Pipeline], None] | None = None
        self._between: list[Callable[[], None]] = []
        self.stalled: dict[Request, None] = {}
        self.computed_tokens = self.recomputed_tokens = self.preemptions = 0
        self.stage_s = self.active_s = 0.0
        self._active_since_s: float | None = None

    # -- Requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request without KV. It goes to the lane with the least to do."""
        request.lane = self._least()
        lane = self.lanes[request.lane]
        request.state = RequestState.WAITING
        # At the end, unless it came before some that wait: it ran elsewhere.
        insort(lane.waiting, request, key=_order)
        self.pump()

    def hold(self, request: Request) -> None:
        """A request whose KV is on its way here; its blocks are allocated."""
        request.lane = self._least()
        self.stalled[request] = None

    def resume(self, request: Request) -> None:
        """Its KV has come."""
        del self.stalled[request]
        request.state = RequestState.RUNNING
        lane = self._schedulers.emptiest() if self._shares else self.lanes[request.lane]
        insort(lane.running, request, key=_order)
        self.pump()

    def _least(self) -> int:
        """The lane with the least to do: of prompts, as they are computed once, else of requests."""
        if len(self.lanes) == 1 or self._shares:
            return 0
        counts = [_sequences(lane) for lane in self.lanes]
        for request in self.stalled:
            counts[request.lane] += 1
        if not self._by_cost:
            return min(range(len(counts)), key=lambda place: counts[place])
        work = [self._work_s(lane) for lane in self.lanes]
        return min(range(len(counts)), key=lambda place: (round(work[place], 1), counts[place]))

    def _work_s(self, lane: Lane) -> float:
        """What its prompts cost, for who comes next."""
        cost = self._hardware.chunk_cost
        return math.fsum(cost.chunk(one.computed, one.length - one.computed) for one in lane.prompts())

    @property
    def requests(self) -> list[Request]:
        """All that are here, in the order in which they came to the cluster."""
        found = [one for lane in self.lanes for one in (*lane.running, *lane.arriving)]
        found += [one for line in self._schedulers.lines for one in line]
        return sorted([*found, *self.stalled], key=_order)  # type: ignore[list-item]

    @property
    def load(self) -> InstanceLoad:
        """As a head reports it."""
        return self._schedulers.load(one.length for one in self.stalled)

    # -- Passes --------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send the next microbatch if the first stage has nothing to do and a lane has something."""
        if self._busy[0] or self._closed is not None:
            return
        count = len(self.lanes)
        now, later = self._events.now, math.inf
        for turn in range(count):
            number = (self._next + turn) % count
            if number in self._schedulers.flying:
                continue
            if self._ready_s[number] > now:
                later = min(later, self._ready_s[number])
            elif self._launch(number):
                self._next = (number + 1) % count
                return
        if later < math.inf:
            self._events.at(later, self.pump)

    def _launch(self, number: int) -> bool:
        lane, pool = self.lanes[number], self.pool
        self._schedulers.gather(number)
        if not _sequences(lane):
            return False
        while pool.live_blocks > pool.usable_blocks and lane.running:
            self.preemptions += 1
            lane.preempt(lane.running[-1], pool)  # type: ignore[arg-type]
        self._schedulers.allow(number)
        schedule = lane.schedule(pool)  # type: ignore[arg-type]
        self.preemptions += len(schedule.preempted)
        if not schedule.chunks:
            return False
        self.recomputed_tokens += self._schedulers.launched(number, schedule)
        work = Work.of(schedule.chunks)
        hardware = self._hardware
        layer_s = hardware.layers_s(1, work)
        seconds = [layers * layer_s for layers in self._layers]
        seconds[-1] += hardware.ends_s(work)
        self.stage_s += sum(seconds)
        if len(self.lanes) == 1:
            seconds[0] += hardware.machine.iteration_gap_s
        begin = getattr(pool, "wait_s", 0.0)
        if begin > self._events.now:  # KV that comes back from the host is waited for
            seconds[0] += begin - self._events.now
        self.computed_tokens += schedule.tokens
        microbatch = _Microbatch(number, schedule, seconds, work.tokens)
        if self._active_since_s is None:
            self._active_since_s = self._events.now
        self._compute(microbatch, 0)
        return True

    def _decoding_s(self, decoding: Iterable[EngineSequence]) -> float:
        """What decoding takes of these, in all layers."""
        rows = context = 0
        for one in decoding:
            rows += 1
            context += one.length
        work = Work(0, 0, rows, context, rows)
        return self._hardware.layers_s(sum(self._layers), work) if rows else 0.0

    def _compute(self, microbatch: _Microbatch, stage: int) -> None:
        self._busy[stage] = True
        self._events.after(microbatch.seconds[stage], lambda: self._computed(microbatch, stage))

    def _computed(self, microbatch: _Microbatch, stage: int) -> None:
        self._busy[stage] = False
        last = len(self.names) - 1
        if stage < last:
            size = self._hardware.hop_bytes(microbatch.tokens)
            self._send(stage, stage + 1, size, lambda: self._came(microbatch, stage + 1))
        elif last:
            size = _TOKEN_BYTES * len(microbatch.schedule.chunks)
            self._send(last, 0, size, lambda: self._land(microbatch))
        else:
            self._land(microbatch)
        if self._line[stage]:
            self._compute(self._line[stage].popleft(), stage)
        elif stage == 0:
            self.pump()

    def _send(self, source: int, target: int, size: int, done: Callable[[], None]) -> None:
        self._links.send(self.names[source], self.names[target], size, Priority.ACTIVATION, done)

    def _came(self, microbatch: _Microbatch, stage: int) -> None:
        if self._busy[stage]:
            self._line[stage].append(microbatch)
        else:
            self._compute(microbatch, stage)

    def _land(self, microbatch: _Microbatch) -> None:
        """The tokens are known."""
        lane, now = self.lanes[microbatch.lane], self._events.now
        for chunk in self._schedulers.landed(microbatch.lane).chunks:
            request = chunk.sequence
            self.recomputed_tokens += lane.commit(chunk)
            if request.first_s is None:
                request.first_s = now
            request.last_s = now
            ended = request.append(0) is not None
            if ended:
                lane.finish(request, self.pool)  # type: ignore[arg-type]
            elif chunk.count > 1:
                self._schedulers.settle(microbatch.lane, request)
            self._on_token(request, ended)  # type: ignore[arg-type]
        if len(self.lanes) > 1:
            self._ready_s[microbatch.lane] = now + self._hardware.machine.iteration_gap_s
        if not self._schedulers.flying and self._active_since_s is not None:
            self.active_s += now - self._active_since_s
            self._active_since_s = None
        if not self._schedulers.flying:
            calls, self._between = self._between, []
            for call in calls:
                call()
        if self._closed is not None:
            self._close_if_landed()
        else:
            self.pump()

    # -- Ends ----------------------------------------------------------------------------------------------------------

    def close(self, closed: Callable[[Pipeline], None]) -> None:
        """Send nothing more, and say when everything has landed: the next pass boundary."""
        self._closed = closed
        self._close_if_landed()

    def _close_if_landed(self) -> None:
        if not self._schedulers.flying and self._closed is not None:
            self._closed(self)

    def take(self, request: Request) -> int:
        """Take a request out between passes, wherever it is. Returns the blocks that it had, which are free now."""
        blocks = len(request.blocks)
        if request in self.stalled:
            del self.stalled[request]
        for lane in self.lanes:
            if request in lane.running:
                lane.running.remove(request)
        for line in self._schedulers.lines:
            if request in line:
                line.remove(request)
        self.pool.free(request.blocks)
        request.blocks = []
        return blocks

    def between(self, call: Callable[[], None]) -> None:
        """Call it when nothing is on its way: now, or before the next microbatch is sent."""
        if self._schedulers.flying:
            self._between.append(call)
        else:
            call()


def _sequences(lane: Lane) -> int:
    """Those that have a turn here."""
    return len(lane.running) + len(lane.waiting) + len(lane.arriving)
