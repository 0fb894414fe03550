# SPDX-License-Identifier: Apache-2.0
"""The demo's results as numbers, out/demo.json, a table and a closing sentence.

These are pure functions over RunResult values; demo_html makes the page. The closing sentence is computed from the
numbers, and says so when remap was not better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from remap.errors import InvalidArgument
from remap.sizes import show_size
from remap_serve.engine.metrics import StepSample, percentile

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "COLD",
    "IDENTICAL",
    "DemoResult",
    "RunResult",
    "caption",
    "closing_sentence",
    "differing_answers",
    "identical_requests",
    "numbers",
    "sparkline",
    "table",
    "table_rows",
    "to_json",
    "worse_figures",
    "worse_sentence",
]

KINDS = ("unconstrained", "baseline", "remap")
# A change below this share counts as none: two runs of the same code differ by as much.
NOISE = 0.01


@dataclass(frozen=True)
class RunResult:
    """One run of the engine over all requests. Times in seconds; tuples over requests are in request order. preemptions, pauses:
    see `Metrics`."""

    kind: str
    wall_s: float  # arrival of the requests to the last token
    preemptions: int
    recomputed_tokens: int
    ttft_s: tuple[float, ...]  # per request: arrival to first token
    tbt_s: tuple[float, ...]  # all gaps between consecutive tokens of a request
    tpot_s: tuple[float, ...]  # per request of more than one token: the mean of its gaps
    longest_gap_s: tuple[float, ...]  # of the same requests: the longest of their gaps
    capacity_bytes: int
    kv_blocks_start: int
    kv_blocks_peak: int
    layers: int
    layers_remapped_peak: float
    stall_fraction: float  # time spent waiting for layers / wall_s
    tokens: tuple[tuple[int, ...], ...]  # per request: generated ids
    timeline: tuple[StepSample, ...]
    tenants: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of several: each one's numbers
    cold: Mapping[str, float] = field(
        default_factory=dict
    )  # of more models than memory: what their turns cost (demo_cold)
    pauses: int = 0

    @property
    def generated_tokens(self) -> int:
        return sum(len(ids) for ids in self.tokens)

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.wall_s if self.wall_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunResult:
        fields = dict(data)
        fields["ttft_s"] = tuple(fields["ttft_s"])
        fields["tbt_s"] = tuple(fields["tbt_s"])
        fields["tpot_s"] = tuple(fields["tpot_s"])
        fields["longest_gap_s"] = tuple(fields["longest_gap_s"])
        fields["tokens"] = tuple(tuple(ids) for ids in fields["tokens"])
        fields["timeline"] = tuple(StepSample(**point) for point in fields["timeline"])
        return cls(**fields)


@dataclass(frozen=True)
class DemoResult:
    """The three runs, and the settings that they share."""

    model: str
    budget_bytes: int
    unconstrained: RunResult
    baseline: RunResult
    remap: RunResult
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def requests(self) -> int:
        return len(self.unconstrained.tokens)

    @property
    def runs(self) -> tuple[RunResult, RunResult, RunResult]:
        return self.unconstrained, self.baseline, self.remap


def identical_requests(run: RunResult, reference: RunResult) -> int:
    """Number of requests that generated exactly the reference's tokens.

    Raises InvalidArgument if the runs had different numbers of requests.
    """
    if len(run.tokens) != len(reference.tokens):
        raise InvalidArgument(
            f"{run.kind} answered {len(run.tokens)} requests and {reference.kind} {len(reference.tokens)}: "
            "they cannot be compared",
            requests=len(run.tokens),
            reference=len(reference.tokens),
        )
    return sum(a == b for a, b in zip(run.tokens, reference.tokens, strict=True))


def numbers(run: RunResult) -> dict[str, Any]:
    """The numbers of a run in the table and in demo.json: seconds, counts, shares."""
    return {
        "preemptions": run.preemptions,
        "pauses": run.pauses,
        "recomputed_tokens": run.recomputed_tokens,
        "tokens_per_s": run.tokens_per_s,
        "ttft_p50_s": percentile(run.ttft_s, 0.50),
        "ttft_p99_s": percentile(run.ttft_s, 0.99),
        "tbt_p50_s": percentile(run.tbt_s, 0.50),
        "tbt_p99_s": percentile(run.tbt_s, 0.99),
        "tpot_p99_s": percentile(run.tpot_s, 0.99),
        "longest_gap_p99_s": percentile(run.longest_gap_s, 0.99),
        "kv_blocks_start": run.kv_blocks_start,
        "kv_blocks_peak": run.kv_blocks_peak,
        "layers_remapped_peak": run.layers_remapped_peak,
        "stall_fraction": run.stall_fraction,
        **run.cold,
    }


def to_json(result: DemoResult) -> dict[str, Any]:
    """The contents of out/demo.json. tokens_identical: all requests of remap have the unconstrained run's tokens."""
    return {
        "model": result.model,
        "budget_bytes": result.budget_bytes,
        "requests": result.requests,
        "tokens_identical": identical_requests(result.remap, result.unconstrained) == result.requests,
        **{
            run.kind: {
                **numbers(run),
                "identical_requests": identical_requests(run, result.unconstrained),
                **({"tenants": dict(run.tenants)} if run.tenants else {}),
            }
            for run in result.runs
        },
        "machine": dict(result.machine),
    }


