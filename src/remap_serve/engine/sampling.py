# SPDX-License-Identifier: Apache-2.0
"""The choice of the next token from its logits, and the logprobs that are noted of it.

All of it is a function of the request, of the tokens known and of the logits: there is no state, so that a request that starts
again behind its tokens, in another place or batch, goes on as it would have.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch

from remap_serve.engine.request import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from remap_serve.engine.chunk import Chunk
    from remap_serve.engine.request import SamplingParams

__all__ = ["changed_logits", "logprobs_of", "note_prompt", "sample", "scores"]

# For `top_p`. All that is smaller than e**-64 of the largest probability lies in the last slice.
_SLICES_OF_ONE, _SLICES = 64, 4096

_LEAST = -9999.0
"""JSON has no infinity."""

_SCORED_ROWS = 32
"""Of a prompt whose logprobs are noted, this many rows go through the head at once, always: logits of a whole prompt take much
memory, and another number of rows might round otherwise."""


def sample(chunks: Sequence[Chunk], logits: torch.Tensor) -> list[int]:
    """The next token of each chunk's sequence, given its logits, (chunks, vocabulary): that of the largest of `scores`, the
    first of several. Notes its logprobs in the sequence if they were asked for.
    """
    if not chunks:
        return []
    wide = logits.float()
    tokens: list[int] = wide.argmax(-1).tolist()
    for index, chunk in enumerate(chunks):
        sequence, sampling = chunk.sequence, chunk.sequence.sampling
        if sampling.plain:
            continue
        row = wide[index]
        if sampling.changes_logits:
            row = changed_logits(row, sampling, sequence.tokens, sequence.prompt_tokens)
        tokens[index] = int(scores(row, sampling, chunk.end).argmax())
        if sampling.logprobs is not None:
            sequence.noted[chunk.end] = logprobs_of(wide[index], tokens[index], sampling.logprobs)
    return tokens


def note_prompt(chunk: Chunk, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Note the logprobs of the prompt's tokens that follow the chunk's. hidden: of its tokens, (tokens, width); head makes them
    logits."""
    sequence = chunk.sequence
    end, count = min(chunk.end, sequence.prompt_tokens - 1), sequence.sampling.logprobs or 0
    for first in range(chunk.start, end, _SCORED_ROWS):
        rows = [min(place, end - 1) - chunk.start for place in range(first, first + _SCORED_ROWS)]
        logits = head(hidden[rows])[: end - first].float().cpu()
        for place, row in enumerate(logits, first + 1):
            sequence.noted[place] = logprobs_of(row, sequence.tokens[place], count)


def logprobs_of(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Of this token and the `count` likeliest, by these logits, (vocabulary,)."""
    wide = logits.double()
    values = (wide - wide.logsumexp(0)).nan_to_num(nan=_LEAST, neginf=_LEAST).clamp(min=_LEAST)
    top: list[tuple[int, float]] = []
    if count:
        # Of those that tie with the last one the smallest ids, which topk does not promise.
        ids = (values >= values.topk(min(count, len(values))).values[-1]).nonzero().flatten()
        ordered = values[ids].sort(descending=True, stable=True)
        top = list(zip(ids[ordered.indices[:count]].tolist(), ordered.values[:count].tolist(), strict=True))
    return TokenLogprobs(token, float(values[token]), tuple(top))


def changed_logits(
    logits: torch.Tensor, sampling: SamplingParams, tokens: Sequence[int], prompt_tokens: int
) -> torch.Tensor:
    """The logits, (vocabulary,), after penalties and the bias, behind these tokens, of which the first are the prompt: float64.
    See `SamplingParams`."""
    found = logits.to(torch.float64, copy=True)
    for token, bias in sampling.logit_bias:
        found[token] += bias
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(tokens, device=logits.device).unique()
        some, penalty = found[seen], sampling.repetition_penalty
        found[seen] = torch.where(some > 0, some / penalty, some * penalty)
    if (sampling.frequency_penalty or sampling.presence_penalty) and len(tokens) > prompt_tokens:
        made, counts = torch.tensor(tokens[prompt_tokens:], device=logits.device).unique(return_counts=True)
        found[made] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return found


def scores(logits: torch.Tensor, sampling: SamplingParams, position: int) -> torch.Tensor:
    """The scores of which the next token has the largest: the logits, (vocabulary,), of a greedy request; else float64, -inf for
    tokens that `top_k`, `min_p` or `top_p` leaves out, and logits / temperature with Gumbel noise for the others.

    The largest of these sums is a draw from the softmax. Each token has noise of its own, a function of (seed, position, token):
    logits that are rounded otherwise, as in another batch, give another token only where the two best sums are that close. (A
    draw from sorted probabilities changes whenever two neighbours change places, or a sum before the token rounds otherwise.)
    `top_k` and `top_p` keep each token that ties with the last one kept; where logits decide which that is, rounding may.
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
    return ordered[below.clamp(max=len(ordered) - 1)]  # sums in another order may round below the target


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
