"""Making the pages of an arena: by one thread and by several, in pages of 2 MiB and of 32 MiB.

An arena of 60 GB is 30,000 pages of 2 MiB. Whether the driver makes pages on several threads at once is not documented.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.gpu.context import MIB, Context
from bench.gpu.registry import measure
from bench.gpu.results import Figure, ratio, seconds
from bench.gpu.timing import timed

THREADS = 4


def made(backend: Any, page: int, count: int, threads: int) -> float:
    """Seconds in which so many pages are made. They are given back afterwards."""
    pages: list[int] = []

    def some(number: int) -> None:
        for _ in range(number):
            pages.append(backend.create_page(page))

    shares = [count // threads + (index < count % threads) for index in range(threads)]
    try:
        with ThreadPoolExecutor(threads) as pool:
            return timed(lambda: list(pool.map(some, shares)))
    finally:
        for each in pages:
            backend.destroy_page(each)


@measure("making pages", full_s=8, quick_s=3)
def page_creation(ctx: Context) -> Iterator[Figure]:
    """Seconds of one thread, and what several take of that, by page size; the bytes are the same."""
    backend = ctx.backend()
    nbytes = ctx.fit(ctx.pick(8192, 2048, 32) * MIB, unit=32 * MIB)
    for page in ctx.pick((2 * MIB, 32 * MIB), (2 * MIB, 32 * MIB), (2 * MIB,)):
        count = nbytes // page
        taken: dict[int, list[float]] = {1: [], THREADS: []}
        for index in ctx.rounds(ctx.pick(5, 3, 3) + 1, share=0.45):
            for threads, samples in taken.items():
                once = made(backend, page, count, threads)
                if index:
                    samples.append(once)
        title = f"{count} pages of {page // MIB} MiB"
        yield seconds(f"making {title}", taken[1], per_GB_s=min(taken[1]) / nbytes * 1e9)
        yield ratio(f"making {title}, {THREADS} threads / one", taken[THREADS], taken[1])
