# SPDX-License-Identifier: Apache-2.0
"""One tenant's pages as a value, what of them streams, and the plans from one such value to another. Page numbers only.

Values and plans are the core's (include/remap/tenant_pages.h, which says what streaming through a ring is). Runs of pages are
`Pages`: equal pages are equal objects.

A layer without a home streams for good, wholly, through ring buffers that are no layer's home either: nothing changes
what streams then (`TenantPages.for_good`). A layer that another instance computes has no home either while it is away: all of
its pages are KV, and its region shows nothing (`elsewhere`). If its bytes are to come from another instance, its pages come home
first (`unfilled`): until they are filled it is as good as away. A layer that its inactive tenant has given up is elsewhere
without pages (`cold`), and what was its home is for any tenant; later it gets another one (`with_homes`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remap import _core
from remap._core import TenantPages, Transition

__all__ = [
    "MAX_BUFFERS",
    "NOBODY",
    "NO_PAGE",
    "Pages",
    "Streaming",
    "TenantPages",
    "Transition",
    "plan_between",
    "plan_free_pages",
    "plan_streaming",
    "run_of",
]

MAX_BUFFERS = 2
"""Ring buffers for which the ring's region has room. More never beat two (theory: beta >= 3 buys only slack)."""
NO_PAGE = 0xFFFFFFFF
"""In a region that shows nothing, as the core says it."""
NOBODY = 0xFFFFFFFF
"""The tenant of pages that are no tenant's, as the core says it."""

Pages = Sequence[int]
"""Page ids in order: a `range` if they are consecutive, as a layer's usually are, and otherwise a tuple."""


def run_of(pages: Iterable[int]) -> Pages:
    """These pages as `Pages`."""
    if isinstance(pages, range) and pages.step == 1:
        return pages or ()
    known = tuple(pages)
    if not known:
        return ()
    run = range(known[0], known[0] + len(known))
    return run if known[-1] == run[-1] and known == tuple(run) else known


@dataclass(frozen=True)
class Streaming:
    """The part that streams: how many of each layer's last pages, through `buffers` ring buffers of `depth` pages. Whole layers,
    the same slice of every layer and mixtures are values of it. selection: how these were chosen, for the record; "": as before.
    """

    tails: tuple[int, ...]
    buffers: int
    depth: int
    selection: str = ""

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        layers: Iterable[int],
        buffers: int,
        tail: int | None = None,
        largest: int | None = None,
        selection: str = "",
    ) -> Streaming:
        """These layers' last `tail` pages (all pages of a smaller layer), through buffers of `tail` pages. None: whole
        layers, through buffers of `largest` pages: the largest of all layers. sizes: pages of every layer."""
        chosen = tuple(layers)
        if not chosen:
            return cls((0,) * len(sizes), buffers, 0, selection)
        depth = (largest or max(sizes)) if tail is None else min(tail, max(sizes[layer] for layer in chosen))
        tails = [0] * len(sizes)
        for layer in chosen:
            tails[layer] = min(depth, sizes[layer])
        return cls(tuple(tails), buffers, depth, selection)

    @functools.cached_property
    def layers(self) -> tuple[int, ...]:
        """The streamed layers, ascending: the j-th uses ring buffer j mod buffers."""
        return tuple(layer for layer, tail in enumerate(self.tails) if tail)

    def beside(self, other: Streaming) -> Streaming:
        """All that streams in either, through the smaller number of buffers: no page comes home on the way there."""
        tails = tuple(map(max, self.tails, other.tails))
        return Streaming(tails, min(self.buffers, other.buffers), max(self.depth, other.depth), other.selection)


def streaming_now(pages: TenantPages) -> Streaming:
    """What streams in this state."""
    return Streaming(pages.tails, len(pages.ring), pages.depth)


def plan_between(now: TenantPages, there: TenantPages, *, to: str = "kv") -> Transition:
    """The plan from `now` to `there`. to: pages that layers give away, and that are no ring's, become the tenant's own "kv", or
    "free", to be lent to others; of a home that goes they are free. Lent pages that come home come from free
    (`TenantPages.to_fetch`): these are no longer in `there.lent`, and what becomes free of a home that stays is."""
    return _core.plan_between(now, there, to == "free")


def plan_streaming(now: TenantPages, target: Streaming, *, to: str = "kv") -> Transition:
    """`plan_between`, to where exactly `target` streams.

    Raises InvalidArgument: fewer streamed layers than buffers + 1 (fields buffers, streamed), tails too small for the ring
    (needed_pages, available_pages). Raises InvalidState (field streamed) if what streams does so for good.
    """
    plan = plan_between(now, now.with_streaming(target), to=to)
    plan.selection = target.selection
    return plan


def plan_free_pages(now: TenantPages, pages: Iterable[int], *, give: bool) -> Transition:
    """Make free pages the tenant's KV (`give`), or its KV pages free again. Touches no layer."""
    return _core.plan_free_pages(now, pages if isinstance(pages, (range, list, tuple)) else list(pages), give)
