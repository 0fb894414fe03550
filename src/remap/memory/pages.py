# SPDX-License-Identifier: Apache-2.0
"""One tenant's pages as a value: which are its layers', what streams, and through what ring. Pure: page numbers.

Each of a tenant's layers has a *home*, its own pages. One vector says what streams: `tails[i]` is the number of layer
i's last pages that come through the ring (0: the layer is resident; all of them: the whole layer streams). Whole
layers, the same slice of every layer and mixtures are values of it. Streaming through `buffers` ring buffers of `depth`
pages frees the tails, except for the ring's own pages:

    ring pages  R  subset of  tails,   |R| = buffers * depth,   depth >= the largest tail
    KV pages       tails - R

Each page of the ring keeps its place whenever it can, since moving it costs driver calls.

A layer without a home streams for good, wholly, through ring buffers that are no layer's home either: nothing changes
what streams then (`TenantPages.for_good`).

A layer that another instance computes has no home either while it is away, and nothing of it is copied: all of its pages are
KV, and its region shows nothing (`TenantPages.elsewhere`). It neither streams nor gives pages to the ring. If its bytes are to
come from another instance, its pages come home first (`TenantPages.unfilled`): until they are filled it is as good as away.

A layer that its inactive tenant has given up has no home at all: it is elsewhere without pages (`TenantPages.cold`), and what
was its home is for any tenant. Later it gets another one, of pages that the tenant has taken (`TenantPages.with_homes`).

Tails are aligned to the end of the ring's buffers: slot s of a home of p pages shows slot (buffer slots - p) + s of its
buffer, whatever the tail's length. So one more page of each layer leaves everything that streams already at its place:
the buffers grow in front, by pages that the ring's region shows from the start (preferred layers' own), and each
layer's region changes in one slot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from remap.errors import InvalidArgument, InvalidState

__all__ = [
    "MAX_BUFFERS",
    "Pages",
    "Ring",
    "Streaming",
    "TenantPages",
    "by_place",
    "joined",
    "ring_of",
    "run_of",
    "tail_of",
]

MAX_BUFFERS = 2
"""Ring buffers for which the ring's region has room. More never beat two (theory: beta >= 3 buys only slack)."""

Pages = Sequence[int]
"""Page ids in order: a `range` if they are consecutive, as a layer's usually are, and otherwise a tuple. So equal pages
are equal objects, and most plans cost the same for layers of 10 pages and of 10,000. Made by `run_of`."""

Ring = tuple[Pages, ...]


def run_of(pages: Iterable[int]) -> Pages:
    """These pages as `Pages`."""
    if isinstance(pages, range) and pages.step == 1:
        return pages or ()
    known = tuple(pages)
    if not known:
        return ()
    run = range(known[0], known[0] + len(known))
    return run if known[-1] == run[-1] and known == tuple(run) else known


def joined(runs: Sequence[Pages]) -> Pages:
    """The pages of all runs, one run after another."""
    filled = [run for run in runs if run]
    if len(filled) < 2:
        return filled[0] if filled else ()
    first, count = filled[0], 0
    for run in filled:
        if not isinstance(run, range) or run.start != first[0] + count:
            return tuple(chain.from_iterable(filled))
        count += len(run)
    return range(first[0], first[0] + count)


@dataclass(frozen=True)
class Streaming:
    """The part that streams: how many of each layer's last pages, through `buffers` ring buffers of `depth` pages. selection: how
    these were chosen, for the record; "": as before."""

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


