"""One stage of a pipeline: consecutive layers of the model over microbatches that the head describes row by row.

A microbatch is one pass of the reference engine, cut between layers: the first stage embeds, the last one that has layers
chooses tokens, as `engine.runner` does. Each stage works out the same batch from the same rows (order, padding, masks), so
tokens are bit-identical to those of one instance. Logical blocks become the stage's own slots here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from remap.engine.chunk import Chunk
from remap.engine.layer_run import FlatBatch, LayerRun
from remap.engine.request import SamplingParams
from remap.engine.runner import sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from remap.cluster.slots import Places
    from remap.cluster.stage_kv import StageKV
    from remap.engine.models import Decoder

__all__ = ["Row", "Stage", "row_of"]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a microbatch: tokens [start, start + count) of a sequence that has `prompt` tokens of prompt and `length` in
    all, in these logical blocks; and how its next token is chosen."""

    start: int
    count: int
    prompt: int
    length: int
    blocks: list[int]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0


def row_of(chunk: Chunk) -> Row:
    """A scheduled chunk as the stages get it."""
    sequence, sampling = chunk.sequence, chunk.sequence.sampling
    blocks = sequence.blocks[:]
    row = (chunk.start, chunk.count, sequence.prompt_tokens, sequence.length, blocks)
    return Row(*row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, sampling.min_p)


@dataclass(eq=False)
class _Part:
    """What a pass asks of a sequence; blocks are first slots here. tokens: on the first stage only."""

    blocks: list[int]
    prompt_tokens: int
    length: int
    sampling: SamplingParams
    tokens: list[int]


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
        self._block_tokens = tenant.kv.block_tokens
        self._run: LayerRun | None = None
        if kv.first < kv.end:
            self._run = LayerRun(decoder, tenant, kv.tensors, self._dtype, first=kv.first, samples=samples)

    def compute(
        self, rows: Sequence[Row], hidden: torch.Tensor | None = None, known: Iterable[Sequence[int]] | None = None
    ) -> torch.Tensor | list[int]:
        """One microbatch. Returns hidden states for the next stage; or, of the stage that samples, the tokens of the rows that
        yield one, in their order.

        rows: in the order of `decode_first`. hidden: from the stage before. known: of the first stage, each sequence's tokens.
        What the model or the tenant raises passes through: the microbatch can be computed again then.
        """
        table = self.places.table if self._run is not None else list
        texts = list(known) if known is not None else [[]] * len(rows)
        chunks = []
        for row, text in zip(rows, texts, strict=True):
            sampling = SamplingParams(1, row.temperature, row.top_k, row.top_p, row.seed, min_p=row.min_p)
            part: Any = _Part(table(row.blocks), row.prompt, row.length, sampling, list(text))
            chunks.append(Chunk(part, row.start, row.count))
        batch = FlatBatch(chunks, self._block_tokens, self._dtype)
        if self._run is None:  # only a head without layers computes: it embeds
            with torch.inference_mode():
                return self.decoder.embed(batch.ids(), batch.positions)[0]
        result = self._run.compute(batch, hidden)
        return sample(batch.samplers, result) if self.samples else result
