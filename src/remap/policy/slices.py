# SPDX-License-Identifier: Apache-2.0
"""Slices: every layer streams the same tail of its pages through the ring. Arguments are trusted.

If n layers each stream a share s, through sigma ring slots of s layers' bytes, that frees n s - sigma s layers' worth:
alpha = s (n - sigma), for alpha n / (n - sigma) layers of traffic per pass. Whole layers copy alpha + beta. Source:
derived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from remap.errors import InvalidArgument

__all__ = ["slices_alpha", "slices_freed", "tail_for"]


def slices_freed(tail_pages: int, layer_pages: Sequence[int], buffers: int) -> int:
    """Pages freed if each layer streams its last `tail_pages` pages (all, if it has fewer): their sum, less the ring's.

    layer_pages: pages of each layer that takes part. The ring has `buffers` slots of tail_pages, or of the largest
    layer's pages if that is less. Negative if the ring takes more pages than are freed.
    """
    return sum(min(tail_pages, each) for each in layer_pages) - buffers * min(tail_pages, max(layer_pages, default=0))


def slices_alpha(tail_pages: int, layer_pages: Sequence[int], buffers: int) -> float:
    """`slices_freed` in layers' worth, counted in the largest layer."""
    return slices_freed(tail_pages, layer_pages, buffers) / max(layer_pages)


def tail_for(layer_pages: Sequence[int], alpha: float, buffers: int) -> int:
    """The smallest number of tail pages that frees at least `alpha` layers' worth (see `slices_alpha`).

    0 for alpha = 0. Raises InvalidArgument (fields alpha, maximum) if no number does, or alpha is negative or not
    finite.
    """
    sizes = sorted(layer_pages)
    unit = sizes[-1] if sizes else 1
    wanted = math.ceil(alpha * unit - 1e-9) if math.isfinite(alpha) else 0
    # Between the sizes of two layers each further tail page gives the same: one of each layer that has it, less the
    # ring's.
    tail = given = 0
    for index, size in enumerate(sizes):
        gain = len(sizes) - index - buffers
        if gain <= 0 or given >= wanted:
            break
        steps = min(size - tail, -(-(wanted - given) // gain))
        tail, given = tail + steps, given + steps * gain
    if given < wanted or not 0 <= alpha < math.inf:
        raise InvalidArgument(
            f"alpha must lie between 0 and {given / unit}, the most that {len(sizes)} layers in slices can give with "
            f"{buffers} ring buffers, got {alpha}; nothing changed",
            alpha=alpha,
            maximum=given / unit,
            buffers=buffers,
        )
    return tail
