"""Block ids between a tenant's pool and an engine's own allocator: which to hand over, which are on their way back. Pure.

    held = HeldIds(reserved=[0])
    tenant.kv.subscribe(listener, external=True)      # listener: free list += held.changed(added, withdrawn), then:
    gone = held.leave(free_list)                      # take these out of the free list, and tell tenant.kv.returned(gone)

What is withdrawn while a request uses it stays with the engine until it is free; `leave` finds it then. An id that was
withdrawn and comes back before it left was never away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

__all__ = ["HeldIds"]


class HeldIds:
    """reserved: ids that the engine uses without allocating them (padding). limit: ids from here on have no room in the engine's
    own tables. Neither is ever handed over; `declined` has those of them that were withdrawn, to be returned at once."""

    def __init__(self, reserved: Collection[int] = (), limit: int | None = None) -> None:
        self._reserved = frozenset(reserved)
        self._limit = limit
        self._leaving: set[int] = set()
        self._declined: list[int] = []
        self.held = 0
        """Ids that the engine's allocator counts as its own: free, in use, or leaving but still in use."""

    @property
    def leaving(self) -> frozenset[int]:
        """Withdrawn ids that the engine still has."""
        return frozenset(self._leaving)

    def changed(self, added: Sequence[int], withdrawn: Sequence[int]) -> list[int]:
        """The pool says so. Returns the ids to append to the engine's free list, in the order given."""
        new = []
        for block in added:
            if block in self._leaving:
                self._leaving.discard(block)
            elif self._ours(block):
                new.append(block)
        for block in withdrawn:
            if self._ours(block):
                self._leaving.add(block)
            elif block not in self._reserved:
                self._declined.append(block)
        self.held += len(new)
        return new

    def leave(self, free: Iterable[int]) -> list[int]:
        """Of these free ids those that leave now, ascending: the engine takes them out of its free list. They are counted out."""
        gone = sorted(self._leaving.intersection(free)) if self._leaving else []
        self._leaving.difference_update(gone)
        self.held -= len(gone)
        return gone

    def declined(self) -> list[int]:
        """Withdrawn ids that never were the engine's, once: to be returned to the pool."""
        ids, self._declined = self._declined, []
        return ids

    def restart(self, open_ids: Iterable[int], give_back: Callable[[list[int]], None]) -> list[int]:
        """The engine has dropped all that it held: what was leaving goes to `give_back`. Returns the new free list, ascending."""
        gone = sorted(self._leaving)
        self._leaving.clear()
        if gone:
            give_back(gone)
        free = [block for block in open_ids if self._ours(block)]
        self.held = len(free)
        return free

    def _ours(self, block: int) -> bool:
        return block not in self._reserved and (self._limit is None or block < self._limit)
