# SPDX-License-Identifier: Apache-2.0
"""One pass of an offline batch: layer by layer, each loaded once, its attention mini-batch by mini-batch.

A mini-batch is as many sequences as the scratch blocks have room for: keys and values that are made from activations are written
there, used by its attention, and written over by the next mini-batch's. The order of computation is all that protects them.
All but attention is computed for all sequences together, so that a layer's weights are read once a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from remap.errors import InvalidArgument
from remap.internals import internals
from remap_serve.engine.attention import AttentionBatch, PagedAttention, decode_first
from remap_serve.engine.models import decoder_of, kv_from_activations, min_rows
from remap_serve.engine.pairs import PAIR
from remap_serve.engine.runner import check_fits
from remap_serve.engine.sampling import sample
from remap_serve.policy.minibatches import BufferLimits, Mix, fewest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Listed

    from torch import nn

    from remap_serve.engine.chunk import Chunk
    from remap_serve.engine.pairs import Kept
    from remap_serve.engine.request import Sequence

__all__ = ["MiniBatch", "ThroughputRunner"]


@dataclass(frozen=True)
class MiniBatch:
    """Sequences whose keys and values are in the scratch blocks at the same time: rows [first, last) of the pass."""

    batch: AttentionBatch
    first: int
    last: int
    # Activations that become keys and values: (half, streamed block) of each, its scratch block, and the positions of all tokens.
    remade: tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor] | None


@dataclass
class _Batch:
    """All mini-batches of a pass. chunks: in the order of their rows."""

    chunks: list[Chunk]
    groups: list[MiniBatch]
    hidden: torch.Tensor
    rotary: Any
    # Rows whose activations are kept: which, and (half, staging block, place in the block) of each.
    kept: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None


class ThroughputRunner:
    """See the module. held: what each running sequence has (`ThroughputScheduler.held`).

    Raises InvalidArgument if the KV tensors do not fit the model, or lie on a GPU.
    """

    def __init__(self, model: nn.Module, tenant: Any, held: Mapping[Sequence, Kept]) -> None:
        self.decoder = decoder_of(model)
        self.tenant = tenant
        self.held = held
        self.layers = len(self.decoder.layers)
        self.head_streams = tenant.layers > self.layers
        self.dtype = next(model.parameters()).dtype
        check_fits(self.decoder, model, tenant)
        tensors = tenant.kv.tensors
        if tensors[0].device.type != "cpu":
            raise InvalidArgument(
                f"offline batches have run on the CPU only, the KV tensors are on {tensors[0].device}; nothing was made",
                device=str(tensors[0].device),
            )
        self.attention = PagedAttention(tensors)
        self.block_tokens: int = tensors[0].shape[2]

    def run(self, chunks: Listed[Chunk]) -> tuple[list[Chunk], list[int]]:
        """One pass and the choice of tokens: the chunks that yield one, and their tokens."""
        samplers, logits = self.forward(chunks)
        return samplers, sample(samplers, logits)

    @torch.inference_mode()
    def forward(self, chunks: Listed[Chunk]) -> tuple[list[Chunk], torch.Tensor]:
        """One pass. Writes the chunks' KV and activations; returns the chunks that yield a token and their logits."""
        batch = self._prepare(self._packed(chunks))
        decodes = {chunk.decodes for chunk in chunks}
        phase = "mixed" if len(decodes) > 1 else "decode" if True in decodes else "prefill"
        streamed = [block for chunk in chunks for pair in self.held[chunk.sequence].pairs for block in pair.shown]
        tokens = sum(chunk.count for chunk in chunks)
        with self.tenant.forward(phase=phase, tokens=tokens, streamed=streamed):
            for layer in range(self.layers):
                self.tenant.wait(layer)
                self._keep(layer, batch)
                attend = partial(self.attend, layer, batch.groups)
                batch.hidden = self.decoder.layer(layer, batch.hidden, batch.rotary, attend)
                self.tenant.done(layer)
            if self.head_streams:
                self.tenant.wait(self.layers)
                found = self._logits(batch)
                self.tenant.done(self.layers)
        return found if self.head_streams else self._logits(batch)

    def _packed(self, chunks: Listed[Chunk]) -> list[list[Chunk]]:
        """Mini-batches, as few as `minibatches.fewest` finds: each makes another product of the layer's keys and values."""
        mixes = [Mix(0, self._remade_blocks(chunk)) for chunk in chunks]
        packing = fewest(mixes, BufferLimits(len(internals(self.tenant).kv.scratch), kv=0, activations=1, held=1))
        return [decode_first([chunks[at] for at in each]) for each in packing]

    def _remade_blocks(self, chunk: Chunk) -> int:
        kept = self.held[chunk.sequence]
        return PAIR * sum(pair.activations for pair in kept.pairs[: kept.out])

    def _prepare(self, packed: list[list[Chunk]]) -> _Batch:
        chunks = [chunk for group in packed for chunk in group]
        groups: list[MiniBatch] = []
        for group in packed:
            remade = self._to_remake(group)
            batch, first = AttentionBatch(group, self.block_tokens, self.dtype), groups[-1].last if groups else 0
            groups.append(MiniBatch(batch, first, first + batch.tokens, remade))
        ids = torch.tensor([token for chunk in chunks for token in chunk.sequence.tokens[chunk.start : chunk.end]])
        positions = torch.cat([group.batch.positions for group in groups])
        kept = self._to_keep(chunks, positions)
        padding = max(0, min_rows(self.dtype) - len(ids))
        if padding:
            ids, positions = F.pad(ids, (0, padding)), F.pad(positions, (0, padding))
        hidden, rotary = self.decoder.embed(ids, positions)
        return _Batch(chunks, groups, hidden, rotary, kept)

    def _to_remake(
        self, chunks: list[Chunk]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor] | None:
        """See `MiniBatch.remade`. The sequences show the scratch blocks from now on, until the next pass."""
        size, scratch = self.block_tokens, iter(internals(self.tenant).kv.scratch)
        shown: list[int] = []
        targets: list[int] = []
        first_tokens: list[int] = []
        for chunk in chunks:
            sequence, kept = chunk.sequence, self.held[chunk.sequence]
            for number, pair in enumerate(kept.pairs[: kept.out]):
                if pair.activations:
                    shown += pair.shown
                    blocks = [next(scratch), next(scratch)]
                    targets += blocks
                    first_tokens += [PAIR * number * size, (PAIR * number + 1) * size]
                    sequence.blocks[PAIR * number : PAIR * number + PAIR] = blocks
        if not shown:
            return None
        source = torch.tensor([0, 1] * len(shown)), torch.tensor(shown).repeat_interleave(2)
        places = (torch.tensor(first_tokens)[:, None] + torch.arange(size)).flatten()
        return source, torch.tensor(targets), places

    def _to_keep(
        self, chunks: list[Chunk], positions: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None:
        """See `_Batch.kept`."""
        size = self.block_tokens
        rows: list[int] = []
        staged: list[int] = []
        first = 0
        for chunk in chunks:
            pairs = self.held[chunk.sequence].pairs
            for position in range(chunk.start, chunk.end):
                staging = pairs[position // (PAIR * size)].staging
                if staging is not None:
                    rows.append(first + position - chunk.start)
                    staged.append(staging)
            first += chunk.count
        if not rows:
            return None
        at = positions[rows]
        return torch.tensor(rows), (at // size % PAIR, torch.tensor(staged), at % size)

    def attend(
        self, layer: int, groups: list[MiniBatch], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """The attention of all mini-batches. Rows behind the last one are padding, and zero."""
        found = []
        for group in groups:
            self.remake(layer, group)
            rows = slice(group.first, group.last)
            found.append(self.attention(layer, group.batch, q[rows], k[rows], v[rows], scale))
        found.append(found[0].new_zeros(len(q) - groups[-1].last, found[0].shape[1]))
        return torch.cat(found)

    def remake(self, layer: int, group: MiniBatch) -> None:
        """The layer's keys and values of blocks kept as activations, into the scratch blocks."""
        if group.remade is not None:
            source, targets, positions = group.remade
            tensor = self.tenant.kv.tensors[layer]
            activations = tensor[source].flatten(0, 1).flatten(1)  # (tokens, width)
            keys, values = kv_from_activations(self.decoder, layer, activations, positions)
            tensor[0, targets] = keys.unflatten(0, (-1, self.block_tokens))
            tensor[1, targets] = values.unflatten(0, (-1, self.block_tokens))

    def _keep(self, layer: int, batch: _Batch) -> None:
        """The layer's input of tokens whose pair is activations, into its staging block."""
        if batch.kept is not None:
            rows, places = batch.kept
            heads = (self.decoder.kv_heads, self.decoder.head_dim)
            self.tenant.kv.tensors[layer][places] = batch.hidden[rows].unflatten(1, heads)

    def _logits(self, batch: _Batch) -> tuple[list[Chunk], torch.Tensor]:
        samplers: list[Chunk] = []
        rows, row = [], -1
        for chunk in batch.chunks:
            row += chunk.count
            if chunk.samples:
                samplers.append(chunk)
                rows.append(row)
        if not rows:
            return samplers, batch.hidden.new_empty(0, 0)
        padding = min_rows(self.dtype) - len(rows)
        return samplers, self.decoder.head(batch.hidden[rows + [rows[-1]] * padding])[: len(rows)]
