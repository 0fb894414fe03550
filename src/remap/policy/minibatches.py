"""Which requests are computed together: bin packing of an offline batch into mini-batches. Pure.

A mini-batch's blocks of one layer must fit into the buffers on the device. All mini-batches go through a layer before the
next layer begins (`layerwise`), so the layer's weights are loaded once for all of them.
Source: HybridServe, section 4.3.3 (`as_in_the_paper`); derived (`candidates`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from remap.errors import InvalidArgument
from remap.policy.activations import Line

__all__ = [
    "Limits",
    "Mix",
    "Packing",
    "as_in_the_paper",
    "candidates",
    "fewest",
    "first_fit",
    "imbalance",
    "least",
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
class Limits:
    """What the buffers on the device hold of one mini-batch. most: bytes; kv, activations, held: what one block takes of
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


def imbalance(mix: Mix, recompute: Line, load_kv: Line) -> float:
    """F_b of HybridServe's Eq. 12 and 13: by which factor making K and V again takes longer than loading KV, or the other
    way round; at least 1.

    Decided here, where the paper is silent: without any block it is 1; with blocks of one kind only it is infinite. The
    lines' base is left out: it is paid once by a mini-batch, so that with it a second request of the same ratio changes F_b
    although it changes nothing about the balance.
    """
    make, load = recompute.each_s * mix.recomputed, load_kv.each_s * mix.kv
    if make == load:
        return 1.0
    return max(make / load, load / make) if make and load else math.inf


def as_in_the_paper(mixes: Sequence[Mix], limits: Limits, recompute: Line, load_kv: Line) -> Packing:
    """HybridServe's greedy packing: a mini-batch takes, in the order given, each request that fits and that does not raise
    its F_b; then the next one begins.

    The paper says "reduces": requests of one ratio never do, and each would be alone. So "does not raise" is what is
    meant. A mini-batch begins with the first request that is left. Errors as for `candidates`.
    """
    _check(mixes, limits)
    left, packed = list(range(len(mixes))), list[tuple[int, ...]]()
    while left:
        taken, mix = [left[0]], mixes[left[0]]
        for at in left[1:]:
            joined = total((mix, mixes[at]))
            allowed = imbalance(mix, recompute, load_kv) * (1.0 + 1e-9)  # equal but for rounding
            if limits.holds(joined) and imbalance(joined, recompute, load_kv) <= allowed:
                taken.append(at)
                mix = joined
        packed.append(tuple(taken))
        gone = set(taken)
        left = [at for at in left if at not in gone]
    return tuple(packed)


def first_fit(
    mixes: Sequence[Mix],
    limits: Limits,
    order: Iterable[int],
    apart: Callable[[Mix], float] = lambda mix: 0.0,
    most_s: float = math.inf,
) -> Packing:
    """Each request, in `order`, into the first mini-batch that it fits into, else into a new one.

    apart: seconds that the two pipelines of a mini-batch differ by, signed; beyond `most_s` no request may join if it makes
    the difference larger. Errors as for `candidates`.
    """
    _check(mixes, limits)
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


def fewest(mixes: Sequence[Mix], limits: Limits) -> Packing:
    """First-fit decreasing: at most 2 f + 1 mini-batches where all requests fill the buffers f times, as two mini-batches
    never fit into one. Errors as for `candidates`."""
    return first_fit(mixes, limits, sorted(range(len(mixes)), key=lambda at: (-limits.taken(mixes[at]), at)))


def even(mixes: Sequence[Mix], limits: Limits, count: int, seconds: Callable[[Mix], float]) -> Packing | None:
    """Each request, the longest first, into the mini-batch of `count` that has the least `seconds` of those that it fits
    into. None if one fits into none of them."""
    packed, sums = [list[int]() for _ in range(count)], [total(())] * count
    for at in sorted(range(len(mixes)), key=lambda at: (-seconds(mixes[at]), at)):
        fitting = [number for number in range(count) if limits.holds(total((sums[number], mixes[at])))]
        if not fitting:
            return None
        number = min(fitting, key=lambda number: (seconds(sums[number]), number))
        packed[number].append(at)
        sums[number] = total((sums[number], mixes[at]))
    return tuple(tuple(sorted(each)) for each in packed if each)


def candidates(
    mixes: Sequence[Mix], limits: Limits, recompute: Line, load_kv: Line, load_activations: Line
) -> list[Packing]:
    """Ways to pack all requests, the paper's first; `least` chooses.

    `fewest`. The same with a bound on the difference of the pipelines: 1.25 times the mean difference of its mini-batches.
    And even ones, as many as are needed at least.

    Raises InvalidArgument (fields request, taken, most; bytes) if a request fits into no mini-batch.
    """

    def make(mix: Mix) -> float:
        return recompute.each_s * mix.recomputed

    def load(mix: Mix) -> float:
        return load_kv.each_s * mix.kv + load_activations.each_s * mix.activations

    decreasing = sorted(range(len(mixes)), key=lambda at: (-limits.taken(mixes[at]), at))
    tried = [as_in_the_paper(mixes, limits, recompute, load_kv), fewest(mixes, limits)]
    count = min(len(packing) for packing in tried)
    if count > 1:
        mean = abs(sum(make(mix) - load(mix) for mix in mixes)) / count
        tried.append(first_fit(mixes, limits, decreasing, lambda mix: make(mix) - load(mix), 1.25 * mean))
        found = even(mixes, limits, count, lambda mix: max(make(mix), load(mix)))
        tried += [found] if found else []
    return list(dict.fromkeys(tried))


def least(packings: Sequence[Packing], seconds: Callable[[Packing], float]) -> tuple[float, Packing]:
    """The packing with the shortest pass, of equals the one with the fewest mini-batches, and its seconds."""
    timed = [(seconds(packing), packing) for packing in packings]
    return min(timed, key=lambda each: (each[0], len(each[1])))


def _check(mixes: Sequence[Mix], limits: Limits) -> None:
    for at, mix in enumerate(mixes):
        if not limits.holds(mix):
            raise InvalidArgument(
                f"request {at} takes {limits.taken(mix)} bytes of buffers for one layer, and they have {limits.most}; nothing "
                "changed; make the buffers larger or the request shorter",
                request=at,
                taken=limits.taken(mix),
                most=limits.most,
            )
