# SPDX-License-Identifier: Apache-2.0
"""A socket at a path, for processes of the same user, and the processes that connect to it."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from remap.broker.messages import Refused, encode
from remap.errors import Error, InvalidArgument, InvalidState

__all__ = ["listen", "peer", "refuse"]


def listen(path: Path) -> socket.socket:
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
