"""`advanced.offer`: what a tenant's own layers give its KV is what a step with that demand takes."""

from __future__ import annotations

import pytest
from sharing_worlds import Shared, seen, set_times, times_of

import remap
from remap.config import Knobs
from remap.errors import InvalidArgument, InvalidState

SIZES = {"a": [2] * 8}


@pytest.mark.parametrize("copy_s", [1e-4, 1e-3, 3e-3], ids=str)
def test_a_step_takes_what_was_offered_and_no_more(copy_s: float) -> None:
    config = Knobs(slowdown=0.5, contention=0.25, reserve_blocks=0, hysteresis_blocks=0)
    with Shared(SIZES, config=config) as world:
        a, session = world.engines["a"], world.session
        a.serve()
        set_times(a, times_of(8, 1e-3, copy_s), copy_s=copy_s)
        before = seen(session)
        offer = remap.advanced.offer(session, "a")
        assert seen(session) == before
        usable = a.kv.usable_blocks
        report = session.step({"a": 10_000})
        alpha, buffers = offer.step  # type: ignore[misc]
        assert (a.tenant.remapped, a.tenant.buffers if alpha else buffers) == (alpha, buffers)
        # Two parts of blocks, in pages that stand together now, may be one.
        assert 0 <= a.kv.usable_blocks - usable - offer.blocks <= alpha
        assert offer.stall_s == pytest.approx(report.predicted_stall_s["a"])
        assert offer.stall_s <= 0.5 * 8e-3 * (1 + 1e-8)
        assert (offer.reload_s, offer.share) == (pytest.approx(alpha * copy_s), 0.25)
        # What streams now is part of it.
        assert remap.advanced.offer(session, "a") == offer
        assert session.step({"a": 10_000}).remapped.get("a", alpha) == alpha


def test_an_offer_is_asked_for_between_passes_and_may_be_nothing() -> None:
    with Shared(SIZES, config=Knobs(max_layers=0)) as world:
        session = world.session
        assert remap.advanced.offer(session, "a").blocks == 0
        with pytest.raises(InvalidArgument):
            remap.advanced.offer(session, "b")
        with world.engines["a"].tenant.forward(), pytest.raises(InvalidState):
            remap.advanced.offer(session, "a")
