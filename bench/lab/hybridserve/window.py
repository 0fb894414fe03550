"""Where a mixture of KV and activations can be faster than either alone, and by how much at most. Pure.

Let a pass take the link W for all weights that stream and K for all K and V, less D for what the device keeps of either (a byte
that it keeps is a byte saved, whichever it is of), and the processor F for all but recomputation and G to make all K and V again.
At a share s of activations no schedule takes less than

    T(s) = max(W + K (1 - s / 2) - D, F + G s)

KV alone is T(0), activations alone T(1). The first term falls in s and the second grows, so a mixture is faster than both if and
only if they cross in between: the link is the longer one with KV alone (W + K - D > F), and the processor with activations alone
(F + G > W + K / 2 - D). So there is a lowest and a highest rate of the link between which a mixture can win.

With A = W + K - D they cross at T = (G A + F K / 2) / (G + K / 2), and min(A, F + G) / T is what is gained over the better one.
That grows with G while KV alone is the slower one (F + G < A) and falls from there on. Where both are equal, G = A - F, it falls
as F grows (its slope in F has the sign of -K ** 2), and without F it is 1 + K / 2 A. So the gain is at most that: 1.5 where the
device keeps no more than weights (D <= W, so K <= A), 2 where it does not hold all activations (K / 2 <= A), and more only where
it holds what is left of K and V before all of it is activations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.lab.hybridserve.batches import BLOCK_TOKENS, OUTPUT, RING, Batch, setup

from remap.policy.maxplus import copied_uses

__all__ = ["Window", "window"]


@dataclass(frozen=True)
class Window:
    """Seconds of a pass: weights_s, kv_s and, less, kept_s on the link; forward_s and recompute_s on the processor."""

    weights_s: float
    kv_s: float
    kept_s: float
    forward_s: float
    recompute_s: float

    @property
    def kv_alone_s(self) -> float:
        """The link's seconds with KV alone."""
        return max(0.0, self.weights_s + self.kv_s - self.kept_s)

    def seconds(self, share: float) -> float:
        """T(share), of activations."""
        return max(self.kv_alone_s - self.kv_s * share / 2.0, self.forward_s + self.recompute_s * share)

    @property
    def share(self) -> float:
        """The share of activations with the least seconds: 0 or 1 where no mixture is faster than both alone."""
        slope = self.recompute_s + self.kv_s / 2.0
        return min(1.0, max(0.0, (self.kv_alone_s - self.forward_s) / slope)) if slope else 0.0

    @property
    def rates(self) -> tuple[float, float]:
        """Of links, in multiples of the one that the seconds are of: between these a mixture can win."""
        low = (self.kv_alone_s - self.kv_s / 2.0) / (self.forward_s + self.recompute_s)
        return max(0.0, low), self.kv_alone_s / self.forward_s if self.forward_s else math.inf

    @property
    def gain(self) -> float:
        """Of the best mixture over the better of KV alone and activations alone; 1: none is faster."""
        return min(self.seconds(0.0), self.seconds(1.0)) / self.seconds(self.share)

    @property
    def most(self) -> float:
        """No gain is more than this, whatever processor there is; infinite where KV alone copies nothing."""
        return 1.0 + self.kv_s / (2.0 * self.kv_alone_s) if self.kv_alone_s else math.inf


def window(batch: Batch) -> Window:
    """Of the middle pass of a batch of fixed lengths."""
    found = setup(batch.machine, batch.model)
    costs, room = found.costs, found.room
    blocks = batch.size * -(-(batch.prompt + OUTPUT // 2) // BLOCK_TOKENS)
    rate = room.weight_bytes / costs.weights_s
    return Window(
        len(copied_uses(room.layers, RING, "fixed")) * costs.weights_s,
        room.layers * costs.load_kv.each_s * blocks,
        (room.device_bytes + room.buffer_bytes) / rate,
        room.layers * costs.forward_s(batch.size, blocks) + costs.ends_s(batch.size),
        room.layers * costs.recompute.each_s * blocks,
    )
