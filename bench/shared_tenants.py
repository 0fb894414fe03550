"""Several tenants of random bytes in one arena, with nothing to spare: what one gets beyond its first blocks another gives."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping

import numpy as np
from measure import Abandoned

import remap
from remap.internals import internals

TOKENS, HEAD_DIM, FIRST_BLOCKS = 16, 10, 8


class SharedTenants:
    """A session with the tenants `names`, each of `layers` layers of `pages` pages. A context manager.

    A KV block has 2 * layers * 16 * 10 numbers of 2 bytes: 25,600 bytes for 40 layers. Tenants keep all blocks that they have
    (`fill`), so that whatever is asked for has to come from somewhere else.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        layers: int,
        pages: int,
        page_bytes: int,
        *,
        config: remap.advanced.Knobs | None = None,
        controllers: Mapping[str, remap.advanced.Knobs] | None = None,
        inactive: tuple[str, ...] = (),
        first_blocks: int = FIRST_BLOCKS,
    ) -> None:
        self.layers, self.layer_bytes = layers, pages * page_bytes
        block_bytes = 2 * layers * TOKENS * HEAD_DIM * 2
        first_pages = -(-first_blocks * block_bytes // page_bytes)
        capacity = len(names) * (layers * pages + first_pages) * page_bytes
        spec = remap.KVSpec(
            layers=layers,
            kv_heads=1,
            head_dim=HEAD_DIM,
            block_tokens=TOKENS,
            min_blocks=first_blocks,
            max_blocks=capacity // block_bytes + 1,
        )
        self.session = remap.Session(capacity, page_bytes=page_bytes, config=config)
        self.masters: dict[str, list[np.ndarray]] = {}
        self.tenants: dict[str, remap.Tenant] = {}
        self.held: dict[str, list[int]] = {name: [] for name in names}
        for index, name in enumerate(names):
            rng = np.random.default_rng(index)
            self.masters[name] = [rng.integers(0, 256, self.layer_bytes, dtype=np.uint8) for _ in range(layers)]
            self.tenants[name] = self.session.attach_bytes(
                self.masters[name], name=name, kv=spec, config=(controllers or {}).get(name)
            )
        for name in names:
            self.fill(name)
        self._asleep = inactive

    def __enter__(self) -> SharedTenants:
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()

    def warm(self, compute_s: float, passes: int = 3) -> None:
        """Passes of every tenant that compute for `compute_s` a layer, so that times are known; then the inactive ones sleep."""
        for tenant in self.tenants.values():
            for phase in ("prefill", "decode"):
                for _ in range(passes):
                    with tenant.forward(phase=phase):
                        for layer in range(self.layers):
                            tenant.wait(layer)
                            spend(compute_s)
                            tenant.done(layer)
        for name in self._asleep:
            self.session.deactivate(name)

    def fill(self, name: str, leave: int = 0) -> None:
        """Allocate all but `leave` free blocks."""
        kv = self.tenants[name].kv
        self.held[name] += kv.allocate(max(0, kv.free_blocks - leave))

    def free(self, name: str, count: int | None = None) -> None:
        """Give `count` blocks back, the youngest, or all."""
        held = self.held[name]
        given = held[len(held) - count :] if count is not None else held[:]
        del held[len(held) - len(given) :]
        self.tenants[name].kv.free(given)

    def step(self, **demand: int) -> remap.StepReport:
        """One step with these demands; what has moved is followed."""
        report = self.session.step({name: remap.Demand(blocks=blocks) for name, blocks in demand.items()})
        self.follow(report.moved)
        return report

    def follow(self, moved: Mapping[str, Mapping[int, int]]) -> None:
        """Blocks have moved: the tables that hold them are patched."""
        for name, pairs in moved.items():
            self.held[name] = [pairs.get(block, block) for block in self.held[name]]

    def quiet(self) -> None:
        """Until no copy and no re-pointing is under way."""
        remap.advanced.settle(self.session)
        for tenant in self.tenants.values():
            internals(tenant)._state.prefetcher.drain()

    def verify(self) -> None:
        """Every layer of every active tenant reads as its master copy, in passes that teach no times; all books agree."""
        for name, tenant in self.tenants.items():
            if not tenant.active:
                continue
            with Abandoned(), tenant.forward():
                for layer, master in enumerate(self.masters[name]):
                    tenant.wait(layer)
                    address = remap.advanced.layer_address(self.session, name, layer)
                    seen = np.frombuffer((ctypes.c_uint8 * self.layer_bytes).from_address(address), np.uint8)
                    assert np.array_equal(seen, master), f"{name}: layer {layer} has other bytes than its master copy"
                    tenant.done(layer)
                raise Abandoned.Pass
        remap.advanced.check(self.session)


def spend(seconds: float) -> None:
    """Compute for so long. Sleeping is late by a timer's slack; a pass of many short layers needs better."""
    if seconds >= 0.001:
        time.sleep(seconds)
        return
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
