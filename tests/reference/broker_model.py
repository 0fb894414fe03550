"""The protocol of docs/notes/broker.md as a model of explicit states, and a checker that visits every one of them.

One broker, two or three members, one or two pages. A step is one thing that one party does: it takes one message out of a
socket, begins or ends a pass, zeroes a page, sees that a socket has ended, is killed. `explore` takes every step in every order.

What is real is modelled. A socket keeps order and loses nothing until it breaks. When it breaks, each side may have read any
first part of what was sent; the rest is *late*: it may be read at any time from then on, even behind a new connection, any number
of times, or never. The broker's queue dies with the broker, a member's with the member. A killed member's socket ends before its
process does, and its device works until the process has ended. A stopped member does nothing, but its device goes on.

`Rules` are the rules of the protocol, each of which can be left out: then `explore` has to find what goes wrong.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ["Found", "Limits", "Rules", "explore"]

JOIN, WANT, DRAINED, KEEP, WELCOME, GRANT, RECALL, UNMET = (
    *("JOIN", "WANT", "DRAINED", "KEEP"),  # to the broker
    *("WELCOME", "GRANT", "RECALL", "UNMET"),  # to a member
)
NEW, ALIVE, STOPPED, DYING, DEAD = range(5)
APART, JOINING, JOINED = range(3)
NOBODY, UNKNOWN = -1, -2
ZEROES = -1
BEGINS_PASS, ENDS_PASS = "begins a pass", "ends its pass"

Message = tuple[Any, ...]
State = tuple[Any, ...]


@dataclass(frozen=True)
class Limits:
    """How much may happen in a run: everything else happens as often as it can. asks, gives: of all members together."""

    members: int = 2
    pages: int = 2
    asks: int = 2
    gives: int = 0  # pages that members hand back unasked
    kills: int = 0  # of members
    breaks: int = 0  # of a connection, both sides living on
    broker_kills: int = 0
    stops: int = 0  # of members, by SIGSTOP
    newcomer: bool = False  # the last member has not joined yet


@dataclass(frozen=True)
class Rules:
    """The rules of docs/notes/broker.md, by what they say. nothing_is_late: as it is built: one thread of each side reads, and
    only the newest connection, so what was not read of an earlier one is lost. Then four rules are needed no more
    (`Rules.built`)."""

    taker_zeroes: bool = True
    drained_behind_last_reader: bool = True
    donor_says_unzeroed: bool = True
    member_checks_connection: bool = True
    broker_checks_stamp: bool = True
    stamps_go_on_behind_claims: bool = True
    joins_are_numbered: bool = True
    dead_give_back: bool = True
    dead_means_process_ended: bool = True
    new_broker_waits_for_locks: bool = True
    lock_before_join: bool = True
    join_repeats_ask: bool = True
    join_forgets_recalls: bool = True
    every_recall_is_answered: bool = True
    passes_never_wait: bool = True
    nothing_is_late: bool = False

    @classmethod
    def without(cls, name: str) -> Rules:
        """All rules but one."""
        return cls(**{name: False})

    @classmethod
    def built(cls, **more: bool) -> Rules:
        """Those of `remap.broker`: messages have neither stamps nor join numbers."""
        needless = (
            "member_checks_connection",
            "broker_checks_stamp",
            "stamps_go_on_behind_claims",
            "joins_are_numbered",
        )
        return cls(nothing_is_late=True, **{**dict.fromkeys(needless, False), **more})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Of all rules that can be left out."""
        return tuple(each.name for each in fields(cls) if each.default is True)


class Found(NamedTuple):
    """depth: steps to the farthest state. quiet: states in which nobody waits. kinds: of steps and messages that occurred.
    problem: "" if every state is right; then `trace` is empty, else the shortest way there."""

    states: int
    steps: int
    depth: int
    quiet: int
    kinds: frozenset[str]
    problem: str
    trace: tuple[str, ...]


