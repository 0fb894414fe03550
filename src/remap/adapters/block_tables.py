"""Which blocks hold which sequences, for caches whose sequences share blocks: beams, repeated prompts, selections.

    blocks = SharedBlocks(tenant.kv)
    table = blocks.table()          # of one batch: every sequence has the same number of tokens
    plan = table.plan(rows, tokens) # what the next `tokens` tokens of each sequence take
    table.extend(plan)              # allocate; plan.copies: blocks whose bytes have to be copied first

A block is held by as many rows as show it, and is free when none does. A row never writes into a block that another one
shows: `plan` gives it a copy (`reorder`, `repeat` and `select` therefore copy nothing). Bookkeeping only: no torch, no bytes.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from remap.errors import InvalidArgument, InvalidState

__all__ = ["BlockTable", "Follower", "Growth", "Pool", "SharedBlocks"]


class Pool(Protocol):
    """What is needed of `tenant.kv`."""

    block_tokens: int

    def allocate(self, count: int) -> list[int]: ...
    def free(self, ids: Iterable[int]) -> None: ...


class Follower(Protocol):
    """Who names blocks outside of tables."""

    def relocate(self, moved: Mapping[int, int]) -> None: ...


@dataclass(frozen=True)
class Growth:
    """What the next tokens take. rows: the sequences; tokens: of each, afterwards; shared: (row, place) of blocks that other
    rows show too and that get a copy; missing: for each row, blocks to append. Valid until the table changes."""

    rows: int
    tokens: int
    shared: tuple[tuple[int, int], ...]
    missing: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """How many blocks `extend` allocates."""
        return len(self.shared) + sum(self.missing)


class SharedBlocks:
    """The blocks of one tenant that tables hold. One thread at a time; only a table's end may come from another one."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.block_tokens = pool.block_tokens
        self._shown: Counter[int] = Counter()  # block -> rows that show it
        self._tables: weakref.WeakSet[BlockTable] = weakref.WeakSet()
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        # Rows of tables that were collected: by any thread, at any moment. Nothing but `collect` looks at them.
        self._left: deque[list[list[int]]] = deque()

    def table(self) -> BlockTable:
        """A table without sequences. Its blocks are free some time after it is gone (see `collect`)."""
        table = BlockTable(self)
        self._tables.add(table)
        weakref.finalize(table, self._left.append, table.rows).atexit = False
        return table

    @property
    def held(self) -> int:
        """Blocks that some row shows."""
        return len(self._shown)

    def collect(self) -> None:
        """Free the blocks of tables that are gone."""
        while self._left:
            rows = self._left.popleft()
            self.drop(block for row in rows for block in row)
            rows.clear()

    def follow(self, follower: Follower) -> None:
        """Tell it of moves, too, as long as it lives."""
        self._followers.add(follower)

    def relocate(self, moved: Mapping[int, int]) -> None:
        """Blocks have moved (old id -> new id), as a step's report says: every row shows the new ones."""
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

    def take(self, count: int) -> list[int]:
        """New blocks, each shown once. Raises OutOfBlocks; nothing has changed then."""
        ids = self._pool.allocate(count)
        self._shown.update(ids)
        return ids

    def show(self, blocks: Iterable[int]) -> None:
        """One more row shows each of these."""
        self._shown.update(blocks)

    def drop(self, blocks: Iterable[int]) -> None:
        """One row fewer shows each of these (as often as named); what none shows is free."""
        gone = []
        for block in blocks:
            self._shown[block] -= 1
            if not self._shown[block]:
                del self._shown[block]
                gone.append(block)
        self._pool.free(gone)


class BlockTable:
    """rows: for each sequence of a batch, its blocks in the order of tokens. All sequences have `tokens` tokens."""

    def __init__(self, blocks: SharedBlocks) -> None:
        self._blocks = blocks
        self.rows: list[list[int]] = []
        self.tokens = 0
        self.version = 0  # changes whenever a row does: what was derived from the rows is old then

    def plan(self, rows: int, tokens: int) -> Growth:
        """What `tokens` more tokens of each of `rows` sequences take. Nothing changes.

        Raises InvalidState (fields: rows, expected) if the table has tokens of another number of sequences.
        """
        if self.rows and len(self.rows) != rows:
            raise InvalidState(
                f"the cache holds {self.tokens} tokens of {len(self.rows)} sequences, the pass has {rows}; nothing changed; "
                "use a new cache for another batch, or batch_select_indices",
                rows=rows,
                expected=len(self.rows),
            )
        size = self._blocks.block_tokens
        after = self.tokens + tokens
        place = self.tokens // size  # the first block that is written, if it is there already
        # Of the rows that show it one may keep it: the last one.
        keeps = {row[place]: index for index, row in enumerate(self.rows) if tokens and place < len(row)}
        shared = tuple(
            (index, place) for index, row in enumerate(self.rows) if keeps.get(_at(row, place), index) != index
        )
        missing = tuple(max(0, -(-after // size) - len(row)) for row in (self.rows or [[]] * rows))
        return Growth(rows, after, shared, missing)

    def extend(self, growth: Growth) -> list[tuple[int, int]]:
        """Allocate what `plan` has found. Returns (from, to) of blocks whose bytes the caller copies before it writes.

        `tokens` stays: the caller sets it when they are written. Raises OutOfBlocks; nothing has changed then.
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
        """Keep the first `tokens` tokens of each sequence; whole blocks behind them go."""
        keep = -(-tokens // self._blocks.block_tokens)
        gone = [block for row in self.rows for block in row[keep:]]
        for row in self.rows:
            del row[keep:]
        self.tokens = min(self.tokens, tokens)
        if gone:
            self.version += 1
            self._blocks.drop(gone)

    def select(self, indices: Sequence[int]) -> None:
        """Row i becomes what row indices[i] was; rows may be repeated and left out. Copies no bytes.

        Raises InvalidArgument (field index) for an unknown row; nothing changed then.
        """
        for index in indices:
            if not -len(self.rows) <= index < len(self.rows):
                raise InvalidArgument(
                    f"sequence {index} of {len(self.rows)} does not exist; nothing changed; pass indices of the batch",
                    index=index,
                    rows=len(self.rows),
                )
        after = [list(self.rows[index]) for index in indices]
        self._blocks.show(block for row in after for block in row)
        before = [block for row in self.rows for block in row]
        self.rows[:] = after
        self.version += 1
        self._blocks.drop(before)

    def clear(self) -> None:
        """No sequences and no tokens; the blocks are free."""
        gone = [block for row in self.rows for block in row]
        self.rows.clear()
        self.tokens = 0
        self.version += 1
        self._blocks.drop(gone)


def _at(row: Sequence[int], place: int) -> int:
    return row[place] if place < len(row) else -1
