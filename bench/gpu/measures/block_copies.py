"""KV blocks out to host memory and in again: a call for each block and layer, against batches of them.

A request's KV is scattered: a block's keys and values of each layer lie apart from each other, so a request of 64 blocks and 32
layers is some 4,000 copies of a few KiB each way. `Backend.copy_batch` hands many of them to the driver in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from bench.gpu.context import MIB, Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, ratio, seconds
from bench.gpu.timing import marks, timed

from remap import _core

from .link import bytes_at

Ranges = list[tuple[int, int, int]]
SIZES = (8 << 10, 32 << 10)  # of keys or values of 16 tokens in a layer: 8 KV heads of 32 and 128, in 16 bits


@measure("copies of KV blocks", full_s=5, quick_s=2)
def block_copies(ctx: Context) -> Iterator[Figure]:
    """How long the caller's thread is busy, and how long the device, by size and direction; the bytes are compared."""
    count = ctx.pick(4096, 4096, 64)
    sizes = ctx.pick(SIZES, SIZES, (512,))
    for size in sizes:
        yield from _one_size(ctx, count, size, 0.9 / len(sizes))


def _one_size(ctx: Context, count: int, size: int, share: float) -> Iterator[Figure]:
    backend = ctx.backend()
    stride = 2 * size  # on the device no copy lies right behind another
    device_bytes = -(-count * stride // (2 * MIB)) * 2 * MIB
    with marks(backend) as made, ctx.buffers(device=device_bytes, host=2 * count * size) as (device, host):
        stream = backend.create_stream()
        try:
            for index in range(count):
                _core.fill_bytes(host + index * size, size, index % 251)
            back = host + count * size
            ways: dict[str, Ranges] = {
                "in": [(device + i * stride, host + i * size, size) for i in range(count)],
                "out": [(back + i * size, device + i * stride, size) for i in range(count)],
            }

            def singly(ranges: Ranges) -> None:
                for to, source, nbytes in ranges:
                    backend.copy(stream, to, source, nbytes)

            calls: dict[str, Callable[[Ranges], None]] = {
                "batches": partial(backend.copy_batch, stream),
                "a call each": singly,
            }
            busy: dict[tuple[str, str], list[float]] = {}
            taken: dict[tuple[str, str], list[float]] = {}
            for index in ctx.rounds(ctx.pick(30, 8, 3) + 1, share=share):
                for call, enqueue in calls.items():
                    _core.fill_bytes(back, count * size, 0xFF)
                    for way, ranges in ways.items():
                        first = made.mark(stream)
                        caller = timed(partial(enqueue, ranges))
                        last = made.mark(stream)
                        made.wait(last)
                        if index:
                            busy.setdefault((way, call), []).append(caller)
                            taken.setdefault((way, call), []).append(made.between(first, last))
                    made.reset()
                    if bytes_at(back, count * size) != bytes_at(host, count * size):
                        raise Wrong(f"{call}: other bytes came back than were sent")
        finally:
            backend.destroy_stream(stream)
    for way in ways:
        title = f"{count} copies {way} of {size} bytes"
        yield seconds(f"{title} as batches, the caller's time", busy[way, "batches"], shown=way == "out")
        yield ratio(
            f"{title}, batches / a call each, the caller's time", busy[way, "batches"], busy[way, "a call each"]
        )
        yield ratio(
            f"{title}, batches / a call each, on the device",
            taken[way, "batches"],
            taken[way, "a call each"],
            GBps=count * size / min(taken[way, "batches"]) / 1e9,
        )
