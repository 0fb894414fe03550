"""Engines with their own allocator: they are told what comes and goes, and a shrink waits until they have given blocks back."""

from __future__ import annotations

import pytest
from arena_worlds import External
from byte_world import PLAIN, World, times_of

import remap


def test_an_external_allocator_is_told_and_a_shrink_waits_for_it():
    config = remap.advanced.Knobs(**PLAIN, contention=1e9, dwell=1)
    with World(config, times=times_of(1.0, 0.01)) as world:
        engine = External(world.tenant)
        assert engine.calls == [((0, 1, 2, 3), ())]
        with pytest.raises(remap.InvalidState):
            world.kv.allocate(1)
        report = world.step(10, free=4)
        assert report.added_blocks == {"m": 6}
        assert report.unmet_blocks == {}
        assert engine.calls[-1] == (tuple(range(4, 10)), ())
        engine.use(sorted(engine.free))
        world.forward()
        low, high = list(range(4)), list(range(4, 10))
        engine.finish(low)
        for _ in range(4):  # too few are free
            world.step(0, free=len(engine.free))
        assert world.tenant.remapped == 2
        engine.finish(high[:2])
        world.step(0, free=len(engine.free))  # the last three are withdrawn, and in use
        withdrawn = engine.calls[-1][1]
        assert withdrawn == (7, 8, 9)
        assert world.tenant.remapped == 2
        assert world.session.snapshot().tenants["m"].withdrawn_blocks == 3
        world.forward()
        engine.finish([7, 8])
        assert not world.step(0, free=len(engine.free)).changed
        assert world.tenant.remapped == 2
        engine.finish([9])
        assert world.step(0, free=len(engine.free)).changed  # a layer came home: nothing was added, nothing moved
        assert world.tenant.remapped == 1
        assert world.kv.usable_blocks == 7
        world.forward()


def test_demand_during_a_drain_takes_the_blocks_back():
    config = remap.advanced.Knobs(**PLAIN, contention=1e9, dwell=1)
    with World(config, times=times_of(1.0, 0.01)) as world:
        engine = External(world.tenant)
        world.step(10, free=4)
        engine.use(sorted(engine.free))
        engine.finish(range(6))
        world.step(0, free=6)
        assert engine.calls[-1][1] == (7, 8, 9)
        assert engine.leaving == {7, 8, 9}
        report = world.step(8, free=len(engine.free))
        assert engine.leaving == set()
        assert world.session.snapshot().tenants["m"].withdrawn_blocks == 0
        assert world.tenant.remapped >= 2
        assert report.unmet_blocks == {}
        assert len(engine.free) >= 8
        engine.finish([6, 7, 8, 9])
        world.forward()


def test_a_change_by_hand_cancels_a_drain():
    config = remap.advanced.Knobs(**PLAIN, contention=1e9, dwell=1)
    with World(config, times=times_of(1.0, 0.01)) as world:
        engine = External(world.tenant)
        world.step(10, free=4)
        engine.use(sorted(engine.free))
        engine.finish(range(6))
        world.step(0, free=6)
        assert engine.leaving == {7, 8, 9}
        remap.advanced.remap(world.session, "m", 3, 1, "nested")
        assert engine.leaving == set()
        assert (world.kv.usable_blocks, world.session.snapshot().tenants["m"].withdrawn_blocks) == (13, 0)
        world.forward()
