"""vLLM's scheduler, which asks for layers before it preempts and gives them back when it can.

schedule            what running and waiting requests need -> `Link.step`; blocks that leave have drained, or are moved
allocation fails    the same, for what is missing; vLLM tries once more, and only then preempts
last request ends   everything comes home
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from . import internals
from .link import Books, Link

__all__ = ["Scheduler"]

internals.tell_schedulers_of_their_executor()


class Scheduler(AsyncScheduler):
    """For `--scheduler-cls`; works with and without asynchronous scheduling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remap: Link | None = None
        self._step_tokens = max(1, self.block_size)

    def bind(self, executor: Any) -> None:
        """The engine is complete: park the blocks that are not there yet, and listen."""
        self.remap = Link(executor, Books(self))
        internals.on_failed_allocation(self, self._grow)

    # -- before each step ------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        link = self.remap
        if link is not None and self.has_unfinished_requests():
            link.wake()
            if link.books.leaving:
                link.leave(self._reserve)
            wanted, free = self._demand(), self.kv_cache_manager.block_pool.get_num_free_blocks()
            # Between processes a question costs a round trip, which waits for the step under way: only where it may
            # matter.
            if link.group.ranks == 1 or link.group.target[0] or wanted + self._reserve > free:
                link.step(wanted, free)
        return super().schedule(*args, **kwargs)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        link = self.remap
        if link is not None and not self.has_unfinished_requests():
            link.rest()
        return outputs

    @property
    def _reserve(self) -> int:
        return 2 * len(self.running) + 1

    def _demand(self) -> int:
        """Blocks that the next steps take from the free ones: of running requests what they lack, of waiting ones, as
        many as have seats, all that is neither cached nor filled by one before them."""
        prefixes = internals.Prefixes(self)
        wanted = 0
        for request in self.running:
            wanted += self._missing(request, 0)
            if request.num_computed_tokens < request.num_tokens - 1:
                prefixes.running(request)
        seats, most = self.max_num_running_reqs - len(self.running), len(self.kv_cache_manager.block_pool.blocks)
        for request in self.waiting:
            if seats <= 0 or wanted >= most:  # more than there can be is not asked for
                break
            seats -= 1
            wanted += self._missing_at_start(request, prefixes)
        return wanted

    def _missing_at_start(self, request: Any, prefixes: internals.Prefixes) -> int:
        """Of a request that waits."""
        spared = 0 if internals.blocks_held(self, request) else prefixes.spared(request)
        return max(0, self._missing(request, 1) - spared)

    def _missing(self, request: Any, more: int) -> int:
        tokens = request.num_tokens_with_spec + request.num_output_placeholders + self.num_lookahead_tokens + more
        whole = -(-min(tokens, self.max_model_len) // self._step_tokens)
        return max(0, whole * len(self.kv_cache_config.kv_cache_groups) - internals.blocks_held(self, request))

    def _grow(self, request: Any, num_new_tokens: int) -> bool:
        """vLLM lacks blocks for this request. Whether there are more now. If it is the only one, waiting longer or
        preempting it would gain nothing, and it was accepted because it fits into the largest cache: then it gets
        that."""
        link = self.remap
        assert link is not None
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        alone = all(each is request for each in self.running)
        link.step(max(free + 1, self._missing_at_start(request, internals.Prefixes(self))), free, alone)
        return bool(self.kv_cache_manager.block_pool.get_num_free_blocks() > free)
