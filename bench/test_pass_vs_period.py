"""Passes that stream against what `schedule.period` says of the same layer and copy times: what the machinery loses.

The computation is a hash without the GIL that touches no memory to speak of. Its times, and those of the copies, are taken
in the very passes that are judged (they disturb each other on a small machine, which is not the schedule's fault).
"""

from __future__ import annotations

import hashlib
import statistics
import time

import pytest
from measure import SMOLLM2_LAYER_BYTES, RawTenant, record

from remap import schedule

LAYERS = 8
PASSES = 24
WARM_UP = 4
GRID = [(alpha, beta) for beta in (1, 2) for alpha in (1, 2, 4, LAYERS - beta)]
_ratios: list[float] = []


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
    return min(raw.session._changes.copy_seconds(
        raw.session.layer_address("raw", 0), raw.masters[0].ctypes.data, SMOLLM2_LAYER_BYTES
    ) for _ in range(5))  # fmt: skip


@pytest.mark.parametrize("compute_per_copy", [0.5, 2.0])
@pytest.mark.parametrize(("alpha", "beta"), GRID)
def test_pass_against_period(benchmark, raw, iterations_per_s, copy_s, alpha, beta, compute_per_copy):
    raw.session.remap("raw", 0)
    raw.session.remap("raw", alpha, beta)
    raw.verify()
    tenant = raw.tenant
    wait, done, clock = tenant.wait, tenant.done, time.perf_counter
    iterations = max(1, int(iterations_per_s * copy_s * compute_per_copy))
    computed: list[list[float]] = []

    def one_pass() -> None:
        row = []
        with tenant.forward():
            for layer in range(LAYERS):
                wait(layer)
                begun = clock()
                hashlib.pbkdf2_hmac("sha256", b"remap", b"bench", iterations)
                row.append(clock() - begun)
                done(layer)
        computed.append(row)

    for _ in range(WARM_UP):
        one_pass()
    computed.clear()
    before = tenant._prefetcher.stats()
    benchmark.pedantic(one_pass, rounds=PASSES)
    after = tenant._prefetcher.stats()
    raw.verify()
    passes = benchmark.stats.stats.data
    copied = after.timed_bytes - before.timed_bytes
    transfer = (after.copy_s - before.copy_s) / copied * SMOLLM2_LAYER_BYTES if copied else 0.0
    # Means on both sides: the period is nearly additive in them, and a hiccup in one copy lengthens one pass.
    compute = [statistics.fmean(column) for column in zip(*computed)]
    predicted = schedule.period(compute, [transfer] * LAYERS, tenant.streamed, beta)
    ratio = statistics.fmean(passes) / predicted
    _ratios.append(ratio)
    record(
        benchmark,
        f"pass / period, alpha = {alpha}, beta = {beta}, compute = {compute_per_copy:g} copies",
        ratio,
        "x",
        passes,
        predicted_us=predicted * 1e6,
        compute_us=statistics.fmean(compute) * 1e6,
        copy_us=transfer * 1e6,
        stall_us=(after.stall_s - before.stall_s) / PASSES * 1e6,
    )
    if len(_ratios) == 2 * len(GRID):
        record(
            benchmark, "pass / period, median of the grid", statistics.median(_ratios), "x", passes, target=1.05,
            worst=max(_ratios),
        )  # fmt: skip
