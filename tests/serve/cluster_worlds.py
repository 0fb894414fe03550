"""Clusters drawn at random: unequal instances, unequal and empty layers, groups that are fused in part."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from remap.errors import OutOfMemory
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.pipeline import Network
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

# Sixteenths of a second: sums and products with few tokens are exact.
LINES = st.builds(lambda base, each: Line(base / 16, each / 16), st.integers(0, 8), st.integers(0, 4))
LAYERS = st.builds(Layer, st.integers(0, 6), st.integers(0, 3), LINES)
LOADS = st.builds(
    InstanceLoad, st.integers(0, 5), st.integers(0, 12), st.lists(st.integers(0, 9), max_size=3).map(tuple)
)
NETWORK = Network(Line(1 / 16, 1 / 16), 2.0, 1.0)


def models(most: int = 6) -> st.SearchStrategy[ServedLayers]:
    """Of at least one layer with KV."""
    layers = st.lists(LAYERS, min_size=1, max_size=most)
    return layers.filter(lambda drawn: any(layer.kv_bytes for layer in drawn)).map(
        lambda drawn: ServedLayers(tuple(drawn))
    )


@st.composite
def clusters(draw: st.DrawFn, most: int = 8, most_layers: int = 6, equal: bool = False) -> Placement:
    """1 to `most` instances, each alone with room for the model and for what it runs."""
    model = draw(models(most_layers))
    count = draw(st.integers(1, most))
    weights, kv = model.weight_bytes(0, len(model.layers)), model.kv_bytes(0, len(model.layers))
    loads = [draw(LOADS) for _ in range(count)]
    spare = st.integers(0, 40)
    shared = draw(spare) + max(load.tokens for load in loads) * kv
    memory = [weights + (shared if equal else load.tokens * kv + draw(spare)) for load in loads]
    return alone(model, tuple(Instance(f"i{n}", memory[n], load) for n, load in enumerate(loads)))


@st.composite
def fused(draw: st.DrawFn, most: int = 6, most_layers: int = 5) -> Placement:
    """Some of the instances serve together, in any order, with any consecutive runs and with layers that came back. Some may
    have no room for the whole model."""
    model = draw(models(most_layers))
    count = len(model.layers)
    loads = draw(st.lists(LOADS, min_size=1, max_size=most))
    room = draw(st.integers(0, 1)) * sum(load.tokens * model.kv_bytes(0, count) for load in loads)
    names = draw(st.permutations([f"i{n}" for n in range(len(loads))]))
    groups = []
    while names:
        size = draw(st.integers(1, len(names)))
        taken, names = names[:size], names[size:]
        cuts = [0, *sorted(draw(st.lists(st.integers(0, count), min_size=size - 1, max_size=size - 1))), count]
        stages = []
        for name, first, end in zip(taken, cuts, cuts[1:]):
            arrived = draw(st.frozensets(st.integers(0, count - 1), max_size=2))
            held = {*range(first, end), *arrived} if draw(st.booleans()) else range(count)
            memory = sum(model.layers[layer].weight_bytes for layer in held) + room + draw(st.integers(0, 30))
            stages.append(PlannedStage(Instance(name, memory, loads[int(name[1:])]), first, end, arrived))
        groups.append(Group(tuple(stages)))
    return Placement(model, tuple(groups), draw(st.integers(0, 9)))


def _serves(placement: Placement) -> bool:
    try:
        check(placement)
    except OutOfMemory:
        return False
    return True


def serving(most: int = 6, most_layers: int = 5) -> st.SearchStrategy[Placement]:
    """Alone or fused in part, with room for what runs."""
    return st.one_of(clusters(most, most_layers), fused(most, most_layers).filter(_serves))


@st.composite
def streaming(draw: st.DrawFn, placements: st.SearchStrategy[Placement]) -> Placement:
    """Instances alone may have offers, and may run requests in that room."""
    placement = draw(placements)
    weights = placement.model.weight_bytes(0, len(placement.model.layers))
    offers = st.builds(Offer, st.integers(1, weights), st.integers(0, 8).map(lambda n: n / 16))
    groups = []
    for group in placement.groups:
        found = draw(st.lists(offers, max_size=3)) if weights and len(group.stages) == 1 else []
        found.sort(key=lambda offer: offer.added_s / offer.nbytes)
        stages = tuple(replace(stage, offers=tuple(found)) for stage in group.stages)
        if found:
            instance, room = stages[0].instance, stages[0].capacity(placement.model) - stages[0].instance.load.tokens
            tokens = instance.load.tokens + draw(st.sampled_from([0, max(0, min(room, weights))]))
            stages = (replace(stages[0], instance=replace(instance, load=replace(instance.load, tokens=tokens))),)
        groups.append(Group(stages))
    return replace(placement, groups=tuple(groups))
