# SPDX-License-Identifier: Apache-2.0
"""The block pool of one tenant: which KV blocks are usable, which are in use, and how some of them are given back.

The pool only keeps books: it neither maps pages nor copies bytes. The session tells it which pages of the KV region the
tenant owns (`add_pages`, `remove_pages`). The engine allocates blocks from it (`allocate`, `free`) or mirrors it in its own
allocator (`subscribe`). Pages come and go in any order: a block is usable while all of its pages are owned.

Shrinking takes two steps, because live blocks cannot be dropped:

    ids = pool.drain(slots)       # blocks that touch these pages are handed out no more; live ones stay valid
    moves = pool.plan_moves(slots)   # where live ones can go; the caller copies the bytes, in any order, and then
    pool.commit_moves(moves)         # the new ids are live instead of the old ones
    if not pool.pending(slots):      # otherwise wait until requests finish (or `cancel_drain`)
        pool.remove_pages(slots)

Growth is on an engine's critical path, so every bulk operation works on runs of pages and slices of bytes: giving one
run costs a few microseconds plus a memset and a memchr. Only one thread at a time may use a pool; a session ensures
that for its own pools (locking.py). Every method survives an interrupt: it has happened, or has not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain

from remap.errors import InvalidArgument, InvalidState, OutOfBlocks
from remap.kv.pages import ABSENT, CLOSED, OPEN, Runs, SlotMap, SlotRuns
from remap.kv.spec import MOST_BLOCKS, KVGeometry, KVSpec
from remap.sizes import shown

__all__ = ["BlockPool", "KVGeometry", "KVSpec", "Listener", "listed"]

Listener = Callable[[Sequence[int], Sequence[int]], None]
"""cb(added_ids, withdrawn_ids): ids that may be handed out from now on, ids that may not be any more."""

# States of a block (those of pages are in pages.py).
_UNUSABLE, _FREE, _LIVE, _EMPTY, _DRAINING = range(5)
_NOT_OPEN = bytes([_UNUSABLE, _EMPTY, _DRAINING])
_CLOSE = bytes.maketrans(bytes([_FREE, _LIVE]), bytes([_EMPTY, _DRAINING]))
_REOPEN = bytes.maketrans(bytes([_EMPTY, _DRAINING]), bytes([_FREE, _LIVE]))
_REOPEN_HELD = bytes.maketrans(bytes([_EMPTY, _DRAINING]), bytes([_LIVE, _LIVE]))


@dataclass(frozen=True, slots=True)
class SavedPool:
    """The record that `BlockPool.save` makes."""

    state: bytes
    slots: tuple[bytes, bytes]
    counts: tuple[int, int, int, int, int]
    news: int
    unheard: frozenset[int]

    def known(self) -> frozenset[int]:
        """The ids that listeners know to be open."""
        return frozenset(b for b, state in enumerate(self.state) if state in (_FREE, _LIVE)) - self.unheard


class BlockPool:
    """Blocks of one KV region. Starts with no page owned and hence no block usable.

    Every method either does all that it says or raises before anything has changed, with one exception: a listener's
    error is raised *after* the (complete) change, and after all listeners have been told.
    """

    # Invariants, verified by check():
    #   state[b] = UNUSABLE           <=>  some page of block b is not owned
    #   state[b] in {EMPTY, DRAINING} <=>  all pages of b are owned and some of them is withdrawn
    #   state[b] in {FREE, LIVE}      <=>  all pages of b are owned and none is withdrawn
    #   free           = #FREE                     live          = #LIVE + #DRAINING
    #   withdrawn      = #EMPTY + #DRAINING        withdrawn_live = #DRAINING
    #   usable         = free + live + withdrawn - withdrawn_live
    #   state[b] = FREE  =>  b >= hint             external  =>  free = 0

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry = geometry
        self._slots = SlotMap(geometry)
        self._state = bytearray(geometry.spec.max_blocks)
        self._free = 0
        self._live = 0
        self._withdrawn = 0
        self._withdrawn_live = 0
        self._hint = 0
        self._external = False
        self.in_use: int | None = None
        """Blocks that an external engine has in use, by its last word (`Demand.free`). None: the pool knows."""
        self._listeners: list[Listener] = []
        self._news: deque[tuple[Sequence[int], Sequence[int]]] = deque()
        # Live blocks of which an external engine has not heard that it has them: nobody uses them, and they may be withdrawn.
        self._unheard: set[int] = set()
        self._telling = False
        self._silent = False  # a change of several steps is under way
        self.changes = 0  # grows whenever anything that can be asked may have changed

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def usable_blocks(self) -> int:
        """Blocks whose pages are all owned, withdrawn ones included: free + live + withdrawn and empty."""
        return self._free + self._live + self._withdrawn - self._withdrawn_live

    @property
    def free_blocks(self) -> int:
        """Blocks that `allocate` could return now. Always 0 for an external engine, which holds them all."""
        return self._free

    @property
    def live_blocks(self) -> int:
        """Blocks allocated (or held by an external engine), withdrawn ones included."""
        return self._live

    @property
    def withdrawn_blocks(self) -> int:
        """Usable blocks that touch a withdrawn page, whether they are live or not."""
        return self._withdrawn

    @property
    def external(self) -> bool:
        """Whether an engine with its own allocator holds the blocks."""
        return self._external

    def live_ids(self) -> tuple[int, ...]:
        """All live ids, ascending. O(max_blocks)."""
        return tuple(b for b, s in enumerate(self._state) if s in (_LIVE, _DRAINING))

    def open_ids(self) -> tuple[int, ...]:
        """All ids that are usable and not withdrawn, live or free, ascending. O(max_blocks)."""
        return tuple(b for b, s in enumerate(self._state) if s in (_FREE, _LIVE))

    def owned_slots(self) -> tuple[int, ...]:
        """The region slots whose pages are owned, withdrawn ones included, ascending. O(region pages)."""
        return self._slots.owned()

    # -- allocation ------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks, lowest ids first (low ids stay when the pool shrinks), ascending.

        Raises OutOfBlocks (fields: requested, free, usable), InvalidArgument, or InvalidState for an external engine.
        """
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise InvalidArgument(
                f"the number of blocks must be an int of at least 0, got {shown(count)}; nothing was allocated; "
                "pass how many blocks are needed",
                field="count",
                value=count,
            )
        self._refuse_external("allocate")
        if count > self._free:
            raise OutOfBlocks(
                f"{shown(count)} blocks requested, {self._free} free of {self.usable_blocks} usable; nothing was allocated; "
                "free blocks, or raise the tenant's Demand and call step()",
                requested=count,
                free=self._free,
                usable=self.usable_blocks,
            )
        state, find = self._state, self._state.find
        ids = []
        block = self._hint - 1
        for _ in range(count):
            block = find(_FREE, block + 1)
            ids.append(block)
        counts = self._counts()
        try:
            for block in ids:
                state[block] = _LIVE
            self._hint = block + 1
            self._free -= count
            self._live += count
            self.changes += 1
            return ids
        except BaseException:  # an interrupt: ids that the caller does not get must not stay live
            for block in ids:
                state[block] = _FREE
            self._set_counts(counts)
            raise

    def free(self, ids: Iterable[int]) -> None:
        """Give allocated blocks back. Withdrawn ones do not become free again, but stop holding their pages.

        Raises InvalidArgument (field: block) if an id is unknown, not allocated, or named twice.
        """
        self._refuse_external("free")
        self._release_all(self._checked(ids, (_LIVE, _DRAINING), "is not allocated"))

    def holds(self, ids: Iterable[int]) -> bool:
        """Whether all of these are allocated."""
        size = len(self._state)
        held = (_LIVE, _DRAINING)
        return all(isinstance(block, int) and 0 <= block < size and self._state[block] in held for block in ids)

    def require_live(self, ids: Sequence[int]) -> None:
        """Raises InvalidArgument (field: block) if one of these ids is not allocated, or is named twice."""
        self._checked(ids, (_LIVE, _DRAINING), "is not allocated")

    # -- growing ---------------------------------------------------------------------------------------------------

    def runs_of(self, slots: Iterable[int]) -> SlotRuns:
        """These slots of the region in the form that `add_pages` takes without looking at each. Raises InvalidArgument
        (field: slot) for a slot outside the region or named twice."""
        return self._slots.runs(slots)

    def add_pages(self, slots: Iterable[int] | SlotRuns) -> Sequence[int]:
        """The tenant owns the pages at these region slots now. Returns the ids that may be handed out as a result.

        The ids are ascending: a `range` when they are contiguous, otherwise a tuple. `slots` may be in any order; a
        `range` is fastest. Raises InvalidArgument (field: slot) for a slot outside the region, named twice, or owned.
        """
        runs = self._slots.runs(slots)
        self._slots.require(runs, ABSENT, "is owned already")
        self.changes += 1
        columns = self._slots.mark(runs, OPEN)
        added: list[range] = []
        opened = _LIVE if self._external else _FREE
        for first, stop in columns:
            for low, high, state in self._slots.segments(first, stop):
                # A block between two given runs is met twice: the second time it comes first, and is usable already.
                low += self._state[low] != _UNUSABLE
                if state == ABSENT or low == high:
                    continue
                self._state[low:high] = bytes((opened if state == OPEN else _EMPTY,)) * (high - low)
                if state == OPEN:
                    self._count_opened(low, high - low)
                    added.append(range(low, high))
                else:
                    self._withdrawn += high - low
        ids = _joined(added)
        if self._external and self._silent:
            self._unheard.update(ids)
        self._tell(ids, ())
        return ids

    # -- shrinking -------------------------------------------------------------------------------------------------

    def drain(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Hand out no block that touches these pages any more. Returns the ids that were open until now, ascending.

        Live ones among them stay valid until freed. Undone by `cancel_drain`, completed by `remove_pages`. Raises
        InvalidArgument (field: slot) for a slot that is not owned or is withdrawn already.
        """
        runs = self._slots.runs(slots)
        self._slots.require(runs, OPEN, "is not owned, or withdrawn already")
        self.changes += 1
        columns = self._slots.mark(runs, CLOSED)
        closed: list[range] = []
        for first, stop in columns:
            blocks = self.geometry.blocks_of_columns(first, stop)
            low, high = blocks.start, blocks.stop
            segment = self._state[low:high]
            free, live = segment.count(_FREE), segment.count(_LIVE)
            if not free + live:
                continue
            self._state[low:high] = segment.translate(_CLOSE)
            self._free -= free
            self._withdrawn += free + live
            self._withdrawn_live += live
            inner = segment.lstrip(_NOT_OPEN)
            low, inner = high - len(inner), inner.rstrip(_NOT_OPEN)
            if free + live == len(inner):
                closed.append(range(low, low + len(inner)))
            else:
                closed.extend(range(b, b + 1) for b, s in enumerate(inner, low) if s in (_FREE, _LIVE))
        ids = tuple(_joined(closed))
        for block in self._unheard.intersection(ids):
            self._release(block)
        self._unheard.difference_update(ids)
        self._tell((), ids)
        return ids

    def cancel_drain(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Undo `drain` for these pages (or a part of them). Returns the ids that are open again, ascending.

        Raises InvalidArgument (field: slot) for a slot that is not withdrawn.
        """
        runs = self._slots.runs(slots)
        self._slots.require(runs, CLOSED, "is not withdrawn")
        self.changes += 1
        columns = self._slots.mark(runs, OPEN)
        reopened: list[range] = []
        for first, stop in columns:
            for low, high, state in self._slots.segments(first, stop):
                low += self._state[low] in (_FREE, _LIVE)  # met before, as in add_pages()
                if state != OPEN or low == high:
                    continue
                segment = self._state[low:high]
                if self._external and self._silent:
                    self._unheard.update(b for b, s in enumerate(segment, low) if s == _EMPTY)
                draining = segment.count(_DRAINING)
                self._state[low:high] = segment.translate(_REOPEN_HELD if self._external else _REOPEN)
                self._withdrawn -= high - low
                self._withdrawn_live -= draining
                self._count_opened(low, high - low - draining)
                reopened.append(range(low, high))
        ids = tuple(_joined(reopened))
        self._tell(ids, ())
        return ids

    def pending(self, slots: Iterable[int]) -> tuple[int, ...]:
        """The live ids that touch these pages, ascending: empty means that withdrawn pages may be taken."""
        return self._live_in(self._slots.runs(slots))

    def vacant(self, slots: Iterable[int]) -> Iterator[int]:
        """Those of these slots that no live block touches, in the given order. The pool must not change meanwhile."""
        geometry, state = self.geometry, self._state
        page, unit, columns, most = geometry.page_bytes, geometry.unit_bytes, geometry.range_pages, len(state)
        for slot in slots:
            column = slot % columns
            low, high = column * page // unit, min(-(-(column + 1) * page // unit), most)
            if state.find(_LIVE, low, high) < 0 and state.find(_DRAINING, low, high) < 0:
                yield slot

    def usable_with(self, lost: Iterable[int] = (), gained: Iterable[int] = ()) -> int:
        """`usable_blocks` if the `lost` slots' pages were not owned and the `gained` ones' were. Changes nothing."""
        return self._slots.whole_blocks(lost, gained)

    def remove_pages(self, slots: Iterable[int]) -> None:
        """The tenant no longer owns the pages at these slots; their blocks become unusable.

        Raises InvalidState (fields: live = number of live blocks inside, blocks = their ids) while live blocks remain,
        and InvalidArgument (field: slot) for a slot that has not been withdrawn first.
        """
        runs = self._slots.runs(slots)
        self._slots.require(runs, CLOSED, "must be withdrawn before it is taken")
        live = self._live_in(runs)
        if live:
            raise InvalidState(
                f"{len(live)} live blocks still touch these pages, the first is {live[0]}; no page was taken; free "
                "them or move them (plan_moves, commit_moves), then call again",
                live=len(live),
                blocks=live,
            )
        self.changes += 1
        for first, stop in self._slots.mark(runs, ABSENT):
            blocks = self.geometry.blocks_of_columns(first, stop)
            self._withdrawn -= self._state.count(_EMPTY, blocks.start, blocks.stop)
            self._state[blocks.start : blocks.stop] = bytes(len(blocks))

    # -- compaction ------------------------------------------------------------------------------------------------

    def plan_moves(self, slots: Iterable[int]) -> list[tuple[int, int]]:
        """(old, new) for the live blocks that touch these withdrawn pages: lowest old to lowest free id, and so on.

        As many as there are free ids; nothing changes. No new id is an old one, so copies need no order. An external
        engine holds all ids, so there are no free ones: the list is empty, and the engine moves its blocks by itself.
        """
        runs = self._slots.runs(slots)
        self._slots.require(runs, CLOSED, "must be withdrawn before its blocks are moved")
        moves = []
        new = self._hint - 1
        for old in self._live_in(runs)[: self._free]:
            new = self._state.find(_FREE, new + 1)
            moves.append((old, new))
        return moves

    def commit_moves(self, moves: Iterable[tuple[int, int]]) -> None:
        """Make the new ids live instead of the old ones: the bytes have been copied (geometry.byte_ranges_of_block).

        Raises InvalidArgument (field: block) unless each old id is live, each new id free, and all differ; then nothing
        has changed and the old ids are still valid.
        """
        self._refuse_external("commit_moves")
        pairs = list(moves)
        olds = self._checked([old for old, _ in pairs], (_LIVE, _DRAINING), "is not allocated, so it cannot move")
        news = self._checked([new for _, new in pairs], (_FREE,), "is not free, so nothing can move there")
        for old in olds:
            self._release(old)
        for new in news:
            self._state[new] = _LIVE
        self._free -= len(news)
        self._live += len(news)
        self.changes += 1

    # -- engines with their own allocator --------------------------------------------------------------------------

    def subscribe(self, listener: Listener, *, external: bool = False) -> None:
        """Call listener(added_ids, withdrawn_ids) after every change of the set of open blocks.

        If blocks are open already, it is called once at once. With `external` the listener's engine holds all open
        blocks, present and future: `allocate` and `free` raise, and the engine gives withdrawn ids back with `returned`
        once nothing uses them (also from within the listener). Added ids may be ids that the engine still holds, if a
        withdrawal was undone.

        Listeners are called when the pool's state is final. If a listener changes the pool, all hear of that after the
        present change. If listeners raise, the first error is raised at the end, and neither the change nor the
        subscription is undone.

        Raises InvalidState if `external` and blocks are allocated, or another engine is external; or from a listener.
        """
        if not callable(listener):
            raise InvalidArgument(
                f"a listener must be callable with (added_ids, withdrawn_ids), got {shown(listener)}; nothing was subscribed",
                field="listener",
                value=listener,
            )
        if self._telling:
            raise InvalidState("subscribe was called by a listener; nothing was subscribed; call it afterwards")
        if external and (self._external or self._live):
            raise InvalidState(
                f"an external engine must subscribe before blocks are handed out, and alone: {self._live} blocks are "
                f"live, external={self._external}; nothing was subscribed; free all blocks first",
                live=self._live,
                external=self._external,
            )
        state, counts, listeners = bytes(self._state), self._counts(), tuple(self._listeners)
        try:
            if external:
                self._external = True
                self.changes += 1
                self._state[:] = state.translate(bytes.maketrans(bytes([_FREE]), bytes([_LIVE])))
                self._live, self._free = self._free, 0
            self._listeners.append(listener)
            ids = self.open_ids()
            if ids:
                self._deliver(listener, ids)
        except Exception:  # the listener's own: it is subscribed, and has been told
            raise
        except BaseException:  # an interrupt: it is not
            self._external = self._external and not external
            self._state[:] = state
            self._set_counts(counts)
            self._listeners[:] = listeners
            raise

    def returned(self, ids: Iterable[int]) -> None:
        """The external engine gives back these withdrawn blocks.

        Raises InvalidArgument (field: block) for an id that is not both withdrawn and held.
        """
        if not self._external:
            raise InvalidState("no external engine has subscribed; nothing changed; use free()", external=False)
        self._release_all(self._checked(ids, (_DRAINING,), "is not a withdrawn block held by the engine"))

    # -- changes of several steps -----------------------------------------------------------------------------------

    def save(self) -> SavedPool:
        """The whole state, for `restore`: a copy of as many bytes as there are blocks and pages. The caller keeps
        engines away until then."""
        unheard = frozenset(self._unheard)
        return SavedPool(bytes(self._state), self._slots.save(), self._counts(), len(self._news), unheard)

    def silence(self) -> None:
        """Tell listeners nothing until `restore` or `tell`."""
        self._silent = True

    def restore(self, saved: SavedPool) -> None:
        """Restore the saved state; listeners hear nothing of the changes in between. Can be called again."""
        self._state[:] = saved.state
        self._slots.restore(saved.slots)
        self._set_counts(saved.counts)
        self.changes += 1
        self._unheard = set(saved.unheard)
        self.forget_news(saved)
        self._silent = False

    def forget_news(self, saved: SavedPool) -> None:
        """Listeners are not told what has changed since `save`."""
        while len(self._news) > saved.news:
            self._news.pop()

    def tell_withdrawn(self, known: Collection[int]) -> None:
        """In the midst of a change, listeners hear at once which of the open ids that they know are withdrawn, and nothing else.
        Of what an engine gets they hear when that is decided: it would use it, and if that is undone it is nobody's."""
        withdrawn = tuple(sorted(set(known).difference(self.open_ids())))
        errors: list[Exception] = []
        self._telling = True
        try:
            for listener in tuple(self._listeners) if withdrawn else ():
                _call(listener, (), withdrawn, errors)
        finally:
            self._telling = False
        if errors:
            raise errors[0]

    def tell_since(self, known: Collection[int]) -> None:
        """Listeners have heard, last of all, that these ids are open: they are to hear what differs now."""
        now = self.open_ids()
        added, withdrawn = tuple(b for b in now if b not in known), tuple(sorted(set(known).difference(now)))
        if added or withdrawn:
            self._news.append((added, withdrawn))

    def not_telling(self) -> None:
        """Note that no listener is being told: called after an interrupt has ended a call."""
        self._telling = False

    @property
    def telling(self) -> bool:
        """Whether this is a listener's call."""
        return self._telling

    @property
    def has_news(self) -> bool:
        """Whether listeners have not heard of all changes yet."""
        return bool(self._news)

    def tell(self) -> None:
        """Tell listeners of the changes since `save`."""
        self._silent = False
        if self._news and not self._telling:
            self._unheard.clear()
            self._deliver()

    # -- verification ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify every invariant from scratch, slowly: O(region pages + blocks). Raises AssertionError."""
        geometry, slots, count = self.geometry, self._slots, self._state.count
        for column in range(geometry.range_pages):
            expected = min(slots.slot[column :: geometry.range_pages])
            _verify(slots.column[column] == expected, f"column {column} is {slots.column[column]}, not {expected}")
        for block, state in enumerate(self._state):
            expected = min(slots.slot[slot] for slot in geometry.slots_of_block(block))
            kinds = {ABSENT: (_UNUSABLE,), CLOSED: (_EMPTY, _DRAINING), OPEN: (_FREE, _LIVE)}[expected]
            _verify(state in kinds, f"block {block} is in state {state}, its pages allow {kinds}")
            _verify(state != _FREE or block >= self._hint, f"free block {block} lies below the hint {self._hint}")
        _verify(self._free == count(_FREE), "free = #FREE")
        _verify(self._live == count(_LIVE) + count(_DRAINING), "live = #LIVE + #DRAINING")
        _verify(self._withdrawn == count(_EMPTY) + count(_DRAINING), "withdrawn = #EMPTY + #DRAINING")
        _verify(self._withdrawn_live == count(_DRAINING), "withdrawn_live = #DRAINING")
        _verify(self.usable_blocks == len(self._state) - count(_UNUSABLE), "usable = blocks - #UNUSABLE")
        _verify(not (self._external and self._free), "external => free = 0")
        _verify(all(self._state[block] == _LIVE for block in self._unheard), "unheard => live")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _live_in(self, runs: Runs) -> tuple[int, ...]:
        """The live ids that touch these slots, ascending."""
        found: list[int] = []
        for first, stop in self._slots.columns(runs):
            blocks = self.geometry.blocks_of_columns(first, stop)
            start = max(blocks.start, found[-1] + 1) if found else blocks.start
            segment = self._state[start : blocks.stop]
            if _LIVE in segment or _DRAINING in segment:
                found.extend(b for b, s in enumerate(segment, start) if s in (_LIVE, _DRAINING))
        return tuple(found)

    def _count_opened(self, low: int, empty: int) -> None:
        """`empty` blocks from `low` on have become open: an external engine's own, otherwise free."""
        if self._external:
            self._live += empty
        else:
            self._free += empty
            self._hint = min(self._hint, low)

    def _counts(self) -> tuple[int, int, int, int, int]:
        return self._free, self._live, self._withdrawn, self._withdrawn_live, self._hint

    def _set_counts(self, counts: tuple[int, int, int, int, int]) -> None:
        self._free, self._live, self._withdrawn, self._withdrawn_live, self._hint = counts

    def _release_all(self, blocks: Sequence[int]) -> None:
        """Release all of them or, on an interrupt, none."""
        counts, states = self._counts(), [self._state[block] for block in blocks]
        try:
            for block in blocks:
                self._release(block)
        except BaseException:
            for block, state in zip(blocks, states):
                self._state[block] = state
            self._set_counts(counts)
            raise

    def _release(self, block: int) -> None:
        """Make a live block no longer live. (In external mode only withdrawn blocks come here.)"""
        self._live -= 1
        self.changes += 1
        if self._state[block] == _DRAINING:
            self._state[block] = _EMPTY
            self._withdrawn_live -= 1
        else:
            self._state[block] = _FREE
            self._free += 1
            self._hint = min(self._hint, block)

    def _checked(self, ids: Iterable[int], allowed: tuple[int, ...], otherwise: str) -> list[int]:
        """ids as a list, after verifying that each is a block id in an allowed state and occurs once."""
        blocks = listed(ids)
        for block in blocks:
            known = isinstance(block, int) and not isinstance(block, bool) and 0 <= block < len(self._state)
            if not known or self._state[block] not in allowed:
                raise InvalidArgument(
                    f"block {shown(block)} {otherwise if known else 'is not a block id of this pool'}; nothing changed; "
                    "pass ids that allocate() returned and that have not been freed",
                    field="block",
                    block=block,
                    max_blocks=len(self._state),
                )
        if len(set(blocks)) != len(blocks):
            twice = next(b for i, b in enumerate(blocks) if b in blocks[:i])
            raise InvalidArgument(
                f"block {twice} is named twice; nothing changed; name each block once", field="block", block=twice
            )
        return blocks

    def _refuse_external(self, call: str) -> None:
        if self._external:
            raise InvalidState(
                f"{call}: an external engine holds this pool's blocks; nothing changed; use the engine's allocator, "
                "and returned() for withdrawn blocks",
                external=True,
            )

    def _tell(self, added: Sequence[int], withdrawn: Sequence[int]) -> None:
        """Tell all listeners, in order of changes; a listener's own change waits until the present one is told."""
        if not self._listeners or not (added or withdrawn):
            return
        self._news.append((added, withdrawn))
        if not self._telling and not self._silent:
            self._deliver()

    def _deliver(self, newcomer: Listener | None = None, ids: Sequence[int] = ()) -> None:
        errors: list[Exception] = []
        self._telling = True
        try:
            if newcomer is not None:
                _call(newcomer, ids, (), errors)
            while self._news:
                added, withdrawn = self._news[0]
                for listener in tuple(self._listeners):
                    _call(listener, added, withdrawn, errors)
                self._news.popleft()  # last, so that an interrupt does not lose it; listeners may hear of it twice
        finally:
            self._telling = False
        if errors:
            raise errors[0]


def _call(listener: Listener, added: Sequence[int], withdrawn: Sequence[int], errors: list[Exception]) -> None:
    try:
        listener(added, withdrawn)
    except Exception as error:  # noqa: BLE001  foreign code may raise anything; the first error is raised later
        errors.append(error)


def listed(ids: Iterable[int]) -> list[int]:
    """Block ids as a list. Raises InvalidArgument (fields field, value) if `ids` is not iterable, or has more than a pool."""
    if ids.__class__ is not list and not (isinstance(ids, Iterable) and _countable(ids)):
        raise InvalidArgument(
            f"block ids must be an iterable of ints, at most {MOST_BLOCKS} of them, got {shown(ids)}; nothing changed; put a "
            "single id into a list",
            field="ids",
            value=ids,
        )
    return list(ids)


def _countable(ids: Iterable[int]) -> bool:
    """Whether these are no more than blocks that there can be, as far as that is known before they are counted."""
    try:
        return len(ids) <= MOST_BLOCKS if isinstance(ids, Sized) else True
    except OverflowError:  # a range of more than the machine can count
        return False


def _joined(ranges: list[range]) -> Sequence[int]:
    """Ascending disjoint ranges as one range if they touch, otherwise as a tuple."""
    if not ranges:
        return ()
    count = sum(map(len, ranges))
    first, stop = ranges[0].start, ranges[-1].stop
    return range(first, stop) if stop - first == count else tuple(chain.from_iterable(ranges))


def _verify(holds: bool, equation: str) -> None:
    # Not `assert`: it must work under -O, where a corrupt pool would hand one block to two requests.
    if not holds:
        raise AssertionError(f"BlockPool invariant broken: {equation}")
