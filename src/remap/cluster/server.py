"""OpenAI's endpoints over a `Front`, with /health, /metrics and /cluster. One event loop runs all of it, and the front.

A caller who goes away cancels his request: what is streamed ends with the response, and beside every other wait the server
listens for the end of the connection. Bodies are read and tokenised in one thread beside the loop: a long prompt holds nobody's
tokens up, and tokenizers need not bear several threads.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Response
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from remap.errors import Error, InvalidState, OutOfBlocks

from .answer_text import AnswerText
from .limits import Admission, Busy, Limits, read_body
from .metrics import Metrics
from .openai import Asked, Chat, Completion, Served, error_of, parse, status_of

if TYPE_CHECKING:
    import socket

    from starlette.types import Receive, Scope, Send

    from remap.engine.request import Request as EngineRequest

    from .front import Front

__all__ = ["NobodyLeft", "cluster_state", "make_app", "serve"]

GRACE_S = 10
"""Seconds that unfinished answers have when the server is asked to end. Those that are left end with an error then."""

LEAVE_S = 2
"""Seconds that callers have to take that error; then their connections are cut."""

GONE = 499
"""The status that nobody reads: of a caller who went away (nginx has the number)."""

DEFAULT = Limits()

ValueT = TypeVar("ValueT")


class NobodyLeft(Error):
    """Every instance is gone, and none comes back. Fields: instances (how many there were)."""


class _Gone(Exception):
    """The caller went away."""


class _Piece(NamedTuple):
    """A part of an answer. reason: None unless it is the last."""

    text: str
    tokens: list[int]
    reason: str | None


class _EventStream(StreamingResponse):
    """Server-sent events that are made of `source`; both end when the response ends, however it does."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Any, None], leave: Callable[[], None]
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events, self._source, self._leave = events, source, leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As `StreamingResponse`. When the caller goes away that stops to send, and leaves the generators as they are."""
        try:
            # Both, for events that were never asked for close nothing.
            async with aclosing(self._source), aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            self._leave()


def make_app(front: Front[EngineRequest], served: Served, limits: Limits = DEFAULT) -> FastAPI:
    """The endpoints. The front was started, and is used in the event loop that runs the app."""
    app = FastAPI(title="remap", openapi_url=None)
    metrics = Metrics(front)
    reader = ThreadPoolExecutor(1, "bodies")
    admission = Admission(limits)

    async def respond(http: HTTPRequest, kind: type[Completion | Chat]) -> Response:
        try:
            leave = admission.enter()
        except Busy as error:
            again = {"Retry-After": str(error.fields["retry_after_s"])}
            return JSONResponse(error_of(error), status_of(error), again)
        streamed = False
        try:
            body = await read_body(http.stream(), http.headers.get("content-length"), limits.body_bytes)
            parsing = asyncio.get_running_loop().run_in_executor(reader, parse, body, kind, served)
            asked = await _unless_gone(http, parsing)
            pieces = _pieces(front, served, metrics, asked)
            if not asked.stream:
                return JSONResponse(await _unless_gone(http, _whole(asked, pieces)))
            # The first piece decides about the status.
            first = await _unless_gone(http, anext(pieces))
            streamed = True
            return _EventStream(_events(asked, first, pieces), pieces, leave)
        except Error as error:
            return JSONResponse(error_of(error), status_of(error))
        except (_Gone, ClientDisconnect):
            return Response(status_code=GONE)
        finally:
            if not streamed:
                leave()

    @app.post("/v1/completions")
    async def completions(http: HTTPRequest) -> Response:
        return await respond(http, Completion)

    @app.post("/v1/chat/completions")
    async def chat(http: HTTPRequest) -> Response:
        return await respond(http, Chat)

    @app.get("/v1/models")
    async def models() -> Response:
        card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "remap"}
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": served.positions}]})

    @app.get("/health")
    async def health() -> Response:
        well = front.failure is None and any(view.phase != "recovering" for view in front.groups)
        return JSONResponse({"status": "ok" if well else "no instance serves"}, 200 if well else 503)

    @app.get("/metrics")
    async def figures() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/cluster")
    async def cluster() -> Response:
        return JSONResponse(cluster_state(front))

    return app


def cluster_state(front: Front[Any]) -> dict[str, Any]:
    """How the cluster is now, of JSON's types; `remap top` shows it. kv_tokens of a group are held, kv_capacity have room."""
    groups = [
        {
            "epoch": view.epoch,
            "changing": view.changing,
            "phase": view.phase,
            "stages": [{"instance": part.instance, "first": part.first, "end": part.end} for part in view.stages],
            "running": view.load.running,
            "waiting": len(view.load.waiting),
            "kv_tokens": view.load.tokens,
            "kv_capacity": view.capacity,
        }
        for view in front.groups
    ]
    return {
        "epoch": front.service.control.epoch,
        "groups": groups,
        "unfinished": front.unfinished,
        "restarts": front.restarts,
        "rejected": {name: str(error) for name, error in front.rejected.items()},
    }


