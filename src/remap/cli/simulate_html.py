"""The page of `remap simulate`: table, configuration and pictures in one file that asks the network for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from remap.sim.results import PolicyResult

from . import simulate_plots as plots
from .simulate_report import TENANT_HEAD, table_rows, tenant_rows

__all__ = ["page"]


def _table(results: Sequence[PolicyResult]) -> str:
    head = "".join(f"<th>{escape(result.policy)}</th>" for result in results)
    body = []
    for name, values, changes in table_rows(results):
        cells = "".join(
            f"<td>{escape(value)}{f' <small>{escape(moved)}</small>' if moved else ''}</td>"
            for value, moved in zip(values, changes)
        )
        body.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _tenants(results: Sequence[PolicyResult]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in TENANT_HEAD)
    parts = []
    for result in results:
        rows = "".join(
            f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
            for row in tenant_rows(result)
        )
        parts.append(
            f'<tbody><tr class="group"><th colspan="{len(TENANT_HEAD)}">{escape(result.policy)}</th></tr>{rows}</tbody>'
        )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>{"".join(parts)}</table></div>'


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(_value(part) for part in value)
    if isinstance(value, float) and not isinstance(value, bool):
        return f"{value:.6g}"
    return str(value)


def _configuration(configuration: Mapping[str, Any]) -> str:
    items = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(_value(value))}</dd>" for name, value in configuration.items()
    )
    return f"<dl>{items}</dl>"


def page(configuration: Mapping[str, Any], results: Sequence[PolicyResult], title: str) -> str:
    """The whole HTML document. Raises InvalidState without matplotlib, before anything is drawn."""
    plots.need_matplotlib()
    pictures = [
        ("Time to first token", "From arrival, queueing included.", plots.ttft_cdf(results)),
        ("Time between tokens", "All gaps between two tokens of one request.", plots.tbt_cdf(results)),
        (
            "KV blocks over time",
            "Blocks of different models differ in size.",
            plots.kv_over_time(results),
        ),
        ("Layers remapped over time", "Layers whose memory is KV cache.", plots.alpha_over_time(results)),
        ("Stalls and queues over time", "", plots.stall_over_time(results)),
    ]
    figures = "".join(
        f'<section><h2>{escape(name)}</h2><p class="note">{escape(note)}</p><figure>{plots.svg(figure)}</figure></section>'
        for name, note, figure in pictures
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_CSS}</style></head>
<body><main><p class="kicker">remap simulate</p><h1>{escape(title)}</h1>
{_table(results)}
<p class="note">Small figures: against {escape(results[0].policy)}. TTFT: from arrival to the first token. TBT: between two
tokens of a request; TPOT: the mean of one request's. Percentiles by nearest rank, over all tenants. Peaks are the tenants'
peaks added up.</p>
{figures}
<section><h2>By tenant</h2>{_tenants(results)}</section>
<section><h2>Configuration</h2>{_configuration(configuration)}</section>
</main></body></html>
"""


_CSS = """
:root{color-scheme:light;--page:#fbfbfa;--card:#fff;--ink:#1d1f23;--soft:#63676f;--rule:#e3e3df}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1060px;margin:0 auto;padding:40px 20px 64px}
h1{font-size:26px;line-height:1.25;margin:4px 0 18px;letter-spacing:-.01em;text-wrap:balance}
h2{font-size:18px;margin:0 0 4px}section{margin-top:36px}
.kicker,.note{color:var(--soft);font-size:13px;margin:0 0 6px}.note{max-width:92ch}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px}
svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:8px;margin-bottom:8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 14px;text-align:right;white-space:nowrap;border-top:1px solid var(--rule)}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:13px}
tbody th,thead th:first-child{text-align:left;font-weight:400}td small{color:var(--soft)}
.group th{font-weight:650;background:var(--page)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:8px 0 0;font-size:13px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
"""
