"""From "stream these layers" to the steps that make it so. Pure: page numbers in, a plan out.

A tenant's layers each have a *home*, their own pages. Streaming a set S of layers through `buffers` ring buffers frees
the homes of S, except for the pages that the ring itself is made of:

    ring pages  R  subset of  homes(S),   |R| = buffers * pages of the largest layer
    KV pages       homes(S) - R

so alpha = (|homes(S)| - |R|) / layer pages layers' worth become KV. Where only the last pages of layers stream (slices), their
tails take the place of homes(S): slice_plan.py makes those plans. The planner compares that with what is the case now
and emits only the differences. It keeps the ring where it is whenever it can, since moving it costs driver calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from remap.errors import InvalidArgument

__all__ = ["MAX_BUFFERS", "Plan", "Point", "SetOwner", "TenantPages", "plan_free_pages", "plan_streamed", "ring_of"]

MAX_BUFFERS = 2
"""Ring buffers that the ring's region has room for. More never beat two (theory: beta >= 3 buys only slack)."""


@dataclass(frozen=True)
class SetOwner:
    """Pages change hands. Owners by name: "free", "params", "kv", "ring"."""

    pages: tuple[int, ...]
    from_owner: str
    to_owner: str
    tenant: int


@dataclass(frozen=True)
class Point:
    """A region shows these pages from now on. `layer` is None for the ring's own region."""

    region: int
    first_slot: int
    pages: tuple[int, ...]
    deferred: bool
    layer: int | None


Step = SetOwner | Point


@dataclass(frozen=True)
class TenantPages:
    """What the planner knows of one tenant. `homes[l]` are the page ids of layer l; `ring[b]` those of ring buffer b."""

    tenant: int
    homes: tuple[tuple[int, ...], ...]
    layer_regions: tuple[int, ...]
    ring_region: int
    streamed: tuple[int, ...] = ()
    ring: tuple[tuple[int, ...], ...] = ()
    ring_preference: tuple[int, ...] = ()  # layers whose homes the ring's region shows from the start
    lent: frozenset[int] = frozenset()  # pages of streamed layers' homes that are free, or another tenant's KV
    # Slices: of each streamed layer only the last tail_pages pages stream (all, if it has fewer), and ring[b] has as many. They
    # are the last ones of the buffer's `buffer_pages` slots in the ring's region. 0: whole layers stream.
    tail_pages: int = 0

    def away(self, layer: int) -> tuple[int, ...]:
        """The pages of a streamed layer's home that stream, and so are ring, KV or lent."""
        home = self.homes[layer]
        return home[max(0, len(home) - self.tail_pages) :] if self.tail_pages else home

    @property
    def ring_layers(self) -> tuple[int, ...]:
        """Streamed layers whose homes lend pages to the ring."""
        ring_pages = {page for buffer in self.ring for page in buffer}
        return tuple(layer for layer in self.streamed if not ring_pages.isdisjoint(self.homes[layer]))

    @property
    def buffer_pages(self) -> int:
        """Pages of one ring buffer: the largest layer's."""
        return max(map(len, self.homes))

    @property
    def kv_from_homes(self) -> frozenset[int]:
        """Pages of streamed layers that are the tenant's own KV now."""
        return frozenset(chain.from_iterable(map(self.away, self.streamed))).difference(*self.ring, self.lent)

    def to_reclaim(self, streamed: Sequence[int], buffers: int) -> frozenset[int]:
        """The lent pages that have to be the tenant's KV again before `plan_streamed` can stream exactly these layers."""
        if not self.lent:
            return frozenset()
        target = tuple(sorted(streamed))
        ring = _choose_ring(self, target, buffers)
        stays = frozenset(_homes(self.homes, target)).difference(*ring)
        return self.lent - stays


@dataclass(frozen=True)
class Plan:
    """Steps for one epoch, and the state of the tenant after them."""

    epoch: int
    steps: tuple[Step, ...]
    streamed: tuple[int, ...]
    ring: tuple[tuple[int, ...], ...]
    reload: tuple[int, ...]  # layers that own their pages again: to be loaded from the master copy
    held: tuple[int, ...]  # layers whose region is re-pointed by the worker
    gained: tuple[int, ...]  # pages that become KV, in giving order
    lost: tuple[int, ...]  # pages that stop being KV; their blocks must be empty
    ring_moves: bool  # copies in flight into the old ring must have finished before this plan is applied
    lent: frozenset[int] = frozenset()  # as in TenantPages, after it
    tail_pages: int = 0  # as in TenantPages, after it
    # Of layers that go on streaming less, or whose tails come home: (layer, its first home page to load, how many).
    reload_parts: tuple[tuple[int, int, int], ...] = ()
    predicted_stall_s: float = 0.0
    reason: str = ""


