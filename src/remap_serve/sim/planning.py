# SPDX-License-Identifier: Apache-2.0
"""The effect of remapping on a machine for a model, before anything is installed: `remap plan`. Pure.

    found = plan(machine("GH200"), model("OPT-13b"), memory_bytes=35_918_813_593, context=512)
    found.balance.remapped, found.balance.rows        # 6 layers, 32 requests at once instead of 23

Layer times come from the roofline, copies from the machine's link, what can be hidden from `remap.schedule` and
`remap.policy.slices`: the controller's own functions, here of computed times instead of measured ones. Not in it: queueing,
and that a running copy takes memory bandwidth from the computation (`contention`, which the settings name).

Of several devices under tensor parallelism (tp) the plan is one device's: its share of the model, its memory, its link.

The batch and the layers that it hides depend on each other: more layers remapped make room for more requests, whose pass is
longer and hides more. `Balance` is the largest number of layers that the batch which it makes possible still hides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from remap.errors import InvalidArgument
from remap.policy import schedule
from remap.policy.hardware import Machine, Model
from remap.policy.hidden import lateness, most_hidden, most_lent
from remap.policy.slices import slices_freed

from .model_variants import sharded
from .planning_advice import Advice, Step, advise, arithmetic
from .planning_checks import assumptions, check_fit, donated, memory_beside, memory_of, short
from .planning_numbers import KINDS, Balance, IdleDonor, Limit, Numbers, Reload, Selection, WhatIf
from .roofline import Roofline, prefill_pairs

__all__ = [
    "ACTIVATION_BYTES",
    "MAX_REQUESTS",
    "PAGE_BYTES",
    "Balance",
    "IdleDonor",
    "Limit",
    "MachinePlan",
    "Numbers",
    "Reload",
    "WhatIf",
    "balance",
    "kv_tokens",
    "limit",
    "memory_of",
    "plan",
]

ACTIVATION_BYTES = 500_000_000
"""Left out of the KV cache for activations and the engine's own buffers: an assumption."""
PAGE_BYTES = 2 << 20
MAX_REQUESTS = 256
"""Requests at once, at most, unless it is said otherwise (max_requests)."""
BATCHES = (1, 4, 16, 64, 128, 256)
PREFILLS = (512, 2048)
WHAT_IF = (0, 2, 4, 8, 15)


