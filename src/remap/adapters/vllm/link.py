# SPDX-License-Identifier: Apache-2.0
"""The link between vLLM's scheduler and the ranks: it opens blocks, and lets blocks leave by draining or moving."""

from __future__ import annotations

import time
from typing import Any

from remap.joined import UNIX
from remap.ranks import RankGroup, RankReport, Runs, ids

from . import engine_internals
from .apart import Apart

__all__ = ["PoolIds", "RankLink"]

_LOOK_S = 0.25
"""How often a worker in another process is asked whether its turn is over: an answer waits for the pass under way."""


class PoolIds:
    """The ids of vLLM's pool. opened: ids that vLLM may hand out; leaving: drained ids that are still in use.

    The tenant may open ids beyond the pool: a layer that leaves gives all its pages, and vLLM's cache may have a ceiling
    inside of it. No request uses those ids.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.opened = set(range(len(self.pool.blocks)))
        self.leaving: set[int] = set()
        self._beyond: set[int] = set()

    def open_now(self, runs: Runs) -> list[int]:
        """Open exactly these ids. Returns the ids that left at once, because no request used them."""
        wanted = ids(runs)
        beyond = {each for each in wanted if each >= len(self.pool.blocks)}
        wanted -= beyond
        unused, self._beyond = sorted(self._beyond - beyond), beyond
        gone, new = self.opened - wanted, wanted - self.opened
        back = self.leaving & new  # they are still with their requests
        self.leaving -= back
        self.opened = wanted
        engine_internals.unpark(self.pool, sorted(new - back))
        parked = engine_internals.park(self.pool, sorted(gone), self.being_copied())
        self.leaving |= gone.difference(parked)
        self._show()
        return parked + unused

    def forget(self, lost: Runs) -> None:
        """The KV in these ids has gone, though they may be open: no request uses them, and the prefix cache is to find none."""
        engine_internals.forget_cached(self.pool, ids(lost) & self.opened)

    def collect(self) -> list[int]:
        """Park the leaving ids that neither a request nor a copy to the host uses any more, and return them."""
        if not self.leaving:
            return []
        free = engine_internals.park(self.pool, sorted(self.leaving), self.being_copied())
        self.leaving.difference_update(free)
        self._show()
        return free

    def being_copied(self) -> set[int]:
        """Blocks that stay where they are until vLLM's KV connector has copied them."""
        return engine_internals.being_copied(self._scheduler)

    def exchange(self, moves: dict[int, int]) -> None:
        """Give the used blocks the ids of free ones. moves: used id -> free id."""
        for used, unused in moves.items():
            engine_internals.exchange(self.pool, used, unused)
        engine_internals.rename_in_connector(self._scheduler, moves)

    def _show(self) -> None:
        engine_internals.show_blocks(self._scheduler, len(self.opened) + len(self.leaving))


