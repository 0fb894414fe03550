"""A slower link than the machine has: passes wait as long as copies over it would take, in the prefetcher's own order.

The copies are real and as quick as ever. `wait` then sleeps until the layer's weights and blocks would have come over a link
of so many bytes a second, on which each copy begins when the prefetcher would issue it (`remap.policy.kv_stream`) and the one
before it has ended. What passes compute between, and the order in which buffers become free, is what really happens. Copies
out are not slowed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from remap.internals import internals
from remap.kv.spec import BUFFERS

__all__ = ["SlowLink"]


class SlowLink:
    """Stands before a runner's tenant. clock: `time`, or another with its `perf_counter` and `sleep`. waited_s: what passes
    have slept."""

    def __init__(self, tenant: Any, bytes_per_s: float, clock: Any = time) -> None:
        self._tenant, self._rate, self._clock = tenant, bytes_per_s, clock
        self._layers = tuple(tenant.streamed)
        ring, count = max(1, internals(tenant).buffers), len(self._layers)
        self._ring = ring
        self._uses = [use for use in range(count) if use >= ring or use + ring < count]
        self._last = {use: max(range(use % ring, count, ring)) for use in self._uses}
        self._turn = 0  # of the pass that is open, or comes next
        self._issued = 0  # copies of weights, of all passes
        self._parts = 0  # copies of blocks, of this pass
        self._part_s = 0.0
        self._done: set[tuple[int, int]] = set()
        self._weights: dict[tuple[int, int], float] = {}  # (pass, layer) -> when they have come
        self._blocks: list[float] = []
        self._link = self._clock.perf_counter()
        self.waited_s = 0.0
        self._issue()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `inside` of this is this
            raise AttributeError(name)
        return getattr(internals(self._tenant), name)

    def copy_seconds(self) -> float:
        """`Tenant.copy_seconds`, over this link."""
        sizes = internals(self._tenant).layer_bytes
        return sum(sizes) / len(sizes) / self._rate

    def streamed_seconds(self, blocks: int) -> float:
        """`Tenant.streamed_seconds`, over this link."""
        return float(2 * blocks * internals(self._tenant).kv.geometry.unit_bytes / self._rate)

    @contextmanager
    def forward(self, *, phase: str, tokens: int, streamed: Sequence[int] = ()) -> Iterator[None]:
        """`Tenant.forward`."""
        run = max(streamed) - min(streamed) + 1 if streamed else 0
        self._part_s, self._parts, self._blocks = self.streamed_seconds(run), 0, []
        with self._tenant.forward(phase=phase, tokens=tokens, streamed=streamed):
            self._issue()
            yield
        self._part_s = 0.0
        self._turn += 1

    def wait(self, layer: int) -> None:
        """`Tenant.wait`, and what the slower link takes longer."""
        self._tenant.wait(layer)
        come = self._weights.pop((self._turn, layer), 0.0)
        if self._part_s and layer < self._tenant.kv.spec.layers:
            come = max(come, self._blocks[layer])
        left = come - self._clock.perf_counter()
        if left > 0.0:
            self._clock.sleep(left)
            self.waited_s += left

    def done(self, layer: int) -> None:
        """`Tenant.done`."""
        self._tenant.done(layer)
        self._done.add((self._turn, layer))
        self._issue(layer)

    def _free(self, turn: int, use: int) -> bool:
        """Whether the buffer of this use is free: the use before it is done."""
        if use >= self._ring:
            return (turn, self._layers[use - self._ring]) in self._done
        return turn == 0 or (turn - 1, self._layers[self._last[use]]) in self._done

    def _issue(self, layer: int = -1) -> None:
        """All copies that may begin when this layer of the pass is done, as `kv_stream.pass_seconds` issues them."""
        now = self._clock.perf_counter()
        while True:
            due = self._part_s and self._parts < self._tenant.kv.spec.layers and self._parts - BUFFERS <= layer
            part = self._parts if due else None
            use = None
            if self._uses:
                turn, index = divmod(self._issued, len(self._uses))
                use = (turn, self._uses[index]) if self._free(turn, self._uses[index]) else None
            if use is not None and (part is None or (use[0] == self._turn and self._layers[use[1]] <= part)):
                copied = self._layers[use[1]]
                self._link = max(self._link, now) + internals(self._tenant).layer_bytes[copied] / self._rate
                self._weights[use[0], copied] = self._link
                self._issued += 1
            elif part is not None:
                self._link = max(self._link, now) + self._part_s
                self._blocks.append(self._link)
                self._parts += 1
            else:
                return
