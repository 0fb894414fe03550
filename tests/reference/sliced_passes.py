"""Passes that stream a tail of every layer, by the exact period of whole layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remap.policy import schedule


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


def tail_shares(tail_pages: int, layer_pages: Sequence[int]) -> list[float]:
    """The last `tail_pages` pages of each layer, as a share of the layer."""
    return [min(tail_pages, pages) / pages if pages else 0.0 for pages in layer_pages]
