"""Slices: every layer streams the same tail of its pages through the ring. Arguments are trusted.

With n layers, a share s of each streamed and sigma ring slots of s layers' bytes, n s - sigma s layers' worth is freed:
alpha = s (n - sigma), for alpha n / (n - sigma) layers of traffic a pass. Whole layers copy alpha + beta. Source: derived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remap.policy import schedule

__all__ = ["slices_freed", "slices_period", "tail_shares"]


def slices_period(
    compute_s: Sequence[float],
    transfer_s: Sequence[float],
    shares: Sequence[float],
    buffers: int,
    streamed: Iterable[int],
) -> float:
    """Seconds per pass when each streamed layer streams its share (0..1) of its bytes; exact, fixed slots.

    transfer_s: of whole layers. A layer waits for its slice before it computes at all.
    """
    scaled = [seconds * share for seconds, share in zip(transfer_s, shares, strict=True)]
    return schedule.period(compute_s, scaled, streamed, buffers)


def slices_freed(tail_pages: int, layer_pages: Sequence[int], buffers: int) -> int:
    """Pages freed when each layer streams its last `tail_pages` pages (all, if it has fewer): sum of them - the ring.

    layer_pages: pages of the layers that take part. The ring has `buffers` slots of tail_pages, or of the largest layer's
    pages if that is less. Negative where the ring takes more than is freed.
    """
    return sum(min(tail_pages, each) for each in layer_pages) - buffers * min(tail_pages, max(layer_pages, default=0))


def tail_shares(tail_pages: int, layer_pages: Sequence[int]) -> list[float]:
    """The share of each layer that its last `tail_pages` pages are."""
    return [min(tail_pages, pages) / pages if pages else 0.0 for pages in layer_pages]
