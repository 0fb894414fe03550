"""Seconds of a pass that goes layer by layer over mini-batches, with weights, KV and activations on one link. Pure.

A pass computes layer 0 of every mini-batch, then layer 1 of every mini-batch, and so on; t counts these steps through all
passes. A layer's weights are copied in once a pass, through a ring of buffers with fixed places. A step's activations and
KV are copied in through buffers of their own, and what it adds leaves on the other direction of the link:

    R_t = max(C_{t-1}, W_t, A_t) + recompute_t         K and V are made again from the activations
    C_t = max(R_t, K_t, S_u) + forward_t               W, A, K: when weights, activations and KV have come
                                                       u: the last of t - buffers, t - 2 buffers, ... that stores anything
    S_t = max(S_{t'}, C_t) + store_t                   t': the last step before t that stores anything
    each copy in begins when the one before it in the fixed order has ended, and the step that used its buffer too

The order: by the step that frees the buffer, then by the step that needs the copy; of one step the weights first, then the
activations; weights never before those of an earlier layer. Weights that may come during several steps are divided among
these, so that no step's KV waits for a whole layer's weights. With a fixed order these equations are linear in (max, +).
So a pass never takes less time if a copy or a computation takes more, and the seconds of a pass are the same for ever once
all times have shifted by as much.
tests/reference/layerwise_des.py is an independent event simulation that the tests compare against. Source: derived, with
the pipeline of HybridServe, section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remap.errors import InvalidArgument
from remap.policy.maxplus import copied_uses

__all__ = ["Part", "busiest", "pass_ends", "pass_seconds"]

_PASSES = 64
"""Passes that are stepped through at most until times repeat."""
_SAME = 1e-12
"""Times that differ by less than this share of all that was stepped through are the same."""


@dataclass(frozen=True)
class Part:
    """What one mini-batch takes in one layer, in seconds, each alone: to copy its activations and its KV in, to make K and
    V again from the activations, to compute the rest, and to copy what it adds out. 0: there is none."""

    activations_s: float
    kv_s: float
    recompute_s: float
    forward_s: float
    store_s: float = 0.0


@dataclass(frozen=True)
class _Copy:
    """One copy in of every pass. freed: steps from the one that frees its buffer to the one after which it is issued;
    needed: steps from there to the one that needs it."""

    seconds: float
    kind: int  # 0 weights, 1 activations, 2 KV
    freed: int
    needed: int


def busiest(weights_s: Sequence[float], parts: Sequence[Sequence[Part]], ring: int = 2) -> float:
    """Seconds that the link's busier direction or the processor takes for a pass: no schedule is shorter. Arguments and
    errors as for `pass_seconds`."""
    _check(weights_s, parts, ring, 1)
    streamed = [layer for layer, seconds in enumerate(weights_s) if seconds]
    copied = math.fsum(weights_s[streamed[use]] for use in copied_uses(len(streamed), ring, "fixed"))
    steps = [part for layer in parts for part in layer]
    return max(
        copied + math.fsum(part.activations_s + part.kv_s for part in steps),
        math.fsum(part.recompute_s + part.forward_s for part in steps),
        math.fsum(part.store_s for part in steps),
    )


def pass_seconds(weights_s: Sequence[float], parts: Sequence[Sequence[Part]], ring: int = 2, buffers: int = 2) -> float:
    """Seconds of a pass in the steady state, if nothing is between passes.

    weights_s: seconds to copy each layer's weights in; 0: the layer stays. parts: of each layer, its mini-batches, as many
    in each layer. ring: buffers of weights; a layer that has one for itself is not copied again. buffers: of each kind of
    blocks. Should the times not repeat within 64 passes, the longest of the last 32 passes counts.

    Raises InvalidArgument (fields weights_s, parts, ring, buffers) for lengths that differ, no mini-batch, and seconds
    that are negative or not finite.
    """
    seen: list[tuple[float, list[float]]] = []
    for end, state in _passes(weights_s, parts, ring, buffers):
        for number, (earlier, before) in enumerate(seen):
            if all(abs(now - then) <= _SAME * end for now, then in zip(state, before, strict=True)):
                return (end - earlier) / (len(seen) - number)
        seen.append((end, state))
        if len(seen) == _PASSES:
            break
    ends = [end for end, _ in seen]
    return max(later - earlier for earlier, later in zip(ends[_PASSES // 2 - 1 :], ends[_PASSES // 2 :]))


def pass_ends(
    weights_s: Sequence[float], parts: Sequence[Sequence[Part]], ring: int = 2, buffers: int = 2
) -> Iterator[float]:
    """When each pass ends, for ever, in seconds from a start with empty buffers. Arguments and errors as for
    `pass_seconds`."""
    return (end for end, _ in _passes(weights_s, parts, ring, buffers))


def _passes(
    weights_s: Sequence[float], parts: Sequence[Sequence[Part]], ring: int, buffers: int
) -> Iterator[tuple[float, list[float]]]:
    """When each pass ends, and all times that later ones depend on, from that end."""
    _check(weights_s, parts, ring, buffers)
    steps = [part for layer in parts for part in layer]
    total = len(steps)
    after = _order(weights_s, steps, len(parts[0]), ring, buffers)
    lead = max((copy.needed for copies in after for copy in copies), default=0)  # before the first step
    depth = max((copy.freed for copies in after for copy in copies), default=0) + buffers + 1
    read, done, stored = ([0.0] * depth for _ in range(3))  # R, C and S of the last `depth` steps, in a circle
    first: dict[int, float] = {}  # step -> when its weights and activations have come
    second: dict[int, float] = {}  # step -> when its KV has
    stores = any(part.store_s for part in steps)
    link = out = 0.0
    step = -lead
    while True:
        place = step % depth
        if step < 0:
            read[place] = done[place] = stored[place] = 0.0
        else:
            part = steps[step % total]
            begin = max(done[(step - 1) % depth], first.pop(step, 0.0))
            read[place] = begin + part.recompute_s
            begin = max(read[place], second.pop(step, 0.0))
            if part.store_s:
                begin = max(begin, stored[(step - buffers) % depth])
            end = done[place] = begin + part.forward_s
            stored[place] = stored[(step - buffers) % depth]  # who stores nothing leaves the buffer as it is
            if part.store_s:
                out = stored[place] = max(out, end) + part.store_s
        for copy in after[step % total]:
            if step + copy.needed < 0:
                continue  # of a step before the first
            free = (read if copy.kind == 1 else done)[(step - copy.freed) % depth] if step >= copy.freed else 0.0
            link = max(link, free) + copy.seconds
            (second if copy.kind == 2 else first)[step + copy.needed] = link
        step += 1
        if step > 0 and step % total == 0:
            end = done[(step - 1) % depth]
            times = [each[(step - 1 - back) % depth] for each in (read, done, stored) for back in range(depth)]
            times += [of[needed] for of in (first, second) for needed in sorted(of)]
            times += [link] * any(after) + [out] * stores
            yield end, [time - end for time in times]


def _order(
    weights_s: Sequence[float], steps: Sequence[Part], batches: int, ring: int, buffers: int
) -> list[list[_Copy]]:
    """The copies in of one pass, by the step after which they are issued, modulo the steps of a pass."""
    total = len(steps)
    found: list[tuple[int, int, int, _Copy]] = []  # sorted by these: issued after, needed at, kind
    streamed = [layer for layer, seconds in enumerate(weights_s) if seconds]
    copied = copied_uses(len(streamed), ring, "fixed")
    last = {use % ring: streamed[use] for use in copied}  # place -> the last layer there
    pieces = batches if any(part.activations_s or part.kv_s for part in steps) else 1
    latest = -2 * total  # before any step that frees a buffer
    for use in copied:
        layer = streamed[use]
        needed = layer * batches
        before = streamed[use - ring] if use >= ring else last[use % ring]
        freed = (before + 1) * batches - 1 - (total if use < ring else 0)
        for piece in range(pieces):
            issued = latest = max(latest, min(freed + piece, needed - 1))
            copy = _Copy(weights_s[layer] / pieces, 0, issued - freed, needed - issued)
            found.append((issued, needed, 0, copy))
    for step, part in enumerate(steps):
        for kind, seconds in ((1, part.activations_s), (2, part.kv_s)):
            if seconds:
                found.append((step - buffers, step, kind, _Copy(seconds, kind, 0, buffers)))
    after: list[list[tuple[int, int, _Copy]]] = [[] for _ in range(total)]
    for issued, _, kind, copy in found:
        after[issued % total].append((copy.needed, kind, copy))
    return [[copy for _, _, copy in sorted(copies, key=lambda each: each[:2])] for copies in after]


def _check(weights_s: Sequence[float], parts: Sequence[Sequence[Part]], ring: int, buffers: int) -> None:
    counts = {len(layer) for layer in parts}
    if len(weights_s) != len(parts) or len(counts) != 1 or 0 in counts or ring < 1 or buffers < 1:
        raise InvalidArgument(
            "a pass needs at least one layer, as many mini-batches in each, and buffers: got weights of "
            f"{len(weights_s)} layers, parts of {len(parts)} with {sorted(counts)} mini-batches, ring {ring}, "
            f"buffers {buffers}; nothing changed; correct them",
            weights_s=weights_s,
            parts=parts,
            ring=ring,
            buffers=buffers,
        )
    given = [*weights_s]
    for part in {id(part): part for layer in parts for part in layer}.values():
        given += (part.activations_s, part.kv_s, part.recompute_s, part.forward_s, part.store_s)
    for seconds in given:
        if not 0.0 <= seconds < math.inf:
            raise InvalidArgument(
                f"seconds must be finite and >= 0, got {seconds!r}; nothing changed; correct the measurement",
                weights_s=weights_s,
                parts=parts,
            )