# --- words ---------------------------------------------------------------------------------------------------------


def format_seconds(value: float) -> str:
    """Seconds or milliseconds with three significant digits."""
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def _change(before: float, after: float) -> float | None:
    """Relative change; None if the first value is 0."""
    return after / before - 1 if before else None


def _moved(name: str, before: float, after: float, text: tuple[str, str]) -> str:
    """A phrase: `name` rose or fell by a share, with both values; "stayed" within the noise."""
    change = _change(before, after)
    values = f"({text[0]} to {text[1]})"
    if change is None:
        return f"{name} went {values[1:-1]}" if text[0] != text[1] else f"{name} stayed at {text[0]}"
    if abs(change) < NOISE:
        return f"{name} stayed {values}"
    return f"{name} {'rose' if change > 0 else 'fell'} by {abs(change):.0%} {values}"


def _seconds_moved(name: str, before: float, after: float) -> str:
    return _moved(name, before, after, (format_seconds(before), format_seconds(after)))


def is_better(result: DemoResult) -> bool:
    """Whether remap was better: fewer preemptions than a baseline that had some (of more models than memory: first passes of cold
    models that ended sooner), more tokens per second, and no P99 latency that is worse by more than the noise.
    """
    before, after = numbers(result.baseline), numbers(result.remap)
    first = "cold_first_pass_s" if result.remap.cold else "preemptions"
    p99 = [_change(before[key], after[key]) for key in ("ttft_p99_s", "tbt_p99_s")]
    return (
        after[first] < before[first]
        and after["tokens_per_s"] > before["tokens_per_s"] * (1 + NOISE)
        and all(change is None or change <= NOISE for change in p99)
    )


def closing_sentence(result: DemoResult) -> str:
    """One sentence: the changes by remap, with the numbers, and whether the tokens are identical."""
    base, remap = result.baseline, result.remap
    before, after = numbers(base), numbers(remap)
    gave = f"remap gave up to {remap.layers_remapped_peak:g} of {remap.layers} layers' memory to the KV cache"
    if not remap.layers_remapped_peak:
        gave = "remap gave no layer's memory to the KV cache"
    parts = [
        _moved(
            "throughput",
            base.tokens_per_s,
            remap.tokens_per_s,
            (f"{base.tokens_per_s:.1f}", f"{remap.tokens_per_s:.1f} tokens/s"),
        ),
        _seconds_moved("P99 time to first token", before["ttft_p99_s"], after["ttft_p99_s"]),
        _seconds_moved("P99 time between tokens", before["tbt_p99_s"], after["tbt_p99_s"]),
    ]
    same = identical_requests(remap, result.unconstrained)
    tokens = (
        f"the tokens of all {result.requests} requests are identical to the unconstrained run's"
        if same == result.requests
        else f"the tokens of {result.requests - same} of {result.requests} requests differ from the unconstrained run's"
    )
    verdict = "" if is_better(result) else "not better in every respect here: "
    if remap.cold:
        gave = _cold_words(result)
    else:
        if not base.preemptions:
            verdict = "KV was not scarce, the baseline never preempted: "
        gave += f" ({base.kv_blocks_peak:,} to {remap.kv_blocks_peak:,} blocks)"
        preempted = (
            f"preemptions went from {base.preemptions} to {remap.preemptions}"
            if base.preemptions != remap.preemptions
            else f"both runs preempted {base.preemptions} times"
        )
        parts[:0] = [preempted, f"recomputed tokens from {base.recomputed_tokens:,} to {remap.recomputed_tokens:,}"]
    sentence = f"{verdict}in the same {show_size(result.budget_bytes)}, {gave}; {', '.join(parts)}; and {tokens}."
    return sentence[0].upper() + sentence[1:]


def _cold_words(result: DemoResult) -> str:
    """What has room, what was served, and how soon a cold model answers, beside what its load takes by itself."""
    before, after = result.baseline.cold, result.remap.cold
    words = (
        f"which holds {after['models_fitting']:g} of {after['models']:g} models at once "
        f"({after['requests_of_others']:g} of {result.requests} requests are for the others), remap served all"
    )
    load, ours, whole = before["cold_begin_s"], after["cold_first_pass_s"], before["cold_first_pass_s"]
    if not load:
        return f"{words}; no model had to leave"
    return (
        f"{words}; a cold model's first pass had ended {format_seconds(ours)} after its turn began ({ours / load:.2g} times its "
        f"load), where whole models that leave and come back take {format_seconds(whole)}, {format_seconds(load)} of it to load"
    )


