"""Figures of the papers that are no plain comparison of two policies: turning points, expansions, host memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from remap.sim.hardware import Machine, model
from remap.sim.roofline import Roofline

from .experiments import BASELINE, Headline, Panel, Reckoning
from .reckoning import Finding, Points, compare, curve, mean_of, places

__all__ = ["NOTICED", "SPECIAL", "arithmetic", "find"]

NOTICED = 0.05
"""A gain below this share does not count as one where a paper says when gains begin."""

BLOCK_TOKENS = 16


def find(points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str) -> Finding:
    """What stands beside the headline for one policy, reckoned as `reckoning.how` says."""
    if reckoning.how in SPECIAL:
        return SPECIAL[reckoning.how](points, headline, reckoning, panels, test)
    return compare(points, headline, reckoning, panels, test)


def _best_static(
    points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str
) -> Finding:
    """Of all expansions, the one with the most throughput, as "most" does over panels and rates. `test` is left alone."""
    found = [
        compare(points, headline, Reckoning(headline.id, reckoning.metric, reckoning.base, (one,), "most"), panels, one)
        for one in reckoning.tests
    ]
    return max(found, key=lambda one: one.value or 0.0)


def _expansion(name: str) -> float:
    return float(name.partition(":")[2]) if ":" in name else 1.0


def _by_expansion(
    points: Points, reckoning: Reckoning, panels: Sequence[Panel]
) -> tuple[str, Panel | None, dict[str, float]]:
    """(key, panel, policy -> tokens/s) at the highest rate, where memory is fullest."""
    for panel in panels:
        keys = points.keys(panel.name, BASELINE, *reckoning.tests)
        if keys:
            names = (BASELINE, *reckoning.tests)
            rates = {
                name: mean_of([one["tokens_per_s"] for one in points.at(panel.name, keys[-1], name)]) for name in names
            }
            return keys[-1], panel, rates
    return "", None, {}


def _single(
    points: Points,
    headline: Headline,
    reckoning: Reckoning,
    panel: Panel | None,
    key: str,
    test: str,
    value: float | None,
) -> Finding:
    if panel is None or value is None:
        return Finding(headline.id, test, reckoning.base)
    least, most = headline.value if isinstance(headline.value, tuple) else (headline.least, headline.least)
    at = places(points, [panel], key, next(iter(points.cells[panel.name][key])))
    return Finding(headline.id, test, reckoning.base, value, value, value, key, at, least <= value <= most)


def _best_expansion(
    points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str
) -> Finding:
    key, panel, rates = _by_expansion(points, reckoning, panels)
    best = max(rates, key=lambda name: rates[name], default="")
    found = _single(points, headline, reckoning, panel, key, "pie:E", _expansion(best) if rates else None)
    return replace(found, direction="" if found.value is None else "yes" if found.value > 1.0 else "no")


def _blocks(points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str) -> Finding:
    """The smallest expansion above the best one that serves less."""
    key, panel, rates = _by_expansion(points, reckoning, panels)
    best = max(rates, key=lambda name: rates[name], default="")
    less = [_expansion(name) for name in rates if _expansion(name) > _expansion(best) and rates[name] < rates[best]]
    found = _single(points, headline, reckoning, panel, key, "pie:E", min(less) if less else None)
    return replace(found, direction="" if panel is None else "yes" if less else "no")


def _adaptive(points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str) -> Finding:
    """The expansion that the adaptive policy came to, at the highest rate: its largest KV, in KV that it began with."""
    for panel in panels:
        for key in points.keys(panel.name, test)[-1:]:
            seen = points.at(panel.name, key, test)
            value = mean_of([one["kv_blocks_peak"] / one["kv_blocks_start"] for one in seen])
            return replace(
                _single(points, headline, reckoning, panel, key, test, value), direction="yes" if value > 1 else "no"
            )
    return Finding(headline.id, test, reckoning.base)


def _overhead(points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str) -> Finding:
    """How much less than the best fixed expansion at the same rate, averaged over the rates. Below 0: more."""
    for panel in panels:
        fixed = sorted(
            {name for cell in points.cells.get(panel.name, {}).values() for name in cell if name.startswith("pie:")}
        )
        keys = points.keys(panel.name, test, *fixed) if fixed else []
        if keys:
            values = [
                100.0
                * (
                    1
                    - mean_of([one["tokens_per_s"] for one in points.at(panel.name, key, test)])
                    / max(mean_of([one["tokens_per_s"] for one in points.at(panel.name, key, name)]) for name in fixed)
                )
                for key in keys
            ]
            found = _single(points, headline, reckoning, panel, keys[-1], test, mean_of(values))
            met = mean_of(values) <= headline.least
            return replace(found, reached=met, low=min(values), high=max(values), direction="yes" if met else "no")
    return Finding(headline.id, test, reckoning.base)


def _gain_begins(
    points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str
) -> Finding:
    """The lowest rate from which on throughput is above the baseline's by more than `NOTICED`."""
    seen = curve(points, panels, test, reckoning.base, "throughput_ratio")
    gaining = [key for key, values in seen if mean_of(values) > 1.0 + NOTICED]
    if not gaining:
        return Finding(headline.id, test, reckoning.base, direction="no" if seen else "")
    rate = points.at(panels[0].name, gaining[0], test)[0]["rate"]
    found = _single(points, headline, reckoning, panels[0], gaining[0], test, rate)
    return replace(found, direction="yes" if len(gaining) < len(seen) else "no")


