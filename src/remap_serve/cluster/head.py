# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a group: which request runs in which microbatch. It computes nothing itself.

A head has as many lanes as its group has stages, each with at most one microbatch in flight: which goes where, and why that is
right, is said in `lanes`. Each lane is a production engine loop (`engine.Engine`, with its own scheduler); requests belong to
the head, so all of them know them all.

An instance alone has one lane over its own blocks (`tenant.kv`), and asks its session before each pass, as `Engine.step` does.
With host blocks (`KVSpec.host_blocks`) it swaps: a preempted request keeps its KV in host memory. One thread owns a head.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from remap.errors import InvalidState, OutOfBlocks
from remap.internals import internals
from remap_serve.cluster.counts import Counts
from remap_serve.cluster.lanes import Lane, Lanes
from remap_serve.cluster.messages import Tokens
from remap_serve.engine.engine import Engine
from remap_serve.engine.request import RequestState, Sequence
from remap_serve.engine.scheduler import TILE, Schedule
from remap_serve.policy.cluster.allowances import Allowances

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Sequence as Listed

    from remap_serve.cluster.wire import Handed
    from remap_serve.engine.chunk import Chunk
    from remap_serve.engine.request import Request
    from remap_serve.policy.cluster.lookahead import ChunkCost
    from remap_serve.policy.cluster.placement import InstanceLoad

__all__ = ["Head", "HeadLimits", "Launch"]

MEASURED_STEPS = 4096
"""Passes of a lane until its metrics begin anew."""


@dataclass(frozen=True)
class HeadLimits:
    """Limits of requests and passes. vocabulary, positions: of the model. max_num_seqs: running at once, for each
    lane that there is. max_batch_tokens: of a microbatch. decode_cost: see `Scheduler`."""

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
    """One lane. live: the unfinished requests of all lanes. blocked: whether others than its own requests may be why it has no
    blocks."""

    def __init__(
        self,
        tenant: Any,
        session: Any,
        scheduler: Lane,
        limits: HeadLimits,
        live: dict[str, Sequence],
        blocked: Callable[[], bool],
    ) -> None:
        runner: Any = None  # the stages compute
        super().__init__(tenant, scheduler, runner, session=session)
        self._live = live
        self._limits = limits
        self._blocked = blocked

    def add_request(self, request: Sequence, *, arrived_s: float | None = None) -> None:
        """Queue a sequence. Raises InvalidArgument, with nothing changed, for one that the model cannot serve."""
        self._require_servable(request.request, self._limits.vocabulary, self._limits.positions)
        self._queue(request)

    def again(self, sequence: Sequence) -> None:
        """Queue a sequence that was accepted before; its KV is computed again."""
        self._queue(sequence)

    def _record(self, begin: float, schedule: Schedule) -> None:
        """No timeline, and measurements of the last passes only: a server runs for months."""
        self.metrics.steps += 1
        if self.metrics.steps >= MEASURED_STEPS:
            self.reset_metrics()

    def _check_progress(self, progressed: bool) -> None:
        super()._check_progress(progressed or self._blocked())


class _Shared:
    """The tenant as a lane of a group sees it."""

    remapped = 0

    def __init__(self, name: str, kv: Any) -> None:
        self.name = name
        self.kv = kv


