# SPDX-License-Identifier: Apache-2.0
"""The order of work on the device: a session's streams and events, and the stream on which a tenant's passes compute.

All work on a tenant's memory is on its compute stream, on the prefetcher's copy stream, or the host has waited for it;
events order the first two. A tenant whose passes compute on the calling thread (a host device) has no compute stream:
the host waits wherever a stream would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from remap.errors import Error, InvalidArgument
from remap.memory.device import Device
from remap.memory.native_stream import native_stream

if TYPE_CHECKING:
    from remap import _core

__all__ = ["ComputeStream", "Streams", "gone", "make_into"]

_FOREVER_S = 3600.0


def gone(give_back: Callable[..., None], *handle: int) -> None:
    """Give something back to the backend. The backend may have it already, if an interrupt came before that was noted;
    it then raises InvalidArgument, which this ignores."""
    try:
        give_back(*handle)
    except InvalidArgument:
        return


def make_into(held: list[int], create: Callable[[], int]) -> int:
    """Create a handle, the last in `held` from then on. No line of ours runs in between, so an interrupt cannot come there."""
    held.extend(islice(iter(create, None), 1))
    return held[-1]


class Streams:
    """A session's own streams, the callers' streams that it uses, and its events. `close` releases all."""

    def __init__(self, backend: _core.Backend, simulator: _core.SimBackend | None = None) -> None:
        self.backend = backend
        self.simulator = simulator  # the backend's virtual clock, if there is one
        self._adopted: set[int] = set()
        self._adopting: list[int] = []  # adoptions that are one too many, or not in `_adopted` yet
        self._mover = 0  # the session's own stream, for copies that the host waits for; made on first use
        self._keep: object = None  # owns the memory that copies on it may be reading
        self._timing: list[int] = []  # two events
        self._events: list[int] = []
        self._recording: set[int] = set()  # those of them that are taken and not recorded yet
        self._retired: list[_core.Prefetcher] = []
        # A pass may begin on the engine's thread while another thread changes another tenant.
        self._lock = threading.Lock()

    def adopt(self, native: int) -> int:
        """The backend's handle of a caller's stream. Raises InvalidArgument if the stream is not this device's."""
        with self._lock:
            # Again each time: its owner may have destroyed it meanwhile. The session holds one adoption of a stream, others may
            # have theirs, and what an interrupt leaves behind here is forgotten by `close`.
            stream = make_into(self._adopting, partial(self.backend.adopt_stream, native))
            if stream in self._adopted:
                self._drop_adoptions()
            else:
                self._adopted.add(stream)
                self._adopting.clear()
            return stream

    def record(self, stream: int) -> int:
        """An event that completes when all work enqueued on `stream` so far has.

        Once it is complete, a later call may record it anew. A thread that still waits for it then waits for the new
        work too: later, but never wrong, since nothing waits for work that was not enqueued before it. Raises the
        backend's error; nothing is recorded then.
        """
        with self._lock:
            event = next((each for each in self._events if each not in self._recording and self._complete(each)), 0)
            if event == 0:
                event = make_into(self._events, partial(self.backend.create_event, timed=False))
            self._recording.add(event)
        # Without the lock: a driver blocks here while the stream's queue is full, and other tenants' passes may begin
        # meanwhile.
        try:
            self.backend.record(event, stream)
        finally:
            self._recording.discard(event)
        return event

    def order(self, later: int, earlier: int) -> None:
        """Make work enqueued on `later` from now on wait for all work enqueued on `earlier` now. The host does not
        wait.

        Raises the error of `earlier` if that has failed already: it would spread to `later`.
        """
        event = self.record(earlier)
        self.backend.query(event)
        self.backend.stream_wait(later, event)

    def wait(self, event: int) -> None:
        """Block until the event is complete. Raises its stream's error."""
        self.backend.synchronize(event, _FOREVER_S)

    def ended(self, event: int) -> bool:
        """Whether the event is complete, with or without an error."""
        try:
            return bool(self.backend.query(event))
        except Error:
            return True

    def copy(self, ranges: Sequence[tuple[int, int, int]], *, keep: object = None) -> None:
        """Copy (to, from, bytes) each on a stream of the session's own, and wait. `keep` keeps the sources alive."""
        stream = self._moving()
        self._keep = keep
        try:
            for target, source, nbytes in ranges:
                self.backend.copy(stream, target, source, nbytes)
            self.wait(self.record(stream))
        except BaseException:  # an interrupt of the wait as well
            self._drop_mover()
            raise
        self._keep = None

    def copy_seconds(self, target: int, source: int, nbytes: int, *, keep: object = None) -> float:
        """Seconds of one copy on a stream of the session's own, the quicker of two. The first estimate of the link."""
        stream = self._moving()
        self._keep = keep
        while len(self._timing) < 2:
            make_into(self._timing, self.backend.create_event)
        begun, ended = self._timing
        times = []
        try:
            for _ in range(2):
                self.backend.record(begun, stream)
                self.backend.copy(stream, target, source, nbytes)
                self.backend.record(ended, stream)
                self.wait(ended)
                times.append(self.backend.elapsed(begun, ended))
        except BaseException:  # an interrupt of the wait as well
            self._drop_mover()
            raise
        self._keep = None
        return float(min(times))

    def retire(self, prefetcher: _core.Prefetcher) -> None:
        """Give back the stream and events of a `_core.Prefetcher` that is no longer used, now or (if that fails) in
        `close`."""
        try:
            prefetcher.close()
        except Error:
            self._retired.append(prefetcher)

    def close(self) -> None:
        """Give everything back. Can be called again after an error or interrupt. Does not wait for callers' streams."""
        self._drop_mover()
        while self._retired:
            self._retired[-1].close()
            self._retired.pop()
        self._drop_adoptions()
        for stream in tuple(self._adopted):
            gone(self.backend.forget_stream, stream)
            self._adopted.discard(stream)
        for events in (self._timing, self._events):
            while events:
                gone(self.backend.destroy_event, events[-1])
                events.pop()

    def _drop_adoptions(self) -> None:
        while self._adopting:
            gone(self.backend.forget_stream, self._adopting[-1])
            self._adopting.pop()

    def _moving(self) -> int:
        if self._mover == 0:
            self._mover = self.backend.create_stream()
        return self._mover

    def _drop_mover(self) -> None:
        # A caller that gets an error gives the targets up, so no copy may still write there: destroying a stream waits
        # for its work. It also removes a stream that has failed, which would fail for ever. If destroying fails too,
        # copies may still be reading: the memory that they read is kept until it succeeds.
        if self._mover:
            gone(self.backend.destroy_stream, self._mover)
            self._mover = 0
        self._keep = None

    def _complete(self, event: int) -> bool:
        try:
            return bool(self.backend.query(event))
        except Error:
            return False  # its stream has failed: keep the event as it is, since a caller may still ask for it


