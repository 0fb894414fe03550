# SPDX-License-Identifier: Apache-2.0
"""From "stream these pages" to the steps that make it so. Pure: page numbers in, a plan out.

Each of a tenant's layers has a *home*, its own pages. One vector says what streams: `tails[i]` is the number of layer
i's last pages that come through the ring (0: the layer is resident; all of them: the whole layer streams). Whole
layers, the same slice of every layer and mixtures are values of it. Streaming through `buffers` ring buffers of `depth`
pages frees the tails, except for the ring's own pages:

    ring pages  R  subset of  tails,   |R| = buffers * depth,   depth >= the largest tail
    KV pages       tails - R

The planner compares that with the present state and emits only the differences. It keeps each page of the ring at its
place whenever it can, since moving it costs driver calls.

A layer without a home streams for good, wholly, through ring buffers that are no layer's home either: no plan changes
what streams then (`TenantPages.for_good`).

A layer that another instance computes has no home either while it is away, and nothing of it is copied: all of its pages are
KV, and its region shows nothing (`TenantPages.elsewhere`). It neither streams nor gives pages to the ring. If its bytes are to
come from another instance, its pages come home first (`TenantPages.unfilled`): until they are filled it is as good as away.

A layer that its inactive tenant has given up has no home at all: it is elsewhere without pages (`TenantPages.cold`), and what
was its home is for any tenant. A plan gives it another one, of pages that the tenant has taken (`plan_homes`).

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
    "NOBODY",
    "NO_PAGE",
    "Copies",
    "Pages",
    "Plan",
    "Point",
    "SetHome",
    "SetOwner",
    "Streaming",
    "TenantPages",
    "copies_of",
    "plan_filled",
    "plan_free_pages",
    "plan_held",
    "plan_homes",
    "plan_streaming",
    "ring_of",
    "run_of",
]

MAX_BUFFERS = 2
"""Ring buffers for which the ring's region has room. More never beat two (theory: beta >= 3 buys only slack)."""

NO_PAGE = 0xFFFFFFFF
"""In a region that shows nothing, as the core says it."""

NOBODY = 0xFFFFFFFF
"""The tenant of pages that are no tenant's, as the core says it."""

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
class SetOwner:
    """Pages change hands. Owners by name: "free", "params", "kv", "ring"."""

    pages: Pages
    from_owner: str
    to_owner: str
    tenant: int


@dataclass(frozen=True)
class Point:
    """A region shows these pages from now on. `layer` is None for the ring's own region."""

    region: int
    first_slot: int
    pages: Pages
    deferred: bool
    layer: int | None


@dataclass(frozen=True)
class SetHome:
    """These pages are the home of a layer's region from now on; (): it has none."""

    region: int
    pages: Pages


Step = SetOwner | Point | SetHome


