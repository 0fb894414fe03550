"""The scheduler's way to the arenas of all ranks, and what it makes of their answers: block ids that open and ids that leave.

A change is made on rank 0, which decides, then on the others, then shown to the scheduler. If a rank cannot follow, all are as
they were before and the scheduler never hears of it. `collective_rpc` keeps the order of the steps on every rank.

    step -> rank 0: session.step -> others: remap_follow -> all agree: Books.open_now -> vLLM's free queue
                                                         -> one refuses: remap_back on all
"""

from __future__ import annotations

import logging
from typing import Any

from . import internals

__all__ = ["Books", "Link"]

logger = logging.getLogger("remap.vllm")


class Books:
    """Which ids of vLLM's pool may be handed out. opened: those; leaving: withdrawn, and still in use."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.opened = set(range(len(self.pool.blocks)))
        self.leaving: set[int] = set()

    def open_now(self, runs: tuple[tuple[int, int], ...]) -> list[int]:
        """Exactly these ids are open. Returns ids that have to leave and are in no use: they are parked."""
        wanted = {block for first, stop in runs for block in range(first, stop)}
        gone, new = self.opened - wanted, wanted - self.opened
        back = self.leaving & new  # still with their requests: nothing to unpark
        self.leaving -= back
        self.opened = wanted
        internals.unpark(self.pool, sorted(new - back))
        parked = internals.park(self.pool, sorted(gone))
        self.leaving |= gone.difference(parked)
        self._show()
        return parked

    def collect(self) -> list[int]:
        """Of the leaving ids, those that are in no use by now: they are parked."""
        free = [block for block in self.leaving if self.pool.blocks[block].ref_cnt == 0]
        internals.park(self.pool, free)
        self.leaving.difference_update(free)
        self._show()
        return free

    def _show(self) -> None:
        internals.show_blocks(self._scheduler, len(self.opened) + len(self.leaving))


class Link:
    """One engine's. Called by its scheduler, between steps."""

    def __init__(self, executor: Any, books: Books) -> None:
        self._executor = executor
        self.books = books
        self.ranks = executor.parallel_config.world_size
        wrapper = getattr(executor, "driver_worker", None)
        # The worker itself where it lives in this process: what its arena changes for others' sake is heard at once.
        self._local = getattr(wrapper, "worker", None) if self.ranks == 1 else None
        first = self._ask("remap_report")[0]
        books.open_now(first.open)  # what is parked now was never there
        self.target: tuple[int, int] = first.target
        self.refused = 0
        self._ask("remap_subscribe", self._listen if self._local is not None else None)
        self.may_move = all(self._ask("remap_may_move"))

    def _listen(self, report: Any) -> list[int]:
        return self.books.open_now(report.open)

    def step(self, blocks: int, free: int) -> Any:
        """Rank 0's report, after every rank is where it is."""
        return self._agree(self._ask("remap_step", blocks, free)[0])

    def home(self) -> Any:
        """As `step`: all layers come home."""
        return self._agree(self._ask("remap_home")[0])

    def left(self) -> None:
        """Blocks that were to leave and are in no use by now."""
        self._give_back(self.books.collect())

    def move(self, moves: dict[int, int]) -> None:
        """Contents and names of blocks, {used: free}, on all ranks and here; the old ids are free then, and leave."""
        self._ask("remap_move", moves)
        for used, free in moves.items():
            internals.exchange(self.books.pool, used, free)
        self.left()

    def _agree(self, report: Any) -> Any:
        if report.target != self.target and self.ranks > 1:
            refusals = [answer for answer in self._ask("remap_follow", report.target) if answer]
            if refusals:
                self.refused += 1
                logger.warning("%s; all ranks stay at %s layers", "; ".join(refusals), self.target[0])
                report = self._ask("remap_back", self.target)[0]
        self.target = report.target
        self._take(report)
        return report

    def _take(self, report: Any) -> None:
        if self._local is None:
            self._give_back(self.books.open_now(report.open))

    def _give_back(self, ids: list[int]) -> None:
        if ids:
            self._ask("remap_returned", ids)

    def _ask(self, method: str, *args: Any) -> list[Any]:
        if self._local is not None:
            return [getattr(self._local, method)(*args)]
        return list(self._executor.collective_rpc(method, args=args))
