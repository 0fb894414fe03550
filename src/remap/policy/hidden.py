# SPDX-License-Identifier: Apache-2.0
"""The part of a model that a machine hides, by the times of its passes and copies alone: `remap plan` asks it of a machine's
figures, and an engine's adapter of its own measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from remap.policy import schedule

__all__ = ["Selection", "first_kept", "lateness", "lateness_beyond", "most_hidden", "most_lent", "verdict"]

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


def lateness_beyond(compute_s: Sequence[float], transfer_s: Sequence[float], setup_s: float = 0.0) -> list[float]:
    """Seconds by which one pass ends later if only the first 0, 1, ..., n of n layers are at home, and the others are loaded one
    after another in the order of use, beginning with the pass. They never grow, and the last is 0.

    compute_s, transfer_s: seconds of each layer. setup_s: before the first copy begins (pages are zeroed, and mapped).
    `schedule.one_shot_delay` of every suffix at once: with the layers from k on missing, layer j waits for the copies of k to j
    and computes behind all before it: the delay is max over j of (sum of T up to j - sum of C before j) - (sum of T before k).
    """
    copied = list(accumulate(transfer_s, initial=0.0))
    computed = list(accumulate(compute_s, initial=0.0))
    late, found = -math.inf, [0.0]
    for layer in range(len(compute_s) - 1, -1, -1):
        late = max(late, copied[layer + 1] - computed[layer])
        found.append(max(0.0, setup_s + late - copied[layer]))
    return found[::-1]


def first_kept(
    compute_s: Sequence[float], transfer_s: Sequence[float], late_s: float = 0.0, setup_s: float = 0.0
) -> int:
    """The certificate of a model that serves no pass: how many first layers it keeps, at least, so that its next pass, which
    computes so long, ends late by `late_s` at most while all others load; 0: none. With late_s = 0 loading them is hidden behind
    the computation of those that are kept; with late_s = ttft_s - sum(compute_s) the first token comes within ttft_s, if even a
    pass with all layers at home does: else it is all of them.
    """
    bound = late_s + schedule.RELATIVE_EPSILON * max(math.fsum(compute_s), math.fsum(transfer_s))
    late = lateness_beyond(compute_s, transfer_s, setup_s)
    return next((kept for kept, each in enumerate(late) if each <= bound), len(compute_s))


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
