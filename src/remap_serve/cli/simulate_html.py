# SPDX-License-Identifier: Apache-2.0
"""The page of `remap simulate`: table, configuration and pictures in one file (templates/simulate.html.j2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remap_serve.sim.results import PolicyResult

from . import simulate_plots as plots
from .pages import need_jinja, render
from .simulate_report import TENANT_HEAD, notes, table_rows, tenant_rows
from .simulate_verdict import LIMITS, limited_by, verdict, worse

__all__ = ["need_packages", "page"]


def need_packages() -> None:
    """Raises Missing without matplotlib or jinja2."""
    plots.need_matplotlib()
    need_jinja()


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(_value(part) for part in value)
    if isinstance(value, float) and not isinstance(value, bool):
        return f"{value:.6g}"
    return str(value)


def page(configuration: Mapping[str, Any], results: Sequence[PolicyResult], title: str) -> str:
    """The whole HTML document. Raises Missing without matplotlib or jinja2, before anything is drawn."""
    need_packages()
    pictures = [
        ("Time to first token", "From arrival, queueing included.", plots.ttft_cdf(results)),
        ("Time between tokens", "All gaps between two tokens of one request.", plots.tbt_cdf(results)),
        (
            "KV blocks over time",
            "Line: blocks that may be used; area: in use. Blocks of different models differ in size.",
            plots.kv_over_time(results),
        ),
        ("Layers remapped over time", "Layers whose memory is KV cache.", plots.alpha_over_time(results)),
        ("Stalls and queues over time", "", plots.stall_over_time(results)),
    ]
    return render(
        "simulate",
        title=title,
        results=results,
        rows=table_rows(results),
        notes=notes(results),
        verdict=verdict(results),
        worse=worse(results),
        limits=[limited_by(result) for result in results],
        limits_note=LIMITS,
        legend=[
            (name, plots.themed(colour)) for name, colour in plots.colours(each.policy for each in results).items()
        ],
        dark={plots.themed(light).partition(",")[0][4:]: dark for light, dark in plots.DARK.items()},
        pictures=[(name, note, [plots.svg(each) for each in figures]) for name, note, figures in pictures if figures],
        tenant_head=TENANT_HEAD,
        tenant_rows=tenant_rows,
        configuration={name: _value(value) for name, value in configuration.items()},
    )
