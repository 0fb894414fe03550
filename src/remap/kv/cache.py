"""`tenant.kv`: the KV cache of one tenant, as an engine sees it. Blocks come and go; tensors never move.

`kv.BlockPool` keeps the books. This class adds the memory behind them: the tensors, and the copies that move live
blocks out of pages that are about to be given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from remap.errors import InvalidState
from remap.kv.pool import BlockPool, Listener, listed
from remap.kv.spec import KVGeometry, KVSpec
from remap.locking import Turn

if TYPE_CHECKING:
    import torch

__all__ = ["KVCache"]


def _gone(address: int, nbytes: int) -> Any:
    raise InvalidState("the tenant is detached, or the session closed: its KV cache has no memory; nothing changed")


class KVCache:
    """The block pool, over the KV region at `address`.

    allocate(n) -> ids, lowest first (OutOfBlocks; ids need not be contiguous); free(ids); subscribe(cb) for an engine
    with its own allocator, which then returns withdrawn ids with returned(ids). See `kv.BlockPool` for all of them.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        address: int,
        mover: Callable[[Sequence[tuple[int, int, int]]], None],
        memory: Any,
        turn: Turn,
    ) -> None:
        """mover([(to, from, bytes)]) copies within the region, before anything that reads or writes it next.

        memory(address, nbytes) makes byte tensors. turn: the tenant's; the engine's calls wait for changes in progress.
        """
        self.pool = BlockPool(geometry)
        self.geometry = geometry
        self.spec: KVSpec = geometry.spec
        self.block_tokens = geometry.spec.block_tokens
        self.max_blocks = geometry.spec.max_blocks
        self.address = address
        self._mover = mover
        self._memory = memory
        self._tensors: list[torch.Tensor] | None = None
        self._turn = turn

    # An engine calls these from its own thread, while another thread's change may be under way.

    def allocate(self, count: int) -> list[int]:
        """`BlockPool.allocate`. Raises ForkedProcess in a forked child."""
        ids: list[int] = self._turn.run(self.pool.allocate, count)
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """`BlockPool.free`. Raises ForkedProcess in a forked child."""
        self._turn.run(self.pool.free, listed(ids))

    def returned(self, ids: Iterable[int]) -> None:
        """`BlockPool.returned`. Raises ForkedProcess in a forked child."""
        self._turn.run(self.pool.returned, listed(ids))

    def subscribe(self, listener: Listener, *, external: bool = False) -> None:
        """Call listener(added_ids, withdrawn_ids) from now on. external: the engine's own allocator holds all blocks.

        The thread whose call has changed something calls it, after the change. It may call `returned`, `free` and
        `allocate`.
        """
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
        """One tensor per layer, shape (2, max_blocks, block_tokens, kv_heads, head_dim), of spec.dtype, at a fixed
        address.

        Index 0 holds keys, 1 values; they are on the session's device. With block_major the block stride is that of a
        whole block in all layers, so a tensor is not contiguous. Blocks that are not usable belong to somebody else:
        reading them gives anything (`strict` sessions fault), writing them destroys weights. After the tenant is
        detached or the session closed, this raises InvalidState; a tensor kept from before reads zeros, and writes to
        it reach nobody (on a GPU a kernel that uses it fails).
        """
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
    def memory(self) -> torch.Tensor:
        """The KV region as bytes: uint8, one dimension, for engines that lay blocks out themselves. Block b of a
        block_major region is the bytes [b * spec.block_bytes, (b + 1) * spec.block_bytes). The rules of `tensors` hold
        here too."""
        return self._memory(self.address, self.geometry.region_bytes)

    def retire(self) -> None:
        """The region goes away. Tensors kept by callers read zeros from now on; no new ones are made."""
        self._tensors = None
        self._memory = _gone

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the bytes of blocks: (from, to) each. Changes no bookkeeping.

        Returns when the bytes have arrived or, if the tenant computes on a stream, when the copies are enqueued there.
        """
        ranges = []
        for old, new in pairs:
            sources, targets = self.geometry.byte_ranges_of_block(old), self.geometry.byte_ranges_of_block(new)
            for (source, nbytes), (target, _) in zip(sources, targets):
                ranges.append((self.address + target, self.address + source, nbytes))
        if ranges:
            self._mover(ranges)
