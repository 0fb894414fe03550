# SPDX-License-Identifier: Apache-2.0
"""A machine's constants from measurements of it: `remap fit`, on what `python -m bench.lab machine` wrote. Pure.

    found = fit(json.load(open("measured.json")), "my-box")
    machine("my-box", extra=found.document())
    found.errors                                         # {"linear": 0.041, ...}: mean absolute relative errors

Linear operators give the bandwidth and the FLOP/s that are reached, the sharpness p of the knee between them, and the time
that an operator takes at least: four parameters within bounds, least squares of the logarithms' errors (scipy). Copies, attention
and the other operators are straight lines through their points, least squares of relative errors. The
nominal bandwidth and FLOP/s are the measured ones, so efficiencies of a fitted machine are shares of that.

A fit that is off by more than MOST_MISFIT in the mean of a group is refused: no plan could be made of it. The table that a fit
writes carries its misfit, and `remap plan` says it; above POOR_MISFIT as a warning.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from remap.errors import Error, InvalidArgument
from remap.policy.hardware import MOST_MISFIT, POOR_MISFIT, Extra, Machine, RooflineConstants, machine
from remap_serve.policy.least_squares import line, minimise

__all__ = ["GROUPS", "MOST_MISFIT", "POOR_MISFIT", "Fit", "Misfit", "fit"]

GROUPS: Mapping[str, tuple[str, ...]] = {
    "linear": ("k", "n", "tokens", "seconds"),
    "h2d": ("bytes", "seconds"),
    "d2h": ("bytes", "seconds"),
    "both_ways": ("bytes", "h2d_seconds", "d2h_seconds"),
    "decode_attention": ("rows", "context", "kv_heads", "head_dim", "seconds"),
    "prefill_attention": ("tokens", "heads", "head_dim", "seconds"),
    "other_ops": ("tokens", "hidden", "seconds"),
}
"""The groups of measurements, each a list of objects with these fields, all of them numbers above 0."""
PAGE_CALLS = ("create_page_s", "map_page_s", "set_access_s", "unmap_page_s")
LEAST_LINEAR = 8
_ASSUMED_LIKE = "H100-SXM"  # what its table assumes is assumed of a machine where it was not measured


class Misfit(Error):
    """No machine of this form is near the measurements. Nothing was written. Fields: group, misfit, limit, errors."""


@dataclass(frozen=True)
class Fit:
    """A fitted machine. entry: as in the table of machines; errors: mean absolute relative error of each group."""

    name: str
    entry: Mapping[str, Any]
    errors: Mapping[str, float]
    points: Mapping[str, int]

    @property
    def poor(self) -> dict[str, float]:
        """The groups that are off by more than POOR_MISFIT, with their errors."""
        return {group: error for group, error in self.errors.items() if error > POOR_MISFIT}

    def document(self) -> dict[str, Any]:
        """The argument of `machine(name, extra=...)`; a file may hold it."""
        return {"machines": {self.name: dict(self.entry)}}


def fit(measurements: Mapping[str, Any], name: str, like: str | None = None, extra: Extra = None) -> Fit:
    """Constants from measurements (see GROUPS; besides: dtype_bytes, memory_bytes, link, and optionally memory_bytes_per_s and
    pages, an object of PAGE_CALLS). like: a known machine, out of `extra` too, that
    gives the unmeasured figures; without one only driver calls, the gap between iterations and duplex may be missing.

    Raises InvalidArgument (field): measurements of another form, fewer than 8 linear operators, a group that is missing while
    no machine is named to take its figures from. Misfit: a group that is off by more than MOST_MISFIT. InvalidState: no scipy.
    """
    if not isinstance(name, str) or not name.strip():
        raise _refuse("name", name, "text that is not empty")
    if not isinstance(measurements, Mapping):
        raise _refuse("measurements", type(measurements).__name__, "an object")
    groups = {group: _points(measurements, group) for group in GROUPS}
    if like is None:
        for group in GROUPS:
            if not groups[group]:
                raise _refuse(group, [], "measured, or a machine must be named to take it from (--like)")
    elif not groups["linear"] or not groups["h2d"]:
        raise _refuse("linear and h2d", [], "measured: nothing else is worth a fit")
    if len(groups["linear"]) < LEAST_LINEAR:
        raise _refuse("linear", len(groups["linear"]), f"at least {LEAST_LINEAR} measurements")
    element = _positive(measurements, "dtype_bytes")
    source = _told(measurements)

    linear = _fit_linear(groups["linear"], element)
    errors = {"linear": _error(groups["linear"], lambda point: linear.seconds(point, element))}
    reached = {"bandwidth": linear.bandwidth, "flops": linear.flops}
    roofline: dict[str, float] = {"p": linear.p, "op_overhead_s": linear.overhead_s}
    figures: dict[str, Any] = {"hbm_bytes": int(_positive(measurements, "memory_bytes"))}

    decode = _decode(groups["decode_attention"], element)
    if decode is not None:
        roofline["attn_decode_overhead_s"], reached["decode"] = decode[0], decode[1]
        errors["decode_attention"] = _error(
            groups["decode_attention"], lambda point: decode[0] + _kv_bytes(point, element) / decode[1]
        )
    prefill = _prefill(groups["prefill_attention"], linear.overhead_s)
    if prefill is not None:
        reached["prefill"] = prefill
        errors["prefill_attention"] = _error(
            groups["prefill_attention"], lambda point: linear.overhead_s + _attention_flop(point) / prefill
        )
    if groups["other_ops"]:
        least, slope = line([(p["tokens"] * p["hidden"] / 1000, p["seconds"]) for p in groups["other_ops"]])
        roofline["other_ops_s"], roofline["other_ops_s_per_token_per_khidden"] = least, slope
        errors["other_ops"] = _error(groups["other_ops"], lambda p: least + slope * p["tokens"] * p["hidden"] / 1000)

    # Nominal: the figures measured apart, unless an operator did better.
    memory = max(reached["bandwidth"], reached.get("decode", 0.0), _optional(measurements, "memory_bytes_per_s"))
    flops = max(reached["flops"], reached.get("prefill", 0.0), _optional(measurements, "flops"))
    figures |= {"hbm_bytes_per_s": memory, "flops": flops}
    roofline |= {"eff_bw": reached["bandwidth"] / memory, "eff_flops": reached["flops"] / flops}
    if "decode" in reached:
        roofline["attn_decode_eff"] = reached["decode"] / memory
    if "prefill" in reached:
        roofline["attn_prefill_eff"] = reached["prefill"] / flops

    figures |= _fit_copies(groups, errors)
    pages = measurements.get("pages", {})
    if not isinstance(pages, Mapping):
        raise _refuse("pages", pages, "an object of seconds")
    figures |= {call: _positive(pages, call) for call in PAGE_CALLS if call in pages}

    base = machine(_ASSUMED_LIKE if like is None else like, extra)
    entry: dict[str, Any] = {"link": str(measurements.get("link") or (base.link if like else "unknown"))}
    entry["figures"] = {key: {"value": value, "grade": "L", "source": source} for key, value in figures.items()}
    missing = [key for key in _taken(like) if key not in figures]
    entry["figures"] |= {key: _from(base, key, assumed=like is None) for key in missing}
    told = f"fitted; {source}"
    lacking = [each.name for each in fields(RooflineConstants) if each.name not in roofline]
    if lacking:
        told += f"; {', '.join(lacking)} of {base.name}"
    entry["roofline"] = {
        "grade": "V",
        "source": told,
        **{key: getattr(base.roofline, key) for key in lacking},
        **roofline,
    }
    worst = max(errors, key=lambda group: errors[group])
    if errors[worst] > MOST_MISFIT:
        raise Misfit(
            f"{worst.replace('_', ' ')}: the best fit is off by {errors[worst]:.1%} in the mean of {len(groups[worst])} points, "
            f"at most {MOST_MISFIT:.0%} is of use; nothing was written; measure again on a quiet machine, with more sizes, or "
            "correct the points that stand out",
            group=worst,
            misfit=errors[worst],
            limit=MOST_MISFIT,
            errors=errors,
        )
    entry["misfit"] = dict(errors)
    found = Fit(name, entry, errors, {group: len(points) for group, points in groups.items() if points})
    machine(name, found.document())  # refuses impossible machines
    return found


def _taken(like: str | None) -> tuple[str, ...]:
    """Figures that may come from another machine: without a name for one, only those that the tables assume anyway."""
    assumed = (*PAGE_CALLS, "iteration_gap_s", "duplex")
    return assumed if like is None else (*assumed, "d2h_bytes_per_s")


def _from(base: Machine, key: str, *, assumed: bool) -> dict[str, Any]:
    grade, _, source = base.sources[key].partition(": ")
    return {
        "value": getattr(base, key),
        "grade": "A" if assumed else grade,
        "source": f"not measured, as {base.name}: {source}",
    }


def _refuse(name: str, value: object, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} must be {expected}, got {value!r}; nothing was fitted; measure again with `python -m bench.lab machine`, or "
        f"correct {name}",
        field=name,
        value=value,
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        return None
    return float(value)


def _positive(values: Mapping[str, Any], name: str) -> float:
    number = _number(values.get(name))
    if number is None:
        raise _refuse(name, values.get(name), "a finite number above 0")
    return number


def _optional(values: Mapping[str, Any], name: str) -> float:
    return _positive(values, name) if name in values else 0.0


def _points(measurements: Mapping[str, Any], group: str) -> list[dict[str, float]]:
    given = measurements.get(group, [])
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise _refuse(group, given, f"a list of objects with {', '.join(GROUPS[group])}")
    found = []
    for point in given:
        numbers = {name: _number(point.get(name)) for name in GROUPS[group]} if isinstance(point, Mapping) else {}
        if not numbers or None in numbers.values():
            raise _refuse(group, point, f"a list of objects with {', '.join(GROUPS[group])}, each above 0")
        found.append({name: number for name, number in numbers.items() if number is not None})
    return found


def _told(measurements: Mapping[str, Any]) -> str:
    about = measurements.get("about", {})
    what = about.get("device") if isinstance(about, Mapping) else None
    day = about.get("date") if isinstance(about, Mapping) else None
    return "measured by bench.lab machine" + (f" on {what}" if what else "") + (f", {day}" if day else "")


def _error(points: Sequence[Mapping[str, float]], seconds: Callable[[Mapping[str, float]], float]) -> float:
    return statistics.fmean(abs(seconds(point) / point["seconds"] - 1) for point in points)


@dataclass(frozen=True)
class _Linear:
    bandwidth: float
    flops: float
    p: float
    overhead_s: float

    def seconds(self, point: Mapping[str, float], element: float) -> float:
        k, n, tokens = point["k"], point["n"], point["tokens"]
        memory = element * (k * n + tokens * (k + n)) / self.bandwidth
        compute = 2 * tokens * k * n / self.flops
        most = max(memory, compute)
        if most <= 0.0:
            return self.overhead_s
        # Of shares, not of seconds: a search tries powers and rates at which these would leave the range of a float.
        return float(most * ((memory / most) ** self.p + (compute / most) ** self.p) ** (1 / self.p)) + self.overhead_s


def _linear_of(values: Sequence[float]) -> _Linear:
    """From the logarithms of bandwidth, FLOP/s, p - 1 and the overhead."""
    a, f, q, c = values
    return _Linear(math.exp(a), math.exp(f), 1 + math.exp(q), math.exp(c))


def _fit_linear(points: Sequence[Mapping[str, float]], element: float) -> _Linear:
    def residuals(values: Sequence[float]) -> list[float]:
        tried = _linear_of(values)
        return [math.log(tried.seconds(point, element) / point["seconds"]) for point in points]

    bandwidth = max(element * p["k"] * p["n"] / p["seconds"] for p in points)
    flops = max(2 * p["tokens"] * p["k"] * p["n"] / p["seconds"] for p in points)
    least = min(point["seconds"] for point in points)
    starts = [
        (math.log(bandwidth), math.log(flops), math.log(p - 1), math.log(share * least))
        for p in (1.3, 2.0, 5.0)
        for share in (0.01, 0.3)
    ]
    # A machine is no slower than its best operator, and may be much faster where none came near its limit; an operator takes
    # no more at least than the fastest one took.
    bounds = [
        (math.log(bandwidth / 2), math.log(bandwidth * 1e4)),
        (math.log(flops / 2), math.log(flops * 1e4)),
        (math.log(0.02), math.log(40.0)),
        (math.log(1e-6 * least), math.log(least)),
    ]
    return _linear_of(minimise(residuals, starts, bounds))


def _kv_bytes(point: Mapping[str, float], element: float) -> float:
    return 2 * point["rows"] * point["context"] * point["kv_heads"] * point["head_dim"] * element


def _attention_flop(point: Mapping[str, float]) -> float:
    return 4 * point["heads"] * point["head_dim"] * point["tokens"] * (point["tokens"] + 1) / 2


def _decode(points: Sequence[Mapping[str, float]], element: float) -> tuple[float, float] | None:
    """(overhead, bytes/s)."""
    if not points:
        return None
    overhead, slope = line([(_kv_bytes(point, element), point["seconds"]) for point in points])
    if slope <= 0:
        raise _refuse("decode_attention", overhead, "slower for more context: it took the same time for all")
    return overhead, 1 / slope


def _prefill(points: Sequence[Mapping[str, float]], overhead_s: float) -> float | None:
    """FLOP/s, with the overhead of any operator."""
    if not points:
        return None
    shares = [(_attention_flop(point) / point["seconds"], 1 - overhead_s / point["seconds"]) for point in points]
    inverse = math.fsum(x * rest for x, rest in shares) / math.fsum(x * x for x, _ in shares)
    if inverse <= 0:
        raise _refuse("prefill_attention", overhead_s, "slower than the least time of an operator")
    return 1 / inverse


def _fit_copies(groups: Mapping[str, Sequence[Mapping[str, float]]], errors: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    lines = {}
    for way in ("h2d", "d2h"):
        if not groups[way]:
            continue
        setup, slope = lines[way] = line([(point["bytes"], point["seconds"]) for point in groups[way]])
        if slope <= 0:
            raise _refuse(way, setup, "slower for more bytes: it took the same time for all")
        found[f"{way}_bytes_per_s"] = 1 / slope
        errors[way] = statistics.fmean(abs((setup + slope * p["bytes"]) / p["seconds"] - 1) for p in groups[way])
    found["copy_setup_s"] = lines["h2d"][0]
    if groups["both_ways"] and len(lines) == 2:
        large = max(point["bytes"] for point in groups["both_ways"]) / 4  # small copies hardly overlap
        shares = [
            (lines[way][0] + lines[way][1] * point["bytes"]) / point[f"{way}_seconds"]
            for point in groups["both_ways"]
            for way in ("h2d", "d2h")
            if point["bytes"] >= large
        ]
        found["duplex"] = min(1.0, statistics.median(shares))
    return found