def plan_streamed(
    now: TenantPages,
    epoch: int,
    streamed: Sequence[int],
    buffers: int,
    *,
    to: str = "kv",
    ring: tuple[tuple[int, ...], ...] | None = None,
    predicted_stall_s: float = 0.0,
    reason: str = "",
) -> Plan:
    """The plan that makes exactly `streamed` the tenant's streamed layers, through `buffers` ring buffers.

    to: what the pages become that this frees: the tenant's own "kv", or "free", to be lent to others. ring: the pages that the
    ring is made of, to restore an earlier state; by default they are chosen here. An empty set gives
    every layer its home back; of pages that come home, those that were lent must have been reclaimed (they are the tenant's
    KV, and not in `now.lent`: see `to_reclaim`). Raises InvalidArgument (fields: layer or buffers) for an unknown or
    repeated layer, fewer streamed layers than buffers + 1, or homes too small for the ring, or lent pages
    (field pages) that come home without having been reclaimed; nothing changes. From slices no set can be reached here
    (InvalidArgument, field tail_pages): their pages have to come home first, see `slice_plan.plan_layers`.
    """
    target = tuple(sorted(streamed))
    layers = len(now.homes)
    if now.tail_pages and now.streamed:
        raise InvalidArgument(
            f"the last {now.tail_pages} pages of {len(now.streamed)} layers stream: whole layers can stream only once all "
            "layers are resident; nothing was planned; remap 0 layers first",
            tail_pages=now.tail_pages,
        )
    if len(set(target)) != len(target) or (target and not 0 <= target[0] <= target[-1] < layers):
        raise InvalidArgument(
            f"the streamed layers must be distinct and lie in 0..{layers - 1}, got {target}; nothing was planned",
            layers=layers,
        )
    if target and not 1 <= buffers < len(target):
        raise InvalidArgument(
            f"{len(target)} streamed layers need between 1 and {len(target) - 1} ring buffers, got {buffers}: with as "
            "many buffers as layers nothing would be freed; nothing was planned",
            buffers=buffers,
            streamed=len(target),
        )
    if ring is None:
        ring = _choose_ring(now, target, buffers)
    # Only layers that enter or leave the streamed set, or lend pages to the ring, have pages that change hands: growth is
    # on the engine's critical path, and the other layers may have 10^4 pages.
    touched = set(now.streamed).symmetric_difference(target)
    in_ring_before = in_ring_after = frozenset[int]()
    if ring != now.ring:
        in_ring_before = frozenset(chain.from_iterable(now.ring))
        in_ring_after = frozenset(chain.from_iterable(ring))
        in_rings = in_ring_before | in_ring_after
        touched.update(layer for layer in {*now.streamed, *target} if not in_rings.isdisjoint(now.homes[layer]))
    # else: who lends to the ring was and stays streamed, so it is not touched, and no touched layer has pages in the ring.
    moves: dict[tuple[str, str], list[int]] = {}
    for layer in sorted(touched):
        home = now.homes[layer]
        before = _owners(home, layer in now.streamed, in_ring_before, now.lent)
        after = _owners(home, layer in target, in_ring_after)
        if isinstance(before, str) and isinstance(after, str):
            if before != after and (before, after) != ("lent", "kv"):
                moves.setdefault((before, after if after != "kv" else to), []).extend(home)
            continue
        for index, page in enumerate(home):
            was = before if isinstance(before, str) else before[index]
            becomes = after if isinstance(after, str) else after[index]
            if was != becomes and (was, becomes) != ("lent", "kv"):
                moves.setdefault((was, becomes if becomes != "kv" else to), []).append(page)
    absent = [page for (was, _), pages in moves.items() if was == "lent" for page in pages]
    if absent:
        raise InvalidArgument(
            f"{len(absent)} pages that are to come home are lent to other tenants, the first is {absent[0]}; nothing was "
            "planned; reclaim them first",
            pages=len(absent),
        )

    steps: list[Step] = []
    # Out of KV first (strict mode unmaps them), into KV last (their layers' regions have let go of them by then).
    for (was, becomes), pages in moves.items():
        if becomes not in ("kv", "free"):
            steps.append(SetOwner(tuple(pages), was, becomes, now.tenant))
    ring_moves = ring[: len(now.ring)] != now.ring[: len(ring)] or len(ring) < len(now.ring)
    if ring != now.ring and ring:
        size = now.buffer_pages
        for index, buffer in enumerate(ring):
            steps.append(Point(now.ring_region, index * size, buffer, deferred=False, layer=None))
    slot_of = {layer: index % buffers for index, layer in enumerate(target)} if target else {}
    old_slot = {layer: index % len(now.ring) for index, layer in enumerate(now.streamed)} if now.ring else {}
    held = []
    for layer in sorted({*now.streamed, *target}):
        home = now.homes[layer]
        shows = now.ring[old_slot[layer]][: len(home)] if layer in old_slot else home
        wanted = ring[slot_of[layer]][: len(home)] if layer in slot_of else home
        if shows != wanted:
            steps.append(Point(now.layer_regions[layer], 0, wanted, deferred=True, layer=layer))
            held.append(layer)
    for (was, becomes), pages in moves.items():
        if becomes in ("kv", "free"):
            steps.append(SetOwner(tuple(pages), was, becomes, now.tenant))
    freed = [page for (_, becomes), pages in moves.items() if becomes == "free" for page in pages]
    return Plan(
        epoch=epoch,
        steps=tuple(steps),
        streamed=target,
        ring=ring,
        reload=tuple(sorted(set(now.streamed) - set(target))),
        held=tuple(held),
        gained=tuple(chain.from_iterable(pages for (_, becomes), pages in moves.items() if becomes == "kv")),
        lost=tuple(chain.from_iterable(pages for (was, _), pages in moves.items() if was == "kv")),
        ring_moves=bool(now.ring) and ring_moves,
        lent=now.lent.union(freed) if freed else now.lent,
        predicted_stall_s=predicted_stall_s,
        reason=reason,
    )


