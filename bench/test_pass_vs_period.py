"""Passes that stream against what `schedule.period` says of the same layer and copy times: what the machinery loses.

The computation is a hash without the GIL that touches no memory to speak of. Its times, and those of the copies, are taken
in the very passes that are judged (they disturb each other on a small machine, which is not the schedule's fault). Medians
everywhere. Where the computing or the copying thread had to wait for a core for over 1 % of a pass, somebody else was
running: `undisturbed` holds the ratio without these passes, and how many are left.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from measure import SMOLLM2_LAYER_BYTES, RawTenant, behind, median, record

import remap
from remap.internals import internals
from remap.policy import schedule

LAYERS = 8
PASSES = 24
WARM_UP = 4
GRID = [(alpha, beta) for beta in (1, 2) for alpha in (1, 2, 4, LAYERS - beta)]
_ratios: list[float] = []
_undisturbed: list[float] = []


@pytest.fixture(scope="module")
def raw():
    with RawTenant(LAYERS, SMOLLM2_LAYER_BYTES) as made:
        yield made


def _hash_for(iterations: int) -> float:
    begun = time.perf_counter()
    hashlib.pbkdf2_hmac("sha256", b"remap", b"bench", iterations)
    return time.perf_counter() - begun


@pytest.fixture(scope="module")
def iterations_per_s():
    return 20000 / min(_hash_for(20000) for _ in range(5))


@pytest.fixture(scope="module")
def copy_s(raw):
    return min(raw.session._streams.copy_seconds(
        remap.advanced.layer_address(raw.session, "raw", 0), raw.masters[0].ctypes.data, SMOLLM2_LAYER_BYTES
    ) for _ in range(5))  # fmt: skip


class Delays:
    """Seconds for which this thread and the copying ones have waited for a core so far."""

    def __init__(self) -> None:
        own = threading.get_native_id()
        self._files = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(
                FileNotFoundError, ProcessLookupError
            ):  # a thread that has ended since, or a kernel without these
                if task.name == str(own) or (task / "comm").read_text().startswith("remap-stream"):
                    self._files.append(os.open(task / "schedstat", os.O_RDONLY))

    def read(self) -> float:
        return sum(self._waited_ns(file) for file in self._files) * 1e-9

    @staticmethod
    def _waited_ns(file: int) -> int:
        try:
            return int(os.pread(file, 64, 0).split()[1])
        except ProcessLookupError:  # a stream that was about to end when the threads were listed
            return 0

    def close(self) -> None:
        for file in self._files:
            os.close(file)


@pytest.fixture
def delays() -> Iterator[Delays]:
    made = Delays()
    yield made
    made.close()


@dataclass(frozen=True)
class Pass:
    """Seconds: of the pass, of each layer's computation, of the copies' mean, of waiting for a core."""

    pass_s: float
    compute_s: tuple[float, ...]
    copy_s: float | None
    delay_s: float


def _ratio(passes: Sequence[Pass], streamed: Sequence[int], buffers: int) -> tuple[float, float, float, float]:
    """(measured / predicted, predicted pass, computation of a layer, copy of a layer), of the passes' medians, in seconds."""
    compute = [median(column) for column in zip(*(each.compute_s for each in passes))]
    copies = [each.copy_s for each in passes if each.copy_s is not None]
    copy = median(copies) if copies else 0.0
    predicted = schedule.period(compute, [copy] * LAYERS, streamed, buffers)
    measured = median(each.pass_s for each in passes)
    return measured / predicted, predicted, statistics.fmean(compute), copy


@pytest.mark.parametrize("compute_per_copy", [0.5, 2.0])
@pytest.mark.parametrize(("alpha", "beta"), GRID)
def test_pass_against_period(benchmark, raw, iterations_per_s, copy_s, delays, alpha, beta, compute_per_copy):
    remap.advanced.remap(raw.session, "raw", 0)
    remap.advanced.remap(raw.session, "raw", alpha, beta)
    raw.verify()
    tenant = raw.tenant
    wait, done, stats, clock = tenant.wait, tenant.done, internals(tenant)._state.prefetcher.stats, time.perf_counter
    iterations = max(1, int(iterations_per_s * copy_s * compute_per_copy))
    passes: list[Pass] = []

    def one_pass() -> None:
        row = []
        before, delayed, start = stats(), delays.read(), clock()
        with tenant.forward():
            for layer in range(LAYERS):
                wait(layer)
                begun = clock()
                hashlib.pbkdf2_hmac("sha256", b"remap", b"bench", iterations)
                row.append(clock() - begun)
                done(layer)
        ended, after = clock(), stats()
        copied = after.timed_bytes - before.timed_bytes
        copy = (after.copy_s - before.copy_s) / copied * SMOLLM2_LAYER_BYTES if copied else None
        passes.append(Pass(ended - start, tuple(row), copy, delays.read() - delayed))

    benchmark.pedantic(one_pass, rounds=PASSES, warmup_rounds=WARM_UP)
    raw.verify()
    passes = list(behind(WARM_UP, passes))
    ratio, predicted, compute, copy = _ratio(passes, tenant.streamed, beta)
    calm = [each for each in passes if each.delay_s <= 0.01 * each.pass_s]
    undisturbed = _ratio(calm, tenant.streamed, beta)[0] if len(calm) >= 3 else None
    _ratios.append(ratio)
    if undisturbed is not None:
        _undisturbed.append(undisturbed)
    samples = [each.pass_s for each in passes]
    record(
        benchmark,
        f"pass / period, alpha = {alpha}, beta = {beta}, compute = {compute_per_copy:g} copies",
        ratio,
        "x",
        samples,
        undisturbed=undisturbed,
        undisturbed_passes=len(calm),
        predicted_us=predicted * 1e6,
        compute_us=compute * 1e6,
        copy_us=copy * 1e6,
    )
    if len(_ratios) == 2 * len(GRID):
        name = "pass / period, median of the grid"
        record(benchmark, name, median(_ratios), "x", samples, target=1.05, worst=max(_ratios))
        if _undisturbed:
            name = f"the same of undisturbed passes, {len(_undisturbed)} of {len(_ratios)} cells"
            record(benchmark, name, median(_undisturbed), "x", samples, worst=max(_undisturbed))
