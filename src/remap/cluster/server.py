# SPDX-License-Identifier: Apache-2.0
"""The server's life: it listens, serves `app` until it is asked to end or cannot go on, and lets unfinished answers end.

One event loop runs all of it, and the front.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn

from remap.errors import Error, InvalidState

if TYPE_CHECKING:
    import socket
    from collections.abc import Coroutine, Mapping

    from fastapi import FastAPI

__all__ = ["NoRestarts", "NobodyLeft", "serve"]

LOG = logging.getLogger(__name__)

GRACE_S = 10
"""Seconds that unfinished answers have when the server is asked to end. Those that are left end with an error then."""

LEAVE_S = 2
"""Seconds that callers have to take that error; then their connections are cut."""


class NobodyLeft(Error):
    """Every instance is gone, and none comes back. Fields: instances (how many there were)."""


class NoRestarts(Error):
    """The process that starts instances again is gone, so the server ended after the requests in flight. Fields: reason."""


class Fronting(Protocol):
    """What answers requests: see `Front`."""

    @property
    def over(self) -> asyncio.Event: ...
    @property
    def failure(self) -> BaseException | None: ...
    @property
    def rejected(self) -> Mapping[str, Error]: ...
    @property
    def unfinished(self) -> int: ...
    def stop(self) -> None: ...
    async def drain(self) -> None: ...


async def serve(
    front: Fronting,
    app: FastAPI,
    listening: socket.socket,
    ready: Callable[[], None],
    broken: Callable[[], Coroutine[Any, Any, str]] | None = None,
) -> None:
    """Serve the app on this socket until SIGINT or SIGTERM; then unfinished answers have GRACE_S. A second signal, or the end of
    that time, ends them with an error, and LEAVE_S later whatever is left. The front stays the caller's. ready: called when
    requests are answered. In the main thread.

    Raises NobodyLeft when every instance is gone for good, and InvalidState when the front failed (its failure is the cause);
    requests have been answered by then.
    """
    config = uvicorn.Config(
        app,
        log_config=None,  # the program that runs this process says where lines go
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(GRACE_S + LEAVE_S) + 10,  # no request is left by then
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
    reasons: list[str] = []

    async def leave() -> None:
        assert broken is not None
        reasons.append(await broken())
        LOG.error(
            "%s: instances that die do not come back; no request is taken any more, and the server ends when the %d that it has "
            "are answered",
            reasons[0],
            front.unfinished,
        )
        await front.drain()
        server.should_exit = True
        later.append(loop.call_later(GRACE_S, stop))  # for answers still being sent

    watched = None if broken is None else loop.create_task(leave())
    try:
        ready()
        await server.serve([listening])
    finally:
        over.cancel()
        if watched is not None:
            watched.cancel()
        for handle in later:
            handle.cancel()
        for one in signals:
            loop.remove_signal_handler(one)
    if watched is not None and watched.done() and not watched.cancelled():
        watched.result()  # what went wrong with it is not lost
    failure = front.failure
    if failure is not None:
        raise InvalidState(
            f"the server failed with {type(failure).__name__}: {failure}; nothing is served; start it again"
        ) from failure
    if front.over.is_set():
        name, error = list(front.rejected.items())[-1]
        raise NobodyLeft(
            f"all {len(front.rejected)} instances are gone for good; nothing is served; start it again. The last one, {name}: "
            f"{error}",
            instances=len(front.rejected),
        )
    if reasons:
        raise NoRestarts(f"{reasons[0]}; requests were answered; nothing is served; start it again", reason=reasons[0])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not here: uvicorn would raise the signal again at its end, amid what closes the cluster."""
        yield
