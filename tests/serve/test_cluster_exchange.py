"""KV that moves: the bytes, the waits beside it against a simulated link, and what is computed again."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from cluster_worlds import NETWORK, serving
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference import priority_link_des
from reference.priority_link_des import Flow, Piece, longest_wait
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.drop import plan
from remap_serve.policy.cluster.exchange import (
    Priority,
    Resumption,
    Running,
    chunk_bytes,
    moves,
    resumptions,
    takers,
)
from remap_serve.policy.cluster.lookahead import ChunkCost
from remap_serve.policy.cluster.pipeline import Network
from remap_serve.policy.cluster.placement import Group, Instance, Layer, Placement, PlannedStage, ServedLayers
from remap_serve.policy.cluster.restore import dissolved

LINK = Network(Line(0.0, 0.0), 100.0)

# ------------------------------------------------------------------------------------------------------- volumes


@settings(max_examples=examples(200), deadline=None)
@given(serving(), st.integers(0, 60), st.integers(0, 30))
def test_what_moves_is_what_another_instance_computes(before: Placement, need: int, tokens: int) -> None:
    """Layer by layer, out and back."""
    after = plan(before, need, NETWORK).placement
    home = {stage.instance.name: group for group in after.groups for stage in group.stages}
    for group in before.groups:
        target = home[group.stages[0].instance.name]
        for source, goal in ((group, target), (target, group)):
            expected: Counter[tuple[str, str]] = Counter()
            for layer, each in enumerate(before.model.layers):
                names = [
                    next(stage.instance.name for stage in where.stages if stage.first <= layer < stage.end)
                    for where in (source, goal)
                ]
                if names[0] != names[1] and tokens * each.kv_bytes:
                    expected[names[0], names[1]] += tokens * each.kv_bytes
            assert moves(before.model, source, goal, tokens) == expected


@pytest.mark.parametrize("g", [1, 2, 3, 4, 6, 12])
def test_equal_stages_move_all_but_one_share(g: int) -> None:
    model = ServedLayers((Layer(1, 5, Line(0, 0)),) * 12)
    stages = tuple(PlannedStage(Instance(f"i{n}", 99), n * 12 // g, (n + 1) * 12 // g) for n in range(g))
    merged = Placement(model, (Group(stages),))
    for single in dissolved(merged, 0).groups:
        for pair in ((single, merged.groups[0]), (merged.groups[0], single)):
            assert sum(moves(model, *pair, 7).values()) * g == (g - 1) * 7 * 5 * 12


@given(st.lists(st.integers(0, 50), max_size=12), st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_each_request_goes_where_most_room_is_left(sizes: list[int], rooms: list[int]) -> None:
    found = takers(sizes, rooms)
    for number, place in enumerate(found):
        left = [
            room - sum(size for size, other in zip(sizes[:number], found) if other == each)
            for each, room in enumerate(rooms)
        ]
        assert place == left.index(max(left))
    assert len(found) == len(sizes)


def test_a_chunk_takes_as_long_as_a_stage() -> None:
    assert chunk_bytes(LINK, 2.5) == 250
    assert chunk_bytes(LINK, 0.0) == 1


# ------------------------------------------------------------------------------------------------------- waits

FLOWS = st.builds(
    lambda priority, length, period: Flow(Priority(priority), length / 4, period / 4),
    st.integers(0, 3),
    st.integers(1, 12),
    st.integers(1, 40),
)


@st.composite
def asked(draw: st.DrawFn) -> tuple[list[Flow], list[Piece]]:
    """Flows, and pieces of them that come no closer than they say and are no longer; one of them begins a moment early."""
    flows = draw(st.lists(FLOWS, min_size=1, max_size=4))
    pieces = []
    for number, flow in enumerate(flows):
        now = draw(st.sampled_from([0.0, 1 / 1024, 1.0]))
        for _ in range(draw(st.integers(0, 12))):
            length = draw(st.sampled_from([1.0, 1.0, 0.5])) * flow.seconds
            pieces.append(Piece(int(flow.priority), now, number, length))
            now += flow.period_s + draw(st.sampled_from([0.0, 0.0, 0.25, 3.0]))
    return flows, pieces


# While the second flow's first piece is sent, the first flow's comes, and the second's next one waits longer than its first.
LATER = [Flow(Priority.ACTIVATION, 1.0, 2.5), Flow(Priority.WEIGHTS, 1.0, 3.5), Flow(Priority.EXCHANGE, 1.0, 3.5)]


@settings(max_examples=examples(500), deadline=None)
@given(asked())
@example(
    (
        LATER,
        [
            Piece(int(flow.priority), n * flow.period_s + (flow is not LATER[2]) / 1024, number, flow.seconds)
            for number, flow in enumerate(LATER)
            for n in range(5)
        ],
    )
)
def test_nobody_waits_longer_than_the_bound(world: tuple[list[Flow], list[Piece]]) -> None:
    flows, pieces = world
    bounds = [longest_wait(flows, number) for number in range(len(flows))]
    for number, wait in priority_link_des.waits(pieces):
        assert wait <= bounds[number] + 1e-9


@settings(max_examples=examples(200), deadline=None)
@given(FLOWS, st.lists(FLOWS, max_size=3))
def test_an_activation_waits_for_at_most_one_chunk(activations: Flow, others: list[Flow]) -> None:
    """Closed form: one flow of activations that the link has time for. A chunk that began a moment before attains it."""
    first = Flow(Priority.ACTIVATION, activations.seconds, activations.period_s)
    below = [Flow(max(flow.priority, Priority.WEIGHTS), flow.seconds, flow.period_s) for flow in others]
    found = longest_wait([first, *below], 0)
    if first.seconds >= first.period_s:
        assert found == math.inf
        return
    longest = max((flow.seconds for flow in below), default=0.0)
    assert found == longest
    moment = 2.0**-20
    pieces = [Piece(0, moment, 0, first.seconds)]
    pieces += [Piece(int(flow.priority), 0.0, 1, flow.seconds) for flow in below if flow.seconds == longest][:1]
    waited = max(wait for number, wait in priority_link_des.waits(pieces) if number == 0)
    assert waited == max(0.0, longest - moment)


def test_later_pieces_may_wait_longer_than_the_first() -> None:
    """Three flows that ask for 97 % of the link: the last one's second piece waits longest (Davis et al., 2007)."""
    assert [longest_wait(LATER, number) for number in range(3)] == [1.0, 2.0, 2.5]
    full = [Flow(Priority.ACTIVATION, 1.0, 2.0), Flow(Priority.WEIGHTS, 1.0, 2.0), Flow(Priority.RESTORE, 5.0, 6.0)]
    assert [longest_wait(full, number) for number in range(3)] == [5.0, math.inf, math.inf]


