# SPDX-License-Identifier: Apache-2.0
"""Which instance computes which layers: the words of `remap_serve.policy.cluster`, its invariant, and capacity. Pure.

The invariant of every placement: the stages of each group compute all layers, each once, in order; so each group holds a
complete copy of the model. `check` raises where it is broken, or where memory does not suffice.

Capacity in tokens: every request of a group passes all of its stages, and each stage keeps the KV of its own layers. So the
stage with the least room limits the group. For g equal instances of memory M, weights W and k bytes of KV a token, and layers
that divide evenly, this is g (M - W / g) / k. Source: derived (KunServe leaves it implicit).

An instance that serves alone may let its own layers stream (Oneiros), and borrow pages from models that are idle in its session:
its offer (`Offer`) counts as room as well. A stage of several does neither, and a stage that is planned does not yet:
who merges gives that room up, and who is to serve alone again has to fit beside all of its weights.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from remap.errors import Error, InvalidArgument, OutOfMemory
from remap_serve.policy.activations import Line

__all__ = [
    "UNLIMITED",
    "Group",
    "IncompleteCopy",
    "Instance",
    "InstanceLoad",
    "Layer",
    "Offer",
    "Placement",
    "PlannedStage",
    "ServedLayers",
    "alone",
    "check",
]

UNLIMITED = sys.maxsize
"""Capacity, in tokens, of a stage without KV."""


class IncompleteCopy(Error):
    """A group does not compute every layer once and in order. Nothing changed.

    Fields: group (its number), epoch, layers (of the model), missing and repeated (layers), runs (first and end of each
    stage), instance (the name of one that is in the cluster twice, else None).
    """


@dataclass(frozen=True)
class Layer:
    """One layer; the embedding and the head are layers without KV. weight_bytes: on an instance that holds it.
    kv_bytes: of one token. seconds: of a microbatch, by its tokens."""

    weight_bytes: int
    kv_bytes: int
    seconds: Line


@dataclass(frozen=True)
class ServedLayers:
    """The layers of the model that all instances serve, in the order of computation.

    Raises InvalidArgument (field layers) without a layer, and for bytes or seconds below 0.
    """

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        values = [
            value
            for each in self.layers
            for value in (each.weight_bytes, each.kv_bytes, each.seconds.base_s, each.seconds.each_s)
        ]
        if not values or min(values) < 0:
            raise InvalidArgument(
                f"a model needs at least one layer, of bytes and seconds >= 0; got {len(self.layers)} layers, the least "
                f"value {min(values, default=None)}; nothing changed; correct them",
                layers=self.layers,
            )

    def weight_bytes(self, first: int, end: int) -> int:
        """Bytes of the layers first <= i < end."""
        return self.weight_ends[end] - self.weight_ends[first]

    def kv_bytes(self, first: int, end: int) -> int:
        """Bytes of KV of one token in the layers first <= i < end."""
        return self.kv_ends[end] - self.kv_ends[first]

    def seconds(self, first: int, end: int, tokens: float) -> float:
        """Seconds to compute the layers first <= i < end for a microbatch of `tokens` tokens; of none 0."""
        if tokens <= 0:
            return 0.0
        base_s, each_s = self._seconds
        return base_s[end] - base_s[first] + tokens * (each_s[end] - each_s[first])

    @cached_property
    def weight_ends(self) -> list[int]:
        """Entry i: bytes of the first i layers."""
        return list(accumulate((layer.weight_bytes for layer in self.layers), initial=0))

    @cached_property
    def kv_ends(self) -> list[int]:
        """Entry i: bytes of KV of one token in the first i layers."""
        return list(accumulate((layer.kv_bytes for layer in self.layers), initial=0))

    @cached_property
    def _seconds(self) -> tuple[list[float], list[float]]:
        lines = [layer.seconds for layer in self.layers]
        return (
            list(accumulate((line.base_s for line in lines), initial=0.0)),
            list(accumulate((line.each_s for line in lines), initial=0.0)),
        )


@dataclass(frozen=True)
class InstanceLoad:
    """Requests of an instance, or of a group. running: how many run; tokens: KV tokens that they hold, in all.
    waiting: KV tokens that each waiting request asks for, the head of the line first. longest: KV tokens that one request asks
    for at most, running or waiting."""

    running: int = 0
    tokens: int = 0
    waiting: tuple[int, ...] = ()
    longest: int = 0

    @property
    def requests(self) -> int:
        """Running and waiting ones."""
        return self.running + len(self.waiting)

    @property
    def demand(self) -> int:
        """Tokens of the requests that run and of the head of the line. Source: KunServe, section 2.2, after Llumnix."""
        return self.tokens + sum(self.waiting[:1])

    @property
    def wanted(self) -> int:
        """Tokens of all requests, running and waiting."""
        return self.tokens + sum(self.waiting)


@dataclass(frozen=True)
class Instance:
    """The device, or the devices, that can serve the model alone. memory_bytes: for weights and KV together."""

    name: str
    memory_bytes: int
    load: InstanceLoad = InstanceLoad()


@dataclass(frozen=True)
class Offer:
    """Room for KV beside what an instance has for itself, while it serves alone: nbytes, by which a pass takes added_s longer
    if all of it is used. Of its own layers, which then stream, or lent by another model.

    Raises InvalidArgument (fields nbytes, added_s) for values below 0.
    """

    nbytes: int = 0
    added_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.nbytes >= 0 and self.added_s >= 0.0):
            raise InvalidArgument(
                f"an offer must have bytes and seconds >= 0, got {self.nbytes} and {self.added_s!r}; nothing changed; correct "
                "the quote",
                nbytes=self.nbytes,
                added_s=self.added_s,
            )


@dataclass(frozen=True)
class PlannedStage:
    """An instance as a part of its group: it computes the layers first <= i < end, none if they are equal, and holds them.
    arrived: layers that it holds besides and does not compute (`restore` brings them before a group is dissolved).
    offers: those that cost least for their bytes first; of a stage without all layers they count for nothing."""

    instance: Instance
    first: int
    end: int
    arrived: frozenset[int] = frozenset()
    offers: tuple[Offer, ...] = ()

    def holds(self, layer: int) -> bool:
        """Whether the layer's weights are on this instance."""
        return self.first <= layer < self.end or layer in self.arrived

    def offered(self, model: ServedLayers) -> tuple[Offer, ...]:
        """`offers`, as far as they count."""
        return self.offers if self.end - self.first == len(model.layers) else ()

    def capacity(self, model: ServedLayers) -> int:
        """Tokens of KV that fit beside the weights, with all that is offered; -1 if the weights do not fit, which no offer helps;
        UNLIMITED if its layers have no KV."""
        held = model.weight_bytes(self.first, self.end)
        held += sum(model.layers[layer].weight_bytes for layer in self.arrived if not self.first <= layer < self.end)
        free, each = self.instance.memory_bytes - held, model.kv_bytes(self.first, self.end)
        if free < 0:
            return -1
        return (free + sum([offer.nbytes for offer in self.offered(model)])) // each if each else UNLIMITED