@dataclass(frozen=True)
class TenantPages:
    """The planner's knowledge of one tenant. `homes[l]`: the page ids of layer l. `ring[b]`: those of ring buffer b;
    they are at the end of the buffer's `buffer_pages` slots in the ring's region."""

    tenant: int
    homes: tuple[Pages, ...]
    layer_regions: tuple[int, ...]
    ring_region: int
    tails: tuple[int, ...]  # how many of each layer's last pages stream: they are ring, KV or lent
    ring: Ring = ()
    ring_preference: tuple[int, ...] = ()  # layers whose homes the ring's region shows from the start
    lent: frozenset[int] = frozenset()  # pages of tails that are free, or another tenant's KV
    sizes: tuple[int, ...] = ()  # pages of each home; `replace` carries them over unchanged
    buffer_pages: int = 0  # slots of one buffer in the ring's region: the largest layer's pages
    # Layers that another instance computes, ascending, with the pages that are their homes again when they come back; and layers
    # that the tenant has given up, with ().
    elsewhere: tuple[tuple[int, Pages], ...] = ()
    # Of these layers: their pages are at home again, and show; their bytes are still to come, from another instance.
    unfilled: frozenset[int] = frozenset()
    computed: range | None = None  # the layers that passes compute, where that is a part of them

    def __post_init__(self) -> None:
        if not self.sizes:
            object.__setattr__(self, "homes", tuple(map(run_of, self.homes)))
            object.__setattr__(self, "ring", tuple(map(run_of, self.ring)))
            object.__setattr__(self, "sizes", tuple(map(len, self.homes)))
            object.__setattr__(self, "buffer_pages", self.buffer_pages or max(self.sizes))

    @property
    def streaming(self) -> Streaming:
        """The layers that stream now."""
        return Streaming(self.tails, len(self.ring), self.depth)

    @functools.cached_property
    def streamed(self) -> tuple[int, ...]:
        """The layers that stream, wholly or by their last pages, ascending."""
        return tuple(layer for layer, tail in enumerate(self.tails) if tail)

    @functools.cached_property
    def for_good(self) -> bool:
        """Whether layers without a home stream, so that what streams never changes."""
        return any(tail and not home for tail, home in zip(self.tails, self.homes))

    @property
    def depth(self) -> int:
        """Pages of a ring buffer; 0 while nothing streams."""
        return len(self.ring[0]) if self.ring else 0

    def away(self, layer: int) -> Pages:
        """The pages of the layer's home that stream: they are ring, KV or lent."""
        return tail_of(self.homes[layer], self.tails[layer])

    @functools.cached_property
    def lending(self) -> frozenset[int]:
        """The layers with a page in `lent`."""
        lent = self.lent
        return frozenset(n for n in self.streamed if lent and not lent.isdisjoint(self.away(n)))

    @property
    def ring_layers(self) -> tuple[int, ...]:
        """Streamed layers whose homes lend pages to the ring."""
        ring_pages = {page for buffer in self.ring for page in buffer}
        return tuple(layer for layer in self.streamed if not ring_pages.isdisjoint(self.homes[layer]))

    @functools.cached_property
    def kv_from_homes(self) -> frozenset[int]:
        """Pages of its layers, streamed or elsewhere, that are the tenant's own KV now."""
        gone = [pages for layer, pages in self.elsewhere if layer not in self.unfilled]
        return frozenset(chain(*map(self.away, self.streamed), *gone)).difference(*self.ring, self.lent)

    @functools.cached_property
    def gone(self) -> frozenset[int]:
        """The layers of `elsewhere`."""
        return frozenset(layer for layer, _ in self.elsewhere)

    @functools.cached_property
    def cold(self) -> frozenset[int]:
        """The layers of `elsewhere` that have no home: no page of the arena is theirs."""
        return frozenset(layer for layer, pages in self.elsewhere if not pages)

    @property
    def held(self) -> dict[int, str]:
        """The pages of its layers that are "params" or "ring" now."""
        owners = dict.fromkeys(chain.from_iterable(self.ring), "ring")
        for home, tail in zip(self.homes, self.tails):
            owners.update(dict.fromkeys(home[: len(home) - tail], "params"))
        return owners

    @functools.cached_property
    def own(self) -> tuple[Pages, ...]:
        """Of each layer its home; if it is elsewhere, what is its home again when it comes back: () for cold ones."""
        gone = dict(self.elsewhere)
        return tuple(gone.get(layer, home) for layer, home in enumerate(self.homes)) if gone else self.homes

    @functools.cached_property
    def hidden(self) -> frozenset[int]:
        """The layers of `elsewhere` whose regions show nothing: none of their pages is at home."""
        return self.gone - self.unfilled

    @functools.cached_property
    def absent(self) -> tuple[int, ...]:
        """How many of the last pages of `own` are not the layer's now: they are ring, KV or lent."""
        if not self.hidden:
            return self.tails
        return tuple(len(self.own[layer]) if layer in self.hidden else tail for layer, tail in enumerate(self.tails))

    @functools.cached_property
    def buffers(self) -> dict[int, Pages]:
        """The ring buffer of each layer that streams."""
        return {layer: self.ring[index % len(self.ring)] for index, layer in enumerate(self.streamed)}

    # -- other states of the same tenant -----------------------------------------------------------------------------

    def given_up(self, layers: Collection[int]) -> TenantPages:
        """These pages when the tenant has given these layers up, all that stream among them: nothing streams then."""
        homes = tuple(() if layer in layers else home for layer, home in enumerate(self.homes))
        gone = dict.fromkeys(layers, ()) | dict(self.elsewhere)
        return replace(self.at_home(), homes=homes, elsewhere=tuple(sorted(gone.items())), sizes=())

    def with_homes(self, homes: Mapping[int, Pages]) -> TenantPages:
        """These pages when these layers, which are cold, are at home there."""
        found = tuple(homes.get(layer, home) for layer, home in enumerate(self.homes))
        return replace(
            self, homes=found, elsewhere=tuple(each for each in self.elsewhere if each[0] not in homes), sizes=()
        )

    def shows(self, layer: int) -> Pages:
        """The pages that the layer's region shows, or will; () if it is elsewhere."""
        if layer in self.hidden:
            return ()
        home, tail = self.own[layer], self.tails[layer]
        return joined([run_of(home[: len(home) - tail]), tail_of(self.buffers[layer], tail)]) if tail else home

    def computes(self, layer: int) -> bool:
        """Whether passes compute this layer."""
        return layer not in self.gone and (self.computed is None or layer in self.computed)

    def at_home(self) -> TenantPages:
        """These pages when nothing streams."""
        return replace(self, tails=(0,) * len(self.tails), ring=(), lent=frozenset())

    def with_streaming(self, target: Streaming) -> TenantPages:
        """These pages when exactly `target` streams. The caller ensures that tails and buffers fit the layers (`Streaming.of`).

        Raises InvalidArgument: fewer streamed layers than buffers + 1 (fields buffers, streamed), tails too small for the ring
        (needed_pages, available_pages). Raises InvalidState (field streamed) if what streams does so for good.
        """
        if self.for_good:
            raise InvalidState(
                f"{len(self.streamed)} layers have no pages of their own and stream for good; nothing was planned; attach "
                "without resident_layers for layers that come and go",
                streamed=self.streamed,
            )
        _check(target)
        return replace(self, tails=target.tails, ring=_choose_ring(self, target))

    def holding(
        self, layers: Collection[int], target: Streaming, *, unfilled: frozenset[int] = frozenset()
    ) -> TenantPages:
        """These pages when the tenant holds exactly these layers, all others are elsewhere, and of those held `target` streams.
        unfilled: as the field, by then. Raises InvalidArgument as `with_streaming`."""
        gone = {layer: own for layer, own in enumerate(self.own) if layer not in layers or layer in unfilled}
        return replace(
            self,
            homes=tuple(() if layer in gone else own for layer, own in enumerate(self.own)),
            tails=target.tails,
            ring=_choose_ring(self, target),
            elsewhere=tuple(gone.items()),
            unfilled=unfilled,
            sizes=(),
        )

    def filled(self, layer: int) -> TenantPages:
        """These pages when this layer of `unfilled` has its bytes."""
        elsewhere = tuple(each for each in self.elsewhere if each[0] != layer)
        homes = tuple(self.own[layer] if each == layer else home for each, home in enumerate(self.homes))
        return replace(self, homes=homes, elsewhere=elsewhere, unfilled=self.unfilled - {layer}, sizes=())

    def to_fetch(self, target: Streaming) -> frozenset[int]:
        """The lent pages that must be free before a plan of `plan_streaming` for the target can be applied: they come home."""
        if not self.lent:
            return frozenset()
        return self.lent - _tail_pages(self.homes, target.tails).difference(*_choose_ring(self, target))


