"""Several rounds of the demo: medians, ranges, and changes within a round (remap_serve.cli.demo_rounds)."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from test_demo_report import make_result, make_run

from remap_serve.cli import demo
from remap_serve.cli.demo_config import DemoConfig
from remap_serve.cli.demo_report import DemoResult
from remap_serve.cli.demo_rounds import rounds_rows, rounds_table, rounds_to_json


def rounds() -> list[DemoResult]:
    """Three rounds: remap takes 20, 24 and 10 s where the baseline takes 30; one of them answers one request otherwise."""
    made = [make_result(), make_result(wall_s=24.0), make_result(wall_s=10.0, preemptions=3)]
    other = list(made[2].remap.tokens)
    other[5] = (1, 2, 3)
    made[2] = make_result(wall_s=10.0, preemptions=3, tokens=tuple(other))
    return made


def test_a_row_is_the_median_with_its_range() -> None:
    rows = {row[0]: row[1:] for row in rounds_rows(rounds())}
    generated = make_run("remap").generated_tokens
    assert rows["tokens/s"][1] == f"{generated / 30:.1f}"  # the same in all rounds: no range
    assert rows["preemptions"] == ("0", "14", "0 (0 to 3)", "-100 % (-100 to -79)")
    assert rows["tokens/s"][2].startswith(f"{generated / 20:.1f} ({generated / 24:.1f} to ")
    assert rows["layers remapped"][3] == "" and rows["stall share"][3] == ""  # nothing is divided by a baseline of zero
    assert rows["same tokens"] == ("reference", "48 of 48", "48 of 48 (47 to 48)", "")


def test_the_table_cuts_no_figure_off_in_a_log_of_80_columns() -> None:
    several = [make_result(wall_s=wall_s, ttft_s=(wall_s / 3,) * 48) for wall_s in (20.01, 24.02, 10.03)]
    out = io.StringIO()
    Console(file=out, width=80).print(rounds_table(several))
    text = out.getvalue()
    assert "…" not in text
    words = set(text.split())
    for row in rounds_rows(several):
        assert words.issuperset(" ".join(row).split()), row


def test_json_of_several_rounds_holds_each() -> None:
    data = json.loads(json.dumps(rounds_to_json(rounds())))
    assert [one["remap"]["preemptions"] for one in data["rounds"]] == [0, 0, 3]
    assert data["remap"]["preemptions"] == 3 and data["tokens_identical"] is False


@pytest.mark.parametrize("asked", [1, 3])
def test_the_command_runs_so_many_rounds_and_writes_after_each(asked, tmp_path, monkeypatch) -> None:
    made = rounds()
    seen: list[bool] = []

    def run(config: DemoConfig, console: Console) -> DemoResult:
        seen.append((tmp_path / "demo.json").exists())
        return made[len(seen) - 1]

    monkeypatch.setattr(demo, "run_demo", run)
    out = io.StringIO()
    results = demo.demo(DemoConfig(), tmp_path, Console(file=out, width=200), asked)
    assert len(results) == asked and seen == [False, True, True][:asked]
    data = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert len(data.get("rounds", [data])) == asked
    assert ("48 requests, n = 3 alternating rounds: median" in out.getvalue()) is (asked == 3)
