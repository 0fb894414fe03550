# SPDX-License-Identifier: Apache-2.0
"""The server's life: it listens, says that it starts, serves `app` until it is asked to end or cannot go on, and lets unfinished
answers end.

One event loop runs all of it, and the front; another one, in a thread of its own, answers until then (`starting`).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn

from remap.errors import Error, InvalidState

if TYPE_CHECKING:
    import socket
    from collections.abc import Coroutine, Mapping

    from starlette.types import ASGIApp

__all__ = ["NoRestarts", "NobodyLeft", "serve", "starting"]

LOG = logging.getLogger(__name__)

LEAVE_S = 2
"""Seconds that callers have to take the error that ends their answers; then their connections are cut."""

QUIET_S = 30
"""For so long a connection may be open without a request that is being answered, and twice as long at most: before the head of
one has come whole, amid a body that was refused, or beside an answer that nobody takes. uvicorn itself waits for these for
ever."""


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


@contextmanager
def starting(listening: socket.socket, app: ASGIApp) -> Iterator[Callable[[], None]]:
    """Answer at this socket by the app, in a thread, until what this yields is called, or the block ends. Then connections wait
    for whoever accepts at the socket next."""
    server = _Server(_config(app, 1))  # the socket's copy is the server's, to close
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening.dup()])), name="starting", daemon=True)

    def end() -> None:
        server.should_exit = True  # which it looks at ten times a second
        thread.join()

    thread.start()
    try:
        yield end
    finally:
        end()


async def serve(
    front: Fronting,
    app: ASGIApp,
    listening: socket.socket,
    ready: Callable[[], None],
    grace_s: float,
    broken: Callable[[], Coroutine[Any, Any, str]] | None = None,
) -> None:
    """Serve the app on this socket until SIGINT or SIGTERM. Then the front refuses new requests, and the server listens on until
    unfinished answers have ended. A second signal, or the end of grace_s, ends these with an error, and LEAVE_S later whatever is
    left. The front stays the caller's. ready: called when requests are answered. In the main thread.

    Raises NobodyLeft when every instance is gone for good, and InvalidState when the front failed (its failure is the cause);
    requests have been answered by then.
    """
    config = _config(app, int(grace_s + LEAVE_S) + 10)  # no request is left by then
    server = _Server(config)
    loop = asyncio.get_running_loop()
    later: list[asyncio.TimerHandle] = []
    tasks: list[asyncio.Task[None]] = []
    quiet: dict[Any, Any] = {}
    asked = False

    async def drop_quiet() -> None:
        nonlocal quiet
        connections: Any = server.server_state.connections  # of either of uvicorn's protocols
        idle = [each for each in connections if each.cycle is None or each.cycle.response_complete]
        now = {each: (each.cycle, each.transport.get_write_buffer_size()) for each in idle}
        for each in now.items() & quiet.items():  # since the look before no request has come, and nothing was taken
            each[0].transport.abort()
        quiet = now

    config.callback_notify, config.timeout_notify = drop_quiet, QUIET_S

    def cut() -> None:
        # Their requests end as if the callers had gone. uvicorn would cancel them, and print where each was.
        for each in list(server.server_state.connections):
            each.transport.abort()

    def stop() -> None:
        server.should_exit = True
        front.stop()
        later.append(loop.call_later(LEAVE_S, cut))

    async def drain() -> None:
        await front.drain()
        server.should_exit = True  # it listens no more, and sends what there is to send

    def end() -> None:
        nonlocal asked
        if asked:
            stop()
            return
        LOG.info("the server ends when the %d requests that it has are answered, or in %g s", front.unfinished, grace_s)
        asked = True
        tasks.append(loop.create_task(drain()))
        later.append(loop.call_later(grace_s, stop))

    async def until_over() -> None:
        await front.over.wait()
        stop()

    signals = (signal.SIGINT, signal.SIGTERM)
    for one in signals:
        loop.add_signal_handler(one, end)
    tasks.append(loop.create_task(until_over()))
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
        await drain()
        later.append(loop.call_later(grace_s, stop))  # for answers still being sent

    if broken is not None:
        tasks.append(loop.create_task(leave()))
    # A connection is a descriptor: those of callers that send nothing are not to use up the few that a process begins with.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        ready()
        await server.serve([listening])
    finally:
        for task in tasks:
            task.cancel()
        for handle in later:
            handle.cancel()
        for one in signals:
            loop.remove_signal_handler(one)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()  # what went wrong with it is not lost
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


def _config(app: ASGIApp, leave_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,  # the program that runs this process says where lines go
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=leave_s,
    )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not here: uvicorn would raise the signal again at its end, amid what closes the cluster."""
        yield