# -- the ring -------------------------------------------------------------------------------------------------------------


def _check(target: Streaming) -> None:
    streamed = len(target.layers)
    if streamed and not 1 <= target.buffers < streamed:
        raise InvalidArgument(
            f"{streamed} streamed layers need between 1 and {streamed - 1} ring buffers, got {target.buffers}: with as "
            "many buffers as layers no page would become free; nothing was planned",
            buffers=target.buffers,
            streamed=streamed,
        )


def tail_of(home: Pages, pages: int) -> Pages:
    """The last `pages` of these."""
    return run_of(home[len(home) - pages :])


def _tail_pages(homes: Sequence[Pages], tails: Sequence[int]) -> frozenset[int]:
    return frozenset(chain.from_iterable(tail_of(home, tail) for home, tail in zip(homes, tails) if tail))


def by_place(ring: Ring) -> dict[tuple[int, int], int]:
    """(buffer, distance from its end) -> page."""
    return {(b, -1 - j): page for b, buffer in enumerate(ring) for j, page in enumerate(reversed(buffer))}


def _choose_ring(now: TenantPages, target: Streaming) -> Ring:
    """`ring_of`, or InvalidArgument; the same object as the present ring if it is the same, since plans compare by identity."""
    ring = ring_of(now, target)
    if ring is None:
        needed, available = target.buffers * target.depth, sum(target.tails)
        raise InvalidArgument(
            f"{target.buffers} ring buffers of {target.depth} pages need {needed} pages, but only {available} stream; "
            "nothing was planned; stream more or use fewer buffers",
            buffers=target.buffers,
            needed_pages=needed,
            available_pages=available,
        )
    return now.ring if ring == now.ring else ring


