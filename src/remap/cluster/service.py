"""Control and ledger together: what becomes of a request, from the question to its last token. Pure, like both.

`Service.on` takes the events of `Control.on` and carries out what concerns requests: what was lost is asked for again, and a
route becomes a submission. What is left are commands to instances and answers to callers; whoever owns the connections
carries them out, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from .ledger import Delivery, Ledger, Submission
from .messages import (
    Abort,
    Asked,
    Commit,
    Decline,
    Event,
    Evict,
    Fetch,
    Finished,
    GiveUp,
    Move,
    Prepare,
    Recover,
    Reported,
    Restart,
    Route,
    Tokens,
)

if TYPE_CHECKING:
    from .control import Control

__all__ = ["Action", "Cancel", "Service", "Submit"]

RequestT = TypeVar("RequestT")


@dataclass(frozen=True)
class Submit(Generic[RequestT]):
    """Submit to this instance. If it refuses with InvalidState, it is no head any more: call `Service.bounced`."""

    instance: str
    submission: Submission[RequestT]


@dataclass(frozen=True)
class Cancel:
    """Cancel this request at this instance, which may not have it any more."""

    instance: str
    id: str


Action = Prepare | Commit | Abort | Fetch | Recover | Evict | Submit[RequestT] | Cancel | Move | GiveUp | Decline


class Service(Generic[RequestT]):
    """Requests on a cluster. Not thread-safe: one thread owns it, with its control and its ledger.

    size: tokens of a request's prompt.
    """

    def __init__(self, control: Control, size: Callable[[RequestT], int]) -> None:
        self.control = control
        self.ledger = Ledger[RequestT]()
        self._size = size

    def ask(self, id: str, request: RequestT, now_s: float) -> list[Action[RequestT]]:
        """A new request. Raises InvalidArgument, with nothing changed, if an unfinished one has its id."""
        self.ledger.add(id, request)
        return self.on(Asked(id, self._tokens(id)), now_s)

    def bounced(self, id: str, attempt: int, now_s: float) -> list[Action[RequestT]]:
        """The instance that this attempt was submitted to refused it, or let go of it (`Move`): it goes elsewhere."""
        if id not in self.ledger or self.ledger.attempt(id) != attempt:
            return []
        return self.on(Asked(id, self._tokens(id)), now_s)

    def cancel(self, id: str, now_s: float) -> list[Action[RequestT]]:
        """Nobody wants the request any more. Unknown ids are ignored: it may have ended."""
        where = self.ledger.forget(id)
        members = () if where is None else self.control.members(where)
        # All of its group: it may be on its way from one to another.
        return [*(Cancel(name, id) for name in members), *self.on(Finished(id), now_s)]

    def take(self, tokens: Tokens, now_s: float) -> Delivery | None:
        """What an instance produced: the part that its caller has not had yet."""
        delivery = self.ledger.take(tokens)
        if delivery is not None and delivery.finish_reason is not None:
            # No commands come of it: what is held waits for an instance that serves, not for the end of a request.
            self.control.on(Finished(tokens.id), now_s)
        return delivery

    def on(self, event: Event, now_s: float) -> list[Action[RequestT]]:
        """As `Control.on`, with its errors."""
        actions: list[Action[RequestT]] = []
        events = deque([event])
        while events:
            current = events.popleft()
            for command in self.control.on(current, now_s):
                match command:
                    case Restart(instances):
                        events += [Asked(id, self._tokens(id)) for id in self.ledger.restart(instances)]
                    case Route(id, instance):
                        submission = self.ledger.send(id, instance)
                        if submission is not None:
                            actions.append(Submit(instance, submission))
                    case Decline(id):
                        self.ledger.forget(id)
                        actions.append(command)
                    case _:
                        actions.append(command)
            # An instance speaks for its requests as long as it is where control knows it: an older report may show what has been
            # handed over since.
            if isinstance(current, Reported) and self.control.epoch_of(current.report.instance) == current.report.epoch:
                self.ledger.located(current.report.instance, current.report.requests)
        return actions

    def _tokens(self, id: str) -> int:
        """Of KV that the request asks for now."""
        return self._size(self.ledger.request(id)) + len(self.ledger.tokens(id))
