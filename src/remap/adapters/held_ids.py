# SPDX-License-Identifier: Apache-2.0
"""Block ids that a tenant's pool and an engine's own allocator exchange: new ones, and ones on their way back.

    held = HeldIds(reserved=[0])
    tenant.kv.subscribe(listener, external=True)      # listener: free list += held.changed(added, withdrawn), then:
    gone = held.leave(free_list)                      # take these out of the free list; tenant.kv.returned(gone)

A block that is drained while a request uses it stays with the engine until it is free; `leave` finds it then. A block
whose drain is cancelled before it has left stays where it is. This module holds ids only: no memory, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

__all__ = ["HeldIds"]


class HeldIds:
    """The ids of one tenant.

    reserved: ids that the engine uses without allocating them (padding). limit: the engine's own tables have no room
    for ids from here on. Ids of neither kind are handed over; if such an id is drained, `declined` returns it.
    """

    def __init__(self, reserved: Collection[int] = (), limit: int | None = None) -> None:
        self._reserved = frozenset(reserved)
        self._limit = limit
        self._leaving: set[int] = set()
        self._declined: list[int] = []
        self.held = 0
        """Ids that the engine's allocator counts as its own: free, in use, or leaving but still in use."""

    @property
    def leaving(self) -> frozenset[int]:
        """Drained ids that the engine still has."""
        return frozenset(self._leaving)

    def changed(self, added: Sequence[int], withdrawn: Sequence[int]) -> list[int]:
        """Take in a change of the pool. Returns the ids to append to the engine's free list, in the given order."""
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
        """The ids among `free` that leave now, ascending; they do not count as held any more.

        The engine takes them out of its free list.
        """
        gone = sorted(self._leaving.intersection(free)) if self._leaving else []
        self._leaving.difference_update(gone)
        self.held -= len(gone)
        return gone

    def declined(self) -> list[int]:
        """Drained ids that the engine never had: return them to the pool. Each id is in one answer only."""
        ids, self._declined = self._declined, []
        return ids

    def restart(self, open_ids: Iterable[int], give_back: Callable[[list[int]], None]) -> list[int]:
        """Start again after the engine has dropped all blocks: give the leaving ids to `give_back`.

        Returns the new free list, ascending.
        """
        gone = sorted(self._leaving)
        self._leaving.clear()
        if gone:
            give_back(gone)
        free = [block for block in open_ids if self._ours(block)]
        self.held = len(free)
        return free

    def _ours(self, block: int) -> bool:
        return block not in self._reserved and (self._limit is None or block < self._limit)
