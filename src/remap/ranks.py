# SPDX-License-Identifier: Apache-2.0
"""One model on several ranks (tensor parallelism): rank 0 decides, and all ranks make the same change, or none does.

    RankGroup.step -> rank 0: Session.step decides and changes its arena
               -> other ranks: follow -> all agree:   Group reports the change to the engine
                                      -> one refuses: every rank goes back; the engine is not told

Every rank has a session with one tenant of the same layout, so the same (alpha, buffers) opens the same block ids. The
engine's own allocator holds the blocks of rank 0; the other ranks keep no record of blocks and repeat the change of
rank 0. `RankGroup` lives in the scheduler's process and calls the ranks through a function `ask` that the engine provides,
between passes and in the order of the steps. An engine with one rank uses the same two classes; no rank then has to
follow.

The change is made in two phases: the engine, the only user of the blocks, sees it after all ranks have made it. Until
then each rank can undo it, because growing keeps every weight's master copy, and shrinking takes back only blocks that
the engine has returned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from remap.errors import ArenaBroken, Error, InvalidArgument, InvalidState, OutOfMemory
from remap.internals import internals
from remap.memory.core import Core
from remap.policy.controller import Demand
from remap.policy.turns import TURN_S
from remap.process_turn import ProcessTurn
from remap.rate_limited import RateLimitedWarning
from remap.session import Session
from remap.tenant import Tenant

from . import advanced

__all__ = ["Rank", "RankGroup", "RankReport", "ids", "runs"]

logger = logging.getLogger("remap.ranks")

_PATIENT_S, _AGAIN_S, _WAKE_AGAIN_S = 0.25, 0.005, 0.05
"""How long a step waits for other processes, and how often it looks; how often who has no pages asks for some."""

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankReport:
    """Rank 0's state after a change.

    open: the ids of the blocks that the engine may hand out, as ascending (first, stop) runs; all other blocks have to
    leave. target: (alpha, buffers). unmet: blocks of demand that no donor could meet. reason: why rank 0 decided so. lost: blocks
    that have left since the engine knew of them, and may be open again, without their KV. short: blocks that were to be had at
    any cost, and are missing with all layers away that can be.
    """

    open: Runs
    target: tuple[int, int]
    unmet: int = 0
    reason: str = ""
    lost: Runs = ()
    short: int = 0


def runs(ids: Iterable[int]) -> Runs:
    """Ascending ids as (first, stop) runs."""
    ids = list(ids)
    if ids and ids[-1] - ids[0] == len(ids) - 1:  # one run, as most often: half a million would take 50 ms one by one
        return ((ids[0], ids[-1] + 1),)
    found: list[tuple[int, int]] = []
    for each in ids:
        if found and found[-1][1] == each:
            found[-1] = (found[-1][0], each + 1)
        else:
            found.append((each, each + 1))
    return tuple(found)


def ids(found: Runs) -> set[int]:
    """The ids in these runs: the inverse of `runs`."""
    return {each for first, stop in found for each in range(first, stop)}


class Rank:
    """One rank's tenant. Call its methods between passes.

    decides: whether it decides for itself, and an engine holds its blocks: rank 0. The others follow."""

    def __init__(
        self, session: Session, tenant: Tenant, rank: int, cold_s: float | None = None, turn_s: float = TURN_S
    ) -> None:
        """cold_s: after so many seconds asleep it gives its pages up; None: when another process needs them. turn_s: how long it
        serves, at least, while another process waits for these (see `turn_over`)."""
        self.session, self.tenant, self.rank, self.decides = session, tenant, rank, not rank
        self._cold_s, self._timer = cold_s, threading.Timer(0.0, self._cold_by_itself)  # of the sleep that began last
        self.turn = ProcessTurn(session, (tenant.name,), turn_s)
        self._turning = threading.Lock()  # asleep, or not: the timer's thread must not find it half way
        self._left: Callable[[RankReport], Sequence[int]] | None = None
        self._held: set[int] = set()  # drained; the engine has not returned them yet
        self._fresh: set[int] = set()  # opened by the change under way; the engine does not know of them
        self._undoing = False
        self._asleep = False  # the engine has no block in use, and waits for `wake` before it hands one out
        self._patient_again_s = 0.0
        self._lost: set[int] = set()  # while it sleeps, of an engine in another process
        self._told = False  # the step under way has changed the open ids
        self._failed = RateLimitedWarning(logger)

    def listen(self, left: Callable[[RankReport], Sequence[int]] | None, zero: bool = True) -> None:
        """Hand the blocks of rank 0 to the engine's allocator, and zero the open ones (not if passes go on on another stream).

        left(report): `Rank` calls it whenever the open ids have changed; it returns the ids that have left and are not
        in use. None: the engine is in another process and calls `returned`.
        """
        self._left, self._zeroes = left, zero
        self.tenant.kv.subscribe(self._changed, external=self.decides)

    def report(self, unmet: int = 0, reason: str = "") -> RankReport:
        """The present state."""
        return RankReport(runs(internals(self.tenant).kv.pool.open_ids()), self._target, unmet, reason)

    def step(self, blocks: int, free: int, anyway: bool = False, can_wait: bool = False) -> RankReport | None:
        """Decide (`Session.step`). Returns None on ranks that follow, and if nothing has changed (and nothing is `short`).

        blocks: demand. free: blocks of the engine that are free. anyway: no request can run before there are that many
        blocks, so remap as many layers as they take, at any cost. can_wait: see `Demand`; else wait for what other processes
        give (a quarter of a second at most, and for a twentieth of the time where that is not enough).

        Logs a change that fails; the engine then goes on with the blocks that it has. Raises ArenaBroken only.
        """
        if not self.decides:
            return None
        self._fresh.clear()
        target, self._told = self._target, False
        unmet, short, reason = 0, 0, ""
        with self._serving_on():
            done = self.session.step({self.tenant.name: Demand(blocks, free, can_wait=can_wait)})
            unmet, reason = done.unmet_blocks.get(self.tenant.name, 0), done.reason.get(self.tenant.name, "")
            if not can_wait and unmet and self.session.broker:
                unmet = self._await(unmet)
            if anyway and unmet:
                unmet = short = self._insist(unmet)
        if not self._told and self._target == target and not short:
            return None
        return replace(self.report(unmet, reason), short=short)

    def follow(self, target: tuple[int, int], opened: Runs) -> str:
        """Go to rank 0's (alpha, buffers) and check that all ids that are open there are open here.

        Returns "", or the reason why this rank cannot; then nothing has changed here.
        """
        if not self.rank:
            return ""
        before = self._target
        try:
            self._go(target)
            missing = len(ids(opened).difference(internals(self.tenant).kv.pool.open_ids()))
            if missing:
                self._go(before)
                return f"rank {self.rank}: {missing} blocks that rank 0 has open at {target[0]} layers are not here"
        except Error as error:
            return f"rank {self.rank}: {error}"
        return ""

    def back(self, target: tuple[int, int]) -> RankReport | None:
        """Go back to `target`, because another rank could not follow. Rank 0 returns its report."""
        if self._target != tuple(target):
            self._undoing = True
            try:
                self._go(target)
            finally:
                self._undoing = False
        return None if self.rank else self.report()

    def home(self) -> RankReport | None:
        """The engine has no block in use: bring all layers home, as soon as the blocks that lie in their pages have left. Rank 0
        decides.

        Logs a change that fails, as `step` does.
        """
        if self.rank:
            return None
        internals(self.tenant).kv.pool.in_use = 0
        if not self.tenant.remapped:
            return None
        self._fresh.clear()
        with self._serving_on():
            self._go((0, 0))
        return self.report()

    def wake(self) -> RankReport | None:
        """Let the tenant serve passes again (`Session.activate`). The engine has in use nothing that lies outside of the report's
        ids, and does not return the others: they have come and gone while it slept.

        A layer that cannot come home at once streams until it can. None: layers have no pages, and there are none to be had now
        (logged, seldom); nothing has changed, and the engine asks again while it has requests.
        """
        return self._wake()

    def _wake(self) -> RankReport | None:
        self._timer.cancel()
        with self._turning:
            if not self.tenant.active:
                began = time.monotonic()
                if not self.turn.may_begin():
                    return None
                cold = self.session.snapshot().tenants[self.tenant.name].cold
                try:
                    woken = self.session.activate(self.tenant.name, partial=True)
                except OutOfMemory as error:
                    self._still_waits(str(error))
                    return None
                if not woken.activated:
                    self._still_waits(woken.reason)
                    return None
                load_s = self.session.exclusively(partial(_load_s, self.tenant.name, len(cold)), claims=False)
                self.turn.begun(began, load_s)
                if cold:
                    logger.info("%s is not cold any more: %s", self.tenant.name, woken.reason)
            self._asleep = False
            lost, self._lost = self._lost, set()
        return replace(self.report(), lost=runs(sorted(lost)))

    def _still_waits(self, why: str) -> None:
        self.turn.refused()
        self._failed.warn("rank %d: requests for %s wait for its layers: %s", self.rank, self.tenant.name, why)

    def sleep(self) -> None:
        """Stop serving passes until `wake`: other tenants of the session may use the pages of its layers, and other processes
        those of its blocks. For an engine that has no block in use."""
        self._asleep = True
        try:
            self.session.deactivate(self.tenant.name)
        except BaseException:
            self._asleep = not self.tenant.active
            raise
        internals(self.tenant).kv.pool.in_use = 0
        if self._cold_s is not None:
            self._timer = threading.Timer(self._cold_s, self._cold_by_itself)
            self._timer.daemon = True
            self._timer.start()

    @contextmanager
    def awake(self, waits_s: float) -> Iterator[None]:
        """For a pass without requests, which others in lockstep wait for: `wake`, and `sleep` behind it, if the tenant sleeps.
        The engine hands out no block meanwhile. Raises OutOfMemory as `wake_within`; nothing changed then."""
        if not self._asleep:
            yield
            return
        report = self.wake_within(waits_s)
        try:
            yield
        finally:
            self._lost.update(ids(report.lost))  # the engine has not heard of them
            self.sleep()

    def wake_within(self, waits_s: float) -> RankReport:
        """Ask for what `wake` asks for, again and again. Raises OutOfMemory (fields tenant, waited_s) if other processes give
        nothing for so many seconds."""
        end = time.monotonic() + waits_s
        while (report := self._wake()) is None:
            if time.monotonic() > end:
                raise OutOfMemory(
                    f"a pass of {self.tenant.name} was to be made without a request, and for {waits_s:g} s no other process gave "
                    "the pages of its layers; none was made; start it while others are idle, or give the broker more memory",
                    tenant=self.tenant.name,
                    waited_s=waits_s,
                )
            time.sleep(_WAKE_AGAIN_S)
        return report

    def turn_over(self) -> bool:
        """Whether the engine is to pause its requests, let go of its blocks, and `give_turn`, for another process waits
        (`ProcessTurn.over`); then it may `wake`, which waits for its turn. Takes no lock."""
        return self.turn.over()

    def give_turn(self) -> None:
        """`sleep`, and let others have what they wait for at once (`ProcessTurn.give`). Until they have it, or for as long as a
        turn, `wake` does not ask for it."""
        self.sleep()
        with self._turning:
            if self._asleep:
                self.turn.give()

    def turn_cold(self) -> bool:
        """Give up all that the tenant has but its first blocks, if it sleeps (`Session.deactivate(pages="none")`); `wake` brings
        it back. Returns whether it does."""
        with self._turning:
            if not self._asleep:
                return False
            self.session.deactivate(self.tenant.name, pages="none")
            logger.info("%s is cold: its layers have no pages until the next request", self.tenant.name)
        return True

    def _cold_by_itself(self) -> None:
        try:
            self.turn_cold()
        except Error as error:  # it sleeps as before
            self._failed.warn("rank %d: %s keeps its pages: %s", self.rank, self.tenant.name, error)

    def close(self) -> None:
        """The tenant goes: nothing is done by itself any more."""
        self._timer.cancel()
        with self._turning:
            self._asleep = False

    def returned(self, ids: Sequence[int]) -> None:
        """Take back blocks that had to leave and that the engine does not use any more."""
        if self.decides:
            self._return(ids)

    def _return(self, ids: Sequence[int]) -> None:
        self._held.difference_update(ids)
        self.tenant.kv.returned(ids)

    @contextmanager
    def _serving_on(self) -> Iterator[None]:
        """Log errors other than ArenaBroken (seldom): such a change has changed nothing, and the engine can preempt instead."""
        try:
            yield
        except ArenaBroken:
            raise
        except Error as error:
            text = "rank %d: %s; serving goes on with %s layers remapped"
            self._failed.warn(text, self.rank, error, self.tenant.remapped)

    def _await(self, blocks: int) -> int:
        """Wait for `blocks` blocks more. Returns how many are still missing."""
        begun = time.monotonic()
        if begun < self._patient_again_s:
            return blocks
        enough = self.tenant.kv.usable_blocks + blocks
        while (short := enough - self.tenant.kv.usable_blocks) > 0 and time.monotonic() < begun + _PATIENT_S:
            time.sleep(_AGAIN_S)  # granted pages come in by another thread
            self.session.step({self.tenant.name: Demand(short, 0)})
        if short > 0:
            self._patient_again_s = time.monotonic() + 20 * _PATIENT_S
        return max(0, short)

    def _insist(self, blocks: int) -> int:
        """Remap layer by layer until there are `blocks` more blocks. Returns how many are still missing."""
        enough = self.tenant.kv.usable_blocks + blocks
        for layers in range(int(self.tenant.remapped) + 1, self.tenant.layers):
            if self.tenant.kv.usable_blocks >= enough:
                break
            with suppress(InvalidArgument):  # so few layers can leave; the ring is larger than they are; more may do
                self._go((layers, 1))
        return max(0, enough - self.tenant.kv.usable_blocks)

    @property
    def _target(self) -> tuple[int, int]:
        return int(self.tenant.remapped), internals(self.tenant).buffers  # ranks stream whole layers

    def _go(self, target: tuple[int, int]) -> None:
        advanced.remap(self.session, self.tenant.name, target[0], max(1, target[1]), "nested", drain=self.decides)

    def _changed(self, added: Sequence[int], withdrawn: Sequence[int]) -> None:
        self._told = True
        # New blocks hold weights or old KV. Attention kernels multiply values behind a sequence's end by zero, so these
        # values have to be finite. A block that was drained while in use and is open again holds its request's KV: keep
        # it.
        if self._zeroes:
            self._zero(runs(block for block in added if block not in self._held))
        self._held.difference_update(added)
        if not self.decides:
            return
        self._fresh.update(added)
        self._held.update(withdrawn)
        if self._left is not None:
            self._return(self._left(self.report()))
        elif self._asleep:
            self._lost.update(withdrawn)
            self._return(withdrawn)
        elif self._undoing:
            self._return([block for block in withdrawn if block in self._fresh])

    def _zero(self, new: Runs) -> None:
        size = self.tenant.kv.spec.block_bytes
        memory: Any = self.tenant.kv.memory if new else None
        for first, stop in new:
            memory[first * size : stop * size].zero_()


def _load_s(name: str, layers: int, core: Core) -> float:
    """Seconds that so many layers of the tenant take to load."""
    return core.tenant(name).timing.copy_seconds() * layers


class RankGroup:
    """All ranks of a model, for the scheduler. ask(method, *args): calls that method of `Rank` on every rank and
    returns the answers in rank order.

    Raises InvalidState (fields ranks, answers) unless every rank answers, and all of them have the same blocks open.
    """

    def __init__(self, ask: Callable[..., Sequence[Any]], ranks: int) -> None:
        self._ask = ask
        self.ranks = ranks
        reports: Sequence[RankReport] = ask("report")
        first = reports[0]
        if len(reports) != ranks or any(report.open != first.open for report in reports):
            raise InvalidState(
                f"{len(reports)} of {ranks} ranks answered, with the blocks {[report.open for report in reports]} "
                "open; all ranks must answer, with the same blocks; nothing was handed out; give every rank the same "
                "capacity",
                ranks=ranks,
                answers=len(reports),
            )
        self.target = first.target
        self.opened = first.open
        self.refusals = 0  # changes that a rank could not follow
        self._refused = RateLimitedWarning(logger)

    def step(self, blocks: int, free: int, anyway: bool = False, can_wait: bool = False) -> RankReport | None:
        """`Session.step` for all ranks; see `Rank.step`. Returns None if nothing has changed."""
        return self._agree(self._ask("step", blocks, free, anyway, can_wait)[0])

    def returned(self, blocks: Sequence[int]) -> None:
        """As `Rank.returned`, on all ranks."""
        self._ask("returned", blocks)

    def home(self) -> RankReport | None:
        """Bring all layers home on all ranks, as soon as the blocks in their pages have left.

        None if nothing has changed.
        """
        return self._agree(self._ask("home")[0])

    def woken(self, reports: Sequence[RankReport]) -> Runs:
        """The blocks that are open after these answers of `Rank.wake`."""
        self.target, self.opened = reports[0].target, reports[0].open
        return self.opened

    def _agree(self, report: RankReport | None) -> RankReport | None:
        if report is None:
            return None
        if self.ranks > 1 and (report.target != self.target or ids(report.open) - ids(self.opened)):
            refusals = [answer for answer in self._ask("follow", report.target, report.open) if answer]
            if refusals:
                self.refusals += 1
                self._refused.warn("%s; all ranks stay at %s layers", "; ".join(refusals), self.target[0])
                report = self._ask("back", self.target)[0]
        self.target, self.opened = report.target, report.open
        return report
