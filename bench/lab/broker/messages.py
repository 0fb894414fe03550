"""The ledger in the broker, changed by messages: `serve` is the broker, `Member` one process that asks it, `give` a donor.

A message is one packet of a SOCK_SEQPACKET socket; its pages are one run. The kernel keeps packets whole and in order.
"""

from __future__ import annotations

import selectors
import socket
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["FREE", "WANT", "Member", "Message", "Pages", "give", "receive", "send", "serve"]

FREE = 0
WANT, GRANT, RECALL, DRAINED, DONE = range(1, 6)
_PACKET = struct.Struct("<BBHIIQ")  # kind, a member's number, nothing, the first page and how many, stamp


@dataclass(frozen=True)
class Message:
    """member: whom a DRAINED is for (FREE: nobody). pages: one run; of a WANT its length counts. stamp: the ledger's when
    pages were granted."""

    kind: int
    member: int = FREE
    pages: range = range(0)
    stamp: int = 0

    def packed(self) -> bytes:
        """As one packet."""
        return _PACKET.pack(self.kind, self.member, 0, self.pages.start, len(self.pages), self.stamp)

    @classmethod
    def of(cls, packet: bytes) -> Message:
        """Raises struct.error for a packet of another length."""
        kind, member, _, first, count, stamp = _PACKET.unpack(packet)
        return cls(kind, member, range(first, first + count), stamp)


def send(sock: socket.socket, message: Message) -> None:
    sock.sendall(message.packed())


def receive(sock: socket.socket) -> Message | None:
    """None: the other side is gone."""
    packet = sock.recv(_PACKET.size)
    return Message.of(packet) if packet else None


@dataclass
class Pages:
    """Who has which page: `owners[p]` is a member's number, or FREE. `stamps[p]`: the change that gave it. `stamp`: counts
    changes."""

    owners: bytearray
    stamps: array[int]
    stamp: int = 0

    @classmethod
    def free(cls, count: int) -> Pages:
        """So many pages, of nobody."""
        return cls(bytearray(count), array("Q", bytes(8 * count)))

    def run(self, member: int, count: int) -> range:
        """The lowest run of so many pages of the member's; empty if there is none."""
        first = self.owners.find(bytes([member]) * count)
        return range(0) if first < 0 else range(first, first + count)

    def move(self, pages: range, to: int) -> int:
        """Returns the stamp that the pages have now."""
        self.stamp += 1
        where = slice(pages.start, pages.stop)
        self.owners[where] = bytes([to]) * len(pages)
        self.stamps[where] = array("Q", [self.stamp]) * len(pages)
        return self.stamp

    def all_of(self, member: int) -> Iterator[range]:
        """The member's pages, one by one."""
        return (range(page, page + 1) for page, owner in enumerate(self.owners) if owner == member)


def serve(members: dict[int, socket.socket], pages: Pages) -> None:
    """Answer until killed. A member that goes away leaves its pages to nobody."""
    ready = selectors.DefaultSelector()
    for number, sock in members.items():
        ready.register(sock, selectors.EVENT_READ, number)
    asked: dict[int, int] = {}  # donor -> who asked
    while True:
        for key, _ in ready.select():
            number = int(key.data)
            sock = members[number]
            message = receive(sock)
            if message is None:
                ready.unregister(sock)
                for page in pages.all_of(number):
                    pages.move(page, FREE)
            elif message.kind == WANT:
                count = len(message.pages)
                if free := pages.run(FREE, count):
                    send(sock, Message(GRANT, number, free, pages.move(free, number)))
                    continue
                donor = next(each for each in members if each != number)
                asked[donor] = number
                send(members[donor], Message(RECALL, donor, pages.run(donor, count)))
            elif message.kind == DRAINED:
                given = message.pages
                if pages.owners[given.start : given.stop].count(number) != len(given):
                    continue  # not its own: the product says so and ends the connection
                waiting = asked.pop(number, None)
                to = message.member if waiting is None else waiting
                stamp = pages.move(given, to)
                if waiting is None:
                    send(sock, Message(DONE))
                else:
                    send(members[waiting], Message(GRANT, waiting, given, stamp))


class Member:
    """The side that asks. Blocks for each answer."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def want(self, count: int) -> range:
        """So many pages more. Empty: the broker is gone."""
        send(self._sock, Message(WANT, pages=range(count)))
        answer = receive(self._sock)
        return range(0) if answer is None else answer.pages

    def hand(self, pages: range, to: int = FREE) -> None:
        """These pages go to somebody else; returns when the broker has noted it."""
        send(self._sock, Message(DRAINED, to, pages))
        receive(self._sock)


def give(sock: socket.socket) -> None:
    """A donor that computes nothing: each page that is asked back is drained at once. Until the broker is gone."""
    while (message := receive(sock)) is not None:
        if message.kind == RECALL:
            send(sock, Message(DRAINED, pages=message.pages))
