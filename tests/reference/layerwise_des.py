"""Passes layer by layer over mini-batches, event by event: slow, obvious, to test `bench.lab.hybridserve.layerwise` against.

Nothing here knows a recurrence. There is one copy engine a direction, each with its list of copies, which it takes in order
and begins when the buffer of the next one is free; a processor, which takes steps in order; and a heap of events. Times are
whole numbers. Before the first pass there was one that is over: whatever it freed is free.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Step(NamedTuple):
    activations: int
    kv: int
    recompute: int
    forward: int
    store: int


@dataclass
class Copy:
    issued: int  # the order: after which step it is issued, which step needs it, weights before activations before KV
    needed: int
    kind: str
    seconds: int
    freed: tuple[str, int]  # which stage of which step frees its buffer


def _weight_copies(weights: Sequence[int], batches: int, ring: int, divided: bool, passes: int) -> list[Copy]:
    layers = len(weights)
    streamed = [layer for layer in range(layers) if weights[layer]]
    in_slot: dict[int, tuple[int, int]] = {}  # slot -> layer, and the first step after it is done
    copies, latest = [], -3 * layers * batches
    for number in range(-2, passes):
        for position, layer in enumerate(streamed):
            begin = (number * layers + layer) * batches
            before, after = in_slot.get(position % ring, (-1, 0))
            if position % ring in in_slot and before != layer:
                freed = after - 1
                pieces = batches if divided else 1
                for piece in range(pieces):
                    issued = latest = max(latest, min(freed + piece, begin - 1))
                    copies.append(Copy(issued, begin, "0 weights", weights[layer] // pieces, ("forward", freed)))
            in_slot[position % ring] = layer, begin + batches
    return [copy for copy in copies if copy.needed >= 0]


def ends(weights: Sequence[int], steps: Sequence[Sequence[Step]], ring: int, buffers: int, passes: int) -> list[int]:
    """When each pass ends. steps: of each layer, its mini-batches. Weights must be multiples of their number."""
    batches = len(steps[0])
    flat = [step for layer in steps for step in layer]
    several = passes + 2 + buffers // len(flat)  # copies for later passes are on the link in between
    copies = _weight_copies(weights, batches, ring, any(step.activations or step.kv for step in flat), several)
    for at in range(several * len(flat)):
        step = flat[at % len(flat)]
        if step.activations:
            copies.append(Copy(at - buffers, at, "1 activations", step.activations, ("recompute", at - buffers)))
        if step.kv:
            copies.append(Copy(at - buffers, at, "2 kv", step.kv, ("forward", at - buffers)))
    copies.sort(key=lambda copy: (copy.issued, copy.needed, copy.kind))
    lacking: dict[tuple[str, int], int] = {}  # stage and step -> copies that it still waits for
    for copy in copies:
        stage = "forward" if copy.kind == "2 kv" else "recompute"
        lacking[stage, copy.needed] = lacking.get((stage, copy.needed), 0) + 1

    now = 0
    over: set[tuple[str, int]] = set()
    events: list[tuple[int, int, str, int]] = []
    free = {"in": True, "out": True, "processor": True}
    next_copy, stage, at = 0, "recompute", 0
    leaving: list[int] = []
    found: list[int] = []

    def has_ended(stage: str, at: int) -> bool:
        return at < 0 or (stage, at) in over

    def begin(engine: str, seconds: int, number: int) -> None:
        free[engine] = False
        heapq.heappush(events, (now + seconds, len(over), engine, number))

    while len(found) < passes:
        if free["in"] and next_copy < len(copies) and has_ended(*copies[next_copy].freed):
            begin("in", copies[next_copy].seconds, next_copy)
        if free["out"] and leaving:
            begin("out", flat[leaving[0] % len(flat)].store, leaving.pop(0))
        step = flat[at % len(flat)]
        if free["processor"] and not lacking.get((stage, at), 0):
            if stage == "recompute":
                begin("processor", step.recompute, at)
            else:
                user = at - buffers  # of the same buffer for what leaves, the last that left anything in it
                while user >= 0 and not flat[user % len(flat)].store:
                    user -= buffers
                if not step.store or user < 0 or has_ended("store", user):
                    begin("processor", step.forward, at)
        now, _, engine, number = heapq.heappop(events)
        free[engine] = True
        if engine == "in":
            copy = copies[number]
            lacking["forward" if copy.kind == "2 kv" else "recompute", copy.needed] -= 1
            next_copy += 1
        elif engine == "out":
            over.add(("store", number))
        else:
            over.add((stage, number))
            if stage == "recompute":
                stage = "forward"
            else:
                if step.store:
                    leaving.append(number)
                stage, at = "recompute", at + 1
                if at % len(flat) == 0:
                    found.append(now)
    return found
