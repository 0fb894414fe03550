# SPDX-License-Identifier: Apache-2.0
"""A session's side of the broker's socket.

Two threads, since none may wait for the other's locks: one only reads packets, and hands them on; one does what others ask for,
and takes the session's lock for it. A call of the session that needs pages sends its want and waits for the answer, which the
reader gives it; so it may hold the session's lock meanwhile.

    want(pages)      now: what is free at the broker; `patient`: what others give as well, for good
    give(pages)      nobody here touches them any more; `lent`: they are of layers, and may be called
    call(pages)      of what was lent: it comes by `returned`, when who has it has given it; `await_call` waits for the answers
    disown(pages)    of what was lent: nobody here will call it
    recalled         others want pages: the session decides which can be spared
    named            others want these, which they have lent
    granted          pages that came later than the call that wanted them
    snapshot         somebody looks (`remap top`): how the session is. Nothing is sent of it unless somebody does

Pages of a device are fetched before the session has a thread for what comes; what came meanwhile is kept for it.

When the broker has gone the session serves on with what it has: `want` gets nothing, and `problem` says why.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Protocol

from remap.broker.messages import (
    MOST_BYTES,
    VERSION,
    Disown,
    Done,
    Fetch,
    Give,
    Grant,
    Home,
    Join,
    Pages,
    Recall,
    Refused,
    Returned,
    Tell,
    ToBroker,
    ToMember,
    Want,
    Welcome,
    decode_to_member,
    encode,
    pages_of,
    runs_of,
)
from remap.broker.report import report_of
from remap.errors import Error, InvalidArgument, InvalidState
from remap.memory.shared_pages import MOST_FILES, JoinedPages
from remap.report import Snapshot

if TYPE_CHECKING:
    from remap import _core

__all__ = ["Asked", "Membership", "join"]

_logger = logging.getLogger("remap.broker")

JOIN_S = 10.0
ANSWER_S = 0.05
"""How long a call waits for what is free now. The broker answers in well under a millisecond, unless the machine is busy."""
PATIENT_S = 10.0


class Asked(Protocol):
    """The session, as the second thread calls it. Each takes the session's lock."""

    def granted(self, pages: Sequence[int]) -> None: ...
    def returned(self, pages: Sequence[int]) -> None: ...
    def recalled(self, pages: int, layers: bool) -> None: ...
    def named(self, pages: Sequence[int], gently: bool) -> None: ...
    def snapshot(self) -> Snapshot: ...


