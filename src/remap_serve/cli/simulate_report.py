# SPDX-License-Identifier: Apache-2.0
"""The report of `remap simulate`: the table of all policies side by side. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remap_serve.sim.ideal import AGAINST_IDEAL, NEARLY, against_ideal
from remap_serve.sim.policies import IDEAL_MEMORY
from remap_serve.sim.results import PolicyResult, TenantResult, percentile, weighted_percentile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "METRICS",
    "Metric",
    "change",
    "notes",
    "part",
    "seconds",
    "table",
    "table_rows",
    "tables",
    "tenant_rows",
]


def seconds(value: float) -> str:
    """Microseconds, milliseconds or seconds with three significant digits; a dash for nan."""
    if math.isnan(value):
        return "–"
    if value == 0:
        return "0 s"
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if abs(value) * factor < 999.5:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s" if abs(value) < 999.5 else f"{value:,.0f} s"


def part(value: float) -> str:
    """A share in percent, "83 %"; a dash for nan."""
    return "–" if math.isnan(value) else f"{round(100 * value):,} %"


def _times(value: float) -> str:
    return "–" if math.isnan(value) else f"x {value:.3g}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _small(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


@dataclass(frozen=True)
class Metric:
    """One row. key: the property of PolicyResult. compared: whether to show the change from the first policy."""

    key: str
    name: str
    show: Callable[[float], str]
    compared: bool = True


METRICS = (
    Metric("tokens_per_s", "tokens/s", _small),
    Metric("ttft_p50_s", "TTFT P50", seconds),
    Metric("ttft_p99_s", "TTFT P99", seconds),
    Metric("ttft_mean_s", "TTFT mean", seconds),
    Metric("tbt_p50_s", "TBT P50", seconds),
    Metric("tbt_p99_s", "TBT P99", seconds),
    Metric("tbt_mean_s", "TBT mean", seconds),
    Metric("tpot_p99_s", "TPOT P99", seconds),
    Metric("longest_gap_p50_s", "longest gap of a request, P50", seconds),
    Metric("longest_gap_p99_s", "longest gap of a request, P99", seconds),
    Metric("long_gaps", "gaps above 0.2 s", lambda value: "–" if math.isnan(value) else f"{value:.2%}", compared=False),
    Metric("preemptions", "preemptions", _count),
    Metric("pauses", "pauses, KV kept", _count),
    Metric("kv_used_peak", "KV blocks used, peak", _count),
    Metric("layers_remapped_peak", "layers remapped, peak", _small, compared=False),
    Metric("stall_fraction", "stalled", lambda value: f"{value:.1%}", compared=False),
    Metric("requests_finished", "requests finished", _count, compared=False),
    Metric("goodput_per_s", "goodput, requests/s", _small),
    Metric("virtual_s", "served in", seconds, compared=False),
    Metric("decisions", "plans applied", _count, compared=False),
    Metric("wall_s", "simulated in", seconds, compared=False),
)
"""TTFT: from arrival to the first token, queueing included. TBT: between two tokens of a request. TPOT: the mean of
one request's. Preemptions: their KV is computed again; pauses: it stays in host memory. Goodput: requests that met both
targets. Peaks: sums of the tenants'."""


def change(before: float, after: float) -> str:
    """The relative change: "-45 %", "+1.2 %", "x 12" from a factor of three on; empty without a first value."""
    if not before or math.isnan(before) or math.isnan(after):
        return ""
    relative = after / before - 1.0
    if relative >= 2.0:
        return f"x {after / before:.3g}"
    if abs(relative) < 0.0005:
        return "="
    return f"{relative:+.0%}".replace("%", " %") if abs(relative) >= 0.0995 else f"{relative * 100:+.1f} %"


def table_rows(
    results: Sequence[PolicyResult], everybody: Sequence[PolicyResult] = ()
) -> list[tuple[str, list[str], list[str]]]:
    """(name of the metric, value of each policy, its change from the first policy), for each metric.

    everybody: all results, if the table has some of them: "recompute" and "ideal" need not be in it.
    """
    rows = []
    for metric in METRICS:
        values = [float(getattr(result, metric.key)) for result in results]
        changes = [change(values[0], value) if metric.compared else "" for value in values]
        changes[0] = ""
        rows.append((metric.name, [metric.show(value) for value in values], changes))
    if found := against_ideal({result.policy: result.headline() for result in everybody or results}):
        for one in AGAINST_IDEAL:
            show = _times if one.ratio else part
            rows.append((one.title, [show(found[result.policy][one.key]) for result in results], [""] * len(results)))
    return rows


def notes(results: Sequence[PolicyResult]) -> list[str]:
    """How to read the rows of goodput and, if there are any, of gaps: a sentence each."""
    targets = results[0].targets
    said = [
        f"goodput: requests per second with the first token within {seconds(targets.ttft_s)} and TPOT of at most "
        f"{seconds(targets.tpot_s)}"
    ]
    if {"recompute", "ideal"} <= {result.policy for result in results}:
        said.append(
            f"gap closed: from recompute (0 %) to ideal (100 %), which has {IDEAL_MEMORY} times the memory; – where both "
            f"are within {part(NEARLY)}"
        )
    return said


def tables(results: Sequence[PolicyResult], title: str, console: Console) -> list[Table]:
    """As few tables as fit the console's width, each with the first policy, which the others are compared with."""
    shown = list(results[:1])
    made = [table(shown, title, results)]
    for result in results[1:]:
        wider = table([*shown, result], title, results)
        needed = console.measure(wider, options=console.options.update(max_width=10_000)).maximum
        if len(shown) == 1 or needed <= console.width:
            shown.append(result)
            made[-1] = wider
        else:
            shown = [results[0], result]
            made.append(table(shown, title, results))
    return made


def table(results: Sequence[PolicyResult], title: str, everybody: Sequence[PolicyResult] = ()) -> Table:
    """A table for a terminal: one row for each metric, one column for each policy. everybody: see `table_rows`."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
    made.add_column("", no_wrap=True)
    for result in results:
        made.add_column(result.policy, justify="right", no_wrap=True)
    for name, values, changes in table_rows(results, everybody):
        cells = [f"{value} ({moved})" if moved else value for value, moved in zip(values, changes)]
        made.add_row(name, *cells)
    brackets = [f"in brackets: against {results[0].policy}"] if len(results) > 1 else []
    made.caption = "\n".join([*brackets, *notes(everybody or results)])
    return made


TENANT_HEAD = (
    *("tenant", "requests", "finished", "tokens", "TTFT P50", "TTFT P99", "TBT P50", "TBT P99", "preemptions"),
    *("pauses, KV kept", "KV blocks used, peak", "layers remapped", "stalled"),
)
"""The columns of `tenant_rows`."""


def tenant_rows(result: PolicyResult) -> list[list[str]]:
    """One row for each tenant of a policy, with the columns of `TENANT_HEAD`."""
    return [_tenant(tenant) for tenant in result.tenants]


def _tenant(tenant: TenantResult) -> list[str]:
    return [
        tenant.tenant,
        _count(tenant.requests),
        _count(tenant.finished),
        _count(tenant.output_tokens),
        *(seconds(percentile(tenant.ttft_s, q)) for q in (0.5, 0.99)),
        *(seconds(weighted_percentile(tenant.tbt, q)) for q in (0.5, 0.99)),
        _count(tenant.preemptions),
        _count(tenant.pauses),
        _count(tenant.kv_used_peak),
        _small(tenant.layers_remapped_peak),
        f"{tenant.stall_fraction:.1%}",
    ]
