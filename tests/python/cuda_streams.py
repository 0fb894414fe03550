"""An engine's side of a CUDA device, through ctypes: its own streams, and gates that hold one back until a test opens them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bench.gpu import driver

# How long a gate stays shut if a test that has a bug blocks on it. Nobody waits for that long otherwise.
PATIENCE_S = 20.0

_libc = ctypes.CDLL(None, use_errno=True)


class Gate:
    """Work enqueued on a stream behind `hold` does not run before `open`. `forced`: somebody waited until patience ran out.

    The stream waits in the C library's sem_wait: no thread of the driver calls into Python.
    """

    def __init__(self) -> None:
        self.semaphore = ctypes.create_string_buffer(32)  # sizeof(sem_t)
        assert _libc.sem_init(self.semaphore, 0, 0) == 0
        self.forced = False
        self._opened = threading.Event()
        self._guard = threading.Thread(target=self._watch, daemon=True)
        self._guard.start()

    def _watch(self) -> None:
        if not self._opened.wait(PATIENCE_S):
            self.forced = True
            self.open()

    def open(self) -> None:
        """Once."""
        if not self._opened.is_set():
            self._opened.set()
            _libc.sem_post(self.semaphore)

    def open_once(self, ready: threading.Event, at_most_s: float = 0.3) -> None:
        """Open from another thread when `ready` is set, or after a moment: for a call that has to wait for the gate."""

        def opener() -> None:
            ready.wait(at_most_s)
            self.open()

        threading.Thread(target=opener, daemon=True).start()

    @property
    def shut(self) -> bool:
        return not self._opened.is_set()


class Driver(driver.Driver):
    """The driver library at `path`, with the primary context of device 0 current on this thread until `close`."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.__enter__()
        self._gates: list[Gate] = []

    def close(self) -> None:
        self.__exit__()

    @contextmanager
    def stream(self) -> Iterator[int]:
        """A stream of the engine's own. When the block ends its gates are opened and its work is waited for."""
        with super().stream() as made:
            try:
                yield made
            finally:
                self.open_gates()

    def hold(self, stream: int) -> Gate:
        """The device is busy from here on: a shut gate in the stream."""
        self._gates.append(Gate())
        self.host_function(stream, _libc.sem_wait, self._gates[-1].semaphore)
        return self._gates[-1]

    def open_gates(self) -> None:
        for gate in self._gates:
            gate.open()

    @contextmanager
    def capturing(self, stream: int) -> Iterator[None]:
        """What is enqueued on the stream is recorded into a graph meanwhile, and thrown away."""
        self.begin_capture(stream)
        try:
            yield
        finally:
            self.abandon_capture(stream)
