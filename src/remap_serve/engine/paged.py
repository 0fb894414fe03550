# SPDX-License-Identifier: Apache-2.0
"""Attention over paged KV on a device, behind one small interface; which kernels do it is a matter of choice.

    flashinfer   where the package imports and takes the shapes (paged_flashinfer.py)
    triton       the project's own kernels (paged_triton.py, prefill_triton.py)
    torch        slow and obvious, one sequence at a time, on any device: CPU tests, and to compare with

A pass plans first, on the host (`plan_decode`, `plan_prefill`), then calls `write` and `decode` or `prefill` for every
layer. `decode` of a `capturable` one may be captured in a CUDA graph: it reads what changes from device memory alone.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from remap.errors import InvalidArgument
from remap_serve.engine.inputs import Staged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remap_serve.engine.chunk import Chunk

__all__ = ["ATTENTIONS", "DeviceAttention", "TorchPaged", "TritonPaged", "choose_attention", "triton_missing"]

ATTENTIONS = ("auto", "flashinfer", "triton", "torch")


class DeviceAttention(Protocol):
    """Writes and reads the KV tensors of one tenant. Tensors live on its device; `table` is (sequences, width) int32."""

    name: str
    capturable: bool

    def plan_decode(self, chunks: Sequence[Chunk], padded_to: int | None) -> None:
        """The next `decode` calls are for these sequences, in order. padded_to: for a batch of that fixed size, captured
        or to be captured; the rest is padding. None: exactly these.
        """
        ...

    def plan_prefill(self, chunks: Sequence[Chunk], rows: Sequence[int], first: int) -> None:
        """The next `prefill` calls are for these chunks; rows: theirs in the table; first: index of their first token."""
        ...

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """k, v (tokens, kv_heads, head_dim) into slots (tokens,); slot -1 writes nothing."""
        ...

    def decode(
        self,
        layer: int,
        q: torch.Tensor,
        table: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """q, out (batch, heads, head_dim): each sequence's newest token. Padded rows of `out` get anything, NaN included;
        it touches no other sequence.
        """
        ...

    def prefill(self, layer: int, q: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
        """q, out (tokens, heads, head_dim): the whole batch; the planned chunks' tokens of `out` are written."""
        ...


