# SPDX-License-Identifier: Apache-2.0
"""The front of a cluster that several servers share, as one of these has it: calls of its callers, and a poll. Asynchronous,
without Ray.

The front itself is elsewhere, in a `Keeper`. Here is what callers have had. When the keeper is started again, or has not heard of
this server for a while, it is asked again for everything that callers wait for, behind that; they see a pause.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from remap.errors import Error, InvalidState

from .caller import Caller
from .front import POLL_S, REJOIN_S, InstanceFailed, Lost
from .keeper import ClusterNews, UnknownServer
from .ledger import Delivery

if TYPE_CHECKING:
    from collections.abc import Mapping

    from remap_serve.engine.request import Request

    from .answers import Answering
    from .front import Connection

__all__ = ["SharedFront"]

LOG = logging.getLogger(__name__)
AWAY_S = 10.0
"""The keeper was not heard of for so long: /health says so."""
NOTHING_HAD = Delivery(0, (), None)


@dataclass(eq=False)
class _Call:
    id: str
    request: Request
    keyed: bool
    had: Delivery = NOTHING_HAD
    caller: Caller = field(default_factory=Caller)

    def take(self, came: Delivery) -> bool:
        """Whether it begins where this call is; what is known already is left out."""
        skip = len(self.had.tokens) - came.first
        if skip < 0:
            return False
        new = Delivery(came.first + skip, came.tokens[skip:], came.finish_reason, came.noted[skip:], came.prompt)
        if new.first:
            new = replace(new, prompt=())
        if new.tokens or new.finish_reason is not None:
            had = self.had
            self.had = Delivery(0, had.tokens + new.tokens, None, had.noted + new.noted, had.prompt or new.prompt)
            self.caller.put(new)
        return True


class SharedFront:
    """See the module. keeper: where the front is. options: of the cluster. The caller awaits `start` before anything else and
    `close` at the end."""

    def __init__(self, keeper: Connection, options: Mapping[str, object] | None = None) -> None:
        self.name = secrets.token_hex(4)
        self.over = asyncio.Event()
        self.failure: BaseException | None = None
        self.rejected: Mapping[str, Error] = {}
        self.draining = False
        self._keeper = keeper
        self._options = options
        self._calls: dict[int, _Call] = {}
        self._numbers = count()
        self._left: list[int] = []  # that the keeper does not know yet
        self._renew = False
        self._again = False  # it is to be greeted, and asked again
        self._health: dict[str, Any] = {}
        self._heard_s = 0.0
        self._closing = False
        self._idle = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the cluster serves. Raises what the keeper refuses this server for."""
        await self._keeper.call("greet", self.name, self._options)
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    @property
    def unfinished(self) -> int:
        """Calls of this server without their answer."""
        return len(self._calls)

    @property
    def keyed(self) -> Answering:
        """For requests with a key: another server may be asked for them as well, and they outlive this one."""
        return _Keyed(self)

    @property
    def health(self) -> dict[str, Any]:
        """As `health_of`, of this server."""
        away = asyncio.get_running_loop().time() - self._heard_s > AWAY_S
        if self.draining or away or self.failure is not None:
            return self._health | {"status": "draining" if self.draining else "no instance serves", "serving": 0}
        return self._health

    async def state(self) -> dict[str, Any]:
        """As `Keeper.state`."""
        found: dict[str, Any] = await self._keeper.call("state")
        return found

    async def figures(self) -> bytes:
        """As `Keeper.figures`; nothing while the keeper is away."""
        try:
            found: bytes = await self._keeper.call("figures")
        except Error:
            return b""
        return found

    def renew_soon(self) -> None:
        """As `Front.renew_soon`, with the next poll."""
        self._renew = True

    async def generate(
        self, id: str, request: Request, keyed: bool = False, caller: Caller | None = None
    ) -> AsyncGenerator[Delivery, None]:
        """As `Front.generate`."""
        if self.failure is not None or self._closing or self.draining:
            raise _closing()
        number = next(self._numbers)
        call = self._calls[number] = _Call(id, request, keyed, caller=caller or Caller())
        try:
            await self._ask(number, call)
            async for delivery in call.caller:
                yield delivery
        finally:
            del self._calls[number]
            if not self._closing:  # else `leave` says so of all: callers with a key may come back elsewhere
                self._left.append(number)
            self._note_idle()

    def stop(self) -> None:
        """As `Front.stop`."""
        self._closing = True
        self._end_all(_closing())

    async def drain(self) -> None:
        """As `Front.drain`."""
        self.draining = True
        if self._calls:
            await self._idle.wait()

    async def close(self) -> None:
        """Stop, and leave the cluster; it ends with its last server."""
        self.stop()
        if self._polling is None:
            return
        self._polling.cancel()
        await asyncio.gather(self._polling, return_exceptions=True)
        try:
            await asyncio.wait_for(self._keeper.call("leave", self.name), AWAY_S)
        except (Error, asyncio.TimeoutError) as error:
            LOG.info("the cluster does not know that this server ends: %s", error)

    def _note_idle(self) -> None:
        if self.draining and not self._calls:
            self._idle.set()

    # -- the keeper -----------------------------------------------------------------------------------------------------------

    async def _ask(self, number: int, call: _Call) -> None:
        try:
            await self._keeper.call("ask", self.name, number, call.id, call.request, call.had, call.keyed)
        except (Lost, InstanceFailed, UnknownServer):
            self._again = True
        except Error as error:
            call.caller.put(error)

    async def _poll(self) -> None:
        while True:
            left, self._left = self._left, []
            try:
                if self._again:
                    await self._greet()
                    left = []  # it has forgotten them
                if self._renew:
                    await self._keeper.call("renew_soon")
                    self._renew = False
                news: ClusterNews = await self._keeper.call("poll", self.name, tuple(left), POLL_S)
                self._take(news)
            except Error as error:
                if isinstance(error, Lost) and not error.returns:
                    self._fail(error)
                    return
                self._left = left + self._left
                LOG.log(logging.DEBUG if self._again else logging.WARNING, "asked again after: %s", error)
                self._again = True
                await asyncio.sleep(REJOIN_S)

    async def _greet(self) -> None:
        await self._keeper.call("greet", self.name, self._options)
        self._again = False
        LOG.info("the keeper of the cluster is asked again for %d calls", len(self._calls))
        for number, call in list(self._calls.items()):
            await self._ask(number, call)

    def _take(self, news: ClusterNews) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        self._health, self.rejected = dict(news.health), news.rejected
        for number, found in news.deliveries:
            call = self._calls.get(number)
            if call is None:
                self._left.append(number)  # it was asked for while its caller went away
                continue
            if isinstance(found, Error):
                call.caller.put(found)
            elif not call.take(found):
                self._again = True  # an answer of the keeper was lost
        if news.failure is not None:
            self._fail(InvalidState(f"the cluster's front failed with {news.failure}"))
        elif news.over:
            self.over.set()

    def _fail(self, error: Error) -> None:
        self.failure = error
        self._end_all(InvalidState(f"the cluster has ended: {error}; the request was not finished; start it again"))
        self.over.set()

    def _end_all(self, error: Error) -> None:
        for call in self._calls.values():
            call.caller.put(error)


@dataclass(frozen=True)
class _Keyed:
    front: SharedFront

    def generate(self, id: str, request: Request, *, caller: Caller | None = None) -> AsyncGenerator[Delivery, None]:
        return self.front.generate(id, request, True, caller)


def _closing() -> InvalidState:
    return InvalidState("this server is closing; the request was not finished here; send it again elsewhere")
