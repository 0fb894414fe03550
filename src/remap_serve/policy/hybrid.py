# SPDX-License-Identifier: Apache-2.0
"""How much of an offline batch's cache is KV and how much activations: the least certified seconds of a pass. Pure.

    ratio = better_ratio(passes, costs, room, ratios(blocks))       # passes: blocks of each request
    plan = fixed(blocks, ratio, costs, room)
    plan.packing, plan.seconds

Loading activations takes the link half as long as loading K and V (multi-head attention), and the processor makes K and V
again. Weights, KV, activations and stores share the link; making K and V again and the rest of the layer share the
processor. `Costs` says in which order the copies come, and so what a pass takes: `remap_serve.policy.offline` has the engine's.
`algorithm_1` is HybridServe's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from remap.errors import InvalidArgument, OutOfMemory
from remap_serve.policy import minibatches
from remap_serve.policy.activations import BlockBytes, Line, Ratio, activations_of_each
from remap_serve.policy.minibatches import BufferLimits, Mix, Packing, total

__all__ = ["Costs", "HybridPlan", "HybridRoom", "algorithm_1", "better_ratio", "fixed"]

_ROUNDING = 1e-9
"""Seconds that differ by less than this share may be the same sum in another order."""


@dataclass(frozen=True)
class Costs(ABC):
    """Seconds of a pass that gives each request a token; of one layer, but for ends_s.

    weights_s: to copy all of a layer's weights in. load_kv, load_activations, recompute: of blocks of one mini-batch.
    forward_s: of all else that is computed, by the numbers of requests and blocks; of two mini-batches together never
    more than of both. ends_s: of the work outside of layers, by the number of requests. store_kv_s, store_activations_s: to copy
    one request's new token out.
    """

    layers: int
    weights_s: float
    load_kv: Line
    load_activations: Line
    recompute: Line
    forward_s: Callable[[int, int], float]
    ends_s: Callable[[int], float]
    store_kv_s: float = 0.0
    store_activations_s: float = 0.0
    ring: int = 2

    @abstractmethod
    def packings(self, mixes: Sequence[Mix], limits: BufferLimits) -> list[Packing]:
        """Ways to form mini-batches, of which the one with the shortest pass is taken. Errors as `minibatches.fewest`."""

    @abstractmethod
    def seconds(self, mixes: Sequence[Mix], streamed: float = 1.0) -> float:
        """The certified seconds of a pass over these mini-batches; streamed: the share of each layer's weights that is not
        kept on the device."""

    @abstractmethod
    def least_seconds(self, mix: Mix, streamed: float = 1.0) -> float:
        """A bound that no packing of these blocks goes below: the link's, or the processor's, work in a pass."""


@dataclass(frozen=True)
class HybridRoom(ABC):
    """Memory for blocks. block: bytes of one in one layer. host_bytes: for blocks in host memory. device_bytes: for
    activations that stay on the device, then weights, then KV. weight_bytes: of one layer. buffer_bytes: for one layer's
    blocks of the mini-batches.
    """

    layers: int
    block: BlockBytes
    host_bytes: int
    device_bytes: int
    weight_bytes: int
    buffer_bytes: int

    @property
    def held(self) -> int:
        """The most activation blocks that the device holds, in all layers."""
        return self.device_bytes // (self.layers * self.block.activations)

    def divided(self, blocks: Sequence[int], ratio: Ratio) -> list[Mix]:
        """The requests' blocks at a ratio. Bytes on the device are spread evenly over all blocks of their kind.

        A byte that the device holds saves a byte on the link in each pass, whatever it is of: activations come first, as
        in HybridServe, section 4.2.1, then weights, then KV.
        """
        counts = activations_of_each(blocks, ratio)
        held = _spread(self.held, counts)
        left = self.device_bytes - self.layers * (sum(held) * self.block.activations + self.weight_bytes)
        keys = [each - count for each, count in zip(blocks, counts, strict=True)]
        held_kv = _spread(max(0, left) // (self.layers * self.block.kv), keys)
        return [
            Mix(kv - here_kv, count - here, here, here_kv)
            for kv, count, here, here_kv in zip(keys, counts, held, held_kv, strict=True)
        ]

    def held_by_host(self, blocks: Sequence[int], ratio: Ratio) -> list[Mix]:
        """As `divided`. Raises OutOfMemory (fields requested, free; bytes) if host memory cannot hold them."""
        mixes = self.divided(blocks, ratio)
        wanted = self.host_bytes_of(total(mixes))
        if wanted > self.host_bytes:
            raise OutOfMemory(
                f"blocks of {len(blocks)} requests need {wanted} bytes of host memory at {ratio[0]} of activations to {ratio[1]} "
                f"of KV, and there are {self.host_bytes}; nothing changed; serve fewer requests at a time",
                requested=wanted,
                free=self.host_bytes,
            )
        return mixes

    def least(self, blocks: Sequence[int], fewest: Ratio, most: Ratio) -> tuple[Mix, float]:
        """The least that is loaded of all requests together at any ratio from `fewest` activations to `most`, and the least
        share of each layer's weights that is streamed. Exact if both are one ratio.

        A request has the fewest activations at one end and the fewest K and V at the other. The share of a kind that the
        device holds falls as the kind grows, so the rest to be loaded is least where there is the least of it.
        """
        few, many = activations_of_each(blocks, fewest), activations_of_each(blocks, most)
        every = max(1, sum(many))
        held = sum(count * min(self.held, every) // every for count in few)  # at least
        left = self.device_bytes - self.layers * held * self.block.activations
        keys = [each - count for each, count in zip(blocks, many, strict=True)]
        held_kv = sum(_spread(max(0, left - self.layers * self.weight_bytes) // (self.layers * self.block.kv), keys))
        loaded = sum(few) - sum(_spread(self.held, few))
        found = Mix(sum(keys) - held_kv, loaded, sum(few) - loaded, sum(many) - sum(few) + held_kv, len(blocks))
        return found, max(0.0, 1.0 - left / (self.layers * self.weight_bytes))

    def host_bytes_of(self, mix: Mix) -> int:
        """Bytes in host memory."""
        return self.layers * (mix.kv * self.block.kv + mix.activations * self.block.activations)

    def streamed(self, mix: Mix) -> float:
        """The share of each layer's weights that is streamed: the device keeps as much as activations leave room for."""
        left = self.device_bytes - self.layers * mix.held * self.block.activations
        return max(0.0, 1.0 - left / (self.layers * self.weight_bytes))

    @property
    @abstractmethod
    def limits(self) -> BufferLimits:
        """Of one mini-batch."""


