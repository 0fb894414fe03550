# SPDX-License-Identifier: Apache-2.0
"""/metrics of a server: its counts, and the state of its front at the moment of the look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from .front import Front

__all__ = ["ClusterMetrics", "RequestMetrics", "cluster_text"]

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
E2E_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
TPOT_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class RequestMetrics:
    """Requests of a server, in a registry of its own, so that a process may have several. The event loop that serves calls all of
    it. prefix: of the names. by_model: with a label for each request's model."""

    def __init__(self, prefix: str, by_model: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._by_model = by_model
        labels = ["model"] if by_model else []
        self._requests = Counter(
            f"{prefix}_requests",
            "Requests that ended, by how: stop, length, cancelled, or the error's name",
            [*labels, "outcome"],
            registry=self.registry,
        )
        self._refused = Counter(
            f"{prefix}_refused",
            "Requests answered with the status of an error, by that and by the error's name",
            ["status", "reason"],
            registry=self.registry,
        )
        self._tokens = Counter(f"{prefix}_tokens", "Tokens, by kind", [*labels, "kind"], registry=self.registry)
        self._ttft = Histogram(
            f"{prefix}_ttft_seconds",
            "From a request to its first token",
            labels,
            buckets=TTFT_S,
            registry=self.registry,
        )
        self._tpot = Histogram(
            f"{prefix}_tpot_seconds",
            "Between tokens of one request, on average, of requests that were answered with two or more",
            labels,
            buckets=TPOT_S,
            registry=self.registry,
        )
        self._e2e = Histogram(
            f"{prefix}_e2e_seconds",
            "From a request to its end, however it ended",
            labels,
            buckets=E2E_S,
            registry=self.registry,
        )

    def first(self, model: str, seconds: float) -> None:
        """A request got its first token, so long after it was asked."""
        self._of(self._ttft, model).observe(seconds)

    def ended(self, model: str, outcome: str, prompt: int, tokens: int, decoding_s: float, whole_s: float) -> None:
        """A choice ended, `whole_s` after it was asked for. tokens: generated, the last of them `decoding_s` after the first."""
        self._of(self._requests, model, outcome).inc()
        self._of(self._tokens, model, "prompt").inc(prompt)
        self._of(self._tokens, model, "generated").inc(tokens)
        self._of(self._e2e, model).observe(whole_s)
        if tokens > 1 and outcome in ("stop", "length"):
            self._of(self._tpot, model).observe(decoding_s / (tokens - 1))

    def refused(self, status: int, reason: str) -> None:
        """A request was answered with this status, for an error of this class."""
        self._refused.labels(str(status), reason).inc()

    def text(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def _of(self, metric: Any, model: str, *labels: str) -> Any:
        found = (model, *labels) if self._by_model else labels
        return metric.labels(*found) if found else metric


class ClusterMetrics(RequestMetrics):
    """With the state of a cluster's front."""

    def __init__(self, front: Front[Any]) -> None:
        super().__init__("remap_cluster")
        self.registry.register(_Now(front))


def cluster_text(front: Front[Any]) -> bytes:
    """The state of a cluster's front alone, as Prometheus reads it."""
    registry = CollectorRegistry()
    registry.register(_Now(front))
    return generate_latest(registry)


class _Now(Collector):
    """Read off the front when Prometheus asks, so that nothing has to be kept up to date. A group's name is its head's."""

    def __init__(self, front: Front[Any]) -> None:
        self._front = front

    def collect(self) -> Iterator[Metric]:
        front = self._front
        yield CounterMetricFamily(
            "remap_cluster_restarts", "Submissions of a request beyond its first", value=front.restarts
        )
        changes = CounterMetricFamily("remap_cluster_changes", "Changes of groups, by how they ended", labels=["kind"])
        for kind in ("merged", "dissolved", "aborted"):
            changes.add_metric([kind], front.service.control.changes[kind])
        yield changes
        yield GaugeMetricFamily("remap_cluster_epoch", "Of the last change", value=front.service.control.epoch)
        yield GaugeMetricFamily("remap_cluster_groups", "Groups of instances", value=len(front.groups))
        lacking = front.service.control.lacking
        yield GaugeMetricFamily(
            "remap_cluster_lacking_kv_tokens", "That requests ask for and no drop frees", value=lacking.tokens
        )
        yield GaugeMetricFamily(
            "remap_cluster_lacking_instances", "How many more have room for those tokens", value=lacking.instances
        )
        yield GaugeMetricFamily("remap_cluster_unfinished", "Requests without their answer", value=front.unfinished)
        families = {
            "stages": GaugeMetricFamily("remap_cluster_group_stages", "Instances of the group", labels=["group"]),
            "running": GaugeMetricFamily("remap_cluster_group_running", "Requests that run", labels=["group"]),
            "waiting": GaugeMetricFamily("remap_cluster_group_waiting", "Requests that wait", labels=["group"]),
            "used": GaugeMetricFamily("remap_cluster_group_kv_tokens", "Tokens whose KV is held", labels=["group"]),
            "capacity": GaugeMetricFamily(
                "remap_cluster_group_kv_capacity_tokens", "Tokens that KV has room for", labels=["group"]
            ),
        }
        for view in front.groups:
            name = [view.stages[0].instance]
            families["stages"].add_metric(name, len(view.stages))
            families["running"].add_metric(name, view.load.running)
            families["waiting"].add_metric(name, len(view.load.waiting))
            families["used"].add_metric(name, view.load.tokens)
            families["capacity"].add_metric(name, view.capacity)
        yield from families.values()
        yield GaugeMetricFamily(
            "remap_cluster_instances_expected", "Instances that there should be", value=len(front.up)
        )
        # The label is not "instance": Prometheus writes the address that it reads from into that.
        up = GaugeMetricFamily("remap_cluster_up", "1 for an instance that serves, else 0", labels=["replica"])
        for instance, serves in sorted(front.up.items()):
            up.add_metric([instance], serves)
        yield up
        # Of `ClusterInstance.counts`; each begins anew with its process, and ends with it.
        counts = {instance: report.counts for instance, report in sorted(front.reports.items())}
        for what in sorted({what for each in counts.values() for what in each}):
            suffix = what.removesuffix("_s") + "_seconds" if what.endswith("_s") else what
            counted = CounterMetricFamily(
                f"remap_cluster_instance_{suffix}", "Since the instance's process began", labels=["replica"]
            )
            for instance, each in counts.items():
                counted.add_metric([instance], each.get(what, 0.0))
            yield counted
