# SPDX-License-Identifier: Apache-2.0
"""Several models on one arena, for callers in one event loop: `SharedEngines` in a thread of its own.

The thread owns the engines, and with them the session. Questions come to it through a queue, which it empties between two passes,
and tokens go back to the event loop, which alone touches what callers wait at. So nothing here is locked.

A model that cannot be given its turn (its pages are not to be had, or a load failed) stays cold: its requests end with the
reason, and the others go on. So does a request that finds no room for its KV. Any other error ends the server, and every request
is answered with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from remap.errors import ArenaBroken, Error, InvalidArgument, InvalidState, OutOfBlocks
from remap.internals import internals

from .caller import Caller
from .ledger import Delivery

if TYPE_CHECKING:
    from remap_serve.engine.engine import StepOutput
    from remap_serve.engine.request import Request
    from remap_serve.engine.sharing import SharedEngines

__all__ = ["ManyModels"]

LOG = logging.getLogger(__name__)

IDLE_S = 0.25
"""So often the session may act while no request is there."""

HUNG_S = 300.0
"""A round of the thread takes so long at most, else it hangs, in a driver or in a lock: as an instance's loop in a cluster. It is
a pass for each active model, and one of them may wait for its layers: 30 GB of them in that time, at the 100 MB/s of a slow
disk. Where nothing is to be done a round takes IDLE_S."""

KEPT_STEPS = 1000
"""Steps of which the engines keep samples, at most."""


@dataclass(frozen=True)
class _Asked:
    model: str
    request: Request


@dataclass(frozen=True)
class _Cancelled:
    model: str
    id: str


class ManyModels:
    """The models' requests. The caller awaits `start` before anything else, in its event loop, and `close` at the end."""

    def __init__(self, shared: SharedEngines, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_cold: Callable[[str, float], None] = lambda model, seconds: None
        """Called in the event loop with a model that was cold, and the seconds of `cold_s`."""
        self.failure: BaseException | None = None
        """The error that ended the thread."""
        self.over = asyncio.Event()
        self.draining = False
        self.rejected: Mapping[str, Error] = {}
        self._shared = shared
        self._questions = queue.SimpleQueue[_Asked | _Cancelled | None]()  # None: end
        self._callers: dict[str, Caller] = {}
        self._cold: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        self._closing = False
        self._idle = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="remap-models", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Of the thread: requests that have no token yet, by model; since when a cold one is asked for; steps.
        self._new: dict[str, dict[str, Request]] = {name: {} for name in shared.engines}
        self._begun: dict[str, float] = {}
        self._steps = 0
        # When the thread began its round. It writes it, `hangs` reads it: one number.
        self._round_s, self._clock = math.inf, clock

    async def start(self) -> None:
        """Begin to serve."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def drain(self) -> None:
        """Take no new requests; returns when those that are unfinished have ended."""
        self.draining = True
        if self._callers:
            await self._idle.wait()

    def stop(self) -> None:
        """Serve no request any more: unfinished ones are answered with InvalidState, and so are new ones."""
        self._closing = True
        for id in list(self._callers):
            self.end(id, _closing())

    async def close(self) -> None:
        """Stop, and end the thread behind its present pass. Engines and session are the caller's again."""
        self.stop()
        self._questions.put(None)
        if self._loop is not None:
            await asyncio.to_thread(self._thread.join)

    @property
    def unfinished(self) -> int:
        """Requests that are not answered yet."""
        return len(self._callers)

    @property
    def hangs(self) -> bool:
        """Whether the thread's round has taken longer than HUNG_S."""
        return self._clock() - self._round_s > HUNG_S

    def cold_s(self, request: Request) -> float:
        """Seconds from the first sign of a request for this one's model, which had no pages for some of its layers then, to the
        end of its first pass, its wait for a turn included; 0 for a request that met a warm model. Known once it has its
        first token."""
        return self._cold.get(request, 0.0)

    def of(self, model: str) -> OneOfMany:
        """What answers this model's requests."""
        return OneOfMany(self, model)

    async def generate(
        self, model: str, id: str, request: Request, caller: Caller | None = None
    ) -> AsyncGenerator[Delivery, None]:
        """As `Front.generate`, of this model."""
        if self.failure is not None:
            raise InvalidState("the server has failed and serves no request; restart it") from self.failure
        if self._closing or self.draining:
            raise _closing()
        if id in self._callers:
            raise InvalidArgument(f"request id {id!r} is in use; ids must be unique; nothing was asked", id=id)
        self._callers[id] = caller = caller or Caller()
        self._questions.put(_Asked(model, request))
        ended = False
        try:
            async for delivery in caller:
                ended = delivery.finish_reason is not None
                yield delivery
        finally:
            del self._callers[id]
            self._note_idle()
            if not ended:
                self._questions.put(_Cancelled(model, id))

    def _note_idle(self) -> None:
        if self.draining and not self._callers:
            self._idle.set()

    def end(self, id: str, error: Error) -> None:
        """End a request with this error, which `generate` raises. Unknown ids are ignored: it may have ended."""
        if id in self._callers:
            self._callers[id].put(error)

    # -- in the event loop, from the thread --------------------------------------------------------------------------------------

    def _hand_out(
        self, news: list[tuple[str, Delivery | Error]], turns: list[tuple[str, float, list[Request]]]
    ) -> None:
        for model, seconds, requests in turns:
            self.on_cold(model, seconds)
            self._cold.update(dict.fromkeys(requests, seconds))
        for id, found in news:
            if id in self._callers:
                self._callers[id].put(found)

    def _fail(self, error: BaseException) -> None:
        LOG.critical("the engines failed: %s: %s", type(error).__name__, error, exc_info=error)
        self.failure = error
        failed = InvalidState("the server has failed; the request was not finished; restart the server")
        failed.__cause__ = error
        for id in list(self._callers):
            self.end(id, failed)
        self.over.set()

    # -- in the thread -----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._loop is not None
        try:
            while True:
                self._round_s = self._clock()
                refused = self._take()
                if refused is None:
                    return
                news, turns = self._step()
                if refused or news or turns:
                    self._loop.call_soon_threadsafe(self._hand_out, [*refused, *news], turns)
        except BaseException as error:  # noqa: BLE001  whatever it is, callers wait for an answer
            with suppress(RuntimeError):  # the loop is closed: no caller waits
                self._loop.call_soon_threadsafe(self._fail, error)

    def _take(self) -> list[tuple[str, Delivery | Error]] | None:
        """Take the questions that have come; wait for one if there is nothing to do. Returns what refuses some; None: end."""
        refused: list[tuple[str, Delivery | Error]] = []
        wait_s = 0.0 if self._shared.unfinished else IDLE_S
        while True:
            try:
                question = self._questions.get(timeout=wait_s) if wait_s else self._questions.get_nowait()
            except queue.Empty:
                return refused
            wait_s = 0.0
            if question is None:
                return None
            engine = self._shared.engines[question.model]
            if isinstance(question, _Cancelled):
                self._new[question.model].pop(question.id, None)
                with suppress(InvalidArgument):  # it has ended
                    engine.abort(question.id)
                continue
            request = question.request
            if internals(engine.tenant).cold:
                self._begun.setdefault(question.model, time.perf_counter())
            try:
                engine.add_request(request)
                self._new[question.model][request.id] = request
            except Error as error:
                refused.append((request.id, error))

    def _step(self) -> tuple[list[tuple[str, Delivery | Error]], list[tuple[str, float, list[Request]]]]:
        """One step: what callers get of it, and the turns of cold models that have begun, with the requests that waited."""
        try:
            done = self._shared.step()
        except ArenaBroken:
            raise
        except Error as error:
            return self._ended_by(error), []
        turns = []
        news: list[tuple[str, Delivery | Error]] = []
        for model, step in done.items():
            if step.computed and model in self._begun:
                waiting = list(self._new[model].values())
                turns.append((model, time.perf_counter() - self._begun.pop(model), waiting))
            news += self._deliveries(model, step)
        self._steps += 1
        if self._steps % KEPT_STEPS == 0:
            self._shared.forget_samples()
        return news, turns

    def _deliveries(self, model: str, step: StepOutput) -> list[tuple[str, Delivery | Error]]:
        reasons = {output.id: output.finish_reason for output in step.finished}
        found: list[tuple[str, Delivery | Error]] = []
        for sequence, token in zip(step.sampled, step.chosen, strict=True):
            at = sequence.length - 1
            place = at - sequence.prompt_tokens
            noted, prompt = sequence.noted_of(at, at + 1), () if place else sequence.noted_of(1, at)
            found.append((sequence.id, Delivery(place, (token,), reasons.get(sequence.id), noted, prompt)))
            sequence.noted.clear()  # its caller has got them
            self._new[model].pop(sequence.id, None)
        return found

    def _ended_by(self, error: Error) -> list[tuple[str, Delivery | Error]]:
        """The requests that end with this error of a step: the one that has its engine to itself and finds no room, or those of
        the model whose layers could not be brought. Raises it if it is neither's."""
        if isinstance(error, OutOfBlocks) and "request" in error.fields:
            id = str(error.fields["request"])
            for model, engine in self._shared.engines.items():
                with suppress(InvalidArgument):
                    engine.abort(id)
                    self._new[model].pop(id, None)
                    LOG.warning("request %s ends: %s", id, error)
                    return [(id, error)]
        cold = self._shared.beginning
        if cold is None:
            raise error
        LOG.warning("the layers of model %s cannot be brought, and its requests end: %s", cold, error)
        ids = self._shared.engines[cold].abort_all()
        self._new[cold].clear()
        self._begun.pop(cold, None)
        return [(id, error) for id in ids]


@dataclass(frozen=True)
class OneOfMany:
    """One model of `ManyModels`, as the endpoints see it."""

    models: ManyModels
    model: str

    def generate(self, id: str, request: Request, *, caller: Caller | None = None) -> AsyncGenerator[Delivery, None]:
        """As `ManyModels.generate`."""
        return self.models.generate(self.model, id, request, caller)


def _closing() -> InvalidState:
    return InvalidState("the server is closing; the request was not finished; send it again elsewhere")
