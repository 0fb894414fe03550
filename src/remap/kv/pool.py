# SPDX-License-Identifier: Apache-2.0
"""The block pool of one tenant: which KV blocks are usable, which are in use, and how some of them are given back.

The books are the core's (include/remap/block_pool.h). A change of the session gives and takes the pages of the KV region that the
tenant owns, and moves live blocks out of what goes (include/remap/draft.h). The engine allocates blocks (`allocate`, `free`) or
mirrors the pool in its own allocator (`subscribe`). Pages come and go in any order: a block is usable while all of its pages are
owned. Withdrawn ones are handed out no more; live blocks there stay valid until they are freed.

Only one thread at a time may change a pool; a session ensures that for its own pools (locking.py). A change is one call of the
core, so an interrupt finds it made, or not begun. Listeners hear the difference to what they have heard, so one that an
interrupt keeps from them comes with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized

from remap import _core
from remap.errors import InvalidArgument, InvalidState, OutOfBlocks
from remap.kv.spec import MOST_BLOCKS, KVGeometry, KVSpec
from remap.sizes import shown

__all__ = ["BlockPool", "KVGeometry", "KVSpec", "Listener", "listed"]

Listener = Callable[[Sequence[int], Sequence[int]], None]
"""cb(added_ids, withdrawn_ids): ids that may be handed out from now on, ids that may not be any more."""


class BlockPool(_core.BlockPool):
    """Blocks of one KV region. Starts with no page owned and hence no block usable.

    Every method either does all that it says or raises before anything has changed, with one exception: a listener's
    error is raised *after* the (complete) change, and after all listeners have been told. Ids that a method returns are
    ascending: a `range` when they are contiguous, otherwise a tuple.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        super().__init__(
            geometry.ranges, geometry.range_pages, geometry.page_bytes, geometry.unit_bytes, geometry.spec.max_blocks
        )
        self.geometry = geometry
        self.in_use: int | None = None
        """Blocks that an external engine has in use, by its last word (`Demand.free`). None: the pool knows."""
        self._listeners: list[Listener] = []
        self._telling = False

    # -- allocation ------------------------------------------------------------------------------------------------

    def allocate(self, count: int, into: list[int] | None = None) -> list[int]:
        """Allocate `count` blocks, lowest ids first (low ids stay when the pool shrinks), ascending. into: an empty list that
        gets them, for who may be interrupted: it has them as soon as they are allocated.

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
        free = self.free_blocks
        if count > free:
            raise OutOfBlocks(
                f"{shown(count)} blocks requested, {free} free of {self.usable_blocks} usable; nothing was allocated; "
                "free blocks, or raise the tenant's Demand and call step()",
                requested=count,
                free=free,
                usable=self.usable_blocks,
            )
        ids = [] if into is None else into
        self.take(count, ids)
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Give allocated blocks back. Withdrawn ones do not become free again, but stop holding their pages.

        Raises InvalidArgument (field: block) if an id is unknown, not allocated, or named twice.
        """
        self._refuse_external("free")
        blocks = listed(ids)
        self._require(blocks, self.release(blocks, False), "is not allocated")

    def holds(self, ids: Iterable[int]) -> bool:
        """Whether all of these are allocated."""
        return self.first_not_live(list(ids)) < 0

    def require_live(self, ids: Iterable[int]) -> None:
        """Raises InvalidArgument (field: block) if one of these ids is not allocated, or is named twice."""
        blocks = listed(ids)
        self._require(blocks, self.first_not_live(blocks), "is not allocated")

    # -- engines with their own allocator --------------------------------------------------------------------------

    def subscribe(self, listener: Listener, *, external: bool = False) -> None:
        """Call listener(added_ids, withdrawn_ids) after every change of the set of open blocks.

        If blocks are open already, it is called once at once. With `external` the listener's engine holds all open
        blocks, present and future: `allocate` and `free` raise, and the engine gives withdrawn ids back with `returned`
        once nothing uses them (also from within the listener). Added ids may be ids that the engine still holds, if a
        withdrawal was undone.

        Listeners are called when the pool's state is final. If a listener changes the pool, all hear of that after the
        present change. If listeners raise, the first error is raised at the end, and neither the change nor the
        subscription is undone. An interrupt undoes the subscription.

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
        if external and (self.external or self.live_blocks):
            raise InvalidState(
                f"an external engine must subscribe before blocks are handed out, and alone: {self.live_blocks} blocks are "
                f"live, external={self.external}; nothing was subscribed; free all blocks first",
                live=self.live_blocks,
                external=self.external,
            )
        saved, listeners = self.save(), tuple(self._listeners)
        try:
            if external:
                self.make_external()
            if not self._listeners:
                self.told(*self.news())
            self._listeners.append(listener)
            ids = self.open_ids()
            if ids:
                self._tell([listener], ids, ())
            self.tell()
        except Exception:  # the listener's own: it is subscribed, and has been told
            raise
        except BaseException:  # an interrupt: it is not
            self.restore(saved)
            self._listeners[:] = listeners
            raise

    def returned(self, ids: Iterable[int]) -> None:
        """The external engine gives back these withdrawn blocks.

        Raises InvalidArgument (field: block) for an id that is not both withdrawn and held.
        """
        if not self.external:
            raise InvalidState("no external engine has subscribed; nothing changed; use free()", external=False)
        blocks = listed(ids)
        self._require(blocks, self.release(blocks, True), "is not a withdrawn block held by the engine")

    # -- changes of several steps -----------------------------------------------------------------------------------

    def tell_withdrawn(self) -> None:
        """In the midst of a change, listeners hear at once which of the open ids that they know are withdrawn, and nothing else.
        Of what an engine gets they hear when that is decided: it would use it, and if that is undone it is nobody's."""
        withdrawn = self.withdrawn_news()  # noted before it is told: if that ends early, the change is undone
        if withdrawn:
            self._tell(self._listeners, (), withdrawn)

    def not_telling(self) -> None:
        """Note that no listener is being told: called after an interrupt has ended a call."""
        self._telling = False

    @property
    def telling(self) -> bool:
        """Whether this is a listener's call."""
        return self._telling

    def tell(self) -> None:
        """Tell listeners, in order, of all that has changed since they have heard of it; of a listener's own change when the
        present one is told. Raises the first error of one."""
        if self._telling:
            return
        first: Exception | None = None
        while self.has_news:
            added, withdrawn = self.news()
            try:
                self._tell(self._listeners, added, withdrawn)
            except Exception as error:  # noqa: BLE001  a listener's: of foreign code any
                first = first or error
            self.told(added, withdrawn)  # only now: what an interrupt keeps from them comes again
        if first is not None:
            raise first

    def _tell(self, listeners: Iterable[Listener], added: Sequence[int], withdrawn: Sequence[int]) -> None:
        """Raises the first listener's error when all have been called."""
        errors: list[Exception] = []
        self._telling = True
        try:
            for listener in tuple(listeners):
                try:
                    listener(added, withdrawn)
                except Exception as error:  # noqa: BLE001  foreign code may raise anything; the first error is raised later
                    errors.append(error)
        finally:
            self._telling = False
        if errors:
            raise errors[0]

    def _require(self, blocks: Sequence[object], wrong: int, otherwise: str) -> None:
        """Raises InvalidArgument for the wrong one at this place, if it is one."""
        if wrong < 0:
            return
        block = blocks[wrong]
        if block in blocks[:wrong]:
            otherwise = "is named twice"
        elif not isinstance(block, int) or isinstance(block, bool) or not 0 <= block < self.geometry.spec.max_blocks:
            otherwise = "is not a block id of this pool"
        raise InvalidArgument(
            f"block {shown(block)} {otherwise}; nothing changed; pass ids that allocate() returned and that have not been freed, "
            "each once",
            field="block",
            block=block,
            max_blocks=self.geometry.spec.max_blocks,
        )

    def _refuse_external(self, call: str) -> None:
        if self.external:
            raise InvalidState(
                f"{call}: an external engine holds this pool's blocks; nothing changed; use the engine's allocator, "
                "and returned() for withdrawn blocks",
                external=True,
            )


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