def plan_free_pages(tenant: TenantPages, epoch: int, pages: Sequence[int], *, give: bool, reason: str = "") -> Plan:
    """Free pages become the tenant's KV (`give`), or its KV pages become free again. No layer is touched."""
    owners = ("free", "kv") if give else ("kv", "free")
    return Plan(
        epoch=epoch,
        steps=(SetOwner(tuple(pages), owners[0], owners[1], tenant.tenant),),
        streamed=tenant.streamed,
        ring=tenant.ring,
        reload=(),
        held=(),
        gained=tuple(pages) if give else (),
        lost=() if give else tuple(pages),
        ring_moves=False,
        # Pages of the tenant's own layers are lent while they are not its KV, and only then.
        lent=tenant.lent.difference(pages) if give else tenant.lent.union(tenant.kv_from_homes.intersection(pages)),
        tail_pages=tenant.tail_pages,
        reason=reason,
    )


def _homes(homes: Sequence[tuple[int, ...]], layers: Sequence[int]) -> list[int]:
    return list(chain.from_iterable(homes[layer] for layer in layers))


def _owners(
    home: Sequence[int], away: bool, ring_pages: frozenset[int], lent: frozenset[int] = frozenset()
) -> str | list[str]:
    """Who the pages of a home belong to: one name if all have one owner, as is usual, otherwise one for each.

    "lent" stands for free or another tenant's.
    """
    rest = "kv" if away else "params"
    partly_lent = away and bool(lent) and not lent.isdisjoint(home)
    if partly_lent and lent.issuperset(home):
        return "lent"
    if not partly_lent and (not ring_pages or ring_pages.isdisjoint(home)):
        return rest
    if ring_pages and ring_pages.issuperset(home):
        return "ring"
    return ["ring" if page in ring_pages else "lent" if page in lent else rest for page in home]


def _choose_ring(now: TenantPages, target: tuple[int, ...], buffers: int) -> tuple[tuple[int, ...], ...]:
    """`ring_of`, or InvalidArgument."""
    ring = ring_of(now, target, buffers)
    if ring is None:
        needed, available = buffers * now.buffer_pages, sum(len(now.homes[layer]) for layer in target)
        raise InvalidArgument(
            f"{buffers} ring buffers of {now.buffer_pages} pages need {needed} pages, the streamed layers own {available}; "
            "nothing was planned; stream more layers or use fewer buffers",
            buffers=buffers,
            needed_pages=needed,
            available_pages=available,
        )
    return ring


def ring_of(now: TenantPages, target: tuple[int, ...], buffers: int) -> tuple[tuple[int, ...], ...] | None:
    """Pages for `buffers` ring buffers out of the homes of `target` (ascending); buffers that can stay where they are do.

    () if nothing is to stream. None if the homes are too small for the ring: such a set cannot be streamed.
    """
    if not target:
        return ()
    if len(now.ring) == buffers and (set(now.streamed) <= set(target) or set(now.ring_layers) <= set(target)):
        return now.ring  # the usual case: growing or shrinking beside a ring that stays
    size = now.buffer_pages
    kept: list[tuple[int, ...]] = []
    if now.ring:
        available = set(_homes(now.homes, target))
        kept = [buffer for buffer in now.ring[:buffers] if available.issuperset(buffer)]
        if len(kept) == buffers:
            return tuple(kept)
    # Whole homes in order of preference: those that the ring's region shows already, then layers whose pages are not KV
    # (no block has to move for them), then the rest.
    used = {page for buffer in kept for page in buffer}
    in_kv = now.kv_from_homes | now.lent  # lent or not, so that reclaiming them does not change the choice
    rank = {layer: index for index, layer in enumerate(now.ring_preference)}
    order = sorted(
        target,
        key=lambda layer: (
            rank.get(layer, len(rank)),
            not in_kv.isdisjoint(now.homes[layer]),
            -len(now.homes[layer]),
            layer,
        ),
    )
    if not kept and all(len(now.homes[layer]) == size for layer in order[:buffers]):
        return tuple(now.homes[layer] for layer in order[:buffers])
    pool = _homes(now.homes, order)
    if used:
        pool = [page for page in pool if page not in used]
    wanted = (buffers - len(kept)) * size
    if len(pool) < wanted:
        return None
    fresh = [tuple(pool[index * size : (index + 1) * size]) for index in range(buffers - len(kept))]
    return (*kept, *fresh)
