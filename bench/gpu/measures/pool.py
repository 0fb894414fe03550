"""Growing by one layer against a pool that asks the driver for a handle a page, as elastic KV caches over the driver do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from bench.gpu.context import MIB, Context
from bench.gpu.registry import measure
from bench.gpu.results import Figure, figure, seconds
from bench.gpu.tenants import device_tenant

from .growth import CONFIG, Growth

PAGE = 2 * MIB


def grow_plainly(ctx: Context, nbytes: int) -> tuple[float, float]:
    """(seconds to create, map and open `nbytes` page by page; seconds to take them back the same way)."""
    driver, pages = ctx.driver, nbytes // PAGE
    base = driver.reserve(nbytes)
    handles = []
    begun = time.perf_counter()
    for index in range(pages):
        at = base + index * PAGE
        handles.append(driver.create(PAGE))
        driver.map(at, PAGE, handles[-1])
        driver.set_access(at, PAGE)
    grown = time.perf_counter()
    for index, handle in enumerate(handles):
        driver.unmap(base + index * PAGE, PAGE)
        driver.release(handle)
    ended = time.perf_counter()
    driver.free_addresses(base, nbytes)
    return grown - begun, ended - grown


@measure("a handle a page", full_s=8, quick_s=2)
def handle_a_page(ctx: Context) -> Iterator[Figure]:
    """One layer's worth of memory becomes usable: ours, and a plain pool's, taking turns."""
    layers = 8
    layer_bytes = ctx.fit(layers * ctx.pick(512 * MIB, 128 * MIB, 4 * MIB), unit=layers * PAGE, host=True) // layers
    ours: list[float] = []
    theirs: list[float] = []
    shrink: list[float] = []
    with device_tenant(ctx, layers, layer_bytes, traced=True, controller=CONFIG) as (raw, marks), ctx.driver:
        grown = Growth(raw, marks)
        for index in ctx.rounds(ctx.pick(20, 8, 3) + 1, share=0.9):
            grown.reset(1)
            mine = grown.grow(1)["usable"]
            other, back = grow_plainly(ctx, layer_bytes)
            if index:
                ours.append(mine)
                theirs.append(other)
                shrink.append(back)
        grown.reset(0)
        raw.verify(marks)
    size = f"{layer_bytes // MIB} MiB in pages of 2 MiB"
    yield seconds(
        f"a handle a page, {size}, until usable",
        theirs,
        per_page_us=statistics.median(theirs) / (layer_bytes // PAGE) * 1e6,
    )
    yield seconds(f"a handle a page, {size}, taken back", shrink, shown=False)
    yield figure(
        "the same, times what growing by a layer takes", statistics.median(theirs) / statistics.median(ours), "x", ours
    )
