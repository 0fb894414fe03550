"""One pass of an offline batch: layer by layer over all mini-batches, so that each layer is loaded once.

A mini-batch is as many sequences as the scratch blocks have room for: keys and values that are made from activations are written
there, used by its attention, and written over by the next mini-batch's. The order of computation is all that protects them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from remap.engine.attention import AttentionBatch, PagedAttention, decode_first
from remap.engine.models import decoder_of, kv_from_activations, min_rows, require_smaller_activations
from remap.engine.runner import check_fits, sample
from remap.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Listed

    from torch import nn

    from remap.engine.chunk import Chunk
    from remap.engine.pairs import Kept
    from remap.engine.request import Sequence

__all__ = ["ThroughputRunner"]


@dataclass
class _Group:
    """A mini-batch: its rows of hidden states, and where activations are read and written."""

    chunks: list[Chunk]
    batch: AttentionBatch
    hidden: torch.Tensor
    rotary: Any
    # Activations that become keys and values: (half, streamed block) of each, its scratch block, and the positions of all tokens.
    remade: tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor] | None = None
    # Rows whose activations are kept: which, and (half, staging block, place in the block) of each.
    kept: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None


class ThroughputRunner:
    """See the module. held: what each running sequence has (`ThroughputScheduler.held`). activations: whether some of it is.

    Raises InvalidArgument if the KV tensors do not fit the model, lie on a GPU, or the model's activations are of no use.
    """

    def __init__(self, model: nn.Module, tenant: Any, held: Mapping[Sequence, Kept], *, activations: bool) -> None:
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
        width = self.decoder.kv_heads * self.decoder.head_dim
        if activations:
            require_smaller_activations(self.decoder)
            if self.decoder.activation_width != width:
                raise InvalidArgument(
                    f"activations of {self.decoder.activation_width} elements do not fill a block's keys of {width} elements a "
                    "token; nothing was made; keep the KV",
                    activation_width=self.decoder.activation_width,
                    kv_width=width,
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
        groups = [self._prepare(group) for group in self._groups(decode_first(chunks))]
        decodes = {chunk.decodes for chunk in chunks}
        phase = "mixed" if len(decodes) > 1 else "decode" if True in decodes else "prefill"
        streamed = [block for chunk in chunks for pair in self.held[chunk.sequence].pairs for block in pair.shown]
        tokens = sum(chunk.count for chunk in chunks)
        with self.tenant.forward(phase=phase, tokens=tokens, streamed=streamed):
            for layer in range(self.layers):
                self.tenant.wait(layer)
                for group in groups:
                    self._remake(layer, group)
                    self._keep(layer, group)
                    attend = partial(self.attention, layer, group.batch)
                    group.hidden = self.decoder.layer(layer, group.hidden, group.rotary, attend)
                self.tenant.done(layer)
            if self.head_streams:
                self.tenant.wait(self.layers)
                found = self._logits(groups)
                self.tenant.done(self.layers)
        return found if self.head_streams else self._logits(groups)

    def _groups(self, ordered: list[Chunk]) -> list[list[Chunk]]:
        """Mini-batches: as many sequences as the scratch blocks have room for."""
        groups: list[list[Chunk]] = [[]]
        room = len(self.tenant.kv.scratch)
        for chunk in ordered:
            kept = self.held[chunk.sequence]
            need = 2 * sum(pair.activations for pair in kept.pairs[: kept.out])
            if groups[-1] and need > room:
                groups.append([])
                room = len(self.tenant.kv.scratch)
            groups[-1].append(chunk)
            room -= need
        return groups

    def _prepare(self, chunks: list[Chunk]) -> _Group:
        size, scratch = self.block_tokens, iter(self.tenant.kv.scratch)
        shown: list[int] = []
        targets: list[int] = []
        first_tokens: list[int] = []
        rows: list[int] = []
        staged: list[int] = []
        token = 0
        for chunk in chunks:
            sequence, kept = chunk.sequence, self.held[chunk.sequence]
            for number, pair in enumerate(kept.pairs[: kept.out]):
                if pair.activations:
                    shown += pair.shown
                    blocks = [next(scratch), next(scratch)]
                    targets += blocks
                    first_tokens += [2 * number * size, (2 * number + 1) * size]
                    sequence.blocks[2 * number : 2 * number + 2] = blocks
            for position in range(chunk.start, chunk.end):
                staging = kept.pairs[position // (2 * size)].staging
                if staging is not None:
                    rows.append(token + position - chunk.start)
                    staged.append(staging)
            token += chunk.count
        batch = AttentionBatch(chunks, size, self.dtype)
        ids = torch.tensor([token for chunk in chunks for token in chunk.sequence.tokens[chunk.start : chunk.end]])
        positions = batch.positions
        padding = max(0, min_rows(self.dtype) - batch.tokens)
        if padding:
            ids, positions = F.pad(ids, (0, padding)), F.pad(positions, (0, padding))
        hidden, rotary = self.decoder.embed(ids, positions)
        group = _Group(chunks, batch, hidden, rotary)
        if shown:
            source = torch.tensor([0, 1] * len(shown)), torch.tensor(shown).repeat_interleave(2)
            places = (torch.tensor(first_tokens)[:, None] + torch.arange(size)).flatten()
            group.remade = source, torch.tensor(targets), places
        if rows:
            at = batch.positions[rows]
            group.kept = torch.tensor(rows), (at // size % 2, torch.tensor(staged), at % size)
        return group

    def _remake(self, layer: int, group: _Group) -> None:
        """The layer's keys and values of what is kept as activations, into the scratch blocks."""
        if group.remade is not None:
            source, targets, positions = group.remade
            tensor = self.tenant.kv.tensors[layer]
            activations = tensor[source].flatten(0, 1).flatten(1)  # (tokens, width)
            keys, values = kv_from_activations(self.decoder, layer, activations, positions)
            tensor[0, targets] = keys.unflatten(0, (-1, self.block_tokens))
            tensor[1, targets] = values.unflatten(0, (-1, self.block_tokens))

    def _keep(self, layer: int, group: _Group) -> None:
        """The layer's input of tokens whose pair is activations, into its staging block."""
        if group.kept is not None:
            rows, places = group.kept
            heads = (self.decoder.kv_heads, self.decoder.head_dim)
            self.tenant.kv.tensors[layer][places] = group.hidden[rows].unflatten(1, heads)

    def _logits(self, groups: list[_Group]) -> tuple[list[Chunk], torch.Tensor]:
        samplers: list[Chunk] = []
        found: list[torch.Tensor] = []
        wanted = min_rows(self.dtype)
        for group in groups:
            rows, row = [], -1
            for chunk in group.chunks:
                row += chunk.count
                if chunk.samples:
                    samplers.append(chunk)
                    rows.append(row)
            if rows:
                logits = self.decoder.head(group.hidden[rows + [rows[-1]] * (wanted - len(rows))])
                found.append(logits[: len(rows)])
        return samplers, torch.cat(found) if found else groups[0].hidden.new_empty(0, 0)
