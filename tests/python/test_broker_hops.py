"""What a grant takes, counted: messages, and threads that it waits for. Nothing here depends on how long something takes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

import numpy as np
from arena_worlds import make_spec
from broker_member import LAYER_PAGES, LAYERS, PAGE, attached, opened, until

import remap
from remap.broker import server
from remap.broker.ledger import Ledger
from remap.broker.messages import Recall
from remap.broker.observer import Observer
from remap.broker.server import Broker
from remap.memory.other_processes import _Lack

DEVICE = os.environ.get("REMAP_DEVICE") or "cpu"  # on the emulated driver as well: device_suites.txt
MANY = 12
PAGES = (LAYERS + MANY) * LAYER_PAGES + 8  # the weights and first blocks of both, and nothing more


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE, DEVICE) as made:
        yield made


def asleep(session: remap.Session) -> remap.Tenant:
    """A tenant with layers to lend, which serves nothing."""
    masters = [np.full(LAYER_PAGES * PAGE, layer, dtype=np.uint8) for layer in range(MANY)]
    knobs = remap.advanced.Knobs(reserve_blocks=0, min_idle=0.0)
    tenant = session.attach_bytes(
        masters, name="giver", kv=make_spec(MANY, min_blocks=8, max_blocks=4000), config=knobs
    )
    with tenant.forward():
        for layer in range(MANY):
            tenant.wait(layer)
            tenant.done(layer)
    session.deactivate("giver")
    return tenant


def wanted(tenant: remap.Tenant, pages: int) -> int:
    """Blocks that lie in so many pages more than it has."""
    return tenant.kv.free_blocks + pages * PAGE // tenant.kv.spec.block_bytes


def grow(session: remap.Session, tenant: remap.Tenant, blocks: int) -> None:
    until(lambda: session.step({tenant.name: remap.Demand(blocks)}) is not None and tenant.kv.free_blocks >= blocks, "")


def test_a_grant_of_another_members_layers_takes_six_messages(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """One question to the giver, not one for what it does not use and another one for layers: each is a wake-up of two
    processes."""
    seen: list[str] = []

    def told(code: Any) -> Any:
        def call(message: Any) -> Any:
            found = code(message)
            seen.append(type(found if isinstance(message, bytes) else message).__name__)
            return found

        return call

    with opened(broker) as giver, opened(broker) as session:
        asleep(giver)
        taker = attached(session, "taker")
        blocks = wanted(taker, LAYER_PAGES)
        assert broker.ledger.free == 0
        for name in ("encode", "decode_to_broker"):
            monkeypatch.setattr(server, name, told(getattr(server, name)))
        grow(session, taker, blocks)
        until(lambda: "Done" in seen, "the giver has given")
        monkeypatch.undo()
    assert sorted(seen) == ["Done", "Give", "Grant", "Grant", "Recall", "Want"]
    assert seen[:3] == ["Want", "Recall", "Grant"], "who is to give hears of it first"


def test_who_alone_can_give_is_asked_once_and_two_are_asked_for_what_they_do_not_use_first() -> None:
    for others in (1, 2):
        ledger = Ledger(6)
        for member in range(1, others + 2):
            ledger.joined(member)
            ledger.wanted(member, 1, 2)
        ledger.wanted(others + 1, 2, 6)
        asked = []
        while (recall := ledger._recall) is not None:
            asked.append(recall.member)
            sent = ledger.done(recall.member, recall.number)
        assert asked == ([1] if others == 1 else [1, 2, 1, 2])
        assert not [message for _, message in sent if isinstance(message, Recall)]
        assert not ledger.waiting


def test_a_step_takes_in_what_has_come_and_waits_for_no_other_thread(broker: Broker) -> None:
    """The membership's thread needs the session's lock, which steps without a pause between them hardly leave it."""
    with opened(broker) as giver, opened(broker) as session:
        asleep(giver)
        taker = attached(session, "taker")
        blocks = wanted(taker, LAYER_PAGES)
        membership: Any = session._other_processes._membership  # type: ignore[union-attr]

        def steps(core: object) -> None:
            """With the session's lock held throughout."""
            had = len(membership.held)
            session.step({"taker": remap.Demand(blocks)})
            until(lambda: len(membership.held) >= had + LAYER_PAGES, "the pages are here")
            session.step({"taker": remap.Demand(blocks)})
            assert taker.kv.free_blocks >= blocks

        session.exclusively(steps)
        remap.advanced.check(session)


