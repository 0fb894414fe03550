"""Who has which page, who waits for some, and who is asked: the broker's decisions, without a socket or a clock.

    joined, wanted, gave, done, left, ended, late  ->  messages to send, (member, message) each

A page is free or one member's. A want is met by free pages at once, as far as there are any. For the rest the other members
are asked one after the other, who wanted something longest ago first: each gives what it can spare and says so, and what it
gives goes to who waits, in the order of asking. When all have been asked a want ends with what it has got.

A member that has ended (its process has) gives all pages back: nothing of it touches them any more. One that hangs keeps them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from remap.broker.messages import Grant, Recall, ToMember, pages_of, runs_of
from remap.errors import InvalidState

__all__ = ["Ledger", "Sent"]

Sent = list[tuple[int, ToMember]]
_FREE = -1


@dataclass
class _Want:
    """pages: that are still to come. asked: members that were asked for it, or need not be."""

    member: int
    serial: int
    pages: int
    asked: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Recall:
    """An unanswered one."""

    number: int
    member: int


class Ledger:
    """Pages 0 to `pages` - 1, all free at first. Members are numbers that the caller gives, never twice.

    Every call raises InvalidState, and changes nothing, for what the protocol does not allow: the caller ends that member.
    """

    def __init__(self, pages: int) -> None:
        self._owner = array("q", [_FREE]) * pages
        self._free = pages
        self._held: dict[int, int] = {}  # member -> pages
        self._last: dict[int, int] = {}  # member -> when it wanted something last, in wants of all
        self._serials: dict[int, int] = {}
        self._wants: list[_Want] = []
        self._recall: _Recall | None = None
        self._recalls = 0
        self._clock = 0
        self._first = 0  # no page before it is free
        self._gone: set[int] = set()  # members that have left, with pages that are still theirs

    @property
    def pages(self) -> int:
        """How many there are."""
        return len(self._owner)

    @property
    def free(self) -> int:
        """How many of them are nobody's."""
        return self._free

    @property
    def held(self) -> dict[int, int]:
        """Member -> how many pages it has."""
        return dict(self._held)

    @property
    def waiting(self) -> int:
        """Wants that are not met yet."""
        return len(self._wants)

    @property
    def recalling(self) -> tuple[int, int] | None:
        """(recall, member) of the one who is asked now."""
        return None if self._recall is None else (self._recall.number, self._recall.member)

    def joined(self, member: int) -> Sent:
        """A new member, without pages."""
        if member in self._held:
            raise InvalidState(f"member {member} joins a second time; nothing changed")
        self._held[member] = self._last[member] = self._serials[member] = 0
        return []

    def wanted(self, member: int, serial: int, pages: int) -> Sent:
        """It can use so many pages more, instead of what it wanted before. It hears at once what it has got."""
        self._require(member)
        if member in self._gone:
            raise InvalidState(f"member {member} has left; nothing changed")
        if serial <= self._serials[member] or not 0 <= pages <= self.pages:
            raise InvalidState(
                f"member {member} wants {pages} pages as number {serial}, expected 0 to {self.pages} pages and a number above "
                f"{self._serials[member]}; nothing changed"
            )
        self._serials[member] = serial
        self._clock += 1
        self._last[member] = self._clock
        before = next((each for each in self._wants if each.member == member), None)
        if before is not None:
            self._wants.remove(before)
        want = _Want(member, serial, pages, {member, *(before.asked if before is not None else ())})
        self._wants.append(want)
        return self._go_on(answer=want)

    def gave(self, member: int, runs: Sequence[tuple[int, int]]) -> Sent:
        """It has let go of these."""
        self._require(member)
        if any(first + count > self.pages for first, count in runs) or sum(count for _, count in runs) > self.pages:
            raise InvalidState(
                f"member {member} gives pages beyond the last, {self.pages - 1}, or more than there are; nothing changed"
            )
        pages = pages_of(runs)
        if len(set(pages)) != len(pages) or any(self._owner[page] != member for page in pages):
            raise InvalidState(f"member {member} gives pages that are not its own, or one twice; nothing changed")
        self._release(member, pages)
        return self._go_on()

    def done(self, member: int, recall: int) -> Sent:
        """It has given what it can. For a recall that is over already this says nothing."""
        self._require(member)
        if self._recall != _Recall(recall, member):
            return []
        self._recall = None
        return self._go_on()

    def late(self, recall: int) -> Sent:
        """Nobody waits for the answer to this recall any more. What is given later is free then."""
        if self._recall is None or self._recall.number != recall:
            return []
        self._recall = None
        return self._go_on()

    def left(self, member: int) -> Sent:
        """It wants nothing any more, and is not asked again. What it has stays its own."""
        self._require(member)
        self._wants = [want for want in self._wants if want.member != member]
        self._gone.add(member)
        return self._asked_no_more(member)

    def ended(self, member: int) -> Sent:
        """Its process has ended, or it has left behind its last use of any page. Nothing happens a second time."""
        if member not in self._held:
            return []
        self._release(member, [page for page, owner in enumerate(self._owner) if owner == member])
        del self._held[member], self._last[member], self._serials[member]
        self._gone.discard(member)
        self._wants = [want for want in self._wants if want.member != member]
        return self._asked_no_more(member)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _require(self, member: int) -> None:
        if member not in self._held:
            raise InvalidState(f"member {member} has not joined; nothing changed")

    def _asked_no_more(self, member: int) -> Sent:
        if self._recall is not None and self._recall.member == member:
            self._recall = None
        return self._go_on()

    def _release(self, member: int, pages: Sequence[int]) -> None:
        for page in pages:
            self._owner[page] = _FREE
            self._first = min(self._first, page)
        self._free += len(pages)
        self._held[member] -= len(pages)

    def _take(self, member: int, count: int) -> list[int]:
        """The lowest free pages: neighbours, where possible."""
        taken: list[int] = []
        page = self._first
        while len(taken) < count:
            if self._owner[page] == _FREE:
                self._owner[page] = member
                taken.append(page)
            page += 1
        self._first = page
        self._free -= count
        self._held[member] += count
        return taken

    def _go_on(self, answer: _Want | None = None) -> Sent:
        """Give what is free to who waits, and ask the next member for the rest. answer: a want that hears at once what it got."""
        sent: Sent = []
        for want in list(self._wants):
            count = min(want.pages, self._free)
            asks = want.pages > count and self._next(want) is not None
            over = want.pages == count or not (asks or self._recall is not None)
            if count or over or want is answer:
                parts = runs_of(self._take(want.member, count)) or [()]
                sent += [(want.member, Grant(want.serial, runs, more=True)) for runs in parts[:-1]]
                sent.append((want.member, Grant(want.serial, parts[-1], more=not over)))
            want.pages -= count
            if over:
                self._wants.remove(want)
        if self._recall is None:
            asked = next(((want, who) for want in self._wants if (who := self._next(want)) is not None), None)
            if asked is not None:
                want, who = asked
                want.asked.add(who)
                self._recalls += 1
                self._recall = _Recall(self._recalls, who)
                sent.append((who, Recall(self._recalls, sum(each.pages for each in self._wants if each.member != who))))
        return sent

    def _next(self, want: _Want) -> int | None:
        """Whom to ask next for it."""
        skip = want.asked | self._gone
        others = [(self._last[each], each) for each, held in self._held.items() if held and each not in skip]
        return min(others)[1] if others else None
