# SPDX-License-Identifier: Apache-2.0
"""Pages that other processes have: brought in when they are wanted here, handed out when others want them and they can be spared.

    a step lacks pages                -> bring: ask the broker, which answers with what is free; the rest may come later
    attach, activate lack some        -> supply: ask, and wait for what others can spare without the session's lock (`Lacking`)
    some will be lacking soon         -> expect: asks, and waits for nothing; load_expected, give_unused
    others lack pages                 -> give_up: free pages, then unused KV of the tenants, as `UnusedKV` counts it; asked for
                                         layers, those of tenants that serve no pass, as `InactiveLayers` counts them
    they lack some for their layers   -> give_for_good: layers of inactive tenants, down to nothing (cold.py)
    who serves was in their way       -> pass_over: `unmet` says so; a tenant whose turn is over gives its layers (give_turn)
    they lack some still              -> meet: KV of paused tenants; live blocks once their engines have copied them to host
                                         memory, for which a step's report asks (`StepReport.wanted`)
    a tenant has given all up         -> give_spare
    they came later than the call     -> take_arrived: by the next step, or the membership's thread, whichever is first
    a tenant is to serve again        -> fetch, serves: its layers' pages are called by their numbers, and what comes is theirs
    others call such pages            -> give_named, return_called: live blocks move out of them first

Called with the session's lock held, unless a method says otherwise. Pages that come in are free, of unknown bytes: the core
zeroes them for the tenant that gets them. Pages that go out were free before, so nothing here reads them: the host computes no
pass of the tenants whose change has freed them, and the re-pointing worker is done with the regions that showed them, or leaves
these until their tenant serves again, and passes wait for that.

Layers whose pages others have are lent, as between the tenants of one process: they stream through their tenant's ring until they
are home again. A page that was called and does not come (live blocks fill it, its holder hangs) costs no more than that.

Blocks move only within a step, whose report tells the engines. So what comes or is called between steps moves none: layers come
home when no block is in their way, and pages in which live blocks lie are given at the next step.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from remap.errors import OutOfBlocks
from remap.memory.activate import certify
from remap.memory.apply import Changes
from remap.memory.cold import Cold
from remap.memory.entries import Entries, Entry
from remap.memory.lend import Lending, Receiver
from remap.memory.offers import Offers
from remap.memory.state import TenantState
from remap.memory.trace import Trace
from remap.memory.view import count_free

__all__ = ["Lacking", "MembershipCalls", "OtherProcesses", "UnmetWant"]

IDLE_S = 1.0
"""A tenant without a pass for that long counts as inactive."""
AGAIN_S, AGAIN_TIMES = 0.02, 20
"""After a want that was not met whole the broker is not asked again for `AGAIN_S`, nor for `AGAIN_TIMES` times as long as its
answer took, unless all has come by then. What others give comes by itself, and a broker that hangs takes a twentieth of the
steps' time at most."""
CALL_S = 0.25
"""How long an activation waits for pages that it has called, and after how long those that have not come are called again."""

CALLED_S = 1.0
"""For how long a page that others have called is theirs as soon as no live block lies in it; and for how long what others have
asked for is given when an engine frees KV for it."""


FORGET_S = 2.0
"""Who waits for pages for its layers asks again many times a second: one that has not for so long waits no more."""


class MembershipCalls(Protocol):
    """`remap.broker.member.Membership`, as this uses it."""

    pages: int
    problem: str
    held: set[int]
    borrowed: set[int]
    ahead: set[int]
    stirs: bool

    @property
    def met(self) -> bool: ...
    @property
    def silence(self) -> str: ...
    def want(self, pages: int, *, keeps: bool = False) -> list[int]: ...
    def want_ahead(self, pages: int, *, keeps: bool) -> bool: ...
    def ask(self, pages: int) -> bool: ...
    def await_answer(self) -> list[int]: ...
    def forgo(self) -> None: ...
    def end_asking(self) -> None: ...
    def arrived(self) -> list[int]: ...
    def let_read(self) -> None: ...
    def give(self, pages: Sequence[int], *, lent: bool = False) -> None: ...
    def give_all(self, pages: Sequence[int]) -> None: ...
    def call(self, pages: Sequence[int], *, gently: bool = False) -> list[int]: ...
    def await_call(self, calls: Sequence[int], seconds: float) -> None: ...
    def disown(self, pages: Sequence[int]) -> None: ...
    def recheck(self) -> None: ...
    def prepare(self) -> None: ...


