# SPDX-License-Identifier: Apache-2.0
"""Parts of a change (`Changes.part`): what fails is dropped alone, and what is due is done before anything relies on it."""

from __future__ import annotations

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


@pytest.mark.parametrize("mode", MODES)
def test_an_inner_part_goes_back_alone(mode: str) -> None:
    with world_of(mode) as world:
        a, b = world.engines["a"], world.engines["b"]
        a.fill(leave=len(a.kv.pool.open_ids()) // 2)
        usable = a.kv.usable_blocks, b.kv.usable_blocks

        def change(core: Any) -> Any:
            pages = loose(core, "a")
            with core.changes.part():
                moved = leave(core, "a", pages[-2:])
                assert moved
                with pytest.raises(Stop), core.changes.part():
                    take(core, "b", pages[-2:])
                    take(core, "b", core.changes.draft.free_pages()[:1]) if core.changes.draft.free_pages() else None
                    raise Stop
                assert core.changes.draft.holders(pages[-2:]) == []
                with pytest.raises(OutOfBlocks), core.changes.part():
                    leave(core, "a", loose(core, "a"))  # live blocks have no room
            return moved

        moved = world.session.exclusively(change)
        world.tell(world.session.step({"a": 0}))  # has the moves
        assert a.kv.usable_blocks < usable[0] and b.kv.usable_blocks == usable[1] and moved
        for engine in (a, b):
            engine.check()
            engine.serve()
        remap.advanced.check(world.session)


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_block_moves_where_another_has_moved_away(mode: str, undone: bool) -> None:
    """Their bytes are copied when the change is made, one move behind the other."""
    with world_of(mode) as world:
        a = world.engines["a"]
        total = a.kv.usable_blocks
        a.fill()
        a.free(sorted(a.held)[:8])

        def change(core: Any) -> list[dict[int, int]]:
            pages = loose(core, "a")
            with core.changes.part():
                moved = [leave(core, "a", pages[-3:])]
                take(core, "a", pages[-3:])
                moved.append(leave(core, "a", pages[:2]))
                if undone:
                    raise Stop
            return moved

        if undone:
            with pytest.raises(Stop):
                world.session.exclusively(change)
            assert a.kv.usable_blocks == total
        else:
            first, then = world.session.exclusively(change)
            assert set(first) & set(then.values()), "some move where others were"
            world.tell(world.session.step({"a": 0}))
        a.check()
        a.poison()
        a.check()
        remap.advanced.check(world.session)


@pytest.mark.parametrize("mode", MODES)
def test_moves_that_fail_are_made_before_anything_reads_the_blocks(mode: str) -> None:
    with Faulty(mode) as world:
        a = world.engines["a"]
        world.step(a=20)
        a.fill()
        a.free(sorted(a.held)[: len(a.held) // 2])
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
        world.tell(world.session.step({"a": 0}))
        a.serve()
        a.check()
        assert not world.session._tenants["a"].kv.due_moves
        remap.advanced.check(world.session)


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_page_goes_from_one_tenant_to_another_in_a_change(mode: str, undone: bool) -> None:
    with world_of(mode) as world:
        a, b = world.engines["a"], world.engines["b"]
        a.fill()
        a.free(sorted(a.held)[: len(a.held) // 2])
        usable, epoch = b.kv.usable_blocks, world.session.snapshot().epoch

        def change(core: Any) -> list[int]:
            pages = loose(core, "a")[-4:]
            with core.changes.part():
                leave(core, "a", pages)
                take(core, "b", pages)
                assert b.kv.usable_blocks == usable, "not before it is decided"
                if undone:
                    raise Stop
            return pages

        if undone:
            with pytest.raises(Stop):
                world.session.exclusively(change)
            assert (b.kv.usable_blocks, world.session.snapshot().epoch) == (usable, epoch)
        else:
            pages = world.session.exclusively(change)
            assert b.kv.usable_blocks > usable and world.session.snapshot().epoch == epoch + 1, "one decision"
            assert world.session._changes.draft.holders(pages) == [(world.session._tenants["b"].number, pages)]
            for block in b.kv.allocate(b.kv.free_blocks):
                assert read_block(b.tenant, block) == {0}
                b.held[block] = 0
            b.free()
            world.tell(world.session.step({"a": 0}))
        for engine in (a, b):
            engine.check()
            engine.poison()
            engine.serve()
        a.check()
        remap.advanced.check(world.session)


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
        made.check()
        a.serve()
        remap.advanced.check(world.session)
