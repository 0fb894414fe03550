"""A model comes back: all its layers from host memory, against plain copies of as many bytes and torch_memory_saver.

While a model is inactive nothing points its layers elsewhere, so nothing has to point them back; one that streams its layers
needs every page of them mapped again, beside the copies. Pages and copies are as large as a session's on a GPU by default.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.context import MIB, Context, Skip
from bench.gpu.models import OPT_13B
from bench.gpu.registry import Wrong, measure, missing
from bench.gpu.results import Figure, figure, ratio, seconds
from bench.gpu.tenants import DeviceTenant, device_tenant
from bench.gpu.timing import Marks, timed

import remap
from remap.internals import internals
from remap.memory.device import usual_page_bytes

LAYERS = 16
BUFFERS = 2
PLAIN_BYTES = (
    4 << 30
)  # of host memory that plain copies read again and again: far more than any cache of the processor's


@dataclass
class Reloads:
    """Seconds of each round: until all layers were there, until the first was, of the call alone; and of plain copies."""

    ours: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    decided: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)


def take_turns(
    ctx: Context,
    raw: DeviceTenant,
    marks: Marks,
    copy_all: Callable[[], None],
    rounds: int,
    share: float,
    *,
    idle: bool,
) -> Reloads:
    """`remap` back to 0 and the first pass behind it; then as many bytes of plain copies. idle: the layers leave and come home
    while the tenant is inactive, and the call activates it."""
    tenant, stats, taken = raw.tenant, internals(raw.tenant)._state.prefetcher.stats, Reloads()
    for index in ctx.rounds(rounds + 1, share=share):
        if idle:
            raw.session.deactivate("raw")
        raw.remap(raw.layers - BUFFERS, BUFFERS)
        if not idle:
            raw.run()
        marks.wait(marks.mark(raw.handle))
        internals(tenant)._state.prefetcher.drain()
        marks.reset()
        at_rest = marks.mark(raw.handle)
        marks.wait(at_rest)
        before, begun = stats().copied_bytes, time.perf_counter()
        remap.advanced.remap(raw.session, "raw", 0)
        if idle:
            raw.session.activate("raw")
        called = time.perf_counter() - begun
        with tenant.forward(stream=raw.stream):
            for layer in range(raw.layers):
                tenant.wait(layer)
                if layer == 0:
                    there = marks.mark(raw.handle)
                tenant.done(layer)
            last = marks.mark(raw.handle)
        marks.wait(last)
        ended = time.perf_counter() - begun
        earliest = marks.between(at_rest, there)  # by the device's clock: the host may block in `wait` of a later layer
        copied, wanted = stats().copied_bytes - before, raw.layers * raw.layer_bytes
        if copied != wanted:
            raise Wrong(f"{copied} bytes were copied where {wanted} were to be reloaded")
        marks.reset()
        other = timed(copy_all)
        marks.reset()
        if index:
            taken.ours.append(ended)
            taken.first.append(earliest)
            taken.decided.append(called)
            taken.theirs.append(other)
    return taken


WAYS = {"streaming": False, "idle": True}


def measured(ctx: Context, layers: int, layer_bytes: int, rounds: int, share: float) -> dict[str, Reloads]:
    """A tenant of these layers, reloaded again and again in each of WAYS; every byte of it verified."""
    host_layers = max(1, min(layers, PLAIN_BYTES // layer_bytes))
    page = usual_page_bytes(layers * layer_bytes, "cuda:0", remap.advanced.Platform())
    with (
        device_tenant(ctx, layers, layer_bytes, page_bytes=page, copy_chunk_bytes=None) as (raw, marks),
        ctx.buffers(device=-(-layer_bytes // (2 * MIB)) * 2 * MIB, host=host_layers * layer_bytes) as (device, host),
    ):
        backend = raw.backend
        plain = backend.create_stream()

        def copy_all() -> None:
            for layer in range(layers):
                backend.copy(plain, device, host + layer % host_layers * layer_bytes, layer_bytes)
            marks.wait(marks.mark(plain))

        try:
            taken = {}
            for number, (way, idle) in enumerate(WAYS.items()):
                part = share / (len(WAYS) - number)
                taken[way] = take_turns(ctx, raw, marks, copy_all, rounds, part, idle=idle)
                raw.verify(marks)
        finally:
            backend.destroy_stream(plain)
    return taken


def figures(title: str, taken: Reloads, total: int) -> Iterator[Figure]:
    """The share of the link, and what comes before the last layer."""
    yield figure(
        f"{title}, share of the link",
        statistics.median(taken.theirs) / statistics.median(taken.ours),
        "x",
        taken.ours,
        target=0.95,
        at_least=True,
        GBps=total / statistics.median(taken.ours) / 1e9,
        plain_GBps=total / statistics.median(taken.theirs) / 1e9,
    )
    yield seconds(f"{title}, the call alone", taken.decided, shown=False)
    yield seconds(f"{title}, until the first layer is there", taken.first, shown=False)


@measure("reload of an idle model", full_s=14, quick_s=3)
def reload(ctx: Context) -> Iterator[Figure]:
    """All layers of a small model, taking turns with plain copies."""
    size = ctx.pick(256 * MIB, 64 * MIB, 2 * MIB)
    layer_bytes = ctx.fit(2 * LAYERS * size, unit=2 * LAYERS * 2 * MIB, host=True) // (2 * LAYERS)
    taken = measured(ctx, LAYERS, layer_bytes, ctx.pick(12, 5, 2), 0.8)
    for way, times in taken.items():
        yield from figures(
            f"reload, {way}, of {LAYERS} layers of {layer_bytes // MIB} MiB", times, LAYERS * layer_bytes
        )


# -- 13B ---------------------------------------------------------------------------------------------------------------


def saver_seconds(
    ctx: Context, torch: Any, saver: Any, device: str, nbytes: int, layers: int, share: float
) -> list[float]:
    """Seconds of torch_memory_saver's resume() of as many tensors, which it keeps a copy of in host memory."""
    if device == "cuda":
        saver.hook_mode = "torch"  # the other one has to be preloaded before the process begins
    with saver.region(enable_cpu_backup=True):
        held = [
            torch.full((nbytes // layers // 8,), layer, dtype=torch.int64, device=device) for layer in range(layers)
        ]
    taken: list[float] = []
    try:
        for index in ctx.rounds(4, share=share):
            saver.pause()
            _synchronize(torch, device)
            begun = time.perf_counter()
            saver.resume()
            _synchronize(torch, device)
            if index:
                taken.append(time.perf_counter() - begun)
            if any(int(tensor[at]) != layer for layer, tensor in enumerate(held) for at in (0, -1)):
                raise Wrong("torch_memory_saver brought other bytes back")
    finally:
        del held
    return taken


def _synchronize(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@measure("reload of a 13B model", full_s=45, quick_s=None)
def reload_13b(ctx: Context) -> Iterator[Figure]:
    """OPT-13b's layers (as many as fit), against plain copies in turns, and against torch_memory_saver where it is installed."""
    layer_bytes, wanted = ctx.pick(2 * OPT_13B.layer_params(), 2 * OPT_13B.layer_params(), 2 * MIB), OPT_13B.layers
    layers = ctx.fit(wanted * layer_bytes, unit=layer_bytes, host=True) // layer_bytes
    if layers < wanted // 4:
        raise Skip(f"only {layers} of {wanted} layers of {layer_bytes} bytes fit")
    taken = measured(ctx, layers, layer_bytes, ctx.pick(5, 3, 2), 0.5)
    total = layers * layer_bytes
    title = f"reload of {layers} of OPT-13b's {wanted} layers"
    for way, times in taken.items():
        yield from figures(f"{title}, {way}", times, total)
    reason = missing("torch-cuda", emulated=ctx.emulated) or missing("torch_memory_saver", emulated=ctx.emulated)
    if reason is not None:
        raise Skip(f"beside torch_memory_saver: {reason}")
    import torch
    from torch_memory_saver import torch_memory_saver

    theirs = saver_seconds(ctx, torch, torch_memory_saver, "cuda", total, layers, 0.8)
    yield seconds(
        f"{title}, torch_memory_saver's resume", theirs, shown=False, GBps=total / statistics.median(theirs) / 1e9
    )
    yield ratio(f"{title}, torch_memory_saver / remap", theirs, taken["idle"].ours)
