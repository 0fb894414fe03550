"""A broker is killed, and another one begins at its socket: members serve on, join it with their pages, and lend again."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")
pytest.importorskip("rich", reason="tables need rich")

from broker_crowd import Crowd
from broker_member import LAYER_PAGES, LAYERS, PAGE, Process, attached, opened, until
from broker_place import DEVICE, PAGES, Place
from msgspec.structs import replace

import remap
from remap.broker import server
from remap.broker.locks import lock_member
from remap.broker.member import join
from remap.broker.messages import (
    MOST_BYTES,
    VERSION,
    Bring,
    Claim,
    Give,
    Grant,
    Home,
    Join,
    Pages,
    Recall,
    Refused,
    Returned,
    State,
    ToBroker,
    ToMember,
    Want,
    Welcome,
    decode_to_member,
    encode,
)
from remap.broker.observer import Observer
from remap.broker.server import Broker
from remap.cli.top_broker import tables
from remap.errors import InvalidState, OutOfMemory
from remap.memory.shared_pages import HostPages

BLOCKS_A_PAGE = 4
OWN = LAYERS * LAYER_PAGES + 2
MANY = 12
ROUNDS = int(os.environ.get("REMAP_BROKER_ROUNDS", "25")) // 2
SEED = int(os.environ.get("REMAP_BROKER_SEED", "0"))
Start = Callable[..., Process]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "s")
    yield made
    made.serving.kill()


@pytest.fixture
def start(place: Place) -> Iterator[Start]:
    made: list[Process] = []

    def one(name: str, layers: int = LAYERS, value: int = 0) -> Process:
        made.append(Process(str(place.path), name, layers, value))
        return made[-1]

    yield one
    for each in made:
        if each.process.poll() is None:
            each.kill()


def close(place: Place, *members: Process) -> None:
    """All pages are accounted for."""
    for each in members:
        assert each("check") == "right"
        assert each("close") == "closed"
    until(lambda: place.look().free == PAGES, "all has come back")


class Raw:
    """A member that says what a test says, over one connection or the next. hello: its first Join."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, lock_member(path)
        self.hello = Join(VERSION, "raw", self.lock.number)
        self.connection = socket.socket()
        self.connect()

    def connect(self) -> None:
        self.connection.close()
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(60)
        self.connection.connect(str(self.path))

    def tell(self, message: ToBroker) -> None:
        self.connection.send(encode(message))

    def hear(self) -> ToMember:
        return decode_to_member(self.connection.recv(MOST_BYTES))

    def say(self, message: ToBroker) -> ToMember:
        self.tell(message)
        return self.hear()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        self.lock.close()


def test_members_serve_on_and_join_the_next_broker_with_their_pages(place: Place, start: Start) -> None:
    one, two, dead = start("one"), start("two"), start("three")
    assert (one("take", 100), two("take", 40), dead("take", 40)) == ("100", "40", "40")
    place.kill()
    assert one("check") == two("check") == "right"
    assert str(place.path) in one("problem")
    assert str(place.path) in one("short")
    assert "OutOfMemory" in (said := one("more")) and str(place.path) in said
    dead.kill()
    place.again()
    place.until_all_are_back(one, two)
    assert one("problem") == two("problem") == "none"
    state, held = place.look(), place.members()
    assert state.free == PAGES - sum(held.values()) > 0  # those of the dead one, too
    assert one("check") == two("check") == "right"
    most = BLOCKS_A_PAGE * state.free
    assert two("take", most) == str(most)  # and none had bytes of the dead one
    assert one("free") == "freed"
    assert two("take", 80) == "80"  # asked for, and given by the first
    assert two("free") == "freed"
    three = start("three")
    assert three("check") == "right"
    close(place, one, two, three)


def test_weights_that_are_lent_come_home_by_way_of_the_next_broker(place: Place, start: Start) -> None:
    one, two = start("one", MANY), start("two")
    assert one("check") == "right"
    assert one("sleep") == "asleep"
    assert int(two("take", 400, 200)) > 200
    lent = place.look().lent
    assert lent > 0
    place.kill()
    assert two("check") == "right"
    place.again()
    place.until_all_are_back(one, two)
    assert place.look().lent == lent
    assert one("wake").startswith("True ")
    assert one("check") == two("check") == "right"
    assert two("free") == "freed"

    def home() -> bool:
        assert one("check") == "right"
        one("step")
        return one("gone").startswith("0 ")

    until(home, "its layers are its own again")
    close(place, one, two)


