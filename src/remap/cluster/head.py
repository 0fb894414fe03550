"""The scheduler of a group: who runs in which microbatch. It computes nothing itself.

A pipeline of g stages is full while g microbatches are on their way. So a head has as many *lanes* as its group has stages:
each lane is a production engine loop (`engine.Engine`, with its own `Scheduler`) of which at most one pass is in flight.
They share the group's blocks. Between launching and landing a lane's sequences are left alone: what another lane frees or
takes meanwhile are other blocks, and all microbatches pass all stages in the order of launching, so a block that is freed by
one that has landed can be written by the next one.

New requests go to the lane whose requests cost least to compute now, and prompts are cut so that microbatches cost about the
same (`policy.cluster.lookahead`), since the largest one sets the pace of all stages.

An instance alone has one lane over its own blocks (`tenant.kv`), and asks its session before each pass, as `Engine.step` does.
One thread owns a head.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from remap.cluster.messages import Tokens
from remap.engine.engine import Engine
from remap.engine.request import Sequence
from remap.engine.scheduler import TILE, Schedule, Scheduler
from remap.errors import OutOfBlocks
from remap.policy.cluster.lookahead import ChunkCost, Waiting, lookahead
from remap.policy.cluster.placement import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Sequence as Listed

    from remap.engine.chunk import Chunk
    from remap.engine.request import Request

__all__ = ["Head", "Launch", "Limits"]

MEASURED_STEPS = 4096
"""Passes of a lane until its metrics begin anew."""

LOOKED_AT = 64
"""Requests whose prompts are divided in advance, at most: `lookahead` takes longer the more there are."""


@dataclass(frozen=True)
class Limits:
    """What requests and passes are held to. vocabulary, positions: of the model. max_num_seqs: running in each lane.
    max_batch_tokens: of a microbatch. decode_cost: see `Scheduler`."""

    vocabulary: int
    positions: int
    max_num_seqs: int = 32
    max_batch_tokens: int = 512
    decode_cost: int = 0


class Launch(NamedTuple):
    """A microbatch to compute: its lane, and its chunks in the order of `decode_first`."""

    lane: int
    schedule: Schedule


class _Lane(Engine):
    """One lane. blocked: whether others than its own requests may be why it has no blocks."""

    def __init__(self, tenant: Any, session: Any, limits: Limits, blocked: Callable[[], bool]) -> None:
        scheduler = Scheduler(
            block_tokens=tenant.kv.block_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_batch_tokens=limits.max_batch_tokens,
            decode_cost=limits.decode_cost,
        )
        runner: Any = None  # the stages compute
        super().__init__(tenant, scheduler, runner, session=session)
        self._limits = limits
        self._blocked = blocked

    def add_request(self, request: Sequence, *, arrived_s: float | None = None) -> None:
        """Queue a sequence. Raises InvalidArgument, with nothing changed, for one that the model cannot serve."""
        self._require_servable(request.request, self._limits.vocabulary, self._limits.positions)
        self._queue(request)

    def adopt(self, sequence: Sequence) -> None:
        """It runs on: its blocks hold its KV."""
        self._live[sequence.id] = sequence
        self.scheduler.adopt(sequence)

    def again(self, sequence: Sequence) -> None:
        """Queue a sequence that was accepted before; its KV is computed again."""
        self._queue(sequence)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All unfinished ones."""
        return tuple(self._live.values())

    def _record(self, begin: float, schedule: Schedule) -> None:
        """No timeline, and measurements of the last passes only: a server runs for months."""
        self.metrics.steps += 1
        if self.metrics.steps >= MEASURED_STEPS:
            self.reset_metrics()

    def _check_progress(self, progressed: bool) -> None:
        super()._check_progress(progressed or self._blocked())


class _Shared:
    """What a lane of a group sees as its tenant."""

    remapped = 0

    def __init__(self, name: str, kv: Any) -> None:
        self.name = name
        self.kv = kv


