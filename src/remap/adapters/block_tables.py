# SPDX-License-Identifier: Apache-2.0
"""Block tables for caches whose sequences share blocks: beams, repeated prompts, selections.

    blocks = SharedBlocks(tenant.kv)
    table = blocks.table()            # of one batch: every sequence has the same number of tokens
    plan = table.plan(rows, tokens)   # the blocks that the next `tokens` tokens of each sequence take
    copies = table.extend(plan)       # allocates them; copies: (from, to) blocks whose bytes have to be copied first

Each row (the blocks of one sequence) that shows a block holds it; a block that no row shows is free. A row never writes
into a block that another row shows: `plan` gives it a copy, so `select` and `copy` copy nothing. This module holds ids only: no
torch, no bytes.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from remap.errors import InvalidArgument, InvalidState
from remap.kv.spec import KVSpec

__all__ = ["BatchTable", "Follower", "Growth", "Pool", "SharedBlocks"]


class Pool(Protocol):
    """The part of `tenant.kv` that this module uses."""

    spec: KVSpec

    def allocate(self, count: int) -> list[int]: ...
    def free(self, ids: Iterable[int]) -> None: ...


class Follower(Protocol):
    """An object that names blocks outside of tables."""

    def relocate(self, moved: Mapping[int, int]) -> None: ...


@dataclass(frozen=True)
class Growth:
    """The blocks that the next tokens take. Valid until the table changes.

    rows: number of sequences. tokens: of each sequence afterwards. shared: (row, place) of blocks that other rows show
    too: the row gets a copy. missing: for each row, the number of blocks to append.
    """

    rows: int
    tokens: int
    shared: tuple[tuple[int, int], ...]
    missing: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """Number of blocks that `extend` allocates."""
        return len(self.shared) + sum(self.missing)


class SharedBlocks:
    """The blocks of one tenant that tables hold. One thread at a time may use it; a table may end on any thread."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.block_tokens = pool.spec.block_tokens
        self._shown: Counter[int] = Counter()  # block -> rows that show it
        self._tables: weakref.WeakSet[BatchTable] = weakref.WeakSet()
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        # Rows of tables that have ended, on any thread and at any moment. Only `collect` and `relocate` use them.
        self._left: deque[list[list[int]]] = deque()

    def table(self) -> BatchTable:
        """A table without sequences. After it has ended, `collect` frees its blocks."""
        table = BatchTable(self)
        self._tables.add(table)
        weakref.finalize(table, self._left.append, table.rows).atexit = False
        return table

    def collect(self) -> None:
        """Free the blocks of tables that have ended."""
        while self._left:
            rows = self._left.popleft()
            self.drop(block for row in rows for block in row)
            rows.clear()

    def follow(self, follower: Follower) -> None:
        """Report moves to `follower`, too, as long as it lives."""
        self._followers.add(follower)

    def relocate(self, moved: Mapping[int, int]) -> None:
        """Replace ids of blocks that a step has moved (old id -> new id) in every row, and tell the followers."""
        if not moved:
            return
        self._shown = Counter({moved.get(block, block): rows for block, rows in self._shown.items()})
        for rows in (*(table.rows for table in tuple(self._tables)), *self._left):
            for row in rows:
                row[:] = [moved.get(block, block) for block in row]
        for table in tuple(self._tables):
            table.version += 1
        for follower in tuple(self._followers):
            follower.relocate(moved)

    # -- for tables ------------------------------------------------------------------------------------------------

    def shown(self, block: int) -> int:
        """Number of rows that show it, of all tables."""
        return self._shown[block]

    def take(self, count: int) -> list[int]:
        """Allocate blocks, each shown by one row. Raises OutOfBlocks; nothing has changed then."""
        ids = self._pool.allocate(count)
        self._shown.update(ids)
        return ids

    def show(self, blocks: Iterable[int]) -> None:
        """Count one more row that shows each of these blocks."""
        self._shown.update(blocks)

    def drop(self, blocks: Iterable[int]) -> None:
        """Count one row fewer for each of these blocks, as often as it is named. Frees blocks that no row shows."""
        gone = []
        for block in blocks:
            self._shown[block] -= 1
            if not self._shown[block]:
                del self._shown[block]
                gone.append(block)
        self._pool.free(gone)


