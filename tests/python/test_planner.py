"""Plans against the obvious: carry the steps out on dictionaries and look at what came of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.errors import InvalidArgument
from remap.memory.plan import Plan, Point, SetOwner, TenantPages, plan_free_pages, plan_streamed

TENANT, RING = 7, 99


def tenant(sizes: list[int], shuffle: int = 0) -> TenantPages:
    """Layers of these sizes; page ids are distinct and, with `shuffle`, not consecutive."""
    total = sum(sizes)
    ids = [(i * (shuffle + 1)) % total if shuffle and total % (shuffle + 1) else i for i in range(total)]
    ids = ids if len(set(ids)) == total else list(range(total))
    homes, first = [], 0
    for size in sizes:
        homes.append(tuple(ids[first : first + size]))
        first += size
    return TenantPages(
        TENANT, tuple(homes), tuple(range(10, 10 + len(sizes))), RING, ring_preference=(0, len(sizes) // 2)
    )


class World:
    """Who owns each page and what each region shows, from nothing but the words of the planner's docstring."""

    def __init__(self, now: TenantPages) -> None:
        self.pages = now
        self.owner = {page: "params" for home in now.homes for page in home}
        self.shown = dict(zip(now.layer_regions, now.homes))
        self.ring: dict[int, int] = {}

    def carry_out(self, plan: Plan) -> None:
        changed: set[int] = set()
        for step in plan.steps:
            if isinstance(step, SetOwner):
                assert step.tenant == TENANT and step.from_owner != step.to_owner and step.pages
                for page in step.pages:
                    assert page not in changed, "a page changes hands twice"
                    changed.add(page)
                    assert self.owner[page] == step.from_owner
                    self.owner[page] = step.to_owner
            elif step.layer is None:
                assert step.region == RING and not step.deferred
                for index, page in enumerate(step.pages):
                    self.ring[step.first_slot + index] = page
            else:
                assert step.deferred and step.first_slot == 0
                assert step.region == self.pages.layer_regions[step.layer]
                assert self.shown[step.region] != step.pages, "re-pointed to what it shows"
                # Strict mode: a layer never shows a page that is KV at that moment.
                assert all(self.owner[page] != "kv" for page in step.pages)
                self.shown[step.region] = step.pages
        self.pages = replace(self.pages, streamed=plan.streamed, ring=plan.ring)

    def check(self, target: tuple[int, ...], buffers: int) -> None:
        pages = self.pages
        size = max(len(home) for home in pages.homes)
        assert pages.streamed == target
        ring = [page for buffer in pages.ring for page in buffer]
        assert len(ring) == len(set(ring)) == (buffers * size if target else 0)
        assert all(len(buffer) == size for buffer in pages.ring)
        for layer, home in enumerate(pages.homes):
            for page in home:
                expected = "params" if layer not in target else "ring" if page in ring else "kv"
                assert self.owner[page] == expected
        assert set(ring) <= {page for layer in target for page in pages.homes[layer]}
        for place, layer in enumerate(target):
            buffer = pages.ring[place % buffers]
            assert self.shown[pages.layer_regions[layer]] == buffer[: len(pages.homes[layer])]
        for layer, home in enumerate(pages.homes):
            if layer not in target:
                assert self.shown[pages.layer_regions[layer]] == home
        for index, page in enumerate(ring):
            assert self.ring[index] == page


def possible(sizes: list[int], target: list[int], buffers: int) -> bool:
    return sum(sizes[layer] for layer in target) >= buffers * max(sizes)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], int, list[tuple[tuple[int, ...], int]]]:
    equal = draw(st.booleans())
    count = draw(st.integers(2, 9))
    sizes = (
        [draw(st.integers(1, 4))] * count
        if equal
        else draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    )
    changes = []
    for _ in range(draw(st.integers(1, 6))):
        target = draw(st.sets(st.integers(0, count - 1)))
        buffers = draw(st.integers(1, 3))
        if len(target) <= buffers:
            target = set()
        changes.append((tuple(sorted(target)), buffers))
    return sizes, draw(st.integers(0, 3)), changes


@settings(deadline=None, max_examples=300)
@given(histories())
def test_a_sequence_of_plans_ends_where_each_says(
    history: tuple[list[int], int, list[tuple[tuple[int, ...], int]]],
) -> None:
    sizes, shuffle, changes = history
    world = World(tenant(sizes, shuffle))
    for epoch, (target, buffers) in enumerate(changes):
        before, owners = world.pages, dict(world.owner)
        shown = dict(world.shown)
        if target and not possible(sizes, list(target), buffers):
            with pytest.raises(InvalidArgument) as caught:
                plan_streamed(before, epoch, target, buffers)
            assert caught.value.needed_pages > caught.value.available_pages
            continue
        plan = plan_streamed(before, epoch, list(reversed(target)), buffers, predicted_stall_s=0.5, reason="because")
        assert (plan.epoch, plan.predicted_stall_s, plan.reason) == (epoch, 0.5, "because")
        assert world.pages is before
        world.carry_out(plan)
        world.check(target, buffers)
        # Only differences, and all of them.
        moved = {page for step in plan.steps if isinstance(step, SetOwner) for page in step.pages}
        assert moved == {page for page in owners if owners[page] != world.owner[page]}
        assert set(plan.gained) == {p for p in owners if world.owner[p] == "kv" != owners[p]}
        assert set(plan.lost) == {p for p in owners if owners[p] == "kv" != world.owner[p]}
        assert len(plan.gained) == len(set(plan.gained)) and len(plan.lost) == len(set(plan.lost))
        pointed = {step.layer for step in plan.steps if isinstance(step, Point) and step.layer is not None}
        assert set(plan.held) == pointed and len(plan.held) == len(pointed)
        assert pointed == {
            layer for layer, region in enumerate(before.layer_regions) if shown[region] != world.shown[region]
        }
        assert plan.reload == tuple(sorted(set(before.streamed) - set(target)))
        # The ring stays wherever it can.
        if len(before.ring) == buffers and set(before.ring_layers) <= set(target) and before.ring:
            assert plan.ring == before.ring and not plan.ring_moves
        if not plan.steps:
            assert (before.streamed, before.ring) == (target, plan.ring)


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 4), st.data())
def test_equal_layers_give_exactly_alpha_layers_of_pages(layers: int, size: int, data: st.DataObject) -> None:
    buffers = data.draw(st.integers(1, layers - 1))
    streamed = data.draw(st.sets(st.integers(0, layers - 1), min_size=buffers + 1))
    plan = plan_streamed(tenant([size] * layers), 1, sorted(streamed), buffers)
    assert len(plan.gained) == (len(streamed) - buffers) * size
    assert not plan.lost and not plan.reload


