# SPDX-License-Identifier: Apache-2.0
"""The advice that follows from a plan's numbers: whether to stream active layers, what to set, and the arithmetic behind each.
Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remap.config import Knobs
from remap.model.footprint import DEVICE_PAGE_SIZES, DEVICE_WASTE, Footprint
from remap.policy.hardware import Model
from remap.sizes import show_size

from .planning_numbers import IdleDonor, Numbers
from .roofline import Roofline, prefill_pairs

__all__ = ["Advice", "Setting", "Step", "advise", "arithmetic"]

WORTH_IT = 1.1
"""Streaming active layers is called worth it from so much more throughput on: below, it is about the error of the roofline."""
SHORT_RELOAD_S = 0.1
"""A model that is back within this is lent as soon as it has been idle for one reload."""


@dataclass(frozen=True)
class Step:
    """One number: its meaning, its formula, and the formula with the numbers put in, the result last."""

    what: str
    formula: str
    numbers: str
    value: float
    unit: str


@dataclass(frozen=True)
class Setting:
    """One field of `Knobs`, and why."""

    name: str
    value: float | int | str
    reason: str

    @property
    def variable(self) -> str:
        """The text from which engines' adapters read it."""
        return f"REMAP_{self.name.upper()}"


@dataclass(frozen=True)
class Advice:
    """active: whether streaming layers of a model that runs pays here; donors: whether lending those of idle ones does.
    why: in sentences. settings: for Knobs; others keep their defaults."""

    active: bool
    donors: bool
    why: tuple[str, ...]
    settings: tuple[Setting, ...]

    def config(self) -> Knobs:
        """The settings as the controller takes them."""
        values: dict[str, Any] = {setting.name: setting.value for setting in self.settings}
        return Knobs(**values)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.0f} GB/s" if rate >= 1e10 else f"{rate / 1e9:.1f} GB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _times(speedup: float) -> str:
    return f"{speedup:.2f}x tokens/s" if speedup < math.inf else "instead of no request at all"


def _pages(model: Model) -> Step:
    size = Footprint((model.layer_bytes,) * model.layers, model.weight_bytes - model.layers * model.layer_bytes)
    page = size.page_size("cuda")
    lost = f"{size.waste(page):.1%} of the weights lost in rounding"
    return Step(
        "pages of a layer: mappings that re-pointing it makes",
        f"bytes of a layer / page_bytes, the largest power of two up to {show_size(DEVICE_PAGE_SIZES[0])} that loses at most "
        f"{DEVICE_WASTE:.0%}",
        f"{model.layer_bytes / 1e6:.1f} MB / {show_size(page)} = {-(-model.layer_bytes // page)} pages, {lost} "
        f"(of 2 MiB: {-(-model.layer_bytes // 2**21)}, {size.waste(2**21):.1%})",
        page,
        "bytes a page",
    )


