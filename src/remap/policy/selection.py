# SPDX-License-Identifier: Apache-2.0
"""Which layers make the shortest pass: the only choice of layers that takes a search. Pure.

`TenantState.select` (memory/state.py) makes all other choices, which depend on the layers that stream now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remap.policy import schedule
from remap.policy.search import Problem, best_double, least_walk
from remap.policy.views import LayerSeconds

__all__ = ["best_set"]


def best_set(
    order: Sequence[int], remapped: int, buffers: int, times: LayerSeconds, present: Iterable[int] = ()
) -> tuple[int, ...]:
    """The remapped + buffers layers of `order` that make the shortest pass, ascending. Arguments are trusted.

    order: the streamable layers (pinned ones are left out) in the nested order. remapped: at least 1. times: of each of
    the model's layers. present: the layers streamed now; those not in `order` are ignored.

    One buffer, or one layer remapped: the exact optimum for any layer times. More: the best of a search from several
    starts, at most `search.EVALUATIONS` exact periods, never worse than the nested, `uniform` and `uniform_fixed` sets.
    Among optima that differ by less than `schedule.RELATIVE_EPSILON` of a pass, present layers win, then those early in
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
        *(
            [layers[index] for index in even(n, remapped, buffers)]
            for even in (schedule.uniform, schedule.uniform_fixed)
        ),
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
