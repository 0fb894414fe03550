# SPDX-License-Identifier: Apache-2.0
"""Checks of a request's headers, before anything of its body is read.

Host            one that this server goes by, if it was told which: else a page of another site can reach a server at the
                loopback address through a name of its own that resolves there (DNS rebinding)
framing         Content-Length or Transfer-Encoding: a proxy that believes the one and a server that believes the other
                see different requests (RFC 9112, section 6.1, lets a server refuse both together)
Content-Type    JSON, of whatever has a body: a browser asks no other site's permission to send forms and plain text
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from remap.errors import Error, InvalidArgument

from .access_log import refusal
from .http_errors import NotJSON

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["Guard", "hosts_of"]

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Guard:
    """An ASGI app around another, that refuses the requests that the module names. hosts: names without a port, in any case;
    None: any."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str] | None = None) -> None:
        self._app = app
        self._hosts = None if hosts is None else frozenset(map(str.lower, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope["method"], Headers(scope=scope))
        except Error as error:
            # The rest of such a request is not read, so the connection is of no more use.
            await refusal(scope, error, {"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        """Raises InvalidArgument and NotJSON."""
        host = headers.get("host", "")
        if self._hosts is not None and _name(host) not in self._hosts:
            raise InvalidArgument(
                f"this server does not go by the Host {host!r}; nothing was asked; ask for one of "
                f"{', '.join(sorted(self._hosts))}, or serve with --allow-host",
                param=None,
            )
        if "content-length" in headers and "transfer-encoding" in headers:
            raise InvalidArgument(
                "a request has Content-Length or Transfer-Encoding, and this one has both; nothing was asked; send one of "
                "them",
                param=None,
            )
        if method in ("POST", "PUT", "PATCH"):
            got = headers.get("content-type")
            kind = (got or "").partition(";")[0].strip().lower()
            if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                raise NotJSON(
                    f"a body must be JSON, with Content-Type: application/json, got {got!r}; nothing was asked", got=got
                )


def hosts_of(host: str, more: Iterable[str] = ()) -> frozenset[str] | None:
    """The hosts that a server at this address goes by, for `Guard`: at a loopback address its names, and `more`; at others any,
    unless there are `more`, which are meant then."""
    named = frozenset(more)
    if host.lower() in LOOPBACK or host.startswith("127."):
        return named | {host, *LOOPBACK}
    return named | {host} if named else None


def _name(host: str) -> str:
    """Of a Host header, without its port and an IPv6 address's brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
