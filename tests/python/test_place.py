"""`advanced.place`: layers that another instance computes give their pages to KV and come back, with all bytes right."""

from __future__ import annotations

import ctypes
import random
from functools import partial
from typing import Any

import pytest
from arena_worlds import PAGE, SHORT
from sharing_worlds import Engine, Shared, attempt, fill_layer, seen, spec

import remap
from remap import _core
from remap.errors import Error, InvalidArgument, InvalidState, OutOfBlocks
from remap.internals import internals

SIZES = {"a": [2] * 6}
MODES = ("aliased", "strict")


def mappings(world: Shared) -> int:
    return sum(world.backend.calls(call) for call in (_core.Call.map, _core.Call.unmap, _core.Call.exchange))


def pages(world: Shared) -> Any:
    return world.session.snapshot().pages


@pytest.mark.parametrize("mode", MODES)
def test_what_others_compute_is_kv_and_comes_back(mode: str) -> None:
    with Shared(SIZES, mode=mode) as world:
        a = world.engines["a"]
        before, usable = pages(world), a.kv.usable_blocks
        report = world.place("a", 0, 2)
        per_page = internals(a).kv.geometry.page_bytes / a.kv.spec.block_bytes
        assert a.kv.usable_blocks == usable + report.added_blocks["a"] >= usable + int(8 * per_page) - 1
        assert (pages(world).params, pages(world).kv) == (before.params - 8, before.kv + 8)
        assert (internals(a.tenant).computed, internals(a.tenant).elsewhere) == (range(2), (2, 3, 4, 5))
        assert a.tenant.streamed == ()
        a.fill()
        world.check()
        a.free(sorted(a.held)[: len(a.held) - usable])  # the last ones stay, so that they have to move
        report = world.place("a", 0, 6)
        assert report.moved["a"] and (internals(a.tenant).computed, internals(a.tenant).elsewhere) == (range(6), ())
        assert a.kv.usable_blocks == usable and pages(world) == before
        a.free()
        a.poison()
        world.check()


def test_pages_change_hands_without_a_call_of_the_driver_and_without_a_copy() -> None:
    with Shared(SIZES, around=_core.make_fault_backend) as world:
        a = world.engines["a"]
        world.place("a", 3, 6)  # what is made once is made
        world.place("a", 0, 6)
        world.check()
        calls, copies = mappings(world), internals(a.tenant).stats().copies
        world.place("a", 0, 3)
        remap.advanced.settle(world.session)
        a.fill()
        a.poison()
        world.check()
        assert (mappings(world), internals(a.tenant).stats().copies) == (calls, copies)
        a.free()
        world.place("a", 0, 6)
        world.check()
        assert mappings(world) == calls and internals(a.tenant).stats().copies == copies + 3


def test_a_pass_that_computes_what_is_elsewhere_is_refused() -> None:
    with Shared(SIZES) as world:
        tenant = world.engines["a"].tenant
        plain = tenant.wait
        world.place("a", 1, 4)
        for layer in (0, 4, 5):
            with pytest.raises(InvalidState) as refused, tenant.forward():
                tenant.wait(layer)
            assert refused.value.fields["layer"] == layer and refused.value.fields["elsewhere"] == (0, 4, 5)
        assert internals(tenant).away() == {0, 4, 5}
        world.check()
        world.place("a", 0, 6)
        assert tenant.wait == plain and internals(tenant).away() <= {0, 4, 5}
        world.check()
        assert internals(tenant).away() == set()


@pytest.mark.parametrize("mode", MODES)
def test_layers_come_back_with_bytes_of_another_instance(mode: str) -> None:
    with Shared(SIZES, mode=mode) as world:
        session, a = world.session, world.engines["a"]
        tenant, usable = internals(a.tenant), a.kv.usable_blocks
        world.place("a", 0, 2)
        a.poison()
        copies = tenant.stats().copies
        world.place("a", 0, 2, hold=range(6), fill=(3, 5))
        # Their pages are here, and nobody computes them.
        assert (a.kv.usable_blocks, tenant.elsewhere, tenant.away() >= {3, 5}) == (usable, (3, 5), True)
        with pytest.raises(InvalidState), a.tenant.forward():
            a.tenant.wait(3)
        for layer in (3, 5):
            fill_layer(world, "a", layer, 0, 1000)
            world.check()
            fill_layer(world, "a", layer, 1000)
            remap.advanced.filled(session, "a", layer)
            world.check()
        assert tenant.elsewhere == ()
        world.place("a", 0, 6)
        a.poison()
        world.check()
        assert tenant.stats().copies == copies + 2  # of the layers 2 and 4
        read = bytearray(1000)
        remap.advanced.read_layer(session, "a", 3, 24, ctypes.addressof(ctypes.c_char.from_buffer(read)), 1000)
        assert read == a.data[3][24:1024]


