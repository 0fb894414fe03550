# SPDX-License-Identifier: Apache-2.0
"""Which consecutive layers each instance of a group computes: most tokens first, then the least slowest stage. Pure.

Nothing is copied: a stage's run lies within the layers that its instance holds. So a drop takes effect at once, and a complete
copy exists at every moment of it. A run may be empty: then the instance computes nothing, which happens only where the
others suffice (more instances than layers), or where a group cannot be divided further without copies.

Both questions are one: runs in a row, each worth something, of which the least counts. A run that is shortened at either end
is worth no less. So if best[j] is the most that the first j layers are worth among the stages before, it falls with j; what
one more stage makes of the layers from j to k rises with j; and the best j for k is where they cross, which moves forward
with k. One stage takes O(layers).

The order of the stages matters where instances differ, in memory or in the layers that they hold. The exact best order is
found by the same step over every set of instances; sets that differ only in which of several equal instances they have are
one. Where there are more than `orders` sets, the instances stand in the order of the middle of what they computed. In the
order found, the runs are then those of the least slowest stage that keep the tokens.

Source: derived (partition of a sequence into consecutive parts; KunServe is silent about who computes which layers).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from .placement import UNLIMITED, PlannedStage, ServedLayers

__all__ = ["ORDERS", "Splits"]

ORDERS = 256
"""Sets of instances of one group that are compared: all of 8 instances."""

_Worth = Callable[[int, int], float]


class _Kind(NamedTuple):
    """The values that make instances equal. middle: twice the middle of the layers computed until now. until: for each layer the
    first from there on that they lack."""

    middle: int
    memory_bytes: int
    until: tuple[int, ...]


class _Row(NamedTuple):
    """For each k: the most that the first k layers are worth, where the last stage begins then, and of which kind it is.
    before: kind of the last stage -> the row without it. behind: kind of one more stage -> the row in just that order."""

    best: list[float]
    begins: list[int]
    kinds: list[int]
    before: dict[int, _Row]
    behind: dict[int, _Row]


class Splits:
    """The divisions of one model's layers; each is computed once. orders: the most sets of instances of one group that are
    compared for its best order."""

    def __init__(self, model: ServedLayers, orders: int = ORDERS) -> None:
        self.model = model
        self._orders = orders
        places = len(model.layers) + 1
        self._nothing = _Row([math.inf] + [-math.inf] * (places - 1), [0] * places, [0] * places, {}, {})
        self._kinds: list[_Kind] = []
        self._numbers: dict[tuple[object, ...], int] = {}  # of kinds, and of the stages that were found to be one
        self._sets: dict[tuple[int, ...], _Row] = {(): self._nothing}
        self._runs = cache(self._divided)

    def tokens(self, stages: Sequence[PlannedStage]) -> int:
        """The capacity of these instances as one group, if its layers are divided for most tokens. The stages are those of
        one or more whole groups."""
        return int(self._row([self._number(stage) for stage in stages]).best[-1])

    def split(self, stages: Sequence[PlannedStage], microbatch: float) -> tuple[PlannedStage, ...]:
        """These instances as the stages of one group, in order, for microbatches of `microbatch` tokens: most tokens first, and
        in that order the least slowest stage. The stages given do not change."""
        of_kind: dict[int, list[PlannedStage]] = {}
        for stage in stages:
            of_kind.setdefault(self._number(stage), []).append(stage)
        numbers = tuple(sorted(number for number, equal in of_kind.items() for _ in equal))
        runs = [
            PlannedStage(of_kind[number].pop().instance, first, end)
            for number, first, end in self._runs(numbers, microbatch)
        ]
        return tuple(reversed(runs))

    def _divided(self, numbers: tuple[int, ...], microbatch: float) -> list[tuple[int, int, int]]:
        """Of instances of these kinds, from the last stage to the first: its kind, first layer and end."""
        row = self._row(numbers)
        tokens, order = row.best[-1], list[int]()
        k = len(row.best) - 1
        while row is not self._nothing:
            order.append(row.kinds[k])
            row, k = row.before[order[-1]], row.begins[k]
        order.reverse()

        best, rows = self._nothing.best, list[list[int]]()
        for number in order:
            best, begins = _extended(best, self._quickness(number, tokens, microbatch))
            rows.append(begins)
        found, end = list[tuple[int, int, int]](), len(self.model.layers)
        for number, begins in zip(reversed(order), reversed(rows)):
            found.append((number, begins[end], end))
            end = begins[end]
        return found

    def _number(self, stage: PlannedStage) -> int:
        """Of the instance's kind."""
        key = (stage.instance.memory_bytes, stage.first, stage.end, stage.arrived)
        if key not in self._numbers:
            count = len(self.model.layers)
            until = [count] * (count + 1)
            for layer in reversed(range(count)):
                until[layer] = max(layer + 1, until[layer + 1]) if stage.holds(layer) else layer
            kind = _Kind(stage.first + stage.end, stage.instance.memory_bytes, tuple(until))
            if kind not in self._numbers:
                self._numbers[kind] = len(self._kinds)
                self._kinds.append(kind)
            self._numbers[key] = self._numbers[kind]
        return self._numbers[key]

    def _row(self, numbers: Sequence[int]) -> _Row:
        """Of these kinds in the best order."""
        counts, row = Counter(numbers), self._nothing
        # By their values, not by which was seen first: the same question has one answer.
        ordered = tuple(sorted(numbers, key=lambda number: self._kinds[number]))
        if len(counts) > 1 and math.prod(count + 1 for count in counts.values()) <= self._orders:
            return self._set(ordered)
        for number in ordered:
            if number not in row.behind:
                best, begins = _extended(row.best, self._capacity(number))
                row.behind[number] = _Row(best, begins, [number] * len(best), {number: row}, {})
            row = row.behind[number]
        return row

    def _set(self, key: tuple[int, ...]) -> _Row:
        if key not in self._sets:
            row: _Row | None = None
            for number in dict.fromkeys(key):
                place = key.index(number)
                before = self._set(key[:place] + key[place + 1 :])
                best, begins = _extended(before.best, self._capacity(number))
                if row is None:
                    row = _Row(best, begins, [number] * len(best), {number: before}, {})
                    continue
                row.before[number] = before
                for k, value in enumerate(best):
                    if value > row.best[k]:
                        row.best[k], row.begins[k], row.kinds[k] = value, begins[k], number
            assert row is not None  # only the empty key has no number, and it is known
            self._sets[key] = row
        return self._sets[key]

    def _capacity(self, number: int) -> _Worth:
        """Tokens of the layers from j to k on an instance of this kind."""
        _, memory_bytes, until = self._kinds[number]
        weights, kv = self.model.weight_ends, self.model.kv_ends

        def worth(j: int, k: int) -> float:
            if j == k:
                return math.inf
            if k > until[j]:
                return -math.inf
            free, each = memory_bytes - weights[k] + weights[j], kv[k] - kv[j]
            if free < 0:
                return -1
            return free // each if each else UNLIMITED

        return worth

    def _quickness(self, number: int, tokens: float, microbatch: float) -> _Worth:
        """Minus the seconds of the layers from j to k, where they leave room for `tokens` tokens."""
        capacity, seconds = self._capacity(number), self.model.seconds

        def worth(j: int, k: int) -> float:
            if j == k:
                return math.inf
            return -seconds(j, k, microbatch) if capacity(j, k) >= tokens else -math.inf

        return worth


def _extended(best: Sequence[float], worth: _Worth) -> tuple[list[float], list[int]]:
    """The worth of the first k layers with one more stage behind those of `best`, for each k, and where it begins."""
    found, begins, j = list[float](), list[int](), 0
    for k in range(len(best)):
        while worth(j, k) < best[j]:
            j += 1
        value, begin = best[j], j
        if j and worth(j - 1, k) > value:
            value, begin = worth(j - 1, k), j - 1
        found.append(value)
        begins.append(begin)
    return found, begins
