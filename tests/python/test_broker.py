"""One arena for several processes: pages go to who needs them, nobody reads another's bytes, and who ends gives all back."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

import broker_garbage
import numpy as np
import subprocesses
from arena_worlds import make_spec, read_block, write_block
from broker_crowd import Crowd
from broker_member import LAYER_PAGES, LAYERS, PAGE, Process, attached, files_of, opened, until
from broker_serving import Serving

import remap
from remap.broker import server
from remap.broker.locks import lock_member
from remap.broker.member import Membership, join
from remap.broker.messages import (
    VERSION,
    Claim,
    Done,
    Fetch,
    Give,
    Grant,
    Home,
    Join,
    Pages,
    Refused,
    Want,
    decode_to_member,
    encode,
)
from remap.broker.observer import Observer
from remap.broker.server import Broker
from remap.errors import DriverError, InvalidArgument, InvalidState, OutOfMemory
from remap.internals import internals
from remap.memory.lend import Lending
from remap.memory.shared_pages import MOST_FILES
from remap.sizes import show_size

DEVICE = os.environ.get("REMAP_DEVICE") or "cpu"  # on the emulated driver as well: device_suites.txt
PAGES = 96
BLOCKS_A_PAGE = 4
ROUNDS = int(os.environ.get("REMAP_BROKER_ROUNDS", "25"))
SEED = int(os.environ.get("REMAP_BROKER_SEED", "0"))
PACKETS = int(os.environ.get("REMAP_BROKER_PACKETS", "2000"))
OWN = LAYERS * LAYER_PAGES + 2  # pages of a member with its weights and 8 blocks
Start = Callable[..., Process]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE, DEVICE) as made:
        yield made


@pytest.fixture
def start(broker: Broker) -> Iterator[Start]:
    made: list[Process] = []

    def one(name: str, layers: int = LAYERS, value: int = 0) -> Process:
        made.append(Process(str(broker.path), name, layers, value))
        return made[-1]

    yield one
    for each in made:
        if each.process.poll() is None:
            each.kill()


# -- processes -----------------------------------------------------------------------------------------------------------


def test_one_process_takes_what_all_leave_free_and_others_get_it_back(broker: Broker, start: Start) -> None:
    one, two, three = map(start, ("one", "two", "three"))
    assert broker.ledger.held == {1: OWN, 2: OWN, 3: OWN}
    most = BLOCKS_A_PAGE * (PAGES - 3 * OWN) + 8
    assert one("take", most) == str(most)
    assert broker.ledger.free == 0
    assert one("check") == two("check") == three("check") == "right"
    assert one("free") == "freed"
    assert two("take", 100) == "100"  # asked for, and given by the first
    assert three("take", 100) == "100"
    assert one("check") == two("check") == three("check") == "right"
    assert min(int(two("usable")), int(three("usable"))) >= 100
    assert one("close") == two("close") == three("close") == "closed"
    until(lambda: broker.ledger.free == PAGES, "all has come back")


def test_live_blocks_are_not_given(broker: Broker, start: Start) -> None:
    one, two = start("one"), start("two")
    most = BLOCKS_A_PAGE * (PAGES - 2 * OWN) + 8
    assert one("take", most) == str(most)
    assert two("take", 50, 8) == "8"  # its own first ones
    assert one("check") == two("check") == "right"
    assert one("free") == "freed"
    assert two("take", 50) == "50"


def test_a_process_that_is_killed_gives_all_back(broker: Broker, start: Start) -> None:
    one, two = start("one"), start("two")
    assert one("take", 200) == "200"
    one.kill()
    until(lambda: list(broker.ledger.held) == [2], "the broker hears of its end")
    most = BLOCKS_A_PAGE * (PAGES - OWN) + 8
    assert two("take", most) == str(most)  # and none had bytes of the first
    assert two("check") == "right"
    assert broker.ledger.free == 0


def test_a_process_that_hangs_keeps_its_pages_and_delays_nobody_for_long(broker: Broker, start: Start) -> None:
    one, two = start("one"), start("two")
    assert one("take", 100) == "100"
    assert one("free") == "freed"
    held = broker.ledger.held[1]
    one.signal(signal.SIGSTOP)
    until(lambda: one.state() == "T", "it has stopped")
    most = BLOCKS_A_PAGE * (PAGES - held - OWN) + 8
    assert two("take", most + 40, most) == str(most)
    assert broker.ledger.held[1] == held
    assert two("check") == "right"
    one.signal(signal.SIGCONT)
    assert one("check") == "right"
    assert two("take", 40) == "40"


def test_a_broker_that_is_gone_leaves_its_members_what_they_have(broker: Broker, start: Start) -> None:
    one, two = start("one"), start("two")
    assert one("take", 60) == "60"
    broker.close()
    assert one("check") == two("check") == "right"
    assert int(one("take", 400, 0)) < 400
    assert one("free") == "freed"
    assert one("take", 60) == "60"
    assert two("check") == "right"
    assert one("close") == two("close") == "closed"


@pytest.mark.parametrize(
    ("seed", "mode", "weights"),
    [(0, "aliased", False), (1, "strict", False), (2, "aliased", True), (3, "strict", True)],
    ids=["kv", "kv-strict", "weights", "weights-strict"],
)
def test_processes_come_take_free_and_are_killed_at_random(
    broker: Broker,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    mode: str,
    weights: bool,
) -> None:
    """In the midst of what they do. Each block has no byte of another process when it is taken; none is overwritten while it is
    held; no page, descriptor or map is lost."""
    monkeypatch.setenv("REMAP_MODE", mode)
    rng = random.Random(seed + SEED)
    crowd = Crowd(rng, start, {"one": MANY, "two": MANY} if weights else dict.fromkeys(("one", "two", "three"), LAYERS))
    members, files = len(crowd.alive), len(files_of(os.getpid()))
    for _ in range(ROUNDS):
        name = rng.choice(sorted(crowd.alive))
        if rng.random() < 0.8:
            crowd.act(name)
            continue
        crowd.begin_some()
        crowd.kill(name)
        until(lambda: len(broker.ledger.held) == members - 1, "the broker hears of its end")
        crowd.make_room()
        crowd.join(name)
        until(lambda: len(files_of(os.getpid())) == files, lambda: f"{files} descriptors: {files_of(os.getpid())}")
    sys.stdout.write(f"{crowd.killed} kills\n")  # shown with -rP
    crowd.wake()
    for each in crowd.alive.values():
        assert each("check") == "right"
        assert each("close") == "closed"
        assert each("left") == "0 0" or DEVICE != "cpu"
    until(lambda: broker.ledger.free == PAGES, "all has come back")


# -- weights of one process, KV of another -------------------------------------------------------------------------------

MANY = 12
LENT = LAYER_PAGES * (MANY - 3)  # at most: the ring's two layers stay, and one more


def lent(broker: Broker) -> dict[int, int]:
    """Member -> how many pages of its layers others may have."""
    return dict(Counter(broker.ledger.lent.values()))


def home(broker: Broker, donor: Process, rounds: int = 200) -> bool:
    """Whether all layers of the donor come home while it serves."""
    for _ in range(rounds):
        assert donor("check") == "right"
        donor("step")
        if donor("gone") == "0 0":
            return True
        time.sleep(0.005)
    return False


def has_its_own(donor: Process) -> bool:
    """Whether nobody has pages of its layers, as it serves. What streams then is KV of its own."""
    assert donor("check") == "right"
    return donor("gone").startswith("0 ")


def test_weights_of_a_process_that_serves_nothing_are_the_kv_of_another_and_come_home(
    broker: Broker, start: Start
) -> None:
    one, two = start("one", MANY), start("two", MANY)
    for donor, taker in ((one, two), (two, one)):
        assert donor("check") == taker("check") == "right"
        assert donor("sleep") == "asleep"
        assert int(taker("take", 100, 50)) > 50
        if donor is one:  # of the second some may be KV of its own since the first round
            assert sum(lent(broker).values()) >= LENT // 2
        assert taker("check") == "right"
        assert taker("free") == "freed"
        assert donor("wake").startswith("True ")
        until(partial(has_its_own, donor), "nobody has its layers any more")
        assert donor("check") == taker("check") == "right"
    assert lent(broker) == {}
    assert one("close") == two("close") == "closed"
    until(lambda: broker.ledger.free == PAGES, "all has come back")


def test_layers_that_cannot_come_home_stream_until_they_can(broker: Broker, start: Start) -> None:
    one, two = start("one", MANY), start("two")
    assert one("check") == "right"
    assert one("sleep") == "asleep"
    assert int(two("take", 400, 200)) > 200
    away = lent(broker)[1]
    activated, restored, streamed = one("wake").split()
    assert (activated, restored) == ("True", "0")
    assert int(streamed) > 1
    for _ in range(3):
        assert one("check") == two("check") == "right"
    assert lent(broker) == {1: away}
    assert two("thin") == "thinned"
    while not (moved := int(two("step"))):  # the broker asks it again
        assert one("check") == "right"
    assert moved
    assert home(broker, one)
    assert two("check") == "right"


def test_an_idle_process_lends_without_being_told_and_its_next_pass_calls_its_layers(
    broker: Broker, start: Start
) -> None:
    one, two = start("one", MANY), start("two")
    assert one("check") == "right"
    assert one("idle") == "idle"
    assert int(two("take", 400, 200)) > 200
    assert lent(broker)[1] > LENT // 2
    assert two("free") == "freed"
    for _ in range(200):  # passes alone, no step
        assert one("check") == "right"
        if one("gone") == "0 0":
            break
    assert lent(broker) == {}
    assert one("gone") == "0 0"
    assert two("check") == "right"


@pytest.mark.parametrize("who", ["donor", "holder"])
def test_who_is_killed_while_weights_are_lent_loses_nothing_of_the_other(
    broker: Broker, start: Start, who: str
) -> None:
    one, two = start("one", MANY), start("two")
    assert one("check") == "right"
    assert one("sleep") == "asleep"
    assert int(two("take", 400, 200)) > 200
    assert lent(broker)
    if who == "donor":
        one.kill()
        until(lambda: list(broker.ledger.held) == [2] and not lent(broker), "the broker hears of its end")
        assert two("check") == "right"
        assert int(two("take", 400, 20)) > 20
        assert two("check") == "right"
        assert two("close") == "closed"
    else:
        assert one("wake").startswith("True 0")
        two.signal(signal.SIGSTOP)
        until(lambda: two.state() == "T", "it has stopped")
        assert one("check") == "right"
        two.kill()
        until(lambda: list(broker.ledger.held) == [1], "the broker hears of its end")
        assert home(broker, one)
        assert one("close") == "closed"
    until(lambda: broker.ledger.free == PAGES, "all has come back")


def test_a_new_model_gets_no_pages_that_somebody_may_call(broker: Broker, start: Start) -> None:
    one = start("one", MANY)
    assert one("check") == "right"
    assert one("sleep") == "asleep"
    with opened(broker) as two:
        tenant = attached(two, "two")
        while not lent(broker) or not two.snapshot().pages.free + tenant.kv.usable_blocks // BLOCKS_A_PAGE > PAGES // 2:
            two.step({"two": remap.Demand(2000)})
        blocks = tenant.kv.allocate(tenant.kv.free_blocks)
        tenant.kv.free(blocks)
        with pytest.raises(OutOfMemory):
            while True:
                attached(two, f"more {len(two.snapshot().tenants)}")
        remap.advanced.check(two)
        params = {page for page, owner in enumerate(two._arena.owners()) if owner.name == "params"}
        assert params.isdisjoint(broker.ledger.lent)
    assert one("wake").startswith("True ")
    assert home(broker, one)


def test_a_new_model_is_given_pages_that_it_may_keep_though_the_giver_has_borrowed_others(broker: Broker) -> None:
    """It was given the last free ones, and all were another's layers: the attachment failed beside 66 pages to spare."""
    with opened(broker) as one, opened(broker) as two, opened(broker) as three:
        first = join(str(broker.path))
        first.serve(Deaf())
        low = all_of(first, PAGES - 30)
        donor(one)  # so that its layers are the last pages
        first.give(low)
        attached(two, "two")
        until(
            lambda: two.step({"two": remap.Demand(2000)}) is not None and len(broker.ledger.lent) >= LENT // 2, "lent"
        )
        until(lambda: two.step({"two": remap.Demand(2000)}) is not None and broker.ledger.free == 0, "taken")
        for _ in range(200):  # its controller forgets the burst
            two.step({"two": remap.Demand(0)})
        lent = broker.ledger.lent
        attached(three, "three")
        assert broker.ledger.held[3] == OWN and broker.ledger.lent == lent
        first.close()