@pytest.mark.parametrize("step", [1, 777, 5000])
def test_a_layer_is_filled_by_pieces_in_any_order_and_by_nothing_less(step: int) -> None:
    with Shared(SIZES) as world:
        world.place("a", 0, 2)
        world.place("a", 0, 2, hold=(3,), fill=(3,))
        nbytes = len(world.engines["a"].data[3])
        cuts = [*range(0, min(nbytes, 40 * step), step), nbytes]
        pieces = list(zip(cuts, cuts[1:]))
        random.Random(step).shuffle(pieces)
        for first, end in pieces:
            with pytest.raises(InvalidState) as refused:
                remap.advanced.filled(world.session, "a", 3)
            assert refused.value.fields["nbytes"] == nbytes
            fill_layer(world, "a", 3, first, end)
            fill_layer(world, "a", 3, first, end)  # again
        remap.advanced.filled(world.session, "a", 3)
        world.place("a", 0, 6)
        world.check()


PIECE = (ctypes.c_char * 10)()


def piece(verb: str, layer: int, offset: int) -> Any:
    return lambda world: getattr(remap.advanced, verb)(world.session, "a", layer, offset, ctypes.addressof(PIECE), 10)


def placed(first: Any, end: Any, hold: Any = (), fill: Any = (), name: str = "a") -> Any:
    return lambda world: world.place(name, first, end, hold=hold, fill=fill)


LAST = 2 * PAGE - SHORT
REFUSED: list[tuple[type[Exception], Any]] = [
    *((InvalidArgument, placed(*range_)) for range_ in ((-1, 2), (3, 2), (0, 7), (True, 2), (0, 2.0))),
    *((InvalidArgument, placed(0, 2, range(6), fill)) for fill in ((1,), (6,))),
    (InvalidArgument, placed(0, 2, (6,))),
    (InvalidArgument, placed(0, 2, (3,), (4,))),
    (InvalidArgument, placed(0, 2, (2, 3), (2,))),  # it is here
    (InvalidArgument, placed(0, 2, name="nobody")),
    *((InvalidArgument, piece("fill_layer", *place)) for place in ((3, LAST - 9), (3, -1), (9, 0))),
    *((InvalidState, piece("fill_layer", layer, 0)) for layer in (1, 4)),
    *((InvalidState, piece("read_layer", layer, 0)) for layer in (3, 5)),
    (InvalidState, lambda world: remap.advanced.filled(world.session, "a", 4)),
    (OutOfBlocks, placed(1, 6)),  # no step of it is made
]


@pytest.mark.parametrize(("error", "call"), REFUSED)
def test_what_is_refused_changes_nothing(error: type[Exception], call: Any) -> None:
    with Shared(SIZES) as world:
        world.place("a", 0, 2)
        world.place("a", 0, 2, hold=(2, 3), fill=(3,))
        with world.engines["a"].tenant.forward(), pytest.raises(InvalidState):
            world.place("a", 0, 2)
        world.engines["a"].fill()
        before = seen(world.session)
        with pytest.raises(error):
            call(world)
        assert seen(world.session) == before
        world.check()
        world.engines["a"].free()
        world.place("a", 0, 6)
        world.check()


