"""An inactive tenant that has lent layers is activated: until its first pass has ended, and what zeroing its pages costs.

Two tenants of 16 layers of 8 MiB on the host backend, with real copies. The holder has the donor's last layers as KV. The donor
is activated; at once it runs a pass, computing each layer as soon as it is there. Expected is

    the call of activate()  +  a pass with everything in place  +  schedule.one_shot_delay of the missing layers

where the last is what the report of activate() predicts from the times that the session has measured, and the pass is measured
in turns with it. The call holds what moving live blocks and zeroing take, which are reported by themselves.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from measure import behind, median, record
from shared_tenants import HEAD_DIM, TOKENS, SharedTenants, spend

import remap
from remap import _core
from remap.internals import internals
from remap.memory.restream import take_free_pages
from remap.memory.view import free_pages_of
from remap_serve.sim.results import percentile

LAYERS = 16
PAGES, PAGE = 4, 2 << 20
COMPUTE_S = {"hidden": 0.002, "late": 0.0003}
BLOCK_BYTES = 2 * LAYERS * TOKENS * HEAD_DIM * 2
STILL = remap.advanced.Knobs(reserve_blocks=0, dwell=10**9, min_idle=0.0)
TAIL = 64
ROUNDS = 12


class Clock:
    """Seconds that are spent inside of some calls, added up."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed

    def take(self) -> float:
        """What has been added up since the last time."""
        taken, self.seconds = self.seconds, 0.0
        return taken


