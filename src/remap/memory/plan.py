# SPDX-License-Identifier: Apache-2.0
"""The steps from one state of a tenant's pages to another (pages.py). Pure: two values in, a plan out.

    now -> there: pages change hands -> regions show other pages -> layers' homes change -> pages become KV, or free

A plan has only the differences. Pages that a layer gives away become KV or free, as the caller says, while they stay its home;
those of a home that goes become free, and those of one that comes were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from remap.memory.pages import Pages, Ring, Streaming, TenantPages, by_place, joined, run_of

__all__ = [
    "NOBODY",
    "NO_PAGE",
    "Copies",
    "Plan",
    "Point",
    "SetHome",
    "SetOwner",
    "copies_of",
    "plan_between",
    "plan_filled",
    "plan_free_pages",
    "plan_streaming",
]

NO_PAGE = 0xFFFFFFFF
"""In a region that shows nothing, as the core says it."""

NOBODY = 0xFFFFFFFF
"""The tenant of pages that are no tenant's, as the core says it."""


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
class Plan:
    """Steps from one state of the tenant's pages to `there`."""

    steps: tuple[Step, ...]
    there: TenantPages
    # Pages that are at home again, to be loaded from the master copy: (layer, first page, how many).
    home: tuple[tuple[int, int, int], ...] = ()
    held: tuple[int, ...] = ()  # layers whose region the worker re-points
    gained: Pages = ()  # pages that become KV, in donation order
    lost: Pages = ()  # pages that stop being KV; their blocks must be empty
    ring_moves: bool = False  # copies in flight into the old ring must have finished before this plan is applied
    selection: str = ""  # how the layers that stream after it were chosen; "": as before it

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that stream after it, ascending."""
        return self.there.streamed

    @property
    def reload(self) -> tuple[int, ...]:
        """The layers of `home`."""
        return tuple(layer for layer, _, _ in self.home)


def plan_between(now: TenantPages, there: TenantPages, *, to: str = "kv", selection: str = "") -> Plan:
    """The plan from `now` to `there`.

    to: pages that layers give away, and that are no ring's, become the tenant's own "kv", or "free", to be lent to others; of
    a home that goes they are free. Lent pages that come home come from free (`TenantPages.to_fetch`): these are no longer
    in `there.lent`, and what becomes free of a home that stays is. The ring's pages are taken from KV only if nothing else is
    left: those are in `lost`. Only pages that come home are loaded (`home`).
    """
    moves, freed = _moves(now, there, to)
    fetched = joined([pages for (was, _), pages in moves.items() if was == "free"])
    if fetched or freed:
        there = replace(there, lent=there.lent.difference(fetched).union(freed))
    regions = _region_points(now, there)
    return Plan(
        steps=(
            *_owner_steps(now, moves, last=False),
            *_ring_points(now, there.ring),
            *regions,
            *_homes(now, there),
            *_owner_steps(now, moves, last=True),
        ),
        there=there,
        home=_loads(now, there),
        held=tuple(point.layer for point in regions if point.layer is not None and point.layer not in there.hidden),
        gained=joined([pages for (_, becomes), pages in moves.items() if becomes == "kv"]),
        lost=joined([pages for (was, _), pages in moves.items() if was == "kv"]),
        ring_moves=there.ring is not now.ring and not by_place(now.ring).items() <= by_place(there.ring).items(),
        selection=selection,
    )


def plan_streaming(now: TenantPages, target: Streaming, *, to: str = "kv") -> Plan:
    """`plan_between`, to where exactly `target` streams. Raises as `TenantPages.with_streaming`."""
    return plan_between(now, now.with_streaming(target), to=to, selection=target.selection)


def plan_filled(now: TenantPages, layer: int) -> Plan:
    """This layer of `unfilled` has its bytes: nothing is loaded. No page changes hands."""
    return Plan(steps=(), there=now.filled(layer))


def plan_free_pages(tenant: TenantPages, pages: Iterable[int], *, give: bool) -> Plan:
    """Make free pages the tenant's KV (`give`), or its KV pages free again. Touches no layer."""
    owners = ("free", "kv") if give else ("kv", "free")
    run = run_of(pages)
    # Pages of the tenant's own streamed layers are lent exactly while they are not its KV.
    lent = tenant.lent.difference(run) if give else tenant.lent.union(tenant.kv_from_homes.intersection(run))
    return Plan(
        steps=(SetOwner(run, owners[0], owners[1], tenant.tenant),),
        there=tenant if len(lent) == len(tenant.lent) else replace(tenant, lent=lent),
        gained=run if give else (),
        lost=() if give else run,
    )


# -- what the prefetcher is told ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copies:
    """Copies in bytes. offsets and places have one entry per streamed layer."""

    offsets: tuple[int, ...]  # the copy of a layer brings [offset, end) ...
    places: tuple[int, ...]  # ... to this place of its ring buffer
    home: tuple[tuple[int, int, int], ...]  # (layer, first byte, bytes) that come home


