# SPDX-License-Identifier: Apache-2.0
"""Which layers make the shortest pass: the only choice of layers that takes a search. Pure; arguments are trusted.

`TenantState.select` (memory/state.py) makes all other choices, which depend on the layers that stream now.

One buffer: streamed layer k waits for (tau_k - W_k)+, W_k the computation since streamed layer k - 1, and these waits add
up around the circle. So the best set is a shortest closed walk with m stops: exact dynamic programming over (first, last,
count). Two buffers and more: the waits depend on each other. Copy k may then run while layer k - 1 computes, so
(tau_k - W_k - c_{k-1})+ bounds its wait from above, and the same programme finds the set with the least bound; it is one
start of a local search that is judged by the exact period. Source: derived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import add

from remap.policy.maxplus import ROUNDING, copied_uses, pass_period
from remap.policy.schedule import RELATIVE_EPSILON, uniform, uniform_fixed
from remap.policy.views import LayerSeconds

__all__ = ["EVALUATIONS", "Problem", "best_double", "best_pair", "best_set", "hidden", "least_walk"]

EVALUATIONS = 300
"""Exact periods that the local search computes at most: the cap is a count, so that the same question has one answer."""


def best_set(
    order: Sequence[int], remapped: int, buffers: int, times: LayerSeconds, present: Iterable[int] = ()
) -> tuple[int, ...]:
    """The remapped + buffers layers of `order` that make the shortest pass, ascending. Arguments are trusted.

    order: the streamable layers (pinned ones are left out) in the nested order. remapped: at least 1. times: of each of
    the model's layers. present: the layers streamed now; those not in `order` are ignored.

    One buffer, or one layer remapped: the exact optimum for any layer times. More: the best of a search from several
    starts, at most `EVALUATIONS` exact periods, never worse than the nested, `uniform` and `uniform_fixed` sets.
    Among optima that differ by less than `RELATIVE_EPSILON` of a pass, present layers win, then those early in
    `order`. Source: derived.
    """
    layers, here, m = sorted(order), frozenset(present), remapped + buffers
    n = len(layers)
    if m == n:
        return tuple(layers)
    starts = [
        sorted(order[:m]),
        *(
            [sorted(sorted(order, key=lambda layer: layer not in here)[:m])] if here else []
        ),  # what is present, and more
        *([layers[index] for index in even(n, remapped, buffers)] for even in (uniform, uniform_fixed)),
    ]
    # Each layer's penalty, lexicographic in one number: not being present weighs more than all ranks together.
    bias = [0.0] * len(times.compute_s)
    for rank, layer in enumerate(order):
        bias[layer] = 0.5 * (layer not in here) + 0.5 * rank / (n * (n + 1))
    problem = Problem(times.compute_s, times.transfer_s, layers, m, buffers, bias)
    if buffers == 1:
        return least_walk(problem)
    starts.sort(key=lambda streamed: len(here.symmetric_difference(streamed)))  # the first of equals stays
    return best_double(problem, [tuple(start) for start in starts])


class Problem:
    """One question: m of the streamable `layers` (ascending), with `buffers` ring buffers and fixed slots.

    compute, transfer: n floats >= 0. m: layers to choose, buffers < m <= len(layers). bias: layer -> how unwelcome it is,
    0..1, which decides between sets whose periods differ by less than `RELATIVE_EPSILON` of a pass.
    """

    def __init__(
        self,
        compute: Sequence[float],
        transfer: Sequence[float],
        layers: Sequence[int],
        m: int,
        buffers: int,
        bias: Sequence[float],
    ) -> None:
        self.compute = compute
        self.transfer = transfer
        self.layers = layers
        self.m = m
        self.buffers = buffers
        self.bias = bias  # by layer
        self.total = math.fsum(compute)
        self.evaluated = 0

    def period(self, streamed: Sequence[int]) -> float:
        """The exact period of an ascending set; counted."""
        self.evaluated += 1
        if hidden(self.compute, self.transfer, streamed, self.buffers, self.total):
            return self.total
        return pass_period(self.compute, self.transfer, streamed, self.buffers, "fixed", self.total)

    def least(self) -> float:
        """A lower bound of the period of every set: the m cheapest layers on the copy engine, and on each buffer."""
        copied = len(copied_uses(self.m, self.buffers, "fixed"))
        cheapest = sorted(self.transfer[layer] for layer in self.layers)
        bound = max(self.total, math.fsum(cheapest[:copied]))
        if copied == self.m:  # a buffer is either copied into or computed from; the busiest has at least the mean
            turns = sorted(self.transfer[layer] + self.compute[layer] for layer in self.layers)
            bound = max(bound, math.fsum(turns[: self.m]) / self.buffers)
            bound = max(bound, math.fsum(turns[: -(-self.m // self.buffers)]))
        return bound


def hidden(
    compute: Sequence[float], transfer: Sequence[float], streamed: Sequence[int], buffers: int, total: float
) -> bool:
    """Whether no copy is waited for. streamed: ascending. Time O(n), exact to rounding.

    If nothing waits, every layer starts when the computation before it says. Then the copies' ends follow by themselves,
    and it remains to see whether each comes in time. This is the window test (every L >= beta consecutive streamed layers
    have time for their L - beta + 1 copies in their L gaps and L - 1 computations) with all windows ending at one layer
    taken together, for fixed slots whether or not the buffers divide m. Two passes show everything: a copy engine that is
    busy for at most a pass in each pass carries nothing over from the one before the last.
    """
    uses = copied_uses(len(streamed), buffers, "fixed")
    if math.fsum(transfer[streamed[j]] for j in uses) > total * (1.0 + ROUNDING):
        return False
    begins = list(accumulate(compute, initial=0.0))
    last: dict[int, float] = {}
    copied = -math.inf
    slack = ROUNDING * total
    for base in (0.0, total, 2.0 * total):
        for j in uses:
            layer = streamed[j]
            free = last.get(j % buffers, -math.inf)
            copied = max(copied, free)
            copied += transfer[layer]
            starts = base + begins[layer]
            if copied > starts + slack:
                return False
            last[j % buffers] = starts + compute[layer]
    return True


# ------------------------------------------------------------------------------------------- dynamic programme


def least_walk(problem: Problem) -> tuple[int, ...]:
    """The m layers, ascending, of the least closed walk around the circle of streamable layers.

    A stop j after stop i costs (tau_j - W_ij)+: for one buffer the exact optimum. With two buffers and more it costs
    (tau_j - W_ij - c_i)+, except that around the end of the pass, where the buffers do not divide the stops, c_i gives no
    relief: the first layer's buffer may be the last one's. Time O(n^3 m).
    """
    layers, m, total = problem.layers, problem.m, problem.total
    size = len(layers)
    begins = list(accumulate(problem.compute, initial=0.0))
    starts = [begins[layer] for layer in layers]
    ends = [begins[layer + 1] for layer in layers]
    tie = total * RELATIVE_EPSILON / size
    tau = [problem.transfer[layer] for layer in layers]
    relief = [problem.compute[layer] if problem.buffers > 1 else 0.0 for layer in layers]
    bias = [tie * problem.bias[layer] for layer in layers]
    # into[j][i]: the cost of stop j after i < j
    into = [[max(0.0, tau[j] - (starts[j] - ends[i]) - relief[i]) + bias[j] for i in range(j)] for j in range(size)]
    divides = m % problem.buffers == 0
    least, begin, at = math.inf, 0, m - 1
    best: list[list[float]] = []
    for first in range(size - m + 1):
        rows = [
            [0.0]
        ]  # rows[k][j]: the least cost from `first` to j with k stops after `first`; j counts from first + k
        for k in range(1, m):
            before, low = rows[-1], first + k - 1  # its entry 0 is place `low`
            end = size - (m - 1 - k)  # m - 1 - k more stops lie behind j
            rows.append([min(map(add, before, into[j][low:j])) for j in range(low + 1, end)])
        for last, cost in enumerate(rows[-1], first + m - 1):
            wait = tau[first] - (total - ends[last] + starts[first])
            cost += max(0.0, wait - relief[last] if divides else wait) + bias[first]
            if cost < least:
                least, begin, at, best = cost, first, last, rows
    walk = [at]
    for k in range(m - 1, 0, -1):
        low = begin + k - 1
        costs = list(map(add, best[k - 1], into[at][low:at]))
        at = low + costs.index(min(costs))
        walk.append(at)
    return tuple(layers[place] for place in reversed(walk))


# ------------------------------------------------------------------------------------------- two buffers and more


def best_pair(problem: Problem) -> tuple[int, ...]:
    """The exact optimum for m = buffers + 1, one layer remapped: only the first and the last streamed layer share a buffer
    and are copied, each after the other; the layers between them stay in buffers of their own. Time O(n^2)."""
    layers, total = problem.layers, problem.total
    begins = list(accumulate(problem.compute, initial=0.0))
    tau, bias = problem.transfer, problem.bias
    tie = total * RELATIVE_EPSILON / len(layers)
    best = math.inf
    chosen: tuple[int, ...] = ()
    for low, first in enumerate(layers):
        for high in range(low + problem.buffers, len(layers)):
            last = layers[high]
            between = begins[last] - begins[first + 1]
            around = total - begins[last + 1] + begins[first]
            cost = max(0.0, tau[last] - between) + max(0.0, tau[first] - around) + tie * (bias[first] + bias[last])
            if cost < best:
                kept = sorted(layers[low + 1 : high], key=lambda layer: bias[layer])[: problem.buffers - 1]
                best, chosen = cost, (first, *sorted(kept), last)
    return chosen


def best_double(problem: Problem, starts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The best set found for two buffers and more: the starts given and others, then moves of one layer at a time.

    Exact for one layer remapped. Else not always the optimum (tests/python/test_selection_properties.py says how far off it
    was found to be), never worse than any start.
    Stops early where `Problem.least` proves the optimum. Deterministic; at most about `EVALUATIONS` exact periods.
    """
    if problem.m == problem.buffers + 1:
        return best_pair(problem)
    least = problem.least() * (1.0 + RELATIVE_EPSILON)
    best: tuple[int, ...] = ()
    best_period = math.inf
    tried: list[tuple[float, tuple[int, ...]]] = []
    for start in _starts(problem, starts):
        if any(start == known for _, known in tried):
            continue
        period = problem.period(start)
        tried.append((period, start))
        if period < best_period - RELATIVE_EPSILON * problem.total:
            best, best_period = start, period
        if best_period <= least:
            return best
    tried.sort(key=lambda entry: entry[0])
    for period, start in tried:
        if problem.evaluated >= EVALUATIONS:
            break
        period, found = _descend(problem, start, period, least)
        if period < best_period - RELATIVE_EPSILON * problem.total:
            best, best_period = found, period
        if best_period <= least:
            break
    return best


