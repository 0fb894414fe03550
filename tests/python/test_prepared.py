# SPDX-License-Identifier: Apache-2.0
"""Several plans of one change, as of one (`Transition.followed_by`): what is loaded, re-pointed and streamed after the last."""

from __future__ import annotations

from itertools import chain

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import histories, tenant

from remap.memory.pages import Streaming, TenantPages, plan_between, plan_streaming


def at_home(pages: TenantPages) -> set[int]:
    layers = [layer for layer in range(len(pages.sizes)) if layer not in pages.gone]
    return {page for n in layers for page in pages.homes[n][: pages.sizes[n] - pages.tails[n]]}


@settings(deadline=None, max_examples=examples(200))
@given(histories(), st.data())
def test_plans_of_one_change_are_as_one(history: tuple[list[int], int, list[Streaming]], data: st.DataObject) -> None:
    sizes, shuffle, targets = history
    before = now = tenant(sizes, shuffle)
    every = range(len(sizes))
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
        whole = plan if whole is None else whole.followed_by(plan)
        now = plan.there
        stale |= at_home(before) - at_home(now)
    if whole is None:
        return
    assert whole.there == now
    loaded = {now.homes[layer][page] for layer, first, n in whole.home for page in range(first, first + n)}
    assert at_home(now) & stale <= loaded <= at_home(now), (
        "all that came back, and nothing that streams or is elsewhere"
    )
    assert len(whole.home) == len({layer for layer, _, _ in whole.home})
    changed = {layer for layer in set(every) - now.gone if now.shows(layer) != before.shows(layer)}
    assert changed <= set(whole.held) and not set(whole.held) & now.gone
    assert tuple(whole.streamed) == now.streamed
    assert whole.ring_changes or before.ring == now.ring


def test_what_comes_home_and_streams_again_is_not_loaded() -> None:
    now = tenant([2] * 6)
    first = plan_streaming(now, Streaming.of(now.sizes, (0, 1, 2, 3), 1))
    there = first.there
    home = plan_streaming(there, Streaming.of(now.sizes, (0, 1), 1))
    both = home.followed_by(plan_streaming(home.there, Streaming.of(now.sizes, (0, 1, 2), 1)))
    assert {layer for layer, _, _ in home.home} == {2, 3}
    assert both.home == ((3, 0, 2),)
    assert both.copies([200] * 6, 100)[2] == ((3, 0, 200),)
