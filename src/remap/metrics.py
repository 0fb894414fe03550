# SPDX-License-Identifier: Apache-2.0
"""Figures of a session for Prometheus: names, types, units and labels (docs/metrics.md has them as a page).

    from prometheus_client import REGISTRY, start_http_server
    REGISTRY.register(remap.metrics.collector(session))
    start_http_server(9400, "127.0.0.1")

Nothing is kept up to date: each scrape takes one `session.snapshot()`. A broker's figures (`remap serve --metrics`) have the
same names, with a label `member`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from remap.errors import Error, InvalidArgument
from remap.extras import install
from remap.report import Snapshot

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(f"figures for Prometheus need prometheus-client; {install('metrics')}") from error

__all__ = [
    "SESSION",
    "TENANT",
    "TENANT_LABELS",
    "Family",
    "Reading",
    "collector",
    "counter",
    "families",
    "gauge",
    "read_snapshot",
]

Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True)
class Family:
    """name: without the `_total` that a counter has there. labels: beside those of who it is of. read(object): values of these
    labels, and the figure, for each sample."""

    name: str
    rises: bool
    unit: str
    labels: tuple[str, ...]
    text: str
    read: Callable[[Any], Iterable[Sample]] = field(repr=False)

    def filled(self, labels: Sequence[str], of: Iterable[tuple[Sequence[str], Any]]) -> Metric:
        """labels: of who it is of. of: each with the values of these."""
        kind = CounterMetricFamily if self.rises else GaugeMetricFamily
        made = kind(self.name, f"{self.text} ({self.unit})", labels=[*labels, *self.labels])
        for whose, each in of:
            for values, figure in self.read(each):
                made.add_metric([*whose, *values], figure)
        return made


@dataclass(frozen=True)
class Reading:
    """Of a snapshot, or of a member's report, what `SESSION` and `TENANT` read. Pages by owner, and shares of waiting."""

    epoch: int
    page_bytes: int
    owners: Mapping[str, int]
    waits: Mapping[str, float]
    tenants: Sequence[Any]


def _one(path: str) -> Callable[[Any], Iterable[Sample]]:
    found = attrgetter(path)
    return lambda of: [((), float(found(of)))]


def _each(attribute: str) -> Callable[[Any], Iterable[Sample]]:
    return lambda of: [((name,), float(value)) for name, value in getattr(of, attribute).items()]


def _labelled(**attributes: str) -> Callable[[Any], Iterable[Sample]]:
    readers = {name: attrgetter(path) for name, path in attributes.items()}
    return lambda of: [((name,), float(read(of))) for name, read in readers.items()]


def _count(of: int | Sequence[object]) -> float:
    """A snapshot names what a report counts."""
    return float(of if isinstance(of, int) else len(of))


def gauge(name: str, unit: str, text: str, read: str | Callable[[Any], Iterable[Sample]], *labels: str) -> Family:
    """read: as `Family.read`, or an attribute's path."""
    return Family(f"remap_{name}", False, unit, labels, text, _one(read) if isinstance(read, str) else read)


def counter(name: str, unit: str, text: str, read: str | Callable[[Any], Iterable[Sample]], *labels: str) -> Family:
    """As `gauge`, of a figure that only rises."""
    return Family(f"remap_{name}", True, unit, labels, text, _one(read) if isinstance(read, str) else read)


SESSION = (
    gauge("session_epoch", "changes", "Number of the last change of who owns a page", "epoch"),
    gauge("session_page_bytes", "bytes", "Size of a page", "page_bytes"),
    gauge("session_pages", "pages", "Pages by owner; outside: other processes have them", _each("owners"), "owner"),
    gauge(
        "session_wait_share",
        "ratio",
        "Waiting for layers as a share of computing, over the last 256 passes",
        _each("waits"),
        "kind",
    ),
)
"""Of a session, or a member."""

