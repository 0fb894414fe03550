# SPDX-License-Identifier: Apache-2.0
"""Control and ledger together: the way of a request, from the question to its last token. Pure, like both.

`Service.on` takes the events of `Control.on` and carries out what concerns requests: lost ones are asked for again, and a
route becomes a submission. The rest are commands to instances and answers to callers; the owner of the connections
carries them out, in their order.

Some requests end whichever instance computes them, and an instance does not say which it was. Evidence are deaths that a
request was at, each by a cause of its own. One cause may end several instances, one shortly after the other: a node that goes,
or something that all of them need. So:

- Requests that were with a dead instance start again `APART_S` later, elsewhere if possible (`control`): they are with one
  cause once, and do not follow it from instance to instance.
- A request that was with two deaths is a suspect. Suspects start again `QUIET_S` after they were lost, one at a time in the
  whole cluster, on trial. A trial is over when the request ends, or has got `TRIAL_TOKENS` tokens more, and that many times as
  many for each death beyond.
- If its instance dies during its trial, the request waits for `APART_S`. If no other instance has died near to it, the request
  is why: it ends, with `Fatal`. Else the other's cause may be its cause. Then this death does not count, and there is another
  trial. Near is `APART_S` before or after; on the same node `QUIET_S` before, if there are several nodes. The next trial begins
  no sooner than that after such a death: two that end instances are not to excuse each other.
- Deaths from outside (`Death.outside`) count against none, and for none.

Promises: no request ends so before it was at `MOST_FAULTS` deaths, `APART_S` apart, nor by one cause that is over within
`QUIET_S`. A request that fails its instance within its first `TRIAL_TOKENS` tokens fails `MOST_FAULTS`, and one more for each
of its trials near which another instance died. It ends no other by itself: for another, a third failure would have to come
during its own trial, in which no suspect but itself is on its way. One that fails its instance T tokens later each time fails
at most log T (to the base `TRIAL_TOKENS`) more. Suspects wait for each other's first tokens; no other request waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from remap.errors import Error

from .ledger import Delivery, RequestLedger, Submission
from .messages import (
    Abort,
    BringHome,
    Commit,
    Death,
    Decline,
    Event,
    Evict,
    Finished,
    GiveUp,
    PlacementAsked,
    Prepare,
    Recover,
    Reported,
    Restart,
    Route,
    TakeAway,
    Tokens,
)

if TYPE_CHECKING:
    from .control import Control

__all__ = ["APART_S", "MOST_FAULTS", "QUIET_S", "TRIAL_TOKENS", "Action", "Cancel", "Fatal", "Service", "Submit"]

MOST_FAULTS = 3
"""A request that was on trial when this many instances, or more, have failed with it ends: it is why (see the module).

