# SPDX-License-Identifier: Apache-2.0
"""A socket at a path, for processes of the same user, and the processes that connect to it."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from remap.broker.messages import Refused, encode
from remap.errors import Error, InvalidArgument, InvalidState

__all__ = ["Listener", "peer", "refuse"]

_logger = logging.getLogger("remap.broker")

PAUSE_S = 0.25
"""How long nobody is admitted if not even the descriptor that is kept for it suffices."""


class Listener:
    """Who connects to a socket at `path` goes to `admit`, by way of the selector, whose loop calls `resume` at `again`. One
    descriptor is kept for telling those who connect that no other is left: else they would wait, and the loop would hear of
    them again and again. Raises as `listen`."""

    def __init__(self, path: Path, selector: selectors.BaseSelector, admit: Callable[[socket.socket], None]) -> None:
        self.path, self._selector, self._admit = path, selector, admit
        self.again: float | None = None
        self._said, self._kept = False, -1
        self._socket = _listen(path)
        self.resume(0.0)

    def resume(self, now: float) -> None:
        """If it is time for that, or for the first time."""
        if self.again is None or now >= self.again:
            self.again = None
            self._keep()
            if self._socket not in self._selector.get_map():
                self._selector.register(self._socket, selectors.EVENT_READ, self._ready)

    def _ready(self, mask: int) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # who connected has gone
            return
        except OSError as error:
            self._turn_away(error)
            return
        try:
            self._admit(connection)
            self._said = False
        except OSError as error:
            refuse(connection, self._full(error))

    def _turn_away(self, error: OSError) -> None:
        why = self._full(error)
        self._let_go()
        try:
            refuse(self._socket.accept()[0], why)
        except OSError:  # another thread has taken it, or no memory is left
            self._selector.unregister(self._socket)
            self.again = time.monotonic() + PAUSE_S
        self._keep()

    def _full(self, error: OSError) -> str:
        """Why; once for all who come until somebody is admitted it is in the log too."""
        why = f"process {os.getpid()} can admit nobody: {error}; try again when others have left, or raise its limit (ulimit -n)"
        if not self._said:
            _logger.warning("at %s %s", self.path, why)
        self._said = True
        return why

    def _keep(self) -> None:
        with suppress(OSError):
            self._kept = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if self._kept < 0 else self._kept

    def _let_go(self) -> None:
        if self._kept >= 0:
            os.close(self._kept)
        self._kept = -1

    def close(self) -> None:
        self._let_go()
        self._socket.close()


def _listen(path: Path) -> socket.socket:
    """Without blocking. Raises InvalidArgument (field path) if something else is there, InvalidState if a server is there."""
    if "\0" in str(path):  # the kernel would read it up to there
        raise InvalidArgument(f"{str(path)!r} is no path: it has a null byte; nothing was made", path=str(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise InvalidArgument(f"{path} is no socket; nothing was changed; give another path", path=str(path))
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise InvalidState(
                        f"a process serves at {path} already; nothing was changed; if that is a broker, join it",
                        path=str(path),
                    )
            path.unlink()  # of one that was killed
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(64)
        listener.setblocking(False)
    except Error:
        listener.close()
        raise
    except (OSError, ValueError) as error:  # ValueError: of text that is no path
        listener.close()
        raise InvalidArgument(f"nothing can listen at {path}: {error}; nothing was made", path=str(path)) from error
    return listener


def peer(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def refuse(connection: socket.socket, why: str) -> None:
    """Say why, and close it."""
    with connection:
        try:
            connection.send(encode(Refused(why)))
        except OSError:
            return
