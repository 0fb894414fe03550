# SPDX-License-Identifier: Apache-2.0
"""Host memory for one tenant's master copies, and for KV blocks that are copied out.

Page-locked, a device copies to and from it at the full speed of its link. Master copies that find no room there lie in ordinary
memory, or are the mapped weights files, and the backend stages their copies: `locks` and `hold_all` choose, for a tenant's master
copies as a whole, since its passes are planned with one speed of the link. Use changes the choice later (tiers.py).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from remap.errors import Error, InvalidState, LimitExceeded, OutOfMemory
from remap.kv.host import HostBlocks
from remap.kv.spec import MOST_BLOCKS, KVGeometry
from remap.memory.device import host_room, machine_room, stage, use_host
from remap.memory.machine_memory import require_memory
from remap.memory.streams import gone
from remap.sizes import MOST_BYTES, show_size

if TYPE_CHECKING:
    import torch

    from remap import _core
    from remap.memory.device import Device

__all__ = ["HostMemories", "HostMemory", "locked_bytes", "require_kv"]

_logger = logging.getLogger("remap.host_kv")
_masters_logger = logging.getLogger("remap.masters")


def locked_bytes(address: int, nbytes: int) -> int:
    """Bytes of a budget that this memory takes: whole OS pages."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    return -(-(address + nbytes - first) // mmap.PAGESIZE) * mmap.PAGESIZE


