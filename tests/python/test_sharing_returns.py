"""When lent layers go home: by the controller (rarely enough), and by an activation (always). Injected times, as in
test_sharing_controller.py: eight layers a tenant, a block is a page."""

from __future__ import annotations

from typing import Any

import pytest
from sharing_worlds import times_of
from test_sharing_controller import N, Shared, config_of, hold, world_of

import remap
from remap.internals import internals


@pytest.mark.parametrize("active", [False, True])
def test_layers_come_home_when_their_holders_can_spare_them_and_it_is_paid_for(active: bool) -> None:
    with world_of({"r": 1, "i": 2}, times_of(N, 1.0, 0.5), contention=0.25, map_s=0.0, dwell=2, slowdown=9.0) as world:
        r, i = world.engines["r"], world.engines["i"]
        if not active:
            world.session.deactivate("i")
        world.lend("i", 3, to="r")
        r.fill()
        for _ in range(50):
            assert not world.step(r=0).changed  # nobody can spare anything
        r.free(sorted(r.held)[2:])
        steps = 0
        while internals(i.tenant).lent_pages and steps < 60:
            before = i.tenant.remapped
            world.step(r=0)
            steps += 1
            assert i.tenant.remapped >= before - 1, "one at a time"
        assert internals(i.tenant).lent_pages == 0
        assert steps >= 3 * (2 if active else 4), "each was paid for first"
        world.check()


def test_without_reversion_nothing_comes_home_but_by_activation() -> None:
    with world_of({"r": 1, "i": 2}, contention=9.0, dwell=1, reversion=False) as world:
        world.session.deactivate("i")
        world.lend("i", 3, to="r")
        for _ in range(60):
            assert not world.step(r=0).changed
        assert world.engines["i"].tenant.remapped == 3
        assert world.activate("i").activated and not world.engines["i"].tenant.streamed


def test_headroom_that_rose_since_does_not_ask_back_what_a_holder_gave() -> None:
    """The low watermark follows the demand: within sigma of what was wanted when the layer went home, it brings nothing back."""
    options: dict[str, Any] = {"contention": 9.0, "map_s": 0.0, "dwell": 3, "hysteresis_blocks": 3}
    with world_of({"r": 1, "i": 2}, reserve_blocks=None, **options) as world:
        r, i = world.engines["r"], world.engines["i"]
        world.session.deactivate("i")
        world.lend("i", 3, to="r")
        hold(r, 3)
        for _ in range(50):
            if i.tenant.remapped <= 2:
                break
            world.step(r=0)
        assert (i.tenant.remapped, r.kv.free_blocks) == (2, 3)
        r.free()
        world.step(r=0)
        hold(r, 3)
        for _ in range(20):  # live and wanted are 3 more than then, after a rise by 6
            world.step(r=3)
            assert (i.tenant.remapped, r.tenant.remapped) == (2, 0)
        world.step(r=4)
        assert r.kv.free_blocks >= 4


def test_a_layer_stays_while_one_of_its_holders_needs_it() -> None:
    with world_of({"a": 1, "b": 1, "i": 3}, contention=9.0, map_s=0.0, dwell=1, hysteresis_blocks=2) as world:
        a, i = world.engines["a"], world.engines["i"]
        world.session.deactivate("i")
        world.lend("i", 1)
        world.session._tenants["a"].controller.config = config_of(max_layers=0, hysteresis_blocks=2)
        world.step(a=3)  # two of the layer's three pages
        world.lend("i", 1, to="b")
        assert {name: world.session.snapshot().tenants[name].borrowed_pages for name in "ab"} == {"a": 2, "b": 1}
        hold(a, 2)  # it could move them, and would have fewer free blocks than its hysteresis
        for _ in range(20):
            world.step(a=0, b=0)
            assert internals(i.tenant).lent_pages == 3
        a.free()
        for _ in range(20):
            world.step(a=0, b=0)
        assert internals(i.tenant).lent_pages == 0
        world.check()


def test_a_layer_waits_for_the_pass_of_its_holder() -> None:
    with world_of({"r": 1, "i": 2}, contention=9.0, map_s=0.0, dwell=1) as world:
        r, i = world.engines["r"], world.engines["i"]
        world.session.deactivate("i")
        world.lend("i", 3, to="r")
        with r.tenant.forward():
            for _ in range(10):
                assert not world.step().changed
                assert i.tenant.remapped == 3
        for _ in range(10):
            world.step()
        assert internals(i.tenant).lent_pages == 0
        world.check()


# -- turns -----------------------------------------------------------------------------------------------------------------


def two_holders(world: Shared) -> None:
    """One free page, and both have a block to move: one of them is named, and freeing it is enough."""
    world.lend("i", 1, to="a")
    world.lend("i", 2, to="b")


def free_pages(world: Shared) -> None:
    """Pages that are free and are to come home are no room."""
    world.lend("i", 1, to="a")
    world.lend("i", 3)


def the_lender_itself(world: Shared) -> None:
    """It has taken its own lent pages back as KV, and used them."""
    world.session.activate("i")
    world.lend("i", 2, to="a")
    world.lend("i", 4)
    world.session._tenants["i"].controller.config = config_of(max_layers=0)
    world.step(i=6)  # all of one layer, and a part of the next


@pytest.mark.parametrize(
    ("prepare", "pages", "spare", "named"),
    [(two_holders, 1, 1, {1}), (free_pages, 2, 0, {2}), (the_lender_itself, 3, 0, set(range(1, 10)))],
)
def test_who_is_in_the_way_of_an_activation_is_named_and_freeing_it_is_enough(
    prepare: Any, pages: int, spare: int, named: set[int]
) -> None:
    with world_of({"a": 1, "b": 1, "i": pages}, spare=spare) as world:
        world.session.deactivate("i")
        prepare(world)
        for engine in world.engines.values():
            engine.fill()
        before = world.owners()
        report = world.session.activate("i")
        assert not report.activated and sum(map(len, report.preempt.values())) in named
        assert world.owners() == before
        if prepare is the_lender_itself:
            assert "i" in report.preempt
            assert world.session.activate("i", partial=True).activated
        for name, blocks in report.preempt.items():
            world.engines[name].free(blocks)
        assert world.tell(world.session.activate("i")).activated
        world.check()


def test_a_caller_may_reuse_its_dictionary() -> None:
    with world_of({"r": 1, "d": 1}, spare=6) as world:
        wanted = {"d": remap.Demand(4)}
        world.session.step(wanted)
        wanted.clear()
        assert world.session._tenants["d"].demand == remap.Demand(4)


# -- layers that must stay --------------------------------------------------------------------------------------------------


def test_layers_declared_as_registered_are_not_lent_before_or_after() -> None:
    with world_of({"r": 1, "i": 2}, contention=9.0, map_s=0.0, dwell=1) as world:
        i = world.engines["i"].tenant
        address = remap.advanced.layer_address(world.session, "i", 7)
        remap.advanced.declare_registered(world.session, address, 100)
        world.session.deactivate("i")
        with pytest.raises(remap.InvalidArgument):
            world.lend("i", 7, to="r")
        world.lend("i", 3, to="r")
        assert i.streamed == (3, 4, 5, 6) and internals(i)._state.pages.ring_layers == (6,)
        remap.advanced.withdraw_registered(world.session, address, 100)
        address = remap.advanced.layer_address(world.session, "i", i.streamed[0])
        with pytest.raises(remap.InvalidState):
            remap.advanced.declare_registered(world.session, address, 100)
        world.activate("i")
        world.check()
