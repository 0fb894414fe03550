# SPDX-License-Identifier: Apache-2.0
"""The broker: makes the pages, admits members, and carries the ledger's decisions to them.

One thread, which never waits for a member: packets that a socket does not take are kept for it, and a member that takes none for
long is let go. A member's pages come back when its *process* has ended (a pidfd says so), never because its socket has: the
process may still be reading them. Until then they are its own.

Members map the pages (`remap.memory.shared_pages`); the broker does not.

A broker that begins where another was killed makes no pages while a process may have those of the other (`remap.broker.locks`):
the first old member that joins brings them. The old members claim what they have, and pages that no member has claimed are free
when each of them has joined or ended, for which the broker looks every `LEFT_S`. A member joins again in the same way when its
connection has broken.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
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
from remap.broker.listening import Listener, peer, refuse
from remap.broker.locks import MOST_NUMBER, lock_broker, remove
from remap.broker.messages import (
    MOST_BYTES,
    MOST_NAME,
    MOST_PARTS,
    VERSION,
    Bring,
    Claim,
    Disown,
    Done,
    Events,
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
from remap.memory.device import parse
from remap.memory.shared_pages import MOST_FILES, JoinedPages, SharedPages, make_pages

__all__ = ["Broker"]

_logger = logging.getLogger("remap.broker")

RECALL_S = 0.25
"""How long a member is waited for that was asked to give. Pages that it gives later are free then."""
LOOK_S = 0.25
"""How long an observer waits for the members' reports. Of a member that says nothing for that long, the last one is shown."""
SIGNAL_S = 1.0
"""So late at most `Broker.wait` heeds a signal."""
FRESH_S = 0.1
"""A report that is not older is shown again: however many look, a member makes no more of them."""
LEFT_S = 0.25
"""How often a broker looks which members of the one before it are left."""
SILENT_S = 10.0
"""How long a connection may neither join nor look: it takes two of the broker's descriptors."""
BRING_S = 5.0
"""How long it waits for the pages of one of them, before it takes another's."""
FORGET_S = 2.0
"""A member that waits for pages for good asks again many times a second: one that has not for so long does not wait any more."""
MOST_UNSENT = 256
"""Packets that are kept for a member which reads none."""


