# SPDX-License-Identifier: Apache-2.0
"""A session that shows itself at a socket, to `remap top`: one that has joined no broker, such as one on a GPU.

It answers `Look` as a broker with one member does, and nothing else. Its thread waits for connections alone; for each look it
makes one `session.snapshot()`, as any other thread may.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from remap.broker.listening import Listener, peer, refuse
from remap.broker.messages import MOST_BYTES, VERSION, Events, Look, Report, Shown, State, decode_to_broker, encode
from remap.broker.report import events_in, report_of
from remap.errors import Error, InvalidState
from remap.memory.core import Core, events_of
from remap.report import Snapshot

__all__ = ["Window"]

FRESH_S = 0.1
"""An answer is given again for that long, however many look."""
MOST_CONNECTIONS = 16


class _Session(Protocol):
    device: str

    def snapshot(self) -> Snapshot: ...
    def exclusively(self, call: Callable[[Core], Any], *, claims: bool = ...) -> Any: ...


class Window:
    """At `path` until `close`, or until the session is gone, which this does not keep alive. Once the session is closed, an
    observer hears that. Raises as `remap.broker.listening.Listener`."""

    def __init__(self, session: _Session, path: str | Path) -> None:
        self.path = Path(path)
        self._session = weakref.ref(session)
        self._name = session.device
        self._shown: tuple[float, State, Report] | None = None
        self._connections = 0
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(self.path, self._selector, self._admit)
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="remap-window", daemon=True)
        self._thread.start()
        weakref.finalize(session, self.close)

    def close(self) -> None:
        """Show nothing more. Idempotent. In a child made by fork it does nothing: the window is its parent's."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        self.path.unlink(missing_ok=True)
        with suppress(OSError):  # the thread has seen it without that, and has ended
            self._waker.send(b"x")
        # Not for long: a caller that holds the session's lock may be what the thread waits for. And the thread itself comes here
        # when its look was what kept the session alive.
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._waker.close()

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                again = self._listener.again
                for key, mask in self._selector.select(None if again is None else max(0.0, again - time.monotonic())):
                    if key.data is not None and not self._closing:
                        key.data(mask)
                self._listener.resume(time.monotonic())
        finally:
            self._listener.close()
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()

    def _admit(self, connection: socket.socket) -> None:
        if peer(connection)[1] != os.getuid():
            refuse(connection, f"the session is user {os.getuid()}'s")
        elif self._connections >= MOST_CONNECTIONS:
            refuse(connection, f"{MOST_CONNECTIONS} look at the session already")
        else:
            connection.setblocking(False)
            self._connections += 1
            self._selector.register(connection, selectors.EVENT_READ, partial(self._answer, connection))

    def _answer(self, connection: socket.socket, mask: int) -> None:
        why = ""
        try:
            packet = connection.recv(MOST_BYTES)
            if packet:
                for message in self._look(packet):
                    connection.send(encode(message))
                return
        except OSError:  # it has gone, or does not read what it is sent
            packet = b""
        except Error as error:
            why = str(error)
        self._connections -= 1
        self._selector.unregister(connection)
        if why:
            refuse(connection, why)
        else:
            connection.close()

    def _look(self, packet: bytes) -> list[State | Shown | Events]:
        message = decode_to_broker(packet)
        if not isinstance(message, Look):
            raise InvalidState(
                f"at {self.path} a session shows itself; it shares no pages: start a broker, `remap serve`"
            )
        if message.version != VERSION:
            raise InvalidState(
                f"the session speaks version {VERSION}, the other side {message.version}; install one release in both"
            )
        now = time.monotonic()
        if self._shown is None or now - self._shown[0] > FRESH_S:
            session = self._session()
            if session is None:
                raise InvalidState("the session is gone")
            snapshot = session.snapshot()
            pages = snapshot.pages.total
            state = State(snapshot.page_bytes, pages, 0, 0, 0, members=1)
            self._shown = (now, state, report_of(snapshot))
        when, state, report = self._shown
        parts: list[Events] = []
        if message.events:
            session = self._session()
            if session is None:
                raise InvalidState("the session is gone")
            parts = events_in(session.exclusively(events_of, claims=False))
        outside = max(0, state.pages - sum((report.free, report.params, report.kv, report.ring, report.quarantine)))
        held, age = state.pages - outside, now - when
        return [state, Shown(1, self._name, self._pid, held, 0, True, age, report, len(parts)), *parts]
