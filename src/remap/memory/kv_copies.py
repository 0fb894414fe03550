"""The copies of one tenant's KV: within its region, out to host memory, and in from there.

Copies within the region come behind all work that the tenant has enqueued, and before whatever it enqueues next: on its
compute stream, or at once if its passes compute on the calling thread. Copies out and in run beside the passes, on a
stream for each direction, behind what the compute stream has now (it has written what goes out, and zeroes pages that
were gained). So nobody may read or write the blocks of a copy in until it has arrived, nobody may write those of a copy
out while they are live, and whatever takes such blocks away comes behind all copies: `join`. A copy in comes behind all
copies out: it may read what they write.

Threads: the tenant's engine calls, or the change in progress, which has claimed the tenant (locking.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from remap.errors import Error
from remap.memory.streams import ComputeStream, Streams

__all__ = ["KVCopies"]

Ranges = Sequence[tuple[int, int, int]]
"""(to, from, bytes) each."""

_OUT, _IN = "out", "in"


class KVCopies:
    """See the module."""

    def __init__(self, streams: Streams, compute: ComputeStream) -> None:
        self._streams = streams
        self._compute = compute
        self._made: dict[str, int] = {}  # direction -> its stream; made on first use
        self._out = 0  # the event behind the last copy out, if it may be in flight
        self._flying: dict[
            int, int
        ] = {}  # ticket of a copy in -> the event behind it, in the order in which they began
        self._tickets = 0

    def copy(self, ranges: Ranges) -> None:
        """Within the region."""
        self.join()
        stream = self._compute.current()
        if not stream:
            self._streams.copy(ranges)
            return
        # If one copy fails, the targets are free blocks again, and the engine's next write there comes behind the other
        # copies.
        for target, source, nbytes in ranges:
            self._streams.backend.copy(stream, target, source, nbytes)

    def copy_out(self, ranges: Ranges) -> None:
        """Start copying out. On an error nothing is in flight any more."""
        self._out = self._start(_OUT, ranges, 0)

    def copy_in(self, ranges: Ranges) -> int:
        """Start copying in. Returns a ticket for `arrived`. On an error nothing is in flight any more."""
        event = self._start(_IN, ranges, self._made.get(_OUT, 0) if self._out else 0)
        self._tickets += 1
        self._flying[self._tickets] = event
        return self._tickets

    def _start(self, direction: str, ranges: Ranges, behind: int) -> int:
        """The event behind these copies, which come behind the compute stream and this other one."""
        streams = self._streams
        try:
            if direction not in self._made:
                self._made[direction] = streams.make()
            stream = self._made[direction]
            for earlier in (self._compute.current(), behind):
                if earlier:
                    streams.order(stream, earlier)
            for target, source, nbytes in ranges:
                streams.backend.copy(stream, target, source, nbytes)
            return streams.record(stream)
        except BaseException:  # an interrupt as well: some copies may have been enqueued
            self.drop()
            raise

    def arrived(self, ticket: int) -> bool:
        """Whether these copies in have been made. Raises the backend's error if copies have failed: then no copy in has
        arrived that was in flight, and none is any more."""
        event = self._flying.get(ticket)
        if event is None:
            return True
        try:
            done = bool(self._streams.backend.query(event))
        except Error:
            self.drop()
            raise
        if done:
            self._flying.pop(ticket, None)
        return done

    def join(self, ticket: int | None = None) -> None:
        """Whatever the tenant does next comes behind this copy in and those that began before it, or behind all copies.
        Raises as `arrived` does."""
        chosen = [each for each in self._flying if ticket is None or each <= ticket]
        events = [self._flying[chosen[-1]]] if chosen else []
        if ticket is None and self._out:
            events.append(self._out)
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
        except BaseException:  # an interrupt of the wait as well
            self.drop()
            raise
        for each in chosen:
            self._flying.pop(each, None)
        if ticket is None:
            self._out = 0

    def drop(self) -> None:
        """Give the streams back, which waits for their copies: a stream that has failed would fail for ever."""
        self._flying.clear()
        self._out = 0
        while self._made:
            self._streams.drop(self._made.popitem()[1])
