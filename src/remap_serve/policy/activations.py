# SPDX-License-Identifier: Apache-2.0
"""Blocks that keep a layer's input activations instead of its K and V: bytes, seconds, and which block is of which kind. Pure.

K and V of a token are made again from its activations by the layer's own projection, so either kind of block is enough.
With multi-head attention activations have half the bytes of K and V; they cost a product with the projection's weights in
each pass. `hybrid` decides how many blocks are of which kind, `offline` says how long a pass then takes. Source:
HybridServe, sections 3.3 and 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from remap.errors import InvalidArgument

__all__ = [
    "BlockBytes",
    "Line",
    "Ratio",
    "activations_of",
    "activations_of_each",
    "block_bytes",
    "next_is_activations",
    "ratios",
]

Ratio = tuple[int, int]
"""(activations, KV): the number of blocks of each kind. Not both 0."""


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block in one layer, as K and V and as activations."""

    kv: int
    activations: int


def block_bytes(block_tokens: int, kv_heads: int, head_dim: int, hidden: int, dtype_bytes: int) -> BlockBytes:
    """Bytes of a block of `block_tokens` tokens in one layer, either way.

    Raises InvalidArgument (fields kv_bytes, activation_bytes, of a block; kv_heads, head_dim, hidden) where activations
    are not smaller: grouped-query attention with hidden >= 2 kv_heads head_dim.
    """
    found = BlockBytes(2 * kv_heads * head_dim * dtype_bytes * block_tokens, hidden * dtype_bytes * block_tokens)
    if found.activations >= found.kv:
        raise InvalidArgument(
            f"activations must be smaller than K and V: a block of {block_tokens} tokens has {found.activations} bytes a "
            f"layer as activations ({hidden} wide) and {found.kv} as K and V ({kv_heads} KV heads of {head_dim}); nothing "
            "changed; keep K and V",
            kv_bytes=found.kv,
            activation_bytes=found.activations,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=hidden,
        )
    return found


@dataclass(frozen=True)
class Line:
    """Seconds of work on a number of blocks: base_s once, and each_s a block; no block takes nothing."""

    base_s: float
    each_s: float

    def __call__(self, blocks: float) -> float:
        return self.base_s + self.each_s * blocks if blocks > 0 else 0.0

    @classmethod
    def fit(cls, points: Iterable[tuple[float, float]]) -> Line:
        """The line through points (blocks, seconds) with the least sum of squared errors, neither part below 0.

        Raises InvalidArgument (field points) unless there are points at two numbers of blocks at least, finite and >= 0.
        Source: HybridServe, Figure 11.
        """
        given = [(float(x), float(y)) for x, y in points]
        if len({x for x, _ in given}) < 2 or not all(0 <= value < math.inf for point in given for value in point):
            raise InvalidArgument(
                f"a line needs finite points >= 0 at two numbers of blocks or more, got {given}; nothing changed; "
                "measure more",
                points=given,
            )
        n = len(given)
        middle = math.fsum(x for x, _ in given) / n
        height = math.fsum(y for _, y in given) / n
        spread = math.fsum((x - middle) ** 2 for x, _ in given)
        each = math.fsum((x - middle) * (y - height) for x, y in given) / spread
        base = height - each * middle
        if each < 0.0:
            return cls(height, 0.0)
        if base < 0.0:
            return cls(0.0, math.fsum(x * y for x, y in given) / math.fsum(x * x for x, _ in given))
        return cls(base, each)

    def r_squared(self, points: Iterable[tuple[float, float]]) -> float:
        """The share of the points' variance that the line explains; 1: they are on it."""
        given = list(points)
        height = math.fsum(y for _, y in given) / len(given)
        total = math.fsum((y - height) ** 2 for _, y in given)
        missed = math.fsum((y - self(x)) ** 2 for x, y in given)
        return 1.0 - missed / total if total else 1.0


# ---------------------------------------------------------------------------------------------- which block is which


def next_is_activations(activations: int, kv: int, ratio: Ratio) -> bool:
    """Whether the next block of a request that has these of each kind keeps activations: that kind is furthest below its
    share then, or both are equally far. Source: derived from HybridServe, section 4.3.2, which keeps to the ratio but
    says neither how nor who wins a tie."""
    wanted, other = _checked(ratio)
    after = activations + kv + 1
    return wanted * after - activations * (wanted + other) >= other * after - kv * (wanted + other)


def activations_of(blocks: int, ratio: Ratio) -> int:
    """How many of a request's first `blocks` blocks keep activations, if `next_is_activations` chose each: their share of
    the ratio, rounded to the nearest, a half up."""
    return activations_of_each((blocks,), ratio)[0]


def activations_of_each(blocks: Iterable[int], ratio: Ratio) -> list[int]:
    """`activations_of` of each of these numbers of blocks."""
    wanted, other = _checked(ratio)
    every = wanted + other
    return [(2 * wanted * each + every) // (2 * every) for each in blocks]


def ratios(blocks: Iterable[int]) -> list[Ratio]:
    """Ratios of which each gives another division of requests of these many blocks; together they give every division that
    any ratio gives. By share of activations, ascending: from (0, 1) to the one that leaves no KV.

    The division changes where some request's number of activations does: its i-th is reached at 2i - 1 of 2n parts.
    """
    found: dict[float, Ratio] = {}
    for n in sorted(set(blocks)):
        for i in range(1, n + 1):
            found.setdefault((2 * i - 1) / (2 * n), (2 * i - 1, 2 * n - 2 * i + 1))
    return [(0, 1), *(found[share] for share in sorted(found))]


def _checked(ratio: Ratio) -> Ratio:
    wanted, other = ratio
    if wanted < 0 or other < 0 or not wanted + other:
        raise InvalidArgument(
            f"a ratio must be two numbers of blocks >= 0, not both 0, got {ratio}; nothing changed; correct it",
            ratio=ratio,
        )
    return ratio
