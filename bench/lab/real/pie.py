"""Pie's policy on the project's engine: KV beyond the device's is copied in before each layer, and out again behind it.

Source: Pie, sections 3.1 to 3.3; theirs counts layers, this one blocks: with the KV of m of n layers in host memory the
device holds n / (n - m) times as many blocks, and each pass copies m layers' KV in and as much out. Here the blocks beyond
the device's stream, as many as that makes, layer by layer, which are the same bytes each way at the same times:

    in       the prefetcher's copy of a layer's part of these blocks
    out      a thread copies that part back behind the layer; the buffer is free for another layer when both are done
    m        adaptive expansion: one more while blocks are wanted and (m + 2) max(t_in, t_out) <= n t_c (their condition, of
             the last decode pass; t: one layer's KV); one fewer while passes wait for more than 2 % of their computation

Left out: that Pie grows blocks by allocating each layer anew, which costs it copies within the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from remap.internals import internals

__all__ = ["Pie"]

FORGIVEN = 0.02


class Pie:
    """Stands before an engine's tenant in its runner. kv_out_bytes: what it has copied out."""

    def __init__(self, engine: Any) -> None:
        self._tenant, self._scheduler = engine.tenant, engine.scheduler
        self._layers, self._base = engine.tenant.kv.spec.layers, engine.tenant.kv.usable_blocks
        self._away = 0  # m
        self._shown: list[int] = []
        self._leaving: dict[int, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1)
        self.kv_out_bytes = 0
        internals(engine.tenant).kv.on_stream(self._blocks)
        engine.runner.tenant = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `inside` of this is this
            raise AttributeError(name)
        return getattr(internals(self._tenant), name)

    def _blocks(self) -> int:
        """How many blocks are beyond the device's with m layers' KV in host memory."""
        most = self._tenant.kv.spec.streamed_blocks
        return min(most, self._base * self._away // (self._layers - self._away))

    def _adapt(self) -> None:
        tenant, n = self._tenant, self._layers
        stats = internals(tenant).stats()
        compute_s = stats.last_pass_s - stats.last_pass_stall_s
        if self._away and stats.last_pass_stall_s > FORGIVEN * compute_s:
            self._away -= 1
        elif self._away < n - 2 and self._scheduler.demand() > tenant.kv.free_blocks:
            used = (
                (tenant.kv.live_blocks + internals(tenant).kv.streamed.used_blocks)
                * 2
                * internals(tenant).kv.geometry.unit_bytes
            )
            rate = internals(tenant).copy_seconds() / max(
                1.0, sum(internals(tenant).layer_bytes) / len(internals(tenant).layer_bytes)
            )
            if (self._away + 3) * used * rate <= compute_s:
                self._away += 1

    @contextmanager
    def forward(self, *, phase: str, tokens: int, streamed: list[int]) -> Iterator[None]:
        """`Tenant.forward`."""
        if phase == "decode":
            self._adapt()
        self._shown = streamed
        with self._tenant.forward(phase=phase, tokens=tokens, streamed=streamed):
            try:
                yield
            finally:
                for layer in tuple(self._leaving):
                    self._left(layer)

    def wait(self, layer: int) -> None:
        """`Tenant.wait`, behind the copies out that still hold the layer's buffer."""
        for other in tuple(self._leaving):
            if self._leaving[other].done() or other <= layer - 2:
                self._left(other)
        self._tenant.wait(layer)

    def done(self, layer: int) -> None:
        """`Tenant.done`, once what was copied in has been copied out."""
        if not self._shown or layer >= self._layers:
            self._tenant.done(layer)
            return
        low, high = min(self._shown), max(self._shown) + 1
        part = self._tenant.kv.tensors[layer][:, low:high]
        self.kv_out_bytes += part.numel() * part.element_size()
        self._leaving[layer] = self._thread.submit(_copied, part)

    def _left(self, layer: int) -> None:
        self._leaving.pop(layer).result()
        self._tenant.done(layer)


def _copied(part: Any) -> None:
    part.clone()  # to host memory, which is where everything is here