@dataclass(frozen=True)
class Streaming:
    """The part that streams: how many of each layer's last pages, through `buffers` ring buffers of `depth` pages."""

    tails: tuple[int, ...]
    buffers: int
    depth: int

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        layers: Iterable[int],
        buffers: int,
        tail: int | None = None,
        largest: int | None = None,
    ) -> Streaming:
        """These layers' last `tail` pages (all pages of a smaller layer), through buffers of `tail` pages. None: whole
        layers, through buffers of `largest` pages: the largest of all layers. sizes: pages of every layer."""
        chosen = tuple(layers)
        if not chosen:
            return cls((0,) * len(sizes), buffers, 0)
        depth = (largest or max(sizes)) if tail is None else min(tail, max(sizes[layer] for layer in chosen))
        tails = [0] * len(sizes)
        for layer in chosen:
            tails[layer] = min(depth, sizes[layer])
        return cls(tuple(tails), buffers, depth)

    @functools.cached_property
    def layers(self) -> tuple[int, ...]:
        """The streamed layers, ascending: the j-th uses ring buffer j mod buffers."""
        return tuple(layer for layer, tail in enumerate(self.tails) if tail)

    def beside(self, other: Streaming) -> Streaming:
        """All that streams in either, through the smaller number of buffers: no page comes home on the way there."""
        tails = tuple(map(max, self.tails, other.tails))
        return Streaming(tails, min(self.buffers, other.buffers), max(self.depth, other.depth))


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
        return _tail(self.homes[layer], self.tails[layer])

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
        home, tail = self.homes[layer], self.tails[layer]
        if not tail:
            return home
        buffer = self.ring[self.streamed.index(layer) % len(self.ring)]
        return joined([run_of(home[: len(home) - tail]), _tail(buffer, tail)])

    def computes(self, layer: int) -> bool:
        """Whether passes compute this layer."""
        return layer not in self.gone and (self.computed is None or layer in self.computed)

    def at_home(self) -> TenantPages:
        """These pages when nothing streams."""
        return replace(self, tails=(0,) * len(self.tails), ring=(), lent=frozenset())

    def after(self, plan: Plan) -> TenantPages:
        """These pages when the plan has been carried out."""
        there = replace(self, tails=plan.tails, ring=plan.ring, lent=plan.lent)
        if plan.elsewhere is None:
            return there
        homes = list(self.homes)
        for layer, pages in self.elsewhere:
            homes[layer] = pages
        for layer, _ in plan.elsewhere:
            homes[layer] = ()
        for layer, pages in plan.homes:
            homes[layer] = pages
        return replace(there, homes=tuple(homes), elsewhere=plan.elsewhere, unfilled=plan.unfilled, sizes=())

    def to_fetch(self, target: Streaming) -> frozenset[int]:
        """The lent pages that must be free before a plan of `plan_streaming` for the target can be applied: they come home."""
        if not self.lent:
            return frozenset()
        return self.lent - _tail_pages(self.homes, target.tails).difference(*_choose_ring(self, target))


@dataclass(frozen=True)
class Plan:
    """Steps from one state of the tenant's pages, and that state after them."""

    steps: tuple[Step, ...]
    tails: tuple[int, ...]
    ring: Ring
    # Pages that are at home again, to be loaded from the master copy: (layer, first page, how many).
    home: tuple[tuple[int, int, int], ...]
    held: tuple[int, ...]  # layers whose region the worker re-points
    gained: Pages  # pages that become KV, in giving order
    lost: Pages  # pages that stop being KV; their blocks must be empty
    ring_moves: bool  # copies in flight into the old ring must have finished before this plan is applied
    lent: frozenset[int] = frozenset()  # as in TenantPages, after it
    selection: str = ""  # how the layers that stream after it were chosen; "": as before it
    elsewhere: tuple[tuple[int, Pages], ...] | None = None  # as in TenantPages, after it; None: as before it
    unfilled: frozenset[int] = frozenset()  # of `elsewhere`, as in TenantPages, after it
    homes: tuple[tuple[int, Pages], ...] = ()  # new ones, of layers that were cold

    @functools.cached_property
    def streamed(self) -> tuple[int, ...]:
        """The layers that stream after it, ascending."""
        return tuple(layer for layer, tail in enumerate(self.tails) if tail)

    @property
    def reload(self) -> tuple[int, ...]:
        """The layers of `home`."""
        return tuple(layer for layer, _, _ in self.home)