class ComputeStream:
    """The stream that a tenant's passes compute on. `handle` is 0 while they compute on the calling thread."""

    def __init__(self, streams: Streams, device: Device) -> None:
        self._streams = streams
        self._device = device
        self._native = 0
        self._given: object = None  # the caller's object, kept so that its stream lives as long as it is used here
        self.handle = 0

    def begin(self, stream: object) -> int:
        """A pass begins: on `stream`, or (None) on the device's default. Returns its handle.

        Work enqueued for the tenant before comes first: another stream waits for it on the device; the calling thread
        blocks. Raises InvalidArgument if `stream` is not a stream of this device; nothing changed then.
        """
        given = self._device.default_stream() if stream is None else stream
        if given is not None:
            self._use(given)
        elif self._device.simulator is not None:
            self._device.require_stream()
        elif self.handle:
            self.wait()
            self._native, self._given, self.handle = 0, None, 0
        return self.handle

    def current(self) -> int:
        """The stream of the last pass; before the first pass the device's default, on which engines warm up."""
        if self.handle == 0:
            given = self._device.default_stream()
            if given is not None:
                self._use(given)
        return self.handle

    def mark(self) -> int:
        """An event behind all work enqueued on the compute stream so far; 0 if there is no such stream."""
        stream = self.current()
        return self._streams.record(stream) if stream else 0

    def wait(self) -> None:
        """Block until the compute stream has done all enqueued work. An error of the stream itself is left to its
        owner.

        Raises only if it cannot know whether the work is done; calling again is safe.
        """
        event = self.mark()
        if event == 0:
            return
        try:
            self._streams.wait(event)
        except Error:
            if not self._streams.ended(event):
                raise

    def _use(self, given: object) -> None:
        native = native_stream(given)
        if native == self._native:
            self._given = given
            return
        handle = self._streams.adopt(native)
        if self.handle:
            # Recorded now, not at the end of the last pass: changes since then have enqueued work there as well. A
            # stream that has failed runs nothing any more; waiting for it would only spread the failure.
            event = self._streams.record(self.handle)
            if not self._streams.ended(event):
                self._streams.backend.stream_wait(handle, event)
        self._native, self._given, self.handle = native, given, handle
