"""Sessions over raw bytes for the tests of the core: layers with telling contents, passes that look at every byte."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import remap
from remap.internals import internals
from remap.memory import device as devices
from remap.policy.cost import LayerTimes

PAGE = 64 << 10
SHORT = 100  # bytes by which a layer misses its last page's end: padding that nobody writes


def make_backend(capacity: int, page_bytes: int = PAGE) -> Any:
    """The backend of the device under test: REMAP_DEVICE, else the host. For decorators and for tests below the session."""
    return devices.resolve(None, capacity, page_bytes)[0]


def make_layers(pages: Sequence[int], tag: int = 0, page_bytes: int = PAGE) -> list[bytes]:
    """One buffer a layer. Every 64 bytes differ, within a layer and between layers and tags."""
    layers = []
    for index, count in enumerate(pages):
        nbytes = count * page_bytes - SHORT
        layers.append((_chunk((tag * 97 + index * 31 + 1) % 251) * (nbytes // 4096 + 1))[:nbytes])
    return layers


@functools.cache
def _chunk(first: int) -> bytes:
    return bytes((first + at // 64) % 251 + 1 for at in range(4096))


def session_on(
    backend: Any, capacity: int, page_bytes: int = PAGE, mode: str = "aliased", config: Any = None
) -> remap.Session:
    """A session whose backend the test has made: with faults, with a trace."""
    platform = remap.advanced.Platform(backend=backend)
    return remap.Session(capacity, page_bytes=page_bytes, mode=mode, platform=platform, config=config)


def make_spec(
    layers: int,
    *,
    min_blocks: int = 4,
    max_blocks: int = 64,
    tokens: int = 16,
    dim: int = 32,
    layout: str = "block_major",
) -> remap.KVSpec:
    return remap.KVSpec(
        layers=layers, kv_heads=1, head_dim=dim, block_tokens=tokens, dtype="float32", min_blocks=min_blocks,
        max_blocks=max_blocks, layout=layout,
    )  # fmt: skip


def times_of(layers: int, compute: float, transfer: float) -> LayerTimes:
    return LayerTimes((compute,) * layers, (transfer,) * layers)


def set_times(tenant: Any, decode: LayerTimes, prefill: LayerTimes | None = None, copy_s: float | None = None) -> None:
    """What would be measured, so that decisions are exact."""
    timing = internals(tenant)._state.timing
    timing.decode, timing.prefill = lambda: decode, lambda: prefill or decode
    timing.shared, timing.seconds_per_byte = lambda sharers: decode, lambda: 0.0  # and nobody waits for others' copies
    if copy_s is not None:
        timing.copy_seconds = lambda: copy_s


def forward(session: remap.Session, tenant: remap.Tenant, layers: Sequence[bytes]) -> None:
    """One pass that reads every layer that the tenant computes whole, and first what stands before the first one."""
    state = internals(tenant)._state
    with tenant.forward():
        for ends in range(state.layers, state.parts):
            assert ctypes.string_at(state.addresses[ends], len(layers[ends])) == layers[ends]
        for index in (layer for layer in internals(tenant).computed if layer not in internals(tenant).elsewhere):
            expected = layers[index]
            tenant.wait(index)
            got = ctypes.string_at(remap.advanced.layer_address(session, tenant.name, index), len(expected))
            tenant.done(index)
            assert got == expected, f"layer {index} of {tenant.name} reads {got[:4]!r}, not {expected[:4]!r}"


def write_block(tenant: remap.Tenant, block: int, value: int) -> None:
    for offset, nbytes in internals(tenant).kv.geometry.byte_ranges_of_block(block):
        ctypes.memset(internals(tenant).kv.address + offset, value, nbytes)


def read_block(tenant: remap.Tenant, block: int) -> set[int]:
    found: set[int] = set()
    for offset, nbytes in internals(tenant).kv.geometry.byte_ranges_of_block(block):
        found |= set(ctypes.string_at(internals(tenant).kv.address + offset, nbytes))
    return found


class External:
    """An engine's own allocator. prompt: withdrawn ids that are free go back at once; otherwise by `give_back`."""

    def __init__(self, tenant: Any, prompt: bool = True) -> None:
        self.tenant, self.prompt = tenant, prompt
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # added, withdrawn
        self.free: set[int] = set()
        self.used: dict[int, int] = {}
        self.leaving: set[int] = set()
        self.tenant.kv.subscribe(self, external=True)

    def __call__(self, added: Sequence[int], withdrawn: Sequence[int]) -> None:
        self.calls.append((tuple(added), tuple(withdrawn)))
        self.leaving -= set(added)
        self.free |= set(added) - set(self.used)
        self.free -= set(withdrawn)
        self.leaving |= set(withdrawn)
        if self.prompt:
            self.give_back()

    def give_back(self) -> None:
        back = self.leaving - set(self.used)
        self.leaving -= back
        self.tenant.kv.returned(back)

    def use(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.free.remove(block)
            self.used[block] = block % 250 + 1
            write_block(self.tenant, block, self.used[block])

    def finish(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self.used[block]
            if block not in self.leaving:
                self.free.add(block)
            elif self.prompt:
                self.give_back()

    def check(self) -> None:
        """It and the pool mean the same blocks, and nobody has touched those in use."""
        pool = internals(self.tenant).kv.pool
        assert self.free | (set(self.used) - self.leaving) == set(pool.open_ids())
        assert self.leaving == set(pool.live_ids()) - set(pool.open_ids())
        for block, value in self.used.items():
            assert read_block(self.tenant, block) == {value}

    @property
    def demand(self) -> Any:
        return lambda blocks: remap.Demand(blocks, free=len(self.free))


def regions_of(tenant: Any) -> list[int]:
    pages = tenant.pages
    return [*pages.layer_regions, *([pages.ring_region] if tenant.ring_address else [])]


def visible(session: remap.Session) -> dict[str, Any]:
    """All that a caller can see of a session and that a failed call must leave as it was."""
    session._changes.await_worker()  # else what regions show may change between two looks, by an earlier change
    snapshot = session.snapshot()
    arena = session._arena
    return {
        "pages": snapshot.pages,
        "owners": tuple(arena.owners()),
        "epoch": snapshot.epoch,
        "tenants": {
            name: (
                seen.remapped,
                seen.buffers,
                seen.streamed,
                seen.pages,
                seen.usable_blocks,
                seen.free_blocks,
                seen.live_blocks,
                seen.withdrawn_blocks,
                session._tenants[name].kv.pool.live_ids(),
                session._tenants[name].kv.pool.owned_slots(),
            )
            for name, seen in snapshot.tenants.items()
        },
        "shown": {
            (name, region): tuple(arena.shown(region))
            for name, tenant in session._tenants.items()
            for region in regions_of(tenant)
        },
    }
