"""One model on several ranks (tensor parallelism): one decision, the same change everywhere, or nowhere.

    Group.step -> rank 0: session.step (decides, changes its arena) -> the others: follow -> all agree: the engine hears of it
                                                                    -> one refuses: back on all; nobody hears of it

Every rank has a session with one tenant of the same layout, so that the same (alpha, buffers) opens the same block ids. Rank 0's
blocks belong to the engine's own allocator; the others have no books of blocks, they do as rank 0 did. `Group` lives where the
scheduler is and reaches the ranks by whatever the engine has for that (a function `ask`), between passes and in the order of the
steps. An engine with one rank uses the same two classes, and then nothing has to be followed.

Two-phase in the sense that matters here: no rank's change is visible to the engine, which alone could use it, before all have
made theirs; and each can be undone until then, because growing keeps every weight's master copy and shrinking only takes back
blocks that the engine has returned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from remap.errors import ArenaBroken, Error, InvalidArgument, InvalidState
from remap.policy.controller import Demand
from remap.session import Session
from remap.tenant import Tenant

from . import advanced

__all__ = ["Group", "Rank", "Report", "ids", "runs"]

logger = logging.getLogger("remap.ranks")

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Report:
    """What rank 0 says after a change. open: the ids of the blocks that may be handed out, as ascending (first, stop) runs; all
    others have to leave. target: (alpha, buffers). unmet: blocks of demand that no donor could meet."""

    open: Runs
    target: tuple[int, int]
    unmet: int = 0
    reason: str = ""


def runs(ids: Iterable[int]) -> Runs:
    """Ascending ids as (first, stop) runs."""
    found: list[tuple[int, int]] = []
    for each in ids:
        if found and found[-1][1] == each:
            found[-1] = (found[-1][0], each + 1)
        else:
            found.append((each, each + 1))
    return tuple(found)


def ids(found: Runs) -> set[int]:
    """What `runs` was made of."""
    return {each for first, stop in found for each in range(first, stop)}


class Rank:
    """One rank's tenant. Its methods are called between passes."""

    def __init__(self, session: Session, tenant: Tenant, rank: int) -> None:
        self.session, self.tenant, self.rank = session, tenant, rank
        self._left: Callable[[Report], Sequence[int]] | None = None
        self._held: set[int] = set()  # withdrawn, and not returned by the engine yet
        self._fresh: set[int] = set()  # opened by the change under way: the engine does not know of them
        self._undoing = False
        self._told = False  # other ids are open than before the step under way

    def listen(self, left: Callable[[Report], Sequence[int]] | None) -> None:
        """The engine has the blocks of rank 0 from now on; zeroes what is open. left(report): called whenever other ids are open,
        answers with those that have left and are in no use. None: the engine is in another process and calls `returned`."""
        self._left = left
        self.tenant.kv.subscribe(self._changed, external=self.rank == 0)

    def report(self, unmet: int = 0, reason: str = "") -> Report:
        """How things are now."""
        return Report(runs(self.tenant.kv.pool.open_ids()), self._target, unmet, reason)

    def step(self, blocks: int, free: int, anyway: bool = False) -> Report | None:
        """Rank 0 decides (`Session.step`). None on the others, and where nothing has changed. anyway: nothing else can run until
        there are so many blocks, so as many layers go as that takes, whatever it costs.

        A change that fails is logged, and the engine goes on with what there is. Raises ArenaBroken only."""
        if self.rank:
            return None
        self._fresh.clear()
        target, self._told = self._target, False
        unmet, reason = 0, ""
        with self._serving_on():
            done = self.session.step({self.tenant.name: Demand(blocks, free)})
            unmet, reason = done.unmet_blocks.get(self.tenant.name, 0), done.reason.get(self.tenant.name, "")
            if anyway and unmet:
                unmet = self._insist(unmet)
        if not self._told and self._target == target:
            return None
        return self.report(unmet, reason)

    def follow(self, target: tuple[int, int], opened: Runs) -> str:
        """The same (alpha, buffers) as rank 0, and all that is open there is open here. "", or why not: then nothing has changed
        here."""
        if not self.rank:
            return ""
        before = self._target
        try:
            self._go(target)
            missing = len(ids(opened).difference(self.tenant.kv.pool.open_ids()))
            if missing:
                self._go(before)
                return f"rank {self.rank}: {missing} blocks that rank 0 has open at {target[0]} layers are not here"
        except Error as error:
            return f"rank {self.rank}: {error}"
        return ""

    def back(self, target: tuple[int, int]) -> Report | None:
        """As it was: another rank could not follow. Rank 0 reports."""
        if self._target != tuple(target):
            self._undoing = True
            try:
                self._go(target)
            finally:
                self._undoing = False
        return None if self.rank else self.report()

    def home(self) -> Report | None:
        """All layers come home, as soon as the blocks that lie in their pages have left. Rank 0 decides. Fails as `step` does."""
        if self.rank or not self.tenant.remapped:
            return None
        self._fresh.clear()
        with self._serving_on():
            self._go((0, 0))
        return self.report()

    def wake(self) -> None:
        """The tenant serves passes again (`Session.activate`); what cannot come home at once is streamed until it can."""
        if not self.tenant.active:
            self.session.activate(self.tenant.name, partial=True)

    def sleep(self) -> None:
        """The tenant serves no pass until `wake`: other tenants of its session may have its layers."""
        self.session.deactivate(self.tenant.name)

    def returned(self, ids: Sequence[int]) -> None:
        """Blocks that had to leave are in no use any more."""
        if not self.rank:
            self._held.difference_update(ids)
            self.tenant.kv.returned(ids)

    @contextmanager
    def _serving_on(self) -> Iterator[None]:
        """A change that fails has changed nothing: no reason to end an engine that can preempt instead."""
        try:
            yield
        except ArenaBroken:
            raise
        except Error as error:
            logger.warning("rank 0: %s; serving goes on with %s layers remapped", error, self.tenant.remapped)

    def _insist(self, blocks: int) -> int:
        """Layer by layer, until there are so many more blocks. How many are lacking in the end."""
        enough = self.tenant.kv.usable_blocks + blocks
        while self.tenant.kv.usable_blocks < enough:
            try:
                self._go((int(self.tenant.remapped) + 1, 1))
            except InvalidArgument:  # that was the last one
                break
        return max(0, enough - self.tenant.kv.usable_blocks)

    @property
    def _target(self) -> tuple[int, int]:
        return int(self.tenant.remapped), self.tenant.buffers  # ranks stream whole layers

    def _go(self, target: tuple[int, int]) -> None:
        advanced.remap(self.session, self.tenant.name, target[0], max(1, target[1]), "nested", drain=self.rank == 0)

    def _changed(self, added: Sequence[int], withdrawn: Sequence[int]) -> None:
        self._told = True
        # What is new holds weights, or old KV. Attention kernels multiply what lies behind a sequence's end by zero, so it has
        # to be finite. What was withdrawn while in use and is open again holds its requests' KV: it stays.
        self._zero(runs(block for block in added if block not in self._held))
        self._held.difference_update(added)
        if self.rank:
            return
        self._fresh.update(added)
        self._held.update(withdrawn)
        if self._left is not None:
            self.returned(self._left(self.report()))
        elif self._undoing:
            self.returned([block for block in withdrawn if block in self._fresh])

    def _zero(self, new: Runs) -> None:
        size = self.tenant.kv.spec.block_bytes
        memory: Any = self.tenant.kv.memory if new else None
        for first, stop in new:
            memory[first * size : stop * size].zero_()