@dataclass(frozen=True)
class MachinePlan(Numbers):
    """The answer. steps: each number with its formula and its inputs. advice: whether streaming active layers pays here,
    and which settings follow, each with its reason. assumed: the plan's assumptions, in sentences."""

    steps: tuple[Step, ...]
    advice: Advice
    assumed: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """The settings for an engine's adapter (`remap.adapters.settings` reads it): the advice, on one device.

        With donors it is one block for all models: they share an arena, whose capacity is the same whichever of them is
        planned for.
        """
        shared = {"REMAP_ARENA": "shared"} if self.donors else {}
        beside = sum(donor.weight_bytes for donor in self.donors)
        return {
            "REMAP_ENABLE": "1",
            **shared,
            "REMAP_CAPACITY": str(self.memory_bytes + beside - self.activation_bytes),
            "REMAP_LINK": str(int(self.machine.h2d_bytes_per_s)),
            **{setting.variable: str(setting.value) for setting in self.advice.settings},
        }

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a number that is not finite (a speed-up from nothing) is None."""
        found: dict[str, Any] = _finite(asdict(self))
        return {**found, "environment": self.environment()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def kv_tokens(model: Model, memory_bytes: int, activation_bytes: int = ACTIVATION_BYTES) -> int:
    """Tokens of KV cache beside the weights; 0 if the weights leave no room."""
    return max(0, (memory_bytes - model.weight_bytes - activation_bytes) // model.kv_bytes_per_token)


# ---------------------------------------------------------------------------------------------- what a pass hides


def limit(roof: Roofline, rows: int, context: int, kv_tokens: int | None = None) -> Limit:
    """The layers that a decode pass hides. kv_tokens: of the KV cache without remapping, for `fits`; None: it always fits."""
    machine, model = roof.machine, roof.model
    n = model.layers
    layer_s, copy_s = roof.layer_s(0, 0, rows, rows * context), machine.copy_s(model.layer_bytes)
    remapped, buffers, kind = most_hidden(layer_s, copy_s, layers=n)
    slices = _slices(roof, layer_s)
    paper = max(0, min(n - 2, int(n * layer_s / copy_s * (1 + schedule.RELATIVE_EPSILON)) - 2))
    room = math.inf if kv_tokens is None else kv_tokens + max(remapped, slices) * _per_layer(model)
    return Limit(rows, context, layer_s, copy_s, remapped, buffers, kind, slices, paper, rows * context <= room)


def _per_layer(model: Model) -> float:
    return model.layer_bytes / model.kv_bytes_per_token


def _sliced_s(roof: Roofline, layer_s: float, tail: int) -> float:
    """Seconds of a pass that streams the last `tail` pages of every layer through two slots."""
    n = roof.model.layers
    if tail == 0 or n < 3:
        return n * layer_s
    size = min(tail * PAGE_BYTES, roof.model.layer_bytes)
    return schedule.period(layer_s, roof.machine.copy_s(size), range(n), 2, layers=n)


def _pages(model: Model) -> int:
    return -(-model.layer_bytes // PAGE_BYTES)


def _slices(roof: Roofline, layer_s: float) -> float:
    """The most layers' worth that whole pages of every layer free without a stall. The period grows with the pages."""
    model = roof.model
    bound = model.layers * layer_s * (1 + schedule.RELATIVE_EPSILON)
    low, high = 0, _pages(model)
    while low < high:
        middle = (low + high + 1) // 2
        if _sliced_s(roof, layer_s, middle) <= bound:
            low = middle
        else:
            high = middle - 1
    return max(0, slices_freed(low, [_pages(model)] * model.layers, 2)) / _pages(model)


def _period(roof: Roofline, layer_s: float, remapped: int) -> tuple[float, int, Selection]:
    """(seconds of a pass, buffers, selection): the least that whole layers take. The first that stalls for nothing wins."""
    n = roof.model.layers
    best: tuple[float, int, Selection] = (n * layer_s if remapped == 0 else math.inf, 1, KINDS[0])
    if remapped == 0:
        return best
    copy_s = roof.machine.copy_s(roof.model.layer_bytes)
    for buffers in (1, 2):
        for kind in KINDS:
            if remapped + buffers > n:
                continue
            chosen: Sequence[int] = schedule.uniform(n, remapped, buffers)
            if kind == "nested":
                chosen = schedule.nested(n)[: remapped + buffers]
            seconds = schedule.period(layer_s, copy_s, chosen, buffers, layers=n)
            if seconds < best[0] * (1 - schedule.RELATIVE_EPSILON):
                best = (seconds, buffers, kind)
    return best


