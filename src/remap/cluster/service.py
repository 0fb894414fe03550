# SPDX-License-Identifier: Apache-2.0
"""Control and ledger together: the way of a request, from the question to its last token. Pure, like both.

`Service.on` takes the events of `Control.on` and carries out what concerns requests: lost ones are asked for again, and a
route becomes a submission. The rest are commands to instances and answers to callers; the owner of the connections
carries them out, in their order.

Some requests end whichever instance computes them. Each failure of an instance counts against all requests that were with it.
After the first they start again at once. A request that was there twice is a suspect: suspects start again one at a time in the
whole cluster, on trial. A trial is over when the request ends, or has got `TRIAL_TOKENS` tokens more, and that many times as many
for each failure beyond. If its instance fails during its trial, the request ends, with `Fatal`; the others there start again.

Promises: no request ends so before `MOST_FAULTS` failures. A request that fails its instance within its first `TRIAL_TOKENS`
tokens fails as many, and ends no other by itself: for another, a third failure would have to come during its own trial, in
which no suspect but itself is on its way. One that fails its instance T tokens later each time fails at most log T (to
the base `TRIAL_TOKENS`) more. Suspects wait for each other's first tokens; no other request waits.
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

__all__ = ["MOST_FAULTS", "TRIAL_TOKENS", "Action", "Cancel", "Fatal", "Service", "Submit"]

MOST_FAULTS = 3
"""A request that was on trial when this many instances, or more, have failed with it ends: it is why (see the module).

With 2 every request of an instance that was killed is a suspect, and waits for its trial. In the worlds of the tests (4
instances, 80 requests, one kill, 20 seeds) requests then end after 10.7 s in the mean instead of 5.9, the last after 20.4 s
instead of 9.3. A second kill may then end an innocent request, which now takes a third.
"""

TRIAL_TOKENS = 4
"""Tokens of the first trial. A request that fails at a certain place fails there again, with no new token but those that were
lost on their way to the ledger: a pass or two of them."""

RequestT = TypeVar("RequestT")


class Fatal(Error):
    """The instances that had this request failed, one after another, the last while no other suspect was there. It is answered
    with this. Fields: request (its id), faults (how many).
    """


@dataclass(frozen=True)
class _Trial:
    """Of this suspect; over when it has `tokens` tokens."""

    id: str
    tokens: int


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
        self._size = size
        self._suspects = deque[str]()  # that wait for their trial
        self._trial: _Trial | None = None

    @property
    def suspects(self) -> list[str]:
        """The requests that may be why instances failed: the one on trial first, then those that wait for theirs."""
        first = [] if self._trial is None or not self._on_trial(self._trial.id) else [self._trial.id]
        return first + [id for id in self._suspects if self._suspected(id)]

    def busy(self, instance: str) -> int:
        """Unfinished requests that would be lost with this instance: those of its group."""
        members = self.control.members(instance)
        return sum(self.ledger.where(id) in members for id in self.ledger.ids)

    def ask(self, id: str, request: RequestT, now_s: float, tokens: Iterable[int] = ()) -> list[Action[RequestT]]:
        """A new request, which goes on behind these tokens. Raises InvalidArgument, with nothing changed, if an unfinished one
        has its id."""
        self.ledger.add(id, request, tokens)
        return self.on(PlacementAsked(id, self._tokens(id)), now_s)

    def bounced(self, id: str, attempt: int, now_s: float) -> list[Action[RequestT]]:
        """The instance that this attempt was submitted to refused it, or let go of it (`TakeAway`): it goes elsewhere."""
        if not self.is_last(id, attempt):
            return []
        return self.on(PlacementAsked(id, self._tokens(id)), now_s)

    def is_last(self, id: str, attempt: int) -> bool:
        """Whether the request is unfinished and this is its last attempt: tokens of older ones are for no caller."""
        return id in self.ledger and self.ledger.attempt(id) == attempt

    def cancel(self, id: str, now_s: float) -> list[Action[RequestT]]:
        """The caller does not want the request any more. Unknown ids are ignored: it may have ended."""
        attempt = self.ledger.attempt(id) if id in self.ledger else 0
        where = self.ledger.forget(id)
        members = () if where is None else self.control.members(where)
        # All of its group: it may be on its way from one to another. An instance that has it later is told when it says so.
        return [*(Cancel(name, id, attempt) for name in members), *self.on(Finished(id), now_s)]

    def take(self, tokens: Tokens, now_s: float) -> Delivery | None:
        """The tokens that an instance produced: the part that its caller has not had yet."""
        delivery = self.ledger.take(tokens)
        if delivery is not None and delivery.finish_reason is not None:
            # No commands come of it: a held request waits for an instance that serves, not for the end of a request.
            self.control.on(Finished(tokens.id), now_s)
        return delivery

    def on(self, event: Event, now_s: float) -> list[Action[RequestT]]:
        """As `Control.on`, with its errors."""
        actions: list[Action[RequestT]] = []
        events = deque([event])
        while events or self._try_next(events):
            current = events.popleft()
            for command in self.control.on(current, now_s):
                match command:
                    case Restart(instances):
                        for id in self.ledger.restart(instances):
                            if self._on_trial(id):
                                actions.append(Decline(id, _fatal(id, self.ledger.faults(id))))
                                self.ledger.forget(id)
                                events.append(Finished(id))
                            elif self._suspected(id):
                                self._suspects.append(id)
                            else:
                                events.append(PlacementAsked(id, self._tokens(id)))
                    case Route(id, instance):
                        submission = self.ledger.send(id, instance)
                        if submission is not None:
                            epoch = self.control.epoch_of(instance)
                            assert epoch is not None  # it is routed to who is in the cluster
                            actions.append(Submit(instance, submission, epoch))
                    case Decline(id):
                        self.ledger.forget(id)
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

    def _try_next(self, events: deque[Event]) -> bool:
        """Whether the next suspect's trial begins: it is asked for again."""
        if self._trial is not None and self._on_trial(self._trial.id):
            return False
        self._trial = None
        while self._suspects:
            id = self._suspects.popleft()
            if self._suspected(id):
                more = TRIAL_TOKENS ** (self.ledger.faults(id) - MOST_FAULTS + 2)
                self._trial = _Trial(id, len(self.ledger.tokens(id)) + more)
                events.append(PlacementAsked(id, self._tokens(id)))
                return True
        return False

    def _suspected(self, id: str) -> bool:
        """Not if it has ended meanwhile, also if another request has its id now."""
        return id in self.ledger and self.ledger.faults(id) >= MOST_FAULTS - 1

    def _on_trial(self, id: str) -> bool:
        trial = self._trial
        if trial is None or trial.id != id or not self._suspected(id):
            return False
        return len(self.ledger.tokens(id)) < trial.tokens

    def _tokens(self, id: str) -> int:
        """Of KV that the request asks for now."""
        return self._size(self.ledger.request(id)) + len(self.ledger.tokens(id))


def _fatal(id: str, faults: int) -> Fatal:
    return Fatal(
        f"request {id!r} was with {faults} instances when they failed, with the last of them while no other was suspected; it "
        "is taken to be why, and not started again; look into their logs for what ended them",
        request=id,
        faults=faults,
    )
