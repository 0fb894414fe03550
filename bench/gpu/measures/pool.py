"""Growing and shrinking by 1 GiB, against a pool that asks the driver for a handle a page, as elastic KV caches do.

The pool's loop is Python over ctypes, which adds about a microsecond a call to what the driver takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from bench.gpu.context import MIB, Context
from bench.gpu.registry import measure
from bench.gpu.results import Figure, figure, ratio, seconds
from bench.gpu.tenants import device_tenant

from .growth import CONFIG, Growth

PAGE = 2 * MIB
LAYERS = 8


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


@measure("1 GiB more and less", full_s=10, quick_s=3)
def more_and_less(ctx: Context) -> Iterator[Figure]:
    """1 GiB (less where less fits) becomes usable and is taken back: ours, and a plain pool's, taking turns."""
    wanted = ctx.pick(1024 * MIB, 1024 * MIB, 8 * MIB)
    layer_bytes = ctx.fit(LAYERS * wanted // 2, unit=LAYERS * PAGE, host=True) // LAYERS
    taken, nbytes = 2, 2 * layer_bytes
    usable: list[float] = []
    called: list[float] = []
    there: list[float] = []
    theirs: list[float] = []
    back: list[float] = []
    with device_tenant(ctx, LAYERS, layer_bytes, traced=True, config=CONFIG) as (raw, marks), ctx.driver:
        grown = Growth(raw, marks)
        for index in ctx.rounds(ctx.pick(16, 6, 3) + 1, share=0.9):
            grown.reset(1)
            mine = grown.grow(taken)["usable"]
            less = grown.shrink(taken)
            other, others_back = grow_plainly(ctx, nbytes)
            if index:
                usable.append(mine)
                called.append(less["called"])
                there.append(less["there"])
                theirs.append(other)
                back.append(others_back)
        grown.reset(0)
        raw.verify(marks)
    size = f"{nbytes // MIB} MiB"
    per_page_us = statistics.median(theirs) / (nbytes // PAGE) * 1e6
    yield seconds(f"{size} more, until usable", usable)
    yield seconds(f"{size} more, a handle a page of 2 MiB", theirs, per_page_us=per_page_us)
    yield ratio(f"{size} more, a handle a page / ours", theirs, usable)
    yield seconds(f"{size} less, the call", called)
    yield seconds(f"{size} less, a handle a page of 2 MiB", back)
    # Ours then holds the layers' weights again, which the pool's pages never did.
    rate = nbytes / statistics.median(there) / 1e9
    yield figure(f"{size} less, until the layers are back", rate, "GB/s", there, shown=False)
