# SPDX-License-Identifier: Apache-2.0
"""What several servers of one cluster share: its front, and every request that one of them took. Asynchronous, without Ray.

Each server polls, as the front polls instances: an answer has the tokens that came for its callers, and how the cluster is. A
server that is silent is gone. What its callers had asked goes on if they can come back for it, which takes a key: then the same
request, asked again by any server, has its tokens from the first. Without a key nobody can ask for it, and it is cancelled.

Nothing here is on disk. A server knows what its callers have had. So when this process is started again, the servers ask again
for what they wait for, behind the tokens that they have (`ask`), and instances go on at epochs above those that they were told
(`Description.epoch`). A request has a name of its own among instances, other than its caller's: tokens of a former life are for
nobody.

Time is counted in looks of this loop. So a process that did not run takes nobody for gone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from remap.errors import Error, InvalidArgument, InvalidState

from .ledger import Delivery
from .metrics import cluster_text
from .seen import cluster_state, health_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from remap_serve.engine.request import Request, TokenLogprobs

    from .front import Front

__all__ = ["ClusterNews", "Keeper", "UnknownServer"]

LOG = logging.getLogger(__name__)
LOOK_S = 1.0
SILENT = 10
"""Looks after which a server that does not poll is gone."""
WAITING = 60
"""Looks for which a request with a key goes on that no server waits for any more."""
KEPT = 600
"""Looks for which its answer is kept."""
MOST_KEPT = 1024
"""Answers that are kept; the oldest go first."""
DESERTED = 60
"""Looks without any server after which the cluster ends."""


class UnknownServer(InvalidState):
    """This server was not heard of for a while, or the keeper has been started again: it greets, and asks again. Fields:
    server."""


@dataclass(frozen=True)
class ClusterNews:
    """deliveries: for calls of the server, by their numbers. rejected, failure, over: as of `Front`; a failure is its text."""

    deliveries: tuple[tuple[int, Delivery | Error], ...]
    health: Mapping[str, Any]
    rejected: Mapping[str, Error]
    failure: str | None
    over: bool


@dataclass(eq=False)
class _Server:
    """deliveries: that it has not polled yet. calls: the ids of its callers' requests, by number. silent: looks since it
    polled."""

    deliveries: list[tuple[int, Delivery | Error]] = field(default_factory=list)
    calls: dict[int, str] = field(default_factory=dict)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    silent: int = 0

    def put(self, number: int, found: Delivery | Error) -> None:
        self.deliveries.append((number, found))
        self.came.set()


@dataclass(eq=False)
class _Accepted:
    """A request, with its answer up to now. callers: server and number, with the tokens that each has. left: looks since there
    was one."""

    request: Request
    keyed: bool
    tokens: list[int]
    noted: list[TokenLogprobs]
    prompt: tuple[TokenLogprobs, ...]
    callers: dict[tuple[str, int], int] = field(default_factory=dict)
    reason: str | None = None
    task: asyncio.Task[None] | None = None
    left: int = 0

    def behind(self, place: int) -> Delivery:
        return Delivery(
            place,
            tuple(self.tokens[place:]),
            self.reason,
            tuple(self.noted[place:]),
            () if place else self.prompt,
        )


class Keeper:
    """One front for several servers. options: of the cluster, which each server has to have as well."""

    def __init__(self, front: Front[Request], options: Mapping[str, object] | None = None) -> None:
        self.over = asyncio.Event()
        """No server is left."""
        self._front = front
        self._options = {} if options is None else options
        self._servers: dict[str, _Server] = {}
        self._accepted: dict[str, _Accepted] = {}
        self._deserted = 0
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """As `Front.start`."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        await self._front.start()

    async def close(self) -> None:
        """As `Front.close`."""
        if self._watching is not None:
            self._watching.cancel()
        await self._front.close()

    # -- what servers ask -----------------------------------------------------------------------------------------------------

    def greet(self, server: str, options: Mapping[str, object] | None = None) -> None:
        """A server, which serves from now on, or again. Raises InvalidArgument (fields field, differs), with nothing changed,
        if it would make another cluster."""
        given = {} if options is None else options
        names = sorted(self._options.keys() | given.keys())
        differs = [name for name in names if self._options.get(name) != given.get(name)]
        if differs:
            what = ", ".join(f"{name} {given.get(name)!r}, not {self._options.get(name)!r}" for name in differs)
            raise InvalidArgument(
                f"shared: the cluster of this name has other options, here are {what}; nothing was started; give the same "
                "options, or another name",
                field="shared",
                differs=tuple(differs),
            )
        if server not in self._servers:
            LOG.info("server %s serves", server)
        self._drop(server)
        self._servers[server] = _Server()

    def leave(self, server: str) -> None:
        """This server ends. With the last one the cluster does."""
        LOG.info("server %s leaves", server)
        self._drop(server)
        if not self._servers:
            self.over.set()

    def ask(self, server: str, number: int, id: str, request: Request, had: Delivery, keyed: bool) -> None:
        """The answer to a request, behind what the caller had, for this call of the server. Whoever asks for the same id gets the
        same answer.

        Raises UnknownServer, and InvalidArgument (field id) for the id of another request.
        """
        one = self._known(server)
        found = self._accepted.get(id)
        if found is not None and found.request != request:
            raise InvalidArgument(
                f"the key of request {id!r} is another request's; nothing was asked; a key is for one body", id=id
            )
        if found is None:
            found = _Accepted(request, keyed, list(had.tokens), list(had.noted), had.prompt)
            self._accepted[id] = found
            found.task = asyncio.get_running_loop().create_task(self._answer(id, found))
        one.calls[number] = id
        found.callers[server, number] = len(had.tokens)
        found.left = 0
        if len(found.tokens) > len(had.tokens) or found.reason is not None:
            self._tell(id, found)

    async def poll(self, server: str, left: Iterable[int], timeout_s: float) -> ClusterNews:
        """What came for the server's callers; waits for timeout_s for any. left: calls that wait for no more. Raises
        UnknownServer."""
        one = self._known(server)
        one.silent = 0
        for number in left:
            self._leave_call(server, number)
        if not one.deliveries:
            one.came.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(one.came.wait(), timeout_s)
        one.silent = 0
        deliveries, one.deliveries = one.deliveries, []
        front = self._front
        failure = None if front.failure is None else f"{type(front.failure).__name__}: {front.failure}"
        return ClusterNews(tuple(deliveries), health_of(front), dict(front.rejected), failure, front.over.is_set())

    def state(self) -> dict[str, Any]:
        """`cluster_state`, and how many servers there are."""
        return cluster_state(self._front) | {"servers": len(self._servers)}

    def figures(self) -> bytes:
        """The cluster's part of /metrics."""
        return cluster_text(self._front)

    def renew_soon(self) -> None:
        """As `Front.renew_soon`."""
        self._front.renew_soon()

    # -- requests -------------------------------------------------------------------------------------------------------------

    async def _answer(self, id: str, one: _Accepted) -> None:
        name = f"{id}~{secrets.token_hex(4)}"
        answer = self._front.generate(name, replace(one.request, id=name), tuple(one.tokens))
        try:
            async with aclosing(answer) as deliveries:
                async for delivery in deliveries:
                    one.tokens += delivery.tokens
                    one.noted += delivery.noted
                    one.prompt = one.prompt or delivery.prompt
                    one.reason = delivery.finish_reason
                    self._tell(id, one)
        except Error as error:
            # Not kept: another time may do better.
            for server, number in one.callers:
                self._servers[server].put(number, error)
            self._forget(id)

    def _tell(self, id: str, one: _Accepted) -> None:
        for (server, number), place in one.callers.items():
            if place < len(one.tokens) or one.reason is not None:
                self._servers[server].put(number, one.behind(place))
                one.callers[server, number] = len(one.tokens)
        if one.reason is None:
            return
        for server, number in one.callers:
            self._servers[server].calls.pop(number, None)
        one.callers.clear()
        if not one.keyed:
            self._forget(id)

    def _leave_call(self, server: str, number: int) -> None:
        id = self._servers[server].calls.pop(number, None)
        one = None if id is None else self._accepted.get(id)
        if id is not None and one is not None:
            one.callers.pop((server, number), None)
            if not one.callers and one.reason is None:
                self._forget(id)

    def _forget(self, id: str) -> None:
        one = self._accepted.pop(id)
        if one.task is not None and one.task is not asyncio.current_task():
            one.task.cancel()  # which cancels the request, if it is unfinished

    # -- servers --------------------------------------------------------------------------------------------------------------

    def _known(self, server: str) -> _Server:
        if server not in self._servers:
            raise UnknownServer(
                f"server {server!r} is not known here; nothing changed; greet, and ask again", server=server
            )
        return self._servers[server]

    def _drop(self, server: str) -> None:
        gone = self._servers.pop(server, None)
        for number, id in () if gone is None else gone.calls.items():
            one = self._accepted.get(id)
            if one is not None:
                one.callers.pop((server, number), None)
                if not one.callers and not one.keyed:
                    self._forget(id)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        for name, server in list(self._servers.items()):
            server.silent += 1
            if server.silent > SILENT:
                LOG.warning("server %s is gone, with %d calls", name, len(server.calls))
                self._drop(name)
        self._deserted = 0 if self._servers else self._deserted + 1
        if self._deserted > DESERTED:
            LOG.warning("no server has been here for %g s: the cluster ends", self._deserted * LOOK_S)
            self.over.set()
        kept = [id for id, one in self._accepted.items() if one.reason is not None]
        for id in kept[: max(0, len(kept) - MOST_KEPT)]:
            self._forget(id)
        for id, one in list(self._accepted.items()):
            one.left = 0 if one.callers else one.left + 1
            if one.left > (WAITING if one.reason is None else KEPT):
                self._forget(id)
