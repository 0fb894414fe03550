# SPDX-License-Identifier: Apache-2.0
"""Which ratio of KV to activations an offline batch keeps: seconds of a pass as `ThroughputEngine` makes it. Pure.

    option = choose(lengths, costs, room, most)["best"]

A block here is what is kept as one or the other: a pair of the engine's blocks. The engine's order of copies is coarser than
HybridServe's. A layer's blocks come in one copy for all mini-batches together, not before the pass begins, and what is made
again waits for all of it; the layer's buffer is free once the whole layer is done. That is `kv_stream`'s order, so its
seconds are what `OfflineCosts` certifies. Not counted: unused host blocks between those that are copied. A pass's
copies in come behind the copies out of the pass before, which are counted as if nothing hid them.

The more requests share a pass, the less each pays for its weights, and host memory has room for twice as many with
activations alone. So options are compared by seconds a token. Source: derived; the balance is HybridServe's, section 4.3.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

from remap.policy import kv_stream
from remap.policy.maxplus import copied_uses
from remap_serve.policy import hybrid
from remap_serve.policy.activations import Ratio, ratios
from remap_serve.policy.hybrid import Costs, HybridRoom
from remap_serve.policy.minibatches import BufferLimits, Mix, Packing, fewest, total

__all__ = ["OfflineCosts", "OfflineRoom", "Option", "at_once", "choose"]

_BUFFERS = 2
_STAGES = (0.125, 0.375, 0.625, 0.875)
"""Shares of the answers that are there in the passes that are counted."""
_TRIED = 8
"""Ranges of numbers of requests at once for which the best ratio is looked for, at most."""


@dataclass(frozen=True)
class OfflineCosts(Costs):
    """As `Costs`, but: a layer's blocks are one copy, of `load_kv` or `load_activations` with one base; forward_s is of all
    mini-batches together. weights: seconds to copy each layer in, 0 for one that stays; the last may be the head."""

    weights: tuple[float, ...] = ()

    def packings(self, mixes: Sequence[Mix], limits: BufferLimits) -> list[Packing]:
        """The engine's."""
        return [fewest(mixes, limits)]

    def seconds(self, mixes: Sequence[Mix], streamed: float = 1.0) -> float:
        """The certified seconds of a pass over these mini-batches. streamed: not used, `weights` says which stay."""
        mix = total(mixes)
        made_s = math.fsum(self.recompute(each.recomputed) for each in mixes)
        compute = [made_s + self.forward_s(mix.requests, mix.blocks)] * self.layers + [self.ends_s(mix.requests)]
        layers = [layer for layer, seconds in enumerate(self.weights) if seconds]
        weights = [*self.weights, 0.0]
        passed = kv_stream.pass_seconds(compute, weights, layers, self.ring, self._loads(mix), self.layers, _BUFFERS)
        return passed + self._stores(mix)

    def least_seconds(self, mix: Mix, streamed: float = 1.0) -> float:
        """A bound that no packing of these blocks goes below: the link's, or the processor's, work in a pass."""
        layers = [layer for layer, seconds in enumerate(self.weights) if seconds]
        copied = math.fsum(self.weights[layers[use]] for use in copied_uses(len(layers), self.ring, "fixed"))
        computed = self.recompute(mix.recomputed) + self.forward_s(mix.requests, mix.blocks)
        link = copied + self.layers * self._loads(mix)
        return max(link, self.layers * computed + self.ends_s(mix.requests)) + self._stores(mix)

    def _loads(self, mix: Mix) -> float:
        blocks_s = self.load_kv.each_s * mix.kv + self.load_activations.each_s * mix.activations
        return self.load_kv.base_s + blocks_s if mix.kv or mix.activations else 0.0

    def _stores(self, mix: Mix) -> float:
        share = mix.recomputed / mix.blocks if mix.blocks else 0.0
        each_s = share * self.store_activations_s + (1.0 - share) * self.store_kv_s
        return self.layers * mix.requests * each_s


@dataclass(frozen=True)
class OfflineRoom(HybridRoom):
    """As `HybridRoom`. buffer_bytes: of one layer, where a mini-batch's K and V are made again; copies need none of it."""

    @property
    def limits(self) -> BufferLimits:
        """Of one mini-batch."""
        return BufferLimits(self.buffer_bytes, kv=0, activations=self.block.kv, held=self.block.kv)


@dataclass(frozen=True)
class Option:
    """The expected results of a ratio. at_once: requests in a pass, as many as host memory holds to their ends. pass_s: the
    certified seconds of a pass, in the mean of their answers."""

    ratio: Ratio
    at_once: int
    pass_s: float

    @property
    def tokens_per_s(self) -> float:
        """While all of them are answered."""
        return self.at_once / self.pass_s

    def __str__(self) -> str:
        """ "25 % activations, 12 requests at once, 31.5 tokens/s"."""
        share = self.ratio[0] / sum(self.ratio)
        return f"{share:.0%} activations, {self.at_once} requests at once, {self.tokens_per_s:.3g} tokens/s"


