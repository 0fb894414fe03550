# SPDX-License-Identifier: Apache-2.0
"""The cost of a microbatch, and the division of the queue into microbatches of equal cost. Pure.

A chunk is a run of tokens of one request behind a prefix whose KV is there. Its cost is attention to the prefix and to itself,
work that is linear in its tokens, and a constant; a microbatch is the sum of its chunks less (k - 1) times what k chunks load
only once, the weights (KunServe, section 4.3, equations 1 to 3; the symbols of equation 1 are lost in the text). Written
here so that nothing is subtracted: `batch_s` once for a microbatch and `chunk_s` for each chunk. A query attends to each of
its prefix and, on average, to half of its own chunk; kernels that compute whole tiles take more for the latter, never less:

    chunk = pair_s (prefix tokens + tokens ^ 2 / 2) + masked_s tokens ^ 2 + token_s tokens + chunk_s

So a run of tokens that is shortened at either end costs no more, which makes `balanced` exact.

Requests stay in their order, so a request's chunks pass the pipeline in theirs, and are divided at multiples of `grain` tokens
(blocks of KV; a few tokens use a device badly). In stages of equal length a queue takes as long as all its microbatches
and (stages - 1) times the largest; so `balanced` minimises the largest, and `lookahead` says how many there are. Where
microbatches come back for their next token, as many as stages are enough: a round takes as long as the largest.

The paper's division is `halved`: cut the queue where the cost is halved, and each half again. It is a heuristic: cuts
that were right for two parts need not be for four.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from remap.errors import InvalidArgument
from remap_serve.policy.least_squares import shares

from .pipeline import equal_stages_s

__all__ = ["ChunkCost", "Microbatch", "QueuedChunk", "Waiting", "balanced", "fit", "halved", "lookahead"]


@dataclass(frozen=True)
class Waiting:
    """A request with `tokens` tokens to compute, behind `prefix` whose KV is there. One that decodes has one token."""

    prefix: int
    tokens: int


@dataclass(frozen=True)
class QueuedChunk:
    """Tokens of the request at this place in the queue; prefix: how many stand before them."""

    request: int
    prefix: int
    tokens: int


Microbatch = tuple[QueuedChunk, ...]


@dataclass(frozen=True)
class ChunkCost:
    """Seconds of a pass through all layers (see the module); none below 0. The paper's factors are pair_s of the prefix,
    pair_s / 2 + masked_s of the chunk's square, token_s, and chunk_s + batch_s of each chunk, less batch_s for all but one."""

    pair_s: float
    masked_s: float
    token_s: float
    chunk_s: float
    batch_s: float

    def chunk(self, prefix: int, tokens: int) -> float:
        """Of one chunk, without the cost of a microbatch as such; of no tokens 0."""
        if not tokens:
            return 0.0
        attention = self.pair_s * (prefix * tokens + tokens * tokens / 2) + self.masked_s * tokens * tokens
        return attention + self.token_s * tokens + self.chunk_s

    def tokens(self, prefix: int, seconds: float) -> int:
        """Of the longest chunk behind this prefix that costs at most so much, but for rounding; `sys.maxsize` if any does."""
        # half n^2 + linear n = left, solved without subtracting nearly equal numbers.
        half, left = self.pair_s / 2 + self.masked_s, seconds - self.chunk_s
        linear = self.pair_s * prefix + self.token_s
        if left < 0.0:
            return 0
        # hypot: the square of a small number may be 0.
        divisor = linear + math.hypot(linear, 2.0 * math.sqrt(half) * math.sqrt(left))
        most = 2.0 * left / divisor if divisor else math.inf
        return math.floor(most) if most < sys.maxsize else sys.maxsize

    def microbatch(self, chunks: Iterable[QueuedChunk]) -> float:
        """Of chunks that are computed together; of none 0."""
        costs = [self.chunk(chunk.prefix, chunk.tokens) for chunk in chunks]
        return math.fsum([*costs, self.batch_s]) if costs else 0.0


