"""Drop plans: the best of all partitions, never worse than the paper's greedy, and a complete copy at every moment."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from cluster_worlds import NETWORK, clusters, serving, streaming
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import cluster_brute
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster import drop
from remap_serve.policy.cluster.dispatch import needed, overloaded
from remap_serve.policy.cluster.drop import EXACT, DropPlan, decided, greedy, plan, preferred
from remap_serve.policy.cluster.pipeline import Network, group_round_s
from remap_serve.policy.cluster.placement import (
    Group,
    Instance,
    InstanceLoad,
    Layer,
    Offer,
    Placement,
    PlannedStage,
    ServedLayers,
    alone,
    check,
)
from remap_serve.policy.cluster.stages import Splits

NEEDS = st.one_of(st.integers(0, 3), st.integers(0, 80), st.just(10_000))
EVEN = ServedLayers((Layer(10, 1, Line(1 / 16, 1 / 64)),) * 12)


def dropped(before: Placement, after: Placement) -> dict[str, tuple[int, ...]]:
    """The layers that each instance gives up, by its name; instances that give up none are left out."""
    count, then = len(before.model.layers), before.stages
    found = {
        name: tuple(layer for layer in range(count) if then[name].holds(layer) and not stage.holds(layer))
        for name, stage in after.stages.items()
    }
    return {name: layers for name, layers in found.items() if layers}


def capacity(placement: Placement) -> int:
    return sum(max(0, group.capacity(placement.model)) for group in placement.groups)


def sizes(found: DropPlan) -> list[int]:
    return sorted((len(group.stages) for group in found.placement.groups), reverse=True)


def whole(count: int, model: ServedLayers = EVEN, spare: int = 60, requests: int = 0) -> Placement:
    memory = model.weight_bytes(0, len(model.layers)) + spare
    tokens = spare // model.kv_bytes(0, len(model.layers))
    return alone(
        model, tuple(Instance(f"i{n}", memory, InstanceLoad(requests, requests and tokens)) for n in range(count))
    )


def check_plan(before: Placement, need: int, found: DropPlan) -> None:
    """It frees what it says, only forgets layers, and says truly how much longer requests wait."""
    after, model = found.placement, before.model
    check(after)
    assert found.epoch == before.epoch
    assert after.epoch == before.epoch + (after is not before)
    assert found.freed == capacity(after) - capacity(before)
    gone, then = dropped(before, after), before.stages
    assert set(after.stages) == set(then)
    for name, stage in after.stages.items():
        held = {layer for layer in range(len(model.layers)) if then[name].holds(layer)}
        kept = {layer for layer in range(len(model.layers)) if stage.holds(layer)}
        assert kept <= held
        assert set(gone.get(name, ())) == held - kept
        assert after is before or len(after.groups) == len(before.groups) or name in gone or kept == held
    home = {stage.instance.name: group for group in before.groups for stage in group.stages}
    added, stalled = 0.0, 0
    for group in after.groups:
        parts = {id(home[stage.instance.name]): home[stage.instance.name] for stage in group.stages}
        assert sum(len(part.stages) for part in parts.values()) == len(group.stages)
        if len(parts) > 1:
            added += added_by(before, list(parts.values()), group)
            stalled += group.load.tokens
    assert found.missing == max(0, need - found.freed)
    assert found.added_s == pytest.approx(added)
    lengths = [len(group.stages) for group in after.groups]
    assert (found.longest, found.squares) == (max(lengths), sum(length**2 for length in lengths))
    assert found.stalled == stalled


def density_of(before: Placement) -> float:
    """Requests for each token that they ask for."""
    loads = [group.load for group in before.groups]
    return sum(load.requests for load in loads) / max(1, sum(load.wanted for load in loads))


def filled(before: Placement, groups: list[Group]) -> list[tuple[int, int, float]]:
    """Of each group when it is full: tokens, requests, seconds of a round."""
    density = density_of(before)
    tokens = [max(0, group.capacity(before.model)) for group in groups]
    counts = [math.ceil(density * each) for each in tokens]
    rounds = [group_round_s(before.model, group.stages, count, NETWORK) for group, count in zip(groups, counts)]
    return list(zip(tokens, counts, rounds))


def added_by(before: Placement, parts: list[Group], now: Group) -> float:
    """Over the requests that fill the merged group, how much longer a round is than the mean of its parts when full."""
    *each, (_, requests, round_s) = filled(before, [*parts, now])
    mean = sum(count * seconds for _, count, seconds in each) / max(1, sum(count for _, count, _ in each))
    return requests * max(0.0, round_s - mean)


def best_of_all(before: Placement, need: int) -> tuple[float, ...]:
    """The least of what plans are compared by, over every partition whose groups have room for what runs there."""
    splits, found = Splits(before.model), []
    merged: dict[tuple[int, ...], tuple[int, float, int, int] | None] = {}
    for parts in cluster_brute.partitions(range(len(before.groups))):
        for part in map(tuple, parts):
            if part not in merged:
                merged[part] = one_group(before, part, splits)
        outcomes = [merged[tuple(part)] for part in parts]
        if None not in outcomes:
            chosen = [outcome for outcome in outcomes if outcome]
            freed = sum(outcome[0] for outcome in chosen)
            lengths = [outcome[2] for outcome in chosen]
            added = sum(outcome[1] for outcome in chosen)
            squares, stalled = sum(length**2 for length in lengths), sum(outcome[3] for outcome in chosen)
            found.append((max(0, need - freed), added, max(lengths), squares, stalled))
    return min(found)


def one_group(before: Placement, part: tuple[int, ...], splits: Splits) -> tuple[int, float, int, int] | None:
    """Of these groups as one: tokens that are freed, seconds added, instances, tokens that run."""
    groups = [before.groups[number] for number in part]
    if len(groups) == 1:
        return 0, 0.0, len(groups[0].stages), 0
    stages = [stage for group in groups for stage in group.stages]
    tokens, running = splits.tokens(stages), sum(group.load.tokens for group in groups)
    if tokens < running:
        return None
    loads = [group.load for group in before.groups]
    density = sum(load.requests for load in loads) / max(1, sum(load.wanted for load in loads))
    now = Group(splits.split(stages, max(1, math.ceil(math.ceil(density * tokens) / len(stages)))))
    freed = tokens - sum(max(0, group.capacity(before.model)) for group in groups)
    return freed, added_by(before, groups, now), len(stages), running


@settings(max_examples=examples(200), deadline=None)
@given(st.one_of(serving(), streaming(serving())), NEEDS)
def test_a_plan_is_the_best_of_all_partitions(before: Placement, need: int) -> None:
    found = plan(before, need, NETWORK)
    check_plan(before, need, found)
    # Sums of a different order: what is equal but for rounding counts as equal.
    best = best_of_all(before, need)
    assert (found.missing, found.added_s) == (best[0], pytest.approx(best[1]))
    if found.added_s == best[1]:
        assert (found.longest, found.squares, found.stalled) == best[2:]


@settings(max_examples=25, deadline=None)
@given(clusters(8), NEEDS)
def test_a_plan_of_up_to_eight_is_the_best_of_all_partitions(before: Placement, need: int) -> None:
    found = plan(before, need, NETWORK)
    check_plan(before, need, found)
    # Sums of a different order: what is equal but for rounding counts as equal.
    best = best_of_all(before, need)
    assert (found.missing, found.added_s) == (best[0], pytest.approx(best[1]))
    if found.added_s == best[1]:
        assert (found.longest, found.squares, found.stalled) == best[2:]


@settings(max_examples=examples(60), deadline=None)
@given(st.one_of(serving(most=4, most_layers=4), streaming(serving(most=4, most_layers=4))))
def test_as_much_is_freed_as_any_division_of_any_partition_frees(before: Placement) -> None:
    """End to end: every partition, every order of stages and every division of layers."""
    tokens: dict[tuple[int, ...], int] = {}
    freed = []
    for parts in cluster_brute.partitions(range(len(before.groups))):
        for part in map(tuple, parts):
            groups = [before.groups[number] for number in part]
            if part not in tokens:
                stages = [stage for group in groups for stage in group.stages]
                tokens[part] = (
                    groups[0].capacity(before.model)
                    if len(groups) == 1
                    else cluster_brute.most_tokens(before.model, stages)
                )
        if all(
            len(part) == 1 or tokens[tuple(part)] >= sum(before.groups[number].load.tokens for number in part)
            for part in parts
        ):
            freed.append(sum(tokens[tuple(part)] for part in parts) - capacity(before))
    most = 10**6
    assert most - plan(before, most, NETWORK).missing == max(freed)


def test_of_several_offers_those_are_kept_that_cost_less_than_a_drop() -> None:
    """As above, a drop costs 2 x 1/4 s for each token: 20 lent bytes cost nothing, 20 streamed ones too much beyond them."""
    model, network = ServedLayers((Layer(10, 1, Line(1 / 16, 0.0)),) * 12), Network(Line(1 / 8, 0.0), 1.0)
    full = alone(model, tuple(Instance(name, 180, InstanceLoad(5, 5, (3,))) for name in "ab"))
    lent, cheap, dear = Offer(24, 0.0), Offer(24, 0.05), Offer(24, 0.5)
    for offers, kept in (((lent, cheap), 2), ((lent, dear), 1), ((dear,), 0), ((lent, cheap, dear), 2)):
        assert preferred(with_offers(full, *offers), network) == with_offers(full, *offers[:kept])


@settings(max_examples=examples(200), deadline=None)
@given(st.one_of(serving(), clusters(14), clusters(14, equal=True), serving(12, 4), streaming(clusters(14))), NEEDS)
def test_never_worse_than_greedy(before: Placement, need: int) -> None:
    found, papers = plan(before, need, NETWORK), greedy(before, need, NETWORK)
    check_plan(before, need, papers)
    check_plan(before, need, found)
    assert found <= papers


@settings(max_examples=examples(200), deadline=None)
@given(st.one_of(serving(), clusters(14), streaming(serving())), NEEDS)
def test_greedy_merges_the_two_smallest(before: Placement, need: int) -> None:
    """The same by sorting a list each time."""
    splits = (
        Splits(before.model) if sum(len(group.stages) for group in before.groups) <= EXACT else Splits(before.model, 16)
    )
    left = [
        (len(group.stages), (number,), max(0, group.capacity(before.model)))
        for number, group in enumerate(before.groups)
    ]
    done, freed = [], 0
    while freed < need and len(left) > 1:
        left.sort()
        first, second = left.pop(0), left.pop(0)
        numbers = tuple(sorted((*first[1], *second[1])))
        groups = [before.groups[number] for number in numbers]
        tokens = splits.tokens([stage for group in groups for stage in group.stages])
        if tokens <= first[2] + second[2] or tokens < sum(group.load.tokens for group in groups):
            done.append(first)
            left.append(second)
        else:
            freed += tokens - first[2] - second[2]
            left.append((first[0] + second[0], numbers, tokens))
    found = greedy(before, need, NETWORK)
    names = {frozenset(stage.instance.name for stage in group.stages) for group in found.placement.groups}
    assert names == {
        frozenset(stage.instance.name for number in numbers for stage in before.groups[number].stages)
        for _, numbers, _ in done + left
    }
    assert found.freed == freed


@settings(max_examples=examples(150), deadline=None)
@given(st.one_of(clusters(14, 5), streaming(clusters(14, 5))), st.integers(1, 60))
def test_nothing_merges_in_vain(before: Placement, need: int) -> None:
    found = plan(before, need, NETWORK)
    by_name = before.stages
    for group in found.placement.groups:
        if len(group.stages) > 1:
            alone_again = sum(
                max(0, Group((by_name[stage.instance.name],)).capacity(before.model)) for stage in group.stages
            )
            gain = group.capacity(before.model) - alone_again
            assert found.freed - gain < min(need, found.freed)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8, 12, 24, 100])
def test_equal_instances_merge_into_groups_of_equal_sizes(count: int) -> None:
    """A copy has 120 bytes, and 12 bytes of KV a token: 10 tokens a copy, if 12 layers divide evenly."""
    for copies in range(count):
        groups = count - copies
        expected = sorted([-(-(count - place) // groups) for place in range(groups)], reverse=True)
        if all(12 % size == 0 for size in expected):
            found = plan(whole(count), 10 * copies, NETWORK)
            assert (sizes(found), found.freed, found.missing) == (expected, 10 * copies, 0)


def test_six_instances_and_four_copies() -> None:
    """The paper's greedy makes {4, 2} where {3, 3} is possible: 80 requests wait for four hops and 32 for two, or all 112 for
    three. A layer takes as long for any number of tokens."""
    model, network = ServedLayers((Layer(10, 1, Line(1 / 16, 0.0)),) * 12), Network(Line(1 / 8, 0.0), 1.0)
    before = whole(6, model, requests=8)
    papers, found = greedy(before, 40, network), plan(before, 40, network)
    assert (sizes(papers), sizes(found)) == ([4, 2], [3, 3])
    assert papers.freed == found.freed == 40
    assert (papers.added_s, found.added_s) == (80 * 0.5 + 32 * 0.25, 112 * 0.375)
    # Without load: as few stages as possible.
    assert sizes(plan(whole(6), 40, network)) == [3, 3]


def test_of_equal_plans_the_one_that_moves_the_least_kv() -> None:
    instances = tuple(Instance(f"i{n}", 180, InstanceLoad(tokens, tokens)) for n, tokens in enumerate((4, 1, 5, 2)))
    found = plan(alone(EVEN, instances), 10, NETWORK)
    assert found.stalled == 3
    assert [[stage.instance.name for stage in group.stages] for group in found.placement.groups] == [
        ["i0"],
        ["i1", "i3"],
        ["i2"],
    ]


def test_no_need_changes_nothing() -> None:
    before = whole(4, requests=3)
    for need in (0, -5):
        for find in (plan, greedy):
            found = find(before, need, NETWORK)
            assert found.placement is before
            assert (found.freed, found.missing, found.added_s) == (0, 0, 0.0)
    assert dropped(before, before) == {}


def test_a_need_beyond_what_is_there_says_what_is_missing() -> None:
    found = plan(whole(3), 1000, NETWORK)
    assert (sizes(found), found.freed, found.missing) == ([3], 20, 980)
    lonely = plan(whole(1), 7, NETWORK)
    assert (lonely.freed, lonely.missing) == (0, 7)
    # More instances than layers: who computes nothing frees nothing.
    short = ServedLayers((Layer(10, 1, Line(1 / 16, 0)),) * 2)
    found = plan(whole(12, short), 10_000, NETWORK)
    assert sizes(found) == [2] * 6


def test_a_cluster_that_is_fused_in_part_goes_on() -> None:
    """Pairs become a group of four by halving their halves: nobody needs a layer that it dropped."""
    pairs = plan(whole(4), 20, NETWORK).placement
    assert [len(group.stages) for group in pairs.groups] == [2, 2]
    found = plan(pairs, 10, NETWORK)
    assert (sizes(found), found.freed, found.epoch, found.placement.epoch) == ([4], 10, 1, 2)
    assert [(stage.first, stage.end) for stage in found.placement.groups[0].stages] == [(0, 3), (3, 6), (6, 9), (9, 12)]


def test_groups_that_do_not_fit_into_equal_sizes() -> None:
    """Three groups of three: of two groups one has six, though five and four would be equal sizes."""
    thirds = tuple(
        Group(tuple(PlannedStage(Instance(f"{name}{n}", 180), 4 * n, 4 * n + 4) for n in range(3))) for name in "abc"
    )
    found = plan(Placement(EVEN, thirds), 10, NETWORK)
    check_plan(Placement(EVEN, thirds), 10, found)
    assert (sizes(found), found.freed, found.missing) == ([6, 3], 10, 0)


def test_thirds_and_a_whole_copy_do_not_merge() -> None:
    """The greedy's next pair would free nothing: the paper counts a copy of the weights."""
    three = plan(whole(3), 20, NETWORK).placement
    extra = Instance("x", 180, InstanceLoad())
    before = Placement(EVEN, (*three.groups, Group((PlannedStage(extra, 0, 12),))), 1)
    for find in (plan, greedy):
        found = find(before, 5, NETWORK)
        assert (found.freed, found.missing) == (0, 5)
        assert found.placement is before


