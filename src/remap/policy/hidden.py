# SPDX-License-Identifier: Apache-2.0
"""The part of a model that a machine hides, by the times of its passes and copies alone: `remap plan` asks it of a machine's
figures, and an engine's adapter of its own measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from remap.policy import schedule

__all__ = ["Selection", "lateness", "most_hidden", "most_lent", "verdict"]

Selection = Literal["uniform", "nested"]


def most_hidden(
    compute_s: float | Sequence[float],
    transfer_s: float | Sequence[float],
    *,
    layers: int | None = None,
    slowdown: float = 0.0,
) -> tuple[int, int, Selection]:
    """(whole layers, ring buffers, selection): the most that stream in each decode pass while it takes at most 1 + slowdown times
    its computation. compute_s, transfer_s: seconds of each layer, or of every one of `layers`."""
    count = layers if layers is not None or not isinstance(compute_s, Sequence) else len(compute_s)
    assert count is not None
    order = schedule.nested(count)
    remapped, buffers, kind = 0, 1, "uniform"
    for each in ("uniform", "nested"):
        select = None if each == "uniform" else lambda n, a, b: order[: a + b]
        found = schedule.max_remapped(compute_s, transfer_s, layers=layers, slowdown=slowdown, select=select)
        if found[0] > remapped:
            (remapped, buffers), kind = found, each
    return remapped, buffers, "nested" if kind == "nested" else "uniform"


def lateness(compute_s: Sequence[float], transfer_s: float | Sequence[float]) -> list[float]:
    """Seconds by which the first prefill of an idle model is late if its last 0, 1, ... layers are away, and the one whose memory
    is the ring. They only grow."""
    n = len(compute_s)
    return [schedule.one_shot_delay(compute_s, transfer_s, range(n - 1 - away, n)) for away in range(n - 1)]


def most_lent(compute_s: Sequence[float], late: Sequence[float], late_s: float = 0.0) -> int:
    """The most layers that may be away with `late` at most late_s."""
    bound = late_s + schedule.RELATIVE_EPSILON * math.fsum(compute_s)
    return max(0, sum(each <= bound for each in late) - 1)


def verdict(
    decode_s: Sequence[float], transfer_s: Sequence[float], slowdown: float, prefill_s: Sequence[float], late_s: float
) -> str:
    """One line for an operator. decode_s, prefill_s: seconds of computation of each layer in a decode pass, and in a short
    prefill; transfer_s: of each layer's copy. late_s: by how much the first prefill of an idle model may be late."""
    layers, longest = len(decode_s), max(transfer_s)
    hidden = most_hidden(decode_s, transfer_s, slowdown=slowdown)[0]
    lent = most_lent(prefill_s, lateness(prefill_s, transfer_s), late_s)
    alone = f"this machine hides {hidden} of {layers} layers within {100 * slowdown:.3g} %"
    if not hidden:
        alone = "on this link one model alone gains nothing here"
    return (
        f"{alone}: a decode pass computes for {math.fsum(decode_s) * 1e3:.3g} ms, a layer is copied in {longest * 1e3:.3g} ms; "
        f"an idle model lends {'all' if lent >= layers - 2 else lent} of its layers and is late by {late_s * 1e3:.3g} ms at most"
    )
