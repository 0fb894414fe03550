"""The ledger in shared memory, changed under a robust process-shared mutex by whichever process commits.

    0     pthread_mutex_t             robust and process-shared: the kernel hands a dead holder's lock on with EOWNERDEAD
    64    which of the two ledgers is the present one; 72: the last stamp
    128   of each member: who asked it for pages and for how many; the run that it was given last
    ...   ledger 0, ledger 1: owners (a byte a page), then stamps (eight bytes a page)

A change is made in the ledger that is not the present one, and one store swaps them. A holder that dies before the store
leaves the old ledger; so whoever gets the lock with EOWNERDEAD has nothing to mend. Only Linux, and only processes with one
C library: the layout of the mutex is the library's own.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct

__all__ = ["FREE", "SharedLedger"]

FREE = 0
MAX_MEMBERS = 8
_CURRENT, _STAMPS, _SLOTS, _SLOT = 64, 72, 128, 16
_ASK, _STAMP = struct.Struct("<II"), struct.Struct("<Q")
_ROBUST = _SHARED = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def _check(code: int, what: str) -> None:
    if code:
        raise OSError(code, f"{what}: {os.strerror(code)}")


class SharedLedger:
    """One process's view of it. Made once; other processes get it by fork."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._bytes = 9 * pages
        self._base = _SLOTS + MAX_MEMBERS * _SLOT
        size = self._base + 2 * self._bytes
        self.descriptor = os.memfd_create("ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.descriptor, size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._mutex = ctypes.c_void_p(self._address)
        self._view = memoryview(self._map)
        attributes = ctypes.create_string_buffer(64)
        _check(_libc.pthread_mutexattr_init(attributes), "pthread_mutexattr_init")
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED), "pthread_mutexattr_setpshared")
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST), "pthread_mutexattr_setrobust")
        _check(_libc.pthread_mutex_init(self._mutex, attributes), "pthread_mutex_init")
        self.events = [os.eventfd(0) for _ in range(MAX_MEMBERS)]

    # -- the lock ------------------------------------------------------------------------------------------------

    def lock(self, timeout_s: float | None = None) -> bool:
        """Returns whether its last holder died with it. Raises TimeoutError; without timeout_s it waits for ever."""
        if timeout_s is None:
            code = _libc.pthread_mutex_lock(self._mutex)
        else:
            until = _Timespec()
            _libc.clock_gettime(0, ctypes.byref(until))
            end = until.seconds * 10**9 + until.nanoseconds + int(timeout_s * 1e9)
            until.seconds, until.nanoseconds = divmod(end, 10**9)
            code = _libc.pthread_mutex_timedlock(self._mutex, ctypes.byref(until))
        if code == errno.ETIMEDOUT:
            raise TimeoutError(f"the ledger's lock was not to be had in {timeout_s} s")
        if code == errno.EOWNERDEAD:
            _check(_libc.pthread_mutex_consistent(self._mutex), "pthread_mutex_consistent")
            return True
        _check(code, "pthread_mutex_lock")
        return False

    def unlock(self) -> None:
        """Let the next one in."""
        _check(_libc.pthread_mutex_unlock(self._mutex), "pthread_mutex_unlock")

    # -- the two ledgers -----------------------------------------------------------------------------------------

    def current(self) -> int:
        """Which ledger is the present one."""
        return int(self._map[_CURRENT])

    def owners(self) -> bytes:
        """Of each page, in the present ledger."""
        at = self._base + self.current() * self._bytes
        return self._map[at : at + self.pages]

    def run(self, member: int, count: int) -> range:
        """The lowest run of so many pages of the member's; empty if there is none. With the lock held."""
        first = self.owners().find(bytes([member]) * count)
        return range(0) if first < 0 else range(first, first + count)

    def write_spare(self, pages: range, to: int) -> int:
        """The next ledger, in the spare place; returns which. Nobody reads it before `swap`."""
        now = self.current()
        old, new = self._base + now * self._bytes, self._base + (1 - now) * self._bytes
        ctypes.memmove(self._address + new, self._address + old, self._bytes)
        (stamp,) = _STAMP.unpack_from(self._view, _STAMPS)
        self._map[new + pages.start : new + pages.stop] = bytes([to]) * len(pages)
        stamps = new + self.pages
        self._map[stamps + 8 * pages.start : stamps + 8 * pages.stop] = _STAMP.pack(stamp + 1) * len(pages)
        _STAMP.pack_into(self._view, _STAMPS, stamp + 1)  # a number that is left out does no harm
        return 1 - now

    def swap(self, to: int) -> None:
        """The decision: one store of one byte."""
        self._map[_CURRENT] = to

    def move(self, pages: range, to: int) -> None:
        """With the lock held."""
        self.swap(self.write_spare(pages, to))

    # -- asking --------------------------------------------------------------------------------------------------

    def want(self, member: int, donor: int, count: int) -> range:
        """So many pages more: free ones, or the donor's."""
        self.lock()
        if free := self.run(FREE, count):
            self.move(free, member)
            self.unlock()
            return free
        _ASK.pack_into(self._view, _SLOTS + donor * _SLOT, member, count)
        self.unlock()
        os.eventfd_write(self.events[donor], 1)
        os.eventfd_read(self.events[member])
        first, given = _ASK.unpack_from(self._view, _SLOTS + member * _SLOT + _ASK.size)
        return range(first, first + given)

    def donate(self, member: int) -> None:
        """A donor that computes nothing: it gives what it is asked for, at once. Until it is killed."""
        while True:
            os.eventfd_read(self.events[member])
            self.lock()
            asker, count = _ASK.unpack_from(self._view, _SLOTS + member * _SLOT)
            given = self.run(member, count)
            _ASK.pack_into(self._view, _SLOTS + asker * _SLOT + _ASK.size, given.start, len(given))
            self.move(given, asker)
            self.unlock()
            os.eventfd_write(self.events[asker], 1)

    def hand(self, pages: range, to: int = FREE) -> None:
        """These pages go to somebody else."""
        self.lock()
        self.move(pages, to)
        self.unlock()
