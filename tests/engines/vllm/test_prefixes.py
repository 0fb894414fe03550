"""What waiting requests have in common is asked for once, and what is cached is not asked for: over vLLM's own prefix cache, and
in engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Vllm
from test_tokens import answers, remap, stock, tokens

pytest.importorskip("vllm", reason="runs where vLLM is installed: make test-engines")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from remap.adapters.vllm import engine_internals

SIZE, BLOCKS = 16, 64
HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)


def manager(window: int | None = None) -> KVCacheManager:
    shape = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}
    spec = FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
    config = KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        config, max_model_len=1024, scheduler_block_size=SIZE, hash_block_size=SIZE, enable_caching=True, log_stats=True
    )


def request(name: str, prompt: list[int], **more: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=8, **more),
        pooling_params=None,
        block_hasher=get_request_block_hasher(SIZE, HASH),
    )


def prefixes(of: KVCacheManager) -> engine_internals.Prefixes:
    return engine_internals.Prefixes(SimpleNamespace(kv_cache_manager=of))


def test_what_an_encoder_heard_takes_as_many_blocks_however_much_is_said_of_it():
    shape = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}
    specs = FullAttentionSpec(**shape), CrossAttentionSpec(**shape)
    groups = [KVCacheGroupSpec([str(spec)], spec) for spec in specs]
    scheduler = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups), is_encoder_decoder=True)
    heard = SimpleNamespace(mm_features=["a sound"], get_num_encoder_embeds=lambda index: 5 * SIZE + 1)
    found = [engine_internals.blocks_of(scheduler, heard, tokens, SIZE) for tokens in (1, SIZE, 9 * SIZE)]
    assert found == [1 + 6, 1 + 6, 9 + 6]


def admit(of: KVCacheManager, one: Request) -> int:
    """As the scheduler does. How many fewer blocks are free."""
    free = of.block_pool.get_num_free_blocks()
    found, hit, _ = of.get_computed_blocks(one)
    assert of.allocate_slots(one, one.num_tokens - hit, hit, found) is not None
    one.num_computed_tokens = one.num_tokens
    return free - of.block_pool.get_num_free_blocks()


def family(count: int, shared: int, own: int) -> list[Request]:
    common = tokens(shared, seed=1)
    return [request(str(i), common + tokens(own, seed=10 + i)) for i in range(count)]


@pytest.mark.parametrize(("shared", "own"), [(128, 10), (128, 0), (130, 20), (5, 40)])
@pytest.mark.parametrize("before", ["nobody", "served and gone", "still running"])
@pytest.mark.parametrize("window", [None, 48])
def test_what_is_counted_is_what_is_taken(shared: int, own: int, before: str, window: int | None):
    pool = manager(window)
    if before != "nobody":
        first = request("first", tokens(shared, seed=1) + tokens(30, seed=2))
        admit(pool, first)
        if before == "served and gone":
            pool.free(first)
    waiting = family(4, shared, own)
    seen = prefixes(pool)
    counted = [-(-one.num_tokens // SIZE) - seen.spared(one) for one in waiting]
    taken = [admit(pool, one) for one in waiting]
    if window is None:
        assert counted == taken
    else:  # what others fill in the same step is not foreseen there
        assert all(most >= needed for most, needed in zip(counted, taken))
        assert counted[0] == taken[0]


def test_asking_changes_nothing():
    pool = manager()
    served = family(3, 128, 10)
    for one in served:
        admit(pool, one)
    for one in served:
        pool.free(one)
    order = [block.block_id for block in pool.block_pool.free_block_queue.get_all_free_blocks()]
    assert (
        prefixes(pool).spared(request("more", [*tokens(128, seed=1), 7])) == 0
    )  # cached, and all of it counts as free
    assert [block.block_id for block in pool.block_pool.free_block_queue.get_all_free_blocks()] == order
    assert pool.make_prefix_cache_stats().requests == 0  # the scheduler counts, when it admits


def test_a_prompt_that_is_being_filled_counts_for_those_behind_it():
    pool, (first, second) = manager(), family(2, 128, 10)
    assert pool.allocate_slots(first, 32) is not None  # its first chunk
    seen = prefixes(pool)
    seen.running(first)
    assert seen.spared(second) == 128 // SIZE


def test_one_that_does_not_read_the_cache_counts_in_full():
    pool = manager()
    admit(pool, family(1, 128, 10)[0])
    assert prefixes(pool).spared(request("scored", [*tokens(128, seed=1), 7], prompt_logprobs=1)) == 0


def test_requests_that_share_a_system_prompt_move_no_layer(vllm: Vllm):
    """16 prompts of 512 tokens in common and 10 of their own, in blocks of 32: 16 blocks and 16, not 272. 48 are there."""
    shared = tokens(512, seed=1)
    chat = [{"prompt": shared + tokens(10, seed=10 + i), "new": 16} for i in range(16)]
    engine = {"kv_cache_memory_bytes": 12 << 20, "enable_prefix_caching": True}
    run = vllm.serve([stock("stock", [chat, chat], **engine), remap("remap", [chat, chat], **engine)])
    assert answers(run["remap"]) == answers(run["stock"])
    for mine, theirs in zip(run["remap"]["rounds"], run["stock"]["rounds"]):
        assert mine["cached"] == theirs["cached"]
        assert set(mine["alphas"]) == {0}
        assert mine["copies"] == 0
    assert run["remap"]["preempted"] == run["stock"]["preempted"] == 0
    assert run["stock"]["rounds"][1]["cached"] == [512] * 16