class Lacking(Exception):
    """Pages were asked for, for good: nothing has changed, and the call is made again when others have answered. No user sees
    it."""


@dataclass
class _Supply:
    """Of the call of this thread that may wait: the tenant that lacks pages, which gives none meanwhile; how many pages it has
    asked for, and not looked for yet; what came of these; and whether others have no more."""

    name: str
    thread: int
    asked: int = 0
    came: list[int] = field(default_factory=list)
    over: bool = False


class _Only(NamedTuple):
    """A receiver of these pages and no others."""

    index_of: Container[int]
    number: None = None


class _Lack(NamedTuple):
    """What others have asked for, at this moment, and not got whole. lasting: they keep it for good."""

    pages: int
    since: float
    lasting: bool


class UnmetWant(NamedTuple):
    """Another process asks for pages for its layers again and again, and tenants here that serve keep them. pages: that it has
    not got; since_s, asked_s: when it asked first, and last (`time.monotonic`)."""

    pages: int
    since_s: float
    asked_s: float


@dataclass(frozen=True)
class _Lasting:
    """A receiver of pages that it may keep for good: those that no other session has lent. As a container, these."""

    borrowed: Container[int]
    number: int = -2

    @property
    def index_of(self) -> Container[int]:
        return self

    def __contains__(self, page: object) -> bool:
        return page not in self.borrowed


