"""What remap does, at vLLM's /metrics.

The engine's process writes some numbers into a small file after every pass, those that serve /metrics read them when
they are asked. vLLM's own statistics have no place for a plugin's, and these are different processes.
REMAP_METRICS_FILE names the file; whoever comes first (the one that serves) names it for those that it starts, and
removes it; one that was killed leaves its file to the next that starts.

Each engine (data parallelism) has its place in the file, and one writer (rank 0, its engine's thread); any number of
readers, no lock: every field is eight aligned bytes, and a reader may see fields of two passes that follow each other,
never a torn one.
"""

from __future__ import annotations

import atexit
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import REGISTRY, Collector
from vllm.v1.metrics.loggers import StatLoggerBase

from remap.adapters.settings import enabled

from . import internals

__all__ = ["FIELDS", "RemapStats", "Writer", "read"]

VARIABLE = "REMAP_METRICS_FILE"
# name, help, whether it only ever rises
FIELDS = (
    ("alpha", "Layers' worth of weights that are KV cache now", False),
    ("layers", "Layers of the model", False),
    ("usable_blocks", "KV blocks that may be used now", False),
    ("max_blocks", "KV blocks there could be", False),
    ("passes", "Forward passes", True),
    ("copies", "Layers streamed in", True),
    ("copied_bytes", "Bytes of weights streamed in", True),
    ("stall_seconds", "Time for which computation waited for a layer", True),
    ("misses", "Layers that were waited for", True),
)
_PREFIX, _SUFFIX = "remap-vllm-", ".metrics"
_FORMAT = struct.Struct(f"{len(FIELDS)}d")


def file() -> Path:
    """The file of this server.

    The first to ask names it, for itself and for the processes it starts, and removes it.
    """
    if VARIABLE not in os.environ:
        _sweep()
        path = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getpid()}{_SUFFIX}"
        os.environ[VARIABLE] = str(path)
        atexit.register(path.unlink, missing_ok=True)
    return Path(os.environ[VARIABLE])


def _sweep() -> None:
    """Remove the files of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_SUFFIX}"):
        owner = path.name[len(_PREFIX) : -len(_SUFFIX)]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with suppress(OSError):  # somebody else's, or removed by somebody else just now
                path.unlink()


class Writer:
    """Rank 0's of one engine."""

    def __init__(self, engine: int = 0) -> None:
        end = (engine + 1) * _FORMAT.size
        with os.fdopen(os.open(file(), os.O_RDWR | os.O_CREAT, 0o600), "r+b") as stream:
            # Never cut: another engine may have it mapped.
            os.posix_fallocate(stream.fileno(), 0, end)
            self._memory = mmap.mmap(stream.fileno(), end)
        self._start = engine * _FORMAT.size

    def write(self, tenant: Any) -> None:
        stats = tenant.stats()
        alpha, layers, blocks, most = tenant.remapped, tenant.layers, tenant.kv.usable_blocks, tenant.kv.max_blocks
        counted = (stats.passes, stats.copies, stats.copied_bytes, stats.stall_s, stats.misses)
        # Not pack_into: that writes zeros first, and a reader may see them.
        self._memory[self._start : self._start + _FORMAT.size] = _FORMAT.pack(alpha, layers, blocks, most, *counted)


def read() -> dict[int, dict[str, float]]:
    """The present numbers by engine and name, without engines that have not written any."""
    try:
        content = file().read_bytes()
    except FileNotFoundError:
        return {}
    names = [name for name, _, _ in FIELDS]
    whole = len(content) // _FORMAT.size * _FORMAT.size
    engines = [dict(zip(names, values)) for values in _FORMAT.iter_unpack(content[:whole])]
    return {index: values for index, values in enumerate(engines) if values["layers"]}


class _Collector(Collector):
    def collect(self) -> Iterator[Any]:
        engines = read()
        if not engines:
            return
        for name, text, rises in FIELDS:
            family = (CounterMetricFamily if rises else GaugeMetricFamily)(f"remap_{name}", text, labels=["engine"])
            for index, values in engines.items():
                family.add_metric([str(index)], values[name])
            yield family


def collect_everywhere() -> None:
    """In the registries that vLLM makes of its own: see `internals.collect_in_every_registry`."""
    internals.collect_in_every_registry(_Collector())


class RemapStats(StatLoggerBase):
    """For the entry point `vllm.stat_logger_plugins`: made where vLLM serves /metrics.

    It only registers the collector.
    """

    _registered = False

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        if enabled(os.environ) and not RemapStats._registered:
            file()
            REGISTRY.register(_Collector())
            RemapStats._registered = True

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the figures come from the file."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
