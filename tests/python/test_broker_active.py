"""KV of a process that serves: what its engine does not use goes to others between two passes, and nothing to and fro."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

from broker_member import LAYER_PAGES, LAYERS, PAGE, attached, opened, until

import remap
from remap.broker.ledger import Ledger
from remap.broker.server import Broker
from remap.internals import internals

DEVICE = os.environ.get("REMAP_DEVICE") or "cpu"  # on the emulated driver as well: device_suites.txt
OWN, MORE = LAYERS * LAYER_PAGES + 2, 40
BLOCKS = 4  # in a page


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "s", (2 * OWN + MORE) * PAGE, PAGE, DEVICE) as made:
        yield made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


class Server:
    """A session whose engine has so many live blocks as it is told."""

    def __init__(self, broker: Broker, stack: ExitStack, name: str) -> None:
        self.session, self.name = stack.enter_context(opened(broker)), name
        self.tenant = attached(self.session, name)
        self.kv, self.live = self.tenant.kv, list[int]()

    def step(self, live: int) -> bool:
        """Whether it has them."""
        self.kv.free(self.live[live:])
        del self.live[live:]
        report = self.session.step({self.name: remap.Demand(live - len(self.live))})
        moved = report.moved.get(self.name, {})
        self.live = [moved.get(block, block) for block in self.live]
        self.live += self.kv.allocate(min(live - len(self.live), self.kv.free_blocks))
        return len(self.live) == live

    def begin(self) -> tuple[threading.Event, threading.Thread]:
        """A pass, until the event."""
        inside_it, end = threading.Event(), threading.Event()

        def serve() -> None:
            with self.tenant.forward():
                inside_it.set()
                for layer in range(LAYERS):
                    self.tenant.wait(layer)
                    self.tenant.done(layer)
                assert end.wait(60)

        thread = threading.Thread(target=serve)
        thread.start()
        assert inside_it.wait(60)
        return end, thread


def two(broker: Broker, stack: ExitStack, live: int) -> tuple[Server, Server]:
    """The first has all pages, and needs no more than `live` blocks of them."""
    one, other = Server(broker, stack, "one"), Server(broker, stack, "other")
    until(lambda: one.step(MORE * BLOCKS), "it has grown")
    for _ in range(200):  # its controller forgets that
        one.step(live)
    assert broker.ledger.free <= 2
    return one, other


def test_what_a_process_in_a_pass_does_not_use_goes_behind_it(broker: Broker, stack: ExitStack) -> None:
    """One whose passes follow each other gave nothing, however much it had: it was asked inside a pass, and nobody came back to
    that."""
    one, other = two(broker, stack, 8)
    end, thread = one.begin()
    held = broker.ledger.held[1]
    asked = one.session._asked
    assert asked is not None
    other.step(60)
    until(lambda: "rest" in asked._put_off, "it has been asked")
    assert broker.ledger.held[1] == held, "nothing is taken from a pass"
    end.set()
    thread.join()
    one.step(8)
    until(lambda: other.step(60), "it has got them")
    assert len(one.live) == 8
    for each in (one, other):
        remap.advanced.check(each.session)


def test_what_it_needs_itself_stays(broker: Broker, stack: ExitStack) -> None:
    one, other = two(broker, stack, MORE * BLOCKS)
    end, thread = one.begin()
    other.step(60)
    until(lambda: not broker.ledger.waiting and not broker.ledger.recalls, "it has answered, inside the pass")
    assert one.session._asked is not None and not one.session._asked._put_off
    end.set()
    thread.join()
    held = broker.ledger.held[1]
    one.step(MORE * BLOCKS)
    assert broker.ledger.held[1] == held and len(one.live) == MORE * BLOCKS


def test_a_pass_that_began_long_before_is_waited_for_once(broker: Broker, stack: ExitStack) -> None:
    """Until it steps again, others get their answer at once, and what it gives then is free."""
    one, other = two(broker, stack, 8)
    end, thread = one.begin()
    outside = one.session._other_processes
    assert outside is not None
    other.step(60)
    until(lambda: not broker.ledger.waiting and not broker.ledger.recalls, "it has answered")
    assert outside.held_up and not outside.await_step()
    end.set()
    thread.join()
    one.step(8)
    until(lambda: broker.ledger.free > 0, "they are free")
    assert other.step(60)


def test_demand_that_varies_moves_no_page_to_and_fro(
    broker: Broker, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server keeps what it has needed lately, as for another model of its own process."""
    one, other = (Server(broker, stack, name) for name in ("one", "other"))
    half = MORE * BLOCKS // 2
    for each in (one, other):
        until(lambda each=each: each.step(half - 8), "it has grown")  # type: ignore[misc]
    given: list[int] = []
    plain = Ledger.gave
    monkeypatch.setattr(Ledger, "gave", lambda self, *more, **how: given.append(1) or plain(self, *more, **how))
    rng = random.Random(1)
    for _ in range(500):
        for each in (one, other):
            each.step(half - 8 + rng.randrange(-6, 7))
    assert not given
    assert internals(one.tenant)._state.active
    monkeypatch.undo()
