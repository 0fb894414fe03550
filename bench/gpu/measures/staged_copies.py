"""Copies to the device from ordinary host memory: for how long the call holds its thread, and how quick they are.

Master copies beyond the budget of page-locked memory lie there (cpp/backend/cuda/staging.h). In turns:

    page-locked    what all other copies are
    staged         through the backend's page-locked slots, filled by host functions on a second stream
    the driver's   given such memory, the driver copies it into its own buffers, before it returns
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
from collections.abc import Iterator

from bench.gpu.context import MIB, Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, figure, ratio, seconds
from bench.gpu.timing import marks, timed

from remap import _core

from .link import PATTERN, bytes_at

LOCKED, STAGED, DRIVERS = "page-locked", "staged", "the driver's"


@measure("staged copies", full_s=8, quick_s=3)
def staged_copies(ctx: Context) -> Iterator[Figure]:
    """The rate of each way, and how long the call takes that enqueues one copy of a layer's size."""
    nbytes = ctx.fit(ctx.pick(256 * MIB, 256 * MIB, 24 * MIB), unit=4 * MIB, host=True)
    backend = ctx.backend()
    with (
        marks(backend) as made,
        ctx.buffers(device=nbytes, host=nbytes, backend=backend) as (device, host),
        mmap.mmap(-1, 2 * nbytes) as ordinary,
    ):
        first = ctypes.c_char.from_buffer(ordinary)
        at = ctypes.addressof(first)
        _core.fill_bytes(host, nbytes, PATTERN)
        _core.fill_bytes(at, 2 * nbytes, PATTERN)
        backend.register_host(at, nbytes, _core.HostUse.staged)
        stream = backend.create_stream()
        sources = {LOCKED: host, STAGED: at, DRIVERS: at + nbytes}
        taken: dict[str, list[float]] = {way: [] for way in sources}
        held: dict[str, list[float]] = {way: [] for way in sources}
        try:
            for index in ctx.rounds(ctx.pick(20, 6, 2) + 1, share=0.8):
                for way, source in sources.items():
                    backend.fill(stream, device, 0, nbytes)
                    begun = made.mark(stream)
                    call_s = timed(lambda source=source: backend.copy(stream, device, source, nbytes))  # type: ignore[misc]
                    ended = made.mark(stream)
                    made.wait(ended)
                    if index:  # the first round makes the slots, and warms everything up
                        taken[way].append(made.between(begun, ended))
                        held[way].append(call_s)
                    backend.copy(stream, host, device, nbytes)
                    made.wait(made.mark(stream))
                    made.reset()
                    if bytes_at(host, nbytes) != bytes([PATTERN]) * nbytes:
                        raise Wrong(f"{way}: other bytes arrived than were sent")
        finally:
            backend.destroy_stream(stream)
            backend.unregister_host(at, nbytes)
            del first
    for way in sources:
        rate = nbytes / statistics.median(taken[way]) / 1e9
        yield figure(f"copies of {nbytes // MIB} MiB, {way}", rate, "GB/s", taken[way], bytes=nbytes)
        yield seconds(f"the call of a copy of {nbytes // MIB} MiB, {way}", held[way])
    yield ratio("staged copies, share of page-locked copies' rate", taken[STAGED], taken[LOCKED], inverse=True)
    yield ratio("the call of a staged copy, of the driver's own", held[STAGED], held[DRIVERS])
