"""`expect` asks other processes before there is need: it waits for nothing, takes nothing from who needs it, and what nobody has
used goes back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

import numpy as np
from arena_worlds import make_spec
from broker_member import LAYER_PAGES, LAYERS, PAGE, SessionBytes, attached, opened, until

import remap
from remap.broker import member
from remap.broker.server import Broker
from remap.errors import InvalidArgument
from remap.internals import internals

DEVICE = os.environ.get("REMAP_DEVICE") or "cpu"  # on the emulated driver as well: device_suites.txt
MANY = 12
PAGES = (LAYERS + MANY) * LAYER_PAGES + 8  # the weights and first blocks of both, and nothing more
WANTED = 2 * LAYER_PAGES  # pages


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE, DEVICE) as made:
        yield made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def giver_in(session: remap.Session, name: str = "giver") -> remap.Tenant:
    masters = [np.full(LAYER_PAGES * PAGE, layer, dtype=np.uint8) for layer in range(MANY)]
    knobs = remap.advanced.Knobs(reserve_blocks=0, min_idle=0.0)
    tenant = session.attach_bytes(masters, name=name, kv=make_spec(MANY, min_blocks=8, max_blocks=4000), config=knobs)
    run(tenant, MANY)
    return tenant


def run(tenant: remap.Tenant, layers: int) -> None:
    with tenant.forward():
        for layer in range(layers):
            tenant.wait(layer)
            tenant.done(layer)


def two(broker: Broker, stack: ExitStack) -> tuple[remap.Session, remap.Session, remap.Tenant]:
    """A process that serves nothing, and one that has no page to spare."""
    giver, taker = stack.enter_context(opened(broker)), stack.enter_context(opened(broker))
    giver_in(giver)
    giver.deactivate("giver")
    tenant = attached(taker, "taker")
    assert broker.ledger.free == 0
    return giver, taker, tenant


def blocks_of(tenant: remap.Tenant, pages: int) -> int:
    return pages * PAGE // tenant.kv.spec.block_bytes


def free_here(session: remap.Session) -> int:
    return session.snapshot().pages.free


def quiet(broker: Broker) -> bool:
    return not broker.ledger.waiting and not broker.ledger.recalls


def test_a_step_finds_what_was_expected_and_asks_nobody(
    broker: Broker, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    giver, taker, tenant = two(broker, stack)
    blocks = blocks_of(tenant, WANTED)
    with tenant.forward():  # another thread may say so at any time
        assert taker.expect("taker", blocks=blocks) == ()
        for layer in range(LAYERS):
            tenant.wait(layer)
            tenant.done(layer)
    until(lambda: free_here(taker) >= WANTED, "they come by themselves")
    assert tenant.kv.free_blocks == 8, "and are no tenant's until a step wants them"

    def refuse(*arguments: Any, **more: Any) -> None:
        raise AssertionError("a message on the path of a step")

    membership: Any = taker._other_processes._membership  # type: ignore[union-attr]
    monkeypatch.setattr(membership, "want", refuse)
    taker.step({"taker": remap.Demand(tenant.kv.free_blocks + blocks)})
    assert tenant.kv.free_blocks >= 8 + blocks
    monkeypatch.undo()
    for each in (giver, taker):
        remap.advanced.check(each)
    assert len(broker.ledger.lent) >= WANTED, "layers of the one that serves nothing"


@pytest.mark.parametrize("used", [0, 1], ids=["none used", "some used"])
def test_what_nobody_has_used_goes_back(
    broker: Broker, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, used: int
) -> None:
    giver, taker, tenant = two(broker, stack)
    had = broker.ledger.held[2]
    monkeypatch.setattr(member, "KEEP_S", 0.2 if used else 0.0)
    taker.expect("taker", blocks=blocks_of(tenant, WANTED))
    if used:
        until(lambda: free_here(taker) >= WANTED, "they have come")
        taker.step({"taker": remap.Demand(tenant.kv.free_blocks + blocks_of(tenant, used))})
    kept = had + used
    until(lambda: quiet(broker) and broker.ledger.held[2] <= kept + 1 and free_here(taker) == 0, "the rest goes back")
    assert broker.ledger.held[2] >= kept
    assert taker._other_processes._membership.ahead == set()  # type: ignore[union-attr]
    if not used:
        assert giver.activate("giver").activated
        until(
            lambda: giver.step({"giver": 0}) is not None and not internals(giver.tenants["giver"])._state.gone, "home"
        )
    for each in (giver, taker):
        remap.advanced.check(each)


@pytest.mark.parametrize("why", ["serves", "live", "paused", "keeps to itself"])
def test_nothing_is_taken_from_who_needs_it(broker: Broker, stack: ExitStack, why: str) -> None:
    giver, taker = stack.enter_context(opened(broker)), stack.enter_context(opened(broker))
    tenant = giver_in(giver)
    if why == "keeps to itself":
        state = internals(tenant)._state
        state.config = type(state.config)(reserve_blocks=0, min_idle=0.0, lends=False)
        giver.deactivate("giver")
    wanting = attached(taker, "taker")
    if why in ("live", "paused"):
        taken = tenant.kv.allocate(tenant.kv.free_blocks)
        assert taken
    if why == "paused":  # what it has is for its next turn; its engine is not asked
        giver.deactivate("giver")
        internals(tenant)._state.config = type(internals(tenant)._state.config)(reserve_blocks=0, max_layers=0)
    before = broker.ledger.held[1]
    taker.expect("taker", blocks=blocks_of(wanting, WANTED))
    until(lambda: quiet(broker), "all have been asked")
    assert broker.ledger.held[1] == before
    assert giver._other_processes.lacks is None  # type: ignore[union-attr]
    remap.advanced.check(giver)


def test_who_needs_pages_gets_those_that_another_expects_to_need(tmp_path: Path, stack: ExitStack) -> None:
    broker = stack.enter_context(Broker(tmp_path / "s", (PAGES + 4) * PAGE, PAGE, DEVICE))
    third = stack.enter_context(opened(broker))
    masters = [np.full(PAGE, layer, dtype=np.uint8) for layer in range(2)]
    wanting = third.attach_bytes(masters, name="third", kv=make_spec(2, min_blocks=16, max_blocks=400))
    _, taker, tenant = two(broker, stack)
    taker.expect("taker", blocks=blocks_of(tenant, WANTED))
    until(lambda: free_here(taker) >= WANTED, "they have come")
    serial = taker._other_processes._membership._serial  # type: ignore[union-attr]
    third.expect("third", blocks=blocks_of(wanting, 2 * PAGES))
    until(lambda: quiet(broker), "all have been asked")
    assert free_here(taker) >= WANTED, "of two that expect some none takes the other's"
    until(lambda: third.step({"third": remap.Demand(2000)}) is not None and free_here(taker) == 0, "now it needs them")
    assert taker._other_processes._membership._serial == serial, "nothing is thrown to and fro"  # type: ignore[union-attr]


def test_a_want_that_is_open_is_not_replaced(broker: Broker, stack: ExitStack) -> None:
    _, taker, _ = two(broker, stack)
    membership: Any = taker._other_processes._membership  # type: ignore[union-attr]
    membership._open = True
    serial = membership._serial
    taker.expect("taker", blocks=1000)
    assert membership._serial == serial
    membership._open = False
    with pytest.raises(InvalidArgument, match="blocks"):
        taker.expect("taker", blocks=-1)
    broker.close()
    until(lambda: bool(membership.problem), "it has heard of that")
    assert taker.expect("taker", blocks=1000) == ()


def test_layers_of_a_model_without_pages_begin_to_load_when_another_process_gives_its_last_ones(
    broker: Broker, stack: ExitStack
) -> None:
    """Those behind the ones that hide the loading of the rest, and no others; an activation takes all."""
    giver, taker = stack.enter_context(opened(broker)), stack.enter_context(opened(broker))
    tenant = giver_in(giver)
    giver.deactivate("giver")
    rng = np.random.default_rng(3)
    masters = [rng.integers(0, 256, LAYER_PAGES * PAGE, dtype=np.uint8) for _ in range(LAYERS)]
    spec = make_spec(LAYERS, min_blocks=4, max_blocks=400)
    cold = taker.attach_bytes(masters, name="cold", kv=spec, active=False, pages="none")
    first = broker.ledger.free
    filler = attached(stack.enter_context(opened(broker)), "filler") if first > LAYERS * LAYER_PAGES else None
    until(lambda: filler is None or broker.ledger.free < LAYER_PAGES, "there is no free page")
    taker.expect("cold")
    state = internals(cold)._state
    until(lambda: not state.pages.cold, lambda: f"its layers come, but {sorted(state.pages.cold)}")
    assert not cold.active
    assert internals(tenant)._state.pages.cold and broker.ledger.lent == {}
    assert taker.activate("cold").activated
    memory = SessionBytes(taker)
    with cold.forward():
        for layer, master in enumerate(masters):
            cold.wait(layer)
            address = remap.advanced.layer_address(taker, "cold", layer)
            assert memory.read(address, len(master)) == master.tobytes()
            cold.done(layer)
    for each in (giver, taker):
        remap.advanced.check(each)
