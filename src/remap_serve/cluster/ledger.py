# SPDX-License-Identifier: Apache-2.0
"""Every request of a cluster: where it is, and which of its tokens were delivered. Each is answered once. Pure.

A request is sent in attempts. When the instance that has it is lost, the next attempt begins behind the tokens that were
delivered: they are part of its prompt then, and since a token depends on those before it and on its place only, the answer is
the same (`SamplingParams`). Tokens of an older attempt are ignored.

Tokens of one attempt can come from several instances, for requests move when groups change, and in any order. They are
delivered in theirs: those that come early wait here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from remap.errors import InvalidArgument

if TYPE_CHECKING:
    from remap_serve.engine.request import TokenLogprobs

    from .messages import Death, Tokens

__all__ = ["Delivery", "RequestLedger", "Submission"]

RequestT = TypeVar("RequestT")
"""A caller's request: `engine.Request` in production; the ledger passes it on."""


@dataclass(frozen=True)
class Submission(Generic[RequestT]):
    """A submission to an instance: the request, the number of the attempt, and the tokens that it has generated until now."""

    id: str
    request: RequestT
    attempt: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Delivery:
    """Tokens of a request that are new to its caller; `first` is the place of the first. finish_reason: None unless these
    are the last. noted and prompt: as of `Tokens`."""

    first: int
    tokens: tuple[int, ...]
    finish_reason: str | None
    noted: tuple[TokenLogprobs, ...] = ()
    prompt: tuple[TokenLogprobs, ...] = ()


@dataclass
class _Entry(Generic[RequestT]):
    """early: messages by the place of each of their tokens, behind a gap. ends: place behind the last token, and the reason, once
    known. deaths: that count against it: of instances that had it."""

    request: RequestT
    attempt: int = 0
    instance: str | None = None
    tokens: list[int] = field(default_factory=list)
    early: dict[int, Tokens] = field(default_factory=dict)
    ends: tuple[int, str] | None = None
    deaths: list[Death] = field(default_factory=list)


class RequestLedger(Generic[RequestT]):
    """All unfinished requests by their id. Not thread-safe: one thread owns it."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry[RequestT]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, id: object) -> bool:
        return id in self._entries

    def add(self, id: str, request: RequestT, tokens: Iterable[int] = ()) -> None:
        """A new request; tokens: that its caller has already. Raises InvalidArgument (field id), with nothing changed, if an
        unfinished one has this id."""
        if id in self._entries:
            raise InvalidArgument(
                f"request id {id!r} is in use; ids must be unique among unfinished requests; nothing changed", id=id
            )
        self._entries[id] = _Entry(request, tokens=list(tokens))

    def send(self, id: str, instance: str) -> Submission[RequestT] | None:
        """Record that the request goes to this instance, in a new attempt, and return what to submit. Call it before that is
        submitted. None if the request has ended meanwhile."""
        entry = self._entries.get(id)
        if entry is None:
            return None
        entry.attempt += 1
        entry.instance = instance
        entry.early.clear()
        entry.ends = None
        return Submission(id, entry.request, entry.attempt, tuple(entry.tokens))

    def located(self, instance: str, requests: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """A report of this instance shows these attempts (id and number): they are there now. Returns those that no caller waits
        for: of requests that have ended, and older ones than the last."""
        unwanted = []
        for id, attempt in requests:
            entry = self._entries.get(id)
            if entry is None or attempt < entry.attempt:
                unwanted.append((id, attempt))
            elif entry.instance is not None and entry.attempt == attempt:
                entry.instance = instance
        return unwanted

    def restart(self, instances: Collection[str], death: Death) -> list[str]:
        """The requests that were at these instances, in the order in which they came. They are nowhere now. The death counts
        against each, unless it came from outside."""
        lost = [id for id, entry in self._entries.items() if entry.instance in instances]
        for id in lost:
            entry = self._entries[id]
            entry.instance = None
            entry.deaths += [] if death.outside else [death]
        return lost

    def excuse(self, id: str) -> None:
        """The last death does not count against this request."""
        self._entries[id].deaths.pop()

    def take(self, tokens: Tokens) -> Delivery | None:
        """Record what an instance produced, and return what its caller has not had yet; None if that is nothing.

        With the finish reason the request is over and forgotten, so nothing is delivered twice.
        """
        entry = self._entries.get(tokens.id)
        if entry is None or tokens.attempt != entry.attempt:
            return None
        for place in range(max(tokens.first, len(entry.tokens)), tokens.first + len(tokens.tokens)):
            entry.early[place] = tokens
        if tokens.finish_reason is not None:
            entry.ends = tokens.first + len(tokens.tokens), tokens.finish_reason
        noted: list[TokenLogprobs] = []
        first = len(entry.tokens)
        while (place := len(entry.tokens)) in entry.early:
            came = entry.early.pop(place)
            entry.tokens.append(came.tokens[place - came.first])
            noted += came.noted[place - came.first : place - came.first + 1]
        prompt = tokens.prompt if first == 0 else ()  # they come with the first token, which waits for no other
        reason = entry.ends[1] if entry.ends is not None and len(entry.tokens) >= entry.ends[0] else None
        if reason is not None:
            del self._entries[tokens.id]
        elif first == len(entry.tokens):
            return None
        return Delivery(first, tuple(entry.tokens[first:]), reason, tuple(noted), prompt)

    def forget(self, id: str) -> str | None:
        """The request is cancelled or answered with an error; where it was, if anywhere. Unknown ids are ignored."""
        entry = self._entries.pop(id, None)
        return None if entry is None else entry.instance

    def tokens(self, id: str) -> tuple[int, ...]:
        """Those delivered of an unfinished request; KeyError if there is none of this id."""
        return tuple(self._entries[id].tokens)

    def request(self, id: str) -> RequestT:
        """An unfinished request; KeyError if there is none of this id."""
        return self._entries[id].request

    def attempt(self, id: str) -> int:
        """The number of an unfinished request's last attempt, 0 before the first; KeyError if there is none of this id."""
        return self._entries[id].attempt

    def deaths(self, id: str) -> tuple[Death, ...]:
        """Those that count against an unfinished request; KeyError if there is none of this id."""
        return tuple(self._entries[id].deaths)

    def where(self, id: str) -> str | None:
        """The instance that has an unfinished request; KeyError if there is none of this id."""
        return self._entries[id].instance

    @property
    def ids(self) -> list[str]:
        """Of all unfinished requests, in the order in which they came."""
        return list(self._entries)
