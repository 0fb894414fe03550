# SPDX-License-Identifier: Apache-2.0
"""One pass over the whole model on the CPU (layer_run.py says how), and the choice of the next tokens (sampling.py).

If anything raises, the pass is abandoned; no sequence has advanced, and the same pass can be run again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from remap.errors import InvalidArgument
from remap_serve.engine.layer_run import LayerRun
from remap_serve.engine.models import decoder_of
from remap_serve.engine.sampling import sample
from remap_serve.engine.streaming import streamed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from remap_serve.engine.chunk import Chunk
    from remap_serve.engine.models import Decoder

__all__ = ["ModelRunner", "check_fits"]


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


class ModelRunner(LayerRun):
    """Runs a transformers causal LM (Llama, Qwen2, Qwen3, OPT, GPT-2) over the tenant's paged KV, without gradients.

    tenant: `forward(phase, tokens)`, `wait(layer)`, `done(layer)`, and `kv.tensors`, one a layer.
    If the tenant has one layer more than the model, that is the head (`attach(extra_layers=["lm_head"])`).
    Raises InvalidArgument if the KV tensors do not fit the model.
    """

    def __init__(self, model: nn.Module, tenant: Any) -> None:
        decoder = decoder_of(model)
        check_fits(decoder, model, tenant)
        super().__init__(decoder, tenant, tenant.kv.tensors, next(model.parameters()).dtype)
        self.max_tokens = decoder.max_tokens

    def prepare(self, batch_sizes: Sequence[int] | None = None) -> None:
        """As `GpuRunner.prepare`; nothing is recorded on the CPU."""

    def run(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[int]]:
        """One pass and the choice of tokens: the chunks that yield one, and their tokens."""
        samplers, logits = self.forward(chunks)
        return samplers, sample(samplers, logits)

    def forward(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], torch.Tensor]:
        """One pass. Writes the chunks' KV; returns the chunks that yield a token and their logits, (chunks,
        vocabulary).
        """
        batch = self.batch(chunks)
        return batch.samplers, self.compute(batch, streamed=streamed(batch.chunks))
