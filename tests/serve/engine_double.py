"""An engine that schedules itself, as vLLM does, and computes nothing: its tokens are those of `control_worlds`.

`TinyEngine` gives each running request a token whenever it is told to (`go`), or by itself. `EngineConnection` is an
`EngineInstance` over one, in this process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cluster_double import STEP_S, LocalConnection
from control_worlds import description, token

from remap.errors import InvalidArgument
from remap_serve.cluster.engine_instance import EngineInstance, EngineTokens
from remap_serve.cluster.messages import Description
from remap_serve.engine.request import Request
from remap_serve.policy.cluster.placement import Offer

MOST = 150
"""Tokens of a request, with its answer."""


class TinyAnswer:
    """tokens: that the request had when it came."""

    def __init__(self, engine: TinyEngine, request: Request, tokens: Sequence[int]) -> None:
        self.engine, self.request, self.made = engine, request, len(tokens)
        self.came = asyncio.Queue[EngineTokens | Exception]()

    async def next(self) -> EngineTokens:
        found = await self.came.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def abort(self) -> None:
        self.engine.aborted[self.request.id] += 1
        if self in self.engine.answers:
            self.engine.answers.remove(self)

    def step(self) -> None:
        request = self.request
        last = self.made + 1 == request.sampling.max_tokens
        self.came.put_nowait(EngineTokens((token(request.id, self.made),), "length" if last else None))
        self.made += 1
        if last:
            self.engine.answers.remove(self)


class TinyEngine:
    """seats: requests that run at once. steps: whether it computes by itself. slow_s: that each start takes."""

    def __init__(self, seats: int = 4, steps: bool = True, slow_s: float = 0.0) -> None:
        self.seats, self.slow_s = seats, slow_s
        self.answers: list[TinyAnswer] = []
        self.aborted = Counter[str]()
        self.offers = (Offer(80, 0.001),)
        self.failure: BaseException | None = None
        self.strange: BaseException | None = None
        self.counts = {"passes": 0.0}
        self.closed = False
        self._task = asyncio.get_running_loop().create_task(self._loop()) if steps else None

    @property
    def running(self) -> int:
        return min(self.seats, len(self.answers))

    def describe(self, name: str) -> Description:
        return description(name)

    async def start(self, request: Request, attempt: int, tokens: Sequence[int]) -> TinyAnswer:
        await asyncio.sleep(self.slow_s)
        if self.strange is not None:
            raise self.strange
        if request.max_kv_tokens > MOST:
            raise InvalidArgument(f"the request must have {MOST} tokens at most; nothing was queued")
        answer = TinyAnswer(self, request, tokens)
        self.answers.append(answer)
        return answer

    def close(self) -> None:
        self.closed = True
        if self._task is not None:
            self._task.cancel()

    def go(self) -> None:
        """One pass."""
        self.counts["passes"] += 1
        for answer in self.answers[: self.running]:
            answer.step()

    def break_down(self, error: Exception) -> None:
        self.failure = error
        for answer in self.answers:
            answer.came.put_nowait(error)

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if self.failure is None:
                self.go()


def made(name: str, **arguments: Any) -> tuple[EngineInstance, TinyEngine]:
    engines: list[TinyEngine] = []

    async def start() -> TinyEngine:
        engines.append(TinyEngine(**arguments))
        return engines[0]

    return EngineInstance(name, start), engines[0]


class EngineConnection(LocalConnection):
    """To an instance over such an engine."""

    def make(self) -> Any:
        instance, self.engine = made(self.name, **self.arguments)
        return instance

    def stop(self) -> None:
        self.instance.close()