@pytest.mark.parametrize(
    ("options", "error", "fields"),
    [
        ({"kv": spec(6, max_blocks=6)}, InvalidArgument, {"max_blocks": 6}),  # no place for them in the KV region
        ({"resident_layers": 3}, InvalidState, {}),  # others stream for good
    ],
)
def test_layers_of_such_a_tenant_stay(options: Any, error: type[Error], fields: dict[str, Any]) -> None:
    with Shared(SIZES, options={"a": options}) as world:
        before = seen(world.session)
        with pytest.raises(error) as refused:
            world.place("a", 0, 3)
        assert refused.value.fields.items() >= fields.items() and seen(world.session) == before
        world.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_anything_in_any_order(mode: str, seed: int) -> None:
    rng = random.Random(f"place {seed}")
    sizes = {"a": [rng.randint(0, 3) for _ in range(7)] + [1, 1], "b": [rng.randint(1, 3) for _ in range(5)]}
    with Shared(sizes, mode=mode, spare=rng.choice((0, 5))) as world:
        for _ in range(60):
            name = rng.choice(("a", "a", "b"))
            engine: Engine = world.engines[name]
            count = engine.tenant.layers
            deed = rng.random()
            if deed < 0.35:
                first, end = sorted(rng.choices(range(count + 1), k=2))
                hold = rng.sample(range(count), rng.randint(0, count)) if rng.random() < 0.5 else ()
                gone = [
                    layer for layer in internals(engine.tenant).elsewhere if layer in hold and not first <= layer < end
                ]
                late = rng.sample(gone, rng.randint(0, len(gone)))
                attempt(partial(world.place, name, first, end, hold=hold, fill=late))
            elif deed < 0.4:
                for layer in sorted(internals(engine.tenant)._state.pages.unfilled)[: rng.randint(0, 2)]:
                    fill_layer(world, name, layer)
                    remap.advanced.filled(world.session, name, layer)
            elif deed < 0.5:
                selection = rng.choice(("uniform", "nested"))
                attempt(partial(world.remap, name, rng.randint(0, 3), rng.randint(1, 2), selection))
            elif deed < 0.6:
                attempt(partial(world.lend, name, rng.randint(0, 2)))
            elif deed < 0.7:
                attempt(partial(world.step, **{name: rng.randint(0, 40)}))
            elif deed < 0.75:
                world.session.deactivate(name)
                if rng.random() < 0.5:
                    attempt(partial(world.lend, name, rng.randint(0, 3)))
                world.activate(name, partial=True)
            else:
                world.churn(rng)
            world.check()
        for name in world.engines:
            world.engines[name].free()
            world.place(name, 0, world.engines[name].tenant.layers)
        world.check()


def test_a_place_that_is_refused_leaves_lent_layers_where_they_are() -> None:
    room = remap.KVSpec(layers=4, kv_heads=1, head_dim=64, dtype="int8", block_tokens=1, min_blocks=1, max_blocks=80)
    with Shared({"a": [3] * 4, "b": [1] * 4}, spare=8, options={"a": {"kv": room}}) as world:
        world.lend("a", 2, to="b")
        before = seen(world.session)
        with pytest.raises(InvalidArgument) as refused:
            world.place("a", 0, 2)
        assert refused.value.fields["max_blocks"] == 80 and seen(world.session) == before
        world.check()


def test_slices_stream_beside_layers_that_are_elsewhere() -> None:
    """Layers that are elsewhere have no pages: nothing may be divided by their number."""
    knobs = remap.advanced.Knobs(slowdown=1e9)
    with Shared({"a": [5] * 6}, spare=8, config=knobs) as world:
        world.engines["a"].serve()
        world.remap("a", 2, 1, "slices")
        world.place("a", 0, 3)
        tenant = world.engines["a"].tenant
        assert tenant.streamed and internals(tenant).elsewhere == (3, 4, 5)
        world.check()
        world.step(a=10)
        remap.advanced.offers(world.session, "a")
        world.place("a", 0, 6)
        world.check()


@pytest.mark.parametrize("mode", MODES)
def test_what_came_of_a_layer_that_leaves_and_returns_has_to_come_again(mode: str) -> None:
    with Shared(SIZES, mode=mode) as world:
        a = world.engines["a"]
        world.place("a", 0, 2)
        world.place("a", 0, 2, hold=(3,), fill=(3,))
        fill_layer(world, "a", 3)
        world.place("a", 0, 2)
        a.poison()
        world.place("a", 0, 2, hold=(3,), fill=(3,))
        with pytest.raises(InvalidState):
            remap.advanced.filled(world.session, "a", 3)
        fill_layer(world, "a", 3)
        world.place("a", 0, 2, hold=(3, 4), fill=(3,))  # it goes on waiting, with what has come
        remap.advanced.filled(world.session, "a", 3)
        world.place("a", 0, 6)
        world.check()
