"""Plans against the obvious: carry the steps out on dictionaries and look at what came of them. What streams is any vector of
tails: whole layers, the same slice of every layer, and mixtures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap.memory.pages import Streaming, TenantPages, Transition, plan_free_pages, plan_streaming, run_of

TENANT, RING = 7, 99


def tenant(sizes: Sequence[int], shuffle: int = 0) -> TenantPages:
    """Layers of these sizes; page ids are distinct and, with `shuffle`, not consecutive."""
    total = sum(sizes)
    step = shuffle + 1 if math.gcd(total, shuffle + 1) == 1 else 1
    ids = [i * step % total for i in range(total)]
    homes, first = [], 0
    for size in sizes:
        homes.append(tuple(ids[first : first + size]))
        first += size
    regions, preference = tuple(range(10, 10 + len(sizes))), (0, len(sizes) // 2)
    return TenantPages(TENANT, tuple(homes), regions, RING, (0,) * len(sizes), ring_preference=preference)


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
        for kind, *step in plan.steps:
            if kind == "set_owner":
                pages, come_from, to, whose = step
                assert whose == TENANT and come_from != to and pages
                for page in pages:
                    assert page not in changed, "a page changes hands twice"
                    changed.add(page)
                    assert self.owner[page] == come_from
                    self.owner[page] = to
                    self.loaded[page] = False  # whoever has it writes there, or it holds what somebody wrote
            elif kind == "set_home":
                self.homes[step[0]] = step[1]
            else:
                region, first_slot, pages, deferred, layer = step
                if region == RING:
                    assert not deferred
                    for index, page in enumerate(pages):
                        assert in_use.get(first_slot + index) != page, "shown already"
                        self.ring[first_slot + index] = page
                    continue
                assert deferred and first_slot == 0 and region == self.pages.layer_regions[layer]
                assert self.shown[region] != pages, "re-pointed to what it shows"
                # Strict mode: a layer never shows a page that is KV at that moment.
                assert all(self.owner.get(page) not in ("kv", "free") for page in pages)
                self.shown[region] = pages
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


@settings(deadline=None, max_examples=examples(600))
@given(histories(), st.sampled_from(["kv", "free"]))
def test_a_sequence_of_plans_ends_where_each_says(history: tuple[list[int], int, list[Streaming]], to: str) -> None:
    """Pages go to KV or, from first to last, to the free ones: such a tenant has lent them until they come home."""
    sizes, shuffle, changes = history
    world = World(tenant(sizes, shuffle))
    for target in changes:
        before, owners, shown = world.pages, dict(world.owner), dict(world.shown)
        needed = target.buffers * target.depth
        if target.layers and (len(target.layers) <= target.buffers or sum(target.tails) < needed):
            with pytest.raises(InvalidArgument) as caught:
                plan_streaming(before, target)
            fields = (
                {"buffers": target.buffers, "streamed": len(target.layers)}
                if len(target.layers) <= target.buffers
                else {"needed_pages": needed, "available_pages": sum(target.tails)}
            )
            assert fields.items() <= caught.value.fields.items()
            continue
        plan = plan_streaming(before, replace(target, selection="so"), to=to)
        assert plan.selection == "so"
        assert world.pages is before
        world.carry_out(plan)
        world.check(target)
        # Only differences, and all of them.
        moved = {page for kind, *step in plan.steps if kind == "set_owner" for page in step[0]}
        assert moved == {page for page in owners if owners[page] != world.owner[page]}
        gained = sorted(page for page in owners if world.owner[page] == to != owners[page])
        lost = sorted(page for page in owners if owners[page] == to != world.owner[page])
        assert (sorted(plan.gained), sorted(plan.lost)) == ((gained, lost) if to == "kv" else ([], []))
        assert plan.there.lent == {page for page, owner in world.owner.items() if owner == "free"}
        assert to == "kv" or before.to_fetch(target) == set(lost)
        pointed = {step[-1] for kind, *step in plan.steps if kind == "point" and step[0] != RING}
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
            assert len(lost) == max(0, target.buffers * target.depth - kept - entering - gone)
        if not plan:
            assert (before.tails, before.ring) == (target.tails, plan.there.ring)
        assert not plan_streaming(world.pages, target, to=to), "the same again"


def test_free_pages_change_hands_and_nothing_else() -> None:
    now = tenant([2, 2, 2])
    for give, pages, hands in ((True, (20, 9, 11), ("free", "kv")), (False, run_of([9]), ("kv", "free"))):
        plan = plan_free_pages(now, list(pages), give=give)
        assert plan.steps == [("set_owner", pages, *hands, TENANT)]
        assert (plan.gained, plan.lost) == ((pages, ()) if give else ((), pages)) and plan.there == now
        assert (plan.home, plan.held, plan.ring_moves) == ((), (), False)


def test_copies_in_bytes() -> None:
    now = tenant([4, 2, 4])

    def slices(tail: int) -> Streaming:
        return Streaming.of(now.sizes, range(3) if tail else (), 1, tail)

    plan = plan_streaming(now, slices(3))
    # Tails are aligned to the end of the buffer's four slots.
    assert plan.copies((390, 150, 400), 100) == ((100, 0, 100), (100, 200, 100), ())
    there = plan.there
    assert plan_streaming(there, slices(1)).copies((390, 150, 400), 100)[2] == (
        (0, 100, 200),
        (1, 0, 100),
        (2, 100, 200),
    )
    offsets, _, home = plan_streaming(there, slices(0)).copies((390, 150, 400), 100)
    assert home == ((0, 100, 290), (1, 0, 150), (2, 100, 300)) and not offsets
