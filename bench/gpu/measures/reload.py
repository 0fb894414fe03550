"""An idle model comes back: all its layers from host memory, against plain copies of as many bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from bench.gpu.context import MIB, Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, figure, seconds
from bench.gpu.tenants import device_tenant
from bench.gpu.timing import timed

LAYERS = 16
BUFFERS = 2


@measure("reload of an idle model", full_s=14, quick_s=3)
def reload(ctx: Context) -> Iterator[Figure]:
    """session.remap back to 0 and the first pass behind it, until every layer was there; taking turns with plain copies."""
    size = ctx.pick(256 * MIB, 64 * MIB, 2 * MIB)
    layer_bytes = ctx.fit(2 * LAYERS * size, unit=2 * LAYERS * 2 * MIB, host=True) // (2 * LAYERS)
    ours: list[float] = []
    theirs: list[float] = []
    decided: list[float] = []
    first: list[float] = []
    with (
        device_tenant(ctx, LAYERS, layer_bytes) as (raw, marks),
        ctx.buffers(device=layer_bytes, host=LAYERS * layer_bytes) as (device, host),
    ):
        backend, tenant, stats = raw.backend, raw.tenant, raw.tenant._prefetcher.stats
        plain = backend.create_stream()

        def copy_all() -> None:
            for layer in range(LAYERS):
                backend.copy(plain, device, host + layer * layer_bytes, layer_bytes)
            marks.wait(marks.mark(plain))

        try:
            for index in ctx.rounds(ctx.pick(12, 5, 2) + 1, share=0.8):
                raw.remap(LAYERS - BUFFERS, BUFFERS)
                raw.run()
                marks.wait(marks.mark(raw.handle))
                tenant._prefetcher.drain()
                marks.reset()
                before, begun = stats().copies, time.perf_counter()
                raw.session.remap("raw", 0)
                called = time.perf_counter() - begun
                with tenant.forward(stream=raw.stream):
                    for layer in range(LAYERS):
                        tenant.wait(layer)
                        if layer == 0:
                            there = marks.mark(raw.handle)
                        tenant.done(layer)
                    last = marks.mark(raw.handle)
                marks.wait(there)
                earliest = time.perf_counter() - begun
                marks.wait(last)
                taken = time.perf_counter() - begun
                if stats().copies - before != LAYERS:
                    raise Wrong(f"{stats().copies - before} layers were copied where {LAYERS} were to be reloaded")
                marks.reset()
                other = timed(copy_all)
                marks.reset()
                if index:
                    ours.append(taken)
                    theirs.append(other)
                    decided.append(called)
                    first.append(earliest)
            raw.verify(marks)
        finally:
            backend.destroy_stream(plain)
    total = LAYERS * layer_bytes
    yield figure(
        f"reload of {LAYERS} layers of {layer_bytes // MIB} MiB, share of the link",
        statistics.median(theirs) / statistics.median(ours),
        "x",
        ours,
        target=0.95,
        at_least=True,
        GBps=total / statistics.median(ours) / 1e9,
        plain_GBps=total / statistics.median(theirs) / 1e9,
    )
    yield seconds("reload, the call alone", decided, shown=False)
    yield seconds("reload, until the first layer is there", first, shown=False)
