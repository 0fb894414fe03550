"""How soon the host sees that a copy has arrived, by the way in which it waits.

A wait of the library's has a deadline, and looks again and again, first soon and then rarely; its worker's has none, and
sleeps until the device interrupts it. A driver's wait can spin instead, which costs a core. Each way waits for copies of
64 KiB; what one takes beyond the quickest is what it adds to a wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from bench.gpu.context import MIB, Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, ratio, seconds
from bench.gpu.timing import WAIT_S, timed

from remap import _core

from .link import bytes_at

SMALL = 64 << 10
SPIN, SLEEP = 2, 3  # CU_EVENT_DISABLE_TIMING, alone or with CU_EVENT_BLOCKING_SYNC
LIBRARYS, SPINS = "the library", "the driver, spinning"


@measure("waits for events", full_s=5, quick_s=2)
def waits(ctx: Context) -> Iterator[Figure]:
    """The median of each way, and its ratio to the driver's spinning."""
    backend = ctx.backend()
    with (
        ctx.buffers(device=2 * MIB, host=2 * MIB) as (device, host),
        ctx.driver as driver,
        ctx.stream() as native,
        ExitStack() as cleaning,
    ):
        _core.fill_bytes(host, SMALL, 0x5B)
        stream, event = backend.adopt_stream(native), backend.create_event(timed=False)
        cleaning.callback(backend.forget_stream, stream)
        cleaning.callback(backend.destroy_event, event)

        def with_librarys() -> None:
            backend.record(event, stream)
            if not backend.synchronize(event, WAIT_S):
                raise TimeoutError(f"a copy of {SMALL} bytes did not arrive")

        def looking() -> None:
            backend.record(event, stream)
            end = time.monotonic() + WAIT_S
            while not backend.query(event):
                if time.monotonic() > end:
                    raise TimeoutError(f"a copy of {SMALL} bytes did not arrive")

        with driver.event(SPIN) as spinning, driver.event(SLEEP) as sleeping:
            ways: dict[str, Callable[[], None]] = {
                SPINS: lambda: driver.wait(spinning, native),
                "the driver, sleeping": lambda: driver.wait(sleeping, native),
                LIBRARYS: with_librarys,
                "looking again and again": looking,
            }
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for index in ctx.rounds(ctx.pick(2000, 500, 5) + 1, share=0.9):
                for way, wait in ways.items():
                    backend.copy(stream, device, host, SMALL)
                    once = timed(wait)
                    if index:
                        taken[way].append(once)
        backend.copy(stream, host + MIB, device, SMALL)
        with_librarys()
        if bytes_at(host + MIB, SMALL) != bytes_at(host, SMALL):
            raise Wrong("a small copy brought other bytes")
    for way, samples in taken.items():
        yield seconds(f"a wait for a copy of 64 KiB: {way}", samples, shown=way == LIBRARYS)
    yield ratio("a wait for a copy of 64 KiB, the library / spinning", taken[LIBRARYS], taken[SPINS])
