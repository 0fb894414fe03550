"""HybridServe's own packing of requests into mini-batches, and others that are compared with it. Pure.

Source: HybridServe, section 4.3.3 (`as_in_the_paper`); derived (`candidates`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from remap_serve.policy.activations import Line
from remap_serve.policy.minibatches import BufferLimits, Mix, Packing, fewest, first_fit, require_room, total

__all__ = ["as_in_the_paper", "candidates", "imbalance"]


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


def as_in_the_paper(mixes: Sequence[Mix], limits: BufferLimits, recompute: Line, load_kv: Line) -> Packing:
    """HybridServe's greedy packing: a mini-batch takes, in the order given, each request that fits and that does not raise
    its F_b; then the next one begins.

    The paper says "reduces": requests of one ratio never do, and each would be alone. So "does not raise" is what is
    meant. A mini-batch begins with the first request that is left. Errors as for `candidates`.
    """
    require_room(mixes, limits)
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


def candidates(
    mixes: Sequence[Mix], limits: BufferLimits, recompute: Line, load_kv: Line, load_activations: Line
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
        found = _even(mixes, limits, count, lambda mix: max(make(mix), load(mix)))
        tried += [found] if found else []
    return list(dict.fromkeys(tried))


def _even(mixes: Sequence[Mix], limits: BufferLimits, count: int, seconds: Callable[[Mix], float]) -> Packing | None:
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
