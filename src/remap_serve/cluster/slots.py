# SPDX-License-Identifier: Apache-2.0
"""Where the logical blocks of a pipeline stage lie in its KV region. Pure.

With the block_major layout a physical block is as many *slots* as the model has layers, one layer's keys and values each, and
the region is one row of slots. A stage that computes m of n layers sees it so: a logical block takes m consecutive slots,
anywhere in a run of physical blocks that the stage holds, and may begin in one block and end in the next. Layer q of the stage
reads slot `first slot + q`, so one table of first slots serves all its layers. From the same memory a stage has room for
n / m times as many tokens as an instance that computes all layers.

The head of a group numbers the logical blocks, from 0 to the least capacity of its stages; each stage has its own places for
them. An instance that serves alone needs no such table: its blocks are the physical ones (`Whole`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from remap.errors import InvalidArgument, OutOfBlocks

__all__ = ["Departure", "Places", "Slots", "Whole"]


class Places(Protocol):
    """Logical blocks -> first slots."""

    def table(self, blocks: Iterable[int]) -> list[int]:
        """The first slot of each of these logical blocks."""
        ...

    def spans(self, block: int) -> range:
        """The physical blocks in which this logical block lies."""
        ...


class Whole:
    """All layers are computed here: logical block b is physical block b. layers: of the model."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def table(self, blocks: Iterable[int]) -> list[int]:
        """`Places.table`."""
        return [block * self._layers for block in blocks]

    def spans(self, block: int) -> range:
        """`Places.spans`."""
        return range(block, block + 1)


class Slots:
    """The places of a stage that computes `count` (at least 1) of the model's `layers`.

    Logical blocks 0 <= b < capacity have a place each, which stays where it is until `shrink` moves it. `held`: the physical
    blocks that were given to `grow`.
    """

    # Invariants: no two places share a slot; every slot of a place is in a held block; `_tails` names, for the block behind
    # the last one of each run, the first slot of that run that no place has.

    def __init__(self, layers: int, count: int) -> None:
        if not 1 <= count <= layers:
            raise InvalidArgument(
                f"a stage computes 1 to {layers} layers, got {count}; nothing was created; a stage without layers has no KV",
                count=count,
                layers=layers,
            )
        self.layers = layers
        self.count = count
        self.held: set[int] = set()
        self._places: list[int] = []
        self._spare: list[int] = []
        self._tails: dict[int, int] = {}

    @property
    def capacity(self) -> int:
        """Logical blocks that have a place."""
        return len(self._places)

    def table(self, blocks: Iterable[int]) -> list[int]:
        """`Places.table`."""
        places = self._places
        return [places[block] for block in blocks]

    def spans(self, block: int) -> range:
        """`Places.spans`."""
        return self._blocks_of(self._places[block])

    def grow(self, blocks: Iterable[int]) -> int:
        """These physical blocks are the stage's from now on. Returns the new capacity; places that there are stay.

        Blocks that continue a run use up its rest, so at most count - 1 slots of each run stay without a place.
        Raises InvalidArgument (field blocks) for a block that is held already, or named twice; nothing changed then.
        """
        given = sorted(blocks)
        strange = sorted({*self.held.intersection(given), *(a for a, b in zip(given, given[1:]) if a == b)})
        if strange:
            raise InvalidArgument(
                f"blocks {strange[:4]} are held already, or named twice; nothing changed; give each block once",
                blocks=tuple(strange),
            )
        found = list(self._spare)
        for first, end in _runs(given):
            slot = self._tails.pop(first, first * self.layers)
            while slot + self.count <= end * self.layers:
                found.append(slot)
                slot += self.count
            self._tails[end] = slot
        self.held.update(given)
        self._places += found
        self._spare = []
        return len(self._places)

    def room_without(self, leaving: Iterable[int]) -> int:
        """The most that `shrink` could keep if these physical blocks went."""
        gone = set(leaving)
        return sum(gone.isdisjoint(self._blocks_of(slot)) for slot in self._places)

    def shrink(self, limit: int, leaving: Iterable[int]) -> list[tuple[int, int]]:
        """Logical blocks from `limit` on end, and these physical blocks are the stage's no more.

        Returns (from, to), first slots of places: copy `count` slots each, in any order, before anything else is computed. No
        slot of a `to` holds anything that is kept. Raises OutOfBlocks (fields requested, free, usable) where fewer than
        `limit` places would be left; nothing changed then.
        """
        gone = set(leaving)
        usable = self.room_without(gone)
        if limit > usable:
            raise OutOfBlocks(
                f"{limit} logical blocks cannot be kept: without {len(gone)} of {len(self.held)} physical blocks there is "
                f"room for {usable}; nothing changed; free logical blocks first",
                requested=limit,
                free=usable,
                usable=usable,
            )
        kept, free = self._places[:limit], []
        for slot in self._places[limit:]:
            if gone.isdisjoint(self._blocks_of(slot)):
                free.append(slot)
        free.reverse()
        moves = []
        for block, slot in enumerate(kept):
            if not gone.isdisjoint(self._blocks_of(slot)):
                kept[block] = free.pop()
                moves.append((slot, kept[block]))
        self._places, self._spare = kept, free[::-1]
        self.held -= gone
        self._tails = {end: slot for end, slot in self._tails.items() if end - 1 in self.held}
        # The rest of a run whose last blocks stay may begin in one that goes.
        for end, slot in self._tails.items():
            lost = [block for block in range(slot // self.layers, end) if block in gone]
            if lost:
                self._tails[end] = (lost[-1] + 1) * self.layers
        return moves

    def _blocks_of(self, slot: int) -> range:
        return range(slot // self.layers, (slot + self.count - 1) // self.layers + 1)


class Departure:
    """KV that is going away, and the physical blocks that it still keeps: KV that an instance computed before its group changed.

    places: of the logical blocks then. held: the physical blocks there. live: for each request its logical blocks.
    """

    def __init__(self, places: Places, held: Iterable[int], live: dict[str, Sequence[int]]) -> None:
        self.places = places
        self.live = live
        self._held = set(held)
        self._kept = Counter(span for blocks in live.values() for block in blocks for span in places.spans(block))

    def unused(self) -> list[int]:
        """Physical blocks, ascending, that hold nothing which is still needed: the caller's from now on."""
        found = sorted(block for block in self._held if not self._kept[block])
        self._held.difference_update(found)
        return found

    def leave(self, id: str) -> list[int]:
        """This request's KV is needed here no more. Returns the physical blocks that are unused now; [] if it is unknown."""
        touched = set()
        for block in self.live.pop(id, ()):
            for span in self.places.spans(block):
                self._kept[span] -= 1
                touched.add(span)
        found = sorted(block for block in touched & self._held if not self._kept[block])
        self._held.difference_update(found)
        return found


def _runs(ascending: Sequence[int]) -> list[tuple[int, int]]:
    """(first, end) of the runs of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in ascending:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found