def _starts(problem: Problem, given: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    yield from given
    layers, m, buffers = problem.layers, problem.m, problem.buffers
    for even in (uniform, uniform_fixed):
        yield tuple(layers[index] for index in even(len(layers), m - buffers, buffers))
    yield least_walk(problem)
    yield tuple(layers[:m])
    yield tuple(layers[-m:])
    yield tuple(sorted(sorted(layers, key=lambda layer: (problem.transfer[layer], layer))[:m]))


def _descend(problem: Problem, streamed: tuple[int, ...], period: float, least: float) -> tuple[float, tuple[int, ...]]:
    """Moves one layer at a time while that shortens the pass: to the next layer not streamed first, then anywhere."""
    improved = True
    limit = min(EVALUATIONS, problem.evaluated + EVALUATIONS // 3)
    while improved and period > least:
        improved = False
        goal = period - RELATIVE_EPSILON * problem.total
        # Where every streamed layer is copied, the copies alone tell most useless moves.
        all_copied = problem.m >= 2 * problem.buffers
        load = math.fsum(problem.transfer[layer] for layer in streamed) if all_copied else -math.inf
        for layer, other in _moves(problem, streamed):
            if problem.evaluated >= limit:
                return period, streamed
            if load - problem.transfer[layer] + problem.transfer[other] >= goal:
                continue
            candidate = tuple(sorted(other if known == layer else known for known in streamed))
            found = problem.period(candidate)
            if found < goal:
                period, streamed, improved = found, candidate, True
                break
    return period, streamed


def _moves(problem: Problem, streamed: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(layer that leaves, layer that comes), by their distance among the streamable layers."""
    layers = problem.layers
    taken = set(streamed)
    places = [index for index, layer in enumerate(layers) if layer in taken]
    for distance in range(1, len(layers)):
        for place in places:
            for index in (place - distance, place + distance):
                if 0 <= index < len(layers) and layers[index] not in taken:
                    yield layers[place], layers[index]
