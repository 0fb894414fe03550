"""KV of a process's paused tenants becomes KV of another process: its report wants live blocks, its engine copies them to host
memory and frees them at its next step, and they come back with the same bytes. Nothing waits for one that does not answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

import numpy as np
from arena_worlds import make_spec
from broker_member import PAGE, SessionBytes, opened, until
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import remap
from remap.broker.server import Broker
from remap.internals import internals

DEVICE = os.environ.get("REMAP_DEVICE") or "cpu"  # on the emulated driver as well: device_suites.txt
LAYERS, MIN, HOST = 2, 4, 400
DIM = 32 * PAGE >> 16


class Pausing:
    """A tenant, and its engine's part: blocks with bytes of their own, which it can copy to host memory."""

    def __init__(self, session: remap.Session, name: str, value: int, *, swaps: bool = True) -> None:
        self.session, self.name, self.value, self.swaps = session, name, value, swaps
        masters = [np.full(PAGE, layer, dtype=np.uint8) for layer in range(LAYERS)]
        spec = make_spec(LAYERS, min_blocks=MIN, max_blocks=2000, dim=DIM)
        knobs = remap.advanced.Knobs(reserve_blocks=0, max_layers=0)
        self.tenant = session.attach_bytes(
            masters, name=name, kv=replace(spec, host_blocks=HOST if swaps else 0), config=knobs
        )
        self.kv = self.tenant.kv
        self.memory = SessionBytes(session)
        self.here: dict[int, int] = {}  # block -> its bytes
        self.out: dict[int, int] = {}  # host block -> its bytes
        self.answers: Callable[[int], int] = lambda blocks: blocks
        self.asked: list[int] = []
        self.offer()

    def _ranges(self, block: int) -> list[tuple[int, int]]:
        kv = internals(self.tenant).kv
        return [(kv.address + offset, nbytes) for offset, nbytes in kv.geometry.byte_ranges_of_block(block)]

    def take(self, count: int) -> None:
        """Blocks, none of which has another's bytes."""
        for block in self.kv.allocate(min(count, self.kv.free_blocks)):
            for address, nbytes in self._ranges(block):
                assert set(self.memory.read(address, nbytes)) <= {0, *range(self.value, self.value + 40)}
                self.memory.fill(address, nbytes, self.value + len(self.here) % 40)
            self.here[block] = self.value + len(self.here) % 40

    def drop(self, count: int) -> None:
        for block in sorted(self.here)[:count]:
            del self.here[block]
            self.kv.free([block])
        self.offer()

    def offer(self) -> None:
        if self.swaps:
            self.kv.host.offer(min(len(self.here), self.kv.host.free_blocks))

    def release(self, blocks: int) -> bool:
        self.asked.append(blocks)
        leaving = sorted(self.here)[-self.answers(blocks) :] if self.answers(blocks) else []
        hosts = self.kv.host.copy_out(leaving)
        self.out.update(zip(hosts, (self.here.pop(block) for block in leaving), strict=True))
        self.kv.free(leaving)
        if leaving:
            self.offer()
        return bool(leaving)

    def pause(self) -> None:
        self.session.deactivate(self.name)
        self.offer()

    def resume(self) -> bool:
        """Whether it is active, and all that is out has come in."""
        if not self.tenant.active and not self.session.activate(self.name).activated:
            return False
        hosts = list(self.out)[: self.kv.free_blocks]
        if hosts:
            blocks = self.kv.allocate(len(hosts))
            self.kv.host.join(self.kv.host.copy_in(hosts, blocks))
            self.here.update(zip(blocks, (self.out.pop(host) for host in hosts), strict=True))
            self.kv.host.free(hosts)
        return not self.out

    def check(self) -> None:
        for block, value in self.here.items():
            for address, nbytes in self._ranges(block):
                assert set(self.memory.read(address, nbytes)) == {value}


