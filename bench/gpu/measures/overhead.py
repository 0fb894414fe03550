"""What the brackets cost while nothing is remapped: forward, wait and done around a decode-like sequence of kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.gpu.context import MIB, Context
from bench.gpu.registry import measure, missing
from bench.gpu.results import Figure, figure, seconds
from bench.gpu.tenants import DeviceTenant, device_tenant
from bench.gpu.timing import Marks
from bench.gpu.work import Fills

LAYERS = 40
BLOCK = 4  # passes in a row of one side


class DecodeLike:
    """The kernels of one decode step of a 13B model for `batch` sequences, without attention: torch, on `stream`.

    Every layer uses the same weights, which are ten times larger than the cache of any GPU so far.
    """

    kind = "decode-like kernels"

    def __init__(self, stream: int, hidden: int, batch: int) -> None:
        import torch

        self.torch: Any = torch
        self.stream = torch.cuda.ExternalStream(stream)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

        self.square = [random(hidden, hidden) for _ in range(4)]
        self.up, self.down = random(4 * hidden, hidden), random(hidden, 4 * hidden)
        self.norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        self.x = random(batch, hidden)
        torch.cuda.current_stream().synchronize()

    def layer(self, _layer: int) -> None:
        """Enqueue one layer on torch's current stream."""
        functional = self.torch.nn.functional
        x = functional.layer_norm(self.x, self.norm.shape, self.norm)
        for weight in self.square:
            x = functional.linear(x, weight)
        x = functional.layer_norm(self.x + x, self.norm.shape, self.norm)
        functional.linear(functional.relu(functional.linear(x, self.up)), self.down)


def bracketed(raw: DeviceTenant, layer: Callable[[int], object]) -> None:
    """One pass as an engine runs it."""
    raw.run(layer)


def bare(raw: DeviceTenant, layer: Callable[[int], object]) -> None:
    """The same kernels, nothing else."""
    for index in range(raw.layers):
        layer(index)


Pass = Callable[[DeviceTenant, Callable[[int], object]], None]


def alternate(
    ctx: Context,
    raw: DeviceTenant,
    marks: Marks,
    sides: dict[str, Pass],
    layer: Callable[[int], object],
    rounds: int,
    share: float,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(device seconds, host seconds) a pass of each side: blocks of passes take turns, each begun on an idle device."""
    device: dict[str, list[float]] = {name: [] for name in sides}
    host: dict[str, list[float]] = {name: [] for name in sides}
    for index in ctx.rounds(rounds + 2, share=share):
        order = list(sides.items())
        for name, run in order if index % 2 else order[::-1]:
            first = marks.mark(raw.handle)
            begun = time.perf_counter()
            for _ in range(BLOCK):
                run(raw, layer)
            enqueued = time.perf_counter() - begun
            last = marks.mark(raw.handle)
            marks.wait(last)
            if index >= 2:
                device[name].append(marks.between(first, last) / BLOCK)
                host[name].append(enqueued / BLOCK)
            marks.reset()
    return device, host


def percent_more(name: str, ours_s: list[float], bare_s: list[float], target: float | None, **detail: Any) -> Figure:
    """By how many per cent the median of ours is longer."""
    base = statistics.median(bare_s)
    value = (statistics.median(ours_s) / base - 1) * 100
    return figure(name, value, "%", ours_s, target=target, bare_us=base * 1e6, **detail)


@measure("overhead with nothing remapped", full_s=10, quick_s=2.5)
def overhead(ctx: Context) -> Iterator[Figure]:
    """Device and host time of a pass with the brackets and without, and of two sides without (control)."""
    from contextlib import ExitStack

    with device_tenant(ctx, LAYERS, 2 * MIB) as (raw, marks), ExitStack() as made:
        layer: Callable[[int], object]
        if missing("torch-cuda", emulated=ctx.emulated) is None:
            kernels = DecodeLike(raw.stream, ctx.pick(5120, 5120, 0), 16)
            made.enter_context(kernels.torch.cuda.stream(kernels.stream))
            layer, kind = kernels.layer, kernels.kind
        else:
            nbytes = ctx.pick(256 * MIB, 256 * MIB, 2 * MIB)
            address, _ = made.enter_context(ctx.buffers(device=nbytes))
            fills = Fills(raw.backend, raw.handle, address, nbytes)

            def layer(_: int) -> None:
                fills.launch(1)

            kind = fills.kind
        sides: dict[str, Pass] = {"bare": bare, "ours": bracketed, "again": bare}
        device, host = alternate(ctx, raw, marks, sides, layer, ctx.pick(60, 20, 4), 0.9)
        raw.verify(marks)
    again = (statistics.median(device["again"]) / statistics.median(device["bare"]) - 1) * 100
    yield percent_more(
        "pass with nothing remapped, overhead", device["ours"], device["bare"], 0.5, control_percent=again, kernels=kind
    )
    added = (statistics.median(host["ours"]) - statistics.median(host["bare"])) / LAYERS
    yield figure("wait + done + bracket, host time a layer", added * 1e6, "us", host["ours"])
    yield seconds("pass with nothing remapped, device time", device["ours"], shown=False)
