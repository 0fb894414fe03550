"""The ledger when members join again: a new broker, or the same one behind a broken connection. A page never has two owners, and
none is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

from effort import some
from hypothesis import given, settings
from hypothesis import strategies as st
from test_broker_ledger import all_runs

from remap.broker.ledger import UNKNOWN, Ledger, Sent
from remap.broker.messages import Grant, Recall, Returned, pages_of
from remap.errors import InvalidState

PAGES, MEMBERS = 8, (1, 2, 3)


class World:
    """Brokers, one behind the other, and what members have by what they have heard. borrowed: of the pages, those that came as
    another's. apart: who lives and has no connection. old: of these, who has not joined this broker yet. keeps: who wants pages
    for good."""

    def __init__(self, count: int = PAGES) -> None:
        self.count, self.ledger = count, Ledger(count)
        self.pages: dict[int, set[int]] = {}
        self.lends: dict[int, set[int]] = {}
        self.borrowed: dict[int, set[int]] = {}
        self.apart, self.old, self.keeps = set[int](), set[int](), set[int]()
        self.serials = dict.fromkeys(MEMBERS, 0)
        self.recalls: list[tuple[int, int]] = []

    def hear(self, sent: Sent) -> None:
        for member, message in sent:
            assert member in self.pages and member not in self.apart, "a message to somebody who is not there"
            if isinstance(message, Grant | Returned):
                pages = set(pages_of(message.runs))
                assert not pages & set().union(*self.pages.values()), "a page has two owners"
                if isinstance(message, Returned):
                    assert pages <= self.lends[member]
                elif message.lent:
                    assert member not in self.keeps, "it keeps what another may call"
                    self.borrowed[member] |= pages
                else:
                    others = set().union(*(lends for each, lends in self.lends.items() if each != member))
                    assert not pages & others, "a member is not told that another may call them"
                self.pages[member] |= pages
                self.lends[member] -= pages
            elif isinstance(message, Recall):
                self.recalls.append((member, message.recall))
        self.check()

    def check(self) -> None:
        ledger = self.ledger
        assert ledger.free + ledger.unknown + sum(ledger.held.values()) == self.count
        for member, pages in self.pages.items():
            if member not in self.apart:
                assert ledger.held[member] == len(pages)
                assert {page for page, lender in ledger.lent.items() if lender == member} == self.lends[member]
            elif member not in self.old:
                assert ledger.held[member] >= len(pages), "what somebody may still touch stays its own"

    def here(self, member: int) -> bool:
        return member in self.pages and member not in self.apart

    def join(self, member: int) -> None:
        if member in self.pages:
            if member not in self.apart:
                with pytest.raises(InvalidState, match="second time"):
                    self.ledger.joined(member)
                return
            # Of another's pages none can be claimed, and nothing changes.
            others = set().union(*(pages for each, pages in self.pages.items() if self.here(each)))
            if others:
                with pytest.raises(InvalidState, match="nothing changed"):
                    self.ledger.joined(member, all_runs(self.pages[member] | others))
                self.check()
        else:
            self.pages[member], self.lends[member], self.borrowed[member] = set(), set(), set()
        borrowed = self.borrowed[member]
        runs = all_runs(self.pages[member] - borrowed), all_runs(self.lends[member]), all_runs(borrowed)
        sent = self.ledger.joined(member, *runs)
        self.apart.discard(member)
        self.old.discard(member)
        self.hear(sent)

    def want(self, member: int, pages: int, keeps: bool = False) -> None:
        if self.here(member):
            self.serials[member] += 1
            (self.keeps.add if keeps else self.keeps.discard)(member)
            self.hear(self.ledger.wanted(member, self.serials[member], pages, keeps=keeps))

    def give(self, member: int, pages: set[int], lent: bool) -> None:
        """Apart it says so to nobody; its next Join does."""
        going = pages & self.pages.get(member, set())
        if lent:
            going -= set().union(*self.lends.values(), self.borrowed.get(member, set()))
        if not going:
            return
        self.pages[member] -= going
        self.borrowed[member] -= going
        self.lends[member] |= going if lent else set()
        if self.here(member):
            self.hear(self.ledger.gave(member, all_runs(going), lent=lent))
        self.check()

    def call(self, member: int, gently: bool) -> None:
        if self.here(member) and self.lends[member]:
            self.serials[member] += 1
            self.hear(self.ledger.called(member, self.serials[member], all_runs(self.lends[member]), gently=gently))

    def disown(self, member: int) -> None:
        if member in self.pages:
            pages, self.lends[member] = self.lends[member], set()
            if self.here(member):
                self.hear(self.ledger.disowned(member, all_runs(pages)))

    def answer(self) -> None:
        if self.recalls:
            member, recall = self.recalls.pop(0)
            self.hear(self.ledger.done(member, recall) if self.here(member) else self.ledger.late(recall))

    def breaks(self, member: int) -> None:
        if self.here(member):
            self.apart.add(member)
            self.hear(self.ledger.left(member))

    def end(self, member: int) -> None:
        """Its process. A new broker that has not seen it hears nothing."""
        old = member in self.old
        self.pages.pop(member, None)
        self.lends.pop(member, None)
        self.borrowed.pop(member, None)
        self.apart.discard(member)
        self.old.discard(member)
        if not old:
            self.hear(self.ledger.ended(member))

    def kill_broker(self) -> None:
        self.apart, self.old = set(self.pages), set(self.pages)
        self.ledger, self.recalls = Ledger(self.count, unknown=True), []

    def settle(self) -> None:
        if not self.old:
            self.hear(self.ledger.settled())


WHO = st.sampled_from(MEMBERS)
SOME = st.sets(st.integers(0, PAGES - 1), min_size=1, max_size=5)
EVENTS = st.one_of(
    st.tuples(st.just("join"), WHO),
    st.tuples(st.just("want"), WHO, st.integers(0, PAGES), st.booleans()),
    st.tuples(st.just("give"), WHO, SOME, st.booleans()),
    st.tuples(st.just("call"), WHO, st.booleans()),
    st.tuples(st.just("disown"), WHO),
    st.tuples(st.just("answer")),
    st.tuples(st.just("breaks"), WHO),
    st.tuples(st.just("end"), WHO),
    st.tuples(st.just("kill_broker")),
    st.tuples(st.just("settle")),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=60))
def test_a_page_never_has_two_owners_and_none_is_lost(events: list[tuple[Any, ...]]) -> None:
    world = World()
    for member in MEMBERS:
        world.join(member)
        world.want(member, 2)
    for kind, *arguments in events:
        getattr(world, kind)(*arguments)
    come_together(world)


def come_together(world: World) -> None:
    """All join, want nothing more and end."""
    for member in sorted(world.apart):
        world.join(member)
    world.settle()
    assert world.ledger.unknown == 0 and not world.ledger.unsettled
    for _ in range(100):
        world.answer()
    assert not world.ledger.waiting
    assert world.ledger.held == {member: len(pages) for member, pages in world.pages.items()}
    for member in list(world.pages):
        world.end(member)
    assert world.ledger.free == world.count and world.ledger.lent == {}


def explore(world: World, depth: int, seen: set[object]) -> None:
    """All orders of all events, to a depth; behind each of them all can come together."""
    plain = {name: value for name, value in vars(world.ledger).items() if name not in ("_clock", "_last")}
    key = repr((depth, {**vars(world), "ledger": plain}))
    if key in seen:
        return
    seen.add(key)
    come_together(copy.deepcopy(world))
    events: list[tuple[Any, ...]] = [("answer",), ("settle",), ("kill_broker",)]
    for member in MEMBERS:
        events += [("want", member, 1, keeps) for keeps in (False, True)]
        events += [("give", member, set(range(world.count)), lent) for lent in (False, True)]
        events += [("call", member, False), *((kind, member) for kind in ("join", "disown", "breaks", "end"))]
    for kind, *arguments in events if depth else ():
        other = copy.deepcopy(world)
        getattr(other, kind)(*arguments)
        explore(other, depth - 1, seen)


def test_all_orders_of_what_a_lender_a_borrower_and_a_third_do_when_a_broker_has_died() -> None:
    world, seen = World(2), set[object]()
    for member in (1, 2):
        world.join(member)
    world.want(1, 2)
    world.give(1, {0}, lent=True)
    world.want(2, 1)
    assert (world.pages, world.borrowed[2]) == ({1: {1}, 2: {0}}, {0})
    world.kill_broker()
    explore(world, some(3, 4), seen)
    assert len(seen) > 300


def test_a_want_waits_for_pages_that_nobody_has_claimed_yet() -> None:
    ledger = Ledger(4, unknown=True)
    ledger.joined(1, ((0, 1),), ((3, 1),))
    assert ledger.wanted(1, 1, 2, keeps=True) == [(1, Grant(1, (), more=True))]
    assert ledger.called(1, 1, ((3, 1),)) == [(1, Returned(1, ()))]  # nobody is known to have it
    ledger.joined(2, ((1, 1),))
    sent = ledger.settled()
    assert (1, Returned(1, ((3, 1),))) in sent  # it was called
    assert (1, Grant(1, ((2, 1),), more=True)) in sent
    assert ledger.held == {1: 3, 2: 1} and (ledger.free, ledger.unknown) == (0, 0)


def test_what_is_given_back_before_its_lender_has_joined_is_free_and_still_lent() -> None:
    """It was free for all, and the lender's claim was refused for ever, as one of a page that is free."""
    ledger = Ledger(6, unknown=True)
    ledger.joined(2, ((3, 1),), borrows=((0, 2),))
    ledger.joined(3)
    ledger.gave(2, ((0, 1),))
    ledger.ended(2)
    assert ledger.lent == {0: UNKNOWN, 1: UNKNOWN}
    assert ledger.wanted(3, 1, 2, keeps=True) == [(3, Grant(1, ((3, 1),), more=True))]
    assert ledger.wanted(3, 2, 1) == [(3, Grant(2, ((0, 1),), lent=True))]
    ledger.joined(1, ((2, 1),), ((0, 2),))
    assert ledger.lent == {0: 1, 1: 1}
    assert ledger.called(1, 1, ((1, 1),)) == [(1, Returned(1, ((1, 1),)))]
    ledger.settled()
    assert ledger.held == {1: 2, 3: 2} and ledger.lent == {0: 1} and ledger.free == 2


