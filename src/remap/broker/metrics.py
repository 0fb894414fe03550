# SPDX-License-Identifier: Apache-2.0
"""Figures of a broker and its members for Prometheus, and the server of `remap serve --metrics`.

Each scrape looks at the broker through its socket, as `remap top` does: the broker's thread knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from remap.broker.messages import Shown
from remap.broker.observer import Observer, Seen
from remap.errors import Error, InvalidArgument
from remap.metrics import Reading, families, gauge

__all__ = ["BROKER", "LABELS", "MEMBER", "UP", "BrokerCollector", "serve_metrics"]

LABELS = ("member",)
"""Of a member, and of all that it reports: its number, which no other member ever gets, and its name."""

UP = gauge("broker_up", "0 or 1", "Whether the broker answers", lambda up: [((), float(up))])
BROKER = (
    gauge("broker_page_bytes", "bytes", "Size of a page", "state.page_bytes"),
    gauge("broker_pages", "pages", "Pages that there are", "state.pages"),
    gauge("broker_free_pages", "pages", "Pages that no member has", "state.free"),
    gauge("broker_waiting", "wants", "Members that want more pages than they have got", "state.waiting"),
    gauge("broker_members", "members", "Who is connected or has pages", "state.members"),
)
"""Of a broker that answers."""
MEMBER = (
    gauge("broker_member_up", "0 or 1", "0: it has left, and its process still has pages", "connected"),
    gauge("broker_member_pages", "pages", "Pages that are its own", "held"),
    gauge("broker_member_lent_pages", "pages", "Of its layers, that it may call and does not have", "lent"),
    gauge(
        "broker_member_report_age_seconds",
        "s",
        "Age of what it said last; old: it hangs",
        lambda shown: [] if shown.report is None else [((), shown.age_s)],
    ),
)
"""Of a member. The figures in its report have the names of `remap.metrics`."""


def _readings(seen: Seen) -> Iterator[tuple[tuple[str, ...], Reading]]:
    """Of members that have reported. outside: pages that others have, or no member."""
    for shown in seen.members:
        report = shown.report
        if report is None:
            continue
        owners = {name: getattr(report, name) for name in ("free", "params", "kv", "ring", "quarantine")}
        owners["outside"] = max(0, seen.state.pages - sum(owners.values()))
        waits = {"seen": report.waited, "predicted": report.predicted, "allowed": report.allowed}
        tenants = {each.name: each for each in report.tenants}  # long names, cut, may be the same; two series never are
        yield _labels(shown), Reading(report.epoch, seen.state.page_bytes, owners, waits, tuple(tenants.values()))


def _labels(shown: Shown) -> tuple[str, ...]:
    return (f"{shown.member} {shown.name}",)


class BrokerCollector(Collector):
    """Of the broker at `path`. One that does not answer has no samples but `remap_broker_up`, 0."""

    def __init__(self, path: str) -> None:
        self._path = path

    def describe(self) -> Iterator[Metric]:
        return self._families(None)

    def collect(self) -> Iterator[Metric]:
        try:
            with Observer(self._path) as observer:
                return self._families(observer.look())
        except Error:
            return self._families(None)

    def _families(self, seen: Seen | None) -> Iterator[Metric]:
        yield UP.filled((), [((), seen is not None)])
        for each in BROKER:
            yield each.filled((), [] if seen is None else [((), seen)])
        for each in MEMBER:
            yield each.filled(LABELS, [] if seen is None else [(_labels(shown), shown) for shown in seen.members])
        yield from families(() if seen is None else _readings(seen), LABELS)


def serve_metrics(path: str, host: str, port: int) -> tuple[str, Callable[[], None]]:
    """Answer GET /metrics there from a thread, 0: at some port. Returns the URL, and what ends it. Raises InvalidArgument
    (fields field, value) if nothing can listen there."""
    registry = CollectorRegistry()
    registry.register(BrokerCollector(path))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise InvalidArgument(
            f"metrics: {host}:{port} cannot be listened at: {error}; nothing was started; give another port",
            field="metrics",
            value=f"{host}:{port}",
        ) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{server.server_port}/metrics", close
