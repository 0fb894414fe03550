"""Capacity, divisions of layers and drop plans by trying everything. Tests `remap_serve.policy.cluster`; no sums are kept,
nothing is greedy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

Run = tuple[int, int]


def tokens_of(model: Any, memory_bytes: int, held: Sequence[int], run: Run, most: int = 10_000) -> int:
    """The most tokens whose KV fits, by counting up: -1 if not even the weights do, `most` if there is no end."""
    weights = sum(model.layers[layer].weight_bytes for layer in held)
    each = sum(model.layers[layer].kv_bytes for layer in range(*run))
    tokens = -1
    while tokens < most and weights + (tokens + 1) * each <= memory_bytes:
        tokens += 1
    return tokens


def divisions(count: int, stages: int) -> Iterator[tuple[Run, ...]]:
    """Every way to give consecutive runs of `count` layers to stages in order, empty ones too."""
    for cuts in itertools.combinations_with_replacement(range(count + 1), stages - 1):
        ends = (0, *cuts, count)
        yield tuple(zip(ends, ends[1:]))


def possible(stages: Sequence[Any], runs: Sequence[Run]) -> bool:
    return all(stage.holds(layer) for stage, run in zip(stages, runs) for layer in range(*run))


def capacity(model: Any, stages: Sequence[Any], runs: Sequence[Run]) -> int:
    return min(
        tokens_of(model, stage.instance.memory_bytes, range(*run), run)
        for stage, run in zip(stages, runs)
        if run[0] < run[1]
    )


def most_tokens(model: Any, stages: Sequence[Any]) -> int:
    """Over every order of the instances and every division of the layers that they hold."""
    return max(
        capacity(model, order, runs)
        for order in itertools.permutations(stages)
        for runs in divisions(len(model.layers), len(stages))
        if possible(order, runs)
    )


def least_slowest(model: Any, stages: Sequence[Any], tokens: int, microbatch: int) -> float:
    """In this order, over every division that leaves room for so many tokens."""
    return min(
        max(sum(model.layers[layer].seconds(microbatch) for layer in range(*run)) for run in runs)
        for runs in divisions(len(model.layers), len(stages))
        if possible(stages, runs) and capacity(model, stages, runs) >= tokens
    )


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to divide items into parts: the first one with any of the others, and the rest in every way."""
    if not items:
        yield []
        return
    first, others = items[0], items[1:]
    for size in range(len(others) + 1):
        for mates in itertools.combinations(others, size):
            for rest in partitions([item for item in others if item not in mates]):
                yield [[first, *mates], *rest]
