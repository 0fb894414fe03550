"""What a listener, or a signal handler, may not do in the middle of a call: change whom the session has."""

from __future__ import annotations

import signal

import pytest
from arena_worlds import PAGE, forward, make_layers, make_spec

import remap


@pytest.fixture
def world():
    with remap.Session(96 * PAGE, page_bytes=PAGE) as session:
        layers = make_layers([2] * 6)
        tenant = session.attach_bytes(layers, name="m", kv=make_spec(6, max_blocks=160))
        forward(session, tenant, layers)
        yield session, tenant, layers


CALLS = {
    "close": lambda session: session.close(),
    "detach": lambda session: session.detach("m"),
    "attach_bytes": lambda session: session.attach_bytes(make_layers([2] * 3), name="n", kv=make_spec(3, max_blocks=8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_listener_neither_adds_nor_removes_tenants(world, name):
    session, tenant, layers = world
    tenant.kv.allocate(tenant.kv.free_blocks)
    caught = []

    def listener(added, withdrawn):
        with pytest.raises(remap.InvalidState, match=f"^{name} was called inside another call") as error:
            CALLS[name](session)
        caught.append(error.value.fields["call"])

    tenant.kv.subscribe(listener)  # told of the blocks that are open already, inside of a call as well
    assert caught == [name]
    report = session.step({"m": 20})
    assert caught == [name, name] and report.added_blocks["m"] >= 20
    remap.advanced.check(session)
    forward(session, tenant, layers)
    assert list(session.tenants) == ["m"] and not session.closed
    CALLS[name](session)  # outside of it: as ever


def test_a_signal_handler_that_closes_the_session_in_the_middle_of_a_step(world):
    session, tenant, layers = world
    tenant.kv.allocate(tenant.kv.free_blocks)
    usable = tenant.kv.usable_blocks
    armed = False
    tenant.kv.subscribe(lambda added, withdrawn: signal.raise_signal(signal.SIGUSR1) if armed else None)
    armed = True
    before = signal.signal(signal.SIGUSR1, lambda number, frame: session.close())
    try:
        report = session.step({"m": 20})
    finally:
        signal.signal(signal.SIGUSR1, before)
    armed = False
    # What a listener raises comes behind the change, which stays: the report tells it.
    assert "close was called inside another call" in report.reason["m"]
    assert not session.closed and tenant.kv.usable_blocks > usable
    remap.advanced.check(session)
    forward(session, tenant, layers)
    session.close()
    assert session.closed