@dataclass(frozen=True)
class Worse:
    """A figure by which remap is worse than the baseline. key: of `numbers`. change: relative, above 0."""

    key: str
    name: str
    before: float
    after: float
    change: float


_FIGURES = {
    "tokens_per_s": "tokens/s",
    "ttft_p50_s": "P50 time to first token",
    "ttft_p99_s": "P99 time to first token",
    "tbt_p50_s": "P50 time between tokens",
    "tbt_p99_s": "P99 time between tokens",
    "tpot_p99_s": "P99 of requests' mean time between tokens",
    "longest_gap_p99_s": "P99 of requests' longest gap between tokens",
}


def worse_figures(result: DemoResult) -> list[Worse]:
    """The figures by which remap is worse than the baseline by more than the noise, the worst first."""
    before, after = numbers(result.baseline), numbers(result.remap)
    found = []
    for key, name in _FIGURES.items():
        first, second = (after, before) if key == "tokens_per_s" else (before, after)  # more tokens/s are better
        change = _change(first[key], second[key])
        if change is not None and change > NOISE:
            found.append(Worse(key, name, before[key], after[key], change))
    return sorted(found, key=lambda each: -each.change)


def worse_sentence(result: DemoResult) -> str:
    """The metrics that got worse, the worst first, with both values; empty if nothing did."""
    found = worse_figures(result)
    if not found:
        return ""
    told = []
    for each in found:
        show = (lambda value: f"{value:.1f}") if each.key == "tokens_per_s" else format_seconds
        told.append(f"{each.name} {show(each.before)} to {show(each.after)}")
    base, ours = (max((point.running for point in run.timeline), default=0) for run in (result.baseline, result.remap))
    why = (
        f". Up to {ours} requests run at once, not {base}: a pass over more of them takes longer" if ours > base else ""
    )
    return f"Worse than the baseline: {', '.join(told)}{why}."


def differing_answers(result: DemoResult) -> str:
    """How many answers of each run differ from the unconstrained run's, and what that means."""
    base, ours = (identical_requests(run, result.unconstrained) for run in (result.baseline, result.remap))
    count = result.requests
    if base == ours == count:
        return f"The answers of both runs are the unconstrained run's, all {count} of them, token by token."
    told = f"Answers that differ from the unconstrained run's: {count - base} of {count} of the baseline, which never remaps, "
    return f"{told}and {count - ours} of remap. {IDENTICAL[0].upper()}{IDENTICAL[1:]}"


# --- the table -----------------------------------------------------------------------------------------------------

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(points: Sequence[StepSample], top: float, width: int = 11) -> str:
    """Layers remapped over time, as `width` characters; every character is the highest value of its share of time."""
    if not points or top <= 0:
        return ""
    end = points[-1].time_s or 1.0
    highest = [0.0] * width
    current, cell = 0.0, 0
    for point in points:
        target = min(int(point.time_s / end * width), width - 1)
        for passed in range(cell, target + 1):
            highest[passed] = max(highest[passed], current)
        current, cell = point.layers_remapped, target
        highest[cell] = max(highest[cell], current)
    return "".join(_BARS[min(round(value / top * (len(_BARS) - 1)), len(_BARS) - 1)] for value in highest)


def table_rows(result: DemoResult) -> list[tuple[str, str, str, str, str]]:
    """(what, unconstrained, baseline, remap, remap against baseline), ready to print."""
    runs = result.runs
    found = [numbers(run) for run in runs]

    def row(name: str, cells: list[str], change: float | None = None) -> tuple[str, str, str, str, str]:
        return (name, cells[0], cells[1], cells[2], "" if change is None else f"{change:+.0%}")

    def seconds(name: str, key: str) -> tuple[str, str, str, str, str]:
        return row(name, [format_seconds(n[key]) for n in found], _change(found[1][key], found[2][key]))

    def count(name: str, key: str) -> tuple[str, str, str, str, str]:
        return row(name, [f"{n[key]:,}" for n in found], _change(found[1][key], found[2][key]))

    rates = [run.tokens_per_s for run in runs]
    away = "without memory" if result.remap.cold else "remapped"
    return [
        row("memory budget", [show_size(run.capacity_bytes) for run in runs]),
        row(
            "KV blocks (start, peak)",
            [f"{run.kv_blocks_start:,} to {run.kv_blocks_peak:,}" for run in runs],
            _change(runs[1].kv_blocks_peak, runs[2].kv_blocks_peak),
        ),
        count("preemptions", "preemptions"),
        *([count("pauses, KV kept", "pauses")] if any(run.pauses for run in runs) else []),
        count("tokens recomputed", "recomputed_tokens"),
        row("tokens/s", [f"{rate:.1f}" for rate in rates], _change(rates[1], rates[2])),
        seconds("time to first token P50", "ttft_p50_s"),
        seconds("time to first token P99", "ttft_p99_s"),
        seconds("time between tokens P50", "tbt_p50_s"),
        seconds("time between tokens P99", "tbt_p99_s"),
        seconds("TPOT P99 (per request)", "tpot_p99_s"),
        seconds("longest gap P99", "longest_gap_p99_s"),
        row(f"layers {away} (peak)", [f"{run.layers_remapped_peak:g} of {run.layers}" for run in runs]),
        row("layers over time", [sparkline(run.timeline, run.layers) for run in runs]),
        row("stall share", [f"{run.stall_fraction:.1%}" for run in runs]),
        *_cold_rows(runs),
        row(
            "identical requests",
            ["reference", *(f"{identical_requests(run, runs[0])} of {result.requests}" for run in runs[1:])],
        ),
        *_tenant_rows(runs),
    ]


