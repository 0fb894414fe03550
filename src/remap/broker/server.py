# SPDX-License-Identifier: Apache-2.0
"""The broker: makes the pages, admits members, and carries the ledger's decisions to them.

One thread, which never waits for a member: packets that a socket does not take are kept for it, and a member that takes none for
long is let go. A member's pages come back when its *process* has ended (a pidfd says so), never because its socket has: somebody
may still be reading them. Until then they are its own.

Members map the pages (`remap.memory.shared_pages`); the broker does not.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from remap.broker.ledger import Ledger, Sent
from remap.broker.listening import listen, peer, refuse
from remap.broker.messages import (
    MOST_BYTES,
    MOST_NAME,
    VERSION,
    Disown,
    Done,
    Fetch,
    Give,
    Home,
    Join,
    Look,
    Pages,
    Refused,
    Report,
    Shown,
    State,
    Tell,
    ToBroker,
    ToMember,
    Want,
    Welcome,
    decode_to_broker,
    encode,
)
from remap.errors import Error, InvalidArgument, InvalidState
from remap.memory.shared_pages import make_pages

__all__ = ["Broker"]

_logger = logging.getLogger("remap.broker")

RECALL_S = 0.25
"""How long a member is waited for that was asked to give. What it gives later is free then."""
LOOK_S = 0.25
"""How long who looks waits for the members' reports. Of a member that says nothing for so long, the last one is shown."""
FRESH_S = 0.1
"""A report that is not older is shown again: however many look, a member makes no more of them."""
MOST_UNSENT = 256
"""Packets that are kept for a member which reads none."""


@dataclass(eq=False)
class _Member:
    """connection: None once it has closed, while its process still lives. number: of the ledger; 0: it has not joined. told: it
    was told to report, and has not yet. report: the last one, of the moment `reported_s`."""

    connection: socket.socket | None
    process: int  # a pidfd
    pid: int
    number: int = 0
    name: str = ""
    unsent: deque[bytes] = field(default_factory=deque)
    told: bool = False
    report: Report | None = None
    reported_s: float = float("-inf")


