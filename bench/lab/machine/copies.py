"""Copies and driver calls of a device, measured through the backend that sessions use: for `bench.lab machine`."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from remap.errors import DriverError

__all__ = ["backend_of", "low", "measure_copies", "measure_pages"]

PATIENCE_S = 20.0
PAGE_BYTES = 2 << 20


def backend_of(device: str, capacity: int) -> Any:
    """The backend of "cpu" or "cuda:N" with room for `capacity` bytes. Raises DriverError, InvalidArgument."""
    from remap.memory import device as devices

    return devices.resolve(device, capacity, PAGE_BYTES)[0]


def _page_bytes(backend: Any) -> int:
    """2 MiB, rounded up to the granularity: what driver calls are told apart by in the tables."""
    return int(-(-PAGE_BYTES // backend.granularity) * backend.granularity)


@dataclass(frozen=True)
class _Lane:
    """One direction's memory: a region of device memory, and host memory of the same size."""

    region: int
    host: int
    stream: Any
    before: Any
    after: Any


@contextmanager
def _lanes(backend: Any, nbytes: int, count: int) -> Iterator[list[_Lane]]:
    from remap import _core

    with ExitStack() as undo:
        found = []
        for _ in range(count):
            size = _page_bytes(backend)
            pages = []
            for _ in range(nbytes // size):
                pages.append(backend.create_page(size))
                undo.callback(backend.destroy_page, pages[-1])
            region = backend.reserve(nbytes, size)
            undo.callback(backend.release, region, nbytes)
            backend.map(region, pages, size)
            undo.callback(backend.unmap, region, nbytes)
            backend.set_access(region, nbytes, _core.Access.read_write)
            host = backend.allocate_host(nbytes)
            undo.callback(backend.free_host, host, nbytes)
            ctypes.memset(host, 0, nbytes)
            stream = backend.create_stream()
            undo.callback(backend.destroy_stream, stream)
            events = []
            for _ in range(2):
                events.append(backend.create_event())
                undo.callback(backend.destroy_event, events[-1])
            found.append(_Lane(region, host, stream, *events))
        yield found


def measure_copies(backend: Any, sizes: Sequence[int], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Groups h2d, d2h and both_ways of `remap_serve.sim.fit`: the lower quartile of `repeats` copies of each size, alone and with
    the other direction beside. Verified: what was sent comes back. Raises DriverError if it does not, or takes too long."""
    groups: dict[str, list[dict[str, float]]] = {"h2d": [], "d2h": [], "both_ways": []}
    page = _page_bytes(backend)
    largest = -(-max(sizes) // page) * page
    with _lanes(backend, largest, 2) as (down, up):
        pattern = os.urandom(largest)
        ctypes.memmove(down.host, pattern, largest)
        for lane in (down, up):  # every OS page of both is there before anything is timed
            _timed(backend, lane, True, 0, largest)
        for size in sizes:
            at = [size * index % (largest - size + 1) for index in range(repeats)]
            groups["h2d"].append({"bytes": size, "seconds": low(_timed(backend, down, True, o, size) for o in at)})
            groups["d2h"].append({"bytes": size, "seconds": low(_timed(backend, up, False, o, size) for o in at)})
        for size in sizes:
            pairs = [_both(backend, down, up, size) for _ in range(repeats)]
            groups["both_ways"].append(
                {
                    "bytes": size,
                    "h2d_seconds": low(pair[0] for pair in pairs),
                    "d2h_seconds": low(pair[1] for pair in pairs),
                }
            )
        ctypes.memset(up.host, 0, largest)
        _timed(backend, down, True, 0, largest)
        backend.copy(down.stream, up.host, down.region, largest)
        backend.record(down.after, down.stream)
        _wait(backend, down)
        if ctypes.string_at(up.host, largest) != pattern:
            raise DriverError(
                f"{largest} bytes came back different from what was sent; nothing was written; do not use this device",
                call="copy",
            )
    return groups


def low(seconds: Iterable[float]) -> float:
    """The lower quartile: what it takes when nothing else runs, without trusting the one best."""
    found = sorted(seconds)
    return found[(len(found) - 1) // 4]


def _enqueue(backend: Any, lane: _Lane, to_device: bool, offset: int, size: int) -> None:
    ends = (lane.region + offset, lane.host + offset)
    backend.copy(lane.stream, *(ends if to_device else reversed(ends)), size)


def _wait(backend: Any, lane: _Lane) -> float:
    if not backend.synchronize(lane.after, PATIENCE_S):
        raise DriverError(f"a copy took more than {PATIENCE_S:g} s; nothing was written", call="synchronize")
    return max(float(backend.elapsed(lane.before, lane.after)), 1e-9)


def _timed(backend: Any, lane: _Lane, to_device: bool, offset: int, size: int) -> float:
    backend.record(lane.before, lane.stream)
    _enqueue(backend, lane, to_device, offset, size)
    backend.record(lane.after, lane.stream)
    return _wait(backend, lane)


def _both(backend: Any, down: _Lane, up: _Lane, size: int) -> tuple[float, float]:
    """Seconds of one copy each way with the other way busy: the second of three, all enqueued at once."""
    for turn in range(3):
        for lane in (down, up):
            if turn == 1:
                backend.record(lane.before, lane.stream)
            _enqueue(backend, lane, lane is down, 0, size)
            if turn == 1:
                backend.record(lane.after, lane.stream)
    found = _wait(backend, down), _wait(backend, up)
    for lane in (down, up):
        backend.record(lane.after, lane.stream)
        _wait(backend, lane)
    return found


def measure_pages(backend: Any, count: int) -> dict[str, float]:
    """The mean seconds of each driver call for one page of 2 MiB, over `count` pages."""
    from remap import _core

    size = _page_bytes(backend)
    spent = dict.fromkeys(("create_page_s", "map_page_s", "set_access_s", "unmap_page_s"), 0.0)

    def timed(name: str, call: Any, *arguments: Any) -> Any:
        begun = time.perf_counter()
        result = call(*arguments)
        spent[name] += time.perf_counter() - begun
        return result

    with ExitStack() as undo:
        region = backend.reserve(count * size, size)
        undo.callback(backend.release, region, count * size)
        for index in range(count):
            at = region + index * size
            page = timed("create_page_s", backend.create_page, size)
            undo.callback(backend.destroy_page, page)
            timed("map_page_s", backend.map, at, [page], size)
            undo.callback(timed, "unmap_page_s", backend.unmap, at, size)
            timed("set_access_s", backend.set_access, at, size, _core.Access.read_write)
    return {name: max(seconds / count, 1e-9) for name, seconds in spent.items()}