class Worker:
    """A session with engines, which steps as a server does."""

    def __init__(self, broker: Broker, stack: ExitStack, names: str, value: int, *, swaps: bool = True) -> None:
        self.session = stack.enter_context(opened(broker))
        self.engines = {
            name: Pausing(self.session, name, value + 50 * at, swaps=swaps) for at, name in enumerate(names)
        }

    def step(self, **wanted: int) -> remap.StepReport:
        """Until the report wants nothing that is freed, as `Reports.ask` does."""
        demand = {name: remap.Demand(wanted.get(name, 0)) for name, one in self.engines.items() if one.tenant.active}
        while True:
            report = self.session.step(demand)
            for name, moved in report.moved.items():
                one = self.engines[name]
                one.here = {moved.get(block, block): value for block, value in one.here.items()}
            freed = [self.engines[name].release(blocks) for name, blocks in report.wanted.items()]
            if not any(freed):
                return report

    def check(self) -> None:
        remap.advanced.check(self.session)
        for one in self.engines.values():
            one.check()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "s", 24 * PAGE, PAGE, DEVICE) as made:
        yield made


@pytest.fixture
def opened_here() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def full(worker: Worker, name: str) -> Pausing:
    """It has taken all that there is."""
    engine = worker.engines[name]
    worker.step(**{name: 2000})
    engine.take(2000)
    return engine


def settled(broker: Broker) -> bool:
    return not broker.ledger.waiting and not broker.ledger.recalls


def three(broker: Broker, stack: ExitStack) -> tuple[Worker, Worker]:
    """A process whose one tenant has all pages and is paused, and one that has a block or two."""
    giver, taker = Worker(broker, stack, "p", 1), Worker(broker, stack, "t", 101)
    full(giver, "p").pause()
    assert broker.ledger.free == 0
    return giver, taker


def grow(taker: Worker, blocks: int, meanwhile: Callable[[], object]) -> None:
    """It steps until it has so many free blocks; the other process does this in between."""
    kv = taker.engines["t"].kv
    until(
        lambda: meanwhile() is not taker.step(t=blocks) and kv.free_blocks >= blocks, lambda: f"{kv.free_blocks} free"
    )


def test_kv_of_a_paused_tenant_is_another_process_kv_and_comes_back(broker: Broker, opened_here: ExitStack) -> None:
    giver, taker = three(broker, opened_here)
    paused, other = giver.engines["p"], taker.engines["t"]
    had = len(paused.here)
    grow(taker, 60, giver.step)
    assert paused.out and len(paused.here) + len(paused.out) == had
    assert len(paused.asked) < 5, "it is asked for as much as is lacking, not block by block"
    other.take(60)
    for each in (giver, taker):
        each.check()
    assert broker.ledger.lent == {}, "its layers have stayed"
    other.drop(60)
    until(lambda: (taker.step(), giver.step(p=len(paused.out)), paused.resume())[-1], "all is back")
    assert len(paused.here) == had
    for each in (giver, taker):
        each.check()


def test_layers_of_another_process_get_it_for_good(broker: Broker, opened_here: ExitStack) -> None:
    giver, taker = three(broker, opened_here)
    paused = giver.engines["p"]
    state: list[Any] = []

    def attach() -> None:
        masters = [np.full(2 * PAGE, 7, dtype=np.uint8) for _ in range(LAYERS)]
        spec = make_spec(LAYERS, min_blocks=MIN, max_blocks=100, dim=DIM)
        state.append(taker.session.attach_bytes(masters, name="more", kv=spec))

    thread = threading.Thread(target=attach)
    thread.start()
    until(lambda: giver.step() is not None and not thread.is_alive(), "it is attached")
    assert state and paused.out
    for each in (giver, taker):
        each.check()


@pytest.mark.parametrize("answers", [0, 1], ids=["nothing", "too little"])
def test_an_engine_that_does_not_answer_is_asked_once_for_each_offer(
    broker: Broker, opened_here: ExitStack, answers: int
) -> None:
    giver, taker = three(broker, opened_here)
    paused = giver.engines["p"]
    paused.answers = lambda blocks: answers
    paused.swaps = False  # it offers nothing anew
    for _ in range(3):
        taker.session._other_processes._again_s = 0.0  # type: ignore[union-attr]
        assert taker.step(t=60).unmet_blocks
        until(lambda: giver.step() is not None and settled(broker), "the broker has its answer")
    assert len(paused.asked) == 1
    assert len(paused.out) == answers
    paused.swaps, paused.answers = True, lambda blocks: blocks
    paused.offer()
    grow(taker, 60, giver.step)
    giver.check()