class Broker:
    """Serves at `path` from a thread of its own until `close`.

    capacity, page_bytes: bytes, as `Session` takes them. device: "cpu" or "cuda:N". Raises InvalidArgument (field path) if
    something else is at the path, InvalidState if a broker serves there; OutOfMemory for more than the machine could ever hold,
    or the device has; DriverError without a usable driver.
    """

    def __init__(self, path: str | Path, capacity: int, page_bytes: int, device: str = "cpu") -> None:
        pages = capacity // page_bytes if page_bytes > 0 else 0
        if pages < 1:
            raise InvalidArgument(
                f"capacity of {capacity} bytes must hold at least one page of {page_bytes} bytes; nothing was made",
                capacity=capacity,
                page_bytes=page_bytes,
            )
        self.path = Path(path)
        self.page_bytes, self.ledger = page_bytes, Ledger(pages)
        self._members: list[_Member] = []
        self._next = 1
        self._deadlines: dict[int, float] = {}  # recall -> when it is late, the first one first
        self._lookers: dict[_Member, float] = {}  # who waits to see how all are -> until when, the first one first
        with ExitStack() as undo:
            self._pages = make_pages(device, pages, page_bytes)
            undo.callback(self._pages.close)
            self._listener = listen(self.path)
            undo.pop_all()
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._admit)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._closing = False
        # Waited for instead of the thread: until Python 3.12 a join that an interrupt ends counts the thread as ended.
        self._ended_serving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="remap-broker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Members keep what they have."""
        if self._closing:
            return
        self._closing = True
        self._waker.send(b"x")
        self._ended_serving.wait()
        self._thread.join()
        for member in self._members:
            if member.connection is not None:
                member.connection.close()
            os.close(member.process)
        for each in (self._listener, self._waker, self._woken):
            each.close()
        self._selector.close()
        self._pages.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Broker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self) -> None:
        """Until it is closed by another thread, or a signal's handler raises. Raises InvalidState if it has ended by itself."""
        self._ended_serving.wait()
        if not self._closing:
            raise InvalidState(
                f"the broker at {self.path} has ended by an error, which it has printed; its members serve on with what they "
                "have; end them before another one is started"
            )

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._ended_serving.set()

    def _serve(self) -> None:
        while not self._closing:
            firsts = [next(iter(each.values())) for each in (self._deadlines, self._lookers) if each]
            left = max(0.0, min(firsts) - time.monotonic()) if firsts else None
            for key, mask in self._selector.select(left):
                if key.data is not None:
                    key.data(mask)
            now = time.monotonic()
            for recall in [recall for recall, late in self._deadlines.items() if now >= late]:
                self._carry(self.ledger.late(recall))
            for looker in [looker for looker, late in self._lookers.items() if now >= late]:
                self._show(looker)

    def _admit(self, mask: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        pid, uid = peer(connection)
        try:
            if uid != os.getuid():
                raise InvalidState(f"the broker serves user {os.getuid()}, not {uid}")
            process = os.pidfd_open(pid)
        except (OSError, Error) as error:
            refuse(connection, str(error) if isinstance(error, Error) else f"process {pid} cannot be watched: {error}")
            return
        connection.setblocking(False)
        member = _Member(connection, process, pid)
        self._members.append(member)
        self._selector.register(connection, selectors.EVENT_READ, lambda mask: self._ready(member, mask))
        self._selector.register(process, selectors.EVENT_READ, lambda mask: self._ended(member))

    def _ready(self, member: _Member, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(member)
        while member.connection is not None:
            try:
                packet = member.connection.recv(MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._hung_up(member)
                return
            try:
                self._carry(self._do(member, decode_to_broker(packet)))
            except Error as error:
                _logger.warning("member %d (%s, process %d): %s", member.number, member.name, member.pid, error)
                self._send(member, Refused(str(error)))
                self._hung_up(member)
                return

    def _do(self, member: _Member, message: ToBroker) -> Sent:
        ledger = self.ledger
        if isinstance(message, Join):
            return self._join(member, message)
        if isinstance(message, Look):
            return self._look(member, message)
        if not member.number:
            raise InvalidState("the first message must be Join")
        if isinstance(message, Fetch):
            return self._fetch(member, message)
        if isinstance(message, Report):
            return self._reported(member, message)
        if isinstance(message, Want):
            return ledger.wanted(member.number, message.serial, message.pages, keeps=message.keeps)
        if isinstance(message, Give):
            return ledger.gave(member.number, message.runs, lent=message.lent)
        if isinstance(message, Home):
            return ledger.called(member.number, message.serial, message.runs, gently=message.gently)
        if isinstance(message, Disown):
            return ledger.disowned(member.number, message.runs)
        assert isinstance(message, Done)
        return ledger.done(member.number, message.recall)

    def _join(self, member: _Member, message: Join) -> Sent:
        _require_version(message)
        if member.number:
            raise InvalidState("the member has joined already")
        if member in self._lookers:
            raise InvalidState("who looks cannot join meanwhile")
        sent = self.ledger.joined(self._next)
        member.number, member.name = self._next, message.name[:MOST_NAME]
        self._next += 1
        pages = self._pages
        files = [] if pages.file is None else [pages.file]
        self._send_with(member, Welcome(self.page_bytes, self.ledger.pages, pages.uuid), files)
        _logger.info("member %d (%s, process %d) has joined", member.number, member.name, member.pid)
        return sent

    def _fetch(self, member: _Member, message: Fetch) -> Sent:
        files = self._pages.export(message.first)
        try:
            self._send_with(member, Pages(message.first, len(files)), files)
        finally:
            for file in files:
                os.close(file)
        return []

    def _send_with(self, member: _Member, message: ToMember, files: Sequence[int]) -> None:
        """At once: who waits for it has read all else. Raises InvalidState otherwise."""
        assert member.connection is not None
        try:
            if member.unsent:
                raise BlockingIOError("it has not read what came before")
            socket.send_fds(member.connection, [encode(message)], files)
        except OSError as error:
            raise InvalidState(f"its {type(message).__name__} could not be sent: {error}") from error

    # -- who looks -----------------------------------------------------------------------------------------------------

    def _look(self, looker: _Member, message: Look) -> Sent:
        """Members that have not reported just now are told to; nobody waits for them here."""
        _require_version(message)
        if looker.number:
            raise InvalidState("a member does not look; open another connection for that")
        if looker in self._lookers:
            raise InvalidState("it looks again before it is answered")
        now = time.monotonic()
        self._lookers[looker] = now + LOOK_S
        for member in list(self._members):
            here = member.number and member.connection is not None
            if here and not member.told and now - member.reported_s > FRESH_S:
                member.told = True
                self._send(member, Tell())
        self._show_all()
        return []

    def _reported(self, member: _Member, report: Report) -> Sent:
        if not member.told:
            raise InvalidState("the member reports, and was not told to")
        member.told, member.report, member.reported_s = False, report, time.monotonic()
        self._show_all()
        return []

    def _show_all(self) -> None:
        """To all who look, if no report is to come. A send may end one's connection, and that calls this again."""
        if self._lookers and not any(member.told for member in self._members):
            for looker in list(self._lookers):
                self._show(looker)

    def _show(self, looker: _Member) -> None:
        if self._lookers.pop(looker, None) is None:
            return
        ledger, now = self.ledger, time.monotonic()
        held, lent = ledger.held, Counter(ledger.lent.values())
        members = [member for member in self._members if member.number]
        state = State(self.page_bytes, ledger.pages, ledger.free, lent.total(), ledger.waiting, len(members))
        self._send(looker, state)
        for each in members:
            age = 0.0 if each.report is None else now - each.reported_s
            shown = (
                each.number,
                each.name,
                each.pid,
                held[each.number],
                lent[each.number],
                each.connection is not None,
            )
            self._send(looker, Shown(*shown, age, each.report))

    # -- who goes ------------------------------------------------------------------------------------------------------

    def _hung_up(self, member: _Member) -> None:
        """It wants nothing any more and gives nothing; what it has stays its own until its process has ended."""
        if member.connection is None:
            return
        self._drop_connection(member)
        if not member.number:
            self._forget(member)
            return
        self._carry(self.ledger.left(member.number))
        if not self.ledger.held.get(member.number):
            self._ended(member)

    def _ended(self, member: _Member) -> None:
        """Its process has, or it has nothing left and has closed."""
        if member not in self._members:
            return
        if member.connection is not None:
            self._drop_connection(member)
        self._forget(member)
        if member.number:
            _logger.info("member %d (%s, process %d) has ended", member.number, member.name, member.pid)
            self._carry(self.ledger.ended(member.number))

    def _drop_connection(self, member: _Member) -> None:
        assert member.connection is not None
        self._selector.unregister(member.connection)
        member.connection.close()
        member.connection = None
        member.unsent.clear()
        member.told = False  # it will say nothing more
        self._lookers.pop(member, None)
        self._show_all()

    def _forget(self, member: _Member) -> None:
        self._members.remove(member)
        self._selector.unregister(member.process)
        os.close(member.process)

    # -- sending -------------------------------------------------------------------------------------------------------

    def _carry(self, sent: Sent) -> None:
        """Send what the ledger says."""
        for number, message in sent:
            member = next((each for each in self._members if each.number == number), None)
            if member is not None:
                self._send(member, message)
        recalls = self.ledger.recalls
        for over in self._deadlines.keys() - recalls:
            del self._deadlines[over]
        for recall in sorted(recalls - self._deadlines.keys()):
            self._deadlines[recall] = time.monotonic() + RECALL_S

    def _send(self, member: _Member, message: ToMember) -> None:
        member.unsent.append(encode(message))
        self._flush(member)

    def _flush(self, member: _Member) -> None:
        connection = member.connection
        if connection is None:
            return
        try:
            while member.unsent:
                connection.send(member.unsent[0])
                member.unsent.popleft()
        except BlockingIOError:
            if len(member.unsent) > MOST_UNSENT:
                _logger.warning("member %d reads nothing: the broker closes its connection", member.number)
                self._hung_up(member)
                return
        except OSError:
            return  # its end is read next
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.unsent else 0)
        key = self._selector.get_key(connection)
        if key.events != wanted:
            self._selector.modify(connection, wanted, key.data)


def _require_version(message: Join | Look) -> None:
    if message.version != VERSION:
        raise InvalidState(
            f"the broker speaks version {VERSION}, the other side {message.version}; install one release in both"
        )