def _cold_rows(runs: Sequence[RunResult]) -> list[tuple[str, str, str, str, str]]:
    """The rows of turns, if there were more models than memory. With ample memory no turn is a cold start."""
    if not runs[2].cold:
        return []

    def row(name: str, key: str, show: Callable[[float], str], ample: str = "") -> tuple[str, str, str, str, str]:
        values = [run.cold[ample or key if place == 0 else key] for place, run in enumerate(runs)]
        change = _change(values[1], values[2])
        return (name, *map(show, values), "" if change is None else f"{change:+.0%}")  # type: ignore[return-value]

    return [
        row("cold starts", "cold_starts", "{:,.0f}".format),
        row("turn to pass begun P50", "cold_begin_s", format_seconds, "warm_begin_s"),
        row("turn to pass ended P50", "cold_first_pass_s", format_seconds, "warm_first_pass_s"),
        row("weights copied", "copied_bytes", lambda value: show_size(int(value))),
    ]


def _tenant_rows(runs: Sequence[RunResult]) -> list[tuple[str, str, str, str, str]]:
    """The rows of each tenant, if there are several."""

    def row(
        name: str, key: str, cells: list[str], each: Sequence[Mapping[str, float]]
    ) -> tuple[str, str, str, str, str]:
        change = _change(each[1][key], each[2][key])
        return (name, cells[0], cells[1], cells[2], "" if change is None else f"{change:+.0%}")

    rows = []
    for name in runs[0].tenants:
        each = [run.tenants[name] for run in runs]
        if runs[0].cold:
            label = f"{name} ({show_size(int(each[0]['weight_bytes']))}) TTFT P99"
            rows.append(row(label, "ttft_p99_s", [format_seconds(one["ttft_p99_s"]) for one in each], each))
            continue
        blocks = [f"{one['kv_blocks_start']:,} to {one['kv_blocks_peak']:,}" for one in each]
        rows.append(row(f"{name} KV blocks", "kv_blocks_peak", blocks, each))
        for what, key in (("first token P99", "ttft_p99_s"), ("next token P99", "tbt_p99_s")):
            rows.append(row(f"{name} {what}", key, [format_seconds(one[key]) for one in each], each))
    return rows


# The meaning of the row "identical requests", and its limits.
IDENTICAL = (
    "identical requests: a run forms other batches than the reference, and recomputes where it preempts; on some processors rows "
    "of other batches round otherwise, so that another token is chosen where two are nearly as good: both answers are right."
)


# What the runs of more models than memory are.
COLD = (
    "baseline: as with a sleep mode, whole models leave (the one used longest ago first) and come back; a pass begins when all "
    "layers have come. Turn to pass: of cold starts; unconstrained: of all turns. All models but SmolLM2 have random weights."
)


def caption(result: DemoResult) -> str:
    """What a reader has to know of the table."""
    return f"{COLD} {IDENTICAL[0].upper()}{IDENTICAL[1:]}" if result.remap.cold else IDENTICAL


def table(result: DemoResult) -> Table:
    """The rich table of `table_rows`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # Fits 80 columns: the default width of a terminal, and a log's.
    title = f"{result.model}: {result.requests} requests in {show_size(result.budget_bytes)}, n = 1"
    drawn = Table(title=title, caption=caption(result), caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("", no_wrap=True)
    for kind in KINDS:
        drawn.add_column(kind, justify="right", style="bold" if kind == "remap" else None, no_wrap=True)
    drawn.add_column("change", justify="right", no_wrap=True)
    for cells in table_rows(result):
        drawn.add_row(*cells)
    return drawn