@dataclass(frozen=True)
class Group:
    """Instances that serve their requests together, as the stages of a pipeline in this order."""

    stages: tuple[PlannedStage, ...]

    def capacity(self, model: ServedLayers) -> int:
        """Tokens of KV that fit into every stage; -1 if the weights of one do not fit."""
        return min(stage.capacity(model) for stage in self.stages)

    @cached_property
    def load(self) -> InstanceLoad:
        """Of all instances together; they have one line, in which the heads of theirs stand first."""
        loads = [stage.instance.load for stage in self.stages]
        lines = [load.waiting for load in loads]
        depth = max(map(len, lines))
        waiting = tuple(line[place] for place in range(depth) for line in lines if place < len(line))
        running, tokens = sum(load.running for load in loads), sum(load.tokens for load in loads)
        return InstanceLoad(running, tokens, waiting, max(load.longest for load in loads))


@dataclass(frozen=True)
class Placement:
    """The whole cluster. epoch: rises with each change; a plan names the epoch that it was made for."""

    model: ServedLayers
    groups: tuple[Group, ...]
    epoch: int = 0

    @property
    def stages(self) -> dict[str, PlannedStage]:
        """Each instance's stage, by its name."""
        return {stage.instance.name: stage for group in self.groups for stage in group.stages}


def alone(model: ServedLayers, instances: tuple[Instance, ...]) -> Placement:
    """Every instance for itself, with all layers: how a cluster starts."""
    return Placement(model, tuple(Group((PlannedStage(instance, 0, len(model.layers)),)) for instance in instances))


def check(placement: Placement) -> None:
    """Raise unless the invariant holds: IncompleteCopy, with the layers.

    OutOfMemory (fields group, requested, free) where a group's running requests have more tokens than its capacity, or
    its weights do not fit.
    """
    count, seen = len(placement.model.layers), set[str]()
    for number, group in enumerate(placement.groups):
        runs = [(stage.first, stage.end) for stage in group.stages]
        names = [stage.instance.name for stage in group.stages]
        twice = next((name for place, name in enumerate(names) if name in seen or name in names[:place]), None)
        seen.update(names)
        computed = [layer for first, end in runs for layer in range(first, end)]
        if computed != list(range(count)) or any(first > end for first, end in runs) or twice is not None:
            missing = tuple(layer for layer in range(count) if layer not in computed)
            repeated = tuple(layer for layer in range(count) if computed.count(layer) > 1)
            raise IncompleteCopy(
                f"group {number} of epoch {placement.epoch} must compute each of {count} layers once and in order, and every "
                f"instance be in one group: stages {runs}, {len(missing)} layers missing, {len(repeated)} repeated, "
                f"instance in two places: {twice}; nothing changed; make the plan anew",
                group=number,
                epoch=placement.epoch,
                layers=count,
                missing=missing,
                repeated=repeated,
                runs=tuple(runs),
                instance=twice,
            )
        capacity = group.capacity(placement.model)
        if capacity < group.load.tokens:
            raise OutOfMemory(
                f"group {number} of epoch {placement.epoch} must hold {group.load.tokens} tokens of running requests beside "
                f"its weights, and has room for {capacity}; nothing changed; preempt requests or merge it with another",
                group=number,
                requested=group.load.tokens,
                free=capacity,
            )
