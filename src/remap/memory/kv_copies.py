# SPDX-License-Identifier: Apache-2.0
"""The copies of one tenant's KV: within its region, out to host memory, and in from there.

Copies within the region come behind all work that the tenant has enqueued, and before whatever it enqueues next: on its
compute stream, or at once if its passes compute on the calling thread. Copies out and in run beside the passes, on a
stream for each direction, behind what the compute stream has now (it has written what goes out, and zeroes pages that
were gained). So no pass may read or write the blocks of a copy in until it has arrived, no pass may write those of a copy
out while they are live, and whatever takes such blocks away comes behind their copies: `join`. A copy in comes behind the
copies out that write what it reads.

A copy that fails, or whose enqueuing is interrupted, is written down: `arrived` and `join` raise for its ticket from then on,
`join` of all until its blocks are given back or copied in again, and `kept` is False for the host blocks that it should have
filled. Its stream is replaced, since a stream that has failed fails for ever.

Threads: the tenant's engine calls, or the change in progress, which has claimed the tenant (locking.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from remap.config import invalid
from remap.errors import Error, InvalidState
from remap.memory.streams import ComputeStream, Streams, gone, make_into

__all__ = ["KVCopies"]

Ranges = Sequence[tuple[int, int, int]]
"""(to, from, bytes) each."""

_OUT, _IN = "out", "in"


class KVCopies:
    """See the module."""

    def __init__(self, streams: Streams, compute: ComputeStream, prefetched: Callable[[], int] | None = None) -> None:
        """prefetched: the stream on which passes copy streamed blocks in, if the tenant has any."""
        self._streams = streams
        self._compute = compute
        self._prefetched = prefetched
        self._made: dict[str, int] = {}  # direction -> its stream; made on first use
        self._old: list[int] = []  # streams that the backend has not taken back yet
        # Its own: an event that another tenant records anew could not tell whether the copies here have failed.
        self._events: list[int] = []
        self._out = 0  # the event behind the last copy out, unless the compute stream comes behind it already
        # An event behind copies out -> their host blocks and the region's, until it was seen complete.
        self._leaving: dict[int, tuple[tuple[int, ...], frozenset[int]]] = {}
        self._lost: set[int] = set()  # host blocks that a failed copy out should have filled
        # Tickets of copies in: the event behind each that is in flight, and its blocks, in the order in which they began; those
        # that failed. Blocks that still lack what such a copy should have brought, and its ticket.
        self._flying: dict[int, tuple[int, frozenset[int]]] = {}
        self._failed: dict[int, Error] = {}
        self._unfilled: dict[int, int] = {}
        self._tickets = 0

    def copy(self, ranges: Ranges, moves: Iterable[tuple[int, int]]) -> None:
        """Within the region: what lies in the first block of each pair goes to the second."""
        self._join(self._tickets, self._out)
        if self._unfilled:  # the old ones too: the change may be undone, and who is given one later forgets it
            self._unfilled.update({new: self._unfilled[old] for old, new in moves if old in self._unfilled})
        stream = self._compute.current()
        if not stream:
            self._streams.copy(ranges)
            return
        # If one copy fails, the targets are free blocks again, and the engine's next write there comes behind the other
        # copies.
        self._streams.backend.copy_batch(stream, ranges)

    def copy_out(self, ranges: Ranges, host_blocks: Sequence[int], blocks: Iterable[int]) -> None:
        """Start copying these blocks out, into these host blocks. On an error nothing is in flight any more."""
        for event in tuple(self._leaving):
            if self._done(event):
                self._leaving.pop(event, None)
                self._out = 0 if self._out == event else self._out
        self._lost.difference_update(host_blocks)
        # The former contents of these host blocks may still be on their way in, for a pass that was abandoned.
        with self._noting():
            self._out = self._start(_OUT, ranges, behind=self._prefetched() if self._prefetched is not None else 0)
            self._leaving[self._out] = tuple(host_blocks), frozenset(blocks)

    def copy_in(self, ranges: Ranges, host_blocks: Sequence[int], blocks: Iterable[int]) -> int:
        """Start copying these host blocks into these blocks. Returns a ticket for `arrived`. On an error nothing is in flight any
        more."""
        with self._noting():
            event = self._start(_IN, ranges, filled=self.filled(host_blocks))
            self._tickets += 1
            self._flying[self._tickets] = event, frozenset(blocks)
            self.forget(blocks)
            return self._tickets

    def kept(self, host_blocks: Iterable[int]) -> bool:
        """Whether no copy out that should have filled one of them is known to have failed."""
        return not self._lost or self._lost.isdisjoint(host_blocks)  # every step asks

    def filled(self, host_blocks: Iterable[int]) -> int:
        """An event behind the copies out that fill these host blocks; 0 if they have been made."""
        if not self._leaving:
            return 0
        hosts = frozenset(host_blocks)
        last = next((each for each in reversed(self._leaving) if not hosts.isdisjoint(self._leaving[each][0])), 0)
        return 0 if not last or self._done(last) else last

    @property
    def outgoing(self) -> bool:
        """Whether copies out are under way."""
        return not all(map(self._done, tuple(self._leaving)))

    def arrived(self, ticket: int) -> bool:
        """Whether these copies in have been made. Raises the error of copies that failed with them: then no copy in has
        arrived that was in flight, and none is any more. Raises InvalidArgument for a ticket that never was."""
        self._require(ticket)
        if ticket not in self._flying:
            return True
        try:
            done = bool(self._streams.backend.query(self._flying[ticket][0]))
        except Error as error:
            self._fail(error)
            raise
        if done:
            self._flying.pop(ticket, None)
        return done

    def join(self, ticket: int | None = None) -> None:
        """Whatever the tenant does next comes behind this copy in and those that began before it, or behind all copies.
        Raises as `arrived` does; for all, while blocks lack what a copy in should have brought."""
        for each in self._unfilled.values() if ticket is None else (ticket,):
            self._require(each)
        self._join(self._tickets if ticket is None else ticket, self._out if ticket is None else 0)

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody waits any more for what a copy in that failed should have brought into these blocks."""
        for block in blocks if self._unfilled else ():
            self._unfilled.pop(block, None)

    def _require(self, ticket: int) -> None:
        if not 0 < ticket <= self._tickets:
            raise invalid("ticket", ticket, "what `copy_in` returned")
        if ticket in self._failed:
            raise self._failed[ticket]

    def release(self, blocks: Iterable[int]) -> None:
        """Whatever the tenant does next comes behind the copies of these blocks. Raises as `arrived` does."""
        if not self._flying and not self._leaving:
            return
        ids = frozenset(block for block in blocks if isinstance(block, int))  # the pool refuses all others
        last = next((each for each in reversed(self._flying) if not ids.isdisjoint(self._flying[each][1])), 0)
        out = next((each for each in reversed(self._leaving) if not ids.isdisjoint(self._leaving[each][1])), 0)
        self._join(last, out)

    def _join(self, last: int, out: int) -> None:
        """Behind the copies in up to this ticket and the copies out up to this event; 0: behind none."""
        chosen = [each for each in self._flying if each <= last]
        events = [self._flying[chosen[-1]][0]] if chosen else []
        if out:
            events.append(out)
        if not events:
            return
        compute = self._compute.current()
        try:
            for event in events:
                if compute:
                    self._streams.backend.query(event)  # raises if it has failed, which would spread
                    self._streams.backend.stream_wait(compute, event)
                else:
                    self._streams.wait(event)
        except BaseException as error:  # an interrupt of the wait as well
            self._fail(error)
            raise
        for each in chosen:
            self._flying.pop(each, None)
        if out == self._out:
            self._out = 0

    def close(self) -> None:
        """The tenant goes away: `_give_back`. Keeping this object keeps no prefetcher alive."""
        self._give_back()
        self._prefetched = None

    def _give_back(self) -> None:
        """Give the streams back, which waits for their copies. Raises the backend's error; it can be called again."""
        self._old += self._made.values()
        self._made.clear()
        while self._old:
            gone(self._streams.backend.destroy_stream, self._old[-1])
            self._old.pop()
        self._settle()
        while self._events:
            gone(self._streams.backend.destroy_event, self._events[-1])
            self._events.pop()
        self._flying.clear()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Copies are started in it, and written down: the code that frees their blocks must find them. On any exception, an
        interrupt included, some may be under way that are not, so nothing is in flight any more."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _start(self, direction: str, ranges: Ranges, *, behind: int = 0, filled: int = 0) -> int:
        """The event behind these copies, which come behind the compute stream, this other one and this event."""
        streams = self._streams
        if direction not in self._made:
            # One call, without a line of ours in it: an interrupt cannot come between making a stream and keeping it.
            self._made.update(zip((direction,), iter(streams.backend.create_stream, None)))
        stream = self._made[direction]
        for earlier in (self._compute.current(), behind):
            if earlier:
                streams.order(stream, earlier)
        if filled:
            streams.backend.query(filled)  # raises if it has failed, which would spread
            streams.backend.stream_wait(stream, filled)
        streams.backend.copy_batch(stream, ranges)
        return self._record(stream)

    def _record(self, stream: int) -> int:
        backend, busy = self._streams.backend, {*self._leaving, *(event for event, _ in self._flying.values())}
        event = next((each for each in self._events if each not in busy and self._done(each)), 0)
        if event == 0:
            event = make_into(self._events, partial(backend.create_event, timed=False))
        backend.record(event, stream)
        return int(event)

    def _done(self, event: int) -> bool:
        try:
            return bool(self._streams.backend.query(event))
        except Error:
            return False

    def _fail(self, error: BaseException) -> None:
        """Write down which copies cannot be relied on, then replace the streams."""
        known = error if isinstance(error, Error) else InvalidState("copies in were interrupted; make them again")
        for ticket, (_, blocks) in self._flying.items():
            self._failed[ticket] = known
            self._unfilled.update(dict.fromkeys(blocks, ticket))
        self._flying.clear()
        self._settle()
        try:
            self._give_back()
        except Error:
            return  # it is tried again, by `close` at the latest

    def _settle(self) -> None:
        """No caller asks any more for the copies out that are under way: bytes not written yet count as lost."""
        for event, (host_blocks, _) in self._leaving.items():
            if not self._done(event):
                self._lost.update(host_blocks)
        self._leaving.clear()
        self._out = 0
