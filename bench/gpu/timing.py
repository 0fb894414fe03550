"""Time on the device, by the backend's own events, and time on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["Marks", "marks", "timed"]

WAIT_S = 120.0


def timed(call: Callable[[], object]) -> float:
    """Seconds that the call takes on the host's clock."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


class Marks:
    """Events of one backend, recorded on any stream it knows, used again and again. Made by `marks`."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.events: list[int] = []
        self._free: list[int] = []

    def mark(self, stream: int) -> int:
        """Where `stream` is now. Give it back with `free`, or all of them with `reset`."""
        if not self._free:
            event = self.backend.create_event()
            self.events.append(event)
            self._free.append(event)
        event = self._free.pop()
        self.backend.record(event, stream)
        return event

    def wait(self, mark: int) -> None:
        """Block until the stream has come to the mark. Raises the stream's error."""
        if not self.backend.synchronize(mark, WAIT_S):
            raise TimeoutError(f"the device did not get to a mark within {WAIT_S:.0f} s")

    def between(self, first: int, last: int) -> float:
        """Seconds of device time from one mark to another, once both were passed."""
        return float(self.backend.elapsed(first, last))

    def gaps(self, marks: Sequence[int]) -> list[float]:
        """Seconds between each mark and the next, once the last was passed."""
        self.wait(marks[-1])
        return [self.between(a, b) for a, b in zip(marks, marks[1:])]

    def free(self, mark: int) -> None:
        """This mark may be used again."""
        self._free.append(mark)

    def reset(self) -> None:
        """All marks are free again."""
        self._free = list(self.events)

    def timed(self, stream: int, launch: Callable[[], object]) -> float:
        """Seconds of device time that the work takes which `launch` enqueues on `stream`."""
        first = self.mark(stream)
        launch()
        last = self.mark(stream)
        self.wait(last)
        taken = self.between(first, last)
        self._free += [first, last]
        return taken


@contextmanager
def marks(backend: Any) -> Iterator[Marks]:
    """Marks of `backend`, destroyed at the end (their streams may be gone by then)."""
    made = Marks(backend)
    try:
        yield made
    finally:
        for event in made.events:
            backend.destroy_event(event)
