# SPDX-License-Identifier: Apache-2.0
"""Which layers to stream, and what streaming them costs: exact steady-state mathematics, no memory, no clock, no torch.

A pass computes layers 0..n-1. The m streamed layers are copied in, once a pass, through `buffers` (beta) ring buffers.
For streamed use k, with W_k the computation between the previous streamed layer and this one and c_k its own:

    C_k = max(C_{k-1} + W_k, D_k) + c_k        the computation of use k ends
    D_k = max(D_{k-1}, C_{prev(k)}) + tau_k    its copy ends: one FIFO copy engine; the buffer's last user must be done

`slots="rotating"`: prev(k) = k - beta, counted over all passes (Oneiros' assumption, Eq. 4 and 5).
`slots="fixed"`: the j-th streamed layer of every pass uses buffer j mod beta, so addresses never change; when beta does
not divide m, one slot's wrap-around then acts as a single buffer. A buffer that only ever holds one layer keeps it:
that layer is not copied again and counts as resident.

These equations are linear in (max, +), so the seconds per pass are the largest cycle mean of a small matrix: `period`.
`tests/reference/schedule_des.py` is an independent event simulation that the tests compare against.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Literal

from remap.errors import InvalidArgument
from remap.policy.maxplus import ROUNDING, Slots, lower_bound, pass_period
from remap.sizes import shown

__all__ = [
    "RELATIVE_EPSILON",
    "Select",
    "Slots",
    "max_remapped",
    "nested",
    "one_shot_delay",
    "period",
    "stall",
    "uniform",
    "uniform_fixed",
]

Select = Callable[[int, int, int], Sequence[int]]
"""(layers, remapped, buffers) -> the streamed layers, remapped + buffers of them."""

MOST_LAYERS = 1 << 16
"""No model has more, and choosing among more takes hours."""
MOST_SECONDS = 1e100
"""Of one layer: so sums of them are numbers."""

RELATIVE_EPSILON = 1e-9
"""`max_remapped` forgives this share of a pass, so that an exact tie in real arithmetic is not lost to rounding."""


# ---------------------------------------------------------------------------------------------- choosing layers


def uniform(layers: int, remapped: int, buffers: int, phase: int = 0) -> tuple[int, ...]:
    """The m = remapped + buffers streamed layers, spread evenly on the circle of `layers`, in layer order.

    `uniform(40, 4, 1) == (0, 8, 16, 24, 32)`. Gaps differ by at most one. `phase` (any integer) turns the circle.
    With `remapped == 0` nothing is streamed: `()`. Source: Oneiros section 5.2.

    Raises InvalidArgument (fields: layers, remapped, buffers) when layers < 1, remapped < 0, buffers < 1, or
    remapped + buffers > layers.
    """
    layers = _integer("layers", layers, 1)
    remapped = _integer("remapped", remapped, 0)
    buffers = _integer("buffers", buffers, 1)
    phase = _integer("phase", phase, None)
    if remapped == 0:
        return ()
    streamed = remapped + buffers
    if streamed > layers:
        raise InvalidArgument(
            f"remapped + buffers must be at most the number of layers: {remapped} + {buffers} > {layers}; "
            "nothing changed; remap fewer layers or use fewer buffers",
            layers=layers,
            remapped=remapped,
            buffers=buffers,
        )
    return tuple(sorted((j * layers // streamed + phase) % layers for j in range(streamed)))


def uniform_fixed(layers: int, remapped: int, buffers: int) -> tuple[int, ...]:
    """`uniform`, with the gap around the end of the pass one layer wider when `buffers` does not divide m.

    With two fixed slots the last and the first streamed layer then share a buffer, so the first one's copy cannot
    start before the last one's computation ends. For n = 40, alpha = 9 and copies of 3.4 layers' computation,
    `uniform` stalls for 0.8 of a layer, this set for nothing. Errors as for `uniform`.
    """
    chosen = uniform(layers, remapped, buffers)
    m = len(chosen)
    if m % buffers == 0 or m == layers:
        return chosen
    return tuple(j * (layers - 1) // m for j in range(m))


def nested(layers: int, begin: int = 0) -> tuple[int, ...]:
    """An order of all layers, each prefix of which is spread as evenly on the circle as a nested order allows. begin: the
    first of them.

    Growing or shrinking the streamed set along this order reloads nothing that stays streamed; `uniform` sets of
    neighbouring sizes share few layers. The continuous sequence is log2(2k - 1) mod 1, for which the largest gap is
    at most 1.443 and the smallest at least 0.721 of the mean: no sequence does better (de Bruijn and Erdos,
    "Sequences of points on a circle", 1949). Here the largest gap is split in that sequence's proportion, rounded.

    A prefix is in order of choice; sort it for layer order. Raises InvalidArgument (field: layers) when layers < 1.
    """
    layers = _integer("layers", layers, 1)
    order = [0]
    gaps = [(0, layers)]  # (start, length), the positions start+1 .. start+length-1 are free
    while len(order) < layers:
        k = len(order)
        at = max(range(k), key=lambda i: gaps[i][1])
        start, length = gaps[at]
        share = math.log2((2 * k + 1) / (2 * k)) / math.log2((k + 1) / k)
        first = min(length - 1, max(1, round(length * share)))
        order.append(start + first)
        gaps[at] = (start, first)
        gaps.append((start + first, length - first))
    return tuple((each + begin) % layers for each in order)


# ---------------------------------------------------------------------------------------------- exact costs


def period(
    compute_s: float | Sequence[float],
    transfer_s: float | Sequence[float],
    streamed: Iterable[int],
    buffers: int,
    slots: Slots = "fixed",
    layers: int | None = None,
) -> float:
    """Seconds per pass in the steady state, exact to rounding (no simulation, no convergence test).

    compute_s, transfer_s: seconds to compute, and to copy in, each layer: n floats, or one float for all layers (when
    both are one float, say how many `layers`). streamed: distinct layers in any order. buffers: ring buffers, >= 1;
    more than there are streamed layers is allowed, and then nothing is copied in with fixed slots.

    Method: one pass maps the end times that later passes depend on (the last use of each buffer, the last copy) to
    themselves by a (max, +) matrix of at most buffers + 1 rows, found by running the recurrence once from each unit
    vector. Each entry depends on every other in the end, so every schedule grows by the matrix's largest cycle mean
    per pass, which Karp's algorithm gives. Time O(buffers * streamed + buffers^3). The result is never below
    sum(compute_s), and equals it when the difference is rounding.

    Raises InvalidArgument (fields name the argument) for a wrong length, a negative or non-finite time, a layer out of
    range or named twice, buffers < 1, unknown `slots`.
    """
    compute, transfer = _times(compute_s, transfer_s, layers)
    chosen = _streamed(streamed, len(compute))
    return pass_period(compute, transfer, chosen, _integer("buffers", buffers, 1), _mode(slots), math.fsum(compute))


def stall(
    compute_s: float | Sequence[float],
    transfer_s: float | Sequence[float],
    streamed: Iterable[int],
    buffers: int,
    slots: Slots = "fixed",
    layers: int | None = None,
) -> float:
    """Seconds per pass for which the computation waits for copies, in the steady state: `period` - sum(compute_s).

    Zero when nothing waits (rounding is removed). Arguments and errors as for `period`.
    """
    compute, transfer = _times(compute_s, transfer_s, layers)
    return max(0.0, period(compute, transfer, streamed, buffers, slots) - math.fsum(compute))


def max_remapped(
    compute_s: float | Sequence[float],
    transfer_s: float | Sequence[float],
    buffers: Literal["auto"] | int = "auto",
    slowdown: float = 0.0,
    slots: Slots = "fixed",
    layers: int | None = None,
    select: Select | None = None,
) -> tuple[int, int]:
    """(alpha, beta): the most layers that can be remapped with `period` <= (1 + slowdown) * sum(compute_s).

    buffers: "auto" compares single and double buffering, and takes the larger alpha; on a tie fewer buffers, which copy
    less. An integer fixes beta. select: (layers, alpha, beta) -> streamed layers, default `uniform`; `uniform_fixed`
    suits fixed slots better, `lambda n, a, b: order[: a + b]` with `order = nested(n)` makes changes of alpha cheap.
    Returns (0, 1) when nothing can be hidden. The bound is relaxed by `RELATIVE_EPSILON`.

    The stall is not monotone in alpha (fixed slots penalise an odd number of streamed layers with two buffers), so
    every alpha is tried, from the largest; lower bounds on the period only skip what cannot qualify.

    Raises InvalidArgument as `period` does, and (fields: slowdown; streamed, expected) for a slowdown that is negative
    or not finite and for a `select` that does not return alpha + beta layers.
    """
    compute, transfer = _times(compute_s, transfer_s, layers)
    mode = _mode(slots)
    n = len(compute)
    if not 0.0 <= _real(slowdown) < math.inf:
        raise InvalidArgument(
            f"slowdown must be a finite number >= 0 (0.05 allows 5 %), got {shown(slowdown)}; nothing changed; correct it",
            slowdown=slowdown,
        )
    choices = (1, 2) if isinstance(buffers, str) and buffers == "auto" else (_integer("buffers", buffers, 1),)
    total = math.fsum(compute)
    limit = (1.0 + slowdown) * total * (1.0 + RELATIVE_EPSILON)
    best = (0, 1)
    for beta in choices:
        for alpha in range(n - beta, best[0], -1):
            if select is None:
                chosen = uniform(n, alpha, beta)
            else:
                chosen = _streamed(select(n, alpha, beta), n)
                if len(chosen) != alpha + beta:
                    raise InvalidArgument(
                        f"select({n}, {alpha}, {beta}) must return {alpha + beta} layers, got {len(chosen)}; "
                        "nothing changed; return remapped + buffers distinct layers",
                        streamed=chosen,
                        expected=alpha + beta,
                    )
            if lower_bound(compute, transfer, chosen, beta, mode) > limit:
                continue
            if pass_period(compute, transfer, chosen, beta, mode, total) <= limit:
                best = (alpha, beta)
                break
    return best


def one_shot_delay(compute_s: Sequence[float], transfer_s: float | Sequence[float], missing: Iterable[int]) -> float:
    """Seconds by which one pass ends later because `missing` layers must first be loaded, in layer order.

    Copies start with the pass, each into memory of its own, and earlier layers compute meanwhile:
    max over j of (sum of the first j transfers - computation before the j-th missing layer), at least 0. Exact.
    For equal layers a suffix of the model is the best set to be missing. Errors as for `period`.
    """
    compute, transfer = _times(compute_s, transfer_s, None)
    chosen = _streamed(missing, len(compute))
    delay = loaded = before = 0.0
    at = 0
    for layer in chosen:
        before += math.fsum(compute[at:layer])
        at = layer
        loaded += transfer[layer]
        delay = max(delay, loaded - before)
    return delay if delay > ROUNDING * loaded else 0.0


# ---------------------------------------------------------------------------------------------- argument checks


def _real(value: object) -> float:
    """As a float; NaN for a value that is no number."""
    if not hasattr(value, "__float__") or isinstance(value, (bool, str, bytes, type)):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an int that no float holds
        return math.inf


def _time(name: str, value: object, layer: int | None = None) -> float:
    number = _real(value)
    if not 0.0 <= number <= MOST_SECONDS:
        where = "" if layer is None else f" for layer {layer}"
        raise InvalidArgument(
            f"{name} must be seconds, from 0 to {MOST_SECONDS:g}, got {shown(value)}{where}; nothing changed; correct the "
            "measurement",
            **{name: value, "layer": layer},
        )
    return number


def _times(compute_s: object, transfer_s: object, layers: int | None) -> tuple[list[float], list[float]]:
    """Both arguments as n floats each; a single float stands for every layer."""
    given: dict[str, list[object] | None] = {}
    for name, value in (("compute_s", compute_s), ("transfer_s", transfer_s)):
        try:
            given[name] = list(islice(value, MOST_LAYERS + 1))  # type: ignore[call-overload]
        except TypeError:  # a number, or a zero-dimensional array
            given[name] = None
    wanted = {name: len(values) for name, values in given.items() if values is not None}
    if max(wanted.values(), default=0) > MOST_LAYERS:
        raise InvalidArgument(
            f"there are at most {MOST_LAYERS} layers; nothing changed; give fewer times", most=MOST_LAYERS
        )
    if layers is not None:
        wanted["layers"] = _integer("layers", layers, 1)
    if len(set(wanted.values())) != 1 or 0 in wanted.values():
        raise InvalidArgument(
            "one number of layers >= 1 must follow from compute_s, transfer_s and layers, "
            f"got {wanted or 'none of them'}; nothing changed; give lists of equal length, or layers=",
            **wanted,
        )
    n = next(iter(wanted.values()))
    result = []
    for name, value in (("compute_s", compute_s), ("transfer_s", transfer_s)):
        values = given[name]
        if values is None:
            result.append([_time(name, value)] * n)
        else:
            result.append([_time(name, item, layer) for layer, item in enumerate(values)])
    return result[0], result[1]


def _streamed(streamed: Iterable[int], layers: int | None) -> tuple[int, ...]:
    """Distinct layer indices in layer order."""
    if not isinstance(streamed, Iterable) or isinstance(streamed, (str, bytes, Mapping)):
        raise InvalidArgument(
            f"streamed must be an iterable of layers, got {shown(streamed)}; nothing changed; correct it",
            streamed=streamed,
        )
    chosen = tuple(sorted(_integer("streamed", layer, 0) for layer in islice(streamed, MOST_LAYERS + 1)))
    for layer, following in pairwise(chosen):
        if layer == following:
            raise InvalidArgument(
                f"streamed layers must be distinct, layer {layer} is named twice; nothing changed; name it once",
                layer=layer,
                streamed=chosen,
            )
    if layers is not None and chosen and chosen[-1] >= layers:
        raise InvalidArgument(
            f"streamed layers must be below {layers}, got {chosen[-1]}; nothing changed; layers count from 0",
            layer=chosen[-1],
            layers=layers,
        )
    return chosen


def _integer(name: str, value: object, least: int | None) -> int:
    """A count of layers or buffers, or with least=None any integer."""
    number = None
    if hasattr(value, "__index__") and not isinstance(value, (bool, type)):
        number = operator.index(value)
    if number is None or (least is not None and not least <= number <= MOST_LAYERS):
        expected = "an integer" if least is None else f"an integer from {least} to {MOST_LAYERS}"
        raise InvalidArgument(
            f"{name} must be {expected}, got {shown(value)}; nothing changed; correct it", **{name: value}
        )
    return number


def _mode(slots: object) -> Slots:
    if slots == "fixed" or slots == "rotating":
        return slots
    raise InvalidArgument(
        f'slots must be "fixed" or "rotating", got {shown(slots)}; nothing changed; pick one', slots=slots
    )