def arithmetic(numbers: Numbers) -> tuple[Step, ...]:
    """Each number of the plan, with its formula and its inputs."""
    machine, model, balance, reload = numbers.machine, numbers.model, numbers.balance, numbers.reload
    memory_bytes, activation_bytes, most = numbers.memory_bytes, numbers.activation_bytes, numbers.max_requests
    context, kv_tokens, tokens_per_layer = numbers.context, numbers.kv_tokens, numbers.tokens_per_layer
    n, copy_s = model.layers, machine.copy_s(model.layer_bytes)
    roof = Roofline(machine, model)
    share = (memory_bytes - activation_bytes - model.weight_bytes) / model.weight_bytes
    rows = max(1, balance.rows)
    layer_s = roof.layer_s(0, 0, rows, rows * context)
    closed = n * (1 + share) / machine.ratio - 2
    steps = [
        Step(
            "KV cache without remapping",
            "(memory - weights - activations) / KV bytes per token",
            f"({_gb(memory_bytes)} - {_gb(model.weight_bytes)} - {_gb(activation_bytes)}) / "
            f"{model.kv_bytes_per_token:,} B = {kv_tokens:,} tokens",
            kv_tokens,
            "tokens",
        ),
        Step(
            "KV cache for one remapped layer",
            "bytes of a layer / KV bytes per token",
            f"{model.layer_bytes / 1e6:.1f} MB / {model.kv_bytes_per_token:,} B = {tokens_per_layer:,.1f} tokens",
            tokens_per_layer,
            "tokens",
        ),
        _pages(model),
        Step(
            "ratio R of memory to link",
            "memory bandwidth / host-to-device bandwidth",
            f"{_rate(machine.hbm_bytes_per_s)} / {_rate(machine.h2d_bytes_per_s)} = {machine.ratio:.1f}",
            machine.ratio,
            "",
        ),
        Step(
            "copying in one layer",
            "set-up + bytes of a layer / link",
            f"{machine.copy_setup_s * 1e6:.3g} us + {model.layer_bytes / 1e6:.1f} MB / {_rate(machine.h2d_bytes_per_s)} "
            f"= {_ms(copy_s)}",
            copy_s,
            "s",
        ),
        Step(
            f"computing one layer, {rows} requests decoding at {context} tokens",
            "roofline: linear + other operators + attention",
            f"{_ms(layer_s)}; a pass of {n} layers {_ms(n * layer_s)}",
            layer_s,
            "s",
        ),
        Step(
            "rule of thumb: layers hidden with all memory in use",
            "n (1 + KV bytes / weight bytes) / R - 2",
            f"{n} x (1 + {share:.2f}) / {machine.ratio:.1f} - 2 = {closed:.1f}",
            closed,
            "layers",
        ),
        Step(
            "layers hidden by that pass, as Eq. 5 of Oneiros has it",
            "n x computing / copying - 2",
            f"{n} x {_ms(layer_s)} / {_ms(copy_s)} - 2 = {n * layer_s / copy_s - 2:.1f}",
            n * layer_s / copy_s - 2,
            "layers",
        ),
        Step(
            "KV cache with the layers that a full batch hides",
            "KV tokens + layers x tokens per layer",
            f"{kv_tokens:,} + {balance.remapped} x {tokens_per_layer:,.1f} = {balance.kv_tokens:,} tokens, "
            f"{balance.rows} requests of {context} instead of {balance.rows_before}"
            + (f" (at most {most} at once: --max-num-seqs)" if balance.rows == most else ""),
            balance.kv_tokens,
            "tokens",
        ),
        Step(
            "loading the whole model back",
            "n x copying",
            f"{n} x {_ms(copy_s)} = {_ms(reload.all_s)}",
            reload.all_s,
            "s",
        ),
    ]
    for tokens, hidden in reload.hidden:
        prefill_s = roof.layer_s(tokens, prefill_pairs(tokens), 0, 0)
        steps.append(
            Step(
                f"layers whose reload a prefill of {tokens} tokens hides",
                "the last ones and the ring's: (away + 1) x copying <= (n - 1) x computing",
                f"{n - 1} x {_ms(prefill_s)} / {_ms(copy_s)} - 1 = {(n - 1) * prefill_s / copy_s - 1:.1f}: {hidden}",
                hidden,
                "layers",
            )
        )
    for donor in numbers.donors:
        size = donor.layers_half * donor.tokens_half and donor.tokens_half / donor.layers_half
        steps.append(
            Step(
                f"KV cache from half of {donor.model}, idle",
                "layers x bytes of its layer / KV bytes per token of the taker",
                f"{donor.layers_half} x {size:,.1f} = {donor.tokens_half:,} tokens",
                donor.tokens_half,
                "tokens",
            )
        )
    return tuple(steps)


def advise(numbers: Numbers, page_bytes: int) -> Advice:
    """The verdict and the settings. page_bytes: of the arena, for what mapping costs."""
    model, balance, donors = numbers.model, numbers.balance, numbers.donors
    sliced = balance.slices_speedup > balance.speedup + 1e-9
    gain = max(balance.speedup, balance.slices_speedup)
    full = balance.rows_before >= numbers.max_requests
    active = gain >= WORTH_IT and not full
    lendable = bool(donors) and any(donor.tokens_half for donor in donors)
    why = [_why_active(numbers, active=active, full=full)]
    if model.experts > 1:
        why.append(
            f"A layer of {model.name} holds {model.experts} experts ({_gb(model.layer_bytes)}): whole layers are a coarse "
            "unit here."
        )
    why.append(_why_donors(donors))
    return Advice(
        active=active,
        donors=lendable or not donors,
        why=tuple(why),
        settings=_settings(numbers, active=active, sliced=sliced, page_bytes=page_bytes),
    )


