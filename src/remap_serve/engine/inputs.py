# SPDX-License-Identifier: Apache-2.0
"""The inputs of a pass on a device besides weights and KV: token ids, positions, slots, lengths and the block table.

All of it is int32 in one buffer at a fixed address (a captured graph reads it there), filled once a pass, asynchronously,
from page-locked staging of the same layout.

The block table stands transposed, (width, sequences): the columns in use are then one contiguous run, and the copy is as
long as the longest sequence that changed, not as the longest one possible. A running sequence keeps its row, so that a
step writes only new entries: about one entry in `block_tokens` for each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from remap.errors import InvalidArgument
from remap_serve.engine.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Listed

    from remap_serve.engine.chunk import Chunk
    from remap_serve.engine.request import Sequence

__all__ = ["BlockTable", "Staged", "TokenInputs"]


class Staged:
    """Named int32 fields in one buffer: `host` views (page-locked in front of a GPU) and `device` views.

    `publish(words)` enqueues the copy of the first `words` on the current stream: a memory copy, or (`by_kernel`) loads of
    a Triton kernel, see `paged_triton.fetch`. `writable()` waits until the last copy has left the staging; call it before
    writing there.
    """

    def __init__(self, device: torch.device, *, by_kernel: bool = False, **fields: int) -> None:
        words = sum(fields.values())
        on_gpu = device.type == "cuda"
        staging = torch.zeros(words, dtype=torch.int32, pin_memory=on_gpu)
        # On the CPU a second buffer all the same: unpublished values must not be seen there either.
        target = torch.zeros(words, dtype=torch.int32, device=device)
        self.words = words
        self.host: dict[str, torch.Tensor] = {}
        self.device: dict[str, torch.Tensor] = {}
        self.starts: dict[str, int] = {}
        start = 0
        for name, count in fields.items():
            self.host[name], self.device[name] = staging[start : start + count], target[start : start + count]
            self.starts[name] = start
            start += count
        self._staging, self._target = staging, target
        self._left = torch.cuda.Event() if on_gpu else None
        self._fetch: Callable[[torch.Tensor, torch.Tensor, int], None] | None = None
        if by_kernel:
            from remap_serve.engine.paged_triton import fetch

            self._fetch = fetch

    def writable(self) -> None:
        if self._left is not None:
            self._left.synchronize()

    def publish(self, words: int) -> None:
        if self._fetch is not None:
            self._fetch(self._staging, self._target, words)
        else:
            self._target[:words].copy_(self._staging[:words], non_blocking=True)
        if self._left is not None:
            self._left.record()


@dataclass
class _Row:
    """A sequence's place in the table: the very list of blocks that was written there, and how many of them."""

    index: int
    blocks: list[int]
    written: int


class BlockTable:
    """Rows of block ids for up to `sequences` sequences of up to `width` blocks, in a field of `Staged`.

    `rows_of(sequences)` brings their rows up to date in the staging and returns their indices. `changed` columns are to be
    published then (0: none). A row is right if the list of blocks is the one that was written and only grew since:
    code that changes an entry of a sequence's blocks replaces the list (see `request.Sequence`).
    """

    def __init__(self, staged: Staged, field: str, sequences: int, width: int) -> None:
        self.sequences = sequences
        self.width = width
        self._flat = staged.host[field]
        self.device = staged.device[field].view(width, sequences).t()
        self.changed = 0
        self._rows: dict[Sequence, _Row] = {}
        self._free = list(range(sequences - 1, -1, -1))

    def rows_of(self, sequences: Listed[Sequence]) -> list[int]:
        """Raises InvalidArgument if there are more sequences than rows, or one has more blocks than the table is wide."""
        if len(sequences) > len(self._free):
            missing = sum(sequence not in self._rows for sequence in sequences)
            if missing > len(self._free):
                self._sweep(missing)
        indices: list[int] = []
        where: list[int] = []
        what: list[int] = []
        for sequence in sequences:
            row, blocks = self._rows.get(sequence), sequence.blocks
            if len(blocks) > self.width:
                raise InvalidArgument(
                    f"request {sequence.request.id!r} has {len(blocks)} blocks, the block table is {self.width} wide; "
                    "nothing was computed, raise max_model_len",
                    blocks=len(blocks),
                    width=self.width,
                )
            if row is None:
                row = self._rows[sequence] = _Row(self._free.pop(), blocks, 0)
            elif row.blocks is not blocks or row.written > len(blocks):
                row.blocks, row.written = blocks, 0
            if row.written < len(blocks):
                new = range(row.written, len(blocks))
                where += [column * self.sequences + row.index for column in new]
                what += blocks[row.written :]
                row.written = len(blocks)
                self.changed = max(self.changed, row.written)
            indices.append(row.index)
        if where:
            self._flat[torch.tensor(where)] = torch.tensor(what, dtype=torch.int32)
        return indices

    def _sweep(self, wanted: int) -> None:
        """Take back the rows of sequences that do not run any more."""
        for sequence in [one for one in self._rows if one.state is not RequestState.RUNNING]:
            self._free.append(self._rows.pop(sequence).index)
        if wanted > len(self._free):
            raise InvalidArgument(
                f"{wanted} sequences need a row of the block table, {len(self._free)} of {self.sequences} are free; "
                "nothing was computed, raise max_num_seqs",
                wanted=wanted,
                free=len(self._free),
            )