class BatchTable:
    """rows: for each sequence of a batch, its blocks in the order of tokens. All sequences have `tokens` tokens."""

    def __init__(self, blocks: SharedBlocks) -> None:
        self._blocks = blocks
        self.rows: list[list[int]] = []
        self.tokens = 0
        self.version = 0  # changes whenever a row changes: values derived from the rows are then outdated

    def plan(self, rows: int, tokens: int) -> Growth:
        """The blocks that `tokens` more tokens of each of `rows` sequences take. Changes nothing.

        Raises InvalidState (fields rows, expected) if the table holds another number of sequences.
        """
        if self.rows and len(self.rows) != rows:
            raise InvalidState(
                f"the cache holds {self.tokens} tokens of {len(self.rows)} sequences, but the pass has {rows} "
                "sequences; nothing changed; use a new cache for another batch, or batch_select_indices",
                rows=rows,
                expected=len(self.rows),
            )
        size = self._blocks.block_tokens
        after = self.tokens + tokens
        place = self.tokens // size  # of the first block that is written, if the row has it already
        writes = [(index, row[place]) for index, row in enumerate(self.rows) if tokens and place < len(row)]
        here = Counter(block for _, block in writes)
        # One of the rows that show a block may keep it: the last one, unless another table shows it too.
        keeps = {block: index for index, block in writes if self._blocks.shown(block) == here[block]}
        shared = tuple((index, place) for index, block in writes if keeps.get(block) != index)
        missing = tuple(max(0, -(-after // size) - len(row)) for row in (self.rows or [[]] * rows))
        return Growth(rows, after, shared, missing)

    def extend(self, growth: Growth) -> list[tuple[int, int]]:
        """Allocate the blocks of `plan`. Returns (from, to): the caller copies these blocks' bytes before it writes.

        Does not change `tokens`: the caller sets it when the tokens are written. Raises OutOfBlocks; nothing has
        changed then.
        """
        new = iter(self._blocks.take(growth.blocks))
        copies = []
        if not self.rows:
            self.rows.extend([] for _ in range(growth.rows))
        for index, place in growth.shared:
            old = self.rows[index][place]
            self.rows[index][place] = next(new)
            copies.append((old, self.rows[index][place]))
        self._blocks.drop(old for old, _ in copies)
        for row, missing in zip(self.rows, growth.missing):
            row.extend(next(new) for _ in range(missing))
        if growth.blocks:
            self.version += 1
        return copies

    def crop(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of each sequence; drop whole blocks behind them."""
        keep = -(-tokens // self._blocks.block_tokens)
        gone = [block for row in self.rows for block in row[keep:]]
        for row in self.rows:
            del row[keep:]
        self.tokens = min(self.tokens, tokens)
        if gone:
            self.version += 1
            self._blocks.drop(gone)

    def select(self, indices: Sequence[int]) -> None:
        """Make row i show the blocks of the former row indices[i]. Rows may be repeated and left out. Copies no bytes.

        Raises InvalidArgument (fields index, rows) for an unknown row; nothing has changed then.
        """
        for index in indices:
            if not -len(self.rows) <= index < len(self.rows):
                raise InvalidArgument(
                    f"sequence {index} of {len(self.rows)} does not exist; nothing changed; pass indices of the batch",
                    index=index,
                    rows=len(self.rows),
                )
        after = self._held(indices)
        before = [block for row in self.rows for block in row]
        self.rows[:] = after
        self.version += 1
        self._blocks.drop(before)

    def copy(self) -> BatchTable:
        """Another table that shows the same blocks. Copies no bytes."""
        made = self._blocks.table()
        made.rows.extend(self._held(range(len(self.rows))))
        made.tokens = self.tokens
        return made

    def _held(self, indices: Iterable[int]) -> list[list[int]]:
        """These rows once more, shown, without the blocks of a pass that failed: two rows would write into them."""
        held = -(-self.tokens // self._blocks.block_tokens)
        rows = [self.rows[index][:held] for index in indices]
        self._blocks.show(block for row in rows for block in row)
        return rows

    def clear(self) -> None:
        """Drop all sequences and their blocks."""
        gone = [block for row in self.rows for block in row]
        self.rows.clear()
        self.tokens = 0
        self.version += 1
        self._blocks.drop(gone)
