# SPDX-License-Identifier: Apache-2.0
"""`tenant.kv`: the KV cache of one tenant, as an engine sees it. Blocks come and go; tensors never move.

`cache.TenantKV` is the whole of it, for the library itself. Each object here names the calls of engines, and their promises.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from remap.kv.cache import TenantKV
from remap.kv.host import HostBlocks
from remap.kv.pool import Listener
from remap.kv.spec import KVSpec
from remap.moved import goes, moved

if TYPE_CHECKING:
    import torch

__all__ = ["HostKV", "KVCache"]


class HostKV:
    """`tenant.kv.host`: KV in host memory, of preempted, paused and streamed requests. Host blocks have numbers of their own."""

    def __init__(self, kv: TenantKV) -> None:
        self._kv = kv

    def open(self) -> int:
        """Take the host memory that `Session(host_kv=)` gives to this tenant's KV, if its `KVSpec.host_blocks` leaves that open.
        Returns how many host blocks the tenant has. The first `offer` and the first `copy_out` do it as well.

        Between passes: on a GPU it page-locks memory, some tenths of a second for each GiB. Done once: later calls change
        nothing. Where "auto" finds no memory to spare there are 0, and a line of log says why. Raises OutOfMemory or
        LimitExceeded if a number that `host_kv` names cannot be had; nothing changed then.
        """
        return self._kv.open_host()

    @property
    def total(self) -> int:
        """Host blocks that the tenant has."""
        return self._kv.host.total

    @property
    def free_blocks(self) -> int:
        """Host blocks that `copy_out` could take now."""
        return self._kv.host.free_blocks

    def copy_out(self, ids: Iterable[int], below: int | None = None) -> list[int]:
        """Copy live blocks to host memory. Returns the host blocks, one for each id in this order; `below`: all below that,
        so that they can stream.

        The blocks stay live. They can be freed at once, and then others get their pages, behind the copies. The copies come
        behind all work of the tenant so far, and run beside its next work. The engine promises that this work does not write
        into these blocks (they are complete, or the tenant is paused). Raises OutOfBlocks if host memory has fewer
        blocks, InvalidArgument for a block that is not live; nothing was copied then. `join`,
        `KVCache.free` and a copy in raise for a copy that fails later, and `kept` tells of it.
        """
        return self._kv.copy_out(ids, below)

    def copy_in(self, host_ids: Iterable[int], ids: Iterable[int]) -> int:
        """Start copying host blocks back into live blocks, one each, beside computation. Returns a ticket.

        No pass may read or write these blocks before `arrived(ticket)`, or `join`. The host blocks stay valid, until `free`,
        which has to wait as well. Raises InvalidArgument for a host block that is not in use, a block that is not live, or
        unequal numbers, and InvalidState (field host_blocks) for host blocks that are not `kept`; nothing was copied then.
        """
        return self._kv.copy_in(host_ids, ids)

    def arrived(self, ticket: int) -> bool:
        """Whether the copies of this ticket have been made. Does not wait. Raises the backend's error if they have failed, each
        time: none of those in flight has arrived then, and their host blocks are as they were. Raises InvalidArgument for a
        ticket that `copy_in` has not returned."""
        return self._kv.arrived(ticket)

    def join(self, ticket: int | None = None) -> None:
        """The next pass comes behind this copy in and those that began before it, or behind all. Raises as `arrived` does;
        without a ticket while blocks of any copy in that has failed are neither freed nor copied in again."""
        self._kv.join(ticket)

    def kept(self, host_ids: Iterable[int]) -> bool:
        """Whether these host blocks hold the KV copied out to them: False if a copy to one of them has failed. Then
        recompute its KV. Raises InvalidArgument for one that is not in use."""
        return self._kv.kept_of(host_ids)

    def free(self, host_ids: Iterable[int]) -> None:
        """Give host blocks back. Raises InvalidArgument for one that is not in use, and InvalidState (field host_blocks) for
        one that a streamed block shows; nothing changed then."""
        self._kv.free_host(host_ids)

    def stream(self, host_ids: Iterable[int]) -> list[int]:
        """The block that shows each of these host blocks, for passes to read: a pass that names it
        (`tenant.forward(streamed=)`) copies each layer's part in just before `wait` of that layer. Copies nothing now.

        The engine may not write these blocks, nor read them in a pass that does not name them. `KVCache.free` gives them back;
        the host blocks stay in use. Only the first `KVSpec.streamed_blocks` host blocks can stream (`copy_out(below=)`). Raises
        InvalidArgument for a host block that cannot, that does already, or that is not in use, and InvalidState (field
        host_blocks) for host blocks that are not `kept`; nothing changed then.
        """
        return self._kv.stream(host_ids)

    @property
    def streamable_blocks(self) -> int:
        """Host blocks below this number may stream in the next passes, all of them, and these will not wait for longer than the
        tenant's settings allow, as certified from measured times; 0 before the first decode pass."""
        return self._kv.streamable_blocks

    def offer(self, blocks: int) -> None:
        """Say that the engine could free that many live blocks now, by copying them out: others may need their pages while the
        tenant is inactive.

        `StepReport.wanted` and `ActivationReport.wanted` say how many they want: copy as many out, or fewer, free them, offer
        what is left, and make the same call again, which finds their pages. A report that wants some uses the offer up: an
        engine that ignores it is not asked again before its next offer. Raises InvalidArgument, or as `open` does; the offer
        stays as it was then.
        """
        self._kv.offer(blocks)

    def __getattr__(self, name: str) -> Any:
        if name == "on_reclaim":
            warnings.warn(goes("HostKV.on_reclaim", "offer, and wanted of reports"), DeprecationWarning, stacklevel=2)
            return self._unheard
        return moved(self, name, "_books", "advanced.internals(tenant).kv.host")

    def _unheard(self, reclaim: object, reclaimable: object) -> None:
        """What `on_reclaim` is now: nothing calls an engine, so this one's live blocks stay where they are."""
        self.open()

    @property
    def _books(self) -> HostBlocks:
        return self._kv.host


