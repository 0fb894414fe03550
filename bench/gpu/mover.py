"""A second tenant whose layers are pointed at the ring and back, so that the worker has something to do beside the first."""

from __future__ import annotations

import threading

import remap

from .context import Context, Skip
from .tenants import BLOCK_TOKENS, HEAD_DIM, KV_HEADS, DeviceTenant, make_masters

__all__ = ["Mover", "largest_layer", "mover_bytes"]

BUFFERS = 2


def mover_bytes(layers: int, layer_bytes: int, page_bytes: int) -> int:
    """What a session has to have beside its first tenant: the layers, and a page for the first blocks."""
    return (layers * -(-layer_bytes // page_bytes) + 1) * page_bytes


class Mover:
    """`layers` layers in `raw`'s session, which nobody computes with. Every turn re-points all of their regions.

    regions: how many have been re-pointed so far.
    """

    name = "mover"

    def __init__(self, raw: DeviceTenant, layers: int, layer_bytes: int) -> None:
        if layers <= BUFFERS:
            raise Skip(f"{layers} layers are too few for a ring of {BUFFERS}")
        self.session, self.layers = raw.session, layers
        block_bytes = 2 * layers * BLOCK_TOKENS * KV_HEADS * HEAD_DIM * 2
        spec = remap.KVSpec(
            layers=layers,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            block_tokens=BLOCK_TOKENS,
            min_blocks=1,
            max_blocks=layers * layer_bytes // block_bytes + 1,
        )
        self.tenant = raw.session.attach_bytes(make_masters(layers, layer_bytes), name=self.name, kv=spec)
        self.regions = 0
        self._away = False
        self._watcher: threading.Thread | None = None

    @property
    def at_work(self) -> bool:
        """Whether the worker was still re-pointing what the last `begin` began, when it was last seen."""
        return self._watcher is not None and self._watcher.is_alive()

    def begin(self) -> None:
        """A turn that the worker has begun and that nobody waits for, but a thread that sees its end."""
        self.finish()
        self.turn()
        remap.advanced.settle(self.session, self.tenant.name)
        self._watcher = threading.Thread(target=self.session._executor.drain, name="watcher", daemon=True)
        self._watcher.start()

    def finish(self) -> None:
        """Wait for what `begin` began."""
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        remap.advanced.settle(self.session)

    def turn(self) -> None:
        """To the ring, or back: decided when this returns, done when the session is settled."""
        if self._away:
            remap.advanced.remap(self.session, self.name, 0)
        else:
            remap.advanced.remap(self.session, self.name, self.layers - BUFFERS, BUFFERS)
        self._away = not self._away
        self.regions += self.layers

    def go_home(self) -> None:
        """Every region shows its own pages again."""
        self.finish()
        if self._away:
            self.turn()
        remap.advanced.settle(self.session)


def largest_layer(ctx: Context, layers: int, wanted: int, page_bytes: int) -> int:
    """At most `wanted` bytes a layer, in pages, of `layers` layers that fit."""
    return ctx.fit(layers * wanted, unit=layers * page_bytes, host=True) // layers
