"""Plans against the obvious: carry the steps out on dictionaries and look at what came of them. What streams is any vector of
tails: whole layers, the same slice of every layer, and mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap.memory.pages import Streaming, TenantPages, Transition, plan_free_pages, plan_streaming, run_of

TENANT, RING = 7, 99


@dataclass(frozen=True)
class SetOwner:
    pages: Sequence[int]
    from_owner: str
    to_owner: str
    tenant: int


@dataclass(frozen=True)
class Point:
    region: int
    first_slot: int
    pages: Sequence[int]
    deferred: bool
    layer: int | None  # None: the ring's own region


@dataclass(frozen=True)
class SetHome:
    region: int
    pages: Sequence[int]


def steps_of(plan: Transition) -> tuple[SetOwner | Point | SetHome, ...]:
    kinds = {"set_owner": SetOwner, "point": Point, "set_home": SetHome}
    made = [kinds[kind](*rest) for kind, *rest in plan.steps]
    return tuple(
        replace(each, layer=None) if isinstance(each, Point) and each.region == RING else each for each in made
    )


def tenant(sizes: Sequence[int], shuffle: int = 0, preference: tuple[int, ...] | None = None) -> TenantPages:
    """Layers of these sizes; page ids are distinct and, with `shuffle`, not consecutive."""
    total = sum(sizes)
    ids = [(i * (shuffle + 1)) % total if shuffle and total % (shuffle + 1) else i for i in range(total)]
    ids = ids if len(set(ids)) == total else list(range(total))
    homes, first = [], 0
    for size in sizes:
        homes.append(tuple(ids[first : first + size]))
        first += size
    if preference is None:
        preference = (0, len(sizes) // 2)
    regions = tuple(range(10, 10 + len(sizes)))
    return TenantPages(TENANT, tuple(homes), regions, RING, (0,) * len(sizes), ring_preference=preference)


def whole(now: TenantPages, layers: Sequence[int], buffers: int) -> Streaming:
    return Streaming.of(now.sizes, layers, buffers)


def slices(now: TenantPages, tail: int, buffers: int) -> Streaming:
    return Streaming.of(now.sizes, range(len(now.homes)) if tail else (), buffers, tail)


class World:
    """Who owns each page, what each region shows and which home bytes are loaded, from the words of the docstrings alone."""

    def __init__(self, now: TenantPages) -> None:
        self.pages = now
        self.owner = {page: "params" for home in now.homes for page in home}
        self.shown = dict(zip(now.layer_regions, now.homes))
        self.homes = dict(self.shown)
        self.ring: dict[int, int] = {}
        self.loaded = dict.fromkeys(self.owner, True)

    def carry_out(self, plan: Transition) -> None:
        changed: set[int] = set()
        size = self.pages.buffer_pages
        in_use = {
            b * size + size - len(buffer) + at: page
            for b, buffer in enumerate(self.pages.ring)
            for at, page in enumerate(buffer)
        }
        for step in steps_of(plan):
            if isinstance(step, SetOwner):
                assert step.tenant == TENANT and step.from_owner != step.to_owner and step.pages
                for page in step.pages:
                    assert page not in changed, "a page changes hands twice"
                    changed.add(page)
                    assert self.owner[page] == step.from_owner
                    self.owner[page] = step.to_owner
                    self.loaded[page] = False  # whoever has it writes there, or it holds what somebody wrote
            elif isinstance(step, SetHome):
                self.homes[step.region] = step.pages
            elif step.layer is None:
                assert step.region == RING and not step.deferred
                for index, page in enumerate(step.pages):
                    assert in_use.get(step.first_slot + index) != page, "shown already"
                    self.ring[step.first_slot + index] = page
            else:
                assert step.deferred and step.first_slot == 0
                assert step.region == self.pages.layer_regions[step.layer]
                assert self.shown[step.region] != step.pages, "re-pointed to what it shows"
                # Strict mode: a layer never shows a page that is KV at that moment.
                assert all(self.owner.get(page) not in ("kv", "free") for page in step.pages)
                self.shown[step.region] = step.pages
        for layer, first, count in plan.home:
            for page in plan.there.homes[layer][first : first + count]:
                assert not self.loaded[page], "loaded though it had not been away"
                self.loaded[page] = True
        self.pages = plan.there

    def check(self, target: Streaming) -> None:
        pages, size = self.pages, self.pages.buffer_pages
        assert pages.tails == target.tails
        assert pages.streamed == target.layers
        ring = [page for buffer in pages.ring for page in buffer]
        assert len(ring) == len(set(ring)) == (target.buffers * target.depth if target.layers else 0)
        assert all(len(buffer) == target.depth for buffer in pages.ring)
        tails = {page for layer in target.layers for page in pages.away(layer)}
        assert tails.issuperset(ring)
        assert pages.kv_from_homes == {page for page in tails if self.owner[page] == "kv"}
        for layer, home in enumerate(pages.homes):
            shows = self.shown[pages.layer_regions[layer]]
            for index, page in enumerate(home):
                tail = page in tails
                assert tail == (index >= len(home) - target.tails[layer])
                away = "free" if page in pages.lent else "kv"
                assert self.owner[page] == ("params" if not tail else "ring" if page in ring else away)
                assert tail or self.loaded[page]
                if not tail:
                    assert shows[index] == page
                else:  # the same bytes as the slot of the ring's region that the layer's copy is brought to
                    buffer = target.layers.index(layer) % target.buffers
                    assert shows[index] == self.ring[buffer * size + size - len(home) + index] in pages.ring[buffer]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], int, list[Streaming]]:
    count = draw(st.integers(2, 8))
    size = st.integers(1, 6)
    sizes = [draw(size)] * count if draw(st.booleans()) else draw(st.lists(size, min_size=count, max_size=count))
    changes = []
    for _ in range(draw(st.integers(1, 7))):
        layers = range(count) if draw(st.booleans()) else sorted(draw(st.sets(st.integers(0, count - 1))))
        buffers = draw(st.integers(1, 3))
        kind = draw(st.sampled_from(["whole", "slices", "any"]))
        if kind == "any":
            tails = tuple(draw(st.integers(0, n)) if layer in layers else 0 for layer, n in enumerate(sizes))
            deepest = max(tails)
            depth = draw(st.integers(deepest, max(sizes))) if deepest else 0
            changes.append(Streaming(tails, buffers, depth))
        else:
            changes.append(Streaming.of(sizes, layers, buffers, None if kind == "whole" else draw(st.integers(0, 6))))
    return sizes, draw(st.integers(0, 3)), changes


@settings(deadline=None, max_examples=examples(500))
@given(histories())
def test_a_sequence_of_plans_ends_where_each_says(history: tuple[list[int], int, list[Streaming]]) -> None:
    sizes, shuffle, changes = history
    world = World(tenant(sizes, shuffle))
    for target in changes:
        before, owners, shown = world.pages, dict(world.owner), dict(world.shown)
        if target.layers and len(target.layers) <= target.buffers:
            with pytest.raises(InvalidArgument) as caught:
                plan_streaming(before, target)
            assert (caught.value.buffers, caught.value.streamed) == (target.buffers, len(target.layers))
            continue
        if target.layers and sum(target.tails) < target.buffers * target.depth:
            with pytest.raises(InvalidArgument) as caught:
                plan_streaming(before, target)
            needed = target.buffers * target.depth
            assert (caught.value.needed_pages, caught.value.available_pages) == (needed, sum(target.tails))
            continue
        plan = plan_streaming(before, replace(target, selection="so"))
        assert plan.selection == "so"
        assert world.pages is before
        world.carry_out(plan)
        world.check(target)
        # Only differences, and all of them.
        moved = {page for step in steps_of(plan) if isinstance(step, SetOwner) for page in step.pages}
        assert moved == {page for page in owners if owners[page] != world.owner[page]}
        assert sorted(plan.gained) == sorted(p for p in owners if world.owner[p] == "kv" != owners[p])
        assert sorted(plan.lost) == sorted(p for p in owners if owners[p] == "kv" != world.owner[p])
        pointed = {step.layer for step in steps_of(plan) if isinstance(step, Point) and step.layer is not None}
        assert set(plan.held) == pointed and len(plan.held) == len(pointed)
        assert pointed == {
            layer for layer, region in enumerate(before.layer_regions) if shown[region] != world.shown[region]
        }
        # Loaded is exactly what was away and is at home now.
        home = {page for page in owners if world.owner[page] == "params"}
        parts = [page for layer, first, n in plan.home for page in before.homes[layer][first : first + n]]
        assert sorted(parts) == sorted(home - {page for page in owners if owners[page] == "params"})
        assert all(n > 0 for _, _, n in plan.home)
        # Pages of the ring stay at their places wherever they can, and the plan says where they could not.
        old, new = (
            {(b, at - len(r)): p for b, r in enumerate(ring) for at, p in enumerate(r)}
            for ring in (before.ring, plan.there.ring)
        )
        assert plan.ring_moves == any(new.get(place) != page for place, page in old.items())
        tails = {page for layer in target.layers for page in world.pages.away(layer)}
        for (b, at), page in old.items():
            if page in tails and b < target.buffers and -at <= target.depth:
                assert new[b, at] == page
        # It takes from KV only what nothing else could give.
        if target.layers and all(had <= has for had, has in zip(before.tails, target.tails)):
            entering = sum(target.tails) - sum(before.tails)
            kept = sum(1 for b, at in old if b < target.buffers and -at <= target.depth)
            gone = len(old) - kept  # of a ring with fewer buffers
            assert len(plan.lost) == max(0, target.buffers * target.depth - kept - entering - gone)
        if not plan:
            assert (before.tails, before.ring) == (target.tails, plan.there.ring)
        assert not plan_streaming(world.pages, target), "the same again"


def test_a_ring_that_has_to_go_is_said_to_move() -> None:
    world = World(tenant([2] * 6))
    world.carry_out(plan_streaming(world.pages, whole(world.pages, (0, 3), 1)))
    assert set(world.pages.ring_layers) == {0}
    assert plan_streaming(world.pages, whole(world.pages, (2, 3), 1)).ring_moves
    assert plan_streaming(world.pages, whole(world.pages, (), 1)).ring_moves
    # One more buffer beside the old one.
    assert not plan_streaming(world.pages, whole(world.pages, (0, 1, 2, 3), 2)).ring_moves


def test_lent_pages_that_the_ring_needs_are_asked_back() -> None:
    now = tenant([2] * 6)
    lending = plan_streaming(now, whole(now, (0, 1, 2), 1), to="free")
    there = lending.there
    assert there.ring == (now.homes[0],)
    # Layer 0 comes home, and with it the ring: another layer's pages, which are lent, have to take its place.
    target = whole(now, (1, 2), 1)
    assert there.to_fetch(target) == set(now.homes[1])
    back = plan_streaming(there, target)
    assert back.there.ring == (now.homes[1],)
    assert SetOwner(now.homes[1], "free", "ring", TENANT) in steps_of(back)
    assert (back.lost, back.gained, back.there.lent, back.ring_moves) == ((), (), set(now.homes[2]), True)


@settings(deadline=None, max_examples=examples(100))
@given(histories(), st.data())
def test_lent_pages_stay_lent_until_they_come_home(history, data) -> None:
    sizes, shuffle, changes = history
    fit = [t for t in changes if not t.layers or (sum(t.tails) >= t.buffers * t.depth and len(t.layers) > t.buffers)]
    if not fit:
        return
    first, then = data.draw(st.sampled_from(fit)), data.draw(st.sampled_from(fit))
    world = World(tenant(sizes, shuffle))
    plan = plan_streaming(world.pages, first, to="free")
    world.carry_out(plan)
    world.check(first)
    assert not plan.gained
    assert plan.there.lent == {page for page, owner in world.owner.items() if owner == "free"}
    # What would be lost of it, were it KV.
    before, needed = world.pages.lent, world.pages.to_fetch(then)
    now = world.pages
    owned = TenantPages(TENANT, now.homes, now.layer_regions, RING, now.tails, now.ring, now.ring_preference)
    assert needed == set(plan_streaming(owned, then).lost)
    plan = plan_streaming(world.pages, then, to="free")
    fetched = {
        page
        for step in steps_of(plan)
        if isinstance(step, SetOwner) and step.from_owner == "free"
        for page in step.pages
    }
    assert (fetched, plan.lost) == (needed, ()) and before - needed <= plan.there.lent
    world.carry_out(plan)
    world.check(then)


def test_free_pages_change_hands_and_nothing_else() -> None:
    fresh = tenant([2, 2, 2])
    now = TenantPages(TENANT, fresh.homes, fresh.layer_regions, RING, (2, 2, 0), ((0, 1),), fresh.ring_preference)
    plan = plan_free_pages(now, [20, 9, 11], give=True)
    assert steps_of(plan) == (SetOwner((20, 9, 11), "free", "kv", TENANT),)
    assert (plan.gained, plan.lost, plan.there) == ((20, 9, 11), (), now)
    assert (plan.home, plan.held, plan.ring_moves) == ((), (), False)
    back = plan_free_pages(now, [9], give=False)
    assert steps_of(back) == (SetOwner(run_of([9]), "kv", "free", TENANT),)
    assert (back.gained, back.lost) == ((), run_of([9]))


def test_copies_in_bytes() -> None:
    now = tenant([4, 2, 4])
    plan = plan_streaming(now, slices(now, 3, 1))
    # Tails are aligned to the end of the buffer's four slots.
    assert plan.copies((390, 150, 400), 100) == ((100, 0, 100), (100, 200, 100), ())
    there = plan.there
    assert plan_streaming(there, slices(now, 1, 1)).copies((390, 150, 400), 100)[2] == (
        (0, 100, 200),
        (1, 0, 100),
        (2, 100, 200),
    )
    offsets, _, home = plan_streaming(there, slices(now, 0, 1)).copies((390, 150, 400), 100)
    assert home == ((0, 100, 290), (1, 0, 150), (2, 100, 300)) and not offsets
