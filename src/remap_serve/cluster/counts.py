# SPDX-License-Identifier: Apache-2.0
"""An instance's counts of work computed and bytes sent since it began."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Listed

    from remap_serve.engine.request import Sequence
    from remap_serve.engine.scheduler import Schedule

__all__ = ["Counts"]


class Counts:
    """Written by the loop, number by number; others read them as they are.

    passes, computing_s (pipeline_computing_s of it as a stage of several), activation_bytes, kv_sent_bytes and
    layers_sent_bytes (sent to others). As a head: preemptions and pauses (see `Metrics`), and started_requests, those of which a
    pass had some for the first time, after queue_s in its line, all together.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.computing_s = self.pipeline_computing_s = 0.0
        self.activation_bytes = self.kv_sent_bytes = self.layers_sent_bytes = 0
        self.started_requests = self.preemptions = self.pauses = 0
        self.queue_s = 0.0
        self._pipeline_s = 0.0
        self._since: float | None = None

    def note_pass(self, seconds: float, alone: bool) -> None:
        """One microbatch was computed."""
        self.passes += 1
        self.computing_s += seconds
        if not alone:
            self.pipeline_computing_s += seconds

    def note_scheduled(self, schedule: Schedule, now_s: float) -> None:
        """A microbatch is launched. now_s: on the clock of `Sequence.arrived_s`."""
        self.took_blocks(schedule.preempted)
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            # `launched` may count it as computed already; before its first pass nothing of it was.
            if chunk.start == 0 and not sequence.preemptions:
                self.started_requests += 1
                self.queue_s += now_s - sequence.arrived_s

    def took_blocks(self, sequences: Listed[Sequence]) -> None:
        """These have just lost their blocks to others."""
        kept = sum(bool(one.host) for one in sequences)
        self.pauses += kept
        self.preemptions += len(sequences) - kept

    def note_sent(self, nbytes: int, layer: bool) -> None:
        """A piece of a layer goes to another instance, or one of KV."""
        if layer:
            self.layers_sent_bytes += nbytes
        else:
            self.kv_sent_bytes += nbytes

    def note_group(self, alone: bool) -> None:
        """From now on the instance is alone, or a stage of several."""
        since, self._since = self._since, None if alone else time.perf_counter()
        if since is not None:
            self._pipeline_s += time.perf_counter() - since

    def as_dict(self, layer_bytes: int = 0, swapped_bytes: int = 0) -> dict[str, float]:
        """All of them, those of others (`ClusterInstance.counts`), and pipeline_s: seconds as a stage of several."""
        since = self._since
        return {
            "passes": float(self.passes),
            "computing_s": self.computing_s,
            "pipeline_computing_s": self.pipeline_computing_s,
            "pipeline_s": self._pipeline_s + (0.0 if since is None else time.perf_counter() - since),
            "activation_bytes": float(self.activation_bytes),
            "kv_sent_bytes": float(self.kv_sent_bytes),
            "layers_sent_bytes": float(self.layers_sent_bytes),
            "started_requests": float(self.started_requests),
            "queue_s": self.queue_s,
            "preemptions": float(self.preemptions),
            "pauses": float(self.pauses),
            "layer_bytes": float(layer_bytes),
            "swapped_bytes": float(swapped_bytes),
        }