def plan_streaming(now: TenantPages, target: Streaming, *, to: str = "kv", selection: str = "") -> Plan:
    """The plan that makes exactly `target` stream.

    to: the freed pages become the tenant's own "kv", or "free", to be lent to others. The ring's pages are taken from KV only if
    nothing else is left: those are in `lost`.

    Lent pages that come home go from free to their layers, or to the ring (`to_fetch`). Only pages that come home are loaded
    (`home`). The caller ensures that tails and buffers fit the layers (`Streaming.of`).

    Raises InvalidArgument, and nothing changes: fewer streamed layers than buffers + 1 (fields buffers, streamed), tails too
    small for the ring (needed_pages, available_pages). Raises InvalidState (field streamed) if what streams does so for
    good.
    """
    if now.for_good:
        raise InvalidState(
            f"{len(now.streamed)} layers have no pages of their own and stream for good; nothing was planned; attach without "
            "resident_layers for layers that come and go",
            streamed=now.streamed,
        )
    _check(target)
    ring = _present_or_new(now, target)
    moves = _moves(now, target.tails, ring, to)
    regions = _region_points(now, target, ring)

    steps = (
        *_owner_steps(now, moves, last=False),
        *_ring_points(now, ring),
        *regions,
        *_owner_steps(now, moves, last=True),
    )
    freed = joined([pages for (_, becomes), pages in moves.items() if becomes == "free"])
    lent = _still_lent(now, moves)
    return Plan(
        steps=steps,
        tails=target.tails,
        ring=ring,
        home=tuple(
            (layer, now.sizes[layer] - now.tails[layer], now.tails[layer] - target.tails[layer])
            for layer in now.streamed
            if target.tails[layer] < now.tails[layer]
        ),
        held=tuple(point.layer for point in regions if point.layer is not None),
        gained=joined([pages for (_, becomes), pages in moves.items() if becomes == "kv"]),
        lost=joined([pages for (was, _), pages in moves.items() if was == "kv"]),
        ring_moves=_ring_moves(now, ring),
        lent=lent.union(freed) if freed else lent,
        selection=selection,
    )


def plan_held(
    now: TenantPages,
    layers: Collection[int],
    target: Streaming,
    *,
    unfilled: frozenset[int] = frozenset(),
) -> Plan:
    """The plan after which the tenant holds exactly these layers, all others are elsewhere, and of those held `target` streams.
    No page of what leaves is lent.

    unfilled: as in TenantPages, after it. All else that comes home is loaded
    (`home`).
    """
    gone = dict(now.elsewhere)
    whole = replace(now, homes=tuple(gone.get(layer, home) for layer, home in enumerate(now.homes)), sizes=())
    after = {layer: home for layer, home in enumerate(whole.homes) if layer not in layers or layer in unfilled}
    # Of which layers the pages are KV.
    was_kv, is_kv = gone.keys() - now.unfilled, after.keys() - unfilled
    ring = _present_or_new(now, target)

    # To the pages a layer that is elsewhere is one of which all pages have left.
    def tails(of: tuple[int, ...], away: Collection[int]) -> tuple[int, ...]:
        return tuple(whole.sizes[layer] if layer in away else tail for layer, tail in enumerate(of))

    moves = _moves(replace(whole, tails=tails(now.tails, was_kv)), tails(target.tails, is_kv), ring, "kv")
    regions = [point for point in _region_points(whole, target, ring) if point.layer not in after]
    for layer, home in enumerate(whole.homes):
        if home and (layer in was_kv) is not (layer in is_kv) and not target.tails[layer]:
            shown = (NO_PAGE,) * len(home) if layer in is_kv else home
            regions.append(Point(now.layer_regions[layer], 0, shown, deferred=True, layer=layer))
    return Plan(
        steps=(
            *_owner_steps(now, moves, last=False),
            *_ring_points(now, ring),
            *regions,
            *_owner_steps(now, moves, last=True),
        ),
        tails=target.tails,
        ring=ring,
        home=tuple(
            (layer, whole.sizes[layer] - before, before - later)
            for layer, (before, later) in enumerate(zip(tails(now.tails, gone), tails(target.tails, after)))
            if later < before
        ),
        held=tuple(point.layer for point in regions if point.layer is not None and point.layer not in is_kv),
        gained=joined([pages for (_, becomes), pages in moves.items() if becomes == "kv"]),
        lost=joined([pages for (was, _), pages in moves.items() if was == "kv"]),
        ring_moves=_ring_moves(now, ring),
        lent=_still_lent(now, moves),
        elsewhere=tuple(after.items()),
        unfilled=unfilled,
    )


