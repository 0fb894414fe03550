"""Pages between tenants: layers of one are KV blocks of another, come home again, and nobody's bytes are lost on the way."""

from __future__ import annotations

import pytest
from arena_worlds import read_block
from sharing_worlds import Shared, set_times, times_of

import remap

SHAPES = {"a": (6, 2), "b": (8, 3), "c": (5, 1)}
MODES = ["aliased", "strict"]


@pytest.mark.parametrize("mode", MODES)
def test_layers_of_an_inactive_tenant_become_kv_of_another_and_come_home(mode: str) -> None:
    with Shared(SHAPES, mode=mode) as world:
        a, b = world.engines["a"], world.engines["b"]
        before = a.tenant.kv.usable_blocks
        world.session.deactivate("b")
        report = remap.advanced.lend(world.session, "b", 4, to="a")
        assert report.added_blocks["a"] > 0 and b.tenant.streamed == (3, 4, 5, 6, 7)
        assert a.tenant.kv.usable_blocks == before + report.added_blocks["a"]
        seen = world.session.snapshot().tenants
        assert (seen["b"].lent_pages, seen["a"].borrowed_pages, dict(seen["b"].lent_to)) == (12, 12, {"a": 12})
        for block in a.tenant.kv.allocate(a.tenant.kv.free_blocks):
            assert read_block(a.tenant, block) == {0}, "what another tenant's layers were reads zero"
            a.held[block] = 0
        a.free(list(a.held))
        a.allocate(a.tenant.kv.free_blocks - 1)
        world.check()
        report = world.activate("b")
        assert report.activated and set(report.restored) == {3, 4, 5, 6, 7} and report.streamed == ()
        assert a.tenant.kv.usable_blocks == before
        world.check()
        assert world.session.snapshot().tenants["b"].lent_pages == 0


@pytest.mark.parametrize("mode", MODES)
def test_activation_names_the_blocks_that_are_in_its_way_and_changes_nothing(mode: str) -> None:
    with Shared(SHAPES, mode=mode) as world:
        a, b = world.engines["a"], world.engines["b"]
        world.session.deactivate("b")
        remap.advanced.lend(world.session, "b", 5, to="a")
        a.allocate(a.tenant.kv.free_blocks)
        owners = world.session._arena.owners()
        report = world.session.activate("b")
        assert not report.activated and not b.tenant.active and not report.moved
        assert set(report.preempt) == {"a"} and set(report.preempt["a"]) <= set(a.held)
        assert world.session._arena.owners() == owners
        with pytest.raises(remap.InvalidState, match="inactive"):
            b.serve()
        a.free(report.preempt["a"])
        report = world.tell(world.session.activate("b"))
        assert report.activated and len(report.restored) == 6
        world.check()


def test_partial_activation_depends_on_nobody() -> None:
    """No tenant starves: whoever holds the pages and gives none back, the first pass can begin at once."""
    with Shared(SHAPES) as world:
        a = world.engines["a"]
        world.session.deactivate("b")
        remap.advanced.lend(world.session, "b", 7, to="a")
        a.allocate(a.tenant.kv.free_blocks)
        set_times(world.engines["b"], times_of(8, 1.0, 2.0))
        report = world.session.activate("b", partial=True)
        assert report.activated and report.streamed and report.preempt
        seen = world.session.snapshot().tenants["b"]
        # All eight layers through one buffer: each waits for its copy of 2 s, since nothing computes between two of them.
        assert (seen.remapped, seen.selection, seen.predicted_stall_s) == (7.0, "suffix", 16.0)
        world.check()
        a.free(sorted(a.held)[: len(a.held) // 2])
        report = world.tell(world.session.activate("b", partial=True))
        assert report.activated and len(report.restored) >= 1
        world.check()


def test_a_holder_inside_a_pass_keeps_its_pages() -> None:
    with Shared(SHAPES) as world:
        a = world.engines["a"]
        world.session.deactivate("b")
        remap.advanced.lend(world.session, "b", 4, to="a")
        a.allocate(a.tenant.kv.free_blocks // 2)
        owners = world.session._arena.owners()
        with a.tenant.forward():
            with pytest.raises(remap.InvalidState):
                world.session.activate("b")
            with pytest.raises(remap.InvalidState):
                remap.advanced.lend(world.session, "b", 2)
            assert world.session._arena.owners() == owners
            a.check()
        assert world.activate("b").activated
        world.check()


def test_an_active_tenant_lends_and_goes_on_serving() -> None:
    with Shared(SHAPES) as world:
        remap.advanced.remap(world.session, "b", 1, 1)
        remap.advanced.lend(world.session, "b", 4, to="c")
        assert world.engines["b"].tenant.remapped == 4
        world.check()
        remap.advanced.remap(
            world.session, "b", 2, 1, "nested"
        )  # partly lent, partly its own KV: all of it can be asked back
        world.check()
        world.tell(remap.advanced.remap(world.session, "b", 0))
        assert world.session.snapshot().tenants["b"].lent_pages == 0
        world.check()


def test_what_is_lent_and_free_goes_to_whoever_is_named_later() -> None:
    with Shared(SHAPES) as world:
        world.session.deactivate("b")
        remap.advanced.lend(world.session, "b", 3)
        assert world.session.snapshot().pages.free == 9
        report = remap.advanced.lend(world.session, "b", 3, to="a")
        assert report.added_blocks["a"] > 0 and world.session.snapshot().pages.free == 0
        world.check()


def test_the_ring_of_a_tenant_that_has_lent_is_where_its_region_shows_it_again() -> None:
    with Shared(SHAPES, trace=True) as world:
        b = world.engines["b"].tenant
        preference = b._state.pages.ring_preference
        world.session.deactivate("b")
        remap.advanced.lend(world.session, "b", 3)
        assert b._state.pages.ring_layers == (7,)  # the last one comes home last
        world.activate("b")
        assert b._state.pages.ring_preference == preference
        remap.advanced.remap(world.session, "b", 3, 1, "nested")
        assert b._state.pages.ring_layers == preference[:1]
        world.check()


def test_pages_that_are_lent_do_not_become_the_home_of_a_newcomer() -> None:
    with Shared(SHAPES, spare=12) as world:
        world.session.deactivate("b")
        remap.advanced.lend(world.session, "b", 7)  # free now, nobody's yet
        lent = set(world.engines["b"].tenant._state.pages.lent)
        assert len(lent) == 21
        from sharing_worlds import Engine

        world.engines["d"] = Engine(world.session, "d", 4, 2, 9)
        d = world.engines["d"].tenant._state
        assert lent.isdisjoint(page for home in d.pages.homes for page in home)
        world.check()
        assert world.activate("b").activated
        world.check()
        world.session.deactivate("b")
        remap.advanced.lend(world.session, "b", 3, to="d")  # who came later has places for them too
        assert world.session.snapshot().tenants["d"].borrowed_pages == 9
        world.check()


def test_whoever_is_detached_gives_back_and_takes_nothing_along() -> None:
    with Shared(SHAPES) as world:
        for name in ("b", "c"):
            world.session.deactivate(name)
        remap.advanced.lend(world.session, "b", 4, to="a")
        remap.advanced.lend(world.session, "c", 2, to="a")
        world.session.detach("b")  # the lender: its pages are simply the holder's now
        del world.engines["b"]
        world.check()
        world.session.detach("a")  # the holder
        del world.engines["a"]
        world.check()
        assert world.activate("c").activated
        world.check()
