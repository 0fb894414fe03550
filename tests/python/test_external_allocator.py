"""Engines with their own allocator: they are told what comes and goes, and a shrink waits until they have given blocks back."""

from __future__ import annotations

import pytest
from arena_worlds import External
from byte_world import PLAIN, World, times_of

import remap


@pytest.fixture
def world():
    config = remap.advanced.Knobs(**PLAIN, contention=1e9, dwell=1)
    with World(config, times=times_of(1.0, 0.01)) as made:
        made.engine = External(made.tenant)
        report = made.step(10, free=4)
        assert (report.added_blocks, report.unmet_blocks) == ({"m": 6}, {})
        made.engine.use(sorted(made.engine.free))
        yield made
        made.forward()


def withdrawn(world):
    return world.session.snapshot().tenants["m"].withdrawn_blocks


def test_what_the_engine_has_in_use_is_shown_by_its_last_word(world):
    """An idle engine was shown with all of its blocks in use, and none free."""

    def shown():
        seen = world.session.snapshot().tenants["m"]
        return seen.live_blocks, seen.free_blocks

    assert shown() == (0, 10)  # that four were free, when it had four
    world.step(0, free=0)
    assert shown() == (10, 0)
    world.engine.finish(range(6))
    world.step(0, free=6)
    assert shown() == (4, 6)


def test_an_external_allocator_is_told_and_a_shrink_waits_for_it(world):
    engine = world.engine
    assert engine.calls == [((0, 1, 2, 3), ()), (tuple(range(4, 10)), ())]
    with pytest.raises(remap.InvalidState):
        world.kv.allocate(1)
    world.forward()
    engine.finish(range(4))
    for _ in range(4):  # too few are free
        world.step(0, free=len(engine.free))
    assert world.tenant.remapped == 2
    engine.finish([4, 5])
    world.step(0, free=len(engine.free))  # the last three are withdrawn, and in use
    assert engine.calls[-1][1] == (7, 8, 9)
    assert (world.tenant.remapped, withdrawn(world)) == (2, 3)
    world.forward()
    engine.finish([7, 8])
    assert not world.step(0, free=len(engine.free)).changed
    assert world.tenant.remapped == 2
    engine.finish([9])
    assert world.step(0, free=len(engine.free)).changed  # a layer came home: nothing was added, nothing moved
    assert (world.tenant.remapped, world.kv.usable_blocks) == (1, 7)
