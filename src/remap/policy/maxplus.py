# SPDX-License-Identifier: Apache-2.0
"""The (max, +) system behind `remap.schedule`: one pass as a matrix, and its largest cycle mean. Arguments are trusted.

C_k is the end of the computation of streamed use k, D_k the end of its copy, W_k the computation since use k - 1:

    C_k = max(C_{k-1} + W_k, D_k) + c_k;   D_k = max(D_{k-1}, C_{prev(k)}) + tau_k

Everything a later pass needs to know of the earlier ones is the end of the last use of each buffer (with rotating
slots: of the last beta uses) and of the last copy. One pass maps that state to itself linearly in (max, +).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

__all__ = ["ROUNDING", "Slots", "copied_uses", "largest_cycle_mean", "lower_bound", "pass_period"]

Slots = Literal["fixed", "rotating"]

ROUNDING = 1e-12  # far above the error of a few hundred float additions, far below anything that can be measured
_NEVER = -math.inf


def copied_uses(streamed: int, buffers: int, slots: Slots) -> list[int]:
    """Indices, among the streamed layers, of those copied on every pass. A buffer with one user needs no copy."""
    if slots == "fixed":
        return [j for j in range(streamed) if j >= buffers or j + buffers < streamed]
    # Rotating: use q * m + j takes buffer (q * m + j) mod beta; a buffer keeps one layer exactly when m divides beta.
    return [] if streamed == 0 or buffers % streamed == 0 else list(range(streamed))


def lower_bound(
    compute: Sequence[float], transfer: Sequence[float], streamed: Sequence[int], buffers: int, slots: Slots
) -> float:
    """A cheap lower bound of the period: two of the system's cycles. The copy engine, and each fixed buffer's turns."""
    copied = copied_uses(len(streamed), buffers, slots)
    bound = math.fsum(transfer[streamed[j]] for j in copied)
    if slots == "fixed":
        turns = [0.0] * buffers
        for j in copied:
            turns[j % buffers] += compute[streamed[j]] + transfer[streamed[j]]
        bound = max(bound, *turns)
    return bound


def pass_period(
    compute: Sequence[float],
    transfer: Sequence[float],
    streamed: Sequence[int],
    buffers: int,
    slots: Slots,
    total: float,
) -> float:
    """Seconds per pass in the steady state; `total` is sum(compute), and the result is never below it.

    compute, transfer: n floats >= 0. streamed: distinct layers in layer order. See `remap.schedule.period`.
    """
    copied = copied_uses(len(streamed), buffers, slots)
    if not copied:
        return total
    layers = [streamed[j] for j in copied]
    uses = len(layers)
    own = [compute[layer] for layer in layers]
    tau = [transfer[layer] for layer in layers]
    gap = [math.fsum(compute[a + 1 : b]) for a, b in pairwise(layers)]
    gap.insert(0, math.fsum((*compute[layers[-1] + 1 :], *compute[: layers[0]])))  # around the end of the pass

    # History: the end times C of earlier passes' uses that this pass refers to, oldest first; the newest is the last
    # use. `prev[k]` and `carry` index history followed by this pass's uses; `carry` picks the next pass's history.
    if slots == "rotating":
        depth = buffers
        prev = [k + depth - buffers for k in range(uses)]
        carry = list(range(uses, uses + depth))
    else:
        last = {j % buffers: k for k, j in enumerate(copied)}  # buffer -> its last use in a pass
        history = sorted(last.values())
        depth = len(history)
        held = {copied[k] % buffers: h for h, k in enumerate(history)}
        prev = []
        for k, j in enumerate(copied):
            prev.append(held[j % buffers])
            held[j % buffers] = depth + k
        carry = [depth + k for k in history]

    columns = []
    for unit in range(depth + 1):  # the last entry of the state is D, the end of the last copy
        ends = [_NEVER] * depth
        copy_end = _NEVER
        if unit < depth:
            ends[unit] = 0.0
        else:
            copy_end = 0.0
        end = ends[-1]
        for k in range(uses):
            free = ends[prev[k]]
            copy_end = (free if free > copy_end else copy_end) + tau[k]
            end += gap[k]
            end = (copy_end if copy_end > end else end) + own[k]
            ends.append(end)
        columns.append([ends[at] for at in carry] + [copy_end])

    found = largest_cycle_mean(list(zip(*columns, strict=True)))
    return found if found > total * (1.0 + ROUNDING) else total


def largest_cycle_mean(matrix: Sequence[Sequence[float]]) -> float:
    """Karp (1978): the largest mean weight of a cycle. matrix[i][j] is the weight of the edge j -> i, -inf for none.

    Walks start anywhere (all zero), which is Karp's source with an edge of weight 0 to every node.
    """
    size = len(matrix)
    walks = [[0.0] * size]
    for _ in range(size):
        before = walks[-1]
        walks.append([max(map(float.__add__, row, before)) for row in matrix])
    longest = walks.pop()
    best = _NEVER
    for node, value in enumerate(longest):
        best = max(best, min((value - walk[node]) / (size - length) for length, walk in enumerate(walks)))
    return best
