# SPDX-License-Identifier: Apache-2.0
"""The lanes of a group: which requests run in the next microbatch, and how much of the prompts. Pure; the simulator runs it as
well.

A pipeline of g stages is full while g microbatches are on their way. So a group has as many *lanes* as stages: schedulers over
one pool of blocks, each with at most one microbatch in flight. Requests that wait stand in one line, and enter whichever lane
is launched next. A request that decodes stays in its lane, since its next token needs the last one. A prompt that is computed
in part goes on in the lane that is launched next, even while its last part is in flight: else, a long prompt in one lane makes
microbatches of different length, and stages wait for each other.

Why that is right. Every stage computes microbatches in the order of launching, and tokens come back in that order:

    its own KV      The later part passes each stage behind the earlier one, whose KV it finds there. So a part that yields no
                    token counts as computed when it is launched, and nothing is left to be done when it lands.
    its token       Only the part with the last token known yields one. Until that has landed its request stays in its lane,
                    which schedules nothing meanwhile: it is neither continued, nor preempted, nor moved.
    preemption      A request that loses its blocks while an earlier part is in flight begins anew with other blocks. That part
                    may still write to the old ones, but whatever is launched later writes, and reads, behind it. The same holds
                    for a request that is cancelled.
    KV from others  does not come through the pipeline, and might be overwritten by such a part. It must not be written to
                    blocks that one in flight writes to (`Lanes.writing`).
    failure         Parts that were launched and never land are of a group that is given up, with all of its KV.

Tokens depend on where prompts are cut, and on who else is in the microbatch, by rounding alone.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from remap_serve.engine.scheduler import Scheduler
from remap_serve.policy.cluster.lookahead import Waiting
from remap_serve.policy.cluster.placement import InstanceLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Listed

    from remap_serve.engine.request import Sequence
    from remap_serve.engine.scheduler import Schedule
    from remap_serve.policy.cluster.allowances import Allowances
    from remap_serve.policy.cluster.lookahead import ChunkCost

__all__ = ["Lane", "Lanes"]

_order = attrgetter("order")


class Lane(Scheduler):
    """The reference engine's scheduler; with an allowance, prompts are cut where the next microbatch's have cost so much.

    cost: of a pass through all layers. grain: then they are cut at multiples of `grain` tokens of the rest. The other
    arguments are the scheduler's.
    """

    def __init__(self, cost: ChunkCost, grain: int, **options: Any) -> None:
        super().__init__(**options)
        self._cost, self._grain = cost, grain
        self._allowance_s: float | None = None
        self._left_s = 0.0

    def allow(self, seconds: float | None) -> None:
        """For the next microbatch; None: as much as it can."""
        self._allowance_s = seconds
        self._left_s = seconds or 0.0

    def chunk_tokens(self, sequence: Sequence, budget: int) -> int:
        count = super().chunk_tokens(sequence, budget)
        if self._allowance_s is None or count < 2:
            return count
        most = self._cost.tokens(sequence.computed, self._left_s)
        if most < count:
            if self._left_s == self._allowance_s:  # the first one: some of it at least, or no prompt would ever go on
                most = max(most, self._grain)
            most += self._grain // 2  # to the nearest multiple: the remainders add up to microbatches of its own
            count = super().chunk_tokens(sequence, min(most - most % self._grain, count))
        self._left_s -= self._cost.chunk(sequence.computed, count)
        return count

    def prompts(self) -> list[Sequence]:
        """Whose prompt is not computed yet."""
        return [one for one in chain(self.running, self.waiting) if one.length - one.computed > 1]


class Lanes:
    """See the module. lanes: without requests. decode_s: seconds of a pass over these, which decode, through all layers.

    To launch a lane: `gather`, then `allow`, then its `schedule`, then `launched`; when it is over: `landed`, then `commit` of
    what that returns, then `settle` for each request that goes on.
    """

    def __init__(
        self, lanes: Listed[Lane], allowances: Allowances, decode_s: Callable[[Iterable[Sequence]], float]
    ) -> None:
        self.lanes = lanes
        self.flying: dict[int, Schedule] = {}
        """Microbatches that were launched and have not landed, by lane; in the order of launching."""
        self._written: dict[int, set[int]] = {}
        self._allowances, self._decode = allowances, decode_s
        self._decode_s = [0.0] * len(lanes)
        self._most = sum(lane.max_num_seqs for lane in lanes)
        for lane in lanes[1:]:
            lane.share_line(lanes[0].waiting)

    # -- requests ----------------------------------------------------------------------------------------------------------

    @property
    def lines(self) -> list[deque[Sequence]]:
        """Of those that wait, each once."""
        return [self.lanes[0].waiting]

    def of(self, sequence: Sequence) -> int:
        """The lane that it runs in; the first if it waits."""
        return next((number for number, lane in enumerate(self.lanes) if sequence in lane.running), 0)

    def adopt(self, sequence: Sequence) -> None:
        """Its blocks hold the KV of its `computed` tokens: it came from another group."""
        self.emptiest().adopt(sequence)

    def awaits(self, sequence: Sequence) -> bool:
        """Whether its next token is on its way."""
        chunks = chain.from_iterable(schedule.chunks for schedule in self.flying.values())
        return any(chunk.sequence is sequence and chunk.samples for chunk in chunks)

    def load(self, stalled: Iterable[int] = ()) -> InstanceLoad:
        """In whole blocks: that is what requests take of the pool, or will. stalled: lengths of requests, in tokens, that hold
        blocks and are not here yet."""
        size = self.lanes[0].block_tokens
        held = [*(one.length for lane in self.lanes for one in (*lane.running, *lane.arriving)), *stalled]
        waiting = sorted((one.order, one.length) for line in self.lines for one in line)
        running = [-(-length // size) * size for length in held]
        asked = tuple(-(-length // size) * size for _, length in waiting)
        return InstanceLoad(len(held), sum(running), asked, max((*running, *asked), default=0))

    # -- passes ------------------------------------------------------------------------------------------------------------

    def gather(self, number: int) -> None:
        """This lane is launched next: prompts that are computed in part go on in it."""
        if len(self.lanes) == 1:
            return
        lane = self.lanes[number]
        for other in self.lanes:
            if other is not lane:
                for sequence in [one for one in other.running if one.length - one.computed > 1]:
                    if not self.awaits(sequence):
                        other.running.remove(sequence)
                        insort(lane.running, sequence, key=_order)
        # All lanes together run as many as they may, wherever these are.
        lane.max_num_seqs = self._most - sum(len(other.running) for other in self.lanes if other is not lane)

    def allow(self, number: int) -> None:
        """Say what this lane may take of prompts now."""
        lane = self.lanes[number]
        if len(self.lanes) == 1:
            lane.allow(None)
            return
        # Of this one now, of the others as they were launched.
        self._decode_s[number] = self._decode(one for one in lane.running if one.length - one.computed == 1)
        lane.allow(self._allowances.take(number, self._decode_s, self._prompts))

    def launched(self, number: int, schedule: Schedule) -> int:
        """This microbatch is on its way. Returns how many tokens it computes again of which no token comes."""
        lane, size = self.lanes[number], self.lanes[number].block_tokens
        parts = [chunk for chunk in schedule.chunks if not chunk.samples]
        self.flying[number] = schedule
        self._written[number] = {
            block for chunk in parts for block in chunk.sequence.blocks[chunk.start // size : -(-chunk.end // size)]
        }
        return sum(map(lane.commit, parts))

    def landed(self, number: int) -> Schedule:
        """Its tokens are known: the rest of it is committed, the chunks that yield one."""
        del self._written[number]
        schedule = self.flying.pop(number)
        return schedule._replace(chunks=tuple(chunk for chunk in schedule.chunks if chunk.samples))

    def settle(self, number: int, sequence: Sequence) -> None:
        """Its prompt is computed, in this lane: from now on it decodes, where the fewest do."""
        self.lanes[number].running.remove(sequence)
        insort(self.emptiest().running, sequence, key=_order)

    def emptiest(self) -> Lane:
        """The lane in which the fewest requests decode."""
        return min(self.lanes, key=lambda lane: sum(one.length - one.computed == 1 for one in lane.running))

    def writing(self) -> set[int]:
        """Blocks that parts in flight write to whose requests may have lost them. Those that yield a token keep theirs."""
        return set().union(*self._written.values())

    def _prompts(self, most: int) -> list[Waiting]:
        waiting = {one.order: one for lane in self.lanes for one in lane.prompts()}  # each lane has the whole line
        return [Waiting(one.computed, one.length - one.computed) for _, one in islice(sorted(waiting.items()), most)]
