# SPDX-License-Identifier: Apache-2.0
"""An instance over an engine that schedules itself, such as vLLM: it serves alone, and takes part in no change of groups.

The engine has its own queue, its own KV cache and its own way to grow it. An event loop in a thread owns everything here; calls
are carried out in it one after another, so that nothing is locked. Each request has a task that passes its tokens on.

Where an engine cannot go on, `poll` says so, and the instance's process is replaced: its requests start again elsewhere, behind
the tokens that were delivered. The engine counts as hanging when it has requests and says nothing for `HUNG_S`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from remap.errors import Error, InvalidArgument, InvalidState, StalePlan
from remap_serve.policy.cluster.placement import InstanceLoad

from .contract import require_not_recovered
from .ends import last_words, log_here
from .messages import Description, InstanceReport, Tokens
from .wire import require_sendable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from remap_serve.engine.request import Request, TokenLogprobs
    from remap_serve.policy.cluster.placement import Offer

__all__ = ["EngineAnswer", "EngineInstance", "EngineTokens", "SelfSchedulingEngine"]

HUNG_S = 300.0

ValueT = TypeVar("ValueT")


class EngineTokens(NamedTuple):
    """Tokens that a request got. reason: "stop" or "length" with the last of them. noted, prompt: as of `Tokens`."""

    tokens: tuple[int, ...]
    reason: str | None = None
    noted: tuple[TokenLogprobs, ...] = ()
    prompt: tuple[TokenLogprobs, ...] = ()


class EngineAnswer(Protocol):
    """A request in an engine."""

    async def next(self) -> EngineTokens:
        """What it gets next. Raises what ended the engine."""

    async def abort(self) -> None:
        """Take it out. Does nothing if it has ended."""


class SelfSchedulingEngine(Protocol):
    """The engine; all of it is used in one event loop.

    running: requests that have KV, as of its last pass. offers: room that its KV cache may grow by, when requests ask for it.
    failure: the error that ended it. counts: see `ClusterInstance.counts`; those that it does not have are left out.
    """

    @property
    def running(self) -> int: ...

    @property
    def offers(self) -> tuple[Offer, ...]: ...

    @property
    def failure(self) -> BaseException | None: ...

    @property
    def counts(self) -> Mapping[str, float]: ...

    def describe(self, name: str) -> Description:
        """Its model and memory, as those of an instance of this name."""

    async def start(self, request: Request, attempt: int, tokens: Sequence[int]) -> EngineAnswer:
        """Queue a request, which goes on behind these tokens. Raises InvalidArgument for one that it cannot serve."""

    def close(self) -> None:
        """End its processes."""


@dataclass(eq=False)
class _Here:
    """A request that is here; `made`: its tokens, those of earlier attempts among them. answer and task: None while it is being
    queued."""

    request: Request
    attempt: int
    made: int
    answer: EngineAnswer | None = None
    task: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> int:
        return len(self.request.prompt) + self.made


class EngineInstance:
    """See the module; its calls are those of `ServingInstance`. make: makes the engine, in the loop that uses it.

    Raises what `make` raises.
    """

    def __init__(
        self, name: str, make: Callable[[], Coroutine[Any, Any, SelfSchedulingEngine]], hung_s: float = HUNG_S
    ) -> None:
        self.name = name
        self._hung_s = hung_s
        self._here: dict[str, _Here] = {}  # in the order in which they came
        self._ends = set[asyncio.Task[None]]()  # of requests that are taken out
        self._outputs: list[Tokens] = []
        self._news = asyncio.Event()
        self._failed: BaseException | None = None
        self._epoch = 0
        self._heard_s = 0.0  # when the engine said something, or had nothing to say
        # Calls are in the loop before it is asked to close, or not at all.
        self._closing, self._closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"instance {name}", daemon=True)
        self._thread.start()
        try:
            self._engine = self._ask(make())
        except BaseException:
            self._end_loop()
            raise

    # -- what control asks, in any thread ------------------------------------------------------------------------------------

    def describe(self) -> Description:
        """The instance's name and capacity."""
        return replace(self._engine.describe(self.name), pid=os.getpid(), merges=False, epoch=self._epoch)

    def recover(self, epoch: int) -> tuple[str, ...]:
        """See `ServingInstance`. An engine that has failed does not recover: raises InvalidState (field instance) then."""
        return self._ask(self._recover(epoch))

    def submit(self, request: Request, attempt: int, tokens: Sequence[int] = (), epoch: int | None = None) -> None:
        """See `ServingInstance`."""
        self._ask(self._submit(request, attempt, tuple(tokens), epoch))

    def cancel(self, id: str, attempt: int | None = None) -> None:
        """See `ServingInstance`."""
        self._ask(self._cancel(id, attempt))

    def release(self, id: str) -> int | None:
        """None: an engine that schedules itself starts only with room for the longest request, and none is stuck."""
        return None

    def give_up(self, id: str) -> None:
        """Does nothing, see `release`."""

    def poll(self, timeout_s: float = 0.0) -> tuple[list[Tokens], InstanceReport]:
        """See `ServingInstance`. Raises InvalidState (fields instance, silent_s) for an engine that hangs."""
        return self._ask(self._poll(timeout_s))

    def close(self) -> None:
        """End the engine and the loop; calls that wait raise InvalidState. A second call does nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            end = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        end.result()
        self._end_loop()

    def _ask(self, call: Coroutine[Any, Any, ValueT]) -> ValueT:
        """Carry this out in the loop: its result, or what it raises."""
        with self._closing:
            if self._closed:
                call.close()
                raise self._is_closed()
            answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return answer.result()
        except CancelledError:  # by `_close`
            raise self._is_closed() from None

    def _is_closed(self) -> InvalidState:
        return InvalidState(f"instance {self.name!r} is closed; nothing changed", instance=self.name)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- in the loop -----------------------------------------------------------------------------------------------------------

    async def _submit(self, request: Request, attempt: int, tokens: tuple[int, ...], epoch: int | None) -> None:
        require_not_recovered(self.name, request.id, epoch, self._epoch)
        self._require_whole()
        require_sendable(request)
        here = self._here.get(request.id)
        if here is not None and here.attempt >= attempt:
            raise InvalidArgument(f"request id {request.id!r} is in use; nothing was queued", id=request.id)
        if here is not None:
            self._take_out(here)
            raise InvalidState(
                f"an older attempt of request {request.id!r} was here and is cancelled; nothing was queued; submit it again",
                instance=self.name,
            )
        if not self._here:
            self._heard_s = self._loop.time()
        new = self._here[request.id] = _Here(request, attempt, len(tokens))
        try:
            answer = await self._engine.start(request, attempt, tokens)
        except BaseException as error:
            if self._here.get(request.id) is new:
                del self._here[request.id]
            if isinstance(error, Error) or not isinstance(error, Exception):
                raise
            self._fail(error)
            raise self._failure(error) from error
        if self._here.get(request.id) is new:
            new.answer, new.task = answer, self._loop.create_task(self._follow(new, answer))
        else:  # it was cancelled meanwhile, or the instance has recovered
            await answer.abort()

    async def _follow(self, here: _Here, answer: EngineAnswer) -> None:
        """Pass its tokens on until it ends."""
        try:
            reason = None
            while reason is None:
                came = await answer.next()
                self._heard_s, reason = self._loop.time(), came.reason
                first, here.made = here.made, here.made + len(came.tokens)
                self._emit(Tokens(here.request.id, here.attempt, first, came.tokens, reason, came.noted, came.prompt))
            del self._here[here.request.id]
        except Exception as error:  # noqa: BLE001
            self._fail(error)  # whatever it was: the state of the engine is not known

    async def _cancel(self, id: str, attempt: int | None) -> None:
        here = self._here.get(id)
        if here is not None and (attempt is None or here.attempt <= attempt):
            self._take_out(here)
            self._emit(Tokens(id, here.attempt, here.made, (), "abort"))

    async def _recover(self, epoch: int) -> tuple[str, ...]:
        if epoch <= self._epoch:
            raise StalePlan(
                f"instance {self.name!r} is at epoch {self._epoch}, and is to recover at {epoch}; nothing changed",
                plan_epoch=epoch,
                epoch=self._epoch,
            )
        self._require_whole()
        ids = tuple(self._here)
        for here in list(self._here.values()):
            self._take_out(here)
        self._epoch = epoch
        return ids

    async def _poll(self, timeout_s: float) -> tuple[list[Tokens], InstanceReport]:
        if not self._outputs and self._engine.failure is None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout_s)
        self._news.clear()
        outputs, self._outputs = self._outputs, []
        if not outputs:
            self._require_whole()
            self._require_awake()
        return outputs, self._report()

    async def _close(self) -> None:
        for here in list(self._here.values()):
            self._take_out(here)
        await asyncio.gather(*self._ends)
        self._engine.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _report(self) -> InstanceReport:
        # The engine begins with requests in the order in which they came; one that it has preempted has the fewest tokens
        # computed since, but which that is it does not say.
        begun = sorted(self._here.values(), key=lambda each: each.made == 0)
        running, waiting = begun[: self._engine.running], begun[self._engine.running :]
        load = InstanceLoad(
            len(running),
            sum(each.tokens for each in running),
            tuple(each.tokens + 1 for each in waiting),
            max((each.tokens + 1 for each in begun), default=0),
        )
        requests = tuple((id, here.attempt) for id, here in self._here.items())
        engine = self._engine
        return InstanceReport(
            self.name, self._epoch, load=load, requests=requests, offers=engine.offers, counts=dict(engine.counts)
        )

    def _take_out(self, here: _Here) -> None:
        """Forget it; the engine hears of that too."""
        del self._here[here.request.id]
        if here.task is not None and here.answer is not None:
            here.task.cancel()
            end = self._loop.create_task(self._abort(here.answer))
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)

    async def _abort(self, answer: EngineAnswer) -> None:
        try:
            await answer.abort()
        except Exception as error:  # noqa: BLE001
            self._fail(error)  # as in `_follow`

    def _emit(self, tokens: Tokens) -> None:
        self._outputs.append(tokens)
        self._news.set()

    def _fail(self, error: BaseException) -> None:
        self._failed = self._failed or error
        self._news.set()

    def _require_whole(self) -> None:
        """Raises InvalidState (fields instance, cause) if the engine has failed."""
        error = self._failed or self._engine.failure
        if error is not None:
            raise self._failure(error) from error

    def _failure(self, error: BaseException) -> InvalidState:
        return InvalidState(
            f"the engine of instance {self.name!r} has failed: {type(error).__name__}: {error}; end its process{_said()}",
            instance=self.name,
            cause=type(error).__name__,
            log=log_here(),
        )

    def _require_awake(self) -> None:
        if not self._here:
            self._heard_s = self._loop.time()
        silent_s = self._loop.time() - self._heard_s
        if silent_s > self._hung_s:
            raise InvalidState(
                f"the engine of instance {self.name!r} has {len(self._here)} requests and has said nothing for "
                f"{silent_s:.0f} s: it hangs; end its process",
                instance=self.name,
                silent_s=silent_s,
            )


def _said() -> str:
    """An engine's own processes write where this one does: what an error here does not say of its cause is there."""
    log = log_here()
    return f"; its log {log} ends with: {last_words(log)}" if log else ""
