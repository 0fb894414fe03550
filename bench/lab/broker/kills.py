"""What becomes of each prototype when a process is killed or stopped in the middle of a change."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .messages import WANT, Message, Pages, receive, send, serve
from .shared import FREE, SharedLedger

__all__ = [
    "WAITS_S",
    "broker_killed",
    "broker_stopped",
    "end_of_file_and_process",
    "holder_killed",
    "holder_stopped",
    "record_lock_of_a_member",
    "waiter_killed",
]

WAITS_S = 0.2
"""How long the others wait for a process that is stopped."""


_libc = ctypes.CDLL(None)
_FLOCK = struct.Struct("hhqqi")  # struct flock on Linux of 64 bits: type, whence, first byte, how many, process
_CLONE_NEWPID, _PR_SET_PDEATHSIG = 0x20000000, 1


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def child(body: Callable[[], None]) -> Iterator[int]:
    """A forked process that runs the body. Killed at the end, if it still lives."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _die_inside(ledger: SharedLedger, ready: int) -> Callable[[], None]:
    def body() -> None:
        ledger.lock()
        ledger.write_spare(range(64), 2)  # half of a change: written, not swapped
        os.write(ready, b"1")
        signal.pause()

    return body


@contextmanager
def _holder(ledger: SharedLedger) -> Iterator[int]:
    reading, writing = os.pipe()
    try:
        with child(_die_inside(ledger, writing)) as pid:
            os.read(reading, 1)
            yield pid
    finally:
        os.close(reading)
        os.close(writing)


def holder_killed(ledger: SharedLedger) -> tuple[int, bool]:
    """(nanoseconds from SIGKILL to another's lock, whether the ledger is the old one and the lock works again)."""
    before, which = ledger.owners(), ledger.current()
    with _holder(ledger) as pid:
        begin = time.perf_counter_ns()
        os.kill(pid, signal.SIGKILL)
        died = ledger.lock(timeout_s=5.0)
        end = time.perf_counter_ns()
        whole = died and ledger.owners() == before and ledger.current() == which
        ledger.move(range(64), 1)
        ledger.move(range(64), FREE)
        ledger.unlock()
    again = not ledger.lock(timeout_s=1.0)
    ledger.unlock()
    return end - begin, whole and again


def holder_stopped(ledger: SharedLedger) -> bool:
    """Whether a holder that is stopped keeps everybody else out, as long as they wait."""
    with _holder(ledger) as pid:
        os.kill(pid, signal.SIGSTOP)
        try:
            ledger.lock(timeout_s=WAITS_S)
            ledger.unlock()
            kept_out = False
        except TimeoutError:
            kept_out = True
        os.kill(pid, signal.SIGKILL)
        ledger.lock(timeout_s=5.0)
        ledger.unlock()
    return kept_out


def waiter_killed(ledger: SharedLedger, *, same_number: bool) -> bool | None:
    """Whether the lock is handed on while its holder lives, when one that waits for it is killed.

    The kernel knows a holder by its thread's number, which only counts within a PID namespace: the first process of every
    container has 1. The holder here is the first of a namespace; same_number: the one that waits is the first of another.
    None: making namespaces is not allowed here.
    """
    reading, writing = os.pipe()

    def first_of_a_namespace(body: Callable[[], None]) -> Callable[[], None]:
        def outer() -> None:
            if _libc.unshare(_CLONE_NEWPID):
                os.write(writing, b"0")
                return
            with child(body) as pid:
                os.write(writing, b"1")
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        return outer

    def hold() -> None:
        ledger.lock()
        _die_with_parent()
        os.write(writing, b"2")
        signal.pause()

    def wait() -> None:
        _die_with_parent()
        ledger.lock(timeout_s=2 * WAITS_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def waits_and_is_killed() -> None:
        if same_number:
            _libc.unshare(_CLONE_NEWPID)
        with child(wait):
            time.sleep(WAITS_S)  # it waits for the lock when it is killed, on leaving

    try:
        with child(first_of_a_namespace(hold)):
            said = os.read(reading, 1)
            while said not in b"02":
                said = os.read(reading, 1)
            if said == b"0":
                return None
            with child(waits_and_is_killed) as pid:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                try:
                    handed_on = ledger.lock(timeout_s=WAITS_S)  # the holder lives
                    ledger.unlock()
                except TimeoutError:
                    handed_on = False
    finally:
        os.close(reading)
        os.close(writing)
    return handed_on


def record_lock_of_a_member(*, other_namespace: bool) -> tuple[bool, int] | None:
    """(whether another process sees the record lock of one that lives, nanoseconds from SIGKILL until the lock is free)."""
    reading, writing = os.pipe()
    file = os.memfd_create("locks", os.MFD_CLOEXEC)
    os.ftruncate(file, 4096)

    def hold() -> None:
        _die_with_parent()
        fcntl.fcntl(file, fcntl.F_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 7, 1, 0))
        os.write(writing, b"1")
        signal.pause()

    def body() -> None:
        if other_namespace and _libc.unshare(_CLONE_NEWPID):
            os.write(writing, b"0")
            return
        with child(hold) as pid:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def locked() -> bool:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 7, 1, 0)
        return bool(_FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)

    try:
        with child(body) as pid:
            if os.read(reading, 1) == b"0":
                return None
            seen = locked()
            begin = time.perf_counter_ns()
            os.kill(pid, signal.SIGKILL)  # the holder goes with it
            while locked() and time.perf_counter_ns() - begin < 10**10:
                pass
            return seen and not locked(), time.perf_counter_ns() - begin
    finally:
        os.close(reading)
        os.close(writing)
        os.close(file)


@contextmanager
def _stopped_broker() -> Iterator[tuple[int, socket.socket]]:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def body() -> None:
        mine.close()
        serve({1: its}, Pages.free(4096))

    with mine, child(body) as pid:
        its.close()
        os.kill(pid, signal.SIGSTOP)
        send(mine, Message(WANT, pages=range(64)))
        yield pid, mine


def broker_killed() -> tuple[int, bool]:
    """(nanoseconds from SIGKILL to when a member that waits for a grant knows, whether it was told by the end of the file)."""
    with _stopped_broker() as (pid, sock):
        begin = time.perf_counter_ns()
        os.kill(pid, signal.SIGKILL)
        try:
            told = receive(sock) is None
        except ConnectionResetError:  # its queue was not empty: the kernel says so instead
            told = True
        return time.perf_counter_ns() - begin, told


def broker_stopped() -> bool:
    """Whether a broker that is stopped keeps a member waiting, as long as it waits."""
    with _stopped_broker() as (_, sock):
        sock.settimeout(WAITS_S)
        try:
            receive(sock)
        except TimeoutError:
            return True
        return False


def end_of_file_and_process() -> tuple[int, int]:
    """Nanoseconds from SIGKILL of a process with 64 MiB of its own to the end of its socket, and to the end of the process."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def body() -> None:
        mine.close()
        kept = bytearray(os.urandom(4096)) * 16384
        its.sendall(bytes(kept[:1]))
        signal.pause()

    with mine, child(body) as pid:
        its.close()
        mine.recv(1)
        process = os.pidfd_open(pid)
        try:
            begin = time.perf_counter_ns()
            os.kill(pid, signal.SIGKILL)
            mine.recv(1)
            file = time.perf_counter_ns() - begin
            select.select([process], [], [])
            return file, time.perf_counter_ns() - begin
        finally:
            os.close(process)
