# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's kernels over the same strided KV tensors.

FlashInfer takes keys and values as a pair of NHD views (blocks, block_tokens, kv_heads, head_dim) and reads their strides;
its fa2 kernels, which are asked for here by name, require only that keys and values have the same ones, which both KV
layouts give. Offsets are 64 bit from the block on, and slots beyond a sequence's length are filled with zeros in shared
memory instead of being loaded. (All of this by reading its sources: csrc/batch_decode.cu, include/flashinfer/page.cuh.)

Every pass is planned on the host. A captured decode has a wrapper of its own for each batch size, whose index buffers
stay where they are; planning rewrites them, outside of the graph. Padded rows have no blocks. Tokens are written by the
project's own kernel. Importing this module imports flashinfer and triton. Not yet run on a GPU; the tests run it against a
stand-in for the package.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import flashinfer
import torch

from remap_serve.engine.inputs import Staged
from remap_serve.engine.paged_triton import write_kv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remap_serve.engine.chunk import Chunk

__all__ = ["FlashInferPaged"]

WORKSPACE_BYTES = 128 << 20
# From this many query heads a KV head on, decode by matrix products is faster than by dot products (FlashInfer's advice).
MATRIX_GROUP = 4


class FlashInferPaged:
    """`paged.DeviceAttention` by FlashInfer. max_blocks: most blocks that the sequences of a pass hold together. by_kernel:
    how their ids reach the device, see `inputs.Staged`; FlashInfer copies the results of planning itself.
    """

    name = "flashinfer"
    capturable = True

    def __init__(
        self, tensors: Sequence[torch.Tensor], heads: int, scale: float, max_blocks: int, by_kernel: bool = False
    ) -> None:
        self._layers = [(tensor[0], tensor[1]) for tensor in tensors]
        _, self._block_tokens, self._kv_heads, self._head_dim = self._layers[0][0].shape
        self._device = tensors[0].device
        self._heads = heads
        self._max_blocks = max_blocks
        self._plan = {"sm_scale": scale, "q_data_type": tensors[0].dtype, "kv_data_type": tensors[0].dtype}
        # Zeroed: one of its kernels counts in it.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._decodes: dict[int | None, Any] = {}
        self._decode: Any = None
        self._prefill: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
        self._prefilled = (0, 0)
        # Decodes and prefills of one pass are planned one after the other, and both lists live until its end.
        self._lists = [Staged(self._device, by_kernel=by_kernel, blocks=max_blocks) for _ in range(2)]
        self._planned = torch.cuda.Event() if self._device.type == "cuda" else None

    def plan_decode(self, chunks: Sequence[Chunk], padded_to: int | None) -> None:
        if not chunks and padded_to is None:
            return
        self._decode = self._decodes.get(padded_to) or self._decode_wrapper(padded_to)
        padding = 0 if padded_to is None else padded_to - len(chunks)
        starts, blocks, last = self._listed(self._lists[0], chunks, padding)
        self._decode.plan(
            starts, blocks, last, self._heads, self._kv_heads, self._head_dim, self._block_tokens, **self._plan
        )
        self._leaves()

    def plan_prefill(self, chunks: Sequence[Chunk], rows: Sequence[int], first: int) -> None:
        counts = [chunk.count for chunk in chunks]
        self._prefilled = (first, first + sum(counts))
        starts, blocks, last = self._listed(self._lists[1], chunks, 0)
        queries = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        self._prefill.plan(
            queries, starts, blocks, last, self._heads, self._kv_heads, self._head_dim, self._block_tokens,
            causal=True, **self._plan,
        )  # fmt: skip
        self._leaves()

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        write_kv(self._layers[layer], k, v, slots)

    def decode(
        self,
        layer: int,
        q: torch.Tensor,
        table: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._decode.run(q, self._layers[layer], out=out)

    def prefill(self, layer: int, q: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
        first, last = self._prefilled
        self._prefill.run(q[first:last], self._layers[layer], out=out[first:last])

    def _decode_wrapper(self, size: int | None) -> Any:
        """size: the fixed batch size of a captured decode; its buffers are the graph's inputs and never move."""
        fixed: dict[str, Any] = {}
        if size is not None:
            fixed = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": torch.zeros(size + 1, dtype=torch.int32, device=self._device),
                "paged_kv_indices_buffer": torch.zeros(self._max_blocks, dtype=torch.int32, device=self._device),
                "paged_kv_last_page_len_buffer": torch.zeros(size, dtype=torch.int32, device=self._device),
            }
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_tensor_cores=self._heads // self._kv_heads >= MATRIX_GROUP,
            backend="fa2",
            **fixed,
        )
        self._decodes[size] = wrapper
        return wrapper

    def _listed(
        self, staged: Staged, chunks: Sequence[Chunk], padding: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(where each sequence's blocks start, all blocks, tokens in each last block). Only the blocks go to the device:
        planning reads the others on the host. Waits until the last plan has left the page-locked memory that FlashInfer
        keeps for it.
        """
        if self._planned is not None:
            self._planned.synchronize()
        size = self._block_tokens
        lists = [chunk.sequence.blocks[: -(-chunk.end // size)] for chunk in chunks]
        starts = [0, *accumulate(map(len, lists))]
        staged.writable()
        staged.host["blocks"][: starts[-1]] = torch.tensor([block for blocks in lists for block in blocks])
        staged.publish(starts[-1])
        last = [(chunk.end - 1) % size + 1 for chunk in chunks] + [1] * padding
        return (
            torch.tensor(starts + [starts[-1]] * padding, dtype=torch.int32),
            staged.device["blocks"][: starts[-1]],
            torch.tensor(last, dtype=torch.int32),
        )

    def _leaves(self) -> None:
        if self._planned is not None:
            self._planned.record()