@dataclass(frozen=True)
class HybridPlan:
    """A division of all requests' blocks, mini-batches, and the seconds of a pass that they certify."""

    ratio: Ratio
    mixes: tuple[Mix, ...]  # of each request
    packing: Packing
    seconds: float


def fixed(blocks: Sequence[int], ratio: Ratio, costs: Costs, room: HybridRoom) -> HybridPlan:
    """The plan of one ratio: of `Costs.packings` the one with the shortest pass.

    blocks: of each request, at least one request. Raises OutOfMemory (fields requested, free; bytes) if host memory cannot
    hold them, InvalidArgument as `minibatches.fewest` if a request fits into no mini-batch.
    """
    mixes = room.held_by_host(blocks, ratio)
    streamed = room.streamed(total(mixes))

    def seconds(packing: Packing) -> float:
        return costs.seconds([total(mixes[at] for at in each) for each in packing], streamed)

    found, packing = minibatches.least(costs.packings(mixes, room.limits), seconds)
    return HybridPlan(ratio, tuple(mixes), packing, found)


def better_ratio(
    passes: Sequence[tuple[int, Sequence[int]]],
    costs: Costs,
    room: HybridRoom,
    among: Sequence[Ratio],
    below_s: float = math.inf,
) -> Ratio | None:
    """Of these ratios, ascending by their share of activations, the one with which all passes together take the least certified
    seconds; of equal ones the one with the fewest activations; None if with none of them the passes fit and take less than
    `below_s` together. passes: how many there are in which the requests have these blocks; 0: the blocks only have to fit.

    Exact. A range of the ratios is left out if a lower bound of their seconds is above the best that was found: no ratio of
    the range loads less K and V than its last one, nor makes less again than its first one (`HybridRoom.least`). The range with
    the lowest bound is halved first.
    """
    looked = _Looked(passes, costs, room)
    found: tuple[float, int, Ratio | None] = (below_s, -1, None)
    left = [(looked.least_seconds(among[0], among[-1]), 0, len(among) - 1)] if among else []
    while left:
        bound, low, high = heappop(left)
        if bound == math.inf or bound > found[0] * (1.0 + _ROUNDING):
            break
        if low == high:
            found = min(found, (looked.seconds(among[low], found[0]), low, among[low]))
            continue
        middle = (low + high) // 2
        for first, last in ((low, middle), (middle + 1, high)):
            heappush(left, (looked.least_seconds(among[first], among[last]), first, last))
    return found[2]