def donor(session: remap.Session) -> remap.Tenant:
    """A tenant that serves nothing and has weights to lend."""
    masters = [np.full(LAYER_PAGES * PAGE, layer, dtype=np.uint8) for layer in range(MANY)]
    tenant = session.attach_bytes(masters, name="one", kv=make_spec(MANY, min_blocks=8, max_blocks=4000))
    with tenant.forward():
        for layer in range(MANY):
            tenant.wait(layer)
            tenant.done(layer)
    session.deactivate("one")
    return tenant


def test_a_step_looks_for_layers_anew_only_when_pages_have_changed_hands(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose layers another process keeps takes thousands of steps: with 1,000 pages away each took 0.4 ms."""
    looks: Counter[str] = Counter()

    def counted(name: str) -> None:
        plain = getattr(Lending, name)

        def call(*given: Any) -> Any:
            looks[name] += 1
            return plain(*given)

        monkeypatch.setattr(Lending, name, call)

    with opened(broker) as one, opened(broker) as two:
        donor(one)
        taker = attached(two, "two")
        until(
            lambda: two.step({"two": remap.Demand(2000)}) is not None and len(broker.ledger.lent) >= LENT // 2, "lent"
        )
        until(lambda: two.step({"two": remap.Demand(2000)}) is not None and two.snapshot().pages.free == 0, "taken")
        for _ in range(20):  # what comes late too: else live blocks could move there, and all layers come home
            two.step({"two": remap.Demand(2000)})
            taker.kv.allocate(taker.kv.free_blocks)
            time.sleep(0.01)
        one.activate("one")
        until(lambda: one.step({"one": remap.Demand(0)}) is not None and not one._changes.moved, "settled")
        for name in ("gone", "losses"):
            counted(name)

        def in_quiet() -> bool:
            """Fifty steps, in which no page changed hands: the taker's thread may be late with some."""
            looks.clear()
            epoch = one._changes.key
            for _ in range(50):
                one.step({"one": remap.Demand(0)})
            return one._changes.key == epoch

        until(in_quiet, "all pages stay where they are")
        assert one.snapshot().tenants["one"].streamed
        assert looks["gone"] <= 1 and looks["losses"] <= MANY, looks


def test_layers_come_home_gently_only_out_of_what_nobody_uses(broker: Broker) -> None:
    with opened(broker) as one, opened(broker) as two:
        state, taker = internals(donor(one))._state, attached(two, "two")
        outside: Any = one._other_processes

        def fetch() -> None:
            state.called_s = 0.0
            outside.await_home(one.exclusively(lambda core: outside.fetch(state, gently=True)))

        until(
            lambda: two.step({"two": remap.Demand(2000)}) is not None and len(broker.ledger.lent) >= LENT // 2, "lent"
        )
        until(lambda: two.step({"two": remap.Demand(2000)}) is not None and two.snapshot().pages.free == 0, "taken")
        live, away = taker.kv.allocate(taker.kv.free_blocks), len(broker.ledger.lent)
        fetch()
        assert len(broker.ledger.lent) == away
        taker.kv.free(live)
        for _ in range(200):  # its controller forgets the burst
            two.step({"two": remap.Demand(0)})
        # Again and again: until it has run no pass for a second, some of its blocks may be wanted soon.
        until(lambda: fetch() is None and not state.streamed, "all are home")
        assert broker.ledger.lent == {}
        assert not one.snapshot().tenants["one"].active
        for each in (one, two):
            remap.advanced.check(each)


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_an_interrupt_while_pages_go_out_loses_none(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    with opened(broker) as session:
        donor(session)
        outside: Any = session._other_processes
        pass_on = outside._changes.pass_on

        def interrupted(*arguments: Any, **more: Any) -> None:
            if behind:
                pass_on(*arguments, **more)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(outside._changes, "pass_on", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.exclusively(lambda core: outside.give_up(8, layers=True))
        until(lambda: PAGES - session.snapshot().pages.outside == broker.ledger.held[1], "both agree")
        remap.advanced.check(session)
        assert session.activate("one").activated
        until(lambda: not broker.ledger.lent, "all are home")
        remap.advanced.check(session)


def test_a_model_that_leaves_calls_nothing_any_more(broker: Broker, start: Start) -> None:
    with opened(broker) as session:
        tenant = donor(session)
        two = start("two")
        assert int(two("take", 400, 200)) > 200
        arena, state = session._arena, internals(tenant)._state
        assert state.gone
        remap.advanced.check(session)
        session.activate("one")
        session._changes.await_worker()
        remap.advanced.check(session)
        shown = {page for region in state.pages.layer_regions for page in arena.shown(region)}
        assert shown.isdisjoint(page for page, owner in enumerate(arena.owners()) if owner.name == "outside")
        session.detach("one")
        until(lambda: not lent(broker), "it has said so")
        assert two("check") == "right"


# -- in one process ------------------------------------------------------------------------------------------------------


def test_growth_within_what_a_member_has_asks_nobody(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(broker) as session:
        tenant = attached(session, "one")
        session.step({"one": remap.Demand(100)})
        assert tenant.kv.free_blocks >= 100
        asked: list[int] = []
        monkeypatch.setattr(session._other_processes._membership, "want", lambda pages: asked.append(pages) or [])  # type: ignore[union-attr]
        for wanted in (0, 8, 100):
            session.step({"one": remap.Demand(wanted)})
        assert not asked
        session.step({"one": remap.Demand(5000)})
        assert asked


def test_a_broker_that_hangs_takes_little_of_the_steps_time(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(broker) as session:
        attached(session, "one")
        outside: Any = session._other_processes
        now, asked = [100.0], []

        def slow(pages: int) -> list[int]:
            asked.append(now[0])
            now[0] += 0.05
            return []

        monkeypatch.setattr("remap.memory.other_processes.time.monotonic", lambda: now[0])
        monkeypatch.setattr(outside._membership, "want", slow)
        while now[0] < 110.0:
            session.step({"one": remap.Demand(500)})
            now[0] += 0.01
        assert 0.05 * len(asked) <= 0.06 * 10.0
        assert len(asked) > 5


def test_a_session_that_cannot_be_opened_has_left(broker: Broker) -> None:
    if DEVICE == "cpu":
        with pytest.raises(InvalidArgument, match="host_budget is for device 'cuda'"):
            remap.Session(device=f"unix:{broker.path}", host_budget="1GiB")
    else:
        with pytest.raises(InvalidArgument, match="more than 0"):
            remap.Session(device=f"unix:{broker.path}", host_budget=0)
    with pytest.raises(OutOfMemory):
        remap.Session(device=f"unix:{broker.path}", host_kv=1 << 60)
    until(lambda: broker.ledger.held == {}, "both have left")


def test_attach_gets_its_pages_from_others_that_can_spare_them(broker: Broker) -> None:
    with opened(broker) as one, opened(broker) as two:
        tenant = attached(one, "one")
        one.step({"one": remap.Demand(5000)})
        assert broker.ledger.free == 0
        assert tenant.kv.usable_blocks == BLOCKS_A_PAGE * (PAGES - OWN) + 8
        for _ in range(200):  # its controller forgets the burst
            one.step({"one": remap.Demand(0)})
        attached(two, "two")
        assert broker.ledger.held[2] >= OWN
        live = tenant.kv.allocate(tenant.kv.free_blocks)
        with pytest.raises(OutOfMemory, match="nothing was attached") as refused:
            attached(two, "more")
        assert refused.value.requested == OWN
        tenant.kv.free(live)
        remap.advanced.check(one)
        remap.advanced.check(two)


def test_a_session_that_is_closed_or_dropped_has_left(broker: Broker) -> None:
    session = opened(broker)
    attached(session, "one")
    assert broker.ledger.held == {1: OWN}
    session.close()
    session.close()
    until(lambda: broker.ledger.held == {}, "it has left")
    session = opened(broker)
    del session
    until(lambda: broker.ledger.held == {}, "the second one has left")


class Interrupted:
    """A queue whose reader is interrupted once it has taken something out, and before it has done anything with that."""

    def __init__(self, queue: Any) -> None:
        self.queue, self.done = queue, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)

    def get(self, **how: Any) -> Any:
        got = self.queue.get(**how)
        if got is not None and got.runs and not self.done:
            self.done = True
            raise KeyboardInterrupt
        return got


@pytest.mark.parametrize("where", ["taking", "asking", "returning", "before", "after"])
def test_an_interrupt_loses_no_page(broker: Broker, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """When the answer has been taken from its queue, and is nowhere yet; while it is awaited; when it has been returned; before
    the granted pages have come in; behind that."""
    with opened(broker) as session:
        attached(session, "one")
        outside: Any = session._other_processes
        changes, membership = outside._changes, outside._membership
        hear, pass_on, want = membership._hear, changes.pass_on, membership.want

        def interrupted(*arguments: Any, **more: Any) -> None:
            if where == "asking":
                hear(*arguments, **more)
            if where == "returning":
                assert want(*arguments)
            if where == "after":
                pass_on(*arguments, **more)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if where == "taking":
                patch.setattr(membership, "_answers", Interrupted(membership._answers))
            else:
                places = {"asking": (membership, "_hear"), "returning": (membership, "want")}
                patch.setattr(*places.get(where, (changes, "pass_on")), interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.step({"one": remap.Demand(100)})

        def all_are_somewhere() -> bool:
            pages = session.snapshot().pages
            return pages.total - pages.outside == broker.ledger.held[1] == PAGES - broker.ledger.free

        until(all_are_somewhere, "both agree")
        assert session.step({"one": remap.Demand(100)}).unmet_blocks.get("one", 0) == 0
        remap.advanced.check(session)
    until(lambda: broker.ledger.free == PAGES, "all has come back")


def test_what_is_the_brokers_is_not_the_callers(broker: Broker) -> None:
    path = f"unix:{broker.path}"
    more: list[dict[str, Any]] = [{"capacity": "1GiB"}, {"page_bytes": 4096}]
    for each in more:
        with pytest.raises(InvalidArgument, match="the broker's"):
            remap.Session(device=path, **each)
    with opened(broker) as session:
        assert session.capacity_bytes == PAGES * PAGE
        assert session.device == DEVICE
        pages = session.snapshot().pages
        assert (pages.outside, pages.total) == (PAGES, PAGES)
    with pytest.raises(InvalidArgument, match="capacity"):
        remap.Session(device="cpu")


def test_the_environment_names_a_broker_too(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAP_DEVICE", f"unix:{broker.path}")
    with remap.Session() as session:
        assert session.capacity_bytes == PAGES * PAGE


def test_no_broker_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="remap serve --socket"):
        remap.Session(device=f"unix:{tmp_path / 'none'}")


# -- who speaks otherwise ------------------------------------------------------------------------------------------------


class Raw(socket.socket):
    """What is sent as `JOIN` has the number that it has locked."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.locked = lock_member(broker.path)
        self.connect(str(broker.path))
        self.settimeout(30)

    def send(self, packet: Any, *flags: Any) -> int:
        return super().send(encode(Join(VERSION, number=self.locked.number)) if packet == JOIN else packet, *flags)


JOIN = encode(Join(VERSION))
DEEP = b"\x82\xa4type\xa4Join\xa1x" + b"\x91" * 60_000 + b"\xc0"
DEEP_GRANT = DEEP.replace(b"\xa4Join", b"\xa5Grant")
raw = Raw


def refusal(connection: socket.socket) -> str:
    """Why the broker closes this connection."""
    while packet := connection.recv(1 << 16):
        message = decode_to_member(packet)
        if isinstance(message, Refused):
            assert connection.recv(1) == b""
            return message.why
    raise AssertionError("it was closed without a word")


@pytest.mark.parametrize(
    ("packets", "why"),
    [
        ([b"\xc1garbage"], "no message"),
        ([DEEP], "no message"),
        ([encode(Want(1, 1))], "first message must be Join"),
        ([encode(Join(99))], f"version {VERSION}"),
        ([encode(Join(VERSION))[:-1]], "no message"),
        ([encode(Join(VERSION, number=1 << 30))], "not locked its number"),
        ([JOIN, JOIN], "joined already"),
        ([JOIN, encode(Give(((0, 1),)))], "not its own"),
        ([JOIN, encode(Give(((PAGES, 1),)))], "beyond the last"),
        ([JOIN, encode(Give(((0, 10**15),)))], "beyond the last"),
        ([JOIN, encode(Give(((0, PAGES),) * 4000))], "more than there are"),
        ([JOIN, encode(Home(1, ())), encode(Home(1, ()))], "expected above 1"),
        ([JOIN, encode(Want(2, 0)), encode(Want(2, 0))], "number above 2"),
        ([JOIN, encode(Want(1, PAGES + 1))], "expected 0 to"),
        ([JOIN, encode(Claim(((0, 1),)))], "behind a Join"),
        ([JOIN, encode(Pages(0, 1))], "was not asked"),
    ],
    ids=[
        "garbage",
        "deep",
        "no join",
        "version",
        "cut",
        "no lock",
        "two joins",
        "not its own",
        "beyond",
        "huge",
        "again",
        "called again",
        "replayed",
        "too many",
        "claims",
        "brings",
    ],
)
def test_who_breaks_the_protocol_is_told_why_and_harms_nobody(broker: Broker, packets: list[bytes], why: str) -> None:
    with opened(broker) as session:
        tenant = attached(session, "good")
        with raw(broker) as bad:
            for packet in packets:
                bad.send(packet)
            assert why in refusal(bad)
        step = partial(
            session.step, {"good": remap.Demand(50)}
        )  # a busy machine's broker may answer it behind its patience
        until(lambda: step() is not None and tenant.kv.free_blocks >= 50, "it grows")
        remap.advanced.check(session)


@pytest.mark.parametrize(
    "packet",
    [DEEP_GRANT, encode(Grant(1, ((0, 1),)))[:-1], encode(Grant(1, ((PAGES, 1),))), encode(Grant(1, ((0, 10**15),)))],
    ids=["deep", "cut", "beyond", "huge"],
)
def test_a_member_that_cannot_read_its_broker_serves_on_and_joins_again(
    broker: Broker, packet: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reading thread ended, and it never heard of a broker again; pages that there are not were listed one by one."""
    with opened(broker) as session, opened(broker) as other:
        tenant = attached(session, "one")
        with monkeypatch.context() as patch:
            patch.setattr(server, "encode", lambda message: packet if isinstance(message, Grant) else encode(message))
            session.step({"one": remap.Demand(50)})
            membership: Any = session._other_processes._membership  # type: ignore[union-attr]
            until(lambda: bool(membership._joins > 1 or membership.problem), "it has seen that")
        until(lambda: not membership.problem, "it has joined again")
        until(lambda: session.step({"one": remap.Demand(50)}) is not None and tenant.kv.free_blocks >= 50, "it grows")
        remap.advanced.check(session)
        assert other._other_processes._membership._joins == 1, "another's connection was closed"  # type: ignore[union-attr]


@pytest.mark.host  # a device's pages are descriptors, while a member fetches them
@pytest.mark.parametrize("room", [4, 5], ids=["none", "one"])
def test_a_broker_without_descriptors_tells_who_connects(tmp_path: Path, room: int) -> None:
    """It was called for the same connection without end, and who connected heard that there is no broker."""
    serving = Serving(tmp_path / "s", PAGES, PAGE, DEVICE)
    one, pid = Process(str(tmp_path / "s"), "one"), serving.process.pid
    try:
        last = max(map(int, os.listdir(f"/proc/{pid}/fd")))
        limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (last + 1 + room, limit))  # each connection takes two
        with ExitStack() as stack:
            for _ in range(2):
                silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                silent.connect(str(tmp_path / "s"))
            for _ in range(3):
                with pytest.raises(InvalidState, match="can admit nobody"):
                    join(str(tmp_path / "s"))
            assert one("take", 20) == "20"

        def joins() -> bool:
            with suppress(InvalidState):
                join(str(tmp_path / "s")).close()
                return True
            return False

        until(joins, "others have left")
    finally:
        one.kill()
        serving.kill()


def test_who_cannot_be_admitted_at_all_is_left_to_wait(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even the descriptor that is kept for it is to be had."""
    calls: list[int] = []
    listener = broker._listener
    listening = listener._socket

    class Starved:
        fileno = listening.fileno

        def accept(self) -> None:
            calls.append(1)
            raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr("remap.broker.listening.PAUSE_S", 1e5)
    with opened(broker) as session, monkeypatch.context() as patch:
        attached(session, "one")
        patch.setattr(listener, "_socket", Starved())
        with raw(broker) as waiting:
            until(lambda: listener.again is not None, "it pauses")
            session.step({"one": remap.Demand(50)})
            assert len(calls) == 2 and listening not in broker._selector.get_map()
            patch.undo()
            listener.again = 0.0
            session.step({"one": remap.Demand(100)})
            waiting.send(JOIN)
            assert waiting.recv(1)
    (said,) = [record.message for record in caplog.records if "admit nobody" in record.message]
    assert "ulimit" in said and str(broker.path) in said


def test_who_connects_and_says_nothing_is_let_go(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with Observer(str(broker.path)) as observer, opened(broker) as session:
        attached(session, "one")
        observer.look()
        monkeypatch.setattr(server, "SILENT_S", 0.01)
        with raw(broker) as silent:
            assert "neither joined nor looked" in refusal(silent)
        assert [shown.connected for shown in observer.look().members] == [True]


def test_many_bad_connections_leave_nothing(broker: Broker) -> None:
    """They are another process's: what it has got, and never gives back, comes back when it ends."""
    command = [sys.executable, broker_garbage.__file__, str(broker.path), "1", str(PACKETS)]
    with opened(broker) as session:
        attached(session, "good")
        before = len(os.listdir("/proc/self/fd"))
        sent = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        assert int(sent) >= PACKETS
        until(lambda: broker.ledger.held == {1: OWN}, "all have gone")
        until(lambda: len(os.listdir("/proc/self/fd")) <= before, "no descriptor is left")
        assert session.step({"good": remap.Demand(50)}).added_blocks["good"] > 0
        remap.advanced.check(session)


def all_of(member: Membership, pages: int) -> list[int]:
    """What others give, as an activation asks for it."""
    assert member.ask(pages)
    got = member.await_answer()
    member.end_asking()
    return got


class Deaf:
    """A session that does nothing of what it is asked."""

    def granted(self, pages: Any) -> None:
        raise AssertionError(f"pages {pages} came behind the call that wanted them")

    returned = granted

    def recheck(self) -> None:
        raise AssertionError("nothing was interrupted")

    def recalled(self, pages: int, layers: bool, keeps: bool, ahead: bool) -> None:
        return None

    def unused(self) -> None:
        return None

    def prepare(self) -> bool:
        return False

    def named(self, pages: Any, gently: bool) -> None:
        return None

    def snapshot(self) -> Any:
        raise InvalidState("it says nothing")


def test_a_want_is_met_from_what_is_free_and_an_answer_to_no_recall_changes_nothing(broker: Broker) -> None:
    member, other = join(str(broker.path)), join(str(broker.path))
    for each in (member, other):
        each.serve(Deaf())
    other._send(Done(7))
    assert member.want(3) == [0, 1, 2]
    assert all_of(other, PAGES) == list(range(3, PAGES))
    assert all_of(member, 5) == []  # asked for, not given
    member.give([0, 1, 2])
    until(lambda: broker.ledger.free == 3, "they are back")
    member.close()
    other.close()
    assert other.want(1) == []
    assert "left" in other.problem


class Stuck(Deaf):
    """One that answers nothing until it is let go."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.go = threading.Event()

    def recalled(self, pages: int, layers: bool, keeps: bool, ahead: bool) -> None:
        self.asked.append(pages)
        assert self.go.wait(120)

    def stop(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is the broker."""
        wanted = broker.ledger.wanted

        def late(*arguments: Any, **more: Any) -> Any:
            self.recalled(1, False, False, False)
            return wanted(*arguments, **more)

        monkeypatch.setattr(broker.ledger, "wanted", late)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.go.set()


def asleep(session: remap.Session) -> None:
    masters = [np.full(LAYER_PAGES * PAGE, layer, dtype=np.uint8) for layer in range(LAYERS)]
    kv = make_spec(LAYERS, min_blocks=8, max_blocks=4000)
    session.attach_bytes(masters, name="cold", kv=kv, active=False, pages="none")


@pytest.mark.parametrize("call", ["activate", "attach"])
@pytest.mark.parametrize("who", ["broker", "member"])
def test_other_tenants_go_on_while_a_call_waits_for_who_hangs(
    broker: Broker, stuck: Stuck, monkeypatch: pytest.MonkeyPatch, call: str, who: str
) -> None:
    """Their passes and steps stood still, a second for each member that was stopped, ten for a stopped broker."""
    for name in ("member.PATIENT_S", "member.HEAR_S", "server.RECALL_S"):
        monkeypatch.setattr(f"remap.broker.{name}", 60.0)
    other = join(str(broker.path))
    other.serve(stuck)
    with opened(broker) as session:
        tenant = attached(session, "one")
        asleep(session)
        all_of(other, broker.ledger.free)
        if who == "broker":
            stuck.stop(broker, monkeypatch)
        errors: list[str] = []

        def waits() -> None:
            try:
                session.activate("cold") if call == "activate" else attached(session, "two")
            except OutOfMemory as error:
                errors.append(str(error))

        waiter = threading.Thread(target=waits)
        waiter.start()
        until(lambda: bool(stuck.asked), "it is waited for")
        for _ in range(3):
            with tenant.forward():
                for layer in range(LAYERS):
                    tenant.wait(layer)
                    tenant.done(layer)
            tenant.kv.free(tenant.kv.allocate(2))
            assert session.step({"one": remap.Demand(5000)}).unmet_blocks["one"]
            assert set(session.tenants) == {"one", "cold"}
        assert waiter.is_alive()
        stuck.go.set()
        waiter.join(60)
        assert len(errors) == 1
        remap.advanced.check(session)
    other.close()


def test_a_member_that_does_not_answer_is_waited_for_once(
    broker: Broker, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each activation waited for it again."""
    monkeypatch.setattr(server, "RECALL_S", 0.01)
    other = join(str(broker.path))
    other.serve(stuck)
    with opened(broker) as session:
        asleep(session)
        got = all_of(other, broker.ledger.free)
        made = []
        for _ in range(3):
            with pytest.raises(OutOfMemory):
                session.activate("cold")
            made.append(broker.ledger._recalls)
        assert made[0] == made[2]
        stuck.go.set()

        def asked_again() -> bool:
            with pytest.raises(OutOfMemory):
                session.activate("cold")
            return len(stuck.asked) > 1

        until(asked_again, "it has answered")
        other.give(got)
        until(lambda: broker.ledger.free >= OWN, "it has given all")
        assert session.activate("cold").activated
    other.close()


def test_a_broker_that_does_not_answer_is_not_waited_for_until_it_does(
    broker: Broker, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call waited for it anew, and said nothing of it."""
    with opened(broker) as session:
        tenant = attached(session, "one")
        asleep(session)
        membership: Any = session._other_processes._membership  # type: ignore[union-attr]
        with monkeypatch.context() as patch:
            stuck.stop(broker, patch)
            patch.setattr("remap.broker.member.HEAR_S", 0.01)
            with pytest.raises(OutOfMemory, match=f"the broker at {broker.path} does not answer"):
                session.activate("cold")
            patch.setattr(membership, "_hear", None)
            with pytest.raises(OutOfMemory, match="does not answer"):
                session.activate("cold")
            assert "does not answer" in session.step({"one": remap.Demand(5000)}).reason["one"]
            stuck.go.set()
            until(lambda: not membership.silence, "it has answered")
        assert session.activate("cold").activated and tenant.active
        remap.advanced.check(session)


def test_a_session_closes_beside_a_broker_that_hangs_and_leaves_it_all_pages(
    broker: Broker, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for ten seconds. What is granted behind that is nobody's while its process lives, unless the broker sees that it
    has let go of its number."""
    monkeypatch.setattr("remap.broker.member.PATIENT_S", 120.0)
    session = opened(broker)
    attached(session, "one")
    stuck.stop(broker, monkeypatch)
    session.step({"one": remap.Demand(100)})
    assert stuck.asked
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    stuck.go.set()
    until(lambda: broker.ledger.held == {} and broker.ledger.free == PAGES, "it has all pages")


def test_only_its_user_may_connect_and_one_broker_serves_a_path(broker: Broker, tmp_path: Path) -> None:
    assert stat.S_IMODE(broker.path.stat().st_mode) == 0o600
    with pytest.raises(InvalidState, match="already"):
        Broker(broker.path, PAGES * PAGE, PAGE)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InvalidArgument, match="no socket"):
        Broker(file, PAGES * PAGE, PAGE)
    assert file.read_text() == "mine"
    with pytest.raises(InvalidArgument, match="listen"):
        Broker(tmp_path / "none" / "s", PAGES * PAGE, PAGE)
    for capacity, page in ((PAGE - 1, PAGE), (PAGE, 0), (PAGE, 1000), (-PAGE, PAGE)):
        with pytest.raises(InvalidArgument, match=r"at least one page|multiple of 4096"):
            Broker(tmp_path / "t", capacity, page, DEVICE)
    with pytest.raises(OutOfMemory):
        Broker(tmp_path / "t", 1 << 60, 1 << 50, DEVICE)
    for device in ("sim:GH200", "tpu", "cuda:77"):
        with pytest.raises((InvalidArgument, DriverError)):
            Broker(tmp_path / "t", PAGES * PAGE, PAGE, device)
    assert not (tmp_path / "t").exists()


def test_a_forked_child_that_ends_leaves_its_parent_joined(broker: Broker) -> None:
    with opened(broker) as session:
        tenant = attached(session, "one")
        child = os.fork()
        if child == 0:
            session._leave()  # as `atexit` calls it
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        session.step({"one": remap.Demand(60)})
        assert tenant.kv.usable_blocks >= 60


def test_pages_of_the_host_come_with_the_welcome_and_are_not_fetched(tmp_path: Path) -> None:
    with Broker(tmp_path / "h", PAGES * PAGE, PAGE) as broker, raw(broker) as other:
        other.send(JOIN)
        _, files, _, _ = socket.recv_fds(other, 1 << 16, 1)
        os.close(files[0])
        other.send(encode(Fetch(0)))
        told = decode_to_member(other.recv(1 << 16))
        assert isinstance(told, Refused) and "one file" in told.why


@pytest.mark.skipif(
    DEVICE == "cpu", reason="pages of a device: this file runs again on the emulated driver (make test-all)"
)
def test_a_device_has_more_pages_than_go_into_a_message(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    many = 2 * MOST_FILES + 7
    with Broker(tmp_path / "d", many * PAGE, PAGE, DEVICE) as broker, opened(broker) as one, opened(broker) as two:
        assert one.device == two.device == DEVICE
        first, second = attached(one, "one"), attached(two, "two")
        one.step({"one": remap.Demand(4 * (many - 2 * OWN))})
        last = first.kv.allocate(first.kv.free_blocks)[-1]
        write_block(first, last, 7)
        assert broker.ledger.free < 4 and read_block(first, last) == {7}
        remap.advanced.check(one)
        with raw(broker) as other:
            other.send(JOIN)
            other.recv(1 << 16)
            other.send(encode(Fetch(many)))
            told = decode_to_member(other.recv(1 << 16))
            assert isinstance(told, Refused) and f"no page {many}" in told.why
        assert second.kv.usable_blocks >= 8
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 8, "no descriptor is left")


@pytest.mark.skipif(
    DEVICE == "cpu", reason="pages of a device: this file runs again on the emulated driver (make test-all)"
)
def test_a_member_that_does_not_see_the_device_is_told_which_it_is(broker: Broker, monkeypatch: Any) -> None:
    seen = broker._pages.uuid
    monkeypatch.setattr(broker._pages, "uuid", "ab" * 16)
    with pytest.raises(InvalidState, match="CUDA_VISIBLE_DEVICES") as error:
        join(str(broker.path))
    assert error.value.fields["devices"] == seen and len(seen) == 32 and error.value.fields["uuid"] == "ab" * 16
    until(lambda: broker.ledger.held == {}, "it has left")


def test_the_socket_of_a_broker_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    with Broker(path, PAGES * PAGE, PAGE) as made, opened(made) as session:
        assert session.capacity_bytes == PAGES * PAGE
    assert not path.exists()


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    pytest.importorskip("typer", reason="the command line needs typer")
    path = tmp_path / "s"
    code = "from remap.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        "--socket",
        str(path),
        "--capacity",
        "6MiB",
        "--page-bytes",
        "64KiB",
        "--device",
        DEVICE,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            assert f"96 pages of {show_size(1 << 16)} on {DEVICE}; join" in served.stdout.readline()
            with remap.Session(device=f"unix:{path}") as session:
                assert session.snapshot().pages.outside == 96
            served.terminate()
            assert served.wait(60) == 0
        finally:
            served.kill()
    assert not path.exists()


def test_who_is_refused_before_it_has_said_a_word_hears_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed when it sends: that is no broker that is not there."""
    path, refused = tmp_path / "s", threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.send(encode(Refused("it is full")))
            refused.set()

        def late(message: Any) -> bytes:
            assert refused.wait(60)
            return encode(message)

        monkeypatch.setattr("remap.broker.member.encode", late)
        answering = threading.Thread(target=refuse)
        answering.start()
        with pytest.raises(InvalidState, match="it is full") as caught:
            remap.Session(device=f"unix:{path}")
        answering.join()
    assert caught.value.fields["why"] == "it is full"


def test_a_signal_that_does_not_wake_the_waiting_thread_is_heeded_soon(tmp_path: Path) -> None:
    """It came just before the thread slept, and `remap serve` never ended: seen once."""
    done = subprocesses.run(
        f"""
import _thread, signal, sys, threading
from remap.broker.server import Broker
def ends(number, frame):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, ends)
with Broker({str(tmp_path / "s")!r}, 4 << 16, 1 << 16, "cpu") as broker:
    threading.Timer(0.2, _thread.interrupt_main, [signal.SIGTERM]).start()  # noted for the thread, which goes on sleeping
    try:
        broker.wait()
    except KeyboardInterrupt:
        sys.exit(7)
"""
    )
    assert done.returncode == 7, done.stderr