@dataclass(eq=False)
class _Member:
    """connection: None once it has closed, while its process still lives. number: of the ledger; 0: it has not joined. joining:
    its Join, with the claims that have come, until it has. told: it was told to report, and has not yet. report: the last one, of
    the moment `reported_s`; events: in front of it. traces: of an observer, whether it wants these."""

    connection: socket.socket | None
    process: int  # a pidfd
    pid: int
    number: int = 0
    name: str = ""
    locked: int = 0
    joining: Join | None = None
    claims: list[Claim] = field(default_factory=list)
    unsent: deque[bytes] = field(default_factory=deque)
    told: bool = False
    report: Report | None = None
    events: list[Events] = field(default_factory=list)
    traces: bool = False
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
        self.page_bytes, self.device, self.arena = page_bytes, device, secrets.token_hex(16)
        self._members: list[_Member] = []
        self._next = 1
        self._deadlines: dict[int, float] = {}  # recall -> when it is late, the first one first
        self._unmet: dict[
            int, float
        ] = {}  # member with a place in the ledger -> when it is forgotten, unless it asks again
        self._silent: dict[
            _Member, float
        ] = {}  # who has neither joined nor looked -> until when it may, the first one first
        self._lookers: dict[_Member, float] = {}  # an observer that waits -> until when, the first one first
        self._pages: SharedPages | None = None
        self._bringing: tuple[_Member, JoinedPages, float] | None = None  # whose pages are on their way, until when
        with ExitStack() as undo:
            self._lock = lock_broker(self.path)
            undo.callback(lambda: remove(self.path, self._lock))
            self._awaited = self._lock.members()  # of the broker before this one, which may have pages
            self.ledger = Ledger(pages, unknown=bool(self._awaited))
            if not self._awaited:
                self._pages = make_pages(device, pages, page_bytes)
                undo.callback(self._pages.close)
            self._selector = selectors.DefaultSelector()
            self._listener = Listener(self.path, self._selector, self._admit)
            undo.pop_all()
        self._look_again = time.monotonic()
        self._problem = ""  # why there are no pages, though no member is awaited
        self._waker, self._woken = socket.socketpair()
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
        for pages in (self._pages, self._bringing and self._bringing[1]):
            if pages is not None:
                pages.close()
        self.path.unlink(missing_ok=True)
        remove(self.path, self._lock)

    def __enter__(self) -> Broker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self) -> None:
        """Until it is closed by another thread, or a signal's handler raises. Raises InvalidState if it has ended by itself."""
        # Not for ever: a signal that comes just before this thread sleeps does not wake it, and its handler runs only here.
        while not self._ended_serving.wait(SIGNAL_S):
            pass
        if not self._closing:
            raise InvalidState(
                f"the broker at {self.path} has ended by an error, which it has printed; its members serve on with what they "
                "have, and join the next one"
            )

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._ended_serving.set()

    def _serve(self) -> None:
        while not self._closing:
            firsts = [next(iter(each.values())) for each in (self._deadlines, self._lookers, self._silent) if each]
            firsts += [self._look_again] if self._looks else []
            firsts += self._unmet.values()
            firsts += [self._listener.again] if self._listener.again is not None else []
            left = max(0.0, min(firsts) - time.monotonic()) if firsts else None
            for key, mask in self._selector.select(left):
                if key.data is not None:
                    key.data(mask)
            now = time.monotonic()
            self._listener.resume(now)
            for recall in [recall for recall, late in self._deadlines.items() if now >= late]:
                self._carry(self.ledger.late(recall))
            for looker in [looker for looker, late in self._lookers.items() if now >= late]:
                self._show(looker)
            for member in [member for member, late in self._silent.items() if now >= late]:
                self._send(member, Refused(f"it neither joined nor looked within {SILENT_S} s; connect again, and do"))
                self._hung_up(member)
            if self._looks and now >= self._look_again:
                self._look_who_is_left(now)
            for number in [number for number, late in self._unmet.items() if now >= late]:
                self._unmet[number] = now + FORGET_S  # where its want is open still
                self._carry(self.ledger.forgotten(number))

    def _admit(self, connection: socket.socket) -> None:
        """Raises OSError if there is no descriptor for it."""
        pid, uid = peer(connection)
        if uid != os.getuid():
            refuse(connection, f"the broker serves user {os.getuid()}, not {uid}")
            return
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            refuse(connection, f"process {pid} cannot be watched: {error}")
            return
        connection.setblocking(False)
        member = _Member(connection, process, pid)
        with ExitStack() as undo:  # the kernel may watch no more for this user
            undo.callback(os.close, process)
            self._selector.register(process, selectors.EVENT_READ, lambda mask: self._ended(member))
            undo.callback(self._selector.unregister, process)
            self._selector.register(connection, selectors.EVENT_READ, lambda mask: self._ready(member, mask))
            undo.pop_all()
        self._members.append(member)
        self._silent[member] = time.monotonic() + SILENT_S

    def _ready(self, member: _Member, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(member)
        while member.connection is not None:
            files: list[int] = []
            try:
                packet, files, _, _ = socket.recv_fds(
                    member.connection, MOST_BYTES, MOST_FILES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it has closed without reading all: what it sent before comes behind this, then the end
            except OSError:
                packet = b""
            try:
                if not packet:
                    self._hung_up(member)
                    return
                self._carry(self._do(member, decode_to_broker(packet), files))
            except Error as error:
                _logger.warning("member %d (%s, process %d): %s", member.number, member.name, member.pid, error)
                self._send(member, Refused(str(error)))
                self._hung_up(member)
                return
            finally:
                for file in files:
                    os.close(file)

    def _do(self, member: _Member, message: ToBroker, files: list[int]) -> Sent:
        """files: came with it; those that are left here are closed."""
        ledger = self.ledger
        if isinstance(message, Join):
            return self._join(member, message)
        if isinstance(message, Claim):
            return self._claimed(member, message)
        if isinstance(message, Pages):
            return self._brought(member, message, files)
        if isinstance(message, Look):
            return self._look(member, message)
        if not member.number:
            raise InvalidState("the first message must be Join")
        if isinstance(message, Fetch):
            return self._fetch(member, message)
        if isinstance(message, Report):
            return self._reported(member, message)
        if isinstance(message, Events):
            if not member.told or len(member.events) >= MOST_PARTS:
                raise InvalidState("the member sends events, and was not told to, or sends too many")
            member.events.append(message)
            return []
        if isinstance(message, Want):
            if message.keeps and member.number in self._unmet:
                self._unmet[member.number] = time.monotonic() + FORGET_S
            return ledger.wanted(member.number, message.serial, message.pages, keeps=message.keeps, ahead=message.ahead)
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
        if member.number or member.joining is not None:
            raise InvalidState("the member has joined already")
        if member in self._lookers:
            raise InvalidState("who looks cannot join meanwhile")
        if not 0 < message.number <= MOST_NUMBER or not self._lock.sees(message.number):
            raise InvalidState(
                f"the member has not locked its number in {self.path}.lock; let it see that file: share the folder, not the "
                "socket alone"
            )
        if message.claims > 2 * self.ledger.pages or (message.claims and not message.arena):
            raise InvalidState(f"{message.claims} claims are to follow, of {self.ledger.pages} pages")
        member.joining = message
        return self._go_on_joining(member)

    def _claimed(self, member: _Member, claim: Claim) -> Sent:
        if member.joining is None or len(member.claims) >= member.joining.claims:
            raise InvalidState("a claim comes behind a Join that says so")
        member.claims.append(claim)
        if sum(count for each in member.claims for _, count in each.runs) > 2 * self.ledger.pages:
            raise InvalidState("the member claims more pages than there are")
        return self._go_on_joining(member)

    def _go_on_joining(self, member: _Member) -> Sent:
        """Once all its claims have come."""
        join = member.joining
        assert join is not None
        if len(member.claims) < join.claims:
            return []
        if self._pages is None:
            return self._ask_for_pages(member, join)
        if join.arena and join.arena != self.arena:
            raise InvalidState(
                f"the broker has arena {self.arena}, and the member pages of {join.arena}; end it: no other member gets those"
            )
        before = self._before(member, join.number)
        number = self._next if before is None else before.number
        lends = [run for each in member.claims if each.lent for run in each.runs]
        claims, borrows = (
            [run for each in member.claims if not each.lent and each.borrowed is borrowed for run in each.runs]
            for borrowed in (False, True)
        )
        sent = self.ledger.joined(number, claims, lends, borrows)
        if before is None:
            self._next += 1
        else:
            self._forget(before)
        self._awaited.discard(join.number)
        self._silent.pop(member, None)
        member.number, member.name, member.locked = number, join.name[:MOST_NAME], join.number
        member.joining = None
        member.claims.clear()
        pages = self._pages
        files = [] if pages.file is None else [pages.file]
        try:
            self._send_with(member, Welcome(self.page_bytes, self.ledger.pages, pages.uuid, self.arena), files)
        finally:  # if it has gone already, others still have what it did not claim
            self._carry(sent)
        _logger.info("member %d (%s, process %d) has joined", member.number, member.name, member.pid)
        return []

    def _before(self, member: _Member, number: int) -> _Member | None:
        """The one that joins again, as it was; None if it is new. Raises InvalidState while that one is connected, or if it is
        another process, which may touch its pages."""

        def find() -> _Member | None:
            return next((each for each in self._members if each.locked == number), None)

        before = find()
        if before is not None and before.connection is not None:
            self._ready(
                before, selectors.EVENT_READ
            )  # to the end, if it has come to that: a member ends it before it joins again
            before = find()
        if before is not None and (before.connection is not None or before.pid != member.pid):
            raise InvalidState(
                f"number {number} is that of member {before.number} ({before.name}, process {before.pid}), which "
                + ("is connected" if before.connection is not None else f"lives, and this is process {member.pid}")
                + "; nothing changed; lock another number, and join with that"
            )
        return before

    # -- the pages of a broker that was here before ------------------------------------------------------------------

    def _ask_for_pages(self, member: _Member, join: Join) -> Sent:
        if not join.arena:
            raise InvalidState(
                self._problem
                or f"{len(self._awaited)} processes are awaited, which may have the pages of the broker that was here before; "
                "join again when one has joined, or all have ended"
            )
        if self._bringing is not None:
            raise InvalidState("another process hands over the pages; join again when it has")
        if (join.pages, join.page_bytes) != (self.ledger.pages, self.page_bytes):
            raise InvalidState(
                f"the broker is to have {self.ledger.pages} pages of {self.page_bytes} bytes, and the member has {join.pages} of "
                f"{join.page_bytes}; start the broker with the capacity and the page size of the one before"
            )
        pages = JoinedPages()
        self._bringing = member, pages, time.monotonic() + BRING_S
        if join.uuid:
            pages.open_device(join.uuid, join.page_bytes)
        if pages.device != str(parse(self.device)):
            raise InvalidState(
                f"the broker is to have pages of {self.device}, and the member has some of {pages.device}; start the broker with "
                "the device of the one before"
            )
        self._send(member, Bring(0))
        return []

    def _brought(self, member: _Member, message: Pages, files: list[int]) -> Sent:
        if self._bringing is None or self._bringing[0] is not member:
            raise InvalidState("the member brings pages, and was not asked for any")
        pages, join = self._bringing[1], member.joining
        assert join is not None
        if (message.first, message.count) != (pages.count, len(files)) or not files:
            raise InvalidState(f"the member brings {len(files)} pages from {message.first} on, expected {pages.count}")
        while files and (pages.empty or join.uuid):
            pages.take(files.pop(0))
        if not join.uuid:
            pages.require_file(self.ledger.pages * self.page_bytes)
        elif pages.count < self.ledger.pages:
            self._send(member, Bring(pages.count))
            return []
        self._pages, self._bringing, self.arena = pages, None, join.arena
        return self._go_on_joining(member)

    def _brings_no_more(self, member: _Member) -> None:
        if self._bringing is not None and self._bringing[0] is member:
            self._bringing[1].close()
            self._bringing = None

    @property
    def _looks(self) -> bool:
        """Whether members of the broker before this one are awaited, or what they had is not settled; or some have left and their
        processes live."""
        gone = any(member.number and member.connection is None for member in self._members)
        return gone or self._pages is None or self.ledger.unsettled

    def _look_who_is_left(self, now: float) -> None:
        """Who has let go of its number has let go of all pages, whatever was granted to it behind that. Of the members of the
        broker before this one: pages that none has claimed are free when all have joined or ended."""
        self._look_again = now + LEFT_S
        for member in list(self._members):
            if member.number and member.connection is None and not self._lock.sees(member.locked):
                self._ended(member)
        if self._bringing is not None and now >= self._bringing[2]:
            self._send(self._bringing[0], Refused(f"the pages did not come within {BRING_S} s"))
            self._hung_up(self._bringing[0])
        self._awaited = {number for number in self._awaited if self._lock.sees(number)}
        if self._awaited or self._bringing is not None:
            return
        if self._pages is None:
            try:
                self._pages = make_pages(self.device, self.ledger.pages, self.page_bytes)
            except Error as error:  # a member that joins hears of it; the machine may have room later
                if not self._problem:
                    _logger.warning("the broker at %s has no pages yet: %s", self.path, error)
                self._problem = str(error)
                return
        if self.ledger.unsettled:
            self._carry(self.ledger.settled())

    def _fetch(self, member: _Member, message: Fetch) -> Sent:
        assert self._pages is not None  # it has joined
        files = [] if self._pages.file is not None else self._pages.export(message.first)
        if not files:
            raise InvalidState("these pages are one file, which members have from the beginning")
        try:
            self._send_with(member, Pages(message.first, len(files)), files)
        finally:
            for file in files:
                os.close(file)
        return []

    def _send_with(self, member: _Member, message: ToMember, files: Sequence[int]) -> None:
        """At once: a member that waits for it has read all else. Raises InvalidState otherwise."""
        assert member.connection is not None
        try:
            if member.unsent:
                raise BlockingIOError("it has not read what came before")
            socket.send_fds(member.connection, [encode(message)], files)
        except OSError as error:
            raise InvalidState(f"its {type(message).__name__} could not be sent: {error}") from error

    # -- who looks -----------------------------------------------------------------------------------------------------

    def _look(self, looker: _Member, message: Look) -> Sent:
        """Members that have not reported just now are told to; the broker does not wait for them here."""
        _require_version(message)
        if looker.number:
            raise InvalidState("a member does not look; open another connection for that")
        if looker in self._lookers:
            raise InvalidState("it looks again before it is answered")
        now = time.monotonic()
        self._lookers[looker], looker.traces = now + LOOK_S, message.events
        self._silent.pop(looker, None)
        for member in list(self._members):
            here = member.number and member.connection is not None
            if here and not member.told and now - member.reported_s > FRESH_S:
                member.told = True
                member.events.clear()
                self._send(member, Tell(message.events))
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
        state = State(
            self.page_bytes, ledger.pages, ledger.free, lent.total(), ledger.waiting, len(members), ledger.unknown
        )
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
            events = each.events if looker.traces else []
            self._send(looker, Shown(*shown, age, each.report, len(events)))
            for part in list(events):
                self._send(looker, part)

    # -- who goes ------------------------------------------------------------------------------------------------------

    def _hung_up(self, member: _Member) -> None:
        """It wants nothing any more and gives nothing, unless it joins again; what it has stays its own until its process has
        ended."""
        if member.connection is None:
            return
        self._drop_connection(member)
        self._brings_no_more(member)
        if not member.number:
            self._forget(member)
            return
        self._carry(self.ledger.left(member.number))
        if not self.ledger.held.get(member.number) and member.number not in self.ledger.lent.values():
            self._ended(member)

    def _ended(self, member: _Member) -> None:
        """Its process has, or it has nothing left and has closed."""
        if member not in self._members:
            return
        if member.connection is not None:
            self._drop_connection(member)
        self._brings_no_more(member)
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
        self._silent.pop(member, None)
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
        now = time.monotonic()
        self._unmet = {number: self._unmet.get(number, now + FORGET_S) for number in self.ledger.unmet}
        recalls = self.ledger.recalls
        for over in self._deadlines.keys() - recalls:
            del self._deadlines[over]
        for recall in sorted(recalls - self._deadlines.keys()):
            self._deadlines[recall] = now + RECALL_S

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
