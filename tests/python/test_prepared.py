# SPDX-License-Identifier: Apache-2.0
"""Several plans of one change, as of one (`PreparedPlan.followed_by`): what is loaded, re-pointed and streamed after the last."""

from __future__ import annotations

from itertools import chain
from typing import Any

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import histories, tenant

from remap.memory.pages import Streaming, TenantPages
from remap.memory.plan import Plan, copies_of, plan_between, plan_streaming
from remap.memory.prepared import PreparedPlan, prepare

PAGE = 100


def planned(now: TenantPages, plan: Plan, layer_bytes: list[int]) -> PreparedPlan:
    slots: Any = ()  # no pool is asked
    return prepare(now, plan, slots, layer_bytes, PAGE)


def at_home(pages: TenantPages) -> set[int]:
    layers = [layer for layer in range(len(pages.sizes)) if layer not in pages.gone]
    return {page for n in layers for page in pages.homes[n][: pages.sizes[n] - pages.tails[n]]}


@settings(deadline=None, max_examples=examples(200))
@given(histories(), st.data())
def test_plans_of_one_change_are_as_one(history: tuple[list[int], int, list[Streaming]], data: st.DataObject) -> None:
    sizes, shuffle, targets = history
    before = now = tenant(sizes, shuffle)
    every = range(len(sizes))
    layer_bytes = [max(1, size * PAGE - data.draw(st.integers(0, PAGE - 1))) for size in sizes]
    whole, stale = None, set[int]()  # stale: pages that were not at home for a time
    nothing = Streaming((0,) * len(sizes), 1, 0)
    for target in chain.from_iterable((nothing, each) for each in targets):
        if target is nothing and not now.gone:
            continue
        layers = target.layers
        if layers and (sum(target.tails) < target.buffers * target.depth or len(layers) <= target.buffers):
            continue
        leaves = not layers and not now.gone and len(sizes) > 2 and data.draw(st.booleans())
        plan = plan_between(now, now.holding(every[1:] if leaves else every, target))
        ready = planned(now, plan, layer_bytes)
        whole = ready if whole is None else whole.followed_by(ready)
        now = plan.there
        stale |= at_home(before) - at_home(now)
    if whole is None:
        return
    assert whole.before is before and whole.plan.there == now
    loaded = {now.homes[layer][page] for layer, first, n in whole.plan.home for page in range(first, first + n)}
    assert at_home(now) & stale <= loaded <= at_home(now), (
        "all that came back, and nothing that streams or is elsewhere"
    )
    assert len(whole.plan.home) == len({layer for layer, _, _ in whole.plan.home})
    changed = {layer for layer in set(every) - now.gone if now.shows(layer) != before.shows(layer)}
    assert changed <= set(whole.plan.held) and not set(whole.plan.held) & now.gone
    copies = copies_of(whole.plan, layer_bytes, PAGE)
    assert whole.plan.streamed == now.streamed and whole.copies == copies
    assert whole.ring_changes or before.ring == now.ring


def test_what_comes_home_and_streams_again_is_not_loaded() -> None:
    now = tenant([2] * 6)
    first = plan_streaming(now, Streaming.of(now.sizes, (0, 1, 2, 3), 1))
    there = first.there
    home = planned(there, plan_streaming(there, Streaming.of(now.sizes, (0, 1), 1)), [200] * 6)
    again = planned(home.plan.there, plan_streaming(home.plan.there, Streaming.of(now.sizes, (0, 1, 2), 1)), [200] * 6)
    both = home.followed_by(again)
    assert {layer for layer, _, _ in home.plan.home} == {2, 3}
    assert both.plan.home == ((3, 0, 2),)
    assert both.copies.home == ((3, 0, 200),)