class Group:
    """All ranks, as the scheduler sees them. ask(method, *args): call that method of `Rank` on every rank, answers in order.

    Raises InvalidState (fields ranks, answers) unless every rank answers, and all start with the same blocks open.
    """

    def __init__(self, ask: Callable[..., Sequence[Any]], ranks: int) -> None:
        self._ask = ask
        self.ranks = ranks
        reports: Sequence[Report] = ask("report")
        first = reports[0]
        if len(reports) != ranks or any(report.open != first.open for report in reports):
            raise InvalidState(
                f"{len(reports)} of {ranks} ranks answered, with {[report.open for report in reports]} open: they have to "
                "start alike; nothing was handed out; give every rank the same capacity",
                ranks=ranks,
                answers=len(reports),
            )
        self.target = first.target
        self.opened = first.open
        self.refusals = 0  # changes that a rank could not follow

    def step(self, blocks: int, free: int, anyway: bool = False) -> Report | None:
        """`Session.step` for all ranks; see `Rank.step`. None if nothing has changed."""
        return self._agree(self._ask("step", blocks, free, anyway)[0])

    def home(self) -> Report | None:
        """All layers come home on all ranks, as far as blocks have left."""
        return self._agree(self._ask("home")[0])

    def _agree(self, report: Report | None) -> Report | None:
        if report is None:
            return None
        if self.ranks > 1 and (report.target != self.target or ids(report.open) - ids(self.opened)):
            refusals = [answer for answer in self._ask("follow", report.target, report.open) if answer]
            if refusals:
                self.refusals += 1
                logger.warning("%s; all ranks stay at %s layers", "; ".join(refusals), self.target[0])
                report = self._ask("back", self.target)[0]
        self.target, self.opened = report.target, report.open
        return report
