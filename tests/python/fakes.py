"""A tenant, a pool and a session over plain torch tensors: the duck types that the engine and the hooks need, without
an arena.

The pool is harsh on purpose: ids have holes and are handed out in a shuffled order, blocks lie far apart in memory, and
whatever is not allocated holds NaN, so that a stale read shows in the result.
"""

from __future__ import annotations

import itertools
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from remap.errors import DriverError, InvalidArgument, OutOfBlocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class CountingPool:
    """Block bookkeeping without memory. `blocks` usable ids, every third id missing."""

    def __init__(self, blocks: int, block_tokens: int, seed: int = 0) -> None:
        self.block_tokens = block_tokens
        ids = [id for id in range(2 * blocks + 2) if id % 3 != 1][:blocks]
        random.Random(seed).shuffle(ids)
        self.free_ids = ids
        self.held: set[int] = set()

    @property
    def free_blocks(self) -> int:
        return len(self.free_ids)

    @property
    def live_blocks(self) -> int:
        return len(self.held)

    @property
    def usable_blocks(self) -> int:
        return len(self.free_ids) + len(self.held)

    def allocate(self, n: int) -> list[int]:
        if n > len(self.free_ids):
            raise OutOfBlocks("too few blocks", requested=n, free=self.free_blocks, usable=self.usable_blocks)
        ids, self.free_ids = self.free_ids[:n], self.free_ids[n:]
        self.held |= set(ids)
        return ids

    def free(self, ids: list[int]) -> None:
        if len(set(ids)) != len(ids) or not set(ids) <= self.held:
            raise InvalidArgument(f"not allocated: {sorted(set(ids) - self.held)}")
        self.held -= set(ids)
        self.free_ids += ids

    def holds(self, ids: list[int]) -> bool:
        return self.held.issuperset(ids)


class ContentPool(CountingPool):
    """Blocks and host blocks that know whose tokens they hold. Copies in arrive when the test says so, or fail."""

    def __init__(self, blocks: int, host: int, rng: random.Random) -> None:
        super().__init__(blocks, 4)
        self.content: dict[int, tuple[str, int, int]] = {}  # block -> (request, its index, tokens written)
        self.stored: dict[int, tuple[str, int, int]] = {}
        self.free_hosts = list(range(host))
        self.flying: dict[int, list[tuple[int, int]]] = {}
        self.rng, self.tickets = rng, itertools.count(1)
        self.fails = self.loses = False
        self.streamable_blocks = 0
        self.shown: dict[int, int] = {}
        self.failed: set[int] = set()
        self.leaving: set[int] = set()
        self.lost: set[int] = set()

    def free(self, ids: list[int]) -> None:
        if self.loses and self.leaving:  # the copies out that are in flight have failed
            self.loses, self.lost = False, self.lost | self.leaving
            self.failed |= self.flying.keys()
            self.leaving, self.flying = set(), {}
            raise DriverError("a copy failed")
        assert all(block in self.shown for block in ids if block >= 10_000)
        for block in [block for block in ids if block >= 10_000]:
            del self.shown[block]
        ids = [block for block in ids if block < 10_000]
        self.join()
        super().free(ids)
        for block in ids:
            self.content.pop(block, None)

    def holds(self, ids: list[int]) -> bool:
        return all(block in self.shown if block >= 10_000 else block in self.held for block in ids)

    def holds_host(self, ids: list[int]) -> bool:
        return self.stored.keys() >= set(ids)

    @property
    def free_streamable_blocks(self) -> int:
        return sum(host < self.streamable_blocks for host in self.free_hosts)

    def copy_out(self, ids: list[int], below: int | None = None) -> list[int]:
        self.free_hosts.sort()
        if len(ids) > (len(self.free_hosts) if below is None else self.free_streamable_blocks):
            raise OutOfBlocks("too few host blocks")
        hosts, self.free_hosts = self.free_hosts[: len(ids)], self.free_hosts[len(ids) :]
        self.stored.update({host: self.content[block] for host, block in zip(hosts, ids)})
        self.leaving |= set(hosts)
        self.lost -= set(hosts)
        return hosts

    def copy_in(self, host_ids: list[int], ids: list[int]) -> int:
        assert self.kept(host_ids), "what was never written comes back"
        assert len(host_ids) == len(ids) and set(ids) <= self.held and set(host_ids) <= set(self.stored)
        ticket = next(self.tickets)
        self.flying[ticket] = list(zip(host_ids, ids))
        return ticket

    def kept(self, host_ids: list[int]) -> bool:
        return self.lost.isdisjoint(host_ids)

    def arrived(self, ticket: int) -> bool:
        if self.fails and self.flying:
            self.fails, self.failed, self.flying = False, {*self.failed, *self.flying}, {}
        if ticket in self.failed:
            raise DriverError("a copy failed")
        if ticket in self.flying and self.rng.random() < 0.5:
            return False
        self._land(ticket)
        return True

    def join(self, ticket: int | None = None) -> None:
        self.leaving = set() if ticket is None else self.leaving
        for each in tuple(self.flying):
            if ticket is None or each <= ticket:
                self._land(each)

    def _land(self, ticket: int) -> None:
        for host, block in self.flying.pop(ticket, ()):
            self.content[block] = self.stored[host]

    def stream(self, host_ids: list[int]) -> list[int]:
        assert self.kept(host_ids), "what was never written is read"
        assert set(host_ids) <= set(self.stored) and all(host < self.streamable_blocks for host in host_ids)
        ids = [10_000 + host for host in host_ids]
        assert not set(ids) & set(self.shown)
        self.shown |= dict(zip(ids, host_ids))
        return ids

    def read(self, block: int) -> tuple[str, int, int]:
        """What a pass finds in it."""
        if block not in self.shown:
            return self.content[block]
        assert self.kept([self.shown[block]])
        return self.stored[self.shown[block]]

    def free_host(self, host_ids: list[int]) -> None:
        assert not set(host_ids) & set(self.shown.values()), "a pass would read it"
        for host in host_ids:
            del self.stored[host]
        self.free_hosts += host_ids