class HostMemory:
    """Memory allocated by the backend, or the caller's own registered with it. `release` gives everything back."""

    def __init__(
        self,
        backend: _core.Backend,
        device: Device,
        beside: Callable[[], int] = lambda: 0,
        make_room: Callable[[], bool] = lambda: False,
        room: Callable[[], tuple[int, str]] = lambda: (MOST_BYTES, "machine"),
        name: str = "",
    ) -> None:
        """beside: bytes of the machine's memory that the session has by now. make_room(): gives back what no tenant uses; whether
        there was any. room(): bytes that may be page-locked now, and what bounds them. name: the tenant's, for log lines."""
        self._backend = backend
        self._device = device
        self._beside = beside
        self._make_room = make_room
        self._room = room
        self._name = name
        self._allocated: list[tuple[int, int]] = []
        self._registered: list[tuple[int, int]] = []
        # Of both: those that are not page-locked, or need not be. Concurrency: read by any thread, whole. It is replaced with the
        # session's lock held, and of a tenant that is being page-locked by that thread alone: tiers.py ends it before others do.
        self._staged: frozenset[tuple[int, int]] = frozenset()
        self._claimed: frozenset[tuple[int, int]] = frozenset()  # of those: that are about to be page-locked
        self.asks_kv = False  # whether `HostMemories.store_kv` may be asked for this tenant yet

    @property
    def allocated_bytes(self) -> int:
        """Bytes held that are no memory of the caller's."""
        return sum(nbytes for _, nbytes in self._allocated)

    @property
    def nbytes(self) -> int:
        """Bytes held that are to be page-locked where the device can do that, in whole OS pages."""
        staged = self._staged - self._claimed
        return sum(locked_bytes(*each) for each in (*self._allocated, *self._registered) if each not in staged)

    @property
    def staged(self) -> bool:
        """Whether master copies lie in memory that is not page-locked, though a device reads them."""
        return bool(self._staged) and not self._staged.isdisjoint((*self._allocated, *self._registered))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """`nbytes` of page-locked memory as a 1-D uint8 CPU tensor, valid until `release`.

        Raises OutOfMemory or LimitExceeded (the backend's, with its numbers); nothing is held more than before then.
        """
        return self._device.host_tensor(self.reserve(nbytes), nbytes, self)

    def reserve(self, nbytes: int) -> int:
        """The address of `nbytes` of page-locked memory, valid until `release`. Raises as `allocate` does, and OutOfMemory
        (fields requested, limit, limited_by) if the session would then have more than the machine: the kernel gives memory
        when it is touched, and would end the process instead.
        """
        size = max(nbytes, 1)
        try:
            return self._reserve(size)
        except (OutOfMemory, LimitExceeded):
            if not self._make_room():
                raise
        return self._reserve(size)

    def _reserve(self, size: int) -> int:
        if self._device.simulator is None:
            require_memory(self._beside() + size, what="host memory, with all that the session has of it,")
        self._allocated.append((self._backend.allocate_host(size), size))
        return self._allocated[-1][0]

    def hold(self, address: int, nbytes: int, *, writable: bool) -> int:
        """Page-lock these bytes of the caller's. Returns their address: `address` itself, or that of a copy.

        Only whole OS pages can be locked, and only on some machines does a driver lock read-only memory. So bytes that
        start inside an OS page, or are read-only, are copied; and those of which somebody else in the process has page-locked a
        part (another session, torch's pinned tensors): they would not be page-locked any more when that lets go of them. The
        caller keeps the bytes alive and unchanged.
        """
        if (address, nbytes) in self._registered:
            return address
        separate = all(address >= at + size or at >= address + nbytes for at, size in self._registered)
        if nbytes and writable and separate and address % mmap.PAGESIZE == 0:
            with suppress(InvalidState):
                try:
                    return self._register(address, nbytes)
                except (OutOfMemory, LimitExceeded):
                    if not self._make_room():
                        raise
                return self._register(address, nbytes)
        copy = self.reserve(nbytes)
        ctypes.memmove(copy, address, nbytes)
        return copy

    def hold_all(self, buffers: Sequence[tuple[int, int, bool]]) -> list[int]:
        """`hold` of each (address, bytes, whether it is writable), if all of them can be page-locked. Otherwise these buffers
        themselves, staged: then the caller never changes them. Nothing else may be held yet."""
        try:
            return [self.hold(address, nbytes, writable=writable) for address, nbytes, writable in buffers]
        except (OutOfMemory, LimitExceeded) as error:
            self.release()
            self._say_staged(sum(nbytes for _, nbytes, _ in buffers), str(error.fields.get("limited_by", error)))
        self.stage([(address, nbytes) for address, nbytes, _ in buffers])
        return [address for address, _, _ in buffers]

    def locks(self, parts: Collection[int]) -> bool:
        """Whether all master copies, of so many bytes, can be page-locked. KV that was given host memory by itself and does not
        use it makes room. A line of log if they cannot."""
        needed = sum(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for nbytes in parts)
        while needed > self._room()[0]:
            if not self._make_room():
                self._say_staged(needed, self._room()[1])
                return False
        return True

    def _say_staged(self, nbytes: int, why: str) -> None:
        _masters_logger.warning(
            "%s of master copies of %r are not page-locked, since %s leaves less: layers that are away load at the speed of "
            "ordinary memory, or of the disk, not of the link",
            show_size(nbytes),
            self._name,
            why,
        )

    def ordinary(self, nbytes: int) -> torch.Tensor:
        """`nbytes` of ordinary memory as a 1-D uint8 tensor, which goes with it. Raises OutOfMemory (fields requested, limit,
        limited_by) if the machine, or the control group, has less to spare; nothing has changed then."""
        from remap.model.master import anonymous

        room, why = machine_room()
        if nbytes > room:
            raise OutOfMemory(
                f"a layer's master copy takes {show_size(nbytes)} of host memory, and the {why} can spare {show_size(room)}; "
                "nothing changed; free memory, or give the safetensors files that hold these layers (weights=)",
                requested=nbytes,
                limit=room,
                limited_by=why,
            )
        return anonymous(nbytes)

    def stage(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Let copies read these (address, bytes) of ordinary memory, which may overlap; the caller keeps them. Those that share
        an OS page become one, as no page can be locked for two. Raises the backend's error; call `release` then."""
        joined: list[tuple[int, int]] = []
        for address, nbytes in sorted(each for each in ranges if each[1]):
            if joined and address // mmap.PAGESIZE <= (joined[-1][0] + joined[-1][1] - 1) // mmap.PAGESIZE:
                first, size = joined.pop()
                address, nbytes = first, max(size, address + nbytes - first)
            joined.append((address, nbytes))
        for each in joined:
            self._staged |= {each}  # of what was refused it says nothing: only what is held counts
            self._noted(self._registered, partial(stage, self._backend), *each)

    def holding(self, addresses: Iterable[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The (address, bytes) held that these addresses lie in, ascending: those that are staged, and the others."""
        held = sorted((*self._allocated, *self._registered))
        found = {bisect_right(held, (address, MOST_BYTES)) - 1 for address in addresses}
        ranges = [held[index] for index in sorted(found) if index >= 0]
        return [each for each in ranges if each in self._staged], [each for each in ranges if each not in self._staged]

    def claim(self, held: Iterable[tuple[int, int]]) -> None:
        """These are about to be page-locked, and no others: their part of the budget is taken from now on."""
        self._claimed = frozenset(held)

    def unlock(self, held: Iterable[tuple[int, int]]) -> None:
        """Let copies from these be staged from now on: whoever wants their part of the budget gets it. Pre: none is under way.
        Raises the backend's error: some may be staged then. Can be called again."""
        for each in held:
            use_host(self._backend, *each, staged=True)
            self._staged |= {each}

    def lock(self, held: Iterable[tuple[int, int]]) -> None:
        """Page-lock these, in place; copies from them may be under way. Takes long. Raises the backend's error: some may be
        page-locked then."""
        for each in held:
            use_host(self._backend, *each, staged=False)
            self._staged -= {each}

    def _register(self, address: int, nbytes: int) -> int:
        self._noted(self._registered, self._backend.register_host, address, nbytes)
        return address

    @staticmethod
    def _noted(held: list[tuple[int, int]], take: Callable[[int, int], None], address: int, nbytes: int) -> None:
        held.append((address, nbytes))  # first: `release` copes if it did not happen
        try:
            take(address, nbytes)
        except Error:
            held.remove((address, nbytes))
            raise

    def release(self) -> None:
        """Give everything back. Pre: no copy from it is in flight. Raises the first error, and keeps what failed."""
        first: Error | None = None
        for held, give_back in (
            (self._registered, self._backend.unregister_host),
            (self._allocated, self._backend.free_host),
        ):
            for each in tuple(held):
                try:
                    gone(give_back, *each)
                except Error as error:
                    first = first or error
                else:
                    held.remove(each)
                    self._staged -= {each}
        if first is not None:
            raise first


def require_kv(device: Device, capacity: int, kv_bytes: int | None) -> None:
    """Raise OutOfMemory (fields requested, limit, limited_by) for more host memory for KV than the machine or its control group
    could ever hold, beside an arena of `capacity` bytes where that is host memory, too."""
    if kv_bytes and device.simulator is None:
        beside = capacity if device.name.kind == "cpu" else 0
        require_memory(beside + kv_bytes, what="host memory for KV, with the arena,")


@dataclass(frozen=True)
class _Sharer:
    """A tenant's store in a piece. most: blocks that it has use for. lock: held while its books change."""

    name: str
    host: HostMemory
    store: HostBlocks
    most: int
    lock: AbstractContextManager[object]


@dataclass
class _Piece:
    """Memory in which the KV of tenants that share it lies, in equal parts, side by side."""

    memory: HostMemory
    address: int
    nbytes: int
    sharers: tuple[_Sharer, ...] = ()

    def part(self, more: int) -> int:
        """Bytes of a part, with `more` sharers more; 0 if one of the present ones cannot make room, or would keep no block."""
        if not all(each.store.untouched for each in self.sharers):
            return 0
        part = self.nbytes // (len(self.sharers) + more) // mmap.PAGESIZE * mmap.PAGESIZE
        return part if all(part >= each.store.geometry.spec.block_bytes for each in self.sharers) else 0

    def empty(self) -> bool:
        """Take it from all sharers. False, and nothing has changed, if one of them has used a block of it."""
        with ExitStack() as held:
            for sharer in self.sharers:
                held.enter_context(sharer.lock)  # as in `share`
            if not all(sharer.store.untouched for sharer in self.sharers):
                return False
            for sharer in self.sharers:
                sharer.store.place(0, 0)
        return True

    def share(self, newcomer: _Sharer) -> bool:
        """Make room for one more. False, and nothing changed for the newcomer, if a tenant has begun to use its part meanwhile.

        In order of address: parts become smaller and move down, so no two ever overlap, wherever this ends.
        """
        part = self.part(1)
        self.sharers = (*self.sharers, newcomer)  # before any block lies there: a piece without sharers is given back
        for index, sharer in enumerate(self.sharers):
            with sharer.lock:  # its engine may be about to copy out, on its own thread
                if not sharer.store.untouched:
                    self.sharers = self.sharers[:-1]
                    return False
                blocks = min(sharer.most, part // sharer.store.geometry.spec.block_bytes)
                sharer.store.place(self.address + index * part, blocks)
        return True


class HostMemories:
    """A session's host memory: its tenants', and memory that the backend has not taken back yet."""

    def __init__(
        self, backend: _core.Backend, device: Device, arena: _core.Arena, kv_bytes: int | None = None, budget: int = 0
    ) -> None:
        """arena: it lies in host memory as well on the CPU. kv_bytes: for KV of tenants whose `KVSpec.host_blocks` is None; None:
        sized by itself. budget: of page-locked memory; 0: the environment's, or as much as can be spared.
        """
        self._backend = backend
        self._device = device
        self._arena = arena
        self._capacity = arena.counts()["total"] * arena.page_bytes
        self._arena_bytes = self._capacity if device.name.kind == "cpu" else 0
        self._held: list[HostMemory] = []
        self._pieces: list[_Piece] = []
        self._lost: list[_Sharer] = []  # whose parts went to master copies
        self._kv_bytes = kv_bytes
        self._budget = budget

    def nbytes(self) -> int:
        """Bytes of the machine's memory that the session has, the arena on the CPU included."""
        return self._arena_bytes + sum(host.allocated_bytes for host in self._held)

    def store_kv(
        self, host: HostMemory, name: str, geometry: KVGeometry, lock: AbstractContextManager[object]
    ) -> HostBlocks:
        """Memory for the KV blocks of tenant `name`, whose `host` has none yet: an equal part of what there is for those that
        have none, and never more than the arena could hold of its blocks. Those that asked before give up what makes the parts
        equal, as long as none of their blocks was ever in use: engines are made one after another. Sized by itself, all together
        take at most half of the spare memory, and give that back for master copies that have no room (`_make_room`). None to
        spare: no blocks, and a line of log. Raises what `reserve` raises if a number was named. lock: held while the store's
        books change. With the session's lock held."""
        asking = sum(each.asks_kv for each in self._held)
        store, each_bytes = HostBlocks(geometry, 0), geometry.spec.block_bytes
        most = min(geometry.spec.max_blocks, self._capacity // each_bytes, MOST_BLOCKS)
        self._give_part(_Sharer(name, host, store, most, lock), asking)
        # An interrupt above leaves this memory unused until the tenant goes.
        host.asks_kv = False
        return store

    def _kv_room(self) -> tuple[int, str]:
        """Bytes that KV may still take, and what bounds them."""
        taken = sum(piece.nbytes for piece in self._pieces)
        if self._kv_bytes is not None:
            return self._kv_bytes - taken, "host_kv"
        spare, why = self.spare()
        return (spare + taken) // 2 - taken, why

    def _make_room(self) -> bool:
        """Give back what KV was given by itself and has not used: master copies go first. A tenant that loses it has a part of
        the rest when the tenant is attached. Whether there was any."""
        if self._kv_bytes is not None:  # the caller's own word
            return False
        found = [piece for piece in self._pieces if piece.empty()]
        for piece in found:
            self._lost += piece.sharers
            self._pieces.remove(piece)
            self._give_back(piece.memory)
        return bool(found)

    def _share_again(self) -> None:
        """Each tenant that has lost host memory for KV gets an equal part of the memory that can be spared now."""
        lost, self._lost = [each for each in self._lost if each.host in self._held], []
        for sharer in lost:  # the first one has all of it, until the others have their parts
            self._give_part(sharer, 1)

    def _give_part(self, sharer: _Sharer, asking: int) -> None:
        """Memory of its own, of what is left an `asking`-th part at most, or a part of what others have and do not use yet:
        whichever is more. A line of log says how much."""
        store, each_bytes = sharer.store, sharer.store.geometry.spec.block_bytes
        room, why = self._kv_room()
        blocks = max(0, min(sharer.most, room // max(1, asking) // each_bytes))
        widest = max(self._pieces, key=lambda piece: piece.part(1), default=None)
        shares = widest is not None and min(sharer.most, widest.part(1) // each_bytes) > blocks and widest.share(sharer)
        try:
            if blocks and not shares:
                self._take_piece(sharer, blocks)
        except (OutOfMemory, LimitExceeded) as error:
            if self._kv_bytes is not None:
                raise
            why = str(error)
        if store.total or self._kv_bytes == 0:
            for each in widest.sharers if shares and widest is not None else (sharer,):  # of others it is less now
                _logger.info("KV of %r: %d host blocks, %s", each.name, each.store.total, show_size(each.store.nbytes))
        else:
            _logger.warning(
                "KV of %r gets no host memory: %s to give, a block takes %s (%s); preempted requests are recomputed",
                sharer.name,
                show_size(max(0, room)),
                show_size(each_bytes),
                why,
            )

    def _take_piece(self, sharer: _Sharer, blocks: int) -> None:
        """Memory for `blocks` blocks, which it alone has for now."""
        nbytes = blocks * sharer.store.geometry.spec.block_bytes
        memory = HostMemory(self._backend, self._device, self.nbytes)
        self._held.append(memory)
        try:
            piece = _Piece(memory, memory.reserve(nbytes), nbytes, (sharer,))
        except BaseException:  # on any exception, an interrupt included: undo, then re-raise
            self._give_back(memory)
            raise
        self._pieces.append(piece)  # before any block lies there: a piece without sharers is given back
        with sharer.lock:
            sharer.store.place(piece.address, blocks)

    def spare(self) -> tuple[int, str]:
        """Bytes of host memory that may be taken now, and what bounds them."""
        if self._device.simulator is not None:
            return MOST_BYTES, "machine"
        room, why = host_room(self._budget)
        if why in ("host_budget", "REMAP_HOST_BUDGET"):
            return room - sum(each.nbytes for each in self._held), why
        if self._arena_bytes:
            # Of the arena only the weights have surely been touched; the kernel has yet to find the rest.
            counts = self._arena.counts()
            room -= (counts["total"] - counts["params"]) * self._arena.page_bytes
        return room, why

    def take(self, name: str, hosts: list[HostMemory]) -> HostMemory:
        """Memory for a tenant to be, `name`: into `hosts`, for `settle`."""
        host = HostMemory(self._backend, self._device, self.nbytes, self._make_room, self.spare, name)
        hosts.append(host)
        self._held.append(host)
        return host

    def settle(self, hosts: Sequence[HostMemory], kept: Callable[[HostMemory], bool]) -> None:
        """Give back those of `take` that no tenant has `kept`: an interrupt can come when the tenant is attached already."""
        try:
            for host in hosts:
                if not kept(host):
                    self.give_back(host)
        finally:
            self._share_again()

    def give_back(self, host: HostMemory | None) -> None:
        """Give back the memory of a tenant that is gone. If the backend does not take it now, `close` tries again. Can
        be called again."""
        if host is None:
            return
        for piece in tuple(self._pieces):
            piece.sharers = tuple(each for each in piece.sharers if each.host is not host)
            if not piece.sharers:
                self._pieces.remove(piece)
                self._give_back(piece.memory)
        self._give_back(host)

    def _give_back(self, memory: HostMemory) -> None:
        try:
            memory.release()
        except Error:
            return
        if memory in self._held:
            self._held.remove(memory)

    def close(self) -> None:
        """Give everything back. Raises the backend's error; it can be called again."""
        for host in tuple(self._held):
            host.release()
            self._held.remove(host)