def test_a_nested_growth_touches_only_the_new_layers() -> None:
    world = World(tenant([3] * 8))
    world.carry_out(plan_streamed(world.pages, 1, (0, 4), 1))
    plan = plan_streamed(world.pages, 2, (0, 4, 6), 1)
    assert plan.gained == world.pages.homes[6]
    assert [step for step in plan.steps if isinstance(step, SetOwner)] == [
        SetOwner(world.pages.homes[6], "params", "kv", TENANT)
    ]
    assert not plan.ring_moves and plan.held == (6,)


def test_the_same_again_is_an_empty_plan() -> None:
    world = World(tenant([2, 3, 2, 3, 2]))
    world.carry_out(plan_streamed(world.pages, 1, (0, 1, 3), 2))
    assert plan_streamed(world.pages, 2, (3, 0, 1), 2).steps == ()
    assert plan_streamed(tenant([1, 1]), 1, (), 1).steps == ()


def test_a_ring_that_has_to_go_is_said_to_move() -> None:
    world = World(tenant([2] * 6))
    world.carry_out(plan_streamed(world.pages, 1, (0, 3), 1))
    assert set(world.pages.ring_layers) == {0}
    assert plan_streamed(world.pages, 2, (2, 3), 1).ring_moves
    assert plan_streamed(world.pages, 2, (), 1).ring_moves
    assert not plan_streamed(world.pages, 2, (0, 1, 2, 3), 2).ring_moves  # one more buffer beside the old one


def test_lent_pages_that_the_ring_needs_are_asked_back() -> None:
    now = tenant([2] * 6)
    lending = plan_streamed(now, 1, (0, 1, 2), 1, to="free")
    assert lending.ring == (now.homes[0],)
    there = replace(now, streamed=lending.streamed, ring=lending.ring, lent=lending.lent)
    # Layer 0 comes home, and with it the ring: another layer's pages, which are lent, have to take its place.
    needed = there.to_reclaim((1, 2), 1)
    assert needed == set(now.homes[1])
    with pytest.raises(InvalidArgument) as caught:
        plan_streamed(there, 2, (1, 2), 1)
    assert caught.value.pages == 2
    back = plan_streamed(replace(there, lent=there.lent - needed), 3, (1, 2), 1)
    assert back.ring == (now.homes[1],)
    assert (set(back.lost), back.lent, back.ring_moves) == (needed, set(now.homes[2]), True)


def test_errors_have_numbers() -> None:
    now = tenant([2, 2, 2])
    for bad in ((0, 0), (0, 3), (-1, 1), (0, 1, 1)):
        with pytest.raises(InvalidArgument) as caught:
            plan_streamed(now, 1, bad, 1)
        assert caught.value.layers == 3
    for target, buffers in (((0, 1), 2), ((0,), 1), ((0, 1), 0), ((0, 1, 2), -1), ((0, 1, 2), 3)):
        with pytest.raises(InvalidArgument) as caught:
            plan_streamed(now, 1, target, buffers)
        assert (caught.value.buffers, caught.value.streamed) == (buffers, len(target))
    with pytest.raises(InvalidArgument) as caught:
        plan_streamed(tenant([1, 1, 9]), 1, (0, 1), 1)
    assert (caught.value.needed_pages, caught.value.available_pages) == (9, 2)


def test_free_pages_change_hands_and_nothing_else() -> None:
    now = replace(tenant([2, 2, 2]), streamed=(0, 1), ring=((0, 1),))
    plan = plan_free_pages(now, 4, [20, 9, 11], give=True, reason="room")
    assert plan.steps == (SetOwner((20, 9, 11), "free", "kv", TENANT),)
    assert (plan.gained, plan.lost, plan.streamed, plan.ring) == ((20, 9, 11), (), now.streamed, now.ring)
    assert (plan.epoch, plan.reason, plan.reload, plan.held, plan.ring_moves) == (4, "room", (), (), False)
    back = plan_free_pages(now, 5, [9], give=False)
    assert back.steps == (SetOwner((9,), "kv", "free", TENANT),)
    assert (back.gained, back.lost) == ((), (9,))
