# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is, where more models have work than can compute at once, and a turn costs a switch. Pure: callers pass times in.

A turn is of one model, with all its requests. It ends when its model has nothing to do, else when another model waits and

    not before it has paid for its switch: it lasts for as long again, at least (ski rental: of the time of turns that others end,
    at most half goes into switches, whichever model waits);
    then at the last moment from which all others, in the order in which their tokens are due, get their first pass in time;
    or after `quantum_s`, if some other has lost its target or has none, or if the turn's own tokens are not due before it could
    be back.

The model whose token is due first is next. A request's tokens are due `ttft_s` after its arrival, and then every `tbt_s`: a model
that was served quickly is ahead of them, so it can wait, and the longer its turn was the longer. One that cannot be in time any
more does not make others late: its deadline is `patience_s` after it began to wait, and so is that of one without a target. No
model's is later.

Claim, no model starves. Let N models have work, and a turn last for T at most: T is the larger of quantum_s, or what is left
until the others are due, and twice its switch, and one pass. A model that waits gets its turn within patience_s + N T.
    Let j have waited for patience_s. Its deadline is past, so the present turn ends as soon as it has paid. Before j come only
    models whose deadline is earlier. No new model's is: of one that begins to wait now, or waits again, the deadline is now +
    patience_s, or a due time that it can keep, so later than now. Each of the N - 1 others comes before j once at most.
(The property test plays this.)

Sources: that turns pay for their switch is ski rental (rental.py). Aegaeon (SOSP'25, section 5) groups prefills by model, first
come, first served, and divides decoding time in proportion to what each model's targets leave, in fixed rounds; here one order of
due times holds for both, and a turn has no fixed length. `bench/lab/market` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["TURN_S", "Next", "PresentTurn", "Queue", "Turns"]

MARGIN = 0.1
"""The share of a switch by which a turn ends earlier for the model that is due next, as loads take longer at times."""


TURN_S = 5.0
"""quantum_s between processes, each with one model: KV does not outlive a turn there, so each begins with computing it again."""


class Queue(NamedTuple):
    """One model with work. since_s: when it began to wait for a turn. due_s: when its next token is due; infinite: no target.
    switch_s: seconds by which its first pass would be late if its turn began now. pass_s: of that pass."""

    since_s: float
    due_s: float = math.inf
    switch_s: float = 0.0
    pass_s: float = 0.0


class PresentTurn(NamedTuple):
    """The present turn. switch_s: what its beginning cost."""

    name: str
    begun_s: float
    switch_s: float = 0.0


class Next(NamedTuple):
    """name: whose turn it is from now on; None: no model has work. follower: the next, at `at_s` if nothing changes before."""

    name: str | None
    follower: str | None = None
    at_s: float = math.inf


class Turns:
    """The rule above. quantum_s, patience_s: seconds, at least 0; quantum_s may be infinite."""

    def __init__(self, quantum_s: float = 1.0, patience_s: float = 30.0) -> None:
        self.quantum_s, self.patience_s = quantum_s, patience_s

    def decide(self, now_s: float, turn: PresentTurn | None, queues: Mapping[str, Queue]) -> Next:
        """Whose turn it is. turn: the present one, None before the first. queues: of all models that have work; without the
        present turn's the turn is over."""
        mine = queues.get(turn.name) if turn is not None else None
        others = sorted(
            (self._deadline(now_s, queue), queue.since_s, name, queue)
            for name, queue in queues.items()
            if turn is None or name != turn.name
        )
        if not others:
            return Next(turn.name if turn is not None and mine is not None else None)
        follower, first = others[0][2], others[0][3]
        if turn is None or mine is None:
            return Next(follower)
        paid_s = turn.begun_s + 2.0 * turn.switch_s
        # The caller asks between two passes, of which one may be longer than the last one.
        before, last_s = 2.0 * mine.pass_s + MARGIN * first.switch_s, math.inf
        for deadline, _, _, queue in others:
            before += queue.switch_s + queue.pass_s
            last_s = min(last_s, deadline - before)
        back_s = first.switch_s + self.quantum_s + turn.switch_s
        if mine.due_s >= now_s + back_s or any(not self._in_time(now_s, queue) for *_, queue in others):
            last_s = min(last_s, turn.begun_s + self.quantum_s)
        at_s = max(paid_s, last_s)
        return Next(follower) if now_s >= at_s else Next(turn.name, follower, at_s)

    def _deadline(self, now_s: float, queue: Queue) -> float:
        latest = queue.since_s + self.patience_s
        return min(queue.due_s, latest) if self._in_time(now_s, queue) else latest

    @staticmethod
    def _in_time(now_s: float, queue: Queue) -> bool:
        return now_s + queue.switch_s <= queue.due_s < math.inf
