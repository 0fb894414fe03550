"""Slow, obvious answers to "how much KV, how much activations, and which requests together": everything is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

Sizes = tuple[int, int]  # activations, KV


def blocks_one_by_one(blocks: int, activations: int, kv: int) -> int:
    """How many of the first blocks keep activations, if each is of the kind that is furthest below its share."""
    share = Fraction(activations, activations + kv)
    have = {True: 0, False: 0}
    for number in range(1, blocks + 1):
        lacks = {True: share * number - have[True], False: (1 - share) * number - have[False]}
        have[lacks[True] >= lacks[False]] += 1
    return have[True]


def divisions(blocks: Sequence[int]) -> set[tuple[int, ...]]:
    """Every number of activations, request by request, that some ratio gives. All ratios of small numbers are tried."""
    most = 2 * max(blocks) + 1
    return {
        tuple(blocks_one_by_one(each, a, k) for each in blocks)
        for a in range(most + 1)
        for k in range(most + 1)
        if a + k
    }


def packings(items: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to put items into mini-batches."""

    def placed(at: int, groups: list[list[int]]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if at == items:
            yield tuple(tuple(group) for group in groups)
            return
        for group in groups:
            group.append(at)
            yield from placed(at + 1, groups)
            group.pop()
        yield from placed(at + 1, [*groups, [at]])

    yield from placed(0, [])


def fewest(sizes: Sequence[int], most: int) -> int:
    """The fewest mini-batches of at most `most` each."""
    return min(
        len(each) for each in packings(len(sizes)) if all(sum(sizes[at] for at in group) <= most for group in each)
    )


def least_seconds(ratios: Sequence[Sizes], seconds: Callable[[Sizes], float | None]) -> float:
    """The least of all ratios that fit; None: one that does not."""
    return min(found for found in map(seconds, ratios) if found is not None)