With 2 every request of an instance that was killed is a suspect, and waits for its trial. In the worlds of the tests (4
instances, 80 requests within 8 s, one kill after 4 s, 20 seeds) requests then end after 5.7 s in the mean instead of 5.2, the
last after 11.5 s instead of 9.2. A second kill may then end an innocent request, which now takes a third.
"""

APART_S = 0.5
"""Deaths that are nearer may have one cause. Of a node that went Ray told three within 0.13 s."""

QUIET_S = 2.0
"""What ends instances one after another, such as a node without memory, has such gaps at most."""

KEPT_S = 2 * (APART_S + QUIET_S)
"""Deaths are kept for longer than any verdict looks back."""

TRIAL_TOKENS = 4
"""Tokens of the first trial. A request that fails at a certain place fails there again, with no new token but those that were
lost on their way to the ledger: a pass or two of them."""

RequestT = TypeVar("RequestT")


class Fatal(Error):
    """The instances that had this request died, one after another, the last while no other suspect was there. It is answered with
    this. Fields: request (its id), faults (how many), deaths (each a `Death`).
    """


@dataclass(frozen=True)
class _Trial:
    """Of this suspect; over when it has `tokens` tokens."""

    id: str
    tokens: int


@dataclass(frozen=True)
class _Seen:
    """A death, when it was told, and the instances whose requests were lost by it."""

    death: Death
    told_s: float
    instances: tuple[str, ...]


@dataclass(frozen=True)
class _Lost:
    """A request that is nowhere, because its instance has died. due_s: when it goes on. tried: the death that ended its trial,
    and may be its own doing."""

    due_s: float
    tried: _Seen | None = None


@dataclass(frozen=True)
class Submit(Generic[RequestT]):
    """Submit to this instance, which is at this epoch, by the last decision. If it refuses with InvalidState, it is no head any
    more, or has recovered since: call `Service.bounced`."""

    instance: str
    submission: Submission[RequestT]
    epoch: int


@dataclass(frozen=True)
class Cancel:
    """Cancel this request at this instance, up to this attempt; it may not have it any more."""

    instance: str
    id: str
    attempt: int


Action = (
    Prepare | Commit | Abort | BringHome | Recover | Evict | Submit[RequestT] | Cancel | TakeAway | GiveUp | Decline
)


class Service(Generic[RequestT]):
    """Requests on a cluster. Not thread-safe: one thread owns it, with its control and its ledger.

    size: tokens of a request's prompt.
    """

    def __init__(self, control: Control, size: Callable[[RequestT], int]) -> None:
        self.control = control
        self.ledger = RequestLedger[RequestT]()
        self.deaths = deque[Death](maxlen=64)
        """The last ones of instances that were in the cluster, the oldest first."""
        self._size = size
        self._lost: dict[str, _Lost] = {}
        self._seen = deque[_Seen]()  # of the last seconds
        self._trial: _Trial | None = None
        self._quiet_s = 0.0  # no trial begins before

    @property
    def suspects(self) -> list[str]:
        """The requests that may be why instances failed: the one on trial first, then those that wait for theirs."""
        first = [] if self._trial is None or not self._on_trial(self._trial.id) else [self._trial.id]
        return first + [id for id in self._lost if self._suspected(id) and id not in first]

    def busy(self, instance: str) -> int:
        """Unfinished requests that would be lost with this instance: those of its group."""
        members = self.control.members(instance)
        return sum(self.ledger.where(id) in members for id in self.ledger.ids)

    def ask(self, id: str, request: RequestT, now_s: float, tokens: Iterable[int] = ()) -> list[Action[RequestT]]:
        """A new request, which goes on behind these tokens. Raises InvalidArgument, with nothing changed, if an unfinished one
        has its id."""
        self.ledger.add(id, request, tokens)
        return self.on(self._asked(id), now_s)

    def bounced(self, id: str, attempt: int, now_s: float) -> list[Action[RequestT]]:
        """The instance that this attempt was submitted to refused it, or let go of it (`TakeAway`): it goes elsewhere."""
        if not self.is_last(id, attempt) or id in self._lost:
            return []
        return self.on(self._asked(id), now_s)

    def is_last(self, id: str, attempt: int) -> bool:
        """Whether the request is unfinished and this is its last attempt: tokens of older ones are for no caller."""
        return id in self.ledger and self.ledger.attempt(id) == attempt

    def cancel(self, id: str, now_s: float) -> list[Action[RequestT]]:
        """The caller does not want the request any more. Unknown ids are ignored: it may have ended."""
        attempt = self.ledger.attempt(id) if id in self.ledger else 0
        where = self._forget(id)
        members = () if where is None else self.control.members(where)
        # All of its group: it may be on its way from one to another. An instance that has it later is told when it says so.
        return [*(Cancel(name, id, attempt) for name in members), *self.on(Finished(id), now_s)]

    def take(self, tokens: Tokens, now_s: float) -> Delivery | None:
        """The tokens that an instance produced: the part that its caller has not had yet."""
        delivery = self.ledger.take(tokens)
        if delivery is not None and delivery.finish_reason is not None:
            self._lost.pop(tokens.id, None)
            # No commands come of it: a held request waits for an instance that serves, not for the end of a request.
            self.control.on(Finished(tokens.id), now_s)
        return delivery

    def on(self, event: Event, now_s: float) -> list[Action[RequestT]]:
        """As `Control.on`, with its errors."""
        actions: list[Action[RequestT]] = []
        events = deque([event])
        while events or self._go_on(events, actions, now_s):
            current = events.popleft()
            for command in self.control.on(current, now_s):
                match command:
                    case Restart(instances, death):
                        self._lose(instances, death, now_s)
                    case Route(id, instance):
                        submission = self.ledger.send(id, instance)
                        if submission is not None:
                            epoch = self.control.epoch_of(instance)
                            assert epoch is not None  # it is routed to who is in the cluster
                            actions.append(Submit(instance, submission, epoch))
                    case Decline(id):
                        self._forget(id)
                        actions.append(command)
                    case _:
                        actions.append(command)
            # An instance speaks for its requests as long as it is where control knows it: an older report may show what has been
            # handed over since.
            if isinstance(current, Reported) and self.control.epoch_of(current.report.instance) == current.report.epoch:
                name = current.report.instance
                # They were cancelled on their way to it, or started again elsewhere. The report may be older than their end;
                # then nothing comes of it.
                unwanted = self.ledger.located(name, current.report.requests)
                actions += [Cancel(name, id, attempt) for id, attempt in unwanted]
        return actions

    def _lose(self, instances: tuple[str, ...], death: Death, now_s: float) -> None:
        """The requests that were there go on later, each in its way."""
        while self._seen and now_s - self._seen[0].told_s > KEPT_S:
            self._seen.popleft()
        self.deaths.append(death)
        seen = _Seen(death, now_s, instances)
        if not death.outside:
            self._seen.append(seen)
        for id in self.ledger.restart(instances, death):
            if death.outside:
                self._lost[id] = _Lost(now_s)
            elif self._on_trial(id):
                self._lost[id] = _Lost(now_s + APART_S, seen)
            else:
                self._lost[id] = _Lost(now_s + (QUIET_S if self._suspected(id) else APART_S))

    def _go_on(self, events: deque[Event], actions: list[Action[RequestT]], now_s: float) -> bool:
        """Lost requests whose time has come are asked for again, or end; whether there were such."""
        for id, lost in [(id, lost) for id, lost in self._lost.items() if now_s >= lost.due_s]:
            if lost.tried is not None:
                self._trial, self._quiet_s = None, lost.tried.told_s + QUIET_S
                if self._excused(lost.tried):
                    self.ledger.excuse(id)
                    del self._lost[id]
                    self._lost[id] = _Lost(now_s + QUIET_S - APART_S)  # behind the others
                    continue
                actions.append(Decline(id, _fatal(id, self.ledger.deaths(id))))
                self._forget(id)
                events.append(Finished(id))
                continue
            if self._suspected(id):
                if self._trial is not None and self._on_trial(self._trial.id) and self._trial.id != id:
                    continue  # it waits for the trial of another
                if now_s < self._quiet_s:
                    continue
                more = TRIAL_TOKENS ** (len(self.ledger.deaths(id)) - MOST_FAULTS + 2)
                self._trial = _Trial(id, len(self.ledger.tokens(id)) + more)
            del self._lost[id]
            events.append(self._asked(id))
        return bool(events)

    def _excused(self, mine: _Seen) -> bool:
        """Whether this death may have the cause of another, which the request of the trial was not at."""
        node = mine.death.node
        several = bool(node) and any(each.node != node for each in self.control.descriptions.values())
        for each in self._seen:
            later_s = each.told_s - mine.told_s
            near_s = QUIET_S if several and each.death.node == node and later_s < 0 else APART_S
            if each.death.instance not in mine.instances and abs(later_s) <= near_s:
                return True
        return False

    def _forget(self, id: str) -> str | None:
        self._lost.pop(id, None)
        return self.ledger.forget(id)

    def _suspected(self, id: str) -> bool:
        """Not if it has ended meanwhile, also if another request has its id now."""
        return id in self.ledger and len(self.ledger.deaths(id)) >= MOST_FAULTS - 1

    def _on_trial(self, id: str) -> bool:
        trial = self._trial
        if trial is None or trial.id != id or not self._suspected(id):
            return False
        return len(self.ledger.tokens(id)) < trial.tokens

    def _asked(self, id: str) -> PlacementAsked:
        """For as many tokens of KV as it asks for now."""
        tokens = self._size(self.ledger.request(id)) + len(self.ledger.tokens(id))
        return PlacementAsked(id, tokens, self.ledger.deaths(id))


def _fatal(id: str, deaths: tuple[Death, ...]) -> Fatal:
    return Fatal(
        f"request {id!r} was with {len(deaths)} instances when they died, with the last of them while no other was suspected; it "
        f"is taken to be why, and not started again; they died so: {'; '.join(map(str, deaths))}",
        request=id,
        faults=len(deaths),
        deaths=deaths,
    )
