"""Slices: every streamable layer keeps its head resident and streams its last pages, its tail, through the ring. Pure.

With t_l = min(k, pages of layer l) tail pages a layer and a ring of `buffers` x k pages, which are taken out of the tails,

    alpha = (sum of t_l - buffers * k) / layer pages      layers' worth are given away: a fraction, in steps of single pages,

and one pass copies the tails only: alpha * n / (n - buffers) layers of n equal ones, instead of alpha + buffers whole layers.
Source: derived; the traffic of slices, s units in sigma slots, is alpha * s / (s - sigma) layers a pass.

Tails are aligned to the end of the ring's buffers. Slot s of a home of p pages shows slot (buffer slots - p) + s of its buffer,
whatever k is. So one more page a layer leaves all that streams already where it is: the ring's buffers grow in front, by pages
that the ring's region shows from the start (preferred layers' own), and each layer's region changes in a single slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from remap.errors import InvalidArgument
from remap.memory.plan import Plan, Point, SetOwner, Step, TenantPages, plan_streamed

__all__ = [
    "SliceCopies",
    "alpha_of",
    "copies_of",
    "giving_order",
    "plan_layers",
    "plan_slices",
    "tail_for",
]

Ring = tuple[tuple[int, ...], ...]


def plan_slices(
    now: TenantPages,
    epoch: int,
    layers: Sequence[int],
    tail_pages: int,
    buffers: int,
    *,
    to: str = "kv",
    ring: Ring | None = None,
    predicted_stall_s: float = 0.0,
    reason: str = "",
) -> Plan:
    """The plan that makes exactly `layers` stream their last `tail_pages` pages each, through `buffers` ring buffers.

    From all layers resident, or from any slices; tail_pages = 0 makes all resident (also from whole layers). `to`, `ring`: as for
    `plan_streamed`, and what was lent and comes home must have been reclaimed.

    Growing tail_pages reloads nothing and keeps each page of the ring at its place. The ring takes pages that are neither KV
    nor lent while there are any; what it has to take from KV is in `lost`. Shrinking reloads exactly what comes home
    (`reload_parts`). Raises InvalidArgument, and nothing changes: an unknown or repeated layer (field layers), tail_pages below
    0 or more than the largest layer has (tail_pages, maximum), fewer layers than buffers + 1 (buffers, streamed), tails too
    small for the ring (needed_pages, available_pages), whole layers streaming now (streamed), lent pages in the way (pages).
    """
    if now.streamed and not now.tail_pages:
        if tail_pages:
            raise InvalidArgument(
                f"{len(now.streamed)} whole layers stream: slices can stream only once all layers are resident; nothing was "
                "planned; remap 0 layers first",
                streamed=len(now.streamed),
            )
        return plan_streamed(now, epoch, (), buffers, to=to, predicted_stall_s=predicted_stall_s, reason=reason)
    target = _checked(now, layers, tail_pages, buffers)
    before = {layer: len(now.away(layer)) for layer in now.streamed}
    after = {layer: min(tail_pages, len(now.homes[layer])) for layer in target}
    if ring is None:
        ring = _choose_ring(now, after, tail_pages, buffers)
    moves = _moves(now, before, after, ring, to)
    steps: list[Step] = [
        SetOwner(tuple(pages), was, becomes, now.tenant)
        for (was, becomes), pages in moves.items()
        if becomes not in ("kv", "free")
    ]
    steps += _ring_points(now, ring)
    regions = _region_points(now, before, after, ring)
    steps += regions
    steps += [
        SetOwner(tuple(pages), was, becomes, now.tenant)
        for (was, becomes), pages in moves.items()
        if becomes in ("kv", "free")
    ]
    freed = [page for (_, becomes), pages in moves.items() if becomes == "free" for page in pages]
    home = [(layer, before[layer], after.get(layer, 0)) for layer in now.streamed]
    return Plan(
        epoch=epoch,
        steps=tuple(steps),
        streamed=target,
        ring=ring,
        reload=(),
        held=tuple(step.layer for step in regions if step.layer is not None),
        gained=tuple(chain.from_iterable(pages for (_, becomes), pages in moves.items() if becomes == "kv")),
        lost=tuple(chain.from_iterable(pages for (was, _), pages in moves.items() if was == "kv")),
        ring_moves=not _by_place(now.ring).items() <= _by_place(ring).items(),
        lent=now.lent.union(freed) if freed else now.lent,
        tail_pages=tail_pages,
        reload_parts=tuple((layer, len(now.homes[layer]) - had, had - has) for layer, had, has in home if has < had),
        predicted_stall_s=predicted_stall_s,
        reason=reason,
    )


def plan_layers(
    now: TenantPages,
    epoch: int,
    streamed: Sequence[int],
    buffers: int,
    *,
    to: str = "kv",
    ring: Ring | None = None,
    predicted_stall_s: float = 0.0,
    reason: str = "",
) -> Plan:
    """`plan_streamed`, which from slices too can bring everything home: of the empty set only."""
    if now.tail_pages and now.streamed and not streamed:
        return plan_slices(now, epoch, (), 0, buffers, to=to, predicted_stall_s=predicted_stall_s, reason=reason)
    return plan_streamed(
        now, epoch, streamed, buffers, to=to, ring=ring, predicted_stall_s=predicted_stall_s, reason=reason
    )


@dataclass(frozen=True)
class SliceCopies:
    """What the prefetcher is told of slices, all in bytes. offsets and places have one entry a streamed layer, or none."""

    offsets: tuple[int, ...]  # the copy of a layer brings [offset, end) ...
    places: tuple[int, ...]  # ... to this place of its ring buffer
    parts: tuple[tuple[int, int, int], ...]  # (layer, first byte, bytes) that come home


def copies_of(now: TenantPages, plan: Plan, layer_bytes: Sequence[int], page_bytes: int) -> SliceCopies:
    """The copies that `plan` asks for beside whole layers. `now` may be the tenant's pages before or after it."""
    offsets, places = [], []
    for layer in plan.streamed if plan.tail_pages else ():
        size = len(now.homes[layer])
        tail = min(plan.tail_pages, size)
        offsets.append((size - tail) * page_bytes)
        places.append((now.buffer_pages - tail) * page_bytes)
    parts = []
    for layer, first, pages in plan.reload_parts:
        begin, end = first * page_bytes, min((first + pages) * page_bytes, layer_bytes[layer])
        if begin < end:
            parts.append((layer, begin, end - begin))
    return SliceCopies(tuple(offsets), tuple(places), tuple(parts))


