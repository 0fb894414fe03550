# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, which asks for the memory of layers before it preempts requests, and gives it back when it can.

schedule            reports the demand of running and waiting requests (`RankLink.step`); leaving blocks drain or move. Of a model
                    whose layers have no pages nothing is scheduled until there are some, nor while it is the turn of an
                    engine in another process
allocation fails    reports the missing blocks; vLLM then tries once more, and preempts only if that fails, too. A request for
                    which there can never be enough ends with an error
last request ends   brings all layers home
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as OverlappingBase
from vllm.v1.core.sched.scheduler import Scheduler as Base

from remap.rate_limited import RateLimitedWarning

from . import engine_internals, metrics
from .link import PoolIds, RankLink

__all__ = ["Scheduler"]

logger = logging.getLogger("vllm.remap")

engine_internals.tell_schedulers_of_their_executor()

_AGAIN_S = 0.05
"""How long requests of a model whose layers have no pages wait until these are asked for again. Between two times the engine
hears of aborted requests and new ones."""


class Scheduler(Base):
    """For `--scheduler-cls`; where steps overlap (asynchronous scheduling) it makes an `Overlapping`.

    vLLM's AsyncScheduler writes placeholders where drafted tokens come, which are then filled in by the worker: without overlap
    the worker would compute with them.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
        # Chosen here, since vLLM makes whatever class the configuration names, also one that a flag gave.
        overlaps = cls is Scheduler and vllm_config.scheduler_config.async_scheduling
        return object.__new__(Overlapping if overlaps else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remap: RankLink | None = None
        self._step_tokens = max(1, self.block_size)
        self._in_flight = 0  # steps that are scheduled and have no output yet
        self._short = 0  # blocks that were missing at the last allocation, with all layers away
        self._failed: dict[str, str] = {}  # request -> why it can never be served
        self._waits = RateLimitedWarning(logger)

    def bind(self, executor: Any) -> None:
        """Withhold the blocks that are not usable yet, and listen to changes.

        `engine_internals` calls it on a complete engine.
        """
        self.remap = RankLink(executor, PoolIds(self))
        engine = engine_internals.engine_index(self.vllm_config)
        self.remap_beyond = metrics.Beyond(self.remap.first - 1, engine)  # but for vLLM's null block
        engine_internals.around_allocations(self, self._grow, self.remap_beyond.allocated, self._refused)

    # -- before each step ------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        link = self.remap
        if link is not None and self.has_unfinished_requests():
            if link.turn_over():
                if self._in_flight:  # their outputs come first: no pass reads a block that has gone
                    return engine_internals.nothing_scheduled()
                engine_internals.preempt_all(self)
                link.give_turn()
            if not link.wake():
                time.sleep(_AGAIN_S)
                return engine_internals.nothing_scheduled()
            if link.books.leaving:
                link.leave(self._reserve)
            wanted, free = self._demand(), self.kv_cache_manager.block_pool.get_num_free_blocks()
            # Between processes a step costs a round trip, which waits for the pass under way: ask only if it may
            # matter.
            if link.local or link.group.target[0] or wanted + self._reserve > free:
                link.step(wanted, free, can_wait=bool(self.running))  # who runs and lacks blocks asks again: `_grow`
        scheduled = super().schedule(*args, **kwargs)
        if link is not None and scheduled.total_num_scheduled_tokens:
            scheduled.remap_whole = link.may_be_whole()
        self._in_flight += scheduled.total_num_scheduled_tokens > 0
        return scheduled

    def update_from_output(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._in_flight -= scheduled.total_num_scheduled_tokens > 0
        outputs = super().update_from_output(scheduled, *args, **kwargs)
        link = self.remap
        if self._failed:
            engine_internals.fail(self, self._failed, outputs)
            self._failed = {}
        if link is not None and not self.has_unfinished_requests():
            link.rest()
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """As vLLM's. While the tenant sleeps a broker takes blocks out of the pool in another thread: it is woken for this, or
        nothing is reset if it cannot be."""
        link = self.remap
        if link is None or not link.asleep:
            return bool(super().reset_prefix_cache(*args, **kwargs))
        if not link.wake():
            return False
        try:
            return bool(super().reset_prefix_cache(*args, **kwargs))
        finally:
            link.rest()

    @property
    def _reserve(self) -> int:
        return 2 * len(self.running) + 1

    def _demand(self) -> int:
        """Blocks that the next steps take from the free ones.

        A running request takes the blocks that it lacks. A waiting request that has a seat takes all blocks that are
        neither cached nor filled by a request before it.
        """
        prefixes = engine_internals.Prefixes(self)
        wanted = 0
        for request in self.running:
            wanted += self._missing(request, 0)
            if request.num_computed_tokens < request.num_tokens - 1:
                prefixes.running(request)
        seats, most = self.max_num_running_reqs - len(self.running), len(self.kv_cache_manager.block_pool.blocks)
        for request in self.waiting:
            if seats <= 0 or wanted >= most:  # no more blocks than that can exist
                break
            seats -= 1
            wanted += self._missing_at_start(request, prefixes)
        return wanted

    def _missing_at_start(self, request: Any, prefixes: engine_internals.Prefixes) -> int:
        """Blocks that a waiting request takes."""
        spared = 0 if engine_internals.blocks_held(self, request) else prefixes.spared(request)
        return max(0, self._missing(request, 1) - spared)

    def _missing(self, request: Any, more: int) -> int:
        tokens = request.num_tokens_with_spec + request.num_output_placeholders + self.num_lookahead_tokens + more
        whole = engine_internals.blocks_of(self, request, min(tokens, self.max_model_len), self._step_tokens)
        return max(0, whole - engine_internals.blocks_held(self, request))

    def _grow(self, request: Any, num_new_tokens: int) -> bool:
        """Ask for blocks that vLLM lacks for this request. Returns whether there are more free blocks now.

        If the request is the only one, waiting or preempting it would gain nothing. vLLM accepted it because it fits
        into the largest cache, so the cache then grows at any cost; see `_refused`.
        """
        link = self.remap
        assert link is not None
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        alone = all(each is request for each in self.running)
        wanted = max(free + 1, self._missing_at_start(request, engine_internals.Prefixes(self)))
        can_wait = not alone and all(each is not request for each in self.running)
        self._short = link.step(wanted, free, alone, can_wait)
        return bool(self.kv_cache_manager.block_pool.get_num_free_blocks() > free)

    def _refused(self, request: Any) -> None:
        """vLLM has found too few blocks for this request. If all layers are away that can be, and nobody else has a block, it
        waits for nothing, and all others behind it: it ends with an error. In an arena that others use it waits for them."""
        link = self.remap
        assert link is not None
        free, held = self.kv_cache_manager.block_pool.get_num_free_blocks(), engine_internals.blocks_held(self, request)
        there = len(link.books.opened) - 1  # but for vLLM's null block
        if not self._short or free + held < there:
            return
        wanted = held + self._missing(request, 1)
        why = (
            f"request {request.request_id} has {request.num_tokens} tokens, which take {wanted} KV blocks; "
            f"there are {there} with all layers away that can be"
        )
        if link.sharing:
            self._waits.warn("remap: %s; it waits for what other engines give", why)
        elif request.request_id not in self._failed:
            self._failed[request.request_id] = f"remap: {why}; give it fewer tokens, or lower --max-model-len"
            logger.error("remap: %s; it ends with an error; give it fewer tokens, or lower --max-model-len", why)


class Overlapping(Scheduler, OverlappingBase):
    """The same where steps overlap."""
