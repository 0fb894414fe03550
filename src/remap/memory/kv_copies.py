"""The copies of one tenant's KV: within its region, out to host memory, and in from there.

Copies within the region and out of it come behind all work that the tenant has enqueued, and before whatever it enqueues
next: on its compute stream, or at once if its passes compute on the calling thread. Copies in run beside the passes, on
a stream of their own, behind what the compute stream has now (pages that were gained are zeroed there). So nobody may
touch their blocks until they have arrived, and whatever takes such blocks away comes behind them: `join`.

Threads: the tenant's engine calls, or the change in progress, which has claimed the tenant (locking.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from remap.errors import Error
from remap.memory.streams import ComputeStream, Streams

__all__ = ["KVCopies"]

Ranges = Sequence[tuple[int, int, int]]
"""(to, from, bytes) each."""


class KVCopies:
    """See the module."""

    def __init__(self, streams: Streams, compute: ComputeStream) -> None:
        self._streams = streams
        self._compute = compute
        self._stream = 0  # for copies in; made on first use
        self._flying: dict[int, int] = {}  # ticket -> the event behind its copies
        self._tickets = 0

    def copy(self, ranges: Ranges) -> None:
        """Within the region, or out of it."""
        self.join()
        stream = self._compute.current()
        if not stream:
            self._streams.copy(ranges)
            return
        # If one copy fails, the targets are free blocks again, and the engine's next write there comes behind the other
        # copies.
        for target, source, nbytes in ranges:
            self._streams.backend.copy(stream, target, source, nbytes)

    def copy_in(self, ranges: Ranges) -> int:
        """Start copying in. Returns a ticket for `arrived`. On an error nothing is in flight any more."""
        streams, compute = self._streams, self._compute.current()
        try:
            if not self._stream:
                self._stream = streams.make()
            if compute:
                streams.order(self._stream, compute)
            for target, source, nbytes in ranges:
                streams.backend.copy(self._stream, target, source, nbytes)
            event = streams.record(self._stream)
        except BaseException:  # an interrupt as well: some copies may have been enqueued
            self.drop()
            raise
        self._tickets += 1
        self._flying[self._tickets] = event
        return self._tickets

    def arrived(self, ticket: int) -> bool:
        """Whether these copies have been made. Raises the backend's error if they failed: then no copy in has arrived that
        was in flight, and none is any more."""
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

    def join(self) -> None:
        """Whatever the tenant does next comes behind all copies in that are in flight. Raises as `arrived` does."""
        if not self._flying:
            return
        compute = self._compute.current()
        try:
            if compute:
                self._streams.order(compute, self._stream)
            else:
                self._streams.wait(self._streams.record(self._stream))
        except BaseException:  # an interrupt of the wait as well
            self.drop()
            raise
        self._flying.clear()

    def drop(self) -> None:
        """Give the stream back, which waits for its copies: a stream that has failed would fail for ever."""
        self._flying.clear()
        if self._stream:
            self._streams.drop(self._stream)
            self._stream = 0
