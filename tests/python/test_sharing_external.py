"""Engines with their own allocators among several tenants: as holders of what others lend, and as lenders.

Such an engine hears which ids are withdrawn and returns them at once, or later; which of its blocks are in use nobody else knows.
"""

from __future__ import annotations

from typing import Any

import pytest
from arena_worlds import External
from sharing_worlds import EAGER, Shared, set_times, times_of

import remap
from remap import OutOfBlocks
from remap.internals import internals

N = 8  # layers: a block is a page


def world_of(pages: dict[str, int], *, spare: int = 0, **config: Any) -> Shared:
    settings = remap.advanced.Knobs(**{**EAGER, **config})
    world = Shared({name: [count] * N for name, count in pages.items()}, spare=spare, config=settings)
    for engine in world.engines.values():
        set_times(engine, times_of(N, 1.0, 0.1))
    return world


def external(world: Shared, name: str, prompt: bool = True) -> External:
    """`world.check` looks at its blocks from now on."""
    made = world.engines[name].external = External(world.engines[name].tenant, prompt)
    return made


@pytest.mark.parametrize("prompt", [True, False])
def test_a_holder_whose_blocks_are_in_use_keeps_them_and_no_step_raises(prompt: bool) -> None:
    with world_of({"h": 1, "i": 2}) as world:
        h = external(world, "h", prompt)
        world.session.deactivate("i")
        world.lend("i", 3, to="h")
        highest = max(h.free)
        h.use([highest])
        for _ in range(6):  # enough are free, but not those
            world.session.step({"h": h.demand(0)})
            world.check()
            h.give_back()
            world.check()
        assert internals(world.engines["i"].tenant).lent_pages > 0
        h.finish([highest])
        for _ in range(6):
            world.session.step({"h": h.demand(0)})
        left = internals(world.engines["i"].tenant).lent_pages
        assert (left == 0) is prompt  # nobody waits for an engine that answers later
        world.check()


@pytest.mark.parametrize("prompt", [True, False])
def test_activation_names_the_blocks_in_use_and_succeeds_when_they_are_free(prompt: bool) -> None:
    with world_of({"h": 1, "i": 2}) as world:
        h = external(world, "h", prompt)
        world.session.deactivate("i")
        world.lend("i", 3, to="h")
        h.use(sorted(h.free)[-4:])
        owners = world.owners()
        report = world.session.activate("i")
        assert not report.activated and set(h.used) <= set(report.preempt["h"])
        assert world.owners() == owners
        partial = world.session.activate("i", partial=True)
        assert partial.activated and partial.streamed
        world.check()
        h.finish(list(h.used))
        report = world.session.activate("i")
        assert report.activated is prompt
        world.check()


@pytest.mark.parametrize("prompt", [True, False])
def test_unused_blocks_of_such_an_engine_are_taken_as_far_as_it_returns_them(prompt: bool) -> None:
    with world_of({"e": 1, "r": 1}, spare=8, max_layers=0) as world:
        e = external(world, "e", prompt)
        world.session.step({"e": e.demand(9)})
        before = e.tenant.kv.usable_blocks
        e.use(sorted(e.free)[:2])
        world.engines["r"].fill()
        world.session.step({"e": e.demand(1)})
        report = world.session.step({"e": e.demand(1), "r": remap.Demand(4)})
        if prompt:
            assert not report.unmet_blocks and 2 <= e.tenant.kv.usable_blocks < before and e.free
        else:
            assert report.unmet_blocks == {"r": 3} or e.tenant.kv.usable_blocks == before
        e.give_back()
        world.check()


def test_a_refused_change_does_not_ask_for_blocks_that_came_back() -> None:
    """A change drains, and its engine has returned what nothing uses; then another change is refused: the engine was given the
    blocks again, and asked for them again, though nothing is said to have changed."""
    with Shared({"a": [2] * 4, "b": [2] * 3}, config=remap.advanced.Knobs(**EAGER, slowdown=9.0)) as world:
        for engine in world.engines.values():
            engine.serve()
        allocator = External(world.engines["a"].tenant, False)
        world.remap("a", 2, 1, "nested")
        allocator.use(sorted(allocator.free)[-3:])
        world.remap("a", 0, drain=True)
        allocator.give_back()
        before = world.engines["a"].kv.live_blocks
        with pytest.raises(OutOfBlocks):
            world.remap("a", 0)
        assert world.engines["a"].kv.live_blocks == before
