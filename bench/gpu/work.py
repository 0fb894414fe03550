"""Something for the device to compute, of a length that can be chosen: matrix products with torch, fills without."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from .context import MIB, Context
from .registry import missing
from .timing import Marks

__all__ = ["Work", "calibrated", "work"]


class Work(Protocol):
    """`units` of work on the stream, enqueued and not waited for. kind: what it is, for the report."""

    kind: str

    def launch(self, units: int) -> None:
        """Enqueue it."""


class Fills:
    """The driver's own memset over scratch memory: bound by the device's memory, and there without torch."""

    kind = "fills"

    def __init__(self, backend: Any, stream: int, address: int, nbytes: int) -> None:
        self._backend, self._stream, self._address, self._bytes = backend, stream, address, nbytes

    def launch(self, units: int) -> None:
        for _ in range(units):
            self._backend.fill(self._stream, self._address, 0, self._bytes)


class Products:
    """bfloat16 matrix products of random numbers: bound by arithmetic, as prefill is."""

    kind = "matrix products"

    def __init__(self, stream: int, size: int) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.ExternalStream(stream)
        self._a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        self._b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        self._out = torch.empty_like(self._a)
        torch.cuda.current_stream().synchronize()

    def launch(self, units: int) -> None:
        with self._torch.cuda.stream(self._stream):
            for _ in range(units):
                self._torch.mm(self._a, self._b, out=self._out)


@contextmanager
def work(ctx: Context, backend: Any, stream: int) -> Iterator[Work]:
    """Matrix products where torch has the GPU, fills elsewhere. A unit is some tens of microseconds on a large GPU."""
    if missing("torch-cuda", emulated=ctx.emulated) is None:
        yield Products(stream, 2048)
        return
    nbytes = ctx.pick(128 * MIB, 128 * MIB, 2 * MIB)
    with ctx.buffers(device=nbytes) as (address, _):
        yield Fills(backend, stream, address, nbytes)
        ctx.driver.synchronize(stream)  # the memory goes away


def calibrated(made: Work, marks: Marks, stream: int) -> float:
    """Seconds of one unit, as part of a long row of them."""
    made.launch(8)
    return statistics.median(marks.timed(stream, lambda: made.launch(32)) for _ in range(5)) / 32
