# SPDX-License-Identifier: Apache-2.0
"""A look at a broker without joining it: how much memory there is, which members have it, and how each says that it is."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from remap.broker.messages import (
    MOST_BYTES,
    VERSION,
    Events,
    Look,
    Refused,
    Shown,
    ShownEvent,
    State,
    ToMember,
    decode_to_member,
    encode,
)
from remap.errors import InvalidArgument, InvalidState

__all__ = ["Observer", "Seen"]

ANSWER_S = 5.0


@dataclass(frozen=True)
class Seen:
    """state: of the broker. members: all that have pages or are connected, in the order in which they joined. events: of each of
    them, in that order, the last ones, if they were asked for."""

    state: State
    members: tuple[Shown, ...]
    events: tuple[tuple[ShownEvent, ...], ...] = ()


class Observer:
    """A connection to the broker at `path`, until `close`. Raises InvalidArgument (field path) if none is there."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.settimeout(ANSWER_S)
            self._connection.connect(path)
        except OSError as error:
            self._connection.close()
            raise InvalidArgument(
                f"socket: no broker answers at {path}: {error}; give the socket of a running `remap serve`", path=path
            ) from error

    def look(self, *, events: bool = False) -> Seen:
        """How all are now; events: and what they have done lately. Raises InvalidState (field why) if the broker refuses or has
        gone."""
        try:
            with suppress(BrokenPipeError):  # refused already: why is still to be read
                self._connection.send(encode(Look(VERSION, events)))
            state = self._hear()
            if not isinstance(state, State):
                raise InvalidState(f"what answers at {self.path} is no broker of this release", why="no state")
            found = [self._shown() for _ in range(state.members)]
            return Seen(state, tuple(shown for shown, _ in found), tuple(events for _, events in found))
        except OSError as error:
            raise InvalidState(f"the broker at {self.path} does not answer: {error}", why=str(error)) from error

    def _shown(self) -> tuple[Shown, tuple[ShownEvent, ...]]:
        message, events = self._hear(), list[ShownEvent]()
        if not isinstance(message, Shown):
            raise InvalidState(f"what answers at {self.path} is no broker of this release", why="no member")
        for _ in range(message.events):
            part = self._hear()
            if not isinstance(part, Events):
                raise InvalidState(f"what answers at {self.path} is no broker of this release", why="no events")
            events += part.events
        return message, tuple(events)

    def _hear(self) -> ToMember:
        try:
            packet = self._connection.recv(MOST_BYTES)
        except ConnectionResetError:  # the other side closed it before it read: why it did so comes behind this
            packet = self._connection.recv(MOST_BYTES)
        if not packet:
            raise InvalidState(f"the broker at {self.path} has gone", why="its connection has ended")
        message = decode_to_member(packet)
        if isinstance(message, Refused):
            raise InvalidState(f"the broker at {self.path} refuses this process: {message.why}", why=message.why)
        return message

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
