# SPDX-License-Identifier: Apache-2.0
"""A session's side of the broker's socket.

Two threads, since none may wait for the other's locks: one only reads packets, and hands them on; one does what others ask for,
and takes the session's lock for it. A step that lacks pages sends its want and waits for the answer, `ANSWER_S` at most; the
reader gives it that, so it may hold the session's lock meanwhile. What comes behind the answer a step takes in, if it is faster
than the second thread, which gets neither the lock nor the interpreter soon beside a caller that steps without a pause.

    want(pages)      now: what is free at the broker
    ask(pages)       what others give as well, for good; `await_answer` waits for it, without the session's lock
    want_ahead(...)  before there is need: it waits for nothing; what nobody has used `KEEP_S` after it came goes back
    give(pages)      this process does not touch them any more; `lent`: they are of layers, and may be called
    call(pages)      of lent ones: they come by `returned`, when the member that has them has given them; `await_call` waits for
                     the answers
    disown(pages)    of lent ones: this session will not call them
    recalled         others want pages: the session decides which can be spared
    named            others want these, which they have lent
    granted          pages have come later than the call that wanted them: `arrived` has them
    snapshot         a user looks (`remap top`): how the session is. Nothing is sent of it unless a user does
    events           a user traces (`remap trace`): what it has done lately

Pages of a device are fetched before the session has a thread for what comes; what came meanwhile is kept for it.

A broker that has not answered is not waited for, nor asked, until it says something (`silence`): it may be stopped.

When the broker has gone the session serves on with what it has: `want` gets nothing, and `problem` says why. The reading thread
looks for a new one at the path, at growing intervals, and joins it with what the session has (`held`) and has lent. It alone
reads a connection, to its end before it joins again, and what is given leaves `held` and is sent in one step, under `_sending`.
So claims are exact, and nothing is read behind a later Join: messages need no stamps.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from remap.broker.locks import Lock, lock_member
from remap.broker.messages import (
    MOST_BYTES,
    VERSION,
    Bring,
    Claim,
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
    named_pages,
    pages_of,
    runs_of,
)
from remap.broker.report import events_in, report_of
from remap.errors import Error, InvalidArgument, InvalidState
from remap.memory.shared_pages import MOST_FILES, JoinedPages
from remap.memory.trace import Event
from remap.report import Snapshot

if TYPE_CHECKING:
    from remap import _core

__all__ = ["Asked", "Membership", "join"]

_logger = logging.getLogger("remap.broker")

JOIN_S = 10.0
ANSWER_S = 0.05
"""How long a call waits for what is free now. The broker answers in well under a millisecond, unless the machine is busy."""
PATIENT_S, HEAR_S = 10.0, 2.0
"""How long `await_answer` waits for all that others give, and for the broker's first word, which comes at once."""
KEEP_S = 2.0
"""How long pages that were wanted ahead of need are kept for it."""
PREPARE_S = 0.02
"""How long behind an answer the next one is prepared: on a busy machine the broker would wait for it to be done."""
AGAIN_S, MOST_AGAIN_S = 0.05, 2.0
"""How long a member waits before it looks for a new broker: twice as long each time, to the most."""


class Asked(Protocol):
    """The session, as the second thread calls it. Each takes the session's lock."""

    def granted(self) -> None: ...
    def returned(self) -> None: ...
    def recalled(self, pages: int, layers: bool, keeps: bool, ahead: bool) -> None: ...
    def named(self, pages: Sequence[int], gently: bool) -> None: ...
    def snapshot(self) -> Snapshot: ...
    def events(self) -> tuple[Event, ...]: ...
    def recheck(self) -> None: ...
    def unused(self) -> None: ...
    def prepare(self) -> bool: ...


class _Recheck:
    """An interrupt may have lost pages between two lines: the session looks for them."""


class _Asleep:
    """A tenant of the session serves nothing now: it may prepare what others will ask for."""


class _Prepare:
    """It does."""


class _Unused:
    """What came ahead of need was kept for long enough."""


_Work = Grant | Returned | Recall | Tell | _Recheck | _Asleep | _Prepare | _Unused


