"""Pages between tenants: layers of one are KV blocks of another, come home again, and nobody's bytes are lost on the way."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import pytest
from arena_worlds import read_block
from sharing_worlds import Shared

import remap
from remap import _core
from remap.internals import internals

SIZES = {"a": [2] * 6, "b": [3] * 8, "c": [1] * 5}


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_layers_of_an_inactive_tenant_become_kv_of_another_and_come_home(mode: str) -> None:
    with Shared(SIZES, mode=mode) as world:
        a, b = world.engines["a"], world.engines["b"]
        before = a.kv.usable_blocks
        world.session.deactivate("b")
        assert world.lend("b", 4).added_blocks == {"b": 0}  # free, and nobody's yet
        report = world.lend("b", 4, to="a")
        assert b.tenant.streamed == (3, 4, 5, 6, 7)
        assert a.kv.usable_blocks == before + report.added_blocks["a"] > before
        seen = world.session.snapshot().tenants
        assert (seen["b"].lent_pages, seen["a"].borrowed_pages, dict(seen["b"].lent_to)) == (12, 12, {"a": 12})
        for block in a.kv.allocate(a.kv.free_blocks):
            assert read_block(a.tenant, block) == {0}, "what another tenant's layers were reads zero"
            a.held[block] = 0
        a.free()
        a.allocate(a.kv.free_blocks - 1)
        world.check()
        report = world.activate("b")
        assert report.activated and set(report.restored) == {3, 4, 5, 6, 7} and report.streamed == ()
        assert a.kv.usable_blocks == before
        world.check()
        assert world.session.snapshot().tenants["b"].lent_pages == 0


def mappings(world: Shared) -> int:
    """Calls so far that change what an address shows."""
    return sum(world.backend.calls(call) for call in (_core.Call.map, _core.Call.unmap, _core.Call.exchange))


def test_who_is_idle_lends_and_gets_its_layers_back_without_a_call_of_the_driver() -> None:
    """No pass reads them, so their regions are re-pointed only when a pass is to come. All bytes are right nevertheless."""
    with Shared(SIZES, around=_core.make_fault_backend) as world:
        a, before = world.engines["a"], 0
        for turn in range(4):
            before = before if turn > 1 else mappings(world)  # the ring is shown once, in the first turn
            world.session.deactivate("b")
            world.lend("b", 4, to="a")
            remap.advanced.settle(world.session)
            a.fill()
            a.poison()
            world.check()
            a.free()
            report = world.activate("b")
            assert report.activated and not world.engines["b"].tenant.streamed
            assert report.epoch == world.session.snapshot().epoch, "behind the change"
            assert mappings(world) == before or turn == 0
            world.check()


def test_a_holder_inside_a_pass_keeps_its_pages() -> None:
    with Shared(SIZES) as world:
        a = world.engines["a"]
        world.session.deactivate("b")
        world.lend("b", 4, to="a")
        a.allocate(a.kv.free_blocks // 2)
        owners = world.owners()
        with a.tenant.forward():
            for call in (lambda: world.session.activate("b"), lambda: remap.advanced.lend(world.session, "b", 2)):
                with pytest.raises(remap.InvalidState):
                    call()
            assert world.owners() == owners
            a.check()
        assert world.activate("b").activated
        world.check()


def test_a_tenant_that_lent_and_then_streams_slices_brings_them_home_together() -> None:
    knobs = remap.advanced.Knobs(min_idle=0.0, dwell=1, reserve_blocks=0, hysteresis_blocks=0)
    kv = {
        name: remap.KVSpec(
            layers=n, kv_heads=1, head_dim=64, dtype="int8", block_tokens=1, min_blocks=0, max_blocks=300
        )
        for name, n in (("a", 6), ("b", 3))
    }
    with remap.Session(60 * 4096, page_bytes=4096, config=knobs) as session:
        data = [b"a" * 4096 * size for size in (2, 0, 0, 1, 0, 2)]
        a = session.attach_bytes(data, name="a", kv=kv["a"], active=False)
        session.attach_bytes([b"b" * 4096] * 3, name="b", kv=kv["b"])
        remap.advanced.lend(session, "a", 1, 1)
        remap.advanced.remap(session, "a", 1.09, 1, "slices")
        assert internals(a).lent_pages
        for _ in range(40):
            session.step({"b": 0})
        assert not internals(a).lent_pages and session.snapshot().tenants["a"].streamed == ()
        assert session.activate("a").activated
        remap.advanced.check(session)


class Asker(NamedTuple):
    number: int
    index_of: Container[int] = range(1 << 20)


def test_answers_about_receivers_do_not_outlive_them() -> None:
    """A server attaches and detaches models for months: what each of them could get was kept, under its number."""
    with Shared(SIZES) as world:

        def asked(*numbers: int) -> int:
            def ask(core: Any) -> int:
                donor = core.tenant("a")
                for number in numbers:
                    core.lending.idle_slots(donor, Asker(number), 1, 1)
                found: int = len(donor.answers._known["idle pages"][1])
                assert sum("idle" in question for question in donor.answers._known) == 1
                return found

            return world.session.exclusively(ask)

        few = asked(7)
        assert asked(8, 9, 10) == few + 3
        world.session.deactivate("b")
        world.lend("b", 4, to="a")  # another epoch
        assert asked(11) == few


def test_a_listener_that_always_raises_ends_no_change_and_no_session() -> None:
    """Its error took the plans back, of which it was told, and raised again: each later call began with that, `close` as well."""
    with Shared(SIZES) as world:
        a, b = world.engines["a"], world.engines["b"]
        world.session.deactivate("b")
        world.lend("b", 4, to="a")
        told = []

        def listen(added: object, withdrawn: object) -> None:
            told.append((added, withdrawn))
            raise RuntimeError("listener")

        with pytest.raises(RuntimeError):
            a.kv.subscribe(listen)
        told.clear()
        with pytest.raises(RuntimeError, match="listener"):
            world.session.activate("b")
        assert b.tenant.active and internals(b.tenant).lent_pages == 0 and told, "the change that it was told of"
        assert world.session._changes.draft.depth == 0
        remap.advanced.check(world.session)
        assert world.session.snapshot().tenants["b"].lent_pages == 0


def test_pages_that_are_lent_do_not_become_the_home_of_a_newcomer() -> None:
    with Shared(SIZES, spare=12) as world:
        world.session.deactivate("b")
        world.lend("b", 7)
        free = world.session.snapshot().pages.free
        assert world.session.snapshot().tenants["b"].lent_pages == 21 < free
        with pytest.raises(remap.OutOfMemory):
            world.session.attach_bytes([bytes(65536)] * (free - 20), name="d", kv=remap.KVSpec(
                layers=free - 20, kv_heads=1, head_dim=8, min_blocks=0, max_blocks=9))  # fmt: skip
        assert world.activate("b").activated
        world.check()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
@pytest.mark.parametrize("own", [0, 2])
def test_what_a_return_takes_from_each_is_known_to_the_block(mode: str, own: int) -> None:
    with Shared(SIZES, mode=mode) as world:
        if own:  # of its layers: its own KV loses blocks as well
            remap.advanced.remap(world.session, "b", own, 2, "nested")
        world.session.deactivate("b")
        world.lend("b", own + 2, to="a")
        state, lending = world.session._tenants["b"], world.session._lending
        target = state.streaming_at(0, state.buffers, "inward")
        foretold = world.session.exclusively(lambda core: lending.losses(state, target), claims=False)
        before = {name: engine.kv.usable_blocks for name, engine in world.engines.items()}
        assert world.activate("b").activated
        if world.engines["b"].tenant.remapped:  # what it gave its own KV stays with it
            world.tell(remap.advanced.remap(world.session, "b", 0, 2, "nested"))
        lost = {name: count - world.engines[name].kv.usable_blocks for name, count in before.items()}
        assert foretold == {name: count for name, count in lost.items() if name in foretold}
        assert set(foretold) == ({"a", "b"} if own else {"a"}) and all(foretold.values())