_HOST = {
    "open_host": "open",
    "free_host": "free",
    **{
        name: name
        for name in ("copy_out", "copy_in", "arrived", "join", "kept", "stream", "streamable_blocks", "on_reclaim")
    },
}
"""Methods that stood on `KVCache`, and their names on `HostKV`."""


class KVCache:
    """The block pool, over memory. Ids of blocks need not be contiguous."""

    def __init__(self, kv: TenantKV) -> None:
        self._kv = kv
        self.host = HostKV(kv)
        self.spec: KVSpec = kv.spec
        self.max_blocks = kv.max_blocks

    def __repr__(self) -> str:
        pool = self._kv.pool
        return f"<remap KV cache: {pool.usable_blocks} of {self.max_blocks} blocks usable, {pool.free_blocks} free>"

    def _repr_html_(self) -> str:
        return self._kv._repr_html_()

    # An engine calls these from its own thread, while another thread's change may be under way.

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, the lowest free ones, ascending. Raises OutOfBlocks (fields requested, free, usable) if there are
        fewer, ForkedProcess in a forked child; nothing changed then."""
        return self._kv.allocate(count)

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back, those that `host.stream` returned too. Raises InvalidArgument for one that is not live, ForkedProcess
        in a forked child; nothing changed then."""
        self._kv.free(ids)

    def subscribe(self, listener: Listener, *, external: bool = False) -> None:
        """Call listener(added_ids, withdrawn_ids) from now on. external: the engine's own allocator holds all blocks, and returns
        withdrawn ids with `returned`.

        The thread whose call has changed something calls it, after the change. It may call `returned`, `free` and
        `allocate`. With the pages of a broker a thread of the session's own calls it too: of an external allocator only while
        the tenant is inactive.
        """
        self._kv.subscribe(listener, external=external)

    def returned(self, ids: Iterable[int]) -> None:
        """The engine's own allocator does not use these withdrawn ids any more: their pages may go. Raises InvalidArgument for
        an id that is not withdrawn, ForkedProcess in a forked child; nothing changed then."""
        self._kv.returned(ids)

    @property
    def usable_blocks(self) -> int:
        """Blocks of which all pages belong to this KV cache now."""
        return self._kv.usable_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that allocate() could return now."""
        return self._kv.free_blocks

    @property
    def live_blocks(self) -> int:
        """Blocks allocated and not freed."""
        return self._kv.live_blocks

    @property
    def tensors(self) -> list[torch.Tensor]:
        """One tensor per layer, shape (2, max_blocks or more, block_tokens, kv_heads, head_dim), of spec.dtype, at a fixed
        address. More than max_blocks if blocks stream.

        Index 0 holds keys, 1 values; they are on the session's device. With block_major the block stride is that of a
        whole block in all layers, so a tensor is not contiguous. Blocks that are not usable belong to others: reading them
        gives anything (`strict` sessions fault), writing them destroys weights. After the tenant is detached or the session
        closed, this raises InvalidState; a tensor kept from before reads zeros, and writes to it reach no other tenant (on a
        GPU a kernel that uses it fails).
        """
        return self._kv.tensors

    @property
    def memory(self) -> torch.Tensor:
        """The KV region as bytes: uint8, one dimension, for engines that lay blocks out themselves. Block b of a
        block_major region is the bytes [b * spec.block_bytes, (b + 1) * spec.block_bytes). The rules of `tensors` hold
        here too."""
        return self._kv.memory

    def __getattr__(self, name: str) -> Any:
        if name in _HOST:
            return moved(self, name, "host", "tenant.kv.host", _HOST[name])
        return moved(self, name, "_kv", "advanced.internals(tenant).kv")
