"""The host link while the device computes: what copies lose to kernels, and kernels to copies."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from bench.gpu.context import MIB, Context
from bench.gpu.registry import measure
from bench.gpu.results import Figure, figure, ratio
from bench.gpu.timing import marks
from bench.gpu.work import Products, Work

from .link import DIRECTIONS, Link

COPIES = 8


class Additions:
    """torch's a + b -> c over tensors far larger than any cache: bound by the device's memory."""

    kind = "memory-bound kernels"

    def __init__(self, stream: int, nbytes: int) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.ExternalStream(stream)
        self._a = torch.randn(nbytes // 2, device="cuda", dtype=torch.bfloat16)
        self._b = torch.randn_like(self._a)
        self._out = torch.empty_like(self._a)
        torch.cuda.current_stream().synchronize()

    def launch(self, units: int) -> None:
        """`units` additions, enqueued."""
        with self._torch.cuda.stream(self._stream):
            for _ in range(units):
                self._torch.add(self._a, self._b, out=self._out)


def units_for(seconds: float, unit_s: float) -> int:
    """Units of work that take so long; bounded, so that a wrong estimate costs no minutes."""
    return max(4, min(4096, int(seconds / unit_s)))


def copies_beside(
    link: Link, stream: int, load: Work, directions: tuple[str, ...], unit_s: float, alone_s: float
) -> float:
    """Seconds per copy while kernels run that outlast the copies by half. alone_s: the same without kernels."""
    load.launch(2)  # nothing is timed before the kernels are on
    begun = link.marks.mark(stream)
    load.launch(units_for(1.5 * COPIES * alone_s, unit_s))
    taken = link.seconds(directions, COPIES, after=begun)
    link.marks.wait(link.marks.mark(stream))
    link.marks.reset()
    return taken / COPIES


def kernel_beside(link: Link, stream: int, load: Work, unit_s: float, alone_s: float) -> float:
    """Seconds per unit of the kernel while copies run that outlast the kernels by half."""
    marks, backend = link.marks, link.backend
    units = units_for(COPIES * alone_s / 1.5, unit_s)
    link.h2d()
    begun = marks.mark(link.up)
    for _ in range(COPIES):
        link.h2d()
    backend.stream_wait(stream, begun)
    first = marks.mark(stream)
    load.launch(units)
    ended = marks.mark(stream)
    last = marks.mark(link.up)
    marks.wait(ended)
    marks.wait(last)
    taken = marks.between(first, ended)
    marks.reset()
    return taken / units


@dataclass
class Taken:
    """Seconds of each kind, of one load: copies alone and beside it by direction, the kernel alone and beside copies."""

    alone: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in DIRECTIONS})
    beside: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in DIRECTIONS})
    kernel: list[float] = field(default_factory=list)
    slowed: list[float] = field(default_factory=list)


def _one_load(ctx: Context, link: Link, stream: int, load: Work) -> Taken:
    marks, taken = link.marks, Taken()
    for index in ctx.rounds(ctx.pick(16, 6, 2) + 1, share=0.45):
        if index == 1:  # the first round warms everything up
            taken = Taken()
        load.launch(4)
        marks.wait(marks.mark(stream))
        unit_s = marks.timed(stream, partial(load.launch, 16)) / 16
        taken.kernel.append(unit_s)
        for name, directions in DIRECTIONS.items():
            alone_s = link.seconds(directions, COPIES) / COPIES
            taken.alone[name].append(alone_s)
            taken.beside[name].append(copies_beside(link, stream, load, directions, unit_s, alone_s))
        taken.slowed.append(kernel_beside(link, stream, load, unit_s, taken.alone["h2d"][-1]))
    return taken


@measure("link under load", needs=("torch-cuda",), full_s=10, quick_s=3)
def link_under_load(ctx: Context) -> Iterator[Figure]:
    """The link beside matrix products and beside a memory-bound kernel, and what copies to the device cost each."""
    size = ctx.fit(2 * 128 * MIB, unit=4 * MIB, host=True) // 2
    backend = ctx.backend()
    with (
        marks(backend) as made,
        ctx.buffers(device=2 * size, host=2 * size) as (device, host),
        ctx.stream() as stream,
    ):
        backend.adopt_stream(stream)
        link = Link(ctx, backend, made, device, host, size)
        try:
            for load in (Products(stream, 8192), Additions(stream, 512 * MIB)):
                taken = _one_load(ctx, link, stream, load)
                link.verify()
                for name, directions in DIRECTIONS.items():
                    nbytes = size * len(directions) / 1e9
                    yield figure(
                        f"link {name} beside {load.kind}",
                        nbytes / statistics.median(taken.beside[name]),
                        "GB/s",
                        taken.beside[name],
                        shown=name == "h2d",
                        alone_GBps=nbytes / statistics.median(taken.alone[name]),
                    )
                yield ratio(f"{load.kind} beside copies / alone", taken.slowed, taken.kernel)
        finally:
            link.close()
