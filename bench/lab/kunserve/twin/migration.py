"""Requests that move to the instance with the most room while they run: the essentials of Llumnix. Pure.

Where a request waits for room, the youngest that run there move to the least loaded instance, one at a time, as long as that is
no fuller than they leave it. Its room is taken there at once; its KV is copied while it runs on; it changes over at a
pass boundary, and what it generated meanwhile costs nothing (Llumnix copies that in further, ever smaller rounds).
"""

from __future__ import annotations

from collections.abc import Sequence

from remap_serve.policy.cluster.exchange import Priority

from .network import Links
from .pipeline import Pipeline, Request
from .setup import Hardware

__all__ = ["Migration"]

_MARGIN = 8  # blocks that it may fill before it has moved


class Migration:
    """moved: how many requests have."""

    def __init__(self, links: Links, hardware: Hardware) -> None:
        self._links, self._hardware = links, hardware
        self._leaving: dict[Pipeline, Request] = {}
        self.moved = 0

    def look(self, instances: Sequence[Pipeline]) -> None:
        """Begin what should move now. Each instance has one lane."""
        for source in instances:
            if source in self._leaving or not source.lanes[0].waiting or not source.lanes[0].running:
                continue
            target = max(instances, key=lambda each: each.pool.free_blocks)
            request = source.lanes[0].running[-1]
            # Room for what it has and for a while of running on, and none that somebody there waits for.
            wanted = len(request.blocks) + _MARGIN
            free = target.pool.free_blocks
            if target is source or target.lanes[0].waiting or free - wanted < source.pool.free_blocks:
                continue
            self._begin(source, target, request)  # type: ignore[arg-type]

    def _begin(self, source: Pipeline, target: Pipeline, request: Request) -> None:
        self._leaving[source] = request
        blocks = target.pool.allocate(len(request.blocks) + _MARGIN)
        size = request.computed * self._hardware.whole.kv_bytes_per_token

        def come() -> None:
            del self._leaving[source]
            needed = len(request.blocks)
            if request not in source.lanes[0].running or needed > len(blocks):
                target.pool.free(blocks)  # it has ended, was preempted, or has grown too much
                target.pump()
                return
            source.take(request)
            target.pool.free(blocks[needed:])
            request.blocks = blocks[:needed]
            target.hold(request)
            target.resume(request)
            source.pump()
            self.moved += 1

        self._links.send(source.names[0], target.names[0], size, Priority.EXCHANGE, lambda: source.between(come))
