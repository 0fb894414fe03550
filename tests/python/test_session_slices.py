"""Slices through the session: by hand, and by the controller, whose unit is then a page of every layer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing_worlds import Shared, set_times, times_of

import remap
from remap.errors import InvalidArgument
from remap.policy.slices import slices_alpha, slices_freed, tail_for

LAYERS, PAGES = 8, 4
MODES = pytest.mark.parametrize("mode", ["aliased", "strict"])


def world_of(mode: str = "aliased", around: Any = lambda backend: backend, spare: int = 2, **config: Any) -> Shared:
    """One tenant "m", whose blocks are pages."""
    knobs = remap.advanced.Knobs(selection="slices", reserve_blocks=0, hysteresis_blocks=0, **config)
    return Shared({"m": [PAGES] * LAYERS}, spare=spare, mode=mode, config=knobs, around=around)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 3), st.floats(0, 9))
def test_tail_for_is_the_smallest_that_is_enough(sizes: list[int], buffers: int, alpha: float) -> None:
    enough = [k for k in range(max(sizes) + 1) if slices_freed(k, sizes, buffers) >= alpha * max(sizes) - 1e-9]
    if enough:
        assert tail_for(sizes, alpha, buffers) == enough[0]
        return
    with pytest.raises(InvalidArgument) as refused:
        tail_for(sizes, alpha, buffers)
    best = max(slices_alpha(k, sizes, buffers) for k in range(max(sizes) + 1))
    assert refused.value.fields["maximum"] == pytest.approx(best)


def test_alpha_must_be_a_number() -> None:
    for alpha in (-0.5, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument):
            tail_for([4] * 4, alpha, 1)


@MODES
def test_by_hand_alpha_is_a_fraction_and_whole_layers_become_slices_and_back(mode: str) -> None:
    with world_of(mode) as world:
        m = world.engines["m"]
        usable = m.kv.usable_blocks
        m.fill()  # the lowest blocks, which stay
        for layers, buffers, selection, told in [
            *((alpha, 2, "slices", None) for alpha in (0.5, 1.5, 3, 4.5, 2.0, 0.5, 0)),
            (2, 1, "nested", 2),
            (1, 2, "slices", 1.5),
            (3, 2, "uniform", 3),
            (3, 1, "slices", 3.5),
            (2, 2, "nested", 2),
            (0.5, 1, "slices", 1.75),
            (0, 1, "uniform", 0),
        ]:
            world.remap("m", layers, buffers, selection)
            seen = world.session.snapshot().tenants["m"]
            assert 0 <= seen.remapped - layers < (LAYERS - buffers) / PAGES + 1e-9 and seen.usable_blocks >= usable
            assert (seen.remapped, seen.selection) == (
                seen.remapped if told is None else told,
                selection if layers else "",
            )
            world.check()
        assert m.tenant.streamed == ()


def test_slices_cannot_be_lent_layer_by_layer() -> None:
    with world_of() as world:
        world.remap("m", 1, 2, "slices")
        before = world.owners()
        assert "0 pages" in world.lend("m", 3).reason["m"] and world.owners() == before
        world.check()


def test_the_controller_grows_in_pages_of_every_layer_up_to_the_exact_bound_and_back() -> None:
    # Copies take 2.5 times the computation of a layer: whole layers would allow alpha + 2 <= 8 / 2.5, one layer. Slices of k of
    # 4 pages copy k / 4 of 8 layers: 20 k / 4 <= 8 allows k = 1, which frees (8 - 2) / 4 = 1.5 layers.
    with world_of(slowdown=0.0, contention=1e9, dwell=1) as world:
        m = world.engines["m"]
        set_times(m, times_of(LAYERS, 1.0, 2.5))
        report = world.step(m=200)
        assert m.tenant.remapped == 1.5
        assert report.unmet_blocks["m"] > 0 and report.predicted_stall_s["m"] == 0.0
        assert "pages of every layer" in report.reason["m"]
        m.serve()
        set_times(m, times_of(LAYERS, 1.0, 1.0))  # and k = 4 with these
        world.step(m=200)
        assert m.tenant.remapped == LAYERS - 2 or m.tenant.remapped == LAYERS - 1
        m.fill()
        world.check()
        m.free()
        for _ in range(8):
            world.step(m=0)
            m.serve()
        assert m.tenant.streamed == ()


def test_a_cap_in_layers_holds_in_slices() -> None:
    with world_of(slowdown=10.0, max_layers=2) as world:
        set_times(world.engines["m"], times_of(LAYERS, 1.0, 0.1))
        world.step(m=300)
        assert 1 <= world.engines["m"].tenant.remapped <= 3  # the tail that frees two layers' worth is the largest
        world.check()