def _rows(tokens: float, context: int, most: int) -> int:
    return min(most, int(tokens // context))


def _iteration_s(roof: Roofline, rows: int, pass_s: float) -> float:
    return pass_s + roof.ends_s(rows, rows) + roof.machine.iteration_gap_s


def _rate(roof: Roofline, rows: int, context: int, pass_s: float | None = None) -> float:
    """Tokens per second of `rows` decoding requests; pass_s: of the layers, None: without any waiting."""
    if rows == 0:
        return 0.0
    if pass_s is None:
        pass_s = roof.model.layers * roof.layer_s(0, 0, rows, rows * context)
    return rows / _iteration_s(roof, rows, pass_s)


def _over(rate: float, base: float) -> float:
    return rate / base if base else math.inf if rate else 1.0


def balance(roof: Roofline, kv_tokens: int, context: int, most: int = MAX_REQUESTS) -> Balance:
    """The self-consistent limit with the KV cache full. Exact, fixed slots; see the module's text."""
    model = roof.model
    before = _rows(kv_tokens, context, most)
    base = _rate(roof, before, context)
    remapped, buffers, kind, rows = 0, 1, KINDS[0], before
    copy_s = roof.machine.copy_s(model.layer_bytes)
    for alpha in range(model.layers - 1, 0, -1):
        batch = _rows(kv_tokens + alpha * _per_layer(model), context, most)
        layer_s = roof.layer_s(0, 0, batch, batch * context)
        allowed = model.layers * layer_s * (1 + schedule.RELATIVE_EPSILON)
        if batch == 0 or alpha * copy_s > allowed:  # at least alpha layers are copied in a pass
            continue
        seconds, found, chosen = _period(roof, layer_s, alpha)
        if seconds <= allowed:
            remapped, buffers, kind, rows = alpha, found, chosen, batch
            break
    slices, sliced = _sliced_balance(roof, kv_tokens, context, most)
    return Balance(
        remapped=remapped,
        buffers=buffers,
        selection=kind,
        kv_tokens_before=kv_tokens,
        rows_before=before,
        kv_tokens=int(kv_tokens + remapped * _per_layer(model)),
        rows=rows,
        speedup=_over(_rate(roof, rows, context), base),
        slices=slices,
        slices_rows=sliced,
        slices_speedup=_over(_rate(roof, sliced, context), base),
    )


def _sliced_balance(roof: Roofline, kv_tokens: int, context: int, most: int) -> tuple[float, int]:
    """(layers' worth, rows): the largest tail of every layer that the batch which it makes possible hides. More pages may be
    hidden where fewer are not (a batch grows in whole requests), so all are tried, from the largest that any batch hides."""
    model = roof.model
    pages = _pages(model)
    for tail in range(pages, 0, -1):
        freed = max(0, slices_freed(tail, [pages] * model.layers, 2)) / pages
        rows = _rows(kv_tokens + freed * _per_layer(model), context, most)
        layer_s = roof.layer_s(0, 0, rows, rows * context)
        size = min(tail * PAGE_BYTES, model.layer_bytes)
        allowed = model.layers * layer_s * (1 + schedule.RELATIVE_EPSILON)
        if rows and model.layers * roof.machine.copy_s(size) <= allowed and _sliced_s(roof, layer_s, tail) <= allowed:
            return freed, rows
    return 0.0, _rows(kv_tokens, context, most)


def _what_if(
    roof: Roofline, kv_tokens: int, context: int, counts: Iterable[int], most: int = MAX_REQUESTS
) -> tuple[WhatIf, ...]:
    model = roof.model
    base = _rate(roof, _rows(kv_tokens, context, most), context)
    found = []
    for alpha in sorted({count for count in counts if 0 <= count <= model.layers - 2}):
        rows = _rows(kv_tokens + alpha * _per_layer(model), context, most)
        if rows == 0:
            continue
        layer_s = roof.layer_s(0, 0, rows, rows * context)
        seconds = _period(roof, layer_s, alpha)[0]
        rate = _rate(roof, rows, context, seconds)
        stall_s = max(0.0, seconds - model.layers * layer_s)
        found.append(WhatIf(alpha, rows, _iteration_s(roof, rows, seconds), stall_s, _over(rate, base)))
    return tuple(found)


# ---------------------------------------------------------------------------------------------- waking up


def _reload(machine: Machine, model: Model, prefills: Iterable[int] = PREFILLS) -> Reload:
    roof = Roofline(machine, model)
    n, copy_s = model.layers, machine.copy_s(model.layer_bytes)
    hidden, late = [], []
    for tokens in prefills:
        compute = [roof.layer_s(tokens, prefill_pairs(tokens), 0, 0)] * n
        delays = lateness(compute, copy_s)
        hidden.append((tokens, most_lent(compute, delays)))
        late.append((tokens, delays[n // 2] if n > 2 else 0.0))
    return Reload(model.name, n, copy_s, n * copy_s, tuple(hidden), tuple(late))


def _donor(machine: Machine, giver: Model, taker: Model) -> IdleDonor:
    reload = _reload(machine, giver)
    free, half = reload.hidden[0][1], giver.layers // 2

    def tokens(layers: int) -> int:
        return layers * giver.layer_bytes // taker.kv_bytes_per_token

    return IdleDonor(giver.name, giver.weight_bytes, reload, free, tokens(free), half, tokens(half))


# ---------------------------------------------------------------------------------------------- all of it


def plan(
    machine: Machine,
    model: Model,
    *,
    memory_bytes: int | None = None,
    context: int = 512,
    batch: int | None = None,
    donors: Sequence[Model] = (),
    activation_bytes: int = ACTIVATION_BYTES,
    max_requests: int = MAX_REQUESTS,
    tp: int = 1,
    assumed: Sequence[str] = (),
) -> MachinePlan:
    """The effect of remapping. memory_bytes: of one device, for weights and KV cache; by default what 90 % of it leaves beside
    the donors' weights. context: tokens that a decoding request has on average. batch: one more row of the table. donors: other
    models on the same devices that are idle. max_requests: that run at once. tp: devices that share every layer. assumed: what
    the caller assumed, to be told with the rest.

    Raises InvalidArgument (field): context outside 1 to the model's, batch or max_requests < 1, memory that the device does not
    have or that holds no weights and one token, donors that do not fit beside it, tp that does not divide, a machine whose fit is
    off by more than MOST_MISFIT.
    """
    check_fit(machine)
    for name, value, most in (
        ("context", context, model.context),
        ("batch", batch, 1 << 20),
        ("max_requests", max_requests, 1 << 20),
    ):
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise InvalidArgument(
                f"{name} must be from 1 to {most} for {model.name}, got {short(value)}; nothing was computed; correct {name}",
                field=name,
                value=value,
            )
    whole, model, donors = model, sharded(model, tp), [sharded(donor, tp) for donor in donors]
    memory = memory_beside(machine, donors, memory_bytes)
    tokens = kv_tokens(model, memory, activation_bytes)
    if tokens == 0:
        least = model.weight_bytes + activation_bytes + model.kv_bytes_per_token
        beside = f", beside {donated(donors) / 1e9:.1f} GB of donors" if donors else ""
        share = f" (its share of {tp} devices)" if tp > 1 else ""
        raise InvalidArgument(
            f"{model.name}{share} needs at least {least / 1e9:.1f} GB (weights {model.weight_bytes / 1e9:.1f} GB, activations "
            f"{activation_bytes / 1e9:.1f} GB, one token), memory is {memory / 1e9:.1f} GB of the "
            f"{machine.hbm_bytes / 1e9:.1f} GB of {machine.name}{beside}; nothing was computed; give more memory, more devices "
            "(tp) or another model",
            field="memory",
            value=memory,
            needed=least,
        )
    roof = Roofline(machine, model)
    found = balance(roof, tokens, context, max_requests)
    contexts = sorted({context, min(2048, model.context)})
    batches = sorted({*BATCHES, *([batch] if batch else [])})
    limits = tuple(limit(roof, rows, each, tokens) for each in contexts for rows in batches)
    counts = {*WHAT_IF, found.remapped, model.layers // 2}
    numbers = Numbers(
        machine=machine,
        model=model,
        memory_bytes=memory,
        context=context,
        batch=batch,
        activation_bytes=activation_bytes,
        max_requests=max_requests,
        tp=tp,
        kv_tokens=tokens,
        tokens_per_layer=_per_layer(model),
        limits=limits,
        balance=found,
        what_if=_what_if(roof, tokens, context, counts, max_requests),
        reload=_reload(machine, model),
        donors=tuple(_donor(machine, each, model) for each in donors),
    )
    values = {each.name: getattr(numbers, each.name) for each in fields(numbers)}
    taken = (*assumed, *assumptions(numbers, whole, donors, default_memory=memory_bytes is None))
    return MachinePlan(**values, steps=arithmetic(numbers), advice=advise(numbers, PAGE_BYTES), assumed=taken)