def test_a_step_waits_for_the_reading_thread_only_if_there_is_something_to_read(broker: Broker) -> None:
    """That thread waits for the interpreter beside one that computes, and gets it when a step waits for it."""
    with opened(broker) as giver, opened(broker) as session:
        asleep(giver)
        taker = attached(session, "taker")
        membership: Any = session._other_processes._membership  # type: ignore[union-attr]
        blocks, taken = wanted(taker, LAYER_PAGES), membership._take
        here, let_go = threading.Event(), threading.Event()

        def held_up(*arguments: Any) -> str:
            here.set()
            assert let_go.wait(60)
            found: str = taken(*arguments)
            return found

        session.step({"taker": remap.Demand(blocks)})
        until(lambda: membership.met, "the pages are here")
        session.step({"taker": remap.Demand(blocks)})
        assert taker.kv.free_blocks >= blocks
        membership._take = held_up
        with Observer(str(broker.path)) as observer:  # the broker tells the members to report
            looker = threading.Thread(target=observer.look)
            looker.start()
            assert here.wait(60)
            membership.let_read()  # nothing is wanted: it looks at nothing
            membership._open = True
            waiter = threading.Thread(target=membership.let_read)
            waiter.start()
            assert waiter.is_alive(), "it waits for what has been taken"
            let_go.set()
            waiter.join(60)
            assert not waiter.is_alive()
            looker.join(60)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in part"])
def test_after_a_want_that_was_met_the_next_one_is_not_put_off(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr("remap.memory.other_processes.AGAIN_S", 1e9)
    with opened(broker) as giver, opened(broker) as session:
        asleep(giver)
        taker = attached(session, "taker")
        membership: Any = session._other_processes._membership  # type: ignore[union-attr]
        blocks = wanted(taker, LAYER_PAGES if whole else 4 * PAGES)
        session.step({"taker": remap.Demand(blocks)})
        until(lambda: not membership._open, "all has come that is to be had")
        assert membership.met == whole
        session.step({"taker": remap.Demand(blocks)})
        serial = membership._serial
        session.step({"taker": remap.Demand(wanted(taker, 2 * LAYER_PAGES))})
        assert (membership._serial > serial) == whole


def test_pages_that_have_come_and_that_no_step_took_are_given_back(broker: Broker) -> None:
    with opened(broker) as giver:
        asleep(giver)
        with opened(broker) as session:
            taker = attached(session, "taker")
            membership: Any = session._other_processes._membership  # type: ignore[union-attr]

            def step(core: object) -> None:
                demand = {"taker": remap.Demand(wanted(taker, LAYER_PAGES))}
                giver.exclusively(lambda core: session.step(demand), claims=False)  # it gives nothing within the step
                until(lambda: membership.met, "the pages are here")
                assert membership._late
                membership._asked = None  # and nobody takes them in

            session.exclusively(step)
        until(lambda: broker.ledger.held.get(2, 0) == 0, "all has come back")


def test_a_step_beside_paused_requests_lists_the_free_pages_only_if_some_go(broker: Broker) -> None:
    """It listed all of the arena's free pages three times in each step while others lacked some."""

    class Counted:
        """The arena, and how often its free pages were listed."""

        def __init__(self, arena: Any) -> None:
            self.arena, self.lists = arena, 0

        def __getattr__(self, name: str) -> Any:
            self.lists += name == "free_pages"
            return getattr(self.arena, name)

    with opened(broker) as giver:
        tenant = attached(giver, "giver")
        tenant.kv.allocate(tenant.kv.free_blocks)
        giver.deactivate("giver")
        outside: Any = giver._other_processes
        changes = outside._changes
        arena = changes.arena = Counted(changes.arena)
        outside.lacks = _Lack(4, time.monotonic(), False)
        assert outside.meet({}) == []
        changes.arena = arena.arena
        assert arena.lists == 0


def test_a_step_of_a_member_that_asks_for_nothing_looks_at_nothing_of_the_broker(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(broker) as giver, opened(broker) as session:
        asleep(giver)
        taker = attached(session, "taker")
        grow(session, taker, wanted(taker, LAYER_PAGES))
        outside: Any = session._other_processes
        until(lambda: not outside._membership._open, "the want is over")
        session.step({"taker": remap.Demand(8)})

        def refuse(*arguments: object) -> None:
            raise AssertionError("a step that asks for nothing")

        for each, name in (
            *((outside, name) for name in ("take_arrived", "meet", "return_called", "fetch", "bring")),
            *((outside._membership, name) for name in ("let_read", "arrived", "want")),
            (session._asked, "attend"),
        ):
            monkeypatch.setattr(each, name, refuse)
        for blocks in (0, 8):
            session.step({"taker": remap.Demand(blocks)})
        monkeypatch.undo()


def test_a_page_that_was_called_and_is_a_layer_by_now_stays(broker: Broker) -> None:
    """Another process calls a page that it has lent, gives its layers up, and the page is a layer here before the next step: that
    raised InvalidArgument from the step, since the page was taken for KV."""
    with opened(broker) as session:
        tenant = attached(session, "one")
        outside: Any = session._other_processes
        state = outside._tenants["one"]
        homes = [page for home in state.pages.homes for page in home if page in state.index_of]
        assert homes
        outside._called.update(dict.fromkeys(homes, time.monotonic()))
        session.step({"one": remap.Demand(0)})
        assert state.pages.streamed == () and outside._called == {}
        remap.advanced.check(session)
        kv = [page for page in state.donation_order[:1] if page not in homes]  # one that it has as KV is given
        tenant.kv.free(tenant.kv.allocate(1))
        outside._called.update(dict.fromkeys(kv, time.monotonic()))
        assert outside._lending.held(state, kv) == kv
