"""Promise 6: a page that changes tenant reads zero before the new tenant can read it; padding included, bytes counted."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from arena_worlds import PAGE, SHORT, forward, make_backend, make_layers, make_spec, read_block, session_on, write_block

import remap
from remap import _core
from remap.internals import internals

TOTAL = 40
SECRET = 0xA5


class World:
    def __init__(self, mode: str) -> None:
        self.trace = _core.make_trace_backend(make_backend(TOTAL * PAGE))
        self.session = session_on(self.trace, TOTAL * PAGE, page_bytes=PAGE, mode=mode)

    def filled(self) -> int:
        """Bytes that the backend was asked to zero since the last call."""
        fills = [record for record in self.trace.log() if record.call == _core.Call.fill and not record.failed]
        assert all(record.args[2] == 0 for record in fills)
        self.trace.clear_log()
        return sum(record.args[3] for record in fills)

    def tenant(self, name: str, pages: list[int], **kv: Any) -> Any:
        return self.session.attach_bytes(make_layers(pages, len(name)), name=name, kv=make_spec(len(pages), **kv))

    def soil(self, name: str = "first") -> None:
        """A tenant that writes a secret into every byte that it can reach, and leaves."""
        tenant = self.tenant(name, [2, 2, 2], min_blocks=100, max_blocks=190)
        self.session.step({name: remap.Demand(blocks=100)})
        for block in tenant.kv.allocate(tenant.kv.free_blocks):
            write_block(tenant, block, SECRET)
        for layer in range(3):  # weights and the padding behind them
            ctypes.memset(remap.advanced.layer_address(self.session, name, layer), SECRET, 2 * PAGE)
        self.session.detach(name)
        self.filled()


@pytest.fixture(params=["aliased", "strict"])
def world(request: pytest.FixtureRequest) -> Any:
    made = World(request.param)
    yield made
    made.session.close()


def test_what_a_second_tenant_can_read_is_zero(world: World) -> None:
    """Its first blocks, those that come later, and the padding behind a layer's last byte."""
    world.soil()
    second = world.tenant("second", [2, 2, 3], min_blocks=8, max_blocks=200)
    for layer, pages in enumerate((2, 2, 3)):
        address = remap.advanced.layer_address(world.session, "second", layer)
        assert set(ctypes.string_at(address + pages * PAGE - SHORT, SHORT)) == {0}
    ids = second.kv.allocate(second.kv.free_blocks)
    world.session.step({"second": remap.Demand(blocks=60)})
    more = second.kv.allocate(second.kv.free_blocks)
    assert len(more) >= 60
    for block in (*ids, *more):
        assert read_block(second, block) == {0}


def test_layers_of_the_tenant_itself_are_not_zeroed(world: World) -> None:
    """Its own weights are no secret; zeroing them would cost time on the path on which blocks are wanted."""
    tenant = world.tenant("only", [2, 2, 2, 2], max_blocks=150)
    remap.advanced.settle(world.session)
    world.filled()
    remap.advanced.remap(world.session, "only", 3)
    remap.advanced.remap(world.session, "only", 0)
    forward(world.session, tenant, make_layers([2, 2, 2, 2], len("only")))
    remap.advanced.remap(world.session, "only", 2, 2)
    assert world.filled() == 0


def test_new_memory_is_zeroed_only_where_the_system_does_not_promise_that_it_is(world: World) -> None:
    world.tenant("first", [2, 2], min_blocks=8, max_blocks=200)
    pages = world.session.snapshot().tenants["first"].pages
    assert world.filled() == (0 if world.trace.new_pages_are_zero else (pages.params + pages.kv) * PAGE)


def test_exactly_the_pages_that_changed_tenant_are_zeroed(world: World) -> None:
    world.soil()
    for name in ("second", "third"):  # "second" may have left something, too
        world.tenant(name, [2, 2], min_blocks=8, max_blocks=200)
        pages = world.session.snapshot().tenants[name].pages
        assert 0 < pages.total < TOTAL
        assert world.filled() == (pages.params + pages.kv) * PAGE
        world.session.detach(name)


def test_a_tenant_never_sees_a_byte_of_another_whatever_happens(world: World) -> None:
    """The whole of what each of a row of tenants can read, looked through for the secrets of those before."""
    for round_ in range(4):
        world.soil(f"soil{round_}")
        name = "x" * (round_ + 1)
        layers = make_layers([2, 3, 2], 9)
        tenant = world.session.attach_bytes(layers, name=name, kv=make_spec(3, max_blocks=220))
        remap.advanced.remap(world.session, name, round_ % 3)
        world.session.step({name: remap.Demand(blocks=40)})
        own = {byte for layer in layers for byte in layer}
        for block in tenant.kv.allocate(tenant.kv.free_blocks):
            assert read_block(tenant, block) <= own | {0, SECRET}
            # A block holds zeroes or the tenant's own weights; a run of the secret would be neither.
            for offset, nbytes in internals(tenant).kv.geometry.byte_ranges_of_block(block):
                assert bytes([SECRET]) * 256 not in ctypes.string_at(internals(tenant).kv.address + offset, nbytes)
        forward(world.session, tenant, layers)
        world.session.detach(name)
