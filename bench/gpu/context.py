"""What a measure is given: sizes that fit the machine, a clock that ends loops, backends and streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from remap import _core

from .driver import Driver

__all__ = ["MIB", "Context", "Skip"]

MIB = 1 << 20
T = TypeVar("T")


class Skip(Exception):
    """Raised by a measure that finds out that it cannot run here. Its text is the reason."""


class Context:
    """One worker's. `until` is when the present measure should be done, on time.monotonic."""

    def __init__(self, *, quick: bool, emulated: bool, until: float = float("inf")) -> None:
        self.quick = quick
        self.emulated = emulated
        self.until = until
        self.driver = Driver()
        probe = _core.probe_cuda()
        self.probe = probe["devices"][0]
        self.host_budget: int = probe["host_budget_bytes"]
        self._aside: Any = None

    def pick(self, full: T, quick: T, emulated: T) -> T:
        """The size for this kind of run."""
        return emulated if self.emulated else quick if self.quick else full

    @property
    def free_bytes(self) -> int:
        """Device memory that nobody has taken, now."""
        with self.driver as driver:
            return driver.memory()[0]

    def fit(self, wanted: int, *, unit: int, host: bool = False) -> int:
        """At most `wanted` bytes, in units, within half of the free device memory (and of the page-locked budget)."""
        room = self.free_bytes // 2
        if host:
            room = min(room, self.host_budget // 2)
        fitting = min(wanted, room) // unit * unit
        if fitting < unit:
            raise Skip(f"{unit} bytes are needed, {room} may be used (half of what is free)")
        return fitting

    def rounds(self, most: int, *, least: int = 3, share: float = 1.0) -> Iterator[int]:
        """0, 1, ... up to `most` rounds while `share` of the measure's remaining time lasts, but at least `least`."""
        begun = time.monotonic()
        end = begun + share * max(0.0, self.until - begun)
        for index in range(most):
            if index >= least and time.monotonic() > end:
                return
            yield index

    def backend(self, *, traced: bool = False) -> Any:
        """A cuda backend on the first device; traced: calls are counted, not logged."""
        backend = _core.make_cuda_backend(0)
        if not traced:
            return backend
        trace = _core.make_trace_backend(backend)
        trace.set_logging(False)
        return trace

    @contextmanager
    def stream(self, priority: int = 0) -> Iterator[int]:
        """A stream as an engine brings it along: the driver's own handle, unknown to any backend yet."""
        with self.driver as driver, driver.stream(priority) as stream:
            yield stream

    @property
    def aside(self) -> Any:
        """A backend for memory that is no session's: an arena counts every page of its own backend as its own. Host memory is
        page-locked as one piece, since other backends copy from it."""
        if self._aside is None:
            self._aside = _core.make_cuda_backend(0, host_piece_bytes=1 << 46)
        return self._aside

    @contextmanager
    def buffers(self, *, device: int = 0, host: int = 0, backend: Any = None) -> Iterator[tuple[int, int]]:
        """(device address, page-locked host address) of so many bytes each; 0 where none was wanted.

        device: a multiple of the granularity. Host memory is touched, so that nothing is paid for on first use. backend: whose
        memory it is, where it matters (only what is the backend's own is staged); None: `aside`'s.
        """
        backend = self.aside if backend is None else backend
        with ExitStack() as made:
            at = at_host = 0
            if device:
                at = backend.reserve(device, backend.granularity)
                made.callback(backend.release, at, device)
                page = backend.create_page(device)
                made.callback(backend.destroy_page, page)
                backend.map(at, [page], device)
                made.callback(backend.unmap, at, device)
                backend.set_access(at, device, _core.Access.read_write)
            if host:
                at_host = backend.allocate_host(host)
                made.callback(backend.free_host, at_host, host)
                _core.fill_bytes(at_host, host, 0)
            yield at, at_host