class Membership:
    """Made by `join`. page_bytes, pages: of the broker's. on_device: they are a GPU's. early: what came before all was set up.
    problem: why no broker answers now; "": one does. held: the pages that are the session's as far as the broker knows; the
    reading thread adds some, `give` takes some. borrowed: of these, those that other members have lent. ahead: those that came
    ahead of need, `KEEP_S` ago at most. Each change is one call of a set's, so one step for other threads."""

    def __init__(
        self,
        connection: socket.socket,
        hello: Join,
        path: str,
        welcome: Welcome,
        mapped: JoinedPages,
        lock: Lock,
        early: Sequence[Tell] = (),
    ) -> None:
        self.path, self.page_bytes, self.pages = path, welcome.page_bytes, welcome.pages
        self.on_device = bool(welcome.uuid)
        self._hello, self._welcome, self._mapped, self._lock = hello, welcome, mapped, lock
        self._process = os.getpid()
        self._over = False  # see `give_all`
        self._left = f"the session has left the broker at {path}"
        self.problem = ""
        self._connection = connection
        self._trying: socket.socket | None = None  # the reading thread's, to a new broker
        self._joins = 1  # how often it has joined; as is `_connection` changed with _reading and _sending held
        self._leaving = threading.Event()
        self._sending = threading.Lock()
        self._answers: queue.SimpleQueue[Grant | None] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[tuple[int, _Work] | None] = (
            queue.SimpleQueue()
        )  # with the join that it came behind
        self.held: set[int] = set()
        self.borrowed: set[int] = set()
        self.ahead: set[int] = set()
        self._ahead = 0  # serial of the last want ahead of need
        self._lends: set[int] = set()  # what the broker knows as lent by the session
        self._serial = 0
        self._calls = 0  # as are `_open_calls`: with _calling held
        self._open_calls: set[int] = set()
        self._calling = threading.Condition()
        self._waits = False  # whether a call waits for an answer; read and written with _choosing held
        self._patient = False  # whether one may do so in `await_answer`
        self._unheard = False  # since a question that was waited for nothing was read; written with _reading held
        self._asked_at = 0  # `_reads` in front of the last want
        self._choosing = threading.Lock()
        self._open = False  # whether more may come for the last want
        self._lacking = 0  # pages of it that have not come; as is `_open` with _choosing held
        self._late: deque[int] = deque()  # pages that no call waited for: each goes to one `arrived`
        self.stirs = False  # whether something has come late, or may
        self._reads = 0  # as is every packet taken and handed on: with _reading held
        self._reading = threading.Condition()
        self._asked: Asked | None = None
        self._threads: list[threading.Thread] = []
        for message in early:
            self._work.put((1, message))

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

    @property
    def silence(self) -> str:
        """Why the broker is not waited for; "": it has answered."""
        return f"the broker at {self.path} does not answer" if self._unheard else ""

    def want(self, pages: int, *, keeps: bool = False) -> list[int]:
        """Ask for `pages` pages. Returns those that have come by now, of unknown bytes; more may come by `granted`. While
        another call's question is open nothing is asked. With the session's lock held."""
        got: list[int] = []
        if pages <= 0 or self._patient:
            return got
        try:
            if self._begin_asking(pages, keeps):
                self._hear(got, ANSWER_S, ANSWER_S, keeps=False)
            self._stop_waiting(got)
        except BaseException:  # an interrupt, perhaps between the queue and `got`: they are the session's all the same
            self.recheck()
            self._stop_waiting(got)
            raise
        return got

    def ask(self, pages: int) -> bool:
        """Ask for `pages` pages for good, and wait for nothing. Returns whether it has asked: then `await_answer` follows, and
        in any case `end_asking`; until that no other want is sent, which would replace this one. With the session's lock held."""
        self._patient = True
        return self._begin_asking(pages, keeps=True)

    def await_answer(self) -> list[int]:
        """What has come when all has that was asked for, or the others have given what they can, or `PATIENT_S` have passed.
        Without the session's lock."""
        got: list[int] = []
        try:
            self._hear(got, HEAR_S, PATIENT_S, keeps=True)
            self._stop_waiting(got)
        except BaseException:
            self.recheck()
            raise
        return got

    def forgo(self) -> None:
        """In front of `end_asking`: the call has been made. What it asked for and has not got is not set aside for it."""
        if self._patient and not self.met:
            self._begin_asking(0, keeps=True)

    def end_asking(self) -> None:
        """What has come and was not waited for is looked for."""
        left: list[int] = []
        if self._patient:
            self._stop_waiting(left)
            self._patient = False
        if left:
            self.recheck()

    def want_ahead(self, pages: int, *, keeps: bool) -> bool:
        """Ask for `pages` pages before they are needed: what nobody needs. Waits for nothing. Returns whether it has asked: not
        while more may come for another want. keeps: for good."""
        with self._choosing:
            if self.problem or self._unheard or self._patient or self._open:
                return False
            self._serial += 1
            serial = self._ahead = self._serial
            self._open, self._lacking, self.stirs = True, pages, True
        return self._send(Want(serial, min(pages, self.pages), keeps, ahead=True))

    def arrived(self) -> list[int]:
        """What has come later than the call that wanted it, once: it goes to a step or to the working thread, whichever has the
        session's lock first. With that lock held."""
        self.stirs = self._open  # before the rest: what comes meanwhile is taken now, or said again
        pages = []
        while self._late:
            pages.append(self._late.popleft())
        return pages

    @property
    def met(self) -> bool:
        """Whether all has come that was wanted last."""
        return self._lacking <= 0

    def let_read(self) -> None:
        """Until the reading thread has handed on what has come for the last want. It has to wait for the interpreter, beside a
        thread that computes for 5 ms; so a step waits for it here, and only if there is something to read."""
        if not self._open:
            return
        with self._reading:  # what was taken has been handed on
            if self.problem:
                return
            before, poll = self._reads, select.poll()
            poll.register(self._connection, select.POLLIN)
            if poll.poll(0):
                self._reading.wait_for(lambda: self._reads != before, ANSWER_S)

    def _begin_asking(self, pages: int, keeps: bool) -> bool:
        """Whether an answer is to come."""
        if self.problem or self._unheard:
            return False
        with self._choosing:
            self._waits = True
            self._serial += 1
            self._open, self._lacking, self.stirs = True, pages, True
        self._asked_at = self._reads
        return self._send(Want(self._serial, min(pages, self.pages), keeps))

    def recheck(self) -> None:
        """An interrupt came where pages were on their way to the session: `Asked.recheck` looks for them."""
        self._work.put((0, _Recheck()))

    def prepare(self) -> None:
        """`Asked.prepare` is called, `PREPARE_S` later, and as long as there is nothing else to do."""
        self._work.put((0, _Asleep()))

    def _stop_waiting(self, got: list[int]) -> None:
        """Pages that have come behind the deadline, into `got`; those that come from now on are `granted`."""
        with self._choosing:
            self._waits = False
            while not self._answers.empty():
                late = self._answers.get()
                got += pages_of(late.runs) if late is not None else ()

    def _hear(self, got: list[int], first_s: float, seconds: float, keeps: bool) -> None:
        """The answers to the present want, into `got`: the first one within `first_s`. keeps: until there are no more."""
        begun, serial = time.monotonic(), self._serial
        late_s = first_s
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, begun + late_s - time.monotonic()))
            except queue.Empty:
                with self._reading:
                    self._unheard = self._reads == self._asked_at
                return
            if answer is None:
                return
            got += pages_of(answer.runs)
            if answer.serial == serial:
                if not (keeps and answer.more):
                    return
                late_s = seconds

    def give(self, pages: Sequence[int], *, lent: bool = False) -> None:
        """These are not the session's any more. lent: they are of its layers, and it may call them."""
        for runs in runs_of(pages):
            with self._sending:
                going = pages_of(runs)
                self.borrowed.difference_update(going)  # before they can come again
                self.ahead.difference_update(going)
                self.held.difference_update(going)
                self._lends.update(going if lent else ())
                self._send_now(Give(runs, lent))

    def give_all(self, pages: Sequence[int]) -> None:
        """These are all that the session had: it touches none any more, nor any that comes from now on."""
        self.give(pages)
        self._over = True

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
        """Until all that was called has come, or all who have it have answered, or `seconds` have passed. Without the session's
        lock: what comes goes to `returned` before this ends."""
        with self._calling:
            self._calling.wait_for(lambda: self.problem or self._unheard or self._open_calls.isdisjoint(calls), seconds)

    def disown(self, pages: Sequence[int]) -> None:
        """These were lent, and this session will not call them."""
        for runs in runs_of(pages):
            with self._sending:
                self._lends.difference_update(pages_of(runs))
                self._send_now(Disown(runs))

    def close(self) -> None:
        """Leave. Pages that were not given stay the process's until it ends. In a forked child nothing: the connection is its
        parent's."""
        if os.getpid() != self._process:
            return
        self._leaving.set()
        self.problem = self.problem or self._left
        self._work.put(None)
        # A thread of ours comes here if it drops the session: it may hold `_sending`, for which the other one waits.
        waits = threading.current_thread() not in self._threads
        for thread in self._threads[1:] if waits else ():
            thread.join()  # the working thread first: what has come is given back while that is possible
        for connection in (self._connection, self._trying):  # `_try_again` looks at `_leaving` behind each
            if connection is not None:
                with suppress(OSError):  # the broker has closed it
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads if waits else ():
            thread.join()
        self._connection.close()
        self._mapped.close()
        if (
            self._over or not self.held
        ):  # else a new broker has to see that this process may touch them, until the process ends
            self._lock.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _send(self, message: ToBroker, joins: int = 0) -> bool:
        """joins: not if it has joined again since, 0: always."""
        with self._sending:
            return joins in (0, self._joins) and self._send_now(message)

    def _send_now(self, message: ToBroker) -> bool:
        if self.problem and not self._leaving.is_set():
            return False  # what counts of it the next Join says
        try:
            self._connection.send(encode(message), socket.MSG_DONTWAIT)
        except OSError as error:  # a broker that reads nothing for that long counts as one that has gone
            self._broken(f"the broker at {self.path} has gone: {error}")
            return False
        return True

    def _broken(self, why: str) -> None:
        if not self.problem:
            self.problem = why
            _logger.warning("%s; this session serves on with the pages that it has, and looks for a new one", why)
        self._open = False
        with suppress(
            OSError
        ):  # the reading thread reads to the end, and joins again once the broker can see the end as well
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._calling:
            self._open_calls.clear()
            self._calling.notify_all()

    def _read(self) -> None:
        """The reading thread: takes no lock of the session's."""
        while True:
            self._broken(self._read_to_the_end())
            with self._choosing:
                if self._waits:
                    self._answers.put(None)
            if not self._join_again():
                return

    def _read_to_the_end(self) -> str:
        """Of this connection. Returns why it has ended."""
        connection, joins = self._connection, self._joins
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while True:
            poll.poll()  # without `_reading`, which a step takes
            with self._reading:
                why = self._take(connection, joins)
                self._open = self._open and not why
                self._reads += 1
                self._reading.notify_all()
            if why:
                return why

    def _take(self, connection: socket.socket, joins: int) -> str:
        """One packet, which is there. Returns why none will follow; "": more may."""
        try:
            packet = connection.recv(MOST_BYTES, socket.MSG_DONTWAIT)
            self._unheard = False
            message = decode_to_member(packet) if packet else None
            pages = named_pages(getattr(message, "runs", ()), self.pages, "it")
        except (BlockingIOError, ConnectionResetError):
            return ""  # the second: closed before what was sent was read, and what the broker sent comes behind this
        except (OSError, Error) as error:
            return f"the broker at {self.path} cannot be read: {error}"
        if message is None:
            return f"the broker at {self.path} has gone"
        if isinstance(message, Refused):
            return f"the broker at {self.path} refuses this process: {message.why}"
        if isinstance(message, Grant | Returned):
            self.held.update(pages)
            self._lends.difference_update(pages)
        if isinstance(message, Returned):
            self._come_late(pages)
        if isinstance(message, Recall | Returned | Tell):
            self._work.put((joins, message))
        elif isinstance(message, Grant):
            if message.lent:
                self.borrowed.update(pages)
            if message.serial == self._ahead:
                self.ahead.update(pages)
            with self._choosing:
                if message.serial == self._serial:
                    self._open = message.more
                    self._lacking -= len(pages)
                if self._waits:
                    self._answers.put(message)
                else:
                    self._come_late(pages)
                    self._work.put((joins, message))
        return ""

    def _come_late(self, pages: Sequence[int]) -> None:
        self._late.extend(pages)
        self.stirs = True

    def _join_again(self) -> bool:
        """Look for a new broker until there is one that takes the session. Returns whether, else the session has left."""
        pause, said = AGAIN_S, ""
        while not self._leaving.wait(pause):
            pause = min(2 * pause, MOST_AGAIN_S)
            try:
                self._try_again()
            except InvalidArgument:  # no broker is there
                continue
            except Error as error:
                self.problem = str(error)
                if self.problem != said:
                    _logger.warning("%s", error)
                said = self.problem
            else:
                _logger.info("the broker at %s: joined again with %d pages", self.path, len(self.held))
                return True
        return False

    def _try_again(self) -> None:
        """Raises as `join`. Pages that the session gives meanwhile are told behind the claims."""
        with self._sending:
            held, lends, borrowed = set(self.held), set(self._lends), self.held & self.borrowed
        claims = [
            *(Claim(runs) for runs in runs_of(held - borrowed)),
            *(Claim(runs, borrowed=True) for runs in runs_of(borrowed)),
            *(Claim(runs, lent=True) for runs in runs_of(lends)),
        ]
        known = self._welcome
        hello = Join(
            VERSION,
            self._hello.name,
            self._lock.number,
            known.arena,
            known.page_bytes,
            known.pages,
            known.uuid,
            len(claims),
        )
        with ExitStack() as undo:
            connection = undo.enter_context(_connect(self.path, seconds=1))
            self._trying = connection
            undo.callback(self._try_nothing)
            if self._leaving.is_set():
                raise InvalidState(f"{self._left}; nothing changed", why="leaving")
            welcome, files = _hail(connection, self.path, (hello, *claims), self._mapped)
            for file in files:
                os.close(file)
            if welcome != known:
                raise InvalidState(f"the broker at {self.path} is another one than it says", why="welcome")
            connection.settimeout(None)
            with self._reading, self._sending:
                before, self._connection = self._connection, connection
                self._joins += 1
                self.problem = ""
                before.close()
                if self._leaving.is_set():
                    self.problem = self._left
                    raise InvalidState(f"{self._left}; nothing changed", why="leaving")
                undo.pop_all()
                self._trying = None
                gone = held - self.held
                for lent, pages in ((False, gone - self._lends), (True, gone & self._lends)):
                    for runs in runs_of(pages):
                        self._send_now(Give(runs, lent))
                for runs in runs_of(lends - self._lends):
                    self._send_now(Disown(runs))

    def _try_nothing(self) -> None:
        self._trying = None

    def _do(self) -> None:
        """The working thread."""
        asked = self._asked
        assert asked is not None
        due: dict[
            type[_Prepare | _Unused], float
        ] = {}  # what is to be done later, and when, if there is nothing else to do
        while True:
            first = min(due, key=due.__getitem__, default=_Prepare)
            try:
                item = self._work.get(timeout=max(0.0, due[first] - time.monotonic()) if due else None)
            except queue.Empty:
                item = 0, first()
                del due[first]
            if item is None:
                return
            joins, message = item
            if isinstance(message, Grant) and self.ahead:
                due[_Unused] = time.monotonic() + KEEP_S
            if isinstance(message, Recall | _Asleep):
                due[_Prepare] = time.monotonic() + PREPARE_S
            over = bool(self.problem) or joins != self._joins
            if isinstance(message, Recall | Tell) and over and not self._leaving.is_set():
                continue  # of a broker that has gone
            try:
                if isinstance(message, _Recheck):
                    asked.recheck()
                elif isinstance(message, Returned):
                    asked.returned()
                elif isinstance(message, Grant):
                    if self._late or self.ahead:  # else a step was faster, and has all that there is to do
                        asked.granted()
                elif isinstance(message, _Unused):
                    asked.unused()
                elif isinstance(message, Tell):
                    for part in events_in(asked.events()) if message.events else ():
                        self._send(part, joins)
                    self._send(report_of(asked.snapshot()), joins)
                elif isinstance(message, _Prepare):
                    while self._work.empty() and asked.prepare():
                        pass
                elif isinstance(message, _Asleep):
                    pass
                elif message.runs:
                    asked.named(pages_of(message.runs), message.gently)
                else:
                    asked.recalled(message.pages, message.layers, message.keeps, message.ahead)
            except Error as error:
                _logger.warning("what the broker asked for was not done: %s", error)
            except Exception:  # a listener's: without this thread nothing would come in, or go out, any more
                _logger.exception("what the broker asked for was not done")
            if isinstance(message, Recall):
                self._send(Done(message.recall), joins)
            elif isinstance(message, Returned) and not message.more and joins == self._joins:
                with self._calling:
                    self._open_calls.discard(message.serial)
                    self._calling.notify_all()


