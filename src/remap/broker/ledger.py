# SPDX-License-Identifier: Apache-2.0
"""The owner of each page, the members that wait for some, and the one that is asked: the broker's decisions, without a socket or
a clock.

    joined, wanted, gave, called, disowned, done, left, ended, late, settled  ->  messages to send, (member, message) each

A page is free or one member's. A want is met by free pages at once, as far as there are any. For the rest the other members
are asked one after the other, the one that wanted something longest ago first: each gives what it can spare and says so, and
its pages go to the members that wait, in the order of asking. When all have been asked, they are asked once more, for layers of
tenants that serve no pass, lent ones or, for a member that keeps pages, whole ones for good; then the want ends with what it has
got, unless pages are unknown: these are waited for. A want *ahead* of need is behind all others, and asks for what nobody needs.

Who keeps pages, and got too few, has a place among those that wait from then on (`unmet`): once as many are free as it wants,
they are set aside for it, so that of those that want some for good nobody who came later gets them, nor who wants some ahead of
need. KV of others may use these pages meanwhile: it is asked back. Nothing is set aside while it has got what it asked for last,
such as 0, for what it lacked it has found itself; and it loses the place when it gives pages then (one activation may ask several
times), or when `forgotten` is called: it does not ask any more.

A page that a member has given as one of its layers' is *lent*: others use it as any other, but not for good.
When its lender calls it, the member that has it is asked for it by its number, and whenever it is free next it is the lender's.

A member that was late with `LATES` answers is not asked again until it has answered a question: it hangs. One that was late once
may be on a busy machine.

A member that has ended (its process has) gives all pages back: nothing of it touches them any more. Pages that it had lent are
lent no more, and pages of others' layers that it had are free, or go to the member that calls them. One that hangs keeps
its pages.

Of a broker that begins where another was, pages are *unknown* at first: some process may have them. A member of the other one
claims what it has, and what it has lent, when it joins. When all of those have joined, or ended, what is unknown still is free
(`settled`). One that has left, and whose process lives, may join again in the same way.

A member also says which of its pages it has borrowed. Until the lender has joined, or all is settled, such a page has a lender
whom the ledger does not know: if it is given back it is free and lent, so its lender finds it where it left it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from remap.broker.messages import Grant, Recall, Returned, Run, ToMember, named_pages, pages_of, runs_of
from remap.errors import InvalidState

__all__ = ["UNKNOWN", "Ledger", "Sent"]

Sent = list[tuple[int, ToMember]]
_FREE, UNKNOWN = -1, -2
"""No member: owners of pages. `UNKNOWN` is a lender, too."""
LATES = 2


@dataclass
class _Want:
    """pages: that are still to come, of `wanted`. asked: (layers, member): the one asked for it, and whether for layers. keeps:
    for good. ahead: of need."""

    member: int
    serial: int
    pages: int
    wanted: int
    keeps: bool = False
    ahead: bool = False
    asked: set[tuple[bool, int]] = field(default_factory=set)


@dataclass(frozen=True)
class _Recall:
    """An unanswered one. pages: if these are called; () for one of a want. ahead: see `_Want`."""

    number: int
    member: int
    pages: tuple[int, ...] = ()
    gently: bool = False
    ahead: bool = False


class Ledger:
    """Pages 0 to `pages` - 1, all free at first, or all unknown. Members are numbers that the caller gives, never twice.

    Every call raises InvalidState, and changes nothing, for what the protocol does not allow: the caller ends that member.
    """

    def __init__(self, pages: int, *, unknown: bool = False) -> None:
        self._owner = array("q", [UNKNOWN if unknown else _FREE]) * pages
        self._free, self._unknown = (0, pages) if unknown else (pages, 0)
        self._unsettled = unknown
        self._held: dict[int, int] = {}  # member -> pages
        self._last: dict[int, int] = {}  # member -> when it wanted something last, in wants of all
        self._serials: dict[int, int] = {}
        self._wants: list[_Want] = []
        self._unmet: dict[int, int] = {}  # member that waits for pages for good -> how many, who waits longest first
        self._met: set[int] = set()  # of these, those that got what they asked for last
        self._recall: _Recall | None = None  # of a want; one at a time
        self._recalls = 0
        self._lender: dict[int, int] = {}  # page that is lent -> its lender, which does not have it now
        self._away: set[int] = set()  # of these, the free ones
        self._called: set[int] = set()  # of these, those that go to their lender when they are free next
        self._named: dict[int, _Recall] = {}  # recalls of called pages
        self._named_of: dict[int, int] = {}  # page -> its last one
        self._calls: dict[tuple[int, int], set[int]] = {}  # (member, serial) -> recalls that it waits for
        self._call_serials: dict[int, int] = {}
        self._clock = 0
        self._first = 0  # no page before it is free
        self._gone: set[int] = set()  # members that have left, with pages that are still theirs
        self._late: Counter[int] = Counter()  # member -> answers with which it was late since it gave one

    @property
    def pages(self) -> int:
        """How many there are."""
        return len(self._owner)

    @property
    def free(self) -> int:
        """How many of them no member has."""
        return self._free

    @property
    def unknown(self) -> int:
        """How many of them a member of another broker may have."""
        return self._unknown

    @property
    def unsettled(self) -> bool:
        """Whether a member of another broker may still claim pages, or say that it has lent some: `settled` ends that."""
        return self._unsettled

    @property
    def held(self) -> dict[int, int]:
        """Member -> how many pages it has."""
        return dict(self._held)

    @property
    def waiting(self) -> int:
        """Wants that are not met yet."""
        return len(self._wants)

    @property
    def unmet(self) -> tuple[int, ...]:
        """Members with a place among those that wait for pages for good, the one that waits longest first."""
        return tuple(self._unmet)

    @property
    def recalls(self) -> set[int]:
        """The numbers of all recalls that are not answered, nor late."""
        return {*self._named, *(() if self._recall is None else (self._recall.number,))}

    @property
    def lent(self) -> dict[int, int]:
        """Page -> its lender, for each page that is lent; `UNKNOWN` if it has not joined yet."""
        return dict(self._lender)

    def joined(
        self, member: int, claims: Sequence[Run] = (), lends: Sequence[Run] = (), borrows: Sequence[Run] = ()
    ) -> Sent:
        """A new member, or one that had left. claims, borrows: exactly the pages that it has, of those that were its own here or
        are unknown; of the second some member is, or was, the lender. lends: exactly those that it has lent, and may call."""
        back = member in self._held
        if back and member not in self._gone:
            raise InvalidState(f"member {member} joins a second time; nothing changed")
        has, lent, borrowed = self._pages(member, [*claims, *borrows]), self._pages(member, lends), pages_of(borrows)
        theirs = [page for page in has if self._owner[page] != UNKNOWN and not (back and self._owner[page] == member)]
        theirs += [page for page in lent if self._lender.get(page, member) not in (member, UNKNOWN)]
        theirs += [page for page in lent if self._owner[page] == _FREE and page not in self._lender]
        if theirs or not set(has).isdisjoint(lent):
            raise InvalidState(
                f"member {member} claims {len(has)} pages and has lent {len(lent)}: some are another's, or free, or lent by "
                f"another, such as {theirs[:8]}; nothing changed; end its process"
            )
        if not back:
            self._held[member] = self._last[member] = self._serials[member] = self._call_serials[member] = 0
        self._gone.discard(member)
        del self._late[member]
        for page in borrowed:
            if self._owner[page] == UNKNOWN:
                self._lender.setdefault(page, UNKNOWN)
        for page in has:
            if self._owner[page] == UNKNOWN:
                self._owner[page] = member
                self._unknown -= 1
                self._held[member] += 1
        keeps = set(lent)
        for page in [page for page, lender in self._lender.items() if lender == member and page not in keeps]:
            self._not_lent(page)
        self._lender.update(dict.fromkeys(lent, member))
        keeps = set(has)
        return self._release(member, [page for page in self._of(member) if page not in keeps]) + self._go_on()

    def settled(self) -> Sent:
        """No member can claim a page any more, nor say that it has lent one: unknown pages are free, and unknown lenders gone."""
        self._lends_no_more(UNKNOWN)
        sent = self._let_go(self._of(UNKNOWN))
        self._unknown, self._unsettled = 0, False
        return sent + self._go_on()

    def wanted(self, member: int, serial: int, pages: int, *, keeps: bool = False, ahead: bool = False) -> Sent:
        """It can use `pages` pages more, instead of what it wanted before. It hears at once what it has got."""
        self._require(member, here=True)
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
        # Who was asked ahead of need gives more now.
        asked = before.asked if before is not None and before.ahead <= ahead else ()
        if self._recall is not None and self._recall.ahead and not ahead:
            self._recall = None  # this one does not wait for its answer
        want = _Want(member, serial, pages, pages, keeps, ahead, {(False, member), (True, member), *asked})
        self._wants.append(want)
        first = {each: place for place, each in enumerate(self._unmet)}
        self._wants.sort(
            key=lambda each: (each.ahead, first.get(each.member, len(first)) if each.keeps else len(first))
        )
        return self._go_on(answer=want)

    def forgotten(self, member: int) -> Sent:
        """It waits no more: nothing is set aside for it. If it asks again it is the last one that waits. While a want of it is
        open this says nothing."""
        if any(want.member == member for want in self._wants):
            return []
        self._waits_no_more(member)
        return self._go_on()

    def gave(self, member: int, runs: Sequence[Run], *, lent: bool = False) -> Sent:
        """It has let go of these."""
        self._require(member)
        pages = self._pages(member, runs)
        if any(self._owner[page] != member or (lent and page in self._lender) for page in pages):
            raise InvalidState(f"member {member} gives pages that are not its own, or lends another's; nothing changed")
        if lent:
            self._lender.update(dict.fromkeys(pages, member))
        elif member in self._met:
            self._waits_no_more(member)
        return self._release(member, pages) + self._go_on()

    def called(self, member: int, serial: int, runs: Sequence[Run], *, gently: bool = False) -> Sent:
        """These, which it has lent, are to come home. It hears at once which do. Those that it has not lent any more are ignored:
        when it sent this it may not have known that."""
        self._require(member, here=True)
        pages = self._pages(member, runs)
        if serial <= self._call_serials[member]:
            raise InvalidState(
                f"member {member} calls pages as number {serial}, expected above {self._call_serials[member]}; nothing changed"
            )
        self._call_serials[member] = serial
        away = [page for page in pages if self._lender.get(page) == member]
        free = [page for page in away if page in self._away]
        for page in free:
            self._own(page, member)
        self._free -= len(free)
        self._held[member] += len(free)
        waits: set[int] = set()
        asked: dict[int, list[int]] = {}
        for page in away:
            if self._owner[page] == member:
                continue
            if not gently:
                self._called.add(page)
            known = self._named.get(self._named_of.get(page, 0))
            if known is not None and known.gently <= gently:
                waits.add(known.number)
            elif self._may_be_asked(self._owner[page]):
                asked.setdefault(self._owner[page], []).append(page)
        sent: Sent = []
        for holder, named in asked.items():
            for part in runs_of(named):
                self._recalls += 1
                recall = _Recall(self._recalls, holder, tuple(pages_of(part)), gently)
                self._named[recall.number] = recall
                self._named_of.update(dict.fromkeys(recall.pages, recall.number))
                waits.add(recall.number)
                sent.append((holder, Recall(recall.number, len(recall.pages), runs=part, gently=gently)))
        if waits:
            self._calls[member, serial] = waits
        return [*self._returned(member, free), *sent, *([] if waits or free else [(member, Returned(serial, ()))])]

    def disowned(self, member: int, runs: Sequence[Run]) -> Sent:
        """It will not ask for these, which it has lent. Those that it has not lent any more are ignored."""
        self._require(member)
        for page in self._pages(member, runs):
            if self._lender.get(page) == member:
                self._not_lent(page)
        return self._go_on()

    def done(self, member: int, recall: int) -> Sent:
        """It has given what it can. For a recall that is over already this says nothing."""
        self._require(member)
        del self._late[member]
        named = self._named.get(recall)
        sent = self._answered(recall) if named is not None and named.member == member else []
        if self._recall is not None and (self._recall.number, self._recall.member) == (recall, member):
            self._recall = None
        return sent + self._go_on()

    def late(self, recall: int) -> Sent:
        """No member waits for the answer to this recall any more. Pages that are given later are free then, or go to the
        member that has called them."""
        if recall in self._named:
            self._late[self._named[recall].member] += 1
            return self._answered(recall)
        if self._recall is None or self._recall.number != recall:
            return []
        self._late[self._recall.member] += 1
        self._recall = None
        return self._go_on()

    def left(self, member: int) -> Sent:
        """It wants nothing any more, and is not asked again. Pages that it has stay its own, and pages that it has lent are lent:
        it may join again."""
        self._require(member)
        self._wants = [want for want in self._wants if want.member != member]
        self._waits_no_more(member)
        self._gone.add(member)
        self._calls_no_more(member)
        return self._asked_no_more(member)

    def ended(self, member: int) -> Sent:
        """Its process has, or it has left behind its last use of any page. Nothing happens a second time."""
        if member not in self._held:
            return []
        self._gone.add(member)
        self._wants = [want for want in self._wants if want.member != member]
        self._waits_no_more(member)
        self._lends_no_more(member)
        sent = self._release(member, self._of(member))
        sent += self._asked_no_more(member)
        del self._held[member], self._last[member], self._serials[member], self._call_serials[member]
        self._gone.discard(member)
        del self._late[member]
        return sent

    # -- inside ------------------------------------------------------------------------------------------------------

    def _require(self, member: int, here: bool = False) -> None:
        if member not in self._held:
            raise InvalidState(f"member {member} has not joined; nothing changed")
        if here and member in self._gone:
            raise InvalidState(f"member {member} has left; nothing changed")

    def _pages(self, member: int, runs: Sequence[Run]) -> list[int]:
        return named_pages(runs, self.pages, f"member {member}")

    def _asked_no_more(self, member: int) -> Sent:
        sent: Sent = []
        for recall in [each.number for each in self._named.values() if each.member == member]:
            sent += self._answered(recall)
        if self._recall is not None and self._recall.member == member:
            self._recall = None
        return sent + self._go_on()

    def _answered(self, recall: int) -> Sent:
        """No member waits for this answer any more, to a recall of called pages."""
        for page in self._named.pop(recall).pages:
            if self._named_of.get(page) == recall:
                del self._named_of[page]
        sent: Sent = []
        for (member, serial), waits in list(self._calls.items()):
            waits.discard(recall)
            if not waits:
                del self._calls[member, serial]
                sent.append((member, Returned(serial, ())))
        return sent

    def _may_be_asked(self, member: int) -> bool:
        return member in self._held and member not in self._gone and self._late[member] < LATES

    def _of(self, owner: int) -> list[int]:
        return [page for page, each in enumerate(self._owner) if each == owner]

    def _lends_no_more(self, member: int) -> None:
        for page in [page for page, lender in self._lender.items() if lender == member]:
            self._not_lent(page)
        self._calls_no_more(member)

    def _calls_no_more(self, member: int) -> None:
        self._called = {page for page in self._called if self._lender[page] != member}
        self._calls = {call: waits for call, waits in self._calls.items() if call[0] != member}

    def _not_lent(self, page: int) -> None:
        self._lender.pop(page, None)
        self._called.discard(page)
        if page in self._away:
            self._away.discard(page)
            self._first = min(self._first, page)

    def _own(self, page: int, member: int) -> None:
        """It was free, or goes from one to another."""
        self._owner[page] = member
        self._away.discard(page)
        if self._lender.get(page) == member:
            del self._lender[page]
            self._called.discard(page)

    def _release(self, member: int, pages: Sequence[int]) -> Sent:
        self._held[member] -= len(pages)
        return self._let_go(pages)

    def _let_go(self, pages: Sequence[int]) -> Sent:
        """They are free, or the member that has called them has them. A want is told later (`_go_on`)."""
        back: dict[int, list[int]] = {}
        for page in pages:
            if page in self._called and (lender := self._lender[page]) != self._owner[page]:
                back.setdefault(lender, []).append(page)
                self._own(page, lender)
                continue
            self._owner[page] = _FREE
            if page in self._lender:
                self._away.add(page)
            else:
                self._first = min(self._first, page)
            self._free += 1
        sent: Sent = []
        for lender, home in back.items():
            self._held[lender] += len(home)
            sent += self._returned(lender, home)
        return sent

    def _returned(self, member: int, pages: Sequence[int]) -> Sent:
        serial = self._call_serials[member]
        more = (member, serial) in self._calls
        parts = runs_of(pages)
        return [(member, Returned(serial, part, more or part is not parts[-1])) for part in parts]

    def _available(self, want: _Want) -> int:
        free = self._free - len(self._away) if want.keeps else self._free
        return max(0, free - self._set_aside(want))

    def _set_aside(self, want: _Want) -> int:
        """Pages for those that wait since before it, and could have all that they want now. Where that is not enough for one, who
        needs fewer is not to wait with it."""
        if not (want.keeps or want.ahead):
            return 0
        pages, free = 0, self._free - len(self._away)
        for member, count in self._unmet.items():
            if member == want.member:
                break
            pages += 0 if member in self._met or pages + count > free else count
        return pages

    def _may_settle(self, want: _Want) -> bool:
        """Whether `settled` may free pages for it."""
        return self._unknown > 0 or (want.keeps and self._unsettled and UNKNOWN in self._lender.values())

    def _take(self, member: int, count: int) -> list[int]:
        """The lowest free pages, neighbours where possible; lent ones last."""
        taken: list[int] = []
        page = self._first
        for _ in range(min(count, self._free - len(self._away))):
            while self._owner[page] != _FREE or page in self._away:
                page += 1
            self._own(page, member)
            taken.append(page)
        self._first = page
        for page in sorted(self._away)[: count - len(taken)]:
            self._own(page, member)
            taken.append(page)
        self._free -= count
        self._held[member] += count
        return taken

    def _go_on(self, answer: _Want | None = None) -> Sent:
        """Give free pages to members that wait, ask the next one for the rest. answer: a want that hears at once what it got."""
        sent: Sent = []
        for want in list(self._wants):
            count = min(want.pages, self._available(want))
            asks = want.pages > count and self._next(want) is not None
            over = want.pages == count or not (asks or self._recall is not None or self._may_settle(want))
            if count or over or want is answer:
                taken = self._take(want.member, count)
                parts = [
                    (runs, lent)
                    for lent in (False, True)
                    for runs in runs_of([page for page in taken if (page in self._lender) is lent])
                ] or [((), False)]
                last = len(parts) - 1
                sent += [
                    (want.member, Grant(want.serial, runs, more=at < last or not over, lent=lent))
                    for at, (runs, lent) in enumerate(parts)
                ]
            want.pages -= count
            if over:
                self._wants.remove(want)
                self._note_unmet(want)
        if self._recall is None:
            asked = next(((want, whom) for want in self._wants if (whom := self._next(want)) is not None), None)
            if asked is not None:
                want, (layers, who) = asked
                want.asked.add((layers, who))
                if not (layers or want.keeps) and self._next(want) == (True, who):
                    layers = True  # nobody else has anything: one question for what it does not use, then for layers
                    want.asked.add((layers, who))
                self._recalls += 1
                self._recall = _Recall(self._recalls, who, ahead=want.ahead)
                keeps = layers and want.keeps
                # Lent pages are of no use to a member that keeps some.
                others = (each for each in self._wants if each.member != who and each.ahead is want.ahead)
                pages = sum(each.pages for each in others if not layers or each.keeps is keeps)
                # In front: an answer wakes who waits for it, and on a busy machine that may be instead of the sender.
                sent.insert(0, (who, Recall(self._recalls, pages, layers=layers, keeps=keeps, ahead=want.ahead)))
        return sent

    def _note_unmet(self, want: _Want) -> None:
        """It is over."""
        if not want.keeps or want.ahead:
            return
        if want.pages:
            self._unmet[want.member] = max(want.wanted, self._unmet.get(want.member, 0))
            self._met.discard(want.member)
        elif want.member in self._unmet:
            self._met.add(want.member)

    def _waits_no_more(self, member: int) -> None:
        self._unmet.pop(member, None)
        self._met.discard(member)

    def _next(self, want: _Want) -> tuple[bool, int] | None:
        """The member to ask next for it, and whether for layers."""
        for layers in (False, True):
            others = [
                (self._last[each], each)
                for each, held in self._held.items()
                if held and self._may_be_asked(each) and (layers, each) not in want.asked
            ]
            if others:
                return layers, min(others)[1]
        return None