def _about(neutral: float, within: float) -> Callable[..., Finding]:
    def reckon(points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str) -> Finding:
        """The mean over all rates from saturation on; reached if it is near enough."""
        seen = curve(points, panels, test, reckoning.base, reckoning.metric)
        seen = [pair for pair in seen if pair[0].startswith("x") and float(pair[0][1:]) >= 1.0] or seen
        if not seen:
            return Finding(headline.id, test, reckoning.base)
        values = [mean_of(values) for _, values in seen]
        near = abs(mean_of(values) - neutral) <= within
        key = seen[-1][0]
        return Finding(
            headline.id,
            test,
            reckoning.base,
            mean_of(values),
            min(values),
            max(values),
            key,
            places(points, panels, key, test),
            near,
            direction="yes" if near else "no",
        )

    return reckon


def _host(points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str) -> Finding:
    """The most KV that was in host memory: what was usable beyond what the device holds, times the bytes of a block."""
    most: Finding | None = None
    for panel in panels:
        block = BLOCK_TOKENS * model(panel.tenants).kv_bytes_per_token
        for key in points.keys(panel.name, test):
            for one in points.at(panel.name, key, test):
                value = (one["kv_blocks_peak"] - one["kv_blocks_start"]) * block / 1e9
                if most is None or value > (most.value or 0.0):
                    most = _single(points, headline, reckoning, panel, key, test, value)
    if most is None or most.value is None:
        return Finding(headline.id, test, reckoning.base)
    met = most.value < headline.least
    return replace(most, reached=met, direction="yes" if met else "no")


def _hidden(points: Points, headline: Headline, reckoning: Reckoning, panels: Sequence[Panel], test: str) -> Finding:
    return Finding(headline.id, test, reckoning.base)  # the report takes it from `arithmetic`


SPECIAL: Mapping[str, Callable[..., Finding]] = {
    "best_static": _best_static,
    "best_expansion": _best_expansion,
    "expansion_that_blocks": _blocks,
    "adaptive_expansion": _adaptive,
    "adaptive_overhead": _overhead,
    "gain_begins": _gain_begins,
    "about_zero": _about(0.0, 5.0),
    "about_one": _about(1.0, 0.05),
    "host_gb": _host,
    "hidden_by_batch": _hidden,
    "range": _hidden,
}


def arithmetic(machine: Machine, name: str = "OPT-13b", context: int = 512) -> list[dict[str, float]]:
    """Oneiros, Fig 4b: for decoding batches of 1 to 256 the seconds of a layer, of a pass, of loading a layer and of swapping its
    KV in, and how many layers can be loaded within a pass through two buffers ((alpha + 2) loads <= the pass, Eq. 5)."""
    found = []
    chosen = model(name)
    roofline = Roofline(machine, chosen)
    load_s = machine.copy_setup_s + chosen.layer_bytes / machine.h2d_bytes_per_s
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        layer_s = roofline.layer_s(0, 0, batch, batch * context)
        pass_s = chosen.layers * layer_s + roofline.ends_s(batch, batch)
        found.append(
            {
                "batch": batch,
                "layer_s": _five(layer_s),
                "pass_s": _five(pass_s),
                "load_s": _five(load_s),
                "kv_layer_s": _five(
                    machine.copy_setup_s + batch * context * chosen.kv_bytes_per_token_layer / machine.h2d_bytes_per_s
                ),
                "hidden": max(0, min(chosen.layers - 2, math.floor(pass_s / load_s) - 2)),
            }
        )
    return found


def _five(value: float) -> float:
    return float(f"{value:.5g}")
