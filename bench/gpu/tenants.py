"""A session on the device with one tenant of random bytes, and passes over it on a stream: no model, no torch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import remap

from .context import MIB, Context
from .registry import Wrong
from .timing import Marks

__all__ = ["DeviceTenant", "device_tenant", "make_masters"]

PAGE = 2 * MIB
KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 4, 128, 16


class Leave(Exception):
    """Leaves a pass so that it counts as abandoned and no times are learnt from it."""


def make_masters(layers: int, layer_bytes: int) -> list[np.ndarray]:
    """Random bytes, another set for each layer, in memory of their own that begins at an operating system page."""
    masters = []
    for layer in range(layers):
        pattern = np.random.default_rng(layer).integers(0, 256, min(layer_bytes, 4 * MIB), dtype=np.uint8)
        # Private: a shared mapping's pages are not counted as this process's, and would weigh on the budget a second time.
        memory = mmap.mmap(-1, layer_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
        master = np.frombuffer(memory, np.uint8)
        for at in range(0, layer_bytes, len(pattern)):
            part = master[at : at + len(pattern)]
            part[:] = pattern[: len(part)]
            part[:8] = np.frombuffer(np.int64(at).tobytes(), np.uint8)[: len(part[:8])]
        masters.append(master)
    return masters


class DeviceTenant:
    """`layers` layers of `layer_bytes`, streamed or not, in an arena without memory to spare: all KV beyond the first
    blocks comes from layers. `stream`: the engine's, as the driver's handle. Made by `device_tenant`.
    """

    def __init__(
        self,
        ctx: Context,
        backend: Any,
        stream: int,
        layers: int,
        layer_bytes: int,
        *,
        page_bytes: int = PAGE,
        config: remap.advanced.Knobs | None = None,
        spare_bytes: int = 0,
        masters: list[np.ndarray] | None = None,
        copy_chunk_bytes: int | None = 0,
    ) -> None:
        self.ctx, self.backend, self.stream = ctx, backend, stream
        self.layers, self.layer_bytes, self.page_bytes = layers, layer_bytes, page_bytes
        self.masters = masters or make_masters(layers, layer_bytes)
        block_bytes = 2 * layers * BLOCK_TOKENS * KV_HEADS * HEAD_DIM * 2
        first = 4
        pages = layers * -(-layer_bytes // page_bytes) - (-first * block_bytes // page_bytes)
        self.capacity = pages * page_bytes + spare_bytes // page_bytes * page_bytes
        spec = remap.KVSpec(
            layers=layers,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            block_tokens=BLOCK_TOKENS,
            min_blocks=first,
            max_blocks=self.capacity // block_bytes + 1,
        )
        self.session = remap.Session(
            self.capacity,
            device="cuda:0",
            page_bytes=page_bytes,
            config=config,
            platform=remap.advanced.Platform(backend=backend, copy_chunk_bytes=copy_chunk_bytes),
        )
        try:
            self.tenant = self.session.attach_bytes(self.masters, name="raw", kv=spec)
        except BaseException:
            self.session.close()
            raise
        self.handle: int = backend.adopt_stream(stream)  # for marks; the session adopts it for itself

    def run(self, compute: Callable[[int], object] | None = None) -> None:
        """Enqueue one pass on the stream; `compute(layer)` enqueues the layer's computation. Waits for nothing."""
        tenant = self.tenant
        with tenant.forward(stream=self.stream):
            wait, done = tenant.wait, tenant.done
            for layer in range(self.layers):
                wait(layer)
                if compute is not None:
                    compute(layer)
                done(layer)

    def remap(self, layers: int, buffers: int = 2, selection: str = "uniform") -> None:
        """By hand, and until every region shows what it should."""
        remap.advanced.remap(self.session, "raw", layers, buffers, selection)
        remap.advanced.settle(self.session)

    def verify(self, marks: Marks) -> None:
        """One pass that reads every layer back through its region, and compares all bytes with the master copy."""
        nbytes = self.layer_bytes
        with self.ctx.buffers(host=nbytes) as (_, host):
            seen = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host))
            try:
                with self.tenant.forward(stream=self.stream):
                    for layer in range(self.layers):
                        self.tenant.wait(layer)
                        self.backend.copy(
                            self.handle, host, remap.advanced.layer_address(self.session, "raw", layer), nbytes
                        )
                        self.tenant.done(layer)
                        marks.wait(marks.mark(self.handle))
                        if not np.array_equal(seen, self.masters[layer]):
                            raise Wrong(f"layer {layer}: other bytes than its master copy")
                    raise Leave
            except Leave:
                pass
            finally:
                marks.reset()
        remap.advanced.check(self.session)


@contextmanager
def device_tenant(
    ctx: Context, layers: int, layer_bytes: int, *, traced: bool = False, **more: Any
) -> Iterator[tuple[DeviceTenant, Marks]]:
    """A tenant on a stream of its own, with marks on the same backend. Everything is given back at the end."""
    backend = ctx.backend(traced=traced)
    with ctx.stream() as stream:
        made = DeviceTenant(ctx, backend, stream, layers, layer_bytes, **more)
        marks = Marks(backend)
        try:
            yield made, marks
        finally:
            made.session.close()
            for event in marks.events:
                backend.destroy_event(event)
