# SPDX-License-Identifier: Apache-2.0
"""KV in host memory for vLLM on a CPU, behind vLLM's own OffloadingConnector, with remap or without it.

    --kv-offloading-size 4 --kv-transfer-config '{"kv_connector_extra_config": {"spec_name": "HostKV",
    "spec_module_path": "remap.adapters.vllm.host_kv", "offload_prompt_only": false}}'

vLLM decides what it stores, evicts and loads: its connector and its CPUOffloadingManager. Only the copies are ours. vLLM's own
worker makes them with streams of a GPU, and does not start on a CPU. Here a copy is made, in full, when it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from remap.errors import InvalidState
from remap.memory.machine_memory import require_memory

__all__ = ["HostKV"]


class HostKV(CPUOffloadingSpec):
    """For `spec_name`. `cpu_bytes_to_use` (`--kv-offloading-size`) is the memory of all ranks together."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Raises InvalidState (field device) on a device with streams, where a copy has to wait for the pass, and OutOfMemory for
        more bytes than the machine has."""
        if not current_platform.is_cpu():
            raise InvalidState(
                f"HostKV copies in the processor's memory, and vLLM runs on {current_platform.device_name}; the engine was "
                "not started; leave out spec_name and spec_module_path, and unset REMAP_ENABLE",
                device=str(current_platform.device_name),
            )
        require_memory(int(self.extra_config["cpu_bytes_to_use"]), what="host memory for KV (--kv-offloading-size)")
        return _Copies(kv_caches, self.blocks_per_chunk, self.num_chunks)


class _Copies(OffloadingWorker):
    """Copies between vLLM's blocks and rows of host memory. A row is one block of one tensor: one layer's, or, where
    the layers of a block lie together, all layers'. A chunk is `blocks_per_chunk` rows."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        self._chunk = blocks_per_chunk
        blocks = [each.tensor[:, : each.page_size_bytes] for each in kv_caches.tensors]
        # Not zeroed: the system gives the memory of a row when something is first stored there.
        rows = [torch.empty((chunks * blocks_per_chunk, each.shape[1]), dtype=each.dtype) for each in blocks]
        self._groups = [
            [(blocks[ref.tensor_idx], rows[ref.tensor_idx]) for ref in group] for group in kv_caches.group_data_refs
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, ((row, block) for block, row in self._pairs(src_spec, dst_spec)))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._pairs(dst_spec, src_spec))

    def _copy(self, job_id: int, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Copy into the first of each pair what the second holds."""
        start, nbytes = time.perf_counter(), 0
        for target, source in pairs:
            target.copy_(source)
            nbytes += target.numel()
        self._done.append(TransferResult(job_id, True, nbytes, time.perf_counter() - start))
        return True

    def _pairs(self, blocks: Any, chunks: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The block and its row, for each block of a job in each tensor.

        blocks: their ids by group, and where in the request each group begins: perhaps inside of a chunk. chunks: ids.
        """
        ids, places = blocks.block_ids.tolist(), chunks.block_ids.tolist()
        for size, first, tensors in zip(blocks.group_sizes, blocks.block_indices, self._groups):
            skipped = first % self._chunk
            taken = -(-(size + skipped) // self._chunk) if size else 0
            rows = [place * self._chunk + i for place in places[:taken] for i in range(self._chunk)]
            for block, row in zip(ids[:size], rows[skipped:]):
                for there, here in tensors:
                    yield there[block], here[row]
            ids, places = ids[size:], places[taken:]

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing: a job is done when it has been submitted."""
