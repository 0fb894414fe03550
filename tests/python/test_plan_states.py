# SPDX-License-Identifier: Apache-2.0
"""Plans between any two states of a tenant's pages: layers that stream, are computed elsewhere, wait for their bytes, are given
up, and get other homes. Against the obvious: whose each page is in a state, and the steps carried out on dictionaries."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from effort import examples
from test_planner import SetOwner, World, steps_of, tenant

from remap.memory.pages import NO_PAGE, Streaming, TenantPages, Transition, plan_between, run_of, streaming_now


def owners_of(pages: TenantPages) -> dict[int, str]:
    """Whose the layers' pages are, page by page."""
    ring = {page for buffer in pages.ring for page in buffer}
    found = {}
    for layer, own in enumerate(pages.own):
        away = layer in pages.gone - pages.unfilled
        for index, page in enumerate(own):
            here = not away and index < len(own) - pages.tails[layer]
            found[page] = "params" if here else "ring" if page in ring else "free" if page in pages.lent else "kv"
    return found


def streams(rng: random.Random, now: TenantPages, layers: set[int]) -> Streaming:
    """What these layers can stream: nothing, if they are too few."""
    chosen = sorted(layer for layer in layers if rng.random() < 0.7)
    target = Streaming.of([len(own) for own in now.own], chosen, rng.randint(1, 2), rng.randint(1, 4))
    fits = len(chosen) > target.buffers and sum(target.tails) >= target.buffers * target.depth
    return target if fits else Streaming((0,) * len(now.homes), 1, 0)


def next_state(rng: random.Random, now: TenantPages, spare: list[int]) -> tuple[str, TenantPages]:
    every = set(range(len(now.homes)))
    kinds = ["streaming", "streaming"]
    if not now.cold:
        kinds += ["holding", "holding"]
    if now.gone == now.cold:
        kinds += ["cold"]
    if now.unfilled:
        kinds += ["loaded", "waiting on"]
    if now.cold:
        kinds += ["home"]
    kind = rng.choice(kinds)
    some = {layer for layer in every if rng.random() < 0.7}
    if kind == "streaming":
        return kind, now.with_streaming(streams(rng, now, some - now.gone))
    if kind == "cold":
        return kind, now.given_up({layer for layer in some | set(now.streamed) if now.homes[layer]})
    if kind == "home":
        size = rng.randint(1, 4)
        layers = sorted(now.cold)[: len(spare) // size]
        return kind, now.with_homes({n: run_of(spare[i * size : i * size + size]) for i, n in enumerate(layers)})
    if kind == "loaded":
        return kind, now.filled(min(now.unfilled))
    if kind == "waiting on":
        some |= now.unfilled
    unfilled = frozenset(layer for layer in some & now.gone if layer in now.unfilled or rng.random() < 0.5)
    goes_on = set(now.streamed) <= some
    return kind, now.holding(
        some, streaming_now(now) if goes_on else streams(rng, now, some - now.gone), unfilled=unfilled
    )


def check(now: TenantPages, there: TenantPages, world: World, to: str) -> TenantPages:
    """The plan, carried out in the world, ends there, and has only the differences. Returns the pages behind it."""
    had, shown, homes = dict(world.owner), dict(world.shown), {page for own in now.own for page in own}
    plan = plan_between(now, there, to=to)
    world.carry_out(plan)
    after = plan.there
    assert (after.homes, after.tails, after.ring) == (there.homes, there.tails, there.ring)
    assert (after.elsewhere, after.unfilled) == (there.elsewhere, there.unfilled)
    whose = owners_of(after)
    assert {page: world.owner[page] for page in whose} == whose
    # Pages of no layer stay as they are, and those of a home that went are free, unless they were KV or lent.
    for page in world.owner.keys() - whose.keys():
        assert world.owner[page] == had[page] or (world.owner[page] == "free" and had[page] in ("params", "ring"))
        assert page not in homes or world.owner[page] in ("kv", "free")
    assert sorted(plan.gained) == sorted(page for page in had if world.owner[page] == "kv" != had[page])
    assert sorted(plan.lost) == sorted(page for page in had if had[page] == "kv" != world.owner[page])
    for layer, region in enumerate(after.layer_regions):
        shows = after.shows(layer)
        assert tuple(world.shown[region]) == (tuple(shows) or (NO_PAGE,) * len(world.shown[region]))
        assert (layer in plan.held) == (shown[region] != world.shown[region] and bool(shows))
        if layer in now.cold or layer in after.cold:
            assert tuple(world.homes[region]) == tuple(after.homes[layer])
        elif layer not in after.gone:
            at_home = after.homes[layer][: len(after.homes[layer]) - after.tails[layer]]
            assert all(world.loaded[page] for page in at_home)
    if after.ring is not now.ring:
        old, new = (
            {(b, at - len(r)): p for b, r in enumerate(ring) for at, p in enumerate(r)}
            for ring in (now.ring, after.ring)
        )
        assert plan.ring_moves == any(new.get(place) != page for place, page in old.items())
    assert not plan_between(after, after)
    return after


def test_a_plan_ends_in_the_state_that_it_was_made_for() -> None:
    seen: Counter[tuple[str, bool, bool]] = Counter()
    for seed in range(examples(400)):
        rng = random.Random(seed)
        now = tenant([rng.randint(1, 5) for _ in range(rng.randint(2, 7))], rng.randint(0, 3))
        world = World(now)
        for _ in range(10):
            used = {page for own in now.own for page in own}
            spare = sorted(page for page, owner in world.owner.items() if owner == "free" and page not in used)
            kind, there = next_state(rng, now, spare)
            seen[kind, bool(now.streamed), bool(now.lent)] += 1
            to = rng.choice(("kv", "free")) if kind in ("streaming", "cold", "home") else "kv"
            now = check(now, there, world, to)
    kinds = ("streaming", "cold", "holding", "loaded", "waiting on", "home")
    assert all(seen[kind, True, lent] for kind in kinds for lent in (False, True) if kind not in ("loaded", "home"))
    assert {kind for kind, _, _ in seen} == set(kinds)


def test_bytes_that_came_from_another_instance_are_not_loaded() -> None:
    now = tenant([2, 3, 2])
    gone = plan_between(now, now.holding({0, 2}, streaming_now(now))).there
    back = plan_between(gone, gone.holding({0, 1, 2}, streaming_now(now), unfilled=frozenset({1})))
    assert back.home == () and back.held == (1,) and back.there.own == now.homes
    assert [step for step in steps_of(back) if isinstance(step, SetOwner)] == [
        SetOwner(now.homes[1], "kv", "params", 7)
    ]
    came = Transition(back.there.filled(1))
    assert (steps_of(came), came.home, came.there) == ((), (), now)
    loaded = plan_between(back.there, back.there.filled(1))
    assert (steps_of(loaded), loaded.home, loaded.there) == ((), ((1, 0, 3),), now)


@pytest.mark.parametrize("to", ["kv", "free"])
def test_what_leaves_a_home_that_goes_is_free_and_no_page_of_it_lent(to: str) -> None:
    now = tenant([2, 2, 2])
    streaming = plan_between(now, now.with_streaming(Streaming.of(now.sizes, (0, 1), 1)), to=to).there
    plan = plan_between(streaming, streaming.given_up({0, 1}), to=to)
    assert steps_of(plan)[-1] == SetOwner(now.homes[0], "ring", "free", 7), (
        "the other layer's pages stay KV, or another's"
    )
    assert (plan.gained, plan.lost, plan.there.lent, plan.there.cold) == ((), (), frozenset(), {0, 1})
