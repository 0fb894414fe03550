"""HybridServe's order of copies: mini-batch by mini-batch, as `layerwise` times it, with all divisions compared. Pure.

    plan = best(blocks, costs, room)        # blocks of each request
    plan.ratio, plan.packing, plan.seconds

`best` compares every division of the requests' blocks by the seconds that `layerwise.pass_seconds` certifies.
`as_in_the_paper` is HybridServe's Algorithm 1 with its packing, timed in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.lab.hybridserve import packing
from bench.lab.hybridserve.layerwise import Part, pass_seconds

from remap.policy.maxplus import copied_uses
from remap_serve.policy.activations import Ratio, ratios
from remap_serve.policy.hybrid import Costs, HybridPlan, HybridRoom, algorithm_1, better_ratio, fixed
from remap_serve.policy.minibatches import BufferLimits, Mix, Packing, total
from remap_serve.sim.roofline import Roofline

__all__ = ["LayerwiseCosts", "LayerwiseRoom", "Setup", "as_in_the_paper", "best", "best_ratio"]

_BUFFERS = 2
"""Of each kind of blocks: one is computed on while the next one comes."""


@dataclass(frozen=True)
class LayerwiseCosts(Costs):
    """As `Costs`: each mini-batch's blocks are copied when its turn comes. slowed: seconds that copies in take longer for each
    second of copies out."""

    slowed: float = 0.0

    def part(self, mix: Mix, last: bool = False) -> Part:
        """One mini-batch in one layer; last: in the last one, with what no layer holds."""
        share = mix.recomputed / mix.blocks if mix.blocks else 0.0
        store_s = mix.requests * (share * self.store_activations_s + (1.0 - share) * self.store_kv_s)
        load_activations_s, load_kv_s = self.load_activations(mix.activations), self.load_kv(mix.kv)
        if load_kv_s:
            load_kv_s += self.slowed * store_s
        elif load_activations_s:
            load_activations_s += self.slowed * store_s
        forward_s = self.forward_s(mix.requests, mix.blocks) + (self.ends_s(mix.requests) if last else 0.0)
        return Part(load_activations_s, load_kv_s, self.recompute(mix.recomputed), forward_s, store_s)

    def parts(self, mixes: Sequence[Mix]) -> list[list[Part]]:
        """All layers of all mini-batches."""
        inner = [self.part(mix) for mix in mixes]
        return [*([inner] * (self.layers - 1)), [self.part(mix, last=True) for mix in mixes]]

    def packings(self, mixes: Sequence[Mix], limits: BufferLimits) -> list[Packing]:
        """Ways to form mini-batches, of which the one with the shortest pass is taken. Errors as `packing.candidates`."""
        return packing.candidates(mixes, limits, self.recompute, self.load_kv, self.load_activations)

    def seconds(self, mixes: Sequence[Mix], streamed: float = 1.0) -> float:
        """The certified seconds of a pass over these mini-batches; streamed: the share of each layer's weights that is not
        kept on the device."""
        return pass_seconds([streamed * self.weights_s] * self.layers, self.parts(mixes), self.ring, _BUFFERS)

    def least_seconds(self, mix: Mix, streamed: float = 1.0) -> float:
        """A bound that no packing of these blocks goes below: what the link, or the processor, does in a pass."""
        copies = len(copied_uses(self.layers, self.ring, "fixed"))
        loads = self.load_kv(mix.kv) + self.load_activations(mix.activations)
        link = copies * streamed * self.weights_s + self.layers * loads
        computed = self.recompute(mix.recomputed) + self.forward_s(mix.requests, mix.blocks)
        return max(link, self.layers * computed + self.ends_s(mix.requests))


@dataclass(frozen=True)
class LayerwiseRoom(HybridRoom):
    """As `HybridRoom`. buffer_bytes: two buffers of KV, two of activations, and K and V that are made again."""

    @property
    def limits(self) -> BufferLimits:
        """Of one mini-batch."""
        kv, activations = self.block.kv, self.block.activations
        return BufferLimits(self.buffer_bytes, _BUFFERS * kv, _BUFFERS * activations + kv, kv)


@dataclass(frozen=True)
class Setup:
    """The costs and the memory of a batch, and how well the lines of Figure 11 fit."""

    roofline: Roofline
    costs: LayerwiseCosts
    room: LayerwiseRoom
    r_squared: tuple[float, float]  # of T_kv_gen and T_load_kv


def best(blocks: Sequence[int], costs: Costs, room: HybridRoom) -> HybridPlan:
    """Of all divisions that any ratio gives, the one with the least certified seconds of a pass; of equal ones the one with
    the fewest activations.

    Never slower than KV alone, activations alone, or `as_in_the_paper`, where they fit. Errors as for `fixed`, if no ratio
    fits.
    """
    return fixed(blocks, best_ratio([(1, blocks)], costs, room), costs, room)


def best_ratio(passes: Sequence[tuple[int, Sequence[int]]], costs: Costs, room: HybridRoom) -> Ratio:
    """The ratio with which all passes together take the least certified seconds; of equal ones the one with the fewest
    activations. passes: how many there are in which the requests have these blocks; 0: the blocks only have to fit. Exact.

    Errors as for `fixed`, if no ratio fits all passes.
    """
    found = better_ratio(passes, costs, room, ratios(each for _, blocks in passes for each in blocks))
    if found is None:
        for _, blocks in passes:
            fixed(blocks, (1, 0), costs, room)  # activations alone are the smallest: raises, with the numbers
    return found or (1, 0)


def as_in_the_paper(blocks: Sequence[int], costs: Costs, room: HybridRoom) -> HybridPlan:
    """HybridServe: the ratio by `algorithm_1`, mini-batches by its greedy packing, seconds by our certificate. Errors as
    for `fixed`."""
    ratio = algorithm_1(costs, room)
    mixes = room.held_by_host(blocks, ratio)
    found = packing.as_in_the_paper(mixes, room.limits, costs.recompute, costs.load_kv)
    seconds = costs.seconds([total(mixes[at] for at in each) for each in found], room.streamed(total(mixes)))
    return HybridPlan(ratio, tuple(mixes), found, seconds)