class FakeKV(CountingPool):
    """A pool with memory: block-major, one strided tensor a layer, NaN in what is free."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        block_tokens: int = 4,
        max_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(blocks, block_tokens)
        self.hidden_ids = [id for id in range(max(max_blocks, 2 * blocks + 2)) if id not in set(self.free_ids)]
        self.memory = torch.full(
            (2 * blocks + 2 + len(self.hidden_ids), layers, 2, block_tokens, kv_heads, head_dim),
            float("nan"),
            dtype=dtype,
        )
        self.tensors = [self.memory[:, layer].transpose(0, 1) for layer in range(layers)]

    def free(self, ids: list[int]) -> None:
        super().free(ids)
        self.memory[ids] = float("nan")

    def grow(self, n: int) -> None:
        """Make `n` more ids usable, as far as there are any."""
        self.free_ids += self.hidden_ids[:n]
        self.hidden_ids = self.hidden_ids[n:]

    def shuffle(self) -> dict[int, int]:
        """Move every held block to another place, as compaction does; returns old id -> new id."""
        old = sorted(self.held)
        places = sorted(self.held | set(self.free_ids))
        new = random.Random(len(places)).sample(places, len(old))
        kept = self.memory[old]
        self.memory[places] = float("nan")
        self.memory[new] = kept
        self.held = set(new)
        self.free_ids = [id for id in places if id not in self.held]
        return dict(zip(old, new, strict=True))


class FakeTenant:
    """Records what the engine or the hooks call; `in_pass` is the pass open now. Refuses calls out of order."""

    def __init__(self, layers: int, kv: FakeKV | None = None, name: str = "fake", modules: Any = ()) -> None:
        self.name = name
        self.layers = layers
        self.modules = tuple(modules)
        self.hooks = None
        self.streaming = False
        self.kv = kv
        self.remapped = 0
        self.calls: list[tuple[str, int]] = []
        self.passes: list[tuple[str, int]] = []
        self.abandoned = 0
        self.in_pass = False
        self.waiting_for_done: int | None = None

    @contextmanager
    def forward(self, phase: str = "decode", tokens: int = 0, streamed: Sequence[int] = ()) -> Iterator[None]:
        if self.in_pass:
            raise InvalidArgument("a pass is open already")
        self.in_pass = True
        self.passes.append((phase, tokens))
        try:
            yield
        except BaseException:
            self.abandoned += 1
            raise
        finally:
            self.in_pass = False
            self.waiting_for_done = None

    def at_home(self, layer: int) -> bool:
        return True

    def wait(self, layer: int) -> None:
        if not self.in_pass or self.waiting_for_done is not None:
            raise InvalidArgument(f"wait({layer}) out of order")
        self.waiting_for_done = layer
        self.calls.append(("wait", layer))

    def done(self, layer: int) -> None:
        if self.waiting_for_done != layer:
            raise InvalidArgument(f"done({layer}) out of order")
        self.waiting_for_done = None
        self.calls.append(("done", layer))


@dataclass(frozen=True)
class FakeReport:
    moved: dict[str, dict[int, int]] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)


class FakeSession:
    """Grows the pool by what is wanted (at most `stride` blocks a step) and moves every block every `move_every`
    steps.
    """

    def __init__(self, tenant: FakeTenant, *, stride: int = 8, move_every: int = 0) -> None:
        self.tenant = tenant
        self.stride = stride
        self.move_every = move_every
        self.demands: list[int] = []
        self.grown = 0

    def step(self, demands: dict[str, object]) -> FakeReport:
        (wanted,) = (demand.blocks for demand in demands.values())
        assert list(demands) == [self.tenant.name]
        self.demands.append(wanted)
        kv = self.tenant.kv
        deficit = min(wanted - kv.free_blocks, self.stride)
        if deficit > 0:
            kv.grow(deficit)
            self.grown += 1
        self.tenant.remapped = self.grown
        moved = kv.shuffle() if self.move_every and len(self.demands) % self.move_every == 0 else {}
        return FakeReport({self.tenant.name: moved} if moved else {})