@pytest.mark.parametrize("why", ["serves", "keeps to itself", "another one cannot", "nobody steps", "long ago"])
def test_who_gives_nothing(broker: Broker, opened_here: ExitStack, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """And the broker has its answer all the same."""
    giver = Worker(broker, opened_here, "p", 1)
    taker = Worker(broker, opened_here, "t", 101)
    if why == "another one cannot":  # its live blocks would stay wherever they are: nobody's can go for them
        giver.engines["q"] = Pausing(giver.session, "q", 51, swaps=False)
        giver.engines["q"].take(2)
    paused = full(giver, "p")
    if why != "serves":
        paused.pause()
    if why == "keeps to itself":
        state = internals(paused.tenant)._state
        state.config = replace(state.config, lends=False)
    if why == "long ago":
        monkeypatch.setattr("remap.memory.other_processes.CALLED_S", -1.0)
    taker.step(t=60)
    until(lambda: (why == "nobody steps" or giver.step() is not None) and settled(broker), "the broker has its answer")
    assert not paused.asked
    assert not paused.out
    if why == "nobody steps":  # until somebody does, soon
        giver.step()
        assert paused.asked
    giver.check()
    taker.check()


def came_back(giver: Worker, taker: Worker, name: str) -> bool:
    one = giver.engines[name]
    if not one.resume():
        giver.step(**{name: len(one.out)})
        taker.step()
    return not one.out


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("wants"), st.integers(1, 120)),
        st.tuples(st.just("drops"), st.integers(1, 80)),
        st.tuples(st.just("steps"), st.integers(0, 30)),
        st.tuples(st.just("pauses"), st.sampled_from("pq")),
        st.tuples(st.just("resumes"), st.sampled_from("pq")),
        st.tuples(st.just("answers"), st.integers(0, 6)),
        st.tuples(st.just("offers"), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=examples(100), deadline=None)
@given(EVENTS)
def test_in_any_order_no_byte_is_lost_and_each_page_has_one_owner(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, Any]]
) -> None:
    """A process with two tenants that are paused or serve, whose engines answer whole, in part or not at all, and another one
    that grows and shrinks beside it. The threads of both memberships act at their own time."""
    path = tmp_path_factory.mktemp("broker") / "s"
    with Broker(path, 40 * PAGE, PAGE, DEVICE) as broker, ExitStack() as stack:
        giver, taker = Worker(broker, stack, "pq", 1), Worker(broker, stack, "t", 101)
        other = taker.engines["t"]
        for name in "pq":
            giver.step(**{name: 50})
            giver.engines[name].take(50)
        for kind, what in events:
            if kind == "wants":
                taker.step(t=what)
                other.take(what)
            elif kind == "drops":
                other.drop(what)
            elif kind == "steps":
                active = [name for name, one in giver.engines.items() if one.tenant.active]
                giver.step(**dict.fromkeys(active, what))
                for name in active:
                    giver.engines[name].take(what)
            elif kind == "pauses":
                giver.engines[what].pause()
            elif kind == "resumes":
                giver.engines[what].resume()
            elif kind == "answers":
                for one in giver.engines.values():
                    one.answers = lambda blocks, most=what: min(blocks, most) if most < 5 else blocks
            else:
                for one in giver.engines.values():
                    one.offer()
            giver.check()
            taker.check()
        other.drop(2000)
        for one in giver.engines.values():
            one.answers = lambda blocks: blocks
        for name, one in giver.engines.items():  # one after the other: together they need more than there is
            for _ in range(200):  # the controllers forget the burst
                taker.step()
            until(partial(came_back, giver, taker, name), f"{name} has its blocks back")
            one.drop(2000)
        giver.check()
        taker.check()
        until(lambda: settled(broker), "nothing is wanted")
