# SPDX-License-Identifier: Apache-2.0
"""OpenAI's endpoints over a `Front`, with /health, /metrics, /cluster, /version and /tokenize.

A caller that goes away cancels its request: a stream ends with the response, and beside every other wait the server
listens for the end of the connection.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import FastAPI, Response
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import remap
from remap.errors import Error, InvalidState

from . import openai
from .access_log import GONE, AccessLog, line_of, refusal
from .answers import Answering, Deadline, events, pieces, whole
from .asked import AnswerAsked
from .guard import Guard
from .http_errors import RETRY_S, NoMethod, NoPath, SlowBody, UnknownModel
from .limits import Admission, FrontLimits
from .metrics import ClusterMetrics, RequestMetrics
from .openai import CHAT, COMPLETION, tokenize
from .prompts import Catalog, Served
from .seen import cluster_state, health_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from remap_serve.engine.request import Request as EngineRequest

    from .front import Front
    from .shared_front import SharedFront

__all__ = ["Readers", "ServedModels", "make_app", "make_endpoints", "make_shared_app", "make_starting"]

LATE_S = 2.0
"""Seconds behind its deadline that a stream's caller has to take the event that says so."""

STALL_S = 60.0
"""For so long a stream's caller may take nothing of it: one that reads nothing has a place that others wait for."""

READERS = 4
"""Threads that read bodies."""

DEFAULT = FrontLimits()
NOT_ALLOWED = 405
ENDPOINTS = "ask for POST /v1/chat/completions, POST /v1/completions or GET /v1/models"

ValueT = TypeVar("ValueT")


class Readers:
    """Bodies become requests beside the event loop: a long prompt holds up neither tokens nor another prompt.

    A few threads, with one tokenizer for all of them and the event loop: the usual kind, in Rust, encodes and decodes in
    several threads at once, and lets others run meanwhile. What its first call sets is set before there are threads
    (`Served.settle`). The other kind, in Python, need not bear that: with it one body is read at a time. A body that no caller
    waits for is not begun; one that has been begun ends at its next step (parsed, template, one prompt of several), and a step
    is bounded, since a body and a prompt are (`limits`).

    The function that they run is called with its arguments, `served`, and wanted(): whether a caller waits.
    """

    def __init__(self, served: Served | Catalog, threads: int = READERS) -> None:
        self._served = served
        settled = [each.settle() for each in served.models]
        self._pool = ThreadPoolExecutor(threads if all(settled) else 1, "bodies")

    async def run(self, function: Callable[..., ValueT], *arguments: object) -> ValueT:
        """The function's result or exception. When this is cancelled it is not begun, or wanted() is False from now on."""
        wanted = threading.Event()
        wanted.set()

        def work() -> ValueT:
            return function(*arguments, self._served, wanted.is_set)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            wanted.clear()


class _Gone(Exception):
    """The caller went away."""


