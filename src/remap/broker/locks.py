# SPDX-License-Identifier: Apache-2.0
"""The members that may still have pages of the arena at a socket's path: locks on bytes of a file beside it, `PATH.lock`.

    byte 0             the broker, while it lives
    byte 16 + number   a member, from before it joins until it has given all pages back, or its process has ended

A broker that begins where another was killed sees by them which members are left. The locks are of open files (`F_OFD_SETLK`):
the kernel drops one when the last descriptor of its file is closed, so at the end of the process, behind its memory. No process
number is in it, so containers that share the folder see each other's. A child made by fork closes its descriptors of them; one
that C code forks keeps them, and its parent counts as being there for as long.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import weakref
from pathlib import Path

from remap.errors import InvalidArgument, InvalidState

__all__ = ["MOST_NUMBER", "Lock", "lock_broker", "lock_member", "remove"]

MOST_NUMBER = 1 << 40
_BROKER, _FIRST = 0, 16
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, process
_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """Of one byte, until `close`. number: the member's; 0: the broker's, or of no process, without a file."""

    def __init__(self, file: int, number: int = 0) -> None:
        self._file, self.number = file, number
        _locks.add(self)

    def close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def members(self) -> set[int]:
        """The numbers of all members that others have locked."""
        found: set[int] = set()
        spans = [(_FIRST, _FIRST + MOST_NUMBER + 1)]
        while spans:  # the kernel names one lock in the way, whichever
            first, end = spans.pop()
            at = _in_the_way(self._file, first, end - first) if first < end else None
            if at is not None:
                found.add(at - _FIRST)
                spans += [(first, at), (at + 1, end)]
        return found

    def sees(self, number: int) -> bool:
        """Whether another holder has locked this member's number."""
        return _in_the_way(self._file, _FIRST + number, 1) is not None


def lock_broker(path: Path) -> Lock:
    """The right to serve at this socket's path. Raises InvalidState (field path) if another broker has it, also one that is
    stopped; InvalidArgument (field path) if there can be no file."""
    while True:
        try:
            file = _open(path, os.O_CREAT)
        except (OSError, ValueError) as error:  # ValueError: of text that is no path
            raise InvalidArgument(f"nothing can listen at {path}: {error}; nothing was made", path=str(path)) from error
        if not _try(file, _BROKER):
            os.close(file)
            raise InvalidState(
                f"a broker serves at {path} already, or is stopped there; nothing was made; join it, or end it",
                path=str(path),
            )
        if _is_at(file, path):
            return Lock(file)
        os.close(file)  # the one who had it before has removed it


def lock_member(path: Path) -> Lock:
    """A number that no living member has. Where there is no such file no broker could see it: number 0. Raises OSError."""
    try:
        file = _open(path, 0)
    except FileNotFoundError:
        return Lock(-1)
    number = 0
    while not number or not _try(file, _FIRST + number):
        number = 1 + secrets.randbelow(MOST_NUMBER)
    return Lock(file, number)


def remove(path: Path, lock: Lock) -> None:
    """The broker ends: its file, too, unless a member may have pages."""
    if not lock.members():
        _beside(path).unlink(missing_ok=True)
    lock.close()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _open(path: Path, flags: int) -> int:
    return os.open(_beside(path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)


def _is_at(file: int, path: Path) -> bool:
    try:
        there = _beside(path).stat()
    except FileNotFoundError:
        return False
    here = os.fstat(file)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _try(file: int, byte: int) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _in_the_way(file: int, byte: int, length: int) -> int | None:
    """The first byte of another's lock there."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, length, 0)
    kind, _, start, _, _ = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(start)


def _close_in_child() -> None:
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