class Member:
    """One member. The pages are sets of bits; `stamps` are of the pages that it holds. use: passes may read them. fresh: to be
    zeroed first. drain: no new pass reads them. run: the pass on its device does."""

    __slots__ = ("drain", "fresh", "joins", "life", "link", "locked", "run", "serial", "stamps", "use", "want")

    def __init__(self, packed: tuple[Any, ...]) -> None:
        (self.life, self.link, self.locked, self.joins, self.use, self.fresh, self.drain, self.run) = packed[:8]
        self.want, self.serial = packed[8:10]
        self.stamps = list(packed[10])

    def packed(self) -> tuple[Any, ...]:
        held = self.use | self.fresh | self.drain
        return (
            *(self.life, self.link, self.locked, self.joins, self.use, self.fresh, self.drain, self.run),
            *(self.want, self.serial),
            tuple(stamp if held >> page & 1 else 0 for page, stamp in enumerate(self.stamps)),
        )

    @property
    def held(self) -> int:
        return self.use | self.fresh | self.drain

    @property
    def touched(self) -> int:
        """Pages that it or its device may read or write."""
        return self.use | self.fresh | self.drain | self.run


class Broker:
    """The ledger and what the broker knows of its members. last: whose bytes a page holds beside zeroes, NOBODY if that is not
    known. awaited: members that were there when it began, and have neither joined nor ended."""

    __slots__ = (
        "asked",
        "awaited",
        "gone",
        "joined",
        "joins",
        "kept",
        "last",
        "owner",
        "serials",
        "stamps",
        "top",
        "wants",
    )

    def __init__(self, packed: tuple[Any, ...]) -> None:
        (owner, stamps, last, top, joins, wants, serials) = packed[:7]
        self.owner, self.stamps, self.last, self.top = list(owner), list(stamps), list(last), list(top)
        self.joins, self.wants, self.serials = list(joins), list(wants), list(serials)
        self.joined, self.asked, self.kept, self.awaited, self.gone = packed[7:]

    def packed(self) -> tuple[Any, ...]:
        return (
            *map(tuple, (self.owner, self.stamps, self.last, self.top, self.joins, self.wants, self.serials)),
            *(self.joined, self.asked, self.kept, self.awaited, self.gone),
        )


class Line:
    """A member's connection. up, down: unread in its two directions. late_up, late_down: unread in earlier ones."""

    __slots__ = ("down", "late_down", "late_up", "up", "whole")

    def __init__(self, packed: tuple[Any, ...]) -> None:
        self.whole, self.up, self.down, self.late_up, self.late_down = packed

    def packed(self) -> tuple[Any, ...]:
        return (self.whole, self.up, self.down, self.late_up, self.late_down)


T = TypeVar("T", Member, Line)


class Each(Generic[T]):
    """Members or lines, each unpacked when it is looked at: a step touches one or two."""

    __slots__ = ("_kind", "_made", "_packed")

    def __init__(self, packed: tuple[tuple[Any, ...], ...], kind: type[T]) -> None:
        self._packed, self._kind = packed, kind
        self._made: list[T | None] = [None] * len(packed)

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, number: int) -> T:
        found = self._made[number]
        if found is None:
            if number >= len(self._packed):
                raise IndexError(number)
            found = self._made[number] = self._kind(self._packed[number])
        return found

    def __iter__(self) -> Iterator[T]:
        return map(self.__getitem__, range(len(self._packed)))

    def packed(self) -> tuple[tuple[Any, ...], ...]:
        return tuple([old if new is None else new.packed() for old, new in zip(self._packed, self._made)])


def bits(mask: int) -> Iterator[int]:
    """The pages in a set of bits."""
    page = 0
    while mask:
        if mask & 1:
            yield page
        mask >>= 1
        page += 1