def ring_of(now: TenantPages, target: Streaming) -> Ring | None:
    """Pages for the ring from the tails of `target`. Pages stay at their places if they can.

    () if nothing is to stream. None if the tails are too small for the ring: such a target cannot stream.
    """
    buffers, depth, tails = target.buffers, target.depth, target.tails
    if not target.layers:
        return ()
    if len(now.ring) == buffers and now.depth == depth:
        shorter = [layer for layer in now.streamed if tails[layer] < now.tails[layer]]
        if not shorter or set(shorter).isdisjoint(now.ring_layers):
            return now.ring  # the usual case: growing or shrinking beside a ring that stays
    needed = buffers * depth
    if sum(tails) < needed:
        return None
    rank = {layer: index for index, layer in enumerate(now.ring_preference)}
    if not now.streamed:
        order = sorted(target.layers, key=lambda layer: (rank.get(layer, len(rank)), -tails[layer], layer))
        if all(tails[layer] >= depth for layer in order[:buffers]):
            return tuple(tail_of(now.homes[layer], depth) for layer in order[:buffers])  # as `fill` below would do
    pages = _tail_pages(now.homes, tails)
    chosen = {
        (b, at): page for (b, at), page in by_place(now.ring).items() if page in pages and b < buffers and -at <= depth
    }
    used = set(chosen.values())
    # Pages that are neither KV nor lent come first: no block has to move for them. Lent and KV pages count the same.
    given = frozenset(chain.from_iterable(map(now.away, now.streamed))).difference(*now.ring)
    # First the layers that the ring's region shows already, then those that give nothing else, then large ones.
    order = sorted(
        target.layers,
        key=lambda layer: (rank.get(layer, len(rank)), not given.isdisjoint(now.homes[layer]), -tails[layer], layer),
    )
    places = [(b, -1 - j) for j in range(depth) for b in range(buffers)]

    def fill(allowed: Callable[[int], bool]) -> None:
        def put(place: tuple[int, int], page: int) -> None:
            chosen[place] = page
            used.add(page)

        # One layer per buffer, each page where it stands at home: the region shows them so from the start.
        for b, at in places:
            layer = order[b]
            if (b, at) not in chosen and -at <= tails[layer]:
                page = now.homes[layer][at]
                if page not in used and allowed(page):
                    put((b, at), page)
        empty = [place for place in places if place not in chosen]
        free: list[list[int]] = []  # of as few layers as possible, which then are the last to come home
        for layer in order:
            if sum(map(len, free)) >= len(empty):
                break
            last_first = reversed(tail_of(now.homes[layer], tails[layer]))
            free.append([page for page in last_first if page not in used and allowed(page)])
        levels = (page for page in chain.from_iterable(zip_longest(*free)) if page is not None)
        for place, page in zip(empty, levels):
            put(place, page)

    for allowed in (lambda page: page not in given, lambda page: True):
        if len(chosen) < needed:
            fill(allowed)
    return tuple(run_of(chosen[b, at] for at in range(-depth, 0)) for b in range(buffers))
