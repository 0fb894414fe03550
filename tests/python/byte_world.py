"""One tenant over layers of plain bytes, where a KV block is exactly one page and a layer three: every count is known.

No torch. `times` injects what would be measured, so that the controller's decisions are exact.
"""

from __future__ import annotations

import ctypes

import arena_worlds
from arena_worlds import make_backend, make_spec, session_on, set_times

import remap
from remap import _core
from remap.internals import internals

PAGE, N, LAYER = 16384, 8, 3  # bytes; layers; pages of a layer
BYTES = LAYER * PAGE - 100
PLAIN = {"reserve_blocks": 0, "hysteresis_blocks": 0}


def spec(layout="block_major", min_blocks=4, max_blocks=64):
    return make_spec(N, dim=64, tokens=4, min_blocks=min_blocks, max_blocks=max_blocks, layout=layout)


class World:
    """One tenant over plain bytes. `times` injects what would be measured. A context manager."""

    def __init__(self, config=None, *, spare=0, mode="aliased", kv=None, times=None):
        self.data = [bytes([17 * i + 1]) * BYTES for i in range(N)]
        pages = N * LAYER + 4 + spare
        self.backend = _core.make_trace_backend(make_backend(pages * PAGE, PAGE))
        self.session = session_on(self.backend, pages * PAGE, page_bytes=PAGE, mode=mode)
        config = config or remap.advanced.Knobs(**PLAIN)
        self.tenant = self.session.attach_bytes(self.data, name="m", kv=kv or spec(), config=config)
        self.kv = internals(self.tenant).kv
        if times is not None:
            set_times(self.tenant, times)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.session.close()

    def step(self, blocks, free=None):
        report = self.session.step({"m": remap.Demand(blocks=blocks, free=free)})
        remap.advanced.check(self.session)
        return report

    def forward(self):
        """One pass that compares every byte of every layer."""
        with self.tenant.forward():
            for layer, data in enumerate(self.data):
                self.tenant.wait(layer)
                assert ctypes.string_at(remap.advanced.layer_address(self.session, "m", layer), BYTES) == data
                self.tenant.done(layer)


def times_of(compute, transfer):
    return arena_worlds.times_of(N, compute, transfer)


HIDDEN = times_of(1.0, 0.0)  # copies cost nothing
