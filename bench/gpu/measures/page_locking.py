"""Page-locking host memory: how long it takes, and how long another thread's work waits for the driver meanwhile.

The library locks a range in pieces of 1 GiB, so that others get in between: here the driver is called so, beside it in pieces of
64 MiB, and once for all of the range, as a user would do it. The neighbour records an event on a stream of its own, again and
again: what every launch of an engine's does.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import addressof, c_char
from functools import partial
from typing import Any

from bench.gpu.context import MIB, Context
from bench.gpu.registry import measure
from bench.gpu.results import Figure, figure, ratio
from bench.gpu.timing import timed

from remap import _core

LIBRARYS, SMALL = 1024 * MIB, 64 * MIB


class Neighbour:
    """A thread that enqueues until `end`, which returns the longest call's seconds."""

    def __init__(self, backend: Any) -> None:
        self._backend, self._stop, self._begun = backend, threading.Event(), threading.Event()
        self._longest, self._error = 0.0, None
        self._thread = threading.Thread(target=self._run, name="neighbour", daemon=True)
        self._thread.start()
        self._begun.wait(60)

    def _run(self) -> None:
        backend = self._backend
        try:
            stream, event = backend.create_stream(), backend.create_event(timed=False)
            while not self._stop.is_set():
                begun = time.perf_counter()
                backend.record(event, stream)
                self._longest = max(self._longest, time.perf_counter() - begun)
                self._begun.set()
                time.sleep(20e-6)
            backend.destroy_event(event)
            backend.destroy_stream(stream)
        except Exception as error:  # noqa: BLE001 - a thread's boundary: end() raises it
            self._error = error
        finally:
            self._begun.set()

    def end(self) -> float:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._longest


def beside(backend: Any, call: Callable[[], None]) -> tuple[float, float]:
    """(seconds of the call, the neighbour's longest meanwhile)"""
    neighbour = Neighbour(backend)
    try:
        taken = timed(call)
    finally:
        longest = neighbour.end()
    return taken, longest


@measure("page-locking beside launches", full_s=12, quick_s=4)
def page_locking(ctx: Context) -> Iterator[Figure]:
    """2 GiB that have been touched: in pieces and as one, in turns."""
    backend = ctx.backend()
    nbytes = min(ctx.pick(3072 * MIB, 1536 * MIB, 130 * MIB), ctx.host_budget // 2 // MIB * MIB)
    pieces = {"pieces of 64 MiB": SMALL, "pieces of 1 GiB": min(LIBRARYS, nbytes), "one piece": nbytes}
    memory = mmap.mmap(-1, nbytes)
    view = c_char.from_buffer(memory)
    at = addressof(view)
    try:
        _core.fill_bytes(at, nbytes, 1)
        locked: dict[str, list[float]] = {name: [] for name in pieces}
        longest: dict[str, list[float]] = {name: [] for name in pieces}
        with ctx.driver as driver:
            for index in ctx.rounds(ctx.pick(6, 3, 3) + 1, share=0.9):
                for name, size in pieces.items():
                    taken, late = beside(backend, partial(driver.register, at, nbytes, size))
                    driver.unregister(at, nbytes, size)
                    if index:
                        locked[name].append(taken)
                        longest[name].append(late)
    finally:
        del view
        memory.close()
    size = f"{nbytes // MIB} MiB"
    for name, samples in longest.items():
        yield figure(
            f"page-locking {size} in {name}, a neighbour's longest launch",
            max(samples) * 1e3,
            "ms",
            samples,
            shown=name == "pieces of 1 GiB",
        )
    yield ratio(
        f"page-locking {size}, pieces of 64 MiB / one piece",
        locked["pieces of 64 MiB"],
        locked["one piece"],
        s_per_GiB=min(locked["one piece"]) / nbytes * (1 << 30),
    )
