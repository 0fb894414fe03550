"""Streaming layers against plain page-locked copies of the same sizes: what the schedule and its events cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench.gpu.context import MIB, Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, ratio
from bench.gpu.tenants import DeviceTenant, device_tenant
from bench.gpu.timing import Marks

from remap.internals import internals

LAYERS = 8


def streamed_passes(raw: DeviceTenant, marks: Marks, passes: int) -> list[float]:
    """Seconds of each of `passes` passes that stream every layer and compute nothing, enqueued one behind the other.

    One pass more runs before them: in the steady state a pass needs exactly one copy of each layer.
    """
    raw.run()
    ends = [marks.mark(raw.handle)]
    for _ in range(passes):
        raw.run()
        ends.append(marks.mark(raw.handle))
    taken = marks.gaps(ends)
    marks.reset()
    return taken


def plain_copies(raw: DeviceTenant, marks: Marks, device: int, host: int, rounds: int) -> list[float]:
    """Seconds of each round: as many copies of the same size from other page-locked memory, in one stream, no events between."""
    backend, nbytes = raw.backend, raw.layer_bytes
    stream = backend.create_stream()
    try:
        ends = [marks.mark(stream)]
        for _ in range(rounds):
            for layer in range(raw.layers):
                backend.copy(stream, device, host + layer * nbytes, nbytes)
            ends.append(marks.mark(stream))
        taken = marks.gaps(ends)
    finally:
        backend.destroy_stream(stream)
    marks.reset()
    return taken


@measure("prefetch", full_s=16, quick_s=4)
def prefetch(ctx: Context) -> Iterator[Figure]:
    """Passes that stream all layers through one and two ring buffers, taking turns with plain copies."""
    sizes = ctx.pick((32 * MIB, 256 * MIB), (64 * MIB,), (4 * MIB,))
    for size in sizes:
        layer_bytes = ctx.fit(2 * LAYERS * size, unit=2 * LAYERS * 2 * MIB, host=True) // (2 * LAYERS)
        with (
            device_tenant(ctx, LAYERS, layer_bytes) as (raw, marks),
            ctx.buffers(device=layer_bytes, host=LAYERS * layer_bytes) as (device, host),
        ):
            for buffers in (2, 1):
                raw.remap(0)
                raw.remap(LAYERS - buffers, buffers)
                raw.verify(marks)
                ours, theirs = take_turns(ctx, raw, marks, device, host, 0.3 / len(sizes))
                raw.verify(marks)
                yield ratio(
                    f"prefetch, share of plain copies, {layer_bytes // MIB} MiB, {buffers} buffers",
                    ours,
                    theirs,
                    inverse=True,
                    target=0.98 if buffers == 2 else None,
                    at_least=True,
                    shown=buffers == 2,
                    GBps=LAYERS * layer_bytes / statistics.median(ours) / 1e9,
                    plain_GBps=LAYERS * layer_bytes / statistics.median(theirs) / 1e9,
                )


def take_turns(
    ctx: Context, raw: DeviceTenant, marks: Marks, device: int, host: int, share: float
) -> tuple[list[float], list[float]]:
    """(seconds of each streamed pass, seconds of as many plain copies)."""
    ours: list[float] = []
    theirs: list[float] = []
    passes, prefetcher = ctx.pick(5, 4, 2), internals(raw.tenant)._state.prefetcher
    prefetcher.drain()
    before, wanted = prefetcher.stats().copied_bytes, 0
    for index in ctx.rounds(ctx.pick(12, 5, 2) + 1, share=share):
        mine = streamed_passes(raw, marks, passes)
        prefetcher.drain()  # copies ahead must not run beside the plain ones
        wanted += (passes + 1) * LAYERS * raw.layer_bytes
        other = plain_copies(raw, marks, device, host, passes)
        if index:
            ours += mine
            theirs += other
    copied = prefetcher.stats().copied_bytes - before
    if copied != wanted:
        raise Wrong(f"{copied} bytes were copied where {wanted} were to be measured")
    return ours, theirs
