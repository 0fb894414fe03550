"""Streaming layers against a plain memcpy of the same bytes: what the schedule, its events and its thread cost.

One round is one pass that streams every layer with nothing computed in between, after one plain copy of the same masters
into as many buffers of ordinary memory, touched before, with one thread and with two. Target: 0.95 of the better one.
"""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from measure import SMOLLM2_LAYER_BYTES, RawTenant, behind, median, record, rounds, seconds_of

import remap
from remap.internals import internals

LAYERS = 8
ROUNDS = 40


class PlainCopy:
    """ctypes.memmove (without the GIL) of all masters into `buffers` buffers in turn, split among `threads` threads."""

    def __init__(self, masters: list[np.ndarray], buffers: int) -> None:
        self.masters = masters
        self.targets = [np.zeros_like(masters[0]) for _ in range(buffers)]
        self.pool = ThreadPoolExecutor(1)
        for threads in (1, 2):
            self.run(threads)
        assert all(np.array_equal(self.targets[i % buffers], m) for i, m in list(enumerate(masters))[-buffers:])

    def run(self, threads: int) -> float:
        """Seconds."""
        size = self.masters[0].nbytes
        half = size // 2 if threads == 2 else size
        begun = time.perf_counter()
        jobs = []
        for index, master in enumerate(self.masters):
            target, source = self.targets[index % len(self.targets)].ctypes.data, master.ctypes.data
            if threads == 2:
                # The second thread copies the other halves of all layers, without waiting for the first in between.
                jobs.append(self.pool.submit(ctypes.memmove, target + half, source + half, size - half))
        for index, master in enumerate(self.masters):
            ctypes.memmove(self.targets[index % len(self.targets)].ctypes.data, master.ctypes.data, half)
        for job in jobs:
            job.result()
        return time.perf_counter() - begun


@pytest.mark.parametrize("copy_threads", [1, 2])
@pytest.mark.parametrize("buffers", [1, 2])
def test_streaming_against_memcpy(benchmark, buffers, copy_threads):
    with RawTenant(LAYERS, SMOLLM2_LAYER_BYTES, copy_threads=copy_threads) as raw:
        remap.advanced.remap(raw.session, "raw", LAYERS - buffers, buffers)
        raw.verify(passes=2)
        plain = PlainCopy(raw.masters, buffers)
        wait, done = raw.tenant.wait, raw.tenant.done
        times: dict[int, list[float]] = {1: [], 2: []}

        def plainly() -> None:
            internals(raw.tenant)._state.prefetcher.drain()  # copies issued ahead must not run beside the plain one
            for threads, samples in times.items():
                samples.append(plain.run(threads))

        def stream() -> None:
            # Two passes: the first finds `buffers` layers loaded before the clock started, the second's last ones are
            # loaded after it stopped by no more than that, so exactly 2 x LAYERS - buffers copies are waited for.
            for _ in range(2):
                with raw.tenant.forward():
                    for layer in range(LAYERS):
                        wait(layer)
                        done(layer)

        copies = internals(raw.tenant)._state.prefetcher.stats().copies
        benchmark.pedantic(stream, setup=plainly, rounds=ROUNDS)
        assert internals(raw.tenant)._state.prefetcher.stats().copies - copies == 2 * LAYERS * rounds(benchmark, ROUNDS)
        raw.verify()
        ours = seconds_of(benchmark)
        per_copy = median(ours) / (2 * LAYERS - buffers)
        best = {threads: median(samples) / LAYERS for threads, samples in times.items()}
        least = min(min(samples) for samples in times.values()) / LAYERS
        record(
            benchmark,
            f"prefetch / memcpy, {buffers} buffers, {copy_threads} copy threads",
            min(best.values()) / per_copy,
            "x",
            ours,
            target=0.95 if buffers == 2 else None,
            at_least=True,
            ratio_of_minima=least / (min(ours) / (2 * LAYERS - buffers)),
            bytes_per_s=SMOLLM2_LAYER_BYTES / per_copy,
            memcpy_bytes_per_s={str(threads): SMOLLM2_LAYER_BYTES / seconds for threads, seconds in best.items()},
        )


@pytest.mark.parametrize("chunk_mib", [16, 32])
def test_chunks_against_whole_layers(benchmark, chunk_mib):
    """Layers of 128 MiB, streamed whole and in chunks, in turns. Target: 0.97 of the rate of whole ones."""
    layers, layer_bytes = 4, rounds(benchmark, 128, 40) << 20
    with (
        RawTenant(layers, layer_bytes) as whole,
        RawTenant(layers, layer_bytes, copy_chunk_bytes=chunk_mib << 20) as cut,
    ):
        times: dict[RawTenant, list[float]] = {whole: [], cut: []}
        for raw in times:
            remap.advanced.remap(raw.session, "raw", layers - 1, 1)
            raw.verify(passes=2)

        def stream(raw: RawTenant) -> float:
            begun = time.perf_counter()
            with raw.tenant.forward():
                for layer in range(layers):
                    raw.tenant.wait(layer)
                    raw.tenant.done(layer)
            internals(raw.tenant)._state.prefetcher.drain()
            return time.perf_counter() - begun

        turn = iter(range(1 << 30))

        def both() -> None:
            for raw in (whole, cut) if next(turn) % 2 else (cut, whole):
                times[raw].append(stream(raw))

        benchmark.pedantic(both, rounds=20, warmup_rounds=2)
        for raw in times:
            raw.verify()
        ours, theirs = behind(2, times[cut]), behind(2, times[whole])
        record(
            benchmark,
            f"prefetch in chunks of {chunk_mib} MiB / whole layers",
            median(theirs) / median(ours),
            "x",
            ours,
            target=0.97,
            at_least=True,
            ratio_of_minima=min(theirs) / min(ours),
            ratios=sorted(a / b for a, b in zip(theirs, ours)),
            bytes_per_s=layers * layer_bytes / median(ours),
        )
