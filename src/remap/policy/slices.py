"""Slices: every layer streams the same tail of its pages through the ring. Public as part of `remap.policy.selection`.

With n layers, a share s of each streamed and sigma ring slots of s layers' bytes, n s - sigma s layers' worth is freed:
alpha = s (n - sigma), for alpha n / (n - sigma) layers of traffic a pass. Whole layers copy alpha + beta. Source: derived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

from remap.errors import InvalidArgument
from remap.policy import schedule
from remap.policy.schedule import RELATIVE_EPSILON, _integer, _is_real, _streamed, _times

__all__ = ["allowed", "slices_freed", "slices_max_alpha", "slices_period", "slices_share", "slices_tail", "tail_shares"]

_HALVINGS = 60  # of the interval 0..1: more than a float resolves


def slices_period(
    compute_s: float | Sequence[float],
    transfer_s: float | Sequence[float],
    share: float | Sequence[float],
    buffers: int,
    streamed: Iterable[int] | None = None,
    layers: int | None = None,
) -> float:
    """Seconds per pass when every layer streams `share` of its bytes through `buffers` ring slots; exact, fixed slots.

    compute_s, transfer_s, layers: as for `schedule.period`; transfer_s of whole layers. share: 0..1, or one for each of
    the n layers. streamed: the layers that take part, by default all. A layer waits for its slice before it computes at all.

    Raises InvalidArgument as `schedule.period` does, and (field: share) for a share outside 0..1 or a wrong number of them.
    """
    compute, transfer = _times(compute_s, transfer_s, layers)
    n = len(compute)
    chosen = tuple(range(n)) if streamed is None else _streamed(streamed, n)
    given: list[float] = [cast(float, share)] * n if _is_real(share) else list(cast("Sequence[float]", share))
    if len(given) != n or not all(_is_real(part) and 0.0 <= part <= 1.0 for part in given):
        raise InvalidArgument(
            f"share must be a number from 0 to 1, or {n} of them, got {share!r}; nothing changed; correct it",
            share=share,
        )
    if not any(given[layer] for layer in chosen):
        return math.fsum(compute)
    scaled = [seconds * float(part) for seconds, part in zip(transfer, given, strict=True)]
    return schedule.period(compute, scaled, chosen, buffers)


def slices_share(alpha: float, layers: int, buffers: int) -> float:
    """The share of each of `layers` equal layers to stream so that `alpha` layers' worth is freed: alpha / (n - sigma).

    Raises InvalidArgument (fields: alpha, most, layers, buffers) for fewer than buffers + 1 layers, and for an alpha that is
    negative, not finite, or more than n - sigma, which whole layers free.
    """
    layers = _integer("layers", layers, 1)
    buffers = _integer("buffers", buffers, 1)
    most = layers - buffers
    if most < 1 or not (_is_real(alpha) and 0.0 <= alpha <= most):
        raise InvalidArgument(
            f"slices of {layers} layers through {buffers} buffers free from 0 to {max(0, most)} layers' worth, asked for "
            f"{alpha!r}; nothing changed; ask for less or use fewer buffers",
            alpha=alpha,
            most=max(0, most),
            layers=layers,
            buffers=buffers,
        )
    return float(alpha) / most


def slices_freed(tail_pages: int, layer_pages: Sequence[int], buffers: int) -> int:
    """Pages freed when each layer streams its last `tail_pages` pages (all, if it has fewer): sum of them - the ring.

    layer_pages: pages of the layers that take part. The ring has `buffers` slots of tail_pages, or of the largest layer's
    pages if that is less. Negative where the ring takes more than is freed. Raises InvalidArgument (field named).
    """
    pages = _pages(layer_pages)
    tail = _integer("tail_pages", tail_pages, 0)
    buffers = _integer("buffers", buffers, 1)
    return sum(min(tail, each) for each in pages) - buffers * min(tail, max(pages, default=0))


def slices_tail(
    remapped: float, layer_pages: Sequence[int], buffers: int, streamed: Iterable[int] | None = None
) -> int:
    """The fewest tail pages of every layer that free at least `remapped` layers' worth of pages (the largest layer's).

    layer_pages: pages of each of the n layers. streamed: the layers that take part, by default all.
    Raises InvalidArgument (fields: remapped, most) when no tail frees as much; `most` is what the best one frees.
    """
    pages = _pages(layer_pages)
    buffers = _integer("buffers", buffers, 1)
    unit = max(pages, default=0)
    chosen = pages if streamed is None else [pages[layer] for layer in _streamed(streamed, len(pages))]
    longest = _longest_tail(chosen, buffers)
    most = slices_freed(longest, chosen, buffers) / unit if unit else 0.0
    if not (_is_real(remapped) and 0.0 <= remapped <= most):
        raise InvalidArgument(
            f"slices of these layers through {buffers} buffers free from 0 to {most:g} layers' worth, asked for "
            f"{remapped!r}; nothing changed; ask for less or use fewer buffers",
            remapped=remapped,
            most=most,
        )
    wanted = math.ceil(remapped * unit * (1.0 - RELATIVE_EPSILON))
    low, high = 0, longest  # freed grows up to the longest tail
    while low < high:
        middle = (low + high) // 2
        if slices_freed(middle, chosen, buffers) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


def slices_max_alpha(
    compute_s: float | Sequence[float],
    transfer_s: float | Sequence[float],
    buffers: int,
    slowdown: float = 0.0,
    *,
    streamed: Iterable[int] | None = None,
    layer_pages: Sequence[int] | None = None,
    layers: int | None = None,
) -> float:
    """The most layers' worth that slices can free with a period of at most (1 + slowdown) * sum(compute_s).

    Without layer_pages any share is possible, layers are equal in bytes, and the answer is share * (n - sigma). With
    layer_pages (pages of each of the n layers) every layer streams a whole number of tail pages, and the answer is in units
    of the largest layer. streamed: the layers that take part, by default all. 0.0 when nothing can be hidden.

    The period is a maximum of functions linear in the share, so bisection finds the largest one. Tail pages are taken as
    full: a layer whose last page is not copies less. The bound is relaxed by `schedule.RELATIVE_EPSILON`.

    Raises InvalidArgument as `schedule.period` does, and (fields: slowdown, layer_pages) for the others.
    """
    compute, transfer = _times(compute_s, transfer_s, layers)
    n = len(compute)
    limit = allowed(compute, slowdown)
    buffers = _integer("buffers", buffers, 1)
    chosen = tuple(range(n)) if streamed is None else _streamed(streamed, n)
    if len(chosen) <= buffers:
        return 0.0
    if layer_pages is None:
        if slices_period(compute, transfer, 1.0, buffers, chosen) <= limit:
            return float(len(chosen) - buffers)
        least, most = 0.0, 1.0
        for _ in range(_HALVINGS):
            share = (least + most) / 2
            if slices_period(compute, transfer, share, buffers, chosen) <= limit:
                least = share
            else:
                most = share
        return least * (len(chosen) - buffers)
    pages = _pages(layer_pages)
    if len(pages) != n:
        raise InvalidArgument(
            f"layer_pages must hold the pages of each of {n} layers, got {len(pages)}; nothing changed; give all",
            layer_pages=pages,
            layers=n,
        )
    taking_part = [pages[layer] for layer in chosen]
    low, high = 0, _longest_tail(taking_part, buffers)
    while low < high:
        middle = (low + high + 1) // 2
        if slices_period(compute, transfer, tail_shares(middle, pages), buffers, chosen) <= limit:
            low = middle
        else:
            high = middle - 1
    return slices_freed(low, taking_part, buffers) / (max(pages) or 1)


def tail_shares(tail_pages: int, layer_pages: Sequence[int]) -> list[float]:
    """The share of each layer that its last `tail_pages` pages are."""
    return [min(tail_pages, pages) / pages if pages else 0.0 for pages in layer_pages]


def allowed(compute: Sequence[float], slowdown: float) -> float:
    """The longest period within `slowdown`. Raises InvalidArgument (field: slowdown) unless it is finite and >= 0."""
    if not (_is_real(slowdown) and 0.0 <= slowdown < math.inf):
        raise InvalidArgument(
            f"slowdown must be a finite number >= 0 (0.05 allows 5 %), got {slowdown!r}; nothing changed; correct it",
            slowdown=slowdown,
        )
    return (1.0 + slowdown) * math.fsum(compute) * (1.0 + RELATIVE_EPSILON)


def _pages(layer_pages: Sequence[int]) -> list[int]:
    return [_integer("layer_pages", pages, 0) for pages in layer_pages]


def _longest_tail(pages: Sequence[int], buffers: int) -> int:
    """The tail that frees most. One page more frees one in each layer that has it, and costs one in each slot: as long as
    more than `buffers` layers have it, that is a gain."""
    return sorted(pages, reverse=True)[buffers] if len(pages) > buffers else 0
