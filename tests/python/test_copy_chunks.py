"""Copies of layers in chunks: the same bytes, more pieces, one copy to whoever waits or counts."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
from byte_world import spec

import remap
from remap import _core
from remap.internals import internals

LAYERS, SIZE = 8, 20_000  # five pages each
MASTERS = [bytes((17 * layer + at) % 251 for at in range(SIZE)) for layer in range(LAYERS)]


def passes(session: remap.Session, tenant: remap.Tenant, count: int) -> None:
    for _ in range(count):
        with tenant.forward():
            for layer in range(LAYERS):
                tenant.wait(layer)
                assert ctypes.string_at(remap.advanced.layer_address(session, "model", layer), SIZE) == MASTERS[layer]
                tenant.done(layer)


@pytest.mark.parametrize("chunk", [0, 100, 4096, "6KiB", 19_999, 20_000, 1 << 30])
@pytest.mark.parametrize("selection", ["nested", "slices"])
def test_every_chunk_size_brings_the_same_bytes(chunk, selection):
    trace = _core.make_trace_backend(_core.make_host_backend(2 << 20, 4096))
    platform = remap.advanced.Platform(backend=trace, copy_chunk_bytes=chunk)
    config = remap.advanced.Knobs(selection=selection)
    with remap.Session(2 << 20, platform=platform, page_bytes=4096, config=config) as session:
        tenant = session.attach_bytes(MASTERS, name="model", kv=replace(spec(), max_blocks=400))
        passes(session, tenant, 2)

        def counts() -> tuple[int, int, int]:
            copies = internals(tenant)._state.prefetcher.stats().copies
            return copies, trace.count(_core.Call.copy), trace.count(_core.Call.fill)

        before = counts()
        remap.advanced.remap(session, "model", 2)
        passes(session, tenant, 3)
        remap.advanced.remap(session, "model", 0)
        remap.advanced.settle(session)
        passes(session, tenant, 2)
        copies, pieces, gaps = (now - then for now, then in zip(counts(), before))
        assert copies > 0 and pieces == copies + gaps
        if chunk in (0, 20_000, 1 << 30):
            assert gaps == 0
        elif selection == "nested":
            size = {"6KiB": 6144}.get(chunk, chunk)
            assert pieces == copies * -(-SIZE // size)


@pytest.mark.parametrize("chunk", [-1, "many", 0.5, True])
def test_a_bad_chunk_size_is_refused(chunk):
    with pytest.raises(remap.InvalidArgument) as refused:
        remap.advanced.Platform(copy_chunk_bytes=chunk)
    assert refused.value.name == "copy_chunk_bytes"
