"""Stand-ins for what only a GPU has: a recording that is frozen as a CUDA graph is, an attention that can be recorded, and
a FlashInfer.

A frozen recording runs the tensor operations that were seen when it was made, on the tensors that were seen, and no line
of Python again: whatever a pass decides in Python, or keeps elsewhere than in its fixed tensors, shows as a wrong token.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from remap_serve.engine.paged import TorchPaged

if TYPE_CHECKING:
    from collections.abc import Callable


class FrozenGraphs:
    """Graphs whose replay repeats the tensor operations of the capture."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def capture(self, piece: Callable[[], None]) -> Callable[[], None]:
        piece()

        def traced() -> torch.Tensor:
            piece()
            return torch.zeros(())

        recorded = make_fx(traced, tracing_mode="real", _allow_non_fake_inputs=True)()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            recorded()

        return replay


class StaticPaged(TorchPaged):
    """Decode as a fixed list of tensor operations over whole rows of the table; what lies beyond a length is not read."""

    name = "static"
    capturable = True

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        # A skipped token writes once more what the first that is not skipped writes; if there is none, slot 0 keeps its value.
        keep = slots >= 0
        first = keep.int().argmax(0, keepdim=True)
        places = torch.where(keep, slots, slots[first]).clamp(0).long()
        where = (places // self._block_tokens, places % self._block_tokens)
        for part, new in zip(self._tensors[layer], (k, v), strict=True):
            again = torch.where(keep.any(), new[first], part[0, 0])
            part.index_put_(where, torch.where(keep[:, None, None], new, again))

    def decode(self, layer: int, q: Any, table: Any, rows: Any, lens: Any, out: Any) -> None:
        live = torch.arange(table.shape[1] * self._block_tokens) < lens[:, None]
        blocks = torch.where(live[:, :: self._block_tokens], table[rows.long()], 0).long()
        keys, values = (
            torch.where(live[:, :, None, None], part[blocks].flatten(1, 2), 0).transpose(1, 2)
            for part in self._tensors[layer]
        )
        hidden = (~live & (lens > 0)[:, None])[:, None, None]
        bias = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, float("-inf"))
        result = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=bias, scale=self._scale, enable_gqa=True
        )
        out.copy_(result[:, :, 0])


def _check_lists(starts: Any, blocks: Any, last: Any) -> None:
    """The sequences' lists cover the blocks, in order; FlashInfer would read on beyond them."""
    assert int(starts[0]) == 0 and int(starts[-1]) == len(blocks)
    assert bool((starts.diff() >= 0).all())
    assert len(starts) == len(last) + 1


def _sequences(kv: Any, starts: Any, blocks: Any, last: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each sequence of FlashInfer's lists, (tokens, kv_heads, head_dim)."""
    keys, values = kv
    found = []
    for index, tail in enumerate(last.tolist()):
        ids = blocks[starts[index] : starts[index + 1]].long()
        length = (len(ids) - 1) * keys.shape[1] + tail if len(ids) else 0
        found.append((keys[ids].flatten(0, 1)[:length], values[ids].flatten(0, 1)[:length]))
    return found


def _attend(q: Any, keys: Any, values: Any, scale: float) -> torch.Tensor:
    later = torch.arange(len(keys)) > torch.arange(len(keys) - len(q), len(keys))[:, None]
    q, keys, values = (one.transpose(0, 1)[None] for one in (q, keys, values))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=~later, scale=scale, enable_gqa=True)[0].transpose(
        0, 1
    )


class _Decode:
    """FlashInfer's decode wrapper, as its documentation has it: `plan` on the host, `run` for each layer."""

    def __init__(
        self,
        workspace: torch.Tensor,
        layout: str,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
    ) -> None:
        assert layout == "NHD" and backend == "fa2"
        self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self.fixed = use_cuda_graph
        assert self.fixed == (None not in self.buffers)

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last: Any,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        **more: Any,
    ) -> None:
        assert indptr.device.type == last.device.type == "cpu"
        assert {one.dtype for one in (indptr, indices, last)} == {torch.int32}
        assert int(last.min()) >= 1 and int(last.max()) <= page_size
        _check_lists(indptr, indices, last)
        self.scale = more["sm_scale"]
        self.shape = (heads, kv_heads, head_dim, page_size)
        assert more["q_data_type"] is more["kv_data_type"]
        if self.fixed:
            assert len(last) == len(self.buffers[2])
            for buffer, value in zip(self.buffers, (indptr, indices, last), strict=True):
                buffer[: len(value)] = value
        else:
            self.buffers = (indptr, indices, last)

    def run(self, q: torch.Tensor, kv: Any, *, out: torch.Tensor) -> torch.Tensor:
        assert kv[0].stride() == kv[1].stride()
        assert (q.shape[1], *kv[0].shape[2:], kv[0].shape[1]) == self.shape
        starts, blocks, last = self.buffers
        assert len(q) == len(last)
        for index, (keys, values) in enumerate(_sequences(kv, starts, blocks, last)):
            # Nothing to attend to divides zero by zero in the real one.
            out[index] = _attend(q[index : index + 1], keys, values, self.scale)[0] if len(keys) else float("nan")
        return out


class _Prefill:
    def __init__(self, workspace: torch.Tensor, layout: str, backend: str = "auto") -> None:
        assert layout == "NHD" and backend == "fa2"

    def plan(
        self, queries: Any, indptr: Any, indices: Any, last: Any, heads: int, kv_heads: int, head_dim: int,
        page_size: int, *, causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert causal and len(queries) == len(indptr)
        _check_lists(indptr, indices, last)
        self.planned = (queries.tolist(), indptr, indices, last)
        self.scale = sm_scale

    def run(self, q: torch.Tensor, kv: Any, *, out: torch.Tensor) -> torch.Tensor:
        queries, *lists = self.planned
        assert len(q) == queries[-1]
        for index, (keys, values) in enumerate(_sequences(kv, *lists)):
            first, end = queries[index : index + 2]
            out[first:end] = _attend(q[first:end], keys, values, self.scale)
        return out


def flashinfer_module() -> types.ModuleType:
    """What `import flashinfer` would give, as far as the engine uses it."""
    module: Any = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = _Decode
    module.BatchPrefillWithPagedKVCacheWrapper = _Prefill
    return module
