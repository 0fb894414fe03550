# SPDX-License-Identifier: Apache-2.0
"""Errors as callers see them: an HTTP status, and OpenAI's form of it."""

from __future__ import annotations

from typing import Any

from remap.errors import Error, InvalidArgument, InvalidState, OutOfBlocks, OutOfMemory

from .control import NoCopy
from .limits import Busy, TooLarge

__all__ = [
    "MOST_TEXT",
    "RETRY_S",
    "Defect",
    "NoMethod",
    "NoPath",
    "NotJSON",
    "SlowBody",
    "TooLate",
    "UnknownModel",
    "error_of",
    "retry_of",
    "status_of",
]

MOST_TEXT = 1000
"""Characters of an error's text that a caller gets: its quotes of a body may be as long as that."""


RETRY_S = 1
"""Seconds of a `Retry-After` that nobody said otherwise."""


class UnknownModel(Error):
    """The body names a model that is not served. Nothing was asked. Fields: model, served."""


class NotJSON(Error):
    """The body's Content-Type is not JSON. Nothing was read. Fields: got (None: it has none)."""


class SlowBody(Error):
    """The body did not come in time. Nothing was asked. Fields: body_s."""


class NoPath(Error):
    """There is no such path. Nothing was asked. Fields: path."""


class NoMethod(Error):
    """The path is there, and not for this method. Nothing was asked. Fields: path, method."""


class Defect(Error):
    """An error that is none of this library's ended the request."""


class TooLate(Error):
    """The request's time is over; it was ended. Fields: deadline_s, tokens (generated until then)."""


def status_of(error: Error) -> int:
    """The HTTP status: 400, 413 and 415 what the caller has to change, 404 another model or path, 405 another method, 408 a body
    that does not come, 429 too many requests, 503 what another time or place may do, 504 a deadline."""
    statuses: tuple[tuple[type[Error], int], ...] = (
        (InvalidArgument, 400),
        (UnknownModel, 404),
        (NoPath, 404),
        (NoMethod, 405),
        (SlowBody, 408),
        (TooLarge, 413),
        (NotJSON, 415),
        (Busy, 429),
        (TooLate, 504),
        (NoCopy, 503),
        (InvalidState, 503),
        (OutOfBlocks, 503),
        (OutOfMemory, 503),
    )
    return next((status for kind, status in statuses if isinstance(error, kind)), 500)


def retry_of(error: Error) -> dict[str, str]:
    """The header that says when to ask again: for what another time, or another server behind the same balancer, may do."""
    if isinstance(error, (Busy, InvalidState, NoCopy, OutOfMemory)):
        return {"Retry-After": str(error.fields.get("retry_after_s", RETRY_S))}
    return {}


def error_of(error: Error) -> dict[str, Any]:
    """The error as OpenAI writes it."""
    status = status_of(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    param, code = error.fields.get("param"), type(error).__name__
    return {"error": {"message": _shortened(str(error)), "type": kind, "param": param, "code": code}}


def _shortened(text: str) -> str:
    """At most MOST_TEXT characters: its begin, which names the fault, and its end, which says what to do."""
    if len(text) <= MOST_TEXT:
        return text
    mark = f" ... ({len(text)} characters) ... "
    half = (MOST_TEXT - len(mark)) // 2
    return text[:half] + mark + text[-half:]
