# SPDX-License-Identifier: Apache-2.0
"""One stage of a pipeline: consecutive layers of the model over microbatches that the head describes row by row.

A microbatch is one pass of the reference engine, cut between layers: the first stage embeds, the last one that has layers
chooses tokens, as `engine.runner` does. Each stage works out the same batch from the same rows (order, padding, masks), so
tokens are bit-identical to those of one instance. Logical blocks become the stage's own slots here. A row has all that the choice
of its token depends on, so that no stage remembers anything of a request but its KV.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from remap_serve.engine.chunk import Chunk
from remap_serve.engine.layer_run import FlatBatch, LayerRun
from remap_serve.engine.request import SamplingParams, TokenLogprobs
from remap_serve.engine.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from remap_serve.cluster.slots import Places
    from remap_serve.cluster.stage_kv import StageKV
    from remap_serve.engine.models import Decoder

__all__ = ["Choice", "Row", "Stage", "row_of"]

PLAIN = SamplingParams()


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a microbatch: tokens [start, start + count) of a sequence that has `prompt` tokens of prompt and `length` in
    all, in these logical blocks; and how its next token is chosen. sampling: None if it is plain. tokens: all that are known,
    int32, if the choice, or the logprobs that are noted, depend on them."""

    start: int
    count: int
    prompt: int
    length: int
    blocks: list[int]
    sampling: SamplingParams | None = None
    tokens: bytes = b""


class Choice(NamedTuple):
    """The result of a microbatch: the tokens of the rows that yield one, in their order; and by row the logprobs noted there, by
    the place of their token in its sequence."""

    tokens: list[int]
    noted: dict[int, dict[int, TokenLogprobs]]


def row_of(chunk: Chunk) -> Row:
    """A scheduled chunk as the stages get it."""
    sequence, sampling = chunk.sequence, chunk.sequence.sampling
    asked = None if sampling.plain else replace(sampling, max_tokens=1, stop_token_ids=frozenset())  # which may be many
    tokens = array("i", sequence.tokens).tobytes() if sampling.changes_logits or chunk.scores_prompt else b""
    row = (chunk.start, chunk.count, sequence.prompt_tokens, sequence.length, sequence.blocks[:])
    return Row(*row, asked, tokens)


@dataclass(eq=False)
class _Part:
    """The sequence as a pass asks for it; blocks are first slots here. tokens: on the first stage, or those of the row."""

    blocks: list[int]
    prompt_tokens: int
    length: int
    sampling: SamplingParams
    tokens: list[int]
    noted: dict[int, TokenLogprobs] = field(default_factory=dict)


class Stage:
    """The layers first <= i < end (`kv`'s) of a model on one instance; none if they are equal.

    samples: whether it is the last stage with layers. tenant: see `LayerRun`. places: of the group's logical blocks here.
    """

    def __init__(self, decoder: Decoder, tenant: Any, kv: StageKV, places: Places, *, samples: bool) -> None:
        self.decoder = decoder
        self.kv = kv
        self.places = places
        self.samples = samples
        self._dtype = next(decoder.layers.parameters()).dtype
        self._block_tokens = tenant.kv.spec.block_tokens
        self._run: LayerRun | None = None
        if kv.first < kv.end:
            self._run = LayerRun(decoder, tenant, kv.tensors, self._dtype, first=kv.first, samples=samples)

    def compute(
        self, rows: Sequence[Row], hidden: torch.Tensor | None = None, known: Iterable[Sequence[int]] | None = None
    ) -> torch.Tensor | Choice:
        """One microbatch. Returns hidden states for the next stage; or, of the stage that samples, the chosen tokens.

        rows: in the order of `decode_first`. hidden: from the stage before. known: of the first stage, each sequence's tokens.
        What the model or the tenant raises passes through: the microbatch can be computed again then.
        """
        table = self.places.table if self._run is not None else list
        texts = list(known) if known is not None else [[]] * len(rows)
        chunks = []
        for row, text in zip(rows, texts, strict=True):
            tokens = array("i", row.tokens).tolist() if row.tokens else list(text)
            part: Any = _Part(table(row.blocks), row.prompt, row.length, row.sampling or PLAIN, tokens)
            chunks.append(Chunk(part, row.start, row.count))
        batch = FlatBatch(chunks, self._block_tokens, self._dtype)
        if self._run is None:  # only a head without layers computes: it embeds
            with torch.inference_mode():
                return self.decoder.embed(batch.ids(), batch.positions)[0]
        result = self._run.compute(batch, hidden)
        if not self.samples:
            return result
        chosen = sample(batch.samplers, result)
        noted = {number: chunk.sequence.noted for number, chunk in enumerate(chunks) if chunk.sequence.noted}
        return Choice(chosen, noted)
