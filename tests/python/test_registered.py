"""Ranges that somebody outside has registered: what their regions show never changes, and what would change it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_layers, make_spec, visible

import remap
from remap import advanced
from remap.errors import InvalidArgument, InvalidState
from remap.internals import internals

N = 6


class World:
    def __init__(self) -> None:
        self.session = remap.Session(60 * PAGE, page_bytes=PAGE)
        self.address = partial(advanced.layer_address, self.session, "m")
        self.declare = partial(advanced.declare_registered, self.session)
        self.withdraw = partial(advanced.withdraw_registered, self.session)
        self.layers = make_layers([2] * N, 1)
        self.attach()

    def attach(self) -> None:
        self.tenant = self.session.attach_bytes(self.layers, name="m", kv=make_spec(N, max_blocks=200))

    def remap(self, *how: Any) -> None:
        advanced.remap(self.session, "m", *how)
        forward(self.session, self.tenant, self.layers)

    def refused(self, error: type[Exception], call: Any, *arguments: Any) -> Any:
        advanced.settle(self.session)  # what regions show is compared: the worker must not be about to change it
        before = visible(self.session), internals(self.tenant).pinned
        with pytest.raises(error) as caught:
            call(*arguments)
        assert (visible(self.session), internals(self.tenant).pinned) == before
        advanced.check(self.session)
        return caught.value


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    forward(made.session, made.tenant, made.layers)
    made.session.close()  # closing needs no withdrawal


def test_a_layer_in_a_declared_range_is_never_streamed(world: World) -> None:
    world.declare(world.address(0), 2 * PAGE)
    world.declare(world.address(3) + 2 * PAGE - 1, 1)  # the last byte of its region
    assert internals(world.tenant).pinned == (0, 3)
    for selection in ("nested", "uniform"):
        world.remap(3, 1, selection)
        assert world.tenant.streamed == (1, 2, 4, 5)
        world.remap(0)
    error = world.refused(InvalidArgument, world.remap, 4, 1)
    assert (error.streamable, error.maximum) == (4, 3)
    assert world.session.step({"m": remap.Demand(blocks=10**4)}).unmet_blocks
    assert {0, 3}.isdisjoint(world.tenant.streamed)


def test_a_streamed_layer_cannot_be_declared_nor_a_range_of_no_region(world: World) -> None:
    world.refused(InvalidArgument, world.declare, PAGE, PAGE)
    world.refused(InvalidArgument, world.declare, world.address(0), 0)
    world.remap(2, 1, "nested")
    streamed, resident = world.tenant.streamed[0], next(i for i in range(N) if i not in world.tenant.streamed)
    error = world.refused(InvalidState, world.declare, world.address(streamed), 1)
    assert (error.tenant, error.layer) == ("m", streamed)
    world.declare(world.address(resident), 1)
    assert internals(world.tenant).pinned == (resident,)
    world.remap(0)
    advanced.settle(world.session)
    world.declare(world.address(streamed), 1)
    assert internals(world.tenant).pinned == tuple(sorted((resident, streamed)))


def test_what_was_withdrawn_may_be_streamed_again(world: World) -> None:
    ranges = [(world.address(0), PAGE), (world.address(0) + PAGE, PAGE), (world.address(4), 1)]
    for each in ranges:
        world.declare(*each)
    world.refused(InvalidArgument, world.withdraw, world.address(0), 2 * PAGE)
    for each, left in zip(ranges, [(0, 4), (4,), ()]):
        world.withdraw(*each)
        assert internals(world.tenant).pinned == left
    world.refused(InvalidArgument, world.withdraw, *ranges[0])
    world.remap(N - 1)
    assert world.tenant.streamed == tuple(range(N))


@pytest.mark.parametrize("what", ["layer", "kv"])
def test_a_tenant_with_a_declared_range_is_not_detached(world: World, what: str) -> None:
    kv = internals(world.tenant).kv
    address = kv.address if what == "kv" else world.address(2)
    world.declare(address, PAGE)
    error = world.refused(InvalidState, world.session.detach, "m")
    assert (error.tenant, error.address, error.nbytes) == ("m", address, PAGE)
    before = kv.usable_blocks
    world.remap(3)  # aliased: the KV region shows all its pages from the start, so growing changes nothing there
    assert kv.usable_blocks > before
    world.remap(0)
    other = world.session.attach_bytes(make_layers([1] * 3, 2), name="other", kv=make_spec(3))
    assert internals(other).pinned == ()
    world.session.detach("other")  # not its range
    world.withdraw(address, PAGE)
    world.session.detach("m")
    world.attach()