async def serve(
    front: Front[EngineRequest],
    served: Served,
    listening: socket.socket,
    ready: Callable[[], None],
    limits: Limits = DEFAULT,
) -> None:
    """Serve on this socket until SIGINT or SIGTERM; then unfinished answers have GRACE_S. A second signal, or the end of that
    time, ends them with an error, and LEAVE_S later whatever is left. The front stays the caller's. ready: called when requests
    are answered. In the main thread.

    Raises NobodyLeft when every instance is gone for good, and InvalidState when the front failed (its failure is the cause);
    requests have been answered by then.
    """
    config = uvicorn.Config(
        make_app(front, served, limits),
        log_config=None,  # whoever runs this process says where lines go
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(GRACE_S + LEAVE_S) + 10,  # nobody is left by then
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    later: list[asyncio.TimerHandle] = []

    def cut() -> None:
        # Their requests end as if the callers had gone. uvicorn would cancel them, and print where each was.
        for each in list(server.server_state.connections):
            each.transport.abort()

    def stop() -> None:
        server.should_exit = True
        front.stop()
        later.append(loop.call_later(LEAVE_S, cut))

    def end() -> None:
        if server.should_exit:
            stop()
        else:
            server.should_exit = True
            later.append(loop.call_later(GRACE_S, stop))

    signals = (signal.SIGINT, signal.SIGTERM)
    for one in signals:
        loop.add_signal_handler(one, end)
    over = loop.create_task(front.over.wait())
    over.add_done_callback(lambda task: None if task.cancelled() else stop())
    try:
        ready()
        await server.serve([listening])
    finally:
        over.cancel()
        for handle in later:
            handle.cancel()
        for one in signals:
            loop.remove_signal_handler(one)
    failure = front.failure
    if failure is not None:
        raise InvalidState(
            f"the front of the cluster failed with {type(failure).__name__}: {failure}; nothing is served; start it again"
        ) from failure
    if front.over.is_set():
        name, error = list(front.rejected.items())[-1]
        raise NobodyLeft(
            f"all {len(front.rejected)} instances are gone for good; nothing is served; start it again. The last one, {name}: "
            f"{error}",
            instances=len(front.rejected),
        )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not here: uvicorn would raise the signal again at its end, amid what closes the cluster."""
        yield


async def _pieces(
    front: Front[EngineRequest], served: Served, metrics: Metrics, asked: Asked
) -> AsyncGenerator[_Piece, None]:
    """The answer as it comes. Who closes this cancels the request."""
    text, request = AnswerText(served.tokenizer, asked.stops), asked.request
    begin = first = last = time.monotonic()
    tokens, outcome = 0, "cancelled"
    try:
        async with aclosing(front.generate(request.id, request)) as deliveries:
            async for delivery in deliveries:
                last = time.monotonic()
                if not tokens and delivery.tokens:
                    first = last
                    metrics.first(first - begin)
                tokens += len(delivery.tokens)
                reason = delivery.finish_reason
                if reason == "out_of_blocks":
                    raise OutOfBlocks(
                        f"the request needs KV for {len(request.prompt) + tokens} tokens, which no instance has, alone or in its "
                        "group; it is ended; ask for less, or serve with more memory",
                        requested=len(request.prompt) + tokens,
                    )
                part = text.add(delivery.tokens, reason is not None)
                reason = "stop" if text.stopped else reason
                outcome = reason or outcome
                yield _Piece(part, list(delivery.tokens), reason)
                if reason is not None:
                    return
    except Error as error:
        outcome = type(error).__name__
        raise
    finally:
        metrics.ended(outcome, len(request.prompt), tokens, last - first)


async def _whole(asked: Asked, pieces: AsyncGenerator[_Piece, None]) -> dict[str, Any]:
    found = [piece async for piece in pieces]
    tokens = [token for piece in found for token in piece.tokens]
    return asked.answer("".join(piece.text for piece in found), tokens, found[-1].reason or "")


async def _events(asked: Asked, first: _Piece, pieces: AsyncGenerator[_Piece, None]) -> AsyncGenerator[bytes, None]:
    yield _event(asked.chunk(*first, True))
    tokens = len(first.tokens)
    try:
        async for piece in pieces:
            tokens += len(piece.tokens)
            yield _event(asked.chunk(*piece, False))
    except Error as error:
        yield _event(error_of(error))  # the status was sent long ago
        return
    if asked.usage:
        yield _event(asked.last(tokens))
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _unless_gone(http: HTTPRequest, work: Awaitable[ValueT]) -> ValueT:
    """What the work returns or raises; it is cancelled, and _Gone raised, if the caller goes away before."""
    answer, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise _Gone
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _gone(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
