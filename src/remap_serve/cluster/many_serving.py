# SPDX-License-Identifier: Apache-2.0
"""What the endpoints show of several models on one arena: who answers, health, figures, and how cold a model was."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from remap.metrics import collector

from .app import ServedModels
from .metrics import TTFT_S, RequestMetrics

if TYPE_CHECKING:
    from remap import Session

    from .asked import AnswerAsked
    from .many import ManyModels
    from .prompts import Catalog

__all__ = ["COLD_START", "serving_of"]

COLD_START = "X-Remap-Cold-Start-Ms"
"""The header that says how long an answer's model took to begin, in milliseconds: 0 if it was warm."""


def serving_of(front: ManyModels, catalog: Catalog, session: Session) -> ServedModels:
    """The front's, whose models are those of the catalog."""
    metrics = RequestMetrics("remap_server", by_model=True)
    cold = Histogram(
        "remap_server_cold_start_seconds",
        "From the first request for a model without all of its layers to the end of its first pass",
        ["model"],
        buckets=TTFT_S,
        registry=metrics.registry,
    )
    unfinished = Gauge("remap_server_unfinished", "Requests without their answer", registry=metrics.registry)
    unfinished.set_function(lambda: front.unfinished)
    of_session = CollectorRegistry()
    of_session.register(collector(session))
    front.on_cold = lambda model, seconds: cold.labels(model).observe(seconds)

    async def figures() -> bytes:
        # Beside the event loop: the session is looked at between two of its calls, and an activation may take its time. One that
        # hangs is not waited for.
        return metrics.text() + (b"" if front.hangs else await asyncio.to_thread(generate_latest, of_session))

    def health() -> dict[str, Any]:
        wrong = "failed" if front.failure is not None else "hangs" if front.hangs else None
        status = wrong or ("draining" if front.draining else "ok")
        return {"status": status, "serving": len(catalog.models) if status == "ok" else 0}

    def headers(asked: AnswerAsked) -> dict[str, str]:
        return {COLD_START: f"{1e3 * max(map(front.cold_s, asked.requests)):.1f}"}

    return ServedModels(catalog, front.of, metrics, health, figures, headers)