def fit(passes: Iterable[tuple[Sequence[QueuedChunk], float]]) -> ChunkCost:
    """The cost that is nearest to measured passes, (chunks, seconds), by the sum of squared relative errors.

    Raises InvalidArgument (fields passes, needed) for fewer passes than factors, or seconds that are not finite and above
    0; InvalidState (fields extra, package) without scipy.
    """
    given = [(list(chunks), float(seconds)) for chunks, seconds in passes]
    if len(given) < 5 or not all(chunks and 0.0 < seconds < math.inf for chunks, seconds in given):
        raise InvalidArgument(
            f"a fit of five factors needs at least as many passes, of finite seconds above 0; got {len(given)}; nothing was "
            "fitted; measure more",
            passes=len(given),
            needed=5,
        )
    rows = [
        (
            sum(each.prefix * each.tokens + each.tokens**2 / 2 for each in chunks),
            float(sum(each.tokens**2 for each in chunks)),
            float(sum(each.tokens for each in chunks)),
            float(len(chunks)),
            1.0,
        )
        for chunks, _ in given
    ]
    return ChunkCost(*shares(rows, [seconds for _, seconds in given]))


def halved(requests: Sequence[Waiting], cost: ChunkCost, count: int, grain: int = 1) -> list[Microbatch]:
    """KunServe's divide and conquer into at most `count` microbatches.

    Decided here: it ends when there are `count`, not when halves look balanced, which they always do; an odd count is
    divided in that proportion; the cut is where the first part's cost is nearest to its share; a part with
    fewer than two grains of tokens is not divided.
    """
    queue = _Queue(requests, cost, grain)

    def divided(first: int, end: int, parts: int) -> list[int]:
        if parts == 1 or end - first < 2:
            return [end]
        wanted = queue.seconds(first, end) * (parts // 2) / parts
        cut = queue.reach(first, wanted)
        over, under = queue.seconds(first, min(cut + 1, end)) - wanted, wanted - queue.seconds(first, cut)
        middle = min(max(cut + (over < under), first + 1), end - 1)
        return [*divided(first, middle, parts // 2), *divided(middle, end, parts - parts // 2)]

    return queue.microbatches(divided(0, queue.cuts, count) if queue.cuts else [])


def balanced(requests: Sequence[Waiting], cost: ChunkCost, count: int, grain: int = 1) -> list[Microbatch]:
    """At most `count` (>= 1) microbatches, of which the largest costs as little as possible: exact for chunks in the order of
    the queue, divided at multiples of `grain`.

    Filling each as far as a bound allows needs the fewest microbatches for it. Each bound that is too low says which is the
    next higher one that changes anything; each that suffices, the tokens really needed.
    """
    queue = _Queue(requests, cost, grain)
    best = [queue.cuts] if queue.cuts else []
    low, high = queue.least(count), queue.seconds(0, queue.cuts)
    stride = low / 256  # the optimum is near the lower bound where places are many
    while low < high:
        bound = min((low + high) / 2, low + stride) if stride else (low + high) / 2
        # Below `high`, which the mean of two neighbours may be, and then never beyond or below the bound: costs that are equal
        # but for rounding must not keep this going.
        bound = min(bound, math.nextafter(high, low))
        ends, more = queue.filled(bound, count)
        if ends and ends[-1] == queue.cuts:
            best, high = ends, min(bound, max(map(queue.seconds, [0, *ends], ends)))
        else:
            low, stride = max(more, math.nextafter(bound, math.inf)), 4 * stride
    return queue.microbatches(best)


def lookahead(requests: Sequence[Waiting], cost: ChunkCost, stages: int, grain: int = 1) -> list[Microbatch]:
    """The queue divided for a pipeline of `stages` equal stages: into m microbatches or one more or less, by `balanced` or
    `halved`, whichever passes soonest.

    m microbatches of C seconds of work take C + m batch_s + (stages - 1) (C / m + batch_s), divided by the stages: more of
    them leave smaller bubbles and load the weights more often. So m is near the root of (stages - 1) C / batch_s. Halving
    may win by where it divides requests: what that costs, or saves, is not part of the largest microbatch alone.
    """
    queue = _Queue(requests, cost, grain)
    work = queue.seconds(0, queue.cuts) - cost.batch_s
    best = min(math.sqrt((stages - 1) * work / cost.batch_s), queue.cuts) if cost.batch_s and queue.cuts else queue.cuts
    found: tuple[float, list[Microbatch]] = (math.inf, [])
    for count in range(max(1, round(best) - 1), round(best) + 2):
        for divided in (balanced(requests, cost, count, grain), halved(requests, cost, count, grain)):
            seconds = equal_stages_s([cost.microbatch(each) / stages for each in divided], stages)
            if seconds < found[0]:
                found = seconds, divided
    return found[1]


class _Queue:
    """Requests in a row, with the places where they may be divided: 0, each multiple of `grain` in a request, and the ends of
    requests. cuts: the last place."""

    def __init__(self, requests: Sequence[Waiting], cost: ChunkCost, grain: int) -> None:
        if grain < 1 or any(request.tokens < 0 or request.prefix < 0 for request in requests):
            raise InvalidArgument(
                f"requests are divided at multiples of at least one token, and have none below 0; got {grain} and "
                f"{len(requests)} requests; nothing changed; correct them",
                grain=grain,
                requests=requests,
            )
        self._cost, self._grain = cost, grain
        self._numbers = [number for number, request in enumerate(requests) if request.tokens]
        self._requests = [requests[number] for number in self._numbers]
        # Of the first i requests: how many places they have, and their whole cost.
        self._places = list(accumulate((-(-each.tokens // grain) for each in self._requests), initial=0))
        whole = (cost.chunk(each.prefix, each.tokens) for each in self._requests)
        self._whole = list(accumulate(whole, initial=0.0))
        self.cuts = self._places[-1]

    def least(self, count: int) -> float:
        """No division into `count` microbatches has a lower largest cost: attention to earlier tokens is the same in all."""
        if not self.cuts:
            return 0.0
        causal = replace(self._cost, masked_s=0.0)
        work = math.fsum(causal.chunk(each.prefix, each.tokens) for each in self._requests)
        return self._cost.batch_s + work / count * (1.0 - 1e-12)

    def _at(self, place: int) -> tuple[int, int]:
        """The request that a place is in, and how many of its tokens stand before it; of the last place none."""
        number = bisect_right(self._places, place) - 1
        return number, (place - self._places[number]) * self._grain

    def _part(self, number: int, first: int, end: int) -> float:
        prefix = self._requests[number].prefix
        return self._cost.chunk(prefix + first, end - first)

    def seconds(self, first: int, end: int) -> float:
        """Of a microbatch from place to place; 0 if they are the same."""
        if first == end:
            return 0.0
        (begun, before), (ended, after) = self._at(first), self._at(end)
        if begun == ended:
            return self._cost.batch_s + self._part(begun, before, after)
        whole = self._whole[ended] - self._whole[begun + 1]
        head = self._part(begun, before, self._requests[begun].tokens)
        tail = self._part(ended, 0, after) if after else 0.0
        return self._cost.batch_s + head + whole + tail

    def reach(self, first: int, bound: float) -> int:
        """The last place to which a microbatch from `first` costs at most so much; `first` itself costs nothing."""
        places = range(first, self.cuts + 1)
        return first + bisect_right(places, bound, key=lambda end: self.seconds(first, end)) - 1

    def filled(self, bound: float, count: int) -> tuple[list[int], float]:
        """Where microbatches end of which each is filled up to the bound, at most `count` of them; and the least bound above
        it that would change one. One place is taken at least by none: then they end before it."""
        ends, first, more = list[int](), 0, math.inf
        while first < self.cuts and len(ends) < count:
            end = self.reach(first, bound)
            if end < self.cuts:
                more = min(more, self.seconds(first, end + 1))
            if end == first:
                break
            ends.append(end)
            first = end
        return ends, more

    def microbatches(self, ends: Sequence[int]) -> list[Microbatch]:
        """From the first place to each of these, in turn."""
        found = []
        for first, end in zip([0, *ends], ends):
            (begun, before), (ended, after) = self._at(first), self._at(end)
            chunks = []
            for place in range(begun, ended + (after > 0)):
                request = self._requests[place]
                begin = before if place == begun else 0
                stop = after if place == ended else request.tokens
                chunks.append(QueuedChunk(self._numbers[place], request.prefix + begin, stop - begin))
            found.append(tuple(chunks))
        return found
