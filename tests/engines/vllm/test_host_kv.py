"""vLLM's OffloadingConnector with copies of ours (`host_kv`), with and without remap: KV comes back as it went.

14 requests end in the same step, when layers are away, and each fills its last block in that step: vLLM copies those blocks
in the step after, when they are free and remap wants their pages for the layers. The next round goes on with each answer
and finds all of its blocks in host memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Vllm
from test_tokens import BURST, LITTLE, answers, assert_remapped, remap, stock, tokens

pytest.importorskip("vllm", reason="runs where vLLM is installed: make test-engines")

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from remap.adapters.vllm import host_kv
from remap.adapters.vllm.served import HOST_KV
from remap.errors import InvalidState, OutOfMemory

TALK = [{"prompt": tokens(29, seed=200 + i), "new": 100} for i in range(14)]
CACHED = 14 * 128  # 29 + 100 tokens, the last of which was never computed: four whole blocks


def host(**more: Any) -> dict[str, Any]:
    module, name = HOST_KV
    extra = {"spec_module_path": module, "spec_name": name, "offload_prompt_only": False, **more}
    return {
        "enable_prefix_caching": True,
        "kv_offloading_size": 1 / 16,
        "kv_transfer_config": {"kv_connector_extra_config": extra},
    }


@pytest.fixture(scope="module")
def talk(vllm: Vllm) -> Any:
    """Engines one after the other in one process."""
    said = answers(vllm.serve([stock("plenty", [TALK])])["plenty"])[0]
    turn = [{"prompt": each["prompt"] + answer + [7, 8, 9], "new": 40} for each, answer in zip(TALK, said)]
    shared = remap("in a shared arena", [], **host())
    own = {"kv_offloading_size": 1 / 16, "enable_prefix_caching": True}
    found = vllm.serve(
        [
            stock("plenty", [TALK, turn, BURST]),
            stock("stock", [TALK, turn], **LITTLE, enable_prefix_caching=True),
            stock("stock, host", [TALK, turn], **LITTLE, **host()),
            remap("remap, host", [TALK, turn, BURST], **host()),
            remap("remap, host, chunks of two blocks", [TALK, turn], **host(blocks_per_chunk=2)),
            remap("remap, host, not asynchronous", [TALK, turn], async_scheduling=False, **host()),
            {**stock("vLLM's own copies", [], **LITTLE, **own), "refused": True},
            {**shared, "settings": {"arena": "shared", "capacity": "60MiB"}, "refused": True},
        ]
    )
    half = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 4 << 20}
    # Without flags the size alone is enough.
    two = [remap("remap, host, two ranks", [TALK, turn], **half, **own)]
    return found | vllm.serve(two, VLLM_ENABLE_V1_MULTIPROCESSING="1", REMAP_ENABLE="1")


SERVED = ["stock, host", "remap, host", "remap, host, chunks of two blocks", "remap, host, not asynchronous"]


@pytest.mark.parametrize("name", [*SERVED, "remap, host, two ranks"])
def test_what_comes_back_from_the_host_is_what_went_there(talk: Any, name: str):
    rounds = talk[name]["rounds"]
    assert answers(talk[name]) == answers(talk["plenty"])[: len(rounds)]
    found = sum(rounds[1]["cached"])
    if "chunks" in name:  # vLLM loads no part of a chunk whose first block is still in its prefix cache
        assert CACHED * 3 // 4 <= found <= CACHED
    else:
        assert found == CACHED
    assert found > sum(talk["stock"]["rounds"][1]["cached"])


@pytest.mark.parametrize("name", [*SERVED[1:], "remap, host, two ranks"])
def test_layers_leave_and_come_home(talk: Any, name: str):
    assert_remapped(talk[name])


def test_layers_are_away_when_the_last_blocks_are_filled(talk: Any):
    """Else nothing here would show a copy that is made too late."""
    for each in talk["remap, host"]["rounds"][:2]:
        assert each["alphas"][-1] > 0


def test_blocks_move_beside_the_connector(talk: Any):
    assert talk["remap, host"]["moved"] > 0


def test_vllms_own_copies_do_not_start_on_a_cpu(talk: Any):
    """Why the copies are ours. When this fails, vLLM can do it itself."""
    assert talk["vLLM's own copies"].get("error") == "Exception", talk["vLLM's own copies"]


def test_engines_of_one_process_do_not_share_a_connector(talk: Any):
    """vLLM keeps one connector in a process."""
    assert talk["in a shared arena"].get("error") == "InvalidState", talk["in a shared arena"]
    assert talk["in a shared arena"]["fields"] == {"arena": "shared"}


# -- the copies alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("chunk", "first"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_a_job_copies_its_blocks_and_no_others(together: bool, chunk: int, first: int):
    """together: the two layers of a block lie together, as with remap. first: where in the request the job begins."""
    torch.manual_seed(0)
    memory = torch.randint(-99, 99, (8 * 2 * 16,), dtype=torch.int8)
    views = [memory.view(8, 32)] if together else list(memory.view(2, 8, 16))
    refs = [CanonicalKVCacheRef(i, views[i].shape[1]) for i in range(len(views))]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(each, each.shape[1]) for each in views], [refs])
    copies = host_kv._Copies(caches, chunk, 6)
    before, ids = memory.clone(), [5, 2, 7]
    blocks = GPULoadStoreSpec(ids, group_sizes=[3], block_indices=[first])
    chunks = CPULoadStoreSpec([4, 0, 3][: -(-(first % chunk + 3) // chunk)])
    assert copies.submit_store(1, blocks, chunks)
    memory.zero_()
    assert copies.submit_load(2, chunks, blocks)
    copies.wait({1, 2})
    done = copies.get_finished()
    assert [(each.job_id, each.success, each.transfer_size) for each in done] == [(1, True, 96), (2, True, 96)]
    assert copies.get_finished() == []
    for view, wanted in zip(views, [before.view(8, 32)] if together else before.view(2, 8, 16)):
        for block in range(8):
            assert torch.equal(view[block], wanted[block] if block in ids else torch.zeros_like(wanted[block]))


def test_on_a_device_with_streams_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_kv, "current_platform", SimpleNamespace(is_cpu=lambda: False, device_name="cuda"))
    with pytest.raises(InvalidState) as caught:
        host_kv.HostKV.get_worker(SimpleNamespace(), CanonicalKVCaches([], []))
    assert caught.value.fields["device"] == "cuda"


def test_more_than_the_machine_has_is_refused() -> None:
    """Before rows are made, which the system would grant and the kernel's out-of-memory killer would take back."""
    much = SimpleNamespace(extra_config={"cpu_bytes_to_use": 2.0**60}, blocks_per_chunk=1, num_chunks=1)
    with pytest.raises(OutOfMemory) as caught:
        host_kv.HostKV.get_worker(much, CanonicalKVCaches([], []))
    assert caught.value.fields["requested"] == 2**60