_BLOCKS = {
    "free": "free_blocks",
    "live": "live_blocks",
    "withdrawn": "withdrawn_blocks",
    "host": "host_blocks",
    "streamed": "streamed_blocks",
}
TENANT = (
    gauge("tenant_active", "0 or 1", "Whether it may serve passes", "active"),
    gauge("tenant_layers", "layers", "Layers of the model", "layers"),
    gauge("tenant_layers_away", "layers", "Layers' worth of pages that are KV now, or lent (alpha)", "remapped"),
    gauge(
        "tenant_cold_layers",
        "layers",
        "Layers without pages: it has given them up until it serves",
        lambda of: [((), _count(of.cold))],
    ),
    gauge(
        "tenant_pages",
        "pages",
        "Pages by owner",
        _labelled(params="pages.params", kv="pages.kv", ring="pages.ring"),
        "owner",
    ),
    gauge("tenant_lent_pages", "pages", "Of its layers, that are free for others or theirs", "lent_pages"),
    gauge("tenant_borrowed_pages", "pages", "Of other models' layers, that are its KV", "borrowed_pages"),
    gauge("tenant_kv_usable_blocks", "blocks", "KV blocks that may be used now", "usable_blocks"),
    gauge(
        "tenant_kv_blocks",
        "blocks",
        "KV blocks by state; host: in host memory, streamed: of these, read by passes",
        _labelled(**_BLOCKS),
        "state",
    ),
    gauge("tenant_kv_reserve_blocks", "blocks", "Blocks that are kept in reserve", "reserve_blocks"),
    counter(
        "tenant_shortages",
        "steps",
        "Steps whose demand exceeded the free blocks; met: a preemption, or a wait, that was avoided",
        _labelled(met="shortages_met", unmet="shortages_unmet"),
        "outcome",
    ),
    counter("tenant_passes", "passes", "Forward passes", "passes"),
    counter("tenant_copies", "copies", "Layers, or slices of them, streamed in", "copies"),
    counter("tenant_copied_bytes", "bytes", "Bytes of weights streamed in", "copied_bytes"),
    counter("tenant_copy_seconds", "s", "Time that these copies took", "copy_s"),
    counter("tenant_misses", "layers", "Layers that were waited for", "misses"),
    counter("tenant_stall_seconds", "s", "Time for which computation waited for layers", "stall_s"),
    gauge("tenant_pass_stall_seconds", "s", "Wait of a pass since the last change, measured", "seen_stall_s"),
    gauge("tenant_pass_stall_certified_seconds", "s", "Wait of a pass that was foreseen then", "predicted_stall_s"),
    counter("tenant_kv_out_bytes", "bytes", "KV copied to host memory", "kv_out_bytes"),
    counter("tenant_kv_in_bytes", "bytes", "KV copied back", "kv_in_bytes"),
    counter("tenant_kv_streamed_bytes", "bytes", "KV copied in for passes that read it there", "kv_streamed_bytes"),
)
"""Of a model of it."""
TENANT_LABELS = ("tenant",)


def read_snapshot(snapshot: Snapshot) -> Reading:
    """A snapshot as `families` takes it."""
    pages, stall = snapshot.pages, snapshot.stall
    names = ("free", "params", "kv", "ring", "outside", "quarantine")
    return Reading(
        snapshot.epoch,
        snapshot.page_bytes,
        {name: getattr(pages, name) for name in names},
        {name: getattr(stall, name) for name in ("seen", "predicted", "allowed")},
        tuple(snapshot.tenants.values()),
    )


def families(readings: Iterable[tuple[Sequence[str], Reading]], labels: Sequence[str] = ()) -> Iterator[Metric]:
    """readings: each with the values of `labels`, of who it is. Yields every family, those without samples too."""
    sessions = list(readings)
    tenants = [((*whose, each.name), each) for whose, reading in sessions for each in reading.tenants]
    yield from (each.filled(labels, sessions) for each in SESSION)
    yield from (each.filled((*labels, *TENANT_LABELS), tenants) for each in TENANT)


class _Session(Protocol):
    def snapshot(self) -> Snapshot: ...


class _Collector(Collector):
    def __init__(self, session: _Session) -> None:
        self._session = weakref.ref(session)

    def describe(self) -> Iterator[Metric]:
        """Names alone: a registry refuses a second session."""
        return families(())

    def collect(self) -> Iterator[Metric]:
        session = self._session()
        if session is None:
            return families(())
        try:
            return families([((), read_snapshot(session.snapshot()))])
        except Error:  # closed: it has no figures any more
            return families(())


def collector(session: _Session) -> Collector:
    """For `registry.register` of prometheus_client: one session a registry.

    It does not keep the session alive; once that is closed there are no samples. A scrape waits for the session's call in
    progress, and a step for a scrape's snapshot. Raises InvalidArgument (field session) for an object that is no session.
    """
    if not callable(getattr(session, "snapshot", None)):
        raise InvalidArgument(f"session must be a remap.Session, got {type(session).__name__}", session=session)
    return _Collector(session)
