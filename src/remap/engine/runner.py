"""One pass over the model: chunks of many sequences as one flat batch of tokens, and the choice of the next tokens.

This is where an engine adopts remap in the pass: `tenant.forward()` around it, `tenant.wait(i)` before layer i reads
its weights, `tenant.done(i)` after. If anything raises, leaving `tenant.forward()` abandons the pass; no sequence has
advanced, and the same pass can be run again.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from remap.engine.attention import AttentionBatch, PagedAttention, decode_first
from remap.engine.models import decoder_of, min_rows
from remap.engine.streaming import streamed
from remap.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from remap.engine.chunk import Chunk
    from remap.engine.models import Decoder
    from remap.engine.request import SamplingParams

__all__ = ["ModelRunner", "check_fits", "sample"]


def check_fits(decoder: Decoder, model: nn.Module, tenant: Any) -> None:
    """Raises InvalidArgument if the tenant's KV tensors are not the model's in number, heads, head size and dtype."""
    tensors = tenant.kv.tensors
    expected = (len(decoder.layers), decoder.kv_heads, decoder.head_dim, next(model.parameters()).dtype)
    got = (len(tensors), *tensors[0].shape[3:], tensors[0].dtype)
    if got != expected:
        raise InvalidArgument(
            "the KV tensors do not fit the model: "
            f"expected (layers, kv_heads, head_dim, dtype) = {expected}, got {got}",
            expected=expected,
            got=got,
        )


class ModelRunner:
    """Runs a transformers causal LM (Llama, Qwen2, Qwen3, OPT, GPT-2) over the tenant's paged KV, without gradients.

    tenant: `forward(phase, tokens)`, `wait(layer)`, `done(layer)`, and `kv.tensors`, one a layer.
    If the tenant has one layer more than the model, that is the head (`attach(extra_layers=["lm_head"])`).
    Raises InvalidArgument if the KV tensors do not fit the model.
    """

    def __init__(self, model: nn.Module, tenant: Any) -> None:
        self.decoder = decoder_of(model)
        self.tenant = tenant
        self.layers = len(self.decoder.layers)
        self.head_streams = getattr(tenant, "layers", self.layers) > self.layers  # attach(extra_layers=["lm_head"])
        self.dtype = next(model.parameters()).dtype
        self.max_tokens = self.decoder.max_tokens
        check_fits(self.decoder, model, tenant)
        self.attention = PagedAttention(tenant.kv.tensors)

    def prepare(self, batch_sizes: Sequence[int] | None = None) -> None:
        """As `GpuRunner.prepare`; nothing is recorded on the CPU."""

    def run(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[int]]:
        """One pass and the choice of tokens: the chunks that yield one, and their tokens."""
        samplers, logits = self.forward(chunks)
        return samplers, sample(samplers, logits)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], torch.Tensor]:
        """One pass. Writes the chunks' KV; returns the chunks that yield a token and their logits, (chunks,
        vocabulary).
        """
        ordered = decode_first(chunks)
        batch = AttentionBatch(ordered, self.attention.block_tokens, self.dtype)
        ids = torch.tensor([token for chunk in ordered for token in chunk.sequence.tokens[chunk.start : chunk.end]])
        samplers, rows, row = [], [], -1
        for chunk in ordered:
            row += chunk.count
            if chunk.samples:
                samplers.append(chunk)
                rows.append(row)
        decodes = {chunk.decodes for chunk in ordered}
        phase = "mixed" if len(decodes) > 1 else "decode" if True in decodes else "prefill"
        rows_wanted = min_rows(self.dtype)
        padding = max(0, rows_wanted - batch.tokens)
        positions = batch.positions
        if padding:
            ids, positions = F.pad(ids, (0, padding)), F.pad(positions, (0, padding))
        with self.tenant.forward(phase=phase, tokens=batch.tokens, streamed=streamed(ordered)):
            hidden, rotary = self.decoder.embed(ids, positions)
            for layer in range(self.layers):
                self.tenant.wait(layer)
                hidden = self.decoder.layer(layer, hidden, rotary, partial(self.attention, layer, batch))
                self.tenant.done(layer)
            if samplers:
                rows += [rows[-1]] * (rows_wanted - len(rows))
            if self.head_streams:
                self.tenant.wait(self.layers)
                logits = self.decoder.head(hidden[rows]) if samplers else None
                self.tenant.done(self.layers)
        if not samplers:
            return [], hidden.new_empty(0, 0)
        if not self.head_streams:
            logits = self.decoder.head(hidden[rows])
        assert logits is not None
        return samplers, logits[: len(samplers)]


def sample(chunks: Sequence[Chunk], logits: torch.Tensor) -> list[int]:
    """The next token of each chunk's sequence. Greedy rows take the first of the largest logits, as transformers
    does.
    """
    if not chunks:
        return []
    wide = logits.float()
    tokens: list[int] = wide.argmax(-1).tolist()
    for index, chunk in enumerate(chunks):
        sampling = chunk.sequence.request.sampling
        if sampling.temperature > 0:
            tokens[index] = _draw(wide[index], sampling, chunk.end)
    return tokens


def _draw(logits: torch.Tensor, sampling: SamplingParams, position: int) -> int:
    """Invert the cumulative distribution at a number that depends on (seed, position) alone."""
    logits = logits / sampling.temperature
    probabilities, ids = torch.softmax(logits, -1).sort(descending=True, stable=True)
    keep = sampling.top_k or len(ids)
    cumulative = probabilities[:keep].cumsum(0)
    if sampling.top_p < 1:
        keep = min(keep, int((cumulative < sampling.top_p * cumulative[-1]).sum()) + 1)
    cumulative = cumulative[:keep]
    point = random.Random(f"{sampling.seed}:{position}").random() * float(cumulative[-1])
    return int(ids[min(int(torch.searchsorted(cumulative, point, right=True)), keep - 1)])
