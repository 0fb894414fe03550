"""What an engine loses without HybridServe's two means: activations that stay on the device, and copies by mini-batch. Pure.

    costs, room = variant("whole, held", found)

Whole: as the library's prefetcher copies, a layer's blocks of all mini-batches in one copy, in `kv_stream`'s order, and all but
recomputation is computed for all requests together. Two buffers hold the whole batch's part of a layer, and take their room from
the weights that stay. In parts: `layerwise`'s order, with buffers for a mini-batch. Held: activations stay on the device before
weights do. Otherwise weights stay first, then KV, as in `ThroughputEngine`'s sessions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from bench.lab.hybridserve.division import LayerwiseCosts, LayerwiseRoom, Setup
from bench.lab.hybridserve.layerwise import Part

from remap.policy import kv_stream
from remap_serve.policy.activations import Ratio
from remap_serve.policy.minibatches import BufferLimits, Mix, Packing, fewest, total

__all__ = ["VARIANTS", "WholeCosts", "WholeRoom", "variant"]

_BUFFERS = 2


@dataclass(frozen=True)
class _WeightsFirst(LayerwiseRoom):
    """No activations stay on the device."""

    @property
    def held(self) -> int:
        """None."""
        return 0


@dataclass(frozen=True)
class WholeCosts(LayerwiseCosts):
    """See the module."""

    def packings(self, mixes: Sequence[Mix], limits: BufferLimits) -> list[Packing]:
        """The engine's."""
        return [fewest(mixes, limits)]

    def parts(self, mixes: Sequence[Mix]) -> list[list[Part]]:
        """All layers, each at once but for the recomputation of each mini-batch."""
        made_s = math.fsum(self.recompute(each.recomputed) for each in mixes)
        inner, last = (replace(self.part(total(mixes), last), recompute_s=made_s) for last in (False, True))
        return [*([[inner]] * (self.layers - 1)), [last]]

    def seconds(self, mixes: Sequence[Mix], streamed: float = 1.0) -> float:
        """The certified seconds of a pass; inf for streamed=inf, which says that the buffers do not fit."""
        if math.isinf(streamed):
            return math.inf
        ((one,), *_) = self.parts(mixes)
        compute = [one.recompute_s + one.forward_s] * self.layers + [self.ends_s(total(mixes).requests)]
        weights = [streamed * self.weights_s] * self.layers + [0.0]
        layers = list(range(self.layers)) if streamed else []
        load_s = one.activations_s + one.kv_s
        return kv_stream.pass_seconds(compute, weights, layers, self.ring, load_s, self.layers, _BUFFERS)


@dataclass(frozen=True)
class WholeRoom(LayerwiseRoom):
    """As `LayerwiseRoom`. buffer_bytes: for the K and V that a mini-batch makes again. holds: whether activations stay."""

    holds: bool = False

    @property
    def held(self) -> int:
        """The most activation blocks that the device holds, in all layers."""
        return self.device_bytes // (self.layers * self.block.activations) if self.holds else 0

    @property
    def limits(self) -> BufferLimits:
        """Of one mini-batch."""
        return BufferLimits(self.buffer_bytes, kv=0, activations=self.block.kv, held=self.block.kv)

    def divided(self, blocks: Sequence[int], ratio: Ratio) -> list[Mix]:
        """As `HybridRoom.divided`, of what two buffers of all blocks leave."""
        alone = replace(self, device_bytes=0)
        mix = total(super(WholeRoom, alone).divided(blocks, ratio))
        left = max(0, self.device_bytes - self._buffers(mix))
        return super(WholeRoom, replace(self, device_bytes=left)).divided(blocks, ratio)

    def streamed(self, mix: Mix) -> float:
        """The share of each layer's weights that is streamed; inf if the device has no room for the buffers."""
        left = self.device_bytes - self._buffers(mix) - self.layers * mix.held * self.block.activations
        return math.inf if left < 0 else max(0.0, 1.0 - left / (self.layers * self.weight_bytes))

    def _buffers(self, mix: Mix) -> int:
        """Two layers' parts of all blocks, wherever they are."""
        return _BUFFERS * ((mix.kv + mix.held_kv) * self.block.kv + mix.recomputed * self.block.activations)


def variant(name: str, found: Setup) -> tuple[LayerwiseCosts, LayerwiseRoom]:
    """The costs and the room of one of VARIANTS, on the machine and for the model of `found`."""
    costs = {field.name: getattr(found.costs, field.name) for field in fields(found.costs)}
    room = {field.name: getattr(found.room, field.name) for field in fields(found.room)}
    if name == "parts":
        return found.costs, _WeightsFirst(**room)
    return WholeCosts(**costs), WholeRoom(**room, holds=name == "whole, held")


VARIANTS = ("whole", "whole, held", "parts")
"""With "ours", the fourth: in parts, held."""
