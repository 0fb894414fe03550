"""Books over vLLM's own block pool, without an engine: blocks leave, come back and change places while requests come and go.

The model keeps, for each id, who it is with (free, requests, parked) and a made-up content, so that a block which is handed out
twice, lost, or found in the prefix cache with other tokens than it holds shows up.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("vllm", reason="runs where vLLM is installed: make test-engines")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from remap.adapters.vllm import engine_internals
from remap.adapters.vllm.link import PoolIds, RankLink
from remap.ranks import RankReport, runs

BLOCKS, FIRST = 24, 6


def scheduler_of(pool: BlockPool) -> Any:
    manager = SimpleNamespace(block_pool=pool, watermark_blocks=0)
    return SimpleNamespace(kv_cache_manager=manager, scheduler_config=SimpleNamespace(watermark=0.25))


def key(content: int) -> Any:
    return make_block_hash_with_group_id(content.to_bytes(8, "big"), 0)


class Pool(RuleBasedStateMachine):
    """Open ids are 0..FIRST-1 and any set of others. Contents: what a request wrote, by id; moves copy it."""

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
        self.scheduler = scheduler_of(self.pool)
        self.books = PoolIds(self.scheduler)
        self.requests: list[list[Any]] = []  # blocks; some belong to several
        self.contents: dict[int, int] = {}  # by id, as memory has it
        self.expected: dict[int, int] = {}  # by id(block object): what its requests wrote
        self.open = set(range(BLOCKS))
        self.written = 0
        self.change(set())

    @rule(others=st.sets(st.integers(FIRST, BLOCKS - 1)))
    def change(self, others: set[int]) -> None:
        """Other ids are open: any."""
        held = self.held()
        before, self.open = self.open, set(range(FIRST)) | others
        leaving = set(self.books.leaving)
        parked = self.books.open_now(runs(sorted(self.open)))
        assert set(parked) == before - self.open - held
        assert self.books.leaving == (leaving | before & held) - self.open

    @rule()
    def collect(self) -> None:
        gone = self.books.leaving - self.held()
        assert set(self.books.collect()) == gone

    @rule(count=st.integers(1, 4), cached=st.booleans())
    def begin(self, count: int, cached: bool) -> None:
        if count > self.pool.get_num_free_blocks():
            return
        blocks = self.pool.get_new_blocks(count)
        for block in blocks:
            assert block.block_id in self.open | self.books.leaving
            self.written += 1
            self.contents[block.block_id] = self.expected[id(block)] = self.written
            if cached:
                self.pool._insert_block_hash(key(self.written), block, num_tokens=16)
        self.requests.append(blocks)

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        """A request with the prefix that an earlier one wrote."""
        content = data.draw(st.integers(1, self.written))
        block = self.pool.cached_block_hash_to_block.get_one_block(key(content))
        if block is not None:
            assert self.contents[block.block_id] == content
            assert block.block_id in self.open | self.books.leaving
            self.pool.touch([block])
            self.requests.append([block])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.free_blocks(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))

    @rule()
    def move(self) -> None:
        """As `RankLink.leave` does."""
        self.books.collect()
        leaving = sorted(self.books.leaving)
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        if not leaving or len(free) < len(leaving):
            return
        moves = dict(zip(leaving, free))
        for used, unused in moves.items():
            self.contents[unused] = self.contents[used]
            engine_internals.exchange(self.pool, used, unused)
        assert set(self.books.collect()) == set(leaving)
        assert not self.books.leaving

    @precondition(lambda self: not self.requests)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()

    def held(self) -> set[int]:
        return {block.block_id for blocks in self.requests for block in blocks}

    @invariant()
    def everything_is_in_one_place(self) -> None:
        if not hasattr(self, "books"):
            return
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        held = self.held()
        assert len(free) == len(set(free)) == self.pool.get_num_free_blocks()
        assert self.books.opened == self.open
        assert not set(free) & held
        assert {0, *free} | held == self.open | self.books.leaving
        assert [block.block_id for block in self.pool.blocks] == list(range(BLOCKS))
        assert self.pool.null_block is self.pool.blocks[0]

    @invariant()
    def requests_find_what_they_wrote(self) -> None:
        for blocks in getattr(self, "requests", []):
            for block in blocks:
                assert self.contents[block.block_id] == self.expected[id(block)]
                assert self.pool.blocks[block.block_id] is block

    @invariant()
    def figures(self) -> None:
        if hasattr(self, "books"):
            there = len(self.open | self.books.leaving)
            assert self.pool.num_gpu_blocks == there
            assert self.scheduler.kv_cache_manager.watermark_blocks == int(0.25 * there)
            assert self.pool.get_usage() == pytest.approx(len(self.held()) / (there - 1))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


def test_an_exchange_keeps_what_is_cached_of_the_one_that_moves_only() -> None:
    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    first, second = pool.get_new_blocks(2)
    pool._insert_block_hash(key(1), first, num_tokens=16)
    pool._insert_block_hash(key(2), second, num_tokens=16)
    pool.free_blocks([second])
    engine_internals.exchange(pool, first.block_id, second.block_id)
    assert pool.get_cached_block(key(1)[:8], [0]) == [first]
    assert pool.get_cached_block(key(2)[:8], [0]) is None
    assert (first.block_id, second.block_id) == (2, 1)


def test_ids_beyond_the_pool_go_back_as_soon_as_they_are_withdrawn() -> None:
    """A ceiling inside of a layer: the layer's other blocks are open, and nobody uses them."""
    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    books = PoolIds(scheduler_of(pool))
    assert books.open_now(((0, 5),)) == [5, 6, 7]
    assert books.open_now(((0, 12),)) == []
    assert pool.num_gpu_blocks == 8 and pool.get_num_free_blocks() == 7
    held = pool.get_new_blocks(7)
    assert books.open_now(((0, 5), (10, 12))) == [8, 9]
    assert books.leaving == {5, 6, 7}
    pool.free_blocks(held)
    assert books.collect() == [5, 6, 7]
    assert books.open_now(((0, 5),)) == [10, 11]
    assert books.open_now(((0, 5),)) == []