def choose(
    lengths: Sequence[tuple[int, int]], block_tokens: int, costs: OfflineCosts, room: OfflineRoom, most: int
) -> Mapping[str, Option]:
    """The options by name: KV, activations and Algorithm 1 (HybridServe's), those of them that fit, and best.

    lengths: tokens of each prompt and of each answer, in the order in which they are served. block_tokens: of the pair that
    is one block here. most: requests at once, if host memory holds that many. `hybrid.better_ratio` gives the best ratio
    for each number of requests that it may hold, from KV alone to activations alone; more than 8 numbers are taken together
    in 8 ranges, as if the least of a range ran. Best has the most tokens a second of these ratios and the others; of equals
    it is the first in that order.

    Raises OutOfMemory (fields requested, free; bytes) or InvalidArgument as `hybrid.fixed` if no ratio holds the first
    request, or the longest one.
    """
    asked = _Asked(lengths, block_tokens, costs, room, most)
    named = {"KV": (0, 1), "activations": (1, 0)}
    if room.host_bytes >= room.layers * room.block.kv:
        named["Algorithm 1"] = hybrid.algorithm_1(costs, room)
    found = {name: option for name, ratio in named.items() if (option := asked.option(ratio)) is not None}
    few, many = (at_once(lengths[:most], block_tokens, ratio, room) for ratio in ((0, 1), (1, 0)))
    numbers = range(max(1, few), max(1, many) + 1)
    best = max(found.values(), key=lambda one: one.tokens_per_s, default=None)
    for first, last in pairwise([*numbers[:: -(-len(numbers) // _TRIED)], numbers[-1] + 1]):
        ratio = asked.better_ratio(first, last, 0.0 if best is None else best.tokens_per_s)
        option = None if ratio is None else asked.option(ratio)
        if option is not None and (best is None or option.tokens_per_s > best.tokens_per_s):
            best = option
    return {"best": best or asked.refused(), **found}


def at_once(lengths: Sequence[tuple[int, int]], block_tokens: int, ratio: Ratio, room: OfflineRoom) -> int:
    """How many of these requests, from the first one on, host memory holds to their ends. Arguments as for `choose`."""
    count = used = 0
    for mix in room.divided(_blocks(lengths, block_tokens, 1.0), ratio):
        used += room.host_bytes_of(mix)
        if used > room.host_bytes:
            break
        count += 1
    return count


def _blocks(lengths: Sequence[tuple[int, int]], block_tokens: int, share: float) -> list[int]:
    """Complete blocks of requests with so much of their answers."""
    return [(prompt + math.floor(share * answer)) // block_tokens for prompt, answer in lengths]


class _Asked:
    """The arguments of `choose`."""

    def __init__(
        self, lengths: Sequence[tuple[int, int]], block_tokens: int, costs: OfflineCosts, room: OfflineRoom, most: int
    ) -> None:
        self._lengths, self._block_tokens, self._costs, self._room = lengths[:most], block_tokens, costs, room
        self._longest = max(_blocks(lengths, block_tokens, 1.0))

    def better_ratio(self, first: int, last: int, tokens_per_s: float) -> Ratio | None:
        """The best for `first` requests, of the ratios with which at least that many fit, and fewer than `last`; None if none
        gives `last` - 1 of these more than `tokens_per_s`, or holds the longest request."""
        passes = self._passes(first)
        every = ratios([each for _, blocks in passes for each in blocks])
        low, high = (bisect_left(every, count, key=self._at_once) for count in (first, last))
        below_s = len(_STAGES) * (last - 1) / tokens_per_s if tokens_per_s else math.inf
        return hybrid.better_ratio(passes, self._costs, self._room, every[low:high], below_s)

    def option(self, ratio: Ratio) -> Option | None:
        """None if it does not hold the first request, or the longest one."""
        count, longest = self._at_once(ratio), self._room.divided([self._longest], ratio)[0]
        fits = self._room.limits.holds(longest) and self._room.host_bytes_of(longest) <= self._room.host_bytes
        if not count or not fits:
            return None
        passes = [_blocks(self._lengths[:count], self._block_tokens, share) for share in _STAGES]
        seconds = [hybrid.fixed(blocks, ratio, self._costs, self._room).seconds for blocks in passes]
        divisor = math.gcd(*ratio)
        return Option((ratio[0] // divisor, ratio[1] // divisor), count, math.fsum(seconds) / len(seconds))

    def refused(self) -> NoReturn:
        """Raises the error of the first request and the longest one."""
        for _, blocks in self._passes(1):
            hybrid.fixed(blocks, (1, 0), self._costs, self._room)
        raise AssertionError("activations alone fit, and were not found")

    def _at_once(self, ratio: Ratio) -> int:
        return at_once(self._lengths, self._block_tokens, ratio, self._room)

    def _passes(self, count: int) -> list[tuple[int, list[int]]]:
        """Those that are counted, and those that have to fit: all of them at their ends, and the longest request alone."""
        counted = [(1, _blocks(self._lengths[:count], self._block_tokens, share)) for share in _STAGES]
        return [*counted, (0, _blocks(self._lengths[:count], self._block_tokens, 1.0)), (0, [self._longest])]
