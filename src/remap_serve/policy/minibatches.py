# SPDX-License-Identifier: Apache-2.0
"""Which requests are computed together: bin packing of an offline batch into mini-batches. Pure.

A mini-batch's blocks of one layer must fit into the buffers on the device. All mini-batches go through a layer before the
next layer begins, so the layer's weights are loaded once for all of them.
Source: derived. HybridServe's own packing (section 4.3.3) is in bench/lab/hybridserve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from remap.errors import InvalidArgument

__all__ = [
    "BufferLimits",
    "Mix",
    "Packing",
    "fewest",
    "first_fit",
    "least",
    "require_room",
    "total",
]


@dataclass(frozen=True)
class Mix:
    """Blocks of a request, or of several: KV and activations that are loaded, and those that the device holds."""

    kv: int
    activations: int
    held: int = 0  # activations
    held_kv: int = 0
    requests: int = 1

    @property
    def recomputed(self) -> int:
        """Blocks of activations, wherever they are."""
        return self.activations + self.held

    @property
    def blocks(self) -> int:
        """Blocks of either kind, wherever they are."""
        return self.kv + self.held_kv + self.recomputed


Packing = tuple[tuple[int, ...], ...]
"""Mini-batches, as positions in a list of requests."""


@dataclass(frozen=True)
class BufferLimits:
    """The room for one mini-batch in the buffers on the device. most: bytes; kv, activations, held: what one block takes of
    them. HybridServe has a maximum for each kind instead, which leaves one buffer empty where requests differ."""

    most: int
    kv: int
    activations: int
    held: int

    def taken(self, mix: Mix) -> int:
        """Bytes of the buffers that these blocks take."""
        return mix.kv * self.kv + mix.activations * self.activations + mix.held * self.held

    def holds(self, mix: Mix) -> bool:
        """Whether a mini-batch of these blocks fits."""
        return self.taken(mix) <= self.most


def total(mixes: Iterable[Mix]) -> Mix:
    """All blocks together; of no request no block."""
    kv = activations = held = held_kv = requests = 0
    for mix in mixes:
        kv, activations = kv + mix.kv, activations + mix.activations
        held, held_kv = held + mix.held, held_kv + mix.held_kv
        requests += mix.requests
    return Mix(kv, activations, held, held_kv, requests)


def first_fit(
    mixes: Sequence[Mix],
    limits: BufferLimits,
    order: Iterable[int],
    apart: Callable[[Mix], float] = lambda mix: 0.0,
    most_s: float = math.inf,
) -> Packing:
    """Each request, in `order`, into the first mini-batch that it fits into, else into a new one.

    apart: seconds that the two pipelines of a mini-batch differ by, signed; beyond `most_s` no request may join if it makes
    the difference larger. Errors as for `fewest`.
    """
    require_room(mixes, limits)
    packed, sums, free = list[list[int]](), list[Mix](), list[int]()
    for at in order:
        taken = limits.taken(mixes[at])
        for number, left in enumerate(free):
            if taken > left:
                continue
            joined = total((sums[number], mixes[at]))
            difference = abs(apart(joined))
            if difference <= most_s or difference <= abs(apart(sums[number])):
                packed[number].append(at)
                sums[number] = joined
                free[number] -= taken
                break
        else:
            packed.append([at])
            sums.append(mixes[at])
            free.append(limits.most - taken)
    return tuple(tuple(sorted(each)) for each in packed)


def fewest(mixes: Sequence[Mix], limits: BufferLimits) -> Packing:
    """First-fit decreasing: at most 2 f + 1 mini-batches where all requests fill the buffers f times, as two mini-batches
    never fit into one. Raises InvalidArgument (fields request, taken, most; bytes) if a request fits into no mini-batch."""
    return first_fit(mixes, limits, sorted(range(len(mixes)), key=lambda at: (-limits.taken(mixes[at]), at)))


def least(packings: Sequence[Packing], seconds: Callable[[Packing], float]) -> tuple[float, Packing]:
    """The packing with the shortest pass, of equals the one with the fewest mini-batches, and its seconds."""
    timed = [(seconds(packing), packing) for packing in packings]
    return min(timed, key=lambda each: (each[0], len(each[1])))


def require_room(mixes: Sequence[Mix], limits: BufferLimits) -> None:
    """Raises InvalidArgument, as `fewest`."""
    for at, mix in enumerate(mixes):
        if not limits.holds(mix):
            raise InvalidArgument(
                f"request {at} takes {limits.taken(mix)} bytes of buffers for one layer, and they have {limits.most}; nothing "
                "changed; make the buffers larger or the request shorter",
                request=at,
                taken=limits.taken(mix),
                most=limits.most,
            )
