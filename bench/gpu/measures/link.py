"""The host link: each direction and both at once; and against torch's own pinned copies."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Iterator
from typing import Any

from bench.gpu.context import MIB, Context
from bench.gpu.machine import gpu_state
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, figure, ratio
from bench.gpu.timing import Marks, marks

from remap import _core

PATTERN = 0xA7


class Link:
    """Two streams of the backend, a device buffer and two page-locked ones; `size` bytes a copy."""

    def __init__(self, ctx: Context, backend: Any, marks: Marks, device: int, host: int, size: int) -> None:
        self.ctx, self.backend, self.marks, self.size = ctx, backend, marks, size
        self.device, self.host = device, host
        self.up = backend.create_stream()
        self.down = backend.create_stream()

    def close(self) -> None:
        """Destroys the streams, which waits for them."""
        self.backend.destroy_stream(self.up)
        self.backend.destroy_stream(self.down)

    def h2d(self) -> None:
        """Enqueue one copy to the device."""
        self.backend.copy(self.up, self.device, self.host, self.size)

    def d2h(self) -> None:
        """Enqueue one copy to the host, from and to other memory than h2d."""
        self.backend.copy(self.down, self.host + self.size, self.device + self.size, self.size)

    def seconds(self, directions: tuple[str, ...], copies: int, after: int = 0) -> float:
        """Of `copies` copies in each direction, begun at the same moment, until the last of them has arrived.

        after: a mark of another stream that all of them wait for.
        """
        marks, backend = self.marks, self.backend
        if after:
            backend.stream_wait(self.up, after)
        begun = marks.mark(self.up)
        backend.stream_wait(self.down, begun)
        for _ in range(copies):
            for direction in directions:
                self.h2d() if direction == "h2d" else self.d2h()
        ends = [marks.mark(self.up if direction == "h2d" else self.down) for direction in directions]
        for end in ends:
            marks.wait(end)
        taken = max(marks.between(begun, end) for end in ends)
        marks.reset()
        return taken

    def verify(self) -> None:
        """A pattern goes up and comes down again."""
        host, backend = self.host, self.backend
        _core.fill_bytes(host, self.size, PATTERN)
        _core.fill_bytes(host + self.size, self.size, 0)
        self.h2d()
        backend.copy(self.up, host + self.size, self.device, self.size)
        self.marks.wait(self.marks.mark(self.up))
        self.marks.reset()
        if bytes_at(host + self.size, self.size) != bytes([PATTERN]) * self.size:
            raise Wrong("what was copied to the device and back is not what was sent")


def bytes_at(address: int, nbytes: int) -> bytes:
    """A copy of host memory."""
    return ctypes.string_at(address, nbytes)


DIRECTIONS = {"h2d": ("h2d",), "d2h": ("d2h",), "both": ("h2d", "d2h")}


def _sample(ctx: Context, link: Link, copies: int, rounds: int, share: float) -> dict[str, list[float]]:
    """Seconds per copy, directions taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in DIRECTIONS}
    for index in ctx.rounds(rounds + 1, share=share):
        for name, directions in DIRECTIONS.items():
            each = link.seconds(directions, copies) / copies
            if index:
                taken[name].append(each)
    return taken


@measure("link", full_s=12, quick_s=3)
def link_alone(ctx: Context) -> Iterator[Figure]:
    """H2D, D2H and both at once, by size. The largest size is the link's limit that others are compared with."""
    sizes = ctx.pick((2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB), (2 * MIB, 64 * MIB, 256 * MIB), (MIB, 4 * MIB))
    largest = ctx.fit(2 * sizes[-1], unit=4 * MIB, host=True) // 2
    backend = ctx.backend()
    with marks(backend) as made, ctx.buffers(device=2 * largest, host=2 * largest) as (device, host):
        for size in sizes:
            size = min(size, largest)
            copies = max(2, min(32, 256 * MIB // size)) if not ctx.emulated else 2
            link = Link(ctx, backend, made, device, host, size)
            try:
                link.verify()
                taken = _sample(ctx, link, copies, ctx.pick(30, 8, 3), share=0.4)
                link.verify()
            finally:
                link.close()
            for name, samples in taken.items():
                total = size * len(DIRECTIONS[name])
                yield figure(
                    f"link {name}, copies of {size // MIB} MiB",
                    total / statistics.median(samples) / 1e9,
                    "GB/s",
                    samples,
                    shown=size == min(sizes[-1], largest),
                    bytes=size,
                    nvidia_smi=gpu_state(ctx.probe["pcie"]) if size == largest and not ctx.emulated else None,
                )


@measure("torch pinned copies", needs=("torch-cuda",), full_s=5, quick_s=1.5)
def torch_copies(ctx: Context) -> Iterator[Figure]:
    """The backend's copies against `tensor.copy_(pinned, non_blocking=True)` of the same size, taking turns."""
    import torch

    size = ctx.fit(2 * 128 * MIB, unit=4 * MIB, host=True) // 2
    copies, backend = 8, ctx.backend()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    with marks(backend) as made, ctx.buffers(device=2 * size, host=2 * size) as (device, host):
        link = Link(ctx, backend, made, device, host, size)
        try:
            ours: list[float] = []
            theirs: list[float] = []
            for index in ctx.rounds(ctx.pick(30, 10, 3), share=0.9):
                begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begun.record()
                for _ in range(copies):
                    target.copy_(pinned, non_blocking=True)
                ended.record()
                ended.synchronize()
                own = link.seconds(("h2d",), copies) / copies
                if index:
                    theirs.append(begun.elapsed_time(ended) / 1e3 / copies)
                    ours.append(own)
            link.verify()
            yield ratio("copies, share of torch's pinned copies", ours, theirs, inverse=True, at_least=True, bytes=size)
        finally:
            link.close()
