"""FlexGen's schedule and kernels, where they differ from `layerwise`'s: the paper's baseline. Pure.

    costs = flexgen_costs(found)            # `moves`: how often attention moves each byte of K and V in device memory

FlexGen has two layers in each of the model's, attention and the feed-forward network, and computes one of them for one
mini-batch at a time. Meanwhile it copies in a part of the next layer's weights (as many parts as mini-batches) and the
next mini-batch's KV, copies out what the last one has added, and then waits for all of it: no copy is ahead of the next
step's. So a step takes as long as the longest of the three. Attention's K and V are rearranged into copies of their own
before the two products, so that each byte is read, written and read again, where a fused kernel reads it once: MOVES.
Source: FlexGen's published code, `generation_loop_overlap_multi_batch` and `mha_gen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from bench.lab.hybridserve.division import LayerwiseCosts, Setup

from remap_serve.policy.minibatches import Mix

__all__ = ["MOVES", "SYSTEMS_MOVES", "FlexGenCosts", "flexgen_costs"]

MOVES = 3.0
"""Of each byte of K and V, by attention, in device memory."""
SYSTEMS_MOVES = {"FlexGen": MOVES, "FlexGen, 7.4 %": 2.097, "FlexGen, 12.6 %": 4.549}
"""By system. The fitted ones compute for so much of the time, in the mean of Figure 14's prompts with 128 requests: what
HybridServe's sections 3.1 and 5.4 say of FlexGen, both of OPT-30b in batches of 128."""


@dataclass(frozen=True)
class FlexGenCosts(LayerwiseCosts):
    """attention: the share of weights that is attention's; attention_s: of the forward pass of a mini-batch, what is."""

    attention: float = 1.0 / 3.0

    def seconds(self, mixes: Sequence[Mix], streamed: float = 1.0) -> float:
        """Seconds of a pass over these mini-batches."""
        parts, count = [self.part(mix) for mix in mixes], len(mixes)
        weights_s = streamed * self.weights_s / count
        layer_s = 0.0
        for at, (mix, part) in enumerate(zip(mixes, parts, strict=True)):
            network_s = (1.0 - self.attention) * self.forward_s(mix.requests, 0)
            following = parts[at + 1].kv_s if at + 1 < count else 0.0
            before = parts[at - 1].store_s
            layer_s += max(
                (1.0 - self.attention) * weights_s + following, part.forward_s - network_s, before if count > 1 else 0.0
            )
            first = parts[0].kv_s if at + 1 == count else 0.0
            layer_s += max(self.attention * weights_s + first, network_s, part.store_s if count == 1 else 0.0)
        return self.layers * layer_s + sum(self.ends_s(mix.requests) for mix in mixes)


def flexgen_costs(found: Setup, moves: float = MOVES) -> FlexGenCosts:
    """Of the machine and the model of `found`."""
    roofline, given = found.roofline, {field.name: getattr(found.costs, field.name) for field in fields(found.costs)}
    again_s = (roofline.layer_s(0, 0, 1, 1 << 20) - roofline.layer_s(0, 0, 1, 0)) / (1 << 20) * (moves - 1.0)
    forward_s = given.pop("forward_s")
    one = roofline.model
    mine = sum(k * n for _, k, n in one.linear_ops if k * n <= 3 * one.hidden * one.hidden)
    tokens = found.room.block.kv // one.kv_bytes_per_token_layer  # of a block
    return FlexGenCosts(
        **given,
        forward_s=lambda requests, blocks: forward_s(requests, blocks) + blocks * tokens * again_s,
        attention=mine * one.matrix_bytes / one.matrix_size,
    )
