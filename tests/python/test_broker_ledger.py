"""The broker's ledger: a page is free or one member's, every want ends, and what the protocol does not allow changes nothing."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

import msgspec
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.broker.ledger import Ledger, Sent
from remap.broker.messages import (
    MOST_RUNS,
    Bring,
    Claim,
    Disown,
    Done,
    Give,
    Grant,
    Home,
    Join,
    Pages,
    Recall,
    Refused,
    Returned,
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
TO_BROKER: list[Any] = [
    Want(3, 4, keeps=True),
    Give(((0, 3), (9, 1)), lent=True),
    Home(2, ((0, 3),)),
    Disown(((0, 3),)),
    Done(7),
    Claim(((0, 3), (9, 1)), lent=True),
    Pages(3, 2),
]
TO_MEMBER: list[Any] = [
    Welcome(4096, 9, arena="a"),
    Bring(3),
    Grant(3, ((1, 2),), more=True),
    Recall(2, 5, runs=((1, 5),)),
    Returned(2, ((7, 1),)),
    Refused("no"),
]


def all_runs(pages: set[int]) -> list[tuple[int, int]]:
    return [run for runs in runs_of(pages) for run in runs]


class World:
    """A ledger and what its members have by what it said to them: an obvious second set of books."""

    def __init__(self, pages: int = PAGES) -> None:
        self.count = pages
        self.ledger = Ledger(pages)
        self.pages: dict[int, set[int]] = {}
        self.lent: dict[int, set[int]] = {}  # member -> what it may call home, and does not have
        self.wants: dict[
            int, tuple[int, bool, bool]
        ] = {}  # member -> serial of the want that is not over, and whether for good, and whether ahead of need
        self.serials = dict.fromkeys(MEMBERS, 0)
        self.calls = dict.fromkeys(MEMBERS, 0)
        self.recalls: list[tuple[int, int, int]] = []  # (member, recall, pages), not answered yet
        self.named: dict[int, set[int]] = {}  # recall -> the pages that it names
        self.open_calls: set[tuple[int, int]] = set()
        self.must: set[int] = set()  # pages that go to their lender when they are free next
        self.wanted: dict[int, list[int]] = {}  # member -> how many it wants, and has got, of the want that is not over
        self.unmet: dict[int, int] = {}  # member that waits for pages for good -> how many, who waits longest first
        self.met: set[int] = set()  # of these, those whose last want was met

    def usable(self, member: int, keeps: bool, ahead: bool) -> int:
        """Free pages that its want may have: not those for members that wait since before it."""
        lent = set().union(*self.lent.values())
        free, unlent = (
            len(set(range(self.count)).difference(*self.pages.values(), without))
            for without in (lent if keeps else (), lent)
        )
        if not (keeps or ahead):
            return free
        waiting = list(self.unmet)
        before = waiting[: waiting.index(member)] if member in waiting else waiting
        aside = 0
        for each in before:
            if each not in self.met and aside + self.unmet[each] <= unlent:
                aside += self.unmet[each]
        return max(0, free - aside)

    def over(self, member: int) -> None:
        """Its want is."""
        _, keeps, ahead = self.wants.pop(member)
        wanted, got = self.wanted[member]
        if keeps and not ahead:
            if got < wanted:
                self.unmet[member] = max(wanted, self.unmet.get(member, 0))
                self.met.discard(member)
            elif member in self.unmet:
                self.met.add(member)

    def waits_no_more(self, member: int) -> None:
        self.unmet.pop(member, None)
        self.met.discard(member)

    def hear(self, sent: Sent, *, at: tuple[int, int] | None = None) -> bool:
        """Returns whether `at`, (member, serial), has been answered."""
        heard = False
        for member, message in sent:
            assert member in self.pages, "a message to a member that is not there"
            if isinstance(message, Grant | Returned):
                pages = set(pages_of(message.runs))
                assert not pages & set().union(*self.pages.values()), "a page has two owners"
                if isinstance(message, Grant):
                    assert len(pages) <= self.usable(member, *self.wants[member][1:]), "it gets what others wait for"
                    self.wanted[member][1] += len(pages)
                self.pages[member] |= pages
                heard = heard or at == (member, message.serial)
            if isinstance(message, Grant):
                serial, keeps, _ = self.wants[member]
                assert message.serial == serial, "an answer to a want that is over"
                others = set().union(*(lent for each, lent in self.lent.items() if each != member))
                assert pages <= others if message.lent else not pages & others, (
                    "a member is not told whose layers it gets"
                )
                assert not (keeps and message.lent), "it keeps what another may call home"
                assert not pages & self.must & others, "another gets what its lender has called"
                self.lent[member] -= pages
                self.must -= pages
                if not message.more:
                    self.over(member)
            elif isinstance(message, Returned):
                assert pages <= self.lent[member]
                self.lent[member] -= pages
                self.must -= pages
                if not message.more:
                    self.open_calls.discard((member, message.serial))
            else:
                assert isinstance(message, Recall)
                assert message.pages > 0
                if message.ahead:  # behind all that is needed
                    assert all(ahead for _, _, ahead in self.wants.values())
                self.recalls.append((member, message.recall, message.pages))
                if message.runs:
                    self.named[message.recall] = set(pages_of(message.runs))
                    assert self.named[message.recall] <= self.pages[member]
        self.check()
        return heard

    def check(self) -> None:
        ledger = self.ledger
        assert ledger.held == {member: len(pages) for member, pages in self.pages.items()}
        free = set(range(self.count)).difference(*self.pages.values())
        assert ledger.free == len(free)
        assert ledger.lent == {page: member for member, pages in self.lent.items() for page in pages}
        assert not free & self.must, "free, and its lender has called it"
        assert ledger.waiting == len(self.wants)
        # Nobody waits while pages are free, or while nobody is asked.
        for member, (_, keeps, ahead) in self.wants.items():
            assert not self.usable(member, keeps, ahead)
            assert ledger._recall is not None
        assert ledger.unmet == tuple(self.unmet)

    def join(self, member: int) -> None:
        if member in self.pages:
            self.refused(self.ledger.joined, member)
            return
        self.pages[member], self.lent[member], self.serials[member], self.calls[member] = set(), set(), 0, 0
        self.hear(self.ledger.joined(member))

    def want(self, member: int, pages: int, keeps: bool = False, ahead: bool = False) -> None:
        if member not in self.pages:
            self.refused(self.ledger.wanted, member, 1, pages)
            return
        self.serials[member] += 1
        self.wants[member], self.wanted[member] = (self.serials[member], keeps, ahead), [pages, 0]
        sent = self.ledger.wanted(member, self.serials[member], pages, keeps=keeps, ahead=ahead)
        assert self.hear(sent, at=(member, self.serials[member])), "it hears at once what it got"

    def give(self, member: int, pages: set[int], lent: bool = False) -> None:
        mine = member in self.pages and pages <= self.pages[member]
        if not mine or (lent and pages & set().union(*self.lent.values())):
            self.refused(lambda: self.ledger.gave(member, all_runs(pages), lent=lent))
            return
        self.pages[member] -= pages
        if lent:
            self.lent[member] |= pages
        elif member in self.met:
            self.waits_no_more(member)
        self.hear(self.ledger.gave(member, all_runs(pages), lent=lent))

    def give_half(self, member: int, lent: bool) -> None:
        others = set().union(*self.lent.values()) if lent else set()
        pages = sorted(self.pages.get(member, set()) - others)
        if pages:
            self.give(member, set(pages[::2]), lent)

    def home(self, member: int, gently: bool) -> None:
        if member not in self.pages:
            self.refused(self.ledger.called, member, 1, [(0, 1)])
            return
        self.calls[member] += 1
        serial, pages = self.calls[member], set(self.lent[member])
        self.open_calls.add((member, serial))
        if not gently:
            self.must |= pages
        self.hear(self.ledger.called(member, serial, all_runs(pages), gently=gently))
        free = set(range(self.count)).difference(*self.pages.values())
        assert not pages & free, "what is free comes home at once"

    def disown(self, member: int) -> None:
        pages = self.lent.get(member, set())
        self.lent[member], self.must = set(), self.must - pages
        if member in self.pages:
            self.hear(self.ledger.disowned(member, all_runs(pages)))
        else:
            del self.lent[member]

    def answer(self, late: bool, gives: bool) -> None:
        if not self.recalls:
            return
        member, recall, _ = self.recalls.pop(0)
        if member in self.pages:
            named = self.named.get(recall, set()) & self.pages[member]
            if gives and named:
                self.give(member, named)
            self.hear(self.ledger.late(recall) if late else self.ledger.done(member, recall))

    def end(self, member: int) -> None:
        self.pages.pop(member, None)
        self.must -= self.lent.pop(member, set())
        self.wants.pop(member, None)
        self.waits_no_more(member)
        self.open_calls = {call for call in self.open_calls if call[0] != member}
        self.hear(self.ledger.ended(member))

    def forget(self, member: int) -> None:
        if member not in self.wants:
            self.waits_no_more(member)
        self.hear(self.ledger.forgotten(member))

    def refused(self, call: Any, *arguments: object) -> None:
        with pytest.raises(InvalidState, match="nothing changed"):
            call(*arguments)
        self.check()


SOME = st.sets(st.integers(0, PAGES - 1), min_size=1, max_size=6)
EVENTS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(MEMBERS)),
    st.tuples(st.just("want"), st.sampled_from(MEMBERS), st.integers(0, PAGES), st.booleans(), st.booleans()),
    st.tuples(
        st.just("give"),
        st.sampled_from(MEMBERS),
        SOME,
        st.booleans(),
    ),
    st.tuples(st.just("give_half"), st.sampled_from(MEMBERS), st.booleans()),
    st.tuples(st.just("home"), st.sampled_from(MEMBERS), st.booleans()),
    st.tuples(st.just("disown"), st.sampled_from(MEMBERS)),
    st.tuples(st.just("answer"), st.booleans(), st.booleans()),
    st.tuples(st.just("end"), st.sampled_from(MEMBERS)),
    st.tuples(st.just("forget"), st.sampled_from(MEMBERS)),
)


@settings(max_examples=examples(400))
@given(st.lists(EVENTS, max_size=60))
def test_books_agree_and_every_want_ends(events: list[tuple[Any, ...]]) -> None:
    world = World()
    for kind, *arguments in events:
        getattr(world, kind)(*arguments)
    for _ in range(200):
        world.answer(late=False, gives=False)
    assert not world.wants
    assert not world.open_calls, "a call is answered"


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
    world.answer(late=False, gives=False)
    assert world.recalls == [(1, 2, 1)]
    assert world.wants
    world.answer(late=True, gives=False)
    assert world.recalls == [(2, 3, 1)]  # now for layers
    world.answer(late=False, gives=False)
    world.answer(late=False, gives=False)
    assert not world.wants
    assert world.pages[3] == {4, 8, 9, 10, 11}


def test_layers_are_asked_for_when_all_else_has_been_given_and_come_home_by_their_numbers() -> None:
    world = World()
    for member in MEMBERS:
        world.join(member)
        world.want(member, 4)
    world.want(3, 5)
    assert [recall[0] for recall in world.recalls] == [1]
    world.answer(late=False, gives=False)
    world.answer(late=False, gives=False)  # the second has been asked, too: now for layers
    assert [recall[0] for recall in world.recalls] == [1]
    world.give(1, {0, 1, 2}, lent=True)
    assert world.pages[3] == {0, 1, 2, 8, 9, 10, 11}
    world.answer(late=False, gives=False)
    world.answer(late=False, gives=False)
    assert not world.wants
    world.home(1, gently=False)
    assert world.recalls == [(3, 5, 3)]
    world.give(3, {1})
    assert world.pages[1] == {1, 3}
    world.answer(late=True, gives=False)
    assert not world.open_calls
    world.want(2, 1, keeps=True)
    world.give(3, {0})  # late: its lender's all the same
    assert world.pages[1] == {0, 1, 3}
    world.end(3)
    assert world.pages[1] == {0, 1, 2, 3}
    assert len(world.pages[2]) == 5


def test_who_keeps_pages_gets_none_that_is_lent_and_a_lender_that_has_ended_lends_nothing() -> None:
    world = World()
    for member in MEMBERS:
        world.join(member)
        world.want(member, 4)
    world.give(1, {0, 1}, lent=True)
    world.give(2, {4})
    world.want(3, 3, keeps=True)
    assert world.pages[3] == {4, 8, 9, 10, 11}
    world.end(1)
    assert world.pages[3] == {0, 1, 4, 8, 9, 10, 11}
    assert not world.wants


def test_a_want_ahead_of_need_is_behind_all_others_and_asks_for_what_nobody_needs() -> None:
    world = World()
    for member in MEMBERS:
        world.join(member)
        world.want(member, 4)
    world.want(1, 3, ahead=True)
    assert (world.ledger._recall.number, world.ledger._recall.member) == (1, 2)
    world.want(3, 2)  # it waits for no answer to the one ahead of need
    assert (world.ledger._recall.number, world.ledger._recall.member) == (2, 2)
    assert [pages for _, _, pages in world.recalls] == [3, 2], "nobody is asked for what is not needed yet"
    world.recalls.pop(0)
    world.give(2, {4, 5, 6})
    assert world.pages[3] == {4, 5, 8, 9, 10, 11}
    assert world.pages[1] == {0, 1, 2, 3, 6}, "what is left over"
    world.want(1, 3)  # now it needs them: all are asked again
    asked = []
    while world.wants:
        asked.append(world.recalls[0][0])
        world.answer(late=False, gives=False)
    assert sorted(asked[-4:]) == [2, 2, 3, 3]


def test_a_call_that_comes_too_late_is_ignored() -> None:
    """The tenant was detached while its pass called its layers: the broker took that for a broken protocol, and closed."""
    ledger = Ledger(4)
    for member in (1, 2):
        ledger.joined(member)
    ledger.wanted(1, 1, 4, keeps=True)
    ledger.gave(1, ((0, 2),), lent=True)
    ledger.wanted(2, 1, 2)
    ledger.disowned(1, ((0, 2),))
    assert ledger.called(1, 1, ((0, 2),)) == [(1, Returned(1, ()))]
    assert ledger.disowned(1, ((0, 2),)) == []
    assert ledger.held == {1: 2, 2: 2} and ledger.lent == {}


def explore(world: World, depth: int, seen: set[object]) -> None:
    """All orders of all events, to a depth: `World` checks each state."""
    key = repr(
        (
            depth,
            world.pages,
            world.lent,
            world.wants,
            sorted(world.named.items()),
            world.recalls,
            world.must,
            world.open_calls,
        )
    )
    if depth == 0 or key in seen:
        return
    seen.add(key)
    events: list[tuple[Any, ...]] = [("answer", False, True), ("answer", False, False), ("answer", True, False)]
    for member in world.pages:
        events += [("want", member, 2, False), ("want", member, 1, True), ("end", member)]
        events += [
            ("give_half", member, True),
            ("give_half", member, False),
            ("home", member, False),
            ("disown", member),
        ]
    for kind, *arguments in events:
        other = copy.deepcopy(world)
        getattr(other, kind)(*arguments)
        explore(other, depth - 1, seen)


def test_all_orders_of_what_two_members_do_with_two_pages() -> None:
    world, seen = World(2), set[object]()
    for member in (1, 2):
        world.join(member)
    explore(world, 5, seen)
    assert len(seen) > 400


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


def test_a_member_that_was_late_twice_is_not_asked_again_until_it_has_answered() -> None:
    """It cost each want, and each call, another wait."""
    ledger = Ledger(6)
    recalls: list[int] = []

    def asked(sent: Sent, late: int = 0) -> list[int]:
        found = []
        while parts := [(member, each.recall) for member, each in sent if isinstance(each, Recall)]:
            ((member, recall),) = parts
            found.append(member)
            recalls.append(recall)
            sent = ledger.late(recall) if member == late else ledger.done(member, recall)
        return found

    for member in MEMBERS:
        ledger.joined(member)
        asked(ledger.wanted(member, 1, 2 if member < 3 else 0))
    ledger.gave(2, ((2, 1),), lent=True)
    asked(ledger.wanted(1, 2, 3))  # with the page that is lent it has all but one
    assert asked(ledger.wanted(3, 2, 2), late=1) == [2, 1, 2, 1]
    assert asked(ledger.wanted(3, 3, 2)) == [2]
    assert ledger.called(2, 2, ((2, 1),)) == [(2, Returned(2, ()))]
    ledger.done(1, recalls[1])
    assert asked(ledger.wanted(3, 4, 2)) == [2, 1, 2, 1]
    assert asked(ledger.called(2, 3, ((2, 1),)), late=1) == asked(ledger.called(2, 4, ((2, 1),)), late=1) == [1]
    assert asked(ledger.called(2, 5, ((2, 1),))) == []


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
    "message",
    [Join(1, "a"), Join(5, "a", 7, "b", 4096, 9, "", 2), *TO_BROKER],
    ids=lambda message: type(message).__name__,
)
def test_a_message_to_the_broker_comes_as_it_was(message: Any) -> None:
    packet = encode(message)
    assert decode_to_broker(packet) == message
    if not isinstance(message, Pages):  # they go both ways
        with pytest.raises(InvalidState):
            decode_to_member(packet)


@pytest.mark.parametrize("message", TO_MEMBER, ids=lambda message: type(message).__name__)
def test_a_message_to_a_member_comes_as_it_was(message: Any) -> None:
    packet = encode(message)
    assert decode_to_member(packet) == message
    with pytest.raises(InvalidState):
        decode_to_broker(packet)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4),
    max_leaves=10,
)
BOTH = [Join(5, "a", 7, "b", 4096, 9, "", 2), *TO_BROKER, *TO_MEMBER]


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """A message with fields of other types, sizes or depths, or none; cut short, or not."""
    fields = msgspec.msgpack.decode(encode(draw(st.sampled_from(BOTH))))
    name = draw(st.sampled_from([*fields, "unknown"]))
    deep = draw(st.sampled_from([0, 1, 500, 10_000, 60_000]))
    fields[name] = (
        msgspec.Raw(draw(st.sampled_from([b"\x91", b"\x81\xa1a"])) * deep + b"\xc0") if deep else draw(VALUES)
    )
    packet = draw(st.binary(max_size=200) | st.just(msgspec.msgpack.encode(fields)))
    return packet[: draw(st.integers(0, len(packet)))] if draw(st.booleans()) else packet


@settings(max_examples=examples(2000))
@given(hostile())
def test_a_packet_of_any_depth_size_and_type_is_a_message_or_refused(packet: bytes) -> None:
    """60,000 nested lists were a RecursionError, which ended the broker."""
    for decode in (decode_to_broker, decode_to_member):
        with suppress(InvalidState):
            decode(packet)


@settings(max_examples=examples(500))
@given(
    st.sampled_from(TO_BROKER),
    st.integers(0, 60),
    st.integers(0, 255),
)
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
            ledger.gave(1, found.runs, lent=found.lent)
        elif isinstance(found, Home):
            ledger.called(1, found.serial, found.runs)
        elif isinstance(found, Disown):
            ledger.disowned(1, found.runs)
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
