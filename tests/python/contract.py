"""What the two halves of the backend conformance suite share: the backends, and things made in them and taken back.

The sim backend has bytes behind its pages here; test_sim_backend.py tests what it does without. The cuda backend runs on the
emulated driver, with pages of 64 KiB. With REMAP_TEST_CUDA=1 it runs on a GPU, and pages have its granularity, 2 MiB: on an H200
it has passed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
from emulated import Emulated, find

from remap import _core

ON_GPU = os.environ.get("REMAP_TEST_CUDA") == "1"
PAGE = (2 << 20) if ON_GPU else (64 << 10)
PAGES = 16
WAIT_S = 20.0
Access = _core.Access

# Set by the fixture for one backend of which the processor could see pages itself: tests look at them through copies all the
# same, as they must on a GPU.
through_copies = False


@cache
def driver() -> Emulated:
    return Emulated(find())


def host() -> Any:
    return _core.make_host_backend(PAGES * PAGE, PAGE, 1)


@cache
def kept() -> Any:
    """A backend of the GPU that stays for the whole run and holds the primary context: else the last backend that a test
    destroys takes the context down, and the next test builds it anew."""
    return _core.make_cuda_backend()


def cuda() -> Any:
    """A GPU with all of its memory, or an emulated one with 16 pages."""
    if ON_GPU:
        kept()
        return _core.make_cuda_backend()
    driver().configure(granularity=PAGE, memory=PAGES * PAGE)
    return _core.make_cuda_backend(library=driver().path)


def sim() -> Any:
    """A device in virtual time whose pages hold bytes: 16 of them. Driver calls and copies take time."""
    return _core.make_sim_backend(
        capacity_bytes=PAGES * PAGE,
        granularity=PAGE,
        h2d_bytes_per_s=20e9,
        d2h_bytes_per_s=15e9,
        hbm_bytes_per_s=1e12,
        duplex=0.8,
        copy_setup_s=1e-6,
        create_page_s=2e-4,
        map_s=1e-6,
        set_access_s=4e-5,
        unmap_s=3e-5,
        backed=True,
    )


def limited(inner: Any) -> Any:
    most = {"page_bytes": PAGES * PAGE, "reserved_bytes": 1 << 40, "mappings": 10**6, "host_bytes": 1 << 40}
    return _core.make_limit_backend(inner, **most, streams=99, events=99)


def stacked(inner: Any) -> Any:
    return _core.make_fault_backend(_core.make_trace_backend(limited(inner)))


BACKENDS: dict[str, Callable[[], Any]] = {
    "host": host,
    "trace": lambda: _core.make_trace_backend(host()),
    "limit": lambda: limited(host()),
    "fault": lambda: _core.make_fault_backend(host()),
    "stacked": lambda: stacked(host()),
    "cuda": cuda,
    "cuda-stacked": lambda: stacked(cuda()),
    "sim": sim,
    "sim-stacked": lambda: stacked(sim()),
}
# Those with room for 16 pages exactly.
BOUNDED = set(BACKENDS) - ({"cuda"} if ON_GPU else set())


def refuses(backend: Any, kind: type[Exception], call: str, *arguments: tuple[Any, ...]) -> None:
    """Each of these calls raises `kind` and changes nothing."""
    for each in arguments:
        before = backend.usage()
        with pytest.raises(kind) as caught:
            getattr(backend, call)(*each)
        assert type(caught.value) is kind, each
        assert backend.usage() == before, each


@contextmanager
def region(backend: Any, slots: int, alignment: int = PAGE) -> Iterator[int]:
    at = backend.reserve(slots * PAGE, alignment)
    yield at
    backend.release(at, slots * PAGE)


@contextmanager
def pages(backend: Any, count: int, page_bytes: int = PAGE) -> Iterator[list[int]]:
    made = [backend.create_page(page_bytes) for _ in range(count)]
    yield made
    for page in made:
        backend.destroy_page(page)


@contextmanager
def shown(backend: Any, handles: list[int], at: int | None = None, page_bytes: int = PAGE) -> Iterator[int]:
    """`handles` behind a region of their own (or at `at`), readable and writable."""
    bytes_ = len(handles) * page_bytes
    with region(backend, bytes_ // PAGE) if at is None else nullcontext(at) as place:
        backend.map(place, handles, page_bytes)
        backend.set_access(place, bytes_, Access.read_write)
        yield place
        backend.unmap(place, bytes_)


@contextmanager
def written(backend: Any, count: int, *, where: int | None = None) -> Iterator[tuple[list[int], int]]:
    """Pages, and where they are shown: all bytes of the n-th are n + 1."""
    with pages(backend, count) as handles, shown(backend, handles, where) as at:
        for index in range(count):
            poke(backend, at + index * PAGE, index + 1)
        yield handles, at


@contextmanager
def host_memory(backend: Any, bytes_: int) -> Iterator[int]:
    at = backend.allocate_host(bytes_)
    yield at
    backend.free_host(at, bytes_)


@contextmanager
def stream_and_event(backend: Any) -> Iterator[tuple[int, int]]:
    stream, event = backend.create_stream(), backend.create_event()
    yield stream, event
    backend.destroy_stream(stream)
    backend.destroy_event(event)


def poke_host(at: int, value: int, count: int = PAGE) -> None:
    ctypes.memset(at, value, count)


def peek_host(at: int, count: int = PAGE) -> set[int]:
    return set(ctypes.string_at(at, count))


def poke(backend: Any, at: int, value: int, count: int = PAGE) -> None:
    """Write bytes of pages."""
    if backend.host_addressable and not through_copies:
        poke_host(at, value, count)
        return
    with stream_and_event(backend) as (stream, event):
        backend.fill(stream, at, value, count)
        finished(backend, event, stream)


def read(backend: Any, at: int, count: int) -> bytes:
    """Bytes of pages."""
    if backend.host_addressable and not through_copies:
        return ctypes.string_at(at, count)
    with host_memory(backend, count) as to, stream_and_event(backend) as (stream, event):
        backend.copy(stream, to, at, count)
        finished(backend, event, stream)
        return ctypes.string_at(to, count)


def peek(backend: Any, at: int, count: int = PAGE) -> set[int]:
    """The values that bytes of pages have."""
    return set(read(backend, at, count))


def each_page(backend: Any, at: int, count: int) -> list[int]:
    """The one value that each of these pages has."""
    found = [peek(backend, at + index * PAGE) for index in range(count)]
    assert all(len(values) == 1 for values in found), found
    return [value for values in found for value in values]


def finished(backend: Any, event: int, stream: int | None = None) -> None:
    """Recorded behind what the stream has to do, if one is named."""
    if stream is not None:
        backend.record(event, stream)
    assert backend.synchronize(event, WAIT_S), "the event did not complete"