def plan_homes(now: TenantPages, there: TenantPages) -> Plan:
    """The plan from `now` to `there`, which differ in the layers that are cold, and maybe in what streams.

    Pages that layers hold in one of the two and in the other do not are free in that one. Pages of layers that are the
    tenant's own KV, or lent, stay as they are.
    """
    was, will = now.held, there.held
    found: dict[tuple[str, str], list[int]] = {}
    for page in sorted(was.keys() | will.keys()):
        change = was.get(page, "free"), will.get(page, "free")
        if change[0] != change[1]:
            found.setdefault(change, []).append(page)
    moves = {change: run_of(pages) for change, pages in found.items()}
    points, homes = [], []
    for layer, region in enumerate(now.layer_regions):
        shown, shows = now.shows(layer), there.shows(layer)
        if shown != shows:
            wanted = shows or (NO_PAGE,) * len(shown)
            points.append(Point(region, 0, wanted, deferred=True, layer=layer))
        if (layer in now.cold) is not (layer in there.cold):
            homes.append(SetHome(region, there.homes[layer]))
    return Plan(
        steps=(
            *_owner_steps(now, moves, last=False),
            *_ring_points(now, there.ring),
            *points,
            *homes,
            *_owner_steps(now, moves, last=True),
        ),
        tails=there.tails,
        ring=there.ring,
        home=tuple(
            (layer, 0, there.sizes[layer] - there.tails[layer])
            for layer in sorted(now.cold - there.cold)
            if there.sizes[layer] > there.tails[layer]
        ),
        held=tuple(point.layer for point in points if point.layer is not None and point.layer not in there.gone),
        gained=(),
        lost=joined([pages for (owner, _), pages in moves.items() if owner == "kv"]),
        ring_moves=_ring_moves(now, there.ring),
        lent=there.lent,
        elsewhere=there.elsewhere,
        unfilled=there.unfilled,
        homes=tuple((layer, there.homes[layer]) for layer in sorted(now.cold - there.cold)),
    )


def plan_filled(now: TenantPages, layer: int) -> Plan:
    """This layer of `unfilled` has its bytes. No page changes hands."""
    return Plan(
        steps=(),
        tails=now.tails,
        ring=now.ring,
        home=(),
        held=(),
        gained=(),
        lost=(),
        ring_moves=False,
        lent=now.lent,
        elsewhere=tuple((each, pages) for each, pages in now.elsewhere if each != layer),
        unfilled=now.unfilled - {layer},
    )


def plan_free_pages(tenant: TenantPages, pages: Iterable[int], *, give: bool) -> Plan:
    """Make free pages the tenant's KV (`give`), or its KV pages free again. Touches no layer."""
    owners = ("free", "kv") if give else ("kv", "free")
    run = run_of(pages)
    return Plan(
        steps=(SetOwner(run, owners[0], owners[1], tenant.tenant),),
        tails=tenant.tails,
        ring=tenant.ring,
        home=(),
        held=(),
        gained=run if give else (),
        lost=() if give else run,
        ring_moves=False,
        # Pages of the tenant's own streamed layers are lent exactly while they are not its KV.
        lent=tenant.lent.difference(run) if give else tenant.lent.union(tenant.kv_from_homes.intersection(run)),
    )


# -- what the prefetcher is told ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copies:
    """Copies in bytes. offsets and places have one entry per streamed layer."""

    offsets: tuple[int, ...]  # the copy of a layer brings [offset, end) ...
    places: tuple[int, ...]  # ... to this place of its ring buffer
    home: tuple[tuple[int, int, int], ...]  # (layer, first byte, bytes) that come home


