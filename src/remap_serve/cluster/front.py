# SPDX-License-Identifier: Apache-2.0
"""The process that serves: it connects a `Service` with the instances and with the callers. Asynchronous, without Ray.

One event loop owns the service, with control and ledger, and every caller; no other thread touches them, so nothing
here is locked. Each instance has one task that asks for its tokens and its report, again and again (a poll waits at the
instance until there is something); commands go out as tasks of their own, in any order, which the epochs allow for.

An instance counts as dead when its connection says so (`Lost`), and control evicts those that are silent. Then its task asks
it to describe itself again until it is back, and it joins. While this process did not run (a suspended machine, a debugger),
it heard no instance, and that is no instance's fault: such time does not count (`_now`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from remap.errors import Error, InvalidArgument, InvalidState

from .caller import Caller
from .control import Control
from .groups import GroupView
from .ledger import Delivery
from .messages import (
    Abort,
    BringHome,
    ChangeRefused,
    Commit,
    Decline,
    Description,
    Died,
    Evict,
    GiveUp,
    InstanceReport,
    Joined,
    Leaving,
    Prepare,
    Prepared,
    Recover,
    Reported,
    TakeAway,
    Tick,
    Tokens,
)
from .service import Action, Cancel, Fatal, Service, Submit

__all__ = ["Connection", "Front", "InstanceFailed", "Lost"]

LOG = logging.getLogger(__name__)
POLL_S = 0.25
"""Seconds that a poll waits for tokens at most; so often an instance reports at least."""
TICK_S = 0.1
ASLEEP_S = 1.0
"""A tick that comes so late: this process did not run."""
REJOIN_S = 0.2
"""Seconds between two attempts to reach an instance that is being started."""
RENEW_S = 60.0
"""For so long an instance that is to be replaced has time for its requests."""
PATIENCE_S = 60.0
"""For so long the start waits for others when one instance serves."""

RequestT = TypeVar("RequestT")


class Lost(Error):
    """An instance's process is gone. Fields: instance, returns (whether it is being started again), why. Where they are known
    also: pid, node, log, signal (its name) or exit_code, outside (as of `messages.Death`)."""


class InstanceFailed(Error):
    """A call of an instance raised an error that is none of this library's. Fields: instance, method, cause (its name)."""


class Connection(Protocol):
    """One instance, wherever it runs."""

    @property
    def name(self) -> str: ...

    async def call(self, method: str, *arguments: object) -> Any:
        """Call the instance's method. Raises what that raises, Lost if its process is gone, InstanceFailed for other errors."""

    def kill(self) -> None:
        """End its process; it may be started again."""


