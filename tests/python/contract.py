"""What the two halves of the backend conformance suite share: the backends, and things made in them and taken back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from remap import _core

PAGE = 64 << 10
PAGES = 16
WAIT_S = 20.0
Access = _core.Access


def host() -> Any:
    return _core.make_host_backend(PAGES * PAGE, PAGE, 1)


def limited(inner: Any) -> Any:
    return _core.make_limit_backend(
        inner,
        page_bytes=PAGES * PAGE,
        reserved_bytes=1 << 40,
        mappings=10**6,
        host_bytes=1 << 40,
        streams=99,
        events=99,
    )


BACKENDS: dict[str, Callable[[], Any]] = {
    "host": host,
    "trace": lambda: _core.make_trace_backend(host()),
    "limit": lambda: limited(host()),
    "fault": lambda: _core.make_fault_backend(host()),
    "stacked": lambda: _core.make_fault_backend(_core.make_trace_backend(limited(host()))),
}


@contextmanager
def refused(backend: Any, kind: type[Exception]) -> Iterator[None]:
    """The body raises `kind` and changes nothing."""
    before = backend.usage()
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    assert backend.usage() == before


@contextmanager
def region(backend: Any, slots: int, alignment: int = PAGE) -> Iterator[int]:
    at = backend.reserve(slots * PAGE, alignment)
    yield at
    backend.release(at, slots * PAGE)


@contextmanager
def pages(backend: Any, count: int) -> Iterator[list[int]]:
    made = [backend.create_page(PAGE) for _ in range(count)]
    yield made
    for page in made:
        backend.destroy_page(page)


@contextmanager
def shown(backend: Any, handles: list[int], at: int | None = None) -> Iterator[int]:
    """`handles` behind a region of their own (or at `at`), readable and writable."""
    bytes_ = len(handles) * PAGE
    own = at is None
    at = backend.reserve(bytes_, PAGE) if at is None else at
    backend.map(at, handles, PAGE)
    backend.set_access(at, bytes_, Access.read_write)
    yield at
    backend.unmap(at, bytes_)
    if own:
        backend.release(at, bytes_)


@contextmanager
def stream_and_event(backend: Any) -> Iterator[tuple[int, int]]:
    stream, event = backend.create_stream(), backend.create_event()
    yield stream, event
    backend.destroy_stream(stream)
    backend.destroy_event(event)


def poke(at: int, value: int, count: int = PAGE) -> None:
    ctypes.memset(at, value, count)


def peek(at: int, count: int = PAGE) -> set[int]:
    return set(ctypes.string_at(at, count))


def finished(backend: Any, event: int) -> None:
    assert backend.synchronize(event, WAIT_S), "the event did not complete"
