# SPDX-License-Identifier: Apache-2.0
"""What is noted of each request of the server: its id and trace, how it ended, and a line of log if the operator wants that.

A caller's `X-Request-Id` comes back with the answer; a request without one gets one. Whoever answers a request fills its
`RequestLine` in, which is in the ASGI scope.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from .http_errors import Defect, error_of, retry_of, status_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from remap.errors import Error

__all__ = ["GONE", "AccessLog", "RequestLine", "line_of", "refusal"]

LOG = logging.getLogger(__name__)
MOST_PATH = 200
GONE = 499
"""The status for a caller that went away, and does not read it (nginx has the number)."""

# What a caller writes comes into a line of log as it is, and back as a header.
_ID = re.compile(r"[!-~]{1,128}")
_TRACE = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
"""`traceparent` of W3C's Trace Context."""


@dataclass
class RequestLine:
    """Of one request. id: the caller's, or drawn. trace: the id of the caller's trace. answer: the id of its answer. prompt,
    generated: tokens. error: the class of what ended it. status: of its end, where another one was sent before."""

    id: str
    trace: str | None = None
    model: str | None = None
    answer: str | None = None
    prompt: int = 0
    generated: int = 0
    error: str | None = None
    status: int | None = None

    def __str__(self) -> str:
        tokens = None if self.answer is None else f"{self.prompt}+{self.generated}"
        named = {"request": self.id, "model": self.model, "answer": self.answer, "tokens": tokens}
        named |= {"error": self.error, "trace": self.trace}
        return " ".join(f"{name}={value}" for name, value in named.items() if value is not None)

    def failed(self, error: Error) -> None:
        """The request ended with this error."""
        self.error, self.status = type(error).__name__, status_of(error)


def line_of(scope: Scope) -> RequestLine:
    """That of the request of this scope, below an `AccessLog`."""
    return cast(RequestLine, scope["state"][__name__])


def refusal(scope: Scope, error: Error, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer that says this error in OpenAI's form; the request's line has it as well."""
    line_of(scope).failed(error)
    return JSONResponse(error_of(error), status_of(error), retry_of(error) | dict(headers or {}))


class AccessLog:
    """An ASGI app around another. said: whether each request is a line. refused: called with the status and the error's class of
    each request that was answered with an error. The time ends with the last byte of the answer, of a stream too."""

    def __init__(
        self, app: ASGIApp, said: bool, refused: Callable[[int, str], None] = lambda status, error: None
    ) -> None:
        self._app, self._said, self._refused = app, said, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, sent, headers = time.monotonic(), 0, Headers(scope=scope)
        given, traced = headers.get("x-request-id", ""), _TRACE.fullmatch(headers.get("traceparent", ""))
        id = given if _ID.fullmatch(given) else secrets.token_hex(16)
        line = RequestLine(id, traced[1] if traced else None)
        scope.setdefault("state", {})[__name__] = line

        async def noted(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", line.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if not sent:
                defect = Defect("the server has a defect, which its log names; the request was not finished")
                await refusal(scope, defect)(scope, receive, noted)
            line.failed(Defect())
            raise error
        finally:
            if line.error is not None and sent >= 400:
                self._refused(sent, line.error)
            if self._said:
                client = scope.get("client") or ("-",)
                # A path is the caller's: `!r` keeps it on one line.
                path, status = scope["path"][:MOST_PATH], line.status or sent or "no answer"
                took = time.monotonic() - begin
                LOG.info("%s %s %r %s %.3f s %s", client[0], scope["method"], path, status, took, line)