def link_over(books: PoolIds, asked: list[Any], *, sharing: bool) -> RankLink:
    """A link whose ranks only write down what they are asked."""
    link = RankLink.__new__(RankLink)
    link.books, link.sharing, link._asleep, link._local = books, sharing, False, None
    link.group = SimpleNamespace(
        target=(1, 1),
        home=lambda: asked.append(("home",)),
        woken=lambda reports: reports[0].open,
        returned=lambda blocks: asked.append(("returned", blocks)),
    )
    woken = [RankReport(((0, 4),), (1, 1))]
    link._ask = lambda *call: asked.append(call) or (woken if call == ("wake",) else [])
    return link


@pytest.mark.parametrize("sharing", [True, False])
def test_what_has_left_goes_back_before_an_idle_engine_rests(sharing: bool) -> None:
    """The last request's blocks were withdrawn under it: with them the layers could not come home, nor others get theirs."""
    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    books, asked = PoolIds(scheduler_of(pool)), []
    held = pool.get_new_blocks(7)
    assert books.open_now(((0, 4),)) == []
    assert books.leaving == {4, 5, 6, 7}
    pool.free_blocks(held)
    link = link_over(books, asked, sharing=sharing)
    link.rest()
    assert asked[:2] == [("returned", [4, 5, 6, 7]), ("sleep",) if sharing else ("home",)]
    assert not books.leaving and pool.get_num_free_blocks() == 3
    if sharing:
        link.rest()
        assert len(asked) == 2  # it sleeps already
        link.wake()
        link.wake()
        assert asked[2:] == [("wake",)]


def connector_of(scheduler: Any) -> Any:
    """A stand-in of vLLM's OffloadingConnector, and what its scheduler's side keeps: jobs, and requests."""
    side = SimpleNamespace(_jobs={}, _req_status={})
    scheduler.connector = SimpleNamespace(connector_scheduler=side)
    scheduler.kv_cache_manager.get_block_ids = lambda request: ([6],)
    return side


def job(*blocks: int, store: bool = True) -> Any:
    return SimpleNamespace(
        deferred_fence_block_ids=list(blocks), fenced_block_ids=None, is_store=store, req_id="a request"
    )


def state(*blocks: int, finished: bool, signaled: bool) -> Any:
    groups = (SimpleNamespace(block_ids=list(blocks)),)
    return SimpleNamespace(
        req=SimpleNamespace(is_finished=lambda: finished), finished_signaled=signaled, group_states=groups
    )


def test_blocks_that_are_copied_to_the_host_leave_afterwards() -> None:
    """They are free, and their pages would be a layer's when the connector reads them."""
    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    scheduler = scheduler_of(pool)
    side, books = connector_of(scheduler), PoolIds(scheduler)
    side._jobs = {1: job(4)}
    side._req_status = {
        "ended, its last job comes": state(5, finished=True, signaled=False),
        "ended": state(7, finished=True, signaled=True),
    }
    assert books.open_now(((0, 4),)) == [6, 7]
    assert books.leaving == {4, 5} and pool.get_num_free_blocks() == 5
    assert books.collect() == []
    side._jobs.clear()
    assert books.collect() == [4]
    side._req_status.clear()
    assert books.collect() == [5]
    assert not books.leaving and pool.get_num_free_blocks() == 3


def test_blocks_that_are_being_loaded_count_as_copied() -> None:
    scheduler = scheduler_of(BlockPool(8, enable_caching=True, hash_block_size=16))
    connector_of(scheduler)._jobs = {1: job(store=False)}
    assert engine_internals.being_copied(scheduler) == {6}


def test_neither_end_of_a_move_is_being_copied_and_the_connector_learns_the_new_ids() -> None:
    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    scheduler, asked = scheduler_of(pool), []
    side, books = connector_of(scheduler), PoolIds(scheduler)
    held = pool.get_new_blocks(7)
    books.open_now(((0, 6),))
    pool.free_blocks([held[0], held[1]])  # the blocks 1 and 2
    side._jobs = {1: job(1), 2: job(6)}  # a free one and a leaving one
    side._req_status = {"running": state(6, 7, finished=False, signaled=False)}
    link = link_over(books, asked, sharing=False)
    link._rpc, link.may_move, link.moved = lambda *call: asked.append(call), True, 0
    link.leave(spare=0)
    assert ("remap_move", {7: 2}) in asked and books.leaving == {6}
    assert side._req_status["running"].group_states[0].block_ids == [6, 2]
    link.leave(spare=0)
    assert len([call for call in asked if call[0] == "remap_move"]) == 1
