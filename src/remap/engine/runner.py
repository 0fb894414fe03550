"""One pass over the whole model on the CPU (layer_run.py says how), and the choice of the next tokens.

If anything raises, the pass is abandoned; no sequence has advanced, and the same pass can be run again.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

from remap.engine.layer_run import LayerRun
from remap.engine.models import decoder_of
from remap.engine.streaming import streamed
from remap.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from remap.engine.chunk import Chunk
    from remap.engine.models import Decoder
    from remap.engine.request import SamplingParams

__all__ = ["ModelRunner", "check_fits", "sample", "scores"]

# For `top_p`. All that is smaller than e**-64 of the largest probability lies in the last slice.
_SLICES_OF_ONE, _SLICES = 64, 4096


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


def sample(chunks: Sequence[Chunk], logits: torch.Tensor) -> list[int]:
    """The next token of each chunk's sequence, given its logits, (chunks, vocabulary): that of the largest of `scores`, the
    first of several.
    """
    if not chunks:
        return []
    wide = logits.float()
    tokens: list[int] = wide.argmax(-1).tolist()
    for index, chunk in enumerate(chunks):
        if chunk.sequence.sampling.temperature > 0:
            tokens[index] = int(scores(wide[index], chunk.sequence.sampling, chunk.end).argmax())
    return tokens


def scores(logits: torch.Tensor, sampling: SamplingParams, position: int) -> torch.Tensor:
    """What the next token has the largest of: the logits, (vocabulary,), of a greedy request; else float64, -inf for tokens that
    `top_k`, `min_p` or `top_p` leaves out, and logits / temperature with Gumbel noise for the others.

    The largest of these sums is a draw from the softmax. Each token has noise of its own, a function of (seed, position, token):
    logits that are rounded otherwise, as in another batch, give another token only where the two best sums are that close. (A
    draw from sorted probabilities changes whenever two neighbours change places, or a sum before the token rounds otherwise.)
    `top_k` and `top_p` keep whoever ties with the last token kept; where logits decide who that is, rounding may.
    """
    if sampling.temperature == 0:
        return logits
    # Relative to the largest, a temperature near 0 gives 0 and -inf: nothing leaves a float's range.
    scaled = (logits.double() - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled = _at_least(scaled, scaled.topk(sampling.top_k).values[-1])
    if sampling.min_p > 0:
        scaled = _at_least(scaled, scaled.new_tensor(math.log(sampling.min_p)))  # the largest is 0
    if sampling.top_p < 1:
        scaled = _at_least(scaled, _last_of_share(scaled, sampling.top_p))
    return scaled + _gumbel(f"{sampling.seed}:{position}", scaled)


def _at_least(scaled: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    return scaled.masked_fill(scaled < least, -math.inf)


def _last_of_share(scaled: torch.Tensor, share: float) -> torch.Tensor:
    """The largest value such that those not below it have `share` of the softmax of all. scaled: float64, (vocabulary,), its
    largest 0.

    Weights are summed in slices of values, 1/64 wide; only the slice in which the share is reached is sorted. To sort all values
    costs more than the rest of a draw.
    """
    # NaN becomes some integer: it has to lie in a slice too.
    slices = (scaled * -_SLICES_OF_ONE).clamp(max=_SLICES - 1).long().clamp(min=0)
    reached = scaled.new_zeros(_SLICES + 1).index_add_(0, slices + 1, scaled.exp()).cumsum(0)
    wanted = share * reached[-1]
    last = (reached[1:] < wanted).sum()
    ordered = scaled[slices == last].sort(descending=True).values
    below = (reached[last] + ordered.exp().cumsum(0) < wanted).sum()
    return ordered[below.clamp(max=len(ordered) - 1)]  # sums in another order may round below what is wanted


def _gumbel(key: str, like: torch.Tensor) -> torch.Tensor:
    """Noise of the standard Gumbel distribution, float64: element i is a function of (key, i) alone.

    SplitMix64 (Steele, Lea and Flood, 2014) at i, from a start that is a hash of the key: integers modulo 2**64, so that every
    processor, device and release of torch gives the same bits, which no generator of torch promises.
    """
    start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)
    mixed = torch.arange(1, len(like) + 1, device=like.device) * _signed(0x9E3779B97F4A7C15) + start
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    mixed ^= _shifted(mixed, 31)
    # 52 bits and a half: never 0, never 1, and exact in float64.
    uniform = (_shifted(mixed, 12).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()


def _signed(word: int) -> int:
    """The int64 of the same 64 bits: torch has no arithmetic on unsigned ones."""
    return word - (word >> 63 << 64)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """int64, shifted right as unsigned ones are."""
    return words >> by & (1 << 64 - by) - 1
