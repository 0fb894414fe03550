# SPDX-License-Identifier: Apache-2.0
"""remap's figures at vLLM's /metrics.

vLLM's own statistics have no room for a plugin's figures, and the engine and /metrics run in different processes. So
the engine's process writes its figures into a small file after every pass (and every second, where others use its memory), and
the processes that serve /metrics read the file for each request. REMAP_METRICS_FILE names the file. The first process (the
one that serves) sets that name for the processes that it starts, and removes the file when it ends; the next server removes the
file of a server that was killed.

Each engine (data parallelism) has its own place in the file, and each field there one writer: the worker of rank 0, or the
scheduler, which may be in another process. Any number of processes may read, without a lock: every field is eight aligned
bytes. A reader may see fields of two successive passes, but never half a field.
"""

from __future__ import annotations

import atexit
import math
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import REGISTRY, Collector
from vllm.v1.metrics.loggers import StatLoggerBase

from remap.adapters.settings import enabled
from remap.internals import internals

from . import engine_internals

__all__ = ["FIELDS", "Beyond", "RemapStats", "Repeated", "Writer", "read"]

VARIABLE = "REMAP_METRICS_FILE"
EVERY_S = 1.0
# name, help text, whether the figure is a counter
FIELDS = (
    ("alpha", "Layers' worth of weights that are KV cache now", False),
    ("layers", "Layers of the model", False),
    ("cold_layers", "Layers without pages: the model has given them up until its next request", False),
    ("usable_blocks", "KV blocks that may be used now", False),
    ("max_blocks", "Most KV blocks that may be used", False),
    ("passes", "Forward passes", True),
    ("copies", "Layers streamed in", True),
    ("copied_bytes", "Bytes of weights streamed in", True),
    ("stall_seconds", "Time for which computation waited for a layer", True),
    ("misses", "Layers that were waited for", True),
    ("shortages", "Steps whose demand was more than the free KV blocks", True),
    ("refusals", "Of these, steps in which growth was refused, at least in part", True),
    ("moved_blocks", "KV blocks that moved because theirs had to leave", True),
    ("allocations_beyond", "Allocations for running requests beyond the KV blocks of the start", True),
    ("admissions_beyond", "Waiting requests that were admitted beyond the KV blocks of the start", True),
)
_OF_SCHEDULER = 2  # the last fields are the scheduler's, the others its worker's
_PREFIX, _SUFFIX = "remap-vllm-", ".metrics"
_FORMAT = struct.Struct(f"{len(FIELDS)}d")


def file() -> Path:
    """The file of this server.

    The first process that calls this names the file, for itself and for the processes that it starts, and removes it at
    exit.
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
            with suppress(OSError):  # another user's file, or another process has just removed it
                path.unlink()


class _Fields:
    """The fields first..stop-1 of one engine's place in the file."""

    def __init__(self, engine: int, first: int, stop: int) -> None:
        end = (engine + 1) * _FORMAT.size
        with os.fdopen(os.open(file(), os.O_RDWR | os.O_CREAT, 0o600), "r+b") as stream:
            # Never truncate the file: another engine may have mapped it.
            os.posix_fallocate(stream.fileno(), 0, end)
            self._memory = mmap.mmap(stream.fileno(), end)
        self._format = struct.Struct(f"{stop - first}d")
        self._start = engine * _FORMAT.size + 8 * first

    def put(self, *values: float) -> None:
        # pack_into would write zeros first, and a reader might see them.
        self._memory[self._start : self._start + self._format.size] = self._format.pack(*values)


class Writer:
    """Writes the figures of one engine's worker; rank 0 has it. most: the KV blocks that vLLM knows; the tenant may have more."""

    def __init__(self, engine: int = 0, most: float = math.inf) -> None:
        self._fields, self._most = _Fields(engine, 0, len(FIELDS) - _OF_SCHEDULER), most
        self._lock = threading.Lock()  # between the engine's thread and `Repeated`: no counter falls

    def write(self, tenant: Any, moved: int = 0) -> None:
        """moved: KV blocks that have moved."""
        within = internals(tenant)
        with self._lock:
            stats, (met, refused) = within.stats(), within.shortages
            layers, blocks = (
                (tenant.remapped, tenant.layers, len(within.cold)),
                (tenant.kv.usable_blocks, tenant.kv.max_blocks),
            )
            counted = (
                stats.passes,
                stats.copies,
                stats.copied_bytes,
                stats.stall_s,
                stats.misses,
                met + refused,
                refused,
            )
            self._fields.put(*layers, *(min(each, self._most) for each in blocks), *counted, moved)


class Repeated:
    """write() every `EVERY_S` seconds, in a thread of its own: in an arena that others use the figures change while an engine
    sleeps, and no pass shows them."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write, self._over = write, threading.Event()
        self._thread = threading.Thread(target=self._run, name="remap-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._write()

    def stop(self) -> None:
        """It has written for the last time."""
        self._over.set()
        self._thread.join()


class Beyond:
    """Counts what only the blocks that remap opened made possible; the scheduler has it. blocks: those of the start.

    Without remap vLLM would have preempted a request for such an allocation, and let such a request wait. It counts more of
    them than there would have been preemptions: after one there is room for the next.
    """

    def __init__(self, blocks: int, engine: int = 0) -> None:
        self._blocks = blocks
        self._fields = _Fields(engine, len(FIELDS) - _OF_SCHEDULER, len(FIELDS))
        self.running = self.waiting = 0
        self._fields.put(0, 0)  # the file may be that of an engine before

    def allocated(self, used: int, running: bool) -> None:
        """A request got blocks, and `used` are in use now. running: it ran already."""
        if used > self._blocks:
            self.running += running
            self.waiting += not running
            self._fields.put(self.running, self.waiting)


def read() -> dict[int, dict[str, float]]:
    """engine -> name -> the present figure, without engines that have not written yet."""
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
    """Register the collector with registries that vLLM makes itself; see `engine_internals.collect_in_every_registry`."""
    engine_internals.collect_in_every_registry(_Collector())


class RemapStats(StatLoggerBase):
    """The class of the entry point `vllm.stat_logger_plugins`. vLLM makes it where it serves /metrics.

    It only registers the collector.
    """

    _registered = False

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        if enabled(os.environ) and not RemapStats._registered:
            file()
            REGISTRY.register(_Collector())
            RemapStats._registered = True

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the figures come from the file."""

    def log_engine_initialized(self) -> None:
        """Does nothing."""
