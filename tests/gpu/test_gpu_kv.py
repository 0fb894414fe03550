"""KV in host memory on the device: blocks that go out, stream within passes and come home have their own bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from bench.gpu.tenants import make_masters

import remap
from remap.internals import internals

PAGE = 2 << 20
LAYERS, BLOCKS, PASSES = 4, 20, 4
SPEC = remap.KVSpec(
    layers=LAYERS,
    kv_heads=4,
    head_dim=128,
    min_blocks=256,
    max_blocks=512,
    layout="layer_major",
    host_blocks=64,
    streamed_blocks=64,
)


def test_streamed_kv_is_that_of_its_layer(raw: Any) -> None:
    """Several passes are enqueued before anybody waits, with and without layers that stream, while other requests write
    into the pages that the blocks left."""
    owner, marks = raw
    backend, handle = owner.backend, owner.handle
    platform = remap.advanced.Platform(backend=backend)
    with remap.Session(30 * PAGE, device="cuda:0", page_bytes=PAGE, platform=platform) as session:
        tenant = session.attach_bytes(make_masters(LAYERS, PAGE), name="kv", kv=SPEC)
        kv, geometry = internals(tenant).kv, internals(tenant).kv.geometry
        unit = geometry.unit_bytes
        ranges = 2 * LAYERS
        size = BLOCKS * ranges * unit
        host = backend.allocate_host((1 + PASSES) * size)
        try:
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * ((1 + PASSES) * size)).from_address(host))
            memory[:size] = np.random.default_rng(7).integers(1, 256, size, dtype=np.uint8)
            with tenant.forward(stream=owner.stream):
                for layer in range(LAYERS):
                    tenant.wait(layer)
                    tenant.done(layer)
            ids = kv.allocate(BLOCKS)
            for index, block in enumerate(ids):
                for r in range(ranges):
                    at = kv.address + r * geometry.range_bytes + block * unit
                    backend.copy(handle, at, host + (r * BLOCKS + index) * unit, unit)
            shown = kv.stream(kv.copy_out(ids, below=64))
            kv.free(ids)
            for block in kv.allocate(BLOCKS):  # whoever gets the pages writes into them at once
                for r in range(ranges):
                    backend.fill(handle, kv.address + r * geometry.range_bytes + block * unit, 0xEE, unit)
            for turn in range(PASSES):
                remap.advanced.remap(session, "kv", layers=turn % 2, buffers=2)
                with tenant.forward(stream=owner.stream, streamed=shown):
                    for layer in range(LAYERS):
                        tenant.wait(layer)
                        for index, block in enumerate(shown):
                            for r in (2 * layer, 2 * layer + 1):
                                at = kv.address + r * geometry.range_bytes + block * unit
                                backend.copy(handle, host + (1 + turn) * size + (r * BLOCKS + index) * unit, at, unit)
                        tenant.done(layer)
            marks.wait(marks.mark(handle))
            marks.reset()
            for turn in range(PASSES):
                seen = memory[(1 + turn) * size : (2 + turn) * size]
                assert np.array_equal(seen, memory[:size]), (
                    f"pass {turn}: some layer found another's KV, or other bytes"
                )
            assert internals(tenant).stats().block_bytes == PASSES * BLOCKS * SPEC.block_bytes
            kv.free(shown)
        finally:
            backend.free_host(host, (1 + PASSES) * size)
