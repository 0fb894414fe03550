# SPDX-License-Identifier: Apache-2.0
"""A line for each request of the server: the caller, the path, the status, and how long it took."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["AccessLog"]

LOG = logging.getLogger(__name__)
MOST_PATH = 200


class AccessLog:
    """An ASGI app around another. The time ends with the last byte of the answer, of a stream too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.monotonic(), "no answer"

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            client = scope.get("client") or ("-",)
            # A path is the caller's: `!r` keeps it on one line.
            path = scope["path"][:MOST_PATH]
            LOG.info("%s %s %r %s %.3f s", client[0], scope["method"], path, status, time.monotonic() - begin)
