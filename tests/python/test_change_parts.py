# SPDX-License-Identifier: Apache-2.0
"""Parts of a change (`Changes.part`): what fails is dropped alone, and what is due is done before anything relies on it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from sharing_worlds import External, Faulty, Shared, read_block

import remap
from remap import _core
from remap.errors import DriverError, InvalidState, OutOfBlocks
from remap.memory.pages import plan_free_pages

MODES = ("aliased", "strict")
SIZES = {"a": [2] * 4, "b": [2] * 4}


class Stop(Exception):
    pass


def loose(core: Any, name: str) -> list[int]:
    """The tenant's KV pages, beyond those that it always has, the first ones first."""
    tenant = core.tenant(name)
    places = tenant.kv.geometry.donation_indices(tenant.kv.pool.owned_slots())
    return [tenant.donation_order[place] for place in places if place >= tenant.reserved]


def leave(core: Any, name: str, pages: list[int]) -> dict[int, int]:
    tenant = core.tenant(name)
    return core.changes.apply(tenant, plan_free_pages(tenant.pages, pages, give=False))


def take(core: Any, name: str, pages: list[int]) -> None:
    tenant = core.tenant(name)
    core.changes.apply(tenant, plan_free_pages(tenant.pages, pages, give=True))


def world_of(mode: str, **options: Any) -> Shared:
    world = Shared(SIZES, spare=16, mode=mode, **options)
    world.session.step({"a": world.engines["a"].kv.free_blocks + 20})
    return world


def half_full(world: Shared) -> Any:
    """a, whose blocks have to move when its last pages go."""
    a = world.engines["a"]
    a.fill(leave=len(a.kv.pool.open_ids()) // 2)
    return a


def works(world: Shared) -> None:
    world.tell(world.session.step({"a": 0}))  # has the moves
    for engine in world.engines.values():
        engine.check()
        engine.poison()
        engine.serve()
        engine.check()
    remap.advanced.check(world.session)


@pytest.mark.parametrize("mode", MODES)
def test_an_inner_part_goes_back_alone(mode: str) -> None:
    with world_of(mode) as world:
        a, b = half_full(world), world.engines["b"]
        usable = a.kv.usable_blocks, b.kv.usable_blocks

        def change(core: Any) -> None:
            pages = loose(core, "a")
            with core.changes.part():
                assert leave(core, "a", pages[-2:])
                with pytest.raises(Stop), core.changes.part():
                    take(core, "b", pages[-2:])
                    raise Stop
                assert core.changes.draft.holders(pages[-2:]) == []
                with pytest.raises(OutOfBlocks), core.changes.part():
                    leave(core, "a", loose(core, "a"))  # live blocks have no room

        world.session.exclusively(change)
        assert a.kv.usable_blocks < usable[0] and b.kv.usable_blocks == usable[1]
        works(world)


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_block_moves_where_another_has_moved_away(mode: str, undone: bool) -> None:
    """Their bytes are copied when the change is made, one move behind the other."""
    with world_of(mode) as world:
        a = world.engines["a"]
        total = a.kv.usable_blocks
        a.fill(leave=8)

        def change(core: Any) -> None:
            pages = loose(core, "a")
            with core.changes.part():
                first = leave(core, "a", pages[-3:])
                take(core, "a", pages[-3:])
                then = leave(core, "a", pages[:2])
                assert set(first) & set(then.values()), "some move where others were"
                if undone:
                    raise Stop

        with pytest.raises(Stop) if undone else contextlib.nullcontext():
            world.session.exclusively(change)
        assert not undone or a.kv.usable_blocks == total
        works(world)


@pytest.mark.parametrize("mode", MODES)
def test_moves_that_fail_are_made_before_anything_reads_the_blocks(mode: str) -> None:
    with Faulty(mode) as world:
        a = world.engines["a"]
        world.step(a=20)
        half_full(world)
        for call in (_core.Call.copy, _core.Call.copy_batch):  # of the host, of a stream
            world.fault.arm(call, 1, True)
        moved = world.session.exclusively(lambda core: leave(core, "a", loose(core, "a")[-3:]))
        assert moved and world.session._tenants["a"].kv.due_moves
        with pytest.raises(DriverError), a.tenant.forward():
            pass
        with pytest.raises(DriverError):
            remap.advanced.remap(world.session, "a", 3)
        with pytest.raises(InvalidState, match="not hold their KV yet"):
            a.kv.copy_out(sorted(moved.values()))
        world.fault.disarm()
        works(world)
        assert not world.session._tenants["a"].kv.due_moves


@pytest.mark.parametrize("mode", MODES)
def test_zeroes_that_fail_are_made_before_the_blocks_are_handed_out(mode: str) -> None:
    with Faulty(mode) as world:
        a, c = world.engines["a"], world.engines["c"]
        world.step(a=20)
        usable = c.kv.usable_blocks

        def change(core: Any) -> None:
            pages = [page for page in loose(core, "a") if page in core.tenant("c").index_of][-3:]
            with core.changes.part():
                leave(core, "a", pages)
                take(core, "c", pages)

        a.poison()
        world.fault.arm(_core.Call.fill, 1)
        world.session.exclusively(change)
        world.fault.disarm()
        assert c.kv.usable_blocks == usable and world.session._tenants["c"].rest.late
        remap.advanced.check(world.session)
        c.serve()
        assert c.kv.usable_blocks > usable and world.session._tenants["c"].rest is None
        for block in c.kv.allocate(c.kv.free_blocks):
            assert read_block(c.tenant, block) == {0}
        remap.advanced.check(world.session)


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_page_goes_from_one_tenant_to_another_in_a_change(mode: str, undone: bool) -> None:
    with world_of(mode) as world:
        half_full(world)
        b = world.engines["b"]
        usable, epoch = b.kv.usable_blocks, world.session.snapshot().epoch
        pages = world.session.exclusively(lambda core: loose(core, "a")[-4:])

        def change(core: Any) -> None:
            with core.changes.part():
                leave(core, "a", pages)
                take(core, "b", pages)
                assert b.kv.usable_blocks == usable, "not before it is decided"
                if undone:
                    raise Stop

        with pytest.raises(Stop) if undone else contextlib.nullcontext():
            world.session.exclusively(change)
        if undone:
            assert (b.kv.usable_blocks, world.session.snapshot().epoch) == (usable, epoch)
        else:
            assert b.kv.usable_blocks > usable and world.session.snapshot().epoch == epoch + 1, "one decision"
            assert world.session._changes.draft.holders(pages) == [(world.session._tenants["b"].number, pages)]
            for block in b.kv.allocate(b.kv.free_blocks):
                assert read_block(b.tenant, block) == {0}
                b.held[block] = 0
            b.free()
        works(world)


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_hears_that_its_blocks_are_not_withdrawn_after_all(mode: str) -> None:
    with world_of(mode) as world:
        a = world.engines["a"]
        made = a.external = External(a.tenant)
        made.use(sorted(made.free)[:2])
        before, heard = set(made.free), len(a.kv.pool.open_ids())

        def change(core: Any) -> None:
            with core.changes.part():
                leave(core, "a", loose(core, "a")[-4:])
                assert len(a.kv.pool.open_ids()) < heard and set(made.free) < before, "it has heard at once"
                raise Stop

        with pytest.raises(Stop):
            world.session.exclusively(change)
        assert set(made.free) == before and len(a.kv.pool.open_ids()) == heard
        works(world)