def copies_of(now: TenantPages, plan: Plan, layer_bytes: Sequence[int], page_bytes: int) -> Copies:
    """The copies that `plan` asks for. `now` may be the tenant's pages before or after it."""
    sizes, tails = now.sizes, plan.tails
    home = []
    for layer, first, pages in plan.home:
        begin, end = first * page_bytes, min((first + pages) * page_bytes, layer_bytes[layer])
        if begin < end:
            home.append((layer, begin, end - begin))
    return Copies(
        tuple((sizes[layer] - tails[layer]) * page_bytes for layer in plan.streamed),
        tuple((now.buffer_pages - tails[layer]) * page_bytes for layer in plan.streamed),
        tuple(home),
    )


# -- inside ---------------------------------------------------------------------------------------------------------------


def _check(target: Streaming) -> None:
    streamed = len(target.layers)
    if streamed and not 1 <= target.buffers < streamed:
        raise InvalidArgument(
            f"{streamed} streamed layers need between 1 and {streamed - 1} ring buffers, got {target.buffers}: with as "
            "many buffers as layers no page would become free; nothing was planned",
            buffers=target.buffers,
            streamed=streamed,
        )


def _tail(home: Pages, pages: int) -> Pages:
    return run_of(home[len(home) - pages :])


def _tail_pages(homes: Sequence[Pages], tails: Sequence[int]) -> frozenset[int]:
    return frozenset(chain.from_iterable(_tail(home, tail) for home, tail in zip(homes, tails) if tail))


def _by_place(ring: Ring) -> dict[tuple[int, int], int]:
    """(buffer, distance from its end) -> page."""
    return {(b, -1 - j): page for b, buffer in enumerate(ring) for j, page in enumerate(reversed(buffer))}


def _moves(now: TenantPages, tails: Sequence[int], ring: Ring, to: str) -> dict[tuple[str, str], Pages]:
    """(owner before, owner after) -> the pages that change hands, by layer and home page."""
    was_ring, is_ring = frozenset[int](), frozenset[int]()
    if ring is not now.ring:
        was_ring, is_ring = frozenset(chain.from_iterable(now.ring)), frozenset(chain.from_iterable(ring))
    # else: the layers whose pages are the ring stream before and after, so none of these pages changes hands.
    ring_change = was_ring ^ is_ring
    moves: dict[tuple[str, str], list[Pages]] = {}

    def move(was: str, becomes: str, pages: Pages) -> None:
        if pages and was != becomes and (was, becomes) != ("lent", "kv"):
            moves.setdefault((was, to if becomes == "kv" else becomes), []).append(pages)

    for home, had, has in zip(now.homes, now.tails, tails):
        if not (had or has) or (had == has and not ring_change):
            continue
        # Look only at pages between the two tails' beginnings, and at those that enter or leave the ring: growth is on
        # the critical path, and a layer may have 10^4 pages.
        stay = len(home) - min(had, has)
        change = home[len(home) - max(had, has) : stay]
        ring_pages = is_ring if had < has else was_ring
        lends = had > has and bool(now.lent) and not now.lent.isdisjoint(change)
        if not lends and (not ring_pages or ring_pages.isdisjoint(change)):
            owner: str | None = "kv"
        elif ring_pages.issuperset(change):
            owner = "ring"
        else:
            owner = None
        if owner and had < has:
            move("params", owner, change)
        elif owner:
            move(owner, "params", change)
        else:
            for page in change:
                owner = "ring" if page in ring_pages else "lent" if lends and page in now.lent else "kv"
                move(*(("params", owner) if had < has else (owner, "params")), (page,))
        if ring_change and not ring_change.isdisjoint(home[stay:]):
            for page in home[stay:]:
                if page in ring_change:
                    was = "ring" if page in was_ring else "lent" if page in now.lent else "kv"
                    move(was, "ring" if page in is_ring else "kv", (page,))
    # Lent pages that come home are free by then.
    return {("free" if was == "lent" else was, becomes): run_of(joined(runs)) for (was, becomes), runs in moves.items()}