def test_a_lender_that_does_not_come_back_lends_nothing() -> None:
    ledger = Ledger(3, unknown=True)
    ledger.joined(2, ((2, 1),), borrows=((0, 2),))
    ledger.gave(2, ((0, 1),))
    ledger.joined(3)
    assert (ledger.unknown, ledger.unsettled) == (0, True)
    assert (3, Grant(1, (), more=True)) in ledger.wanted(3, 1, 1, keeps=True)
    ledger.done(2, 1)
    assert ledger.waiting == 1
    assert ledger.settled() == [(3, Grant(1, ((0, 1),)))]
    assert ledger.lent == {} and not ledger.unsettled


@pytest.mark.parametrize(
    ("claims", "lends"),
    [
        (((0, 1),), ()),
        (((0, 1), (1, 2)), ()),
        ((), ((3, 1),)),
        (((2, 1),), ((2, 1),)),
        (((4, 1),), ()),
        (((2, 1), (2, 1)), ()),
    ],
    ids=["another's", "some another's", "another lends it", "has and lends", "beyond", "twice"],
)
def test_claims_that_cannot_be_are_refused(claims: Any, lends: Any) -> None:
    ledger = Ledger(4, unknown=True)
    ledger.joined(1, ((0, 1),), ((3, 1),))
    with pytest.raises(InvalidState, match="nothing changed"):
        ledger.joined(2, claims, lends)
    assert ledger.held == {1: 1} and ledger.unknown == 3 and ledger.lent == {3: 1}
    ledger.settled()
    for free in ({"claims": ((2, 1),)}, {"lends": ((2, 1),)}):
        with pytest.raises(InvalidState, match="or free"):
            ledger.joined(2, **free)


