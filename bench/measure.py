"""What the benchmarks share: order statistics, the list of results against targets, and tenants without a model.

A result is a ratio or a time with the target that it should meet. Missing a target fails no test: a loaded machine proves
nothing. It is shown in the closing table and written to the JSON, with `met`.

With --benchmark-disable every benchmark runs once, as a test of what it asserts (`make bench-check`). There are no statistics
then: `seconds_of` is a NaN, `rounds` is 1, `behind` leaves the only round there is, `median` and `percentile` of nothing are NaN,
and `record` records nothing. Benchmarks are written against these, so that none of them asks which of the two it is.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import remap
from remap import _core
from remap_serve.sim.results import percentile

SMOLLM2_LAYER_BYTES = 14_160_384
"""One layer of SmolLM2-135M in float32: 3 x 576 x 1536 + 2 x 576 x 576 + 2 x 576 x 192 + 2 x 576 numbers."""


@dataclass(frozen=True)
class Result:
    """One line of the closing table. `target` None: reported only. `at_least`: larger is better."""

    name: str
    value: float
    unit: str
    target: float | None
    at_least: bool
    n: int
    median_us: float
    p99_us: float

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def to_json(self) -> dict[str, Any]:
        """For the JSON's list of targets."""
        return {**asdict(self), "met": self.met}


RESULTS: list[Result] = []
"""In the order in which the benchmarks ran; conftest.py prints and saves them."""


def rounds(benchmark: Any, count: int, otherwise: int = 1) -> int:
    """`count` where times are measured, else `otherwise`."""
    return count if benchmark.enabled else otherwise


def seconds_of(benchmark: Any) -> list[float]:
    """Seconds of each round that pytest-benchmark has measured; a NaN where it has measured none."""
    return list(benchmark.stats.stats.data) if benchmark.enabled else [math.nan]


def behind(warm_up: int, taken: Sequence[Any]) -> Sequence[Any]:
    """What was taken behind the first `warm_up` rounds; the last one where there were no more."""
    return taken[warm_up:] or taken[-1:]


def median(samples: Iterable[float]) -> float:
    """NaN of nothing."""
    return statistics.median(list(samples) or [math.nan])


def record(
    benchmark: Any,
    name: str,
    value: float,
    unit: str,
    samples_s: Sequence[float],
    *,
    target: float | None = None,
    at_least: bool = False,
    **more: Any,
) -> None:
    """Put a result into the table and into the benchmark's extra_info. samples_s: seconds of the measured side."""
    if not benchmark.enabled:
        return
    result = Result(
        name,
        value,
        unit,
        target,
        at_least,
        len(samples_s),
        statistics.median(samples_s) * 1e6,
        percentile(samples_s, 0.99) * 1e6,
    )
    RESULTS.append(result)
    ratio = value if unit == "x" else value / target if target else None
    entry = {**result.to_json(), "ratio": ratio, **more}
    benchmark.extra_info.setdefault("results", []).append(entry)
    # The first result of a benchmark is what it is about.
    for key in ("ratio", "n", "median_us", "p99_us", "target", "met"):
        benchmark.extra_info.setdefault(key, entry[key])
    benchmark.extra_info.setdefault("machine", machine())


def machine() -> dict[str, Any]:
    """What the numbers depend on. No names of hosts or folders."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "shmem_huge_pages": huge.read_text().strip() if huge.exists() else "unknown",
        "load_1min": round(os.getloadavg()[0], 2),
    }


class RawTenant:
    """A session with one tenant of random bytes: `layers` layers of `layer_bytes` each. A context manager.

    There is no memory to spare: all KV beyond `min_blocks` comes from layers. `traced` puts the trace backend (logging
    off, counting on) between the arena and the host.
    """

    def __init__(
        self,
        layers: int,
        layer_bytes: int,
        *,
        page_bytes: int = 2 << 20,
        copy_threads: int = 1,
        traced: bool = False,
        config: remap.advanced.Knobs | None = None,
        copy_chunk_bytes: int = 0,
    ) -> None:
        rng = np.random.default_rng(layers)
        self.masters = [rng.integers(0, 256, layer_bytes, dtype=np.uint8) for _ in range(layers)]
        self.layers, self.layer_bytes = layers, layer_bytes
        blocks_bytes = 2 * layers * 16 * 3 * 64 * 2  # 16 tokens of SmolLM2's KV heads in bfloat16, in every layer
        layer_pages = -(-layer_bytes // page_bytes)
        first_pages = -(-4 * blocks_bytes // page_bytes)
        capacity = (layers * layer_pages + first_pages) * page_bytes
        spec = remap.KVSpec(
            layers=layers,
            kv_heads=3,
            head_dim=64,
            min_blocks=4,
            max_blocks=capacity // blocks_bytes + 1,
            block_tokens=16,
        )
        self.trace = None
        backend = None
        if traced:
            self.trace = _core.make_trace_backend(_core.make_host_backend(capacity, page_bytes, copy_threads))
            self.trace.set_logging(False)
            backend = self.trace
        self.session = remap.Session(
            capacity,
            page_bytes=page_bytes,
            config=config,
            platform=remap.advanced.Platform(
                backend=backend, copy_threads=copy_threads, copy_chunk_bytes=copy_chunk_bytes
            ),
        )
        self.tenant = self.session.attach_bytes(self.masters, name="raw", kv=spec)

    def __enter__(self) -> RawTenant:
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()

    def bytes_of(self, layer: int) -> np.ndarray:
        """The layer's bytes where the engine reads them, shape (layer_bytes,), uint8. Valid between wait and done."""
        address = remap.advanced.layer_address(self.session, "raw", layer)
        return np.frombuffer((ctypes.c_uint8 * self.layer_bytes).from_address(address), np.uint8)

    def verify(self, *, passes: int = 1) -> None:
        """Passes that compare every layer's bytes with its master copy. They count as abandoned: no times are learnt."""
        for _ in range(passes):
            with Abandoned(), self.tenant.forward():
                for layer in range(self.layers):
                    self.tenant.wait(layer)
                    assert np.array_equal(self.bytes_of(layer), self.masters[layer]), f"layer {layer}: wrong bytes"
                    self.tenant.done(layer)
                raise Abandoned.Pass
        remap.advanced.check(self.session)


class Abandoned:
    """Swallows the exception with which a benchmark leaves a pass that must not count as a measurement."""

    class Pass(Exception):
        """Raised inside the pass."""

    def __enter__(self) -> Abandoned:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        return kind is Abandoned.Pass
