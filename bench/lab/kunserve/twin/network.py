"""The network between instances in virtual time: a port each way at every instance, strict priorities, pieces that nobody
interrupts. Pure.

A piece takes the sender's way out and the receiver's way in for as long as it is sent. Of what waits, the highest priority
goes first, and of equal ones what was asked for first. A piece does not begin on a port that one of a higher priority waits
for: else that one could find now its one port taken and now the other. So an activation waits for at most the piece on each of
its two ports, and for activations before it. Bulk is cut into pieces of `chunk_bytes`; without coordination (KunServe before
its section 4.2) all have one priority and nothing is cut.

Copies from an instance's own host memory have a port of their own, beside both.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from remap_serve.policy.cluster.exchange import Priority

from .events import Events

__all__ = ["HOST", "Links", "Sent", "Transfer"]

HOST = ""
"""The source of copies from an instance's own host memory."""

_Port = tuple[str, str]


class Sent(NamedTuple):
    """One piece, for tests."""

    source: str
    target: str
    priority: int
    begin_s: float
    end_s: float


class Transfer:
    """Bytes on their way, piece by piece."""

    __slots__ = ("cancelled", "chunk", "done", "key", "left", "ports", "priority", "source", "target")

    def __init__(
        self,
        key: tuple[int, int],
        source: str,
        target: str,
        size: int,
        priority: Priority,
        chunk: int,
        done: Callable[[], None],
    ) -> None:
        self.key = key
        self.source, self.target = source, target
        self.ports: tuple[_Port, ...] = (("host", target),) if source == HOST else (("out", source), ("in", target))
        self.cancelled = False
        self.left, self.chunk, self.priority, self.done = size, chunk, priority, done


class Links:
    """bytes_per_s: of each port, each way; host_bytes_per_s: of an instance's own host memory. setup_s: of each piece, during
    which its ports are taken. coordinated: whether priorities count and bulk is cut.

    sent: bytes by priority. log: pieces, if a list is given.
    """

    def __init__(
        self,
        events: Events,
        bytes_per_s: float,
        host_bytes_per_s: float,
        setup_s: float,
        *,
        coordinated: bool = True,
        log: list[Sent] | None = None,
    ) -> None:
        self._events = events
        self._rate, self._host_rate, self._setup_s = bytes_per_s, host_bytes_per_s, setup_s
        self._coordinated = coordinated
        self._log = log
        self._busy: set[_Port] = set()
        # By rank, source and target: of these only the first may begin next.
        self._lines: dict[tuple[int, str, str], deque[Transfer]] = {}
        self._asked = 0
        self.sent: Counter[Priority] = Counter()

    def send(
        self, source: str, target: str, size: int, priority: Priority, done: Callable[[], None], chunk_bytes: int = 0
    ) -> Transfer:
        """Send so many bytes, in pieces of chunk_bytes (0: in one); `done` is called when the last has come."""
        self._asked += 1
        key = (int(priority) if self._coordinated else 0, self._asked)
        chunk = chunk_bytes if self._coordinated and chunk_bytes else size
        transfer = Transfer(key, source, target, size, priority, chunk, done)
        self._lines.setdefault((key[0], source, target), deque()).append(transfer)
        self._begin()
        return transfer

    def cancel(self, transfers: Iterable[Transfer]) -> None:
        """Send no more of these; nobody is called. A piece that is being sent comes to its end."""
        for one in transfers:
            one.cancelled = True
        for way, line in list(self._lines.items()):
            if any(one.cancelled for one in line):
                self._lines[way] = deque(one for one in line if not one.cancelled)
        self._begin()

    def _begin(self) -> None:
        """Send what may be sent now."""
        busy = self._busy
        wanted: dict[_Port, int] = {}  # by whom at most, of those that cannot begin
        for line in sorted((line for line in self._lines.values() if line), key=_key):
            one = line[0]
            rank = one.key[0]
            if all(port not in busy and wanted.get(port, rank) >= rank for port in one.ports):
                self._send(line.popleft())
                continue
            for port in one.ports:
                wanted.setdefault(port, rank)

    def _send(self, one: Transfer) -> None:
        size = min(one.chunk, one.left)
        seconds = self._setup_s + size / (self._host_rate if one.source == HOST else self._rate)
        self._busy.update(one.ports)
        now = self._events.now
        if self._log is not None:
            self._log.append(Sent(one.source, one.target, int(one.priority), now, now + seconds))

        def ended() -> None:
            self._busy.difference_update(one.ports)
            self.sent[one.priority] += size
            one.left -= size
            if one.cancelled:
                pass
            elif one.left > 0:
                self._lines[one.key[0], one.source, one.target].appendleft(one)
            else:
                one.done()
            self._begin()

        self._events.after(seconds, ended)


def _key(line: deque[Transfer]) -> tuple[int, int]:
    return line[0].key
