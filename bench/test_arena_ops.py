"""The arena's own operations: exchanging views against mapping them anew and against copying; reverting; compaction."""

from __future__ import annotations

import ctypes
import time

import numpy as np
from measure import SMOLLM2_LAYER_BYTES, Abandoned, RawTenant, median, record, seconds_of

import remap
from remap import _core
from remap.internals import internals

PAGE = 2 << 20
PAGES = 8


def test_exchange_against_map_and_against_copy(benchmark):
    backend = _core.make_host_backend(2 * PAGES * PAGE, PAGE, 1)
    size = PAGES * PAGE
    pages = [backend.create_page(PAGE) for _ in range(2 * PAGES)]
    here, there = backend.reserve(size, PAGE), backend.reserve(size, PAGE)

    def show(at: int, which: list[int]) -> None:
        backend.map(at, which, PAGE)
        backend.set_access(at, size, _core.Access.read_write)
        backend.populate(at, size)

    first, second = pages[:PAGES], pages[PAGES:]
    show(here, first)
    show(there, second)
    _core.fill_bytes(here, size, 1)
    _core.fill_bytes(there, size, 2)
    times: dict[str, list[float]] = {"map": [], "copy": []}

    def others() -> None:
        nonlocal first, second
        ctypes.memmove(there, here, PAGE)  # warm
        begun = time.perf_counter()
        ctypes.memmove(there, here, size)
        times["copy"].append(time.perf_counter() - begun)
        _core.fill_bytes(there, size, 2)
        begun = time.perf_counter()
        backend.unmap(here, size)
        show(here, first)
        times["map"].append(time.perf_counter() - begun)

    def exchange() -> None:
        backend.exchange(here, there, size)
        backend.exchange(here, there, size)

    assert backend.can_exchange
    backend.exchange(here, there, size)
    assert ctypes.string_at(here, size) == b"\2" * size
    assert ctypes.string_at(there, size) == b"\1" * size
    backend.exchange(here, there, size)
    benchmark.pedantic(exchange, setup=others, rounds=60)
    assert ctypes.string_at(here, size) == b"\1" * size
    each = [seconds / (2 * PAGES) for seconds in seconds_of(benchmark)]
    ours = median(each)
    record(benchmark, "exchange of views, per 2 MiB", ours * 1e6, "us", each)
    for name, samples in times.items():
        theirs = [seconds / PAGES for seconds in samples]
        title = "unmap + map + populate" if name == "map" else "memcpy"
        record(benchmark, f"{title} / exchange", median(theirs) / ours, "x", theirs)
    for at in (here, there):
        backend.unmap(at, size)
        backend.release(at, size)
    for page in pages:
        backend.destroy_page(page)


def test_revert_of_one_layer(benchmark):
    """`remap` back by one layer, and until its bytes are in place again; against copying them alone."""
    with RawTenant(8, SMOLLM2_LAYER_BYTES) as raw:
        plain = np.zeros(SMOLLM2_LAYER_BYTES, np.uint8)
        copies: list[float] = []
        decided: list[float] = []
        target: list[int] = []

        def setup() -> None:
            remap.advanced.remap(raw.session, "raw", 3, 2, "nested")
            raw.verify()
            target[:] = sorted(set(raw.tenant.streamed) - set(internals(raw.tenant)._state.select(2, 2, "nested")))
            internals(raw.tenant)._state.prefetcher.drain()
            begun = time.perf_counter()
            ctypes.memmove(plain.ctypes.data, raw.masters[target[0]].ctypes.data, plain.nbytes)
            copies.append(time.perf_counter() - begun)

        def revert() -> None:
            begun = time.perf_counter()
            remap.advanced.remap(raw.session, "raw", 2, 2, "nested")
            decided.append(time.perf_counter() - begun)
            with Abandoned(), raw.tenant.forward():
                raw.tenant.wait(target[0])
                raise Abandoned.Pass

        benchmark.pedantic(revert, setup=setup, rounds=20)
        raw.verify()
        samples = seconds_of(benchmark)
        record(benchmark, "revert of a 14 MB layer, until it is there", median(samples) * 1e6, "us", samples)
        record(benchmark, "revert, the call alone", median(decided) * 1e6, "us", decided)
        ratio = median(mine / theirs for mine, theirs in zip(samples, copies))
        record(benchmark, "revert / memcpy of the layer", ratio, "x", samples)


def test_compaction_rate(benchmark):
    """Live blocks are moved out of the pages of one layer that is given back; against a plain copy of as many bytes."""
    with RawTenant(8, SMOLLM2_LAYER_BYTES) as raw:
        kv = internals(raw.tenant).kv
        moved: list[int] = []
        copies: list[float] = []
        held: list[int] = []
        block_bytes = kv.spec.block_bytes

        def setup() -> None:
            if held:
                kv.free(held)
            remap.advanced.remap(raw.session, "raw", 0)
            remap.advanced.remap(raw.session, "raw", 4, 2, "nested")
            raw.verify()
            internals(raw.tenant)._state.prefetcher.drain()
            ids = kv.allocate(kv.free_blocks)
            keep = max(1, len(ids) // 8)
            kv.free(ids[:-keep])  # the highest ones stay: they lie in the pages that go first
            held[:] = ids[-keep:]
            for number, block in enumerate(held):
                _core.fill_bytes(kv.address + block * block_bytes, block_bytes, number % 251)

        def compact() -> None:
            report = remap.advanced.remap(raw.session, "raw", 3, 2, "nested")
            moved.append(len(report.moved.get("raw", {})))
            held[:] = [report.moved.get("raw", {}).get(block, block) for block in held]

        def plain() -> None:
            size = max(1, moved[-1] * block_bytes)
            source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
            begun = time.perf_counter()
            ctypes.memmove(target.ctypes.data, source.ctypes.data, size)
            copies.append(time.perf_counter() - begun)

        benchmark.pedantic(compact, setup=setup, rounds=12)
        for number, block in enumerate(held):
            got = ctypes.string_at(kv.address + block * block_bytes, block_bytes)
            assert got == bytes([number % 251]) * block_bytes, f"block {block} was moved wrongly"
        for _ in range(12):
            plain()
        samples = seconds_of(benchmark)
        seconds = median(samples)
        nbytes = median(moved) * block_bytes
        assert nbytes
        record(benchmark, "compaction, 14 MB layer given back", seconds * 1e6, "us", samples, blocks=moved[-1])
        record(benchmark, "compaction rate / memcpy", median(copies) / seconds, "x", samples, bytes=nbytes)