def _fetch(connection: socket.socket, welcome: Welcome, pages: JoinedPages) -> list[Tell]:
    """All of the device's pages. Returns what came meanwhile. Raises OSError, and InvalidState (field why) for an answer that is
    none."""
    early: list[Tell] = []
    pages.open_device(welcome.uuid, welcome.page_bytes)
    while pages.count < welcome.pages:
        first = pages.count
        connection.send(encode(Fetch(first)))
        message, files = _receive(connection, MOST_FILES)
        while isinstance(message, Tell):  # a user looks
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


def _connect(path: str, seconds: float) -> socket.socket:
    """Raises InvalidArgument (field path) if no broker is there, InvalidState (field why) if it does not answer."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Not `settimeout` yet: a socket without blocking is refused while many others wait to be admitted.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), 0))
        connection.connect(path)
        connection.settimeout(JOIN_S)
    except OSError as error:
        connection.close()
        raise _nobody(path, error) from error
    return connection


def _nobody(path: str, error: OSError) -> Error:
    if isinstance(error, TimeoutError | BlockingIOError):  # of the connection: nobody has admitted it
        return InvalidState(
            f"the broker at {path} does not answer: {error}; nothing was opened; it is stopped, or starved: wait, or end it",
            why="no answer",
        )
    return InvalidArgument(
        f"no broker can be joined at {path}: {error}; nothing was opened; start one with `remap serve --socket {path} "
        "--capacity SIZE`",
        path=path,
    )


def _hail(
    connection: socket.socket, path: str, messages: Sequence[Join | Claim], mapped: JoinedPages
) -> tuple[Welcome, list[int]]:
    """Join with these, and hand over the pages that are mapped if the broker has none. Returns its answer with what came along.
    Raises InvalidArgument (field path) if it goes, InvalidState (field why) if it refuses or does not answer."""
    try:
        with suppress(BrokenPipeError):  # refused already: why is still to be read
            for message in messages:
                connection.send(encode(message))
        try:
            answer, files = _receive(connection, 1)
        except ConnectionResetError:  # closed before what was sent was read: why comes behind this
            answer, files = _receive(connection, 1)
        while isinstance(answer, Bring) and not mapped.empty:
            ours = mapped.export(answer.first)
            try:
                socket.send_fds(connection, [encode(Pages(answer.first, len(ours)))], ours)
            finally:
                for file in ours:
                    os.close(file)
            answer, files = _receive(connection, 1)
    except OSError as error:
        raise _nobody(path, error) from error
    if not isinstance(answer, Welcome):
        for file in files:
            os.close(file)
        if isinstance(answer, Refused):
            raise InvalidState(
                f"the broker at {path} refuses this process: {answer.why}; nothing was opened", why=answer.why
            )
        raise InvalidState(f"what answers at {path} is no broker of this release; nothing was opened", why="no welcome")
    return answer, files


def join(path: str, name: str = "") -> Membership:
    """Join the broker at this path. Raises InvalidArgument (field path) if none is there, InvalidState (field why) if it
    refuses, or does not answer for `JOIN_S`, and (fields uuid, devices) if its pages are of a device that this process does not
    see; DriverError without a usable driver for it."""
    with ExitStack() as undo:
        connection = undo.enter_context(_connect(path, JOIN_S))
        mapped, early = JoinedPages(), list[Tell]()
        undo.callback(mapped.close)
        try:
            lock = lock_member(Path(path))
        except OSError as error:
            raise _nobody(path, error) from error
        undo.callback(lock.close)
        hello = Join(VERSION, name or f"process {os.getpid()}", lock.number)
        welcome, files = _hail(connection, path, (hello,), mapped)
        for file in files:
            mapped.take(file)
        if welcome.uuid:
            try:
                early = _fetch(connection, welcome, mapped)
            except OSError as error:
                raise _nobody(path, error) from error
        if mapped.empty:
            raise InvalidState(
                f"what answers at {path} is no broker of this release; nothing was opened", why="no welcome"
            )
        connection.settimeout(None)
        undo.pop_all()
        return Membership(connection, hello, path, welcome, mapped, lock, early)