class OtherProcesses:
    """One session's. number, index_of, blocks_per_page: as a receiver of pages: any will do, and its blocks are pages."""

    number = -1
    blocks_per_page = 1.0

    def __init__(
        self,
        tenants: Mapping[str, TenantState],
        changes: Changes,
        lending: Lending,
        offers: Offers,
        membership: MembershipCalls,
        clock: Callable[[], float],
        trace: Trace,
    ) -> None:
        self._tenants = tenants
        self._changes = changes
        self._lending = lending
        self._offers = offers
        self._membership = membership
        self._clock = clock
        self._trace = trace
        self._again_s = 0.0
        self._lasting = _Lasting(membership.borrowed)
        self._lent: set[int] = set()  # pages that were given as lent, and may still be
        self._called: dict[int, float] = {}  # page that others have called, and that was not given yet -> when
        self.lacks: _Lack | None = None  # that paused tenants may still give, at the end of a step (`meet`)
        # Pages that others lack, and that a tenant inside a pass can spare behind it; and whether ahead of need.
        self._held_up = 0, False
        self._stepped = False  # since a step was last waited for
        self._unmet: UnmetWant | None = None  # a value, swapped whole: an engine's thread looks at it without the lock
        self._expecting: dict[str, TenantState] = {}  # tenants whose layers are to come ahead of their activation
        self._looked: object = None  # the `Changes.key` of the last look
        self._gently: set[int] = set()  # numbers of tenants whose layers come home though they serve no pass
        self._rechecked = False  # pages may come in twice
        self._supply: _Supply | None = None
        self.index_of: Container[int] = range(membership.pages)
        self.borrowed: Container[int] = membership.borrowed

    def bring(self, receiver: TenantState, blocks: int) -> bool:
        """Ask for pages for `blocks` blocks of the receiver. Returns whether any that it can use have come."""
        now = time.monotonic()
        if now < self._again_s:
            return False
        wanted = -(-blocks * receiver.kv.spec.block_bytes // self._changes.arena.page_bytes) + 1
        try:
            began = self._trace.now()
            got = self._membership.want(wanted)
            self._trace.add("ask", receiver.name, began, self.problem, wanted_pages=wanted, got_pages=len(got))
            if len(got) < wanted:
                answered = time.monotonic()
                self._again_s = answered + max(AGAIN_S, AGAIN_TIMES * (answered - now))
            places = receiver.index_of
            useful = [page for page in got if page in places]
            if len(useful) < len(got):
                self._give([page for page in got if page not in places])
            self.take_in(useful)
        except BaseException:  # an interrupt, perhaps in front of `take_in`
            self._membership.recheck()
            raise
        return bool(useful)

    @contextmanager
    def supplying(self, name: str) -> Iterator[Callable[[], None]]:
        """While a call of this thread for the tenant `name` may raise `Lacking`: what then waits, without the session's lock."""
        self._supply = supply = _Supply(name, threading.get_ident())

        def await_supply() -> None:
            supply.came += self._membership.await_answer()

        try:
            yield await_supply
            self._membership.forgo()  # what others did not give was to be had here
        finally:
            self._supply = None
            self._membership.end_asking()
            if supply.came:  # it was interrupted, or lacks none any more
                self._membership.recheck()

    def supply(self, pages: int) -> str:
        """`pages` pages are lacking: ask for them, and raise `Lacking`; or take in what has come of these, and return why no
        broker answers; "": one has. Others are asked again only if all has come, and did not suit. In a call that cannot wait:
        what is free at once."""
        supply = self._supply
        came: list[int] = []
        try:
            if supply is None or supply.thread != threading.get_ident():
                came = self._membership.want(pages, keeps=True)
            elif supply.asked:
                came, supply.came = supply.came, []
                supply.over, supply.asked = len(came) < supply.asked, 0
            elif not supply.over and self._membership.ask(pages):
                supply.asked = pages
                raise Lacking
            self.take_in(came)
        except Lacking:
            raise
        except BaseException:
            self._membership.recheck()
            raise
        return self.problem

    def expect(self, tenant: TenantState, layers: int, blocks: int) -> None:
        """Ask for what nobody needs elsewhere: `layers` pages for layers of the tenant, which then load, and pages for so many
        blocks more than fit into free ones here. Waits for nothing. What nobody has used after a while goes back."""
        page = self._changes.arena.page_bytes
        more = max(0, -(-blocks * tenant.kv.spec.block_bytes // page) - count_free(self._changes, tenant))
        if layers + more <= 0:
            return
        if layers:
            self._expecting[tenant.name] = tenant
        began = self._trace.now()
        if self._membership.want_ahead(layers + more, keeps=layers > 0):
            self._trace.add("ask", tenant.name, began, "ahead of need", wanted_pages=layers + more)

    @property
    def expects(self) -> bool:
        """Whether `load_expected` has something to do."""
        return bool(self._expecting)

    def load_expected(self, cold: Cold) -> None:
        """Pages have come ahead of need: layers that they are for begin to load."""
        for name, tenant in list(self._expecting.items()):
            if self._tenants.get(name) is not tenant or tenant.active or not tenant.pages.cold:
                del self._expecting[name]
            elif not tenant.busy and cold.expect(tenant)[0]:
                self._changes.wake(tenant)

    def give_unused(self) -> None:
        """What came ahead of need, and is free still, goes back."""
        ahead = set(self._membership.ahead)
        self._membership.ahead.difference_update(ahead)
        self._expecting.clear()
        self._hand_out([page for page in self._changes.draft.free_pages() if page in ahead])

    @property
    def problem(self) -> str:
        """Why no broker answers now; "": one does."""
        return self._membership.problem or self._membership.silence

    def recheck(self) -> None:
        """An interrupt may have lost pages on their way here, or out: those that the broker counts as the session's come in."""
        self._rechecked = True
        self.take_in(sorted(self._membership.held))

    def take_in(self, pages: Sequence[int]) -> None:
        """These have been granted. On an error, or an interrupt, those that did not come in are given back."""
        if self._rechecked and pages:
            owners, held = self._changes.arena.owners(), self._membership.held
            pages = [page for page in pages if page in held and owners[page].name == "outside"]
        if not pages:
            return
        try:
            self._changes.pass_on(pages, out=False)
        except BaseException:
            here = set(self._changes.draft.free_pages())
            self._give([page for page in pages if page not in here])
            raise
        self._trace.moment("granted", "", pages=len(pages))
        self._lent.difference_update(pages)
        self._look()

    def take_arrived(self) -> None:
        """Take in what has come since it was wanted."""
        try:
            pages = self._membership.arrived()
            if pages and self._membership.met:
                self._again_s = 0.0
            self.take_in(pages)
        except BaseException:
            self._membership.recheck()
            raise

    def hand_back(self, pages: Sequence[int]) -> None:
        """The arena is closed, and had these."""
        self._membership.disown(sorted(self._lent))
        self._membership.give_all([*pages, *self._membership.arrived()])

    def forget_gone(self) -> None:
        """A tenant has gone: this session will not call what only its layers lent."""
        pages = sorted(self._lent.difference(*(tenant.pages.lent for tenant in self._tenants.values())))
        if pages:
            self._membership.disown(pages)
            self._lent.difference_update(pages)

    # -- others want some ------------------------------------------------------------------------------------------

    def give_up(self, pages: int, *, layers: bool = False, ahead: bool = False) -> None:
        """Others want `pages` pages. layers: of tenants that serve no pass, too. Pages that this session has borrowed come
        second: a member that wants some for good, as it does where layers are not asked for, has no use for these. ahead: they
        do not need them yet, and what a paused tenant keeps stays, and what is expected here."""
        self.lacks = None if layers and not ahead else self.lacks
        spare = self._spare(layers, ahead)
        for receiver in (self,) if layers else (self._lasting, self):
            for giver in self._tenants.values():
                short = pages - sum(page in receiver.index_of for page in spare)
                if short <= 0:
                    break
                if giver.config.lends and not giver.busy:
                    self._lending.free_idle(giver, receiver, short, self._surplus(giver))
                    spare = self._spare(layers, ahead)
        changed = []
        if layers and len(spare) < pages:
            for giver, take in self._offers.layers(self, pages - len(spare), self._sleeps):
                before = giver.pages
                self._offers.give_layers(self, giver, take)
                if giver.pages is not before:
                    changed.append(giver)
            spare = self._spare(layers, ahead)
        if layers and len(spare) < pages and not ahead:
            self._free_paused(self, pages - len(spare))
            spare = self._spare(layers)
            self.lacks = self._lacking(pages - len(spare), False, time.monotonic())
        self._look_inside_passes(pages - len(spare), ahead)
        try:
            self._hand_out(spare[:pages])
        finally:  # behind the pages, which somebody waits for
            for giver in changed:
                certify(giver)

    @property
    def unmet(self) -> UnmetWant | None:
        """See there; None: no other process waits. Takes no lock."""
        found = self._unmet
        return found if found is not None and time.monotonic() - found.asked_s < FORGET_S else None

    def pass_over(self, pages: int) -> None:
        """Others lack so many pages for layers of theirs, and no tenant here gives more: 0, none."""
        now, before = time.monotonic(), self.unmet
        self._unmet = UnmetWant(pages, now if before is None else before.since_s, now) if pages > 0 else None

    def give_turn(self, givers: Sequence[TenantState], cold: Cold) -> int:
        """These tenants serve no pass from now on, for others wait: what they ask for goes now, however lately they have served.
        Returns how many pages went."""
        unmet, before = self.unmet, len(self._membership.held)
        if unmet is not None:
            self._give_layers_for_good(unmet.pages, cold, givers)
        return before - len(self._membership.held)

    def give_for_good(self, pages: int, cold: Cold, *, ahead: bool = False) -> None:
        """Others want `pages` pages for layers of theirs. Idle tenants here give their own ones up, which then have no pages:
        first those behind the ones that hide the others' loading, as for a tenant of this session. ahead: only these."""
        before = len(self._membership.held)
        self._give_layers_for_good(pages, cold, [one for one in self._offers.idle() if not self._comes(one)], ahead)
        if not ahead:
            self.pass_over(pages - before + len(self._membership.held))

    def _give_layers_for_good(self, pages: int, cold: Cold, givers: Sequence[TenantState], ahead: bool = False) -> None:
        self.lacks = self.lacks if ahead else None
        self._held_up = 0, False  # who serves was asked before
        for give in cold.gifts(givers, spare=ahead):
            short = pages - len(self._for_good(ahead))
            if short <= 0:
                break
            give(short)
        self.forget_gone()
        short = pages - len(self._for_good(ahead))
        if short > 0 and not ahead:
            self._free_paused(self._lasting, short)
            self.lacks = self._lacking(pages - len(self._for_good()), True, time.monotonic())
        self._hand_out(self._for_good(ahead)[:pages])

    def _look_inside_passes(self, short: int, ahead: bool) -> None:
        """Others lack `short` pages still. What tenants inside a pass do not need goes behind it."""
        busy = [
            one for one in self._tenants.values() if short > 0 and one.busy and one.config.lends and not one.leaving
        ]
        nbytes = sum(self._surplus(one) * one.kv.spec.block_bytes for one in busy)
        self._held_up = max(0, min(short, nbytes // self._changes.arena.page_bytes)), ahead

    @property
    def held_up(self) -> bool:
        """Whether `give_rest` of the next step gives more."""
        return self._held_up[0] > 0

    def give_rest(self) -> None:
        """In a step: what a pass was in the way of when others asked for it."""
        (pages, ahead), self._held_up = self._held_up, (0, False)
        if pages:
            self.give_up(pages, ahead=ahead)

    def prepare(self) -> bool:
        """While nobody asks: what tenants that serve no pass would give next. One thing a call: it holds the session's lock. It
        claims no tenant. Returns whether there may be more to do."""
        for giver in self._tenants.values():
            if giver.leaving or not (giver.config.lends and self._sleeps(giver)):
                continue
            if self._offers.inactive.prepare(giver, self):
                return True
        return False

    def await_question(self) -> None:
        """A tenant has become inactive: `prepare` is called, by the membership's thread."""
        self._membership.prepare()

    # -- KV of paused tenants ----------------------------------------------------------------------------------------

    def await_step(self) -> bool:
        """Whether the next step is likely to give more: others lack pages, engines could free some, or are in a pass, and a step
        was made since one was waited for last."""
        if not ((self.lacks is not None or self.held_up) and self._stepped):
            return False
        self._stepped = False
        return True

    def meet(self, report: Entries | None) -> list[TenantState]:
        """A step ends. Others get what engines of paused tenants have freed for them by now. report: it asks these engines for
        what is lacking still; None: it goes on with the last one, which has asked them. Returns whose engines it asks."""
        lack, self.lacks = self.lacks, None
        now = time.monotonic()
        if lack is None or now - lack.since > CALLED_S:
            return []
        # Pages go out behind these copies, and no step waits for them.
        if any(giver.kv.outgoing for giver in self._paused()):
            self.lacks = lack
            return []
        kept = self._kept_back(not lack.lasting)
        freed = self._free_paused(self._lasting if lack.lasting else self, lack.pages)
        going = [page for page in freed if page not in kept]
        self._hand_out(going)
        self.lacks = left = self._lacking(lack.pages - len(going), lack.lasting, lack.since)
        if left is None or report is None:
            return []
        return self._ask_engines(left.pages * self._changes.arena.page_bytes, report)

    def _ask_engines(self, nbytes: int, report: Entries) -> list[TenantState]:
        asked = []
        for giver in self._paused():
            blocks = self._offers.paused_kv.want(giver, nbytes) if nbytes > 0 else 0
            if blocks:
                entry = report.setdefault(giver.name, Entry(reason=f"other processes want {blocks} blocks of its KV"))
                entry.wanted[giver.name] = blocks
                asked.append(giver)
                nbytes -= blocks * giver.kv.spec.block_bytes
        return asked

    def _lacking(self, pages: int, lasting: bool, since: float) -> _Lack | None:
        """Others lack so many still, and some engine could free KV for them."""
        able = pages > 0 and any(map(self._offers.paused_kv.movable, self._paused()))
        return _Lack(pages, since, lasting) if able else None

    def _paused(self) -> list[TenantState]:
        """Who may give KV though it has to be copied in again, in the order in which they give."""
        found = [one for one in self._tenants.values() if one.config.lends and not (one.active or one.busy)]
        return self._offers.ranked([one for one in found if not one.kv.pool.external])

    def _free_paused(self, receiver: Receiver, pages: int) -> list[int]:
        """Make so many pages free, at most, of KV that paused tenants do not use now. Returns these."""
        freed: list[int] = []
        for giver in self._paused():
            if len(freed) < pages:
                unused = self._offers.unused_kv.unused(giver)
                freed += self._lending.free_idle(giver, receiver, pages - len(freed), unused)
        return freed

    def _for_good(self, ahead: bool = False) -> list[int]:
        return [page for page in self._spare(False, ahead) if page not in self.borrowed]

    def give_spare(self, tenant: TenantState | None = None) -> None:
        """All free pages, and what this tenant has of KV beyond its min_blocks: it has given up all else."""
        if tenant is not None and not tenant.busy:
            unused = self._offers.unused_kv.unused(tenant)
            self._lending.free_idle(tenant, self, len(tenant.donation_order), unused)
        self.forget_gone()
        self._hand_out(self._spare(False))

    def _hand_out(self, going: Sequence[int]) -> None:
        if not going:
            return
        try:
            self._changes.pass_on(going, out=True)
        finally:  # an interrupt may come behind it
            here = set(self._changes.draft.free_pages())
            self._give([page for page in going if page not in here])
            self._look()

    def _give(self, pages: Collection[int]) -> None:
        lent = frozenset[int]().union(*(tenant.pages.lent for tenant in self._tenants.values())).intersection(pages)
        if pages:
            self._trace.moment("gave", "", pages=len(pages), lent_pages=len(lent))
        self._membership.give([page for page in pages if page not in lent])
        self._lent |= lent
        self._membership.give(sorted(lent), lent=True)

    def _surplus(self, giver: TenantState) -> int:
        """Unused blocks that it will not miss. A server without requests runs no step that would say so: after `IDLE_S` without
        a pass it is as one that is inactive."""
        unused = self._offers.unused_kv
        return unused.unused(giver) if self._idle(giver) else unused.surplus(giver)

    def _idle(self, tenant: TenantState) -> bool:
        return self._clock() - tenant.last_pass_s > IDLE_S

    def _sleeps(self, giver: TenantState) -> bool:
        """Whether it serves no pass now: it is inactive, or idle. An idle one may begin its next pass at any time, which then
        streams: its passes have to have waited for every layer (`TenantState.require_seen`)."""
        if self._comes(giver):
            return False
        return not giver.active or (giver.unseen is None and not giver.slicing and self._idle(giver))

    def _comes(self, tenant: TenantState) -> bool:
        return self._supply is not None and self._supply.name == tenant.name

    def _spare(self, layers: bool, ahead: bool = False) -> list[int]:
        """Free pages, the last ones first: the first ones are where KV grows next. Behind these borrowed ones, then those that a
        tenant here has lent: only with `layers`, and if it serves no pass. ahead: not those that came ahead of need here."""
        kept = self._kept_back(layers).union(self._membership.ahead if ahead else ())
        free = [page for page in reversed(self._changes.draft.free_pages()) if page not in kept]
        own = frozenset[int]().union(*(tenant.pages.lent for tenant in self._tenants.values()))
        return sorted(free, key=lambda page: (page in own, page in self.borrowed))

    def _kept_back(self, layers: bool) -> frozenset[int]:
        """Pages that tenants here have lent, and that stay here for them: `_spare`."""
        stay = [one for one in self._tenants.values() if not (layers and not one.busy and self._sleeps(one))]
        return frozenset[int]().union(*(one.pages.lent for one in stay))

    # -- a tenant's layers come home -------------------------------------------------------------------------------

    def activating(self, tenant: TenantState) -> list[int]:
        """As `fetch`, also if they were called just now."""
        tenant.called_s = 0.0
        return self.fetch(tenant)

    def fetch_if_paid(self, tenant: TenantState) -> None:
        """It pays that some of its layers come home: if it serves no pass, only if others can spare their pages."""
        self.fetch(tenant, gently=self._sleeps(tenant))

    def fetch(self, tenant: TenantState, *, gently: bool = False) -> list[int]:
        """Call the pages of its layers that others have. Returns what `await_home` takes. Waits for nothing."""
        self._look()
        (self._gently.add if gently else self._gently.discard)(tenant.number)
        return self._call(tenant, gently)

    def await_home(self, calls: Sequence[int]) -> None:
        """Without the session's lock: until those who have the pages have answered, `CALL_S` at most."""
        if calls:
            self._membership.await_call(calls, CALL_S)

    def serves(self, tenant: TenantState) -> bool:
        """Some of its layers are not home, and it begins a pass. Returns whether `come_home` could bring some home. Without the
        session's lock."""
        self._call(tenant, gently=False)
        return tenant.arrived

    def _call(self, tenant: TenantState, gently: bool) -> list[int]:
        gone, now = tenant.gone, time.monotonic()
        if not gone or now < tenant.called_s:
            return []
        tenant.called_s = now + CALL_S
        return self._membership.call(sorted(gone), gently=gently)

    def come_home(self) -> None:
        """Layers whose pages are all here again come home, if their tenant serves, or called them gently, and no block is in
        the way."""
        for tenant in self._tenants.values():
            if not tenant.at_others or not (tenant.active or tenant.number in self._gently):
                continue
            if tenant.busy:
                tenant.arrived = True  # the next step or pass goes on
                continue
            tenant.arrived = False
            if tenant.tried_home != self._changes.key:  # each step comes by, and owners alone decide
                self._bring_home(tenant)
                tenant.tried_home = self._changes.key
        self._look()

    def _bring_home(self, tenant: TenantState) -> None:
        pages, buffers = tenant.pages, tenant.buffers
        if tenant.slicing or not pages.lent:
            return
        free = set(self._changes.draft.free_pages())
        ring = set(pages.ring_layers)
        stays = [
            layer
            for layer in pages.streamed
            if layer not in ring and not (tenant.lends(layer) and pages.lent.intersection(pages.homes[layer]) <= free)
        ]
        for remapped in range(len(stays) + len(ring) - buffers if stays else 0, tenant.remapped):
            target = tenant.streaming_at(remapped, buffers, "inward")
            if not tenant.possible(target):
                continue
            with suppress(OutOfBlocks):
                if not self._lending.losses(tenant, target):
                    self._lending.bring_home(tenant, target)
                    certify(tenant)
                    return

    def _look(self) -> None:
        """The pages of each tenant's layers that others have. They stay the same while owners do."""
        key = self._changes.key
        if key == self._looked:
            return
        self._looked = None  # an interrupt must not leave a part of it
        for tenant in self._tenants.values():
            gone = self._lending.gone(tenant)
            tenant.gone = gone
            tenant.at_others = bool(gone) or (tenant.at_others and bool(tenant.pages.lent))
        self._looked = key

    # -- others call theirs ----------------------------------------------------------------------------------------

    def give_named(self, pages: Sequence[int], *, gently: bool) -> None:
        """Others have lent these, and their layers are to come home. gently: only what no tenant here needs."""
        if gently:
            here = set(pages)
            for giver in self._tenants.values():
                if not giver.busy:
                    self._lending.free_idle(giver, _Only(here), len(here), self._surplus(giver))
            self._hand_out([page for page in self._changes.draft.free_pages() if page in here])
            return
        self._called.update(dict.fromkeys(pages, time.monotonic()))
        self.return_called(None)

    def return_called(self, report: Entries | None) -> None:
        """Give what others have called. report: of a step, in which live blocks may move; None: none may."""
        # A member that still wants them has called them again since; the others have gone, or sleep.
        recent = time.monotonic() - CALLED_S
        lent = frozenset[int]().union(*(tenant.pages.lent for tenant in self._tenants.values()))
        called = {page for page, when in self._called.items() if when >= recent and page not in lent}
        for holder in self._tenants.values():
            held = [] if holder.busy or not called else self._lending.held(holder, called)
            if held:
                moved = self._lending.vacate(holder, held, moving=report is not None)
                if moved and report is not None:
                    why = f"{len(moved)} blocks moved: layers of another process came home"
                    report.setdefault(holder.name, Entry(reason=why))
        self._hand_out([page for page in self._changes.draft.free_pages() if page in called])
        here = itertools.chain(*(self._lending.held(holder, called) for holder in self._tenants.values()))
        self._called = {page: self._called[page] for page in here}

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self, serving: Collection[str], report: Entries) -> None:
        """A step begins, with a demand of these tenants. Pages that have come are taken in, pages that are called go, and layers
        come home."""
        membership, self._stepped = self._membership, True
        if membership.stirs:
            membership.let_read()
            self.take_arrived()
        if self._called:
            self.return_called(report)
        for name in serving:
            tenant = self._tenants[name]
            if tenant.at_others:
                self.fetch(tenant)
                self.come_home()