def alpha_of(homes: Sequence[Sequence[int]], tail_pages: int, buffers: int) -> float:
    """How many layers' worth are given away when the layers with these homes stream their last `tail_pages` pages.

    A layer's worth is the pages of the largest. 0.0 for tail_pages = 0.
    """
    if not tail_pages:
        return 0.0
    sizes = [len(home) for home in homes]
    return (sum(min(tail_pages, size) for size in sizes) - buffers * tail_pages) / max(sizes)


def tail_for(homes: Sequence[Sequence[int]], alpha: float, buffers: int) -> int:
    """The smallest number of tail pages that gives at least `alpha` layers' worth away (see `alpha_of`).

    0 for alpha = 0. Raises InvalidArgument (fields alpha, maximum) if no number does, or alpha is negative or not finite.
    """
    sizes = sorted(len(home) for home in homes)
    unit = sizes[-1] if sizes else 1
    wanted = math.ceil(alpha * unit - 1e-9) if math.isfinite(alpha) else 0
    # Between the sizes of two layers each further page a layer gives the same: one from each layer that has it, less the ring's.
    tail = given = 0
    for index, size in enumerate(sizes):
        gain = len(sizes) - index - buffers
        if gain <= 0 or given >= wanted:
            break
        steps = min(size - tail, -(-(wanted - given) // gain))
        tail, given = tail + steps, given + steps * gain
    if given < wanted or not 0 <= alpha < math.inf:
        raise InvalidArgument(
            f"alpha must lie between 0 and {given / unit}, which {len(sizes)} layers in slices can give with {buffers} ring "
            f"buffers, got {alpha}; nothing changed",
            alpha=alpha,
            maximum=given / unit,
            buffers=buffers,
        )
    return tail


def giving_order(homes: Sequence[Sequence[int]], order: Sequence[int], buffers: int) -> list[int]:
    """Pages of the layers in `order`, in an order in which slices give them: what k tail pages give stands together.

    Last pages of all layers first, then the last but one, and so on. The first `buffers` layers of the order come last of all,
    since the ring is made of their tails. A KV block that straddles pages becomes usable only where they stand together.
    """
    rest, ring = order[buffers:], order[:buffers]
    depth = max((len(homes[layer]) for layer in rest), default=0)
    levels = (homes[layer][-level] for level in range(1, depth + 1) for layer in rest if level <= len(homes[layer]))
    return [*levels, *(page for layer in reversed(ring) for page in reversed(homes[layer]))]


def _checked(now: TenantPages, layers: Sequence[int], tail_pages: int, buffers: int) -> tuple[int, ...]:
    target = tuple(sorted(layers)) if tail_pages else ()
    count = len(now.homes)
    if len(set(target)) != len(target) or (target and not 0 <= target[0] <= target[-1] < count):
        raise InvalidArgument(
            f"the layers to slice must be distinct and lie in 0..{count - 1}, got {target}; nothing was planned",
            layers=count,
        )
    largest = max((len(now.homes[layer]) for layer in target), default=0)
    if not 0 <= tail_pages <= largest:
        raise InvalidArgument(
            f"tail_pages must lie in 0..{largest}, the pages of the largest of {len(target)} layers, got {tail_pages}; nothing "
            "was planned",
            tail_pages=tail_pages,
            maximum=largest,
        )
    if target and not 1 <= buffers < len(target):
        raise InvalidArgument(
            f"{len(target)} sliced layers need between 1 and {len(target) - 1} ring buffers, got {buffers}: with as many "
            "buffers as layers nothing would be freed; nothing was planned",
            buffers=buffers,
            streamed=len(target),
        )
    return target


def _tail(home: tuple[int, ...], pages: int) -> tuple[int, ...]:
    return home[len(home) - pages :]


def _by_place(ring: Ring) -> dict[tuple[int, int], int]:
    """(buffer, distance from its end) -> page."""
    return {(b, -1 - j): page for b, buffer in enumerate(ring) for j, page in enumerate(reversed(buffer))}


def _moves(
    now: TenantPages, before: Mapping[int, int], after: Mapping[int, int], ring: Ring, to: str
) -> dict[tuple[str, str], list[int]]:
    """(owner before, owner after) -> the pages that change hands, by layer and home page."""
    was_ring, is_ring = frozenset(chain.from_iterable(now.ring)), frozenset(chain.from_iterable(ring))
    ring_change = was_ring ^ is_ring
    moves: dict[tuple[str, str], list[int]] = {}
    for layer in sorted({*before, *after}):
        home = now.homes[layer]
        had, has = before.get(layer, 0), after.get(layer, 0)
        # Only pages between the two tails' beginnings, and those that enter or leave the ring: growth is on the critical path.
        change, ends = range(len(home) - max(had, has), len(home) - min(had, has)), range(0)
        if not ring_change.isdisjoint(home[change.stop :]):
            change, ends = range(change.start, len(home)), range(change.stop, len(home))
        for index in change:
            page = home[index]
            if index in ends and page not in ring_change:
                continue
            tailed, tails = index >= len(home) - had, index >= len(home) - has
            was = "ring" if page in was_ring else "params" if not tailed else "lent" if page in now.lent else "kv"
            becomes = "ring" if page in is_ring else "kv" if tails else "params"
            if was != becomes and (was, becomes) != ("lent", "kv"):
                moves.setdefault((was, becomes if becomes != "kv" else to), []).append(page)
    absent = [page for (was, _), pages in moves.items() if was == "lent" for page in pages]
    if absent:
        raise InvalidArgument(
            f"{len(absent)} pages that are to come home are lent to other tenants, the first is {absent[0]}; nothing was "
            "planned; reclaim them first",
            pages=len(absent),
        )
    return moves


def _ring_points(now: TenantPages, ring: Ring) -> list[Point]:
    """The ring's region: runs of slots that are to show other pages than the old ring had there."""
    size = now.buffer_pages
    points = []
    for index, buffer in enumerate(ring):
        old = now.ring[index] if index < len(now.ring) else ()
        first = 0
        while first < len(buffer):
            stop = first
            while stop < len(buffer) and (len(buffer) - stop > len(old) or buffer[stop] != old[stop - len(buffer)]):
                stop += 1
            if stop > first:
                slot = index * size + size - len(buffer) + first
                points.append(Point(now.ring_region, slot, buffer[first:stop], deferred=False, layer=None))
            first = stop + 1
    return points


def _region_points(now: TenantPages, before: Mapping[int, int], after: Mapping[int, int], ring: Ring) -> list[Point]:
    """The layers' regions that are to show something else: head from the home, tail from the end of the layer's buffer."""
    old_buffer = {layer: now.ring[index % len(now.ring)] for index, layer in enumerate(now.streamed)}
    buffer = {layer: ring[index % len(ring)] for index, layer in enumerate(after)}
    points = []
    for layer in sorted({*before, *after}):
        home = now.homes[layer]
        had, has = before.get(layer, 0), after.get(layer, 0)
        wanted = home[: len(home) - has] + (_tail(buffer[layer], has) if has else ())
        shows = home[: len(home) - had] + (_tail(old_buffer[layer], had) if had else ())
        if shows != wanted:
            points.append(Point(now.layer_regions[layer], 0, wanted, deferred=True, layer=layer))
    return points


def _choose_ring(now: TenantPages, after: Mapping[int, int], tail_pages: int, buffers: int) -> Ring:
    """`buffers` buffers of `tail_pages` pages out of the new tails. Pages that can stay at their places do."""
    if not after:
        return ()
    tails = {page for layer, pages in after.items() for page in _tail(now.homes[layer], pages)}
    needed = buffers * tail_pages
    if len(tails) < needed:
        raise InvalidArgument(
            f"{buffers} ring buffers of {tail_pages} pages need {needed} pages, the layers' tails have {len(tails)}; nothing "
            "was planned; slice more layers or use fewer buffers",
            buffers=buffers,
            needed_pages=needed,
            available_pages=len(tails),
        )
    places = [(b, -1 - j) for b in range(buffers) for j in range(tail_pages)]
    chosen = {place: page for place, page in _by_place(now.ring).items() if page in tails and place[0] < buffers}
    chosen = {place: page for place, page in chosen.items() if -place[1] <= tail_pages}
    used = set(chosen.values())
    given = frozenset(chain.from_iterable(map(now.away, now.streamed))).difference(*now.ring)  # KV or lent

    def shown(place: tuple[int, int]) -> int | None:
        """What the ring's region shows there from the start: of whole layers that are as large as a buffer."""
        b, at = place
        home = now.homes[now.ring_preference[b]] if b < len(now.ring_preference) else ()
        return home[at] if len(home) == now.buffer_pages else None

    def fill(allowed: Callable[[int], bool], pool: Callable[[], Iterable[int]]) -> None:
        """First what is shown already, then the pool in its order: pages that are the last to come home first."""
        for place in places:
            page = shown(place) if place not in chosen else None
            if page is not None and page in tails and page not in used and allowed(page):
                chosen[place] = page
                used.add(page)
        if len(chosen) < needed:
            left = (page for page in pool() if page in tails and page not in used and allowed(page))
            for place, page in zip([place for place in places if place not in chosen], left):
                chosen[place] = page
                used.add(page)

    def pool() -> Iterable[int]:
        for level in range(1, tail_pages + 1):
            yield from (now.homes[layer][-level] for layer, pages in after.items() if level <= pages)

    for allowed in (lambda page: page not in given, lambda page: page not in now.lent, lambda page: True):
        if len(chosen) < needed:
            fill(allowed, pool)
    return tuple(tuple(chosen[b, at] for at in range(-tail_pages, 0)) for b in range(buffers))