class _Looked:
    """Seconds of all passes at a ratio, and bounds of them. Ratios that divide a pass's blocks equally share its seconds."""

    def __init__(self, passes: Sequence[tuple[int, Sequence[int]]], costs: Costs, room: HybridRoom) -> None:
        self._passes, self._costs, self._room = passes, costs, room
        self._known: list[dict[tuple[int, ...], float]] = [{} for _ in passes]

    def least_seconds(self, fewest: Ratio, most: Ratio) -> float:
        """No fewer seconds are possible at any ratio from `fewest` activations to `most`; inf: host memory holds none of them."""
        bound = 0.0
        for count, blocks in self._passes:
            mix, streamed = self._room.least(blocks, fewest, most)
            if self._room.host_bytes_of(mix) > self._room.host_bytes:
                return math.inf
            bound += count * self._costs.least_seconds(mix, streamed)
        return bound

    def seconds(self, ratio: Ratio, enough: float) -> float:
        """Certified. inf if they are more than `enough`, or the ratio does not fit."""
        rest, seconds, room = self.least_seconds(ratio, ratio), 0.0, self._room
        for (count, blocks), known in zip(self._passes, self._known, strict=True):
            key = tuple(activations_of_each(blocks, ratio))
            if key not in known:
                if not all(map(room.limits.holds, room.divided(blocks, ratio))):
                    return math.inf
                known[key] = fixed(blocks, ratio, self._costs, room).seconds if count else 0.0
            mix, streamed = room.least(blocks, ratio, ratio)
            rest += count * (known[key] - self._costs.least_seconds(mix, streamed))
            seconds += count * known[key]
            if rest > enough * (1.0 + _ROUNDING):
                return math.inf
        return seconds


def algorithm_1(costs: Costs, room: HybridRoom) -> Ratio:
    """HybridServe's Algorithm 1: how many blocks of activations and of KV host memory is divided into.

    It balances T_load_w + T_load_kv(KV) with T_kv_gen(activations in host memory and on the device) for a host memory that
    is full, whatever is served, and counts neither loading activations, stores nor the rest of the layer. Decided here,
    where the paper is silent: the lines' base is paid once, by the first kind that has blocks, so step 1 solves
    T_kv_gen(device + x) = T_load_w; a solution outside the memory is moved to its end; blocks are whole, and the memory then
    left over, less than a block of KV, stays free; on the device are as many activations as it holds.

    Raises InvalidArgument (fields host_bytes, block_bytes) if not one block of KV fits.
    """
    kv_bytes, activation_bytes = room.layers * room.block.kv, room.layers * room.block.activations
    if room.host_bytes < kv_bytes:
        raise InvalidArgument(
            f"host memory for blocks must hold one block of KV at least: {room.host_bytes} bytes, a block has {kv_bytes}; "
            "nothing changed",
            host_bytes=room.host_bytes,
            block_bytes=kv_bytes,
        )
    make, load = costs.recompute, costs.load_kv
    budget = costs.weights_s - make(room.held)
    activations = kv = 0
    if budget >= 0.0:  # step 1: nothing is idle while weights come
        more = _solved(budget - (0.0 if room.held else make.base_s), make.each_s)
        activations = min(more, room.host_bytes // activation_bytes)
    else:
        kv = min(_solved(-budget - load.base_s, load.each_s), room.host_bytes // kv_bytes)
    remaining = room.host_bytes - activations * activation_bytes - kv * kv_bytes
    # step 2: x more of activations, y more of KV, with x activation_bytes + y kv_bytes = remaining and equal seconds; what
    # step 1 left over in whole blocks, and the bases of who had no block yet, count here
    link = costs.weights_s + load(kv) + (0.0 if kv else load.base_s)
    computing = make(room.held + activations) + (0.0 if room.held + activations else make.base_s)
    slope = make.each_s + load.each_s * activation_bytes / kv_bytes
    wanted = load.each_s * remaining / kv_bytes + link - computing
    x = min(_solved(wanted, slope), remaining // activation_bytes)
    y = (remaining - x * activation_bytes) // kv_bytes
    return activations + x, kv + y


def _solved(seconds: float, each_s: float) -> int:
    """How many whole blocks take at most `seconds`; with blocks that take nothing, more than any memory holds."""
    if seconds < 0.0:
        return 0
    return math.floor(seconds / each_s) if each_s else 1 << 62


def _spread(most: int, counts: Sequence[int]) -> list[int]:
    """At most `most` in all, of each count the same share."""
    every = max(1, sum(counts))
    return [count * min(most, every) // every for count in counts]