class Front(Generic[RequestT]):
    """Requests on a cluster, for callers in this event loop.

    size: tokens of a request's prompt. The caller awaits `start` before anything else and `close` at the end.
    """

    def __init__(
        self,
        control: Control,
        connections: Sequence[Connection],
        size: Callable[[RequestT], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = Service[RequestT](control, size)
        self.rejected: dict[str, Error] = {}
        """Instances that may not join, or do not come back, and why."""
        self.failure: BaseException | None = None
        """The error that ended a task that must not end: a defect. Every request is answered with it."""
        self.over = asyncio.Event()
        """No request will be served any more: there is a failure, or every instance is `rejected` or gone for good."""
        self.reports: dict[str, InstanceReport] = {}
        """The last one of each instance that has a process."""
        self.restarts = 0
        """Submissions of a request beyond its first: it was lost, or had come to an instance that was no head any more."""
        self._connections = {each.name: each for each in connections}
        self._clock = clock
        self._looked_s = clock()
        self._asleep_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._callers: dict[str, Caller] = {}
        self._serving, self._complete = asyncio.Event(), asyncio.Event()
        self._closing = False
        self.draining = False
        """No request is taken any more, and those that there are end."""
        self._idle = asyncio.Event()  # no request is unfinished, and none comes
        self._told: set[str] = set()  # instances that are gone, which was said
        self._suspect: str | None = None  # which was said
        self._renewing = False

    async def start(self, patience_s: float = PATIENCE_S) -> None:
        """Connect; returns when every instance serves or was rejected, or patience_s after the first one serves. The others join
        when they come. Raises what rejected the first one, if none may join, and `failure`."""
        for connection in self._connections.values():
            self._spawn(self._attend(connection))
        self._spawn(self._ticks())
        await self._serving.wait()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._complete.wait(), patience_s)
        if self.failure is not None:
            raise self.failure
        if len(self.rejected) == len(self._connections):
            await self.close()
            raise next(iter(self.rejected.values()))

    async def drain(self) -> None:
        """Take no new requests; returns when those that are unfinished have ended."""
        self.draining = True
        if self._callers:
            await self._idle.wait()

    async def renew(self, name: str, patience_s: float = RENEW_S) -> None:
        """Replace an instance's process, and return when the new one serves. It gets no new requests before, if others serve, and
        has patience_s to end those that it has; what is left starts again elsewhere, behind the tokens that were delivered.

        Raises, with nothing changed, InvalidArgument (field instance) for a name that is none, and InvalidState (field instance)
        for one that does not serve; and what rejected the new process. Cancelled before the process is ended, it changes nothing.
        """
        if name not in self._connections:
            raise InvalidArgument(f"there is no instance {name!r}; nothing changed", instance=name)
        if not self.up[name]:
            raise InvalidState(f"instance {name!r} does not serve; nothing changed; wait until it does", instance=name)
        service, end_s = self.service, self._now() + patience_s
        self._event(Leaving(name))
        try:
            while name in service.control.leaving and service.busy(name) and self._now() < end_s:
                await asyncio.sleep(TICK_S)
        except asyncio.CancelledError:
            self._event(Leaving(name, False))
            raise
        if name in service.control.leaving:  # else it has been replaced meanwhile
            LOG.info("instance %s is replaced, with %d requests that start again", name, service.busy(name))
            self._told.add(name)
            self._connections[name].kill()
            self._event(Died(name, why="it was replaced", outside=True))
        while not self.up[name]:
            if name in self.rejected:
                raise self.rejected[name]
            await asyncio.sleep(TICK_S)

    def renew_soon(self) -> None:
        """Begin `renew_all`."""
        self._spawn(self.renew_all())

    async def renew_all(self, patience_s: float = RENEW_S) -> None:
        """`renew` each instance, one after another; one that does not serve is left out. Ends with the first that fails, which is
        logged. Does nothing while it runs already, or when the front closes."""
        if self._renewing or self._closing or self.draining:
            return
        self._renewing = True
        try:
            for name in [name for name, serves in self.up.items() if serves]:
                await self.renew(name, patience_s)
            LOG.info("all instances have been replaced")
        except Error as error:
            LOG.error("not all instances were replaced: %s", error)
        finally:
            self._renewing = False

    def stop(self) -> None:
        """Serve no request any more: unfinished ones are answered with InvalidState, and so are new ones."""
        self._closing = True
        self._fail_all(_closing())

    async def close(self) -> None:
        """Stop, and end every task. Instances are left as they are."""
        self.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def groups(self) -> list[GroupView]:
        """The state, for display."""
        return self.service.control.groups

    @property
    def up(self) -> dict[str, bool]:
        """Every instance that there should be: whether it serves."""
        serving = {part.instance for view in self.groups if view.phase != "recovering" for part in view.stages}
        return {name: name in serving for name in self._connections}

    @property
    def unfinished(self) -> int:
        """Requests that are not answered yet."""
        return len(self.service.ledger)

    async def generate(
        self, id: str, request: RequestT, had: Iterable[int] = (), caller: Caller | None = None
    ) -> AsyncGenerator[Delivery, None]:
        """The request's tokens as they come, behind those that the caller had; the last delivery has the finish reason. A
        caller that stops asking for more cancels it, and so does an error that is put to `caller`.

        Raises InvalidArgument for an id that is in use and for a request that the model cannot serve, NoCopy when no instance is
        left, InvalidState when the server closes.
        """
        if self.failure is not None:
            raise InvalidState("the server has failed and serves no request; restart it") from self.failure
        if self._closing or self.draining:
            raise _closing()
        actions = self.service.ask(id, request, self._now(), had)
        self._callers[id] = caller = caller or Caller()
        try:
            self._carry_out(actions)
            async for delivery in caller:
                yield delivery
        finally:
            self._callers.pop(id, None)
            self._note_idle()
            if self.failure is None:
                self._carry_out(self.service.cancel(id, self._now()))  # does nothing if it is answered

    # -- Instances ------------------------------------------------------------------------------------------------------------

    async def _attend(self, connection: Connection) -> None:
        """One instance's life, and its next ones."""
        while True:
            try:
                if not await self._join(connection):
                    return
                await self._poll(connection)
            except Lost as lost:
                self._tell(logging.WARNING, connection.name, "%s", lost)
                self.reports.pop(connection.name, None)
                known = lost.fields
                why = str(known.get("why", lost))
                self._event(Died(connection.name, bool(lost.returns), why, bool(known.get("outside", False))))
                if not lost.returns:
                    self._reject(connection.name, lost)
                    return
                await asyncio.sleep(REJOIN_S)
            except Error as error:
                self._replace(connection, error)
                await asyncio.sleep(REJOIN_S)

    def _replace(self, connection: Connection, error: Error) -> None:
        """It answers, but not as agreed: another process in its place may do better."""
        self._tell(logging.ERROR, connection.name, "instance %s failed and is killed: %s", connection.name, error)
        self.reports.pop(connection.name, None)
        self._event(Died(connection.name, why=str(error)))
        connection.kill()

    async def _join(self, connection: Connection) -> bool:
        """Whether it may join. One that may not, or that cannot be made, is asked nothing more."""
        try:
            description: Description = await connection.call("describe")
            self._event(Joined(description))
        except (Lost, InstanceFailed):
            raise
        except Error as error:
            LOG.error("instance %s may not join: %s", connection.name, error)
            self._event(Died(connection.name, returns=False))
            self._reject(connection.name, error)
            return False
        LOG.info("instance %s joined: process %d", connection.name, description.pid)
        self._told.discard(connection.name)
        return True

    def _reject(self, name: str, error: Error) -> None:
        self.rejected[name] = error
        self._note_complete()
        if self.rejected.keys() >= self._connections.keys():
            self.over.set()

    def _tell(self, level: int, name: str, text: str, *arguments: object) -> None:
        """That this instance is gone: once until it is back, whatever else fails of it or of calls that were on their way."""
        LOG.log(logging.DEBUG if name in self._told else level, text, *arguments)
        self._told.add(name)

    def _note_complete(self) -> None:
        serving = {name for name, serves in self.up.items() if serves}
        complete = serving | self.rejected.keys() >= self._connections.keys()
        if serving or complete:
            self._serving.set()
        if complete:
            self._complete.set()

    async def _poll(self, connection: Connection) -> None:
        while True:
            outputs: list[Tokens]
            report: InstanceReport
            outputs, report = await connection.call("poll", POLL_S)
            # Tokens first: control may act on the report as if they had been delivered.
            for tokens in outputs:
                delivery = self.service.take(tokens, self._now())
                if delivery is not None and tokens.id in self._callers:
                    self._callers[tokens.id].put(delivery)
            self.reports[connection.name] = report
            self._event(Reported(report))
            if not self._complete.is_set():
                self._note_complete()

    def _now(self) -> float:
        """Seconds on a clock that stands still while this process does not run. Ticks ask for it, so that it is asked often."""
        now_s = self._clock()
        if now_s - self._looked_s > TICK_S + ASLEEP_S:
            self._asleep_s += now_s - self._looked_s - TICK_S
        self._looked_s = now_s
        return now_s - self._asleep_s

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._event(Tick())

    # -- Commands -------------------------------------------------------------------------------------------------------------

    def _event(self, event: Any) -> None:
        actions = self.service.on(event, self._now())
        self._carry_out(actions)
        self._say(actions)

    def _say(self, actions: Sequence[Action[RequestT]]) -> None:
        """Log what an event led to: changes of groups, requests that start again, suspects."""
        news = self.service.control.news
        while news:
            LOG.info("%s", news.popleft())
        again = [each for each in actions if isinstance(each, Submit) and each.submission.attempt > 1]
        if again:
            tokens = sum(len(each.submission.tokens) for each in again)
            LOG.info("%d requests start again, behind %d tokens that they have", len(again), tokens)
        suspects = self.service.suspects
        if suspects and suspects[0] != self._suspect:
            LOG.warning(
                "request %s was there when instances failed; it starts again while %d other suspects wait",
                suspects[0],
                len(suspects) - 1,
            )
        self._suspect = suspects[0] if suspects else None

    def _carry_out(self, actions: Sequence[Action[RequestT]]) -> None:
        for action in actions:
            match action:
                case Decline(id, error):
                    if isinstance(error, Fatal):
                        LOG.error("%s", error)
                    self.end(id, error)
                case Evict(instance, reason):
                    self._tell(logging.WARNING, instance, "instance %s is evicted: %s", instance, reason)
                    self._connections[instance].kill()
                case _:
                    self._spawn(self._send(action))

    async def _send(self, action: Any) -> None:
        """One command to one instance, and its answer."""
        connection, name = self._connections[action.instance], action.instance
        try:
            match action:
                case Prepare(_, plan):
                    await self._ask_of(connection, plan.epoch, "prepare", plan)
                case Commit(_, epoch):
                    await self._ask_of(connection, epoch, "commit", epoch)
                case Abort(_, epoch):
                    await self._ask_of(connection, epoch, "abort", epoch)
                case BringHome(_, epoch, copies):
                    await self._ask_of(connection, epoch, "fetch", epoch, copies)
                case Recover(_, epoch):
                    await self._ask_of(connection, epoch, "recover", epoch)
                case Cancel(_, id, attempt):
                    await connection.call("cancel", id, attempt)
                case TakeAway(_, id):
                    released: int | None = await connection.call("release", id)
                    if released is not None:
                        self._carry_out(self.service.bounced(id, released, self._now()))
                case GiveUp(_, id):
                    await connection.call("give_up", id)
                case Submit(_, submission, epoch):
                    await self._submit(connection, submission, epoch)
        except Lost:
            LOG.debug("instance %s was lost before it answered %s", name, type(action).__name__)  # its task notices too
        except InstanceFailed as error:
            self._replace(connection, error)
        except Error as error:
            LOG.warning("instance %s failed to %s: %s", name, type(action).__name__, error)

    async def _ask_of(self, connection: Connection, epoch: int, method: str, *arguments: object) -> None:
        """A step of a change: control hears of refusals, and of prepared instances."""
        try:
            await connection.call(method, *arguments)
        except Lost:
            raise
        except Error as error:
            LOG.info("instance %s refused to %s epoch %d: %s", connection.name, method, epoch, error)
            self._event(ChangeRefused(connection.name, epoch, type(error).__name__, str(error)))
            return
        if method == "prepare":
            self._event(Prepared(connection.name, epoch))

    async def _submit(self, connection: Connection, submission: Any, epoch: int) -> None:
        self.restarts += submission.attempt > 1
        try:
            await connection.call("submit", submission.request, submission.attempt, submission.tokens, epoch)
        except (Lost, InstanceFailed):
            raise
        except InvalidState:
            # It hands over; or it has lost a peer, which control does not know yet, and would send it there again, and again.
            await asyncio.sleep(TICK_S)
            self._carry_out(self.service.bounced(submission.id, submission.attempt, self._now()))
        except Error as error:
            if self.service.is_last(submission.id, submission.attempt):
                self.end(submission.id, error)

    # -- Callers --------------------------------------------------------------------------------------------------------------

    def end(self, id: str, error: Error) -> None:
        """End a request with this error, which `generate` raises. Unknown ids are ignored: it may have ended."""
        if id in self._callers:
            self._callers[id].put(error)

    def _note_idle(self) -> None:
        if self.draining and not self._callers:
            self._idle.set()

    def _fail_all(self, error: Error) -> None:
        for id in list(self._callers):
            self.end(id, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closing:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        self.failure = error = task.exception()
        LOG.critical("the front failed: %s: %s", type(error).__name__, error, exc_info=error)
        failed = InvalidState("the server has failed; the request was not finished; restart the server")
        failed.__cause__ = error
        self._fail_all(failed)
        for waited in (self.over, self._serving, self._complete):
            waited.set()


def _closing() -> InvalidState:
    return InvalidState("the server is closing; the request was not finished; send it again elsewhere")
