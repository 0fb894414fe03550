"""out/demo.html: the demo's runs as one self-contained page (inline SVG, CSS and a little script; no other file).

Baseline and remap stand side by side on the same axes. The drawing is done here, in Python, so that the page reads
without its script; the script only adds the cross-hair that reads both runs at one moment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from remap.engine.metrics import Sample, percentile

from .demo_report import DemoResult, RunResult, closing_sentence, format_seconds, is_better, table_rows

__all__ = ["page"]

WIDTH, HEIGHT = 520, 168
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
# A step plot needs no more points than it has pixels; more only makes the page slow.
MAX_POINTS = 900


@dataclass(frozen=True)
class Series:
    """One line of a chart: how to read it from a point, and how to draw it."""

    name: str
    value: Callable[[Sample], float]
    style: str  # CSS class: "line", "area", "limit" or "soft"


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    series: tuple[Series, ...]
    integer: bool = True


CHARTS = (
    Chart(
        "KV cache, blocks",
        "filled: in use; line: may be used",
        (
            Series("in use", lambda p: p.kv_used_blocks, "area"),
            Series("capacity", lambda p: p.kv_usable_blocks, "limit"),
        ),
    ),
    Chart(
        "Layers remapped", "layers whose memory is KV cache", (Series("layers", lambda p: p.layers_remapped, "area"),)
    ),
    Chart(
        "Requests",
        "line: running; filled: waiting",
        (
            Series("waiting", lambda p: p.waiting, "soft"),
            Series("running", lambda p: p.running, "line"),
        ),
    ),
    Chart(
        "Preemptions so far",
        "each step up throws a request's KV away",
        (Series("so far", lambda p: p.preemptions, "line"),),
    ),
)


def ticks(top: float, count: int = 4, integer: bool = True) -> list[float]:
    """Round values from 0 that cover `top`, about `count` steps of 1, 2 or 5 times a power of ten."""
    raw = max(top, 1e-6) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= raw * (1 - 1e-9))
    if integer:
        step = max(1.0, step)
    return [step * i for i in range(max(math.ceil(top / step - 1e-9), 1) + 1)]


def thin(points: Sequence[Sample], limit: int = MAX_POINTS) -> list[Sample]:
    """At most about `limit` points, the first and the last among them."""
    if len(points) <= limit:
        return list(points)
    stride = math.ceil(len(points) / limit)
    kept = list(points[::stride])
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


class _Axes:
    """Seconds and values to pixels; the same for both runs of a chart."""

    def __init__(self, end_s: float, marks: list[float]) -> None:
        self.end_s = end_s or 1.0
        self.marks = marks
        self.top = marks[-1]

    def x(self, t_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * t_s / self.end_s

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top

    def path(self, points: Sequence[Sample], read: Callable[[Sample], float], closed: bool) -> str:
        """A step plot: each value holds until the next point."""
        first = points[0]
        start = self.y(0) if closed else self.y(read(first))
        commands = [f"M{self.x(first.time_s):.1f} {start:.1f}V{self.y(read(first)):.1f}"]
        previous = read(first)
        for point in points[1:]:
            value = read(point)
            if value != previous:
                commands.append(f"H{self.x(point.time_s):.1f}V{self.y(value):.1f}")
                previous = value
        commands.append(f"H{self.x(points[-1].time_s):.1f}")
        if closed:
            commands.append(f"V{self.y(0):.1f}Z")
        return "".join(commands)


def _svg(chart: Chart, run: RunResult, axes: _Axes) -> str:
    points = thin(run.timeline)
    parts = []
    for mark in axes.marks:
        y = axes.y(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{mark:g}</text>')
    for mark in ticks(axes.end_s, 5, integer=False):
        if mark <= axes.end_s:
            label = f"{mark:g} s"
            parts.append(
                f'<text class="tick" x="{axes.x(mark):.1f}" y="{HEIGHT - 7}" text-anchor="middle">{label}</text>'
            )
    if points:
        for series in chart.series:
            closed = series.style in ("area", "soft")
            parts.append(f'<path class="{series.style}" d="{axes.path(points, series.value, closed)}"/>')
        end = axes.x(points[-1].time_s)
        parts.append(f'<line class="end" x1="{end:.1f}" x2="{end:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(f'<line class="hair" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    label = f"{chart.title}, {run.kind}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}" data-run="{run.kind}" '
        f'data-end="{axes.end_s:.6g}">{"".join(parts)}</svg>'
    )


def _chart_rows(result: DemoResult) -> str:
    runs = (result.baseline, result.remap)
    end_s = max((run.timeline[-1].time_s for run in runs if run.timeline), default=1.0)
    rows = []
    for index, chart in enumerate(CHARTS):
        values = [s.value(p) for run in runs for p in run.timeline for s in chart.series]
        axes = _Axes(end_s, ticks(max(values, default=0.0), integer=chart.integer))
        cells = "".join(
            f'<figure class="{run.kind}">{_svg(chart, run, axes)}'
            f'<figcaption data-readout="{run.kind}-{index}">&nbsp;</figcaption></figure>'
            for run in runs
        )
        rows.append(
            f'<h3>{escape(chart.title)} <small>{escape(chart.note)}</small></h3><div class="pair">{cells}</div>'
        )
    return "".join(rows)


def _tile(name: str, before: str, after: str) -> str:
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="values">'
        f'<span class="before">{escape(before)}</span><span class="arrow">&rarr;</span>'
        f'<span class="after">{escape(after)}</span></div></div>'
    )


def _tiles(result: DemoResult) -> str:
    base, remap = result.baseline, result.remap
    return "".join(
        (
            _tile("preemptions", f"{base.preemptions:,}", f"{remap.preemptions:,}"),
            _tile("tokens/s", f"{base.tokens_per_s:.1f}", f"{remap.tokens_per_s:.1f}"),
            _tile(
                "P99 time to first token",
                format_seconds(percentile(base.ttft_s, 0.99)),
                format_seconds(percentile(remap.ttft_s, 0.99)),
            ),
            _tile(
                "P99 time between tokens",
                format_seconds(percentile(base.tbt_s, 0.99)),
                format_seconds(percentile(remap.tbt_s, 0.99)),
            ),
        )
    )


def _table(result: DemoResult) -> str:
    head = "".join(f"<th>{escape(t)}</th>" for t in ("", "unconstrained", "baseline", "remap", "remap vs baseline"))
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in table_rows(result)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(name: str, facts: dict[str, object]) -> str:
    items = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items())
    return f"<section><h2>{escape(name)}</h2><dl>{items}</dl></section>"


def _data(result: DemoResult) -> str:
    """The timelines for the cross-hair, as JSON that cannot end its script element."""
    runs = {
        run.kind: {
            "t": [round(p.time_s, 4) for p in thin(run.timeline)],
            "charts": [
                [[s.name, [round(s.value(p), 3) for p in thin(run.timeline)]] for s in chart.series] for chart in CHARTS
            ],
        }
        for run in (result.baseline, result.remap)
    }
    return json.dumps(runs, separators=(",", ":")).replace("</", "<\\/")


def page(result: DemoResult) -> str:
    """The whole HTML document."""
    verdict = "good" if is_better(result) else "mixed"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>remap demo: {escape(result.model)}</title><style>{_CSS}</style></head>
<body><main>
<header><p class="kicker">remap demo &middot; {escape(result.model)} &middot; {result.requests} requests at once</p>
<h1>Weights become KV cache while the engine serves</h1>
<p class="closing {verdict}">{escape(closing_sentence(result))}</p></header>
<div class="tiles">{_tiles(result)}</div>
<section><div class="pair heads">
<h2 class="baseline">baseline <small>same budget, same engine, never remaps</small></h2>
<h2 class="remap">remap <small>same budget, same engine</small></h2></div>{_chart_rows(result)}</section>
<section><h2>All numbers</h2>{_table(result)}
<p class="note">Unconstrained: the same engine with memory for all requests at once; its tokens are the reference.
Percentiles are over requests (first token) and over all gaps between tokens of a request. Stall share: time spent
waiting for streamed layers. Every run is a process of its own with the same threads and settings.</p></section>
<div class="pair">{_facts("Settings", dict(result.settings))}{_facts("Machine", dict(result.machine))}</div>
</main><script type="application/json" id="data">{_data(result)}</script>
<script>const LEFT={LEFT},RIGHT={RIGHT},WIDTH={WIDTH};{_SCRIPT}</script></body></html>
"""