class Head:
    """See the module. tenant: `name` and `kv`; of a group, kv is its `GroupPool`. session: of the instance. lanes: as many as
    the group has stages with layers. cost: of a pass through all layers."""

    def __init__(
        self, tenant: Any, session: Any, lanes: int, limits: Limits, cost: ChunkCost, *, kv: Any = None
    ) -> None:
        self.kv = tenant.kv if kv is None else kv
        self._alone = kv is None
        self._session = session
        self._limits = limits
        self._cost = cost
        seen = tenant if kv is None else _Shared(tenant.name, kv)
        self._lanes = [_Lane(seen, session, limits, self._blocked) for _ in range(lanes)]
        self._of: dict[str, _Lane] = {}
        self._attempts: dict[str, int] = {}
        self._cancelled: set[str] = set()
        self._flying: dict[int, Schedule] = {}
        self._orders = count()
        self.exchanging = False
        """KV of requests is on its way: blocks may become free that no lane has, and none may move."""
        self.draining = False
        """Launch nothing more."""
        self.stuck: tuple[str, int] | None = None
        """A request that found no blocks although nobody else has any, and the tokens that it asks for. It waits: for a pool that
        grows, for a larger group, or for `give_up`."""

    # -- requests ----------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, attempt: int, tokens: Iterable[int] = ()) -> None:
        """Queue a request behind the tokens that it has generated until now. Raises InvalidArgument, with nothing queued, for one
        that the model cannot serve, or whose id is in use."""
        sequence = Sequence.of(request, next(self._orders), time.perf_counter())
        sequence.tokens += tokens
        lane = self._of.get(request.id) or self._least()  # the lane that has the id already says so
        lane.add_request(sequence)
        self._of[request.id], self._attempts[request.id] = lane, attempt

    def adopt(self, request: Request, attempt: int, tokens: Iterable[int], computed: int, blocks: list[int]) -> None:
        """A request of another head runs on: these blocks hold the KV of `computed` of its tokens. Without any it waits."""
        sequence = Sequence.of(request, next(self._orders), time.perf_counter())
        sequence.tokens += tokens
        lane = self._least()
        self._of[request.id], self._attempts[request.id] = lane, attempt
        if not computed:
            lane.again(sequence)
            return
        sequence.computed = sequence.high_water = computed
        sequence.blocks = blocks
        lane.adopt(sequence)

    def cancel(self, id: str) -> list[Tokens]:
        """Take a request out, after its pass if one is in flight: its end, with the reason "abort". Unknown ids are ignored."""
        lane = self._of.get(id)
        if lane is None:
            return []
        if self._lanes.index(lane) in self._flying:
            self._cancelled.add(id)
            return []
        return self._end(lane, id, "abort")

    def give_up(self, id: str) -> list[Tokens]:
        """End a request that is stuck: its end, with the reason "out_of_blocks". Others are ignored."""
        return self._end(self._of[id], id, "out_of_blocks") if self._is_stuck(id) else []

    def _is_stuck(self, id: str) -> bool:
        return self.stuck is not None and self.stuck[0] == id

    def _end(self, lane: _Lane, id: str, reason: str) -> list[Tokens]:
        output = lane.abort(id)
        del self._of[id]
        if self._is_stuck(id):
            self.stuck = None
        return [Tokens(id, self._attempts.pop(id), len(output.tokens), (), reason)]

    def leave(self) -> list[tuple[Sequence, int]]:
        """All unfinished requests, the oldest first, with their attempts. Call it when nothing is in flight; then this head is
        of no more use. Their blocks stay allocated."""
        found = sorted((one for lane in self._lanes for one in lane.sequences), key=lambda one: one.arrived_s)
        return [(one, self._attempts[one.id]) for one in found]

    @property
    def requests(self) -> tuple[tuple[str, int], ...]:
        """(id, attempt) of all unfinished ones."""
        return tuple(self._attempts.items())

    def load(self) -> Load:
        """Of all lanes, in tokens of KV."""
        running = [one for lane in self._lanes for one in lane.scheduler.running]
        waiting = sorted((one for lane in self._lanes for one in lane.scheduler.waiting), key=lambda one: one.arrived_s)
        return Load(len(running), sum(one.computed for one in running), tuple(one.length for one in waiting))

    # -- passes ------------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Microbatches that were launched and have not landed."""
        return len(self._flying)

    @property
    def idle(self) -> bool:
        """Nothing is in flight, and there is nothing to do."""
        return not self._of

    def launch(self) -> Launch | None:
        """The next microbatch, of a lane that has none in flight; None if none can be launched now.

        What the session raises passes through; nothing was launched then, and it can be called again.
        """
        if self.draining:
            return None
        for number, lane in enumerate(self._lanes):
            if number in self._flying or not lane.unfinished:
                continue
            if self._alone and not self.exchanging:
                self.rest()
            lane.scheduler.max_batch_tokens = self._budget(lane)
            schedule = lane.launch()
            if schedule.chunks:
                self.stuck = None
                self._flying[number] = schedule
                return Launch(number, schedule)
            try:
                lane.land(schedule, (), (), 0.0)
            except OutOfBlocks as error:
                self.stuck = str(error.fields["request"]), int(str(error.fields["requested"])) * self.kv.block_tokens
        return None

    def preempt(self) -> bool:
        """Between passes: the youngest request that has blocks loses them, and is recomputed. False if there is none."""
        running = [one for lane in self._lanes for one in lane.scheduler.running]
        if not running:
            return False
        victim = max(running, key=lambda one: one.arrived_s)
        self._of[victim.id].scheduler.preempt(victim, self.kv)
        return True

    def follow(self, moved: Mapping[int, int]) -> None:
        """These live blocks (old -> new) moved."""
        for lane in self._lanes:
            lane.follow(moved)

    def rest(self) -> None:
        """Of an instance alone, between two passes: tell the session what is wanted, so that the pool grows, or gives back."""
        lane = self._lanes[0]
        report = self._session.step({lane.tenant.name: lane.demand()})
        lane.follow(report.moved.get(lane.tenant.name, {}))

    def land(self, number: int, samplers: Listed[Chunk], chosen: Listed[int]) -> list[Tokens]:
        """This lane's pass is over and chose these tokens, one for each of `samplers`."""
        lane, schedule = self._lanes[number], self._flying.pop(number)
        places = {chunk.sequence.id: chunk.sequence.length - chunk.sequence.prompt_tokens for chunk in samplers}
        step = lane.land(schedule, samplers, chosen, 0.0)
        reasons = {output.id: output.finish_reason for output in step.finished}
        found = []
        for id, token in step.tokens:
            found.append(Tokens(id, self._attempts[id], places[id], (token,), reasons.get(id)))
            if id in reasons:
                del self._of[id], self._attempts[id]
        for id in [id for id in self._cancelled if self._of.get(id) in (lane, None)]:
            self._cancelled.discard(id)
            found += self.cancel(id)
        return found

    def shrink(self, limit: int) -> Mapping[int, int]:
        """The group's pool is to have `limit` blocks; call it when nothing is in flight. The youngest requests lose theirs where
        there are too many, and are recomputed. Returns (old -> new) of the live blocks that change their number."""
        pool = self.kv
        while pool.usable_blocks - pool.free_blocks > limit and self.preempt():
            pass
        moves: dict[int, int] = pool.shrink(limit)
        self.follow(moves)
        return moves

    # -- which lane, how many tokens -----------------------------------------------------------------------------------------

    def _least(self) -> _Lane:
        """The lane whose requests cost least to compute now."""
        if len(self._lanes) == 1:
            return self._lanes[0]
        return min(self._lanes, key=lambda lane: sum(self._cost.chunk(*_part(one)) for one in lane.sequences))

    def _budget(self, lane: _Lane) -> int:
        """Tokens of this lane's next microbatch: so that it costs no more than the largest, if all that waits is divided
        evenly. At least one tile beside the sequences that decode."""
        most = self._limits.max_batch_tokens
        parts = [_part(one) for lane in self._lanes for one in lane.sequences[:LOOKED_AT]]
        if len(self._lanes) == 1 or all(tokens <= TILE for _, tokens in parts):
            return most
        divided = lookahead([Waiting(*part) for part in parts], self._cost, len(self._lanes), TILE)
        bound = max(map(self._cost.microbatch, divided))
        own = [_part(one) for one in lane.sequences]
        decoding = [part for part in own if part[1] == 1]
        left = bound - self._cost.batch_s - sum(self._cost.chunk(*part) for part in decoding)
        prompt = 0
        for prefix, tokens in own:
            if tokens == 1:
                continue
            taken = min(tokens, most)
            while taken > TILE and self._cost.chunk(prefix, taken) > left:
                taken = (taken - 1) // TILE * TILE
            prompt += taken
            left -= self._cost.chunk(prefix, taken)
            if left <= 0:
                break
        return min(most, len(decoding) + max(TILE, prompt))

    def _blocked(self) -> bool:
        """Whether a lane without blocks need not be stuck: another has some, or some are on their way."""
        return self.exchanging or any(lane.scheduler.running for lane in self._lanes)


def _part(sequence: Sequence) -> tuple[int, int]:
    """(prefix, tokens) that it has to compute."""
    return sequence.computed, sequence.length - sequence.computed
