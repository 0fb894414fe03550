"""Which layers each instance computes: against every order and every division."""

from __future__ import annotations

from cluster_worlds import clusters, fused
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import cluster_brute
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.placement import (
    UNLIMITED,
    Group,
    Instance,
    Layer,
    Placement,
    PlannedStage,
    ServedLayers,
    alone,
)
from remap_serve.policy.cluster.stages import Splits


def all_stages(placement: Placement) -> list[PlannedStage]:
    return [stage for group in placement.groups for stage in group.stages]


def check_split(placement: Placement, splits: Splits, microbatch: int) -> int:
    """The tokens that the split leaves room for; it is a complete copy of what is held, and in its order the quickest."""
    model, before = placement.model, placement.stages
    found = splits.split(all_stages(placement), microbatch)
    assert sorted(stage.instance.name for stage in found) == sorted(before)
    assert [layer for stage in found for layer in range(stage.first, stage.end)] == list(range(len(model.layers)))
    runs = [(stage.first, stage.end) for stage in found]
    order = [before[stage.instance.name] for stage in found]
    assert cluster_brute.possible(order, runs)
    tokens = splits.tokens(all_stages(placement))
    assert min(tokens, 10_000) == cluster_brute.capacity(model, order, runs)
    slowest = max(sum(layer.seconds(microbatch) for layer in model.layers[first:end]) for first, end in runs)
    assert slowest == cluster_brute.least_slowest(model, order, min(tokens, 10_000), microbatch)
    return tokens


@settings(max_examples=examples(100), deadline=None)
@given(fused(most=4), st.integers(1, 5))
def test_a_fused_cluster_is_divided_for_most_tokens(placement: Placement, microbatch: int) -> None:
    tokens = check_split(placement, Splits(placement.model), microbatch)
    assert min(tokens, 10_000) == cluster_brute.most_tokens(placement.model, all_stages(placement))


@settings(max_examples=examples(50), deadline=None)
@given(clusters(most=4), st.integers(1, 5))
def test_whole_instances_are_divided_for_most_tokens(placement: Placement, microbatch: int) -> None:
    tokens = check_split(placement, Splits(placement.model), microbatch)
    assert tokens == cluster_brute.most_tokens(placement.model, all_stages(placement))


@settings(max_examples=examples(150), deadline=None)
@given(fused(most=6), st.integers(1, 5))
def test_one_order_only_still_divides_whatever_serves_now(placement: Placement, microbatch: int) -> None:
    tokens = check_split(placement, Splits(placement.model, orders=1), microbatch)
    assert tokens <= Splits(placement.model).tokens(all_stages(placement))
    # At least what the best group had without the others, which may compute nothing.
    for group in placement.groups:
        kept = Group(
            tuple(
                PlannedStage(stage.instance, stage.first, stage.end)
                for stage in group.stages
                if stage.first < stage.end
            )
        )
        assert tokens >= kept.capacity(placement.model)


@settings(max_examples=examples(50), deadline=None)
@given(clusters(most=6, equal=True))
def test_the_order_of_equal_instances_does_not_matter(placement: Placement) -> None:
    stages = all_stages(placement)
    assert Splits(placement.model, orders=1).tokens(stages) == Splits(placement.model).tokens(stages)


def test_eight_different_instances() -> None:
    model = ServedLayers(
        (Layer(3, 0, Line(0, 0)), *[Layer(10, 2, Line(1 / 4, 1 / 16))] * 16, Layer(5, 0, Line(1.0, 0)))
    )
    stages = [PlannedStage(Instance(f"d{n}", 200 + 7 * n), 0, 18) for n in range(8)]
    tokens = Splits(model).tokens(stages)
    assert Group(Splits(model).split(stages, 4)).capacity(model) == tokens
    assert (
        Splits(model, orders=1).tokens(stages)
        <= tokens
        <= (sum(stage.instance.memory_bytes for stage in stages) - 168) // 32
    )


def test_a_thousand_equal_instances() -> None:
    model = ServedLayers((Layer(3, 0, Line(0, 0)), *[Layer(10, 2, Line(1 / 4, 1 / 16))] * 16))
    stages = [PlannedStage(Instance(f"e{n}", 400), 0, 17) for n in range(1024)]
    assert Splits(model).tokens(stages) == (400 - 10) // 2  # one layer each; the others compute nothing
    runs = [(stage.first, stage.end) for stage in Splits(model).split(stages, 4) if stage.end > stage.first]
    assert all(end - first == 1 for first, end in runs)


def test_among_equal_tokens_the_slowest_stage_is_the_quickest() -> None:
    kv, none = Layer(1, 1, Line(1.0, 0)), Layer(0, 0, Line(1.0, 0))
    equal = [PlannedStage(Instance(name, 100), 0, 4) for name in "ab"]
    assert [(s.first, s.end) for s in Splits(ServedLayers((kv, none, none, kv))).split(equal, 1)] == [(0, 2), (2, 4)]
    # Tokens come first: the head is as long as all four layers, and stays with two of them.
    head = Layer(0, 0, Line(4.0, 0))
    equal = [PlannedStage(Instance(name, 100), 0, 5) for name in "ab"]
    assert [(s.first, s.end) for s in Splits(ServedLayers((kv, kv, kv, kv, head))).split(equal, 1)] == [(0, 2), (2, 5)]


def test_a_layer_without_kv_has_no_limit() -> None:
    model = ServedLayers((Layer(3, 0, Line(0, 0)),))
    assert Splits(model).tokens(all_stages(alone(model, (Instance("a", 3),)))) == UNLIMITED


def test_a_small_instance_stands_where_another_two_meet() -> None:
    """Halves and a whole copy: the whole one takes the middle, so all three have a third, and nothing is copied."""
    model = ServedLayers((Layer(10, 1, Line(1 / 16, 0)),) * 6)
    a, b, c = (Instance(name, 60) for name in "abc")
    stages = [PlannedStage(c, 0, 6), PlannedStage(b, 3, 6), PlannedStage(a, 0, 3)]
    found = Splits(model).split(stages, 1)
    assert [(stage.instance.name, stage.first, stage.end) for stage in found] == [("a", 0, 2), ("c", 2, 4), ("b", 4, 6)]
    # Thirds and a whole copy: one third stays as it is, so the fourth instance brings nothing.
    thirds = [PlannedStage(a, 0, 2), PlannedStage(b, 2, 4), PlannedStage(c, 4, 6)]
    fourth = PlannedStage(Instance("d", 60), 0, 6)
    assert Splits(model).tokens([*thirds, fourth]) == Splits(model).tokens(thirds)


def test_an_instance_that_is_too_small_for_the_model_helps_others() -> None:
    model = ServedLayers((Layer(10, 1, Line(1 / 16, 0)),) * 4)
    small, large = PlannedStage(Instance("small", 25), 0, 4), PlannedStage(Instance("large", 60), 0, 4)
    assert Splits(model).tokens([small]) == -1
    assert Splits(model).tokens([small, large]) == 10  # one layer and 15 tokens, three and 10
    assert [stage.end - stage.first for stage in Splits(model).split([large, small], 1)] in ([1, 3], [3, 1])
