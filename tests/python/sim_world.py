"""A sim backend with simple numbers.

The backend's unit is a page: the link moves one page a second to the device and half a page back, the device's memory moves
eight. All these are powers of two, so times are exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from remap import _core

PAGE = 4096
UNIT = {"h2d_bytes_per_s": PAGE, "d2h_bytes_per_s": PAGE / 2, "hbm_bytes_per_s": 8 * PAGE}
ROOM = 64  # pages


class World:
    """A backend with `ROOM` accessible pages in one region, and host memory to copy from and to. All driver calls are free
    unless `times` says otherwise; `begin` is when everything was ready."""

    def __init__(self, **times: Any) -> None:
        self.backend = _core.make_sim_backend(**{"capacity_bytes": ROOM * PAGE, "granularity": PAGE, **UNIT, **times})
        self.at = self.backend.reserve(ROOM * PAGE, PAGE)
        self.pages = [self.backend.create_page(PAGE) for _ in range(ROOM)]
        self.backend.map(self.at, self.pages, PAGE)
        self.backend.set_access(self.at, ROOM * PAGE, _core.Access.read_write)
        self.host = self.backend.allocate_host(ROOM * PAGE)
        self.begin = self.backend.now

    def stream(self, after: float = 0.0) -> int:
        """A new stream; what is enqueued on it waits for an event that completes at `after`."""
        stream: int = self.backend.create_stream()
        if after:
            other, event = self.backend.create_stream(), self.backend.create_event()
            self.backend.hold(other, after)
            self.backend.record(event, other)
            self.backend.stream_wait(stream, event)
        return stream

    def down(self, stream: int, pages: float) -> float:
        """Enqueue a copy to the device; when it will be done."""
        self.backend.copy(stream, self.at, self.host, int(pages * PAGE))
        return self.backend.stream_end(stream)

    def up(self, stream: int, pages: float) -> float:
        self.backend.copy(stream, self.host, self.at, int(pages * PAGE))
        return self.backend.stream_end(stream)

    def event(self, stream: int) -> int:
        event: int = self.backend.create_event()
        self.backend.record(event, stream)
        return event


def on_a_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns on another thread, which ends then."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join()
    return answers[0]
