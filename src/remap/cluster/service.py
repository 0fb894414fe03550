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

from remap.errors import Error

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

__all__ = ["MOST_FAULTS", "Action", "Cancel", "Fatal", "Service", "Submit"]

MOST_FAULTS = 20
"""A request that was with so many instances when they failed is not started again: it may be why."""

RequestT = TypeVar("RequestT")


class Fatal(Error):
    """The instances that had this request failed, one after another. It is answered with this.

    Fields: request (its id), faults (how many).
    """


@dataclass(frozen=True)
class Submit(Generic[RequestT]):
    """Submit to this instance, which is at this epoch, by what was decided. If it refuses with InvalidState, it is no head any
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
        if not self.is_last(id, attempt):
            return []
        return self.on(Asked(id, self._tokens(id)), now_s)

    def is_last(self, id: str, attempt: int) -> bool:
        """Whether the request is unfinished and this is its last attempt: what comes of older ones is nobody's."""
        return id in self.ledger and self.ledger.attempt(id) == attempt

    def cancel(self, id: str, now_s: float) -> list[Action[RequestT]]:
        """Nobody wants the request any more. Unknown ids are ignored: it may have ended."""
        attempt = self.ledger.attempt(id) if id in self.ledger else 0
        where = self.ledger.forget(id)
        members = () if where is None else self.control.members(where)
        # All of its group: it may be on its way from one to another. Whoever has it later is told when it says so.
        return [*(Cancel(name, id, attempt) for name in members), *self.on(Finished(id), now_s)]

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
                        for id in self.ledger.restart(instances):
                            if self.ledger.faults(id) < MOST_FAULTS:
                                events.append(Asked(id, self._tokens(id)))
                            else:
                                self.ledger.forget(id)
                                actions.append(Decline(id, _fatal(id)))
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

    def _tokens(self, id: str) -> int:
        """Of KV that the request asks for now."""
        return self._size(self.ledger.request(id)) + len(self.ledger.tokens(id))


def _fatal(id: str) -> Fatal:
    return Fatal(
        f"request {id!r} was with {MOST_FAULTS} instances when they failed, and may be why; it is not started again; look into "
        "their logs for what ended them",
        request=id,
        faults=MOST_FAULTS,
    )
