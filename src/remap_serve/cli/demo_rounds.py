# SPDX-License-Identifier: Apache-2.0
"""Several rounds of the demo in one table, with medians and ranges. Pure functions over the rounds' results.

A round is the three runs one after another, so that other work of the machine affects all three kinds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .demo_report import DemoResult, caption, identical_requests, numbers, to_json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["rounds_rows", "rounds_table", "rounds_to_json"]

Row = tuple[str, str, str, str, str]


def _spread(values: Sequence[float], show: Callable[[float], str], unit: str = "") -> str:
    """ "6.2 s (6.1 to 6.4)": the median and the range; one value where all look the same."""
    middle, low, high = show(statistics.median(values)), show(min(values)), show(max(values))
    return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low} to {high})"


def _seconds(values: Sequence[float]) -> str:
    if statistics.median(values) < 1:
        return _spread(values, lambda value: f"{value * 1e3:.3g}", " ms")
    return _spread(values, lambda value: f"{value:.3g}", " s")


def _changes(before: Sequence[float], after: Sequence[float]) -> str:
    """The change from baseline to remap within each round; empty if a baseline was 0."""
    if not all(before):
        return ""
    return _spread([b / a - 1 for a, b in zip(before, after, strict=True)], lambda value: f"{100 * value:+.0f}", " %")


def rounds_rows(rounds: Sequence[DemoResult]) -> list[Row]:
    """(what, unconstrained, baseline, remap, remap against baseline): medians of the rounds, with their ranges."""
    columns = [[numbers(result.runs[place]) for result in rounds] for place in range(3)]

    def row(what: str, key: str, show: Callable[[float], str] | None = None) -> Row:
        unconstrained, baseline, remap = ([one[key] for one in column] for column in columns)
        cells = (
            _seconds(values) if show is None else _spread(values, show) for values in (unconstrained, baseline, remap)
        )
        return (what, *cells, _changes(baseline, remap))  # type: ignore[return-value]

    same, kept = (
        _spread(
            [identical_requests(result.runs[place], result.unconstrained) for result in rounds],
            lambda n: f"{n:g}",
            f" of {rounds[0].requests}",
        )
        for place in (1, 2)
    )
    return [
        row("KV blocks, start", "kv_blocks_start", lambda n: f"{n:,.0f}"),
        row("KV blocks, peak", "kv_blocks_peak", lambda n: f"{n:,.0f}"),
        row("preemptions", "preemptions", lambda n: f"{n:,.0f}"),
        *([row("pauses, KV kept", "pauses", lambda n: f"{n:,.0f}")] if rounds[-1].remap.pauses else []),
        row("tokens recomputed", "recomputed_tokens", lambda n: f"{n:,.0f}"),
        row("tokens/s", "tokens_per_s", lambda n: f"{n:.1f}"),
        row("first token P50", "ttft_p50_s"),
        row("first token P99", "ttft_p99_s"),
        row("next token P50", "tbt_p50_s"),
        row("next token P99", "tbt_p99_s"),
        row("TPOT P99", "tpot_p99_s"),
        row("longest gap P99", "longest_gap_p99_s"),
        row("layers away" if rounds[0].remap.cold else "layers remapped", "layers_remapped_peak", lambda n: f"{n:g}"),
        row("stall share", "stall_fraction", lambda share: f"{share:.1%}"),
        *([row("cold start to pass", "cold_first_pass_s")] if rounds[0].remap.cold else []),
        ("same tokens", "reference", same, kept, ""),
    ]


def rounds_to_json(rounds: Sequence[DemoResult]) -> dict[str, Any]:
    """The contents of out/demo.json: the last round's, and all of them under "rounds"."""
    return {**to_json(rounds[-1]), "rounds": [to_json(result) for result in rounds]}


def rounds_table(rounds: Sequence[DemoResult]) -> Table:
    """The rich table of `rounds_rows`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{rounds[0].requests} requests, n = {len(rounds)} alternating rounds: median (range)"
    drawn = Table(title=title, caption=caption(rounds[0]), caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("", no_wrap=True)
    for kind in ("unconstrained", "baseline", "remap", "change"):
        drawn.add_column(
            kind, justify="right"
        )  # a narrow terminal breaks a range over two lines, and cuts no digit off
    for cells in rounds_rows(rounds):
        drawn.add_row(*(cell.replace(" (", "\n(") for cell in cells))  # the range below: fits 80 columns
    return drawn
