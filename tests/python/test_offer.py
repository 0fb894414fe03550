"""`advanced.offers`: what a tenant's KV may have beside its own is what a step with that demand takes."""

from __future__ import annotations

import pytest
from sharing_worlds import EAGER, Shared, seen, set_times, times_of

import remap
from remap.config import Knobs
from remap.errors import InvalidState, OutOfBlocks
from remap.internals import internals

SIZES = {"a": [2] * 8}


@pytest.mark.parametrize("copy_s", [1e-4, 1e-3, 3e-3], ids=str)
def test_a_step_takes_what_was_offered_and_no_more(copy_s: float) -> None:
    config = Knobs(slowdown=0.5, contention=0.25, reserve_blocks=0, hysteresis_blocks=0)
    with Shared(SIZES, config=config) as world:
        a, session = world.engines["a"], world.session
        a.serve()
        set_times(a, times_of(8, 1e-3, copy_s), copy_s=copy_s)
        before = seen(session)
        with a.tenant.forward(), pytest.raises(InvalidState):  # between passes only
            remap.advanced.offers(session, "a")
        (offer,) = remap.advanced.offers(session, "a")
        assert seen(session) == before
        usable = a.kv.usable_blocks
        report = session.step({"a": 10_000})
        alpha, buffers = offer.step  # type: ignore[misc]
        assert (a.tenant.remapped, internals(a.tenant).buffers if alpha else buffers) == (alpha, buffers)
        # Two parts of blocks, in pages that stand together now, may be one.
        assert 0 <= a.kv.usable_blocks - usable - offer.blocks <= alpha
        assert offer.stall_s == pytest.approx(report.predicted_stall_s["a"])
        assert offer.stall_s <= 0.5 * 8e-3 * (1 + 1e-8)
        assert (offer.reload_s, offer.share) == (pytest.approx(alpha * copy_s), 0.25)
        # What streams now is part of it.
        assert remap.advanced.offers(session, "a") == [offer]
        assert session.step({"a": 10_000}).remapped.get("a", alpha) == alpha


def sharing() -> Shared:
    """An active tenant beside an idle one, with three pages that nobody has."""
    config = Knobs(**{**EAGER, "slowdown": 0.5, "contention": 0.25})
    world = Shared(SIZES | {"b": [2] * 6}, spare=3, config=config, options={"b": {"active": False}})
    world.engines["a"].serve()
    for engine in world.engines.values():
        set_times(engine, times_of(engine.tenant.layers, 1e-3, 1e-3), copy_s=1e-3)
    return world


def test_what_an_idle_tenant_lends_is_offered_before_it_is_taken_and_afterwards() -> None:
    with sharing() as world:
        session, a, b = world.session, world.engines["a"], world.engines["b"]
        before = seen(session)
        offers = remap.advanced.offers(session, "a")
        assert seen(session) == before
        assert {(each.donor, each.kind) for each in offers} == {("", "idle_kv"), ("a", "active"), ("b", "inactive")}
        usable = a.kv.usable_blocks
        world.step(a=10_000)
        assert a.kv.usable_blocks - usable == sum(each.blocks for each in offers)
        # Half of b's layers copy back what stays, which b's ring leaves out.
        assert {each.donor: each.reload_s for each in offers}["b"] == pytest.approx(b.tenant.remapped * 1e-3)
        assert remap.advanced.offers(session, "a") == offers
        # Of a tenant that serves, only what it lent: it copies that in each pass.
        internals(b.tenant)._state.books = internals(b.tenant)._state.books._replace(active=True)
        (lent,) = (each for each in remap.advanced.offers(session, "a") if each.donor == "b")
        assert (lent.kind, lent.share) == ("active", 0.25)


def test_borrowed_pages_are_given_back_with_their_blocks_moved_or_not_at_all() -> None:
    with sharing() as world:
        session, a, b = world.session, world.engines["a"], world.engines["b"]
        with a.tenant.forward(), pytest.raises(InvalidState):
            remap.advanced.give_back(session, "a")
        world.step(a=10_000)
        lent, usable = len(internals(b.tenant)._state.pages.lent), a.kv.usable_blocks
        a.fill()
        before = seen(session)
        with pytest.raises(OutOfBlocks) as full:
            remap.advanced.give_back(session, "a")
        assert seen(session) == before
        a.free(sorted(a.held)[: len(full.value.fields["preempt"]["a"])])
        report = world.tell(remap.advanced.give_back(session, "a"))
        assert report.moved["a"]
        world.check()
        # They are free, and still lent: b's layers come home to them when it serves.
        assert a.kv.usable_blocks == usable - lent  # of a page each
        assert session.snapshot().pages.free == len(internals(b.tenant)._state.pages.lent) == lent
        assert remap.advanced.give_back(session, "a").moved == {}
        world.activate("b")
        assert not b.tenant.streamed
        world.check()