class RankLink:
    """One engine's ranks; its scheduler calls these methods between steps.

    moved: number of blocks that were moved out of ids that had to leave. first: blocks of the KV cache of the start.
    """

    def __init__(self, executor: Any, books: PoolIds) -> None:
        self._executor, self.books, self.moved = executor, books, 0
        ranks = executor.parallel_config.world_size
        # The worker, if it lives in this process: it then reports changes that other tenants cause at once.
        self._local = getattr(getattr(executor, "driver_worker", None), "worker", None) if ranks == 1 else None
        manifest = self._rpc("remap_manifest")[0]
        self._joined = manifest["arena"].startswith(UNIX)
        self.group = (Apart if self._joined and ranks > 1 else RankGroup)(self._ask, ranks)
        books.open_now(self.group.opened)  # ids that this parks never had pages: there is nothing to return
        self._ask("listen", self._heard if self._local is not None else None)
        self.may_move = all(self._rpc("remap_may_move"))
        self.first = max(len(books.opened), manifest["first_blocks"])  # of an engine that starts cold the latter
        self.sharing = bool(manifest["arena"])
        """Whether other tenants may have pages now that this one gets later."""
        self._asleep = self._settled = False
        self._looked_s = 0.0
        if self.sharing:
            self.rest()  # until its first request

    @property
    def local(self) -> bool:
        """Whether the only rank lives in this process: asking it costs no round trip, and waits for no pass."""
        return self._local is not None

    def step(self, blocks: int, free: int, anyway: bool = False, can_wait: bool = False) -> int:
        """Make one step on all ranks for this demand, and change the pool accordingly. anyway, can_wait: see `Rank.step`. Returns
        how many blocks are missing that were to be had at any cost."""
        report = self.group.step(blocks, free, anyway, can_wait)
        self._take(report)
        return 0 if report is None else report.short

    @property
    def asleep(self) -> bool:
        """Whether other tenants, or processes, may take blocks out of the pool now."""
        return self._asleep

    def wake(self) -> bool:
        """Wake the tenant: there are requests. Returns whether it serves. If other processes keep the pages that its layers need
        it sleeps on, and the pool is not to be touched."""
        if self._asleep:
            try:
                reports = self._ask("wake")
            except BaseException:  # what other ranks have lost they tell once
                self.books.forget(self.group.opened if self._local is None else ())
                raise
            for report in reports if self._local is None else ():  # else it has heard of each change at once
                self.books.forget(() if report is None else report.lost)
            if any(report is None for report in reports):
                if self.group.ranks > 1:
                    self._ask("sleep")  # none keeps pages while another has none
                return False
            opened = self.group.woken(reports)
            self._asleep = self._settled = False
            if self._local is None:
                self.books.open_now(opened)
        return True

    def may_be_whole(self) -> bool | None:
        """Whether the next pass may be one CUDA graph on all ranks: one that replays it beside one that does not would read what
        that one has not written (vLLM's reduction of a graph has buffers of its own). None: there is one rank, which knows.

        Layers come home at another moment on each rank, so after a change all are asked until none has anything to wait for. From
        then on only this object's next call changes that. Not so on a broker's pages, which come and go by themselves: no pass is
        one graph."""
        if self.group.ranks == 1:
            return None
        if not self._settled and not self.group.target[0] and not self._joined:
            self._settled = all(self._rpc("remap_settled"))
        return self._settled

    def turn_over(self) -> bool:
        """Whether the requests are to pause, for other processes wait for pages that this engine has (`Rank.turn_over`)."""
        if not self._joined or self._asleep:
            return False
        if self._local is None:
            now = time.monotonic()
            if now - self._looked_s < _LOOK_S:
                return False
            self._looked_s = now
        return any(self._ask("turn_over"))

    def give_turn(self) -> None:
        """No request has a block: the engine sleeps, and others have what they wait for."""
        self._give_back(self.books.collect())
        self._ask("give_turn")
        self._asleep = True

    def rest(self) -> None:
        """There are no requests: bring the layers home. In a shared arena other tenants may use their pages instead."""
        if self._asleep:
            return
        self._give_back(self.books.collect())
        if self.sharing:
            self._ask("sleep")
            self._asleep = True
        elif self.group.target[0] or self.local:  # else to say that it is idle is not worth a round trip
            self._take(self.group.home())
            # Ranks in other processes learn only now which blocks have left, so ask them again.
            if self.group.target[0] and not self.books.leaving:
                self._take(self.group.home())

    def leave(self, spare: int) -> None:
        """Let blocks leave: free ones go; used ones move to other ids, if at least `spare` blocks stay free."""
        self._give_back(self.books.collect())
        copied, pool = self.books.being_copied(), self.books.pool
        leaving = sorted(self.books.leaving - copied)
        # Count before listing: this runs in every step while blocks are leaving.
        if leaving and self.may_move and pool.get_num_free_blocks() >= len(leaving) + spare:
            free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
            moves = dict(zip(leaving, [each for each in free if each not in copied]))
            if moves:
                self._rpc("remap_move", moves)
                self.books.exchange(moves)
                self.moved += len(moves)
                self._give_back(self.books.collect())

    def _heard(self, report: RankReport) -> list[int]:
        return self.books.open_now(report.open)

    def _take(self, report: RankReport | None) -> None:
        if report is not None and self._local is None:
            self._settled = False
            self._give_back(self.books.open_now(report.open))

    def _give_back(self, blocks: list[int]) -> None:
        if blocks:
            self.group.returned(blocks)

    def _ask(self, method: str, *args: Any) -> list[Any]:
        return self._rpc("remap_call", method, *args)

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        if self._local is not None:
            return [getattr(self._local, method)(*args)]
        return list(self._executor.collective_rpc(method, args=args))
