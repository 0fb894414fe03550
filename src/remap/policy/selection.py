"""Which layers to stream, how many, and what that costs: pure mathematics on top of `remap.schedule`.

Whole layers: `select` picks m = remapped + buffers of the streamable ones, in one of several ways. Slices: every layer
streams its last pages. `options` weighs all ways of freeing so much against each other; `inactive_cap` says how much a
tenant may lend while it does not run, `marginal_stall` what the next byte of a running one costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from remap.errors import InvalidArgument
from remap.policy import schedule
from remap.policy.inactive import inactive_cap, suffix_delay
from remap.policy.schedule import RELATIVE_EPSILON, _integer, _is_real, _streamed, _times
from remap.policy.search import Problem, Walks, best_double, best_single
from remap.policy.slices import (
    allowed,
    slices_freed,
    slices_max_alpha,
    slices_period,
    slices_share,
    slices_tail,
    tail_shares,
)

if TYPE_CHECKING:
    from remap.policy.controller import LayerSeconds

__all__ = [
    "KINDS",
    "Kind",
    "Option",
    "changed_layers",
    "churn",
    "freed_bytes",
    "inactive_cap",
    "marginal_stall",
    "most_remapped",
    "options",
    "select",
    "slices_freed",
    "slices_max_alpha",
    "slices_period",
    "slices_share",
    "slices_tail",
    "suffix_delay",
    "tail_shares",
]

Kind = Literal["uniform", "uniform_fixed", "nested", "onward", "suffix", "best", "auto"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_JUDGED = ("nested", "onward", "uniform", "uniform_fixed")  # what "auto" tries first: preferred in this order on a tie


# ---------------------------------------------------------------------------------------------- whole layers


def select(
    kind: Kind,
    order: Sequence[int],
    remapped: int,
    buffers: int,
    *,
    times: LayerSeconds | None = None,
    present: Iterable[int] = (),
) -> tuple[int, ...]:
    """The layers to stream, ascending: remapped + buffers distinct ones of `order`, or () for `remapped == 0`.

    order: the streamable layers (pinned ones are left out) in the nested order. times: seconds to compute and to copy in
    each of the n layers, needed for "best" and "auto". present: the layers streamed now; those not in `order` are ignored.

    * "uniform", "uniform_fixed": even among the streamable layers, see `schedule` (Oneiros section 5.2).
    * "nested": the first of `order`: a larger set contains every smaller one.
    * "onward": what is present, whichever that is, and the first others of `order`. Growing swaps no layer out; for fewer
      layers than are present, the last of `order` leave.
    * "suffix": the last layers of the model, for a tenant that does not run: see `inactive_cap`.
    * "best": the shortest pass. One buffer, or one layer remapped: the exact optimum for any layer times. More: the best of
      a search from several starts, at most `_selection_search.EVALUATIONS` exact periods, never worse than "nested",
      "uniform" and "uniform_fixed". Optima that differ by less than `schedule.RELATIVE_EPSILON` of a pass: the layers that
      are present, then those early in `order`. Source: derived.
    * "auto": the shortest pass among "nested", "onward" (if any layer is present), "uniform", "uniform_fixed", and "best"
      where none of these is proven optimal. On a tie the one that changes fewest layers (`churn`), then in this order.

    Raises InvalidArgument (field: kind; order, layer; remapped, buffers, streamable; times, layers) for an unknown kind, a
    layer named twice or negative, remapped + buffers > len(order), remapped < 0, buffers < 1, and times that are missing
    or have too few layers.
    """
    if kind not in KINDS:
        raise _unknown(kind)
    layers = _streamed(order, None)
    remapped = _integer("remapped", remapped, 0)
    buffers = _integer("buffers", buffers, 1)
    if remapped == 0:
        return ()
    present = frozenset(present)
    m = remapped + buffers
    if m > len(layers):
        raise InvalidArgument(
            f"remapped + buffers must be at most the number of streamable layers: {remapped} + {buffers} > {len(layers)}; "
            "nothing changed; remap fewer layers or use fewer buffers",
            remapped=remapped,
            buffers=buffers,
            streamable=len(layers),
        )
    if kind in ("best", "auto"):
        compute, transfer = _measured(times, layers[-1])
        if m == len(layers):
            return layers
        problem = Problem(compute, transfer, layers, m, buffers, _bias(order, len(compute), present))
        return _search(kind, problem, order, present)
    return _plain(kind, order, layers, m, buffers, present)


def most_remapped(
    kind: Kind,
    order: Sequence[int],
    times: LayerSeconds,
    *,
    buffers: Literal["auto"] | int = "auto",
    slowdown: float = 0.0,
    present: Iterable[int] = (),
) -> tuple[int, int]:
    """(alpha, beta): the most layers that `select` of this kind streams within (1 + slowdown) * sum(compute).

    `schedule.max_remapped` for any kind and with layers left out: the same ties, relaxation and (0, 1) for nothing. Cheap
    lower bounds settle most numbers, so "best" and "auto" are searched for only where the answer is close.
    Raises InvalidArgument as `select` does, and (field: slowdown).
    """
    if kind not in KINDS:
        raise _unknown(kind)
    present = frozenset(present)
    layers = _streamed(order, None)
    compute, transfer = _measured(times, layers[-1] if layers else 0)
    limit = allowed(compute, slowdown)
    best = (0, 1)
    bias = _bias(order, len(compute), present)
    for beta in (1, 2) if buffers == "auto" else (_integer("buffers", buffers, 1),):
        walks = Walks(
            compute, transfer, layers, beta, bias, best[0] + beta + 1
        )  # one dynamic programme for all numbers
        for alpha in range(len(layers) - beta, best[0], -1):
            problem = Problem(compute, transfer, layers, alpha + beta, beta, bias, walks)
            if problem.least() > limit:
                continue
            if kind in ("best", "auto"):
                chosen = _search(kind, problem, order, present)
            else:
                chosen = _plain(kind, order, layers, alpha + beta, beta, present)
            if schedule.period(compute, transfer, chosen, beta) <= limit:
                best = (alpha, beta)
                break
    return best


def changed_layers(before: Iterable[int], after: Iterable[int]) -> tuple[int, int]:
    """(layers that have to be loaded back, layers that are streamed anew) when `after` replaces `before`."""
    old, new = set(before), set(after)
    return len(old - new), len(new - old)


def churn(before: Iterable[int], after: Iterable[int]) -> int:
    """Layers that change: `changed_layers` together. Among sets of one size the least churn reloads the fewest layers."""
    return sum(changed_layers(before, after))


def _unknown(kind: str) -> InvalidArgument:
    return InvalidArgument(f"kind must be one of {KINDS}, got {kind!r}; nothing changed; pick one", kind=kind)


def _plain(
    kind: str, order: Sequence[int], layers: tuple[int, ...], m: int, buffers: int, present: frozenset[int]
) -> tuple[int, ...]:
    if kind == "nested":
        return tuple(sorted(order[:m]))
    if kind == "onward":
        return tuple(sorted(_onward(order, m, present)))
    if kind == "suffix":
        return layers[-m:]
    even = schedule.uniform if kind == "uniform" else schedule.uniform_fixed
    return tuple(layers[index] for index in even(len(layers), m - buffers, buffers))


def _onward(order: Sequence[int], m: int, present: frozenset[int]) -> list[int]:
    return sorted(order, key=lambda layer: layer not in present)[:m]  # sorting is stable: each half stays in order


def _measured(times: LayerSeconds | None, last: int) -> tuple[list[float], list[float]]:
    if times is None:
        raise InvalidArgument(
            'times are needed for "best" and "auto", got None; nothing changed; measure a pass, or choose "nested"',
            times=None,
        )
    compute, transfer = _times(times.compute_s, times.transfer_s, None)
    if last >= len(compute):
        raise InvalidArgument(
            f"times of {len(compute)} layers do not reach layer {last} of the order; nothing changed; give all layers' times",
            times=times,
            layers=len(compute),
            layer=last,
        )
    return compute, transfer


def _bias(order: Sequence[int], layers: int, present: frozenset[int]) -> list[float]:
    """How unwelcome each layer is, lexicographic in one number: not being present weighs more than all ranks together."""
    bias = [0.0] * layers
    for rank, layer in enumerate(order):
        bias[layer] = 0.5 * (layer not in present) + 0.5 * rank / (len(order) * (len(order) + 1))
    return bias


def _search(kind: str, problem: Problem, order: Sequence[int], present: frozenset[int]) -> tuple[int, ...]:
    layers = tuple(problem.layers)
    known = [
        _plain(name, order, layers, problem.m, problem.buffers, present)
        for name in _JUDGED
        if name != "onward" or present
    ]
    if kind == "best":
        known.sort(key=lambda streamed: churn(present, streamed))  # the first of equals stays
        return best_single(problem) if problem.buffers == 1 else best_double(problem, known)
    tie = RELATIVE_EPSILON * problem.total
    judged = [(problem.period(streamed), streamed) for streamed in known]
    if min(judged)[0] > problem.least() + tie:
        streamed = best_single(problem) if problem.buffers == 1 else best_double(problem, known)
        judged.append((problem.period(streamed), streamed))
    limit = min(judged)[0] + tie
    return min(
        (streamed for period, streamed in judged if period <= limit), key=lambda streamed: churn(present, streamed)
    )


# ---------------------------------------------------------------------------------------------- what to choose


@dataclass(frozen=True)
class Option:
    """One way of freeing pages, and what it costs in every pass.

    kind: as for `select`, or "slices". streamed: the layers that copy something in, ascending. tail_pages: the last pages
    of each of them that are streamed; None for whole layers. remapped: what is freed, in layers' worth (the largest
    layer's pages); freed_bytes: the same in bytes of pages. period_s, stall_s: seconds a pass, exact. traffic_bytes:
    copied in a pass. churn: layers' worth that changes hands on the way there.
    """

    kind: str
    streamed: tuple[int, ...]
    tail_pages: int | None
    buffers: int
    remapped: float
    freed_bytes: int
    period_s: float
    stall_s: float
    traffic_bytes: int
    churn: float


def options(
    times: LayerSeconds,
    layer_bytes: Sequence[int],
    order: Sequence[int],
    remapped: float,
    *,
    buffers: Literal["auto"] | int = "auto",
    kinds: Iterable[str] = ("nested", "onward", "uniform", "uniform_fixed", "best", "slices"),
    present: Iterable[int] = (),
    present_share: float = 1.0,
    page_bytes: int = 1,
) -> tuple[Option, ...]:
    """Every candidate way of freeing at least `remapped` layers' worth, best first: by (stall, traffic, churn).

    times, order: as for `select`. layer_bytes: bytes of each of the n layers; they own whole pages of page_bytes. A layer's
    worth is the largest layer's pages, which is also what a ring buffer for whole layers takes; layers that are smaller
    give less, so that more of them may be needed. buffers: "auto" tries 1 and 2. present: layers streamed now, of each of
    which present_share is streamed (1: whole layers). A kind that cannot free as much is left out: () if none can.
    `remapped == 0` gives the one option that streams nothing.

    Stalls that differ by less than `schedule.RELATIVE_EPSILON` of a pass are the same. Raises InvalidArgument as `select`
    does, and (fields: remapped; layer_bytes; kind; present_share) for the others.
    """
    layers = _streamed(order, None)
    compute, transfer = _measured(times, layers[-1] if layers else 0)
    if not (_is_real(remapped) and 0.0 <= remapped < math.inf):
        raise InvalidArgument(
            f"remapped must be a finite number of layers >= 0, got {remapped!r}; nothing changed; correct it",
            remapped=remapped,
        )
    if not (_is_real(present_share) and 0.0 <= present_share <= 1.0):
        raise InvalidArgument(
            f"present_share must be from 0 to 1, got {present_share!r}; nothing changed; correct it",
            present_share=present_share,
        )
    page = _integer("page_bytes", page_bytes, 1)
    pages = [-(-size // page) for size in _sizes(layer_bytes, len(compute))]
    unit = max(pages)
    before = dict.fromkeys(present, float(present_share))
    total = math.fsum(compute)

    def option(kind: str, streamed: tuple[int, ...], beta: int, tail: int | None) -> Option:
        used = pages if tail is None else [min(tail, each) for each in pages]
        shares = tail_shares(unit if tail is None else tail, pages)
        period = slices_period(compute, transfer, shares, beta, streamed)
        copied = schedule.SlotAssignment.of(streamed, beta).copied
        freed = (
            max(0, sum(used[layer] for layer in streamed) - beta * (unit if tail is None else tail)) if streamed else 0
        )
        after = {layer: shares[layer] for layer in streamed}
        moved = math.fsum(abs(after.get(layer, 0.0) - before.get(layer, 0.0)) for layer in {*before, *after})
        traffic = sum(min(used[layer] * page, layer_bytes[layer]) for layer in copied)
        worth = freed / unit if unit else 0.0
        return Option(kind, streamed, tail, beta, worth, freed * page, period, period - total, traffic, moved)

    if remapped == 0:
        return (option("nested", (), 1, None),)
    found: dict[tuple[tuple[int, ...], int, int | None], Option] = {}
    wanted = remapped * unit * (1.0 - RELATIVE_EPSILON)
    largest = sorted((pages[layer] for layer in layers), reverse=True)
    present = tuple(before)
    for beta in (1, 2) if buffers == "auto" else (_integer("buffers", buffers, 1),):
        for kind in kinds:
            if kind == "slices":
                if len(layers) > beta:
                    try:
                        tail = slices_tail(remapped, pages, beta, layers)
                    except InvalidArgument:
                        continue
                    found.setdefault((layers, beta, tail), option(kind, layers, beta, tail))
                continue
            for alpha in range(max(1, math.ceil(remapped * (1.0 - RELATIVE_EPSILON))), len(layers) - beta + 1):
                if sum(largest[: alpha + beta]) - beta * unit < wanted:
                    continue  # not even the largest layers would do
                chosen = select(cast(Kind, kind), order, alpha, beta, times=times, present=present)
                if sum(pages[layer] for layer in chosen) - beta * unit >= wanted:
                    found.setdefault((chosen, beta, None), option(kind, chosen, beta, None))
                    break
    tie = RELATIVE_EPSILON * (total or max((option.period_s for option in found.values()), default=0.0)) or 1.0
    return tuple(sorted(found.values(), key=lambda it: (round(it.stall_s / tie), it.traffic_bytes, it.churn)))


def freed_bytes(layer_bytes: Sequence[int], streamed: Iterable[int], buffers: int) -> int:
    """Bytes that streaming these whole layers frees: theirs, less `buffers` ring buffers of the largest layer's. At least 0.

    Raises InvalidArgument (fields: layer_bytes; layer; buffers).
    """
    sizes = _sizes(layer_bytes, None)
    chosen = _streamed(streamed, len(sizes))
    buffers = _integer("buffers", buffers, 1)
    return max(0, sum(sizes[layer] for layer in chosen) - buffers * max(sizes))


def marginal_stall(
    times: LayerSeconds,
    layer_bytes: Sequence[int],
    now: Iterable[int],
    after: Iterable[int],
    *,
    buffers: int,
    buffers_now: int | None = None,
) -> float:
    """Seconds of stall a pass that each further byte costs when `after` is streamed instead of `now`: ranks running donors.

    buffers: ring buffers after; buffers_now: before, by default the same. Negative where the larger set waits for less, as
    an even number of layers may with two fixed slots. Raises InvalidArgument as `schedule.stall` does, and (fields:
    freed_before, freed_after) unless `after` frees more.
    """
    now, after = tuple(now), tuple(after)
    before = buffers if buffers_now is None else buffers_now
    was, becomes = freed_bytes(layer_bytes, now, before), freed_bytes(layer_bytes, after, buffers)
    if becomes <= was:
        raise InvalidArgument(
            f"the layers after have to free more than those now: {becomes} bytes against {was}; nothing changed; add layers",
            freed_before=was,
            freed_after=becomes,
        )
    compute, transfer = times.compute_s, times.transfer_s
    longer = schedule.stall(compute, transfer, after, buffers) - schedule.stall(compute, transfer, now, before)
    return longer / (becomes - was)


def _sizes(layer_bytes: Sequence[int], layers: int | None) -> list[int]:
    sizes = [_integer("layer_bytes", size, 0) for size in layer_bytes]
    if not sizes or (layers is not None and len(sizes) != layers):
        raise InvalidArgument(
            f"layer_bytes must hold the bytes of each of {layers or 'the'} layers, got {len(sizes)}; nothing changed; give all",
            layer_bytes=sizes,
            layers=layers,
        )
    return sizes