_CSS = """
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--ink:#1d1f23;--soft:#63676f;--rule:#e3e3df;
--baseline:#a5581b;--remap:#1466b8;--good:#12714a;--mixed:#8a5a00}
@media(prefers-color-scheme:dark){:root{--page:#131417;--card:#1b1d21;--ink:#e9e9e6;--soft:#9ba0a9;--rule:#2d3036;
--baseline:#e39a5b;--remap:#68b0f5;--good:#5fcb98;--mixed:#e0b050}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 20px 64px}
h1{font-size:30px;line-height:1.2;margin:4px 0 14px;letter-spacing:-.01em;text-wrap:balance}
h2{font-size:18px;margin:0 0 8px}h3{font-size:14px;margin:20px 0 4px;font-weight:600}
small{font-weight:400;color:var(--soft);font-size:13px;margin-left:6px}
.kicker{margin:0;color:var(--soft);font-size:13px}
.closing{font-size:17px;max-width:86ch;margin:0;padding-left:14px;border-left:4px solid var(--good)}
.closing.mixed{border-color:var(--mixed)}
section{margin-top:36px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(215px,1fr));gap:12px;margin-top:26px}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 16px}
.tile .name{color:var(--soft);font-size:13px}
.values{display:flex;align-items:baseline;gap:8px;font-variant-numeric:tabular-nums;white-space:nowrap}
.before{color:var(--baseline);font-size:18px}.arrow{color:var(--soft)}
.after{color:var(--remap);font-size:26px;font-weight:650}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:4px 20px}
.heads h2{margin:0}.heads .baseline{color:var(--baseline)}.heads .remap{color:var(--remap)}
figure{margin:0;min-width:0}figure.baseline{--run:var(--baseline)}figure.remap{--run:var(--remap)}
svg{display:block;width:100%;height:auto;background:var(--card);border:1px solid var(--rule);border-radius:6px;
touch-action:pan-y}
.grid{stroke:var(--rule);stroke-width:1}.tick{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
path{vector-effect:non-scaling-stroke}
.area{fill:var(--run);fill-opacity:.34;stroke:var(--run);stroke-width:1}
.soft{fill:var(--soft);fill-opacity:.2;stroke:none}
.line,.limit{fill:none;stroke:var(--run);stroke-width:2;stroke-linejoin:round}
.end{stroke:var(--soft);stroke-dasharray:3 3}.hair{stroke:var(--ink);stroke-width:1;visibility:hidden}
figcaption{font-size:12px;color:var(--soft);height:18px;padding-left:2px;font-variant-numeric:tabular-nums;
white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:7px 14px;text-align:right;white-space:nowrap;border-top:1px solid var(--rule)}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:13px}
tbody th{text-align:left;font-weight:400}td:nth-child(4){font-weight:650}
.note{color:var(--soft);font-size:13px;max-width:92ch}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:0;font-size:13px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media(max-width:760px){.pair{grid-template-columns:1fr}.heads .remap{margin-bottom:0}h1{font-size:25px}}
"""