class TritonPaged:
    """The project's Triton kernels. scale: the softmax scale of the model. max_tiles: most tiles of a pass's prefill, which
    tokens and chunks together never exceed. by_kernel: how tiles reach the device, see `inputs.Staged`.
    """

    name = "triton"
    capturable = True

    def __init__(
        self, tensors: Sequence[torch.Tensor], heads: int, scale: float, max_tiles: int, by_kernel: bool = False
    ) -> None:
        from remap_serve.engine import paged_triton, prefill_triton

        self._decode, self._write = paged_triton.paged_decode, paged_triton.write_kv
        self._prefill, self._cut = prefill_triton.paged_prefill, prefill_triton.prefill_tiles
        self._layers = [(tensor[0], tensor[1]) for tensor in tensors]
        self._group = heads // tensors[0].shape[3]
        self._scale = scale
        self._staged = Staged(tensors[0].device, by_kernel=by_kernel, tiles=4 * max_tiles)
        self._tiles = self._staged.device["tiles"].view(-1, 4)[:0]

    def plan_decode(self, chunks: Sequence[Chunk], padded_to: int | None) -> None:
        """Nothing: lengths and rows are read on the device."""

    def plan_prefill(self, chunks: Sequence[Chunk], rows: Sequence[int], first: int) -> None:
        keys = self._layers[0][0]
        described = []
        for chunk, row in zip(chunks, rows, strict=True):
            described.append((row, first, chunk.count, chunk.start))
            first += chunk.count
        tiles = self._cut(described, self._group, keys.shape[3], keys.dtype)
        self._staged.writable()
        self._staged.host["tiles"][: tiles.numel()] = tiles.flatten()
        self._staged.publish(tiles.numel())
        self._tiles = self._staged.device["tiles"].view(-1, 4)[: len(tiles)]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        self._write(self._layers[layer], k, v, slots)

    def decode(
        self,
        layer: int,
        q: torch.Tensor,
        table: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._decode(q, self._layers[layer], table, lens, out=out, scale=self._scale, rows=rows)

    def prefill(self, layer: int, q: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
        self._prefill(q, self._layers[layer], table, self._tiles, out=out, scale=self._scale)


class TorchPaged:
    """One sequence after another with torch's own attention. Reads lengths back to the host: never captured."""

    name = "torch"
    capturable = False

    def __init__(self, tensors: Sequence[torch.Tensor], heads: int, scale: float) -> None:
        self._tensors = tensors
        self._block_tokens = tensors[0].shape[2]
        self._shared = heads != tensors[0].shape[3]
        self._scale = scale
        self._chunks: list[tuple[int, int, int, int]] = []

    def plan_decode(self, chunks: Sequence[Chunk], padded_to: int | None) -> None:
        """Nothing."""

    def plan_prefill(self, chunks: Sequence[Chunk], rows: Sequence[int], first: int) -> None:
        self._chunks = []
        for chunk, row in zip(chunks, rows, strict=True):
            self._chunks.append((row, first, chunk.count, chunk.end))
            first += chunk.count

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        keep = slots >= 0
        places = slots[keep].long()
        where = (places // self._block_tokens, places % self._block_tokens)
        self._tensors[layer][0].index_put_(where, k[keep])
        self._tensors[layer][1].index_put_(where, v[keep])

    def decode(
        self,
        layer: int,
        q: torch.Tensor,
        table: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        out.zero_()
        for index, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
            if length:
                out[index] = self._attend(layer, q[index : index + 1], table[row], length)[0]

    def prefill(self, layer: int, q: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
        for row, first, count, end in self._chunks:
            out[first : first + count] = self._attend(layer, q[first : first + count], table[row], end)

    def _attend(self, layer: int, q: torch.Tensor, row: torch.Tensor, end: int) -> torch.Tensor:
        """The last tokens of a sequence of `end` tokens, q (tokens, heads, head_dim). Gathers the written tokens, no more."""
        blocks = row[: -(-end // self._block_tokens)].long()
        keys, values = (part[blocks].flatten(0, 1)[:end].transpose(0, 1)[None] for part in self._tensors[layer])
        later = torch.arange(end, device=q.device) > torch.arange(end - q.shape[0], end, device=q.device)[:, None]
        bias = torch.zeros(later.shape, dtype=q.dtype, device=q.device).masked_fill_(later, float("-inf"))
        result = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=bias, scale=self._scale, enable_gqa=self._shared
        )
        return result[0].transpose(0, 1)


def choose_attention(
    name: str,
    tensors: Sequence[torch.Tensor],
    heads: int,
    scale: float,
    *,
    max_blocks: int,
    max_tiles: int,
    by_kernel: bool = False,
) -> DeviceAttention:
    """The attention called `name` (one of `ATTENTIONS`) for these KV tensors, `heads` query heads.

    auto: torch on the CPU; on a GPU FlashInfer if it imports and takes dtype and head size, else Triton, else torch.
    max_blocks: most blocks that a pass's sequences hold together (FlashInfer lists them). max_tiles, by_kernel: see
    `TritonPaged`.
    Raises InvalidArgument for an unknown name, or one that cannot be had here, with the reason.
    """
    kv = tensors[0]
    reasons = {
        "flashinfer": _flashinfer_missing(kv),
        "triton": triton_missing(kv),
        "torch": None,
    }
    if name not in ATTENTIONS:
        raise InvalidArgument(
            f"attention must be one of {ATTENTIONS}, got {name!r}; nothing was created", attention=name
        )
    if name == "auto":
        candidates = ("torch",) if kv.device.type == "cpu" else ("flashinfer", "triton", "torch")
        name = next(candidate for candidate in candidates if reasons[candidate] is None)
    reason = reasons[name]
    if reason is not None:
        raise InvalidArgument(
            f"attention {name!r} cannot be had: {reason}; nothing was created, use attention='auto'",
            attention=name,
            reason=reason,
        )
    if name == "flashinfer":
        from remap_serve.engine.paged_flashinfer import FlashInferPaged

        return FlashInferPaged(tensors, heads, scale, max_blocks, by_kernel)
    if name == "triton":
        return TritonPaged(tensors, heads, scale, max_tiles, by_kernel)
    return TorchPaged(tensors, heads, scale)


def triton_missing(kv: torch.Tensor) -> str | None:
    """Why Triton's kernels cannot work on this tensor here; None if they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if kv.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the KV tensors are on {kv.device.type}, and Triton's interpreter (TRITON_INTERPRET=1) is off"
    if kv.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"no kernel for {kv.dtype}"
    return None


def _flashinfer_missing(kv: torch.Tensor) -> str | None:
    if find_spec("flashinfer") is None:
        return "the package flashinfer (flashinfer-python) is not installed"
    if kv.device.type != "cuda":
        return f"the KV tensors are on {kv.device.type}"
    if kv.dtype not in (torch.float16, torch.bfloat16) or kv.shape[4] not in (64, 128, 256):
        return f"no kernel for {kv.dtype} with heads of {kv.shape[4]}"
    return None