@pytest.mark.slow
def test_a_lender_that_has_ended_meanwhile_lends_nothing(place: Place, start: Start) -> None:
    one, two = start("one", MANY), start("two")
    assert one("check") == "right"
    assert one("sleep") == "asleep"
    assert int(two("take", 400, 200)) > 200
    place.kill()
    one.kill()
    place.again()
    place.until_all_are_back(two)
    assert place.look().lent == 0
    close(place, two)


def test_whoever_is_left_is_waited_for_and_who_is_new_hears_that(place: Place, start: Start) -> None:
    one = start("one")
    assert one("take", 40) == "40"
    one.signal(signal.SIGSTOP)
    until(lambda: one.state() == "T", "it has stopped")
    place.kill()
    place.again()
    with pytest.raises(InvalidState, match="1 processes are awaited"):
        join(str(place.path))
    assert (place.look().unknown, place.look().free) == (PAGES, 0)
    with Observer(str(place.path)) as observer:
        assert "are awaited" in str(tables(observer.look())[0].title)
    one.signal(signal.SIGCONT)
    place.until_all_are_back(one)
    two = start("two")
    close(place, one, two)


def test_when_all_have_ended_the_next_broker_begins_with_new_pages(place: Place, start: Start) -> None:
    one = start("one")
    child = int(one("fork"))  # it has no lock, and no memory of the arena
    place.kill()
    one.signal(signal.SIGSTOP)
    place.again()
    one.kill()
    try:
        until(lambda: place.look().free == PAGES, "nobody is awaited")
    finally:
        os.kill(child, signal.SIGKILL)
    close(place, start("two"))


def test_a_broker_that_is_another_one_is_refused_by_name(place: Place, start: Start) -> None:
    one = start("one")
    assert one("take", 40) == "40"
    second = place.begin()
    assert "InvalidState" in second.said and "already" in second.said and str(place.path) in second.said
    place.serving.process.send_signal(signal.SIGSTOP)
    second = place.begin()  # the first one is stopped, and not gone
    assert "InvalidState" in second.said and "stopped" in second.said
    place.kill()
    other = place.begin(PAGES + 1)
    until(lambda: f"{PAGES + 1} pages" in one("problem"), "it is told that the arena has another size")
    assert one("check") == "right"
    other.kill()
    (lock,) = place.path.parent.glob("*.lock")
    lock.unlink()  # nobody sees any more who is left
    other = place.begin()
    until(lambda: "not locked its number" in one("problem"), "it is told that it cannot be seen")
    with remap.Session(device=f"unix:{place.path}") as session:
        assert session.snapshot().pages.outside == PAGES
    assert one("check") == "right"
    assert one("close") == "closed"
    other.kill()


def test_pages_of_another_arena_are_refused(tmp_path: Path) -> None:
    with Broker(tmp_path / "a", PAGES * PAGE, PAGE, DEVICE) as broker:
        member = join(str(broker.path))
        broker.arena = "another"
        with pytest.raises(InvalidState, match="another"):
            member._try_again()
        member.close()


def test_a_members_number_is_nobody_elses_while_its_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Join with it closed the member's connection, though it was refused then; or its pages were free, which it wrote on."""
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE) as broker, Raw(broker.path) as member, Raw(broker.path) as wrong:
        assert isinstance(member.say(member.hello), Welcome)
        number, again = member.lock.number, replace(member.hello, arena=broker.arena)
        assert isinstance(member.say(Want(1, 5)), Grant)
        for claims in ([], [Claim(((7, 1),))], [Claim(((0, 5),))]):
            wrong.connect()
            wrong.tell(replace(again, claims=len(claims)))
            for claim in claims:
                wrong.tell(claim)
            refused = wrong.hear()
            assert isinstance(refused, Refused) and f"number {number} is that of member 1" in refused.why
        assert member.say(Want(2, 1)) == Grant(2, ((5, 1),)), "it is connected still"
        member.tell(Give(((0, 2),)))
        member.connection.close()
        with monkeypatch.context() as patch:  # another process
            patch.setattr(server, "peer", lambda connection: (os.getppid(), os.getuid()))
            wrong.connect()
            refused = wrong.say(replace(again, claims=0))
        assert isinstance(refused, Refused) and f"this is process {os.getppid()}" in refused.why
        assert broker.ledger.held == {1: 4}, "what was given on the old connection counts, and nothing else"
        member.connect()
        member.tell(replace(again, claims=1))
        assert isinstance(member.say(Claim(((2, 4),))), Welcome)
        assert broker.ledger.held == {1: 4}