class Membership:
    """Made by `join`. page_bytes, pages: of the broker's. on_device: they are a GPU's. early: what came before all was set up.
    borrowed: of the pages that the session has, those that other members have lent; the reading thread and `give` change it, one
    page at a time."""

    def __init__(
        self, connection: socket.socket, path: str, welcome: Welcome, mapped: JoinedPages, early: Sequence[Tell] = ()
    ) -> None:
        self.path, self.page_bytes, self.pages = path, welcome.page_bytes, welcome.pages
        self.on_device = bool(welcome.uuid)
        self._mapped = mapped
        self._process = os.getpid()
        self.problem = ""
        self._connection = connection
        self._sending = threading.Lock()
        self._answers: queue.SimpleQueue[Grant | None] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Grant | Returned | Recall | Tell | None] = queue.SimpleQueue()
        self.borrowed: set[int] = set()
        self._serial = 0
        self._calls = 0  # as are `_open_calls`: with _calling held
        self._open_calls: set[int] = set()
        self._calling = threading.Condition()
        self._waits = False  # whether a call waits for an answer; read and written with _choosing held
        self._choosing = threading.Lock()
        self._asked: Asked | None = None
        self._threads: list[threading.Thread] = []
        for message in early:
            self._work.put(message)

    def make_backend(self, copy_threads: int, host_budget: int) -> _core.Backend:
        """Over the broker's pages. host_budget: bytes of page-locked host memory at most; 0: what the machine can spare."""
        return self._mapped.make_backend(self.pages, self.page_bytes, copy_threads, host_budget)

    def serve(self, asked: Asked) -> None:
        """From now on `asked` is told what comes."""
        self._asked = asked
        for name, body in (("remap-member-read", self._read), ("remap-member", self._do)):
            thread = threading.Thread(target=body, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def want(self, pages: int, *, patient: bool = False) -> list[int]:
        """Ask for so many pages. Returns those that have come by now, of unknown bytes; more may come by `granted`, unless
        patient: then until all have, or the others have given what they can, or `PATIENT_S`. With the session's lock held."""
        if pages <= 0:
            return []
        return self._ask(min(pages, self.pages), PATIENT_S if patient else ANSWER_S, patient)

    def cancel(self) -> list[int]:
        """Nothing is wanted any more. Returns what has come meanwhile; nothing comes behind this."""
        return self._ask(0, PATIENT_S, patient=True)

    def _ask(self, pages: int, seconds: float, patient: bool) -> list[int]:
        if self.problem:
            return []
        with self._choosing:
            self._waits = True
            self._serial += 1
        got: list[int] = []
        try:
            if self._send(Want(self._serial, pages, keeps=patient)):
                self._hear(got, time.monotonic() + seconds, patient)
            self._stop_waiting(got)
        except BaseException:  # an interrupt: they are the session's all the same
            self._stop_waiting(got)
            for runs in runs_of(got):
                self._work.put(Grant(self._serial, runs))
            raise
        return got

    def _stop_waiting(self, got: list[int]) -> None:
        """What has come behind the deadline, into `got`; what comes from now on is `granted`."""
        with self._choosing:
            self._waits = False
            while not self._answers.empty():
                late = self._answers.get()
                got += pages_of(late.runs) if late is not None else ()

    def _hear(self, got: list[int], deadline: float, patient: bool) -> None:
        """The answers to the present want, into `got`."""
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            if answer is None:
                return
            got += pages_of(answer.runs)
            if answer.serial == self._serial and not (patient and answer.more):
                return

    def give(self, pages: Sequence[int], *, lent: bool = False) -> None:
        """These are not the session's any more. lent: they are of its layers, and it may call them."""
        for page in pages:
            self.borrowed.discard(page)  # before they can come again
        for runs in runs_of(pages):
            self._send(Give(runs, lent))

    def call(self, pages: Sequence[int], *, gently: bool = False) -> list[int]:
        """These, which were lent, are to come home. Waits for nothing. Returns numbers for `await_call`."""
        calls: list[int] = []
        for runs in runs_of(pages) if not self.problem else ():
            with self._sending:  # in the order of their numbers
                with self._calling:
                    self._calls += 1
                    self._open_calls.add(self._calls)
                    calls.append(self._calls)
                self._send_now(Home(self._calls, runs, gently))
        return calls

    def await_call(self, calls: Sequence[int], seconds: float) -> None:
        """Until all that was called has come, or all who have it have answered, or so many seconds. Without the session's lock:
        what comes goes to `returned` before this ends."""
        with self._calling:
            self._calling.wait_for(lambda: self.problem or self._open_calls.isdisjoint(calls), seconds)

    def disown(self, pages: Sequence[int]) -> None:
        """These were lent, and nobody here will call them."""
        for runs in runs_of(pages):
            self._send(Disown(runs))

    def close(self) -> None:
        """Leave. Pages that were not given stay the process's until it ends. In a forked child nothing: the connection is its
        parent's."""
        if os.getpid() != self._process:
            return
        self.problem = self.problem or "the session has left it"
        self._work.put(None)
        # The working thread first: what has come is given back while that is possible.
        for thread in self._threads[1:]:
            _await(thread)
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            _logger.debug("the broker at %s had closed the connection", self.path)
        for thread in self._threads:
            _await(thread)
        self._connection.close()
        self._mapped.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _send(self, message: ToBroker) -> bool:
        with self._sending:
            return self._send_now(message)

    def _send_now(self, message: ToBroker) -> bool:
        try:
            self._connection.send(encode(message), socket.MSG_DONTWAIT)
        except OSError as error:  # a broker that reads nothing for so long counts as one that has gone
            self._broken(f"the broker at {self.path} has gone: {error}")
            return False
        return True

    def _broken(self, why: str) -> None:
        if not self.problem:
            self.problem = why
            with self._calling:
                self._calling.notify_all()
            _logger.warning("%s; this session serves on with the pages that it has", why)

    def _read(self) -> None:
        """The reading thread: takes no lock of the session's."""
        while True:
            message: ToMember | None = None
            try:
                packet = self._connection.recv(MOST_BYTES)
                message = decode_to_member(packet) if packet else None
            except (OSError, Error) as error:
                self._broken(f"the broker at {self.path} cannot be read: {error}")
            if message is None or isinstance(message, Refused):
                self._broken(f"the broker at {self.path} has gone" if message is None else message.why)
                self._answers.put(None)
                self._work.put(None)
                return
            if isinstance(message, Recall | Returned | Tell):
                self._work.put(message)
            elif isinstance(message, Grant):
                if message.lent:
                    self.borrowed.update(pages_of(message.runs))
                with self._choosing:
                    (self._answers if self._waits else self._work).put(message)

    def _do(self) -> None:
        """The working thread."""
        asked = self._asked
        assert asked is not None
        while (message := self._work.get()) is not None:
            try:
                if isinstance(message, Returned):
                    asked.returned(pages_of(message.runs))
                elif isinstance(message, Grant):
                    if message.runs:
                        asked.granted(pages_of(message.runs))
                elif isinstance(message, Tell):
                    self._send(report_of(asked.snapshot()))
                elif message.runs:
                    asked.named(pages_of(message.runs), message.gently)
                else:
                    asked.recalled(message.pages, message.layers)
            except Error as error:
                _logger.warning("what the broker asked for was not done: %s", error)
            except Exception:  # a listener's: without this thread nothing would come in, or go out, any more
                _logger.exception("what the broker asked for was not done")
            if isinstance(message, Recall):
                self._send(Done(message.recall))
            elif isinstance(message, Returned) and not message.more:
                with self._calling:
                    self._open_calls.discard(message.serial)
                    self._calling.notify_all()


def _await(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join()


def _fetch(connection: socket.socket, welcome: Welcome, pages: JoinedPages) -> list[Tell]:
    """All of the device's pages. Returns what came meanwhile. Raises OSError, and InvalidState (field why) for an answer that is
    none."""
    early: list[Tell] = []
    pages.open_device(welcome.uuid, welcome.page_bytes)
    while pages.count < welcome.pages:
        first = pages.count
        connection.send(encode(Fetch(first)))
        message, files = _receive(connection, MOST_FILES)
        while isinstance(message, Tell):  # somebody looks
            early.append(message)
            message, files = _receive(connection, MOST_FILES)
        try:
            if not isinstance(message, Pages) or (message.first, message.count) != (first, len(files)) or not files:
                why = message.why if isinstance(message, Refused) else "its pages did not come"
                raise InvalidState(f"the broker refuses this process: {why}; nothing was opened", why=why)
            while files:
                pages.take(files.pop(0))
        finally:
            for file in files:
                os.close(file)
    return early


def _receive(connection: socket.socket, most: int) -> tuple[ToMember | None, list[int]]:
    """A message and the descriptors that go with it; None if the broker has closed the connection."""
    packet, files, _, _ = socket.recv_fds(connection, MOST_BYTES, most, socket.MSG_CMSG_CLOEXEC)
    try:
        return (decode_to_member(packet) if packet else None), files
    except Error:
        for file in files:
            os.close(file)
        raise


def join(path: str, name: str = "") -> Membership:
    """Join the broker at this path. Raises InvalidArgument (field path) if none is there, InvalidState (field why) if it
    refuses, and (fields uuid, devices) if its pages are of a device that this process does not see; DriverError without a usable
    driver for it."""
    with ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        mapped, early = JoinedPages(), list[Tell]()
        undo.callback(mapped.close)
        try:
            # Not `settimeout` yet: a socket without blocking is refused while many others wait to be admitted.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(JOIN_S), 0))
            connection.connect(path)
            connection.settimeout(JOIN_S)
            with suppress(BrokenPipeError):  # refused already: why is still to be read
                connection.send(encode(Join(VERSION, name or f"process {os.getpid()}")))
            try:
                message, files = _receive(connection, 1)
            except ConnectionResetError:  # closed before what was sent was read: why comes behind this
                message, files = _receive(connection, 1)
            for file in files:
                mapped.take(file)
            if isinstance(message, Welcome) and message.uuid:
                early = _fetch(connection, message, mapped)
        except OSError as error:
            raise InvalidArgument(
                f"no broker can be joined at {path}: {error}; nothing was opened; start one with `remap serve --socket {path} "
                "--capacity SIZE`",
                path=path,
            ) from error
        if isinstance(message, Refused):
            raise InvalidState(
                f"the broker at {path} refuses this process: {message.why}; nothing was opened", why=message.why
            )
        if not isinstance(message, Welcome) or mapped.empty:
            raise InvalidState(
                f"what answers at {path} is no broker of this release; nothing was opened", why="no welcome"
            )
        connection.settimeout(None)
        undo.pop_all()
        return Membership(connection, path, message, mapped, early)
