"""How much a tenant may lend while it does not run. Public as part of `remap.policy.selection`.

When it runs again, its first pass loads what is missing while it computes: what is missing should be needed late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from remap.errors import InvalidArgument
from remap.policy import schedule
from remap.policy.schedule import RELATIVE_EPSILON, _integer, _is_real, _streamed, _times

__all__ = ["inactive_cap", "suffix_delay"]


def suffix_delay(
    compute_s: Sequence[float],
    transfer_s: float | Sequence[float],
    missing_count: int,
    in_place: Iterable[int] = (),
    *,
    order: Iterable[int] | None = None,
) -> float:
    """Seconds by which one pass ends later because the last `missing_count` layers are loaded during it.

    in_place: those of them that need no loading, such as the ring's. order: the streamable layers, by default all: the last
    ones of these are missing. Exact (`schedule.one_shot_delay`). Raises InvalidArgument as that does, and (field:
    missing_count, streamable) for more than there are.
    """
    compute, transfer = _times(compute_s, transfer_s, None)
    layers = tuple(range(len(compute))) if order is None else _streamed(order, len(compute))
    count = _integer("missing_count", missing_count, 0)
    if count > len(layers):
        raise InvalidArgument(
            f"missing_count must be at most {len(layers)}, the streamable layers, got {count}; nothing changed; correct it",
            missing_count=count,
            streamable=len(layers),
        )
    there = set(in_place)
    missing = [layer for layer in layers[len(layers) - count :] if layer not in there]
    return schedule.one_shot_delay(compute, transfer, missing)


def inactive_cap(
    prefill_compute_s: Sequence[float],
    transfer_s: float | Sequence[float],
    *,
    slack_s: float = 0.0,
    buffers: int = 1,
    limit: int | None = None,
    order: Iterable[int] | None = None,
) -> int:
    """The most layers a that a tenant which does not run may lend, so that its next prefill is late by at most `slack_s`.

    It lends the suffix of a + buffers layers, whose first `buffers` wait in the ring already; the others are loaded while
    the prefill computes. Exact; a tenant is never remapped whole: a + buffers <= n - 1. limit: at most so many. order: the
    streamable layers, by default all. For equal layers: max(0, a T_T - (n - 1) T_c) <= slack_s, and no other choice of a
    layers is late by less. Relaxed by `schedule.RELATIVE_EPSILON` of the prefill. Source: derived, in the place of
    Oneiros' bound by the prefill's time.

    Raises InvalidArgument as `suffix_delay` does, and (field named) for slack_s that is negative or not a number (math.inf
    is allowed), buffers < 1, limit < 0.
    """
    compute, transfer = _times(prefill_compute_s, transfer_s, None)
    layers = tuple(range(len(compute))) if order is None else _streamed(order, len(compute))
    buffers = _integer("buffers", buffers, 1)
    if not (_is_real(slack_s) and slack_s >= 0.0):
        raise InvalidArgument(
            f"slack_s must be seconds >= 0, got {slack_s!r}; nothing changed; correct it", slack_s=slack_s
        )
    most = min(len(layers), len(compute) - 1) - buffers
    if limit is not None:
        most = min(most, _integer("limit", limit, 0))
    bound = slack_s + RELATIVE_EPSILON * math.fsum(compute)
    cap = 0
    for lent in range(1, most + 1):  # one layer more delays every later one: the first that is late settles it
        ring = layers[len(layers) - lent - buffers : len(layers) - lent]
        if suffix_delay(compute, transfer, lent + buffers, ring, order=layers) > bound:
            break
        cap = lent
    return cap