def test_a_connection_that_breaks_is_mended_and_what_was_given_meanwhile_is_free(tmp_path: Path) -> None:
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE, DEVICE) as broker, opened(broker) as one, opened(broker) as two:
        tenant = attached(one, "one")
        taken = tenant.kv.allocate(tenant.kv.free_blocks)
        before, outside = broker.ledger.held[1], one._other_processes
        membership: Any = outside and outside._membership
        for _ in range(3):
            joined = membership._joins
            next(each for each in broker._members if each.number == 1).connection.shutdown(2)  # type: ignore[union-attr]
            until(lambda joined=joined: membership._joins > joined and not membership.problem, "joined again")  # type: ignore[misc]
            assert broker.ledger.held == {1: before, 2: 0}
        membership._connection.shutdown(2)
        until(lambda: membership.problem or membership._joins > joined + 1, "it is broken")
        one.step({"one": remap.Demand(20)})
        until(lambda: not membership.problem, "joined again")
        until(lambda: one.snapshot().pages.total - one.snapshot().pages.outside == broker.ledger.held[1], "both agree")
        attached(two, "two")
        tenant.kv.free(taken)
        for each in (one, two):
            remap.advanced.check(each)
    assert list(tmp_path.iterdir()) == []


def test_growth_without_a_broker_is_refused_with_its_socket(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "s", 2 * OWN * PAGE, PAGE, DEVICE)
    with opened(broker) as session:
        attached(session, "one")
        broker.close()
        until(lambda: session._other_processes.problem, "it has heard of that")  # type: ignore[union-attr]
        with pytest.raises(OutOfMemory, match="nothing was attached") as error:
            attached(session, "two")
        assert str(broker.path) in str(error.value.fields["broker"])
        report = session.step({"one": remap.Demand(1000)})
        assert report.unmet_blocks["one"] > 0 and str(broker.path) in report.reason["one"]


@pytest.mark.skipif(DEVICE != "cpu", reason="a file is of the host")
def test_a_file_that_is_no_arena_is_refused_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = Broker(path, PAGES * PAGE, PAGE)
    lock = lock_member(path)
    first.close()
    before = len(os.listdir("/proc/self/fd"))
    hello = Join(VERSION, "old", lock.number, "an arena", PAGE, PAGES)
    with Broker(path, PAGES * PAGE, PAGE) as broker:
        for made in (tmp_path / "file", None):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as old:
                old.connect(str(path))
                old.send(encode(hello))
                assert decode_to_member(old.recv(MOST_BYTES)) == Bring(0)
                if made is not None:
                    made.write_bytes(b"mine")
                    with made.open() as file:
                        socket.send_fds(old, [encode(Pages(0, 1))], [file.fileno()])
                    answer = decode_to_member(old.recv(MOST_BYTES))
                    assert isinstance(answer, Refused) and "a file of 4 bytes" in answer.why
                    assert broker.ledger.unknown == PAGES
                else:
                    pages = HostPages(PAGES, PAGE)
                    socket.send_fds(old, [encode(Pages(0, 3))], [pages.file or 0, 0, 1])  # what is too much is closed
                    assert isinstance(decode_to_member(old.recv(MOST_BYTES)), Welcome)
                    pages.close()
        until(lambda: broker._pages is not None and broker.ledger.free == PAGES, "nobody else is awaited")
    lock.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_borrower_that_dies_before_the_lender_has_joined_again_leaves_it_its_pages(
    place: Place, start: Start
) -> None:
    """They were free for all: the lender's claim was refused, as one of free pages, for as long as it lived."""
    one, two = start("one", MANY), start("two")
    assert one("check") == "right"
    assert one("sleep") == "asleep"
    assert int(two("take", 400, 200)) > 200
    lent = place.look().lent
    one.signal(signal.SIGSTOP)
    until(lambda: one.state() == "T", "it has stopped")
    place.kill()
    place.again()
    until(lambda: str(two.process.pid) in place.members(), "the borrower has joined again")
    two.kill()
    until(lambda: place.look().members == 0, "the broker hears of its end")
    one.signal(signal.SIGCONT)
    place.until_all_are_back(one)
    assert place.look().lent == lent
    assert one("wake").startswith("True ")
    until(lambda: one("check") == "right" and one("gone") == "0 0", "its layers are home")
    close(place, one)


