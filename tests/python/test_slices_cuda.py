"""Slices on a CUDA device, here the emulated driver: changes while the device is busy, and random ones that nobody waits for."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from cuda_streams import Driver
from test_session_cuda import SIZES, World, busy, driver, library, make, mode, other, stream  # noqa: F401  (fixtures)

import remap
from remap.errors import InvalidArgument
from remap.memory.restream import restream

# ruff: noqa: F811  (fixtures as arguments)


def change(world: World, k: int, buffers: int) -> dict[int, int]:
    return restream(world.session._changes, world.tenant._state, k, buffers, "slices")


def test_growth_waits_for_nobody(make: Any, driver: Driver, stream: int) -> None:
    world = make()
    world.steady(stream, driver)
    heard: list[int] = []
    world.kv.subscribe(lambda added, withdrawn: heard.append(world.calls()))
    for k in (1, 2, 3):
        with busy(driver, stream):
            world.a_pass(stream)  # reads, later, the pages that are given away now
            heard.clear()
            calls = world.calls()
            change(world, k, 1)
            assert len(heard) == 1
            if k == 1:
                assert heard == [calls]  # usable before any call of the backend
            for block in world.kv.allocate(world.kv.free_blocks):
                world.write_block(stream, block, 0xDF)
        world.steady(stream, driver)


@pytest.mark.parametrize(("before", "after"), [((3, 1), (1, 1)), ((2, 1), (1, 1)), ((3, 2), (0, 1)), ((2, 2), (1, 1))])
def test_a_shrink_waits_for_nobody_and_live_blocks_move(
    make: Any, driver: Driver, stream: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    world = make()
    change(world, *before)
    world.steady(stream, driver)
    ids = world.kv.allocate(world.kv.free_blocks)
    world.kv.free(ids[:-5])
    live = {block: 11 + index for index, block in enumerate(ids[-5:])}
    for block, value in live.items():
        world.write_block(stream, block, value)
    with busy(driver, stream):
        world.a_pass(stream)
        moved = change(world, *after)
        assert moved
        live = {moved.get(block, block): value for block, value in live.items()}
        for block, value in live.items():
            world.read_block(stream, block, value)
        for block in world.kv.allocate(world.kv.free_blocks):
            world.write_block(stream, block, 0xDF)
    for _ in range(2):
        world.a_pass(stream)
    for block, value in live.items():
        world.read_block(stream, block, value)
    driver.synchronize(stream)
    world.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_slices_and_passes_that_nobody_waits_for(
    make: Any, driver: Driver, stream: int, other: int, mode: str, seed: int
) -> None:
    rng = random.Random(seed)
    world = make(mode)
    live: dict[int, int] = {}
    changed = 0
    for number in range(40):
        compute = rng.choice([stream, stream, other, None])
        if compute is None:
            world.host_pass()
        else:
            gate = driver.hold(compute) if rng.random() < 0.3 else None
            if gate is not None:
                gate.open_once(threading.Event(), 0.01)
            world.a_pass(compute)
            with world.tenant.forward(stream=compute):
                for block in list(live):
                    if rng.random() < 0.3:
                        live[block] = 1 + rng.randrange(250)
                        world.write_block(compute, block, live[block])
                    world.read_block(compute, block, live[block])
                world.wait_for_all()
        for _ in range(rng.choice([1, 1, 2])):
            try:
                moved = change(world, rng.randint(0, max(SIZES)), rng.choice([1, 2]))
                changed += 1
            except (remap.OutOfBlocks, InvalidArgument):
                moved = {}
            live = {moved.get(block, block): value for block, value in live.items()}
        if compute is not None:
            with world.tenant.forward(stream=compute):
                for block in world.kv.allocate(rng.randint(0, world.kv.free_blocks)):
                    live[block] = 1 + rng.randrange(250)
                    world.write_block(compute, block, live[block])
                world.wait_for_all()
        gone = rng.sample(sorted(live), rng.randint(0, len(live)))
        world.kv.free(gone)
        for block in gone:
            del live[block]
        if number % 10 == 9:
            driver.synchronize(stream)
            driver.synchronize(other)
            world.check()
    driver.synchronize(other)
    assert changed > 20