def test_running_requests_are_not_pushed_out() -> None:
    """Two small instances and one with a wide room, which is full: as one group they would hold fewer tokens."""
    model = ServedLayers((Layer(10, 1, Line(1 / 16, 0)),) * 2)
    full = Instance("full", 20 + 200, InstanceLoad(1, 100))
    small = [Instance(name, 22, InstanceLoad(1, 1)) for name in "ab"]
    found = plan(alone(model, (*small, full)), 5, NETWORK)
    check(found.placement)
    assert [len(group.stages) for group in found.placement.groups] == [2, 1]
    assert found.freed == 12 - 2


def test_groups_of_equal_size_have_room_for_what_runs() -> None:
    """Ten instances in pairs: a small one beside a large one holds less than both apart, and stays alone."""
    model = ServedLayers((Layer(10, 1, Line(1 / 16, 0)),) * 2)
    instances = tuple(
        Instance(f"i{n}", 220 if n % 2 else 22, InstanceLoad(n // 2, 100 if n % 2 else 1)) for n in range(10)
    )
    before = alone(model, instances)
    for need in (5, 20, 10_000):
        found = plan(before, need, NETWORK)
        check(found.placement)
        assert found <= greedy(before, need, NETWORK)
        assert all(
            group.capacity(model) > len(group.stages) for group in found.placement.groups if len(group.stages) > 1
        )


# ------------------------------------------------------------------------------------------------- streaming, or a drop


def with_offers(before: Placement, *offers: Offer) -> Placement:
    """The same where each instance alone has these."""
    groups = tuple(Group(tuple(replace(stage, offers=offers) for stage in group.stages)) for group in before.groups)
    return replace(before, groups=groups)


def test_what_streams_is_room_that_a_merger_gives_up() -> None:
    """A copy has 120 bytes, of which 36 may stream at each of two: 3 tokens each, and a pair has 10 - 6 more than they."""
    before = with_offers(whole(2), Offer(36, 0.0))
    assert capacity(before) == 2 * (5 + 3)
    found = plan(before, 1, NETWORK)
    assert (sizes(found), found.freed) == ([2], 4)
    assert not any(stage.offers for stage in found.placement.stages.values())
    # Where more may stream than a merger frees, nobody merges, however much is needed; four free more than they give up.
    most = Offer(72, 0.0)
    assert plan(with_offers(whole(2), most), 10_000, NETWORK).freed == 0
    found = plan(with_offers(whole(4), most), 10_000, NETWORK)
    assert (sizes(found), found.freed) == ([4], 3 * 10 - 4 * 6)


def test_a_drop_that_costs_less_than_streaming_comes_first() -> None:
    """A pass takes 3/4 s whatever runs. A pair has 20 tokens where two had 10, and its passes take 1/4 s longer, for two hops:
    for each token 20/10 of a quarter. The 60 bytes that stream make 10 tokens of 5: for each token 10/5 of what they add."""
    model, network = ServedLayers((Layer(10, 1, Line(1 / 16, 0.0)),) * 12), Network(Line(1 / 8, 0.0), 1.0)
    full = InstanceLoad(5, 5, (1,))
    before = alone(model, tuple(Instance(name, 180, full) for name in "abc"))
    for added_s, kept in ((0.0, True), (0.25, True), (0.26, False)):
        offered = with_offers(before, Offer(60, added_s))
        assert preferred(offered, network) == (offered if kept else before)
    # Instances are judged one by one.
    cheap, dear = Offer(60, 0.2), Offer(60, 0.3)
    mixed = replace(before, groups=tuple(with_offers(before, *each).groups[0] for each in ([cheap], [dear], [])))
    assert [stage.offers for (stage,) in (group.stages for group in preferred(mixed, network).groups)] == [
        (cheap,),
        (),
        (),
    ]
    for load in (InstanceLoad(), InstanceLoad(5, 5)):  # nobody asks for more than fits beside all layers
        calm = with_offers(alone(model, tuple(Instance(name, 180, load) for name in "abc")), dear)
        assert preferred(calm, network) == calm
    # Where nothing can be dropped, streaming is all there is.
    single = ServedLayers((Layer(120, 12, Line(3 / 4, 0.0)),))
    stuck = with_offers(alone(single, tuple(Instance(name, 180, full) for name in "ab")), dear)
    assert preferred(stuck, network) == stuck


def test_what_runs_in_streaming_that_does_not_count_has_to_fit_as_well() -> None:
    """11 tokens run at each of two, where 5 fit beside all layers: a pair has 20."""
    load = InstanceLoad(5, 11, (4,))
    before = with_offers(alone(EVEN, tuple(Instance(name, 180, load) for name in "ab")), Offer(72, 10.0))
    check(before)
    judged = preferred(before, NETWORK)
    assert capacity(judged) == 10
    assert plan(judged, 10, NETWORK).freed == greedy(judged, 10, NETWORK).freed == 0
    ten = replace(before, groups=(before.groups[0], alone(EVEN, (Instance("c", 180, InstanceLoad(5, 4)),)).groups[0]))
    found = plan(preferred(ten, NETWORK), 10, NETWORK)
    check(found.placement)
    assert (sizes(found), found.freed) == ([2], 20 - 11 - 5)


@settings(max_examples=examples(200), deadline=None)
@given(streaming(serving()), NEEDS)
def test_a_plan_without_dear_streaming_has_room_for_what_runs(before: Placement, need: int) -> None:
    """Also where they run in what streams already, which does not count."""
    judged = preferred(before, NETWORK)
    assert with_offers(before) == with_offers(judged)
    for was, now in zip(before.groups, judged.groups):
        for stage, kept in zip(was.stages, now.stages):
            assert stage.offers[: len(kept.offers)] == kept.offers  # those that cost least
    for find in (plan, greedy):
        found = find(judged, need, NETWORK).placement
        check(replace(found, groups=tuple(group for group in found.groups if len(group.stages) > 1)))


def room_of(placement: Placement, names: set[str]) -> int:
    """Tokens of KV of the groups with these instances."""
    groups = [group for group in placement.groups if names & {stage.instance.name for stage in group.stages}]
    return sum(max(0, group.capacity(placement.model)) for group in groups)


def test_nobody_merges_into_less_room_than_dear_streaming_has() -> None:
    """As above; but 72 bytes stream, 12 tokens at each of two: with them there is room for 34, where a pair has 20."""
    model, network = ServedLayers((Layer(10, 1, Line(1 / 16, 0.0)),) * 12), Network(Line(1 / 8, 0.0), 1.0)
    dear = Offer(144, 0.9)

    def asking(tokens: int) -> Placement:
        load = InstanceLoad(5, 5, (tokens - 5,))
        return with_offers(alone(model, tuple(Instance(name, 180, load) for name in "ab")), dear)

    before = asking(10)
    assert preferred(before, network) == with_offers(before)  # a drop costs less for each token
    assert sizes(plan(with_offers(before), 10, network)) == [2]  # and is what was decided
    assert decided(before, network) is None
    # Nor where they ask for more than that: a pair has less room still.
    assert decided(asking(40), network) is None
    # With 48 bytes there is less room alone than in a pair, which has it for less.
    some = with_offers(before, Offer(48, 0.9))
    found = decided(some, network)
    assert found is not None and sizes(found) == [2]


@settings(max_examples=examples(60), deadline=None)
@given(st.one_of(streaming(serving()), streaming(clusters(10)), serving()), st.sampled_from([plan, greedy]))
def test_what_is_decided_never_has_less_room_than_before(before: Placement, find: Any) -> None:
    found = decided(before, NETWORK, find)
    with mock.patch.object(drop, "_always_loses_room", return_value=False):
        slow = decided(before, NETWORK, find)
    if found is None:  # also if that is known without a plan
        assert slow is None or len(slow.placement.groups) == len(before.groups)
        assert slow is not None or not overloaded(before)
        return
    assert found == slow
    for group in found.placement.groups:
        names = {stage.instance.name for stage in group.stages}
        if len(names) > 1:
            assert max(0, group.capacity(before.model)) >= room_of(before, names)
    if not any(stage.offers for stage in before.stages.values()):
        assert found == find(before, max(0, needed(before)), NETWORK)  # where nothing streams, it is as it was
