# SPDX-License-Identifier: Apache-2.0
"""The KV cache of one tenant, whole: `tenant.kv` (public.py) is the part of it that an engine calls.

`kv.BlockPool` keeps the books. This class adds the memory behind them: the tensors, and the copies that move live
blocks out of pages that are about to be given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from remap.config import invalid, is_count
from remap.errors import InvalidArgument, InvalidState
from remap.kv.host import HostBlocks, runs_of
from remap.kv.pool import BlockPool, Listener, listed
from remap.kv.spec import KVGeometry, KVSpec
from remap.kv.streamed import StreamedBlocks
from remap.locking import Turn
from remap.notebook import table
from remap.sizes import show_size

if TYPE_CHECKING:
    import torch

__all__ = ["TenantKV"]


def _gone(address: int, nbytes: int) -> Any:
    raise InvalidState("the tenant is detached, or the session closed: its KV cache has no memory; nothing changed")


def _ticket(ticket: object) -> int:
    if not isinstance(ticket, int) or isinstance(ticket, bool):
        raise invalid("ticket", ticket, "what `copy_in` returned")
    return ticket


def _require_call(name: str, call: object) -> None:
    if not callable(call):
        raise invalid(name, call, "a function")


class BlockCopies(Protocol):
    """The mover of the bytes of blocks: remap.memory.kv_copies."""

    def copy(self, ranges: Sequence[tuple[int, int, int]], moves: Iterable[tuple[int, int]]) -> None: ...
    def copy_out(
        self, ranges: Sequence[tuple[int, int, int]], host_blocks: Sequence[int], blocks: Iterable[int]
    ) -> None: ...
    def copy_in(
        self, ranges: Sequence[tuple[int, int, int]], host_blocks: Sequence[int], blocks: Iterable[int]
    ) -> int: ...
    def kept(self, host_blocks: Iterable[int]) -> bool: ...
    def filled(self, host_blocks: Iterable[int]) -> int: ...
    @property
    def outgoing(self) -> bool: ...
    def arrived(self, ticket: int) -> bool: ...
    def join(self, ticket: int | None = None) -> None: ...
    def release(self, blocks: Iterable[int]) -> None: ...
    def forget(self, blocks: Iterable[int]) -> None: ...
    def close(self) -> None: ...


class TenantKV:
    """The block pool, over the KV region at `address`.

    allocate(n) -> ids, lowest first (OutOfBlocks; ids need not be contiguous); free(ids); subscribe(cb) for an engine
    with its own allocator, which then returns withdrawn ids with returned(ids). See `kv.BlockPool` for all of them.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        address: int,
        copies: BlockCopies,
        memory: Any,
        turn: Turn,
        host: HostBlocks,
        host_store: Callable[[], HostBlocks] | None = None,
    ) -> None:
        """copies: of bytes of the region and of the host store. host_store: takes the store that comes in place of `host`, when
        a caller first asks for it; None: `host` stays.

        memory(address, nbytes) makes byte tensors. turn: the tenant's; the engine's calls wait for changes in progress.
        """
        self.pool = BlockPool(geometry)
        self.geometry = geometry
        self.spec: KVSpec = geometry.spec
        self.block_tokens = geometry.spec.block_tokens
        self.max_blocks = geometry.spec.max_blocks
        self.address = address
        self._copies = copies
        self._memory = memory
        self._tensors: list[torch.Tensor] | None = None
        self._turn = turn
        self.host = host
        self._host_store = host_store
        self.streamed = StreamedBlocks(geometry)
        self.copied_out_bytes = self.copied_in_bytes = 0
        # A change has moved blocks, (old, new), whose bytes are still to be copied, those of one entry at once; or it has brought
        # pages that are to be zeroed before.
        self.due_moves: tuple[Sequence[tuple[int, int]], ...] = ()
        self.unfinished = False
        self._streamable: Callable[[], int] | None = None
        self._offer: int | None = None  # None: the engine never frees live blocks for others

    # An engine calls these from its own thread, while another thread's change may be under way.

    def allocate(self, count: int) -> list[int]:
        """`BlockPool.allocate`. Raises ForkedProcess in a forked child."""
        got: list[int] = []
        try:
            self._turn.run(self._allocate, got, count)
            return got
        except BaseException:
            if got:  # an interrupt, and the caller has not got these
                self._turn.run(self.pool.free, got)
            raise

    def free(self, ids: Iterable[int]) -> None:
        """`KVCache.free`."""
        self._turn.run(self._free, listed(ids))

    def returned(self, ids: Iterable[int]) -> None:
        """`BlockPool.returned`. Raises ForkedProcess in a forked child."""
        self._turn.run(self._give, self.pool.returned, listed(ids))

    def copy_out(self, ids: Iterable[int], below: int | None = None) -> list[int]:
        """`HostKV.copy_out`."""
        self.open_host()
        got: list[list[int]] = []
        try:
            self._turn.run(self._copy_out, got, listed(ids), below)
            return got[0]
        except BaseException:
            if got:  # an interrupt, and the caller has not got these
                self._turn.run(self._free_host, got[0])
            raise

    def copy_in(self, host_ids: Iterable[int], ids: Iterable[int]) -> int:
        """`HostKV.copy_in`."""
        ticket: int = self._turn.run(self._copy_in, listed(host_ids), listed(ids))
        return ticket

    def kept(self, host_ids: Iterable[int]) -> bool:
        """`HostKV.kept`, of host blocks in use."""
        return self._copies.kept(listed(host_ids))

    def kept_of(self, host_ids: Iterable[int]) -> bool:
        """`HostKV.kept`."""
        return self.kept(self._turn.run(self.host.checked, listed(host_ids)))

    def arrived(self, ticket: int) -> bool:
        """`HostKV.arrived`."""
        there: bool = self._turn.run(self._copies.arrived, _ticket(ticket))
        return there

    def join(self, ticket: int | None = None) -> None:
        """`HostKV.join`."""
        self._turn.run(self._copies.join, None if ticket is None else _ticket(ticket))

    def free_host(self, host_ids: Iterable[int]) -> None:
        """`HostKV.free`."""
        self._turn.run(self._free_host, listed(host_ids))

    def holds(self, ids: Iterable[int]) -> bool:
        """Whether all of these are in use: blocks that `allocate` or `stream` returned and that were not freed. An engine asks it
        behind an interrupt."""
        pool, streamed = self.streamed.split(listed(ids))
        return self.pool.holds(pool) and self.streamed.holds(streamed)

    def holds_host(self, host_ids: Iterable[int]) -> bool:
        """Whether all of these host blocks are in use."""
        return self.host.holds(listed(host_ids))

    def stream(self, host_ids: Iterable[int]) -> list[int]:
        """`HostKV.stream`."""
        got: list[list[int]] = []
        try:
            self._turn.run(self._stream, got, listed(host_ids))
            return got[0]
        except BaseException:
            if got:  # an interrupt, and the caller has not got these
                self._turn.run(self.streamed.release, got[0])
            raise

    @property
    def streamable_blocks(self) -> int:
        """`HostKV.streamable_blocks`."""
        return self._streamable() if self._streamable is not None else 0

    @property
    def free_streamable_blocks(self) -> int:
        """Free host blocks below `streamable_blocks`."""
        return self.host.free_below(self.streamable_blocks)

    def on_stream(self, streamable: Callable[[], int]) -> None:
        """streamable(): what `streamable_blocks` is."""
        _require_call("streamable", streamable)
        self._streamable = streamable

    def open_host(self) -> int:
        """`HostKV.open`."""
        if self._host_store is not None:
            self._turn.exclusively(self._take_host)
        total: int = self._turn.run(getattr, self.host, "total")
        return total

    def offer(self, blocks: int) -> None:
        """`HostKV.offer`."""
        if not is_count(blocks):
            raise invalid("blocks", blocks, "an int of at least 0")
        if self._offer is None:
            self.open_host()
        self._turn.run(setattr, self, "_offer", blocks)

    @property
    def reclaims(self) -> bool:
        """Whether the engine can free live blocks by copying them out."""
        return self._offer is not None and self.host.total > 0

    @property
    def reclaimable_blocks(self) -> int:
        """Live blocks that the engine has offered, and was not asked for since."""
        return min(self._offer, self.pool.live_blocks) if self._offer and self.reclaims else 0

    @property
    def outgoing(self) -> bool:
        """Whether blocks are being copied out: their pages are free for this process's streams, and for no other process yet."""
        return self._copies.outgoing

    def use_offer(self) -> None:
        """A report asks for blocks of it. One that the engine ignores is not repeated: it might never answer."""
        if self._offer is not None:
            self._offer = 0

    def subscribe(self, listener: Listener, *, external: bool = False) -> None:
        """`KVCache.subscribe`."""
        self._turn.exclusively(self.pool.subscribe, listener, external=external)

    @property
    def usable_blocks(self) -> int:
        """Blocks of which all pages belong to this KV cache now."""
        return self.pool.usable_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that allocate() could return now."""
        return self.pool.free_blocks

    @property
    def live_blocks(self) -> int:
        """Blocks allocated and not freed."""
        return self.pool.live_blocks

    @property
    def tensors(self) -> list[torch.Tensor]:
        """`KVCache.tensors`, of geometry.tensor_blocks blocks."""
        if self._tensors is None:
            import torch

            memory = self._memory(self.address, self.geometry.region_bytes)
            typed = memory.view(getattr(torch, self.spec.dtype))
            tensors = []
            for layer in range(self.spec.layers):
                offset, shape, stride = self.geometry.tensor_layout(layer)
                tensors.append(typed.as_strided(shape, stride, offset // self.spec.itemsize))
            self._tensors = tensors
        return self._tensors

    @property
    def scratch(self) -> range:
        """The ids of the scratch blocks. Layer i's part of them is the engine's from `wait(i)` to `done(i)`, in passes and out of
        no copy: its contents before are not known. The pool knows nothing of them."""
        first = self.geometry.first_streamed + self.spec.streamed_blocks
        return range(first, first + self.spec.scratch_blocks)

    @property
    def memory(self) -> torch.Tensor:
        """`KVCache.memory`."""
        return self._memory(self.address, self.geometry.region_bytes)

    def _repr_html_(self) -> str:
        """The HTML for a notebook. Takes no lock."""
        spec, pool = self.spec, self.pool
        rows = (
            ("blocks", f"{pool.usable_blocks} usable, {pool.free_blocks} of them free; {spec.max_blocks} at most"),
            ("a block", f"{spec.block_tokens} tokens, {show_size(spec.block_bytes)}"),
            ("layers", f"{spec.layers} with {spec.kv_heads} heads of {spec.head_dim}, {spec.dtype}, {spec.layout}"),
            ("memory", "gone: its tenant was detached" if self._memory is _gone else f"at {self.address:#x}"),
        )
        return table("KV cache", lambda: rows)

    def abandon(self) -> None:
        """The tenant goes away: no copy is in flight any more. Raises the backend's error; it can be called again."""
        self._copies.close()

    def retire(self) -> None:
        """The region goes away. Tensors kept by callers read zeros from now on; no new ones are made. Keeping this
        object keeps alive nothing of the tenant or its engine."""
        self._tensors = None
        self._memory = _gone
        self._host_store = None
        self._streamable = self._offer = None

    def _allocate(self, got: list[int], count: int) -> None:
        self.pool.allocate(count, got)
        self._copies.forget(got)

    def _take_host(self) -> None:
        if self._host_store is not None:
            self.host, self._host_store = self._host_store(), None

    def _copy_out(self, got: list[list[int]], ids: Sequence[int], below: int | None) -> None:
        """Puts what it takes into `got`: then it has happened."""
        self._require_memory()
        self.pool.require_live(ids)
        before = self.host.books
        try:
            hosts = self.host.allocate(len(ids), below)
            ranges = self.host.ranges(list(zip(ids, hosts)))
            self._copies.copy_out(
                [(self.host.address + store, self.address + region, size) for region, store, size in ranges],
                hosts,
                ids,
            )
            self.copied_out_bytes += len(ids) * self.spec.block_bytes
            got.append(hosts)
        except BaseException:  # an interrupt as well: host blocks that the caller does not get must not stay in use
            if not got:  # else the caller gives them back
                self.host.books = before
            raise

    def _free(self, ids: list[int]) -> None:
        if not self.streamed.used:
            self._copies.release(ids)
            self._give(self.pool.free, ids)
            return
        pool, streamed = self.streamed.split(ids)
        self.streamed.hosts(streamed)
        if pool or not streamed:
            self._copies.release(pool)  # else a copy may still read or write them
        before, live = self.streamed.books, self.pool.live_blocks
        try:
            self.streamed.release(streamed)
            if pool or not streamed:
                self._give(self.pool.free, pool)
        except BaseException:
            if self.pool.live_blocks == live:  # else both have happened
                self.streamed.books = before
            raise

    def _give(self, give: Callable[[list[int]], None], ids: list[int]) -> None:
        """The pool gets these blocks back; if it refuses them, `join` still tells what they lack."""
        give(ids)
        self._copies.forget(ids)

    def _free_host(self, host_ids: Sequence[int]) -> None:
        shown = self.streamed.shows(host_ids)
        if shown:
            raise InvalidState(
                f"streamed blocks show the host blocks {shown}; nothing changed; free those blocks first",
                host_blocks=shown,
            )
        self.host.free(host_ids)

    def _stream(self, got: list[list[int]], host_ids: Sequence[int]) -> None:
        """Puts what it takes into `got`: then it has happened."""
        self._require_memory()
        hosts = self.host.checked(host_ids)
        self._require_kept(hosts)
        before = self.streamed.books
        try:
            got.append(self.streamed.show(hosts))
        except BaseException:  # an interrupt as well: blocks that the caller does not get must not stay in use
            if not got:
                self.streamed.books = before
            raise

    def reading(self, streamed: Sequence[int]) -> tuple[tuple[int, int, int], int]:
        """A pass is to read these streamed blocks: their run (first block, first host block, how many), and an event
        behind the copies that fill the host blocks (0: they are there). Raises InvalidArgument for a block that shows
        nothing, and InvalidState (field host_blocks) for one whose host block is not `kept`."""
        hosts = self.streamed.hosts(streamed)
        self._require_kept(hosts)
        return self.streamed.run(hosts), self._copies.filled(hosts)

    def _require_kept(self, hosts: Sequence[int]) -> None:
        if not self._copies.kept(hosts):
            raise InvalidState(
                f"a copy out to some of the host blocks {hosts} has failed, so they do not hold their KV; nothing was copied; "
                "free them and recompute what they held",
                host_blocks=tuple(hosts),
            )

    def _copy_in(self, host_ids: Sequence[int], ids: Sequence[int]) -> int:
        self._require_memory()
        hosts = self.host.checked(host_ids)
        self.pool.require_live(ids)
        if len(hosts) != len(ids):
            raise InvalidArgument(
                f"{len(hosts)} host blocks cannot be copied into {len(ids)} blocks; nothing was copied; name one block for each",
                host_blocks=len(hosts),
                blocks=len(ids),
            )
        self._require_kept(hosts)
        ranges = self.host.ranges(list(zip(ids, hosts)))
        ticket = self._copies.copy_in(
            [(self.address + region, self.host.address + store, size) for region, store, size in ranges], hosts, ids
        )
        self.copied_in_bytes += len(ids) * self.spec.block_bytes
        return ticket

    def _require_memory(self) -> None:
        if self._memory is _gone:
            _gone(0, 0)
        if self.unfinished:
            raise InvalidState(
                "the device refused a part of the last change of the session, so blocks do not hold their KV yet; nothing was "
                "copied; the tenant's next pass tries it again, or `remap.advanced.settle`"
            )

    def finish_moves(self) -> None:
        """`move` what a change has moved, as far as that is due. Raises the backend's error: the rest is still due, and no block
        is read before."""
        while self.due_moves:
            self.move(self.due_moves[0])
            self.due_moves = self.due_moves[1:]

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the bytes of blocks: (from, to) each. Changes no bookkeeping.

        Returns when the bytes have arrived or, if the tenant computes on a stream, when the copies are enqueued there.
        """
        unit, geometry = self.geometry.unit_bytes, self.geometry
        starts = [self.address + r * geometry.range_bytes for r in range(geometry.ranges)]
        runs = runs_of(pairs)
        if runs:
            ranges = [(at + new * unit, at + old * unit, count * unit) for at in starts for old, new, count in runs]
            self._copies.copy(ranges, pairs)
