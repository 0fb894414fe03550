"""One group of the cluster in virtual time: its stages, its lanes, and the microbatches on their way. Pure.

An instance that serves alone is a group of one stage and one lane. A microbatch goes from stage to stage; a stage computes one at
a time, in the order of their coming; activations go over the network; from the last stage the tokens go back to the first, and
their lane may send the next one. What may be sent is chosen when the first stage has nothing to do, not before.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from remap.cluster.messages import Part
from remap.engine.request import Sequence as EngineSequence
from remap.engine.request import State
from remap.engine.scheduler import Schedule
from remap.policy.cluster.exchange import Priority
from remap.policy.cluster.placement import Load
from remap.sim.pools import CountedPool
from remap.sim.sequences import Sequence as SimSequence
from remap.sim.sequences import Work

from .events import Events
from .lanes import Cut, Lane, Lookahead
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

    def ends(self, request: EngineSequence) -> bool:
        """Whether it has the last part of this prompt."""
        return any(chunk.sequence is request and chunk.end == request.length for chunk in self.schedule.chunks)


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
        self.lanes = [Lane(pool.block_tokens, hardware.chunk_cost, swap) for _ in stages]
        self._lookahead = Lookahead(hardware, cut, self.lanes)
        self._by_cost = cut == "balanced"
        self._shares = shares and len(stages) > 1
        if self._shares:
            for lane in self.lanes[1:]:
                lane.waiting = self.lanes[0].waiting
        self._flying: list[_Microbatch | None] = [None] * len(stages)
        self._ready_s, self._decode_s = [0.0] * len(stages), [0.0] * len(stages)
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
        request.state = State.WAITING
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
        request.state = State.RUNNING
        lane = self._emptiest() if self._shares else self.lanes[request.lane]
        insort(lane.running, request, key=_order)
        self.pump()

    def _least(self) -> int:
        """The lane with the least to do: of prompts, as they are computed once, else of requests."""
        if len(self.lanes) == 1 or self._shares:
            return 0
        counts = [lane.sequences for lane in self.lanes]
        for request in self.stalled:
            counts[request.lane] += 1
        if not self._by_cost:
            return min(range(len(counts)), key=lambda place: counts[place])
        work = [lane.work_s() for lane in self.lanes]
        return min(range(len(counts)), key=lambda place: (round(work[place], 1), counts[place]))

    @property
    def _lines(self) -> list[deque[Request]]:
        """Of those that wait; lanes that share have one."""
        lanes = self.lanes[:1] if self._shares else self.lanes
        return [lane.waiting for lane in lanes]  # type: ignore[misc]

    @property
    def requests(self) -> list[Request]:
        """All that are here, in the order in which they came to the cluster."""
        found = [one for lane in self.lanes for one in (*lane.running, *lane.arriving)]
        found += [one for line in self._lines for one in line]
        return sorted([*found, *self.stalled], key=_order)  # type: ignore[list-item]

    @property
    def load(self) -> Load:
        """As a head reports it: in whole blocks, since that is what they take, or will."""
        size = self.pool.block_tokens
        running = [*(one for lane in self.lanes for one in (*lane.running, *lane.arriving)), *self.stalled]
        waiting = sorted((one.order, -(-one.length // size) * size) for line in self._lines for one in line)
        return Load(
            len(running), sum(-(-one.length // size) for one in running) * size, tuple(tokens for _, tokens in waiting)
        )

    # -- Passes --------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send the next microbatch if the first stage has nothing to do and a lane has something."""
        if self._busy[0] or self._closed is not None:
            return
        count = len(self.lanes)
        now, later = self._events.now, math.inf
        for turn in range(count):
            number = (self._next + turn) % count
            if self._flying[number] is not None:
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
        if self._shares:
            self._gather(lane)
        if not lane.sequences:
            return False
        while pool.live_blocks > pool.usable_blocks and lane.running:
            self.preemptions += 1
            lane.preempt(lane.running[-1], pool)  # type: ignore[arg-type]
        self._lookahead.allow(lane, self._decoding_s(number))
        schedule = lane.schedule(pool)  # type: ignore[arg-type]
        self.preemptions += len(schedule.preempted)
        if not schedule.chunks:
            return False
        for chunk in schedule.chunks:
            # The next part of a prompt may follow at once, whatever lane it is in: it passes each stage behind this one. What is
            # preempted meanwhile has lost this part, too, and nothing more happens when that lands.
            if chunk.end < chunk.sequence.length:
                self.recomputed_tokens += lane.commit(chunk)
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
        self._flying[number] = microbatch
        self._compute(microbatch, 0)
        return True

    def _gather(self, lane: Lane) -> None:
        """Prompts that are computed in part go on in this lane, and so do all that wait."""
        for number, other in enumerate(self.lanes):
            flying = self._flying[number]
            for request in [one for one in other.running if one.length - one.computed > 1]:
                last = flying is not None and flying.ends(request)
                if other is not lane and not last:
                    other.running.remove(request)
                    insort(lane.running, request, key=_order)

    def _settle(self, request: Request) -> None:
        """From now on it decodes: where the fewest do."""
        source = next(lane for lane in self.lanes if request in lane.running)
        source.running.remove(request)
        insort(self._emptiest().running, request, key=_order)

    def _emptiest(self) -> Lane:
        """The lane in which the fewest requests decode."""
        return min(self.lanes, key=lambda lane: sum(one.length - one.computed == 1 for one in lane.running))

    def _decoding_s(self, number: int) -> list[float]:
        """What decoding takes in each lane, in all layers: of this one now, of the others as they were sent."""
        if self._by_cost and len(self.lanes) > 1:
            rows = context = 0
            for one in self.lanes[number].running:
                if one.length - one.computed == 1:
                    rows += 1
                    context += one.length
            work = Work(0, 0, rows, context, rows)
            self._decode_s[number] = self._hardware.layers_s(sum(self._layers), work) if rows else 0.0
        return self._decode_s

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
        for chunk in microbatch.schedule.chunks:
            request = chunk.sequence
            if chunk.start + chunk.count == request.length:
                self.recomputed_tokens += lane.commit(chunk)
                if request.first_s is None:
                    request.first_s = now
                request.last_s = now
                ended = request.append(0) is not None
                if ended:
                    lane.finish(request, self.pool)  # type: ignore[arg-type]
                elif self._shares and chunk.count > 1:
                    self._settle(request)  # type: ignore[arg-type]
                self._on_token(request, ended)  # type: ignore[arg-type]
        self._flying[microbatch.lane] = None
        if len(self.lanes) > 1:
            self._ready_s[microbatch.lane] = now + self._hardware.machine.iteration_gap_s
        if not any(self._flying) and self._active_since_s is not None:
            self.active_s += now - self._active_since_s
            self._active_since_s = None
        if not any(self._flying):
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
        if not any(self._flying) and self._closed is not None:
            self._closed(self)

    def take(self, request: Request) -> int:
        """Take a request out between passes, wherever it is. Returns the blocks that it had, which are free now."""
        blocks = len(request.blocks)
        if request in self.stalled:
            del self.stalled[request]
        for lane in self.lanes:
            if request in lane.running:
                lane.running.remove(request)
        for line in self._lines:
            if request in line:
                line.remove(request)
        self.pool.free(request.blocks)
        request.blocks = []
        return blocks

    def between(self, call: Callable[[], None]) -> None:
        """Call it when nothing is on its way: now, or before the next microbatch is sent."""
        if any(self._flying):
            self._between.append(call)
        else:
            call()
