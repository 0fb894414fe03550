"""The demo's report from synthetic runs: the numbers of demo.json, an honest sentence, a self-contained page."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages_seen import Page
from rich.console import Console

from remap.errors import InvalidArgument
from remap_serve.cli.demo_html import MAX_POINTS, page, thin, ticks
from remap_serve.cli.demo_report import (
    DemoResult,
    RunResult,
    closing_sentence,
    differing_answers,
    identical_requests,
    is_better,
    sparkline,
    table,
    table_rows,
    to_json,
    worse_figures,
    worse_sentence,
)
from remap_serve.cli.demo_rounds import rounds_rows
from remap_serve.engine.metrics import StepSample

TOKENS = tuple(tuple(range(i, i + 20)) for i in range(48))


def make_run(kind: str, **changes: object) -> RunResult:
    gave = [6 if kind == "remap" and i > 100 else 0 for i in range(300)]
    points = tuple(
        StepSample(i * 0.1, min(i, 200), 210 + 15 * gave[i], gave[i], min(i, 20), max(48 - i, 0), 0, 8, 0.1)
        for i in range(300)
    )
    times = {"ttft_s": tuple(0.1 * i for i in range(1, 49)), "tbt_s": tuple(0.05 + 0.0001 * i for i in range(48 * 19))}
    times["tpot_s"] = tuple(0.06 + 0.001 * i for i in range(48))
    times["longest_gap_s"] = tuple(0.2 + 0.001 * i for i in range(48))
    kv = {"capacity_bytes": 512 << 20, "kv_blocks_start": 210, "kv_blocks_peak": 210, "layers_remapped_peak": 0}
    served = {"wall_s": 30.0, "preemptions": 0, "recomputed_tokens": 0, "stall_fraction": 0.0, "layers": 30}
    return RunResult(**{"kind": kind, **times, **kv, **served, "tokens": TOKENS, "timeline": points, **changes})  # type: ignore[arg-type]


def make_result(**remap_changes: object) -> DemoResult:
    gain = {"wall_s": 20.0, "kv_blocks_peak": 300, "layers_remapped_peak": 6, "stall_fraction": 0.0125}
    return DemoResult(
        model="SmolLM2-135M-Instruct",
        budget_bytes=512 << 20,
        unconstrained=make_run("unconstrained", capacity_bytes=2 << 30, kv_blocks_start=900, kv_blocks_peak=900),
        baseline=make_run("baseline", preemptions=14, recomputed_tokens=3120),
        remap=make_run("remap", **{**gain, **remap_changes}),
        machine={"cpu": "<two> & more", "cores": 2},
        settings={"threads": 1},
    )


def test_json_has_exactly_the_documented_keys() -> None:
    data = json.loads(json.dumps(to_json(make_result())))
    kinds = ["unconstrained", "baseline", "remap"]
    assert list(data) == ["model", "budget_bytes", "requests", "tokens_identical", *kinds, "machine"]
    assert [data[kind]["identical_requests"] for kind in kinds] == [data["requests"]] * 3
    figures = "preemptions pauses recomputed_tokens tokens_per_s ttft_p50_s ttft_p99_s tbt_p50_s tbt_p99_s tpot_p99_s"
    figures += " longest_gap_p99_s kv_blocks_start kv_blocks_peak layers_remapped_peak stall_fraction"
    figures += " identical_requests"
    for kind in kinds:
        assert list(data[kind]) == figures.split()
    assert data["budget_bytes"] == 512 << 20
    assert data["requests"] == 48
    assert data["tokens_identical"] is True
    assert data["baseline"]["preemptions"] == 14
    assert data["baseline"]["tokens_per_s"] == pytest.approx(960 / 30)
    assert data["remap"]["tokens_per_s"] == pytest.approx(960 / 20)
    assert data["remap"]["ttft_p50_s"] == pytest.approx(2.45)


def test_a_pause_whose_kv_is_kept_is_no_preemption() -> None:
    """Three models: "preemptions 13 to 240", where nothing was computed again."""
    alone = make_result()
    assert not any(row[0].startswith("pauses") for row in table_rows(alone))
    kept = replace(alone, remap=replace(alone.remap, pauses=240))
    rows = {row[0]: row[1:] for row in table_rows(kept)}
    assert rows["preemptions"] == ("0", "14", "0", "-100%")
    assert rows["pauses, KV kept"] == ("0", "0", "240", "")
    assert "pauses, KV kept" in {row[0] for row in rounds_rows([kept, kept])} - {
        row[0] for row in rounds_rows([alone, alone])
    }


def test_one_different_token_is_reported() -> None:
    tokens = (*TOKENS[:-1], (*TOKENS[-1][:-1], 7))
    result = make_result(tokens=tokens)
    assert to_json(result)["tokens_identical"] is False
    assert identical_requests(result.remap, result.unconstrained) == 47
    assert "the tokens of 1 of 48 requests differ" in closing_sentence(result)
    with pytest.raises(InvalidArgument):
        identical_requests(make_run("remap", tokens=TOKENS[:3]), result.unconstrained)


def test_closing_sentence_when_remap_is_better() -> None:
    result = make_result()
    assert is_better(result)
    assert closing_sentence(result) == (
        "In the same 512 MiB, remap gave up to 6 of 30 layers' memory to the KV cache (210 to 300 blocks); "
        "preemptions went from 14 to 0, recomputed tokens from 3,120 to 0, "
        "throughput rose by 50% (32.0 to 48.0 tokens/s), P99 time to first token stayed (4.75 s to 4.75 s), "
        "P99 time between tokens stayed (140 ms to 140 ms); "
        "and the tokens of all 48 requests are identical to the unconstrained run's."
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"wall_s": 40.0}, "throughput fell by 25%"),
        ({"ttft_s": tuple(0.2 * i for i in range(1, 49))}, "P99 time to first token rose by 100%"),
        ({"preemptions": 14}, "both runs preempted 14 times"),
        ({"preemptions": 20}, "preemptions went from 14 to 20"),
    ],
)
def test_closing_sentence_when_remap_is_not_better(changes: dict[str, object], expected: str) -> None:
    result = make_result(**changes)
    assert not is_better(result)
    sentence = closing_sentence(result)
    assert sentence.startswith("Not better in every respect here: in the same")
    assert expected in sentence


def test_closing_sentence_says_when_kv_was_not_scarce() -> None:
    result = make_result(layers_remapped_peak=0)
    sentence = closing_sentence(replace(result, baseline=make_run("baseline")))
    assert sentence.startswith("KV was not scarce, the baseline never preempted: ")
    assert "remap gave no layer's memory" in sentence


def test_what_got_worse_is_said_with_the_worst_first_and_has_a_tile() -> None:
    assert worse_sentence(make_result()) == "" and "tile bad" not in page(make_result())
    slower = make_result(
        tbt_s=tuple(0.1 + 0.0001 * i for i in range(48 * 19)), ttft_s=tuple(0.1005 * i for i in range(1, 49))
    )
    # The first token moves by half a percent: as much as two runs of the same code differ by
    assert [figure.key for figure in worse_figures(slower)] == ["tbt_p50_s", "tbt_p99_s"]
    assert worse_sentence(slower) == (
        "Worse than the baseline: P50 time between tokens 95.5 ms to 146 ms, P99 time between tokens 140 ms to 190 ms."
    )
    html = page(slower)
    assert worse_sentence(slower) in html and html.count('class="tile bad"') == 2 and html.count('class="tile') == 6
    fewer = make_result(wall_s=40.0)
    assert worse_sentence(fewer) == "Worse than the baseline: tokens/s 32.0 to 24.0."
    more = replace(
        slower, remap=replace(slower.remap, timeline=tuple(replace(p, running=30) for p in slower.remap.timeline))
    )
    assert worse_sentence(more).endswith(
        "Up to 30 requests run at once, not 20: a pass over more of them takes longer."
    )


def test_the_page_says_whose_answers_differ_and_why() -> None:
    assert differing_answers(make_result()).startswith("The answers of both runs are the unconstrained run's, all 48")
    result = make_result()
    tokens = (*TOKENS[:-2], *((*each[:-1], 7) for each in TOKENS[-2:]))
    differing = replace(result, baseline=replace(result.baseline, tokens=tokens))
    said = differing_answers(differing)
    assert "2 of 48 of the baseline, which never remaps, and 0 of remap" in said and "both answers are right" in said
    assert said in Page(page(differing)).text


def test_sparkline_holds_values_between_points() -> None:
    def at(time_s: float, layers: int) -> StepSample:
        return StepSample(time_s, 0, 0, layers, 0, 0, 0, 0, 0.0)

    assert sparkline([at(0, 0), at(2, 8), at(9, 0), at(10, 0)], top=8, width=10) == "▁▁████████"
    assert sparkline([at(0, 0), at(10, 0)], top=8, width=4) == "▁▁▁▁"
    assert sparkline([], top=8) == ""


def test_table_compares_remap_with_baseline() -> None:
    result = make_result()
    rows = {row[0]: row[1:] for row in table_rows(result)}
    assert rows["preemptions"] == ("0", "14", "0", "-100%")
    assert rows["tokens/s"] == ("32.0", "32.0", "48.0", "+50%")
    assert rows["memory budget"][:3] == ("2 GiB", "512 MiB", "512 MiB")
    assert rows["identical requests"][:3] == ("reference", "48 of 48", "48 of 48")
    assert rows["stall share"][2] == "1.2%"
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(result))
    text = console.export_text()
    assert "…" not in text and re.search(r"time between tokens P99 .* 140 ms", text)


@given(st.floats(0, 1e7), st.integers(2, 8), st.booleans())
def test_ticks_cover_the_values_in_round_steps(top: float, count: int, integer: bool) -> None:
    marks = ticks(top, count, integer)
    assert marks[0] == 0
    assert marks[-1] >= top * (1 - 1e-6)
    assert 2 <= len(marks) <= 2 * count + 2
    if integer:
        assert all(mark == pytest.approx(round(mark)) for mark in marks)


def test_page_is_whole_and_self_contained() -> None:
    result = make_result()
    html = page(result)
    assert Page(html).tags.count("svg") == 8
    assert not re.search(r"(src|href)=|url\(|@import|https?://", html)
    assert "&lt;two&gt; &amp; more" in html and "prefers-color-scheme:dark" in html
    # Names for who cannot see charts and tables.
    assert len(re.findall(r'<svg [^>]*role="img" aria-label="[^"]+, (?:baseline|remap)"', html)) == 8
    rows = html[html.index("<tbody>") : html.index("</tbody>")]
    assert rows.count('<tr><th scope="row">') == rows.count("<tr>") == len(table_rows(result)) - 1
    assert "layers over time" not in rows  # a chart shows them
    # Charts of both runs share their axes, also of runs of unequal length or without a timeline.
    shorter = page(replace(result, remap=replace(result.remap, timeline=result.remap.timeline[:150])))
    assert set(re.findall(r'data-end="([^"]+)"', shorter)) == {"29.9"}
    nothing = page(replace(make_result(timeline=()), baseline=make_run("baseline", timeline=())))
    assert nothing.count("<svg") == 8 and "nan" not in nothing.lower().replace("unconstrained", "")


def test_what_comes_from_outside_cannot_become_markup() -> None:
    hostile = """</script><img src=x onerror="alert('1')">{{ 7 * 7 }}&amp;"""
    result = make_result()
    html = page(replace(result, model=hostile, settings={hostile: hostile}, machine={"cpu": hostile}))
    tags = Page(html).tags
    assert "img" not in tags and tags.count("script") == 2
    escaped = "&lt;/script&gt;&lt;img src=x onerror=&#34;alert(&#39;1&#39;)&#34;&gt;{{ 7 * 7 }}&amp;amp;"
    assert html.count(escaped) == 5  # in the title, above the headline, twice among the settings, and of the machine


def test_the_script_gets_the_lines_that_are_drawn() -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page(make_result()))
    assert found
    runs = json.loads(found.group(1))
    assert set(runs) == {"baseline", "remap"}
    assert all(len(run["charts"]) == 4 for run in runs.values())
    name, values = runs["remap"]["charts"][1][0]
    assert (name, max(values), len(values)) == ("layers", 6, len(runs["remap"]["t"]))


def test_thin_keeps_both_ends() -> None:
    points = [StepSample(float(i), 0, 0, 0, 0, 0, 0, 0, 0.0) for i in range(5 * MAX_POINTS + 3)]
    kept = thin(points)
    assert len(kept) <= MAX_POINTS + 1 and (kept[0], kept[-1]) == (points[0], points[-1])
    assert thin(points[:10]) == points[:10]