def test_what_was_called_before_a_connection_broke_is_free_and_still_lent() -> None:
    ledger = Ledger(4)
    for member in (1, 2):
        ledger.joined(member)
    ledger.wanted(1, 1, 4, keeps=True)
    ledger.gave(1, ((0, 2),), lent=True)
    ledger.wanted(2, 1, 2)
    ledger.called(1, 1, ((0, 2),))
    ledger.left(1)
    assert ledger.gave(2, ((0, 2),)) == []
    assert ledger.held == {1: 2, 2: 0} and ledger.free == 2 and ledger.lent == {0: 1, 1: 1}
    assert ledger.joined(1, ((2, 2),), ((0, 2),)) == []
    assert ledger.called(1, 2, ((0, 2),)) == [(1, Returned(2, ((0, 2),)))]
    assert ledger.held == {1: 4, 2: 0}


def test_what_was_sent_and_not_read_before_a_connection_broke_comes_with_the_claims() -> None:
    ledger = Ledger(4)
    ledger.joined(1)
    ledger.wanted(1, 1, 4, keeps=True)
    ledger.left(1)  # page 0 was given, page 1 as lent, and page 2 never heard of
    ledger.joined(1, ((3, 1),), ((1, 1),))
    assert ledger.held == {1: 1} and ledger.free == 3 and ledger.lent == {1: 1}
