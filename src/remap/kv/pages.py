# SPDX-License-Identifier: Apache-2.0
"""Which pages of one KV region are owned, and which of those are withdrawn: the page side of `remap.kv.pool.BlockPool`.

Sets of pages are *runs*: ascending, disjoint, non-adjacent half-open intervals of slots or columns. So giving ten
thousand pages in one piece costs about as much as giving one. Pure; sees no block states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import index

from remap.errors import InvalidArgument
from remap.kv.spec import KVGeometry

__all__ = ["ABSENT", "CLOSED", "OPEN", "Runs", "SlotMap", "SlotRuns"]

# States of a slot: not owned, owned but withdrawn, owned. The state of a column (of a block) is the least favourable
# state of its slots (of its columns): absent if any is absent, else closed if any is closed, else open.
ABSENT, CLOSED, OPEN = range(3)

Runs = Sequence[tuple[int, int]]


class SlotRuns(tuple[tuple[int, int], ...]):
    """Slots of a region as runs, made by `SlotMap.runs`, which takes them as they are."""

    __slots__ = ()


_HELD = bytes.maketrans(bytes((ABSENT, CLOSED, OPEN)), bytes((0, 1, 1)))


class SlotMap:
    """The state of each slot of a region, and of each column. All slots start ABSENT."""

    # Invariant, verified by BlockPool.check(): column[c] = min over ranges r of slot[r * range_pages + c]

    def __init__(self, geometry: KVGeometry) -> None:
        self._geometry = geometry
        self.slot = bytearray(geometry.region_pages)
        # With one range a column *is* a slot: use the same object, so that there is nothing to keep in step.
        self.column = self.slot if geometry.ranges == 1 else bytearray(geometry.range_pages)

    def save(self) -> tuple[bytes, bytes]:
        """All states, for `restore`."""
        return bytes(self.slot), b"" if self.column is self.slot else bytes(self.column)

    def restore(self, saved: tuple[bytes, bytes]) -> None:
        """Restore the saved states. Can be called again."""
        self.slot[:] = saved[0]
        if self.column is not self.slot:
            self.column[:] = saved[1]

    def owned(self) -> tuple[int, ...]:
        """All slots that are not ABSENT, ascending."""
        found: list[int] = []
        stop, last = 0, len(self.slot)
        while stop < last:  # one round per run of equal state: there are tens of thousands of slots
            first, absent = stop, self.slot[stop] == ABSENT
            ends = [self.slot.find(state, first) for state in ((CLOSED, OPEN) if absent else (ABSENT,))]
            stop = min((end for end in ends if end >= 0), default=last)
            if not absent:
                found.extend(range(first, stop))
        return tuple(found)

    def whole_blocks(self, lost: Iterable[int] = (), gained: Iterable[int] = ()) -> int:
        """How many blocks would have all their pages if the `lost` slots were not owned and the `gained` ones were.

        A slot in both is lost. Changes nothing. Costs one step per run of owned pages, and one per slot named.
        """
        slot = self.slot[:]
        for place in gained:
            slot[place] = OPEN
        for place in lost:
            slot[place] = ABSENT
        pages, unit = self._geometry.range_pages, self._geometry.unit_bytes
        if self._geometry.ranges > 1:
            columns = [slot[column::pages] for column in range(pages)]
            slot = bytearray(ABSENT if ABSENT in states else OPEN for states in columns)
        held = slot.translate(_HELD)
        found, stop, page, most = 0, 0, self._geometry.page_bytes, self._geometry.spec.max_blocks
        while (first := held.find(1, stop)) >= 0:
            stop = held.find(0, first)
            stop = len(held) if stop < 0 else stop
            found += max(0, min(stop * page // unit, most) - -(-first * page // unit))
        return found

    def runs(self, slots: Iterable[int] | SlotRuns) -> SlotRuns:
        """`slots`, in any order, as runs. Raises InvalidArgument (field: slot) outside the region or named twice."""
        if isinstance(slots, SlotRuns):
            return slots
        if isinstance(slots, range) and slots.step == 1:
            runs = SlotRuns([(slots.start, slots.stop)] if slots else ())
        else:
            runs = SlotRuns(self._sorted_runs(sorted(map(index, slots))))
        if runs and (runs[0][0] < 0 or runs[-1][1] > len(self.slot)):
            slot = runs[0][0] if runs[0][0] < 0 else runs[-1][1] - 1
            raise InvalidArgument(
                f"slot {slot} lies outside the region of {len(self.slot)} pages; nothing changed; use slots of "
                "geometry.donation_slot or geometry.slots_of_block",
                field="slot",
                slot=slot,
                region_pages=len(self.slot),
            )
        return runs

    def require(self, runs: Runs, state: int, otherwise: str) -> None:
        """Raise InvalidArgument (field: slot; text: `otherwise`) unless every slot of the runs is in `state`."""
        for first, stop in runs:
            for other in (ABSENT, CLOSED, OPEN):
                slot = self.slot.find(other, first, stop) if other != state else -1
                if slot >= 0:
                    raise InvalidArgument(
                        f"slot {slot} {otherwise}; nothing changed; check owned_slots()", field="slot", slot=slot
                    )

    def mark(self, runs: Runs, state: int) -> Runs:
        """Set the state of all slots of the runs, and update their columns. Returns the columns' runs."""
        for first, stop in runs:
            self.slot[first:stop] = bytes((state,)) * (stop - first)
        columns = self.columns(runs)
        if self.column is not self.slot:
            for first, stop in columns:
                for column in range(first, stop):
                    states = self.slot[column :: self._geometry.range_pages]
                    self.column[column] = ABSENT if ABSENT in states else CLOSED if CLOSED in states else OPEN
        return columns

    def columns(self, runs: Runs) -> Runs:
        """The runs of the columns of these slots: the same runs for block_major."""
        if self.column is self.slot:
            return runs
        pages = self._geometry.range_pages
        pieces: set[tuple[int, int]] = set()  # usually the same columns of many ranges: a set keeps one of them
        for first, stop in runs:
            while first < stop:  # a run may reach from one range into the next
                end = min(stop, first - first % pages + pages)
                pieces.add((first % pages, (end - 1) % pages + 1))
                first = end
        merged: list[tuple[int, int]] = []
        for first, stop in sorted(pieces):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((first, stop))
        return merged

    def segments(self, first: int, stop: int) -> list[tuple[int, int, int]]:
        """The blocks that touch columns [first, stop) as (low, high, state of all their columns), ascending.

        Columns of equal state count as one: all blocks inside them share that state. Only the block across each
        boundary is checked by itself, so the cost grows with the number of changes of state, not with the blocks.
        """
        unit, page = self._geometry.unit_bytes, self._geometry.page_bytes
        blocks = self._geometry.blocks_of_columns(first, stop)
        found: list[tuple[int, int, int]] = []
        block = blocks.start
        while first < stop:
            state = self.column[first]
            end = stop
            for other in (ABSENT, CLOSED, OPEN):
                if other != state:
                    place = self.column.find(other, first, end)
                    end = end if place < 0 else place
            low, high = -(-first * page // unit), min(end * page // unit, blocks.stop)
            if block < low and block < blocks.stop:
                found.append((block, block + 1, self._state(block)))
                block += 1
            if block < high:
                found.append((block, high, state))
                block = high
            first = end
        if block < blocks.stop:
            found.append((block, block + 1, self._state(block)))
        return found

    def _state(self, block: int) -> int:
        """The least favourable state among the columns that the block touches."""
        unit, page = self._geometry.unit_bytes, self._geometry.page_bytes
        first, stop = block * unit // page, -(-(block + 1) * unit // page)
        if self.column.find(ABSENT, first, stop) >= 0:
            return ABSENT
        return CLOSED if self.column.find(CLOSED, first, stop) >= 0 else OPEN

    @staticmethod
    def _sorted_runs(ordered: list[int]) -> list[tuple[int, int]]:
        if not ordered:
            return []
        first = ordered[0]
        if ordered == list(range(first, first + len(ordered))):
            return [(first, first + len(ordered))]
        runs: list[tuple[int, int]] = []
        for last, number in pairwise(ordered):
            if number == last + 1:
                continue
            if number == last:
                raise InvalidArgument(
                    f"slot {number} is named twice; nothing changed; name each slot once", field="slot", slot=number
                )
            runs.append((first, last + 1))
            first = number
        runs.append((first, ordered[-1] + 1))
        return runs
