# SPDX-License-Identifier: Apache-2.0
"""One model on several ranks whose pages are a broker's: each rank wins other pages, and so other blocks.

    Apart.step -> every rank:  RankApart.step decides for itself, by the same demand
               -> rank 0's blocks, as many as all others have room for -> RankApart.place on the others -> the engine

The ids that the engine knows are rank 0's. Each other rank keeps for every one of them a block of its own (`places`), and the
worker reads what the scheduler sends by that table (`engine_internals.translate`). So ranks need as many blocks, not the same
ones. On each rank blocks may leave at any time: rank 0's leave the engine, as those of one rank do; on the others the content
moves to another block there, and the engine hears nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from remap.errors import InvalidState
from remap.internals import internals
from remap.ranks import Rank, RankGroup, RankReport, Runs, ids, runs

__all__ = ["Apart", "Followed", "RankApart"]


class Followed(NamedTuple):
    """Of a rank that has decided. away: its layers; short: as in RankReport."""

    away: int
    short: int


class RankApart(Rank):
    """One such rank. places: id of the engine's -> id here; empty on rank 0, where they are the same. blocks: of the engine's
    tensors; no place lies beyond. may_move: whether blocks in use may. renamed: is told which have moved here, id -> id, when
    their contents have."""

    def __init__(
        self,
        *args: Any,
        blocks: int,
        may_move: Callable[[], bool],
        renamed: Callable[[dict[int, int]], None],
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self.decides = True
        self.places: dict[int, int] = {}
        self._blocks, self._may_move, self._renamed = blocks, may_move, renamed
        self._spare: list[int] = []  # open here, and no place of any; ascending

    def report(self, unmet: int = 0, reason: str = "") -> RankReport:
        """The present state, in the engine's ids."""
        found = super().report(unmet, reason)
        return replace(found, open=runs(sorted(self.places))) if self.rank else found

    def step(self, blocks: int, free: int, anyway: bool = False, can_wait: bool = False, beyond: int = 0) -> Any:
        """As `Rank.step`, for the engine's demand. beyond: blocks that rank 0 has and the engine does not, for others lack them.
        Other ranks return their `Followed`."""
        if not self.rank:
            return super().step(blocks, free + beyond, anyway, can_wait)
        self._tidy()
        report = super().step(max(0, blocks - free), len(self._spare), anyway, can_wait)
        self._tidy()
        return Followed(int(self.tenant.remapped), 0 if report is None else report.short)

    def place(self, new: Runs, keep: Runs | None = None) -> int:
        """Have a block here for each of these ids. keep: forget all others but these first. Returns for how many of them, in
        ascending order, there is one."""
        wanted = sorted(ids(new))
        if not self.rank:
            return len(wanted)
        if keep is not None:
            kept = ids(keep)
            self.places = {block: place for block, place in self.places.items() if block in kept}
        self._tidy()
        self.places.update(zip([block for block in wanted if block not in self.places], self._spare))
        return next((count for count, block in enumerate(wanted) if block not in self.places), len(wanted))

    def returned(self, ids: Sequence[int]) -> None:
        """The engine does not use these any more, which had to leave."""
        if not self.rank:
            super().returned(ids)
            return
        for block in ids:
            self.places.pop(block, None)
        self._tidy()

    def exchange(self, moves: dict[int, int]) -> None:
        """The engine has given the blocks in use the ids of free ones: no byte moves here. moves: used id -> free id."""
        for used, free in moves.items():
            self.places[used], self.places[free] = self.places[free], self.places[used]

    def wake(self) -> RankReport | None:
        """As `Rank.wake`, in the engine's ids."""
        found = super().wake()
        if found is None or not self.rank:
            return found
        gone = ids(found.lost) | set(self.places.values()) - ids(found.open)
        lost = sorted(block for block, place in self.places.items() if place in gone)
        for block in lost:
            del self.places[block]
        return replace(found, open=runs(sorted(self.places)), lost=runs(lost))

    def _tidy(self) -> None:
        """What is not open here any more leaves: blocks in use move, as far as there is room, and the others go at once."""
        kv, used = internals(self.tenant).kv, set(self.places.values())
        opened = {block for block in kv.pool.open_ids() if block < self._blocks}
        moves = dict(zip(sorted(used - opened), sorted(opened - used)))
        # Not to where the next pass zeroes what the device has refused to. What does not move stays until it is free.
        if moves and not kv.unfinished and self._may_move():
            with self._serving_on():
                kv.move(list(moves.items()))
                self.places = {block: moves.get(place, place) for block, place in self.places.items()}
                self._renamed(moves)
            used = set(self.places.values())
        gone = sorted(self._held - used)
        if gone:
            self._return(gone)
        self._spare = sorted(opened - used)


class Apart(RankGroup):
    """All such ranks, for the scheduler."""

    def __init__(self, ask: Callable[..., Sequence[Any]], ranks: int) -> None:
        self._ask, self.ranks = ask, ranks
        self._placed: set[int] = set()  # on every rank but 0, where all blocks are
        self._beyond = self._count = 0  # blocks that rank 0 has, and the engine does not; that the engine has
        reports = ask("report")
        if len(reports) != ranks:
            raise InvalidState(
                f"{len(reports)} of {ranks} ranks answered, and each has blocks of its own; nothing was handed out; start "
                "the engine with an executor that reaches all of its ranks",
                ranks=ranks,
                answers=len(reports),
            )
        self._first = self._report = reports[0]
        self.woken([self._first] * ranks)

    def step(self, blocks: int, free: int, anyway: bool = False, can_wait: bool = False) -> RankReport | None:
        """As `RankGroup.step`. Where others have room they give an eighth more than is needed: not every step is to ask."""
        answers = self._ask("step", blocks, free, anyway, can_wait, self._beyond)
        report, others, need = answers[0], answers[1:], max(0, blocks - free)
        short = max(each.short for each in (others if report is None else (*others, report)))
        most = need + self._count // 8 if need else 0
        left = set() if report is None else ids(self._report.open) - self._placed - ids(report.open)
        if left:  # the engine, which never had them, gives none of these back
            self.returned(sorted(left))
        before = self.opened, self.target
        found = self._open(self._report if report is None else report, most, max(each.away for each in others))
        return replace(found, short=short) if short or before != (self.opened, self.target) else None

    def woken(self, reports: Sequence[RankReport]) -> Runs:
        """As `RankGroup.woken`. No block is in use."""
        self._placed.intersection_update(*(ids(report.open) for report in reports))
        self._ask("place", (), runs(sorted(self._placed)))
        most = max(0, len(ids(self._first.open)) - len(self._placed))
        return self._open(reports[0], most, max(report.target[0] for report in reports)).open

    def returned(self, blocks: Sequence[int]) -> None:
        """As `RankGroup.returned`."""
        self._placed.difference_update(blocks)
        super().returned(blocks)

    def _open(self, report: RankReport, most: int, away: int) -> RankReport:
        """Open to the engine what all ranks have: what rank 0 has open, and of that what is placed, and `most` more at most."""
        self._report, there = report, ids(report.open)
        new = sorted(there - self._placed)[:most]
        if new:
            self._placed.update(new[: min(self._ask("place", runs(new)))])
        opened = there & self._placed
        self._count, self._beyond = len(opened), len(there) - len(opened)
        self.opened, self.target = runs(sorted(opened)), (max(away, report.target[0]), report.target[1])
        return replace(report, open=self.opened, target=self.target)
