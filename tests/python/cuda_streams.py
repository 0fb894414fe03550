"""An engine's side of a CUDA device, through ctypes: its own streams, and gates that hold one back until a test opens them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_VERSIONS = {
    "cuInit": 2000,
    "cuDeviceGet": 2000,
    "cuDevicePrimaryCtxRetain": 7000,
    "cuDevicePrimaryCtxRelease": 11000,
    "cuCtxPushCurrent": 4000,
    "cuCtxPopCurrent": 4000,
    "cuStreamCreateWithPriority": 5050,
    "cuStreamDestroy": 4000,
    "cuStreamSynchronize": 2000,
    "cuStreamBeginCapture": 10010,
    "cuStreamEndCapture": 10000,
    "cuLaunchHostFunc": 10000,
}
_NON_BLOCKING, _CAPTURE_THREAD_LOCAL = 1, 1
# How long a gate stays shut if a test that has a bug blocks on it. Nobody waits for that long otherwise.
PATIENCE_S = 20.0

_libc = ctypes.CDLL(None, use_errno=True)


class Gate:
    """Work enqueued on a stream behind `hold` does not run before `open`. `forced`: somebody waited until patience ran out.

    The stream waits in the C library's sem_wait: no thread of the driver calls into Python.
    """

    def __init__(self) -> None:
        self._semaphore = ctypes.create_string_buffer(32)  # sizeof(sem_t)
        assert _libc.sem_init(self._semaphore, 0, 0) == 0
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
            _libc.sem_post(self._semaphore)

    def open_once(self, ready: threading.Event, at_most_s: float = 0.3) -> None:
        """Open from another thread when `ready` is set, or after a moment: for a call that has to wait for the gate."""

        def opener() -> None:
            ready.wait(at_most_s)
            self.open()

        threading.Thread(target=opener, daemon=True).start()

    @property
    def shut(self) -> bool:
        return not self._opened.is_set()


class Driver:
    """The driver library at `path`, with the primary context of device 0 current on this thread until `close`."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._known: dict[str, Callable[..., int]] = {}
        self._call("cuInit", ctypes.c_uint(0))
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(0))
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxPushCurrent", context)
        self._gates: list[Gate] = []

    def close(self) -> None:
        self._call("cuCtxPopCurrent", ctypes.byref(ctypes.c_void_p()))
        self._call("cuDevicePrimaryCtxRelease", self._device)

    @contextmanager
    def stream(self) -> Iterator[int]:
        """A stream of the engine's own. When the block ends its gates are opened and its work is waited for."""
        made = ctypes.c_void_p()
        self._call("cuStreamCreateWithPriority", ctypes.byref(made), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(0))
        assert made.value is not None
        try:
            yield made.value
        finally:
            self.open_gates()
            self._call("cuStreamSynchronize", made)
            self._call("cuStreamDestroy", made)

    def synchronize(self, stream: int) -> None:
        """Wait for all work of the stream, as an engine does before the processor reads results."""
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def hold(self, stream: int) -> Gate:
        """The device is busy from here on: a shut gate in the stream."""
        gate = Gate()
        self._gates.append(gate)
        wait = ctypes.cast(_libc.sem_wait, ctypes.c_void_p)
        self._call("cuLaunchHostFunc", ctypes.c_void_p(stream), wait, ctypes.byref(gate._semaphore))
        return gate

    def open_gates(self) -> None:
        for gate in self._gates:
            gate.open()

    def forget_gates(self) -> list[Gate]:
        """All gates since the last call; no stream waits in them any more."""
        gates, self._gates = self._gates, []
        return gates

    @contextmanager
    def capturing(self, stream: int) -> Iterator[None]:
        """What is enqueued on the stream is recorded into a graph meanwhile, and thrown away."""
        self._call("cuStreamBeginCapture", ctypes.c_void_p(stream), ctypes.c_int(_CAPTURE_THREAD_LOCAL))
        try:
            yield
        finally:
            self._entry("cuStreamEndCapture")(ctypes.c_void_p(stream), ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        code = self._entry(name)(*arguments)
        assert code == 0, f"{name} returned {code}"

    def _entry(self, name: str) -> Callable[..., int]:
        known = self._known.get(name)
        if known is None:
            address, status = ctypes.c_void_p(), ctypes.c_int()
            code = self._library.cuGetProcAddress_v2(
                name.encode(),
                ctypes.byref(address),
                ctypes.c_int(_VERSIONS[name]),
                ctypes.c_ulonglong(0),
                ctypes.byref(status),
            )
            assert code == 0 and address.value, f"cuGetProcAddress({name}) returned {code}"
            known = self._known[name] = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)
        return known
