"""The host link while the device computes: what copies lose to kernels, and kernels to copies."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

from bench.gpu.context import MIB, Context
from bench.gpu.registry import measure
from bench.gpu.results import Figure, figure, ratio
from bench.gpu.timing import marks
from bench.gpu.work import Products, Work

from .link import Link

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


def copy_beside(link: Link, stream: int, load: Work, unit_s: float, alone_s: float) -> float:
    """Seconds per copy while kernels run that outlast the copies by half."""
    marks, backend = link.marks, link.backend
    load.launch(2)  # nothing is timed before the kernels are on
    begun = marks.mark(stream)
    load.launch(max(4, int(1.5 * COPIES * alone_s / unit_s)))
    last = marks.mark(stream)
    backend.stream_wait(link.up, begun)
    first = marks.mark(link.up)
    for _ in range(COPIES):
        link.h2d()
    ended = marks.mark(link.up)
    marks.wait(ended)
    marks.wait(last)
    taken = marks.between(first, ended)
    marks.reset()
    return taken / COPIES


def kernel_beside(link: Link, stream: int, load: Work, unit_s: float, alone_s: float) -> float:
    """Seconds per unit of the kernel while copies run that outlast the kernels by half."""
    marks, backend = link.marks, link.backend
    units = max(4, int(COPIES * alone_s / unit_s / 1.5))
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


@measure("link under load", needs=("torch-cuda",), full_s=16, quick_s=5)
def link_under_load(ctx: Context) -> Iterator[Figure]:
    """H2D beside matrix products and beside a memory-bound kernel, and what each costs the other."""
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
                alone: list[float] = []
                unit: list[float] = []
                copied: list[float] = []
                slowed: list[float] = []
                for index in ctx.rounds(ctx.pick(16, 6, 3), share=0.45):
                    load.launch(4)
                    made.wait(made.mark(stream))
                    alone_s = link.seconds(("h2d",), COPIES) / COPIES
                    unit_s = made.timed(stream, partial(load.launch, 16)) / 16
                    copy_s = copy_beside(link, stream, load, unit_s, alone_s)
                    kernel_s = kernel_beside(link, stream, load, unit_s, alone_s)
                    if index:
                        alone.append(alone_s)
                        unit.append(unit_s)
                        copied.append(copy_s)
                        slowed.append(kernel_s)
                link.verify()
                rate = size / statistics.median(copied) / 1e9
                alone_rate = size / statistics.median(alone) / 1e9
                yield figure(f"link h2d beside {load.kind}", rate, "GB/s", copied, alone_GBps=alone_rate)
                yield ratio(f"{load.kind} beside copies / alone", slowed, unit)
        finally:
            link.close()