def _still_lent(now: TenantPages, moves: dict[tuple[str, str], Pages]) -> frozenset[int]:
    fetched = joined([pages for (was, _), pages in moves.items() if was == "free"])
    return now.lent.difference(fetched) if fetched else now.lent


def _owner_steps(now: TenantPages, moves: dict[tuple[str, str], Pages], *, last: bool) -> list[Step]:
    """Pages leave KV first (strict mode unmaps them), and enter KV last (their layers' regions have let go of them by
    then)."""
    return [
        SetOwner(pages, was, becomes, now.tenant)
        for (was, becomes), pages in moves.items()
        if (becomes in ("kv", "free")) is last
    ]


def _ring_moves(now: TenantPages, ring: Ring) -> bool:
    return ring is not now.ring and not _by_place(now.ring).items() <= _by_place(ring).items()


def _ring_points(now: TenantPages, ring: Ring) -> list[Point]:
    """The ring's region: runs of slots that are to show other pages than the old ring had there."""
    size = now.buffer_pages
    points = []
    for index, buffer in enumerate(ring):
        old = now.ring[index] if index < len(now.ring) else ()
        front = len(buffer) - len(old)
        first = 0
        if front >= 0 and run_of(buffer[front:]) == old:  # the usual case: it is new, or grows in front
            if front:
                points.append(
                    Point(now.ring_region, (index + 1) * size - len(buffer), run_of(buffer[:front]), False, None)
                )
            continue
        while first < len(buffer):
            stop = first
            while stop < len(buffer) and (len(buffer) - stop > len(old) or buffer[stop] != old[stop - len(buffer)]):
                stop += 1
            if stop > first:
                slot = index * size + size - len(buffer) + first
                points.append(Point(now.ring_region, slot, run_of(buffer[first:stop]), deferred=False, layer=None))
            first = stop + 1
    return points


def _region_points(now: TenantPages, target: Streaming, ring: Ring) -> list[Point]:
    """The layers' regions that are to show something else: head from the home, tail from the end of the layer's
    buffer."""
    old_buffer = {layer: now.ring[index % len(now.ring)] for index, layer in enumerate(now.streamed)}
    buffer = {layer: ring[index % len(ring)] for index, layer in enumerate(target.layers)}
    points = []
    for layer in sorted({*old_buffer, *buffer}):
        home, had, has = now.homes[layer], now.tails[layer], target.tails[layer]
        if had == has and old_buffer[layer] is buffer[layer]:
            continue
        wanted = joined([run_of(home[: len(home) - has]), _tail(buffer[layer], has) if has else ()])
        shows = joined([run_of(home[: len(home) - had]), _tail(old_buffer[layer], had) if had else ()])
        if shows != wanted:
            points.append(Point(now.layer_regions[layer], 0, wanted, deferred=True, layer=layer))
    return points


def _present_or_new(now: TenantPages, target: Streaming) -> Ring:
    """`_choose_ring`; the same object as the present one if it is the same, since plans compare by identity."""
    ring = _choose_ring(now, target)
    return now.ring if ring == now.ring else ring


def _choose_ring(now: TenantPages, target: Streaming) -> Ring:
    """`ring_of`, or InvalidArgument."""
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
    return ring


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
            return tuple(_tail(now.homes[layer], depth) for layer in order[:buffers])  # as `fill` below would do
    pages = _tail_pages(now.homes, tails)
    chosen = {
        (b, at): page for (b, at), page in _by_place(now.ring).items() if page in pages and b < buffers and -at <= depth
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
            last_first = reversed(_tail(now.homes[layer], tails[layer]))
            free.append([page for page in last_first if page not in used and allowed(page)])
        levels = (page for page in chain.from_iterable(zip_longest(*free)) if page is not None)
        for place, page in zip(empty, levels):
            put(place, page)

    for allowed in (lambda page: page not in given, lambda page: True):
        if len(chosen) < needed:
            fill(allowed)
    return tuple(run_of(chosen[b, at] for at in range(-depth, 0)) for b in range(buffers))