def copies_of(plan: Plan, layer_bytes: Sequence[int], page_bytes: int) -> Copies:
    """The copies that `plan` asks for."""
    there, home = plan.there, []
    for layer, first, pages in plan.home:
        begin, end = first * page_bytes, min((first + pages) * page_bytes, layer_bytes[layer])
        if begin < end:
            home.append((layer, begin, end - begin))
    return Copies(
        tuple((there.sizes[layer] - there.tails[layer]) * page_bytes for layer in there.streamed),
        tuple((there.buffer_pages - there.tails[layer]) * page_bytes for layer in there.streamed),
        tuple(home),
    )


# -- inside ---------------------------------------------------------------------------------------------------------------


def _moves(now: TenantPages, there: TenantPages, to: str) -> tuple[dict[tuple[str, str], Pages], Pages]:
    """(owner before, owner after) -> the pages that change hands, by layer and home page. And those of layers whose home stays
    that become free."""
    was_ring, is_ring = frozenset[int](), frozenset[int]()
    if there.ring is not now.ring:
        was_ring, is_ring = frozenset(chain.from_iterable(now.ring)), frozenset(chain.from_iterable(there.ring))
    # else: the layers whose pages are the ring stream before and after, so none of these pages changes hands.
    ring_change = was_ring ^ is_ring
    moves: dict[tuple[str, str], list[Pages]] = {}
    freed: list[Pages] = []

    def move(was: str, becomes: str, pages: Pages) -> None:
        if not pages or was == becomes or (was, becomes) == ("lent", "kv"):
            return
        becomes = to if becomes == "kv" else becomes
        moves.setdefault(("free" if was == "lent" else was, becomes), []).append(pages)
        if becomes == "free":
            freed.append(pages)

    for old, home, had, has in zip(now.own, there.own, now.absent, there.absent):
        if old is not home and old != home:
            for whose, run in _with_home(old, had, was_ring):
                moves.setdefault((whose, "free"), []).append(run)
            for whose, run in _with_home(home, has, is_ring):
                moves.setdefault(("free", whose), []).append(run)
            continue
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
    return {change: run_of(joined(runs)) for change, runs in moves.items()}, joined(freed)


def _with_home(home: Pages, absent: int, ring: frozenset[int]) -> list[tuple[str, Pages]]:
    """The pages that come and go with a home, the layer's and the ring's, by owner. KV and lent ones stay as they are."""
    kept = len(home) - absent
    found = [("params", run_of(home[:kept])), ("ring", run_of(page for page in home[kept:] if page in ring))]
    return [(owner, pages) for owner, pages in found if pages]


def _loads(now: TenantPages, there: TenantPages) -> tuple[tuple[int, int, int], ...]:
    """What comes home: of a layer that was elsewhere, or waited for its bytes, all that does not stream."""
    if now.elsewhere == there.elsewhere:
        layers: Iterable[int] = now.streamed
    else:
        layers = sorted({*now.streamed, *now.gone} - there.gone)
    gone, found = now.gone, []
    for layer in layers:
        size, later = there.sizes[layer], there.tails[layer]
        before = size if layer in gone else now.tails[layer]
        if later < before:
            found.append((layer, size - before, before - later))
    return tuple(found)


def _owner_steps(now: TenantPages, moves: dict[tuple[str, str], Pages], *, last: bool) -> list[Step]:
    """Pages leave KV first (strict mode unmaps them), and enter KV last (their layers' regions have let go of them by
    then)."""
    return [
        SetOwner(pages, was, becomes, now.tenant)
        for (was, becomes), pages in moves.items()
        if (becomes in ("kv", "free")) is last
    ]


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


def _region_points(now: TenantPages, there: TenantPages) -> list[Point]:
    """The layers' regions that are to show something else: head from the home, tail from the end of the layer's
    buffer."""
    old, new = now.buffers, there.buffers
    layers = {*old, *new}
    if now.elsewhere != there.elsewhere or now.unfilled != there.unfilled:
        layers.update(now.gone, there.gone)
    points = []
    for layer in sorted(layers):
        if old.get(layer) is new.get(layer) and now.tails[layer] == there.tails[layer] and now.own is there.own:
            continue
        shown, shows = now.shows(layer), there.shows(layer)
        if shown != shows:
            wanted = shows or (NO_PAGE,) * len(shown)
            points.append(Point(now.layer_regions[layer], 0, wanted, deferred=True, layer=layer))
    return points


def _homes(now: TenantPages, there: TenantPages) -> list[SetHome]:
    """The homes of layers that go cold, or that were."""
    layers = now.cold ^ there.cold if now.elsewhere or there.elsewhere else ()
    return [SetHome(now.layer_regions[layer], there.homes[layer]) for layer in sorted(layers)]