class Head:
    """See the module. tenant: `name` and `kv`; of a group, kv is its `GroupPool`. session: what is asked between passes
    (`step`). lanes: as many as the group has stages with layers. cost: of a pass through all layers. counts: of the
    instance."""

    def __init__(
        self,
        tenant: Any,
        session: Any,
        lanes: int,
        limits: HeadLimits,
        cost: ChunkCost,
        *,
        kv: Any = None,
        counts: Counts | None = None,
    ) -> None:
        self._counts = Counts() if counts is None else counts
        self.kv: Any = internals(tenant).kv if kv is None else kv
        self._alone = kv is None
        self._session = session
        seen = tenant if kv is None else _Shared(tenant.name, kv)
        host = getattr(self.kv, "host", None)  # a group's pool has none
        self.swaps = host is not None and host.total > 0
        """Preempted KV goes to host memory."""
        schedulers = [
            Lane(
                cost,
                TILE,
                block_tokens=self.kv.block_tokens,
                max_num_seqs=limits.max_num_seqs,
                max_batch_tokens=limits.max_batch_tokens,
                decode_cost=limits.decode_cost,
                swap=self.swaps,
            )
            for _ in range(lanes)
        ]
        allowances = Allowances(cost, lanes, limits.max_batch_tokens, TILE)
        self._schedulers = Lanes(
            schedulers, allowances, lambda decoding: sum(cost.chunk(one.computed, 1) for one in decoding)
        )
        self._live: dict[str, Sequence] = {}
        self._lanes = [_Lane(seen, session, each, limits, self._live, self._blocked) for each in schedulers]
        self._attempts: dict[str, int] = {}
        self._cancelled: set[str] = set()
        self._orders = count()
        self.ready = kv is None
        """Whether it knows how much room there is: of a group, when all stages have said so."""
        self.exchanging = False
        """KV of requests is on its way: blocks may become free that no lane has, and none may move."""
        self.draining = False
        """Launch nothing more."""
        self.stuck: tuple[str, int] | None = None
        """A request that found no blocks although no other request has any, and the tokens that it asks for. It waits: for a pool
        that grows, for a larger group, or for `give_up`."""

    # -- requests ----------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, attempt: int, tokens: Iterable[int] = ()) -> None:
        """Queue a request behind the tokens that it has generated until now. Raises InvalidArgument, with nothing queued, for one
        that the model cannot serve, or whose id is in use."""
        sequence = Sequence.of(request, next(self._orders), time.perf_counter())
        sequence.tokens += tokens
        self._lanes[0].add_request(sequence)
        self._attempts[request.id] = attempt

    def adopt(self, handed: Handed, computed: int, blocks: list[int]) -> None:
        """A request of another head runs on: these blocks hold the KV of `computed` of its tokens. Without any it waits. Raises
        InvalidState (field request), with nothing changed, if an attempt of it is here."""
        id = handed.id
        if id in self._attempts:
            raise InvalidState(
                f"attempt {handed.attempt} of request {id!r} comes to where {self._attempts[id]} is; recover",
                request=id,
            )
        sequence = Sequence.of(handed.request, next(self._orders), time.perf_counter())
        sequence.tokens += handed.tokens
        sequence.noted = dict(handed.noted)
        self._attempts[id] = handed.attempt
        if not computed:
            self._lanes[0].again(sequence)
            return
        sequence.computed = sequence.high_water = computed
        sequence.blocks = blocks
        self._live[id] = sequence
        self._schedulers.adopt(sequence)

    def cancel(self, id: str) -> list[Tokens]:
        """Take a request out, after its pass if its next token is on its way: its end, with the reason "abort". Unknown ids are
        ignored."""
        sequence = self._live.get(id)
        if sequence is None:
            return []
        if self._schedulers.awaits(sequence):
            self._cancelled.add(id)
            return []
        return self._end(self._lanes[self._schedulers.of(sequence)], id, "abort")

    def give_up(self, id: str) -> list[Tokens]:
        """End a request that is stuck: its end, with the reason "out_of_blocks". Others are ignored."""
        if not self._is_stuck(id):
            return []
        return self._end(self._lanes[self._schedulers.of(self._live[id])], id, "out_of_blocks")

    def _is_stuck(self, id: str) -> bool:
        return self.stuck is not None and self.stuck[0] == id

    def _end(self, lane: _Lane, id: str, reason: str) -> list[Tokens]:
        output = lane.abort(id)
        if self._is_stuck(id):
            self.stuck = None
        return [Tokens(id, self._attempts.pop(id), len(output.tokens), (), reason)]

    def leave(self) -> list[tuple[Sequence, int]]:
        """All unfinished requests, the oldest first, with their attempts. Call it when nothing is in flight; then this head is
        of no more use. Their blocks stay allocated; of KV in host memory what there is room for, beside the longest request,
        comes back before. Raises what `Scheduler.leave_host` raises, and can be called again then."""
        lanes = self._schedulers.lanes
        if self.swaps:
            # Where it goes to needs some room to begin with.
            spare = max((lanes[0].blocks_for(one.length) for one in self._live.values()), default=0)
            for lane in lanes:
                lane.leave_host(self.kv, spare)
        found = sorted(self._live.values(), key=lambda one: one.arrived_s)
        for lane in lanes:  # a call that asks it for blocks finds no request
            lane.running.clear()
            lane.waiting.clear()
        return [(one, self._attempts[one.id]) for one in found]

    @property
    def requests(self) -> tuple[tuple[str, int], ...]:
        """(id, attempt) of all unfinished ones."""
        return tuple(self._attempts.items())

    def attempt(self, id: str) -> int | None:
        """Of an unfinished request; None for others."""
        return self._attempts.get(id)

    def load(self, stalled: Iterable[int] = ()) -> InstanceLoad:
        """See `Lanes.load`: of all requests, and of those that are stalled, by their lengths in tokens."""
        return self._schedulers.load(stalled)

    def room(self, blocks: int) -> list[int] | None:
        """`blocks` blocks for KV that does not come through the pipeline; None, with nothing taken, if there are not. What a
        microbatch in flight may still write to is no room yet (`lanes`)."""
        writing, found, held = self._schedulers.writing(), list[int](), list[int]()
        try:
            while len(found) < blocks:
                for block in self.kv.allocate(blocks - len(found)):
                    (held if block in writing else found).append(block)
        except OutOfBlocks:
            self.kv.free(found)
            return None
        finally:
            self.kv.free(held)
        return found

    def unused(self, blocks: list[int]) -> None:
        """Blocks of `room` that are not needed any more."""
        self.kv.free(blocks)

    # -- passes ------------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Microbatches that were launched and have not landed."""
        return len(self._schedulers.flying)

    @property
    def idle(self) -> bool:
        """Nothing is in flight, and there is nothing to do."""
        return not self._live and not self.in_flight

    def launch(self) -> Launch | None:
        """The next microbatch, of a lane that has none in flight; None if none can be launched now.

        What the session raises passes through; nothing was launched then, and it can be called again.
        """
        if self.draining:
            return None
        for number, lane in enumerate(self._lanes):
            if number in self._schedulers.flying or not lane.unfinished:
                continue
            if self._alone and not self.exchanging:
                self.rest()
            self._schedulers.gather(number)
            if not (lane.scheduler.running or lane.scheduler.waiting or lane.scheduler.arriving):
                continue
            self._schedulers.allow(number)
            schedule = lane.launch()
            self._counts.note_scheduled(schedule, time.perf_counter())
            if schedule.chunks:
                self.stuck = None
                lane.metrics.recomputed_tokens += self._schedulers.launched(number, schedule)
                return Launch(number, schedule)
            try:
                lane.land(schedule, (), (), 0.0)
            except OutOfBlocks as error:
                self.stuck = (
                    str(error.fields["request"]),
                    int(str(error.fields["requested"])) * self.kv.block_tokens,
                )
        return None

    def preempt(self) -> bool:
        """Between passes: the youngest request that has blocks loses them, and is recomputed, unless its KV goes to host memory.
        False if there is none."""
        running = [one for lane in self._lanes for one in (*lane.scheduler.running, *lane.scheduler.arriving)]
        if not running:
            return False
        victim = max(running, key=lambda one: one.arrived_s)
        self._lanes[self._schedulers.of(victim)].scheduler.preempt(victim, self.kv)
        self._counts.took_blocks((victim,))
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
        lane, schedule = self._lanes[number], self._schedulers.landed(number)
        sequences = {chunk.sequence.id: (chunk.sequence, chunk.sequence.length) for chunk in samplers}
        step = lane.land(schedule, samplers, chosen, 0.0)
        reasons = {output.id: output.finish_reason for output in step.finished}
        found = []
        for id, token in step.tokens:
            sequence, at = sequences[id]
            place = at - sequence.prompt_tokens
            noted, prompt = sequence.noted_of(at, at + 1), () if place else sequence.noted_of(1, at)
            found.append(Tokens(id, self._attempts[id], place, (token,), reasons.get(id), noted, prompt))
            sequence.noted.clear()  # its caller has got them
            if id in reasons:
                del self._attempts[id]
        for chunk in samplers:
            sequence = chunk.sequence
            if sequence.id in self._cancelled:
                self._cancelled.discard(sequence.id)
                found += self.cancel(sequence.id)
            elif chunk.count > 1 and sequence.state is RequestState.RUNNING:
                self._schedulers.settle(number, sequence)
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

    def _blocked(self) -> bool:
        """Whether a lane without blocks need not be stuck: another has some, or some are on their way."""
        return self.exchanging or any(lane.scheduler.running for lane in self._lanes)
