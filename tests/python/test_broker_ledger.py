"""The broker's ledger: a page is free or one member's, every want ends, and what the protocol does not allow changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

from hypothesis import given, settings
from hypothesis import strategies as st

from remap.broker.ledger import Ledger, Sent
from remap.broker.messages import (
    MOST_RUNS,
    Done,
    Give,
    Grant,
    Join,
    Recall,
    Refused,
    Want,
    Welcome,
    decode_to_broker,
    decode_to_member,
    encode,
    pages_of,
    runs_of,
)
from remap.errors import InvalidState

PAGES, MEMBERS = 12, (1, 2, 3)


def all_runs(pages: set[int]) -> list[tuple[int, int]]:
    return [run for runs in runs_of(pages) for run in runs]


class World:
    """A ledger and what its members have by what it said to them: an obvious second set of books."""

    def __init__(self) -> None:
        self.ledger = Ledger(PAGES)
        self.pages: dict[int, set[int]] = {}
        self.wants: dict[int, int] = {}  # member -> serial of the want that is not over
        self.serials = dict.fromkeys(MEMBERS, 0)
        self.recalls: list[tuple[int, int, int]] = []  # (member, recall, pages), not answered yet

    def hear(self, sent: Sent) -> None:
        for member, message in sent:
            assert member in self.pages, "a message to a member that is not there"
            if isinstance(message, Grant):
                pages = set(pages_of(message.runs))
                assert not pages & set().union(*self.pages.values()), "a page has two owners"
                self.pages[member] |= pages
                assert message.serial == self.wants[member], "an answer to a want that is over"
                if not message.more:
                    del self.wants[member]
            else:
                assert isinstance(message, Recall)
                assert message.pages > 0
                self.recalls.append((member, message.recall, message.pages))
        self.check()

    def check(self) -> None:
        ledger = self.ledger
        assert ledger.held == {member: len(pages) for member, pages in self.pages.items()}
        assert ledger.free == PAGES - sum(map(len, self.pages.values()))
        assert ledger.waiting == len(self.wants)
        # Nobody waits while pages are free, or while nobody is asked.
        assert not self.wants or (ledger.free == 0 and ledger.recalling is not None)

    def join(self, member: int) -> None:
        if member in self.pages:
            self.refused(self.ledger.joined, member)
            return
        self.pages[member], self.serials[member] = set(), 0
        self.hear(self.ledger.joined(member))

    def want(self, member: int, pages: int) -> None:
        if member not in self.pages:
            self.refused(self.ledger.wanted, member, 1, pages)
            return
        self.serials[member] += 1
        self.wants[member] = self.serials[member]
        sent = self.ledger.wanted(member, self.serials[member], pages)
        assert any(to == member and isinstance(message, Grant) for to, message in sent), "it hears at once what it got"
        self.hear(sent)

    def give(self, member: int, pages: set[int]) -> None:
        if member not in self.pages or not pages <= self.pages[member]:
            self.refused(self.ledger.gave, member, all_runs(pages))
            return
        self.pages[member] -= pages
        self.hear(self.ledger.gave(member, all_runs(pages)))

    def give_half(self, member: int) -> None:
        pages = sorted(self.pages.get(member, ()))
        if pages:
            self.give(member, set(pages[::2]))

    def answer(self, late: bool) -> None:
        if not self.recalls:
            return
        member, recall, _ = self.recalls.pop(0)
        if member in self.pages:
            self.hear(self.ledger.late(recall) if late else self.ledger.done(member, recall))

    def end(self, member: int) -> None:
        self.pages.pop(member, None)
        self.wants.pop(member, None)
        self.hear(self.ledger.ended(member))

    def refused(self, call: Any, *arguments: object) -> None:
        with pytest.raises(InvalidState, match="nothing changed"):
            call(*arguments)
        self.check()


EVENTS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(MEMBERS)),
    st.tuples(st.just("want"), st.sampled_from(MEMBERS), st.integers(0, PAGES)),
    st.tuples(st.just("give"), st.sampled_from(MEMBERS), st.sets(st.integers(0, PAGES - 1), min_size=1, max_size=6)),
    st.tuples(st.just("give_half"), st.sampled_from(MEMBERS)),
    st.tuples(st.just("answer"), st.booleans()),
    st.tuples(st.just("end"), st.sampled_from(MEMBERS)),
)


@settings(max_examples=400)
@given(st.lists(EVENTS, max_size=60))
def test_books_agree_and_every_want_ends(events: list[tuple[Any, ...]]) -> None:
    world = World()
    for kind, *arguments in events:
        getattr(world, kind)(*arguments)
    for _ in range(100):
        world.answer(late=False)
    assert not world.wants


def test_who_wanted_something_longest_ago_is_asked_first_and_what_is_given_goes_on() -> None:
    world = World()
    for member in MEMBERS:
        world.join(member)
        world.want(member, 4)
    world.want(1, 0)
    world.want(3, 2)
    assert world.recalls == [(2, 1, 2)]  # the second wanted something before the first did
    world.give(2, {4})
    assert world.pages[3] == {4, 8, 9, 10, 11}
    world.answer(late=False)
    assert world.recalls == [(1, 2, 1)]
    assert world.wants
    world.answer(late=True)
    assert not world.wants
    assert world.pages[3] == {4, 8, 9, 10, 11}


def test_a_member_that_has_left_keeps_its_pages_and_is_not_asked() -> None:
    world = World()
    for member in (1, 2):
        world.join(member)
    world.want(1, PAGES)
    world.hear(world.ledger.left(1))
    world.want(2, 3)
    assert not world.recalls
    assert not world.wants
    assert world.pages[2] == set()
    world.refused(world.ledger.wanted, 1, 9, 1)
    world.end(1)
    world.want(2, 3)
    assert len(world.pages[2]) == 3


@pytest.mark.parametrize(
    ("serial", "pages"),
    [(0, 1), (-1, 1), (1, -1), (1, PAGES + 1), (1, 10**30)],
    ids=["old", "below", "less", "more", "huge"],
)
def test_a_want_that_cannot_be_is_refused(serial: int, pages: int) -> None:
    world = World()
    world.join(1)
    world.refused(world.ledger.wanted, 1, serial, pages)


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message", [Join(1, "a"), Want(3, 4), Give(((0, 3), (9, 1))), Done(7)], ids=lambda message: type(message).__name__
)
def test_a_message_to_the_broker_comes_as_it_was(message: Any) -> None:
    packet = encode(message)
    assert decode_to_broker(packet) == message
    with pytest.raises(InvalidState):
        decode_to_member(packet)


@pytest.mark.parametrize(
    "message",
    [Welcome(4096, 9), Grant(3, ((1, 2),), more=True), Recall(2, 5), Refused("no")],
    ids=lambda message: type(message).__name__,
)
def test_a_message_to_a_member_comes_as_it_was(message: Any) -> None:
    packet = encode(message)
    assert decode_to_member(packet) == message
    with pytest.raises(InvalidState):
        decode_to_broker(packet)


@settings(max_examples=2000)
@given(st.binary(max_size=200))
def test_garbage_is_refused(packet: bytes) -> None:
    for decode in (decode_to_broker, decode_to_member):
        with pytest.raises(InvalidState, match="nothing changed"):
            decode(packet)


@settings(max_examples=500)
@given(st.sampled_from([Want(3, 4), Give(((0, 3), (9, 1))), Done(7)]), st.integers(0, 60), st.integers(0, 255))
def test_a_message_with_another_byte_is_a_message_or_refused(message: Any, at: int, value: int) -> None:
    packet = bytearray(encode(message))
    packet[at % len(packet)] = value
    ledger = Ledger(PAGES)
    ledger.joined(1)
    try:
        found = decode_to_broker(bytes(packet))
        if isinstance(found, Want):
            ledger.wanted(1, found.serial, found.pages)
        elif isinstance(found, Give):
            ledger.gave(1, found.runs)
    except InvalidState:
        pass
    assert ledger.free + ledger.held[1] == PAGES


@given(st.sets(st.integers(0, 300)))
def test_runs_are_the_pages(pages: set[int]) -> None:
    parts = runs_of(pages)
    assert sorted(page for runs in parts for page in pages_of(runs)) == sorted(pages)
    assert all(0 < len(runs) <= MOST_RUNS for runs in parts)


def test_many_runs_go_in_several_messages() -> None:
    assert list(map(len, runs_of(range(0, 4 * MOST_RUNS, 2)))) == [MOST_RUNS, MOST_RUNS]


@pytest.mark.parametrize("runs", [((-1, 2),), ((0, 0),), ((0, 1),) * (MOST_RUNS + 1)], ids=["before", "none", "many"])
def test_runs_that_cannot_be_are_refused(runs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidState, match="runs"):
        decode_to_broker(encode(Give(runs)))