class TokenInputs:
    """A flat batch: `ids`, `positions`, `slots` of its tokens; `rows`, `lens` of its decoding sequences, which come first;
    `picked`, the tokens that yield a next one.

    With `table`, the block table follows in the same buffer and travels with the same copy.
    """

    def __init__(
        self,
        device: torch.device,
        tokens: int,
        sequences: int,
        block_tokens: int,
        table: tuple[int, int] | None = None,
        *,
        by_kernel: bool = False,
    ) -> None:
        """table: (sequences, width)."""
        fields = dict.fromkeys(("rows", "lens", "picked"), sequences)
        fields |= dict.fromkeys(("ids", "positions", "slots"), tokens)
        self.tokens = tokens
        self.block_tokens = block_tokens
        self._head = sum(fields.values())
        if table is not None:
            fields["table"] = table[0] * table[1]
        self.staged = Staged(device, by_kernel=by_kernel, **fields)
        self.table = BlockTable(self.staged, "table", *table) if table is not None else None
        self.ids = self.staged.device["ids"]
        self.positions = self.staged.device["positions"]
        self.slots = self.staged.device["slots"]
        self.rows = self.staged.device["rows"]
        self.lens = self.staged.device["lens"]
        self.picked = self.staged.device["picked"]

    def fill_decodes(self, chunks: Listed[Chunk], rows: Listed[int], padded_to: int) -> None:
        """Stage one token each of `chunks`, and padding up to `padded_to` tokens: length 0, and slot -1, which is skipped."""
        size, none = self.block_tokens, padded_to - len(chunks)
        positions = [chunk.start for chunk in chunks]
        self._put("ids", [chunk.sequence.tokens[chunk.start] for chunk in chunks] + [0] * none)
        self._put("positions", positions + [0] * none)
        slots = [
            chunk.sequence.blocks[at // size] * size + at % size for chunk, at in zip(chunks, positions, strict=True)
        ]
        self._put("slots", slots + [-1] * none)
        self._put("rows", [*rows, *[0] * none])
        self._put("lens", [at + 1 for at in positions] + [0] * none)

    def fill_prefills(self, chunks: Listed[Chunk], first: int) -> None:
        """Stage the tokens of `chunks` one after another, from index `first` of the batch on."""
        for chunk in chunks:
            last = first + chunk.count
            blocks = torch.tensor(chunk.sequence.blocks, dtype=torch.int32)
            positions = torch.arange(chunk.start, chunk.end, dtype=torch.int32)
            host = self.staged.host
            host["ids"][first:last] = torch.tensor(chunk.sequence.tokens[chunk.start : chunk.end], dtype=torch.int32)
            host["positions"][first:last] = positions
            host["slots"][first:last] = (
                blocks[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens
            )
            first = last

    def fill_picked(self, rows: Listed[int]) -> None:
        """Stage which tokens of the batch yield a next one."""
        self._put("picked", rows)

    def publish(self) -> None:
        """Enqueue the copy to the device, with as many columns of the table as have changed since the last one."""
        words = self._head
        if self.table is not None:
            words += self.table.changed * self.table.sequences
            self.table.changed = 0
        self.staged.publish(words)

    def publish_table(self) -> None:
        """Only the table, if it changed: for a pass whose tokens are in other inputs."""
        if self.table is not None and self.table.changed:
            self.publish()

    def _put(self, field: str, values: Listed[int]) -> None:
        self.staged.host[field][: len(values)] = torch.tensor(values, dtype=torch.int32)