def _why_active(numbers: Numbers, *, active: bool, full: bool) -> str:
    """One verdict, and what could be hidden as its reason: both on one page without it would contradict each other."""
    machine, model, balance = numbers.machine, numbers.model, numbers.balance
    hidden = []
    if balance.remapped:
        hidden.append(f"{balance.remapped} whole layers ({balance.rows} requests, {_times(balance.speedup)})")
    if balance.slices:
        hidden.append(
            f"{balance.slices:.3g} layers' worth in slices ({balance.slices_rows} requests, {_times(balance.slices_speedup)})"
        )
    could = " or ".join(hidden)
    limited = numbers.max_requests in (balance.rows_before, balance.rows, balance.slices_rows)
    limit = f" --max-num-seqs {numbers.max_requests} was the limit: that many run at once at most." if limited else ""
    if full:
        most = max(float(balance.remapped), balance.slices)
        useless = f"; the {most:.3g} layers' worth that a pass could hide would serve no request" if most else ""
        return (
            f"Do not stream active layers: at {numbers.context} tokens the KV cache holds the {balance.rows_before} requests "
            f"that run at once without it{useless}.{limit}"
        )
    if active:
        return (
            f"Stream active layers: with the cache full, of {model.layers} layers a pass hides {could}, instead of "
            f"{balance.rows_before} requests.{limit}"
        )
    tail = ""
    worse = next((each for each in numbers.what_if if each.remapped == 2), None)
    if worse is not None and worse.speedup < 1:
        tail = (
            f" Two layers all the same would take an iteration from {_ms(numbers.what_if[0].iteration_s)} to "
            f"{_ms(worse.iteration_s)}, {_times(worse.speedup)}."
        )
    found = (
        f"a full batch could hide {could}, but below {WORTH_IT:g}x the gain is within the error of this plan"
        if hidden
        else "a full batch hides none"
    )
    return (
        f"Do not stream active layers: {found}. R is {machine.ratio:.0f}: while a decode pass reads all weights once, the link "
        f"brings 1/{machine.ratio:.0f} of them.{tail}{limit}"
    )


def _why_donors(donors: Sequence[IdleDonor]) -> str:
    if not donors:
        return (
            "Idle models on the same machine would be the donors (name them to see what they give): they cost only their "
            "reload."
        )
    total = sum(donor.tokens_half for donor in donors)
    worst = max((donor.reload for donor in donors), key=lambda each: each.all_s)
    late = max(each.reload.late_s[0][1] for each in donors)
    return (
        f"Half of the idle donors' layers give {total:,} tokens of KV cache. Waking costs at most {_ms(worst.all_s)} of copying "
        f"({worst.model}, all of it); with half of it away its first prefill of {worst.hidden[0][0]} tokens is late by up to "
        f"{_ms(late)}."
    )


def _settings(numbers: Numbers, *, active: bool, sliced: bool, page_bytes: int) -> tuple[Setting, ...]:
    machine, model, balance = numbers.machine, numbers.model, numbers.balance
    pages = -(-model.layer_bytes // page_bytes)
    map_s = pages * (machine.map_page_s + machine.unmap_page_s) + machine.set_access_s
    share = machine.h2d_bytes_per_s / (machine.hbm_bytes_per_s * machine.roofline.eff_bw)
    found = [
        Setting(
            "contention",
            round(share, 4),
            f"a copy takes {_rate(machine.h2d_bytes_per_s)} of the {_rate(machine.hbm_bytes_per_s)} x "
            f"{machine.roofline.eff_bw:g} that the computation reaches",
        ),
        Setting(
            "map_s",
            round(map_s, 6),
            f"{pages} pages x ({machine.map_page_s * 1e6:.3g} + {machine.unmap_page_s * 1e6:.3g}) us + "
            f"{machine.set_access_s * 1e6:.3g} us for access: one layer",
        ),
    ]
    if active:
        unit = "slices" if sliced else "nested" if balance.selection == "nested" else "auto"
        reason = (
            f"{balance.slices:.3g} layers' worth in slices against {balance.remapped} whole layers"
            if sliced
            else f"whole layers are enough: {balance.remapped}"
            + (", and growing along the nested order reloads the least" if unit == "nested" else ", evenly spaced")
        )
        found += [
            Setting("slowdown", 0.02, "2 % of stall at most: less than the model of the machine is off by"),
            Setting("selection", unit, reason),
            Setting("buffers", 2 if sliced else "auto", "slices need two slots" if sliced else "whichever hides more"),
        ]
    else:
        found.append(
            Setting("slowdown", 0.0, "no stall is worth it: growth of a running model then comes from donors, or waits")
        )
    givers = [donor.reload for donor in numbers.donors] or [numbers.reload]
    slowest = max(each.all_s for each in givers)
    late = max(each.late_s[0][1] for each in givers)
    quick = slowest <= SHORT_RELOAD_S
    found += [
        Setting(
            "reload_s",
            round(late, 3) if late > 0 else 0.0,
            "by so much a first prefill of 512 tokens is late if half of the donor's layers are away; less lends fewer",
        ),
        Setting(
            "min_idle",
            1.0 if quick else 4.0,
            f"a reload takes up to {_ms(slowest)}: "
            + (
                "short, so one reload's time of idleness is enough"
                if quick
                else "so that reloading takes at most a fifth of a pause and its end"
            ),
        ),
    ]
    if len(numbers.donors) > 1:
        found.append(
            Setting("policy", "expected_next_use", "several donors: first the one whose next use is farthest away")
        )
    return tuple(found)
