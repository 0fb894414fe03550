"""What lies between two chunks of a layer, beside kernels that fill the device: is the link idle there, and for how long?

Chunks let other copies in between (small_copies.py). The fill between two of them is a small kernel, or work of the device's
front end; beside kernels that hold every register it may wait for one of them to end, and the next chunk with it. In turns:

    whole               one copy
    back to back        chunks with nothing between them: on most devices no other copy gets in
    fill, default       a fill of four bytes between two chunks, on a stream of default priority: what the library does
    fill, greatest      the same on a stream of the greatest priority
    two streams         chunks on two streams in turns, each behind the other's last by an event
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

from bench.gpu.context import MIB, Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, figure, ratio
from bench.gpu.timing import Marks, marks
from bench.gpu.work import Products

from remap import _core

from .link import PATTERN, bytes_at
from .link_load import units_for

GAP_BYTES = 4
GREATEST = -1024  # lower is greater; the driver takes the greatest that the device has
WHOLE, LIBRARYS = "whole", "fill, default"


class Ways:
    """The ways to copy `nbytes` from host to device memory. Each returns the stream on which the last copy is."""

    def __init__(self, made: Marks, device: int, host: int, nbytes: int, chunk: int, greatest: int) -> None:
        """greatest: a stream of the greatest priority, known to the backend."""
        self.marks, self.backend = made, made.backend
        self.device, self.host, self.nbytes, self.chunk = device, host, nbytes, chunk
        self.greatest = greatest
        self.streams = (self.backend.create_stream(), self.backend.create_stream())
        first = self.streams[0]
        self.all: dict[str, Callable[[], int]] = {
            WHOLE: partial(self._in_chunks, first, nbytes, 0),
            "back to back": partial(self._in_chunks, first, chunk, 0),
            LIBRARYS: partial(self._in_chunks, first, chunk, GAP_BYTES),
            "fill, greatest": partial(self._in_chunks, greatest, chunk, GAP_BYTES),
            "two streams": self._on_two,
        }

    def close(self) -> None:
        """Destroys its streams, which waits for them."""
        for stream in self.streams:
            self.backend.destroy_stream(stream)

    def _in_chunks(self, stream: int, chunk: int, gap_bytes: int) -> int:
        for at in range(0, self.nbytes, chunk):
            if at and gap_bytes:
                self.backend.fill(stream, self.device + at, 0, gap_bytes)
            self.backend.copy(stream, self.device + at, self.host + at, min(chunk, self.nbytes - at))
        return stream

    def _on_two(self) -> int:
        stream, before = self.streams[0], 0
        for index, at in enumerate(range(0, self.nbytes, self.chunk)):
            stream = self.streams[index % 2]
            if before:
                self.backend.stream_wait(stream, before)
            self.backend.copy(stream, self.device + at, self.host + at, min(self.chunk, self.nbytes - at))
            before = self.marks.mark(stream)
        return stream

    def seconds(self, way: str, after: int) -> float:
        """Of device time, from the mark `after`, which all wait for, until the last byte has arrived."""
        for stream in (*self.streams, self.greatest):
            self.backend.stream_wait(stream, after)
        end = self.marks.mark(self.all[way]())
        self.marks.wait(end)
        return self.marks.between(after, end)

    def verify(self, back: int) -> None:
        """Each way brings what the host has. back: room for it in host memory."""
        for way in self.all:
            _core.fill_bytes(back, self.nbytes, 0)
            stream = self.greatest
            self.backend.fill(stream, self.device, 0, self.nbytes)
            self.seconds(way, self.marks.mark(stream))
            self.backend.copy(stream, back, self.device, self.nbytes)
            self.marks.wait(self.marks.mark(stream))
            self.marks.reset()
            if bytes_at(back, self.nbytes) != bytes_at(self.host, self.nbytes):
                raise Wrong(f"{way}: other bytes arrived than were sent")


@measure("gaps between chunks", needs=("torch-cuda",), full_s=14, quick_s=4)
def chunk_gaps(ctx: Context) -> Iterator[Figure]:
    """The rate of each way alone and beside matrix products, and what the products lose."""
    chunk = ctx.pick(32 * MIB, 32 * MIB, MIB)
    nbytes = ctx.fit(16 * chunk, unit=chunk, host=True)
    size = ctx.pick(8192, 8192, 64)
    backend = ctx.backend()
    with (
        marks(backend) as made,
        ctx.buffers(device=nbytes, host=2 * nbytes) as (device, host),
        ctx.stream() as computing,
        ctx.stream(GREATEST) as greatest,
    ):
        backend.adopt_stream(computing)
        backend.adopt_stream(greatest)
        _core.fill_bytes(host, nbytes, PATTERN)
        ways = Ways(made, device, host, nbytes, chunk, greatest)
        try:
            ways.verify(host + nbytes)
            load = Products(computing, size)
            load.launch(4)
            unit_s = made.timed(computing, partial(load.launch, 16)) / 16
            alone: dict[str, list[float]] = {way: [] for way in ways.all}
            beside: dict[str, list[float]] = {way: [] for way in ways.all}
            for index in ctx.rounds(ctx.pick(20, 6, 2) + 1, share=0.8):
                for way in ways.all:
                    quiet = ways.seconds(way, made.mark(computing))
                    load.launch(2)  # nothing is timed before the kernels are on
                    begun = made.mark(computing)
                    load.launch(units_for(2.0 * quiet, unit_s))
                    taken = ways.seconds(way, begun)
                    made.wait(made.mark(computing))
                    made.reset()
                    if index:  # the first round warms everything up
                        alone[way].append(quiet)
                        beside[way].append(taken)
            ways.verify(host + nbytes)
        finally:
            ways.close()
        for way in ways.all:
            yield figure(
                f"copies beside {load.kind}, {way}",
                nbytes / statistics.median(beside[way]) / 1e9,
                "GB/s",
                beside[way],
                alone_GBps=nbytes / statistics.median(alone[way]) / 1e9,
                chunk_bytes=chunk,
            )
            if way != WHOLE:
                yield ratio(
                    f"copies beside {load.kind}, {way}, share of whole copies' rate",
                    beside[way],
                    beside[WHOLE],
                    inverse=True,
                    target=0.95 if way == LIBRARYS else None,
                    at_least=True,
                )
