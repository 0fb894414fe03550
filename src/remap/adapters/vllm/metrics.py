"""What remap does, at vLLM's /metrics.

The engine's process writes ten numbers into a small file after every pass, the process that serves /metrics reads them when it is
asked. vLLM's own statistics have no place for a plugin's, and the two are different processes. REMAP_METRICS_FILE names the file;
whoever comes first (the one that serves) names it for those that it starts.

One writer (rank 0, its engine's thread), any number of readers, no lock: every field is eight aligned bytes, and a reader may see
fields of two passes that follow each other, never a torn one.
"""

from __future__ import annotations

import atexit
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import REGISTRY, Collector
from vllm.v1.metrics.loggers import StatLoggerBase

from remap.adapters.settings import enabled

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
_FORMAT = struct.Struct(f"{len(FIELDS)}d")


def file() -> Path:
    """The file of this engine. The first to ask names it, for itself and for the processes it starts, and removes it."""
    if VARIABLE not in os.environ:
        path = Path(tempfile.gettempdir()) / f"remap-vllm-{os.getpid()}.metrics"
        os.environ[VARIABLE] = str(path)
        atexit.register(path.unlink, missing_ok=True)
    return Path(os.environ[VARIABLE])


class Writer:
    """Rank 0's."""

    def __init__(self) -> None:
        # Not cut: another engine of this process may have it mapped.
        with os.fdopen(os.open(file(), os.O_RDWR | os.O_CREAT, 0o600), "r+b") as stream:
            stream.truncate(_FORMAT.size)
            self._memory = mmap.mmap(stream.fileno(), _FORMAT.size)

    def write(self, tenant: Any) -> None:
        stats = tenant._prefetcher.stats()
        alpha, layers, blocks, most = tenant.remapped, tenant.layers, tenant.kv.usable_blocks, tenant.kv.max_blocks
        counted = (stats.passes, stats.copies, stats.copied_bytes, stats.stall_s, stats.misses)
        _FORMAT.pack_into(self._memory, 0, alpha, layers, blocks, most, *counted)


def read() -> dict[str, float]:
    """The present numbers by name, {} while no engine has written any."""
    try:
        content = file().read_bytes()
    except FileNotFoundError:
        return {}
    if len(content) != _FORMAT.size:  # made this moment
        return {}
    return dict(zip((name for name, _, _ in FIELDS), _FORMAT.unpack(content)))


class _Collector(Collector):
    def collect(self) -> Iterator[Any]:
        values = read()
        for name, text, rises in FIELDS:
            if name in values:
                family = CounterMetricFamily if rises else GaugeMetricFamily
                yield family(f"remap_{name}", text, value=values[name])


class RemapStats(StatLoggerBase):
    """For the entry point `vllm.stat_logger_plugins`: made where vLLM serves /metrics. It only registers the collector."""

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