class World:
    """One state, to be changed. left: what of `Limits` may still happen: asks, gives, kills, breaks, broker_kills, stops."""

    __slots__ = ("_broker", "_packed_broker", "bytes", "left", "lines", "members", "rules")

    def __init__(self, state: State, rules: Rules) -> None:
        self._packed_broker, members, lines, held, left = state
        self._broker: Broker | None = None
        self.members, self.lines = Each(members, Member), Each(lines, Line)
        self.bytes, self.left = list(held), list(left)
        self.rules = rules

    @property
    def broker(self) -> Broker | None:
        """Unpacked when it is looked at. None: there is none."""
        if self._broker is None and self._packed_broker is not None:
            self._broker = Broker(self._packed_broker)
        return self._broker

    def packed(self) -> State:
        return (
            self._packed_broker if self._broker is None else self._broker.packed(),
            self.members.packed(),
            self.lines.packed(),
            tuple(self.bytes),
            tuple(self.left),
        )

    # -- sending -------------------------------------------------------------------------------------------------

    def tell_broker(self, number: int, *message: Any) -> None:
        line = self.lines[number]
        if line.whole:
            line.up = (*line.up, message)

    def tell_member(self, number: int, kind: str, *values: Any) -> None:
        """Every message to a member names the join that made its connection."""
        line, member = self.lines[number], self.members[number]
        if line.whole and member.life in (ALIVE, STOPPED):
            assert self.broker is not None
            if self.rules.nothing_is_late and self.broker.joins[number] != member.joins:
                return  # into the connection before
            line.down = (*line.down, (kind, self.broker.joins[number], *values))

    # -- the broker ----------------------------------------------------------------------------------------------

    def broker_reads(self, number: int, message: Message) -> None:
        broker, rules = self.broker, self.rules
        assert broker is not None
        kind = message[0]
        if broker.gone >> number & 1:
            return
        if kind == JOIN:
            self._join(number, *message[1:])
        elif kind == WANT:
            (serial,) = message[1:]
            if serial > broker.serials[number]:
                broker.serials[number] = broker.wants[number] = serial
        else:
            page, stamp = message[1:3]
            if broker.owner[page] == number and (broker.stamps[page] == stamp or not rules.broker_checks_stamp):
                broker.asked &= ~(1 << page)
                if kind == DRAINED:
                    broker.owner[page] = NOBODY
                    broker.last[page] = number if message[3] else NOBODY
                    broker.kept &= ~(1 << page)
                else:
                    broker.kept |= 1 << page
        self.broker_decides()

    def _join(self, number: int, join: int, claims: tuple[int, ...], want: int, serial: int) -> None:
        broker, rules = self.broker, self.rules
        assert broker is not None
        if join <= broker.joins[number] and rules.joins_are_numbered:
            return
        broker.joins[number] = join
        broker.joined |= 1 << number
        for page, stamp in enumerate(claims):
            if stamp and broker.owner[page] in (UNKNOWN, number):
                broker.owner[page], broker.stamps[page] = number, stamp
                if rules.stamps_go_on_behind_claims:
                    broker.top[page] = max(broker.top[page], stamp)
            elif stamp:
                raise Wrong(f"member {number} claims page {page}, which is not its own")
            elif broker.owner[page] == number:  # granted and never heard of, or drained
                broker.owner[page], broker.last[page] = NOBODY, NOBODY
            else:
                continue
            if rules.join_forgets_recalls:
                broker.asked &= ~(1 << page)
                broker.kept &= ~(1 << page)
        broker.awaited &= ~(1 << number)
        broker.serials[number] = max(serial, broker.serials[number])
        broker.wants[number] = want
        self.tell_member(number, WELCOME)

    def broker_sees_end_of_file(self, number: int) -> None:
        broker = self.broker
        assert broker is not None
        broker.joined &= ~(1 << number)
        broker.wants[number] = 0
        if self.rules.nothing_is_late and not self.lines[number].whole:
            self.lines[number].up = ()
        for page, owner in enumerate(broker.owner):
            if owner == number:
                broker.asked &= ~(1 << page)
        if not self.rules.dead_means_process_ended:
            self._take_back(number)
        self.broker_decides()

    def broker_sees_process_end(self, number: int) -> None:
        broker, line = self.broker, self.lines[number]
        assert broker is not None
        broker.gone |= 1 << number
        broker.joined &= ~(1 << number)
        broker.awaited &= ~(1 << number)
        broker.wants[number] = 0
        line.up = line.late_up = ()
        if self.rules.dead_give_back:
            self._take_back(number)
        self.broker_decides()

    def _take_back(self, number: int) -> None:
        broker = self.broker
        assert broker is not None
        for page, owner in enumerate(broker.owner):
            if owner == number:
                broker.owner[page], broker.last[page] = NOBODY, NOBODY
                broker.asked &= ~(1 << page)
                broker.kept &= ~(1 << page)

    def broker_decides(self) -> None:
        """Behind each event: answers what can be answered, and asks pages back for the rest."""
        broker = self.broker
        assert broker is not None
        if not broker.awaited or not self.rules.new_broker_waits_for_locks:
            broker.owner = [NOBODY if owner == UNKNOWN else owner for owner in broker.owner]
        for number, want in enumerate(broker.wants):
            if want:
                self._serve(broker, number, want)
        if not any(broker.wants):
            broker.kept = 0

    def _serve(self, broker: Broker, number: int, want: int) -> None:
        if NOBODY in broker.owner:
            page = broker.owner.index(NOBODY)
            broker.top[page] += 1
            dirty = broker.last[page] != number
            broker.owner[page], broker.stamps[page], broker.last[page] = number, broker.top[page], NOBODY
            broker.wants[number] = 0
            self.tell_member(number, GRANT, page, broker.stamps[page], dirty, want)
            return
        waiting = sum(1 for each in broker.wants if each)
        if broker.asked.bit_count() >= waiting:
            return
        for page, owner in enumerate(broker.owner):
            free_to_ask = not (broker.asked | broker.kept) >> page & 1
            if owner not in (number, UNKNOWN) and broker.joined >> owner & 1 and free_to_ask:
                broker.asked |= 1 << page
                self.tell_member(owner, RECALL, page, broker.stamps[page])
                return
        if not broker.asked and not broker.awaited:
            self._unmet(broker, number, want)

    def _unmet(self, broker: Broker, number: int, want: int) -> None:
        broker.wants[number] = 0
        self.tell_member(number, UNMET, want)

    def deadline_passes(self) -> None:
        """The broker waits no longer for answers to its recalls, nor for members that have not rejoined."""
        broker = self.broker
        assert broker is not None
        for number, want in enumerate(broker.wants):
            if want:
                self._unmet(broker, number, want)
        broker.asked = broker.kept = 0

    def broker_begins(self) -> None:
        pages, count = len(self.bytes), len(self.members)
        awaited = sum(1 << n for n, each in enumerate(self.members) if each.locked and each.life not in (NEW, DEAD))
        gone = sum(1 << n for n, each in enumerate(self.members) if each.life == DEAD)
        nothing = (0,) * count
        first = ((UNKNOWN,) * pages, (0,) * pages, (NOBODY,) * pages, (0,) * pages, nothing, nothing, nothing)
        self._broker = Broker((*first, 0, 0, 0, awaited, gone))
        self.broker_decides()

    def broker_killed(self) -> None:
        self._broker = self._packed_broker = None
        for line in self.lines:
            line.whole, line.up, line.late_up = False, (), ()

    # -- members -------------------------------------------------------------------------------------------------

    def member_joins(self, number: int) -> None:
        member, line = self.members[number], self.lines[number]
        member.joins += 1
        member.link = JOINING
        line.whole = True
        claims = tuple(stamp if member.held >> page & 1 else 0 for page, stamp in enumerate(member.stamps))
        want = member.want if self.rules.join_repeats_ask else 0
        self.tell_broker(number, JOIN, member.joins, claims, want, member.serial)

    def member_reads(self, number: int, message: Message, keeps: bool = False) -> None:
        """keeps: it answers a recall with KEEP."""
        member, rules = self.members[number], self.rules
        kind, join = message[:2]
        if kind == WELCOME:
            if member.link == JOINING and join == member.joins:
                member.link, member.locked = JOINED, True
            return
        if (member.link != JOINED or join != member.joins) and (kind != GRANT or rules.member_checks_connection):
            return
        if kind == UNMET:
            if message[2] == member.want:
                member.want = 0
            return
        page, stamp = message[2:4]
        bit = 1 << page
        if kind == GRANT:
            dirty, serial = message[4:]
            member.stamps[page] = stamp
            if dirty and rules.taker_zeroes:
                member.fresh |= bit
            else:
                member.use |= bit
            if serial == member.want:
                member.want = 0
        elif member.stamps[page] == stamp and (member.use | member.fresh) & bit:
            if keeps:
                if rules.every_recall_is_answered:
                    self.tell_broker(number, KEEP, page, stamp)
            else:
                self.member_gives_up(number, page)

    def member_gives_up(self, number: int, page: int) -> None:
        """No new pass reads it. Nobody has read it yet if it is still to be zeroed."""
        member, bit = self.members[number], 1 << page
        if member.fresh & bit:
            member.fresh &= ~bit
            self.tell_broker(number, DRAINED, page, member.stamps[page], not self.rules.donor_says_unzeroed)
        else:
            member.use &= ~bit
            member.drain |= bit

    def member_drained(self, number: int, page: int) -> None:
        member = self.members[number]
        member.drain &= ~(1 << page)
        self.tell_broker(number, DRAINED, page, member.stamps[page], True)

    def member_begins_pass(self, number: int) -> None:
        member = self.members[number]
        member.run = member.use
        for page in bits(member.use):
            if self.bytes[page] not in (ZEROES, number):
                raise Wrong(f"member {number} reads bytes of member {self.bytes[page]} in page {page}")
            self.bytes[page] = number

    def member_zeroes(self, number: int, page: int) -> None:
        member = self.members[number]
        member.fresh &= ~(1 << page)
        member.use |= 1 << page
        self.bytes[page] = ZEROES

    def member_sees_end_of_file(self, number: int) -> None:
        member, line = self.members[number], self.lines[number]
        member.link = APART
        if not (
            self.rules.member_checks_connection or self.rules.nothing_is_late
        ):  # else none is late, or all are ignored
            line.late_down = merged(line.late_down, line.down)
        line.down = ()

    def connection_breaks(self, number: int) -> None:
        line = self.lines[number]
        line.whole = False
        if not self.rules.nothing_is_late:
            line.late_up = merged(line.late_up, line.up)
            line.up = ()

    def process_ends(self, number: int) -> None:
        member, line = self.members[number], self.lines[number]
        member.life, member.locked, member.link, member.want = DEAD, False, APART, 0
        member.use = member.fresh = member.drain = member.run = 0
        line.down = line.late_down = ()

    # -- what has to hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """In every state. Raises Wrong."""
        seen = 0
        for number, member in enumerate(self.members):
            if seen & member.touched:
                raise Wrong(f"a page has two owners; member {number} is one of them")
            seen |= member.touched
        broker = self.broker
        if broker is None:
            return
        for page, owner in enumerate(broker.owner):
            if owner == NOBODY and seen >> page & 1:
                raise Wrong(f"page {page} is free in the ledger, and a member has it")
        for number, (member, line) in enumerate(zip(self.members, self.lines)):
            if member.life not in (ALIVE, STOPPED) or member.link != JOINED or not line.whole:
                continue
            for page, owner in enumerate(broker.owner):
                stamp = broker.stamps[page]
                on_its_way = sum(1 for each in line.down if each[0] == GRANT and each[2:4] == (page, stamp))
                on_its_way += sum(1 for each in line.up if each[0] == DRAINED and each[1:3] == (page, stamp))
                holds = member.held >> page & 1 and member.stamps[page] == stamp
                if (owner == number) != bool(holds or on_its_way) or holds + on_its_way > 1:
                    raise Wrong(f"ledger and member {number} disagree about page {page}")

    def quiet(self) -> bool:
        """Whether nobody waits for anything: all asks are answered, everybody has joined, no page is on its way. Members that
        are stopped are left out. Raises Wrong if a page is lost."""
        broker = self.broker
        if broker is None or any(broker.wants):
            return False
        for number, (member, line) in enumerate(zip(self.members, self.lines)):
            if member.life == DYING or (member.life == DEAD and not broker.gone >> number & 1):
                return False
            if member.life == ALIVE and (
                member.link != JOINED
                or (line.up or line.down or not line.whole)
                or (member.want or member.fresh or member.drain)
            ):
                return False
        stopped = sum(1 << n for n, each in enumerate(self.members) if each.life == STOPPED)
        if broker.awaited & ~stopped:
            return False
        for page, owner in enumerate(broker.owner):
            if owner == NOBODY or (owner == UNKNOWN and broker.awaited):
                continue
            member = self.members[owner]
            if owner == UNKNOWN or not (member.held >> page & 1 or member.life == STOPPED):
                raise Wrong(f"page {page} is lost: nobody has it, and it is not free")
        return True


