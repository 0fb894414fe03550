# SPDX-License-Identifier: Apache-2.0
"""Consecutive layers of a model over a flat batch of tokens: the work of every pass on the CPU, of a whole model (runner.py) or
of a part of it (remap_serve.cluster.stage).

This is where an engine adopts remap in the pass: `tenant.forward()` around it, `tenant.wait(i)` before layer i reads its weights,
`tenant.done(i)` after. If anything raises, leaving `tenant.forward()` abandons the pass.

The same batch gives the same bits wherever the layers are cut: hidden states are handed on with their padding. In another batch a
row may round otherwise (`models.min_rows`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from remap_serve.engine.attention import AttentionBatch, PagedAttention, decode_first
from remap_serve.engine.models import min_rows
from remap_serve.engine.sampling import note_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remap_serve.engine.chunk import Chunk
    from remap_serve.engine.models import Decoder

__all__ = ["FlatBatch", "LayerRun"]


class FlatBatch:
    """The inputs of all layers of a pass over `chunks`: the chunks in `decode_first` order, index tensors, and which get a token.

    samplers: the chunks that yield a token; phase: "prefill", "decode" or "mixed". dtype: the model's.
    """

    def __init__(self, chunks: Sequence[Chunk], block_tokens: int, dtype: torch.dtype) -> None:
        self.chunks = decode_first(chunks)
        self.attention = AttentionBatch(self.chunks, block_tokens, dtype)
        self.tokens = self.attention.tokens
        self.samplers: list[Chunk] = []
        self.rows: list[int] = []  # of the samplers' last tokens
        self.scored: list[tuple[Chunk, int]] = []  # whose prompt's logprobs are noted, and the row of their first token
        row = -1
        for chunk in self.chunks:
            if chunk.scores_prompt:
                self.scored.append((chunk, row + 1))
            row += chunk.count
            if chunk.samples:
                self.samplers.append(chunk)
                self.rows.append(row)
        decodes = {chunk.decodes for chunk in self.chunks}
        self.phase = "mixed" if len(decodes) > 1 else "decode" if True in decodes else "prefill"
        self._least_rows = min_rows(dtype)
        self._padding = max(0, self._least_rows - self.tokens)
        self.positions = F.pad(self.attention.positions, (0, self._padding))
        if self.rows:
            self.rows += [self.rows[-1]] * (self._least_rows - len(self.rows))

    def ids(self) -> torch.Tensor:
        """The tokens, with padding: for the first layer only."""
        ids = [token for chunk in self.chunks for token in chunk.sequence.tokens[chunk.start : chunk.end]]
        return F.pad(torch.tensor(ids), (0, self._padding))


class LayerRun:
    """The layers first <= i < end of a model. tensors: their KV, one each (see `PagedAttention`).

    tenant: `forward(phase, tokens)`, `wait(layer)` and `done(layer)`. If it has one layer more than the model, that is the head
    (`attach(extra_layers=["lm_head"])`). samples: whether the run ends with logits.
    """

    def __init__(
        self,
        decoder: Decoder,
        tenant: Any,
        tensors: Sequence[torch.Tensor],
        dtype: torch.dtype,
        *,
        first: int = 0,
        samples: bool = True,
    ) -> None:
        layers = len(decoder.layers)
        self.decoder = decoder
        self.tenant = tenant
        self.dtype = dtype
        self.attention = PagedAttention(tensors)
        self.first = first
        self.end = first + len(tensors)
        self.samples = samples
        self._head = layers if samples and getattr(tenant, "layers", layers) > layers else None

    def batch(self, chunks: Sequence[Chunk]) -> FlatBatch:
        """Prepare a pass over these chunks."""
        return FlatBatch(chunks, self.attention.block_tokens, self.dtype)

    @torch.inference_mode()
    def compute(
        self, batch: FlatBatch, hidden: torch.Tensor | None = None, streamed: Sequence[int] = ()
    ) -> torch.Tensor:
        """One pass. Writes the chunks' KV. Returns hidden states, padded rows included; or, of a run that samples, the logits
        of the samplers, (samplers, vocabulary), with logprobs of prompts noted where they were asked for.

        hidden: the result of the run before this one; None: this one begins with the embedding. streamed: see
        `Tenant.forward`. If anything raises, the pass is abandoned and can be run again.
        """
        tenant, decoder = self.tenant, self.decoder
        with tenant.forward(phase=batch.phase, tokens=batch.tokens, streamed=streamed):
            if hidden is None:
                hidden, rotary = decoder.embed(batch.ids(), batch.positions)
            else:
                rotary = decoder.rotary(hidden, batch.positions)
            for layer in range(self.first, self.end):
                tenant.wait(layer)
                attend = partial(self.attention, layer - self.first, batch.attention)
                hidden = decoder.layer(layer, hidden, rotary, attend)
                tenant.done(layer)
            if self._head is not None:
                tenant.wait(self._head)
                logits = self._logits(batch, hidden)
                tenant.done(self._head)
        if not self.samples:
            return hidden
        if self._head is None:
            logits = self._logits(batch, hidden)
        return logits

    def _logits(self, batch: FlatBatch, hidden: torch.Tensor) -> torch.Tensor:
        for chunk, row in batch.scored:
            note_prompt(chunk, hidden[row : row + chunk.count], self.decoder.head)
        if not batch.samplers:
            return hidden.new_empty(0, 0)
        return self.decoder.head(hidden[batch.rows])[: len(batch.samplers)]