class _EventStream(StreamingResponse):
    """Server-sent events that are made of `source`; both end when the response ends, however it does."""

    def __init__(
        self,
        made: AsyncGenerator[bytes, None],
        source: AsyncGenerator[Any, None],
        leave: Callable[[], None],
        deadline: Deadline,
    ) -> None:
        super().__init__(made, media_type="text/event-stream")
        self._events, self._source, self._leave, self._deadline = made, source, leave, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As `StreamingResponse`. When the caller goes away that stops to send, and leaves the generators as they are."""
        clock = asyncio.get_running_loop().time
        offered_s = math.inf  # since when the caller has not taken a part

        async def offer(message: Message) -> None:
            nonlocal offered_s
            offered_s = clock()
            await send(message)
            offered_s = math.inf

        try:
            # Both, for events that were never asked for close nothing.
            async with aclosing(self._source), aclosing(self._events):
                sending = asyncio.ensure_future(super().__call__(scope, receive, offer))
                try:
                    end_s = clock() + self._deadline.left_s + LATE_S
                    while not sending.done() and clock() < min(end_s, offered_s + STALL_S):
                        await asyncio.wait([sending], timeout=min(end_s - clock(), STALL_S))
                    if sending.done():
                        sending.result()
                finally:
                    # The server closes the connection of a response that has no end.
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
        finally:
            self._leave()


@dataclass(frozen=True)
class ServedModels:
    """What the endpoints show of one server. answering(model): what serves it. health: of /health, whose field serving says
    whether anything is served. figures: the text of /metrics. headers: of an answer, once its first part is there. keyed: what
    serves requests with a key; None: keys are ignored."""

    served: Served | Catalog
    answering: Callable[[str], Answering]
    metrics: RequestMetrics
    health: Callable[[], dict[str, Any]]
    figures: Callable[[], Awaitable[bytes]]
    headers: Callable[[AnswerAsked], dict[str, str]] = lambda asked: {}
    keyed: Answering | None = None


def make_app(
    front: Front[EngineRequest],
    served: Served,
    limits: FrontLimits = DEFAULT,
    hosts: Collection[str] | None = None,
    access_log: bool = False,
) -> FastAPI:
    """The endpoints of a cluster. The front was started, and is used in the event loop that runs the app. hosts: see `Guard`."""
    metrics = ClusterMetrics(front)

    async def figures() -> bytes:
        return metrics.text()  # in the loop, which owns the front

    serving = ServedModels(served, lambda model: front, metrics, lambda: health_of(front), figures)
    app = make_endpoints(serving, limits, hosts, access_log)

    @app.get("/cluster")
    async def cluster() -> Response:
        return JSONResponse(cluster_state(front))

    return app


def make_shared_app(
    front: SharedFront,
    served: Served,
    limits: FrontLimits = DEFAULT,
    hosts: Collection[str] | None = None,
    access_log: bool = False,
) -> FastAPI:
    """As `make_app`, of one server of several."""
    metrics = RequestMetrics("remap_cluster")

    async def figures() -> bytes:
        return metrics.text() + await front.figures()

    serving = ServedModels(served, lambda model: front, metrics, lambda: front.health, figures, keyed=front.keyed)
    app = make_endpoints(serving, limits, hosts, access_log)

    @app.get("/cluster")
    async def cluster(http: HTTPRequest) -> Response:
        try:
            return JSONResponse(await front.state())
        except Error as error:
            away = InvalidState(f"the keeper of the cluster cannot be asked: {error}")
            return refusal(http.scope, away)

    return app


def make_endpoints(
    serving: ServedModels,
    limits: FrontLimits = DEFAULT,
    hosts: Collection[str] | None = None,
    access_log: bool = False,
) -> FastAPI:
    """OpenAI's endpoints, with /health, /metrics, /version and /tokenize."""
    app = FastAPI(title="remap", openapi_url=None)
    served, metrics = serving.served, serving.metrics
    app.add_middleware(Guard, hosts=hosts)
    app.add_middleware(AccessLog, said=access_log, refused=metrics.refused)
    seen = partial(app.api_route, methods=["GET", "HEAD"])
    readers = Readers(served)
    admission = Admission(limits)

    async def admitted(http: HTTPRequest, answer: Callable[[bytes, _Visit], Awaitable[Response]]) -> Response:
        """The answer to a body, or the error. It is open from the body's end until the answer is there, or as long as its visit
        says."""
        visit = _Visit(http, Deadline(limits.deadline_s))
        try:
            reading = admission.read(http.stream(), http.headers.get("content-length"))
            body = await visit.in_time(reading, limits.body_s)
            visit.also(admission.enter())
            return await answer(body, visit)
        except SlowBody as error:
            return refusal(http.scope, error, {"Connection": "close"})  # the rest of it is not waited for
        except Error as error:
            return refusal(http.scope, error)
        except (_Gone, ClientDisconnect):
            return Response(status_code=GONE)
        finally:
            if not visit.goes_on:
                visit.leave()

    async def respond(body: bytes, visit: _Visit, decoder: msgspec.json.Decoder[Any]) -> Response:
        key = None if serving.keyed is None else visit.key
        asked = await visit.unless_gone(readers.run(partial(openai.parse, key=key), body, decoder))
        visit.also(admission.enter(len(asked.requests) - 1))
        line = line_of(visit.scope)
        line.model, line.answer, line.prompt = asked.model, asked.id, asked.usage_of(0)["prompt_tokens"]
        source = serving.answering(asked.model) if serving.keyed is None or key is None else serving.keyed
        found = pieces(source, served.find(asked.model), metrics, asked, visit.deadline)
        if not asked.stream:
            answer = await visit.unless_gone(whole(asked, found, line))
            return JSONResponse(answer, headers=serving.headers(asked))
        # The first piece decides about the status.
        first = await visit.unless_gone(anext(found))
        visit.goes_on = True
        stream = _EventStream(events(asked, first, found, line), found, visit.leave, visit.deadline)
        stream.headers.update(serving.headers(asked))
        return stream

    @app.post("/v1/completions")
    async def completions(http: HTTPRequest) -> Response:
        return await admitted(http, lambda body, visit: respond(body, visit, COMPLETION))

    @app.post("/v1/chat/completions")
    async def chat(http: HTTPRequest) -> Response:
        return await admitted(http, lambda body, visit: respond(body, visit, CHAT))

    @app.post("/tokenize")
    async def tokens(http: HTTPRequest) -> Response:
        async def answer(body: bytes, visit: _Visit) -> Response:
            return JSONResponse(await visit.unless_gone(readers.run(tokenize, body)))

        return await admitted(http, answer)

    @seen("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(each) for each in served.models]})

    @seen("/v1/models/{name:path}")
    async def model(http: HTTPRequest, name: str) -> Response:
        try:
            return JSONResponse(_card(served.find(name)))
        except UnknownModel as error:
            return refusal(http.scope, error)

    @seen("/version")
    async def version() -> Response:
        return JSONResponse({"version": remap.__version__})

    @seen("/health")
    async def health() -> Response:
        found = serving.health()
        return JSONResponse(found, 200 if found["serving"] else 503)

    @seen("/metrics")
    async def figures() -> Response:
        return Response(await serving.figures(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(HTTPException)
    async def not_there(http: HTTPRequest, found: HTTPException) -> Response:
        path, method = http.scope["path"], http.method
        error: Error = NoPath(f"{path!r} is not served here; nothing was asked; {ENDPOINTS}", path=path)
        if found.status_code == NOT_ALLOWED:
            error = NoMethod(f"{path!r} takes no {method}; nothing was asked; {ENDPOINTS}", path=path, method=method)
        return refusal(http.scope, error, found.headers)

    return app


def make_starting(hosts: Collection[str] | None = None, access_log: bool = False) -> ASGIApp:
    """What a server answers before it serves: 503, whatever it is asked."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        # Connections end with the answer, since the next one is another app's.
        headers = {"Connection": "close", "Retry-After": str(RETRY_S)}
        if scope["path"] == "/health":
            response = JSONResponse({"status": "starting", "serving": 0}, 503, headers)
        else:
            response = refusal(
                scope, InvalidState("the server is starting; nothing was asked; ask again soon"), headers
            )
        await response(scope, receive, send)

    return AccessLog(Guard(answer, hosts), access_log)


def _card(served: Served) -> dict[str, Any]:
    card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "remap"}
    return card | {"max_model_len": served.positions}


class _Visit:
    """A request of the server, from its first byte on. goes_on: its response calls `leave`."""

    def __init__(self, http: HTTPRequest, deadline: Deadline) -> None:
        self.deadline = deadline
        self.goes_on = False
        self.scope = http.scope
        self._http = http
        self._leaves: list[Callable[[], None]] = []

    @property
    def key(self) -> str | None:
        """The caller's name for its request, with which it may come back."""
        return self._http.headers.get("idempotency-key")

    def also(self, leave: Callable[[], None]) -> None:
        """It takes more room, until it leaves."""
        self._leaves.append(leave)

    def leave(self) -> None:
        """A second call does nothing."""
        for each in self._leaves:
            each()

    async def in_time(self, reading: Awaitable[ValueT], body_s: float) -> ValueT:
        """What is read, or its exception; it is cancelled, and TooLate or SlowBody raised, when the time is over."""
        left_s = self.deadline.left_s
        try:
            return await asyncio.wait_for(reading, min(left_s, body_s))
        except asyncio.TimeoutError:
            if left_s <= body_s:
                raise self.deadline.error() from None
            text = f"the body did not come within {body_s:g} s; nothing was asked; send it faster, or send less"
            raise SlowBody(text, body_s=body_s) from None

    async def unless_gone(self, work: Awaitable[ValueT]) -> ValueT:
        """The work's result or exception; it is cancelled, and TooLate raised, when the time is over, or _Gone, when the caller
        goes away before."""
        answer, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(self._http))
        try:
            # A wait for tokens ends by itself at the deadline, and says how many there were.
            left_s = self.deadline.left_s + LATE_S
            await asyncio.wait([answer, gone], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if gone.done():
                raise _Gone
            raise self.deadline.error()
        finally:
            answer.cancel()
            gone.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)


async def _gone(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
