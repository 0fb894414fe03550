"""One tenant over layers of plain bytes, where a KV block is exactly one page and a layer three: every count is known.

No torch. `times` injects what would be measured, so that the controller's decisions are exact.
"""

from __future__ import annotations

import ctypes

from arena_worlds import make_backend

import remap
from remap import _core
from remap.policy.cost import LayerTimes

PAGE, N, LAYER = 16384, 8, 3  # bytes; layers; pages of a layer
BYTES = LAYER * PAGE - 100
PLAIN = {"reserve_blocks": 0, "hysteresis_blocks": 0}


def spec(layout="block_major", min_blocks=4, max_blocks=64):
    return remap.KVSpec(
        layers=N, kv_heads=1, head_dim=64, block_tokens=4, dtype="float32",
        min_blocks=min_blocks, max_blocks=max_blocks, layout=layout,
    )  # fmt: skip


class World:
    """One tenant over plain bytes. `times` injects what would be measured. A context manager."""

    def __init__(self, config=None, *, spare=0, mode="aliased", kv=None, times=None):
        self.data = [bytes([17 * i + 1]) * BYTES for i in range(N)]
        pages = N * LAYER + 4 + spare
        self.backend = _core.make_trace_backend(make_backend(pages * PAGE, PAGE))
        self.session = remap.Session(
            pages * PAGE, page_bytes=PAGE, mode=mode, platform=remap.advanced.Platform(backend=self.backend)
        )
        config = config or remap.advanced.Knobs(**PLAIN)
        self.tenant = self.session.attach_bytes(self.data, name="m", kv=kv or spec(), config=config)
        self.kv = self.tenant.kv
        if times is not None:
            self.tenant._state.timing.decode = lambda: times

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
    return LayerTimes((compute,) * N, (transfer,) * N)


HIDDEN = times_of(1.0, 0.0)  # copies cost nothing


class External:
    """An engine's own allocator: a set of free ids. Withdrawn ids that are free go back at once, others when freed."""

    def __init__(self, world):
        self.world, self.free, self.used, self.leaving = world, set(), set(), set()
        self.calls = []  # (added, withdrawn, backend calls so far)
        world.kv.subscribe(self, external=True)

    def __call__(self, added, withdrawn):
        self.calls.append((tuple(added), tuple(withdrawn), self.world.backend.count()))
        self.leaving -= set(added)
        self.free |= set(added) - self.used
        self.leaving |= set(withdrawn)
        back = self.free & set(withdrawn)
        self.free -= back
        self.leaving -= back
        self.world.kv.returned(back)

    def use(self, count):
        for block in sorted(self.free)[:count]:
            self.free.remove(block)
            self.used.add(block)

    def finish(self, blocks):
        for block in blocks:
            self.used.remove(block)
            if block in self.leaving:
                self.leaving.remove(block)
                self.world.kv.returned([block])
            else:
                self.free.add(block)