@pytest.mark.skipif(DEVICE != "cpu", reason="a file is of the host")
def test_who_is_gone_before_its_welcome_leaves_others_what_it_did_not_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the ledger had to say to others was lost: pages were theirs, and they never heard of them."""
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE) as broker, Raw(broker.path) as lender, Raw(broker.path) as holder:
        for each in (lender, holder):
            assert isinstance(each.say(each.hello), Welcome)
        assert lender.say(Want(1, 1)) == Grant(1, ((0, 1),))
        lender.tell(Give(((0, 1),), lent=True))
        assert holder.say(Want(1, PAGES)) == Grant(1, ((1, PAGES - 1),), more=True)
        assert holder.hear() == Grant(1, ((0, 1),), lent=True)
        lender.tell(Home(1, ((0, 1),)))
        assert isinstance(holder.hear(), Recall)

        def gone(*arguments: Any) -> None:
            raise InvalidState("it has gone")

        monkeypatch.setattr(broker, "_send_with", gone)
        holder.connect()
        again = Join(VERSION, "raw", holder.lock.number, broker.arena, PAGE, PAGES)
        assert holder.say(again) == Refused("it has gone")
        assert lender.hear() == Returned(1, ())  # the holder's connection had broken
        assert lender.hear() == Returned(1, ((0, 1),))


@pytest.mark.skipif(DEVICE != "cpu", reason="a file is of the host")
def test_what_was_sent_before_a_connection_was_reset_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The side that closes it has not read all: the other one hears of that before it hears what was sent to it."""
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE) as broker, Raw(broker.path) as one:
        one.say(one.hello)
        one.tell(Want(1, 4))
        until(lambda: broker.ledger.held == {1: 4}, "it is granted, and the grant not read")
        ready, closed = broker._ready, threading.Event()
        monkeypatch.setattr(broker, "_ready", lambda *event: closed.wait(60) and ready(*event))
        one.tell(Give(((0, 4),)))
        one.connection.close()
        closed.set()
        until(lambda: broker.ledger.held == {}, "the process lives, and has given all back")
        monkeypatch.undo()

        member = join(str(broker.path))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.send(b"not read")
        theirs.send(encode(Grant(1, ((3, 1),))))
        theirs.close()
        with monkeypatch.context() as patch, ours:
            patch.setattr(member, "_connection", ours)
            assert "has gone" in member._read_to_the_end()
        assert member.held == {3}
        member.held.clear()
        member.close()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_members_and_the_broker_are_killed_and_stopped_at_random(place: Place, start: Start, seed: int) -> None:
    """In the midst of what they do. No block has a byte of another process when it is taken, or is overwritten while it is held;
    no page, descriptor or map is lost, and no lock stays. A longer run has more rounds (`REMAP_BROKER_ROUNDS`), and others are
    told by `REMAP_BROKER_SEED`."""
    rng, killed, stopped = random.Random(seed + SEED), 0, 0
    crowd = Crowd(rng, start, {"one": MANY, "two": MANY, "three": LAYERS})
    place.remember(*crowd.alive.values())
    for _ in range(ROUNDS):
        what = rng.random()
        if what < 0.3:
            crowd.begin_some()
            place.kill()
            killed += 1
            if rng.random() < 0.5:
                crowd.finish()  # they serve on
                crowd.begin_some()
            place.again()
            if rng.random() < 0.5:
                crowd.finish()
            if rng.random() < 0.7:
                crowd.finish()
                place.check_that_nothing_is_lost(*crowd.alive.values())
        elif what < 0.4:
            crowd.begin_some()
            stopped += 1
            if rng.random() < 0.5:
                crowd.stop(rng.choice(sorted(crowd.alive)))
            else:
                place.serving.process.send_signal(signal.SIGSTOP)
                crowd.do_something()
                place.serving.process.send_signal(signal.SIGCONT)
            if rng.random() < 0.5:
                crowd.finish()
                place.check_that_nothing_is_lost(*crowd.alive.values())
        elif what < 0.6:
            crowd.begin_some()
            name = rng.choice(sorted(crowd.alive))
            crowd.kill(name)
            place.until_all_are_back(*crowd.alive.values())
            crowd.make_room()
            until(partial(place.has, *crowd.alive.values()), place.tell)
            crowd.join(name)
            place.remember(crowd.alive[name])
            place.check_that_nothing_is_lost(*crowd.alive.values())
        else:
            crowd.act(rng.choice(sorted(crowd.alive)))
    crowd.finish()
    sys.stdout.write(
        f"{crowd.killed + killed} kills, {killed} of them of the broker; {stopped} stops\n"
    )  # shown with -rP
    members = list(crowd.alive.values())
    place.until_all_are_back(*members)
    crowd.wake()
    place.check_that_nothing_is_lost(*members)
    close(place, *members)
    for each in members:
        assert each("left") == "0 0" or DEVICE != "cpu"
    assert place.left() == set()
    until(lambda: place.look() == State(PAGE, PAGES, PAGES, 0, 0, 0), place.tell)
