# SPDX-License-Identifier: Apache-2.0
"""The state of all tenants over a run of unknown length, in a bounded number of points. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from remap_serve.sim.engine import SimEngine
from remap_serve.sim.results import Sample

__all__ = ["Timeline"]


class Timeline:
    """Looks at the engines after every step, and keeps a sample whenever the last one is old enough. When there are too many,
    every other one goes and the interval doubles. Peaks are of every step."""

    def __init__(self, limit: int = 2000, interval_s: float = 0.05) -> None:
        self._limit = limit
        self._interval_s = interval_s
        self._next_s = 0.0
        self._rows: list[tuple[Sample, ...]] = []

    def look(self, now_s: float, engines: Mapping[str, SimEngine]) -> None:
        """now_s: since the beginning of the run."""
        for engine in engines.values():
            tenant = engine.tenant
            usable, alpha = tenant.kv.usable_blocks, tenant.remapped
            if usable > engine.kv_peak:
                engine.kv_peak = usable
            used = tenant.kv.live_blocks
            if used > engine.used_peak:
                engine.used_peak = used
            if alpha > engine.alpha_peak:
                engine.alpha_peak = alpha
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        self._rows.append(tuple(_sample(now_s, name, engine) for name, engine in engines.items()))
        if len(self._rows) * len(engines) > 2 * self._limit:
            del self._rows[1::2]
            self._interval_s *= 2

    def end(self, now_s: float, engines: Mapping[str, SimEngine]) -> None:
        """The run is over: its last state is kept, whenever the last sample was."""
        self._next_s = now_s
        self.look(now_s, engines)

    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for row in self._rows for sample in row)


def _sample(now_s: float, name: str, engine: SimEngine) -> Sample:
    scheduler, tenant = engine.scheduler, engine.tenant
    return Sample(
        time_s=now_s,
        tenant=name,
        kv_usable_blocks=tenant.kv.usable_blocks,
        kv_used_blocks=scheduler.used_blocks,
        alpha=float(tenant.remapped),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        preemptions=engine.metrics.preemptions,
        stall_s=engine.runner.stall_s,
    )