# ------------------------------------------------------------------------------------------------- computed again

COST = ChunkCost(0.0, 0.0, 1.0, 0.5, 1.5)


def test_short_requests_go_on_first_and_slow_moves_are_computed_again() -> None:
    requests = [
        Running("a", 10, 300),  # 3 s, or 12 s again
        Running("a", 10, 100),
        Running("b", 10, 400),
        Running("a", 1, 400),  # 4 s, or 3 s again
        Running("a", 2, 400),  # 4 s either way: moved
    ]
    assert resumptions(requests, LINK, COST) == [
        Resumption(1, False),
        Resumption(0, False),
        Resumption(2, False),
        Resumption(4, False),
        Resumption(3, True),
    ]
    assert resumptions([], LINK, COST) == []


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.builds(Running, st.sampled_from("ab"), st.integers(0, 12), st.integers(0, 1000)), max_size=8))
def test_no_order_of_moves_has_a_lower_mean(requests: list[Running]) -> None:
    found = resumptions(requests, LINK, COST)
    assert sorted(each.request for each in found) == list(range(len(requests)))
    for source in "ab":
        moved = [requests[each.request].moved_bytes for each in found if not each.again]
        own = [each for each in found if not each.again and requests[each.request].source == source]
        times = [requests[each.request].moved_bytes / 100.0 for each in own]
        assert times == sorted(times)
        assert moved == sorted(moved)
    for each in found:
        request = requests[each.request]
        assert each.again == (
            COST.microbatch(()) + request.tokens + 0.5 * (request.tokens > 0) + 1.5 < request.moved_bytes / 100
        )
