"""Slices through the session: by hand, and by the controller, whose unit is then a page of every layer."""

from __future__ import annotations

import random

import pytest
from arena_worlds import PAGE, make_layers
from sharing_worlds import Engine, set_times, spec, times_of

import remap

LAYERS, PAGES = 8, 4


def world(mode: str = "aliased", **config: object) -> tuple[remap.Session, Engine]:
    settings = remap.advanced.Knobs(selection="slices", reserve_blocks=0, hysteresis_blocks=0, **config)  # type: ignore[arg-type]
    total = LAYERS * PAGES + 4
    session = remap.Session(total * PAGE, page_bytes=PAGE, mode=mode, config=settings)
    kv = spec(LAYERS, min_blocks=2)
    engine = Engine(session, "m", LAYERS, PAGES, 1, kv=kv)
    return session, engine


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_by_hand_alpha_is_a_fraction_and_every_layer_reads_right(mode: str) -> None:
    session, engine = world(mode)
    with session:
        usable = engine.tenant.kv.usable_blocks
        for alpha in (0.5, 1.5, 3, 4.5, 2.0, 0.5, 0):
            report = remap.advanced.remap(session, "m", alpha, 2, "slices")
            engine.patch(report.moved.get("m", {}))
            assert engine.tenant.remapped >= alpha and engine.tenant.remapped - alpha < (LAYERS - 2) / PAGES + 1e-9
            assert engine.tenant.kv.usable_blocks >= usable
            if not engine.held:
                engine.allocate(2)  # they lie in the lowest blocks, which stay
            engine.serve()
            engine.check()
            remap.advanced.check(session)
        assert engine.tenant.streamed == ()
        assert session.snapshot().tenants["m"].selection == ""


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_whole_layers_become_slices_and_back_under_live_blocks(mode: str) -> None:
    session, engine = world(mode)
    with session:
        engine.allocate(2)
        for layers, buffers, selection, told in [
            (2, 1, "nested", 2),
            (1, 2, "slices", 1.5),
            (3, 2, "uniform", 3),
            (3, 1, "slices", 3.5),
            (2, 2, "nested", 2),
            (0.5, 1, "slices", 1.75),
            (0, 1, "uniform", 0),
        ]:
            report = remap.advanced.remap(session, "m", layers, buffers, selection)
            engine.patch(report.moved.get("m", {}))
            snapshot = session.snapshot().tenants["m"]
            assert (snapshot.remapped, snapshot.selection) == (told, selection if layers else "")
            remap.advanced.check(session)
            engine.serve()
            engine.check()


def test_slices_cannot_be_lent_layer_by_layer() -> None:
    session, engine = world()
    with session:
        remap.advanced.remap(session, "m", 1, 2, "slices")
        before = engine.tenant._state.pages
        report = remap.advanced.lend(session, "m", 3)
        assert engine.tenant._state.pages == before and "0 pages" in report.reason["m"]
        engine.serve()


def test_the_controller_grows_in_pages_of_every_layer_up_to_the_exact_bound_and_back() -> None:
    # Copies take 2.5 times the computation of a layer: whole layers would allow alpha + 2 <= 8 / 2.5, one layer. Slices of k of
    # 4 pages copy k / 4 of 8 layers: 20 k / 4 <= 8 allows k = 1, which frees (8 - 2) / 4 = 1.5 layers.
    session, engine = world(slowdown=0.0, contention=1e9, dwell=1)
    with session:
        set_times(engine, times_of(LAYERS, 1.0, 2.5))
        report = session.step({"m": remap.Demand(blocks=200)})
        assert engine.tenant._state.pages.depth == 1 and engine.tenant.remapped == 1.5
        assert report.unmet_blocks["m"] > 0 and report.predicted_stall_s["m"] == 0.0
        assert "pages of every layer" in report.reason["m"]
        engine.serve()
        set_times(engine, times_of(LAYERS, 1.0, 1.0))  # and k = 4 with these
        session.step({"m": remap.Demand(blocks=200)})
        assert engine.tenant._state.pages.depth == 4
        engine.allocate(engine.tenant.kv.free_blocks)
        engine.serve()
        engine.check()
        engine.free(list(engine.held))
        for _ in range(8):
            engine.patch(session.step({"m": remap.Demand(blocks=0)}).moved.get("m", {}))
            engine.serve()
        assert engine.tenant.streamed == ()


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_random_demand_in_slices(mode: str) -> None:
    rng = random.Random(mode)
    session, engine = world(mode, slowdown=10.0, contention=1e3, dwell=2)
    with session:
        set_times(engine, times_of(LAYERS, 1.0, 0.5))
        seen = set()
        for turn in range(80):
            wanted = rng.choice([0, 2, 9]) if turn % 40 < 20 else 0
            engine.patch(session.step({"m": remap.Demand(blocks=wanted)}).moved.get("m", {}))
            remap.advanced.check(session)
            seen.add(engine.tenant._state.pages.depth)
            engine.allocate(min(wanted, engine.tenant.kv.free_blocks))
            if engine.held and rng.random() < 0.5:
                engine.free(rng.sample(sorted(engine.held), rng.randint(1, len(engine.held))))
            engine.check()
            engine.serve()
        assert len(seen) > 2


def test_a_cap_in_layers_holds_in_slices() -> None:
    session, engine = world(slowdown=10.0, max_layers=2)
    with session:
        set_times(engine, times_of(LAYERS, 1.0, 0.1))
        session.step({"m": remap.Demand(blocks=300)})
        assert 1 <= engine.tenant.remapped <= 3  # the tail that frees two layers' worth is the largest
        assert make_layers([PAGES] * LAYERS, 1) == engine.data
        engine.serve()