class Wrong(Exception):
    """What a state, or a step, has shown to be wrong."""


def merged(late: tuple[Message, ...], more: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages that may be read at any time: their order does not matter, nor how many are alike."""
    return tuple(sorted({*late, *more}, key=repr)) if more else late


Name = tuple[Any, ...]
Step = tuple[Name, bool, Any]
"""A name, whose words are only joined for a trace; whether it leads on: it is sure to happen, nothing new begins and nothing
goes wrong by it; what it does to a World."""


def steps(world: World) -> Iterator[Step]:
    """All that may happen next."""
    asks, gives, kills, breaks, broker_kills, stops = world.left
    broker, rules = world.broker, world.rules
    stopped = any(each.life == STOPPED for each in world.members)
    for n, (member, line) in enumerate(zip(world.members, world.lines)):
        life = member.life
        if broker is not None:
            if line.up:
                yield ("broker reads", line.up[0], "of", n), True, lambda w, n=n: _broker_reads_next(w, n)
            elif broker.joined >> n & 1 and (not line.whole or life >= DYING):
                yield ("broker sees the end of the socket of", n), True, lambda w, n=n: w.broker_sees_end_of_file(n)
            if rules.nothing_is_late and line.up and not line.whole:
                yield ("broker sees the end of the socket of", n), False, lambda w, n=n: w.broker_sees_end_of_file(n)
            if rules.nothing_is_late and any(each[0] == JOIN for each in line.up[1:]):
                yield ("broker closes the connection before of", n), False, lambda w, n=n: _drop_before(w, n)
            for message in line.late_up:
                yield ("broker reads late", message, "of", n), False, lambda w, n=n, m=message: w.broker_reads(n, m)
            if life == DEAD and not broker.gone >> n & 1:
                yield ("broker sees the end of", n), True, lambda w, n=n: w.broker_sees_process_end(n)
        if life == DYING:
            yield (n, "ends"), True, lambda w, n=n: w.process_ends(n)
        if life in (ALIVE, STOPPED):
            if member.run:
                yield (n, ENDS_PASS), True, lambda w, n=n: setattr(w.members[n], "run", 0)
            if kills:
                yield (n, "is killed"), False, lambda w, n=n: _spend(w, 2, setattr, w.members[n], "life", DYING)
            if breaks and line.whole:
                yield ("connection breaks of", n), False, lambda w, n=n: _spend(w, 3, w.connection_breaks, n)
        if life == STOPPED:
            yield (n, "goes on"), False, lambda w, n=n: setattr(w.members[n], "life", ALIVE)
        if life == NEW:
            yield (n, "begins"), False, lambda w, n=n: _begin(w, n)
        if life != ALIVE:
            continue
        if stops:
            yield (n, "is stopped"), False, lambda w, n=n: _spend(w, 5, setattr, w.members[n], "life", STOPPED)
        if member.link == APART:
            if broker is not None:
                yield (n, "joins"), True, lambda w, n=n: w.member_joins(n)
        elif not line.whole:
            yield (n, "sees the end of its socket"), True, lambda w, n=n: w.member_sees_end_of_file(n)
        for late, message in (*((False, each) for each in line.down[:1]), *((True, each) for each in line.late_down)):
            for keeps in (False, True) if message[0] == RECALL else (False,):
                said = (n, "reads late" if late else "reads", message, *(("and keeps",) if keeps else ()))
                yield said, not late, lambda w, n=n, m=message, k=keeps, late=late: _member_reads(w, n, m, k, late)
        for page in bits(member.fresh):
            yield (n, "zeroes page", page), True, lambda w, n=n, p=page: w.member_zeroes(n, p)
        if member.link == JOINED:
            reading = member.run if rules.drained_behind_last_reader else 0
            for page in bits(member.drain & ~reading):
                yield (n, "has drained page", page), True, lambda w, n=n, p=page: w.member_drained(n, p)
            if asks and not member.want:
                yield (n, "asks"), False, lambda w, n=n: _spend(w, 0, _ask, w, n)
        if member.use and not member.run and (rules.passes_never_wait or not member.drain):
            yield (n, BEGINS_PASS), False, lambda w, n=n: w.member_begins_pass(n)
        if gives and member.link == JOINED:
            for page in bits(member.use | member.fresh):
                yield (n, "gives up page", page), False, lambda w, n=n, p=page: _spend(w, 1, w.member_gives_up, n, p)
    if broker is None:
        yield ("a broker begins",), True, lambda w: w.broker_begins()
    else:
        if broker_kills:
            yield ("the broker is killed",), False, lambda w: _spend(w, 4, w.broker_killed)
        if any(broker.wants) and (broker.asked or broker.awaited):
            yield ("the deadline passes",), stopped, lambda w: w.deadline_passes()


def _spend(world: World, which: int, body: Any, *arguments: Any) -> None:
    world.left[which] -= 1
    body(*arguments)


def _ask(world: World, number: int) -> None:
    member = world.members[number]
    member.serial += 1
    member.want = member.serial
    world.tell_broker(number, WANT, member.serial)


def _begin(world: World, number: int) -> None:
    member = world.members[number]
    member.life, member.locked = ALIVE, world.rules.lock_before_join
    member.serial = member.want = 1  # its JOIN asks for what it needs to begin


def _broker_reads_next(world: World, number: int) -> None:
    line = world.lines[number]
    message, line.up = line.up[0], line.up[1:]
    world.broker_reads(number, message)


def _drop_before(world: World, number: int) -> None:
    """What was sent before the last Join, and not read."""
    line = world.lines[number]
    line.up = line.up[max(at for at, each in enumerate(line.up) if each[0] == JOIN) :]


def _member_reads(world: World, number: int, message: Message, keeps: bool, late: bool) -> None:
    if not late:
        world.lines[number].down = world.lines[number].down[1:]
    world.member_reads(number, message, keeps)


def first_state(limits: Limits) -> State:
    """Everybody but a newcomer has joined; the first member has all pages, and has used them."""
    count, pages = limits.members, limits.pages
    everything, ones = (1 << pages) - 1, (1,) * pages
    members = []
    for number in range(count):
        if limits.newcomer and number == count - 1:
            members.append((NEW, APART, False, 0, 0, 0, 0, 0, 0, 0, (0,) * pages))
        else:
            use = 0 if number else everything
            members.append((ALIVE, JOINED, True, 1, use, 0, 0, 0, 0, 0, (0,) * pages if number else ones))
    joined = sum(1 << n for n, each in enumerate(members) if each[0] == ALIVE)
    nothing = (0,) * count
    joins = tuple(each[3] for each in members)
    broker = ((0,) * pages, ones, (NOBODY,) * pages, ones, joins, nothing, nothing, joined, 0, 0, 0, 0)
    lines = tuple((each[0] == ALIVE, (), (), (), ()) for each in members)
    left = (limits.asks, limits.gives, limits.kills, limits.breaks, limits.broker_kills, limits.stops)
    return (broker, tuple(members), lines, (0,) * pages, left)


def explore(limits: Limits, rules: Rules | None = None, most_states: int = 1_000_000) -> Found:
    """Every state that can be reached, breadth first, until one is wrong. Raises MemoryError beyond `most_states`."""
    collects = gc.isenabled()
    gc.disable()  # nothing here is a circle, and looking for some would take a third of the time
    try:
        return _explore(limits, rules or Rules(), most_states)
    finally:
        if collects:
            gc.enable()


def _explore(limits: Limits, rules: Rules, most_states: int) -> Found:
    first = first_state(limits)
    number_of = {first: 0}
    states, depth_of = [first], [0]
    cause: list[tuple[int, Name]] = [(-1, ())]
    before: list[list[int]] = [[]]  # by steps that lead on
    quiet: list[int] = []
    names: set[Name] = set()
    count = at = 0

    def trace(state: int, last: Name = ()) -> tuple[str, ...]:
        found = [last] if last else []
        while state > 0:
            state, said = cause[state]
            found.append(said)
        return tuple(" ".join(map(str, each)) for each in reversed(found))

    def result(problem: str, way: tuple[str, ...]) -> Found:
        words = (word for name in names for word in name if not isinstance(word, int))
        kinds = frozenset(word if isinstance(word, str) else word[0] for word in words)
        return Found(len(states), count, depth_of[-1], len(quiet), kinds, problem, way)

    while at < len(states):
        state = states[at]
        world = World(state, rules)
        try:
            world.check()
            if world.quiet():
                quiet.append(at)
        except Wrong as wrong:
            return result(str(wrong), trace(at))
        may_pass = set()
        for name, leads_on, do in steps(world):
            if name[-1] in (BEGINS_PASS, ENDS_PASS):
                may_pass.add(name[0])
            after = World(state, rules)
            try:
                do(after)
            except Wrong as wrong:
                return result(str(wrong), trace(at, name))
            count += 1
            names.add(name)
            packed = after.packed()
            number = number_of.get(packed)
            if number is None:
                number = number_of[packed] = len(states)
                if number >= most_states:
                    raise MemoryError(f"more than {most_states} states of {limits}")
                states.append(packed)
                cause.append((at, name))
                depth_of.append(depth_of[at] + 1)
                before.append([])
            if leads_on and number != at:
                before[number].append(at)
        for number, member in enumerate(world.members):
            if member.life == ALIVE and (member.use or member.run) and number not in may_pass:
                return result(f"member {number} is kept from its next pass", trace(at))
        at += 1
    calm = bytearray(len(states))
    front = list(quiet)
    for each in front:
        calm[each] = 1
    while front:
        for earlier in before[front.pop()]:
            if not calm[earlier]:
                calm[earlier] = 1
                front.append(earlier)
    stuck = calm.find(0)
    if stuck >= 0:
        return result("nothing leads on to a state in which all asks are answered", trace(stuck))
    return result("", ())
