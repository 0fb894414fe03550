"""What the driver's memory calls cost, one by one: through the backend, and without it as far as that is cheap."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.context import MIB, Context, Skip
from bench.gpu.registry import measure
from bench.gpu.results import Figure, ratio, seconds
from bench.gpu.timing import timed

from remap import _core

RUN = 64  # pages in a contiguous run
# By page size: what the table has room for.
SHOWN = {
    2 * MIB: ("create", "map", "set_access", "unmap", "set_access of a run"),
    64 * MIB: ("create", "set_access", "set_access of a run"),
}


@dataclass
class Samples:
    """Seconds of each call, by name."""

    taken: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        """Call it, keep the seconds, hand the result on."""
        box: list[Any] = []
        self.taken.setdefault(name, []).append(timed(lambda: box.append(call())))
        return box[0]


def _through_backend(backend: Any, page: int, run: int, samples: Samples) -> None:
    """One round: a page by itself, then a run of them."""
    access = _core.Access.read_write
    at = backend.reserve(run * page, backend.granularity)
    one = samples.time("create", lambda: backend.create_page(page))
    samples.time("map", lambda: backend.map(at, [one], page))
    samples.time("set_access", lambda: backend.set_access(at, page, access))
    samples.time("unmap", lambda: backend.unmap(at, page))
    pages = [one, *(backend.create_page(page) for _ in range(run - 1))]
    samples.time("map of a run", lambda: backend.map(at, pages, page))
    samples.time("set_access of a run", lambda: backend.set_access(at, run * page, access))
    samples.time("unmap of a run", lambda: backend.unmap(at, run * page))
    samples.time("release", lambda: backend.destroy_page(one))
    for each in pages[1:]:
        backend.destroy_page(each)
    backend.release(at, run * page)


def _raw(ctx: Context, page: int, samples: Samples) -> None:
    """One round of the same, straight to the driver. A backend's call of the same name may do its bookkeeping as well."""
    driver = ctx.driver
    at = driver.reserve(page)
    handle = samples.time("create", lambda: driver.create(page))
    samples.time("map", lambda: driver.map(at, page, handle))
    samples.time("set_access", lambda: driver.set_access(at, page))
    samples.time("unmap", lambda: driver.unmap(at, page))
    samples.time("release", lambda: driver.release(handle))
    driver.free_addresses(at, page)


@measure("driver calls", full_s=10, quick_s=2)
def driver_calls(ctx: Context) -> Iterator[Figure]:
    """create, map, set_access, unmap, release per page of 2 MiB and 64 MiB; set_access once for a run of 64 pages."""
    backend = ctx.backend()
    for page in (2 * MIB, 64 * MIB):
        size = f"{page // MIB} MiB"
        run = min(RUN, ctx.free_bytes // 2 // page) if not ctx.emulated else 4
        if run < 2:
            raise Skip(f"two pages of {size} do not fit into half of the free device memory")
        ours, theirs = Samples(), Samples()
        most = ctx.pick(200, 50, 5) if page == 2 * MIB else ctx.pick(40, 10, 3)
        with ctx.driver:
            for index in ctx.rounds(most + 2, least=5, share=0.45):
                if index == 2:  # the first calls warm the driver up
                    ours, theirs = Samples(), Samples()
                _through_backend(backend, page, run, ours)
                _raw(ctx, page, theirs)
        for name, taken in ours.taken.items():
            in_run = name.endswith("run")
            title = f"{name} ({run} pages of {size})" if in_run else f"{name}, a page of {size}"
            raw = theirs.taken.get(name)
            yield seconds(
                title,
                taken,
                shown=name in SHOWN[page],
                per_page_us=statistics.median(taken) * 1e6 / (run if in_run else 1),
                raw_us=statistics.median(raw) * 1e6 if raw else None,
            )
        each = [a + b for a, b in zip(ours.taken["map"], ours.taken["set_access"])]
        raw_each = [a + b for a, b in zip(theirs.taken["map"], theirs.taken["set_access"])]
        yield ratio(f"map + set_access, backend / driver, {size}", each, raw_each, shown=False)