class Through:
    """An executor of the core whose calls can be replaced."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def _world(first_blocks: int, compute_s: float = 0.0003) -> SharedTenants:
    world = SharedTenants(("donor", "holder"), LAYERS, PAGES, PAGE, config=STILL, first_blocks=first_blocks)
    remap.advanced.remap(world.session, "donor", LAYERS - 1)
    for _ in range(
        24
    ):  # the link, from copies of layers that no cache holds; attach has timed one that it had just copied
        _pass(world, "donor", 0.0, "decode")
    remap.advanced.remap(world.session, "donor", 0)
    world.warm(compute_s, passes=4)
    return world


def _pass(world: SharedTenants, name: str, compute_s: float, phase: str = "prefill") -> float:
    """Seconds of one pass; that a layer is there when it is waited for is seen by its last bytes."""
    tenant, session = world.tenants[name], world.session
    addresses = [
        remap.advanced.layer_address(session, name, layer) + world.layer_bytes - TAIL for layer in range(LAYERS)
    ]
    tails = [master[-TAIL:].tobytes() for master in world.masters[name]]
    begun = time.perf_counter()
    with tenant.forward(phase=phase):
        for layer in range(LAYERS):
            tenant.wait(layer)
            assert ctypes.string_at(addresses[layer], TAIL) == tails[layer], f"layer {layer} was not there"
            spend(compute_s)
            tenant.done(layer)
        return time.perf_counter() - begun


@pytest.mark.parametrize("live", ["none live", "half live"])
@pytest.mark.parametrize("away", [4, 12])
@pytest.mark.parametrize("load", COMPUTE_S)
def test_first_pass_after_activation(benchmark, load, away, live):
    """load: whether the computation of the layers in place is long enough to load the missing ones behind it.

    live: whether the holder still has blocks in the pages that come home; they move to pages that it keeps."""
    lent_blocks = away * PAGES * PAGE // BLOCK_BYTES
    compute_s = COMPUTE_S[load]
    with _world(lent_blocks if live == "half live" else 8, compute_s) as world:
        session, holder = world.session, world.tenants["holder"]
        changes = session._changes
        changes._executor = Through(changes._executor)
        zeroing, moving = Clock(changes._executor, "zero_due"), Clock(changes, "_fill")
        kv = internals(holder).kv
        spent: dict[str, list[float]] = {"first": [], "call": [], "delay": [], "plain": [], "zero": [], "move": []}
        reports = []

        def setup() -> None:
            world.free("holder")
            session.deactivate("donor")
            remap.advanced.lend(session, "donor", away, to="holder")
            world.quiet()
            if live == "half live":
                ids = kv.allocate(kv.free_blocks)
                keep = lent_blocks // 2  # of the highest ids, which lie in the lent pages
                kv.free(ids[:-keep])
                world.held["holder"] = ids[-keep:]
                for number, block in enumerate(world.held["holder"]):
                    _core.fill_bytes(kv.address + block * BLOCK_BYTES, BLOCK_BYTES, number % 251)
            zeroing.take()
            moving.take()

        def activate() -> None:
            begun = time.perf_counter()
            report = session.activate("donor")
            spent["call"].append(time.perf_counter() - begun)
            _pass(world, "donor", compute_s)
            spent["first"].append(time.perf_counter() - begun)
            reports.append(report)

        def after() -> None:
            report = reports[-1]
            assert report.activated
            assert len(report.restored) >= away
            assert not report.streamed
            spent["delay"].append(report.predicted_stall_s)
            spent["zero"].append(zeroing.take())
            spent["move"].append(moving.take())
            spent["plain"].append(_pass(world, "donor", compute_s))
            world.follow(report.moved)
            for number, block in enumerate(world.held["holder"]):
                got = ctypes.string_at(kv.address + block * BLOCK_BYTES, BLOCK_BYTES)
                assert got == bytes([number % 251]) * BLOCK_BYTES, f"block {block} was moved wrongly"

        def prepare() -> None:
            if reports:
                after()
            setup()

        benchmark.pedantic(activate, setup=prepare, rounds=ROUNDS + 1)
        after()
        world.verify()
        measured = {name: behind(1, samples) for name, samples in spent.items()}  # the first one faults memory in
        expected = [a + b + c for a, b, c in zip(measured["call"], measured["plain"], measured["delay"])]
        ratios = [mine / theirs for mine, theirs in zip(measured["first"], expected)]
        case = f"{away} of {LAYERS} away, {load}, {live}"
        restored, moved = len(reports[-1].restored), len(reports[-1].moved.get("holder", {}))
        record(
            benchmark,
            f"first pass after activation / expected, {case}",
            median(ratios),
            "x",
            measured["first"],
            target=1.2,
            expected_us=median(expected) * 1e6,
            ratio_p99=percentile(ratios, 0.99),
            restored=restored,
        )
        late = [a - b - c for a, b, c in zip(measured["first"], measured["call"], measured["plain"])]
        predicted = median(measured["delay"])
        record(
            benchmark,
            f"delay of it by loading, {case}",
            median(late) * 1e3,
            "ms",
            late,
            predicted_ms=predicted * 1e3,
        )
        record(benchmark, f"delay that was predicted, {case}", predicted * 1e3, "ms", measured["delay"])
        record(benchmark, f"activate() itself, {case}", median(measured["call"]) * 1e3, "ms", measured["call"])
        zeroed = away * PAGES * PAGE
        rate = zeroed / median(measured["zero"]) / 1e9
        record(benchmark, f"zeroing {zeroed >> 20} MiB in it, {case}", rate, "GB/s", measured["zero"], bytes=zeroed)
        if moved:
            rate = moved * BLOCK_BYTES / median(measured["move"]) / 1e9
            record(
                benchmark,
                f"moving {moved} blocks in it, {case}",
                rate,
                "GB/s",
                measured["move"],
                bytes=moved * BLOCK_BYTES,
            )


def test_zeroing_of_pages_that_change_tenant(benchmark):
    """The holder takes pages that were the donor's, and pages that were its own; the difference is zeroing. Beside memset."""
    away = 12
    with _world(8) as world:
        session, holder = world.session, world.tenants["holder"]
        nbytes = away * PAGES * PAGE
        plain = np.ones(nbytes, np.uint8)
        spent: dict[str, list[float]] = {"others": [], "own": [], "memset": []}
        session.deactivate("donor")

        def take() -> None:
            pages = free_pages_of(session._changes, internals(holder)._state)
            assert len(pages) * PAGE == nbytes
            take_free_pages(session._changes, internals(holder)._state, 10**6)

        def others() -> None:
            begun = time.perf_counter()
            take()
            spent["others"].append(time.perf_counter() - begun)

        def setup() -> None:
            world.free("holder")
            remap.advanced.lend(session, "donor", 0)
            remap.advanced.lend(session, "donor", away)
            world.quiet()
            begun = time.perf_counter()
            plain[:] = 0
            spent["memset"].append(time.perf_counter() - begun)

        def own() -> None:
            # Its own blocks of the first pages stay: as many pages as before become free.
            state = internals(holder)._state
            assert (
                session._lending.give_idle(state, (away * PAGES - 1) * PAGE // BLOCK_BYTES, state, 10**6)
                == away * PAGES
            )
            begun = time.perf_counter()
            take()
            spent["own"].append(time.perf_counter() - begun)

        for _ in range(2):
            setup()
            others()
            own()
        for samples in spent.values():
            samples.clear()

        def prepare() -> None:
            if spent["others"]:
                own()
            setup()

        benchmark.pedantic(others, setup=prepare, rounds=20)
        own()
        world.verify()
        zeroing = median(spent["others"]) - median(spent["own"])
        record(
            benchmark,
            f"zeroing of {nbytes >> 20} MiB that change tenant",
            nbytes / zeroing / 1e9,
            "GB/s",
            spent["others"],
        )
        record(
            benchmark,
            "zeroing / memset",
            zeroing / median(spent["memset"]),
            "x",
            spent["others"],
            memset_GBps=nbytes / median(spent["memset"]) / 1e9,
        )
        record(
            benchmark,
            f"taking {nbytes >> 20} MiB of free pages that were its own",
            median(spent["own"]) * 1e6,
            "us",
            spent["own"],
        )
