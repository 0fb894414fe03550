"""A copy of 64 KiB to the device while layers are copied: how long an engine's inputs wait behind weights.

A copy engine serves copies in the order in which they were enqueued, whatever their streams' priorities. So a small copy waits
for the whole copy that is under way, and pieces of it (`Platform.copy_chunk_bytes`) let it in between. What the pieces cost
is the rate of the layers themselves, measured beside it against plain copies of whole layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from bench.gpu.context import MIB, Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, figure, ratio
from bench.gpu.tenants import DeviceTenant, device_tenant
from bench.gpu.timing import Marks, marks

import remap
from remap import _core
from remap.internals import internals
from remap_serve.sim.results import percentile

from .link import bytes_at
from .prefetch import LAYERS, take_turns

SMALL = 64 << 10
BUFFERS = 2
PAUSE_S = 200e-6  # between two small copies, as an engine's inputs do not come one right behind the other


class SmallCopies:
    """Copies of 64 KiB on a stream of their own, one at a time, each waited for."""

    def __init__(self, backend: Any, its_marks: Marks, device: int, host: int) -> None:
        self._backend, self._marks, self._device, self._host = backend, its_marks, device, host
        self._stream = backend.create_stream()

    def close(self) -> None:
        self._backend.destroy_stream(self._stream)

    def one(self) -> float:
        """Seconds from the call until it has arrived, on the host's clock."""
        begun = time.perf_counter()
        self._backend.copy(self._stream, self._device, self._host, SMALL)
        self._marks.wait(self._marks.mark(self._stream))
        taken = time.perf_counter() - begun
        self._marks.reset()
        return taken

    def until(self, over: int, most: int) -> list[float]:
        """One after the other while an event of the backend's, which was recorded, is not complete."""
        taken: list[float] = []
        while len(taken) < most and not self._backend.query(over):
            taken.append(self.one())
            time.sleep(PAUSE_S)
        return taken

    def verify(self, back: int) -> None:
        """What has arrived is what was sent. back: room for it in host memory."""
        self._backend.copy(self._stream, back, self._device, SMALL)
        self._marks.wait(self._marks.mark(self._stream))
        self._marks.reset()
        if bytes_at(back, SMALL) != bytes_at(self._host, SMALL):
            raise Wrong("a small copy brought other bytes")


def beside_streaming(raw: DeviceTenant, its_marks: Marks, small: SmallCopies, passes: int, most: int) -> list[float]:
    """While passes that stream every layer run."""
    for _ in range(passes):
        raw.run()
    last = its_marks.mark(raw.handle)
    taken = small.until(last, most)
    its_marks.wait(last)
    internals(raw.tenant)._state.prefetcher.drain()
    its_marks.reset()
    return taken


def beside_reload(raw: DeviceTenant, its_marks: Marks, small: SmallCopies, most: int) -> list[float]:
    """While all layers come back. They are away again afterwards."""
    remap.advanced.remap(raw.session, "raw", 0)
    raw.run()
    last = its_marks.mark(raw.handle)
    taken = small.until(last, most)
    its_marks.wait(last)
    its_marks.reset()
    raw.remap(LAYERS - BUFFERS, BUFFERS)
    raw.run()
    its_marks.wait(its_marks.mark(raw.handle))
    internals(raw.tenant)._state.prefetcher.drain()
    its_marks.reset()
    return taken


@measure("small copies beside layers", full_s=22, quick_s=6)
def small_copies(ctx: Context) -> Iterator[Figure]:
    """P50 and P99 of the small copy, alone, beside streaming and beside a reload; and the layers' rate; by chunk size."""
    size = ctx.pick(256 * MIB, 64 * MIB, 4 * MIB)
    layer_bytes = ctx.fit(2 * LAYERS * size, unit=2 * LAYERS * 2 * MIB, host=True) // (2 * LAYERS)
    chunks = ctx.pick((0, 4 * MIB, 16 * MIB, 32 * MIB), (0, 4 * MIB, 16 * MIB, 32 * MIB), (0, MIB))
    for chunk in chunks:
        yield from _one_size(ctx, layer_bytes, chunk, 0.9 / len(chunks))


def _one_size(ctx: Context, layer_bytes: int, chunk: int, share: float) -> Iterator[Figure]:
    title = f"{chunk // MIB} MiB pieces" if chunk else "whole layers"
    rounds, most = ctx.pick(12, 4, 3), ctx.pick(2000, 500, 20)
    taken: dict[str, list[float]] = {"alone": [], "streaming": [], "reload": []}
    with (
        device_tenant(ctx, LAYERS, layer_bytes, copy_chunk_bytes=chunk) as (raw, its_marks),
        marks(raw.backend) as small_marks,
        ctx.buffers(device=layer_bytes, host=LAYERS * layer_bytes + 2 * MIB) as (device, host),
        ctx.buffers(device=2 * MIB, host=2 * MIB) as (inputs, inputs_host),
    ):
        _core.fill_bytes(inputs_host, SMALL, 0x5B)
        small = SmallCopies(raw.backend, small_marks, inputs, inputs_host)
        try:
            raw.remap(LAYERS - BUFFERS, BUFFERS)
            raw.verify(its_marks)
            for index in ctx.rounds(rounds + 1, share=share / 2):
                alone = [small.one() for _ in range(ctx.pick(50, 20, 5))]
                streaming = beside_streaming(raw, its_marks, small, 4, most)
                reload = beside_reload(raw, its_marks, small, most)
                if index:
                    for name, samples in (("alone", alone), ("streaming", streaming), ("reload", reload)):
                        taken[name] += samples
            small.verify(inputs_host + MIB)
            raw.verify(its_marks)
            ours, theirs = take_turns(ctx, raw, its_marks, device, host, share / 2)
            raw.verify(its_marks)
        finally:
            small.close()
    alone_us = percentile(taken["alone"], 0.5) * 1e6
    for name in ("streaming", "reload"):
        samples = taken[name]
        if samples:
            late = percentile(samples, 0.99) * 1e6
            label = f"a copy of 64 KiB beside {'a reload' if name == 'reload' else name}, {title}, P99"
            yield figure(label, late, "us", samples, alone_p50_us=alone_us, layer_bytes=layer_bytes)
    yield ratio(
        f"prefetch, share of plain copies of whole layers, {title}",
        ours,
        theirs,
        inverse=True,
        target=0.97,
        at_least=True,
        shown=bool(chunk),
        GBps=LAYERS * layer_bytes / statistics.median(ours) / 1e9,
    )
