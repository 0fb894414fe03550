"""Ranges that somebody outside has registered: what their regions show never changes, and what would change it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_layers, make_spec, visible

import remap
from remap.errors import InvalidArgument, InvalidState

N = 6


class World:
    def __init__(self) -> None:
        self.session = remap.Session(60 * PAGE, page_bytes=PAGE)
        self.layers = make_layers([2] * N, 1)
        self.tenant = self.session.attach_bytes(self.layers, name="m", kv=make_spec(N, max_blocks=200))

    def address(self, layer: int) -> int:
        return remap.advanced.layer_address(self.session, "m", layer)

    def refused(self, call: Any, error: type[Exception]) -> Any:
        remap.advanced.settle(self.session)  # what regions show is compared: the worker must not be about to change it
        before = visible(self.session), self.tenant.pinned
        with pytest.raises(error) as caught:
            call()
        assert (visible(self.session), self.tenant.pinned) == before
        remap.advanced.check(self.session)
        return caught.value


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    forward(made.session, made.tenant, made.layers)
    made.session.close()


def test_a_layer_in_a_declared_range_is_never_streamed(world: World) -> None:
    remap.advanced.declare_registered(world.session, world.address(0), 2 * PAGE)
    remap.advanced.declare_registered(world.session, world.address(3) + 2 * PAGE - 1, 1)  # the last byte of its region
    assert world.tenant.pinned == (0, 3)
    for selection in ("nested", "uniform"):
        remap.advanced.remap(world.session, "m", 3, 1, selection)
        assert world.tenant.streamed == (1, 2, 4, 5)
        forward(world.session, world.tenant, world.layers)
        remap.advanced.remap(world.session, "m", 0)
    error = world.refused(lambda: remap.advanced.remap(world.session, "m", 4, 1), InvalidArgument)
    assert (error.streamable, error.maximum) == (4, 3)
    report = world.session.step({"m": remap.Demand(blocks=10**4)})
    assert report.unmet_blocks
    assert {0, 3}.isdisjoint(world.tenant.streamed)


def test_a_streamed_layer_cannot_be_declared(world: World) -> None:
    remap.advanced.remap(world.session, "m", 2, 1, "nested")
    streamed, resident = world.tenant.streamed[0], next(i for i in range(N) if i not in world.tenant.streamed)
    error = world.refused(
        lambda: remap.advanced.declare_registered(world.session, world.address(streamed), 1), InvalidState
    )
    assert (error.tenant, error.layer) == ("m", streamed)
    remap.advanced.declare_registered(world.session, world.address(resident), 1)
    assert world.tenant.pinned == (resident,)
    remap.advanced.remap(world.session, "m", 0)
    remap.advanced.settle(world.session)
    remap.advanced.declare_registered(world.session, world.address(streamed), 1)
    assert world.tenant.pinned == tuple(sorted((resident, streamed)))


def test_a_range_of_no_region_is_refused(world: World) -> None:
    world.refused(lambda: remap.advanced.declare_registered(world.session, PAGE, PAGE), InvalidArgument)
    world.refused(lambda: remap.advanced.declare_registered(world.session, world.address(0), 0), InvalidArgument)


def test_what_was_withdrawn_may_be_streamed_again(world: World) -> None:
    ranges = [(world.address(0), PAGE), (world.address(0) + PAGE, PAGE), (world.address(4), 1)]
    order = world.tenant._state.order
    for each in ranges:
        remap.advanced.declare_registered(world.session, *each)
    world.refused(
        lambda: remap.advanced.withdraw_registered(world.session, world.address(0), 2 * PAGE), InvalidArgument
    )
    for each, left in zip(ranges, [(0, 4), (4,), ()]):
        remap.advanced.withdraw_registered(world.session, *each)
        assert world.tenant.pinned == left
    world.refused(lambda: remap.advanced.withdraw_registered(world.session, *ranges[0]), InvalidArgument)
    assert world.tenant._state.order == order
    remap.advanced.remap(world.session, "m", N - 1)
    assert world.tenant.streamed == tuple(range(N))


@pytest.mark.parametrize("what", ["layer", "kv"])
def test_a_tenant_with_a_declared_range_is_not_detached(world: World, what: str) -> None:
    address = world.tenant.kv.address if what == "kv" else world.address(2)
    remap.advanced.declare_registered(world.session, address, PAGE)
    error = world.refused(lambda: world.session.detach("m"), InvalidState)
    assert (error.tenant, error.address, error.nbytes) == ("m", address, PAGE)
    forward(world.session, world.tenant, world.layers)
    other = make_layers([1] * 3, 2)
    tenant = world.session.attach_bytes(other, name="other", kv=make_spec(3))
    assert tenant.pinned == ()
    world.session.detach("other")  # not its range
    remap.advanced.withdraw_registered(world.session, address, PAGE)
    world.session.detach("m")
    world.tenant = world.session.attach_bytes(world.layers, name="m", kv=make_spec(N, max_blocks=200))


def test_growth_goes_on_beside_a_registered_kv_region(world: World) -> None:
    """Aliased mode: the KV region shows all its pages from the start, so growing changes nothing there."""
    kv = world.tenant.kv
    remap.advanced.declare_registered(world.session, kv.address, kv.geometry.region_bytes)
    before = kv.usable_blocks
    remap.advanced.remap(world.session, "m", 3)
    assert kv.usable_blocks > before
    remap.advanced.remap(world.session, "m", 0)


def test_closing_needs_no_withdrawal() -> None:
    made = World()
    remap.advanced.declare_registered(made.session, made.address(0), PAGE)
    made.session.close()
    assert set(made.session._backend.usage().values()) == {0}