_SCRIPT = """
const runs=JSON.parse(document.getElementById("data").textContent);
const svgs=[...document.querySelectorAll("svg")];
function at(times,t){let lo=0,hi=times.length-1;
while(lo<hi){const mid=(lo+hi+1)>>1;if(times[mid]<=t)lo=mid;else hi=mid-1}return lo}
function show(t,end){for(const svg of svgs){const hair=svg.querySelector(".hair");
const x=LEFT+(WIDTH-LEFT-RIGHT)*t/end;hair.setAttribute("x1",x);hair.setAttribute("x2",x);
hair.style.visibility="visible"}
for(const [kind,run] of Object.entries(runs)){if(!run.t.length)continue;const i=at(run.t,t);
const over=t>run.t[run.t.length-1];
run.charts.forEach((chart,c)=>{document.querySelector(`[data-readout="${kind}-${c}"]`).textContent=
`${kind} at ${t.toFixed(1)} s: `+(over?"finished":chart.map(([name,values])=>`${name} ${values[i]}`).join(", "))})}}
function hide(){for(const svg of svgs)svg.querySelector(".hair").style.visibility="hidden";
for(const caption of document.querySelectorAll("figcaption"))caption.innerHTML="&nbsp;"}
for(const svg of svgs){const end=Number(svg.dataset.end);
svg.addEventListener("pointermove",event=>{const box=svg.getBoundingClientRect();
const x=(event.clientX-box.left)/box.width*WIDTH;
const t=(x-LEFT)/(WIDTH-LEFT-RIGHT)*end;if(t<0||t>end)hide();else show(t,end)});
svg.addEventListener("pointerleave",hide)}
"""
